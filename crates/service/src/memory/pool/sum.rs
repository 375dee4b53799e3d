//! By what the bytes of a page are known again.

/// What a page was sealed with (`--encrypt`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seal {
    /// No other page of the pool was sealed with it, nor another version of this one.
    pub nonce: u64,
    /// The authentication tag.
    pub tag: [u8; 16],
}

/// By what the bytes of a page are known again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sum {
    /// CRC-32C.
    Checksum(u32),
    /// They are ciphertext.
    Seal(Seal),
}

/// The sums of a slab's pages, all of one kind: 4 or 24 bytes a page.
#[derive(Debug)]
pub(super) enum Sums {
    Checksums(Box<[u32]>),
    Seals(Box<[Seal]>),
}

impl Sums {
    pub(super) fn new(pages: u32) -> Self {
        Self::Checksums(vec![0; pages as usize].into())
    }

    pub(super) fn get(&self, page: u32) -> Sum {
        match self {
            Self::Checksums(sums) => Sum::Checksum(sums[page as usize]),
            Self::Seals(seals) => Sum::Seal(seals[page as usize]),
        }
    }

    pub(super) fn set(&mut self, page: u32, sum: Sum) {
        match (&mut *self, sum) {
            (Self::Checksums(sums), Sum::Checksum(sum)) => sums[page as usize] = sum,
            (Self::Seals(seals), Sum::Seal(seal)) => seals[page as usize] = seal,
            // The slab's first page.
            (Self::Checksums(sums), Sum::Seal(_)) => {
                *self = Self::Seals(vec![Seal::default(); sums.len()].into());
                self.set(page, sum);
            }
            (Self::Seals(seals), Sum::Checksum(_)) => {
                *self = Self::new(seals.len() as u32);
                self.set(page, sum);
            }
        }
    }
}
