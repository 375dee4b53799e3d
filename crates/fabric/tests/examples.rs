//! The examples, as their first lines say to run them.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

/// Examples are built with the tests, into a folder beside theirs.
fn example(name: &str) -> Command {
    let mut path: PathBuf = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    Command::new(path.join("examples").join(name))
}

/// Starts one that says where it listens.
fn listening(command: &mut Command) -> (Child, String, BufReader<ChildStdout>) {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    let address = line.trim().split_once(" at ").unwrap().1.to_owned();
    (child, address, output)
}

fn said(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn echo() {
    let (mut server, address, _output) = listening(example("echo").args(["listen", "tcp://127.0.0.1:0"]));
    assert_eq!(said(example("echo").args(["say", &address, "hello"])), "hello\n");
    assert!(server.wait().unwrap().success());
}

#[test]
fn remote_memory() {
    let folder = tempfile::tempdir().unwrap();
    let address = format!("shm://{}", folder.path().join("lender").display());
    for address in ["tcp://127.0.0.1:0", &address] {
        let arguments = ["lend", address, "3000000"];
        let (mut server, address, mut output) = listening(example("remote_memory").args(arguments));
        let said = said(example("remote_memory").args(["use", &address]));
        assert_eq!(said, "3000000 bytes there and back: the same\n");
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        assert_eq!(line, "3000000 bytes are other than before\n");
        assert!(server.wait().unwrap().success());
    }
}
