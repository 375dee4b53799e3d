//! `byway copy` as the command line sees it.

use std::ffi::OsString;
use std::fmt::Write;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use byway_reactor::{IoChoice, Reactor, limits::FRAME_BYTES_MAX};
use clap::builder::{OsStringValueParser, TypedValueParser};

use super::engine::{Copied, CopyError, CopyOptions, copy};
use super::location::{self, Found, Location, LocationError, Opened, Reach};
use super::progress::{self, Teller};
use super::resume::ResumeLog;
use super::tree::{self, TreeError};
use crate::limits::{COPY_BYTES_MAX, COPY_UNFLUSHED_BYTES_MAX};
use crate::output;
use crate::remote::{self, Remote, RemoteError, RemoteUri};
use crate::tls::ClientTlsArguments;
use crate::units::{parse_size, show_size};

/// The most of the loop's memory that the connections use for themselves.
const LANE_BYTES: usize = 8 << 20;

/// Without `--chunk` and `--connections`.
const CHUNK_BYTES: u64 = 512 << 10;
const CONNECTIONS: u8 = 4;

/// The flags of `byway copy`.
#[derive(clap::Args, Clone, Debug)]
pub struct CopyArguments {
    /// Source: a file, a block device, a volume, or a file or directory of a share
    ///
    /// A file or directory of a share is byway://HOST/SHARE/PATH, or byway+unix:///SHARE/PATH?socket=PATH; a share itself has a slash
    /// behind its name.
    ///
    /// A volume is byway://HOST/NAME, byway+unix:///NAME?socket=PATH, byway+shm:///NAME?socket=PATH, byway+rdma://HOST/NAME,
    /// nbd://HOST/EXPORT or nbd+unix:///EXPORT?socket=PATH; for TLS byways://, nbds:// or nbds+unix://. The source is not locked:
    /// writes to it during the copy may or may not be in the copy. If a file changes, the copy fails at its end.
    #[arg(value_parser = location_parser())]
    pub source: Location,
    /// Destination: a file (created if missing), a block device, a volume at least as large as the source, or a path of a share
    ///
    /// With a share on either side, files are copied as they are. A file goes into DESTINATION if that is a directory. A directory is
    /// copied with --recursive, and DESTINATION becomes its copy, also if it exists.
    ///
    /// A file or device that is mounted, that a server serves, or that another copy writes to is refused.
    #[arg(value_parser = location_parser())]
    pub destination: Location,
    /// Read the whole destination back and compare its checksums (CRC32C) with the source's
    ///
    /// This includes what an earlier, interrupted run copied. A file or device is read from its disk, not from the page cache; the
    /// server of a volume may answer from its own cache.
    #[arg(long)]
    pub verify: bool,
    /// Overwrite a destination that contains data, or files that differ from the source
    #[arg(long)]
    pub overwrite: bool,
    /// Copy a directory from or to a share, with all that is in it
    ///
    /// Kept are contents, holes, rights, times, symbolic links, and extended attributes of users with ACLs; not kept are owners,
    /// set-user-ID bits and hard links. Each file appears under its name when it is complete and synced. The same command resumes an
    /// interrupted copy: it passes over files whose size and time of change are the source's.
    #[arg(long, short)]
    pub recursive: bool,
    /// Copy an image in another format than raw (qcow2, vmdk, ...) byte by byte to a volume or device
    #[arg(long)]
    pub raw: bool,
    /// Pieces in flight, 1 to 1024; with a share, files and pieces in flight, at most 64
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub depth: u16,
    /// Connections to each server of a volume, 1 to 8 [default: 4]; an NBD server may allow only one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=8))]
    pub connections: Option<u8>,
    /// TLS.
    #[command(flatten)]
    pub tls: ClientTlsArguments,
    /// File that records the copied pieces, so that the same command resumes an interrupted copy; removed when the copy is complete
    /// [default: DESTINATION.byway-resume; for a volume copy-NAME.byway-resume in $XDG_STATE_HOME/byway or ~/.local/state/byway]
    ///
    /// Resuming needs the same destination and an unchanged source. A volume or device does not tell whether it was written to
    /// since: the resumed copy reads such a source again from the start and writes only what differs.
    #[arg(long, value_name = "FILE")]
    pub resume: Option<PathBuf>,
    /// Write no resume file, and remove that of an earlier run: an interrupted copy starts over
    #[arg(long, conflicts_with = "resume")]
    pub no_resume: bool,
    /// Size of a piece, a power of two from 4K to 1M [default: 512K; with a share 1M]
    #[arg(long, value_name = "SIZE", value_parser = parse_chunk)]
    pub chunk: Option<u64>,
    /// Kernel interface of the event loop: auto, uring or epoll
    #[arg(long, value_name = "BACKEND", default_value = "auto", value_parser = byway_remote::parse_io)]
    pub io: IoChoice,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

fn next(resume: Option<&Path>) -> String {
    let resumes = |path: &Path| format!("to resume (what is done is in {})", path.display());
    resume.map_or_else(|| "with --overwrite to start over (--no-resume)".to_owned(), resumes)
}

fn next_after_difference(resumes: bool) -> &'static str {
    if resumes {
        "to copy those pieces again, with --verify"
    } else {
        "with --overwrite and --verify to copy all of it again"
    }
}

fn resume_hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound => "; the folder of the destination must be there",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "; name one that you may write, with --resume, or do without, with --no-resume"
        }
        _ => "",
    }
}

/// Why `byway copy` failed. Says what to do.
#[derive(Debug, thiserror::Error)]
pub enum CopyCommandError {
    /// The source or destination cannot be opened.
    #[error("copy: {0}")]
    Location(#[from] LocationError),
    /// The destination's data would be lost.
    #[error("copy: {0} contains data{1}; name another destination, or add --overwrite to replace the data")]
    Exists(String, &'static str),
    /// Source and destination are the same.
    #[error(
        "copy: {0} is both source and destination; name another destination (if it is a clone of the source on another machine, with \
         the same inode number and birth, remove it first)"
    )]
    Same(String),
    /// The resume file cannot be used.
    #[error("copy: the resume file {}: {source}{hint}", path.display(), hint = resume_hint(source))]
    Resume {
        /// Its path.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The destination cannot be made.
    #[error("copy: {}: cannot create a file there: {source}; name a destination in a writable folder", folder.display())]
    Folder {
        /// Its folder.
        folder: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Files of a share.
    #[error("copy: {0}")]
    Tree(#[from] TreeError),
    /// Signals cannot be caught.
    #[error("copy: cannot catch signals: {0}")]
    Signals(io::Error),
    /// The loop cannot be opened.
    #[error("copy: cannot open an event loop: {0}; try --io epoll, and see byway doctor")]
    Loop(io::Error),
    /// The copy is not usable.
    #[error("copy: {error}; stop writers to the source, then run the same command again with --overwrite")]
    Changed {
        /// How.
        error: CopyError,
    },
    /// The copy is wrong.
    #[error("copy: {error}; run the same command again {}", next_after_difference(*resumes))]
    Differs {
        /// How.
        error: CopyError,
        /// The resume file lists the correct pieces.
        resumes: bool,
    },
    /// The copy ended early.
    #[error("copy: {error}; run the same command again {}", next(resume.as_deref()))]
    Copy {
        /// How.
        error: CopyError,
        /// What the next run resumes from.
        resume: Option<PathBuf>,
    },
}

fn chunk_bytes(arguments: &CopyArguments) -> usize {
    arguments.chunk.unwrap_or(CHUNK_BYTES) as usize
}

fn parse_chunk(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text).map_err(|error| error.to_string())?;
    let good = bytes.is_power_of_two() && (4096..=FRAME_BYTES_MAX as u64).contains(&bytes);
    if good { Ok(bytes) } else { Err(format!("{bytes} bytes is no piece; write a power of two from 4K to 1M")) }
}

fn location_parser() -> impl TypedValueParser<Value = Location> {
    OsStringValueParser::new().try_map(|text: OsString| Location::parse(text))
}

/// Copies, shows progress, and prints a summary once the destination has been flushed. The exit code is 130 if a signal stopped the
/// copy.
///
/// # Errors
/// Says what to do.
pub fn run(arguments: &CopyArguments) -> Result<ExitCode, CopyCommandError> {
    let (from, to) = (&arguments.source, &arguments.destination);
    if tree::concerns(arguments) {
        return Ok(tree::run(arguments)?);
    }
    let chunk_bytes = chunk_bytes(arguments);
    let wants_tls = [from, to].into_iter().any(|place| matches!(place, Location::Remote(uri) if uri.wants_tls()));
    arguments.tls.check(wants_tls).map_err(|error| LocationError::from(RemoteError::from(error)))?;
    let reach = Reach { connections: usize::from(arguments.connections.unwrap_or(CONNECTIONS)), tls: &arguments.tls };
    let depth = usize::from(arguments.depth).min(COPY_BYTES_MAX as usize / chunk_bytes);
    let mut frame_bytes = depth * chunk_bytes;
    // All of the pool is pinned before the copy begins: 160 MiB take 70 ms.
    if let (Location::Remote(_), _) | (_, Location::Remote(_)) = (from, to) {
        frame_bytes += LANE_BYTES * 2;
    }
    if let Location::Remote(RemoteUri::Native(_)) = to {
        // A kept write of odd length takes up to twice its bytes.
        frame_bytes += COPY_UNFLUSHED_BYTES_MAX * 2;
    }
    let mut reactor = Reactor::open(arguments.io, frame_bytes).map_err(CopyCommandError::Loop)?;
    let source = location::open_source(&mut reactor, from, reach)?;
    let mut ends = Ends { source, found: None, destination: None };
    let ended = copy_between(&mut reactor, arguments, &mut ends, reach, depth);
    remote::leave_after(&mut reactor, &mut ends.remotes(), &ended);
    match ended {
        Err(stopped @ CopyCommandError::Copy { error: CopyError::Stopped { .. }, .. }) => {
            output::note(stopped);
            Ok(ExitCode::from(progress::STOPPED))
        }
        ended => {
            let (copied, seconds) = ended?;
            report(&copied, seconds, arguments.json);
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// The source and destination that have been opened so far.
struct Ends {
    source: Opened,
    found: Option<Found>,
    destination: Option<Opened>,
}

impl Ends {
    fn remotes(&mut self) -> Vec<&mut Remote> {
        let found = self.found.as_mut().and_then(Found::remote);
        let opened = self.destination.as_mut().and_then(Opened::remote);
        self.source.remote().into_iter().chain(found).chain(opened).collect()
    }
}

/// Finds and opens the destination, and copies. Returns the duration in seconds, too. The caller ends the sessions with the servers.
fn copy_between(
    reactor: &mut Reactor,
    arguments: &CopyArguments,
    ends: &mut Ends,
    reach: Reach<'_>,
    depth: usize,
) -> Result<(Copied, f64), CopyCommandError> {
    let (from, to) = (&arguments.source, &arguments.destination);
    let source = &mut ends.source;
    if !arguments.raw {
        location::check_format(from, source, to)?;
    }
    let found = location::find_destination(reactor, to, from, source, reach)?;
    let found = &*ends.found.insert(found.ok_or_else(|| CopyCommandError::Same(to.to_string()))?);
    let resume_path = resume_path(arguments);
    let resume = |source| resume_failed(arguments, found, &resume_path, source);
    let exists = || CopyCommandError::Exists(to.to_string(), found.contents_doubt());
    let may_overwrite = arguments.overwrite || !found.is_occupied();
    if !may_overwrite && (arguments.no_resume || !resume_path.exists()) {
        return Err(exists());
    }
    let mut log = open_log(arguments, &resume_path).map_err(resume)?;
    let bytes = source.endpoint().bytes();
    let goes_on = match &mut log {
        Some(log) => goes_on(log, source, found, to).map_err(resume)?,
        None => false,
    };
    if !may_overwrite && !goes_on {
        return Err(exists());
    }
    if let Some(log) = log.as_mut().filter(|_| !goes_on) {
        log.clear().map_err(resume)?;
    }
    let Some(found) = ends.found.take() else { return Err(CopyCommandError::Same(to.to_string())) };
    let destination = ends.destination.insert(location::open_destination(reactor, to, found, bytes, goes_on)?);
    note_larger(to, destination, bytes);
    let started = reactor.now();
    let mut teller = Teller::new(bytes, started).map_err(CopyCommandError::Signals)?;
    let options = CopyOptions { depth, chunk_bytes: chunk_bytes(arguments), verify: arguments.verify };
    let (one, other) = (source.endpoint(), destination.endpoint());
    let copied = copy(reactor, one, other, options, log.as_mut(), &mut |progress| teller.tell(progress));
    teller.finish();
    let seconds = reactor.now().since(started).as_secs_f64();
    let copied = copied.map_err(|error| failed(error, log.as_ref().map(|_| resume_path.clone())))?;
    if let Some(log) = log {
        log.remove().map_err(|source| CopyCommandError::Resume { path: resume_path, source })?;
    }
    Ok((copied, seconds))
}

fn failed(error: CopyError, resume: Option<PathBuf>) -> CopyCommandError {
    match error {
        CopyError::Changed => CopyCommandError::Changed { error },
        CopyError::Differs { .. } => CopyCommandError::Differs { error, resumes: resume.is_some() },
        error => CopyCommandError::Copy { error, resume },
    }
}

/// Opens the resume file; with `--no-resume` removes it, since its records would describe data that is overwritten.
fn open_log(arguments: &CopyArguments, path: &Path) -> io::Result<Option<ResumeLog>> {
    if let (Some(folder), None, Location::Remote(_)) = (path.parent(), &arguments.resume, &arguments.destination)
        && !arguments.no_resume
    {
        std::fs::create_dir_all(folder)?;
    }
    if arguments.no_resume && !path.exists() {
        return Ok(None);
    }
    let ends: Vec<&Path> =
        [&arguments.source, &arguments.destination].into_iter().filter_map(|end| end.path()).collect();
    let log = ResumeLog::open(path, &ends)?;
    if arguments.no_resume {
        log.remove()?;
        return Ok(None);
    }
    Ok(Some(log))
}

/// The resume file lies beside the destination. If neither can be made, the error names the destination, as the caller did.
fn resume_failed(arguments: &CopyArguments, found: &Found, path: &Path, source: io::Error) -> CopyCommandError {
    use io::ErrorKind::{NotADirectory, NotFound, PermissionDenied, ReadOnlyFilesystem};
    let of_the_folder = matches!(source.kind(), NotADirectory | NotFound | PermissionDenied | ReadOnlyFilesystem);
    let folder = arguments.destination.path().and_then(Path::parent).filter(|_| arguments.resume.is_none());
    match folder {
        Some(folder) if of_the_folder && matches!(found, Found::Path { claim: None }) => {
            let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
            CopyCommandError::Folder { folder: folder.to_owned(), source }
        }
        _ => CopyCommandError::Resume { path: path.to_owned(), source },
    }
}

/// Whether the log belongs to this copy. Decided before a file is made or opened for writing, so that the destination is
/// still what the records describe.
fn goes_on(log: &mut ResumeLog, source: &mut Opened, found: &Found, to: &Location) -> io::Result<bool> {
    let Some(there) = found.identity() else { return Ok(false) };
    let (bytes, identity) = (source.endpoint().bytes(), source.endpoint().identity());
    if !log.is_of(&identity, &there, bytes)? {
        return Ok(false);
    }
    let tells_of_data = log.load(&identity, &there, bytes)?.values().any(|record| record.crc.is_some());
    if tells_of_data && !found.is_occupied() {
        output::note(format_args!("{to} no longer has the pieces copied before; everything is copied again"));
        return Ok(false);
    }
    Ok(true)
}

/// The resume file: as asked, or by the destination.
fn resume_path(arguments: &CopyArguments) -> PathBuf {
    arguments.resume.clone().unwrap_or_else(|| arguments.destination.resume_path(&state_folder()))
}

/// The folder for what outlives a run (XDG Base Directory Specification): `$XDG_STATE_HOME/byway`, by default in the
/// user's home.
fn state_folder() -> PathBuf {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || absolute("HOME").map(|home| home.join(".local/state"));
    absolute("XDG_STATE_HOME").or_else(home).unwrap_or_else(std::env::temp_dir).join("byway")
}

/// The note for a destination that is larger than the source: its contents behind the copy stay.
fn note_larger(to: &Location, destination: &mut Opened, bytes: u64) {
    let larger = destination.endpoint().bytes();
    if larger > bytes {
        output::note(format_args!("{to} is larger by {} bytes, which stay as they are", larger - bytes));
    }
}

fn report(copied: &Copied, seconds: f64, json: bool) {
    let rate = copied.moved_bytes as f64 / seconds.max(1e-9);
    if json {
        let done = serde_json::json!({ "copied": copied, "seconds": seconds, "bytes_per_second": rate });
        output::line(done);
        return;
    }
    // Writing to a string does not fail.
    let mut notes = String::new();
    if copied.resumed_bytes > 0 {
        let _ = write!(notes, ", {} done before", show_size(copied.resumed_bytes));
    }
    if copied.zero_bytes > 0 {
        let _ = write!(notes, ", {} of holes", show_size(copied.zero_bytes));
    }
    if copied.verified {
        notes += ", verified";
    }
    output::line(format_args!(
        "{} copied in {seconds:.2} s ({}/s){notes}; crc32c {:08x}",
        show_size(copied.moved_bytes),
        show_size(rate as u64),
        copied.crc32c
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_resume_file_the_advice_is_to_overwrite() {
        let advice =
            |error: fn() -> CopyError, resume: Option<&str>| failed(error(), resume.map(Into::into)).to_string();
        let (differs, lost) = (|| CopyError::Differs { offset: 0, len: 4096 }, || CopyError::Confused);
        for error in [differs, lost] {
            assert!(advice(error, None).contains("; run the same command again with --overwrite"));
            assert!(!advice(error, Some("file")).contains("--overwrite"));
        }
    }

    #[test]
    fn a_piece_is_a_power_of_two() {
        assert_eq!(parse_chunk("64K"), Ok(65536));
        for bad in ["2M", "3K", "0", "5000"] {
            assert!(parse_chunk(bad).is_err(), "{bad}");
        }
    }
}
