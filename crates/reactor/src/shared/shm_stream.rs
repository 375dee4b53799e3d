//! A stream over two rings: the receive and the send in progress, and how far both have come.
//!
//! The socket that the stream was made over stays open: a byte on it wakes the peer, and its end means the peer's death.

use std::os::fd::OwnedFd;
use std::sync::atomic::{Ordering, fence};

use rustix::io::Errno;
use rustix::net::SendFlags;

use super::arena::PeerMemory;
use super::greeting::Greeted;
use super::lending::Lending;
use super::ring::{Bell, Ended, Reader, Writer};
use crate::blocking::{self, RawBuffer};
use crate::bytewise;
use crate::gather::{Gather, Scatter, Segment};
use crate::limits::SHARED_STEP_BYTES;
use crate::op::{Completion, Outcome, Token};
use crate::os::Os;

/// Which end of a stream this is: the server reads ring 0 and writes ring 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamSide {
    Server,
    Client,
}

#[derive(Debug)]
struct Receive {
    token: Token,
    into: Scatter,
    min: usize,
    got: usize,
}

#[derive(Debug)]
struct Send {
    token: Token,
    gather: Gather,
    sent: usize,
}

/// A stream without operations in flight, which can go to another thread.
#[derive(Debug)]
pub(crate) struct StreamState {
    writer: Writer,
    reader: Reader,
    /// The socket, for ringing.
    bell: OwnedFd,
    lending: Lending,
    /// The socket has ended: the peer has closed it, or is dead.
    peer_gone: bool,
    /// We have said that nothing more will be sent.
    ended: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct ShmStream {
    state: StreamState,
    receive: Option<Receive>,
    send: Option<Send>,
    /// It is looked at on every turn; else the peer rings.
    pub(super) hot: bool,
    /// Turns without anything to do.
    pub(super) idle_turns: u32,
}

impl StreamState {
    pub(super) fn new((memory, lending): Greeted, side: StreamSide, bell: OwnedFd) -> Self {
        let (reads, writes) = match side {
            StreamSide::Server => (0, 1),
            StreamSide::Client => (1, 0),
        };
        let lending = Lending::new(side, lending);
        let (writer, reader) = (Writer::new(&memory, writes), Reader::new(&memory, reads));
        Self { writer, reader, bell, lending, peer_gone: false, ended: false }
    }

    /// Bytes of what the peer has lent, if it has.
    pub(super) fn arena_bytes(&self) -> Option<u64> {
        self.lending.bytes()
    }

    fn ring(&self, bell: Bell) {
        if bell == Bell::Ring {
            // A socket that is full has bells in it that the peer has not heard yet; one that is broken is noticed by us.
            let _ = rustix::net::send(&self.bell, &[1], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        }
    }
}

impl ShmStream {
    pub(super) fn new(state: StreamState) -> Self {
        Self { state, receive: None, send: None, hot: false, idle_turns: 0 }
    }

    /// What is left when nothing is in flight.
    pub(super) fn into_state(self) -> StreamState {
        self.state
    }

    /// What the stream has to do with lent memory.
    pub(super) fn lending(&mut self) -> &mut Lending {
        &mut self.state.lending
    }

    /// Bytes of what the peer has lent, if it has.
    pub(super) fn arena_bytes(&self) -> Option<u64> {
        self.state.arena_bytes()
    }

    /// Bytes that are mapped of it.
    pub(super) fn mapped_peer_bytes(&self) -> usize {
        self.state.lending.memories().map(PeerMemory::mapped_bytes).sum()
    }

    /// When the part of it was used that was used longest ago, of those that are mapped.
    pub(super) fn oldest_use(&self) -> Option<u64> {
        self.state.lending.memories().filter_map(PeerMemory::oldest).min()
    }

    /// Whether the peer has ended the stream, before it did anything with its memory that what was copied before this call shows.
    pub(super) fn has_peer_ended(&self) -> bool {
        // The peer ends the stream before it changes the memory, so a reader that sees the change sees the end.
        fence(Ordering::Acquire);
        !matches!(self.state.reader.here(), Ok((_, Ended::No)))
    }

    /// The socket has ended.
    pub(super) fn peer_is_gone(&mut self) {
        self.state.peer_gone = true;
    }

    /// Has it looked at on every turn; says whether it was not.
    pub(super) fn heat(&mut self) -> bool {
        self.idle_turns = 0;
        !std::mem::replace(&mut self.hot, true)
    }

    /// Whether operations are in flight.
    pub(super) fn is_busy(&self) -> bool {
        self.receive.is_some() || self.send.is_some()
    }

    /// Bytes that are here.
    pub(super) fn readable_bytes(&self) -> usize {
        self.state.reader.here().map_or(0, |(n, _)| n)
    }

    /// Begins to receive.
    pub(super) fn start_receive(&mut self, os: &mut Os, into: Scatter, min: usize, token: Token) -> Option<Completion> {
        let refused = match () {
            () if self.receive.is_some() => Some(Errno::BUSY),
            () if into.len() < min => Some(Errno::INVAL),
            () => None,
        };
        if let Some(error) = refused {
            return Some(received(token, into, Err(error)));
        }
        self.receive = Some(Receive { token, into, min, got: 0 });
        self.receive_more(os)
    }

    /// Begins to send.
    pub(super) fn start_send(&mut self, os: &mut Os, gather: Gather, token: Token) -> Option<Completion> {
        let refused = match () {
            () if self.send.is_some() => Some(Errno::BUSY),
            () if self.state.ended => Some(Errno::PIPE),
            () => os.use_gather(&gather).err(),
        };
        if let Some(error) = refused {
            return Some(Completion { token, outcome: Outcome::Sent { gather, result: Err(error) } });
        }
        self.send = Some(Send { token, gather, sent: 0 });
        self.send_more(os)
    }

    /// Sends all of it, if there is room for it now and nothing is before it.
    pub(super) fn send_now(&mut self, os: &mut Os, gather: &Gather) -> bool {
        let n = gather.len();
        let free = self.send.is_none() && !self.state.ended && !self.state.peer_gone;
        if !free || n > SHARED_STEP_BYTES || self.state.writer.room(n).unwrap_or(0) < n {
            return false;
        }
        // The send that follows reports what cannot be read.
        if os.use_gather(gather).is_err() {
            return false;
        }
        let copied = copy_in(&self.state.writer, os, gather, 0, n).is_ok();
        if copied {
            let bell = self.state.writer.publish(n);
            self.state.ring(bell);
            self.idle_turns = 0;
        }
        os.unuse_gather(gather, if copied { n } else { 0 }, 0);
        copied
    }

    /// Goes on with both directions; says what has ended.
    pub(super) fn turn(&mut self, os: &mut Os, ready: &mut Vec<Completion>) {
        if let Some(completion) = self.receive_more(os) {
            ready.push(completion);
        }
        if self.send.is_some()
            && let Some(completion) = self.send_more(os)
        {
            ready.push(completion);
        }
    }

    /// Whether a turn would move something.
    pub(super) fn has_work(&mut self) -> bool {
        let reads = self.receive.is_some()
            && self.state.reader.here().map_or(true, |(n, ended)| n > 0 || ended != Ended::No || self.state.peer_gone);
        let writes =
            self.send.is_some() && (self.state.peer_gone || self.state.writer.room(1).map_or(true, |room| room > 0));
        reads || writes
    }

    /// Has the peer ring when there is something to do.
    pub(super) fn sleep(&self) {
        if self.receive.is_some() {
            self.state.reader.sleep();
        }
        if self.send.is_some() {
            self.state.writer.sleep();
        }
    }

    fn receive_more(&mut self, os: &mut Os) -> Option<Completion> {
        let result = loop {
            let receive = self.receive.as_mut()?;
            let (here, ended) = match self.state.reader.here() {
                Ok(here) => here,
                Err(error) => break Err(error),
            };
            let n = here.min(receive.into.len() - receive.got).min(SHARED_STEP_BYTES);
            if n == 0 {
                // The last is here. A peer that is gone without a word has died.
                match ended {
                    _ if receive.got >= receive.min => break Ok(receive.got),
                    Ended::Done => break Ok(receive.got),
                    Ended::Reset => break Err(Errno::CONNRESET),
                    Ended::No if self.state.peer_gone => break Err(Errno::CONNRESET),
                    Ended::No => return None,
                }
            }
            copy_out(&self.state.reader, &mut receive.into, receive.got, n);
            receive.got += n;
            let bell = self.state.reader.consume(n);
            self.state.ring(bell);
            self.idle_turns = 0;
            os.counters.received_bytes += n as u64;
            // All that was seen is taken: to look again costs more than another turn would where nothing has come meanwhile.
            if n == here && receive.got >= receive.min {
                break Ok(receive.got);
            }
        };
        let Receive { token, into, .. } = self.receive.take()?;
        os.counters.receive_calls += u64::from(*result.as_ref().unwrap_or(&0) > 0);
        Some(received(token, into, result))
    }

    fn send_more(&mut self, os: &mut Os) -> Option<Completion> {
        let result = loop {
            let send = self.send.as_mut()?;
            let left = send.gather.len() - send.sent;
            if left == 0 {
                break Ok(send.sent);
            }
            if self.state.peer_gone {
                break Err(Errno::PIPE);
            }
            let step = left.min(SHARED_STEP_BYTES);
            let n = match self.state.writer.room(step) {
                Ok(room) => room.min(step),
                Err(error) => break Err(error),
            };
            if n == 0 {
                return None;
            }
            if let Err(error) = copy_in(&self.state.writer, os, &send.gather, send.sent, n) {
                break Err(error);
            }
            send.sent += n;
            let bell = self.state.writer.publish(n);
            self.state.ring(bell);
            self.idle_turns = 0;
        };
        self.end_send(os, result)
    }

    fn end_send(&mut self, os: &mut Os, result: Result<usize, Errno>) -> Option<Completion> {
        let Send { token, gather, sent } = self.send.take()?;
        os.unuse_gather(&gather, sent, 0);
        Some(Completion { token, outcome: Outcome::Sent { gather, result } })
    }

    /// Ends the operations of `token`.
    pub(super) fn cancel(&mut self, os: &mut Os, token: Token, ready: &mut Vec<Completion>) {
        if let Some(Receive { token, into, got, .. }) = self.receive.take_if(|receive| receive.token == token) {
            let result = if got > 0 { Ok(got) } else { Err(Errno::CANCELED) };
            ready.push(received(token, into, result));
        }
        if self.send.as_ref().is_some_and(|send| send.token == token) {
            ready.extend(self.end_send(os, Err(Errno::CANCELED)));
        }
    }

    /// Says that nothing more will be sent.
    pub(super) fn shutdown_send(&mut self) {
        self.state.ended = true;
        let bell = self.state.writer.end(Ended::Done);
        self.state.ring(bell);
    }

    /// Ends everything; the peer is told whether we had read all.
    pub(super) fn close(&mut self, os: &mut Os, ready: &mut Vec<Completion>) {
        let unread = self.receive.as_ref().is_some_and(|receive| receive.got > 0) || self.readable_bytes() > 0;
        let half = self.send.as_ref().is_some_and(|send| send.sent < send.gather.len());
        let bell = self.state.writer.end(if unread || half { Ended::Reset } else { Ended::Done });
        self.state.ring(bell);
        if let Some(Receive { token, into, .. }) = self.receive.take() {
            ready.push(received(token, into, Err(Errno::CANCELED)));
        }
        ready.extend(self.end_send(os, Err(Errno::CANCELED)));
    }
}

fn received(token: Token, into: Scatter, result: Result<usize, Errno>) -> Completion {
    Completion { token, outcome: Outcome::Received { into, result } }
}

/// Copies the next `n` bytes of the ring to where a receive wants them, `skip` bytes in.
fn copy_out(reader: &Reader, into: &mut Scatter, mut skip: usize, n: usize) {
    let mut done = 0;
    for piece in &mut into.pieces {
        if skip >= piece.len {
            skip -= piece.len;
            continue;
        }
        let room = piece.len - skip;
        let target = piece.frame.range(piece.start + skip, room);
        skip = 0;
        let mut filled = 0;
        while filled < room && done < n {
            let (from, run) = reader.place(done);
            let len = run.min(room - filled).min(n - done);
            // SAFETY: `len` bytes lie at `from` in the mapping, which is no frame, and the frame has as many at `target` after
            // those that are filled.
            unsafe { bytewise::copy(from, target.add(filled), len) };
            filled += len;
            done += len;
        }
        if done == n {
            return;
        }
    }
}

/// Copies `n` bytes of a gather, from byte `skip` on, to the ring, which has room for them.
fn copy_in(writer: &Writer, os: &mut Os, gather: &Gather, mut skip: usize, n: usize) -> Result<(), Errno> {
    let mut done = 0;
    for segment in &gather.segments {
        let len = segment.len();
        if skip >= len {
            skip -= len;
            continue;
        }
        let mut at = skip;
        skip = 0;
        while at < len && done < n {
            let (to, run) = writer.place(done);
            let part = run.min(len - at).min(n - done);
            // SAFETY: `part` bytes at `to` are of the mapping, and not published: the reader has no business there.
            unsafe { copy_part(os, gather, segment, at, to, part)? };
            at += part;
            done += part;
        }
        if done == n {
            break;
        }
    }
    Ok(())
}

/// Copies a part of one segment. A mapped file is read by the kernel: one that was cut short is an error, not a signal.
///
/// # Safety
/// `to` is valid for writing so many bytes, and is no part of a frame or head.
pub(super) unsafe fn copy_part(
    os: &mut Os,
    gather: &Gather,
    segment: &Segment,
    at: usize,
    to: *mut u8,
    len: usize,
) -> Result<(), Errno> {
    let Segment::Map { file, offset, .. } = segment else {
        // SAFETY: by the caller's word.
        return unsafe { copy_memory(gather, segment, at, to, len) };
    };
    let (file, offset) = (os.used_file(*file).ok_or(Errno::BADF)?, offset + at as u64);
    if let Some(from) = file.map.as_ref().and_then(|map| map.readable(offset, len)) {
        // SAFETY: `from` has `len` bytes that stay mapped as long as the file is used, and cannot be taken away; `to`
        // by the caller's word, in another mapping.
        unsafe { bytewise::copy(from, to, len) };
        return Ok(());
    }
    // SAFETY: by the caller's word.
    let n = unsafe { blocking::read(file.fd(), RawBuffer { ptr: to, len }, offset)? };
    if n < len { Err(Errno::FAULT) } else { Ok(()) }
}

/// Copies a part of one segment that lies in memory; `EFAULT` for a mapped file.
///
/// # Safety
/// As for [`copy_part`].
pub(super) unsafe fn copy_memory(
    gather: &Gather,
    segment: &Segment,
    at: usize,
    to: *mut u8,
    len: usize,
) -> Result<(), Errno> {
    // SAFETY: `from` has `len` bytes, as looked up below, `to` by the caller's word, and they do not overlap.
    let copy = |from: *const u8| unsafe { bytewise::copy(from, to, len) };
    match segment {
        Segment::Head { start, .. } => copy(gather.heads[*start as usize + at..][..len].as_ptr()),
        Segment::Frame { frame, start, .. } => copy(frame.frame().range(*start + at, len)),
        // SAFETY: by the caller's word.
        Segment::Zero { .. } => unsafe { bytewise::fill(to, 0, len) },
        Segment::Map { .. } => return Err(Errno::FAULT),
    }
    Ok(())
}
