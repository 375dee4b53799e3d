//! One event loop per core for sockets, files and timers, over io_uring, epoll or a simulation.
//!
//! A [`Reactor`] is owned by one thread, which [submits](Reactor::submit) operations and [reaps](Reactor::reap) their
//! completions. An operation owns its memory and its completion gives it back. The three backends keep the same
//! promises, shown by one conformance suite (`tests/conformance`):
//!
//! - every submitted operation completes exactly once (an accept: once per connection, then once);
//! - nothing is reported before it is so: a completed write is in the page cache, a completed sync is durable;
//! - a send completes when all of it was taken or the stream is broken; a receive when `min` bytes came or the stream
//!   ended;
//! - cancelling completes the operation (with its result, if it was faster, else `ECANCELED`) and never loses memory.

pub mod activation;
pub mod limits;

pub mod blocked_signals;
mod blocking;
mod byte_range;
pub mod bytewise;
mod counters;
pub mod descriptor_floor;
pub mod device_memory;
mod epoll;
mod file;
mod file_map;
mod frame;
mod gather;
mod handles;
mod heap;
mod loan;
mod mapped;
mod mapping;
mod net;
mod op;
mod os;
pub mod owned_folder;
mod path;
pub mod privilege;
pub mod probe;
mod reactor;
mod receive_buffers;
pub mod record_lock;
mod region;
pub mod seeded;
mod shared;
pub mod sim;
pub mod socket_file;
mod splice;
pub mod thread_pool;
mod time;
mod timers;
mod uring;
pub mod userfault;
mod wait_policy;
mod waker;
mod workers;

pub use blocking::ignore_file_size_signal;
pub use byte_range::{ByteRange, FileRange};
pub use counters::Counters;
pub use file::{FileOptions, OpenFile};
pub use frame::{Frame, FramePool};
pub use gather::{FrameRange, Gather, Part, Scatter};
pub use heap::Heap;
pub use loan::{Loan, RestingLoan};
pub use mapped::{MappedMemory, limit_mapped, mapped_memory};
pub use mapping::{Mapping, PartUses, Use};
pub use net::{Listening, listen_as, listen_shared as listen};
pub use op::{
    Address, Allocate, Completion, Descriptor, Errno, Extent, File, Listener, Op, Outcome, Socket, Token, Wait, WriteAt,
};
pub use path::PathState;
pub use reactor::{Io, IoChoice, Reactor};
pub use receive_buffers::{Need, ReceiveBuffers};
pub use region::FileMemoryError;
pub use shared::{Detached, LentPlace};
pub use time::{Clock, Instant, monotonic};
pub use waker::Waker;
