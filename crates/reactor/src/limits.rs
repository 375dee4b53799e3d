//! The bounds of a loop, and what happens at each.

/// The smallest frame, and the unit that frames are carved in: a page.
pub const FRAME_BYTES_MIN: usize = 4096;

/// The largest frame; longer transfers take several.
pub const FRAME_BYTES_MAX: usize = 1 << 20;

/// The receive buffer of an idle connection.
pub const RECEIVE_BYTES_MIN: usize = FRAME_BYTES_MIN;

/// The receive buffer of a connection whose message is longer than [`RECEIVE_BYTES_MIN`]: a message of either wire that is
/// received in one piece (16 KiB and a header) fits.
pub const RECEIVE_MESSAGE_BYTES: usize = 32 << 10;

/// Idle connections of one loop that have a buffer; a further one is refused. Their memory, 160 MiB, is mapped when the first
/// connection comes, and used as connections come.
pub const RECEIVERS_MAX: usize = 40 << 10;

/// Connections of one loop that have a buffer of [`RECEIVE_MESSAGE_BYTES`]: 32 MiB, mapped and used as they come. A further
/// one takes a frame, or waits.
pub const RECEIVE_MESSAGES_MAX: usize = 1024;

/// While less than this share of the frames is taken, a busy connection may receive into one: a quarter.
pub const RECEIVE_BATCH_SHARE: usize = 4;

/// Operations in flight on one loop. More complete at once with `EAGAIN`.
pub const OPS_MAX: usize = 1 << 16;

/// Pieces of one system call (the kernel's `IOV_MAX`); longer gathers go out in several.
pub const SEGMENTS_PER_CALL_MAX: usize = 1024;

/// The shortest send that is tried without a copy, in bytes in frames: pinning pages and the second completion cost more than
/// copying less (the kernel's msg_zerocopy.rst says about 10 KB for the pinning alone).
pub const ZERO_COPY_BYTES_MIN: usize = 64 << 10;

/// Bytes in frames of such a send for each byte of the heap that it keeps until the peer has taken it: the headers and notes of
/// frames of 4 KiB are a twentieth of those.
pub const ZERO_COPY_FRAMES_PER_HEAP_MIN: usize = 16;

/// Worker threads of one loop for calls that block.
pub const WORKERS_MAX: usize = 4;

/// Bytes of each of the two rings of a shared stream: what is sent and not yet received. Small enough to stay in a core's
/// cache.
pub const SHARED_RING_BYTES: usize = 256 << 10;

/// The smallest and the largest ring that is taken from a server.
pub const SHARED_RING_BYTES_MIN: usize = 4 << 10;
/// See [`SHARED_RING_BYTES_MIN`].
pub const SHARED_RING_BYTES_MAX: usize = 16 << 20;

/// Bytes that are copied between two looks at the other end of a shared stream: it begins with them while we go on.
pub const SHARED_STEP_BYTES: usize = 32 << 10;

/// How long the server of a shared stream may take to send its memory; then the connect fails with `ETIMEDOUT`.
pub const SHARED_CONNECT_TIME_MAX: std::time::Duration = std::time::Duration::from_secs(10);

/// Bytes of a pool of frames; more is refused. Its tables take a thousandth of it, which is allocated at once.
pub const POOL_BYTES_MAX: usize = 1 << 40;
// Blocks are numbered by 32 bits.
const _: () = assert!(POOL_BYTES_MAX / FRAME_BYTES_MIN <= u32::MAX as usize && ARENA_BYTES_MAX <= POOL_BYTES_MAX);

/// The largest arena ([`FramePool::shared`](crate::FramePool::shared)), in bytes: a larger one is not made.
pub const ARENA_BYTES_MAX: usize = 1 << 30;

/// Bytes of the memories that a loop takes of its peers, unless [`Reactor::take_all_memory`](crate::Reactor::take_all_memory) was
/// called; a further memory is refused with `ENOBUFS`, and its bytes go through the stream. It bounds what clients can have
/// charged to a server: a page that its owner has never touched, or has given back, is made when we copy there, and accounted to
/// us until both have let go of the memory.
pub const ARENAS_BYTES_MAX: u64 = 4 << 30;

/// Bytes of a memory that is lent for writing; a larger one is lent for reading alone. If its writer is lost, each of its pages gets a
/// copy of its own ([`Loan::take_back`](crate::Loan::take_back)), which takes memory and time for all of it.
pub const WRITABLE_LOAN_BYTES_MAX: u64 = 1 << 30;

/// Memories that are taken of the peer of one stream at a time; a further one is refused with `ENOBUFS`.
pub const ARENAS_PER_STREAM_MAX: usize = 64;
/// Memories that a peer may have lent over a stream and not named yet. The queue of its socket holds fewer.
pub const LOANS_AT_ONCE_MAX: u32 = 1024;

/// Bytes that a loop has mapped of its peers' memories at a time. To map more, it unmaps the part that was used longest ago.
pub const PEER_MAPPED_BYTES_MAX: usize = 4 << 30;

/// A peer's memory is mapped in parts of so many bytes, each when it is first used. A part takes a mapping and, where it was
/// unmapped before, its page faults again.
pub const PEER_PART_BYTES: usize = 64 << 20;

const _: () = assert!(ARENA_BYTES_MAX as u64 <= ARENAS_BYTES_MAX && ARENA_BYTES_MAX.is_multiple_of(FRAME_BYTES_MAX));
const _: () = assert!(PEER_PART_BYTES <= PEER_MAPPED_BYTES_MAX && PEER_PART_BYTES.is_multiple_of(FRAME_BYTES_MIN));
const _: () = assert!(FRAME_BYTES_MAX.is_power_of_two() && FRAME_BYTES_MIN.is_power_of_two());
