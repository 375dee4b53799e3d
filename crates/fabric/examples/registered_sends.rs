//! `cargo run --release -p byway-fabric --example registered_sends`: does it pay to register a program's memory for sends over TCP?
//!
//! A thread sends the same memory again and again over loopback, by an io_uring: copied by the kernel, as zero-copy sends, and as
//! zero-copy sends of fixed buffers, which the registration cache finds or which are registered for each send. Rounds are
//! interleaved; each figure is the median of them. docs/decisions/0025 has the outcome.

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use byway_fabric::registration::{Limits, PageRange, Refused, Registrar, RegistrationCache};
use io_uring::{IoUring, cqueue, opcode, squeue, types};

type Error = Box<dyn std::error::Error>;

const ROUNDS: usize = 5;
const SIZES: [usize; 5] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
/// What is sent in a round, in sends of each size at least so many.
const ROUND_BYTES: usize = 128 << 20;
const HANDLES: u32 = 16;

/// How a send has its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Copied,
    ZeroCopy,
    Cached,
    EachTime,
}

const WAYS: [Way; 4] = [Way::Copied, Way::ZeroCopy, Way::Cached, Way::EachTime];

/// A ring, and the places in its table of fixed buffers.
#[derive(Debug)]
struct Ring {
    free: Mutex<Vec<u32>>,
    ring: Mutex<SendRing>,
}

struct SendRing(IoUring);

impl std::fmt::Debug for SendRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a ring")
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ring {
    fn new() -> std::io::Result<Self> {
        let ring = IoUring::new(8)?;
        ring.submitter().register_buffers_sparse(HANDLES)?;
        Ok(Self { free: Mutex::new((0..HANDLES).collect()), ring: Mutex::new(SendRing(ring)) })
    }

    fn set(&self, index: u32, base: usize, bytes: usize) -> std::io::Result<()> {
        let buffer = [libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(base), iov_len: bytes }];
        // SAFETY: the pages are pinned by the call, whatever becomes of their addresses.
        unsafe { lock(&self.ring).0.submitter().register_buffers_update(index, &buffer, None) }
    }

    /// Sends all of `memory`, and waits until nobody reads it any more.
    fn send(&self, socket: &TcpStream, memory: &[u8], way: Way, index: Option<u32>) -> std::io::Result<()> {
        let (fd, base, len) = (types::Fd(socket.as_raw_fd()), memory.as_ptr(), memory.len() as u32);
        let entry: squeue::Entry = if way == Way::Copied {
            opcode::Send::new(fd, base, len).flags(libc::MSG_WAITALL).build()
        } else {
            opcode::SendZc::new(fd, base, len)
                .buf_index(index.map(|index| index as u16))
                .flags(libc::MSG_WAITALL)
                .build()
        };
        let mut held = lock(&self.ring);
        // SAFETY: the memory outlives the request, whose last completion is awaited below.
        unsafe { held.0.submission().push(&entry) }.map_err(std::io::Error::other)?;
        loop {
            held.0.submit_and_wait(1)?;
            while let Some(completion) = held.0.completion().next() {
                if !cqueue::notif(completion.flags()) && completion.result() != len as i32 {
                    return Err(std::io::Error::from_raw_os_error(-completion.result().min(-1)));
                }
                if !cqueue::more(completion.flags()) {
                    return Ok(());
                }
            }
        }
    }
}

impl Registrar for Ring {
    type Handle = u32;

    fn register(&self, range: PageRange) -> Result<u32, Refused> {
        let index = lock(&self.free).pop().ok_or(Refused::TooMany { handles_max: HANDLES as usize })?;
        self.set(index, range.start(), range.bytes()).map_err(|error| Refused::from_errno(error, range))?;
        Ok(index)
    }

    fn deregister(&self, index: u32) {
        if self.set(index, 0, 0).is_ok() {
            lock(&self.free).push(index);
        }
    }

    fn survives_fork(&self) -> bool {
        true
    }
}

/// What a thread has had of its processor.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

/// GB/s, and microseconds of the sender's processor for each send.
fn run(cache: &RegistrationCache<Ring>, memory: &[u8], way: Way) -> Result<(f64, f64), Error> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let socket = TcpStream::connect(listener.local_addr()?)?;
    let (mut receiver, _) = listener.accept()?;
    let sends = ROUND_BYTES / memory.len().max(64 << 10);
    let all = sends * memory.len();
    let thread = std::thread::spawn(move || -> std::io::Result<()> {
        let (mut into, mut left) = (vec![0; 256 << 10], all);
        while left > 0 {
            left -= receiver.read(&mut into)?;
        }
        Ok(())
    });
    let range = PageRange::covering(memory.as_ptr() as usize, memory.len()).ok_or("no range")?;
    let (start, cpu) = (Instant::now(), cpu_time());
    for _ in 0..sends {
        match way {
            Way::Copied | Way::ZeroCopy => cache.registrar().send(&socket, memory, way, None)?,
            Way::Cached => {
                let guard = cache.get(range)?;
                cache.registrar().send(&socket, memory, way, Some(*guard))?;
            }
            Way::EachTime => {
                let index = cache.registrar().register(range)?;
                let sent = cache.registrar().send(&socket, memory, way, Some(index));
                cache.registrar().deregister(index);
                sent?;
            }
        }
    }
    let cpu = cpu_time().saturating_sub(cpu);
    thread.join().map_err(|_| "the receiver panicked")??;
    Ok((all as f64 / start.elapsed().as_secs_f64() / 1e9, cpu.as_secs_f64() * 1e6 / sends as f64))
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

fn main() -> Result<(), Error> {
    let cache = RegistrationCache::new(Ring::new()?, Limits::default());
    println!("GB/s, and microseconds of the sender's processor per send ({:?})", cache.mode());
    print!("| size |");
    for way in WAYS {
        print!(" {way:?} |");
    }
    println!();
    for size in SIZES {
        // Whole pages of its own, as a program's large buffers are; each way sends the same ones.
        let memory = vec![7; size.max(256 << 10)];
        let mut figures = [const { (Vec::new(), Vec::new()) }; WAYS.len()];
        for _ in 0..ROUNDS {
            for (way, figure) in WAYS.into_iter().zip(&mut figures) {
                let (rate, cpu) = run(&cache, &memory[..size], way)?;
                figure.0.push(rate);
                figure.1.push(cpu);
            }
        }
        print!("| {} KiB |", size >> 10);
        for (rates, cpus) in figures {
            print!(" {:.2}, {:.1} |", median(rates), median(cpus));
        }
        println!();
    }
    Ok(())
}
