//! A file system on a volume, by way of nbdfuse and a loop device: made, filled, checked, and read from the store itself.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use byway_e2e::{LIMIT, Server, SkipReason, find_tool, noise, run, run_well, skip, until};

const TEST: &str = "ext4_lives_on_a_volume";

/// What was set up, taken down in reverse, also when the test fails.
#[derive(Default)]
struct Stack {
    fuse: Option<(Child, PathBuf)>,
    device: Option<String>,
    mounted: Option<PathBuf>,
}

impl Stack {
    fn unmount(&mut self) {
        if let Some(at) = self.mounted.take() {
            run_well(&find_tool("umount").unwrap(), &[at.to_str().unwrap()]);
        }
    }

    fn detach(&mut self) {
        if let Some(device) = self.device.take() {
            run_well(&find_tool("losetup").unwrap(), &["--detach", &device]);
        }
    }

    /// Ends nbdfuse in good order: it flushes then.
    fn end_fuse(&mut self) {
        let Some((mut child, at)) = self.fuse.take() else { return };
        let umount = find_tool("umount").unwrap();
        // The loop device lets go of the file a moment after it is detached.
        until(Instant::now() + LIMIT, "nbdfuse's file to be free", || {
            run(&umount, &[at.to_str().unwrap()]).status.success().then_some(())
        });
        let status = until(Instant::now() + LIMIT, "nbdfuse to end", || child.try_wait().ok().flatten());
        assert!(status.success(), "nbdfuse: {status}");
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        let quietly = |program: &str, arguments: &[&str]| {
            let _ = Command::new(program).args(arguments).stderr(Stdio::null()).status();
        };
        if let Some(at) = self.mounted.take() {
            quietly("umount", &["-l", at.to_str().unwrap()]);
        }
        if let Some(device) = self.device.take() {
            quietly("losetup", &["--detach", &device]);
        }
        if let Some((mut child, at)) = self.fuse.take() {
            quietly("umount", &["-l", at.to_str().unwrap()]);
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn ext4_lives_on_a_volume() {
    for tool in ["nbdfuse", "mkfs.ext4", "fsck.ext4", "losetup", "mount", "umount"] {
        if find_tool(tool).is_none() {
            return skip(TEST, SkipReason::MissingTool(tool));
        }
    }
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        return skip(TEST, SkipReason::Machine("needs root and /dev/fuse"));
    }
    let tool = |name| find_tool(name).unwrap();
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let path = |name: &str| folder.path().join(name);
    let text = |name: &str| path(name).display().to_string();
    std::fs::File::create(path("disk")).unwrap().set_len(256 << 20).unwrap();
    let mut server = Server::start(
        folder.path(),
        1,
        &["--volume", &format!("disk={}", text("disk")), "--nbd", &format!("unix://{}", text("sock"))],
    );
    for name in ["fuse", "fs"] {
        std::fs::create_dir(path(name)).unwrap();
    }
    let mut stack = Stack::default();
    let uri = format!("nbd+unix:///disk?socket={}", text("sock"));
    let fuse = Command::new(tool("nbdfuse")).args([&text("fuse/image"), &uri]).spawn().unwrap();
    stack.fuse = Some((fuse, path("fuse")));
    until(Instant::now() + LIMIT, "nbdfuse's file", || path("fuse/image").is_file().then_some(()));

    let device = run(&tool("losetup"), &["--find", "--show", &text("fuse/image")]);
    if !device.status.success() {
        return skip(TEST, SkipReason::Machine("no loop device can be had"));
    }
    let device = String::from_utf8(device.stdout).unwrap().trim().to_owned();
    stack.device = Some(device.clone());
    run_well(&tool("mkfs.ext4"), &["-q", &device]);
    run_well(&tool("mount"), &[&device, &text("fs")]);
    stack.mounted = Some(path("fs"));
    let files: Vec<_> = (0..40u64).map(|n| (format!("fs/{n}"), noise(1 + (n as usize * 77_777), n))).collect();
    for (name, bytes) in &files {
        std::fs::write(path(name), bytes).unwrap();
    }
    for (name, _) in files.iter().step_by(3) {
        std::fs::remove_file(path(name)).unwrap();
    }
    stack.unmount();
    run_well(&tool("fsck.ext4"), &["-f", "-n", &device]);
    run_well(&tool("mount"), &[&device, &text("fs")]);
    stack.mounted = Some(path("fs"));
    for (index, (name, bytes)) in files.iter().enumerate() {
        assert_eq!(std::fs::read(path(name)).ok().as_ref(), (index % 3 != 0).then_some(bytes), "{name}");
    }
    stack.unmount();
    stack.detach();
    stack.end_fuse();
    assert_eq!(server.terminate(), Some(0));
    // What the store holds, without anything of ours in between.
    run_well(&tool("fsck.ext4"), &["-f", "-n", &text("disk")]);
}
