//! Pages sealed before they leave the process: lenders and the file get ciphertext.
//!
//! AES-256-GCM with a random key that is never stored or sent. The nonce is a counter, so that no two versions of any place have the
//! same. The tag stays with the borrower, in the place of a checksum: a lender cannot give back an older version of a page, or
//! another page.

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};

use super::pager::PAGE_BYTES;
use super::pool::Seal;

/// Seals and opens pages. Its key goes with it.
pub(super) struct Sealer {
    key: LessSafeKey,
    /// Pages sealed so far.
    count: u64,
}

impl Sealer {
    /// With a new key; `None` if the kernel gives no random bytes.
    pub(super) fn new() -> Option<Self> {
        let mut bytes = [0; 32];
        SystemRandom::new().fill(&mut bytes).ok()?;
        let key = UnboundKey::new(&AES_256_GCM, &bytes).ok()?;
        Some(Self { key: LessSafeKey::new(key), count: 0 })
    }

    /// Encrypts a page in its place.
    pub(super) fn seal(&mut self, page: &mut [u8; PAGE_BYTES]) -> Seal {
        self.count += 1;
        let tag = self.key.seal_in_place_separate_tag(nonce(self.count), Aad::empty(), page);
        let tag = tag.expect("a page is shorter than what AES-GCM can seal");
        Seal { nonce: self.count, tag: tag.as_ref().try_into().expect("AES-GCM has tags of 16 bytes") }
    }

    /// Decrypts a page in its place; false, and the bytes are of no use, if they are not those of that seal.
    pub(super) fn open(&self, seal: &Seal, page: &mut [u8; PAGE_BYTES]) -> bool {
        let opened = self.key.open_in_place_separate_tag(nonce(seal.nonce), Aad::empty(), seal.tag.into(), page, 0..);
        opened.is_ok()
    }
}

fn nonce(count: u64) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes[NONCE_LEN - 8..].copy_from_slice(&count.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_opens_with_its_own_seal_alone_and_a_flipped_bit_is_noticed() {
        let mut sealer = Sealer::new().unwrap();
        let (mut first, mut second) = ([7; PAGE_BYTES], [7; PAGE_BYTES]);
        let (older, newer) = (sealer.seal(&mut first), sealer.seal(&mut second));
        assert!(first != second && !first.windows(4).any(|bytes| bytes == [7; 4]));
        assert!(!sealer.open(&newer, &mut first.clone()), "an older version is not taken");
        for bit in [0, 1, PAGE_BYTES * 8 - 1] {
            let mut flipped = first;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(!sealer.open(&older, &mut flipped), "bit {bit}");
        }
        assert!(!Sealer::new().unwrap().open(&older, &mut first.clone()), "another key");
        assert!(sealer.open(&older, &mut first) && first == [7; PAGE_BYTES]);
    }
}
