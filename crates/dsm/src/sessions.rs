//! A process's sessions with all others of its job.

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use byway_fabric::node::{Deadline, Node, NodeError, Op, Outcome, Session, SubmitError, WaitError};
use byway_service::dsm::wire::Message;
use byway_service::dsm::{Batches, Rank, Sendable, messages};

/// What came.
#[derive(Debug)]
pub(crate) enum Incoming {
    Message(Rank, Message, Vec<u8>),
    /// Bytes that are no message.
    Malformed(Rank),
    Gone(Rank),
}

pub(crate) struct Sessions {
    node: Node,
    /// By rank; none of this process, and of those that have gone.
    sessions: Vec<Option<Session>>,
    ranks: HashMap<Session, Rank>,
    receive: Option<Op>,
    /// The rest of the last batch.
    came: VecDeque<(Rank, Message, Vec<u8>)>,
    batches: Batches,
    /// Messages that wait for credit, in order. The protocol bounds them: each rank has one ask for a page under way.
    waiting: VecDeque<Sendable>,
}

impl Sessions {
    pub(crate) fn new(node: Node, sessions: Vec<Option<Session>>) -> Self {
        let by_session = |(rank, session): (usize, &Option<Session>)| Some(((*session)?, rank as Rank));
        let ranks = sessions.iter().enumerate().filter_map(by_session).collect();
        let (came, batches, waiting) = (VecDeque::new(), Batches::default(), VecDeque::new());
        Self { node, sessions, ranks, receive: None, came, batches, waiting }
    }

    /// Readable when [`Sessions::next`] has something.
    pub(crate) fn descriptor(&self) -> std::io::Result<BorrowedFd<'_>> {
        self.node.descriptor()
    }

    /// Sends a message with the next [`Sessions::flush`].
    pub(crate) fn send(&mut self, to: Rank, message: Message, payload: Vec<u8>) {
        self.batches.add(to, message, payload);
    }

    /// Whether a part of what came last is left.
    pub(crate) fn has_more(&self) -> bool {
        !self.came.is_empty()
    }

    /// Sends what was gathered. What was received together is answered together: as long as some of it is left, only full batches are sent, so that
    /// the other process works on them meanwhile.
    pub(crate) fn flush(&mut self) -> Result<(), SubmitError> {
        while let Some(sendable) = if self.has_more() { self.batches.take_full() } else { self.batches.take() } {
            let must_wait = self.waiting.iter().any(|(other, ..)| *other == sendable.0);
            if must_wait || !self.try_send(&sendable)? {
                self.waiting.push_back(sendable);
            }
        }
        Ok(())
    }

    /// False if it must wait. A rank that has gone is told by [`Sessions::next`].
    fn try_send(&self, (to, header, payload): &Sendable) -> Result<bool, SubmitError> {
        let Some(session) = self.sessions[usize::from(*to)] else { return Ok(true) };
        match self.node.post(session, header, payload) {
            Err(SubmitError::Busy) => Ok(false),
            // No message is left out in silence.
            Err(error @ SubmitError::TooLong) => Err(error),
            _ => Ok(true),
        }
    }

    /// Sends what waited, and has the node's loop do what there is to do. True if something may have come.
    pub(crate) fn progress(&mut self) -> Result<bool, NodeError> {
        let mut held = Vec::new();
        for sendable in std::mem::take(&mut self.waiting) {
            if held.contains(&sendable.0) || !self.try_send(&sendable)? {
                held.push(sendable.0);
                self.waiting.push_back(sendable);
            }
        }
        Ok(self.node.progress()?)
    }

    /// What came next, if anything is there.
    pub(crate) fn next(&mut self) -> Result<Option<Incoming>, NodeError> {
        loop {
            if let Some((rank, message, payload)) = self.came.pop_front() {
                return Ok(Some(Incoming::Message(rank, message, payload)));
            }
            let receive = match self.receive.take() {
                Some(receive) => receive,
                None => self.node.start_receive(None)?,
            };
            let outcome = match receive.test() {
                Ok(outcome) => outcome?,
                Err(WaitError::Deadline) => {
                    self.receive = Some(receive);
                    return Ok(None);
                }
                Err(error) => return Err(error.into()),
            };
            match outcome {
                Outcome::Message(message) => {
                    let Some(&rank) = self.ranks.get(&message.session) else { continue };
                    let Some(said) = messages(&message.header, message.payload) else {
                        return Ok(Some(Incoming::Malformed(rank)));
                    };
                    self.came.extend(said.into_iter().map(|(message, payload)| (rank, message, payload)));
                }
                Outcome::Ended(session, _) => {
                    let Some(rank) = self.ranks.remove(&session) else { continue };
                    self.sessions[usize::from(rank)] = None;
                    return Ok(Some(Incoming::Gone(rank)));
                }
                _ => {}
            }
        }
    }

    /// Ends all sessions when what was sent has gone out, or time is over.
    pub(crate) fn close(&mut self, time: Duration) {
        let deadline = Instant::now() + time;
        self.came.clear();
        let _ = self.flush();
        while !self.waiting.is_empty() && self.progress().is_ok() && Instant::now() < deadline {
            // Credit comes with what the others send.
            let _ = self.next();
        }
        for session in self.sessions.iter().flatten() {
            let _ = self.node.close(*session);
        }
        while Instant::now() < deadline {
            let _ = self.next();
            match self.node.counters() {
                Ok(counters) if counters.sessions > 0 => {}
                _ => return,
            }
            let left = Deadline::after(Duration::from_millis(1));
            if let Some(receive) = &self.receive {
                let _ = receive.wait(left);
            }
        }
    }
}
