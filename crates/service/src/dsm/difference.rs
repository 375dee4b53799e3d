//! What a program has changed in a page since its twin was kept, byte by byte: ranks may write to neighbouring bytes of one page.

use std::collections::HashMap;

use super::Page;
use byway_reactor::seeded::{self, Bug};

const WORD: usize = 8;

/// A difference that does not fit the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// The difference of two pages of one length, a multiple of 8 bytes: a bit for each word that has changed, and then for each of these a mask
/// of its changed bytes, and the bytes. Empty if nothing has changed. docs/wire.md has the map.
fn encode(before: &[u8], after: &[u8]) -> Vec<u8> {
    let (before, after) = (before.as_chunks::<WORD>().0, after.as_chunks::<WORD>().0);
    let mut bytes = vec![0; after.len().div_ceil(8)];
    let changed = |word: usize| before[word] != after[word] || seeded::is(Bug::DsmWholePageSent);
    for word in (0..after.len()).filter(|word| changed(*word)) {
        bytes[word / 8] |= 1 << (word % 8);
        let is_changed = |byte: &usize| before[word][*byte] != after[word][*byte] || seeded::is(Bug::DsmWholePageSent);
        let places = || (0..WORD).filter(is_changed);
        bytes.push(places().fold(0, |mask, byte| mask | 1 << byte));
        bytes.extend(places().map(|byte| after[word][byte]));
    }
    if bytes.iter().all(|byte| *byte == 0) { Vec::new() } else { bytes }
}

/// Puts the changed bytes into a page.
pub(super) fn apply(page: &mut [u8], difference: &[u8]) -> Result<(), Malformed> {
    let words = page.as_chunks_mut::<WORD>().0;
    let (changed, mut rest) = difference.split_at_checked(words.len().div_ceil(8)).ok_or(Malformed)?;
    if (words.len()..changed.len() * 8).any(|word| changed[word / 8] >> (word % 8) & 1 == 1) {
        return Err(Malformed);
    }
    for (_, word) in words.iter_mut().enumerate().filter(|(place, _)| changed[place / 8] >> (place % 8) & 1 == 1) {
        let (mask, bytes) = rest.split_first().ok_or(Malformed)?;
        let (new, left) = bytes.split_at_checked(mask.count_ones() as usize).ok_or(Malformed)?;
        let places = (0..WORD).filter(|byte| mask >> byte & 1 == 1);
        places.zip(new).for_each(|(place, byte)| word[place] = *byte);
        rest = left;
    }
    if rest.is_empty() { Ok(()) } else { Err(Malformed) }
}

/// The twins of a rank: pages as they were before the program's first store. The driver of a [`Machine`](super::Machine) keeps them, as
/// [`Action::Twin`](super::Action::Twin) and its neighbours say.
#[derive(Debug, Default)]
pub struct Twins {
    pages: HashMap<Page, Box<[u8]>>,
}

impl Twins {
    /// Keeps what a page holds.
    pub fn keep(&mut self, page: Page, contents: Box<[u8]>) {
        if seeded::is(Bug::DsmTwinReused) && self.pages.contains_key(&page) {
            return;
        }
        self.pages.insert(page, contents);
    }

    /// What has changed since, as the payload of [`Message::Difference`](super::wire::Message::Difference). The twin is dropped.
    pub fn difference(&mut self, page: Page, contents: &[u8]) -> Vec<u8> {
        let difference = self.pages.get(&page).map(|twin| encode(twin, contents)).unwrap_or_default();
        if !seeded::is(Bug::DsmTwinReused) {
            self.pages.remove(&page);
        }
        difference
    }

    /// Drops a twin.
    pub fn forget(&mut self, page: Page) {
        self.pages.remove(&page);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_bytes_come_over_and_no_others() {
        let before: Vec<u8> = (0..=255).collect();
        let mut mine = before.clone();
        for place in [0, 7, 8, 100, 103, 255] {
            mine[place] ^= 0x55;
        }
        let difference = encode(&before, &mine);
        // 32 words, of which 4 have changed in 6 bytes: the first two, the one of bytes 96 to 103, the last.
        assert_eq!(difference.len(), 4 + 4 + 6);
        let mut theirs = before.clone();
        (theirs[1], theirs[101]) = (99, 98);
        apply(&mut theirs, &difference).unwrap();
        (mine[1], mine[101]) = (99, 98);
        assert_eq!(theirs, mine);
        assert!(encode(&before, &before).is_empty());
    }

    #[test]
    fn the_bytes_are_those_of_the_map() {
        let mut after = [0; 32];
        (after[9], after[15], after[24]) = (1, 2, 3);
        assert_eq!(encode(&[0; 32], &after), [0b1010, 0b1000_0010, 1, 2, 0b1, 3]);
    }

    #[test]
    fn what_is_no_difference_is_refused() {
        let good = encode(&[0; 32], &[7; 32]);
        let refused = |difference: &[u8]| apply(&mut [0; 32], difference) == Err(Malformed);
        assert!((0..good.len()).all(|end| refused(&good[..end])));
        assert!(refused(&[&good[..], &[0]].concat()));
        assert!(refused(&[0x10, 1, 1]), "a word behind the page");
    }
}
