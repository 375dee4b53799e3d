//! `byway far`: programs whose memory lies at a lender have the same results as without it.

use std::fmt::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use byway_e2e::Server;
use byway_e2e::far::{Lender, PagedProgram, can_page, command, compiled, far, far_well, python};

/// Makes blocks of which each can be made again, changes them in two rounds, checks each against what it was, and prints their digest.
/// Then it waits until less memory is here than it was told, in KiB, and prints how much that is (`VmRSS`).
const BLOCKS: &str = r#"
import hashlib, random, sys, time
count = int(sys.argv[1])
blocks = [bytearray(random.Random(i).randbytes(65536)) for i in range(count)]
digests = [hashlib.md5(block).digest() for block in blocks]
for turn in range(2):
    for i, block in enumerate(blocks):
        assert hashlib.md5(block).digest() == digests[i], (turn, i)
        block[turn * 7] ^= 255
        digests[i] = hashlib.md5(block).digest()
print(hashlib.md5(b"".join(digests)).hexdigest())
deadline, bound = time.monotonic() + 40, int(sys.argv[2])
while True:
    kib = int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0])
    if kib < bound: break
    assert time.monotonic() < deadline, f"{kib} KiB are here, {bound} are the bound"
print(kib, file=sys.stderr)
"#;

/// Of the kernel, in KiB: the first number alone on a line.
fn resident_kib(stderr: &[u8]) -> u64 {
    let said = String::from_utf8_lossy(stderr);
    said.lines().find_map(|line| line.trim().parse().ok()).unwrap_or_else(|| panic!("no VmRSS: {said}"))
}

#[test]
fn a_python_program_has_its_results_at_half_and_at_a_quarter_of_its_memory() {
    let Some(python) = python() else { return };
    if !can_page() {
        return;
    }
    let lender = Lender::start();
    // 64 MiB of blocks.
    let program = [python, "-c", BLOCKS, "1000", "99999999"];
    let plain = Command::new(python).args(&program[1..]).output().unwrap();
    assert!(plain.status.success() && resident_kib(&plain.stderr) > 64 << 10);
    for uri in lender.uris() {
        for limit_mib in [36, 18] {
            // What a program touches between two looks is above its limit.
            let bound_kib = (limit_mib + 2) << 10;
            let bound = bound_kib.to_string();
            let program = [&program[..4], &[&bound]].concat();
            let output = far(&uri, &format!("{limit_mib}M"), &["--class", "none"], &program);
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{uri} at {limit_mib}M: {}\n{said}", output.status);
            assert_eq!(output.stdout, plain.stdout, "{uri} at {limit_mib}M: {said}");
            assert!(resident_kib(&output.stderr) < bound_kib);
        }
    }
}

/// The rest of the 64 MiB comes faster than lenders take pages: the program is to wait for room.
#[test]
fn the_kernel_never_counts_more_than_the_limit_where_memory_is_watched() {
    if !can_page() {
        return;
    }
    let (lender, folder) = (Lender::start(), tempfile::tempdir_in("/var/tmp").unwrap());
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/far_programs/peak.c");
    let Some(program) = compiled(&source, folder.path()) else { return };
    let program = [program.to_str().unwrap(), "12", "64"];
    for uri in lender.uris() {
        let (said, fetched) = far_well(&uri, "16M", &program);
        let peak_kib: u64 = String::from_utf8_lossy(&said).trim().parse().expect("a number of KiB");
        // It has 12 MiB before it fills the rest.
        assert!((12 << 10..=16 << 10).contains(&peak_kib), "{uri}: {peak_kib} KiB");
        assert!(fetched > 0, "nothing was far");
    }
}

#[test]
fn sort_sorts_a_file_that_is_larger_than_its_limit() {
    if !can_page() {
        return;
    }
    let lender = Lender::start();
    // Short lines, whose table takes more than they do; and 64 MiB of long ones.
    for (count, width, limit) in [(400_000, 4, "16M"), (1 << 16, 1007, "32M")] {
        let (file, mut lines) = (lender.path("lines"), String::new());
        let mut number = 1u64;
        for _ in 0..count {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            writeln!(lines, "{:016x} {:0width$}", number >> 7, number % 1000).unwrap();
        }
        assert_eq!(lines.len(), count * (18 + width));
        std::fs::write(&file, lines).unwrap();
        let file = file.display().to_string();
        let program = ["env", "LC_ALL=C", "sort", "-S", "128M", "--parallel=2", &file];
        let plain = Command::new(program[0]).args(&program[1..]).output().unwrap();
        assert!(plain.status.success() && plain.stdout.len() == count * (18 + width));
        for uri in lender.uris() {
            let (sorted, fetched) = far_well(&uri, limit, &program);
            assert!(sorted == plain.stdout, "{uri} at {limit}: other lines");
            assert!(fetched > 0, "{uri} at {limit}: nothing was far");
        }
    }
}

#[test]
fn children_that_fork_and_execute_have_their_memory() {
    let Some(python) = python() else { return };
    if !can_page() {
        return;
    }
    let lender = Lender::start();
    let program = r#"
import os, subprocess, sys
pages = [bytearray(b"%07d." % i * 512) for i in range(8000)]
def check(): assert all(pages[i] == b"%07d." % i * 512 for i in range(0, 8000, 3))
child = os.fork()
if child == 0:
    check()
    pages[3][:] = b"x" * 4096
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
check()
out = subprocess.run([sys.executable, "-c", "print(sum(len(b'y' * 4096) for i in range(5000)))"], capture_output=True, text=True)
assert out.stdout == "20480000\n", out
print("good")
"#;
    let (said, fetched) = far_well(&lender.uris()[0], "20M", &[python, "-c", program]);
    assert!(said == b"good\n" && fetched > 0);
}

#[test]
fn a_lender_that_is_killed_costs_a_page_with_class_none_and_nothing_with_disk() {
    let Some(python) = python() else { return };
    if !can_page() {
        return;
    }
    let program = r#"
import sys
pages = [bytearray(b"%07d." % i * 512) for i in range(12000)]
print("filled", flush=True)
sys.stdin.read(1)
assert all(pages[i] == b"%07d." % i * 512 for i in range(12000))
print("good", flush=True)
"#;
    for class in ["disk", "none"] {
        let mut lender = Lender::start();
        let mut command = command(&lender.uris()[0], "20M", &["--class", class], &[python, "-c", program]);
        let paged = PagedProgram::start_filled(command.stdin(Stdio::piped()));
        lender.server.kill();
        let output = paged.finish();
        let [rest, said] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        let status = output.status;
        match class {
            "disk" => assert!(status.success() && rest == "good\n", "{status} {rest} {said}"),
            // SIGBUS, as a shell gives it.
            _ => assert!(status.code() == Some(128 + 7) && rest.is_empty(), "{status} {rest} {said}"),
        }
        assert!(said.contains("a lender is lost"), "{said}");
        assert!(class == "disk" || said.contains("a page is lost with its lender"), "{said}");
    }
}

/// Threads that write pages, each with a value of its own, check them, drop ranges, and unmap and map.
const TORTURE: &str = r#"
import mmap, random, sys, threading
PAGE = 4096
def work(number):
    choice = random.Random(number)
    pages, known = 2500, {}
    area = mmap.mmap(-1, pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    def check(page):
        want = known.get(page, b"\0" * 8)
        for at in (0, 2040, 4088):
            got = area[page * PAGE + at:page * PAGE + at + 8]
            assert got == want, (number, page, at, got, want)
    for step in range(8000):
        page, what = choice.randrange(pages), choice.randrange(200)
        if what < 100:
            check(page)
            value = (step << 32 | number << 24 | page).to_bytes(8, "little")
            for at in (0, 2040, 4088):
                area[page * PAGE + at:page * PAGE + at + 8] = value
            known[page] = value
        elif what < 196:
            check(page)
        elif what == 196:
            count = choice.randrange(1, min(64, pages - page) + 1)
            area.madvise(mmap.MADV_DONTNEED, page * PAGE, count * PAGE)
            for dropped in range(page, page + count):
                known.pop(dropped, None)
        elif what == 197 and step % 8 == 0:
            area.close()
            known, area = {}, mmap.mmap(-1, pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(pages):
        check(page)
failed = []
def guarded(number):
    try: work(number)
    except BaseException as error: failed.append(repr(error))
threads = [threading.Thread(target=guarded, args=(number,)) for number in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failed, failed
print("good")
"#;

#[test]
fn threads_that_drop_and_unmap_find_the_version_that_they_wrote_last() {
    let Some(python) = python() else { return };
    if !can_page() {
        return;
    }
    let lender = Lender::start();
    for uri in lender.uris() {
        let (said, fetched) = far_well(&uri, "18M", &[python, "-c", TORTURE]);
        assert_eq!(said, b"good\n");
        assert!(fetched > 0, "the program fits into its limit");
    }
}

#[test]
fn what_cannot_be_paged_is_refused_by_name() {
    if !can_page() {
        return;
    }
    let lender = Lender::start();
    let script = lender.path("static");
    let mut head = b"\x7fELF\x02\x01".to_vec();
    head.resize(64, 0);
    std::fs::write(&script, head).unwrap();
    let path = script.display().to_string();
    let uri = &lender.uris()[0];
    for (limit, program, told) in [
        ("32M", path.as_str(), "a static program loads no libraries"),
        ("32M", "no-such-program", "no such program"),
        ("1M", "true", "at least 16M"),
    ] {
        let output = far(uri, limit, &[], &[program]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(told), "{said}");
    }
    let other = tempfile::tempdir_in("/dev/shm").unwrap();
    let socket = other.path().join("unix").display().to_string();
    let listen = format!("unix://{socket}");
    let _server = Server::start(other.path(), 1, &["--volume", "a=mem:1M", "--listen", &listen]);
    let output = far(&format!("byway+unix:///?socket={socket}"), "32M", &[], &["true"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("lends no memory"), "{said}");
}
