//! A node that a test operates: its configuration, control socket and HTTP front end.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::server::{LIBNBD_PRELUDE, LIMIT, Server, binary, run};

/// A node with a configuration file, a control socket, and NBD on a unix socket.
pub struct Rig {
    /// Where its files are.
    pub folder: tempfile::TempDir,
    /// The node.
    pub server: Server,
}

impl Rig {
    /// Starts it with these volumes, as in the configuration's list, and more flags, in which `DIR` is the folder.
    ///
    /// # Panics
    /// If it does not get ready.
    pub fn new(volumes: &str, more: &[&str]) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        // Whoever the node becomes may go through it.
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        configure(folder.path(), volumes);
        let (config, ctl, nbd) = (at("byway.toml"), at("ctl"), format!("unix://{}", at("nbd")));
        let base = ["--config", &config, "--control-socket", &ctl, "--nbd", &nbd, "--http", "127.0.0.1:0"];
        let frontends = 3 + more.iter().filter(|flag| ["--listen", "--nbd"].contains(*flag)).count();
        let more: Vec<_> = more.iter().map(|flag| flag.replace("DIR", &folder.path().display().to_string())).collect();
        let more: Vec<_> = more.iter().map(String::as_str).collect();
        let server = Server::start(folder.path(), frontends, &[&base[..], &more].concat());
        Self { folder, server }
    }

    /// A path in its folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Makes a file of so many bytes, or gives it that length.
    ///
    /// # Panics
    /// If that fails.
    pub fn file(&self, name: &str, len: u64) -> String {
        let file = std::fs::File::options().write(true).create(true).truncate(false).open(self.path(name)).unwrap();
        file.set_len(len).unwrap();
        self.path(name).display().to_string()
    }

    /// Runs `byway ctl`.
    pub fn ctl(&self, arguments: &[&str]) -> std::process::Output {
        let socket = self.path("ctl").display().to_string();
        run(&binary(), &[&["ctl", "--control-socket", &socket], arguments].concat())
    }

    /// Reloads; gives what that printed.
    ///
    /// # Panics
    /// If it is refused.
    pub fn reload(&self) -> String {
        let output = self.ctl(&["reload"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// A script of libnbd with functions `connect(name)` and `fails(what)`.
    pub fn script(&self, body: &str) -> String {
        let socket = self.path("nbd").display().to_string();
        format!(
            "{LIBNBD_PRELUDE}\ndef connect(name):\n  h = nbd.NBD()\n  h.set_export_name(name)\n  \
             h.connect_unix('{socket}')\n  return h\ndef fails(what):\n  try:\n    what()\n  except nbd.Error as e:\n    \
             return e.errno\n  raise AssertionError('it should have failed')\n{body}"
        )
    }

    /// What its HTTP front end answers.
    ///
    /// # Panics
    /// If it does not.
    pub fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.server.port("http"))).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Writes the configuration that the next reload reads.
    ///
    /// # Panics
    /// If that fails.
    pub fn configure(&self, volumes: &str) {
        configure(self.folder.path(), volumes);
    }
}

fn configure(folder: &Path, volumes: &str) {
    std::fs::write(folder.join("byway.toml"), format!("volumes = [{volumes}]\n")).unwrap();
}
