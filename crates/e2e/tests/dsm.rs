//! `byway dsm run`: rank prefixes of the output, exit status, signals. `crates/dsm/tests/jobs.rs` tests the memory of jobs.

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use byway_e2e::binary;
use rustix::process::{Pid, Signal, kill_process};

fn run(n: &str, script: &str) -> Output {
    Command::new(binary()).args(["dsm", "run", "-n", n, "--", "sh", "-c", script]).output().unwrap()
}

#[test]
fn each_line_has_its_rank() {
    let output = run("3", "echo one of $BYWAY_DSM_RANKS; echo two >&2");
    assert!(output.status.success());
    let sorted = |bytes: &[u8]| {
        let mut lines: Vec<_> = String::from_utf8_lossy(bytes).lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted(&output.stdout), ["[0] one of 3", "[1] one of 3", "[2] one of 3"]);
    assert_eq!(sorted(&output.stderr), ["[0] two", "[1] two", "[2] two"]);
}

#[test]
fn the_first_failure_is_the_jobs_status() {
    let output = run("2", "[ $BYWAY_DSM_RANK = 0 ] || exit 7; exec sleep 1000");
    assert_eq!(output.status.code(), Some(7));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("rank 1 ended with status 7, and with it the job"), "{said}");
    let output = run("2", "[ $BYWAY_DSM_RANK = 0 ] || kill -KILL $$; exec sleep 1000");
    assert_eq!(output.status.code(), Some(137));
    assert!(String::from_utf8_lossy(&output.stderr).contains("rank 1 was killed by signal 9"));
}

#[test]
fn a_signal_stops_all_processes() {
    let mut command = Command::new(binary());
    command.args(["dsm", "run", "-n", "2", "--", "sh", "-c", "echo $$; exec sleep 1000"]).stdout(Stdio::piped());
    let mut job = command.spawn().unwrap();
    let lines = BufReader::new(job.stdout.take().unwrap()).lines().take(2);
    let pids: Vec<String> = lines.map(|line| line.unwrap().split_once(' ').unwrap().1.to_owned()).collect();
    kill_process(Pid::from_child(&job), Signal::TERM).unwrap();
    assert_eq!(job.wait().unwrap().code(), Some(130));
    for pid in pids {
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "process {pid} is left");
    }
}

#[test]
fn what_cannot_be_started_is_named() {
    let output = Command::new(binary()).args(["dsm", "run", "-n", "2", "--", "/no/such/program"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/no/such/program: No such file"));
    let output = Command::new(binary()).args(["dsm", "run", "-n", "65", "--", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}
