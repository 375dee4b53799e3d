//! What a pool is made of: its lenders, its file, and how it keeps pages.

use byway_fabric::node::{Address, Session, SubmitError};

use super::borrower::Borrower;
use super::pager::{PAGE_BYTES, Place};
use super::pool::Class;

/// A file of pages on the borrower's machine.
pub trait Spill: Send {
    /// Writes a page, at a place.
    ///
    /// # Errors
    /// The file system's: the page is not safe there.
    fn write(&mut self, place: Place, page: &[u8; PAGE_BYTES]) -> std::io::Result<()>;

    /// Reads the page that was written last at a place.
    ///
    /// # Errors
    /// The file system's.
    fn read(&mut self, place: Place, page: &mut [u8; PAGE_BYTES]) -> std::io::Result<()>;
}

/// How pages are kept outside of their program.
pub struct Keeping {
    /// What each page relies on.
    pub class: Class,
    /// The file of [`Class::Disk`].
    pub spill: Option<Box<dyn Spill>>,
    /// Lenders and the file get pages that are sealed with a key of the pool's own.
    pub encrypt: bool,
}

impl Keeping {
    /// Pages as they are, without a file.
    pub fn plain(class: Class) -> Self {
        Self { class, spill: None, encrypt: false }
    }
}

/// Why there is no pool.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The node.
    #[error("the pool's memory cannot be registered: {0}")]
    Node(#[from] SubmitError),
    /// The kernel.
    #[error("memory for sealed pages cannot be had: {0}")]
    Memory(std::io::Error),
    /// The kernel.
    #[error("the kernel gives no random bytes for a key")]
    NoRandomness,
}

/// A lender that pages may go to.
#[derive(Clone, Debug)]
pub struct LenderAt {
    /// For the log.
    pub name: String,
    /// Where it is.
    pub address: Address,
    /// The session with it; without one, the pool connects.
    pub session: Option<Session>,
}

impl LenderAt {
    /// The lender of a session.
    pub fn of(name: String, borrower: &Borrower) -> Self {
        Self { name, address: borrower.address().clone(), session: Some(borrower.session()) }
    }
}
