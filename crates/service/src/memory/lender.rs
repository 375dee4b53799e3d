//! The lender: memory of this machine, in slabs that borrowers lease.
//!
//! Each loop has a [`Lender`] for its sessions; all share one [`Lending`], which has the limit. A slab is a new anonymous file for
//! each lease and is dropped at its end, so no borrower ever finds another's bytes. A lease ends when it is given back, or with its
//! session.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use byway_fabric::{Descriptor, Slab, Slot};
use byway_rpc::session::{CallRef, Grant, Incomer, Spoken};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::wire::{Arguments, LeaseResult, LendError, Method, PROTOCOL, StatusResult, VERSIONS};
use crate::host::{At, Service};
use crate::limits::{LEASE_CALLS_PER_SESSION, SLAB_BYTES, SLABS_PER_SESSION_MAX};

/// What all loops of a node lend together.
#[derive(Debug)]
pub struct Lending {
    limit_bytes: u64,
    guard: Option<Guard>,
    lent_bytes: AtomicU64,
    borrowers: AtomicU64,
    /// Bytes that were asked for and refused.
    refused: AtomicU64,
}

/// Memory that the machine keeps for itself: no slab is leased that would leave less available.
#[derive(Debug)]
pub struct Guard {
    bytes: u64,
    /// /proc/meminfo, which a confined node cannot open.
    meminfo: File,
}

/// What a node lends, counted now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LendingStatus {
    /// Bytes that are lent at most.
    pub limit_bytes: u64,
    /// Of these, bytes that are leased.
    pub lent_bytes: u64,
    /// Sessions that have slabs.
    pub borrowers: u64,
    /// Leases that were refused for want of memory.
    pub refused: u64,
}

#[derive(Debug)]
struct Lease {
    number: u64,
    descriptor: Descriptor,
    _slab: Slab,
}

/// See the module.
#[derive(Debug)]
pub struct Lender {
    shared: Arc<Lending>,
    leases: HashMap<Slot, Vec<Lease>>,
    numbers: u64,
}

impl Guard {
    /// Leaves so many bytes available.
    ///
    /// # Errors
    /// /proc/meminfo cannot be read.
    pub fn new(bytes: u64) -> std::io::Result<Self> {
        let guard = Self { bytes, meminfo: File::open("/proc/meminfo")? };
        guard.available().ok_or(std::io::ErrorKind::InvalidData)?;
        Ok(guard)
    }

    fn available(&self) -> Option<u64> {
        let mut text = [0; 4096];
        let len = self.meminfo.read_at(&mut text, 0).ok()?;
        available_bytes(std::str::from_utf8(&text[..len]).ok()?)
    }

    /// Whether so many bytes more can be lent.
    fn allows(&self, bytes: u64) -> bool {
        self.available().is_some_and(|available| available >= self.bytes.saturating_add(bytes))
    }
}

/// `MemAvailable` of /proc/meminfo.
fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

impl Lending {
    /// Lends so many bytes, in whole slabs, as far as `guard` lets it.
    pub fn new(limit_bytes: u64, guard: Option<Guard>) -> Self {
        let (lent_bytes, borrowers, refused) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        Self { limit_bytes, guard, lent_bytes, borrowers, refused }
    }

    /// What is lent now.
    pub fn status(&self) -> LendingStatus {
        LendingStatus {
            limit_bytes: self.limit_bytes,
            lent_bytes: self.lent_bytes.load(Ordering::Relaxed),
            borrowers: self.borrowers.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
        }
    }

    fn reserve(&self) -> Result<(), LendError> {
        if self.guard.as_ref().is_some_and(|guard| !guard.allows(SLAB_BYTES as u64)) {
            return Err(LendError::Guarded);
        }
        let more = |lent: u64| Some(lent + SLAB_BYTES as u64).filter(|sum| *sum <= self.limit_bytes);
        self.lent_bytes.try_update(Ordering::Relaxed, Ordering::Relaxed, more).map(drop).map_err(|_| LendError::AllLent)
    }

    fn give_back(&self) {
        self.lent_bytes.fetch_sub(SLAB_BYTES as u64, Ordering::Relaxed);
    }
}

impl Lender {
    /// The lender of a loop.
    pub fn new(shared: Arc<Lending>) -> Self {
        Self { shared, leases: HashMap::new(), numbers: 0 }
    }

    /// What the service speaks.
    pub const fn spoken() -> Spoken {
        let grant = Grant { calls: LEASE_CALLS_PER_SESSION, notices: 0 };
        Spoken { protocol: PROTOCOL, versions: VERSIONS, grant: Some(grant) }
    }

    fn lease(&mut self, at: &mut At<'_>, session: Slot) -> Result<(LeaseResult, Descriptor), LendError> {
        if self.leases.get(&session).is_some_and(|leases| leases.len() >= SLABS_PER_SESSION_MAX) {
            return Err(LendError::TooMany);
        }
        self.shared.reserve()?;
        let made = Self::make(at, session);
        let (slab, descriptor) = made.inspect_err(|_| self.shared.give_back())?;
        self.numbers += 1;
        let leases = self.leases.entry(session).or_default();
        if leases.is_empty() {
            self.shared.borrowers.fetch_add(1, Ordering::Relaxed);
        }
        leases.push(Lease { number: self.numbers, descriptor, _slab: slab });
        let mut result = LeaseResult::new_zeroed();
        result.slab.set(self.numbers);
        result.bytes.set(SLAB_BYTES as u64);
        Ok((result, descriptor))
    }

    fn make(at: &mut At<'_>, session: Slot) -> Result<(Slab, Descriptor), LendError> {
        let failed = |error: &dyn std::fmt::Display| {
            tracing::error!(%error, "cannot make a slab for a borrower");
            LendError::Failed
        };
        let slab = Slab::new(SLAB_BYTES).map_err(|error| failed(&error))?;
        let opened = at.fabric.open_slab(at.reactor, session, &slab, 0);
        let descriptor = opened.map_err(|error| failed(&error))?;
        Ok((slab, descriptor))
    }

    fn take_back(&mut self, at: &mut At<'_>, session: Slot, number: u64) -> Result<(), LendError> {
        let leases = self.leases.get_mut(&session).ok_or(LendError::UnknownSlab)?;
        let place = leases.iter().position(|lease| lease.number == number).ok_or(LendError::UnknownSlab)?;
        let lease = leases.swap_remove(place);
        if leases.is_empty() {
            self.leases.remove(&session);
            self.shared.borrowers.fetch_sub(1, Ordering::Relaxed);
        }
        self.end(at, session, &lease);
        Ok(())
    }

    fn end(&self, at: &mut At<'_>, session: Slot, lease: &Lease) {
        at.fabric.close_slab(at.reactor, session, &lease.descriptor);
        self.shared.give_back();
    }

    fn status(&self) -> StatusResult {
        let status = self.shared.status();
        StatusResult {
            limit_bytes: U64::new(status.limit_bytes),
            lent_bytes: U64::new(status.lent_bytes),
            slab_bytes: U32::new(SLAB_BYTES as u32),
            borrowers: U32::new(u32::try_from(status.borrowers).unwrap_or(u32::MAX)),
            reserved: [0; 40],
        }
    }
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
                self.take_back(at, call.session, arguments.slab.get()).map(|()| (Vec::new(), Vec::new()))
            }
            Some(Method::Status) => Ok((self.status().as_bytes().to_vec(), Vec::new())),
            None => Err(LendError::Malformed),
        };
        match answer {
            Ok((result, payload)) => at.sessions.answer(at.fabric, call, 0, (&result, &payload)),
            Err(error) => {
                if matches!(error, LendError::AllLent | LendError::Guarded | LendError::Failed) {
                    self.shared.refused.fetch_add(1, Ordering::Relaxed);
                }
                at.sessions.answer(at.fabric, call, error.status(), (&[], &[]));
            }
        }
    }

    fn peer_drained(&mut self, at: &mut At<'_>, session: Slot) {
        let Some(leases) = self.leases.remove(&session) else { return };
        self.shared.borrowers.fetch_sub(1, Ordering::Relaxed);
        for lease in leases {
            self.end(at, session, &lease);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_available_is_read_from_meminfo() {
        let text = "MemTotal:       24000000 kB\nMemFree: 1 kB\nMemAvailable:    1000 kB\nBuffers: 3 kB\n";
        assert_eq!(available_bytes(text), Some(1_024_000));
        assert_eq!(available_bytes("MemFree: 1 kB\n"), None);
    }

    #[test]
    fn no_more_is_lent_than_was_said() {
        let lending = Lending::new(2 * SLAB_BYTES as u64 + 1, None);
        assert_eq!(
            [lending.reserve(), lending.reserve(), lending.reserve()],
            [Ok(()), Ok(()), Err(LendError::AllLent)]
        );
        lending.give_back();
        assert_eq!(lending.reserve(), Ok(()));
        assert_eq!(lending.status().lent_bytes, 2 * SLAB_BYTES as u64);
    }

    #[test]
    fn a_guard_keeps_memory_for_the_machine() {
        let all = Lending::new(u64::MAX, Some(Guard::new(u64::MAX / 2).unwrap()));
        assert_eq!(all.reserve(), Err(LendError::Guarded));
        let none = Lending::new(u64::MAX, Some(Guard::new(0).unwrap()));
        assert_eq!(none.reserve(), Ok(()));
    }
}
