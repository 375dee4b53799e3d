//! The bounds of the fabric, and what happens at each.

use std::time::Duration;

/// The longest payload that rides with a message on the control lane. Longer ones need a window; a message that breaks
/// this ends the connection with [`CloseReason::Oversize`](crate::CloseReason::Oversize).
pub const SMALL_BYTES_MAX: usize = 16 << 10;

/// The longest payload of one message on a bulk lane: a frame. Longer ends the connection.
pub const PAYLOAD_BYTES_MAX: usize = byway_reactor::limits::FRAME_BYTES_MAX;

/// What a busy control lane receives into, while few frames are taken (see [`ReceiveBuffers`](byway_reactor::ReceiveBuffers)).
pub const CONTROL_FRAME_BYTES_MAX: usize = 256 << 10;

/// Bulk lanes of one session; a `Hello` for a higher one is refused.
pub const BULK_LANES_MAX: u16 = 8;

/// Connections of one loop; the `Hello` of a further one is answered with `Refuse` (busy).
pub const LANES_MAX: usize = 8192;

/// Connections of one loop whose handshake is not done; the `Hello` of a further one is answered with `Refuse` (busy). 1,000
/// clients that start at once, whose sessions one loop gets, have up to 2,000.
pub const HANDSHAKES_MAX: usize = 4096;

/// Connections of one loop beyond [`LANES_MAX`] that are there only to be refused; more are closed as soon as they are accepted.
pub const TURNED_AWAY_MAX: usize = 1024;

/// The shortest time between two log lines of one kind that clients can cause.
pub const LOG_PAUSE: Duration = Duration::from_secs(1);

/// Windows of one loop; opening more answers `None`, and the caller waits.
pub const WINDOWS_MAX: usize = 1 << 16;

/// Windows of one peer whose places are known, where the wire can place payloads. Over shared memory, what has no place goes
/// through the stream; over RDMA no more windows are opened.
pub const GRANTS_MAX: usize = 1024;

/// Pieces of a program's memory that a session's peer is lent at a time, over shared memory; windows in further ones go through
/// the stream.
pub const LOANS_MAX: usize = 64;

/// Of these, pieces in which no window is open any more, and which the peer of a session keeps mapped for the next one; the one
/// that was used longest ago goes.
pub const RESTING_LOANS_MAX: usize = 8;

/// Bytes of them; what is larger is unmapped with its last window.
pub const RESTING_LOAN_BYTES_MAX: u64 = 32 << 20;

/// Time from accept to a complete `Hello`, and from connect to `Welcome`.
pub const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(10);

/// Time from accept until a client is told `Busy` whose old session has not ended. Its own [`HANDSHAKE_TIME_MAX`] begins
/// before the accept: it must hear of us well within that, or it takes us for dead.
pub const FENCE_TIME_MAX: Duration = Duration::from_secs(HANDSHAKE_TIME_MAX.as_secs() / 2);

/// Silence of a peer from which a reply is expected, after which it is probed; after as much again, and one more [`TICK`], it is dead.
pub const KEEP_ALIVE_DEFAULT: Duration = Duration::from_secs(5);

/// More is taken as this: Linux's sockets count such times up to 32,767 s.
pub const KEEP_ALIVE_MAX: Duration = Duration::from_hours(9);

/// The pause after an accept that failed, for want of descriptors most likely.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// How often sessions that wait for something are looked at.
pub const TICK: Duration = Duration::from_millis(100);

/// Bytes queued on a session's control lane that make a client wait before it sends more calls, and a node before it sends
/// messages that take credit or gives credit back. A server has [`SESSION_HEAP_BYTES_MAX`].
pub const CONTROL_QUEUE_BYTES: usize = 4 << 20;

/// Bytes queued on a session's control lane above which a node that has to answer its peer's program ends the session with
/// [`CloseReason::AsksTooMuch`](crate::CloseReason::AsksTooMuch): what others have handed on to be answered there takes no credit of it.
pub const ANSWER_QUEUE_BYTES_MAX: usize = 4 * CONTROL_QUEUE_BYTES;

/// Heap memory of the answers that wait for one client, on all its lanes. Above nothing more is received from it.
pub const SESSION_HEAP_BYTES_MAX: usize = 256 << 10;

/// Heap memory of the answers that wait for all clients of a loop, in bytes. Above it, the loop receives nothing from clients for
/// which more than [`SESSION_HEAP_BYTES_MIN`] waits.
pub const LOOP_HEAP_BYTES_MAX: usize = 4 << 20;

/// See [`LOOP_HEAP_BYTES_MAX`].
pub const SESSION_HEAP_BYTES_MIN: usize = 4 << 10;

/// Answers of one session that wait for its peer to take them: of pings, of puts, pieces of windows that it wanted. With more its
/// session ends with [`CloseReason::AsksTooMuch`](crate::CloseReason::AsksTooMuch). Each takes about 200 bytes, 6 MiB in all. A
/// server holds clients back long before.
pub const ANSWERS_MAX: usize = 1 << 15;

/// Parts of puts and gets that a node has under way over one session before further ones wait, so that an honest peer never has
/// [`ANSWERS_MAX`] answers waiting for it. An operation that has begun is not cut short.
pub const ASKED_MAX: usize = 1 << 13;

/// Bytes of one send: a lane's queue that is longer goes in several, so that a peer that takes it slowly is seen to take
/// something. It must manage as much in [`TAKE_TIME_MAX`] if it does not want to be taken for one that has stopped.
pub const SEND_BYTES_MAX: usize = 4 << 20;

/// How long a peer may take nothing while it (a client or a server), or all clients together, are above those bounds. Then its session ends
/// with [`CloseReason::TakesNothing`](crate::CloseReason::TakesNothing), and its memory is free.
pub const TAKE_TIME_MAX: Duration = Duration::from_mins(1);

/// Bytes that a TLS stream holds for sending; more plaintext is taken when the ciphertext has been.
pub const TLS_QUEUE_BYTES: usize = 256 << 10;

/// The longest PEM file, in bytes; a longer one is refused. A bundle of all public authorities has a quarter of it.
pub const PEM_BYTES_MAX: u64 = 1 << 20;

/// Clients that the registry remembers after their last session ended; the longest gone are forgotten first.
pub const CLIENTS_REMEMBERED_MAX: usize = 4096;

/// Registration caches of a process; what a further one registers it registers each time, and says so.
pub const REGISTRATION_CACHES_MAX: usize = 16;

/// Ranges that a registration cache keeps, if nothing else is said.
pub const REGISTERED_RANGES_DEFAULT: usize = 1024;

/// The most ranges that a registration cache keeps: more is taken as this. It takes memory for twice as many, some 100 bytes each,
/// when it begins.
pub const REGISTERED_RANGES_MAX: usize = 1 << 16;

/// Bytes that a registration cache keeps registered, if nothing else is said.
pub const REGISTERED_BYTES_DEFAULT: usize = 1 << 30;

/// The longest range that neighbours are merged to: what an io_uring fixed buffer can have.
pub const REGISTERED_RANGE_BYTES_MAX: usize = 1 << 30;

/// Ranges that a cache has in registration at a time; further ones are registered for one use.
pub const REGISTRATIONS_IN_FLIGHT_MAX: usize = 64;

/// Ranges whose pages may be on their way out, of which a cache knows; with more it takes what lies between two of them
/// for suspect too.
pub const SUSPECT_RANGES_MAX: usize = 64;

/// Mappings that one range may be made of; one of more is registered for one use.
pub const BACKING_MAPPINGS_MAX: usize = 64;

/// The longest mapping whose watch ends with the last range in it, since ending it takes the kernel a walk over its pages
/// (2 ms). A longer one stays watched until it is unmapped: its changes wait for their event to be read.
pub const UNWATCHED_BYTES_MAX: usize = 64 << 20;

/// How often a look-up lets others run while a change of the address space is on its way; then it registers for one use.
pub const SETTLE_TRIES_MAX: u32 = 64;

/// Threads of a process that are looked at to see whether one is throwing pages away; with more, pages that were
/// [suspect](SUSPECT_RANGES_MAX) stay so.
pub const SIGHTED_THREADS_MAX: usize = 1024;

/// Private data of an RDMA connect request: the 92 bytes of the InfiniBand message less the 36 of its IP addressing. More is
/// refused.
pub const RDMA_CONNECT_BYTES_MAX: usize = 56;

/// Private data with which an RDMA connection is accepted; more is refused.
pub const RDMA_ACCEPT_BYTES_MAX: usize = 196;

/// Private data with which an RDMA connection is refused; more is an error.
pub const RDMA_REJECT_BYTES_MAX: usize = 148;

/// RDMA connect requests of one listener that wait to be looked at; the kernel refuses more.
pub const RDMA_BACKLOG: i32 = 1024;

/// How long after an RDMA device was removed it is let go of, and how often a listener of it looks whether there is one again.
pub const RDMA_REMOVAL_PAUSE: Duration = Duration::from_secs(1);

/// How long an RDMA address or route is looked for; then the connection fails.
pub const RDMA_RESOLVE_TIME_MAX: Duration = Duration::from_secs(5);

/// Messages that the peer of an RDMA connection may send before it hears that some were dealt with; each has a receive of 20 KiB
/// posted. One that sends more is closed.
pub const RDMA_CREDITS: u32 = 16;

/// Receives that are posted for each RDMA connection: for its messages, and for two that give credits back by themselves.
pub const RDMA_RECEIVES: u32 = RDMA_CREDITS + 2;

/// The most messages that a peer may say it takes; one that says more is refused.
pub const RDMA_CREDITS_MAX: u32 = 4096;

/// Receives of one RDMA device of a loop. A connection for which there would be none is refused.
pub const RDMA_RECEIVES_MAX: u32 = 4096;

/// Operations of all connections of one RDMA device of a loop; more wait.
pub const RDMA_OPERATIONS_MAX: u32 = 4096;

/// Operations of one RDMA connection; more wait.
pub const RDMA_CONNECTION_OPERATIONS_MAX: u32 = 64;

/// Gets of one RDMA connection that the device has at a time; more wait here. Devices have about so many reads under way
/// between two queue pairs, and a queue pair keeps order: with more in it, messages would wait for all their bytes, and a peer
/// that hears nothing for long takes us for dead.
pub const RDMA_GETS_MAX: usize = 16;

/// Pieces of memory of one RDMA operation, where the device takes so many; a payload of more goes in several.
pub const RDMA_SEGMENTS_MAX: u32 = 16;

/// Bytes of a message that are handed to the RDMA device with the operation, where it takes so many: a header, and as much
/// again.
pub const RDMA_INLINE_BYTES: u32 = 256;

/// RDMA devices of one loop; connections of further ones are refused.
pub const RDMA_DEVICES_MAX: usize = 8;

/// The longest header of a program's message.
pub const MESSAGE_HEADER_BYTES_MAX: usize = 64;

/// Messages that a node lets each session's peer send before its program has taken them, if nothing else is said. A peer that
/// sends more breaks the protocol: its session ends.
pub const MESSAGES_DEFAULT: u16 = 64;

/// Messages of one session that wait for credit; a further one is refused with `Busy`.
pub const MESSAGES_WAITING_MAX: usize = 64;

/// Operations of a node that have not ended, or whose end was not taken; a further one is refused with `Busy`.
pub const NODE_OPS_MAX: usize = 1 << 16;

/// Segments of one put or get, and ranges of the peer's window; more are refused.
pub const SEGMENTS_MAX: usize = 64;

/// Bytes of one put or get; more are refused.
pub const OPERATION_BYTES_MAX: usize = 16 << 30;

/// Bytes that a loop of a node or of `byway serve` copies in one turn, in memory that its peers have lent: a copy of 16 MiB takes 2 to
/// 5 ms. What is left is copied in the next turns. The last copy of a turn may exceed the bound: by a MiB in a node, by a request
/// in a server.
pub const TURN_BYTES_MAX: usize = 16 << 20;

/// Sessions whose peers one window is open to; more are refused.
pub const WINDOW_SESSIONS_MAX: usize = 64;

/// The largest memory that a node registers, in bytes: what a process can address at all on Linux, so that the kernel's own limits
/// come first. More is refused.
pub const MEMORY_BYTES_MAX: usize = 1 << 47;

/// Pieces of memory that a node keeps for gets into borrowed memory and puts from it; a further one takes the place of the one kept
/// first.
pub const BORROWED_KEPT_MAX: usize = 8;

/// Bytes of such a piece at most; what is longer is mapped for each call.
pub const BORROWED_KEPT_BYTES_MAX: usize = 4 << 20;

/// Sessions that were accepted and that the program has not taken; further ones are told `Busy`.
pub const ACCEPTED_MAX: usize = 1024;

/// Sessions that have ended, of which the program was not told; the one that ended first is forgotten, with the messages that
/// it brought.
pub const ENDED_SESSIONS_MAX: usize = 1024;

/// The default of a node's frames, in bytes. Pages that were never used take no memory.
pub const NODE_FRAME_BYTES_DEFAULT: usize = 64 << 20;

/// How long a node's loop is left alone before a thread that waits in the background drives it, and how long that thread pauses at most
/// while another one drives for long. A call of a file takes 20 to 300 us.
pub const BACKGROUND_PAUSE: Duration = Duration::from_micros(500);
/// See [`BACKGROUND_PAUSE`].
pub const BACKGROUND_PAUSE_MAX: Duration = Duration::from_millis(8);

/// The default of the silence after which a node probes a peer from which it expects a reply; it is dead after as much again. Longer
/// than a loop's own, since a peer's program may compute and neither wait nor poll.
pub const NODE_KEEP_ALIVE_DEFAULT: Duration = Duration::from_mins(1);

/// How long a session that was closed here may take to send its last messages; then it is cut.
pub const CLOSE_TIME_MAX: Duration = Duration::from_secs(5);

/// How long a server that ends waits for a peer to close a session, before it does so itself. A peer that is alive needs
/// milliseconds; the program of an idle node may not turn its loop for hours.
pub const FAREWELL_TIME_MAX: Duration = Duration::from_secs(1);

/// Completions that a group holds at most, those of operations in flight included; the program chooses less.
pub const GROUP_OPS_MAX: usize = NODE_OPS_MAX;

/// Clients that the access list of one resource names; a list with more is refused.
pub const ACCESS_ENTRIES_MAX: usize = 256;

/// Bytes of a name in an access list; a longer one is refused. A DNS name has at most 253, a SPIFFE ID 2,048.
pub const ACCESS_NAME_BYTES_MAX: usize = 2048;

// An operation has at most a part for each MiB, one more for each range and one more for each segment.
const _: () = assert!(ASKED_MAX + OPERATION_BYTES_MAX / PAYLOAD_BYTES_MAX + 2 * SEGMENTS_MAX < ANSWERS_MAX);
const _: () = assert!(byway_reactor::limits::RECEIVE_MESSAGE_BYTES >= SMALL_BYTES_MAX + crate::wire::HEADER_BYTES);
// Over shared memory a connection has two.
const _: () = assert!(2 * (LANES_MAX + TURNED_AWAY_MAX) < byway_reactor::limits::RECEIVERS_MAX);
const _: () = assert!(CONTROL_FRAME_BYTES_MAX <= byway_reactor::limits::FRAME_BYTES_MAX);
