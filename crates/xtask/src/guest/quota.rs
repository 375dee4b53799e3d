//! `cargo xtask guest quota`: a user's quota that is used up is told to the program that writes through a mount.
//!
//! The server may run as root, who may exceed quotas, and the kernel of the machine that runs the other tests may have none.

use super::boot::{Extra, Guest};
use super::initramfs::Initramfs;
use super::setup::System;
use anyhow::{Result, bail};
use std::time::Duration;

/// Half a minute under emulation on a busy machine; a hang is what it should catch.
const LIMIT: Duration = Duration::from_mins(5);
/// Quotas of ext4 are in a format of their own, a module that no line of `modules.dep` tells.
const MODULES: [&str; 6] = ["crc32c_generic", "ext4", "quota_v2", "xfs", "fuse", "loop"];
const PROGRAMS: [&str; 4] = ["dd", "mkfs.ext4", "mkfs.xfs", "xfs_quota"];

pub fn run(system: &System) -> Result<()> {
    let byway = super::build_byway_for_tests()?;
    let mut initramfs = Initramfs::bare(system, &MODULES, &[], include_str!("quota.sh"))?;
    for program in PROGRAMS {
        initramfs.add_program(program, &system.program(program)?)?;
    }
    initramfs.add_program("byway", &byway)?;
    let ending = Guest { system, initramfs: &initramfs, disks: &[], limit: LIMIT, extra: Extra::default() }.boot()?;
    match ending.status {
        Some(0) => {
            println!("guest quota: PASSED");
            Ok(())
        }
        Some(status) => bail!("guest quota: FAILED, the script ended with status {status}"),
        None => bail!("guest quota: FAILED, the guest died"),
    }
}
