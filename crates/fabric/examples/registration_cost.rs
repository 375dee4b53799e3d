//! What registration costs by size, against copying into memory that is registered already (Goglin, fig. 6), and what the
//! cache makes of it: a hit, a miss, and what a change of the address space costs whoever makes it.
//!
//! `cargo run --release -p byway-fabric --example registration_cost [ROUNDS]`; medians of so many rounds, in microseconds.

use std::error::Error;
use std::time::Duration;

use byway_fabric::registration::Mode;
use byway_fabric::registration::measured::{Cost, CostMeter};

const ROUNDS_DEFAULT: usize = 101;
const SIZES: [usize; 8] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e6
}

fn main() -> Result<(), Box<dyn Error>> {
    let rounds = std::env::args().nth(1).map_or(Ok(ROUNDS_DEFAULT), |text| text.parse())?;
    let meter = CostMeter::new()?;
    if meter.mode() != Mode::Cached {
        println!("no cache: {:?}", meter.mode());
    }
    println!("| size | register + deregister | copy | miss | hit | evict | unmap, cached | unmap, unwatched |");
    println!("|---|---|---|---|---|---|---|---|");
    for bytes in SIZES {
        let mut columns = [const { Vec::new() }; 7];
        // Longer ones take longer to make: fewer rounds.
        for _ in 0..(rounds >> (bytes >> 22).min(3)).max(3) {
            let Cost { register, copy, miss, hit, evict, unmap_cached, unmap } = meter.round(bytes)?;
            for (column, time) in columns.iter_mut().zip([register, copy, miss, hit, evict, unmap_cached, unmap]) {
                column.push(time);
            }
        }
        let figures: Vec<String> = columns.into_iter().map(|column| format!("{:.2}", median(column))).collect();
        println!("| {} KiB | {} |", bytes >> 10, figures.join(" | "));
    }
    println!("{:?}", meter.counters());
    Ok(())
}
