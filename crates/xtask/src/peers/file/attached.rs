//! Attached volumes: byway's loop device on a file of FUSE beside a loop device on nbdfuse's file, both on a server over TCP.

use super::super::fio;
use super::super::native::wait_for_port;
use super::report::{Sample, Unit};
use super::systems::{Places, System};
use crate::process::{self, Background};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const BYWAY_PORT: u16 = 4715;
const NBDKIT_PORT: u16 = 4716;
const LIMIT: Duration = Duration::from_secs(20);

/// Case, pattern, block size, depth.
const CASES: [(&str, &str, u32, u32, Unit); 3] = [
    ("attached, 4 KiB random read, depth 32", "randread", 4 << 10, 32, Unit::PerSecond),
    ("attached, 1 MiB read, depth 8", "read", 1 << 20, 8, Unit::Megabytes),
    ("attached, 1 MiB write, depth 8", "write", 1 << 20, 8, Unit::Megabytes),
];

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

/// Measures both in turn, once.
pub fn run(places: &Places, seconds: u32) -> Result<Vec<Sample>> {
    let mut samples = Vec::new();
    for system in [System::Byway, System::Nbdfuse] {
        let file = places.data.join("volume");
        std::fs::copy(places.data.join(super::BIG), &file)?;
        let device = match system {
            System::Byway => attach(places, &file)?,
            _ => match nbdfuse(places, &file)? {
                Some(device) => device,
                None => continue,
            },
        };
        for (case, pattern, bytes, depth, unit) in CASES {
            let done = fio::run_local(&device.path, "libaio", pattern, bytes, depth, seconds).context(case)?;
            let value = if unit == Unit::PerSecond { done.iops } else { done.bytes_per_second / 1e6 };
            samples.push(Sample::new(case, system, value, unit));
        }
    }
    Ok(samples)
}

fn attach(places: &Places, file: &Path) -> Result<Device> {
    let listen = format!("tcp://127.0.0.1:{BYWAY_PORT}");
    let mut serve = Command::new(&places.byway);
    serve.args(["serve", "--volume", &format!("v={}", file.display()), "--listen", &listen]);
    let server = Background::start(&mut serve, &places.run.join("volume-server.log"))?;
    wait_for_port(BYWAY_PORT)?;
    let name = format!("peers-{}", std::process::id());
    let mut attach = Command::new(&places.byway);
    attach.args(["attach", "--foreground", "--as", &name, &format!("byway://127.0.0.1:{BYWAY_PORT}/v")]);
    let log = places.run.join("attach.log");
    let process = Background::start(&mut attach, &log)?;
    let mut detach = Command::new(&places.byway);
    detach.args(["detach", &name]);
    let path = Path::new("/dev/byway").join(&name);
    let device = Device { path, end: vec![detach], processes: vec![process, server] };
    process::wait_for("the device", LIMIT, || Ok(device.path.exists().then_some(())))
        .with_context(|| std::fs::read_to_string(&log).unwrap_or_default())?;
    Ok(device)
}

fn nbdfuse(places: &Places, file: &Path) -> Result<Option<Device>> {
    for tool in ["nbdkit", "nbdfuse", "losetup"] {
        if process::find_program(tool).is_none() {
            println!("SKIP nbdfuse: there is no {tool}");
            return Ok(None);
        }
    }
    let mut serve = Command::new("nbdkit");
    serve.args(["--foreground", "--ipaddr", "127.0.0.1", "--port", &NBDKIT_PORT.to_string(), "file"]).arg(file);
    let server = Background::start(&mut serve, &places.run.join("nbdkit.log"))?;
    wait_for_port(NBDKIT_PORT)?;
    let at = places.run.join("nbdfuse");
    std::fs::create_dir_all(&at)?;
    let mut mount = Command::new("nbdfuse");
    mount.arg(&at).arg(format!("nbd://127.0.0.1:{NBDKIT_PORT}"));
    let process = Background::start(&mut mount, &places.run.join("nbdfuse.log"))?;
    let exported = at.join("nbd");
    process::wait_for("nbdfuse", LIMIT, || Ok(exported.is_file().then_some(())))?;
    let mut set = Command::new("losetup");
    let path = process::output(set.args(["--find", "--show", "--direct-io=on"]).arg(&exported))?.trim().to_owned();
    if path.is_empty() {
        bail!("losetup names no device");
    }
    let (mut clear, mut unmount) = (Command::new("losetup"), Command::new("umount"));
    clear.args(["--detach", &path]);
    unmount.arg("--lazy").arg(&at);
    Ok(Some(Device { path: path.into(), end: vec![clear, unmount], processes: vec![process, server] }))
}
