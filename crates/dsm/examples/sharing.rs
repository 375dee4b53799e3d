//! False sharing: `byway dsm run -n 2 --consistency rc -- sharing 1000`. The processes store to words of one page (or of as many as a second
//! number says) that take turns, and meet at a barrier after each round. With `sc` the page goes from one to the other for each few stores, with `rc` once a round.

use std::sync::atomic::Ordering::Relaxed;

use byway_dsm::Job;
use byway_dsm::limits::PAGE_BYTES;

type Error = Box<dyn std::error::Error>;

fn main() -> std::process::ExitCode {
    run().map_or_else(
        |error| {
            eprintln!("sharing: {error}");
            std::process::ExitCode::FAILURE
        },
        |()| std::process::ExitCode::SUCCESS,
    )
}

fn run() -> Result<(), Error> {
    let number = |place, default| std::env::args().nth(place).map_or(Ok(default), |text| text.parse::<u64>());
    let (rounds, pages) = (number(1, 100)?, number(2, 1)? as usize);
    let job = Job::join()?;
    let (rank, ranks) = (usize::from(job.rank()), usize::from(job.ranks()));
    let words = job.segment("words", pages * PAGE_BYTES)?.words();
    job.barrier(0)?;
    let began = std::time::Instant::now();
    for _ in 0..rounds {
        for word in words.iter().skip(rank).step_by(ranks) {
            word.store(word.load(Relaxed) + 1, Relaxed);
        }
        job.barrier(1)?;
    }
    let took = began.elapsed();
    if let Some(at) = (0..words.len()).find(|at| words[*at].load(Relaxed) != rounds) {
        return Err(format!("word {at} is {} after {rounds} rounds", words[at].load(Relaxed)).into());
    }
    if rank == 0 {
        println!("{rounds} rounds right on {ranks} processes in {took:?}, {:?}", job.counters());
    }
    Ok(job.finish()?)
}
