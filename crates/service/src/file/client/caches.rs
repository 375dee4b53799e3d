//! The data that the client keeps under leases, and the thread that answers recalls.
//!
//! Calls are answered from here if `leases.rs` permits it; then no message is sent. A client takes leases once
//! [`Client::keep_caches`] was called. In a share that trusts its clients, users differ in which names they may look up:
//! there a name is kept for the user that looked it up.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use byway_fabric::node::{Deadline, Op, OpError, SubmitError, WaitError};
use byway_reactor::{Errno, Instant};
use byway_rpc::node::{Call, Reply};
use zerocopy::{FromBytes, IntoBytes};

use super::super::wire::{
    Arguments, Attributes, CallError, DirectoryEntry, ENTRY_WITHOUT_XATTRS, FLAG_ALL, GrantedLeases, Lease, Method,
    PROTOCOL,
};
use super::connection::Live;
use super::files::NamedIn;
use super::kernel::{Kernel, KernelCache, Opens};
use super::leases::{CachedEntry, Fact, Invalid, Leases, Ticket};
use super::tending::Tending;
use super::{Caller, Client, Found, NONE, ROOT};
use crate::limits::{BUSY_PAUSE_MAX, BUSY_PAUSE_MIN};

/// How long a client that begins to take leases waits for the first at most.
const FIRST_LEASE_TIME_MAX: Duration = Duration::from_secs(1);

/// How long a client that ends waits for the server to have taken its leases back.
const RETURN_TIME_MAX: Duration = Duration::from_secs(1);

/// How long after a refusal a client asks for leases again in the same session.
const REFUSED_PAUSE: Duration = Duration::from_mins(1);

/// How often it looks meanwhile whether there is another session.
const REFUSED_POLL: Duration = Duration::from_secs(1);

/// The clock of leases: it goes on while the machine sleeps.
pub(super) fn now() -> Instant {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Instant::from_nanos(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// The newest.
    pub(super) session: u64,
    pub(super) leases: Leases<Attributes>,
    /// Nodes with leases, by the names that the server of the session has for them.
    pub(super) names: HashMap<u64, u64>,
    pub(super) opens: Opens,
    /// Names and attributes that were found without a message.
    pub(super) hits: u64,
    /// Leases that the server has recalled.
    pub(super) recalls: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Caches {
    state: Mutex<State>,
    pub(super) kernel: Kernel,
    /// Held while the kernel is told that a session has ended.
    pub(super) ending: Mutex<()>,
}

/// What a recall brings with it.
struct Recalled {
    node: u64,
    /// What the kernel has to drop.
    invalid: Option<Invalid>,
    /// Files to open at the server.
    unopened: Vec<u64>,
}

impl Caches {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A session begins.
    pub(super) fn begin_session(&self, number: u64) {
        let mut state = self.state();
        state.session = number;
        state.leases.begin_session(number);
        state.names.clear();
    }

    /// A call of a session was answered that was sent at `sent`.
    pub(super) fn answered(&self, number: u64, sent: Instant) {
        self.state().leases.answered(number, sent, now());
    }

    /// A handle of a node was closed.
    pub(super) fn closed(&self, handle: u64, node: u64) {
        {
            let State { opens, leases, .. } = &mut *self.state();
            opens.closed(handle, node, leases);
        }
        self.drop_mapped_soon(&[node]);
    }

    /// A node is not used any more; `name` is the server's.
    pub(super) fn forget(&self, node: u64, name: u64) {
        let mut state = self.state();
        state.leases.forget(node);
        if state.names.get(&name) == Some(&node) {
            state.names.remove(&name);
        }
    }

    /// A lease is recalled: nothing is believed by it any more.
    fn recalled(&self, lease: Lease) -> Option<Recalled> {
        let mut state = self.state();
        state.recalls += 1;
        let Some(node) = state.names.remove(&lease.node.get()) else {
            state.leases.recalled_unknown();
            return None;
        };
        let invalid = state.leases.recalled(node, now());
        Some(Recalled { node, invalid, unopened: state.opens.take_unopened(node) })
    }
}

fn granted(reply: &Reply) -> (Option<u64>, Option<u64>) {
    let (granted, _) = GrantedLeases::read_from_prefix(&reply.result[..]).unwrap_or_default();
    let is = |version: u64| (version != 0).then_some(version);
    (is(granted.on_node.get()), is(granted.on_found.get()))
}

impl Client {
    /// A call about a node is sent.
    pub(super) fn ticket(&self, node: u64) -> Ticket {
        self.caches.state().leases.ask(node)
    }

    /// What a directory is known to have under a name.
    pub(super) fn cached_entry(&self, caller: Caller<'_>, parent: u64, name: &[u8]) -> Option<Result<Found, Errno>> {
        let user = self.user(caller);
        let mut state = self.caches.state();
        let entry = state.leases.entry(parent, &user, name, now())?;
        state.hits += 1;
        match entry {
            CachedEntry::Absent => Some(Err(Errno::NOENT)),
            CachedEntry::Node(node, attributes) => self.table().found(node).then_some(Ok(Found { node, attributes })),
        }
    }

    pub(super) fn cached_attributes(&self, node: u64) -> Option<Attributes> {
        let mut state = self.caches.state();
        let known = state.leases.attributes(node, now())?;
        state.hits += 1;
        Some(known)
    }

    /// Takes what an answer to `LookUp` says.
    pub(super) fn learn_entry(
        &self,
        caller: Caller<'_>,
        ticket: Ticket,
        NamedIn { parent, name }: NamedIn<'_>,
        found: &Found,
        reply: &Reply,
    ) {
        let (user, (on_parent, on_found)) = (self.user(caller), granted(reply));
        let mut state = self.caches.state();
        // One that was released meanwhile has no lease any more.
        let [on_parent, on_found] = [(parent, on_parent), (found.node, on_found)].map(|(node, version)| {
            let name = self.table().held_as(node)?;
            version.inspect(|_| _ = state.names.insert(name, node))
        });
        state.leases.learn(ticket, parent, on_parent, None, now());
        state.leases.learn_entry(ticket, parent, on_parent.is_some(), &user, name, Some(found.node));
        state.leases.learn(ticket.of_found(), found.node, on_found, Some(found.attributes), now());
    }

    /// Takes what an entry of a listing says. The directory's lease does not come with it, the entry's version does, or 0.
    pub(super) fn learn_listed(
        &self,
        caller: Caller<'_>,
        ticket: Ticket,
        NamedIn { parent, name }: NamedIn<'_>,
        found: &Found,
        head: &DirectoryEntry,
    ) {
        let (user, version) = (self.user(caller), head.lease.get());
        let mut state = self.caches.state();
        // One that was released meanwhile has no lease any more.
        let granted = self.table().held_as(found.node).filter(|_| version != 0).map(|name| {
            state.names.insert(name, found.node);
            version
        });
        state.leases.learn_entry(ticket, parent, false, &user, name, Some(found.node));
        state.leases.learn(ticket.of_found(), found.node, granted, Some(found.attributes), now());
        if let Some(version) = granted.filter(|_| head.flags.get() & ENTRY_WITHOUT_XATTRS != 0) {
            state.leases.learn_fact_of_found(found.node, version, &user, Fact::NoXattrs);
        }
    }

    /// Takes an answer that a name is not there.
    pub(super) fn learn_absent(
        &self,
        caller: Caller<'_>,
        ticket: Ticket,
        NamedIn { parent, name }: NamedIn<'_>,
        error: Errno,
    ) {
        if error == Errno::NOENT {
            let user = self.user(caller);
            self.caches.state().leases.learn_entry(ticket, parent, false, &user, name, None);
        }
    }

    /// Takes what an answer to `GetAttributes` says.
    pub(super) fn learn_attributes(&self, ticket: Ticket, node: u64, attributes: &Attributes, reply: &Reply) {
        let mut state = self.caches.state();
        let name = self.table().held_as(node);
        let on_node = granted(reply).0.filter(|_| name.is_some());
        state.leases.learn(ticket, node, on_node, Some(*attributes), now());
        if let (Some(_), Some(name)) = (on_node, name) {
            state.names.insert(name, node);
        }
    }

    /// Takes leases from now on, and answers recalls in a thread of its own until the client is closed or dropped. Attributes and
    /// names are then kept while the server says so, and data by the kernel of a mount, if there is one. Waits until the server gives
    /// leases, if the share has some, for a second at most: the server notes the client on disk before.
    ///
    /// # Errors
    /// No thread.
    pub fn keep_caches(self: &Arc<Self>, kernel: Option<Arc<dyn KernelCache>>) -> std::io::Result<()> {
        if let Some(kernel) = kernel {
            self.caches.kernel.set(kernel);
        }
        let client = Arc::downgrade(self);
        std::thread::Builder::new().name("byway-recalls".to_owned()).spawn(move || serve_recalls(&client))?;
        let end = now() + FIRST_LEASE_TIME_MAX;
        while self.connection.now().is_some_and(|live| live.gives_leases) && now() < end {
            let asked = self.attributes(Caller::default(), ROOT, None);
            if asked.is_err() || self.caches.state().leases.is_leased(ROOT, now()) {
                break;
            }
            std::thread::park_timeout(BUSY_PAUSE_MIN);
        }
        Ok(())
    }

    /// Leaves a call for recalls open at the server. `None`: try again, or the client is closed.
    fn wait_for_recalls(&self, returned: &mut Vec<Lease>, session: &mut u64) -> Option<(Live, Op)> {
        let live = self.live().ok()?;
        if std::mem::replace(session, live.number) != live.number {
            // Of an earlier session.
            returned.clear();
        }
        let call = Call {
            protocol: PROTOCOL,
            method: Method::Recalls as u16,
            arguments: NONE.as_bytes(),
            payload: returned.as_bytes(),
            ..Call::default()
        };
        match self.connection.rpc.call(live.session, &call, Deadline::NEVER) {
            Ok(op) => Some((live, op)),
            Err(SubmitError::Busy) => None,
            Err(_) => {
                self.lose(live.number);
                None
            }
        }
    }

    /// Returns all leases, so that other clients do not wait for their end.
    pub(super) fn return_leases(&self) {
        let has_leases = self.caches.state().leases.has_leases();
        self.caches.begin_session(0);
        if let Some(live) = self.connection.now().filter(|_| has_leases) {
            let arguments = Arguments { flags: FLAG_ALL.into(), ..NONE };
            let (protocol, method) = (PROTOCOL, Method::Recalls as u16);
            let call = Call { protocol, method, arguments: arguments.as_bytes(), ..Call::default() };
            let deadline = Deadline::after(RETURN_TIME_MAX);
            let _ = self.connection.rpc.call(live.session, &call, deadline).map(|op| op.wait(Deadline::NEVER));
        }
    }

    /// Calls that were sent to the server, but for those that only renew leases or wait for recalls.
    pub fn messages(&self) -> u64 {
        self.connection.calls()
    }

    /// A lease is recalled: returns when nothing is used by it any more.
    fn recalled(&self, lease: Lease) {
        let Some(Recalled { node, invalid, unopened }) = self.caches.recalled(lease) else { return };
        if let Some(what) = invalid {
            self.caches.invalidate(node, what, || self.table().remote(node).is_some());
        }
        self.open_at_server(&unopened);
    }
}

/// Waits after a refusal, for [`REFUSED_PAUSE`] or until the client has another session, is closed or dropped.
fn wait_refused(client: &Weak<Client>, session: u64, tending: &mut Tending) {
    let end = now() + REFUSED_PAUSE;
    while now() < end {
        std::thread::park_timeout(REFUSED_POLL);
        let Some(this) = client.upgrade() else { return };
        if this.connection.is_closed() || this.connection.now().is_some_and(|live| live.number != session) {
            return;
        }
        this.tend(tending);
    }
}

/// Waits for recalls and answers them with the next call.
fn serve_recalls(client: &Weak<Client>) {
    let (mut returned, mut session, mut tending) = (Vec::new(), 0, Tending::default());
    let mut busy_pause = BUSY_PAUSE_MIN;
    loop {
        let Some(this) = client.upgrade() else { return };
        if this.connection.is_closed() {
            return;
        }
        let begun = this.wait_for_recalls(&mut returned, &mut session);
        // The client may be dropped while this waits.
        drop(this);
        let Some((live, op)) = begun else {
            std::thread::park_timeout(BUSY_PAUSE_MAX);
            continue;
        };
        let answer = loop {
            let Some(this) = client.upgrade() else { return };
            let pause = this.tend(&mut tending);
            drop(this);
            match op.wait_in_background(Deadline::after(pause)) {
                Err(WaitError::Deadline) => {}
                answer => break answer,
            }
        };
        let Some(this) = client.upgrade() else { return };
        match answer {
            Ok(Ok(outcome)) => {
                let Ok(reply) = Reply::of(outcome) else { return this.lose(live.number) };
                returned.clear();
                busy_pause = BUSY_PAUSE_MIN;
                for bytes in reply.payload.as_chunks::<{ size_of::<Lease>() }>().0 {
                    let Ok(lease) = Lease::read_from_bytes(bytes) else { continue };
                    this.recalled(lease);
                    returned.push(lease);
                }
            }
            Ok(Err(OpError::Status(status))) => match CallError::from_status(status) {
                CallError::Busy => {
                    std::thread::park_timeout(busy_pause);
                    busy_pause = (busy_pause * 2).min(BUSY_PAUSE_MAX);
                }
                error @ (CallError::UnknownMethod | CallError::NotServed(_)) => {
                    tracing::info!(%error, "the server gives no leases: every call asks it");
                    return;
                }
                error => {
                    tracing::warn!(%error, "the server gives no leases now: every call asks it, and it is asked again in a minute");
                    drop(this);
                    wait_refused(client, live.number, &mut tending);
                }
            },
            _ => this.lose(live.number),
        }
    }
}
