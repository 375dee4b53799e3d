//! Programs that a job must survive, or end by name: `byway dsm run -n 2 -- trouble pin`.

use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::Relaxed;
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
        "daemon" => daemon(),
        "fork" => fork(),
        "address" => address(),
        "sizes" => sizes(),
        "refused" => refused(),
        "dies" => dies(),
        "holder" => holder(),
        "queue" => queue(),
        "writers" => writers(),
        "threads" => threads(),
        _ => Err("it knows the names of its functions".into()),
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

/// Rank 1 leaves a child in a session of its own.
fn daemon() -> Done {
    let job = Job::join()?;
    if job.rank() == 1 {
        println!("child {}", std::process::Command::new("setsid").args(["sleep", "600"]).spawn()?.id());
    }
    Ok(job.finish()?)
}

/// Rank 0 forks. A child that calls the job is refused, one that ends well takes nothing from its parent, and one that loads from a segment
/// ends by SIGSEGV.
fn fork() -> Done {
    let job = Job::join()?;
    let segment = job.segment("page", PAGE_BYTES)?;
    let at = segment.as_ptr();
    if job.rank() == 0 {
        segment.words()[0].store(7, Relaxed);
        let call = |job: &Job| i32::from(!matches!(job.lock(0), Err(byway_dsm::CallError::Forked)));
        // SAFETY: a load of memory that the child does not have; that it ends the child is what is shown.
        let load = |_: &Job| i32::from(unsafe { at.read_volatile() });
        for (child, expected) in [(&call as &dyn Fn(&Job) -> i32, Some(0)), (&load, None)] {
            // SAFETY: the child uses nothing that a thread of its parent may have locked but memory, whose lock the C library renews.
            match unsafe { libc::fork() } {
                0 => {
                    let status = child(&job);
                    drop(job);
                    std::process::exit(status);
                }
                pid => {
                    let mut status = 0;
                    // SAFETY: the status is written here.
                    unsafe { libc::waitpid(pid, &raw mut status, 0) };
                    let seen = libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status));
                    if seen != expected || expected.is_none() && libc::WTERMSIG(status) != libc::SIGSEGV {
                        return Err(format!("a forked child ended with {status:#x}").into());
                    }
                }
            }
        }
    }
    job.barrier(0)?;
    // Rank 0 still has its page, and its faults.
    job.lock(0).map(drop)?;
    let seen = job.segment("page", PAGE_BYTES)?.words()[0].load(Relaxed);
    if seen != 7 {
        return Err(format!("the word is {seen}").into());
    }
    Ok(job.finish()?)
}

/// Rank 1 has memory where segments lie.
fn address() -> Done {
    use rustix::mm::{MapFlags, ProtFlags};
    if std::env::var("BYWAY_DSM_RANK")? == "1" {
        let place = std::ptr::with_exposed_provenance_mut(byway_dsm::limits::AREA_ADDRESS + 5 * PAGE_BYTES);
        let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
        // SAFETY: a new mapping that replaces none.
        unsafe { rustix::mm::mmap_anonymous(place, PAGE_BYTES, ProtFlags::READ, flags)? };
    }
    Ok(Job::join()?.finish()?)
}

/// The processes give a segment different sizes, and then ask for more memory than there is.
fn sizes() -> Done {
    let job = Job::join()?;
    job.segment("same", PAGE_BYTES * (1 + usize::from(job.rank()))).map_or_else(|error| println!("{error}"), |_| ());
    job.barrier(0)?;
    println!("{}", job.segment("large", 1 << 40).err().ok_or("there is a segment of 1 TiB")?);
    Ok(job.finish()?)
}

/// Rank 1 may not use userfaultfd, as in a container with a filter of system calls.
fn refused() -> Done {
    if std::env::var("BYWAY_DSM_RANK")? == "1" {
        deny(&[libc::SYS_userfaultfd, libc::SYS_ioctl])?;
    }
    Ok(Job::join()?.finish()?)
}

/// Rank 0 ends by status 3 while rank 1 connects to it: the connection is made, and ends with the process.
fn dies() -> Done {
    if std::env::var("BYWAY_DSM_RANK")? == "0" {
        let peers = std::env::var("BYWAY_DSM_PEERS")?;
        let mine = peers.split(',').next().unwrap_or_default();
        let listener = std::net::TcpListener::bind(mine)?;
        let (connection, _) = listener.accept()?;
        // Its first bytes are here.
        connection.peek(&mut [0])?;
        drop(connection);
        drop(listener);
        // The launcher names the first process that ends: the other one must have the time to name a wrong reason.
        std::thread::park_timeout(Duration::from_secs(1));
        std::process::exit(3);
    }
    Ok(Job::join()?.finish()?)
}

/// Rank 1 is killed while the others wait for the lock that it has.
fn holder() -> Done {
    let job = Job::join()?;
    if job.rank() == 1 {
        let _guard = job.lock(3)?;
        job.barrier(0)?;
        // Time for the others to queue up. The end is the same if one has not.
        std::thread::park_timeout(Duration::from_millis(50));
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)?;
    }
    job.barrier(0)?;
    drop(job.lock(3)?);
    Err("the lock of a process that was killed has come".into())
}

/// Without end, one process after the other stores to a page under a lock, and fences.
fn queue() -> Done {
    let job = Job::join()?;
    let word = &job.segment("queue", PAGE_BYTES)?.words()[0];
    loop {
        {
            let _guard = job.lock(3)?;
            word.store(word.load(Relaxed) + 1, Relaxed);
        }
        job.fence()?;
    }
}

/// These system calls fail with EPERM from now on, in this thread and those that it starts.
fn deny(calls: &[libc::c_long]) -> std::io::Result<()> {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    // Loads the number; for each call, skips the verdict unless it is this one.
    let mut filter = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0)];
    for call in calls {
        let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
        filter.push(libc::sock_filter { jt: 0, jf: 1, ..statement(equal, *call as u32) });
        filter.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32));
    }
    filter.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the second call reads the program, which lives until then.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    };
    if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
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
    let (mut strangers, mut known) = (Vec::new(), None);
    if variable("BYWAY_DSM_RANK") == "1" {
        let deadline = Instant::now() + Duration::from_secs(20);
        while strangers.len() < 2 {
            let node = Node::open(&NodeOptions::default())?;
            known = address();
            let session = known.as_ref().map(|at| node.connect(at, Deadline::after(Duration::from_secs(5))));
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
        let at = known.ok_or("rank 0 had no address")?;
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

/// The status of each thread, as the kernel tells it.
fn threads_of_process() -> Result<Vec<String>, Error> {
    let tasks = std::fs::read_dir("/proc/self/task")?;
    tasks.map(|task| Ok(std::fs::read_to_string(task?.path().join("status"))?)).collect()
}

/// Threads of the job's own block signals whose handlers a program may have, and the program's threads do not.
fn signals() -> Done {
    let job = Job::join()?;
    let is_own =
        |status: &String| ["pager", "teller"].iter().any(|name| status.starts_with(&format!("Name:\tdsm-{name}\n")));
    // A thread has its name when it runs.
    let deadline = Instant::now() + Duration::from_secs(20);
    while threads_of_process()?.iter().filter(|status| is_own(status)).count() != 2 {
        if Instant::now() > deadline {
            return Err("there is no pager, or none that tells".into());
        }
        std::thread::yield_now();
    }
    for status in threads_of_process()? {
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap_or_default();
        let blocked = u64::from_str_radix(blocked.trim(), 16)?;
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGALRM, libc::SIGUSR1, libc::SIGCHLD, libc::SIGPROF] {
            if (blocked >> (signal - 1) & 1 == 1) != is_own(&status) {
                return Err(format!("signals {blocked:#x} are blocked in {status}").into());
            }
        }
    }
    Ok(job.finish()?)
}

/// Two processes store to words of one page by turns, 10 times each, and print what they have counted.
fn writers() -> Done {
    let job = Job::join()?;
    let words = job.segment("page", PAGE_BYTES)?.words();
    let rank = usize::from(job.rank());
    // The first turns are not counted: rank 0 becomes the page's home.
    let mut before = job.counters();
    for round in 0..=10 {
        for turn in 0..2 {
            if turn == rank {
                words[rank].store(round, Relaxed);
            }
            job.barrier(0)?;
        }
        if round == 0 {
            before = job.counters();
            // Rank 1 may be asked for the page as soon as rank 0 goes on.
            job.barrier(0)?;
        }
    }
    let after = job.counters();
    println!(
        "{} write faults, {} read faults, {} pages received, {} sent",
        after.write_faults - before.write_faults,
        after.read_faults - before.read_faults,
        after.pages_received - before.pages_received,
        after.pages_sent - before.pages_sent
    );
    job.barrier(0)?;
    if words[..2].iter().any(|word| word.load(Relaxed) != 10) {
        return Err("a store is lost".into());
    }
    Ok(job.finish()?)
}

/// Eight threads of each process add to one word under a lock, and to words of their own on pages of all threads.
fn threads() -> Done {
    const THREADS: usize = 8;
    const ROUNDS: u64 = 30;
    let job = Job::join()?;
    let words = job.segment("words", (1 + ROUNDS as usize) * PAGE_BYTES)?.words();
    let (first, all) = (usize::from(job.rank()) * THREADS, usize::from(job.ranks()) * THREADS);
    std::thread::scope(|scope| {
        let add = |thread: usize| -> Result<(), byway_dsm::CallError> {
            for round in 1..=ROUNDS as usize {
                let _guard = job.lock(3)?;
                words[0].store(words[0].load(Relaxed) + 1, Relaxed);
                words[round * PAGE + first + thread].store(words[0].load(Relaxed), Relaxed);
            }
            Ok(())
        };
        let started: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || add(thread))).collect();
        started.into_iter().try_for_each(|thread| thread.join().unwrap())
    })?;
    job.barrier(0)?;
    // Each addition has left its number, and no two the same.
    let numbers = words[PAGE..].chunks_exact(PAGE).flat_map(|page| &page[..all]);
    let mut numbers: Vec<u64> = numbers.map(|word| word.load(Relaxed)).collect();
    numbers.sort_unstable();
    if !numbers.into_iter().eq(1..=ROUNDS * all as u64) {
        return Err("two threads had the lock at a time, or a store is lost".into());
    }
    Ok(job.finish()?)
}
