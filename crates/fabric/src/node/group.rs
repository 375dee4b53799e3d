//! Groups: bounded queues of completions, shared by threads. Each completion goes to one of the waiting threads.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use rustix::event::{EventfdFlags, eventfd};

use super::error::{SubmitError, WaitError};
use super::op::{Completed, Op, OpId};
use super::shared::Origin;
use super::wait::Parker;
use super::{Deadline, Node};
use crate::limits::GROUP_OPS_MAX;
use crate::slots::{Slot, Slots};

/// What came out of a group.
#[derive(Debug, PartialEq, Eq)]
pub struct GroupCompletion {
    /// What the operation was called when it was added.
    pub context: u64,
    /// How it ended.
    pub result: Completed,
}

/// Completions of the operations that were added to it. Threads share a reference to it. When it is dropped, what becomes of
/// its operations, and of results that were not taken, is what becomes of them when [their handles are dropped](Op).
#[derive(Debug)]
pub struct Group {
    node: Node,
    slot: GroupSlot,
    event: Arc<OnceLock<OwnedFd>>,
}

/// The operation could not be added: the group is as full as it was made, or the result was taken, or it is another node's.
#[derive(Debug, thiserror::Error)]
#[error("the operation cannot be added to the group: {reason}")]
pub struct GroupFull {
    /// Given back.
    pub op: Op,
    /// `Busy`, or why not.
    pub reason: SubmitError,
}

pub(super) struct GroupState {
    queue: VecDeque<(Origin, GroupCompletion)>,
    /// Operations that are in flight or in the queue.
    members: usize,
    capacity: usize,
    waiters: VecDeque<Arc<Parker>>,
    /// The thread that turns the loop waits for the group: it checks after each turn, and needs no other thread for the first
    /// completion.
    is_driven: bool,
    event: Arc<OnceLock<OwnedFd>>,
}

/// What the tables call a group.
pub(super) type GroupSlot = Slot<GroupState>;

/// The groups of a node.
#[derive(Default)]
pub(super) struct Groups(Slots<GroupState>);

impl Groups {
    /// Gives the result back if the group is gone.
    pub(super) fn completed(
        &mut self,
        group: GroupSlot,
        context: u64,
        origin: Origin,
        result: Completed,
    ) -> Option<Completed> {
        let Some(state) = self.0.get_mut(group) else { return Some(result) };
        state.queue.push_back((origin, GroupCompletion { context, result }));
        if !state.is_driven || state.queue.len() > 1 {
            state.wake_one();
        }
        state.signal();
        None
    }

    pub(super) fn take(&mut self, group: GroupSlot) -> Option<GroupCompletion> {
        let state = self.0.get_mut(group)?;
        let (_, completion) = state.queue.pop_front()?;
        state.members -= 1;
        // The thread woken for this one may find none, and no thread may have been woken for the next.
        if !state.queue.is_empty() {
            state.wake_one();
        }
        state.signal();
        Some(completion)
    }

    /// Whether the thread that turns the loop waits for a group. Once it does not, another takes what is there.
    pub(super) fn set_driven(&mut self, group: GroupSlot, is_driven: bool) {
        let Some(state) = self.0.get_mut(group) else { return };
        state.is_driven = is_driven;
        if !is_driven && !state.queue.is_empty() {
            state.wake_one();
        }
    }

    /// Removes a group; returns its completions that were not taken.
    pub(super) fn remove(&mut self, group: GroupSlot) -> impl Iterator<Item = (Origin, Completed)> + use<> {
        let queue = self.0.remove(group).map(|state| state.queue).unwrap_or_default();
        queue.into_iter().map(|(origin, completion)| (origin, completion.result))
    }

    pub(super) fn add_waiter(&mut self, group: GroupSlot, parker: &Arc<Parker>) {
        if let Some(state) = self.0.get_mut(group)
            && !state.waiters.iter().any(|other| Arc::ptr_eq(other, parker))
        {
            state.waiters.push_back(Arc::clone(parker));
        }
    }

    /// A thread stops sleeping. With the same lock it takes a completion, if there is one, and that wakes the next for the next.
    pub(super) fn remove_waiter(&mut self, group: GroupSlot, parker: &Arc<Parker>) {
        let Some(state) = self.0.get_mut(group) else { return };
        state.waiters.retain(|other| !Arc::ptr_eq(other, parker));
    }
}

impl GroupState {
    fn wake_one(&mut self) {
        if let Some(waiter) = self.waiters.pop_front() {
            waiter.wake();
        }
    }

    /// Makes the descriptor say whether something is there.
    fn signal(&self) {
        let Some(event) = self.event.get() else { return };
        if self.queue.is_empty() {
            let mut count = [0; 8];
            let _ = rustix::io::read(event, &mut count);
        } else {
            let _ = rustix::io::write(event, &1u64.to_ne_bytes());
        }
    }
}

impl Group {
    pub(super) fn new(node: &Node, capacity: usize) -> Result<Self, SubmitError> {
        if capacity == 0 || capacity > GROUP_OPS_MAX {
            return Err(SubmitError::TooLong);
        }
        let event = Arc::default();
        let state = GroupState {
            queue: VecDeque::new(),
            members: 0,
            capacity,
            waiters: VecDeque::new(),
            is_driven: false,
            event: Arc::clone(&event),
        };
        let slot = node.inner.lock()?.groups.0.insert(state);
        Ok(Self { node: node.clone(), slot, event })
    }

    /// Adds an operation; `context` is what its completion will be called. If it has ended, the completion is there at once.
    ///
    /// # Errors
    /// The operation: the group holds as many as it was made for, or this is the child of a fork, or the result was taken, or it is another node's.
    pub fn add(&self, op: Op, context: u64) -> Result<OpId, GroupFull> {
        // The handle's end finds that the operation is the group's.
        self.adopt(&op, context).map_err(|reason| GroupFull { op, reason })
    }

    /// As [`Group::add`], with the handle left to the caller: after a success, waiting for it answers `Taken`; after an error it is as
    /// it was.
    ///
    /// # Errors
    /// `Busy`: the group holds as many as it was made for, or the result was taken, or is another group's. `Forked`; `OtherNode`.
    pub fn adopt(&self, op: &Op, context: u64) -> Result<OpId, SubmitError> {
        if op.node.number() != self.node.number() {
            return Err(SubmitError::OtherNode);
        }
        let mut tables = self.node.inner.lock()?;
        let shared = &mut *tables;
        let (slot, id) = (op.slot, op.id());
        let (Some(group), Some(state)) = (self.groups_state(&mut shared.groups), shared.ops.get_mut(slot)) else {
            return Err(SubmitError::Busy);
        };
        if group.members >= group.capacity || state.group.is_some() {
            return Err(SubmitError::Busy);
        }
        group.members += 1;
        state.group = Some((self.slot, context));
        op.release();
        for waiter in state.waiters.drain(..) {
            waiter.wake();
        }
        let (origin, is_driven) = (state.origin, std::mem::take(&mut state.is_driven));
        let result = state.result.take();
        let has_ended = result.is_some();
        if let Some(result) = result {
            shared.ops.remove(slot);
            shared.groups.completed(self.slot, context, origin, result);
        }
        // A waiter of the group or of the operation may be the thread that drives the loop, and sleep there.
        if has_ended || is_driven {
            self.node.inner.nudge(tables);
        }
        Ok(id)
    }

    fn groups_state<'a>(&self, groups: &'a mut Groups) -> Option<&'a mut GroupState> {
        groups.0.get_mut(self.slot)
    }

    /// Waits for a completion. Each goes to one of the threads that wait.
    ///
    /// # Errors
    /// See [`WaitError`].
    pub fn wait(&self, deadline: impl Into<Deadline>) -> Result<GroupCompletion, WaitError> {
        let slot = self.slot;
        self.node.wait_in_group(slot, deadline.into(), move |shared| shared.groups.take(slot))
    }

    /// A completion, if there is one, after a look at what the kernel has.
    ///
    /// # Errors
    /// See [`WaitError`]; `Deadline` if there is none.
    pub fn test(&self) -> Result<GroupCompletion, WaitError> {
        self.wait(Deadline::now())
    }

    /// A descriptor that is readable while there are completions. Operations only end while the node is driven: poll this
    /// descriptor together with [`Node::descriptor`].
    ///
    /// # Errors
    /// The kernel's: no descriptors.
    pub fn descriptor(&self) -> std::io::Result<BorrowedFd<'_>> {
        if self.event.get().is_none() {
            let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            let _ = self.event.set(event);
            if let Ok(mut shared) = self.node.inner.lock()
                && let Some(state) = self.groups_state(&mut shared.groups)
            {
                state.signal();
            }
        }
        self.event.get().map(AsFd::as_fd).ok_or_else(|| std::io::ErrorKind::Other.into())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let Ok(mut shared) = self.node.inner.lock() else { return };
        if shared.end_group(self.slot) {
            self.node.inner.nudge(shared);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::{NodeOptions, Outcome};

    /// A group with two sleepers, and whether each has been woken since it was asked last.
    struct Sleepers {
        node: Node,
        group: Group,
        parkers: [Arc<Parker>; 2],
    }

    impl Sleepers {
        fn new() -> Self {
            let node = Node::open(&NodeOptions::default()).unwrap();
            let sleepers = Self { group: node.group(16).unwrap(), node, parkers: [Arc::default(), Arc::default()] };
            sleepers.sleep();
            sleepers
        }

        fn sleep(&self) {
            let mut shared = self.node.inner.lock().unwrap();
            for parker in &self.parkers {
                shared.groups.add_waiter(self.group.slot, parker);
            }
        }

        fn set_driven(&self, is_driven: bool) {
            self.node.inner.lock().unwrap().groups.set_driven(self.group.slot, is_driven);
        }

        fn complete(&self) {
            let op = self.group.add(self.node.layer_op().unwrap(), 1).unwrap();
            self.node.inner.lock().unwrap().complete(op.0, Ok(Outcome::Done));
        }

        fn take(&self) -> bool {
            self.node.inner.lock().unwrap().groups.take(self.group.slot).is_some()
        }

        fn woken(&self) -> [bool; 2] {
            [0, 1].map(|at: usize| self.parkers[at].take_woken())
        }
    }

    #[test]
    fn a_completion_wakes_nobody_else_where_the_thread_that_turns_the_loop_takes_it() {
        let sleepers = Sleepers::new();
        sleepers.complete();
        assert_eq!(sleepers.woken(), [true, false], "nobody else looks");
        assert!(sleepers.take());
        sleepers.sleep();
        sleepers.set_driven(true);
        sleepers.complete();
        assert_eq!(sleepers.woken(), [false, false]);
        assert!(sleepers.take());
        sleepers.set_driven(false);
        assert_eq!(sleepers.woken(), [false, false]);
    }

    #[test]
    fn a_completion_that_the_thread_which_turns_the_loop_leaves_wakes_another() {
        let sleepers = Sleepers::new();
        sleepers.set_driven(true);
        sleepers.complete();
        sleepers.complete();
        assert_eq!(sleepers.woken().iter().filter(|woken| **woken).count(), 1, "there is more than one thread takes");
        assert!(sleepers.take());
        assert!(sleepers.take());
        sleepers.sleep();
        sleepers.woken();
        // It comes after the last look: with the deadline, say.
        sleepers.complete();
        assert_eq!(sleepers.woken(), [false, false]);
        sleepers.set_driven(false);
        assert_eq!(sleepers.woken().iter().filter(|woken| **woken).count(), 1);
    }
}
