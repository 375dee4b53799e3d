//! Another process of this test's own program: a peer that is stopped or killed whatever it is doing.

use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use byway_reactor::IoChoice;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, waitpid};

use crate::Role;

/// What a started process finds in its environment.
const ASKED: &str = "BYWAY_KILLED_PEER";

/// A process; ended when dropped.
pub struct Process {
    child: Child,
    pidfd: OwnedFd,
}

/// What was asked of a started process.
pub struct Asked {
    pub role: Role,
    pub io: IoChoice,
    pub seed: u64,
    pub path: PathBuf,
}

impl Process {
    pub fn start(role: Role, io: IoChoice, seed: u64, path: &Path) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["started_process", "--exact", "--nocapture"])
            .env(ASKED, format!("{role:?} {io:?} {seed} {}", path.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("this program starts");
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        Self { child, pidfd }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Has another thread kill it so long from now, in the middle of whatever both processes do.
    pub fn kill_after(self, time: Duration) -> JoinHandle<()> {
        std::thread::spawn(move || {
            self.has_ended_within(time);
            self.kill();
        })
    }

    /// Kills it; what ended it before was no kill.
    pub fn kill(mut self) {
        let status = self.end();
        assert_eq!(status.signal(), Some(Signal::KILL.as_raw()), "it ended by itself: {status}");
    }

    /// Kills it, unless it has ended before, and then well.
    pub fn kill_or_join(mut self) {
        let status = self.end();
        assert!(status.success() || status.signal() == Some(Signal::KILL.as_raw()), "{status}");
    }

    /// Whether it has ended, as it may any time until then.
    pub fn has_ended_within(&self, time: Duration) -> bool {
        let timeout = Timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: time.subsec_nanos().into() };
        poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&timeout)).unwrap() > 0
    }

    /// Stops it wherever it is; it has stopped then.
    pub fn stop(&self) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::STOP).unwrap();
        let (_, status) = waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().expect("it waits");
        assert!(status.stopped(), "{status:?}");
    }

    /// Lets it go on.
    pub fn go_on(&self) {
        kill_process(Pid::from_child(&self.child), Signal::CONT).unwrap();
    }

    fn end(&mut self) -> ExitStatus {
        self.child.kill().unwrap();
        self.child.wait().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What this process was started for. From here on the kernel kills it when the test is gone, and what it finds wrong ends it
/// at once, before it is killed.
pub fn asked_for() -> Option<Asked> {
    let asked = std::env::var(ASKED).ok()?;
    std::panic::set_hook(Box::new(|panic| {
        eprintln!("{panic}");
        std::process::abort();
    }));
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let mut words = asked.splitn(4, ' ');
    let mut next = || words.next().expect("four words");
    let role = next();
    let role = [Role::Lender, Role::Borrower, Role::Both].into_iter().find(|known| format!("{known:?}") == role);
    let io = if next() == "Uring" { IoChoice::Uring } else { IoChoice::Epoll };
    let seed = next().parse().expect("a number");
    Some(Asked { role: role.expect("a role"), io, seed, path: next().into() })
}
