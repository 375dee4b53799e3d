//! Events and actions of a pager.

#[cfg(doc)]
use super::Pager;
use super::Place;

/// The address space of one program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SpaceId(pub u32);

/// A page of one program; pages are numbered from address 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId {
    /// Whose.
    pub space: SpaceId,
    /// Its address / [`PAGE_BYTES`](super::PAGE_BYTES).
    pub page: u64,
}

/// What a page is filled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Zeroes, as many pages.
    Zeroes(u64),
    /// One page, of that frame.
    Frame(u32),
    /// The same, write-protected: the page also stays at its place.
    Protected(u32),
}

/// What the driver is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Move a page out of its program into a frame, then [`Pager::moved`]. `true`: the page is write-protected, and stays so if it
    /// cannot be moved.
    MoveOut(PageId, u32, bool),
    /// Put a frame to a place, then [`Pager::put_ended`].
    Put(u32, Place),
    /// The frame has what was put to the place before: see whether the place still has it, then [`Pager::put_ended`].
    Keep(u32, Place),
    /// Get a place into a frame, then [`Pager::got`].
    Get(u32, Place),
    /// Fill missing pages from there on, wake who waits, then [`Pager::filled`].
    Fill(PageId, Contents),
    /// Lift a page's write protection and wake its threads, then [`Pager::unprotected`].
    Unprotect(PageId),
    /// Make accesses to the page fail, then [`Pager::poisoned`]: its contents are lost.
    Poison(PageId),
    /// Wake the threads that wait for the page: it is present, or unknown.
    Wake(PageId),
    /// Lease another slab, then [`Pager::add_slab`] or [`Pager::no_more_slabs`].
    Lease,
}

/// What a move came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// The frame has the page.
    Out,
    /// The page had zeroes alone; it is not in the program any more.
    Zeroes,
    /// There was no page.
    Missing,
    /// It stays: pinned, shared, or its mapping is being changed.
    Stays,
    /// It stays, in a mapping that is not watched: it is not known any more.
    Unwatched,
}

/// What has not ended for long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overdue {
    /// All goes on.
    Nothing,
    /// Puts, which keep their frames: a lender is slow, or was given up and its session is not closed yet.
    Puts,
    /// Moves: a helper is stopped.
    Moves,
}

/// What has become of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutEnd {
    /// The place has the page: the frame may be reused.
    Kept,
    /// The place does not have it. Its bytes are in the frame alone, and are to go to another place.
    Elsewhere,
    /// No place can take it now: the file cannot be written. Its bytes are in the frame alone.
    Refused,
}

/// What a fill came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FillOutcome {
    /// The first so many pages were filled (all that were asked for), and whoever waits is woken.
    Done(u64),
    /// The first page was there.
    Exists,
    /// A mapping is being changed: to be tried again, by the pager itself tries again.
    Changing,
    /// There is no such mapping any more.
    NoMapping,
}

/// What the pager has done and has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Faults that were told.
    pub faults: u64,
    /// Pages filled with zeroes.
    pub zeroed: u64,
    /// Pages that came back from a frame, without a message.
    pub returned: u64,
    /// Pages got from a place.
    pub fetched: u64,
    /// Of these, pages that no thread waited for.
    pub ahead: u64,
    /// Of these, pages that their program is known to have gone through.
    pub ahead_used: u64,
    /// Pages sent to a place.
    pub put: u64,
    /// Pages that went as zeroes, without a put.
    pub went_zero: u64,
    /// Pages that went unchanged since they came from their place, without a put.
    pub unchanged: u64,
    /// Writes to pages that were write-protected: each costs a fault.
    pub unprotected: u64,
    /// Moves of pages that stayed.
    pub stayed: u64,
    /// Pages lost with a lender.
    pub lost: u64,
}
