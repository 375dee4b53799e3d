//! The clients that people use, against byway's NBD front end, on both backends and both kinds of socket.

use std::path::Path;

use byway_e2e::{LIBNBD_PRELUDE, Server, SkipReason, backends, find_tool, libnbd_python, noise, run, run_well, skip};

/// The tool, or a skip said aloud.
macro_rules! tool {
    ($test:expr, $name:expr) => {
        match find_tool($name) {
            Some(path) => path,
            None => return skip($test, SkipReason::MissingTool($name)),
        }
    };
}

struct Rig {
    folder: tempfile::TempDir,
    server: Server,
}

/// A server of `disk` (a file of `bytes`) and `mem` (64 MiB) on a unix socket and a port.
fn rig(io: &str, bytes: &[u8]) -> Rig {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let disk = folder.path().join("disk");
    std::fs::write(&disk, bytes).expect("room in memory");
    let socket = format!("unix://{}/sock", folder.path().display());
    let volume = format!("disk={},description=a disk", disk.display());
    let arguments =
        ["--io", io, "--volume", &volume, "--volume", "mem=mem:64M", "--nbd", &socket, "--nbd", "tcp://127.0.0.1:0"];
    let server = Server::start(folder.path(), 2, &arguments);
    Rig { folder, server }
}

impl Rig {
    fn unix(&self, volume: &str) -> String {
        format!("nbd+unix:///{volume}?socket={}/sock", self.folder.path().display())
    }

    fn tcp(&self, volume: &str) -> String {
        format!("nbd://127.0.0.1:{}/{volume}", self.server.port("nbd"))
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }
}

#[test]
fn nbdinfo_sees_the_volumes_as_they_are() {
    let nbdinfo = tool!("nbdinfo_sees_the_volumes_as_they_are", "nbdinfo");
    let rig = rig("auto", &noise(1 << 20, 1));
    let listed = run_well(&nbdinfo, &["--list", "--json", &rig.tcp("")]);
    for want in ["\"disk\"", "\"mem\"", "\"a disk\"", "\"export-size\": 1048576", "\"export-size\": 67108864"] {
        assert!(listed.contains(want), "{want} in {listed}");
    }
    let one = run_well(&nbdinfo, &["--json", &rig.unix("disk")]);
    for want in ["\"can_flush\": true", "\"can_fua\": true", "\"can_multi_conn\": true", "\"can_fast_zero\": true"] {
        assert!(one.contains(want), "{want} in {one}");
    }
    assert_eq!(run_well(&nbdinfo, &["--size", &rig.tcp("disk")]).trim(), "1048576");
    assert!(!run(&nbdinfo, &["--size", &rig.tcp("nothing")]).status.success(), "an unknown name is refused");
}

#[test]
fn nbdcopy_copies_both_ways() {
    let nbdcopy = tool!("nbdcopy_copies_both_ways", "nbdcopy");
    for io in backends() {
        let bytes = noise((40 << 20) + 512, 2);
        let rig = rig(io, &bytes);
        for (name, uri) in [("unix", rig.unix("disk")), ("tcp", rig.tcp("disk"))] {
            run_well(&nbdcopy, &[&uri, &rig.path(name)]);
            assert!(std::fs::read(rig.path(name)).unwrap() == bytes, "{io} {name}");
        }
        let other = noise(bytes.len(), 3);
        std::fs::write(rig.path("other"), &other).unwrap();
        run_well(&nbdcopy, &["--request-size=2097152", "--flush", &rig.path("other"), &rig.tcp("disk")]);
        assert!(std::fs::read(rig.path("disk")).unwrap() == other, "{io}: what was written is in the file");
    }
}

/// Requests of every kind and awkward sizes, against a model, by libnbd's Python.
const LIBNBD_SCRIPT: &str = r#"
import random, os
r = random.Random(7)
size = h.get_size()
model = bytearray(h.pread(min(size, 32 << 20), 0))
while len(model) < size:
    model += h.pread(min(size - len(model), 32 << 20), len(model))
g = nbd.NBD(); g.connect_uri(uri)
for n in range(300):
    c = r.choice([h, g])
    length = r.choice([1, 511, 512, 4096, 4097, 65536, 100001, 1 << 20, 5 << 20])
    off = r.randrange(0, size - length)
    what = r.choice("rrwwwzZtfc")
    if what == "r":
        assert c.pread(length, off) == bytes(model[off:off+length]), (n, off, length)
    elif what == "w":
        data = r.randbytes(length)
        c.pwrite(data, off, nbd.CMD_FLAG_FUA if r.random() < .2 else 0)
        model[off:off+length] = data
    elif what in "zZ":
        c.zero(length, off, nbd.CMD_FLAG_NO_HOLE if what == "Z" else 0)
        model[off:off+length] = bytes(length)
    elif what == "f":
        c.flush()
    elif what == "c":
        c.cache(length, off)
for at in range(0, size, 32 << 20):
    part = min(32 << 20, size - at)
    assert h.pread(part, at, nbd.CMD_FLAG_DF if h.can_df() else 0) == bytes(model[at:at+part]), at
for bad in (lambda: h.pread(1, size), lambda: h.pwrite(b"x", size), lambda: h.pread(10, size - 5)):
    try: bad()
    except nbd.Error: pass
    else: raise SystemExit("a request past the end was served")
g.shutdown()
"#;

fn libnbd(python: &Path, uri: &str, before: &str, script: &str) {
    let uri_line = format!("uri = {uri:?}");
    let whole = format!(
        "{LIBNBD_PRELUDE}{uri_line}\n{before}\nh.set_strict_mode(0)\nh.connect_uri(uri)\n{script}\nh.shutdown()"
    );
    run_well(python, &["-c", &whole]);
}

#[test]
fn libnbd_finds_what_it_wrote_with_every_kind_of_request() {
    let Some(python) = libnbd_python() else {
        return skip(
            "libnbd_finds_what_it_wrote_with_every_kind_of_request",
            SkipReason::MissingTool("python3-libnbd"),
        );
    };
    for io in backends() {
        let rig = rig(io, &noise((40 << 20) + 77, 4));
        libnbd(&python, &rig.unix("disk"), "", LIBNBD_SCRIPT);
        libnbd(&python, &rig.tcp("mem"), "h.set_request_structured_replies(False)", LIBNBD_SCRIPT);
        libnbd(&python, &rig.tcp("mem"), "", LIBNBD_SCRIPT);
    }
}

#[test]
fn qemu_has_many_of_the_longest_requests_in_flight() {
    let qemu_img = tool!("qemu_has_many_of_the_longest_requests_in_flight", "qemu-img");
    for io in backends() {
        let rig = rig(io, &noise(64 << 20, 6));
        for (depth, bytes, count) in [("8", "33554432", "16"), ("16", "16777216", "32"), ("32", "8388608", "64")] {
            let bench = ["bench", "-f", "raw", "-d", depth, "-s", bytes, "-c", count];
            for uri in [rig.unix("disk"), rig.tcp("disk"), rig.tcp("mem")] {
                run_well(&qemu_img, &[&bench[..], &[&uri]].concat());
            }
            run_well(&qemu_img, &[&bench[..], &["-w", &rig.tcp("mem")]].concat());
        }
    }
}

#[test]
fn extents_of_a_sparse_volume_are_told() {
    let Some(python) = libnbd_python() else {
        return skip("extents_of_a_sparse_volume_are_told", SkipReason::MissingTool("python3-libnbd"));
    };
    let rig = rig("auto", &noise(4096, 5));
    let script = r#"
h.pwrite(b"x" * 65536, 1 << 20)
seen = []
def extent(context, offset, entries, error):
    at = offset
    for length, flags in zip(entries[0::2], entries[1::2]):
        seen.append((at, length, flags)); at += length
h.block_status(4 << 20, 0, extent)
assert seen == [(0, 1 << 20, 3), (1 << 20, 65536, 0), ((1 << 20) + 65536, (3 << 20) - 65536, 3)], seen
h.trim(65536, 1 << 20)
seen.clear()
h.block_status(4 << 20, 0, extent)
assert seen == [(0, 4 << 20, 3)], seen
"#;
    libnbd(&python, &rig.tcp("mem"), "h.add_meta_context('base:allocation')", script);
}

#[test]
fn a_read_from_disk_comes_in_slices_and_an_error_in_its_middle_spoils_no_other() {
    let test = "a_read_from_disk_comes_in_slices_and_an_error_in_its_middle_spoils_no_other";
    let Some(python) = libnbd_python() else { return skip(test, SkipReason::MissingTool("python3-libnbd")) };
    let script = r#"
path = PATH
right = open(path, "rb").read()
def read(flags=0):
    chunks = []
    def chunk(data, offset, status, error):
        if status == nbd.READ_DATA: chunks.append((offset, bytes(data)))
    try: h.pread_structured(1 << 20, 1 << 20, chunk, flags); failed = None
    except nbd.Error as error: failed = error.errno
    return sorted(chunks), failed
chunks, failed = read()
assert failed is None and len(chunks) == 4 and b"".join(d for _, d in chunks) == right[1 << 20:2 << 20], len(chunks)
chunks, failed = read(nbd.CMD_FLAG_DF)
assert failed is None and len(chunks) == 1 and chunks[0][1] == right[1 << 20:2 << 20], len(chunks)
import os
os.truncate(path, (1 << 20) + (600 << 10))
chunks, failed = read()
assert failed == "EIO", failed
assert [o for o, _ in chunks] == [1 << 20, (1 << 20) + (256 << 10)], [o for o, _ in chunks]
assert all(d == right[o:o + len(d)] for o, d in chunks)
assert h.pread(4096, 0) == right[:4096], "the connection goes on"
"#;
    for io in backends() {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder on disk");
        let disk = folder.path().join("disk");
        std::fs::write(&disk, noise(4 << 20, 8)).expect("room on disk");
        let volume = format!("disk={},direct", disk.display());
        let arguments = ["--io", io, "--volume", &volume, "--nbd", "tcp://127.0.0.1:0"];
        let server = Server::start(folder.path(), 1, &arguments);
        let uri = format!("nbd://127.0.0.1:{}/disk", server.port("nbd"));
        libnbd(&python, &uri, "", &script.replace("PATH", &format!("{:?}", disk.display().to_string())));
    }
}

#[test]
fn a_flush_on_one_connection_covers_the_others_and_many_requests_are_in_flight() {
    let Some(python) = libnbd_python() else {
        return skip(
            "a_flush_on_one_connection_covers_the_others_and_many_requests_are_in_flight",
            SkipReason::MissingTool("python3-libnbd"),
        );
    };
    for io in backends() {
        let rig = rig(io, &noise(1 << 20, 6));
        let script = r"
others = [nbd.NBD() for _ in range(4)]
for o in others: o.connect_uri(uri)
done = []
for n in range(200):
    o = others[n % 4]
    buffer = nbd.Buffer.from_bytearray(bytearray([n + 1 & 255]) * 4096)
    o.aio_pwrite(buffer, n * 4096, completion=lambda error, n=n: done.append((n, error)) or 1)
while len(done) < 200:
    for o in others: o.poll(0)
assert all(error == 0 or not error for _, error in done), done
h.flush()
for n in range(200):
    assert h.pread(4096, n * 4096) == bytes([n + 1 & 255]) * 4096
";
        libnbd(&python, &rig.unix("disk"), "", script);
    }
}

#[test]
fn qemu_speaks_extended_headers_and_agrees() {
    let qemu_img = tool!("qemu_speaks_extended_headers_and_agrees", "qemu-img");
    let qemu_io = tool!("qemu_speaks_extended_headers_and_agrees", "qemu-io");
    for io in backends() {
        let rig = rig(io, &noise(8 << 20, 7));
        run_well(&qemu_img, &["convert", "-f", "raw", "-O", "raw", &rig.tcp("disk"), &rig.path("copy")]);
        run_well(&qemu_img, &["compare", "-f", "raw", "-F", "raw", &rig.path("copy"), &rig.unix("disk")]);
        let commands = ["write -P 7 4096 1M", "write -z 64k 64k", "write -zu 256k 64k", "discard 512k 64k", "flush"];
        for command in commands {
            run_well(&qemu_io, &["-f", "raw", "-c", command, &rig.tcp("mem")]);
        }
        for (command, want) in [("read -P 7 4096 4096", true), ("read -P 0 64k 64k", true), ("read -P 1 0 4096", false)]
        {
            let said = run(&qemu_io, &["-f", "raw", "-c", command, &rig.tcp("mem")]);
            assert_eq!(said.status.success() && !said.stdout.starts_with(b"Pattern"), want, "{command}");
        }
        let map = run_well(&qemu_img, &["map", "--output=json", "-f", "raw", &rig.tcp("mem")]);
        assert!(map.contains("\"data\": true") && map.contains("\"data\": false"), "{map}");
    }
}

#[test]
fn nbdkit_as_a_client_sees_the_same_bytes() {
    let nbdkit = tool!("nbdkit_as_a_client_sees_the_same_bytes", "nbdkit");
    let bytes = noise(3 << 20, 8);
    let rig = rig("auto", &bytes);
    let uri = format!("uri={}", rig.tcp("disk"));
    let copy = format!("nbdcopy \"$uri\" {}", rig.path("copy"));
    run_well(&nbdkit, &["-U", "-", "--filter=blocksize", "nbd", &uri, "minblock=4096", "--run", &copy]);
    assert!(std::fs::read(rig.path("copy")).unwrap() == bytes);
}

#[test]
fn fio_verifies_what_it_wrote() {
    let fio = tool!("fio_verifies_what_it_wrote", "fio");
    let long = std::env::var_os("BYWAY_LONG").is_some();
    for io in backends() {
        let rig = rig(io, &noise(1 << 20, 9));
        let uri = format!("--uri={}", rig.tcp("mem"));
        let runtime = format!("--runtime={}", if long { 60 } else { 3 });
        let said = run_well(
            &fio,
            &[
                "--name=verify",
                "--ioengine=nbd",
                &uri,
                "--rw=randrw",
                "--bsrange=512-256k",
                "--iodepth=16",
                "--numjobs=4",
                "--size=16m",
                "--offset_increment=16m",
                "--time_based",
                &runtime,
                "--verify=crc32c",
                "--verify_fatal=1",
                "--verify_backlog=64",
                // When a job has written each block once, fio begins again, beside the reads that verify. A reply is sent from the
                // volume's memory, so a read may return a write that is in flight with it in part.
                "--serialize_overlap=1",
                // The state file would land in the working folder.
                "--verify_state_save=0",
                "--group_reporting",
                "--minimal",
            ],
        );
        assert!(said.contains(";verify;0;0;"), "fio found no error: {said}");
    }
}

#[test]
fn nbddump_shows_the_bytes() {
    let nbddump = tool!("nbddump_shows_the_bytes", "nbddump");
    let mut bytes = vec![0; 1 << 20];
    bytes[4096..4112].copy_from_slice(b"sixteen letters!");
    let rig = rig("auto", &bytes);
    for uri in [rig.tcp("disk"), rig.unix("disk")] {
        let dump = run_well(&nbddump, &[&uri]);
        assert!(dump.lines().any(|line| line.starts_with("0000001000") && line.contains("sixteen letters!")), "{dump}");
    }
}
