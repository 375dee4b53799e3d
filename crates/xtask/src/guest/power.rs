//! `cargo xtask guest power`: what was acknowledged survives a loss of power.
//!
//! A guest serves a file on its disk, writes numbered groups of blocks through the kernel's NBD
//! client, each group followed by a flush, and tells which are acknowledged; then its kernel resets
//! the machine in mid-write, and all that was only in its page cache is gone. A second boot with
//! the same disk shows what is left.
//!
//! A test of durability that has never failed proves nothing: the same is done with a server that
//! acknowledges flushes and does nothing, and that one must lose data.
//!
//! [`files`] does it with files and names of a share.

mod files;

use super::boot::{Extra, Guest};
use super::groups;
use super::initramfs::Initramfs;
use super::setup::System;
use crate::process;
use anyhow::{Context, Result, bail, ensure};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Some 25 s under emulation on a slow machine; a hang is what it should catch.
const LIMIT: Duration = Duration::from_mins(3);
/// The power is cut when the guest has counted so many, one and a half rounds over all places.
const ACKNOWLEDGED_AT_CUT: usize = groups::PLACES * 3 / 2;
/// The last words of a guest that loses its power may not arrive: less than this is no test.
const ACKNOWLEDGED_LEAST: usize = groups::PLACES;
const DISK_BYTES: u64 = 64 << 20;

/// What can be run by itself.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Blocks of a volume, each group followed by a flush.
    Blocks,
    /// Files and names of a share, each followed by an fsync.
    Files,
}

/// The two builds of the server.
struct Servers {
    normal: PathBuf,
    /// Acknowledges flushes and fsyncs, and does nothing.
    dropping: PathBuf,
}

/// Everything, or one part of it.
pub fn run(system: &System, only: Option<Part>) -> Result<()> {
    let runs = |part| only.is_none_or(|only| only == part);
    let servers =
        Servers { normal: super::build_byway_for_tests()?, dropping: super::build_byway_that_drops_flushes()? };
    if runs(Part::Blocks) {
        blocks(system, &servers)?;
    }
    if runs(Part::Files) {
        files::run(system, &servers)?;
    }
    println!("guest power: PASSED, and the server that drops flushes was caught");
    Ok(())
}

fn blocks(system: &System, servers: &Servers) -> Result<()> {
    let outcome = cut(system, &servers.normal).context("guest power, normal build")?;
    println!("normal build: {outcome}");
    let dropping = cut(system, &servers.dropping).context("guest power, drop-flushes")?;
    println!("drop-flushes: {dropping}");
    if !outcome.lost.is_empty() {
        bail!("guest power: FAILED, acknowledged groups are lost: {:?}", outcome.lost);
    }
    if dropping.lost.is_empty() {
        bail!("guest power: FAILED, a server that drops flushes was not caught, so that this test shows nothing");
    }
    Ok(())
}

/// What a loss of power took.
struct Outcome {
    acknowledged: usize,
    /// Those of the last [`groups::PLACES`] acknowledged groups that are not there.
    lost: Vec<usize>,
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let checked = self.acknowledged.min(groups::PLACES);
        write!(formatter, "{} groups acknowledged, ", self.acknowledged)?;
        write!(formatter, "{} of the last {checked} lost", self.lost.len())
    }
}

/// Writes through `byway` in a guest, cuts its power, and looks at what is left.
fn cut(system: &System, byway: &Path) -> Result<Outcome> {
    let folder = tempfile::Builder::new().prefix("power-").tempdir_in(system.scratch())?;
    let [disk, copy] = ["disk", "copy"].map(|name| folder.path().join(name));
    create(&disk, DISK_BYTES)?;
    create(&copy, groups::VOLUME_BYTES as u64)?;
    process::output(system.command("mkfs.ext4")?.args(["-q", "-F"]).arg(&disk))?;

    let acknowledged = write(system, byway, &disk)?;
    let initramfs = Initramfs::new(system, byway, &[], include_str!("power-read.sh"))?;
    let disks = [disk, copy.clone()];
    let ending =
        Guest { system, initramfs: &initramfs, disks: &disks, limit: LIMIT, extra: Extra::default() }.boot()?;
    ensure!(ending.status == Some(0), "the second boot ended with status {:?}", ending.status);
    let volume = std::fs::read(&copy)?;
    Ok(Outcome { acknowledged, lost: groups::lost(&volume, acknowledged) })
}

/// The first boot; returns how many groups were acknowledged before the power was cut.
fn write(system: &System, byway: &Path, disk: &PathBuf) -> Result<usize> {
    let settings = [
        ("groups", groups::GROUPS),
        ("places", groups::PLACES),
        ("group_blocks", groups::GROUP_BLOCKS),
        ("acknowledged_at_cut", ACKNOWLEDGED_AT_CUT),
    ];
    let mut initramfs = Initramfs::new(system, byway, &settings, include_str!("power-write.sh"))?;
    initramfs.add_file("job/groups", groups::all());
    let disks = std::slice::from_ref(disk);
    let ending = Guest { system, initramfs: &initramfs, disks, limit: LIMIT, extra: Extra::default() }.boot()?;
    if let Some(status) = ending.status {
        bail!("the power was not cut: the script ended with status {status}");
    }
    let acknowledged = count_acknowledged(&ending.lines, "acknowledged ");
    ensure!(
        (ACKNOWLEDGED_LEAST..groups::GROUPS).contains(&acknowledged),
        "{acknowledged} groups were acknowledged before the cut, not {ACKNOWLEDGED_LEAST} to {}",
        groups::GROUPS - 1
    );
    Ok(acknowledged)
}

/// Acknowledgements are in order: the first number that is missing, or cut short, ends the count of those with this prefix.
fn count_acknowledged(lines: &[String], prefix: &str) -> usize {
    let numbers = lines.iter().filter_map(|line| line.strip_prefix(prefix)?.parse::<usize>().ok());
    numbers.zip(0..).take_while(|(number, expected)| number == expected).count()
}

/// An empty image, which takes no room until it is written.
fn create(image: &Path, size_bytes: u64) -> Result<()> {
    let file = std::fs::File::create(image).with_context(|| format!("cannot create {}", image.display()))?;
    Ok(file.set_len(size_bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_ends_where_the_console_does() {
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        let count = |text: &str| count_acknowledged(&lines(text), "acknowledged ");
        assert_eq!(count("Connected\nacknowledged 0\nname 1\nacknowledged 1\nackno"), 2);
        assert_eq!(count("acknowledged 0\nacknowledged 2"), 1);
        assert_eq!(count("acknowledged 0\nacknowledged "), 1);
        assert_eq!(count(""), 0);
    }
}
