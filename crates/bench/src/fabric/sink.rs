//! The server's work for each block: it checks the block and stores it.
//!
//! The receive frame is occupied meanwhile. The block is copied into a file, as a storage server does. The file lies in memory,
//! so the figures do not depend on a disk, and blocks are appended in order of arrival, so a copy costs the same with few and
//! many clients.

use std::cell::Cell;
use std::fs::File;
use std::io::Result;
use std::os::unix::fs::FileExt;

use super::part::Store;
use super::pattern;

/// Bytes of the file; then it begins anew. More than a core's cache has.
const FILE_BYTES: u64 = 64 << 20;

/// See the module.
pub(super) struct Sink {
    /// Blocks that each client writes in turn.
    blocks_each: u64,
    file: Option<File>,
    next: Cell<u64>,
}

impl Sink {
    pub(super) fn open(store: Store, blocks_each: usize) -> Result<Self> {
        let file = match store {
            Store::None => None,
            Store::File => {
                let file = File::from(rustix::fs::memfd_create("byway-bench", rustix::fs::MemfdFlags::CLOEXEC)?);
                // Its pages are made before it counts.
                let megabyte = vec![0; 1 << 20];
                (0..FILE_BYTES).step_by(megabyte.len()).try_for_each(|at| file.write_all_at(&megabyte, at))?;
                Some(file)
            }
        };
        Ok(Self { blocks_each: blocks_each as u64, file, next: Cell::new(0) })
    }

    /// Takes a block; false if it is not what its client wrote.
    pub(super) fn take(&self, block: &[u8], client: u64, sequence: u64) -> Result<bool> {
        if !pattern::is_intact(block, client, sequence % self.blocks_each, sequence) {
            return Ok(false);
        }
        if let Some(file) = &self.file {
            let at = self.next.get();
            file.write_all_at(block, at)?;
            let end = at + block.len() as u64;
            self.next.set(if end + block.len() as u64 > FILE_BYTES { 0 } else { end });
        }
        Ok(true)
    }
}
