//! The bounds of a loop, and what happens at each.

/// The smallest frame, and the unit that frames are carved in: a page.
pub const FRAME_BYTES_MIN: usize = 4096;

/// The largest frame; longer transfers take several.
pub const FRAME_BYTES_MAX: usize = 1 << 20;

/// Operations in flight on one loop. More complete at once with `EAGAIN`.
pub const OPS_MAX: usize = 1 << 16;

/// Pieces of one system call (the kernel's `IOV_MAX`); longer gathers go out in several.
pub const SEGMENTS_PER_CALL_MAX: usize = 1024;

/// The shortest send that is tried without a copy, in bytes: pinning pages and the second completion cost more than
/// copying less (the kernel's msg_zerocopy.rst says about 10 KB for the pinning alone).
pub const ZERO_COPY_BYTES_MIN: usize = 64 << 10;

/// Worker threads of one loop for calls that block.
pub const WORKERS_MAX: usize = 4;

const _: () = assert!(FRAME_BYTES_MAX.is_power_of_two() && FRAME_BYTES_MIN.is_power_of_two());
