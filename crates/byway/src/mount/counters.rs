//! What a mount's programs have asked for, by kind of call.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use byway_frontend::fuse::request::Operation;

/// Kinds of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    LookUp,
    Attributes,
    Read,
    Write,
    Open,
    Close,
    List,
    Change,
    Sync,
    Lock,
    Other,
}

/// Names of the kinds, in their order.
const NAMES: [&str; 11] =
    ["look_ups", "attributes", "reads", "writes", "opens", "closes", "listings", "changes", "syncs", "locks", "others"];

/// Calls of a mount since its process began.
#[derive(Debug, Default)]
pub(super) struct Counters {
    calls: [AtomicU64; NAMES.len()],
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

fn kind_of(operation: &Operation<'_>) -> Kind {
    match operation {
        Operation::Lookup { .. } => Kind::LookUp,
        Operation::GetAttr { .. } | Operation::GetXattr { .. } | Operation::ListXattr { .. } => Kind::Attributes,
        Operation::Read { .. } => Kind::Read,
        Operation::Write(_) => Kind::Write,
        Operation::Open { .. } | Operation::OpenDirectory { .. } | Operation::Create { .. } => Kind::Open,
        Operation::Release { .. } | Operation::ReleaseDirectory { .. } | Operation::Flush { .. } => Kind::Close,
        Operation::ReadDirectory { .. } => Kind::List,
        Operation::Fsync { .. } | Operation::FsyncDirectory { .. } => Kind::Sync,
        Operation::GetLock { .. } | Operation::SetLock { .. } => Kind::Lock,
        other if other.changes() => Kind::Change,
        _ => Kind::Other,
    }
}

impl Counters {
    /// A program has called.
    pub(super) fn called(&self, operation: &Operation<'_>) {
        self.calls[kind_of(operation) as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// A read gave so many bytes.
    pub(super) fn has_read(&self, bytes: usize) {
        self.read_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// A write took so many bytes.
    pub(super) fn has_written(&self, bytes: usize) {
        self.written_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Calls by kind.
    pub(super) fn calls(&self) -> BTreeMap<String, u64> {
        let counts = self.calls.iter().map(|count| count.load(Ordering::Relaxed));
        NAMES.iter().map(|name| (*name).to_owned()).zip(counts).collect()
    }

    /// Bytes that were read, and written.
    pub(super) fn bytes(&self) -> (u64, u64) {
        (self.read_bytes.load(Ordering::Relaxed), self.written_bytes.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_call_counts_under_its_name() {
        let counters = Counters::default();
        counters.called(&Operation::Lookup { name: b"a" });
        counters.called(&Operation::StatFs);
        counters.called(&Operation::Unlink { name: b"a" });
        let calls = counters.calls();
        assert_eq!((calls["look_ups"], calls["others"], calls["changes"]), (1, 1, 1));
        assert_eq!(calls.values().sum::<u64>(), 3);
        assert_eq!(NAMES.len(), Kind::Other as usize + 1);
    }
}
