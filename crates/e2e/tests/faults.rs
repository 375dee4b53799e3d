//! Bad input and faults, as an operator meets them: named errors, bounded memory, no acknowledged data lost.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use byway_e2e::{
    LIBNBD_PRELUDE, LIMIT, Server, SkipReason, backends, binary, libnbd_python, run, run_well, skip, until,
    wait_until_idle,
};

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").expect("a folder in memory")
}

fn file(folder: &Path, name: &str, len: u64) -> String {
    let path = folder.join(name);
    std::fs::File::create(&path).unwrap().set_len(len).unwrap();
    path.display().to_string()
}

fn serve(folder: &Path, volume: &str) -> Server {
    Server::start(folder, 1, &["--volume", volume, "--nbd", "tcp://127.0.0.1:0"])
}

/// `byway serve` must refuse to start, and say this.
fn refuses(arguments: &[&str], want: &str) {
    let output = run(&binary(), &[&["serve"], arguments].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains(want), "{arguments:?} should say {want:?}: {said}");
}

#[test]
fn what_cannot_be_served_is_refused_by_name() {
    let folder = folder();
    let at = ["--nbd", "tcp://127.0.0.1:0"];
    let with = |volume: &str, want: &str| refuses(&[&["--volume", volume], &at[..]].concat(), want);
    with("v=/nowhere/at/all", "create it first");
    with(&format!("v={}", folder.path().display()), "neither a regular file nor a block device");
    with(&format!("v={}", file(folder.path(), "empty", 0)), "is empty");
    with("no equals sign", "=");
    with("bad/name=mem:1M", "use only");
    refuses(&["--volume", "m=mem:1M"], "nowhere to listen");
    let one = ["--volume", "m=mem:1M", at[0], at[1]];
    refuses(&[&one[..], &["--user", "nobody-of-that-name"]].concat(), "there is no such user");
    refuses(&[&one[..], &["--control-socket", "/nowhere/ctl"]].concat(), "make the folder");
    refuses(&["--volume", "m=mem:1M", "--nbd", "tcp://0.0.0.0:0"], "can be reached by other machines");
    let path = file(folder.path(), "once", 1 << 20);
    let first = serve(folder.path(), &format!("v={path}"));
    with(&format!("v={path}"), "in use");
    let port = format!("tcp://127.0.0.1:{}", first.port("nbd"));
    refuses(&["--volume", "m=mem:1M", "--nbd", &port], "another program listens there");
}

#[test]
fn garbage_ends_its_connection_and_nobody_elses() {
    let folder = folder();
    let mut server = serve(folder.path(), "m=mem:1M");
    let address = ("127.0.0.1", server.port("nbd"));
    let mut good = TcpStream::connect(address).unwrap();
    good.set_read_timeout(Some(LIMIT)).unwrap();
    let mut greeting = [0; 18];
    good.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
    let before = server.anonymous_bytes();
    for round in 0..50u32 {
        let mut bad = TcpStream::connect(address).unwrap();
        bad.set_read_timeout(Some(LIMIT)).unwrap();
        let noise: Vec<u8> = (0..5000u32).map(|i| (i.wrapping_mul(round + 3) >> 3) as u8 | 0x80).collect();
        // The server may hang up while we are still writing.
        let _ = bad.write_all(&noise);
        let mut rest = Vec::new();
        let _ = bad.read_to_end(&mut rest);
    }
    // An option that announces 4 GiB is skipped, not stored.
    let mut huge = TcpStream::connect(address).unwrap();
    huge.write_all(&[0, 0, 0, 1]).unwrap();
    huge.write_all(b"IHAVEOPT\0\0\0\x07\xff\xff\xff\xff").unwrap();
    for _ in 0..100 {
        huge.write_all(&[7; 65536]).unwrap();
    }
    let grown = server.anonymous_bytes().saturating_sub(before);
    assert!(grown < 4 << 20, "memory grew by {grown} bytes");
    // The good connection lists the volume all the same.
    good.write_all(&[0, 0, 0, 1]).unwrap();
    good.write_all(b"IHAVEOPT\0\0\0\x03\0\0\0\0").unwrap();
    let mut reply = [0; 20];
    good.read_exact(&mut reply).unwrap();
    assert_eq!(reply[15], 2, "NBD_REP_SERVER");
    assert!(server.is_alive());
    assert!(server.log().contains("NBD connection ended"), "{}", server.log());
}

#[test]
fn a_handshake_that_dawdles_is_ended() {
    let folder = folder();
    let server = serve(folder.path(), "m=mem:1M");
    let mut slow = TcpStream::connect(("127.0.0.1", server.port("nbd"))).unwrap();
    slow.set_read_timeout(Some(LIMIT)).unwrap();
    let mut bytes = Vec::new();
    slow.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes.len(), 18, "the greeting, then the end");
    // The line may come a moment after the end.
    until(Instant::now() + LIMIT, "the reason in the log", || {
        server.log().contains("did not finish its handshake").then_some(())
    });
}

#[test]
fn a_thousand_idle_connections_cost_little_and_leave_nothing() {
    let folder = folder();
    let server = serve(folder.path(), "m=mem:1M");
    let port = server.port("nbd");
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", server.id())).unwrap().count();
    let (memory, open) = (server.anonymous_bytes(), descriptors());
    let connect = || {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        // EXPORT_NAME of the default export, without zeroes: 18 bytes of greeting, 10 of size and flags.
        stream.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
        stream.read_exact(&mut [0; 28]).unwrap();
        stream
    };
    let idle: Vec<_> = std::iter::repeat_with(connect).take(1000).collect();
    let each = server.anonymous_bytes().saturating_sub(memory) / 1000;
    assert!(each <= 64 << 10, "{each} bytes for each connection");
    wait_until_idle(&[server.id()], || {});
    drop(idle);
    until(Instant::now() + LIMIT, "all connections to be closed", || (descriptors() <= open).then_some(()));
}

#[test]
fn out_of_descriptors_a_node_waits_and_goes_on() {
    for frontend in ["byway", "nbd"] {
        let folder = folder();
        let flag = if frontend == "byway" { "--listen" } else { "--nbd" };
        // The other backend's accepts keep the limit that there was when they were begun.
        let arguments = ["--io", "epoll", "--volume", "m=mem:1M", flag, "tcp://127.0.0.1:0"];
        let server = Server::start(folder.path(), 1, &arguments);
        let held = std::fs::read_dir(format!("/proc/{}/fd", server.id())).unwrap().count() as u64;
        let limit = rustix::process::Rlimit { current: Some(held + 3), maximum: Some(held + 3) };
        let id = rustix::process::Pid::from_raw(server.id() as i32);
        rustix::process::prlimit(id, rustix::process::Resource::Nofile, limit).unwrap();
        let address = ("127.0.0.1", server.port(frontend));
        let many: Vec<TcpStream> = (0..10).map(|_| TcpStream::connect(address).unwrap()).collect();
        let complaints = || server.log().matches("raise LimitNOFILE").count();
        let more_than = |count: usize| until(Instant::now() + LIMIT, frontend, || (complaints() > count).then_some(()));
        more_than(0);
        // It tries again and again, and does not spin meanwhile.
        let said = complaints();
        wait_until_idle(&[server.id()], || {});
        more_than(said);
        drop(many);
        let uri = format!("{frontend}://127.0.0.1:{}/m", server.port(frontend));
        let info = || run(&binary(), &["info", &uri]).status.success().then_some(());
        until(Instant::now() + LIMIT, "a place for a client", info);
    }
}

#[test]
fn a_client_that_never_reads_is_held_back() {
    let folder = folder();
    let mut server = serve(folder.path(), "m=mem:64M");
    let port = server.port("nbd");
    let mut greedy = TcpStream::connect(("127.0.0.1", port)).unwrap();
    greedy.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
    greedy.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
    // READ of 1 MiB, over and over, until the server takes no more.
    let mut request = [0u8; 28];
    request[..4].copy_from_slice(&0x2560_9513u32.to_be_bytes());
    request[24..].copy_from_slice(&(1u32 << 20).to_be_bytes());
    let batch = request.repeat(1000);
    let mut sent = 0;
    while greedy.write_all(&batch).is_ok() && sent < 10_000_000 {
        sent += batch.len();
    }
    assert!(server.anonymous_bytes() < 150 << 20, "{} bytes", server.anonymous_bytes());
    let mut other = TcpStream::connect(("127.0.0.1", port)).unwrap();
    other.set_read_timeout(Some(LIMIT)).unwrap();
    other.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
    other.read_exact(&mut [0; 28]).unwrap();
    other.write_all(&request).unwrap();
    let mut reply = vec![0; 16 + (1 << 20)];
    other.read_exact(&mut reply).unwrap();
    assert_eq!(reply[..4], 0x6744_6698u32.to_be_bytes());
    assert!(server.is_alive());
}

#[test]
fn a_truncated_file_is_an_error_and_other_volumes_go_on() {
    let test = "a_truncated_file_is_an_error_and_other_volumes_go_on";
    let Some(python) = libnbd_python() else { return skip(test, SkipReason::MissingTool("python3-libnbd")) };
    for io in backends() {
        let folder = folder();
        let path = file(folder.path(), "cut", 8 << 20);
        let volume = format!("v={path}");
        let arguments = ["--io", io, "--volume", &volume, "--volume", "m=mem:1M", "--nbd", "tcp://127.0.0.1:0"];
        let server = Server::start(folder.path(), 1, &arguments);
        let script = format!(
            r#"
import os
g = nbd.NBD(); g.connect_uri("nbd://127.0.0.1:{port}/m")
h.connect_uri("nbd://127.0.0.1:{port}/v")
h.pwrite(b"a" * 65536, 0)
h.pwrite(b"b" * 65536, 4 << 20)
os.truncate({path:?}, 1 << 20)
import time
for length in (4096, 1 << 20):
    try:
        k = nbd.NBD(); k.connect_uri("nbd://127.0.0.1:{port}/v")
        k.pread(length, 4 << 20)
        raise SystemExit("read past the end of the file")
    except nbd.Error: pass
k = nbd.NBD(); k.connect_uri("nbd://127.0.0.1:{port}/v")
assert k.pread(65536, 0) == b"a" * 65536
g.pwrite(b"x", 5); assert g.pread(1, 5) == b"x"
"#,
            port = server.port("nbd")
        );
        run_well(&python, &["-c", &format!("{LIBNBD_PRELUDE}{script}")]);
    }
}

#[test]
fn a_full_disk_reaches_the_client_as_such() {
    let test = "a_full_disk_reaches_the_client_as_such";
    let Some(python) = libnbd_python() else { return skip(test, SkipReason::MissingTool("python3-libnbd")) };
    let folder = folder();
    let mount = folder.path().join("small");
    std::fs::create_dir(&mount).unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=4m", "small"]).arg(&mount).status();
    if !mounted.is_ok_and(|status| status.success()) {
        return skip(test, SkipReason::Machine("tmpfs cannot be mounted here"));
    }
    let _unmount = Unmount(&mount);
    let server = serve(folder.path(), &format!("v={}", file(&mount, "disk", 64 << 20)));
    let script = format!(
        r#"
import errno
h.connect_uri("nbd://127.0.0.1:{}/v")
h.pwrite(b"k" * 65536, 0)
for length in (4096, 1 << 20, 8 << 20):
    try:
        for at in range(1 << 20, 32 << 20, length): h.pwrite(b"f" * length, at)
        raise SystemExit("the disk never got full")
    except nbd.Error as error: assert error.errnum == errno.ENOSPC, error
assert h.pread(65536, 0) == b"k" * 65536
h.shutdown()
"#,
        server.port("nbd")
    );
    run_well(&python, &["-c", &format!("{LIBNBD_PRELUDE}{script}")]);
    drop(server);
}

struct Unmount<'a>(&'a Path);

impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0).status();
    }
}

#[test]
fn every_acknowledged_write_survives_kill_9() {
    let test = "every_acknowledged_write_survives_kill_9";
    let Some(python) = libnbd_python() else { return skip(test, SkipReason::MissingTool("python3-libnbd")) };
    for io in backends() {
        let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = file(disk.path(), "disk", 256 << 20);
        let volume = format!("v={path}");
        let mut server =
            Server::start(disk.path(), 1, &["--io", io, "--volume", &volume, "--nbd", "tcp://127.0.0.1:0"]);
        let script = format!(
            r#"
h.connect_uri("nbd://127.0.0.1:{}/v")
try:
    for n in range(60000):
        length = 4096 if n % 9 else 262144
        h.pwrite(bytes([n % 251 + 1]) * length, n * 4096 % (200 << 20))
        print(n, flush=True)
except nbd.Error: pass
"#,
            server.port("nbd")
        );
        let mut writer = Command::new(&python);
        let mut writer = writer
            .args(["-c", &format!("{LIBNBD_PRELUDE}{script}")])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = writer.stdout.take().unwrap();
        let mut acknowledged = Vec::new();
        let mut part = [0; 4096];
        while acknowledged.len() < 20_000 {
            let n = said.read(&mut part).unwrap();
            assert!(n > 0, "the writer ended early");
            acknowledged.extend_from_slice(&part[..n]);
        }
        server.kill();
        said.read_to_end(&mut acknowledged).unwrap();
        writer.wait().unwrap();
        let last: u64 = String::from_utf8_lossy(&acknowledged).lines().last().unwrap().parse().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        // What write `n` put there stands unless a later one, acknowledged or in flight, covers it.
        let mut model = std::collections::BTreeMap::new();
        for n in 0..=last {
            let length = if n % 9 != 0 { 4096 } else { 262_144 };
            for page in 0..length / 4096 {
                model.insert(n * 4096 % (200 << 20) + page * 4096, n);
            }
        }
        let in_flight = last + 1;
        let reach = if in_flight.is_multiple_of(9) { 262_144 } else { 4096 };
        let unsure = in_flight * 4096 % (200 << 20)..in_flight * 4096 % (200 << 20) + reach;
        for (offset, n) in model.into_iter().filter(|(offset, _)| !unsure.contains(offset)) {
            assert_eq!(u64::from(bytes[offset as usize]), n % 251 + 1, "{io}: write {n} at {offset} is lost");
        }
        // Its successor opens the file although the dead one had locked it.
        drop(Server::start(disk.path(), 1, &["--io", io, "--volume", &volume, "--nbd", "tcp://127.0.0.1:0"]));
    }
}

#[test]
fn sigterm_answers_what_is_in_flight_and_ends_with_0() {
    let folder = folder();
    let mut server = serve(folder.path(), "m=mem:64M");
    let mut client = TcpStream::connect(("127.0.0.1", server.port("nbd"))).unwrap();
    client.set_read_timeout(Some(LIMIT)).unwrap();
    client.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
    client.read_exact(&mut [0; 28]).unwrap();
    let mut request = [0u8; 28];
    request[..4].copy_from_slice(&0x2560_9513u32.to_be_bytes());
    request[24..].copy_from_slice(&(8u32 << 20).to_be_bytes());
    client.write_all(&request).unwrap();
    // The reply has begun, so the request is in flight.
    let mut reply = vec![0; 16 + (8 << 20)];
    client.read_exact(&mut reply[..16]).unwrap();
    let drained = std::thread::spawn(move || client.read_exact(&mut reply[16..]).is_ok());
    assert_eq!(server.terminate(), Some(0));
    assert!(drained.join().unwrap(), "the reply was cut off");
}

/// A connection without structured replies to the volume `v`, over TCP.
fn simple_nbd(server: &Server) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", server.port("nbd"))).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x01v").unwrap();
    stream.read_exact(&mut [0; 28]).unwrap();
    stream
}

/// The head of a request without flags.
fn nbd_request(kind: u8, offset: u64, len: u32) -> Vec<u8> {
    [b"\x25\x60\x95\x13\0\0\0", &[kind][..], &[7; 8], &offset.to_be_bytes(), &len.to_be_bytes()].concat()
}

#[test]
fn a_write_beyond_the_limit_on_file_sizes_is_an_error_and_no_signal() {
    for io in backends() {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder on disk");
        let volume = format!("v={}", file(folder.path(), "disk", 4 << 20));
        let arguments = ["--io", io, "--volume", &volume, "--nbd", "tcp://127.0.0.1:0"];
        let mut server = Server::start(folder.path(), 1, &arguments);
        let limit = rustix::process::Rlimit { current: Some(1 << 20), maximum: Some(1 << 20) };
        let id = rustix::process::Pid::from_raw(server.id() as i32);
        rustix::process::prlimit(id, rustix::process::Resource::Fsize, limit).unwrap();
        let mut stream = simple_nbd(&server);
        for (offset, error) in [(2 << 20, 28), (0, 0)] {
            stream.write_all(&[nbd_request(1, offset, 512), vec![5; 512]].concat()).unwrap();
            let mut reply = [0; 16];
            stream.read_exact(&mut reply).expect("the server lives");
            assert_eq!(reply[4..8], u32::to_be_bytes(error), "{io}: the write at {offset}: {}", server.log());
        }
        drop(stream);
        assert_eq!(server.terminate(), Some(0));
    }
}

#[test]
fn sigterm_does_not_cut_a_long_read() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder on disk");
    let bytes = byway_e2e::noise(32 << 20, 9);
    std::fs::write(folder.path().join("disk"), &bytes).unwrap();
    let volume = format!("v={},direct", folder.path().join("disk").display());
    let mut server = serve(folder.path(), &volume);
    let mut stream = simple_nbd(&server);
    stream.write_all(&nbd_request(0, 0, 32 << 20)).unwrap();
    let mut head = [0; 16];
    stream.read_exact(&mut head).unwrap();
    assert_eq!(head[..8], *b"\x67\x44\x66\x98\0\0\0\0");
    let reader = std::thread::spawn(move || {
        let mut back = vec![0; 32 << 20];
        // Slowly at first, so that the signal comes in the middle.
        stream.read_exact(&mut back[..1 << 20]).unwrap();
        (stream, back)
    });
    let (mut stream, mut back) = reader.join().unwrap();
    let rest = std::thread::spawn(move || {
        stream.read_exact(&mut back[1 << 20..]).expect("the rest of the read");
        back
    });
    assert_eq!(server.terminate(), Some(0));
    assert!(rest.join().unwrap() == bytes);
}

#[test]
fn writers_that_pause_hold_up_nobody() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder on disk");
    let bytes = byway_e2e::noise(8 << 20, 10);
    std::fs::write(folder.path().join("disk"), &bytes).unwrap();
    for io in backends() {
        let volume = format!("v={},direct", folder.path().join("disk").display());
        let arguments =
            ["--io", io, "--buffer-memory", "8M", "--threads", "1", "--volume", &volume, "--nbd", "tcp://127.0.0.1:0"];
        let server = Server::start(folder.path(), 1, &arguments);
        let mut paused: Vec<TcpStream> = (0..200).map(|_| simple_nbd(&server)).collect();
        for stream in &mut paused {
            stream.write_all(&nbd_request(1, 0, 1 << 20)).unwrap();
        }
        let uri = format!("nbd://127.0.0.1:{}/v", server.port("nbd"));
        let copy = folder.path().join("copy").display().to_string();
        run_well(&binary(), &["copy", "--overwrite", &uri, &copy]);
        assert!(std::fs::read(&copy).unwrap() == bytes, "{io}");
        // Half of them go on after all.
        for stream in &mut paused[..100] {
            stream.write_all(&bytes[..1 << 20]).unwrap();
        }
        for stream in &mut paused[..100] {
            let mut reply = [1; 16];
            stream.read_exact(&mut reply).unwrap();
            assert_eq!(reply[..8], *b"\x67\x44\x66\x98\0\0\0\0", "{io}");
        }
        run_well(&binary(), &["copy", "--overwrite", &uri, &copy]);
        assert!(std::fs::read(&copy).unwrap() == bytes, "{io}: the same bytes were written");
    }
}

#[test]
fn root_is_dropped_in_all_threads_and_the_volume_is_still_served() {
    let test = "root_is_dropped_in_all_threads_and_the_volume_is_still_served";
    if !rustix::process::geteuid().is_root() {
        return skip(test, SkipReason::Machine("not root, so there is nothing to drop"));
    }
    let folder = folder();
    let path = file(folder.path(), "disk", 1 << 20);
    let nobody = rustix::fs::Uid::from_raw(65534);
    rustix::fs::chown(&path, Some(nobody), None).unwrap();
    let volume = format!("v={path}");
    let server =
        Server::start(folder.path(), 1, &["--volume", &volume, "--nbd", "tcp://127.0.0.1:0", "--user", "nobody"]);
    let threads = std::fs::read_dir(format!("/proc/{}/task", server.id())).unwrap();
    for thread in threads {
        let status = std::fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
        assert!(status.contains("Uid:\t65534\t65534\t65534\t65534"), "{status}");
    }
    let mut client = TcpStream::connect(("127.0.0.1", server.port("nbd"))).unwrap();
    client.set_read_timeout(Some(LIMIT)).unwrap();
    client.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
    client.read_exact(&mut [0; 28]).unwrap();
    refuses(&["--volume", "m=mem:1M", "--nbd", "tcp://127.0.0.1:0", "--user", "no-such-user"], "--user no-such-user");
}
