//! `byway copy` when something dies in the middle: the copy itself, an NBD server, a node.
//!
//! The source is throttled by nbdkit, so that there is a middle.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;

use byway_e2e::{ForeignServer, LIMIT, Server, SkipReason, binary, find_tool, noise, skip, until};

/// More than a checkpoint (256 MiB), so that a killed copy has something to go on from.
const SIZE: usize = 320 << 20;

struct Rig {
    folder: tempfile::TempDir,
    source: ForeignServer,
}

impl Rig {
    /// A source of noise at so many bits a second; `None` (said aloud) without nbdkit.
    fn new(test: &str, bytes: usize, rate: &str) -> Option<Self> {
        let Some(nbdkit) = find_tool("nbdkit") else {
            skip(test, SkipReason::MissingTool("nbdkit"));
            return None;
        };
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let file = folder.path().join("source");
        std::fs::write(&file, noise(bytes, 9)).expect("room in memory");
        let (name, rate) = (file.display().to_string(), format!("rate={rate}"));
        let arguments = ["--filter=rate", "file", &name, &rate, "burstiness=0.05"];
        let source = ForeignServer::nbdkit(&nbdkit, &folder.path().join("nbdkit"), &arguments);
        Some(Self { folder, source })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A node that serves the file `disk` on these ports (0: any), and over shared memory.
    fn serve(&self, native: u16, nbd: u16) -> Server {
        let volume = format!("disk={}", self.path("disk").display());
        let (native, nbd) = (format!("tcp://127.0.0.1:{native}"), format!("tcp://127.0.0.1:{nbd}"));
        let shared = format!("shm://{}", self.path("shm").display());
        let arguments = ["--volume", &volume, "--listen", &native, "--nbd", &nbd, "--listen", &shared];
        Server::start(self.folder.path(), 3, &arguments)
    }

    /// The node's volume, over TCP and over shared memory.
    fn volume(&self, port: u16, shared: bool) -> String {
        if shared {
            format!("byway+shm:///disk?socket={}", self.path("shm").display())
        } else {
            format!("byway://127.0.0.1:{port}/disk")
        }
    }

    fn copy_to(&self, to: &str) -> Copy {
        self.copy(&self.source.uri(""), to, &[])
    }

    fn copy(&self, from: &str, to: &str, more: &[&str]) -> Copy {
        let child = Command::new(binary())
            .args(["copy", from, to, "--json", "--resume"])
            .arg(self.path("resume"))
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("byway starts");
        Copy(Some(child))
    }

    fn same(&self, name: &str) -> bool {
        std::fs::read(self.path(name)).unwrap() == std::fs::read(self.path("source")).unwrap()
    }
}

/// A running copy; ended with the test.
struct Copy(Option<Child>);

impl Copy {
    fn is_running(&mut self) -> bool {
        self.0.as_mut().is_some_and(|child| child.try_wait().is_ok_and(|status| status.is_none()))
    }

    fn kill(mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn end(mut self) -> Output {
        until(Instant::now() + LIMIT, "the copy to end", || (!self.is_running()).then_some(()));
        self.0.take().expect("it was started").wait_with_output().expect("it was started")
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn make(path: &Path, bytes: usize) {
    std::fs::File::create(path).unwrap().set_len(bytes as u64).unwrap();
}

/// Waits until a port of a process that was killed is free: the kernel takes its io_uring apart after its end.
fn wait_for_port(port: u16) {
    until(Instant::now() + LIMIT, "a port", || std::net::TcpListener::bind(("127.0.0.1", port)).ok());
}

/// Waits until so many bytes are at the destination, and no longer than the copy takes.
fn wait_for_bytes(copy: &mut Copy, path: &Path, bytes: u64) {
    until(Instant::now() + LIMIT, "some bytes to arrive", || {
        assert!(copy.is_running(), "the copy must not end before its middle");
        (std::fs::metadata(path).is_ok_and(|file| file.blocks() * 512 > bytes)).then_some(())
    });
}

fn number(said: &str, key: &str) -> u64 {
    let number = said.split(&format!("\"{key}\":")).nth(1).expect("a report");
    number.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
}

#[test]
fn a_copy_that_was_killed_goes_on_from_its_last_checkpoint() {
    let test = "a_copy_that_was_killed_goes_on_from_its_last_checkpoint";
    let Some(mut rig) = Rig::new(test, SIZE, "3G") else { return };
    make(&rig.path("disk"), SIZE);
    let server = rig.serve(0, 0);
    let to = format!("byway://127.0.0.1:{}/disk", server.port("byway"));
    let mut copy = rig.copy_to(&to);
    until(Instant::now() + LIMIT, "a checkpoint", || {
        assert!(copy.is_running(), "the copy must not end before its middle");
        let log = std::fs::read_to_string(rig.path("resume")).unwrap_or_default();
        log.lines().any(|line| line.starts_with("data ")).then_some(())
    });
    copy.kill();
    // This nbdkit does not always survive a client that vanishes while its rate filter sleeps.
    rig.source.kill();
    rig.source.restart();
    let output = rig.copy_to(&to).end();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(number(&said, "resumed_bytes") >= 128 << 20, "{said}");
    assert_eq!(number(&said, "resumed_bytes") + number(&said, "moved_bytes"), SIZE as u64, "{said}");
    assert!(rig.same("disk"));
    assert!(!rig.path("resume").exists());
}

#[test]
fn a_node_that_is_killed_and_comes_back_gets_the_rest() {
    let test = "a_node_that_is_killed_and_comes_back_gets_the_rest";
    let bytes = 96 << 20;
    for shared in [false, true] {
        let Some(rig) = Rig::new(test, bytes, "800M") else { return };
        make(&rig.path("disk"), bytes);
        let mut server = rig.serve(0, 0);
        let port = server.port("byway");
        let mut copy = rig.copy_to(&rig.volume(port, shared));
        wait_for_bytes(&mut copy, &rig.path("disk"), 16 << 20);
        server.kill();
        assert!(copy.is_running(), "it waits for the node");
        wait_for_port(port);
        let _again = rig.serve(port, 0);
        let output = copy.end();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(rig.same("disk"), "what was acknowledged and what was not is there");
    }
}

#[test]
fn a_node_that_is_killed_and_comes_back_gives_the_rest() {
    let test = "a_node_that_is_killed_and_comes_back_gives_the_rest";
    let bytes = 64 << 20;
    // Here the destination is throttled.
    for shared in [false, true] {
        let Some(rig) = Rig::new(test, bytes, "800M") else { return };
        std::fs::write(rig.path("disk"), noise(bytes, 21)).unwrap();
        let mut server = rig.serve(0, 0);
        let port = server.port("byway");
        let mut copy = rig.copy(&rig.volume(port, shared), &rig.source.uri(""), &["--overwrite"]);
        let first = noise(1 << 20, 21);
        until(Instant::now() + LIMIT, "some bytes to arrive", || {
            let mut here = vec![0; first.len()];
            let file = std::fs::File::open(rig.path("source")).unwrap();
            std::os::unix::fs::FileExt::read_exact_at(&file, &mut here, 0).unwrap();
            (here == first).then_some(())
        });
        server.kill();
        assert!(copy.is_running(), "it waits for the node");
        wait_for_port(port);
        let _again = rig.serve(port, 0);
        let output = copy.end();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(rig.same("disk"));
    }
}

#[test]
fn a_volume_in_memory_that_is_lost_is_not_gone_on_with() {
    let test = "a_volume_in_memory_that_is_lost_is_not_gone_on_with";
    let Some(mut rig) = Rig::new(test, SIZE, "3G") else { return };
    let serve = |port: u16| {
        let (volume, listen) = (format!("m=mem:{}M", SIZE >> 20), format!("tcp://127.0.0.1:{port}"));
        Server::start(rig.folder.path(), 1, &["--volume", &volume, "--listen", &listen])
    };
    let mut server = serve(0);
    let port = server.port("byway");
    let to = format!("byway://127.0.0.1:{port}/m");
    let mut copy = rig.copy_to(&to);
    until(Instant::now() + LIMIT, "a checkpoint", || {
        assert!(copy.is_running(), "the copy must not end before its middle");
        let log = std::fs::read_to_string(rig.path("resume")).unwrap_or_default();
        log.lines().any(|line| line.starts_with("data ")).then_some(())
    });
    server.kill();
    wait_for_port(port);
    let _again = serve(port);
    let output = copy.end();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("its contents are lost"), "{said}");
    rig.source.kill();
    rig.source.restart();
    let output = rig.copy_to(&to).end();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!((number(&said, "resumed_bytes"), number(&said, "moved_bytes")), (0, SIZE as u64), "{said}");
}

#[test]
fn an_nbd_server_that_dies_ends_the_copy_with_a_word_and_the_copy_goes_on_later() {
    let test = "an_nbd_server_that_dies_ends_the_copy_with_a_word_and_the_copy_goes_on_later";
    let bytes = 64 << 20;
    let Some(rig) = Rig::new(test, bytes, "800M") else { return };
    make(&rig.path("disk"), bytes);
    let mut server = rig.serve(0, 0);
    let port = server.port("nbd");
    let to = format!("nbd://127.0.0.1:{port}/disk");
    let mut copy = rig.copy_to(&to);
    wait_for_bytes(&mut copy, &rig.path("disk"), 8 << 20);
    server.kill();
    let output = copy.end();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(said.contains("check that it runs") || said.contains("check that the server runs"), "{said}");
    assert!(said.contains("run the same command again to resume (what is done is in "), "{said}");
    wait_for_port(port);
    let _again = rig.serve(0, port);
    let output = rig.copy_to(&to).end();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(rig.same("disk"));
}

#[test]
fn a_volume_that_was_written_to_between_two_runs_is_copied_in_its_last_state() {
    let test = "a_volume_that_was_written_to_between_two_runs_is_copied_in_its_last_state";
    let bytes = 64 << 20;
    let Some(mut rig) = Rig::new(test, bytes, "800M") else { return };
    let out = rig.path("out");
    let mut copy = rig.copy_to(&out.display().to_string());
    wait_for_bytes(&mut copy, &out, 8 << 20);
    rig.source.kill();
    assert!(!copy.end().status.success());
    let log = std::fs::read_to_string(rig.path("resume")).unwrap();
    assert!(log.lines().any(|line| line.starts_with("data 0 ")), "the first piece is recorded: {log}");
    let file = std::fs::File::options().write(true).open(rig.path("source")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"the guest went on", 4096).unwrap();
    rig.source.restart();
    let output = rig.copy(&rig.source.uri(""), &out.display().to_string(), &["--verify"]).end();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(number(&said, "resumed_bytes") > 4 << 20, "{said}");
    assert!(rig.same("out"));
}

#[test]
fn a_source_that_dies_leaves_what_came_to_go_on_from() {
    let test = "a_source_that_dies_leaves_what_came_to_go_on_from";
    let bytes = 64 << 20;
    let Some(mut rig) = Rig::new(test, bytes, "800M") else { return };
    let out = rig.path("out");
    let mut copy = rig.copy_to(&out.display().to_string());
    wait_for_bytes(&mut copy, &out, 8 << 20);
    rig.source.kill();
    let output = copy.end();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("reading the source at byte"), "{said}");
    rig.source.restart();
    let output = rig.copy_to(&out.display().to_string()).end();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(number(&said, "resumed_bytes") > 4 << 20, "{said}");
    assert!(rig.same("out"));
}
