//! Shared memory between the processes of a job: they load from and store to the same segments, in an order as on one machine.
//!
//! `byway dsm run -n N -- PROGRAM` starts a job of N processes ([`launch`] is the same for programs). Each joins the job
//! ([`Job::join`]), maps segments by name, and meets the others at locks and barriers. Either one process can write to a
//! page of a segment, or several can read it. The kernel reports each access to a missing page to this crate
//! (userfaultfd), and the crate's own thread, the pager, fetches the page from the process that has it, by the protocol of
//! [`byway_service::dsm`].
//!
//! ```no_run
//! use std::sync::atomic::Ordering::Relaxed;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let job = byway_dsm::Job::join()?;
//! let counters = job.segment("counters", 4096)?;
//! job.barrier(0)?;
//! {
//!     let _guard = job.lock(0)?;
//!     let counter = &counters.words()[0];
//!     counter.store(counter.load(Relaxed) + 1, Relaxed);
//! }
//! job.barrier(1)?;
//! assert_eq!(counters.words()[0].load(Relaxed), u64::from(job.ranks()));
//! drop(counters);
//! job.finish()?;
//! # Ok(())
//! # }
//! ```
//!
//! # What a program may rely on
//! Loads and stores of all processes have one order, as on one machine. The effects of x86 store buffers between two threads
//! also appear between two processes, and fences and locked instructions order them in the same way. (With
//! [`Consistency::Release`] this holds for programs without data races.) A job is fail-stop: when a
//! process ends before [`Job::finish`], or is silent for 1.5 keep-alives, every other one reports this on standard error and
//! exits with status [`EXIT_JOB_ENDED`].

mod allocation;
mod area;
mod call;
mod checkpoint;
mod drive;
mod environment;
mod held_signals;
mod job;
mod join;
pub mod launch;
pub mod limits;
mod names;
mod pager;
mod prepared;
mod processes;
mod report;
mod sessions;
mod spin;

pub use self::area::{AreaError, check};
pub use self::checkpoint::CheckpointError;
pub use self::environment::{EnvironmentError, Waits, Wire};
pub use self::job::{CallError, Job, LockGuard, Segment};
pub use self::join::JoinError;
pub use self::prepared::{Prepared, PreparedError};
pub use byway_service::dsm::{Consistency, Counters, Misuse, SegmentRefused};

/// The exit status of a process whose job has ended because another process has gone.
pub const EXIT_JOB_ENDED: i32 = 70;
