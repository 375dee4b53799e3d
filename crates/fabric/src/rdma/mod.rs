//! Reliable connections over InfiniBand and RoCE: what the verbs offer, made safe.
//!
//! libibverbs and librdmacm are loaded at run time ([`Library::load`]), so that a program runs where they are not. On top
//! of them are a [`Device`] (found by an address of it), a [`Domain`] in which memory is registered, one
//! [`CompletionQueue`] per loop, a [`SharedReceiveQueue`] and an [`EventChannel`] whose [`Endpoint`]s connect and have a
//! queue pair each. Nothing here waits: a loop polls the descriptors of the completion queue and of the event channel.
//!
//! Three things hold by construction:
//!
//! - Memory that the device may touch belongs to the operation, or to the [`Window`] that a peer may use, until the
//!   completion came, or the window is closed. What a peer may write is in nobody's hands.
//! - Every posted operation completes exactly once. A queue pair that is dropped completes what it still has as
//!   [`WorkError::Flushed`].
//! - A completion queue has room for the completion of everything that is posted (see `operations.rs`).
//!
//! [`transport`] drives the connections of one loop over all that, and moves messages, puts and gets.
//!
//! Everything keeps alive what it was made from, so that it does not matter what is dropped first.

mod address;
mod completion;
mod connection;
mod device;
mod domain;
mod endpoint;
mod error;
mod identifier;
mod library;
mod local;
mod memory;
mod operations;
mod quarantine;
mod queue_pair;
mod receive;
pub mod transport;
pub mod verbs;

pub use completion::CompletionQueue;
pub use connection::{Event, EventChannel, EventKind};
pub use device::{Device, DeviceInfo, LinkLayer, PortInfo, PortState};
pub use domain::{Domain, Exposed, PoolRegion, Region, Rights, Window, WindowAddress};
pub use endpoint::{AskedEndpoint, Endpoint, Listener};
pub use error::{Fault, PostError, RdmaError, Refused, WorkError};
pub use library::Library;
pub use local::{Kept, LocalMemory};
pub use memory::{Buffer, Memory, Payload, Segment};
pub use operations::{Completion, Kind};
pub use queue_pair::{QueuePairOptions, Report, Work};
pub use receive::SharedReceiveQueue;
