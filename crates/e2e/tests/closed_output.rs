//! Commands whose reader has gone, as in `byway bench volume ... | head -1`.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use byway_e2e::{Server, binary, run_well};

/// A pipe that nobody reads.
fn closed_pipe() -> Stdio {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    writer.into()
}

#[test]
fn a_closed_output_is_neither_a_panic_nor_a_failure() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::File::create(at("larger")).unwrap().set_len(8192).unwrap();
    let larger = format!("larger={}", at("larger"));
    let ctl = at("ctl");
    let arguments =
        ["--volume", "m=mem:4096", "--volume", &larger, "--listen", "tcp://127.0.0.1:0", "--control-socket", &ctl];
    let server = Server::start(folder.path(), 2, &arguments);
    let uri = |name: &str| format!("byway://127.0.0.1:{}/{name}", server.port("byway"));
    let (node, volume, copy, none) = (uri(""), uri("m"), at("copy"), uri("none"));
    let grown = uri("larger");
    let well: &[&[&str]] = &[
        &["--help"],
        &["completions", "bash"],
        &["doctor"],
        &["ls", &node],
        &["info", &volume],
        &["bench", "volume", &volume, "--seconds", "1"],
        &["bench", "volume", &volume, "--seconds", "1", "--json"],
        // Tells on standard error that the destination is larger.
        &["copy", &volume, &grown, "--resume", &at("resume")],
        &["copy", &volume, &copy],
        &["ctl", "--control-socket", &ctl, "status"],
        &["demo", "--size", "1M"],
    ];
    for arguments in well {
        let mut command = Command::new(binary());
        let output = command.args(*arguments).stdin(Stdio::null()).stdout(closed_pipe()).stderr(Stdio::piped());
        let output = output.output().expect("byway starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !said.contains("panicked"), "{arguments:?}: {}: {said}", output.status);
    }
    // An error that nobody reads is still one, and no more.
    for (arguments, code) in [(&["ls", &none][..], 1), (&["copy", &volume, &grown, "--resume", &at("resume")], 0)] {
        let mut command = Command::new(binary());
        let ended = command.args(arguments).stdin(Stdio::null()).stdout(closed_pipe()).stderr(closed_pipe()).status();
        assert_eq!(ended.expect("byway starts").code(), Some(code), "{arguments:?}");
    }
}

#[test]
fn a_full_disk_behind_the_output_is_said() {
    let full = std::fs::File::options().write(true).open("/dev/full").expect("Linux has it");
    let output =
        Command::new(binary()).args(["doctor"]).stdout(full).stderr(Stdio::piped()).output().expect("byway starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("standard output") && !said.contains("panicked"), "{said}");
}

#[test]
fn a_node_whose_log_nobody_reads_goes_on_serving() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let socket = folder.path().join("byway.sock").display().to_string();
    let mut command = Command::new(binary());
    command.env("RUST_LOG", "debug").args(["serve", "--volume", "m=mem:1M", "--listen", &format!("unix://{socket}")]);
    let mut node = command.stdout(Stdio::piped()).stderr(closed_pipe()).spawn().expect("byway starts");
    let mut ready = String::new();
    BufReader::new(node.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    assert!(ready.starts_with("ready"), "{ready}");
    // Each logs lines at that level.
    for _ in 0..3 {
        run_well(&binary(), &["ls", &format!("byway+unix:///?socket={socket}")]);
    }
    assert!(node.try_wait().unwrap().is_none(), "it serves on");
    node.kill().unwrap();
    node.wait().unwrap();
}
