//! Actions of a pool, and its messages to its pager.

#[cfg(doc)]
use super::Pool;
use super::rows::{COLUMNS, ROW_PAGES};
use crate::limits::{POOL_COPIES_MAX, POOL_ROWS_MAX};
use crate::memory::pager::{Place, PutEnd};

/// How many copies of a page make it safe to reuse the page's frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// One lender. Pages are lost with it.
    None,
    /// One lender, and a file of the borrower's machine. The file alone makes a page safe: the lender is the faster copy.
    Disk,
    /// Two lenders.
    Mirror,
    /// One lender, and with three others' pages a parity at a fifth: 5/4 of the memory.
    Parity,
}

impl Class {
    /// Lenders that it needs.
    pub const fn lenders(self) -> usize {
        match self {
            Self::None | Self::Disk => 1,
            Self::Mirror => 2,
            Self::Parity => COLUMNS as usize,
        }
    }

    /// Lenders that hold each page.
    pub(super) const fn copies(self) -> usize {
        match self {
            Self::None | Self::Disk | Self::Parity => 1,
            Self::Mirror => 2,
        }
    }

    /// Places, one behind the other, that are best filled together.
    pub const fn row(self) -> u32 {
        match self {
            Self::None | Self::Disk | Self::Mirror => 1,
            Self::Parity => ROW_PAGES,
        }
    }

    /// Frames that a pool has for itself.
    pub const fn frames(self) -> usize {
        match self {
            Self::None | Self::Disk | Self::Mirror => POOL_COPIES_MAX,
            Self::Parity => POOL_ROWS_MAX * ROW_PAGES as usize,
        }
    }
}

/// Names an operation that the driver carries out. It ends once, by [`Pool::ended`] or the function that its action names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub u32);

/// A leased slab. A lender that has restarted may give a number again: the view tells the two slabs apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lease {
    /// Index of the lender, in the order in which [`Pool::new`] got them.
    pub lender: usize,
    /// How many times the lender had been given up when it leased the slab.
    pub view: u32,
    /// As the lender names it in its session.
    pub number: u64,
}

/// What the driver is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Open a session with the lender, then [`Pool::connected`].
    Connect(OpId, usize),
    /// Close the session with the lender. Operations that use it end with [`Failure::Gone`].
    Close(usize),
    /// Tell the lender that its leases are in use, then [`Pool::renewed`].
    Renew(OpId, usize),
    /// Lease a slab, then [`Pool::leased`].
    Lease(OpId, usize),
    /// Give a slab back. The pool hears nothing of it.
    Return(Lease),
    /// Put a frame into a slab, at that page of it.
    Put(OpId, u32, Lease, u32),
    /// Get that page of a slab into a frame.
    Get(OpId, u32, Lease, u32),
    /// Write a frame to the file, at a place.
    Write(OpId, u32, Place),
    /// Read a place of the file into a frame.
    Read(OpId, u32, Place),
    /// Make a frame the exclusive or of these; zeroes if there are none. At once, behind nothing.
    Xor(OpId, u32, [Option<u32>; ROW_PAGES as usize]),
}

/// Why an operation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The lender, or the file, refused this one.
    Refused,
    /// The session with the lender has ended.
    Gone,
}

/// What the pager is to hear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// A put has ended.
    Put(u32, PutEnd),
    /// A get has ended: the frame has the bytes that were put last, or no copy of them is left.
    Got(u32, bool),
    /// There is one more slab, numbered behind the ones before, with so many places.
    Slab(u32),
    /// No slab can be had now.
    NoSlab,
    /// A slab takes no new pages for now (`true`), or takes them again: too few lenders hold it.
    Rests(u32, bool),
    /// No copy of a slab is left: the pages that lie only there are lost.
    Lost(u32),
    /// A copy of a slab or of a page was lost. Pages that lie nowhere any more, and that a frame has still, go elsewhere:
    /// [`Pager::leave_lost`](crate::memory::pager::Pager::leave_lost), with [`Pool::has`].
    CopiesLost,
    /// The get into that frame takes long, and another copy of the page can be had: [`Pager::get_again`](crate::memory::pager::Pager::get_again).
    Slow(u32),
}

/// What the log is to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    /// A lender was given up. So many slabs had a copy there.
    GivenUp {
        /// Its index.
        lender: usize,
        /// Slabs with a copy there.
        slabs: usize,
        /// It was silent for too long; else its session ended.
        silent: bool,
    },
    /// After a lender was given up or has taken slabs back, every slab is at as many lenders as the class says again.
    Whole,
    /// A lender can be used again.
    Back(usize),
    /// A lender takes slabs back, to be moved within its notice.
    TakesBack(usize, usize),
    /// A page that a lender returned has another checksum than the one that was put.
    Corrupt(usize),
    /// A page of the file has another checksum than the one that was written.
    CorruptFile,
}

/// A lender, as [`Pool::lenders`] tells of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LenderState {
    /// It has a session.
    pub is_up: bool,
    /// Slabs that are leased there.
    pub leased: usize,
    /// The pager's slabs of which a copy is there; with parity, a quarter.
    pub slabs: Vec<u32>,
}

/// What a pool has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCounters {
    /// Gets that failed, and were repeated at another copy.
    pub failed_over: u64,
    /// Pages whose checksum was wrong.
    pub corrupt: u64,
    /// Pages copied to a lender because a copy of them was lost or wrong.
    pub copied: u64,
    /// Pages no copy of which was left.
    pub lost: u64,
    /// Lenders given up.
    pub given_up: u64,
    /// Slabs moved because their lender took them back.
    pub moved: u64,
}
