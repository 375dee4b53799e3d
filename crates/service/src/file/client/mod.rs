//! A client of a share: for a mount's threads, and for commands.
//!
//! Calls wait for their answers, and any number of threads may call at once. The client replaces a session that ends. If the
//! server process still keeps this client's state, the new session continues with it, and repeated calls get their earlier
//! answers (`slots.rs`). Otherwise the client finds files by their names (`table.rs`), opens them again, and reclaims its
//! locks (`locking.rs`), so that a restart of the server is only a wait. A call that must not be repeated, such as making a
//! directory, then fails with `EIO` if its answer was lost, because its outcome is unknown. A sync fails once if the server
//! process that received earlier writes has ended.

mod answers;
mod backoff;
mod buffers;
mod caches;
mod changing;
mod closing;
mod connection;
mod durable;
mod files;
mod freed;
mod handover;
mod held_locks;
mod kept_files;
mod kernel;
pub mod leases;
mod list;
mod locking;
mod new_mode;
mod opener;
mod reading;
mod released;
mod report;
pub(super) mod slots;
mod table;
mod tending;
mod unsynced;
mod xattrs;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use byway_fabric::node::NodeError;
use byway_fabric::tls::TlsClient;
use byway_reactor::{Address, Errno};
use byway_rpc::node::Reply;
use zerocopy::FromBytes;
use zerocopy::little_endian::{U16, U32, U64};

use self::answers::{entry_of, handle_of, number_of};
pub use self::buffers::Data;
use self::caches::Caches;
use self::closing::Closing;
use self::connection::{Failure, Live, Server, ServerConnection};
pub use self::durable::NotDurable;
pub use self::files::{CopyRange, Listed, NamedIn};
use self::freed::LastRemoval;
pub use self::handover::record::StateError;
pub use self::handover::{SuspendError, TakeOverError};
pub use self::kernel::{FileRead, Giving, KernelCache};
pub use self::list::{ListedShare, list};
pub use self::locking::{LockKind, LockRange, Locked};
pub use self::new_mode::NewMode;
use self::opener::{Opener, Openers};
use self::released::Releases;
pub use self::report::ClientReport;
use self::slots::{Repeats, SlotPool, SlotUse};
pub use self::table::ROOT;
use self::table::{Opened, Remote, Table};
use super::wire::{Arguments, CallError, Entry, FLAG_UNCLAIMED, Forgotten, Method, OPENS_AGAIN};
use crate::limits::{BUSY_PAUSE_MAX, BUSY_PAUSE_MIN, CALL_GROUPS_MAX, FILE_LOST_AFTER, FILE_NODES_RELEASED_MAX};

/// No arguments.
const NONE: Arguments = Arguments {
    node: U64::ZERO,
    second: U64::ZERO,
    offset: U64::ZERO,
    len: U64::ZERO,
    extra: U64::ZERO,
    flags: U32::ZERO,
    mode: U32::ZERO,
    uid: U32::ZERO,
    gid: U32::ZERO,
    name_len: U16::ZERO,
    second_name_len: U16::ZERO,
    group_count: 0,
    slot: 0,
    sequence: U16::ZERO,
};

/// Directories above a node that is looked up again.
const DEPTH_MAX: usize = 512;

/// Nodes that are forgotten with one call.
const FORGOTTEN_MAX: usize = 64;

/// For whom a call is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caller<'a> {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Further groups; those beyond [`CALL_GROUPS_MAX`] are left out.
    pub groups: &'a [u32],
}

/// Why a share cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No node for the client.
    #[error("cannot open an event loop: {0}; `byway doctor` says what this machine allows")]
    Node(std::io::Error),
    /// No answer, or not from byway.
    #[error("cannot connect: {0}; check the address and that the server runs")]
    Connect(NodeError),
    /// The server says no.
    #[error("share `{share}`: {error}; `byway ls` lists what the server has")]
    Refused {
        /// Which.
        share: String,
        /// Why.
        error: CallError,
    },
    /// The session ended before the answer.
    #[error("the server ended the session before it answered; its log says why")]
    Lost,
    /// The name is now another directory's.
    #[error("share `{share}` is another directory than before; unmount and mount it again")]
    OtherDirectory {
        /// Which.
        share: String,
    },
}

/// How a client is opened.
#[derive(Clone)]
pub struct ClientOptions {
    /// Where the server listens.
    pub address: Address,
    /// TLS, if the address wants it.
    pub tls: Option<TlsClient>,
    /// The share's name.
    pub share: String,
    /// How long calls wait for a server that does not answer before they fail with `EIO`.
    pub lost_after: Duration,
    /// [`Client::renew`] is called every few seconds: the server need not keep the locks of this client while it is stopped or cut off.
    pub renews_locks: bool,
}

impl ClientOptions {
    /// A share, without TLS, for a client that does not renew its locks.
    pub fn new(address: Address, share: &str) -> Self {
        Self { address, tls: None, share: share.to_owned(), lost_after: FILE_LOST_AFTER, renews_locks: false }
    }
}

/// A file and its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The client's number of it, until it is [forgotten](Client::forget).
    pub node: u64,
    /// What is known of it.
    pub attributes: super::wire::Attributes,
}

/// See the module.
pub struct Client {
    connection: ServerConnection,
    table: Mutex<Table>,
    forgotten: Mutex<Vec<(u64, Forgotten)>>,
    /// What was closed while the server was away.
    unclosed: Mutex<Vec<Remote>>,
    closing: Closing,
    openers: Openers,
    releases: Releases,
    last_removal: LastRemoval,
    slots: SlotPool,
    caches: Arc<Caches>,
}

/// A call, before the server's names are put in.
#[derive(Clone, Copy, Default)]
struct Ask<'a> {
    caller: Caller<'a>,
    node: Option<u64>,
    second_node: Option<u64>,
    handle: Option<u64>,
    second_handle: Option<u64>,
    offset: u64,
    len: u64,
    extra: u64,
    flags: u32,
    mode: u32,
    name: &'a [u8],
    second_name: &'a [u8],
    data: &'a [u8],
    /// Files that the names lead to, as far as the client knows: it gives up what it has cached of them before the server is asked.
    given_up: [Option<u64>; 2],
    /// The call can be sent again although it may have been done.
    repeatable: bool,
}

impl Client {
    /// Connects to the server and attaches to the share.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn connect(options: ClientOptions) -> Result<Self, ClientError> {
        let ClientOptions { address, tls, share, lost_after, renews_locks } = options;
        let connection = ServerConnection::new(Server { address, tls, share, renews_locks }, lost_after)
            .map_err(ClientError::Node)?;
        let client = Self {
            connection,
            table: Mutex::default(),
            forgotten: Mutex::default(),
            unclosed: Mutex::default(),
            closing: Closing::default(),
            openers: Openers::default(),
            releases: Releases::default(),
            last_removal: LastRemoval::default(),
            slots: SlotPool::default(),
            caches: Arc::default(),
        };
        client.connection.open(&mut |live, root| client.attached(live, root))?;
        Ok(client)
    }

    /// Ends the session; calls fail from now on.
    pub fn close(&self) {
        self.return_leases();
        self.connection.close();
    }

    /// Whether the server refuses changes; `None` while it is away.
    pub fn is_read_only(&self) -> Option<bool> {
        Some(self.connection.now()?.read_only)
    }

    /// Whether the groups of a [`Caller`] count at the server.
    pub fn wants_groups(&self) -> bool {
        self.connection.now().is_some_and(|live| live.trusts)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unclosed(&self) -> MutexGuard<'_, Vec<Remote>> {
        self.unclosed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A session has begun, and no call but these has been made in it. False: the share is another directory.
    fn attached(&self, live: Live, root: &Entry) -> Result<bool, Failure> {
        // Before a call can fail: a second try would be told the same number.
        self.table().unsynced.attached(live.instance, live.failed_syncs);
        self.caches.begin_session(live.number);
        let root_remote = Remote { epoch: live.epoch, name: root.node.get() };
        if !self.table().attach(root_remote, &root.attributes) {
            return Ok(false);
        }
        // Before the locks: removed files may have some.
        let has_all = !live.is_new_process || self.claim_kept_files(live, root_remote.name)?;
        self.recover_locks(live)?;
        if live.is_new_process {
            // The server waits for it before it gives others what this client may have.
            let flags = if has_all { 0 } else { FLAG_UNCLAIMED };
            let arguments = Arguments { flags: flags.into(), ..NONE };
            self.connection.call_on(live.session, Method::ReclaimComplete, &arguments, &[], None)?;
        }
        let unclosed = std::mem::take(&mut *self.unclosed());
        for (index, remote) in unclosed.iter().enumerate() {
            if let Err(failure) = self.close_remote(live, *remote) {
                self.unclosed().extend_from_slice(&unclosed[index..]);
                return Err(failure);
            }
        }
        Ok(true)
    }

    /// The session of that number has ended.
    fn lose(&self, number: u64) {
        // Before there is another: the server takes the leases of the old one for returned then.
        self.caches.end_session(number);
        self.connection.lose(number);
    }

    fn live(&self) -> Result<Live, Failure> {
        self.connection.live(&mut |live, root| self.attached(live, root))
    }

    fn ask(&self, method: Method, ask: &Ask<'_>) -> Result<(Live, Reply), Errno> {
        self.ask_holding(method, ask, |_, _| Ok(None)).map(|(live, reply, _)| (live, reply))
    }

    /// The same; `hold` takes the node that the answer names.
    fn ask_holding(
        &self,
        method: Method,
        ask: &Ask<'_>,
        hold: impl FnOnce(Live, &Reply) -> Result<Option<Found>, Errno>,
    ) -> Result<(Live, Reply, Option<Found>), Errno> {
        let changing = self.changing(method, ask);
        let call = |live, slot| self.ask_once(live, method, ask, slot);
        let answered = self.with_freed_room(|| self.with_room(ask, || self.repeat(method, ask.repeatable, call)));
        let (live, reply) = match answered {
            Ok(answer) => answer,
            Err(error) => {
                changing.ended(&Err::<(), _>(error));
                return Err(error);
            }
        };
        let found = hold(live, &reply)?;
        self.learn_change(changing, method, ask, &reply, found.as_ref());
        self.note_changes(live, method, ask);
        Ok((live, reply, found))
    }

    /// Calls until there is an answer: again after a session has ended, and while the server has no room. Gives the session that
    /// brought it. `repeatable`: the call can be sent again, although it may have been done by a server that does not remember it.
    fn repeat<T>(
        &self,
        method: Method,
        repeatable: bool,
        mut call: impl FnMut(Live, Option<SlotUse>) -> Result<T, Failure>,
    ) -> Result<(Live, T), Errno> {
        let taken = method.takes_slot().then(|| self.slots.take());
        let slot = taken.as_ref().map(|taken| taken.slot);
        let (mut pause, mut busy_since) = (BUSY_PAUSE_MIN, None);
        let mut repeats = Repeats::new(repeatable);
        loop {
            let live = self.live().map_err(|_| Errno::IO)?;
            if !repeats.may_be_sent(live.epoch) {
                tracing::warn!(
                    ?method,
                    "the session ended before the server answered: the change may or may not have been made"
                );
                return Err(Errno::IO);
            }
            if !repeatable {
                // The end of the session is noticed now rather than by the loss of the call.
                let _ = self.connection.rpc.node().turn();
            }
            let asked = caches::now();
            let called = call(live, slot);
            if matches!(called, Ok(_) | Err(Failure::Call(_))) {
                self.connection.heard(asked);
            }
            match called {
                Ok(answer) => {
                    self.caches.answered(live.number, asked);
                    return Ok((live, answer));
                }
                Err(Failure::Call(CallError::Busy | CallError::Grace)) => {
                    let since: Instant = *busy_since.get_or_insert_with(Instant::now);
                    if since.elapsed() > self.connection.times.busy {
                        return Err(Errno::AGAIN);
                    }
                    std::thread::park_timeout(pause);
                    pause = (pause * 2).min(BUSY_PAUSE_MAX);
                }
                Err(Failure::Call(error)) => return Err(error.errno()),
                Err(Failure::Late) => {
                    tracing::error!(
                        ?method,
                        "the server did not answer in time: the change may or may not have been made"
                    );
                    return Err(Errno::IO);
                }
                Err(Failure::NotSent) => self.lose(live.number),
                Err(Failure::Lost) => {
                    self.lose(live.number);
                    repeats.lost(live.epoch);
                }
            }
        }
    }

    fn ask_once(&self, live: Live, method: Method, ask: &Ask<'_>, slot: Option<SlotUse>) -> Result<Reply, Failure> {
        let (arguments, payload) = self.arguments(live, ask, slot)?;
        self.connection.call_on(live.session, method, &arguments, &payload, None)
    }

    /// Puts in what the server of a session calls nodes and open files.
    fn arguments(&self, live: Live, ask: &Ask<'_>, slot: Option<SlotUse>) -> Result<(Arguments, Vec<u8>), Failure> {
        let caller = ask.caller;
        if [ask.handle, ask.second_handle].into_iter().flatten().any(|handle| self.table().has_lost_locks(handle)) {
            return Err(Failure::Call(Errno::IO.into()));
        }
        let SlotUse { slot, sequence } = slot.unwrap_or(SlotUse { slot: 0, sequence: 0 });
        let node = match (ask.node, ask.handle) {
            (Some(node), _) => self.remote_node(live, caller, node, 0)?,
            (None, Some(handle)) => self.remote_handle(live, caller, handle)?,
            (None, None) => 0,
        };
        let second = match (ask.second_node, ask.second_handle) {
            (Some(node), _) => self.remote_node(live, caller, node, 0)?,
            // The handle beside a node.
            (None, Some(handle)) => self.remote_handle(live, caller, handle)?,
            (None, None) => 0,
        };
        let given_up = {
            let mut table = self.table();
            // The server has given no lease on a file of an earlier session, nor on one that it was told to forget.
            let mut of =
                |node| table.remote(node).filter(|remote| remote.epoch == live.epoch).map(|remote| remote.name);
            ask.given_up.map(|node| node.and_then(&mut of))
        };
        let groups = &caller.groups[..caller.groups.len().min(CALL_GROUPS_MAX)];
        let arguments = Arguments {
            node: U64::new(node),
            second: U64::new(second),
            offset: U64::new(given_up[0].unwrap_or(ask.offset)),
            len: U64::new(ask.len),
            extra: U64::new(given_up[1].unwrap_or(ask.extra)),
            flags: U32::new(ask.flags),
            mode: U32::new(ask.mode),
            uid: U32::new(caller.uid),
            gid: U32::new(caller.gid),
            name_len: U16::new(ask.name.len() as u16),
            second_name_len: U16::new(ask.second_name.len() as u16),
            group_count: groups.len() as u8,
            slot,
            sequence: U16::new(sequence),
        };
        let mut payload =
            Vec::with_capacity(ask.name.len() + ask.second_name.len() + groups.len() * 4 + ask.data.len());
        payload.extend_from_slice(ask.name);
        payload.extend_from_slice(ask.second_name);
        payload.extend(groups.iter().flat_map(|group| group.to_le_bytes()));
        payload.extend_from_slice(ask.data);
        Ok((arguments, payload))
    }

    /// What the server of a session calls a node: looked up again if it was known in an earlier one.
    fn remote_node(&self, live: Live, caller: Caller<'_>, number: u64, depth: usize) -> Result<u64, Failure> {
        let remote = self.table().remote(number).ok_or(Failure::Call(CallError::Stale))?;
        if remote.epoch == live.epoch {
            return Ok(remote.name);
        }
        if number == ROOT || depth > DEPTH_MAX {
            // The session is not that of the newest epoch.
            return Err(Failure::NotSent);
        }
        let (parent, name) = self.table().place(number).ok_or(Failure::Call(CallError::Stale))?;
        let parent = self.remote_node(live, caller, parent, depth + 1)?;
        let arguments = Arguments { node: U64::new(parent), name_len: U16::new(name.len() as u16), ..for_user(caller) };
        let payload = [name, groups_of(caller)].concat();
        let look_up = || self.connection.call_on(live.session, Method::LookUp, &arguments, &payload, None);
        let mut reply = look_up();
        if let Err(Failure::Call(error)) = reply
            && error.errno() == Errno::NFILE
            && self.release_nodes_in(live)?
        {
            reply = look_up();
        }
        let reply = reply.map_err(|failure| match failure {
            // It was removed while the server was away.
            Failure::Call(CallError::Errno(Errno::NOENT)) => Failure::Call(CallError::Stale),
            other => other,
        })?;
        let (entry, _) = Entry::read_from_prefix(&reply.payload).map_err(|_| Failure::Call(CallError::Malformed))?;
        let remote = Remote { epoch: live.epoch, name: entry.node.get() };
        if self.table().found_again(number, remote, &entry.attributes) {
            Ok(remote.name)
        } else {
            Err(Failure::Call(CallError::Stale))
        }
    }

    /// What the server of a session calls an open file: opened again if it was in an earlier one.
    fn remote_handle(&self, live: Live, caller: Caller<'_>, number: u64) -> Result<u64, Failure> {
        let (remote, opened) = self.table().handle(number).ok_or(Failure::Call(CallError::Stale))?;
        if remote.epoch == live.epoch {
            return Ok(remote.name);
        }
        let Opened { node, flags, directory } = opened;
        // The rights of an open file are those of its opener.
        let opener = self.openers.of(number);
        let caller = opener.as_ref().map_or(caller, Opener::caller);
        let node = self.remote_node(live, caller, node, 0)?;
        let method = if directory { Method::OpenDirectory } else { Method::Open };
        // What made it, or emptied it, was done.
        let done = rustix::fs::OFlags::CREATE | rustix::fs::OFlags::EXCL | rustix::fs::OFlags::TRUNC;
        let (node, flags, extra) = (U64::new(node), U32::new(flags & !done.bits()), U64::new(OPENS_AGAIN));
        let arguments = Arguments { node, extra, flags, ..for_user(caller) };
        let reply = self.connection.call_on(live.session, method, &arguments, &groups_of(caller), None)?;
        let name = handle_of(&reply).map_err(|error| Failure::Call(error.into()))?;
        let opened = Remote { epoch: live.epoch, name };
        let used = self.table().opened_again(number, opened);
        if used != Some(opened) {
            // Another thread opened it first, or it was closed meanwhile.
            let arguments = Arguments { node: U64::new(name), ..NONE };
            self.connection.call_on(live.session, Method::Close, &arguments, &[], None)?;
        }
        // One of a later session is none of this one's.
        let used = used.ok_or(Failure::Call(CallError::Stale))?;
        if used.epoch == live.epoch { Ok(used.name) } else { Err(Failure::NotSent) }
    }

    /// So many look-ups of a node are not needed any more; with the last, neither is the node.
    pub fn forget(&self, node: u64, look_ups: u64) {
        let (is_removed, forgotten) = {
            let mut table = self.table();
            (table.is_removed(node), table.forget(node, look_ups))
        };
        let Some((remote, answers)) = forgotten else { return };
        self.caches.forget(node, remote.name);
        let one = Forgotten { node: U64::new(remote.name), count: U64::new(answers) };
        let mut forgotten = self.forgotten.lock().unwrap_or_else(PoisonError::into_inner);
        forgotten.push((remote.epoch, one));
        // The server's file system frees the blocks of a removed file when the server has let go of it.
        if forgotten.len() < FORGOTTEN_MAX && !is_removed {
            return;
        }
        let all = std::mem::take(&mut *forgotten);
        drop(forgotten);
        self.tell_forgotten(&all);
    }

    /// Tells the server, unless it knows nothing any more of the epoch in which the nodes were named.
    fn tell_forgotten(&self, all: &[(u64, Forgotten)]) {
        use zerocopy::IntoBytes;
        // As many as fit into a message.
        if all.len() > FILE_NODES_RELEASED_MAX {
            return all.chunks(FILE_NODES_RELEASED_MAX).for_each(|some| self.tell_forgotten(some));
        }
        let told = self.repeat(Method::Forget, false, |live, slot| {
            let now = all.iter().filter(|(epoch, _)| *epoch == live.epoch);
            let data: Vec<u8> = now.flat_map(|(_, one)| one.as_bytes()).copied().collect();
            if data.is_empty() {
                return Ok(());
            }
            self.ask_once(live, Method::Forget, &Ask { data: &data, ..Ask::default() }, slot).map(|_| ())
        });
        if let Err(error) = told {
            tracing::debug!(%error, "cannot tell the server which files are no longer used");
            self.name_again(error, all);
        }
    }

    /// Takes a node from an answer.
    fn hold(&self, live: Live, parent: u64, name: &[u8], entry: &Entry) -> Found {
        let remote = Remote { epoch: live.epoch, name: entry.node.get() };
        let (node, is_full) = {
            let mut table = self.table();
            let node = table.hold(NamedIn { parent, name }, remote, &entry.attributes);
            (node, table.is_full())
        };
        if is_full {
            self.release_nodes();
        }
        Found { node, attributes: entry.attributes }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.return_leases();
        self.connection.close();
    }
}

/// Arguments that name the user and the number of groups, which stand in the payload.
fn for_user(caller: Caller<'_>) -> Arguments {
    let (uid, gid) = (U32::new(caller.uid), U32::new(caller.gid));
    Arguments { uid, gid, group_count: caller.groups.len().min(CALL_GROUPS_MAX) as u8, ..NONE }
}

/// The groups of a user, as they travel.
fn groups_of(caller: Caller<'_>) -> Vec<u8> {
    caller.groups.iter().take(CALL_GROUPS_MAX).flat_map(|group| group.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests;
