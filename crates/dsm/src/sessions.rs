//! A process's sessions with all others of its job.

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use byway_fabric::node::{Deadline, Node, NodeError, Op, Outcome, Session, SubmitError, WaitError};
use byway_service::dsm::Rank;
use byway_service::dsm::wire::{MESSAGE_BYTES, Message};

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
    /// Messages that wait for credit, in order. The protocol bounds them: each rank has one ask for a page under way.
    waiting: VecDeque<(Rank, [u8; MESSAGE_BYTES], Vec<u8>)>,
}

impl Sessions {
    pub(crate) fn new(node: Node, sessions: Vec<Option<Session>>) -> Self {
        let by_session = |(rank, session): (usize, &Option<Session>)| Some(((*session)?, rank as Rank));
        let ranks = sessions.iter().enumerate().filter_map(by_session).collect();
        Self { node, sessions, ranks, receive: None, waiting: VecDeque::new() }
    }

    /// Readable when [`Sessions::next`] has something.
    pub(crate) fn descriptor(&self) -> std::io::Result<BorrowedFd<'_>> {
        self.node.descriptor()
    }

    pub(crate) fn send(&mut self, to: Rank, message: Message, payload: Vec<u8>) {
        let header = message.to_bytes();
        let must_wait = self.waiting.iter().any(|(other, ..)| *other == to);
        if must_wait || !self.try_send(to, &header, &payload) {
            self.waiting.push_back((to, header, payload));
        }
    }

    /// False if it must wait. A rank that has gone is told by [`Sessions::next`].
    fn try_send(&self, to: Rank, header: &[u8], payload: &[u8]) -> bool {
        let Some(session) = self.sessions[usize::from(to)] else { return true };
        !matches!(self.node.send(session, header, payload), Err(SubmitError::Busy))
    }

    /// Sends what waited, and has the node's loop do what there is to do. True if something may have come.
    pub(crate) fn progress(&mut self) -> Result<bool, WaitError> {
        let mut held = Vec::new();
        for (to, header, payload) in std::mem::take(&mut self.waiting) {
            if held.contains(&to) || !self.try_send(to, &header, &payload) {
                held.push(to);
                self.waiting.push_back((to, header, payload));
            }
        }
        self.node.progress()
    }

    /// What came next, if anything is there.
    pub(crate) fn next(&mut self) -> Result<Option<Incoming>, NodeError> {
        loop {
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
                    let Some(rank) = self.ranks.get(&message.session) else { continue };
                    return Ok(Some(match Message::from_bytes(&message.header) {
                        Some(said) => Incoming::Message(*rank, said, message.payload),
                        None => Incoming::Malformed(*rank),
                    }));
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
