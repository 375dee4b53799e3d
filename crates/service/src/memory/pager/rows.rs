//! The free places of a slab: in the order in which they are taken, or by rows (`--class parity=4+1`).

use std::collections::BTreeSet;

/// Free places of a slab.
#[derive(Debug)]
pub(super) enum FreePlaces {
    /// The last is taken first.
    Each(Vec<u32>),
    Rows(FreeRows),
}

/// Places in rows. One row is taken from until it is full; the next is the one with the most free places.
#[derive(Debug)]
pub(super) struct FreeRows {
    places: u32,
    /// Of each row, a bit for each free place.
    masks: Box<[u8]>,
    /// Rows with free places, by how many are taken; without the current one.
    rows: BTreeSet<(u32, u32)>,
    current: Option<u32>,
    free: usize,
}

impl Default for FreePlaces {
    fn default() -> Self {
        Self::Each(Vec::new())
    }
}

impl FreePlaces {
    /// So many places, all free, in rows of at most 8.
    pub(super) fn new(count: u32, row: u32) -> Self {
        if row == 1 {
            return Self::Each((0..count).rev().collect());
        }
        let rows = count / row;
        Self::Rows(FreeRows {
            places: row,
            masks: vec![((1u16 << row) - 1) as u8; rows as usize].into(),
            rows: (0..rows).map(|number| (0, number)).collect(),
            current: None,
            free: (rows * row) as usize,
        })
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Each(places) => places.len(),
            Self::Rows(rows) => rows.free,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the next place is one of a row that is filled from its beginning.
    pub(super) fn has_whole(&self) -> bool {
        match self {
            Self::Each(places) => !places.is_empty(),
            Self::Rows(rows) => rows.current.is_some() || rows.rows.first().is_some_and(|(taken, _)| *taken == 0),
        }
    }

    pub(super) fn take(&mut self) -> Option<u32> {
        match self {
            Self::Each(places) => places.pop(),
            Self::Rows(rows) => rows.take(),
        }
    }

    pub(super) fn add(&mut self, place: u32) {
        match self {
            Self::Each(places) => places.push(place),
            Self::Rows(rows) => rows.add(place),
        }
    }
}

impl FreeRows {
    fn take(&mut self) -> Option<u32> {
        let row = match self.current {
            Some(row) => row,
            None => self.rows.pop_first()?.1,
        };
        let mask = &mut self.masks[row as usize];
        let at = mask.trailing_zeros();
        *mask &= *mask - 1;
        self.current = (*mask != 0).then_some(row);
        self.free -= 1;
        Some(row * self.places + at)
    }

    fn add(&mut self, place: u32) {
        let (row, bit) = (place / self.places, 1 << (place % self.places));
        let taken = self.places - self.masks[row as usize].count_ones();
        self.masks[row as usize] |= bit;
        self.free += 1;
        if self.current != Some(row) {
            self.rows.remove(&(taken, row));
            self.rows.insert((taken - 1, row));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_rows_are_taken_first_and_the_row_in_hand_is_filled() {
        let mut places = FreePlaces::new(12, 4);
        let mut take = |count: usize| (0..count).map_while(|_| places.take()).collect::<Vec<_>>();
        assert_eq!(take(9), [0, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(take(4), [9, 10, 11]);
        assert!(places.is_empty() && !places.has_whole());
        for place in [6, 1, 3, 0, 8, 9, 11, 10] {
            places.add(place);
        }
        assert!(places.has_whole() && places.len() == 8);
        let taken: Vec<u32> = std::iter::from_fn(|| places.take()).collect();
        assert_eq!(taken, [8, 9, 10, 11, 0, 1, 3, 6], "the whole row, then the one with three");
    }
}
