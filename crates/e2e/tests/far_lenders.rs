//! `byway far` over several lenders, which are killed, take memory back, and drop a borrower that does not answer.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use byway_e2e::far::{self, Heard, can_page, python};
use byway_e2e::{LIMIT, Server, binary, find_tool, until};
use byway_skip::{SkipReason, skip_this};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

/// Fills 48 MiB, and for each line on its input checks all of it, and changes it.
const PROGRAM: &str = r#"
import sys
pages = [bytearray(b"%07d." % i * 512) for i in range(12000)]
print("filled", flush=True)
turn = 0
for line in sys.stdin:
    for i, page in enumerate(pages):
        assert page == b"%07d." % (i + turn) * 512, (turn, i)
        page[:] = b"%07d." % (i + turn + 1) * 512
    turn += 1
    print("good", flush=True)
"#;

struct Lender {
    folder: tempfile::TempDir,
    server: Server,
}

impl Lender {
    fn start(lends: &str) -> Self {
        Self::start_by(Command::new(binary()), lends)
    }

    fn start_by(command: Command, lends: &str) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let ctl = folder.path().join("ctl").display().to_string();
        let flags = ["--lend", lends, "--listen", "tcp://127.0.0.1:0", "--threads", "1", "--control-socket", &ctl];
        let server = Server::start_by(command, folder.path(), 1, &flags);
        Self { folder, server }
    }

    fn uri(&self) -> String {
        format!("byway://127.0.0.1:{}", self.server.port("byway"))
    }

    /// What `ctl status` says of the memory.
    fn status(&self) -> String {
        let ctl = self.folder.path().join("ctl");
        let output = Command::new(binary()).args(["ctl", "--control-socket"]).arg(ctl).arg("status").output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

/// A paged program and what its pager says, which end with the test.
struct CheckedProgram {
    child: Child,
    out: BufReader<std::process::ChildStdout>,
    heard: Heard,
}

impl CheckedProgram {
    fn start(python: &str, lenders: &[&Lender], class: &str) -> Self {
        let from = lenders.iter().map(|lender| lender.uri()).collect::<Vec<_>>().join(",");
        let mut command = Command::new(binary());
        command.args([
            "far", "--report", "--limit", "20M", "--from", &from, "--class", class, "--", python, "-c", PROGRAM,
        ]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let heard = Heard::of(child.stderr.take().unwrap());
        let mut job = Self { child, out, heard };
        job.expect("filled");
        job
    }

    fn expect(&mut self, what: &str) {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), what, "{}", self.said());
    }

    /// The program checks and changes all of its memory.
    fn check(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        self.expect("good");
    }

    fn said(&self) -> String {
        self.heard.all()
    }

    fn hears(&self, what: &str) {
        until(Instant::now() + LIMIT, what, || self.said().contains(what).then_some(()));
    }

    fn signal(&self, signal: Signal) {
        kill_process_group(Pid::from_child(&self.child), signal).unwrap();
    }

    /// The program ends well. Gives what was said.
    fn finish(mut self) -> String {
        drop(self.child.stdin.take());
        let mut rest = String::new();
        self.out.read_to_string(&mut rest).unwrap();
        let status = until(Instant::now() + LIMIT, "the program's end", || self.child.try_wait().unwrap());
        self.hears("lenders given up");
        assert!(status.success() && rest.is_empty(), "{status} {rest} {}", self.said());
        self.said()
    }
}

impl Drop for CheckedProgram {
    fn drop(&mut self) {
        // The pager and all that it runs.
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

#[test]
fn a_mirrored_program_outlives_one_lender_after_the_other() {
    let Some(python) = python() else { return };
    if !can_page() {
        return;
    }
    let mut lenders = [(); 3].map(|()| Lender::start("1G,guard=0"));
    let mut job = CheckedProgram::start(python, &lenders.each_ref(), "mirror=2");
    lenders[0].server.kill();
    job.check();
    job.hears("as many lenders as its class says again");
    // The pages that lay at the first lender have been copied.
    lenders[1].server.kill();
    job.check();
    let said = job.finish();
    assert!(said.contains(" 0 lost; 2 lenders given up"), "{said}");
}

#[test]
fn a_program_with_parity_outlives_one_lender_after_the_other() {
    let Some(python) = python() else { return };
    if !can_page() {
        return;
    }
    let mut lenders = [(); 7].map(|()| Lender::start("256M"));
    let mut job = CheckedProgram::start(python, &lenders.each_ref(), "parity=4+1");
    let leased = |lender: &Lender| !lender.status().contains("memory: 0 of");
    let holders: Vec<usize> = (0..7).filter(|number| leased(&lenders[*number])).collect();
    assert_eq!(holders.len(), 5, "{holders:?}");
    lenders[holders[0]].server.kill();
    job.check();
    job.hears("as many lenders as its class says again");
    // The pages that lay at the first lender have been computed, and are at another.
    lenders[holders[1]].server.kill();
    job.check();
    let said = job.finish();
    assert!(said.contains(" 0 lost; 2 lenders given up") && !said.contains(" 0 pages copied again"), "{said}");
}

#[test]
fn a_mirror_needs_two_lenders_and_a_parity_five() {
    if !can_page() {
        return;
    }
    let lender = Lender::start("64M,guard=0");
    for (class, told) in
        [("mirror=2", "name at least two with --from"), ("parity=4+1", "name at least five with --from")]
    {
        let arguments = ["far", "--limit", "16M", "--class", class, "--from", &lender.uri(), "--", "true"];
        let refused = Command::new(binary()).args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains(told), "{said}");
    }
}

/// Both copies of a page, or two pages of a row, would be lost with one process.
#[test]
fn one_lender_under_two_addresses_is_refused_where_pages_are_to_outlive_a_lender() {
    if !can_page() {
        return;
    }
    let lenders = [(); 4].map(|()| far::Lender::start());
    let uris = lenders.each_ref().map(far::Lender::uris);
    let [tcp, shm] = &uris[0];
    let twice = [tcp.as_str(), tcp].join(",");
    let by_both_wires = [tcp.as_str(), shm].join(",");
    let row = [tcp, &uris[1][0], &uris[2][0], &uris[3][0], shm].map(String::as_str).join(",");
    for (class, from) in [("mirror=2", &twice), ("mirror=2", &by_both_wires), ("parity=4+1", &row)] {
        let refused = far::far(from, "16M", &["--class", class], &["true"]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("it is the same process as byway://"), "{from}: {said}");
    }
    for class in ["none", "disk"] {
        let ran = far::far(&by_both_wires, "16M", &["--class", class], &["true"]);
        assert!(ran.status.success(), "{class}: {}", String::from_utf8_lossy(&ran.stderr));
    }
}

/// A lender that sees this file in the place of /proc/meminfo. It leaves the mounts of other tests alone: a mount's process ends when
/// the last mount namespace has left the mount.
fn start_with_meminfo(unshare: &Path, file: &Path, lends: &str) -> Lender {
    let mut command = Command::new(unshare);
    let script = "umount --all --lazy --types fuse.byway; mount --bind \"$1\" /proc/meminfo && shift && exec \"$@\"";
    command.args(["--mount", "sh", "-c", script, "sh"]).arg(file).arg(binary());
    Lender::start_by(command, lends)
}

#[test]
fn a_lender_that_is_short_of_memory_gets_it_back_and_no_page_is_lost() {
    // As it was told, and by itself.
    for lends in ["1G,guard=1G", "1G"] {
        check_take_back(lends);
    }
}

fn check_take_back(lends: &str) {
    let Some(python) = python() else { return };
    if !can_page() {
        return;
    }
    let Some(unshare) = find_tool("unshare") else { return skip_this(SkipReason::MissingTool("unshare")) };
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let meminfo: PathBuf = folder.path().join("meminfo");
    let say = |kib: u64| {
        let text = format!("MemTotal: 16000000 kB\nMemAvailable:{kib:>20} kB\n");
        let file = std::fs::File::options().create(true).truncate(false).write(true).open(&meminfo).unwrap();
        file.write_all_at(text.as_bytes(), 0).unwrap();
    };
    say(8 << 20);
    let short = start_with_meminfo(&unshare, &meminfo, lends);
    let other = Lender::start("1G,guard=0");
    let mut job = CheckedProgram::start(python, &[&short, &other], "none");
    assert!(short.status().contains("67108864 of"), "{}", short.status());
    say(1);
    job.hears("a lender takes memory back");
    until(Instant::now() + LIMIT, "the lender's memory", || short.status().contains("memory: 0 of").then_some(()));
    assert!(short.status().contains("67108864 bytes taken back"), "{}", short.status());
    job.check();
    let said = job.finish();
    assert!(said.contains(" 0 lost; 0 lenders given up"), "{said}");
}

/// The one of them that has a slab of the only program.
fn holder(lenders: &mut [Lender]) -> &mut Lender {
    lenders.iter_mut().find(|lender| lender.status().contains("67108864 of")).expect("one of them has its pages")
}

#[test]
fn a_lender_that_is_ended_hands_its_pages_to_another_and_none_is_lost() {
    let Some(python) = python() else { return };
    if !can_page() {
        return;
    }
    let mut lenders = [(); 2].map(|()| Lender::start("1G,guard=0"));
    let mut job = CheckedProgram::start(python, &lenders.each_ref(), "none");
    let ended = holder(&mut lenders);
    assert_eq!(ended.server.terminate(), Some(0), "{}", ended.server.log());
    job.check();
    let said = job.finish();
    assert!(said.contains(" 0 lost;") && !said.contains(" 0 pages copied again"), "{said}");
}

#[test]
fn a_lender_whose_pages_have_no_other_place_ends_at_once_when_it_is_told_twice() {
    let Some(python) = python() else { return };
    if !can_page() {
        return;
    }
    let mut lender = Lender::start("1G,guard=0");
    let mut job = CheckedProgram::start(python, &[&lender], "disk");
    kill_process(Pid::from_raw(lender.server.id().cast_signed()).unwrap(), Signal::TERM).unwrap();
    job.hears("a lender takes memory back");
    assert!(
        lender.server.is_alive() && lender.server.log().contains("borrowers have so long"),
        "{}",
        lender.server.log()
    );
    assert_eq!(lender.server.terminate(), Some(1), "{}", lender.server.log());
    job.check();
    assert!(job.finish().contains(" 0 lost;"));
}

#[test]
fn a_borrower_that_stands_still_loses_its_slabs_and_no_page_with_class_disk() {
    let Some(python) = python() else { return };
    if !can_page() {
        return;
    }
    let lender = Lender::start("1G,guard=0");
    let mut job = CheckedProgram::start(python, &[&lender], "disk");
    assert!(!lender.status().contains("memory: 0 of"), "{}", lender.status());
    job.signal(Signal::STOP);
    until(Instant::now() + LIMIT, "the slabs' end", || lender.status().contains("memory: 0 of").then_some(()));
    assert!(lender.status().contains("67108864 bytes not renewed"), "{}", lender.status());
    job.signal(Signal::CONT);
    job.check();
    let said = job.finish();
    assert!(said.contains(" 0 lost;"), "{said}");
}
