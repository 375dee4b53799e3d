//! Calls as programs make them, keep them, hand them on and answer them.

use byway_fabric::node::{Completed, Descriptor, Memory, OpError, Outcome, Rights, Session, SubmitError, Window};
use byway_reactor::Instant;
use byway_rpc::message::Status;
use byway_rpc::node::{Call, Request, Token};

use std::time::Duration;

use super::ledger::{Answer, Ledger};
use super::life::{Life, Pending};
use super::rules::{WORD, broken, pattern, rule, tag_of};

/// Words of each window of a call.
const WORDS: usize = 256;
/// Nodes that a call is sent to at most.
const HOPS_MAX: usize = 5;
/// Calls of a node that have not ended at most.
const CALLS_MAX: usize = 14;
/// The method of calls for which their holders act by chance.
pub const ANY: u16 = 1;
/// The method of those that are kept until they are cancelled or late.
pub const KEPT: u16 = 2;

/// Windows of a call: the first is got from, the second is put into.
pub struct CallWindows {
    windows: [Window; 2],
    memories: [Memory; 2],
    are_for_one_use: bool,
}

/// A call that a node is to answer.
pub struct OpenCall {
    pub session: Session,
    pub number: u64,
    pub hop: usize,
    windows: Vec<Descriptor>,
    pub token: Token,
    /// A put or get of its windows is under way.
    pub is_busy: bool,
    has_put: bool,
}

/// What is written into a call's second window by the node at that hop.
fn put_tag(number: u64, hop: usize) -> u64 {
    number * HOPS_MAX as u64 + hop as u64
}

fn arguments(number: u64, hop: usize) -> Vec<u8> {
    [number.to_le_bytes(), (hop as u64).to_le_bytes()].concat()
}

impl Life {
    /// Calls that have not ended.
    pub fn calls(&self) -> usize {
        self.pending.values().filter(|(_, pending)| matches!(pending, Pending::Call { .. })).count()
    }

    pub fn begin_call(&mut self, ledger: &mut Ledger) {
        let Some((session, _)) = self.pick_session(ledger).filter(|_| self.calls() < CALLS_MAX) else { return };
        let deadline = match ledger.below(3) {
            0 => ledger.now + Duration::from_micros(ledger.below(200_000) as u64),
            _ => Instant::FAR,
        };
        let windows = if ledger.one_in(2) { self.open_windows(ledger, session) } else { None };
        self.begin(ledger, (session, ANY), deadline, windows);
    }

    /// Begins a call; gives its number.
    pub fn begin(
        &mut self,
        ledger: &mut Ledger,
        (session, method): (Session, u16),
        deadline: Instant,
        windows: Option<CallWindows>,
    ) -> Option<u64> {
        let callee = self.peer(ledger, session)?;
        let number = ledger.next_number();
        if let Some(windows) = &windows {
            let bytes = pattern(number, 0, WORDS);
            windows.memories[0].write(0, &bytes).expect("its own range");
        }
        let descriptors: Vec<_> = windows.iter().flat_map(|windows| &windows.windows).map(Window::descriptor).collect();
        let payload = vec![number as u8; ledger.below(300)];
        let arguments = arguments(number, 0);
        let call = Call { method, arguments: &arguments, windows: &descriptors, payload: &payload, ..Call::default() };
        match self.rpc.call_by(session, &call, deadline) {
            Ok(op) => {
                let is_for_one_use = windows.as_ref().is_some_and(|windows| windows.are_for_one_use);
                ledger.begun((self.index, callee), deadline, is_for_one_use);
                self.add(op, Pending::Call { number, windows });
                Some(number)
            }
            Err(SubmitError::Busy | SubmitError::Ended(_) | SubmitError::NoSession) => {
                self.close_windows(windows);
                None
            }
            Err(error) => broken(format!("node {} cannot call: {error}", self.index)),
        }
    }

    /// Windows for the peer of a session, or for the first of all peers.
    fn open_windows(&mut self, ledger: &mut Ledger, session: Session) -> Option<CallWindows> {
        let memories = [(); 2].map(|()| self.window_memory(ledger, WORDS * WORD));
        let for_any = ledger.one_in(3).then(|| self.sessions.keys().copied().collect::<Vec<_>>());
        let open = |memory, rights| match &for_any {
            Some(sessions) => self.node().open_window_for_one_of(sessions, memory, 0..WORDS * WORD, rights),
            None => self.node().open_window(session, memory, 0..WORDS * WORD, rights),
        };
        let windows = [open(&memories[0], Rights::GET).ok()?, open(&memories[1], Rights::PUT).ok()?];
        Some(CallWindows { windows, memories, are_for_one_use: for_any.is_some() })
    }

    fn close_windows(&mut self, windows: Option<CallWindows>) {
        let Some(CallWindows { windows, memories, .. }) = windows else { return };
        for (window, memory) in windows.into_iter().zip(memories) {
            self.close_window(window, memory);
        }
    }

    pub fn cancel_call(&mut self, ledger: &mut Ledger) {
        let calls: Vec<_> =
            self.pending.values().filter_map(|(id, pending)| Some(((*id)?, number_of(pending)?))).collect();
        let place = ledger.below(calls.len());
        if let Some((id, number)) = calls.get(place).copied() {
            ledger.call(number).is_cancelled = true;
            self.node().cancel(id).expect("not in a child");
        }
    }

    /// Cancels the call of that number.
    pub fn cancel_number(&mut self, ledger: &mut Ledger, number: u64) {
        let is_it = |(id, pending): &(_, Pending)| (number_of(pending) == Some(number)).then_some(*id).flatten();
        if let Some(id) = self.pending.values().find_map(is_it) {
            ledger.call(number).is_cancelled = true;
            self.node().cancel(id).expect("not in a child");
        }
    }

    pub fn call_ended(&mut self, ledger: &mut Ledger, number: u64, windows: Option<CallWindows>, result: &Completed) {
        let answer = ledger.ended(self.index, number, result);
        if let Some(windows) = windows.as_ref().filter(|_| answer.is_some_and(|answer| answer.has_put)) {
            let call = ledger.call(number);
            let (hops, is_torn) = (call.hops.len(), call.is_torn);
            let mut bytes = vec![0; WORDS * WORD];
            windows.memories[1].read(0, &mut bytes).expect("its own range");
            for (index, word) in bytes.as_chunks::<WORD>().0.iter().enumerate() {
                let (by, right) = (tag_of(word, index), put_tag(number, hops - 1));
                rule!(
                    is_torn || by == Some(right),
                    "call {number} is answered, and word {index} is of put {by:?}, not {right}"
                );
            }
        }
        self.close_windows(windows);
    }

    /// A call came.
    pub fn called(&mut self, ledger: &mut Ledger, request: Request) {
        let Request { session, method, delegated, arguments, windows, payload, token, .. } = request;
        let (number, hop) = arguments.split_at(8);
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("two words"));
        let (number, hop) = (word(number), word(hop) as usize);
        ledger.arrived(self.index, number, hop, delegated);
        rule!(payload.iter().all(|byte| *byte == number as u8), "call {number} has the payload of another");
        rule!(matches!(method, ANY | KEPT), "call {number} has method {method}");
        let key = self.number();
        self.held.insert(key, OpenCall { session, number, hop, windows, token, is_busy: false, has_put: false });
    }

    /// Does something about a call that it is to answer.
    pub fn serve(&mut self, ledger: &mut Ledger) {
        let free: Vec<u64> = self.held.iter().filter(|(_, held)| !held.is_busy).map(|(key, _)| *key).collect();
        let place = ledger.below(free.len());
        let Some(&key) = free.get(place) else { return };
        match ledger.below(10) {
            0..3 => self.delegate(ledger, key),
            3..5 => self.transfer(ledger, key, false),
            5..7 => self.transfer(ledger, key, true),
            _ => self.answer(ledger, key),
        }
    }

    /// Answers a call.
    pub fn answer(&mut self, ledger: &mut Ledger, key: u64) {
        let Some(OpenCall { number, token, has_put, .. }) = self.held.remove(&key) else { return };
        let payload = if ledger.one_in(10) { 16_000 } else { ledger.below(500) };
        let status = match ledger.below(12) {
            0 => 1 + ledger.below(99) as u16,
            1 => Status::Abandoned as u16,
            _ => 0,
        };
        ledger.answered(number, Answer { by: self.index, status, has_put, payload });
        if status == Status::Abandoned as u16 {
            return drop(token);
        }
        let result = [number.to_le_bytes(), (self.index as u64).to_le_bytes()].concat();
        match token.reply(status, &result, &vec![number as u8; payload]) {
            Ok(()) | Err(SubmitError::Ended(_) | SubmitError::NoSession) => {}
            Err(error) => broken(format!("call {number} cannot be answered: {error}")),
        }
    }

    /// Drops the right to answer a call.
    pub fn abandon(&mut self, ledger: &mut Ledger, key: u64) {
        let Some(OpenCall { number, token, has_put, .. }) = self.held.remove(&key) else { return };
        ledger.answered(number, Answer { by: self.index, status: Status::Abandoned as u16, has_put, payload: 0 });
        drop(token);
    }

    /// Hands a call on to the peer of some session.
    pub fn delegate(&mut self, ledger: &mut Ledger, key: u64) {
        let Some((third, to)) = self.pick_session(ledger) else { return };
        let Some(held) = self.held.get(&key).filter(|held| held.hop + 1 < HOPS_MAX) else { return };
        let (number, hop) = (held.number, held.hop + 1);
        let (arguments, payload) = (arguments(number, hop), vec![number as u8; ledger.below(100)]);
        let call =
            Call { method: ANY, arguments: &arguments, windows: &held.windows, payload: &payload, ..Call::default() };
        match held.token.hand_on(third, &call) {
            Ok(()) => {
                self.held.remove(&key);
                ledger.delegated(self.index, number, to);
            }
            Err(SubmitError::Busy | SubmitError::CallerGone | SubmitError::Ended(_) | SubmitError::NoSession) => {}
            Err(error) => broken(format!("call {number} cannot be delegated: {error}")),
        }
    }

    /// Gets from the first window of a call, or puts into the second.
    fn transfer(&mut self, ledger: &mut Ledger, key: u64, is_put: bool) {
        let Some(held) = self.held.get(&key) else { return };
        let &[source, target] = &held.windows[..] else { return };
        // A node that the call was delegated to reaches the caller over a session of their own, if there is one.
        let caller = ledger.call(held.number).caller;
        let session = if held.hop == 0 {
            held.session
        } else {
            let of_caller = |session: &&Session| self.peer(ledger, **session) == Some(caller);
            let Some(session) = self.sessions.keys().find(of_caller) else { return };
            *session
        };
        let memory = self.node().register(WORDS * WORD).expect("memory");
        let segments = [memory.segment(0..WORDS * WORD)];
        let began = if is_put {
            memory.write(0, &pattern(put_tag(held.number, held.hop), 0, WORDS)).expect("its own range");
            self.node().put(session, &segments, &target, 0)
        } else {
            self.node().get(session, &source, 0, &segments)
        };
        let Ok(op) = began else { return };
        if let Some(held) = self.held.get_mut(&key) {
            held.is_busy = true;
            // What lies there while it is under way is not known.
            held.has_put &= !is_put;
        }
        self.add(op, Pending::Serve { held: key, memory, is_put });
    }

    /// A put or get of the holder of a call has ended.
    pub fn served(&mut self, ledger: &mut Ledger, key: u64, (memory, is_put): (&Memory, bool), result: &Completed) {
        ledger.note(self.index, key);
        let index = self.index;
        rule!(!memory.is_in_use(), "a transfer of node {index} has ended, and uses its memory");
        let is_lost = |held: &OpenCall| !self.sessions.contains_key(&held.session);
        if self.held.get(&key).is_some_and(is_lost) {
            self.abandon(ledger, key);
        }
        if is_put
            && result.is_err()
            && let Some(number) = self.held.get(&key).map(|held| held.number)
        {
            ledger.call(number).is_torn = true;
        }
        let Some(held) = self.held.get_mut(&key) else { return };
        held.is_busy = false;
        let (number, hop) = (held.number, held.hop);
        let call = ledger.call(number);
        // The caller closes a call's windows once it is over, and has opened them for the node that it called.
        let is_open = !call.is_over && hop == 0 && !call.is_for_one_use;
        let is_over = call.is_over;
        match result {
            Ok(Outcome::Done) if is_put => held.has_put = true,
            Ok(Outcome::Done) if !is_over => {
                let mut bytes = vec![0; WORDS * WORD];
                memory.read(0, &mut bytes).expect("its own range");
                for (index, word) in bytes.as_chunks::<WORD>().0.iter().enumerate() {
                    let by = tag_of(word, index);
                    rule!(by == Some(number), "word {index} of the window of call {number} is from {by:?}");
                }
            }
            Err(OpError::Refused(error)) if is_open => {
                broken(format!("the window of call {number} is closed: {error}"))
            }
            Ok(Outcome::Done) | Err(OpError::Refused(_) | OpError::Ended(_)) => {}
            other => broken(format!("a transfer for call {number} ended with {other:?} at hop {hop}")),
        }
    }
}

fn number_of(pending: &Pending) -> Option<u64> {
    match pending {
        Pending::Call { number, .. } => Some(*number),
        _ => None,
    }
}
