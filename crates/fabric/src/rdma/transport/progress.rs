//! Completions, and the ends of connections.

use super::super::error::WorkError;
use super::super::memory::{Payload, Segment};
use super::super::operations::{Completion as Done, Kind};
use super::connection::{Down, Phase, Received};
use super::{AdapterId, ConnectionId};
use super::{Event, GetFailed, Got, Transport, What};
use crate::slots::Slot;
use crate::wire::HEADER_BYTES;

impl Transport {
    /// Takes what has completed on a device.
    pub(super) fn collect(&mut self, adapter: Option<AdapterId>) {
        let Some((number, adapter)) = adapter.and_then(|number| Some((number, self.adapters.get_mut(number)?))) else {
            return;
        };
        let mut done = Vec::new();
        adapter.poll(&mut done);
        self.inbox.extend(done.into_iter().map(|(connection, done)| (number, connection, done)));
    }

    /// Looks at all that has completed; the ends of connections are told last, since operations of theirs end with them.
    pub(super) fn look(&mut self) {
        while let Some((adapter, connection, done)) = self.inbox.pop_front() {
            match done.kind {
                Kind::Receive => self.received(adapter, connection, done),
                Kind::Send | Kind::Write | Kind::Read => self.went(done),
            }
        }
        self.events.extend(self.ends.drain(..));
    }

    fn received(&mut self, adapter: AdapterId, connection: Option<ConnectionId>, done: Done) {
        let len = match done.result {
            Ok(len) => len,
            Err(error) => {
                self.take_back(adapter, done.payload);
                if let Some(connection) = connection {
                    self.end(connection, Some(Down::Work(error)));
                }
                return;
            }
        };
        let state = connection.and_then(|connection| Some((connection, self.connections.get_mut(connection)?)));
        let Some((connection, state)) = state else { return self.take_back(adapter, done.payload) };
        state.watch.hear();
        let returned = done.immediate.unwrap_or(0);
        let credited = if len == 0 { state.credits.receive_back(returned) } else { state.credits.receive(returned) };
        let step = match credited {
            Err(error) => Err(Down::Credit(error)),
            Ok(()) if len > 0 && (len as usize) < HEADER_BYTES => Err(Down::Short(len)),
            Ok(()) => Ok(()),
        };
        if let Err(down) = step {
            self.take_back(adapter, done.payload);
            return self.end(connection, Some(down));
        }
        if len == 0 {
            self.take_back(adapter, done.payload);
        } else {
            let received = Received { adapter, payload: done.payload, len: len as usize };
            if state.phase == Phase::Up {
                self.events.push_back(Event::Message(connection, received));
            } else {
                state.early.push_back(received);
            }
        }
        // It may have brought credits, or is to be answered with some.
        self.mark(connection);
    }

    /// An operation of ours has ended.
    fn went(&mut self, done: Done) {
        let Some(posted) = self.posted.remove(Slot::from_u64(done.token)) else { return };
        let connection = posted.connection;
        if let What::Get(token) = posted.what {
            let frame = done.payload.into_segment().and_then(Segment::into_frame);
            let result = if frame.is_some() { done.result.map_err(GetFailed::Work) } else { Err(GetFailed::GivenUp) };
            self.gots.push(Got { token, frame, result: result.map(|_| ()) });
        }
        let Some(state) = self.connections.get_mut(connection) else { return };
        state.watch.hear();
        match posted.what {
            What::Get(_) => state.posted_gets -= 1,
            What::Probe => state.watch.set_probed(false),
            What::Write(_) => state.posted_writes -= 1,
            What::Send(_) | What::Credits => {}
        }
        if let What::Send(times) | What::Write(times) = posted.what {
            state.posted -= 1;
            state.posted_bytes -= posted.bytes;
            let last = self.events.back();
            let is_news = times.is_some() || !matches!(last, Some(Event::Sent(told, _)) if *told == connection);
            if done.result.is_ok() && is_news {
                let went = times.map(|times| times.went(posted.bytes, self.clock));
                self.events.push_back(Event::Sent(connection, went));
            }
        }
        if let Err(error) = done.result {
            let error = self.first_cause(connection, error);
            self.end(connection, Some(Down::Work(error)));
        }
    }

    /// What failed first, if `error` says only that something did: devices give back in order what was posted, also what was
    /// before the operation that failed.
    fn first_cause(&mut self, connection: ConnectionId, error: WorkError) -> WorkError {
        if error != WorkError::Flushed {
            return error;
        }
        self.collect(self.connections.get(connection).and_then(|state| state.adapter));
        let of_it = self.inbox.iter().filter(|(_, of, _)| *of == Some(connection));
        of_it.filter_map(|(_, _, done)| done.result.err()).find(|cause| *cause != error).unwrap_or(error)
    }

    /// Gives the memory of a message to the device that it came by; to the pool, if that is gone.
    pub(super) fn take_back(&mut self, adapter: AdapterId, payload: Payload) {
        if let Some(adapter) = self.adapters.get_mut(adapter) {
            adapter.take_back(payload);
        }
    }

    /// Ends a connection, and tells so unless the owner did it. What is posted completes now.
    pub(super) fn end(&mut self, connection: ConnectionId, told: Option<Down>) {
        let Some(mut state) = self.connections.remove(connection) else { return };
        let waits = self.turns.is_waiting(connection);
        tracing::debug!(reason = ?told, waits, ?state, "an RDMA connection ends");
        for get in state.gets.drain(..) {
            let result = Err(GetFailed::Work(WorkError::Flushed));
            self.gots.push(Got { token: get.token, frame: Some(get.into), result });
        }
        let adapter = state.adapter.and_then(|number| Some((number, self.adapters.get_mut(number)?)));
        if let Some((number, adapter)) = adapter {
            let mut done = Vec::new();
            if let Some(endpoint) = state.endpoint.take() {
                adapter.end(endpoint, &mut done);
            }
            for received in state.early.drain(..) {
                adapter.take_back(received.payload);
            }
            if state.has_receives {
                adapter.release(&mut done);
            }
            self.inbox.extend(done.into_iter().map(|(connection, done)| (number, connection, done)));
        }
        if let Some(down) = told {
            self.ends.push(Event::Down(connection, down));
        }
    }
}

#[cfg(test)]
mod tests {
    use byway_reactor::{Frame, Mapping, Token};

    use super::super::Posted;
    use super::super::connection::Connection;
    use super::super::credit::CreditError;
    use super::super::greeting::greeting;
    use super::*;
    use crate::limits::RDMA_CREDITS;
    use crate::registration::Limits;

    #[test]
    fn a_get_whose_memory_a_lost_device_keeps_ends_once_without_it() {
        let mut transport = Transport::new(Token::new(1, 1, 0, 0), Limits::default());
        let connection = Slot::new(0, 1);
        let posted = transport.posted.insert(Posted { connection, bytes: 4096, what: What::Get(77) });
        let memory = Mapping::new(4096).unwrap();
        // SAFETY: no references to the memory are made.
        let frame = unsafe { Frame::over(&memory, 0, 4096) };
        // As the queue pair gives it back that cannot be destroyed; and once more, as a device that wakes up might.
        for payload in [Payload::from(Segment::unregistered(frame)), Payload::Empty] {
            transport.went(Done {
                token: posted.to_u64(),
                kind: Kind::Read,
                queue_pair: 3,
                result: Err(WorkError::Flushed),
                immediate: None,
                payload: payload.give_up(),
            });
        }
        let [got] = &transport.take_gots()[..] else { panic!("one end") };
        assert!(got.token == 77 && got.frame.is_none() && got.result == Err(GetFailed::GivenUp));
        assert!(transport.posted.is_empty());
        assert!(memory.is_given_up() && memory.uses() > 0, "its program never gets to it again, and need not wait");
    }

    /// A connection of which the server has not said yet that it accepts, without a device.
    fn asking() -> (Transport, ConnectionId) {
        let mut transport = Transport::new(Token::new(1, 1, 0, 0), Limits::default());
        let connection = transport.connections.insert(Connection::new(Phase::Asking, None, 0));
        (transport, connection)
    }

    /// Receives that end so, one after the other.
    fn receive(
        transport: &mut Transport,
        connection: ConnectionId,
        results: impl IntoIterator<Item = Result<u32, WorkError>>,
    ) {
        let done = |result| {
            let (token, kind, queue_pair, immediate, payload) = (0, Kind::Receive, 3, Some(0), Payload::Empty);
            (Slot::new(0, 1), Some(connection), Done { token, kind, queue_pair, result, immediate, payload })
        };
        transport.inbox.extend(results.into_iter().map(done));
        transport.look();
    }

    #[test]
    fn what_a_server_sends_before_it_is_told_of_takes_credits() {
        let (mut transport, connection) = asking();
        receive(&mut transport, connection, (0..RDMA_CREDITS).map(|_| Ok(128)));
        transport.established(connection, greeting().as_ref()).unwrap();
        assert_eq!(transport.events.len() as u32, 1 + RDMA_CREDITS, "it is there, and all its messages");
        receive(&mut transport, connection, [Ok(128)]);
        let last = transport.events.pop_back();
        let overrun = Down::Credit(CreditError::Overrun);
        assert!(matches!(last, Some(Event::Down(of, down)) if of == connection && down == overrun), "{last:?}");
    }

    #[test]
    fn a_connection_whose_peer_took_a_receive_for_no_message_ends() {
        let (mut transport, connection) = asking();
        transport.established(connection, greeting().as_ref()).unwrap();
        receive(&mut transport, connection, [Ok(128), Err(WorkError::NoMessage), Ok(128)]);
        let told: Vec<Event> = transport.events.drain(..).collect();
        let [Event::Connected(_), Event::Message(..), Event::Down(_, down)] = &told[..] else { panic!("{told:?}") };
        assert_eq!(*down, Down::Work(WorkError::NoMessage));
    }
}
