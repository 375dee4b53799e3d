//! The header that is checked in is the one that the code makes, and a C program uses it.

mod c_programs;

use std::path::{Path, PathBuf};
use std::process::Command;

use c_programs::{can_run_jobs, compile, folder, library};

#[path = "../install.rs"]
mod install;

const FILES: [&str; 10] = [
    "dsm.rs",
    "anl.rs",
    "error.rs",
    "far.rs",
    "node.rs",
    "memory.rs",
    "operation.rs",
    "group.rs",
    "call.rs",
    "feedback.rs",
];

/// The source of an example.
fn example(name: &str) -> PathBuf {
    folder().join("examples").join(name).with_extension("c")
}

fn header() -> String {
    let config = cbindgen::Config {
        language: cbindgen::Language::C,
        include_guard: Some("BYWAY_H".to_owned()),
        cpp_compat: true,
        documentation_style: cbindgen::DocumentationStyle::C99,
        header: Some("/* Nodes of byway. Made from crates/capi by its tests; not to be edited. */".to_owned()),
        style: cbindgen::Style::Tag,
        // No stdbool.h: old programs, those of SPLASH among them, define `bool` themselves.
        no_includes: true,
        sys_includes: ["stddef.h", "stdint.h"].map(str::to_owned).to_vec(),
        ..cbindgen::Config::default()
    };
    let mut builder = cbindgen::Builder::new().with_config(config);
    for file in FILES {
        builder = builder.with_src(folder().join("src").join(file));
    }
    let mut text = Vec::new();
    builder.generate().unwrap().write(&mut text);
    String::from_utf8(text).unwrap()
}

#[test]
fn the_header_is_current() {
    let (path, made) = (folder().join("include/byway.h"), header());
    if std::env::var_os("BYWAY_WRITE_HEADER").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let there = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(there == made, "stale: run this test with BYWAY_WRITE_HEADER=1 and look at what changed");
}

/// Compiles an example with `arguments` and runs it; what it printed. `None`, said aloud, without a compiler.
fn run_example(name: &str, libraries: &Path, arguments: &[String]) -> Option<String> {
    let (_folder, program) = compile(&example(name), arguments)?;
    let ran = Command::new(&program).env("LD_LIBRARY_PATH", libraries).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    Some(String::from_utf8(ran.stdout).unwrap())
}

#[test]
fn processes_in_c_share_memory() {
    use byway_dsm::launch::{CheckpointFolder, JobEnd, Launch};
    if !can_run_jobs() {
        return;
    }
    let arguments = [format!("-I{}", folder().join("include").display()), library().display().to_string()];
    let Some((_folder, program)) = compile(&example("shared"), &arguments) else { return };
    let folder = tempfile::tempdir().unwrap();
    for (resume, count) in [(false, 300), (true, 600), (true, 900)] {
        let checkpoint = Some(CheckpointFolder { folder: folder.path().to_owned(), resume });
        let job = Launch { checkpoint, ..Launch::new(3, &program) }.start().unwrap();
        let mut lines = Vec::new();
        let end = job.wait(|_, _, line| lines.push(String::from_utf8_lossy(line).into_owned()));
        assert_eq!((end, lines), (JobEnd::Well, vec![format!("3 processes counted to {count}")]));
    }
}

/// Process 1 takes messages in `byway_dsm_poll` alone: a quarter of this keep-alive is hours.
#[test]
fn a_process_that_computes_in_c_answers_at_its_safe_points() {
    use byway_dsm::Waits;
    use byway_dsm::launch::{JobEnd, Launch};
    use byway_dsm::limits::KEEP_ALIVE_MAX;
    if !can_run_jobs() {
        return;
    }
    let arguments = [format!("-I{}", folder().join("include").display()), library().display().to_string()];
    let Some((_folder, program)) = compile(&example("points"), &arguments) else { return };
    let job = Launch { waits: Waits::Points, keep_alive: KEEP_ALIVE_MAX, ..Launch::new(2, &program) };
    let mut lines = Vec::new();
    let end = job.start().unwrap().wait(|_, _, line| lines.push(String::from_utf8_lossy(line).into_owned()));
    assert_eq!((end, lines), (JobEnd::Well, vec!["42".to_owned()]));
}

/// Runs an example as a job with each consistency; it prints this line.
fn job_prints(name: &str, ranks: usize, line: &str) {
    use byway_dsm::Consistency;
    use byway_dsm::launch::{JobEnd, Launch};
    if !can_run_jobs() {
        return;
    }
    let arguments = [format!("-I{}", folder().join("include").display()), library().display().to_string()];
    let Some((_folder, program)) = compile(&example(name), &arguments) else { return };
    for consistency in [Consistency::Sequential, Consistency::Release] {
        let job = Launch { consistency, ..Launch::new(ranks, &program) }.start().unwrap();
        let mut lines = Vec::new();
        let end = job.wait(|_, _, line| lines.push(String::from_utf8_lossy(line).into_owned()));
        assert_eq!((end, lines), (JobEnd::Well, vec![line.to_owned()]), "{consistency:?}");
    }
}

/// Without locks: each process sees what the other has stored by fences alone, and what it fetches is there.
#[test]
fn processes_in_c_fence_and_fetch() {
    let words: u64 = 100 * 512;
    job_prints("ranges", 2, &format!("sum {}", words * (words + 1) / 2));
}

/// Process 0 finds the nodes of all, by pointers.
#[test]
fn processes_in_c_allocate_in_a_segment() {
    let nodes: u64 = 3 * 1000;
    job_prints("list", 3, &format!("{nodes} nodes of 3 processes, sum {}", nodes * (nodes - 1) / 2));
}

const EXAMPLES: [(&str, &str); 2] =
    [("remote_memory", "the same bytes there and here\n"), ("calls", "all answers came\n")];

#[test]
fn the_c_examples_run() {
    let library = library();
    let include = format!("-I{}", folder().join("include").display());
    for (name, prints) in EXAMPLES {
        let Some(printed) = run_example(name, &library, &[include.clone(), library.display().to_string()]) else {
            return;
        };
        assert_eq!(printed, prints);
    }
}

/// A program of somebody else's: it knows the folder in which byway was installed, and pkg-config.
#[test]
fn an_installed_library_is_found_by_pkg_config() {
    if Command::new("pkg-config").arg("--version").output().is_err() {
        return byway_skip::skip_this(byway_skip::SkipReason::MissingTool("pkg-config"));
    }
    let prefix = tempfile::tempdir().unwrap();
    install::install(library().parent().unwrap(), folder(), prefix.path()).unwrap();
    let found = Command::new("pkg-config")
        .args(["--cflags", "--libs", "byway"])
        .env("PKG_CONFIG_PATH", prefix.path().join("lib/pkgconfig"))
        .output()
        .unwrap();
    assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
    let arguments: Vec<String> =
        String::from_utf8(found.stdout).unwrap().split_whitespace().map(str::to_owned).collect();
    assert!(arguments.contains(&format!("-L{}", prefix.path().join("lib").display())), "{arguments:?}");
    for (name, prints) in EXAMPLES {
        let Some(printed) = run_example(name, &prefix.path().join("lib"), &arguments) else { return };
        assert_eq!(printed, prints);
    }
}

/// What C hands over wrongly is refused, not followed.
#[test]
fn null_pointers_are_refused() {
    use std::ptr::{null, null_mut};
    // SAFETY: null pointers are what these functions refuse.
    unsafe {
        let refused = [
            byway::byway_node_open(null_mut()),
            byway::byway_listen(null(), null()),
            byway::byway_connect(null(), c"tcp://127.0.0.1:1".as_ptr(), 0, null_mut()),
            byway::byway_wait(null(), 0, null_mut()),
            byway::byway_wait_any(null(), 1, 0, null_mut(), null_mut()),
            byway::byway_window_close(null_mut(), 0),
            byway::byway_message_header(null(), null_mut()),
            byway::byway_node_open_for_calls(null_mut()),
            byway::byway_group_new(null(), 1, null_mut()),
            byway::byway_group_add(null(), null_mut(), 0),
            byway::byway_group_wait(null(), 0, null_mut(), null_mut(), null_mut()),
            byway::byway_group_descriptor(null()),
            byway::byway_call_start(null(), 0, null(), 0, null_mut()),
            byway::byway_next_call(null(), 0, null_mut()),
            byway::byway_request_method(null()),
            byway::byway_request_windows(null(), null_mut()),
            byway::byway_answer(null_mut(), 0, null(), 0, null(), 0),
            byway::byway_delegate(null_mut(), 0, null()),
            byway::byway_session_feedback(null(), 0, null_mut()),
            byway::byway_session_capabilities(null(), 0, null_mut()),
        ];
        assert_eq!(refused, [-1; 20]);
        byway::byway_group_free(null_mut());
        byway::byway_request_free(null_mut());
        byway::byway_node_close(null_mut());
        byway::byway_op_free(null_mut());
        byway::byway_message_free(null_mut());
        byway::byway_memory_free(null_mut());
        for code in -20..3 {
            assert!(!std::ffi::CStr::from_ptr(byway::byway_error_text(code)).is_empty());
        }
    }
}
