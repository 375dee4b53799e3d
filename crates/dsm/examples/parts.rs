//! What a fault of a job is made of, in one process: faults that a thread of it answers, and messages between two nodes:
//! `parts tcp 1000`. `cargo xtask peers dsm` sets the sums beside the faults of jobs.

use std::net::SocketAddr;
use std::ptr::with_exposed_provenance;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use byway_dsm::limits::PAGE_BYTES;
use byway_fabric::node::{Address, Deadline, Descriptor, Node, NodeOptions, Rights, Session};
use byway_reactor::userfault::{Event, FaultKind, Features, Modes, Userfault};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

type Error = Box<dyn std::error::Error>;

/// What is got at once to see what a session carries, and how often.
const GOT_BYTES: usize = 1 << 20;
const GETS: usize = 100;

fn main() -> std::process::ExitCode {
    run().map_or_else(
        |error| {
            eprintln!("parts: {error}");
            std::process::ExitCode::FAILURE
        },
        |()| std::process::ExitCode::SUCCESS,
    )
}

fn print(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let us = |share: usize| times[(times.len() * share / 100).min(times.len() - 1)].as_secs_f64() * 1e6;
    println!("{what}: p50 {:.1} us, p99 {:.1} us", us(50), us(99));
}

fn run() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let wire = arguments.next().ok_or("usage: parts tcp|shm [COUNT]")?;
    let count: usize = arguments.next().map_or(Ok(1000), |text| text.parse())?.max(1);
    faults(count)?;
    messages(&wire, count)
}

/// Loads from missing pages, and stores to protected ones; another thread sleeps until the kernel reports each.
fn faults(count: usize) -> Result<(), Error> {
    let bytes = count * PAGE_BYTES;
    let userfault = Userfault::open(Features::WRITE_PROTECT, true)?;
    let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    // SAFETY: a new mapping at an address of the kernel's choice; it stays until the process ends.
    let at = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, rights, flags)? }.expose_provenance();
    // SAFETY: nothing refers to the mapping but the atomics below, for which any bytes are right.
    unsafe { userfault.register(at..at + bytes, Modes::MISSING.and(Modes::WRITE_PROTECT))? };
    // SAFETY: as above: an aligned word of each page of the mapping.
    let word = |page: usize| unsafe { &*with_exposed_provenance::<AtomicU64>(at + page * PAGE_BYTES) };
    let answered = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while answered.load(Relaxed) < 2 * count as u64 {
                let mut source = [PollFd::new(&userfault, PollFlags::IN)];
                let _ = poll(&mut source, None);
                userfault.read(|event| {
                    let Event::Fault { address, kind, .. } = event else { return };
                    let page = address / PAGE_BYTES * PAGE_BYTES;
                    let done = match kind {
                        FaultKind::WriteProtected => userfault.write_protect(page..page + PAGE_BYTES, false, false),
                        _ => userfault.copy(page, &[1; PAGE_BYTES], true).map_err(|partly| partly.error),
                    };
                    answered.fetch_add(1, Relaxed);
                    if let Err(error) = done {
                        eprintln!("parts: {error}");
                        std::process::exit(1);
                    }
                });
            }
        });
        let time = |access: &dyn Fn(usize)| {
            let timed = |page| {
                let began = Instant::now();
                access(page);
                began.elapsed()
            };
            (0..count).map(timed).collect()
        };
        print("local read fault", time(&|page| _ = word(page).load(Relaxed)));
        print("local upgrade", time(&|page| word(page).store(2, Relaxed)));
    });
    Ok(())
}

/// Messages there and back between two threads with nodes of their own.
fn messages(wire: &str, count: usize) -> Result<(), Error> {
    let folder = tempfile::tempdir()?;
    let (here, there) = (Node::open(&NodeOptions::default())?, Node::open(&NodeOptions::default())?);
    let address = match wire {
        "shm" => Address::Shared(folder.path().join("socket")),
        _ => Address::Tcp(SocketAddr::from(([127, 0, 0, 1], 0))),
    };
    let address = there.listen(&address)?.map_or(address, Address::Tcp);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let answer = || -> Result<(), Error> {
                let session = there.accept(Deadline::NEVER)?;
                // Private memory, as a job's is: such gets need the owner's node, also on one host.
                let memory = there.register(GOT_BYTES)?;
                let window = there.open_window(session, &memory, 0..GOT_BYTES, Rights::GET)?;
                there.send(session, &[], &window.descriptor().to_bytes())?;
                loop {
                    // The first byte says whether a page is asked for; none, that all is over.
                    let message = there.receive_from(session, Deadline::NEVER)?;
                    let Some(wants_page) = message.header.first() else { return Ok(()) };
                    let page: &[u8] = if *wants_page == 1 { &[5; PAGE_BYTES] } else { &[] };
                    there.send(session, &[0; 32], page)?;
                }
            };
            if let Err(error) = answer() {
                eprintln!("parts: {error}");
                std::process::exit(1);
            }
        });
        let soon = || Deadline::after(Duration::from_secs(20));
        let session = here.connect(&address, soon())?;
        let window = here.receive_from(session, soon())?.payload;
        gets(&here, session, &Descriptor::from_bytes(window.first_chunk().ok_or("no window")?))?;
        print("call with a page in its answer", exchange(&here, session, 1, count)?);
        print("message there and back", exchange(&here, session, 0, count)?);
        here.send(session, &[], &[])?.wait(soon())??;
        Ok(())
    })
}

/// Gets of memory of the other end, one after the other.
fn gets(node: &Node, session: Session, theirs: &Descriptor) -> Result<(), Error> {
    let mine = node.register(GOT_BYTES)?;
    let mut times = Vec::with_capacity(GETS);
    for _ in 0..GETS {
        let began = Instant::now();
        node.get(session, theirs, 0, &[mine.segment(0..GOT_BYTES)])?.wait(Deadline::NEVER)??;
        times.push(began.elapsed());
    }
    print("get of 1 MiB", times);
    Ok(())
}

fn exchange(node: &Node, session: Session, kind: u8, count: usize) -> Result<Vec<Duration>, Error> {
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let began = Instant::now();
        node.send(session, &[kind; 32], &[])?;
        node.receive_from(session, Deadline::NEVER)?;
        times.push(began.elapsed());
    }
    Ok(times)
}
