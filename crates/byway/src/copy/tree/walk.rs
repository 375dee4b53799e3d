//! Walks the source, makes its directories at the destination, and queues the other entries.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use rustix::fs::FileType;
use rustix::io::Errno;

use super::entry::is_temporary;
use super::failure::Failure;
use super::run::{Entry, Folder, Run, add};
use super::side::{Directory, Facts, Listing};
use crate::limits::COPY_TREE_DEPTH_MAX;
use crate::output;

/// All rights of the owner of a directory.
const OWNER_BITS: u32 = 0o700;

/// A directory whose entries are being listed.
struct Frame {
    folder: Arc<Folder>,
    listing: Box<dyn Listing>,
}

/// Lets the owner of a directory write there until it gets the rights of its source: it may have them from an earlier copy, of which
/// not all entries were copied.
pub(super) fn open_to_owner(directory: &dyn Directory) {
    if let Ok(there) = directory.facts()
        && there.mode & OWNER_BITS != OWNER_BITS
    {
        // If the directory is another user's, the entries that cannot be written there are named.
        let _ = directory.take_attributes(&Facts { mode: there.mode | OWNER_BITS, ..there });
    }
}

/// [`Run::marker`] in the destination, which is removed with this.
struct Marker {
    directory: Arc<dyn Directory>,
    name: Vec<u8>,
}

impl Drop for Marker {
    fn drop(&mut self) {
        // A server that is away keeps it; the next copy removes it.
        let _ = self.directory.remove(&self.name);
    }
}

impl Run {
    /// Walks the tree below a directory, which is released at the end.
    pub(super) fn walk(&self, top: Arc<Folder>) {
        let marked = self.retrying(|_| self.mark(&top.to)).and_then(|marker| {
            self.check_not_destination(&*top.from, b"")?;
            Ok(marker)
        });
        let mut marker = match marked {
            Ok(marker) => marker,
            Err(failure) => {
                self.failed(&failure, &top);
                return self.release(top);
            }
        };
        let mut stack = Vec::new();
        self.enter(&mut stack, top);
        while let Some(Frame { folder, listing }) = stack.last_mut() {
            if self.is_ending() {
                return;
            }
            match listing.next() {
                Ok(Some((name, facts))) => {
                    let folder = Arc::clone(folder);
                    self.found(&mut stack, &folder, name, facts);
                }
                ended => {
                    let Some(Frame { folder, .. }) = stack.pop() else { return };
                    if let Err(source) = ended {
                        let place = self.source(&folder.path);
                        self.failed(&Failure::Call { place, doing: "list", source }, &folder);
                    }
                    if stack.is_empty() {
                        // Before the directory gets its times.
                        marker = None;
                    }
                    self.release(folder);
                }
            }
        }
        drop(marker);
    }

    fn mark(&self, directory: &Arc<dyn Directory>) -> Result<Option<Marker>, Failure> {
        let name = self.marker();
        match directory.create_file(&name) {
            Ok(_) | Err(Errno::EXIST) => Ok(Some(Marker { directory: Arc::clone(directory), name })),
            // Nor can a directory be made there, so a copy into itself ends.
            Err(Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::NOSPC | Errno::DQUOT) => Ok(None),
            Err(source) => Err(Failure::Call { place: self.destination(b""), doing: "make a file in", source }),
        }
    }

    /// Fails for a directory of the source that is the destination: a copy of it into itself would never end.
    fn check_not_destination(&self, from: &dyn Directory, path: &[u8]) -> Result<(), Failure> {
        match from.find(&self.marker()) {
            Ok(_) => Err(Failure::Within(self.source(path))),
            // What else there may be is said by the listing.
            Err(_) => Ok(()),
        }
    }

    fn found(&self, stack: &mut Vec<Frame>, folder: &Arc<Folder>, name: Vec<u8>, facts: Facts) {
        if is_temporary(&name, &facts) {
            let place = self.source(&folder.below(&name));
            output::note(format_args!("{place}: left by a copy that was interrupted, not copied"));
            return;
        }
        if facts.kind != FileType::Directory {
            self.queue_entry(folder, name.clone(), name, facts);
            return;
        }
        match self.retrying(|_| self.descend(folder, &name)) {
            Ok(below) => self.enter(stack, below),
            Err(failure) => self.failed(&failure, folder),
        }
    }

    /// Queues an entry that is no directory.
    pub(super) fn queue_entry(&self, folder: &Arc<Folder>, name: Vec<u8>, new_name: Vec<u8>, facts: Facts) {
        add(&self.counts.found, 1);
        add(&self.counts.found_bytes, facts.size);
        folder.hold();
        let entry = Entry { folder: Arc::clone(folder), name, new_name, facts };
        if let Err(entry) = self.queue.push(entry) {
            self.release(entry.folder);
        }
    }

    fn enter(&self, stack: &mut Vec<Frame>, folder: Arc<Folder>) {
        let listed = self.retrying(|_| {
            let place = || self.source(&folder.path);
            folder.from.list().map_err(|source| Failure::Call { place: place(), doing: "list", source })
        });
        match listed {
            Ok(listing) => stack.push(Frame { folder, listing }),
            Err(failure) => {
                self.failed(&failure, &folder);
                self.release(folder);
            }
        }
    }

    fn descend(&self, parent: &Arc<Folder>, name: &[u8]) -> Result<Arc<Folder>, Failure> {
        let path = [&parent.below(name), &b"/"[..]].concat();
        if parent.depth >= COPY_TREE_DEPTH_MAX {
            return Err(Failure::Deep(self.source(&path)));
        }
        let unread = |source| Failure::Call { place: self.source(&path), doing: "open", source };
        let from = parent.from.open_directory(name).map_err(unread)?;
        let facts = from.facts().map_err(unread)?;
        self.check_not_destination(&*from, &path)?;
        let (to, was_there) = self.make(&*parent.to, name, &path)?;
        parent.hold();
        Ok(Arc::new(Folder {
            from,
            to,
            is_single: false,
            depth: parent.depth + 1,
            was_there,
            facts: Some(facts),
            parent: Some(Arc::clone(parent)),
            only: None,
            pending: AtomicUsize::new(1),
            path,
        }))
    }

    /// Makes a directory, or opens the one that is there; says which.
    pub(super) fn make(
        &self,
        parent: &dyn Directory,
        name: &[u8],
        path: &[u8],
    ) -> Result<(Arc<dyn Directory>, bool), Failure> {
        let failed = |doing| move |source| Failure::Call { place: self.destination(path), doing, source };
        let was_there = match parent.make_directory(name) {
            Ok(()) => false,
            Err(Errno::EXIST) => true,
            Err(error) => return Err(failed("make")(error)),
        };
        let made = match parent.open_directory(name) {
            Err(Errno::NOTDIR | Errno::LOOP) => return Err(Failure::OtherKind(self.destination(path))),
            made => made.map_err(failed("open"))?,
        };
        if was_there {
            open_to_owner(&*made);
            self.remove_temporaries(&*made, path)?;
        }
        Ok((made, was_there))
    }

    /// Removes what interrupted copies have left in a directory. A copy that still runs then fails to rename its file, by name.
    pub(super) fn remove_temporaries(&self, directory: &dyn Directory, path: &[u8]) -> Result<(), Failure> {
        let failed = |doing| move |source| Failure::Call { place: self.destination(path), doing, source };
        let mut listing = directory.list().map_err(failed("list"))?;
        while let Some((name, facts)) = listing.next().map_err(failed("list"))? {
            if is_temporary(&name, &facts) {
                match directory.remove(&name) {
                    Ok(()) | Err(Errno::NOENT) => {}
                    Err(error) => return Err(failed("remove what an earlier copy left in")(error)),
                }
            }
        }
        Ok(())
    }
}
