//! Mounts of this process by FUSE: a folder passed through, and file systems that hold their answers back.

#[path = "../../examples/fuse_passthrough/passthrough.rs"]
mod passthrough;
mod rig;

mod random;
mod stalled;

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;

use byway_frontend::fuse::Driver;
use byway_frontend::fuse::mount::{MountError, MountOptions, mount, unmount};
use byway_frontend::fuse::session::Wishes;
use passthrough::Passthrough;
use rig::{Mount, lacks_mounts, run, until};

/// The user without rights.
const NOBODY: u32 = 65534;
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

#[test]
fn a_user_without_root_mounts_by_fusermount3() {
    if lacks_mounts() {
        return;
    }
    for tool in ["fusermount3", "unshare", "setpriv"] {
        if !std::path::Path::new("/usr/bin").join(tool).is_file() {
            return byway_skip::skip_this(byway_skip::SkipReason::MissingTool(tool));
        }
    }
    let place = tempfile::tempdir().unwrap();
    let open_to_all = |path: &std::path::Path| std::fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
    open_to_all(place.path());
    // The user may not reach the folder that this program lies in.
    let program = place.path().join("program");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let (below, at) = (place.path().join("below"), place.path().join("at, with a comma"));
    for folder in [&below, &at] {
        std::fs::create_dir(folder).unwrap();
        std::os::unix::fs::chown(folder, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    // In a mount namespace of its own, where everybody may open /dev/fuse: udev has it so, containers may not.
    let script = r#"mknod fuse c 10 229 && chmod 666 fuse && mount --bind fuse /dev/fuse &&
        exec setpriv --reuid=65534 --regid=65534 --clear-groups ./program --exact "$1" --nocapture"#;
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", script, "sh", "mounts_without_root_for_another_test"])
        .env(CHILD, format!("{}\n{}", below.display(), at.display()))
        .current_dir(place.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{said}");
    assert_eq!(std::fs::read_to_string(below.join("file")).unwrap(), "through the mount", "{said}");
}

/// No test by itself: the process of the test above. It mounts, writes and unmounts.
#[test]
fn mounts_without_root_for_another_test() {
    let Some((below, at)) = folders().filter(|_| !rustix::process::geteuid().is_root()) else { return };
    let files = Arc::new(Passthrough::new(&below).unwrap().with_open_flags(byway_frontend::fuse::abi::open::NO_FLUSH));
    let options = MountOptions { source: "byway-test,nobody".into(), ..MountOptions::default() };
    let driver = Driver::start(mount(&options, &at).unwrap(), files, Wishes::default(), 2).unwrap();
    let table = std::fs::read_to_string("/proc/mounts").unwrap();
    let line = table.lines().find(|line| line.starts_with("byway-test,nobody ")).unwrap();
    assert!(line.contains("fuse.byway") && line.contains("nosuid,nodev"), "{line}");
    std::fs::write(at.join("file"), "through the mount").unwrap();
    until("the mount to be idle", || unmount(&at, false).ok());
    assert!(unmount(&at, false).is_err(), "nothing is there any more");
    driver.wait();
}

/// No test by itself: the process that a test above kills.
#[test]
fn serves_a_mount_for_another_test() {
    let Some((below, at)) = folders() else { return };
    rig::start(&at, Arc::new(Passthrough::new(&below).unwrap()), Wishes::default()).wait();
}

/// What [`CHILD`] says.
fn folders() -> Option<(PathBuf, PathBuf)> {
    let folders = std::env::var(CHILD).ok()?;
    let (below, at) = folders.split_once('\n')?;
    Some((below.into(), at.into()))
}
