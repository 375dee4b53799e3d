//! `byway mount` and `byway umount`: a share as a directory of this machine.

mod attributes;
mod background;
mod cached;
mod filesystem;
mod groups;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use byway_frontend::fuse::mount::{MountError, MountOptions, mount, set_read_ahead, unmount};
use byway_frontend::fuse::session::Wishes;
use byway_frontend::fuse::{Driver, DriverError};
use byway_service::file::client::{Client, ClientError, ClientOptions};
use clap::Args;

use self::cached::Kernel;
use self::filesystem::Mounted;
use crate::limits::{MOUNT_READ_AHEAD_BYTES, MOUNT_THREADS};
use crate::remote::{RemoteUri, RemoteUriError};
use crate::tls::{ClientTlsArguments, ClientTlsError};

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
    pub uri: RemoteUri,
    /// Mount point: an existing directory
    pub directory: PathBuf,
    /// TLS.
    #[command(flatten)]
    pub tls: ClientTlsArguments,
    /// Run in the background once the mount works; without it, run in the foreground until unmounted by umount, SIGINT or SIGTERM
    #[arg(long)]
    pub background: bool,
    /// Mount options, separated by commas: ro, allow_other (other users may use the mount), default_permissions (this machine's
    /// kernel checks modes and owners, in addition to the server)
    #[arg(short = 'o', value_name = "OPTIONS", value_delimiter = ',')]
    pub options: Vec<MountOption>,
    /// Time that calls wait for an unreachable server before they fail, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60")]
    pub wait: u64,
}

/// What `-o` takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum MountOption {
    /// Read-only.
    Ro,
    /// Read and write, the default.
    Rw,
    /// Other users may use the mount.
    AllowOther,
    /// This machine's kernel checks modes and owners, in addition to the server.
    DefaultPermissions,
}

/// The flags of `byway umount`.
#[derive(Args, Debug)]
pub struct UmountArguments {
    /// Mount point
    pub directory: PathBuf,
    /// Detach the mount at once, also if it is in use; it ends when its last file is closed
    #[arg(long)]
    pub lazy: bool,
}

/// Why a share is not mounted.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// No share is named.
    #[error("{0} does not name a share; write byway://HOST/SHARE (byway ls byway://HOST lists them)")]
    NoShare(String),
    /// An address of NBD.
    #[error("{0}: NBD has no shares; write byway://HOST/SHARE")]
    Nbd(String),
    /// The address.
    #[error(transparent)]
    Uri(#[from] RemoteUriError),
    /// TLS.
    #[error(transparent)]
    Tls(#[from] ClientTlsError),
    /// The server.
    #[error("{uri}: {source}")]
    Client {
        /// Which share.
        uri: String,
        /// Why.
        source: ClientError,
    },
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
}

/// Mounts a share, and serves the mount until it ends.
///
/// # Errors
/// See [`CommandError`].
pub fn run(arguments: &MountArguments) -> Result<(), CommandError> {
    if arguments.background {
        return background::start(&arguments.directory);
    }
    let uri = &arguments.uri;
    let RemoteUri::Native(_) = uri else { return Err(CommandError::Nbd(uri.to_string())) };
    let share = uri.volume().filter(|name| !name.is_empty()).ok_or_else(|| CommandError::NoShare(uri.to_string()))?;
    arguments.tls.check(uri.wants_tls())?;
    let tls = uri.wants_tls().then(|| arguments.tls.client(uri.host())).transpose()?;
    let lost_after = Duration::from_secs(arguments.wait);
    let options = ClientOptions { tls, lost_after, ..ClientOptions::new(uri.resolve()?, share) };
    let failed = |source| CommandError::Client { uri: uri.to_string(), source };
    let client = Arc::new(Client::connect(options).map_err(failed)?);
    let is = |option| arguments.options.contains(&option);
    let options = MountOptions {
        source: uri.to_string(),
        read_only: is(MountOption::Ro) || client.is_read_only() == Some(true),
        allow_other: is(MountOption::AllowOther),
        default_permissions: is(MountOption::DefaultPermissions),
        ..MountOptions::default()
    };
    keep_locks(&client)?;
    let channel = mount(&options, &arguments.directory)?;
    // A link's target never changes.
    let wishes = Wishes { locks: true, cache_symlinks: true, applies_umask: true, ..Wishes::default() };
    let mounted = Mounted::new(Arc::clone(&client)).map_err(CommandError::Thread)?;
    let stale = mounted.stale();
    let started = Driver::start(channel, Arc::new(mounted), wishes, MOUNT_THREADS);
    let driver = started.inspect_err(|_| {
        let _ = unmount(&arguments.directory, true);
    })?;
    if driver.wait_until_ready(BEGIN_LIMIT).is_none() {
        let _ = unmount(&arguments.directory, true);
        return Err(CommandError::NotBegun);
    }
    if let Err(error) = set_read_ahead(&arguments.directory, MOUNT_READ_AHEAD_BYTES) {
        tracing::debug!(%error, "the kernel reads 128 KiB ahead");
    }
    let kernel = Kernel { notifier: driver.notifier(), stale };
    client.keep_caches(Some(Arc::new(kernel))).map_err(CommandError::Thread)?;
    // The driver has it, until the mount ends.
    drop(client);
    unmount_at_signals(arguments.directory.clone())?;
    crate::output::line(format_args!("{READY}{}", arguments.directory.display()));
    driver.wait();
    Ok(())
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

/// SIGINT and SIGTERM unmount: files that are open stay usable until they are closed.
fn unmount_at_signals(directory: PathBuf) -> Result<(), CommandError> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let mut signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT]).map_err(CommandError::Signals)?;
    let watch = move || {
        for _ in signals.forever() {
            if let Err(error) = unmount(&directory, true) {
                tracing::error!(%error, "cannot unmount");
            }
        }
    };
    std::thread::Builder::new().name("byway-signals".to_owned()).spawn(watch).map_err(CommandError::Signals)?;
    Ok(())
}

/// Unmounts.
///
/// # Errors
/// [`CommandError::Mount`].
pub fn umount(arguments: &UmountArguments) -> Result<(), CommandError> {
    Ok(unmount(&arguments.directory, arguments.lazy)?)
}
