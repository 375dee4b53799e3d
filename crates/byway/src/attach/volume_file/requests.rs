//! Requests on the volume's file: some are answered at once, the others become requests of the volume's client.

use std::time::Duration;

use byway_frontend::fuse::abi::{Attr, OpenOut, ROOT, StatFsOut, WriteOut, open};
use byway_frontend::fuse::reply::{self, Entry};
use byway_frontend::fuse::request::{Operation, Parsed};
use byway_reactor::{ByteRange, Errno, Frame};
use byway_service::block::ZeroFlags;
use byway_service::block::client::{Request, VolumeInfo};
use rustix::fs::FallocateFlags;
use zerocopy::IntoBytes;

use super::{NODE, VolumeFile};
use crate::attach::volume_server::{KernelWrite, Requests};

/// How long the kernel believes what it is told of the file: until it is told otherwise.
const VALID: Duration = Duration::from_hours(24);

/// Payloads up to this many bytes are copied into a frame of their own size: the client keeps the frame until the volume is flushed,
/// and counts the payload's bytes, not the frame's.
const COPIED_BYTES_MAX: usize = 512 << 10;

/// What is to be asked of the client.
#[derive(Debug)]
pub(super) enum Left {
    /// It was answered.
    Nothing,
    Read {
        offset: u64,
        len: usize,
    },
    Write {
        offset: u64,
        len: usize,
    },
    Flush,
    Zero {
        offset: u64,
        len: u64,
        keep_space: bool,
    },
}

impl VolumeFile {
    /// Answers what needs no volume.
    pub(super) fn request(&mut self, parsed: &Parsed<'_>, frame: &Frame, info: &VolumeInfo) -> Left {
        let unique = parsed.unique;
        let end = info.len;
        match parsed.operation {
            Operation::Read { offset, size, .. } => {
                let len = u64::from(size).min(end.saturating_sub(offset)) as usize;
                if len > 0 {
                    return Left::Read { offset, len };
                }
                self.finish(unique, Ok(&[]));
            }
            Operation::Write(write) if info.read_only => {
                let _ = write;
                self.refuse(unique, Errno::ROFS);
            }
            Operation::Write(write) => {
                debug_assert!(write.data.is_empty() || write.data.as_ptr() == frame.as_ptr());
                if !ByteRange::new(write.offset, write.data.len() as u64).ends_by(end) {
                    self.refuse(unique, Errno::NOSPC);
                } else if write.data.is_empty() {
                    self.finish(unique, Ok(&[WriteOut::default().as_bytes()]));
                } else {
                    return Left::Write { offset: write.offset, len: write.data.len() };
                }
            }
            Operation::Fsync { .. } if info.read_only => self.finish(unique, Ok(&[])),
            Operation::Fsync { .. } => return Left::Flush,
            Operation::Fallocate { offset, length, mode, .. } => {
                let mode = FallocateFlags::from_bits_retain(mode);
                return self.fallocate(unique, ByteRange::new(offset, length), mode, info);
            }
            operation => self.request_on_names(parsed, operation, info),
        }
        Left::Nothing
    }

    /// Discards, and writes of zeroes: both read as zeroes afterwards.
    fn fallocate(&mut self, unique: u64, range: ByteRange, mode: FallocateFlags, info: &VolumeInfo) -> Left {
        let ByteRange { offset, len } = range;
        let kinds = FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE;
        if !mode.intersects(kinds) || mode - kinds != FallocateFlags::KEEP_SIZE {
            self.refuse(unique, Errno::OPNOTSUPP);
        } else if info.read_only {
            self.refuse(unique, Errno::ROFS);
        } else if offset >= info.len || len == 0 {
            self.finish(unique, Ok(&[]));
        } else {
            let len = len.min(info.len - offset);
            return Left::Zero { offset, len, keep_space: mode.contains(FallocateFlags::ZERO_RANGE) };
        }
        Left::Nothing
    }

    fn request_on_names(&mut self, parsed: &Parsed<'_>, operation: Operation<'_>, info: &VolumeInfo) {
        let unique = parsed.unique;
        match operation {
            Operation::Lookup { name } if name == self.name.as_bytes() && parsed.node == ROOT => {
                let attr = attributes(NODE, info);
                let entry = Entry { node: NODE, generation: 0, attr, entry_valid: VALID, attr_valid: VALID };
                self.finish(unique, Ok(&[entry.encode().as_bytes()]));
            }
            Operation::Lookup { .. } => self.refuse(unique, Errno::NOENT),
            Operation::GetAttr { .. } => {
                let attr = attributes(parsed.node, info);
                self.finish(unique, Ok(&[reply::attributes(attr, VALID).as_bytes()]));
            }
            Operation::Open { .. } => {
                // A process that dies must not wait for a FLUSH that it would have to answer itself.
                let open_flags = open::DIRECT_IO | open::PARALLEL_DIRECT_WRITES | open::NO_FLUSH | open::KEEP_CACHE;
                self.finish(unique, Ok(&[OpenOut { handle: 1, open_flags, backing_id: 0 }.as_bytes()]));
            }
            Operation::StatFs => {
                let block_bytes = info.block_bytes.max(4096);
                let blocks = info.len / u64::from(block_bytes);
                let numbers = StatFsOut { blocks, block_bytes, fragment_bytes: block_bytes, ..StatFsOut::default() };
                self.finish(unique, Ok(&[numbers.as_bytes()]));
            }
            Operation::Release { .. } | Operation::Flush { .. } | Operation::Access { .. } => {
                self.finish(unique, Ok(&[]));
            }
            _ => self.refuse(unique, Errno::NOSYS),
        }
    }

    /// Asks the client for what is left of a request, which was read into `frame`.
    pub(super) fn submit_left(&mut self, unique: u64, left: Left, frame: Frame, requests: &mut Requests) {
        if let Left::Write { offset, len } = left {
            let from = match requests.alloc(len).filter(|_| len <= COPIED_BYTES_MAX) {
                Some(mut own) => {
                    own.copy_from(0, &frame, 0..len);
                    self.incoming = Some(frame);
                    own
                }
                None => frame,
            };
            return requests.write(KernelWrite { unique, offset, len, durable: false }, from);
        }
        self.incoming = Some(frame);
        match left {
            Left::Read { offset, len } => requests.read(unique, offset, len),
            Left::Zero { offset, len, keep_space } => {
                let flags = ZeroFlags { keep_space, ..ZeroFlags::default() };
                requests.ask_plain(unique, Request::Zero { offset, len, flags });
            }
            Left::Flush => requests.ask_plain(unique, Request::Flush),
            Left::Nothing | Left::Write { .. } => {}
        }
    }

    pub(super) fn refuse(&mut self, unique: u64, errno: Errno) {
        self.finish(unique, Err(errno.raw_os_error()));
    }

    pub(super) fn finish(&mut self, unique: u64, answer: Result<&[&[u8]], i32>) {
        self.session.finish(unique);
        self.reply(unique, answer);
    }
}

fn attributes(node: u64, info: &VolumeInfo) -> Attr {
    if node == ROOT {
        return Attr { ino: ROOT, mode: 0o40500, nlink: 2, block_bytes: 4096, ..Attr::default() };
    }
    let mode = if info.read_only { 0o100_400 } else { 0o100_600 };
    let size = info.len;
    Attr { ino: NODE, mode, nlink: 1, size, blocks: size / 512, block_bytes: 4096, ..Attr::default() }
}
