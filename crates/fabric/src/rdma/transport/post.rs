//! Posting: waiting operations go to the device as far as credits, room and frames permit.

use byway_reactor::{Frame, Reactor};

use super::super::domain::WindowAddress;
use super::super::endpoint::Endpoint;
use super::super::error::{PostError, WorkError};
use super::super::memory::{Payload, Segment};
use super::super::queue_pair::{Report, Work};
use super::ConnectionId;
use super::connection::{Down, Get, Phase, Ready, Step, awaits_write, pop_ready};
use super::outgoing::{Laid, LayError, Outgoing, PostContext, errno_of, own_segment};
use super::turns::may_copy;
use super::watch::Look;
use super::{Event, GetFailed, Got, Posted, Transport, What};
use crate::limits::RDMA_GETS_MAX;
use crate::slots::Slot;

/// How posting ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// There is nothing more to post, or no credit for it: the peer's next message goes on.
    Done,
    /// The queues of the device are full, or there are no frames.
    Later,
}

impl Transport {
    /// Posts what waits. To be called once after all that was reaped has been handled.
    pub fn flush(&mut self, reactor: &mut Reactor) {
        self.clock = reactor.now();
        if self.has_aside() {
            self.wait_after_removal(reactor);
        }
        self.turns.begin();
        while let Some(connection) = self.turns.next() {
            if let Some(state) = self.connections.get_mut(connection) {
                state.is_dirty = false;
            }
            match self.post(reactor, connection) {
                Ok(Stop::Done) => {}
                Ok(Stop::Later) => self.turns.wait(connection),
                Err(down) => {
                    self.end(connection, Some(down));
                    self.look();
                }
            }
        }
    }

    fn post(&mut self, reactor: &mut Reactor, connection: ConnectionId) -> Result<Stop, Down> {
        match self.connections.get_mut(connection).filter(|state| state.phase == Phase::Up) {
            Some(state) => state.stamp(self.clock),
            None => return Ok(Stop::Done),
        }
        let gets = self.post_gets(connection)?;
        let queue = self.post_queue(reactor, connection)?;
        // Credits go back even if nothing else can be sent.
        let credits = self.post_credits(connection)?;
        let later = [gets, queue, credits].contains(&Stop::Later);
        Ok(if later { Stop::Later } else { Stop::Done })
    }

    fn post_gets(&mut self, connection: ConnectionId) -> Result<Stop, Down> {
        loop {
            let Some(state) = self.connections.get_mut(connection) else { return Ok(Stop::Done) };
            let Some(endpoint) = state.endpoint.as_ref().filter(|_| !state.gets.is_empty()) else {
                return Ok(Stop::Done);
            };
            if state.posted_gets >= RDMA_GETS_MAX || !has_room(endpoint)? {
                return Ok(Stop::Later);
            }
            let Some(Get { from, into, token }) = state.gets.pop_front() else { return Ok(Stop::Done) };
            let adapter = state.adapter.and_then(|number| self.adapters.get(number)).ok_or(Down::Removed)?;
            let bytes = into.len();
            let segment = match own_segment(adapter, into, 0..bytes) {
                Ok(segment) => segment,
                Err((frame, error)) if !error.is_of_memory() => {
                    let result = Err(GetFailed::Work(WorkError::Flushed));
                    self.gots.push(Got { token, frame: Some(frame), result });
                    return Err(Down::Setup(error));
                }
                Err((frame, error)) => {
                    let result = Err(GetFailed::Memory(errno_of(error)));
                    self.gots.push(Got { token, frame: Some(frame), result });
                    continue;
                }
            };
            state.posted_gets += 1;
            let posted = self.posted.insert(Posted { connection, bytes, what: What::Get(token) });
            let into = Payload::from(segment);
            if let Err(refused) = endpoint.post(Work::Read { into, from }, posted.to_u64(), Report::Now) {
                let down = cannot_post(refused.error);
                // What the device may have keeps its entry until the connection is gone.
                if let Some(Work::Read { into, .. }) = refused.work {
                    self.posted.remove(posted);
                    if let Some(frame) = into.into_segment().and_then(Segment::into_frame) {
                        self.cannot_get(frame, token);
                    }
                }
                return Err(down);
            }
        }
    }

    /// Gives a frame back into which nothing can be read.
    fn cannot_get(&mut self, frame: Frame, token: u64) -> Down {
        let error = WorkError::LocalOperation;
        self.gots.push(Got { token, frame: Some(frame), result: Err(GetFailed::Work(error)) });
        Down::Work(error)
    }

    fn post_queue(&mut self, reactor: &mut Reactor, connection: ConnectionId) -> Result<Stop, Down> {
        loop {
            let Some(state) = self.connections.get_mut(connection) else { return Ok(Stop::Done) };
            if state.ready.is_empty() {
                match self.lay_next(reactor, connection)? {
                    Some(stop) => return Ok(stop),
                    None => continue,
                }
            }
            let Some(endpoint) = &state.endpoint else { return Ok(Stop::Done) };
            if !has_room(endpoint)? {
                return Ok(Stop::Later);
            }
            let adapter = state.adapter.and_then(|number| self.adapters.get(number)).ok_or(Down::Removed)?;
            let may_copy = may_copy(reactor.frames(), state.posted_writes > 0);
            let Some(ready) = pop_ready(&mut state.ready, reactor.frames(), &adapter.region, may_copy) else {
                return Ok(Stop::Later);
            };
            let bytes = ready.len();
            state.posted += 1;
            state.posted_bytes += bytes;
            state.queued -= bytes;
            // The last write of a put is reported, so that its frames come back, and with them those of the writes before it: what
            // is behind it may wait for them; so may what is still to be copied. Inline bytes hold no memory, so nobody waits for
            // their end, unless it is the last.
            let ends_put = matches!(ready, Ready::Write(_)) && awaits_write(&state.ready);
            let is_awaited = state.finishing || ends_put;
            let quiet = if is_awaited { Report::Now } else { Report::WithNext };
            // The end of an inline message may not be polled for long: it is reported as gone now.
            let is_reported =
                !is_awaited && matches!(&ready, Ready::Message(laid) if matches!(**laid, Laid::Inline { .. }));
            let times = if state.ready.is_empty() { state.times.take() } else { state.times };
            let what = if matches!(ready, Ready::Write(_)) {
                state.posted_writes += 1;
                What::Write(times)
            } else {
                What::Send(times.filter(|_| !is_reported))
            };
            let number = self.posted.insert(Posted { connection, bytes, what }).to_u64();
            let posted = match ready {
                Ready::Write(work) => endpoint.post(work, number, quiet).map_err(|refused| refused.error),
                Ready::Message(laid) => {
                    let immediate = state.credits.send();
                    match *laid {
                        Laid::Inline { bytes, len } => {
                            endpoint.send_inline_with(&bytes[..len], immediate, number, quiet)
                        }
                        Laid::Registered(payload) => {
                            let work = Work::SendWith { payload, immediate };
                            endpoint.post(work, number, Report::Now).map_err(|refused| refused.error)
                        }
                    }
                }
            };
            if let Err(error) = posted {
                self.posted.remove(Slot::from_u64(number));
                return Err(cannot_post(error));
            }
            if let Some(times) = times.filter(|_| is_reported) {
                self.events.push_back(Event::Sent(connection, Some(times.went(bytes, self.clock))));
            }
        }
    }

    /// Lays what is next in the queue, if it may be sent; else says why it stops.
    fn lay_next(&mut self, reactor: &mut Reactor, connection: ConnectionId) -> Result<Option<Stop>, Down> {
        let Some(state) = self.connections.get_mut(connection) else { return Ok(Some(Stop::Done)) };
        let may_send = state.credits.may_send();
        state.begin_next(self.clock);
        let Some((next, _)) = state.queue.front_mut() else { return Ok(Some(Stop::Done)) };
        let adapter = state.adapter.and_then(|number| self.adapters.get(number)).ok_or(Down::Removed)?;
        let inline_max = state.endpoint.as_ref().map_or(0, Endpoint::inline_bytes_max);
        let mut context = PostContext { reactor, adapter, segments_max: adapter.segments_max(), inline_max };
        let heap = next.heap_bytes();
        let laid = match next {
            Outgoing::Message { .. } if !may_send => return Ok(Some(Stop::Done)),
            Outgoing::Message { header, payload } => {
                context.message(header, payload).map(|laid| vec![Step::Ready(Ready::Message(Box::new(laid)))])
            }
            Outgoing::Put { to, payload } => context.put(*to, payload),
        };
        match laid {
            Ok(ready) => state.ready = ready,
            Err(LayError::NoFrames) => return Ok(Some(Stop::Later)),
            Err(LayError::Payload(errno)) => return Err(Down::Payload(errno)),
        }
        state.queued_heap -= heap;
        // There is room for more behind it.
        if !matches!(self.events.back(), Some(Event::Sent(told, _)) if *told == connection) {
            self.events.push_back(Event::Sent(connection, None));
        }
        if let Some((Outgoing::Message { payload, .. } | Outgoing::Put { payload, .. }, _)) = state.queue.pop_front() {
            self.keep(payload);
        }
        Ok(None)
    }

    /// Gives credits back by themselves, if so many are owed.
    fn post_credits(&mut self, connection: ConnectionId) -> Result<Stop, Down> {
        let Some(state) = self.connections.get_mut(connection).filter(|state| state.credits.must_return()) else {
            return Ok(Stop::Done);
        };
        let Some(endpoint) = &state.endpoint else { return Ok(Stop::Done) };
        if !has_room(endpoint)? {
            return Ok(Stop::Later);
        }
        let posted = self.posted.insert(Posted { connection, bytes: 0, what: What::Credits });
        let work = Work::SendWith { payload: Payload::Empty, immediate: state.credits.give_back() };
        let sent = endpoint.post(work, posted.to_u64(), Report::WithNext);
        sent.map(|()| Stop::Done).map_err(|refused| {
            self.posted.remove(posted);
            cannot_post(refused.error)
        })
    }
}

impl Transport {
    /// Posts a write of no bytes to no window, if the connection was silent: of it no key is looked at (InfiniBand specification,
    /// volume 1, C9-88), it takes no receive or credit of the peer's, and ends when the peer's device has answered.
    pub(super) fn post_probe(&mut self, connection: ConnectionId) -> Result<(), Down> {
        let up = self.connections.get_mut(connection).filter(|state| state.phase == Phase::Up);
        let Some(state) = up else { return Ok(()) };
        match state.watch.look() {
            Look::Fine => return Ok(()),
            Look::Ask => {}
            Look::Silent => return Err(Down::Work(WorkError::NoAnswer)),
        }
        let Some(endpoint) = &state.endpoint else { return Ok(()) };
        if !has_room(endpoint)? {
            return Ok(());
        }
        state.watch.set_probed(true);
        let number = self.posted.insert(Posted { connection, bytes: 0, what: What::Probe });
        let work = Work::Write { payload: Payload::Empty, to: WindowAddress { address: 0, rkey: 0 } };
        endpoint.post(work, number.to_u64(), Report::Now).map_err(|refused| {
            self.posted.remove(number);
            cannot_post(refused.error)
        })
    }
}

impl Ready {
    fn len(&self) -> usize {
        match self {
            Self::Message(laid) => match &**laid {
                Laid::Inline { len, .. } => *len,
                Laid::Registered(payload) => payload.len(),
            },
            Self::Write(Work::Write { payload, .. }) => payload.len(),
            Self::Write(_) => 0,
        }
    }
}

/// Whether the device's queues have room.
fn has_room(endpoint: &Endpoint) -> Result<bool, Down> {
    match endpoint.check_room() {
        Ok(()) => Ok(true),
        Err(PostError::Full) => Ok(false),
        Err(error) => Err(cannot_post(error)),
    }
}

/// What it means for the connection that something cannot be posted for which there is room.
fn cannot_post(error: PostError) -> Down {
    match error {
        PostError::NotConnected => Down::PeerClosed,
        PostError::Broken(errno) => Down::Device(errno),
        _ => Down::Work(WorkError::LocalOperation),
    }
}
