//! The built program: messages, exit codes, and a copy that is killed.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use assert_cmd::cargo::cargo_bin;

fn byway(arguments: &[&str]) -> Output {
    Command::new(cargo_bin!("byway")).args(arguments).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_bad_command_line_is_exit_code_2() {
    for bad in [&["frobnicate"][..], &["copy", "one"], &["copy", "a", "b", "--chunk", "3K"], &[]] {
        assert_eq!(byway(bad).status.code(), Some(2), "{bad:?}");
    }
    for (stray, remedy) in [
        ("disk.img", "write --volume disk=disk.img"),
        ("/srv/a b.img", "write --volume disk=/srv/a b.img"),
        ("mem:1G", "write --volume disk=mem:1G"),
        ("d=/srv/disk.img", "write --volume d=/srv/disk.img"),
    ] {
        let refused = byway(&["serve", stray, "--nbd", "tcp://127.0.0.1:0"]);
        assert_eq!(refused.status.code(), Some(2));
        assert!(stderr(&refused).contains(remedy), "{}", stderr(&refused));
    }
    let chunk = stderr(&byway(&["copy", "a", "b", "--chunk", "3K"]));
    assert!(chunk.contains("power of two from 4K to 1M"), "{chunk}");
}

#[test]
fn completions_and_man_pages_are_written() {
    let completions = byway(&["completions", "bash"]);
    assert!(completions.status.success());
    assert!(String::from_utf8(completions.stdout).unwrap().contains("byway"));
    let folder = tempfile::tempdir().unwrap();
    let man = folder.path().join("man1");
    assert!(byway(&["man", text(&man)]).status.success());
    for (page, flags) in [
        ("copy", &["--verify"][..]),
        ("mount", &["--background", "--wait", "allow_other", "default_permissions"]),
        ("umount", &["--lazy"]),
        ("attach", &["--as", "--via", "--read-only", "--foreground", "--list"]),
        ("detach", &["DEVICE"]),
        ("run", &["--map", "--report"]),
    ] {
        // troff writes hyphens with a backslash.
        let text = std::fs::read_to_string(man.join(format!("byway-{page}.1"))).unwrap().replace('\\', "");
        assert!(text.contains(&format!(".TH byway-{page}")), "{page}: {text}");
        let missing: Vec<_> = flags.iter().filter(|flag| !text.contains(*flag)).collect();
        assert!(missing.is_empty(), "{page}: {missing:?}\n{text}");
    }
    let failed = byway(&["man", "/proc/nowhere"]);
    assert_eq!(failed.status.code(), Some(1));
    assert!(stderr(&failed).contains("name a folder"), "{}", stderr(&failed));
}

#[test]
fn doctor_lists_findings_as_json() {
    let output = byway(&["doctor", "--json"]);
    assert!(output.status.success());
    let findings: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let findings = findings.as_array().unwrap();
    assert!(findings.iter().any(|finding| finding["name"] == "io_uring"));
    assert!(findings.iter().all(|finding| finding["health"] == "ok" || finding["remedy"].is_string()));
}

#[test]
fn a_stage_that_cannot_be_is_refused_with_what_is_missing() {
    // A file in memory lies on no disk, whatever disks there are.
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else {
        return byway_skip::skip_this(byway_skip::SkipReason::Machine("no /dev/shm"));
    };
    let file = folder.path().join("volume");
    std::fs::write(&file, [1; 8192]).unwrap();
    if byway_reactor::OpenFile::open(&file, byway_reactor::FileOptions { direct: true, ..Default::default() }).is_err()
    {
        return byway_skip::skip_this(byway_skip::SkipReason::Machine("no O_DIRECT in memory (Linux 6.6)"));
    }
    let volume = format!("v={},direct", text(&file));
    let socket = format!("unix://{}", text(&folder.path().join("nbd")));
    for arguments in
        [["--volume", &volume, "--stage=device"], ["--volume", &format!("{volume},stage=device"), "--insecure"]]
    {
        let output = byway(&[&["serve", "--nbd", &socket], &arguments[..]].concat());
        assert_eq!(output.status.code(), Some(1));
        let said = stderr(&output);
        assert!(said.contains("volume `v`: stage=device") && said.contains("lies on no single disk"), "{said}");
    }
}

#[test]
fn copy_says_what_is_wrong_and_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("from"), folder.path().join("to"));
    std::fs::write(&from, "new").unwrap();
    std::fs::write(&to, "old").unwrap();
    let cases = [
        (vec!["/nonexistent/x", text(&to)], "/nonexistent/x: No such file"),
        (vec![text(&from), text(&to)], "add --overwrite"),
        (vec![text(&from), text(&from), "--overwrite"], "both source and destination"),
        (vec![text(&from), "/nonexistent/y"], "/nonexistent: cannot create a file there: No such file or directory"),
    ];
    let bare = (vec!["scratch-of-no-file", text(&to)], "or a volume: byway://HOST/scratch-of-no-file");
    for (arguments, part) in cases.into_iter().chain([bare]) {
        let output = byway(&[&["copy"], &arguments[..]].concat());
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(stderr(&output).contains(part), "{}", stderr(&output));
    }
    assert_eq!(std::fs::read(&to).unwrap(), b"old");
    assert!(byway(&["copy", text(&from), text(&to), "--overwrite"]).status.success());
    assert_eq!(std::fs::read(&to).unwrap(), b"new");
}

#[test]
fn metrics_are_taken_as_serve_prints_them() {
    let bench = |metrics: &str| byway(&["bench", "volume", "byway://127.0.0.1:1/x", "--metrics", metrics]);
    assert_eq!(bench("http://127.0.0.1:1").status.code(), Some(1), "read, and nothing listens there");
    let refused = stderr(&bench("localhost"));
    assert!(refused.contains("write ADDRESS:PORT"), "{refused}");
}

/// A confined node can load no library: it has loaded them before.
#[test]
fn a_node_says_of_rdma_what_a_client_says() {
    if Path::new("/dev/infiniband").exists() {
        byway_skip::skip("a_node_says_of_rdma_what_a_client_says", byway_skip::SkipReason::Machine("it has RDMA"));
        return;
    }
    let missing = |output: &Output| stderr(output).contains("does not load");
    let client = byway(&["ls", "byway+rdma://127.0.0.1"]);
    let node = byway(&["serve", "--volume", "m=mem:1M", "--listen", "rdma://127.0.0.1"]);
    assert!(!client.status.success() && !node.status.success());
    assert_eq!(missing(&client), missing(&node), "{}{}", stderr(&client), stderr(&node));
}

/// A copy is killed after its first checkpoint; the same command goes on and the bytes are right.
#[test]
fn a_killed_copy_goes_on() {
    const BYTES: u64 = 1 << 30;
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("from"), folder.path().join("to"));
    let log = folder.path().join("to.byway-resume");
    let file = std::fs::File::create(&from).unwrap();
    let mut block = vec![0u8; 1 << 20];
    for at in (0..BYTES).step_by(block.len()) {
        block.fill((at >> 20) as u8 | 1);
        block[..8].copy_from_slice(&at.to_le_bytes());
        file.write_all_at(&block, at).unwrap();
    }
    let arguments = ["copy", text(&from), text(&to), "--verify", "--json"];
    let mut first =
        Command::new(cargo_bin!("byway")).args(arguments).stdout(std::process::Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_mins(1);
    let recorded = || std::fs::read_to_string(&log).is_ok_and(|text| text.contains("\ndata "));
    while !recorded() && first.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline, "no checkpoint");
        std::thread::yield_now();
    }
    first.kill().unwrap();
    first.wait().unwrap();
    assert!(log.exists(), "the first copy ended before it could be killed; make BYTES larger");

    let second = byway(&arguments);
    assert!(second.status.success(), "{}", stderr(&second));
    let report: serde_json::Value = serde_json::from_slice(&second.stdout).unwrap();
    let resumed = report["copied"]["resumed_bytes"].as_u64().unwrap();
    assert!(resumed > 0, "{report}");
    assert_eq!(resumed + report["copied"]["moved_bytes"].as_u64().unwrap(), BYTES);
    assert_eq!(report["copied"]["verified"], true);
    let same = Command::new("cmp").args([&from, &to]).status().unwrap();
    assert!(same.success() && !log.exists());
}
