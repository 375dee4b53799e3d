//! Multiplies two matrices by all processes of a job: `byway dsm run -n 4 -- matrix 256`. Each process writes the rows that are its
//! own, and reads all of the second matrix; process 0 compares with the product that it computes alone.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use byway_dsm::Job;

type Error = Box<dyn std::error::Error>;

fn load(matrix: &[AtomicU64], at: usize) -> f64 {
    f64::from_bits(matrix[at].load(Relaxed))
}

fn store(matrix: &[AtomicU64], at: usize, value: f64) {
    matrix[at].store(value.to_bits(), Relaxed);
}

fn main() -> std::process::ExitCode {
    run().map_or_else(
        |error| {
            eprintln!("matrix: {error}");
            std::process::ExitCode::FAILURE
        },
        |()| std::process::ExitCode::SUCCESS,
    )
}

fn run() -> Result<(), Error> {
    let size: usize = std::env::args().nth(1).map_or(Ok(128), |text| text.parse())?;
    let job = Job::join()?;
    let (rank, ranks) = (usize::from(job.rank()), usize::from(job.ranks()));
    let segment = |name| job.segment(name, size * size * 8).map(|segment| segment.words());
    let (first, second, product) = (segment("first")?, segment("second")?, segment("product")?);
    let own = size * rank / ranks..size * (rank + 1) / ranks;
    for row in own.clone() {
        for column in 0..size {
            store(first, row * size + column, (row * 3 + column) as f64 * 0.5);
            store(second, row * size + column, (row + column * 7) as f64 * 0.25);
        }
    }
    job.barrier(0)?;
    let dot = |row: usize, column: usize| {
        (0..size).map(|at| load(first, row * size + at) * load(second, at * size + column)).sum::<f64>()
    };
    for row in own {
        for column in 0..size {
            store(product, row * size + column, dot(row, column));
        }
    }
    job.barrier(1)?;
    if rank == 0 {
        for at in 0..size * size {
            let (right, got) = (dot(at / size, at % size), load(product, at));
            if right.to_bits() != got.to_bits() {
                return Err(format!("row {} column {}: {got} instead of {right}", at / size, at % size).into());
            }
        }
        println!("product of {size} x {size} right on {ranks} processes, {:?}", job.counters());
    }
    Ok(job.finish()?)
}
