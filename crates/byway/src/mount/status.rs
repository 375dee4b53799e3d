//! How a mount is: what its process tells, and how it is printed.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

use byway_service::file::client::ClientReport;
use serde::{Deserialize, Serialize};

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
    /// Bytes that programs have read through calls to the process.
    pub read_bytes: u64,
    /// Bytes that they have written.
    pub written_bytes: u64,
    /// The client.
    #[serde(flatten)]
    pub client: ClientStatus,
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
    /// Questions for names and attributes that the mount has answered itself.
    pub cache_hits: u64,
    /// Files and directories that the kernel knows.
    pub files: u64,
    /// Files and directories that are open.
    pub open_files: u64,
    /// Locks that programs hold.
    pub locks: u64,
}

impl From<ClientReport> for ClientStatus {
    fn from(report: ClientReport) -> Self {
        let ClientReport { connected, reconnects, messages, gives_leases, leases, cache_hits, .. } = report;
        let ClientReport { files, open_files, locks, .. } = report;
        Self { connected, reconnects, messages, caches: gives_leases, leases, cache_hits, files, open_files, locks }
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
    let ClientStatus { reconnects, messages, leases, cache_hits, files, open_files, locks, .. } = client;
    writeln!(out, "{}: {uri}, process {pid}, taken over {takeovers} times", directory.display())?;
    writeln!(out, "server: {}, {reconnects} reconnects, {messages} messages", state(status))?;
    writeln!(out, "cache: {leases} leases, {cache_hits} answers without a message")?;
    writeln!(out, "files: {files} known to the kernel, {open_files} open, {locks} locks")?;
    writeln!(out, "bytes: {} read, {} written", show_size(*read_bytes), show_size(*written_bytes))?;
    let calls: Vec<_> = status.calls.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    writeln!(out, "calls: {}", calls.join(", ").replace('_', "-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(directory: &str, connected: bool) -> MountStatus {
        let client = ClientStatus {
            connected,
            reconnects: 2,
            messages: 30,
            caches: true,
            leases: 4,
            cache_hits: 50,
            files: 6,
            open_files: 7,
            locks: 0,
        };
        MountStatus {
            directory: directory.into(),
            uri: "byway://store/home".to_owned(),
            pid: 12,
            since: 1000,
            takeovers: 1,
            calls: [("look_ups".to_owned(), 3)].into(),
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
    fn a_mount_tells_its_counts() {
        let text = printed(|out| print(out, &mount("/mnt/a", true)));
        assert!(text.contains("calls: 3 look-ups") && text.contains("50 answers without a message"), "{text}");
    }
}
