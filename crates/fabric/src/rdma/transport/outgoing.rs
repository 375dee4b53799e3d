//! Outgoing data, and how it becomes operations of the device.
//!
//! The device reads from registered memory only. Frames of the pool are registered, and so are frames over other memory,
//! which is [registered](super::super::LocalMemory) when it is first used. All other data (headers, heads, zeroes, ranges of
//! mapped files) is first copied into frames; the reactor counts these copies where it reads a file.
//!
//! Memory that the kernel refuses to register is copied too. It is a program's, of any length. So it is copied when its turn
//! comes, as much at a time as the pool has room for, and the rest waits for frames ([`Uncopied`]): a pool with one spare
//! page moves it all.

use std::ops::Range;
use std::rc::Rc;

use byway_reactor::{Errno, Frame, FramePool, Gather, Part, Reactor};

use super::super::domain::WindowAddress;
use super::super::error::RdmaError;
use super::super::memory::{Payload, Segment};
use super::super::queue_pair::Work;
use super::adapter::Adapter;
use super::connection::{Ready, Step};
use crate::limits::{RDMA_INLINE_BYTES, SMALL_BYTES_MAX};
use crate::wire::HEADER_BYTES;

/// The smallest piece that a copy is cut into where the pool is cut up.
const PIECE_BYTES_MIN: usize = 4096;

/// What waits to be posted.
#[derive(Debug)]
pub(super) enum Outgoing {
    /// A header, and a small payload.
    Message { header: [u8; HEADER_BYTES], payload: Gather },
    /// Bytes for a window of the peer.
    Put { to: WindowAddress, payload: Gather },
}

impl Outgoing {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Message { payload, .. } => HEADER_BYTES + payload.len(),
            Self::Put { payload, .. } => payload.len(),
        }
    }

    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Self::Message { payload, .. } => HEADER_BYTES + payload.heap_bytes(),
            Self::Put { payload, .. } => payload.heap_bytes(),
        }
    }
}

/// Why something cannot be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LayError {
    /// There are no frames for a copy now. Nothing was taken.
    NoFrames,
    /// The payload cannot be had.
    Payload(Errno),
}

/// A message, ready for the device.
#[derive(Debug)]
pub(super) enum Laid {
    /// Short enough to be handed over with the operation.
    Inline { bytes: [u8; RDMA_INLINE_BYTES as usize], len: usize },
    /// In registered memory.
    Registered(Payload),
}

/// What a message or transfer needs to be posted.
pub(super) struct PostContext<'a> {
    pub(super) reactor: &'a mut Reactor,
    pub(super) adapter: &'a Adapter,
    /// Segments of one operation.
    pub(super) segments_max: usize,
    /// Bytes that the device takes inline.
    pub(super) inline_max: usize,
}

impl PostContext<'_> {
    /// A message becomes one operation.
    pub(super) fn message(&mut self, header: &[u8; HEADER_BYTES], payload: &mut Gather) -> Result<Laid, LayError> {
        let len = HEADER_BYTES + payload.len();
        debug_assert!(payload.len() <= SMALL_BYTES_MAX, "messages have small payloads");
        if len <= self.inline_max.min(RDMA_INLINE_BYTES as usize) {
            let mut bytes = [0; RDMA_INLINE_BYTES as usize];
            bytes[..HEADER_BYTES].copy_from_slice(header);
            self.copy(payload, &mut bytes[HEADER_BYTES..len])?;
            return Ok(Laid::Inline { bytes, len });
        }
        // A message is short: other memory than the pool's is copied, not registered.
        if payload.segment_count() < self.segments_max
            && payload.all_frames(|frame| self.adapter.region.contains(frame))
        {
            let pieces = self.pieces(header, payload)?;
            let segments: Result<Vec<Segment>, _> = pieces.into_iter().map(|piece| self.segment(piece)).collect();
            return segments
                .map(|segments| Laid::Registered(segments.into()))
                .map_err(|_| LayError::Payload(Errno::FAULT));
        }
        let mut frame = self.reactor.frames().alloc(len).ok_or(LayError::NoFrames)?;
        let (head, rest) = frame.bytes_mut()[..len].split_at_mut(HEADER_BYTES);
        head.copy_from_slice(header);
        self.copy(payload, rest)?;
        let segment =
            Segment::of_frame(&self.adapter.region, frame, 0..len).map_err(|_| LayError::Payload(Errno::FAULT))?;
        Ok(Laid::Registered(segment.into()))
    }

    /// A put becomes as many operations as its pieces need; the last one first, to be popped.
    pub(super) fn put(&mut self, to: WindowAddress, payload: &mut Gather) -> Result<Vec<Step>, LayError> {
        let (mut ready, mut group, mut offset) = (Vec::new(), Vec::new(), 0);
        let write = |group: &mut Vec<Segment>, offset: &mut u64| {
            let payload = Payload::from(std::mem::take(group));
            let to = to.at(std::mem::replace(offset, *offset + payload.len() as u64));
            Step::Ready(Ready::Write(Work::Write { payload, to }))
        };
        for piece in self.pieces(&[], payload)? {
            match self.segment(piece) {
                Ok(segment) => group.push(segment),
                Err((bytes, refused)) => {
                    tracing::debug!(%refused, len = bytes.len(), "memory that cannot be registered is copied");
                    if !group.is_empty() {
                        ready.push(write(&mut group, &mut offset));
                    }
                    let to = to.at(offset);
                    offset += bytes.len() as u64;
                    ready.push(Step::Uncopied(Uncopied { bytes, to }));
                }
            }
            if group.len() >= self.segments_max.max(1) {
                ready.push(write(&mut group, &mut offset));
            }
        }
        if !group.is_empty() {
            ready.push(write(&mut group, &mut offset));
        }
        ready.reverse();
        Ok(ready)
    }

    /// A piece in registered memory, or the bytes that cannot be.
    fn segment(&self, piece: Piece) -> Result<Segment, (Unregistered, RdmaError)> {
        match piece {
            Piece::Own(frame, start, len) => own_segment(self.adapter, frame, start..start + len)
                .map_err(|(frame, error)| (Unregistered { frame: Rc::new(frame), range: start..start + len }, error)),
            Piece::Shared(frame, start, len) => shared_segment(self.adapter, Rc::clone(&frame), start..start + len)
                .map_err(|error| (Unregistered { frame, range: start..start + len }, error)),
        }
    }

    /// `head` and a payload in frames, those of the pool where they are copies.
    fn pieces(&mut self, head: &[u8], payload: &mut Gather) -> Result<Vec<Piece>, LayError> {
        let mut copies = Copies::new(self.reactor.frames(), head.len() + payload.bytes_outside_frames())?;
        let mut pieces = Vec::with_capacity(payload.segment_count() + 1);
        let mut failed = Ok(());
        let reactor = &mut *self.reactor;
        copies.add(head.len(), &mut pieces, |at, into| {
            into.copy_from_slice(&head[at..at + into.len()]);
            Ok(())
        })?;
        payload.take_parts(|part| {
            let added = match part {
                Part::Frame { frame, start, len } => {
                    pieces.push(Found::Piece(Piece::Own(frame, start, len)));
                    Ok(())
                }
                Part::Shared { frame, start, len } => {
                    pieces.push(Found::Piece(Piece::Shared(frame, start, len)));
                    Ok(())
                }
                Part::Bytes(bytes) => copies.add(bytes.len(), &mut pieces, |at, into| {
                    into.copy_from_slice(&bytes[at..at + into.len()]);
                    Ok(())
                }),
                Part::Zeroes(len) => copies.add(len, &mut pieces, |_, into| {
                    into.fill(0);
                    Ok(())
                }),
                Part::Map { file, offset, len } => {
                    copies.add(len, &mut pieces, |at, into| read(reactor, file, offset + at as u64, into))
                }
            };
            if let (Err(error), Ok(())) = (added, failed) {
                failed = Err(error);
            }
        });
        failed?;
        let frames: Vec<Rc<Frame>> = copies.frames.into_iter().map(Rc::new).collect();
        let piece = |found| match found {
            Found::Copy(index, start, len) => Piece::Shared(Rc::clone(&frames[index]), start, len),
            Found::Piece(piece) => piece,
        };
        Ok(pieces.into_iter().map(piece).collect())
    }

    /// Copies a whole payload, which is as long as `into`.
    fn copy(&mut self, payload: &mut Gather, into: &mut [u8]) -> Result<(), LayError> {
        let (mut at, mut failed) = (0, Ok(()));
        let reactor = &mut *self.reactor;
        payload.take_parts(|part| {
            let rest = &mut into[at..];
            let (len, copied) = match part {
                Part::Bytes(bytes) => (bytes.len(), put_in(rest, bytes)),
                Part::Frame { frame, start, len } => (len, put_in_frame(rest, &frame, start..start + len)),
                Part::Shared { frame, start, len } => (len, put_in_frame(rest, &frame, start..start + len)),
                Part::Zeroes(len) => {
                    rest[..len].fill(0);
                    (len, Ok(()))
                }
                Part::Map { file, offset, len } => (len, read(reactor, file, offset, &mut rest[..len])),
            };
            at += len;
            if let (Err(error), Ok(())) = (copied, failed) {
                failed = Err(error);
            }
        });
        failed
    }
}

/// `range` of a frame, whose memory is registered if it is of no pool. The frame comes back if that is refused.
pub(super) fn own_segment(adapter: &Adapter, frame: Frame, range: Range<usize>) -> Result<Segment, (Frame, RdmaError)> {
    let frame = match Segment::of_frame(&adapter.region, frame, range.clone()) {
        Ok(segment) => return Ok(segment),
        Err(frame) => frame,
    };
    match adapter.local().register(&frame) {
        Ok(kept) => Segment::of_kept_frame(kept, frame, range).map_err(|frame| (frame, RdmaError::Range)),
        Err(error) => Err((frame, error)),
    }
}

fn shared_segment(adapter: &Adapter, frame: Rc<Frame>, range: Range<usize>) -> Result<Segment, RdmaError> {
    let frame = match Segment::of_shared_frame(&adapter.region, frame, range.clone()) {
        Ok(segment) => return Ok(segment),
        Err(frame) => frame,
    };
    let kept = adapter.local().register(&frame)?;
    Segment::of_kept_shared_frame(kept, frame, range).map_err(|_| RdmaError::Range)
}

/// The number that a program is told for memory that cannot be registered.
pub(super) fn errno_of(error: RdmaError) -> Errno {
    match error {
        RdmaError::System { errno, .. } => errno,
        RdmaError::MemoryLimit { .. } => Errno::NOMEM,
        _ => Errno::FAULT,
    }
}

fn put_in(into: &mut [u8], bytes: &[u8]) -> Result<(), LayError> {
    into[..bytes.len()].copy_from_slice(bytes);
    Ok(())
}

fn put_in_frame(into: &mut [u8], frame: &Frame, range: Range<usize>) -> Result<(), LayError> {
    frame.read(range.start, &mut into[..range.len()]);
    Ok(())
}

/// All of a range of a file: it is shorter now if there is less.
fn read(reactor: &mut Reactor, file: byway_reactor::File, offset: u64, into: &mut [u8]) -> Result<(), LayError> {
    match reactor.read_now(file, offset, into) {
        Ok(n) if n == into.len() => Ok(()),
        Ok(_) => Err(LayError::Payload(Errno::NODATA)),
        Err(error) => Err(LayError::Payload(error)),
    }
}

/// A piece of what is sent: where in a frame it starts, and its bytes.
enum Piece {
    Own(Frame, usize, usize),
    Shared(Rc<Frame>, usize, usize),
}

/// The same while it is not known which bytes will be copied behind it.
enum Found {
    /// Of a frame that was copied into, by its place in the list.
    Copy(usize, usize, usize),
    Piece(Piece),
}

/// Bytes that are in memory which cannot be registered.
#[derive(Debug)]
struct Unregistered {
    frame: Rc<Frame>,
    range: Range<usize>,
}

impl Unregistered {
    fn len(&self) -> usize {
        self.range.len()
    }
}

/// A part of a put that is still to be copied.
#[derive(Debug)]
pub(super) struct Uncopied {
    bytes: Unregistered,
    to: WindowAddress,
}

impl Uncopied {
    /// Copies as much as the pool has a frame for now, at least a page of it if that much is left: gives the copy, where it
    /// belongs, and the rest.
    ///
    /// # Errors
    /// All of it, if there is no frame.
    pub(super) fn copy(self, pool: &FramePool) -> Result<(Frame, WindowAddress, Option<Self>), Self> {
        let Some(mut copy) = pool.alloc_largest(self.bytes.len(), PIECE_BYTES_MIN) else { return Err(self) };
        let Self { bytes: Unregistered { frame, range }, to } = self;
        let len = copy.len();
        copy.copy_from(0, &frame, range.start..range.start + len);
        let rest = Unregistered { frame, range: range.start + len..range.end };
        Ok((copy, to, (rest.len() > 0).then(|| Self { bytes: rest, to: to.at(len as u64) })))
    }
}

/// Frames that are copied into, one after the other.
struct Copies {
    frames: Vec<Frame>,
    frame: usize,
    filled: usize,
}

impl Copies {
    /// Frames for `len` bytes in all.
    fn new(pool: &FramePool, mut len: usize) -> Result<Self, LayError> {
        let mut frames = Vec::new();
        while len > 0 {
            let frame = pool.alloc_largest(len, PIECE_BYTES_MIN).ok_or(LayError::NoFrames)?;
            len -= frame.len().min(len);
            frames.push(frame);
        }
        Ok(Self { frames, frame: 0, filled: 0 })
    }

    /// Adds `len` bytes, which `fill` writes, piece by piece; it is told how many it wrote before.
    fn add(
        &mut self,
        len: usize,
        pieces: &mut Vec<Found>,
        mut fill: impl FnMut(usize, &mut [u8]) -> Result<(), LayError>,
    ) -> Result<(), LayError> {
        let mut done = 0;
        while done < len {
            let Some(frame) = self.frames.get_mut(self.frame) else { return Err(LayError::NoFrames) };
            let part = (frame.len() - self.filled).min(len - done);
            if part == 0 {
                (self.frame, self.filled) = (self.frame + 1, 0);
                continue;
            }
            fill(done, &mut frame.bytes_mut()[self.filled..self.filled + part])?;
            match pieces.last_mut() {
                Some(Found::Copy(index, start, so_far)) if *index == self.frame && *start + *so_far == self.filled => {
                    *so_far += part;
                }
                _ => pieces.push(Found::Copy(self.frame, self.filled, part)),
            }
            self.filled += part;
            done += part;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool() -> FramePool {
        FramePool::new(1).unwrap()
    }

    #[test]
    fn copies_fill_one_frame_after_the_other_and_neighbours_are_one_piece() {
        let pool = pool();
        let mut copies = Copies::new(&pool, 10).unwrap();
        let mut pieces = Vec::new();
        let mut add = |bytes: &[u8]| {
            copies.add(bytes.len(), &mut pieces, |at, into| put_in(into, &bytes[at..at + into.len()])).unwrap();
        };
        add(b"head");
        add(b"more");
        assert!(matches!(pieces[..], [Found::Copy(0, 0, 8)]));
        assert_eq!(copies.frames[0].to_vec()[..8], *b"headmore");
        let too_much = copies.add(3, &mut pieces, |_, _| Ok(()));
        assert_eq!(too_much, Err(LayError::NoFrames), "no more than was said");
    }

    #[test]
    fn a_copy_is_cut_where_the_pool_is_and_nothing_is_kept_without_frames() {
        let pool = pool();
        let free = pool.free_bytes();
        let mut all: Vec<Frame> = std::iter::from_fn(|| pool.alloc(4096)).collect();
        all.sort_by_key(|frame| frame.as_ptr() as usize);
        let mut at = 0;
        all.retain(|_| (at % 2 == 0, at += 1).0);
        let copies = Copies::new(&pool, 10_000).unwrap();
        assert_eq!(copies.frames.iter().map(Frame::len).collect::<Vec<_>>(), [4096, 4096, 1808]);
        drop(copies);
        let before = pool.free_bytes();
        assert_eq!(Copies::new(&pool, free).map(|_| ()), Err(LayError::NoFrames));
        assert_eq!(pool.free_bytes(), before);
    }

    #[test]
    fn what_cannot_be_registered_goes_in_the_pieces_that_the_pool_has_and_waits_for_them() {
        let (pool, program) = (pool(), pool());
        let mut frame = program.alloc(30_000).unwrap();
        (0..30_000).for_each(|at| frame.bytes_mut()[at] = (at / 7) as u8);
        let start = WindowAddress { address: 1 << 40, rkey: 5 };
        let bytes = Unregistered { frame: Rc::new(frame), range: 100..29_000 };
        let mut all: Vec<Frame> = std::iter::from_fn(|| pool.alloc(4096)).collect();
        let waiting = Uncopied { bytes, to: start }.copy(&pool).expect_err("there is no frame");
        all.sort_by_key(|frame| frame.as_ptr() as usize);
        let mut at = 0;
        all.retain(|_| (at % 2 == 0, at += 1).0);
        let (mut left, mut came, mut pieces) = (Some(waiting), Vec::new(), 0);
        while let Some(uncopied) = left {
            let (copy, to, rest) = uncopied.copy(&pool).expect("a page is free");
            assert_eq!(to, start.at(came.len() as u64), "each where it belongs");
            came.extend(copy.to_vec());
            (left, pieces) = (rest, pieces + 1);
        }
        assert!(came.len() == 28_900 && (0..28_900).all(|at| came[at] == ((at + 100) / 7) as u8));
        assert_eq!(pieces, 8, "pages");
        assert_eq!(program.free_bytes(), program.bytes(), "nobody holds the program's memory any more");
    }
}
