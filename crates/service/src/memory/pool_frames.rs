//! The frames of a pool's pages, and what of them is on the wire: the frames themselves, or other memory with the same pages sealed.

use byway_fabric::node::Memory;

use super::pager::PAGE_BYTES;
use super::pool::Sum;
use super::sealing::Sealer;

/// Pages by the number of their frame.
pub(super) struct PoolFrames {
    /// As programs have them.
    pages: Memory,
    /// As lenders and the file have them, where that differs.
    sealed: Option<(Memory, Sealer)>,
}

impl PoolFrames {
    /// `sealed` has memory of the same size, which alone is sent.
    pub(super) fn new(pages: Memory, sealed: Option<(Memory, Sealer)>) -> Self {
        Self { pages, sealed }
    }

    /// As programs have them.
    pub(super) fn pages(&self) -> &Memory {
        &self.pages
    }

    /// What puts send, and gets write to.
    pub(super) fn wire(&self) -> &Memory {
        self.sealed.as_ref().map_or(&self.pages, |(wire, _)| wire)
    }

    /// The page in a frame as it is sent.
    pub(super) fn read_wire(&self, frame: u32) -> [u8; PAGE_BYTES] {
        let mut page = [0; PAGE_BYTES];
        read(self.wire(), frame, &mut page);
        page
    }

    pub(super) fn write_wire(&self, frame: u32, page: &[u8; PAGE_BYTES]) {
        write(self.wire(), frame, page);
    }

    /// Makes a page on the wire the exclusive or of others.
    pub(super) fn xor(&self, to: u32, from: &[Option<u32>]) {
        let mut sum = [0; PAGE_BYTES];
        for frame in from.iter().flatten() {
            let page = self.read_wire(*frame);
            for (sum, word) in sum.as_chunks_mut::<8>().0.iter_mut().zip(page.as_chunks::<8>().0) {
                *sum = (u64::from_ne_bytes(*sum) ^ u64::from_ne_bytes(*word)).to_ne_bytes();
            }
        }
        self.write_wire(to, &sum);
    }

    pub(super) fn read(&self, frame: u32, page: &mut [u8; PAGE_BYTES]) {
        read(&self.pages, frame, page);
    }

    /// Makes a program's page ready to be sent.
    pub(super) fn depart(&mut self, frame: u32) -> Sum {
        let mut page = [0; PAGE_BYTES];
        read(&self.pages, frame, &mut page);
        let Some((wire, sealer)) = &mut self.sealed else { return Sum::Checksum(crc32c::crc32c(&page)) };
        let seal = sealer.seal(&mut page);
        write(wire, frame, &page);
        Sum::Seal(seal)
    }

    /// Makes a page that has come a program's, if it is the one that is expected. Gives by what it is known.
    pub(super) fn arrive(&self, frame: u32, expected: Option<Sum>) -> Sum {
        let mut page = self.read_wire(frame);
        if let (Some((_, sealer)), Some(Sum::Seal(seal))) = (&self.sealed, expected)
            && sealer.open(&seal, &mut page)
        {
            write(&self.pages, frame, &page);
            return Sum::Seal(seal);
        }
        Sum::Checksum(crc32c::crc32c(&page))
    }
}

fn read(memory: &Memory, frame: u32, page: &mut [u8; PAGE_BYTES]) {
    let read = memory.read(frame as usize * PAGE_BYTES, page);
    debug_assert!(read.is_ok(), "the frame is there");
}

fn write(memory: &Memory, frame: u32, page: &[u8; PAGE_BYTES]) {
    let written = memory.write(frame as usize * PAGE_BYTES, page);
    debug_assert!(written.is_ok(), "the frame is there, and no operation of it is under way");
}
