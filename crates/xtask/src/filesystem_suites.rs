//! `cargo xtask suites`: xfstests and LTP on mounts, compared with the lists of what passes.
//!
//! Debian 12 has neither as a package, so each is built by its own instructions beforehand, and a variable names its folder. A
//! suite without a folder is skipped aloud. A list has the tests that passed on a mount; a test of a list that does not pass is a
//! failure. docs/files.md says why other tests are not in the lists.

mod ltp;
mod namespace;
mod rig;
mod xfstests;

use self::rig::Rig;
use crate::process::{self, Scratch};
use anyhow::{Context, Result, bail};
use clap::Args;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Set, to the folder of the run, where this program runs in namespaces of its own.
const RUN_FOLDER: &str = "BYWAY_SUITES_FOLDER";

#[derive(Args)]
pub struct Options {
    /// Run only this suite.
    #[arg(long)]
    only: Option<Suite>,
    /// Run the tests that this file names, one a line, in place of the recorded list, and print which passed.
    #[arg(long, requires = "only")]
    list: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Suite {
    Xfstests,
    Ltp,
}

impl Suite {
    const ALL: [Self; 2] = [Self::Xfstests, Self::Ltp];

    /// Its name on the command line.
    fn name(self) -> &'static str {
        match self {
            Self::Xfstests => "xfstests",
            Self::Ltp => "ltp",
        }
    }

    /// The variable that names the folder in which it was built.
    fn variable(self) -> &'static str {
        match self {
            Self::Xfstests => "XFSTESTS_DIR",
            Self::Ltp => "LTP_DIR",
        }
    }

    /// The tests that pass.
    fn recorded(self) -> &'static str {
        match self {
            Self::Xfstests => include_str!("filesystem_suites/xfstests.txt"),
            Self::Ltp => include_str!("filesystem_suites/ltp.txt"),
        }
    }

    /// Returns those of the tests that pass.
    fn run(self, folder: &Path, rig: &Rig, tests: &BTreeSet<String>) -> Result<BTreeSet<String>> {
        match self {
            Self::Xfstests => xfstests::run(folder, rig, tests),
            Self::Ltp => ltp::run(folder, rig, tests),
        }
    }
}

pub fn run(options: &Options) -> Result<()> {
    if let (Some(folder), Some(suite)) = (std::env::var_os(RUN_FOLDER), options.only) {
        return run_suite(suite, options.list.as_deref(), Path::new(&folder));
    }
    let (mut ran, mut failed) = (false, Vec::new());
    for suite in Suite::ALL.into_iter().filter(|suite| options.only.is_none_or(|only| only == *suite)) {
        if std::env::var_os(suite.variable()).is_none() {
            println!("SKIP {}: {} does not name the folder in which it was built", suite.name(), suite.variable());
            continue;
        }
        if !ran {
            process::run(process::cargo().args(["build", "--package", "byway"]))?;
        }
        ran = true;
        if !run_alone(suite, options.list.as_deref())? {
            failed.push(suite.name());
        }
    }
    if !ran {
        bail!("suites: nothing ran");
    }
    if !failed.is_empty() {
        bail!("suites: FAILED: {}", failed.join(" "));
    }
    println!("suites: PASSED");
    Ok(())
}

/// Runs a suite by this program again, in namespaces of its own. Returns whether all tests passed.
fn run_alone(suite: Suite, list: Option<&Path>) -> Result<bool> {
    let scratch = Scratch::new(&std::env::temp_dir())?;
    let mut command = namespace::alone(&std::env::current_exe()?);
    command.args(["suites", "--only", suite.name()]).env(RUN_FOLDER, scratch.path());
    if let Some(list) = list {
        command.arg("--list").arg(list);
    }
    Ok(command.status().context("cannot start setpriv")?.success())
}

fn run_suite(suite: Suite, list: Option<&Path>, run_folder: &Path) -> Result<()> {
    let folder = PathBuf::from(std::env::var_os(suite.variable()).with_context(|| format!("no {}", suite.variable()))?);
    let folder = folder.canonicalize().with_context(|| format!("{}: {}", suite.variable(), folder.display()))?;
    let own = list.map(std::fs::read_to_string).transpose().context("cannot read the list")?;
    let tests = names(own.as_deref().unwrap_or_else(|| suite.recorded()));
    let rig = Rig::set_up(run_folder)?;
    let passed = suite.run(&folder, &rig, &tests)?;
    if own.is_some() {
        for test in &passed {
            println!("{test}");
        }
    }
    let others: Vec<&str> = tests.difference(&passed).map(String::as_str).collect();
    println!("{}: {} of {} tests passed", suite.name(), tests.len() - others.len(), tests.len());
    if !others.is_empty() {
        bail!("{}: these tests did not pass: {}", suite.name(), others.join(" "));
    }
    Ok(())
}

/// The names in a list: one a line; `#` begins a comment.
fn names(list: &str) -> BTreeSet<String> {
    let lines = list.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    lines.filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn a_list_has_a_name_a_line() {
        let expected = ["generic/001", "open01"].map(str::to_owned);
        assert_eq!(names("# names\ngeneric/001\n\nopen01 # why\n"), BTreeSet::from(expected));
    }

    #[test]
    fn each_suite_has_a_name_and_a_list() {
        for suite in Suite::ALL {
            assert_eq!(Suite::from_str(suite.name(), false), Ok(suite));
            assert!(names(suite.recorded()).len() > 50, "{}", suite.name());
        }
    }
}
