//! One process of a job, as its launcher sees it.

use std::io::{IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process_group, pidfd_open, pidfd_send_signal,
    set_parent_process_death_signal, waitid,
};

use super::Stream;
use super::lines::Lines;

/// What a process reads.
pub(super) enum Input {
    None,
    /// What the launcher reads.
    Inherited,
    /// This, and the end of it when the process shall end: it is an agent on another machine.
    Order(Vec<u8>),
}

/// How long a killed process may take to end before it is left to the kernel.
const REAP_TIME_MAX: Duration = Duration::from_secs(1);

/// A process, which is reaped when this is dropped: until then its number, and its group's, are no other's.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    descriptor: OwnedFd,
    has_group: bool,
    /// Of an agent: closed, it ends the process there.
    order: Option<ChildStdin>,
    output: Option<Lines>,
    errors: Option<Lines>,
    ended: Option<ExitStatus>,
    was_killed: bool,
}

impl Process {
    /// Starts a process.
    pub(super) fn start(command: Command, input: Input) -> std::io::Result<Self> {
        Self::start_with(command, input, Stdio::piped)
    }

    /// Starts a process that prints to these.
    pub(super) fn start_with(mut command: Command, input: Input, output: fn() -> Stdio) -> std::io::Result<Self> {
        command.stdout(output()).stderr(output());
        // A process that reads a terminal must stay in the terminal's foreground group.
        let has_group = !matches!(input, Input::Inherited) || !std::io::stdin().is_terminal();
        if has_group {
            command.process_group(0);
        }
        match input {
            Input::None => drop(command.stdin(Stdio::null())),
            Input::Inherited => {}
            Input::Order(_) => drop(command.stdin(Stdio::piped())),
        }
        // SAFETY: one system call between fork and exec, which allocates nothing.
        unsafe {
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
        }
        let mut child = command.spawn()?;
        let descriptor = match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(descriptor) => descriptor,
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(error.into());
            }
        };
        let output = child.stdout.take().map(|pipe| Lines::of(pipe.into()));
        let errors = child.stderr.take().map(|pipe| Lines::of(pipe.into()));
        let order = child.stdin.take();
        let process = Self { child, descriptor, has_group, order, output, errors, ended: None, was_killed: false };
        if let (Input::Order(bytes), Some(pipe)) = (input, &process.order) {
            send_order(pipe, bytes)?;
        }
        Ok(process)
    }

    /// Whether it is an agent that has not been told to end.
    pub(super) fn can_be_told(&self) -> bool {
        self.order.is_some() && self.ended.is_none()
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Readable when the process has ended.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// How it ended, if it has.
    pub(super) fn ended(&self) -> Option<ExitStatus> {
        self.ended
    }

    /// Whether the launcher killed it.
    pub(super) fn was_killed(&self) -> bool {
        self.was_killed
    }

    /// Asks the kernel whether it has ended.
    pub(super) fn look_for_end(&mut self) -> Option<ExitStatus> {
        // It stays a zombie, so that its group's number is not given away.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::PidFd(self.descriptor.as_fd()), options).ok()??;
        let code = status.exit_status().map(|code| code << 8);
        self.ended = code.or_else(|| status.terminating_signal()).map(ExitStatus::from_raw);
        self.ended
    }

    /// The end of a pipe that the process, or a child of it, can still write to.
    pub(super) fn pipe(&self, stream: Stream) -> Option<BorrowedFd<'_>> {
        let lines = match stream {
            Stream::Output => &self.output,
            Stream::Error => &self.errors,
        };
        lines.as_ref().map(Lines::descriptor)
    }

    pub(super) fn has_output(&self) -> bool {
        self.output.is_some() || self.errors.is_some()
    }

    /// Takes what is in a pipe, and gives whole lines.
    pub(super) fn read(&mut self, stream: Stream, line: impl FnMut(&[u8])) {
        let lines = match stream {
            Stream::Output => &mut self.output,
            Stream::Error => &mut self.errors,
        };
        if lines.as_mut().is_some_and(|lines| !lines.read(line)) {
            *lines = None;
        }
    }

    /// Kills the process, and its children that are in its group; tells an agent to do so, the first time.
    pub(super) fn kill(&mut self) {
        if self.can_be_told() {
            self.was_killed = true;
            self.order = None;
            return;
        }
        if self.ended.is_none() {
            self.was_killed = true;
            // One that has just ended is no fault.
            let _ = pidfd_send_signal(&self.descriptor, Signal::KILL);
        }
        self.kill_group();
    }

    /// Sends a signal to the process and the children in its group. An agent's process is on another machine.
    pub(super) fn signal(&self, signal: Signal) {
        if self.order.is_some() {
            return;
        }
        // One that has just ended is no fault.
        let _ = if self.has_group {
            kill_process_group(Pid::from_child(&self.child), signal)
        } else {
            pidfd_send_signal(&self.descriptor, signal)
        };
    }

    /// Kills what is left of the process's group.
    pub(super) fn kill_group(&self) {
        if self.has_group {
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        }
    }
}

/// Writes an order in a thread of its own. The command that starts the agent may read late (ssh, when it has connected), and a pipe holds less
/// than the longest order.
fn send_order(pipe: &ChildStdin, bytes: Vec<u8>) -> std::io::Result<()> {
    let mut pipe = std::fs::File::from(pipe.as_fd().try_clone_to_owned()?);
    let writer = std::thread::Builder::new().name("dsm-order".to_owned());
    // An agent that does not start ends, and says why itself.
    writer.spawn(move || drop(pipe.write_all(&bytes)))?;
    Ok(())
}

impl Drop for Process {
    fn drop(&mut self) {
        self.order = None;
        self.kill();
        let mut ended = [PollFd::new(&self.descriptor, PollFlags::IN)];
        let _ = poll(&mut ended, Timespec::try_from(REAP_TIME_MAX).ok().as_ref());
        let _ = self.child.try_wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::ORDER_BYTES_MAX;

    #[test]
    fn a_start_does_not_wait_for_an_agent_that_reads_its_order_late() {
        let folder = tempfile::tempdir().unwrap();
        let go = folder.path().join("go");
        let mut command = Command::new("sh");
        let script = r#"until [ -e "$1" ]; do sleep 0.01; done; test "$(head -c "$2" | wc -c)" = "$2""#;
        command.args(["-c", script, "sh"]).arg(&go).arg(ORDER_BYTES_MAX.to_string());
        let mut agent = Process::start(command, Input::Order(vec![7; ORDER_BYTES_MAX])).unwrap();
        // The agent reads only from now on.
        std::fs::write(&go, "").unwrap();
        let mut ended = [PollFd::new(&agent.descriptor, PollFlags::IN)];
        let deadline = Timespec { tv_sec: 30, tv_nsec: 0 };
        assert_eq!(poll(&mut ended, Some(&deadline)).unwrap(), 1, "the agent waits for the rest of its order");
        assert!(agent.look_for_end().unwrap().success());
    }
}
