//! How many NBD connections and sessions each loop has: the loop that accepts a connection hands it to the one with the fewest.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The loops of a node.
#[derive(Debug)]
pub struct Loads(Vec<Load>);

#[derive(Debug, Default)]
struct Load {
    /// As many as the loop had at the end of its last turn.
    here: AtomicUsize,
    /// Placed on the loop and not counted there yet.
    coming: AtomicUsize,
}

impl Loads {
    pub fn new(loops: usize) -> Self {
        Self((0..loops).map(|_| Load::default()).collect())
    }

    /// Places a connection on the loop with the fewest. It counts there from now on, though the loop has yet to take it: many
    /// may be placed before the loop's next turn.
    pub fn place(&self) -> usize {
        let count = |load: &Load| load.here.load(Ordering::Relaxed) + load.coming.load(Ordering::Relaxed);
        let least = self.0.iter().enumerate().min_by_key(|(_, load)| count(load)).map_or(0, |(index, _)| index);
        self.0[least].coming.fetch_add(1, Ordering::Relaxed);
        least
    }

    /// A connection that was placed on a loop is taken: there, or by the loop that accepted it where it could not be handed on.
    pub fn take(&self, place: usize) {
        let Load { here, coming } = &self.0[place];
        here.fetch_add(1, Ordering::Relaxed);
        coming.fetch_sub(1, Ordering::Relaxed);
    }

    /// A loop has so many at the end of a turn, with those that it took in it.
    pub fn note(&self, index: usize, here: usize) {
        self.0[index].here.store(here, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_of_connections_is_spread_evenly_whenever_the_loops_count_theirs() {
        let loads = Loads::new(4);
        let mut placed = [0; 4];
        for _ in 0..32 {
            // Turns in which the loops take none of those that are on their way.
            for index in 0..4 {
                loads.note(index, 0);
            }
            placed[loads.place()] += 1;
        }
        assert_eq!(placed, [8; 4]);
        for _ in 0..8 {
            loads.take(2);
        }
        loads.note(2, 7);
        assert_eq!(loads.place(), 2, "one of its clients has left");
    }
}
