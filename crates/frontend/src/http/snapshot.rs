//! A node's report about itself, at one moment.

use byway_fabric::feedback::Delays;
use byway_reactor::{Counters, MappedMemory};
use byway_service::block::StoreTimes;
use serde::{Deserialize, Serialize};

/// A source of [`Snapshot`]s. Called from the HTTP thread, once per request.
pub trait Report: Send + Sync + 'static {
    /// The node now, summed over its loops.
    fn snapshot(&self) -> Snapshot;
}

/// A node at one moment. What counts only grows while the process lives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Why it does not serve; `None`: it does.
    pub not_ready: Option<String>,
    /// byway's version.
    pub version: String,
    /// The backend of its loops: `uring` or `epoll`.
    pub io: String,
    /// Seconds since it started.
    pub uptime_seconds: u64,
    /// CPU time of the process, user and system.
    pub cpu: std::time::Duration,
    /// Event loops.
    pub loops: u64,
    /// The bytes that the loops moved, by kind of copy.
    pub counters: Counters,
    /// Bytes of all frame pools.
    pub frame_bytes: u64,
    /// Of these, not in use.
    pub frame_free_bytes: u64,
    /// What the process has in memory.
    pub memory: MemoryUsage,
    /// The limit on mapped files; `None`: there is none.
    pub mapped: Option<MappedMemory>,
    /// Each frontend (`nbd`, `byway`).
    pub frontends: Vec<FrontendSnapshot>,
    /// Each volume.
    pub volumes: Vec<VolumeSnapshot>,
    /// Each share.
    pub shares: Vec<ShareSnapshot>,
    /// Memory that is lent; `None`: the node lends none.
    pub lending: Option<LendingSnapshot>,
    /// What the transfers of byway's own protocol waited for, all that there ever were.
    pub delays: Delays,
    /// The peers of byway's own protocol that move the most, the busiest first; bounded by the node.
    pub peers: Vec<PeerSnapshot>,
    /// The NBD clients that move the most, the busiest first; bounded by the node.
    pub nbd_clients: Vec<NbdClientSnapshot>,
    /// The slow operations that are remembered, oldest first; bounded by the node.
    pub slow: Vec<SlowOperation>,
}

/// Resident memory of a process by kind, in bytes; `None` where the system does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    /// Its own: frames, buffers, tables.
    pub anonymous_bytes: Option<u64>,
    /// Pages of mapped files. They belong to the page cache, and go when the system wants them.
    pub file_bytes: Option<u64>,
    /// Volumes in memory, and mapped files of tmpfs.
    pub shared_bytes: Option<u64>,
}

/// One frontend.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrontendSnapshot {
    /// Its name.
    pub name: String,
    /// Connections open now.
    pub connections: u64,
    /// Connections accepted.
    pub accepted: u64,
    /// Connections refused at accept: outside the allowed ranges, or over the limit.
    pub refused: u64,
    /// Connections that ended by an error: a reset, a time-out, a broken protocol.
    pub connection_errors: u64,
}

/// Memory that a node lends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LendingSnapshot {
    /// Bytes that are lent at most.
    pub limit_bytes: u64,
    /// Of these, bytes that are leased.
    pub lent_bytes: u64,
    /// Of these, bytes that borrowers have written to.
    #[serde(default)]
    pub filled_bytes: u64,
    /// Sessions that have slabs.
    pub borrowers: u64,
    /// Leases that were refused.
    pub refused: u64,
    /// Bytes that were taken back, under pressure or for a borrower below its fair share.
    #[serde(default)]
    pub taken_back_bytes: u64,
    /// Bytes of borrowers that did not renew their leases.
    #[serde(default)]
    pub expired_bytes: u64,
    /// The borrowers with the most, the largest first.
    #[serde(default)]
    pub largest: Vec<BorrowerSnapshot>,
}

/// What one borrower of a node's memory has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BorrowerSnapshot {
    /// Its certificate's name, or its address.
    pub name: String,
    /// Bytes that are leased to it.
    pub lent_bytes: u64,
    /// Of these, bytes that it has written to.
    #[serde(default)]
    pub filled_bytes: u64,
    /// Bytes that were taken back from it.
    pub taken_back_bytes: u64,
}

/// One volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeSnapshot {
    /// Its name.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// Reads done, each as its client asked for it.
    pub reads: u64,
    /// Writes done, each as its client asked for it.
    pub writes: u64,
    /// Flushes done.
    pub flushes: u64,
    /// Trims and writes of zeroes done.
    pub trims: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Operations that the store failed.
    pub errors: u64,
    /// Requests that were refused for a mistake of their client.
    pub rejected: u64,
    /// Operations under way.
    pub in_flight: u64,
    /// Whether a flush has failed: flushes fail then until the volume is opened anew.
    pub flush_failed: bool,
    /// The last operation that the store failed.
    pub last_failure: Option<FailureSnapshot>,
    /// How long operations took at the store.
    #[serde(skip)]
    pub times: StoreTimes,
}

/// One share.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareSnapshot {
    /// Its name.
    pub name: String,
    /// Mounts, programs and commands that use it now.
    pub clients: u64,
    /// Reads that succeeded.
    pub reads: u64,
    /// Writes that succeeded.
    pub writes: u64,
    /// Syncs that succeeded.
    pub syncs: u64,
    /// Other calls that changed something and succeeded.
    pub changes: u64,
    /// Calls that changed nothing and succeeded.
    pub queries: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Calls that failed with `EIO`, `ENOSPC` or `EDQUOT` of the file system.
    pub store_errors: u64,
}

/// An operation that a store failed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureSnapshot {
    /// `read`, `write`, `flush`, ...
    pub operation: String,
    /// First byte of the volume.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// What the store said.
    pub error: String,
    /// How long ago.
    pub seconds_ago: u64,
}

/// What an operator reads where a flush of a volume has failed.
pub fn flush_failed(volume: &str) -> String {
    format!(
        "a flush failed, so written data may be lost, and flushes fail; check the disk, then run `byway ctl reopen {volume}`"
    )
}

/// A connection of an NBD client.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NbdClientSnapshot {
    /// Its address; `local` on a unix socket.
    pub peer: String,
    /// What it has opened.
    pub volume: String,
    /// Its requests that have not been answered.
    pub in_flight: u64,
    /// Bytes on the wire that it has taken.
    pub sent_bytes: u64,
    /// Bytes on the wire that came from it.
    pub received_bytes: u64,
    /// What it takes now.
    pub send_bytes_per_second: u64,
    /// What comes from it now.
    pub receive_bytes_per_second: u64,
}

/// A machine whose sessions are served.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerSnapshot {
    /// Its IP address; `local` for this machine, over unix sockets and shared memory.
    pub peer: String,
    /// Its sessions.
    pub sessions: u64,
    /// Bytes that those have taken.
    pub sent_bytes: u64,
    /// Bytes that came from them.
    pub received_bytes: u64,
    /// What it takes now.
    pub send_bytes_per_second: u64,
    /// What comes from it now.
    pub receive_bytes_per_second: u64,
    /// Requests that had to wait for frames.
    pub frame_waits: u64,
    /// How long on average, in microseconds.
    pub frame_wait_us: u64,
    /// From when a message was queued to when it was taken, on average, in microseconds.
    pub send_delay_us: u64,
    /// How often something of its open sessions waited: for buffers, for credit, or at least 1 ms for the peer to take bytes.
    pub stalls: u64,
    /// How long in all, in microseconds.
    pub stalled_us: u64,
    /// The path's round trip in microseconds, where the wire says it.
    pub round_trip_us: Option<u64>,
    /// What the path delivered when it was kept full.
    pub delivery_bytes_per_second: Option<u64>,
    /// Segments that were sent again.
    pub retransmits: Option<u64>,
}

/// An operation that took longer than the node's limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SlowOperation {
    /// When it ended, in milliseconds since 1970.
    pub ended_unix_ms: u64,
    /// How long it took, in microseconds.
    pub took_us: u64,
    /// `read`, `write`, `flush`, ...
    pub operation: String,
    /// Of which volume.
    pub volume: String,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The client.
    pub peer: String,
}
