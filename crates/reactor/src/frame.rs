//! Frames: page-aligned memory from one pool of a fixed size, the only memory that data passes through.
//!
//! A pool belongs to one loop. It is one mapping, made once, carved by a buddy allocator into blocks of 4 KiB to
//! [`FRAME_BYTES_MAX`](crate::limits::FRAME_BYTES_MAX), so that the kernel and a NIC register it once and payloads
//! stay page-aligned (a reply that lies 16 bytes off a page boundary is received 10 times slower on some CPUs).
//! An empty pool answers `None`: the caller queues, nothing grows.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::rc::Rc;

use crate::bytewise;
use crate::limits::{ARENA_BYTES_MAX, FRAME_BYTES_MAX, FRAME_BYTES_MIN, POOL_BYTES_MAX};
use crate::mapping::{Mapping, Use};
use crate::region::Region;

/// Bytes that are copied at a time where they are looked at and may change.
pub(crate) const COPY_BYTES: usize = 4096;

const ORDERS: usize = (FRAME_BYTES_MAX / FRAME_BYTES_MIN).ilog2() as usize + 1;

fn whole_bytes(bytes: usize) -> usize {
    bytes.max(1).next_multiple_of(FRAME_BYTES_MAX)
}

/// A bounded pool of frames. Cloning it gives another handle to the same pool.
#[derive(Clone)]
pub struct FramePool {
    inner: Rc<Inner>,
}

struct Inner {
    region: Region,
    /// The file that an arena lies in.
    file: Option<OwnedFd>,
    /// Some of it lies there no longer: it is no arena any more.
    revoked: Cell<bool>,
    /// Whether it lies in a device.
    device: bool,
    buddies: RefCell<Buddies>,
}

/// Free blocks by order; block numbers count in units of [`FRAME_BYTES_MIN`].
struct Buddies {
    free: [Vec<u32>; ORDERS],
    /// Per smallest block: `order + 1` where a free block starts, else 0; and its place in `free`.
    free_order: Vec<u8>,
    place: Vec<u32>,
    free_bytes: usize,
    given_back: u64,
}

/// A piece of memory from a [`FramePool`], given back when dropped.
///
/// Its start and capacity are multiples of 4 KiB. [`Frame::len`] is what was asked for. A frame over a range of a
/// [`Mapping`] ([`Frame::over`]) lies wherever that range does.
pub struct Frame {
    home: Home,
    len: usize,
}

/// Where a frame's memory belongs.
enum Home {
    Pool { pool: Rc<Inner>, block: u32, order: u8 },
    Mapping { mapping: Use, start: usize },
}

impl FramePool {
    /// Maps a pool of `bytes` (rounded up to the largest frame). Pages are touched when first used.
    ///
    /// # Errors
    /// `InvalidInput` for more than [`POOL_BYTES_MAX`]; else the kernel's, if the memory cannot be mapped.
    pub fn new(bytes: usize) -> std::io::Result<Self> {
        if bytes > POOL_BYTES_MAX {
            return Err(rustix::io::Errno::INVAL.into());
        }
        Ok(Self::over(Region::private(whole_bytes(bytes))?, None, false))
    }

    /// An *arena*: a pool whose memory can be lent to the peer of a stream over shared memory
    /// ([`Reactor::lend_arena`](crate::Reactor::lend_arena)), which then copies straight into its frames and out of them.
    /// It lies in a sealed anonymous file. Bytes of its frames are copied in and out ([`Frame::read`], [`Frame::write`]): the
    /// peer may change them at any time.
    ///
    /// The peer can read and write all of it, at any time, as long as its process has it mapped; [`FramePool::revoke`] takes single
    /// frames away. So an arena is for one peer, holds nothing that the peer may not see, and what was received in it is
    /// the peer's word until it was copied. A peer that goes on writing after its stream has ended spoils what later users
    /// find in the frames: another peer gets another arena.
    ///
    /// # Errors
    /// `InvalidInput` for more than [`ARENA_BYTES_MAX`]; else the kernel's, if the memory cannot be had.
    pub fn shared(bytes: usize) -> std::io::Result<Self> {
        if bytes > ARENA_BYTES_MAX {
            return Err(rustix::io::Errno::INVAL.into());
        }
        let (region, fd) = Region::sealed("byway-arena", whole_bytes(bytes))?;
        Ok(Self::over(region, Some(fd), false))
    }

    /// A pool over a mapping of a device's memory, which it takes over and unmaps in the end. Such frames are for the kernel
    /// to move bytes to and from. Reading them with the CPU is slow, since they are not cached; once the device is removed
    /// it ends the process (`SIGBUS`), where the kernel answers `EFAULT`.
    ///
    /// # Safety
    /// `base` is the start of a shared mapping for reading and writing of `bytes`, a multiple of [`FRAME_BYTES_MAX`], which no
    /// other code uses or unmaps.
    pub(crate) unsafe fn of_device(base: NonNull<u8>, bytes: usize) -> Self {
        // SAFETY: by the caller's word.
        Self::over(unsafe { Region::of_mapping(base, bytes) }, None, true)
    }

    fn over(region: Region, file: Option<OwnedFd>, device: bool) -> Self {
        let bytes = region.bytes();
        let blocks = bytes / FRAME_BYTES_MIN;
        let mut buddies = Buddies {
            free: Default::default(),
            free_order: vec![0; blocks],
            place: vec![0; blocks],
            free_bytes: bytes,
            given_back: 0,
        };
        for first in (0..blocks).step_by(FRAME_BYTES_MAX / FRAME_BYTES_MIN).rev() {
            buddies.put(first as u32, ORDERS - 1);
        }
        Self {
            inner: Rc::new(Inner { region, file, revoked: Cell::new(false), device, buddies: RefCell::new(buddies) }),
        }
    }

    /// A frame of `len` bytes (1 to [`FRAME_BYTES_MAX`]), or `None` when the pool has no room for it now.
    /// The contents are whatever an earlier user left.
    pub fn alloc(&self, len: usize) -> Option<Frame> {
        if len == 0 || len > FRAME_BYTES_MAX {
            return None;
        }
        let order = len.div_ceil(FRAME_BYTES_MIN).next_power_of_two().ilog2() as usize;
        let block = self.inner.buddies.borrow_mut().take(order)?;
        let home = Home::Pool { pool: Rc::clone(&self.inner), block, order: order as u8 };
        Some(Frame { home, len })
    }

    /// A frame of `len` bytes, or if there is none in one piece, of half of that (rounded up to a power of two), and so on
    /// down to `least`, a power of two. For transfers that can be done in smaller pieces, when no operation is in flight whose end
    /// would free larger ones.
    pub fn alloc_largest(&self, len: usize, least: usize) -> Option<Frame> {
        let halves = std::iter::successors(Some(len.next_power_of_two() / 2), |len| Some(len / 2));
        std::iter::once(len).chain(halves.take_while(|len| *len >= least)).find_map(|len| self.alloc(len))
    }

    /// Bytes of the pool.
    pub fn bytes(&self) -> usize {
        self.inner.region.bytes()
    }

    /// Bytes not in use; they may be in pieces.
    pub fn free_bytes(&self) -> usize {
        self.inner.buddies.borrow().free_bytes
    }

    /// The number of frames that were ever returned. A waiting user that sees it change may try again.
    pub fn given_back(&self) -> u64 {
        self.inner.buddies.borrow().given_back
    }

    /// The whole mapping, start and bytes, for registration with the kernel or a NIC. It stays while a handle to the pool, or
    /// a frame of it, lives.
    pub fn region(&self) -> (*mut u8, usize) {
        (self.inner.region.at(0), self.inner.region.bytes())
    }

    /// Takes a frame of an arena away from all peers that were lent it: it keeps its place and its contents, and has pages of
    /// its own from now on, which no other process can reach. The pool is no arena any more: it cannot be lent, and its frames
    /// have no place in it. A pool that never was one has nothing to take away.
    ///
    /// # Errors
    /// The kernel's, if there is no memory.
    pub fn revoke(&self, frame: &mut Frame) -> std::io::Result<()> {
        assert!(self.owns(frame), "a frame of this pool");
        if self.inner.file.is_some() {
            self.inner.revoked.set(true);
            // The frame is borrowed for writing, so no operation of a loop has it.
            self.inner.region.make_private(frame.offset(), frame.capacity())?;
        }
        Ok(())
    }

    /// Whether a frame is of this pool.
    pub fn owns(&self, frame: &Frame) -> bool {
        matches!(&frame.home, Home::Pool { pool, .. } if Rc::ptr_eq(&self.inner, pool))
    }

    /// The file that the pool lies in, if it is an arena.
    pub(crate) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.inner.file.as_ref().filter(|_| !self.inner.revoked.get()).map(AsFd::as_fd)
    }
}

impl std::fmt::Debug for FramePool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FramePool({} of {} bytes free)", self.free_bytes(), self.bytes())
    }
}

impl Buddies {
    fn put(&mut self, block: u32, order: usize) {
        self.free_order[block as usize] = order as u8 + 1;
        self.place[block as usize] = self.free[order].len() as u32;
        self.free[order].push(block);
    }

    fn remove(&mut self, block: u32, order: usize) {
        let place = self.place[block as usize] as usize;
        self.free[order].swap_remove(place);
        if let Some(&moved) = self.free[order].get(place) {
            self.place[moved as usize] = place as u32;
        }
        self.free_order[block as usize] = 0;
    }

    /// The block freed last is the warmest in the cache, so lists are stacks.
    fn take(&mut self, order: usize) -> Option<u32> {
        let from = (order..ORDERS).find(|&o| !self.free[o].is_empty())?;
        let block = *self.free[from].last()?;
        self.remove(block, from);
        for split in (order..from).rev() {
            self.put(block + (1 << split), split);
        }
        self.free_bytes -= FRAME_BYTES_MIN << order;
        Some(block)
    }

    fn give(&mut self, mut block: u32, mut order: usize) {
        self.free_bytes += FRAME_BYTES_MIN << order;
        self.given_back += 1;
        while order + 1 < ORDERS {
            let buddy = block ^ (1 << order);
            if self.free_order[buddy as usize] as usize != order + 1 {
                break;
            }
            self.remove(buddy, order);
            block = block.min(buddy);
            order += 1;
        }
        self.put(block, order);
    }
}

impl Frame {
    /// Bytes, as asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a frame has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A frame over `len` bytes (at least 1) of a mapping, from `start`. The mapping [counts](Mapping::uses) it, and stays
    /// while it lives.
    ///
    /// # Safety
    /// While the frame lives no reference to bytes of the range lives, except for reading if operations only read it.
    pub unsafe fn over(mapping: &Mapping, start: usize, len: usize) -> Self {
        assert!(start.checked_add(len).is_some_and(|end| end <= mapping.len()), "range within the mapping");
        assert!(len > 0, "a frame has bytes");
        Self { home: Home::Mapping { mapping: mapping.hold(), start }, len }
    }

    /// Bytes that the frame could hold: `len` rounded up to a power of two of 4 KiB; over a mapping, `len`.
    pub fn capacity(&self) -> usize {
        match &self.home {
            Home::Pool { order, .. } => FRAME_BYTES_MIN << order,
            Home::Mapping { .. } => self.len(),
        }
    }

    /// Where the frame begins in its pool's arena, in bytes; `None` if its pool is none ([`FramePool::shared`]).
    pub fn arena_offset(&self) -> Option<usize> {
        match &self.home {
            Home::Pool { pool, .. } => (pool.file.is_some() && !pool.revoked.get()).then(|| self.offset()),
            Home::Mapping { .. } => None,
        }
    }

    /// Where it begins in what it lies in.
    fn offset(&self) -> usize {
        match &self.home {
            Home::Pool { block, .. } => *block as usize * FRAME_BYTES_MIN,
            Home::Mapping { start, .. } => *start,
        }
    }

    /// Whether it lies in a device: its bytes are for the kernel to move, not for us to look at.
    pub fn is_device(&self) -> bool {
        matches!(&self.home, Home::Pool { pool, .. } if pool.device)
    }

    /// Whether its pages cannot be taken away as long as it is mapped, see [`Mapping::is_sealed`].
    pub fn is_sealed(&self) -> Option<bool> {
        match &self.home {
            Home::Pool { .. } => None,
            Home::Mapping { mapping, .. } => mapping.mapping().is_sealed(),
        }
    }

    /// Notes that the frame will never be dropped, because a device that does not answer may still touch its bytes. Waiting
    /// users of its mapping are notified ([`Mapping::is_given_up`]).
    pub fn note_given_up(&self) {
        if let Home::Mapping { mapping, .. } = &self.home {
            mapping.note_given_up();
        }
    }

    /// Whether the loop that has it, and the kernel on its behalf, are all that touch its bytes: it is of a pool of private
    /// memory, which is neither lent to peers nor a program's nor a device's.
    pub fn is_private(&self) -> bool {
        matches!(&self.home, Home::Pool { pool, .. } if !pool.device && pool.file.is_none())
    }

    /// The bytes of a [private](Frame::is_private) frame.
    ///
    /// # Panics
    /// The frame is not private: others may write there at any time, so its bytes are copied ([`Frame::read`]).
    #[track_caller]
    pub fn bytes(&self) -> &[u8] {
        assert!(self.is_private(), "bytes of lent, device or program memory are copied, never referred to");
        // SAFETY: the block is this frame's alone while it lives, mapped and initialised (new pages are zero), and of no other
        // process, program or device.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len()) }
    }

    /// The bytes of a [private](Frame::is_private) frame, to be changed.
    ///
    /// # Panics
    /// As for [`Frame::bytes`].
    #[track_caller]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(self.is_private(), "bytes of lent, device or program memory are copied, never referred to");
        // SAFETY: as in `bytes`, and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.len()) }
    }

    /// Copies the bytes from `start` on out. A byte that changes meanwhile is an old or a new one.
    #[track_caller]
    pub fn read(&self, start: usize, into: &mut [u8]) {
        let from = self.range(start, into.len());
        // SAFETY: the range is mapped, and `into` is no part of it: references to frames' bytes are made of private ones alone,
        // which are borrowed then.
        unsafe { bytewise::copy(from, into.as_mut_ptr(), into.len()) };
    }

    /// Copies bytes in from `start` on.
    #[track_caller]
    pub fn write(&mut self, start: usize, from: &[u8]) {
        let to = self.range(start, from.len());
        // SAFETY: as in `read`, and `from` is no part of the frame, which is borrowed mutably.
        unsafe { bytewise::copy(from.as_ptr(), to, from.len()) };
    }

    /// Copies bytes of another frame, `from.start..from.end`, in from `start` on.
    #[track_caller]
    pub fn copy_from(&mut self, start: usize, other: &Self, from: Range<usize>) {
        let (from, to, len) = (other.range(from.start, from.len()), self.range(start, from.len()), from.len());
        if len > 0 && (from as usize).abs_diff(to as usize) < len {
            // Two frames over one memory of a program, which may overlap.
            let mut bytes = vec![0; len];
            other.read(from as usize - other.as_ptr() as usize, &mut bytes);
            return self.write(start, &bytes);
        }
        // SAFETY: both ranges are mapped, and do not overlap.
        unsafe { bytewise::copy(from, to, len) };
    }

    /// A copy of the bytes, see [`Frame::read`].
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        self.read(0, &mut bytes);
        bytes
    }

    /// Sets all bytes.
    pub fn fill(&mut self, byte: u8) {
        self.fill_range(0..self.len(), byte);
    }

    /// Sets all bytes of a range.
    #[track_caller]
    pub fn fill_range(&mut self, range: Range<usize>, byte: u8) {
        let to = self.range(range.start, range.len());
        // SAFETY: as in `write`.
        unsafe { bytewise::fill(to, byte, range.len()) };
    }

    /// Shows a range to `visit`, in order and in pieces of any length: the bytes themselves of a private frame, else copies of
    /// them. Stops where `visit` says false, and gives what it said last; true of an empty range.
    #[track_caller]
    pub fn visit(&self, range: Range<usize>, mut visit: impl FnMut(&[u8]) -> bool) -> bool {
        if self.is_private() {
            return visit(&self.bytes()[range]);
        }
        let _ = self.range(range.start, range.len());
        let mut copy = [0; COPY_BYTES];
        for start in range.clone().step_by(COPY_BYTES) {
            let piece = &mut copy[..COPY_BYTES.min(range.end - start)];
            self.read(start, piece);
            if !visit(piece) {
                return false;
            }
        }
        true
    }

    /// The address of `start`, where `len` bytes lie.
    #[track_caller]
    pub(crate) fn range(&self, start: usize, len: usize) -> *mut u8 {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.len()), "a range within the frame");
        // SAFETY: within the frame.
        unsafe { self.as_ptr().add(start) }
    }

    /// Where it begins, for devices and system calls; valid as long as the frame.
    pub fn as_ptr(&self) -> *mut u8 {
        match &self.home {
            Home::Pool { pool, .. } => pool.region.at(self.offset()),
            Home::Mapping { mapping, .. } => mapping.at(self.offset()),
        }
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        if let Home::Pool { pool, block, order } = &self.home {
            pool.buddies.borrow_mut().give(*block, usize::from(*order));
        }
    }
}

impl std::fmt::Debug for Frame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Frame(at {} {} bytes)", self.offset(), self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::Access;

    #[test]
    fn frames_are_aligned_disjoint_and_all_come_back() {
        let pool = FramePool::new(FRAME_BYTES_MAX * 2).unwrap();
        let total = pool.free_bytes();
        let mut frames = Vec::new();
        for (i, len) in [1, 4096, 5000, 70_000, 300_000, FRAME_BYTES_MAX / 2].into_iter().cycle().enumerate() {
            let Some(mut frame) = pool.alloc(len) else { break };
            assert_eq!(frame.as_ptr() as usize % 4096, 0);
            frame.fill(i as u8);
            frames.push((i as u8, frame));
        }
        assert!(frames.len() > 6, "the pool must hold more than one round");
        for (value, frame) in &frames {
            assert!(frame.bytes().iter().all(|byte| byte == value), "a frame was overwritten by another");
        }
        // Free in an order that is neither first nor last.
        while !frames.is_empty() {
            frames.swap_remove(frames.len() / 2);
        }
        assert_eq!(pool.free_bytes(), total);
        let whole: Vec<_> = (0..2).map(|_| pool.alloc(FRAME_BYTES_MAX).expect("blocks merged again")).collect();
        assert_eq!(pool.free_bytes(), 0);
        assert!(pool.alloc(1).is_none(), "an empty pool says so");
        drop(whole);
    }

    #[test]
    fn of_a_pool_that_is_cut_up_the_largest_piece_is_given() {
        let pool = FramePool::new(FRAME_BYTES_MAX).unwrap();
        let mut all: Vec<Frame> = std::iter::from_fn(|| pool.alloc(4096)).collect();
        // One page of each 32 KiB stays taken.
        all.sort_by_key(|frame| frame.as_ptr() as usize);
        let mut at = 0;
        all.retain(|_| (at % 8 == 0, at += 1).0);
        assert!(pool.free_bytes() > FRAME_BYTES_MAX / 2 && pool.alloc(20_000).is_none());
        assert_eq!(pool.alloc_largest(70_000, 4096).map(|frame| frame.len()), Some(16 << 10));
        assert_eq!(pool.alloc_largest(9_000, 4096).map(|frame| frame.len()), Some(9_000));
        assert!(pool.alloc_largest(70_000, 32 << 10).is_none() && pool.alloc_largest(70_000, 70_000).is_none());
        all.clear();
        assert_eq!(pool.alloc_largest(70_000, 4096).map(|frame| frame.len()), Some(70_000));
    }

    #[test]
    fn a_frame_knows_its_pool_and_its_place_in_an_arena() {
        let (plain, arena) = (FramePool::new(1).unwrap(), FramePool::shared(2 * FRAME_BYTES_MAX).unwrap());
        let frame = plain.alloc(10).unwrap();
        assert!(plain.owns(&frame) && plain.clone().owns(&frame) && !arena.owns(&frame));
        assert_eq!(frame.arena_offset(), None);
        let mut places = Vec::new();
        while let Some(mut frame) = arena.alloc(300_000) {
            assert!(arena.owns(&frame) && !plain.owns(&frame));
            frame.fill(places.len() as u8 + 1);
            places.push((frame.arena_offset().unwrap(), frame));
        }
        assert_eq!(places.len(), 4);
        // What another process finds at these places is what the frames hold.
        let other = Region::of_peer(arena.file().unwrap(), arena.bytes(), Access::Write).unwrap();
        for (value, (at, frame)) in (1..).zip(&places) {
            assert_eq!(frame.as_ptr() as usize - arena.region().0 as usize, *at);
            // SAFETY: the first and the last byte of the frame, in the other mapping.
            let seen = unsafe { [other.at(*at).read(), other.at(at + 299_999).read(), other.at(at + 300_000).read()] };
            assert_eq!(seen, [value, value, 0]);
        }
        drop(places);
        assert_eq!(arena.free_bytes(), arena.bytes());
        assert!(FramePool::shared(ARENA_BYTES_MAX + 1).is_err(), "no server takes it");
    }

    #[test]
    fn sizes_out_of_range_are_refused() {
        let pool = FramePool::new(1).unwrap();
        assert!(pool.alloc(0).is_none());
        assert!(pool.alloc(FRAME_BYTES_MAX + 1).is_none());
        for too_much in [POOL_BYTES_MAX + 1, usize::MAX] {
            let refused = FramePool::new(too_much).map(|pool| pool.bytes()).map_err(|error| error.kind());
            assert_eq!(refused, Err(std::io::ErrorKind::InvalidInput));
        }
    }
}
