//! What the clients of each share asked for, as this loop has answered it.

use std::collections::HashMap;
use std::sync::Arc;

use rustix::io::Errno;

use super::super::share::Share;
use super::super::wire::{CallError, Method};
use super::calls::Asked;
use super::table::Client;

/// Calls that were answered, by kind, and bytes moved. Only grows while the share is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShareCounters {
    /// Reads of files that succeeded.
    pub reads: u64,
    /// Writes to files that succeeded.
    pub writes: u64,
    /// Syncs that succeeded.
    pub syncs: u64,
    /// Other calls that changed something and succeeded: names, attributes, sizes.
    pub changes: u64,
    /// Calls that changed nothing and succeeded: look-ups, opens, listings, attributes, locks.
    pub queries: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Calls that failed with `EIO`, `ENOSPC` or `EDQUOT` of the file system below.
    pub store_errors: u64,
}

impl ShareCounters {
    /// With those of another loop.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            reads: self.reads + other.reads,
            writes: self.writes + other.writes,
            syncs: self.syncs + other.syncs,
            changes: self.changes + other.changes,
            queries: self.queries + other.queries,
            read_bytes: self.read_bytes + other.read_bytes,
            written_bytes: self.written_bytes + other.written_bytes,
            store_errors: self.store_errors + other.store_errors,
        }
    }
}

/// A share on one loop.
#[derive(Clone, Debug)]
pub struct ShareReport {
    /// Which.
    pub share: Arc<Share>,
    /// What was answered there.
    pub counters: ShareCounters,
    /// Clients of this loop that use it.
    pub clients: u64,
}

/// As what a call is counted, and for which share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counted {
    share: usize,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Read,
    Write,
    Sync,
    Change,
    Query,
}

impl Counted {
    /// `None`: the call is of no share, or of a file that the session does not know.
    pub(super) fn of(client: &Client, asked: &Asked<'_>) -> Option<Self> {
        use Method as M;
        let named = asked.arguments.node.get();
        let share = match asked.method {
            M::Attach | M::List | M::Detach | M::Forget | M::Close | M::ReclaimComplete | M::Recalls | M::KeptFiles => {
                return None;
            }
            M::Read | M::Write | M::Sync | M::ReadDirectory | M::Allocate | M::Seek | M::CopyRange | M::Lock => {
                address(&client.handle(named).ok()?.node.share)
            }
            _ => address(&client.node(named).ok()?.share),
        };
        let kind = match asked.method {
            M::Read => Kind::Read,
            M::Write => Kind::Write,
            M::Sync | M::SyncShare => Kind::Sync,
            method if method.changes() => Kind::Change,
            _ => Kind::Query,
        };
        Some(Self { share, kind })
    }
}

/// The counters of a loop's shares.
#[derive(Debug, Default)]
pub(super) struct Counters(HashMap<usize, ShareCounters>);

impl Counters {
    /// Counts for `new` shares from now on. One that takes the place of another of its name goes on where that was.
    pub(super) fn replace(&mut self, old: &[Arc<Share>], new: &[Arc<Share>]) {
        let before = |share: &Arc<Share>| {
            let of_name = old.iter().find(|other| other.name() == share.name())?;
            self.0.get(&address(of_name)).copied()
        };
        self.0 = new.iter().map(|share| (address(share), before(share).unwrap_or_default())).collect();
    }

    /// A call was answered.
    pub(super) fn answered(&mut self, counted: Option<Counted>, error: Option<CallError>) {
        let Some(Counted { share, kind }) = counted else { return };
        let Some(counters) = self.0.get_mut(&share) else { return };
        let count = match (error, kind) {
            (Some(CallError::Errno(Errno::IO | Errno::NOSPC | Errno::DQUOT)), _) => &mut counters.store_errors,
            (Some(_), _) => return,
            (None, Kind::Read) => &mut counters.reads,
            (None, Kind::Write) => &mut counters.writes,
            (None, Kind::Sync) => &mut counters.syncs,
            (None, Kind::Change) => &mut counters.changes,
            (None, Kind::Query) => &mut counters.queries,
        };
        *count += 1;
    }

    /// Bytes were read or written by a call.
    pub(super) fn moved(&mut self, counted: Option<Counted>, len: usize) {
        let Some(Counted { share, kind }) = counted else { return };
        let Some(counters) = self.0.get_mut(&share) else { return };
        match kind {
            Kind::Read => counters.read_bytes += len as u64,
            Kind::Write => counters.written_bytes += len as u64,
            _ => {}
        }
    }

    pub(super) fn of(&self, share: &Arc<Share>) -> ShareCounters {
        self.0.get(&address(share)).copied().unwrap_or_default()
    }
}

/// A number that differs between shares that are served.
fn address(share: &Arc<Share>) -> usize {
    Arc::as_ptr(share).addr()
}
