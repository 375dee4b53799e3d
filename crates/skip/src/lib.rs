//! For tests: what this machine lacks, said aloud and written down; and [`seeds`], which runs simulations.
//!
//! Neither libtest nor nextest lets a test say while it runs that it cannot: it passes, and what it printed is hidden. So each
//! test that cannot run, or cannot run in all its cases, says so here and returns. Under `cargo xtask test` every such
//! line goes to the file named by `BYWAY_SKIP_LOG`, and what did not run is counted as skipped.
#![forbid(unsafe_code)]

pub mod seeds;

use std::fmt;
use std::io::Write;
use std::net::IpAddr;
use std::path::Path;

/// Why a test does not run on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SkipReason<'a> {
    /// This program (or Python module, or C header) is not installed. Under CI such a skip is an error if
    /// `cargo xtask test --install` could have installed it.
    MissingTool(&'a str),
    /// The kernel or the machine lacks this, or refuses it.
    Machine(&'a str),
}

/// Of tests over RDMA where [`rdma_device`] knows none.
pub const NO_RDMA: SkipReason<'static> = SkipReason::Machine("no RDMA device (BYWAY_RDMA_ADDRESS names none)");
/// Of tests over io_uring where the kernel refuses it.
pub const NO_IO_URING: SkipReason<'static> = SkipReason::Machine("the kernel refuses io_uring");

impl fmt::Display for SkipReason<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MissingTool(tool) => write!(formatter, "missing tool: {tool}"),
            Self::Machine(what) => formatter.write_str(what),
        }
    }
}

/// Says that a test of this name does not run. The caller returns after this, with nothing tested.
///
/// ```no_run
/// use byway_skip::{SkipReason, skip};
///
/// fn nbdinfo_lists_the_volumes() {
///     if !std::path::Path::new("/usr/bin/nbdinfo").is_file() {
///         return skip("nbdinfo_lists_the_volumes", SkipReason::MissingTool("nbdinfo"));
///     }
/// }
/// # nbdinfo_lists_the_volumes();
/// ```
pub fn skip(test: &str, reason: SkipReason<'_>) {
    say("SKIP", test, reason);
}

/// [`skip`] for the test that calls this, in the thread that the runner gave it.
pub fn skip_this(reason: SkipReason<'_>) {
    skip(&this_test(), reason);
}

/// Says that the test that calls this goes on without some of its cases. It counts as passed, in part.
pub fn skip_part_of_this(reason: SkipReason<'_>) {
    say("PART", &this_test(), reason);
}

/// The address of an RDMA device to test with, if there is one: `cargo xtask guest rdma` has one.
pub fn rdma_device() -> Option<IpAddr> {
    std::env::var("BYWAY_RDMA_ADDRESS").ok()?.parse().ok()
}

/// Whether the kernel has no landlock, whatever the program under test believes.
pub fn lacks_landlock() -> bool {
    use landlock::{AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr};
    let needed = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    needed.handle_access(AccessFs::Execute).is_err()
}

/// Of tests of confinement where [`lacks_landlock`].
pub const NO_LANDLOCK: SkipReason<'static> = SkipReason::Machine("this kernel has no landlock");

fn say(how: &str, test: &str, reason: SkipReason<'_>) {
    let line = format!("{how} {test}: {reason}\n");
    eprint!("{line}");
    let Some(log) = std::env::var_os("BYWAY_SKIP_LOG") else {
        return;
    };
    // One write of one line, so that tests which run side by side do not mix theirs.
    let written = std::fs::OpenOptions::new()
        .append(true)
        .create(true)
        .open(&log)
        .and_then(|mut file| file.write_all(line.as_bytes()));
    assert!(written.is_ok(), "a skip must be recorded: cannot write {}: {written:?}", Path::new(&log).display());
}

/// The name that nextest has for the running test: the package, its binary if that is another one, and the path of the test,
/// which libtest gives to its thread.
fn this_test() -> String {
    let package = std::env::var("CARGO_PKG_NAME").unwrap_or_default();
    let program = std::env::current_exe().unwrap_or_default();
    let binary = program.file_stem().unwrap_or_default().to_string_lossy();
    named(&package, &binary, std::thread::current().name())
}

/// `binary` is the file's name, with the hash that cargo puts behind it.
fn named(package: &str, binary: &str, thread: Option<&str>) -> String {
    let is_hash = |tail: &str| tail.len() == 16 && tail.bytes().all(|byte| byte.is_ascii_hexdigit());
    let target = binary.rsplit_once('-').filter(|(_, tail)| is_hash(tail)).map_or(binary, |(head, _)| head);
    let of = match package {
        "" => target.to_owned(),
        package if package.replace('-', "_") == target => package.to_owned(),
        package => format!("{package}::{target}"),
    };
    format!("{of} {}", thread.unwrap_or("(a thread without a name)"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn the_reason_for_a_missing_tool_is_what_xtask_looks_for() {
        assert_eq!(SkipReason::MissingTool("fio").to_string(), "missing tool: fio");
    }

    #[test]
    fn a_test_has_the_name_that_its_runner_shows() {
        let hash = "0123456789abcdef";
        assert_eq!(named("byway-skip", &format!("byway_skip-{hash}"), Some("tests::a")), "byway-skip tests::a");
        assert_eq!(named("byway-rpc", &format!("three-nodes-{hash}"), Some("a")), "byway-rpc::three-nodes a");
        assert_eq!(named("", "node", Some("tcp::a")), "node tcp::a");
        assert_eq!(named("", "three-nodes", None), "three-nodes (a thread without a name)");
        assert!(this_test().ends_with(" tests::a_test_has_the_name_that_its_runner_shows"), "{}", this_test());
    }

    /// In a process of its own, for the environment to be its own; this test is what runs in it.
    #[test]
    fn what_is_skipped_is_written_down_line_by_line() {
        if std::env::var_os("BYWAY_SKIP_CHILD").is_some() {
            skip("one", SkipReason::MissingTool("fio"));
            skip_this(NO_RDMA);
            return skip_part_of_this(NO_IO_URING);
        }
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        std::fs::write(&log, "SKIP another: reason\n").unwrap();
        let name = "tests::what_is_skipped_is_written_down_line_by_line";
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", name]).env("BYWAY_SKIP_CHILD", "1").env("BYWAY_SKIP_LOG", &log);
        assert!(child.output().unwrap().status.success());
        let this = this_test();
        let lines = ["SKIP another: reason", "SKIP one: missing tool: fio"].map(str::to_owned);
        let expected =
            [lines.as_slice(), &[format!("SKIP {this}: {NO_RDMA}"), format!("PART {this}: {NO_IO_URING}")]].concat();
        assert_eq!(std::fs::read_to_string(&log).unwrap().lines().collect::<Vec<_>>(), expected);
    }
}
