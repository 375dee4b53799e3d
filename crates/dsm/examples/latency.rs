//! What faults, locks, barriers and false sharing cost between the first two processes of a job: `byway dsm run -n 2 -- latency 1000`.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use byway_dsm::Job;
use byway_dsm::limits::PAGE_BYTES;

type Error = Box<dyn std::error::Error>;

/// Words of a page.
const PAGE: usize = PAGE_BYTES / size_of::<u64>();

fn main() -> std::process::ExitCode {
    run().map_or_else(
        |error| {
            eprintln!("latency: {error}");
            std::process::ExitCode::FAILURE
        },
        |()| std::process::ExitCode::SUCCESS,
    )
}

/// Times each of `count` accesses, and prints the median and the 99th of a hundred.
fn time(what: &str, count: usize, mut access: impl FnMut(usize)) {
    let mut times: Vec<Duration> = (0..count)
        .map(|at| {
            let began = Instant::now();
            access(at);
            began.elapsed()
        })
        .collect();
    times.sort_unstable();
    println!("{what}: p50 {:?}, p99 {:?}", times[count / 2], times[count * 99 / 100]);
}

/// Stores to a word for 200 ms. Gives how often.
fn share(word: &AtomicU64) -> u64 {
    let (began, mut count) = (Instant::now(), 0);
    while began.elapsed() < Duration::from_millis(200) {
        word.store(count, Relaxed);
        count += 1;
    }
    count
}

fn run() -> Result<(), Error> {
    let count: usize = std::env::args().nth(1).map_or(Ok(1000), |text| text.parse())?.max(1);
    let job = Job::join()?;
    let pages = job.segment("latency", count * PAGE_BYTES)?.words();
    let page = |at: usize| -> &AtomicU64 { &pages[at * PAGE] };
    let (first, second) = (job.rank() == 0, job.rank() == 1);
    if first {
        time("first store to a page", count, |at| page(at).store(1, Relaxed));
    }
    job.barrier(0)?;
    if second {
        time("load of a page that its home has written", count, |at| _ = page(at).load(Relaxed));
    }
    job.barrier(0)?;
    if second {
        time("store to a page that both have read", count, |at| page(at).store(2, Relaxed));
    }
    job.barrier(0)?;
    if first {
        time("load at the home of a page that the other has written", count, |at| _ = page(at).load(Relaxed));
    }
    job.barrier(0)?;
    let received = job.counters().pages_received;
    let mut failed = None;
    let mut step = |result: Result<(), byway_dsm::CallError>| failed = failed.take().or(result.err());
    if first {
        time("barrier", count, |_| step(job.barrier(1)));
    } else {
        (0..count).for_each(|_| step(job.barrier(1)));
    }
    if first {
        time("free lock of which this process is the manager", count, |_| step(job.lock(0).map(drop)));
    }
    failed.map_or(Ok(()), Err)?;
    job.barrier(0)?;
    if first || second {
        let stores = share(&pages[usize::from(job.rank())]);
        let pages = job.counters().pages_received.saturating_sub(received).max(1);
        if first {
            println!("false sharing: {} stores to a word for each time that its page comes", stores / pages);
        }
    }
    job.barrier(0)?;
    Ok(job.finish()?)
}
