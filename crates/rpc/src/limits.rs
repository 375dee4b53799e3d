//! The bounds of calls, and what happens at each. Credits and payloads are bounded by the fabric below.

/// Bytes of inline arguments, and of an inline result.
pub const INLINE_BYTES: usize = 64;

/// Calls of a node that have not ended; a further one is refused with `Busy`.
pub const CALLS_MAX: usize = 1 << 15;

/// Calls that came and that the program has not taken, of all sessions; a further one is answered with
/// [`BUSY`](crate::node::BUSY).
pub const REQUESTS_MAX: usize = 1 << 14;

/// Calls handed on whose answers a server would pass on; the oldest are forgotten, and answers to them lost.
pub const RELAYS_MAX: usize = 4096;

/// Windows of one call; more are refused.
pub const WINDOWS_PER_CALL_MAX: usize = 64;
