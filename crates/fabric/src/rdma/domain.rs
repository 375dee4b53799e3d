//! The protection domain, and the memory registered in it.
//!
//! A pool is registered once, for local use only: its key never leaves this process. A peer uses a [`Window`], a
//! registration of its exact range, which ends when the window is closed. Keys have 32 bits and may be guessed, so a window
//! exposes no byte that is not meant for the peer.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::rc::Rc;

use byway_reactor::{Errno, Frame, FramePool};

use super::device::{Device, DeviceInner};
use super::error::RdmaError;
use super::memory::Registrable;
use super::quarantine::Ending;
use super::verbs::{self, Mr, Pd};

/// A protection domain: its connections may use its memory, and no other.
#[derive(Clone)]
pub struct Domain(pub(super) Rc<DomainInner>);

pub(super) struct DomainInner {
    pub(super) pd: NonNull<Pd>,
    pub(super) device: Rc<DeviceInner>,
}

impl Domain {
    /// A new one on `device`.
    pub fn new(device: &Device) -> Result<Self, RdmaError> {
        let device = Rc::clone(&device.0);
        // SAFETY: the context is open while `device` lives.
        let pd = unsafe { (device.library.verbs().ibv_alloc_pd)(device.context.as_ptr()) };
        let pd = NonNull::new(pd).ok_or_else(|| RdmaError::last("ibv_alloc_pd"))?;
        Ok(Self(Rc::new(DomainInner { pd, device })))
    }

    /// Registers all frames of a pool, which pins the whole pool in memory.
    ///
    /// # Errors
    /// [`RdmaError::MemoryLimit`] where the user may not lock so much memory.
    pub fn register_pool(&self, pool: &FramePool) -> Result<Rc<PoolRegion>, RdmaError> {
        let (base, len) = pool.region();
        let registration = Registration::new(self, base, len, verbs::IBV_ACCESS_LOCAL_WRITE)?;
        Ok(Rc::new(PoolRegion { registration, base, len, _pool: pool.clone() }))
    }

    /// Registers memory for local use.
    ///
    /// # Errors
    /// As [`Self::register_pool`]; the memory is dropped.
    pub fn register(&self, memory: impl Into<Registrable>) -> Result<Region, RdmaError> {
        let memory = memory.into();
        let registration = Registration::new(self, memory.as_ptr(), memory.len(), verbs::IBV_ACCESS_LOCAL_WRITE)?;
        Ok(Region(Registered { registration, memory: ManuallyDrop::new(memory) }))
    }

    /// Opens memory to the peers of this domain's connections.
    ///
    /// # Errors
    /// As [`Self::register_pool`]; the memory is dropped.
    pub fn open_window(&self, memory: impl Into<Registrable>, rights: Rights) -> Result<Window, RdmaError> {
        let memory = memory.into();
        let range = 0..memory.len();
        self.open(Exposed::Own(memory), range, rights).map_err(|(error, _)| error)
    }

    /// Opens `range` of memory, and no byte around it.
    ///
    /// # Errors
    /// As [`Self::register_pool`]; the memory is dropped. [`RdmaError::Range`] if there is no such range.
    pub fn open_range(
        &self,
        memory: impl Into<Registrable>,
        range: Range<usize>,
        rights: Rights,
    ) -> Result<Window, RdmaError> {
        self.open(Exposed::Own(memory.into()), range, rights).map_err(|(error, _)| error)
    }

    /// Opens `range` of a frame that others keep as well, for peers to read.
    ///
    /// # Errors
    /// As [`Self::open_range`].
    pub fn open_shared(&self, frame: Rc<Frame>, range: Range<usize>) -> Result<Window, RdmaError> {
        self.open(Exposed::Shared(frame), range, Rights::Read).map_err(|(error, _)| error)
    }

    /// Opens `range` of a frame for peers to write.
    ///
    /// # Errors
    /// As [`Self::open_range`], with the frame.
    pub fn open_frame(&self, frame: Frame, range: Range<usize>) -> Result<Window, (RdmaError, Option<Frame>)> {
        self.open(Exposed::Own(Registrable::Frame(frame)), range, Rights::Write).map_err(|(error, memory)| match memory
        {
            Exposed::Own(Registrable::Frame(frame)) => (error, Some(frame)),
            Exposed::Own(Registrable::Buffer(_)) | Exposed::Shared(_) => (error, None),
        })
    }

    /// The memory comes back if it is refused.
    fn open(&self, memory: Exposed, range: Range<usize>, rights: Rights) -> Result<Window, (RdmaError, Exposed)> {
        if range.start >= range.end || range.end > memory.len() {
            return Err((RdmaError::Range, memory));
        }
        let access = match rights {
            Rights::Read => verbs::IBV_ACCESS_REMOTE_READ,
            // The device may only let a peer write where it may write itself.
            Rights::Write => verbs::IBV_ACCESS_REMOTE_WRITE | verbs::IBV_ACCESS_LOCAL_WRITE,
            Rights::Both => {
                verbs::IBV_ACCESS_REMOTE_READ | verbs::IBV_ACCESS_REMOTE_WRITE | verbs::IBV_ACCESS_LOCAL_WRITE
            }
        };
        let base = memory.base().wrapping_add(range.start);
        match Registration::new(self, base, range.len(), access) {
            Ok(registration) => {
                let registered = Registered { registration, memory: ManuallyDrop::new(memory) };
                Ok(Window { registered, range, rights })
            }
            Err(error) => Err((error, memory)),
        }
    }
}

impl std::fmt::Debug for Domain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Domain")
    }
}

impl Drop for DomainInner {
    fn drop(&mut self) {
        // SAFETY: registrations, receive queues and queue pairs hold an `Rc` of this, so none is left.
        unsafe { (self.device.library.verbs().ibv_dealloc_pd)(self.pd.as_ptr()) };
    }
}

/// What a peer may do with a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// RDMA READ.
    Read,
    /// RDMA WRITE.
    Write,
    /// Both.
    Both,
}

/// A registration; ends when dropped.
struct Registration {
    mr: Option<NonNull<Mr>>,
    domain: Rc<DomainInner>,
    lkey: u32,
    rkey: u32,
}

impl Registration {
    fn new(domain: &Domain, base: *mut u8, len: usize, access: i32) -> Result<Self, RdmaError> {
        let domain = Rc::clone(&domain.0);
        // SAFETY: the protection domain is live, and the caller keeps the range mapped until the registration has ended.
        let mr = unsafe { (domain.device.library.verbs().ibv_reg_mr)(domain.pd.as_ptr(), base.cast(), len, access) };
        let Some(mr) = NonNull::new(mr) else {
            let error = RdmaError::last("ibv_reg_mr");
            let is_limit = error.is(Errno::NOMEM) || error.is(Errno::AGAIN);
            return Err(if is_limit { RdmaError::MemoryLimit { bytes: len } } else { error });
        };
        // SAFETY: the library filled the structure before it gave it out.
        let (lkey, rkey) = unsafe { ((*mr.as_ptr()).lkey, (*mr.as_ptr()).rkey) };
        Ok(Self { mr: Some(mr), domain, lkey, rkey })
    }

    /// Ends it. Unless it has ended, the device may go on touching the memory.
    fn end(&mut self) -> Ending {
        let Some(mr) = self.mr.take() else { return Ending::Ended };
        // SAFETY: the registration is live, and taken out above, so that this happens once.
        let status = unsafe { (self.domain.device.library.verbs().ibv_dereg_mr)(mr.as_ptr()) };
        let ending = Ending::of(status, || self.domain.device.is_taken_away());
        if ending == Ending::Refused {
            tracing::error!(status, "a registration does not end; its memory is given up");
        }
        ending
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.end();
    }
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Registration(lkey {:#x})", self.lkey)
    }
}

/// A registered pool. Holds the pool, so that it stays mapped.
#[derive(Debug)]
pub struct PoolRegion {
    registration: Registration,
    base: *mut u8,
    len: usize,
    _pool: FramePool,
}

impl PoolRegion {
    pub(super) fn contains(&self, frame: &Frame) -> bool {
        let offset = (frame.as_ptr() as usize).wrapping_sub(self.base as usize);
        offset < self.len && frame.len() <= self.len - offset
    }

    pub(super) fn lkey(&self) -> u32 {
        self.registration.lkey
    }
}

/// Memory of a window.
#[derive(Debug)]
pub enum Exposed {
    /// Not used elsewhere.
    Own(Registrable),
    /// A frame that others keep as well: peers may read it.
    Shared(Rc<Frame>),
}

impl Exposed {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Own(memory) => memory.bytes(),
            Self::Shared(frame) => frame.bytes(),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Own(memory) => memory.len(),
            Self::Shared(frame) => frame.len(),
        }
    }

    /// For the device, which writes only into what is our own.
    fn base(&self) -> *mut u8 {
        match self {
            Self::Own(memory) => memory.as_ptr(),
            Self::Shared(frame) => frame.as_ptr(),
        }
    }
}

/// Memory and its registration, which ends first. Memory that the device does not let go is never given back; that of a device
/// which the kernel takes away, a while later.
#[derive(Debug)]
struct Registered<M: GiveUp> {
    registration: Registration,
    memory: ManuallyDrop<M>,
}

/// Memory that can be lost to a device.
trait GiveUp: 'static {
    /// Notifies waiting users that it never returns.
    fn note_given_up(&self);
}

impl GiveUp for Registrable {
    fn note_given_up(&self) {
        if let Self::Frame(frame) = self {
            frame.note_given_up();
        }
    }
}

impl GiveUp for Exposed {
    fn note_given_up(&self) {
        match self {
            Self::Own(memory) => memory.note_given_up(),
            Self::Shared(frame) => frame.note_given_up(),
        }
    }
}

impl<M: GiveUp> Drop for Registered<M> {
    fn drop(&mut self) {
        let ending = self.registration.end();
        if ending == Ending::Refused {
            return self.memory.note_given_up();
        }
        // SAFETY: this is the only place that takes the memory out, and nothing uses it afterwards.
        let memory = unsafe { ManuallyDrop::take(&mut self.memory) };
        if ending == Ending::TakenAway {
            self.registration.domain.device.quarantine().keep(memory);
        }
    }
}

/// Memory registered by itself, for the operations of this process.
#[derive(Debug)]
pub struct Region(Registered<Registrable>);

impl Region {
    pub(super) fn note_given_up(&self) {
        self.0.memory.note_given_up();
    }

    pub(super) fn lkey(&self) -> u32 {
        self.0.registration.lkey
    }
}

impl Deref for Region {
    type Target = Registrable;
    fn deref(&self) -> &Registrable {
        &self.0.memory
    }
}

impl DerefMut for Region {
    fn deref_mut(&mut self) -> &mut Registrable {
        &mut self.0.memory
    }
}

/// Memory that a peer may use until the window is closed or dropped.
#[derive(Debug)]
pub struct Window {
    registered: Registered<Exposed>,
    range: Range<usize>,
    rights: Rights,
}

/// What a peer must know of a window, or of a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WindowAddress {
    /// Of its first byte, in the owner's memory.
    pub address: u64,
    /// The key.
    pub rkey: u32,
}

impl WindowAddress {
    /// So many bytes further on.
    #[must_use]
    pub const fn at(self, offset: u64) -> Self {
        Self { address: self.address.wrapping_add(offset), rkey: self.rkey }
    }
}

impl Window {
    /// What to tell the peer.
    pub fn address(&self) -> WindowAddress {
        let address = self.registered.memory.base() as u64 + self.range.start as u64;
        WindowAddress { address, rkey: self.registered.registration.rkey }
    }

    /// Its bytes; none while a peer may write to them.
    ///
    /// # Panics
    /// They are of a frame that is not [private](Frame::is_private).
    pub fn bytes(&self) -> Option<&[u8]> {
        (self.rights == Rights::Read).then(|| &self.registered.memory.bytes()[self.range.clone()])
    }

    /// Whether a peer may write there.
    pub fn is_written(&self) -> bool {
        self.rights != Rights::Read
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Closes it: from now on no peer can touch the memory. An operation that a peer has under way fails at the peer, with
    /// its connection. None if the device does not let go, and the memory is given up, or not yet: then it is dropped later.
    pub fn close(self) -> Option<Exposed> {
        let mut registered = ManuallyDrop::new(self.registered);
        let ending = registered.registration.end();
        // SAFETY: `registered` is never dropped, and this is the only time that each of the two is moved out of it.
        let (registration, memory) =
            unsafe { (std::ptr::read(&raw const registered.registration), ManuallyDrop::take(&mut registered.memory)) };
        match ending {
            Ending::Ended => return Some(memory),
            Ending::TakenAway => registration.domain.device.quarantine().keep(memory),
            Ending::Refused => {
                memory.note_given_up();
                let _ = ManuallyDrop::new(memory);
            }
        }
        None
    }
}
