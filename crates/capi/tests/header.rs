//! The header that is checked in is the one that the code makes, and a C program uses it.

use std::path::{Path, PathBuf};
use std::process::Command;

const FILES: [&str; 4] = ["error.rs", "node.rs", "memory.rs", "operation.rs"];

fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn header() -> String {
    let config = cbindgen::Config {
        language: cbindgen::Language::C,
        include_guard: Some("BYWAY_H".to_owned()),
        cpp_compat: true,
        documentation_style: cbindgen::DocumentationStyle::C99,
        header: Some("/* Nodes of byway. Made from crates/capi by its tests; not to be edited. */".to_owned()),
        style: cbindgen::Style::Tag,
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

/// The static library lies where this test was built.
fn library() -> PathBuf {
    let mut folder = std::env::current_exe().unwrap();
    while folder.pop() {
        let path = folder.join("libbyway.a");
        if path.exists() {
            return path;
        }
    }
    panic!("libbyway.a was not built");
}

#[test]
fn the_c_example_runs() {
    if Command::new("cc").arg("--version").output().is_err() {
        return eprintln!("SKIP: no C compiler (cc)");
    }
    let out = tempfile::tempdir().unwrap();
    let program = out.path().join("remote_memory");
    let mut compile = Command::new("cc");
    compile.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-D_POSIX_C_SOURCE=200809L"]);
    compile.arg("-I").arg(folder().join("include")).arg(folder().join("examples/remote_memory.c"));
    compile.arg(library()).args(["-lpthread", "-ldl", "-lm", "-o"]).arg(&program);
    let compiled = compile.output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let ran = Command::new(&program).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    assert_eq!(ran.stdout, b"the same bytes there and here\n");
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
        ];
        assert_eq!(refused, [-1; 7]);
        byway::byway_node_close(null_mut());
        byway::byway_op_free(null_mut());
        byway::byway_message_free(null_mut());
        byway::byway_memory_free(null_mut());
        for code in -20..3 {
            assert!(!std::ffi::CStr::from_ptr(byway::byway_error_text(code)).is_empty());
        }
    }
}
