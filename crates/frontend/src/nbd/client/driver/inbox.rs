//! Received bytes that were not used yet.
//!
//! The room offered to a receive decides how much is copied. While small reads are in flight, the receive gets all room, so
//! that one call brings many replies, whose payloads are copied out. While large reads are in flight, it gets room for the
//! header of a reply only, so that the payload is received directly into its destination.

use byway_reactor::Frame;

/// Where a receive puts its bytes: at `start` of the frame, at most `len`.
pub(super) struct Room {
    pub(super) frame: Frame,
    pub(super) start: usize,
    pub(super) len: usize,
}

/// `frame[start..end]`.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    frame: Option<Frame>,
    start: usize,
    end: usize,
}

impl Inbox {
    pub(super) fn new(frame: Frame) -> Self {
        Self { frame: Some(frame), start: 0, end: 0 }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.frame.as_ref().map_or(&[], |frame| &frame.bytes()[self.start..self.end])
    }

    pub(super) fn consume(&mut self, count: usize) {
        debug_assert!(self.start + count <= self.end, "only what is there can be used");
        self.start += count;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Takes the frame for a receive of up to `wanted` bytes.
    pub(super) fn lend(&mut self, wanted: usize) -> Option<Room> {
        let mut frame = self.frame.take()?;
        debug_assert!(self.end - self.start < frame.len(), "the longest head fits");
        if self.start > 0 {
            frame.bytes_mut().copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let len = wanted.max(1).min(frame.len() - self.end);
        Some(Room { frame, start: self.end, len })
    }

    /// Takes the frame back after a receive that brought `count` bytes into it.
    pub(super) fn give(&mut self, frame: Frame, count: usize) {
        self.end += count;
        self.frame = Some(frame);
    }
}

#[cfg(test)]
mod tests {
    use byway_reactor::FramePool;

    use super::*;

    #[test]
    fn what_is_not_used_stays_in_front_of_what_comes() {
        let pool = FramePool::new(1).unwrap();
        let mut inbox = Inbox::new(pool.alloc(16).unwrap());
        for (bytes, used, left) in
            [(&b"abcdef"[..], 2, &b"cdef"[..]), (b"ghijkl", 7, b"jkl"), (b"mnopqrstuvwxy", 16, b"")]
        {
            let Room { mut frame, start, len } = inbox.lend(100).unwrap();
            assert!(bytes.len() <= len, "room for {} of {}", len, bytes.len());
            frame.write(start, bytes);
            inbox.give(frame, bytes.len());
            inbox.consume(used);
            assert_eq!(inbox.bytes(), left);
        }
        let Room { start, len, .. } = inbox.lend(5).unwrap();
        assert_eq!((start, len), (0, 5));
        assert!(inbox.lend(5).is_none(), "lent once");
    }
}
