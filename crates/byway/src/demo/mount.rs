//! A step of a demonstration: a folder that a node shares is mounted, and used by this process.
//!
//! The mount is in no directory, so nothing is left behind if the demonstration is interrupted: it goes with the process.

use std::path::Path;

use byway_reactor::{Address, IoChoice};
use serde::Serialize;

use super::DemoError;
use super::restart::ChildNode;
use crate::mount::{CommandError, DetachedMount};

const FILES: usize = 200;
const FILE_BYTES: usize = 16 << 10;

/// What that came to.
#[derive(Debug, Default, Serialize)]
pub(super) struct MountShown {
    /// Why it was left out; `None`: it was not.
    left_out: Option<String>,
    files: usize,
    messages_written: u64,
    messages_read: u64,
    messages_read_again: u64,
}

impl MountShown {
    /// For people.
    pub(super) fn sentence(&self) -> String {
        if let Some(why) = &self.left_out {
            return format!("The mount of a shared folder was left out: {why}.");
        }
        format!(
            "A folder that a node shares was mounted. {} files were written through the mount with {} messages, read with {}, and read again \
             with {};\nthe shared folder has the same bytes. Then it was unmounted.",
            self.files, self.messages_written, self.messages_read, self.messages_read_again
        )
    }
}

fn contents(number: usize) -> Vec<u8> {
    (0..FILE_BYTES).map(|at| (number * 31 + at) as u8).collect()
}

/// Shares a folder of `folder` by a node, and mounts it.
pub(super) fn show(folder: &Path, io: IoChoice) -> Result<MountShown, DemoError> {
    let made = |source| DemoError::Make { source };
    let shared = folder.join("shared");
    std::fs::create_dir(&shared).map_err(made)?;
    let share = format!("demo={},users=squash:0,writers=exclusive", shared.display());
    let mut node = ChildNode::new(["--share", &share], folder.join("sharing"), io);
    if !rustix::process::geteuid().is_root() {
        return Ok(MountShown { left_out: Some("it needs root".to_owned()), ..MountShown::default() });
    }
    node.start().and_then(|()| node.wait_until_ready()).map_err(DemoError::Child)?;
    let mount = match DetachedMount::new(Address::Unix(node.socket().to_owned()), "demo") {
        Ok(mount) => mount,
        // Containers often have no FUSE.
        Err(error @ CommandError::Mount(_)) => {
            return Ok(MountShown { left_out: Some(error.to_string()), ..MountShown::default() });
        }
        Err(error) => return Err(DemoError::Mount(error)),
    };
    let at = |number: usize| mount.root().join(format!("file-{number}"));
    let counted = |step: &dyn Fn(usize) -> std::io::Result<bool>| {
        let before = mount.messages();
        for number in 0..FILES {
            if !step(number).map_err(DemoError::MountUse)? {
                return Err(DemoError::MountDiffers { file: number });
            }
        }
        Ok(mount.messages() - before)
    };
    let reads = |number| Ok(std::fs::read(at(number))? == contents(number));
    let shown = MountShown {
        left_out: None,
        files: FILES,
        messages_written: counted(&|number| std::fs::write(at(number), contents(number)).map(|()| true))?,
        messages_read: counted(&reads)?,
        messages_read_again: counted(&reads)?,
    };
    counted(&|number| Ok(std::fs::read(shared.join(format!("file-{number}")))? == contents(number)))?;
    Ok(shown)
}
