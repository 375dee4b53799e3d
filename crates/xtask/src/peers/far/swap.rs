//! The kernel's remedies for a program with too little memory: swap on a loop device over a file of this machine, and swap on a
//! loop device over an export of nbdkit. The program has a control group of its own that limits its memory.

use super::super::nbd_device::{self, Device};
use crate::process;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

const BYTES: u64 = 512 << 20;
const NBDKIT_PORT: u16 = 4713;

/// A device that the whole machine may swap to while it is in use. It ends with this.
pub struct Swap {
    /// What a table calls it.
    pub name: &'static str,
    device: Device,
    /// The file below the device, where it is one of this machine.
    file: Option<PathBuf>,
}

/// Swap is on.
pub struct InUse<'a>(&'a Path);

impl Swap {
    /// Over a file in that folder.
    pub fn to_file(folder: &Path) -> Result<Self> {
        let file = folder.join(format!("byway-peers-far-{}.swap", std::process::id()));
        let none = Device { path: PathBuf::new(), end: Vec::new(), processes: Vec::new() };
        let mut swap = Self { name: "swap to a file", device: none, file: Some(file.clone()) };
        let made = Command::new("fallocate").args(["--length", &BYTES.to_string()]).arg(&file).status()?;
        if !made.success() {
            bail!("{} has no room for {} MiB", folder.display(), BYTES >> 20);
        }
        let mut set = Command::new("losetup");
        let path = process::output(set.args(["--find", "--show", "--direct-io=on"]).arg(&file))?.trim().to_owned();
        let mut clear = Command::new("losetup");
        clear.args(["--detach", &path]);
        swap.device.path = path.into();
        swap.device.end.push(clear);
        process::output(Command::new("mkswap").arg(&swap.device.path))?;
        Ok(swap)
    }

    /// Over memory that nbdkit serves; its programs run in that folder. `None` where a program is missing.
    pub fn over_nbd(folder: &Path) -> Result<Option<Self>> {
        let Some(device) = nbd_device::start(folder, NBDKIT_PORT, &["memory", &BYTES.to_string()])? else {
            return Ok(None);
        };
        process::output(Command::new("mkswap").arg(&device.path))?;
        Ok(Some(Self { name: "swap over NBD", device, file: None }))
    }

    /// What share of the time with this swap far memory may take: it is to be faster than a disk, and twice as fast as the network.
    pub fn most(&self) -> f64 {
        if self.file.is_some() { 1.0 } else { 0.5 }
    }

    /// Lets the machine swap to it, until the value is dropped.
    pub fn enable(&self) -> Result<InUse<'_>> {
        process::output(Command::new("swapon").arg(&self.device.path))?;
        Ok(InUse(&self.device.path))
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        if let Err(error) = process::output(Command::new("swapoff").arg(self.0)) {
            eprintln!("{error:#}");
        }
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            let _ = std::fs::remove_file(file);
        }
    }
}

/// A control group for programs with little memory. It ends with this.
pub struct Group {
    folder: PathBuf,
    /// The group's file for its limit: of version 1 or 2 of control groups.
    limit: &'static str,
}

impl Group {
    /// An error where the machine has no control groups that count swap.
    pub fn new() -> Result<Self> {
        let own = format!("byway-peers-far-{}", std::process::id());
        let places = [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
            ("/sys/fs/cgroup", "memory.max", "memory.stat"),
        ];
        for (root, limit, needed) in places {
            let folder = Path::new(root).join(&own);
            if std::fs::create_dir(&folder).is_err() {
                continue;
            }
            let group = Self { folder, limit };
            if group.folder.join(needed).exists() {
                return Ok(group);
            }
        }
        bail!("no control group for memory that counts swap can be made")
    }

    /// A program that has so much memory, and swap for the rest.
    pub fn limited(&self, limit: &str, words: &[&str]) -> Command {
        let script = "echo \"$2\" > \"$1/$0\" && echo $$ > \"$1/cgroup.procs\" && shift 2 && exec \"$@\"";
        let mut command = Command::new("sh");
        command.args(["-c", script, self.limit]).arg(&self.folder).arg(limit).args(words);
        command
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.folder);
    }
}

/// Both kinds of swap that this machine can have, and the group; what it cannot have is said.
pub fn available(disk: &Path, run: &Path) -> Option<(Group, Vec<Swap>)> {
    let group = Group::new().inspect_err(|error| println!("SKIP swap: {error:#}")).ok()?;
    let made = [Swap::to_file(disk).map(Some).context("swap to a file"), Swap::over_nbd(run).context("swap over NBD")];
    let swaps = made.into_iter().filter_map(|made| made.inspect_err(|error| println!("SKIP {error:#}")).ok().flatten());
    Some((group, swaps.collect()))
}
