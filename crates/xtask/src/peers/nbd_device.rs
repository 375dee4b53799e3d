//! A block device over NBD for machines whose kernel has no client for it: nbdkit serves, nbdfuse makes a file of the export, and
//! a loop device lies on that file.

use super::native::wait_for_port;
use crate::process::{self, Background};
use anyhow::{Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(20);

/// A block device, or a mount, with its processes. Dropping it ends it.
pub struct Device {
    pub path: PathBuf,
    /// Detach it.
    pub end: Vec<Command>,
    pub processes: Vec<Background>,
}

impl Drop for Device {
    fn drop(&mut self) {
        for command in &mut self.end {
            // What is left is in `losetup --list`.
            if let Err(error) = process::output(command) {
                eprintln!("{error:#}");
            }
        }
        self.processes.clear();
    }
}

/// Starts all three in `folder`. `plugin` is what nbdkit serves, with its arguments. `None`, and a line that says so, where a
/// program is missing.
pub fn start(folder: &Path, port: u16, plugin: &[&str]) -> Result<Option<Device>> {
    for tool in ["nbdkit", "nbdfuse", "losetup"] {
        if process::find_program(tool).is_none() {
            println!("SKIP nbdfuse: there is no {tool}");
            return Ok(None);
        }
    }
    let mut serve = Command::new("nbdkit");
    serve.args(["--foreground", "--ipaddr", "127.0.0.1", "--port", &port.to_string()]).args(plugin);
    let server = Background::start(&mut serve, &folder.join("nbdkit.log"))?;
    wait_for_port(port)?;
    let at = folder.join("nbdfuse");
    std::fs::create_dir_all(&at)?;
    let mut mount = Command::new("nbdfuse");
    mount.arg(&at).arg(format!("nbd://127.0.0.1:{port}"));
    let process = Background::start(&mut mount, &folder.join("nbdfuse.log"))?;
    let exported = at.join("nbd");
    process::wait_for("nbdfuse", LIMIT, || Ok(exported.is_file().then_some(())))?;
    // From here on the mount ends with the device.
    let mut unmount = Command::new("umount");
    unmount.arg("--lazy").arg(&at);
    let mut device = Device { path: PathBuf::new(), end: vec![unmount], processes: vec![process, server] };
    let mut set = Command::new("losetup");
    let path = process::output(set.args(["--find", "--show", "--direct-io=on"]).arg(&exported))?.trim().to_owned();
    if path.is_empty() {
        bail!("losetup names no device");
    }
    let mut clear = Command::new("losetup");
    clear.args(["--detach", &path]);
    device.end.insert(0, clear);
    device.path = path.into();
    Ok(Some(device))
}
