//! Running other programs: every task here is mostly that.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
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
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace_root());
    command
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

/// A program in the background, killed by its process id when dropped.
pub struct Background {
    child: Child,
}

impl Background {
    /// Starts a program with its output going to `log`.
    pub fn start(command: &mut Command, log: &Path) -> Result<Self> {
        let out = std::fs::File::create(log).with_context(|| format!("cannot create {}", log.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out)
            .spawn()
            .with_context(|| format!("cannot start {}", shown(command)))?;
        Ok(Self { child })
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether the program has ended by itself.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // Both fail only for a child that has ended already, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
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
