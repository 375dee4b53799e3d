//! `peers native`: byway's own protocol beside nbdkit and iperf3, and `peers direct`: byway's direct volumes beside fio on
//! the same file.

use super::cases::CASES;
use super::contest::{Contest, Contestant, Figures, Outcome};
use super::copies::{NBD_PORT, copies};
use super::fio;
use super::servers::{Endpoint, Kind, Server};
use crate::process::{self, Background};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

pub const PORT: u16 = 4711;
const IPERF_PORT: u16 = 5201;

/// The native wire over tcp.
pub fn native(byway: &Path, file: &Path, folder: &Path, rounds: usize, seconds: u32) -> Result<Vec<Outcome>> {
    let nbdkit = Kind::Nbdkit.find(byway).context("nbdkit is not installed (cargo xtask test --install)")?;
    let iperf3 = process::find_program("iperf3").context("iperf3 is not installed (package iperf3)")?;
    let nbd = format!("tcp://127.0.0.1:{NBD_PORT}");
    let _node = start_node_with(byway, &format!("v={},ro", file.display()), folder, &["--nbd", &nbd])?;
    let endpoint = Endpoint::Tcp(Kind::Nbdkit.port());
    let _peer = Server::start(Kind::Nbdkit, &nbdkit, file, folder, std::slice::from_ref(&endpoint))?;
    let _receiver = Background::start(
        Command::new(&iperf3).args(["--server", "--port", &IPERF_PORT.to_string()]),
        &folder.join("iperf3.log"),
    )?;
    wait_for_port(IPERF_PORT)?;
    let small = CASES.iter().find(|case| case.name == "4k-randread-qd32-tcp").context("the case is gone")?;
    let uri = endpoint.uri();
    let fourfold = Contest {
        case: "4k-randread-qd32",
        contestants: vec![
            ours(byway, "randread", 4 << 10, 32, seconds),
            // With the same client, which costs less than fio: else half of what is compared would be the clients.
            Contestant { name: "nbdkit, byway's client", ..by_client(byway, &uri, "randread", 4 << 10, 32, seconds) },
            Contestant {
                name: "nbdkit, fio",
                run: Box::new(|| {
                    let result = fio::run(small, &uri, seconds)?;
                    Ok(Figures {
                        iops: result.iops,
                        megabytes_per_second: result.bytes_per_second / 1e6,
                        latency_p50_us: result.latency_p50_us,
                    })
                }),
            },
        ],
        target: ("nbdkit, byway's client", 4.0),
    };
    let outcome = fourfold.run(rounds)?;
    let stream = |name, file: Option<&Path>| {
        let (iperf3, file) = (iperf3.clone(), file.map(Path::to_path_buf));
        Contestant { name, run: Box::new(move || iperf(&iperf3, file.as_deref(), seconds)) }
    };
    let large = Contest {
        case: "1m-randread-qd8",
        contestants: vec![
            ours(byway, "randread", 1 << 20, 8, seconds),
            stream("iperf3, one buffer", None),
            stream("iperf3, the file", Some(file)),
        ],
        target: ("iperf3, one buffer", 0.95),
    };
    let large = large.run(rounds)?;
    Ok(vec![outcome, large, copies(byway, file, folder, rounds)?])
}

/// A direct volume over the native wire beside fio on the file itself.
pub fn direct(byway: &Path, file: &Path, folder: &Path, rounds: usize, seconds: u32) -> Result<Vec<Outcome>> {
    let _node = start_node(byway, &format!("v={},direct,shared", file.display()), folder)?;
    let mut outcomes = Vec::new();
    for (case, bytes, depth, least) in
        [("1m-randread-qd8-direct", 1 << 20, 8, 0.95), ("4k-randread-qd32-direct", 4 << 10, 32, 0.9)]
    {
        let local = Contestant {
            name: "fio, O_DIRECT",
            run: Box::new(move || {
                let result = fio::run_local(file, "io_uring", "randread", bytes, depth, seconds)?;
                Ok(Figures {
                    iops: result.iops,
                    megabytes_per_second: result.bytes_per_second / 1e6,
                    latency_p50_us: result.latency_p50_us,
                })
            }),
        };
        let contestants = vec![ours(byway, "randread", bytes, depth, seconds), local];
        outcomes.push(Contest { case, contestants, target: ("fio, O_DIRECT", least) }.run(rounds)?);
    }
    Ok(outcomes)
}

fn ours<'a>(byway: &'a Path, pattern: &'static str, block_bytes: u32, depth: u32, seconds: u32) -> Contestant<'a> {
    by_client(byway, &format!("byway://127.0.0.1:{PORT}/v"), pattern, block_bytes, depth, seconds)
}

/// By way of `byway bench volume`.
fn by_client<'a>(
    byway: &'a Path,
    uri: &str,
    pattern: &'static str,
    block_bytes: u32,
    depth: u32,
    seconds: u32,
) -> Contestant<'a> {
    let uri = uri.to_owned();
    let run = move || {
        let text = process::output(
            Command::new(byway)
                .args(["bench", "volume", "--json", "--overwrite", "--rw", pattern])
                .args(["--bs", &block_bytes.to_string(), "--depth", &depth.to_string()])
                .args(["--seconds", &seconds.to_string()])
                .arg(&uri),
        )?;
        let result: Value = serde_json::from_str(&text)?;
        let number = |value: &Value| value.as_f64().context("a figure is missing in byway's JSON");
        Ok(Figures {
            iops: number(&result["requests_per_second"])?,
            megabytes_per_second: number(&result["megabytes_per_second"])?,
            latency_p50_us: number(&result["latency_us"]["p50"])?,
        })
    };
    Contestant { name: "byway, native wire", run: Box::new(run) }
}

fn iperf(iperf3: &Path, file: Option<&Path>, seconds: u32) -> Result<Figures> {
    let mut command = Command::new(iperf3);
    command.args(["--client", "127.0.0.1", "--length", "1M", "--json", "--port", &IPERF_PORT.to_string()]);
    command.args(["--time", &seconds.to_string()]);
    if let Some(file) = file {
        command.arg("--file").arg(file);
    }
    let text = process::output(&mut command)?;
    let result: Value = serde_json::from_str(&text)?;
    let bits = result["end"]["sum_received"]["bits_per_second"].as_f64().context("iperf3 reports no rate")?;
    Ok(Figures { megabytes_per_second: bits / 8e6, ..Figures::default() })
}

pub fn start_node(byway: &Path, volume: &str, folder: &Path) -> Result<Background> {
    start_node_with(byway, volume, folder, &[])
}

/// The same with more arguments.
fn start_node_with(byway: &Path, volume: &str, folder: &Path, more: &[&str]) -> Result<Background> {
    let log = folder.join("native.log");
    let address = format!("tcp://127.0.0.1:{PORT}");
    let mut node = Background::start(
        Command::new(byway).args(["serve", "--volume", volume, "--listen", &address]).args(more),
        &log,
    )?;
    wait_for_port(PORT).with_context(|| std::fs::read_to_string(&log).unwrap_or_default())?;
    if node.has_ended()? {
        bail!("byway ended at once: {}", std::fs::read_to_string(&log).unwrap_or_default());
    }
    Ok(node)
}

pub fn wait_for_port(port: u16) -> Result<()> {
    process::wait_for("a server to accept connections", Duration::from_secs(10), || {
        Ok(std::net::TcpStream::connect(("127.0.0.1", port)).is_ok().then_some(()))
    })
}
