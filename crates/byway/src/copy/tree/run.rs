//! State that the threads of one copy share: options, counts, failures, and directories that wait for their entries.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::FileType;
use rustix::io::Errno;
use serde::Serialize;

use super::entry::is_temporary;
use super::failure::{Failure, Place};
use super::moving::Moving;
use super::queue::Queue;
use super::side::{Directory, Facts};
use crate::limits::{COPY_TREE_ATTEMPTS_MAX, COPY_TREE_FAILURES_SHOWN_MAX};
use crate::output;

/// The names of files that are not complete yet begin with it.
pub(super) const TEMPORARY: &[u8] = b".byway-copy-";

/// How a tree is copied.
#[derive(Clone, Copy, Debug)]
pub(super) struct Options {
    /// Threads that copy: calls under way.
    pub(super) threads: usize,
    /// Bytes of a read or write.
    pub(super) request_bytes: usize,
    /// Read all copies back.
    pub(super) verify: bool,
    /// Replace files that differ.
    pub(super) overwrite: bool,
}

/// Counters of the work done so far.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) files: AtomicU64,
    pub(super) directories: AtomicU64,
    pub(super) links: AtomicU64,
    /// Complete files of an earlier copy.
    pub(super) passed_over: AtomicU64,
    /// Bytes of files that were copied, passed over or given up, without holes.
    pub(super) done_bytes: AtomicU64,
    /// Bytes that were copied.
    pub(super) copied_bytes: AtomicU64,
    /// Entries found, not counting directories.
    pub(super) found: AtomicU64,
    /// Their bytes.
    pub(super) found_bytes: AtomicU64,
    pub(super) failures: AtomicU64,
    /// Extended attributes that the destination refused.
    pub(super) xattrs_refused: AtomicU64,
}

/// The counts when all is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Copied {
    pub(super) files: u64,
    pub(super) directories: u64,
    pub(super) links: u64,
    pub(super) passed_over: u64,
    pub(super) bytes: u64,
    pub(super) failures: u64,
    pub(super) xattrs_refused: u64,
    pub(super) verified: bool,
}

pub(super) fn add(count: &AtomicU64, more: u64) {
    count.fetch_add(more, Ordering::Relaxed);
}

pub(super) fn get(count: &AtomicU64) -> u64 {
    count.load(Ordering::Relaxed)
}

/// A directory whose entries are being copied. When the last one is done, it gets its attributes and is synced.
pub(super) struct Folder {
    pub(super) from: Arc<dyn Directory>,
    pub(super) to: Arc<dyn Directory>,
    /// Below the source, with a slash at its end but for the top.
    pub(super) path: Vec<u8>,
    /// One entry is copied, and the sides of the copy are its paths.
    pub(super) is_single: bool,
    pub(super) depth: usize,
    /// The destination may have entries already.
    pub(super) was_there: bool,
    /// The source's; `None` for a directory that is not part of what is copied.
    pub(super) facts: Option<Facts>,
    pub(super) parent: Option<Arc<Self>>,
    /// Of a directory into which one entry is copied: its names at the source and here.
    pub(super) only: Option<[Vec<u8>; 2]>,
    /// Entries under way, and one for the listing.
    pub(super) pending: AtomicUsize,
}

impl Folder {
    pub(super) fn below(&self, name: &[u8]) -> Vec<u8> {
        if self.is_single { Vec::new() } else { [&self.path, name].concat() }
    }

    /// An entry more is under way.
    pub(super) fn hold(&self) {
        self.pending.fetch_add(1, Ordering::Relaxed);
    }
}

/// An entry to copy that is no directory.
pub(super) struct Entry {
    pub(super) folder: Arc<Folder>,
    pub(super) name: Vec<u8>,
    /// The name of the copy.
    pub(super) new_name: Vec<u8>,
    /// As they were listed.
    pub(super) facts: Facts,
}

/// See the module.
pub(super) struct Run {
    pub(super) options: Options,
    /// The source and the destination, as they are shown.
    pub(super) sides: [String; 2],
    pub(super) queue: Queue<Entry, Arc<Moving>>,
    pub(super) counts: Counts,
    /// A signal has stopped the copy.
    pub(super) stopped: AtomicBool,
    /// A server has not come back in time.
    pub(super) lost: AtomicBool,
    /// Names the temporary files of this run.
    token: u64,
    next_temporary: AtomicU64,
    noted: Mutex<()>,
}

impl Run {
    pub(super) fn new(options: Options, sides: [String; 2]) -> Result<Self, getrandom::Error> {
        Ok(Self {
            options,
            sides,
            queue: Queue::default(),
            counts: Counts::default(),
            stopped: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            token: getrandom::u64()?,
            next_temporary: AtomicU64::new(0),
            noted: Mutex::default(),
        })
    }

    pub(super) fn source(&self, path: &[u8]) -> Place {
        Place::below(&self.sides[0], path)
    }

    pub(super) fn destination(&self, path: &[u8]) -> Place {
        Place::below(&self.sides[1], path)
    }

    /// The name of an empty file in the destination while the source is walked. A directory of the source that has it is the
    /// destination, by whatever name.
    pub(super) fn marker(&self) -> Vec<u8> {
        [TEMPORARY, format!("{:016x}-{}", self.token, u64::MAX).as_bytes()].concat()
    }

    /// A name that no other file has.
    pub(super) fn temporary(&self) -> Vec<u8> {
        let number = self.next_temporary.fetch_add(1, Ordering::Relaxed);
        [TEMPORARY, format!("{:016x}-{number}", self.token).as_bytes()].concat()
    }

    /// Whether the copy ends early.
    pub(super) fn is_ending(&self) -> bool {
        self.stopped.load(Ordering::Relaxed) || self.lost.load(Ordering::Relaxed)
    }

    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        self.queue.abandon();
    }

    /// Prints why an entry was not copied, and counts it.
    pub(super) fn failed(&self, failure: &Failure, folder: &Folder) {
        if matches!(failure, Failure::Stopped) || self.lost.load(Ordering::Relaxed) {
            return;
        }
        let is_unanswered = matches!(failure, Failure::Call { source: Errno::IO, .. });
        if is_unanswered && (folder.from.is_lost() || folder.to.is_lost()) {
            self.lost.store(true, Ordering::Relaxed);
            self.queue.abandon();
            return;
        }
        let shown = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.counts.failures.fetch_add(1, Ordering::Relaxed);
        match before.cmp(&COPY_TREE_FAILURES_SHOWN_MAX) {
            std::cmp::Ordering::Less => output::note(format_args!("not copied: {failure}")),
            std::cmp::Ordering::Equal => output::note("further entries are not copied; the end tells how many"),
            std::cmp::Ordering::Greater => {}
        }
        drop(shown);
    }

    /// Repeats an attempt, from its beginning, when a call may have been lost with a server process.
    pub(super) fn retrying<T>(&self, mut attempt: impl FnMut(bool) -> Result<T, Failure>) -> Result<T, Failure> {
        let mut done = attempt(false);
        for _ in 1..COPY_TREE_ATTEMPTS_MAX {
            match &done {
                Err(Failure::Call { source: Errno::IO | Errno::STALE, .. }) if !self.is_ending() => {
                    done = attempt(true);
                }
                _ => break,
            }
        }
        done
    }

    /// An entry of the directory, or its listing, is done. The last of these finishes the directory, and then perhaps its parents.
    pub(super) fn release(&self, folder: Arc<Folder>) {
        let mut folder = folder;
        while folder.pending.fetch_sub(1, Ordering::AcqRel) == 1 {
            if let Err(failure) = self.finish(&folder) {
                self.failed(&failure, &folder);
            }
            let Some(parent) = folder.parent.clone() else { return };
            folder = parent;
        }
    }

    fn finish(&self, folder: &Folder) -> Result<(), Failure> {
        if self.is_ending() {
            return Ok(());
        }
        let place = || self.destination(&folder.path);
        self.retrying(|is_again| {
            if is_again {
                self.check_names(folder)?;
            }
            if let Some(facts) = &folder.facts {
                let unset = |source| Failure::Call { place: place(), doing: "set rights and times", source };
                self.copy_attributes(&*folder.from, facts, &*folder.to, &folder.path, unset)?;
            }
            folder.to.sync().map_err(|source| Failure::Call { place: place(), doing: "sync", source })
        })?;
        add(&self.counts.directories, u64::from(folder.facts.is_some()));
        Ok(())
    }

    /// Looks whether all that was copied into a directory is there. A client reports once, by a sync that fails, that its server restarted: a
    /// power failure takes names with it that were not synced, and the next sync succeeds without them.
    fn check_names(&self, folder: &Folder) -> Result<(), Failure> {
        let unread = |source| Failure::Call { place: self.source(&folder.path), doing: "list", source };
        if let Some([name, new_name]) = &folder.only {
            let facts = folder.from.find(name).map_err(unread)?;
            return self.check_name(folder, new_name, &facts);
        }
        let mut listing = folder.from.list().map_err(unread)?;
        while let Some((name, facts)) = listing.next().map_err(unread)? {
            if !is_temporary(&name, &facts) {
                self.check_name(folder, &name, &facts)?;
            }
        }
        Ok(())
    }

    fn check_name(&self, folder: &Folder, name: &[u8], of: &Facts) -> Result<(), Failure> {
        let is_copy =
            |there: Facts| there.kind == of.kind && (of.kind != FileType::RegularFile || there.seems_equal(of));
        match folder.to.find(name) {
            Ok(there) if is_copy(there) => Ok(()),
            Ok(_) | Err(Errno::NOENT) => Err(Failure::Unsynced(self.destination(&folder.below(name)))),
            Err(source) => {
                Err(Failure::Call { place: self.destination(&folder.below(name)), doing: "look up", source })
            }
        }
    }

    pub(super) fn copied(&self) -> Copied {
        let counts = &self.counts;
        Copied {
            files: get(&counts.files),
            directories: get(&counts.directories),
            links: get(&counts.links),
            passed_over: get(&counts.passed_over),
            bytes: get(&counts.copied_bytes),
            failures: get(&counts.failures),
            xattrs_refused: get(&counts.xattrs_refused),
            verified: self.options.verify,
        }
    }
}
