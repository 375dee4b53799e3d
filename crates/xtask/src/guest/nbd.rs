//! `cargo xtask guest nbd`: the kernel's NBD client, ext4 on it, and a server killed in mid-write.
//!
//! The kernel is the strictest NBD client that most users have: it sends many requests at once,
//! flushes, trims and write-zeroes as ext4 sees fit, and hands every error to the file system. The
//! server dies by SIGKILL while files are written; the device then fails, so the script attaches
//! it anew. Everything that a finished sync covered must be there, and e2fsck must be content.

use super::boot::{Extra, Guest};
use super::initramfs::Initramfs;
use super::setup::System;
use anyhow::{Result, bail};
use std::time::Duration;

/// Some 20 s under emulation on a slow machine; a hang is what it should catch.
const LIMIT: Duration = Duration::from_mins(5);
/// Files written before anything is disturbed.
const FILES: usize = 20;
/// The server is killed when so many files of the second part are synced.
const SYNCED_BEFORE_KILL: usize = 5;

pub fn run(system: &System) -> Result<()> {
    let byway = super::build_byway()?;
    let settings = [("files", FILES), ("synced_before_kill", SYNCED_BEFORE_KILL)];
    let initramfs = Initramfs::new(system, &byway, &settings, include_str!("nbd.sh"))?;
    let ending = Guest { system, initramfs: &initramfs, disks: &[], limit: LIMIT, extra: Extra::default() }.boot()?;
    match ending.status {
        Some(0) => {
            println!("guest nbd: PASSED");
            Ok(())
        }
        Some(status) => bail!("guest nbd: FAILED, the script ended with status {status}"),
        None => bail!("guest nbd: FAILED, the guest died"),
    }
}
