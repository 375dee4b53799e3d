//! The common part of the io_uring and epoll backends: files, listeners, timers, workers, and the list of ready completions.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use rustix::io::Errno;

use crate::Instant;
use crate::blocking::{self, RawBuffer};
use crate::counters::Counters;
use crate::descriptor_floor;
use crate::file::{Backing, OpenFile, OsFile};
use crate::gather::{Gather, Segment};
use crate::handles::Table;
use crate::limits::SEGMENTS_PER_CALL_MAX;
use crate::mapped::{Touched, touched_bytes};
use crate::op::{Completion, Descriptor, File, Listener, Op, Outcome, Token};
use crate::splice::Pipes;
use crate::timers::Timers;
use crate::waker::Waker;
use crate::workers::Workers;

/// Zeroes to send. Small enough to stay in the cache.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

const PAGE: usize = 4096;

/// The state of a loop that does not depend on how it waits.
pub(crate) struct Os {
    files: Table<FileEntry>,
    pub(crate) listeners: Table<OwnedFd>,
    pub(crate) descriptors: Table<Described>,
    pub(crate) timers: Timers,
    pub(crate) ready: VecDeque<Completion>,
    pub(crate) workers: Workers,
    pub(crate) waker: Waker,
    pub(crate) counters: Counters,
    pub(crate) pipes: Pipes,
    touched: Touched,
}

/// A descriptor that is waited for.
pub(crate) struct Described {
    /// Shared with the operation, so that the kernel never looks at another descriptor of that number.
    pub(crate) fd: Rc<OwnedFd>,
    /// The operation that waits.
    pub(crate) waiting: Option<Token>,
    /// The kernel's queue of events knows it.
    pub(crate) registered: bool,
}

struct FileEntry {
    file: Arc<OpenFile>,
    /// Operations and send segments that use the descriptor or the mapping now.
    in_flight: u32,
    retired: bool,
}

impl Os {
    pub(crate) fn new() -> std::io::Result<Self> {
        use rustix::event::{EventfdFlags, eventfd};
        let waker =
            Waker::new(Some(descriptor_floor::raise(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)));
        Ok(Self {
            files: Table::default(),
            listeners: Table::default(),
            descriptors: Table::default(),
            timers: Timers::default(),
            ready: VecDeque::new(),
            workers: Workers::new(waker.clone()),
            waker,
            counters: Counters::default(),
            pipes: Pipes::default(),
            touched: Touched::new(),
        })
    }

    pub(crate) fn add_descriptor(&mut self, fd: OwnedFd) -> Descriptor {
        let described = Described { fd: Rc::new(fd), waiting: None, registered: false };
        let (index, generation) = self.descriptors.insert(described);
        Descriptor { index, generation }
    }

    /// The descriptor, for an operation that begins to wait for it.
    pub(crate) fn wait_for(&mut self, descriptor: Descriptor, token: Token) -> Result<&mut Described, Errno> {
        let described = self.descriptors.get_mut(descriptor.index, descriptor.generation).ok_or(Errno::BADF)?;
        if described.waiting.is_some() {
            return Err(Errno::BUSY);
        }
        described.waiting = Some(token);
        Ok(described)
    }

    /// The end of waiting for a descriptor; nothing if that had ended.
    pub(crate) fn end_wait(&mut self, descriptor: Descriptor, result: Result<(), Errno>) -> bool {
        let described = self.descriptors.get_mut(descriptor.index, descriptor.generation);
        let Some(token) = described.and_then(|described| described.waiting.take()) else { return false };
        self.ready.push_back(Completion { token, outcome: Outcome::Readable(result) });
        true
    }

    pub(crate) fn add_file(&mut self, file: Arc<OpenFile>) -> File {
        let (index, generation) = self.files.insert(FileEntry { file, in_flight: 0, retired: false });
        File { index, generation }
    }

    /// Forgets a file once nothing uses it any more.
    pub(crate) fn remove_file(&mut self, file: File) {
        if let Some(entry) = self.files.get_mut(file.index, file.generation) {
            entry.retired = true;
            if entry.in_flight == 0 {
                self.files.remove(file.index, file.generation);
            }
        }
    }

    /// The file, for a new operation.
    pub(crate) fn file(&self, file: File) -> Result<&Arc<OpenFile>, Errno> {
        let entry = self.files.get(file.index, file.generation).filter(|entry| !entry.retired);
        Ok(&entry.ok_or(Errno::BADF)?.file)
    }

    /// The file's descriptor and properties, for a new operation.
    pub(crate) fn os_file(&self, file: File) -> Result<&OsFile, Errno> {
        match &self.file(file)?.backing {
            Backing::Os(os) => Ok(os),
            Backing::Sim(_) => Err(Errno::BADF),
        }
    }

    /// Keeps the file until [`Os::unuse`].
    pub(crate) fn in_use(&mut self, file: File) {
        if let Some(entry) = self.files.get_mut(file.index, file.generation) {
            entry.in_flight += 1;
        }
    }

    pub(crate) fn unuse(&mut self, file: File) {
        if let Some(entry) = self.files.get_mut(file.index, file.generation) {
            entry.in_flight -= 1;
            if entry.retired && entry.in_flight == 0 {
                self.files.remove(file.index, file.generation);
            }
        }
    }

    /// Keeps every mapped file of `gather` until [`Os::unuse_gather`].
    ///
    /// # Errors
    /// `EBADF` if one is not of this loop, `EFAULT` if a range lies outside of its mapping; then nothing is kept.
    pub(crate) fn use_gather(&mut self, gather: &Gather) -> Result<(), Errno> {
        self.check_gather(gather)?;
        for segment in &gather.segments {
            if let Segment::Map { file, .. } = segment {
                self.in_use(*file);
            }
        }
        Ok(())
    }

    /// Whether every mapped file of `gather` is of this loop, and has the range.
    ///
    /// # Errors
    /// As of [`Os::use_gather`].
    pub(crate) fn check_gather(&self, gather: &Gather) -> Result<(), Errno> {
        for segment in &gather.segments {
            if let Segment::Map { file, offset, len } = segment {
                let map = self.os_file(*file)?.map.as_ref().ok_or(Errno::FAULT)?;
                map.address(*offset, *len).ok_or(Errno::FAULT)?;
            }
        }
        Ok(())
    }

    /// A file that is in use, even if it is to go.
    pub(crate) fn used_file(&self, file: File) -> Option<&OsFile> {
        match &self.files.get(file.index, file.generation)?.file.backing {
            Backing::Os(os) => Some(os),
            Backing::Sim(_) => None,
        }
    }

    /// The end of a send of which `sent` bytes went: lets go of the files. Bytes that were spliced have been counted.
    pub(crate) fn unuse_gather(&mut self, gather: &Gather, sent: usize, spliced: u64) {
        self.counters.send_calls += 1;
        self.counters.sent_copied_bytes += sent as u64 - spliced;
        self.counters.sent_spliced_bytes += spliced;
        let mut left = sent;
        let (mut mapped, mut touched, mut device) = (0, 0, 0);
        for segment in &gather.segments {
            let part = segment.len().min(left);
            left -= part;
            match segment {
                Segment::Map { file, offset, .. } => {
                    mapped += part as u64;
                    touched += touched_bytes(*offset, part as u64);
                    self.unuse(*file);
                }
                Segment::Frame { frame, .. } if frame.frame().is_device() => device += part as u64,
                _ => {}
            }
        }
        self.counters.sent_device_bytes += device;
        self.counters.sent_mapped_bytes += mapped - spliced;
        // A splice maps nothing.
        self.touched.add(touched.saturating_sub(spliced));
    }

    /// Describes `gather` after its first `skip` bytes, as far as one call goes. The files are in use.
    pub(crate) fn iovecs(&self, gather: &Gather, mut skip: usize, out: &mut Vec<libc::iovec>) {
        out.clear();
        let mut push =
            |ptr: *const u8, len: usize| out.push(libc::iovec { iov_base: ptr.cast_mut().cast(), iov_len: len });
        let mut room = SEGMENTS_PER_CALL_MAX;
        for segment in &gather.segments {
            if room == 0 {
                break;
            }
            let len = segment.len();
            if skip >= len {
                skip -= len;
                continue;
            }
            match segment {
                Segment::Head { start, .. } => push(gather.heads[*start as usize + skip..].as_ptr(), len - skip),
                Segment::Frame { frame, start, .. } => {
                    push(frame.frame().range(*start + skip, len - skip), len - skip);
                }
                Segment::Map { file, offset, .. } => {
                    let entry = self.files.get(file.index, file.generation).map(|entry| &entry.file.backing);
                    let address = match entry {
                        Some(Backing::Os(OsFile { map: Some(map), .. })) => {
                            map.address(offset + skip as u64, len - skip)
                        }
                        _ => None,
                    };
                    push(address.unwrap_or(std::ptr::null_mut()), len - skip);
                }
                Segment::Zero { .. } => {
                    let mut left = len - skip;
                    while left > 0 && room > 1 {
                        let part = left.min(ZEROES.len());
                        push(ZEROES.as_ptr(), part);
                        left -= part;
                        room -= 1;
                    }
                    if left > 0 {
                        push(ZEROES.as_ptr(), left.min(ZEROES.len()));
                        if left > ZEROES.len() {
                            return;
                        }
                    }
                }
            }
            room -= 1;
            skip = 0;
        }
    }

    /// Whether a mapped range is in memory, so that sending it waits for nothing.
    pub(crate) fn resident(&self, file: File, offset: u64, len: usize, now: Instant) -> bool {
        let map = self.os_file(file).ok().and_then(|os| os.map.as_ref());
        map.is_some_and(|map| map.resident(offset, len, now))
    }

    /// See [`Reactor::receive_into_file`](crate::Reactor::receive_into_file).
    pub(crate) fn receive_into_file(&mut self, socket: BorrowedFd<'_>, file: File, offset: u64, len: usize) -> usize {
        let map = self.os_file(file).ok().and_then(|os| os.map.as_ref());
        let Some(map) = map.filter(|map| map.is_writable()) else { return 0 };
        let Some(address) = map.address(offset, len) else { return 0 };
        // How much is here is asked first: a receive of exactly that much is never cut short in the middle of a page,
        // not even by the death of the peer or of this process.
        let here = crate::net::readable_bytes(socket).min(len);
        let past_page = (offset + here as u64) as usize % PAGE;
        let whole = if here == len { len } else { here.saturating_sub(past_page) };
        if whole == 0 {
            return 0;
        }
        // SAFETY: the range lies in the mapping of a file that is in use by nobody but through system calls; a page that
        // cannot be had makes the call fail with EFAULT and leaves the bytes in the socket.
        let n = unsafe { libc::recv(socket.as_raw_fd(), address.cast(), whole, libc::MSG_DONTWAIT) };
        let n = usize::try_from(n).unwrap_or(0);
        self.counters.received_bytes += n as u64;
        self.counters.receive_calls += 1;
        self.touched.add(touched_bytes(offset, n as u64));
        n
    }

    /// Reads at once, waiting for the device if a page is not in memory.
    pub(crate) fn read_now(&mut self, file: File, offset: u64, into: &mut [u8]) -> Result<usize, Errno> {
        let os = self.os_file(file)?;
        let memory = RawBuffer { ptr: into.as_mut_ptr(), len: into.len() };
        // SAFETY: the slice is valid and ours alone during the call.
        let n = unsafe { blocking::read(os.fd(), memory, offset)? };
        self.counters.read_copied_bytes += n as u64;
        Ok(n)
    }

    /// Reads at once what no device is needed for, until `memory` is full or the file ends.
    ///
    /// # Errors
    /// `EAGAIN` if the rest would have to come from a device, or may have to: some of `memory` may be filled. Else the kernel's.
    ///
    /// # Safety
    /// `memory` is valid for writes of its length during the call; others may access it, as other processes do.
    pub(crate) unsafe fn read_cached(&mut self, file: File, offset: u64, memory: RawBuffer) -> Result<usize, Errno> {
        let os = self.os_file(file)?;
        if os.device {
            return Err(Errno::AGAIN);
        }
        // SAFETY: by the caller's word.
        let read = unsafe {
            if os.in_memory {
                blocking::read(os.fd(), memory, offset)
            } else {
                blocking::read_cached(os.fd(), memory, offset)
            }
        };
        read.map_err(|error| if error == Errno::OPNOTSUPP { Errno::AGAIN } else { error })
    }

    /// Writes at once if the file lives in memory; else `EAGAIN`.
    pub(crate) fn try_write(&mut self, file: File, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        let os = self.os_file(file)?;
        if !os.in_memory {
            return Err(Errno::AGAIN);
        }
        let memory = RawBuffer { ptr: bytes.as_ptr().cast_mut(), len: bytes.len() };
        // SAFETY: the slice is valid during the call, and a write only reads it.
        let n = unsafe { blocking::write(os.fd(), memory, offset, false)? };
        self.counters.written_copied_bytes += n as u64;
        Ok(())
    }

    /// Does a file operation at once if the file lives in memory (no device to wait for); else gives it back.
    pub(crate) fn file_op_now(&mut self, op: Op) -> Result<Outcome, Op> {
        let (Op::Read { file, .. }
        | Op::Write { file, .. }
        | Op::WriteOnce { file, .. }
        | Op::Sync { file }
        | Op::Prefetch { file, .. }) = op
        else {
            return Err(op);
        };
        let Ok(os) = self.os_file(file) else { return Ok(failed(op, Errno::BADF)) };
        if !os.in_memory || matches!(op, Op::Write { .. }) && os.write_by_worker {
            return Err(op);
        }
        Ok(match op {
            Op::Read { offset, into, start, len, .. } => {
                let memory = RawBuffer { ptr: into.range(start, len), len };
                // SAFETY: the frame is owned here and outlives the call.
                let result = unsafe { blocking::read(os.fd(), memory, offset) };
                self.counters.read_copied_bytes += *result.as_ref().unwrap_or(&0) as u64;
                Outcome::Read { into, result }
            }
            Op::Write { offset, from, start, len, .. } => {
                let memory = RawBuffer { ptr: from.range(start, len), len };
                // SAFETY: the frame is owned here and outlives the call.
                let result = unsafe { blocking::write(os.fd(), memory, offset, false) };
                self.counters.written_copied_bytes += *result.as_ref().unwrap_or(&0) as u64;
                Outcome::Written { from, result }
            }
            Op::WriteOnce { at, from, start, len, .. } => {
                let memory = RawBuffer { ptr: from.range(start, len), len };
                // SAFETY: the frame is owned here and outlives the call.
                let result = unsafe { blocking::write_once(os.fd(), memory, at) };
                self.counters.written_copied_bytes += *result.as_ref().unwrap_or(&0) as u64;
                Outcome::Written { from, result }
            }
            Op::Sync { .. } => Outcome::Synced(Ok(())),
            _ => Outcome::Prefetched(Ok(())),
        })
    }

    /// Counts the bytes of a file transfer that is done.
    pub(crate) fn count_transfer(&mut self, direct: bool, outcome: &Outcome) {
        let counters = &mut self.counters;
        match outcome {
            Outcome::Read { into, result: Ok(n) } if direct && into.is_device() => {
                counters.read_device_bytes += *n as u64;
            }
            Outcome::Written { from, result: Ok(n) } if direct && from.is_device() => {
                counters.written_device_bytes += *n as u64;
            }
            _ => {}
        }
        let (count, bytes) = match outcome {
            Outcome::Read { result: Ok(n), .. } if direct => (&mut counters.read_direct_bytes, *n),
            Outcome::Read { result: Ok(n), .. } => (&mut counters.read_copied_bytes, *n),
            Outcome::Written { result: Ok(n), .. } if direct => (&mut counters.written_direct_bytes, *n),
            Outcome::Written { result: Ok(n), .. } => (&mut counters.written_copied_bytes, *n),
            _ => return,
        };
        *count += bytes as u64;
    }

    /// Pages of the range were given back, or replaced by a hole.
    pub(crate) fn forget_residency(&self, file: File, offset: u64, len: u64) {
        if let Some(map) = self.os_file(file).ok().and_then(|os| os.map.as_ref()) {
            map.forget(offset, len);
        }
    }

    pub(crate) fn listener(&self, listener: Listener) -> Result<&OwnedFd, Errno> {
        self.listeners.get(listener.index, listener.generation).ok_or(Errno::BADF)
    }

    /// Makes ready what is due.
    pub(crate) fn expire_timers(&mut self, now: Instant) {
        while let Some(token) = self.timers.pop_due(now) {
            self.ready.push_back(Completion { token, outcome: Outcome::TimedOut(Ok(())) });
        }
    }

    /// Cancels the timers of `token`.
    pub(crate) fn cancel_timers(&mut self, token: Token) {
        for _ in 0..self.timers.cancel(token) {
            self.ready.push_back(Completion { token, outcome: Outcome::TimedOut(Err(Errno::CANCELED)) });
        }
    }

    pub(crate) fn fail(&mut self, op: Op, token: Token, error: Errno) {
        self.ready.push_back(Completion { token, outcome: failed(op, error) });
    }
}

/// The outcome of an operation that failed before it began.
pub(crate) fn failed(op: Op, error: Errno) -> Outcome {
    match op {
        Op::Accept { .. } => Outcome::Accepted(Err(error)),
        Op::Connect { .. } => Outcome::Connected(Err(error)),
        Op::Recv { into, .. } => Outcome::Received { into, result: Err(error) },
        Op::Send { gather, .. } => Outcome::Sent { gather, result: Err(error) },
        Op::Read { into, .. } => Outcome::Read { into, result: Err(error) },
        Op::Write { from, .. } | Op::WriteOnce { from, .. } => Outcome::Written { from, result: Err(error) },
        Op::Sync { .. } => Outcome::Synced(Err(error)),
        Op::Allocate { .. } => Outcome::Allocated(Err(error)),
        Op::Extents { .. } => Outcome::Extents(Err(error)),
        Op::Prefetch { .. } => Outcome::Prefetched(Err(error)),
        Op::Readable { .. } => Outcome::Readable(Err(error)),
        Op::Timer { .. } => Outcome::TimedOut(Err(error)),
    }
}
