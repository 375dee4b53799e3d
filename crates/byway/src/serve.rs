//! `byway serve`: opens the volumes, starts the node, says when it is ready, and ends it in good order.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use byway_door::nbd::server::NbdOptions;
use byway_fabric::tls::TlsSetupError;
use byway_reactor::Address;
use byway_reactor::privilege::{User, become_user, find_user};
use byway_service::block::spec::{StoreSpec, VolumeSpec};
use byway_service::block::{OpenError, Store, StoreOptions, Volume, VolumeOptions};

use crate::address::Listen;
use crate::admission::ClientAuthentication;
use crate::cli::ServeArguments;
use crate::config::{ConfigError, Configuration};
use crate::confinement::{confine, raise_limits};
use crate::node::{Node, NodeOptions, StartError};
use crate::supervisor::Supervisor;
use crate::tls::server_tls;

/// How long SIGTERM waits for what is in flight.
const DRAIN_LIMIT: Duration = Duration::from_secs(30);

/// Open files that a node asks for: a descriptor for each connection, and some for itself.
const OPEN_FILES: u64 = 65_536;

/// Why a node did not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The command line or the file.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A volume.
    #[error("volume `{name}`: {source}")]
    Volume {
        /// Which.
        name: String,
        /// Why.
        source: OpenError,
    },
    /// Nothing to serve, or nobody to serve it to.
    #[error("{0}")]
    Nothing(&'static str),
    /// Asked for, and not in this version. Serving without it would be worse than not serving.
    #[error("{0} is not in this version yet; leave it out")]
    NotYet(&'static str),
    /// The user of `--user`.
    #[error("--user {name}: {source}; name a user of this machine other than root, and start as root")]
    User {
        /// Who.
        name: String,
        /// Why not.
        source: std::io::Error,
    },
    /// Landlock.
    #[error(transparent)]
    Confinement(#[from] crate::confinement::ConfinementError),
    /// The service manager's environment is damaged.
    #[error("the service manager's environment (NOTIFY_SOCKET, LISTEN_FDS): {0}")]
    Manager(std::io::Error),
    /// A certificate or a key.
    #[error("TLS: {0}")]
    Tls(#[from] TlsSetupError),
    /// A loop or a listener.
    #[error(transparent)]
    Start(#[from] StartError),
    /// Signals cannot be waited for.
    #[error("cannot wait for signals: {0}")]
    Signals(std::io::Error),
}

/// Opens a volume as its specification says.
///
/// # Errors
/// See [`OpenError`].
pub fn open_volume(spec: &VolumeSpec) -> Result<Volume, OpenError> {
    let options = StoreOptions { read_only: spec.read_only, direct: spec.direct, shared: spec.shared };
    let store = match &spec.store {
        StoreSpec::Path(path) => Store::path(path, options)?,
        StoreSpec::Memory { bytes } => Store::memory(spec.name.as_str(), *bytes)?,
        StoreSpec::Null { bytes } => Store::null(*bytes),
        StoreSpec::Stripe { chunk_bytes, paths } => Store::stripe(paths, *chunk_bytes, options)?,
        StoreSpec::Fault { .. } => return Err(OpenError::Fault),
    };
    let options = VolumeOptions {
        read_only: spec.read_only,
        tls_required: spec.tls_required,
        description: spec.description.clone().unwrap_or_default(),
        volatile: matches!(spec.store, StoreSpec::Memory { .. }),
    };
    Ok(Volume::new(spec.name.as_str(), store, options))
}

/// Serves until SIGTERM or SIGINT; a second one ends the process at once, with exit code 1.
///
/// # Errors
/// See [`ServeError`].
pub fn run(arguments: &ServeArguments) -> Result<(), ServeError> {
    let configuration = Configuration::load(arguments)?;
    raise_limits(OPEN_FILES);
    let supervisor = Supervisor::from_environment().map_err(ServeError::Manager)?;
    let inherited = byway_reactor::activation::inherited_listeners().map_err(ServeError::Manager)?;
    let user = configuration.user.as_deref().map(found_user).transpose()?;
    let options = node_options(&configuration, inherited)?;
    if user.is_some() {
        confine_to(&configuration)?;
    }
    let mut signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT])
        .map_err(ServeError::Signals)?;
    let node = Node::start(options)?;
    tracing::info!(io = node.io(), "event loops");
    if let Some(user) = user {
        let name = configuration.user.clone().unwrap_or_default();
        become_user(&user).map_err(|source| ServeError::User { name, source })?;
    }
    announce(&node);
    tell(supervisor.ready("serving"));
    signals.forever().next();
    // Whoever asks twice does not want to wait.
    std::thread::spawn(move || {
        signals.forever().next();
        std::process::exit(1);
    });
    tell(supervisor.stopping("answering what is in flight"));
    tracing::info!("shutting down: answering what is in flight");
    if !node.stop(DRAIN_LIMIT) {
        tracing::warn!(seconds = DRAIN_LIMIT.as_secs(), "requests were still in flight; ended anyway");
    }
    Ok(())
}

/// What the command line knows and the node does not do yet.
fn check_built(configuration: &Configuration) -> Result<(), ServeError> {
    let asked = [
        (configuration.http.is_some(), "--http"),
        (configuration.volumes.iter().any(|volume| volume.rate_bytes_per_second.is_some()), "a volume's rate"),
    ];
    asked.into_iter().find(|(asked, _)| *asked).map_or(Ok(()), |(_, what)| Err(ServeError::NotYet(what)))
}

fn node_options(configuration: &Configuration, inherited: Vec<OwnedFd>) -> Result<NodeOptions, ServeError> {
    check_built(configuration)?;
    if configuration.volumes.is_empty() {
        return Err(ServeError::Nothing("nothing to serve: give --volume NAME=PATH"));
    }
    // Passed sockets are all there is: the manager decides where this node listens.
    let here = inherited.is_empty();
    let nbd = if here { configuration.admitted(&configuration.nbd)? } else { Vec::new() };
    let native = if here { configuration.admitted(&configuration.listen)? } else { Vec::new() };
    if nbd.is_empty() && native.is_empty() && here {
        return Err(ServeError::Nothing(
            "nowhere to listen: give --listen tcp://127.0.0.1 (byway's own wire), --nbd tcp://127.0.0.1 or \
             --nbd unix:///PATH",
        ));
    }
    let is_local =
        |at: &Address| matches!(at, Address::Tcp(at) if at.ip().is_loopback()) || matches!(at, Address::Unix(_));
    // Addresses are not looked at on byway's own wire yet, so certificates must be.
    let certified = configuration.authentication() == ClientAuthentication::Required && configuration.allow.is_empty();
    if !certified && !native.iter().all(is_local) {
        return Err(ServeError::NotYet("--listen on other than loopback and unix sockets"));
    }
    let open = |spec: &VolumeSpec| {
        let failed = |source| ServeError::Volume { name: spec.name.to_string(), source };
        open_volume(spec).map(Arc::new).map_err(failed)
    };
    let tls = server_tls(configuration.tls.as_ref(), &|path| std::fs::File::open(path))?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(NodeOptions {
        io: configuration.io,
        threads: configuration.threads.map_or(cores, usize::from),
        frame_bytes: usize::try_from(configuration.frame_bytes).unwrap_or(usize::MAX),
        volumes: configuration.volumes.iter().map(open).collect::<Result<_, _>>()?,
        native,
        nbd,
        nbd_inherited: inherited,
        nbd_options: NbdOptions::default(),
        tls,
        allow: configuration.allow.clone(),
    })
}

fn found_user(name: &str) -> Result<User, ServeError> {
    find_user(name).map_err(|source| ServeError::User { name: name.to_owned(), source })
}

/// Confines this thread and the loops to be started to the volumes and the folders of unix sockets.
fn confine_to(configuration: &Configuration) -> Result<(), ServeError> {
    let (mut writable, mut readable) = (Vec::new(), Vec::new());
    for volume in &configuration.volumes {
        let paths = volume.store.paths().into_iter().map(std::path::Path::to_owned);
        if volume.read_only { readable.extend(paths) } else { writable.extend(paths) }
    }
    for listener in configuration.nbd.iter().chain(&configuration.listen) {
        if let Listen::Unix(path) = listener {
            writable.extend(path.parent().map(std::path::Path::to_owned));
        }
    }
    let how = confine(&writable, &readable)?;
    tracing::info!(landlock = ?how, "confined to the volumes and the folders of the sockets");
    Ok(())
}

/// A service manager that does not listen is no reason to stop serving.
fn tell(told: std::io::Result<()>) {
    if let Err(error) = told {
        tracing::warn!(%error, "the service manager could not be told");
    }
}

/// One line for each door, for whoever waits for it.
fn announce(node: &Node) {
    let mut out = std::io::stdout().lock();
    for ready in node.ready() {
        // Nobody need read it: a closed pipe is no reason to stop serving.
        let _ = writeln!(out, "ready {} {}", ready.door, ready.address);
    }
    let _ = out.flush();
}
