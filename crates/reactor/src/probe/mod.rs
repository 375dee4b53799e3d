//! Probes of this machine's features: each probe uses the feature for real, and cleans up.
//!
//! Only `byway doctor` uses them; no data path does.

mod syscalls;
mod uring;
mod zero_copy;

pub use syscalls::{huge_page_works, landlock_abi, perf_works, userfaultfd_features};
pub use uring::{UringAbilities, uring};
pub use zero_copy::{ZeroCopy, zero_copy_send};
