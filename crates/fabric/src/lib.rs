//! Moves bytes between the memory of two nodes, over TCP, Unix sockets, shared memory or RDMA.
//!
//! A node opens a [*window*](node::Window): memory of its own that one peer may read or write, under a key that cannot be
//! guessed. The peer puts and gets ranges of any length, without the
//! owner's program; both can also send messages. The calls are the same over each transport. The differences are data:
//! [`Capabilities`] says what a session's transport can do and what it does not protect, [`Feedback`] how the session performs.
//!
//! ```
//! use byway_fabric::node::{Descriptor, Node, NodeOptions, Rights, parse_address};
//! type Error = Box<dyn std::error::Error + Send + Sync>;
//!
//! # fn main() -> Result<(), Error> {
//! const BYTES: usize = 1 << 20;
//! let soon = std::time::Duration::from_secs(20);
//! let lender = Node::open(&NodeOptions::default())?;
//! // Or `unix://PATH`, `shm://PATH`, `rdma://IP:PORT`.
//! let at = lender.listen(&parse_address("tcp://127.0.0.1:0")?)?.ok_or("no port")?;
//!
//! // One program lends its memory. A thread that waits drives the node, and so serves its windows.
//! let lending = std::thread::spawn(move || -> Result<(), Error> {
//!     let session = lender.accept(soon)?;
//!     let memory = lender.register(BYTES)?;
//!     memory.write(0, &[7; BYTES])?;
//!     let window = lender.open_window(session, &memory, 0..BYTES, Rights::GET)?;
//!     lender.send(session, b"here it is", &window.descriptor().to_bytes())?;
//!     assert_eq!(lender.receive(soon)?.header, b"thanks");
//!     Ok(())
//! });
//!
//! // Another gets it.
//! let node = Node::open(&NodeOptions::default())?;
//! let session = node.connect(&parse_address(&format!("tcp://{at}"))?, soon)?;
//! let message = node.receive(soon)?;
//! let window = Descriptor::from_bytes(message.payload[..].try_into()?);
//! let memory = node.register(BYTES)?;
//! node.get(session, &window, 0, &[memory.segment(0..BYTES)])?.wait(soon)??;
//! assert!(memory.bytes()?.iter().all(|byte| *byte == 7));
//!
//! // What a program can choose by if it has several peers.
//! let wire = node.capabilities(session)?;
//! assert!(wire.window_enforced && wire.wire.name() == "tcp");
//! let seen = node.feedback(session)?.measured;
//! assert!(seen.received_bytes >= BYTES as u64 && seen.receive_rate > 0.0);
//!
//! node.send(session, b"thanks", &[])?;
//! lending.join().map_err(|_| "the lender panicked")?
//! # }
//! ```
//!
//! # Where to begin
//!
//! - [`node`] is for programs: handles that threads share, operations with several ways to wait, no threads and no runtime of the
//!   library. The crate `byway-rpc` adds calls, and there is a C interface. `examples/echo.rs` and `examples/remote_memory.rs` run.
//! - [`Fabric`] is for event loops: it drives the sessions of one loop over any backend of the
//!   [`Reactor`](byway_reactor::Reactor). Small messages travel in batches on a session's control lane; large payloads on bulk
//!   lanes, from the sender's memory straight into the [window](windows) that the receiver opened. The pure parts ([`wire`],
//!   [`session`], [`windows`]) use no socket and no clock. [`Deficit`] shares scarce resources between sessions.
//! - [`registration`] keeps memory registered with devices between uses.
//! - [`access`] says which clients may use a resource, by their identity as proved by TLS and the transport.
//! - [`limits`] has every bound, and what happens at it.

pub mod access;
mod capabilities;
mod checksum;
pub mod deficit;
mod descriptor;
mod fabric;
pub mod feedback;
pub mod limits;
mod log_limit;
pub mod node;
#[doc(hidden)]
pub mod random;
#[cfg_attr(
    not(feature = "rdma"),
    allow(unreachable_code, unused_variables, dead_code, reason = "without libraries no device is ever reached")
)]
pub mod rdma;
pub mod registration;
pub mod registry;
#[doc(hidden)]
pub mod scheduling;
pub mod session;
mod slots;
pub mod tls;
pub mod windows;
pub mod wire;

pub use capabilities::{Capabilities, OneSided, WireKind};
pub use checksum::{append_payload, payload_checksum};
pub use deficit::Deficit;
pub use descriptor::{DESCRIPTOR_BYTES, Descriptor, Rights};
pub use fabric::{EndedGet, Fabric, FabricCounters, GetError, Handler, Options, PayloadMeta, Put, Remote, Route, Slab};
pub use feedback::{Feedback, Stall};
pub use registry::Registry;
pub use session::{Agreed, ClientId, CloseReason, Identity, PayloadChecksum, Terms};
pub use slots::{SessionId, SessionKind, Slot, Slots};
pub use windows::{Closed, OpenError, WindowError, WindowKey, Windows};
