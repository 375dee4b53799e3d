//! Sources of sends and destinations of receives: lists of pieces of memory and of mapped files.

use std::rc::Rc;

use crate::frame::{COPY_BYTES, Frame};
use crate::op::File;

/// One piece of a [`Gather`].
#[derive(Debug)]
pub(crate) enum Segment {
    /// `heads[start..start + len]`.
    Head { start: u32, len: u32 },
    /// A frame's bytes.
    Frame { frame: FrameRef, start: usize, len: usize },
    /// A mapped file's bytes, not copied in user space.
    Map { file: File, offset: u64, len: usize },
    /// Zeroes.
    Zero { len: usize },
}

/// A frame that a send keeps: its own, or one that others read too.
#[derive(Debug)]
pub(crate) enum FrameRef {
    Own(Frame),
    Shared(Rc<Frame>),
}

impl FrameRef {
    /// The frame.
    pub(crate) fn frame(&self) -> &Frame {
        match self {
            Self::Own(frame) => frame,
            Self::Shared(frame) => frame,
        }
    }
}

/// A piece of a [`Gather`], for sending it by other means than a socket: see [`Gather::take_parts`].
#[derive(Debug)]
pub enum Part<'a> {
    /// Small heads.
    Bytes(&'a [u8]),
    /// `frame[start..start + len]`.
    Frame {
        /// The memory.
        frame: Frame,
        /// First byte.
        start: usize,
        /// Bytes.
        len: usize,
    },
    /// The same of a frame that others keep as well.
    Shared {
        /// The memory.
        frame: Rc<Frame>,
        /// First byte.
        start: usize,
        /// Bytes.
        len: usize,
    },
    /// A range of a mapped file, which [`Reactor::read_now`](crate::Reactor::read_now) reads.
    Map {
        /// The file.
        file: File,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: usize,
    },
    /// So many zeroes.
    Zeroes(usize),
}

/// Memory for heads that a cleared gather keeps, in bytes: the headers of 64 messages of byway's own protocol. Each connection has two
/// gathers, so thousands of idle ones keep little.
const HEAD_BYTES_KEPT: usize = 8 << 10;
/// Segments that a cleared gather keeps room for.
const SEGMENTS_KEPT: usize = 128;
/// Bytes of heads that were taken off the front, above which the rest is moved there.
const TAKEN_HEAD_BYTES_MAX: usize = 64 << 10;

impl Segment {
    /// Forgets the first `n` bytes, fewer than there are.
    fn skip(&mut self, n: usize) {
        match self {
            Self::Head { start, len } => (*start, *len) = (*start + n as u32, *len - n as u32),
            Self::Frame { start, len, .. } => (*start, *len) = (*start + n, *len - n),
            Self::Map { offset, len, .. } => (*offset, *len) = (*offset + n as u64, *len - n),
            Self::Zero { len } => *len -= n,
        }
    }

    /// Bytes of the frame that comes back to its pool with the segment.
    fn own_frame_bytes(&self) -> usize {
        match self {
            Self::Frame { frame: FrameRef::Own(frame), .. } => frame.capacity(),
            _ => 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Head { len, .. } => *len as usize,
            Self::Frame { len, .. } | Self::Map { len, .. } | Self::Zero { len } => *len,
        }
    }
}

/// The bytes of one send, in order: small heads (copied in), frames (owned), ranges of mapped files, zeroes.
///
/// A gather is reused: [`Gather::clear`] keeps its memory.
#[derive(Debug, Default)]
pub struct Gather {
    pub(crate) heads: Vec<u8>,
    pub(crate) segments: Vec<Segment>,
    len: usize,
    frame_bytes: usize,
}

impl Gather {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes in all.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Heap memory that it holds besides frames: small heads, and a note of each piece.
    pub fn heap_bytes(&self) -> usize {
        self.heads.len() + self.segments.len() * size_of::<Segment>()
    }

    /// Bytes of frames of its own that it keeps from their pool.
    pub fn frame_bytes(&self) -> usize {
        self.frame_bytes
    }

    /// No bytes?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Pieces; neighbouring heads are one.
    pub fn segment_count(&self) -> usize {
        self.segments.len()
    }

    /// Appends bytes by copying them: for headers and small payloads.
    pub fn push_head(&mut self, bytes: &[u8]) {
        let start = self.heads.len();
        self.heads.extend_from_slice(bytes);
        self.note_heads_from(start);
    }

    /// Appends what `write` appends to the buffer of heads, without a copy in between.
    pub fn push_head_with<R>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        let start = self.heads.len();
        let result = write(&mut self.heads);
        debug_assert!(self.heads.len() >= start, "heads may only grow");
        self.note_heads_from(start);
        result
    }

    fn note_heads_from(&mut self, start: usize) {
        let added = self.heads.len() - start;
        if added == 0 {
            return;
        }
        self.len += added;
        if let Some(Segment::Head { start: first, len }) = self.segments.last_mut()
            && (*first + *len) as usize == start
        {
            *len += added as u32;
            return;
        }
        self.segments.push(Segment::Head { start: start as u32, len: added as u32 });
    }

    /// Appends `frame[start..start + len]`; the frame comes back to its pool when the gather is cleared.
    pub fn push_frame(&mut self, frame: Frame, start: usize, len: usize) {
        assert!(start + len <= frame.len(), "range within the frame");
        if len > 0 {
            self.len += len;
            self.frame_bytes += frame.capacity();
            let frame = FrameRef::Own(frame);
            self.segments.push(Segment::Frame { frame, start, len });
        }
    }

    /// Appends `frame[start..start + len]` of a frame that others keep as well: sent again later, or in several pieces.
    pub fn push_shared(&mut self, frame: Rc<Frame>, start: usize, len: usize) {
        assert!(start + len <= frame.len(), "range within the frame");
        if len > 0 {
            self.len += len;
            let frame = FrameRef::Shared(frame);
            self.segments.push(Segment::Frame { frame, start, len });
        }
    }

    /// Appends `len` bytes of a file opened with a mapping, at `offset`.
    ///
    /// The range must lie in the mapping, else the send answers `EFAULT`. It should be resident
    /// ([`Reactor::resident`](crate::Reactor::resident)): a page that is not makes the loop wait for the disk.
    pub fn push_map(&mut self, file: File, offset: u64, len: usize) {
        if len > 0 {
            self.len += len;
            self.segments.push(Segment::Map { file, offset, len });
        }
    }

    /// Appends `len` zeroes.
    pub fn push_zeroes(&mut self, len: usize) {
        if len > 0 {
            self.len += len;
            self.segments.push(Segment::Zero { len });
        }
    }

    /// Gives the bytes at the front to `take`, piece by piece, for a stream that encrypts them. `take` says how many it
    /// took; less than it was given is the end, and so is a range of a mapped file: those are never read by us. What was
    /// taken is forgotten, and frames of which nothing is left go back to their pool. Gives how many bytes were taken.
    pub fn take_front(&mut self, mut take: impl FnMut(&[u8]) -> usize) -> usize {
        const ZEROES: [u8; COPY_BYTES] = [0; COPY_BYTES];
        let mut copy = [0; COPY_BYTES];
        let (mut whole, mut total) = (0, 0);
        while let Some(segment) = self.segments.get_mut(whole) {
            let bytes = match segment {
                Segment::Head { start, len } => &self.heads[*start as usize..][..*len as usize],
                Segment::Frame { frame, start, len } if frame.frame().is_private() => {
                    &frame.frame().bytes()[*start..][..*len]
                }
                Segment::Frame { frame, start, len } => {
                    let piece = &mut copy[..COPY_BYTES.min(*len)];
                    frame.frame().read(*start, piece);
                    piece
                }
                Segment::Zero { len } => &ZEROES[..ZEROES.len().min(*len)],
                Segment::Map { .. } => break,
            };
            let (given, taken) = (bytes.len(), take(bytes));
            total += taken;
            if taken == segment.len() {
                whole += 1;
                continue;
            }
            segment.skip(taken);
            if taken < given {
                break;
            }
        }
        let given_back: usize = self.segments.drain(..whole).map(|segment| segment.own_frame_bytes()).sum();
        self.frame_bytes -= given_back;
        self.len -= total;
        self.forget_taken_heads();
        total
    }

    /// Moves pieces from the front to the end of `to`, as many as have `max` bytes together at most, but one at least. Heads are
    /// cut where they are too long.
    pub fn move_front(&mut self, to: &mut Self, max: usize) {
        let (mut count, mut total) = (0, 0);
        while let Some(segment) = self.segments.get(count)
            && (total + segment.len() <= max || (count == 0 && !matches!(segment, Segment::Head { .. })))
        {
            (count, total) = (count + 1, total + segment.len());
        }
        for segment in self.segments.drain(..count) {
            if let Segment::Head { start, len } = segment {
                to.push_head(&self.heads[start as usize..][..len as usize]);
                continue;
            }
            let frame_bytes = segment.own_frame_bytes();
            self.frame_bytes -= frame_bytes;
            to.frame_bytes += frame_bytes;
            to.len += segment.len();
            to.segments.push(segment);
        }
        if let Some(first @ Segment::Head { .. }) = self.segments.first_mut()
            && total < max
        {
            // It was too long as a whole.
            let n = max - total;
            if let Segment::Head { start, .. } = first {
                to.push_head(&self.heads[*start as usize..][..n]);
            }
            first.skip(n);
            total += n;
        }
        self.len -= total;
        self.forget_taken_heads();
    }

    /// Lets go of the memory of heads that were taken off the front, once that is most of it.
    fn forget_taken_heads(&mut self) {
        let mut first = None;
        for segment in &self.segments {
            if let Segment::Head { start, .. } = segment {
                first = Some(*start);
                break;
            }
        }
        let Some(first) = first else { return self.heads.clear() };
        if first as usize <= TAKEN_HEAD_BYTES_MAX.max(self.heads.len() / 2) {
            return;
        }
        self.heads.drain(..first as usize);
        for segment in &mut self.segments {
            if let Segment::Head { start, .. } = segment {
                *start -= first;
            }
        }
    }

    /// Bytes that do not lie in frames: a sender that sends only from frames has to copy them.
    pub fn bytes_outside_frames(&self) -> usize {
        let outside = |segment: &&Segment| !matches!(segment, Segment::Frame { .. });
        self.segments.iter().filter(outside).map(Segment::len).sum()
    }

    /// Whether `is_fine` says so of each frame.
    pub fn all_frames(&self, mut is_fine: impl FnMut(&Frame) -> bool) -> bool {
        self.segments.iter().all(|segment| match segment {
            Segment::Frame { frame: FrameRef::Own(frame), .. } => is_fine(frame),
            Segment::Frame { frame: FrameRef::Shared(frame), .. } => is_fine(frame),
            Segment::Head { .. } | Segment::Map { .. } | Segment::Zero { .. } => true,
        })
    }

    /// Takes all pieces out, in order.
    pub fn take_parts(&mut self, mut each: impl FnMut(Part<'_>)) {
        for segment in self.segments.drain(..) {
            each(match segment {
                Segment::Head { start, len } => Part::Bytes(&self.heads[start as usize..][..len as usize]),
                Segment::Frame { frame: FrameRef::Own(frame), start, len } => Part::Frame { frame, start, len },
                Segment::Frame { frame: FrameRef::Shared(frame), start, len } => Part::Shared { frame, start, len },
                Segment::Map { file, offset, len } => Part::Map { file, offset, len },
                Segment::Zero { len } => Part::Zeroes(len),
            });
        }
        self.clear();
    }

    /// Forgets all pieces (frames go back to their pool) and keeps the memory of the lists, unless it is unusually much.
    pub fn clear(&mut self) {
        self.heads.clear();
        // A small rest of a large block would keep what the allocator has around it from ever being one piece again.
        if self.heads.capacity() > HEAD_BYTES_KEPT {
            self.heads = Vec::new();
        }
        self.segments.clear();
        self.segments.shrink_to(SEGMENTS_KEPT);
        (self.len, self.frame_bytes) = (0, 0);
    }
}

/// Memory that a receive fills, in order: ranges of frames.
#[derive(Debug, Default)]
pub struct Scatter {
    pub(crate) pieces: Vec<FrameRange>,
    len: usize,
}

/// `frame[start..start + len]`, of a frame or of one that others keep as well (`Rc<Frame>`).
#[derive(Clone, Debug)]
pub struct FrameRange<F = Frame> {
    /// The memory.
    pub frame: F,
    /// First byte.
    pub start: usize,
    /// Bytes.
    pub len: usize,
}

impl<F> FrameRange<F> {
    /// `len` bytes from `start` on.
    pub const fn new(frame: F, start: usize, len: usize) -> Self {
        Self { frame, start, len }
    }

    /// The byte behind the last.
    pub const fn end(&self) -> usize {
        self.start + self.len
    }
}

impl Scatter {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// `frame[start..start + len]` alone.
    pub fn one(frame: Frame, start: usize, len: usize) -> Self {
        let mut scatter = Self::new();
        scatter.push(frame, start, len);
        scatter
    }

    /// Appends `frame[start..start + len]`.
    pub fn push(&mut self, frame: Frame, start: usize, len: usize) {
        assert!(start + len <= frame.len(), "range within the frame");
        self.len += len;
        self.pieces.push(FrameRange { frame, start, len });
    }

    /// Bytes in all.
    pub fn len(&self) -> usize {
        self.len
    }

    /// No bytes?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many of the first `n` bytes lie in a device.
    pub(crate) fn device_bytes(&self, n: usize) -> usize {
        let mut left = n;
        let mut device = 0;
        for piece in &self.pieces {
            let part = piece.len.min(left);
            left -= part;
            device += if piece.frame.is_device() { part } else { 0 };
        }
        device
    }

    /// Takes the pieces out, in order, and keeps the memory of the list.
    pub fn drain(&mut self) -> impl Iterator<Item = FrameRange> + '_ {
        self.len = 0;
        self.pieces.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FramePool;

    /// Heads, frames and zeroes in turn, and the bytes that they are.
    fn mixed(pool: &FramePool) -> (Gather, Vec<u8>) {
        let (mut gather, mut bytes) = (Gather::new(), Vec::new());
        for round in 0..5u8 {
            let mut frame = pool.alloc(4096).unwrap();
            frame.fill(round);
            gather.push_head(&[round + 100; 20_000]);
            gather.push_frame(frame, 10, 3000);
            gather.push_zeroes(5000);
            bytes.extend([round + 100; 20_000]);
            bytes.extend([round; 3000]);
            bytes.extend([0; 5000]);
        }
        (gather, bytes)
    }

    #[test]
    fn the_front_is_moved_piece_by_piece_and_nothing_is_lost() {
        let pool = FramePool::new(1 << 20).unwrap();
        let free = pool.free_bytes();
        for max in [1, 5000, 23_000, 60_000, 1 << 20] {
            let (mut gather, expected) = mixed(&pool);
            let (whole, frames) = (gather.len(), gather.frame_bytes());
            let mut moved = Vec::new();
            while !gather.is_empty() {
                let mut to = Gather::new();
                gather.move_front(&mut to, max);
                let is_whole = to.segment_count() == 1 && (to.len() == 3000 || to.len() == 5000);
                assert!(!to.is_empty() && (to.len() <= max || is_whole), "{} of {max}", to.len());
                let left = whole - moved.len() - to.len();
                assert_eq!((gather.len(), gather.frame_bytes() + to.frame_bytes() <= frames), (left, true));
                to.take_front(|bytes| {
                    moved.extend_from_slice(bytes);
                    bytes.len()
                });
                assert_eq!((to.len(), to.frame_bytes()), (0, 0));
            }
            assert!(moved == expected, "{max}");
            assert_eq!((gather.heap_bytes(), gather.frame_bytes(), pool.free_bytes()), (0, 0, free));
        }
    }

    #[test]
    fn the_front_is_taken_in_any_pieces_and_frames_go_back() {
        let pool = FramePool::new(1 << 20).unwrap();
        for step in [1, 3, 7, 4096, 100_000] {
            let free = pool.free_bytes();
            let (mut gather, mut expected) = mixed(&pool);
            let mut taken = Vec::new();
            while !gather.is_empty() {
                let mut room = step;
                let n = gather.take_front(|bytes| {
                    let n = room.min(bytes.len());
                    taken.extend_from_slice(&bytes[..n]);
                    room -= n;
                    n
                });
                assert_eq!(n, step.min(n + gather.len()));
                if taken.len() == 28_000 {
                    gather.push_head(b"behind");
                    expected.extend(b"behind");
                }
            }
            assert!(taken == expected);
            assert_eq!((pool.free_bytes(), gather.heads.len(), gather.frame_bytes()), (free, 0, 0));
        }
    }

    #[test]
    fn heads_of_a_gather_that_never_runs_empty_do_not_grow() {
        let mut gather = Gather::new();
        for round in 0..10_000 {
            gather.push_head(&[7; 100]);
            if round > 10 {
                let mut room = 100;
                gather.take_front(|bytes| std::mem::replace(&mut room, 0).min(bytes.len()));
            }
        }
        assert!(gather.heads.capacity() <= 8 * TAKEN_HEAD_BYTES_MAX, "{}", gather.heads.capacity());
    }

    /// What a client that asks much and takes nothing made its connection gather must not stay with the connection.
    #[test]
    fn a_cleared_gather_keeps_little_memory() {
        let mut gather = Gather::new();
        for _ in 0..1000 {
            gather.push_head(&[7; 2000]);
            gather.push_zeroes(1);
        }
        assert!(gather.heads.capacity() >= 2_000_000);
        gather.clear();
        assert!(gather.heads.capacity() <= HEAD_BYTES_KEPT, "{}", gather.heads.capacity());
        assert!(gather.segments.capacity() <= SEGMENTS_KEPT, "{}", gather.segments.capacity());
    }
}
