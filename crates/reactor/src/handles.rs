//! Tables of handles: a slot and its generation, so that a stale handle is told from a new one in the same slot.

/// A table with stable small indices.
#[derive(Debug)]
pub(crate) struct Table<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Table<T> {
    /// Puts `value` in; gives index and generation.
    pub(crate) fn insert(&mut self, value: T) -> (u32, u32) {
        if let Some(index) = self.free.pop() {
            let slot = &mut self.slots[index as usize];
            slot.value = Some(value);
            return (index, slot.generation);
        }
        self.slots.push(Slot { generation: 1, value: Some(value) });
        (self.slots.len() as u32 - 1, 1)
    }

    pub(crate) fn get(&self, index: u32, generation: u32) -> Option<&T> {
        self.slots.get(index as usize).filter(|slot| slot.generation == generation)?.value.as_ref()
    }

    pub(crate) fn get_mut(&mut self, index: u32, generation: u32) -> Option<&mut T> {
        self.slots.get_mut(index as usize).filter(|slot| slot.generation == generation)?.value.as_mut()
    }

    pub(crate) fn remove(&mut self, index: u32, generation: u32) -> Option<T> {
        let slot = self.slots.get_mut(index as usize).filter(|slot| slot.generation == generation)?;
        let value = slot.value.take()?;
        slot.generation = slot.generation.wrapping_add(1).max(1);
        self.free.push(index);
        Some(value)
    }

    /// The entry at `index` whose generation ends in these 30 bits, with its full generation.
    pub(crate) fn find_by_low_generation(&mut self, index: u32, low: u32) -> Option<(u32, &mut T)> {
        let slot = self.slots.get_mut(index as usize).filter(|slot| slot.generation & 0x3fff_ffff == low)?;
        Some((slot.generation, slot.value.as_mut()?))
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Every entry with its index and generation.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (u32, u32, &mut T)> {
        self.slots
            .iter_mut()
            .enumerate()
            .filter_map(|(index, slot)| Some((index as u32, slot.generation, slot.value.as_mut()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_handle_finds_nothing() {
        let mut table = Table::default();
        let (index, generation) = table.insert('a');
        assert_eq!(table.remove(index, generation), Some('a'));
        let (again, newer) = table.insert('b');
        assert_eq!(again, index);
        assert_eq!(table.get(index, generation), None);
        assert_eq!(table.get(again, newer), Some(&'b'));
        assert_eq!(table.len(), 1);
    }
}
