//! `byway copy` between files and volumes, over both protocols and with servers of other projects, in every direction.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use byway_e2e::{ForeignServer, Server, SkipReason, backends, binary, find_tool, noise, run, run_well, skip};

const SIZE: usize = 12 << 20;

/// A folder in memory, where resume files go too.
struct Rig {
    folder: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        Self { folder: tempfile::tempdir_in("/dev/shm").expect("a folder in memory") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// An image: noise, 5 MiB of hole, noise, a hole at the end.
    fn image(&self, name: &str, bytes: usize) -> Vec<u8> {
        let mut image = noise(bytes, 77);
        image[3 << 20..8 << 20].fill(0);
        image[bytes - (1 << 20)..].fill(0);
        let file = std::fs::File::create(self.path(name)).unwrap();
        file.set_len(bytes as u64).unwrap();
        file.write_all_at(&image[..3 << 20], 0).unwrap();
        file.write_all_at(&image[8 << 20..bytes - (1 << 20)], 8 << 20).unwrap();
        image
    }

    fn arguments<'a>(&'a self, resume: &'a str, rest: &[&'a str]) -> Vec<&'a str> {
        let mut arguments = vec!["copy", "--resume", resume];
        arguments.extend(rest);
        arguments
    }

    /// Copies, verified; what it reports.
    fn copy(&self, from: &str, to: &str, more: &[&str]) -> String {
        let resume = self.text("resume");
        let mut rest = vec![from, to, "--verify", "--json"];
        rest.extend(more);
        let said = run_well(&binary(), &self.arguments(&resume, &rest));
        assert!(said.contains("\"verified\":true"), "{said}");
        assert!(!self.path("resume").exists(), "a whole copy leaves no resume file");
        said
    }

    /// A copy that must fail: what it says.
    fn fail(&self, from: &str, to: &str, more: &[&str]) -> String {
        let resume = self.text("resume-failed");
        let mut rest = vec![from, to];
        rest.extend(more);
        let output = run(&binary(), &self.arguments(&resume, &rest));
        assert!(!output.status.success(), "{from} to {to} must fail");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    fn serve(&self, io: &str, volumes: &[String]) -> Server {
        let socket = format!("unix://{}", self.text("sock"));
        let mut arguments = vec!["--io", io, "--listen", "tcp://127.0.0.1:0", "--nbd", "tcp://127.0.0.1:0"];
        arguments.extend(["--nbd", &socket]);
        arguments.extend(volumes.iter().flat_map(|volume| ["--volume", volume]));
        Server::start(self.folder.path(), 3, &arguments)
    }

    /// A volume's names over each wire.
    fn names(&self, server: &Server, volume: &str) -> [String; 3] {
        [
            format!("byway://127.0.0.1:{}/{volume}", server.port("byway")),
            format!("nbd://127.0.0.1:{}/{volume}", server.port("nbd")),
            format!("nbd+unix:///{volume}?socket={}", self.text("sock")),
        ]
    }
}

fn zero_bytes(said: &str) -> u64 {
    let number = said.split("\"zero_bytes\":").nth(1).expect("a report");
    number.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
}

fn holes(path: &Path) -> u64 {
    let metadata = std::fs::metadata(path).unwrap();
    metadata.len().saturating_sub(metadata.blocks() * 512)
}

#[test]
fn every_direction_keeps_every_byte_and_hole() {
    for io in backends() {
        let rig = Rig::new();
        let image = rig.image("source", SIZE);
        let spec = |index: usize| format!("v{index}={}", rig.text(&format!("v{index}")));
        for index in 0..6 {
            std::fs::File::create(rig.path(&format!("v{index}"))).unwrap().set_len(SIZE as u64).unwrap();
        }
        let server = rig.serve(io, &(0..6).map(spec).collect::<Vec<_>>());
        let more = ["--io", io];
        // From the file over each wire, from volume to volume across the wires, and back into files.
        for wire in 0..3 {
            let into = &rig.names(&server, &format!("v{wire}"))[wire];
            assert_eq!(zero_bytes(&rig.copy(&rig.text("source"), into, &more)), 6 << 20, "{into}");
            let on = &rig.names(&server, &format!("v{}", wire + 3))[(wire + 1) % 3];
            assert_eq!(zero_bytes(&rig.copy(into, on, &more)), 6 << 20, "{into} to {on}");
            let out = rig.text(&format!("out{wire}"));
            rig.copy(&rig.names(&server, &format!("v{}", wire + 3))[(wire + 2) % 3], &out, &more);
            for name in [format!("v{wire}"), format!("v{}", wire + 3), format!("out{wire}")] {
                assert!(std::fs::read(rig.path(&name)).unwrap() == image, "{io}: {name}");
                assert_eq!(holes(&rig.path(&name)), 6 << 20, "{io}: holes of {name}");
            }
        }
    }
}

#[test]
fn a_volume_with_contents_is_overwritten_only_when_told_so_and_then_wholly() {
    let rig = Rig::new();
    let image = rig.image("source", SIZE);
    std::fs::write(rig.path("full"), noise(SIZE, 5)).unwrap();
    let server = rig.serve("auto", &[format!("full={}", rig.text("full"))]);
    let source = rig.text("source");
    for name in rig.names(&server, "full") {
        let said = rig.fail(&source, &name, &[]);
        assert!(said.contains("contains data") && said.contains("--overwrite"), "{said}");
    }
    assert!(std::fs::read(rig.path("full")).unwrap() == noise(SIZE, 5), "nothing was touched");
    for name in rig.names(&server, "full") {
        std::fs::write(rig.path("full"), noise(SIZE, 5)).unwrap();
        rig.copy(&source, &name, &["--overwrite", "--chunk", "64K", "--depth", "64", "--connections", "4"]);
        assert!(std::fs::read(rig.path("full")).unwrap() == image, "{name}");
    }
}

#[test]
fn what_cannot_be_copied_is_said_before_anything_is_touched() {
    let rig = Rig::new();
    rig.image("source", SIZE);
    rig.image("odd", SIZE + 100);
    let ro = format!("ro={},ro", rig.text("source"));
    let server = rig.serve("auto", &[ro, "small=mem:1M".to_owned(), "large=mem:16M".to_owned()]);
    for wire in 0..3 {
        let name = |volume: &str| rig.names(&server, volume)[wire].clone();
        let (source, none) = (rig.text("source"), name("none"));
        for (to, words) in [("ro", "is read-only"), ("small", "has 1048576 bytes, and 12582912 are to be copied")] {
            let said = rig.fail(&source, &name(to), &[]);
            assert!(said.contains(words) && said.contains("copy:"), "{said}");
        }
        let said = rig.fail(&none, &rig.text("out"), &[]);
        assert!(said.contains("volume") || said.contains("export"), "{said}");
        let said = rig.fail(&name("ro"), &name("ro"), &[]);
        assert!(said.contains("both source and destination"), "{said}");
    }
    assert!(!rig.path("out").exists(), "no destination was made for a source that is not there");
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for scheme in ["byway", "nbd"] {
        let said = rig.fail(&format!("{scheme}://{nobody}/x"), &rig.text("out"), &[]);
        assert!(said.contains("refused"), "{said}");
    }
    let larger = &rig.names(&server, "large")[0];
    let resume = rig.text("resume");
    let output = run(&binary(), &rig.arguments(&resume, &[&rig.text("odd"), larger]));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("larger by 4194204 bytes, which stay as they are"), "{said}");
}

#[test]
fn a_file_that_is_served_or_copied_to_is_no_destination() {
    let rig = Rig::new();
    rig.image("source", SIZE);
    let served = noise(SIZE, 6);
    std::fs::write(rig.path("served"), &served).unwrap();
    let mut server = rig.serve("auto", &[format!("v={}", rig.text("served"))]);
    let itself = &rig.names(&server, "v")[2];
    for from in [itself, &rig.text("source")] {
        let said = rig.fail(from, &rig.text("served"), &["--overwrite"]);
        assert!(said.contains("is in use") && said.contains("copy to the volume that is served"), "{said}");
    }
    assert!(std::fs::read(rig.path("served")).unwrap() == served, "nothing was touched");
    server.terminate();
    // Another copy holds it in the same way.
    let held = std::fs::File::open(rig.path("served")).unwrap();
    held.lock().unwrap();
    let said = rig.fail(&rig.text("source"), &rig.text("served"), &["--overwrite"]);
    assert!(said.contains("another copy"), "{said}");
    drop(held);
    rig.copy(&rig.text("source"), &rig.text("served"), &["--overwrite"]);
}

/// A volume that keeps nobody from writing to its file.
fn serve_unlocked(rig: &Rig, option: &str) -> Server {
    rig.serve("auto", &[format!("v={},{option}", rig.text("served"))])
}

#[test]
fn a_volume_is_not_copied_onto_the_file_behind_it() {
    let rig = Rig::new();
    let image = rig.image("served", SIZE);
    std::fs::hard_link(rig.path("served"), rig.path("linked")).unwrap();
    std::os::unix::fs::symlink(rig.path("served"), rig.path("pointed")).unwrap();
    for option in ["ro", "direct,shared"] {
        let mut server = serve_unlocked(&rig, option);
        let [native, ..] = rig.names(&server, "v");
        for to in ["served", "linked", "pointed"] {
            for more in [&["--overwrite"][..], &["--overwrite", "--verify"], &[]] {
                let said = rig.fail(&native, &rig.text(to), more);
                assert!(said.contains("both source and destination"), "{option}: {said}");
                assert!(std::fs::read(rig.path("served")).unwrap() == image, "{option}: {to} was touched");
            }
        }
        // Another file is none of that.
        std::fs::write(rig.path("other"), noise(SIZE, 4)).unwrap();
        rig.copy(&native, &rig.text("other"), &["--overwrite"]);
        assert!(std::fs::read(rig.path("other")).unwrap() == image);
        server.terminate();
    }
}

#[test]
fn a_file_that_is_served_to_be_read_is_no_destination_either() {
    let rig = Rig::new();
    let image = rig.image("served", SIZE);
    std::fs::write(rig.path("source"), noise(SIZE, 4)).unwrap();
    for option in ["ro", "direct,shared"] {
        let mut server = serve_unlocked(&rig, option);
        let [_, by_nbd, by_socket] = rig.names(&server, "v");
        for from in [by_nbd, by_socket, rig.text("source")] {
            let said = rig.fail(&from, &rig.text("served"), &["--overwrite"]);
            assert!(said.contains("is in use: it is served"), "{option}: {said}");
            assert!(std::fs::read(rig.path("served")).unwrap() == image, "{option}: {from} was copied over it");
        }
        // Neither those who read it nor those who write to it are kept away.
        let folder = tempfile::tempdir().unwrap();
        let volumes = [("ro", "ro"), ("shared", "direct,shared")]
            .map(|(name, options)| format!("{name}={},{options}", rig.text("served")));
        let writer = format!("rw={}", rig.text("served"));
        let mut arguments = vec!["--listen", "tcp://127.0.0.1:0"];
        arguments.extend([&volumes[0], &volumes[1], &writer].into_iter().flat_map(|volume| ["--volume", volume]));
        Server::start(folder.path(), 1, &arguments).terminate();
        server.terminate();
    }
    rig.copy(&rig.text("source"), &rig.text("served"), &["--overwrite"]);
}

#[test]
fn a_destination_that_is_blank_again_gets_everything() {
    let rig = Rig::new();
    let image = rig.image("source", SIZE);
    // The first run ends at the first read there, the second does not.
    let source = format!("s=fault:read=eio@9M+4K#1:{}", rig.text("source"));
    let disk = format!("v={}", rig.text("disk"));
    let make = || std::fs::File::create(rig.path("disk")).unwrap().set_len(SIZE as u64).unwrap();
    make();
    for emptied in [true, false] {
        let mut server = rig.serve("auto", &[source.clone(), disk.clone()]);
        let [from, to] = ["s", "v"].map(|volume| rig.names(&server, volume)[2].clone());
        let said = rig.fail(&from, &to, &["--depth", "1", "--overwrite"]);
        assert!(said.contains("reading the source at byte 9437184"), "{said}");
        let log = std::fs::read_to_string(rig.path("resume-failed")).unwrap();
        assert!(log.lines().any(|line| line.starts_with("data 0 ")), "{log}");
        if emptied {
            // Another disk of the same size, under the same name.
            server.terminate();
            std::fs::remove_file(rig.path("disk")).unwrap();
            make();
            server = rig.serve("auto", &[format!("s={}", rig.text("source")), disk.clone()]);
        }
        let resume = rig.text("resume-failed");
        let output = run(&binary(), &rig.arguments(&resume, &[&from, &to, "--json"]));
        let (done, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{said}");
        assert_eq!(done.contains("\"resumed_bytes\":0,"), emptied, "{done}");
        assert_eq!(said.contains("everything is copied again"), emptied, "{said}");
        assert!(std::fs::read(rig.path("disk")).unwrap() == image, "emptied: {emptied}");
        drop(server);
    }
}

#[test]
fn a_web_server_is_not_taken_for_a_volume() {
    let rig = Rig::new();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let web = std::thread::spawn(move || {
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = std::io::Write::write_all(&mut stream, &[b'H'; 256]);
            let _ = std::io::Read::read(&mut stream, &mut [0; 512]);
        }
    });
    for (scheme, words) in [("nbd", "does not speak NBD"), ("byway", "does not speak byway's wire")] {
        let said = rig.fail(&format!("{scheme}://{address}/x"), &rig.text("out"), &[]);
        assert!(said.contains(words), "{said}");
    }
    web.join().unwrap();
}

#[test]
fn nbdkit_gives_and_takes_whatever_it_can_and_cannot() {
    const TEST: &str = "nbdkit_gives_and_takes_whatever_it_can_and_cannot";
    let Some(nbdkit) = find_tool("nbdkit") else { return skip(TEST, SkipReason::MissingTool("nbdkit")) };
    let rig = Rig::new();
    let image = rig.image("source", SIZE);
    let sizes = ["blocksize-minimum=4096", "blocksize-preferred=4096", "blocksize-maximum=131072"];
    let policies: [&[&str]; 6] = [
        &[],
        &["--filter=nozero"],
        &["--filter=noextents"],
        &["--filter=multi-conn", "multi-conn-mode=disable"],
        &["--filter=blocksize-policy", sizes[0], sizes[1], sizes[2], "blocksize-error-policy=error"],
        &["--no-sr", "--mask-handshake=0"],
    ];
    for (index, policy) in policies.iter().enumerate() {
        let backing = rig.path(&format!("back{index}"));
        std::fs::write(&backing, noise(SIZE, 3)).unwrap();
        let (filters, parameters): (Vec<&str>, Vec<&str>) = policy.iter().partition(|word| word.starts_with("--"));
        let file = backing.display().to_string();
        let mut arguments = filters;
        arguments.extend(["file", &file]);
        arguments.extend(parameters);
        let server = ForeignServer::nbdkit(&nbdkit, &rig.path(&format!("s{index}")), &arguments);
        let refused = rig.fail(&rig.text("source"), &server.uri(""), &[]);
        let bench = run(&binary(), &["bench", "volume", &server.uri(""), "--rw", "write", "--seconds", "1"]);
        // Without structured replies there is no block status.
        let doubt = if policy.contains(&"--no-sr") { ", or its server does not tell" } else { "" };
        for said in [refused, String::from_utf8_lossy(&bench.stderr).into_owned()] {
            assert!(said.contains(&format!(" contains data{doubt}; name another")), "{policy:?}: {said}");
        }
        rig.copy(&rig.text("source"), &server.uri(""), &["--overwrite", "--connections", "4"]);
        assert!(std::fs::read(&backing).unwrap() == image, "{policy:?}: into it");
        let out = format!("out{index}");
        rig.copy(&server.uri(""), &rig.text(&out), &["--connections", "4"]);
        assert!(std::fs::read(rig.path(&out)).unwrap() == image, "{policy:?}: out of it");
    }
}

#[test]
fn qemu_nbd_gives_and_takes() {
    let Some(qemu) = find_tool("qemu-nbd") else {
        return skip("qemu_nbd_gives_and_takes", SkipReason::MissingTool("qemu-nbd"));
    };
    let rig = Rig::new();
    let image = rig.image("source", SIZE);
    std::fs::write(rig.path("back"), noise(SIZE, 3)).unwrap();
    let server = ForeignServer::qemu_nbd(&qemu, &rig.path("s"), &rig.path("back"));
    rig.copy(&rig.text("source"), &server.uri(""), &["--overwrite"]);
    assert!(std::fs::read(rig.path("back")).unwrap() == image);
    let said = rig.fail(&server.uri(""), &rig.text("back"), &["--overwrite"]);
    assert!(said.contains("another program has locked it"), "{said}");
    assert!(std::fs::read(rig.path("back")).unwrap() == image, "nothing was touched");
    assert!(zero_bytes(&rig.copy(&server.uri(""), &rig.text("out"), &[])) >= 6 << 20, "it tells of its holes");
    assert!(std::fs::read(rig.path("out")).unwrap() == image);
}

#[test]
fn a_server_that_fails_in_the_middle_is_quoted() {
    const TEST: &str = "a_server_that_fails_in_the_middle_is_quoted";
    let Some(nbdkit) = find_tool("nbdkit") else { return skip(TEST, SkipReason::MissingTool("nbdkit")) };
    let rig = Rig::new();
    rig.image("source", SIZE);
    let arguments = ["--filter=error", "memory", "64M", "error-pwrite-rate=100%", "error=ENOSPC"];
    let server = ForeignServer::nbdkit(&nbdkit, &rig.path("s"), &arguments);
    let said = rig.fail(&rig.text("source"), &server.uri(""), &[]);
    assert!(said.contains("writing the destination at byte") && said.contains("no space left"), "{said}");
    assert!(said.contains("run the same command again"), "{said}");
}
