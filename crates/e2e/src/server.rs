//! The built `byway`, started as an operator starts it and ended when the test ends.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long anything here may take before the test fails.
pub const LIMIT: Duration = Duration::from_secs(60);

/// The same for a program that is run: those of a long run work for minutes by themselves.
fn program_limit() -> Duration {
    if std::env::var_os("BYWAY_LONG").is_some() { LIMIT * 20 } else { LIMIT }
}

/// The binary under test: `BYWAY_BIN`, else the workspace's release or debug build.
///
/// # Panics
/// If there is none: `cargo xtask test` builds it.
pub fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("BYWAY_BIN") {
        return path.into();
    }
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
    ["release/byway", "debug/byway"]
        .map(|name| target.join(name))
        .into_iter()
        .find(|path| path.is_file())
        .expect("no byway binary: run `cargo build --release` or `cargo xtask test`")
}

/// A running `byway serve`.
pub struct Server {
    child: Child,
    /// The lines that it printed when it was ready: front end and address.
    ready: Vec<(String, String)>,
    log: PathBuf,
}

impl Server {
    /// Starts it with these arguments after `serve`, and waits until `frontends` front ends are ready.
    ///
    /// # Panics
    /// If it does not get ready; the message holds its log.
    pub fn start(folder: &Path, frontends: usize, arguments: &[&str]) -> Self {
        Self::start_by(Command::new(binary()), folder, frontends, arguments)
    }

    /// The same with a command that runs the binary: in another namespace, say.
    ///
    /// # Panics
    /// See [`Server::start`].
    pub fn start_by(mut command: Command, folder: &Path, frontends: usize, arguments: &[&str]) -> Self {
        let log = folder.join(format!("byway-{}.log", std::process::id()));
        let file = std::fs::File::options().create(true).append(true).open(&log).expect("a log file");
        let mut child = command
            .arg("serve")
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(file)
            .spawn()
            .expect("byway starts");
        let out = child.stdout.take().expect("piped");
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        let mut server = Self { child, ready: Vec::new(), log };
        while server.ready.len() < frontends {
            let Ok(line) = lines.recv_timeout(LIMIT) else {
                // One that has closed its output is about to end.
                let soon = Instant::now() + Duration::from_secs(1);
                let ended = std::iter::repeat_with(|| server.child.try_wait())
                    .find(|ended| !matches!(ended, Ok(None)) || Instant::now() >= soon);
                panic!("byway did not get ready ({ended:?}):\n{}", server.log())
            };
            let mut words = line.split_whitespace();
            if words.next() == Some("ready") {
                let (frontend, address) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
                server.ready.push((frontend.to_owned(), address.to_owned()));
            }
        }
        server
    }

    /// The port of the first TCP listener of a front end.
    pub fn port(&self, frontend: &str) -> u16 {
        self.ready
            .iter()
            .filter(|(name, _)| name == frontend)
            .find_map(|(_, address)| {
                address.strip_prefix("tcp://").or(address.strip_prefix("http://"))?.rsplit_once(':')?.1.parse().ok()
            })
            .expect("a TCP listener")
    }

    /// What it has said on standard error.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Memory that is its own (`RssAnon`), in bytes.
    pub fn anonymous_bytes(&self) -> u64 {
        resident_bytes(self.id(), "RssAnon:")
    }

    /// Memory that is files' (`RssFile` and `RssShmem`), in bytes.
    pub fn mapped_bytes(&self) -> u64 {
        resident_bytes(self.id(), "RssFile:") + resident_bytes(self.id(), "RssShmem:")
    }

    /// Memory that is no file's (`RssAnon` and `RssShmem`), in bytes.
    pub fn memory_bytes(&self) -> u64 {
        memory_bytes(self.id())
    }

    /// How often each of its loops has gone to sleep.
    ///
    /// # Panics
    /// If it is gone.
    pub fn loop_sleeps(&self) -> Vec<u64> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.id())).expect("it lives");
        let read = |task: &Path, file| std::fs::read_to_string(task.join(file)).unwrap_or_default();
        let is_loop = |task: &PathBuf| {
            let comm = read(task, "comm");
            comm.trim().strip_prefix("byway-").is_some_and(|number| number.parse::<u16>().is_ok())
        };
        let tasks = tasks.map(|task| task.expect("it lives").path()).filter(is_loop);
        let sleeps = tasks.map(|task| {
            let status = read(&task, "status");
            let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            line.expect("the kernel says").trim().parse().expect("a number")
        });
        sleeps.collect()
    }

    /// Whether it still runs.
    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_none())
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// SIGTERM; gives the exit code.
    pub fn terminate(&mut self) -> Option<i32> {
        self.ask_to_end();
        self.exit_code()
    }

    /// SIGTERM.
    ///
    /// # Panics
    /// If it has ended.
    pub fn ask_to_end(&self) {
        let id = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(id, rustix::process::Signal::TERM).expect("it lives");
    }

    /// Waits for its end; gives the exit code.
    pub fn exit_code(&mut self) -> Option<i32> {
        let deadline = Instant::now() + LIMIT;
        until(deadline, "byway to end", || self.child.try_wait().ok().flatten()).code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("--- byway's log:\n{}", self.log());
        }
    }
}

/// Memory of a process that is no file's, in bytes.
pub(crate) fn memory_bytes(process: u32) -> u64 {
    resident_bytes(process, "RssAnon:") + resident_bytes(process, "RssShmem:")
}

fn resident_bytes(process: u32, kind: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("it lives");
    let line = status.lines().find_map(|line| line.strip_prefix(kind)).expect("the kernel says");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

/// Looks until there is something, or fails the test at the deadline.
///
/// # Panics
/// At the deadline.
pub fn until<T>(deadline: Instant, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
        let _ = rustix::thread::nanosleep(&pause);
    }
}

/// CPU time that a process has used, in clock ticks (of 10 ms).
///
/// # Panics
/// If it is gone.
pub fn cpu_ticks(id: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).expect("it runs");
    // What comes behind its name, in which there may be anything: utime and stime are the 14th and the 15th of proc(5).
    let fields: Vec<&str> = stat.rsplit_once(')').expect("a name").1.split_whitespace().collect();
    fields[11..13].iter().map(|ticks| ticks.parse::<u64>().expect("a number")).sum()
}

/// Waits for two seconds in which these processes together use less than a twentieth of a core; `meanwhile` is called again and
/// again. What spins never has such seconds, however little it gets of a busy machine.
///
/// # Panics
/// If there are none within [`LIMIT`].
pub fn wait_until_idle(ids: &[u32], mut meanwhile: impl FnMut()) {
    const WINDOW: Duration = Duration::from_secs(2);
    let ticks = || ids.iter().map(|id| cpu_ticks(*id)).sum::<u64>();
    let (mut since, mut before) = (Instant::now(), ticks());
    until(Instant::now() + LIMIT, "two seconds without work", || {
        meanwhile();
        if since.elapsed() < WINDOW {
            return None;
        }
        let used = ticks() - before;
        (since, before) = (Instant::now(), before + used);
        (used * 20 < WINDOW.as_millis() as u64 / 10).then_some(())
    });
}

/// Runs a program to its end, at most [`LIMIT`], or twenty times that in a long run.
///
/// # Panics
/// If it cannot be started or takes too long.
pub fn run(program: &Path, arguments: &[&str]) -> Output {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{}: {error}", program.display()));
    let id = rustix::process::Pid::from_child(&child);
    let (send, done) = mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if done.recv_timeout(program_limit()) == Err(mpsc::RecvTimeoutError::Timeout) {
            let _ = rustix::process::kill_process(id, rustix::process::Signal::KILL);
        }
    });
    let mut out = child.stdout.take().expect("piped");
    let reader = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = std::io::Read::read_to_end(&mut out, &mut bytes);
        bytes
    });
    let mut stderr = Vec::new();
    let _ = std::io::Read::read_to_end(&mut child.stderr.take().expect("piped"), &mut stderr);
    let status = child.wait().expect("it was started");
    drop(send);
    let _ = watchdog.join();
    Output { status, stdout: reader.join().unwrap_or_default(), stderr }
}

/// As [`run`], and the program must succeed; gives what it printed.
///
/// # Panics
/// If it fails; the message holds what it said.
pub fn run_well(program: &Path, arguments: &[&str]) -> String {
    let output = run(program, arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{} {arguments:?}: {}\n{said}", program.display(), output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Debian's Python with libnbd's module; another Python in front of it in `PATH` would not have it.
pub fn libnbd_python() -> Option<PathBuf> {
    let python = PathBuf::from("/usr/bin/python3");
    let has_it = Command::new(&python).args(["-c", "import nbd"]).stderr(Stdio::null()).status();
    has_it.is_ok_and(|status| status.success()).then_some(python)
}

/// What a libnbd script starts with: a handle `h` that is not connected yet.
pub const LIBNBD_PRELUDE: &str = "import nbd\nh = nbd.NBD()\n";
