//! What a program on a mount learns of the file system below: a quota that is used up, and blocks that two files share.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use byway_e2e::{MountRig, SkipReason, binary, find_tool, lacks_mounts, noise, run, run_well};
use byway_skip::skip_part_of_this;
use rustix::io::Errno;

/// Bytes of each file system: the least that xfs takes, and some more. The image is sparse.
const DISK_BYTES: u64 = 512 << 20;
/// The quota.
const QUOTA_BYTES: u64 = 8 << 20;
const PIECE_BYTES: usize = 64 << 10;

/// How a file system is made, and mounted from a file.
struct Format {
    make: &'static [&'static str],
    options: &'static str,
}

/// A quota of 8 MiB for user 4321, or for all files, of the file system at `$1`.
struct Quota {
    format: Format,
    tool: &'static str,
    script: &'static str,
}

const QUOTAS: [Quota; 3] = [
    Quota {
        format: Format { make: &["mkfs.ext4", "-q", "-O", "quota"], options: "loop,usrquota" },
        tool: "setquota",
        script: "setquota -u 4321 0 8192 0 0 \"$1\"",
    },
    Quota {
        format: Format { make: &["mkfs.xfs", "-q"], options: "loop,usrquota" },
        tool: "xfs_quota",
        script: "xfs_quota -x -c 'limit -u bhard=8m 4321' \"$1\"",
    },
    Quota {
        format: Format { make: &["mkfs.btrfs", "-q"], options: "loop" },
        tool: "btrfs",
        script: "btrfs quota enable \"$1\" && btrfs qgroup limit 8M \"$1\"",
    },
];

const WITH_CLONES: [Format; 2] =
    [Format { make: &["mkfs.xfs", "-q"], options: "loop" }, Format { make: &["mkfs.btrfs", "-q"], options: "loop" }];

/// A file system in a file, mounted until this is dropped.
struct Disk(PathBuf);

impl Disk {
    /// Mounts a new one on the folder that is shared; `None`, said aloud, if this machine cannot.
    fn mount(rig: &MountRig, format: &Format) -> Option<Self> {
        let (make, arguments) = format.make.split_first()?;
        let Some(make) = find_tool(make) else {
            skip_part_of_this(SkipReason::MissingTool(make));
            return None;
        };
        let (image, at) = (rig.path("image").display().to_string(), rig.below().display().to_string());
        File::create(&image).unwrap().set_len(DISK_BYTES).unwrap();
        run_well(&make, &[arguments, &[&image]].concat());
        let mounted = run(&find_tool("mount").unwrap(), &["-o", format.options, &image, &at]);
        if !mounted.status.success() {
            let why = format!("cannot mount {} with {}", format.make[0].trim_start_matches("mkfs."), format.options);
            skip_part_of_this(SkipReason::Machine(&why));
            return None;
        }
        run_well(Path::new("/bin/chmod"), &["777", &at]);
        Some(Self(rig.below()))
    }

    /// Bytes that are in use, when all that was written has its blocks.
    fn used_bytes(&self) -> u64 {
        rustix::fs::syncfs(File::open(&self.0).unwrap()).unwrap();
        let disk = rustix::fs::statvfs(&self.0).unwrap();
        (disk.f_blocks - disk.f_bfree) * disk.f_frsize
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = find_tool("umount").map(|umount| run(&umount, &["-l", &self.0.display().to_string()]));
    }
}

/// Writes pieces until one fails; returns the bytes that were written, and the error.
fn fill(path: &Path) -> (u64, Errno) {
    let mut file = File::create(path).unwrap();
    let mut written = 0;
    loop {
        assert!(written <= 4 * QUOTA_BYTES, "no quota");
        match file.write(&noise(PIECE_BYTES, written)) {
            Ok(len) => written += len as u64,
            Err(error) => return (written, Errno::from_raw_os_error(error.raw_os_error().unwrap())),
        }
    }
}

#[test]
fn a_quota_that_is_used_up_is_told_by_the_write() {
    if lacks_mounts() {
        return;
    }
    for Quota { format, tool, script } in QUOTAS {
        if find_tool(tool).is_none() {
            skip_part_of_this(SkipReason::MissingTool(tool));
            continue;
        }
        let rig = MountRig::new(",users=squash:4321");
        let Some(disk) = Disk::mount(&rig, &format) else { continue };
        let at = disk.0.display().to_string();
        run_well(Path::new("/bin/sh"), &["-c", &format!("PATH=$PATH:/usr/sbin:/sbin; {script}"), "sh", &at]);
        let _server = rig.serve();
        let mount = rig.mount("mount", &rig.unix(), &[]);
        let (written, error) = fill(&mount.path("filled"));
        assert_eq!(error, Errno::DQUOT, "{tool}: after {written} bytes");
        assert!((QUOTA_BYTES / 2..=QUOTA_BYTES).contains(&written), "{tool}: {written} bytes");
        assert_eq!(std::fs::metadata(mount.path("filled")).unwrap().len(), written);
        // A program without a mount.
        let map = format!("/byway-test-quota={}", rig.unix());
        let arguments =
            ["run", "--map", &map, "--", "dd", "if=/dev/zero", "of=/byway-test-quota/more", "bs=1M", "count=16"];
        let said = run(&binary(), &arguments);
        let complaint = String::from_utf8_lossy(&said.stderr).into_owned();
        assert!(!said.status.success() && complaint.contains("Disk quota exceeded"), "{tool}: {complaint}");
        // The other files are read, and with room there are writes again. There may not have been room for a name.
        let _ = std::fs::remove_file(mount.path("more"));
        assert_eq!(std::fs::read(mount.path("filled")).unwrap()[..PIECE_BYTES], noise(PIECE_BYTES, 0));
        std::fs::remove_file(mount.path("filled")).unwrap();
        rustix::fs::syncfs(File::open(&at).unwrap()).unwrap();
        let mut file = File::create(mount.path("again")).unwrap();
        file.write_all(&noise(PIECE_BYTES, 1)).unwrap();
        file.sync_all().unwrap();
        drop(file);
        println!("{tool}: {written} bytes");
        mount.unmount();
    }
}

#[test]
fn a_copy_within_a_share_shares_blocks_where_the_file_system_can() {
    const LEN: usize = 64 << 20;
    if lacks_mounts() {
        return;
    }
    for format in WITH_CLONES {
        let rig = MountRig::new(",users=squash:0");
        let Some(disk) = Disk::mount(&rig, &format) else { continue };
        let server = rig.serve();
        let mount = rig.mount("mount", &rig.unix(), &[]);
        let bytes = noise(LEN, 7);
        // Not through the mount, whose server may close the file later: xfs gives blocks behind the end of an open file back at its close.
        let mut source = File::create(rig.below().join("source")).unwrap();
        source.write_all(&bytes).unwrap();
        source.sync_all().unwrap();
        drop(source);
        let before = disk.used_bytes();
        assert!(before >= LEN as u64, "{before}");
        let is_shared = |name: &str| {
            let grown = disk.used_bytes().saturating_sub(before);
            assert!(grown < LEN as u64 / 8, "{}: {name}: {grown} bytes more", format.make[0]);
            assert_eq!(std::fs::read(rig.below().join(name)).unwrap(), bytes, "{name}");
        };
        // By copy_file_range(2).
        let source = File::open(mount.path("source")).unwrap();
        let copy = File::create(mount.path("copy")).unwrap();
        let mut at = 0;
        while at < LEN as u64 {
            let (mut from, mut to) = (at, at);
            let copied = rustix::fs::copy_file_range(&source, Some(&mut from), &copy, Some(&mut to), LEN).unwrap();
            assert!(copied > 0);
            at += copied as u64;
        }
        is_shared("copy");
        // By a command.
        let uri = |name: &str| format!("byway://127.0.0.1:{}/share/{name}", server.port("byway"));
        run_well(&binary(), &["copy", &uri("source"), &uri("copied")]);
        is_shared("copied");
        // FICLONE reaches no FUSE file system, and cp takes the other call then.
        assert_eq!(rustix::fs::ioctl_ficlone(&copy, &source), Err(Errno::OPNOTSUPP));
        let cp = |how: &str, name: &str| {
            let mut command = Command::new("cp");
            command.arg(format!("--reflink={how}")).args([mount.path("source"), mount.path(name)]);
            command.output().unwrap()
        };
        assert!(!cp("always", "always").status.success());
        assert!(cp("auto", "auto").status.success());
        is_shared("auto");
        // A change of one is no change of the others.
        copy.write_all_at(&[1; 4096], 0).unwrap();
        assert_eq!(std::fs::read(mount.path("source")).unwrap(), bytes);
        drop((source, copy));
        mount.unmount();
    }
}
