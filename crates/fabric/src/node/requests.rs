//! Requests of a program to a node.

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::MutexGuard;
use std::sync::mpsc::sync_channel;

use super::command::{Command, Header};
use super::error::{NodeError, OpError, SubmitError, WaitError};
use super::memory::{HeldSegments, Places, Segment, Window};
use super::op::{Op, OpId, Outcome};
use super::shared::{OpKind, OpSlot, Shared};
use super::{Deadline, Message, Node, NodeCounters, Session};
use crate::descriptor::{Descriptor, Rights};
use crate::limits::{OPERATION_BYTES_MAX, SEGMENTS_MAX, SMALL_BYTES_MAX};
use crate::tls::TlsClient;
use byway_reactor::{Address, Mapping};

impl Node {
    /// Begins an operation that the loop does.
    fn command(&self, kind: OpKind, command: impl FnOnce(OpSlot) -> Command) -> Result<Op, SubmitError> {
        let shared = self.inner.lock()?;
        self.command_with(shared, kind, command)
    }

    /// As [`Self::command`], with the tables that the caller has locked.
    fn command_with(
        &self,
        mut shared: MutexGuard<'_, Shared>,
        kind: OpKind,
        command: impl FnOnce(OpSlot) -> Command,
    ) -> Result<Op, SubmitError> {
        let slot = shared.begin(kind)?;
        shared.commands.push_back(command(slot));
        self.inner.nudge(shared);
        Ok(Op::new(self, slot))
    }

    /// An operation that ends without anybody's doing but the loop's.
    pub(super) fn run(&self, command: impl FnOnce(OpSlot) -> Command) -> Result<Outcome, NodeError> {
        Ok(self.command(OpKind::Plain, command)?.wait(Deadline::NEVER)??)
    }

    /// Listens. Each peer that connects gets a session, which [`Node::accept`] returns. Gives the address, of TCP or an RDMA
    /// device, with the port that the kernel chose, if 0 was asked for.
    ///
    /// # Errors
    /// The kernel's: address in use, no such folder, ...; no RDMA library or device.
    pub fn listen(&self, address: &Address) -> Result<Option<SocketAddr>, NodeError> {
        let address = address.clone();
        match self.run(|op| Command::Listen { op, address })? {
            Outcome::Listening(at) => Ok(at),
            _ => Ok(None),
        }
    }

    /// Stops listening, for good: sessions that are there stay, and no peer that connects from now on gets one. Connections that have no
    /// session yet are closed.
    ///
    /// # Errors
    /// `Busy`, `Forked`.
    pub fn stop_listening(&self) -> Result<(), NodeError> {
        self.run(|op| Command::StopListening { op }).map(drop)
    }

    /// Connects; the operation brings a session, or the reason why there is none.
    ///
    /// # Errors
    /// `Busy`, `Forked`.
    pub fn start_connect(&self, address: &Address) -> Result<Op, SubmitError> {
        self.start_connect_with(address, None)
    }

    /// Connects over TLS: the operation brings a session all of whose connections are encrypted, with a peer whose certificate is
    /// the one that `tls` asks for, or the reason why there is none ([`CloseReason::Tls`](crate::CloseReason::Tls)). There is no
    /// such session over RDMA.
    ///
    /// # Errors
    /// `Busy`, `Forked`.
    pub fn start_connect_secure(&self, address: &Address, tls: &TlsClient) -> Result<Op, SubmitError> {
        self.start_connect_with(address, Some(tls.clone()))
    }

    /// Connects over TLS, and waits for it.
    ///
    /// # Errors
    /// As for [`Node::connect`]; the peer has another identity than expected, or refuses this node.
    pub fn connect_secure(
        &self,
        address: &Address,
        tls: &TlsClient,
        deadline: impl Into<Deadline>,
    ) -> Result<Session, NodeError> {
        session(self.start_connect_secure(address, tls)?.wait_or_call_off(deadline)??)
    }

    fn start_connect_with(&self, address: &Address, tls: Option<TlsClient>) -> Result<Op, SubmitError> {
        let credits = self.inner.messages;
        let mut shared = self.inner.lock()?;
        let (slot, session) = shared.connect(credits)?;
        shared.commands.push_back(Command::Connect { session, address: address.clone(), tls });
        self.inner.nudge(shared);
        Ok(Op::new(self, slot))
    }

    /// Connects, and waits for it.
    ///
    /// # Errors
    /// No node listens there, or none that drives its loop before the deadline: then nothing of the connection stays.
    pub fn connect(&self, address: &Address, deadline: impl Into<Deadline>) -> Result<Session, NodeError> {
        session(self.start_connect(address)?.wait_or_call_off(deadline)??)
    }

    /// An operation that waits for a session that a peer begins.
    ///
    /// # Errors
    /// `Busy`, `Forked`.
    pub fn start_accept(&self) -> Result<Op, SubmitError> {
        let mut shared = self.inner.lock()?;
        let slot = shared.accept()?;
        self.inner.tell_poll(shared);
        Ok(Op::new(self, slot))
    }

    /// Waits for a session that a peer begins.
    ///
    /// # Errors
    /// None by the deadline.
    pub fn accept(&self, deadline: impl Into<Deadline>) -> Result<Session, NodeError> {
        session(self.start_accept()?.wait_or_call_off(deadline)??)
    }

    /// Ends a session, when the messages that were sent have gone out; what has not come of its operations ends with an error.
    /// [Flush](Node::flush) before, if puts are to arrive. Messages that were not taken are gone.
    ///
    /// # Errors
    /// `Forked`.
    pub fn close(&self, session: Session) -> Result<(), SubmitError> {
        let mut shared = self.inner.lock()?;
        if shared.close(session) {
            shared.commands.push_back(Command::Close { session });
        }
        self.inner.nudge(shared);
        Ok(())
    }

    /// Sends a message: a header of at most 64 bytes, and a payload of at most 16 KiB. Both are copied. The operation ends when the
    /// message is on its way, which it is as soon as there is credit; that it was taken only an answer can say.
    ///
    /// # Errors
    /// `TooLong`; `Busy` if 64 messages wait for credit already; the session is gone.
    pub fn send(&self, session: Session, header: &[u8], payload: &[u8]) -> Result<Op, SubmitError> {
        let header = Header::new(header).ok_or(SubmitError::TooLong)?;
        if payload.len() > SMALL_BYTES_MAX {
            return Err(SubmitError::TooLong);
        }
        let payload = payload.to_vec();
        self.send_counted(session, |op| Command::Send { op: Some(op), session, header, payload })
    }

    /// As [`Node::send`], for a message of which nobody asks whether it went out: without an operation, and what polls the node's descriptor is not
    /// woken for its end.
    ///
    /// # Errors
    /// As there.
    pub fn post(&self, session: Session, header: &[u8], payload: &[u8]) -> Result<(), SubmitError> {
        let header = Header::new(header).ok_or(SubmitError::TooLong)?;
        if payload.len() > SMALL_BYTES_MAX {
            return Err(SubmitError::TooLong);
        }
        let payload = payload.to_vec();
        let mut shared = self.inner.lock()?;
        shared.count_waiting(session)?;
        shared.commands.push_back(Command::Send { op: None, session, header, payload });
        self.inner.nudge(shared);
        Ok(())
    }

    fn send_counted(&self, session: Session, command: impl FnOnce(OpSlot) -> Command) -> Result<Op, SubmitError> {
        let mut shared = self.inner.lock()?;
        shared.count_waiting(session)?;
        let slot = match shared.begin(OpKind::Send(session)) {
            Ok(slot) => slot,
            Err(error) => {
                shared.waits_no_longer(session);
                return Err(error);
            }
        };
        shared.commands.push_back(command(slot));
        self.inner.nudge(shared);
        Ok(Op::new(self, slot))
    }

    /// Receives the next message, of one session or of any: an operation. From any, it also brings the end of each session, once,
    /// after its messages ([`Outcome::Ended`]).
    ///
    /// # Errors
    /// `Busy`; the session is gone, or has ended and all its messages were taken.
    pub fn start_receive(&self, from: Option<Session>) -> Result<Op, SubmitError> {
        let mut shared = self.inner.lock()?;
        let slot = shared.receive(from)?;
        let message = shared.ops.get(slot).and_then(|state| match &state.result {
            Some(Ok(Outcome::Message(message))) => Some(message.session),
            _ => None,
        });
        if let Some(session) = message.filter(|session| shared.is_credit_due(*session)) {
            shared.commands.push_back(Command::GiveCredit { session });
            self.inner.nudge(shared);
        } else {
            self.inner.tell_poll(shared);
        }
        Ok(Op::new(self, slot))
    }

    /// Waits for the next message of any session; skips the ends of sessions.
    ///
    /// # Errors
    /// None by the deadline.
    pub fn receive(&self, deadline: impl Into<Deadline>) -> Result<Message, NodeError> {
        let deadline = deadline.into();
        loop {
            if let Outcome::Message(message) = self.start_receive(None)?.wait_or_call_off(deadline)?? {
                return Ok(message);
            }
        }
    }

    /// Waits for the next message of one session.
    ///
    /// # Errors
    /// None by the deadline, or the session has ended.
    pub fn receive_from(&self, session: Session, deadline: impl Into<Deadline>) -> Result<Message, NodeError> {
        match self.start_receive(Some(session))?.wait_or_call_off(deadline)?? {
            Outcome::Message(message) => Ok(message),
            _ => Err(OpError::WrongAnswer.into()),
        }
    }

    /// Puts bytes into a window of the peer, from `offset` on: those of up to 64 segments, in order. The operation ends when they lie
    /// there, or the peer has refused them; of a put of more than 1 MiB ([`PAYLOAD_BYTES_MAX`](crate::limits::PAYLOAD_BYTES_MAX))
    /// a part may lie there then. Puts into one window arrive in their order.
    ///
    /// # Errors
    /// See [`SubmitError`].
    pub fn put(
        &self,
        session: Session,
        segments: &[Segment<'_>],
        to: &Descriptor,
        offset: u64,
    ) -> Result<Op, SubmitError> {
        let (segments, len) = hold(self, segments)?;
        let to = to.writable()?.place(to.put_key(), offset, len)?;
        self.start_put(session, segments, to)
    }

    /// As [`Node::put`], into up to 64 ranges of the window in their order, which have as many bytes as the segments.
    ///
    /// # Errors
    /// See [`SubmitError`]; `OutOfRange` if there are more bytes of the one than of the other.
    pub fn put_ranges(
        &self,
        session: Session,
        segments: &[Segment<'_>],
        to: &Descriptor,
        ranges: &[Range<u64>],
    ) -> Result<Op, SubmitError> {
        let (segments, len) = hold(self, segments)?;
        let to = to.writable()?.places(to.put_key(), ranges, len)?;
        self.start_put(session, segments, to)
    }

    pub(super) fn start_put(&self, session: Session, segments: HeldSegments, to: Places) -> Result<Op, SubmitError> {
        if to.is_empty() {
            return self.flush(session);
        }
        self.transfer(session, OpKind::Transfer(session), |op| Command::Put {
            op,
            session,
            segments,
            to,
            message: None,
        })
    }

    /// Puts bytes, and has a message with that header (at most 64 bytes) follow them: the peer's program receives it once all of them lie
    /// there, and not if the peer has refused a part. It takes a credit, as each message does; the put waits for it.
    ///
    /// # Errors
    /// See [`SubmitError`]; a put of no bytes has no message.
    pub fn put_with_message(
        &self,
        session: Session,
        segments: &[Segment<'_>],
        to: &Descriptor,
        offset: u64,
        header: &[u8],
    ) -> Result<Op, SubmitError> {
        let message = Header::new(header).ok_or(SubmitError::TooLong)?;
        let (segments, len) = hold(self, segments)?;
        let to = to.writable()?.place(to.put_key(), offset, len)?;
        if to.is_empty() {
            return Err(SubmitError::OutOfRange);
        }
        self.send_counted(session, |op| Command::Put { op, session, segments, to, message: Some(message) })
    }

    /// Gets bytes of a window of the peer, from `offset` on, into up to 64 segments, in order. The peer's program hears nothing of
    /// it; its node must be turned.
    ///
    /// # Errors
    /// See [`SubmitError`].
    pub fn get(
        &self,
        session: Session,
        from: &Descriptor,
        offset: u64,
        segments: &[Segment<'_>],
    ) -> Result<Op, SubmitError> {
        let (segments, len) = hold(self, segments)?;
        let from = from.readable()?.place(from.get_key(), offset, len)?;
        self.start_get(session, from, segments)
    }

    /// As [`Node::get`], of up to 64 ranges of the window in their order, which have as many bytes as the segments: scattered
    /// frames of a peer, by one operation. Over a connection each range is asked for by a message of its own, all of which go out
    /// at once.
    ///
    /// # Errors
    /// See [`SubmitError`]; `OutOfRange` if there are more bytes of the one than of the other.
    pub fn get_ranges(
        &self,
        session: Session,
        from: &Descriptor,
        ranges: &[Range<u64>],
        segments: &[Segment<'_>],
    ) -> Result<Op, SubmitError> {
        let (segments, len) = hold(self, segments)?;
        let from = from.readable()?.places(from.get_key(), ranges, len)?;
        self.start_get(session, from, segments)
    }

    pub(super) fn start_get(&self, session: Session, from: Places, segments: HeldSegments) -> Result<Op, SubmitError> {
        if from.is_empty() {
            return self.flush(session);
        }
        self.transfer(session, OpKind::Transfer(session), |op| Command::Get { op, session, segments, from })
    }

    /// Ends an operation at once: one that has not begun is cancelled; else its session ends, with all that is under way there.
    pub(super) fn give_up(&self, op: Option<OpId>, session: Session) -> Result<(), SubmitError> {
        let mut shared = self.inner.lock()?;
        shared.commands.push_back(Command::GiveUp { op, session });
        self.inner.nudge(shared);
        Ok(())
    }

    /// Ends when all puts over a session that were begun before have ended, well or not.
    ///
    /// # Errors
    /// `Busy`; the session is gone.
    pub fn flush(&self, session: Session) -> Result<Op, SubmitError> {
        self.transfer(session, OpKind::Plain, |op| Command::Flush { op, session })
    }

    fn transfer(
        &self,
        session: Session,
        kind: OpKind,
        command: impl FnOnce(OpSlot) -> Command,
    ) -> Result<Op, SubmitError> {
        let mut shared = self.inner.lock()?;
        shared.usable(session)?;
        self.command_with(shared, kind, command)
    }

    /// As [`Op::cancel`], by name.
    ///
    /// # Errors
    /// `Forked`.
    pub fn cancel(&self, op: OpId) -> Result<(), SubmitError> {
        let mut shared = self.inner.lock()?;
        if !shared.cancel(op.0)
            && let Some(kind) = shared.ops.get(op.0).map(|state| state.origin.kind)
        {
            shared.commands.push_back(Command::Cancel { op, kind });
        }
        self.inner.nudge(shared);
        Ok(())
    }

    pub(super) fn open_range(
        &self,
        sessions: &[Session],
        segment: Segment<'_>,
        rights: Rights,
        once: bool,
    ) -> Result<Window, NodeError> {
        let held = segment.hold(self)?;
        if held.len == 0 || !(rights.put || rights.get) {
            return Err(SubmitError::OutOfRange.into());
        }
        let mut shared = self.inner.lock()?;
        for session in sessions {
            shared.usable(*session)?;
        }
        drop(shared);
        let (mapping, range) = (held.mapping.clone(), held.start..held.start + held.len);
        let opened = sessions.to_vec();
        match self.run(|op| Command::Open { op, sessions: opened, mapping, range, rights, once })? {
            Outcome::Opened(descriptor) => Ok(Window::new(self.clone(), sessions.to_vec(), descriptor, held.mapping)),
            _ => Err(OpError::WrongAnswer.into()),
        }
    }

    pub(super) fn close_window(
        &self,
        sessions: Vec<Session>,
        descriptor: Descriptor,
        mapping: Mapping,
    ) -> Result<Op, SubmitError> {
        let mut shared = self.inner.lock()?;
        // However much is under way: a window that could not be closed would stay open to the peer, and its handle is gone.
        let slot = shared.begin_beyond(OpKind::Plain);
        shared.commands.push_back(Command::CloseWindow { op: slot, sessions, descriptor, mapping });
        self.inner.nudge(shared);
        Ok(Op::new(self, slot))
    }

    /// What it has, counted now: if another thread turns the loop, by that thread, between two of its steps.
    ///
    /// # Errors
    /// `Forked`.
    pub fn counters(&self) -> Result<NodeCounters, SubmitError> {
        let (ops, sessions) = {
            let shared = self.inner.lock()?;
            (shared.ops.len(), shared.sessions.len())
        };
        let held = loop {
            let (tell, told) = sync_channel(1);
            let mut shared = self.inner.lock()?;
            shared.commands.push_back(Command::Count { tell });
            self.inner.nudge(shared);
            // A thread that panics while it turns the loop tells nothing: the node says so next.
            if let Ok(held) = told.recv() {
                break held;
            }
        };
        Ok(NodeCounters { ops, sessions, ..held })
    }
}

fn session(outcome: Outcome) -> Result<Session, NodeError> {
    match outcome {
        Outcome::Session(session) => Ok(session),
        _ => Err(OpError::WrongAnswer.into()),
    }
}

/// Begins a use of each segment; gives the bytes of all.
fn hold(node: &Node, segments: &[Segment<'_>]) -> Result<(HeldSegments, usize), SubmitError> {
    if segments.len() > SEGMENTS_MAX {
        return Err(SubmitError::TooLong);
    }
    let held = segments.iter().map(|segment| segment.hold(node)).collect::<Result<HeldSegments, _>>()?;
    let len = held.iter().map(|segment| segment.len).sum();
    if len > OPERATION_BYTES_MAX { Err(SubmitError::TooLong) } else { Ok((held, len)) }
}

impl From<SubmitError> for WaitError {
    fn from(error: SubmitError) -> Self {
        match error {
            SubmitError::Panicked => Self::Panicked,
            _ => Self::Forked,
        }
    }
}
