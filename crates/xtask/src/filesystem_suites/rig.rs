//! Two shares on file systems of their own, which the suites may fill, and their server.

use super::namespace;
use crate::process::{self, Background};
use anyhow::{Context, Result, bail};
use std::fs::{File, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Bytes of each file system; sparse until they are written.
const DISK_BYTES: u64 = 8 << 30;
const START_LIMIT: Duration = Duration::from_mins(1);
const SHARES: [&str; 2] = ["test", "scratch"];

pub struct Rig {
    _server: Background,
    byway: PathBuf,
    folder: PathBuf,
}

/// A share's address, and the directory to mount it on.
pub struct Share {
    pub uri: String,
    pub at: PathBuf,
}

impl Rig {
    /// Serves the shares, with all files in this folder. What it mounts ends with the namespaces of this process.
    pub fn set_up(folder: &Path) -> Result<Self> {
        if !Path::new("/dev/fuse").exists() {
            bail!("suites: mounts need /dev/fuse");
        }
        let byway = process::target_directory()?.join("debug/byway");
        let path = |name: &str| folder.join(name);
        let helper = path("mount.byway");
        symlink(&byway, &helper)?;
        // The helper says nothing: tests compare what mount(8) prints.
        write_script(&path("helper"), &format!("#!/bin/sh\nexec '{}' \"$@\" >/dev/null\n", helper.display()))?;
        namespace::furnish(folder, &path("helper"))?;
        let mut serve = Command::new(&byway);
        serve.args(["serve", "--threads", "2", "--listen"]).arg(format!("unix://{}", path("socket").display()));
        for share in SHARES {
            let (image, below) = (path(&format!("{share}.img")), path(&format!("{share}-below")));
            File::create(&image)?.set_len(DISK_BYTES)?;
            process::output(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image))?;
            std::fs::create_dir(&below)?;
            std::fs::create_dir(path(share))?;
            process::output(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&below))?;
            serve.arg("--share").arg(format!("{share}={},users=trust-root", below.display()));
        }
        let server = start_until(&mut serve, &path("server.log"), "ready")?;
        Ok(Self { _server: server, byway, folder: folder.to_owned() })
    }

    /// A path among the files of this run.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    pub fn shares(&self) -> [Share; 2] {
        let socket = self.path("socket");
        SHARES
            .map(|name| Share { uri: format!("byway+unix:///{name}?socket={}", socket.display()), at: self.path(name) })
    }

    /// The file system below the first share.
    pub fn below(&self) -> PathBuf {
        self.path(&format!("{}-below", SHARES[0]))
    }

    /// Mounts the first share by a process of its own.
    pub fn mount(&self) -> Result<(Background, PathBuf)> {
        let [Share { uri, at }, _] = self.shares();
        let mut command = Command::new(&self.byway);
        command.args(["mount", "-o", "allow_other", &uri]).arg(&at);
        Ok((start_until(&mut command, &self.path("mount.log"), "ready mount")?, at))
    }
}

/// Starts a program and waits until it says that it is ready.
fn start_until(command: &mut Command, log: &Path, ready: &str) -> Result<Background> {
    let mut program = Background::start(command, log)?;
    process::wait_for(ready, START_LIMIT, || {
        let said = std::fs::read_to_string(log)?;
        if program.has_ended()? {
            bail!("byway has ended: {said}");
        }
        Ok(said.lines().any(|line| line.starts_with(ready)).then_some(()))
    })?;
    Ok(program)
}

pub fn write_script(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(std::fs::set_permissions(path, Permissions::from_mode(0o755))?)
}
