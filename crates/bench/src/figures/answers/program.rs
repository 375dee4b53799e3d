//! Programs with shared memory that the experiment runs as jobs. Rank 0 prints lines of a name and a number.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use byway_dsm::limits::PAGE_BYTES;
use byway_dsm::{CallError, Job, JoinError};
use byway_remote::output;
use clap::{Args, ValueEnum};

/// Words of a page.
const WORDS: usize = PAGE_BYTES / size_of::<u64>();
/// Pages that are fetched, one after the other.
const PAGES: usize = 256;
/// What rank 0 computes between two fetches.
const BETWEEN: Duration = Duration::from_micros(200);
const OMEGA: f64 = 1.25;
/// The longest tour of the task queue.
const CITIES: u64 = 11;

/// Which program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SharedProgram {
    /// Fetches pages of ranks that wait.
    Idle,
    /// Fetches pages of ranks that compute.
    Computing,
    /// Relaxes a grid.
    Sor,
    /// Factors a matrix.
    Lu,
    /// Finds the shortest tour, by a queue of tasks.
    Tsp,
}

/// Flags of a rank of a job that an experiment starts.
#[derive(Args, Clone, Copy, Debug)]
pub struct SharedProgramArguments {
    /// Which program
    pub program: SharedProgram,
    /// Rows of the grid or matrix, of a page each: 512 words
    #[arg(long, default_value_t = 512)]
    pub rows: usize,
}

/// Why a rank has printed nothing.
#[derive(Debug, thiserror::Error)]
pub enum SharedProgramError {
    /// It is in no job.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// A call.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Runs a rank.
///
/// # Errors
/// See [`SharedProgramError`].
pub fn run(arguments: SharedProgramArguments) -> Result<(), SharedProgramError> {
    let job = Job::join()?;
    let rows = arguments.rows.clamp(8, WORDS);
    match arguments.program {
        SharedProgram::Idle => fetch(&job, false)?,
        SharedProgram::Computing => fetch(&job, true)?,
        SharedProgram::Sor => sor(&job, rows)?,
        SharedProgram::Lu => lu(&job, rows)?,
        SharedProgram::Tsp => tsp(&job)?,
    }
    Ok(job.finish()?)
}

/// Some 5 us of arithmetic.
fn unit(job: &Job) {
    let mut sum = 1.0_f64;
    for step in 0..1500 {
        sum = black_box(sum * 1.000_000_1 + f64::from(step));
    }
    job.poll();
}

fn compute_for(job: &Job, time: Duration) -> u64 {
    let (began, mut units) = (Instant::now(), 0);
    while began.elapsed() < time {
        unit(job);
        units += 1;
    }
    units
}

/// Rank 0 loads from pages that rank 1 has written; the others wait, or compute. Prints the times of loads, and what the others compute in a
/// second with and without these loads.
fn fetch(job: &Job, computes: bool) -> Result<(), SharedProgramError> {
    let (rank, ranks) = (usize::from(job.rank()), usize::from(job.ranks()));
    let pages = job.segment("pages", PAGES * PAGE_BYTES)?.words();
    let counts = job.segment("counts", 64 * PAGE_BYTES)?.words();
    let ends = job.segment("ends", 2 * PAGE_BYTES)?.words();
    for (phase, asks) in [false, true].into_iter().enumerate() {
        if rank == 1 {
            pages.iter().step_by(WORDS).for_each(|word| word.store(phase as u64 + 1, Relaxed));
        }
        let end = &ends[phase * WORDS];
        let _ = end.load(Relaxed);
        job.barrier(0)?;
        let began = Instant::now();
        let mut times = Vec::new();
        let mut units = 0;
        if rank == 0 {
            for word in pages.iter().step_by(WORDS) {
                units += compute_for(job, BETWEEN);
                if asks {
                    let asked = Instant::now();
                    let _ = word.load(Relaxed);
                    times.push(asked.elapsed().as_secs_f64() * 1e6);
                }
            }
            end.store(1, Relaxed);
        } else if computes {
            while end.load(Relaxed) == 0 {
                unit(job);
                units += 1;
            }
        }
        counts[rank * WORDS].store((units as f64 / began.elapsed().as_secs_f64()) as u64, Relaxed);
        job.barrier(1)?;
        if rank == 0 {
            let rate: u64 = (1..ranks).map(|rank| counts[rank * WORDS].load(Relaxed)).sum();
            output::line(format_args!("{} {rate}", if asks { "asked" } else { "unasked" }));
            times.sort_by(f64::total_cmp);
            if let (Some(middle), Some(slow)) = (times.get(times.len() / 2), times.get(times.len() * 99 / 100)) {
                output::line(format_args!("p50 {middle:.2}\np99 {slow:.2}"));
            }
        }
        job.barrier(0)?;
    }
    Ok(())
}

fn value(words: &[AtomicU64], at: usize) -> f64 {
    f64::from_bits(words[at].load(Relaxed))
}

fn set(words: &[AtomicU64], at: usize, value: f64) {
    words[at].store(value.to_bits(), Relaxed);
}

/// Prints the time, the pages that came meanwhile, and the sum of all bits.
fn report(job: &Job, began: Instant, words: &[AtomicU64]) {
    if job.rank() == 0 {
        output::line(format_args!("ms {:.3}", began.elapsed().as_secs_f64() * 1e3));
        output::line(format_args!("pages {}", job.counters().pages_received));
        let sum = words.iter().fold(0_u64, |sum, word| sum.rotate_left(1) ^ word.load(Relaxed));
        output::line(format_args!("result {}", sum % 1_000_003));
    }
}

/// Red-black relaxation: each rank has a band of rows, and reads the rows beside it.
fn sor(job: &Job, rows: usize) -> Result<(), SharedProgramError> {
    let (rank, ranks) = (usize::from(job.rank()), usize::from(job.ranks()));
    let grid = job.segment("grid", rows * PAGE_BYTES)?.words();
    for at in rows * rank / ranks * WORDS..rows * (rank + 1) / ranks * WORDS {
        set(grid, at, (at % 1009) as f64);
    }
    job.barrier(0)?;
    let began = Instant::now();
    let own = 1 + (rows - 2) * rank / ranks..1 + (rows - 2) * (rank + 1) / ranks;
    for step in 0..40 {
        for row in own.clone() {
            for column in (1..WORDS - 1).filter(|column| (row + column) % 2 == step % 2) {
                let at = row * WORDS + column;
                let around =
                    value(grid, at - 1) + value(grid, at + 1) + value(grid, at - WORDS) + value(grid, at + WORDS);
                set(grid, at, value(grid, at) + OMEGA * (around / 4.0 - value(grid, at)));
            }
            job.poll();
        }
        job.barrier(1)?;
    }
    report(job, began, grid);
    Ok(job.barrier(2)?)
}

/// Factors a matrix without pivots; rank r has every row whose number is r modulo the ranks.
fn lu(job: &Job, rows: usize) -> Result<(), SharedProgramError> {
    let (rank, ranks) = (usize::from(job.rank()), usize::from(job.ranks()));
    let matrix = job.segment("matrix", rows * PAGE_BYTES)?.words();
    for row in (rank..rows).step_by(ranks) {
        for column in 0..rows {
            let entry = if row == column { 2 * rows } else { (row * 31 + column * 17) % 13 };
            set(matrix, row * WORDS + column, entry as f64);
        }
    }
    job.barrier(0)?;
    let began = Instant::now();
    for pivot in 0..rows {
        let first = pivot + 1 + (rank + ranks - (pivot + 1) % ranks) % ranks;
        for row in (first..rows).step_by(ranks) {
            let factor = value(matrix, row * WORDS + pivot) / value(matrix, pivot * WORDS + pivot);
            set(matrix, row * WORDS + pivot, factor);
            for column in pivot + 1..rows {
                let less = factor * value(matrix, pivot * WORDS + column);
                set(matrix, row * WORDS + column, value(matrix, row * WORDS + column) - less);
            }
            job.poll();
        }
        job.barrier(1)?;
    }
    report(job, began, matrix);
    Ok(job.barrier(2)?)
}

fn distance(from: u64, to: u64) -> u64 {
    10 + (from.min(to).pow(2) * 7919 + from.max(to) * 104_729) % 90
}

fn search(visited: u64, at: u64, length: u64, best: u64) -> u64 {
    if length >= best {
        return best;
    }
    if visited.count_ones() == CITIES as u32 {
        return best.min(length + distance(at, 0));
    }
    let left = (1..CITIES).filter(|city| visited >> city & 1 == 0);
    left.fold(best, |best, city| search(visited | 1 << city, city, length + distance(at, city), best))
}

/// The shortest tour: ranks take the first two cities of tours from a queue, under a lock.
fn tsp(job: &Job) -> Result<(), SharedProgramError> {
    let words = job.segment("queue", 2 * PAGE_BYTES)?.words();
    let (task, best) = (&words[0], &words[WORDS]);
    if job.rank() == 0 {
        best.store(u64::from(u32::MAX), Relaxed);
    }
    job.barrier(0)?;
    let began = Instant::now();
    loop {
        let taken = {
            let _queue = job.lock(1)?;
            let taken = task.load(Relaxed);
            task.store(taken + 1, Relaxed);
            taken
        };
        let (first, second) = (taken % CITIES, taken / CITIES);
        if second >= CITIES {
            break;
        }
        if first == 0 || second == 0 || first == second {
            continue;
        }
        let length = distance(0, first) + distance(first, second);
        let known = best.load(Relaxed);
        let found = search(1 | 1 << first | 1 << second, second, length, known);
        job.poll();
        if found < known {
            let _best = job.lock(2)?;
            best.store(best.load(Relaxed).min(found), Relaxed);
        }
    }
    job.barrier(1)?;
    report(job, began, std::slice::from_ref(best));
    Ok(job.barrier(2)?)
}
