//! NBD servers of other projects, each on a unix socket, ended when the test ends.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use crate::{LIMIT, until};

/// A running nbdkit or qemu-nbd.
pub struct ForeignServer {
    command: Command,
    child: Child,
    socket: PathBuf,
}

impl ForeignServer {
    /// Starts nbdkit with these arguments behind its own, and waits until it answers.
    ///
    /// # Panics
    /// If it does not get ready.
    pub fn nbdkit(program: &Path, socket: &Path, arguments: &[&str]) -> Self {
        let own = ["--exit-with-parent", "--foreground", "--newstyle", "--unix"];
        let mut command = Command::new(program);
        command.args(own).arg(socket).args(arguments);
        Self::start(command, socket)
    }

    /// Starts qemu-nbd for a raw file.
    ///
    /// # Panics
    /// If it does not get ready.
    pub fn qemu_nbd(program: &Path, socket: &Path, file: &Path) -> Self {
        let own = ["--persistent", "--shared=8", "--format=raw", "--discard=unmap", "--socket"];
        let mut command = Command::new(program);
        command.args(own).arg(socket).arg(file);
        Self::start(command, socket)
    }

    fn start(mut command: Command, socket: &Path) -> Self {
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("it was found");
        let server = Self { command, child, socket: socket.to_owned() };
        server.wait();
        server
    }

    fn wait(&self) {
        until(Instant::now() + LIMIT, "a foreign server", || UnixStream::connect(&self.socket).ok());
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
    }

    /// Starts it again, as it was.
    ///
    /// # Panics
    /// If it does not get ready.
    pub fn restart(&mut self) {
        self.child = self.command.spawn().expect("it was found");
        self.wait();
    }

    /// The URI of an export.
    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }
}

impl Drop for ForeignServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Bytes without a pattern that a mistake could reproduce.
pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}
