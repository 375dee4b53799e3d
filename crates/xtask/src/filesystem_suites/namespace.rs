//! Namespaces for mounts and processes: what a test leaves mounted or running ends with its suite, also if that is killed.

use crate::process;
use anyhow::{Context, Result};
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

/// What mount(8) calls for a type `fuse.*` that has no helper of its own: a file of the package fuse3.
const HELPER: &str = "/sbin/mount.fuse";
/// The users and groups that xfstests needs.
const USERS: [&str; 3] = ["fsgqa", "fsgqa2", "123456-fsgqa"];
/// The number of the first of them, above those that distributions give.
const FIRST_USER: u32 = 61_000;

/// A program that gets namespaces of its own. It and all that it started are killed when this thread ends.
pub fn alone(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]);
    command.arg(program);
    command
}

/// In such namespaces: puts files, made in `folder`, over those of the system. mount(8) calls `helper`, logs of mounts go away, and
/// the users of xfstests exist.
pub fn furnish(folder: &Path, helper: &Path) -> Result<()> {
    process::output(Command::new("mount").args(["-t", "tmpfs", "tmpfs", "/run"]))?;
    bind(helper, Path::new(HELPER)).context("mount(8) needs the package fuse3")?;
    for path in ["/etc/passwd", "/etc/group"] {
        let mut lines = std::fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
        for (user, number) in USERS.iter().zip(FIRST_USER..) {
            if !lines.lines().any(|line| line.split(':').next() == Some(user)) {
                let rest = if path == "/etc/passwd" { format!("{number}::/:/bin/sh") } else { String::new() };
                // No password; `x` would ask for a line of /etc/shadow.
                writeln!(lines, "{user}:*:{number}:{rest}").context("a string takes all")?;
            }
        }
        let copy = folder.join(path.trim_start_matches("/etc/"));
        std::fs::write(&copy, lines)?;
        bind(&copy, Path::new(path))?;
    }
    Ok(())
}

fn bind(from: &Path, to: &Path) -> Result<()> {
    process::output(Command::new("mount").arg("--bind").arg(from).arg(to)).map(drop)
}

/// Detaches loop devices whose file is in this folder: tests that are killed leave them. One that is still in use goes with its user.
pub fn detach_loops(folder: &Path) -> Result<()> {
    for entry in std::fs::read_dir("/sys/block").context("cannot list devices")? {
        let entry = entry?;
        // Devices that are not loops, and loops without a file, have no such file.
        let file = std::fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
        if Path::new(file.trim_end()).starts_with(folder) {
            process::output(Command::new("losetup").arg("--detach").arg(Path::new("/dev").join(entry.file_name())))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use byway_skip::{SkipReason, skip_this};

    /// Mounts on `$1`, and leaves a process behind whose number it writes to `$2`.
    const SCRIPT: &str =
        "mount -t tmpfs tmpfs \"$1\" && touch \"$1/mounted\" && (sleep 600 & echo $! > \"$2\") && test $$ = 1";

    #[test]
    fn mounts_and_processes_go_away() {
        if !rustix::process::geteuid().is_root() {
            return skip_this(SkipReason::Machine("namespaces need root"));
        }
        let folder = tempfile::tempdir().unwrap();
        let (at, id) = (folder.path().join("at"), folder.path().join("id"));
        std::fs::create_dir(&at).unwrap();
        let mut command = alone(Path::new("/bin/sh"));
        process::output(command.args(["-c", SCRIPT, "sh"]).arg(&at).arg(&id)).unwrap();
        assert!(std::fs::metadata(&id).unwrap().len() > 0, "the process was started");
        assert!(!at.join("mounted").exists());
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!mounts.contains(at.to_str().unwrap()), "{mounts}");
    }
    #[test]
    fn loops_of_a_folder_are_detached() {
        let folder = tempfile::tempdir().unwrap();
        let (image, inner) = (folder.path().join("image"), folder.path().join("inner"));
        std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let Ok(device) = process::output(Command::new("losetup").args(["--find", "--show"]).arg(&image)) else {
            return skip_this(SkipReason::Machine("losetup needs root and loop devices"));
        };
        let is_attached =
            || process::output(Command::new("losetup").arg("--all")).unwrap().contains(image.to_str().unwrap());
        detach_loops(&inner).unwrap();
        let stayed = is_attached();
        detach_loops(folder.path()).unwrap();
        assert!(stayed && !is_attached(), "{device}");
    }
}
