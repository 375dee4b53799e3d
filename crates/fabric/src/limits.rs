//! The bounds of the fabric, and what happens at each.

use std::time::Duration;

/// The longest payload that rides with a message on the control lane. Longer ones need a window; a message that breaks
/// this ends the connection with [`CloseReason::Oversize`](crate::CloseReason::Oversize).
pub const SMALL_BYTES_MAX: usize = 16 << 10;

/// The longest payload of one message on a bulk lane: a frame. Longer ends the connection.
pub const PAYLOAD_BYTES_MAX: usize = byway_reactor::limits::FRAME_BYTES_MAX;

/// What a control lane receives into that has long messages, or many: the longest message and as much again. An idle one
/// has 4 KiB.
pub const CONTROL_FRAME_BYTES: usize = 32 << 10;

/// What a busy control lane receives into, while at least half of the pool is free.
pub const CONTROL_FRAME_BYTES_MAX: usize = 256 << 10;

/// Bulk lanes of one session; a `Hello` for a higher one is refused.
pub const BULK_LANES_MAX: u16 = 8;

/// Connections of one loop; more are closed as soon as they are accepted.
pub const LANES_MAX: usize = 8192;

/// Connections of one loop whose handshake is not done; more are closed as soon as they are accepted.
pub const HANDSHAKES_MAX: usize = 1024;

/// Windows of one loop; opening more answers `None`, and the caller waits.
pub const WINDOWS_MAX: usize = 1 << 16;

/// Calls that a server lets a session have in flight, if nothing else is configured. A session that has more is closed.
pub const CREDITS_DEFAULT: u16 = 256;

/// Time from accept to a complete `Hello`, and from connect to `Welcome`.
pub const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(10);

/// Silence of a peer that owes something, after which it is probed; after as much again it is dead.
pub const KEEP_ALIVE_DEFAULT: Duration = Duration::from_secs(5);

/// The pause after an accept that failed, for want of descriptors most likely.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// How often sessions that wait for something are looked at.
pub const TICK: Duration = Duration::from_millis(100);

/// Bytes queued on a session's control lane that make a client wait before it sends more calls. A server has
/// [`SESSION_HEAP_BYTES_MAX`].
pub const CONTROL_QUEUE_BYTES: usize = 4 << 20;

/// Heap memory of the answers that wait for one client, on all its lanes. Above nothing more is received from it.
pub const SESSION_HEAP_BYTES_MAX: usize = 256 << 10;

/// Heap memory of the answers that wait for all clients of a loop. Above nothing more is received from those who have not
/// taken [`SESSION_HEAP_BYTES_MIN`] of theirs.
pub const LOOP_HEAP_BYTES_MAX: usize = 4 << 20;

/// See [`LOOP_HEAP_BYTES_MAX`].
pub const SESSION_HEAP_BYTES_MIN: usize = 4 << 10;

/// Bytes that a TLS stream holds for sending; more plaintext is taken when the ciphertext has been.
pub const TLS_QUEUE_BYTES: usize = 256 << 10;

/// The longest PEM file, in bytes; a longer one is refused. A bundle of all public authorities has a quarter of it.
pub const PEM_BYTES_MAX: u64 = 1 << 20;

/// Clients that the registry remembers after their last session ended; the longest gone are forgotten first.
pub const CLIENTS_REMEMBERED_MAX: usize = 4096;

/// Private data of an RDMA connect request: the 92 bytes of the InfiniBand message less the 36 of its IP addressing. More is
/// refused.
pub const RDMA_CONNECT_BYTES_MAX: usize = 56;

/// Private data with which an RDMA connection is accepted; more is refused.
pub const RDMA_ACCEPT_BYTES_MAX: usize = 196;

/// Private data with which an RDMA connection is refused; more is an error.
pub const RDMA_REJECT_BYTES_MAX: usize = 148;

/// RDMA connect requests of one listener that wait to be looked at; the kernel refuses more.
pub const RDMA_BACKLOG: i32 = 1024;

/// How long an RDMA address or route is looked for; then the connection fails.
pub const RDMA_RESOLVE_TIME_MAX: Duration = Duration::from_secs(5);

const _: () = assert!(CONTROL_FRAME_BYTES >= SMALL_BYTES_MAX + crate::wire::HEADER_BYTES);
const _: () = assert!(CONTROL_FRAME_BYTES_MAX <= byway_reactor::limits::FRAME_BYTES_MAX);
