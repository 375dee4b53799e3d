//! Mounts of this process by FUSE: a folder passed through, and file systems that hold their answers back.

#[path = "../../examples/fuse_passthrough/passthrough.rs"]
mod passthrough;
mod rig;

mod held;
mod random;

use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};
use std::sync::Arc;

use byway_door::fuse::mount::{MountError, unmount};
use byway_door::fuse::session::Wishes;
use passthrough::Passthrough;
use rig::{Mount, lacks_mounts, run, until};

/// What makes this program a server of a mount: the folder and the mountpoint, with a line break between them.
const CHILD: &str = "BYWAY_TEST_FUSE_CHILD";

#[test]
fn a_tree_is_the_same_through_the_mount() {
    let Some(mount) = Mount::passthrough(0) else { return };
    let source = tempfile::tempdir().unwrap();
    for folder in ["a/b/c", "empty", "many"] {
        std::fs::create_dir_all(source.path().join(folder)).unwrap();
    }
    std::fs::write(source.path().join("a/b/large"), vec![7; 5 << 20]).unwrap();
    std::fs::write(source.path().join("a/b/c/\u{fc} name with spaces"), "text").unwrap();
    for number in 0..2000 {
        std::fs::write(source.path().join(format!("many/file-{number}")), number.to_string()).unwrap();
    }
    std::os::unix::fs::symlink("../a/b", source.path().join("a/link")).unwrap();
    std::fs::hard_link(source.path().join("a/b/large"), source.path().join("a/second")).unwrap();
    let (inside, below) = (mount.path().join("copy"), mount.below().join("copy"));
    run("cp", &["-a".into(), source.path().to_owned(), inside.clone()]);
    // Two readers at once: listings and look-ups of one folder go in parallel.
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope
                .spawn(|| run("diff", &["-r".into(), "--no-dereference".into(), source.path().into(), inside.clone()]));
        }
    });
    run("diff", &["-r".into(), "--no-dereference".into(), source.path().into(), below.clone()]);
    // Only now: diff takes no two pipes for equal.
    run("mkfifo", &[source.path().join("a/fifo")]);
    run("cp", &["-a".into(), source.path().join("a/fifo"), inside.join("a/fifo")]);
    let meta =
        |path: std::path::PathBuf| std::fs::symlink_metadata(path).map(|m| (m.mode(), m.mtime_nsec(), m.nlink()));
    for name in ["a/b/large", "a/fifo", "empty", "a/b/c/\u{fc} name with spaces"] {
        assert_eq!(meta(inside.join(name)).unwrap(), meta(source.path().join(name)).unwrap(), "{name}");
    }
    assert_eq!(std::fs::read_link(inside.join("a/link")).unwrap(), std::path::Path::new("../a/b"));
    std::fs::rename(inside.join("a/second"), inside.join("empty/third")).unwrap();
    assert_eq!(std::fs::metadata(below.join("empty/third")).unwrap().len(), 5 << 20);
    std::fs::remove_dir_all(&inside).unwrap();
    assert!(!below.exists());
}

#[test]
fn an_unmount_ends_the_driver_and_its_file_system() {
    let Some(mount) = Mount::passthrough(0) else { return };
    std::fs::write(mount.path().join("file"), "x").unwrap();
    let open = std::fs::File::open(mount.path().join("file")).unwrap();
    let busy = unmount(mount.path(), false).unwrap_err();
    assert!(busy.to_string().contains("files are open there"), "{busy}");
    drop(open);
    // The kernel's RELEASE of the file may still be on its way.
    until("the mount to be idle", || unmount(mount.path(), false).ok());
    let nothing = unmount(mount.path(), false).unwrap_err();
    assert!(matches!(nothing, MountError::Unmount { .. }) && nothing.to_string().contains("nothing is mounted"));
    mount.wait_for_the_end();
}

#[test]
fn a_mount_whose_process_was_killed_is_removed() {
    if lacks_mounts() {
        return;
    }
    let (below, at) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(below.path().join("file"), "x").unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "serves_a_mount_for_another_test"])
        .env(CHILD, format!("{}\n{}", below.path().display(), at.path().display()))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let guard = rig::Unmounted(at.path().to_owned());
    until("the other process's mount", || at.path().join("file").exists().then_some(()));
    child.kill().unwrap();
    child.wait().unwrap();
    let gone = std::fs::read_dir(at.path()).map(drop).unwrap_err();
    assert_eq!(gone.raw_os_error(), Some(rustix::io::Errno::NOTCONN.raw_os_error()), "it does not hang");
    unmount(at.path(), true).unwrap();
    assert!(!at.path().join("file").exists() && std::fs::read_dir(at.path()).unwrap().next().is_none());
    drop(guard);
}

/// No test by itself: the process that the test above kills.
#[test]
fn serves_a_mount_for_another_test() {
    let Ok(folders) = std::env::var(CHILD) else { return };
    let (below, at) = folders.split_once('\n').unwrap();
    let files = Arc::new(Passthrough::new(std::path::Path::new(below)).unwrap());
    rig::start(std::path::Path::new(at), files, Wishes::default()).wait();
}
