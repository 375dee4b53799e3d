//! Jobs of real processes, started as `byway dsm run` starts them.

use std::path::PathBuf;

use byway_dsm::Wire;
use byway_dsm::launch::{JobEnd, Launch, Stream};
use byway_skip::{SkipReason, skip_this};

/// An example of this crate, built beside the tests.
fn example(name: &str) -> PathBuf {
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    path.join("examples").join(name)
}

/// Whether this machine has what a job needs; says so if not.
fn can_run() -> bool {
    use byway_reactor::userfault::{Features, Userfault};
    let opened = Userfault::open(Features::MINOR_SHARED.and(Features::WRITE_PROTECT_SHARED), true);
    if opened.is_err() {
        skip_this(SkipReason::Machine("the kernel refuses userfaultfd with write protection of shared memory"));
    }
    opened.is_ok()
}

fn launch(ranks: usize, wire: Wire, name: &str, arguments: &[&str]) -> Launch {
    let arguments = arguments.iter().map(Into::into).collect();
    Launch { wire, arguments, ..Launch::new(ranks, example(name)) }
}

/// Runs a job to its end: how it ended, and the lines that it printed with their ranks.
fn run(job: &Launch) -> (JobEnd, Vec<(usize, String)>) {
    let mut lines = Vec::new();
    let end = job.start().unwrap().wait(|rank, _, line| lines.push((rank, String::from_utf8_lossy(line).into_owned())));
    (end, lines)
}

const WIRES: [Wire; 3] = [Wire::Shm, Wire::Unix, Wire::Tcp];

#[test]
fn matrices_are_multiplied_right() {
    if !can_run() {
        return;
    }
    for wire in WIRES {
        for ranks in [1, 2, 4] {
            let (end, lines) = run(&launch(ranks, wire, "matrix", &["96"]));
            assert_eq!(end, JobEnd::Well, "{wire:?}, {ranks} processes: {lines:?}");
            let right = format!("product of 96 x 96 right on {ranks} processes");
            assert!(lines.iter().any(|(rank, line)| *rank == 0 && line.starts_with(&right)), "{lines:?}");
        }
    }
}

#[test]
fn a_grid_is_relaxed_right() {
    if !can_run() {
        return;
    }
    for wire in WIRES {
        for ranks in [2, 4] {
            let (end, lines) = run(&launch(ranks, wire, "sor", &["100", "8"]));
            assert_eq!(end, JobEnd::Well, "{wire:?}, {ranks} processes: {lines:?}");
            let right = format!("grid of 100 x 100 right after 8 steps on {ranks} processes");
            assert!(lines.iter().any(|(rank, line)| *rank == 0 && line.starts_with(&right)), "{lines:?}");
        }
    }
}

#[test]
fn a_job_ends_by_name_when_a_process_is_killed() {
    if !can_run() {
        return;
    }
    for wire in WIRES {
        // Long enough that it never ends by itself.
        let running = launch(3, wire, "sor", &["200", "100000000"]).start().unwrap();
        let victim = rustix::process::Pid::from_raw(running.pids()[1] as i32).unwrap();
        // It is killed when it is in the midst: at the barriers of the first steps.
        let killer = std::thread::spawn(move || {
            let started = |text: &str| text.contains("dsm-pager");
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
            let tasks = format!("/proc/{}/task", victim.as_raw_nonzero());
            let runs = || {
                let names = std::fs::read_dir(&tasks).into_iter().flatten().flatten();
                names
                    .map(|task| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default())
                    .any(|name| started(&name))
            };
            while !runs() {
                assert!(std::time::Instant::now() < deadline, "the process never has a pager");
                std::thread::yield_now();
            }
            rustix::process::kill_process(victim, rustix::process::Signal::KILL).unwrap();
        });
        let pids = running.pids().to_vec();
        let mut lines = Vec::new();
        let end = running.wait(|rank, stream, line| {
            lines.push((rank, stream, String::from_utf8_lossy(line).into_owned()));
        });
        killer.join().unwrap();
        let JobEnd::Failed { rank: 1, status } = end else { panic!("{wire:?}: {end:?}, {lines:?}") };
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
        for rank in [0, 2] {
            let named = |line: &&(usize, Stream, String)| line.0 == rank && line.2.contains("has gone");
            assert!(lines.iter().any(|line| named(&line)), "{wire:?}: rank {rank} says nothing: {lines:?}");
        }
        assert!(pids.iter().all(|pid| !std::path::Path::new(&format!("/proc/{pid}")).exists()), "a process is left");
    }
}

#[test]
fn faults_locks_and_barriers_are_timed() {
    if !can_run() {
        return;
    }
    for wire in WIRES {
        let (end, lines) = run(&launch(2, wire, "latency", &["50"]));
        assert_eq!((end, lines.len()), (JobEnd::Well, 6), "{wire:?}: {lines:?}");
    }
}

/// The litmus programs on real processes: 10,000 rounds over shared memory and 2,000 over TCP, a hundred times as many with
/// `BYWAY_LONG`. SB is run with fences, since an x86 processor's store buffer may show without.
#[test]
fn litmus_programs_show_no_forbidden_outcome() {
    if !can_run() {
        return;
    }
    let times = if std::env::var_os("BYWAY_LONG").is_some() { 100 } else { 1 };
    for (wire, rounds) in [(Wire::Shm, 10_000), (Wire::Tcp, 2_000)] {
        let (end, lines) = run(&launch(2, wire, "litmus", &[&(times * rounds).to_string()]));
        assert_eq!(end, JobEnd::Well, "{wire:?}: {lines:?}");
        for name in ["MP", "SB with fences", "LB", "CoRR", "lock"] {
            let line = lines.iter().find(|(_, line)| line.starts_with(&format!("{name}: ")));
            assert!(line.is_some_and(|(_, line)| line.ends_with("none forbidden")), "{wire:?}, {name}: {lines:?}");
        }
    }
}

#[test]
fn a_program_without_a_job_says_how_to_start_it() {
    let alone = std::process::Command::new(example("sor")).env_remove("BYWAY_DSM_RANK").output().unwrap();
    assert!(!alone.status.success());
    let said = String::from_utf8_lossy(&alone.stderr);
    assert!(said.contains("byway dsm run"), "{said}");
}
