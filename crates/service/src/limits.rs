//! The bounds of the services, and what happens at each.

/// The longest piece of a read or write that goes to a store at once. Longer requests are cut: pieces of this size stay
/// in a core's cache between the disk's copy and the wire's, and a slow disk does not hold back the first bytes.
pub const PIECE_BYTES_MAX: usize = 256 << 10;

/// The longest piece of a write to a store in memory: long enough to wait for, short enough that most of a payload is
/// received straight into the store, which takes whole pages of what is here.
pub const MEMORY_PIECE_BYTES: usize = 16 << 10;

/// The longest request that an engine takes; longer ones are `TooLong`.
pub const REQUEST_BYTES_MAX: u64 = 32 << 20;

/// Extents in one answer; a longer list ends early, as all its users allow.
pub const EXTENTS_MAX: usize = 4096;

/// Stripes of a request that asks for extents; the answer ends there.
pub const EXTENT_PIECES_MAX: usize = 64;

/// Paths of a stripe.
pub const STRIPE_PATHS_MAX: usize = 64;

const _: () = assert!(PIECE_BYTES_MAX <= byway_reactor::limits::FRAME_BYTES_MAX);
