//! The count of copied bytes, compared with the kernel's profile of the CPUs.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};

use byway_e2e::{LIMIT, Server, SkipReason, binary, find_tool, noise, run, run_well, skip};

const TEST: &str = "what_is_counted_as_copied_is_what_the_cpus_copy";

/// Functions of the kernel that copy between a user's memory, a page and a socket's buffer.
const COPIES: [&str; 7] =
    ["copy_from_iter", "copy_to_iter", "rep_movs", "copy_user", "copy_page_from_iter", "copyin", "copy_from_user"];

/// Bytes that the node's sends moved, and of these those that a CPU copied.
fn sent(server: &Server) -> (f64, f64) {
    let mut stream = TcpStream::connect(("127.0.0.1", server.port("http"))).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    let of = |by: &str| {
        let name = format!("byway_moved_bytes_total{{path=\"send\",by=\"{by}\"}} ");
        let value = page.lines().find_map(|line| line.strip_prefix(&name)).expect("the metric");
        value.parse::<f64>().unwrap()
    };
    let copied = of("copied");
    (copied + of("spliced") + of("zero_copy"), copied)
}

/// The share of a node's CPU time that goes into copying while it is read in blocks of that size, and the share of the
/// bytes that it counts as copied.
fn measure(perf: &Path, server: &Server, data: &Path, block: &str) -> Option<(f64, f64)> {
    let before = sent(server);
    let recorded = Command::new(perf)
        .args(["record", "--quiet", "--event", "cpu-clock", "--freq", "999", "--pid", &server.id().to_string()])
        .arg("--output")
        .arg(data)
        .arg("--")
        .arg(binary())
        .args(["bench", "volume", "--rw", "randread", "--depth", "8", "--seconds", "2", "--bs", block])
        .arg(format!("nbd://127.0.0.1:{}/v", server.port("nbd")))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if !recorded.is_ok_and(|status| status.success()) {
        return None;
    }
    let after = sent(server);
    let report = run_well(perf, &["report", "--stdio", "--sort", "symbol", "--input", data.to_str().unwrap()]);
    let shares = report.lines().filter_map(|line| {
        let (share, symbol) = line.trim().split_once('%')?;
        Some((share.parse::<f64>().ok()?, symbol.trim()))
    });
    let (mut all, mut copies) = (0.0, 0.0);
    for (share, symbol) in shares {
        all += share;
        if symbol.starts_with("[k]") && COPIES.iter().any(|name| symbol.contains(name)) {
            copies += share;
        }
    }
    // Without the kernel's symbols there is nothing to see.
    (all > 50.0).then(|| (copies / all, (after.1 - before.1) / (after.0 - before.0)))
}

#[test]
fn what_is_counted_as_copied_is_what_the_cpus_copy() {
    let Some(perf) = find_tool("perf") else { return skip(TEST, SkipReason::Machine("no perf")) };
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let (disk, data) = (folder.path().join("disk"), folder.path().join("perf.data"));
    std::fs::write(&disk, noise(64 << 20, 1)).unwrap();
    let volume = format!("v={}", disk.display());
    let server = Server::start(
        folder.path(),
        2,
        &["--volume", &volume, "--nbd", "tcp://127.0.0.1:0", "--http", "127.0.0.1:0", "--threads", "1"],
    );
    // Does the kernel let us, and name its functions?
    let probe = run(&perf, &["stat", "--event", "cpu-clock", "true"]);
    let symbols = std::fs::read_to_string("/proc/kallsyms").unwrap_or_default();
    let named = symbols.lines().any(|line| line.contains("_copy_from_iter") && !line.starts_with("0000000000000000"));
    if !probe.status.success() || !named {
        return skip(TEST, SkipReason::Machine("perf is not allowed here"));
    }
    let (Some(spliced), Some(copied)) = (measure(&perf, &server, &data, "1M"), measure(&perf, &server, &data, "64K"))
    else {
        return skip(TEST, SkipReason::Machine("perf does not see the kernel here"));
    };
    assert!(spliced.1 < 0.01, "ranges of 1 MiB are spliced, and counted so: {spliced:?}");
    assert!(spliced.0 < 0.05, "and the CPUs do not copy them: {spliced:?}");
    assert!(copied.1 > 0.99, "ranges of 64 KiB are copied into the socket, and counted so: {copied:?}");
    assert!(copied.0 > 0.15, "and the CPUs do: {copied:?}");
}
