//! Parts of a page table by their number. Nearly every look-up is in the part of the one before.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::RangeBounds;

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Chunks<T> {
    /// Where each lies in `all`.
    by_number: BTreeMap<u64, usize>,
    all: Vec<Option<Box<T>>>,
    free: Vec<usize>,
    /// The one that was looked at last: its number, and where it lies.
    last: Cell<Option<(u64, usize)>>,
}

impl<T> Default for Chunks<T> {
    fn default() -> Self {
        Self { by_number: BTreeMap::new(), all: Vec::new(), free: Vec::new(), last: Cell::new(None) }
    }
}

impl<T> Chunks<T> {
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.by_number.len()
    }

    fn find(&self, number: u64) -> Option<usize> {
        if let Some((last, at)) = self.last.get()
            && last == number
        {
            return Some(at);
        }
        let at = *self.by_number.get(&number)?;
        self.last.set(Some((number, at)));
        Some(at)
    }

    pub(super) fn get(&self, number: u64) -> Option<&T> {
        self.all[self.find(number)?].as_deref()
    }

    pub(super) fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        let at = self.find(number)?;
        self.all[at].as_deref_mut()
    }

    /// One of that number, which is made where there is none.
    pub(super) fn get_or_insert(&mut self, number: u64, new: impl FnOnce() -> Box<T>) -> &mut T {
        let at = self.find(number).unwrap_or_else(|| {
            let at = self.free.pop().unwrap_or_else(|| {
                self.all.push(None);
                self.all.len() - 1
            });
            self.by_number.insert(number, at);
            at
        });
        self.all[at].get_or_insert_with(new)
    }

    pub(super) fn remove(&mut self, number: u64) {
        self.last.set(None);
        if let Some(at) = self.by_number.remove(&number) {
            self.all[at] = None;
            self.free.push(at);
        }
    }

    /// In the order of their numbers.
    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = (u64, &T)> + Clone {
        self.by_number.iter().filter_map(|(number, at)| Some((*number, self.all[*at].as_deref()?)))
    }

    /// In any order.
    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.all.iter_mut().flatten().map(|chunk| &mut **chunk)
    }

    /// The numbers of those in a range, in order.
    pub(super) fn numbers(&self, range: impl RangeBounds<u64>) -> Vec<u64> {
        self.by_number.range(range).map(|(number, _)| *number).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Choices;
    use super::*;

    #[test]
    fn the_chunk_that_was_looked_at_last_is_forgotten_when_it_goes() {
        let mut chunks = Chunks::<u8>::default();
        for number in [7, 1 << 40, 3] {
            *chunks.get_or_insert(number, || Box::new(0)) += number as u8 + 1;
        }
        assert_eq!((chunks.get(3), chunks.get(1 << 40), chunks.get(2)), (Some(&4), Some(&1), None));
        assert_eq!(chunks.get(7), Some(&8));
        chunks.remove(7);
        assert_eq!(chunks.get(7), None);
        assert_eq!(*chunks.get_or_insert(9, || Box::new(1)), 1, "in its room");
        assert_eq!((chunks.get(7), chunks.numbers(4..)), (None, vec![9, 1 << 40]));
        assert_eq!(
            chunks.iter().map(|(number, chunk)| (number, *chunk)).collect::<Vec<_>>(),
            [(3, 4), (9, 1), (1 << 40, 1)]
        );
    }

    /// A table, and what is in it.
    #[derive(Clone, Default)]
    struct Checked {
        chunks: Chunks<u64>,
        model: BTreeMap<u64, u64>,
    }

    impl Checked {
        fn change(&mut self, number: u64, value: u64, choices: &mut Choices) {
            match choices.below(3) {
                0 => {
                    self.chunks.remove(number);
                    self.model.remove(&number);
                }
                1 => {
                    let there = *self.chunks.get_or_insert(number, || Box::new(value));
                    assert_eq!(there, *self.model.entry(number).or_insert(value), "chunk {number}");
                }
                _ => {
                    assert_eq!(self.chunks.get_mut(number), self.model.get_mut(&number), "chunk {number}");
                    self.chunks.get_mut(number).into_iter().for_each(|chunk| *chunk = value);
                    self.model.entry(number).and_modify(|chunk| *chunk = value);
                }
            }
        }
    }

    #[test]
    fn a_look_up_finds_what_the_table_has_now_whatever_it_or_a_copy_has_looked_at() {
        for seed in 0..20 {
            let (mut choices, mut tables) = (Choices(seed), [(); 3].map(|()| Checked::default()));
            for step in 0..2000 {
                let [one, other] = [(); 2].map(|()| choices.below(3) as usize);
                if choices.below(16) == 0 {
                    tables[one] = tables[other].clone();
                }
                let number = choices.below(5);
                tables[one].change(number, step, &mut choices);
                for Checked { chunks, model } in &tables {
                    let number = choices.below(5);
                    assert_eq!(chunks.get(number), model.get(&number), "seed {seed}, step {step}, chunk {number}");
                }
            }
            for Checked { chunks, model } in &tables {
                assert!(chunks.iter().eq(model.iter().map(|(number, chunk)| (*number, chunk))), "seed {seed}");
            }
        }
    }
}
