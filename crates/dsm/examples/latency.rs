//! What faults, locks, barriers and false sharing cost between the first two processes of a job: `byway dsm run -n 2 -- latency 1000`.
//! With `computes` behind the number it times loads from processes that compute, with `polls` from such that answer at safe points.

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
    let times: Vec<Duration> = (0..count)
        .map(|at| {
            let began = Instant::now();
            access(at);
            began.elapsed()
        })
        .collect();
    print(what, times);
}

fn print(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let us = |share: usize| times[times.len() * share / 100].as_secs_f64() * 1e6;
    println!("{what}: p50 {:.1} us, p99 {:.1} us", us(50), us(99));
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

/// The time between two loads from processes that compute, in which the process that loads computes too.
const BETWEEN: Duration = Duration::from_micros(100);

/// Some 5 us of arithmetic, and a safe point behind it if the job has such.
fn compute(job: &Job, polls: bool) {
    let mut sum = 1.0_f64;
    for step in 0..1500 {
        sum = std::hint::black_box(sum * 1.000_000_1 + f64::from(step));
    }
    if polls {
        job.poll();
    }
}

/// Process 1 loads from pages that process 0 has written, while all others wait at a barrier, and then while all of them compute: their threads do not
/// answer by themselves then.
fn loads_from_computing(job: &Job, count: usize, polls: bool) -> Result<(), Error> {
    let pages = job.segment("pages", count * PAGE_BYTES)?.words();
    let end = &job.segment("end", PAGE_BYTES)?.words()[0];
    for (phase, what) in (1..).zip(["load from a process that waits", "load from a process that computes"]) {
        if job.rank() == 0 {
            pages.iter().step_by(PAGE).for_each(|word| word.store(phase, Relaxed));
        }
        job.barrier(0)?;
        if job.rank() == 1 {
            let mut times = Vec::with_capacity(count);
            for word in pages.iter().step_by(PAGE) {
                let began = Instant::now();
                while began.elapsed() < BETWEEN {
                    compute(job, polls);
                }
                let began = Instant::now();
                if word.load(Relaxed) != phase {
                    return Err("a load has not seen what was stored before the barrier".into());
                }
                times.push(began.elapsed());
            }
            end.store(phase, Relaxed);
            print(what, times);
        } else if phase == 2 {
            while end.load(Relaxed) < phase {
                compute(job, polls);
            }
        }
        job.barrier(0)?;
    }
    Ok(())
}

/// Both of two processes write 1 MiB, meet, and fetch the other's: how long the barrier and the fetch take.
fn exchange(job: &Job) -> Result<(), Error> {
    let both = job.segment("both", 2 * FETCHED_BYTES)?;
    let pages = |rank: usize| both.words()[rank * FETCHED_BYTES / 8..][..FETCHED_BYTES / 8].iter().step_by(PAGE);
    let me = usize::from(job.rank());
    let mut times = Vec::new();
    for round in 1..=FETCHES {
        if me < 2 {
            pages(me).for_each(|word| word.store(round, Relaxed));
        }
        job.barrier(0)?;
        let began = Instant::now();
        job.barrier(1)?;
        if me < 2 && job.ranks() > 1 {
            let other = 1 - me;
            job.fetch(both, other * FETCHED_BYTES..(other + 1) * FETCHED_BYTES)?;
            times.push(began.elapsed());
            if pages(other).any(|word| word.load(Relaxed) != round) {
                return Err("a fetched page is not what the other process has written".into());
            }
        }
        job.barrier(0)?;
    }
    if me == 0 && !times.is_empty() {
        print("barrier and fetch of 1 MiB by both", times);
    }
    Ok(())
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
    let way = std::env::args().nth(2);
    let job = Job::join()?;
    match way.as_deref() {
        None => {}
        Some(way @ ("computes" | "polls")) => {
            loads_from_computing(&job, count, way == "polls")?;
            return Ok(job.finish()?);
        }
        Some(_) => return Err("usage: latency [COUNT [computes|polls]]".into()),
    }
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
    exchange(&job)?;
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
