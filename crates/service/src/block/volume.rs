//! A volume: a store with a name and the promises that its clients see. Shared by all loops.

use std::sync::atomic::{AtomicBool, Ordering};

use super::store::{Kind, Store};

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
}

/// A volume that is being served.
#[derive(Debug)]
pub struct Volume {
    name: String,
    options: VolumeOptions,
    store: Store,
    /// A flush failed: what it covered may be lost, and the kernel says so only once.
    flush_failed: AtomicBool,
}

impl Volume {
    /// Names a store.
    pub fn new(name: impl Into<String>, store: Store, options: VolumeOptions) -> Self {
        Self { name: name.into(), options, store, flush_failed: AtomicBool::new(false) }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it promises.
    pub fn options(&self) -> &VolumeOptions {
        &self.options
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

    pub(super) fn kind(&self) -> &Kind {
        &self.store.kind
    }

    pub(super) fn flush_failed(&self) -> bool {
        self.flush_failed.load(Ordering::Acquire)
    }

    pub(super) fn note_failed_flush(&self) {
        self.flush_failed.store(true, Ordering::Release);
    }
}
