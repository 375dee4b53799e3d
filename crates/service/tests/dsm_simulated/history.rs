//! Whether one order of all loads and stores explains what the loads saw.
//!
//! Every value is stored once, so each load names its store. From program order and that follow more edges: a store to the word that
//! comes before a load comes before the store that the load saw, and a store that comes after that one comes after the load. When no
//! more edges follow, a cycle says that no order exists. (The search finds every cycle that these rules imply; what it calls
//! consistent may still have no order, as the problem is NP-complete: Gibbons and Korach 1997.)

use std::collections::HashMap;

/// A load or a store, in the order of its thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    pub thread: usize,
    pub stores: bool,
    pub word: usize,
    pub value: u64,
}

struct Graph {
    /// After each event.
    next: Vec<Vec<usize>>,
    /// All that comes after each event: a bit each.
    after: Vec<Vec<u64>>,
}

impl Graph {
    fn new(count: usize) -> Self {
        Self { next: vec![Vec::new(); count], after: Vec::new() }
    }

    fn comes_before(&self, first: usize, second: usize) -> bool {
        self.after[first][second / 64] >> (second % 64) & 1 == 1
    }

    /// Computes what comes after what. The events of a cycle if there is one.
    fn close(&mut self) -> Result<(), Vec<usize>> {
        let count = self.next.len();
        let mut before = vec![0; count];
        self.next.iter().flatten().for_each(|event| before[*event] += 1);
        let mut order: Vec<usize> = (0..count).filter(|event| before[*event] == 0).collect();
        let mut at = 0;
        while at < order.len() {
            for event in &self.next[order[at]] {
                before[*event] -= 1;
                if before[*event] == 0 {
                    order.push(*event);
                }
            }
            at += 1;
        }
        if order.len() < count {
            return Err((0..count).filter(|event| before[*event] > 0).collect());
        }
        self.after = vec![vec![0; count.div_ceil(64)]; count];
        for event in order.into_iter().rev() {
            let mut after = std::mem::take(&mut self.after[event]);
            for next in &self.next[event] {
                after[next / 64] |= 1 << (next % 64);
                after.iter_mut().zip(&self.after[*next]).for_each(|(all, more)| *all |= more);
            }
            self.after[event] = after;
        }
        Ok(())
    }
}

/// Looks for an order.
///
/// # Errors
/// The events of a cycle.
pub fn check(events: &[Event]) -> Result<(), String> {
    // Each word begins with a store of 0.
    let mut words: Vec<usize> = events.iter().map(|event| event.word).collect();
    words.sort_unstable();
    words.dedup();
    let begin = |word: &usize| Event { thread: usize::MAX, stores: true, word: *word, value: 0 };
    let all: Vec<Event> = words.iter().map(begin).chain(events.iter().copied()).collect();
    let mut graph = Graph::new(all.len());
    let mut last: HashMap<usize, usize> = HashMap::new();
    let mut stores: HashMap<usize, Vec<usize>> = HashMap::new();
    for (place, event) in all.iter().enumerate() {
        if place >= words.len() {
            if let Some(before) = last.insert(event.thread, place) {
                graph.next[before].push(place);
            } else {
                (0..words.len()).for_each(|begin| graph.next[begin].push(place));
            }
        }
        if event.stores {
            stores.entry(event.word).or_default().push(place);
        }
    }
    let mut loads = Vec::new();
    for (place, event) in all.iter().enumerate().filter(|(_, event)| !event.stores) {
        let of_word = &stores[&event.word];
        let seen = of_word.iter().copied().find(|store| all[*store].value == event.value);
        let seen = seen.ok_or_else(|| format!("{event:?} is of no store"))?;
        graph.next[seen].push(place);
        loads.push((place, seen));
    }
    let show = |cycle: Vec<usize>| {
        let some: Vec<Event> = cycle.into_iter().take(8).map(|event| all[event]).collect();
        format!("{some:?}")
    };
    loop {
        graph.close().map_err(show)?;
        let mut more = Vec::new();
        for (load, seen) in &loads {
            for other in stores[&all[*load].word].iter().filter(|other| *other != seen) {
                if graph.comes_before(*other, *load) && !graph.comes_before(*other, *seen) {
                    more.push((*other, *seen));
                }
                if graph.comes_before(*seen, *other) && !graph.comes_before(*load, *other) {
                    more.push((*load, *other));
                }
            }
        }
        if more.is_empty() {
            return Ok(());
        }
        for (first, second) in more {
            graph.next[first].push(second);
        }
    }
}
