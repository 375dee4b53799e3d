//! Bytes between the memory of two nodes: sessions of several lanes, windows, messages.
//!
//! A [`Fabric`] drives the sessions of one loop over any backend of the [`Reactor`](byway_reactor::Reactor). Small
//! messages travel in batches on a session's control lane; large payloads on bulk lanes, from the sender's memory straight
//! into the [window](windows) that the receiver opened. The pure parts ([`wire`], [`session`], [`windows`]) know no socket
//! and no clock. Who is served when something is short is [`Deficit`]'s to say.

mod capabilities;
mod checksum;
pub mod deficit;
mod fabric;
pub mod feedback;
pub mod limits;
pub mod node;
pub mod random;
pub mod rdma;
pub mod registration;
pub mod registry;
pub mod scheduling;
pub mod session;
pub mod slots;
pub mod tls;
pub mod windows;
pub mod wire;

pub use capabilities::{Capabilities, OneSided, WireKind};
pub use deficit::Deficit;
pub use fabric::{Announced, Fabric, FabricCounters, GetError, Handler, Options, Remote, Route};
pub use feedback::{Feedback, Stall};
pub use registry::Registry;
pub use session::{Agreed, ClientId, CloseReason, Identity, PayloadChecksum, Terms};
pub use slots::{Slot, Slots};
pub use windows::{Closed, OpenError, WindowError, WindowKey, Windows};
