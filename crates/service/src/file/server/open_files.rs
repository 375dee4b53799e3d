//! Which files clients have open, so that a removed one outlives the server process.
//!
//! Before the name of an open file is removed, a link to it is made for each client that has it open ([`kept`]). The next process
//! gives such files back to clients that ask for them (`KeptFiles`). A link is removed when its client has closed the file.
//!
//! One table serves all loops and shares of the process.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use byway_reactor::OpenFile;
use rustix::io::Errno;

use super::super::locks::FileId;
use super::super::share::Share;
use super::super::state::kept;
use super::super::wire::{Attributes, ClientName};
use super::outcome::{Found, MadeFile, Outcome};
use super::table::NameIn;
use super::tree;
use super::workers::as_server;

/// Held while a file is opened, or while a name of it is removed: a file is open before its name is removed, or not at all.
static TURNS: [Mutex<()>; 64] = [const { Mutex::new(()) }; 64];

fn turn(ino: u64) -> MutexGuard<'static, ()> {
    TURNS[ino as usize % TURNS.len()].lock().unwrap_or_else(PoisonError::into_inner)
}

/// A client of a share.
#[derive(Clone, Debug)]
pub(super) struct ShareClient {
    pub(super) client: ClientName,
    pub(super) share: Arc<Share>,
}

impl ShareClient {
    fn is(&self, client: &ClientName, share: &Arc<Share>) -> bool {
        self.client == *client && Arc::ptr_eq(&self.share, share)
    }
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
    /// Links that there are, also those that nobody needs. They change in the file's turn.
    links: HashMap<FileId, Vec<ShareClient>>,
}

/// Where the changes of links were when a worker began to look at files.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look(u64);

/// See the module.
#[derive(Clone, Debug, Default)]
pub(super) struct OpenFiles(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    table: Mutex<Table>,
    /// There are links to remove: asked without the lock.
    has_unneeded: AtomicBool,
    /// Links that there are, and how often some were made or removed: asked without the lock.
    links: AtomicUsize,
    link_changes: AtomicU64,
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
            opener.is_kept |= is_kept;
        } else {
            openers.push(Opener { client: of.client, share: Arc::clone(&of.share), marks: 1, is_kept });
        }
        if is_kept {
            self.note_link(&mut table, id, ShareClient { client: of.client, share: Arc::clone(&of.share) });
        }
        OpenMark { id, of: of.clone() }
    }

    fn note_link(&self, table: &mut Table, id: FileId, of: ShareClient) {
        let links = table.links.entry(id).or_default();
        if !links.iter().any(|other| other.is(&of.client, &of.share)) {
            links.push(of);
            self.0.link_changes.fetch_add(1, Ordering::SeqCst);
            self.0.links.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn note_unlinked(&self, Unneeded { id, client, share }: &Unneeded) {
        let mut table = self.table();
        let Some(links) = table.links.get_mut(id) else { return };
        let Some(at) = links.iter().position(|of| of.is(client, share)) else { return };
        links.swap_remove(at);
        if links.is_empty() {
            table.links.remove(id);
        }
        // In this order: with no link, the change is seen.
        self.0.link_changes.fetch_add(1, Ordering::SeqCst);
        self.0.links.fetch_sub(1, Ordering::SeqCst);
    }

    /// A worker begins to look at files.
    pub(super) fn look(&self) -> Look {
        Look(self.0.link_changes.load(Ordering::SeqCst))
    }

    /// Whether a file has links that are made here, or may have had some since `look`.
    pub(super) fn may_have_links(&self, look: Look, id: FileId) -> bool {
        let is_as_before = || self.0.link_changes.load(Ordering::SeqCst) == look.0;
        let has_none = self.0.links.load(Ordering::SeqCst) == 0 || !self.table().links.contains_key(&id);
        !(has_none && is_as_before())
    }

    /// Attributes as clients see them: without the links that are made here. They were read after `look`; `again` reads them in the
    /// file's turn, where it has links or may have lost one meanwhile.
    pub(super) fn seen(
        &self,
        look: Look,
        id: FileId,
        attributes: Attributes,
        again: impl FnOnce() -> Result<Attributes, Errno>,
    ) -> Attributes {
        if !self.may_have_links(look, id) {
            return attributes;
        }
        let _turn = turn(id.ino);
        let attributes = again().unwrap_or(attributes);
        let links = self.table().links.get(&id).map_or(0, Vec::len);
        Attributes { links: attributes.links.get().saturating_sub(links as u32).into(), ..attributes }
    }

    /// What a call has found, as clients see it.
    pub(super) fn seen_outcome(&self, look: Look, mut outcome: Outcome) -> Outcome {
        let see = |found: &mut Found| {
            found.attributes = self.seen(look, found.id, found.attributes, || tree::attributes(&found.fd));
        };
        match &mut outcome {
            Outcome::Node(found) | Outcome::Created(MadeFile { found, .. }, _) => see(found),
            Outcome::Listing { entries, .. } => {
                entries.iter_mut().filter_map(|entry| entry.found.as_mut()).for_each(see);
            }
            Outcome::Changed(inner, names) => {
                let inner = std::mem::replace(&mut **inner, Outcome::Done);
                return Outcome::Changed(Box::new(self.seen_outcome(look, inner)), *names);
            }
            Outcome::Kept(files) => files.iter_mut().filter_map(|(file, _)| file.found.as_mut()).for_each(see),
            _ => {}
        }
        outcome
    }

    fn is_open(&self, id: FileId) -> bool {
        self.table().files.contains_key(&id)
    }

    /// Clients that have a file open and no link to it.
    fn openers_without_link(&self, id: FileId) -> Vec<ShareClient> {
        let table = self.table();
        let openers = table.files.get(&id).into_iter().flatten().filter(|opener| !opener.is_kept);
        openers.map(|opener| ShareClient { client: opener.client, share: Arc::clone(&opener.share) }).collect()
    }

    /// Makes links to a file for clients that have it open; gives those that have one now. The caller has the file's turn.
    ///
    /// # Errors
    /// The thread has not got the rights of the call's user back: the call must end.
    fn keep(&self, file: &Found, mut clients: Vec<ShareClient>) -> Result<Vec<ShareClient>, Errno> {
        // The log says at the start of which shares nothing can be kept.
        clients.retain(|of| of.share.can_list());
        let link = |ShareClient { client, share }: &ShareClient| {
            let linked = share.list().keep(share.root().as_fd(), file.fd.as_fd(), client, file.id.ino);
            linked.map_err(|error| share.note_unkept(error)).is_ok()
        };
        if !clients.is_empty() {
            as_server(|| clients.retain(link))?;
        }
        {
            let mut table = self.table();
            for link in &clients {
                self.note_link(&mut table, file.id, link.clone());
            }
        }
        self.set_kept(file.id, &clients, true);
        Ok(clients)
    }

    /// Clients have links to a file, or need them no more.
    fn set_kept(&self, id: FileId, clients: &[ShareClient], is_kept: bool) {
        let mut table = self.table();
        let Table { files, unneeded, .. } = &mut *table;
        for ShareClient { client, share } in clients {
            let mut openers = files.get_mut(&id).into_iter().flatten();
            match openers.find(|opener| opener.is_of(client, share)) {
                Some(opener) if is_kept => opener.is_kept = true,
                opener => {
                    // It has closed the file meanwhile, or the name stays.
                    if let Some(opener) = opener {
                        opener.is_kept = false;
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
    pub(super) fn remove(&self, link: &Unneeded) {
        let Unneeded { id, client, share } = link;
        let _turn = turn(id.ino);
        let needs = |opener: &Opener| opener.is_of(client, share) && opener.is_kept;
        if self.table().files.get(id).is_some_and(|openers| openers.iter().any(needs)) {
            return;
        }
        match kept::release(share.root().as_fd(), client, id.ino) {
            Ok(()) => self.note_unlinked(link),
            Err(error) => {
                tracing::warn!(share = share.name(), %error, "a removed file that was closed stays in the share's state folder");
            }
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
    /// Opens a file; `read` reads what is asked for of its first bytes.
    pub(super) fn open(
        &self,
        id: FileId,
        open: impl FnOnce() -> Result<OpenFile, Errno>,
        read: impl FnOnce(&OpenFile) -> Vec<u8>,
    ) -> Result<Outcome, Errno> {
        let (open, mark) = {
            let _turn = turn(id.ino);
            (open()?, self.files.mark(id, self, false))
        };
        let bytes = read(&open);
        Ok(Outcome::Opened(open, mark, bytes))
    }

    /// A file was made and opened. It has its name as long as the caller holds the turn of its directory.
    pub(super) fn created(&self, made: MadeFile) -> Outcome {
        let mark = self.files.mark(made.found.id, self, false);
        Outcome::Created(made, mark)
    }

    /// A file without a name was made and opened.
    ///
    /// # Errors
    /// The thread has not got the rights of the call's user back: the call must end.
    pub(super) fn created_unnamed(&self, made: MadeFile) -> Result<Outcome, Errno> {
        let id = made.found.id;
        let _turn = turn(id.ino);
        let mark = self.files.mark(id, self, false);
        self.files.keep(&made.found, vec![ShareClient { client: self.client, share: Arc::clone(&self.share) }])?;
        Ok(Outcome::Created(made, mark))
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
        let Table { files, unneeded, .. } = &mut *table;
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
            unneeded.push(Unneeded { id: self.id, client: opener.client, share: opener.share });
            shared.0.has_unneeded.store(true, Ordering::Release);
        }
    }
}

/// A name that a call removes.
pub(super) struct Removed {
    pub(super) files: OpenFiles,
    pub(super) name: NameIn,
}

impl Removed {
    /// Keeps the file for the clients that have it open. `ids` has the file's, if it has one. Call it with the turn of the directory,
    /// and hold what it gives until the name is removed. A file that cannot be kept is removed all the same.
    ///
    /// # Errors
    /// The thread has not got the rights of the call's user back: the call must end.
    pub(super) fn keep(&self, ids: &[FileId]) -> Result<Option<Keeping<'_>>, Errno> {
        let NameIn { directory, name } = &self.name;
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
    new: Vec<ShareClient>,
    _turn: MutexGuard<'static, ()>,
}

impl Keeping<'_> {
    /// The name was not removed.
    pub(super) fn undo(self) {
        self.files.set_kept(self.id, &self.new, false);
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::share::{ShareSpec, Users};
    use super::*;

    #[test]
    fn links_of_the_server_are_never_seen() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("name"), "").unwrap();
        std::fs::hard_link(folder.path().join("name"), folder.path().join("other")).unwrap();
        let name = crate::block::spec::VolumeName::new("share").unwrap();
        let spec = ShareSpec { users: Users::Owner, ..ShareSpec::new(name, folder.path().to_owned()) };
        let (files, share) = (OpenFiles::default(), Arc::new(Share::open(spec).unwrap()));
        let found = tree::look_up(share.root(), c"name").unwrap();
        let read = || tree::attributes(&found.fd).unwrap();
        let seen = |look| files.seen(look, found.id, read(), || Ok(read())).links.get();
        assert_eq!(seen(files.look()), 2);

        let mark =
            files.mark(found.id, &Opening { files: files.clone(), client: [1; 16], share: Arc::clone(&share) }, false);
        files.keep(&found, files.openers_without_link(found.id)).unwrap();
        std::fs::remove_file(folder.path().join("name")).unwrap();
        assert_eq!((read().links.get(), seen(files.look())), (2, 1));
        drop(mark);
        assert_eq!((read().links.get(), seen(files.look())), (2, 1), "the link is still there");

        let (before, attributes) = (files.look(), read());
        files.take_unneeded().iter().for_each(|link| files.remove(link));
        assert_eq!((read().links.get(), seen(files.look())), (1, 1));
        let late = files.seen(before, found.id, attributes, || Ok(read()));
        assert_eq!(late.links.get(), 1, "it was looked at before the link went");
    }
}
