//! One operation in flight: its kind, its memory, and the data that the kernel reads while it is submitted.

use std::os::fd::OwnedFd;
use std::rc::Rc;

use io_uring::opcode;
use io_uring::squeue::Entry;
use io_uring::types::{Fd, FsyncFlags};
use rustix::io::Errno;
use rustix::net::AddressFamily;

use super::{FixedBuffer, call_for, frame_memory, within};
use crate::blocking::RawBuffer;
use crate::device_memory::apart;
use crate::frame::Frame;
use crate::op::{Address, Allocate, Descriptor, Extent, File, Listener, Op, Outcome, Socket, Token, WriteAt};
use crate::splice::SplicedSend;
use crate::workers::Call;
use crate::{Gather, Scatter};

/// An operation. Boxed, so that `message` and `iovecs` stay where the kernel was told they are.
pub(super) struct Slot {
    pub(super) token: Token,
    pub(super) kind: Kind,
    /// Bytes done of a transfer.
    pub(super) progress: usize,
    pub(super) cancelled: bool,
    /// Completions of zero-copy sends that have not said that the memory is ours again.
    pub(super) pinned: u32,
    /// The kernel has said of one of them that a CPU copied after all.
    pub(super) copied: bool,
    pub(super) message: libc::msghdr,
    pub(super) iovecs: Vec<libc::iovec>,
}

impl Default for Slot {
    fn default() -> Self {
        let iovecs = Vec::new();
        Self {
            token: Token::WAKE,
            kind: Kind::Free,
            progress: 0,
            cancelled: false,
            pinned: 0,
            copied: false,
            message: crate::epoll::message(&iovecs),
            iovecs,
        }
    }
}

#[derive(Default)]
pub(super) enum Kind {
    #[default]
    Free,
    Receive {
        socket: Socket,
        into: Scatter,
        min: usize,
    },
    Send {
        socket: Socket,
        gather: Gather,
        splice: Option<SplicedSend>,
    },
    /// A send that has ended for its asker, and whose memory the kernel may still read.
    Pinned {
        socket: Socket,
        /// What it moved.
        bytes: u64,
        _memory: Gather,
    },
    Accept {
        listener: Listener,
    },
    Connect {
        fd: Option<OwnedFd>,
        address: SocketAddress,
    },
    Readable {
        descriptor: Descriptor,
        /// Open as long as the kernel may look at it.
        fd: Rc<OwnedFd>,
    },
    Read {
        file: File,
        offset: u64,
        into: Frame,
        start: usize,
        len: usize,
    },
    Write {
        file: File,
        offset: u64,
        from: Frame,
        start: usize,
        len: usize,
        durable: bool,
    },
    WriteOnce {
        file: File,
        at: WriteAt,
        from: Frame,
        start: usize,
        len: usize,
    },
    Sync {
        file: File,
    },
    Allocate {
        file: File,
        mode: Allocate,
        offset: u64,
        len: u64,
    },
    Extents {
        file: File,
        offset: u64,
        len: u64,
        count_max: usize,
    },
    Prefetch {
        file: File,
        offset: u64,
        len: u64,
    },
}

impl Kind {
    pub(super) fn from_file_op(op: Op) -> Self {
        match op {
            Op::Read { file, offset, into, start, len } => Self::Read { file, offset, into, start, len },
            Op::Write { file, offset, from, start, len, durable } => {
                Self::Write { file, offset, from, start, len, durable }
            }
            Op::WriteOnce { file, at, from, start, len } => Self::WriteOnce { file, at, from, start, len },
            Op::Sync { file } => Self::Sync { file },
            Op::Allocate { file, mode, offset, len } => Self::Allocate { file, mode, offset, len },
            Op::Extents { file, offset, len, count_max } => Self::Extents { file, offset, len, count_max },
            Op::Prefetch { file, offset, len } => Self::Prefetch { file, offset, len },
            _ => Self::Free,
        }
    }

    pub(super) fn file(&self) -> Option<File> {
        match self {
            Self::Read { file, .. }
            | Self::Write { file, .. }
            | Self::WriteOnce { file, .. }
            | Self::Sync { file }
            | Self::Allocate { file, .. }
            | Self::Extents { file, .. }
            | Self::Prefetch { file, .. } => Some(*file),
            _ => None,
        }
    }

    pub(super) fn outcome(self, result: Result<usize, Errno>, extents: Vec<Extent>) -> Outcome {
        let unit = result.map(|_| ());
        match self {
            Self::Free | Self::Pinned { .. } => Outcome::Woken,
            Self::Receive { into, .. } => Outcome::Received { into, result },
            Self::Send { gather, .. } => Outcome::Sent { gather, result },
            Self::Accept { .. } => Outcome::Accepted(Err(result.err().unwrap_or(Errno::CANCELED))),
            Self::Connect { .. } => Outcome::Connected(Err(result.err().unwrap_or(Errno::CANCELED))),
            Self::Readable { .. } => Outcome::Readable(unit),
            Self::Read { into, .. } => Outcome::Read { into, result },
            Self::Write { from, .. } | Self::WriteOnce { from, .. } => Outcome::Written { from, result },
            Self::Sync { .. } => Outcome::Synced(unit),
            Self::Allocate { .. } => Outcome::Allocated(unit),
            Self::Extents { .. } => Outcome::Extents(unit.map(|()| extents)),
            Self::Prefetch { .. } => Outcome::Prefetched(unit),
        }
    }
}

impl Slot {
    /// The file and the length of a read or write.
    pub(super) fn transfer(&self) -> Option<(File, usize)> {
        match self.kind {
            Kind::Read { file, len, .. } | Kind::Write { file, len, .. } | Kind::WriteOnce { file, len, .. } => {
                Some((file, len))
            }
            _ => None,
        }
    }

    /// The submission for what is left of a file operation, if the ring can do it.
    pub(super) fn file_entry(&mut self, fd: Fd, device: bool, fixed: Option<FixedBuffer>) -> Option<Entry> {
        let progress = self.progress;
        let advanced = |memory: RawBuffer| {
            // SAFETY: `progress` is less than the length of the transfer.
            let ptr = unsafe { memory.ptr.add(progress) };
            RawBuffer { ptr, len: memory.len - progress }
        };
        match &self.kind {
            Kind::Read { offset, into, start, len, .. } => {
                let memory = advanced(frame_memory(into, *start, *len));
                let at = offset + progress as u64;
                let bytes = memory.len as u32;
                Some(if within(fixed, memory) {
                    opcode::ReadFixed::new(fd, memory.ptr, bytes, 0).offset(at).build()
                } else {
                    opcode::Read::new(fd, memory.ptr, bytes).offset(at).ioprio(priority_of(into)).build()
                })
            }
            Kind::Write { offset, from, start, len, durable, .. } => {
                let memory = advanced(frame_memory(from, *start, *len));
                let at = offset + progress as u64;
                let bytes = memory.len as u32;
                let flags = if *durable { libc::RWF_DSYNC } else { 0 };
                Some(if within(fixed, memory) {
                    opcode::WriteFixed::new(fd, memory.ptr, bytes, 0).offset(at).rw_flags(flags).build()
                } else {
                    let priority = priority_of(from);
                    opcode::Write::new(fd, memory.ptr, bytes).offset(at).rw_flags(flags).ioprio(priority).build()
                })
            }
            Kind::WriteOnce { at, from, start, len, .. } => {
                let memory = frame_memory(from, *start, *len);
                let (offset, flags) = at.offset_and_flags();
                let (ptr, bytes) = (memory.ptr, memory.len as u32);
                let entry = if within(fixed, memory) {
                    opcode::WriteFixed::new(fd, ptr, bytes, 0).offset(offset).rw_flags(flags).build()
                } else {
                    opcode::Write::new(fd, ptr, bytes).offset(offset).rw_flags(flags).build()
                };
                // The kernel tries a write without waiting first, and has a thread write the rest: an append would be two.
                Some(if *at == WriteAt::End { entry.flags(io_uring::squeue::Flags::ASYNC) } else { entry })
            }
            Kind::Sync { .. } => Some(opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build()),
            Kind::Allocate { mode, offset, len, .. } if !device => {
                let flags = crate::blocking::fallocate_flags(*mode).bits() as i32;
                Some(opcode::Fallocate::new(fd, *len).offset(*offset).mode(flags).build())
            }
            Kind::Prefetch { offset, len, .. } => {
                let len = i64::try_from(*len).unwrap_or(i64::MAX);
                Some(opcode::Fadvise::new(fd, len, libc::POSIX_FADV_WILLNEED).offset(*offset).build())
            }
            _ => None,
        }
    }

    /// The blocking call for what the ring cannot do.
    pub(super) fn call(&self) -> Option<Call> {
        call_for(&self.kind)
    }
}

/// The priority of a transfer; 0 is the thread's.
fn priority_of(frame: &Frame) -> u16 {
    if frame.is_device() { apart::priority() } else { 0 }
}

/// A socket address in the kernel's form.
pub(super) struct SocketAddress(socket2::SockAddr);

impl SocketAddress {
    pub(super) fn new(address: &Address) -> Result<Self, Errno> {
        match address {
            Address::Tcp(address) => Ok(Self((*address).into())),
            Address::Unix(path) | Address::Shared(path) => {
                socket2::SockAddr::unix(path).map(Self).map_err(|_| Errno::NAMETOOLONG)
            }
            Address::Rdma(_) => Err(Errno::OPNOTSUPP),
        }
    }

    pub(super) fn is_tcp(&self) -> bool {
        !self.0.is_unix()
    }

    pub(super) fn family(&self) -> AddressFamily {
        AddressFamily::from_raw(self.0.family())
    }

    pub(super) fn raw(&self) -> (*const libc::sockaddr, libc::socklen_t) {
        (self.0.as_ptr().cast(), self.0.len())
    }
}
