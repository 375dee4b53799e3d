//! A snapshot as Prometheus text.

use std::collections::BTreeMap;

use byway_fabric::Stall;
use byway_fabric::feedback::{Delays, Histogram};

use super::page::{Each, Page};
use super::snapshot::{
    BorrowerSnapshot, FrontendSnapshot, LendingSnapshot, PeerSnapshot, ShareSnapshot, Snapshot, VolumeSnapshot,
};

/// Writes all metrics. Names start with `byway_`, end with their unit, and counters with `_total`.
pub fn render(snapshot: &Snapshot) -> String {
    let mut page = Page::default();
    node(&mut page, snapshot);
    moved(&mut page, snapshot);
    frontends(&mut page, &snapshot.frontends);
    volumes(&mut page, &snapshot.volumes);
    shares(&mut page, &snapshot.shares);
    snapshot.lending.iter().for_each(|lending| lent(&mut page, lending));
    delays(&mut page, &snapshot.delays);
    peers(&mut page, &snapshot.peers);
    page.into_text()
}

fn node(page: &mut Page, node: &Snapshot) {
    page.head("byway_info", "gauge", "Version and backend of this node; always 1.");
    page.line("byway_info", &[("version", &node.version), ("io", &node.io)], 1);
    page.head("byway_cpu_seconds_total", "counter", "CPU time of the process, user and system.");
    page.line("byway_cpu_seconds_total", &[], node.cpu.as_secs_f64());
    let gauges = [
        ("byway_ready", "Whether the node serves: 1 or 0.", u64::from(node.not_ready.is_none())),
        ("byway_uptime_seconds", "Seconds since the node started.", node.uptime_seconds),
        ("byway_loops", "Event loops.", node.loops),
        ("byway_buffer_memory_bytes", "Buffer memory of all loops (--buffer-memory), in bytes.", node.frame_bytes),
        ("byway_buffer_memory_free_bytes", "Buffer memory not in use, in bytes.", node.frame_free_bytes),
    ];
    for (name, help, value) in gauges {
        page.head(name, "gauge", help);
        page.line(name, &[], value);
    }
    let name = "byway_memory_bytes";
    page.head(name, "gauge", "Resident memory of the process, by kind.");
    let memory = &node.memory;
    let kinds = [("anonymous", memory.anonymous_bytes), ("file", memory.file_bytes), ("shared", memory.shared_bytes)];
    for (kind, bytes) in kinds {
        if let Some(bytes) = bytes {
            page.line(name, &[("kind", kind)], bytes);
        }
    }
    if let Some(mapped) = &node.mapped {
        let name = "byway_mmap_limit_bytes";
        page.head(name, "gauge", "Limit on the resident memory of the kinds file and shared.");
        page.line(name, &[], mapped.limit_bytes);
        let name = "byway_mmap_released_bytes_total";
        page.head(name, "counter", "Bytes of mapped files released to keep to the limit.");
        page.line(name, &[], mapped.dropped_bytes);
    }
}

fn moved(page: &mut Page, node: &Snapshot) {
    let counters = &node.counters;
    let name = "byway_moved_bytes_total";
    page.head(name, "counter", "Bytes moved, by path and by whether a CPU copied them.");
    let paths = [
        ("send", "copied", counters.sent_copied_bytes),
        ("send", "spliced", counters.sent_spliced_bytes),
        ("send", "zero_copy", counters.sent_zero_copy_bytes),
        ("receive", "copied", counters.received_bytes),
        ("put", "copied", counters.put_bytes),
        ("get", "copied", counters.got_bytes),
        ("read", "copied", counters.read_copied_bytes),
        ("read", "direct", counters.read_direct_bytes),
        ("write", "copied", counters.written_copied_bytes),
        ("write", "direct", counters.written_direct_bytes),
    ];
    for (path, by, value) in paths {
        page.line(name, &[("path", path), ("by", by)], value);
    }
    let name = "byway_device_memory_bytes_total";
    let help = "Bytes moved to or from memory of a PCI device; with by=cpu, a CPU copied them out of uncached memory.";
    page.head(name, "counter", help);
    let paths = [
        ("read", "device", counters.read_device_bytes),
        ("write", "device", counters.written_device_bytes),
        ("send", "cpu", counters.sent_device_bytes),
        ("receive", "cpu", counters.received_device_bytes),
    ];
    for (path, by, value) in paths {
        page.line(name, &[("path", path), ("by", by)], value);
    }
    let totals = [
        (
            "byway_sent_mapped_bytes_total",
            "Bytes sent from mapped files without a copy in user space.",
            counters.sent_mapped_bytes,
        ),
        ("byway_sends_total", "Send calls.", counters.send_calls),
        ("byway_receives_total", "Receive calls that returned data.", counters.receive_calls),
        ("byway_sleeps_total", "Times that an event loop slept in the kernel.", counters.sleeps),
    ];
    for (name, help, value) in totals {
        page.head(name, "counter", help);
        page.line(name, &[], value);
    }
}

fn frontends(page: &mut Page, frontends: &[FrontendSnapshot]) {
    let all: [Each<FrontendSnapshot>; 4] = [
        ("byway_connections", "gauge", "Connections open now.", |frontend| frontend.connections),
        ("byway_connections_accepted_total", "counter", "Connections accepted.", |frontend| frontend.accepted),
        ("byway_connections_refused_total", "counter", "Connections refused at accept.", |frontend| frontend.refused),
        (
            "byway_connection_errors_total",
            "counter",
            "Connections ended by an error: reset, time-out, bad message.",
            |frontend| frontend.connection_errors,
        ),
    ];
    page.each(&all, frontends, "frontend", |frontend| &frontend.name);
}

fn volumes(page: &mut Page, volumes: &[VolumeSnapshot]) {
    let all: [Each<VolumeSnapshot>; 11] = [
        ("byway_volume_size_bytes", "gauge", "Size of the volume.", |volume| volume.bytes),
        ("byway_volume_in_flight", "gauge", "Operations in flight.", |volume| volume.in_flight),
        ("byway_volume_reads_total", "counter", "Read requests that succeeded.", |volume| volume.reads),
        ("byway_volume_writes_total", "counter", "Write requests that succeeded.", |volume| volume.writes),
        ("byway_volume_flushes_total", "counter", "Flush requests that succeeded.", |volume| volume.flushes),
        ("byway_volume_trims_total", "counter", "Trim and write-zeroes requests that succeeded.", |volume| {
            volume.trims
        }),
        ("byway_volume_read_bytes_total", "counter", "Bytes read.", |volume| volume.read_bytes),
        ("byway_volume_written_bytes_total", "counter", "Bytes written.", |volume| volume.written_bytes),
        ("byway_volume_store_errors_total", "counter", "Operations that failed at the store.", |volume| volume.errors),
        ("byway_volume_bad_requests_total", "counter", "Requests refused because they were invalid.", |volume| {
            volume.rejected
        }),
        ("byway_volume_flush_failed", "gauge", "1 after a failed flush, until the volume is reopened.", |volume| {
            volume.flush_failed.into()
        }),
    ];
    page.each(&all, volumes, "volume", |volume| &volume.name);
    let name = "byway_volume_store_seconds";
    page.head(name, "histogram", "Duration of operations at the store, without those answered from memory at once.");
    for volume in volumes {
        for (operation, times) in volume.times.kinds() {
            let labels = [("volume", volume.name.as_str()), ("operation", operation)];
            page.histogram(name, &labels, times.classes(), times.total());
        }
    }
}

fn shares(page: &mut Page, shares: &[ShareSnapshot]) {
    let all: [Each<ShareSnapshot>; 4] = [
        ("byway_share_clients", "gauge", "Mounts, programs and commands that use the share.", |share| share.clients),
        ("byway_share_read_bytes_total", "counter", "Bytes read.", |share| share.read_bytes),
        ("byway_share_written_bytes_total", "counter", "Bytes written.", |share| share.written_bytes),
        (
            "byway_share_store_errors_total",
            "counter",
            "Calls that failed with EIO, ENOSPC or EDQUOT of the file system.",
            |share| share.store_errors,
        ),
    ];
    page.each(&all, shares, "share", |share| &share.name);
    if shares.is_empty() {
        return;
    }
    let name = "byway_share_calls_total";
    page.head(name, "counter", "Calls that succeeded, by kind; a query is a look-up, open, listing, lock or the like.");
    for share in shares {
        let kinds = [
            ("read", share.reads),
            ("write", share.writes),
            ("sync", share.syncs),
            ("change", share.changes),
            ("query", share.queries),
        ];
        for (kind, count) in kinds {
            page.line(name, &[("share", &share.name), ("kind", kind)], count);
        }
    }
}

/// What transfers waited for: histograms over all peers, so that their number does not depend on that of the peers.
fn lent(page: &mut Page, lending: &LendingSnapshot) {
    let all = [
        ("byway_lend_limit_bytes", "gauge", "Memory that the node lends at most.", lending.limit_bytes),
        ("byway_lent_bytes", "gauge", "Memory leased to borrowers.", lending.lent_bytes),
        ("byway_lent_filled_bytes", "gauge", "Of the leased memory, what borrowers have filled.", lending.filled_bytes),
        ("byway_borrowers", "gauge", "Sessions that hold lent memory.", lending.borrowers),
        ("byway_leases_refused_total", "counter", "Leases refused.", lending.refused),
        (
            "byway_lent_taken_back_bytes_total",
            "counter",
            "Memory taken back from borrowers, under pressure or for others.",
            lending.taken_back_bytes,
        ),
        (
            "byway_lent_expired_bytes_total",
            "counter",
            "Memory of borrowers that did not renew their leases.",
            lending.expired_bytes,
        ),
    ];
    for (name, kind, help, value) in all {
        page.head(name, kind, help);
        page.line(name, &[], value);
    }
    of_borrowers(page, &lending.largest);
}

fn of_borrowers(page: &mut Page, largest: &[BorrowerSnapshot]) {
    let mut borrowers: BTreeMap<&str, [u64; 3]> = BTreeMap::new();
    for BorrowerSnapshot { name, lent_bytes, filled_bytes, taken_back_bytes } in largest {
        let sums = borrowers.entry(name).or_default();
        for (sum, bytes) in sums.iter_mut().zip([lent_bytes, filled_bytes, taken_back_bytes]) {
            *sum += bytes;
        }
    }
    let names = [
        (
            "byway_borrower_lent_bytes",
            "Memory leased to each of the borrowers with the most; sessions of one name together.",
        ),
        ("byway_borrower_filled_bytes", "Of that memory, what the borrower has filled."),
        ("byway_borrower_taken_back_bytes", "Memory taken back from the borrower's sessions."),
    ];
    for (index, (name, help)) in names.into_iter().enumerate() {
        page.head(name, "gauge", help);
        for (borrower, sums) in &borrowers {
            page.line(name, &[("borrower", borrower)], sums[index]);
        }
    }
}

fn delays(page: &mut Page, delays: &Delays) {
    let name = "byway_transfer_delay_seconds";
    let help = "Delay of transfers: start, how long a request waited for buffers; send, how long a message was queued before the kernel took it.";
    page.head(name, "histogram", help);
    for (wait, delays) in [("start", &delays.start), ("send", &delays.send)] {
        let classes = delays.counts.iter().enumerate().map(|(class, count)| (Histogram::bound(class), *count));
        page.histogram(name, &[("wait", wait)], classes, delays.total);
    }
    let name = "byway_stalls_total";
    page.head(name, "counter", "Waits for buffers, for credit, or for the peer to receive, by kind.");
    for stall in Stall::ALL {
        page.line(name, &[("for", stall.name())], delays.stalls[stall as usize].count);
    }
    let name = "byway_stalled_seconds_total";
    page.head(name, "counter", "Total time of these waits.");
    for stall in Stall::ALL {
        page.line(name, &[("for", stall.name())], delays.stalls[stall as usize].total.as_secs_f64());
    }
}

/// The busiest peers alone, and of them what is true now: sums over the sessions of a peer shrink when one of those ends.
fn peers(page: &mut Page, peers: &[PeerSnapshot]) {
    let seconds = |micros: u64| Some(micros as f64 / 1e6);
    type OfPeer<'a> = (&'static str, &'static str, &'a dyn Fn(&PeerSnapshot) -> Option<f64>);
    let all: [OfPeer<'_>; 7] = [
        ("byway_peer_sessions", "Sessions of one of the busiest peers.", &|peer| Some(peer.sessions as f64)),
        ("byway_peer_send_bytes_per_second", "Rate at which the peer receives.", &|peer| {
            Some(peer.send_bytes_per_second as f64)
        }),
        ("byway_peer_receive_bytes_per_second", "Rate at which the peer sends.", &|peer| {
            Some(peer.receive_bytes_per_second as f64)
        }),
        (
            "byway_peer_buffer_wait_seconds",
            "Mean wait for buffers of requests that waited, over the peer's open sessions.",
            &|peer| seconds(peer.frame_wait_us),
        ),
        (
            "byway_peer_send_delay_seconds",
            "Mean time that a message was queued before the kernel took it, over the peer's open sessions.",
            &|peer| seconds(peer.send_delay_us),
        ),
        ("byway_peer_round_trip_seconds", "Round-trip time of the peer's busiest connection.", &|peer| {
            peer.round_trip_us.and_then(seconds)
        }),
        ("byway_peer_delivery_bytes_per_second", "Delivery rate of that connection while it was kept full.", &|peer| {
            peer.delivery_bytes_per_second.map(|rate| rate as f64)
        }),
    ];
    for (name, help, value) in all {
        page.head(name, "gauge", help);
        for peer in peers {
            if let Some(value) = value(peer) {
                page.line(name, &[("peer", &peer.peer)], value);
            }
        }
    }
}
