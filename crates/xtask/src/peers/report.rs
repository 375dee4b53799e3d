//! Medians, ratios to nbdkit, and whether the targets are met.

use super::cases::{COMMON_TARGETS, Case, Metric, Target};
use super::servers::Kind;
use super::{Idle, Sample};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Whom the targets refer to.
const REFERENCE: Kind = Kind::Nbdkit;

/// Everything that was measured.
#[derive(Serialize)]
pub struct Report {
    settings: BTreeMap<String, String>,
    rows: Vec<Row>,
    idle: Vec<Idle>,
    samples: Vec<Sample>,
}

/// A server in a case.
#[derive(Serialize)]
struct Row {
    median: Sample,
    /// Of the medians, by the metric's name; empty without the reference.
    ratios: BTreeMap<&'static str, f64>,
    /// What is asked and whether it is met; only byway has any.
    targets: Vec<Verdict>,
}

#[derive(Serialize)]
struct Verdict {
    asked: String,
    met: bool,
}

const METRICS: [Metric; 6] =
    [Metric::Iops, Metric::Bandwidth, Metric::LatencyP50, Metric::ServerCpu, Metric::ClientCpu, Metric::MachineCpu];

impl Report {
    /// Works out medians, ratios and verdicts.
    pub fn new(settings: BTreeMap<String, String>, cases: &[&Case], samples: Vec<Sample>, idle: Vec<Idle>) -> Self {
        let mut rows = Vec::new();
        for case in cases {
            let medians = medians_of(case.name, &samples);
            let reference = medians.iter().find(|median| median.server == REFERENCE).cloned();
            rows.extend(medians.into_iter().map(|median| row(case, median, reference.as_ref())));
        }
        Self { settings, rows, idle, samples }
    }

    /// As tables for a document.
    pub fn markdown(&self) -> String {
        let mut text = String::new();
        for (name, value) in &self.settings {
            let _ = writeln!(text, "- {name}: {value}");
        }
        text.push_str(
            "\nMedians; CPU in us per operation; ratios against nbdkit in brackets.\n\n\
             | case | server | IOPS | MB/s | p50 us | p99 us | server CPU | client CPU | machine CPU | target |\n\
             |---|---|---|---|---|---|---|---|---|---|\n",
        );
        for row in &self.rows {
            row.write(&mut text);
        }
        text.push_str("\n| idle server | endpoint | CPU % of one core |\n|---|---|---|\n");
        for idle in &self.idle {
            let _ = writeln!(text, "| {} | {} | {:.1} |", idle.server, idle.endpoint, idle.cpu_percent);
        }
        text
    }
}

impl Row {
    fn write(&self, text: &mut String) {
        let median = &self.median;
        let with_ratio = |metric: Metric, digits: usize| {
            let figure = metric.of(median);
            match self.ratios.get(metric.name()) {
                Some(ratio) if median.server != REFERENCE => {
                    format!("{figure:.digits$} ({ratio:.2})")
                }
                _ => format!("{figure:.digits$}"),
            }
        };
        let verdicts: Vec<String> = self
            .targets
            .iter()
            .map(|verdict| format!("{} {}", verdict.asked, if verdict.met { "met" } else { "MISSED" }))
            .collect();
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {:.0} | {} | {} | {} | {} |",
            median.case,
            median.server,
            with_ratio(Metric::Iops, 0),
            with_ratio(Metric::Bandwidth, 0),
            with_ratio(Metric::LatencyP50, 0),
            median.latency_p99_us,
            with_ratio(Metric::ServerCpu, 1),
            with_ratio(Metric::ClientCpu, 1),
            with_ratio(Metric::MachineCpu, 1),
            verdicts.join(", "),
        );
    }
}

fn row(case: &Case, median: Sample, reference: Option<&Sample>) -> Row {
    let mut ratios = BTreeMap::new();
    let mut targets = Vec::new();
    if let Some(reference) = reference {
        for metric in METRICS {
            ratios.insert(metric.name(), metric.of(&median) / metric.of(reference));
        }
        if median.server == Kind::Byway {
            let all = case.targets.iter().chain(&COMMON_TARGETS);
            targets = all.map(|target| judge(target, ratios[target.metric.name()])).collect();
        }
    }
    Row { median, ratios, targets }
}

fn judge(target: &Target, ratio: f64) -> Verdict {
    let (sign, met) =
        if target.metric.is_rate() { (">=", ratio >= target.ratio) } else { ("<=", ratio <= target.ratio) };
    Verdict { asked: format!("{} {sign} {}", target.metric.name(), target.ratio), met }
}

/// One median per server, in the order in which the servers took turns. Every figure is the median
/// of its own, so the figures of a row need not come from one round.
fn medians_of(case: &str, samples: &[Sample]) -> Vec<Sample> {
    let mut servers: Vec<Kind> = Vec::new();
    for sample in samples.iter().filter(|sample| sample.case == case) {
        if !servers.contains(&sample.server) {
            servers.push(sample.server);
        }
    }
    servers
        .into_iter()
        .filter_map(|server| {
            let rounds: Vec<&Sample> =
                samples.iter().filter(|sample| sample.case == case && sample.server == server).collect();
            let of = |figure: fn(&Sample) -> f64| median(rounds.iter().map(|sample| figure(sample)).collect());
            let last = *rounds.last()?;
            Some(Sample {
                round: rounds.len(),
                operations: rounds.iter().map(|sample| sample.operations).sum(),
                iops: of(|sample| sample.iops),
                megabytes_per_second: of(|sample| sample.megabytes_per_second),
                latency_p50_us: of(|sample| sample.latency_p50_us),
                latency_p99_us: of(|sample| sample.latency_p99_us),
                server_cpu_us_per_operation: of(|sample| sample.server_cpu_us_per_operation),
                client_cpu_us_per_operation: of(|sample| sample.client_cpu_us_per_operation),
                machine_cpu_us_per_operation: of(|sample| sample.machine_cpu_us_per_operation),
                ..last.clone()
            })
        })
        .collect()
}

/// Of an even number, the mean of the middle two; 0 of none.
pub fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    let middle = figures.len() / 2;
    match figures.len() {
        0 => 0.0,
        count if count % 2 == 1 => figures[middle],
        _ => f64::midpoint(figures[middle - 1], figures[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::super::cases::CASES;
    use super::*;

    fn sample(server: Kind, round: usize, figure: f64) -> Sample {
        Sample {
            case: CASES[2].name,
            server,
            round,
            operations: 10,
            iops: figure,
            megabytes_per_second: figure,
            latency_p50_us: figure,
            latency_p99_us: figure,
            server_cpu_us_per_operation: figure,
            client_cpu_us_per_operation: figure,
            machine_cpu_us_per_operation: figure,
        }
    }

    #[test]
    fn medians_are_in_the_middle() {
        assert_eq!(median(vec![9.0, 1.0, 2.0]).to_bits(), 2.0_f64.to_bits());
        assert_eq!(median(vec![9.0, 1.0, 2.0, 4.0]).to_bits(), 3.0_f64.to_bits());
    }

    #[test]
    fn a_rate_must_be_high_enough_and_a_cost_low_enough() {
        let samples = vec![
            sample(Kind::Byway, 1, 200.0),
            sample(Kind::Nbdkit, 1, 100.0),
            sample(Kind::Byway, 2, 200.0),
            sample(Kind::Nbdkit, 2, 100.0),
        ];
        let report = Report::new(BTreeMap::new(), &[&CASES[2]], samples, Vec::new());
        let verdicts = &report.rows[0].targets;
        assert!(verdicts.iter().any(|verdict| verdict.asked == "IOPS >= 1.5" && verdict.met));
        assert!(verdicts.iter().any(|verdict| verdict.asked == "server CPU <= 0.4" && !verdict.met));
        assert_eq!(verdicts.len(), CASES[2].targets.len() + COMMON_TARGETS.len());
        assert!(report.rows[1].targets.is_empty());
        assert!(report.markdown().contains("200 (2.00)"));
    }
}
