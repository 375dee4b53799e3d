//! The last step of a demonstration: a node that is killed during a copy from it, and restarted. The copy's volume
//! reconnects by itself and repeats unanswered requests.

use std::io::{BufRead, BufReader, ErrorKind};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use byway_reactor::{Instant, IoChoice, Reactor};
use byway_service::block::spec::VolumeSpec;
use serde::Serialize;

use super::rounds::as_hex;
use super::sink::Sink;
use super::{DemoError, FRAME_BYTES, open_remote};
use crate::copy::{CopyOptions, Progress, copy};
use crate::remote::{self, RemoteError, RemoteUri};
use crate::spec;

/// What an error calls this step.
const PATH: &str = "a copy from a node that is killed";
/// Pieces in flight and their size: little is in flight, so that also of a small file much has not been asked for when the node
/// is killed.
const OPTIONS: CopyOptions = CopyOptions { depth: 4, chunk_bytes: 64 << 10, verify: false };

/// How the copy went on.
#[derive(Debug, Serialize)]
pub(super) struct Restart {
    /// From the kill to the new session; `None` if the copy needed no more of the node by then.
    interrupted_seconds: Option<f64>,
    #[serde(serialize_with = "as_hex")]
    crc32c: u32,
}

impl Restart {
    /// For people.
    pub(super) fn sentence(&self) -> String {
        let killed =
            "A second node was killed (SIGKILL) in the middle of a copy over byway's own protocol, and started again:";
        match self.interrupted_seconds {
            Some(seconds) => format!(
                "{killed}\nthe copy went on by itself after {:.0} ms, and its checksum is the same.",
                seconds * 1e3
            ),
            None => format!("{killed}\nthe copy had all that it needed before, and its checksum is the same."),
        }
    }
}

/// Copies `spec`, of which `wanted` are the bytes that a copy moves and their checksum, out of a node of its own in `folder`.
pub(super) fn show(
    spec: &VolumeSpec,
    folder: &Path,
    io: IoChoice,
    bytes: u64,
    wanted: u32,
) -> Result<Restart, DemoError> {
    let mut node = ChildNode::new(["--volume", &spec::format(spec)], folder.join("killed"), io);
    node.start().and_then(|()| node.wait_until_ready()).map_err(DemoError::Child)?;
    let mut reactor = Reactor::open(io, FRAME_BYTES).map_err(RemoteError::Loop)?;
    let uri: RemoteUri = node.uri().parse().map_err(RemoteError::Name)?;
    let mut source = open_remote(&mut reactor, &uri)?;
    let mut sink = Sink::new(source.info().bytes);
    let mut steps = Steps { kill_at: bytes / 2, node, killed_at: None, lost: false, interrupted: None, failure: None };
    let copied = copy(&mut reactor, &mut source, &mut sink, OPTIONS, None, &mut |progress| steps.tell(progress));
    if let Some(failure) = steps.failure {
        return Err(DemoError::Child(failure));
    }
    let found = copied.map_err(|source| DemoError::Copy { path: PATH, source })?.crc32c;
    remote::close(&mut reactor, &mut [source.remote()]);
    if found != wanted {
        return Err(DemoError::Differs { path: PATH, found, wanted });
    }
    Ok(Restart { interrupted_seconds: steps.interrupted.map(|time| time.as_secs_f64()), crc32c: found })
}

/// What is done to the node as the copy goes on.
struct Steps {
    node: ChildNode,
    kill_at: u64,
    killed_at: Option<Instant>,
    /// The copy has noticed.
    lost: bool,
    interrupted: Option<Duration>,
    failure: Option<std::io::Error>,
}

impl Steps {
    fn tell(&mut self, progress: Progress) -> ControlFlow<()> {
        let Some(killed_at) = self.killed_at else {
            if progress.done_bytes >= self.kill_at {
                self.killed_at = Some(progress.now);
                self.node.kill();
                self.failure = self.node.start().err();
            }
            return self.go_on();
        };
        match progress.lost_at {
            Some(_) => {
                self.lost = true;
                if self.node.has_ended() {
                    self.failure = Some(ErrorKind::BrokenPipe.into());
                }
            }
            None if self.lost && self.interrupted.is_none() => {
                self.interrupted = Some(progress.now.since(killed_at));
            }
            None => {}
        }
        self.go_on()
    }

    fn go_on(&self) -> ControlFlow<()> {
        if self.failure.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

/// `byway serve` of this binary, at a unix socket. It ends when this is dropped, and when this process ends.
pub(super) struct ChildNode {
    /// What it serves.
    flags: [String; 2],
    socket: PathBuf,
    io: IoChoice,
    child: Option<Child>,
}

impl ChildNode {
    pub(super) fn new(flags: [&str; 2], socket: PathBuf, io: IoChoice) -> Self {
        Self { flags: flags.map(str::to_owned), socket, io, child: None }
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    fn uri(&self) -> String {
        format!("byway+unix:///demo?socket={}", self.socket.display())
    }

    pub(super) fn start(&mut self) -> std::io::Result<()> {
        let io = match self.io {
            IoChoice::Auto => "auto",
            IoChoice::Uring => "uring",
            IoChoice::Epoll => "epoll",
        };
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--log", "error", "bench", "node", "--end-with", &std::process::id().to_string()]);
        command.args(["--", "--threads", "1", "--io", io]).args(&self.flags);
        command.arg("--listen").arg(format!("unix://{}", self.socket.display()));
        self.child = Some(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?);
        Ok(())
    }

    pub(super) fn wait_until_ready(&mut self) -> std::io::Result<()> {
        let out = self.child.as_mut().and_then(|child| child.stdout.as_mut()).map(BufReader::new);
        match out.into_iter().flat_map(BufRead::lines).next() {
            Some(line) => line.map(drop),
            None => Err(ErrorKind::UnexpectedEof.into()),
        }
    }

    fn has_ended(&mut self) -> bool {
        self.child.as_mut().is_none_or(|child| child.try_wait().is_ok_and(|status| status.is_some()))
    }

    /// With SIGKILL; returns when it has ended.
    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for ChildNode {
    fn drop(&mut self) {
        self.kill();
    }
}
