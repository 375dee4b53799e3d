//! Files and names of a share whose fsync has returned survive a loss of power.
//!
//! A guest shares a directory of its disk, mounts the share, and writes there: first files, each under another name, synced and
//! renamed, with its directory synced; then names alone, which are moved and made, with their directories synced. So a
//! server that syncs files and no directories loses names, and one that syncs directories alone loses bytes. The guest's kernel
//! resets the machine among the names. A second boot compares what is left with what was acknowledged.
//!
//! Another guest syncs nothing, but unmounts before its power is cut: the unmount is what acknowledges all files and names.

use super::{LIMIT, Servers, count_acknowledged, create};
use crate::guest::boot::{Extra, Guest};
use crate::guest::groups;
use crate::guest::initramfs::Initramfs;
use crate::guest::setup::System;
use crate::process;
use anyhow::{Context, Result, bail, ensure};
use std::path::{Path, PathBuf};

/// Files that are written; as many names are moved after them, and the power is cut before the last.
const FILES: usize = 96;
/// The power is cut when the guest has counted so many names.
const NAMES_AT_CUT: usize = FILES / 2;
/// The last words of a guest that loses its power may not arrive: less than this is no test.
const NAMES_LEAST: usize = FILES / 4;
const DISK_BYTES: u64 = 64 << 20;
/// What all guests here need, and FUSE.
const MODULES: [&str; 5] = ["virtio_pci", "virtio_blk", "crc32c_generic", "ext4", "fuse"];
const PROGRAMS: [&str; 3] = ["dd", "e2fsck", "sync"];
/// The last line of a look at what is left.
const LOOKED: &str = "looked at all files and names";

/// What acknowledges files and names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Sync,
    Unmount,
}

pub fn run(system: &System, servers: &Servers) -> Result<()> {
    [By::Sync, By::Unmount].into_iter().try_for_each(|by| run_by(system, servers, by))
}

fn run_by(system: &System, servers: &Servers, by: By) -> Result<()> {
    let outcome =
        cut(system, &servers.normal, by).with_context(|| format!("guest power, files, {by:?}, normal build"))?;
    println!("{by:?}, normal build: {outcome}");
    let dropping =
        cut(system, &servers.dropping, by).with_context(|| format!("guest power, files, {by:?}, drop-flushes"))?;
    println!("{by:?}, drop-flushes: {dropping}");
    if !outcome.lost_files.is_empty() || !outcome.lost_names.is_empty() {
        let Outcome { lost_files, lost_names, .. } = outcome;
        bail!("guest power: FAILED, what was synced is lost: files {lost_files:?}, names {lost_names:?}");
    }
    if dropping.lost_files.is_empty() || dropping.lost_names.is_empty() {
        bail!("guest power: FAILED, a server that drops fsync was not caught, so that this test shows nothing");
    }
    Ok(())
}

/// What a loss of power took.
struct Outcome {
    /// Names that were acknowledged, after all [`FILES`].
    names: usize,
    /// Files that are missing or have other bytes.
    lost_files: Vec<usize>,
    lost_names: Vec<usize>,
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{FILES} files and {} names acknowledged, ", self.names)?;
        write!(formatter, "{} files and {} names of these lost", self.lost_files.len(), self.lost_names.len())
    }
}

/// Writes through a mount of `byway` in a guest, cuts its power, and looks at what is left.
fn cut(system: &System, byway: &Path, by: By) -> Result<Outcome> {
    let folder = tempfile::Builder::new().prefix("power-files-").tempdir_in(system.scratch())?;
    let disk = folder.path().join("disk");
    create(&disk, DISK_BYTES)?;
    process::output(system.command("mkfs.ext4")?.args(["-q", "-F"]).arg(&disk))?;

    let names = write(system, byway, &disk, by)?;
    let settings = settings([("names", names)]);
    let lines = match boot(system, byway, &disk, &settings, include_str!("../power-files-read.sh"))? {
        (Some(0), lines) => lines,
        (status, _) => bail!("the second boot ended with status {status:?}"),
    };
    ensure!(lines.iter().any(|line| line == LOOKED), "the second boot did not look at everything");
    Ok(Outcome { names, lost_files: numbers(&lines, "lost file "), lost_names: numbers(&lines, "lost name ") })
}

/// The first boot; returns how many names were acknowledged before the power was cut.
fn write(system: &System, byway: &Path, disk: &PathBuf, by: By) -> Result<usize> {
    let settings = settings([("names_at_cut", NAMES_AT_CUT), ("unmounts", usize::from(by == By::Unmount))]);
    let lines = match boot(system, byway, disk, &settings, include_str!("../power-files-write.sh"))? {
        (None, lines) => lines,
        (Some(status), _) => bail!("the power was not cut: the script ended with status {status}"),
    };
    if by == By::Unmount {
        return Ok(FILES);
    }
    let [files, names] = ["file ", "name "].map(|prefix| count_acknowledged(&lines, prefix));
    ensure!(files == FILES, "{files} files were acknowledged, not {FILES}");
    ensure!(
        (NAMES_LEAST..FILES).contains(&names),
        "{names} names were acknowledged before the cut, not {NAMES_LEAST} to {}",
        FILES - 1
    );
    Ok(names)
}

fn settings<const N: usize>(more: [(&'static str, usize); N]) -> Vec<(&'static str, usize)> {
    let file_bytes = groups::GROUP_BLOCKS * groups::BLOCK_BYTES;
    [("files", FILES), ("file_bytes", file_bytes)].into_iter().chain(more).collect()
}

/// Boots with the disk and the files' contents; returns the script's status and lines.
fn boot(
    system: &System,
    byway: &Path,
    disk: &PathBuf,
    settings: &[(&str, usize)],
    script: &str,
) -> Result<(Option<u32>, Vec<String>)> {
    let mut initramfs = Initramfs::bare(system, &MODULES, settings, script)?;
    for program in PROGRAMS {
        initramfs.add_program(program, &system.program(program)?)?;
    }
    initramfs.add_program("byway", byway)?;
    initramfs.add_file("job/groups", groups::all());
    let disks = std::slice::from_ref(disk);
    let ending = Guest { system, initramfs: &initramfs, disks, limit: LIMIT, extra: Extra::default() }.boot()?;
    Ok((ending.status, ending.lines))
}

/// The numbers behind a prefix.
fn numbers(lines: &[String], prefix: &str) -> Vec<usize> {
    lines.iter().filter_map(|line| line.strip_prefix(prefix)?.parse().ok()).collect()
}
