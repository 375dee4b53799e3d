//! LTP: programs for system calls, each in a folder of the mount.

use super::namespace;
use super::rig::Rig;
use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// By how much LTP's own limits for each program, of half a minute and more, are longer: a busy machine passes too.
const LIMIT_FACTOR: &str = "4";
/// Seconds for each program: one that hangs fails.
const LIMIT: &str = "900";
/// The file in which LTP lists its programs: a name, and a command with its arguments.
const LISTING: &str = "runtest/syscalls";
/// Lines that are printed of what a program says.
const REASONS_MAX: usize = 10;

pub fn run(folder: &Path, rig: &Rig, tests: &BTreeSet<String>) -> Result<BTreeSet<String>> {
    let commands = Commands::read(folder)?;
    let (_mount, at) = rig.mount()?;
    let log = rig.path("ltp.log");
    let mut passed = BTreeSet::new();
    for test in tests {
        if commands.passes(test, &at, &log)? {
            passed.insert(test.clone());
            continue;
        }
        let said = String::from_utf8_lossy(&std::fs::read(&log)?).into_owned();
        let passes_below = commands.passes(test, &rig.below(), &log)?;
        println!("{test}: does not pass{}", if passes_below { "" } else { ", nor on the file system below" });
        for line in reasons(&said) {
            println!("    {line}");
        }
    }
    Ok(passed)
}

/// Why a program did not pass: it failed, could not be run, or, if it says neither, needs something else.
fn reasons(said: &str) -> Vec<&str> {
    let of = |kinds: &[&str]| {
        let lines = said.lines().filter(|line| kinds.iter().any(|kind| line.contains(kind)));
        lines.take(REASONS_MAX).collect::<Vec<_>>()
    };
    let failed = of(&["TFAIL", "TBROK"]);
    if failed.is_empty() { of(&["TCONF"]) } else { failed }
}

/// What LTP has.
struct Commands {
    /// By the names in the listing.
    words: BTreeMap<String, Vec<String>>,
    /// Where the programs are: in the folder of an installed LTP, or beside their sources.
    programs: BTreeMap<String, PathBuf>,
}

impl Commands {
    fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(LISTING);
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let words = lines.filter_map(|line| {
            let mut words = line.split_whitespace().map(str::to_owned);
            Some((words.next()?, words.collect()))
        });
        let mut programs = BTreeMap::new();
        find_programs(&folder.join("testcases"), &mut programs)?;
        Ok(Self { words: words.collect(), programs })
    }

    /// Whether a program passes in a new folder of this directory. What it prints goes to `log`.
    fn passes(&self, test: &str, directory: &Path, log: &Path) -> Result<bool> {
        let words = self.words.get(test).with_context(|| format!("{LISTING} does not name {test}"))?;
        let (name, arguments) = words.split_first().with_context(|| format!("{LISTING} has no command for {test}"))?;
        let program = self.programs.get(name).with_context(|| format!("{name} was not built"))?;
        let home = program.parent().context("a program has a folder")?;
        let path = std::env::var("PATH").unwrap_or_default();
        let folder = tempfile::Builder::new().prefix("ltp-").tempdir_in(directory)?;
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o777))?;
        let out = File::create(log)?;
        let mut command = Command::new("timeout");
        command.args(["--kill-after=10", LIMIT]).arg(program).args(arguments).current_dir(home);
        command.env("LTP_TIMEOUT_MUL", LIMIT_FACTOR);
        command.env("TMPDIR", folder.path()).env("PATH", format!("{}:{path}", home.display()));
        let status = command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out).status()?;
        namespace::detach_loops(folder.path())?;
        Ok(status.success())
    }
}

/// Adds the programs in a folder and those below it.
fn find_programs(folder: &Path, programs: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let entry = entry?;
        let (path, metadata) = (entry.path(), entry.metadata()?);
        if metadata.is_dir() {
            find_programs(&path, programs)?;
        } else if metadata.is_file() && metadata.permissions().mode() & 0o111 != 0 {
            programs.insert(entry.file_name().to_string_lossy().into_owned(), path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_told_before_what_is_missing() {
        let said = "a.c:1: TPASS: x\na.c:2: TCONF: no kernel\na.c:3: TFAIL: EIO\n";
        assert_eq!(reasons(said), ["a.c:3: TFAIL: EIO"]);
        assert_eq!(reasons("a.c:2: TCONF: no kernel\n"), ["a.c:2: TCONF: no kernel"]);
        assert_eq!(reasons(&"TBROK\n".repeat(99)).len(), REASONS_MAX);
    }

    #[test]
    fn a_program_passes_by_its_status_in_a_folder_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for made in ["runtest", "testcases/bin", "mount"] {
            std::fs::create_dir_all(path(made)).unwrap();
        }
        std::fs::write(path(LISTING), "# calls\nwrites program write\nfails program fail\nabsent gone\n").unwrap();
        let script = "#!/bin/sh\n[ \"$1\" = write ] && echo > \"$TMPDIR/file\" && ls \"$TMPDIR\" >> seen\n";
        std::fs::write(path("testcases/bin/program"), script).unwrap();
        std::fs::set_permissions(path("testcases/bin/program"), Permissions::from_mode(0o755)).unwrap();
        let commands = Commands::read(folder.path()).unwrap();
        assert!(commands.passes("writes", &path("mount"), &path("log")).unwrap());
        assert!(!commands.passes("fails", &path("mount"), &path("log")).unwrap());
        assert_eq!(std::fs::read_to_string(path("testcases/bin/seen")).unwrap(), "file\n");
        assert_eq!(std::fs::read_dir(path("mount")).unwrap().count(), 0, "the folder is gone");
        for test in ["absent", "unknown"] {
            assert!(commands.passes(test, &path("mount"), &path("log")).is_err());
        }
    }
}
