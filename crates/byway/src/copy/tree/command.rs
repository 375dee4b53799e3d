//! `byway copy` from or to a share, as the command line sees it.

use std::fmt::Write;
use std::io;
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use byway_reactor::{Instant, IoChoice};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::ends::{Origin, Side, Target, reach};
use super::failure::{Failure, Place};
use super::run::{Copied, Folder, Options, Run, get};
use super::side::{Directory, Facts};
use super::walk::open_to_owner;
use super::{Source, copy};
use crate::copy::command::CopyArguments;
use crate::copy::location::Location;
use crate::copy::progress::{self, Teller};
use crate::limits::COPY_TREE_THREADS_MAX;
use crate::output;
use crate::share_uri::ShareUriError;
use crate::units::show_size;

/// Bytes of a read or write without `--chunk`: the most that one call moves.
const REQUEST_BYTES: u64 = 1 << 20;

/// Why a tree is not copied.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// Neither side is a share.
    #[error("--recursive copies from or to a share, and both sides are of this machine; use cp -a")]
    Local,
    /// A volume, or a share without its slash.
    #[error(
        "{0} names a volume; write a slash behind the name of a share ({0}/), and copy between a volume and a share by way of a file"
    )]
    Volume(String),
    /// An address of NBD.
    #[error("{0}: NBD has no shares; write byway://HOST/SHARE/PATH")]
    Nbd(String),
    /// A flag that applies to images only.
    #[error("{0} is for images and volumes; leave it out for files of a share")]
    Flag(&'static str),
    /// The share.
    #[error(transparent)]
    Share(#[from] ShareUriError),
    /// Changes are refused.
    #[error("{0} is read-only; name another destination, or share it without `ro`, and without `:ro` for this client")]
    ReadOnly(String),
    /// The source or destination cannot be opened.
    #[error("{place}: {source}; {advice}")]
    End {
        /// Which.
        place: Place,
        /// Why.
        source: Errno,
        /// What to do.
        advice: &'static str,
    },
    /// A directory without `--recursive`.
    #[error("{0} is a directory; add --recursive to copy it with all that is in it")]
    Directory(Place),
    /// The destination lies within the source: the copy would never end.
    #[error("{0} lies within the source; name another destination")]
    Within(Place),
    /// The directory at the destination.
    #[error("{0}")]
    Top(Failure),
    /// Random numbers.
    #[error("the kernel gives no random numbers: {0}")]
    Random(getrandom::Error),
    /// Signals.
    #[error("cannot catch signals: {0}")]
    Signals(io::Error),
    /// Threads.
    #[error("cannot start threads: {0}; use a smaller --depth")]
    Threads(io::Error),
    /// The server does not come back.
    #[error("a server did not come back within a minute; run the same command again to resume")]
    Lost,
    /// Some were not copied.
    #[error(
        "{failures} entries were not copied, for the reasons above; {copied} files are complete, which the same command passes over"
    )]
    Incomplete {
        /// How many.
        failures: u64,
        /// Files that are complete.
        copied: u64,
    },
}

/// Whether a command line is about files of shares.
pub(in crate::copy) fn concerns(arguments: &CopyArguments) -> bool {
    let is_tree = |place: &Location| matches!(place, Location::Tree(_));
    arguments.recursive || is_tree(&arguments.source) || is_tree(&arguments.destination)
}

/// Copies, shows progress, and prints a summary. The exit code is 130 if a signal stopped the copy.
///
/// # Errors
/// Says what to do.
pub(in crate::copy) fn run(arguments: &CopyArguments) -> Result<ExitCode, TreeError> {
    check_flags(arguments)?;
    raise_open_files();
    let source = reach(&arguments.source, arguments, None)?;
    let destination = reach(&arguments.destination, arguments, Some(&source))?;
    if matches!((&source, &destination), (Side::Local(_), Side::Local(_))) {
        return Err(TreeError::Local);
    }
    let copied = copy_between(arguments, &source, &destination);
    for side in [&source, &destination] {
        side.close();
    }
    copied
}

fn check_flags(arguments: &CopyArguments) -> Result<(), TreeError> {
    let images_alone = [
        (arguments.raw, "--raw"),
        (arguments.connections.is_some(), "--connections"),
        (arguments.resume.is_some(), "--resume"),
        (arguments.no_resume, "--no-resume"),
        (arguments.io != IoChoice::Auto, "--io"),
    ];
    if let Some((_, flag)) = images_alone.into_iter().find(|(given, _)| *given) {
        return Err(TreeError::Flag(flag));
    }
    let wants_tls = |place: &Location| match place {
        Location::Path(_) => false,
        Location::Remote(uri) => uri.wants_tls(),
        Location::Tree(uri) => uri.remote.wants_tls(),
    };
    let wants_tls = wants_tls(&arguments.source) || wants_tls(&arguments.destination);
    Ok(arguments.tls.check(wants_tls).map_err(ShareUriError::from)?)
}

/// Raises the limit of open files: on this machine's side, directories are open while their entries are being copied.
fn raise_open_files() {
    let now = getrlimit(Resource::Nofile);
    // Without a higher limit, more entries may fail, each by name.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: now.maximum, ..now });
}

fn copy_between(arguments: &CopyArguments, source: &Side, destination: &Side) -> Result<ExitCode, TreeError> {
    if let Side::Share(uri, share) = destination
        && share.is_read_only()
    {
        return Err(TreeError::ReadOnly(uri.to_string()));
    }
    let options = Options {
        threads: usize::from(arguments.depth).min(COPY_TREE_THREADS_MAX),
        request_bytes: arguments.chunk.unwrap_or(REQUEST_BYTES) as usize,
        verify: arguments.verify,
        overwrite: arguments.overwrite,
    };
    let run = Run::new(options, [source.shown(), destination.shown()]).map_err(TreeError::Random)?;
    let (run, job) = match source.origin()? {
        Origin::Directory(from, facts) => {
            let place = || Place::below(&source.shown(), b"");
            if !arguments.recursive {
                return Err(TreeError::Directory(place()));
            }
            if source.contains(destination) {
                return Err(TreeError::Within(Place::below(&destination.shown(), b"")));
            }
            let top = top(&run, &from, facts, destination)?;
            (run, Source::Tree(top))
        }
        Origin::Entry(parent, name, facts) => entry(run, parent, name, facts, source, destination)?,
    };
    let started = std::time::Instant::now();
    let mut teller = Teller::new(0, Instant::ZERO).map_err(TreeError::Signals)?;
    let ended = copy(&run, job, &mut || tell(&run, &mut teller, started, source.is_lost() || destination.is_lost()));
    teller.finish();
    ended.map_err(TreeError::Threads)?;
    conclude(&run, started.elapsed().as_secs_f64(), arguments.json)
}

/// The tree's own directory at the destination, made if nothing is there.
fn top(run: &Run, from: &Arc<dyn Directory>, facts: Facts, destination: &Side) -> Result<Arc<Folder>, TreeError> {
    let (to, was_there, parent) = match destination.target()? {
        Target::Directory(to) => (to, true, None),
        Target::Named(parent, name) => {
            let (to, was_there) = run.make(&*parent, &name, b"").map_err(TreeError::Top)?;
            (to, was_there, Some((parent, name)))
        }
    };
    let folder = |from: &Arc<dyn Directory>, to: Arc<dyn Directory>, facts, parent, only| Folder {
        from: Arc::clone(from),
        to,
        path: Vec::new(),
        is_single: false,
        depth: 0,
        was_there,
        facts,
        parent,
        only,
        pending: AtomicUsize::new(1),
    };
    // The parent of the new directory is not part of the copy: it is only checked to have the new name.
    let parent = parent
        .map(|(parent, name)| Arc::new(folder(&parent, Arc::clone(&parent), None, None, Some([name.clone(), name]))));
    // A sticky directory and the top of a share keep their own rights.
    let is_shared = was_there && {
        let of_share = matches!(destination, Side::Share(uri, _) if uri.path.is_empty());
        of_share || to.facts().is_ok_and(|there| there.mode & STICKY != 0)
    };
    if was_there {
        if !is_shared {
            open_to_owner(&*to);
        }
        run.remove_temporaries(&*to, b"").map_err(TreeError::Top)?;
    }
    Ok(Arc::new(folder(from, to, (!is_shared).then_some(facts), parent, None)))
}

/// The bit of a directory in which users remove their own files alone (`/tmp`).
const STICKY: u32 = 0o1000;

/// One entry, under its own name in a directory, or under a new one.
fn entry(
    mut run: Run,
    from: Arc<dyn Directory>,
    name: Vec<u8>,
    facts: Facts,
    source: &Side,
    destination: &Side,
) -> Result<(Run, Source), TreeError> {
    let (to, new_name) = match destination.target()? {
        Target::Directory(to) => {
            let new_name = source.last_name().unwrap_or_else(|| name.clone());
            run.sides[1] = Place::below(&destination.shown(), &new_name).to_string();
            (to, new_name)
        }
        Target::Named(to, new_name) => (to, new_name),
    };
    let pending = AtomicUsize::new(1);
    let folder = Folder {
        from,
        to,
        path: Vec::new(),
        is_single: true,
        depth: 0,
        was_there: true,
        facts: None,
        parent: None,
        only: Some([name.clone(), new_name.clone()]),
        pending,
    };
    Ok((run, Source::Entry { folder: Arc::new(folder), name, new_name, facts }))
}

fn tell(run: &Run, teller: &mut Teller, started: std::time::Instant, is_lost: bool) -> ControlFlow<()> {
    let counts = &run.counts;
    let done = get(&counts.files) + get(&counts.links) + get(&counts.passed_over) + get(&counts.failures);
    let doing = if is_lost { "no session with the server, retrying" } else { "copying" };
    let label = format!("{doing}, {done} of {} files", get(&counts.found));
    let now = Instant::ZERO + started.elapsed();
    teller.tell_files(label, get(&counts.done_bytes), get(&counts.found_bytes), now)
}

fn conclude(run: &Run, seconds: f64, json: bool) -> Result<ExitCode, TreeError> {
    let copied = run.copied();
    let entries = copied.files + copied.links + copied.passed_over;
    if run.lost.load(Ordering::Relaxed) {
        return Err(TreeError::Lost);
    }
    if run.stopped.load(Ordering::Relaxed) {
        output::note(format_args!("copy: stopped after {entries} files; run the same command again to resume"));
        return Ok(ExitCode::from(progress::STOPPED));
    }
    report(&copied, seconds, json);
    if copied.failures > 0 {
        return Err(TreeError::Incomplete { failures: copied.failures, copied: entries });
    }
    Ok(ExitCode::SUCCESS)
}

fn report(copied: &Copied, seconds: f64, json: bool) {
    let rate = copied.bytes as f64 / seconds.max(1e-9);
    if json {
        let done = serde_json::json!({ "copied": copied, "seconds": seconds, "bytes_per_second": rate });
        output::line(done);
        return;
    }
    // Writing to a string does not fail.
    let mut notes = String::new();
    for (count, of) in [
        (copied.directories, "directories"),
        (copied.links, "symbolic links"),
        (copied.passed_over, "files done before"),
        (copied.xattrs_refused, "extended attributes refused"),
    ] {
        if count > 0 {
            let _ = write!(notes, ", {count} {of}");
        }
    }
    if copied.verified {
        notes += ", verified";
    }
    let (files, bytes, rate) = (copied.files, show_size(copied.bytes), show_size(rate as u64));
    output::line(format_args!("{files} files of {bytes} copied in {seconds:.2} s ({rate}/s){notes}"));
}
