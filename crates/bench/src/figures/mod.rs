//! `byway bench figures`: repeats the figures of the papers that byway is built on, on this machine.
//!
//! Each experiment has the paper's own numbers beside it and a rule that judges the run's data: whether it has the shape of the
//! paper's figure, and by which numbers. A rule is a pure function over the data; a test feeds it data that it must reject.

mod answers;
mod clients;
mod cpu;
mod experiment;
mod files;
mod gmblock;
mod goglin;
mod load;
mod machine;
mod memory_program;
mod network_memory;
mod plot;
mod process;
mod report;
mod responsiveness;
mod sendfile;
mod session;
mod slow_down;
mod trapeze;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;

use self::experiment::{Data, Experiment, Measured, Verdict};
use self::machine::Machine;
use self::report::{Finding, Report};
use self::session::{Scale, Session};
use byway_remote::output;

pub use self::answers::{SharedProgramArguments, SharedProgramError, run_program as run_shared_program};
pub use self::memory_program::{MemoryProgramArguments, run as run_memory_program};
pub use self::responsiveness::{ResponderArguments, ResponderError, run_responder};

/// In the order in which they are run.
const EXPERIMENTS: [Experiment; 12] = [
    gmblock::PATHS,
    slow_down::SLOW_DOWN,
    trapeze::FETCH,
    trapeze::CUT_THROUGH,
    network_memory::NETWORK_MEMORY,
    goglin::REGISTRATION,
    clients::CLIENTS,
    goglin::ACCESS,
    files::FILES,
    sendfile::SENDFILE,
    responsiveness::RESPONSIVENESS,
    answers::ANSWERS,
];

/// The flags of `byway bench figures`.
#[derive(Args, Debug)]
pub struct FiguresArguments {
    /// Run only experiments whose names begin with NAME; may be repeated
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
    /// Folder for report.html and data.json, created if missing
    #[arg(long, value_name = "DIR", default_value = "figures")]
    pub out: PathBuf,
    /// Folder on the disk to measure, with 512M free [default: the folder for temporary files]
    #[arg(long, value_name = "DIR")]
    pub files: Option<PathBuf>,
    /// Rounds; each measures every point once, 3 to 99
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(3..=99))]
    pub rounds: u8,
    /// Measure few points briefly, to see that everything runs; the verdicts mean little
    #[arg(long)]
    pub quick: bool,
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum FiguresError {
    /// `--only` names none.
    #[error("no experiment's name begins with `{0}`; there are {names}", names = names())]
    Unknown(String),
    /// The folder for files.
    #[error("{}: {source}; name a folder that can be written, --files", path.display())]
    Files {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The report.
    #[error("{}: {source}; name a folder that can be written, --out", path.display())]
    Write {
        /// Where.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

fn names() -> String {
    EXPERIMENTS.map(|experiment| experiment.description.name).join(", ")
}

/// Runs them and writes the report. An experiment that cannot be run is in it, with the reason.
///
/// # Errors
/// See [`FiguresError`].
pub fn run(arguments: &FiguresArguments) -> Result<(), FiguresError> {
    let named = |prefix: &str| EXPERIMENTS.iter().any(|one| one.description.name.starts_with(prefix));
    if let Some(unknown) = arguments.only.iter().find(|prefix| !named(prefix)) {
        return Err(FiguresError::Unknown(unknown.clone()));
    }
    let is_wanted = |experiment: &&Experiment| {
        let name = experiment.description.name;
        arguments.only.is_empty() || arguments.only.iter().any(|prefix| name.starts_with(prefix.as_str()))
    };
    let time = Duration::from_millis(if arguments.quick { 8 } else { 120 });
    let scale = Scale { rounds: arguments.rounds.into(), time, quick: arguments.quick };
    let files = arguments.files.clone().unwrap_or_else(std::env::temp_dir);
    let session = Session::new(scale, &files);
    let mut session = session.map_err(|source| FiguresError::Files { path: files.clone(), source })?;
    let began = Instant::now();
    let experiments: Vec<Finding> =
        EXPERIMENTS.iter().filter(is_wanted).map(|experiment| find(experiment, &mut session)).collect();
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        quick: arguments.quick,
        rounds: scale.rounds,
        seconds: began.elapsed().as_secs_f64(),
        machine: Machine::here(&files),
        experiments,
    };
    let written = report::write(&report, &arguments.out);
    let [page, data] = written.map_err(|source| FiguresError::Write { path: arguments.out.clone(), source })?;
    output::line(format_args!("{}\n{}", page.display(), data.display()));
    Ok(())
}

fn find(experiment: &Experiment, session: &mut Session) -> Finding {
    let name = experiment.description.name;
    let began = Instant::now();
    let (measured, verdict) = match (experiment.run)(session) {
        Ok(measured) => {
            let verdict = Verdict::of((experiment.judge)(&Data(&measured.plots)));
            (measured, verdict)
        }
        Err(error) => (Measured::default(), Verdict::CouldNotBeRun { why: error.to_string() }),
    };
    let beside = (experiment.beside)(&Data(&measured.plots));
    output::line(format_args!(
        "{name}: {}: {} ({:.0} s)",
        verdict.word(),
        verdict.why(),
        began.elapsed().as_secs_f64()
    ));
    Finding { description: experiment.description, verdict, beside, measured }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn experiments_are_named_apart_and_say_what_they_are() {
        let names: BTreeSet<_> = EXPERIMENTS.iter().map(|one| one.description.name).collect();
        assert_eq!(names.len(), EXPERIMENTS.len());
        for Experiment { description, judge, beside, .. } in EXPERIMENTS {
            let texts = [description.title, description.source, description.what, description.rule];
            assert!(texts.iter().all(|text| text.len() > 10), "{description:?}");
            // Without data there is no verdict, and the paper's figures are shown all the same.
            assert!(judge(&Data(&[])).is_err() && !beside(&Data(&[])).is_empty(), "{description:?}");
        }
    }
}
