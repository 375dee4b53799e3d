//! The bounds of calls, and what happens at each. Credits and payloads are bounded by the fabric below.

/// Bytes of inline arguments, and of an inline result.
pub const INLINE_BYTES: usize = 64;
