//! Memory for requests: the payload of a WRITE lies at a page's start in it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::fuse::request::WRITE_HEAD_BYTES;
use crate::limits::{FUSE_BUFFERS_MAX, FUSE_SMALL_REQUEST_BYTES};

const PAGE_BYTES: usize = 4096;

/// The buffers of a mount: memory of [`FUSE_BUFFERS_MAX`] of them. Further readers wait until some comes back.
///
/// While few are free, a request that is answered later keeps as much memory as it needs, and not a whole buffer: writes that wait for
/// other clients are often short, and reads come behind them.
pub(super) struct Pool {
    payload_bytes: usize,
    state: Mutex<State>,
    came_back: Condvar,
}

#[derive(Default)]
struct State {
    free: Vec<Vec<u8>>,
    /// Whole ones, free ones too.
    made: usize,
    /// Bytes of those that were cut.
    cut_bytes: usize,
}

/// A buffer, which goes back to its pool.
pub(super) struct Buffer {
    memory: Vec<u8>,
    /// Where the request begins: [`WRITE_HEAD_BYTES`] before a page.
    start: usize,
    len: usize,
    /// It has the memory that its request needs.
    is_cut: bool,
    pool: Arc<Pool>,
}

impl State {
    /// Whether so many bytes more may be had.
    fn has_room(&self, whole: usize, bytes: usize) -> bool {
        self.made * whole + self.cut_bytes + bytes <= FUSE_BUFFERS_MAX * whole
    }
}

impl Pool {
    pub(super) fn new(payload_bytes: usize) -> Self {
        Self { payload_bytes, state: Mutex::default(), came_back: Condvar::new() }
    }

    fn whole_bytes(&self) -> usize {
        3 * PAGE_BYTES + self.payload_bytes
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer, after a wait if all are in use.
    pub(super) fn take(self: &Arc<Self>) -> Buffer {
        let whole = self.whole_bytes();
        let waits = |state: &mut State| state.free.is_empty() && !state.has_room(whole, whole);
        let mut state = self.came_back.wait_while(self.state(), waits).unwrap_or_else(PoisonError::into_inner);
        let memory = state.free.pop().unwrap_or_else(|| {
            state.made += 1;
            vec![0; whole]
        });
        drop(state);
        let page = memory.as_ptr().addr().next_multiple_of(PAGE_BYTES) - memory.as_ptr().addr() + PAGE_BYTES;
        Buffer { memory, start: page - WRITE_HEAD_BYTES, len: 0, is_cut: false, pool: Arc::clone(self) }
    }
}

impl Buffer {
    /// What a request is read into.
    pub(super) fn room(&mut self) -> &mut [u8] {
        let end = self.start + WRITE_HEAD_BYTES + self.pool.payload_bytes;
        &mut self.memory[self.start..end]
    }

    /// Says how many bytes were read.
    pub(super) fn set_len(&mut self, len: usize) {
        self.len = len.min(WRITE_HEAD_BYTES + self.pool.payload_bytes);
    }

    /// The request.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }

    /// The request, which is answered later. While few buffers are free, it is copied to memory of its own if it is much shorter; the
    /// buffer is free again, or given up where the pool has no room for both.
    pub(super) fn kept(mut self) -> Self {
        let (whole, bytes) = (self.pool.whole_bytes(), 2 * PAGE_BYTES + self.len);
        let state = self.pool.state();
        let free = FUSE_BUFFERS_MAX - state.made + state.free.len();
        drop(state);
        if free * 4 > FUSE_BUFFERS_MAX || bytes * 2 > whole {
            return self;
        }
        let mut memory = vec![0; bytes];
        let page = memory.as_ptr().addr().next_multiple_of(PAGE_BYTES) - memory.as_ptr().addr();
        // The payload is at a page's start, as it was.
        let start = page + PAGE_BYTES - WRITE_HEAD_BYTES;
        memory[start..start + self.len].copy_from_slice(self.bytes());
        let uncut = std::mem::replace(&mut self.memory, memory);
        (self.start, self.is_cut) = (start, true);
        let mut state = self.pool.state();
        if state.has_room(whole, bytes) {
            state.free.push(uncut);
        } else {
            // It makes way for this and some more that are cut.
            state.made -= 1;
        }
        state.cut_bytes += bytes;
        drop(state);
        self.pool.came_back.notify_one();
        self
    }

    /// A copy of a small request, so that the buffer is free for the next one.
    pub(super) fn small_copy(&self) -> Option<Vec<u8>> {
        (self.len <= FUSE_SMALL_REQUEST_BYTES).then(|| self.bytes().to_vec())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let memory = std::mem::take(&mut self.memory);
        if self.is_cut {
            self.pool.state().cut_bytes -= memory.len();
        } else {
            self.pool.state().free.push(memory);
        }
        self.pool.came_back.notify_one();
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_lies_at_a_pages_start_and_buffers_come_back() {
        let pool = Arc::new(Pool::new(1 << 20));
        let mut buffer = pool.take();
        assert_eq!(buffer.room().len(), WRITE_HEAD_BYTES + (1 << 20));
        assert_eq!((buffer.room().as_ptr().addr() + WRITE_HEAD_BYTES) % PAGE_BYTES, 0);
        buffer.room()[..3].copy_from_slice(b"abc");
        buffer.set_len(3);
        assert_eq!((buffer.bytes(), buffer.small_copy()), (&b"abc"[..], Some(b"abc".to_vec())));
        buffer.set_len(FUSE_SMALL_REQUEST_BYTES + 1);
        assert_eq!(buffer.small_copy(), None);
        drop(buffer);
        let all: Vec<Buffer> = (0..FUSE_BUFFERS_MAX).map(|_| pool.take()).collect();
        assert_eq!(pool.state().made, FUSE_BUFFERS_MAX);
        let waits = std::thread::spawn({
            let pool = Arc::clone(&pool);
            move || pool.take().start
        });
        drop(all);
        assert!(waits.join().unwrap() > 0);
        assert_eq!(pool.state().made, FUSE_BUFFERS_MAX, "none more than the bound");
    }

    #[test]
    fn many_short_requests_leave_buffers_for_others() {
        let pool = Arc::new(Pool::new(1 << 20));
        let keep = |number: usize| {
            let mut buffer = pool.take();
            let text = format!("request {number}");
            buffer.room()[..text.len()].copy_from_slice(text.as_bytes());
            buffer.set_len(2 * FUSE_SMALL_REQUEST_BYTES);
            (buffer.kept(), text)
        };
        // A burst of long ones: the pool has made all its buffers.
        drop((0..FUSE_BUFFERS_MAX).map(|_| pool.take()).collect::<Vec<_>>());
        // Without cuts, the first one that finds no buffer would wait for ever.
        let kept: Vec<_> = (0..4 * FUSE_BUFFERS_MAX).map(keep).collect();
        for (buffer, text) in &kept {
            assert!(buffer.bytes().starts_with(text.as_bytes()));
            assert_eq!((buffer.bytes().as_ptr().addr() + WRITE_HEAD_BYTES) % PAGE_BYTES, 0);
        }
        assert!(pool.state().has_room(pool.whole_bytes(), 0), "no more memory than the bound");
        drop(kept);
        let state = pool.state();
        assert_eq!((state.cut_bytes, state.free.len()), (0, state.made));
    }
}
