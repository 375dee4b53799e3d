//! The service of shares on one loop.
//!
//! The loop keeps what each session holds (`table.rs`) and takes calls apart (`calls.rs`). What may block and is not the moving of
//! bytes runs on worker threads (`workers.rs`), with the rights of the user that the call is for (`tree.rs` has the calls
//! themselves). Bytes of files go between frames and the file by the loop's own reads and writes (`data.rs`). Locks are a table that the
//! loops of a share have in common (`locking.rs`): a wait costs no thread.

mod calls;
mod data;
mod descriptors;
mod finish;
mod locking;
mod outcome;
mod table;
mod tree;
mod workers;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use byway_fabric::access::Right;
use byway_fabric::{GetError, Slot, Slots, WindowKey};
use byway_reactor::privilege::limit_writes_of_thread;
use byway_reactor::{Completion, File, Frame, Reactor, Waker, WriteAt};
use byway_rpc::session::{CallRef, Grant, Incomer, Spoken};

use self::table::{Client, Node};
use self::workers::Workers;
use super::share::Share;
use super::wire::{CallError, PROTOCOL, VERSIONS};
use crate::host::{At, Host, Service};

/// Where the end of a wait for a lock is told: the loop of the session that waits.
#[derive(Clone, Debug)]
pub struct Ticket {
    mailbox: Arc<Mailbox>,
    job: JobId,
}

#[derive(Debug)]
struct Mailbox {
    granted: Mutex<Vec<JobId>>,
    waker: Waker,
}

/// The window of a call.
#[derive(Clone, Copy, Debug)]
struct Window {
    key: WindowKey,
    len: usize,
}

/// What a [`Job`] is called.
type JobId = Slot<Job>;

/// Something that has not ended.
#[derive(Debug)]
enum Job {
    /// A worker has it.
    Worker { call: CallRef, node: Arc<Node>, window: Option<Window> },
    /// Bytes are read from a file.
    Read { call: CallRef, window: Option<Window>, len: usize },
    /// Bytes are got from the client, to be written.
    Get { call: CallRef, file: File, to: WriteAt, len: usize },
    /// Bytes are written to a file.
    Write { call: CallRef, len: usize },
    /// A lock is waited for.
    Lock { call: CallRef },
}

impl Job {
    fn call(&self) -> CallRef {
        match self {
            Self::Worker { call, .. }
            | Self::Read { call, .. }
            | Self::Get { call, .. }
            | Self::Write { call, .. }
            | Self::Lock { call, .. } => *call,
        }
    }
}

/// See the module.
pub struct Shares {
    class: u8,
    instance: u64,
    shares: Vec<Arc<Share>>,
    /// By the index of the session's slot.
    clients: Vec<Option<Client>>,
    jobs: Slots<Job>,
    workers: Workers,
    mailbox: Arc<Mailbox>,
}

/// Numbers sessions of this process, for locks.
static SESSIONS: AtomicU64 = AtomicU64::new(1);

impl Shares {
    /// No shares. Operations of the loop are of `class`; `instance` names the server process.
    pub fn new(reactor: &Reactor, class: u8, instance: u64) -> Self {
        let mailbox = Arc::new(Mailbox { granted: Mutex::default(), waker: reactor.waker() });
        Self {
            class,
            instance,
            shares: Vec::new(),
            clients: Vec::new(),
            jobs: Slots::default(),
            workers: Workers::new(reactor.waker()),
            mailbox,
        }
    }

    /// What the service speaks, where each session may have so many calls in flight.
    pub const fn spoken(calls: u16) -> Spoken {
        Spoken { protocol: PROTOCOL, versions: VERSIONS, grant: Some(Grant { calls, notices: 0 }) }
    }

    /// Takes `shares` as the whole list. The sessions that use one that is gone end: their clients come back and find it gone, or
    /// as it is now. From the first share on the calling thread, which is the loop's, writes to files without root's privileges: what
    /// it writes is for users.
    pub fn replace(&mut self, host: &mut Host, reactor: &mut Reactor, shares: &[Arc<Share>]) {
        if !shares.is_empty()
            && let Err(error) = limit_writes_of_thread()
        {
            tracing::error!(%error, "cannot give up root's privileges of writing; the shares stay as they were");
            return;
        }
        self.shares = shares.to_vec();
        let at = host.at(reactor);
        let stays = |share: &Arc<Share>| shares.iter().any(|new| Arc::ptr_eq(new, share));
        for client in self.clients.iter().flatten() {
            if !client.shares.iter().all(stays) {
                at.sessions.dismiss(at.fabric, at.reactor, client.session);
            }
        }
    }

    /// Takes the end of an operation of the service's class.
    pub fn complete(&mut self, host: &mut Host, reactor: &mut Reactor, completion: Completion) {
        let job = JobId::of_token(completion.token);
        self.moved(&mut host.at(reactor), job, completion.outcome);
    }

    /// The node ends: what waits for a lock waits no longer, and its client asks the next server.
    pub fn drain(&mut self, host: &mut Host, reactor: &mut Reactor) {
        let waits = self.jobs.iter().filter(|(_, job)| matches!(job, Job::Lock { .. })).map(|(slot, _)| slot);
        let waits: Vec<_> = waits.collect();
        for job in waits {
            self.end(&mut host.at(reactor), job, Err(CallError::Busy));
        }
    }

    /// Whether no call is left.
    pub fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    fn client(&mut self, session: Slot) -> Result<&mut Client, CallError> {
        let client = self.clients.get_mut(session.index as usize).and_then(Option::as_mut);
        client.filter(|client| client.session == session).ok_or(CallError::Stale)
    }

    /// The session's table, made with its first share.
    fn make_client(&mut self, reactor: &mut Reactor, session: Slot) -> &mut Client {
        let index = session.index as usize;
        if self.clients.len() <= index {
            self.clients.resize_with(index + 1, || None);
        }
        let old = self.clients[index].take_if(|client| client.session != session);
        if let Some(mut old) = old {
            old.end(reactor);
        }
        self.clients[index].get_or_insert_with(|| Client::new(session, SESSIONS.fetch_add(1, Ordering::Relaxed)))
    }

    fn start(&mut self, at: &mut At<'_>, job: Job) -> JobId {
        at.sessions.begin_job(job.call().session);
        self.jobs.insert(job)
    }

    /// Answers, and ends the job.
    fn end(&mut self, at: &mut At<'_>, job: JobId, answer: Result<(&[u8], &[u8]), CallError>) {
        let Some(ended) = self.jobs.remove(job) else { return };
        reply(at, ended.call(), answer);
        at.sessions.end_job(at.fabric, ended.call().session);
    }

    /// What the client of a session may do in a share, as its access list says now.
    fn right(at: &At<'_>, session: Slot, share: &Share) -> Option<Right> {
        let client = at.sessions.get(session).map(|session| session.client.clone()).unwrap_or_default();
        share.right(&client)
    }
}

/// Answers a call by an inline result and a small payload, or by an error.
fn reply(at: &mut At<'_>, call: CallRef, answer: Result<(&[u8], &[u8]), CallError>) {
    match answer {
        Ok((result, payload)) => at.sessions.answer(at.fabric, call, 0, (result, payload)),
        Err(error) => at.sessions.answer(at.fabric, call, error.status(), (&[], &[])),
    }
}

impl Service for Shares {
    fn protocol(&self) -> u8 {
        PROTOCOL
    }

    fn called(&mut self, at: &mut At<'_>, call: CallRef, asked: &Incomer<'_>) {
        if let Err(error) = self.begin(at, call, asked) {
            reply(at, call, Err(error));
        }
    }

    fn got(
        &mut self,
        at: &mut At<'_>,
        _session: Slot,
        (frame, tag): (Option<Frame>, u64),
        result: Result<(), GetError>,
    ) {
        self.got_bytes(at, JobId::from_u64(tag), result.and(frame.ok_or(GetError::Ended)));
    }

    fn peer_gone(&mut self, at: &mut At<'_>, session: Slot) {
        if at.sessions.is_up(session) {
            return;
        }
        let index = session.index as usize;
        let gone = self.clients.get_mut(index).and_then(|client| client.take_if(|client| client.session == session));
        if let Some(mut client) = gone {
            client.end(at.reactor);
            self.release_locks(at, &client);
        }
    }

    fn turn(&mut self, at: &mut At<'_>) {
        for (job, result) in self.workers.collect() {
            self.finish(at, job, result);
        }
        let granted = std::mem::take(&mut *self.mailbox.granted.lock().unwrap_or_else(PoisonError::into_inner));
        for job in granted {
            self.end(at, job, Ok((&[], &[])));
        }
    }
}
