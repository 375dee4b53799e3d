//! The user that opened each file: after a restart of the server the file is opened again for that user, whichever user uses
//! it then.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Caller;

/// A user, as a [`Caller`] that lasts.
#[derive(Clone, Debug, Default)]
pub(super) struct Opener {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) groups: Vec<u32>,
}

impl Opener {
    pub(super) fn caller(&self) -> Caller<'_> {
        Caller { uid: self.uid, gid: self.gid, groups: &self.groups }
    }
}

/// The users of open files, by the handles' numbers.
#[derive(Debug, Default)]
pub(super) struct Openers(Mutex<HashMap<u64, Opener>>);

impl Openers {
    fn map(&self) -> MutexGuard<'_, HashMap<u64, Opener>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn opened(&self, handle: u64, caller: Caller<'_>) {
        let Caller { uid, gid, groups } = caller;
        self.map().insert(handle, Opener { uid, gid, groups: groups.to_vec() });
    }

    /// The file was opened in another process.
    pub(super) fn take_over(&self, handle: u64, opener: Opener) {
        self.map().insert(handle, opener);
    }

    pub(super) fn of(&self, handle: u64) -> Option<Opener> {
        self.map().get(&handle).cloned()
    }

    pub(super) fn closed(&self, handle: u64) {
        self.map().remove(&handle);
    }
}
