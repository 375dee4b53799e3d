//! What is durable at the server when a mount has ended, and what a mount says when that is not known.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use byway_e2e::{LIMIT, Mount, MountRig, Server, SkipReason, binary, find_tool, lacks_mounts, run, until};
use rustix::process::Signal;

/// A server of the share that says how many syncs it has done.
struct Counting {
    rig: MountRig,
    server: Server,
}

impl Counting {
    fn new() -> Self {
        let rig = MountRig::new(",users=squash:0");
        let share = format!("share={},users=squash:0", rig.below().display());
        let socket = format!("unix://{}", rig.path("socket").display());
        let arguments = ["--share", &share, "--listen", &socket, "--http", "127.0.0.1:0", "--threads", "2"];
        let server = Server::start(&rig.path("."), 2, &arguments);
        Self { rig, server }
    }

    fn syncs(&self) -> u64 {
        let mut stream = TcpStream::connect(("127.0.0.1", self.server.port("http"))).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        write!(stream, "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let name = "byway_share_calls_total{share=\"share\",kind=\"sync\"} ";
        let line = answer.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_else(|| panic!("{answer}")).parse().unwrap()
    }
}

#[test]
fn umount_returns_when_the_server_has_synced_what_was_not() {
    if lacks_mounts() {
        return;
    }
    let counting = Counting::new();
    let (rig, server) = (&counting.rig, &counting.server);
    let mount = rig.mount("mount", &rig.unix(), &[]);
    std::fs::write(mount.path("file"), "bytes").unwrap();
    std::fs::create_dir(mount.path("directory")).unwrap();
    let before = mount.messages();
    // The kernel asks no mount of FUSE to sync.
    let root = std::fs::File::open(&mount.at).unwrap();
    rustix::fs::syncfs(&root).unwrap();
    drop(root);
    let (opened, closed) = (1, 1);
    assert!(mount.messages() <= before + opened + closed);
    assert_eq!(counting.syncs(), 0);
    mount.unmount();
    assert_eq!(counting.syncs(), 1, "all at once");
    // Nothing, or what a program has synced itself.
    let mount = rig.mount("mount", &rig.unix(), &[]);
    assert_eq!(std::fs::read(mount.path("file")).unwrap(), b"bytes");
    mount.unmount();
    assert_eq!(counting.syncs(), 1);
    let mount = rig.mount("mount", &rig.unix(), &[]);
    std::fs::File::options().append(true).open(mount.path("file")).unwrap().write_all(b"more").unwrap();
    std::fs::File::open(mount.path("file")).unwrap().sync_all().unwrap();
    mount.unmount();
    assert_eq!(counting.syncs(), 2, "of the program alone");
    assert!(!server.log().contains("ERROR"), "{}", server.log());
}

#[test]
fn a_mount_that_is_ended_by_a_signal_syncs_too() {
    if lacks_mounts() {
        return;
    }
    let counting = Counting::new();
    let mount = counting.rig.mount("mount", &counting.rig.unix(), &[]);
    std::fs::write(mount.path("file"), "bytes").unwrap();
    mount.signal(Signal::TERM);
    until(Instant::now() + LIMIT, "the sync", || (counting.syncs() == 1).then_some(()));
}

#[test]
fn a_mount_that_another_process_has_taken_over_syncs_what_the_first_has_written() {
    if lacks_mounts() {
        return;
    }
    let counting = Counting::new();
    let mut mount = counting.rig.mount("mount", &counting.rig.unix(), &[]);
    std::fs::write(mount.path("file"), "bytes").unwrap();
    mount.take_over(&counting.rig.unix());
    assert_eq!(counting.syncs(), 0);
    mount.unmount();
    assert_eq!(counting.syncs(), 1);
}

#[test]
fn umount_says_so_when_the_server_has_gone_with_what_was_not_synced() {
    if lacks_mounts() {
        return;
    }
    let rig = MountRig::new(",users=squash:0");
    let mut server = rig.serve();
    let mount = rig.mount("mount", &rig.unix(), &["--wait", "1"]);
    let clean = rig.mount("clean", &rig.unix(), &["--wait", "1"]);
    std::fs::write(mount.path("file"), "bytes").unwrap();
    server.kill();
    let (status, said) = umount(&mount);
    assert_eq!(status, Some(1), "{said}");
    for part in ["is unmounted, but", &rig.unix(), "may not be durable", "the server did not answer"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    // The process has said the same, and ended so.
    until(Instant::now() + LIMIT, "the process's word", || mount.log().contains("may not be durable").then_some(()));
    assert!(!mount.path("file").exists(), "it is unmounted");
    let (status, said) = umount(&clean);
    assert_eq!(status, Some(0), "it has written nothing: {said}");
}

/// `/sbin/umount.fuse.byway`, where umount(8) looks for it; removed with this.
struct Helper(PathBuf);

impl Helper {
    /// `None`, and aloud: the machine has its own, or its folder cannot be written.
    fn link() -> Option<Self> {
        let at = PathBuf::from("/sbin/umount.fuse.byway");
        let linked = find_tool("umount").is_some() && symlink(binary(), &at).is_ok();
        if !linked {
            byway_skip::skip_this(SkipReason::Machine("needs umount, and no /sbin/umount.fuse.byway of its own"));
        }
        linked.then_some(Self(at))
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn umount_as_systemd_calls_it_waits_for_the_server_by_its_helper() {
    if lacks_mounts() {
        return;
    }
    let Some(_helper) = Helper::link() else { return };
    let umount = find_tool("umount").unwrap();
    // Its status is that of byway, and other flags are umount's own.
    for (flag, server_lives) in [("-c", true), ("-c", false), ("-cf", false)] {
        let mut counting = Counting::new();
        let mount = counting.rig.mount("mount", &counting.rig.unix(), &["--wait", "1"]);
        let at = mount.at.display().to_string();
        std::fs::write(mount.path("file"), "bytes").unwrap();
        if !server_lives {
            counting.server.kill();
        }
        let told = run(&umount, &[flag, &at]);
        let said = String::from_utf8_lossy(&told.stderr);
        assert_eq!(told.status.success(), server_lives || flag == "-cf", "{said}");
        assert_eq!(said.contains("may not be durable"), !server_lives && flag == "-c", "{said}");
        assert!(!mount.path("file").exists(), "it is unmounted");
        if server_lives {
            assert_eq!(counting.syncs(), 1);
        }
    }
}

fn umount(mount: &byway_e2e::Mount) -> (Option<i32>, String) {
    let told = run(&binary(), &["umount", &mount.at.display().to_string()]);
    (told.status.code(), String::from_utf8_lossy(&told.stderr).into_owned())
}

#[test]
fn umount_fails_where_no_process_says_what_is_durable() {
    if lacks_mounts() {
        return;
    }
    let rig = MountRig::new(",users=squash:0");
    let _server = rig.serve();
    let mut mount = rig.mount("mount", &rig.unix(), &[]);
    std::fs::write(mount.path("file"), "bytes").unwrap();
    mount.kill();
    let (status, said) = umount(&mount);
    assert_eq!(status, Some(1), "{said}");
    for part in ["is unmounted, but its process did not say", "no process of yours serves it"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!mount.path("file").exists(), "it is unmounted");
}

/// A mount namespace of its own, which has this mount; it ends with this. It leaves the mounts of other tests alone: `byway umount` of
/// those would fail.
struct Namespace(Child);

impl Namespace {
    fn new(mount: &Mount) -> Self {
        let others = "awk -v ours=\"$1\" '$3 == \"fuse.byway\" && $2 != ours { print $2 }' /proc/self/mounts";
        let script = format!("{others} | xargs --no-run-if-empty umount --lazy; exec cat");
        let mut child = Command::new("unshare")
            .args(["--mount", "sh", "-c", &script, "sh"])
            .arg(mount.at.canonicalize().unwrap())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // It answers once it is in there.
        child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        Self(child)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn umount_does_not_wait_for_a_mount_that_another_namespace_has() {
    if lacks_mounts() {
        return;
    }
    if find_tool("unshare").is_none() {
        return byway_skip::skip_this(SkipReason::MissingTool("unshare"));
    }
    let counting = Counting::new();
    let mount = counting.rig.mount("mount", &counting.rig.unix(), &[]);
    std::fs::write(mount.path("file"), "bytes").unwrap();
    // As one of another test.
    let other = counting.rig.mount("other", &counting.rig.unix(), &[]);
    let namespace = Namespace::new(&mount);
    other.unmount();
    let (status, said) = umount(&mount);
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("another mount namespace"), "{said}");
    assert_eq!(counting.syncs(), 0);
    drop(namespace);
    until(Instant::now() + LIMIT, "the sync", || (counting.syncs() == 1).then_some(()));
}

#[test]
fn a_second_signal_ends_a_process_that_waits_for_its_server() {
    if lacks_mounts() {
        return;
    }
    let rig = MountRig::new(",users=squash:0");
    let mut server = rig.serve();
    let mut mount = rig.mount("mount", &rig.unix(), &["--wait", "600"]);
    std::fs::write(mount.path("file"), "bytes").unwrap();
    server.kill();
    mount.signal(Signal::TERM);
    // A look at the mount itself would wait for the server.
    let at = mount.at.display().to_string();
    until(Instant::now() + LIMIT, "the end of the mount", || {
        (!std::fs::read_to_string("/proc/self/mountinfo").unwrap().contains(&at)).then_some(())
    });
    let ended = until(Instant::now() + LIMIT, "the end of the process", || {
        let ended = mount.ended();
        if ended.is_none() {
            mount.signal(Signal::TERM);
        }
        ended
    });
    assert_eq!(ended.code(), Some(1), "{}", mount.log());
    assert!(mount.log().contains("ended by a signal"), "{}", mount.log());
}

#[test]
fn who_waits_for_the_end_is_told_of_a_takeover() {
    if lacks_mounts() {
        return;
    }
    let counting = Counting::new();
    let mut mount = counting.rig.mount("mount", &counting.rig.unix(), &[]);
    std::fs::write(mount.path("file"), "bytes").unwrap();
    // As `byway umount` does before it unmounts.
    let mut waits = UnixStream::connect(mount.socket()).unwrap();
    waits.set_read_timeout(Some(LIMIT)).unwrap();
    waits.write_all(b"\"await_end\"\n").unwrap();
    let mut lines = BufReader::new(waits).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "\"awaits\"");
    mount.take_over(&counting.rig.unix());
    let told = lines.next().unwrap().unwrap();
    assert!(told.contains("failed") && told.contains("another process took the mount over"), "{told}");
    mount.unmount();
    assert_eq!(counting.syncs(), 1);
}
