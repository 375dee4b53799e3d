//! `cargo xtask guest unit`: dist/byway.service under the systemd of Debian 12.
//!
//! systemd is the guest's first process, in a small root of Debian 12's packages. The files of `dist` are installed where a package would
//! put them; then the node is started, used by clients, reloaded and stopped as an operator does it.

use super::boot::{Extra, Guest};
use super::initramfs::Initramfs;
use super::setup::{self, System};
use crate::process;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Two minutes under emulation on a busy machine; a hang is what it should catch.
const LIMIT: Duration = Duration::from_mins(10);
/// Names the folder of the unpacked packages. Raise the number when [`PACKAGES`] changes.
const ROOT: &str = "systemd-1";
/// systemd, a shell with the usual programs, and the libraries of all of them.
const PACKAGES: [&str; 45] = [
    "coreutils",
    "dash",
    "diffutils",
    "grep",
    "libacl1",
    "libapparmor1",
    "libargon2-1",
    "libattr1",
    "libaudit1",
    "libblkid1",
    "libc6",
    "libcap-ng0",
    "libcap2",
    "libcrypt1",
    "libcryptsetup12",
    "libdevmapper1.02.1",
    "libfdisk1",
    "libffi8",
    "libgcc-s1",
    "libgcrypt20",
    "libgmp10",
    "libgpg-error0",
    "libip4tc2",
    "libjson-c5",
    "libkmod2",
    "liblz4-1",
    "liblzma5",
    "libmount1",
    "libp11-kit0",
    "libpam0g",
    "libpcre2-8-0",
    "libseccomp2",
    "libselinux1",
    "libssl3",
    "libsystemd-shared",
    "libsystemd0",
    "libudev1",
    "libuuid1",
    "libzstd1",
    "libtinfo6",
    "mount",
    "sed",
    "systemd",
    "util-linux",
    "zlib1g",
];
/// What of `dist` a package would install, and where.
const FILES: [(&str, &str); 4] = [
    ("byway.service", "usr/lib/systemd/system/byway.service"),
    ("byway-nbd.socket", "usr/lib/systemd/system/byway-nbd.socket"),
    ("byway.sysusers", "usr/lib/sysusers.d/byway.conf"),
    ("byway.toml", "etc/byway/byway.toml"),
];

pub fn run(system: &System) -> Result<()> {
    let root = match provide(system) {
        Ok(root) => root,
        Err(error) => {
            println!("SKIP guest unit: the packages of systemd cannot be had: {error:#}");
            return Ok(());
        }
    };
    let byway = super::build_byway_for_tests()?;
    let mut initramfs = Initramfs::bare(system, &[], &[], include_str!("unit.sh"))?;
    initramfs.add_file("init", include_bytes!("unit-init.sh").to_vec());
    initramfs.add_tree("system", &root)?;
    for (path, content) in installed()? {
        initramfs.add_text(&format!("system/{path}"), content);
    }
    initramfs.add_file("system/usr/bin/byway", read(&byway)?);
    let ending = Guest { system, initramfs: &initramfs, disks: &[], limit: LIMIT, extra: Extra::default() }.boot()?;
    match ending.status {
        Some(0) => {
            println!("guest unit: PASSED");
            Ok(())
        }
        Some(status) => bail!("guest unit: FAILED, the script ended with status {status}"),
        None => bail!("guest unit: FAILED, the guest died"),
    }
}

/// What is installed over the packages, by its path.
fn installed() -> Result<Vec<(String, Vec<u8>)>> {
    let mut files = vec![
        ("etc/passwd".to_owned(), b"root:x:0:0:root:/root:/bin/sh\nstranger:x:2000:2000::/:/bin/sh\n".to_vec()),
        ("etc/group".to_owned(), b"root:x:0:\ndisk:x:6:\nstranger:x:2000:\n".to_vec()),
        ("etc/machine-id".to_owned(), b"0123456789abcdef0123456789abcdef\n".to_vec()),
        ("etc/systemd/system/test.target".to_owned(), include_bytes!("unit.target").to_vec()),
        ("etc/systemd/system/test.service".to_owned(), include_bytes!("unit.service").to_vec()),
    ];
    for (file, place) in FILES {
        files.push((place.to_owned(), read(&process::workspace_root().join("dist").join(file))?));
    }
    Ok(files)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// The packages' files, downloaded unless they are there.
fn provide(system: &System) -> Result<PathBuf> {
    let root = system.folder().join(ROOT);
    if root.is_dir() {
        return Ok(root);
    }
    let partial = tempfile::Builder::new().prefix("partial-").tempdir_in(system.folder())?;
    let packages: Vec<String> = PACKAGES.iter().map(|package| (*package).to_owned()).collect();
    setup::unpack(&packages, &partial.path().join("root"))?;
    if !root.is_dir() {
        std::fs::rename(partial.path().join("root"), &root).context("cannot put systemd's parts in place")?;
    }
    Ok(root)
}
