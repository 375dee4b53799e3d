//! Checkpoints: the contents of all segments, at a moment when the program does not store, in a folder from which a later job resumes.
//!
//! At a checkpoint all processes meet. Each writes the pages whose home it is, which it loads as its program would; the homes have all pages
//! that were ever touched. All meet again, process 0 publishes the manifest if all have written theirs, and all meet a third time. What the
//! processes tell each other of it lies in a page of the area behind the segments. See docs/decisions/0051.

mod files;

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use byway_service::dsm::{Consistency, Misuse, Page, PlacedSegment};
use byway_service::limits::{DSM_PAGES_MAX, DSM_RANKS_MAX};

pub(crate) use self::files::Manifest;
use self::files::{Written, read_pages, remove_other_pages, remove_pages, write_pages};
use crate::job::{BARRIER_JOB, CallError, Job};
use crate::join::JoinError;
use crate::limits::PAGE_BYTES;

/// Pages behind the segments: one that nothing uses, so that an access beyond the last segment is none to the other, which has the words below.
pub(crate) const PAGES: u64 = 2;

/// Words of a process: 0 or the number of the error, and what it has written.
const WORDS_PER_RANK: usize = 3;
/// The word of the manifest: 0 or the number of the error.
const WORD_MANIFEST: usize = DSM_RANKS_MAX * WORDS_PER_RANK;
const _: () = assert!(WORD_MANIFEST < PAGE_BYTES / size_of::<u64>());

/// Why a folder's checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file system's.
    #[error("{}: {error}", path.display())]
    Io {
        /// Of which file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// There is none.
    #[error("{} has no checkpoint: start the job without --resume", folder.display())]
    Missing {
        /// Where.
        folder: PathBuf,
    },
    /// There is one that would be replaced.
    #[error("{} has a checkpoint (generation {generation}): start the job with --resume, or give an empty folder", folder.display())]
    Exists {
        /// Where.
        folder: PathBuf,
        /// Which.
        generation: u64,
    },
    /// A job that runs has its checkpoints there.
    #[error("{}: another job that runs writes its checkpoints there: end it, or give another folder", folder.display())]
    InUse {
        /// Where.
        folder: PathBuf,
    },
    /// It is not what was written.
    #[error("{}: {what}: the checkpoint is damaged or incomplete", path.display())]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        what: &'static str,
    },
    /// It is of another job.
    #[error(
        "the checkpoint is of a job with -n {ranks} --memory {bytes} --consistency {}: resume it with the same",
        consistency.name()
    )]
    OtherJob {
        /// Its processes.
        ranks: usize,
        /// Its memory.
        bytes: u64,
        /// Its consistency.
        consistency: Consistency,
    },
}

/// Pages of the segments of a job that writes checkpoints, if it has an area of so many.
pub(crate) fn pages_of_segments(pages: u64) -> u64 {
    pages.min(DSM_PAGES_MAX - PAGES)
}

impl Manifest {
    /// The checkpoint of a folder, if a job with these options can resume from it.
    pub(crate) fn to_resume(
        folder: &Path,
        ranks: usize,
        pages: u64,
        consistency: Consistency,
    ) -> Result<Self, CheckpointError> {
        let found = Self::read(folder)?.ok_or_else(|| CheckpointError::Missing { folder: folder.to_owned() })?;
        if (found.ranks.len(), found.pages, found.consistency) != (ranks, pages, consistency) {
            return Err(CheckpointError::OtherJob {
                ranks: found.ranks.len(),
                bytes: found.pages * PAGE_BYTES as u64,
                consistency: found.consistency,
            });
        }
        Ok(found)
    }

    /// Fails if a folder has a checkpoint.
    pub(crate) fn must_be_missing(folder: &Path) -> Result<(), CheckpointError> {
        match Self::read(folder)? {
            None => Ok(()),
            Some(Self { generation, .. }) => Err(CheckpointError::Exists { folder: folder.to_owned(), generation }),
        }
    }
}

/// A job's folder for checkpoints, as a process has it.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    folder: PathBuf,
    consistency: Consistency,
    /// Pages of all segments together.
    pages: u64,
    is_resumed: bool,
    progress: Mutex<Progress>,
}

#[derive(Debug, Default)]
struct Progress {
    /// The last generation that was tried.
    last: u64,
    /// Generations whose files are there: the one that counts, and those of which it is not known.
    kept: Vec<u64>,
}

impl Checkpoints {
    pub(crate) fn new(folder: PathBuf, consistency: Consistency, pages: u64, resumed: Option<&Manifest>) -> Self {
        let progress = resumed.map_or_else(Progress::default, |manifest| Progress {
            last: manifest.generation,
            kept: vec![manifest.generation],
        });
        Self { folder, consistency, pages, is_resumed: resumed.is_some(), progress: Mutex::new(progress) }
    }

    /// The page with the words.
    fn page(&self) -> Page {
        (self.pages + PAGES - 1) as Page
    }
}

fn to_word(error: &std::io::Error) -> u64 {
    error.raw_os_error().unwrap_or(rustix::io::Errno::IO.raw_os_error()) as u64
}

impl Job {
    /// Meets all processes, and writes the contents of all segments to the folder of `--checkpoint`. Gives whether it did: without that flag
    /// this is a barrier. One thread of each process calls this, and no thread stores to a segment until it returns.
    ///
    /// When it returns, the checkpoint is durable. With an error, which every process gets, the one before is still there.
    ///
    /// # Errors
    /// `Checkpoint`: a process could not write; `Misuse` if another thread of this process is in this call.
    pub fn checkpoint(&self) -> Result<bool, CallError> {
        let Some(checkpoints) = self.checkpoints() else { return self.meet_of_job().map(|()| false) };
        let progress = checkpoints.progress.try_lock();
        let mut progress = progress.map_err(|_| Misuse::AtBarrier { barrier: BARRIER_JOB })?;
        self.meet_of_job()?;
        progress.last += 1;
        let generation = progress.last;
        let (words, own) = (self.open(checkpoints.page(), 1)?.words(), usize::from(self.rank()) * WORDS_PER_RANK);
        let (homes, segments) = self.image();
        let homes: Vec<Page> = homes.into_iter().filter(|page| u64::from(*page) < checkpoints.pages).collect();
        let written = self.write_own(checkpoints, generation, &homes);
        let (error, Written { pages, crc32c }) =
            written.map_or_else(|error| (to_word(&error), Written::default()), |written| (0, written));
        for (at, word) in [error, pages, u64::from(crc32c)].into_iter().enumerate() {
            words[own + at].store(word, Relaxed);
        }
        self.meet_of_job()?;
        let failed = |rank: &u8| words[usize::from(*rank) * WORDS_PER_RANK].load(Relaxed) > 0;
        if let Some(rank) = (0..self.ranks()).find(failed) {
            let error = words[usize::from(rank) * WORDS_PER_RANK].load(Relaxed) as i32;
            remove_pages(&checkpoints.folder, generation, self.rank());
            // Before another checkpoint changes the words.
            self.meet_of_job()?;
            return Err(CallError::Checkpoint { rank, error });
        }
        if self.rank() == 0 {
            let published = self.publish(checkpoints, generation, segments, words);
            words[WORD_MANIFEST].store(published.map_or_else(|error| to_word(&error), |()| 0), Relaxed);
        }
        self.meet_of_job()?;
        match words[WORD_MANIFEST].load(Relaxed) as i32 {
            0 => {
                let old = std::mem::replace(&mut progress.kept, vec![generation]);
                for old in old {
                    remove_pages(&checkpoints.folder, old, self.rank());
                }
                Ok(true)
            }
            error => {
                // The manifest may name this generation or the one before.
                progress.kept.push(generation);
                Err(CallError::Checkpoint { rank: 0, error })
            }
        }
    }

    /// Whether the segments hold what they held at a checkpoint of an earlier job (`byway dsm run --resume`).
    pub fn is_resumed(&self) -> bool {
        self.checkpoints().is_some_and(|checkpoints| checkpoints.is_resumed)
    }

    fn write_own(&self, checkpoints: &Checkpoints, generation: u64, homes: &[Page]) -> std::io::Result<Written> {
        let load = |page: Page, bytes: &mut [u8; PAGE_BYTES]| {
            for (to, word) in bytes.as_chunks_mut().0.iter_mut().zip(self.words_of(page)) {
                *to = word.load(Relaxed).to_ne_bytes();
            }
        };
        write_pages(&checkpoints.folder, (generation, self.rank()), homes, load)
    }

    fn publish(
        &self,
        checkpoints: &Checkpoints,
        generation: u64,
        segments: Vec<PlacedSegment>,
        words: &[AtomicU64],
    ) -> std::io::Result<()> {
        let written = |rank: u8| {
            let own = usize::from(rank) * WORDS_PER_RANK;
            Written { pages: words[own + 1].load(Relaxed), crc32c: words[own + 2].load(Relaxed) as u32 }
        };
        let manifest = Manifest {
            generation,
            consistency: checkpoints.consistency,
            pages: checkpoints.pages,
            ranks: (0..self.ranks()).map(written).collect(),
            segments,
        };
        manifest.publish(&checkpoints.folder)
    }

    /// Fills the segments with what a checkpoint has, before the program uses them. Each process has the pages again whose home it was.
    pub(crate) fn resume(&self, folder: &Path, manifest: &Manifest) -> Result<(), JoinError> {
        for segment in &manifest.segments {
            self.open(segment.first, segment.pages)?;
        }
        read_pages(folder, (manifest.generation, self.rank()), manifest, |page, bytes| {
            for (word, from) in self.words_of(page).iter().zip(bytes.as_chunks().0) {
                word.store(u64::from_ne_bytes(*from), Relaxed);
            }
        })?;
        remove_other_pages(folder, manifest.generation, self.rank());
        Ok(self.meet_of_job()?)
    }
}
