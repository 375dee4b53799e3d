//! Where pages go: a pool of lenders, and a file beside them. The frames lie in a file that helpers map.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use byway_rpc::node::Rpc;
use byway_service::memory::pager::{PAGE_BYTES, PLACES_PER_SLAB, Place};
use byway_service::memory::{Borrower, Keeping, LenderAt, PoolClient, Spill};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

/// See the module.
pub(crate) struct Store {
    pool: PoolClient,
    file: OwnedFd,
}

struct SpillFile(File);

impl Spill for SpillFile {
    fn write(&mut self, place: Place, page: &[u8; PAGE_BYTES]) -> std::io::Result<()> {
        self.0.write_all_at(page, place.file_offset())
    }

    fn read(&mut self, place: Place, page: &mut [u8; PAGE_BYTES]) -> std::io::Result<()> {
        self.0.read_exact_at(page, place.file_offset())
    }
}

/// The file of pages, for [`Keeping`].
pub(crate) fn spill_to(file: File) -> Box<dyn Spill> {
    Box::new(SpillFile(file))
}

impl Store {
    /// A store over these lenders, all of one node, with so many frames for the pager.
    pub(crate) fn new(
        rpc: &Rpc,
        lenders: Vec<(String, Borrower)>,
        keeping: Keeping,
        frames: u32,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let bytes = (frames as usize + keeping.class.frames()) * PAGE_BYTES;
        let file = memfd_create("byway-far", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, bytes as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        let memory = rpc.node().register_file(file.as_fd(), 0..bytes as u64)?;
        let lenders = lenders.into_iter().map(|(name, borrower)| LenderAt::of(name, &borrower)).collect();
        Ok(Self { pool: PoolClient::new(rpc, lenders, keeping, (memory, PLACES_PER_SLAB))?, file })
    }

    /// The file of the frames, for helpers.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(super) fn frames_bytes(&self) -> usize {
        self.pool.frames().len()
    }

    pub(crate) fn pool(&mut self) -> &mut PoolClient {
        &mut self.pool
    }

    /// The page in a frame.
    pub(crate) fn read(&self, frame: u32, page: &mut [u8; PAGE_BYTES]) {
        self.pool.read_frame_into(frame, page);
    }

    /// Writes a page into a frame.
    pub(crate) fn write(&self, frame: u32, page: &[u8; PAGE_BYTES]) {
        let written = self.pool.frames().write(frame as usize * PAGE_BYTES, page);
        debug_assert!(written.is_ok(), "the frame is there");
    }

    /// Gives all slabs back.
    pub(crate) fn close(self) {
        self.pool.close();
    }
}
