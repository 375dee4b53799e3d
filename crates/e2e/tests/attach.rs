//! Volumes as block devices of this machine: file systems on them, loss of their servers, and detaching.

use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use byway_e2e::{LIMIT, Rig, Server, SkipReason, binary, find_tool, noise, run, run_well, until};
use rustix::process::{Pid, Signal, kill_process};

/// An attached volume, and a file system that may be mounted on it. Both go with the test, also when it fails.
struct Attached {
    name: String,
    device: PathBuf,
    pid: i32,
    mounted: Option<PathBuf>,
}

impl Attached {
    /// Attaches a volume under a name of this test's own.
    fn new(uri: &str, name: &str, more: &[&str]) -> Self {
        let name = format!("test-{name}-{}", std::process::id());
        // Devices of ublk have a guest of their own.
        let arguments = [&["attach", uri, "--as", &name, "--via", "loop"], more].concat();
        let attached = run(&binary(), &arguments);
        let (said, warned) = (String::from_utf8_lossy(&attached.stdout), String::from_utf8_lossy(&attached.stderr));
        assert!(attached.status.success(), "{warned}");
        assert!(warned.contains("the server is on this machine"), "{warned}");
        let device = PathBuf::from(said.trim());
        assert_eq!(std::fs::read_link(format!("/dev/byway/{name}")).unwrap(), device);
        let file = std::fs::read_to_string(format!("/run/byway-attach/{name}.json")).unwrap();
        let file: serde_json::Value = serde_json::from_str(&file).unwrap();
        assert_eq!((file["uri"].as_str(), file["device"].as_str()), (Some(uri), device.to_str()));
        Self { name, device, pid: file["pid"].as_i64().unwrap() as i32, mounted: None }
    }

    fn device(&self) -> &str {
        self.device.to_str().unwrap()
    }

    /// Bytes, as the kernel has them.
    fn bytes(&self) -> u64 {
        let size = Path::new("/sys/class/block").join(self.device.file_name().unwrap()).join("size");
        std::fs::read_to_string(size).unwrap().trim().parse::<u64>().unwrap() * 512
    }

    fn mount(&mut self, at: PathBuf) {
        run_well(&find_tool("mount").unwrap(), &[self.device(), at.to_str().unwrap()]);
        self.mounted = Some(at);
    }

    fn unmount(&mut self) {
        if let Some(at) = self.mounted.take() {
            run_well(&find_tool("umount").unwrap(), &[at.to_str().unwrap()]);
        }
    }

    fn lives(&self) -> bool {
        lives(self.pid)
    }

    /// What the registry says of it.
    fn record(&self) -> serde_json::Value {
        let file = format!("/run/byway-attach/{}.json", self.name);
        let said = || serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).ok();
        until(Instant::now() + LIMIT, "a record that is written", said)
    }

    fn keeper(&self) -> i32 {
        self.record()["file"]["keeper"]["pid"].as_i64().unwrap() as i32
    }

    /// Kills the process that serves the device; its successor is this test's process from now on.
    fn kill_process(&mut self) {
        signal(self.pid, Signal::KILL);
        self.await_successor();
    }

    fn await_successor(&mut self) {
        let before = self.pid;
        let next = || Some(self.record()["pid"].as_i64().unwrap() as i32).filter(|pid| *pid != before);
        self.pid = until(Instant::now() + LIMIT, "a successor", next);
    }

    /// Kills the process and its keeper, so that no successor begins.
    fn kill(&self) {
        let keeper = self.keeper();
        signal(self.pid, Signal::STOP);
        signal(keeper, Signal::KILL);
        signal(self.pid, Signal::KILL);
        until(Instant::now() + LIMIT, "the processes' death", || (!self.lives() && !lives(keeper)).then_some(()));
    }

    /// Whether the kernel still has the volume's file behind the device; the number may be another device's by now.
    fn is_there(&self) -> bool {
        let file = Path::new("/sys/class/block").join(self.device.file_name().unwrap()).join("loop/backing_file");
        std::fs::read_to_string(file).is_ok_and(|path| path.trim() == format!("/{}", self.name))
    }

    fn detach(&mut self) {
        let keeper = self.keeper();
        run_well(&binary(), &["detach", &self.name]);
        // The process has ended by then, and the device with it.
        assert!(!self.is_there() && !self.lives());
        until(Instant::now() + LIMIT, "the keeper's end", || (!lives(keeper)).then_some(()));
        assert!(!Path::new("/dev/byway").join(&self.name).exists());
        assert!(!Path::new(&format!("/run/byway-attach/{}.json", self.name)).exists());
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        if let Some(at) = self.mounted.take() {
            let _ = Command::new("umount").arg("-l").arg(at).status();
        }
        // The process may have died, and a successor begin.
        if Path::new(&format!("/run/byway-attach/{}.json", self.name)).exists() {
            let detached = run(&binary(), &["detach", &self.name]);
            if !detached.status.success() && self.lives() {
                self.kill();
            }
        }
        let log = format!("/run/byway-attach/{}.log", self.name);
        if std::thread::panicking() {
            eprintln!("--- the device's log:\n{}", std::fs::read_to_string(&log).unwrap_or_default());
        }
        for path in [log, format!("/run/byway-attach/{}.json", self.name), format!("/dev/byway/{}", self.name)] {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn lives(pid: i32) -> bool {
    // One that has ended and was not collected yet is a zombie.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

fn signal(pid: i32, signal: Signal) {
    let _ = kill_process(Pid::from_raw(pid).unwrap(), signal);
}

/// Whether this machine has no loop devices over FUSE, or lacks one of these tools; which is said aloud.
fn lacks(tools: &[&'static str]) -> bool {
    if let Some(missing) = tools.iter().find(|tool| find_tool(tool).is_none()) {
        byway_e2e::skip_this(SkipReason::MissingTool(missing));
        return true;
    }
    let lacks = !rustix::process::geteuid().is_root()
        || ["/dev/fuse", "/dev/loop-control"].iter().any(|device| !Path::new(device).exists());
    if lacks {
        byway_e2e::skip_this(SkipReason::Machine("needs root, /dev/fuse and loop devices"));
    }
    lacks
}

/// A node with these volumes, and the URI of one on byway's own protocol.
fn node(volumes: &str, prepare: impl FnOnce(&Rig), volume: &str) -> (Rig, String) {
    let rig = Rig::new("\"first=mem:1M\"", &["--listen", "unix://DIR/native"]);
    prepare(&rig);
    rig.configure(&volumes.replace("DIR", rig.folder.path().to_str().unwrap()));
    rig.reload();
    let uri = format!("byway+unix:///{volume}?socket={}", rig.path("native").display());
    (rig, uri)
}

#[test]
fn ext4_does_not_notice_that_its_server_is_killed() {
    if lacks(&["mkfs.ext4", "fsck.ext4", "mount", "umount"]) {
        return;
    }
    let kills = kills_under_fio();
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::File::create(at("disk")).unwrap().set_len(512 << 20).unwrap();
    std::fs::create_dir(at("fs")).unwrap();
    let arguments = [format!("disk={}", at("disk")), format!("unix://{}", at("sock"))];
    let start = || Server::start(folder.path(), 1, &["--volume", &arguments[0], "--listen", &arguments[1]]);
    let mut server = start();
    let mut attached = Attached::new(&format!("byway+unix:///disk?socket={}", at("sock")), "killed", &[]);
    run_well(&find_tool("mkfs.ext4").unwrap(), &["-q", attached.device()]);
    attached.mount(folder.path().join("fs"));

    let files = kills * 12;
    let file = |number: usize| (at(&format!("fs/{number}")), noise(1 + number % 7 * 77_777, number as u64));
    let written = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            for number in 0..files {
                let (path, bytes) = file(number);
                std::fs::write(&path, bytes).unwrap();
                if number % 3 == 0 {
                    std::fs::File::open(&path).unwrap().sync_all().unwrap();
                }
                written.store(number + 1, Ordering::SeqCst);
            }
        });
        for kill in 0..kills {
            let enough = || (written.load(Ordering::SeqCst) > kill * 10 || writing.is_finished()).then_some(());
            until(Instant::now() + LIMIT, "some files", enough);
            server.kill();
            server = start();
        }
    });
    attached.unmount();
    run_well(&find_tool("fsck.ext4").unwrap(), &["-f", "-n", attached.device()]);
    // Nothing of what is read now is in the page cache of that mount any more.
    attached.mount(folder.path().join("fs"));
    for number in 0..files {
        let (path, bytes) = file(number);
        assert!(std::fs::read(&path).unwrap() == bytes, "{path}");
    }
    attached.unmount();
    attached.detach();
    assert_eq!(server.terminate(), Some(0));
    // What the store holds, without anything of ours in between.
    run_well(&find_tool("fsck.ext4").unwrap(), &["-f", "-n", &at("disk")]);
}

/// Kills of the server, or of the device's process, while fio works: 50 in a long run.
fn kills_under_fio() -> usize {
    if std::env::var_os("BYWAY_LONG").is_some() { 50 } else { 5 }
}

/// fio writes a file or a device, and checks what it reads; `kill` is called each time that the store has changed.
fn fio_finds_its_own_bytes(target: &Path, folder: &Path, kill: &mut dyn FnMut()) {
    let said = folder.join("said");
    let mut fio = Command::new(find_tool("fio").unwrap())
        .args([
            "--name=verify",
            "--rw=randwrite",
            "--bsrange=4k-256k",
            "--direct=1",
            "--ioengine=libaio",
            "--iodepth=16",
        ])
        .args([
            "--size=96m",
            "--fsync=64",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--do_verify=1",
            "--verify_backlog=256",
        ])
        // Enough of them to be killed so often.
        .arg(format!("--loops={}", kills_under_fio().div_ceil(5)))
        // The state file would land in the working folder.
        .arg("--verify_state_save=0")
        .arg(format!("--filename={}", target.display()))
        .stdout(std::fs::File::create(&said).unwrap())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let changed = || std::fs::metadata(folder.join("disk")).unwrap().modified().unwrap();
    let mut kills = 0;
    let status = loop {
        let before = changed();
        let next = until(Instant::now() + LIMIT * 5, "fio to write, or to end", || match fio.try_wait().unwrap() {
            Some(status) => Some(Some(status)),
            None => (changed() != before && kills < kills_under_fio()).then_some(None),
        });
        if let Some(status) = next {
            break status;
        }
        kills += 1;
        kill();
    };
    assert!(status.success(), "{}", std::fs::read_to_string(said).unwrap());
    println!("{kills} kills");
    assert!(kills * 2 > kills_under_fio(), "fio was done after {kills} kills");
}

#[test]
fn fio_finds_its_own_bytes_although_the_server_is_killed() {
    if lacks(&["fio"]) {
        return;
    }
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::File::create(at("disk")).unwrap().set_len(128 << 20).unwrap();
    let arguments = [format!("disk={}", at("disk")), format!("unix://{}", at("sock"))];
    let start = || Server::start(folder.path(), 1, &["--volume", &arguments[0], "--listen", &arguments[1]]);
    let mut server = start();
    let mut attached = Attached::new(&format!("byway+unix:///disk?socket={}", at("sock")), "fio", &[]);
    fio_finds_its_own_bytes(&attached.device.clone(), folder.path(), &mut || {
        server.kill();
        server = start();
    });
    attached.detach();
    assert_eq!(server.terminate(), Some(0));
}

/// What is killed while fio works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Killed {
    Server,
    Process,
}

/// A file system that fio works in during the kills has no errors afterwards.
fn stays_clean(make: &'static str, check: [&'static str; 2], kind: &'static str, killed: Killed) {
    if lacks(&["fio", make, check[0], "mount", "umount"]) {
        return;
    }
    let known = std::fs::read_to_string("/proc/filesystems").unwrap();
    if !known.split_whitespace().any(|known| known == kind) {
        return byway_e2e::skip_this(SkipReason::Machine("the kernel lacks the file system"));
    }
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::File::create(at("disk")).unwrap().set_len(512 << 20).unwrap();
    std::fs::create_dir(at("fs")).unwrap();
    let arguments = [format!("disk={}", at("disk")), format!("unix://{}", at("sock"))];
    let start = || Server::start(folder.path(), 1, &["--volume", &arguments[0], "--listen", &arguments[1]]);
    let mut server = start();
    let mut attached =
        Attached::new(&format!("byway+unix:///disk?socket={}", at("sock")), &format!("{kind}-{killed:?}"), &[]);
    run_well(&find_tool(make).unwrap(), &["-q", attached.device()]);
    attached.mount(folder.path().join("fs"));
    fio_finds_its_own_bytes(&folder.path().join("fs/file"), folder.path(), &mut || match killed {
        Killed::Process => attached.kill_process(),
        Killed::Server => {
            server.kill();
            server = start();
        }
    });
    attached.unmount();
    run_well(&find_tool(check[0]).unwrap(), &[check[1], "-n", attached.device()]);
    attached.detach();
    assert_eq!(server.terminate(), Some(0));
    run_well(&find_tool(check[0]).unwrap(), &[check[1], "-n", &at("disk")]);
}

#[test]
fn ext4_is_clean_after_fio_and_kills_of_the_server() {
    stays_clean("mkfs.ext4", ["fsck.ext4", "-f"], "ext4", Killed::Server);
}

#[test]
fn ext4_is_clean_after_fio_and_kills_of_the_device_s_process() {
    stays_clean("mkfs.ext4", ["fsck.ext4", "-f"], "ext4", Killed::Process);
}

#[test]
fn xfs_is_clean_after_fio_and_kills_of_the_server() {
    // The image file is checked in the same way as a device.
    stays_clean("mkfs.xfs", ["xfs_repair", "-f"], "xfs", Killed::Server);
}

#[test]
fn a_device_has_the_size_of_its_volume_and_gives_space_back() {
    if lacks(&["blkdiscard"]) {
        return;
    }
    let prepare = |rig: &Rig| drop(rig.file("grows", 64 << 20));
    let (rig, uri) = node("\"grows=DIR/grows\"", prepare, "grows");
    let mut attached = Attached::new(&uri, "grows", &[]);
    assert_eq!(attached.bytes(), 64 << 20);
    rig.file("grows", 96 << 20);
    assert_eq!(rig.reload(), "resized: grows\n");
    until(Instant::now() + LIMIT, "the device to grow", || (attached.bytes() == 96 << 20).then_some(()));

    let below = rig.path("grows");
    let allocated = || std::fs::metadata(&below).unwrap().blocks() * 512;
    let bytes = noise(32 << 20, 5);
    let write = std::fs::OpenOptions::new().write(true).open(&attached.device).unwrap();
    // The last part lies where the volume has grown.
    std::os::unix::fs::FileExt::write_all_at(&write, &bytes, 64 << 20).unwrap();
    write.sync_all().unwrap();
    drop(write);
    let file = std::fs::File::open(&below).unwrap();
    let range = |offset: u64, len: usize| {
        let mut range = vec![0; len];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut range, offset).unwrap();
        range
    };
    assert!(range(64 << 20, 32 << 20) == bytes, "an fsync of the device has brought it all there");
    let before = allocated();
    assert!(before >= 32 << 20);
    let discarded = (64 << 20).to_string();
    run_well(&find_tool("blkdiscard").unwrap(), &["--offset", &discarded, "--length", "16777216", attached.device()]);
    assert_eq!(allocated(), before - (16 << 20), "the space is the file system's again");
    assert!(range(64 << 20, 16 << 20).iter().all(|byte| *byte == 0) && range(80 << 20, 16 << 20) == bytes[16 << 20..]);
    attached.detach();
}

#[test]
fn a_read_only_volume_is_a_read_only_device() {
    if lacks(&[]) {
        return;
    }
    let prepare = |rig: &Rig| drop(rig.file("fixed", 1 << 20));
    let (rig, uri) = node(
        "\"fixed=DIR/fixed,ro\", \"free=DIR/free\"",
        |rig| {
            prepare(rig);
            rig.file("free", 1 << 20);
        },
        "fixed",
    );
    for (uri, more) in [(uri.clone(), &[][..]), (uri.replace("/fixed?", "/free?"), &["--read-only"][..])] {
        let mut attached = Attached::new(&uri, "fixed", more);
        let refused = std::fs::OpenOptions::new().write(true).open(&attached.device).and_then(|file| {
            // The kernel may let one open it, and refuses the write.
            std::os::unix::fs::FileExt::write_all_at(&file, &[1; 4096], 0).and_then(|()| file.sync_all())
        });
        assert!(refused.is_err(), "{uri}");
        assert_eq!(std::fs::read(&attached.device).unwrap().len(), 1 << 20);
        attached.detach();
    }
    drop(rig);
}

#[test]
fn a_flush_that_fails_at_the_server_fails_at_the_device() {
    if lacks(&[]) {
        return;
    }
    let prepare = |rig: &Rig| drop(rig.file("broken", 1 << 20));
    let (rig, uri) = node("\"broken=fault:flush=eio#1:DIR/broken\"", prepare, "broken");
    let mut attached = Attached::new(&uri, "broken", &[]);
    let device = std::fs::OpenOptions::new().read(true).write(true).open(&attached.device).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&device, &[1; 4096], 0).unwrap();
    assert!(device.sync_all().is_err());
    // It stays so until the volume is opened anew; then what the client has kept is written again.
    assert!(rig.ctl(&["reopen", "broken"]).status.success());
    until(Instant::now() + LIMIT, "a flush that succeeds", || device.sync_all().ok());
    drop(device);
    attached.detach();
}

#[test]
fn a_socket_is_found_from_the_directory_of_the_command() {
    if lacks(&[]) {
        return;
    }
    let (_rig, uri) = node("\"m=mem:1M\"", |_| {}, "m");
    let (before, socket) = uri.split_once("/dev/shm/").unwrap();
    // The process in the background has another directory.
    let relative = format!("{before}{socket}");
    let name = format!("test-relative-{}", std::process::id());
    let output =
        Command::new(binary()).args(["attach", &relative, "--as", &name]).current_dir("/dev/shm").output().unwrap();
    let _ = std::fs::remove_file(format!("/run/byway-attach/{name}.log"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(run_well(&binary(), &["attach", "--list"]).contains(&uri), "it is shown whole");
    run_well(&binary(), &["detach", &name]);
}

#[test]
fn detaching_fails_if_the_last_flush_does() {
    if lacks(&[]) {
        return;
    }
    let prepare = |rig: &Rig| drop(rig.file("broken", 1 << 20));
    let (rig, uri) = node("\"broken=fault:flush=eio#1:DIR/broken\"", prepare, "broken");
    let attached = Attached::new(&uri, "unflushed", &[]);
    let device = std::fs::OpenOptions::new().write(true).open(&attached.device).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&device, &[1; 4096], 0).unwrap();
    // Its error is another user's by then.
    assert!(device.sync_all().is_err());
    drop(device);
    let output = run(&binary(), &["detach", &attached.name]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && said.contains("writes may be lost: the device has ended: the last flush"),
        "{said}"
    );
    assert!(!attached.lives() && !attached.is_there());
    let again = run(&binary(), &["detach", &attached.name]);
    assert!(String::from_utf8_lossy(&again.stderr).contains("nothing is attached as"), "it was told once");
    drop(rig);
}

#[test]
fn a_service_manager_is_told_and_a_signal_detaches_what_is_not_in_use() {
    if lacks(&["mkfs.ext4", "mount", "umount"]) {
        return;
    }
    let (rig, uri) = node("\"m=mem:64M\"", |_| {}, "m");
    let socket = UnixDatagram::bind(rig.path("notify")).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    let told = || {
        let mut text = [0; 512];
        let bytes = socket.recv(&mut text).expect("a message to the service manager");
        String::from_utf8_lossy(&text[..bytes]).into_owned()
    };
    let name = format!("test-manager-{}", std::process::id());
    let mut child = Command::new(binary())
        .args(["attach", &uri, "--as", &name, "--foreground"])
        .env("NOTIFY_SOCKET", rig.path("notify"))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let ready = told();
    let device = std::fs::read_link(format!("/dev/byway/{name}")).unwrap();
    assert_eq!(ready, format!("READY=1\nSTATUS={} is {uri}", device.display()));
    // The child keeps the device; a process of its own serves it.
    let mut attached = Attached { name, device, pid: 0, mounted: None };
    attached.await_successor();
    assert_eq!(attached.keeper(), child.id() as i32);
    run_well(&find_tool("mkfs.ext4").unwrap(), &["-q", attached.device()]);
    std::fs::create_dir(rig.path("fs")).unwrap();
    attached.mount(rig.path("fs"));
    let terminate = || kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    terminate();
    std::fs::write(rig.path("fs").join("file"), noise(1 << 20, 3)).unwrap();
    attached.unmount();
    assert!(attached.is_there(), "the first signal found it mounted");
    terminate();
    assert!(told().starts_with("STOPPING=1"));
    let ended = until(Instant::now() + LIMIT, "its end", || child.try_wait().unwrap());
    assert!(ended.success() && !attached.is_there());
}

#[test]
fn what_cannot_be_attached_or_detached_is_said() {
    if lacks(&["mkfs.ext4", "mount", "umount"]) {
        return;
    }
    let (rig, uri) = node("\"m=mem:64M\"", |_| {}, "m");
    let mut attached = Attached::new(&uri, "said", &[]);
    let name = attached.name.clone();
    let said = |arguments: &[&str]| {
        let output = run(&binary(), arguments);
        assert!(!output.status.success(), "{arguments:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(said(&["attach", &uri, "--as", &name]).contains("is attached already (byway attach --list)"));
    assert!(said(&["attach", &uri, "--via", "iscsi"]).contains("the ways are ublk, nbd and loop"));
    if !Path::new("/sys/block/nbd0").exists() {
        let missing = said(&["attach", &uri, "--as", "test-no-nbd", "--via", "nbd"]);
        assert!(missing.contains("modprobe nbd"), "{missing}");
        std::fs::remove_file("/run/byway-attach/test-no-nbd.log").unwrap();
    }
    if !Path::new("/dev/ublk-control").exists() {
        let missing = said(&["attach", &uri, "--as", "test-no-ublk", "--via", "ublk"]);
        assert!(missing.contains("modprobe ublk_drv"), "{missing}");
        std::fs::remove_file("/run/byway-attach/test-no-ublk.log").unwrap();
    }
    assert!(said(&["attach", "nbd://127.0.0.1/x"]).contains("byway attach uses byway's own protocol"));
    let missing = uri.replace("/m?", "/none?");
    let missing_name = format!("{name}-missing");
    let not_there = said(&["attach", &missing, "--as", &missing_name]);
    let log = format!("/run/byway-attach/{missing_name}.log");
    assert!(not_there.contains("no volume has that name") && not_there.contains(&log), "{not_there}");
    std::fs::remove_file(log).unwrap();
    assert!(said(&["detach", "no-such-name"]).contains("nothing is attached as no-such-name"));
    let listed = run_well(&binary(), &["attach", "--list"]);
    let line = listed.lines().find(|line| line.starts_with(&name)).unwrap();
    assert!(line.contains(attached.device()) && line.contains("64.0 MiB") && line.contains(&uri), "{line}");

    run_well(&find_tool("mkfs.ext4").unwrap(), &["-q", attached.device()]);
    let at = rig.path("fs");
    std::fs::create_dir(&at).unwrap();
    attached.mount(at.clone());
    let busy = said(&["detach", attached.device()]);
    assert!(busy.contains("is in use") && busy.contains(at.to_str().unwrap()), "{busy}");
    assert!(attached.lives() && attached.is_there(), "and nothing was done");
    attached.unmount();
    attached.detach();
}

#[test]
fn a_process_that_is_killed_with_unwritten_pages_of_its_device_ends() {
    if lacks(&[]) {
        return;
    }
    let (_rig, uri) = node("\"m=mem:64M\"", |_| {}, "m");
    let attached = Attached::new(&uri, "unwritten", &[]);
    let device = std::fs::OpenOptions::new().write(true).open(&attached.device).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&device, &noise(8 << 20, 9), 0).unwrap();
    drop(device);
    // The kernel writes the pages when the process's own descriptor goes, the last one.
    attached.kill();
    until(Instant::now() + LIMIT, "the device to go", || (!attached.is_there()).then_some(()));
}

#[test]
fn a_killed_process_takes_its_device_along() {
    if lacks(&["mkfs.ext4", "mount", "umount"]) {
        return;
    }
    let (rig, uri) = node("\"m=mem:64M\"", |_| {}, "m");
    let unused = Attached::new(&uri, "unused", &[]);
    unused.kill();
    until(Instant::now() + LIMIT, "the device to go", || (!unused.is_there()).then_some(()));
    let listed = run_well(&binary(), &["attach", "--list"]);
    let line = listed.lines().find(|line| line.starts_with(&unused.name)).unwrap();
    assert!(line.contains("its process has died"), "{line}");
    run_well(&binary(), &["detach", &unused.name]);
    assert!(!run_well(&binary(), &["attach", "--list"]).contains(&unused.name));

    let mut mounted = Attached::new(&uri, "mounted", &[]);
    run_well(&find_tool("mkfs.ext4").unwrap(), &["-q", mounted.device()]);
    let at = rig.path("fs");
    std::fs::create_dir(&at).unwrap();
    mounted.mount(at.clone());
    mounted.kill();
    // The file system has errors, as with a broken disk, and can be unmounted: nobody hangs.
    let failed = std::fs::write(at.join("file"), vec![1; 1 << 20])
        .and_then(|()| std::fs::File::open(at.join("file")))
        .and_then(|file| file.sync_all());
    assert!(failed.is_err());
    mounted.unmount();
    until(Instant::now() + LIMIT, "the device to go", || (!mounted.is_there()).then_some(()));
}

#[test]
fn writes_go_on_however_often_the_process_is_killed() {
    if lacks(&[]) {
        return;
    }
    let (rig, uri) = node("\"disk=DIR/disk\"", |rig| drop(rig.file("disk", 64 << 20)), "disk");
    let mut attached = Attached::new(&uri, "often", &[]);
    // Writes that each wait for the server, so that some are under way at each death.
    let open = || {
        let flags = rustix::fs::OFlags::DSYNC.bits() as i32;
        let mut options = std::fs::OpenOptions::new();
        std::os::unix::fs::OpenOptionsExt::custom_flags(options.read(true).write(true), flags).open(&attached.device)
    };
    let (device, kills, piece) = (open().unwrap(), kills_under_fio(), 64 << 10);
    let (written, enough) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let bytes = |number: usize| noise(piece, 1 + number as u64);
    std::thread::scope(|scope| {
        let write = || {
            while enough.load(Ordering::SeqCst) == 0 {
                let number = written.fetch_add(1, Ordering::SeqCst);
                let offset = (number % 1024 * piece) as u64;
                std::os::unix::fs::FileExt::write_all_at(&device, &bytes(number), offset).expect("no write fails");
            }
        };
        let writers: Vec<_> = (0..4).map(|_| scope.spawn(write)).collect();
        for _ in 0..kills {
            let before = written.load(Ordering::SeqCst);
            let more = || (written.load(Ordering::SeqCst) > before + 8).then_some(());
            until(Instant::now() + LIMIT, "further writes", more);
            attached.kill_process();
            // In a row: the successor, just when it has begun.
            attached.kill_process();
        }
        enough.store(1, Ordering::SeqCst);
        for writer in writers {
            writer.join().unwrap();
        }
    });
    let written = written.load(Ordering::SeqCst);
    println!("{written} writes");
    drop(device);
    // A death just before the detach.
    signal(attached.pid, Signal::KILL);
    let detached = run(&binary(), &["detach", &attached.name]);
    assert!(detached.status.success(), "{}", String::from_utf8_lossy(&detached.stderr));
    assert!(!attached.is_there() && !Path::new(&format!("/run/byway-attach/{}.json", attached.name)).exists());
    assert!(!Path::new(&format!("/run/byway-attach/{}.log", attached.name)).exists(), "nothing stays");
    let store = std::fs::read(rig.path("disk")).unwrap();
    for place in 0..written.min(1024) {
        // Two writers may have come to one place in either order, when they were a round apart.
        let last = place + (written - 1 - place) / 1024 * 1024;
        let found = &store[place * piece..(place + 1) * piece];
        assert!(found == bytes(last) || (last >= 1024 && found == bytes(last - 1024)), "the piece at {place}");
    }
}

#[test]
fn a_killed_keeper_is_replaced() {
    if lacks(&[]) {
        return;
    }
    let (_rig, uri) = node("\"m=mem:64M\"", |_| {}, "m");
    let mut attached = Attached::new(&uri, "keeper", &[]);
    let first = attached.keeper();
    signal(first, Signal::KILL);
    let second = || Some(attached.keeper()).filter(|keeper| *keeper != first);
    let second = until(Instant::now() + LIMIT, "another keeper", second);
    assert!(lives(second) && attached.lives());
    // It may have begun without having the descriptors yet.
    let log = format!("/run/byway-attach/{}.log", attached.name);
    let has_begun = || std::fs::read_to_string(&log).unwrap().contains("another one has begun").then_some(());
    until(Instant::now() + LIMIT, "its beginning in the log", has_begun);
    let device = std::fs::OpenOptions::new().read(true).write(true).open(&attached.device).unwrap();
    let bytes = noise(1 << 20, 3);
    std::os::unix::fs::FileExt::write_all_at(&device, &bytes, 0).unwrap();
    attached.kill_process();
    device.sync_all().unwrap();
    assert_eq!(attached.keeper(), second);
    drop(device);
    assert!(std::fs::read(&attached.device).unwrap()[..1 << 20] == bytes);
    attached.detach();
}

#[test]
fn a_successor_that_finds_another_server_process_fails_the_device() {
    if lacks(&[]) {
        return;
    }
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::File::create(at("disk")).unwrap().set_len(64 << 20).unwrap();
    let arguments = [format!("disk={}", at("disk")), format!("unix://{}", at("sock"))];
    let start = || Server::start(folder.path(), 1, &["--volume", &arguments[0], "--listen", &arguments[1]]);
    let mut server = start();
    let attached = Attached::new(&format!("byway+unix:///disk?socket={}", at("sock")), "lost", &[]);
    let device = std::fs::OpenOptions::new().write(true).open(&attached.device).unwrap();
    // It could repeat what the first server had not flushed, and is killed before it does.
    signal(attached.pid, Signal::STOP);
    server.kill();
    server = start();
    signal(attached.pid, Signal::KILL);
    let fails =
        || std::os::unix::fs::FileExt::write_all_at(&device, &[1; 4096], 0).and_then(|()| device.sync_all()).err();
    until(Instant::now() + LIMIT, "an error", fails);
    drop(device);
    let has_failed =
        || run_well(&binary(), &["attach", "--list"]).contains("the server has restarted since").then_some(());
    until(Instant::now() + LIMIT, "the reason in the list", has_failed);
    let output = run(&binary(), &["detach", &attached.name]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("writes may be lost"), "{said}");
    until(Instant::now() + LIMIT, "the device to go", || (!attached.is_there()).then_some(()));
    assert_eq!(server.terminate(), Some(0));
}

/// Writes, and waits until the server has it.
fn write_through(device: &std::fs::File, bytes: &[u8]) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(device, bytes, 0).and_then(|()| device.sync_all())
}

#[test]
fn a_successor_waits_for_its_server() {
    if lacks(&[]) {
        return;
    }
    let (rig, uri) = node("\"m=mem:64M\"", |_| {}, "m");
    let mut attached = Attached::new(&uri, "waits", &[]);
    let device = std::fs::OpenOptions::new().write(true).open(&attached.device).unwrap();
    write_through(&device, &noise(1 << 20, 1)).unwrap();
    let log = format!("/run/byway-attach/{}.log", attached.name);
    let is_said = || std::fs::read_to_string(&log).unwrap().contains("requests wait, for at most").then_some(());
    let away = |name: &str, to: &str| std::fs::rename(rig.path(name), rig.path(to)).unwrap();
    away("native", "elsewhere");
    attached.kill_process();
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| write_through(&device, &noise(1 << 20, 2)));
        until(Instant::now() + LIMIT, "a successor without a server", is_said);
        assert!(!writing.is_finished());
        away("elsewhere", "native");
        writing.join().unwrap().unwrap();
    });
    drop(device);
    assert!(std::fs::read(&attached.device).unwrap()[..1 << 20] == noise(1 << 20, 2));

    // While it waits, detaching fails what waits.
    away("native", "elsewhere");
    std::fs::write(&log, "").unwrap();
    attached.kill_process();
    until(Instant::now() + LIMIT, "a successor without a server", is_said);
    let output = run(&binary(), &["detach", &attached.name]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("its server could not be reached"), "{said}");
    until(Instant::now() + LIMIT, "the device to go", || (!attached.is_there()).then_some(()));
}

#[test]
fn a_process_that_is_killed_while_its_device_goes_has_a_successor() {
    if lacks(&[]) {
        return;
    }
    let (_rig, uri) = node("\"m=mem:64M\"", |_| {}, "m");
    let mut attached = Attached::new(&uri, "going", &[]);
    let keeper = attached.keeper();
    let device = std::fs::OpenOptions::new().write(true).open(&attached.device).unwrap();
    // It waits for the program that has the device open: this one.
    let mut detach = Command::new(binary()).args(["detach", &attached.name]).spawn().unwrap();
    let has_it = |pid: i32| {
        let open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        open.filter_map(Result::ok).any(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to == attached.device))
    };
    let let_go = || (!has_it(attached.pid) && !has_it(keeper)).then_some(());
    until(Instant::now() + LIMIT, "both processes to give the device up", let_go);
    attached.kill_process();
    write_through(&device, &noise(1 << 20, 1)).unwrap();
    assert!(detach.try_wait().unwrap().is_none());
    drop(device);
    let ended = until(Instant::now() + LIMIT, "the end of the command", || detach.try_wait().unwrap());
    assert!(ended.success() && !attached.is_there());
}
