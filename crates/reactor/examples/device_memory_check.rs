//! Checks of staging in a device's memory: `cargo xtask guest p2p` runs them in a guest whose NVMe controller has some.
//!
//! `device_memory_check DISK PLAIN FILE`: a disk whose controller has memory, one whose has none, and a file that lies on no
//! disk. What is on the first disk is lost. The device moves the bytes; they are looked at by the CPU here, which a server
//! never does, and compared with what goes through main memory.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use byway_reactor::device_memory::{DeviceMemory, DeviceMemoryError, offers};
use byway_reactor::limits::FRAME_BYTES_MAX;
use byway_reactor::{Completion, FileOptions, Frame, FramePool, IoChoice, Op, OpenFile, Outcome, Reactor, Token, Wait};

type Checked = Result<String, Box<dyn std::error::Error>>;
type Check<'a> = (&'static str, Box<dyn Fn() -> Checked + 'a>);

/// Bytes of the disk that are written and read.
const BYTES: usize = 8 << 20;
const SECTOR_BYTES: usize = 512;
/// Reads and writes of odd numbers of sectors at random places.
const TRANSFERS: usize = 150;
/// The longest of them.
const SECTORS_MAX: usize = 255;
const POOL_BYTES: usize = 2 << 20;
/// One of many neighbours; some of them would be merged, and be long enough for SGL descriptors.
const PIECE_BYTES: usize = 64 << 10;
/// What a frame is filled with before a transfer, to see what it leaves alone.
const CANARY: u8 = 0xc5;
/// How long one operation may take under emulation.
const PATIENCE: Duration = Duration::from_secs(60);

macro_rules! ensure {
    ($holds:expr, $($said:tt)*) => {
        if !$holds {
            return Err(format!($($said)*).into());
        }
    };
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [disk, plain, file] = &arguments[..] else {
        eprintln!("usage: device_memory_check DISK PLAIN FILE");
        return ExitCode::from(2);
    };
    let [disk, plain, file] = [disk, plain, file].map(Path::new);
    let checks: [Check<'_>; 10] = [
        ("refusals", Box::new(|| refusals(plain, file))),
        ("allocation", Box::new(|| allocation(disk))),
        ("uring reads", Box::new(|| reads(disk, IoChoice::Uring))),
        ("uring writes", Box::new(|| writes(disk, IoChoice::Uring))),
        ("uring neighbours", Box::new(|| neighbours(disk, IoChoice::Uring, 1))),
        ("uring mixed", Box::new(|| neighbours(disk, IoChoice::Uring, 2))),
        ("epoll neighbours", Box::new(|| neighbours(disk, IoChoice::Epoll, 1))),
        ("epoll mixed", Box::new(|| neighbours(disk, IoChoice::Epoll, 2))),
        ("epoll reads", Box::new(|| reads(disk, IoChoice::Epoll))),
        ("epoll writes", Box::new(|| writes(disk, IoChoice::Epoll))),
    ];
    let mut failed = false;
    for (name, check) in &checks {
        match check() {
            Ok(said) => println!("ok {name}: {said}"),
            Err(error) => {
                failed = true;
                println!("FAILED {name}: {error}");
            }
        }
    }
    if failed {
        return ExitCode::FAILURE;
    }
    println!("device_memory_check: PASSED");
    ExitCode::SUCCESS
}

/// What has no memory is refused, and the error says what is missing.
fn refusals(plain: &Path, file: &Path) -> Checked {
    let error = DeviceMemory::of_disk(plain).err().ok_or("a controller without memory has some")?;
    ensure!(matches!(error, DeviceMemoryError::NotOffered { .. }), "{error}");
    println!("   {error}");
    let error = DeviceMemory::of_disk(file).err().ok_or("a file in memory lies on a disk")?;
    ensure!(matches!(error, DeviceMemoryError::NoDisk { .. }), "{error}");
    println!("   {error}");
    Ok("both named".to_owned())
}

/// All of the memory can be had, no more than all, and it comes back.
fn allocation(disk: &Path) -> Checked {
    let memory = DeviceMemory::of_disk(disk)?;
    memory.try_page()?;
    let here = || offers().into_iter().find(|offer| offer.function == memory.function()).ok_or("it is not listed");
    let before = here()?;
    let mut pools = Vec::new();
    let error = loop {
        match memory.pool(16 << 20) {
            Ok(pool) => pools.push(pool),
            Err(error) => break error,
        }
        ensure!(pools.len() < 1000, "it never ends");
    };
    ensure!(matches!(error, DeviceMemoryError::Allocate { .. }), "{error}");
    println!("   {error}");
    let total: usize = pools.iter().map(FramePool::bytes).sum();
    let left = before.available_bytes - total as u64;
    ensure!(left < FRAME_BYTES_MAX as u64, "{left} bytes could not be had");
    drop(pools);
    let after = here()?;
    ensure!(before == after, "{before:?} became {after:?}");
    Ok(format!(
        "{} bytes of function {}, {} free, {total} handed out",
        before.bytes, before.function, before.available_bytes
    ))
}

/// The whole disk, then random places, into the device's memory; compared with what the CPU wrote through main memory.
fn reads(disk: &Path, io: IoChoice) -> Checked {
    let content = fill(disk, 1)?;
    let mut rig = Rig::new(disk, io)?;
    for offset in (0..BYTES).step_by(FRAME_BYTES_MAX) {
        let frame = rig.frame(FRAME_BYTES_MAX)?;
        let frame = rig.read(frame, offset, 0, FRAME_BYTES_MAX)?;
        ensure!(frame.to_vec()[..] == content[offset..][..FRAME_BYTES_MAX], "other bytes in the MiB at {offset}");
    }
    let mut random = Random(7);
    for _ in 0..TRANSFERS {
        let (offset, start, len) = random.transfer();
        let frame = rig.frame(start + len + SECTOR_BYTES)?;
        let frame = rig.read(frame, offset, start, len)?;
        ensure!(frame.to_vec()[start..][..len] == content[offset..][..len], "other bytes in {len} at {offset}");
        let untouched =
            frame.to_vec()[..start].iter().chain(&frame.to_vec()[start + len..]).all(|byte| *byte == CANARY);
        ensure!(untouched, "a read of {len} bytes at {offset} wrote beside its place");
    }
    let counters = rig.reactor.counters();
    ensure!(counters.read_device_bytes == counters.read_direct_bytes, "{counters:?}");
    ensure!(counters.read_copied_bytes == 0, "{counters:?}");
    Ok(format!("{} bytes by the device alone", counters.read_device_bytes))
}

/// Random places, later ones over earlier ones, out of the device's memory; then the disk read through main memory.
fn writes(disk: &Path, io: IoChoice) -> Checked {
    let mut content = fill(disk, 2)?;
    let mut rig = Rig::new(disk, io)?;
    let mut random = Random(9);
    for _ in 0..TRANSFERS {
        let (offset, start, len) = random.transfer();
        let mut frame = rig.frame(start + len + SECTOR_BYTES)?;
        let part = &mut content[offset..][..len];
        part.fill_with(|| random.next() as u8);
        frame.write(start, part);
        rig.write(frame, offset, start, len)?;
    }
    let counters = rig.reactor.counters();
    ensure!(counters.written_device_bytes == counters.written_direct_bytes, "{counters:?}");
    drop(rig);
    forget_cache(disk)?;
    let mut seen = vec![0; BYTES];
    File::open(disk)?.read_exact_at(&mut seen, 0)?;
    ensure!(seen == content, "other bytes on the disk");
    Ok(format!("{} bytes by the device alone", counters.written_device_bytes))
}

/// Neighbouring pieces at once, one of `turns` in the device's memory and the others in main memory: a kernel that made one
/// command of two of them would have it refused.
fn neighbours(disk: &Path, io: IoChoice, turns: usize) -> Checked {
    let mut content = fill(disk, 3)?;
    let mut rig = Rig::new(disk, io)?;
    let pieces = POOL_BYTES / PIECE_BYTES;
    for round in 0..BYTES / PIECE_BYTES / pieces {
        let first = round * pieces;
        // Taken from the end: neighbours on the disk are none in memory, where they would be one piece.
        let mut frames = (0..pieces).map(|piece| rig.frame_by_turns(piece, turns)).collect::<Result<Vec<_>, _>>()?;
        for (piece, into) in (first..first + pieces).zip(std::iter::from_fn(|| frames.pop())) {
            let offset = (piece * PIECE_BYTES) as u64;
            let op = Op::Read { file: rig.file, offset, into, start: 0, len: PIECE_BYTES };
            rig.reactor.submit(op, Token::new(1, 0, piece as u32, 0));
        }
        for completion in rig.completions(pieces)? {
            let offset = completion.token.index() as usize * PIECE_BYTES;
            let Outcome::Read { mut into, result: Ok(PIECE_BYTES) } = completion.outcome else {
                return Err(format!("at {offset}: {:?}", completion.outcome).into());
            };
            ensure!(into.to_vec()[..] == content[offset..][..PIECE_BYTES], "other bytes at {offset}");
            // Written back changed, while the others still are read.
            content[offset..][..PIECE_BYTES].iter_mut().for_each(|byte| *byte = !*byte);
            into.write(0, &content[offset..][..PIECE_BYTES]);
            let offset = offset as u64;
            let op = Op::Write { file: rig.file, offset, from: into, start: 0, len: PIECE_BYTES, durable: false };
            rig.reactor.submit(op, completion.token);
        }
        for completion in rig.completions(pieces)? {
            let done = matches!(completion.outcome, Outcome::Written { result: Ok(PIECE_BYTES), .. });
            ensure!(done, "piece {}: {:?}", completion.token.index(), completion.outcome);
        }
    }
    let counters = rig.reactor.counters();
    ensure!(counters.read_device_bytes * turns as u64 == counters.read_direct_bytes, "{counters:?}");
    drop(rig);
    forget_cache(disk)?;
    let mut seen = vec![0; BYTES];
    File::open(disk)?.read_exact_at(&mut seen, 0)?;
    ensure!(seen == content, "other bytes on the disk");
    Ok(format!("{pieces} neighbours of {PIECE_BYTES} bytes at once"))
}

/// Writes the disk through main memory; no sector is like another.
fn fill(disk: &Path, round: u64) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
    let mut content = vec![0; BYTES];
    for (number, sector) in content.chunks_exact_mut(SECTOR_BYTES).enumerate() {
        let mut random = Random((number as u64 + 1) << 8 | round);
        sector.fill_with(|| random.next() as u8);
    }
    let file = File::options().write(true).open(disk)?;
    file.write_all_at(&content, 0)?;
    file.sync_all()?;
    forget_cache(disk)?;
    Ok(content)
}

/// What is read next comes from the disk.
fn forget_cache(disk: &Path) -> std::io::Result<()> {
    File::open(disk)?.sync_all()?;
    std::fs::write("/proc/sys/vm/drop_caches", "3")
}

/// A loop, the disk past the page cache, and a pool in its controller.
struct Rig {
    reactor: Reactor,
    file: byway_reactor::File,
    pool: FramePool,
}

impl Rig {
    fn new(disk: &Path, io: IoChoice) -> Result<Self, Box<dyn std::error::Error>> {
        let mut reactor = Reactor::open(io, POOL_BYTES)?;
        let open = OpenFile::open(disk, FileOptions { direct: true, ..FileOptions::default() })?;
        let file = reactor.add_file(Arc::new(open));
        let pool = DeviceMemory::of_disk(disk)?.pool(POOL_BYTES)?;
        Ok(Self { reactor, file, pool })
    }

    fn frame(&self, len: usize) -> Result<Frame, &'static str> {
        let mut frame = self.pool.alloc(len).ok_or("no frame is free")?;
        frame.fill(CANARY);
        Ok(frame)
    }

    /// A frame of the device, or of main memory.
    fn frame_by_turns(&self, number: usize, turns: usize) -> Result<Frame, &'static str> {
        let pool = if number.is_multiple_of(turns) { &self.pool } else { self.reactor.frames() };
        pool.alloc(PIECE_BYTES).ok_or("no frame is free")
    }

    /// Waits for the ends of so many operations.
    fn completions(&mut self, count: usize) -> Result<Vec<Completion>, Box<dyn std::error::Error>> {
        let deadline = self.reactor.now() + PATIENCE;
        let mut ended = Vec::new();
        while ended.len() < count {
            ensure!(self.reactor.now() < deadline, "an operation does not end");
            self.reactor.reap(&mut ended, Wait::Until(deadline))?;
            ended.retain(|completion| completion.token != Token::WAKE);
        }
        Ok(ended)
    }

    fn done(&mut self, op: Op) -> Result<Outcome, Box<dyn std::error::Error>> {
        self.reactor.submit(op, Token::new(1, 0, 0, 0));
        Ok(self.completions(1)?.remove(0).outcome)
    }

    fn read(
        &mut self,
        into: Frame,
        offset: usize,
        start: usize,
        len: usize,
    ) -> Result<Frame, Box<dyn std::error::Error>> {
        match self.done(Op::Read { file: self.file, offset: offset as u64, into, start, len })? {
            Outcome::Read { into, result: Ok(n) } if n == len => Ok(into),
            other => Err(format!("{len} bytes at {offset}: {other:?}").into()),
        }
    }

    fn write(
        &mut self,
        from: Frame,
        offset: usize,
        start: usize,
        len: usize,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let op = Op::Write { file: self.file, offset: offset as u64, from, start, len, durable: false };
        match self.done(op)? {
            Outcome::Written { result: Ok(n), .. } if n == len => Ok(()),
            other => Err(format!("{len} bytes at {offset}: {other:?}").into()),
        }
    }
}

/// Xorshift64: any sequence does, as long as it is the same each time.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// Place on the disk, place in a frame, and length: whole sectors.
    fn transfer(&mut self) -> (usize, usize, usize) {
        let sectors = 1 + self.below(SECTORS_MAX);
        let offset = self.below(BYTES / SECTOR_BYTES - sectors);
        let start = self.below(9);
        (offset * SECTOR_BYTES, start * SECTOR_BYTES, sectors * SECTOR_BYTES)
    }
}
