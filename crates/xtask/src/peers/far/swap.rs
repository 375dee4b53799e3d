//! Swap on a loop device over a file, and groups of processes with little memory: the kernel's remedy for a program with too
//! little memory, without `byway far`.

use crate::process;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

const BYTES: u64 = 512 << 20;

/// Swap that the whole machine may use, and a memory group of its own; both end with it.
pub struct Swap {
    file: PathBuf,
    device: String,
    group: PathBuf,
    /// The group's file for its limit: of version 1 or 2 of control groups.
    limit: &'static str,
}

impl Swap {
    /// Makes both, the file in that folder.
    pub fn on(folder: &Path) -> Result<Self> {
        let own = format!("byway-peers-far-{}", std::process::id());
        let places = [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
            ("/sys/fs/cgroup", "memory.max", "memory.stat"),
        ];
        let place = places.iter().find(|(root, _, needed)| {
            let group = Path::new(root).join(&own);
            let fits = std::fs::create_dir(&group).is_ok() && group.join(needed).exists();
            if !fits {
                let _ = std::fs::remove_dir(&group);
            }
            fits
        });
        let (root, limit, _) = place.context("no control group for memory that counts swap can be made")?;
        let file = folder.join(format!("{own}.swap"));
        // From here on what was made ends with it.
        let mut swap = Self { file, device: String::new(), group: Path::new(root).join(own), limit };
        let made = Command::new("fallocate").args(["--length", &BYTES.to_string()]).arg(&swap.file).status()?;
        if !made.success() {
            bail!("{} has no room for {} MiB", folder.display(), BYTES >> 20);
        }
        let loop_device = ["--find", "--show", "--direct-io=on"];
        let device = process::output(Command::new("losetup").args(loop_device).arg(&swap.file))?;
        device.trim().clone_into(&mut swap.device);
        process::output(Command::new("mkswap").arg(&swap.device))?;
        process::output(Command::new("swapon").arg(&swap.device))?;
        Ok(swap)
    }

    /// A program that has so much memory, and swap for the rest.
    pub fn limited(&self, limit: &str, words: &[&str]) -> Command {
        let script = "echo \"$2\" > \"$1/$0\" && echo $$ > \"$1/cgroup.procs\" && shift 2 && exec \"$@\"";
        let mut command = Command::new("sh");
        command.args(["-c", script, self.limit]).arg(&self.group).arg(limit).args(words);
        command
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        if !self.device.is_empty() {
            let _ = Command::new("swapoff").arg(&self.device).status();
            let _ = Command::new("losetup").args(["--detach", &self.device]).status();
        }
        let _ = std::fs::remove_file(&self.file);
        let _ = std::fs::remove_dir(&self.group);
    }
}
