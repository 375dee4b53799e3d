//! `byway mount` and `byway umount`: a share as a directory of this machine.

mod attributes;
mod background;
mod cached;
mod control;
mod counters;
mod document;
mod end;
mod filesystem;
mod groups;
pub(crate) mod helper;
mod locks;
mod mapped;
mod metrics;
mod nowhere;
mod registry;
mod status;
mod takeover;
mod umount;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use byway_frontend::fuse::mount::{MountError, MountOptions, mount, set_read_ahead, unmount};
use byway_frontend::fuse::session::Wishes;
use byway_frontend::fuse::{Driver, DriverError};
use byway_service::file::client::{Client, ClientOptions, NotDurable};
use clap::Args;

use self::cached::Kernel;
use self::control::MountControl;
use self::end::End;
use self::filesystem::Mounted;
pub(crate) use self::nowhere::DetachedMount;
use self::registry::{MountAnswer, MountSocket};
pub use self::status::MountStatus;
pub(crate) use self::status::print as print_status;
use self::takeover::{Predecessor, TakeoverError};
pub use self::umount::{UmountArguments, umount};
use crate::limits::{MOUNT_ENTRY_TIMEOUT_MAX, MOUNT_READ_AHEAD_BYTES, MOUNT_THREADS};
use crate::remote::RemoteUri;
use crate::share_uri::{ShareUriError, client_options, share_of};
use crate::tls::ClientTlsArguments;

/// How long the kernel may take to begin.
const BEGIN_LIMIT: Duration = Duration::from_secs(10);

/// How often the session is tried while programs hold locks: some times in the time for which a server keeps them.
const RENEW_EVERY: Duration = Duration::from_secs(3);

/// What `byway mount` prints, before the directory, once the mount works.
const READY: &str = "ready mount ";

/// The flags of `byway mount`.
#[derive(Args, Debug)]
pub struct MountArguments {
    /// Share: byway://HOST[:PORT]/SHARE, byways://HOST[:PORT]/SHARE (TLS), byway+unix:///SHARE?socket=PATH,
    /// byway+shm:///SHARE?socket=PATH (shared memory) or byway+rdma://HOST[:PORT]/SHARE
    #[arg(required_unless_present = "list")]
    pub uri: Option<RemoteUri>,
    /// Mount point: an existing directory
    #[arg(required_unless_present = "list")]
    pub directory: Option<PathBuf>,
    /// TLS.
    #[command(flatten)]
    pub tls: ClientTlsArguments,
    /// Run in the background once the mount works; without it, run in the foreground until unmounted by umount, SIGINT or SIGTERM
    #[arg(long)]
    pub background: bool,
    /// Take over the mount that another process of yours serves on the directory, from the same URI: programs only wait for a moment, and
    /// the other process ends. Mount options stay as they are
    #[arg(long, conflicts_with = "options")]
    pub takeover: bool,
    /// List your mounts on this machine
    #[arg(long, exclusive = true)]
    pub list: bool,
    /// Mount options, separated by commas: ro, noexec (no program of the mount is executed), allow_other (other users may use the
    /// mount), default_permissions (this machine's kernel checks modes and owners, in addition to the server). Of rw and ro, or exec
    /// and noexec, the last one counts
    #[arg(short = 'o', value_name = "OPTIONS", value_delimiter = ',')]
    pub options: Vec<MountOption>,
    /// Time that calls wait for an unreachable server before they fail, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60")]
    pub wait: u64,
    /// Time for which the kernel uses a name that it has looked up without asking again, in seconds, at most 60, also 0.1. A name that
    /// another machine removes or changes may be used for so long; changes through this mount are seen at once. With -o allow_other
    /// it needs default_permissions, too
    #[arg(long, value_name = "SECONDS", default_value = "0", value_parser = parse_entry_timeout)]
    pub entry_timeout: Duration,
}

impl MountArguments {
    fn has(&self, option: MountOption) -> bool {
        self.options.contains(&option)
    }
}

fn parse_entry_timeout(text: &str) -> Result<Duration, String> {
    let parsed = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    parsed.filter(|time| *time <= MOUNT_ENTRY_TIMEOUT_MAX).ok_or_else(|| "a number of seconds from 0 to 60".to_owned())
}

/// What `-o` takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum MountOption {
    /// Read-only.
    Ro,
    /// Read and write, the default.
    Rw,
    /// No program of the mount is executed.
    Noexec,
    /// Programs of the mount may be executed, the default.
    Exec,
    /// Set-user-ID bits do not count, as for each mount of a share.
    Nosuid,
    /// Device nodes do not work, as for each mount of a share.
    Nodev,
    /// Other users may use the mount.
    AllowOther,
    /// This machine's kernel checks modes and owners, in addition to the server.
    DefaultPermissions,
}

/// Why a share is not mounted.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The share.
    #[error(transparent)]
    Share(#[from] ShareUriError),
    /// The kernel.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The threads.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// It ended at once.
    #[error("the kernel did not start the mount; `byway doctor` says what this machine allows")]
    NotBegun,
    /// The process in the background.
    #[error("cannot start the process in the background: {0}")]
    Background(std::io::Error),
    /// The log of the process in the background.
    #[error("cannot write the log {}: {source}; a user's mount needs XDG_RUNTIME_DIR", path.display())]
    Log {
        /// Its file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// It failed, and has said why.
    #[error("{} is not mounted; the background process printed the reason", .0.display())]
    BackgroundFailed(PathBuf),
    /// A thread.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    /// Signals.
    #[error("cannot wait for signals: {0}")]
    Signals(std::io::Error),
    /// Names would be used without a look at the user's rights.
    #[error(
        "--entry-timeout lets each user reach files by names that another user has looked up: with -o allow_other give \
         default_permissions, too, so that the kernel checks rights itself"
    )]
    EntryTimeout,
    /// Another process has the mount.
    #[error(transparent)]
    Takeover(#[from] TakeoverError),
    /// The folder of sockets.
    #[error("cannot look at the sockets of mounts: {0}")]
    Sockets(std::io::Error),
    /// No mount is there.
    #[error("no process of yours serves a mount on {}; `byway mount --list` shows them", .0.display())]
    NoMount(PathBuf),
    /// The mount has ended, and the server may lose what was written.
    #[error("{uri}: what was written through the mount may not be durable: {source}")]
    NotDurable {
        /// The share.
        uri: String,
        /// Why.
        source: NotDurable,
    },
    /// It is mounted still.
    #[error("{} is not unmounted: {reason}; try again", directory.display())]
    MountedStill {
        /// Where.
        directory: PathBuf,
        /// What the process said.
        reason: String,
    },
    /// The mount has ended, and the server may lose what programs wrote through it.
    #[error("{} is unmounted, but {reason}", directory.display())]
    Unmounted {
        /// Where it was.
        directory: PathBuf,
        /// What the process said.
        reason: String,
    },
    /// Standard output is gone.
    #[error("cannot print: {0}")]
    Print(std::io::Error),
}

/// Mounts a share or takes its mount over, and serves the mount until it ends; or lists the mounts.
///
/// # Errors
/// See [`CommandError`].
pub fn run(arguments: &MountArguments) -> Result<(), CommandError> {
    let (Some(uri), Some(directory)) = (&arguments.uri, &arguments.directory) else { return list() };
    if arguments.background {
        return background::start(directory);
    }
    share_of(uri)?;
    arguments.tls.check(uri.wants_tls()).map_err(ShareUriError::from)?;
    check_entry_timeout(arguments, directory)?;
    let lost_after = Duration::from_secs(arguments.wait);
    let options = ClientOptions { lost_after, renews_locks: true, ..client_options(uri, &arguments.tls)? };
    let Serving { driver, mounted, listening } = if arguments.takeover {
        take_over(arguments, uri, directory, options)?
    } else {
        begin(arguments, uri, directory, options)?
    };
    crate::output::line(format_args!("{READY}{}", directory.display()));
    driver.wait();
    let durable = mounted.end.outcome();
    let not_durable =
        durable.and_then(Result::err).map(|source| CommandError::NotDurable { uri: uri.to_string(), source });
    mounted.end.tell(&match durable {
        Some(_) => MountAnswer::Ended { not_durable: not_durable.as_ref().map(ToString::to_string) },
        None => MountAnswer::Failed("another process took the mount over before".to_owned()),
    });
    drop(listening);
    not_durable.map_or(Ok(()), Err)
}

/// A mount that works.
struct Serving {
    driver: Driver,
    mounted: Mounted,
    /// Its socket, which is missing where its folder cannot be had.
    listening: Option<(Arc<MountControl>, MountSocket)>,
}

// A link's target never changes.
fn wishes() -> Wishes {
    Wishes { locks: true, cache_symlinks: true, applies_umask: true, ..Wishes::default() }
}

/// Mounts a share.
fn begin(
    arguments: &MountArguments,
    uri: &RemoteUri,
    directory: &Path,
    options: ClientOptions,
) -> Result<Serving, CommandError> {
    let client = Arc::new(Client::connect(options).map_err(|source| ShareUriError::client(uri, source))?);
    let is_last = |option: MountOption, opposite: MountOption| {
        let mut options = arguments.options.iter().rev();
        options.find(|one| [option, opposite].contains(one)) == Some(&option)
    };
    let options = MountOptions {
        source: uri.to_string(),
        read_only: is_last(MountOption::Ro, MountOption::Rw) || client.is_read_only() == Some(true),
        allow_other: arguments.has(MountOption::AllowOther),
        default_permissions: arguments.has(MountOption::DefaultPermissions),
        no_execution: is_last(MountOption::Noexec, MountOption::Exec),
        ..MountOptions::default()
    };
    keep_locks(&client)?;
    let path = registry::path_of(directory).unwrap_or_else(|_| directory.to_owned());
    let channel = mount(&options, directory)?;
    let mounted = Mounted::new(Arc::clone(&client), arguments.entry_timeout).map_err(CommandError::Thread)?;
    let started = Driver::start(channel, Arc::new(mounted.clone()), wishes(), MOUNT_THREADS);
    let driver = started.inspect_err(|_| {
        let _ = unmount(directory, true);
    })?;
    if driver.wait_until_ready(BEGIN_LIMIT).is_none() {
        let _ = unmount(directory, true);
        return Err(CommandError::NotBegun);
    }
    if let Err(error) = set_read_ahead(directory, MOUNT_READ_AHEAD_BYTES) {
        tracing::debug!(%error, "the kernel reads 128 KiB ahead");
    }
    keep_caches(&driver, &mounted)?;
    unmount_at_signals(directory.to_owned(), mounted.end.clone())?;
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let listening = listen(&driver, mounted.clone(), (path, uri.to_string()), (since, 0));
    Ok(Serving { driver, mounted, listening })
}

/// Refuses to let the kernel keep names that users with other rights could use.
fn check_entry_timeout(arguments: &MountArguments, directory: &Path) -> Result<(), CommandError> {
    if arguments.entry_timeout.is_zero() {
        return Ok(());
    }
    let for_all_users = if arguments.takeover {
        registry::path_of(directory).map_or(true, |path| is_for_all_users(&path))
    } else {
        arguments.has(MountOption::AllowOther) && !arguments.has(MountOption::DefaultPermissions)
    };
    if for_all_users { Err(CommandError::EntryTimeout) } else { Ok(()) }
}

/// Whether users other than its maker use a mount, and the server alone knows their rights.
fn is_for_all_users(path: &Path) -> bool {
    let Ok(table) = std::fs::read_to_string("/proc/self/mounts") else { return true };
    // As the kernel writes it there.
    let escaped = [("\\", "\\134"), (" ", "\\040"), ("\t", "\\011"), ("\n", "\\012")];
    let path = escaped.iter().fold(path.to_string_lossy().into_owned(), |path, (byte, code)| path.replace(byte, code));
    let there = |line: &&str| line.split(' ').nth(1) == Some(&path);
    // One that is not found may be for all.
    let Some(options) = table.lines().rfind(there).and_then(|line| line.split(' ').nth(3)) else { return true };
    let is = |option| options.split(',').any(|one| one == option);
    is("allow_other") && !is("default_permissions")
}

/// Goes on with the mount of another process.
fn take_over(
    arguments: &MountArguments,
    uri: &RemoteUri,
    directory: &Path,
    options: ClientOptions,
) -> Result<Serving, CommandError> {
    let mut before = Predecessor::ask(directory, &uri.to_string())?;
    let path = registry::path_of(directory).unwrap_or_else(|_| directory.to_owned());
    // A process that works in its own mount would keep it from being unmounted.
    if std::env::current_dir().is_ok_and(|current| current.starts_with(&path)) {
        let _ = std::env::set_current_dir("/");
    }
    let client = Arc::new(before.client(options)?);
    let begun = go_on_with(&mut before, &client, arguments.entry_timeout);
    let history = before.history();
    let (driver, mounted) = match begun.and_then(|begun| before.end().map(|()| begun).map_err(CommandError::from)) {
        Ok(begun) => begun,
        Err(error) => {
            // The server keeps files and locks for the process before, which goes on.
            let _ = client.suspend(control::PREPARE_TIME_MAX);
            return Err(error);
        }
    };
    driver.control().go_on();
    // Not before: a signal ends this process until then, and the one before goes on.
    if let Err(error) = unmount_at_signals(path.clone(), mounted.end.clone()) {
        tracing::error!(%error, "signals will end the mount's process without unmounting");
    }
    let listening = listen(&driver, mounted.clone(), (path, uri.to_string()), history);
    Ok(Serving { driver, mounted, listening })
}

/// Makes all that serves the mount, without answering any request.
fn go_on_with(
    before: &mut Predecessor,
    client: &Arc<Client>,
    entry_timeout: Duration,
) -> Result<(Driver, Mounted), CommandError> {
    let mounted = Mounted::new(Arc::clone(client), entry_timeout).map_err(CommandError::Thread)?;
    let driver = Driver::take_over(before.driven(&mounted), Arc::new(mounted.clone()), wishes())?;
    keep_caches(&driver, &mounted)?;
    keep_locks(client)?;
    Ok((driver, mounted))
}

/// The client has caches, of which the kernel's are a part.
fn keep_caches(driver: &Driver, mounted: &Mounted) -> Result<(), CommandError> {
    let stale = mounted.stale();
    let kernel = Kernel { notifier: stale.begin(driver.notifier()), stale };
    mounted.client.keep_caches(Some(Arc::new(kernel))).map_err(CommandError::Thread)
}

/// Answers on a socket. Without one the mount works, and is neither listed nor taken over.
fn listen(
    driver: &Driver,
    mounted: Mounted,
    (directory, uri): (PathBuf, String),
    (since, takeovers): (u64, u32),
) -> Option<(Arc<MountControl>, MountSocket)> {
    let driver = driver.control();
    let handing_over = Mutex::new(());
    let control = Arc::new(MountControl { mounted, driver, directory, uri, since, takeovers, handing_over });
    let opened = MountSocket::bind().and_then(|socket| control::serve(&control, &socket).map(|()| (control, socket)));
    let no_socket = |error: &_| tracing::warn!(%error, "the mount has no socket: it is not listed, and no process can take it over");
    opened.inspect_err(no_socket).ok()
}

/// `byway mount --list`.
fn list() -> Result<(), CommandError> {
    let all = statuses()?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    status::print_list(&mut crate::output::stdout(), &all, now).map_err(CommandError::Print)
}

/// Those of all mounts of this user whose processes answer.
fn statuses() -> Result<Vec<MountStatus>, CommandError> {
    let all = registry::all().map_err(CommandError::Sockets)?;
    Ok(all.into_iter().map(|(_, status)| status).collect())
}

/// How the mount on a directory is, for `byway ctl mount`.
///
/// # Errors
/// See [`CommandError`].
pub fn status_of(directory: &Path) -> Result<MountStatus, CommandError> {
    let found = registry::find(directory).map_err(CommandError::Sockets)?;
    Ok(found.ok_or_else(|| CommandError::NoMount(directory.to_owned()))?.1)
}

/// The metrics of all mounts of this user, as Prometheus text, for `byway ctl metrics`.
///
/// # Errors
/// See [`CommandError`].
pub fn metrics_of_all() -> Result<String, CommandError> {
    Ok(metrics::render(&statuses()?))
}

/// While programs hold locks, a lost session is replaced also without calls: the server keeps locks for a limited time.
fn keep_locks(client: &Arc<Client>) -> Result<(), CommandError> {
    let client = Arc::downgrade(client);
    let renew = move || {
        while let Some(client) = client.upgrade() {
            client.renew();
            drop(client);
            std::thread::park_timeout(RENEW_EVERY);
        }
    };
    std::thread::Builder::new().name("byway-locks".to_owned()).spawn(renew).map_err(CommandError::Thread)?;
    Ok(())
}

/// SIGINT and SIGTERM unmount: files that are open stay usable until they are closed. A second one ends a process that waits for its server
/// once the mount has ended.
fn unmount_at_signals(directory: PathBuf, end: End) -> Result<(), CommandError> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let mut signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT]).map_err(CommandError::Signals)?;
    let watch = move || {
        for (number, _) in signals.forever().enumerate() {
            if end.waits_for_server() {
                if number == 0 {
                    tracing::warn!("waits until what was written is durable at the server; a second signal ends this");
                    continue;
                }
                tracing::error!(
                    "ended by a signal: what was written through the mount may not be durable at the server"
                );
                std::process::exit(1);
            }
            if let Err(error) = unmount(&directory, true) {
                tracing::error!(%error, "cannot unmount");
            }
        }
    };
    std::thread::Builder::new().name("byway-signals".to_owned()).spawn(watch).map_err(CommandError::Signals)?;
    Ok(())
}
