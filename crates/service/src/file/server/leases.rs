//! Leases at the server: a call that changes files waits for conflicting leases, reads bring leases, and recalls are the
//! answers to calls that clients leave open for them.
//!
//! One table serves all loops and shares of the process, because shares may overlap, and a reload replaces them.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use byway_fabric::SessionId;
use byway_reactor::privilege::User;
use byway_reactor::{File, Frame, Instant, Op, WriteAt, monotonic};
use rustix::fs::OFlags;
use rustix::io::Errno;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, IntoBytes};

use super::super::grace::Holding;
use super::super::leases::{Action, Change, LastHeard, Leases, Since};
use super::super::locks::FileId;
use super::super::share::Share;
use super::super::wire::{CallError, FLAG_ALL, GrantedLeases, Lease, Method};
use super::calls::Asked;
use super::descriptors::are_scarce;
use super::kept_names::{ChangedNames, KeptNames};
use super::open_files::Removed;
use super::outcome::Outcome;
use super::replies::Reply;
use super::table::{NameIn, Node};
use super::workers::Work;
use super::{FileRequest, FileRequestId, Mailbox, Shares, tree};
use crate::host::At;
use crate::limits::{FILE_RECALLS_MAX, FILE_RECALLS_WAITING_MAX};

/// How a session is reached.
#[derive(Clone, Debug)]
pub(super) struct Route {
    mailbox: Arc<Mailbox>,
    session: SessionId,
}

/// What the table says to a session's loop.
pub(super) type News = Action<Route>;

/// Numbers sessions of this process.
static SESSIONS: AtomicU64 = AtomicU64::new(1);

/// Held while the names of a directory are looked up and changed, so that a change is of the files that it has begun for. The kernel
/// has a lock for each directory too.
static NAMING: [Mutex<()>; 64] = [const { Mutex::new(()) }; 64];

/// The table of a server process.
#[derive(Clone, Debug, Default)]
pub(super) struct LeaseTable(Arc<Mutex<Leases<Route>>>);

impl LeaseTable {
    fn lock(&self) -> Table<'_> {
        Table(self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The table; what it says is told when this is dropped.
struct Table<'a>(MutexGuard<'a, Leases<Route>>);

impl Drop for Table<'_> {
    fn drop(&mut self) {
        while let Some(news) = self.0.next_action() {
            let (Action::Recall { session: route, .. }
            | Action::Begin { session: route, .. }
            | Action::End { session: route }) = &news;
            let mailbox = Arc::clone(&route.mailbox);
            mailbox.leases.lock().unwrap_or_else(PoisonError::into_inner).push(news);
            mailbox.waker.wake();
        }
    }
}

/// What a session has to do with leases.
#[derive(Debug)]
pub(super) struct LeaseState {
    /// Names the session in the table.
    key: u64,
    table: LeaseTable,
    heard: LastHeard,
    /// It has asked for recalls: only then it gets leases.
    takes_recalls: bool,
    /// It has attached to a share since.
    is_paused: bool,
    /// Its peer gets no leases until then.
    refused_until: Instant,
    /// The call that waits for recalls.
    waits: Option<FileRequestId>,
    recalls: Vec<Lease>,
}

impl LeaseState {
    /// A session begins.
    pub(super) fn join(table: &LeaseTable, mailbox: &Arc<Mailbox>, session: SessionId) -> Self {
        let key = SESSIONS.fetch_add(1, Ordering::Relaxed);
        let route = Route { mailbox: Arc::clone(mailbox), session };
        let heard = table.lock().0.join(key, route, monotonic());
        Self {
            key,
            table: table.clone(),
            heard,
            takes_recalls: false,
            is_paused: false,
            refused_until: Instant::ZERO,
            waits: None,
            recalls: Vec::new(),
        }
    }

    /// The session, as one that changes names in a share.
    pub(super) fn changer(&self, share: &Share) -> Changer {
        let since = if share.gives_leases() { self.since() } else { None };
        Changer { key: self.key, table: self.table.clone(), since }
    }

    /// Since when a read has to be of the newest state for a lease to come with it. `None`: the session takes no leases.
    fn since(&self) -> Option<Since> {
        self.takes_leases().then(|| self.table.lock().0.since())
    }

    /// Whether the session is given leases now.
    fn takes_leases(&self) -> bool {
        self.takes_recalls && !self.is_paused && self.refused_until <= monotonic() && !are_scarce()
    }

    /// When the session's last message came.
    pub(super) fn last_heard(&self) -> Instant {
        self.heard.at()
    }

    /// The session has ended.
    pub(super) fn leave(&self) {
        self.table.lock().0.leave(self.key, monotonic());
    }

    /// The client uses no lease of the session any more.
    pub(super) fn return_all(&self) {
        self.table.lock().0.returned_all(self.key, monotonic());
    }

    /// No new leases until the client asks for recalls again. Those that it has are recalled as before.
    pub(super) fn pause(&mut self) {
        self.is_paused = true;
    }

    /// The session has forgotten a node.
    pub(super) fn forgotten(&self, file: FileId) {
        if self.takes_recalls {
            self.table.lock().0.forgotten(self.key, file, monotonic());
        }
    }
}

/// What goes on when a change has begun.
pub(super) enum Parked {
    Work(User, Work),
    Named(Arc<Named>),
    Write { file: File, to: WriteAt, from: Frame, len: usize },
}

/// A session that changes names.
pub(super) struct Changer {
    key: u64,
    table: LeaseTable,
    /// From before the change, if the session takes leases.
    since: Option<Since>,
}

/// A change of files by names, which are looked up when it begins.
pub(super) struct Named {
    pub(super) by: Changer,
    pub(super) user: User,
    /// Files that the client named: it has dropped what it had cached of them.
    pub(super) known: Vec<FileId>,
    /// Files that it believes the names to lead to: it has dropped what it had cached of them, too.
    pub(super) given_up: Vec<FileId>,
    /// Names whose files change too.
    pub(super) names: Vec<NameIn>,
    /// One of them that is removed.
    pub(super) removed: Option<Removed>,
    /// The directory, if it is one alone.
    pub(super) kept: Option<KeptNames>,
    pub(super) act: Act,
}

/// What changes the names; it may be tried again.
pub(super) type Act = Box<dyn Fn() -> Result<Outcome, Errno> + Send + Sync>;

impl Named {
    /// For a worker.
    pub(super) fn work(self) -> Work {
        let this = Arc::new(self);
        Box::new(move || this.run(None))
    }

    /// Does it on a worker's thread, under a change that has begun or one that can begin at once.
    fn run(self: &Arc<Self>, begun: Option<Change>) -> Result<Outcome, Errno> {
        let mut turns: Vec<_> = self.known.iter().map(|id| id.ino as usize % NAMING.len()).collect();
        turns.sort_unstable();
        turns.dedup();
        let turns: Vec<_> =
            turns.into_iter().map(|turn| NAMING[turn].lock().unwrap_or_else(PoisonError::into_inner)).collect();
        let files = self.files();
        let now = monotonic();
        let change = {
            let mut table = self.by.table.lock();
            match begun {
                Some(change) if files.iter().all(|id| table.0.files(change).contains(id)) => Some(change),
                Some(change) => {
                    // A name is another file's by now.
                    table.0.end(change, now);
                    None
                }
                None => table.0.try_begin(self.by.key, &files, &self.own(), now),
            }
        };
        let Some(change) = change else {
            drop(turns);
            return Ok(Outcome::Stands(files, Arc::clone(self)));
        };
        let kept = self.kept.as_ref().filter(|kept| self.by.since.is_some() && kept.are_exact_before());
        let done = self.act_and_keep(&files);
        let kept = kept.filter(|kept| done.is_ok() && kept.are_exact_after());
        let attributes = kept.and_then(|kept| tree::attributes(&kept.directory.fd).ok());
        let names_of = kept.filter(|_| attributes.is_some()).map(|kept| kept.directory.id);
        let lease = self.by.table.lock().0.end_keeping(change, names_of, monotonic());
        drop(turns);
        let done = done?;
        let Some(since) = self.by.since.filter(|_| self.kept.is_some()) else { return Ok(done) };
        let attributes = attributes.unwrap_or_default();
        let made_without_xattrs = done.made().is_some_and(|made| tree::has_no_xattrs(&made.fd));
        Ok(Outcome::Changed(Box::new(done), ChangedNames { lease, attributes, since, made_without_xattrs }))
    }

    /// Files on which the client has no lease any more.
    pub(super) fn own(&self) -> Vec<FileId> {
        self.known.iter().chain(&self.given_up).copied().collect()
    }

    /// Changes the names. A file whose name is removed is kept for the clients that have it open.
    fn act_and_keep(&self, files: &[FileId]) -> Result<Outcome, Errno> {
        let Some(removed) = &self.removed else { return (self.act)() };
        let keeping = removed.keep(files)?;
        let done = (self.act)();
        if let Some(keeping) = keeping.filter(|_| done.is_err()) {
            keeping.undo();
        }
        done
    }

    fn files(&self) -> Vec<FileId> {
        let of = |NameIn { directory, name }: &NameIn| tree::identity(directory.fd.as_fd(), name).ok();
        self.known.iter().copied().chain(self.names.iter().filter_map(of)).collect()
    }
}

impl Shares {
    /// Files that a call changes, without those that it finds by names. The client has named them all.
    pub(super) fn changed_files(&mut self, asked: &Asked<'_>, node: &Node) -> Result<Vec<FileId>, CallError> {
        let truncates = asked.arguments.flags.get() & OFlags::TRUNC.bits() != 0;
        Ok(match asked.method {
            Method::SetAttributes | Method::SetXattr | Method::RemoveXattr | Method::Allocate => vec![node.id],
            Method::Open if truncates => vec![node.id],
            Method::CopyRange => {
                let target = asked.arguments.second.get();
                vec![self.client(asked.call.session)?.handle(target)?.node.id]
            }
            _ => Vec::new(),
        })
    }

    /// Notes that a session has said something. False: it comes too late, since others have been told that its leases run out.
    pub(super) fn note_heard(&mut self, at: &mut At<'_>, session: SessionId) -> bool {
        let Ok(client) = self.client(session) else { return true };
        if client.leases.heard.note(monotonic()) {
            return true;
        }
        tracing::warn!("a client has not returned a lease in time: its session ends");
        at.sessions.dismiss(at.fabric, at.reactor, session);
        false
    }

    /// Since when a read has to be of the newest state for a lease to come with it. `None`: the session takes no leases.
    pub(super) fn lease_since(&mut self, session: SessionId) -> Option<Since> {
        self.client(session).ok()?.leases.since()
    }

    /// Whether a session is given leases now.
    pub(super) fn takes_leases(&mut self, session: SessionId) -> bool {
        self.client(session).is_ok_and(|client| client.leases.takes_leases())
    }

    /// Leases on the file that was read and on one that was found there.
    pub(super) fn grant_leases(
        &mut self,
        session: SessionId,
        node: FileId,
        found: Option<FileId>,
        since: Option<Since>,
    ) -> Vec<u8> {
        if since.is_none() {
            return Vec::new();
        }
        let on_node = self.grant_lease(session, node, since);
        let on_found = found.map_or(0, |found| self.grant_lease(session, found, since));
        GrantedLeases { on_node: U64::new(on_node), on_found: U64::new(on_found) }.as_bytes().to_vec()
    }

    /// A lease on a file that was read; gives its version, or 0.
    pub(super) fn grant_lease(&mut self, session: SessionId, id: FileId, since: Option<Since>) -> u64 {
        let (Some(since), Ok(client)) = (since, self.client(session)) else { return 0 };
        let leases = &client.leases;
        leases.table.lock().0.grant(leases.key, id, since, monotonic()).unwrap_or_default()
    }

    /// Continues a request when no lease stands against its change of some files. `own` are those that the client named.
    pub(super) fn change(
        &mut self,
        at: &mut At<'_>,
        request: FileRequestId,
        session: SessionId,
        files: &[FileId],
        own: &[FileId],
        parked: Parked,
    ) {
        let key = self.client(session).map(|client| client.leases.key);
        let begun = key
            .ok()
            .and_then(|key| self.recovery.leases().lock().0.begin(key, files, own, request.to_u64(), monotonic()));
        match begun {
            Some((change, false)) => self.go_on(at, request, change, parked),
            Some((change, true)) => {
                self.changes.insert(request, change);
                self.parked.insert(request, parked);
            }
            None => {
                self.drop_parked(at, session, &parked);
                self.end(at, request, Err(CallError::Busy));
            }
        }
    }

    /// A change has begun.
    fn go_on(&mut self, at: &mut At<'_>, request: FileRequestId, change: Change, parked: Parked) {
        let ran = match parked {
            Parked::Work(user, work) => {
                self.changes.insert(request, change);
                self.workers.run(request, Some(user), work)
            }
            // It ends the change itself.
            Parked::Named(named) => {
                self.changes.remove(&request);
                let user = named.user.clone();
                let files = self.recovery.open_files();
                let work = move || {
                    let look = files.look();
                    named.run(Some(change)).map(|outcome| files.seen_outcome(look, outcome))
                };
                let ran = self.workers.run(request, Some(user), Box::new(work));
                if !ran {
                    self.recovery.leases().lock().0.end(change, monotonic());
                }
                ran
            }
            Parked::Write { file, to, from, len } => {
                self.changes.insert(request, change);
                at.reactor.submit(Op::WriteOnce { file, at: to, from, start: 0, len }, self.token(request));
                true
            }
        };
        if !ran {
            self.end(at, request, Err(CallError::Busy));
        }
    }

    fn drop_parked(&mut self, at: &mut At<'_>, session: SessionId, parked: &Parked) {
        if let Parked::Write { len, .. } = parked {
            at.sessions.note_released(session, *len);
        }
    }

    /// Ends the changes that wait for leases: none of them has begun.
    pub(super) fn end_parked(&mut self, at: &mut At<'_>) {
        for (request, parked) in std::mem::take(&mut self.parked) {
            if let Some(session) = self.requests.get(request).map(|request| request.call().session) {
                self.drop_parked(at, session, &parked);
            }
            self.end(at, request, Err(CallError::Busy));
        }
    }

    /// A request has ended, and with it its change.
    pub(super) fn end_change(&mut self, request: FileRequestId) {
        self.parked.remove(&request);
        if let Some(change) = self.changes.remove(&request) {
            self.recovery.leases().lock().0.end(change, monotonic());
        }
    }

    /// A call has changed one file, and is about to be answered. Gives the version of the lease that its client has again, or 0.
    pub(super) fn end_change_of_file(&mut self, request: FileRequestId, session: SessionId) -> u64 {
        let takes_leases = self.takes_leases(session);
        let Some(change) = self.changes.remove(&request) else { return 0 };
        let mut table = self.recovery.leases().lock();
        let kept = table.0.files(change).first().copied().filter(|_| takes_leases);
        table.0.end_keeping(change, kept, monotonic()).unwrap_or_default()
    }

    /// A client returns leases and waits for recalls.
    pub(super) fn recalls(&mut self, at: &mut At<'_>, asked: &Asked<'_>) -> Result<(), CallError> {
        let session = asked.call.session;
        let client = self.client(session)?;
        if asked.arguments.flags.get() & FLAG_ALL != 0 {
            client.leases.takes_recalls = false;
            client.leases.return_all();
            self.reply(at, asked.call, Ok(Reply::DONE));
            return Ok(());
        }
        if client.leases.waits.is_some() {
            return Err(CallError::Malformed);
        }
        let gives_leases = client.shares.iter().any(|share| share.gives_leases());
        if gives_leases && !self.is_listed(at, asked.call, Holding::Leases)? {
            return Ok(());
        }
        let recovery = Arc::clone(&self.recovery);
        let client = self.client(session)?;
        let peer = client.known_as.as_ref().map(|(_, peer)| peer);
        let refused_until = peer.map_or(Instant::ZERO, |peer| recovery.refusals().until(peer));
        client.leases.takes_recalls = true;
        client.leases.is_paused = false;
        client.leases.refused_until = refused_until;
        let key = client.leases.key;
        for bytes in asked.data.as_chunks::<{ size_of::<Lease>() }>().0 {
            let lease = Lease::read_from_bytes(bytes).map_err(|_| CallError::Malformed)?;
            // A lease on a node that was forgotten went with it.
            if let Ok(node) = self.client(session)?.node(lease.node.get()) {
                self.recovery.leases().lock().0.returned(key, node.id, lease.version.get(), monotonic());
            }
        }
        let request = self.start(at, FileRequest::Recalls { call: asked.call });
        self.client(session)?.leases.waits = Some(request);
        self.tell_recalls(at, session);
        Ok(())
    }

    /// Answers the call that waits for recalls, if there are any.
    fn tell_recalls(&mut self, at: &mut At<'_>, session: SessionId) {
        let Ok(client) = self.client(session) else { return };
        if client.leases.recalls.is_empty() {
            return;
        }
        let Some(request) = client.leases.waits.take() else { return };
        let count = client.leases.recalls.len().min(FILE_RECALLS_MAX);
        let recalls: Vec<Lease> = client.leases.recalls.drain(..count).collect();
        self.end(at, request, Ok(Reply::of_payload(recalls.as_bytes())));
    }

    /// Takes what the table has said, and lets it know the time while calls wait.
    pub(super) fn turn_leases(&mut self, at: &mut At<'_>) {
        let news = std::mem::take(&mut *self.mailbox.leases.lock().unwrap_or_else(PoisonError::into_inner));
        for one in news {
            match one {
                Action::Recall { session, file, version } => {
                    let Ok(client) = self.client(session.session) else { continue };
                    let key = client.leases.key;
                    let names = client.names_of(file);
                    client
                        .leases
                        .recalls
                        .extend(names.iter().map(|name| Lease { node: U64::new(*name), version: U64::new(version) }));
                    let waiting = client.leases.recalls.len();
                    if names.is_empty() {
                        self.recovery.leases().lock().0.returned(key, file, version, monotonic());
                    }
                    if waiting > FILE_RECALLS_WAITING_MAX {
                        self.end_silent(at, session.session);
                        continue;
                    }
                    self.tell_recalls(at, session.session);
                }
                Action::Begin { change, ticket, .. } => {
                    let request = FileRequestId::from_u64(ticket);
                    match self.parked.remove(&request) {
                        Some(parked) => self.go_on(at, request, change, parked),
                        None => self.recovery.leases().lock().0.end(change, monotonic()),
                    }
                }
                Action::End { session } => {
                    self.end_silent(at, session.session);
                }
            }
        }
        self.watch_leases(at);
    }

    /// Ends a session that has not returned a lease, and gives its peer none for a while.
    fn end_silent(&mut self, at: &mut At<'_>, session: SessionId) {
        tracing::warn!(
            "a client has not returned a lease in time: its session ends, and its host gets no leases for a while"
        );
        let recovery = Arc::clone(&self.recovery);
        if let Ok(client) = self.client(session)
            && let Some((_, peer)) = &client.known_as
        {
            recovery.refusals().refuse(peer.clone(), monotonic());
        }
        at.sessions.dismiss(at.fabric, at.reactor, session);
    }

    fn watch_leases(&mut self, at: &mut At<'_>) {
        if self.parked.is_empty() {
            return;
        }
        let next = {
            let mut table = self.recovery.leases().lock();
            table.0.time(monotonic());
            table.0.next_time()
        };
        if let Some(next) = next
            && self.lease_timer.is_none_or(|set| next < set)
        {
            self.lease_timer = Some(next);
            at.reactor.submit(Op::Timer { at: next }, byway_reactor::Token::new(self.class, LEASE_TIMER, 0, 0));
        }
    }
}

/// The tag of the timer for leases that run out.
pub(super) const LEASE_TIMER: u8 = 7;
