//! The processes that experiments start: nodes, and a program that uses memory only. All run this binary, end when this process
//! ends, and are waited for.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::session::RunError;

/// How long the end of a mount may take.
const UMOUNT_TIME_MAX: Duration = Duration::from_secs(5);

/// A running `byway serve` with one event loop.
pub(super) struct Server {
    child: Child,
    /// Front ends and addresses, as it printed them.
    ready: Vec<(String, String)>,
}

impl Server {
    /// Starts it with these arguments after `serve`, on one CPU if one is given, and waits until `frontends` front ends are open.
    pub(super) fn start(arguments: &[String], frontends: usize, cpu: Option<usize>) -> Result<Self, RunError> {
        Self::start_changed(&[], arguments, frontends, cpu)
    }

    /// The same, changed by the flags of [`MeasuredNode`](crate::MeasuredNode).
    pub(super) fn start_changed(
        changes: &[&str],
        arguments: &[String],
        frontends: usize,
        cpu: Option<usize>,
    ) -> Result<Self, RunError> {
        let mut command = this_program()?;
        command.args(["bench", "node", "--end-with", &std::process::id().to_string()]).args(changes);
        command.args(["--", "--threads", "1"]).args(arguments);
        command.env("RUST_LOG", "warn").stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = on(cpu, || command.spawn())?;
        let out = child.stdout.take();
        let mut server = Self { child, ready: Vec::new() };
        for line in out.map(BufReader::new).into_iter().flat_map(BufRead::lines) {
            let line = line.map_err(RunError::Child)?;
            let mut words = line.split_whitespace().skip(1);
            if let (Some(frontend), Some(address)) = (words.next(), words.next()) {
                server.ready.push((frontend.to_owned(), address.to_owned()));
            }
            if server.ready.len() >= frontends {
                return Ok(server);
            }
        }
        Err(RunError::Server(arguments.join(" ")))
    }

    /// Its process.
    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// What names a volume of it, over a scheme of `byway`, `byway+shm`, `byway+unix` or `nbd`.
    pub(super) fn uri(&self, scheme: &str, volume: &str) -> String {
        let (frontend, kind) = match scheme {
            "nbd" => ("nbd", "tcp://"),
            "byway+shm" => ("byway", "shm://"),
            "byway+unix" => ("byway", "unix://"),
            _ => ("byway", "tcp://"),
        };
        let mut open = self.ready.iter().filter(|(name, _)| name == frontend);
        let address = open.find_map(|(_, address)| address.strip_prefix(kind)).unwrap_or_default();
        if kind == "tcp://" {
            format!("{scheme}://{address}/{volume}")
        } else {
            format!("{scheme}:///{volume}?socket={address}")
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A running `byway mount`.
pub(super) struct Mount {
    child: Child,
    at: PathBuf,
}

impl Mount {
    /// Mounts a share on a folder.
    pub(super) fn start(uri: &str, at: &Path) -> Result<Self, RunError> {
        let mut command = this_program()?;
        command.args(["mount", uri]).arg(at).env("RUST_LOG", "warn").stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(RunError::Child)?;
        let out = child.stdout.take();
        let mount = Self { child, at: at.to_owned() };
        let mut line = String::new();
        if let Some(out) = out {
            BufReader::new(out).read_line(&mut line).map_err(RunError::Child)?;
        }
        if line.starts_with("ready mount ") { Ok(mount) } else { Err(RunError::Machine(NO_MOUNT)) }
    }
}

/// Why an experiment with a mount was not run.
const NO_MOUNT: &str =
    "a share cannot be mounted here (it needs root or fusermount3, and /dev/fuse); the message is above";

impl Drop for Mount {
    fn drop(&mut self) {
        if let Ok(mut command) = this_program() {
            let _ = command.args(["umount", "--lazy"]).arg(&self.at).stdout(Stdio::null()).status();
        }
        // It ends with its mount.
        let deadline = Instant::now() + UMOUNT_TIME_MAX;
        while self.child.try_wait().is_ok_and(|ended| ended.is_none()) && Instant::now() < deadline {
            std::thread::park_timeout(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A program that does nothing but read and write memory, and says how long that took.
pub(super) struct MemoryProgram {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl MemoryProgram {
    /// Starts it on a CPU; it waits.
    pub(super) fn start(array_bytes: u64, cpu: usize) -> Result<Self, RunError> {
        let mut command = this_program()?;
        let (parent, bytes) = (std::process::id().to_string(), array_bytes.to_string());
        command.args(["bench", "memory-program", "--end-with", &parent, "--bytes", &bytes]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = on(Some(cpu), || command.spawn())?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(to), Some(from)) => Ok(Self { child, to, from: BufReader::new(from) }),
            _ => Err(RunError::Child(std::io::ErrorKind::BrokenPipe.into())),
        }
    }

    /// Has it go over its memory so often.
    pub(super) fn begin(&mut self, passes: u32) -> Result<(), RunError> {
        writeln!(self.to, "{passes}").and_then(|()| self.to.flush()).map_err(RunError::Child)
    }

    /// Waits until it has; gives the seconds that it took.
    pub(super) fn end(&mut self) -> Result<f64, RunError> {
        let mut line = String::new();
        self.from.read_line(&mut line).map_err(RunError::Child)?;
        line.trim().parse().map_err(|_| RunError::Child(std::io::ErrorKind::UnexpectedEof.into()))
    }

    /// Whether it has said so.
    pub(super) fn is_done(&mut self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut ready = [PollFd::new(self.from.get_ref(), PollFlags::IN)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        !self.from.buffer().is_empty() || poll(&mut ready, Some(&at_once)).is_ok_and(|count| count > 0)
    }
}

impl Drop for MemoryProgram {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// This binary, to be started again.
pub(super) fn this_program() -> Result<Command, RunError> {
    Ok(Command::new(std::env::current_exe().map_err(RunError::Child)?))
}

/// Does something on a CPU: what it starts stays there.
pub(super) fn on<T>(cpu: Option<usize>, act: impl FnOnce() -> std::io::Result<T>) -> Result<T, RunError> {
    match cpu {
        Some(cpu) => on_cpus(&[cpu], act),
        None => act().map_err(RunError::Child),
    }
}

/// Does something on some CPUs: what it starts stays there.
pub(super) fn on_cpus<T>(cpus: &[usize], act: impl FnOnce() -> std::io::Result<T>) -> Result<T, RunError> {
    let before = sched_getaffinity(None).map_err(|error| RunError::Child(error.into()))?;
    let mut some = CpuSet::new();
    for &cpu in cpus {
        some.set(cpu);
    }
    sched_setaffinity(None, &some).map_err(|error| RunError::Child(error.into()))?;
    let done = act();
    sched_setaffinity(None, &before).map_err(|error| RunError::Child(error.into()))?;
    done.map_err(RunError::Child)
}

/// The CPUs that this process may use.
pub(super) fn allowed_cpus() -> Vec<usize> {
    let allowed = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
    (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect()
}

/// The first two of them.
pub(super) fn two_cpus() -> Option<(usize, usize)> {
    let cpus = allowed_cpus();
    Some((*cpus.first()?, *cpus.get(1)?))
}
