//! A share with subvolumes, in which files have the same inode numbers and times of birth.

mod file_server;

use std::path::{Path, PathBuf};
use std::process::Command;

use byway_service::file::Users;
use byway_service::file::client::{Caller, Client, ClientOptions, ROOT};
use byway_skip::SkipReason;
use file_server::{Server, share, tcp};
use rustix::fs::OFlags;

const ME: Caller<'static> = Caller { uid: 0, gid: 0, groups: &[] };

fn run(program: &str, arguments: &[&str]) -> bool {
    Command::new(program).args(arguments).output().is_ok_and(|output| output.status.success())
}

/// A file system with subvolumes, mounted until this is dropped.
struct Btrfs(PathBuf);

impl Btrfs {
    fn mount(folder: &Path) -> Option<Self> {
        let (image, at) = (folder.join("image"), folder.join("mount"));
        std::fs::File::create(&image).unwrap().set_len(128 << 20).unwrap();
        std::fs::create_dir(&at).unwrap();
        let is_made = run("mkfs.btrfs", &["-q", image.to_str()?]);
        (is_made && run("mount", &["-o", "loop", image.to_str()?, at.to_str()?])).then_some(Self(at))
    }
}

impl Drop for Btrfs {
    fn drop(&mut self) {
        run("umount", &["-l", self.0.to_str().unwrap()]);
    }
}

#[test]
fn a_file_and_its_snapshot_are_two() {
    let folder = tempfile::tempdir().unwrap();
    let Some(disk) = Btrfs::mount(folder.path()) else {
        return byway_skip::skip_this(SkipReason::Machine("needs root, mkfs.btrfs and a loop device"));
    };
    let path = |name: &str| disk.0.join(name).display().to_string();
    assert!(run("btrfs", &["-q", "subvolume", "create", &path("a")]));
    std::fs::write(path("a/file"), "in a").unwrap();
    assert!(run("btrfs", &["-q", "subvolume", "snapshot", &path("a"), &path("b")]));
    let server = Server::start(tcp(), vec![share(&disk.0, Users::Owner, false)]);
    let client = Client::connect(ClientOptions::new(server.at.clone(), "share")).unwrap();
    let node = |subvolume: &str| {
        let directory = client.look_up(ME, ROOT, subvolume.as_bytes()).unwrap();
        client.look_up(ME, directory.node, b"file").unwrap()
    };
    let (a, b) = (node("a"), node("b"));
    if a.attributes.subvolume.get() == 0 {
        return byway_skip::skip_this(SkipReason::Machine("the kernel does not tell subvolumes (Linux 6.10 does)"));
    }
    assert_eq!((a.attributes.ino, a.attributes.born_ns), (b.attributes.ino, b.attributes.born_ns));
    assert_ne!(a.node, b.node);
    let handle = client.open(ME, a.node, OFlags::WRONLY.bits()).unwrap();
    client.write(ME, handle, 0, b"changed").unwrap();
    assert_eq!(std::fs::read(path("b/file")).unwrap(), b"in a");
    assert_eq!(std::fs::read(path("a/file")).unwrap(), b"changed");
    client.close_handle(handle);
    drop((client, server));
}
