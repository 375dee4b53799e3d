//! An experiment: its description, its measurement, and the rule that judges its data.

use serde::Serialize;

use super::session::{RunError, Session};
use crate::statistics::median;

/// One figure of a paper, done here.
#[derive(Clone, Copy)]
pub(super) struct Experiment {
    /// What it says of itself.
    pub(super) description: Description,
    /// Measures.
    pub(super) run: fn(&mut Session) -> Result<Measured, RunError>,
    /// Judges the data by the rule; pure, so that it can be shown to say no.
    pub(super) judge: fn(&Data<'_>) -> Result<Vec<Check>, Missing>,
    /// The paper's figures, each with what stands for it in the data.
    pub(super) beside: fn(&Data<'_>) -> Vec<Beside>,
}

/// What an experiment says of itself, whether it can be run or not.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Description {
    /// For `--only`.
    pub(super) name: &'static str,
    /// For people.
    pub(super) title: &'static str,
    /// Which paper, and where in it.
    pub(super) source: &'static str,
    /// What is done.
    pub(super) what: &'static str,
    /// When the shape holds.
    pub(super) rule: &'static str,
    /// What the paper has and this experiment has not, and why.
    pub(super) absent: &'static [&'static str],
}

/// What was measured.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Measured {
    /// How, on this machine.
    pub(super) setup: Vec<String>,
    /// The data.
    pub(super) plots: Vec<Plot>,
}

/// A plot: series over one axis.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Plot {
    /// By which the rule finds it.
    pub(super) name: &'static str,
    /// For people.
    pub(super) title: String,
    pub(super) x: Axis,
    pub(super) y: Axis,
    pub(super) series: Vec<Series>,
}

/// An axis.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Axis {
    pub(super) label: &'static str,
    pub(super) unit: &'static str,
    pub(super) scale: Scale,
}

/// How an axis is divided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Scale {
    /// From zero.
    Linear,
    /// By powers of two, which are sizes in bytes.
    Bytes,
    /// By powers of two.
    Powers,
    /// By powers of ten.
    Decades,
    /// Not at all: the values are places in this list, and the points are bars.
    Names(Vec<&'static str>),
    /// The same, and the bars of all series at one place stand on each other: they are parts of a whole.
    Parts(Vec<&'static str>),
}

/// A line of a plot.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Series {
    pub(super) name: String,
    /// In the order of their x.
    pub(super) points: Vec<Point>,
}

/// What the rounds gave at one place.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Point {
    pub(super) x: f64,
    /// Of the rounds.
    pub(super) median: f64,
    /// In the order in which they were run.
    pub(super) rounds: Vec<f64>,
}

impl Point {
    /// Whether it is the point of this place.
    pub(super) fn is_at(&self, x: f64) -> bool {
        (self.x - x).abs() < 1e-9
    }
}

/// One question of a rule, and what the data say.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Check {
    /// What was asked.
    pub(super) asked: String,
    /// The numbers that decided it.
    pub(super) found: String,
    pub(super) holds: bool,
}

/// A figure of the paper beside one of this run.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Beside {
    pub(super) what: &'static str,
    /// Where the paper says it.
    pub(super) place: &'static str,
    pub(super) paper: &'static str,
    pub(super) here: String,
}

/// Whether the shape of the paper's figure is found here.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub(super) enum Verdict {
    /// All checks hold.
    Holds { checks: Vec<Check> },
    /// Some do not.
    DoesNotHold { checks: Vec<Check> },
    /// There are no data to judge, or not enough.
    CouldNotBeRun { why: String },
}

/// Data that a rule needs and that were not measured.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("the data have no {0}")]
pub(super) struct Missing(pub(super) String);

/// The data of an experiment, for its rule.
pub(super) struct Data<'a>(pub(super) &'a [Plot]);

impl Data<'_> {
    fn series(&self, plot: &str, series: &str) -> Result<&Series, Missing> {
        let found = self.0.iter().find(|one| one.name == plot);
        let found = found.and_then(|plot| plot.series.iter().find(|one| one.name == series));
        found.ok_or_else(|| Missing(format!("series `{series}` in plot `{plot}`")))
    }

    /// The median at a place.
    pub(super) fn at(&self, plot: &str, series: &str, x: f64) -> Result<f64, Missing> {
        let points = &self.series(plot, series)?.points;
        let found = points.iter().find(|point| point.is_at(x)).map(|point| point.median);
        found.ok_or_else(|| Missing(format!("point {x} of series `{series}` in plot `{plot}`")))
    }

    /// What each round gave at a place.
    pub(super) fn rounds(&self, plot: &str, series: &str, x: f64) -> Result<&[f64], Missing> {
        let found = self.series(plot, series)?.points.iter().find(|point| point.is_at(x));
        let found = found.map(|point| &point.rounds[..]);
        found.ok_or_else(|| Missing(format!("point {x} of `{series}` in `{plot}`")))
    }

    /// All points of a series: places and medians.
    pub(super) fn points(&self, plot: &str, series: &str) -> Result<Vec<(f64, f64)>, Missing> {
        let points = &self.series(plot, series)?.points;
        Ok(points.iter().map(|point| (point.x, point.median)).collect())
    }
}

/// The median of the ratios of rounds, for points that are measured one after the other in each round: other work on the machine
/// then slows both.
pub(super) fn ratio_by_round(over: &[f64], under: &[f64]) -> f64 {
    let ratios: Vec<f64> = over.iter().zip(under).map(|(over, under)| over / under.max(1e-9)).collect();
    median(&ratios)
}

impl Check {
    /// Whether `found` is at least `least`; both are said.
    pub(super) fn at_least(asked: impl Into<String>, found: f64, least: f64) -> Self {
        let said = format!("{found:.3}, wanted at least {least}");
        Self { asked: asked.into(), found: said, holds: found >= least }
    }

    /// Whether `found` is at most `most`; both are said.
    pub(super) fn at_most(asked: impl Into<String>, found: f64, most: f64) -> Self {
        let said = format!("{found:.3}, wanted at most {most}");
        Self { asked: asked.into(), found: said, holds: found <= most }
    }
}

impl Verdict {
    /// Of what a rule found.
    pub(super) fn of(judged: Result<Vec<Check>, Missing>) -> Self {
        match judged {
            Err(missing) => Self::CouldNotBeRun { why: missing.to_string() },
            Ok(checks) if checks.is_empty() => Self::CouldNotBeRun { why: "the rule asked nothing".to_owned() },
            Ok(checks) if checks.iter().all(|check| check.holds) => Self::Holds { checks },
            Ok(checks) => Self::DoesNotHold { checks },
        }
    }

    /// In words.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Self::Holds { .. } => "holds",
            Self::DoesNotHold { .. } => "does not hold",
            Self::CouldNotBeRun { .. } => "could not be run",
        }
    }

    /// The line beside the word: the checks that failed, or why nothing was measured.
    pub(super) fn why(&self) -> String {
        match self {
            Self::CouldNotBeRun { why } => why.clone(),
            Self::Holds { checks } => format!("all {} checks", checks.len()),
            Self::DoesNotHold { checks } => {
                let failed = checks.iter().filter(|check| !check.holds);
                failed.map(|check| format!("{}: {}", check.asked, check.found)).collect::<Vec<_>>().join("; ")
            }
        }
    }
}

/// A number for people, or that there is none.
pub(super) fn said(value: Result<f64, Missing>, unit: &str) -> String {
    value.map_or_else(|_| "not measured".to_owned(), |value| format!("{} {unit}", short(value)))
}

/// A number with three digits.
pub(super) fn short(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// What rounds bring, gathered to series.
#[derive(Debug, Default)]
pub(super) struct Gathered(Vec<Series>);

impl Gathered {
    /// Takes the value of one round.
    pub(super) fn add(&mut self, series: &str, x: f64, value: f64) {
        let at = self.0.iter().position(|one| one.name == series).unwrap_or_else(|| {
            self.0.push(Series { name: series.to_owned(), points: Vec::new() });
            self.0.len() - 1
        });
        let points = &mut self.0[at].points;
        let place = points.iter().position(|point| point.x >= x).unwrap_or(points.len());
        if points.get(place).is_none_or(|point| point.x > x) {
            points.insert(place, Point { x, median: value, rounds: Vec::new() });
        }
        let point = &mut points[place];
        point.rounds.push(value);
        point.median = median(&point.rounds);
    }

    /// The series, in the order of their first values.
    pub(super) fn series(self) -> Vec<Series> {
        self.0
    }
}

#[cfg(test)]
pub(super) mod made {
    //! Data made by hand, for the tests of rules.

    use super::*;

    /// A plot of one name with these series of (x, value).
    pub(in crate::figures) fn plot(name: &'static str, series: &[(&str, &[(f64, f64)])]) -> Plot {
        let axis = || Axis { label: "x", unit: "", scale: Scale::Linear };
        let mut gathered = Gathered::default();
        for (series, points) in series {
            for (x, value) in *points {
                gathered.add(series, *x, *value);
            }
        }
        Plot { name, title: name.to_owned(), x: axis(), y: axis(), series: gathered.series() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_is_what_its_checks_say() {
        let (good, bad) = (Check::at_least("more", 2.0, 1.0), Check::at_most("less", 2.0, 1.0));
        assert!(good.holds && !bad.holds);
        assert_eq!(Verdict::of(Ok(vec![good.clone()])).word(), "holds");
        let verdict = Verdict::of(Ok(vec![good, bad]));
        assert_eq!((verdict.word(), verdict.why().as_str()), ("does not hold", "less: 2.000, wanted at most 1"));
        assert_eq!(Verdict::of(Ok(Vec::new())).word(), "could not be run");
        let missing = Verdict::of(Err(Missing("point 1".to_owned())));
        assert_eq!((missing.word(), missing.why().as_str()), ("could not be run", "the data have no point 1"));
    }

    #[test]
    fn rounds_are_gathered_to_medians_in_order() {
        let mut gathered = Gathered::default();
        for (x, value) in [(4.0, 1.0), (1.0, 5.0), (4.0, 9.0), (4.0, 2.0), (2.0, 7.0)] {
            gathered.add("a", x, value);
        }
        gathered.add("b", 1.0, 3.0);
        let series = gathered.series();
        let points: Vec<_> = series[0].points.iter().map(|point| (point.x, point.median, point.rounds.len())).collect();
        assert_eq!(points, [(1.0, 5.0, 1), (2.0, 7.0, 1), (4.0, 2.0, 3)]);
        assert_eq!(series[1].name, "b");
    }

    #[test]
    fn rounds_are_compared_with_their_own() {
        let mut gathered = Gathered::default();
        // The machine was three times slower in the second round, and the medians would be of different ones.
        for (over, under) in [(8.0, 10.0), (2.7, 3.0), (9.0, 10.0)] {
            gathered.add("over", 1.0, over);
            gathered.add("under", 1.0, under);
        }
        let mut plots = [made::plot("p", &[])];
        plots[0].series = gathered.series();
        let data = Data(&plots);
        let ratio = ratio_by_round(data.rounds("p", "over", 1.0).unwrap(), data.rounds("p", "under", 1.0).unwrap());
        assert!((ratio - 0.9).abs() < 1e-9);
        assert!(data.rounds("p", "over", 2.0).is_err());
        assert!(data.rounds("q", "under", 1.0).is_err());
    }

    #[test]
    fn what_was_not_measured_is_missing_and_not_zero() {
        let plots = [made::plot("p", &[("a", &[(1.0, 5.0)])])];
        let data = Data(&plots);
        assert_eq!(data.at("p", "a", 1.0), Ok(5.0));
        assert!(data.at("p", "a", 2.0).is_err() && data.at("p", "b", 1.0).is_err() && data.at("q", "a", 1.0).is_err());
        assert_eq!(said(data.at("p", "a", 2.0), "us"), "not measured");
    }
}
