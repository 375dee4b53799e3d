//! Jobs in which something fails: how they end, what they say, and what stays.

mod harness;

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use byway_dsm::launch::{JobEnd, Launch, Running, Stream};
use byway_dsm::{Consistency, Wire};
use byway_fabric::random::Random;
use byway_skip::{SkipReason, skip_this};
use rustix::process::{Pid, Signal, kill_process};

use harness::{WIRES, can_run, example, launch, run};

const DEADLINE: Duration = Duration::from_secs(60);

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

/// Whether a process has joined its job: it has sessions with all others then.
fn has_joined(pid: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut names = tasks.map(|task| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default());
    names.any(|name| name.contains("dsm-pager"))
}

fn lives(pid: u32) -> bool {
    let mut status = String::new();
    let opened = std::fs::File::open(format!("/proc/{pid}/stat")).and_then(|mut stat| stat.read_to_string(&mut status));
    opened.is_ok() && !status.contains(") Z ")
}

/// The value of a variable in a process's environment.
fn variable_of(pid: u32, name: &str) -> Option<String> {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
    let environment = String::from_utf8_lossy(&environment).into_owned();
    environment.split('\0').find_map(|word| Some(word.strip_prefix(name)?.strip_prefix('=')?.to_owned()))
}

/// What a job could leave on this machine: processes with its number, its folder, and sockets in that. Its memory has no name, and ends with
/// the processes.
struct Traces {
    job: String,
    folder: String,
}

impl Traces {
    fn of(pid: u32) -> Self {
        let variable = |name| variable_of(pid, name).unwrap();
        Self { job: variable("BYWAY_DSM_JOB"), folder: variable("BYWAY_DSM_FOLDER") }
    }

    fn left(&self) -> Vec<String> {
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let is_of_job = |pid: &u32| lives(*pid) && variable_of(*pid, "BYWAY_DSM_JOB").as_ref() == Some(&self.job);
        let mut left: Vec<String> = pids.filter(is_of_job).map(|pid| format!("process {pid}")).collect();
        if Path::new(&self.folder).exists() {
            left.push(format!("folder {}", self.folder));
        }
        let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
        left.extend(sockets.lines().filter(|line| line.contains(&self.folder)).map(|line| format!("socket {line}")));
        left
    }
}

/// Sends a signal to a process of a job, some time after all have joined. Gives the job's end and what its processes said. A job that has not ended
/// within [`DEADLINE`] is stopped, and is [`JobEnd::Stopped`] then.
fn disturb(job: &Launch, victim: usize, after: Duration, signal: Signal) -> (JobEnd, Vec<(usize, String)>) {
    let running: Running = job.start().unwrap();
    let pids = running.pids().to_vec();
    let pid = Pid::from_raw(pids[victim] as i32).unwrap();
    let all = pids.clone();
    let (stopper, has_ended) = (running.stopper(), Arc::new(AtomicBool::new(false)));
    let ended = Arc::clone(&has_ended);
    let killer = std::thread::spawn(move || {
        wait_for("the processes never join", || all.iter().all(|pid| has_joined(*pid)));
        let at = Instant::now() + after;
        wait_for("time stands still", || Instant::now() >= at);
        let traces = Traces::of(all[victim]);
        kill_process(pid, signal).unwrap();
        let until = Instant::now() + DEADLINE;
        while !ended.load(Ordering::Acquire) {
            if Instant::now() >= until {
                stopper.stop();
                break;
            }
            std::thread::park_timeout(until - Instant::now());
        }
        traces
    });
    let mut lines = Vec::new();
    let end = running.wait(|rank, stream, line| {
        if stream == Stream::Error {
            lines.push((rank, String::from_utf8_lossy(line).into_owned()));
        }
    });
    has_ended.store(true, Ordering::Release);
    killer.thread().unpark();
    let traces = killer.join().unwrap();
    assert!(!pids.iter().any(|pid| lives(*pid)), "a process is left");
    assert_eq!(traces.left(), Vec::<String>::new(), "the job leaves something");
    (end, lines)
}

/// Every other process says what happened to the victim.
fn assert_named(lines: &[(usize, String)], ranks: usize, victim: usize, what: &str) {
    for rank in (0..ranks).filter(|rank| *rank != victim) {
        let text = format!("rank {rank}: rank {victim} {what}");
        assert!(lines.iter().any(|line| line.0 == rank && line.1.contains(&text)), "no line has {text:?}: {lines:?}");
    }
}

/// A process is killed at 12 moments that chance gives, 200 with `BYWAY_LONG`: while it computes, in faults, fetches and fences, at barriers and locks.
#[test]
fn a_job_ends_by_name_when_a_process_is_killed_at_any_moment() {
    if !can_run() {
        return;
    }
    let times = if std::env::var_os("BYWAY_LONG").is_some() { 200 } else { 12 };
    let mut random = Random::from_kernel();
    for time in 0..times {
        let chance = random.bytes16();
        let (ranks, wire) = (2 + usize::from(chance[0] % 3), WIRES[time % WIRES.len()]);
        let (victim, after) = (usize::from(chance[1]) % ranks, Duration::from_micros(u64::from(chance[2]) * 200));
        // Long enough that none ends by itself.
        let programs: [(&str, &[&str]); 5] = [
            ("sor", &["100", "100000000"]),
            ("sharing", &["100000000", "4"]),
            ("litmus", &["100000000", "SB"]),
            ("trouble", &["queue"]),
            ("fetches", &["striped", "100000000"]),
        ];
        let consistency = [Consistency::Sequential, Consistency::Release][time / WIRES.len() % 2];
        let (name, arguments) = programs[time % programs.len()];
        let job = Launch { consistency, ..launch(ranks, wire, name, arguments) };
        let (end, lines) = disturb(&job, victim, after, Signal::KILL);
        let case = format!("{name}, {consistency:?}, {wire:?}, rank {victim} of {ranks} after {after:?}");
        let JobEnd::Failed { rank, status } = end else { panic!("{case}: {end:?}, {lines:?}") };
        assert_eq!((rank, status.signal()), (victim, Some(9)), "{case}");
        assert_named(&lines, ranks, victim, "has gone");
    }
}

fn with_each_consistency() -> impl Iterator<Item = (Wire, Consistency)> {
    WIRES.into_iter().flat_map(|wire| [(wire, Consistency::Sequential), (wire, Consistency::Release)])
}

/// Others wait for the lock that it has.
#[test]
fn a_job_ends_by_name_when_the_holder_of_a_lock_is_killed() {
    if !can_run() {
        return;
    }
    for (wire, consistency) in with_each_consistency() {
        let (end, lines) = run(&Launch { consistency, ..launch(3, wire, "trouble", &["holder"]) });
        let JobEnd::Failed { rank, status } = end else { panic!("{consistency:?}, {wire:?}: {end:?}, {lines:?}") };
        assert_eq!((rank, status.signal()), (1, Some(9)), "{consistency:?}, {wire:?}");
        assert_named(&lines, 3, 1, "has gone");
    }
}

/// The others have some of its pages by then, and wait for one that a device has pinned there.
#[test]
fn a_job_ends_by_name_when_an_owner_is_killed_in_the_middle_of_a_fetch() {
    if !can_run() {
        return;
    }
    for (wire, consistency) in with_each_consistency() {
        let (end, lines) = run(&Launch { consistency, ..launch(3, wire, "fetches", &["torn"]) });
        let JobEnd::Failed { rank, status } = end else { panic!("{consistency:?}, {wire:?}: {end:?}, {lines:?}") };
        assert_eq!((rank, status.signal()), (1, Some(9)), "{consistency:?}, {wire:?}: {lines:?}");
        assert_named(&lines, 3, 1, "has gone");
    }
}

#[test]
fn a_job_ends_by_name_when_a_process_is_stopped() {
    if !can_run() {
        return;
    }
    for wire in [Wire::Shm, Wire::Tcp] {
        let keep_alive = Duration::from_secs(2);
        let job = Launch { keep_alive, ..launch(3, wire, "sor", &["100", "100000000"]) };
        let (end, lines) = disturb(&job, 1, Duration::from_millis(20), Signal::STOP);
        assert_eq!(end, JobEnd::Hung { rank: 1 }, "{wire:?}: {lines:?}");
        assert_named(&lines, 3, 1, "has been silent for");
        // By the clock of the process that waits: the test's has the end of the job in it, on a machine that may be busy.
        let silence = |line: &str| line.split("has been silent for ").nth(1)?.split(' ').next()?.parse().ok();
        let silences: Vec<u64> = lines.iter().filter_map(|(_, line)| silence(line)).collect();
        assert!(silences.iter().all(|seconds| *seconds <= 2 * keep_alive.as_secs()), "{wire:?}: {lines:?}");
    }
}

#[test]
fn a_process_that_ends_without_leaving_is_named() {
    if !can_run() {
        return;
    }
    let (end, lines) = run(&launch(3, WIRES[0], "trouble", &["leave"]));
    assert_eq!(end, JobEnd::Left { rank: 1 }, "{lines:?}");
}

#[test]
fn children_of_a_process_end_with_the_job() {
    if !can_run() {
        return;
    }
    let (end, lines) = run(&launch(2, WIRES[0], "trouble", &["child"]));
    let JobEnd::Failed { rank: 1, status } = end else { panic!("{end:?}: {lines:?}") };
    assert_eq!(status.code(), Some(3));
    let child = lines.iter().find_map(|(_, line)| line.strip_prefix("child ")?.parse().ok()).unwrap();
    wait_for("the child of a process still runs", || !Path::new(&format!("/proc/{child}")).exists() || !lives(child));
}

#[test]
fn children_in_sessions_of_their_own_end_with_the_job() {
    if !can_run() {
        return;
    }
    if std::process::Command::new("setsid").arg("--version").output().is_err() {
        return skip_this(SkipReason::MissingTool("setsid"));
    }
    let (end, lines) = run(&launch(2, WIRES[0], "trouble", &["daemon"]));
    assert_eq!(end, JobEnd::Well, "{lines:?}");
    let child = lines.iter().find_map(|(_, line)| line.strip_prefix("child ")?.parse().ok()).unwrap();
    wait_for("a child in a session of its own still runs", || !lives(child));
}

#[test]
fn a_forked_child_has_no_part_in_the_job_and_takes_nothing_from_it() {
    if !can_run() {
        return;
    }
    let (end, lines) = run(&launch(2, WIRES[0], "trouble", &["fork"]));
    assert_eq!(end, JobEnd::Well, "{lines:?}");
}

/// A launcher that is killed removes nothing, so there must be nothing.
#[test]
fn a_job_that_runs_has_nothing_in_the_file_system() {
    if !can_run() {
        return;
    }
    for wire in WIRES {
        let running = launch(2, wire, "trouble", &["steps"]).start().unwrap();
        let (pid, stopper) = (running.pids()[0], running.stopper());
        let (mut folder, mut is_there, deadline) = (None, true, Instant::now() + DEADLINE);
        let end = running.wait(|_, _, _| {
            if folder.is_none() {
                let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
                let environment = String::from_utf8_lossy(&environment).into_owned();
                let of_job = environment.split('\0').find_map(|word| word.strip_prefix("BYWAY_DSM_FOLDER="));
                folder = Some(std::path::PathBuf::from(of_job.unwrap()));
            }
            // Rank 0 removes it before its first step, and another may be ahead.
            is_there &= folder.as_ref().is_some_and(|folder| folder.exists());
            if !is_there || Instant::now() >= deadline {
                stopper.stop();
            }
        });
        assert_eq!((end, is_there), (JobEnd::Stopped, false), "{wire:?}: {folder:?}");
    }
}

#[test]
fn what_a_process_lacks_is_named_before_the_job_begins() {
    if !can_run() {
        return;
    }
    for (program, what) in [
        ("address", "addresses from 0x100000000000 on are in use in this process"),
        ("refused", "shared memory needs userfaultfd with UFFDIO_MOVE (Linux 6.8): "),
    ] {
        let (end, lines) = run(&launch(2, WIRES[0], "trouble", &[program]));
        let JobEnd::Failed { rank: 1, status } = end else { panic!("{program}: {end:?}: {lines:?}") };
        assert_eq!(status.code(), Some(1), "{program}: {lines:?}");
        assert!(lines.iter().any(|(rank, line)| *rank == 1 && line.contains(what)), "{program}: {lines:?}");
    }
}

#[test]
fn segments_of_other_sizes_and_beyond_the_limit_are_refused() {
    if !can_run() {
        return;
    }
    let (end, lines) = run(&launch(2, WIRES[0], "trouble", &["sizes"]));
    assert_eq!(end, JobEnd::Well, "{lines:?}");
    let said = |what: &str| lines.iter().filter(|(_, line)| line.contains(what)).count();
    assert_eq!((said("give all ranks the same size"), said("no room for the segment")), (1, 2), "{lines:?}");
}

/// A job locks no memory: it needs no part of `ulimit -l`.
#[test]
fn a_job_runs_without_the_right_to_lock_memory() {
    if !can_run() {
        return;
    }
    if std::process::Command::new("setpriv").arg("--version").output().is_err() {
        return skip_this(SkipReason::MissingTool("setpriv"));
    }
    let script = format!("ulimit -l 0; exec setpriv --bounding-set=-ipc_lock {} 64 2", example("sor").display());
    for wire in WIRES {
        let job = Launch { wire, arguments: vec!["-c".into(), script.clone().into()], ..Launch::new(2, "sh") };
        let (end, lines) = run(&job);
        assert_eq!(end, JobEnd::Well, "{wire:?}: {lines:?}");
    }
}

#[test]
fn a_process_that_prints_without_end_is_killed_with_its_job() {
    let script = "[ $BYWAY_DSM_RANK = 1 ] && exit 3; exec yes";
    let job = Launch { arguments: vec!["-c".into(), script.into()], ..Launch::new(2, "sh") };
    let mut lines = 0_u64;
    let end = job.start().unwrap().wait(|_, _, _| {
        lines += 1;
        // The pipe is never empty: the reader is slower than the process.
        (0..20).for_each(|_| std::thread::yield_now());
    });
    let JobEnd::Failed { rank: 1, status } = end else { panic!("{end:?}") };
    assert_eq!(status.code(), Some(3));
    assert!(lines > 0);
}

#[test]
fn an_access_beyond_a_segment_ends_the_process_by_sigsegv() {
    if !can_run() {
        return;
    }
    for place in ["behind", "between"] {
        let (end, lines) = run(&launch(2, WIRES[0], "trouble", &[place]));
        let JobEnd::Failed { rank: 0, status } = end else { panic!("{end:?}: {lines:?}") };
        assert_eq!(status.signal(), Some(11), "{lines:?}");
    }
}

#[test]
fn pages_that_the_program_drops_end_the_job_by_name() {
    if !can_run() {
        return;
    }
    let (end, lines) = run(&launch(2, WIRES[0], "trouble", &["drop"]));
    assert!(matches!(end, JobEnd::Failed { .. }), "{end:?}: {lines:?}");
    assert!(lines.iter().any(|(rank, line)| *rank == 0 && line.contains("the program has dropped it")), "{lines:?}");
}

#[test]
fn what_a_ring_receives_into_a_page_that_is_asked_for_is_kept() {
    if !can_run() {
        return;
    }
    for wire in WIRES {
        let (end, lines) = run(&launch(2, wire, "trouble", &["pin"]));
        assert_eq!(end, JobEnd::Well, "{wire:?}: {lines:?}");
    }
}

#[test]
fn strangers_at_the_start_are_turned_away() {
    if !can_run() {
        return;
    }
    for wire in WIRES {
        let (end, lines) = run(&launch(3, wire, "trouble", &["stranger"]));
        assert_eq!(end, JobEnd::Well, "{wire:?}: {lines:?}");
    }
}

#[test]
fn processes_with_other_options_do_not_join() {
    if !can_run() {
        return;
    }
    let sor = example("sor");
    for other in ["BYWAY_DSM_CONSISTENCY=rc", "BYWAY_DSM_BYTES=8192000"] {
        let script = format!("[ $BYWAY_DSM_RANK = 1 ] && export {other}; exec {} 64 2", sor.display());
        let job = Launch { arguments: vec!["-c".into(), script.into()], ..Launch::new(2, "sh") };
        let (end, lines) = run(&job);
        assert!(matches!(end, JobEnd::Failed { .. }), "{other}: {end:?}: {lines:?}");
        assert!(lines.iter().any(|(_, line)| line.contains("was started with another --consistency")), "{lines:?}");
    }
}

#[test]
fn the_pager_leaves_signals_to_the_program() {
    if !can_run() {
        return;
    }
    let (end, lines) = run(&launch(1, WIRES[0], "trouble", &["signals"]));
    assert_eq!(end, JobEnd::Well, "{lines:?}");
}
