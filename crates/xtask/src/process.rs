//! Runs other programs, which is most of what the tasks do.

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Between two looks at a condition that is waited for.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Folders of administrators' programs, which a user's `PATH` often lacks.
const SYSTEM_FOLDERS: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// The root of the workspace that this program was built from.
pub fn workspace_root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.ancestors().nth(2).unwrap_or(manifest).to_path_buf()
}

/// `cargo`, as the cargo that started this program, in the workspace root.
///
/// Without the variables that describe this program's own package: build scripts such as ring's run again when one of them
/// changes, and everything above them is built again.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in std::env::vars_os().filter(|(name, _)| is_of_package(&name.to_string_lossy())) {
        command.env_remove(name);
    }
    command.current_dir(workspace_root());
    command
}

/// Whether `cargo run` sets a variable to describe the package that it runs.
fn is_of_package(variable: &str) -> bool {
    variable.starts_with("CARGO_PKG_") || variable.starts_with("CARGO_MANIFEST_")
}

/// Where cargo puts what it builds.
pub fn target_directory() -> Result<PathBuf> {
    let text = output(cargo().args(["metadata", "--format-version", "1", "--no-deps"]))?;
    let metadata: serde_json::Value = serde_json::from_str(&text)?;
    let directory = metadata["target_directory"].as_str().context("cargo metadata names no target directory")?;
    Ok(PathBuf::from(directory))
}

/// Runs a program with its output shown; fails if it fails.
pub fn run(command: &mut Command) -> Result<()> {
    println!("$ {}", shown(command));
    let status = command.status().with_context(|| format!("cannot start {}", shown(command)))?;
    if !status.success() {
        bail!("{} failed: {status}", shown(command));
    }
    Ok(())
}

/// Runs a program and returns what it printed; fails, with what it complained, if it fails.
pub fn output(command: &mut Command) -> Result<String> {
    let done = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {}", shown(command)))?;
    if !done.status.success() {
        let complaint = String::from_utf8_lossy(&done.stderr);
        bail!("{} failed: {}: {}", shown(command), done.status, complaint.trim());
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// Whether a program runs and succeeds, with nothing shown.
pub fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Finds a program as a shell would, in the administrators' folders too.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(SYSTEM_FOLDERS.iter().map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|candidate| candidate.is_file())
}

/// Waits until `look` finds what it looks for, at most `limit`.
pub fn wait_for<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        if start.elapsed() >= limit {
            bail!("waited {} s in vain for {what}", limit.as_secs());
        }
        pause(POLL_INTERVAL);
    }
}

/// Lets time pass: between two looks at a condition, or while an idle server is watched.
#[expect(clippy::disallowed_methods, reason = "the one place; the condition and its deadline are in wait_for")]
pub fn pause(duration: Duration) {
    std::thread::sleep(duration);
}

/// What a signal that ends this process ends with it.
struct Started {
    /// The process ids of all [`Background`] programs that have not been waited for: no other process has one of these ids.
    programs: BTreeSet<u32>,
    /// The folders of all [`Scratch`].
    folders: BTreeSet<PathBuf>,
}

static STARTED: Mutex<Started> = Mutex::new(Started { programs: BTreeSet::new(), folders: BTreeSet::new() });

fn started() -> MutexGuard<'static, Started> {
    STARTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has SIGINT, SIGTERM and SIGHUP end this process with what it has [`Started`]. A second call does nothing.
fn end_together() -> Result<()> {
    static TAKEN: OnceLock<()> = OnceLock::new();
    if TAKEN.set(()).is_err() {
        return Ok(());
    }
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot take signals")?;
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            let started = started();
            for id in started.programs.iter().filter_map(|id| Pid::from_raw(i32::try_from(*id).ok()?)) {
                // A program that has ended is what is wanted.
                let _ = kill_process(id, Signal::KILL);
            }
            for folder in &started.folders {
                // One that is gone is what is wanted.
                let _ = std::fs::remove_dir_all(folder);
            }
            eprintln!("xtask: ended by signal {signal}, with what it had started");
            // With the lock: nothing more starts.
            std::process::exit(128 + signal);
        }
    });
    Ok(())
}

/// A folder for the files of a task, removed when dropped, and when a signal ends this process.
pub struct Scratch(tempfile::TempDir);

impl Scratch {
    /// Makes it in `place`.
    pub fn new(place: &Path) -> Result<Self> {
        end_together()?;
        let mut started = started();
        let folder = tempfile::Builder::new().prefix("byway-peers-").tempdir_in(place)?;
        started.folders.insert(folder.path().to_owned());
        Ok(Self(folder))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let mut started = started();
        let _ = std::fs::remove_dir_all(self.0.path());
        started.folders.remove(self.0.path());
    }
}

/// A program in the background, killed by its process id when dropped, and when a signal ends this process.
pub struct Background {
    child: Child,
}

impl Background {
    /// Starts a program with its output going to `log`.
    pub fn start(command: &mut Command, log: &Path) -> Result<Self> {
        let out = std::fs::File::create(log).with_context(|| format!("cannot create {}", log.display()))?;
        end_together()?;
        let mut started = started();
        let child = command
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out)
            .spawn()
            .with_context(|| format!("cannot start {}", shown(command)))?;
        started.programs.insert(child.id());
        Ok(Self { child })
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether the program has ended by itself.
    pub fn has_ended(&mut self) -> Result<bool> {
        let mut started = started();
        let has_ended = self.child.try_wait()?.is_some();
        if has_ended {
            started.programs.remove(&self.child.id());
        }
        Ok(has_ended)
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let mut started = started();
        // Both fail only for a child that has ended already, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
        started.programs.remove(&self.child.id());
    }
}

fn shown(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(command.get_args().map(|argument| argument.to_string_lossy().into_owned()));
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::BufRead;

    /// Set for the process that the test below starts.
    const STARTER: &str = "BYWAY_TEST_BACKGROUND_STARTER";

    #[test]
    fn a_signal_ends_what_was_started_too() {
        if let Some(folder) = std::env::var_os(STARTER) {
            let program = Background::start(Command::new("sleep").arg("600"), &Path::new(&folder).join("log")).unwrap();
            println!("started {}", program.id());
            // Until the signal.
            loop {
                std::thread::park();
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let mut starter = Command::new(std::env::current_exe().unwrap());
        starter.args(["--exact", "--nocapture", "process::tests::a_signal_ends_what_was_started_too"]);
        let mut starter =
            starter.env(STARTER, folder.path()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut lines = std::io::BufReader::new(starter.stdout.take().unwrap()).lines().map_while(std::io::Result::ok);
        let id = lines.find_map(|line| Some(line.split_once("started ")?.1.trim().to_owned())).unwrap();
        let is_there = || Path::new("/proc").join(&id).exists();
        assert!(is_there());
        kill_process(Pid::from_child(&starter), Signal::TERM).unwrap();
        assert_eq!(starter.wait().unwrap().code(), Some(128 + SIGTERM));
        wait_for("the end of sleep", Duration::from_secs(30), || Ok((!is_there()).then_some(()))).unwrap();
    }

    #[test]
    fn cargo_is_not_told_of_this_programs_package() {
        // cargo has set them for this test, too.
        let set: Vec<String> = std::env::vars().map(|(name, _)| name).filter(|name| is_of_package(name)).collect();
        assert!(set.iter().any(|name| name == "CARGO_PKG_NAME"), "{set:?}");
        let cargo = cargo();
        for name in set {
            assert!(cargo.get_envs().any(|change| change == (name.as_ref(), None)), "{name} is passed on");
        }
    }

    #[test]
    fn a_failing_program_is_an_error_with_its_complaint() {
        let error = output(Command::new("sh").args(["-c", "echo wrong >&2; exit 3"])).unwrap_err();
        assert!(error.to_string().contains("wrong"), "{error}");
    }

    #[test]
    fn waiting_ends_with_what_was_found_or_with_the_limit() {
        let mut looks = 0;
        let found = wait_for("three", Duration::from_secs(10), || {
            looks += 1;
            Ok((looks == 3).then_some(looks))
        });
        assert_eq!(found.unwrap(), 3);
        assert!(wait_for::<()>("nothing", Duration::ZERO, || Ok(None)).is_err());
    }

    #[test]
    fn a_background_program_dies_with_its_handle() {
        let folder = tempfile::tempdir().unwrap();
        let background = Background::start(Command::new("sleep").arg("600"), &folder.path().join("log")).unwrap();
        let stat = PathBuf::from(format!("/proc/{}/stat", background.id()));
        assert!(stat.exists());
        drop(background);
        assert!(!stat.exists());
    }
}
