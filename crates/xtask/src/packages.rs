//! The foreign programs that tests, peers and guests use, and the packages of Debian or crates.io they come from.

use crate::process;
use anyhow::{Result, bail};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// Something of somebody else's that a test uses.
struct Tool {
    name: &'static str,
    package: &'static str,
    kind: Kind,
}

/// Where a tool is found.
enum Kind {
    /// In `PATH`.
    Program,
    /// By Debian's Python.
    Module,
    /// Under [`HEADERS`].
    Header,
    /// By the dynamic linker.
    Library,
    /// In `PATH`, from crates.io; the package has its version.
    Crate,
}

/// The C headers of packages.
const HEADERS: &str = "/usr/include";

const fn program(name: &'static str, package: &'static str) -> Tool {
    Tool { name, package, kind: Kind::Program }
}

const fn header(name: &'static str, package: &'static str) -> Tool {
    Tool { name, package, kind: Kind::Header }
}

const fn library(name: &'static str, package: &'static str) -> Tool {
    Tool { name, package, kind: Kind::Library }
}

const fn from_crates_io(name: &'static str, package: &'static str) -> Tool {
    Tool { name, package, kind: Kind::Crate }
}

/// Debian's own Python, which alone knows Debian's modules; `PATH` may name another one first.
const PYTHON: &str = "/usr/bin/python3";

/// What the tests use. qemu-img comes last: only a machine without any gets Debian's qemu-utils,
/// so that a newer one, from backports, stays.
const TOOLS: &[Tool] = &[
    program("fio", "fio"),
    program("nbdkit", "nbdkit"),
    program("nbdinfo", "libnbd-bin"),
    program("nbdcopy", "libnbd-bin"),
    program("nbddump", "libnbd-bin"),
    program("nbdfuse", "libnbd-bin"),
    Tool { name: "nbd", package: "python3-libnbd", kind: Kind::Module },
    program("nbd-server", "nbd-server"),
    program("nbd-client", "nbd-client"),
    program("mkfs.ext4", "e2fsprogs"),
    program("iperf3", "iperf3"),
    program("fusermount3", "fuse3"),
    program("losetup", "mount"),
    program("perf", "linux-perf"),
    program("ip", "iproute2"),
    program("openssl", "openssl"),
    program("strace", "strace"),
    program("cc", "gcc"),
    program("m4", "m4"),
    program("pkg-config", "pkg-config"),
    header("infiniband/verbs.h", "libibverbs-dev"),
    header("rdma/rdma_cma.h", "librdmacm-dev"),
    header("sys/acl.h", "libacl1-dev"),
    program("git", "git"),
    program("inotifywait", "inotify-tools"),
    program("python3", "python3"),
    program("rsync", "rsync"),
    program("setfacl", "acl"),
    program("setfattr", "attr"),
    program("sqlite3", "sqlite3"),
    program("vim", "vim"),
    program("mkfs.xfs", "xfsprogs"),
    program("xfs_quota", "xfsprogs"),
    program("mkfs.btrfs", "btrfs-progs"),
    program("btrfs", "btrfs-progs"),
    program("setquota", "quota"),
    program("pg_ctlcluster", "postgresql"),
    program("glusterfs", "glusterfs-client"),
    program("glusterfsd", "glusterfs-server"),
    program("sshfs", "sshfs"),
    program("stress-ng", "stress-ng"),
    program("stressapptest", "stressapptest"),
    Tool { name: "numpy", package: "python3-numpy", kind: Kind::Module },
    library("libjemalloc.so.2", "libjemalloc2"),
    library("libmimalloc.so.2.0", "libmimalloc2.0"),
    program("rclone", "rclone"),
    from_crates_io("fsx", "fsx@0.3.2"),
    from_crates_io("pjdfstest", "pjdfstest@0.2.2"),
    program("qemu-img", "qemu-utils"),
];

impl Tool {
    fn is_present(&self) -> bool {
        match self.kind {
            Kind::Program | Kind::Crate => process::find_program(self.name).is_some(),
            Kind::Module => {
                let statement = format!("import {}", self.name);
                process::succeeds(Command::new(PYTHON).args(["-c", &statement]))
            }
            Kind::Header => Path::new(HEADERS).join(self.name).is_file(),
            // The dynamic linker reports a library that it does not find, and starts the program.
            Kind::Library => {
                Command::new("true").env("LD_PRELOAD", self.name).output().is_ok_and(|output| output.stderr.is_empty())
            }
        }
    }
}

/// Whether [`install`] can bring a program of this name.
pub fn is_installable(name: &str) -> bool {
    TOOLS.iter().any(|tool| tool.name == name)
}

/// The names of the tools that are missing, each with its package.
pub fn missing() -> Vec<(&'static str, &'static str)> {
    TOOLS.iter().filter(|tool| !tool.is_present()).map(|tool| (tool.name, tool.package)).collect()
}

/// Installs the packages of all missing tools; an error names those still missing afterwards.
pub fn install() -> Result<()> {
    let missing_packages = |is_crate: bool| {
        let of_kind = |tool: &&Tool| matches!(tool.kind, Kind::Crate) == is_crate && !tool.is_present();
        let packages: BTreeSet<&str> = TOOLS.iter().filter(of_kind).map(|tool| tool.package).collect();
        packages
    };
    let packages = missing_packages(false);
    if !packages.is_empty() {
        process::run(as_root("apt-get").args(["update", "-q"]))?;
        process::run(
            as_root("apt-get")
                .args(["install", "-q", "-y", "--no-install-recommends"])
                .args(&packages)
                .env("DEBIAN_FRONTEND", "noninteractive"),
        )?;
    }
    // After Debian's: pjdfstest needs a header of theirs.
    for package in missing_packages(true) {
        process::run(process::cargo().args(["install", "--locked", package]))?;
    }
    let rest = missing();
    if !rest.is_empty() {
        bail!("still missing after the installation: {rest:?}");
    }
    Ok(())
}

/// The program itself for root, through sudo for others.
fn as_root(program: &str) -> Command {
    let is_root = process::output(Command::new("id").arg("-u")).is_ok_and(|id| id.trim() == "0");
    if is_root {
        return Command::new(program);
    }
    let mut command = Command::new("sudo");
    command.arg(program);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_that_nobody_has_is_missing() {
        assert!(!program("no-such-program-anywhere", "none").is_present());
        assert!(!Tool { name: "no_such_module", package: "none", kind: Kind::Module }.is_present());
        assert!(!header("no/such/header.h", "none").is_present());
        assert!(!library("libnosuch.so.1", "none").is_present() && library("libc.so.6", "none").is_present());
        assert!(is_installable("nbdinfo"));
        assert!(!is_installable("no-such-program-anywhere"));
    }
}
