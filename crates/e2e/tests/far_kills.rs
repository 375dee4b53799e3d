//! Lenders that are killed at random moments, cut off, stopped, or whose memory is changed: a program checks each page that it has
//! written.
//!
//! 10 kills for each class, with `BYWAY_LONG=1` 100. `BYWAY_KILL_SEED` repeats which lender is killed, and how long after the kill
//! before; the program's own state at that moment differs.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use byway_e2e::far::{self, Heard, PagedProgram, can_page, python};
use byway_e2e::{FAR, LIMIT, NEAR, Networks, Server, Side, binary, until};
use byway_skip::seeds::Chance;
use rustix::process::{Pid, Signal, kill_process};

/// Fills 24 MiB, then checks and changes all of it again and again, and says so each time, until its input ends.
const PROGRAM: &str = r#"
import sys, threading
pages = [bytearray(b"%07d." % i * 512) for i in range(6000)]
ends = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ends.set()), daemon=True).start()
turn = 0
while not ends.is_set():
    for i, page in enumerate(pages):
        assert page == b"%07d." % (i + turn) * 512, (turn, i)
        page[:] = b"%07d." % (i + turn + 1) * 512
    turn += 1
    print("good", turn, flush=True)
"#;

/// A lender that can be started again where it was.
struct Lender {
    folder: tempfile::TempDir,
    server: Server,
}

impl Lender {
    fn start() -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let server = Self::serve(Command::new(binary()), folder.path(), &Self::socket(folder.path()));
        Self { folder, server }
    }

    fn start_in(networks: &Networks, side: Side, at: &str) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let server = Self::serve(networks.command(side, &binary()), folder.path(), &format!("tcp://{at}"));
        Self { folder, server }
    }

    fn serve(command: Command, folder: &Path, listen: &str) -> Server {
        let ctl = folder.join("ctl").display().to_string();
        let flags = ["--lend", "1G,guard=0", "--listen", listen, "--threads", "1", "--control-socket", &ctl];
        let for_all = ["--insecure", "--allow", "10.77.0.0/24"];
        let for_all = if listen.starts_with("tcp") { &for_all[..] } else { &[] };
        Server::start_by(command, folder, 1, &[&flags, for_all].concat())
    }

    fn socket(folder: &Path) -> String {
        format!("unix://{}", folder.join("lender").display())
    }

    fn uri(&self) -> String {
        format!("byway+unix:///?socket={}", self.folder.path().join("lender").display())
    }

    /// It is killed, and starts again without its slabs.
    fn kill_and_restart(&mut self) {
        self.server.kill();
        self.server = Self::serve(Command::new(binary()), self.folder.path(), &Self::socket(self.folder.path()));
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.server.id().cast_signed()).unwrap(), signal).unwrap();
    }

    /// Waits until nothing is lent.
    fn has_all_back(&self) {
        until(Instant::now() + LIMIT, "the lender's memory", || {
            let mut ctl = Command::new(binary());
            ctl.args(["ctl", "--control-socket"]).arg(self.folder.path().join("ctl")).arg("status");
            String::from_utf8_lossy(&ctl.output().unwrap().stdout).contains("memory: 0 of").then_some(())
        });
    }

    /// Writes over a byte of each page that it has lent.
    fn flip(&self) {
        let mut flipped = 0;
        for entry in std::fs::read_dir(format!("/proc/{}/fd", self.server.id())).unwrap().flatten() {
            let name = std::fs::read_link(entry.path()).unwrap_or_default();
            if !name.to_string_lossy().contains("memfd:byway-memory") {
                continue;
            }
            let Ok(file) = std::fs::File::options().read(true).write(true).open(entry.path()) else { continue };
            // Slabs have 64 MiB; other memory of the server is smaller.
            let bytes = file.metadata().unwrap().len();
            if bytes != 64 << 20 {
                continue;
            }
            let mut page = [0; 4096];
            for at in (0..bytes).step_by(4096) {
                if file.read_exact_at(&mut page, at).is_ok() && page != [0; 4096] {
                    file.write_all_at(&[page[77] ^ 1], at + 77).unwrap();
                    flipped += 1;
                }
            }
        }
        assert!(flipped > 0, "it has pages");
    }
}

/// A paged program that checks its memory, and what its pager says; they end with the test.
struct CheckingProgram {
    program: PagedProgram,
    input: Option<ChildStdin>,
    out: BufReader<ChildStdout>,
    heard: Heard,
}

impl CheckingProgram {
    fn start(python: &str, uris: &[String], class: &str) -> Self {
        Self::start_by(far::command(&uris.join(","), "16M", &["--class", class], &[python, "-c", PROGRAM]))
    }

    /// At the near end of the cable.
    fn start_in(networks: &Networks, python: &str, uris: &[String], class: &str) -> Self {
        let mut command = networks.command(Side::Near, &binary());
        let from = uris.join(",");
        command.args(["far", "--report", "--limit", "16M", "--class", class, "--from", &from, "--", python, "-c"]);
        command.arg(PROGRAM).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        Self::start_by(command)
    }

    fn start_by(mut command: Command) -> Self {
        let mut program = PagedProgram::start(command.stdin(Stdio::piped()));
        let heard = Heard::of(program.0.stderr.take().unwrap());
        let (input, out) = (program.0.stdin.take(), BufReader::new(program.0.stdout.take().unwrap()));
        let mut program = Self { program, input, out, heard };
        program.check();
        program
    }

    /// The program has checked all of its memory since this was called.
    fn check(&mut self) {
        assert!(self.goes_on(), "it has ended: {}", self.heard.all());
    }

    /// The same, or the program has ended.
    fn goes_on(&mut self) -> bool {
        // The first line may have been on its way, and its turn ended before.
        (0..2).all(|_| {
            let mut line = String::new();
            self.out.read_line(&mut line).unwrap();
            assert!(line.is_empty() || line.starts_with("good "), "{line:?} {}", self.heard.all());
            !line.is_empty()
        })
    }

    /// Waits until the pager has said something so many times, while the program runs.
    fn hears(&mut self, what: &str, times: usize) {
        let deadline = Instant::now() + LIMIT;
        while self.heard.all().matches(what).count() < times {
            assert!(Instant::now() < deadline, "waited in vain for {what:?}, {times} times: {}", self.heard.all());
            self.check();
        }
    }

    /// The program runs for up to 0.3 s.
    #[expect(clippy::disallowed_methods, reason = "the moment of a kill is random: nothing is waited for")]
    fn run_for_a_while(&mut self, chance: &mut Chance) {
        std::thread::sleep(Duration::from_millis(chance.below(300) as u64));
        assert!(self.program.0.try_wait().unwrap().is_none(), "{}", self.heard.all());
    }

    /// The program ends well. Gives what was said.
    fn finish(mut self) -> String {
        drop(self.input.take());
        let mut rest = String::new();
        self.out.read_to_string(&mut rest).unwrap();
        let status = until(Instant::now() + LIMIT, "the program's end", || self.program.0.try_wait().unwrap());
        until(Instant::now() + LIMIT, "the report", || self.heard.all().contains(" lenders given up").then_some(()));
        assert!(status.success(), "{status} {}", self.heard.all());
        self.heard.all()
    }
}

/// What the report, which is said last, says of one thing: the number before the words.
fn counted(said: &str, what: &str) -> u64 {
    let before = said.rsplit_once(what).map(|(before, _)| before);
    let count = before.and_then(|before| before.rsplit(' ').next()).and_then(|count| count.parse().ok());
    count.unwrap_or_else(|| panic!("no {what:?} in {said}"))
}

/// The machine's Python, if it can be paged.
fn paged_python() -> Option<&'static str> {
    python().filter(|_| can_page())
}

fn kills() -> usize {
    if std::env::var_os("BYWAY_LONG").is_some() { 100 } else { 10 }
}

fn chance() -> Chance {
    let seed = std::env::var("BYWAY_KILL_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    println!("BYWAY_KILL_SEED={seed}");
    Chance::new(seed)
}

#[test]
fn lenders_that_are_killed_one_at_a_time_lose_no_page_of_a_mirror() {
    kill_one_at_a_time("mirror=2", 3);
}

#[test]
fn lenders_that_are_killed_one_at_a_time_lose_no_page_with_parity() {
    kill_one_at_a_time("parity=4+1", 6);
}

fn kill_one_at_a_time(class: &str, count: usize) {
    let Some(python) = paged_python() else { return };
    let (mut chance, mut lenders) = (chance(), (0..count).map(|_| Lender::start()).collect::<Vec<_>>());
    let uris: Vec<String> = lenders.iter().map(Lender::uri).collect();
    let mut program = CheckingProgram::start(python, &uris, class);
    let mut lost = 0;
    for _ in 0..kills() {
        program.run_for_a_while(&mut chance);
        lenders[chance.below(count)].kill_and_restart();
        lost += 1;
        program.hears("a lender is lost", lost);
        program.hears("a lender is back", lost);
        // A lender that had no slab leaves nothing to mend.
        let of_use =
            program.heard.all().lines().filter(|line| line.contains("is lost") && !line.contains("slabs=0")).count();
        program.hears("as many lenders as its class says again", of_use);
    }
    program.check();
    let said = program.finish();
    assert_eq!((counted(&said, " lost;"), counted(&said, " lenders given up")), (0, lost as u64), "{said}");
}

#[test]
fn lenders_that_are_killed_both_at_once_lose_no_page_that_the_disk_has() {
    let Some(python) = paged_python() else { return };
    let (mut chance, mut lenders) = (chance(), [(); 2].map(|()| Lender::start()));
    let mut program = CheckingProgram::start(python, &lenders.each_ref().map(Lender::uri), "disk");
    for _ in 0..kills() {
        program.run_for_a_while(&mut chance);
        match chance.below(3) {
            2 => lenders.iter_mut().for_each(Lender::kill_and_restart),
            one => lenders[one].kill_and_restart(),
        }
        program.check();
    }
    let said = program.finish();
    assert!(counted(&said, " lost;") == 0 && counted(&said, " lenders given up") > 0, "{said}");
}

/// The program has its bytes, or it is told of the loss: no page ever has others.
#[test]
fn a_lender_that_is_killed_and_had_the_only_copies_ends_the_program_by_name() {
    let Some(python) = paged_python() else { return };
    let (mut chance, mut ended) = (chance(), 0);
    for _ in 0..kills() {
        let mut lenders = [(); 2].map(|()| Lender::start());
        let mut program = CheckingProgram::start(python, &lenders.each_ref().map(Lender::uri), "none");
        program.run_for_a_while(&mut chance);
        lenders[chance.below(2)].server.kill();
        let deadline = Instant::now() + LIMIT;
        // The program checks all of its memory once more after the loss is known, or it ends.
        loop {
            let is_known = program.heard.all().contains("a lender is lost");
            if !program.goes_on() || is_known {
                break;
            }
            assert!(Instant::now() < deadline, "the loss is not noticed: {}", program.heard.all());
        }
        // At its end it reads what it has not checked, such as the interpreter's own memory.
        drop(program.input.take());
        std::io::copy(&mut program.out, &mut std::io::sink()).unwrap();
        let status = until(Instant::now() + LIMIT, "the program's end", || program.program.0.try_wait().unwrap());
        if status.success() {
            continue;
        }
        // SIGBUS, as a shell gives it.
        assert_eq!(status.code(), Some(128 + 7), "{}", program.heard.all());
        until(Instant::now() + LIMIT, "why", || {
            program.heard.all().contains("a page is lost with its lender").then_some(())
        });
        ended += 1;
    }
    println!("{ended} of {} kills ended the program", kills());
}

#[test]
fn a_lender_that_stands_still_and_comes_back_with_old_pages_is_not_asked_for_them() {
    let Some(python) = paged_python() else { return };
    let lenders = [(); 2].map(|()| Lender::start());
    let mut program = CheckingProgram::start(python, &lenders.each_ref().map(Lender::uri), "mirror=2");
    lenders[0].signal(Signal::STOP);
    program.check();
    program.hears("a lender is lost", 1);
    program.check();
    lenders[0].signal(Signal::CONT);
    program.hears("a lender is back", 1);
    program.hears("as many lenders as its class says again", 1);
    // Its pages are new ones: the other may go.
    lenders[1].signal(Signal::KILL);
    program.check();
    let said = program.finish();
    assert_eq!((counted(&said, " lost;"), counted(&said, " with a wrong checksum")), (0, 0), "{said}");
}

#[test]
fn bits_that_are_flipped_at_a_lender_are_noticed_and_the_other_copy_is_used() {
    let Some(python) = paged_python() else { return };
    for (class, count) in [("mirror=2", 2), ("disk", 1)] {
        let lenders: Vec<Lender> = (0..count).map(|_| Lender::start()).collect();
        let uris: Vec<String> = lenders.iter().map(Lender::uri).collect();
        let mut program = CheckingProgram::start(python, &uris, class);
        lenders[0].flip();
        program.hears("a page has a wrong checksum at its lender", 1);
        program.check();
        let said = program.finish();
        assert_eq!(counted(&said, " lost;"), 0, "{class}: {said}");
    }
}

#[test]
fn a_cable_that_is_pulled_for_shorter_and_longer_than_a_lender_waits_costs_no_page() {
    let Some(python) = paged_python() else { return };
    let name = "a_cable_that_is_pulled_for_shorter_and_longer_than_a_lender_waits_costs_no_page";
    let Some(networks) = Networks::new(name) else { return };
    let near = Lender::start_in(&networks, Side::Near, &format!("{NEAR}:7711"));
    let far = Lender::start_in(&networks, Side::Far, &format!("{FAR}:7711"));
    let uris = [NEAR, FAR].map(|address| format!("byway://{address}:7711"));
    let mut program = CheckingProgram::start_in(&networks, python, &uris, "mirror=2");
    // The program goes on meanwhile.
    networks.plug(false);
    program.check();
    networks.plug(true);
    program.check();
    networks.plug(false);
    program.hears("a lender is lost", 1);
    far.has_all_back();
    program.check();
    networks.plug(true);
    program.hears("a lender is back", 1);
    program.hears("as many lenders as its class says again", 1);
    program.check();
    let said = program.finish();
    assert_eq!(counted(&said, " lost;"), 0, "{said}");
    drop(near);
}

/// As if the borrower's own link had failed: its lenders live, and give its slabs up.
#[test]
fn a_program_of_which_all_lenders_are_cut_off_has_its_pages_from_its_file() {
    let Some(python) = paged_python() else { return };
    let name = "a_program_of_which_all_lenders_are_cut_off_has_its_pages_from_its_file";
    let Some(networks) = Networks::new(name) else { return };
    let at = [7711, 7712].map(|port| format!("{FAR}:{port}"));
    let lenders = at.each_ref().map(|at| Lender::start_in(&networks, Side::Far, at));
    let mut program = CheckingProgram::start_in(&networks, python, &at.map(|at| format!("byway://{at}")), "disk");
    networks.plug(false);
    program.hears("a lender is lost", 2);
    lenders.iter().for_each(Lender::has_all_back);
    program.check();
    networks.plug(true);
    program.hears("a lender is back", 2);
    program.check();
    let said = program.finish();
    assert_eq!((counted(&said, " lost;"), counted(&said, " lenders given up")), (0, 2), "{said}");
}

#[test]
fn the_slabs_of_a_borrower_that_is_killed_are_back_at_its_lender() {
    let Some(python) = paged_python() else { return };
    let lender = Lender::start();
    let program = CheckingProgram::start(python, &[lender.uri()], "none");
    kill_process(Pid::from_child(&program.program.0), Signal::KILL).unwrap();
    lender.has_all_back();
}
