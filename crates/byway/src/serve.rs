//! `byway serve`: opens the volumes, starts the node, says when it is ready, and ends it in good order.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use byway_door::nbd::server::NbdOptions;
use byway_reactor::Address;
use byway_service::block::spec::{StoreSpec, VolumeSpec};
use byway_service::block::{OpenError, Store, StoreOptions, Volume, VolumeOptions};

use crate::cli::ServeArguments;
use crate::config::{ConfigError, Configuration};
use crate::node::{Node, NodeOptions, StartError};

/// How long SIGTERM waits for what is in flight.
const DRAIN_LIMIT: Duration = Duration::from_secs(30);

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

/// Serves until SIGTERM or SIGINT; a second one ends at once.
///
/// # Errors
/// See [`ServeError`].
pub fn run(arguments: &ServeArguments) -> Result<(), ServeError> {
    let configuration = Configuration::load(arguments)?;
    let options = node_options(&configuration)?;
    let mut signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT])
        .map_err(ServeError::Signals)?;
    let node = Node::start(options)?;
    tracing::info!(io = node.io(), "event loops");
    announce(&node);
    let mut pending = signals.forever();
    pending.next();
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
        (configuration.user.is_some(), "--user"),
        (configuration.tls.is_some(), "TLS"),
        (configuration.volumes.iter().any(|volume| volume.rate_bytes_per_second.is_some()), "a volume's rate"),
    ];
    asked.into_iter().find(|(asked, _)| *asked).map_or(Ok(()), |(_, what)| Err(ServeError::NotYet(what)))
}

fn node_options(configuration: &Configuration) -> Result<NodeOptions, ServeError> {
    check_built(configuration)?;
    if configuration.volumes.is_empty() {
        return Err(ServeError::Nothing("nothing to serve: give --volume NAME=PATH"));
    }
    let nbd = configuration.admitted(&configuration.nbd)?;
    let native = configuration.admitted(&configuration.listen)?;
    if nbd.is_empty() && native.is_empty() {
        return Err(ServeError::Nothing(
            "nowhere to listen: give --listen tcp://127.0.0.1 (byway's own wire), --nbd tcp://127.0.0.1 or \
             --nbd unix:///PATH",
        ));
    }
    let is_local =
        |at: &Address| matches!(at, Address::Tcp(at) if at.ip().is_loopback()) || matches!(at, Address::Unix(_));
    if !native.iter().all(is_local) {
        return Err(ServeError::NotYet("--listen on other than loopback and unix sockets"));
    }
    let open = |spec: &VolumeSpec| {
        let failed = |source| ServeError::Volume { name: spec.name.to_string(), source };
        open_volume(spec).map(Arc::new).map_err(failed)
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(NodeOptions {
        io: configuration.io,
        threads: configuration.threads.map_or(cores, usize::from),
        frame_bytes: usize::try_from(configuration.frame_bytes).unwrap_or(usize::MAX),
        volumes: configuration.volumes.iter().map(open).collect::<Result<_, _>>()?,
        native,
        nbd,
        nbd_inherited: Vec::new(),
        nbd_options: NbdOptions::default(),
        allow: configuration.allow.clone(),
    })
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
