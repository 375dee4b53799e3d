//! Memory of one machine, lent to programs of others.
//!
//! A [`Lender`] leases *slabs* to borrowers. A borrower puts its pages into a slab and gets them back by itself: the lender's service
//! hears nothing of it, and over shared memory and RDMA its CPU does nothing. A [`Borrower`] is the client, for programs on a node.

mod borrower;
mod leases;
mod lender;
mod numbers;
pub mod pager;
pub mod pool;
mod pool_client;
mod pool_frames;
mod pool_options;
mod pressure;
mod sealing;
pub mod wire;

pub use self::borrower::{BorrowError, Borrower, LeasedSlab, UnusableLender};
pub use self::lender::{BorrowerStatus, Lender, Lending, LendingStatus};
pub use self::pool_client::PoolClient;
pub use self::pool_options::{Keeping, LenderAt, PoolError, Spill};
pub use self::pressure::{Guard, Reading};
