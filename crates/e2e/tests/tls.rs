//! TLS with the clients that people use, on both front ends: which clients are admitted or refused, and the log's messages.

use std::path::Path;
use std::time::Instant;

use byway_e2e::{
    Certificates, LIBNBD_PRELUDE, LIMIT, Server, SkipReason, backends, binary, find_tool, libnbd_python, run, run_well,
    skip, until,
};

/// The tool, or a skip said aloud.
macro_rules! tool {
    ($test:expr, $name:expr) => {
        match find_tool($name) {
            Some(path) => path,
            None => return skip($test, SkipReason::MissingTool($name)),
        }
    };
}

/// Bytes without a pattern that a mistake could reproduce.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

struct Rig {
    // Before the folder, which holds its log.
    server: Server,
    certificates: Certificates,
    folder: tempfile::TempDir,
}

/// Who has to show a certificate.
#[derive(Clone, Copy, PartialEq)]
enum Clients {
    /// Everybody.
    Certified,
    /// Nobody.
    Anonymous,
    /// Nobody, and only who asks for `disk` must use TLS.
    Plain,
}

impl Rig {
    /// A server of `disk` (a file of `bytes`, over TLS only) and `mem` (64 MiB), with a certificate, on both front ends.
    fn new(io: &str, bytes: &[u8], clients: Clients) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let certificates = Certificates::new(folder.path());
        let disk = folder.path().join("disk");
        std::fs::write(&disk, bytes).expect("room in memory");
        let volume = format!("disk={},tls=required", disk.display());
        let path = |name: &str| certificates.path(name);
        let (certificate, key, ca) = (path("server-cert.pem"), path("server-key.pem"), path("ca-cert.pem"));
        let mut arguments = vec!["--io", io, "--threads", "2", "--volume", &volume, "--volume", "mem=mem:64M"];
        arguments.extend(["--nbd", "tcp://127.0.0.1:0", "--listen", "tcp://127.0.0.1:0"]);
        arguments.extend(["--tls-certificate", &certificate, "--tls-key", &key]);
        arguments.extend(match clients {
            Clients::Certified => ["--tls-client-ca", &ca],
            Clients::Anonymous => ["--tls-clients", "off"],
            Clients::Plain => ["--tls", "optional"],
        });
        let server = Server::start(folder.path(), 2, &arguments);
        Self { server, certificates, folder }
    }

    fn nbds(&self, volume: &str, client: &str) -> String {
        let port = self.server.port("nbd");
        format!("nbds://localhost:{port}/{volume}?tls-certificates={}", self.certificates.path(client))
    }

    fn nbd(&self, volume: &str) -> String {
        format!("nbd://localhost:{}/{volume}", self.server.port("nbd"))
    }

    fn native(&self, scheme: &str, volume: &str) -> String {
        format!("{scheme}://localhost:{}/{volume}", self.server.port("byway"))
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// The log says that, now or soon.
    fn logs(&self, what: &str) {
        until(Instant::now() + LIMIT, &format!("{what:?} in the log"), || {
            self.server.log().contains(what).then_some(())
        });
    }
}

#[test]
fn libnbd_copies_both_ways_and_sees_the_volumes() {
    let test = "libnbd_copies_both_ways_and_sees_the_volumes";
    let (nbdinfo, nbdcopy) = (tool!(test, "nbdinfo"), tool!(test, "nbdcopy"));
    for io in backends() {
        for clients in [Clients::Certified, Clients::Anonymous] {
            let bytes = noise((40 << 20) + 512, 2);
            let rig = Rig::new(io, &bytes, clients);
            let uri = rig.nbds("disk", if clients == Clients::Certified { "client" } else { "nobody" });
            let said = run_well(&nbdinfo, &[&uri]);
            assert!(said.contains("with TLS") && said.contains("export-size: 41943552"), "{said}");
            run_well(&nbdcopy, &[&uri, &rig.path("copy")]);
            assert!(std::fs::read(rig.path("copy")).unwrap() == bytes, "{io}: what was read is in the file");
            let other = noise(bytes.len(), 3);
            std::fs::write(rig.path("changed"), &other).unwrap();
            run_well(&nbdcopy, &["--request-size=2097152", "--flush", &rig.path("changed"), &uri]);
            assert!(std::fs::read(rig.path("disk")).unwrap() == other, "{io}: what was written is in the file");
        }
    }
}

#[test]
fn qemu_copies_both_ways_over_tls() {
    let qemu_img = tool!("qemu_copies_both_ways_over_tls", "qemu-img");
    for io in backends() {
        let bytes = noise(24 << 20, 4);
        let rig = Rig::new(io, &bytes, Clients::Certified);
        let credentials = format!("tls-creds-x509,id=tls0,dir={},endpoint=client", rig.certificates.path("client"));
        let port = rig.server.port("nbd");
        let remote = format!("driver=nbd,host=localhost,port={port},export=disk,tls-creds=tls0");
        let local = |name: &str| format!("driver=raw,file.filename={}", rig.path(name));
        let object = ["--object", &credentials, "--image-opts"];
        run_well(&qemu_img, &[&["convert"], &object[..], &[&remote, "-O", "raw", &rig.path("copy")]].concat());
        assert!(std::fs::read(rig.path("copy")).unwrap() == bytes, "{io}: what was read is in the file");
        let other = noise(bytes.len(), 5);
        std::fs::write(rig.path("changed"), &other).unwrap();
        let back = ["--target-image-opts", "-n", &local("changed"), &remote];
        run_well(&qemu_img, &[&["convert"], &object[..], &back].concat());
        assert!(std::fs::read(rig.path("disk")).unwrap() == other, "{io}: what was written is in the file");
    }
}

#[test]
fn every_kind_of_request_over_tls_against_a_model() {
    let test = "every_kind_of_request_over_tls_against_a_model";
    let Some(python) = libnbd_python() else { return skip(test, SkipReason::MissingTool("python3-libnbd")) };
    for io in backends() {
        let rig = Rig::new(io, &noise((24 << 20) + 77, 6), Clients::Certified);
        for volume in ["disk", "mem"] {
            let script = format!(
                r#"
import random
r = random.Random(7)
uri = {uri:?}
h.connect_uri(uri)
g = nbd.NBD(); g.set_uri_allow_local_file(True); g.connect_uri(uri)
size = min(h.get_size(), 32 << 20)
model = bytearray(h.pread(size, 0))
for n in range(300):
    c = r.choice([h, g])
    length = r.choice([1, 511, 512, 4096, 4097, 65536, 100001, 1 << 20, 5 << 20])
    off = r.randrange(0, size - length)
    what = r.choice("rrwwwztfc")
    if what == "r":
        assert c.pread(length, off) == bytes(model[off:off+length]), (n, off, length)
    elif what == "w":
        data = r.randbytes(length)
        c.pwrite(data, off, nbd.CMD_FLAG_FUA if r.random() < .2 else 0)
        model[off:off+length] = data
    elif what == "z":
        c.zero(length, off)
        model[off:off+length] = bytes(length)
    elif what == "f": c.flush()
    elif what == "c": c.cache(length, off)
assert h.pread(size, 0) == bytes(model)
done = []
for n in range(400):
    buffer = nbd.Buffer.from_bytearray(bytearray([n % 251 + 1]) * 16384)
    g.aio_pwrite(buffer, n * 16384, completion=lambda error, n=n: done.append(error) or 1)
while len(done) < 400: g.poll(-1)
assert not any(done)
buffers = [nbd.Buffer(16384) for n in range(400)]
for n in range(400): g.aio_pread(buffers[n], n * 16384, completion=lambda error: done.append(error) or 1)
while len(done) < 800: g.poll(-1)
for n in range(400): assert buffers[n].to_bytearray() == bytearray([n % 251 + 1]) * 16384, n
g.shutdown(); h.shutdown()
"#,
                uri = rig.nbds(volume, "client")
            );
            run_well(
                &python,
                &["-c", &format!("{LIBNBD_PRELUDE}h.set_strict_mode(0)\nh.set_uri_allow_local_file(True)\n{script}")],
            );
        }
        assert!(!rig.server.log().contains("ended"), "no fault: {}", rig.server.log());
    }
}

#[test]
fn who_is_not_let_in_is_named_in_the_log() {
    let test = "who_is_not_let_in_is_named_in_the_log";
    let nbdinfo = tool!(test, "nbdinfo");
    let mut rig = Rig::new("auto", &noise(1 << 20, 7), Clients::Certified);
    for (client, logged) in [
        ("nobody", "the peer showed no certificate"),
        // GnuTLS does not even show a certificate that the server would not take.
        ("stranger", "the peer showed no certificate"),
        ("expired", "has expired"),
        // It is the client that refuses, and does not say why.
        ("misled", "the peer went away during the handshake"),
    ] {
        let before = rig.server.log().matches(logged).count();
        let output = run(&nbdinfo, &["--size", &rig.nbds("disk", client)]);
        assert!(!output.status.success(), "{client} was let in");
        until(Instant::now() + LIMIT, &format!("{logged:?} in the log"), || {
            (rig.server.log().matches(logged).count() > before).then_some(())
        });
    }
    let plain = run(&nbdinfo, &["--size", &rig.nbd("mem")]);
    assert!(!plain.status.success(), "a plain client was let in");
    rig.logs("did not use TLS, which is required here");
    assert_eq!(run_well(&nbdinfo, &["--size", &rig.nbds("disk", "client")]).trim(), "1048576");
    assert!(rig.server.is_alive());
}

#[test]
fn where_tls_is_optional_only_the_volume_that_requires_it_is_refused() {
    let nbdinfo = tool!("where_tls_is_optional_only_the_volume_that_requires_it_is_refused", "nbdinfo");
    let rig = Rig::new("epoll", &noise(1 << 20, 8), Clients::Plain);
    assert_eq!(run_well(&nbdinfo, &["--size", &rig.nbd("mem")]).trim(), "67108864");
    assert_eq!(run_well(&nbdinfo, &["--size", &rig.nbds("disk", "nobody")]).trim(), "1048576");
    let refused = run(&nbdinfo, &["--size", &rig.nbd("disk")]);
    assert!(!refused.status.success());
    rig.logs("did not use TLS, which is required here");
    let listed = run_well(&nbdinfo, &["--list", "--json", &rig.nbd("")]);
    assert!(listed.contains("\"mem\"") && !listed.contains("\"disk\""), "{listed}");
    let bench = |uri: &str, more: &[&str]| {
        run(&binary(), &[&["bench", "volume", uri, "--rw", "read", "--seconds", "1"], more].concat())
    };
    let ca = rig.certificates.path("ca-cert.pem");
    assert!(bench(&rig.native("byway", "mem"), &[]).status.success());
    assert!(bench(&rig.native("byways", "disk"), &["--tls-ca", &ca]).status.success());
    let refused = bench(&rig.native("byway", "disk"), &[]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("TLS"), "{refused:?}");
}

#[test]
fn the_native_wire_over_tls_moves_bytes_and_keeps_strangers_out() {
    for io in backends() {
        let rig = Rig::new(io, &noise(16 << 20, 9), Clients::Certified);
        let bench = |scheme: &str, client: &str, more: &[&str]| {
            let path = |name: &str| rig.certificates.path(&format!("{client}/{name}"));
            let (ca, certificate, key) = (path("ca-cert.pem"), path("client-cert.pem"), path("client-key.pem"));
            let uri = rig.native(scheme, "disk");
            let mut arguments = vec!["bench", "volume", &uri, "--seconds", "1", "--json"];
            if scheme == "byways" {
                arguments.extend(["--tls-ca", &ca]);
            }
            if Path::new(&certificate).exists() && scheme == "byways" {
                arguments.extend(["--tls-certificate", &certificate, "--tls-key", &key]);
            }
            arguments.extend(more);
            run(&binary(), &arguments)
        };
        // Several sessions, so that lanes arrive at other loops than their sessions'.
        for (rw, bs) in [("randwrite", "4K"), ("randread", "4K"), ("write", "1M"), ("read", "1M"), ("randrw", "64K")] {
            let output = bench("byways", "client", &["--rw", rw, "--bs", bs, "--overwrite", "--connections", "4"]);
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success() && !said.contains("\"requests\":0,"), "{output:?}");
        }
        for (client, said, logged) in [
            ("nobody", "CertificateRequired", "the peer showed no certificate"),
            ("stranger", "UnknownCA", "not signed by the authority"),
            ("expired", "CertificateExpired", "has expired"),
            ("misled", "not signed by the authority", "the peer refused"),
        ] {
            let output = bench("byways", client, &[]);
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success() && stderr.contains(said), "{client}: {stderr}");
            rig.logs(logged);
        }
        let plain = bench("byway", "client", &[]);
        assert!(String::from_utf8_lossy(&plain.stderr).contains("whether it wants TLS"), "{plain:?}");
        rig.logs("does not speak TLS, which is required here");
    }
}

/// A client over TLS that asks for much and reads nothing.
const GREEDY: &str = r#"
import socket, ssl, struct, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def take(s, n):
    got = b""
    while len(got) < n: got += s.recv(n - len(got))
    return got
take(s, 18)
s.sendall(b"\0\0\0\x03IHAVEOPT\0\0\0\x05\0\0\0\0")
take(s, 20)
context = ssl.create_default_context(cafile=sys.argv[2])
t = context.wrap_socket(s, server_hostname="localhost")
t.sendall(b"IHAVEOPT\0\0\0\x01\0\0\0\x03mem")
take(t, 10)
t.settimeout(1)
request = struct.pack(">IHHQQI", 0x25609513, 0, 0, 1, 0, 1 << 20) * 100
try:
    while True: t.sendall(request)
except TimeoutError: pass
print("full", flush=True)
sys.stdin.read()
"#;

#[test]
fn a_client_over_tls_that_never_reads_is_held_back_and_others_go_on() {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};
    let test = "a_client_over_tls_that_never_reads_is_held_back_and_others_go_on";
    let nbdinfo = tool!(test, "nbdinfo");
    let python = Path::new("/usr/bin/python3");
    if !python.is_file() {
        return skip(test, SkipReason::MissingTool("python3"));
    }
    let mut rig = Rig::new("auto", &noise(1 << 20, 10), Clients::Anonymous);
    let mut greedy: Vec<_> = std::iter::repeat_with(|| {
        let port = rig.server.port("nbd").to_string();
        let mut child = Command::new(python)
            .args(["-c", GREEDY, &port, &rig.certificates.path("ca-cert.pem")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("it says so");
        assert_eq!(line, "full\n");
        child
    })
    .take(4)
    .collect();
    // 64 MiB of frames are the node's; what is sealed and waits is at most 512 KiB for each.
    assert!(rig.server.anonymous_bytes() < 100 << 20, "{} bytes", rig.server.anonymous_bytes());
    assert_eq!(run_well(&nbdinfo, &["--size", &rig.nbds("mem", "nobody")]).trim(), "67108864");
    for child in &mut greedy {
        let _ = child.kill();
        let _ = child.wait();
    }
    assert!(rig.server.is_alive());
}

#[test]
fn bad_files_are_refused_by_name_and_what_to_do() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let certificates = Certificates::new(folder.path());
    let path = |name: &str| certificates.path(name);
    let serve = |more: &[&str]| {
        let arguments = ["serve", "--volume", "m=mem:1M,tls=required", "--nbd", "tcp://127.0.0.1:0"];
        let output = run(&binary(), &[&arguments[..], more].concat());
        assert!(!output.status.success(), "{more:?} was served");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let (certificate, key) = (path("server-cert.pem"), path("server-key.pem"));
    let (other, ca) = (path("client/client-key.pem"), path("ca-cert.pem"));
    std::fs::write(path("text"), "nothing of the kind").unwrap();
    let text = path("text");
    for (certificate, key, more, said) in [
        ("/nowhere/cert.pem", key.as_str(), &[][..], &["/nowhere/cert.pem", "No such file", "PEM"][..]),
        (&certificate, &other, &[], &[&certificate, &other, "belongs to"]),
        (&text, &key, &[], &[&text, "holds no certificate"]),
        (&certificate, &ca, &[], &[&ca, "holds no private key"]),
        (&certificate, &key, &["--tls-client-ca", &text], &[&text, "holds no certificate"]),
        (&certificate, &key, &["--tls-clients", "required"], &["--tls-client-ca"]),
        (&certificate, &key, &["--nbd", "tcp://0.0.0.0:0"], &["can be reached by other machines"]),
    ] {
        let stderr = serve(&[&["--tls-certificate", certificate, "--tls-key", key], more].concat());
        assert!(said.iter().all(|part| stderr.contains(part)), "{said:?}: {stderr}");
    }
    assert!(serve(&[]).contains("--tls-certificate"), "a volume that requires TLS needs a certificate");
    let native = run(&binary(), &["bench", "volume", "byways://localhost/x"]);
    assert!(String::from_utf8_lossy(&native.stderr).contains("--tls-ca"), "{native:?}");
    let plain = run(&binary(), &["bench", "volume", "byway://localhost/x", "--tls-ca", &ca]);
    assert!(String::from_utf8_lossy(&plain.stderr).contains("byways://"), "{plain:?}");
}

#[test]
fn a_key_that_only_root_may_read_serves_after_root_was_dropped() {
    let test = "a_key_that_only_root_may_read_serves_after_root_was_dropped";
    let nbdinfo = tool!(test, "nbdinfo");
    if !rustix::process::geteuid().is_root() {
        return skip(test, SkipReason::Machine("not root, so there is nothing to drop"));
    }
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let certificates = Certificates::new(folder.path());
    let path = |name: &str| certificates.path(name);
    let (certificate, key, ca) = (path("server-cert.pem"), path("server-key.pem"), path("ca-cert.pem"));
    std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let arguments = ["--volume", "m=mem:1M", "--nbd", "tcp://0.0.0.0:0", "--user", "nobody"];
    let tls = ["--tls-certificate", &certificate, "--tls-key", &key, "--tls-client-ca", &ca];
    let server = Server::start(folder.path(), 1, &[&arguments[..], &tls].concat());
    let uri = format!("nbds://localhost:{}/m?tls-certificates={}", server.port("nbd"), path("client"));
    assert_eq!(run_well(&nbdinfo, &["--size", &uri]).trim(), "1048576");
}

#[test]
fn errors_of_tls_name_both_names_and_the_flag() {
    let rig = Rig::new("auto", &noise(1 << 20, 11), Clients::Certified);
    let file = |client: &str, name: &str| rig.certificates.path(&format!("{client}/{name}"));
    for uri in [format!("nbds://localhost:{}/disk", rig.server.port("nbd")), rig.native("byways", "disk")] {
        for (client, more, parts) in [
            (
                "client",
                &["--tls-hostname", "elsewhere"][..],
                [
                    "it is for localhost, 127.0.0.1, ",
                    "and `elsewhere` was wanted; write one of its names in the address, or give --tls-hostname localhost",
                ],
            ),
            ("misled", &[], ["not signed by the authority", &file("misled", "ca-cert.pem")]),
            ("nobody", &[], ["CertificateRequired", "give --tls-certificate and --tls-key"]),
            (
                "stranger",
                &[],
                ["UnknownCA", &format!("signed --tls-certificate {}", file("stranger", "client-cert.pem"))],
            ),
            ("expired", &[], ["CertificateExpired", &format!("{} has expired", file("expired", "client-cert.pem"))]),
        ] {
            let flags = rig.certificates.flags(client);
            let flags = flags.iter().map(String::as_str);
            for command in ["info", "ls"] {
                let uri = if command == "ls" { uri.replace("/disk", "") } else { uri.clone() };
                let arguments: Vec<&str> =
                    [command, &uri].into_iter().chain(flags.clone()).chain(more.iter().copied()).collect();
                let refused = run(&binary(), &arguments);
                let said = String::from_utf8_lossy(&refused.stderr);
                let last = said.lines().last().unwrap_or_default();
                assert!(parts.iter().all(|part| last.contains(part)), "{uri} {client}: {said}");
            }
        }
    }
}
