//! Counts of the program's calls: a table in memory that the library maps in each process (`crates/run/src/report.rs`).

use std::fmt::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, Command, ExitStatus};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;

/// The variable with the table's path.
const REPORT_VARIABLE: &str = "BYWAY_RUN_REPORT";

/// Entries of the table.
const ENTRIES: usize = 256;

/// Bytes of an entry: a hash, which is 0 in one that is not used, the two counts, and the name.
const ENTRY_BYTES: usize = 64;

/// The table.
pub(super) struct Report {
    table: OwnedFd,
}

impl Report {
    /// Makes the table, and tells a program of it. It has no name in a file system, and goes with this process.
    pub(super) fn begin(command: &mut Command) -> std::io::Result<Self> {
        let table = memfd_create("byway-run-report", MemfdFlags::CLOEXEC)?;
        ftruncate(&table, (ENTRIES * ENTRY_BYTES) as u64)?;
        command.env(REPORT_VARIABLE, format!("/proc/{}/fd/{}", std::process::id(), table.as_raw_fd()));
        Ok(Self { table })
    }

    /// What was counted, for people.
    pub(super) fn text(&self) -> std::io::Result<String> {
        let mut bytes = vec![0; ENTRIES * ENTRY_BYTES];
        let count = rustix::io::pread(&self.table, &mut bytes[..], 0)?;
        Ok(text_of(&bytes[..count]))
    }
}

fn text_of(table: &[u8]) -> String {
    let number = |entry: &[u8], at: usize| entry[at..].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
    let mut entries: Vec<(String, u64, u64)> = table
        .chunks_exact(ENTRY_BYTES)
        .filter(|entry| number(entry, 0) != 0)
        .map(|entry| {
            let name = entry[24..].split(|byte| *byte == 0).next().unwrap_or_default();
            (String::from_utf8_lossy(name).into_owned(), number(entry, 8), number(entry, 16))
        })
        .collect();
    entries.sort();
    let list = |count: fn(&(String, u64, u64)) -> u64| {
        let mut text = String::new();
        for entry in entries.iter().filter(|entry| count(entry) > 0) {
            let separator = if text.is_empty() { "" } else { ", " };
            let _ = write!(text, "{separator}{} {}", entry.0, count(entry));
        }
        if text.is_empty() { "none".to_owned() } else { text }
    };
    format!("answered by a share: {}; refused: {}", list(|entry| entry.1), list(|entry| entry.2))
}

/// Waits for the program. A terminal's signals reach it too; those sent to this process are passed on.
pub(super) fn wait(mut child: Child) -> std::io::Result<ExitStatus> {
    let mut signals = Signals::new([SIGINT, SIGQUIT, SIGTERM, SIGHUP, SIGCHLD])?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        for signal in signals.wait().filter(|signal| matches!(*signal, SIGTERM | SIGHUP)) {
            if let Some(signal) = Signal::from_named_raw(signal) {
                let _ = kill_process(Pid::from_child(&child), signal);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_listed_by_name() {
        let entry = |name: &str, answered: u64, refused: u64| {
            let mut entry = [7, answered, refused].map(u64::to_ne_bytes).concat();
            entry.extend_from_slice(name.as_bytes());
            entry.resize(ENTRY_BYTES, 0);
            entry
        };
        let table = [entry("read", 12, 0), vec![0; ENTRY_BYTES], entry("chdir", 1, 1), entry("openat", 3, 0)].concat();
        assert_eq!(text_of(&table), "answered by a share: chdir 1, openat 3, read 12; refused: chdir 1");
        assert_eq!(text_of(&[]), "answered by a share: none; refused: none");
    }
}
