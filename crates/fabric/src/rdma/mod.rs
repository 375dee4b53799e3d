//! Reliable connections over InfiniBand and RoCE: a safe interface to the verbs.
//!
//! libibverbs and librdmacm are loaded at run time ([`Library::load`]), so that a program also runs without them. On top of
//! them are a [`Device`] (found by one of its addresses), a [`Domain`] in which memory is registered, one
//! [`CompletionQueue`] per loop, a [`SharedReceiveQueue`] and an [`EventChannel`] whose [`Endpoint`]s connect and have a
//! queue pair each. Nothing here waits: a loop polls the descriptors of the completion queue and of the event channel.
//!
//! Three properties hold by construction:
//!
//! - Memory that the device may touch belongs to the operation until its completion, or to the [`Window`] until it is
//!   closed. No code has access to memory that a peer may write.
//! - Every posted operation completes exactly once. A queue pair that is dropped completes its remaining operations as
//!   [`WorkError::Flushed`].
//! - A completion queue has room for the completion of everything that is posted (see `operations.rs`).
//!
//! [`transport`] drives the connections of one loop on top of these, and moves messages, puts and gets.
//!
//! Every object keeps alive what it was made from, so the order of drops does not matter.

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
pub use memory::{Buffer, Payload, Registrable, Segment};
pub use operations::{Completion, Kind};
pub use queue_pair::{QueuePairOptions, Report, Work};
pub use receive::SharedReceiveQueue;
