//! What a mount's process tells operators: counters of its programs' calls, its client and its server.

use std::time::Instant;

use byway_e2e::{LIMIT, Mount, MountRig, binary, lacks_mounts, run_well, until};
use serde_json::Value;

fn status_of(mount: &Mount) -> Value {
    serde_json::from_str(&run_well(&binary(), &["ctl", "mount", &mount.at.display().to_string(), "--json"])).unwrap()
}

/// Metrics of one mount, as lines without its label.
struct Metrics(Vec<String>);

impl Metrics {
    fn of(mount: &Mount) -> Self {
        let label = format!("mount=\"{}\"", mount.at.display());
        let text = run_well(&binary(), &["ctl", "metrics"]);
        let ours = text.lines().filter(|line| line.contains(&label));
        Self(ours.map(|line| line.replace(&format!("{label},"), "").replace(&format!("{{{label}}}"), "")).collect())
    }

    /// The text of a series' value, such as that of `byway_mount_calls_total{kind="read"}`.
    fn text(&self, series: &str) -> &str {
        let value = self.0.iter().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("no {series} in {:?}", self.0))
    }

    fn value(&self, series: &str) -> u64 {
        self.text(series).parse().unwrap()
    }
}

#[test]
fn counters_rise_with_what_programs_do_and_belong_to_their_mount() {
    if lacks_mounts() {
        return;
    }
    let rig = MountRig::new(",users=squash:0,writers=exclusive");
    let server = rig.serve();
    let (one, two) = (rig.mount("one", &rig.unix(), &[]), rig.mount("two", &rig.tcp(&server), &[]));
    let before = Metrics::of(&one);
    assert_eq!(before.value("byway_mount_written_bytes_total"), 0);
    std::fs::write(one.path("file"), vec![7; 300_000]).unwrap();
    assert_eq!(std::fs::read(one.path("file")).unwrap().len(), 300_000);
    assert!(std::fs::metadata(one.path("other")).is_err());

    let after = Metrics::of(&one);
    assert_eq!(after.value("byway_mount_written_bytes_total"), 300_000);
    assert_eq!(after.value("byway_mount_read_bytes_total"), 300_000);
    for kind in ["look_up", "open", "read", "write"] {
        assert!(after.value(&format!("byway_mount_calls_total{{kind=\"{kind}\"}}")) >= 1, "{kind}");
    }
    assert!(after.value("byway_mount_messages_total") > before.value("byway_mount_messages_total"));
    assert!(after.value("byway_mount_leases") >= 1 && after.value("byway_mount_connected") == 1);
    assert_eq!(status_of(&one)["unsynced_files"].as_u64(), Some(2), "the file, and its name in the folder");
    // A call is timed when the kernel has its answer.
    until(Instant::now() + LIMIT, "the time of each call", || {
        let now = Metrics::of(&one);
        let of_writes = |series: &str| now.value(&format!("byway_mount_{series}"));
        let all = of_writes("calls_total{kind=\"write\"}");
        let is_timed = of_writes("call_seconds_count{kind=\"write\"}") == all
            && of_writes("call_seconds_bucket{kind=\"write\",le=\"+Inf\"}") == all
            && now.text("byway_mount_call_seconds_sum{kind=\"write\"}") != "0";
        is_timed.then_some(())
    });
    std::fs::File::open(one.path("file")).unwrap().sync_all().unwrap();
    std::fs::File::open(&one.at).unwrap().sync_all().unwrap();
    assert_eq!(status_of(&one)["unsynced_files"].as_u64(), Some(0));

    let other = Metrics::of(&two);
    for series in ["written_bytes_total", "read_bytes_total", "calls_total{kind=\"write\"}", "unsynced_files"] {
        assert_eq!(other.value(&format!("byway_mount_{series}")), 0, "{series} of the mount that did nothing");
    }
    let recalls = || Metrics::of(&one).value("byway_mount_recalls_total");
    let recalled = recalls();
    std::fs::write(two.path("file"), "changed").unwrap();
    assert_eq!(std::fs::read(one.path("file")).unwrap(), b"changed");
    assert!(recalls() > recalled, "the other mount's change waited for the lease");
    let text = run_well(&binary(), &["ctl", "mount", &one.at.display().to_string()]);
    assert!(text.contains("time of writes: 50 % at most") && text.contains("errors: none"), "{text}");
    one.unmount();
    two.unmount();
}

#[test]
fn errors_and_reconnects_are_counted() {
    if lacks_mounts() {
        return;
    }
    let rig = MountRig::new(",users=squash:0");
    let mut server = rig.serve();
    let mount = rig.mount("mount", &rig.unix(), &["--wait", "0"]);
    std::fs::write(rig.below().join("file"), "contents").unwrap();
    assert!(mount.path("file").exists());
    assert_eq!(Metrics::of(&mount).value("byway_mount_errors_total{error=\"EIO\"}"), 0);
    server.kill();
    let failed = std::fs::metadata(mount.path("file")).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
    until(Instant::now() + LIMIT, "the error's count", || {
        let now = Metrics::of(&mount);
        let is_counted = now.value("byway_mount_errors_total{error=\"EIO\"}") >= 1;
        (is_counted && now.value("byway_mount_connected") == 0).then_some(())
    });
    let server = rig.serve();
    until(Instant::now() + LIMIT, "the server", || std::fs::read(mount.path("file")).ok());
    let now = Metrics::of(&mount);
    assert_eq!((now.value("byway_mount_connected"), now.value("byway_mount_reconnects_total")), (1, 1));
    mount.unmount();
    drop(server);
}
