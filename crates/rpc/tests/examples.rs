//! The example, as its first line says to run it.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

#[test]
fn file_server() {
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    let program = path.join("examples/file_server");
    let folder = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..2_500_000u32).map(|at| (at % 253) as u8).collect();
    std::fs::write(folder.path().join("file"), &bytes).unwrap();
    std::fs::write(folder.path().join("empty"), []).unwrap();
    let mut serve = Command::new(&program);
    serve.args(["serve", "tcp://127.0.0.1:0"]).arg(folder.path()).stdout(Stdio::piped());
    let mut server = serve.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().split_once(" at ").unwrap().1;
    let fetch = |name: &str| Command::new(&program).args(["fetch", address, name]).output().unwrap();
    assert!(fetch("file").stdout == bytes, "the file's bytes");
    assert!(fetch("empty").status.success());
    for name in ["missing", "../file", "/etc/passwd"] {
        let fetched = fetch(name);
        assert!(!fetched.status.success() && fetched.stdout.is_empty(), "{name}");
        let said = String::from_utf8_lossy(&fetched.stderr);
        assert!(said.contains(&format!("no file {name}")), "{said}");
    }
    server.kill().unwrap();
    server.wait().unwrap();
}
