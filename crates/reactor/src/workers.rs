//! File calls that block, on a [`ThreadPool`]: all of them under epoll; under io_uring those that the ring lacks.
//!
//! A call carries raw memory of a frame. The loop keeps the frame in the operation's slot until the call's end has been
//! collected, and waits for all calls before it is dropped; so the memory outlives the call.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::io::Errno;

use crate::blocking::{self, RawBuffer};
use crate::device_memory::apart::with_priority;
use crate::file::{Backing, OpenFile};
use crate::limits::WORKERS_MAX;
use crate::op::{Allocate, Extent, WriteAt};
use crate::thread_pool::ThreadPool;
use crate::waker::Waker;

/// A blocking call on a file.
#[derive(Debug)]
pub(crate) enum Call {
    /// `staged`: the memory is a device's.
    Read {
        memory: RawBuffer,
        offset: u64,
        staged: bool,
    },
    /// As for `Read`.
    Write {
        memory: RawBuffer,
        offset: u64,
        durable: bool,
        staged: bool,
    },
    WriteOnce {
        memory: RawBuffer,
        at: WriteAt,
    },
    Sync,
    Allocate {
        mode: Allocate,
        offset: u64,
        len: u64,
    },
    Extents {
        offset: u64,
        len: u64,
        count_max: usize,
    },
    Prefetch {
        offset: u64,
        len: u64,
    },
}

/// What came of a call.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) slot: u64,
    pub(crate) result: Result<usize, Errno>,
    pub(crate) extents: Vec<Extent>,
}

struct BlockingCall {
    slot: u64,
    file: Arc<OpenFile>,
    call: Call,
}

// SAFETY: the memory of a call is touched by the one thread that runs it; the loop does not look at the frame until the
// call's `Done` has been collected.
unsafe impl Send for BlockingCall {}

/// The threads and their queue, bounded by the loop's number of operations.
pub(crate) struct Workers(ThreadPool<BlockingCall, Done>);

impl Workers {
    pub(crate) fn new(waker: Waker) -> Self {
        Self(ThreadPool::new(waker, "byway-file", || Box::new(BlockingCall::run)))
    }

    /// Queues a call for the operation in `slot`.
    ///
    /// # Errors
    /// `EAGAIN` if no thread runs and none can be started.
    ///
    /// # Safety
    /// The memory of `call` stays valid and untouched until [`Workers::collect`] has given its `Done`.
    pub(crate) unsafe fn run(&mut self, slot: u64, file: Arc<OpenFile>, call: Call) -> Result<(), Errno> {
        // A file's lock lets one write in at a time: more threads would contend for it.
        let threads_max = match call {
            Call::Write { .. } if matches!(&file.backing, Backing::Os(os) if os.write_by_worker) => 1,
            _ => WORKERS_MAX,
        };
        self.0.run(BlockingCall { slot, file, call }, threads_max)
    }

    /// Calls that have not been collected.
    pub(crate) fn pending(&self) -> usize {
        self.0.pending()
    }

    /// Moves finished calls to `into`.
    pub(crate) fn collect(&mut self, into: &mut Vec<Done>) {
        self.0.collect(into);
    }
}

impl BlockingCall {
    fn run(self) -> Done {
        let mut extents = Vec::new();
        let result = match &self.file.backing {
            Backing::Os(os) => call(os.fd(), os.device, &self.call, &mut extents),
            Backing::Sim(_) => Err(Errno::BADF),
        };
        Done { slot: self.slot, result, extents }
    }
}

fn call(fd: BorrowedFd<'_>, device: bool, call: &Call, extents: &mut Vec<Extent>) -> Result<usize, Errno> {
    match *call {
        Call::Read { memory, offset, staged } => {
            // SAFETY: the frame is kept, and left alone, by the operation's slot (the contract of `run`).
            let read = || unsafe { blocking::read(fd, memory, offset) };
            if staged { with_priority(read) } else { read() }
        }
        Call::Write { memory, offset, durable, staged } => {
            // SAFETY: as above.
            let write = || unsafe { blocking::write(fd, memory, offset, durable) };
            if staged { with_priority(write) } else { write() }
        }
        // SAFETY: as above.
        Call::WriteOnce { memory, at } => unsafe { blocking::write_once(fd, memory, at) },
        Call::Sync => blocking::sync(fd).map(|()| 0),
        Call::Allocate { mode, offset, len } => blocking::allocate(fd, device, mode, offset, len).map(|()| 0),
        Call::Extents { offset, len, count_max } => {
            *extents = blocking::extents(fd, device, offset, len, count_max)?;
            Ok(0)
        }
        Call::Prefetch { offset, len } => blocking::prefetch(fd, offset, len).map(|()| 0),
    }
}
