//! A share and mounts of it, set up for a test and taken down with it.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Instant;

use byway_skip::SkipReason;
use rustix::process::{Pid, Signal, kill_process};

use crate::server::memory_bytes;
use crate::{Certificates, LIMIT, Server, binary, find_tool, run, run_well, until};

/// Whether this machine mounts nothing, which is said aloud.
pub fn lacks_mounts() -> bool {
    let lacks = !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists();
    if lacks {
        byway_skip::skip_this(SkipReason::Machine("needs root and /dev/fuse"));
    }
    lacks
}

/// A folder that is shared.
#[derive(Debug)]
pub struct MountRig {
    folder: tempfile::TempDir,
    options: &'static str,
}

impl MountRig {
    /// An empty folder, with these options of its share.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn new(options: &'static str) -> Self {
        let rig = Self { folder: tempfile::tempdir().expect("a folder"), options };
        std::fs::create_dir(rig.below()).expect("a folder");
        rig
    }

    /// A path beside the shared folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The shared folder.
    pub fn below(&self) -> PathBuf {
        self.path("below")
    }

    /// A server of the share, over TCP and a unix socket.
    pub fn serve(&self) -> Server {
        self.serve_by(Command::new(binary()), "tcp://127.0.0.1:0", &[])
    }

    /// The same, over shared memory too.
    pub fn serve_shared(&self) -> Server {
        let shared = format!("shm://{}", self.path("shm-socket").display());
        self.serve_by(Command::new(binary()), "tcp://127.0.0.1:0", &["--listen", &shared])
    }

    /// The same, over TLS alone and for certified clients. The flags of a client come with it.
    ///
    /// # Panics
    /// If the certificates cannot be written.
    pub fn serve_secure(&self) -> (Server, Vec<String>) {
        let folder = self.path("certificates");
        std::fs::create_dir_all(&folder).expect("a folder");
        let certificates = Certificates::new(&folder);
        let path = |name: &str| certificates.path(name);
        let (certificate, key, ca) = (path("server-cert.pem"), path("server-key.pem"), path("ca-cert.pem"));
        let tls = ["--tls-certificate", &certificate, "--tls-key", &key, "--tls-client-ca", &ca];
        let server = self.serve_by(Command::new(binary()), "tcp://127.0.0.1:0", &tls);
        (server, certificates.flags("client"))
    }

    /// The same, by a command that runs byway in its own way, and over TCP at an address.
    pub fn serve_by(&self, command: Command, listen: &str, more: &[&str]) -> Server {
        let share = format!("share={}{}", self.below().display(), self.options);
        let socket = format!("unix://{}", self.path("socket").display());
        let arguments = ["--share", &share, "--listen", listen, "--listen", &socket, "--threads", "2"];
        let listeners = 2 + more.iter().filter(|flag| **flag == "--listen").count();
        Server::start_by(command, self.folder.path(), listeners, &[&arguments, more].concat())
    }

    /// The share at the unix socket.
    pub fn unix(&self) -> String {
        format!("byway+unix:///share?socket={}", self.path("socket").display())
    }

    /// The share over shared memory, at a server of [`MountRig::serve_shared`].
    pub fn shared(&self) -> String {
        format!("byway+shm:///share?socket={}", self.path("shm-socket").display())
    }

    /// The share over TLS, at a server of [`MountRig::serve_secure`].
    pub fn secure(&self, server: &Server) -> String {
        format!("byways://localhost:{}/share", server.port("byway"))
    }

    /// The share over TCP at its server.
    pub fn tcp(&self, server: &Server) -> String {
        format!("byway://127.0.0.1:{}/share", server.port("byway"))
    }

    /// Mounts the share on a folder of that name.
    ///
    /// # Panics
    /// If it is not mounted; the message has its log.
    pub fn mount(&self, name: &str, uri: &str, more: &[&str]) -> Mount {
        self.mount_by(Command::new(binary()), name, uri, more)
    }

    /// The same, by a command that runs byway in its own way.
    ///
    /// # Panics
    /// See [`MountRig::mount`].
    pub fn mount_by(&self, command: Command, name: &str, uri: &str, more: &[&str]) -> Mount {
        let at = self.path(name);
        std::fs::create_dir_all(&at).expect("a folder");
        let log = self.path(&format!("{name}.log"));
        File::create(&log).expect("a log");
        let (child, ready) = start(command, &at, &log, uri, more);
        let mount = Mount { at, log, child };
        let line = ready.recv_timeout(LIMIT).unwrap_or_default();
        assert!(line.starts_with("ready mount "), "{line}\n{}", mount.log());
        mount
    }
}

/// Starts the process of a mount, and says what its first line is.
fn start(mut command: Command, at: &Path, log: &Path, uri: &str, more: &[&str]) -> (Child, mpsc::Receiver<String>) {
    command.arg("mount").arg(uri).arg(at).args(more);
    let log = File::options().append(true).open(log).expect("a log");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
    let mut child = command.spawn().expect("byway starts");
    let out = child.stdout.take().expect("piped");
    let (send, ready) = mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let _ = BufReader::new(out).read_line(&mut line);
        let _ = send.send(line);
    });
    (child, ready)
}

/// A mount and its process; both end with this.
#[derive(Debug)]
pub struct Mount {
    /// Where it is mounted.
    pub at: PathBuf,
    log: PathBuf,
    child: Child,
}

impl Mount {
    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.at.join(name)
    }

    /// What its process has said.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Messages that it has sent to its server, but for those that renew leases.
    ///
    /// # Panics
    /// If the mount does not say.
    pub fn messages(&self) -> u64 {
        let mut value = [0; 32];
        let len = rustix::fs::getxattr(&self.at, "byway.messages", &mut value[..]).expect("a mount says");
        str::from_utf8(&value[..len]).expect("a number").parse().expect("a number")
    }

    /// Does something until it costs no message, for example because what it asks for is cached: another mount's change may be under way.
    ///
    /// # Panics
    /// If it costs messages for too long.
    pub fn until_free(&self, what: &str, mut act: impl FnMut()) {
        until(Instant::now() + LIMIT, what, || {
            act();
            let before = self.messages();
            act();
            (self.messages() == before).then_some(())
        });
    }

    /// The number of its process.
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// The socket of its process.
    ///
    /// # Panics
    /// If it has none.
    pub fn socket(&self) -> PathBuf {
        let prefix = format!("{}-", self.process());
        let entries = std::fs::read_dir("/run/byway-mounts").expect("a mount has made it").flatten();
        let is_ours = |entry: &std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with(&prefix);
        entries.filter(is_ours).map(|entry| entry.path()).next().expect("the mount has a socket")
    }

    /// The status of its process, if that has ended.
    ///
    /// # Panics
    /// If its end was waited for before.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("it was started")
    }

    /// Has another process take it over, and waits for the end of the one before.
    ///
    /// # Panics
    /// If either fails.
    pub fn take_over(&mut self, uri: &str) {
        self.take_over_by(uri, &[]);
    }

    /// The same, by a process with these flags.
    ///
    /// # Panics
    /// If either fails.
    pub fn take_over_by(&mut self, uri: &str, more: &[&str]) {
        let flags = [&["--takeover"][..], more].concat();
        let (child, ready) = start(Command::new(binary()), &self.at, &self.log, uri, &flags);
        let mut before = std::mem::replace(&mut self.child, child);
        let line = ready.recv_timeout(LIMIT).unwrap_or_default();
        let ended = until(Instant::now() + LIMIT, "the end of the process before", || {
            before.try_wait().expect("it was started")
        });
        assert!(line.starts_with("ready mount "), "{line}\n{}", self.log());
        assert!(ended.success(), "{ended}\n{}", self.log());
    }

    /// Memory of its process that is no file's (`RssAnon` and `RssShmem`), in bytes.
    ///
    /// # Panics
    /// If the process has ended.
    pub fn memory_bytes(&self) -> u64 {
        memory_bytes(self.process())
    }

    /// Sends its process a signal.
    ///
    /// # Panics
    /// If the process has ended.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("the process runs");
    }

    /// Kills its process, and waits for its end.
    ///
    /// # Panics
    /// If it cannot be killed.
    pub fn kill(&mut self) {
        self.child.kill().expect("the process runs");
        self.child.wait().expect("it was started");
    }

    /// Unmounts it, and waits for the end of its process.
    ///
    /// # Panics
    /// If it cannot be unmounted.
    pub fn unmount(mut self) {
        run_well(&binary(), &["umount", &self.at.display().to_string()]);
        let ended = until(Instant::now() + LIMIT, "the end of the mount's process", || self.ended());
        assert!(ended.success(), "{}", self.log());
    }

    /// Unmounts it without a server, though something was not synced, and waits for the end of its process: both say so.
    ///
    /// # Panics
    /// If it cannot be unmounted, or a status says that all is durable.
    pub fn unmount_unsynced(mut self) {
        let told = run(&binary(), &["umount", &self.at.display().to_string()]);
        let said = String::from_utf8_lossy(&told.stderr);
        let is_told = said.contains("is unmounted, but") && said.contains("may not be durable");
        assert!(told.status.code() == Some(1) && is_told, "{said}");
        let ended = until(Instant::now() + LIMIT, "the end of the mount's process", || self.ended());
        assert!(ended.code() == Some(1) && self.log().contains("may not be durable"), "{ended}: {}", self.log());
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = run(&binary(), &["umount", "--lazy", &self.at.display().to_string()]);
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- the mount's log:\n{}", self.log());
        }
    }
}

/// A file system in memory of 4 MiB, until this is dropped.
#[derive(Debug)]
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts it there.
    ///
    /// # Panics
    /// If it cannot be mounted.
    pub fn mount(at: &Path) -> Self {
        let mount = find_tool("mount").expect("mount is installed");
        run_well(&mount, &["-t", "tmpfs", "-o", "size=4m", "tmpfs", &at.display().to_string()]);
        Self(at.to_owned())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = find_tool("umount").map(|umount| run(&umount, &["-l", &self.0.display().to_string()]));
    }
}
