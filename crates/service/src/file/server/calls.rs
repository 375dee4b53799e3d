//! The calls of the file service, taken apart, checked and begun.

use std::ffi::CString;
use std::os::fd::AsFd;
use std::sync::Arc;

use byway_fabric::access::Right;
use byway_fabric::limits::SMALL_BYTES_MAX;
use byway_fabric::{DESCRIPTOR_BYTES, Descriptor};
use byway_reactor::privilege::User;
use byway_rpc::session::{CallRef, Incomer};
use rustix::fs::{OFlags, RenameFlags};
use rustix::io::Errno;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::super::grace::Holding;
use super::super::locks::FileId;
use super::super::state;
use super::super::wire::{
    Arguments, CallError, FLAG_DATA_ONLY, FLAG_NODES, FLAG_UNCLAIMED, Forgotten, Method, NewAttributes,
    SHARE_READ_ONLY, ShareEntry,
};
use super::descriptors::check_room;
use super::kept_names::KeptNames;
use super::leases::{Act, Changer, Named, Parked};
use super::open_files::{OpenFiles, Opening, Removed};
use super::outcome::Outcome;
use super::reopening::Reopening;
use super::replies::{Reply, SlotUse};
use super::syncing::sync_open;
use super::table::{Client, Handle, NameIn, Node, Open};
use super::tree::{self, AskedOfEntries};
use super::workers::{Work, has_rights_of_server};
use super::{Call, FileRequest, Shares, Window};
use crate::host::At;
use crate::limits::{CALL_GROUPS_MAX, FILE_COPY_MAX, FILE_NAME_MAX, FILE_OPEN_BYTES_MAX, LINK_TARGET_MAX};

/// A call, taken apart.
pub(super) struct Asked<'a> {
    pub(super) call: Call,
    pub(super) method: Method,
    pub(super) arguments: Arguments,
    pub(super) name: &'a [u8],
    second_name: &'a [u8],
    groups: &'a [u8],
    pub(super) data: &'a [u8],
    windows: &'a [u8],
}

impl<'a> Asked<'a> {
    pub(super) fn parse(call: CallRef, asked: &Incomer<'a>) -> Result<Self, CallError> {
        let method = Method::from_number(asked.method).ok_or(CallError::UnknownMethod)?;
        let arguments =
            Arguments::read_from_bytes(asked.arguments.padded()).unwrap_or_else(|_| Arguments::new_zeroed());
        // A node or handle is good for the session that it was given to, so nobody else's session can ask for another.
        if asked.delegated || usize::from(arguments.group_count) > CALL_GROUPS_MAX {
            return Err(CallError::Malformed);
        }
        let split = |bytes: &'a [u8], len: usize| bytes.split_at_checked(len).ok_or(CallError::Malformed);
        let (name, rest) = split(asked.payload, usize::from(arguments.name_len.get()))?;
        let (second_name, rest) = split(rest, usize::from(arguments.second_name_len.get()))?;
        let (groups, data) = split(rest, usize::from(arguments.group_count) * 4)?;
        let call = Call { slot: SlotUse::of(&arguments)?, ..call.into() };
        Ok(Self { call, method, arguments, name, second_name, groups, data, windows: asked.windows })
    }

    /// The window for what is read or written, if the call has one.
    pub(super) fn window(&self, reads: bool) -> Option<Window> {
        let descriptor = self.windows.first_chunk::<DESCRIPTOR_BYTES>().map(Descriptor::from_bytes)?;
        let key = if reads { descriptor.put_key() } else { descriptor.get_key() };
        Some(Window { key, len: usize::try_from(descriptor.len()).unwrap_or(usize::MAX) })
    }

    /// Whose rights the call has.
    pub(super) fn user(&self, node: &Node) -> Result<User, CallError> {
        let user = node.share.acting().user(|| {
            let groups = self.groups.as_chunks::<4>().0.iter().map(|group| u32::from_le_bytes(*group));
            User { uid: self.arguments.uid.get(), gid: self.arguments.gid.get(), groups: groups.collect() }
        });
        user.ok_or_else(|| Errno::INVAL.into())
    }
}

/// One step of a path: never more, and never the way up.
fn step(name: &[u8]) -> Result<CString, CallError> {
    if name.len() > FILE_NAME_MAX {
        return Err(Errno::NAMETOOLONG.into());
    }
    if name.is_empty() || name.contains(&b'/') || name == b"." || name == b".." {
        return Err(Errno::INVAL.into());
    }
    if state::is_reserved(name) {
        return Err(Errno::PERM.into());
    }
    text(name)
}

fn text(bytes: &[u8]) -> Result<CString, CallError> {
    CString::new(bytes).map_err(|_| Errno::INVAL.into())
}

/// Whether a call changes what clients may have cached.
fn changes(asked: &Asked<'_>) -> bool {
    let truncates = asked.arguments.flags.get() & OFlags::TRUNC.bits() != 0;
    asked.method.changes() || asked.method == Method::Open && truncates
}

/// Whether open flags say that the file will change.
fn writes(flags: u32) -> bool {
    let flags = OFlags::from_bits_retain(flags);
    flags.intersects(OFlags::WRONLY | OFlags::RDWR | OFlags::TRUNC)
}

impl Shares {
    /// Begins a call. One that fails here is answered by the caller.
    pub(super) fn begin(&mut self, at: &mut At<'_>, asked: &Asked<'_>) -> Result<(), CallError> {
        let call = asked.call;
        if at.fabric.is_full() || self.workers.is_full() {
            return Err(CallError::Busy);
        }
        if changes(asked) && self.recovery.is_in_grace(Holding::Leases, at.reactor.now()) {
            return Err(CallError::Grace);
        }
        match asked.method {
            Method::Attach => self.attach(at, asked),
            Method::List => {
                self.list(at, asked);
                Ok(())
            }
            Method::Detach => {
                self.detach(call.session)?;
                self.reply(at, call, Ok(Reply::DONE));
                Ok(())
            }
            Method::Forget => {
                let client = self.client(call.session)?;
                let mut nodes = Vec::new();
                for bytes in asked.data.as_chunks::<{ size_of::<Forgotten>() }>().0 {
                    let forgotten = Forgotten::read_from_bytes(bytes).map_err(|_| CallError::Malformed)?;
                    nodes.extend(client.forget(forgotten.node.get(), forgotten.count.get()));
                }
                if !nodes.is_empty() {
                    self.workers.drop_later(nodes);
                }
                self.reply(at, call, Ok(Reply::DONE));
                Ok(())
            }
            Method::Close => {
                let closed = self.client(call.session)?.close(at.reactor, asked.arguments.node.get())?;
                self.workers.drop_later(closed);
                self.reply(at, call, Ok(Reply::DONE));
                Ok(())
            }
            Method::ReclaimComplete => {
                let has_all = asked.arguments.flags.get() & FLAG_UNCLAIMED == 0;
                self.reclaim_complete(at.reactor.now(), call.session, has_all)?;
                self.reply(at, call, Ok(Reply::DONE));
                Ok(())
            }
            Method::Recalls => self.recalls(at, asked),
            Method::KeptFiles => self.kept_files(at, asked),
            Method::Lock => self.lock(at, call, &asked.arguments),
            Method::Read => self.read(at, asked),
            Method::Write => self.write(at, asked),
            Method::LookUp if self.look_up_at_once(at, asked)? => Ok(()),
            Method::SyncShare => self.sync_share(at, asked),
            Method::Sync | Method::ReadDirectory | Method::Allocate | Method::Seek | Method::CopyRange => {
                self.on_handle(at, asked)
            }
            _ => self.on_node(at, asked),
        }
    }

    /// Lists the shares that the client may use from an index on, as many as fit; the result begins with how many there are.
    fn list(&mut self, at: &mut At<'_>, asked: &Asked<'_>) {
        let right = |share| Self::right(at, asked.call.session, share);
        let open: Vec<_> = self.shares.iter().filter_map(|share| Some((share, right(share)?))).collect();
        let mut payload = Vec::new();
        for (share, right) in open.iter().skip(usize::try_from(asked.arguments.offset.get()).unwrap_or(usize::MAX)) {
            let name = share.name().as_bytes();
            let description = share.spec().description.as_deref().unwrap_or_default().as_bytes();
            let entry = ShareEntry {
                flags: U32::new(if *right == Right::Read { SHARE_READ_ONLY } else { 0 }),
                name_len: U16::new(name.len() as u16),
                description_len: U16::new(description.len() as u16),
            };
            if payload.len() + size_of::<ShareEntry>() + name.len() + description.len() > SMALL_BYTES_MAX {
                break;
            }
            payload.extend_from_slice(entry.as_bytes());
            payload.extend_from_slice(name);
            payload.extend_from_slice(description);
        }
        let count = (open.len() as u64).to_le_bytes();
        self.reply(at, asked.call, Ok(Reply { result: &count, payload: &payload }));
    }

    /// Answers at once what the kernel has in memory. False: a worker has to look, because the look might wait for a disk or a server, or
    /// needs another user's rights.
    fn look_up_at_once(&mut self, at: &mut At<'_>, asked: &Asked<'_>) -> Result<bool, CallError> {
        let client = self.client(asked.call.session)?;
        let node = client.node(asked.arguments.node.get())?;
        if !node.share.is_local() || !has_rights_of_server(&asked.user(&node)?) {
            return Ok(false);
        }
        client.has_room(asked.method.opens())?;
        // Before the look, as for workers.
        let since = if node.share.gives_leases() { self.lease_since(asked.call.session) } else { None };
        let (files, name) = (self.recovery.open_files(), step(asked.name)?);
        let look = files.look();
        // A worker refuses it.
        if check_room().is_err() {
            return Ok(false);
        }
        let Some(found) = tree::look_up_in_memory(&node.fd, &name) else { return Ok(false) };
        // A worker looks again, without the server's links.
        if found.as_ref().is_ok_and(|found| files.may_have_links(look, found.id)) {
            return Ok(false);
        }
        let request = FileRequest::Worker { call: asked.call, node, since };
        let request = self.start(at, request);
        self.finish(at, request, found.map(Outcome::Node));
        Ok(true)
    }

    /// Has a worker do it.
    fn work(&mut self, at: &mut At<'_>, asked: &Asked<'_>, node: Arc<Node>, work: Work) -> Result<(), CallError> {
        let (user, session) = (asked.user(&node)?, asked.call.session);
        let reads = matches!(asked.method, Method::LookUp | Method::GetAttributes | Method::ReadDirectory)
            && node.share.gives_leases();
        let since = if reads { self.lease_since(session) } else { None };
        let changed = self.changed_files(asked, &node)?;
        let files = self.recovery.open_files();
        let work: Work = Box::new(move || {
            let look = files.look();
            work().map(|outcome| files.seen_outcome(look, outcome))
        });
        let request = self.start(at, FileRequest::Worker { call: asked.call, node, since });
        if !changed.is_empty() {
            self.change(at, request, session, &changed, &changed, Parked::Work(user, work));
        } else if !self.workers.run(request, Some(user), work) {
            self.end(at, request, Err(CallError::Busy));
        }
        Ok(())
    }

    fn on_handle(&mut self, at: &mut At<'_>, asked: &Asked<'_>) -> Result<(), CallError> {
        let client = self.client(asked.call.session)?;
        let handle = client.handle(asked.arguments.node.get())?.clone();
        let node = Arc::clone(&handle.node);
        check_right(&node, asked)?;
        let Arguments { offset, len, extra, flags, mode, second, .. } = asked.arguments;
        let (offset, len, extra) = (offset.get(), len.get(), extra.get());
        let (flags, mode) = (flags.get(), mode.get());
        let work: Work = match asked.method {
            Method::Sync => Box::new(move || sync_open(&handle, flags & FLAG_DATA_ONLY != 0)),
            Method::ReadDirectory => {
                let Open::Directory { fd, listing } = handle.open else { return Err(Errno::NOTDIR.into()) };
                let len = usize::try_from(len).unwrap_or(usize::MAX).min(SMALL_BYTES_MAX);
                // A client without leases would forget it at once.
                let xattrs = node.share.gives_leases() && self.takes_leases(asked.call.session);
                let wanted = AskedOfEntries { nodes: flags & FLAG_NODES != 0, xattrs };
                Box::new(move || {
                    let _turn = listing.lock().map_err(|_| Errno::IO)?;
                    tree::list(fd.as_fd(), offset, len, wanted)
                })
            }
            Method::Allocate => Box::new(move || {
                let mode = rustix::fs::FallocateFlags::from_bits_retain(mode);
                rustix::fs::fallocate(handle.descriptor().ok_or(Errno::BADF)?, mode, offset, len)?;
                Ok(Outcome::Done)
            }),
            Method::Seek => Box::new(move || tree::seek(handle.descriptor().ok_or(Errno::BADF)?, offset, mode)),
            _ => {
                let target = client.handle(second.get())?.clone();
                check_right(&target.node, asked)?;
                Box::new(move || {
                    let (mut from, mut to) = (offset, extra);
                    let len = usize::try_from(len.min(FILE_COPY_MAX)).map_err(|_| Errno::INVAL)?;
                    let (source, target) = (handle.descriptor(), target.descriptor());
                    let (source, target) = (source.ok_or(Errno::BADF)?, target.ok_or(Errno::BADF)?);
                    let copied = rustix::fs::copy_file_range(source, Some(&mut from), target, Some(&mut to), len)?;
                    Ok(Outcome::Number(copied as u64))
                })
            }
        };
        self.work(at, asked, node, work)
    }

    fn on_node(&mut self, at: &mut At<'_>, asked: &Asked<'_>) -> Result<(), CallError> {
        let client = self.client(asked.call.session)?;
        let node = client.node(asked.arguments.node.get())?;
        check_right(&node, asked)?;
        let opens = asked.method.opens();
        client.has_room(opens)?;
        let (flags, mode) = (asked.arguments.flags.get(), asked.arguments.mode.get());
        let new_mode = tree::NewMode::of(&asked.arguments);
        if node.right == Right::Read && opens && writes(flags) {
            return Err(Errno::ROFS.into());
        }
        let this = Arc::clone(&node);
        let work: Work = match asked.method {
            Method::LookUp => look_up(this, step(asked.name)?),
            Method::GetAttributes => {
                let (handle, files) = (handle_on(client, &node, asked)?, client.open_files.clone());
                Box::new(move || {
                    let open = handle.as_ref().and_then(Handle::descriptor);
                    let (look, read) = (files.look(), || tree::attributes(open.unwrap_or(this.fd.as_fd())));
                    Ok(Outcome::Bytes(files.seen(look, this.id, read()?, read).as_bytes().to_vec()))
                })
            }
            Method::SetAttributes => {
                let new = NewAttributes::read_from_bytes(asked.data).map_err(|_| CallError::Malformed)?;
                let (handle, files) = (handle_on(client, &node, asked)?, client.open_files.clone());
                Box::new(move || {
                    let open = handle.as_ref().and_then(Handle::descriptor);
                    let look = files.look();
                    let attributes = tree::set_attributes(this.fd.as_fd(), open, &new)?;
                    let again = || tree::attributes(this.fd.as_fd());
                    Ok(Outcome::Bytes(files.seen(look, this.id, attributes, again).as_bytes().to_vec()))
                })
            }
            Method::ReadLink => Box::new(move || tree::read_link(this.fd.as_fd())),
            Method::Open => {
                if !tree::is_openable(node.mode) {
                    // A device or a FIFO is the client's machine's to open, never this one's.
                    return Err(Errno::OPNOTSUPP.into());
                }
                open(asked, this, client.opening(&node)?)?
            }
            Method::OpenDirectory => open_directory(asked, this)?,
            Method::CreateUnnamed => {
                let opening = client.opening(&node)?;
                // One that may never get a name gets no link.
                let can_have_names = flags & OFlags::EXCL.bits() == 0;
                Box::new(move || {
                    let created = tree::create_unnamed(this.fd.as_fd(), flags, new_mode)?;
                    if can_have_names { opening.created_unnamed(created) } else { Ok(opening.created(created)) }
                })
            }
            Method::StatFileSystem => Box::new(move || tree::stat_file_system(this.fd.as_fd())),
            Method::Access => Box::new(move || tree::access(this.fd.as_fd(), mode)),
            Method::ListXattrs => Box::new(move || tree::list_xattrs(this.fd.as_fd())),
            Method::GetXattr | Method::SetXattr | Method::RemoveXattr => on_xattr(asked, this)?,
            Method::Link | Method::Rename => {
                let directory = client.node(asked.arguments.second.get())?;
                let (by, given_up) = (client.leases.changer(&node.share), given_up(client, asked));
                on_two(asked, this, directory, by, given_up, client.open_files.clone())?
            }
            _ => {
                let (by, given_up) = (client.leases.changer(&node.share), given_up(client, asked));
                let opening = client.opening(&node)?;
                on_directory(asked, this, by, given_up, opening)?
            }
        };
        self.work(at, asked, node, work)
    }
}

/// The open file by which a node's attributes are asked for or changed, if a call names one. It must be that node's: leases are
/// recalled of the node.
fn handle_on(client: &Client, node: &Node, asked: &Asked<'_>) -> Result<Option<Handle>, CallError> {
    let number = asked.arguments.second.get();
    if number == 0 {
        return Ok(None);
    }
    let handle = client.handle(number)?;
    if handle.node.id != node.id {
        return Err(CallError::Malformed);
    }
    Ok(Some(handle.clone()))
}

/// Files of which the client has given up what it had cached, because it believes that the call's names lead to them.
fn given_up(client: &Client, asked: &Asked<'_>) -> Vec<FileId> {
    if !matches!(asked.method, Method::Unlink | Method::RemoveDirectory | Method::Rename) {
        return Vec::new();
    }
    // A node that it does not have is none: then its lease is recalled.
    let of = |number: u64| client.node(number).ok().map(|node| node.id);
    [asked.arguments.offset.get(), asked.arguments.extra.get()].into_iter().filter_map(of).collect()
}

/// Opens a file, and reads its first bytes, if the call asks for them.
fn open(asked: &Asked<'_>, this: Arc<Node>, opening: Opening) -> Result<Work, CallError> {
    let (flags, reopening) = (asked.arguments.flags.get(), Reopening::of(asked, &this)?);
    let wanted = usize::try_from(asked.arguments.len.get()).unwrap_or(usize::MAX).min(FILE_OPEN_BYTES_MAX);
    Ok(Box::new(move || {
        check_room()?;
        let open = || reopening.open(this.fd.as_fd(), || tree::open(this.fd.as_fd(), flags));
        opening.open(this.id, open, |file| tree::first_bytes(file, wanted))
    }))
}

fn open_directory(asked: &Asked<'_>, this: Arc<Node>) -> Result<Work, CallError> {
    let reopening = Reopening::of(asked, &this)?;
    Ok(Box::new(move || {
        check_room()?;
        Ok(Outcome::Directory(reopening.open(this.fd.as_fd(), || tree::open_directory(this.fd.as_fd()))?))
    }))
}

fn look_up(this: Arc<Node>, name: CString) -> Work {
    Box::new(move || {
        check_room()?;
        Ok(Outcome::Node(tree::look_up(&this.fd, &name)?))
    })
}

/// Calls on two nodes of one share.
fn on_two(
    asked: &Asked<'_>,
    this: Arc<Node>,
    directory: Arc<Node>,
    by: Changer,
    given_up: Vec<FileId>,
    files: OpenFiles,
) -> Result<Work, CallError> {
    same_share(&this, &directory)?;
    let (name, user, known) = (step(asked.name)?, asked.user(&this)?, vec![this.id, directory.id]);
    if asked.method == Method::Link {
        let kept = KeptNames { directory: Arc::clone(&directory), before: None, after: Some(name.clone()) };
        let act = Box::new(move || tree::link(this.fd.as_fd(), directory.fd.as_fd(), &name));
        return Ok(Named { by, user, known, given_up, names: Vec::new(), removed: None, kept: Some(kept), act }.work());
    }
    let (new_name, flags) = (step(asked.second_name)?, asked.arguments.flags.get());
    let kept = (this.id == directory.id).then(|| KeptNames {
        directory: Arc::clone(&this),
        before: Some(name.clone()),
        after: Some(new_name.clone()),
    });
    let from = NameIn { directory: this, name };
    let to = NameIn { directory, name: new_name };
    let removes = flags & RenameFlags::EXCHANGE.bits() == 0;
    let removed = removes.then(|| Removed { files, name: to.clone() });
    let names = vec![from.clone(), to.clone()];
    let act = Box::new(move || tree::rename(&from, &to, flags));
    Ok(Named { by, user, known, given_up, names, removed, kept, act }.work())
}

/// Calls that make or remove a name of a directory.
fn on_directory(
    asked: &Asked<'_>,
    this: Arc<Node>,
    by: Changer,
    given_up: Vec<FileId>,
    opening: Opening,
) -> Result<Work, CallError> {
    let (flags, mode) = (asked.arguments.flags.get(), tree::NewMode::of(&asked.arguments));
    let (name, user, known) = (step(asked.name)?, asked.user(&this)?, vec![this.id]);
    // What is there is removed or emptied.
    let changes_it = match asked.method {
        Method::Unlink | Method::RemoveDirectory => true,
        Method::Create => flags & OFlags::TRUNC.bits() != 0,
        _ => false,
    };
    let changed = NameIn { directory: Arc::clone(&this), name: name.clone() };
    let removed =
        (asked.method == Method::Unlink).then(|| Removed { files: opening.files.clone(), name: changed.clone() });
    let names = if changes_it { vec![changed] } else { Vec::new() };
    let removes = matches!(asked.method, Method::Unlink | Method::RemoveDirectory);
    let (before, after) = if removes { (Some(name.clone()), None) } else { (None, Some(name.clone())) };
    let kept = Some(KeptNames { directory: Arc::clone(&this), before, after });
    let act: Act = match asked.method {
        Method::Create => Box::new(move || Ok(opening.created(tree::create(this.fd.as_fd(), &name, flags, mode)?))),
        Method::MakeSymlink => {
            if asked.second_name.len() > LINK_TARGET_MAX {
                return Err(Errno::NAMETOOLONG.into());
            }
            let target = text(asked.second_name)?;
            Box::new(move || tree::make_symlink(this.fd.as_fd(), &name, &target))
        }
        Method::MakeNode => Box::new(move || tree::make_node(this.fd.as_fd(), &name, mode)),
        Method::MakeDirectory => Box::new(move || tree::make_directory(this.fd.as_fd(), &name, mode)),
        Method::Unlink | Method::RemoveDirectory => {
            let directory = asked.method == Method::RemoveDirectory;
            let flags = if directory { rustix::fs::AtFlags::REMOVEDIR } else { rustix::fs::AtFlags::empty() };
            Box::new(move || {
                rustix::fs::unlinkat(&this.fd, &name, flags)?;
                Ok(Outcome::Done)
            })
        }
        _ => return Err(CallError::Malformed),
    };
    Ok(Named { by, user, known, given_up, names, removed, kept, act }.work())
}

/// Extended attributes: which of them a user may see and change, the file system below says.
fn on_xattr(asked: &Asked<'_>, this: Arc<Node>) -> Result<Work, CallError> {
    let name = text(asked.name)?;
    let flags = asked.arguments.flags.get();
    Ok(match asked.method {
        Method::GetXattr => Box::new(move || tree::get_xattr(this.fd.as_fd(), &name)),
        Method::SetXattr => {
            let value = asked.data.to_vec();
            Box::new(move || tree::set_xattr(this.fd.as_fd(), &name, &value, flags))
        }
        _ => Box::new(move || tree::remove_xattr(this.fd.as_fd(), &name)),
    })
}

fn check_right(node: &Node, asked: &Asked<'_>) -> Result<(), CallError> {
    if node.right == Right::Read && asked.method.changes() { Err(Errno::ROFS.into()) } else { Ok(()) }
}

/// Two shares may lie on one file system, and are two to their clients.
fn same_share(one: &Node, other: &Node) -> Result<(), CallError> {
    if Arc::ptr_eq(&one.share, &other.share) { Ok(()) } else { Err(Errno::XDEV.into()) }
}
