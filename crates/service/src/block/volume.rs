//! A volume: a store with a name and the promises that its clients see. Shared by all loops.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use byway_reactor::ByteRange;

use super::changes::Changes;
use super::engine::{Effect, Fault, Operation};
use super::error::BlockError;
use super::failures::{Failures, StoreFailure};
use super::rate::Rate;
use super::spec::{FaultEffect, FaultOperation, FaultRules};
use super::store::{Kind, Store};
use super::sync_tracker::SyncTracker;
use byway_fabric::access::{Access, Identity, Right};

/// What a volume promises besides its bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeOptions {
    /// Writes are refused.
    pub read_only: bool,
    /// Refused on a plain wire.
    pub tls_required: bool,
    /// For people.
    pub description: String,
    /// Its contents go with the process.
    pub volatile: bool,
    /// Bytes per second that reads and writes together may move; `None`: no bound.
    pub rate_bytes_per_second: Option<u64>,
    /// Faults put in on purpose.
    pub faults: FaultRules,
    /// Which clients may use it; others are not to learn that it exists.
    pub access: Access,
}

/// A volume that is being served.
#[derive(Debug)]
pub struct Volume {
    name: String,
    options: VolumeOptions,
    store: Store,
    /// By this a volume is the same.
    identity: Arc<Loops>,
    /// The identities of volumes over the same files that this one replaced.
    replaced: Vec<Arc<Loops>>,
    sync_tracker: Arc<SyncTracker>,
    failures: Arc<Failures>,
    changes: Arc<Changes>,
    rate: Option<Arc<Rate>>,
    /// How often each rule of its faults has matched.
    fault_matches: Arc<Vec<AtomicU64>>,
}

/// How many loops serve a volume.
#[derive(Debug, Default)]
struct Loops(AtomicUsize);

impl Loops {
    fn serve(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }
}

/// One of the loops that serve a volume.
#[derive(Debug)]
pub(super) struct ServingLoop(Arc<Loops>);

impl Drop for ServingLoop {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Volume {
    /// Names a store.
    pub fn new(name: impl Into<String>, store: Store, options: VolumeOptions) -> Self {
        let rate = options.rate_bytes_per_second.map(Rate::new).map(Arc::new);
        let fault_matches = matches_of(&options);
        let (identity, sync_tracker, failures, changes) =
            (Arc::default(), SyncTracker::new(), Arc::default(), Arc::default());
        let replaced = Vec::new();
        Self {
            name: name.into(),
            options,
            store,
            identity,
            replaced,
            sync_tracker,
            failures,
            changes,
            rate,
            fault_matches,
        }
    }

    /// The same volume with its store in another size, or with other options: its clients go on.
    #[must_use]
    pub fn succeeded_by(&self, store: Store, options: VolumeOptions) -> Self {
        let rate = if options.rate_bytes_per_second == self.options.rate_bytes_per_second {
            self.rate.clone()
        } else {
            options.rate_bytes_per_second.map(Rate::new).map(Arc::new)
        };
        let fault_matches =
            if options.faults == self.options.faults { Arc::clone(&self.fault_matches) } else { matches_of(&options) };
        Self {
            name: self.name.clone(),
            options,
            store,
            identity: Arc::clone(&self.identity),
            replaced: self.replaced.clone(),
            sync_tracker: Arc::clone(&self.sync_tracker),
            failures: Arc::clone(&self.failures),
            changes: Arc::clone(&self.changes),
            rate,
            fault_matches,
        }
    }

    /// Another volume over the same open files: clients of the old one end, and requests on the new one wait until those
    /// on the old one have ended. A failed flush is not forgotten by it, since the kernel has told of it and will not again.
    #[must_use]
    pub fn replaced_by(&self, store: Store, options: VolumeOptions) -> Self {
        let mut replaced = self.replaced.clone();
        replaced.retain(|volume| volume.serve());
        replaced.push(Arc::clone(&self.identity));
        Self { identity: Arc::default(), replaced, ..self.succeeded_by(store, options) }
    }

    /// As [`Volume::replaced_by`], over files that were opened anew: a failed flush is forgotten.
    #[must_use]
    pub fn reopened_by(&self, store: Store, options: VolumeOptions) -> Self {
        let overlaps = store.overlaps(&self.store);
        let new =
            Self { sync_tracker: SyncTracker::new(), failures: Arc::default(), ..self.replaced_by(store, options) };
        // Requests on other files are none of its business, however long they take.
        if overlaps { new } else { Self { replaced: Vec::new(), ..new } }
    }

    /// Whether requests on a volume that this one replaced are still under way. One of them may be a write, which must not
    /// land after a newer one.
    pub(super) fn waits_for_replaced(&self) -> bool {
        self.replaced.iter().any(|volume| volume.serve())
    }

    /// A loop serves the volume until it drops this: until the last request there has ended.
    pub(super) fn serve(&self) -> ServingLoop {
        self.identity.0.fetch_add(1, Ordering::AcqRel);
        ServingLoop(Arc::clone(&self.identity))
    }

    /// Whether a flush has failed: what clients wrote may be lost, and flushes fail until the volume is opened anew.
    pub fn flush_failed(&self) -> bool {
        self.sync_tracker.flush_failed()
    }

    /// The last operation that the store failed, of all loops.
    pub fn last_failure(&self) -> Option<StoreFailure> {
        self.failures.last()
    }

    /// A request has failed: remembers and logs it if the store did that.
    pub(super) fn note_failure(&self, failure: StoreFailure) {
        // That an earlier flush failed was told when it did.
        if failure.error.is_store_failure() && failure.error != BlockError::FlushFailed {
            self.failures.note(&self.name, failure);
        }
        if self.sync_tracker.flush_failed() {
            self.failures.note_failed_flush(&self.name);
        }
    }

    /// Whether it is the same volume, perhaps in another size.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.identity, &other.identity)
    }

    /// Names the open files, unlike any others that any process has had open. Native clients are told, and write what they
    /// have not flushed again when it changes: into the new files, or into the same ones once they were opened anew, where
    /// it also makes up for a failed flush that the volume before knew of and this one does not.
    pub fn open_epoch(&self) -> u64 {
        self.sync_tracker.open_epoch()
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it promises.
    pub fn options(&self) -> &VolumeOptions {
        &self.options
    }

    /// What its bytes lie in.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.store.len()
    }

    /// No bytes?
    pub fn is_empty(&self) -> bool {
        self.store.is_empty()
    }

    /// What offsets and lengths must be multiples of.
    pub fn block_bytes(&self) -> u32 {
        self.store.block_bytes()
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.options.read_only
    }

    /// What `client` may do with it; `None`: nothing, not even learn that it exists.
    pub fn right(&self, client: &Identity) -> Option<Right> {
        let right = self.options.access.right(client)?;
        Some(if self.is_read_only() { Right::Read } else { right })
    }

    pub(super) fn kind(&self) -> &Kind {
        &self.store.kind
    }

    pub(super) fn rate(&self) -> Option<&Rate> {
        self.rate.as_deref()
    }

    /// Whether faults are put in: no path may pass the rules by then.
    pub(super) fn has_faults(&self) -> bool {
        !self.options.faults.0.is_empty()
    }

    /// What its rules say of one request.
    pub(super) fn fault(&self, operation: Operation, offset: u64, len: u64) -> Option<Fault> {
        let mut fault: Option<Fault> = None;
        for (rule, matches) in self.options.faults.0.iter().zip(self.fault_matches.iter()) {
            let about = match rule.operation {
                FaultOperation::Any => true,
                FaultOperation::Read => operation == Operation::Read,
                FaultOperation::Write => operation == Operation::Write,
                FaultOperation::Flush => operation == Operation::Flush,
                FaultOperation::Trim => operation == Operation::Trim,
                FaultOperation::Zero => operation == Operation::Zero,
                FaultOperation::Extents => operation == Operation::Extents,
            };
            let here = rule
                .range
                .is_none_or(|range| operation == Operation::Flush || range.overlaps(ByteRange::new(offset, len)));
            if !about || !here {
                continue;
            }
            let before = matches.fetch_add(1, Ordering::Relaxed);
            if rule.count_max.is_some_and(|max| before >= max) {
                continue;
            }
            let fault = fault.get_or_insert(Fault { delay: Duration::ZERO, effect: None });
            match rule.effect {
                FaultEffect::Delay(delay) => fault.delay += delay,
                FaultEffect::Error(error) => fault.effect = fault.effect.or(Some(Effect::Error(error))),
                FaultEffect::Short => fault.effect = fault.effect.or(Some(Effect::Short)),
            }
        }
        fault
    }

    /// Which changes are at its store.
    pub(super) fn changes(&self) -> &Changes {
        &self.changes
    }

    /// What is known of its open files.
    pub(super) fn sync_tracker(&self) -> &Arc<SyncTracker> {
        &self.sync_tracker
    }

    /// Whether a sync of it may be told of bytes that were lost: memory loses none, and is not to pay for it.
    pub(super) fn syncs_can_fail(&self) -> bool {
        let files = if let Kind::Files { files, .. } = &self.store.kind { &files[..] } else { &[] };
        self.has_faults() || files.iter().any(|file| !file.is_receivable())
    }
}

fn matches_of(options: &VolumeOptions) -> Arc<Vec<AtomicU64>> {
    Arc::new(options.faults.0.iter().map(|_| AtomicU64::new(0)).collect())
}
