//! Streams: bytes from a gather into a send buffer, over the link in segments of any size, into a scatter.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::disk::SimFile;
use super::events::Event;
use super::node::{Node, Sending, Work};
use super::rng::Rng;
use super::shared_memory::SharedEnd;
use super::world::Inner;
use crate::Instant;
use crate::gather::{Gather, Scatter, Segment as GatherSegment};
use crate::op::{Errno, Outcome, Socket};

/// How long a stream may be held by a partition if no other time was set.
const KEEP_ALIVE_DEFAULT: Duration = Duration::from_mins(1);
/// The longest segment.
const SEGMENT_BYTES_MAX: u64 = 64 << 10;

/// Both ends of a stream: 0 connected, 1 accepted.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) ends: [StreamEnd; 2],
}

/// How far the owner of an end is with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Not yet connected or accepted.
    Pending,
    /// A socket names it.
    Open,
    /// The socket was closed.
    Closed,
    /// The node died.
    Crashed,
}

#[derive(Debug)]
pub(super) struct StreamEnd {
    pub(super) node: u64,
    pub(super) address: SocketAddr,
    pub(super) keep_alive: Duration,
    pub(super) stage: Stage,
    pub(super) receive: Option<u64>,
    pub(super) send: Option<u64>,
    /// Sent and not arrived, in order.
    segments: VecDeque<Segment>,
    /// An event will deliver the first segment.
    scheduled: bool,
    /// Arrived and not received.
    inbox: VecDeque<u8>,
    /// The peer says that nothing more comes.
    ended: bool,
    /// Nothing more is sent.
    shut: bool,
    error: Option<Errno>,
    /// Of a stream over shared memory.
    pub(super) shared: Option<SharedEnd>,
}

#[derive(Debug)]
struct Segment {
    at: Instant,
    bytes: Vec<u8>,
    then: Then,
}

/// What comes after a segment's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Then {
    More,
    End,
    Reset,
}

impl Connection {
    /// Whether it goes over the link of two nodes.
    pub(super) fn joins(&self, a: IpAddr, b: IpAddr) -> bool {
        let ips = self.ends.each_ref().map(|end| end.address.ip());
        ips == [a, b] || ips == [b, a]
    }

    /// Whether it has not been broken.
    pub(super) fn is_whole(&self) -> bool {
        self.ends.iter().all(|end| end.error.is_none())
    }

    /// The addresses of end `from` and of the other.
    pub(super) fn ips(&self, from: usize) -> (IpAddr, IpAddr) {
        (self.ends[from].address.ip(), self.ends[1 - from].address.ip())
    }
}

impl StreamEnd {
    pub(super) fn new(node: u64, address: SocketAddr) -> Self {
        Self {
            node,
            address,
            keep_alive: KEEP_ALIVE_DEFAULT,
            stage: Stage::Pending,
            receive: None,
            send: None,
            segments: VecDeque::new(),
            scheduled: false,
            inbox: VecDeque::new(),
            ended: false,
            shut: false,
            error: None,
            shared: None,
        }
    }

    fn buffered(&self) -> usize {
        self.segments.iter().map(|segment| segment.bytes.len()).sum()
    }
}

impl Sending {
    pub(super) fn new(gather: Gather, maps: Vec<SimFile>) -> Self {
        Self { gather, maps, segment: 0, offset: 0, mapped: 0, sent: 0, sent_mapped: 0 }
    }

    /// Takes up to `max` of the bytes that are left.
    fn take(&mut self, max: usize, rng: &mut Rng) -> Vec<u8> {
        let mut taken = Vec::new();
        while taken.len() < max
            && let Some(segment) = self.gather.segments.get(self.segment)
        {
            let n = (segment.len() - self.offset).min(max - taken.len());
            let at = self.offset;
            match segment {
                GatherSegment::Head { start, .. } => {
                    taken.extend_from_slice(&self.gather.heads[*start as usize + at..][..n]);
                }
                GatherSegment::Zero { .. } => taken.resize(taken.len() + n, 0),
                GatherSegment::Map { offset, .. } => {
                    let before = taken.len();
                    taken.resize(before + n, 0);
                    self.maps[self.mapped].read(offset + at as u64, &mut taken[before..], rng);
                    self.sent_mapped += n;
                }
                GatherSegment::Frame { frame, start, .. } => {
                    let before = taken.len();
                    taken.resize(before + n, 0);
                    frame.frame().read(*start + at, &mut taken[before..]);
                }
            }
            self.offset += n;
            if self.offset == segment.len() {
                self.mapped += usize::from(matches!(segment, GatherSegment::Map { .. }));
                self.segment += 1;
                self.offset = 0;
            }
        }
        self.sent += taken.len();
        taken
    }
}

impl Inner {
    pub(super) fn start_stream(&mut self, id: u64, op: u64, socket: Socket, send: bool) {
        let entry = self.nodes.get(&id).and_then(|node| node.sockets.get(socket.index, socket.generation)).copied();
        let Some((key, end)) = entry else { return self.fail(id, op, Errno::BADF) };
        let Some(connection) = self.net.connections.get_mut(&key) else {
            return self.fail(id, op, Errno::CONNRESET);
        };
        if send {
            connection.ends[end].send = Some(op);
            self.pump_send(key, end);
        } else {
            connection.ends[end].receive = Some(op);
            self.pump_receive(key, end);
        }
    }

    /// Moves bytes of the send in flight into the send buffer, and cuts them into segments.
    fn pump_send(&mut self, key: u64, from: usize) {
        let Some(connection) = self.net.connections.get(&key) else { return };
        let (a, b) = connection.ips(from);
        let limit = self.net.link(a, b).profile.buffer_bytes.max(1);
        let Some(connection) = self.net.connections.get_mut(&key) else { return };
        let end = &mut connection.ends[from];
        let (Some(op), id) = (end.send, end.node) else { return };
        let error = end.error.or_else(|| end.shut.then_some(Errno::PIPE));
        let room = limit.saturating_sub(end.buffered());
        let Some(node) = self.nodes.get_mut(&id) else { return };
        if let Some(error) = error {
            end.send = None;
            return node.complete(op, |work, _| work.fail(error));
        }
        let Some(Work::Send { sending, .. }) = node.ops.get_mut(&op).map(|op| &mut op.work) else { return };
        // As kernels do: a full buffer takes more only once a good part of it is free. Else pieces would shrink to bytes.
        let left = sending.gather.len() - sending.sent;
        if room < left.min(limit / 3) {
            return;
        }
        let bytes = sending.take(room, &mut self.rng);
        let done = sending.sent == sending.gather.len();
        if done {
            end.send = None;
            finish_send(node, op);
        }
        self.transmit(key, from, &bytes, false);
    }

    /// Sends bytes on their way, in segments whose sizes chance decides.
    fn transmit(&mut self, key: u64, from: usize, mut bytes: &[u8], last: bool) {
        let Some(connection) = self.net.connections.get(&key) else { return };
        let (a, b) = connection.ips(from);
        let mut ready = connection.ends[from].segments.back().map_or(self.now, |segment| segment.at);
        let mut segments = Vec::new();
        while !bytes.is_empty() || (last && segments.is_empty()) {
            let most = if self.rng.one_in(3) { 200 } else { SEGMENT_BYTES_MAX };
            let n = (self.rng.between(1, most) as usize).min(bytes.len());
            let (now, later) = bytes.split_at(n);
            bytes = later;
            let left = self.net.occupy(a, b, n, self.now);
            ready = ready.max(left + self.latency(a, b));
            let then = if last && later.is_empty() { Then::End } else { Then::More };
            segments.push(Segment { at: ready, bytes: now.to_vec(), then });
        }
        if let Some(connection) = self.net.connections.get_mut(&key) {
            connection.ends[from].segments.extend(segments);
        }
        self.schedule(key, from);
    }

    /// Plans the arrival of the first segment, if none is planned.
    pub(super) fn schedule(&mut self, key: u64, from: usize) {
        let Some(connection) = self.net.connections.get_mut(&key) else { return };
        let (a, b) = connection.ips(from);
        let end = &mut connection.ends[from];
        let Some(at) = end.segments.front().map(|segment| segment.at).filter(|_| !end.scheduled) else { return };
        end.scheduled = true;
        let at = at.max(self.now).max(self.net.stalled_until(a, b));
        self.events.add(at, Event::Arrive { connection: key, from });
    }

    /// The first segment of an end arrives, unless the link is cut, stalled, or the other end has no room.
    pub(super) fn arrive(&mut self, key: u64, from: usize) {
        let Some(connection) = self.net.connections.get_mut(&key) else { return };
        let (a, b) = connection.ips(from);
        connection.ends[from].scheduled = false;
        if self.net.is_cut(a, b) {
            return;
        }
        let limit = self.net.link(a, b).profile.buffer_bytes.max(1);
        if self.net.stalled_until(a, b) > self.now {
            return self.schedule(key, from);
        }
        let Some(connection) = self.net.connections.get_mut(&key) else { return };
        let Some(segment) = connection.ends[from].segments.front() else { return };
        if segment.at > self.now {
            return self.schedule(key, from);
        }
        // A receive will ask again; a reset does not wait.
        if connection.ends[1 - from].inbox.len() >= limit && segment.then != Then::Reset {
            return;
        }
        let Some(segment) = connection.ends[from].segments.pop_front() else { return };
        if segment.then == Then::Reset {
            return self.reset(key, Errno::CONNRESET);
        }
        let to = &mut connection.ends[1 - from];
        if to.stage == Stage::Closed {
            if !segment.bytes.is_empty() {
                self.abort(key, 1 - from);
            }
        } else {
            to.inbox.extend(segment.bytes);
            to.ended |= segment.then == Then::End;
        }
        self.schedule(key, from);
        self.pump_receive(key, 1 - from);
        self.pump_send(key, from);
        self.drop_if_over(key);
    }

    /// Moves arrived bytes into the receive in flight.
    fn pump_receive(&mut self, key: u64, at: usize) {
        let Some(connection) = self.net.connections.get_mut(&key) else { return };
        let end = &mut connection.ends[at];
        let Some(op) = end.receive else { return };
        let Some(node) = self.nodes.get_mut(&end.node) else { return };
        let Some(Work::Recv { into, min, got, .. }) = node.ops.get_mut(&op).map(|op| &mut op.work) else { return };
        let available = end.inbox.len().min(into.len() - *got);
        // A receive need not take all that is there, so that every reader sees every split.
        let needed = min.saturating_sub(*got).max(1);
        let n = if available > needed && self.rng.one_in(4) {
            self.rng.between(needed as u64, available as u64) as usize
        } else {
            available
        };
        place(into, *got, &mut end.inbox, n);
        *got += n;
        let got = *got;
        node.counters.received_bytes += n as u64;
        node.counters.receive_calls += u64::from(n > 0);
        let over = end.inbox.is_empty() && (end.ended || end.error.is_some());
        if got >= *min || over {
            end.receive = None;
            let error = end.error.filter(|_| !end.ended && got < *min);
            node.complete(op, |work, _| match (work, error) {
                (Work::Recv { into, .. }, None) => Outcome::Received { into, result: Ok(got) },
                (work, error) => work.fail(error.unwrap_or(Errno::IO)),
            });
        }
        if n > 0 {
            // There is room again: what was held back may come.
            self.schedule(key, 1 - at);
        }
    }

    /// Breaks a connection at both ends.
    pub(super) fn reset(&mut self, key: u64, error: Errno) {
        let Some(connection) = self.net.connections.get_mut(&key) else { return };
        for end in &mut connection.ends {
            end.error = Some(error);
            end.segments.clear();
            end.inbox.clear();
            end.ended = false;
        }
        for end in [0, 1] {
            self.pump_receive(key, end);
            self.pump_send(key, end);
        }
        self.drop_if_over(key);
    }

    pub(super) fn shutdown_send(&mut self, id: u64, socket: Socket) {
        let entry = self.nodes.get(&id).and_then(|node| node.sockets.get(socket.index, socket.generation)).copied();
        if let Some((key, end)) = entry {
            self.note_end(key, end, false);
            self.end_stream(key, end);
        }
    }

    /// Sends the end of the stream behind all that was sent.
    fn end_stream(&mut self, key: u64, end: usize) {
        let Some(connection) = self.net.connections.get_mut(&key) else { return };
        let end_state = &mut connection.ends[end];
        if !end_state.shut && end_state.error.is_none() {
            end_state.shut = true;
            self.transmit(key, end, &[], true);
        }
    }

    pub(super) fn close(&mut self, id: u64, socket: Socket) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let Some((key, end)) = node.sockets.remove(socket.index, socket.generation) else { return };
        self.note_end(key, end, true);
        let Some(connection) = self.net.connections.get(&key) else { return };
        let ops = [connection.ends[end].receive, connection.ends[end].send];
        for op in ops.into_iter().flatten() {
            self.fail(id, op, Errno::CANCELED);
        }
        // A send that was cut off is not to look like a whole one.
        self.close_end(key, end, ops[1].is_some());
    }

    /// What the kernel does with an end that no descriptor names any more. Its operations have been completed.
    pub(super) fn close_end(&mut self, key: u64, end: usize, abort: bool) {
        let Some(connection) = self.net.connections.get_mut(&key) else { return };
        let state = &mut connection.ends[end];
        state.receive = None;
        state.send = None;
        let unread = !state.inbox.is_empty();
        state.inbox.clear();
        state.stage = Stage::Closed;
        // As TCP does: unread data at the end is a reset.
        if abort || unread {
            self.abort(key, end);
        } else {
            self.end_stream(key, end);
        }
        self.drop_if_over(key);
    }

    /// Has the other end see a reset as soon as that has crossed the link. What is on its way there is lost.
    fn abort(&mut self, key: u64, from: usize) {
        let Some(connection) = self.net.connections.get(&key) else { return };
        let (a, b) = connection.ips(from);
        let at = self.now + self.latency(a, b);
        let Some(connection) = self.net.connections.get_mut(&key) else { return };
        let end = &mut connection.ends[from];
        let on_its_way = end.segments.front().is_some_and(|segment| segment.then == Then::Reset);
        if end.error.is_none() && !on_its_way {
            end.shut = true;
            end.segments.clear();
            end.segments.push_back(Segment { at, bytes: Vec::new(), then: Then::Reset });
            self.schedule(key, from);
        }
    }

    /// Forgets a connection that no socket names and that has nothing on its way.
    fn drop_if_over(&mut self, key: u64) {
        let over = self.net.connections.get(&key).is_some_and(|connection| {
            connection
                .ends
                .iter()
                .all(|end| end.stage != Stage::Open && (end.error.is_some() || end.shut && end.segments.is_empty()))
        });
        if over {
            self.net.connections.remove(&key);
        }
    }
}

fn finish_send(node: &mut Node, op: u64) {
    node.complete(op, |work, counters| {
        let Work::Send { sending, .. } = work else { return work.fail(Errno::IO) };
        counters.send_calls += 1;
        counters.sent_copied_bytes += sending.sent as u64;
        counters.sent_mapped_bytes += sending.sent_mapped as u64;
        Outcome::Sent { gather: sending.gather, result: Ok(sending.sent) }
    });
}

/// Puts the first `len` arrived bytes into a scatter that has room for them, after its first `skip`.
fn place(into: &mut Scatter, mut skip: usize, inbox: &mut VecDeque<u8>, mut len: usize) {
    for piece in &mut into.pieces {
        let from = skip.min(piece.len);
        let part = (piece.len - from).min(len);
        let start = piece.start + from;
        let bytes: Vec<u8> = inbox.drain(..part.min(inbox.len())).collect();
        piece.frame.write(start, &bytes);
        skip -= from;
        len -= part;
    }
}
