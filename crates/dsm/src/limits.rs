//! The bounds of a job's processes, and what happens at each. `byway_service::limits` has those of the protocol.

use std::time::Duration;

/// Bytes of a page: the kernel's. Where it has others, [`AreaError::PageSize`](crate::AreaError::PageSize).
pub const PAGE_BYTES: usize = 4096;

/// Where the area of a job's segments begins, in every process: far from where Linux puts programs, libraries, heaps and stacks. If
/// something else lies there, joining fails with [`AreaError::Address`](crate::AreaError::Address).
pub const AREA_ADDRESS: usize = 0x1000_0000_0000;

/// Bytes of the area, if the job says nothing else. Pages that no process touches take no memory.
pub const AREA_BYTES_DEFAULT: u64 = 16 << 30;

/// How long a process waits for the others to join; then joining fails.
pub const JOIN_TIME_MAX: Duration = Duration::from_secs(30);

/// The pause before a process looks again whether another one listens.
pub const JOIN_PAUSE: Duration = Duration::from_millis(5);

/// How long a process that leaves drives its sessions, for its last messages to go out.
pub const LEAVE_TIME_MAX: Duration = Duration::from_secs(2);

/// How long a process whose job is over tries to tell the others why.
pub const LAST_WORDS_TIME_MAX: Duration = Duration::from_millis(200);

/// Messages that a peer may send before the pager has taken them.
pub const MESSAGES: u16 = 256;

/// Frames of a process's node, in bytes.
pub const NODE_FRAME_BYTES: usize = 16 << 20;

/// The keep-alive of a job that says nothing else: a process of which nothing has come for 1.5 times as long ends the job.
pub const KEEP_ALIVE_DEFAULT: Duration = Duration::from_secs(10);

/// The shortest keep-alive. A busy machine may keep a pager from running for a while.
pub const KEEP_ALIVE_MIN: Duration = Duration::from_secs(1);

/// The longest keep-alive: a day, for processes that are stopped in a debugger.
pub const KEEP_ALIVE_MAX: Duration = Duration::from_secs(86_400);

/// How long another process waits for a page that a device has pinned; then the job ends.
pub const PIN_TIME_MAX: Duration = Duration::from_secs(30);

/// The pause before a pinned page is tried again.
pub const PIN_PAUSE: Duration = Duration::from_millis(1);

/// Connections that another process ends before they are sessions, while it goes on listening, until it is taken for one without the job's key. Of a
/// process that ends meanwhile there is one, or a few more while the kernel ends it.
pub const CUT_CONNECTS_MAX: u32 = 20;

/// Connections of a job's start whose process has not yet said that it is of the job; a further one waits to be accepted.
pub const STRANGERS_MAX: usize = 64;

/// How long the processes of a job may take to end after one has failed; then they are killed.
pub const END_TIME_MAX: Duration = Duration::from_secs(2);

/// Bytes of what is told to another machine of a process: environment, program and arguments.
pub const ORDER_BYTES_MAX: usize = 1 << 20;

/// How long the output of processes that have ended is waited for, where a child of theirs that left its process group holds it open.
pub const OUTPUT_TIME_MAX: Duration = Duration::from_millis(500);

/// Bytes of a line of a process's output that is passed on with its rank; a longer one is cut into several.
pub const OUTPUT_LINE_BYTES_MAX: usize = 64 << 10;

/// Pages of which a process counts the faults one by one for a report; those of further pages are counted together.
pub const REPORT_PAGES_COUNTED_MAX: usize = 1 << 18;

/// Pages that a process tells its launcher of for a report: those with the most faults.
pub const REPORT_PAGES_TOLD_MAX: usize = 1 << 14;

/// Pages that a report shows.
pub const REPORT_PAGES_SHOWN: usize = 20;

/// Parts of shared memory that can have names in a report; further ones have none.
pub const NAMES_MAX: usize = 1024;

/// Bytes of such a name; of a longer one the end is kept.
pub const NAME_BYTES_MAX: usize = 48;

/// Names that a report shows for a page.
pub const REPORT_NAMES_SHOWN: usize = 3;

/// Bytes of a report that are written at a time: a pipe takes as many whole.
pub const REPORT_CHUNK_BYTES: usize = 4096;

/// Pages that a process tells `byway dsm top` of: those with the most faults.
pub const LIVE_PAGES_TOLD_MAX: usize = 256;

/// Bytes that a process tells at most: 256 segments and 1,024 names have some 400 KiB.
pub const LIVE_ANSWER_BYTES_MAX: u64 = 1 << 20;

/// How long a process may take to tell, and the one that asks to read.
pub const LIVE_TIME_MAX: Duration = Duration::from_secs(1);

/// Processes that wait until they are told; a further one waits to connect.
pub const LIVE_BACKLOG: i32 = 16;

/// The pause before a process takes the next one that asks, when it has no descriptor left.
pub const LIVE_ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Bytes of a checkpoint that are written, or read, at a time.
pub const CHECKPOINT_BUFFER_BYTES: usize = 1 << 20;

/// Bytes of the program that are read at a time for its checksum.
pub const PROGRAM_READ_BYTES: usize = 1 << 20;
