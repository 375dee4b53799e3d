//! The lender: memory of this machine, in slabs that borrowers lease.
//!
//! Each loop has a [`Lender`] for its sessions; all share one [`Lending`], which has the limit. A slab is a new anonymous file for
//! each lease and is dropped at its end, so no borrower ever finds another's bytes. A lease ends when it is given back, or with its
//! session.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use byway_fabric::{Descriptor, SessionId, Slab};
use byway_reactor::Instant;
use byway_rpc::session::{CallRef, Grant, Incomer, Spoken};
use ring::rand::{SecureRandom, SystemRandom};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::leases::{Leases, LendingLimits, Share};
use super::pressure::Guard;
use super::wire::{
    Arguments, LeaseResult, LendError, Method, PROTOCOL, RenewResult, StatusResult, TakenSlab, VERSIONS,
};
use crate::host::{At, Service, SmallAnswer};
use crate::limits::{BORROWERS_REPORTED_MAX, GUARD_LOOK, LEASE_CALLS_PER_SESSION, LENDER_DRAIN_TIME, SLAB_BYTES};

/// A borrower: its loop, and its session there.
type BorrowerId = (u32, SessionId);

/// What all loops of a node lend together.
#[derive(Debug)]
pub struct Lending {
    /// Tells borrowers that this process lends, at whichever address they have reached it.
    id: NonZeroU64,
    limit_bytes: u64,
    table: Mutex<Table>,
    /// Leases that were asked for and refused.
    refused: AtomicU64,
    loops: AtomicU32,
}

#[derive(Debug)]
struct Table {
    leases: Leases<BorrowerId>,
    /// Of sessions that have had slabs, until they end.
    names: HashMap<BorrowerId, String>,
    guard: Option<Guard>,
    /// When the guard looks next; `None`: it has not looked.
    looks: Option<Instant>,
    /// Bytes of the leased slabs that each borrower has written to, as its loop has counted them last.
    filled: HashMap<BorrowerId, u64>,
}

/// What a node lends, counted now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LendingStatus {
    /// The lending process, by a random number; `None` of a lender of an earlier build, which names none.
    pub lender: Option<NonZeroU64>,
    /// Bytes that are lent at most.
    pub limit_bytes: u64,
    /// Of these, bytes that are leased.
    pub lent_bytes: u64,
    /// Of these, bytes that take memory: the pages of slabs that were written to.
    pub filled_bytes: u64,
    /// Sessions that have slabs.
    pub borrowers: u64,
    /// Leases that were refused.
    pub refused: u64,
    /// Bytes that were taken back, under pressure or for a borrower below its fair share.
    pub taken_back_bytes: u64,
    /// Bytes of borrowers that did not renew their leases.
    pub expired_bytes: u64,
    /// The borrowers with the most, the largest first; at most [`BORROWERS_REPORTED_MAX`].
    pub largest: Vec<BorrowerStatus>,
}

/// What one borrower has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BorrowerStatus {
    /// Its certificate's name, or its address.
    pub name: String,
    /// Bytes that are leased to it.
    pub lent_bytes: u64,
    /// Of these, bytes that take memory.
    pub filled_bytes: u64,
    /// Bytes that were taken back from it.
    pub taken_back_bytes: u64,
}

#[derive(Debug)]
struct Leased {
    number: u64,
    descriptor: Descriptor,
    slab: Slab,
    /// Bytes that took memory when they were counted last.
    filled: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Lender {
    shared: Arc<Lending>,
    /// Of the loop.
    number: u32,
    leased: HashMap<SessionId, Vec<Leased>>,
    /// When the shared table is looked at next.
    looks: Option<Instant>,
}

impl Lending {
    /// Lends so many bytes, in whole slabs, as far as `guard` lets it; to one borrower at most `quota_bytes`.
    pub fn new(limit_bytes: u64, quota_bytes: Option<u64>, guard: Option<Guard>) -> Self {
        let slab_bytes = SLAB_BYTES as u64;
        let quota = quota_bytes.map_or(u64::MAX, |bytes| bytes / slab_bytes);
        let leases = Leases::new(LendingLimits { slabs: limit_bytes / slab_bytes, quota, slab_bytes });
        let table = Mutex::new(Table { leases, names: HashMap::new(), guard, looks: None, filled: HashMap::new() });
        Self { id: random(), limit_bytes, table, refused: AtomicU64::new(0), loops: AtomicU32::new(0) }
    }

    /// What is lent now.
    pub fn status(&self) -> LendingStatus {
        let table = self.table();
        let (taken_back, expired) = table.leases.ended_early();
        let bytes = |slabs: u64| slabs * SLAB_BYTES as u64;
        let share = |share: Share<BorrowerId>| BorrowerStatus {
            name: table.names.get(&share.id).cloned().unwrap_or_default(),
            lent_bytes: bytes(share.slabs),
            filled_bytes: table.filled.get(&share.id).copied().unwrap_or(0),
            taken_back_bytes: bytes(share.taken_back),
        };
        let mut largest: Vec<_> = table.leases.shares().map(share).collect();
        let borrowers = largest.len() as u64;
        largest.sort_by_key(|borrower| std::cmp::Reverse(borrower.lent_bytes));
        largest.truncate(BORROWERS_REPORTED_MAX);
        LendingStatus {
            lender: Some(self.id),
            limit_bytes: self.limit_bytes,
            lent_bytes: bytes(table.leases.lent()),
            filled_bytes: table.filled.values().sum(),
            borrowers,
            refused: self.refused.load(Ordering::Relaxed),
            taken_back_bytes: bytes(taken_back),
            expired_bytes: bytes(expired),
            largest,
        }
    }

    /// The node is to end: leases no more, and takes all slabs back. [`LendingStatus::lent_bytes`] is 0 once borrowers have returned them,
    /// or their loops have closed those that are not back after [`LENDER_DRAIN_TIME`]. The loops go on until then.
    pub fn end(&self, now: Instant) {
        let mut table = self.table();
        let slabs = table.leases.lent();
        if table.leases.end(now + LENDER_DRAIN_TIME) && slabs > 0 {
            let seconds = LENDER_DRAIN_TIME.as_secs();
            tracing::info!(
                slabs,
                seconds,
                "shutting down: borrowers have so long to move their pages to other lenders; all else is served meanwhile"
            );
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // No code under this lock leaves the table half changed by a panic.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn lease(&mut self, id: BorrowerId, now: Instant) -> Result<u64, LendError> {
        // Slabs take memory as they are filled, and are as good as filled once they are leased.
        let leased = (self.leases.lent() + 1) * SLAB_BYTES as u64;
        let needed = leased.saturating_sub(self.filled.values().sum());
        if self.guard.as_mut().is_some_and(|guard| !guard.allows(needed)) {
            return Err(LendError::Guarded);
        }
        self.leases.lease(id, now)
    }

    /// Takes slabs back if the machine is short of memory.
    fn look(&mut self, now: Instant) {
        if self.looks.is_some_and(|at| now < at) || self.leases.lent() == 0 {
            return;
        }
        let Some(guard) = &mut self.guard else { return };
        self.looks = Some(now + GUARD_LOOK);
        let short = guard.shortage();
        if short > 0 && self.leases.take_back(short) {
            tracing::warn!(short, "this machine is short of memory: the lender takes slabs back");
        }
    }
}

impl Lender {
    /// The lender of a loop.
    pub fn new(shared: Arc<Lending>) -> Self {
        let number = shared.loops.fetch_add(1, Ordering::Relaxed);
        Self { shared, number, leased: HashMap::new(), looks: None }
    }

    /// What the service speaks.
    pub const fn spoken() -> Spoken {
        let grant = Grant { calls: LEASE_CALLS_PER_SESSION, notices: 0 };
        Spoken { protocol: PROTOCOL, versions: VERSIONS, grant: Some(grant) }
    }

    /// When the loop is to be turned at the latest: leases end, and the guard looks. `None` while this loop has lent nothing.
    pub fn next_look(&self) -> Option<Instant> {
        self.looks.filter(|_| !self.leased.is_empty())
    }

    fn lease(&mut self, at: &mut At<'_>, session: SessionId) -> Result<(LeaseResult, Descriptor), LendError> {
        let (id, now) = ((self.number, session), at.reactor.now());
        let client = at.sessions.get(session).map(|session| session.client.to_string());
        let mut table = self.shared.table();
        let number = table.lease(id, now)?;
        table.names.entry(id).or_insert_with(|| client.unwrap_or_default());
        drop(table);
        let made = Self::make(at, session);
        let (slab, descriptor) = made.inspect_err(|_| {
            let _ = self.shared.table().leases.give_back(id, number);
        })?;
        self.leased.entry(session).or_default().push(Leased { number, descriptor, slab, filled: 0 });
        self.looks.get_or_insert(now + GUARD_LOOK);
        let mut result = LeaseResult::new_zeroed();
        result.slab.set(number);
        result.bytes.set(SLAB_BYTES as u64);
        result.lender.set(self.shared.id.get());
        Ok((result, descriptor))
    }

    fn make(at: &mut At<'_>, session: SessionId) -> Result<(Slab, Descriptor), LendError> {
        let failed = |error: &dyn std::fmt::Display| {
            tracing::error!(%error, "cannot make a slab for a borrower");
            LendError::Failed
        };
        let slab = Slab::new(SLAB_BYTES).map_err(|error| failed(&error))?;
        let opened = at.fabric.open_slab(at.reactor, session, &slab, 0);
        let descriptor = opened.map_err(|error| failed(&error))?;
        Ok((slab, descriptor))
    }

    fn give_back(&mut self, at: &mut At<'_>, session: SessionId, number: u64) -> Result<(), LendError> {
        self.shared.table().leases.give_back((self.number, session), number)?;
        self.close(at, session, number);
        Ok(())
    }

    /// Counts how much memory the slabs of this loop take.
    fn count_filled(&mut self) {
        for leased in self.leased.values_mut().flatten() {
            leased.filled = leased.slab.filled_bytes();
        }
        self.note_filled();
    }

    /// Tells the other loops what was counted.
    fn note_filled(&self) {
        let of = |slabs: &Vec<Leased>| slabs.iter().map(|leased| leased.filled).sum();
        let filled = self.leased.iter().map(|(session, slabs)| ((self.number, *session), of(slabs)));
        let mut table = self.shared.table();
        table.filled.retain(|(number, _), _| *number != self.number);
        table.filled.extend(filled);
    }

    /// Closes the windows of a slab whose lease has ended, and drops it.
    fn close(&mut self, at: &mut At<'_>, session: SessionId, number: u64) {
        let Some(leased) = self.leased.get_mut(&session) else { return };
        let ended = leased.extract_if(.., |leased| leased.number == number);
        for one in ended {
            at.fabric.close_slab(at.reactor, session, &one.descriptor);
        }
        if leased.is_empty() {
            self.leased.remove(&session);
        }
        self.note_filled();
    }

    fn renew(&self, at: &At<'_>, session: SessionId) -> (RenewResult, Vec<u8>) {
        let taken = self.shared.table().leases.renew((self.number, session), at.reactor.now());
        let mut result = RenewResult::new_zeroed();
        result.taken.set(taken.len() as u32);
        let entry = |(slab, within): (u64, Duration)| {
            let within_ms = U32::new(within.as_millis() as u32);
            TakenSlab { slab: U64::new(slab), within_ms, reserved: [0; 4] }
        };
        let entries: Vec<TakenSlab> = taken.into_iter().map(entry).collect();
        (result, entries.as_bytes().to_vec())
    }

    fn status(&self) -> StatusResult {
        let status = self.shared.status();
        StatusResult {
            limit_bytes: U64::new(status.limit_bytes),
            lent_bytes: U64::new(status.lent_bytes),
            slab_bytes: U32::new(SLAB_BYTES as u32),
            borrowers: U32::new(u32::try_from(status.borrowers).unwrap_or(u32::MAX)),
            lender: U64::new(self.shared.id.get()),
            reserved: [0; 32],
        }
    }
}

/// A number that no other lender has drawn.
fn random() -> NonZeroU64 {
    let mut bytes = [0; 8];
    SystemRandom::new().fill(&mut bytes).expect("the kernel has random numbers once it is up");
    NonZeroU64::MIN | u64::from_ne_bytes(bytes)
}

impl Service for Lender {
    fn protocol(&self) -> u8 {
        PROTOCOL
    }

    fn called(&mut self, at: &mut At<'_>, call: CallRef, asked: &Incomer<'_>) {
        let arguments =
            Arguments::read_from_bytes(asked.arguments.padded()).unwrap_or_else(|_| Arguments::new_zeroed());
        // A lease is its session's: nobody else's session can ask on its behalf.
        let answer = match Method::from_number(asked.method).filter(|_| !asked.delegated) {
            Some(Method::Lease) => self
                .lease(at, call.session)
                .map(|(result, descriptor)| (result.as_bytes().to_vec(), descriptor.to_bytes().to_vec())),
            Some(Method::Return) => {
                self.give_back(at, call.session, arguments.slab.get()).map(|()| (Vec::new(), Vec::new()))
            }
            Some(Method::Status) => Ok((self.status().as_bytes().to_vec(), Vec::new())),
            Some(Method::Renew) => {
                let (result, taken) = self.renew(at, call.session);
                Ok((result.as_bytes().to_vec(), taken))
            }
            None => Err(LendError::Malformed),
        };
        match answer {
            Ok((result, payload)) => at.sessions.answer(at.fabric, call, SmallAnswer::done(&result, &payload)),
            Err(error) => {
                if !matches!(error, LendError::UnknownSlab | LendError::Malformed) {
                    self.shared.refused.fetch_add(1, Ordering::Relaxed);
                }
                at.sessions.answer(at.fabric, call, SmallAnswer::failed(error.status()));
            }
        }
    }

    fn peer_drained(&mut self, at: &mut At<'_>, session: SessionId) {
        let mut table = self.shared.table();
        table.leases.gone((self.number, session));
        table.names.remove(&(self.number, session));
        drop(table);
        for one in self.leased.remove(&session).unwrap_or_default() {
            at.fabric.close_slab(at.reactor, session, &one.descriptor);
        }
        self.note_filled();
    }

    fn turn(&mut self, at: &mut At<'_>) {
        let now = at.reactor.now();
        if self.next_look().is_none_or(|looks| now < looks) {
            return;
        }
        self.looks = Some(now + GUARD_LOOK);
        self.count_filled();
        let mut table = self.shared.table();
        table.look(now);
        let ended = table.leases.expire(now, |(number, _)| *number == self.number);
        drop(table);
        for ((_, session), number) in ended {
            tracing::warn!(slab = number, "a borrower's lease has ended: it was not renewed, or was taken back");
            self.close(at, session, number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::pressure::Reading;
    use super::*;

    const LOOP: BorrowerId = (0, SessionId::new(1, 1));

    #[test]
    fn no_more_is_lent_than_was_said() {
        let lending = Lending::new(2 * SLAB_BYTES as u64 + 1, None, None);
        let mut table = lending.table();
        let now = Instant::from_nanos(1);
        assert_eq!([(); 3].map(|()| table.lease(LOOP, now).err()), [None, None, Some(LendError::AllLent)]);
        drop(table);
        assert_eq!(lending.status().lent_bytes, 2 * SLAB_BYTES as u64);
    }

    #[test]
    fn a_guard_keeps_memory_for_the_machine() {
        let now = Instant::from_nanos(1);
        let all = Lending::new(u64::MAX, None, Some(Guard::new(u64::MAX / 2).unwrap()));
        assert_eq!(all.table().lease(LOOP, now), Err(LendError::Guarded));
        let none = Lending::new(u64::MAX, None, Some(Guard::new(0).unwrap()));
        assert_eq!(none.table().lease(LOOP, now), Ok(1));
    }

    #[test]
    fn a_slab_that_is_leased_and_not_filled_counts_against_what_is_available() {
        let (now, slab) = (Instant::from_nanos(1), SLAB_BYTES as u64);
        let reading = Reading { available_bytes: 5 * slab, stalled_percent: 0.0 };
        let guard = Guard::with_readings(3 * slab, move || Some(reading));
        let lending = Lending::new(u64::MAX, None, Some(guard));
        let mut table = lending.table();
        assert_eq!((table.lease(LOOP, now), table.lease(LOOP, now)), (Ok(1), Ok(2)));
        assert_eq!(table.lease(LOOP, now), Err(LendError::Guarded), "two are to be filled yet");
        table.filled.insert(LOOP, slab);
        assert_eq!(table.lease(LOOP, now), Ok(3), "the memory of one is not among what is available any more");
    }
}
