//! Programs with far memory: a lender and `byway far`, which end with the test.

pub mod comparison;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use crate::{Server, binary};
use byway_skip::{SkipReason, skip_this};

/// A lender over tcp and shared memory.
pub struct Lender {
    folder: tempfile::TempDir,
    /// Its process.
    pub server: Server,
}

impl Lender {
    /// Starts one.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start() -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let shm = format!("shm://{}", folder.path().join("shm").display());
        let flags = ["--lend", "1G,guard=0", "--listen", "tcp://127.0.0.1:0", "--listen", &shm, "--threads", "1"];
        let server = Server::start(folder.path(), 2, &flags);
        Self { folder, server }
    }

    /// Where it is found: over tcp, and through shared memory.
    pub fn uris(&self) -> [String; 2] {
        let tcp = format!("byway://127.0.0.1:{}", self.server.port("byway"));
        [tcp, format!("byway+shm:///?socket={}", self.folder.path().join("shm").display())]
    }

    /// A file of the test's.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// Whether this machine can page programs; says so if not.
///
/// # Panics
/// If the library is not built.
pub fn can_page() -> bool {
    assert!(
        binary().with_file_name("libbyway_preload.so").is_file(),
        "no libbyway_preload.so beside {}: run `cargo build -p byway-preload`",
        binary().display()
    );
    let folder = tempfile::tempdir().unwrap();
    let nobody = format!("byway+unix:///?socket={}", folder.path().join("none").display());
    let tried = far(&nobody, "16M", &["--class", "none"], &["true"]);
    let said = String::from_utf8_lossy(&tried.stderr).into_owned();
    let can = !said.contains("cannot be paged here");
    if !can {
        skip_this(SkipReason::Machine(said.trim()));
    }
    can
}

/// `byway far` with a report, which leads a process group of its own.
pub fn command(uri: &str, limit: &str, flags: &[&str], program: &[&str]) -> Command {
    let mut command = Command::new(binary());
    command.args(["far", "--report", "--limit", limit, "--from", uri]).args(flags).arg("--").args(program);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    command
}

/// A paged program, which ends with the test.
pub struct PagedProgram(pub Child);

impl PagedProgram {
    /// Starts it.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start(command: &mut Command) -> Self {
        Self(command.spawn().unwrap())
    }

    /// Starts one that prints `filled` when it has filled its memory, and waits for that.
    ///
    /// # Panics
    /// If it does not print that.
    pub fn start_filled(command: &mut Command) -> Self {
        const FILLED: &[u8] = b"filled\n";
        let mut program = Self::start(command);
        let mut line = [0; FILLED.len()];
        program.0.stdout.as_mut().unwrap().read_exact(&mut line).expect("the program fills its memory");
        assert_eq!(line, FILLED);
        program
    }

    /// Ends its input, and waits until it and its children have ended. Gives what they wrote.
    ///
    /// # Panics
    /// If it cannot be read.
    pub fn finish(mut self) -> Output {
        drop(self.0.stdin.take());
        let (mut out, mut err) = (self.0.stdout.take().unwrap(), self.0.stderr.take().unwrap());
        let read = |from: &mut dyn Read| {
            let mut bytes = Vec::new();
            from.read_to_end(&mut bytes).unwrap();
            bytes
        };
        let (stdout, stderr) = std::thread::scope(|scope| {
            let out = scope.spawn(|| read(&mut out));
            let err = read(&mut err);
            (out.join().unwrap(), err)
        });
        let status = self.0.wait().unwrap();
        Output { status, stdout, stderr }
    }
}

impl Drop for PagedProgram {
    fn drop(&mut self) {
        // The keeper, the pager and all that it runs; what has left the group ends with the keeper or the pager.
        let group = rustix::process::Pid::from_child(&self.0);
        if self.0.try_wait().is_ok_and(|ended| ended.is_none()) {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            let _ = self.0.wait();
        }
    }
}

/// What a pager has written to its standard error so far: a thread reads it.
pub struct Heard(Arc<Mutex<String>>);

impl Heard {
    /// Reads from now on.
    pub fn of(stderr: ChildStderr) -> Self {
        let heard = Arc::new(Mutex::new(String::new()));
        let all = Arc::clone(&heard);
        std::thread::spawn(move || {
            let (mut stderr, mut line) = (BufReader::new(stderr), String::new());
            while stderr.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
                all.lock().unwrap_or_else(PoisonError::into_inner).push_str(&std::mem::take(&mut line));
            }
        });
        Self(heard)
    }

    /// All lines.
    pub fn all(&self) -> String {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The machine's Python, or says that there is none.
pub fn python() -> Option<&'static str> {
    let python = "/usr/bin/python3";
    if !Path::new(python).is_file() {
        skip_this(SkipReason::MissingTool("python3"));
        return None;
    }
    Some(python)
}

/// Compiles a C program with the machine's compiler, or says that there is none.
///
/// # Panics
/// If it cannot be compiled.
pub fn compiled(source: &Path, folder: &Path) -> Option<PathBuf> {
    if Command::new("cc").arg("--version").output().is_err() {
        skip_this(SkipReason::MissingTool("cc"));
        return None;
    }
    let program = folder.join(source.file_stem()?);
    let output = Command::new("cc").args(["-O1", "-o"]).arg(&program).arg(source).arg("-lpthread").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(program)
}

/// Compiles a C program with `libbyway.a`, which was built with the test; says so if there is no compiler.
///
/// # Panics
/// If it cannot be compiled.
pub fn compiled_with_byway(source: &Path, folder: &Path) -> Option<PathBuf> {
    if Command::new("cc").arg("--version").output().is_err() {
        skip_this(SkipReason::MissingTool("cc"));
        return None;
    }
    let test = std::env::current_exe().expect("a test is a file");
    let library = test.ancestors().map(|folder| folder.join("libbyway.a")).find(|path| path.exists());
    let program = folder.join(source.file_stem()?);
    let mut compile = Command::new("cc");
    compile.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-I"]);
    compile.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../capi/include"));
    compile.arg(source).arg(library.expect("libbyway.a was built with this test"));
    let output = compile.args(["-lpthread", "-ldl", "-lm", "-o"]).arg(&program).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(program)
}

/// Runs a program to its end.
pub fn far(uri: &str, limit: &str, flags: &[&str], program: &[&str]) -> Output {
    PagedProgram::start(&mut command(uri, limit, flags, program)).finish()
}

/// Runs a program in far memory; it must succeed. Gives what it printed, and how many pages were fetched.
///
/// # Panics
/// If it does not.
pub fn far_well(uri: &str, limit: &str, program: &[&str]) -> (Vec<u8>, u64) {
    let output = far(uri, limit, &["--class", "none"], program);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program:?} at {limit} from {uri}: {}\n{said}", output.status);
    let fetched = said.split(" fetched").next().and_then(|before| before.rsplit(' ').next());
    let fetched = fetched.and_then(|count| count.parse().ok()).unwrap_or_else(|| panic!("no report: {said}"));
    (output.stdout, fetched)
}
