//! Buffers that connections receive into. A connection holds such a buffer as long as it lives, so the buffers are not taken
//! from the pool of frames, which holds data between network and stores: thousands of idle connections would leave the pool
//! in pieces too short for a read or a write.
//!
//! There are two sizes, each in a pool of its own. All pieces of a pool have the same size, so a pool cannot be fragmented:
//! a free byte is a free buffer. A third size, which saves system calls on a busy connection and which no message needs, is
//! an ordinary frame, and is taken while most frames are free. If more connections want one than there are, they take turns,
//! because a connection that has one receives several requests at a time, and would have several times the others' rate.

use std::cell::{Cell, OnceCell};

use crate::Reactor;
use crate::frame::{Frame, FramePool};
use crate::limits::{
    RECEIVE_BATCH_SHARE, RECEIVE_BYTES_MIN, RECEIVE_MESSAGE_BYTES, RECEIVE_MESSAGES_MAX, RECEIVERS_MAX,
};

/// The receive buffers of one loop. See the module.
#[derive(Debug)]
pub struct ReceiveBuffers {
    /// Of [`RECEIVE_BYTES_MIN`]: an idle connection's. Mapped when the first connection comes for which there is memory.
    small: OnceCell<FramePool>,
    /// Of [`RECEIVE_MESSAGE_BYTES`].
    messages: OnceCell<FramePool>,
    frames: FramePool,
    /// A connection had none of the frames, though it would suit it: the next that has one gives it back.
    is_wanted: Cell<bool>,
}

/// What a connection needs of its next buffer, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// Its present buffer's length; 0 if it has none.
    pub held: usize,
    /// Received bytes that are not used up.
    pub used: usize,
    /// The next message, as far as its length is known: it must lie in the buffer in one piece.
    pub message: usize,
    /// What would suit it.
    pub wanted: usize,
}

impl ReceiveBuffers {
    pub(crate) fn new(frames: FramePool) -> Self {
        Self { small: OnceCell::new(), messages: OnceCell::new(), frames, is_wanted: Cell::new(false) }
    }

    fn small(&self) -> Option<&FramePool> {
        mapped(&self.small, RECEIVERS_MAX * RECEIVE_BYTES_MIN)
    }

    fn messages(&self) -> Option<&FramePool> {
        mapped(&self.messages, RECEIVE_MESSAGES_MAX * RECEIVE_MESSAGE_BYTES)
    }

    /// The length that a connection's next buffer should have. As long as buffers are plentiful a connection keeps a large
    /// one; when they are not, it gets what its message needs.
    pub fn len_for(&self, need: Need) -> usize {
        let must = need.message.max(need.used + 1);
        let wanted = need.wanted.max(must).next_power_of_two();
        let keeps = need.held >= wanted && (need.used > 0 || need.held == wanted) && !self.is_short(need.held);
        let gives_back = need.held > RECEIVE_MESSAGE_BYTES && need.used == 0 && keeps && self.is_wanted.take();
        if keeps && !gives_back {
            return need.held;
        }
        self.is_wanted.set(self.is_wanted.get() || (wanted > RECEIVE_MESSAGE_BYTES && !self.may_batch()));
        if must > RECEIVE_MESSAGE_BYTES {
            must.next_power_of_two()
        } else if wanted > RECEIVE_MESSAGE_BYTES && self.may_batch() {
            wanted
        } else if must > RECEIVE_BYTES_MIN || (wanted > RECEIVE_BYTES_MIN && !self.is_short(RECEIVE_MESSAGE_BYTES)) {
            RECEIVE_MESSAGE_BYTES
        } else {
            RECEIVE_BYTES_MIN
        }
    }

    /// A buffer of at least `len` bytes, or `None` if there is none now.
    pub fn alloc(&self, len: usize) -> Option<Frame> {
        if len <= RECEIVE_BYTES_MIN {
            return self.small()?.alloc(RECEIVE_BYTES_MIN);
        }
        let message = if len <= RECEIVE_MESSAGE_BYTES { self.messages() } else { None };
        message.and_then(|pool| pool.alloc(RECEIVE_MESSAGE_BYTES)).or_else(|| self.frames.alloc(len))
    }

    /// How many buffers have ever come back: a connection that waits for one, and sees another number, may try again.
    pub fn given_back(&self) -> u64 {
        let given_back = |pool: &OnceCell<FramePool>| pool.get().map_or(0, FramePool::given_back);
        given_back(&self.small) + given_back(&self.messages) + self.frames.given_back()
    }

    /// Bytes that connections hold, without what they have of the frames.
    pub fn held_bytes(&self) -> usize {
        let held = |pool: &OnceCell<FramePool>| pool.get().map_or(0, |pool| pool.bytes() - pool.free_bytes());
        held(&self.small) + held(&self.messages)
    }

    /// Whether a connection that could do with less should not keep a buffer of `len` bytes.
    fn is_short(&self, len: usize) -> bool {
        let is_half_taken = |pool: &FramePool| pool.free_bytes() < pool.bytes() / 2;
        if len <= RECEIVE_BYTES_MIN {
            false
        } else if len <= RECEIVE_MESSAGE_BYTES {
            self.messages().is_none_or(is_half_taken)
        } else {
            is_half_taken(&self.frames)
        }
    }

    /// Whether a buffer that no message needs may be taken from the frames.
    fn may_batch(&self) -> bool {
        let taken = self.frames.bytes() - self.frames.free_bytes();
        taken < self.frames.bytes() / RECEIVE_BATCH_SHARE
    }
}

/// A pool, mapped at the first use. A mapping that failed is tried again: the memory may be there by then.
fn mapped(pool: &OnceCell<FramePool>, bytes: usize) -> Option<&FramePool> {
    if pool.get().is_none() {
        let _ = pool.set(FramePool::new(bytes).ok()?);
    }
    pool.get()
}

impl Reactor {
    /// What connections of this loop receive into.
    pub fn receive_buffers(&self) -> &ReceiveBuffers {
        &self.receive_buffers
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::FRAME_BYTES_MAX;

    fn buffers(frame_bytes: usize) -> ReceiveBuffers {
        ReceiveBuffers::new(FramePool::new(frame_bytes).unwrap())
    }

    #[test]
    fn as_many_connections_as_may_be_have_a_buffer_and_take_none_of_the_frames() {
        let buffers = buffers(4 << 20);
        let idle: Vec<_> = std::iter::from_fn(|| buffers.alloc(1)).collect();
        assert_eq!((idle.len(), buffers.frames.free_bytes()), (RECEIVERS_MAX, 4 << 20));
        // Any half of them goes: what is left of the frames and of the longer buffers is in one piece.
        let _half: Vec<_> = idle.into_iter().step_by(2).collect();
        let messages: Vec<_> = (0..RECEIVE_MESSAGES_MAX).filter_map(|_| buffers.alloc(16_512)).collect();
        assert_eq!((messages.len(), buffers.frames.free_bytes()), (RECEIVE_MESSAGES_MAX, 4 << 20));
        assert!(buffers.frames.alloc(FRAME_BYTES_MAX).is_some());
    }

    #[test]
    fn busy_connections_have_a_quarter_of_the_frames_and_give_them_back_when_data_needs_them() {
        let buffers = buffers(4 << 20);
        let batch = Need { held: RECEIVE_MESSAGE_BYTES, wanted: 256 << 10, ..Need::default() };
        let mut held = Vec::new();
        while buffers.len_for(batch) == 256 << 10 {
            held.push(buffers.alloc(256 << 10).unwrap());
        }
        assert_eq!(held.len(), 4);
        let keeps = Need { held: 256 << 10, used: 1, ..batch };
        assert_eq!(buffers.len_for(keeps), 256 << 10);
        let _data: Vec<_> = (0..2).map(|_| buffers.alloc(1 << 20).unwrap()).collect();
        assert_eq!(buffers.len_for(keeps), RECEIVE_MESSAGE_BYTES, "a shorter one does");
        assert_eq!(buffers.len_for(Need { used: 100_000, ..keeps }), 128 << 10, "it holds so much");
    }

    #[test]
    fn connections_that_want_more_batches_than_there_are_take_turns() {
        const ROUNDS: usize = 100;
        let buffers = buffers(4 << 20);
        let wanted = 256 << 10;
        let mut connections: Vec<(Option<Frame>, usize)> = (0..16).map(|_| (None, 0)).collect();
        let receive = |(frame, batches): &mut (Option<Frame>, usize)| {
            let held = frame.as_ref().map_or(0, Frame::len);
            let len = buffers.len_for(Need { held, wanted, ..Need::default() });
            if len != held {
                *frame = Some(buffers.alloc(len).unwrap());
            }
            *batches += usize::from(len == wanted);
        };
        for _ in 0..ROUNDS {
            connections.iter_mut().for_each(receive);
        }
        let batches: Vec<usize> = connections.iter().map(|(_, batches)| *batches).collect();
        let (least, most) = (batches.iter().min().unwrap(), batches.iter().max().unwrap());
        assert!(*least * 2 > *most, "four at a time have one: {batches:?}");
        assert!(batches.iter().sum::<usize>() > 3 * ROUNDS, "and nearly four always: {batches:?}");
        // Once no more want one than there are, those keep theirs.
        connections.truncate(3);
        for _ in 0..2 {
            connections.iter_mut().for_each(receive);
        }
        for (_, batches) in &mut connections {
            *batches = 0;
        }
        for _ in 0..ROUNDS {
            connections.iter_mut().for_each(receive);
        }
        assert!(connections.iter().all(|(_, batches)| *batches == ROUNDS));
    }

    #[test]
    fn a_connection_whose_message_is_longer_gets_what_it_needs_and_others_do_with_less_when_few_are_left() {
        let buffers = buffers(4 << 20);
        let idle = Need { held: RECEIVE_BYTES_MIN, used: 4096, message: 16_512, wanted: RECEIVE_BYTES_MIN };
        assert_eq!(buffers.len_for(idle), RECEIVE_MESSAGE_BYTES);
        let busy = Need { held: RECEIVE_MESSAGE_BYTES, wanted: RECEIVE_MESSAGE_BYTES, ..Need::default() };
        assert_eq!(buffers.len_for(busy), RECEIVE_MESSAGE_BYTES);
        let _most: Vec<_> = (0..RECEIVE_MESSAGES_MAX * 3 / 4).map(|_| buffers.alloc(16_512).unwrap()).collect();
        assert_eq!(buffers.len_for(busy), RECEIVE_BYTES_MIN);
        assert_eq!(buffers.len_for(idle), RECEIVE_MESSAGE_BYTES);
    }
}
