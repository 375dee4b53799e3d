//! Far memory for programs that ask for it: a range of memory of which only a part is on this machine.
//!
//! ```no_run
//! use byway_frontend::far_memory::{FarMemory, FarMemoryOptions};
//! use byway_service::memory::pool::Class;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let lender = byway_fabric::node::parse_address("tcp://10.0.0.2:4711")?;
//! let mut memory = FarMemory::open(FarMemoryOptions {
//!     bytes: 8 << 30,
//!     resident_bytes: 1 << 30,
//!     lenders: vec![lender],
//!     class: Class::None,
//!     spill: None,
//!     encrypt: false,
//! })?;
//! memory.bytes_mut()[5 << 30] = 7;
//! assert_eq!(memory.bytes()[5 << 30], 7);
//! # Ok(())
//! # }
//! ```
//!
//! Its bytes are used as any memory: by threads, system calls, and as source and target of puts and gets
//! ([`put_from`](byway_fabric::node::Node::put_from), [`get_into`](byway_fabric::node::Node::get_into)). A thread that touches a
//! page that is far waits until the pager has fetched it. The pager is a thread of this module with a node of its own.
//! The rest of the program's memory is not paged; `byway far` pages all of it. `madvise(MADV_DONTNEED)` of the range is not
//! supported: pages that are far keep their bytes.

mod pager;
mod region;

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use byway_fabric::node::{Address, NodeOptions};
use byway_reactor::blocked_signals::BlockedSignals;
use byway_reactor::userfault::OpenError;
use byway_service::memory::pager::{Counters, PAGE_BYTES};
use byway_service::memory::pool::Class;
use byway_service::memory::{BorrowError, Borrower, Keeping};

use self::pager::{RegionPager, Shared};
use self::region::{Region, RegionError};
use crate::fault::spill_to;
use crate::limits::FAR_BUDGET_PAGES_MIN;

/// The least memory that stays on this machine, in bytes.
pub const RESIDENT_BYTES_MIN: usize = FAR_BUDGET_PAGES_MIN * PAGE_BYTES;

/// How long a lender may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a [`FarMemory`] is to be.
#[derive(Debug)]
pub struct FarMemoryOptions {
    /// Bytes of the range; rounded up to whole pages.
    pub bytes: usize,
    /// Of these, bytes that may be on this machine: [`RESIDENT_BYTES_MIN`] or more. 2 MiB of buffers come on top.
    pub resident_bytes: usize,
    /// Lenders (`byway serve --lend`), used in turn.
    pub lenders: Vec<Address>,
    /// What each page relies on. [`Class::Mirror`] needs two lenders, [`Class::Parity`] five, each a process of its own.
    pub class: Class,
    /// The file of [`Class::Disk`], of this memory alone: see [`spill_file`].
    pub spill: Option<File>,
    /// Lenders and the file get pages that are sealed (AES-256-GCM) with a key that stays in this process.
    pub encrypt: bool,
}

/// Why there is no far memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FarMemoryError {
    /// The caller's options.
    #[error("{0}")]
    Options(&'static str),
    /// The kernel gives no userfaultfd.
    #[error("{0} (far memory needs Linux 6.8)")]
    Userfault(#[from] OpenError),
    /// A lender cannot be used.
    #[error("{lender}: {source}")]
    Lender {
        /// Which.
        lender: Address,
        /// Why not.
        source: BorrowError,
    },
    /// The kernel.
    #[error("far memory cannot be set up: {0}")]
    System(Box<dyn std::error::Error + Send + Sync>),
}

/// A file without a name in a folder, for [`FarMemoryOptions::spill`]. It goes with the process.
///
/// # Errors
/// The kernel's: the folder cannot be written, or its file system has no such files.
pub fn spill_file(folder: &Path) -> std::io::Result<File> {
    use rustix::fs::{Mode, OFlags, open};
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    Ok(open(folder, flags, Mode::RUSR | Mode::WUSR)?.into())
}

/// A range of memory, zeroes at first, of which a part lies at lenders. See the module.
///
/// Where a page is lost with its lender ([`Class::None`]), its access ends the process by SIGBUS. A forked child does not have the range:
/// it must neither use it nor drop this.
#[derive(Debug)]
pub struct FarMemory {
    region: Arc<Region>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl FarMemory {
    /// Connects to the lenders and maps the range.
    ///
    /// # Errors
    /// See [`FarMemoryError`].
    pub fn open(options: FarMemoryOptions) -> Result<Self, FarMemoryError> {
        let FarMemoryOptions { bytes, resident_bytes, lenders, class, spill, encrypt } = options;
        let refused = match class {
            _ if bytes == 0 => Some("far memory of no bytes"),
            _ if resident_bytes < RESIDENT_BYTES_MIN => Some("far memory keeps at least 1 MiB on this machine"),
            _ if lenders.is_empty() => Some("far memory needs a lender"),
            Class::Mirror if lenders.len() < 2 => Some("two copies of each page need two lenders"),
            Class::Parity if lenders.len() < class.lenders() => Some("four pages and their parity need five lenders"),
            Class::Disk if spill.is_none() => Some("copies of pages on disk need a file"),
            _ => None,
        };
        if let Some(why) = refused {
            return Err(FarMemoryError::Options(why));
        }
        let region = Arc::new(Region::new(bytes.next_multiple_of(PAGE_BYTES)).map_err(|error| match error {
            RegionError::Userfault(error) => FarMemoryError::Userfault(error),
            RegionError::Kernel(error) => system(error),
        })?);
        let rpc = Borrower::open_node(&NodeOptions::default()).map_err(system)?;
        let named: Vec<_> = lenders.into_iter().map(|lender| (lender.to_string(), lender)).collect();
        let borrowers = Borrower::connect_all(&rpc, &named, class, PATIENCE).map_err(|unusable| {
            FarMemoryError::Lender { lender: named[unusable.lender].1.clone(), source: unusable.source }
        })?;
        let borrowers = named.into_iter().map(|(name, _)| name).zip(borrowers).collect();
        let shared = Arc::new(Shared::new().map_err(system)?);
        let keeping = Keeping { class, spill: spill.map(spill_to), encrypt };
        let pager = RegionPager::new(&region, &shared, rpc, borrowers, keeping, resident_bytes).map_err(system)?;
        // Handlers of the program's signals may touch the range, and would wait for the thread that they run in.
        let signals = BlockedSignals::new();
        let thread = std::thread::Builder::new().name("byway-far".to_owned()).spawn(|| pager.run()).map_err(system)?;
        drop(signals);
        Ok(Self { region, shared, thread: Some(thread) })
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the range is mapped as long as this lives, and its bytes change by `bytes_mut` alone: the pager brings back what a page held.
        unsafe { std::slice::from_raw_parts(self.region.as_ptr(), self.region.len()) }
    }

    /// The bytes, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`; `self` is borrowed mutably, so there is no other reference to them.
        unsafe { std::slice::from_raw_parts_mut(self.region.as_ptr(), self.region.len()) }
    }

    /// Where the bytes begin, at a page boundary, for programs that share them between threads by other means than references.
    pub fn as_ptr(&self) -> *mut u8 {
        self.region.as_ptr()
    }

    /// Bytes of the range.
    pub fn len(&self) -> usize {
        self.region.len()
    }

    /// False: a range has a page at least.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What the pager has done.
    pub fn counters(&self) -> Counters {
        self.shared.counters()
    }
}

impl Drop for FarMemory {
    fn drop(&mut self) {
        self.shared.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn system(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> FarMemoryError {
    FarMemoryError::System(error.into())
}
