//! Sends whose memory the network card reads itself (`IORING_OP_SENDMSG_ZC`, Linux 6.1), tried where they may pay, and given
//! up where the kernel reports that it copied after all.
//!
//! Such a send completes twice: once when the kernel has taken the bytes, as any send, and once when nothing reads the
//! memory any more, which may be a round trip later. The first completion is reported. The memory stays here until the
//! second, so that a frame never returns to its pool while a card or a retransmission may still read it. The socket's send
//! buffer bounds how much that can be.

use io_uring::types::Fd;
use io_uring::{opcode, squeue};
use rustix::io::Errno;

use super::Uring;
use super::slot::{Kind, Slot};
use crate::Gather;
use crate::gather::Segment;
use crate::limits::{OPS_MAX, ZERO_COPY_BYTES_MIN, ZERO_COPY_FRAMES_PER_HEAP_MIN};
use crate::op::{Completion, Outcome, Socket};

/// `IORING_SEND_ZC_REPORT_USAGE` of io_uring.h: the second completion says whether a CPU copied.
const REPORT_USAGE: u16 = 1 << 3;
/// `IORING_NOTIF_USAGE_ZC_COPIED`: it did.
const COPIED: u32 = 1 << 31;

/// Whether a stream's sends may be zero-copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ZeroCopy {
    /// As far as is known.
    Worth,
    /// The kernel copied, or cannot do it: loopback, most virtual devices, old kernels, locked memory spent.
    Useless,
}

/// Whether a gather is long and nearly all of it lies in frames. Heads are memory of the heap that is kept beyond the end of the
/// send, where no bound on what waits for a peer sees it; pages of files may be given back by others; and frames in a device
/// are not for it: the kernel pins no such page for a socket.
pub(super) fn is_worth_it(gather: &Gather) -> bool {
    let frame_bytes = gather.len() - gather.bytes_outside_frames();
    frame_bytes >= ZERO_COPY_BYTES_MIN
        && gather.heap_bytes() <= frame_bytes / ZERO_COPY_FRAMES_PER_HEAP_MIN
        && gather.segments.iter().all(|segment| match segment {
            Segment::Frame { frame, .. } => !frame.frame().is_device(),
            Segment::Head { .. } => true,
            Segment::Map { .. } | Segment::Zero { .. } => false,
        })
}

/// The entry of such a send.
pub(super) fn entry(slot: &Slot, fd: i32, flags: u32) -> squeue::Entry {
    opcode::SendMsgZc::new(Fd(fd), &raw const slot.message).flags(flags).ioprio(REPORT_USAGE).build()
}

/// Errors after which a plain send may still do.
pub(super) fn asks_for_plain(error: Errno) -> bool {
    matches!(error, Errno::INVAL | Errno::OPNOTSUPP | Errno::NOMEM | Errno::NOBUFS | Errno::PERM)
}

impl Uring {
    /// Whether a slot's send is to be zero-copy.
    pub(super) fn sends_zero_copy(&self, data: u64) -> bool {
        let Some(slot) = self.slots.get(data as u32, (data >> 32) as u32) else { return false };
        let Kind::Send { socket, gather, .. } = &slot.kind else { return false };
        let stream = self.streams.get(socket.index, socket.generation);
        let worth = stream.is_some_and(|stream| stream.tcp && stream.zero_copy == ZeroCopy::Worth);
        worth && self.slots.len() < OPS_MAX / 2 && is_worth_it(gather)
    }

    /// From now on the stream's sends are plain. False if they were already: then an error is an error.
    pub(super) fn gives_up_zero_copy(&mut self, socket: Socket) -> bool {
        let Some(stream) = self.streams.get_mut(socket.index, socket.generation) else { return false };
        std::mem::replace(&mut stream.zero_copy, ZeroCopy::Useless) == ZeroCopy::Worth
    }

    /// The second completion of a send: its memory is ours again, once this was the last.
    pub(super) fn released(&mut self, data: u64, result: i32) {
        let Some(slot) = self.slot_mut(data) else { return };
        let copied = result.cast_unsigned() & COPIED != 0;
        slot.pinned -= 1;
        slot.copied |= copied;
        let (last, copied_any) = (slot.pinned == 0, slot.copied);
        let (socket, bytes) = match &slot.kind {
            Kind::Pinned { socket, bytes, .. } => (*socket, *bytes),
            Kind::Send { socket, .. } => (*socket, 0),
            _ => return,
        };
        if copied && let Some(stream) = self.streams.get_mut(socket.index, socket.generation) {
            stream.zero_copy = ZeroCopy::Useless;
        }
        if last {
            let counters = &mut self.os.counters;
            let counter = if copied_any { &mut counters.sent_copied_bytes } else { &mut counters.sent_zero_copy_bytes };
            *counter += bytes;
        }
        if last
            && matches!(self.slot_mut(data).map(|slot| &slot.kind), Some(Kind::Pinned { .. }))
            && let Some(mut slot) = self.slots.remove(data as u32, (data >> 32) as u32)
        {
            slot.kind = Kind::Free;
            self.keep_spare(slot);
            if let Some(stream) = self.streams.get_mut(socket.index, socket.generation) {
                stream.pinned -= 1;
            }
            self.drop_if_unused(socket);
        }
    }

    /// Ends a send for its asker; what the kernel may still read stays in the slot.
    pub(super) fn finish_pinned(&mut self, data: u64, result: Result<usize, Errno>) {
        let Some(slot) = self.slot_mut(data) else { return };
        let (token, progress) = (slot.token, slot.progress);
        let Kind::Send { socket, gather, .. } = std::mem::take(&mut slot.kind) else { return };
        self.os.unuse_gather(&gather, progress, 0);
        // Who copied them the kernel will say; they are counted then.
        self.os.counters.sent_copied_bytes -= progress as u64;
        if let Some(slot) = self.slot_mut(data) {
            slot.kind = Kind::Pinned { socket, bytes: progress as u64, _memory: gather };
        }
        if let Some(stream) = self.streams.get_mut(socket.index, socket.generation) {
            stream.pinned += 1;
        }
        self.leave(socket, data);
        let outcome = Outcome::Sent { gather: Gather::new(), result };
        self.os.ready.push_back(Completion { token, outcome });
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::frame::FramePool;
    use crate::op::{Op, Token, Wait};
    use crate::time::monotonic;

    /// What a send counts whose memory the kernel lets go of with these words.
    fn counted(words: &[u32]) -> (u64, u64) {
        let frames = FramePool::new(1 << 20).unwrap();
        let mut uring = Uring::open(&frames).unwrap();
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let socket = uring.adopt(ours.into()).unwrap();
        let (index, generation) = uring.slots.insert(Box::default());
        let data = u64::from(generation) << 32 | u64::from(index);
        let slot = uring.slot_mut(data).unwrap();
        slot.kind = Kind::Pinned { socket, bytes: 1000, _memory: Gather::new() };
        slot.pinned = words.len() as u32;
        uring.streams.get_mut(socket.index, socket.generation).unwrap().pinned = 1;
        for word in words {
            uring.released(data, word.cast_signed());
        }
        assert_eq!(uring.streams.get(socket.index, socket.generation).unwrap().pinned, 0);
        (uring.os.counters.sent_copied_bytes, uring.os.counters.sent_zero_copy_bytes)
    }

    #[test]
    fn heads_are_not_kept_beyond_the_end_of_a_send_for_many_bytes() {
        let frames = FramePool::new(1 << 20).unwrap();
        // A list of volumes is all heads; a read of 4 KiB has a header of 128 bytes.
        for (head_bytes, frame_bytes, count, expected) in [
            (16 << 10, 0, 16, false),
            (16 << 10, 64 << 10, 1, false),
            (128, 4 << 10, 16, true),
            (128, 4 << 10, 15, false),
        ] {
            let mut gather = Gather::new();
            for _ in 0..count {
                gather.push_head(&vec![1; head_bytes]);
                gather.push_frame(frames.alloc(frame_bytes.max(1)).unwrap(), 0, frame_bytes);
            }
            assert_eq!(is_worth_it(&gather), expected, "{count} heads of {head_bytes}, frames of {frame_bytes}");
        }
    }

    #[test]
    fn a_send_in_several_parts_is_counted_once_and_as_copied_if_any_was() {
        let frames = FramePool::new(1 << 20).unwrap();
        if Uring::open(&frames).is_err() {
            return byway_skip::skip_this(byway_skip::NO_IO_URING);
        }
        assert_eq!(counted(&[0]), (0, 1000));
        assert_eq!(counted(&[0, 0, 0]), (0, 1000));
        assert_eq!(counted(&[COPIED]), (1000, 0));
        assert_eq!(counted(&[COPIED, 0]), (1000, 0));
        assert_eq!(counted(&[0, COPIED]), (1000, 0));
    }

    #[test]
    fn a_long_send_is_tried_without_a_copy_and_no_more_where_the_kernel_copies() {
        let frames = FramePool::new(4 << 20).unwrap();
        let Ok(mut uring) = Uring::open(&frames) else { return byway_skip::skip_this(byway_skip::NO_IO_URING) };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut theirs, _) = listener.accept().unwrap();
        let socket = uring.adopt(ours.into()).unwrap();
        let mut reaped = Vec::new();
        for round in 0..2u8 {
            let len = 256 << 10;
            let mut frame = frames.alloc(len).unwrap();
            frame.fill(round + 1);
            let mut gather = Gather::new();
            gather.push_head(b"head");
            gather.push_frame(frame, 0, len);
            assert!(is_worth_it(&gather));
            uring.submit(Op::Send { socket, gather }, Token::new(1, 0, 0, 0));
            let reader = std::thread::spawn(move || {
                let mut bytes = vec![0; 4 + len];
                theirs.read_exact(&mut bytes).unwrap();
                (theirs, bytes)
            });
            // Until the asker has its answer and the frame is back.
            let deadline = monotonic() + std::time::Duration::from_secs(20);
            let mut sent = None;
            while sent.is_none() || frames.free_bytes() < frames.bytes() {
                assert!(monotonic() < deadline, "the send or its frame did not come back");
                uring.reap(&mut reaped, Wait::Until(monotonic() + std::time::Duration::from_millis(20))).unwrap();
                for completion in reaped.drain(..) {
                    if let Outcome::Sent { result, .. } = completion.outcome {
                        assert!(sent.replace(result).is_none(), "it completes once");
                    }
                }
            }
            assert_eq!(sent, Some(Ok(4 + len)));
            let (back, bytes) = reader.join().unwrap();
            theirs = back;
            assert!(bytes[..4] == *b"head" && bytes[4..].iter().all(|byte| *byte == round + 1));
            // Loopback always copies, and the kernel says so: one try is all it gets.
            let stream = uring.streams.get(socket.index, socket.generation).unwrap();
            assert_eq!((stream.zero_copy, stream.pinned), (ZeroCopy::Useless, 0));
        }
        assert_eq!(uring.os.counters.sent_zero_copy_bytes, 0);
        assert_eq!(uring.os.counters.sent_copied_bytes, 2 * (4 + (256 << 10)));
    }
}
