//! The bounds of the program's input, and what happens at each.

use std::time::Duration;

/// Bytes of one volume specification; a longer one is refused before it is parsed.
pub const SPEC_BYTES_MAX: usize = 64 << 10;

/// Volumes of one node; a configuration with more is refused.
pub const VOLUMES_MAX: usize = 1024;

/// Shares of one node; a configuration with more is refused.
pub const SHARES_MAX: usize = 1024;

/// Percent of its memory that a machine which lends keeps available to itself, unless `--lend` says otherwise.
pub const LEND_GUARD_PERCENT: u64 = 5;

/// What it keeps at least.
pub const LEND_GUARD_BYTES_MIN: u64 = 512 << 20;

/// Threads of a mount: requests that are under way at its server. Half of them at most are changes, which may wait for other mounts.
pub const MOUNT_THREADS: usize = 16;

/// Threads of a mount that have the kernel drop stale pages before it is told a file's attributes. They wait for reads under way.
pub const MOUNT_DROP_THREADS: usize = 2;

/// The longest time for which the kernel of a mount may be told to use names without asking.
pub const MOUNT_ENTRY_TIMEOUT_MAX: Duration = Duration::from_mins(1);

/// How long the answer with a file's size waits for a lease, while the file is read through the kernel's cache: for as long as other
/// mounts change it. Later the kernel gets a size that may change before it has read by it.
pub const MOUNT_SURE_SIZE_TIME_MAX: Duration = Duration::from_secs(1);

/// Bytes that the kernel reads ahead of a program that reads a file of a mount from start to end: requests of 1 MiB, some at once.
/// It is also what a fault of a mapped file may bring.
pub const MOUNT_READ_AHEAD_BYTES: u64 = 4 << 20;

/// Locks that the programs of a mount wait for; a further wait is refused with `ENOLCK`. Each has a thread, and takes one of the
/// session's calls.
pub const MOUNT_LOCKS_WAITING_MAX: usize = 64;

/// Threads of a mount's process that answer on its socket: one may hand the mount over while another one tells how it is.
pub const MOUNT_CONTROL_THREADS: usize = 2;

/// Commands that a mount's process tells of the mount's end.
pub const MOUNT_ENDS_AWAITED_MAX: usize = 16;

/// Bytes of a question to a mount's process, and of its answer.
pub const MOUNT_ANSWER_BYTES_MAX: u64 = 64 << 10;

/// Sockets of mounts that `byway mount --list` looks at.
pub const MOUNTS_LISTED_MAX: usize = 1024;

/// Bytes of the state of a mount that is handed over: some 100 for each file that its kernel knows. A larger one is not handed over.
pub const MOUNT_STATE_BYTES_MAX: usize = 1 << 30;

/// Descriptors of a mount that is handed over: its channels and its state.
pub const MOUNT_HANDOVER_FDS_MAX: usize = byway_frontend::limits::FUSE_THREADS_MAX + 1;

/// Listeners of one kind (native, NBD); a configuration with more is refused.
pub const LISTENERS_MAX: usize = 64;

/// Ranges of addresses of one `allow` list; a configuration with more is refused.
pub const ALLOW_MAX: usize = 256;

/// Paths of one stripe; more are refused.
pub const STRIPE_PATHS_MAX: usize = 64;

/// The smallest chunk of a stripe: a page, so that direct I/O never has to cut a block.
pub const STRIPE_CHUNK_BYTES_MIN: u64 = 4 << 10;

/// The largest chunk of a stripe; above it there is nothing left to spread.
pub const STRIPE_CHUNK_BYTES_MAX: u64 = 64 << 20;

/// Rules of one fault store; more are refused.
pub const FAULT_RULES_MAX: usize = 16;

/// Fault stores inside fault stores; deeper is refused, so that the parser's stack is bounded.
pub const FAULT_DEPTH_MAX: usize = 4;

/// The least rate of a volume, in bytes per second; less would be a slip of the unit.
pub const RATE_BYTES_MIN: u64 = 1 << 10;

/// Bytes of a description: NBD's limit on strings (4096, NBD protocol, "Terms and values").
pub const DESCRIPTION_BYTES_MAX: usize = 4096;

/// What sizes of memory and null volumes are multiples of: the sector of every NBD client.
pub const SECTOR_BYTES: u64 = 512;

/// The largest volume: offsets are signed in the kernel.
pub const VOLUME_BYTES_MAX: u64 = i64::MAX as u64 / SECTOR_BYTES * SECTOR_BYTES;

/// Bytes of a configuration file; a longer one is refused before it is parsed.
pub const CONFIG_BYTES_MAX: u64 = 4 << 20;

/// Worker threads (event loops) of a node; more are refused.
pub const THREADS_MAX: u16 = 256;

/// The smallest pool of frames of an event loop: less starves a single connection of depth 32 at 64 KiB.
pub const FRAME_BYTES_MIN: u64 = 4 << 20;

/// The most memory for frames that may be asked for: the event loops share it.
pub const FRAME_BYTES_MAX: u64 = byway_reactor::limits::POOL_BYTES_MAX as u64;

/// The smallest limit on mapped files: the program's own code counts, and less would let go of each range as soon as it
/// was sent.
pub const MAPPED_BYTES_MIN: u64 = 16 << 20;

/// Bytes that a copy holds in memory at once, whatever `--depth` and `--chunk` say: the depth is cut to fit.
pub const COPY_BYTES_MAX: u64 = 256 << 20;

/// Threads that copy files of shares, each with one call under way: as many changing calls a client has slots for.
pub const COPY_TREE_THREADS_MAX: usize = 64;

/// Entries of a tree that wait to be copied; then the walk waits. On this machine's side each may hold a directory open.
pub const COPY_TREE_QUEUE_MAX: usize = 256;

/// Directories above an entry that is copied; deeper ones are refused by name. On this machine's side each is open.
pub const COPY_TREE_DEPTH_MAX: usize = 512;

/// Times that an entry is tried while calls fail because a server process ended.
pub const COPY_TREE_ATTEMPTS_MAX: usize = 3;

/// Entries that were not copied and are named; further ones are counted.
pub const COPY_TREE_FAILURES_SHOWN_MAX: u64 = 100;

/// Bytes of an extended attribute, and of the list of their names: Linux's limit (`XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
pub const XATTR_BYTES_MAX: usize = 64 << 10;

/// Extents that `byway info` counts; then it says that there are more.
pub const INFO_EXTENTS_MAX: u64 = 1 << 22;

/// Bytes of unflushed writes that a copy to a native volume keeps, to send them again to a server that was restarted. At
/// half of it the client flushes by itself.
pub const COPY_UNFLUSHED_BYTES_MAX: usize = 64 << 20;

/// Characters of a volume's name in the name of its resume file; a longer name is cut, and told apart by a checksum.
pub const RESUME_NAME_CHARS_MAX: usize = 160;

/// Bytes of a resume file that a copy reads back; a longer one is taken for damaged and the copy starts over.
pub const RESUME_BYTES_MAX: u64 = 1 << 30;

/// How long an address that is in use is waited for; then it is an error. On a busy machine the kernel ended the I/O of killed nodes after
/// more than 3 s (2 CPUs, load 10).
pub const LISTEN_WAIT: Duration = Duration::from_secs(10);

/// Slow operations that a node remembers; then the oldest goes.
pub const SLOW_OPERATIONS_MAX: usize = 256;

/// Bytes of a message between a node and its privileged opener: a path, and what JSON adds.
pub const OPENER_MESSAGE_BYTES_MAX: usize = 32 << 10;

/// Bytes of the reason why the privileged opener refuses something; the rest is cut. JSON makes six of one at most.
pub const OPENER_REASON_BYTES_MAX: usize = 4 << 10;

/// Bytes of a request on the control socket; a longer one ends its connection.
pub const CONTROL_REQUEST_BYTES_MAX: u64 = 4 << 10;

/// Peers of byway's own protocol that a node tells of by name, in `/metrics` and `byway ctl status`: the busiest. The others
/// are in the sums. Addresses come and go; what a scraper keeps is bounded by this and by how often they change.
pub const PEERS_REPORTED_MAX: usize = 16;

/// Lines of the log that one place in the code may write in a second, for each volume that they name; further ones are left
/// out, and counted.
pub const LOG_LINES_PER_SECOND_MAX: u32 = 20;

/// Threads that answer on the control socket, each one connection at a time; further ones wait in the kernel's queue.
pub const CONTROL_THREADS: usize = 8;

/// Memory of the loop of an attached volume, in bytes; when it is used up, requests wait in the kernel.
pub const ATTACH_FRAME_BYTES: usize = 64 << 20;

/// Requests of the kernel that an attached volume takes before it looks at its server again.
pub const ATTACH_REQUESTS_PER_TURN: usize = 64;

/// How long the requests of an attached volume wait for a server that is gone; then they fail, as a broken disk's do.
pub const ATTACH_LOST_AFTER: Duration = Duration::from_mins(10);

/// Files in the folder of attached volumes that are looked at.
pub const ATTACHMENTS_MAX: usize = 4096;

/// Shares that a program of `byway run` uses; each call on a path compares it with all prefixes.
pub const RUN_MAPS_MAX: usize = 16;

/// The least memory that a program of `byway far` keeps on this machine; less is refused.
pub const FAR_LIMIT_BYTES_MIN: u64 = 16 << 20;
