//! Another process of this test's own program, ended with the test.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use byway_reactor::IoChoice;

/// What a started process finds in its environment.
const ASKED: &str = "BYWAY_KILLED_PROCESS";
const SIGKILL: i32 = 9;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Client,
    Server,
}

pub struct Process(Child);

impl Process {
    pub fn start(role: Role, io: IoChoice, path: &Path, seed: u64) -> Self {
        let asked = format!("{role:?} {io:?} {seed} {}", path.display());
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["started_process", "--exact", "--nocapture"])
            .env(ASKED, asked)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("this program starts");
        Self(child)
    }

    pub fn is_running(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }

    /// It has found nothing wrong so far.
    pub fn assert_is_well(&mut self) {
        assert!(self.is_running(), "a process that nobody killed has ended: {:?}", self.0.try_wait());
    }

    /// Kills it; what ended it before was no kill.
    pub fn kill(&mut self) {
        self.0.kill().unwrap();
        let status = self.0.wait().unwrap();
        assert_eq!(status.signal(), Some(SIGKILL), "it ended by itself: {status}");
    }

    /// Waits for its end, which finds nothing wrong.
    pub fn ends_well(mut self) {
        let status = self.0.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What this process was started for.
pub fn asked_for() -> Option<(Role, IoChoice, PathBuf, u64)> {
    let asked = std::env::var(ASKED).ok()?;
    let mut words = asked.splitn(4, ' ');
    let mut next = || words.next().expect("four words");
    let role = if next() == "Client" { Role::Client } else { Role::Server };
    let io = if next() == "Uring" { IoChoice::Uring } else { IoChoice::Epoll };
    let seed = next().parse().expect("a number");
    Some((role, io, next().into(), seed))
}

/// Has the kernel kill this process when the test is gone.
pub fn die_with_parent() {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).unwrap();
}
