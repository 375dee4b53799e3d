//! A mount whose process is replaced by another one while programs use it.

use std::fs::{File, TryLockError};
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::net::Shutdown;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use byway_e2e::{LIMIT, Mount, MountRig, binary, lacks_mounts, run, run_well, until};

/// Options of the share.
const OPTIONS: &str = ",users=squash:0,writers=exclusive";

/// How often the mount changes its process under load, and one that reaches its server in another way.
const TAKEOVERS: u64 = 10;
const TAKEOVERS_OF_OTHERS: u64 = 3;

/// What the programs have done.
#[derive(Default)]
struct Load {
    stop: AtomicBool,
    records: AtomicU64,
    renames: AtomicU64,
    reads: AtomicU64,
}

impl Load {
    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Acquire)
    }

    /// Waits until each program has done something more.
    fn moves(&self) {
        let counts = || [&self.records, &self.renames, &self.reads].map(|count| count.load(Ordering::Acquire));
        let before = counts();
        until(Instant::now() + LIMIT, "progress of all programs", || {
            counts().iter().zip(before).all(|(now, before)| *now > before + 2).then_some(())
        });
    }
}

/// Ends the load also if the test fails.
struct Stop<'a>(&'a Load);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Release);
    }
}

/// Appends numbered records, and makes them durable now and then. Each call must succeed.
fn append(path: &Path, load: &Load) {
    let mut file = File::options().create(true).append(true).open(path).unwrap();
    for number in 0u64.. {
        if !load.goes_on() {
            return;
        }
        file.write_all(&number.to_le_bytes()).unwrap();
        if number % 16 == 0 {
            file.sync_data().unwrap();
        }
        load.records.store(number + 1, Ordering::Release);
    }
}

/// Renames one file again and again, which always has its contents.
fn rename(folder: &Path, load: &Load) {
    let name = |number: u64| folder.join(format!("name-{number}"));
    std::fs::write(name(0), "renamed").unwrap();
    for number in 0u64.. {
        if !load.goes_on() {
            return;
        }
        std::fs::rename(name(number), name(number + 1)).unwrap();
        assert_eq!(std::fs::read_to_string(name(number + 1)).unwrap(), "renamed");
        assert!(!name(number).exists());
        load.renames.store(number + 1, Ordering::Release);
    }
}

/// Reads a file through one handle and by its name; `changes` is what the other mount has written to another one last.
fn read(open: &File, changing: &Path, load: &Load, written: &AtomicU64) {
    for number in 0u64.. {
        if !load.goes_on() {
            return;
        }
        let mut bytes = [0; 4096];
        open.read_exact_at(&mut bytes, number % 16 * 4096).unwrap();
        assert!(bytes.iter().all(|byte| u64::from(*byte) == number % 16));
        let before = written.load(Ordering::Acquire);
        let seen: u64 = std::fs::read_to_string(changing).unwrap().trim().parse().unwrap();
        assert!(seen >= before, "the other mount had written {before}, and {seen} was read");
        load.reads.store(number + 1, Ordering::Release);
    }
}

/// Ends the waits for a lock also if the test fails.
struct Unlock<'a>(&'a File);

impl Drop for Unlock<'_> {
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

/// A shell that works in a directory of the mount.
struct Shell {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Shell {
    fn start(directory: &Path) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", "while read name; do cat \"$name\" && pwd; done"]).current_dir(directory);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (to, from) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, to, from }
    }

    /// What a file in its directory has.
    fn reads(&mut self, name: &str) -> String {
        writeln!(self.to, "{name}").unwrap();
        let (mut text, mut directory) = (String::new(), String::new());
        self.from.read_line(&mut text).unwrap();
        self.from.read_line(&mut directory).unwrap();
        assert!(directory.trim_end().ends_with("/folder"), "{directory}");
        text
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn is_locked(path: &Path) -> bool {
    let file = File::open(path).unwrap();
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => true,
        Ok(()) => false,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn programs_go_on_while_a_mount_changes_its_process() {
    if lacks_mounts() {
        return;
    }
    let rig = MountRig::new(OPTIONS);
    let _server = rig.serve();
    programs_go_on(&rig, &rig.unix(), &[], TAKEOVERS);
}

#[test]
fn programs_go_on_while_a_mount_over_shared_memory_changes_its_process() {
    if lacks_mounts() {
        return;
    }
    let rig = MountRig::new(OPTIONS);
    let _server = rig.serve_shared();
    programs_go_on(&rig, &rig.shared(), &[], TAKEOVERS_OF_OTHERS);
}

#[test]
fn programs_go_on_while_a_mount_over_tls_changes_its_process() {
    if lacks_mounts() {
        return;
    }
    let rig = MountRig::new(OPTIONS);
    let (server, flags) = rig.serve_secure();
    let flags: Vec<_> = flags.iter().map(String::as_str).collect();
    programs_go_on(&rig, &rig.secure(&server), &flags, TAKEOVERS_OF_OTHERS);
}

/// Programs use a mount of the share while it changes its process so many times.
fn programs_go_on(rig: &MountRig, uri: &str, flags: &[&str], takeovers: u64) {
    let (mut mount, other) = (rig.mount("mount", uri, flags), rig.mount("other", uri, flags));
    let pages: Vec<u8> = (0..16).flat_map(|number| [number; 4096]).collect();
    for (name, contents) in [("pages", &pages[..]), ("locked", b""), ("changing", b"0"), ("removed", b"kept contents")]
    {
        std::fs::write(mount.path(name), contents).unwrap();
    }
    std::fs::create_dir(mount.path("folder")).unwrap();
    std::fs::write(mount.path("folder/file"), "in the folder\n").unwrap();
    let open = File::open(mount.path("pages")).unwrap();
    let locked = File::open(mount.path("locked")).unwrap();
    locked.lock().unwrap();
    let mut removed = File::options().read(true).write(true).open(mount.path("removed")).unwrap();
    std::fs::remove_file(mount.path("removed")).unwrap();
    let mut shell = Shell::start(&mount.path("folder"));
    let (load, written, has_lock) = (Load::default(), AtomicU64::new(0), AtomicBool::new(false));
    let (log, folder, changing) = (mount.path("log"), mount.path("folder"), mount.path("changing"));
    let waits = File::open(mount.path("locked")).unwrap();
    std::thread::scope(|scope| {
        let (stop, unlock) = (Stop(&load), Unlock(&locked));
        scope.spawn(|| append(&log, &load));
        scope.spawn(|| rename(&folder, &load));
        scope.spawn(|| read(&open, &changing, &load, &written));
        let waiter = scope.spawn(|| {
            waits.lock().unwrap();
            has_lock.store(true, Ordering::Release);
        });
        for number in 1..=takeovers {
            load.moves();
            mount.take_over_by(uri, flags);
            assert!(is_locked(&other.path("locked")), "the lock is still held, for the other mount too");
            assert!(!has_lock.load(Ordering::Acquire));
            removed.write_all_at(format!("after {number}").as_bytes(), 100).unwrap();
            removed.rewind().unwrap();
            let mut bytes = Vec::new();
            removed.read_to_end(&mut bytes).unwrap();
            assert!(bytes.starts_with(b"kept contents") && bytes.ends_with(format!("after {number}").as_bytes()));
            assert_eq!(shell.reads("file"), "in the folder\n");
            // Written to a new file: a file that is cut and written has a moment without contents.
            std::fs::write(other.path("next"), number.to_string()).unwrap();
            std::fs::rename(other.path("next"), other.path("changing")).unwrap();
            written.store(number, Ordering::Release);
        }
        load.moves();
        drop(stop);
        drop(unlock);
        waiter.join().unwrap();
    });
    assert!(has_lock.load(Ordering::Acquire) && is_locked(&other.path("locked")));
    drop(waits);
    until(Instant::now() + LIMIT, "the lock's end", || (!is_locked(&other.path("locked"))).then_some(()));
    let records = std::fs::read(rig.below().join("log")).unwrap();
    assert_eq!(records.len() as u64, 8 * load.records.load(Ordering::Acquire), "each append was done once");
    for (number, record) in records.as_chunks().0.iter().enumerate() {
        assert_eq!(u64::from_le_bytes(*record), number as u64);
    }
    let status = run_well(&binary(), &["ctl", "mount", &mount.at.display().to_string()]);
    assert!(status.contains(&format!("taken over {takeovers} times")), "{status}");
    drop((shell, removed, open, locked));
    unmount_when_idle(mount);
    other.unmount();
}

/// The kernel may still have to say that files were closed.
fn unmount_when_idle(mount: Mount) {
    let at = mount.at.display().to_string();
    until(Instant::now() + LIMIT, "an idle mount", || run(&binary(), &["umount", &at]).status.success().then_some(()));
    drop(mount);
}

/// Asks a mount's process for the mount, and gives the connection and its answer.
fn ask_for(mount: &Mount, version: u32) -> (UnixStream, String) {
    let mut stream = UnixStream::connect(mount.socket()).unwrap();
    writeln!(stream, "{{\"take_over\":{{\"version\":{version}}}}}").unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let mut answer = String::new();
    // The descriptors that come with it are closed.
    BufReader::new(&stream).read_line(&mut answer).unwrap();
    (stream, answer)
}

#[test]
fn a_mount_stays_with_its_process_if_the_next_one_dies() {
    if lacks_mounts() {
        return;
    }
    let rig = MountRig::new(",users=squash:0,writers=exclusive");
    let _server = rig.serve();
    let uri = rig.unix();
    let mount = rig.mount("mount", &uri, &[]);
    std::fs::write(mount.path("file"), "contents").unwrap();
    std::fs::write(mount.path("removed"), "kept").unwrap();
    let file = File::open(mount.path("file")).unwrap();
    file.lock().unwrap();
    let mut removed = File::open(mount.path("removed")).unwrap();
    std::fs::remove_file(mount.path("removed")).unwrap();
    let waits = File::open(mount.path("file")).unwrap();
    let other = rig.mount("other", &uri, &[]);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| waits.lock());
        let unlock = Unlock(&file);
        for _ in 0..3 {
            let (stream, answer) = ask_for(&mount, 1);
            assert!(answer.contains("handover"), "{answer}");
            // A child that another test just starts may have the descriptor, too.
            stream.shutdown(Shutdown::Both).unwrap();
            assert_eq!(std::fs::read_to_string(mount.path("file")).unwrap(), "contents");
            assert!(is_locked(&other.path("file")));
        }
        assert!(!waiter.is_finished());
        let mut text = String::new();
        removed.read_to_string(&mut text).unwrap();
        assert_eq!(text, "kept");
        drop(unlock);
        waiter.join().unwrap().unwrap();
    });
    let (_, answer) = ask_for(&mount, 99);
    assert!(answer.contains("version"), "{answer}");
    let refused = run(
        &binary(),
        &["mount", "--takeover", &rig.unix().replace("share?", "else?"), &mount.at.display().to_string()],
    );
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("is a mount of"), "{said}");
    drop((file, waits, removed));
    unmount_when_idle(mount);
    other.unmount();
}

#[test]
fn mounts_are_listed_and_tell_how_they_are() {
    if lacks_mounts() {
        return;
    }
    let rig = MountRig::new(",users=squash:0,writers=exclusive");
    let server = rig.serve();
    let uri = rig.unix();
    let mut mount = rig.mount("mount", &uri, &[]);
    std::fs::write(mount.path("file"), vec![7; 3000]).unwrap();
    assert_eq!(std::fs::read(mount.path("file")).unwrap().len(), 3000);
    let at = mount.at.display().to_string();
    let listed =
        || run_well(&binary(), &["mount", "--list"]).lines().find(|line| line.starts_with(&at)).map(str::to_owned);
    let line = listed().expect("it is listed");
    assert!(line.contains(&uri) && line.contains(&mount.process().to_string()) && line.contains("connected"), "{line}");
    let status: serde_json::Value =
        serde_json::from_str(&run_well(&binary(), &["ctl", "mount", &at, "--json"])).unwrap();
    assert_eq!((&status["written_bytes"], &status["read_bytes"]), (&3000.into(), &3000.into()), "{status}");
    assert!(status["calls"]["writes"].as_u64() >= Some(1) && status["messages"].as_u64() >= Some(3), "{status}");
    drop(server);
    until(Instant::now() + LIMIT, "the loss of the server", || listed()?.contains("away").then_some(()));
    let socket = mount.socket();
    mount.kill();
    // The list of another test may have removed its socket already.
    assert_eq!(listed(), None);
    assert!(!socket.exists(), "a socket that nobody listens on is removed");
}
