//! Every bound of the front ends, each with what happens when it is reached.

/// Heap memory of the replies that wait for one client of the server. Above nothing more is read from it.
pub const CONNECTION_HEAP_BYTES_MAX: usize = 256 << 10;

/// Heap memory of the replies that wait for all clients of a loop, in bytes. Above it, nothing is read from a client that has not
/// taken [`CONNECTION_HEAP_BYTES_MIN`] of its replies, and a block status has at most [`CROWDED_EXTENTS_MAX`] extents.
pub const FRONTEND_HEAP_BYTES_MAX: usize = 4 << 20;

/// Extents that a block status tells while more than [`FRONTEND_HEAP_BYTES_MAX`] waits: the client asks again for the rest.
pub const CROWDED_EXTENTS_MAX: usize = 64;

/// See [`FRONTEND_HEAP_BYTES_MAX`].
pub const CONNECTION_HEAP_BYTES_MIN: usize = 4 << 10;

/// Longest string of the NBD protocol (export name, description, error message), in bytes
/// (proto.md, "Values": strings are at most 4,096 bytes). A longer name is refused with
/// `NBD_REP_ERR_TOO_BIG`; a longer description or message is cut.
pub const NAME_BYTES_MAX: usize = 4096;

/// Longest option body that the server keeps while it arrives, in bytes. A longer one is skipped
/// as it comes, never stored, and answered with `NBD_REP_ERR_TOO_BIG`. It has room for an export
/// name and several queries of the greatest length.
pub const OPTION_BYTES_MAX: usize = 16 * 1024;

/// Most options in one handshake; the next one ends the connection. A client that lists a server
/// sends two options for each export over one connection.
pub const OPTIONS_MAX: u32 = 4096;

/// Once this many reply bytes wait, the handshake pauses until they are sent
/// ([`crate::nbd::handshake::Step::Flush`]), so that a client that sends options without reading
/// cannot make the server keep more than this and one option's replies.
pub const HANDSHAKE_OUTPUT_BYTES_MAX: usize = 64 * 1024;

/// Heap memory of the replies that wait for all clients of a loop that are in their handshake. Above, lists that are longer than
/// [`CROWDED_OUTPUT_BYTES_MAX`] are refused with `NBD_REP_ERR_POLICY`, and handshakes pause once so much of theirs waits. One
/// list may go beyond; a node of 1,024 volumes has one of at most 8 MiB.
pub const GREETINGS_HEAP_BYTES_MAX: usize = 16 << 20;

/// See [`GREETINGS_HEAP_BYTES_MAX`].
pub const CROWDED_OUTPUT_BYTES_MAX: usize = 4 << 10;

/// Largest payload of one request, in bytes, and the maximum that exports advertise by default
/// (proto.md, "Size constraints": 2^25 is what every peer may expect). A longer read is answered
/// with an error; a write of up to the greater of this and the export's own maximum is drained and
/// answered with an error; a longer one ends the connection.
pub const REQUEST_BYTES_MAX: u32 = 32 * 1024 * 1024;

/// Most descriptors in one block status reply. A longer map is cut, and the client asks again from
/// where it ended (proto.md allows 2^20; 4,096 extended ones are 64 KiB).
pub const EXTENTS_PER_REPLY_MAX: usize = 4096;

/// Most requests that one client connection has in flight; the next one is refused until a reply
/// has come.
pub const CLIENT_IN_FLIGHT_MAX: usize = 1024;

/// Requests that a client takes before it has answered; more are handed back.
pub const CLIENT_REQUESTS_MAX: usize = 4096;

/// Stretches of a read that a client keeps apart while a server answers out of order; more end the connection.
pub const CLIENT_RANGES_MAX: usize = 256;

/// Commands of one client connection in flight; more wait in the client.
pub const CLIENT_CONNECTION_DEPTH: usize = 256;

/// Most connections of one client; asked for more, it makes so many.
pub const CLIENT_CONNECTIONS_MAX: usize = 16;

/// What a client connection receives heads and small payloads into, in bytes. The longest head fits.
pub const CLIENT_INPUT_BYTES: usize = 64 << 10;

/// What a client connection receives ciphertext into, in bytes, if it uses TLS; the rest waits in the socket.
pub const CLIENT_CIPHERTEXT_BYTES: usize = 256 << 10;

/// The longest read whose payload a client receives together with heads, and copies; a longer one's is received where
/// it belongs.
pub const SMALL_READ_BYTES_MAX: u64 = 16 << 10;

/// The pieces in which the waiting client moves long ranges, in bytes.
pub const CLIENT_PIECE_BYTES: usize = 256 << 10;

/// How long a client waits for a connection and its handshake, in seconds; then it gives up.
pub const CLIENT_HANDSHAKE_SECONDS_MAX: u64 = 10;

/// How long a client waits for the first byte of a server before it asks on a second connection whether that speaks
/// byway's own protocol, in seconds. NBD servers greet as soon as they accept, so an honest one is seldom asked.
pub const CLIENT_PROBE_SECONDS: u64 = 1;

/// How long a server may owe an answer and say nothing, in seconds; then the client gives up. A flush may write much.
pub const CLIENT_SILENCE_SECONDS_MAX: u64 = 120;

/// A TCP server that is gone is noticed by a client within about this time, in seconds.
pub const CLIENT_KEEP_ALIVE_SECONDS: u64 = 30;

/// How long a client that leaves waits for its last bytes to go out, in seconds.
pub const CLIENT_CLOSE_SECONDS_MAX: u64 = 2;

/// Longest option reply that the client accepts, in bytes: a name, a description and their
/// lengths. A longer one ends the connection.
pub const OPTION_REPLY_BYTES_MAX: usize = 4 + 2 * NAME_BYTES_MAX;

/// Most exports that the client lists; a longer list ends the connection.
pub const LISTED_EXPORTS_MAX: usize = 4096;

/// Most replies to one option other than LIST; one more ends the connection.
pub const REPLIES_PER_OPTION_MAX: u32 = 256;

/// Longest part of a reply that the client's caller must be able to hold in one piece, in bytes:
/// an error chunk with a message of the greatest length.
pub const REPLY_HEAD_BYTES_MAX: usize = 32 + 6 + NAME_BYTES_MAX + 8;

const _: () = assert!(OPTION_BYTES_MAX > 2 * (NAME_BYTES_MAX + 8));
const _: () = assert!(OPTION_BYTES_MAX <= HANDSHAKE_OUTPUT_BYTES_MAX);
const _: () = assert!(REQUEST_BYTES_MAX <= u32::MAX - 8);
const _: () = assert!(EXTENTS_PER_REPLY_MAX <= 1 << 20);

/// The frame in which an idle connection waits for its next request, in bytes.
pub const INPUT_BYTES_MIN: usize = 4 << 10;

/// The largest frame for a batch of requests, in bytes; more wait in the socket.
pub const INPUT_BYTES_MAX: usize = 256 << 10;

/// The longest write that is taken from the batch of received requests; a longer payload is received into frames of
/// its own, so that it is copied once.
pub const SMALL_WRITE_BYTES_MAX: usize = 16 << 10;

/// Frames of one loop that payloads of writes may be received into, as a share of the pool; above it, a connection gets a frame
/// only for bytes that have arrived, so that a connection that pauses holds no frame.
pub const PAYLOAD_SHARE_MAX: usize = 2;

/// The parts in which a read is answered that would take more frames than one request may hold, in bytes.
pub const READ_PART_BYTES: usize = 1 << 20;

/// Requests of one connection in flight; more wait in the socket.
pub const CONNECTION_IN_FLIGHT_MAX: usize = 1024;

/// Bytes that the requests of one connection in flight may name; more wait in the socket. One request of the greatest
/// length always fits.
pub const CONNECTION_IN_FLIGHT_BYTES_MAX: u64 = 64 << 20;

/// Connections of one front end on one loop; a further one is closed at once.
pub const CONNECTIONS_MAX: usize = 16 << 10;

/// How long a handshake may take, in seconds; a slower client is disconnected.
pub const HANDSHAKE_SECONDS_MAX: u64 = 10;

const _: () = assert!(SMALL_WRITE_BYTES_MAX + 32 <= INPUT_BYTES_MAX);
const _: () = assert!(REPLY_HEAD_BYTES_MAX < CLIENT_INPUT_BYTES && CLIENT_CONNECTION_DEPTH <= CLIENT_IN_FLIGHT_MAX);
const _: () = assert!(REQUEST_BYTES_MAX as u64 <= CONNECTION_IN_FLIGHT_BYTES_MAX);

/// Connections of the HTTP front end at once; a further one takes the place of the oldest.
pub const HTTP_CONNECTIONS_MAX: usize = 16;

/// How long an HTTP connection may be silent, or not take what is sent, before it is closed, in seconds. Longer than the
/// pauses of most scrapers would only keep connections for them that cost as much to keep as to open.
pub const HTTP_IDLE_SECONDS_MAX: u64 = 10;

/// How long an HTTP connection lives, in seconds, whatever it does: a client that sends a byte now and then does not keep its connection.
pub const HTTP_CONNECTION_SECONDS_MAX: u64 = 60;

/// The longest WRITE and READ of a mount, in bytes: what the kernel sends at most by default (`fs.fuse.max_pages_limit`, 256 pages).
pub const FUSE_WRITE_BYTES_MAX: u32 = 1 << 20;

/// Requests of a mount that its file system has not answered; further ones wait in the kernel.
pub const FUSE_REQUESTS_MAX: usize = 4096;

/// Those of them that wait for locks; a further one is refused with `ENOLCK`, so that unlocks always find a place.
pub const FUSE_LOCKS_WAITING_MAX: usize = FUSE_REQUESTS_MAX / 2;

/// Interrupts of a mount that are remembered for requests that no thread has brought yet: one for each thread, and many more that
/// came too late.
pub const FUSE_INTERRUPTS_MAX: usize = 256;

/// Buffers of a mount for long requests, each of [`FUSE_WRITE_BYTES_MAX`]; when all are in use, further requests wait in the kernel.
pub const FUSE_BUFFERS_MAX: usize = 128;

/// Threads of a mount; asked for more, it has so many.
pub const FUSE_THREADS_MAX: usize = 64;

/// Further threads of a mount, for requests that may wait for other clients, when half of its threads do; they start when needed.
pub const FUSE_WAITING_THREADS_MAX: usize = 8;

/// The longest request, in bytes, that is copied out of the buffer that it was read into, so that buffers are kept by long ones alone.
pub const FUSE_SMALL_REQUEST_BYTES: usize = 16 << 10;

const _: () = assert!(
    FUSE_THREADS_MAX < FUSE_INTERRUPTS_MAX
        && FUSE_THREADS_MAX < FUSE_BUFFERS_MAX
        && FUSE_LOCKS_WAITING_MAX < FUSE_REQUESTS_MAX
);

/// Frames of a job of far memory: what is on its way, or stands by for a second chance. 2 MiB.
pub const FAR_FRAMES: u32 = 512;

/// Pages that a job's programs always have, whatever their limit: less would only thrash.
pub const FAR_BUDGET_PAGES_MIN: usize = 256;

/// Address spaces that a job pages at a time; the program that is one too many is refused.
pub const FAR_PROGRAMS_MAX: usize = 1024;

/// Descriptors that a job keeps for what is no program's: programs that begin, the first forks of programs that have, lenders, files.
pub const FAR_DESCRIPTORS_KEPT: usize = 4 * FAR_GREETINGS_MAX;

/// Bytes of what a job of far memory tells when it is asked: some 100 for each lender.
pub const FAR_STATUS_BYTES_MAX: usize = 64 << 10;

/// Faults that are timed at once, one for each thread that waits; waits of others are not counted.
pub const FAR_FAULTS_TIMED_MAX: usize = 16 << 10;

/// Programs of a job that have connected and said nothing yet; further ones wait in the socket.
pub const FAR_GREETINGS_MAX: usize = 64;

/// Requests of a ublk device that are under way at a time; further ones wait in the kernel.
pub const UBLK_QUEUE_DEPTH: u16 = 128;

/// The longest request of a ublk device, in bytes.
pub const UBLK_REQUEST_BYTES_MAX: u32 = 1 << 20;
