//! C programs that are compiled with the library that was built beside the tests.

use std::path::{Path, PathBuf};
use std::process::Command;

pub fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The static library lies where this test was built.
pub fn library() -> PathBuf {
    let mut folder = std::env::current_exe().unwrap();
    while folder.pop() {
        let path = folder.join("libbyway.a");
        if path.exists() {
            return path;
        }
    }
    panic!("libbyway.a was not built");
}

/// The program of a source, in a folder that is removed with the first. `None`, said aloud, without a compiler.
#[allow(dead_code, reason = "the programs of SPLASH-3 have a build of their own")]
pub fn compile(source: &Path, arguments: &[String]) -> Option<(tempfile::TempDir, PathBuf)> {
    if Command::new("cc").arg("--version").output().is_err() {
        byway_skip::skip_this(byway_skip::SkipReason::MissingTool("cc"));
        return None;
    }
    let out = tempfile::tempdir().unwrap();
    let program = out.path().join(source.file_stem().unwrap());
    let mut compile = Command::new("cc");
    compile.args(["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-D_POSIX_C_SOURCE=200809L"]);
    compile.arg(source).args(arguments).args(["-lpthread", "-ldl", "-lm", "-o"]).arg(&program);
    let compiled = compile.output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    Some((out, program))
}

/// Whether this machine has what a job needs; says so if not.
#[allow(dead_code, reason = "not all tests start jobs")]
pub fn can_run_jobs() -> bool {
    use byway_reactor::userfault::{Features, Userfault};
    let opened = Userfault::open(Features::WRITE_PROTECT.and(Features::MOVE), true);
    if opened.is_err() {
        byway_skip::skip_this(byway_skip::SkipReason::Machine(
            "the kernel refuses userfaultfd with write protection and moves of pages",
        ));
    }
    opened.is_ok()
}
