//! A simulated world: nodes, their loops, the network between them and their disks, in virtual time.
//!
//! Everything runs on one thread, and one seed decides everything: the same seed and the same calls give the same run, bit
//! for bit. So a cluster's whole life, with partitions, resets, crashes and torn writes, is a test that takes milliseconds,
//! and a failure is replayed from its seed.
//!
//! The owner turns every loop ([`Reactor::reap`](crate::Reactor::reap) never waits here) until none has anything ready, then
//! calls [`World::step`], which moves the clock to the next event, and repeats.
//!
//! Two nodes may be processes of one host: a node that listens at [`Address::Shared`](crate::Address::Shared), with its IP and a
//! port as the path (`10.0.0.1:4711`), and those that connect to it there have streams over shared memory
//! (`sim/shared_memory.rs`). Partitions and stalls hold their bytes too, as a process does that is stopped or slow.
//!
//! The network does not model acknowledgements (send-buffer space is free once the bytes have arrived), loss and reordering
//! below the stream (a partition delays bytes, as retransmission does), and an unreachable host (it refuses connections).

mod disk;
mod events;
mod faults;
mod losses;
mod net;
mod node;
mod rng;
mod shared_memory;
mod stream;
mod submit;
#[cfg(test)]
mod tests;
mod world;

pub use disk::{FileFault, FileOp, SimFile};
pub use faults::{FaultCount, FaultPlan};
pub(crate) use node::SimLoop;
pub use world::{Crash, Disk, LinkProfile, World};
