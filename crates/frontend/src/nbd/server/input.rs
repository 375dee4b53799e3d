//! The bytes that a connection has received and not yet used, in a frame whose size follows the client's requests.
//!
//! An idle connection holds 4 KiB. A connection with many small writes gets a frame that holds many of them, so that one
//! receive takes a batch. A connection with large writes returns to the small frame: their payloads are received into frames
//! of their own, and payload bytes that arrive here have to be copied.

use byway_reactor::{Frame, Need, ReceiveBuffers};

use crate::limits::{INPUT_BYTES_MAX, INPUT_BYTES_MIN};

/// Received bytes: `frame[start..end]`.
#[derive(Debug, Default)]
pub(super) struct Input {
    frame: Option<Frame>,
    start: usize,
    end: usize,
    /// The size that the next frame should have.
    wanted: usize,
    /// What has to be here in one piece before any of it can be used.
    message: usize,
}

impl Input {
    /// What has been received and not used.
    pub(super) fn bytes(&self) -> &[u8] {
        self.frame.as_ref().map_or(&[], |frame| &frame.bytes()[self.start..self.end])
    }

    /// Uses the first `n` bytes up.
    pub(super) fn consume(&mut self, n: usize) {
        debug_assert!(self.start + n <= self.end);
        self.start += n;
        self.message = 0;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Lets a message of `bytes` fit, and several of them if they come one after the other.
    pub(super) fn want(&mut self, bytes: usize) {
        self.message = bytes;
        self.grow(bytes);
    }

    /// Receives more than `bytes` at once, if there is memory for that.
    pub(super) fn grow(&mut self, bytes: usize) {
        if bytes > self.wanted {
            self.wanted = (bytes * 8).next_power_of_two().clamp(INPUT_BYTES_MIN, INPUT_BYTES_MAX);
        }
    }

    /// Lets `bytes` fit.
    pub(super) fn want_whole(&mut self, bytes: usize) {
        self.message = bytes;
        self.wanted = self.wanted.max(bytes.next_power_of_two().clamp(INPUT_BYTES_MIN, INPUT_BYTES_MAX));
    }

    /// Goes back to the small frame when this one is empty.
    pub(super) fn want_little(&mut self) {
        self.wanted = INPUT_BYTES_MIN;
    }

    /// Takes the frame for a receive into `frame[start..]`. `None` when there is no buffer for it; then nothing changed.
    pub(super) fn lend(&mut self, buffers: &ReceiveBuffers) -> Option<(Frame, usize)> {
        let held = self.frame.as_ref().map_or(0, Frame::len);
        let used = self.end - self.start;
        if used >= INPUT_BYTES_MAX {
            return None;
        }
        let len = buffers.len_for(Need { held, used, message: self.message, wanted: self.wanted });
        if len != held {
            match buffers.alloc(len) {
                Some(mut next) => {
                    next.write(0, self.bytes());
                    (self.start, self.end) = (0, used);
                    self.frame = Some(next);
                }
                // The old one does, as long as it has room.
                None if held <= used || held < self.message => return None,
                None => {}
            }
        }
        let mut frame = self.frame.take()?;
        if self.start > 0 {
            frame.bytes_mut().copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, used);
        }
        Some((frame, self.end))
    }

    /// Takes the frame back after a receive that brought `n` bytes.
    pub(super) fn give(&mut self, frame: Frame, n: usize) {
        self.end += n;
        self.frame = Some(frame);
    }
}

#[cfg(test)]
mod tests {
    use byway_reactor::{IoChoice, Reactor};

    use super::*;
    use crate::limits::SMALL_WRITE_BYTES_MAX;

    fn receive(input: &mut Input, reactor: &Reactor, bytes: &[u8]) {
        let (mut frame, at) = input.lend(reactor.receive_buffers()).expect("a frame");
        frame.write(at, bytes);
        input.give(frame, bytes.len());
    }

    #[test]
    fn bytes_survive_growth_and_use() {
        let reactor = Reactor::open(IoChoice::Epoll, 1 << 20).unwrap();
        let mut input = Input::default();
        receive(&mut input, &reactor, b"abcdef");
        input.consume(2);
        input.want(5000);
        receive(&mut input, &reactor, b"ghi");
        assert_eq!(input.bytes(), b"cdefghi");
        assert!(input.frame.as_ref().unwrap().len() >= 5000);
        input.consume(7);
        input.want_little();
        receive(&mut input, &reactor, b"x");
        assert_eq!(input.bytes(), b"x");
        assert_eq!(input.frame.as_ref().unwrap().len(), INPUT_BYTES_MIN);
    }

    #[test]
    fn without_frames_a_message_that_must_be_in_one_piece_fits_all_the_same() {
        let reactor = Reactor::open(IoChoice::Epoll, 1).unwrap();
        let data: Vec<Frame> = std::iter::from_fn(|| reactor.frames().alloc(4096)).collect();
        assert!(!data.is_empty());
        let mut input = Input::default();
        receive(&mut input, &reactor, b"abc");
        input.want(SMALL_WRITE_BYTES_MAX + 32);
        let (frame, at) = input.lend(reactor.receive_buffers()).expect("a buffer");
        assert!(frame.len() - at >= SMALL_WRITE_BYTES_MAX);
        input.give(frame, 0);
        assert_eq!(input.bytes(), b"abc");
    }
}
