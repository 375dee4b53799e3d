//! What the process of a mount copies, as the kernel's profile of its CPUs sees it: nothing of a large read, and a large write once.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use byway_e2e::{Mount, MountRig, SkipReason, find_tool, lacks_mounts, noise, run, run_well, skip_this};

/// Functions of the C library and of byway that copy memory; byway copies memory that others may change in a closure.
const COPIES: [&str; 4] = ["memmove", "memcpy", "bytewise", "call_mut"];

/// The share of a mount's CPU time that its own copies take while `load` runs, apart from those of the kernel.
fn copying(perf: &Path, mount: &Mount, data: &Path, load: impl FnOnce()) -> Option<f64> {
    let mut recorder = Command::new(perf);
    recorder.args([
        "record",
        "--quiet",
        "--event",
        "cpu-clock",
        "--freq",
        "999",
        "--pid",
        &mount.process().to_string(),
    ]);
    // It ends when its standard input does.
    recorder
        .arg("--output")
        .arg(data)
        .args(["--", "cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut recorder = recorder.spawn().ok()?;
    load();
    drop(recorder.stdin.take());
    if !recorder.wait().ok()?.success() {
        return None;
    }
    let report = run_well(perf, &["report", "--stdio", "--sort", "symbol", "--input", data.to_str()?]);
    let (mut all, mut copies) = (0.0, 0.0);
    for line in report.lines() {
        let Some((share, symbol)) = line.trim().split_once('%') else { continue };
        let Ok(share) = share.parse::<f64>() else { continue };
        all += share;
        if symbol.trim().starts_with("[.]") && COPIES.iter().any(|name| symbol.contains(name)) {
            copies += share;
        }
    }
    (all > 50.0).then(|| copies / all)
}

#[test]
fn a_mount_copies_no_byte_of_a_large_read() {
    const LEN: usize = 64 << 20;
    // Enough that the profile has some thousand samples of each: a single one of a small copy is 0.001 at most.
    const ROUNDS: usize = 32;
    let Some(perf) = find_tool("perf") else { return skip_this(SkipReason::MissingTool("perf")) };
    if lacks_mounts() {
        return;
    }
    if !run(&perf, &["stat", "--event", "cpu-clock", "true"]).status.success() {
        return skip_this(SkipReason::Machine("perf is not allowed here"));
    }
    let rig = MountRig::new(",users=squash:0");
    let server = rig.serve();
    let mount = rig.mount("mount", &rig.tcp(&server), &[]);
    let (bytes, data) = (noise(LEN, 1), rig.path("perf.data"));
    let written = copying(&perf, &mount, &data, || {
        (0..ROUNDS).for_each(|_| File::create(mount.path("file")).unwrap().write_all(&bytes).unwrap());
    });
    let mut back = vec![0; LEN];
    let read = copying(&perf, &mount, &data, || {
        (0..ROUNDS).for_each(|_| File::open(mount.path("file")).unwrap().read_exact(&mut back).unwrap());
    });
    assert!(back == bytes);
    let (Some(written), Some(read)) = (written, read) else {
        return skip_this(SkipReason::Machine("perf does not see the mount here"));
    };
    println!("copies of the mount: {written:.3} of its time in writes, {read:.3} in reads");
    assert!(written > 0.01, "a write is copied once: the profile sees copies");
    // A copy of what is read would take at least the share that a write's has, since reads cost less besides.
    assert!(read < written / 2.0, "{read} of the time in reads, {written} in writes");
    mount.unmount();
}
