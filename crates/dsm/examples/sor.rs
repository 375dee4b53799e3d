//! Red-black successive over-relaxation on a grid: `byway dsm run -n 4 -- sor 256 20`. Each process has a band of rows and reads the
//! rows beside it; process 0 compares with the grid that it computes alone.
//!
//! With a third number it writes a checkpoint every so many steps, and `--resume` goes on behind the last one:
//! `byway dsm run -n 4 --checkpoint DIR -- sor 256 20 5`.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use byway_dsm::Job;

type Error = Box<dyn std::error::Error>;

const OMEGA: f64 = 1.25;

fn value(grid: &[AtomicU64], at: usize) -> f64 {
    f64::from_bits(grid[at].load(Relaxed))
}

fn begin(grid: &[AtomicU64], size: usize, row: usize) {
    for column in 0..size {
        let at_edge = row == 0 || row == size - 1 || column == 0 || column == size - 1;
        let heat = if at_edge { (row + 2 * column) as f64 } else { 0.0 };
        grid[row * size + column].store(heat.to_bits(), Relaxed);
    }
}

/// Half a step: the points of one colour of a row.
fn relax(grid: &[AtomicU64], size: usize, row: usize, colour: usize) {
    for column in (1..size - 1).filter(|column| (row + column) % 2 == colour) {
        let at = row * size + column;
        let around = value(grid, at - 1) + value(grid, at + 1) + value(grid, at - size) + value(grid, at + size);
        let next = value(grid, at) + OMEGA * (around / 4.0 - value(grid, at));
        grid[at].store(next.to_bits(), Relaxed);
    }
}

fn main() -> std::process::ExitCode {
    run().map_or_else(
        |error| {
            eprintln!("sor: {error}");
            std::process::ExitCode::FAILURE
        },
        |()| std::process::ExitCode::SUCCESS,
    )
}

fn run() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<usize>());
    let (size, steps) = (arguments.next().unwrap_or(Ok(128))?, arguments.next().unwrap_or(Ok(10))?);
    let every = arguments.next().unwrap_or(Ok(usize::MAX))?;
    let job = Job::join()?;
    let (rank, ranks) = (usize::from(job.rank()), usize::from(job.ranks()));
    let grid = job.segment("grid", size * size * 8)?.words();
    // What a resumed program has to know besides the grid.
    let done = &job.segment("steps done", size_of::<u64>())?.words()[0];
    if job.is_resumed() {
        println!("resumes behind step {}", done.load(Relaxed));
    } else {
        (size * rank / ranks..size * (rank + 1) / ranks).for_each(|row| begin(grid, size, row));
    }
    job.barrier(0)?;
    let first = done.load(Relaxed) as usize;
    let inner = size - 2;
    let own = 1 + inner * rank / ranks..1 + inner * (rank + 1) / ranks;
    let began = std::time::Instant::now();
    for step in first + 1..=steps {
        for colour in 0..2 {
            for row in own.clone() {
                relax(grid, size, row, colour);
                job.poll();
            }
            job.barrier(1)?;
        }
        if step % every == 0 {
            if rank == 0 {
                done.store(step as u64, Relaxed);
            }
            // The one before is still there, so the job goes on.
            job.checkpoint().map_or_else(|error| eprintln!("sor: step {step}: {error}"), drop);
        }
    }
    let took = began.elapsed();
    if rank == 0 {
        let alone: Vec<AtomicU64> = (0..size * size).map(|_| AtomicU64::new(0)).collect();
        (0..size).for_each(|row| begin(&alone, size, row));
        for _ in 0..steps {
            for colour in 0..2 {
                (1..size - 1).for_each(|row| relax(&alone, size, row, colour));
            }
        }
        let wrong = (0..size * size).find(|at| value(grid, *at).to_bits() != value(&alone, *at).to_bits());
        if let Some(at) = wrong {
            return Err(format!("{} instead of {} at {at}", value(grid, at), value(&alone, at)).into());
        }
        println!(
            "grid of {size} x {size} right after {steps} steps on {ranks} processes in {took:?}, {:?}",
            job.counters()
        );
    }
    Ok(job.finish()?)
}
