//! A file or block device as one end of a copy.

use std::fs::{File as StdFile, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use byway_reactor::{Allocate, Completion, Errno, File, FileOptions, Op, OpenFile, Outcome, Reactor, Token};

use super::claim::{Claim, open_storage};
use super::endpoint::{Answer, Done, Endpoint, EndpointError, Request};

/// Extents asked for at once.
const EXTENTS_MAX: usize = 256;

/// A file or block device, through the loop's page-cache operations.
pub struct FileEndpoint {
    class: u8,
    file: File,
    bytes: u64,
    blank: bool,
    device: bool,
    /// The same open file, for calls that ask for its properties.
    handle: StdFile,
    /// Of a destination. A source has none, and for it modified or resized means changed.
    claim: Option<Claim>,
}

impl FileEndpoint {
    /// Opens the source of a copy. It is not locked: writes to it meanwhile are noticed at the end, if at all.
    ///
    /// # Errors
    /// The kernel's; `InvalidInput` for what is neither a regular file nor a block device, and for a file whose size is
    /// not that of what can be read from it, as in `/proc`.
    pub fn source(reactor: &mut Reactor, path: &Path, class: u8) -> io::Result<Self> {
        let file = open_storage(path, OpenOptions::new().read(true))?;
        let metadata = file.metadata()?;
        if metadata.is_file() && metadata.len() == 0 && file.read_at(&mut [0], 0)? > 0 {
            let reason = "it says that it is empty and is not; write it into a file of its own (cat) and copy that";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        Self::adopt(reactor, file, class, None, false)
    }

    /// Takes the destination, which stays claimed as long as this lives. A regular file is resized to `bytes`; with `keep` (a resumed
    /// copy) its contents stay, else they are dropped first.
    ///
    /// # Errors
    /// The kernel's; `InvalidInput` if a device is smaller than `bytes`.
    pub fn destination(reactor: &mut Reactor, claim: Claim, class: u8, bytes: u64, keep: bool) -> io::Result<Self> {
        let device = claim.metadata().file_type().is_block_device();
        if !device {
            if !keep {
                claim.file().set_len(0)?;
            }
            claim.file().set_len(bytes)?;
        }
        let file = claim.file().try_clone()?;
        // Kept contents are unknown where nothing is recorded.
        let endpoint = Self::adopt(reactor, file, class, Some(claim), !device && !keep)?;
        if endpoint.bytes < bytes {
            let reason = format!("it has {} bytes, and {bytes} are to be copied", endpoint.bytes);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        Ok(endpoint)
    }

    /// The format of the image, unless it is raw as far as can be told.
    ///
    /// # Errors
    /// The kernel's.
    pub fn image_format(&self) -> io::Result<Option<&'static str>> {
        byway_service::block::image_format(self.handle.as_fd(), self.bytes)
    }

    fn adopt(reactor: &mut Reactor, file: StdFile, class: u8, claim: Option<Claim>, blank: bool) -> io::Result<Self> {
        let handle = file.try_clone()?;
        // A write into memory allocates its pages, which takes longer than all else that the loop does for a piece.
        let options =
            FileOptions { read_only: claim.is_none(), write_by_worker: claim.is_some(), ..FileOptions::default() };
        let open = OpenFile::from_fd(file.into(), options)?;
        let (bytes, device) = (open.len(), open.is_device());
        Ok(Self { class, file: reactor.add_file(Arc::new(open)), bytes, blank, device, handle, claim })
    }
}

/// Which file or device it is: a file system gives the number of a file that was removed to the next one, so the time of
/// birth (where the file system tells it) and the length count too.
pub(super) fn object_identity(metadata: &Metadata) -> String {
    let born = metadata.created().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let born = born.map_or_else(String::new, |born| format!("{}.{:09}", born.as_secs(), born.subsec_nanos()));
    let (device, number) = (metadata.dev(), metadata.ino());
    format!("{device}:{number}:{}:{}:{born}", metadata.rdev(), metadata.len())
}

impl Endpoint for FileEndpoint {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn is_blank(&self) -> bool {
        self.blank
    }

    fn identity(&self) -> String {
        let Ok(metadata) = self.handle.metadata() else {
            return "unknown".to_owned();
        };
        let object = object_identity(&metadata);
        if self.claim.is_some() {
            return object;
        }
        format!("{object}:{}.{}", metadata.mtime(), metadata.mtime_nsec())
    }

    /// A file has a time of change; a device has none.
    fn shows_changes(&self) -> bool {
        !self.device
    }

    /// Drops the file's pages: what is read then comes from the disk.
    fn drop_cache(&mut self) {
        // Pages that other programs use stay cached, as do those of a file in memory.
        let _ = rustix::fs::fadvise(&self.handle, 0, None, rustix::fs::Advice::DontNeed);
    }

    fn class(&self) -> u8 {
        self.class
    }

    fn submit(&mut self, reactor: &mut Reactor, id: u32, request: Request) {
        let file = self.file;
        let op = match request {
            Request::Read { offset, into } => {
                let len = into.len();
                Op::Read { file, offset, into, start: 0, len }
            }
            Request::Write { offset, from } => {
                let len = from.len();
                Op::Write { file, offset, from, start: 0, len, durable: false }
            }
            Request::Zero { offset, len } => {
                // A device may not discard to zeroes, but the kernel writes zeroes to any.
                let mode = if self.device { Allocate::ZeroRange } else { Allocate::PunchHole };
                Op::Allocate { file, mode, offset, len }
            }
            Request::Flush => Op::Sync { file },
            Request::Extents { offset, len } => Op::Extents { file, offset, len, count_max: EXTENTS_MAX },
        };
        reactor.submit(op, Token::new(self.class, 0, id, 0));
    }

    fn complete(&mut self, _reactor: &mut Reactor, completion: Completion, done: &mut Vec<Done>) {
        let answer = match completion.outcome {
            Outcome::Read { into: frame, result } => {
                // A short read means the end of the file: another program truncated it during the copy.
                let all = |count| if count == frame.len() { Ok(frame) } else { Err(Errno::IO) };
                Answer::Read(result.and_then(all).map_err(EndpointError::File))
            }
            Outcome::Written { result, .. } => Answer::Changed(result.map(|_| ()).map_err(EndpointError::File)),
            Outcome::Allocated(result) | Outcome::Synced(result) => {
                Answer::Changed(result.map_err(EndpointError::File))
            }
            Outcome::Extents(extents) => Answer::Extents(extents.map_err(EndpointError::File)),
            // No other operation carries this class.
            _ => return,
        };
        done.push(Done { id: completion.token.index(), answer });
    }
}
