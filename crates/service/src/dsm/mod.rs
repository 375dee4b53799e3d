//! Shared memory: pages that processes on several machines load from and store to, with the order that one machine gives.
//!
//! A job has 2 to 64 ranks. Its memory is an area of pages; a segment is a range of them with a name. Each page has a home, the
//! first rank that touched it, which knows the copies and serves asks for the page one at a time, by the
//! [coherence machine](crate::coherence). A page is read by many ranks or written by one, and a write begins only when every other
//! copy has been given up, so loads and stores have one order that all ranks see: sequential consistency (Lamport 1979), by the
//! protocol of Li and Hudak's IVY with fixed distributed managers (1989).
//!
//! That is one [`Consistency`]; with the other, several ranks write to copies of a page at a time, and see each other's stores behind
//! locks, barriers and fences.
//!
//! [`Machine`] is one rank's part, pure: faults, messages and the program's calls go in, [`Action`]s come out, to be done in their
//! order, or that of [`Actions`]. Messages of one rank to another arrive in the order in which they were sent. Failures are fail-stop: a rank that has gone
//! ends the job, by name.

mod batches;
mod difference;
mod fetches;
mod home;
mod locks;
mod machine;
mod meetings;
mod outgoing;
mod pinned;
mod release;
mod runs;
mod sequential;
mod watch;
pub mod wire;

pub use self::batches::{Batches, Sendable, messages};
pub use self::difference::Twins;
pub use self::machine::{Counters, Machine};
pub use self::meetings::PlacedSegment;
pub use self::pinned::PinnedPages;
pub use self::runs::Actions;
pub use self::watch::{Due, Watch};
use self::wire::Message;
use crate::coherence::Mode;

/// A process of a job, from 0.
pub type Rank = u8;

/// A page, by its place in the job's area.
pub type Page = u32;

/// Barriers with this number and later ones are the job's own, for its beginning and end: they are not counted among the program's.
pub const JOB_BARRIERS: u32 = u32::MAX - 1;

/// What the program waits for, by a number of the caller's.
pub type Ticket = u64;

/// What a program may rely on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Consistency {
    /// All loads and stores have one order that all ranks see.
    #[default]
    Sequential,
    /// A rank sees another's stores behind a lock, a barrier or a fence. A program in which these order all conflicting accesses (one without
    /// data races) cannot tell it from the other. A load that races sees, in each byte, a value that was stored there and that no later store, by
    /// that order, has replaced.
    Release,
}

impl Consistency {
    /// Its name on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sequential => "sc",
            Self::Release => "rc",
        }
    }

    /// The consistency of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Sequential, Self::Release].into_iter().find(|consistency| consistency.name() == name)
    }
}

/// What a rank does next. Actions are done in their order or that of [`Actions`], each before the next begins. Further inputs may be given to the
/// machine before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a message.
    Send {
        /// To which rank.
        to: Rank,
        /// The message.
        message: Message,
        /// What goes with it: a segment's name.
        payload: Vec<u8>,
    },
    /// Send a message with the page's bytes, which [`Action::Take`] or [`Action::Protect`] has set aside before.
    SendPage {
        /// To which rank; to this one by [`Machine::received`].
        to: Rank,
        /// Which page.
        page: Page,
        /// The message.
        message: Message,
    },
    /// Take the right to write from the program if it has it: it may load, and a store faults. Set the page's bytes aside for the
    /// [`Action::SendPage`] that follows. Over when no store can be under way, nor a device's.
    Protect {
        /// Which page.
        page: Page,
    },
    /// Take the page from the program, and set its bytes aside for the [`Action::SendPage`] that follows. Over when no load or store can be under
    /// way, nor a device's.
    Take {
        /// Which page.
        page: Page,
    },
    /// Take a copy that the program may only load from, and drop its bytes. Over when no load can be under way.
    Unmap {
        /// Which page.
        page: Page,
    },
    /// Let the program load, or load and store, and wake its threads that wait for the page.
    Install {
        /// Which page.
        page: Page,
        /// What the program may do.
        mode: Mode,
        /// What the page holds from now on.
        contents: Contents,
    },
    /// Let the program load and store, and wake its threads that wait for the page. Before it can store, what the page holds is kept as its
    /// twin ([`Twins::keep`]).
    Twin {
        /// Which page.
        page: Page,
        /// What the page holds from now on.
        contents: Contents,
    },
    /// Drop the twin ([`Twins::forget`]): the rank sends no differences of the page any more.
    ForgetTwin {
        /// Which page.
        page: Page,
    },
    /// Take the right to write, or the page, from the program, and send a message with the page's difference from its twin
    /// ([`Twins::difference`]). Over when no store can be under way, nor a device's. [`Machine::flushed`] is called then.
    Flush {
        /// To which rank; to this one by [`Machine::received`].
        to: Rank,
        /// Which page.
        page: Page,
        /// The message.
        message: Message,
        /// Whether the program keeps the page to load from.
        keeps: bool,
    },
    /// What the program waited for has come.
    Done {
        /// Of the call.
        ticket: Ticket,
        /// What came.
        outcome: Outcome,
    },
    /// The job is over: no program shall go on with memory that is not whole.
    End {
        /// Why.
        reason: JobEnd,
    },
}

impl Action {
    /// The page that the action is about. Actions of one page are done in their order, also when some of them must wait.
    pub fn page(&self) -> Option<Page> {
        match self {
            Self::Send { message, .. } => message.page(),
            Self::SendPage { page, .. }
            | Self::Protect { page }
            | Self::Take { page }
            | Self::Unmap { page }
            | Self::Install { page, .. }
            | Self::Twin { page, .. }
            | Self::ForgetTwin { page }
            | Self::Flush { page, .. } => Some(*page),
            Self::Done { .. } | Self::End { .. } => None,
        }
    }
}

/// What an installed page holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Zeroes: it was never touched.
    Zero,
    /// These bytes.
    Received(Vec<u8>),
    /// What it holds already.
    Kept,
}

/// The end of a call of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The program has the lock.
    Locked,
    /// All ranks have reached the barrier.
    Passed,
    /// What this process stored before the fence is seen by every fence behind it.
    Fenced,
    /// The pages have come.
    Fetched,
    /// The segment is there.
    Mapped {
        /// Where it begins.
        first: Page,
        /// How long it is.
        pages: u64,
    },
    /// The segment is not there.
    Refused(SegmentRefused),
}

/// Why a segment was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SegmentRefused {
    /// Another rank has given another size.
    #[error("the segment exists with {pages} pages: give all ranks the same size")]
    OtherSize {
        /// What it has.
        pages: u64,
    },
    /// It does not fit.
    #[error("no room for the segment: only {pages} pages of the area are left")]
    NoRoom {
        /// What is left.
        pages: u64,
    },
    /// There are as many as there may be.
    #[error("the job has as many segments as it may have ({})", crate::limits::DSM_SEGMENTS_MAX)]
    TooMany,
}

/// Why a job is over.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JobEnd {
    /// A rank has gone before the job's end.
    #[error("rank {rank} has gone: the job ends, since pages that only it had are lost")]
    Gone {
        /// Which.
        rank: Rank,
    },
    /// Nothing has come of a rank for too long: its process is stopped, or its machine or the network between is down.
    #[error("rank {rank} has been silent for {seconds} s: the job ends (is it stopped, or cut off?)")]
    Silent {
        /// Which.
        rank: Rank,
        /// How long.
        seconds: u64,
    },
    /// A rank has broken the protocol.
    #[error("rank {rank} broke the protocol: {what}")]
    Misbehaved {
        /// Which.
        rank: Rank,
        /// How.
        what: &'static str,
    },
}

/// Why a call of the program was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Misuse {
    /// It unlocks what it has not locked.
    #[error("this process does not hold lock {lock}")]
    NotLocked {
        /// Which.
        lock: u32,
    },
    /// Two threads of a process wait at one barrier.
    #[error("another thread of this process waits at barrier {barrier}: one thread of each process may")]
    AtBarrier {
        /// Which.
        barrier: u32,
    },
    /// Too much waits.
    #[error("too many calls of this process wait")]
    TooMany,
    /// Too many pages at once.
    #[error("a fetch has at most {} pages", crate::limits::DSM_FETCH_PAGES_MAX)]
    Fetch,
    /// A segment's name or size is wrong.
    #[error("a segment has a name of 1 to {} bytes and at least 1 page", crate::limits::DSM_NAME_BYTES_MAX)]
    Segment,
}
