//! One session's nodes and open files. Their names are valid in this session only.

use std::collections::{HashMap, HashSet};
use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock};

use byway_fabric::access::Right;
use byway_fabric::{SessionId, Slot, Slots};
use byway_reactor::{File, Instant, OpenFile, Reactor};

use super::super::grace::ClientHolding;
use super::super::locks::FileId;
use super::super::share::Share;
use super::super::sync_point::SyncPoint;
use super::super::wire::{CallError, ClientName};
use super::descriptors::Counted;
use super::leases::LeaseState;
use super::open_files::{OpenFiles, OpenMark, Opening, ShareClient};
use super::outcome::Found;
use super::recovery::ClientKey;
use super::replies::Replies;
use crate::limits::{FILE_HANDLES_MAX, FILE_NODES_MAX};

/// A file, directory or link that a client has found.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) fd: OwnedFd,
    pub(super) id: FileId,
    /// As `stat` has it: its type cannot change.
    pub(super) mode: u32,
    pub(super) share: Arc<Share>,
    pub(super) right: Right,
    /// Of a directory: case counts in its names.
    pub(super) has_exact_names: OnceLock<bool>,
    _counted: Counted,
}

/// A name in a directory.
#[derive(Clone, Debug)]
pub(super) struct NameIn {
    pub(super) directory: Arc<Node>,
    pub(super) name: CString,
}

/// A file or directory that a client has open.
#[derive(Clone, Debug)]
pub(super) enum Open {
    File {
        open: Arc<OpenFile>,
        file: File,
    },
    /// The lock is held while it is listed: the descriptor has one place in the listing.
    Directory {
        fd: Arc<OwnedFd>,
        listing: Arc<Mutex<()>>,
    },
}

#[derive(Clone, Debug)]
pub(super) struct Handle {
    pub(super) open: Open,
    pub(super) node: Arc<Node>,
    pub(super) _counted: Arc<Counted>,
    /// Of a file.
    pub(super) _mark: Option<Arc<OpenMark>>,
}

#[derive(Debug)]
struct KnownNode {
    node: Arc<Node>,
    /// Answers that named it and were not forgotten.
    look_ups: u64,
}

/// What the file system of a client's share is synced by.
#[derive(Clone, Debug)]
pub(super) struct SyncedBy {
    pub(super) point: Arc<SyncPoint>,
    /// Syncs that had failed when the client came: it has lost nothing by them.
    pub(super) failed_before: u64,
}

/// A client that uses shares, in one session or several.
#[derive(Debug)]
pub(super) struct Client {
    /// The session now.
    pub(super) session: SessionId,
    /// Unlike any other client's of this process: whose locks are whose.
    pub(super) key: u64,
    /// As it has named itself. None: it does not come back.
    pub(super) known_as: Option<ClientKey>,
    pub(super) leases: LeaseState,
    pub(super) open_files: OpenFiles,
    /// Entries of its shares' lists that this process has made durable: it may get what they stand for.
    pub(super) listed: HashSet<ClientHolding<ClientName>>,
    /// Entries that the lists may have, of this process or of the one before: they are removed when it goes.
    pub(super) to_unlist: HashSet<ClientHolding<ClientName>>,
    nodes: Slots<KnownNode>,
    by_id: HashMap<(usize, FileId), Slot<KnownNode>>,
    /// Removed files that it came back to, until it forgets them.
    pub(super) came_back: HashMap<FileId, OpenMark>,
    /// Shares of the process before where removed files may be kept for it, until it has asked for them.
    pub(super) unclaimed: Vec<ShareClient>,
    handles: Slots<Handle>,
    handle_count: usize,
    /// It says something every few seconds while it holds locks.
    pub(super) renews_locks: bool,
    /// When it was last given a lock, by the clock of leases.
    pub(super) locked_at: Instant,
    /// Shares that it has attached to.
    pub(super) shares: Vec<Arc<Share>>,
    /// What their file systems are synced by, by share.
    sync_points: HashMap<usize, SyncedBy>,
    pub(super) replies: Replies,
    /// Its calls that have begun and not ended.
    pub(super) requests: usize,
    /// The session has ended.
    pub(super) is_gone: bool,
}

impl Handle {
    /// The descriptor, for calls that a worker makes.
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.open {
            Open::File { open, .. } => open.descriptor(),
            Open::Directory { fd, .. } => Some(fd.as_fd()),
        }
    }
}

impl Client {
    pub(super) fn new(
        session: SessionId,
        key: u64,
        known_as: ClientKey,
        leases: LeaseState,
        open_files: OpenFiles,
    ) -> Self {
        Self {
            session,
            key,
            leases,
            open_files,
            listed: HashSet::new(),
            to_unlist: HashSet::new(),
            known_as: Some(known_as),
            nodes: Slots::default(),
            by_id: HashMap::new(),
            came_back: HashMap::new(),
            unclaimed: Vec::new(),
            handles: Slots::default(),
            handle_count: 0,
            renews_locks: false,
            locked_at: Instant::ZERO,
            shares: Vec::new(),
            sync_points: HashMap::new(),
            replies: Replies::default(),
            requests: 0,
            is_gone: false,
        }
    }

    pub(super) fn node(&self, name: u64) -> Result<Arc<Node>, CallError> {
        let held = self.nodes.get(Slot::from_u64(name)).ok_or(CallError::Stale)?;
        Ok(Arc::clone(&held.node))
    }

    pub(super) fn handle(&self, name: u64) -> Result<&Handle, CallError> {
        self.handles.get(Slot::from_u64(name)).ok_or(CallError::Stale)
    }

    /// Keeps what a share is synced by. Gives how many syncs had failed at the client's first attach to it.
    pub(super) fn keep_sync_point(&mut self, share: &Arc<Share>, point: Arc<SyncPoint>) -> u64 {
        let failed_before = point.failures();
        self.sync_points.entry(address(share)).or_insert(SyncedBy { point, failed_before }).failed_before
    }

    /// What the share of a node is synced by.
    pub(super) fn synced_by(&self, node: &Node) -> Option<SyncedBy> {
        self.sync_points.get(&address(&node.share)).cloned()
    }

    /// Names what was found: by the same name as before, if the client holds it already.
    pub(super) fn hold(&mut self, found: Found, share: &Arc<Share>, right: Right) -> Result<u64, CallError> {
        let key = (address(share), found.id);
        if let Some(slot) = self.by_id.get(&key)
            && let Some(held) = self.nodes.get_mut(*slot)
        {
            held.look_ups += 1;
            return Ok(slot.to_u64());
        }
        if self.by_id.len() >= FILE_NODES_MAX {
            return Err(CallError::TooManyNodes);
        }
        let (share, mode) = (Arc::clone(share), found.attributes.mode.get());
        let Found { fd, id, counted, .. } = found;
        let node = Arc::new(Node { fd, id, mode, share, right, has_exact_names: OnceLock::new(), _counted: counted });
        let slot = self.nodes.insert(KnownNode { node, look_ups: 1 });
        self.by_id.insert(key, slot);
        Ok(slot.to_u64())
    }

    /// Forgets some of the answers that named a node; with the last, the node, which the caller drops.
    pub(super) fn forget(&mut self, name: u64, count: u64) -> Option<Arc<Node>> {
        let slot = Slot::from_u64(name);
        let held = self.nodes.get_mut(slot)?;
        held.look_ups = held.look_ups.saturating_sub(count);
        if held.look_ups > 0 {
            return None;
        }
        let KnownNode { node, .. } = self.nodes.remove(slot)?;
        self.by_id.remove(&(address(&node.share), node.id));
        self.leases.forgotten(node.id);
        self.came_back.remove(&node.id);
        Some(node)
    }

    /// The names of a file, one in each of the session's shares that have it.
    pub(super) fn names_of(&self, id: FileId) -> Vec<u64> {
        let shares = self.shares.iter().map(|share| (address(share), id));
        shares.filter_map(|key| self.by_id.get(&key)).map(|slot| slot.to_u64()).collect()
    }

    pub(super) fn open(&mut self, handle: Handle) -> Result<u64, CallError> {
        if self.handle_count >= FILE_HANDLES_MAX {
            return Err(CallError::TooManyOpen);
        }
        self.handle_count += 1;
        Ok(self.handles.insert(handle).to_u64())
    }

    /// Closes what is open; the caller drops it.
    pub(super) fn close(&mut self, reactor: &mut Reactor, name: u64) -> Result<Handle, CallError> {
        let handle = self.handles.remove(Slot::from_u64(name)).ok_or(CallError::Stale)?;
        self.handle_count -= 1;
        release(reactor, &handle);
        Ok(handle)
    }

    /// The session has ended: its loop forgets the files.
    pub(super) fn end(&mut self, reactor: &mut Reactor) {
        self.handles.iter().for_each(|(_, handle)| release(reactor, handle));
    }

    /// Goes on in another session, perhaps on another loop.
    pub(super) fn resume(&mut self, reactor: &mut Reactor, session: SessionId) {
        (self.session, self.is_gone) = (session, false);
        for (_, handle) in self.handles.iter_mut() {
            if let Open::File { open, file } = &mut handle.open {
                *file = reactor.add_file(Arc::clone(open));
            }
        }
    }

    /// It opens files of the share of a node. One that does not come back opens none.
    pub(super) fn opening(&self, node: &Node) -> Result<Opening, CallError> {
        let client = self.known_as.as_ref().ok_or(CallError::Stale)?.0;
        Ok(Opening { files: self.open_files.clone(), client, share: Arc::clone(&node.share) })
    }

    /// Whether it may open or hold more.
    pub(super) fn has_room(&self, opens: bool) -> Result<(), CallError> {
        if opens && self.handle_count >= FILE_HANDLES_MAX {
            return Err(CallError::TooManyOpen);
        }
        Ok(())
    }
}

/// A number that differs between shares that are served.
fn address(share: &Arc<Share>) -> usize {
    Arc::as_ptr(share).addr()
}

/// Has the loop forget a file: what is under way on it ends as usual.
fn release(reactor: &mut Reactor, handle: &Handle) {
    if let Open::File { file, .. } = handle.open {
        reactor.remove_file(file);
    }
}
