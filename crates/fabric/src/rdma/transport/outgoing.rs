//! What is to be sent, and how it becomes operations of the device.
//!
//! The device reads from registered memory alone: frames of the pool go as they are, and so do frames over other memory,
//! which is [registered](super::super::LocalMemory) when it is first used. All else (headers, heads, zeroes, ranges of mapped
//! files) is copied into frames first, which the reactor counts where it reads a file; so is memory that the kernel does not
//! let us register.

use std::ops::Range;
use std::rc::Rc;

use byway_reactor::{Errno, Frame, FramePool, Gather, Part, Reactor};

use super::super::domain::WindowAddress;
use super::super::error::RdmaError;
use super::super::memory::{Payload, Segment};
use super::super::queue_pair::Work;
use super::adapter::Adapter;
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

/// What laying needs.
pub(super) struct Layer<'a> {
    pub(super) reactor: &'a mut Reactor,
    pub(super) adapter: &'a Adapter,
    /// Segments of one operation.
    pub(super) segments_max: usize,
    /// Bytes that the device takes inline.
    pub(super) inline_max: usize,
}

impl Layer<'_> {
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
        if payload.segment_count() < self.segments_max {
            let segments = self.segments(header, payload)?;
            return Ok(Laid::Registered(segments.into()));
        }
        let mut frame = self.reactor.frames().alloc(len).ok_or(LayError::NoFrames)?;
        frame[..HEADER_BYTES].copy_from_slice(header);
        self.copy(payload, &mut frame[HEADER_BYTES..len])?;
        let segment =
            Segment::of_frame(&self.adapter.region, frame, 0..len).map_err(|_| LayError::Payload(Errno::FAULT))?;
        Ok(Laid::Registered(segment.into()))
    }

    /// A put becomes as many operations as its pieces need; the last one first, to be popped.
    pub(super) fn put(&mut self, to: WindowAddress, payload: &mut Gather) -> Result<Vec<Work>, LayError> {
        let mut segments = self.segments(&[], payload)?.into_iter().peekable();
        let (mut works, mut offset) = (Vec::new(), 0);
        while segments.peek().is_some() {
            let group: Vec<Segment> = segments.by_ref().take(self.segments_max.max(1)).collect();
            let len: usize = group.iter().map(Segment::len).sum();
            works.push(Work::Write { payload: group.into(), to: to.at(offset) });
            offset += len as u64;
        }
        works.reverse();
        Ok(works)
    }

    /// `head` and a payload in registered memory.
    fn segments(&mut self, head: &[u8], payload: &mut Gather) -> Result<Vec<Segment>, LayError> {
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
                    pieces.push(Piece::Own(frame, start, len));
                    Ok(())
                }
                Part::Shared { frame, start, len } => {
                    pieces.push(Piece::Shared(frame, start, len));
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
        let segment = |piece| {
            let adapter = self.adapter;
            match piece {
                Piece::Copy(index, start, len) => {
                    shared_segment(adapter, Rc::clone(&frames[index]), start..start + len)
                }
                Piece::Own(frame, start, len) => {
                    own_segment(adapter, frame, start..start + len).or_else(|(frame, error)| {
                        copied_segment(adapter, self.reactor.frames(), &frame[start..start + len], error)
                    })
                }
                Piece::Shared(frame, start, len) => shared_segment(adapter, Rc::clone(&frame), start..start + len)
                    .or_else(|error| copied_segment(adapter, self.reactor.frames(), &frame[start..start + len], error)),
            }
            .map_err(|error| LayError::Payload(errno_of(error)))
        };
        pieces.into_iter().map(segment).collect()
    }

    /// Copies a whole payload, which is as long as `into`.
    fn copy(&mut self, payload: &mut Gather, into: &mut [u8]) -> Result<(), LayError> {
        let (mut at, mut failed) = (0, Ok(()));
        let reactor = &mut *self.reactor;
        payload.take_parts(|part| {
            let rest = &mut into[at..];
            let (len, copied) = match part {
                Part::Bytes(bytes) => (bytes.len(), put_in(rest, bytes)),
                Part::Frame { frame, start, len } => (len, put_in(rest, &frame[start..start + len])),
                Part::Shared { frame, start, len } => (len, put_in(rest, &frame[start..start + len])),
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

/// A copy of memory that cannot be registered, in the pool; `refused` if there is no room for it.
fn copied_segment(adapter: &Adapter, pool: &FramePool, bytes: &[u8], refused: RdmaError) -> Result<Segment, RdmaError> {
    tracing::debug!(%refused, bytes = bytes.len(), "a payload is copied, since its memory cannot be registered");
    let mut copy = pool.alloc(bytes.len()).ok_or(refused)?;
    copy[..bytes.len()].copy_from_slice(bytes);
    Segment::of_frame(&adapter.region, copy, 0..bytes.len()).map_err(|_| refused)
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

/// All of a range of a file: it is shorter now if there is less.
fn read(reactor: &mut Reactor, file: byway_reactor::File, offset: u64, into: &mut [u8]) -> Result<(), LayError> {
    match reactor.read_now(file, offset, into) {
        Ok(n) if n == into.len() => Ok(()),
        Ok(_) => Err(LayError::Payload(Errno::NODATA)),
        Err(error) => Err(LayError::Payload(error)),
    }
}

/// A piece of what is sent.
enum Piece {
    /// Of a frame that was copied into, by its place in the list.
    Copy(usize, usize, usize),
    Own(Frame, usize, usize),
    Shared(Rc<Frame>, usize, usize),
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
        pieces: &mut Vec<Piece>,
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
            fill(done, &mut frame[self.filled..self.filled + part])?;
            match pieces.last_mut() {
                Some(Piece::Copy(index, start, so_far)) if *index == self.frame && *start + *so_far == self.filled => {
                    *so_far += part;
                }
                _ => pieces.push(Piece::Copy(self.frame, self.filled, part)),
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
        assert!(matches!(pieces[..], [Piece::Copy(0, 0, 8)]));
        assert_eq!(copies.frames[0][..8], *b"headmore");
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
}
