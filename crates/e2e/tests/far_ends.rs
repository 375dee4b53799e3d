//! Ends and faults of `byway far`: whichever process is killed, no program reads a page that is not its own.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use byway_e2e::far::{Lender, PagedProgram, can_page, command, compiled, far, python};
use byway_e2e::{LIMIT, until};
use byway_skip::{SkipReason, skip_this};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

/// A program with a forked child; both have far pages, and wait for the end of their input.
struct Waiting {
    program: PagedProgram,
    _lender: Lender,
    _folder: tempfile::TempDir,
}

impl Waiting {
    fn start() -> Option<Self> {
        if !can_page() {
            return None;
        }
        let (lender, folder) = (Lender::start(), tempfile::tempdir_in("/var/tmp").unwrap());
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/far_linux/torture.c");
        let program = compiled(&source, folder.path())?.display().to_string();
        let mut command = command(&lender.uris()[0], "16M", &["--class", "none"], &[&program, "waits"]);
        let program = PagedProgram::start_filled(command.stdin(Stdio::piped()));
        Some(Self { program, _lender: lender, _folder: folder })
    }

    /// Ends the programs' input, and waits until all have ended. Gives what they wrote to standard error.
    fn finish(self) -> (Option<i32>, String) {
        let output = self.program.finish();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

/// The only child of a process.
fn child(process: Pid) -> Pid {
    let path = format!("/proc/{0}/task/{0}/children", process.as_raw_nonzero());
    let children = std::fs::read_to_string(path).unwrap();
    Pid::from_raw(children.trim().parse().unwrap()).unwrap()
}

#[test]
fn the_pagers_death_ends_a_program_and_its_forked_child_and_neither_reads_zeroes() {
    let Some(waiting) = Waiting::start() else { return };
    kill_process(child(Pid::from_child(&waiting.program.0)), Signal::KILL).unwrap();
    let (code, said) = waiting.finish();
    assert!(said.contains("the pager was killed") && !said.contains("instead of"), "{said}");
    assert_eq!(code, Some(1), "{said}");
}

#[test]
fn the_keepers_death_ends_them_too() {
    let Some(waiting) = Waiting::start() else { return };
    kill_process(Pid::from_child(&waiting.program.0), Signal::KILL).unwrap();
    let (code, said) = waiting.finish();
    assert!(said.contains("its first process was killed") && !said.contains("instead of"), "{said}");
    assert_eq!(code, None, "{said}");
}

/// Whether the kernel is to kill processes when this one ends: it has files that signal their owners (`O_ASYNC`).
fn has_bound(process: Pid) -> bool {
    let folder = format!("/proc/{}/fdinfo", process.as_raw_nonzero());
    let files = std::fs::read_dir(folder).unwrap().filter_map(|entry| std::fs::read_to_string(entry.ok()?.path()).ok());
    let flags = files.filter_map(|text| {
        let flags = text.lines().find_map(|line| line.strip_prefix("flags:"))?;
        i32::from_str_radix(flags.trim(), 8).ok()
    });
    flags.into_iter().any(|flags| flags & 0o20000 != 0)
}

#[test]
fn a_forked_child_dies_with_the_pager_and_the_keeper_if_both_are_killed_at_once() {
    let Some(waiting) = Waiting::start() else { return };
    let keeper = Pid::from_child(&waiting.program.0);
    let both = [child(keeper), keeper];
    until(Instant::now() + LIMIT, "the pager to find the child", || has_bound(both[0]).then_some(()));
    // Neither of them sees the other's end.
    for signal in [Signal::STOP, Signal::KILL] {
        for process in both {
            kill_process(process, signal).unwrap();
        }
    }
    let (code, said) = waiting.finish();
    assert!(code.is_none() && !said.contains("instead of"), "{said}");
}

#[test]
fn a_kill_of_all_processes_named_byway_leaves_the_keeper_to_end_the_programs() {
    let Some(waiting) = Waiting::start() else { return };
    let keeper = Pid::from_child(&waiting.program.0);
    let both = [keeper, child(keeper)];
    let name = |process: Pid| std::fs::read_to_string(format!("/proc/{}/comm", process.as_raw_nonzero())).unwrap();
    let named: Vec<Pid> = both.into_iter().filter(|process| name(*process).contains("byway")).collect();
    for process in named {
        kill_process(process, Signal::KILL).unwrap();
    }
    let (code, said) = waiting.finish();
    assert!(said.contains("the pager was killed") && !said.contains("instead of"), "{said}");
    assert_eq!(code, Some(1), "{said}");
}

#[test]
fn a_signal_to_byway_is_passed_on_to_the_program() {
    let Some(waiting) = Waiting::start() else { return };
    kill_process(Pid::from_child(&waiting.program.0), Signal::TERM).unwrap();
    let (code, said) = waiting.finish();
    assert!(code == Some(128 + 15) && !said.contains("instead of"), "{code:?} {said}");
}

#[test]
fn the_folder_of_a_killed_pager_is_removed_by_the_next_byway_far_and_that_of_a_living_one_is_not() {
    const WAITS: &str = "import sys; print('filled', flush=True); sys.stdin.read()";
    let Some(python) = python() else { return };
    if !can_page() {
        return;
    }
    let (lender, temporary) = (Lender::start(), tempfile::tempdir().unwrap());
    let command = |program: &[&str]| {
        let mut command = command(&lender.uris()[0], "16M", &["--class", "none"], program);
        command.stdin(Stdio::piped()).env("TMPDIR", temporary.path());
        command
    };
    let folders = || std::fs::read_dir(temporary.path()).unwrap().count();
    let [killed, living] = [(); 2].map(|()| PagedProgram::start_filled(&mut command(&[python, "-c", WAITS])));
    kill_process(child(Pid::from_child(&killed.0)), Signal::KILL).unwrap();
    assert_eq!((killed.finish().status.code(), folders()), (Some(1), 2));
    let next = PagedProgram::start(&mut command(&["true"])).finish();
    assert!(next.status.success(), "{}", String::from_utf8_lossy(&next.stderr));
    assert_eq!(folders(), 1);
    assert!(living.finish().status.success());
    assert_eq!(folders(), 0);
}

/// Fills 32 MiB, and forks children that wait.
const FORKS: &str = r#"
import os, time
pages = [bytearray(b"%07d." % i * 512) for i in range(8000)]
for i in range(60):
    if os.fork() == 0:
        time.sleep(1000)
        os._exit(0)
print("filled", flush=True)
time.sleep(1000)
"#;

/// The soft limit of open files is the keeper's too, and the two processes have one table of descriptors.
#[test]
fn the_pagers_death_ends_more_programs_than_the_soft_limit_of_open_files() {
    let Some(python) = python() else { return };
    if !can_page() {
        return;
    }
    let lender = Lender::start();
    let far = command(&lender.uris()[0], "18M", &["--class", "none"], &[python, "-c", FORKS]);
    let mut limited = Command::new("prlimit");
    limited.arg("--nofile=64:4096").arg(far.get_program()).args(far.get_args());
    for (name, value) in far.get_envs() {
        value.map(|value| limited.env(name, value));
    }
    let program = PagedProgram::start_filled(limited.stdout(Stdio::piped()).stderr(Stdio::piped()));
    kill_process(child(Pid::from_child(&program.0)), Signal::KILL).unwrap();
    // Its output has an end when all that write to it have ended.
    let output = program.finish();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("the pager was killed") && output.status.code() == Some(1), "{} {said}", output.status);
}

/// Fills 32 MiB, and forks more children than the pager has descriptors for; they end with it.
const FORKS_TOO_MANY: &str = r#"
import os
pages = [bytearray(b"%07d." % i * 512) for i in range(8000)]
ours, theirs = os.pipe()
for i in range(400):
    if os.fork() == 0:
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
"#;

#[test]
fn a_program_that_forks_beyond_the_hard_limit_of_open_files_is_killed_by_name() {
    let Some(python) = python() else { return };
    if !can_page() {
        return;
    }
    let lender = Lender::start();
    let far = command(&lender.uris()[0], "18M", &["--class", "none"], &[python, "-c", FORKS_TOO_MANY]);
    let mut limited = Command::new("prlimit");
    limited.arg("--nofile=64:300").arg(far.get_program()).args(far.get_args());
    let program = PagedProgram::start(limited.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0));
    let output = program.finish();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("a forked child waits until a program has ended"), "{said}");
    assert!(said.contains("had no descriptor for the child") && output.status.code() == Some(128 + 9), "{said}");
}

/// Fills 32 MiB; its child forks more children than the pager has descriptors for.
const CHILD_FORKS_TOO_MANY: &str = r#"
import os
pages = [bytearray(b"%07d." % i * 512) for i in range(8000)]
if os.fork() == 0:
    assert all(pages[i] == b"%07d." % i * 512 for i in range(8000))
    ours, theirs = os.pipe()
    for i in range(400):
        if os.fork() == 0:
            os.close(theirs)
            os.read(ours, 1)
            os._exit(0)
    os._exit(0)
status = os.wait()[1]
assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == 9, status
assert all(pages[i] == b"%07d." % i * 512 for i in range(8000))
print("good")
"#;

#[test]
fn a_forked_child_that_forks_beyond_the_hard_limit_of_open_files_is_killed_and_its_parent_goes_on() {
    let Some(python) = python() else { return };
    if !can_page() {
        return;
    }
    let lender = Lender::start();
    let far = command(&lender.uris()[0], "18M", &["--class", "none"], &[python, "-c", CHILD_FORKS_TOO_MANY]);
    let mut limited = Command::new("prlimit");
    limited.arg("--nofile=64:300").arg(far.get_program()).args(far.get_args());
    let program = PagedProgram::start(limited.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0));
    let output = program.finish();
    let [rest, said] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success() && rest == "good\n", "{} {rest} {said}", output.status);
    assert!(said.contains("had no descriptor for the child"), "{said}");
}

#[test]
fn what_a_program_leaves_behind_holds_the_job_until_a_signal_comes() {
    if !can_page() {
        return;
    }
    let lender = Lender::start();
    let left = "sleep 1000 & echo filled";
    let program = PagedProgram::start_filled(&mut command(&lender.uris()[0], "18M", &[], &["sh", "-c", left]));
    let byway = Pid::from_child(&program.0);
    let ended = std::thread::spawn(move || program.finish());
    // The first signals may come before the shell has ended, which then has them.
    until(Instant::now() + LIMIT, "the end of the job", || {
        let _ = kill_process(byway, Signal::TERM);
        ended.is_finished().then_some(())
    });
    ended.join().unwrap();
}

/// Fills 32 MiB, and has what a terminal sends.
const INTERRUPTED: &str = r#"
import time
pages = [bytearray(b"%07d." % i * 512) for i in range(8000)]
try:
    print("filled", flush=True)
    while True: time.sleep(1)
except KeyboardInterrupt:
    assert all(pages[i] == b"%07d." % i * 512 for i in range(8000))
    print("good", flush=True)
"#;

#[test]
fn an_interrupt_from_the_terminal_is_the_programs_affair() {
    let Some(python) = python() else { return };
    if !can_page() {
        return;
    }
    let lender = Lender::start();
    let mut command = command(&lender.uris()[0], "18M", &["--class", "none"], &[python, "-c", INTERRUPTED]);
    let program = PagedProgram::start_filled(&mut command);
    for signal in [Signal::TSTP, Signal::CONT, Signal::INT] {
        kill_process_group(Pid::from_child(&program.0), signal).unwrap();
    }
    let output = program.finish();
    let [rest, said] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success() && rest == "good\n", "{} {rest} {said}", output.status);
}

#[test]
fn a_program_that_connects_to_the_pager_and_says_nothing_holds_up_nobody() {
    let Some(python) = python() else { return };
    if !can_page() {
        return;
    }
    let lender = Lender::start();
    let program = r#"
import os, socket
silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for i in range(8)]
for one in silent: one.connect(os.environ["BYWAY_FAR_SOCKET"])
pages = [bytearray(b"%07d." % i * 512) for i in range(8000)]
assert all(pages[i] == b"%07d." % i * 512 for i in range(8000))
print("good")
"#;
    let output = far(&lender.uris()[0], "18M", &["--class", "none"], &[python, "-c", program]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && output.stdout == b"good\n", "{said}");
    assert!(!said.contains("cannot be paged"), "its end came before the pager's patience had: {said}");
}

/// A file system of 2 MiB, unmounted when it is dropped.
struct Small(PathBuf);

impl Small {
    fn mount(at: PathBuf) -> Option<Self> {
        std::fs::create_dir(&at).unwrap();
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=2M", "far-spill"]).arg(&at).output();
        match mounted {
            Ok(output) if output.status.success() => Some(Self(at)),
            _ => {
                skip_this(SkipReason::Machine("a tmpfs cannot be mounted (needs root)"));
                None
            }
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).output();
    }
}

#[test]
fn where_the_spill_file_has_no_room_pages_stay_and_none_is_lost() {
    if !can_page() {
        return;
    }
    let (lender, folder) = (Lender::start(), tempfile::tempdir_in("/var/tmp").unwrap());
    let Some(small) = Small::mount(folder.path().join("small")) else { return };
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/far_linux/torture.c");
    let Some(program) = compiled(&source, folder.path()) else { return };
    let (program, small) = (program.display().to_string(), small.0.display().to_string());
    for case in ["forks", "remaps"] {
        let output = far(&lender.uris()[0], "16M", &["--class", "disk", "--spill", &small], &[&program, case]);
        let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        assert!(output.status.success() && stdout == "good\n", "{case}: {}\n{stdout}{stderr}", output.status);
        assert!(stderr.contains("the spill file cannot be written") && stderr.contains(" 0 lost"), "{stderr}");
    }
}
