//! `peers idle`: what connections cost that say nothing, and whether the node's own memory stays bounded.

use super::cpu::CpuClock;
use super::servers::{Endpoint, Server};
use crate::process;
use anyhow::{Context, Result, ensure};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// How long they are watched.
const SECONDS: u64 = 10;

/// Opens connections that finish the handshake and then are silent; gives a line for the document.
pub fn nbd(server: &Server, count: usize) -> Result<String> {
    let Endpoint::Tcp(port) = server.endpoint else { anyhow::bail!("idle connections are counted over tcp") };
    // One before: what the first connection sets up is not the others' cost.
    let _first = handshake(port)?;
    let before = anonymous_bytes(server.id())?;
    let mut connections = Vec::with_capacity(count);
    for _ in 0..count {
        connections.push(handshake(port)?);
    }
    let clock = CpuClock::processes(server.id())?;
    process::pause(Duration::from_secs(SECONDS));
    let spent_us = CpuClock::processes(server.id())?.microseconds_since(&clock);
    let after = anonymous_bytes(server.id())?;
    // They live: each answers a request.
    for stream in &mut connections {
        read_one(stream)?;
    }
    let each = after.saturating_sub(before) as f64 / count as f64 / 1024.0;
    let cpu = spent_us / (SECONDS as f64 * 1e6) * 100.0;
    let verdict = |met: bool| if met { "met" } else { "MISSED" };
    Ok(format!(
        "| {count} idle NBD connections | {each:.1} KiB each (<= 64 {}) | {cpu:.2} % of a core (< 0.5 {}) | {:.1} MiB \
         anonymous in all (< 100 {}) |",
        verdict(each <= 64.0),
        verdict(cpu < 0.5),
        after as f64 / f64::from(1 << 20),
        verdict(after < 100 << 20),
    ))
}

/// Fixed newstyle with `NBD_OPT_EXPORT_NAME` (proto.md, "Fixed newstyle negotiation").
fn handshake(port: u16) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    ensure!(greeting.starts_with(b"NBDMAGICIHAVEOPT"), "that is no NBD server");
    let name = b"volume";
    let mut option = vec![0, 0, 0, 3];
    option.extend_from_slice(b"IHAVEOPT");
    option.extend_from_slice(&1u32.to_be_bytes());
    option.extend_from_slice(&(name.len() as u32).to_be_bytes());
    option.extend_from_slice(name);
    stream.write_all(&option)?;
    stream.read_exact(&mut [0; 10])?;
    Ok(stream)
}

fn read_one(stream: &mut TcpStream) -> Result<()> {
    let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
    request.extend_from_slice(&[0; 20]);
    request.extend_from_slice(&512u32.to_be_bytes());
    stream.write_all(&request)?;
    let mut reply = [0; 16 + 512];
    stream.read_exact(&mut reply).context("an idle connection has died")?;
    ensure!(reply[4..8] == [0; 4], "an idle connection answers with an error");
    Ok(())
}

fn anonymous_bytes(id: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{id}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).context("no RssAnon")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
}
