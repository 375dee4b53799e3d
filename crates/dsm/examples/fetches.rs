//! Fetches of many pages at once, in ways that the tests check: `byway dsm run -n 3 -- fetches striped 20`.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use byway_dsm::limits::PAGE_BYTES;
use byway_dsm::{CallError, Job, Segment};

type Error = Box<dyn std::error::Error>;
type Done = Result<(), Error>;

/// Words of a page.
const PAGE: usize = PAGE_BYTES / size_of::<u64>();

fn main() -> std::process::ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let rounds = arguments.get(1).map_or(Ok(10), |text| text.parse());
    let done = match (arguments.first().map(String::as_str), rounds) {
        (Some("striped"), Ok(rounds)) => striped(rounds),
        (Some("ordered"), Ok(rounds)) => ordered(rounds),
        (Some("locked"), Ok(rounds)) => locked(rounds),
        (Some("torn"), _) => torn(),
        _ => Err("usage: fetches striped|ordered|locked|torn [ROUNDS]".into()),
    };
    done.map_or_else(
        |error| {
            eprintln!("fetches: {error}");
            std::process::ExitCode::FAILURE
        },
        |()| std::process::ExitCode::SUCCESS,
    )
}

/// The first words of a segment's pages.
fn pages(segment: Segment<'_>) -> impl DoubleEndedIterator<Item = &AtomicU64> {
    segment.words().iter().step_by(PAGE)
}

/// Three segments, one behind the other. Odd ranks map the one in the middle last, when they have used the others: these are mappings of their own
/// then, where other ranks have one mapping.
fn segments(job: &Job) -> Result<[Segment<'_>; 3], CallError> {
    const PAGES: [usize; 3] = [70, 6, 67];
    let segment = |at: usize| job.segment(["first", "second", "third"][at], PAGES[at] * PAGE_BYTES);
    if job.rank() == 0 {
        (0..3).try_for_each(|at| segment(at).map(|_| ()))?;
    }
    job.barrier(0)?;
    if job.rank() % 2 == 1 {
        for at in [0, 2] {
            pages(segment(at)?).next_back().into_iter().for_each(|word| word.store(1, Relaxed));
        }
    }
    Ok([segment(0)?, segment(1)?, segment(2)?])
}

/// In each round, three pages in a row have one owner and the next three another, also across segments; most are not their homes. Each process fetches
/// all segments at a time, and parts of them again meanwhile, and loads from some of their pages.
fn striped(rounds: u64) -> Done {
    let job = Job::join()?;
    let segments = segments(&job)?;
    let numbered = || (0_u64..).zip(segments.into_iter().flat_map(pages));
    let (rank, ranks) = (u64::from(job.rank()), u64::from(job.ranks()));
    for round in 1..=rounds {
        job.barrier(0)?;
        for (page, word) in numbered().filter(|(page, _)| (page / 3 + round) % ranks == rank) {
            word.store(round << 16 | page, Relaxed);
        }
        job.barrier(1)?;
        std::thread::scope(|scope| {
            let fetch = |segment: Segment<'_>, from: usize| job.fetch(segment, from..segment.len());
            let whole = segments.map(|segment| scope.spawn(move || fetch(segment, 0)));
            let parts =
                scope.spawn(move || segments.into_iter().try_for_each(|segment| fetch(segment, segment.len() / 2 + 1)));
            let seen: Vec<u64> = numbered().step_by(7).map(|(_, word)| word.load(Relaxed)).collect();
            let expected = (0..).step_by(7).map(|page| round << 16 | page);
            if !seen.iter().copied().eq(expected.take(seen.len())) {
                return Err(Error::from(format!("round {round}: loads beside a fetch have seen {seen:x?}")));
            }
            for fetched in whole.into_iter().chain([parts]) {
                fetched.join().unwrap()?;
            }
            Ok(())
        })?;
        for (page, word) in numbered() {
            if word.load(Relaxed) != round << 16 | page {
                return Err(format!("round {round}, page {page}: {:#x}", word.load(Relaxed)).into());
            }
        }
    }
    Ok(job.finish()?)
}

/// Rank 0 stores to one page after the other, again and again, while the others fetch them: a process that has seen a store sees those before it.
fn ordered(rounds: u64) -> Done {
    let job = Job::join()?;
    let segment = job.segment("ordered", 80 * PAGE_BYTES)?;
    job.barrier(0)?;
    if job.rank() == 0 {
        (1..=rounds).for_each(|round| pages(segment).for_each(|word| word.store(round, Relaxed)));
        return Ok(job.finish()?);
    }
    loop {
        job.fetch(segment, 0..segment.len())?;
        let seen: Vec<u64> = pages(segment).rev().map(|word| word.load(Relaxed)).collect();
        if !seen.is_sorted() {
            return Err(format!("the last page first: {seen:?}").into());
        }
        if seen[0] == rounds {
            return Ok(job.finish()?);
        }
    }
}

/// One process after the other fetches all pages, and stores to all of them, under a lock.
fn locked(rounds: u64) -> Done {
    let job = Job::join()?;
    let segment = job.segment("locked", 80 * PAGE_BYTES)?;
    loop {
        let _guard = job.lock(3)?;
        job.fetch(segment, 0..segment.len())?;
        let seen: Vec<u64> = pages(segment).map(|word| word.load(Relaxed)).collect();
        if seen.iter().any(|value| *value != seen[0]) {
            return Err(format!("under the lock: {seen:?}").into());
        }
        if seen[0] >= rounds {
            break;
        }
        pages(segment).for_each(|word| word.store(seen[0] + 1, Relaxed));
    }
    Ok(job.finish()?)
}

/// Rank 1 is killed when the others have a part of its pages, and wait for one that a device has pinned there.
fn torn() -> Done {
    const PINNED: usize = 50;
    let job = Job::join()?;
    let segment = job.segment("torn", 100 * PAGE_BYTES)?;
    if job.rank() != 1 {
        job.barrier(0)?;
        job.fetch(segment, 0..segment.len())?;
        return Err("all pages of a process that was killed have come".into());
    }
    pages(segment).for_each(|word| word.store(1, Relaxed));
    let ring = io_uring::IoUring::new(2)?;
    let buffer =
        libc::iovec { iov_base: segment.as_ptr().wrapping_add(PINNED * PAGE_BYTES).cast(), iov_len: PAGE_BYTES };
    // SAFETY: the segment stays mapped to the end of this process; its words are atomics, and the ring stores nothing there.
    unsafe { ring.submitter().register_buffers(&[buffer])? };
    job.barrier(0)?;
    let deadline = Instant::now() + Duration::from_secs(20);
    while job.counters().pin_waits == 0 && Instant::now() < deadline {
        std::thread::yield_now();
    }
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)?;
    Ok(())
}
