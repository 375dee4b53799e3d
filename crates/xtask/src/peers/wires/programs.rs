//! The programs that are measured: our two ends, a ping-pong in C, UCX's test, iperf3.

use crate::process::{self, Background};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::Figures;

const PING_PONG: &str = include_str!("pingpong.c");
/// Every measurement waits for its peer so long.
const START_LIMIT: Duration = Duration::from_secs(10);
const UCX_PORT: u16 = 13_337;
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
        let rate = value["megabytes_per_second"].as_f64().context("no rate")?;
        Ok(Figures { megabytes_per_second: rate, ..Figures::default() })
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

/// UCX's test of itself; both its ends poll.
pub fn ucx(test: &str, transports: &str, bytes: usize, folder: &Path, seconds: f64) -> Result<Figures> {
    let program = process::find_program("ucx_perftest").context("ucx_perftest is not installed (package ucx-utils)")?;
    let device = if transports == "tcp" { "lo" } else { "all" };
    let rounds = rounds_for(bytes, seconds);
    let command = || {
        let mut command = Command::new(&program);
        command.env("UCX_TLS", transports).env("UCX_NET_DEVICES", device).env("UCX_WARN_UNUSED_ENV_VARS", "n");
        command.args(["-p", &UCX_PORT.to_string(), "-t", test, "-s", &bytes.to_string()]);
        command.args(["-n", &rounds.to_string(), "-w", &(rounds / 10).to_string()]);
        command
    };
    let log = folder.join("ucx.log");
    let _server = Background::start(&mut command(), &log)?;
    process::wait_for("ucx_perftest to listen", START_LIMIT, || {
        // A connection to try it would be taken for the other end.
        let sockets = std::fs::read_to_string("/proc/net/tcp")? + &std::fs::read_to_string("/proc/net/tcp6")?;
        Ok(listens(&sockets, UCX_PORT).then_some(()))
    })?;
    let said = process::output(command().arg("127.0.0.1"))?;
    parse_ucx(&said).with_context(|| format!("ucx_perftest said {said}"))
}

/// Whether one of the kernel's list of sockets listens at a port.
fn listens(sockets: &str, port: u16) -> bool {
    const LISTEN: &str = "0A";
    let local = format!(":{port:04X}");
    sockets.lines().any(|line| {
        let mut words = line.split_whitespace().skip(1);
        words.next().is_some_and(|word| word.ends_with(&local)) && words.nth(1) == Some(LISTEN)
    })
}

fn rounds_for(bytes: usize, seconds: f64) -> u64 {
    // About what fits, at 20 us for each and 2 GB/s.
    let each = 20e-6 + bytes as f64 / 2e9;
    (seconds / each) as u64 + 100
}

/// The last line: operations, median, mean and overall latency in us, rates in MiB/s, mean and overall, messages.
fn parse_ucx(said: &str) -> Option<Figures> {
    let line = said.lines().find(|line| line.starts_with("Final:"))?;
    let numbers: Vec<f64> = line.split_whitespace().skip(1).filter_map(|word| word.parse().ok()).collect();
    let [_, p50_us, _, _, _, overall, ..] = numbers[..] else { return None };
    Some(Figures { p50_us, megabytes_per_second: overall * 1.048_576, cpu_us: 0.0 })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_of_ucx_is_understood() {
        let line = "[thread 0] 8298 7.951 8656.974 973.473 0.01 0.06 111 1088\n\
                    Final:                 20000      0.546    34.051   274.366        1.79       0.22       29367        3645\n";
        let figures = parse_ucx(line).unwrap();
        assert!(
            (figures.p50_us - 0.546).abs() < 1e-9 && (figures.megabytes_per_second - 0.22 * 1.048_576).abs() < 1e-9
        );
        assert!(parse_ucx("nothing").is_none());
    }

    #[test]
    fn a_listener_is_found_by_its_port_and_state() {
        let line = "   0: 00000000:3419 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1\n\
                       1: 0100007F:3420 0100007F:3419 01 00000000:00000000 00:00000000 00000000     0        0 2 1\n";
        assert!(listens(line, 0x3419) && !listens(line, 0x3420) && !listens(line, 0x341a));
    }
}
