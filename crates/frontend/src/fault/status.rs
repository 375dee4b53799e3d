//! What a job of far memory tells of itself: at its end, and when it is asked (`byway ctl far`).

use std::time::{Duration, Instant};

use byway_reactor::userfault::helper::{STATUS_REQUEST, say};
use byway_service::memory::pager::PAGE_BYTES;
use byway_service::memory::pool::Class;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, send};
use serde::{Deserialize, Serialize};

use super::{FarJob, thrashing};
use crate::latencies::Latencies;
use crate::limits::FAR_STATUS_BYTES_MAX;

/// How long a job may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often rates are counted anew.
const RATE_TIME: Duration = Duration::from_secs(1);

/// A lender, and what lies there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LenderShare {
    /// As the command line has it.
    pub name: String,
    /// There is a session with it.
    pub connected: bool,
    /// Slabs leased from it.
    pub slabs: u64,
    /// Bytes of pages that lie in them. A page that lies at two lenders counts at both, and a parity as a page; pages that came back and have not changed since
    /// are still there.
    pub bytes: u64,
}

/// Where a job's pages are, and what its programs wait for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FarStatus {
    /// Programs that are paged, forked children included.
    pub programs: u64,
    /// Bytes that they may have on this machine.
    pub limit_bytes: u64,
    /// Bytes that they have on this machine, as the kernel counts them.
    pub resident_bytes: u64,
    /// Of these, bytes that can be moved out.
    pub local_bytes: u64,
    /// Bytes that are not in the programs: at lenders, or on their way.
    pub far_bytes: u64,
    /// Bytes in the file of `--class disk`.
    pub file_bytes: Option<u64>,
    /// The lenders.
    pub lenders: Vec<LenderShare>,
    /// Faults of the last second.
    pub faults_per_second: u64,
    /// Pages that came from lenders in the last second.
    pub fetched_per_second: u64,
    /// Pages that went to lenders in the last second.
    pub put_per_second: u64,
    /// Waits for pages.
    pub latencies: Latencies,
}

/// Faults, pages fetched and pages put of the last whole second.
#[derive(Debug)]
pub(super) struct Rates {
    since: Instant,
    then: [u64; 3],
    last: [u64; 3],
}

impl Rates {
    pub(super) fn new(now: Instant) -> Self {
        Self { since: now, then: [0; 3], last: [0; 3] }
    }

    fn count(&mut self, now: Instant, counts: [u64; 3]) {
        let time = now.duration_since(self.since);
        if time < RATE_TIME {
            return;
        }
        for at in 0..3 {
            self.last[at] = ((counts[at] - self.then[at]) as f64 / time.as_secs_f64()) as u64;
        }
        (self.since, self.then) = (now, counts);
    }
}

impl FarJob {
    /// To be called a few times a second.
    pub(super) fn count_rates(&mut self, now: Instant) {
        let counters = self.pager.counters();
        self.rates.count(now, [counters.faults, counters.fetched, counters.put]);
        let window = thrashing::Window { faults: counters.faults, fetched: counters.fetched, waited: self.waits.total };
        if let Some(waited) = self.thrashing.look(now, window) {
            tracing::warn!(
                waited_seconds_of_last_10 = format!("{:.1}", waited.as_secs_f64()),
                limit_bytes = self.limit_bytes,
                far_bytes = self.pager.far_pages() * PAGE_BYTES,
                "the programs wait for far pages most of the time: their pages in use do not fit in the limit; raise --limit, or start them \
                 with less work or fewer threads (byway ctl far shows where they wait)"
            );
        }
    }

    /// See [`FarStatus`].
    pub(super) fn status(&mut self) -> FarStatus {
        let used: Vec<u64> = self.pager.used_places().map(u64::from).collect();
        let pool = self.store.pool();
        let row = u64::from(pool.class().row());
        let bytes_of = |pages: u64| pages * PAGE_BYTES as u64;
        let lenders = pool.lenders().map(|(name, lender)| LenderShare {
            name: name.to_owned(),
            connected: lender.is_up,
            slabs: lender.leased as u64,
            bytes: bytes_of(lender.slabs.iter().filter_map(|slab| used.get(*slab as usize)).sum::<u64>() / row),
        });
        let lenders = lenders.collect();
        let file_bytes = (pool.class() == Class::Disk).then(|| bytes_of(used.iter().sum()));
        let [faults_per_second, fetched_per_second, put_per_second] = self.rates.last;
        FarStatus {
            programs: self.processes.len() as u64,
            limit_bytes: self.limit_bytes as u64,
            resident_bytes: self.resident_bytes as u64,
            local_bytes: bytes_of(self.pager.local_pages() as u64),
            far_bytes: bytes_of(self.pager.far_pages().saturating_sub(self.pager.protected_pages()) as u64),
            file_bytes,
            lenders,
            faults_per_second,
            fetched_per_second,
            put_per_second,
            latencies: self.waits.latencies,
        }
    }

    /// Answers one that asks for the job's state. It is not waited for: the answer fits in the socket.
    pub(super) fn answer_status(&mut self, socket: impl std::os::fd::AsFd) -> std::io::Result<()> {
        let answer = serde_json::to_vec(&self.status())?;
        send(socket, &answer[..answer.len().min(FAR_STATUS_BYTES_MAX)], SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

/// Asks the job whose socket this is for its state.
///
/// # Errors
/// The kernel's; `InvalidData`: the job is of another version of byway.
pub fn ask(path: &std::path::Path) -> std::io::Result<FarStatus> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::net::sockopt::set_socket_timeout(&socket, rustix::net::sockopt::Timeout::Recv, Some(PATIENCE))?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    say(&socket, &[STATUS_REQUEST], None)?;
    let mut answer = vec![0; FAR_STATUS_BYTES_MAX];
    let (bytes, _) = recv(&socket, &mut answer[..], RecvFlags::empty())?;
    Ok(serde_json::from_slice(&answer[..bytes])?)
}
