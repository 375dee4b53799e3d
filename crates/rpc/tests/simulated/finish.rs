//! The end of a run: without faults everything ends, all credit is back, and when the sessions are closed nothing is left.

use std::time::Duration;

use byway_fabric::node::Session;
use byway_reactor::Instant;
use byway_reactor::sim::FaultPlan;

use super::calls::KEPT;
use super::ledger::{Mode, Report};
use super::life::{GRANT_CALLS, GRANT_MESSAGES, Life, Pending, ip};
use super::rules::{broken, rule};
use super::{NODES, STALL_MAX, Simulation};

/// Until everything has ended once the faults have.
const ENDS_WITHIN: Duration = Duration::from_secs(30);
const TOLD_WITHIN: Duration = Duration::from_secs(1);
/// Until a message over an idle link has come.
const MESSAGE_TIME_MAX: Duration = Duration::from_millis(5);

impl Simulation {
    pub(super) fn finish(&mut self) -> Report {
        self.world.faults(FaultPlan::default());
        let faults = self.world.fault_count().total();
        self.heal_all();
        self.ledger.mode = Mode::Settling;
        self.settle("the last fault");
        self.check_credit();
        self.check_cancel();
        self.settle("the calls that were cancelled");
        self.check_deadline();
        self.settle("the last call");
        self.check_contents();
        self.end();
        self.ledger.report.faults = faults;
        self.ledger.report.lent_copies = self.world.lent_copies();
        self.ledger.report
    }

    fn heal_all(&self) {
        for node in 0..NODES {
            (0..node).for_each(|other| self.world.heal(ip(node), ip(other)));
        }
    }

    fn partition_all(&self) {
        for node in 0..NODES {
            (0..node).for_each(|other| self.world.partition(ip(node), ip(other)));
        }
    }

    fn until(&mut self, what: &str, limit: Duration, mut is_so: impl FnMut(&mut Self) -> bool) {
        let until = self.world.now() + limit;
        while !is_so(self) {
            if self.world.now() >= until {
                let left: Vec<_> = self.nodes.iter().flatten().map(Life::under_way).collect();
                broken(format!("{} s pass, and not {what}; under way are {left:?}", limit.as_secs()));
            }
            self.pass(Duration::from_millis(10));
            self.check_deadlines();
        }
    }

    /// Everything that was begun ends, all are connected, and all messages over the sessions that are up have come. This holds for
    /// longer than a stall lasts: a call whose caller has given up may still be behind one.
    fn settle(&mut self, after: &str) {
        let mut quiet_until = None;
        self.until(&format!("everything has ended after {after}"), ENDS_WITHIN, |run| {
            let mut has_ended = true;
            for life in run.nodes.iter_mut().flatten() {
                life.reconnect(&run.ledger);
                life.receive();
                let held: Vec<u64> = life.held.iter().filter(|(_, held)| !held.is_busy).map(|(key, _)| *key).collect();
                for key in held {
                    life.answer(&mut run.ledger, key);
                }
                life.turn(&run.world, &mut run.ledger);
                has_ended &= life.is_idle() && life.is_connected(&run.ledger);
            }
            let (sent, received) = run.messages();
            quiet_until = quiet_until.filter(|_| has_ended && sent == received);
            run.world.now() >= *quiet_until.get_or_insert(run.world.now() + STALL_MAX + MESSAGE_TIME_MAX)
        });
    }

    /// Messages sent and received over all sessions that are up.
    fn messages(&self) -> (u64, u64) {
        let of = |life: &Life| life.sessions.keys().map(|session| life.messages(*session)).collect::<Vec<_>>();
        let all = self.nodes.iter().flatten().flat_map(of);
        all.fold((0, 0), |(sent, received), (more_sent, more_received)| (sent + more_sent, received + more_received))
    }

    fn sessions(&self) -> Vec<(usize, Session)> {
        let of = |life: &Life| life.sessions.keys().map(|session| (life.index, *session)).collect::<Vec<_>>();
        self.nodes.iter().flatten().flat_map(of).collect()
    }

    fn life(&mut self, node: usize) -> (&mut Life, &mut super::Ledger) {
        let Some(life) = self.nodes[node].as_mut() else { broken(format!("node {node} is gone")) };
        (life, &mut self.ledger)
    }

    /// Over each session so many calls and messages can be under way as were granted: none of them are lost.
    fn check_credit(&mut self) {
        self.ledger.mode = Mode::Keeping;
        let sessions = self.sessions();
        for (node, session) in &sessions {
            for _ in 0..GRANT_CALLS {
                let (life, ledger) = self.life(*node);
                let begun = life.begin(ledger, (*session, KEPT), Instant::FAR, None);
                rule!(begun.is_some(), "node {node} cannot call over a session that is up");
            }
            for _ in 0..2 * GRANT_MESSAGES {
                let (life, ledger) = self.life(*node);
                life.say_to(ledger, *session);
            }
        }
        let all = sessions.len() * usize::from(GRANT_CALLS);
        self.until("all credit for calls is back", TOLD_WITHIN, |run| {
            run.nodes.iter().flatten().map(|life| life.held.len()).sum::<usize>() == all
        });
        self.ledger.mode = Mode::Settling;
        self.settle("calls by all credit");
    }

    /// A node that keeps a call learns that it is cancelled, also if the call was delegated to it.
    fn check_cancel(&mut self) {
        let calls = self.keep_calls(Instant::FAR);
        for (node, number) in calls {
            let (life, ledger) = self.life(node);
            life.cancel_number(ledger, number);
        }
        self.until("all who keep a call know that it is cancelled", TOLD_WITHIN, Self::are_all_cancelled);
        self.ledger.mode = Mode::Settling;
    }

    /// It also knows when the call is late, without a word of the caller.
    fn check_deadline(&mut self) {
        let deadline = self.world.now() + Duration::from_millis(30);
        self.keep_calls(deadline);
        self.partition_all();
        // On the way a deadline is a number of milliseconds.
        self.pass(deadline.since(self.world.now()) + 2 * MESSAGE_TIME_MAX);
        rule!(self.are_all_cancelled(), "a node keeps a call without knowing that it is late");
        self.heal_all();
        self.ledger.mode = Mode::Settling;
    }

    /// Begins a call over each session, and has its callee delegate it if there is credit, and keep it else. Gives the callers and the
    /// numbers.
    fn keep_calls(&mut self, deadline: Instant) -> Vec<(usize, u64)> {
        self.ledger.mode = Mode::Keeping;
        let mut calls = Vec::new();
        for (node, session) in self.sessions() {
            let (life, ledger) = self.life(node);
            let number = life.begin(ledger, (session, KEPT), deadline, None);
            calls.extend(number.map(|number| (node, number)));
        }
        self.pass(MESSAGE_TIME_MAX);
        for life in self.nodes.iter_mut().flatten() {
            let held: Vec<u64> = life.held.keys().copied().collect();
            for key in held {
                life.delegate(&mut self.ledger, key);
            }
        }
        self.pass(MESSAGE_TIME_MAX);
        calls
    }

    fn are_all_cancelled(&mut self) -> bool {
        let mut held = self.nodes.iter().flatten().flat_map(|life| life.held.values());
        held.all(|held| held.token.is_cancelled()) && self.nodes.iter().flatten().all(|life| life.calls() == 0)
    }

    /// What was put lies where it belongs.
    fn check_contents(&mut self) {
        for (node, session) in self.sessions() {
            let Some(life) = &self.nodes[node] else { continue };
            for owner in self.nodes.iter().flatten() {
                life.check_blocks(session, owner);
            }
        }
        self.nodes.iter_mut().flatten().for_each(Life::check_closed);
    }

    /// All sessions are closed; nothing is left of them.
    fn end(&mut self) {
        self.ledger.mode = Mode::Keeping;
        for life in self.nodes.iter_mut().flatten() {
            life.close_everything(&mut self.ledger);
        }
        self.until("all that nodes have is free", ENDS_WITHIN, |run| {
            for life in run.nodes.iter_mut().flatten() {
                life.turn(&run.world, &mut run.ledger);
            }
            run.nodes.iter().flatten().all(Life::has_nothing)
        });
        for node in 0..NODES {
            let Some(life) = self.nodes[node].take() else { continue };
            self.count_calls(&life);
        }
    }
}

impl Life {
    /// Whether nothing is under way but what waits for others.
    fn is_idle(&self) -> bool {
        let waits = |pending: &Pending| matches!(pending, Pending::Accept | Pending::Receive);
        self.held.is_empty() && self.pending.values().all(|(_, pending)| waits(pending))
    }

    /// What is under way.
    fn under_way(&self) -> Vec<String> {
        let pending = self.pending.values().map(|(_, pending)| pending.name());
        let held = self.held.values().map(|held| format!("call {} to answer", held.number));
        let sessions = self.sessions.iter().map(|(session, peer)| {
            format!("{session:?}: {peer:?}, {:?}", self.rpc.node_of(*session).map(|name| name[0]))
        });
        let held = held.chain(sessions);
        let counters = self.node().counters().map(|counters| format!("{counters:?}"));
        let calls = self.rpc.counters().map(|counters| format!("{counters:?}"));
        pending.chain(held).chain(counters).chain(calls).collect()
    }

    /// Closes sessions and windows, and ends what waits.
    fn close_everything(&mut self, ledger: &mut super::Ledger) {
        let sessions: Vec<Session> = self.sessions.keys().copied().collect();
        for session in sessions {
            self.node().close(session).expect("not in a child");
            self.forget(ledger, session);
        }
        for (id, pending) in self.pending.values() {
            if let (Some(id), Pending::Accept | Pending::Receive) = (id, pending) {
                self.node().cancel(*id).expect("not in a child");
            }
        }
        self.is_ending = true;
    }

    /// Whether the node has let go of everything.
    fn has_nothing(&self) -> bool {
        let (Ok(node), Ok(rpc)) = (self.node().counters(), self.rpc.counters()) else { return false };
        let is_free = node.windows == 0 && node.ops == 0 && node.sessions == 0 && node.loans == 0;
        is_free && node.frame_bytes == self.frame_bytes_idle && rpc.calls == 0 && self.pending.is_empty()
    }
}
