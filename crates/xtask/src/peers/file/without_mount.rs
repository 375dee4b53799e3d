//! Programs on a share without a mount (`byway run`): fio beside `byway bench volume` over the same transport, and beside fio on a mount.

use super::super::fio;
use super::super::nbd_device::Device;
use super::report::{Sample, Unit};
use super::systems::{Places, System};
use crate::process::{self, Background};
use anyhow::{Context, Result};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Where fio finds the share; there is no such folder.
const PREFIX: &str = "/byway-peers";
const PORT: u16 = 4717;
const LIMIT: Duration = Duration::from_secs(20);

/// 1 MiB reads over each transport.
const LARGE: [(&str, &str); 3] = [
    ("tcp", "without a mount, 1 MiB reads, tcp"),
    ("unix", "without a mount, 1 MiB reads, unix"),
    ("shm", "without a mount, 1 MiB reads, shm"),
];
const SMALL: &str = "without a mount, 4 KiB random reads, shm: p50";

/// Measures everything once.
pub fn run(places: &Places, seconds: u32) -> Result<Vec<Sample>> {
    if !places.byway.with_file_name("libbyway_run.so").is_file() {
        println!("SKIP without a mount: no libbyway_run.so beside byway: run `cargo build --release -p byway-run`");
        return Ok(Vec::new());
    }
    let big = places.data.join(super::BIG);
    let socket = |kind: &str| places.run.join(format!("without-mount.{kind}"));
    let mut serve = Command::new(&places.byway);
    serve.args(["serve", "--share", &format!("data={},writers=exclusive,users=trust-root", places.data.display())]);
    serve.args(["--volume", &format!("v={}", big.display()), "--listen", &format!("tcp://127.0.0.1:{PORT}")]);
    for kind in ["unix", "shm"] {
        serve.args(["--listen", &format!("{kind}://{}", socket(kind).display())]);
    }
    let log = places.run.join("without-mount-server.log");
    let _server = Background::start(&mut serve, &log)?;
    // The port may still be that of the round before: the kernel closes a killed server's sockets after its end, with its io_uring.
    process::wait_for("the server", LIMIT, || {
        Ok(std::fs::read_to_string(&log)?.contains("ready byway shm").then_some(()))
    })?;
    let uri = |kind: &str, name: &str| match kind {
        "tcp" => format!("byway://127.0.0.1:{PORT}/{name}"),
        _ => format!("byway+{kind}:///{name}?socket={}", socket(kind).display()),
    };
    let mut samples = Vec::new();
    for (kind, case) in LARGE {
        let done = fio(&mut without_mount(places, &uri(kind, "data")), "read", 1 << 20, seconds).context(case)?;
        samples.push(Sample::new(case, System::Byway, done.bytes_per_second / 1e6, Unit::Megabytes));
        let rate = volume(places, &uri(kind, "v"), seconds).context(case)?;
        samples.push(Sample::new(case, System::Volume, rate, Unit::Megabytes));
    }
    let done = fio(&mut without_mount(places, &uri("shm", "data")), "randread", 4 << 10, seconds).context(SMALL)?;
    samples.push(Sample::new(SMALL, System::Byway, done.latency_p50_us, Unit::Microseconds));
    let mount = mount(places, &uri("shm", "data"))?;
    let done = fio::run_local(&mount.path.join(super::BIG), "psync", "randread", 4 << 10, 1, seconds).context(SMALL)?;
    samples.push(Sample::new(SMALL, System::Direct, done.latency_p50_us, Unit::Microseconds));
    Ok(samples)
}

fn mount(places: &Places, uri: &str) -> Result<Device> {
    let path = places.run.join("with-mount");
    std::fs::create_dir_all(&path)?;
    let mut command = Command::new(&places.byway);
    let process = Background::start(command.args(["mount", uri]).arg(&path), &places.run.join("with-mount.log"))?;
    let mut unmount = Command::new("umount");
    unmount.arg("--lazy").arg(&path);
    let mount = Device { path, end: vec![unmount], processes: vec![process] };
    process::wait_for("the mount", LIMIT, || Ok(mount.path.join(super::BIG).is_file().then_some(())))?;
    Ok(mount)
}

/// A program follows behind `--`.
fn without_mount(places: &Places, uri: &str) -> Command {
    let mut command = Command::new(&places.byway);
    command.args(["run", "--map", &format!("{PREFIX}={uri}"), "--", "fio"]);
    command
}

/// One read at a time, into one buffer.
fn fio(command: &mut Command, pattern: &str, bytes: u32, seconds: u32) -> Result<fio::Outcome> {
    let file = Path::new(PREFIX).join(super::BIG);
    fio::run_with(command.args(["--thread", "--iomem_align=4096"]), &file, "psync", pattern, bytes, 1, seconds)
}

/// MB/s of reads of 1 MiB in order, one at a time.
fn volume(places: &Places, uri: &str, seconds: u32) -> Result<f64> {
    let mut command = Command::new(&places.byway);
    command.args(["bench", "volume", "--json", "--rw", "read", "--bs", "1M", "--depth", "1"]);
    let text = process::output(command.args(["--seconds", &seconds.to_string()]).arg(uri))?;
    let result: Value = serde_json::from_str(&text)?;
    result["megabytes_per_second"].as_f64().context("byway's JSON has no rate")
}
