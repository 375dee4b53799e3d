//! Memory outside the pool, registered for operations of this process only.
//!
//! A program's own memory is registered when it is first moved, and stays so: see [`registration`](crate::registration),
//! whose cache finds it again as long as its addresses have the same pages. No peer gets the key, so a range may be longer
//! than an operation's part of it; a peer reaches memory by a [`Window`](super::Window) of its own.
//!
//! The first such operation starts the cache, with two threads that read the kernel's events of the address space.

use std::ptr::NonNull;

use byway_reactor::{Errno, Frame};

use super::domain::Domain;
use super::error::RdmaError;
use super::library::Library;
use super::verbs::{self, Mr, Pd};
use crate::registration::{Counters, GetError, Guard, Limits, Mode, PageRange, Refused, Registrar, RegistrationCache};

/// Memory of this process as a domain's operations find it.
#[derive(Debug)]
pub struct LocalMemory {
    // Before the domain in which its registrations are, so that it goes first.
    cache: RegistrationCache<LocalRegistrar>,
    domain: Domain,
}

/// A use of registered memory. It stays registered until this is dropped.
#[derive(Debug)]
pub struct Kept {
    // Before the domain, as above: it may hold the last handle of the cache.
    guard: Guard<LocalRegistrar>,
    _domain: Domain,
}

/// Registers in a protection domain.
#[derive(Debug)]
struct LocalRegistrar {
    library: Library,
    pd: NonNull<Pd>,
}

/// A registration by its key.
#[derive(Debug)]
struct LocalRegion {
    mr: NonNull<Mr>,
    lkey: u32,
}

// SAFETY: the protection domain outlives the registrar, since whoever holds the cache or a guard of it holds the domain too and
// lets go of it last (`LocalMemory`, `Kept`), and the end of the last of them waits for registrations that other threads
// are ending. The two verbs that are called with it may be called by several threads at a time, as all verbs may.
unsafe impl Send for LocalRegistrar {}
// SAFETY: as above.
unsafe impl Sync for LocalRegistrar {}
// SAFETY: a name that is given back to the library once, by whichever thread ends the registration.
unsafe impl Send for LocalRegion {}
// SAFETY: as above; shared, only the key is read.
unsafe impl Sync for LocalRegion {}

impl LocalMemory {
    /// None registered yet; so much stays registered after use.
    pub fn new(domain: &Domain, limits: Limits) -> Self {
        let registrar = LocalRegistrar { library: domain.0.device.library, pd: domain.0.pd };
        Self { cache: RegistrationCache::new(registrar, limits), domain: domain.clone() }
    }

    /// The memory of a frame of no pool, registered.
    ///
    /// # Errors
    /// [`RdmaError::MemoryLimit`] where the user may not lock so much memory; the system's.
    pub fn register(&self, frame: &Frame) -> Result<Kept, RdmaError> {
        let range = PageRange::covering(frame.as_ptr() as usize, frame.len()).ok_or(RdmaError::Range)?;
        // A file that is sealed keeps its pages; whether other memory stays registered the cache finds out.
        let is_stable = frame.is_sealed() == Some(true);
        let registered = if is_stable { self.cache.get_stable(range) } else { self.cache.get(range) };
        let guard = registered.map_err(|error| refused(error, range.bytes()))?;
        Ok(Kept { guard, _domain: self.domain.clone() })
    }

    /// What has come of it.
    pub fn counters(&self) -> Counters {
        self.cache.counters()
    }

    /// Whether anything stays registered, and why not.
    pub fn mode(&self) -> Mode {
        self.cache.mode()
    }
}

impl Kept {
    pub(super) fn lkey(&self) -> u32 {
        self.guard.lkey
    }
}

fn refused(error: GetError, bytes: usize) -> RdmaError {
    match error {
        GetError::ForkedChild => RdmaError::State("memory in a forked child"),
        GetError::Refused(Refused::MemoryLock { bytes, .. }) => RdmaError::MemoryLimit { bytes },
        GetError::Refused(Refused::System(error)) => {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            RdmaError::System { call: "ibv_reg_mr", errno }
        }
        GetError::Refused(Refused::NotMapped) => RdmaError::System { call: "ibv_reg_mr", errno: Errno::FAULT },
        GetError::Refused(Refused::TooLong { .. } | Refused::TooMany { .. }) => RdmaError::MemoryLimit { bytes },
    }
}

impl Registrar for LocalRegistrar {
    type Handle = LocalRegion;

    fn register(&self, range: PageRange) -> Result<LocalRegion, Refused> {
        let base = std::ptr::with_exposed_provenance_mut(range.start());
        // SAFETY: the protection domain is live, see above. The device does to the pages what operations say, whose memory is
        // theirs; the pages stay pinned until the registration has ended, whatever becomes of their addresses.
        let mr = unsafe {
            (self.library.verbs().ibv_reg_mr)(self.pd.as_ptr(), base, range.bytes(), verbs::IBV_ACCESS_LOCAL_WRITE)
        };
        let Some(mr) = NonNull::new(mr) else {
            return Err(Refused::from_errno(std::io::Error::last_os_error(), range));
        };
        // SAFETY: the library filled the structure before it gave it out.
        let lkey = unsafe { (*mr.as_ptr()).lkey };
        Ok(LocalRegion { mr, lkey })
    }

    fn deregister(&self, handle: LocalRegion) {
        // SAFETY: the registration is live, and given back here alone.
        let status = unsafe { (self.library.verbs().ibv_dereg_mr)(handle.mr.as_ptr()) };
        if status != 0 {
            tracing::error!(status, "a registration does not end; its pages stay locked until the process ends");
        }
    }

    /// The kernel's verbs pin pages (`FOLL_PIN | FOLL_LONGTERM`), and since Linux 5.12 a fork copies such pages for the child.
    fn survives_fork(&self) -> bool {
        true
    }
}
