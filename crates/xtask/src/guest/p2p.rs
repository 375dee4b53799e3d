//! `cargo xtask guest p2p`: staging in the memory of an NVMe controller, as gmblock did in that of its network card.
//!
//! qemu's controller has a memory buffer; the kernel is one that hands it out. The guest has a second controller without,
//! for what must be refused. The checks of `device_memory_check` come first; then byway serves the disk with
//! `--stage=device`, and the script compares what its clients get, and its counters with what must have moved where.
//! What emulation does not show is speed, and one hop from a disk to a network card, for which there is no such card.

use super::boot::{Extra, Guest};
use super::initramfs::Initramfs;
use super::p2p_kernel;
use super::setup::System;
use crate::process;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::time::Duration;

/// Some 90 s under emulation on a slow machine; a hang is what it should catch.
const LIMIT: Duration = Duration::from_mins(8);
/// What is copied through the network of it, all by the CPU out of emulated device memory.
const DISK_MIB: usize = 16;
const CONTROLLER_MEMORY_MIB: usize = 64;

pub fn run(system: &System) -> Result<()> {
    let missing = p2p_kernel::missing_tools();
    if !missing.is_empty() {
        println!("SKIP guest p2p: a kernel must be built, and {} is not here", missing.join(", "));
        return Ok(());
    }
    let kernel = p2p_kernel::provide(system)?;
    let byway = super::build_byway()?;
    let mut initramfs = Initramfs::bare(system, &[], &[("disk_mib", DISK_MIB)], include_str!("p2p.sh"))?;
    for program in ["dd", "mkfs.ext4"] {
        initramfs.add_program(program, &system.program(program)?)?;
    }
    initramfs.add_program("byway", &byway)?;
    initramfs.add_program("device_memory_check", &super::build_example("byway-reactor", "device_memory_check")?)?;
    match process::find_program("nbdcopy") {
        Some(nbdcopy) => initramfs.add_program("nbdcopy", &nbdcopy)?,
        None => println!("SKIP guest p2p, the part with nbdcopy: it is not here (package libnbd-bin)"),
    }
    let folder = tempfile::Builder::new().prefix("p2p-").tempdir_in(system.scratch())?;
    let devices = [
        controller(folder.path(), "with", &format!("cmb_size_mb={CONTROLLER_MEMORY_MIB},legacy-cmb=off"))?,
        controller(folder.path(), "without", "")?,
    ]
    .concat();
    let extra = Extra { kernel: Some(&kernel), devices: &devices };
    let ending = Guest { system, initramfs: &initramfs, disks: &[], limit: LIMIT, extra }.boot()?;
    match ending.status {
        Some(0) => {
            println!("guest p2p: PASSED");
            Ok(())
        }
        Some(status) => bail!("guest p2p: FAILED, the script ended with status {status}"),
        None => bail!("guest p2p: FAILED, the guest died"),
    }
}

/// Arguments of qemu for an NVMe controller with an empty disk.
fn controller(folder: &Path, name: &str, options: &str) -> Result<Vec<String>> {
    let image = folder.join(name);
    let file = std::fs::File::create(&image).with_context(|| format!("cannot create {}", image.display()))?;
    file.set_len((DISK_MIB as u64) << 20)?;
    let device = format!("nvme,serial={name},drive={name},{options}");
    Ok(vec![
        "-drive".to_owned(),
        format!("file={},if=none,id={name},format=raw,cache=unsafe", image.display()),
        "-device".to_owned(),
        device.trim_end_matches(',').to_owned(),
    ])
}
