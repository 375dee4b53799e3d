//! The bounds of the services, and what happens at each.

use std::time::Duration;

/// The longest piece of a read or write that goes to a store at once. Longer requests are cut: pieces of this size stay
/// in a core's cache between the disk's copy and the wire's, and a slow disk does not hold back the first bytes.
pub const PIECE_BYTES_MAX: usize = 256 << 10;

/// About the bytes of a read that are sent together while its disk still reads the rest (docs/decisions/0027 compares lengths).
pub const SLICE_BYTES: u64 = 256 << 10;

/// The longest piece of a write to a store in memory: long enough to wait for, short enough that most of a payload is
/// received straight into the store, which takes whole pages of what is here.
pub const MEMORY_PIECE_BYTES: usize = 16 << 10;

/// Frames that one read may hold, in bytes; one that needs more is asked for in parts
/// ([`Step::InParts`](crate::block::Step::InParts)).
pub const READ_FRAME_BYTES_MAX: usize = 8 << 20;

/// Memory of one disk's device that a loop stages in, in bytes: as much as its longest read, and with a controller's usual
/// 64 MiB enough for eight loops. A loop that can have less has less; requests that find none free stage in main memory.
pub const DEVICE_POOL_BYTES: usize = 8 << 20;

/// The longest request that an engine takes; longer ones are `TooLong`.
pub const REQUEST_BYTES_MAX: u64 = 32 << 20;

/// Extents in one answer; a longer list ends early, as all its users allow.
pub const EXTENTS_MAX: usize = 4096;

/// Stripes of a request that asks for extents; the answer ends there.
pub const EXTENT_PIECES_MAX: usize = 64;

/// Earlier sizes of a volume whose files a loop keeps for replies that are on their way; a reply of an older size ends its
/// connection.
pub const RETIRED_SIZES_MAX: usize = 8;

/// Requests of one loop in flight at the stores, above which those that take no frame (flushes, trims, lists of extents)
/// wait: reads and writes are bounded by the pool.
pub const JOBS_MAX: usize = 4096;

/// Lists of extents that a loop has in flight; more wait. Each may take 64 KiB of heap memory.
pub const LISTS_MAX: usize = 64;

/// Slow requests that a loop keeps until they are taken; then the oldest goes.
pub const SLOW_MAX: usize = 64;

/// The store's failures of a volume are logged once in this time; the next line says how many were not.
pub const FAILURE_LOG_PAUSE: Duration = Duration::from_secs(1);

/// How often requests on a volume look whether the last request on the volume that it replaced has ended.
pub const REPLACED_PAUSE: Duration = Duration::from_millis(2);

/// Paths of a stripe.
pub const STRIPE_PATHS_MAX: usize = 64;

/// Open file descriptions of each file of a volume that is written to: as many syncs of it, on all loops together, wait for no other.
pub const SYNC_DESCRIPTIONS: usize = 16;
/// The same for all files of a stripe together; each file has one at least.
pub const SYNC_DESCRIPTIONS_MAX: usize = 64;
/// No more are opened where this share of the process's file descriptors (`RLIMIT_NOFILE`) is used: the rest is for clients.
pub const SYNC_DESCRIPTORS_SHARE: u64 = 4;

const _: () = assert!(PIECE_BYTES_MAX <= byway_reactor::limits::FRAME_BYTES_MAX);

/// Requests that a client takes before it has answered; more are handed back.
pub const CLIENT_REQUESTS_MAX: usize = 4096;

/// Bytes of acknowledged, unflushed writes that a client keeps. At half it flushes by itself; at the bound writes wait.
pub const CLIENT_UNFLUSHED_BYTES: usize = 16 << 20;

/// How long a client tries to reach its server before all requests fail; and how long writes wait for a server that cannot
/// flush, when the client keeps as many as it may.
pub const CLIENT_LOST_AFTER: Duration = Duration::from_mins(1);

/// How long a call may take while its server is alive; then its session is ended and the call sent again in the next.
pub const CALL_TIME_MAX: Duration = Duration::from_mins(2);

/// The same for calls that may have much to do, for a device that writes zeroes or a cache that is full of dirty pages:
/// ending the session would only start them again.
pub const LONG_CALL_TIME_MAX: Duration = Duration::from_hours(1);

/// How long a client waits for the list of a server's volumes.
pub const LIST_TIME_MAX: Duration = Duration::from_secs(30);

/// Volumes that a client lists; the list ends there.
pub const LISTED_VOLUMES_MAX: usize = 4096;

/// The first pause before a client connects again; each next one is twice as long.
pub const RECONNECT_MIN: Duration = Duration::from_millis(5);

/// The longest pause before a client connects again.
pub const RECONNECT_MAX: Duration = Duration::from_secs(1);

/// The first pause of a client whose request was answered `Busy`; each next one is twice as long.
pub const BUSY_PAUSE_MIN: Duration = Duration::from_millis(2);

/// The longest pause of a client whose requests are answered `Busy`.
pub const BUSY_PAUSE_MAX: Duration = Duration::from_millis(100);

/// The longest read or write of one call: a frame. Clients cut longer ones.
pub const CALL_BYTES_MAX: usize = byway_reactor::limits::FRAME_BYTES_MAX;

/// Calls that each session may have in flight; one that has more is closed.
pub const CALLS_PER_SESSION: u16 = 256;

/// Notices that a server may send a client before it hears that some were taken; what it has to say meanwhile it says later.
pub const NOTICES_PER_SESSION: u16 = 16;

/// Volumes that one session may open; more are refused.
pub const HANDLES_MAX: usize = 64;

/// Bytes of small writes that a server keeps on the heap while frames are out; more are answered `Busy`, and sent again.
pub const WAITING_BYTES_MAX: usize = 16 << 20;

/// A pool of which more than this share is free is not short of frames but cut up, by connections that are idle: requests
/// are done in smaller pieces, and wait for the end of no other.
pub const FREE_SHARE_MIN: usize = 4;

/// Bytes of frames that pulled writes of one loop may take, as a share of the pool: the rest is for reads and lanes.
pub const PULL_SHARE_MAX: usize = 2;

/// Asks for one object of [`coherence`](crate::coherence) that wait; a further one is refused with `Full`.
pub const COHERENCE_ASKS_MAX: usize = 1024;

/// One of so many of the process's file descriptors (`RLIMIT_NOFILE`) is never for files of shares: connections and volumes need some.
pub const FILE_DESCRIPTORS_LEFT: u64 = 4;

/// Of the descriptors for files of shares, so many are for calls that have begun: a call that could not hold the file that it makes
/// would leave an empty one. Each thread of a loop takes two at most.
pub const FILE_DESCRIPTORS_SPARE: u64 = 512;

/// Files and directories that one session may hold nodes of; the look-up of a further one is refused. Each takes a descriptor.
pub const FILE_NODES_MAX: usize = 1 << 18;

/// A client has the server forget some nodes when it holds more than so many, though its kernel still knows them. The rest is for
/// listings and look-ups under way.
pub const FILE_NODES_HELD_MAX: usize = FILE_NODES_MAX / 4 * 3;

/// Nodes that a client has the server forget at once: one message names as many.
pub const FILE_NODES_RELEASED_MAX: usize = 1000;

/// Files and directories that one session may have open; a further one is refused.
pub const FILE_HANDLES_MAX: usize = 1 << 14;

/// Locks that one session may hold or wait for; a further one is refused.
pub const FILE_LOCKS_MAX: usize = 4096;

/// Answers that a server of files keeps for a client: as many calls that must not be done twice can the client have under way. Each is of
/// at most 16 KiB.
pub const FILE_SLOTS: u8 = 64;

/// Bytes of payloads of these answers, for one client; a call whose answer is longer fails with `EIO` if it comes again. Mounts list directories
/// in pieces of 16 KiB by sixteen threads; beside these, each slot has room for the attributes that a change has left.
pub const FILE_REPLY_BYTES_MAX: usize = (256 << 10) + FILE_SLOTS as usize * 256;

/// How long a server of files keeps what a client holds after its session has ended; and how long a new server process gives locks only to
/// clients that had them before. The same for all servers and clients: clients reckon with it.
pub const FILE_GRACE: Duration = Duration::from_secs(15);

/// Clients without a session whose files and locks a server keeps; one more, and those of the one that has been away longest are let go.
pub const FILE_CLIENTS_AWAY_MAX: usize = 1024;

/// Clients with locks or leases that a server reads from a share's list at its start; with more of them it waits as if it had no list,
/// and then removes those that have not come back.
pub const FILE_CLIENTS_LISTED_MAX: usize = 4096;

/// Calls of one loop that its file workers have not ended; a further one is answered `Busy`.
pub const FILE_JOBS_MAX: usize = 4096;

/// Threads of one loop for calls on files that may block.
pub const FILE_WORKERS_MAX: usize = 8;

/// Of these, threads that sync file systems at a time, each another one. A sync may take minutes, or hang with its disk.
pub const FILE_SYNCS_MAX: usize = 4;
const _: () = assert!(FILE_SYNCS_MAX < FILE_WORKERS_MAX);

/// The longest read, write or listing of one call, in bytes: a frame.
pub const FILE_TRANSFER_MAX: usize = byway_reactor::limits::FRAME_BYTES_MAX;

/// Bytes that one `CopyRange` copies at most, so that no worker is held for long; the client asks again.
pub const FILE_COPY_MAX: u64 = 64 << 20;

/// Bytes of the longest name of a file, as Linux has it.
pub const FILE_NAME_MAX: usize = 255;

/// Bytes of the longest target of a symbolic link.
pub const LINK_TARGET_MAX: usize = 4095;

/// Further groups of a user in one call; a client leaves the rest out.
pub const CALL_GROUPS_MAX: usize = 64;

/// Bytes of a map of users (`users=map:FILE`); a longer one is refused.
pub const FILE_USER_MAP_BYTES_MAX: usize = 1 << 20;

/// Users in such a map; one with more is refused.
pub const FILE_USERS_MAPPED_MAX: usize = 16_384;

/// How long a call on a file may take while the server is alive; then it fails.
pub const FILE_CALL_TIME_MAX: Duration = Duration::from_mins(2);

/// The same for calls that write out, copy or free much: `Sync`, `SyncShare`, `Allocate`, `CopyRange`, `SetAttributes`.
pub const FILE_LONG_CALL_TIME_MAX: Duration = Duration::from_mins(30);

/// How long a client of files tries to reach its server before calls fail with `EIO`.
pub const FILE_LOST_AFTER: Duration = Duration::from_mins(1);

/// Records of one kind (files that the kernel knows, open files, locks) in the state that a client hands over to another process. A client
/// with more is not handed over.
pub const FILE_STATE_RECORDS_MAX: usize = 1 << 22;

/// Changed files without a sync for which a client of files remembers the server process that has taken the changes. Files in use
/// are remembered beyond it.
pub const FILE_UNSYNCED_MAX: usize = 1 << 18;

/// How long a client of files may use its leases after the last message that the server has of it.
pub const FILE_LEASE_TIME: Duration = Duration::from_secs(15);

/// How long a client uses its leases after it has sent the last message that was answered: less, for clocks of different speed.
pub const FILE_LEASE_USE: Duration = Duration::from_secs(14);
const _: () = assert!(FILE_LEASE_USE.as_nanos() < FILE_LEASE_TIME.as_nanos());

/// How long attributes may be on their way from a mount to its kernel, which counts their time from when it takes them. Later ones are
/// invalidated.
pub const FILE_ATTRIBUTES_LATE_MAX: Duration = Duration::from_millis(500);
const _: () = assert!(FILE_LEASE_USE.as_millis() + FILE_ATTRIBUTES_LATE_MAX.as_millis() < FILE_LEASE_TIME.as_millis());

/// A client with leases that says nothing else renews them so often.
pub const FILE_LEASE_RENEWAL: Duration = Duration::from_secs(5);

/// Leases of one session of a share. Without a lease everything works, and nothing is cached.
pub const FILE_LEASES_MAX: usize = 1 << 16;

/// Files of a share with leases or changes under way, of all sessions.
pub const FILE_LEASED_FILES_MAX: usize = 1 << 20;

/// Files of a share without either, whose last change is remembered exactly.
pub const FILE_CHANGES_REMEMBERED: usize = 1 << 12;

/// Names that a client of files keeps under its leases.
pub const FILE_ENTRIES_CACHED_MAX: usize = 1 << 18;

/// Recalls that wait for a session to fetch them; with one more it is ended. A session that forgets files gets new leases, so that these can be
/// more than it has leases.
pub const FILE_RECALLS_WAITING_MAX: usize = 2 * FILE_LEASES_MAX;

/// How long a peer gets no leases after one of its sessions was ended because it did not return one: each time, a change has waited.
pub const FILE_LEASES_REFUSED: Duration = Duration::from_mins(5);

/// Peers that get no leases; one more, and the first to get leases again does.
pub const FILE_PEERS_REFUSED_MAX: usize = 1024;

/// How long after a recall a mount opens a file past the kernel's cache. While another client changes it again and again, the kernel
/// would drop what it has just read, and Linux does not take the answer to a GETATTR that an invalidation has overtaken.
pub const FILE_CONTENDED_TIME: Duration = Duration::from_secs(1);

/// How long a mount's kernel may take to set a file's size after it was answered that it has changed. A write by a program says that it
/// has done so. A truncation waits as long for a read of the file's pages that is under way then.
pub const FILE_RESIZE_SETTLED: Duration = Duration::from_millis(20);

/// How long a read for the kernel's cache is made again that ends before the size that the kernel knows, while the mount itself changes
/// the size.
pub const FILE_RESIZE_TIME_MAX: Duration = Duration::from_secs(1);

/// The same while other mounts may change it. Not longer: their changes wait for this mount's leases, and the return of these for reads.
pub const FILE_EARLY_END_TIME_MAX: Duration = Duration::from_millis(200);
const _: () = assert!(FILE_RESIZE_SETTLED.as_nanos() < FILE_RESIZE_TIME_MAX.as_nanos());

/// What is kept under a file's lease of rights that users have and of extended attributes that the file does not have.
pub const FILE_FACTS_CACHED_MAX: usize = 16;

/// Leases that one answer recalls.
pub const FILE_RECALLS_MAX: usize = 256;

/// Bytes of each of the calls that a long read into a caller's memory consists of: what a core's cache holds while it is copied.
pub const FILE_READ_PIECE_BYTES: usize = 256 << 10;
const _: () =
    assert!(FILE_READ_PIECE_BYTES > byway_fabric::limits::SMALL_BYTES_MAX && FILE_READ_PIECE_BYTES < FILE_TRANSFER_MAX);

/// The longest file, in bytes, that a mount reads with the call that opens it: as many as the kept answers of all slots have room for.
pub const FILE_OPEN_BYTES_MAX: usize = 4 << 10;
const _: () = assert!(FILE_OPEN_BYTES_MAX * FILE_SLOTS as usize <= FILE_REPLY_BYTES_MAX);

/// Files whose bytes came with the call that opened them, and that the kernel has not read yet; of further ones they are dropped.
pub const FILE_OPEN_BYTES_FILES_MAX: usize = 64;

/// A mount whose server has no room asks again until so long after it has removed a file, whose blocks may be freed late.
pub const FILE_FREED_AFTER: Duration = Duration::from_millis(250);

/// Files that a mount has had the server close and whose answer it has not looked at; with more, it waits for the oldest.
pub const FILE_CLOSES_MAX: usize = 16;

/// Buffers of [`FILE_TRANSFER_MAX`] that a client of files keeps for its next large reads and writes.
pub const FILE_BUFFERS_MAX: usize = 16;

/// Processes of a job with shared memory: a set of them is 64 bits.
pub const DSM_RANKS_MAX: usize = 64;

/// Pages of a job's area; a message about a page beyond is malformed, and a larger area is refused.
pub const DSM_PAGES_MAX: u64 = 1 << 24;

/// Segments of a job; a further one is refused.
pub const DSM_SEGMENTS_MAX: usize = 256;

/// Bytes of a segment's name.
pub const DSM_NAME_BYTES_MAX: usize = 64;

/// Calls of a process that wait for locks, and for segments, and its barriers; a further one is refused.
pub const DSM_CALLS_MAX: usize = 1 << 16;

/// Pages of a process of which it keeps twins (release consistency), 64 MiB of them; before a further one, the difference of the oldest is sent.
pub const DSM_TWINS_MAX: usize = 1 << 14;

/// Pages of one fetch, 1 MiB of them; a longer one is refused.
pub const DSM_FETCH_PAGES_MAX: usize = 256;

/// Neighbouring pages that a rank takes from its program, or gives to it, at once: 256 KiB of them. The program's faults wait as long.
pub const DSM_RUN_PAGES_MAX: usize = 64;

/// Bytes of a message's payload: as many as a node's message has. More messages go in several batches.
pub const DSM_PAYLOAD_BYTES_MAX: usize = byway_fabric::limits::SMALL_BYTES_MAX;

/// Write notices of one message; more go in several.
pub const DSM_NOTICES_PER_MESSAGE: usize = 1024;

/// Bytes of a slab of lent memory: few enough that little is lost to what a borrower leaves unused, so many that a borrower of 4 GiB
/// has each of its slabs mapped over shared memory ([`LOANS_MAX`](byway_fabric::limits::LOANS_MAX)).
pub const SLAB_BYTES: usize = 64 << 20;

/// Slabs of one borrower's session; more are refused. Each has two windows of the loop, and an entry in the answer to a renewal when it is taken
/// back: all of them fit into one message.
pub const SLABS_PER_SESSION_MAX: usize = 1024;
const _: () = assert!(SLABS_PER_SESSION_MAX * 16 <= byway_fabric::limits::SMALL_BYTES_MAX);

/// Calls of leases that a session may have in flight.
pub const LEASE_CALLS_PER_SESSION: u16 = 16;

/// Pages that a pager lets out of their program at a time. A command costs two wake-ups (50 to 120 us) and 4 us for each page, and faults of the
/// program wait for its end.
pub const PAGER_MOVES_MAX: usize = 64;

/// Pages below its budget that a pager aims for, so that a page that comes finds room; an eighth of a small budget. Moves begin when half of
/// them are used up.
pub const PAGER_HEADROOM_PAGES: usize = 256;

/// Frames that pages on their way out leave for those that come.
pub const PAGER_FRAMES_KEPT: usize = 32;

/// Pages of zeroes that come at once where a program uses new memory in order.
pub const PAGER_AHEAD_PAGES: u64 = 16;

/// Pages that are brought ahead of a program that was seen to go through its memory in equal steps, at first.
pub const PAGER_WINDOW_MIN: u64 = 4;

/// Pages that are brought ahead at most, 256 KiB: beyond, a page costs what the wire and the kernel take for it, and wake-ups nothing.
pub const PAGER_WINDOW_MAX: u64 = 64;

/// Streams of faults that are followed in a program.
pub const PAGER_STREAMS_MAX: usize = 16;

/// How often a borrower tells a lender that its leases are in use. The answer says which slabs the lender takes back, so this is also how
/// long a borrower may not know of it.
pub const RENEW_EVERY: Duration = Duration::from_secs(1);

/// How long a lender may leave a renewal without an answer before its borrower gives it up. A thread that waits for a page of that
/// lender alone waits so long.
pub const LENDER_SILENCE_MAX: Duration = Duration::from_secs(5);

/// How long a lender may answer nothing, with an operation under way, before its borrower prefers other copies and asks them for what
/// it waits for. A page's get takes 0.1 ms; a machine that is short of CPU time lets a session wait for tens of milliseconds.
pub const LENDER_SLOW: Duration = Duration::from_millis(500);

/// How long a borrower may leave its leases without a renewal before the lender takes them back. Longer than [`LENDER_SILENCE_MAX`] and two
/// renewals, so that a borrower gives a lender up before the lender gives it up.
pub const LEASE_KEEP_ALIVE: Duration = Duration::from_secs(10);

const _: () = assert!(
    LEASE_KEEP_ALIVE.as_millis() > LENDER_SILENCE_MAX.as_millis() + 2 * RENEW_EVERY.as_millis(),
    "a lender outlasts its borrowers"
);

/// How long a borrower lets a lender be that had no slab for it, or no session.
pub const LENDER_PAUSE: Duration = Duration::from_secs(1);

/// Pages that a borrower copies between lenders at a time, in the background: each holds a frame. At 16 a gigabyte is copied in about 10 s
/// over a path of 0.5 ms, and a page that its program waits for goes behind 64 KiB at most.
pub const POOL_COPIES_MAX: usize = 16;

/// Rows of pages with parity that a borrower updates at a time. A batch of [`PAGER_MOVES_MAX`] pages is as many rows.
pub const POOL_ROW_UPDATES_MAX: usize = PAGER_MOVES_MAX / 4;

/// Rows from which a borrower computes pages that threads wait for, at a time.
pub const POOL_ROW_GETS_MAX: usize = 16;

/// Rows with parity under way, each with four frames: [`POOL_COPIES_MAX`] are rebuilt or moved at a time. Each kind has its own, so that
/// none waits for updates that wait for a lender.
pub const POOL_ROWS_MAX: usize = POOL_ROW_UPDATES_MAX + POOL_ROW_GETS_MAX + POOL_COPIES_MAX;

/// How long a borrower has to move the pages of a slab that its lender takes back, from when it is told. 16,384 pages take 3 s at the
/// rate of [`POOL_COPIES_MAX`] over a path of 3 ms.
pub const TAKE_BACK_NOTICE: Duration = Duration::from_secs(5);

/// How long a lender that is told to end lets its borrowers move their pages to others: 28 GiB at 1 GiB/s.
pub const LENDER_DRAIN_TIME: Duration = Duration::from_secs(28);

/// How long borrowers above their fair share get no slab after a borrower below has asked in vain: the notice, and a renewal on each side of it.
pub const CONTENTION_TIME: Duration = Duration::from_secs(8);

/// How long before a slab closes that its lender takes back a borrower uses it no more: what is under way there ends first.
pub const TAKE_BACK_MARGIN: Duration = Duration::from_millis(500);

/// How often a lender with a guard looks at its machine's memory.
pub const GUARD_LOOK: Duration = Duration::from_millis(500);

/// Share of time, in percent over 10 s, in which all of a machine's tasks wait for memory (`full avg10` of /proc/pressure/memory) above which
/// a lender with a guard takes slabs back.
pub const STALLED_PERCENT_MAX: f64 = 5.0;

/// Bytes that a lender takes back at a time while tasks wait for memory.
pub const STALLED_STEP_BYTES: u64 = 4 * SLAB_BYTES as u64;

/// Borrowers that a lender's status names, the largest.
pub const BORROWERS_REPORTED_MAX: usize = 16;
