//! Identifiers of the connection manager, each on the channel where its events arrive.
//!
//! An [`Identifier`] belongs to its loop. A connect request at a listener may move to another loop before it is answered: as
//! a [`RawIdentifier`], which has nothing of either loop.

use std::cell::{Cell, RefMut};
use std::ffi::c_void;
use std::net::SocketAddr;
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::Arc;

use byway_reactor::Errno;

use super::address::from_storage;
use super::connection::Channel;
use super::error::RdmaError;
use super::library::Library;
use super::quarantine::Quarantine;
use super::verbs::{self, CmId};
use crate::slots::Slot;

/// The library's channel, destroyed with the last that has an identifier on it.
pub(super) struct RawChannel {
    library: Library,
    raw: NonNull<verbs::EventChannel>,
}

// SAFETY: the library may be called with a channel from any thread, also by several at once; it is destroyed once, when nobody has
// it any more.
unsafe impl Send for RawChannel {}
// SAFETY: as above.
unsafe impl Sync for RawChannel {}

impl RawChannel {
    pub(super) fn open(library: Library) -> Result<Self, RdmaError> {
        // SAFETY: needs nothing but the library.
        let raw = unsafe { (library.connection().rdma_create_event_channel)() };
        let raw = NonNull::new(raw).ok_or_else(|| {
            let error = RdmaError::last("rdma_create_event_channel");
            let is_missing = error.is(Errno::NOENT) || error.is(Errno::NODEV) || error.is(Errno::NXIO);
            let missing = RdmaError::KernelMissing { what: "an RDMA connection manager", module: "rdma_ucm" };
            if is_missing { missing } else { error }
        })?;
        Ok(Self { library, raw })
    }

    pub(super) fn library(&self) -> Library {
        self.library
    }

    pub(super) fn as_ptr(&self) -> *mut verbs::EventChannel {
        self.raw.as_ptr()
    }
}

impl Drop for RawChannel {
    fn drop(&mut self) {
        // SAFETY: every identifier holds an `Arc` of this, so none is left, and events are acknowledged as they are read.
        unsafe { (self.library.connection().rdma_destroy_event_channel)(self.raw.as_ptr()) };
    }
}

/// The library's identifier, destroyed when dropped, and its channel.
pub(super) struct RawIdentifier {
    raw: NonNull<CmId>,
    channel: Arc<RawChannel>,
}

// SAFETY: the library may be called with an identifier from any thread, and this is the only handle of it. What else there may be
// (`Identifier`, a queue pair) is not `Send`.
unsafe impl Send for RawIdentifier {}

impl RawIdentifier {
    /// A new one, whose events carry `context`.
    fn new(channel: &Arc<RawChannel>, context: *mut c_void) -> Result<Self, RdmaError> {
        let mut id = ptr::null_mut();
        let create = channel.library.connection().rdma_create_id;
        // SAFETY: the channel is open, and the place for the result is valid for the call.
        if unsafe { create(channel.as_ptr(), &raw mut id, context, verbs::RDMA_PS_TCP) } != 0 {
            return Err(RdmaError::last("rdma_create_id"));
        }
        let raw = NonNull::new(id).ok_or(RdmaError::State("rdma_create_id"))?;
        Ok(Self { raw, channel: Arc::clone(channel) })
    }

    /// That of a connect request.
    ///
    /// # Safety
    /// It is live, on that channel, and has no other owner.
    pub(super) unsafe fn of_request(raw: NonNull<CmId>, channel: &Arc<RawChannel>) -> Self {
        Self { raw, channel: Arc::clone(channel) }
    }

    /// Has its events arrive at another channel from now on. Waits until all that came before are acknowledged, as they are when
    /// they are read.
    pub(super) fn migrate(mut self, to: &Arc<RawChannel>) -> Result<Self, RdmaError> {
        let migrate = self.channel.library.connection().rdma_migrate_id;
        // SAFETY: the identifier is live, and both channels are open while they are held here.
        if unsafe { migrate(self.raw.as_ptr(), to.as_ptr()) } != 0 {
            return Err(RdmaError::last("rdma_migrate_id"));
        }
        self.channel = Arc::clone(to);
        Ok(self)
    }

    pub(super) fn as_ptr(&self) -> *mut CmId {
        self.raw.as_ptr()
    }

    pub(super) fn pointer(&self) -> NonNull<CmId> {
        self.raw
    }
}

impl Drop for RawIdentifier {
    fn drop(&mut self) {
        // SAFETY: the identifier is live, its queue pair, if any, was dropped before (`Endpoint`'s fields), and its events
        // are acknowledged as they are read, so that this does not wait.
        unsafe { (self.channel.library.connection().rdma_destroy_id)(self.raw.as_ptr()) };
    }
}

/// What an event's identifier is to its owner.
pub(super) struct Known {
    pub(super) token: u64,
    pub(super) is_established: Rc<Cell<bool>>,
}

/// The entry of an identifier at its channel, removed when dropped.
struct Entry {
    slot: Slot<Known>,
    channel: Rc<Channel>,
}

impl Entry {
    fn new(channel: &Rc<Channel>, token: u64, is_established: &Rc<Cell<bool>>) -> Self {
        let known = Known { token, is_established: Rc::clone(is_established) };
        let slot = channel.ids.borrow_mut().insert(known);
        Self { slot, channel: Rc::clone(channel) }
    }

    /// By which the channel finds it when there is an event.
    fn context(&self) -> *mut c_void {
        ptr::without_provenance_mut(self.slot.to_u64() as usize)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.channel.ids.borrow_mut().remove(self.slot);
    }
}

/// An identifier of the connection manager, destroyed when dropped.
pub(super) struct Identifier {
    /// Before the identifier goes, so that no event finds it.
    entry: Entry,
    pub(super) raw: RawIdentifier,
    pub(super) is_established: Rc<Cell<bool>>,
}

impl Identifier {
    pub(super) fn new(channel: &Rc<Channel>, token: u64) -> Result<Self, RdmaError> {
        let is_established = Rc::new(Cell::new(false));
        let entry = Entry::new(channel, token, &is_established);
        let raw = RawIdentifier::new(channel.raw(), entry.context())?;
        Ok(Self { entry, raw, is_established })
    }

    /// Takes over the identifier of a connect request, which is on `channel` by now.
    pub(super) fn adopt(channel: &Rc<Channel>, raw: RawIdentifier) -> Self {
        let is_established = Rc::new(Cell::new(false));
        let entry = Entry::new(channel, u64::MAX, &is_established);
        // SAFETY: the identifier is live and this one's alone; its context is for the owner to set.
        unsafe { (*raw.as_ptr()).context = entry.context() };
        Self { entry, raw, is_established }
    }

    /// Lets go of it, for another channel.
    pub(super) fn into_raw(self) -> RawIdentifier {
        self.raw
    }

    pub(super) fn manager(&self) -> &'static verbs::ConnectionManager {
        self.library().connection()
    }

    pub(super) fn quarantine(&self) -> RefMut<'_, Quarantine> {
        self.entry.channel.quarantine.borrow_mut()
    }

    pub(super) fn library(&self) -> Library {
        self.raw.channel.library()
    }

    pub(super) fn local_address(&self) -> Option<SocketAddr> {
        // SAFETY: the identifier is live.
        from_storage(unsafe { &(*self.raw.as_ptr()).src_storage })
    }

    pub(super) fn set_token(&self, token: u64) {
        if let Some(known) = self.entry.channel.ids.borrow_mut().get_mut(self.entry.slot) {
            known.token = token;
        }
    }

    pub(super) fn peer_address(&self) -> Option<SocketAddr> {
        // SAFETY: the identifier is live.
        from_storage(unsafe { &(*self.raw.as_ptr()).dst_storage })
    }
}
