//! Attached volumes: byway's loop device on a file of FUSE beside a loop device on nbdfuse's file, both on a server over TCP.

use super::super::fio;
use super::super::native::wait_for_port;
use super::super::nbd_device::{self, Device};
use super::report::{Sample, Unit};
use super::systems::{Places, System};
use crate::process::{self, Background};
use anyhow::{Context, Result};
use std::path::Path;
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

/// Measures both in turn, once.
pub fn run(places: &Places, seconds: u32) -> Result<Vec<Sample>> {
    let mut samples = Vec::new();
    for system in [System::Byway, System::Nbdfuse] {
        let file = places.data.join("volume");
        std::fs::copy(places.data.join(super::BIG), &file)?;
        let device = match system {
            System::Byway => attach(places, &file)?,
            _ => match nbd_device::start(&places.run, NBDKIT_PORT, &["file", &file.display().to_string()])? {
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
