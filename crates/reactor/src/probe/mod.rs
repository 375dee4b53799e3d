//! What this machine can do, found by doing it: each probe sets the thing up for real and takes it down again.
//!
//! For `byway doctor` alone; nothing on a data path asks here.

mod syscalls;
mod uring;
mod zero_copy;

pub use syscalls::{huge_page_works, landlock_abi, perf_works, userfaultfd_features};
pub use uring::{UringAbilities, uring};
pub use zero_copy::{ZeroCopy, zero_copy_send};
