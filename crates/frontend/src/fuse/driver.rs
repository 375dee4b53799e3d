//! Threads that read the requests of a mount and hand them to a file system.

mod buffer;
mod handoff;
mod pausing;

use std::io::{self, IoSliceMut};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::abi::{Attr, FileLock, GetXattrOut, OpenOut, SeekOut, StatFsOut, WriteOut};
use super::channel::{Channel, Received};
use super::notify::{self, Notifier};
use super::reply::{self, Directory, Entry};
use super::request::{Operation, Parsed, RequestError, parse};
use super::session::{Reading, Session, Step, Terms, Wishes};
use crate::limits::FUSE_THREADS_MAX;
use buffer::{Buffer, Pool};
use handoff::Handoff;
pub use pausing::{Control, Handover, PauseError};
use pausing::{Kept, Reader};

/// What serves a mount. Methods are called by several threads at once.
pub trait Filesystem: Send + Sync + 'static {
    /// Answers a request: by `reply`, now or later, from any thread. The thread that calls this reads no other request meanwhile.
    /// `ENOSYS` says for some operations that they are never to be asked again.
    fn request(&self, request: Request, reply: Reply);

    /// Whether [`Filesystem::request`] may return late for such a request, because it waits for other clients. Half of the driver's
    /// threads at most are in such a call; the others go on with requests that do not wait.
    fn may_wait(&self, operation: &Operation<'_>) -> bool {
        let _ = operation;
        false
    }

    /// A number of the file system's own for an operation, with which it is told of the answer ([`Answered::kind`]).
    fn kind_of(&self, operation: &Operation<'_>) -> u8 {
        let _ = operation;
        0
    }

    /// The kernel has the answer to a request. The thread that answers calls this.
    fn answered(&self, answered: Answered) {
        let _ = answered;
    }

    /// The kernel has forgotten so many look-ups of a node; at 0 it does not know it any more.
    fn forget(&self, node: u64, lookups: u64);

    /// The caller of the request of that [`Parsed::unique`], which waits for a lock, was interrupted: its reply should come soon,
    /// with `EINTR`. It may have come already. The driver calls this only when [`Filesystem::request`] has returned for it.
    fn interrupt(&self, unique: u64) {
        let _ = unique;
    }

    /// The driver pauses ([`Control::pause`]): until [`Filesystem::go_on`] a request that waits without a limit, such as one for a
    /// lock, is to be given back soon ([`Reply::keep`]).
    fn pause(&self) {}

    /// The driver goes on: requests that were given back come again.
    fn go_on(&self) {}

    /// The mount has ended; no request follows.
    fn ended(&self) {}
}

/// A request that was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answered {
    /// What [`Filesystem::kind_of`] has said of its operation.
    pub kind: u8,
    /// From when it was read to when the kernel had the answer. The time of one that was given back begins anew.
    pub time: Duration,
    /// What it failed with, if it did.
    pub error: Option<Errno>,
}

/// A request and the memory that it lies in. Payloads of writes begin at a page.
#[derive(Debug)]
pub struct Request {
    bytes: RequestBytes,
}

#[derive(Debug)]
enum RequestBytes {
    /// Long ones keep the buffer that they were read into.
    Whole(Buffer),
    Copied(Vec<u8>),
}

impl Request {
    /// A request of bytes as the kernel sends them, for programs and tests without a mount.
    ///
    /// # Errors
    /// See [`RequestError`].
    pub fn copied(bytes: &[u8]) -> Result<Self, RequestError> {
        parse(bytes)?;
        Ok(Self { bytes: RequestBytes::Copied(bytes.to_vec()) })
    }

    /// Node, caller, operation.
    pub fn parsed(&self) -> Parsed<'_> {
        parse(self.bytes()).expect("it was checked when it was read, and nobody has changed it")
    }

    fn bytes(&self) -> &[u8] {
        match &self.bytes {
            RequestBytes::Whole(buffer) => buffer.bytes(),
            RequestBytes::Copied(bytes) => bytes,
        }
    }
}

/// Why a mount has no driver.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// A channel for a thread.
    #[error("cannot open another channel of the mount: {0}")]
    Channel(io::Error),
    /// A thread.
    #[error("cannot start a thread for the mount: {0}; raise the limit of processes (ulimit -u)")]
    Thread(io::Error),
    /// What another process has handed over.
    #[error("the mount's process has handed over something that cannot be used: {0} (a bug of byway)")]
    Handover(&'static str),
}

/// The threads that serve a mount.
#[derive(Debug)]
pub struct Driver {
    threads: Vec<JoinHandle<()>>,
    shared: Arc<Shared>,
}

/// What the threads of a mount share with the replies.
struct Shared {
    filesystem: Arc<dyn Filesystem>,
    session: Mutex<Session>,
    /// A request was answered, or INIT was; or threads read again, or do not any more.
    changed: Condvar,
    /// One for each thread.
    channels: Vec<Arc<Channel>>,
    readers: Vec<Reader>,
    /// Requests that the file system has given back.
    kept: Mutex<Vec<Kept>>,
    /// Replies on their way to the kernel, whose requests are not under way any more.
    replying: AtomicUsize,
    pool: Arc<Pool>,
    handoff: Arc<Handoff>,
    /// The file system was told that the mount has ended.
    told_end: AtomicBool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("session", &self.session).finish_non_exhaustive()
    }
}

impl Shared {
    fn session(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests that the file system has given back. The session is locked before, if it is.
    fn kept(&self) -> MutexGuard<'_, Vec<Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the calling thread may read a request. False: another process reads them.
    fn begin_reading(&self, was_reading: bool) -> bool {
        let mut session = self.session();
        if was_reading {
            session.end_reader();
            if session.reading() != Reading::GoesOn {
                self.changed.notify_all();
            }
        }
        let waited = self.changed.wait_while(session, |session| session.reader_waits());
        let mut session = waited.unwrap_or_else(PoisonError::into_inner);
        let reads = session.reading() == Reading::GoesOn;
        if reads {
            session.begin_reader();
        }
        reads
    }

    /// A thread that was reading has seen the mount's end.
    fn ended(&self) {
        {
            let mut session = self.session();
            session.end_reader();
            session.end();
        }
        self.changed.notify_all();
        if !self.told_end.swap(true, Ordering::Relaxed) {
            self.filesystem.ended();
        }
        self.handoff.end();
    }
}

impl Driver {
    /// Serves a mount with so many threads, 1 to 64.
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn start(
        channel: Channel,
        filesystem: Arc<dyn Filesystem>,
        wishes: Wishes,
        threads: usize,
    ) -> Result<Self, DriverError> {
        let threads = threads.clamp(1, FUSE_THREADS_MAX);
        let mut channels = vec![Arc::new(channel)];
        for _ in 1..threads {
            channels.push(Arc::new(channels[0].another().map_err(DriverError::Channel)?));
        }
        Self::serve(channels, filesystem, Session::new(wishes), wishes.write_bytes_max)
    }

    fn serve(
        channels: Vec<Arc<Channel>>,
        filesystem: Arc<dyn Filesystem>,
        session: Session,
        write_bytes_max: u32,
    ) -> Result<Self, DriverError> {
        let threads = channels.len();
        let shared = Arc::new(Shared {
            handoff: Handoff::new(threads / 2),
            filesystem,
            session: Mutex::new(session),
            changed: Condvar::new(),
            readers: (0..threads).map(|_| Reader::default()).collect(),
            channels,
            kept: Mutex::default(),
            replying: AtomicUsize::new(0),
            pool: Arc::new(Pool::new(write_bytes_max as usize)),
            told_end: AtomicBool::new(false),
        });
        let mut this = Self { threads: Vec::new(), shared };
        for number in 0..threads {
            let shared = Arc::clone(&this.shared);
            let name = format!("fuse-{number}");
            let spawned = std::thread::Builder::new().name(name).spawn(move || serve(number, &shared));
            this.threads.push(spawned.map_err(DriverError::Thread)?);
        }
        Ok(this)
    }

    /// Sends invalidations to the mount's kernel.
    pub fn notifier(&self) -> Notifier {
        Notifier::new(Arc::clone(&self.shared.channels[0]))
    }

    /// Waits until the mount works, and says what was agreed; `None` if it ended before, or `limit` passed.
    pub fn wait_until_ready(&self, limit: Duration) -> Option<Terms> {
        let waits = |session: &mut Session| session.terms().is_none() && !session.has_ended();
        let waited = self.shared.changed.wait_timeout_while(self.shared.session(), limit, waits);
        waited.unwrap_or_else(PoisonError::into_inner).0.terms()
    }

    /// Requests that the file system has not answered.
    pub fn under_way(&self) -> usize {
        self.shared.session().under_way()
    }

    /// Waits until the mount has ended, or was handed over.
    pub fn wait(self) {
        for thread in self.threads {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
        self.shared.handoff.wait();
    }
}

/// Reads and hands out requests until the mount ends or is handed over.
fn serve(number: usize, shared: &Arc<Shared>) {
    notify::note_serving();
    let (channel, reader) = (&shared.channels[number], &shared.readers[number]);
    reader.begin();
    let (mut kept, mut was_reading) = (None, false);
    while shared.begin_reading(std::mem::replace(&mut was_reading, true)) {
        let mut buffer = kept.take().unwrap_or_else(|| shared.pool.take());
        let received = reader.read(|| channel.read(&mut [IoSliceMut::new(buffer.room())]));
        match received {
            Ok(Received::Request(bytes)) => kept = take(channel, shared, buffer, bytes),
            Ok(Received::Nothing) => kept = Some(buffer),
            Ok(Received::Ended) => return shared.ended(),
            Err(error) => {
                tracing::error!(%error, "a mount has ended: its requests cannot be read; unmount it");
                return shared.ended();
            }
        }
    }
}

/// Takes a request; gives its buffer back unless the file system keeps it.
fn take(channel: &Arc<Channel>, shared: &Arc<Shared>, mut buffer: Buffer, bytes: usize) -> Option<Buffer> {
    buffer.set_len(bytes);
    let parsed = match parse(buffer.bytes()) {
        Ok(parsed) => parsed,
        Err(error) => {
            let (unique, errno) = match error {
                RequestError::Short { unique, .. } => (unique, Errno::IO),
                RequestError::Unknown { unique, .. } => (unique, Errno::NOSYS),
                RequestError::Length { .. } => {
                    tracing::error!(%error, "a request cannot be answered");
                    return Some(buffer);
                }
            };
            tracing::debug!(%error, "refused");
            answer(channel, unique, Err(errno.raw_os_error()));
            return Some(buffer);
        }
    };
    let (unique, step) = (parsed.unique, shared.session().receive(&parsed));
    match step {
        Step::Welcome(out) => {
            answer(channel, unique, Ok(&[out.as_bytes()]));
            shared.changed.notify_all();
        }
        Step::Refuse(errno) => answer(channel, unique, Err(errno)),
        Step::Tell => match parsed.operation {
            Operation::Forget { lookups } => shared.filesystem.forget(parsed.node, lookups),
            Operation::BatchForget { nodes } => {
                nodes.iter().for_each(|(node, lookups)| shared.filesystem.forget(node, lookups));
            }
            _ => {}
        },
        Step::Interrupt(unique) => shared.filesystem.interrupt(unique),
        Step::End => answer(channel, unique, Ok(&[])),
        Step::Nothing => {}
        Step::Serve { waits_for_lock } => {
            let reply = Reply::new(shared, channel, &parsed, waits_for_lock);
            let may_wait = shared.filesystem.may_wait(&parsed.operation);
            let (bytes, rest) = match buffer.small_copy() {
                Some(copy) => (RequestBytes::Copied(copy), Some(buffer)),
                None if may_wait => (RequestBytes::Whole(buffer.kept()), None),
                None => (RequestBytes::Whole(buffer), None),
            };
            if may_wait {
                shared.handoff.serve(Request { bytes }, reply);
            } else {
                hand_over(Request { bytes }, reply);
            }
            return rest;
        }
    }
    Some(buffer)
}

/// Hands a request to the file system. An interrupt that came since the request was read comes behind it.
fn hand_over(request: Request, reply: Reply) {
    let (shared, unique, waits_for_lock) = (Arc::clone(&reply.shared), reply.unique, reply.waits_for_lock);
    shared.filesystem.request(request, reply);
    if !waits_for_lock {
        return;
    }
    let (is_interrupted, is_waited_for) = {
        let mut session = shared.session();
        (session.end_handing(unique), session.reading() != Reading::GoesOn)
    };
    if is_interrupted {
        shared.filesystem.interrupt(unique);
    }
    if is_waited_for {
        shared.changed.notify_all();
    }
}

fn answer(channel: &Channel, unique: u64, with: Result<&[&[u8]], i32>) {
    note_answered(channel, unique, channel.reply(unique, with));
}

fn note_answered(channel: &Channel, unique: u64, answered: io::Result<()>) {
    if let Err(error) = answered {
        tracing::error!(%error, unique, "cannot send a reply to the kernel");
        // It waits for one still, if it did not end the request with an error of its own.
        let _ = channel.reply(unique, Err(Errno::IO.raw_os_error()));
    }
}

/// The answer to a request, which is due. One that is dropped answers `EIO`.
#[derive(Debug)]
pub struct Reply {
    shared: Arc<Shared>,
    channel: Arc<Channel>,
    unique: u64,
    waits_for_lock: bool,
    answered: bool,
    kind: u8,
    began: Instant,
    error: Option<Errno>,
}

impl Reply {
    fn new(shared: &Arc<Shared>, channel: &Arc<Channel>, request: &Parsed<'_>, waits_for_lock: bool) -> Self {
        let (shared, channel) = (Arc::clone(shared), Arc::clone(channel));
        let (unique, kind) = (request.unique, shared.filesystem.kind_of(&request.operation));
        Self { shared, channel, unique, waits_for_lock, answered: false, kind, began: Instant::now(), error: None }
    }

    /// The request's number.
    pub fn unique(&self) -> u64 {
        self.unique
    }

    /// Done.
    pub fn ok(self) {
        self.send(Ok(&[]));
    }

    /// It failed.
    pub fn error(mut self, errno: Errno) {
        self.error = Some(errno);
        self.send(Err(errno.raw_os_error()));
    }

    /// A node under a name.
    pub fn entry(self, entry: &Entry) {
        self.send(Ok(&[entry.encode().as_bytes()]));
    }

    /// Attributes, and how long they hold.
    pub fn attributes(self, attr: Attr, valid: Duration) {
        self.send(Ok(&[reply::attributes(attr, valid).as_bytes()]));
    }

    /// A handle, with flags of [`open`](super::abi::open).
    pub fn opened(self, handle: u64, open_flags: u32) {
        self.send(Ok(&[OpenOut { handle, open_flags, backing_id: 0 }.as_bytes()]));
    }

    /// A new node and its handle.
    pub fn created(self, entry: &Entry, handle: u64, open_flags: u32) {
        let open = OpenOut { handle, open_flags, backing_id: 0 };
        self.send(Ok(&[entry.encode().as_bytes(), open.as_bytes()]));
    }

    /// Bytes: of a file, a link's target, an attribute's value or their names. At most as many as were asked for.
    pub fn data(self, bytes: &[u8]) {
        self.send(Ok(&[bytes]));
    }

    /// So many bytes, which `write` sends with the bytes that it gets, before them, by one system call.
    pub fn data_by(mut self, bytes: usize, write: impl FnOnce(BorrowedFd<'_>, &[u8]) -> io::Result<usize>) {
        self.finish(|channel, unique| channel.reply_by(unique, bytes, write));
    }

    /// The same from up to 64 places.
    pub fn data_parts(self, parts: &[&[u8]]) {
        self.send(Ok(parts));
    }

    /// Bytes that were written or copied.
    pub fn written(self, bytes: u32) {
        self.send(Ok(&[WriteOut { size: bytes, padding: 0 }.as_bytes()]));
    }

    /// A part of a listing.
    pub fn directory(self, directory: &Directory) {
        self.send(Ok(&[directory.as_bytes()]));
    }

    /// The file system's numbers.
    pub fn numbers(self, numbers: &StatFsOut) {
        self.send(Ok(&[numbers.as_bytes()]));
    }

    /// The size of an extended attribute or of their names.
    pub fn xattr_size(self, bytes: u32) {
        self.send(Ok(&[GetXattrOut { size: bytes, padding: 0 }.as_bytes()]));
    }

    /// A lock.
    pub fn lock(self, lock: FileLock) {
        self.send(Ok(&[lock.as_bytes()]));
    }

    /// Where data or a hole begins.
    pub fn offset(self, offset: u64) {
        self.send(Ok(&[SeekOut { offset }.as_bytes()]));
    }

    fn send(mut self, with: Result<&[&[u8]], i32>) {
        self.finish(|channel, unique| channel.reply(unique, with));
    }

    fn finish(&mut self, reply: impl FnOnce(&Channel, u64) -> io::Result<()>) {
        self.answered = true;
        self.shared.replying.fetch_add(1, Ordering::Relaxed);
        // The number may come again as soon as the kernel has the answer.
        let is_waited_for = {
            let mut session = self.shared.session();
            let is_waited_for = session.reader_waits();
            session.finish(self.unique);
            is_waited_for
        };
        note_answered(&self.channel, self.unique, reply(&self.channel, self.unique));
        let Self { kind, began, error, .. } = *self;
        self.shared.filesystem.answered(Answered { kind, time: began.elapsed(), error });
        self.shared.replying.fetch_sub(1, Ordering::Release);
        if is_waited_for {
            self.shared.changed.notify_all();
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if !self.answered {
            self.error = Some(Errno::IO);
            self.finish(|channel, unique| channel.reply(unique, Err(Errno::IO.raw_os_error())));
        }
    }
}
