//! The control socket of a node, and `byway ctl`, its client: a line of JSON each way.
//!
//! The socket belongs to the user that started the node, and only that user may connect (mode 0600).

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use byway_frontend::http::{
    BorrowerSnapshot, FailureSnapshot, FrontendSnapshot, LendingSnapshot, NbdClientSnapshot, PeerSnapshot, Report,
    ShareSnapshot, VolumeSnapshot, flush_failed,
};
use byway_reactor::Address;
use byway_reactor::socket_file::SocketAccess;
use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};

use crate::far::status::{self, FarStatusError};
use crate::limits::{CONTROL_REQUEST_BYTES_MAX, CONTROL_THREADS};
use crate::listening::{self, Endpoint, SocketFiles};
use crate::mount;
use crate::node::StartError;
use crate::reload::Summary;

/// Where the control socket of a system service is.
pub const DEFAULT_SOCKET: &str = "/run/byway/ctl.sock";

/// How long a connection may take to say what it wants.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(5);
/// How long `byway ctl` waits: a reload opens files, perhaps on slow disks.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);

/// The arguments of `byway ctl`.
#[derive(Args, Debug)]
pub struct ControlArguments {
    /// The node's control socket, as given to `byway serve --control-socket`
    #[arg(long, value_name = "PATH", default_value = DEFAULT_SOCKET, global = true)]
    pub control_socket: PathBuf,
    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,
    /// What to ask for.
    #[command(subcommand)]
    pub command: ControlCommand,
}

/// What a node can be asked for.
#[derive(Clone, Debug, Subcommand)]
pub enum ControlCommand {
    /// Read the configuration again: volumes are added, dropped and resized, certificates and --allow replaced; all of
    /// it or nothing
    Reload,
    /// Open the files of one volume anew, after a flush failed and the disk was checked: flushes work again. Connections to
    /// the volume end, and clients connect again
    Reopen {
        /// The volume's name
        volume: String,
    },
    /// Say where the pages of a job of `byway far` are: here, and at which lender; how many faults it has, and how long they take
    Far {
        /// Process number of byway far, or of one of its programs
        #[arg(value_name = "PID")]
        process: u32,
    },
    /// Say how a mount of yours is: its calls, how long they take, errors, bytes, messages, leases and reconnects
    Mount {
        /// Where it is mounted
        directory: PathBuf,
    },
    /// Print the metrics of all your mounts on this machine as Prometheus text; those of a node are at its --http address
    Metrics,
    /// Say what is served, to how many clients, and how the busiest of them fare
    ///
    /// Rates are of about the last second, in bytes on the wire. Under byway's own protocol, `stalled` says how often and how long
    /// something of the peer's open sessions waited: a request for buffers of the node, a call for credit, or bytes at least
    /// 1 ms for the peer to take them. A peer that stalls much while it takes little is slow, or its network is.
    Status,
}

/// A request, as it travels.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Request {
    Reload,
    Reopen { volume: String },
    Status,
}

/// An answer, as it travels.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Reloaded(Summary),
    Status(Status),
    Failed(String),
}

/// How a node is.
#[derive(Debug, Serialize, Deserialize)]
pub struct Status {
    /// Why it does not serve; `None`: it does.
    pub not_ready: Option<String>,
    /// Seconds since it started.
    pub uptime_seconds: u64,
    /// Its front ends: NBD, and byway's own protocol.
    pub frontends: Vec<FrontendSnapshot>,
    /// Its volumes.
    pub volumes: Vec<VolumeSnapshot>,
    /// Its shares.
    #[serde(default)]
    pub shares: Vec<ShareSnapshot>,
    /// Memory that is lent.
    #[serde(default)]
    pub lending: Option<LendingSnapshot>,
    /// The busiest NBD clients.
    #[serde(default)]
    pub nbd_clients: Vec<NbdClientSnapshot>,
    /// The busiest peers of byway's own protocol.
    #[serde(default)]
    pub peers: Vec<PeerSnapshot>,
}

/// Waits for what comes of an order.
pub type Asker = Sender<Result<Summary, String>>;

/// What the node is to do.
pub enum Order {
    /// Read the configuration again.
    Reload(Asker),
    /// Open the files of the volume of that name anew.
    Reopen(String, Asker),
}

/// Binds the socket; only the user that the node starts as may connect. Its file goes to `files`.
///
/// # Errors
/// [`StartError::Listen`].
pub fn bind(path: &Path, files: &mut SocketFiles) -> Result<Endpoint, StartError> {
    let access = SocketAccess { mode: Some(0o600), group: None };
    listening::open(&Address::Unix(path.to_owned()), access, files)
}

/// Answers on threads of its own until the process ends. Orders are handed to `order`.
///
/// # Errors
/// The kernel's.
pub fn open(
    listener: OwnedFd,
    report: Arc<dyn Report>,
    order: impl Fn(Order) + Send + Sync + 'static,
) -> std::io::Result<()> {
    let listener = UnixListener::from(listener);
    listener.set_nonblocking(false)?;
    let (listener, order) = (Arc::new(listener), Arc::new(order));
    // Each takes the next connection: a client that says nothing, or waits for a reload, holds up no other.
    for _ in 0..CONTROL_THREADS {
        let (listener, report, order) = (Arc::clone(&listener), Arc::clone(&report), Arc::clone(&order));
        let serve = move || {
            for stream in listener.incoming() {
                let served = stream.and_then(|stream| serve_one(&stream, &*report, &*order));
                if let Err(error) = served {
                    tracing::warn!(%error, "cannot answer a request on the control socket");
                    // Out of descriptors, perhaps: not again and again.
                    let _ = rustix::thread::nanosleep(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 100_000_000 });
                }
            }
        };
        std::thread::Builder::new().name("byway-ctl".to_owned()).spawn(serve)?;
    }
    Ok(())
}

fn serve_one(stream: &UnixStream, report: &dyn Report, order: &impl Fn(Order)) -> std::io::Result<()> {
    stream.set_read_timeout(Some(REQUEST_TIME_MAX))?;
    stream.set_write_timeout(Some(REQUEST_TIME_MAX))?;
    let mut line = String::new();
    BufReader::new(stream.take(CONTROL_REQUEST_BYTES_MAX)).read_line(&mut line)?;
    let answer = match serde_json::from_str(&line) {
        Err(error) => Answer::Failed(format!("no request of this version of byway: {error}")),
        Ok(Request::Status) => {
            let now = report.snapshot();
            Answer::Status(Status {
                not_ready: now.not_ready,
                uptime_seconds: now.uptime_seconds,
                frontends: now.frontends,
                volumes: now.volumes,
                shares: now.shares,
                lending: now.lending,
                nbd_clients: now.nbd_clients,
                peers: now.peers,
            })
        }
        Ok(Request::Reload) => ordered(|asker| order(Order::Reload(asker))),
        Ok(Request::Reopen { volume }) => ordered(|asker| order(Order::Reopen(volume, asker))),
    };
    let mut bytes = serde_json::to_vec(&answer)?;
    bytes.push(b'\n');
    let mut stream = stream;
    stream.write_all(&bytes)
}

/// Waits for what comes of an order.
fn ordered(give: impl FnOnce(Asker)) -> Answer {
    let (asker, outcome) = channel();
    give(asker);
    match outcome.recv() {
        Ok(Ok(summary)) => Answer::Reloaded(summary),
        Ok(Err(reason)) => Answer::Failed(reason),
        Err(_) => Answer::Failed("the node is shutting down".to_owned()),
    }
}

/// Why `byway ctl` could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No answer.
    #[error("{}: {source}; is the node running, with --control-socket and this path, and are you its owner?", path.display())]
    Connect {
        /// Where.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// It took the request and has not answered yet.
    #[error("the node has not answered within {} s; it may still complete the request, see `byway ctl status`", .0.as_secs())]
    Silent(Duration),
    /// It took the request, and closed the connection.
    #[error("the node ended before it answered; its log says why, and whether it completed the request")]
    Ended,
    /// The node answers something else.
    #[error("cannot parse the node's answer ({0}); is it the same version of byway?")]
    Answer(#[from] serde_json::Error),
    /// The node says no.
    #[error("{0}")]
    Refused(String),
    /// A mount.
    #[error(transparent)]
    Mount(#[from] Box<mount::CommandError>),
    /// A job of far memory.
    #[error(transparent)]
    Far(#[from] FarStatusError),
    /// Standard output is gone.
    #[error("cannot print: {0}")]
    Print(std::io::Error),
}

/// Runs `byway ctl`.
///
/// # Errors
/// See [`ControlError`].
pub fn run(arguments: &ControlArguments) -> Result<ExitCode, ControlError> {
    let mut out = crate::output::stdout();
    let request = match &arguments.command {
        ControlCommand::Reload => Request::Reload,
        ControlCommand::Reopen { volume } => Request::Reopen { volume: volume.clone() },
        ControlCommand::Status => Request::Status,
        ControlCommand::Mount { directory } => {
            let status = mount::status_of(directory).map_err(Box::new)?;
            let printed = if arguments.json {
                writeln!(out, "{}", serde_json::to_string(&status)?)
            } else {
                mount::print_status(&mut out, &status)
            };
            printed.map_err(ControlError::Print)?;
            return Ok(ExitCode::SUCCESS);
        }
        ControlCommand::Metrics => {
            let text = mount::metrics_of_all().map_err(Box::new)?;
            out.write_all(text.as_bytes()).map_err(ControlError::Print)?;
            return Ok(ExitCode::SUCCESS);
        }
        ControlCommand::Far { process } => {
            let status = status::of_process(*process)?;
            let printed = if arguments.json {
                writeln!(out, "{}", serde_json::to_string(&status)?)
            } else {
                status::print(&mut out, &status)
            };
            printed.map_err(ControlError::Print)?;
            return Ok(ExitCode::SUCCESS);
        }
    };
    let answer = ask(&arguments.control_socket, &request, ANSWER_TIME_MAX)?;
    let printed = match answer {
        Answer::Failed(reason) => return Err(ControlError::Refused(reason)),
        Answer::Reloaded(summary) if arguments.json => writeln!(out, "{}", serde_json::to_string(&summary)?),
        Answer::Status(status) if arguments.json => writeln!(out, "{}", serde_json::to_string(&status)?),
        Answer::Reloaded(summary) => print_summary(&mut out, &summary),
        Answer::Status(status) => print_status(&mut out, &status),
    };
    printed.map_err(ControlError::Print)?;
    Ok(ExitCode::SUCCESS)
}

fn ask(path: &Path, request: &Request, time_max: Duration) -> Result<Answer, ControlError> {
    let failed = |source| ControlError::Connect { path: path.to_owned(), source };
    let mut stream = UnixStream::connect(path).map_err(failed)?;
    stream.set_read_timeout(Some(time_max)).map_err(failed)?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line).map_err(failed)?;
    let mut answer = String::new();
    let read = BufReader::new(stream).read_line(&mut answer);
    read.map_err(|error| match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => ControlError::Silent(time_max),
        ErrorKind::ConnectionReset => ControlError::Ended,
        _ => failed(error),
    })?;
    if !answer.ends_with('\n') {
        return Err(ControlError::Ended);
    }
    Ok(serde_json::from_str(&answer)?)
}

fn print_summary(out: &mut impl Write, summary: &Summary) -> std::io::Result<()> {
    let parts = [
        ("added", &summary.added),
        ("dropped", &summary.dropped),
        ("resized", &summary.resized),
        ("changed", &summary.changed),
        ("reopened", &summary.reopened),
    ];
    if parts.iter().all(|(_, names)| names.is_empty()) {
        writeln!(out, "no volume changed")?;
    }
    if summary.certificates {
        writeln!(out, "read again: certificates and revocation lists")?;
    }
    if summary.sessions_ended > 0 {
        writeln!(out, "sessions ended by a revoked certificate or lost access: {}", summary.sessions_ended)?;
    }
    for (what, names) in parts.into_iter().filter(|(_, names)| !names.is_empty()) {
        writeln!(out, "{what}: {}", names.join(", "))?;
    }
    summary.pending.iter().try_for_each(|what| writeln!(out, "pending: {what}"))
}

fn print_status(out: &mut impl Write, status: &Status) -> std::io::Result<()> {
    let state = status.not_ready.as_deref().unwrap_or("serving");
    writeln!(out, "{state}, for {} s", status.uptime_seconds)?;
    for frontend in &status.frontends {
        let FrontendSnapshot { name, connections, accepted, refused, connection_errors } = frontend;
        writeln!(
            out,
            "frontend {name}: {connections} connections; {accepted} so far, {refused} refused, {connection_errors} ended by an error"
        )?;
    }
    for volume in &status.volumes {
        print_volume(out, volume)?;
    }
    status.shares.iter().try_for_each(|share| print_share(out, share))?;
    if let Some(lending) = &status.lending {
        print_lending(out, lending)?;
    }
    status.nbd_clients.iter().try_for_each(|client| print_nbd_client(out, client))?;
    status.peers.iter().try_for_each(|peer| print_peer(out, peer))
}

fn print_lending(out: &mut impl Write, lending: &LendingSnapshot) -> std::io::Result<()> {
    let LendingSnapshot {
        limit_bytes,
        lent_bytes,
        filled_bytes,
        borrowers,
        refused,
        taken_back_bytes,
        expired_bytes,
        largest,
    } = lending;
    writeln!(
        out,
        "memory: {lent_bytes} of {limit_bytes} bytes lent, to {borrowers} borrowers; {filled_bytes} bytes filled; {refused} leases refused, \
         {taken_back_bytes} bytes taken back, {expired_bytes} bytes not renewed"
    )?;
    largest.iter().try_for_each(|borrower| {
        let BorrowerSnapshot { name, lent_bytes, filled_bytes, taken_back_bytes } = borrower;
        writeln!(
            out,
            "memory: borrower {name}: {lent_bytes} bytes lent, {filled_bytes} bytes filled, {taken_back_bytes} bytes taken back"
        )
    })
}

fn print_volume(out: &mut impl Write, volume: &VolumeSnapshot) -> std::io::Result<()> {
    let VolumeSnapshot { name, bytes, reads, writes, flushes, errors, rejected, in_flight, .. } = volume;
    writeln!(
        out,
        "volume {name}: {bytes} bytes; {reads} reads, {writes} writes, {flushes} flushes, {errors} store errors, \
         {rejected} bad requests, {in_flight} in flight"
    )?;
    if volume.flush_failed {
        writeln!(out, "volume {name}: {}", flush_failed(name))?;
    }
    if let Some(failure) = &volume.last_failure {
        let FailureSnapshot { operation, offset, len, error, seconds_ago } = failure;
        writeln!(
            out,
            "volume {name}: last store error {seconds_ago} s ago: {operation} of {len} bytes at {offset}: {error}"
        )?;
    }
    Ok(())
}

fn print_share(out: &mut impl Write, share: &ShareSnapshot) -> std::io::Result<()> {
    let ShareSnapshot {
        name,
        clients,
        reads,
        writes,
        syncs,
        changes,
        queries,
        read_bytes,
        written_bytes,
        store_errors,
    } = share;
    writeln!(
        out,
        "share {name}: {clients} clients; {reads} reads of {read_bytes} bytes, {writes} writes of {written_bytes} bytes, {syncs} syncs, \
         {changes} other changes, {queries} queries, {store_errors} store errors"
    )
}

/// Bytes a second.
fn rate(bytes_per_second: u64) -> String {
    format!("{:.1} MB/s", bytes_per_second as f64 / 1e6)
}

fn print_nbd_client(out: &mut impl Write, client: &NbdClientSnapshot) -> std::io::Result<()> {
    writeln!(
        out,
        "nbd client {} on {}: sends {}, takes {}; {} requests in flight",
        client.peer,
        client.volume,
        rate(client.receive_bytes_per_second),
        rate(client.send_bytes_per_second),
        client.in_flight
    )
}

fn print_peer(out: &mut impl Write, peer: &PeerSnapshot) -> std::io::Result<()> {
    write!(
        out,
        "byway client {}: {} sessions; sends {}, takes {}; send delay {} us; {} buffer waits of {} us; \
         stalled {} times, {} ms in all",
        peer.peer,
        peer.sessions,
        rate(peer.receive_bytes_per_second),
        rate(peer.send_bytes_per_second),
        peer.send_delay_us,
        peer.frame_waits,
        peer.frame_wait_us,
        peer.stalls,
        peer.stalled_us / 1000,
    )?;
    match (peer.round_trip_us, peer.retransmits) {
        (Some(round_trip), Some(again)) => writeln!(out, "; round trip {round_trip} us, {again} segments sent again"),
        _ => writeln!(out),
    }
}

#[cfg(test)]
mod tests {
    use byway_frontend::http::Snapshot;

    use super::*;

    struct Node;

    impl Report for Node {
        fn snapshot(&self) -> Snapshot {
            Snapshot { uptime_seconds: 7, ..Snapshot::default() }
        }
    }

    #[test]
    fn a_reload_that_reads_certificates_again_says_so() {
        let said = |certificates| {
            let mut out = Vec::new();
            print_summary(&mut out, &Summary { certificates, ..Summary::default() }).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(said(false), "no volume changed\n");
        assert!(said(true).contains("read again: certificates"), "{}", said(true));
    }

    #[test]
    fn clients_that_say_nothing_and_reloads_that_take_long_hold_up_no_status() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ctl");
        let (asked, reloads) = channel();
        let listener = OwnedFd::from(UnixListener::bind(&path).unwrap());
        open(listener, Arc::new(Node), move |order| {
            if let Order::Reload(asker) = order {
                asked.send(asker).unwrap();
            }
        })
        .unwrap();
        let silent: Vec<_> = (0..CONTROL_THREADS - 2).map(|_| UnixStream::connect(&path).unwrap()).collect();
        let waits = std::thread::spawn({
            let path = path.clone();
            move || ask(&path, &Request::Reload, ANSWER_TIME_MAX)
        });
        let reload = reloads.recv().unwrap();
        assert!(
            matches!(ask(&path, &Request::Status, ANSWER_TIME_MAX), Ok(Answer::Status(status)) if status.uptime_seconds == 7)
        );
        // Nobody was dropped for it.
        let mut first = &silent[0];
        first.write_all(b"\"status\"\n").unwrap();
        let mut answer = String::new();
        BufReader::new(first).read_line(&mut answer).unwrap();
        assert!(answer.contains("\"uptime_seconds\":7"), "{answer}");
        reload.send(Err("no".to_owned())).unwrap();
        assert!(matches!(waits.join().unwrap(), Ok(Answer::Failed(reason)) if reason == "no"));
    }

    #[test]
    fn a_node_that_does_not_answer_is_not_said_to_be_away() {
        let folder = tempfile::tempdir().unwrap();
        let listen = |name: &str| {
            let path = folder.path().join(name);
            (UnixListener::bind(&path).unwrap(), path)
        };
        let said = |path: &Path, time_max| ask(path, &Request::Reload, time_max).unwrap_err().to_string();
        let (_busy, path) = listen("busy");
        let silent = said(&path, Duration::from_millis(1));
        assert!(silent.contains("has not answered within") && silent.contains("byway ctl status"), "{silent}");
        for (name, begun) in [("nothing", ""), ("half", "{\"reloaded\"")] {
            let (listener, path) = listen(name);
            let ends = std::thread::spawn(move || {
                let mut stream = listener.accept().unwrap().0;
                BufReader::new(&stream).read_line(&mut String::new()).unwrap();
                stream.write_all(begun.as_bytes()).unwrap();
            });
            let ended = said(&path, ANSWER_TIME_MAX);
            assert!(ended.contains("ended before it answered"), "{ended}");
            ends.join().unwrap();
        }
    }
}
