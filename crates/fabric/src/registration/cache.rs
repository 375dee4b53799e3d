//! The cache itself: the registered ranges, their users, and the order of eviction. Pure: no system call, no clock, no lock.
//!
//! It is used under a lock that the thread which reads the kernel's events needs too, and a thread that frees or allocates
//! memory may have to wait until its event is read. So **nothing here allocates or frees after [`Cache::new`]**: all tables
//! have their full length from the start, and a range to deregister moves out as a [`Condemned`], which the caller drops
//! after it has released the lock.
//!
//! A range's life: registering → live (found by look-ups; in use or idle) → perhaps detached (not found any more, still in
//! use) → condemned → closing (being deregistered and no longer watched) → free. Live ranges never overlap.

mod idle;
mod terms;

use std::collections::VecDeque;

pub(super) use self::terms::{Change, Condemned, Plan, Ticket, Uncached};
pub use self::terms::{Counters, Limits};

use self::idle::Idle;
use super::range::PageRange;
use super::seeded::{self, Bug};
use super::suspects::Suspects;
use crate::limits::{REGISTERED_RANGE_BYTES_MAX, REGISTERED_RANGES_MAX, REGISTRATIONS_IN_FLIGHT_MAX};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Registering { spoiled: bool },
    Live { users: u32 },
    Detached { users: u32 },
    Condemned,
    Closing,
}

#[derive(Debug)]
struct Slot<T> {
    state: State,
    generation: u32,
    range: PageRange,
    value: Option<T>,
}

/// See the module. `T` is what a registration is.
#[derive(Debug)]
pub(super) struct Cache<T> {
    limits: Limits,
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    /// The live ranges by address, each with its slot.
    live: Vec<(PageRange, u32)>,
    registering: Vec<u32>,
    closing: Vec<u32>,
    condemned: VecDeque<u32>,
    idle: Idle,
    /// Of live ranges and those being registered.
    bytes: usize,
    suspects: Suspects,
    forks: u32,
    counters: Counters,
}

impl<T: Clone> Cache<T> {
    /// An empty cache, with all the memory that it will ever need.
    pub(super) fn new(limits: Limits) -> Self {
        let limits = Limits { ranges_max: limits.ranges_max.min(REGISTERED_RANGES_MAX), ..limits };
        // As many that are detached or condemned as are live: a program that changes mappings which it still uses in
        // transfers is rare, and finds its ranges registered for one use.
        let count = limits.ranges_max * 2 + REGISTRATIONS_IN_FLIGHT_MAX;
        let nothing = PageRange::covering(0, 1).into_iter().cycle();
        let slots = nothing.take(count).map(|range| Slot { state: State::Free, generation: 0, range, value: None });
        Self {
            limits,
            slots: slots.collect(),
            free: (0..count as u32).rev().collect(),
            live: Vec::with_capacity(limits.ranges_max),
            registering: Vec::with_capacity(REGISTRATIONS_IN_FLIGHT_MAX),
            closing: Vec::with_capacity(count),
            condemned: VecDeque::with_capacity(count),
            idle: Idle::new(count),
            bytes: 0,
            suspects: Suspects::new(),
            forks: 0,
            counters: Counters::default(),
        }
    }

    /// Finds a live range with all of `wanted` in it, and counts its use until [`release`](Self::release).
    pub(super) fn look_up(&mut self, wanted: PageRange) -> Option<(Ticket, T)> {
        if self.forks > 0 {
            return None;
        }
        let slot = self.live_with(wanted)?;
        let entry = &mut self.slots[slot as usize];
        let State::Live { users } = entry.state else { return None };
        entry.state = State::Live { users: users + 1 };
        let found = (Ticket { slot, generation: entry.generation }, entry.value.clone()?);
        if users == 0 {
            self.idle.remove(slot);
            self.counters.in_use += 1;
        }
        self.counters.hits += 1;
        Some(found)
    }

    /// Prepares the registration of a range that [`look_up`](Self::look_up) did not find.
    pub(super) fn begin(&mut self, wanted: PageRange) -> Plan {
        self.counters.misses += 1;
        let range = Some(self.merged(wanted)).filter(|merged| self.obstacle(*merged).is_none());
        self.admit(range.unwrap_or(wanted))
    }

    /// Once more, without what was merged with it.
    pub(super) fn begin_alone(&mut self, wanted: PageRange) -> Plan {
        self.admit(wanted)
    }

    fn admit(&mut self, range: PageRange) -> Plan {
        let ticket = match self.obstacle(range) {
            None => self.reserve(range).ok_or(Uncached::Full),
            Some(reason) => Err(reason),
        };
        match ticket {
            Ok(ticket) => Plan::Register { ticket, range },
            Err(reason) => Plan::Once(reason),
        }
    }

    /// Counts a look-up that must not be answered from here.
    pub(super) fn pass(&mut self, reason: Uncached) -> Plan {
        self.counters.misses += 1;
        Plan::Once(reason)
    }

    fn reserve(&mut self, range: PageRange) -> Option<Ticket> {
        if self.registering.len() == REGISTRATIONS_IN_FLIGHT_MAX || !self.make_room(range.bytes()) {
            return None;
        }
        let slot = self.free.pop()?;
        let entry = &mut self.slots[slot as usize];
        entry.state = State::Registering { spoiled: false };
        entry.range = range;
        self.registering.push(slot);
        self.bytes += range.bytes();
        Some(Ticket { slot, generation: entry.generation })
    }

    fn obstacle(&self, range: PageRange) -> Option<Uncached> {
        if self.forks > 0 {
            Some(Uncached::Forking)
        } else if range.bytes() > self.limits.bytes_max {
            Some(Uncached::TooLong)
        } else if self.is_closing(range) {
            Some(Uncached::Closing)
        } else {
            self.suspects.overlap(range).map(Uncached::Suspect)
        }
    }

    /// The range to register for `wanted`: with the live ranges that it overlaps, since live ranges must not overlap; and
    /// with those beside it that are idle and no longer than it is, so that walking over a buffer registers each page
    /// as often as its length can double, not once for each step.
    fn merged(&self, wanted: PageRange) -> PageRange {
        let overlapping = self.live[self.live_from(wanted)..].iter().take_while(|(range, _)| range.overlaps(wanted));
        let mut merged = overlapping.fold(wanted, |merged, (range, _)| merged.hull(*range));
        let beside = |range: PageRange| range.start() == merged.end() || range.end() == merged.start();
        let joins = |range: PageRange, slot: u32| {
            let is_idle = self.slots[slot as usize].state == State::Live { users: 0 };
            beside(range) && is_idle && range.bytes() <= wanted.bytes()
        };
        let around = self.live_from(merged).saturating_sub(1);
        let neighbours = self.live[around..].iter().take_while(|(range, _)| range.start() <= merged.end());
        merged =
            neighbours.filter(|(range, slot)| joins(*range, *slot)).fold(merged, |hull, (range, _)| hull.hull(*range));
        if merged.bytes() <= REGISTERED_RANGE_BYTES_MAX { merged } else { wanted }
    }

    /// Makes look-ups find what was registered. The value comes back if it must not be found: the address space has
    /// changed meanwhile, or another thread was first. It is then for this use alone.
    pub(super) fn complete(&mut self, ticket: Ticket, value: T) -> Result<(), T> {
        let slot = ticket.slot;
        let range = self.slots[slot as usize].range;
        let State::Registering { spoiled } = self.state_of(ticket) else { return Err(value) };
        self.registering.retain(|other| *other != slot);
        let spoiled = spoiled && !seeded::is(Bug::SpoiledKept);
        if spoiled || self.forks > 0 || self.live_with(range).is_some() || self.live.len() == self.limits.ranges_max {
            self.counters.uncached += 1;
            self.bytes -= range.bytes();
            self.condemn(slot);
            return Err(value);
        }
        self.counters.merges += self.detach_overlapping(range);
        let entry = &mut self.slots[slot as usize];
        entry.value = Some(value);
        entry.state = State::Live { users: 1 };
        self.live.insert(self.live_from(range), (range, slot));
        self.counters.in_use += 1;
        Ok(())
    }

    /// Ends a registration that was not made, of a range that may have been watched already.
    pub(super) fn abandon(&mut self, ticket: Ticket, is_watched: bool) {
        if let State::Registering { .. } = self.state_of(ticket) {
            self.registering.retain(|other| *other != ticket.slot);
            self.bytes -= self.slots[ticket.slot as usize].range.bytes();
            if is_watched {
                self.condemn(ticket.slot);
            } else {
                self.set_free(ticket.slot);
            }
        }
    }

    /// Ends a use. The user must have dropped its value before.
    pub(super) fn release(&mut self, ticket: Ticket) {
        let slot = ticket.slot;
        match self.state_of(ticket) {
            State::Live { users: 1 } => {
                self.slots[slot as usize].state = State::Live { users: 0 };
                self.counters.in_use -= 1;
                self.idle.push(slot);
            }
            State::Live { users } => self.slots[slot as usize].state = State::Live { users: users - 1 },
            State::Detached { users: 1 } => {
                self.counters.detached -= 1;
                self.condemn(slot);
            }
            State::Detached { users } => self.slots[slot as usize].state = State::Detached { users: users - 1 },
            State::Free | State::Registering { .. } | State::Condemned | State::Closing => {}
        }
    }

    /// Takes notice of a change of the address space.
    pub(super) fn change(&mut self, change: Change) {
        match change {
            Change::Unmapped(_) if seeded::is(Bug::UnmapForgotten) => {}
            Change::Remapped { .. } if seeded::is(Bug::RemapForgotten) => {}
            Change::Removed(_) if seeded::is(Bug::RemoveForgotten) => {}
            Change::Unmapped(range) => self.invalidate(range),
            Change::Remapped { from, to } => {
                self.invalidate(from);
                self.invalidate(to);
            }
            Change::Removed(range) => {
                self.invalidate(range);
                self.suspects.add(range);
            }
        }
    }

    fn invalidate(&mut self, range: PageRange) {
        self.counters.invalidations += self.detach_overlapping(range);
        for slot in &self.registering {
            let entry = &mut self.slots[*slot as usize];
            if entry.range.overlaps(range) {
                entry.state = State::Registering { spoiled: true };
            }
        }
    }

    /// Lets no look-up find what there is now, or is being registered.
    pub(super) fn flush(&mut self) {
        while let Some((_, slot)) = self.live.pop() {
            self.detach(slot);
        }
        for slot in &self.registering {
            self.slots[*slot as usize].state = State::Registering { spoiled: true };
        }
    }

    /// Until as many [`fork_ends`](Self::fork_ends), nothing is found and nothing kept.
    pub(super) fn fork_begins(&mut self) {
        self.flush();
        self.forks += 1;
    }

    /// See [`fork_begins`](Self::fork_begins).
    pub(super) fn fork_ends(&mut self) {
        self.forks -= 1;
    }

    /// The number of the latest suspicion.
    pub(super) fn suspicion(&self) -> u64 {
        self.suspects.latest()
    }

    /// Suspicions up to that one are over.
    pub(super) fn lift(&mut self, suspicion: u64) {
        self.suspects.lift(suspicion);
    }

    /// Condemns idle ranges, longest unused first, until `bytes` bytes of them will go or none is idle. Whether any is.
    pub(super) fn evict(&mut self, bytes: usize) -> bool {
        let before = self.bytes;
        while before - self.bytes < bytes && self.evict_oldest() {}
        before != self.bytes
    }

    fn make_room(&mut self, bytes: usize) -> bool {
        let is_over = |cache: &Self| {
            cache.live.len() + cache.registering.len() >= cache.limits.ranges_max
                || cache.bytes + bytes > cache.limits.bytes_max
        };
        while is_over(self) {
            if !self.evict_oldest() {
                return false;
            }
        }
        true
    }

    fn evict_oldest(&mut self) -> bool {
        let Some(slot) = self.idle.oldest() else { return false };
        let at = self.live_from(self.slots[slot as usize].range);
        self.live.remove(at);
        self.detach(slot);
        self.counters.evictions += 1;
        true
    }

    /// The range of the next [`Condemned`].
    pub(super) fn next_condemned(&self) -> Option<PageRange> {
        self.condemned.front().map(|slot| self.slots[*slot as usize].range)
    }

    /// Hands out the next range that must be deregistered; [`closed`](Self::closed) must be told when that is done. `mapping`
    /// is what was watched for it, if that may end as far as other caches are concerned: it ends if this one does not
    /// need it either.
    pub(super) fn pop_condemned(&mut self, mapping: Option<PageRange>) -> Option<Condemned<T>> {
        let slot = self.condemned.pop_front()?;
        let unwatched = mapping.filter(|mapping| !self.watches(*mapping) || seeded::is(Bug::WatchEndedForOthers));
        let entry = &mut self.slots[slot as usize];
        let ticket = Ticket { slot, generation: entry.generation };
        let value = entry.value.take();
        entry.state = State::Closing;
        if let Some(mapping) = unwatched {
            entry.range = mapping;
            self.closing.push(slot);
        }
        Some(Condemned { ticket, value, unwatched })
    }

    /// The range is deregistered and no longer watched.
    pub(super) fn closed(&mut self, ticket: Ticket) {
        if self.state_of(ticket) == State::Closing {
            self.closing.retain(|slot| *slot != ticket.slot);
            self.set_free(ticket.slot);
        }
    }

    /// Whether it needs events about a page of `range`.
    pub(super) fn watches(&self, range: PageRange) -> bool {
        self.live.get(self.live_from(range)).is_some_and(|(live, _)| live.overlaps(range))
            || self.registering.iter().any(|slot| self.slots[*slot as usize].range.overlaps(range))
    }

    /// Whether the watch over a page of `range` is just being taken away.
    pub(super) fn is_closing(&self, range: PageRange) -> bool {
        self.closing.iter().any(|slot| self.slots[*slot as usize].range.overlaps(range))
    }

    /// Whether nothing is registered.
    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    /// Counts a registration for one use.
    pub(super) fn count_uncached(&mut self) {
        self.counters.uncached += 1;
    }

    /// Counts a refusal of the registrar.
    pub(super) fn count_refused(&mut self) {
        self.counters.refused += 1;
    }

    /// What happened, and what there is.
    pub(super) fn counters(&self) -> Counters {
        let bytes = self.live.iter().map(|(range, _)| range.bytes()).sum();
        Counters { ranges: self.live.len(), bytes, ..self.counters }
    }

    /// The index of the first live range that ends after `range` starts.
    fn live_from(&self, range: PageRange) -> usize {
        self.live.partition_point(|(live, _)| live.end() <= range.start())
    }

    fn live_with(&self, range: PageRange) -> Option<u32> {
        self.live.get(self.live_from(range)).filter(|(live, _)| live.contains(range)).map(|(_, slot)| *slot)
    }

    fn state_of(&self, ticket: Ticket) -> State {
        let entry = self.slots.get(ticket.slot as usize).filter(|entry| entry.generation == ticket.generation);
        entry.map_or(State::Free, |entry| entry.state)
    }

    /// Takes all live ranges with a page of `range` out of the look-up; how many.
    fn detach_overlapping(&mut self, range: PageRange) -> u64 {
        let mut detached = 0;
        let at = self.live_from(range);
        while let Some((_, slot)) = self.live.get(at).copied().filter(|(live, _)| live.overlaps(range)) {
            self.live.remove(at);
            self.detach(slot);
            detached += 1;
        }
        detached
    }

    /// What becomes of a range that was just taken from `live`.
    fn detach(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        self.bytes -= entry.range.bytes();
        match entry.state {
            State::Live { users: 0 } => {
                self.idle.remove(slot);
                self.condemn(slot);
            }
            State::Live { users } => {
                entry.state = State::Detached { users };
                self.counters.in_use -= 1;
                self.counters.detached += 1;
            }
            State::Free | State::Registering { .. } | State::Detached { .. } | State::Condemned | State::Closing => {}
        }
    }

    fn condemn(&mut self, slot: u32) {
        self.slots[slot as usize].state = State::Condemned;
        self.condemned.push_back(slot);
    }

    fn set_free(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        entry.state = State::Free;
        entry.generation = entry.generation.wrapping_add(1);
        self.free.push(slot);
    }
}

#[cfg(test)]
mod tests;
