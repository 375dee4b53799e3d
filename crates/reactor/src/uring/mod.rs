//! The io_uring backend: one ring per loop, entered by its thread alone (`SINGLE_ISSUER | DEFER_TASKRUN`), so that
//! submissions and waiting share one system call and completions never interrupt the loop.
//!
//! An operation lives in a boxed slot until its completion has been reaped; the box keeps what the kernel reads (message
//! headers, addresses) in place. The pool of frames is registered once, so that file transfers skip pinning their
//! pages.

mod descriptor;
mod slot;
mod stream;
mod zero_copy;

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use rustix::io::Errno;

use self::slot::{Kind, Slot};
use self::zero_copy::ZeroCopy;
use crate::blocking::RawBuffer;
use crate::counters::Counters;
use crate::file::OpenFile;
use crate::frame::{Frame, FramePool};
use crate::handles::Table;
use crate::limits::OPS_MAX;
use crate::op::{Completion, File, Op, Outcome, Token, Wait};
use crate::os::Os;
use crate::splice::SplicedSend;
use crate::time::{Instant, monotonic};
use crate::waker::Waker;
use crate::workers::{Call, Done};

/// Submissions that are gathered before the kernel must be entered.
const SUBMISSIONS: u32 = 1024;
/// Completions that the kernel keeps before it has to allocate for more.
const COMPLETIONS: u32 = 8192;
/// How long an ending loop waits for zero-copy sends to be acknowledged; then their memory is leaked.
const RELEASE_WAIT: Duration = Duration::from_secs(1);
/// `user_data` of the wake-up poll and of cancellations, which no slot has.
const DATA_WAKE: u64 = u64::MAX;
const DATA_CANCEL: u64 = u64::MAX - 1;

pub(crate) struct Uring {
    pub(crate) ring: IoUring,
    os: Os,
    streams: Table<Stream>,
    slots: Table<Box<Slot>>,
    /// Boxes of finished operations, for the next ones.
    #[expect(clippy::vec_box, reason = "a slot keeps its address when it is used again")]
    spare: Vec<Box<Slot>>,
    /// The pool's mapping, if the kernel took it as a fixed buffer.
    fixed: Option<FixedBuffer>,
    wake_armed: bool,
    done: Vec<Done>,
    reaped: Vec<io_uring::cqueue::Entry>,
    /// The error by which the kernel refused submissions for good.
    refused: Option<std::io::Error>,
}

/// A stream: its descriptor and the slots that use it.
struct Stream {
    fd: OwnedFd,
    tcp: bool,
    receive: Option<u64>,
    send: Option<u64>,
    closing: bool,
    zero_copy: ZeroCopy,
    /// Slots whose memory the kernel may still read.
    pinned: u32,
}

/// What to do about a ring that was refused, in words to put behind the error; nothing where that is not known.
pub(crate) fn remedy(error: &std::io::Error) -> &'static str {
    // The newest kernels count the ring itself as locked memory.
    if error.raw_os_error() == Some(libc::ENOMEM) { " (raise RLIMIT_MEMLOCK)" } else { "" }
}

/// Has the kernel do nothing, once. A filter of system calls may allow that a ring is made and refuse that it is entered.
///
/// # Errors
/// The kernel's.
pub(crate) fn enter_once(ring: &mut IoUring) -> std::io::Result<()> {
    // SAFETY: the entry points to nothing.
    unsafe { ring.submission().push(&opcode::Nop::new().build()) }.map_err(|_| std::io::ErrorKind::StorageFull)?;
    while ring.completion().is_empty() {
        match ring.submit_and_wait(1) {
            Err(error) if !is_transient(&error) => return Err(error),
            _ => {}
        }
    }
    ring.completion().for_each(drop);
    Ok(())
}

/// Whether the kernel may take the same submissions at the next try.
fn is_transient(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

impl Uring {
    pub(crate) fn open(frames: &FramePool) -> std::io::Result<Self> {
        let mut builder = IoUring::builder();
        builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
        let mut uring = Self::build(&mut builder)?;
        let (base, len) = frames.region();
        let iovec = libc::iovec { iov_base: base.cast(), iov_len: len };
        // SAFETY: the pool's mapping outlives the ring: every slot's frame holds it, and the kernel pins its pages.
        let registered = unsafe { uring.ring.submitter().register_buffers(&[iovec]) };
        uring.fixed = registered.is_ok().then_some(FixedBuffer { base: base as usize, len });
        Ok(uring)
    }

    /// A ring that several threads enter in turn. An operation belongs to the thread that submitted it also in the kernel,
    /// which cancels it when that thread ends. That was not requested, so the reaping thread submits it again.
    pub(crate) fn open_for_threads() -> std::io::Result<Self> {
        Self::build(&mut IoUring::builder())
    }

    fn build(builder: &mut io_uring::Builder) -> std::io::Result<Self> {
        let mut ring = builder.setup_submit_all().setup_clamp().setup_cqsize(COMPLETIONS).build(SUBMISSIONS)?;
        let params = ring.params();
        if !params.is_feature_submit_stable() || !params.is_feature_ext_arg() || !params.is_feature_nodrop() {
            return Err(Errno::NOSYS.into());
        }
        enter_once(&mut ring)?;
        Ok(Self {
            ring,
            os: Os::new()?,
            streams: Table::default(),
            slots: Table::default(),
            spare: Vec::new(),
            fixed: None,
            wake_armed: false,
            done: Vec::new(),
            reaped: Vec::new(),
            refused: None,
        })
    }

    /// What the ring could be given, in words.
    pub(crate) fn features(&self) -> String {
        match self.fixed {
            Some(fixed) => format!("frames registered ({} MiB)", fixed.len >> 20),
            None => "frames not registered (raise RLIMIT_MEMLOCK)".to_owned(),
        }
    }

    pub(crate) fn submit(&mut self, op: Op, token: Token) {
        if self.slots.len() + self.os.timers.len() >= OPS_MAX {
            return self.os.fail(op, token, Errno::AGAIN);
        }
        match op {
            Op::Recv { socket, into, min } => self.start_receive(socket, into, min.max(1), token),
            Op::Send { socket, gather } => self.start_send(socket, gather, token),
            Op::Accept { listener } => self.start_accept(listener, token),
            Op::Connect { to } => self.start_connect(to, token),
            Op::Readable { descriptor } => self.start_wait(descriptor, token),
            Op::Timer { at } => self.os.timers.add(at, token),
            file_op => match self.os.file_op_now(file_op) {
                Ok(outcome) => self.os.ready.push_back(Completion { token, outcome }),
                Err(file_op) => self.start_file_op(file_op, token),
            },
        }
    }

    /// Puts an operation into a slot; gives its `user_data`.
    fn occupy(&mut self, token: Token, kind: Kind) -> u64 {
        let mut slot = self.spare.pop().unwrap_or_default();
        slot.token = token;
        slot.kind = kind;
        slot.progress = 0;
        slot.cancelled = false;
        slot.pinned = 0;
        slot.copied = false;
        let (index, generation) = self.slots.insert(slot);
        u64::from(generation) << 32 | u64::from(index)
    }

    fn slot_mut(&mut self, data: u64) -> Option<&mut Slot> {
        self.slots.get_mut(data as u32, (data >> 32) as u32).map(|boxed| &mut **boxed)
    }

    /// Queues a submission, entering the kernel when the queue is full. Once the kernel has refused submissions for good, the
    /// operation stays in its slot, and [`Uring::reap`] fails.
    fn push(&mut self, entry: squeue::Entry, data: u64) {
        if self.refused.is_some() {
            return;
        }
        let entry = entry.user_data(data);
        loop {
            // SAFETY: what the entry points to lies in the slot of `data` (boxed) or in frames, mappings and
            // descriptors that the slot keeps until its completion.
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return;
            }
            // The queue is full: the kernel takes it, or is short of memory for the moment.
            if let Err(error) = self.ring.submit()
                && !is_transient(&error)
            {
                self.refused = Some(error);
                return;
            }
        }
    }

    fn start_file_op(&mut self, op: Op, token: Token) {
        let (Op::Read { file, .. }
        | Op::Write { file, .. }
        | Op::WriteOnce { file, .. }
        | Op::Sync { file }
        | Op::Allocate { file, .. }
        | Op::Extents { file, .. }
        | Op::Prefetch { file, .. }) = op
        else {
            return self.os.fail(op, token, Errno::INVAL);
        };
        let (fd, device, by_worker) = match self.os.os_file(file) {
            Ok(os) => (Fd(os.raw()), os.device, os.write_by_worker && matches!(op, Op::Write { .. })),
            Err(error) => return self.os.fail(op, token, error),
        };
        self.os.in_use(file);
        let data = self.occupy(token, Kind::from_file_op(op));
        let fixed = self.fixed;
        let Some(slot) = self.slot_mut(data) else { return };
        if !by_worker && let Some(entry) = slot.file_entry(fd, device, fixed) {
            return self.push(entry, data);
        }
        let Some(call) = slot.call() else { return };
        let Ok(open) = self.os.file(file).cloned() else { return };
        // SAFETY: the frame of a write lies in its slot until the call's `Done` is collected, and nothing touches it there;
        // other calls have no memory of a frame.
        if let Err(error) = unsafe { self.os.workers.run(data, open, call) } {
            self.finish(data, Err(error), Vec::new());
        }
    }

    fn keep_spare(&mut self, slot: Box<Slot>) {
        if self.spare.len() < 1024 {
            self.spare.push(slot);
        }
    }

    /// Ends the operation of `data` and makes its completion ready.
    fn finish(&mut self, data: u64, result: Result<usize, Errno>, extents: Vec<crate::Extent>) {
        let Some(mut slot) = self.slots.remove(data as u32, (data >> 32) as u32) else { return };
        let mut kind = std::mem::take(&mut slot.kind);
        let token = slot.token;
        let progress = slot.progress;
        self.keep_spare(slot);
        if let Kind::Receive { socket, into, .. } = &kind {
            self.os.counters.received_device_bytes += into.device_bytes(progress) as u64;
            self.leave(*socket, data);
        }
        if let Kind::Send { socket, gather, splice } = &mut kind {
            let spliced = splice.as_ref().map_or(0, SplicedSend::spliced);
            if let Some(splice) = splice {
                splice.give_back(&mut self.os.pipes);
            }
            self.os.unuse_gather(gather, progress, spliced);
            self.leave(*socket, data);
        }
        if let Some(file) = kind.file() {
            if let Kind::Allocate { offset, len, .. } = kind {
                self.os.forget_residency(file, offset, len);
            }
            let direct = self.os.file(file).is_ok_and(|open| open.options().direct);
            self.os.unuse(file);
            let outcome = kind.outcome(result, extents);
            self.os.count_transfer(direct, &outcome);
            return self.os.ready.push_back(Completion { token, outcome });
        }
        let outcome = kind.outcome(result, extents);
        self.os.ready.push_back(Completion { token, outcome });
    }

    fn take_completion(&mut self, data: u64, result: i32, more: bool) {
        match data {
            DATA_CANCEL => return,
            DATA_WAKE => {
                self.wake_armed = false;
                return self.take_wake();
            }
            _ => {}
        }
        let Some(slot) = self.slots.get_mut(data as u32, (data >> 32) as u32) else { return };
        let outcome = usize::try_from(result).map_err(|_| Errno::from_raw_os_error(-result));
        match &slot.kind {
            Kind::Receive { min, .. } => {
                let min = *min;
                let n = *outcome.as_ref().unwrap_or(&0);
                slot.progress += n;
                let progress = slot.progress;
                if n > 0 {
                    self.os.counters.received_bytes += n as u64;
                    self.os.counters.receive_calls += 1;
                }
                match outcome {
                    Ok(n) if n > 0 && progress < min && !slot.cancelled => self.receive_more(data),
                    Err(Errno::INTR | Errno::AGAIN | Errno::CANCELED) if !slot.cancelled => self.receive_more(data),
                    // A short receive is the end of the stream: one that broke is none. Only what a cancelled one
                    // took must not be lost.
                    Err(error) if progress == 0 || error != Errno::CANCELED => {
                        self.finish(data, Err(error), Vec::new());
                    }
                    _ => self.finish(data, Ok(progress), Vec::new()),
                }
            }
            // The socket takes more, or is broken: trying says which.
            Kind::Send { splice: Some(_), .. } if slot.cancelled => self.finish(data, Err(Errno::CANCELED), Vec::new()),
            Kind::Send { splice: Some(_), .. } => self.send_more(data),
            Kind::Send { .. } => self.send_went(data, outcome, more),
            Kind::Pinned { .. } => {}
            Kind::Accept { listener } => {
                let listener = *listener;
                self.accepted(data, listener, result, more);
            }
            Kind::Connect { .. } => self.connected(data, outcome),
            Kind::Readable { descriptor, .. } => {
                let descriptor = *descriptor;
                self.wait_ended(data, descriptor, outcome);
            }
            _ => self.file_op_went(data, outcome),
        }
    }

    /// A send has taken some bytes. `more` says that it is a zero-copy one whose memory is released later.
    fn send_went(&mut self, data: u64, outcome: Result<usize, Errno>, more: bool) {
        let Some(slot) = self.slot_mut(data) else { return };
        let Kind::Send { socket, gather, .. } = &slot.kind else { return };
        let (socket, total) = (*socket, gather.len());
        slot.pinned += u32::from(more);
        slot.progress += *outcome.as_ref().unwrap_or(&0);
        let (progress, cancelled, pinned) = (slot.progress, slot.cancelled, slot.pinned > 0);
        let result = match outcome {
            Ok(_) if progress == total => Ok(total),
            Ok(n) if n > 0 && !cancelled => return self.send_more(data),
            Err(Errno::INTR | Errno::AGAIN | Errno::CANCELED) if !cancelled => return self.send_more(data),
            Err(error) if zero_copy::asks_for_plain(error) && !cancelled && self.gives_up_zero_copy(socket) => {
                return self.send_more(data);
            }
            Ok(_) => Err(Errno::CANCELED),
            Err(error) => Err(error),
        };
        if pinned { self.finish_pinned(data, result) } else { self.finish(data, result, Vec::new()) }
    }

    /// A file transfer may be short without being at the end; the rest is asked for.
    fn file_op_went(&mut self, data: u64, outcome: Result<usize, Errno>) {
        let fixed = self.fixed;
        let Some(slot) = self.slot_mut(data) else { return };
        let n = match outcome {
            Ok(n) => n,
            Err(Errno::INTR | Errno::AGAIN) if !slot.cancelled => 0,
            Err(error) => return self.finish(data, Err(error), Vec::new()),
        };
        let retry = outcome.is_err();
        slot.progress += n;
        if !retry && matches!(slot.kind, Kind::WriteOnce { .. }) {
            return self.finish(data, if n == 0 { Err(Errno::NOSPC) } else { Ok(n) }, Vec::new());
        }
        let progress = slot.progress;
        let Some((file, whole)) = slot.transfer() else {
            if !retry {
                return self.finish(data, Ok(0), Vec::new());
            }
            return self.finish(data, Err(Errno::AGAIN), Vec::new());
        };
        if progress == whole || n == 0 && !retry {
            let is_write = matches!(slot.kind, Kind::Write { .. });
            let result = if is_write && progress < whole { Err(Errno::NOSPC) } else { Ok(progress) };
            return self.finish(data, result, Vec::new());
        }
        let Ok((fd, device)) = self.os.os_file(file).map(|os| (Fd(os.raw()), os.device)) else {
            return self.finish(data, Err(Errno::BADF), Vec::new());
        };
        if let Some(entry) = self.slot_mut(data).and_then(|slot| slot.file_entry(fd, device, fixed)) {
            self.push(entry, data);
        }
    }

    pub(crate) fn reap(&mut self, into: &mut Vec<Completion>, wait: Wait) -> std::io::Result<()> {
        if !self.wake_armed
            && let Some(fd) = self.os.waker.event().map(AsRawFd::as_raw_fd)
        {
            self.wake_armed = true;
            self.push(opcode::PollAdd::new(Fd(fd), libc::POLLIN as u32).build(), DATA_WAKE);
        }
        if let Some(error) = &self.refused {
            return Err(error.raw_os_error().map_or_else(|| error.kind().into(), std::io::Error::from_raw_os_error));
        }
        let wait = if self.os.ready.is_empty() { wait } else { Wait::Poll };
        self.enter(wait)?;
        if !self.ring.completion().is_empty() {
            self.take_completions();
        }
        if self.os.workers.pending() > 0 {
            self.collect_jobs();
        }
        if self.os.timers.len() > 0 {
            self.os.expire_timers(monotonic());
        }
        if !self.os.ready.is_empty() {
            into.extend(self.os.ready.drain(..));
        }
        Ok(())
    }

    fn take_completions(&mut self) {
        let mut reaped = std::mem::take(&mut self.reaped);
        reaped.extend(self.ring.completion());
        for entry in reaped.drain(..) {
            let (data, result, flags) = (entry.user_data(), entry.result(), entry.flags());
            if io_uring::cqueue::notif(flags) {
                self.released(data, result);
                continue;
            }
            self.take_completion(data, result, io_uring::cqueue::more(flags));
        }
        self.reaped = reaped;
    }

    /// Whether nothing has completed, as far as can be seen, and nothing is to be submitted.
    pub(crate) fn is_quiet(&mut self) -> bool {
        let mut submission = self.ring.submission();
        submission.sync();
        let idle = submission.is_empty() && !submission.taskrun();
        drop(submission);
        idle && self.wake_armed && self.os.ready.is_empty() && self.ring.completion().is_empty()
    }

    /// Submits what is queued and waits as asked, in one call; none if there is nothing to do in the kernel.
    fn enter(&mut self, wait: Wait) -> std::io::Result<()> {
        let mut submission = self.ring.submission();
        submission.sync();
        let idle = submission.is_empty() && !submission.taskrun();
        drop(submission);
        let have = !self.ring.completion().is_empty();
        let entered = match (wait, self.os.timers.next_at()) {
            (Wait::Poll, _) if idle => return Ok(()),
            _ if have && idle => return Ok(()),
            (Wait::Poll, _) => self.enter_for(0, Some(Duration::ZERO)),
            (_, _) if have => self.enter_for(0, Some(Duration::ZERO)),
            (Wait::Block, None) => self.enter_for(1, None),
            (Wait::Block, Some(at)) | (Wait::Until(at), None) => self.enter_for(1, Some(at.since(monotonic()))),
            (Wait::Until(until), Some(at)) => self.enter_for(1, Some(at.min(until).since(monotonic()))),
        };
        match entered {
            Err(error) if !is_transient(&error) => Err(error),
            _ => Ok(()),
        }
    }

    fn enter_for(&mut self, want: usize, timeout: Option<Duration>) -> std::io::Result<usize> {
        if want > 0 && timeout != Some(Duration::ZERO) {
            self.os.counters.sleeps += 1;
        }
        // With deferred task work only an enter that gets events runs it; asking for none of them does that too, if a
        // timeout argument is given.
        let timespec = Timespec::from(timeout.unwrap_or_default());
        let args = match timeout {
            Some(_) => SubmitArgs::new().timespec(&timespec),
            None => SubmitArgs::new(),
        };
        self.ring.submitter().submit_with_args(want, &args)
    }

    fn take_wake(&mut self) {
        if let Some(event) = self.os.waker.event() {
            let mut count = [0; 8];
            let _ = rustix::io::read(event, &mut count);
        }
        let by_worker = self.os.workers.pending() > 0;
        self.collect_jobs();
        if self.os.waker.take() || !by_worker {
            self.os.ready.push_back(Completion { token: Token::WAKE, outcome: Outcome::Woken });
        }
    }

    fn collect_jobs(&mut self) {
        let mut done = std::mem::take(&mut self.done);
        self.os.workers.collect(&mut done);
        for one in done.drain(..) {
            self.finish(one.slot, one.result, one.extents);
        }
        self.done = done;
    }

    pub(crate) fn cancel(&mut self, token: Token) {
        self.os.cancel_timers(token);
        let mut found = Vec::new();
        for (index, generation, slot) in self.slots.iter_mut() {
            if slot.token == token {
                slot.cancelled = true;
                found.push(u64::from(generation) << 32 | u64::from(index));
            }
        }
        for data in found {
            self.push(opcode::AsyncCancel::new(data).build(), DATA_CANCEL);
        }
    }

    pub(crate) fn os(&mut self) -> &mut Os {
        &mut self.os
    }

    pub(crate) fn counters(&self) -> Counters {
        self.os.counters
    }

    pub(crate) fn waker(&self) -> Waker {
        self.os.waker.clone()
    }

    pub(crate) fn add_file(&mut self, file: Arc<OpenFile>) -> File {
        self.os.add_file(file)
    }

    pub(crate) fn remove_file(&mut self, file: File) {
        self.os.remove_file(file);
    }

    pub(crate) fn try_write(&mut self, file: File, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.os.try_write(file, offset, bytes)
    }

    pub(crate) fn resident(&self, file: File, offset: u64, len: usize, now: Instant) -> bool {
        self.os.resident(file, offset, len, now)
    }
}

impl Drop for Uring {
    /// Frames and descriptors of operations in flight are the kernel's until they complete: end them all first.
    fn drop(&mut self) {
        let mut data = Vec::new();
        for (index, generation, slot) in self.slots.iter_mut() {
            slot.cancelled = true;
            data.push(u64::from(generation) << 32 | u64::from(index));
        }
        for (_, _, stream) in self.streams.iter_mut() {
            let _ = rustix::net::shutdown(&stream.fd, rustix::net::Shutdown::Both);
        }
        for data in data {
            self.push(opcode::AsyncCancel::new(data).build(), DATA_CANCEL);
        }
        let mut ended = Vec::new();
        let patience = monotonic() + RELEASE_WAIT;
        while self.slots.len() > 0 {
            // What was sent and not acknowledged stays pinned, perhaps for as long as a peer that is gone is retried.
            let pinned = self.slots.iter_mut().all(|(_, _, slot)| matches!(slot.kind, Kind::Pinned { .. }));
            let wait = if pinned { Wait::Until(patience) } else { Wait::Block };
            if self.reap(&mut ended, wait).is_err() || pinned && monotonic() >= patience {
                break;
            }
            ended.clear();
        }
        // Leak what the kernel may still touch, rather than free it.
        for (index, generation) in self.slots.iter_mut().map(|(i, g, _)| (i, g)).collect::<Vec<_>>() {
            if let Some(slot) = self.slots.remove(index, generation) {
                Box::leak(slot);
            }
        }
    }
}

#[cfg(test)]
mod tests;

/// Memory that the kernel has registered.
#[derive(Clone, Copy)]
struct FixedBuffer {
    base: usize,
    len: usize,
}

/// Whether `memory` lies in the registered pool.
fn within(fixed: Option<FixedBuffer>, memory: RawBuffer) -> bool {
    fixed.is_some_and(|FixedBuffer { base, len }| {
        let at = memory.ptr as usize;
        at >= base && at + memory.len <= base + len
    })
}

fn frame_memory(frame: &Frame, start: usize, len: usize) -> RawBuffer {
    RawBuffer { ptr: frame.range(start, len), len }
}

fn call_for(kind: &Kind) -> Option<Call> {
    match *kind {
        Kind::Write { offset, ref from, start, len, durable, .. } => {
            Some(Call::Write { memory: frame_memory(from, start, len), offset, durable, staged: from.is_device() })
        }
        Kind::Extents { offset, len, count_max, .. } => Some(Call::Extents { offset, len, count_max }),
        Kind::Allocate { mode, offset, len, .. } => Some(Call::Allocate { mode, offset, len }),
        _ => None,
    }
}
