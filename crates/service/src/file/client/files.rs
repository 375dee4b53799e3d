//! The calls of a client, one for each that a file system has.

use std::time::Instant;

use byway_fabric::limits::SMALL_BYTES_MAX;
use byway_reactor::Errno;
use byway_rpc::node::Reply;
use zerocopy::{FromBytes, IntoBytes};

use super::super::wire::{
    self, Attributes, CallError, FLAG_APPEND, FLAG_DATA_ONLY, FLAG_NODES, FileSystem, LISTING_HAS_ENDED, Method,
    NewAttributes, read_directory,
};
use super::buffers::Buffer;
use super::changing::file_change;
use super::connection::{Failure, Live};
use super::leases::Fact;
use super::table::{Opened, Remote};
use super::{Ask, Caller, Client, Found, NewMode, entry_of, handle_of, number_of};
use crate::limits::{BUSY_PAUSE_MAX, BUSY_PAUSE_MIN, FILE_CALL_TIME_MAX, FILE_TRANSFER_MAX};

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Where the listing goes on behind it.
    pub cookie: u64,
    /// Its name.
    pub name: Vec<u8>,
    /// Its number, if nodes were asked for and it could be looked up: it counts as a look-up.
    pub node: Option<u64>,
    /// What is known of it: of `.` and `..`, and what could not be looked up, no more than inode number and type.
    pub attributes: Attributes,
}

/// A name in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedIn<'a> {
    /// The directory's number.
    pub parent: u64,
    /// The name.
    pub name: &'a [u8],
}

impl<'a> NamedIn<'a> {
    /// `name` in the directory with the number `parent`.
    pub const fn new(parent: u64, name: &'a [u8]) -> Self {
        Self { parent, name }
    }
}

/// What [`Client::copy_range`] copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
    /// The handle of the file that is read.
    pub from: u64,
    /// The first byte there.
    pub from_offset: u64,
    /// The handle of the file that is written.
    pub to: u64,
    /// The first byte there.
    pub to_offset: u64,
    /// Bytes.
    pub len: u64,
}

impl Client {
    pub(super) fn on_node(caller: Caller<'_>, node: u64) -> Ask<'_> {
        Ask { caller, node: Some(node), repeatable: true, ..Ask::default() }
    }

    fn in_directory<'a>(caller: Caller<'a>, directory: u64, name: &'a [u8]) -> Ask<'a> {
        Ask { caller, node: Some(directory), name, ..Ask::default() }
    }

    pub(super) fn on_handle(caller: Caller<'_>, handle: u64) -> Ask<'_> {
        Ask { caller, handle: Some(handle), repeatable: true, ..Ask::default() }
    }

    /// Finds a name.
    ///
    /// # Errors
    /// The file system's, as for all calls; `EIO` if the server is lost.
    pub fn look_up(&self, caller: Caller<'_>, parent: u64, name: &[u8]) -> Result<Found, Errno> {
        if let Some(known) = self.cached_entry(caller, parent, name) {
            return known;
        }
        let ask = Ask { repeatable: true, ..Self::in_directory(caller, parent, name) };
        let ticket = self.ticket(parent);
        let asked = self.ask(Method::LookUp, &ask);
        let (live, reply) =
            asked.inspect_err(|error| self.learn_absent(caller, ticket, NamedIn { parent, name }, *error))?;
        let entry = entry_of(&reply)?;
        let found = self.hold(live, parent, name, &entry);
        self.learn_entry(caller, ticket, NamedIn { parent, name }, &found, &reply);
        Ok(found)
    }

    /// Attributes of a node, or of an open file.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn attributes(&self, caller: Caller<'_>, node: u64, handle: Option<u64>) -> Result<Attributes, Errno> {
        if let Some(known) = self.cached_attributes(node) {
            return Ok(known);
        }
        let ask = Ask { second_handle: handle, ..Self::on_node(caller, node) };
        let ticket = self.ticket(node);
        let (_, reply) = self.ask(Method::GetAttributes, &ask)?;
        let attributes = attributes_of(&reply)?;
        self.learn_attributes(ticket, node, &attributes, &reply);
        Ok(attributes)
    }

    /// Changes attributes; gives them as they are then.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn set_attributes(
        &self,
        caller: Caller<'_>,
        node: u64,
        handle: Option<u64>,
        new: &NewAttributes,
    ) -> Result<Attributes, Errno> {
        let ask = Ask { second_handle: handle, data: new.as_bytes(), ..Self::on_node(caller, node) };
        attributes_of(&self.ask(Method::SetAttributes, &ask)?.1)
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn read_link(&self, caller: Caller<'_>, node: u64) -> Result<Vec<u8>, Errno> {
        Ok(self.ask(Method::ReadLink, &Self::on_node(caller, node))?.1.payload)
    }

    fn make(&self, method: Method, ask: &Ask<'_>) -> Result<Found, Errno> {
        self.ask_making(method, ask).map(|(_, _, found)| found)
    }

    /// A call that makes a file: nobody has synced it yet.
    fn ask_making(&self, method: Method, ask: &Ask<'_>) -> Result<(Live, Reply, Found), Errno> {
        let made = |live: Live, reply: &Reply| {
            let found = self.hold(live, ask.node.unwrap_or_default(), ask.name, &entry_of(reply)?);
            self.table().changed(found.node, live.instance, false);
            Ok(Some(found))
        };
        let (live, reply, found) = self.ask_holding(method, ask, made)?;
        Ok((live, reply, found.ok_or(Errno::PROTO)?))
    }

    /// Makes a symbolic link.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn make_symlink(&self, caller: Caller<'_>, parent: u64, name: &[u8], target: &[u8]) -> Result<Found, Errno> {
        let ask = Ask { second_name: target, ..Self::in_directory(caller, parent, name) };
        self.make(Method::MakeSymlink, &ask)
    }

    /// Makes a regular file, FIFO or socket node.
    ///
    /// # Errors
    /// See [`Client::look_up`]; `EPERM` for devices.
    pub fn make_node(
        &self,
        caller: Caller<'_>,
        parent: u64,
        name: &[u8],
        mode: impl Into<NewMode>,
    ) -> Result<Found, Errno> {
        let (mode, masked) = mode.into().split();
        self.make(Method::MakeNode, &Ask { mode, extra: masked, ..Self::in_directory(caller, parent, name) })
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn make_directory(
        &self,
        caller: Caller<'_>,
        parent: u64,
        name: &[u8],
        mode: impl Into<NewMode>,
    ) -> Result<Found, Errno> {
        let (mode, masked) = mode.into().split();
        self.make(Method::MakeDirectory, &Ask { mode, extra: masked, ..Self::in_directory(caller, parent, name) })
    }

    /// Gives a file another name.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn link(&self, caller: Caller<'_>, node: u64, parent: u64, name: &[u8]) -> Result<Found, Errno> {
        let ask = Ask { caller, node: Some(node), second_node: Some(parent), name, ..Ask::default() };
        let hold = |live: Live, reply: &Reply| Ok(Some(self.hold(live, parent, name, &entry_of(reply)?)));
        self.ask_holding(Method::Link, &ask, hold)?.2.ok_or(Errno::PROTO)
    }

    /// Changes names, and gives up what is cached of the files that they are known to lead to, so that the server recalls no lease on
    /// them from this client.
    fn ask_giving_up(&self, method: Method, names: [Option<NamedIn<'_>>; 2], ask: Ask<'_>) -> Result<(), Errno> {
        // Held until the call has ended: the kernel may forget one that has another name by now.
        let given_up = {
            let mut table = self.table();
            names.map(|name| name.and_then(|name| table.hold_named(name)))
        };
        let asked = self.ask(method, &Ask { given_up, ..ask });
        given_up.into_iter().flatten().for_each(|node| self.forget(node, 1));
        asked.map(|_| ())
    }

    /// Removes a name of a file.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn unlink(&self, caller: Caller<'_>, parent: u64, name: &[u8]) -> Result<(), Errno> {
        let place = NamedIn { parent, name };
        self.ask_giving_up(Method::Unlink, [Some(place), None], Self::in_directory(caller, parent, name))?;
        self.note_removed(place);
        Ok(())
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn remove_directory(&self, caller: Caller<'_>, parent: u64, name: &[u8]) -> Result<(), Errno> {
        let place = NamedIn { parent, name };
        self.ask_giving_up(Method::RemoveDirectory, [Some(place), None], Self::in_directory(caller, parent, name))?;
        self.note_removed(place);
        Ok(())
    }

    /// Renames, with the flags of `renameat2(2)`.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn rename(&self, caller: Caller<'_>, from: NamedIn<'_>, to: NamedIn<'_>, flags: u32) -> Result<(), Errno> {
        let ask = Ask {
            second_node: Some(to.parent),
            second_name: to.name,
            flags,
            ..Self::in_directory(caller, from.parent, from.name)
        };
        self.ask_giving_up(Method::Rename, [Some(from), Some(to)], ask)?;
        let exchanged = flags & rustix::fs::RenameFlags::EXCHANGE.bits() != 0;
        if !exchanged {
            self.note_removed(to);
        }
        self.table().renamed(from, to, exchanged);
        Ok(())
    }

    /// Opens a file; gives the handle.
    ///
    /// # Errors
    /// See [`Client::look_up`]; `EOPNOTSUPP` for what is no regular file.
    pub fn open(&self, caller: Caller<'_>, node: u64, flags: u32) -> Result<u64, Errno> {
        self.open_and_read(caller, node, flags, 0).map(|(handle, _)| handle)
    }

    /// The same; gives up to so many of the file's first bytes, too.
    pub(super) fn open_and_read(
        &self,
        caller: Caller<'_>,
        node: u64,
        flags: u32,
        len: usize,
    ) -> Result<(u64, Vec<u8>), Errno> {
        let ask = Ask { flags, len: len as u64, ..Self::on_node(caller, node) };
        let (live, reply) = self.ask(Method::Open, &ask)?;
        let handle = self.opened(caller, live, &reply, Opened { node, flags, directory: false })?;
        Ok((handle, reply.payload))
    }

    fn opened(&self, caller: Caller<'_>, live: Live, reply: &Reply, opened: Opened) -> Result<u64, Errno> {
        let remote = Remote { epoch: live.epoch, name: handle_of(reply)? };
        let handle = self.table().open(opened, remote);
        self.openers.opened(handle, caller);
        Ok(handle)
    }

    /// Makes and opens a file; gives it and the handle.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn create(
        &self,
        caller: Caller<'_>,
        NamedIn { parent, name }: NamedIn<'_>,
        flags: u32,
        mode: impl Into<NewMode>,
    ) -> Result<(Found, u64), Errno> {
        let (mode, masked) = mode.into().split();
        let repeatable = flags & rustix::fs::OFlags::EXCL.bits() == 0;
        let ask = Ask { flags, mode, extra: masked, repeatable, ..Self::in_directory(caller, parent, name) };
        let (live, reply, found) = self.ask_making(Method::Create, &ask)?;
        Ok((found, self.opened(caller, live, &reply, Opened { node: found.node, flags, directory: false })?))
    }

    /// Makes and opens a file without a name; gives it and the handle.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn create_unnamed(
        &self,
        caller: Caller<'_>,
        parent: u64,
        flags: u32,
        mode: impl Into<NewMode>,
    ) -> Result<(Found, u64), Errno> {
        let (mode, masked) = mode.into().split();
        let ask = Ask { flags, mode, extra: masked, ..Self::on_node(caller, parent) };
        let (live, reply, found) = self.ask_making(Method::CreateUnnamed, &ask)?;
        Ok((found, self.opened(caller, live, &reply, Opened { node: found.node, flags, directory: false })?))
    }

    /// Opens a directory; gives the handle.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn open_directory(&self, caller: Caller<'_>, node: u64) -> Result<u64, Errno> {
        let (live, reply) = self.ask(Method::OpenDirectory, &Self::on_node(caller, node))?;
        self.opened(caller, live, &reply, Opened { node, flags: 0, directory: true })
    }

    /// Closes a file or directory. A server that is away is told when it is back.
    pub fn close_handle(&self, handle: u64) {
        let Some(remote) = self.take_handle(handle) else { return };
        match self.connection.now() {
            Some(live) => self.close_waiting(live, remote),
            None => self.unclosed().push(remote),
        }
    }

    /// Forgets a handle; gives what the server has for it.
    pub(super) fn take_handle(&self, handle: u64) -> Option<Remote> {
        self.openers.closed(handle);
        let (node, remote) = {
            let mut table = self.table();
            let (_, opened) = table.handle(handle)?;
            (opened.node, table.close(handle)?)
        };
        self.caches.closed(handle, node);
        Some(remote)
    }

    /// Has the server close a file, and waits for its answer.
    pub(super) fn close_waiting(&self, live: Live, remote: Remote) {
        let told = self.close_remote(live, remote);
        if matches!(told, Err(Failure::NotSent | Failure::Lost)) {
            self.lose(live.number);
        }
        if told.is_err() {
            self.unclosed().push(remote);
        }
    }

    /// Has the server close what it opened in the epoch of a session. One that has no room is asked again.
    pub(super) fn close_remote(&self, live: Live, remote: Remote) -> Result<(), Failure> {
        let arguments = super::Arguments { node: remote.name.into(), ..super::NONE };
        let (since, mut pause) = (Instant::now(), BUSY_PAUSE_MIN);
        loop {
            if remote.epoch != live.epoch {
                return Ok(());
            }
            match self.connection.call_on(live.session, Method::Close, &arguments, &[], None) {
                Err(Failure::Call(CallError::Busy)) if since.elapsed() < FILE_CALL_TIME_MAX => {
                    std::thread::park_timeout(pause);
                    pause = (pause * 2).min(BUSY_PAUSE_MAX);
                }
                Err(failure @ (Failure::NotSent | Failure::Lost | Failure::Call(CallError::Busy))) => {
                    return Err(failure);
                }
                _ => return Ok(()),
            }
        }
    }

    /// Writes at an offset, at most 1 MiB at once; perhaps fewer bytes, where the file may not grow further.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn write(&self, caller: Caller<'_>, handle: u64, offset: u64, data: &[u8]) -> Result<usize, Errno> {
        self.write_to(caller, handle, offset, 0, data)
    }

    /// Writes at the end of the file as it is then, at most 1 MiB at once.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn append(&self, caller: Caller<'_>, handle: u64, data: &[u8]) -> Result<usize, Errno> {
        self.write_to(caller, handle, 0, FLAG_APPEND, data)
    }

    fn write_to(&self, caller: Caller<'_>, handle: u64, offset: u64, flags: u32, data: &[u8]) -> Result<usize, Errno> {
        let data = &data[..data.len().min(FILE_TRANSFER_MAX)];
        // A second append would be another one.
        let repeatable = flags & FLAG_APPEND == 0;
        let ask = Ask { offset, flags, len: data.len() as u64, repeatable, ..Self::on_handle(caller, handle) };
        let groups = caller.groups.len().min(crate::limits::CALL_GROUPS_MAX) * 4;
        if data.len() + groups <= SMALL_BYTES_MAX {
            let (_, reply) = self.ask(Method::Write, &Ask { data, ..ask })?;
            return written(number_of(&reply)?, data);
        }
        self.write_large(&ask, data)
    }

    fn write_large(&self, ask: &Ask<'_>, data: &[u8]) -> Result<usize, Errno> {
        // The server takes what fits into a message from there alone.
        if data.len() <= SMALL_BYTES_MAX {
            let caller = Caller { groups: &[], ..ask.caller };
            let (_, reply) = self.ask(Method::Write, &Ask { caller, data, ..*ask })?;
            return written(number_of(&reply)?, data);
        }
        let count = self.with_filled_buffer(Method::Write, ask, data, |buffer, reply| {
            self.connection.buffers.give_back(buffer);
            number_of(reply)
        })?;
        written(count, data)
    }

    /// A call with a window of a buffer, which holds `data` at its start.
    pub(super) fn with_filled_buffer<T>(
        &self,
        method: Method,
        ask: &Ask<'_>,
        data: &[u8],
        mut take: impl FnMut(Buffer, &Reply) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let changing = self.changing(method, ask);
        let mut kept = None;
        let mut call = |live: Live, slot| {
            let (arguments, payload) = self.arguments(live, ask, slot)?;
            let buffer = self.connection.buffer(live)?;
            buffer.write(data).map_err(|_| Failure::NotSent)?;
            let reply = self.connection.call_on(live.session, method, &arguments, &payload, Some(&buffer))?;
            kept = file_change(method, &reply);
            take(buffer, &reply).map_err(|errno| Failure::Call(errno.into()))
        };
        let called = self.with_freed_room(|| self.repeat(method, ask.repeatable, &mut call));
        match kept.filter(|_| called.is_ok()) {
            Some((version, attributes)) => changing.keep_file(version, attributes),
            None => changing.ended(&called),
        }
        let (live, taken) = called?;
        self.note_changes(live, method, ask);
        Ok(taken)
    }

    /// Makes an open file or directory durable.
    ///
    /// # Errors
    /// See [`Client::look_up`]; `EIO` once for each open file if a server process has gone that had taken changes before.
    pub fn sync(&self, caller: Caller<'_>, handle: u64, data_only: bool) -> Result<(), Errno> {
        let flags = if data_only { FLAG_DATA_ONLY } else { 0 };
        let ask = Ask { flags, ..Self::on_handle(caller, handle) };
        let synced = self.repeat(Method::Sync, true, |live, slot| {
            let syncing = self.table().begin_sync(handle, live.instance).map_err(|_| {
                tracing::error!("the server restarted before all changes of a file were durable");
                Failure::Call(Errno::IO.into())
            })?;
            self.ask_once(live, Method::Sync, &ask, slot)?;
            self.table().synced(syncing, data_only);
            Ok(())
        });
        synced.map(|_| ())
    }

    /// Entries of an open directory from a cookie on (0 for the start); none at its end.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn read_directory(
        &self,
        caller: Caller<'_>,
        handle: u64,
        cookie: u64,
        len: usize,
        nodes: bool,
    ) -> Result<Vec<Listed>, Errno> {
        let directory = {
            let mut table = self.table();
            let directory = table.handle(handle).ok_or(Errno::BADF)?.1.node;
            if table.take_listing_end(handle, cookie) {
                return Ok(Vec::new());
            }
            directory
        };
        let flags = if nodes { FLAG_NODES } else { 0 };
        let len = len.clamp(4096, SMALL_BYTES_MAX);
        let ask = Ask { offset: cookie, len: len as u64, flags, ..Self::on_handle(caller, handle) };
        let ticket = self.ticket(directory);
        let (live, reply) = self.ask(Method::ReadDirectory, &ask)?;
        let mut entries = Vec::new();
        for listed in read_directory(&reply.payload) {
            let listed = listed.filter(wire::Listed::has_single_name).ok_or(Errno::PROTO)?;
            let entry = listed.head.entry;
            let found = (entry.node.get() != 0).then(|| self.hold(live, directory, listed.name, &entry));
            if let Some(found) = &found {
                let place = NamedIn::new(directory, listed.name);
                self.learn_listed(caller, ticket, place, found, &listed.head);
            }
            let node = found.map(|found| found.node);
            let (cookie, attributes) = (listed.head.cookie.get(), entry.attributes);
            entries.push(Listed { cookie, name: listed.name.to_vec(), node, attributes });
        }
        if let Some(last) = entries.last().filter(|_| number_of(&reply) == Ok(LISTING_HAS_ENDED)) {
            self.table().note_listing_end(handle, last.cookie);
        }
        Ok(entries)
    }

    /// Sizes of the file system.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn stat_file_system(&self, caller: Caller<'_>, node: u64) -> Result<FileSystem, Errno> {
        let (_, reply) = self.ask(Method::StatFileSystem, &Self::on_node(caller, node))?;
        FileSystem::read_from_prefix(&reply.payload).map(|(sizes, _)| sizes).map_err(|_| Errno::PROTO)
    }

    /// Whether the caller has rights (`access(2)`).
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn access(&self, caller: Caller<'_>, node: u64, rights: u32) -> Result<(), Errno> {
        if self.knows(caller, node, &Fact::Right(rights)) {
            return Ok(());
        }
        let ticket = self.ticket(node);
        self.ask(Method::Access, &Ask { mode: rights, ..Self::on_node(caller, node) })?;
        self.learn_fact(caller, ticket, node, Fact::Right(rights));
        Ok(())
    }

    /// `fallocate(2)`.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn allocate(&self, caller: Caller<'_>, handle: u64, mode: u32, offset: u64, len: u64) -> Result<(), Errno> {
        // Ranges that are collapsed or inserted would be so twice.
        let moves = rustix::fs::FallocateFlags::COLLAPSE_RANGE | rustix::fs::FallocateFlags::INSERT_RANGE;
        let repeatable = mode & moves.bits() == 0;
        let ask = Ask { offset, len, mode, repeatable, ..Self::on_handle(caller, handle) };
        self.ask(Method::Allocate, &ask).map(|_| ())
    }

    /// Finds data (3) or a hole (4) from an offset on.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn seek(&self, caller: Caller<'_>, handle: u64, offset: u64, whence: u32) -> Result<u64, Errno> {
        let ask = Ask { offset, mode: whence, ..Self::on_handle(caller, handle) };
        number_of(&self.ask(Method::Seek, &ask)?.1)
    }

    /// Copies within the server; perhaps fewer bytes than asked for.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn copy_range(&self, caller: Caller<'_>, range: CopyRange) -> Result<u64, Errno> {
        let CopyRange { from, from_offset: offset, to, to_offset, len } = range;
        let ask = Ask { second_handle: Some(to), offset, extra: to_offset, len, ..Self::on_handle(caller, from) };
        number_of(&self.ask(Method::CopyRange, &ask)?.1)
    }
}

/// How much of `data` the server has written, as it says.
fn written(count: u64, data: &[u8]) -> Result<usize, Errno> {
    usize::try_from(count).ok().filter(|count| *count <= data.len()).ok_or(Errno::PROTO)
}

fn attributes_of(reply: &Reply) -> Result<Attributes, Errno> {
    Attributes::read_from_prefix(&reply.payload).map(|(attributes, _)| attributes).map_err(|_| Errno::PROTO)
}
