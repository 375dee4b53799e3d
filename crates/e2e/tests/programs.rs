//! Programs that people run, on a mount: each of the scripts in `programs/` must print the same in a folder of the file system below, on
//! a mount, and on one of a share with `writers=exclusive`, and the mount must show the tree that the share has.
//!
//! `BYWAY_LONG=1` makes trees of 10,000 files and runs postgres.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use byway_e2e::{LIMIT, Mount, MountRig, SkipReason, find_tool, lacks_mounts, run, run_well, skip_this};

/// The two ways in which a share can be written to.
const SHARES: [&str; 2] = [",users=trust-root", ",users=trust-root,writers=exclusive"];

/// Files, directories, commits and transactions of a script, each so many.
fn many() -> u32 {
    if std::env::var_os("BYWAY_LONG").is_some() { 100 } else { 8 }
}

/// An empty folder in which one script runs.
struct Case(PathBuf);

impl Case {
    fn new(folder: &Path) -> Self {
        let case = folder.join("case");
        std::fs::create_dir_all(&case).unwrap();
        Self(case)
    }

    /// Runs a script as root, or as another user; gives what it printed.
    fn run(&self, script: &str, user: Option<&str>) -> String {
        let seconds = if std::env::var_os("BYWAY_LONG").is_some() { LIMIT * 15 } else { LIMIT }.as_secs();
        let script = format!("export MANY={}; cd {}\n{script}", many(), self.0.display());
        let user = user.map(|id| [format!("--reuid={id}"), format!("--regid={id}"), "--clear-groups".to_owned()]);
        let mut command: Vec<&str> = Vec::new();
        if let Some(user) = &user {
            command.extend(["setpriv"].into_iter().chain(user.iter().map(String::as_str)));
        }
        command.extend(["bash", "-euo", "pipefail", "-c", &script]);
        // It ends what the script has started, too.
        let seconds = seconds.to_string();
        let limit = ["--kill-after=5", &seconds];
        run_well(&find_tool("timeout").unwrap(), &[&limit[..], &command].concat())
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        // What a script leaves mounted if it is killed; a loop device goes with its mount.
        for mounted in ["at", "memory"] {
            let _ = Command::new("umount").arg("-l").arg(self.0.join(mounted)).stderr(Stdio::null()).status();
        }
    }
}

/// Whether a tool is missing, or no mount can be made; which is said aloud.
fn lacks(tools: &[&'static str]) -> bool {
    let missing = tools.iter().find(|tool| find_tool(tool).is_none());
    if let Some(tool) = missing {
        skip_this(SkipReason::MissingTool(tool));
    }
    missing.is_some() || lacks_mounts()
}

/// All entries of a tree, with what is known of them; of directories their size is the file system's own affair.
fn listed(folder: &Path) -> String {
    let script =
        "find \"$0\" -type d -printf '%P %y %m %U %G %n %T@\\n' -o -printf '%P %y %m %U %G %n %s %T@ %l\\n' | sort";
    run_well(Path::new("/bin/sh"), &["-c", script, folder.to_str().unwrap()])
}

/// The mount shows the files that the share's folder has.
fn shows_what_is_below(mount: &Mount, rig: &MountRig) {
    let (shown, below) = (mount.path("case"), rig.below().join("case"));
    assert_eq!(listed(&shown), listed(&below));
    let arguments = ["-r", "--no-dereference", "-x", "fifo", shown.to_str().unwrap(), below.to_str().unwrap()];
    let differences = run(&find_tool("diff").unwrap(), &arguments);
    assert!(differences.status.success(), "{}", String::from_utf8_lossy(&differences.stdout));
}

/// Runs a script below and on both mounts.
fn same_on_mounts(tools: &[&'static str], script: &str) {
    if lacks(tools) {
        return;
    }
    let plain = tempfile::tempdir().unwrap();
    let expected = Case::new(plain.path()).run(script, None);
    assert!(!expected.is_empty());
    for options in SHARES {
        let rig = MountRig::new(options);
        let _server = rig.serve();
        let mount = rig.mount("mount", &rig.unix(), &[]);
        let case = Case::new(&mount.at);
        assert_eq!(case.run(script, None), expected, "{options}");
        shows_what_is_below(&mount, &rig);
        drop(case);
        mount.unmount();
    }
}

#[test]
fn copies_of_a_tree_are_whole() {
    same_on_mounts(&["rsync", "setfacl", "setfattr"], include_str!("programs/copies.sh"));
}

#[test]
fn git_clones_collects_and_rebases() {
    same_on_mounts(&["git"], include_str!("programs/git.sh"));
}

#[test]
fn cargo_builds_what_has_changed() {
    same_on_mounts(&["cargo", "cc"], include_str!("programs/cargo.sh"));
}

#[test]
fn sqlite_has_three_writers_with_each_journal() {
    same_on_mounts(&["sqlite3"], include_str!("programs/sqlite.sh"));
}

#[test]
fn python_has_an_environment_and_maps_a_file_twice() {
    same_on_mounts(&["python3"], include_str!("programs/python.sh"));
}

#[test]
fn vim_saves_with_a_backup() {
    same_on_mounts(&["vim", "setfattr"], include_str!("programs/vim.sh"));
}

#[test]
fn inotify_tells_of_changes_of_the_same_mount() {
    same_on_mounts(&["inotifywait"], include_str!("programs/inotify.sh"));
}

#[test]
fn programs_are_built_and_run() {
    same_on_mounts(&["cc"], include_str!("programs/execute.sh"));
}

#[test]
fn a_file_system_lives_in_a_file() {
    if Path::new("/dev/loop-control").exists() {
        same_on_mounts(&["mkfs.ext4", "fsck.ext4", "mount", "umount"], include_str!("programs/loop.sh"));
    } else {
        skip_this(SkipReason::Machine("no loop devices"));
    }
}

#[test]
fn overlayfs_has_a_mount_below() {
    let known = std::fs::read_to_string("/proc/filesystems").unwrap();
    if known.contains("\toverlay\n") {
        same_on_mounts(&["mount", "umount"], include_str!("programs/overlay.sh"));
    } else {
        skip_this(SkipReason::Machine("the kernel has no overlayfs"));
    }
}

/// The id of a user who is not root: postgres refuses to be root's.
const NOBODY: u32 = 65534;

#[test]
fn postgres_is_killed_and_recovers() {
    if std::env::var_os("BYWAY_LONG").is_none() {
        return skip_this(SkipReason::Machine("only with BYWAY_LONG=1"));
    }
    if lacks(&["setpriv", "pgbench"]) {
        return;
    }
    for options in SHARES {
        let rig = MountRig::new(options);
        run_well(Path::new("/bin/chmod"), &["755", rig.path(".").to_str().unwrap()]);
        let sockets = tempfile::tempdir().unwrap();
        let _server = rig.serve();
        let mount = rig.mount("mount", &rig.unix(), &["-o", "allow_other"]);
        let case = Case::new(&mount.at);
        for folder in [&case.0, sockets.path()] {
            std::os::unix::fs::chown(folder, Some(NOBODY), Some(NOBODY)).unwrap();
        }
        let script = format!("SOCKETS={}\n{}", sockets.path().display(), include_str!("programs/postgres.sh"));
        assert_eq!(case.run(&script, Some(&NOBODY.to_string())), "t|t|t\nCHECKPOINT\nBad checksums:  0\n", "{options}");
        drop(case);
        mount.unmount();
    }
}
