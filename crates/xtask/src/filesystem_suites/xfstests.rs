//! xfstests: its `check` mounts the shares itself, by mount(8).

use super::rig::{Rig, write_script};
use crate::process::{self, Background};
use anyhow::{Result, ensure};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// For all tests together: a test that hangs ends the run.
const LIMIT: Duration = Duration::from_hours(2);

/// `df` as xfstests calls it, to which the type of these mounts is `fuse`.
const DF: &str = "#!/bin/sh\ndf -T -P \"$@\" | sed 's/fuse\\.byway/fuse/'\n";

pub fn run(folder: &Path, rig: &Rig, tests: &BTreeSet<String>) -> Result<BTreeSet<String>> {
    let [test, scratch] = rig.shares();
    let df = rig.path("df");
    write_script(&df, DF)?;
    let settings = [
        ("FSTYP", "fuse".to_owned()),
        ("FUSE_SUBTYP", ".byway".to_owned()),
        ("TEST_DEV", test.uri),
        ("TEST_DIR", test.at.display().to_string()),
        ("SCRATCH_DEV", scratch.uri),
        ("SCRATCH_MNT", scratch.at.display().to_string()),
        ("MOUNT_OPTIONS", "-oallow_other".to_owned()),
        ("TEST_FS_MOUNT_OPTS", "-oallow_other".to_owned()),
        ("RESULT_BASE", rig.path("results").display().to_string()),
        ("DF_PROG", df.display().to_string()),
    ];
    let lines: String = settings.map(|(name, value)| format!("export {name}='{value}'\n")).concat();
    let config = rig.path("config");
    std::fs::write(&config, lines)?;
    check(folder, &config, &rig.path("check.log"), tests)
}

/// Runs `check`, and reads from its words which tests passed.
fn check(folder: &Path, config: &Path, log: &Path, tests: &BTreeSet<String>) -> Result<BTreeSet<String>> {
    println!("xfstests: {} tests; the log is {} until the end", tests.len(), log.display());
    let mut command = Command::new("./check");
    command.args(tests).current_dir(folder).env("HOST_OPTIONS", config);
    let mut process = Background::start(&mut command, log)?;
    process::wait_for("the end of xfstests", LIMIT, || Ok(process.has_ended()?.then_some(())))?;
    let said = String::from_utf8_lossy(&std::fs::read(log)?).into_owned();
    let ran = listed(&said, "Ran:");
    ensure!(!ran.is_empty(), "xfstests did not run: {said}");
    let others = [listed(&said, "Not run:"), listed(&said, "Failures:")].concat();
    println!("{}", said_of(&said, &others));
    Ok(ran.into_iter().filter(|test| !others.contains(test)).collect())
}

/// What `check` says of these tests: a line that begins with the name, and the differences of what it printed, which are indented.
fn said_of(said: &str, tests: &[String]) -> String {
    let mut is_of = false;
    let of_tests = said.lines().filter(|line| {
        is_of =
            if line.starts_with(' ') { is_of } else { tests.iter().any(|test| line.split(' ').next() == Some(test)) };
        is_of
    });
    of_tests.collect::<Vec<_>>().join("\n")
}

/// The tests that `check` names at its end.
fn listed(said: &str, title: &str) -> Vec<String> {
    let line = said.lines().rev().find_map(|line| line.strip_prefix(title));
    line.unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program in place of `check`.
    const CHECK: &str = r#"#!/bin/sh
. "$HOST_OPTIONS"
for test; do echo "$test  1s ... $FSTYP"; echo "    +$test"; done
echo "Ran: $*"
echo "Not run: generic/002"
echo "Failures: generic/003"
echo "Failed 1 of $# tests"
exit 1
"#;

    #[test]
    fn a_test_passes_that_ran_and_did_not_fail() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        write_script(&path("check"), CHECK).unwrap();
        std::fs::write(path("config"), "export FSTYP=fuse\n").unwrap();
        let tests = BTreeSet::from(["generic/001", "generic/002", "generic/003"].map(str::to_owned));
        let passed = check(folder.path(), &path("config"), &path("log"), &tests).unwrap();
        assert_eq!(passed, BTreeSet::from(["generic/001".to_owned()]));
        let said = std::fs::read_to_string(path("log")).unwrap();
        let of_second = said_of(&said, &["generic/002".to_owned()]);
        assert_eq!(of_second, "generic/002  1s ... fuse\n    +generic/002");
        std::fs::write(path("check"), "#!/bin/sh\necho no config; exit 1\n").unwrap();
        let error = check(folder.path(), &path("config"), &path("log"), &tests).unwrap_err();
        assert!(error.to_string().contains("no config"), "{error}");
    }
}
