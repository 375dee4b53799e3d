//! The file systems that are compared: a server of a folder each, and a mount of it.

use super::super::cpu::CpuClock;
use crate::process::{self, Background};
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use serde::Serialize;
use std::fmt;
use std::fs::Permissions;
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// How long a server or a mount may take to begin.
const START_LIMIT: Duration = Duration::from_secs(20);
const BYWAY_PORT: u16 = 4713;
const NAMES_PORT: u16 = 4717;
const GLUSTER_PORT: u16 = 24_999;
const RCLONE_PORT: u16 = 4714;
/// Debian's path.
const SFTP_SERVER: &str = "/usr/lib/openssh/sftp-server";

/// A file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum System {
    /// A share with `writers=exclusive`, over TCP.
    Byway,
    /// The same, with `--entry-timeout 1`: GlusterFS keeps names for a second, too.
    Names,
    /// One brick with locks and 4 io-threads; write-behind and read-ahead at the client; over TCP.
    Gluster,
    /// Without ssh: sftp-server on a pipe.
    Sshfs,
    /// `rclone serve webdav` over TCP; writes go through files of the client.
    Rclone,
    /// byway's FUSE codec over the folder itself: no network.
    Passthrough,
    /// The folder itself.
    Local,
    /// No file system: nbdfuse on nbdkit, for attached volumes.
    #[value(skip)]
    Nbdfuse,
    /// No file system: `byway bench volume`, for programs without a mount.
    #[value(skip)]
    Volume,
    /// byway's mount past the page cache, for programs without a mount.
    #[value(skip)]
    Direct,
}

impl fmt::Display for System {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Byway => "byway",
            Self::Names => "byway-names",
            Self::Gluster => "GlusterFS",
            Self::Sshfs => "sshfs",
            Self::Rclone => "rclone",
            Self::Passthrough => "passthrough",
            Self::Local => "local",
            Self::Nbdfuse => "nbdfuse",
            Self::Volume => "byway bench volume",
            Self::Direct => "byway mount, O_DIRECT",
        })
    }
}

/// Where programs, folders and logs are.
pub struct Places {
    pub byway: PathBuf,
    pub passthrough: PathBuf,
    /// On tmpfs: a folder for each system.
    pub data: PathBuf,
    /// Mount points, sockets and logs.
    pub run: PathBuf,
}

/// A running server, and where its folder is mounted.
pub struct Server<'a> {
    pub system: System,
    pub folder: PathBuf,
    places: &'a Places,
    process: Option<Background>,
}

/// A mount, which ends when it is dropped.
pub struct Mount<'a> {
    pub server: &'a Server<'a>,
    /// The mounted directory.
    pub at: PathBuf,
    process: Option<Background>,
}

impl<'a> Server<'a> {
    /// Starts it; `None`, with a line for the user, if a program is missing.
    pub fn start(system: System, places: &'a Places) -> Result<Option<Self>> {
        let needed = match system {
            System::Gluster => vec!["glusterfsd", "glusterfs"],
            System::Sshfs => vec!["sshfs", SFTP_SERVER],
            System::Rclone => vec!["rclone"],
            _ => Vec::new(),
        };
        if let Some(missing) = needed.iter().find(|name| process::find_program(name).is_none()) {
            println!("SKIP {system}: there is no {missing}");
            return Ok(None);
        }
        let folder = places.data.join(system.to_string());
        let log = places.run.join(format!("{system}-server.log"));
        let process = match system {
            System::Byway | System::Names => {
                let port = byway_port(system);
                let share = format!("data={},writers=exclusive,users=trust-root", folder.display());
                let listen = format!("tcp://127.0.0.1:{port}");
                let mut command = Command::new(&places.byway);
                command.args(["serve", "--share", &share, "--listen", &listen]);
                Some((command, port))
            }
            System::Gluster => {
                let volume = places.run.join("server.vol");
                std::fs::write(&volume, gluster_server(&folder))?;
                let mut command = Command::new("glusterfsd");
                command.args(["--no-daemon", "--log-file"]).arg(places.run.join("brick.log"));
                command.arg("--pid-file").arg(places.run.join("brick.pid")).arg("--volfile").arg(volume);
                Some((command, GLUSTER_PORT))
            }
            System::Rclone => {
                let mut command = rclone(places);
                command.args(["serve", "webdav", "--addr", &format!("127.0.0.1:{RCLONE_PORT}")]).arg(&folder);
                Some((command, RCLONE_PORT))
            }
            _ => None,
        };
        let process = process.map(|(mut command, port)| -> Result<Background> {
            let mut started = Background::start(&mut command, &log)?;
            process::wait_for("the server", START_LIMIT, || {
                if started.has_ended()? {
                    bail!("the server of {system} ended: {}", std::fs::read_to_string(&log).unwrap_or_default());
                }
                Ok(TcpStream::connect(("127.0.0.1", port)).is_ok().then_some(()))
            })?;
            Ok(started)
        });
        Ok(Some(Self { system, folder, places, process: process.transpose()? }))
    }

    /// Mounts the folder anew: the client has nothing in its caches.
    pub fn mount(&self) -> Result<Mount<'_>> {
        self.mount_at("mount")
    }

    /// The same at a directory of this name, beside other mounts.
    pub fn mount_at(&self, name: &str) -> Result<Mount<'_>> {
        let at = self.places.run.join(format!("{}-{name}", self.system));
        std::fs::create_dir_all(&at)?;
        let Some(mut command) = self.mount_command(&at)? else {
            return Ok(Mount { server: self, at: self.folder.clone(), process: None });
        };
        let log = self.places.run.join(format!("{}-{name}.log", self.system));
        let before = std::fs::metadata(&at)?.dev();
        let mut mount = Mount { server: self, at, process: Some(Background::start(&mut command, &log)?) };
        process::wait_for("the mount", START_LIMIT, || {
            if mount.process.as_mut().map(Background::has_ended).transpose()? == Some(true) {
                bail!("the mount of {} ended: {}", self.system, std::fs::read_to_string(&log).unwrap_or_default());
            }
            let is_mounted = std::fs::metadata(&mount.at).is_ok_and(|now| now.dev() != before);
            Ok((is_mounted && mount.at.join(super::BIG).is_file()).then_some(()))
        })?;
        // byway gives a new mount leases after some milliseconds; before, it keeps nothing.
        process::wait_for("leases", START_LIMIT, || {
            let before = mount.messages();
            std::fs::metadata(mount.at.join(super::BIG))?;
            Ok((mount.messages() == before).then_some(()))
        })?;
        Ok(mount)
    }

    /// How the folder is mounted; `None` where it is used itself.
    fn mount_command(&self, at: &Path) -> Result<Option<Command>> {
        let places = self.places;
        let mut command;
        match self.system {
            System::Local | System::Nbdfuse | System::Volume | System::Direct => return Ok(None),
            System::Byway | System::Names => {
                command = Command::new(&places.byway);
                command.args(["mount", &format!("byway://127.0.0.1:{}/data", byway_port(self.system))]).arg(at);
                if self.system == System::Names {
                    command.args(["--entry-timeout", "1"]);
                }
            }
            System::Gluster => {
                let volume = places.run.join("client.vol");
                std::fs::write(&volume, GLUSTER_CLIENT)?;
                command = Command::new("glusterfs");
                command.args(["--no-daemon", "--log-file"]).arg(places.run.join("client.log"));
                command.arg("--pid-file").arg(places.run.join("client.pid")).arg("--volfile").arg(volume).arg(at);
            }
            System::Sshfs => {
                let program = places.run.join("sftp");
                std::fs::write(&program, format!("#!/bin/sh\nexec {SFTP_SERVER}\n"))?;
                std::fs::set_permissions(&program, Permissions::from_mode(0o755))?;
                command = Command::new("sshfs");
                command.args(["-f", "-o", &format!("ssh_command={}", program.display())]);
                command.arg(format!("localhost:{}", self.folder.display())).arg(at);
            }
            System::Rclone => {
                command = rclone(places);
                command.args(["mount", ":webdav:", "--webdav-url", &format!("http://127.0.0.1:{RCLONE_PORT}")]);
                command.args(["--vfs-cache-mode", "writes", "--vfs-write-back", "0s"]).arg(at);
            }
            System::Passthrough => {
                command = Command::new(&places.passthrough);
                command.arg(&self.folder).arg(at);
            }
        }
        Ok(Some(command))
    }
}

impl Mount<'_> {
    /// CPU time of the client's and the server's processes. sshfs has its server as a child.
    pub fn cpu(&self) -> Result<[Option<CpuClock>; 2]> {
        let of = |process: &Option<Background>| process.as_ref().map(|one| CpuClock::processes(one.id())).transpose();
        Ok([of(&self.process)?, of(&self.server.process)?])
    }

    /// Messages that the client has sent to its server, where it says so.
    pub fn messages(&self) -> Option<u64> {
        let mut value = [0; 32];
        let len = rustix::fs::getxattr(&self.at, "byway.messages", &mut value).ok()?;
        std::str::from_utf8(&value[..len]).ok()?.parse().ok()
    }
}

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        if self.process.is_some() {
            // The directory that this program uses is its own: nothing holds the mount but what has failed.
            let _ = rustix::mount::unmount(&self.at, rustix::mount::UnmountFlags::DETACH);
            let ended = || Ok(self.process.as_mut().map(Background::has_ended).transpose()?.filter(|ended| *ended));
            // One that hangs is killed with its handle.
            let _ = process::wait_for("the end of a mount", Duration::from_secs(5), ended);
        }
    }
}

fn byway_port(system: System) -> u16 {
    if system == System::Names { NAMES_PORT } else { BYWAY_PORT }
}

fn rclone(places: &Places) -> Command {
    let mut command = Command::new("rclone");
    // Nothing of the user's.
    command.env("RCLONE_CONFIG", "/dev/null").env("HOME", &places.run);
    command.arg("--cache-dir").arg(places.data.join("rclone-cache"));
    command
}

fn gluster_server(folder: &Path) -> String {
    let folder = folder.display();
    format!(
        "volume posix\n type storage/posix\n option directory {folder}\nend-volume\n\
         volume locks\n type features/locks\n subvolumes posix\nend-volume\n\
         volume iot\n type performance/io-threads\n option thread-count 4\n subvolumes locks\nend-volume\n\
         volume server\n type protocol/server\n option transport-type tcp\n\
         option transport.socket.bind-address 127.0.0.1\n option transport.socket.listen-port {GLUSTER_PORT}\n\
         option auth.addr.iot.allow 127.0.0.1\n subvolumes iot\nend-volume\n"
    )
}

const GLUSTER_CLIENT: &str = "volume c\n type protocol/client\n option transport-type tcp\n\
     option remote-host 127.0.0.1\n option remote-port 24999\n option remote-subvolume iot\nend-volume\n\
     volume wb\n type performance/write-behind\n subvolumes c\nend-volume\n\
     volume ra\n type performance/read-ahead\n subvolumes wb\nend-volume\n";

/// Fails with the reason if a path has no folder.
pub fn folder_for(system: System, places: &Places) -> Result<PathBuf> {
    let folder = places.data.join(system.to_string());
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}
