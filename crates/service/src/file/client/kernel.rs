//! The cache that the kernel of a mount has: files that are opened for it, and what it has to drop.
//!
//! A file or directory that a user may read, as an earlier call under the same lease has shown, is opened without a message: the server
//! opens it when a read needs it. Until then a change could take the file away, so such files are opened at the server before the lease
//! is returned, and before this client changes them. A short file comes with the call that opens it, if its lease is held before that
//! call: its bytes are used if nothing has happened to the file until the kernel reads it.

use std::collections::HashMap;
use std::sync::mpsc;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use byway_reactor::Errno;
use rustix::fs::OFlags;

use super::super::wire::{Attributes, CallError};
use super::buffers::Data;
use super::caches::{Caches, now};
use super::connection::Failure;
use super::leases::{Fact, Invalid, Leases, OpenMode, PageRead, Ticket};
use super::table::{Opened, Remote};
use super::{Caller, Client, Found};
use crate::limits::{FILE_ATTRIBUTES_LATE_MAX, FILE_LEASE_USE, FILE_OPEN_BYTES_FILES_MAX, FILE_OPEN_BYTES_MAX};

/// What the kernel of a mount has cached.
pub trait KernelCache: Send + Sync + std::fmt::Debug {
    /// The kernel asks for a node's attributes before it uses them again. Waits for no request of the mount. False if the kernel does
    /// not know the node.
    fn drop_attributes(&self, node: u64) -> bool;

    /// The same, and drops all pages. Waits for reads of them that are under way. False if the kernel does not know the node.
    fn drop_pages(&self, node: u64) -> bool;

    /// Calls [`Client::drop_mapped_pages`] soon, in a thread that serves no request. Waits for nothing.
    fn drop_pages_soon(&self, node: u64);
}

/// A read of an open file of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileRead {
    /// The file.
    pub node: u64,
    /// The handle that it is read by.
    pub handle: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: usize,
}

/// How long a node may be unknown to the kernel after it was looked at for an answer: an answer that comes later is late
/// ([`Giving`]), and the kernel needs a moment to put the node in.
const UNKNOWN_TIME_MAX: Duration =
    Duration::from_millis(FILE_ATTRIBUTES_LATE_MAX.as_millis() as u64).saturating_add(Duration::from_millis(100));
const PAUSE: Duration = Duration::from_millis(1);

/// `R_OK` of `access(2)`.
const READ: u32 = 4;

/// Flags that ask nothing of the server beyond reading.
const PLAIN_FLAGS: OFlags =
    OFlags::LARGEFILE.union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::CLOEXEC).union(OFlags::DIRECTORY);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Reader,
    DirectReader,
    Writer,
}

/// Open files of a mount.
#[derive(Debug, Default)]
pub(super) struct Opens {
    uses: HashMap<u64, (u64, Use)>,
    /// Open files that the server does not know, by their node.
    unopened: HashMap<u64, Vec<u64>>,
    /// Whole files that came with the calls that opened them.
    came: HashMap<u64, (PageRead, Vec<u8>)>,
}

impl Opens {
    /// A file was opened without the server.
    pub(super) fn note_unopened(&mut self, node: u64, handle: u64) {
        self.unopened.entry(node).or_default().push(handle);
    }

    pub(super) fn take_unopened(&mut self, node: u64) -> Vec<u64> {
        self.unopened.remove(&node).unwrap_or_default()
    }

    /// A handle was closed.
    pub(super) fn closed(&mut self, handle: u64, node: u64, leases: &mut Leases<Attributes>) {
        self.came.remove(&handle);
        match self.uses.remove(&handle) {
            Some((node, Use::Reader)) => leases.end_reader(node),
            Some((node, Use::DirectReader)) => leases.end_direct_reader(node),
            Some((node, Use::Writer)) => leases.end_writer(node),
            None => {}
        }
        if let Some(unopened) = self.unopened.get_mut(&node) {
            unopened.retain(|other| *other != handle);
            if unopened.is_empty() {
                self.unopened.remove(&node);
            }
        }
    }
}

impl Opens {
    /// How the kernel uses an open file, as another process is told.
    pub(super) fn code_of(&self, handle: u64) -> u8 {
        match self.uses.get(&handle) {
            None => 0,
            Some((_, Use::Reader)) => 1,
            Some((_, Use::DirectReader)) => 2,
            Some((_, Use::Writer)) => 3,
        }
    }

    /// The kernel uses a file that another process has opened.
    pub(super) fn take_over(&mut self, handle: u64, node: u64, code: u8, leases: &mut Leases<Attributes>) {
        let used = match code {
            1 => Use::Reader,
            2 => Use::DirectReader,
            3 => Use::Writer,
            _ => return,
        };
        match used {
            Use::Writer => leases.begin_writer(node),
            Use::Reader | Use::DirectReader => leases.take_over_reader(node, used == Use::Reader),
        }
        self.uses.insert(handle, (node, used));
    }

    /// All open files that the server does not know.
    pub(super) fn all_unopened(&self) -> Vec<u64> {
        self.unopened.values().flatten().copied().collect()
    }

    /// All are open at the server.
    pub(super) fn all_opened(&mut self) {
        self.unopened.clear();
    }
}

/// The kernel, once the mount works.
#[derive(Debug, Default)]
pub(super) struct Kernel(OnceLock<Arc<dyn KernelCache>>);

impl Kernel {
    pub(super) fn set(&self, kernel: Arc<dyn KernelCache>) {
        // A client has one mount.
        let _ = self.0.set(kernel);
    }
}

impl Caches {
    /// Has the kernel drop something. A node that it does not know may be in an answer that it has not taken yet: `is_known` says whether
    /// that can be.
    pub(super) fn invalidate(&self, node: u64, what: Invalid, is_known: impl Fn() -> bool) {
        let Some(kernel) = self.kernel.0.get() else { return };
        if what == Invalid::Pages {
            self.state().leases.begin_drop(node);
        }
        let end = Instant::now() + UNKNOWN_TIME_MAX;
        let drops = || match what {
            Invalid::Attributes => kernel.drop_attributes(node),
            Invalid::Pages => kernel.drop_pages(node),
        };
        while !drops() && is_known() && Instant::now() < end {
            std::thread::park_timeout(PAUSE);
        }
        if what == Invalid::Pages {
            self.state().leases.end_drop(node, true);
        }
    }

    /// Has the kernel drop attributes. Nodes that it does not know are tried again, all together: see [`Caches::invalidate`].
    pub(super) fn drop_attributes_of(&self, mut nodes: Vec<u64>) {
        let Some(kernel) = self.kernel.0.get() else { return };
        nodes.retain(|node| !kernel.drop_attributes(*node));
        let end = Instant::now() + UNKNOWN_TIME_MAX;
        while !nodes.is_empty() && Instant::now() < end {
            std::thread::park_timeout(PAUSE);
            nodes.retain(|node| self.state().leases.is_known(*node) && !kernel.drop_attributes(*node));
        }
    }

    /// Has pages dropped soon that programs may have mapped and that are not fresh.
    pub(super) fn drop_mapped_soon(&self, nodes: &[u64]) {
        let Some(kernel) = self.kernel.0.get() else { return };
        for node in nodes {
            let stale = self.state().leases.has_stale_mapped(*node, now());
            if stale {
                kernel.drop_pages_soon(*node);
            }
        }
    }

    /// A session has ended: returns when the kernel uses nothing of it without asking.
    pub(super) fn end_session(self: &Arc<Self>, number: u64) {
        // Threads that come here later wait for the first: behind this there may be a new session.
        let _ending = self.ending.lock().unwrap_or_else(PoisonError::into_inner);
        let invalid = {
            let mut state = self.state();
            if state.session != number {
                return;
            }
            state.session = 0;
            state.names.clear();
            state.leases.end_session()
        };
        if invalid.is_empty() || self.kernel.0.get().is_none() {
            return;
        }
        // The calling thread may serve the kernel, which this could wait for: then the kernel's times end first.
        let (this, (done, ended)) = (Arc::clone(self), mpsc::channel());
        let work = move || {
            this.drop_attributes_of(invalid.iter().map(|(node, _)| *node).collect());
            let _ = done.send(());
            for (node, what) in invalid.into_iter().filter(|(_, what)| *what == Invalid::Pages) {
                this.invalidate(node, what, || false);
            }
        };
        if std::thread::Builder::new().name("byway-session-end".to_owned()).spawn(work).is_err() {
            tracing::warn!(
                "no thread to tell the kernel that the session has ended: waiting until its leases have ended"
            );
        }
        let _ = ended.recv_timeout(FILE_LEASE_USE);
    }
}

/// A change of a file's size, until the kernel has its answer.
pub struct Resizing<'a> {
    client: &'a Client,
    node: u64,
    size: Option<u64>,
}

impl Resizing<'_> {
    /// It was done.
    pub fn done(&mut self, size: u64) {
        self.size = Some(size);
    }
}

impl Drop for Resizing<'_> {
    fn drop(&mut self) {
        self.client.caches.state().leases.end_resize(self.node, self.size, now());
    }
}

/// Attributes on their way to the kernel. It counts their time from when it takes them: if that was late, it drops them.
pub struct Giving<'a> {
    client: &'a Client,
    node: Option<u64>,
    since: byway_reactor::Instant,
}

impl Drop for Giving<'_> {
    fn drop(&mut self) {
        if now().since(self.since) <= FILE_ATTRIBUTES_LATE_MAX {
            return;
        }
        let caches = &self.client.caches;
        let nodes = self.node.map_or_else(|| caches.state().leases.given(), |node| vec![node]);
        caches.drop_attributes_of(nodes);
    }
}

impl Client {
    /// The user, as rights are kept.
    pub(super) fn user(&self, caller: Caller<'_>) -> Vec<u32> {
        if !self.wants_groups() {
            return Vec::new();
        }
        [caller.uid, caller.gid].into_iter().chain(caller.groups.iter().copied()).collect()
    }

    /// Opens a file for the kernel of a mount, which is told the mode.
    ///
    /// # Errors
    /// See [`Client::open`].
    pub fn open_for_kernel(&self, caller: Caller<'_>, node: u64, flags: u32) -> Result<(u64, OpenMode), Errno> {
        if flags & (OFlags::ACCMODE | OFlags::TRUNC).bits() != 0 {
            self.caches.state().leases.begin_writer(node);
            let opened = self.open(caller, node, flags);
            let mut state = self.caches.state();
            match opened {
                Ok(handle) => _ = state.opens.uses.insert(handle, (node, Use::Writer)),
                Err(_) => state.leases.end_writer(node),
            }
            return opened.map(|handle| (handle, OpenMode::Direct));
        }
        let opened = Opened { node, flags, directory: false };
        self.open_reader(caller, opened, || self.open_and_keep(caller, node, flags))
    }

    /// Opens a file. A short one comes with the answer, and is kept for the kernel's first read of it.
    fn open_and_keep(&self, caller: Caller<'_>, node: u64, flags: u32) -> Result<u64, Errno> {
        let is_plain = OFlags::from_bits_retain(flags).difference(PLAIN_FLAGS) == OFlags::empty();
        let (read, size) = {
            let (state, now) = (self.caches.state(), now());
            let size = state.leases.attributes(node, now).map_or(0, |attributes| attributes.size.get());
            (state.leases.begin_early_read(node, now), usize::try_from(size).unwrap_or(usize::MAX))
        };
        let len = if is_plain && size <= FILE_OPEN_BYTES_MAX { size } else { 0 };
        let (handle, bytes) = self.open_and_read(caller, node, flags, len)?;
        if len > 0 && bytes.len() == len {
            let came = &mut self.caches.state().opens.came;
            if came.len() < FILE_OPEN_BYTES_FILES_MAX {
                came.insert(handle, (read, bytes));
            }
        }
        Ok(handle)
    }

    /// A file's bytes from an offset on that came with the call that opened it, if they are those that it has now. They are given once.
    pub fn take_opened_bytes(&self, node: u64, handle: u64, offset: u64, len: usize) -> Option<Vec<u8>> {
        let mut state = self.caches.state();
        let (read, mut bytes) = state.opens.came.remove(&handle)?;
        if !state.leases.is_fresh(node, read, now()) {
            return None;
        }
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
        bytes.drain(..start);
        bytes.truncate(len);
        Some(bytes)
    }

    /// Opens a directory for the kernel of a mount, which is told the mode.
    ///
    /// # Errors
    /// See [`Client::open_directory`].
    pub fn open_directory_for_kernel(&self, caller: Caller<'_>, node: u64) -> Result<(u64, OpenMode), Errno> {
        let opened = Opened { node, flags: 0, directory: true };
        self.open_reader(caller, opened, || self.open_directory(caller, node))
    }

    fn open_reader(
        &self,
        caller: Caller<'_>,
        opened: Opened,
        open: impl FnOnce() -> Result<u64, Errno>,
    ) -> Result<(u64, OpenMode), Errno> {
        let (node, user) = (opened.node, self.user(caller));
        let handle = if let Some(handle) = self.open_without_message(caller, opened, &user) {
            handle
        } else {
            let ticket = self.ticket(node);
            let handle = open()?;
            self.caches.state().leases.learn_fact(ticket, node, &user, Fact::Right(READ));
            handle
        };
        let mut state = self.caches.state();
        let mode = state.leases.begin_reader(node, now());
        let used = if mode == OpenMode::Direct { Use::DirectReader } else { Use::Reader };
        state.opens.uses.insert(handle, (node, used));
        Ok((handle, mode))
    }

    /// Opens what the user is known to be allowed to read.
    fn open_without_message(&self, caller: Caller<'_>, opened: Opened, user: &[u32]) -> Option<u64> {
        if OFlags::from_bits_retain(opened.flags).difference(PLAIN_FLAGS) != OFlags::empty() {
            return None;
        }
        let mut state = self.caches.state();
        if !state.leases.knows(opened.node, user, &Fact::Right(READ), now()) {
            return None;
        }
        // No session has this epoch: the first call that needs the server opens it there.
        let handle = self.table().open(opened, Remote::default());
        self.openers.opened(handle, caller);
        state.opens.note_unopened(opened.node, handle);
        Some(handle)
    }

    /// Opens files at the server that were opened without it, before it changes them.
    pub(super) fn open_at_server(&self, handles: &[u64]) {
        for handle in handles {
            // One that has gone meanwhile is stale when it is used.
            let _ = self.live().and_then(|live| self.remote_handle(live, Caller::default(), *handle));
        }
    }

    /// The same until the connection has reached its end, again and again while the server does not say whether it has them. False: some
    /// are not open there by then.
    pub(super) fn open_at_server_in_time(&self, handles: &[u64]) -> bool {
        let mut left = handles.to_vec();
        loop {
            left.retain(|handle| self.connection.has_reached_end() || self.try_at_server(*handle));
            if left.is_empty() || self.connection.has_reached_end() {
                return left.is_empty();
            }
            std::thread::park_timeout(PAUSE);
        }
    }

    /// Opens a file at the server. True: it may be open there later.
    fn try_at_server(&self, handle: u64) -> bool {
        let Ok(live) = self.live() else { return true };
        match self.remote_handle(live, Caller::default(), handle) {
            // Without the file, or without the right to it, each use says so.
            Ok(_) | Err(Failure::Call(CallError::Stale)) => false,
            Err(Failure::Call(CallError::Errno(error))) => {
                !matches!(error, Errno::NOENT | Errno::STALE | Errno::ACCESS | Errno::PERM)
            }
            Err(Failure::Call(_) | Failure::Late) => true,
            Err(Failure::NotSent | Failure::Lost) => {
                self.lose(live.number);
                true
            }
        }
    }

    /// A file was made and opened for the kernel of a mount.
    pub fn created_for_kernel(&self, node: u64, handle: u64) {
        let mut state = self.caches.state();
        state.leases.begin_writer(node);
        state.opens.uses.insert(handle, (node, Use::Writer));
    }

    /// Attributes of a node that was just found, and for how long the kernel may use them without asking.
    pub fn believed(&self, found: &Found) -> (Attributes, Duration) {
        let mut state = self.caches.state();
        let now = now();
        let believed = state.leases.believed(found.node, now);
        let (attributes, valid) = believed.unwrap_or((found.attributes, Duration::ZERO));
        state.leases.told_size(found.node, attributes.size.get(), now);
        (attributes, valid)
    }

    /// Attributes are about to be given to the kernel: of one node, or of those of a listing. Call it before [`Client::believed`], and
    /// drop what it gives when the kernel has the answer.
    pub fn giving(&self, node: Option<u64>) -> Giving<'_> {
        Giving { client: self, node, since: now() }
    }

    /// A read of a file or a listing begins that the kernel may put into its cache.
    pub fn begin_page_read(&self, node: u64) -> PageRead {
        self.caches.state().leases.begin_read(node, now())
    }

    /// Its bytes are about to be given to the kernel. False if they may be old by then, and programs that have mapped the file could go
    /// on seeing them: then [`Client::drop_mapped_pages`] is due.
    pub fn end_page_read(&self, node: u64, read: PageRead) -> bool {
        let mut state = self.caches.state();
        state.leases.end_read(node, read, now()) || !state.leases.is_drop_due(node, now())
    }

    /// The kernel changes a file's size to one that may be shorter. Drop what this gives when the kernel has the answer.
    pub fn resizing(&self, node: u64) -> Resizing<'_> {
        self.caches.state().leases.begin_resize(node, now());
        Resizing { client: self, node, size: None }
    }

    /// The kernel writes to a file up to an offset, in bytes.
    pub fn written_to(&self, node: u64, end: u64) {
        self.caches.state().leases.written_to(node, end);
    }

    /// Reads for the kernel's page cache. Bytes that end before the size that the kernel knows are read again for
    /// a while ([`Leases::ends_early`]): a program may be rewriting the file, or the kernel does not know the new size yet.
    ///
    /// # Errors
    /// See [`Client::read_data`].
    pub fn read_pages(&self, caller: Caller<'_>, read: FileRead) -> Result<Data<'_>, Errno> {
        let FileRead { node, handle, offset, len } = read;
        let begun = Instant::now();
        loop {
            let data = self.read_data(caller, handle, offset, len)?;
            let [asked_end, end] = [len, data.len()].map(|len| offset.saturating_add(len as u64));
            let again = self.caches.state().leases.ends_early(node, asked_end, end, now());
            if again.is_none_or(|limit| begun.elapsed() >= limit) {
                return Ok(data);
            }
            drop(data);
            std::thread::park_timeout(PAUSE);
        }
    }

    /// Whether the kernel should be told a node's size only with a lease, which is not held and may be had: see
    /// [`Leases::wants_sure_size`].
    pub fn wants_sure_size(&self, node: u64) -> bool {
        self.caches.state().leases.wants_sure_size(node, now())
    }

    /// No lease on a node can be had now: its size is told without one for a while.
    pub fn give_up_sure_size(&self, node: u64) {
        self.caches.state().leases.refused(node, now());
    }

    /// Whether the kernel has pages of a node that [`Client::drop_stale_pages`] has to drop before the node's attributes are answered.
    pub fn has_stale_pages(&self, node: u64) -> bool {
        self.caches.state().leases.has_stale_pages(node, now())
    }

    /// Has the kernel drop its pages of a node. Waits for reads of these: the calling thread must not be one that answers them.
    pub fn drop_stale_pages(&self, node: u64) {
        self.caches.invalidate(node, Invalid::Pages, || false);
    }

    /// Has the kernel drop pages of a node that are not fresh, and takes a lease, so that pages that programs load from now on are. Waits
    /// as [`Client::drop_stale_pages`], and for the server.
    pub fn drop_mapped_pages(&self, node: u64) {
        let drop_stale = || {
            let stale = {
                let state = self.caches.state();
                state.leases.has_stale_pages(node, now()) || state.leases.has_stale_mapped(node, now())
            };
            if stale {
                self.drop_stale_pages(node);
            }
            stale
        };
        // Before the server is asked: it may not answer.
        if !drop_stale() || !self.caches.state().leases.wants_lease(node, now()) {
            return;
        }
        let _ = self.attributes(Caller::default(), node, None);
        let leased = {
            let mut state = self.caches.state();
            let leased = state.leases.is_leased(node, now());
            if !leased {
                state.leases.refused(node, now());
            }
            leased
        };
        if leased {
            // What was loaded meanwhile.
            drop_stale();
        }
    }

    /// Whether something is known of the user and a node.
    pub(super) fn knows(&self, caller: Caller<'_>, node: u64, fact: &Fact) -> bool {
        let user = self.user(caller);
        self.caches.state().leases.knows(node, &user, fact, now())
    }

    /// A call with the ticket has shown something of the user and a node.
    pub(super) fn learn_fact(&self, caller: Caller<'_>, ticket: Ticket, node: u64, fact: Fact) {
        let user = self.user(caller);
        self.caches.state().leases.learn_fact(ticket, node, &user, fact);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// A kernel that an answer reaches just before it counts as late.
    #[derive(Debug, Default)]
    struct SlowKernel {
        asked: Mutex<Option<Instant>>,
        dropped: Mutex<bool>,
    }

    impl KernelCache for SlowKernel {
        fn drop_attributes(&self, _: u64) -> bool {
            let since = *self.asked.lock().unwrap().get_or_insert_with(Instant::now);
            let knows = since.elapsed() + Duration::from_millis(100) >= FILE_ATTRIBUTES_LATE_MAX;
            *self.dropped.lock().unwrap() |= knows;
            knows
        }

        fn drop_pages(&self, node: u64) -> bool {
            self.drop_attributes(node)
        }

        fn drop_pages_soon(&self, _: u64) {}
    }

    #[test]
    fn a_recall_waits_for_an_answer_that_is_not_late() {
        for what in [Invalid::Attributes, Invalid::Pages] {
            let (caches, kernel) = (Caches::default(), Arc::new(SlowKernel::default()));
            caches.kernel.set(Arc::clone(&kernel) as Arc<dyn KernelCache>);
            caches.invalidate(7, what, || true);
            assert!(*kernel.dropped.lock().unwrap(), "{what:?}");
            let (caches, kernel) = (Caches::default(), Arc::new(SlowKernel::default()));
            caches.kernel.set(Arc::clone(&kernel) as Arc<dyn KernelCache>);
            caches.invalidate(7, what, || false);
            assert!(!*kernel.dropped.lock().unwrap(), "a node that the kernel has forgotten is not waited for");
        }
    }
}
