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
use std::rc::Rc;
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

/// An endpoint of a running server, which ends when the last of its endpoints is dropped.
pub struct Server {
    pub kind: Kind,
    pub endpoint: Endpoint,
    process: Rc<Background>,
}

impl Server {
    /// Starts servers of `file` and waits until every endpoint accepts connections: one process for all endpoints of byway,
    /// which locks a file that it serves writable, and one for each endpoint of the others.
    pub fn start(kind: Kind, program: &Path, file: &Path, folder: &Path, endpoints: &[Endpoint]) -> Result<Vec<Self>> {
        let at_once = if kind == Kind::Byway { endpoints.len() } else { 1 };
        let mut servers = Vec::new();
        for endpoints in endpoints.chunks(at_once) {
            servers.extend(Self::start_one(kind, program, file, folder, endpoints)?);
        }
        Ok(servers)
    }

    fn start_one(kind: Kind, program: &Path, file: &Path, folder: &Path, endpoints: &[Endpoint]) -> Result<Vec<Self>> {
        let [endpoint, ..] = endpoints else { bail!("{kind} is to be reached nowhere") };
        let mut command = Command::new(program);
        match kind {
            Kind::Byway => byway(&mut command, file, endpoints),
            Kind::Nbdkit => nbdkit(&mut command, file, endpoint),
            Kind::QemuNbd => qemu_nbd(&mut command, file, endpoint),
            Kind::NbdServer => command = nbd_server(program, file, folder, endpoint)?,
            Kind::Stub => stub(&mut command, None, endpoint),
            Kind::StubMemory => stub(&mut command, Some(file), endpoint),
        }
        let log = folder.join(format!("{kind}-{}.log", endpoint.transport()));
        let mut process = Background::start(&mut command, &log)?;
        process::wait_for(&format!("{kind} to accept connections"), START_LIMIT, || {
            if process.has_ended()? {
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                bail!("{kind} ended at once: {}", said.trim());
            }
            Ok(endpoints.iter().all(Endpoint::accepts).then_some(()))
        })
        .with_context(|| format!("the server's log: {}", std::fs::read_to_string(&log).unwrap_or_default()))?;
        let process = Rc::new(process);
        let server = |endpoint: &Endpoint| Self { kind, endpoint: endpoint.clone(), process: Rc::clone(&process) };
        Ok(endpoints.iter().map(server).collect())
    }

    /// The process that was started; some servers have children.
    pub fn id(&self) -> u32 {
        self.process.id()
    }
}

fn byway(command: &mut Command, file: &Path, endpoints: &[Endpoint]) {
    command.args(["serve", "--volume"]).arg(format!("{EXPORT}={}", file.display()));
    for endpoint in endpoints {
        command.arg("--nbd").arg(match endpoint {
            Endpoint::Unix(path) => format!("unix://{}", path.display()),
            Endpoint::Tcp(port) => format!("tcp://127.0.0.1:{port}"),
        });
    }
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

#[cfg(test)]
mod tests {
    use byway_skip::{SkipReason, skip_this};

    use super::*;

    /// What a whole test run has built, beside this test's own folder.
    fn built_byway() -> Option<PathBuf> {
        let test = std::env::current_exe().ok()?;
        test.ancestors().nth(2).map(|folder| folder.join("byway")).filter(|program| program.is_file())
    }

    #[test]
    fn byway_serves_the_file_that_the_others_serve_at_both_endpoints() {
        let Some(program) = built_byway() else {
            return skip_this(SkipReason::Machine("no byway is built beside this test"));
        };
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("volume.img");
        std::fs::write(&file, [7; 1 << 20]).unwrap();
        let port = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
        let endpoints = [Endpoint::Unix(folder.path().join("nbd")), Endpoint::Tcp(port)];
        let servers = Server::start(Kind::Byway, &program, &file, folder.path(), &endpoints).unwrap();
        let transports: Vec<Transport> = servers.iter().map(|server| server.endpoint.transport()).collect();
        assert_eq!(transports, [Transport::Unix, Transport::Tcp]);
        assert_eq!(servers[0].id(), servers[1].id());
    }
}
