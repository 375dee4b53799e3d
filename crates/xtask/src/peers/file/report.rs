//! Medians of the rounds, ratios, and whether the targets are met.

use super::super::report::median;
use super::System;
use serde::Serialize;
use std::fmt::{self, Write};

/// What a figure counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Unit {
    #[serde(rename = "MB/s")]
    Megabytes,
    #[serde(rename = "1/s")]
    PerSecond,
    #[serde(rename = "us")]
    Microseconds,
    #[serde(rename = "s")]
    Seconds,
    #[serde(rename = "messages")]
    Messages,
    #[serde(rename = "% of a core")]
    PercentOfCore,
}

impl fmt::Display for Unit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Megabytes => "MB/s",
            Self::PerSecond => "1/s",
            Self::Microseconds => "us",
            Self::Seconds => "s",
            Self::Messages => "messages",
            Self::PercentOfCore => "% of a core",
        })
    }
}

impl Unit {
    /// Whether more is better.
    fn is_rate(self) -> bool {
        matches!(self, Self::Megabytes | Self::PerSecond)
    }
}

/// One figure of one run.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    pub case: &'static str,
    pub system: System,
    pub value: f64,
    pub unit: Unit,
    /// For each MiB or file; of the mount's process.
    pub client_cpu_us: Option<f64>,
    pub server_cpu_us: Option<f64>,
}

impl Sample {
    pub fn new(case: &'static str, system: System, value: f64, unit: Unit) -> Self {
        Self { case, system, value, unit, client_cpu_us: None, server_cpu_us: None }
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { case, system, value, unit, .. } = self;
        write!(formatter, "{case:<36} {:<12} {value:>10.3} {unit}", system.to_string())
    }
}

/// What byway must reach.
enum Ask {
    /// So many times as good as another system: its rate, or its time.
    Against(System, f64),
    /// As good as another case of its own, times this.
    OfCase(&'static str, f64),
    AtMost(f64),
}

use Ask::{Against, AtMost, OfCase};
use System::{Direct, Gluster, Local, Nbdfuse, Passthrough, Volume};

/// A time that may be 1.2 times the local one is 1 / 1.2 as good.
const ASKED: [(&str, Ask); 35] = [
    ("1 GiB read, cold", Against(Gluster, 3.0)),
    ("1 GiB read, cold", Against(Passthrough, 0.7)),
    ("1 GiB write + fsync", Against(Gluster, 4.0)),
    ("4 KiB random read, 1 thread", Against(Gluster, 3.0)),
    ("4 KiB random read, 16 threads", Against(Gluster, 3.0)),
    ("create, 1 thread", Against(Gluster, 4.0)),
    ("create, 8 threads", Against(Gluster, 4.0)),
    ("stat, 1 thread", Against(Gluster, 4.0)),
    ("stat, 8 threads", Against(Gluster, 4.0)),
    ("open-read-close, 1 thread", Against(Gluster, 4.0)),
    ("open-read-close, 8 threads", Against(Gluster, 4.0)),
    ("remove, 1 thread", Against(Gluster, 4.0)),
    ("remove, 8 threads", Against(Gluster, 4.0)),
    ("tar x of a source tree", Against(Gluster, 4.0)),
    ("1 GiB read again", Against(Local, 1.0 / 1.2)),
    ("1 GiB read by dd", Against(Local, 1.0 / 1.2)),
    ("messages of further reads", AtMost(0.0)),
    ("git status, warm", Against(Local, 1.0 / 1.2)),
    ("find, warm", Against(Local, 1.0 / 1.2)),
    ("ls -lR, warm", Against(Local, 1.0 / 1.2)),
    ("git status, warm", Against(Gluster, 4.0)),
    ("find, warm", Against(Gluster, 4.0)),
    ("ls -lR, warm", Against(Gluster, 4.0)),
    ("messages of a warm git status, find or ls", AtMost(0.0)),
    ("64 clients read one file", OfCase("4 clients read one file", 0.95)),
    ("idle, both ends", AtMost(0.5)),
    ("messages of an idle mount", AtMost(0.0)),
    ("1 GiB write + fsync", Against(Passthrough, 0.7)),
    ("attached, 4 KiB random read, depth 32", Against(Nbdfuse, 2.0)),
    ("attached, 1 MiB read, depth 8", Against(Nbdfuse, 1.5)),
    ("attached, 1 MiB write, depth 8", Against(Nbdfuse, 1.5)),
    ("without a mount, 1 MiB reads, tcp", Against(Volume, 0.9)),
    ("without a mount, 1 MiB reads, unix", Against(Volume, 0.9)),
    ("without a mount, 1 MiB reads, shm", Against(Volume, 0.9)),
    ("without a mount, 4 KiB random reads, shm: p50", Against(Direct, 1.0 / 0.35)),
];

/// A system in a case: medians.
#[derive(Debug, Serialize)]
pub struct Row {
    #[serde(flatten)]
    median: Sample,
    rounds: usize,
    /// What is asked of byway, and whether it is met.
    targets: Vec<(String, bool)>,
}

/// One row for each case and system, in the order in which they were first measured; cases stay together.
pub fn rows(samples: &[Sample]) -> Vec<Row> {
    let mut cases: Vec<&str> = Vec::new();
    for sample in samples {
        if !cases.contains(&sample.case) {
            cases.push(sample.case);
        }
    }
    let mut medians: Vec<(Sample, usize)> = Vec::new();
    for case in cases {
        let of_case: Vec<&Sample> = samples.iter().filter(|sample| sample.case == case).collect();
        for sample in &of_case {
            if !medians.iter().any(|(other, _)| other.case == case && other.system == sample.system) {
                let rounds: Vec<&Sample> =
                    of_case.iter().copied().filter(|other| other.system == sample.system).collect();
                medians.push((middle(&rounds), rounds.len()));
            }
        }
    }
    let all: Vec<Sample> = medians.iter().map(|(median, _)| median.clone()).collect();
    medians.into_iter().map(|(median, rounds)| Row { targets: judge(&median, &all), median, rounds }).collect()
}

fn middle(rounds: &[&Sample]) -> Sample {
    let of = |figure: fn(&Sample) -> Option<f64>| {
        let figures: Vec<f64> = rounds.iter().filter_map(|sample| figure(sample)).collect();
        (!figures.is_empty()).then(|| median(figures))
    };
    Sample {
        value: of(|sample| Some(sample.value)).unwrap_or_default(),
        client_cpu_us: of(|sample| sample.client_cpu_us),
        server_cpu_us: of(|sample| sample.server_cpu_us),
        ..rounds[0].clone()
    }
}

fn judge(median: &Sample, all: &[Sample]) -> Vec<(String, bool)> {
    if !matches!(median.system, System::Byway | System::Names) {
        return Vec::new();
    }
    let find = |case: &str, system: System| all.iter().find(|one| one.case == case && one.system == system);
    let better = |other: &Sample| {
        if median.unit.is_rate() { median.value / other.value } else { other.value / median.value }
    };
    let asked = ASKED.iter().filter(|(case, _)| *case == median.case);
    asked
        .filter_map(|(case, ask)| match ask {
            Against(system, least) => {
                let ratio = better(find(case, *system)?);
                Some((format!("{ratio:.2} x {system}, >= {least:.2}"), ratio >= *least))
            }
            OfCase(other, least) => {
                let ratio = better(find(other, median.system)?);
                Some((format!("{ratio:.2} of {other}, >= {least}"), ratio >= *least))
            }
            AtMost(most) => Some((format!("<= {most}"), median.value <= *most)),
        })
        .collect()
}

/// As a table for a document.
pub fn markdown(rows: &[Row]) -> String {
    let mut text =
        "| case | system | median | unit | CPU us, client and server | target |\n|---|---|---|---|---|---|\n"
            .to_owned();
    for Row { median, targets, .. } in rows {
        let Sample { case, system, value, unit, client_cpu_us, server_cpu_us } = median;
        let digits = if *value < 10.0 { 3 } else { 0 };
        let cpu = |time: &Option<f64>| time.map_or("-".to_owned(), |time| format!("{time:.0}"));
        let cpu = match (client_cpu_us, server_cpu_us) {
            (None, None) => String::new(),
            _ => format!("{}, {}", cpu(client_cpu_us), cpu(server_cpu_us)),
        };
        let verdicts: Vec<String> =
            targets.iter().map(|(asked, met)| format!("{asked} {}", if *met { "met" } else { "MISSED" })).collect();
        let _ = writeln!(text, "| {case} | {system} | {value:.digits$} | {unit} | {cpu} | {} |", verdicts.join("; "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_must_be_high_and_times_short() {
        let sample = |case, system, value, unit| Sample::new(case, system, value, unit);
        let rate = "1 GiB write + fsync";
        let time = "find, warm";
        let samples = [
            sample(rate, System::Byway, 300.0, Unit::Megabytes),
            sample(rate, System::Byway, 500.0, Unit::Megabytes),
            sample(rate, Gluster, 100.0, Unit::Megabytes),
            sample(time, System::Byway, 1.3, Unit::Seconds),
            sample(time, Local, 1.0, Unit::Seconds),
        ];
        let text = markdown(&rows(&samples));
        assert!(text.contains("| 400 | MB/s |  | 4.00 x GlusterFS, >= 4.00 met |"), "{text}");
        assert!(text.contains("0.77 x local, >= 0.83 MISSED"), "{text}");
    }

    #[test]
    fn each_case_that_is_asked_for_is_spelled_as_it_is_measured() {
        let sources = [include_str!("mod.rs"), include_str!("attached.rs"), include_str!("without_mount.rs")].concat();
        for (case, ask) in ASKED {
            assert!(sources.contains(&format!("\"{case}\"")), "{case}");
            if let OfCase(other, _) = ask {
                assert!(sources.contains(&format!("\"{other}\"")), "{other}");
            }
        }
    }
}
