//! One connection: its state, its operations that wait to be posted, and its posted operations.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::rc::Rc;

use byway_reactor::{Errno, Frame, FramePool, Instant};

use super::super::domain::{PoolRegion, WindowAddress};
use super::super::endpoint::Endpoint;
use super::super::error::{RdmaError, WorkError};
use super::super::memory::{Payload, Segment};
use super::super::queue_pair::Work;
use super::AdapterId;
use super::Times;
use super::credit::{CreditError, Credits};
use super::outgoing::{Laid, Outgoing, Uncopied};
use super::watch::Watch;
use crate::limits::RDMA_CREDITS_MAX;
use crate::wire::{HEADER_BYTES, RefuseCode};

/// Why a connection ended, or never came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Down {
    /// The peer ended it, or its process did.
    #[error("the peer closed the connection")]
    PeerClosed,
    /// The peer's program refused.
    #[error("the peer refused: {0:?}")]
    Refused(RefuseCode),
    /// We refuse what the peer says of itself.
    #[error("refused: {0:?}")]
    WeRefused(RefuseCode),
    /// There is no listener.
    #[error("no listener at that address")]
    NobodyListens,
    /// The peer is something else.
    #[error("the peer does not speak byway's wire; check the address")]
    NotByway,
    /// There is no way to the peer, or no answer from it.
    #[error("the peer cannot be reached: {0}")]
    Unreachable(Errno),
    /// It cannot be set up on this side.
    #[error("{0}")]
    Setup(RdmaError),
    /// Too many connections for the receives that the device has.
    #[error("too many connections for the device")]
    TooMany,
    /// No memory for its messages.
    #[error("no buffers for the connection: raise `--buffer-memory`")]
    NoFrames,
    /// The peer breaks the rule of credits.
    #[error("{0}")]
    Credit(CreditError),
    /// A message is shorter than a header.
    #[error("a message of {0} bytes is shorter than a header")]
    Short(u32),
    /// An operation failed, and the connection with it.
    #[error("{0}")]
    Work(WorkError),
    /// A payload could not be read here: its file is shorter now, or broken.
    #[error("a payload cannot be read: {0}")]
    Payload(Errno),
    /// The device does not take work any more.
    #[error("the device refuses work: {0}")]
    Device(Errno),
    /// The device is gone.
    #[error("the device was removed")]
    Removed,
}

/// A message that came, in the memory that was posted for it.
#[derive(Debug)]
pub struct Received {
    /// The device that it came by.
    pub(super) adapter: AdapterId,
    pub(super) payload: Payload,
    pub(super) len: usize,
}

impl Received {
    /// Its header.
    pub fn header(&self) -> &[u8; HEADER_BYTES] {
        const NONE: [u8; HEADER_BYTES] = [0; HEADER_BYTES];
        self.payload.segments().first().and_then(|segment| segment.bytes().first_chunk()).unwrap_or(&NONE)
    }

    /// What came behind the header.
    pub fn payload(&self) -> &[u8] {
        let len = self.len.saturating_sub(HEADER_BYTES);
        self.payload.segments().get(1).and_then(|segment| segment.bytes().get(..len)).unwrap_or(&[])
    }
}

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// A client looks for the way.
    Resolving,
    /// A client has asked.
    Asking,
    /// A server has been asked, and its owner is.
    Asked,
    /// A server has accepted.
    Accepting,
    /// Messages go both ways.
    Up,
}

/// A get that is not posted.
#[derive(Debug)]
pub(super) struct Get {
    pub(super) from: WindowAddress,
    pub(super) into: Frame,
    pub(super) token: u64,
}

/// What is posted next.
#[derive(Debug)]
pub(super) enum Ready {
    Message(Box<Laid>),
    Write(Work),
}

/// A step of what is laid and not posted.
#[derive(Debug)]
pub(super) enum Step {
    Ready(Ready),
    /// Becomes writes, as far as there are frames.
    Uncopied(Uncopied),
}

/// Takes what is posted next, the last of `steps`; none if that must be copied first, and it may not or
/// there is no frame for it.
pub(super) fn pop_ready(
    steps: &mut Vec<Step>,
    pool: &FramePool,
    region: &Rc<PoolRegion>,
    may_copy: bool,
) -> Option<Ready> {
    if !may_copy && matches!(steps.last(), Some(Step::Uncopied(_))) {
        return None;
    }
    match steps.pop()? {
        Step::Ready(ready) => Some(ready),
        Step::Uncopied(uncopied) => match uncopied.copy(pool) {
            Ok((copy, to, rest)) => {
                steps.extend(rest.map(Step::Uncopied));
                let len = copy.len();
                let segment = Segment::of_frame(region, copy, 0..len).ok()?;
                Some(Ready::Write(Work::Write { payload: segment.into(), to }))
            }
            Err(uncopied) => {
                steps.push(Step::Uncopied(uncopied));
                None
            }
        },
    }
}

/// Whether the write before `steps` is waited for: none of its put are behind it, or those take frames.
pub(super) fn awaits_write(steps: &[Step]) -> bool {
    steps.last().is_none_or(|next| matches!(next, Step::Uncopied(_)))
}

pub(super) struct Connection {
    pub(super) phase: Phase,
    pub(super) endpoint: Option<Endpoint>,
    /// Its device, and whether receives are reserved there.
    pub(super) adapter: Option<AdapterId>,
    pub(super) has_receives: bool,
    pub(super) credits: Credits,
    pub(super) peer: Option<SocketAddr>,
    /// Messages that came before the news that the connection is there.
    pub(super) early: VecDeque<Received>,
    pub(super) gets: VecDeque<Get>,
    /// Of the front of the queue, what is laid and not posted; the last one is the next.
    pub(super) ready: Vec<Step>,
    /// Of what is laid; of the front of the queue, if nothing is.
    pub(super) times: Option<Times>,
    /// With when it was queued, once that is known.
    pub(super) queue: VecDeque<(Outgoing, Option<Instant>)>,
    /// Bytes and heap memory of what is queued.
    pub(super) queued: usize,
    pub(super) queued_heap: usize,
    /// Sends and writes that are posted, and their bytes.
    pub(super) posted: usize,
    pub(super) posted_bytes: usize,
    /// Of these, the writes: their ends are reported whatever else is posted.
    pub(super) posted_writes: usize,
    /// Gets that are posted.
    pub(super) posted_gets: usize,
    pub(super) watch: Watch,
    /// Nothing more will be queued: the owner waits for the end of the last.
    pub(super) finishing: bool,
    pub(super) is_dirty: bool,
}

impl Connection {
    pub(super) fn new(phase: Phase, endpoint: Option<Endpoint>, granted: u32) -> Self {
        debug_assert!(granted <= RDMA_CREDITS_MAX);
        let peer = endpoint.as_ref().and_then(Endpoint::peer_address);
        Self {
            phase,
            endpoint,
            adapter: None,
            has_receives: false,
            credits: Credits::new(granted),
            peer,
            early: VecDeque::new(),
            gets: VecDeque::new(),
            ready: Vec::new(),
            times: None,
            queue: VecDeque::new(),
            queued: 0,
            queued_heap: 0,
            posted: 0,
            posted_bytes: 0,
            posted_writes: 0,
            posted_gets: 0,
            watch: Watch::new(),
            finishing: false,
            is_dirty: false,
        }
    }

    pub(super) fn queue(&mut self, outgoing: Outgoing) {
        self.queued += outgoing.bytes();
        self.queued_heap += outgoing.heap_bytes();
        self.queue.push_back((outgoing, None));
    }

    /// What was queued since the last time was queued now, and the first of all is the next from now on.
    pub(super) fn stamp(&mut self, now: Instant) {
        for (_, queued) in self.queue.iter_mut().rev().take_while(|(_, queued)| queued.is_none()) {
            *queued = Some(now);
        }
        if self.ready.is_empty() {
            self.begin_next(now);
        }
    }

    /// Nothing is before the front of the queue any more.
    pub(super) fn begin_next(&mut self, now: Instant) {
        if let Some((_, queued)) = self.queue.front()
            && self.times.is_none()
        {
            self.times = Some(Times { queued: queued.unwrap_or(now), next: now });
        }
    }

    /// Nothing waits and nothing is posted?
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.ready.is_empty() && self.posted == 0
    }
}

/// What it still had to do.
impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection")
            .field("peer", &self.peer)
            .field("phase", &self.phase)
            .field("credits", &self.credits)
            .field("gets", &self.gets.len())
            .field("posted_gets", &self.posted_gets)
            .field("queue", &self.queue.len())
            .field("ready", &self.ready.len())
            .field("posted", &self.posted)
            .field("posted_bytes", &self.posted_bytes)
            .field("is_dirty", &self.is_dirty)
            .finish_non_exhaustive()
    }
}
