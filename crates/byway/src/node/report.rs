//! A node's report about itself: sums over its loops, collected by message.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use byway_fabric::Stall;
use byway_fabric::feedback::Delays;
use byway_frontend::http::{
    BorrowerSnapshot, FailureSnapshot, FrontendSnapshot, LendingSnapshot, MemoryUsage, NbdClientSnapshot, PeerSnapshot,
    Report, ShareSnapshot, SlowOperation, Snapshot, VolumeSnapshot,
};
use byway_frontend::nbd::server::NbdClient;
use byway_reactor::{Counters, mapped_memory};
use byway_service::block::{Engine, Slow, StoreTimes, Volume, VolumeCounters, VolumeId};
use byway_service::file::server::{ShareCounters, ShareReport};
use byway_service::host::{PeerFeedback, keep_busiest};
use byway_service::memory::{BorrowerStatus, Lending, LendingStatus};

use super::LoopSender;
use super::worker::Message;
use crate::limits::{PEERS_REPORTED_MAX, SLOW_OPERATIONS_MAX};

/// How long a loop is waited for: it answers within a turn, unless its disk holds it up.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);

/// What one loop has done.
#[derive(Debug)]
pub(super) struct LoopReport {
    pub(super) counters: Counters,
    pub(super) frame_bytes: u64,
    pub(super) frame_free_bytes: u64,
    pub(super) frontends: Vec<FrontendSnapshot>,
    pub(super) volumes: Vec<VolumeReport>,
    pub(super) shares: Vec<ShareReport>,
    pub(super) delays: Delays,
    /// The busiest of this loop.
    pub(super) peers: Vec<PeerFeedback>,
    /// The busiest of this loop.
    pub(super) nbd_clients: Vec<NbdClientSnapshot>,
}

/// A volume on one loop.
#[derive(Debug)]
pub(super) struct VolumeReport {
    pub(super) volume: Arc<Volume>,
    pub(super) counters: VolumeCounters,
    pub(super) times: StoreTimes,
    pub(super) last_failure: Option<FailureSnapshot>,
}

impl VolumeReport {
    pub(super) fn new(engine: &Engine, volume: &Arc<Volume>, id: VolumeId, now: byway_reactor::Instant) -> Self {
        let last_failure = volume.last_failure().map(|failure| FailureSnapshot {
            operation: failure.operation.name().to_owned(),
            offset: failure.offset,
            len: failure.len,
            error: failure.error.errno().to_string(),
            seconds_ago: now.since(failure.at).as_secs(),
        });
        let (counters, times) = (engine.counters(id), engine.store_times(id));
        Self { volume: Arc::clone(volume), counters, times, last_failure }
    }

    /// As another loop has it.
    fn plus(self, other: Self) -> Self {
        let (counters, times) = (self.counters.plus(&other.counters), self.times.plus(&other.times));
        Self { counters, times, ..other }
    }
}

/// The slow operations of all loops: the last [`SLOW_OPERATIONS_MAX`].
#[derive(Debug, Default)]
pub(super) struct SlowOperations(Mutex<VecDeque<SlowOperation>>);

impl SlowOperations {
    pub(super) fn push(&self, slow: &Slow, volume: &str, peer: Option<SocketAddr>) {
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let operation = SlowOperation {
            ended_unix_ms: u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX),
            took_us: u64::try_from(slow.took.as_micros()).unwrap_or(u64::MAX),
            operation: slow.operation.name().to_owned(),
            volume: volume.to_owned(),
            offset: slow.offset,
            len: slow.len,
            peer: peer.map_or_else(|| "unix".to_owned(), |peer| peer.to_string()),
        };
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == SLOW_OPERATIONS_MAX {
            kept.pop_front();
        }
        kept.push_back(operation);
    }

    fn list(&self) -> Vec<SlowOperation> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// Asks a node's loops how they are. Outlives the node: then it says that it is not ready.
#[derive(Clone, Debug)]
pub struct NodeReport {
    loops: Arc<Vec<LoopSender>>,
    slow: Arc<SlowOperations>,
    io: String,
    started: Instant,
    draining: Arc<AtomicBool>,
    lending: Option<Arc<Lending>>,
}

impl NodeReport {
    pub(super) fn new(
        loops: Vec<LoopSender>,
        slow: Arc<SlowOperations>,
        io: String,
        lending: Option<Arc<Lending>>,
    ) -> Self {
        let draining = Arc::new(AtomicBool::new(false));
        Self { loops: Arc::new(loops), slow, io, started: Instant::now(), draining, lending }
    }

    /// From now on the node does not take clients.
    pub(super) fn note_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// What all loops that answer in time have done; the second number is how many did not.
    fn loop_reports(&self) -> (Vec<LoopReport>, usize) {
        let asked: Vec<_> = self
            .loops
            .iter()
            .map(|one| {
                let (answer, answered) = channel();
                one.send(Message::Report(answer)).then_some(answered)
            })
            .collect();
        let deadline = Instant::now() + ANSWER_TIME_MAX;
        let left = || deadline.saturating_duration_since(Instant::now());
        let reports: Vec<_> = asked.into_iter().filter_map(|answered| answered?.recv_timeout(left()).ok()).collect();
        let silent = self.loops.len() - reports.len();
        (reports, silent)
    }
}

impl Report for NodeReport {
    fn snapshot(&self) -> Snapshot {
        let (reports, silent) = self.loop_reports();
        let mut snapshot = Snapshot {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            io: self.io.split(':').next().unwrap_or_default().to_owned(),
            uptime_seconds: self.started.elapsed().as_secs(),
            cpu: byway_bench::own_cpu(),
            loops: self.loops.len() as u64,
            memory: memory(),
            mapped: mapped_memory(),
            slow: self.slow.list(),
            lending: self.lending.as_ref().map(|lending| lending_snapshot(lending)),
            ..Snapshot::default()
        };
        if self.draining.load(Ordering::Relaxed) {
            snapshot.not_ready = Some("draining".to_owned());
        } else if silent > 0 {
            snapshot.not_ready = Some(format!("{silent} of {} event loops do not answer", self.loops.len()));
        }
        let mut frontends: Vec<FrontendSnapshot> = Vec::new();
        let mut volumes: BTreeMap<String, VolumeReport> = BTreeMap::new();
        let mut shares: BTreeMap<String, ShareSums> = BTreeMap::new();
        let mut peers: Vec<PeerFeedback> = Vec::new();
        for report in reports {
            snapshot.nbd_clients.extend(report.nbd_clients);
            snapshot.delays = snapshot.delays.plus(&report.delays);
            for peer in report.peers {
                match peers.iter().position(|sum| sum.address == peer.address) {
                    Some(at) => peers[at] = peers[at].clone().plus(peer),
                    None => peers.push(peer),
                }
            }
            snapshot.counters = snapshot.counters.plus(&report.counters);
            snapshot.frame_bytes += report.frame_bytes;
            snapshot.frame_free_bytes += report.frame_free_bytes;
            for frontend in report.frontends {
                match frontends.iter_mut().find(|sum| sum.name == frontend.name) {
                    Some(sum) => add_frontend(sum, &frontend),
                    None => frontends.push(frontend),
                }
            }
            for one in report.volumes {
                let name = one.volume.name().to_owned();
                let sum = match volumes.remove(&name) {
                    Some(sum) => sum.plus(one),
                    None => one,
                };
                volumes.insert(name, sum);
            }
            for one in report.shares {
                let sums = shares.entry(one.share.name().to_owned()).or_default();
                sums.counters = sums.counters.plus(one.counters);
                sums.clients += one.clients;
            }
        }
        let rate = |client: &NbdClientSnapshot| client.send_bytes_per_second + client.receive_bytes_per_second;
        snapshot.nbd_clients.sort_by_key(|client| std::cmp::Reverse(rate(client)));
        snapshot.nbd_clients.truncate(PEERS_REPORTED_MAX);
        keep_busiest(&mut peers, PEERS_REPORTED_MAX);
        snapshot.peers = peers.iter().map(peer).collect();
        snapshot.frontends = frontends;
        snapshot.volumes = volumes.into_values().map(volume).collect();
        snapshot.shares = shares.into_iter().map(|(name, sums)| share(name, sums)).collect();
        snapshot
    }
}

fn lending_snapshot(lending: &Lending) -> LendingSnapshot {
    let LendingStatus {
        lender: _,
        limit_bytes,
        lent_bytes,
        filled_bytes,
        borrowers,
        refused,
        taken_back_bytes,
        expired_bytes,
        largest,
    } = lending.status();
    let share = |borrower: BorrowerStatus| BorrowerSnapshot {
        name: borrower.name,
        lent_bytes: borrower.lent_bytes,
        filled_bytes: borrower.filled_bytes,
        taken_back_bytes: borrower.taken_back_bytes,
    };
    LendingSnapshot {
        limit_bytes,
        lent_bytes,
        filled_bytes,
        borrowers,
        refused,
        taken_back_bytes,
        expired_bytes,
        largest: largest.into_iter().map(share).collect(),
    }
}

fn add_frontend(sum: &mut FrontendSnapshot, frontend: &FrontendSnapshot) {
    sum.connections += frontend.connections;
    sum.accepted += frontend.accepted;
    sum.refused += frontend.refused;
    sum.connection_errors += frontend.connection_errors;
}

pub(super) fn nbd_client(client: &NbdClient, volume: &str) -> NbdClientSnapshot {
    NbdClientSnapshot {
        peer: client.peer.map_or_else(|| "local".to_owned(), |peer| peer.to_string()),
        volume: volume.to_owned(),
        in_flight: client.in_flight as u64,
        sent_bytes: client.sent_bytes,
        received_bytes: client.received_bytes,
        send_bytes_per_second: client.send_rate as u64,
        receive_bytes_per_second: client.receive_rate as u64,
    }
}

fn peer(peer: &PeerFeedback) -> PeerSnapshot {
    let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    let feedback = &peer.feedback;
    let stalls = feedback.stalls.iter();
    PeerSnapshot {
        peer: peer.address.map_or_else(|| "local".to_owned(), |address| address.to_string()),
        sessions: peer.sessions,
        sent_bytes: feedback.sent_bytes,
        received_bytes: feedback.received_bytes,
        send_bytes_per_second: feedback.send_rate as u64,
        receive_bytes_per_second: feedback.receive_rate as u64,
        frame_waits: feedback.stall(Stall::Frames).count,
        frame_wait_us: micros(feedback.stall(Stall::Frames).mean()),
        send_delay_us: micros(feedback.send_delay.mean()),
        stalls: stalls.clone().map(|stall| stall.count).sum(),
        stalled_us: stalls.map(|stall| micros(stall.total)).sum(),
        round_trip_us: peer.path.map(|path| micros(path.round_trip)),
        delivery_bytes_per_second: peer.path.map(|path| path.delivery_rate),
        retransmits: peer.path.map(|path| path.retransmits.into()),
    }
}

fn volume(report: VolumeReport) -> VolumeSnapshot {
    let VolumeReport { volume, counters, times, last_failure } = report;
    VolumeSnapshot {
        name: volume.name().to_owned(),
        bytes: volume.len(),
        reads: counters.reads,
        writes: counters.writes,
        flushes: counters.flushes,
        trims: counters.trims,
        read_bytes: counters.read_bytes,
        written_bytes: counters.written_bytes,
        errors: counters.errors,
        rejected: counters.rejected,
        in_flight: counters.in_flight,
        flush_failed: volume.flush_failed(),
        last_failure,
        times,
    }
}

/// A share on all loops.
#[derive(Default)]
struct ShareSums {
    counters: ShareCounters,
    clients: u64,
}

fn share(name: String, ShareSums { counters, clients }: ShareSums) -> ShareSnapshot {
    let ShareCounters { reads, writes, syncs, changes, queries, read_bytes, written_bytes, store_errors } = counters;
    ShareSnapshot { name, clients, reads, writes, syncs, changes, queries, read_bytes, written_bytes, store_errors }
}

/// This process's memory, as the kernel counts it (`RssAnon`, `RssFile`, `RssShmem` of proc_pid_status(5)).
fn memory() -> MemoryUsage {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let bytes = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        kib.map(|kib| kib << 10)
    };
    MemoryUsage { anonymous_bytes: bytes("RssAnon"), file_bytes: bytes("RssFile"), shared_bytes: bytes("RssShmem") }
}
