//! `byway copy` as the command line sees it.

use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use byway_reactor::{IoChoice, Reactor, limits::FRAME_BYTES_MAX};
use indicatif::{ProgressBar, ProgressStyle};

use super::endpoint::Endpoint;
use super::engine::{Copied, CopyError, CopyOptions, copy};
use super::file::FileEndpoint;
use super::resume::ResumeLog;
use crate::config::parse_io;
use crate::limits::COPY_BYTES_MAX;
use crate::units::{parse_size, show_size};

/// The flags of `byway copy`.
#[derive(clap::Args, Clone, Debug)]
pub struct CopyArguments {
    /// What to copy: a file or block device
    pub source: PathBuf,
    /// Where to: a file (made if it is not there) or a block device
    pub destination: PathBuf,
    /// Read the destination back and compare its checksums (CRC32C) with the source's
    #[arg(long)]
    pub verify: bool,
    /// Overwrite a destination that has something in it
    #[arg(long)]
    pub overwrite: bool,
    /// Pieces in flight, 1 to 1024
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub depth: u16,
    /// Bytes of a piece, a power of two from 4K to 1M
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = parse_chunk)]
    pub chunk: u64,
    /// What the event loop stands on: auto, uring or epoll
    #[arg(long, value_name = "BACKEND", default_value = "auto", value_parser = parse_io)]
    pub io: IoChoice,
    /// Print what was done as JSON
    #[arg(long)]
    pub json: bool,
}

/// Why `byway copy` failed. Says what to do.
#[derive(Debug, thiserror::Error)]
pub enum CopyCommandError {
    /// The source cannot be opened.
    #[error("copy: {}: {source}; name a file or block device that can be read", path.display())]
    OpenSource {
        /// Its path.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The destination cannot be opened.
    #[error("copy: {}: {source}; name a file or block device that can be written and is large enough", path.display())]
    OpenDestination {
        /// Its path.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// It would be lost.
    #[error("copy: {} has something in it; name another destination, or add --overwrite to lose it", .0.display())]
    Exists(PathBuf),
    /// Source and destination are one.
    #[error("copy: {} is both source and destination; name another destination", .0.display())]
    Same(PathBuf),
    /// The resume file cannot be used.
    #[error("copy: {}: {source}", path.display())]
    Resume {
        /// Its path.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The loop cannot be opened.
    #[error("copy: no event loop: {0}; try --io epoll, and see byway doctor")]
    Loop(io::Error),
    /// The copy ended early.
    #[error("copy: {error}; run the same command again to go on from {}", resume.display())]
    Copy {
        /// How.
        error: CopyError,
        /// What it goes on from.
        resume: PathBuf,
    },
}

fn parse_chunk(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text).map_err(|error| error.to_string())?;
    let good = bytes.is_power_of_two() && (4096..=FRAME_BYTES_MAX as u64).contains(&bytes);
    if good { Ok(bytes) } else { Err(format!("{bytes} bytes is no piece; write a power of two from 4K to 1M")) }
}

/// Copies, shows progress on a terminal, and prints what was done.
///
/// # Errors
/// Says what to do.
pub fn run(arguments: &CopyArguments) -> Result<(), CopyCommandError> {
    let (from, to) = (&arguments.source, &arguments.destination);
    let chunk_bytes = arguments.chunk as usize;
    let depth = usize::from(arguments.depth).min(COPY_BYTES_MAX as usize / chunk_bytes);
    let mut reactor = Reactor::open(arguments.io, depth * chunk_bytes).map_err(CopyCommandError::Loop)?;
    let open_source = |source| CopyCommandError::OpenSource { path: from.clone(), source };
    let open_destination = |source| CopyCommandError::OpenDestination { path: to.clone(), source };
    let mut source = FileEndpoint::source(&mut reactor, from, 1).map_err(open_source)?;
    let occupied =
        is_occupied(from, to).map_err(open_destination)?.ok_or_else(|| CopyCommandError::Same(to.clone()))?;
    let resume_path = resume_path(to);
    let resume = |source| CopyCommandError::Resume { path: resume_path.clone(), source };
    if occupied && !arguments.overwrite && !resume_path.exists() {
        return Err(CopyCommandError::Exists(to.clone()));
    }
    let mut log = ResumeLog::open(&resume_path).map_err(resume)?;
    let goes_on = log.is_of(&source.identity(), source.bytes()).map_err(resume)?;
    if occupied && !goes_on && !arguments.overwrite {
        return Err(CopyCommandError::Exists(to.clone()));
    }
    let bytes = source.bytes();
    let mut destination = FileEndpoint::destination(&mut reactor, to, 2, bytes, goes_on).map_err(open_destination)?;
    let bar = progress_bar(if arguments.verify { bytes * 2 } else { bytes });
    let options = CopyOptions { depth, chunk_bytes, verify: arguments.verify };
    let mut progress = |done| bar.set_position(done);
    let started = reactor.now();
    let copied = copy(&mut reactor, &mut source, &mut destination, options, Some(&mut log), &mut progress);
    bar.finish_and_clear();
    let copied = copied.map_err(|error| CopyCommandError::Copy { error, resume: resume_path.clone() })?;
    log.remove().map_err(resume)?;
    report(&copied, reactor.now().since(started).as_secs_f64(), arguments.json);
    Ok(())
}

/// Whether something would be lost at the destination; `None` if it is the source itself.
fn is_occupied(from: &Path, to: &Path) -> io::Result<Option<bool>> {
    let there = match std::fs::metadata(to) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Some(false)),
        there => there?,
    };
    let here = std::fs::metadata(from)?;
    let device = there.file_type().is_block_device();
    let same = (here.dev(), here.ino()) == (there.dev(), there.ino())
        || device && here.file_type().is_block_device() && here.rdev() == there.rdev();
    Ok(if same { None } else { Some(device || there.len() > 0) })
}

/// `DEST.byway-resume`, beside the destination.
fn resume_path(destination: &Path) -> PathBuf {
    let mut path = destination.as_os_str().to_owned();
    path.push(".byway-resume");
    path.into()
}

/// A bar on standard error, if that is a terminal.
fn progress_bar(bytes: u64) -> ProgressBar {
    let bar = ProgressBar::new(bytes);
    let template = "{wide_bar} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left";
    // The template is constant and a test parses it.
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

fn report(copied: &Copied, seconds: f64, json: bool) {
    let rate = copied.moved_bytes as f64 / seconds.max(1e-9);
    if json {
        let done = serde_json::json!({ "copied": copied, "seconds": seconds, "bytes_per_second": rate });
        println!("{done}");
        return;
    }
    let mut notes = String::new();
    if copied.resumed_bytes > 0 {
        notes += &format!(", {} done before", show_size(copied.resumed_bytes));
    }
    if copied.zero_bytes > 0 {
        notes += &format!(", {} of holes", show_size(copied.zero_bytes));
    }
    if copied.verified {
        notes += ", verified";
    }
    println!(
        "{} copied in {seconds:.2} s ({}/s){notes}; crc32c {:08x}",
        show_size(copied.moved_bytes),
        show_size(rate as u64),
        copied.crc32c
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_progress_template_is_good() {
        let bar = progress_bar(100);
        assert_eq!(bar.length(), Some(100));
        assert!(ProgressStyle::with_template("{wide_bar} {binary_bytes} of {binary_total_bytes}").is_ok());
    }

    #[test]
    fn a_piece_is_a_power_of_two() {
        assert_eq!(parse_chunk("64K"), Ok(65536));
        for bad in ["2M", "3K", "0", "5000"] {
            assert!(parse_chunk(bad).is_err(), "{bad}");
        }
    }
}
