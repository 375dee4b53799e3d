//! The messages of `byway copy` while it runs and when it is stopped, and the files that it leaves.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use byway_e2e::{LIMIT, Server, SkipReason, binary, find_tool, noise, run, run_well, skip, until};
use rustix::process::{Pid, Signal, kill_process};

const SIZE: usize = 24 << 20;

/// So slow that no copy ends within a test.
const SLOW: &str = ",rate=64K";
const FAST: &str = "";

/// A volume of noise, served slowly at first, so that a copy of it has a middle.
struct Rig {
    folder: tempfile::TempDir,
    server: Option<Server>,
}

impl Rig {
    fn new() -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        std::fs::write(folder.path().join("disk"), noise(SIZE, 21)).unwrap();
        let mut rig = Self { folder, server: None };
        rig.serve(SLOW);
        rig
    }

    fn serve(&mut self, rate: &str) {
        let (volume, socket) = (format!("v={}{rate}", self.text("disk")), format!("unix://{}", self.text("sock")));
        self.server = Some(Server::start(self.folder.path(), 1, &["--volume", &volume, "--listen", &socket]));
    }

    fn kill(&mut self) {
        self.server.take().expect("it was started").kill();
    }

    fn serve_anew(&mut self, rate: &str) {
        self.kill();
        self.serve(rate);
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    fn uri(&self) -> String {
        format!("byway+unix:///v?socket={}", self.text("sock"))
    }

    /// Begins to copy the volume into `copy`, and waits for its first bytes.
    fn begin(&self, more: &[&str]) -> Copy {
        let errors = std::fs::File::create(self.path("errors")).unwrap();
        let mut command = Command::new(binary());
        command.args(["copy", "--chunk", "4K", "--depth", "4", &self.uri(), &self.text("copy")]).args(more);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors).spawn().expect("byway starts");
        let copy = Copy { child, errors: self.path("errors") };
        until(Instant::now() + LIMIT, "the copy to begin", || (blocks(&self.path("copy")) > 0).then_some(()));
        copy
    }

    fn is_copied(&self) -> bool {
        std::fs::read(self.path("copy")).unwrap() == std::fs::read(self.path("disk")).unwrap()
    }
}

fn blocks(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).map_or(0, |found| found.blocks())
}

/// Bytes of the pieces that a resume file tells of.
fn recorded_bytes(resume: &str) -> u64 {
    let text = std::fs::read_to_string(resume).unwrap();
    let pieces = text.lines().filter_map(|line| line.strip_prefix("data ")?.split(' ').nth(1));
    pieces.map(|len| len.parse::<u64>().unwrap()).sum()
}

/// As byway shows a size of less than 1 MiB, or of less than 1 GiB.
fn shown(bytes: u64) -> String {
    if bytes < 1 << 20 {
        format!("{:.1} KiB", bytes as f64 / 1024.0)
    } else {
        format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
    }
}

/// A copy under way; it ends with the test.
struct Copy {
    child: Child,
    errors: PathBuf,
}

impl Copy {
    fn said(&self) -> String {
        std::fs::read_to_string(&self.errors).unwrap()
    }

    fn wait_for(&self, words: &str) {
        until(Instant::now() + LIMIT, words, || self.said().contains(words).then_some(()));
    }

    fn interrupt(&self) {
        kill_process(Pid::from_child(&self.child), Signal::INT).expect("it was started");
    }

    fn code(&mut self) -> Option<i32> {
        until(Instant::now() + LIMIT, "the copy to end", || self.child.try_wait().unwrap()).code()
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_copy_that_is_interrupted_says_where_it_stopped_and_is_resumed() {
    let mut rig = Rig::new();
    let mut copy = rig.begin(&[]);
    copy.interrupt();
    assert_eq!(copy.code(), Some(130), "{}", copy.said());
    let (said, resume) = (copy.said(), rig.text("copy.byway-resume"));
    let words = format!("run the same command again to resume (what is done is in {resume})");
    let recorded = recorded_bytes(&resume);
    assert!(recorded > 0);
    let stopped = format!("copy: stopped at {} of 24.0 MiB; ", shown(recorded));
    assert!(said.contains(&stopped) && said.contains(&words), "{stopped}: {said}");
    rig.serve_anew(FAST);
    let said = run_well(&binary(), &["copy", "--chunk", "4K", "--json", "--verify", &rig.uri(), &rig.text("copy")]);
    assert!(said.contains(&format!("\"resumed_bytes\":{recorded},")), "{said}");
    assert!(rig.is_copied());
    assert!(!Path::new(&resume).exists());
}

#[test]
fn a_copy_says_that_its_session_has_ended_and_when_it_is_back() {
    let mut rig = Rig::new();
    let mut copy = rig.begin(&[]);
    rig.kill();
    copy.wait_for("no session with the server, retrying (");
    rig.serve(FAST);
    assert_eq!(copy.code(), Some(0), "{}", copy.said());
    assert!(copy.said().contains("session is back; copying: "), "{}", copy.said());
    assert!(rig.is_copied());
    // While there is none, nothing is waited for.
    std::fs::remove_file(rig.path("copy")).unwrap();
    rig.serve_anew(SLOW);
    let mut copy = rig.begin(&[]);
    rig.kill();
    copy.wait_for("no session with the server, retrying (");
    copy.interrupt();
    assert_eq!(copy.code(), Some(130), "{}", copy.said());
    assert!(copy.said().contains("copy: stopped at "), "{}", copy.said());
}

#[test]
fn without_a_resume_file_a_copy_leaves_none_and_trusts_none() {
    let mut rig = Rig::new();
    let mut copy = rig.begin(&[]);
    copy.interrupt();
    assert_eq!(copy.code(), Some(130), "{}", copy.said());
    // Something else in its place; what is recorded of the first copy counts no more.
    let (other, to) = (noise(SIZE, 22), rig.text("copy"));
    std::fs::write(rig.path("other"), &other).unwrap();
    let refused = run(&binary(), &["copy", "--no-resume", &rig.text("other"), &to]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--overwrite"), "{refused:?}");
    run_well(&binary(), &["copy", "--no-resume", "--overwrite", &rig.text("other"), &to]);
    assert!(std::fs::read(rig.path("copy")).unwrap() == other);
    assert!(!rig.path("copy.byway-resume").exists(), "no record outlives what it tells of");
    std::fs::remove_file(rig.path("copy")).unwrap();
    let mut copy = rig.begin(&["--no-resume"]);
    copy.interrupt();
    assert_eq!(copy.code(), Some(130), "{}", copy.said());
    let advice = "run the same command again with --overwrite to start over (--no-resume)";
    assert!(copy.said().contains(advice), "{}", copy.said());
    assert!(!rig.path("copy.byway-resume").exists());
    rig.serve_anew(FAST);
    run_well(&binary(), &["copy", "--chunk", "4K", &rig.uri(), &to, "--no-resume", "--overwrite"]);
    assert!(rig.is_copied());
}

#[test]
fn a_folder_in_which_no_copy_can_be_made_is_blamed_itself() {
    let rig = Rig::new();
    let none = rig.text("none");
    // Root may not make files there either.
    for folder in [none.as_str(), "/sys"] {
        let refused = run(&binary(), &["copy", &rig.text("disk"), &format!("{folder}/copy")]);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(
            !refused.status.success() && said.contains(&format!("copy: {folder}: cannot create a file there")),
            "{said}"
        );
        assert!(said.contains("name a destination in a writable folder") && !said.contains("resume"), "{said}");
    }
}

#[test]
fn the_name_of_a_new_destination_is_durable() {
    let test = "the_name_of_a_new_destination_is_durable";
    let Some(strace) = find_tool("strace") else {
        return skip(test, SkipReason::MissingTool("strace"));
    };
    if !run(&strace, &["-o", "/dev/null", "true"]).status.success() {
        return skip(test, SkipReason::Machine("strace may not trace here"));
    }
    let rig = Rig::new();
    let (calls, binary) = (rig.text("calls"), binary().display().to_string());
    let (from, to) = (rig.text("disk"), rig.text("copy"));
    let watch = ["-f", "-y", "-e", "trace=fsync", "-e", "signal=none", "-o", &calls];
    let traced = run(&strace, &[&watch[..], &[&binary, "copy", &from, &to]].concat());
    assert!(traced.status.success(), "{}", String::from_utf8_lossy(&traced.stderr));
    let calls = std::fs::read_to_string(calls).unwrap();
    let folder = format!("<{}>)", rig.folder.path().display());
    let synced = calls.lines().find(|line| line.contains("fsync(") && line.contains(&folder));
    assert!(synced.is_some_and(|line| line.ends_with("= 0")), "{calls}");
}
