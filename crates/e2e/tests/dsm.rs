//! `byway dsm run`: rank prefixes of the output, exit status, signals; `byway dsm top`. `crates/dsm/tests/jobs.rs` tests the memory of jobs.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use byway_e2e::far::compiled_with_byway;
use byway_e2e::{LIMIT, binary, run_well, until};
use byway_reactor::userfault::{Features, Userfault};
use byway_skip::{SkipReason, skip_this};
use rustix::process::{Pid, Signal, kill_process};

fn run(n: &str, script: &str) -> Output {
    Command::new(binary()).args(["dsm", "run", "-n", n, "--", "sh", "-c", script]).output().unwrap()
}

/// A launcher that ends with this, and its folder of temporary files: one that is killed before its processes have joined leaves something there.
struct Launcher(Child, Arc<tempfile::TempDir>);

impl Drop for Launcher {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_report_says_of_which_processes_it_knows_nothing_and_leaves_their_lines_alone() {
    let mut command = Command::new(binary());
    command.args(["dsm", "run", "-n", "2", "--report", "--", "sh", "-c", "echo said >&2"]);
    let output = command.output().unwrap();
    assert!(output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    for rank in 0..2 {
        assert!(said.contains(&format!("[{rank}] said\n")), "{said}");
        assert!(said.contains(&format!("   {rank}  has told nothing")), "{said}");
    }
}

/// Starts a job of two processes that run a script.
fn start(script: &str) -> Launcher {
    start_in(&Arc::new(tempfile::tempdir().unwrap()), script)
}

fn start_in(folder: &Arc<tempfile::TempDir>, script: &str) -> Launcher {
    let mut command = Command::new(binary());
    command.args(["dsm", "run", "-n", "2", "--", "sh", "-c", script]).stdout(Stdio::piped());
    Launcher(command.env("TMPDIR", folder.path()).spawn().unwrap(), Arc::clone(folder))
}

/// The numbers that the two processes of a job print first.
fn pids(job: &mut Launcher) -> Vec<i32> {
    let lines = BufReader::new(job.0.stdout.take().unwrap()).lines().take(2);
    lines.map(|line| line.unwrap().split_once(' ').unwrap().1.parse().unwrap()).collect()
}

/// The letter that the kernel has for a process's state; Z too if there is none.
fn state(pid: i32) -> char {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).unwrap_or('Z')
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
    let mut job = start("echo $$; exec sleep 1000");
    let pids = pids(&mut job);
    kill_process(Pid::from_child(&job.0), Signal::TERM).unwrap();
    assert_eq!(job.0.wait().unwrap().code(), Some(130));
    for pid in pids {
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "process {pid} is left");
    }
}

/// The launcher's own end takes the processes with it, however it ends.
#[test]
fn a_launcher_that_is_killed_leaves_no_process() {
    let mut job = start("echo $$; exec sleep 1000");
    let pids = pids(&mut job);
    job.0.kill().unwrap();
    job.0.wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while pids.iter().any(|pid| state(*pid) != 'Z') {
        assert!(Instant::now() < deadline, "a process is left");
        std::thread::yield_now();
    }
}

#[test]
fn the_folder_of_a_killed_launcher_is_removed_by_the_next_and_that_of_a_living_one_is_not() {
    let mut killed = start("echo $$; exec sleep 1000");
    let mut living = start_in(&killed.1, "echo $$; exec sleep 1000");
    for job in [&mut killed, &mut living] {
        pids(job);
    }
    let folders = || std::fs::read_dir(living.1.path()).unwrap().count();
    killed.0.kill().unwrap();
    killed.0.wait().unwrap();
    assert_eq!(folders(), 2);
    assert!(start_in(&living.1, "true").0.wait().unwrap().success());
    assert_eq!(folders(), 1);
    kill_process(Pid::from_child(&living.0), Signal::TERM).unwrap();
    assert_eq!(living.0.wait().unwrap().code(), Some(130));
    assert_eq!(std::fs::read_dir(killed.1.path()).unwrap().count(), 0);
}

/// As a shell's user does it by Ctrl-Z and `fg`.
#[test]
fn a_job_is_suspended_and_goes_on_as_a_whole() {
    let mut job = start("echo $$; exec sleep 1000");
    let mut all = pids(&mut job);
    all.push(job.0.id() as i32);
    let wait_until = |is_stopped: bool| {
        let deadline = Instant::now() + Duration::from_secs(60);
        while all.iter().any(|pid| (state(*pid) == 'T') != is_stopped) {
            assert!(Instant::now() < deadline, "stopped: {:?}", all.iter().map(|pid| state(*pid)).collect::<Vec<_>>());
            std::thread::yield_now();
        }
    };
    let launcher = Pid::from_child(&job.0);
    for _ in 0..2 {
        kill_process(launcher, Signal::TSTP).unwrap();
        wait_until(true);
        kill_process(launcher, Signal::CONT).unwrap();
        wait_until(false);
    }
    kill_process(launcher, Signal::TERM).unwrap();
    assert_eq!(job.0.wait().unwrap().code(), Some(130));
}

/// Two processes store to words of one page again and again.
const STORES: &str = r#"#define _DEFAULT_SOURCE
#include <stdio.h>
#include <unistd.h>
#include "byway.h"

int main(void) {
    struct byway_dsm_job *job;
    uint8_t *at;
    if (byway_dsm_init(&job) < 0 || byway_dsm_segment(job, "counters", 4096, &at) < 0) return 1;
    volatile uint64_t *counter = (volatile uint64_t *)at + byway_dsm_rank(job);
    if (byway_dsm_name(job, at, 16, "both") < 0 || byway_dsm_barrier(job, 0) < 0) return 1;
    printf("%d\n", (int)getpid());
    fflush(stdout);
    for (;;) {
        *counter += 1;
        usleep(1000);
    }
}
"#;

#[test]
fn a_running_job_is_shown_with_its_faults_and_the_page_to_which_its_processes_store() {
    if Userfault::open(Features::WRITE_PROTECT.and(Features::MOVE), true).is_err() {
        let why = "the kernel refuses userfaultfd with write protection and moves of pages";
        return skip_this(SkipReason::Machine(why));
    }
    let folder = Arc::new(tempfile::tempdir().unwrap());
    let source = folder.path().join("stores.c");
    std::fs::write(&source, STORES).unwrap();
    let Some(program) = compiled_with_byway(&source, folder.path()) else { return };
    let mut command = Command::new(binary());
    command.args(["dsm", "run", "-n", "2", "--"]).arg(program).stdout(Stdio::piped());
    let mut job = Launcher(command.spawn().unwrap(), folder);
    let ranks = pids(&mut job);
    for process in [job.0.id().to_string(), ranks[0].to_string()] {
        until(Instant::now() + LIMIT, "faults of both processes", || {
            let text = run_well(&binary(), &["dsm", "top", &process]);
            assert!(text.starts_with("2 of 2 processes of the job answer; rates of the last "), "{text}");
            let rows = text.lines().skip(2).take(2);
            let faults = rows.map(|row| {
                let words: Vec<u64> = row.split_whitespace().take(4).map(|word| word.parse().unwrap()).collect();
                assert!(ranks.contains(&(words[1] as i32)), "{text}");
                words[2] + words[3]
            });
            let all_fault = faults.filter(|faults| *faults > 0).count() == 2;
            (all_fault && text.contains("  0,1        counters+0x0  both\n")).then_some(())
        });
    }
    job.0.kill().unwrap();
    job.0.wait().unwrap();
    let ended = job.0.id().to_string();
    let refused = Command::new(binary()).args(["dsm", "top", &ended]).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("process {ended} is not of a job of byway dsm run")), "{said}");
}

#[test]
fn what_cannot_be_started_is_named() {
    let output = Command::new(binary()).args(["dsm", "run", "-n", "2", "--", "/no/such/program"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/no/such/program: No such file"));
    let output = Command::new(binary()).args(["dsm", "run", "-n", "65", "--", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}
