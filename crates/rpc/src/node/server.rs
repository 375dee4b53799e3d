//! Calls that came: taken by threads, answered, or delegated.

use std::sync::atomic::{AtomicBool, Ordering};

use byway_fabric::Slot;
use byway_fabric::node::{Deadline, Descriptor, NodeError, OpError, OpId, Outcome, Session, SubmitError, WaitError};
use byway_reactor::Instant;
use zerocopy::IntoBytes;

use super::{Arrived, Call, Rpc, Tables, pack};
use crate::message::{Inline, Status, TOKEN_BYTES};
use crate::seeded::{self, Bug};
use crate::session::{Ask, CallRef, CannotSend};

/// A call for this node's program.
#[derive(Debug)]
pub struct Request {
    /// The session that the call came over: the caller's, or that of the node that delegated it.
    pub session: Session,
    /// The protocol.
    pub protocol: u8,
    /// The method.
    pub method: u16,
    /// Whether another node was called and delegated the call. Its windows are then those that this node gave.
    pub delegated: bool,
    /// At most 64 bytes.
    pub arguments: Vec<u8>,
    /// Windows of the caller.
    pub windows: Vec<Descriptor>,
    /// More bytes; of a delegated call, the [continuation](Token::delegate).
    pub payload: Vec<u8>,
    /// The right to answer.
    pub token: Token,
}

/// The right to answer a call, once. Dropped, it answers with [`Status::Abandoned`].
pub struct Token {
    rpc: Rpc,
    call: CallRef,
    deadline: Instant,
    /// The call was answered or delegated, or is just being delegated.
    used: AtomicBool,
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Token({:?})", self.call)
    }
}

impl Tables {
    /// A thread waits for a call no longer. False if its operation was given one already.
    pub(super) fn leave_takers(&mut self, op: OpId) -> bool {
        let place = self.takers.iter().position(|other| *other == op);
        place.and_then(|place| self.takers.remove(place)).is_some()
    }
}

impl Rpc {
    /// Waits for a call. Threads share the calls: each goes to one. With a deadline that has passed it is a look, which begins
    /// nothing that ends later and would make [`Node::descriptor`](byway_fabric::node::Node::descriptor) readable again. What has
    /// ended it leaves to [`Node::progress`](byway_fabric::node::Node::progress).
    ///
    /// # Errors
    /// None by the deadline.
    pub fn next_call(&self, deadline: impl Into<Deadline>) -> Result<Request, NodeError> {
        let deadline = deadline.into();
        let ready = self.tables().queue.pop_front();
        if let Some(arrived) = ready {
            return Ok(self.request(arrived));
        }
        if deadline.left().is_some_and(|left| left.is_zero()) {
            self.node.turn()?;
            let ready = self.tables().queue.pop_front();
            return ready.map(|arrived| self.request(arrived)).ok_or_else(|| WaitError::Deadline.into());
        }
        let op = {
            let mut tables = self.tables();
            // One may have come in between; then nothing was begun that has to be ended.
            if let Some(arrived) = tables.queue.pop_front() {
                drop(tables);
                return Ok(self.request(arrived));
            }
            let op = self.node.layer_op()?;
            tables.takers.push_back(op.id());
            op
        };
        let result = match op.wait(deadline) {
            Ok(result) => result,
            // Another thread may hold the tables in the parent, for ever here.
            Err(error) if self.node.is_forked() => return Err(error.into()),
            // The next call must not go to a taker that has left, whatever ended its wait.
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
        given.map(|arrived| self.request(arrived)).ok_or_else(|| WaitError::Taken.into())
    }

    fn request(&self, arrived: Arrived) -> Request {
        let Arrived { call, protocol, method, arguments, windows, payload, delegated, deadline } = arrived;
        let token = Token { rpc: self.clone(), call, deadline, used: AtomicBool::new(false) };
        let (session, arguments) = (Session::from(call.session), arguments.to_vec());
        Request { session, protocol, method, delegated, arguments, windows, payload, token }
    }
}

impl Token {
    /// Whether the caller has given up: cancelled, or past its deadline. It drops an answer.
    pub fn is_cancelled(&self) -> bool {
        self.rpc.tables().calls.is_cancelled(self.call) || self.rpc.node.now() >= self.deadline
    }

    /// Answers: `status` 0 for success, `result` at most 64 bytes, the payload at most 16 KiB less 40 bytes. A caller that has stopped waiting
    /// counts the answer and drops it.
    ///
    /// # Errors
    /// `TooLong`; `Busy` if the call [was delegated](Self::hand_on) already; the session that the call came over is gone.
    pub fn reply(mut self, status: u16, result: &[u8], payload: &[u8]) -> Result<(), SubmitError> {
        self.answer(status, result, payload)
    }

    fn answer(&mut self, status: u16, result: &[u8], payload: &[u8]) -> Result<(), SubmitError> {
        let result = Inline::new(result).ok_or(SubmitError::TooLong)?;
        let payload = pack(&[], payload, TOKEN_BYTES)?;
        if *self.used.get_mut() {
            return Err(SubmitError::Busy);
        }
        *self.used.get_mut() = true;
        let mut tables = self.rpc.tables();
        let route = tables.calls.reply(self.call, status, payload.len() as u32, &result);
        let Some(route) = route else { return Err(self.rpc.node.session_error(self.call.session.into())) };
        let outbox = std::mem::take(tables.calls.outbox());
        drop(tables);
        let payload = match &route.token {
            Some(token) if !seeded::is(Bug::TokenLeftOut) => [token.as_bytes(), &payload].concat(),
            _ => payload,
        };
        let sent = self.rpc.node.layer_send(route.session.into(), route.header, payload, None);
        // Behind the answer: a caller that hears first that it was answered takes an answer over its own session for lost.
        self.rpc.send_all(outbox);
        sent
    }

    /// Delegates the call: the node at the other end of `third` answers the caller, over their own session if they have one. It gets
    /// `call` as it is given here, and of its windows can use those that the caller has opened for their session.
    ///
    /// The payload is the continuation: all that the third node must know to carry on, since nothing of the call stays here but
    /// the way back for an answer that must come through this node. The third may delegate the call in its turn, also back to this
    /// node with that payload as it was: then it comes here as a [`Request`] once more, and goes on from what the payload says
    /// (docs/decisions/0023). If the third's session ends first, the caller gets [`Status::DelegateLost`].
    ///
    /// # Errors
    /// The token and why not: `TooLong`; `Busy` if the third has given no more credit; `NotSpoken`; `Unsupported` if it does not serve
    /// the protocol; `CallerGone`; the third's session is gone.
    pub fn delegate(self, third: Session, call: &Call<'_>) -> Result<(), Box<(Self, SubmitError)>> {
        self.hand_on(third, call).map_err(|error| Box::new((self, error)))
    }

    /// As [`Token::delegate`], with the token left to the caller: used up if it went well, and as it was if not.
    ///
    /// # Errors
    /// As there; `Busy` too if the call was delegated already, or another thread is about to.
    pub fn hand_on(&self, third: Session, call: &Call<'_>) -> Result<(), SubmitError> {
        let arguments = Inline::new(call.arguments).ok_or(SubmitError::TooLong)?;
        let payload = pack(call.windows, call.payload, TOKEN_BYTES)?;
        if self.used.swap(true, Ordering::AcqRel) {
            return Err(SubmitError::Busy);
        }
        let windows = call.windows.len() as u8;
        let ask = Ask { protocol: call.protocol, method: call.method, arguments: &arguments, windows };
        let has_deadline = self.deadline < Instant::FAR && !seeded::is(Bug::DeadlineNotPassedOn);
        let left = has_deadline.then(|| self.deadline.since(self.rpc.node.now()));
        let mut tables = self.rpc.tables();
        let delegated = tables.calls.delegate(self.call, third.into(), &ask, left);
        let (speaks, is_owed) = (tables.calls.speaks(call.protocol), tables.calls.is_owed(self.call));
        drop(tables);
        match delegated {
            // If the third's session ends before it is sent, the caller is told by the end of that session.
            Ok((header, token)) => {
                let _ = self.rpc.node.layer_send(third, header, [token.as_bytes(), &payload].concat(), None);
                Ok(())
            }
            Err(error) => {
                self.used.store(false, Ordering::Release);
                Err(match error {
                    _ if !speaks => SubmitError::NotSpoken,
                    _ if !is_owed => SubmitError::CallerGone,
                    CannotSend::NoCredit => SubmitError::Busy,
                    CannotSend::NotServed(_) => SubmitError::Unsupported,
                    CannotSend::Ended => self.rpc.node.session_error(third),
                })
            }
        }
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        if !*self.used.get_mut() && !self.rpc.node.is_forked() {
            // A caller that is gone needs no answer.
            let _ = self.answer(Status::Abandoned as u16, &[], &[]);
        }
    }
}
