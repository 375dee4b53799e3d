//! File systems that answer later, or not at all: unmounts, signals and invalidations meanwhile.

use std::collections::HashMap;
use std::fs::{File, Permissions};
use std::io::{IoSlice, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::process::Command;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

use byway_frontend::fuse::abi::{Attr, ROOT, open};
use byway_frontend::fuse::mount::unmount;
use byway_frontend::fuse::reply::Entry;
use byway_frontend::fuse::request::Operation;
use byway_frontend::fuse::session::Wishes;
use byway_frontend::fuse::{Answered, Filesystem, Notifier, NotifyError, PauseError, Reply, Request};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use crate::rig::{LIMIT, Mount, THREADS, lacks_mounts, until};

const FILE: u64 = 2;
const FILE_BYTES: u64 = 4 << 20;

/// Kinds of operations, as the file system tells them apart.
const READ: u8 = 1;
const LOOK_UP: u8 = 2;

/// One file whose reads and lock requests wait until the test answers them.
#[derive(Default)]
struct StalledFile {
    reads: Mutex<Vec<(u32, Reply)>>,
    locks: Mutex<HashMap<u64, Reply>>,
    /// Requests for locks that came. While the test has `locks_gate`, each keeps the thread that brought it, and is not in `locks` yet.
    locks_coming: AtomicU8,
    locks_gate: Mutex<()>,
    /// Of each write: its length, and where its bytes lay.
    writes: Mutex<Vec<(usize, usize)>>,
    ended: OnceLock<()>,
    notifier: OnceLock<Notifier>,
    told_from_a_serving_thread: OnceLock<bool>,
    /// Changes of attributes keep their thread until the test says so: how many do, and whether they may end.
    changes: Mutex<(usize, bool)>,
    may_change: Condvar,
    /// If not 0, reads are answered at once with such bytes.
    value: AtomicU8,
    answered: Mutex<Vec<Answered>>,
}

fn attributes(node: u64) -> Attr {
    let (mode, size) = if node == ROOT { (0o40755, 0) } else { (0o100_644, FILE_BYTES) };
    Attr { ino: node, mode, nlink: 1, size, block_bytes: 4096, ..Attr::default() }
}

impl Filesystem for StalledFile {
    fn request(&self, request: Request, reply: Reply) {
        let parsed = request.parsed();
        let forever = Duration::from_secs(3600);
        match parsed.operation {
            Operation::Lookup { name: b"file" } => {
                let attr = attributes(FILE);
                reply.entry(&Entry { node: FILE, generation: 0, attr, entry_valid: forever, attr_valid: forever });
            }
            Operation::Lookup { name } if name.starts_with(b"other") => {
                let node = FILE + name.iter().fold(1, |sum, byte| sum * 10 + u64::from(*byte));
                reply.entry(&Entry { node, attr: attributes(node), ..Entry::default() });
            }
            Operation::Lookup { .. } => reply.error(Errno::NOENT),
            Operation::GetAttr { .. } => {
                if let Some(notifier) = self.notifier.get() {
                    let told = notifier.invalidate_inode(FILE, 0, 0);
                    let _ = self.told_from_a_serving_thread.set(!matches!(told, Err(NotifyError::ServingThread)));
                }
                reply.attributes(attributes(parsed.node), Duration::ZERO);
            }
            // A process that is killed must not wait for a FLUSH that it would have to answer itself.
            Operation::Open { .. } => reply.opened(1, open::KEEP_CACHE | open::NO_FLUSH),
            Operation::Read { size, .. } => match self.value.load(Ordering::SeqCst) {
                0 => self.reads.lock().unwrap().push((size, reply)),
                value => reply.data(&vec![value; size as usize]),
            },
            Operation::Write(write) => {
                let place = (write.data.len(), write.data.as_ptr().addr() % 4096);
                self.writes.lock().unwrap().push(place);
                reply.written(write.data.len() as u32);
            }
            Operation::SetLock { wait: true, .. } => {
                self.locks_coming.fetch_add(1, Ordering::SeqCst);
                drop(self.locks_gate.lock().unwrap());
                self.locks.lock().unwrap().insert(parsed.unique, reply);
            }
            Operation::SetAttr(_) => {
                let mut changes = self.changes.lock().unwrap();
                changes.0 += 1;
                drop(self.may_change.wait_while(changes, |(_, may)| !*may).unwrap());
                reply.attributes(attributes(parsed.node), Duration::ZERO);
            }
            Operation::Flush { .. } | Operation::Release { .. } => reply.ok(),
            _ => reply.error(Errno::NOSYS),
        }
    }

    fn may_wait(&self, operation: &Operation<'_>) -> bool {
        operation.changes()
    }

    fn kind_of(&self, operation: &Operation<'_>) -> u8 {
        match operation {
            Operation::Read { .. } => READ,
            Operation::Lookup { .. } => LOOK_UP,
            _ => 0,
        }
    }

    fn answered(&self, answered: Answered) {
        self.answered.lock().unwrap().push(answered);
    }

    fn forget(&self, _node: u64, _lookups: u64) {}

    fn interrupt(&self, unique: u64) {
        if let Some(reply) = self.locks.lock().unwrap().remove(&unique) {
            reply.error(Errno::INTR);
        }
    }

    fn ended(&self) {
        self.ended.set(()).expect("told once");
    }
}

fn stalled(wishes: Wishes) -> Option<(Arc<StalledFile>, Mount)> {
    if lacks_mounts() {
        return None;
    }
    let files = Arc::new(StalledFile::default());
    let mount = Mount::of(files.clone(), wishes);
    Some((files, mount))
}

#[test]
fn an_unmount_with_requests_under_way_leaves_nobody_waiting() {
    let Some((files, mount)) = stalled(Wishes::default()) else { return };
    // A process of its own, which waits in the kernel, holds the file open.
    let mut reader =
        Command::new("cat").arg(mount.path().join("file")).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let (size, late) = until("its read", || files.reads.lock().unwrap().pop());
    assert!(mount.driver().under_way() >= 1);
    unmount(mount.path(), true).unwrap();
    assert!(!mount.path().join("file").exists(), "nothing is there for others");
    // The mount lives on for the reader, which gets its bytes.
    late.data(&vec![b'x'; size as usize]);
    let mut first = [0; 1];
    reader.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    assert_eq!(&first, b"x");
    // It is killed with further reads under way: the last user of the mount is gone, and that ends it.
    reader.kill().unwrap();
    reader.wait().unwrap();
    let answers = files.clone();
    until("the mount's end", || {
        // What is answered too late changes nothing.
        answers.reads.lock().unwrap().clear();
        files.ended.get().copied()
    });
    mount.wait_for_the_end();
}

#[test]
fn a_signal_reaches_what_waits_for_a_lock() {
    let Some((files, mount)) = stalled(Wishes { locks: true, ..Wishes::default() }) else { return };
    if !std::path::Path::new("/usr/bin/flock").is_file() {
        return byway_skip::skip_this(byway_skip::SkipReason::MissingTool("flock"));
    }
    let mut waiter = Command::new("flock").arg(mount.path().join("file")).arg("true").spawn().unwrap();
    until("its lock request", || (!files.locks.lock().unwrap().is_empty()).then_some(()));
    kill_process(Pid::from_child(&waiter), Signal::TERM).unwrap();
    let status = until("its end", || waiter.try_wait().unwrap());
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(Signal::TERM.as_raw()));
    assert!(files.locks.lock().unwrap().is_empty(), "the file system was told");
}

#[test]
fn a_signal_reaches_what_is_about_to_wait_for_a_lock() {
    let Some((files, mount)) = stalled(Wishes { locks: true, ..Wishes::default() }) else { return };
    if !std::path::Path::new("/usr/bin/flock").is_file() {
        return byway_skip::skip_this(byway_skip::SkipReason::MissingTool("flock"));
    }
    let held_back = files.locks_gate.lock().unwrap();
    let mut waiter = Command::new("flock").arg(mount.path().join("file")).arg("true").spawn().unwrap();
    until("its lock request", || (files.locks_coming.load(Ordering::SeqCst) > 0).then_some(()));
    kill_process(Pid::from_child(&waiter), Signal::TERM).unwrap();
    // The kernel has queued the interrupt when it makes the process wait for the reply alone, and sends it before other requests.
    let stat = format!("/proc/{}/stat", waiter.id());
    until("the interrupt", || std::fs::read_to_string(&stat).unwrap().contains(") D ").then_some(()));
    for _ in 0..2 * THREADS {
        std::fs::metadata(mount.path().join("other")).unwrap();
    }
    drop(held_back);
    let status = until("its end", || waiter.try_wait().unwrap());
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(Signal::TERM.as_raw()));
    assert!(files.locks.lock().unwrap().is_empty(), "the file system was told");
}

#[test]
fn cached_pages_go_when_the_file_system_says_so() {
    let Some((files, mount)) = stalled(Wishes { auto_invalidate: false, ..Wishes::default() }) else { return };
    let file = File::open(mount.path().join("file")).unwrap();
    let read = || {
        let mut byte = [0];
        file.read_exact_at(&mut byte, 0).unwrap();
        byte[0]
    };
    files.value.store(b'a', Ordering::SeqCst);
    assert_eq!(read(), b'a');
    files.value.store(b'b', Ordering::SeqCst);
    assert_eq!(read(), b'a', "from the page cache, nobody was asked");
    let notifier = mount.driver().notifier();
    assert!(notifier.invalidate_inode(FILE, 0, 0).unwrap());
    assert_eq!(read(), b'b');
    assert!(!notifier.invalidate_inode(99, 0, 0).unwrap(), "a node that the kernel does not know");
    assert!(notifier.invalidate_entry(ROOT, b"file").unwrap());
    assert!(matches!(notifier.invalidate_entry(ROOT, &[b'x'; 256]), Err(NotifyError::Name(256))));
    // A thread that serves requests may not: what it waits for may be a request that it would serve.
    assert!(files.notifier.set(notifier).is_ok());
    let _ = std::fs::metadata(mount.path()).unwrap();
    assert_eq!(files.told_from_a_serving_thread.get(), Some(&false));
}

#[test]
fn long_writes_come_whole_and_page_aligned() {
    let Some((files, mount)) = stalled(Wishes::default()) else { return };
    let file = File::options().write(true).open(mount.path().join("file")).unwrap();
    for len in [1 << 20, 100 << 10] {
        assert_eq!(file.write_at(&vec![1; len], 0).unwrap(), len);
        assert_eq!(files.writes.lock().unwrap().pop(), Some((len, 0)));
    }
}

/// Has changes end, also when the test fails.
struct Released<'a>(&'a StalledFile);

impl Drop for Released<'_> {
    fn drop(&mut self) {
        self.0.changes.lock().unwrap().1 = true;
        self.0.may_change.notify_all();
    }
}

#[test]
fn reads_go_on_while_more_changes_wait_than_there_are_threads() {
    let Some((files, mount)) = stalled(Wishes::default()) else { return };
    files.value.store(b'a', Ordering::SeqCst);
    let file = File::open(mount.path().join("file")).unwrap();
    std::thread::scope(|scope| {
        let released = Released(&files);
        let change = |number| {
            let path = mount.path().join(format!("other{number}"));
            move || std::fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap()
        };
        let changing: Vec<_> = (0..12).map(|number| scope.spawn(change(number))).collect();
        until("changes in all threads", || (files.changes.lock().unwrap().0 >= THREADS).then_some(()));
        let reading = scope.spawn(|| {
            let mut bytes = [0; 4096];
            file.read_exact_at(&mut bytes, 0).unwrap();
            bytes[0]
        });
        until("a read beside them", || reading.is_finished().then_some(()));
        assert_eq!(reading.join().unwrap(), b'a');
        assert!(changing.iter().all(|change| !change.is_finished()));
        drop(released);
    });
    assert_eq!(files.changes.lock().unwrap().0, 12, "those that had to queue were made too");
}

#[test]
fn a_pause_waits_for_a_reply_that_is_on_its_way() {
    let Some((files, mount)) = stalled(Wishes::default()) else { return };
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    let file = File::options().read(true).custom_flags(direct).open(mount.path().join("file")).unwrap();
    let control = mount.driver().control();
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| file.read_exact_at(&mut [0; 4096], 0));
        let (size, reply) = until("its read", || files.reads.lock().unwrap().pop());
        let ((begins, begun), (may, go_on)) = (channel(), channel::<()>());
        scope.spawn(move || {
            reply.data_by(size as usize, |kernel, head| {
                begins.send(()).unwrap();
                let _ = go_on.recv();
                Ok(rustix::io::writev(kernel, &[IoSlice::new(head), IoSlice::new(&vec![1; size as usize])])?)
            });
        });
        begun.recv().unwrap();
        let paused = control.pause(Duration::from_millis(1));
        drop(may);
        assert!(matches!(paused, Err(PauseError::Late(_))), "{paused:?}");
        reading.join().unwrap().unwrap();
    });
    control.pause(LIMIT).unwrap();
    control.go_on();
}

#[test]
fn each_answer_is_told_with_its_time_and_its_error() {
    let Some((files, mount)) = stalled(Wishes::default()) else { return };
    let told = |kind| -> Vec<Answered> {
        files.answered.lock().unwrap().iter().filter(|one| one.kind == kind).copied().collect()
    };
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    let file = File::options().read(true).custom_flags(direct).open(mount.path().join("file")).unwrap();
    assert!(!mount.path().join("missing").exists());
    let missing = |one: &Answered| one.error == Some(Errno::NOENT);
    until("the answer to a look-up that fails", || told(LOOK_UP).into_iter().find(missing));
    assert!(told(LOOK_UP).iter().any(|one| one.error.is_none()), "the file is there");
    let began = std::time::Instant::now();
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| file.read_exact_at(&mut [0; 4096], 0));
        let (_, reply) = until("its read", || files.reads.lock().unwrap().pop());
        let come = std::time::Instant::now();
        assert!(told(READ).is_empty(), "it has no answer");
        // The reply is lost, and the kernel gets an error in its place.
        let waited = come.elapsed();
        drop(reply);
        let read = until("its answer", || told(READ).pop());
        assert_eq!(read.error, Some(Errno::IO));
        assert!(read.time >= waited && read.time <= began.elapsed(), "{read:?}");
        assert!(reading.join().unwrap().is_err());
    });
}
