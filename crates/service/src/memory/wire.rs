//! The messages of lent memory: methods, arguments, results. docs/wire.md draws the byte maps.

use byway_rpc::message::Status;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub use byway_rpc::protocol::{MEMORY as PROTOCOL, MEMORY_VERSIONS as VERSIONS};

/// What a call asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Method {
    /// Lease a slab: [`LeaseResult`], and its window's descriptor as the payload.
    Lease = 1,
    /// Give a slab back: [`Arguments::slab`].
    Return = 2,
    /// How much is lent: [`StatusResult`].
    Status = 3,
    /// Keep the session's leases: [`RenewResult`], and as its payload a [`TakenSlab`] for each slab that is taken back.
    Renew = 4,
}

impl Method {
    /// The method of that number.
    pub const fn from_number(number: u16) -> Option<Self> {
        Some(match number {
            1 => Self::Lease,
            2 => Self::Return,
            3 => Self::Status,
            4 => Self::Renew,
            _ => return None,
        })
    }
}

/// Arguments of every method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Arguments {
    /// The slab, as `Lease` named it.
    pub slab: U64,
    /// Zero.
    pub reserved: [u8; 56],
}

/// Result of `Lease`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct LeaseResult {
    /// Names the slab in this session.
    pub slab: U64,
    /// Bytes of it.
    pub bytes: U64,
    /// The lending process: see [`StatusResult::lender`].
    pub lender: U64,
    /// Zero.
    pub reserved: [u8; 40],
}

/// Result of `Status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct StatusResult {
    /// Bytes that the lender lends at most.
    pub limit_bytes: U64,
    /// Of these, bytes that are lent.
    pub lent_bytes: U64,
    /// Bytes of a slab.
    pub slab_bytes: U32,
    /// Borrowers that have slabs.
    pub borrowers: U32,
    /// The lending process, by a random number that it draws when it starts: its addresses may be many. 0: a lender of an earlier build,
    /// which names none.
    pub lender: U64,
    /// Zero.
    pub reserved: [u8; 32],
}

/// Result of `Renew`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RenewResult {
    /// Slabs that the lender takes back.
    pub taken: U32,
    /// Zero.
    pub reserved: [u8; 60],
}

/// A slab that the lender takes back, in the payload of `Renew`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct TakenSlab {
    /// The slab, as `Lease` named it.
    pub slab: U64,
    /// Until it closes, in milliseconds.
    pub within_ms: U32,
    /// Zero.
    pub reserved: [u8; 4],
}

const _: () = assert!(size_of::<TakenSlab>() == 16);

const _: () = assert!(size_of::<RenewResult>() == 64);
const _: () =
    assert!(size_of::<Arguments>() == 64 && size_of::<LeaseResult>() == 64 && size_of::<StatusResult>() == 64);

/// Why a lender does not do what a borrower asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LendError {
    /// All is lent.
    #[error("all of the lender's memory is lent: start it with a larger --lend, or name another lender")]
    AllLent,
    /// The lender's machine needs its memory itself.
    #[error("the lender's machine is short of memory itself (--lend ...,guard=SIZE): name another lender")]
    Guarded,
    /// The lender could not make the memory, or open it.
    #[error("the lender could not make a slab; its log says why")]
    Failed,
    /// This session has as many slabs as it may have.
    #[error(
        "this borrower has as many slabs as one may have of the lender (1,024, or less by --lend ...,quota=SIZE): name another lender"
    )]
    TooMany,
    /// The lender is about to end.
    #[error("the lender is shut down: name another lender")]
    Ending,
    /// The session has no such slab.
    #[error("the lender has no such slab in this session")]
    UnknownSlab,
    /// The call was not understood.
    #[error("the lender did not understand the request; it speaks another version of the protocol")]
    Malformed,
    /// The server lends no memory.
    #[error("the server lends no memory: start it with --lend SIZE")]
    NotServed,
    /// The server lends memory by other versions of the protocol.
    #[error(
        "the lender speaks other versions of the protocol of lent memory; run the same version of byway on both machines"
    )]
    Version,
}

impl LendError {
    /// The number on the wire.
    pub const fn status(self) -> u16 {
        match self {
            Self::AllLent => 1,
            Self::Guarded => 2,
            Self::Failed => 3,
            Self::TooMany => 4,
            Self::UnknownSlab => 5,
            Self::Ending => 6,
            Self::Malformed => Status::Malformed as u16,
            Self::NotServed => Status::UnknownProtocol as u16,
            Self::Version => Status::Version as u16,
        }
    }

    /// What a number on the wire says, unless it is 0.
    pub fn from_status(status: u16) -> Self {
        match status {
            1 => Self::AllLent,
            2 => Self::Guarded,
            3 => Self::Failed,
            4 => Self::TooMany,
            5 => Self::UnknownSlab,
            6 => Self::Ending,
            other if other == Status::UnknownProtocol as u16 => Self::NotServed,
            other if other == Status::Version as u16 => Self::Version,
            _ => Self::Malformed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_and_results_have_these_bytes() {
        let arguments = Arguments { slab: U64::new(0x0807_0605_0403_0201), reserved: [0; 56] };
        assert_eq!(arguments.as_bytes(), (1..=8).chain([0; 56]).collect::<Vec<u8>>());
        let lease = LeaseResult {
            slab: U64::new(0x0807_0605_0403_0201),
            bytes: U64::new(0x100f_0e0d_0c0b_0a09),
            lender: U64::new(0x1817_1615_1413_1211),
            reserved: [0; 40],
        };
        assert_eq!(lease.as_bytes(), (1..=24).chain([0; 40]).collect::<Vec<u8>>());
        let status = StatusResult {
            limit_bytes: U64::new(0x0807_0605_0403_0201),
            lent_bytes: U64::new(0x100f_0e0d_0c0b_0a09),
            slab_bytes: U32::new(0x1413_1211),
            borrowers: U32::new(0x1817_1615),
            lender: U64::new(0x201f_1e1d_1c1b_1a19),
            reserved: [0; 32],
        };
        assert_eq!(status.as_bytes(), (1..=32).chain([0; 32]).collect::<Vec<u8>>());
    }

    #[test]
    fn a_renewals_result_has_these_bytes() {
        let renewed = RenewResult { taken: U32::new(0x0403_0201), reserved: [0; 60] };
        assert_eq!(renewed.as_bytes(), (1..=4).chain([0; 60]).collect::<Vec<u8>>());
        let slab = U64::new(0x0807_0605_0403_0201);
        let taken = TakenSlab { slab, within_ms: U32::new(0x0c0b_0a09), reserved: [0; 4] };
        assert_eq!(taken.as_bytes(), (1..=12).chain([0; 4]).collect::<Vec<u8>>());
    }

    #[test]
    fn every_error_survives_the_wire() {
        use LendError::{AllLent, Ending, Failed, Guarded, Malformed, NotServed, TooMany, UnknownSlab, Version};
        for error in [AllLent, Ending, Guarded, Failed, TooMany, UnknownSlab, Malformed, NotServed, Version] {
            assert_ne!(error.status(), 0);
            assert_eq!(LendError::from_status(error.status()), error);
        }
        assert_eq!(LendError::from_status(999), Malformed);
        assert!((0..100).all(|number| Method::from_number(number).is_none_or(|method| method as u16 == number)));
    }
}
