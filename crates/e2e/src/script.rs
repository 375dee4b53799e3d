//! Scripts that a test runs beside itself and stops at points that it chooses.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use crate::{LIMIT, until};

/// A Python script that talks to the test by lines.
pub struct Script(Child);

impl Script {
    /// Starts it.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start(python: &Path, script: &str) -> Self {
        let mut command = Command::new(python);
        command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        Self(command.spawn().expect("python starts"))
    }

    /// Waits for the line that says how far it is.
    ///
    /// # Panics
    /// If it is another.
    pub fn expect(&mut self, want: &str) {
        let out = self.0.stdout.as_mut().expect("piped");
        let mut line = Vec::new();
        let mut byte = [0];
        while out.read(&mut byte).expect("a pipe") == 1 && byte[0] != b'\n' {
            line.push(byte[0]);
        }
        assert_eq!(String::from_utf8_lossy(&line), want);
    }

    /// Sends it a line.
    ///
    /// # Panics
    /// If it has ended.
    pub fn go_on(&mut self) {
        self.0.stdin.as_mut().expect("piped").write_all(b"\n").expect("it reads");
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// If it fails or takes too long.
    pub fn ends_well(mut self) {
        let status = until(Instant::now() + LIMIT, "the script to end", || self.0.try_wait().ok().flatten());
        assert!(status.success(), "{status}");
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
