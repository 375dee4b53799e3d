//! What a mount's programs have asked for, by kind of call, and how that went.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use byway_frontend::fuse::Answered;
use byway_frontend::fuse::request::Operation;
use byway_frontend::latencies::SharedLatencies;
use byway_reactor::Errno;

use super::status::CallTimes;

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

/// Errors that say something of the server or of limits. Others are answers that programs expect, such as `ENOENT`.
const ERRORS: [(Errno, &str); 7] = [
    (Errno::IO, "EIO"),
    (Errno::NOSPC, "ENOSPC"),
    (Errno::DQUOT, "EDQUOT"),
    (Errno::STALE, "ESTALE"),
    (Errno::NFILE, "ENFILE"),
    (Errno::MFILE, "EMFILE"),
    (Errno::NOLCK, "ENOLCK"),
];

/// Calls of a mount since its process began.
#[derive(Debug, Default)]
pub(super) struct Counters {
    calls: [AtomicU64; NAMES.len()],
    times: [SharedLatencies; NAMES.len()],
    errors: [AtomicU64; ERRORS.len()],
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

/// The number of an operation's kind, for [`Counters::answered`].
pub(super) fn number_of_kind(operation: &Operation<'_>) -> u8 {
    kind_of(operation) as u8
}

fn named<T>(values: impl Iterator<Item = T>) -> BTreeMap<String, T> {
    NAMES.iter().map(|name| (*name).to_owned()).zip(values).collect()
}

impl Counters {
    /// A program has called.
    pub(super) fn called(&self, operation: &Operation<'_>) {
        self.calls[kind_of(operation) as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// A program's call was answered.
    pub(super) fn answered(&self, Answered { kind, time, error }: Answered) {
        if let Some(times) = self.times.get(usize::from(kind)) {
            times.note(time);
        }
        let counted = ERRORS.iter().position(|(errno, _)| Some(*errno) == error);
        if let Some(at) = counted {
            self.errors[at].fetch_add(1, Ordering::Relaxed);
        }
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
        named(self.calls.iter().map(|count| count.load(Ordering::Relaxed)))
    }

    /// How long answered calls took, by kind.
    pub(super) fn times(&self) -> BTreeMap<String, CallTimes> {
        named(self.times.iter().map(|times| CallTimes {
            latencies: times.now(),
            total_us: u64::try_from(times.total().as_micros()).unwrap_or(u64::MAX),
        }))
    }

    /// Calls that failed, by their errors.
    pub(super) fn errors(&self) -> BTreeMap<String, u64> {
        let counts = self.errors.iter().map(|count| count.load(Ordering::Relaxed));
        ERRORS.iter().map(|(_, name)| (*name).to_owned()).zip(counts).collect()
    }

    /// Bytes that were read, and written.
    pub(super) fn bytes(&self) -> (u64, u64) {
        (self.read_bytes.load(Ordering::Relaxed), self.written_bytes.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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

    #[test]
    fn each_answer_counts_by_its_time_and_its_error() {
        let counters = Counters::default();
        let kind = number_of_kind(&Operation::Unlink { name: b"a" });
        for (us, error) in [(10, None), (10, Some(Errno::NOENT)), (3000, Some(Errno::NOSPC))] {
            counters.answered(Answered { kind, time: Duration::from_micros(us), error });
        }
        let CallTimes { latencies, total_us } = counters.times()["changes"];
        assert_eq!((latencies.buckets().collect::<Vec<_>>(), total_us), (vec![(16, 2), (4096, 1)], 3020));
        assert_eq!(counters.times().values().map(|times| times.latencies.count()).sum::<u64>(), 3);
        let errors = counters.errors();
        assert_eq!(
            (errors["ENOSPC"], errors.values().sum::<u64>()),
            (1, 1),
            "programs ask for names that are not there"
        );
    }
}
