//! Which files clients have open, so that a removed one outlives the server process.
//!
//! Before the name of an open file is removed, a link to it is made for each client that has it open ([`kept`]). The next process
//! gives such files back to clients that ask for them (`KeptFiles`). A link is removed when its client has closed the file.
//!
//! One table serves all loops and shares of the process.

use std::collections::HashMap;
use std::ffi::CString;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use byway_reactor::OpenFile;
use rustix::io::Errno;

use super::super::locks::FileId;
use super::super::share::Share;
use super::super::state::kept;
use super::super::wire::{Attributes, ClientName};
use super::outcome::{Found, Outcome};
use super::table::Node;
use super::tree;
use super::workers::as_server;

/// Held while a file is opened, or while a name of it is removed: a file is open before its name is removed, or not at all.
static TURNS: [Mutex<()>; 64] = [const { Mutex::new(()) }; 64];

fn turn(ino: u64) -> MutexGuard<'static, ()> {
    TURNS[ino as usize % TURNS.len()].lock().unwrap_or_else(PoisonError::into_inner)
}

/// A client that has a file open.
#[derive(Debug)]
struct Opener {
    client: ClientName,
    share: Arc<Share>,
    marks: usize,
    /// It has a link.
    is_kept: bool,
}

impl Opener {
    fn set_kept(&mut self, is_kept: bool, count: &AtomicUsize) {
        match (std::mem::replace(&mut self.is_kept, is_kept), is_kept) {
            (false, true) => _ = count.fetch_add(1, Ordering::Relaxed),
            (true, false) => _ = count.fetch_sub(1, Ordering::Relaxed),
            _ => {}
        }
    }

    fn is_of(&self, client: &ClientName, share: &Arc<Share>) -> bool {
        self.client == *client && Arc::ptr_eq(&self.share, share)
    }
}

/// A link that nobody needs any more.
#[derive(Debug)]
pub(super) struct Unneeded {
    id: FileId,
    client: ClientName,
    share: Arc<Share>,
}

#[derive(Debug, Default)]
struct Table {
    files: HashMap<FileId, Vec<Opener>>,
    unneeded: Vec<Unneeded>,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub(super) struct OpenFiles(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    table: Mutex<Table>,
    /// There are links to remove: asked without the lock.
    has_unneeded: AtomicBool,
    /// Openers with a link: asked without the lock.
    kept: AtomicUsize,
}

impl OpenFiles {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark(&self, id: FileId, of: &Opening, is_kept: bool) -> OpenMark {
        let mut table = self.table();
        let openers = table.files.entry(id).or_default();
        if let Some(opener) = openers.iter_mut().find(|opener| opener.is_of(&of.client, &of.share)) {
            opener.marks += 1;
            opener.set_kept(opener.is_kept || is_kept, &self.0.kept);
        } else {
            self.0.kept.fetch_add(usize::from(is_kept), Ordering::Relaxed);
            openers.push(Opener { client: of.client, share: Arc::clone(&of.share), marks: 1, is_kept });
        }
        OpenMark { id, of: of.clone() }
    }

    /// Attributes as clients see them: without the links that are made here.
    pub(super) fn seen(&self, id: FileId, attributes: Attributes) -> Attributes {
        if self.0.kept.load(Ordering::Relaxed) == 0 {
            return attributes;
        }
        let table = self.table();
        let kept = table.files.get(&id).into_iter().flatten().filter(|opener| opener.is_kept).count();
        Attributes { links: attributes.links.get().saturating_sub(kept as u32).into(), ..attributes }
    }

    fn is_open(&self, id: FileId) -> bool {
        self.table().files.contains_key(&id)
    }

    /// Clients that have a file open and no link to it.
    fn openers_without_link(&self, id: FileId) -> Vec<(ClientName, Arc<Share>)> {
        let table = self.table();
        let openers = table.files.get(&id).into_iter().flatten().filter(|opener| !opener.is_kept);
        openers.map(|opener| (opener.client, Arc::clone(&opener.share))).collect()
    }

    /// Makes links to a file for clients that have it open; gives those that have one now. The caller has the file's turn.
    ///
    /// # Errors
    /// The thread has not got the rights of the call's user back: the call must end.
    fn keep(
        &self,
        file: &Found,
        mut clients: Vec<(ClientName, Arc<Share>)>,
    ) -> Result<Vec<(ClientName, Arc<Share>)>, Errno> {
        // The log says at the start of which shares nothing can be kept.
        clients.retain(|(_, share)| share.can_list());
        let link = |(client, share): &(ClientName, Arc<Share>)| {
            let linked = share.list().keep(share.root().as_fd(), file.fd.as_fd(), client, file.id.ino);
            linked.map_err(|error| share.note_unkept(error)).is_ok()
        };
        if !clients.is_empty() {
            as_server(|| clients.retain(link))?;
        }
        self.set_kept(file.id, &clients, true);
        Ok(clients)
    }

    /// Clients have links to a file, or need them no more.
    fn set_kept(&self, id: FileId, clients: &[(ClientName, Arc<Share>)], is_kept: bool) {
        let mut table = self.table();
        let Table { files, unneeded } = &mut *table;
        for (client, share) in clients {
            let mut openers = files.get_mut(&id).into_iter().flatten();
            match openers.find(|opener| opener.is_of(client, share)) {
                Some(opener) if is_kept => opener.set_kept(true, &self.0.kept),
                opener => {
                    // It has closed the file meanwhile, or the name stays.
                    if let Some(opener) = opener {
                        opener.set_kept(false, &self.0.kept);
                    }
                    unneeded.push(Unneeded { id, client: *client, share: Arc::clone(share) });
                    self.0.has_unneeded.store(true, Ordering::Release);
                }
            }
        }
    }

    /// The links that nobody needs since the last time.
    pub(super) fn take_unneeded(&self) -> Vec<Unneeded> {
        if !self.0.has_unneeded.swap(false, Ordering::AcqRel) {
            return Vec::new();
        }
        std::mem::take(&mut self.table().unneeded)
    }

    /// Removes a link with the server's own rights, unless the client has the file open again.
    pub(super) fn remove(&self, Unneeded { id, client, share }: &Unneeded) {
        let _turn = turn(id.ino);
        let needs = |opener: &Opener| opener.is_of(client, share) && opener.is_kept;
        if self.table().files.get(id).is_some_and(|openers| openers.iter().any(needs)) {
            return;
        }
        if let Err(error) = kept::release(share.root().as_fd(), client, id.ino) {
            tracing::warn!(share = share.name(), %error, "a removed file that was closed stays in the share's state folder");
        }
    }
}

/// A client that opens files of a share.
#[derive(Clone, Debug)]
pub(super) struct Opening {
    pub(super) files: OpenFiles,
    pub(super) client: ClientName,
    pub(super) share: Arc<Share>,
}

impl Opening {
    /// Opens a file.
    pub(super) fn open(&self, id: FileId, open: impl FnOnce() -> Result<OpenFile, Errno>) -> Result<Outcome, Errno> {
        let _turn = turn(id.ino);
        Ok(Outcome::Opened(open()?, self.files.mark(id, self, false)))
    }

    /// A file was made and opened. It has its name as long as the caller holds the turn of its directory.
    pub(super) fn created(&self, (open, found): (OpenFile, Found)) -> Outcome {
        let mark = self.files.mark(found.id, self, false);
        Outcome::Created(open, found, mark)
    }

    /// A file without a name was made and opened.
    ///
    /// # Errors
    /// The thread has not got the rights of the call's user back: the call must end.
    pub(super) fn created_unnamed(&self, (open, found): (OpenFile, Found)) -> Result<Outcome, Errno> {
        let _turn = turn(found.id.ino);
        let mark = self.files.mark(found.id, self, false);
        self.files.keep(&found, vec![(self.client, Arc::clone(&self.share))])?;
        Ok(Outcome::Created(open, found, mark))
    }

    /// The client comes back to a file that the process before has kept for it.
    pub(super) fn came_back(&self, id: FileId) -> OpenMark {
        self.files.mark(id, self, true)
    }

    /// The link of one of the client's files: nobody needs it if the client has not come back to it.
    pub(super) fn link(&self, id: FileId) -> Unneeded {
        Unneeded { id, client: self.client, share: Arc::clone(&self.share) }
    }
}

/// A client has a file open as long as this lives.
#[derive(Debug)]
pub(super) struct OpenMark {
    id: FileId,
    of: Opening,
}

impl Drop for OpenMark {
    fn drop(&mut self) {
        let Opening { files: shared, client, share } = &self.of;
        let mut table = shared.table();
        let Table { files, unneeded } = &mut *table;
        let Some(openers) = files.get_mut(&self.id) else { return };
        let Some(at) = openers.iter().position(|opener| opener.is_of(client, share)) else { return };
        openers[at].marks -= 1;
        if openers[at].marks > 0 {
            return;
        }
        let opener = openers.swap_remove(at);
        if openers.is_empty() {
            files.remove(&self.id);
        }
        if opener.is_kept {
            shared.0.kept.fetch_sub(1, Ordering::Relaxed);
            unneeded.push(Unneeded { id: self.id, client: opener.client, share: opener.share });
            shared.0.has_unneeded.store(true, Ordering::Release);
        }
    }
}

/// A name that a call removes.
pub(super) struct Removed {
    pub(super) files: OpenFiles,
    pub(super) name: (Arc<Node>, CString),
}

impl Removed {
    /// Keeps the file for the clients that have it open. `ids` has the file's, if it has one. Call it with the turn of the directory,
    /// and hold what it gives until the name is removed. A file that cannot be kept is removed all the same.
    ///
    /// # Errors
    /// The thread has not got the rights of the call's user back: the call must end.
    pub(super) fn keep(&self, ids: &[FileId]) -> Result<Option<Keeping<'_>>, Errno> {
        let (directory, name) = &self.name;
        // The turn first: a file that is opened from now on waits until its name is gone.
        let Ok(id) = tree::identity(directory.fd.as_fd(), name) else { return Ok(None) };
        let turn = turn(id.ino);
        if !ids.contains(&id) || !self.files.is_open(id) {
            return Ok(Some(Keeping { files: &self.files, id, new: Vec::new(), _turn: turn }));
        }
        let found = match tree::look_up(&directory.fd, name) {
            Ok(found) => found,
            Err(error) => {
                if error != Errno::NOENT {
                    directory.share.note_unkept(error);
                }
                return Ok(None);
            }
        };
        let new = self.files.keep(&found, self.files.openers_without_link(found.id))?;
        Ok(Some(Keeping { files: &self.files, id, new, _turn: turn }))
    }
}

/// A file that is kept, while its name is removed.
pub(super) struct Keeping<'a> {
    files: &'a OpenFiles,
    id: FileId,
    /// Whose links are new.
    new: Vec<(ClientName, Arc<Share>)>,
    _turn: MutexGuard<'static, ()>,
}

impl Keeping<'_> {
    /// The name was not removed.
    pub(super) fn undo(self) {
        self.files.set_kept(self.id, &self.new, false);
    }
}
