//! `cargo xtask guest attach`: volumes as devices of ublk, with their server and their own process killed.
//!
//! The machine that runs the other tests may have no ublk. So `byway attach` runs here under Debian's kernel: ext4 and xfs on a device
//! of ublk do not notice that its server is killed again and again, and no memory that was swapped to it is lost; its killed process
//! has a successor, or nothing of the device stays.
//!
//! `BYWAY_LONG=1` kills the server 50 times instead of 3 times.

use super::boot::{Extra, Guest};
use super::initramfs::Initramfs;
use super::setup::System;
use anyhow::{Result, bail};
use std::time::Duration;

/// Eight and a half minutes under emulation on a machine with a load of five for each core; a hang is what it should catch.
const LIMIT: Duration = Duration::from_mins(15);
const LIMIT_LONG: Duration = Duration::from_mins(60);
/// What the guest needs for ublk, and for a loop device on a file of FUSE beside it.
const MODULES: [&str; 7] = ["crc32c_generic", "ext4", "xfs", "ublk_drv", "nbd", "fuse", "loop"];
const PROGRAMS: [&str; 6] = ["dd", "e2fsck", "fio", "mkfs.ext4", "mkfs.xfs", "xfs_repair"];
/// The server is killed so often while files are written.
const KILLS: usize = 3;
const KILLS_LONG: usize = 50;
/// Files that are written and synced between two kills.
const FILES_PER_KILL: usize = 5;

pub fn run(system: &System) -> Result<()> {
    let byway = super::build_byway_for_tests()?;
    let (kills, limit) =
        if std::env::var_os("BYWAY_LONG").is_some() { (KILLS_LONG, LIMIT_LONG) } else { (KILLS, LIMIT) };
    let settings = [("kills", KILLS), ("kills_under_load", kills), ("files_per_kill", FILES_PER_KILL)];
    let script = concat!(include_str!("attach.sh"), include_str!("attach-load.sh"), include_str!("attach-nbd.sh"));
    let mut initramfs = Initramfs::bare(system, &MODULES, &settings, script)?;
    for program in PROGRAMS {
        initramfs.add_program(program, &system.program(program)?)?;
    }
    initramfs.add_program("byway", &byway)?;
    let ending = Guest { system, initramfs: &initramfs, disks: &[], limit, extra: Extra::default() }.boot()?;
    match ending.status {
        Some(0) => {
            println!("guest attach: PASSED");
            Ok(())
        }
        Some(status) => bail!("guest attach: FAILED, the script ended with status {status}"),
        None => bail!("guest attach: FAILED, the guest died"),
    }
}
