//! `byway demo`: it works without any set-up, and leaves nothing behind.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use byway_e2e::{LIMIT, backends, binary, noise, until};

/// `byway demo` with its temporary files in `folder`.
fn demo(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(binary());
    command.arg("demo").args(arguments).env("TMPDIR", folder);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).unwrap().next().is_none()
}

const PATHS: [&str; 5] = [
    "the file itself",
    "NBD, TCP",
    "NBD, unix socket",
    "byway's own protocol, TCP",
    "byway's own protocol, shared memory",
];

/// Processes with `folder` in their arguments.
fn processes_of(folder: &Path) -> Vec<u32> {
    let folder = folder.as_os_str().as_encoded_bytes();
    let names =
        std::fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let arguments = |id: &u32| std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
    names.filter(|id| arguments(id).windows(folder.len()).any(|part| part == folder)).collect()
}

#[test]
fn the_demo_needs_nothing_shows_every_wire_and_cleans_up() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    for io in backends() {
        let output = demo(folder.path(), &["--size", "24M", "--io", io]).output().expect("byway starts");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        for path in PATHS {
            let row = said.lines().find(|line| line.starts_with(path)).unwrap_or_else(|| panic!("{path} in {said}"));
            let figures: Vec<f64> =
                row[36..].split_whitespace().map(|figure| figure.parse().expect("a figure")).collect();
            assert!(figures.len() == 3 && figures.iter().all(|figure| *figure > 0.0), "{row}");
        }
        for words in ["24.0 MiB each time", "the checksums are the same", "interleaved rounds", "bench volume"] {
            assert!(said.contains(words), "{words}: {said}");
        }
        // The last step: a node is killed, and the copy goes on.
        let (_, killed) = said.split_once("killed (SIGKILL)").unwrap_or_else(|| panic!("{said}"));
        for words in ["started again", "went on by itself after ", " ms, and its checksum is the same"] {
            assert!(killed.contains(words), "{words}: {said}");
        }
        let mounted = ["the shared folder has the same bytes", "The mount of a shared folder was left out"];
        assert!(mounted.iter().any(|words| said.contains(words)), "{said}");
        assert!(
            said.contains("each page had its bytes") || said.contains("Memory lent by another node was left out"),
            "{said}"
        );
        assert!(
            said.contains("2 processes that share memory relaxed") && said.contains("with the same result")
                || said.contains("Memory shared by processes was left out"),
            "{said}"
        );
        assert!(is_empty(folder.path()), "{io}: it must clean up");
        assert!(processes_of(folder.path()).is_empty(), "{io}: its node must end");
    }
}

#[test]
fn the_demo_shares_a_file_without_touching_it() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let file = folder.path().join("mine");
    let bytes = noise((8 << 20) + 512, 4);
    std::fs::write(&file, &bytes).unwrap();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o444)).unwrap();
    let temporary = folder.path().join("temporary");
    std::fs::create_dir(&temporary).unwrap();
    let output = demo(&temporary, &[&file.display().to_string(), "--json"]).output().expect("byway starts");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let shown: serde_json::Value = serde_json::from_str(&said).unwrap();
    let (rows, restart) = (shown["rows"].as_array().unwrap(), &shown["restart"]);
    assert_eq!(rows.len(), PATHS.len(), "{said}");
    for row in rows {
        assert!(row["bytes"] == bytes.len() && row["crc32c"] == restart["crc32c"], "{said}");
    }
    // The node was killed while there was more to be copied, and the copy got that from its successor.
    assert!(restart["crc32c"].is_string() && restart["interrupted_seconds"].as_f64() > Some(0.0), "{said}");
    assert!(std::fs::read(&file).unwrap() == bytes && is_empty(&temporary));

    for (wrong, words) in [("not-there", "not-there: "), (".", ".: ")] {
        let output = demo(&temporary, &[wrong]).output().expect("byway starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("demo:") && said.contains(words), "{said}");
        assert!(is_empty(&temporary));
    }
}

#[test]
fn the_demo_says_of_a_file_that_it_is_written_to() {
    use std::os::unix::fs::FileExt;
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let (path, temporary) = (folder.path().join("mine"), folder.path().join("temporary"));
    std::fs::create_dir(&temporary).unwrap();
    std::fs::write(&path, noise(8 << 20, 5)).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let running = std::sync::atomic::AtomicBool::new(true);
    let output = std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0u64.. {
                file.write_all_at(&number.to_le_bytes(), number * 4096 % (8 << 20)).unwrap();
                if !running.load(std::sync::atomic::Ordering::Relaxed) {
                    return;
                }
            }
        });
        let output = demo(&temporary, &[&path.display().to_string()]).output();
        running.store(false, std::sync::atomic::Ordering::Relaxed);
        output.expect("byway starts")
    });
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("mine was written to while it was copied"), "{said}");
    assert!(is_empty(&temporary));
}

/// Ends the child with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn an_interrupted_demo_cleans_up() {
    use rustix::process::{Pid, Signal, kill_process};
    for signal in [Signal::INT, Signal::TERM] {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let mut running = Running(demo(folder.path(), &["--size", "512M"]).spawn().expect("byway starts"));
        until(Instant::now() + LIMIT, "its folder", || (!is_empty(folder.path())).then_some(()));
        kill_process(Pid::from_child(&running.0), signal).expect("it lives");
        let status = until(Instant::now() + LIMIT, "its end", || running.0.try_wait().ok().flatten());
        assert_eq!(status.code(), Some(130));
        assert!(is_empty(folder.path()), "it must clean up");
    }
}

#[test]
fn a_demo_that_ends_while_its_node_runs_takes_it_along() {
    use rustix::process::{Pid, Signal, kill_process};
    for signal in [Signal::INT, Signal::KILL] {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let begin = || Running(demo(folder.path(), &["--size", "128M"]).spawn().expect("byway starts"));
        let other = |demo: u32| processes_of(folder.path()).into_iter().find(|id| *id != demo);
        let mut running = begin();
        until(Instant::now() + LIMIT, "its second node", || {
            // It has ended before that was seen.
            if running.0.try_wait().unwrap().is_some() {
                running = begin();
            }
            other(running.0.id()).map(drop)
        });
        kill_process(Pid::from_child(&running.0), signal).expect("it lives");
        until(Instant::now() + LIMIT, "its end", || running.0.try_wait().ok().flatten());
        until(Instant::now() + LIMIT, "its node's end", || other(running.0.id()).is_none().then_some(()));
        assert!(signal == Signal::KILL || is_empty(folder.path()), "it must clean up");
    }
}
