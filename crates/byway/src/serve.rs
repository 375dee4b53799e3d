//! `byway serve`: opens the volumes, starts the node, says when it is ready, and ends it in good order.

use std::ffi::OsString;
use std::io::Write;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use byway_fabric::tls::{ServerTls, TlsSetupError};
use byway_frontend::http::{HttpFrontend, Report};
use byway_frontend::nbd::server::NbdOptions;
use byway_reactor::privilege::{User, become_user, find_user};
use byway_reactor::{Address, Heap, limit_mapped};
use byway_service::block::OpenHere;
use byway_service::file::Share;
use byway_service::memory::Lending;

use crate::address::{Cidr, Listen};
use crate::admission::{Guarded, peer_allowed};
use crate::cli::ServeArguments;
use crate::config::{ConfigError, Configuration, resolve};
use crate::confinement::{confine, raise_limits};
use crate::control::{self, Asker, Order};
use crate::lend::{self, LendSpec};
use crate::listening::{self, Endpoint, Sockets};
use crate::memory::{default_mapped_bytes, memory_bytes};
use crate::node::{Measuring, Node, NodeOptions, Replaced, StartError, boot};
use crate::opener::{Files, PrivilegedOpener};
use crate::reload::{self, Patience, Plan, ReloadError, Retired, Served, Summary};
use crate::supervisor::Supervisor;
use crate::tls::server_tls;

/// How long SIGTERM waits for what is in flight.
const DRAIN_LIMIT: Duration = Duration::from_secs(30);

/// How long a reload waits for the loops to confirm it, and for the last requests to volumes that it took out.
const APPLY_LIMIT: Duration = Duration::from_secs(10);

/// How often the main thread looks how much of the heap is free, and above how much it is given back: after a burst of answers that
/// clients did not take, it is hundreds of mebibytes.
const HEAP_LOOK_INTERVAL: Duration = Duration::from_secs(1);
const HEAP_FREE_BYTES_MAX: usize = 32 << 20;

/// Open files that a node asks for: a descriptor for each connection, and some for itself.
const OPEN_FILES: u64 = 65_536;

/// The same for one that has shares, whose clients hold a descriptor for each file that they know.
const SHARED_FILES: u64 = 1 << 20;

/// Why a node did not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The command line or the file.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The volumes.
    #[error(transparent)]
    Volumes(#[from] ReloadError),
    /// Nothing to serve, or no listener.
    #[error("{0}")]
    Nothing(&'static str),
    /// The user of `--user`.
    #[error("--user {name}: {why}; name a user of this machine other than root, and start as root", why = user_error(source))]
    User {
        /// Who.
        name: String,
        /// Why not.
        source: std::io::Error,
    },
    /// The group of a socket.
    #[error("group={name}: {why}; name a group of this machine", why = group_error(source))]
    Group {
        /// Which.
        name: String,
        /// Why not.
        source: std::io::Error,
    },
    /// The process that opens files for reloads.
    #[error("cannot start the privileged opener: {0}")]
    Opener(std::io::Error),
    /// Landlock.
    #[error(transparent)]
    Confinement(#[from] crate::confinement::ConfinementError),
    /// The limit on mapped files.
    #[error("cannot limit mapped files (--mmap-limit): {0}; is /proc mounted?")]
    Mapped(std::io::Error),
    /// The guard of lent memory.
    #[error(
        "cannot look at this machine's memory (--lend ...,guard=SIZE): {0}; is /proc mounted? guard=0 lends without looking"
    )]
    Lend(std::io::Error),
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
    /// A loop has failed or panicked: the log says why. Who asked it has lost the connection.
    #[error("an event loop ended, so the node ends; the log says why; restart the node")]
    LoopEnded,
}

/// Serves until SIGTERM or SIGINT, and then until lent memory is back; a second one ends the process at once, with exit code 1. SIGHUP and `byway ctl reload`
/// read the configuration again.
///
/// # Errors
/// See [`ServeError`].
pub fn run(arguments: &ServeArguments, measuring: Measuring) -> Result<(), ServeError> {
    let configuration = Configuration::load(arguments)?;
    raise_limits(if configuration.shares.is_empty() { OPEN_FILES } else { SHARED_FILES });
    let supervisor = Supervisor::from_environment().map_err(ServeError::Manager)?;
    let inherited = byway_reactor::activation::inherited_listeners().map_err(ServeError::Manager)?;
    let user = configuration.user.as_deref().map(found_user).transpose()?;
    let listeners = listeners(&configuration, inherited)?;
    let guarded = listeners.guarded();
    let plan = reload::plan(&[], &configuration.volumes, &OpenHere)?;
    let shares = reload::plan_shares(&[], &configuration.shares, &|path| std::fs::File::open(path))?;
    let tls = server_tls(configuration.tls.as_ref(), &|path| std::fs::File::open(path))?;
    let (http, ctl) = (configuration.admitted_http()?, configuration.control_socket.clone());
    // Read before the node is confined. The limit is set before its loops start, which ask for it then.
    let (memory, boot) = (memory_bytes(), boot());
    let mapped_bytes = configuration.mapped_bytes.or_else(|| memory.map(default_mapped_bytes));
    let mut sockets = Sockets::default();
    let native = listening::open_all(&listeners.native, &mut sockets.files)?;
    let mut nbd = listening::open_all(&listeners.nbd, &mut sockets.files)?;
    nbd.extend(listeners.inherited);
    let ctl = ctl.map(|path| control::bind(&path, &mut sockets.files)).transpose()?;
    // It stays unconfined, and with --user privileged, for reloads.
    let opener =
        Arc::new(PrivilegedOpener::start(opener_arguments(std::env::args_os().skip(1))).map_err(ServeError::Opener)?);
    sockets.opener = Some(Arc::clone(&opener));
    let lending = configuration.lend.map(LendSpec::open).transpose().map_err(ServeError::Lend)?;
    confine_to(&configuration)?;
    mapped_bytes.map_or(Ok(()), limit_mapped).map_err(ServeError::Mapped)?;
    let (events, happened) = channel();
    let ending = Arc::new(AtomicBool::new(false));
    watch_signals(events.clone(), Arc::clone(&ending))?;
    let node = Node::start(NodeOptions {
        native,
        nbd,
        tls: tls.clone(),
        lending: lending.clone(),
        boot,
        measuring,
        on_failure: tells_of_the_end(events.clone()),
        ..node_options(&configuration, &plan.served, &shares)
    })?;
    tracing::info!(io = node.io(), "event loops");
    let report: Arc<dyn Report> = Arc::new(node.report().clone());
    let allow = Arc::new(RwLock::new(configuration.allow.clone()));
    let http = http.map(|at| open_http(at, &report, &allow)).transpose()?;
    ctl.map_or(Ok(()), |ctl| open_control(ctl, report, events))?;
    if let Some(user) = user {
        let name = configuration.user.clone().unwrap_or_default();
        become_user(&user).map_err(|source| ServeError::User { name, source })?;
    }
    warn_of_shares(&shares);
    announce(&node, http.as_ref().map(HttpFrontend::address), configuration.control_socket.as_deref());
    let mut serving = RunningNode {
        arguments,
        configuration,
        memory,
        files: opener,
        served: plan.served,
        shares,
        listeners: guarded,
        tls,
        allow,
        lending,
        node,
        ending,
    };
    tell(supervisor.ready(&serving.status()));
    let event = serving.follow_orders(&supervisor, &happened);
    serving.end(event, &supervisor, &happened)
}

/// Says why the clients of a share may do little there, and what they lose when the server ends.
fn warn_of_shares(shares: &[Arc<Share>]) {
    let is_root = rustix::process::geteuid().is_root();
    for share in shares.iter().filter(|share| is_root && share.is_for_nobody()) {
        tracing::warn!(
            share = share.name(),
            "the directory belongs to root, so clients have the rights of nobody; name a user with users=squash:UID"
        );
    }
    for share in shares.iter().filter(|share| !share.can_list()) {
        tracing::warn!(
            share = share.name(),
            "the server cannot write to the directory: after each start programs wait 15 s for their first lock, and removed files that \
             are open are lost when the server ends; let the node's user write there"
        );
    }
}

/// Opens the HTTP front end for those who may connect now.
fn open_http(
    at: SocketAddr,
    report: &Arc<dyn Report>,
    allow: &Arc<RwLock<Vec<Cidr>>>,
) -> Result<HttpFrontend, StartError> {
    let allow = Arc::clone(allow);
    let admits =
        move |peer: SocketAddr| peer_allowed(Some(peer.ip()), &allow.read().unwrap_or_else(PoisonError::into_inner));
    HttpFrontend::open(at, Arc::clone(report), admits).map_err(|source| listen_error(at, source))
}

/// Opens the control socket; what it orders becomes events.
fn open_control(ctl: Endpoint, report: Arc<dyn Report>, events: Sender<Event>) -> Result<(), StartError> {
    let Some(listener) = ctl.socket else { return Ok(()) };
    let order = move |order| {
        // Nobody listens only when the node is ending, and then the asker is told so.
        let _ = events.send(Event::Order(order));
    };
    control::open(listener, report, order).map_err(StartError::Loop)
}

/// The arguments with which this program is the opener of a node with these: `serve ARGUMENTS`, or, of a node that a measurement
/// or the demonstration has started, `bench node ... -- ARGUMENTS`.
fn opener_arguments(of_node: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<_> = of_node.collect();
    let place = |word: &str| arguments.iter().position(|argument| argument == word);
    let command = match (place("serve"), place("bench"), place("--")) {
        (_, Some(bench), Some(end)) if bench < end => bench..end + 1,
        (Some(serve), ..) => serve..serve + 1,
        _ => return arguments,
    };
    arguments.splice(command, ["opener".into()]);
    arguments
}

/// What the main thread waits for.
enum Event {
    /// SIGTERM, SIGINT.
    End,
    /// SIGHUP.
    Hangup,
    /// From the control socket.
    Order(Order),
    /// A loop that was not told to.
    LoopEnded,
}

/// Signals become events; `ending` is set before that of an end is sent.
fn watch_signals(events: Sender<Event>, ending: Arc<AtomicBool>) -> Result<(), ServeError> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let mut signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(ServeError::Signals)?;
    let watch = move || {
        for signal in signals.forever() {
            // Whoever asks twice does not want to wait, whatever the node is at.
            if signal != SIGHUP && ending.swap(true, Ordering::Relaxed) {
                std::process::exit(1);
            }
            let event = if signal == SIGHUP { Event::Hangup } else { Event::End };
            // Nobody listens any more when the node is ending.
            let _ = events.send(event);
        }
    };
    std::thread::Builder::new().name("byway-signals".to_owned()).spawn(watch).map_err(ServeError::Signals)?;
    Ok(())
}

/// A node that serves, and what it was made from.
struct RunningNode<'a> {
    arguments: &'a ServeArguments,
    configuration: Configuration,
    /// Bytes that the node may have: the confined process cannot read that.
    memory: Option<u64>,
    files: Arc<PrivilegedOpener>,
    served: Vec<Served>,
    shares: Vec<Arc<Share>>,
    /// As they were opened at start.
    listeners: Vec<Guarded>,
    /// Shared with the node's front ends.
    tls: ServerTls,
    /// Shared with the HTTP front end.
    allow: Arc<RwLock<Vec<Cidr>>>,
    /// Shared with the node's loops.
    lending: Option<Arc<Lending>>,
    node: Node,
    /// The node is told to end: a reload waits no longer.
    ending: Arc<AtomicBool>,
}

impl RunningNode<'_> {
    fn status(&self) -> String {
        format!("serving {} volumes and {} shares", self.served.len(), self.shares.len())
    }

    /// Does as signals and the control socket say, until the node is to end; gives why.
    fn follow_orders(
        &mut self,
        supervisor: &Supervisor,
        happened: &Receiver<Event>,
    ) -> Result<Event, RecvTimeoutError> {
        let mut heap = Heap::default();
        loop {
            let asker = match happened.recv_timeout(HEAP_LOOK_INTERVAL) {
                Err(RecvTimeoutError::Timeout) => {
                    heap.give_back(HEAP_FREE_BYTES_MAX);
                    continue;
                }
                Ok(Event::Order(Order::Reopen(volume, asker))) => {
                    self.reopen(&volume, &asker);
                    continue;
                }
                Ok(Event::Order(Order::Reload(asker))) => Some(asker),
                Ok(Event::Hangup) => None,
                end => return end,
            };
            tell(supervisor.reloading());
            self.reload(asker);
            tell(supervisor.ready(&self.status()));
        }
    }

    /// Reads the configuration again, and tells the asker, or the log, what came of it.
    fn reload(&mut self, asker: Option<Asker>) {
        let outcome = self.try_reload();
        match &outcome {
            Ok(summary) => {
                let Summary { added, dropped, resized, changed, reopened, certificates: _, sessions_ended, pending } =
                    summary;
                tracing::info!(?added, ?dropped, ?resized, ?changed, ?reopened, sessions_ended, "reloaded");
                for what in pending {
                    tracing::warn!("reload not complete yet: {what}");
                }
            }
            Err(error) => tracing::error!(%error, "reload failed; the running configuration is unchanged"),
        }
        if let Some(asker) = asker {
            let _ = asker.send(outcome.map_err(|error| error.to_string()));
        }
    }

    /// Opens the files of a volume anew, and tells the asker and the log what came of it.
    fn reopen(&mut self, volume: &str, asker: &Asker) {
        let plan = reload::plan_reopening(&self.served, volume, &*self.files);
        let outcome = plan.map(|plan| {
            let allow = self.configuration.allow.clone();
            self.apply(plan, &allow)
        });
        match &outcome {
            Ok(_) => tracing::info!(volume, "reopened"),
            Err(error) => tracing::error!(volume, %error, "cannot reopen the volume"),
        }
        let _ = asker.send(outcome.map_err(|error| error.to_string()));
    }

    /// Has the loops serve what a plan says.
    fn apply(&mut self, mut plan: Plan, allow: &[Cidr]) -> Summary {
        let retired = Retired::between(&self.served, &plan.served);
        self.served = plan.served;
        let volumes: Vec<_> = self.served.iter().map(|served| Arc::clone(&served.volume)).collect();
        let started = Instant::now();
        let patience = Patience { deadline: started + APPLY_LIMIT, ending: Arc::clone(&self.ending) };
        let Replaced { silent, ended } = self.node.replace(&volumes, allow, &patience);
        plan.summary.sessions_ended = ended;
        plan.summary.pending = reload::pending(silent, &retired.wait(&patience), started.elapsed());
        plan.summary
    }

    fn try_reload(&mut self) -> Result<Summary, ReloadError> {
        let configuration = Configuration::load_by(self.arguments, &|file| self.files.read(file), self.memory)?;
        reload::check_fixed(&self.configuration, &configuration)?;
        if configuration.volumes.is_empty() && configuration.shares.is_empty() && configuration.lend.is_none() {
            return Err(ReloadError::Nothing);
        }
        // Those that are open: what the lists name now is not asked for again, and under socket activation never was.
        configuration.admit(&self.listeners)?;
        configuration.admitted_http()?;
        let tls = server_tls(configuration.tls.as_ref(), &|path| self.files.read(path))?;
        let shares = reload::plan_shares(&self.shares, &configuration.shares, &|path| self.files.read(path))?;
        warn_of_shares(&shares);
        let mut plan = reload::plan(&self.served, &configuration.volumes, &*self.files)?;
        reload::note_shares(&mut plan.summary, &self.shares, &shares);
        if let (Some(old), Some(new)) = (self.tls.server(), tls.server()) {
            old.replace(new);
        }
        self.allow.write().unwrap_or_else(PoisonError::into_inner).clone_from(&configuration.allow);
        // Before the volumes: their confirmation is for both.
        self.node.replace_shares(&shares);
        self.shares = shares;
        let mut summary = self.apply(plan, &configuration.allow);
        summary.certificates = configuration.tls.is_some();
        self.configuration = configuration;
        Ok(summary)
    }

    /// Ends the node. Lent memory comes first: that takes the longest, and all else is served meanwhile.
    fn end(
        self,
        why: Result<Event, RecvTimeoutError>,
        supervisor: &Supervisor,
        happened: &Receiver<Event>,
    ) -> Result<(), ServeError> {
        let mut has_failed = matches!(why, Ok(Event::LoopEnded));
        if let Some(lending) = self.lending {
            tell(supervisor.stopping("taking lent memory back"));
            // A reload that is asked for now is dropped: its asker learns that the node ends. Pages at loops that work are worth the wait.
            lend::take_back(&lending, |time| has_failed |= matches!(happened.recv_timeout(time), Ok(Event::LoopEnded)));
        }
        tell(supervisor.stopping("completing requests in flight"));
        tracing::info!("shutting down: completing requests in flight");
        if !self.node.stop(DRAIN_LIMIT) {
            let seconds = DRAIN_LIMIT.as_secs();
            tracing::warn!(seconds, "requests are still in flight after the limit; exiting anyway");
        }
        if has_failed { Err(ServeError::LoopEnded) } else { Ok(()) }
    }
}

/// Where a node listens.
struct Listeners {
    native: Vec<Guarded>,
    nbd: Vec<Guarded>,
    inherited: Vec<Endpoint>,
    /// Where those are.
    inherited_at: Vec<Guarded>,
}

impl Listeners {
    /// All of them, for reloads to judge again.
    fn guarded(&self) -> Vec<Guarded> {
        [&self.native[..], &self.nbd, &self.inherited_at].concat()
    }
}

fn listeners(configuration: &Configuration, inherited: Vec<OwnedFd>) -> Result<Listeners, ServeError> {
    if configuration.volumes.is_empty() && configuration.shares.is_empty() && configuration.lend.is_none() {
        return Err(ServeError::Nothing("nothing to serve: give --volume NAME=PATH, --share NAME=DIR or --lend SIZE"));
    }
    if configuration.volumes.is_empty() && configuration.listen.is_empty() {
        return Err(ServeError::Nothing(
            "shares are reached over byway's own protocol, and nothing listens for it: give --listen tcp://127.0.0.1",
        ));
    }
    // Passed sockets are all there is: the manager decides where this node listens.
    let here = inherited.is_empty();
    if !here && !(configuration.nbd.is_empty() && configuration.listen.is_empty()) {
        tracing::warn!(
            "the service manager passed sockets, so `listen` and `nbd` are ignored: the node serves NBD at those sockets alone; \
             for the listeners of the configuration, disable the socket unit"
        );
    }
    let nbd = if here { resolve(&configuration.nbd)? } else { Vec::new() };
    let native = if here { resolve(&configuration.listen)? } else { Vec::new() };
    let inherited_at: std::io::Result<Vec<_>> = inherited.iter().map(Guarded::inherited).collect();
    let inherited_at = inherited_at.map_err(ServeError::Manager)?;
    let at = inherited_at.iter().map(|guarded| guarded.address.clone());
    let endpoints = inherited.into_iter().zip(at).map(|(socket, address)| Endpoint { address, socket: Some(socket) });
    let listeners = Listeners { native, nbd, inherited: endpoints.collect(), inherited_at };
    let guarded = listeners.guarded();
    if guarded.is_empty() {
        return Err(ServeError::Nothing(
            "nowhere to listen: give --listen tcp://127.0.0.1 (byway's own protocol), --nbd tcp://127.0.0.1 or \
             --nbd unix:///PATH",
        ));
    }
    configuration.admit(&guarded)?;
    Ok(listeners)
}

/// Resolves and judges the listeners of a configuration, and says how many there are.
///
/// # Errors
/// As for starting with them.
pub(crate) fn judged_listeners(configuration: &Configuration, inherited: Vec<OwnedFd>) -> Result<usize, ServeError> {
    listeners(configuration, inherited).map(|listeners| listeners.guarded().len())
}

/// What a loop does that ends though it should not.
fn tells_of_the_end(events: Sender<Event>) -> Arc<dyn Fn() + Send + Sync> {
    Arc::new(move || {
        // Nobody listens only when the node is ending anyway.
        let _ = events.send(Event::LoopEnded);
    })
}

/// What the configuration says of a node that has no listeners yet.
fn node_options(configuration: &Configuration, served: &[Served], shares: &[Arc<Share>]) -> NodeOptions {
    NodeOptions {
        io: configuration.io,
        threads: configuration.event_loops(),
        frame_bytes: usize::try_from(configuration.frame_bytes).unwrap_or(usize::MAX),
        lending: None,
        volumes: served.iter().map(|served| Arc::clone(&served.volume)).collect(),
        shares: shares.to_vec(),
        native: Vec::new(),
        nbd: Vec::new(),
        nbd_options: NbdOptions::default(),
        tls: ServerTls::Off,
        allow: configuration.allow.clone(),
        slow_us: configuration.slow_us,
        boot: None,
        measuring: Measuring::default(),
        on_failure: Arc::new(|| ()),
    }
}

fn listen_error(at: SocketAddr, source: std::io::Error) -> StartError {
    StartError::Listen { address: Address::Tcp(at), source }
}

/// The lookup's own error says `entity not found`.
fn user_error(source: &std::io::Error) -> String {
    match source.kind() {
        std::io::ErrorKind::NotFound => "there is no such user".to_owned(),
        std::io::ErrorKind::InvalidInput => "a node that becomes root gives up nothing".to_owned(),
        _ => source.to_string(),
    }
}

fn group_error(source: &std::io::Error) -> String {
    match source.kind() {
        std::io::ErrorKind::NotFound => "there is no such group".to_owned(),
        _ => source.to_string(),
    }
}

fn found_user(name: &str) -> Result<User, ServeError> {
    find_user(name).map_err(|source| ServeError::User { name: name.to_owned(), source })
}

/// Confines this thread and those that it starts. All that a running node opens by its path is opened by the opener; only
/// libraries of RDMA open devices themselves.
fn confine_to(configuration: &Configuration) -> Result<(), ServeError> {
    // The node's own memory, for its metrics.
    let mut writable: Vec<_> = configuration.shares.iter().map(|share| share.directory.clone()).collect();
    let mut readable = vec!["/proc/self".into()];
    let devices = Path::new("/dev/infiniband");
    if configuration.listen.iter().any(|listener| matches!(listener, Listen::Rdma { .. })) {
        // A confined node can load no library. They load the devices' providers now, and open the devices when somebody connects.
        if let Err(error) = byway_fabric::rdma::Library::load().and_then(byway_fabric::rdma::Library::devices) {
            tracing::debug!(%error, "no RDMA devices");
        }
        if devices.exists() {
            writable.push(devices.to_owned());
            readable.push("/sys".into());
        }
    }
    let how = confine(&writable, &readable)?;
    tracing::info!(landlock = ?how, "confined by landlock; the opener process opens files");
    Ok(())
}

/// A service manager that does not listen is no reason to stop serving.
fn tell(told: std::io::Result<()>) {
    if let Err(error) = told {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}

/// One line for each front end, for scripts that wait for it.
fn announce(node: &Node, http: Option<SocketAddr>, ctl: Option<&Path>) {
    let mut out = std::io::stdout().lock();
    // Nobody need read it: a closed pipe is no reason to stop serving.
    for ready in node.ready() {
        let _ = writeln!(out, "ready {} {}", ready.frontend, ready.address);
    }
    if let Some(at) = http {
        let _ = writeln!(out, "ready http http://{at}");
    }
    if let Some(path) = ctl {
        let _ = writeln!(out, "ready ctl {}", path.display());
    }
    let _ = out.flush();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_opener_has_the_arguments_of_its_node() {
        let of = |words: &str| {
            let words = opener_arguments(words.split(' ').map(OsString::from));
            words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(of("--log error serve --volume a=mem:1M"), "--log error opener --volume a=mem:1M");
        assert_eq!(
            of("--log error bench node --end-with 7 -- --volume serve=mem:1M --nbd x"),
            "--log error opener --volume serve=mem:1M --nbd x"
        );
    }
}
