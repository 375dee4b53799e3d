//! What faults, locks, barriers and false sharing cost between the first two processes of a job: `byway dsm run -n 2 -- latency 1000`.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use byway_dsm::Job;
use byway_dsm::limits::PAGE_BYTES;

type Error = Box<dyn std::error::Error>;

/// Words of a page.
const PAGE: usize = PAGE_BYTES / size_of::<u64>();

/// What is fetched at once, and how often.
const FETCHED_BYTES: usize = 1 << 20;
const FETCHES: u64 = 9;

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
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    println!("{what}: p50 {:.1} us, p99 {:.1} us", us(times[count / 2]), us(times[count * 99 / 100]));
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

/// Fetches 1 MiB that another process has written, and finds all of it here then.
fn fetch(job: &Job) -> Result<(), Error> {
    let ahead = job.segment("ahead", FETCHED_BYTES)?;
    let pages = || ahead.words().iter().step_by(PAGE);
    let mut times = Vec::new();
    for round in 1..=FETCHES {
        if job.rank() == 1 {
            pages().for_each(|word| word.store(round, Relaxed));
        }
        job.barrier(0)?;
        if job.rank() == 0 {
            let began = Instant::now();
            job.fetch(ahead, 0..FETCHED_BYTES)?;
            times.push(began.elapsed().as_secs_f64());
            let before = job.counters().read_faults;
            if job.ranks() > 1 && pages().any(|word| word.load(Relaxed) != round) {
                return Err("a fetched page is not what the other process has written".into());
            }
            if job.counters().read_faults > before {
                return Err("a page was not here behind its fetch".into());
            }
        }
        job.barrier(0)?;
    }
    times.sort_by(f64::total_cmp);
    if let Some(time) = times.get(times.len() / 2) {
        let rate = FETCHED_BYTES as f64 / time / 1e6;
        println!("fetch of 1 MiB that the other has written: p50 {:.1} us, {rate:.0} MB/s", time * 1e6);
    }
    Ok(())
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
    fetch(&job)?;
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
    // All processes want it: each gets it from the one before.
    let began = Instant::now();
    for _ in 0..count {
        drop(job.lock(1)?);
    }
    job.barrier(0)?;
    if first && job.ranks() > 1 {
        let each = began.elapsed().as_secs_f64() * 1e6 / (count * usize::from(job.ranks())) as f64;
        println!("lock that all want: {each:.1} us each");
    }
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
