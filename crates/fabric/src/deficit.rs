//! Fair queuing of several flows that share one resource, by bytes instead of requests.
//!
//! Deficit round robin (Shreedhar and Varghese, "Efficient fair queuing using deficit round robin", 1995) with the debt paid
//! afterwards, because the bytes of a request need not be known beforehand. A flow whose turn it is gets a quantum of
//! credit, is served while it has credit left, and pays the bytes that were really moved. It owes what exceeds its credit,
//! and its next turns pay that debt.
//!
//! Between two flows that always have requests waiting, the bytes served from the start differ by less than one quantum and
//! one request, whatever other flows do; over any later interval by less than twice that. A waiting flow is served after at
//! most as many rounds as its debt has quanta. A turn's cost does not depend on the number of flows: a request of `b` bytes
//! is followed by at most `b / quantum + 1` turns that serve nothing.

use std::collections::VecDeque;

/// What one turn may move, in bytes: the frame of a request that is worth a turn. More would let one flow hold the others
/// up for longer; less would make long requests take more turns that serve nothing (1 MiB takes 16).
pub const QUANTUM_BYTES: u64 = 64 << 10;

/// The least that a request counts as: it costs a message and a frame of its own, even if it moves nothing.
pub const CHARGE_BYTES_MIN: u64 = byway_reactor::limits::FRAME_BYTES_MIN as u64;

#[derive(Debug)]
struct Flow<T> {
    queue: VecDeque<T>,
    /// Bytes that it may have in this turn; under zero what it owes.
    credit: i64,
    /// It has a place in the round.
    listed: bool,
}

impl<T> Default for Flow<T> {
    fn default() -> Self {
        Self { queue: VecDeque::new(), credit: 0, listed: false }
    }
}

/// The queues of flows, which are small numbers (the index of a session's slot). See the module.
#[derive(Debug)]
pub struct Deficit<T> {
    flows: Vec<Flow<T>>,
    /// Flows in the order of their turns; those whose queues are empty meanwhile go when their turn comes.
    round: VecDeque<usize>,
    len: usize,
    quantum: i64,
    /// Turns that served nothing.
    #[cfg(test)]
    idle_turns: usize,
}

impl<T> Default for Deficit<T> {
    fn default() -> Self {
        Self::new(QUANTUM_BYTES)
    }
}

impl<T> Deficit<T> {
    /// Nothing waits; a turn is `quantum` bytes, at least 1.
    pub fn new(quantum: u64) -> Self {
        let quantum = i64::try_from(quantum).unwrap_or(i64::MAX).max(1);
        Self {
            flows: Vec::new(),
            round: VecDeque::new(),
            len: 0,
            quantum,
            #[cfg(test)]
            idle_turns: 0,
        }
    }

    /// Requests that wait.
    pub fn len(&self) -> usize {
        self.len
    }

    /// None?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether a flow has something waiting.
    pub fn waits(&self, flow: usize) -> bool {
        self.flows.get(flow).is_some_and(|flow| !flow.queue.is_empty())
    }

    /// Flows that have a place in the round: no more than so many can be passed over one after the other.
    pub fn flows(&self) -> usize {
        self.round.len()
    }

    /// Puts a request at the end of its flow's queue.
    pub fn push(&mut self, flow: usize, request: T) {
        if self.flows.len() <= flow {
            self.flows.resize_with(flow + 1, Flow::default);
        }
        let state = &mut self.flows[flow];
        state.queue.push_back(request);
        self.len += 1;
        if !std::mem::replace(&mut state.listed, true) {
            self.round.push_back(flow);
        }
    }

    /// The member whose turn it is, and the first request of its queue. It stays the first until it is [taken](Self::take), so a
    /// request that cannot be served now is found here the next time.
    pub fn front(&mut self) -> Option<(usize, &mut T)> {
        let flow = loop {
            let &flow = self.round.front()?;
            let state = &mut self.flows[flow];
            if state.queue.is_empty() {
                // It does not keep what it has not used, but goes on owing.
                state.credit = state.credit.min(0);
                state.listed = false;
                self.round.pop_front();
            } else if state.credit > 0 {
                break flow;
            } else {
                state.credit += self.quantum;
                if state.credit > 0 {
                    break flow;
                }
                #[cfg(test)]
                {
                    self.idle_turns += 1;
                }
                self.round.rotate_left(1);
            }
        };
        Some((flow, self.flows[flow].queue.front_mut()?))
    }

    /// A flow has had so many bytes served, which count as at least [`CHARGE_BYTES_MIN`]. Its turn ends if that was all its
    /// credit.
    pub fn charge(&mut self, flow: usize, bytes: u64) {
        let Some(state) = self.flows.get_mut(flow) else { return };
        state.credit = state.credit.saturating_sub_unsigned(bytes.max(CHARGE_BYTES_MIN));
        if state.credit <= 0 && self.round.front() == Some(&flow) {
            self.round.rotate_left(1);
        }
    }

    /// Takes the first request of a flow's queue.
    pub fn take(&mut self, flow: usize) -> Option<T> {
        let request = self.flows.get_mut(flow)?.queue.pop_front()?;
        self.len -= 1;
        Some(request)
    }

    /// Puts what was taken at the front of its flow's queue again.
    pub fn put_back(&mut self, flow: usize, request: T) {
        if let Some(state) = self.flows.get_mut(flow) {
            state.queue.push_front(request);
            self.len += 1;
        }
    }

    /// The flow whose turn it is must wait for something of its own: the others have theirs first. It keeps its credit.
    pub fn pass_over(&mut self) {
        if !self.round.is_empty() {
            self.round.rotate_left(1);
        }
    }

    /// A flow is gone: gives what it had waiting. Its number may be used again, by a flow without debt.
    pub fn leave(&mut self, flow: usize) -> VecDeque<T> {
        let Some(state) = self.flows.get_mut(flow) else { return VecDeque::new() };
        state.credit = 0;
        let queue = std::mem::take(&mut state.queue);
        self.len -= queue.len();
        queue
    }
}

#[cfg(test)]
mod tests;
