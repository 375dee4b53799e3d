//! The interface for users of registered memory: the cache, and a guard for each use.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::cache::{Counters, Limits, Plan, Ticket, Uncached};
use super::monitor::{Found, Seat};
use super::range::PageRange;
use super::registrar::{Refused, Registrar};
use super::sightings::Sightings;
use super::{Unavailable, fork};

/// Keeps ranges registered after their use. A clone is another handle on the same cache.
///
/// Dropping the last handle and guard deregisters everything.
#[derive(Debug)]
pub struct RegistrationCache<R: Registrar> {
    shared: Arc<Shared<R>>,
}

impl<R: Registrar> Clone for RegistrationCache<R> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

#[derive(Debug)]
struct Shared<R: Registrar> {
    registrar: Arc<R>,
    seat: Result<Seat, Unavailable>,
    sightings: Sightings,
    /// Without a seat, registrations and refusals are counted here.
    registered: AtomicU64,
    refused: AtomicU64,
}

/// How a cache works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Ranges stay registered after use.
    Cached,
    /// Each use registers, and deregisters at its end.
    EachTime(Unavailable),
}

/// Why a range was not registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GetError {
    /// This process is a forked child of one that had a cache.
    #[error(
        "this process was forked from one that registers memory, and can register none: let it exec, or fork before the first cache"
    )]
    ForkedChild,
    /// The registrar refused.
    #[error(transparent)]
    Refused(#[from] Refused),
}

impl<R: Registrar> RegistrationCache<R> {
    /// A cache of what `registrar` registers. Where the process cannot be told of changes of its address space it works
    /// without keeping anything: see [`mode`](Self::mode).
    pub fn new(registrar: R, limits: Limits) -> Self {
        let seat = Seat::take(limits, registrar.survives_fork());
        if let Err(reason) = seat {
            tracing::warn!(%reason, "memory is registered for each use");
        }
        let registrar = Arc::new(registrar);
        let (registered, refused) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { shared: Arc::new(Shared { registrar, seat, sightings: Sightings::default(), registered, refused }) }
    }

    /// The registration of a range with all of `range` in it, to be used until the guard is dropped. Kept afterwards if it is
    /// private anonymous memory: another program can truncate a file, and no event would report it.
    pub fn get(&self, range: PageRange) -> Result<Guard<R>, GetError> {
        self.acquire(range, false)
    }

    /// As [`get`](Self::get), also kept if it is a file's or shared memory. **The caller vouches** that the file is
    /// neither truncated nor punched within the range (`fallocate`, `MADV_REMOVE` in another process) before
    /// [`flush`](Self::flush): a memfd of its own, sealed against shrinking.
    pub fn get_stable(&self, range: PageRange) -> Result<Guard<R>, GetError> {
        self.acquire(range, true)
    }

    /// Deregisters what is not in use, and the rest at the end of its use. For changes that no event tells of.
    pub fn flush(&self) {
        if let Some(seat) = self.shared.seat() {
            seat.with(super::cache::Cache::flush);
            seat.close_condemned();
        }
    }

    /// What it has done, and what it has.
    pub fn counters(&self) -> Counters {
        if let Some(seat) = self.shared.seat() {
            return seat.with(|cache| cache.counters());
        }
        let registered = self.shared.registered.load(Ordering::Relaxed);
        let refused = self.shared.refused.load(Ordering::Relaxed);
        Counters { misses: registered + refused, uncached: registered, refused, ..Counters::default() }
    }

    /// Whether it keeps anything, and why not.
    pub fn mode(&self) -> Mode {
        if fork::is_child() {
            return Mode::EachTime(Unavailable::ForkedChild);
        }
        self.shared.seat.as_ref().map_or_else(|reason| Mode::EachTime(*reason), |_| Mode::Cached)
    }

    /// The registrar.
    pub fn registrar(&self) -> &R {
        &self.shared.registrar
    }

    fn acquire(&self, wanted: PageRange, is_stable: bool) -> Result<Guard<R>, GetError> {
        if fork::is_child() {
            return Err(GetError::ForkedChild);
        }
        let Ok(seat) = &self.shared.seat else { return self.register_once(wanted) };
        let mut found = seat.look_up(wanted, is_stable);
        if let Found::Miss(Plan::Once(Uncached::Suspect(needed))) = found
            && seat.lift_suspicions(|latest| self.shared.sightings.are_complete(needed, latest).then_some(needed))
        {
            found = seat.look_up(wanted, is_stable);
        }
        match found {
            Found::Hit(ticket, registered) => match registered.downcast() {
                Ok(registration) => Ok(self.guard(registration, Some(ticket))),
                Err(_) => unreachable!("a seat's cache has registrations of one kind"),
            },
            Found::Miss(plan) => self.register_by(seat, plan, wanted, is_stable),
        }
    }

    fn register_by(&self, seat: &Seat, plan: Plan, wanted: PageRange, is_stable: bool) -> Result<Guard<R>, GetError> {
        // What had to make room goes first: it may be what the limit on locked memory lacks.
        seat.close_condemned();
        let Plan::Register { ticket, range } = plan else { return self.register_once(wanted) };
        if let Some(guard) = self.register_and_keep(seat, ticket, range, is_stable) {
            return Ok(guard);
        }
        // A neighbour that it was merged with may be why: it is a file's, or no longer writable.
        if range != wanted
            && let Plan::Register { ticket, range } = seat.begin_alone(wanted)
            && let Some(guard) = self.register_and_keep(seat, ticket, range, is_stable)
        {
            return Ok(guard);
        }
        self.register_once(wanted)
    }

    fn register_and_keep(&self, seat: &Seat, ticket: Ticket, range: PageRange, is_stable: bool) -> Option<Guard<R>> {
        // Watched first: what changes from now on spoils the ticket. Then the question what the memory is, whose answer
        // would otherwise be old.
        if !seat.watch(range) {
            // Another userfaultfd has it, whose watch must stay.
            seat.abandon(ticket, false);
            return None;
        }
        let may_stay = if is_stable { seat.is_mapped(range) } else { seat.is_private(range) };
        let registered = if may_stay { self.register(range).ok() } else { None };
        let Some(registration) = registered else {
            seat.abandon(ticket, true);
            return None;
        };
        let kept = seat.complete(ticket, registration.clone());
        // A registration that cannot be kept was made after the caller asked, so it is good for this use.
        Some(self.guard(registration, kept.is_ok().then_some(ticket)))
    }

    /// For one use. Where memory cannot be locked, idle ranges give way.
    fn register_once(&self, range: PageRange) -> Result<Guard<R>, GetError> {
        let refused = match self.register(range) {
            Ok(registration) => return Ok(self.guard_once(registration)),
            Err(refused) => refused,
        };
        if let (Refused::MemoryLock { .. } | Refused::TooMany { .. }, Some(seat)) = (&refused, self.shared.seat())
            && seat.with(|cache| cache.evict(range.bytes()))
        {
            seat.close_condemned();
            return Ok(self.guard_once(self.register(range)?));
        }
        Err(refused.into())
    }

    fn register(&self, range: PageRange) -> Result<Arc<Registration<R>>, Refused> {
        let shared = &self.shared;
        let handle = shared.registrar.register(range).inspect_err(|_| match shared.seat() {
            Some(seat) => seat.with(super::cache::Cache::count_refused),
            None => drop(shared.refused.fetch_add(1, Ordering::Relaxed)),
        })?;
        shared.registered.fetch_add(1, Ordering::Relaxed);
        let handle = ManuallyDrop::new(handle);
        Ok(Arc::new(Registration { registrar: shared.registrar.clone(), handle, range }))
    }

    fn guard_once(&self, registration: Arc<Registration<R>>) -> Guard<R> {
        if let Some(seat) = self.shared.seat() {
            seat.with(super::cache::Cache::count_uncached);
        }
        self.guard(registration, None)
    }

    fn guard(&self, registration: Arc<Registration<R>>, ticket: Option<Ticket>) -> Guard<R> {
        Guard { shared: self.shared.clone(), registration: ManuallyDrop::new(registration), ticket }
    }
}

impl<R: Registrar> Shared<R> {
    fn seat(&self) -> Option<&Seat> {
        self.seat.as_ref().ok().filter(|_| !fork::is_child())
    }
}

/// A registered range; the last reference ends it.
#[derive(Debug)]
struct Registration<R: Registrar> {
    registrar: Arc<R>,
    handle: ManuallyDrop<R::Handle>,
    range: PageRange,
}

impl<R: Registrar> Drop for Registration<R> {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        // SAFETY: this is the only place that takes it, and nothing reads it afterwards.
        let handle = unsafe { ManuallyDrop::take(&mut self.handle) };
        self.registrar.deregister(handle);
    }
}

/// A use of registered memory. It stays registered for as long as this is there, whatever becomes of its mapping.
#[derive(Debug)]
pub struct Guard<R: Registrar> {
    shared: Arc<Shared<R>>,
    registration: ManuallyDrop<Arc<Registration<R>>>,
    /// Of a range that is kept.
    ticket: Option<Ticket>,
}

impl<R: Registrar> Guard<R> {
    /// What is registered: the wanted range, and perhaps more.
    pub fn range(&self) -> PageRange {
        self.registration.range
    }

    /// Whether it was kept, or will be: otherwise it is deregistered when this is dropped.
    pub fn is_kept(&self) -> bool {
        self.ticket.is_some()
    }
}

impl<R: Registrar> Deref for Guard<R> {
    type Target = R::Handle;

    fn deref(&self) -> &R::Handle {
        &self.registration.handle
    }
}

impl<R: Registrar> Drop for Guard<R> {
    fn drop(&mut self) {
        // The reference is dropped before the use ends: condemning the range afterwards takes the last one.
        // SAFETY: this is the only place that takes it, and nothing reads it afterwards.
        drop(unsafe { ManuallyDrop::take(&mut self.registration) });
        if let (Some(ticket), Some(seat)) = (self.ticket, self.shared.seat()) {
            let is_over = seat.with(|cache| {
                cache.release(ticket);
                cache.next_condemned().is_some()
            });
            if is_over {
                seat.close_condemned();
            }
        }
    }
}
