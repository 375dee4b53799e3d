//! The unused ranges, in the order in which they were released.

/// No slot.
const NONE: u32 = u32::MAX;

/// A list through the numbers of slots, made once for all of them.
#[derive(Debug)]
pub(super) struct Idle {
    neighbours: Vec<Neighbours>,
    newest: u32,
    oldest: u32,
}

#[derive(Clone, Copy, Debug)]
struct Neighbours {
    newer: u32,
    older: u32,
}

impl Idle {
    /// An empty list, for slots below `count`.
    pub(super) fn new(count: usize) -> Self {
        Self { neighbours: vec![Neighbours { newer: NONE, older: NONE }; count], newest: NONE, oldest: NONE }
    }

    /// The one that was let go first.
    pub(super) fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    /// A slot was let go just now; it is not in the list.
    pub(super) fn push(&mut self, slot: u32) {
        self.neighbours[slot as usize] = Neighbours { newer: NONE, older: self.newest };
        match self.newest {
            NONE => self.oldest = slot,
            newest => self.neighbours[newest as usize].newer = slot,
        }
        self.newest = slot;
    }

    /// Takes a slot out, which is in the list.
    pub(super) fn remove(&mut self, slot: u32) {
        let Neighbours { newer, older } = self.neighbours[slot as usize];
        match newer {
            NONE => self.newest = older,
            newer => self.neighbours[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.neighbours[older as usize].newer = newer,
        }
    }
}
