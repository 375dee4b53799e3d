//! The measured programs: our two ends, a ping-pong in C, iperf3. UCX's test is in `ucx`.

use crate::process::{self, Background};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::Figures;

const PING_PONG: &str = include_str!("pingpong.c");
/// Every measurement waits for its peer so long.
pub const START_LIMIT: Duration = Duration::from_secs(10);
const IPERF_PORT: u16 = 5201;

/// Our ends: the example `wire` of byway-fabric.
pub struct Ends {
    program: PathBuf,
    folder: PathBuf,
    seconds: f64,
}

/// One of our wires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    Tcp,
    Shared,
}

/// How an end waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    Adaptive,
    Polling,
}

impl Ends {
    /// Builds them, with optimisation.
    pub fn build(folder: &Path, seconds: f64) -> Result<Self> {
        let arguments = ["build", "--release", "--package", "byway-fabric", "--example", "wire"];
        process::run(process::cargo().args(arguments))?;
        let program = process::target_directory()?.join("release/examples/wire");
        Ok(Self { program, folder: folder.to_path_buf(), seconds })
    }

    /// Runs a mode over a wire, against a server of its own.
    pub fn run(&self, wire: Wire, waiting: Waiting, words: &[&str]) -> Result<Figures> {
        let log = self.folder.join("wire.log");
        let socket = self.folder.join("wire.sock");
        let asked = match wire {
            Wire::Tcp => "tcp://127.0.0.1:0".to_owned(),
            Wire::Shared => format!("shm://{}", socket.display()),
        };
        // What polls sockets asks each of them: with io_uring that is two calls where epoll has one.
        let polling: &[&str] = match (waiting, wire) {
            (Waiting::Adaptive, _) => &[],
            (Waiting::Polling, Wire::Tcp) => &["--polling", "--io", "epoll"],
            (Waiting::Polling, Wire::Shared) => &["--polling"],
        };
        let _server = Background::start(Command::new(&self.program).args(["serve", &asked]).args(polling), &log)?;
        let address = process::wait_for("the server's address", START_LIMIT, || {
            let said = std::fs::read_to_string(&log)?;
            Ok(said.lines().find(|line| line.contains("://")).map(str::to_owned))
        })?;
        let mut command = Command::new(&self.program);
        command.arg(words[0]).arg(address).args(&words[1..]).args(polling);
        command.args(["--seconds", &self.seconds.to_string()]);
        let said = process::output(&mut command);
        let _ = std::fs::remove_file(&socket);
        let value: Value = serde_json::from_str(&said?)?;
        let number = |name: &str| value[name].as_f64().with_context(|| format!("{name} is missing"));
        Ok(Figures {
            p50_us: number("p50_us")?,
            megabytes_per_second: number("megabytes_per_second")?,
            cpu_us: number("client_cpu_us")? + number("server_cpu_us")?,
        })
    }

    /// What a copy costs one thread.
    pub fn copy(&self, bytes: usize, depth: usize) -> Result<Figures> {
        let words = ["memcpy", "unix:///", "--bytes", &bytes.to_string(), "--depth", &depth.to_string()];
        let said = process::output(Command::new(&self.program).args(words))?;
        let value: Value = serde_json::from_str(&said)?;
        let number = |name: &str| value[name].as_f64().with_context(|| format!("{name} is missing"));
        let (rate, cpu_us) = (number("megabytes_per_second")?, number("client_cpu_us")?);
        Ok(Figures { megabytes_per_second: rate, cpu_us, p50_us: 0.0 })
    }
}

/// The ping-pong in C.
pub struct PingPong {
    program: PathBuf,
    milliseconds: f64,
}

impl PingPong {
    pub fn build(folder: &Path, seconds: f64) -> Result<Self> {
        let (source, program) = (folder.join("pingpong.c"), folder.join("pingpong"));
        std::fs::write(&source, PING_PONG)?;
        process::output(Command::new("cc").arg("-O2").arg("-o").arg(&program).arg(&source)).context("a C compiler")?;
        Ok(Self { program, milliseconds: seconds * 1e3 })
    }

    pub fn run(&self, wire: &str, ask: usize, answer: usize) -> Result<Figures> {
        let words = [wire, &ask.to_string(), &answer.to_string(), &self.milliseconds.to_string()];
        let said = process::output(Command::new(&self.program).args(words))?;
        let numbers: Vec<f64> = said.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        let [_, p50_us, cpu_us] = numbers[..] else { bail!("{said}") };
        Ok(Figures { p50_us, cpu_us, megabytes_per_second: answer as f64 / p50_us })
    }
}

/// One stream of iperf3, writes of a mebibyte.
pub struct Iperf {
    program: PathBuf,
    _receiver: Background,
    seconds: f64,
}

impl Iperf {
    pub fn start(folder: &Path, seconds: f64) -> Result<Self> {
        let program = process::find_program("iperf3").context("iperf3 is not installed (package iperf3)")?;
        let port = IPERF_PORT.to_string();
        let log = folder.join("iperf3.log");
        let receiver = Background::start(Command::new(&program).args(["--server", "--port", &port]), &log)?;
        process::wait_for("iperf3 to listen", START_LIMIT, || {
            Ok(std::net::TcpStream::connect(("127.0.0.1", IPERF_PORT)).is_ok().then_some(()))
        })?;
        Ok(Self { program, _receiver: receiver, seconds })
    }

    pub fn run(&self) -> Result<Figures> {
        let mut command = Command::new(&self.program);
        command.args(["--client", "127.0.0.1", "--length", "1M", "--json", "--port", &IPERF_PORT.to_string()]);
        command.args(["--time", &(self.seconds.ceil() as u64).to_string()]);
        let result: Value = serde_json::from_str(&process::output(&mut command)?)?;
        let bits = result["end"]["sum_received"]["bits_per_second"].as_f64().context("iperf3 reports no rate")?;
        let share = |name: &str| result["end"]["cpu_utilization_percent"][name].as_f64().unwrap_or(0.0) / 100.0;
        let rate = bits / 8e6;
        let cpu_us = (share("host_total") + share("remote_total")) * 1e6 / (rate / 1.048_576);
        Ok(Figures { megabytes_per_second: rate, cpu_us, p50_us: 0.0 })
    }
}
