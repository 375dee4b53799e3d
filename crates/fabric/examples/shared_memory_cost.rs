//! `cargo run --release -p byway-fabric --example shared_memory_cost`: what it costs to fetch bytes of another process on this host.
//!
//! The other process is this program once more. First, ways to fetch: by the kernel (`process_vm_readv`), by a get from private
//! memory (two copies, through the rings), by a get from memory that is lent (one copy), and a plain copy within this process.
//! Then, what a window costs that is opened for each get, beside one that stays open; both take the same messages. Rounds are
//! interleaved; each figure is the median of them. docs/decisions/0028 and 0029 have the outcome.

use std::time::{Duration, Instant};

use byway_fabric::node::{Deadline, Descriptor, Memory, Node, NodeOptions, Rights, Session, Window, parse_address};

type Error = Box<dyn std::error::Error>;

const ROUNDS: usize = 7;
const SIZES: [usize; 3] = [64 << 10, 1 << 20, 16 << 20];
const BYTES_MAX: usize = SIZES[SIZES.len() - 1];
/// What is moved in a round, in transfers of each size at least [`TRANSFERS_MIN`].
const ROUND_BYTES: usize = 32 << 20;
const TRANSFERS_MIN: usize = 8;
/// Windows that are opened each for a get, in a round.
const WINDOWS: usize = 64;

const fn soon() -> Deadline {
    Deadline::NEVER
}

/// What the other process has.
struct Owner {
    node: Node,
    session: Session,
    /// Which it keeps to itself, in which a window is open, and in which there is none.
    private: Memory,
    lent: Memory,
    other: Memory,
}

impl Owner {
    fn new(address: &str) -> Result<Self, Error> {
        let node = Node::open(&NodeOptions::default())?;
        node.listen(&parse_address(address)?)?;
        println!("ready");
        let session = node.accept(soon())?;
        let (private, lent) = (node.register(BYTES_MAX)?, node.register_shared(BYTES_MAX)?);
        let other = node.register_shared(BYTES_MAX)?;
        for memory in [&private, &lent, &other] {
            memory.write(0, &vec![7; BYTES_MAX])?;
        }
        Ok(Self { node, session, private, lent, other })
    }

    fn open(&self, memory: &Memory, len: usize) -> Result<Window, Error> {
        Ok(self.node.open_window(self.session, memory, 0..len, Rights::GET)?)
    }

    fn say(&self, header: &[u8], payload: &[u8]) -> Result<(), Error> {
        self.node.send(self.session, header, payload)?;
        Ok(())
    }

    /// Says where the memory lies, then does what it is asked for until the session ends.
    fn serve(&self) -> Result<(), Error> {
        let windows = [self.open(&self.private, BYTES_MAX)?, self.open(&self.lent, BYTES_MAX)?];
        for window in &windows {
            self.say(b"window", &window.descriptor().to_bytes())?;
        }
        let place = [u64::from(std::process::id()), self.private.as_ptr().expose_provenance() as u64];
        self.say(b"place", &place.map(u64::to_le_bytes).concat())?;
        while let Ok(message) = self.node.receive_from(self.session, soon()) {
            let len = message.payload.first_chunk().copied().map(u64::from_le_bytes).ok_or("no length")?;
            let memory = match &message.header[..] {
                b"kept" => None,
                b"each" => Some(&self.other),
                b"rings" => Some(&self.private),
                _ => return Err("a message that nobody knows".into()),
            };
            let opened = memory.map(|memory| self.open(memory, usize::try_from(len)?)).transpose()?;
            self.say(b"window", &opened.as_ref().unwrap_or(&windows[1]).descriptor().to_bytes())?;
            self.node.receive_from(self.session, soon())?;
            if let Some(window) = opened {
                window.close()?.wait(soon())??;
            }
            self.say(b"done", &[])?;
        }
        Ok(())
    }
}

/// This process, and what it knows of the other.
struct User {
    node: Node,
    session: Session,
    /// Windows in its private memory, and in what it lends.
    private: Descriptor,
    shared: Descriptor,
    owner: (libc::pid_t, usize),
    into: Memory,
}

#[derive(Clone, Copy, Debug)]
enum Way {
    Kernel,
    Rings,
    Lent,
    Copy,
}

const WAYS: [Way; 4] = [Way::Kernel, Way::Rings, Way::Lent, Way::Copy];

/// How the window of a get is had.
#[derive(Clone, Copy, Debug)]
enum Opened {
    Kept,
    EachTime,
    /// In private memory: there is nothing to be mapped, and two copies.
    EachTimeThroughRings,
}

const OPENED: [Opened; 3] = [Opened::Kept, Opened::EachTime, Opened::EachTimeThroughRings];

impl User {
    fn connect(address: &str) -> Result<Self, Error> {
        let node = Node::open(&NodeOptions::default())?;
        let session = node.connect(&parse_address(address)?, Deadline::after(Duration::from_secs(20)))?;
        let receive = || node.receive_from(session, soon());
        let window = |payload: &[u8]| payload.first_chunk().map(Descriptor::from_bytes).ok_or("no descriptor");
        let (private, shared) = (window(&receive()?.payload)?, window(&receive()?.payload)?);
        let place = receive()?.payload;
        let word =
            |at: usize| place.get(at..at + 8).and_then(|word| word.first_chunk()).copied().map(u64::from_le_bytes);
        let (pid, address) = (word(0).ok_or("no process")?, word(8).ok_or("no address")?);
        let owner = (libc::pid_t::try_from(pid)?, usize::try_from(address)?);
        let into = node.register(BYTES_MAX)?;
        into.write(0, &vec![1; into.len()])?;
        Ok(Self { node, session, private, shared, owner, into })
    }

    fn get(&self, window: &Descriptor, len: usize) -> Result<(), Error> {
        self.node.get(self.session, window, 0, &[self.into.segment(0..len)])?.wait(soon())??;
        Ok(())
    }

    fn fetch(&self, way: Way, len: usize, plain: &[u8]) -> Result<(), Error> {
        match way {
            Way::Rings => self.get(&self.private, len),
            Way::Lent => self.get(&self.shared, len),
            Way::Kernel => {
                let into = libc::iovec { iov_base: self.into.as_ptr().cast(), iov_len: len };
                let from = libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(self.owner.1), iov_len: len };
                // SAFETY: `into` has so many bytes, of which there are no references here. The other address is the kernel's to
                // check, and is only read.
                let done = unsafe { libc::process_vm_readv(self.owner.0, &raw const into, 1, &raw const from, 1, 0) };
                if usize::try_from(done) == Ok(len) { Ok(()) } else { Err(std::io::Error::last_os_error().into()) }
            }
            Way::Copy => {
                // SAFETY: both have so many bytes, and are not one; there are no references to those that are written.
                unsafe { std::ptr::copy_nonoverlapping(plain.as_ptr(), self.into.as_ptr(), len) };
                Ok(())
            }
        }
    }

    fn fetch_from(&self, opened: Opened, len: usize) -> Result<(), Error> {
        let ask: &[u8] = match opened {
            Opened::Kept => b"kept",
            Opened::EachTime => b"each",
            Opened::EachTimeThroughRings => b"rings",
        };
        self.node.send(self.session, ask, &(len as u64).to_le_bytes())?;
        let told = self.node.receive_from(self.session, soon())?;
        let window = told.payload.first_chunk().map(Descriptor::from_bytes).ok_or("no descriptor")?;
        self.get(&window, len)?;
        self.node.send(self.session, b"got", &[])?;
        self.node.receive_from(self.session, soon())?;
        Ok(())
    }
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

/// Microseconds for each.
fn timed(count: usize, mut one: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
    one()?;
    let start = Instant::now();
    for _ in 0..count {
        one()?;
    }
    Ok(start.elapsed().as_secs_f64() * 1e6 / count as f64)
}

fn table<const N: usize>(
    heads: [String; N],
    mut one: impl FnMut(usize, usize) -> Result<f64, Error>,
) -> Result<(), Error> {
    println!("| size | {} |", heads.join(" | "));
    for size in SIZES {
        let mut figures = [const { Vec::new() }; N];
        for _ in 0..ROUNDS {
            for (at, figure) in figures.iter_mut().enumerate() {
                figure.push(one(at, size)?);
            }
        }
        println!("| {} KiB | {} |", size >> 10, figures.map(|of| format!("{:.1}", median(of))).join(" | "));
    }
    Ok(())
}

fn measure() -> Result<(), Error> {
    let folder = tempfile::tempdir()?;
    let address = format!("shm://{}/owner", folder.path().display());
    let mut other = std::process::Command::new(std::env::current_exe()?)
        .args(["own", &address])
        .stdout(std::process::Stdio::piped())
        .spawn()?;
    let mut word = [0; 6];
    std::io::Read::read_exact(other.stdout.as_mut().ok_or("no output")?, &mut word)?;
    let user = User::connect(&address)?;
    let plain = vec![7_u8; BYTES_MAX];
    println!("microseconds for each fetch");
    table(WAYS.map(|way| format!("{way:?}")), |at, size| {
        timed((ROUND_BYTES / size).clamp(TRANSFERS_MIN, 512), || user.fetch(WAYS[at], size, &plain))
    })?;
    println!("microseconds for each fetch, with messages for a window");
    table(OPENED.map(|opened| format!("{opened:?}")), |at, size| timed(WINDOWS, || user.fetch_from(OPENED[at], size)))?;
    user.node.close(user.session)?;
    drop(user);
    other.wait()?;
    Ok(())
}

fn main() -> Result<(), Error> {
    match std::env::args().skip(1).collect::<Vec<_>>().as_slice() {
        [] => measure(),
        [own, address] if own == "own" => Owner::new(address)?.serve(),
        _ => Err("usage: shared_memory_cost".into()),
    }
}
