//! The parts of a guest, from Debian's packages: downloaded and unpacked, never installed, because
//! installing qemu-system-x86 would remove a newer qemu-utils that the machine may have.
//!
//! Everything is made in a folder beside the final one and renamed when it is whole, so that an
//! interrupted setup leaves nothing behind that looks whole.

use super::kernel;
use crate::process;
use anyhow::{Context, Result, bail};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names the folder of the unpacked parts. Raise the number when what is in it changes.
const SYSTEM: &str = "system-4";
/// The kernels that will do: Debian 12's build of the 6.12 series.
const KERNEL_PATTERN: &str = r"^linux-image-6\.12\.[0-9]+\+deb12-amd64$";
/// What the guest's scripts run, what unpacks the kernel and its modules, and the libraries that a
/// machine may lack.
const USERLAND: [&str; 23] = [
    "busybox-static",
    "coreutils",
    "e2fsprogs",
    "fio",
    "ibverbs-providers",
    "iproute2",
    "kmod",
    "libcom-err2",
    "libext2fs2",
    "libibverbs1",
    "libkmod2",
    "libnl-3-200",
    "libnl-genl-3-200",
    "libnl-route-3-200",
    "librdmacm1",
    "libss2",
    "logsave",
    "nbd-client",
    "ocfs2-tools",
    "util-linux",
    "xfsprogs",
    "xz-utils",
    "zstd",
];
const QEMU: [&str; 3] = ["qemu-system-x86", "qemu-system-common", "qemu-system-data"];
const FIRMWARE: [&str; 2] = ["seabios", "ipxe-qemu"];
/// Libraries bring libraries: after so many rounds of fetching what is missing, something is wrong.
const LIBRARY_ROUNDS: usize = 3;

/// The unpacked parts, all there.
pub struct System {
    folder: PathBuf,
}

impl System {
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where scratch files of a run may lie.
    pub fn scratch(&self) -> &Path {
        self.folder.parent().unwrap_or(&self.folder)
    }

    /// The kernel as an ELF file.
    pub fn vmlinux(&self) -> PathBuf {
        self.folder.join("kernel/vmlinux")
    }

    /// The folder of the kernel's modules, `modules.dep` included.
    pub fn modules(&self) -> Result<PathBuf> {
        let all = self.folder.join("kernel/lib/modules");
        let entry = std::fs::read_dir(&all).with_context(|| format!("cannot read {}", all.display()))?.next();
        Ok(entry.with_context(|| format!("no modules in {}", all.display()))??.path())
    }

    /// A program of the userland.
    pub fn program(&self, name: &str) -> Result<PathBuf> {
        ["bin", "sbin", "usr/bin", "usr/sbin"]
            .iter()
            .map(|folder| self.folder.join("userland").join(folder).join(name))
            .find(|path| path.is_file())
            .with_context(|| format!("no {name} in {}", self.folder.display()))
    }

    /// A library of the userland, by its path in the folder of libraries.
    pub fn library(&self, name: &str) -> Result<PathBuf> {
        std::env::split_paths(&self.userland_libraries())
            .map(|folder| folder.join(name))
            .find(|path| path.is_file())
            .with_context(|| format!("no {name} in {}", self.folder.display()))
    }

    /// A program of the userland, ready to run on this machine.
    pub fn command(&self, name: &str) -> Result<Command> {
        let mut command = Command::new(self.program(name)?);
        command.env("LD_LIBRARY_PATH", self.userland_libraries());
        Ok(command)
    }

    /// Folders with the userland's libraries, for `LD_LIBRARY_PATH`.
    pub fn userland_libraries(&self) -> String {
        libraries_in(&self.folder.join("userland"))
    }

    /// qemu with its own libraries and firmware, never those of the userland.
    pub fn qemu(&self) -> Command {
        let root = self.folder.join("qemu");
        let mut command = Command::new(root.join("usr/bin/qemu-system-x86_64"));
        command.env("LD_LIBRARY_PATH", libraries_in(&root));
        for firmware in ["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"] {
            command.arg("-L").arg(root.join(firmware));
        }
        command
    }
}

/// The parts, downloaded unless they are there.
pub fn provide() -> Result<System> {
    let home = home()?;
    let system = System { folder: home.join(SYSTEM) };
    if system.folder.is_dir() {
        return Ok(system);
    }
    std::fs::create_dir_all(&home).with_context(|| format!("cannot create {}", home.display()))?;
    let partial = tempfile::Builder::new().prefix("partial-").tempdir_in(&home)?;
    println!("guest setup: unpacking a kernel, qemu and a userland under {} (once)", home.display());
    fill(&System { folder: partial.path().to_owned() })?;
    // Another setup may have been faster; its result is as good.
    if !system.folder.is_dir() {
        std::fs::rename(partial.path(), &system.folder).context("cannot put the guest's parts in place")?;
    }
    Ok(system)
}

fn home() -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os("BYWAY_GUEST_HOME") {
        return Ok(std::path::absolute(folder)?);
    }
    let home = std::env::var_os("HOME").context("neither BYWAY_GUEST_HOME nor HOME is set")?;
    Ok(Path::new(&home).join(".cache/byway-guest"))
}

fn fill(system: &System) -> Result<()> {
    let [kernel_root, userland, qemu] = ["kernel", "userland", "qemu"].map(|part| system.folder.join(part));
    let package =
        newest_kernel(&process::output(Command::new("apt-cache").args(["search", "--names-only", KERNEL_PATTERN]))?)
            .context("the package lists have no Debian 12 kernel 6.12: run `apt-get update`, on Debian 12")?;
    unpack(std::slice::from_ref(&package), &kernel_root)?;
    unpack(&USERLAND.map(str::to_owned), &userland)?;
    let emulator = QEMU.iter().map(|package| stable_version(package)).collect::<Result<Vec<_>>>()?;
    unpack(&[emulator.clone(), FIRMWARE.map(str::to_owned).to_vec()].concat(), &qemu)?;
    complete(&qemu.join("usr/bin/qemu-system-x86_64"), &emulator[0], &qemu)?;
    for program in ["kmod", "nbd-client", "e2fsck", "mkfs.ext4", "xz", "zstd", "dd"] {
        complete(&system.program(program)?, program, &userland)?;
    }
    for program in ["mkfs.xfs", "xfs_repair"] {
        complete(&system.program(program)?, "xfsprogs", &userland)?;
    }
    complete(&system.program("fio")?, "fio", &userland)?;
    for program in ["fsck.ocfs2", "mkfs.ocfs2", "mount.ocfs2", "o2cb", "ocfs2_hb_ctl"] {
        complete(&system.program(program)?, "ocfs2-tools", &userland)?;
    }
    for program in ["ip", "rdma"] {
        complete(&system.program(program)?, "iproute2", &userland)?;
    }
    complete(&system.library("librdmacm.so.1")?, "librdmacm1", &userland)?;

    let version = package.trim_start_matches("linux-image-").to_owned();
    kernel::unpack(system, &kernel_root.join(format!("boot/vmlinuz-{version}")))?;
    // The package has no modules.dep: its installation would make it.
    process::run(system.command("kmod")?.arg0("depmod").arg("-b").arg(&kernel_root).arg(&version))
}

/// The highest version among lines of `linux-image-6.12.N+deb12-amd64 - description`.
fn newest_kernel(found: &str) -> Option<String> {
    let patch = |name: &str| name.strip_prefix("linux-image-6.12.")?.split_once('+')?.0.parse::<u32>().ok();
    found
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter_map(|name| Some((patch(name)?, name)))
        .max()
        .map(|(_, name)| name.to_owned())
}

/// `package=version` of the stable release, not of its backports, which may need newer libraries.
fn stable_version(package: &str) -> Result<String> {
    let rows = process::output(Command::new("apt-cache").args(["madison", package]))?;
    let version = rows
        .lines()
        .filter_map(|row| row.split('|').nth(1))
        .map(str::trim)
        .find(|version| !version.contains("~bpo"))
        .with_context(|| format!("the package lists have no {package}: run `apt-get update`"))?;
    Ok(format!("{package}={version}"))
}

/// Downloads packages and unpacks them into `root`.
pub fn unpack(packages: &[String], root: &Path) -> Result<()> {
    std::fs::create_dir_all(root)?;
    let downloads = tempfile::tempdir_in(root.parent().context("a root has a parent")?)?;
    println!("  {}", packages.join(" "));
    process::output(
        Command::new("apt-get")
            // The sandbox's user may not write here, which is only a warning, and a noisy one.
            .args(["-q", "-o", "APT::Sandbox::User=root", "download"])
            .args(packages)
            .current_dir(downloads.path()),
    )?;
    for package in std::fs::read_dir(downloads.path())? {
        process::output(Command::new("dpkg").arg("-x").arg(package?.path()).arg(root))?;
    }
    Ok(())
}

/// Fetches the libraries that a program of `root` wants and neither `root` nor this machine has.
fn complete(program: &Path, package: &str, root: &Path) -> Result<()> {
    for _ in 0..LIBRARY_ROUNDS {
        if missing_libraries(program, root)?.is_empty() {
            return Ok(());
        }
        let wanted: Vec<String> = library_dependencies(package)?
            .into_iter()
            .filter(|library| !process::succeeds(Command::new("dpkg").args(["--status", library])))
            .collect();
        unpack(&wanted, root)?;
    }
    match missing_libraries(program, root)? {
        missing if missing.is_empty() => Ok(()),
        missing => bail!("{} lacks {}", program.display(), missing.join(", ")),
    }
}

fn missing_libraries(program: &Path, root: &Path) -> Result<Vec<String>> {
    let listing = process::output(Command::new("ldd").arg(program).env("LD_LIBRARY_PATH", libraries_in(root)))?;
    Ok(listing.lines().filter_map(|line| Some(line.split_once("=> not found")?.0.trim().to_owned())).collect())
}

/// The libraries' packages that a package depends on, at any depth.
fn library_dependencies(package: &str) -> Result<Vec<String>> {
    let refusals =
        ["recommends", "suggests", "conflicts", "breaks", "replaces", "enhances"].map(|of| format!("--no-{of}"));
    let tree = process::output(Command::new("apt-cache").args(["depends", "--recurse"]).args(refusals).arg(package))?;
    let mut libraries: Vec<String> = tree.lines().filter(|line| line.starts_with("lib")).map(str::to_owned).collect();
    libraries.sort_unstable();
    libraries.dedup();
    Ok(libraries)
}

fn libraries_in(root: &Path) -> String {
    ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"].map(|folder| root.join(folder).display().to_string()).join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_kernel_is_the_one_with_the_highest_number() {
        let found = "linux-image-6.12.9+deb12-amd64 - Linux 6.12 for 64-bit PCs (signed)\n\
                     linux-image-6.12.117+deb12-amd64 - Linux 6.12 for 64-bit PCs (signed)\n\
                     linux-image-6.12.20+deb12-amd64 - Linux 6.12 for 64-bit PCs (signed)\n";
        assert_eq!(newest_kernel(found).as_deref(), Some("linux-image-6.12.117+deb12-amd64"));
        assert_eq!(newest_kernel("linux-image-amd64 - any\n"), None);
    }
}
