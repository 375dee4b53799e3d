//! UCX's own benchmark, `ucx_perftest`: both ends poll.

use crate::process::{self, Background};
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::super::cpu::CpuClock;
use super::Figures;
use super::programs::START_LIMIT;

const PORT: u16 = 13_337;
/// Operations of the first run, which tells how many fit into the time, and what starting costs.
const FIRST_OPERATIONS: u64 = 1000;
/// However fast the first run says that it is: it is short, and may have been lucky.
const OPERATIONS_MAX: u64 = 20_000_000;
/// One warm-up operation for so many that are measured.
const MEASURED_PER_WARM: u64 = 10;

/// A test: which of its own, over what, and with how many bytes.
pub struct Test<'a> {
    program: PathBuf,
    name: &'static str,
    transports: &'static str,
    bytes: usize,
    folder: &'a Path,
}

/// What one run printed, and what both its processes spent, their start included.
#[derive(Clone, Copy, Debug)]
struct Ran {
    operations: u64,
    said: Said,
    cpu_us: f64,
}

/// The last line.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Said {
    p50_us: f64,
    /// One way, where the test goes there and back.
    mean_us: f64,
    megabytes_per_second: f64,
}

impl<'a> Test<'a> {
    /// # Errors
    /// It is not installed.
    pub fn new(name: &'static str, transports: &'static str, bytes: usize, folder: &'a Path) -> Result<Self> {
        let program = process::find_program("ucx_perftest");
        let program = program.context("ucx_perftest is not installed (package ucx-utils)")?;
        Ok(Self { program, name, transports, bytes, folder })
    }

    /// Runs it for about so long.
    pub fn run(&self, seconds: f64) -> Result<Figures> {
        let first = self.ran(FIRST_OPERATIONS)?;
        let there_and_back = self.name.ends_with("_lat");
        let second = self.ran(operations_for(first.said.mean_us, there_and_back, seconds))?;
        let Said { p50_us, megabytes_per_second, .. } = second.said;
        Ok(Figures { p50_us, megabytes_per_second, cpu_us: cpu_of_each(&first, &second) })
    }

    fn command(&self, operations: u64) -> Command {
        let device = if self.transports == "tcp" { "lo" } else { "all" };
        let mut command = Command::new(&self.program);
        command.env("UCX_TLS", self.transports).env("UCX_NET_DEVICES", device).env("UCX_WARN_UNUSED_ENV_VARS", "n");
        command.args(["-p", &PORT.to_string(), "-t", self.name, "-s", &self.bytes.to_string()]);
        command.args(["-n", &operations.to_string(), "-w", &(operations / MEASURED_PER_WARM).to_string()]);
        command
    }

    fn ran(&self, operations: u64) -> Result<Ran> {
        let before = CpuClock::children()?;
        let mut server = Background::start(&mut self.command(operations), &self.folder.join("ucx.log"))?;
        process::wait_for("ucx_perftest to listen", START_LIMIT, || {
            ensure!(!server.has_ended()?, "ucx_perftest ended before it listened");
            // A connection to try it would be taken for the other end.
            let sockets = std::fs::read_to_string("/proc/net/tcp")? + &std::fs::read_to_string("/proc/net/tcp6")?;
            Ok(listens(&sockets, PORT).then_some(()))
        })?;
        let said = process::output(self.command(operations).arg("127.0.0.1"))?;
        // Its CPU time is told when it has been waited for.
        process::wait_for("the end of ucx_perftest's server", START_LIMIT, || Ok(server.has_ended()?.then_some(())))?;
        let cpu_us = CpuClock::children()?.microseconds_since(&before);
        let said = parse(&said).with_context(|| format!("ucx_perftest said {said}"))?;
        Ok(Ran { operations, said, cpu_us })
    }
}

/// How many operations take so long.
fn operations_for(mean_us: f64, there_and_back: bool, seconds: f64) -> u64 {
    let each_us = if there_and_back { 2.0 * mean_us } else { mean_us };
    ((seconds * 1e6 / each_us.max(1e-3)) as u64).clamp(2 * FIRST_OPERATIONS, OPERATIONS_MAX)
}

/// CPU time of both ends for an operation: what the longer run spent more than the shorter, in which starting, the same in both, is
/// left out. The clock's ticks are 10 ms, of two seconds and more.
fn cpu_of_each(shorter: &Ran, longer: &Ran) -> f64 {
    let more = longer.operations - shorter.operations;
    (longer.cpu_us - shorter.cpu_us).max(0.0) / (more + more / MEASURED_PER_WARM) as f64
}

/// Whether one of the kernel's list of sockets listens at a port.
fn listens(sockets: &str, port: u16) -> bool {
    const LISTEN: &str = "0A";
    let local = format!(":{port:04X}");
    sockets.lines().any(|line| {
        let mut words = line.split_whitespace().skip(1);
        words.next().is_some_and(|word| word.ends_with(&local)) && words.nth(1) == Some(LISTEN)
    })
}

/// The last line: operations, median, mean and overall latency in us, rates in MiB/s, mean and overall, messages.
fn parse(said: &str) -> Option<Said> {
    let line = said.lines().find(|line| line.starts_with("Final:"))?;
    let numbers: Vec<f64> = line.split_whitespace().skip(1).filter_map(|word| word.parse().ok()).collect();
    let [_, p50_us, _, mean_us, _, rate, ..] = numbers[..] else { return None };
    Some(Said { p50_us, mean_us, megabytes_per_second: rate * 1.048_576 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_is_understood() {
        let line = "[thread 0] 8298 7.951 8656.974 973.473 0.01 0.06 111 1088\n\
                    Final:                 20000      0.546    34.051   274.366        1.79       0.22       29367        3645\n";
        let said = parse(line).unwrap();
        assert_eq!(said, Said { p50_us: 0.546, mean_us: 274.366, megabytes_per_second: 0.22 * 1.048_576 });
        assert!(parse("nothing").is_none());
    }

    #[test]
    fn a_listener_is_found_by_its_port_and_state() {
        let line = "   0: 00000000:3419 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1\n\
                       1: 0100007F:3420 0100007F:3419 01 00000000:00000000 00:00000000 00000000     0        0 2 1\n";
        assert!(listens(line, 0x3419) && !listens(line, 0x3420) && !listens(line, 0x341a));
    }

    #[test]
    fn starting_is_not_counted_to_the_operations() {
        let said = Said { p50_us: 1.0, mean_us: 1.0, megabytes_per_second: 1.0 };
        let ran = |operations, cpu_us| Ran { operations, said, cpu_us };
        // 60 ms to start, and 2 us for each of the operations, the warm-up's too.
        let cpu_us = cpu_of_each(&ran(1000, 62_200.0), &ran(1_001_000, 62_200.0 + 2_200_000.0));
        assert!((cpu_us - 2.0).abs() < 1e-9, "{cpu_us}");
        assert!(cpu_of_each(&ran(1000, 50_000.0), &ran(2000, 40_000.0)).abs() < 1e-9, "less than nothing is nothing");
    }

    #[test]
    fn operations_fill_the_time_within_bounds() {
        assert_eq!(operations_for(10.0, false, 1.0), 100_000);
        assert_eq!(operations_for(10.0, true, 1.0), 50_000, "there and back is twice the latency that is printed");
        assert_eq!(operations_for(5000.0, false, 1.0), 2000);
        assert_eq!(operations_for(0.0, false, 1.0), OPERATIONS_MAX);
    }
}
