//! `peers wires`: the fabric alone, beside programs that use sockets directly, UCX, iperf3 and a plain copy.

mod programs;
mod ucx;

use super::report::median;
use anyhow::{Context, Result};
use programs::{Ends, Iperf, PingPong, Waiting, Wire};
use serde::Serialize;
use std::fmt::Write;
use std::path::Path;
use ucx::Test;

/// What one run gave; 0 where it is not known.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Figures {
    pub p50_us: f64,
    pub megabytes_per_second: f64,
    /// Of both ends together, for each operation; where latencies are of one way, of there and back.
    pub cpu_us: f64,
}

/// What ours must be of the peer's.
#[derive(Clone, Copy, Debug, Serialize)]
pub enum Target {
    /// Of its median latency, at most.
    Latency(f64),
    /// Of its rate, at least.
    Rate(f64),
}

type Run<'a> = Box<dyn Fn() -> Result<Figures> + 'a>;

struct Case<'a> {
    name: String,
    ours: Run<'a>,
    peer: &'static str,
    theirs: Run<'a>,
    target: Target,
    /// Whether the CPU time must not be above the peer's; where both poll, it is shown and not judged.
    counts_cpu: bool,
}

/// What came of a case: medians.
#[derive(Debug, Serialize)]
pub struct Outcome {
    case: String,
    peer: &'static str,
    ours: Figures,
    theirs: Figures,
    target: Target,
    counts_cpu: bool,
}

impl Outcome {
    fn ratio(&self) -> f64 {
        match self.target {
            Target::Latency(_) => self.ours.p50_us / self.theirs.p50_us,
            Target::Rate(_) => self.ours.megabytes_per_second / self.theirs.megabytes_per_second,
        }
    }

    fn is_met(&self) -> bool {
        match self.target {
            Target::Latency(most) => self.ratio() <= most,
            Target::Rate(least) => self.ratio() >= least,
        }
    }

    fn cpu_ratio(&self) -> Option<f64> {
        (self.counts_cpu && self.theirs.cpu_us > 0.0).then(|| self.ours.cpu_us / self.theirs.cpu_us)
    }
}

/// Sizes that are compared with UCX, which polls; so do we there.
const SIZES: [usize; 5] = [64, 1 << 10, 8 << 10, 64 << 10, 1 << 20];

/// Runs all cases whose name contains `only`, in turns.
pub fn run(folder: &Path, rounds: usize, seconds: u32, only: Option<&str>) -> Result<Vec<Outcome>> {
    let seconds = f64::from(seconds);
    let ends = Ends::build(folder, seconds)?;
    let by_hand = PingPong::build(folder, seconds)?;
    let iperf = Iperf::start(folder, seconds)?;
    let mut cases = by_sockets(&ends, &by_hand, &iperf);
    if crate::process::find_program("ucx_perftest").is_some() {
        cases.extend(by_ucx(&ends, folder, seconds));
    } else {
        println!("SKIP the cases of UCX: ucx_perftest is not installed (package ucx-utils)");
    }
    cases.retain(|case| only.is_none_or(|part| case.name.contains(part)));
    let mut all: Vec<[Vec<Figures>; 2]> = cases.iter().map(|_| Default::default()).collect();
    for round in 1..=rounds {
        for (case, [ours, theirs]) in cases.iter().zip(&mut all) {
            let one = (case.ours)().with_context(|| format!("{}: ours", case.name))?;
            let other = (case.theirs)().with_context(|| format!("{}: {}", case.name, case.peer))?;
            eprintln!(
                "round {round}: {:<24} ours {:>9.2} us {:>7.0} MB/s   {} {:>9.2} us {:>7.0} MB/s",
                case.name, one.p50_us, one.megabytes_per_second, case.peer, other.p50_us, other.megabytes_per_second
            );
            ours.push(one);
            theirs.push(other);
        }
    }
    let outcome = |(case, [ours, theirs]): (Case<'_>, [Vec<Figures>; 2])| Outcome {
        case: case.name,
        peer: case.peer,
        ours: middle(&ours),
        theirs: middle(&theirs),
        target: case.target,
        counts_cpu: case.counts_cpu,
    };
    Ok(cases.into_iter().zip(all).map(outcome).collect())
}

fn by_sockets<'a>(ends: &'a Ends, by_hand: &'a PingPong, iperf: &'a Iperf) -> Vec<Case<'a>> {
    let adaptive = Waiting::Adaptive;
    let case = |name: &str, ours: Run<'a>, peer, theirs: Run<'a>, target, counts_cpu| Case {
        name: name.to_owned(),
        ours,
        peer,
        theirs,
        target,
        counts_cpu,
    };
    let get = |words: &'static [&'static str]| -> Run<'a> { Box::new(move || ends.run(Wire::Shared, adaptive, words)) };
    let unix = || -> Run<'a> { Box::new(|| by_hand.run("unix", 128, 4096)) };
    vec![
        case(
            "shm-4k-get",
            // From all over more than a cache holds: bytes that nobody has just touched.
            get(&["get", "--bytes", "4096", "--region", "134217728"]),
            "unix socket, C",
            unix(),
            Target::Latency(0.2),
            true,
        ),
        case(
            "shm-4k-call",
            get(&["call", "--bytes", "128", "--reply", "4096"]),
            "unix socket, C",
            unix(),
            Target::Latency(0.2),
            true,
        ),
        case(
            "shm-1m-get-qd4",
            get(&["get", "--bytes", "1048576", "--depth", "4"]),
            "memcpy, one thread",
            Box::new(|| ends.copy(1 << 20, 4)),
            Target::Rate(0.8),
            false,
        ),
        case(
            "tcp-128-call",
            Box::new(move || ends.run(Wire::Tcp, adaptive, &["call"])),
            "tcp sockets, C",
            Box::new(|| by_hand.run("tcp", 128, 128)),
            Target::Latency(0.7),
            true,
        ),
        case(
            "tcp-1m-stream",
            Box::new(move || ends.run(Wire::Tcp, adaptive, &["get", "--bytes", "1048576", "--depth", "2"])),
            "iperf3",
            Box::new(|| iperf.run()),
            Target::Rate(0.95),
            true,
        ),
    ]
}

fn by_ucx<'a>(ends: &'a Ends, folder: &'a Path, seconds: f64) -> Vec<Case<'a>> {
    let mut cases = Vec::new();
    for (wire, name, transports) in [(Wire::Tcp, "tcp", "tcp"), (Wire::Shared, "shm", "posix,cma")] {
        for bytes in SIZES {
            let ours = move |mode: &str, depth: &str| {
                ends.run(wire, Waiting::Polling, &[mode, "--bytes", &bytes.to_string(), "--depth", depth])
            };
            cases.push(Case {
                name: format!("{name}-{bytes}-latency"),
                // UCX's is one way, half of there and back.
                ours: Box::new(move || ours("echo", "1").map(one_way)),
                peer: "ucp_am_lat",
                theirs: Box::new(move || Test::new("ucp_am_lat", transports, bytes, folder)?.run(seconds)),
                target: Target::Latency(1.1),
                counts_cpu: false,
            });
            cases.push(Case {
                name: format!("{name}-{bytes}-rate"),
                ours: Box::new(move || ours("give", "16")),
                peer: "ucp_am_bw",
                theirs: Box::new(move || Test::new("ucp_am_bw", transports, bytes, folder)?.run(seconds)),
                target: Target::Rate(0.9),
                counts_cpu: false,
            });
        }
    }
    cases.push(Case {
        name: "tcp-4k-get".to_owned(),
        ours: Box::new(move || ends.run(Wire::Tcp, Waiting::Polling, &["get", "--bytes", "4096"])),
        peer: "ucp_get",
        theirs: Box::new(move || Test::new("ucp_get", "tcp", 4096, folder)?.run(seconds)),
        target: Target::Latency(0.1),
        counts_cpu: false,
    });
    cases
}

/// Of an echo, one of its two ways, as UCX has it: the same bytes in half of the time.
fn one_way(echo: Figures) -> Figures {
    let Figures { p50_us, megabytes_per_second, cpu_us } = echo;
    Figures { p50_us: p50_us / 2.0, megabytes_per_second: megabytes_per_second * 2.0, cpu_us }
}

fn middle(figures: &[Figures]) -> Figures {
    let of = |field: fn(&Figures) -> f64| median(figures.iter().map(field).collect());
    Figures {
        p50_us: of(|one| one.p50_us),
        megabytes_per_second: of(|one| one.megabytes_per_second),
        cpu_us: of(|one| one.cpu_us),
    }
}

/// Outcomes as a table for a document.
pub fn markdown(outcomes: &[Outcome]) -> String {
    let mut text = "| case | peer | p50 us, ours and theirs | MB/s | CPU us | ratio | target | |\n|---|---|---|---|---|---|---|---|\n"
        .to_owned();
    for outcome in outcomes {
        let (ours, theirs) = (&outcome.ours, &outcome.theirs);
        let target = match outcome.target {
            Target::Latency(most) => format!("p50 <= {most}"),
            Target::Rate(least) => format!("rate >= {least}"),
        };
        let cpu = outcome.cpu_ratio();
        let verdict = if outcome.is_met() { "met" } else { "MISSED" };
        let cpu_verdict = match cpu {
            Some(ratio) if ratio <= 1.0 => format!(", CPU {ratio:.2} met"),
            Some(ratio) => format!(", CPU {ratio:.2} MISSED"),
            None => String::new(),
        };
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {:.2} | {target} | {verdict}{cpu_verdict} |",
            outcome.case,
            outcome.peer,
            pair(ours.p50_us, theirs.p50_us, 2),
            pair(ours.megabytes_per_second, theirs.megabytes_per_second, 0),
            pair(ours.cpu_us, theirs.cpu_us, 2),
            outcome.ratio(),
        );
    }
    text
}

/// Ours and theirs; 0 is what is not known.
fn pair(ours: f64, theirs: f64, digits: usize) -> String {
    let number = |value: f64| if value > 0.0 { format!("{value:.digits$}") } else { "-".to_owned() };
    format!("{}, {}", number(ours), number(theirs))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(ours: f64, target: Target) -> Outcome {
        let figures = |value| Figures { p50_us: value, megabytes_per_second: value, cpu_us: value };
        Outcome { case: "c".into(), peer: "p", ours: figures(ours), theirs: figures(10.0), target, counts_cpu: true }
    }

    #[test]
    fn latencies_must_be_low_and_rates_high() {
        assert!(outcome(2.0, Target::Latency(0.2)).is_met() && !outcome(2.1, Target::Latency(0.2)).is_met());
        assert!(outcome(9.5, Target::Rate(0.95)).is_met() && !outcome(9.4, Target::Rate(0.95)).is_met());
        let text = markdown(&[outcome(11.0, Target::Rate(0.95))]);
        assert!(text.contains("1.10") && text.contains("met, CPU 1.10 MISSED"), "{text}");
    }

    #[test]
    fn cpu_is_shown_of_who_has_it_and_judged_only_where_it_counts() {
        let polling = Outcome { counts_cpu: false, ..outcome(11.0, Target::Rate(0.95)) };
        let text = markdown(&[polling]);
        assert!(text.contains("| 11.00, 10.00 | 1.10 |") && !text.contains("CPU 1.10"), "{text}");
        let mut unknown = outcome(11.0, Target::Rate(0.95));
        unknown.theirs.cpu_us = 0.0;
        let text = markdown(&[unknown]);
        assert!(text.contains("| 11.00, - |") && !text.contains(", CPU"), "{text}");
    }
}
