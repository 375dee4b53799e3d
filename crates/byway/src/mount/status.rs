//! How a mount is: what its process tells, and how it is printed.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

use byway_frontend::latencies::Latencies;
use byway_service::file::client::ClientReport;
use serde::{Deserialize, Serialize};

use crate::far::status::percentiles;
use crate::units::show_size;

/// What the process of a mount tells of it. Counts are since that process began to serve the mount.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MountStatus {
    /// Where.
    pub directory: PathBuf,
    /// What.
    pub uri: String,
    /// Its process.
    pub pid: u32,
    /// When it was mounted, in seconds since 1970.
    pub since: u64,
    /// How often another process has taken it over.
    pub takeovers: u32,
    /// Calls of programs, by kind.
    pub calls: BTreeMap<String, u64>,
    /// Calls that are not answered now.
    #[serde(default)]
    pub under_way: u64,
    /// How long answered calls took, by kind.
    #[serde(default)]
    pub times: BTreeMap<String, CallTimes>,
    /// Calls that failed, by their errors: those that say something of the server or of limits.
    #[serde(default)]
    pub errors: BTreeMap<String, u64>,
    /// Bytes that programs have read through calls to the process.
    pub read_bytes: u64,
    /// Bytes that they have written.
    pub written_bytes: u64,
    /// The client.
    #[serde(flatten)]
    pub client: ClientStatus,
}

/// How long calls of one kind took, from when the process had them to when the kernel had the answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallTimes {
    /// How many took how long.
    #[serde(flatten)]
    pub latencies: Latencies,
    /// The time of all of them together, in microseconds.
    pub total_us: u64,
}

/// What its client of the share tells.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClientStatus {
    /// There is a session with the server.
    pub connected: bool,
    /// Sessions that were made again.
    pub reconnects: u64,
    /// Messages to the server, without those that only renew leases.
    pub messages: u64,
    /// The server gives leases: attributes, names and data are cached.
    pub caches: bool,
    /// Files and directories with a lease now.
    pub leases: u64,
    /// Leases that the server has recalled, mostly because other clients change these files.
    #[serde(default)]
    pub recalls: u64,
    /// Questions for names and attributes that the mount has answered itself.
    pub cache_hits: u64,
    /// Files and directories that the kernel knows.
    pub files: u64,
    /// Files and directories that are open.
    pub open_files: u64,
    /// Locks that programs hold.
    pub locks: u64,
    /// Files and directories with changes that the server has taken and no sync has followed.
    #[serde(default)]
    pub unsynced_files: u64,
}

impl From<ClientReport> for ClientStatus {
    fn from(report: ClientReport) -> Self {
        Self {
            connected: report.connected,
            reconnects: report.reconnects,
            messages: report.messages,
            caches: report.gives_leases,
            leases: report.leases,
            recalls: report.recalls,
            cache_hits: report.cache_hits,
            files: report.files,
            open_files: report.open_files,
            locks: report.locks,
            unsynced_files: report.unsynced_files,
        }
    }
}

fn state(status: &MountStatus) -> &'static str {
    if status.client.connected { "connected" } else { "away" }
}

fn caches(status: &MountStatus) -> &'static str {
    if status.client.caches { "caches" } else { "asks" }
}

/// Seconds of a day and less, for people.
fn ago(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// A table of mounts. `now` is in seconds since 1970.
pub(super) fn print_list(out: &mut impl Write, all: &[MountStatus], now: u64) -> std::io::Result<()> {
    let heads = ["DIRECTORY", "SHARE", "PID", "SINCE", "SERVER", "CACHE"].map(str::to_owned);
    let row = |status: &MountStatus| {
        [
            status.directory.display().to_string(),
            status.uri.clone(),
            status.pid.to_string(),
            ago(now.saturating_sub(status.since)),
            state(status).to_owned(),
            caches(status).to_owned(),
        ]
    };
    let rows: Vec<_> = std::iter::once(heads).chain(all.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
    let widths: Vec<_> = (0..rows[0].len()).map(width).collect();
    rows.iter().try_for_each(|row| {
        let cells: Vec<_> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        writeln!(out, "{}", cells.join("  ").trim_end())
    })
}

/// One mount.
pub(crate) fn print(out: &mut impl Write, status: &MountStatus) -> std::io::Result<()> {
    let MountStatus { directory, uri, pid, takeovers, read_bytes, written_bytes, client, .. } = status;
    let ClientStatus { reconnects, messages, leases, recalls, cache_hits, .. } = client;
    let ClientStatus { files, open_files, locks, unsynced_files, .. } = client;
    writeln!(out, "{}: {uri}, process {pid}, taken over {takeovers} times", directory.display())?;
    writeln!(out, "server: {}, {reconnects} reconnects, {messages} messages", state(status))?;
    writeln!(out, "cache: {leases} leases, {recalls} recalled, {cache_hits} answers without a message")?;
    writeln!(out, "files: {files} known to the kernel, {open_files} open, {locks} locks, {unsynced_files} not synced")?;
    writeln!(out, "bytes: {} read, {} written", show_size(*read_bytes), show_size(*written_bytes))?;
    let calls: Vec<_> = status.calls.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    writeln!(out, "calls: {}; {} not answered", calls.join(", ").replace('_', "-"), status.under_way)?;
    for (kind, times) in &status.times {
        if let Some(text) = percentiles(&times.latencies) {
            writeln!(out, "time of {}: {text}", kind.replace('_', "-"))?;
        }
    }
    let errors: Vec<_> = status.errors.iter().filter(|(_, count)| **count > 0).collect();
    let errors: Vec<_> = errors.iter().map(|(error, count)| format!("{count} {error}")).collect();
    writeln!(out, "errors: {}", if errors.is_empty() { "none".to_owned() } else { errors.join(", ") })
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use super::*;

    /// A mount that has done something.
    pub(in super::super) fn mount(directory: &str, connected: bool) -> MountStatus {
        let client = ClientStatus {
            connected,
            reconnects: 2,
            messages: 30,
            caches: true,
            leases: 4,
            recalls: 5,
            cache_hits: 50,
            files: 6,
            open_files: 7,
            locks: 0,
            unsynced_files: 8,
        };
        let mut times = CallTimes { total_us: 9, ..CallTimes::default() };
        times.latencies.note(Duration::from_micros(9));
        MountStatus {
            directory: directory.into(),
            uri: "byway://store/home".to_owned(),
            pid: 12,
            since: 1000,
            takeovers: 1,
            calls: [("look_ups".to_owned(), 3)].into(),
            under_way: 2,
            times: [("look_ups".to_owned(), times), ("reads".to_owned(), CallTimes::default())].into(),
            errors: [("EIO".to_owned(), 4), ("ENOSPC".to_owned(), 0)].into(),
            read_bytes: 2048,
            written_bytes: 0,
            client,
        }
    }

    fn printed(print: impl FnOnce(&mut Vec<u8>) -> std::io::Result<()>) -> String {
        let mut out = Vec::new();
        print(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn mounts_are_listed_in_columns() {
        let all = [mount("/mnt/a", true), mount("/mnt/longer", false)];
        let text = printed(|out| print_list(out, &all, 1090));
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[1], "/mnt/a       byway://store/home  12   90 s   connected  caches");
        assert_eq!(lines[2], "/mnt/longer  byway://store/home  12   90 s   away       caches");
        assert!(lines[0].starts_with("DIRECTORY    SHARE "), "{text}");
    }

    #[test]
    fn a_status_of_an_older_process_is_read() {
        let mut status = serde_json::to_value(mount("/mnt/a", true)).unwrap();
        let fields = status.as_object_mut().unwrap();
        for new in ["under_way", "times", "errors", "recalls", "unsynced_files"] {
            fields.remove(new).unwrap();
        }
        let read: MountStatus = serde_json::from_value(status).unwrap();
        assert_eq!((read.read_bytes, read.client.messages, read.client.recalls), (2048, 30, 0));
    }

    #[test]
    fn a_mount_tells_its_counts() {
        let text = printed(|out| print(out, &mount("/mnt/a", true)));
        assert!(
            text.contains("calls: 3 look-ups; 2 not answered") && text.contains("50 answers without a message"),
            "{text}"
        );
        assert!(text.contains("time of look-ups: 50 % at most 16 us") && !text.contains("time of reads"), "{text}");
        assert!(text.ends_with("errors: 4 EIO\n"), "{text}");
    }
}
