//! The limit on mapped files: what a node has sent, or received into memory, does not stay in its resident memory.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use byway_e2e::{LIBNBD_PRELUDE, LIMIT, Script, Server, SkipReason, backends, libnbd_python, skip, until};

const MAPPED_BYTES: u64 = 32 << 20;
const DISK_BYTES: u64 = 256 << 20;
/// What the one loop has not counted yet is under 1 MiB; and as much for kernels that sum up resident memory only
/// roughly (before 6.16).
const SLACK_BYTES: u64 = 2 << 20;

fn get(port: u16, path: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn metric(page: &str, name: &str) -> u64 {
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name}: {page}")).parse().unwrap()
}

/// Each step maps many times the limit, compares every byte, and waits for the test to have looked. The small reads map 16
/// times what they send, and end where a node that counts only what it sends would be far from its next look.
fn script(socket: &str, disk: &str) -> String {
    let mut script = format!("{LIBNBD_PRELUDE}want = open('{disk}', 'rb').read()\nM = 1 << 20\n");
    for volume in ["disk", "m"] {
        writeln!(script, "{volume} = nbd.NBD(); {volume}.set_export_name('{volume}')").unwrap();
        writeln!(script, "{volume}.connect_unix('{socket}')").unwrap();
    }
    script
        + "def step(name):\n  print(name, flush=True); input()\n\
           def whole(h):\n  for at in range(0, len(want), M): assert h.pread(M, at) == want[at:at + M], at\n\
           whole(disk); step('read')\n\
           whole(disk); step('read again')\n\
           for at in range(0, len(want) - 4 * M, 64 << 10): assert disk.pread(4096, at) == want[at:at + 4096], at\n\
           step('read here and there')\n\
           for at in range(0, len(want), M): m.pwrite(want[at:at + M], at)\n\
           step('written'); whole(m); step('read back')\n"
}

#[test]
fn mapped_files_keep_to_their_limit() {
    let Some(python) = libnbd_python() else {
        return skip("mapped_files_keep_to_their_limit", SkipReason::MissingTool("python3-libnbd"));
    };
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let at = |name: &str| folder.path().join(name).display().to_string();
    let bytes: Vec<u8> =
        (0..DISK_BYTES / 8).flat_map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect();
    std::fs::write(at("disk"), bytes).unwrap();
    for io in backends() {
        let (disk, memory) = (format!("disk={},ro", at("disk")), format!("m=mem:{DISK_BYTES}"));
        let nbd = format!("unix://{}", at("nbd"));
        let base = ["--volume", &disk, "--volume", &memory, "--nbd", &nbd, "--http", "127.0.0.1:0"];
        let flags = ["--io", io, "--threads", "1", "--mmap-limit", "32M"];
        let server = Server::start(folder.path(), 2, &[&base[..], &flags].concat());
        let (port, mut dropped) = (server.port("http"), 0);
        assert_eq!(metric(&get(port, "/metrics"), "byway_mmap_limit_bytes"), MAPPED_BYTES);
        let mut client = Script::start(&python, &script(&at("nbd"), &at("disk")));
        for step in ["read", "read again", "read here and there", "written", "read back"] {
            client.expect(step);
            let what = format!("{io}, {step}: the mapped files to go");
            let is_kept = || server.mapped_bytes() <= MAPPED_BYTES + SLACK_BYTES;
            until(Instant::now() + LIMIT, &what, || is_kept().then_some(()));
            let before =
                std::mem::replace(&mut dropped, metric(&get(port, "/metrics"), "byway_mmap_released_bytes_total"));
            assert!(dropped > before, "{what}: {before} bytes, then {dropped}");
            client.go_on();
        }
        client.ends_well();
    }
}

#[test]
fn without_a_flag_the_limit_is_half_of_the_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let nbd = format!("unix://{}", folder.path().join("nbd").display());
    let server = Server::start(folder.path(), 2, &["--volume", "m=mem:1M", "--nbd", &nbd, "--http", "127.0.0.1:0"]);
    let limit = metric(&get(server.port("http"), "/metrics"), "byway_mmap_limit_bytes");
    let said = std::fs::read_to_string("/proc/meminfo").unwrap();
    let machine: u64 = said.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(limit >= 16 << 20 && limit <= machine * 512, "{limit} bytes of {machine} KiB");
}
