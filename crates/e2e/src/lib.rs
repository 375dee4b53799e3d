//! End-to-end tests: the built binary against the clients that people use.
//!
//! The tests are in `tests/`; here is what all of them need. A test that cannot run on a machine
//! says so with [`skip`] and returns: `cargo xtask test` prints every such line.
#![forbid(unsafe_code)]

mod certificates;
mod foreign;
mod networks;
mod script;
mod server;

pub use certificates::Certificates;
pub use foreign::{ForeignServer, noise};
pub use networks::{FAR, NEAR, Networks, Side};
pub use script::Script;
pub use server::{LIBNBD_PRELUDE, LIMIT, Server, binary, libnbd_python, run, run_well, until};

use std::fmt;
use std::io::Write;
use std::path::PathBuf;

/// Why a test does not run on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SkipReason<'a> {
    /// This program (or Python module) is not installed. Under CI such a skip is an error if
    /// `cargo xtask test --install` could have installed it.
    MissingTool(&'a str),
    /// The kernel or the machine lacks this, or refuses it.
    Machine(&'a str),
}

impl fmt::Display for SkipReason<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MissingTool(tool) => write!(formatter, "missing tool: {tool}"),
            Self::Machine(what) => formatter.write_str(what),
        }
    }
}

/// Says aloud that a test is skipped: on standard error and, under `cargo xtask test`, as a line
/// of the file named by `BYWAY_SKIP_LOG`. The caller returns after this.
///
/// ```
/// use byway_e2e::{SkipReason, find_tool, skip};
///
/// fn nbdinfo_lists_the_volumes() {
///     let Some(nbdinfo) = find_tool("nbdinfo") else {
///         return skip("nbdinfo_lists_the_volumes", SkipReason::MissingTool("nbdinfo"));
///     };
///     assert!(nbdinfo.is_file());
/// }
/// # nbdinfo_lists_the_volumes();
/// ```
pub fn skip(test: &str, reason: SkipReason<'_>) {
    let line = format!("SKIP {test}: {reason}\n");
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
    assert!(written.is_ok(), "a skip must be recorded: cannot write {}: {written:?}", log.display());
}

/// Finds a program in `PATH` and in the administrators' folders, which a user's `PATH` may lack.
pub fn find_tool(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|candidate| candidate.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_for_a_missing_tool_is_what_xtask_looks_for() {
        assert_eq!(SkipReason::MissingTool("fio").to_string(), "missing tool: fio");
    }

    #[test]
    fn tools_are_found_by_name() {
        assert!(find_tool("sh").is_some());
        assert_eq!(find_tool("no-such-program-anywhere"), None);
    }
}
