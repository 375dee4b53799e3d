//! The metrics of this user's mounts, as Prometheus text, for `byway ctl metrics`.

use std::time::Duration;

use byway_frontend::http::Page;

use super::status::MountStatus;

/// Name, type, help and value of a metric that each mount has once.
struct OfMount {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    value: fn(&MountStatus) -> u64,
}

const fn gauge(name: &'static str, help: &'static str, value: fn(&MountStatus) -> u64) -> OfMount {
    OfMount { name, kind: "gauge", help, value }
}

const fn counter(name: &'static str, help: &'static str, value: fn(&MountStatus) -> u64) -> OfMount {
    OfMount { name, kind: "counter", help, value }
}

/// docs/operations.md says what each counts.
const OF_MOUNTS: [OfMount; 13] = [
    gauge("byway_mount_connected", "1 while there is a session with the server.", |mount| {
        mount.client.connected.into()
    }),
    counter("byway_mount_reconnects_total", "Sessions with the server after the first.", |mount| {
        mount.client.reconnects
    }),
    counter("byway_mount_messages_total", "Messages to the server, without those that renew leases.", |mount| {
        mount.client.messages
    }),
    counter("byway_mount_read_bytes_total", "Bytes that the process gave to the kernel.", |mount| mount.read_bytes),
    counter("byway_mount_written_bytes_total", "Bytes written.", |mount| mount.written_bytes),
    gauge("byway_mount_calls_under_way", "Calls of programs that are not answered.", |mount| mount.under_way),
    gauge("byway_mount_leases", "Files and directories with a lease.", |mount| mount.client.leases),
    counter("byway_mount_recalls_total", "Leases that the server has recalled.", |mount| mount.client.recalls),
    counter("byway_mount_cache_hits_total", "Look-ups and attributes that cost no message.", |mount| {
        mount.client.cache_hits
    }),
    gauge("byway_mount_known_files", "Files and directories that the kernel knows.", |mount| mount.client.files),
    gauge("byway_mount_open_files", "Open files and directories.", |mount| mount.client.open_files),
    gauge("byway_mount_locks", "Locks that programs hold.", |mount| mount.client.locks),
    gauge("byway_mount_unsynced_files", "Files and directories with changes that no sync has followed.", |mount| {
        mount.client.unsynced_files
    }),
];

/// A mount's directory, as a label: it tells mounts apart.
fn directory(mount: &MountStatus) -> String {
    mount.directory.display().to_string()
}

/// The kind of some calls, as a label: the singular.
fn singular(kind: &str) -> &str {
    kind.strip_suffix('s').unwrap_or(kind)
}

/// Writes all metrics. Of several mounts on one directory the last one counts: programs use that one.
pub(super) fn render(all: &[MountStatus]) -> String {
    let is_last =
        |(at, mount): &(usize, &MountStatus)| all[at + 1..].iter().all(|other| other.directory != mount.directory);
    let mounts: Vec<&MountStatus> = all.iter().enumerate().filter(is_last).map(|(_, mount)| mount).collect();
    let mut page = Page::default();
    page.head("byway_mount_info", "gauge", "Share and process of a mount; always 1.");
    for mount in &mounts {
        let (directory, pid) = (directory(mount), mount.pid.to_string());
        page.line("byway_mount_info", &[("mount", &directory), ("share", &mount.uri), ("pid", &pid)], 1);
    }
    for OfMount { name, kind, help, value } in &OF_MOUNTS {
        page.head(name, kind, help);
        for mount in &mounts {
            page.line(name, &[("mount", &directory(mount))], value(mount));
        }
    }
    calls(&mut page, &mounts);
    page.into_text()
}

fn calls(page: &mut Page, mounts: &[&MountStatus]) {
    let name = "byway_mount_calls_total";
    page.head(name, "counter", "Calls of programs, by kind.");
    for mount in mounts {
        for (kind, count) in &mount.calls {
            page.line(name, &[("mount", &directory(mount)), ("kind", singular(kind))], count);
        }
    }
    let name = "byway_mount_call_seconds";
    page.head(name, "histogram", "Duration of answered calls, by kind, with waits for locks and for the server.");
    for mount in mounts {
        for (kind, times) in &mount.times {
            let directory = directory(mount);
            let labels = [("mount", &directory[..]), ("kind", singular(kind))];
            page.histogram(name, &labels, times.latencies.classes(), Duration::from_micros(times.total_us));
        }
    }
    let name = "byway_mount_errors_total";
    page.head(name, "counter", "Calls that failed with an error of the server or of a limit.");
    for mount in mounts {
        for (error, count) in &mount.errors {
            page.line(name, &[("mount", &directory(mount)), ("error", error)], count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::status::tests::mount;
    use super::*;

    #[test]
    fn each_mount_has_its_metrics_once() {
        let mut first = mount("/mnt/a", true);
        first.read_bytes = 1;
        let text = render(&[first, mount("/mnt/a", true), mount("/mnt/b", false)]);
        for line in [
            "byway_mount_info{mount=\"/mnt/a\",share=\"byway://store/home\",pid=\"12\"} 1",
            "byway_mount_connected{mount=\"/mnt/b\"} 0",
            "byway_mount_read_bytes_total{mount=\"/mnt/a\"} 2048",
            "byway_mount_calls_total{mount=\"/mnt/a\",kind=\"look_up\"} 3",
            "byway_mount_call_seconds_bucket{mount=\"/mnt/b\",kind=\"look_up\",le=\"0.000016\"} 1",
            "byway_mount_call_seconds_bucket{mount=\"/mnt/b\",kind=\"look_up\",le=\"+Inf\"} 1",
            "byway_mount_call_seconds_sum{mount=\"/mnt/b\",kind=\"look_up\"} 0.000009",
            "byway_mount_errors_total{mount=\"/mnt/b\",error=\"EIO\"} 4",
        ] {
            assert_eq!(text.lines().filter(|one| *one == line).count(), 1, "{line}\n{text}");
        }
        let names = |line: &str| line.rsplit_once(' ').map(|(name, _)| name.to_owned());
        let mut series: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).filter_map(names).collect();
        let all = series.len();
        series.sort_unstable();
        series.dedup();
        assert_eq!(series.len(), all, "each series comes once");
    }

    #[test]
    fn metrics_are_in_the_manual() {
        let manual = include_str!("../../../../docs/operations.md");
        let text = render(&[mount("/mnt/a", true)]);
        for metric in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()) {
            assert!(manual.contains(metric), "{metric}");
        }
    }
}
