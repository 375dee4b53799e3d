//! Writes: at once where the store is memory, else on the ring.

use byway_reactor::limits::FRAME_BYTES_MIN;
use byway_reactor::seeded::{self, Bug};
use byway_reactor::{ByteRange, Errno, FrameRange, Op, Reactor, Socket};

use super::attached::Attached;
use super::{Begun, Counted, Engine, IoKind, Operation, Request, Step, Tag, VolumeId, WriteFlags};
use crate::block::error::BlockError;
use crate::block::failures::StoreFailure;
use crate::block::store::Kind;
use crate::limits::{MEMORY_PIECE_BYTES, PIECE_BYTES_MAX};

impl Engine {
    /// How many of the next `len` bytes at `offset` can be given to one [`Engine::write`].
    pub fn write_piece_len(&self, id: VolumeId, offset: u64, len: usize) -> usize {
        let len = len.min(PIECE_BYTES_MAX);
        match self.attached(id).map(|attached| attached.volume.kind()) {
            Ok(Kind::Files { layout, files }) => {
                let run = layout.extent(offset, len as u64);
                let page = (offset % MEMORY_PIECE_BYTES as u64) as usize;
                let len = run.len as usize;
                if files[0].is_receivable() { len.min(MEMORY_PIECE_BYTES - page) } else { len }
            }
            Ok(Kind::Null) | Err(_) => len,
        }
    }

    /// As [`Engine::write_piece_len`], for a front end that receives into frames alone: pieces are as long as they may be.
    pub fn write_run_len(&self, id: VolumeId, offset: u64, len: usize) -> usize {
        let len = len.min(PIECE_BYTES_MAX);
        match self.attached(id).map(|attached| attached.volume.kind()) {
            Ok(Kind::Files { layout, .. }) => layout.extent(offset, len as u64).len as usize,
            Ok(Kind::Null) | Err(_) => len,
        }
    }

    /// The shortest piece that every operation on the volume may be cut into: a frame's, or the volume's block.
    pub fn piece_bytes_min(&self, id: VolumeId) -> usize {
        let block = self.attached(id).map_or(1, |attached| attached.volume.block_bytes() as usize);
        block.next_power_of_two().max(FRAME_BYTES_MIN)
    }

    /// Receives what is here of a write's payload straight into a volume in memory, as
    /// [`Reactor::receive_into_file`] does; gives the bytes that are thereby written. 0 means to do it by
    /// [`Engine::write`].
    pub fn receive_into(
        &mut self,
        reactor: &mut Reactor,
        id: VolumeId,
        socket: Socket,
        offset: u64,
        len: usize,
    ) -> usize {
        let Ok(attached) = self.check(id, ByteRange::new(offset, len as u64), true) else { return 0 };
        let Kind::Files { layout, .. } = attached.volume.kind() else { return 0 };
        if attached.volume.has_faults() {
            return 0;
        }
        let run = layout.extent(offset, len as u64);
        let n = reactor.receive_into_file(socket, attached.files[run.file], run.offset, run.len as usize);
        if n > 0 {
            self.charge(reactor, id, n);
            let _ = self.counted(id, Counted::part(Operation::Write, n as u64), Ok(Step::Now(())));
        }
        n
    }

    /// Whether a write of the range could succeed: to ask before its payload is received.
    ///
    /// # Errors
    /// See [`BlockError`].
    pub fn check_write(&self, id: VolumeId, offset: u64, len: u64) -> Result<(), BlockError> {
        self.check(id, ByteRange::new(offset, len), true).map(|_| ())
    }

    /// Writes at most [`Engine::write_piece_len`] bytes of a frame: a piece of a request, whose end is told by
    /// [`Engine::note_written`].
    ///
    /// # Errors
    /// See [`BlockError`]; the frame is gone then.
    pub fn write(
        &mut self,
        reactor: &mut Reactor,
        id: VolumeId,
        offset: u64,
        from: FrameRange,
        flags: WriteFlags,
        tag: Tag,
    ) -> Result<Begun, BlockError> {
        let len = from.len;
        let request = Request { volume: id, operation: Operation::Write, offset, len: len as u64, tag };
        let result = self.write_frame(reactor, request, from, flags);
        let _ = self.counted(id, Counted::part(Operation::Write, len as u64), result.map(Step::from));
        result
    }

    fn write_frame(
        &mut self,
        reactor: &mut Reactor,
        request: Request,
        from: FrameRange,
        flags: WriteFlags,
    ) -> Result<Begun, BlockError> {
        let Request { volume: id, offset, .. } = request;
        let FrameRange { frame: from, start, len } = from;
        self.charge(reactor, id, len);
        let attached = self.check(id, ByteRange::new(offset, len as u64), true)?;
        let Kind::Files { layout, .. } = attached.volume.kind() else { return Ok(Begun::Now) };
        if len == 0 {
            return Ok(Begun::Now);
        }
        let run = layout.extent(offset, len as u64);
        if run.len < len as u64 {
            return Err(BlockError::TooLong);
        }
        let file = attached.files[run.file];
        let durable = flags.durable && !cfg!(feature = "drop-flushes") && !seeded::is(Bug::IgnoredFua);
        // The kernel alone moves the bytes of a device.
        if !durable && !attached.volume.has_faults() && from.is_private() {
            match reactor.try_write(file, run.offset, &from.bytes()[start..][..len]) {
                Ok(()) => return Ok(Begun::Now),
                Err(Errno::AGAIN) => {}
                Err(error) => return Err(failed_at_once(attached, reactor, request, error)),
            }
        }
        let io = self.start_io(reactor, request, 1, IoKind::Write { durable });
        self.in_flight[io].part = true;
        let op = Op::Write { file, offset: run.offset, from, start, len, durable: false };
        self.start_run(reactor, io, 0, len, op);
        Ok(Begun::Later)
    }

    /// Writes bytes that stay the caller's: at once where the store is memory, else by way of a copy in a frame.
    ///
    /// # Errors
    /// See [`BlockError`].
    pub fn write_small(
        &mut self,
        reactor: &mut Reactor,
        id: VolumeId,
        offset: u64,
        bytes: &[u8],
        flags: WriteFlags,
        tag: Tag,
    ) -> Result<Step<()>, BlockError> {
        if self.is_throttled(reactor, id) {
            return Ok(Step::Busy);
        }
        let request = Request { volume: id, operation: Operation::Write, offset, len: bytes.len() as u64, tag };
        let result = self.write_bytes(reactor, request, bytes, flags);
        if !matches!(result, Ok(Step::Busy)) {
            self.charge(reactor, id, bytes.len());
        }
        self.counted(id, Counted::whole(Operation::Write, bytes.len() as u64), result)
    }

    fn write_bytes(
        &mut self,
        reactor: &mut Reactor,
        request: Request,
        bytes: &[u8],
        flags: WriteFlags,
    ) -> Result<Step<()>, BlockError> {
        let Request { volume: id, offset, .. } = request;
        let attached = self.check(id, ByteRange::new(offset, bytes.len() as u64), true)?;
        let Kind::Files { layout, .. } = attached.volume.kind() else { return Ok(Step::Now(())) };
        let durable = flags.durable && !cfg!(feature = "drop-flushes") && !seeded::is(Bug::IgnoredFua);
        let by_ring = durable || attached.volume.has_faults();
        let mut left = Vec::new();
        let mut done = 0;
        for run in layout.extents(offset, bytes.len() as u64, PIECE_BYTES_MAX as u64) {
            let part = &bytes[done..done + run.len as usize];
            done += part.len();
            let file = attached.files[run.file];
            let written = if by_ring { Err(Errno::AGAIN) } else { reactor.try_write(file, run.offset, part) };
            match written {
                Ok(()) => {}
                Err(Errno::AGAIN) => {
                    let Some(mut frame) = reactor.frames().alloc(part.len()) else { return Ok(Step::Busy) };
                    frame.write(0, part);
                    left.push((file, run, frame));
                }
                Err(error) => return Err(failed_at_once(attached, reactor, request, error)),
            }
        }
        if left.is_empty() {
            return Ok(Step::Now(()));
        }
        let io = self.start_io(reactor, request, left.len(), IoKind::Write { durable });
        for (part, (file, run, from)) in left.into_iter().enumerate() {
            let len = run.len as usize;
            let op = Op::Write { file, offset: run.offset, from, start: 0, len, durable: false };
            self.start_run(reactor, io, part, len, op);
        }
        Ok(Step::Later)
    }
}

/// The store has failed a write that did not have to wait.
fn failed_at_once(attached: &Attached, reactor: &Reactor, request: Request, error: Errno) -> BlockError {
    let Request { operation, offset, len, .. } = request;
    let error = BlockError::from(error);
    attached.volume.note_failure(StoreFailure { operation, offset, len, error, at: reactor.now() });
    error
}
