//! The messages of shared memory, protocol "dsm", version 4: 32 bytes each, as the header of a node's message. docs/wire.md has the map.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Consistency, Page, Rank};
use crate::coherence::Mode;
use crate::limits::{DSM_PAGES_MAX, DSM_RANKS_MAX};

/// The version of the protocol; a rank of another one is refused when it joins.
pub const VERSION: u16 = 4;

/// Bytes of a message without its payload.
pub const MESSAGE_BYTES: usize = size_of::<Header>();

/// The bytes of every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Header {
    /// Which message.
    kind: u8,
    /// 1 read, 2 write; of `Hello` 1 sequential, 2 release consistency; else 0.
    mode: u8,
    /// A rank that the message speaks of; of `Mapped` the status.
    rank: u8,
    /// Of `Hello` the number of ranks.
    ranks: u8,
    /// Of `Hello` the version.
    protocol: U16,
    /// Zero.
    reserved: U16,
    /// A page, a lock or a barrier; of `Hello` a checksum of the program.
    id: U32,
    /// Zero.
    reserved_id: U32,
    /// Of a grant, or the round of a barrier; of `Hello` the job.
    version: U64,
    /// Pages; of `Hello` those of the area.
    pages: U64,
}

const _: () = assert!(MESSAGE_BYTES == 32);

/// What one rank says to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// The first message of a session.
    Hello {
        /// Of the protocol.
        protocol: u16,
        /// The sender.
        rank: Rank,
        /// How many the job has.
        ranks: u8,
        /// A random number that all ranks of a job were given.
        job: u64,
        /// What the sender's program relies on.
        consistency: Consistency,
        /// The pages of the sender's area.
        pages: u64,
        /// A checksum of the sender's program, in a job over several hosts; else 0.
        program: u32,
    },
    /// To the page's home, or to its registrar, which passes it on.
    Ask {
        /// Which page.
        page: Page,
        /// For what.
        mode: Mode,
        /// Which rank shall get the page.
        requester: Rank,
    },
    /// From the registrar: the receiver has touched the page first and is its home.
    Own {
        /// Which page.
        page: Page,
    },
    /// From the home to a holder: give up the page down to what `mode` leaves, and send it.
    Forward {
        /// Which page.
        page: Page,
        /// What the requester gets.
        mode: Mode,
        /// Where the page goes.
        requester: Rank,
        /// Of the grant.
        version: u64,
    },
    /// The page itself, as the payload.
    Page {
        /// Which page.
        page: Page,
        /// What the receiver may do.
        mode: Mode,
        /// Its home.
        home: Rank,
        /// Of the grant.
        version: u64,
    },
    /// From the home: the receiver may write to the copy that it has.
    Upgrade {
        /// Which page.
        page: Page,
        /// Of the grant.
        version: u64,
    },
    /// From the home: give up the copy, and acknowledge when it cannot be read any more.
    Invalidate {
        /// Which page.
        page: Page,
        /// Of the grant that waits for it.
        version: u64,
    },
    /// The copy is gone.
    Acknowledge {
        /// Which page.
        page: Page,
        /// As the invalidation had it.
        version: u64,
    },
    /// To the home: a page that another rank sent is here.
    Confirm {
        /// Which page.
        page: Page,
        /// As the page had it.
        version: u64,
    },
    /// To the lock's manager: the sender wants it.
    Lock {
        /// Which lock.
        lock: u32,
    },
    /// From the manager: after the receiver, this rank has the lock.
    Next {
        /// Which lock.
        lock: u32,
        /// Which rank waits.
        waiter: Rank,
    },
    /// From the manager or the rank that had the lock: the receiver has it.
    Locked {
        /// Which lock.
        lock: u32,
    },
    /// To the manager: the sender is done, and knows of no rank that waits.
    Unlock {
        /// Which lock.
        lock: u32,
    },
    /// From the manager: no rank waited; the lock is free.
    Unlocked {
        /// Which lock.
        lock: u32,
    },
    /// To the barrier's manager.
    Arrive {
        /// Which barrier.
        barrier: u32,
        /// Counts the uses of the barrier.
        round: u64,
    },
    /// From the manager: all have arrived.
    Pass {
        /// Which barrier.
        barrier: u32,
        /// As they said.
        round: u64,
    },
    /// To rank 0: place the segment whose name is the payload.
    Map {
        /// Its length.
        pages: u64,
    },
    /// From rank 0, with the name as the payload.
    Mapped {
        /// 0, or why not: see [`SegmentRefused`](super::SegmentRefused).
        status: u8,
        /// Where it begins.
        first: Page,
        /// How long it is.
        pages: u64,
    },
    /// The last message of a rank that leaves when all are done: the end of its sessions is no fault.
    Leave,
    /// The job is over, since a rank has gone or is silent: the sender's last message, so that all ranks name that one and not the sender.
    Ended {
        /// Which.
        rank: Rank,
        /// For how many seconds it is silent; 0 if its session has ended.
        seconds: u64,
    },
    /// The sender's pager runs. Sent at intervals, so that a rank that is stopped or cut off is told from one that has nothing to say.
    Alive,
    /// To the home, with the page as the payload: the sender was alone with it, and is not any more. The answer to `Forward`.
    Contents {
        /// Which page.
        page: Page,
        /// As `Forward` had it.
        version: u64,
    },
    /// To the home, with the difference as the payload: what the sender has changed.
    Difference {
        /// Which page.
        page: Page,
        /// Of the sender's copy; 0 if it keeps none.
        version: u64,
    },
    /// From the home: it has the difference.
    Differed {
        /// Which page.
        page: Page,
        /// `Write`: no other rank has a copy of this version, and the receiver may store to its copy without differences.
        mode: Mode,
        /// Of the page with the difference; 0 if there was none.
        version: u64,
    },
    /// With write notices as the payload: before the lock or barrier that follows, the receiver has to know of them.
    Notices,
    /// Several messages of the sender, as the payload: see [`Batches`](super::Batches).
    Batch,
}

impl Message {
    /// The bytes.
    pub fn to_bytes(self) -> [u8; MESSAGE_BYTES] {
        let none = Header::new(0);
        let of_page =
            |kind, page, version| Header { id: U32::new(page), version: U64::new(version), ..Header::new(kind) };
        let header = match self {
            Self::Hello { protocol, rank, ranks, job, consistency, pages, program } => Header {
                id: U32::new(program),
                protocol: U16::new(protocol),
                mode: if consistency == Consistency::Release { 2 } else { 1 },
                rank,
                ranks,
                version: U64::new(job),
                pages: U64::new(pages),
                ..Header::new(1)
            },
            Self::Ask { page, mode, requester } => {
                Header { mode: to_number(mode), rank: requester, ..of_page(2, page, 0) }
            }
            Self::Own { page } => of_page(3, page, 0),
            Self::Forward { page, mode, requester, version } => {
                Header { mode: to_number(mode), rank: requester, ..of_page(4, page, version) }
            }
            Self::Page { page, mode, home, version } => {
                Header { mode: to_number(mode), rank: home, ..of_page(5, page, version) }
            }
            Self::Upgrade { page, version } => of_page(6, page, version),
            Self::Invalidate { page, version } => of_page(7, page, version),
            Self::Acknowledge { page, version } => of_page(8, page, version),
            Self::Confirm { page, version } => of_page(9, page, version),
            Self::Lock { lock } => of_page(10, lock, 0),
            Self::Next { lock, waiter } => Header { rank: waiter, ..of_page(11, lock, 0) },
            Self::Locked { lock } => of_page(12, lock, 0),
            Self::Unlock { lock } => of_page(13, lock, 0),
            Self::Unlocked { lock } => of_page(14, lock, 0),
            Self::Arrive { barrier, round } => of_page(15, barrier, round),
            Self::Pass { barrier, round } => of_page(16, barrier, round),
            Self::Map { pages } => Header { kind: 17, pages: U64::new(pages), ..none },
            Self::Mapped { status, first, pages } => {
                Header { rank: status, pages: U64::new(pages), ..of_page(18, first, 0) }
            }
            Self::Leave => Header::new(19),
            Self::Alive => Header::new(20),
            Self::Ended { rank, seconds } => Header { rank, version: U64::new(seconds), ..Header::new(21) },
            Self::Contents { page, version } => of_page(22, page, version),
            Self::Difference { page, version } => of_page(23, page, version),
            Self::Differed { page, mode, version } => Header { mode: to_number(mode), ..of_page(24, page, version) },
            Self::Notices => Header::new(25),
            Self::Batch => Header::new(26),
        };
        zerocopy::transmute!(header)
    }

    /// The message of these bytes; none if it is malformed.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let header = Header::read_from_bytes(bytes).ok()?;
        let (rank, mode, version) = (header.rank, from_number(header.mode), header.version.get());
        let (id, pages) = (header.id.get(), header.pages.get());
        let page = || Some(id).filter(|page| u64::from(*page) < DSM_PAGES_MAX);
        let known = || Some(rank).filter(|rank| usize::from(*rank) < DSM_RANKS_MAX);
        Some(match header.kind {
            1 => {
                let consistency = match header.mode {
                    1 => Consistency::Sequential,
                    2 => Consistency::Release,
                    _ => return None,
                };
                Self::Hello {
                    protocol: header.protocol.get(),
                    rank,
                    ranks: header.ranks,
                    job: version,
                    consistency,
                    pages,
                    program: id,
                }
            }
            2 => Self::Ask { page: page()?, mode: mode?, requester: known()? },
            3 => Self::Own { page: page()? },
            4 => Self::Forward { page: page()?, mode: mode?, requester: known()?, version },
            5 => Self::Page { page: page()?, mode: mode?, home: known()?, version },
            6 => Self::Upgrade { page: page()?, version },
            7 => Self::Invalidate { page: page()?, version },
            8 => Self::Acknowledge { page: page()?, version },
            9 => Self::Confirm { page: page()?, version },
            10 => Self::Lock { lock: id },
            11 => Self::Next { lock: id, waiter: known()? },
            12 => Self::Locked { lock: id },
            13 => Self::Unlock { lock: id },
            14 => Self::Unlocked { lock: id },
            15 => Self::Arrive { barrier: id, round: version },
            16 => Self::Pass { barrier: id, round: version },
            17 => Self::Map { pages },
            18 => Self::Mapped { status: rank, first: page()?, pages },
            19 => Self::Leave,
            20 => Self::Alive,
            21 => Self::Ended { rank: known()?, seconds: version },
            22 => Self::Contents { page: page()?, version },
            23 => Self::Difference { page: page()?, version },
            24 => Self::Differed { page: page()?, mode: mode?, version },
            25 => Self::Notices,
            26 => Self::Batch,
            _ => return None,
        })
    }
}

impl Message {
    /// A rank that the message speaks of, beside its sender and receiver.
    pub fn named_rank(&self) -> Option<Rank> {
        match self {
            Self::Ask { requester, .. } | Self::Forward { requester, .. } => Some(*requester),
            Self::Page { home, .. } => Some(*home),
            Self::Next { waiter, .. } => Some(*waiter),
            Self::Ended { rank, .. } => Some(*rank),
            _ => None,
        }
    }

    /// The page that the message is about.
    pub fn page(&self) -> Option<Page> {
        match self {
            Self::Ask { page, .. }
            | Self::Own { page }
            | Self::Forward { page, .. }
            | Self::Page { page, .. }
            | Self::Upgrade { page, .. }
            | Self::Invalidate { page, .. }
            | Self::Acknowledge { page, .. }
            | Self::Confirm { page, .. }
            | Self::Contents { page, .. }
            | Self::Difference { page, .. }
            | Self::Differed { page, .. } => Some(*page),
            _ => None,
        }
    }
}

impl Header {
    fn new(kind: u8) -> Self {
        let (zero, wide) = (U16::ZERO, U64::ZERO);
        let (id, reserved_id) = (U32::ZERO, U32::ZERO);
        Self {
            kind,
            mode: 0,
            rank: 0,
            ranks: 0,
            protocol: zero,
            reserved: zero,
            id,
            reserved_id,
            version: wide,
            pages: wide,
        }
    }
}

fn to_number(mode: Mode) -> u8 {
    match mode {
        Mode::None => 0,
        Mode::Read => 1,
        Mode::Write => 2,
    }
}

/// No message is about no right.
fn from_number(number: u8) -> Option<Mode> {
    match number {
        1 => Some(Mode::Read),
        2 => Some(Mode::Write),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Message> {
        let (page, mode, version) = (0x0102_0304 & 0xff_ffff, Mode::Write, 0x1112_1314_1516_1718);
        vec![
            Message::Hello {
                protocol: VERSION,
                rank: 3,
                ranks: 4,
                job: version,
                consistency: Consistency::Sequential,
                pages: 5,
                program: 6,
            },
            Message::Ask { page, mode: Mode::Read, requester: 5 },
            Message::Own { page },
            Message::Forward { page, mode, requester: 5, version },
            Message::Page { page, mode, home: 6, version },
            Message::Upgrade { page, version },
            Message::Invalidate { page, version },
            Message::Acknowledge { page, version },
            Message::Confirm { page, version },
            Message::Lock { lock: 7 },
            Message::Next { lock: 7, waiter: 2 },
            Message::Locked { lock: 7 },
            Message::Unlock { lock: 7 },
            Message::Unlocked { lock: 7 },
            Message::Arrive { barrier: 8, round: 9 },
            Message::Pass { barrier: 8, round: 9 },
            Message::Map { pages: 10 },
            Message::Mapped { status: 1, first: page, pages: 10 },
            Message::Leave,
            Message::Alive,
            Message::Ended { rank: 5, seconds: 15 },
            Message::Contents { page, version },
            Message::Difference { page, version },
            Message::Differed { page, mode, version },
            Message::Notices,
            Message::Batch,
        ]
    }

    #[test]
    fn every_message_comes_back_from_its_bytes() {
        for (place, message) in all().into_iter().enumerate() {
            let bytes = message.to_bytes();
            assert_eq!(usize::from(bytes[0]), place + 1);
            assert_eq!(Message::from_bytes(&bytes), Some(message));
        }
    }

    #[test]
    fn the_bytes_are_those_of_the_map() {
        let (job, consistency) = (0x0807_0605_0403_0201, Consistency::Release);
        let hello = Message::Hello { protocol: 4, rank: 3, ranks: 4, job, consistency, pages: 0x0a09, program: 0x0c0b };
        let mut golden = [0; 32];
        golden[..6].copy_from_slice(&[1, 2, 3, 4, 4, 0]);
        golden[8..10].copy_from_slice(&[11, 12]);
        golden[16..26].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        assert_eq!(hello.to_bytes(), golden);
        let forward = Message::Forward { page: 0x03_0201, mode: Mode::Write, requester: 5, version: 9 };
        let mut golden = [0; 32];
        golden[..4].copy_from_slice(&[4, 2, 5, 0]);
        golden[8..12].copy_from_slice(&[1, 2, 3, 0]);
        golden[16] = 9;
        assert_eq!(forward.to_bytes(), golden);
        let differed = Message::Differed { page: 0x03_0201, mode: Mode::Write, version: 9 };
        let mut golden = [0; 32];
        golden[..2].copy_from_slice(&[24, 2]);
        golden[8..12].copy_from_slice(&[1, 2, 3, 0]);
        golden[16] = 9;
        assert_eq!(differed.to_bytes(), golden);
        let mut golden = [0; 32];
        golden[0] = 17;
        golden[24..26].copy_from_slice(&[1, 2]);
        assert_eq!(Message::Map { pages: 0x0201 }.to_bytes(), golden);
    }

    #[test]
    fn what_no_message_has_is_refused() {
        let ask = Message::Ask { page: 1, mode: Mode::Read, requester: 1 }.to_bytes();
        for (place, value) in [(0, 0), (0, 27), (1, 0), (1, 3), (2, DSM_RANKS_MAX as u8), (11, 1)] {
            let mut bytes = ask;
            bytes[place] = value;
            assert_eq!(Message::from_bytes(&bytes), None, "byte {place} is {value}");
        }
        assert_eq!(Message::from_bytes(&ask[..31]), None);
    }
}
