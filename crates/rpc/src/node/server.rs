//! Calls that came: taken by threads, answered, or handed on.

use std::sync::atomic::{AtomicBool, Ordering};

use byway_fabric::Slot;
use byway_fabric::node::{
    Class, Deadline, Descriptor, NodeError, OpError, OpId, Outcome, Session, SubmitError, WaitError,
};
use byway_reactor::Instant;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32};

use super::{ABANDONED, Rpc, Tables, Waiting, head, pack, unpack};
use crate::token::{Head, Kind, TokenName};

/// A call for this node's program.
#[derive(Debug)]
pub struct Request {
    /// Over which session it came: the caller's, or that of who handed it on.
    pub session: Session,
    /// What to do.
    pub method: u16,
    /// Whether somebody else was called and handed it on. Its windows are then those of the session between those two.
    pub delegated: bool,
    /// At most 64 bytes.
    pub arguments: Vec<u8>,
    /// Windows of the caller.
    pub windows: Vec<Descriptor>,
    /// More bytes; of a call that was handed on, the continuation of who [did so](Token::delegate).
    pub payload: Vec<u8>,
    /// The right to answer.
    pub token: Token,
}

/// The right to answer a call, once. Dropped, it answers with [`ABANDONED`].
pub struct Token {
    rpc: Rpc,
    /// Where the call came from.
    session: Session,
    head: Head,
    deadline: Instant,
    /// It was answered or handed on, or is just being handed on.
    used: AtomicBool,
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The secret is nobody's to read in a log.
        write!(f, "Token(call {} of {:?})", self.head.token.call.get(), self.session)
    }
}

impl Tables {
    fn take_waiting(&mut self) -> Option<Waiting> {
        let waiting = self.queue.pop_front()?;
        self.held.insert(waiting.head.token, false);
        Some(waiting)
    }

    /// A thread waits for a call no longer. False if its operation was given one already.
    fn leave_takers(&mut self, op: OpId) -> bool {
        let place = self.takers.iter().position(|other| *other == op);
        place.and_then(|place| self.takers.remove(place)).is_some()
    }
}

impl Rpc {
    /// Waits for a call. Threads share the calls: each goes to one. With a deadline that has passed it is a look, which begins
    /// nothing that ends later and would make [`Node::descriptor`](byway_fabric::node::Node::descriptor) readable again. What has ended
    /// it leaves to [`Node::progress`](byway_fabric::node::Node::progress).
    ///
    /// # Errors
    /// None by the deadline.
    pub fn next_call(&self, deadline: impl Into<Deadline>) -> Result<Request, NodeError> {
        let deadline = deadline.into();
        let ready = self.tables().take_waiting();
        if let Some(waiting) = ready {
            return self.request(waiting);
        }
        if deadline.left().is_some_and(|left| left.is_zero()) {
            self.node.turn()?;
            let ready = self.tables().take_waiting();
            return ready.map_or(Err(WaitError::Deadline.into()), |waiting| self.request(waiting));
        }
        let op = {
            let mut tables = self.tables();
            // One may have come in between; then nothing was begun that somebody would have to end.
            if let Some(waiting) = tables.take_waiting() {
                drop(tables);
                return self.request(waiting);
            }
            let op = self.node.layer_op()?;
            tables.takers.push_back(op.id());
            op
        };
        let result = match op.wait(deadline) {
            Ok(result) => result,
            // Another thread may hold the tables in the parent, for ever here.
            Err(error) if self.node.is_forked() => return Err(error.into()),
            Err(error) => {
                let left = self.tables().leave_takers(op.id());
                if left {
                    self.node.complete(op.id(), Err(OpError::Cancelled))?;
                    return Err(error.into());
                }
                // A call came in between: its operation has ended.
                op.test()?
            }
        };
        let Outcome::Layer(number) = result? else { return Err(OpError::WrongAnswer.into()) };
        let given = self.tables().given.remove(Slot::from_u64(number));
        self.request(given.ok_or(WaitError::Taken)?)
    }

    fn request(&self, waiting: Waiting) -> Result<Request, NodeError> {
        let Waiting { session, head, payload, deadline } = waiting;
        self.node.layer_taken(session)?;
        let token = Token { rpc: self.clone(), session, head, deadline, used: AtomicBool::new(false) };
        let (windows, arguments, rest) = unpack(&head, &payload).ok_or(OpError::WrongAnswer)?;
        Ok(Request {
            session,
            method: head.method.get(),
            delegated: head.kind == Kind::Delegate as u8,
            arguments: arguments.to_vec(),
            windows,
            payload: rest.to_vec(),
            token,
        })
    }
}

impl Token {
    /// Whether the caller has given up: cancelled, or past its deadline. An answer would be late.
    pub fn is_cancelled(&self) -> bool {
        let cancelled = self.rpc.tables().held.get(&self.head.token).copied().unwrap_or(true);
        cancelled || self.rpc.node.now() >= self.deadline
    }

    /// Answers: `status` 0 if it went well, `result` at most 64 bytes, with the payload at most 16 KiB. What a caller does not wait for any
    /// more, it counts and forgets.
    ///
    /// # Errors
    /// `TooLong`; `Busy` if the call [was handed on](Self::hand_on) already; the caller's session is gone, and so is that of who
    /// handed the call on.
    pub fn reply(mut self, status: u16, result: &[u8], payload: &[u8]) -> Result<(), SubmitError> {
        self.answer(status, result, payload)
    }

    fn answer(&mut self, status: u16, result: &[u8], payload: &[u8]) -> Result<(), SubmitError> {
        let payload = pack(&[], result, payload)?;
        if *self.used.get_mut() {
            return Err(SubmitError::Busy);
        }
        *self.used.get_mut() = true;
        let token = self.head.token;
        let delegated = self.head.kind == Kind::Delegate as u8;
        let (to, kind) = {
            let mut tables = self.rpc.tables();
            tables.held.remove(&token);
            if delegated {
                // If it has come back to us, we know a shorter way than that over those who had it meanwhile.
                let way = tables.relays.take(&token).unwrap_or(self.session);
                tables.next_step(&token, way)
            } else {
                (self.session, Kind::Reply)
            }
        };
        let mut reply = head(kind, token);
        reply.status = U16::new(status);
        reply.inline = result.len() as u8;
        self.rpc.node.layer_send(to, Class::Now, reply.as_bytes(), &payload)
    }

    /// Hands the call on: the node at the other end of `third` will answer the caller, over their own session if they have one. It gets
    /// `method`, `arguments` and `payload` as they are given here, and the windows that are given, which are of use to it only if
    /// the caller has opened them for their session.
    ///
    /// The payload is the continuation: all that the third node must know to carry on, since nothing of the call stays here but
    /// the way back for an answer that must come through us. The third may hand the call on in its turn, also back to this node with
    /// that payload as it was: then it comes here as a [`Request`] once more, and goes on from what the payload says
    /// (docs/decisions/0023).
    ///
    /// # Errors
    /// The token and why not: `TooLong`, `Busy`, the session is gone.
    pub fn delegate(
        self,
        third: Session,
        method: u16,
        arguments: &[u8],
        (windows, payload): (&[Descriptor], &[u8]),
    ) -> Result<(), Box<(Self, SubmitError)>> {
        self.hand_on(third, method, arguments, (windows, payload)).map_err(|error| Box::new((self, error)))
    }

    /// As [`Token::delegate`], with the token left to the caller: used up if it went well, and as it was if not.
    ///
    /// # Errors
    /// As there; `Busy` too if it was handed on already, or another thread is about to.
    pub fn hand_on(
        &self,
        third: Session,
        method: u16,
        arguments: &[u8],
        (windows, payload): (&[Descriptor], &[u8]),
    ) -> Result<(), SubmitError> {
        let payload = pack(windows, arguments, payload)?;
        if self.used.swap(true, Ordering::AcqRel) {
            return Err(SubmitError::Busy);
        }
        let handed = self.hand((third, method), (windows.len(), arguments.len()), &payload);
        if handed.is_err() {
            self.used.store(false, Ordering::Release);
        }
        handed
    }

    fn hand(
        &self,
        (third, method): (Session, u16),
        (windows, arguments): (usize, usize),
        payload: &[u8],
    ) -> Result<(), SubmitError> {
        let token = self.head.token;
        let mut handed = head(Kind::Delegate, token);
        handed.method = U16::new(method);
        handed.windows = windows as u8;
        handed.inline = arguments as u8;
        if self.deadline < Instant::FAR {
            let left = self.deadline.since(self.rpc.node.now()).as_millis();
            handed.left_ms = U32::new(u32::try_from(left).unwrap_or(u32::MAX).max(1));
        }
        // Before the third can answer. Of a call that was handed on to us, we are in the middle, unless it was here before.
        let is_callers = self.head.kind == Kind::Call as u8;
        let (added, cancelled) = {
            let mut tables = self.rpc.tables();
            // And before the third can hand it back: then it is held anew.
            (tables.relays.add(token, self.session, !is_callers), tables.held.remove(&token))
        };
        if let Err(error) = self.rpc.node.layer_send(third, Class::Layer, handed.as_bytes(), payload) {
            let mut tables = self.rpc.tables();
            if added {
                tables.relays.take(&token);
            }
            tables.held.extend(cancelled.map(|cancelled| (token, cancelled)));
            return Err(error);
        }
        self.rpc.tables().counters.delegated += 1;
        // Only the caller's own server can say so, and it has.
        if is_callers {
            let _ = self.rpc.node.layer_send(self.session, Class::Now, head(Kind::Moved, token).as_bytes(), &[]);
        }
        Ok(())
    }

    /// The name, for a log of the program's own, or to answer with later: who has it can answer.
    pub fn name(&self) -> TokenName {
        self.head.token
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        if !*self.used.get_mut() && !self.rpc.node.is_forked() {
            // A caller that is gone needs no answer.
            let _ = self.answer(ABANDONED, &[], &[]);
        }
    }
}
