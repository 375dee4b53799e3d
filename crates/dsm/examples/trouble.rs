//! Programs that a job must survive, or end by name: `byway dsm run -n 2 -- trouble pin`.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use byway_dsm::Job;
use byway_dsm::limits::PAGE_BYTES;
use byway_fabric::node::{Address, Deadline, Node, NodeOptions};
use io_uring::{IoUring, opcode, types};

type Error = Box<dyn std::error::Error>;
type Done = Result<(), Error>;

/// Words of a page.
const PAGE: usize = PAGE_BYTES / size_of::<u64>();

fn main() -> std::process::ExitCode {
    let name = std::env::args().nth(1).unwrap_or_default();
    let done = match name.as_str() {
        "leave" => leave(),
        "child" => child(),
        "behind" => beyond(2),
        "between" => beyond(1),
        "drop" => drop_page(),
        "pin" => pin(),
        "stranger" => stranger(),
        "signals" => signals(),
        "steps" => steps(),
        _ => Err("it knows leave, child, behind, between, drop, pin, stranger, signals and steps".into()),
    };
    done.map_or_else(
        |error| {
            eprintln!("trouble: {error}");
            std::process::ExitCode::FAILURE
        },
        |()| std::process::ExitCode::SUCCESS,
    )
}

/// Rank 1 forgets to leave the job.
fn leave() -> Done {
    let job = Job::join()?;
    if job.rank() == 1 {
        return Ok(());
    }
    Ok(job.finish()?)
}

/// Rank 1 fails, and leaves a child that holds its output open.
fn child() -> Done {
    let job = Job::join()?;
    if job.rank() == 1 {
        let child = std::process::Command::new("sleep").arg("600").spawn()?;
        println!("child {}", child.id());
        std::process::exit(3);
    }
    Ok(job.finish()?)
}

/// Rank 0 loads the word behind a segment: the last one, or one with another behind it.
fn beyond(segments: usize) -> Done {
    let job = Job::join()?;
    let first = job.segment("first", PAGE_BYTES)?;
    let second = job.segment("second", PAGE_BYTES)?;
    let segment = [first, second][segments - 1];
    if job.rank() == 0 {
        // SAFETY: a load of memory that is not the segment's; that it ends the process is what is shown.
        let seen = unsafe { segment.as_ptr().add(segment.len()).read_volatile() };
        println!("the byte behind the segment is {seen}");
    }
    Ok(job.finish()?)
}

/// Rank 0 drops a page of a segment, then uses it.
fn drop_page() -> Done {
    let job = Job::join()?;
    let segment = job.segment("page", PAGE_BYTES)?;
    if job.rank() == 0 {
        segment.words()[0].store(1, Relaxed);
        // SAFETY: the words are atomics, for which any bytes are right.
        unsafe { rustix::mm::madvise(segment.as_ptr().cast(), PAGE_BYTES, rustix::mm::Advice::LinuxDontNeed)? };
        println!("the word is {}", segment.words()[0].load(Relaxed));
    }
    Ok(job.finish()?)
}

/// Rank 0's ring has a page of a segment as its buffer, and receives into it after rank 1 has begun to store there.
fn pin() -> Done {
    const RECEIVED: u64 = 42;
    const STORED: u64 = 7;
    let job = Job::join()?;
    let segment = job.segment("page", PAGE_BYTES)?;
    let (received, stored) = (&segment.words()[0], &segment.words()[PAGE / 2]);
    if job.rank() == 0 {
        received.store(0, Relaxed);
        let mut ring = IoUring::new(2)?;
        let buffer = libc::iovec { iov_base: segment.as_ptr().cast(), iov_len: PAGE_BYTES };
        // SAFETY: the segment stays mapped until the buffer is unregistered, below; its words are atomics.
        unsafe { ring.submitter().register_buffers(&[buffer])? };
        let (from, to) = rustix::pipe::pipe()?;
        let read = opcode::ReadFixed::new(types::Fd(from.as_raw_fd()), segment.as_ptr(), 8, 0).build();
        // SAFETY: the buffer is the one that was registered, and the pipe is open until the read has ended.
        unsafe { ring.submission().push(&read)? };
        ring.submit()?;
        job.barrier(0)?;
        let deadline = Instant::now() + Duration::from_secs(20);
        while job.counters().pin_waits == 0 {
            if Instant::now() > deadline {
                return Err("the page does not wait for the ring".into());
            }
            std::thread::yield_now();
        }
        rustix::io::write(&to, &RECEIVED.to_ne_bytes())?;
        ring.submit_and_wait(1)?;
        let done = ring.completion().next().map(|entry| entry.result());
        if done != Some(8) {
            return Err(format!("the ring's read ended with {done:?}").into());
        }
        ring.submitter().unregister_buffers()?;
    } else {
        job.barrier(0)?;
        stored.store(STORED, Relaxed);
    }
    job.barrier(1)?;
    let seen = (received.load(Relaxed), stored.load(Relaxed));
    if seen != (RECEIVED, STORED) {
        return Err(format!("received and stored: {seen:?}").into());
    }
    Ok(job.finish()?)
}

/// Rank 1 connects to rank 0 as a stranger before it joins: one that says something else, and one that says nothing. When all have joined, a
/// stranger is refused.
fn stranger() -> Done {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let place = std::path::PathBuf::from(variable("BYWAY_DSM_FOLDER")).join("rank-0");
    let address = || match variable("BYWAY_DSM_WIRE").as_str() {
        "shm" => Some(Address::Shared(place.clone())),
        "unix" => Some(Address::Unix(place.clone())),
        _ => std::fs::read_to_string(&place).ok().and_then(|text| text.parse().ok()).map(Address::Tcp),
    };
    let mut strangers = Vec::new();
    if variable("BYWAY_DSM_RANK") == "1" {
        let deadline = Instant::now() + Duration::from_secs(20);
        while strangers.len() < 2 {
            let node = Node::open(&NodeOptions::default())?;
            let session = address().map(|at| node.connect(&at, Deadline::after(Duration::from_secs(5))));
            match session {
                Some(Ok(session)) if strangers.is_empty() => drop(node.send(session, &[7; 32], b"who is there?")?),
                Some(Ok(_)) => {}
                _ if Instant::now() > deadline => return Err("rank 0 does not listen".into()),
                _ => continue,
            }
            node.progress()?;
            strangers.push(node);
        }
    }
    let job = Job::join()?;
    if job.rank() == 1 {
        let late = Node::open(&NodeOptions::default())?;
        let at = address().ok_or("rank 0 has no address")?;
        if late.connect(&at, Deadline::after(Duration::from_secs(5))).is_ok() {
            return Err("rank 0 accepts strangers when all have joined".into());
        }
    }
    let counter = &job.segment("counter", PAGE_BYTES)?.words()[0];
    {
        let _guard = job.lock(0)?;
        counter.store(counter.load(Relaxed) + 1, Relaxed);
    }
    job.barrier(0)?;
    if counter.load(Relaxed) != u64::from(job.ranks()) {
        return Err(format!("the counter is {}", counter.load(Relaxed)).into());
    }
    Ok(job.finish()?)
}

/// The processes take turns with a page, print each step, and never end.
fn steps() -> Done {
    let job = Job::join()?;
    let counter = &job.segment("counter", PAGE_BYTES)?.words()[0];
    for step in 0_u64.. {
        job.barrier(0)?;
        if step % u64::from(job.ranks()) == u64::from(job.rank()) {
            counter.store(step, Relaxed);
        }
        println!("step {step}");
    }
    Ok(())
}

/// The pager's thread blocks signals whose handlers a program may have, and the program's threads do not.
fn signals() -> Done {
    let job = Job::join()?;
    let counter = AtomicU64::new(0);
    for task in std::fs::read_dir("/proc/self/task")? {
        let task = task?.path();
        let status = std::fs::read_to_string(task.join("status"))?;
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap_or_default();
        let blocked = u64::from_str_radix(blocked.trim(), 16)?;
        let is_pager = status.starts_with("Name:\tdsm-pager\n");
        counter.fetch_add(u64::from(is_pager), Relaxed);
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGALRM, libc::SIGUSR1, libc::SIGCHLD, libc::SIGPROF] {
            if (blocked >> (signal - 1) & 1 == 1) != is_pager {
                return Err(format!("{}: signals {blocked:#x} are blocked", task.display()).into());
            }
        }
    }
    if counter.load(Relaxed) != 1 {
        return Err("there is no pager".into());
    }
    Ok(job.finish()?)
}
