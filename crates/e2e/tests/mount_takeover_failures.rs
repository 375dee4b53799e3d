//! Takeovers of a mount that fail at their last step: the next process is too late, or the one before is stopped. The mount stays with the
//! process that has it, and its programs get no error.
//!
//! A gate in place of the mount's socket tells when the next process says that it is ready, and holds that word back.

use std::fs::{File, TryLockError};
use std::io::{IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use byway_e2e::{LIMIT, Mount, MountRig, Server, binary, lacks_mounts, run, run_well, until};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use rustix::process::{Pid, Signal, kill_process};

/// What the next process says when it can serve the mount.
const READY: &[u8] = b"\"ready\"";
/// What the process before says in its log when the mount stays with it.
const GOES_ON: &str = "this one goes on";
/// The most descriptors in one message.
const FDS_MAX: usize = 253;

/// A socket in place of that of a mount's process. It passes on all but the word `ready`, for which it waits until it is told.
struct Gate {
    socket: PathBuf,
    /// The socket of the process, under another name.
    behind: PathBuf,
    is_closed: Arc<AtomicBool>,
    ready: Receiver<()>,
    pass: Sender<()>,
    /// The process before has ended a connection, and all that it said was passed on.
    ended: Receiver<()>,
    /// The next process has ended a connection after the word `ready`, and nothing that comes for it is passed on.
    left: Receiver<()>,
}

impl Gate {
    fn before(mount: &Mount) -> Self {
        let socket = mount.socket();
        let behind = PathBuf::from(format!("/run/byway-test-{}.sock", mount.process()));
        std::fs::rename(&socket, &behind).unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let is_closed = Arc::new(AtomicBool::new(true));
        let ((says_ready, ready), (pass, passes)) = (channel(), channel());
        let ((ends, ended), (leaves, left)) = (channel(), channel());
        let (to, closed, passes) = (behind.clone(), Arc::clone(&is_closed), Arc::new(Mutex::new(passes)));
        std::thread::spawn(move || {
            for from in listener.incoming().map_while(Result::ok) {
                let Ok(to) = UnixStream::connect(&to) else { return };
                let (answers_from, answers_to) = (to.try_clone().unwrap(), from.try_clone().unwrap());
                let ends = ends.clone();
                std::thread::spawn(move || {
                    copy(&answers_from, &answers_to, |_| ());
                    let _ = ends.send(());
                });
                let (closed, says_ready, passes) = (Arc::clone(&closed), says_ready.clone(), Arc::clone(&passes));
                let leaves = leaves.clone();
                std::thread::spawn(move || {
                    let mut was_ready = false;
                    copy(&from, &to, |bytes| {
                        if bytes.starts_with(READY) && closed.load(Ordering::Acquire) {
                            was_ready = true;
                            let _ = says_ready.send(());
                            let _ = passes.lock().unwrap().recv();
                        }
                    });
                    let _ = was_ready.then(|| leaves.send(()));
                });
            }
        });
        Self { socket, behind, is_closed, ready, pass, ended, left }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        for path in [&self.socket, &self.behind] {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Passes bytes and descriptors on until either end is closed.
fn copy(from: &UnixStream, to: &UnixStream, mut look: impl FnMut(&[u8])) {
    let mut bytes = vec![0; 64 << 10];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    loop {
        let mut came = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(from, &mut [IoSliceMut::new(&mut bytes)], &mut came, RecvFlags::CMSG_CLOEXEC);
        let Ok(len @ 1..) = got.map(|got| got.bytes) else { break };
        let fds = came.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        let fds: Vec<_> = fds.flatten().collect();
        look(&bytes[..len]);
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut goes = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || goes.push(SendAncillaryMessage::ScmRights(&fds)));
        if sendmsg(to, &[IoSlice::new(&bytes[..len])], &mut goes, SendFlags::NOSIGNAL) != Ok(len) {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// A process that is to take the mount over; killed if the test fails.
struct Successor(Child);

impl Successor {
    /// A shell that becomes this process when it is told. A process that is started here has the programs' files until it executes another
    /// program, and closing these waits for the mount.
    fn prepare(uri: &str, mount: &Mount) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", "echo; read go && exec \"$@\"", "sh"]).arg(binary());
        command.args(["mount", "--takeover", uri]).arg(&mount.at);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        Self(child)
    }

    fn start(&mut self) {
        self.0.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// What it says at its end, which must be a failure.
    fn fails(mut self) -> String {
        let status = until(Instant::now() + LIMIT, "the end of the next process", || self.0.try_wait().unwrap());
        let mut said = String::new();
        self.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(status.code(), Some(1), "{said}");
        said
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Continues the mount's process also if the test fails: a stopped one holds up whoever uses the mount.
struct Stopped<'a>(&'a Mount);

impl<'a> Stopped<'a> {
    /// Its threads stop one after the other, some after the signal was sent: one that still runs could answer.
    fn stop(mount: &'a Mount) -> Self {
        mount.signal(Signal::STOP);
        let stopped = Self(mount);
        let tasks = format!("/proc/{}/task", mount.process());
        until(Instant::now() + LIMIT, "the mount's process to stop", || {
            let mut tasks = std::fs::read_dir(&tasks).unwrap().map(|task| task.unwrap().path().join("stat"));
            // The state follows the name, which is in parentheses. A thread that has ended is in the way of none.
            tasks.all(|stat| std::fs::read_to_string(stat).map_or(true, |stat| stat.contains(") T "))).then_some(())
        });
        stopped
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.signal(Signal::CONT);
    }
}

fn is_locked(path: &Path) -> bool {
    match File::open(path).unwrap().try_lock() {
        Err(TryLockError::WouldBlock) => true,
        Ok(()) => false,
        Err(error) => panic!("{error}"),
    }
}

/// A share with a mount behind the gate, and another one.
struct Stage {
    rig: MountRig,
    _server: Server,
    gate: Gate,
    uri: String,
    mount: Mount,
    other: Mount,
}

/// What programs have on the mount, and what they have done.
struct Programs {
    stop: AtomicBool,
    records: AtomicU64,
    _locked: File,
    removed: File,
}

impl Programs {
    /// Appends numbered records until the end. Each call must succeed.
    fn append(&self, path: &Path) {
        let mut file = File::options().create(true).append(true).open(path).unwrap();
        for number in 0u64.. {
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            file.write_all(&number.to_le_bytes()).unwrap();
            self.records.store(number + 1, Ordering::Release);
        }
    }
}

impl Stage {
    fn new() -> Self {
        let rig = MountRig::new(",users=squash:0,writers=exclusive");
        let server = rig.serve();
        let uri = rig.unix();
        let (mount, other) = (rig.mount("mount", &uri, &[]), rig.mount("other", &uri, &[]));
        let gate = Gate::before(&mount);
        Self { rig, _server: server, gate, uri, mount, other }
    }

    fn programs(&self) -> Programs {
        std::fs::write(self.mount.path("locked"), "").unwrap();
        std::fs::write(self.mount.path("removed"), "kept contents").unwrap();
        let [locked, removed] = ["locked", "removed"].map(|name| File::open(self.mount.path(name)).unwrap());
        locked.lock().unwrap();
        std::fs::remove_file(self.mount.path("removed")).unwrap();
        Programs { stop: AtomicBool::new(false), records: AtomicU64::new(0), _locked: locked, removed }
    }

    /// Starts the next process, and waits until it says that it is ready.
    fn begin_takeover(&self) -> Successor {
        let mut successor = Successor::prepare(&self.uri, &self.mount);
        successor.start();
        self.gate.ready.recv_timeout(LIMIT).expect("the next process is ready");
        successor
    }

    /// What still holds on the mount after a takeover that failed.
    fn stays(&self, programs: &Programs) {
        let before = programs.records.load(Ordering::Acquire);
        let is_further = || (programs.records.load(Ordering::Acquire) > before + 2).then_some(());
        until(Instant::now() + LIMIT, "progress of a program", is_further);
        assert!(is_locked(&self.other.path("locked")), "the lock is still held, for the other mount too");
        let mut removed = &programs.removed;
        let mut text = String::new();
        removed.rewind().unwrap();
        removed.read_to_string(&mut text).unwrap();
        assert_eq!(text, "kept contents");
        std::fs::write(self.other.path("news"), before.to_string()).unwrap();
        assert_eq!(std::fs::read_to_string(self.mount.path("news")).unwrap(), before.to_string());
    }

    /// Waits until the mount's process has said so many times that the mount stays with it.
    fn goes_on(&self, times: usize) {
        let said = || (self.mount.log().matches(GOES_ON).count() == times).then_some(());
        until(Instant::now() + LIMIT, "the mount's process to go on", said);
    }

    /// Runs a test beside a program, and takes the mount over at its end.
    fn play(mut self, act: impl FnOnce(&Self, &Programs)) {
        let programs = self.programs();
        let (process, log) = (self.mount.process(), self.mount.path("log"));
        std::thread::scope(|scope| {
            let stop = Stop(&programs.stop);
            let appender = scope.spawn(|| programs.append(&log));
            act(&self, &programs);
            assert!(Path::new(&format!("/proc/{process}")).exists());
            drop(stop);
            appender.join().unwrap();
        });
        self.gate.is_closed.store(false, Ordering::Release);
        let uri = self.uri.clone();
        self.mount.take_over(&uri);
        assert!(is_locked(&self.other.path("locked")));
        let status = run_well(&binary(), &["ctl", "mount", &self.mount.at.display().to_string()]);
        assert!(status.contains("taken over 1 times"), "{status}");
        let records = std::fs::read(self.rig.below().join("log")).unwrap();
        let numbers: Vec<_> = records.as_chunks().0.iter().map(|record| u64::from_le_bytes(*record)).collect();
        assert!(numbers.iter().copied().eq(0..programs.records.load(Ordering::Acquire)), "each append was done once");
        drop(programs);
        let at = self.mount.at.display().to_string();
        let is_unmounted = || run(&binary(), &["umount", &at]).status.success().then_some(());
        until(Instant::now() + LIMIT, "an idle mount", is_unmounted);
        self.other.unmount();
    }
}

/// Ends the program also if the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn a_mount_stays_with_its_process_if_the_next_one_is_too_late() {
    if lacks_mounts() {
        return;
    }
    Stage::new().play(|stage, programs| {
        let successor = stage.begin_takeover();
        successor.signal(Signal::STOP);
        // Only the connections of questions for the state have ended before.
        while stage.gate.ended.try_recv().is_ok() {}
        stage.goes_on(1);
        stage.gate.ended.recv_timeout(LIMIT).expect("the next process was told so");
        stage.gate.pass.send(()).unwrap();
        stage.stays(programs);
        successor.signal(Signal::CONT);
        let said = successor.fails();
        assert!(said.contains("takeover timed out; the old process keeps the mount; try again"), "{said}");
        stage.stays(programs);
    });
}

#[test]
fn a_mount_stays_with_its_process_if_that_one_is_stopped() {
    if lacks_mounts() {
        return;
    }
    Stage::new().play(|stage, programs| {
        // Before it is asked.
        let mut successor = Successor::prepare(&stage.uri, &stage.mount);
        let stopped = Stopped::stop(&stage.mount);
        successor.start();
        let said = successor.fails();
        assert!(said.contains("a mount's process does not answer"), "{said}");
        drop(stopped);
        stage.stays(programs);
        // When it has handed the mount over, and would hear that the next process is ready.
        let successor = stage.begin_takeover();
        let stopped = Stopped::stop(&stage.mount);
        stage.gate.pass.send(()).unwrap();
        let said = successor.fails();
        assert!(said.contains("the mount's process does not answer"), "{said}");
        // Else the gate could take the last word of the mount's process when the process that it is for has ended.
        stage.gate.left.recv_timeout(LIMIT).expect("the next process's connection has ended");
        drop(stopped);
        stage.goes_on(1);
        stage.stays(programs);
    });
}
