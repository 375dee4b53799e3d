//! What `byway run` does to programs: descriptors that can be waited for, no threads, programs that it does not reach, and very many
//! programs at once.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;

use byway_e2e::far::python;
use byway_e2e::{LIMIT, MountRig, Server, SkipReason, binary, find_tool, noise, skip_this, until};
use rustix::process::{Pid, Signal, kill_process_group};

/// Where programs find the share; there is no such folder on any machine.
const PREFIX: &str = "/byway-share-of-programs";

/// A share, its server, and programs that use it.
struct Rig {
    rig: MountRig,
    server: Server,
}

impl Rig {
    fn new() -> Self {
        let rig = MountRig::new(if rustix::process::geteuid().is_root() { ",users=squash:0" } else { "" });
        let server = rig.serve();
        Self { rig, server }
    }

    fn command(&self, program: &[&str]) -> Command {
        let mut command = Command::new(binary());
        command.args(["run", "--map", &format!("{PREFIX}={}", self.rig.unix()), "--"]).args(program);
        command.current_dir(self.rig.path(".")).env("LC_ALL", "C").env("D", PREFIX).stdin(Stdio::null());
        command
    }

    fn run(&self, program: &[&str]) -> Output {
        let seconds = LIMIT.as_secs().to_string();
        self.command(&[&["timeout", "-k", "1", &seconds], program].concat()).output().unwrap()
    }

    fn run_well(&self, program: &[&str]) -> String {
        let output = self.run(program);
        assert!(output.status.success(), "{program:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }
}

/// What a program learns when it waits for a file: a local one is always ready, and `epoll` has none.
const WAITS: &str = "
import os, select
path = os.environ['D'] + '/file'
open(path, 'w').write('text')
for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
    file = os.open(path, flags)
    poll = select.poll()
    poll.register(file, select.POLLIN | select.POLLOUT | select.POLLPRI)
    print([events for _, events in poll.poll(0)], [len(ready) for ready in select.select([file], [file], [file], 0)])
    try: select.epoll().register(file); print('epoll')
    except OSError as error: print(error.strerror)
    copy = os.dup(file); os.close(file)
    print([len(ready) for ready in select.select([copy], [copy], [], 0)])
    os.close(copy)
";

#[test]
fn a_file_is_always_ready_as_a_local_one() {
    let Some(python) = python() else { return };
    let rig = Rig::new();
    let local =
        Command::new(python).args(["-c", WAITS]).env("D", rig.rig.path(".")).env("LC_ALL", "C").output().unwrap();
    assert!(local.status.success(), "{local:?}");
    assert_eq!(rig.run_well(&[python, "-c", WAITS]), String::from_utf8(local.stdout).unwrap());
}

#[test]
fn programs_have_no_threads_but_their_own() {
    let Some(python) = python() else { return };
    let rig = Rig::new();
    let script = "
import os
def threads(): return len(os.listdir('/proc/self/task'))
assert threads() == 1
file = open(os.environ['D'] + '/file', 'w+b')
file.write(b'x' * 5000000); file.flush(); file.seek(0); assert len(file.read()) == 5000000
os.listdir(os.environ['D']); print(threads(), 'of', os.getpid() != 0)
if os.fork() == 0:
    open(os.environ['D'] + '/child', 'w').write('x'); assert threads() == 1; os._exit(0)
assert os.wait()[1] == 0
";
    assert_eq!(rig.run_well(&[python, "-c", script]), "1 of True\n");
}

#[test]
fn a_static_child_finds_nothing_and_loses_nothing() {
    let Some(cc) = find_tool("cc") else { return skip_this(SkipReason::MissingTool("cc")) };
    let rig = Rig::new();
    let (source, program) =
        (Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run_programs/static.c"), rig.rig.path("static"));
    let (source, program) = (source.display().to_string(), program.display().to_string());
    let built = Command::new(cc).args(["-static", "-o", &program, &source]).output().unwrap();
    if !built.status.success() {
        return skip_this(SkipReason::Machine("no static C library"));
    }
    std::fs::write(rig.rig.path("local"), "local\n").unwrap();
    std::fs::write(rig.rig.below().join("file"), "shared\n").unwrap();
    let said = |script: &str| {
        let output = rig.run(&["sh", "-c", script]);
        (output.status.code(), String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(said("./static local"), (Some(0), "local\n".into()));
    assert_eq!(said("./static $D/file"), (Some(1), "open: No such file or directory\n".into()));
    assert_eq!(said("./static local > $D/copy"), (Some(2), "write: Operation not permitted\n".into()));
    // The shell's own redirection of a dynamic program is whole.
    assert_eq!(said("cat local > $D/copy; cat $D/copy"), (Some(0), "local\n".into()));
}

/// The kernel sees no path of a share, whatever these programs do there: no call of theirs passes the library by.
#[test]
fn no_call_of_common_programs_passes_the_library_by() {
    let Some(strace) = find_tool("strace") else { return skip_this(SkipReason::MissingTool("strace")) };
    let rig = Rig::new();
    let strace = strace.display().to_string();
    std::fs::write(rig.rig.path("noise"), noise(300_000, 1)).unwrap();
    let scripts = [
        ("cp", "cp noise $D/a; cp $D/a back; cp -a $D/a $D/b"),
        ("dd", "dd if=noise of=$D/a bs=4k status=none; dd if=$D/a of=back status=none"),
        ("tar", "mkdir $D/t; echo 1 > $D/t/one; tar cf out.tar -C $D t; tar xf out.tar -C $D"),
        ("cat", "cat noise > $D/a; cat $D/a > back; cat < $D/a > back"),
        ("grep", "mkdir $D/t; echo needle > $D/t/one; grep -rl needle $D"),
        ("find", "mkdir -p $D/t/u; : > $D/t/u/one; find $D -type f -newer $D/t -size -1; ls -lR $D; rm -r $D/t"),
        (
            "python3",
            "python3 -c \"import os, shutil; d = os.environ['D']; open(d + '/a', 'w').write('x'); shutil.copy(d + '/a', d + '/b'); print(os.listdir(d))\"",
        ),
        ("sqlite3", "sqlite3 $D/data 'create table t(n); insert into t values(1); select * from t'"),
        (
            "fio",
            "fio --name=job --directory=$D --rw=randrw --ioengine=psync --size=256k --bs=4k --fallocate=none > fio.log",
        ),
    ];
    for (program, script) in scripts {
        if find_tool(program).is_none() {
            byway_skip::skip_part_of_this(SkipReason::MissingTool(program));
            continue;
        }
        let log = rig.rig.path(&format!("{program}.strace")).display().to_string();
        let script = format!("set -e; {script}; rm -rf $D/* 2> rm.log");
        rig.run_well(&[&strace, "-f", "-qq", "-s", "200", "-e", "trace=%file,%desc", "-o", &log, "sh", "-c", &script]);
        let calls = std::fs::read_to_string(&log).unwrap();
        // Arguments of a program that is started, and what it prints, may have paths of the share.
        let names_none = |line: &str| ["execve(", " write(", " read("].iter().any(|call| line.contains(call));
        let is_passed_by = |line: &&str| line.contains(&format!("\"{PREFIX}")) && !names_none(line);
        let passed_by: Vec<_> = calls.lines().filter(is_passed_by).collect();
        assert!(passed_by.is_empty(), "{program}: {passed_by:#?}");
        // Nor is a descriptor of a share used with the kernel: that would fail.
        let refused = |line: &&str| {
            line.contains("read(") && line.contains("EBADF") || line.contains("write(") && line.contains("EPERM")
        };
        assert_eq!(calls.lines().find(refused), None, "{program}");
        assert!(
            calls.lines().any(|line| line.contains("noise\"") || line.contains("execve(")),
            "{program}: strace sees calls"
        );
    }
}

/// Programs that write records under their number, one record a call.
struct Crowd(Vec<Child>);

impl Crowd {
    fn start(rig: &Rig, count: usize, records: usize) -> Self {
        let start = |number: usize| {
            let script =
                format!("n=0; while [ $n -lt {records} ]; do n=$((n+1)); echo \"{number} $n\" >> $D/log; done");
            rig.command(&["sh", "-c", &script]).process_group(0).stderr(Stdio::piped()).spawn().unwrap()
        };
        Self((0..count).map(start).collect())
    }

    fn kill(&mut self, number: usize) {
        // It may have ended by itself.
        let _ = kill_process_group(Pid::from_child(&self.0[number]), Signal::KILL);
        self.0[number].wait().unwrap();
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        (0..self.0.len()).for_each(|number| self.kill(number));
    }
}

/// How many records each program has written; they must be whole, and in order.
fn records(log: &Path) -> BTreeMap<usize, usize> {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let mut seen = BTreeMap::new();
    // The last line may be on its way.
    for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
        let (program, number) = line.split_once(' ').unwrap_or_else(|| panic!("{line:?}"));
        let (program, number): (usize, usize) = (program.parse().unwrap(), number.parse().unwrap());
        let before = seen.insert(program, number).unwrap_or(0);
        assert_eq!(number, before + 1, "program {program}");
    }
    seen
}

fn descriptors(server: &Server) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", server.id())).unwrap().count()
}

#[test]
fn of_256_programs_the_killed_half_harms_none_of_the_others() {
    const PROGRAMS: usize = 256;
    const RECORDS: usize = 20;
    let rig = Rig::new();
    let log = rig.rig.below().join("log");
    let before = descriptors(&rig.server);
    let mut crowd = Crowd::start(&rig, PROGRAMS, RECORDS);
    for number in (0..PROGRAMS).step_by(2) {
        // Some are killed at their first record, some later, some at the end.
        let is_far_enough = || (*records(&log).get(&number)? > number / 2 % RECORDS).then_some(());
        until(Instant::now() + LIMIT, "a program's records", is_far_enough);
        crowd.kill(number);
    }
    for number in (1..PROGRAMS).step_by(2) {
        let child = &mut crowd.0[number];
        let status = until(Instant::now() + LIMIT, "the end of a program", || child.try_wait().unwrap());
        assert!(status.success(), "program {number}: {status}");
    }
    let seen = records(&log);
    assert_eq!(seen.len(), PROGRAMS);
    assert!((1..PROGRAMS).step_by(2).all(|number| seen[&number] == RECORDS), "{seen:?}");
    // What the server kept for the killed ones goes, too.
    until(Instant::now() + LIMIT, "their sessions' end", || (descriptors(&rig.server) <= before + 2).then_some(()));
    assert_eq!(
        rig.run_well(&["sh", "-c", "wc -l < $D/log"]).trim(),
        std::fs::read_to_string(&log).unwrap().lines().count().to_string()
    );
}
