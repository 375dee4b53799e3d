//! Received bytes that were not used yet.
//!
//! The room offered to a receive decides how much is copied. While small reads are in flight, the receive gets all room, so
//! that one call brings many replies, whose payloads are copied out. While large reads are in flight, it gets room for the
//! header of a reply only, so that the payload is received directly into its destination.

use byway_reactor::Frame;

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

    /// Takes the frame for a receive of up to `wanted` bytes: the frame, where to, how many at most.
    pub(super) fn lend(&mut self, wanted: usize) -> Option<(Frame, usize, usize)> {
        let mut frame = self.frame.take()?;
        debug_assert!(self.end - self.start < frame.len(), "the longest head fits");
        if self.start > 0 {
            frame.bytes_mut().copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let room = frame.len() - self.end;
        Some((frame, self.end, wanted.max(1).min(room)))
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
            let (mut frame, start, room) = inbox.lend(100).unwrap();
            assert!(bytes.len() <= room, "room for {} of {}", room, bytes.len());
            frame.write(start, bytes);
            inbox.give(frame, bytes.len());
            inbox.consume(used);
            assert_eq!(inbox.bytes(), left);
        }
        let (_, start, room) = inbox.lend(5).unwrap();
        assert_eq!((start, room), (0, 5));
        assert!(inbox.lend(5).is_none(), "lent once");
    }
}
