//! Tables of things that are named by a slot and its generation, so that a stale name finds nothing.
//!
//! A name has a type of its own for each kind of thing: the name of a connection is not taken for that of a session. Generations
//! have 24 bits, as much as a [`Token`](byway_reactor::Token) carries.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::marker::PhantomData;

use byway_reactor::Token;

/// What the name of a session is a name of: see [`SessionId`].
#[derive(Debug)]
pub enum SessionKind {}

/// A session of a [`Fabric`](crate::Fabric).
pub type SessionId = Slot<SessionKind>;

/// The name of a `K` in a [`Slots`].
pub struct Slot<K> {
    /// Which entry.
    pub index: u32,
    /// Which user of the entry; 24 bits.
    pub generation: u32,
    kind: PhantomData<fn(K) -> K>,
}

impl<K> Slot<K> {
    /// That user of that entry.
    pub const fn new(index: u32, generation: u32) -> Self {
        Self { index, generation, kind: PhantomData }
    }

    /// The slot in one number; never 0, if it was given out.
    pub const fn to_u64(self) -> u64 {
        (self.generation as u64) << 32 | self.index as u64
    }

    /// The slot of that number.
    pub const fn from_u64(number: u64) -> Self {
        Self::new(number as u32, (number >> 32) as u32)
    }

    /// The slot that a token names: see [`Slot::token`].
    pub fn of_token(token: Token) -> Self {
        Self::new(token.index(), token.generation())
    }

    /// A token that names it.
    pub fn token(self, class: u8, tag: u8) -> Token {
        Token::new(class, tag, self.index, self.generation)
    }
}

impl<K> Clone for Slot<K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K> Copy for Slot<K> {}

impl<K> PartialEq for Slot<K> {
    fn eq(&self, other: &Self) -> bool {
        self.to_u64() == other.to_u64()
    }
}

impl<K> Eq for Slot<K> {}

impl<K> Hash for Slot<K> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.to_u64().hash(state);
    }
}

impl<K> PartialOrd for Slot<K> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<K> Ord for Slot<K> {
    /// By entry, then by its user.
    fn cmp(&self, other: &Self) -> Ordering {
        (self.index, self.generation).cmp(&(other.index, other.generation))
    }
}

impl<K> fmt::Debug for Slot<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}

/// A table of `T`, whose names are those of a `K`.
pub struct Slots<T, K = T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
    kind: PhantomData<fn(K) -> K>,
}

#[derive(Debug)]
struct Entry<T> {
    generation: u32,
    value: Option<T>,
}

impl<T, K> Default for Slots<T, K> {
    fn default() -> Self {
        Self { entries: Vec::new(), free: Vec::new(), kind: PhantomData }
    }
}

impl<T: fmt::Debug, K> fmt::Debug for Slots<T, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl<T, K> Slots<T, K> {
    /// Puts `value` in.
    pub fn insert(&mut self, value: T) -> Slot<K> {
        if let Some(index) = self.free.pop() {
            let entry = &mut self.entries[index as usize];
            entry.value = Some(value);
            return Slot::new(index, entry.generation);
        }
        self.entries.push(Entry { generation: 1, value: Some(value) });
        Slot::new(self.entries.len() as u32 - 1, 1)
    }

    /// What `slot` names.
    pub fn get(&self, slot: Slot<K>) -> Option<&T> {
        self.entries.get(slot.index as usize).filter(|entry| entry.generation == slot.generation)?.value.as_ref()
    }

    /// What `slot` names.
    pub fn get_mut(&mut self, slot: Slot<K>) -> Option<&mut T> {
        self.entries.get_mut(slot.index as usize).filter(|entry| entry.generation == slot.generation)?.value.as_mut()
    }

    /// Takes it out; its name is stale from now on.
    pub fn remove(&mut self, slot: Slot<K>) -> Option<T> {
        let entry = self.entries.get_mut(slot.index as usize).filter(|entry| entry.generation == slot.generation)?;
        let value = entry.value.take()?;
        // Never 0: the name of a slot as a number is not 0 either.
        entry.generation = ((entry.generation + 1) & 0x00ff_ffff).max(1);
        self.free.push(slot.index);
        Some(value)
    }

    /// The free entry with the lowest index is taken next, then the next higher, whatever the order in which they became
    /// free. Generations go on.
    pub fn order_free(&mut self) {
        self.free.sort_unstable_by(|a, b| b.cmp(a));
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// None?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of them, by index, out of the table.
    pub fn into_values(self) -> impl Iterator<Item = T> {
        self.entries.into_iter().filter_map(|entry| entry.value)
    }

    /// All of them, by index.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (Slot<K>, &mut T)> {
        self.entries
            .iter_mut()
            .enumerate()
            .filter_map(|(index, entry)| Some((Slot::new(index as u32, entry.generation), entry.value.as_mut()?)))
    }

    /// All of them, by index.
    pub fn iter(&self) -> impl Iterator<Item = (Slot<K>, &T)> {
        self.entries
            .iter()
            .enumerate()
            .filter_map(|(index, entry)| Some((Slot::new(index as u32, entry.generation), entry.value.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_name_finds_nothing() {
        let mut slots: Slots<char> = Slots::default();
        let first = slots.insert('a');
        assert_eq!(Slot::from_u64(first.to_u64()), first);
        assert_eq!(slots.remove(first), Some('a'));
        let second = slots.insert('b');
        assert_eq!(second.index, first.index);
        assert_eq!(slots.get(first), None);
        assert_eq!(slots.remove(first), None);
        assert_eq!(slots.get(second), Some(&'b'));
        assert_eq!(slots.len(), 1);
    }

    #[test]
    fn no_name_is_zero_however_often_a_slot_is_used() {
        let mut slots: Slots<()> = Slots::default();
        for _ in 0..(1 << 24) + 2 {
            let name = slots.insert(());
            assert!(name.to_u64() != 0 && name.generation < 1 << 24);
            slots.remove(name);
        }
    }

    #[test]
    fn in_order_the_lowest_free_entry_is_taken_first() {
        let mut slots: Slots<i32> = Slots::default();
        let names: Vec<Slot<i32>> = (0..6).map(|value| slots.insert(value)).collect();
        for index in [1, 4, 0, 3] {
            slots.remove(names[index]);
        }
        slots.order_free();
        let taken: Vec<u32> = (0..5).map(|value| slots.insert(value).index).collect();
        assert_eq!(taken, [0, 1, 3, 4, 6]);
        assert!(names.iter().take(2).all(|name| slots.get(*name).is_none()), "generations go on");
    }
}
