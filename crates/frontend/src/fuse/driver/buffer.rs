//! Memory for requests: the payload of a WRITE lies at a page's start in it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::fuse::request::WRITE_HEAD_BYTES;
use crate::limits::{FUSE_BUFFERS_MAX, FUSE_SMALL_REQUEST_BYTES};

const PAGE_BYTES: usize = 4096;

/// The buffers of a mount: at most [`FUSE_BUFFERS_MAX`]. Further readers wait until one comes back.
pub(super) struct Pool {
    payload_bytes: usize,
    state: Mutex<State>,
    came_back: Condvar,
}

#[derive(Default)]
struct State {
    free: Vec<Vec<u8>>,
    made: usize,
}

/// A buffer, which goes back to its pool.
pub(super) struct Buffer {
    memory: Vec<u8>,
    /// Where the request begins: [`WRITE_HEAD_BYTES`] before a page.
    start: usize,
    len: usize,
    pool: Arc<Pool>,
}

impl Pool {
    pub(super) fn new(payload_bytes: usize) -> Self {
        Self { payload_bytes, state: Mutex::default(), came_back: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer, after a wait if all are in use.
    pub(super) fn take(self: &Arc<Self>) -> Buffer {
        let waits = |state: &mut State| state.free.is_empty() && state.made >= FUSE_BUFFERS_MAX;
        let mut state = self.came_back.wait_while(self.state(), waits).unwrap_or_else(PoisonError::into_inner);
        let memory = state.free.pop().unwrap_or_else(|| {
            state.made += 1;
            vec![0; 3 * PAGE_BYTES + self.payload_bytes]
        });
        drop(state);
        let page = memory.as_ptr().addr().next_multiple_of(PAGE_BYTES) - memory.as_ptr().addr() + PAGE_BYTES;
        Buffer { memory, start: page - WRITE_HEAD_BYTES, len: 0, pool: Arc::clone(self) }
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

    /// A copy of a small request, so that the buffer is free for the next one.
    pub(super) fn small_copy(&self) -> Option<Vec<u8>> {
        (self.len <= FUSE_SMALL_REQUEST_BYTES).then(|| self.bytes().to_vec())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.pool.state().free.push(std::mem::take(&mut self.memory));
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
}
