//! A program limited by memory bandwidth: it adds two arrays into a third, together larger than any cache.

use std::hint::black_box;
use std::io::{BufRead, Write};

use clap::Args;
use rustix::time::{ClockId, clock_gettime};

use crate::parent;
use byway_remote::units::parse_size;

/// Flags of the program that experiments start beside a node.
#[derive(Args, Clone, Copy, Debug)]
pub struct MemoryProgramArguments {
    /// End when this process, the parent, ends
    #[arg(long, value_name = "PID")]
    pub end_with: i32,
    /// Bytes of each of the three arrays
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub bytes: u64,
}

/// For each line with a number, goes over its memory so often and prints the seconds of CPU that it took; ends with its input.
/// Seconds of CPU, because others may be given its CPU meanwhile; waiting for the memory counts, as a CPU waits for that itself.
///
/// # Errors
/// The parent has ended.
pub fn run(arguments: MemoryProgramArguments) -> std::io::Result<()> {
    parent::end_with(arguments.end_with)?;
    let len = usize::try_from(arguments.bytes / size_of::<f64>() as u64).unwrap_or(0).max(1);
    // Written, so that the pages are there.
    let (first, second, mut sum) = (vec![1.5; len], vec![2.5; len], vec![0.5; len]);
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let passes: u32 = line.trim().parse().unwrap_or(0);
        let began = cpu_seconds();
        for _ in 0..passes {
            add(&first, &second, &mut sum);
            black_box(&mut sum);
        }
        let mut out = std::io::stdout().lock();
        // Whoever does not listen has ended, and so do we.
        let _ = writeln!(out, "{:.6}", cpu_seconds() - began).and_then(|()| out.flush());
    }
    Ok(())
}

fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn add(first: &[f64], second: &[f64], sum: &mut [f64]) {
    for ((sum, first), second) in sum.iter_mut().zip(first).zip(second) {
        *sum = first + 3.0 * second;
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_pass_goes_over_all_of_it() {
        let mut sum = [0.0; 5];
        super::add(&[1.5; 5], &[2.5; 5], &mut sum);
        assert!(sum.iter().all(|sum: &f64| (sum - 9.0).abs() < 1e-9), "{sum:?}");
    }
}
