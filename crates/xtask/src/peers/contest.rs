//! Programs that do the same work in turns; medians, and ratios to one of them.

use super::report::median;
use anyhow::{Context, Result};
use serde::Serialize;
use std::fmt::Write;

/// One that takes part: a name and how it is run once.
pub struct Contestant<'a> {
    pub name: &'static str,
    pub run: Box<dyn FnMut() -> Result<Figures> + 'a>,
}

/// What one run gave.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Figures {
    /// Operations per second; 0 for a stream.
    pub iops: f64,
    pub megabytes_per_second: f64,
    /// 0 where it is not known.
    pub latency_p50_us: f64,
}

/// A case, its contestants (the first is ours), and what ours must reach against another.
pub struct Contest<'a> {
    pub case: &'static str,
    pub contestants: Vec<Contestant<'a>>,
    /// The other's name, and the least ratio of rates.
    pub target: (&'static str, f64),
}

/// What came of a contest.
#[derive(Debug, Serialize)]
pub struct Outcome {
    pub case: &'static str,
    pub rows: Vec<(&'static str, Figures)>,
    pub target: (&'static str, f64),
    pub ratio: f64,
}

impl Contest<'_> {
    /// Runs all in turns.
    pub fn run(mut self, rounds: usize) -> Result<Outcome> {
        let mut all: Vec<Vec<Figures>> = vec![Vec::new(); self.contestants.len()];
        for round in 1..=rounds {
            for (contestant, figures) in self.contestants.iter_mut().zip(&mut all) {
                let one = (contestant.run)().with_context(|| format!("{}: {}", self.case, contestant.name))?;
                eprintln!(
                    "round {round}: {:<20} {:<22} {:>9.0} IOPS {:>7.0} MB/s",
                    self.case, contestant.name, one.iops, one.megabytes_per_second
                );
                figures.push(one);
            }
        }
        let middle = |figures: &[Figures], of: fn(&Figures) -> f64| median(figures.iter().map(of).collect());
        let rows: Vec<_> = self
            .contestants
            .iter()
            .zip(&all)
            .map(|(contestant, figures)| {
                let medians = Figures {
                    iops: middle(figures, |one| one.iops),
                    megabytes_per_second: middle(figures, |one| one.megabytes_per_second),
                    latency_p50_us: middle(figures, |one| one.latency_p50_us),
                };
                (contestant.name, medians)
            })
            .collect();
        let of = |name: &str| rows.iter().find(|(other, _)| *other == name).map(|(_, figures)| *figures);
        let (ours, theirs) = (rows.first().map(|(_, figures)| *figures), of(self.target.0));
        let ratio = match (ours, theirs) {
            (Some(ours), Some(theirs)) => ours.megabytes_per_second / theirs.megabytes_per_second,
            _ => 0.0,
        };
        Ok(Outcome { case: self.case, rows, target: self.target, ratio })
    }
}

/// Outcomes as a table for a document.
pub fn markdown(outcomes: &[Outcome]) -> String {
    let mut text = "| case | who | IOPS | MB/s | p50 us | target |\n|---|---|---|---|---|---|\n".to_owned();
    for outcome in outcomes {
        for (index, (name, figures)) in outcome.rows.iter().enumerate() {
            let (other, least) = outcome.target;
            let met = if outcome.ratio >= least { "met" } else { "MISSED" };
            let verdict =
                if index == 0 { format!("{:.2} of {other}, >= {least} {met}", outcome.ratio) } else { String::new() };
            let shown = |figure: f64| if figure > 0.0 { format!("{figure:.0}") } else { String::new() };
            let _ = writeln!(
                text,
                "| {} | {name} | {} | {} | {} | {verdict} |",
                outcome.case,
                shown(figures.iops),
                shown(figures.megabytes_per_second),
                shown(figures.latency_p50_us),
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_of_medians_and_is_judged() {
        let fixed = |name, rates: [f64; 3]| {
            let mut rates = rates.into_iter();
            let run = move || {
                let megabytes_per_second = rates.next().context("no more")?;
                Ok(Figures { megabytes_per_second, ..Figures::default() })
            };
            Contestant { name, run: Box::new(run) as Box<dyn FnMut() -> Result<Figures>> }
        };
        let contestants = vec![fixed("ours", [10.0, 30.0, 20.0]), fixed("theirs", [9.0, 10.0, 99.0])];
        let contest = Contest { case: "case", contestants, target: ("theirs", 2.5) };
        let outcome = contest.run(3).unwrap();
        assert!((outcome.ratio - 2.0).abs() < 1e-9);
        assert!(markdown(&[outcome]).contains("2.00 of theirs, >= 2.5 MISSED"));
    }
}
