//! The bounds of calls, and what happens at each. Credits and payloads are bounded by the fabric below.

/// Bytes of inline arguments, and of an inline result.
pub const INLINE_BYTES: usize = 64;

/// Calls of a node that have not ended; a further one is refused with `Busy`.
pub const CALLS_MAX: usize = 1 << 15;

/// Calls that came and that the program has not taken, of all sessions; a further one is answered with
/// [`Status::Busy`](crate::message::Status::Busy).
pub const REQUESTS_MAX: usize = 1 << 14;

/// Calls of a node that wait for credit of one session in one protocol; a further one is refused with `Busy`.
pub const CALLS_WAITING_MAX: usize = 64;

/// Calls that each peer may have in flight at a node that serves programs' protocol, [`PROGRAM`](crate::node::PROGRAM).
pub const PROGRAM_CALLS: u16 = 256;

/// Windows of one call; more are refused.
pub const WINDOWS_PER_CALL_MAX: usize = 64;

/// Protocols that a node speaks; what a peer says beyond ends its session.
pub const PROTOCOLS_MAX: usize = 16;
