//! What the checker knows of all calls, whichever node has them.

use std::collections::BTreeMap;

use byway_fabric::CloseReason;
use byway_fabric::node::{OpError, Outcome};
use byway_fabric::random::Random;
use byway_reactor::Instant;
use byway_rpc::message::{NodeId, Status};
use byway_rpc::node::Reply;

use super::NODES;
use super::rules::{check_end_of_session, rule};

/// What the programs do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Anything, by chance.
    Busy,
    /// They begin nothing, and answer what they owe.
    Settling,
    /// They begin nothing, and keep the calls that come.
    Keeping,
}

/// Numbers of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub calls: u64,
    pub answered: u64,
    pub cancelled: u64,
    pub overdue: u64,
    /// Calls that ended with their session.
    pub ended: u64,
    /// Calls that ended since the node that they were delegated to was lost.
    pub lost: u64,
    pub delegated: u64,
    /// Answers of third nodes that came through the node that was called.
    pub relayed: u64,
    pub late: u64,
    pub puts: u64,
    pub gets: u64,
    pub messages: u64,
    /// Puts and gets that one end copied into or out of memory that the other has lent.
    pub lent_copies: u64,
    pub sessions_ended: u64,
    pub crashes: u64,
    pub faults: u64,
    /// A hash of all that happened, in its order.
    pub trace: u64,
}

impl Report {
    /// Adds the numbers of another run.
    pub fn add(&mut self, other: &Self) {
        self.calls += other.calls;
        self.answered += other.answered;
        self.cancelled += other.cancelled;
        self.overdue += other.overdue;
        self.ended += other.ended;
        self.lost += other.lost;
        self.delegated += other.delegated;
        self.relayed += other.relayed;
        self.late += other.late;
        self.puts += other.puts;
        self.gets += other.gets;
        self.messages += other.messages;
        self.lent_copies += other.lent_copies;
        self.sessions_ended += other.sessions_ended;
        self.crashes += other.crashes;
        self.faults += other.faults;
        self.trace ^= other.trace;
    }
}

/// How a node has answered a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    pub by: usize,
    pub status: u16,
    /// It has put the call's bytes into the caller's window before.
    pub has_put: bool,
    /// Bytes of payload behind the answer.
    pub payload: usize,
}

/// A call, from its beginning until its caller has its end.
#[derive(Debug)]
pub struct Call {
    pub caller: usize,
    pub deadline: Instant,
    pub is_cancelled: bool,
    /// The nodes that it was sent to, in order: that of its session, then each that it was delegated to.
    pub hops: Vec<usize>,
    /// How many of those have it, or had it.
    pub arrived: usize,
    pub answer: Option<Answer>,
    /// Its caller has its end, or is gone.
    pub is_over: bool,
    /// Its windows are for one use.
    pub is_for_one_use: bool,
    /// A put into its window has failed: what lies there is not known.
    pub is_torn: bool,
}

/// The whole world's calls, and what all programs share.
pub struct Ledger {
    pub random: Random,
    pub now: Instant,
    pub mode: Mode,
    /// There are no faults in this run, and programs close no session.
    pub is_calm: bool,
    /// Of each node, the host that it runs on.
    pub hosts: [usize; NODES],
    pub calls: BTreeMap<u64, Call>,
    /// The nodes' names of now.
    pub names: BTreeMap<NodeId, usize>,
    pub report: Report,
}

impl Ledger {
    pub fn new(seed: u64, is_calm: bool, hosts: [usize; NODES]) -> Self {
        Self {
            random: Random::from_seed(seed),
            now: Instant::ZERO,
            mode: Mode::Busy,
            is_calm,
            hosts,
            calls: BTreeMap::new(),
            names: BTreeMap::new(),
            report: Report::default(),
        }
    }

    /// Whether two nodes share memory.
    pub fn are_on_one_host(&self, a: usize, b: usize) -> bool {
        self.hosts[a] == self.hosts[b]
    }

    /// Whether a node has others on its host.
    pub fn has_neighbours(&self, node: usize) -> bool {
        (0..NODES).any(|other| other != node && self.are_on_one_host(node, other))
    }

    /// 0 to `bound - 1`.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.random.next_u64() % bound.max(1) as u64) as usize
    }

    /// Once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// Folds an event into the run's hash.
    pub fn note(&mut self, node: usize, what: u64) {
        let words = [self.now.nanos(), node as u64, what];
        for word in words {
            self.report.trace = (self.report.trace ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(29);
        }
    }

    /// The number of the next call.
    pub fn next_number(&self) -> u64 {
        self.report.calls + 1
    }

    /// A call goes to `callee`.
    pub fn begun(&mut self, (caller, callee): (usize, usize), deadline: Instant, is_for_one_use: bool) {
        self.report.calls += 1;
        self.note(caller, self.report.calls);
        let call = Call {
            caller,
            deadline,
            is_cancelled: false,
            hops: vec![callee],
            arrived: 0,
            answer: None,
            is_over: false,
            is_for_one_use,
            is_torn: false,
        };
        self.calls.insert(self.report.calls, call);
    }

    pub fn call(&mut self, number: u64) -> &mut Call {
        match self.calls.get_mut(&number) {
            Some(call) => call,
            None => super::rules::broken(format!("call {number} was never begun")),
        }
    }

    /// A program got a call, as its `hop`th node.
    pub fn arrived(&mut self, node: usize, number: u64, hop: usize, is_delegated: bool) {
        self.note(node, number);
        let call = self.call(number);
        let place = call.hops.get(hop).copied();
        rule!(place == Some(node), "call {number} came to node {node} as hop {hop} of {:?}", call.hops);
        rule!(call.arrived == hop, "call {number} came to node {node} as hop {hop}, though it was there before");
        rule!(is_delegated == (hop > 0), "call {number} says wrongly whether it was delegated, at hop {hop}");
        rule!(call.answer.is_none(), "call {number} came to node {node} though {:?} was the answer", call.answer);
        call.arrived += 1;
    }

    /// The program that has a call hands it on.
    pub fn delegated(&mut self, node: usize, number: u64, to: usize) {
        self.note(node, number);
        let call = self.call(number);
        rule!(call.answer.is_none(), "call {number} was delegated after its answer");
        call.hops.push(to);
        self.report.delegated += 1;
    }

    /// The program that has a call answers it.
    pub fn answered(&mut self, number: u64, answer: Answer) {
        self.note(answer.by, number);
        let call = self.call(number);
        rule!(call.answer.is_none(), "call {number} was answered twice, by {:?} and {answer:?}", call.answer);
        call.answer = Some(answer);
    }

    /// A call has ended for its caller. Gives how it was answered, if it was and the caller is told so.
    pub fn ended(&mut self, node: usize, number: u64, result: &Result<Outcome, OpError>) -> Option<Answer> {
        let (now, is_calm) = (self.now, self.is_calm);
        self.note(node, number);
        let call = self.call(number);
        rule!(call.caller == node && !call.is_over, "call {number} ended twice, or at node {node}");
        call.is_over = true;
        let (answer, deadline, is_cancelled) = (call.answer, call.deadline, call.is_cancelled);
        let hops = call.hops.len();
        let report = &mut self.report;
        match result {
            Err(OpError::Deadline) => {
                rule!(now >= deadline, "call {number} is late before its deadline");
                report.overdue += 1;
            }
            Err(OpError::Cancelled) => {
                rule!(is_cancelled, "call {number} was cancelled by nobody");
                report.cancelled += 1;
            }
            Err(OpError::Ended(reason)) => {
                rule!(!is_calm, "call {number} ended with its session in a world without faults: {reason}");
                check_end_of_session(node, *reason);
                report.ended += 1;
            }
            Err(OpError::Status(status)) if *status == Status::DelegateLost as u16 => {
                rule!(hops > 1 && !is_calm, "the node that call {number} was delegated to is lost: {hops} hops");
                report.lost += 1;
            }
            Ok(Outcome::Message(_)) | Err(OpError::Status(_)) => report.answered += 1,
            other => super::rules::broken(format!("call {number} ended with {other:?}")),
        }
        let (status, reply) = match result {
            Ok(outcome) => (0, Reply::of(outcome.clone()).ok()),
            Err(OpError::Status(status)) if *status != Status::DelegateLost as u16 => (*status, None),
            _ => return None,
        };
        let Some(answer) = answer.filter(|answer| answer.status == status) else {
            super::rules::broken(format!("call {number} has status {status}, and its answer is {answer:?}"))
        };
        if let Some(Reply { result, payload, .. }) = reply {
            let right = [number.to_le_bytes(), (answer.by as u64).to_le_bytes()].concat();
            rule!(result == right, "call {number} has the result {result:?}, not {right:?}");
            let is_right = payload.len() == answer.payload && payload.iter().all(|byte| *byte == number as u8);
            rule!(is_right, "call {number} has {} bytes of payload, not {}", payload.len(), answer.payload);
        }
        Some(answer)
    }

    /// A session of a node has ended.
    pub fn session_ended(&mut self, node: usize, reason: CloseReason) {
        self.note(node, 1);
        self.report.sessions_ended += 1;
        check_end_of_session(node, reason);
        let is_calm = self.is_calm && self.mode != Mode::Keeping;
        rule!(!is_calm, "a session of node {node} ended in a world without faults: {reason}");
    }

    /// A node has died, with all calls that it had made.
    pub fn died(&mut self, node: usize) {
        self.calls.values_mut().filter(|call| call.caller == node).for_each(|call| call.is_over = true);
        self.names.retain(|_, other| *other != node);
    }
}
