//! What the process of a mount copies, as the kernel's profile of its CPUs sees it: nothing of a large read, and a large write once.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use byway_e2e::{Mount, MountRig, SkipReason, find_tool, lacks_mounts, noise, run, run_well, skip_this};

/// Functions of the C library and of byway that copy memory; byway copies memory that others may change in a closure.
const COPIES: [&str; 4] = ["memmove", "memcpy", "bytewise", "call_mut"];

/// Samples of a mount's CPU time in its own copies while `load` runs, apart from those of the kernel.
fn copying(perf: &Path, mount: &Mount, data: &Path, load: impl FnOnce()) -> Option<u64> {
    let mut recorder = Command::new(perf);
    recorder.args([
        "record",
        "--quiet",
        "--event",
        "cpu-clock",
        "--freq",
        "4999",
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
    let report =
        run_well(perf, &["report", "--stdio", "--sort", "symbol", "--show-nr-samples", "--input", data.to_str()?]);
    let mut copies = 0;
    for line in report.lines() {
        // The share, the number of samples, and where: `[.]` outside of the kernel.
        let Some((_, line)) = line.trim().split_once('%') else { continue };
        let Some((samples, symbol)) = line.trim().split_once(' ') else { continue };
        let Ok(samples) = samples.parse::<u64>() else { continue };
        if symbol.trim().starts_with("[.]") && COPIES.iter().any(|name| symbol.contains(name)) {
            copies += samples;
        }
    }
    Some(copies)
}

#[test]
fn a_mount_copies_no_byte_of_a_large_read() {
    const LEN: usize = 64 << 20;
    // The copies of 2 GiB take 40 ms at least, which are 200 samples.
    const ROUNDS: usize = 32;
    const SAMPLES_MIN: u64 = 50;
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
        return skip_this(SkipReason::Machine("perf records nothing of the mount here"));
    };
    println!("samples in copies of the mount: {written} in writes, {read} in reads");
    // A write is copied once. A profile that does not see it says nothing of reads.
    if written < SAMPLES_MIN {
        return skip_this(SkipReason::Machine("perf does not see the copies of a mount here"));
    }
    assert!(read < written / 2, "{read} samples in copies of what was read, {written} of as much that was written");
    mount.unmount();
}
