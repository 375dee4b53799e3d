//! Failures of a store as an operator sees them, and the operator's remedies.

use std::path::Path;

use byway_e2e::{Rig, Script, SkipReason, libnbd_python, run_well, skip};

/// Libnbd's Python, or a skip said aloud.
macro_rules! python {
    ($test:expr) => {
        match libnbd_python() {
            Some(python) => python,
            None => return skip($test, SkipReason::MissingTool("python3-libnbd")),
        }
    };
}

fn said(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn a_failed_flush_is_seen_everywhere_until_the_volume_is_reopened() {
    let python = python!("a_failed_flush_is_seen_everywhere_until_the_volume_is_reopened");
    let rig = Rig::new("\"m=mem:1M\"", &["--listen", "tcp://127.0.0.1:0"]);
    let disk = rig.file("disk", 1 << 20);
    // Two flushes fail; a third would work, if the volume did not remember.
    rig.configure(&format!("\"m=mem:1M\", \"disk=fault:flush=eio#2:{disk}\""));
    rig.reload();
    let healthy = |rig: &Rig| {
        let (health, metrics) = (rig.get("/healthz"), rig.get("/metrics"));
        let status = said(&rig.ctl(&["status"]));
        let seen = [
            health.starts_with("HTTP/1.1 503") && health.contains("byway ctl reopen disk"),
            metrics.contains("byway_volume_flush_failed{volume=\"disk\"} 1\n"),
            status.contains("volume disk: a flush failed") && status.contains("byway ctl reopen disk"),
        ];
        assert!(seen == [true; 3] || seen == [false; 3], "{seen:?}\n{health}\n{metrics}\n{status}");
        assert_eq!(health.starts_with("HTTP/1.1 200"), !seen[0], "{health}");
        !seen[0]
    };
    assert!(healthy(&rig));
    let mut client = Script::start(
        &python,
        &rig.script(
            "disk = connect('disk')\n\
             disk.pwrite(b'a' * 512, 0)\n\
             for i in range(3): assert fails(disk.flush) == 'EIO'\n\
             print('failed', flush=True); input()\n\
             assert fails(disk.flush), 'the connection has ended'\n\
             again = connect('disk')\n\
             assert fails(again.flush) == 'EIO', 'the second fault: reopening mends no disk'\n\
             print('again', flush=True); input()\n\
             last = connect('disk')\n\
             last.pwrite(b'b' * 512, 512); last.flush()\n\
             assert last.pread(512, 0) == b'a' * 512\n",
        ),
    );
    for step in ["failed", "again"] {
        client.expect(step);
        assert!(!healthy(&rig));
        assert_eq!(said(&rig.ctl(&["reopen", "disk"])), "reopened: disk\n");
        assert!(healthy(&rig));
        client.go_on();
    }
    client.ends_well();
    assert!(healthy(&rig));
    let log = rig.server.log();
    assert_eq!(log.matches("a flush failed").count(), 2, "once for each time that it was opened:\n{log}");
    for (volume, reason) in [("m", "is in memory"), ("nosuch", "no volume is named `nosuch`")] {
        let refused = rig.ctl(&["reopen", volume]);
        assert!(!refused.status.success() && said(&refused).contains(reason), "{}", said(&refused));
    }
}

/// A small file system in memory that goes away with it.
struct Mounted<'a>(&'a Path);

impl<'a> Mounted<'a> {
    fn new(at: &'a Path, bytes: u64) -> Self {
        std::fs::create_dir(at).unwrap();
        let size = format!("size={bytes}");
        run_well(Path::new("/usr/bin/mount"), &["-t", "tmpfs", "-o", &size, "tmpfs", &at.display().to_string()]);
        Self(at)
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = std::process::Command::new("/usr/bin/umount").arg("--lazy").arg(self.0).status();
    }
}

#[test]
fn a_full_store_is_told_with_volume_offset_and_errno_at_a_limited_rate() {
    let test = "a_full_store_is_told_with_volume_offset_and_errno_at_a_limited_rate";
    let python = python!(test);
    if !rustix::process::geteuid().is_root() {
        return skip(test, SkipReason::Machine("not root"));
    }
    let rig = Rig::new("\"m=mem:1M\"", &[]);
    let full = rig.path("full");
    let mounted = Mounted::new(&full, 1 << 20);
    let disk = rig.file("full/disk", 8 << 20);
    rig.configure(&format!("\"m=mem:1M\", \"disk={disk}\""));
    rig.reload();
    let script = rig.script(
        "disk = connect('disk')\n\
         for i in range(256): disk.pwrite(b'x' * 4096, i << 12)\n\
         for i in range(300, 390): assert fails(lambda: disk.pwrite(b'x' * 4096, i << 12)) == 'ENOSPC', i\n\
         disk.set_strict_mode(0)\n\
         assert fails(lambda: disk.pwrite(b'x' * 4096, 8 << 20)) == 'ENOSPC', 'past the end'\n",
    );
    run_well(&python, &["-c", &script]);
    let log = rig.server.log();
    let lines: Vec<_> = log.lines().filter(|line| line.contains("the store failed")).collect();
    assert!(!lines.is_empty() && lines.len() < 45, "{log}");
    for word in ["disk", "write", "1228800", "4096", "No space left on device"] {
        assert!(lines[0].contains(word), "{word}: {}", lines[0]);
    }
    let status = said(&rig.ctl(&["status"]));
    assert!(status.contains("90 store errors, 1 bad requests"), "{status}");
    assert!(status.contains("write of 4096 bytes at 1593344: No space left on device"), "{status}");
    let metrics = rig.get("/metrics");
    for line in [
        "byway_volume_store_errors_total{volume=\"disk\"} 90\n",
        "byway_volume_bad_requests_total{volume=\"disk\"} 1\n",
        "byway_volume_flush_failed{volume=\"disk\"} 0\n",
    ] {
        assert!(metrics.contains(line), "{line}{metrics}");
    }
    drop(rig);
    drop(mounted);
}
