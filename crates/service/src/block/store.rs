//! Stores of volumes: a file or device, several of them, memory, or nothing.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use byway_reactor::device_memory::DeviceMemory;
use byway_reactor::{FileOptions, OpenFile, record_lock};
use rustix::fs::{FlockOperation, Mode, OFlags};

use super::error::OpenError;
use super::identity::FileIdentity;
use super::image_format::image_format;
use super::spec::Stage;
use super::stripe::Layout;
use crate::limits::{STRIPE_PATHS_MAX, SYNC_DESCRIPTIONS, SYNC_DESCRIPTIONS_MAX, SYNC_DESCRIPTORS_SHARE};

/// How long to wait for a writable file that another process has locked: a server that was killed a moment ago keeps its locks
/// until the kernel has ended its I/O, and its successor must not start before that.
const LOCK_WAIT: Duration = Duration::from_secs(3);

/// How a store is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreOptions {
    /// Never written.
    pub read_only: bool,
    /// Past the page cache.
    pub direct: bool,
    /// Others may have it open for writing too: they coordinate themselves.
    pub shared: bool,
    /// Its bytes are served although they look like an image of another format than raw.
    pub raw: bool,
    /// Where its bytes are between the disk and the wire; [`Stage::Device`] only if it is `direct`.
    pub stage: Stage,
}

/// Opens the files of stores: this process, or one with more privilege that passes descriptors.
pub trait Opener {
    /// Opens a regular file or block device.
    ///
    /// # Errors
    /// [`OpenError::Open`], or [`OpenError::InUse`] for a device that is to be written and has an owner.
    fn open(&self, path: &Path, options: StoreOptions) -> Result<OwnedFd, OpenError>;

    /// The memory of the disk that `path` names or lies on.
    ///
    /// # Errors
    /// See [`DeviceMemoryError`](byway_reactor::device_memory::DeviceMemoryError).
    fn device_memory(&self, path: &Path) -> Result<DeviceMemory, OpenError>;
}

/// This process opens.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenHere;

impl Opener for OpenHere {
    fn open(&self, path: &Path, options: StoreOptions) -> Result<OwnedFd, OpenError> {
        let failed = |source| OpenError::Open { path: path.to_owned(), source };
        // Opening a pipe would wait for its other end.
        let kind = std::fs::metadata(path).map_err(failed)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            let reason = "neither a regular file nor a block device";
            return Err(failed(std::io::Error::new(std::io::ErrorKind::InvalidInput, reason)));
        }
        let mut open = std::fs::OpenOptions::new();
        open.read(true).write(!options.read_only);
        open.custom_flags(if options.direct { OFlags::DIRECT.bits() as i32 } else { 0 });
        let file = open.open(path).map_err(failed)?;
        if kind.is_block_device() && !options.read_only && !options.shared && is_claimed(path) {
            let by = "it is mounted, or part of a device that is";
            return Err(OpenError::InUse { path: path.to_owned(), by });
        }
        Ok(file.into())
    }

    fn device_memory(&self, path: &Path) -> Result<DeviceMemory, OpenError> {
        Ok(DeviceMemory::of_disk(path)?)
    }
}

/// The backing_id of all stores that forget what is written.
const NULL_BACKING_ID: u64 = 2;

/// An open store. A clone is over the same open files.
#[derive(Clone, Debug)]
pub struct Store {
    pub(super) kind: Kind,
    /// Of its files; empty when they have none.
    paths: Vec<PathBuf>,
    /// Of its files; a store over the same file takes them over.
    locks: Vec<Lock>,
    /// The memory that each of its files is staged in; empty where that is main memory.
    staging: Vec<Arc<DeviceMemory>>,
    /// Of each of its files, by other open file descriptions: a sync over one that no other sync uses is told by itself of bytes that
    /// were lost (docs/decisions/0030).
    more_descriptions: Vec<Vec<Arc<OpenFile>>>,
    len: u64,
    block_bytes: u32,
    backing_id: u64,
}

#[derive(Clone, Debug)]
pub(super) enum Kind {
    Files { layout: Layout, files: Vec<Arc<OpenFile>> },
    Null,
}

/// The lock for writing on a file. It is held as long as a clone of it lives.
#[derive(Clone, Debug)]
struct Lock {
    file: FileIdentity,
    _descriptor: Arc<OwnedFd>,
}

impl Store {
    /// A file or block device.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn path(path: &Path, options: StoreOptions, opener: &dyn Opener) -> Result<Self, OpenError> {
        Self::open(&[path.to_owned()], Layout::SINGLE, options, opener, None)
    }

    /// Several files or devices of which the first `chunk_bytes` come from the first, the next from the second, ...
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn stripe(
        paths: &[PathBuf],
        chunk_bytes: u64,
        options: StoreOptions,
        opener: &dyn Opener,
    ) -> Result<Self, OpenError> {
        Self::open(paths, stripe_layout(paths.len(), chunk_bytes)?, options, opener, None)
    }

    /// Opens one path, or a stripe with chunks of so many bytes, in place of `old`: files that both have stay locked, and
    /// need no lock of their own. What `old` has under way must end before the new store is used.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn in_place_of(
        old: &Self,
        paths: &[PathBuf],
        chunk_bytes: Option<u64>,
        options: StoreOptions,
        opener: &dyn Opener,
    ) -> Result<Self, OpenError> {
        let layout = chunk_bytes.map_or(Ok(Layout::SINGLE), |bytes| stripe_layout(paths.len(), bytes))?;
        Self::open(paths, layout, options, opener, Some(old))
    }

    fn open(
        paths: &[PathBuf],
        layout: Layout,
        options: StoreOptions,
        opener: &dyn Opener,
        old: Option<&Self>,
    ) -> Result<Self, OpenError> {
        let held = old.map_or(&[][..], |old| &old.locks);
        let mut locks = Vec::new();
        let files = paths.iter().map(|path| open(path, options, opener, held, &mut locks));
        let files = files.collect::<Result<Vec<_>, _>>()?;
        let mut store = Self::of_files(files, paths.to_vec(), layout)?;
        store.locks = locks;
        if !options.read_only {
            let Kind::Files { files, .. } = &store.kind else { return Ok(store) };
            let more = SYNC_DESCRIPTIONS.min(SYNC_DESCRIPTIONS_MAX / paths.len().max(1)).saturating_sub(1);
            let open = |(path, file): (&PathBuf, &Arc<OpenFile>)| open_more(path, file, more, options, opener);
            store.more_descriptions = paths.iter().zip(files).map(open).collect();
        }
        if options.direct && options.stage == Stage::Device {
            store.staging = paths.iter().map(|path| device_memory(path, opener)).collect::<Result<_, _>>()?;
        }
        Ok(store)
    }

    fn of_files(files: Vec<Arc<OpenFile>>, paths: Vec<PathBuf>, layout: Layout) -> Result<Self, OpenError> {
        let block_bytes = files.iter().map(|file| file.block_bytes()).max().unwrap_or(1);
        let len = layout.volume_len(files.iter().map(|file| file.len()));
        let path = || paths.first().cloned().unwrap_or_default();
        if !len.is_multiple_of(u64::from(block_bytes)) {
            return Err(OpenError::NotAMultiple { path: path(), len, block: block_bytes.into() });
        }
        if len == 0 && layout.files == 1 {
            return Err(OpenError::Empty { path: path() });
        }
        if len == 0 {
            return Err(OpenError::Stripe("every path must hold at least one chunk"));
        }
        let backing_id = backing_id_of(&files);
        let (locks, staging) = (Vec::new(), Vec::new());
        let more_descriptions = more_simulated(&files);
        let kind = Kind::Files { layout, files };
        Ok(Self { kind, paths, locks, staging, more_descriptions, len, block_bytes, backing_id })
    }

    /// The first of its paths that no longer names the file that is open.
    ///
    /// # Errors
    /// [`OpenError::Open`] if a path names nothing, or the kernel does not say.
    pub fn moved(&self, identify: impl Fn(&Path) -> std::io::Result<FileIdentity>) -> Result<Option<&Path>, OpenError> {
        let Kind::Files { files, .. } = &self.kind else { return Ok(None) };
        for (path, file) in self.paths.iter().zip(files) {
            let Some(fd) = file.descriptor() else { continue };
            let failed = |source| OpenError::Open { path: path.clone(), source };
            if identify(path).map_err(failed)? != FileIdentity::of(fd).map_err(failed)? {
                return Ok(Some(path));
            }
        }
        Ok(None)
    }

    /// Whether both lie in a file or device that is the same.
    pub fn overlaps(&self, other: &Self) -> bool {
        let (Kind::Files { files, .. }, Kind::Files { files: others, .. }) = (&self.kind, &other.kind) else {
            return false;
        };
        let identity = |file: &OpenFile| FileIdentity::of(file.descriptor()?).ok();
        let theirs: Vec<_> = others.iter().map(|file| (file, identity(file))).collect();
        files.iter().any(|file| {
            let ours = identity(file);
            theirs.iter().any(|(other, their)| (ours.is_some() && ours == *their) || file.is_same_simulated(other))
        })
    }

    /// The same store in the size that its files have now; `None` if that has not changed.
    ///
    /// # Errors
    /// See [`OpenError`]; the store goes on in its old size then.
    pub fn reopened(&self) -> Result<Option<Self>, OpenError> {
        let Kind::Files { layout, files } = &self.kind else { return Ok(None) };
        let failed = |source| {
            let path = self.paths.first().cloned().unwrap_or_default();
            OpenError::Open { path, source }
        };
        let mut same = true;
        for file in files {
            same &= file.len_now().map_err(failed)? == file.len();
        }
        if same {
            return Ok(None);
        }
        let files = files.iter().map(|file| file.reopen().map(Arc::new)).collect::<Result<_, _>>().map_err(failed)?;
        let (locks, staging, more_descriptions) =
            (self.locks.clone(), self.staging.clone(), self.more_descriptions.clone());
        Self::of_files(files, self.paths.clone(), *layout)
            .map(|store| Some(Self { locks, staging, more_descriptions, ..store }))
    }

    /// Gives memory another size; [`Store::reopened`] takes note of it. What is cut off is gone.
    ///
    /// # Errors
    /// [`OpenError::Memory`].
    pub fn resize_memory(&self, bytes: u64) -> Result<(), OpenError> {
        let Kind::Files { files, .. } = &self.kind else { return Ok(()) };
        files.iter().try_for_each(|file| file.resize_memory(bytes)).map_err(OpenError::Memory)
    }

    /// Over an open file: a simulated one, or a descriptor that was passed to us.
    pub fn open_file(file: Arc<OpenFile>) -> Self {
        let (len, block_bytes) = (file.len(), file.block_bytes());
        let files = vec![file];
        let backing_id = backing_id_of(&files);
        let more_descriptions = more_simulated(&files);
        let kind = Kind::Files { layout: Layout::SINGLE, files };
        let (paths, locks, staging) = (Vec::new(), Vec::new(), Vec::new());
        Self { kind, paths, locks, staging, more_descriptions, len, block_bytes, backing_id }
    }

    /// The same store, staged in memory that the caller has opened.
    #[must_use]
    pub fn staged_in(self, memory: &Arc<DeviceMemory>) -> Self {
        let files = if let Kind::Files { files, .. } = &self.kind { files.len() } else { 0 };
        Self { staging: vec![Arc::clone(memory); files], ..self }
    }

    /// [`Store::stripe`] over open files.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn stripe_files(files: Vec<Arc<OpenFile>>, chunk_bytes: u64) -> Result<Self, OpenError> {
        let layout = stripe_layout(files.len(), chunk_bytes)?;
        Self::of_files(files, Vec::new(), layout)
    }

    /// Sparse memory that is gone with the process.
    ///
    /// # Errors
    /// [`OpenError::Memory`].
    pub fn memory(name: &str, bytes: u64) -> Result<Self, OpenError> {
        Ok(Self::open_file(Arc::new(OpenFile::memory(name, bytes).map_err(OpenError::Memory)?)))
    }

    /// Reads as zeroes, forgets what is written.
    pub fn null(bytes: u64) -> Self {
        let (paths, locks, staging, more_descriptions) = Default::default();
        let (kind, block_bytes, backing_id) = (Kind::Null, 1, NULL_BACKING_ID);
        Self { kind, paths, locks, staging, more_descriptions, len: bytes, block_bytes, backing_id }
    }

    /// Names what the bytes lie in ([`OpenFile::backing_id`]); of a stripe, the media in their order. 0 if that is not known.
    pub fn backing_id(&self) -> u64 {
        self.backing_id
    }

    /// The device memory that each of its files is staged in; empty where that is main memory.
    pub(super) fn staging(&self) -> &[Arc<DeviceMemory>] {
        &self.staging
    }

    /// Of each of its files, by other open file descriptions.
    pub(super) fn more_descriptions(&self) -> &[Vec<Arc<OpenFile>>] {
        &self.more_descriptions
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// No bytes?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What offsets and lengths must be multiples of; 1 for cached stores.
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }
}

/// One name for what several files are together.
fn backing_id_of(files: &[Arc<OpenFile>]) -> u64 {
    let ids: Vec<u64> = files.iter().map(|file| file.backing_id()).collect();
    if ids.contains(&0) {
        return 0;
    }
    ids.into_iter().reduce(|all, one| all.rotate_left(7).wrapping_mul(0x100_0000_01b3) ^ one).unwrap_or(0)
}

fn stripe_layout(files: usize, chunk_bytes: u64) -> Result<Layout, OpenError> {
    if !(2..=STRIPE_PATHS_MAX).contains(&files) {
        return Err(OpenError::Stripe("give 2 to 64 paths"));
    }
    if !chunk_bytes.is_power_of_two() || chunk_bytes < 4096 {
        return Err(OpenError::Stripe("the chunk must be a power of two of at least 4K"));
    }
    Ok(Layout { chunk_bytes, files: files as u64 })
}

/// Opens a file again, for syncs alone: up to so many times, and while the process has most of its descriptors left for clients. With
/// fewer all is as right, and syncs wait for each other more.
fn open_more(
    path: &Path,
    file: &OpenFile,
    count: usize,
    options: StoreOptions,
    opener: &dyn Opener,
) -> Vec<Arc<OpenFile>> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    let again = || {
        let (fd, first) = (opener.open(path, options).ok()?, file.descriptor()?);
        let is_same = FileIdentity::of(fd.as_fd()).ok()? == FileIdentity::of(first).ok()?;
        // The kernel gives out the lowest number that is free.
        let leaves_enough = (fd.as_raw_fd() as u64) < limit / SYNC_DESCRIPTORS_SHARE;
        let file_options = FileOptions { map: false, ..file.options() };
        (is_same && leaves_enough).then(|| OpenFile::from_fd(fd, file_options).ok()).flatten().map(Arc::new)
    };
    let opened: Vec<_> = (0..count).map_while(|_| again()).collect();
    if opened.len() < count {
        tracing::info!(
            path = %path.display(),
            times = 1 + opened.len(),
            wanted = 1 + count,
            "a file has fewer descriptors than wanted, so durable writes wait for each other; raise LimitNOFILE"
        );
    }
    opened
}

/// Of simulated files just one more description, so that some syncs share theirs.
fn more_simulated(files: &[Arc<OpenFile>]) -> Vec<Vec<Arc<OpenFile>>> {
    files.iter().map(|file| file.simulated_again().map(Arc::new).into_iter().collect()).collect()
}

/// The memory of a path's disk, of which some can be had.
fn device_memory(path: &Path, opener: &dyn Opener) -> Result<Arc<DeviceMemory>, OpenError> {
    let memory = opener.device_memory(path)?;
    memory.try_page()?;
    Ok(Arc::new(memory))
}

/// Opens a file. Its lock is one of `held`, or a new one, and goes to `locks`.
fn open(
    path: &Path,
    options: StoreOptions,
    opener: &dyn Opener,
    held: &[Lock],
    locks: &mut Vec<Lock>,
) -> Result<Arc<OpenFile>, OpenError> {
    let file_options = FileOptions {
        read_only: options.read_only,
        direct: options.direct,
        map: !options.direct,
        ..FileOptions::default()
    };
    let fd = opener.open(path, options)?;
    let failed = |source| OpenError::Open { path: path.to_owned(), source };
    let file = OpenFile::from_fd(fd, file_options).map_err(failed)?;
    if file.is_empty() {
        return Err(OpenError::Empty { path: path.to_owned() });
    }
    if let Some(fd) = file.descriptor().filter(|_| !options.raw)
        && let Some(format) = image_format(fd, file.len()).map_err(failed)?
    {
        return Err(OpenError::Format { path: path.to_owned(), format });
    }
    match file.descriptor() {
        Some(fd) if !options.read_only && !options.shared => {
            let identity = FileIdentity::of(fd).map_err(failed)?;
            let lock = if let Some(lock) = held.iter().find(|lock| lock.file == identity) {
                lock.clone()
            } else {
                lock_for_writing(fd, path)?;
                // The lock is the open file's: it stays as long as any descriptor of that.
                Lock { file: identity, _descriptor: Arc::new(fd.try_clone_to_owned().map_err(failed)?) }
            };
            locks.push(lock);
        }
        // No writer is excluded, and a copy does not empty it. Without locks in use, that is not known.
        Some(fd) => {
            if let Err(error) = record_lock::hold_for_reading(fd) {
                tracing::debug!(path = %path.display(), %error, "cannot lock the file against copies");
            }
        }
        None => {}
    }
    Ok(Arc::new(file))
}

/// Whether a block device has an exclusive owner: a mounted file system, swap, a volume group.
pub fn is_claimed(path: &Path) -> bool {
    let exclusive = rustix::fs::open(path, OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC, Mode::empty());
    exclusive.err() == Some(rustix::io::Errno::BUSY)
}

/// Locks a file or device against the servers of this machine that write to it, as they do against each other
/// (`flock(2)`; the lock goes with the last descriptor). Waits a moment for one that has just been killed.
///
/// # Errors
/// [`OpenError::InUse`], or [`OpenError::Open`] with the kernel's.
pub fn lock_for_writing(fd: BorrowedFd<'_>, path: &Path) -> Result<(), OpenError> {
    let deadline = Instant::now() + LOCK_WAIT;
    loop {
        match rustix::fs::flock(fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => {
                let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
                let _ = rustix::thread::nanosleep(&pause);
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let by = "another server has it open for writing, or a copy into it is under way (flock)";
                return Err(OpenError::InUse { path: path.to_owned(), by });
            }
            Err(error) => return Err(OpenError::Open { path: path.to_owned(), source: error.into() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_written_is_open_several_times_and_locked_once() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let store = Store::path(file.path(), StoreOptions::default(), &OpenHere).unwrap();
        let more = &store.more_descriptions()[0];
        assert_eq!(more.len(), SYNC_DESCRIPTIONS - 1);
        for file in more {
            // A lock of the same description would be had again.
            let locked = rustix::fs::flock(file.descriptor().unwrap(), FlockOperation::NonBlockingLockExclusive);
            assert_eq!(locked, Err(rustix::io::Errno::WOULDBLOCK));
        }
        let read_only = StoreOptions { read_only: true, ..StoreOptions::default() };
        let store = Store::path(file.path(), read_only, &OpenHere).unwrap();
        assert!(store.more_descriptions()[0].is_empty(), "nothing is synced");
    }
}
