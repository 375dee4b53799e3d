//! The memory that operations own until they complete.

use std::alloc::Layout;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::rc::Rc;

use byway_reactor::Frame;

use super::domain::{PoolRegion, Region};
use super::local::Kept;
use super::verbs::Sge;

const PAGE_BYTES: usize = 4096;

/// Memory of any length at one address: its own, or a range whose owner has promised not to use it.
pub struct Buffer {
    base: NonNull<u8>,
    len: usize,
    /// None for foreign memory.
    layout: Option<Layout>,
}

impl Buffer {
    /// `len` bytes of zeros, aligned to a page; none if there is no memory, or `len` is 0.
    pub fn zeroed(len: usize) -> Option<Self> {
        let layout = Layout::from_size_align(len, PAGE_BYTES).ok().filter(|layout| layout.size() > 0)?;
        // SAFETY: the layout has a size that is not zero.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })?;
        Some(Self { base, len, layout: Some(layout) })
    }

    /// A range of the caller's own memory.
    ///
    /// # Safety
    /// Until the buffer is dropped the range stays mapped and initialised, and nothing else writes to it; nothing else
    /// reads it either while it is in an operation that writes to it, or in a window that a peer may write to.
    pub const unsafe fn from_raw_parts(base: NonNull<u8>, len: usize) -> Self {
        Self { base, len, layout: None }
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the range is mapped and initialised, and this buffer's alone: allocated by `zeroed`, or by the promise of
        // the caller of `from_raw_parts`. While a device may write to it, the buffer is inside an operation or a window.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(layout) = self.layout {
            // SAFETY: allocated in `zeroed` with this layout, and freed only here.
            unsafe { std::alloc::dealloc(self.base.as_ptr(), layout) };
        }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes)", self.len)
    }
}

/// What can be registered by itself.
#[derive(Debug)]
pub enum Registrable {
    /// A frame.
    Frame(Frame),
    /// A range of any length.
    Buffer(Buffer),
}

impl From<Frame> for Registrable {
    fn from(frame: Frame) -> Self {
        Self::Frame(frame)
    }
}

impl From<Buffer> for Registrable {
    fn from(buffer: Buffer) -> Self {
        Self::Buffer(buffer)
    }
}

impl Registrable {
    /// Bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Frame(frame) => frame.len(),
            Self::Buffer(buffer) => buffer.len,
        }
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where it begins, for the device.
    pub(super) fn as_ptr(&self) -> *mut u8 {
        match self {
            Self::Frame(frame) => frame.as_ptr(),
            Self::Buffer(buffer) => buffer.base.as_ptr(),
        }
    }

    /// The bytes, of a buffer or a [private](Frame::is_private) frame.
    ///
    /// # Panics
    /// The frame is not private.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Frame(frame) => frame.bytes(),
            Self::Buffer(buffer) => buffer,
        }
    }

    /// The bytes, of a buffer or a [private](Frame::is_private) frame, to be changed.
    ///
    /// # Panics
    /// The frame is not private.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Frame(frame) => frame.bytes_mut(),
            Self::Buffer(buffer) => buffer,
        }
    }
}

/// A piece of registered memory. It owns what it names, alone or with others.
#[derive(Debug)]
pub struct Segment {
    memory: SegmentMemory,
    range: Range<usize>,
    /// Where a frame is registered that is not so by itself.
    pool: Option<Rc<PoolRegion>>,
}

#[derive(Debug)]
enum SegmentMemory {
    Frame(Frame),
    SharedFrame(Rc<Frame>),
    /// Of no pool, with its registration.
    KeptFrame(Box<(Frame, Kept)>),
    SharedKeptFrame(Box<(Rc<Frame>, Kept)>),
    Region(Region),
    SharedRegion(Rc<Region>),
}

impl Segment {
    /// `range` of a frame of the pool. The frame comes back if it is of another pool, or shorter.
    pub fn of_frame(pool: &Rc<PoolRegion>, frame: Frame, range: Range<usize>) -> Result<Self, Frame> {
        if !pool.contains(&frame) || !fits(&range, frame.len()) {
            return Err(frame);
        }
        Ok(Self { memory: SegmentMemory::Frame(frame), range, pool: Some(Rc::clone(pool)) })
    }

    /// `range` of a frame of no pool, whose memory was registered: `kept` is of all of it. The frame comes back if it is shorter.
    pub fn of_kept_frame(kept: Kept, frame: Frame, range: Range<usize>) -> Result<Self, Frame> {
        if !fits(&range, frame.len()) {
            return Err(frame);
        }
        Ok(Self { memory: SegmentMemory::KeptFrame(Box::new((frame, kept))), range, pool: None })
    }

    /// The same for a frame that others read meanwhile.
    pub fn of_kept_shared_frame(kept: Kept, frame: Rc<Frame>, range: Range<usize>) -> Result<Self, Rc<Frame>> {
        if !fits(&range, frame.len()) {
            return Err(frame);
        }
        Ok(Self { memory: SegmentMemory::SharedKeptFrame(Box::new((frame, kept))), range, pool: None })
    }

    /// The same for a frame that others read meanwhile: for what is sent, not for what is received.
    pub fn of_shared_frame(pool: &Rc<PoolRegion>, frame: Rc<Frame>, range: Range<usize>) -> Result<Self, Rc<Frame>> {
        if !pool.contains(&frame) || !fits(&range, frame.len()) {
            return Err(frame);
        }
        Ok(Self { memory: SegmentMemory::SharedFrame(frame), range, pool: Some(Rc::clone(pool)) })
    }

    /// `range` of a region, which comes back if it is shorter.
    pub fn of_region(region: Region, range: Range<usize>) -> Result<Self, Region> {
        if !fits(&range, region.len()) {
            return Err(region);
        }
        Ok(Self { memory: SegmentMemory::Region(region), range, pool: None })
    }

    /// The same for a region that others read meanwhile.
    pub fn of_shared_region(region: Rc<Region>, range: Range<usize>) -> Result<Self, Rc<Region>> {
        if !fits(&range, region.len()) {
            return Err(region);
        }
        Ok(Self { memory: SegmentMemory::SharedRegion(region), range, pool: None })
    }

    /// Its bytes.
    ///
    /// # Panics
    /// It is of a frame that is not [private](Frame::is_private).
    pub fn bytes(&self) -> &[u8] {
        let all: &[u8] = match &self.memory {
            SegmentMemory::Frame(frame) => frame.bytes(),
            SegmentMemory::SharedFrame(frame) => frame.bytes(),
            SegmentMemory::KeptFrame(kept) => kept.0.bytes(),
            SegmentMemory::SharedKeptFrame(kept) => kept.0.bytes(),
            SegmentMemory::Region(region) => region.bytes(),
            SegmentMemory::SharedRegion(region) => region.bytes(),
        };
        &all[self.range.clone()]
    }

    /// Its bytes, if they are not shared.
    ///
    /// # Panics
    /// As for [`Segment::bytes`].
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        let all: &mut [u8] = match &mut self.memory {
            SegmentMemory::Frame(frame) => frame.bytes_mut(),
            SegmentMemory::KeptFrame(kept) => kept.0.bytes_mut(),
            SegmentMemory::Region(region) => region.bytes_mut(),
            SegmentMemory::SharedFrame(_) | SegmentMemory::SharedKeptFrame(_) | SegmentMemory::SharedRegion(_) => {
                return None;
            }
        };
        Some(&mut all[self.range.clone()])
    }

    /// How many bytes it has; at least one.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// The frame, if it is one and is not shared.
    pub fn into_frame(self) -> Option<Frame> {
        match self.memory {
            SegmentMemory::Frame(frame) => Some(frame),
            SegmentMemory::SharedFrame(frame) => Rc::into_inner(frame),
            SegmentMemory::KeptFrame(kept) => Some(kept.0),
            SegmentMemory::SharedKeptFrame(kept) => Rc::into_inner(kept.0),
            SegmentMemory::Region(_) | SegmentMemory::SharedRegion(_) => None,
        }
    }

    /// The region, if it is one and is not shared.
    pub fn into_region(self) -> Option<Region> {
        match self.memory {
            SegmentMemory::Region(region) => Some(region),
            SegmentMemory::SharedRegion(region) => Rc::into_inner(region),
            SegmentMemory::Frame(_)
            | SegmentMemory::SharedFrame(_)
            | SegmentMemory::KeptFrame(_)
            | SegmentMemory::SharedKeptFrame(_) => None,
        }
    }

    fn note_given_up(&self) {
        match &self.memory {
            SegmentMemory::Frame(frame) => frame.note_given_up(),
            SegmentMemory::SharedFrame(frame) => frame.note_given_up(),
            SegmentMemory::KeptFrame(kept) => kept.0.note_given_up(),
            SegmentMemory::SharedKeptFrame(kept) => kept.0.note_given_up(),
            SegmentMemory::Region(region) => region.note_given_up(),
            SegmentMemory::SharedRegion(region) => region.note_given_up(),
        }
    }

    fn is_exclusive(&self) -> bool {
        matches!(self.memory, SegmentMemory::Frame(_) | SegmentMemory::KeptFrame(_) | SegmentMemory::Region(_))
    }

    fn lkey(&self) -> u32 {
        match (&self.memory, &self.pool) {
            (SegmentMemory::Region(region), _) => region.lkey(),
            (SegmentMemory::SharedRegion(region), _) => region.lkey(),
            (SegmentMemory::KeptFrame(kept), _) => kept.1.lkey(),
            (SegmentMemory::SharedKeptFrame(kept), _) => kept.1.lkey(),
            (_, Some(pool)) => pool.lkey(),
            // Not made: a frame comes with its pool. The device would refuse it.
            (_, None) => 0,
        }
    }

    /// For the device: where it is.
    fn sge(&self) -> Sge {
        let base = match &self.memory {
            SegmentMemory::Frame(frame) => frame.as_ptr(),
            SegmentMemory::SharedFrame(frame) => frame.as_ptr(),
            SegmentMemory::KeptFrame(kept) => kept.0.as_ptr(),
            SegmentMemory::SharedKeptFrame(kept) => kept.0.as_ptr(),
            SegmentMemory::Region(region) => region.as_ptr(),
            SegmentMemory::SharedRegion(region) => region.as_ptr(),
        };
        Sge { addr: base as u64 + self.range.start as u64, length: self.len() as u32, lkey: self.lkey() }
    }
}

/// A device's lengths have 32 bits, and one of zero may mean 2^31.
fn fits(range: &Range<usize>, len: usize) -> bool {
    range.start < range.end && range.end <= len && range.len() <= 1 << 30
}

/// The segments of one operation, in order. One segment takes no allocation.
#[derive(Debug, Default)]
pub enum Payload {
    /// Nothing.
    #[default]
    Empty,
    /// One segment.
    One(Segment),
    /// Several.
    Many(Vec<Segment>),
    /// The memory is given up: a device that did not release it may write to it for ever. Or it is in quarantine, and returns to its
    /// owner when the kernel has taken the device away.
    GivenUp,
}

impl From<Segment> for Payload {
    fn from(segment: Segment) -> Self {
        Self::One(segment)
    }
}

impl From<Vec<Segment>> for Payload {
    fn from(segments: Vec<Segment>) -> Self {
        Self::Many(segments)
    }
}

impl Payload {
    /// Its segments.
    pub fn segments(&self) -> &[Segment] {
        match self {
            Self::Empty | Self::GivenUp => &[],
            Self::One(segment) => std::slice::from_ref(segment),
            Self::Many(segments) => segments,
        }
    }

    /// Its segments, to take apart.
    pub fn into_segments(self) -> Vec<Segment> {
        match self {
            Self::Empty | Self::GivenUp => Vec::new(),
            Self::One(segment) => vec![segment],
            Self::Many(segments) => segments,
        }
    }

    /// The only segment, if there is one.
    pub fn into_segment(self) -> Option<Segment> {
        match self {
            Self::One(segment) => Some(segment),
            Self::Many(mut segments) if segments.len() == 1 => segments.pop(),
            Self::Empty | Self::GivenUp | Self::Many(_) => None,
        }
    }

    /// Bytes of all segments.
    pub fn len(&self) -> usize {
        self.segments().iter().map(Segment::len).sum()
    }

    /// Nothing?
    pub fn is_empty(&self) -> bool {
        self.segments().is_empty()
    }

    /// Gives its memory up: it is never used again, its registration stays, and waiting users are notified.
    pub(super) fn give_up(self) -> Self {
        self.segments().iter().for_each(Segment::note_given_up);
        let _ = ManuallyDrop::new(self);
        Self::GivenUp
    }

    pub(super) fn is_exclusive(&self) -> bool {
        self.segments().iter().all(Segment::is_exclusive)
    }

    /// What the device is told, into `sges`, which is emptied first.
    pub(super) fn describe(&mut self, sges: &mut Vec<Sge>) {
        sges.clear();
        match self {
            Self::Empty | Self::GivenUp => {}
            Self::One(segment) => sges.push(segment.sge()),
            Self::Many(segments) => sges.extend(segments.iter_mut().map(|segment| segment.sge())),
        }
    }
}

#[cfg(test)]
impl Segment {
    /// A whole frame that no device knows, for tests of what becomes of it.
    pub(in crate::rdma) fn unregistered(frame: Frame) -> Self {
        let range = 0..frame.len();
        Self { memory: SegmentMemory::Frame(frame), range, pool: None }
    }

    /// The same for a frame that others read meanwhile.
    fn unregistered_shared(frame: Rc<Frame>) -> Self {
        let range = 0..frame.len();
        Self { memory: SegmentMemory::SharedFrame(frame), range, pool: None }
    }
}

#[cfg(test)]
mod tests {
    use byway_reactor::Mapping;

    use super::*;

    #[test]
    fn a_programs_memory_that_is_given_up_is_in_use_for_ever_and_its_waiter_told() {
        let memory = Mapping::new(8192).unwrap();
        let given_up = |make: fn(&Mapping) -> Payload| {
            let counted = memory.counted();
            let payload = make(&counted);
            assert!(counted.uses() > 0 && !counted.is_given_up());
            let after = payload.give_up();
            assert!(matches!(after, Payload::GivenUp) && after.is_empty());
            drop(after);
            assert!(counted.is_given_up() && counted.uses() > 0);
        };
        given_up(|mapping| Segment::unregistered(over(mapping, 0)).into());
        given_up(|mapping| Segment::unregistered_shared(Rc::new(over(mapping, 0))).into());
        given_up(|mapping| {
            vec![Segment::unregistered(over(mapping, 0)), Segment::unregistered(over(mapping, 100))].into()
        });
        // What a device let go of is free again.
        let counted = memory.counted();
        drop(Payload::from(Segment::unregistered(over(&counted, 200))));
        assert!(counted.uses() == 0 && !counted.is_given_up());
    }

    fn over(mapping: &Mapping, start: usize) -> Frame {
        // SAFETY: no references to the memory are made.
        unsafe { Frame::over(mapping, start, 100) }
    }

    #[test]
    fn a_buffer_is_zeroed_aligned_and_none_when_empty() {
        let mut buffer = Buffer::zeroed(10_000).unwrap();
        assert_eq!(buffer.as_ptr() as usize % PAGE_BYTES, 0);
        assert!(buffer.iter().all(|byte| *byte == 0));
        buffer[9_999] = 7;
        assert_eq!((buffer.len(), buffer[9_999]), (10_000, 7));
        assert!(Buffer::zeroed(0).is_none());
    }

    #[test]
    fn ranges_must_have_bytes_and_lie_inside() {
        assert!(fits(&(0..1), 1) && fits(&(3..8), 8));
        assert!(!fits(&(0..0), 1) && !fits(&(0..2), 1));
        #[expect(clippy::reversed_empty_ranges, reason = "what is refused")]
        let reversed = 2..1;
        assert!(!fits(&reversed, 4));
    }
}
