//! The servers, each started the way its manual recommends for one raw file.

use super::cases::Transport;
use crate::process::{self, Background};
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use serde::Serialize;
use std::fmt;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The export's name at every server.
const EXPORT: &str = "volume";
/// How long a server may take until it accepts connections.
const START_LIMIT: Duration = Duration::from_secs(10);

/// Whose server it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    Byway,
    Nbdkit,
    QemuNbd,
    NbdServer,
    /// Our own, which only answers: the client's ceiling.
    Stub,
    /// The same, with the file's bytes out of its memory.
    StubMemory,
}

impl fmt::Display for Kind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Byway => "byway",
            Self::Nbdkit => "nbdkit",
            Self::QemuNbd => "qemu-nbd",
            Self::NbdServer => "nbd-server",
            Self::Stub => "stub",
            Self::StubMemory => "stub-memory",
        })
    }
}

impl Kind {
    /// The program, where it is there.
    pub fn find(self, byway: &Path) -> Option<PathBuf> {
        match self {
            Self::Byway => byway.is_file().then(|| byway.to_path_buf()),
            Self::Stub | Self::StubMemory => std::env::current_exe().ok(),
            other => process::find_program(&other.to_string()),
        }
    }

    /// A port of its own; the namespace has no other listeners.
    pub fn port(self) -> u16 {
        10809 + self as u16
    }
}

/// Where a server listens.
#[derive(Clone, Debug)]
pub enum Endpoint {
    Unix(PathBuf),
    Tcp(u16),
}

impl Endpoint {
    pub fn transport(&self) -> Transport {
        match self {
            Self::Unix(_) => Transport::Unix,
            Self::Tcp(_) => Transport::Tcp,
        }
    }

    /// For a client.
    pub fn uri(&self) -> String {
        match self {
            Self::Unix(path) => format!("nbd+unix:///{EXPORT}?socket={}", path.display()),
            Self::Tcp(port) => format!("nbd://127.0.0.1:{port}/{EXPORT}"),
        }
    }

    fn accepts(&self) -> bool {
        match self {
            Self::Unix(path) => UnixStream::connect(path).is_ok(),
            Self::Tcp(port) => TcpStream::connect(("127.0.0.1", *port)).is_ok(),
        }
    }
}

/// A running server, ended when dropped.
pub struct Server {
    pub kind: Kind,
    pub endpoint: Endpoint,
    process: Background,
}

impl Server {
    /// Starts one that serves `file` and waits until it accepts connections.
    pub fn start(kind: Kind, program: &Path, file: &Path, folder: &Path, endpoint: Endpoint) -> Result<Self> {
        let mut command = Command::new(program);
        match kind {
            Kind::Byway => byway(&mut command, file, &endpoint),
            Kind::Nbdkit => nbdkit(&mut command, file, &endpoint),
            Kind::QemuNbd => qemu_nbd(&mut command, file, &endpoint),
            Kind::NbdServer => command = nbd_server(program, file, folder, &endpoint)?,
            Kind::Stub => stub(&mut command, None, &endpoint),
            Kind::StubMemory => stub(&mut command, Some(file), &endpoint),
        }
        let log = folder.join(format!("{kind}-{}.log", endpoint.transport()));
        let mut process = Background::start(&mut command, &log)?;
        process::wait_for(&format!("{kind} to accept connections"), START_LIMIT, || {
            if process.has_ended()? {
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                bail!("{kind} ended at once: {}", said.trim());
            }
            Ok(endpoint.accepts().then_some(()))
        })
        .with_context(|| format!("the server's log: {}", std::fs::read_to_string(&log).unwrap_or_default()))?;
        Ok(Self { kind, endpoint, process })
    }

    /// The process that was started; some servers have children.
    pub fn id(&self) -> u32 {
        self.process.id()
    }
}

fn byway(command: &mut Command, file: &Path, endpoint: &Endpoint) {
    command.args(["serve", "--volume"]).arg(format!("{EXPORT}={},shared", file.display())).arg("--nbd");
    match endpoint {
        Endpoint::Unix(path) => command.arg(format!("unix://{}", path.display())),
        Endpoint::Tcp(port) => command.arg(format!("tcp://127.0.0.1:{port}")),
    };
}

fn stub(command: &mut Command, file: Option<&Path>, endpoint: &Endpoint) {
    command.args(["peers", "stub"]);
    if let Some(file) = file {
        command.arg("--file").arg(file);
    }
    match endpoint {
        Endpoint::Unix(path) => command.arg("--unix").arg(path),
        Endpoint::Tcp(port) => command.args(["--port", &port.to_string()]),
    };
}

fn nbdkit(command: &mut Command, file: &Path, endpoint: &Endpoint) {
    command.arg("--foreground");
    match endpoint {
        Endpoint::Unix(path) => command.arg("--unix").arg(path),
        Endpoint::Tcp(port) => command.args(["--ipaddr", "127.0.0.1", "--port", &port.to_string()]),
    };
    command.arg("file").arg(file);
}

fn qemu_nbd(command: &mut Command, file: &Path, endpoint: &Endpoint) {
    command.args(["--persistent", "--shared=16", "--format=raw", "--cache=writeback", "--export-name", EXPORT]);
    match endpoint {
        Endpoint::Unix(path) => command.arg("--socket").arg(path),
        Endpoint::Tcp(port) => command.args(["--bind=127.0.0.1", "--port", &port.to_string()]),
    };
    command.arg(file);
}

/// It always becomes a daemon, so it gets a PID namespace of its own that ends with its first process.
fn nbd_server(program: &Path, file: &Path, folder: &Path, endpoint: &Endpoint) -> Result<Command> {
    // It always listens on a port too, so the one for the unix socket gets a port nobody uses.
    let (port, socket) = match endpoint {
        Endpoint::Tcp(port) => (*port, String::new()),
        Endpoint::Unix(path) => (Kind::NbdServer.port() + 100, format!("unixsock = {}\n", path.display())),
    };
    let configuration = folder.join(format!("nbd-server-{}.conf", endpoint.transport()));
    let text = format!(
        "[generic]\nlistenaddr = 127.0.0.1\nport = {port}\n{socket}[{EXPORT}]\nexportname = {}\n\
         flush = true\nfua = true\n",
        file.display()
    );
    std::fs::write(&configuration, text)?;
    let mut command = Command::new("unshare");
    command.args([
        "--fork",
        "--pid",
        "--kill-child",
        "--",
        "sh",
        "-c",
        "\"$0\" -C \"$1\" -p '' && exec sleep infinity",
    ]);
    command.arg(program).arg(configuration);
    Ok(command)
}
