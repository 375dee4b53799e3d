//! A ring of bytes between two processes: one writes, one reads, neither locks, neither trusts the other.
//!
//! Each end keeps its own counter to itself and publishes it; of the other's counter it takes one copy at a time and looks
//! whether it can be true. So a hostile peer can spoil the bytes and end the stream, and nothing else. Counters only grow
//! (64 bits do not wrap in a lifetime); a byte's place is its number modulo the size of the ring.
//!
//! Waking: an end that goes to sleep sets its flag, and looks once more. The other end publishes, and looks at the flag.
//! All four accesses are of one total order (`SeqCst`), so that one of the two sees the other (Dekker). That is an exchange
//! where a fence would be several times dearer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::io::Errno;

use super::memory::SharedMemory;

/// What an end is told to do for its peer after it has published.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bell {
    /// The peer sleeps: wake it.
    Ring,
    /// The peer is awake.
    Quiet,
}

/// How far a writer has come with its end of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Ended {
    /// More may come.
    No,
    /// What is in the ring is the last.
    Done,
    /// The writer has gone without reading what it was sent.
    Reset,
}

/// Where a ring's words lie in the control page: those that one end writes share no cache line with the other's.
const RING_STRIDE: usize = 512;
const TAIL: usize = 0;
const ENDED: usize = 8;
const READER_SLEEPS: usize = 64;
const HEAD: usize = 128;
const WRITER_SLEEPS: usize = 192;

/// The words of one ring.
#[derive(Debug)]
struct Words {
    memory: Arc<SharedMemory>,
    number: usize,
}

impl Words {
    fn word64(&self, at: usize) -> &AtomicU64 {
        // SAFETY: an aligned word of the mapping, which lives as long as `self`; both processes use it as an atomic.
        unsafe { AtomicU64::from_ptr(self.memory.control(self.number * RING_STRIDE + at).cast()) }
    }

    fn word32(&self, at: usize) -> &AtomicU32 {
        // SAFETY: as in `word64`.
        unsafe { AtomicU32::from_ptr(self.memory.control(self.number * RING_STRIDE + at).cast()) }
    }

    /// The part of the ring that begins with byte `number`: where it lies, and how many bytes there are up to the
    /// ring's end.
    fn place(&self, number: u64) -> (*mut u8, usize) {
        let size = self.memory.ring_bytes();
        let at = number as usize & (size - 1);
        // SAFETY: `at` is less than the ring's size.
        (unsafe { self.memory.ring(self.number).add(at) }, size - at)
    }

    /// How many bytes lie between two counters.
    fn between(&self, head: u64, tail: u64) -> Result<usize, Errno> {
        let used = tail.wrapping_sub(head);
        if used > self.memory.ring_bytes() as u64 { Err(Errno::PROTO) } else { Ok(used as usize) }
    }

    /// To be called after what the sleeper waits for was stored.
    fn wake(&self, sleeper: usize) -> Bell {
        let flag = self.word32(sleeper);
        if flag.load(Ordering::SeqCst) != 0 && flag.swap(0, Ordering::SeqCst) != 0 { Bell::Ring } else { Bell::Quiet }
    }

    /// To be called before what is waited for is looked at once more.
    fn set_sleeps(&self, sleeper: usize) {
        self.word32(sleeper).store(1, Ordering::SeqCst);
    }
}

/// The end that writes.
#[derive(Debug)]
pub(super) struct Writer {
    words: Words,
    tail: u64,
    /// What was last seen of the reader's counter.
    head: u64,
}

impl Writer {
    /// The writer of ring 0 or 1, which is new.
    pub(super) fn new(memory: &Arc<SharedMemory>, number: usize) -> Self {
        Self { words: Words { memory: Arc::clone(memory), number }, tail: 0, head: 0 }
    }

    /// Bytes that the ring has room for: `wanted` at least, or as many as there are. The reader's counter, for which its
    /// cache must be asked, is looked at only if what was last seen of it is not enough.
    ///
    /// # Errors
    /// `EPROTO` if the peer has written nonsense.
    pub(super) fn room(&mut self, wanted: usize) -> Result<usize, Errno> {
        let size = self.words.memory.ring_bytes();
        let known = size - self.words.between(self.head, self.tail)?;
        if known >= wanted {
            return Ok(known);
        }
        self.head = self.words.word64(HEAD).load(Ordering::SeqCst);
        Ok(size - self.words.between(self.head, self.tail)?)
    }

    /// Where the next bytes go, `ahead` of what was published: an address, and how many lie there in one piece.
    pub(super) fn place(&self, ahead: usize) -> (*mut u8, usize) {
        self.words.place(self.tail + ahead as u64)
    }

    /// The reader may have `n` more bytes, that were written at [`Writer::place`] and for which there was room.
    pub(super) fn publish(&mut self, n: usize) -> Bell {
        self.tail += n as u64;
        self.words.word64(TAIL).store(self.tail, Ordering::SeqCst);
        self.words.wake(READER_SLEEPS)
    }

    /// Asks to be woken when there is room again.
    pub(super) fn sleep(&self) {
        self.words.set_sleeps(WRITER_SLEEPS);
    }

    /// Nothing more will be written.
    pub(super) fn end(&self, how: Ended) -> Bell {
        self.words.word32(ENDED).fetch_max(how as u32, Ordering::SeqCst);
        self.words.wake(READER_SLEEPS)
    }
}

/// The end that reads.
#[derive(Debug)]
pub(super) struct Reader {
    words: Words,
    head: u64,
}

impl Reader {
    /// The reader of ring 0 or 1, which is new.
    pub(super) fn new(memory: &Arc<SharedMemory>, number: usize) -> Self {
        Self { words: Words { memory: Arc::clone(memory), number }, head: 0 }
    }

    /// Bytes that can be read, and whether they are the last. Whether more will come is asked first: what was written
    /// before the end is then seen.
    ///
    /// # Errors
    /// `EPROTO` if the peer has written nonsense.
    pub(super) fn here(&self) -> Result<(usize, Ended), Errno> {
        let ended = match self.words.word32(ENDED).load(Ordering::SeqCst) {
            0 => Ended::No,
            1 => Ended::Done,
            _ => Ended::Reset,
        };
        let tail = self.words.word64(TAIL).load(Ordering::SeqCst);
        Ok((self.words.between(self.head, tail)?, ended))
    }

    /// Where the next bytes lie, `ahead` of what was consumed: an address, and how many lie there in one piece.
    pub(super) fn place(&self, ahead: usize) -> (*const u8, usize) {
        let (at, len) = self.words.place(self.head + ahead as u64);
        (at, len)
    }

    /// `n` bytes that were here are no longer needed.
    pub(super) fn consume(&mut self, n: usize) -> Bell {
        self.head += n as u64;
        self.words.word64(HEAD).store(self.head, Ordering::SeqCst);
        self.words.wake(WRITER_SLEEPS)
    }

    /// Asks to be woken when something comes.
    pub(super) fn sleep(&self) {
        self.words.set_sleeps(READER_SLEEPS);
    }
}
