//! Flushes and trims: they change a volume's state besides its bytes.

use byway_reactor::seeded::{self, Bug};
use byway_reactor::{Allocate, ByteRange, Op, Reactor};

use super::{Counted, Engine, IoKind, Operation, Request, Step, Tag, VolumeId, ZeroFlags};
use crate::block::error::BlockError;
use crate::block::store::Kind;

impl Engine {
    /// Makes durable all writes that completed before.
    ///
    /// # Errors
    /// [`BlockError::FlushFailed`] once one has failed.
    pub fn flush(&mut self, reactor: &mut Reactor, id: VolumeId, tag: Tag) -> Result<Step<()>, BlockError> {
        let result = self.start_flush(reactor, id, tag);
        self.counted(id, Counted::whole(Operation::Flush, 0), result)
    }

    fn start_flush(&mut self, reactor: &mut Reactor, id: VolumeId, tag: Tag) -> Result<Step<()>, BlockError> {
        let attached = self.attached(id)?;
        if attached.volume.sync_tracker().flush_failed() {
            return Err(BlockError::FlushFailed);
        }
        let drops = cfg!(feature = "drop-flushes") || seeded::is(Bug::DroppedFlush);
        if attached.files.is_empty() || attached.volume.is_read_only() || drops {
            return Ok(Step::Now(()));
        }
        let files = attached.files.len();
        let request = Request { volume: id, operation: Operation::Flush, offset: 0, len: 0, tag };
        let io = self.start_io(reactor, request, files, IoKind::Flush);
        for file in 0..files {
            self.start_sync(reactor, io, file, file);
        }
        Ok(Step::Later)
    }

    /// Says that a range is no longer needed. What it reads as afterwards is not defined, but is the same at each read.
    ///
    /// # Errors
    /// See [`BlockError`].
    pub fn trim(
        &mut self,
        reactor: &mut Reactor,
        id: VolumeId,
        ByteRange { offset, len }: ByteRange,
        durable: bool,
        tag: Tag,
    ) -> Result<Step<()>, BlockError> {
        let request = Request { volume: id, operation: Operation::Trim, offset, len, tag };
        let result = if durable {
            let flags = ZeroFlags { durable, ..ZeroFlags::default() };
            self.start_zeroing(reactor, request, Allocate::Discard, flags)
        } else {
            self.start_trim(reactor, request)
        };
        self.counted(id, Counted::whole(Operation::Trim, len), result)
    }

    fn start_trim(&mut self, reactor: &mut Reactor, request: Request) -> Result<Step<()>, BlockError> {
        let Request { volume: id, offset, len, .. } = request;
        if self.waits_for_replaced(reactor, id) {
            return Ok(Step::Busy);
        }
        let attached = self.check(id, ByteRange::new(offset, len), true)?;
        let Kind::Files { layout, .. } = attached.volume.kind() else { return Ok(Step::Now(())) };
        if len == 0 {
            return Ok(Step::Now(()));
        }
        let ranges = layout.ranges(offset, len);
        let files = attached.files.clone();
        let io = self.start_io(reactor, request, ranges.len(), IoKind::Trim);
        for (part, run) in ranges.into_iter().enumerate() {
            let op = Op::Allocate { file: files[run.file], mode: Allocate::Discard, offset: run.offset, len: run.len };
            self.start_run(reactor, io, part, 0, op);
        }
        Ok(Step::Later)
    }
}
