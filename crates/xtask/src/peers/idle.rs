//! `peers idle`: the cost of idle connections, and whether the node's own memory stays bounded.

use super::cpu::CpuClock;
use crate::process;
use anyhow::{Context, Result, ensure};
use byway_fabric::session::{self, Identity, Terms};
use byway_fabric::wire::{HEADER_BYTES, Header, Kind};
use byway_fabric::{ClientId, PayloadChecksum};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;
use zerocopy::IntoBytes;

/// How long they are watched.
const SECONDS: u64 = 10;

/// Opens NBD connections that finish the handshake and then are silent; gives a line for the document.
pub fn nbd(id: u32, port: u16, count: usize) -> Result<String> {
    watch(id, "NBD connections", count, || handshake(port), read_one)
}

/// The same with sessions of byway's own protocol, each with three connections.
pub fn native(id: u32, port: u16, count: usize) -> Result<String> {
    let mut clients = 0u64;
    let open = || {
        clients += 1;
        Session::open(port, clients)
    };
    watch(id, "sessions of byway's own protocol", count, open, Session::ping)
}

fn watch<T>(
    id: u32,
    what: &str,
    count: usize,
    mut open: impl FnMut() -> Result<T>,
    mut prove_alive: impl FnMut(&mut T) -> Result<()>,
) -> Result<String> {
    // One before: what the first connection sets up is not the others' cost.
    let _first = open()?;
    let before = anonymous_bytes(id)?;
    let mut connections = Vec::with_capacity(count);
    for _ in 0..count {
        connections.push(open()?);
    }
    let clock = CpuClock::processes(id)?;
    process::pause(Duration::from_secs(SECONDS));
    let spent_us = CpuClock::processes(id)?.microseconds_since(&clock);
    let after = anonymous_bytes(id)?;
    for connection in &mut connections {
        prove_alive(connection)?;
    }
    let each = after.saturating_sub(before) as f64 / count as f64 / 1024.0;
    let cpu = spent_us / (SECONDS as f64 * 1e6) * 100.0;
    let verdict = |met: bool| if met { "met" } else { "MISSED" };
    Ok(format!(
        "| {count} idle {what} | {each:.1} KiB each (<= 64 {}) | {cpu:.2} % of a core (< 0.5 {}) | {:.1} MiB \
         anonymous in all (< 100 {}) |",
        verdict(each <= 64.0),
        verdict(cpu < 0.5),
        after as f64 / f64::from(1 << 20),
        verdict(after < 100 << 20),
    ))
}

/// A session by hand (docs/wire.md, "Fabric"): lane 0 and two bulk lanes.
struct Session {
    lanes: Vec<TcpStream>,
}

impl Session {
    fn open(port: u16, client: u64) -> Result<Self> {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&client.to_le_bytes());
        let identity = Identity { client: ClientId(id), number: 1, nonce: id };
        let terms = Terms { checksum: PayloadChecksum::Off, bulk_lanes: 2 };
        let mut lanes = Vec::new();
        for number in 0..3 {
            let mut lane = TcpStream::connect(("127.0.0.1", port))?;
            lane.set_read_timeout(Some(Duration::from_secs(10)))?;
            let mut hello = session::hello(&identity, &terms, number);
            hello.seal(0);
            lane.write_all(hello.as_bytes())?;
            let (header, kind) = receive(&mut lane, 0)?;
            session::read_welcome(&header, kind, &identity, &terms)?;
            lanes.push(lane);
        }
        Ok(Self { lanes })
    }

    fn ping(&mut self) -> Result<()> {
        let mut ping = Header::new(Kind::Ping);
        ping.seal(1);
        self.lanes[0].write_all(ping.as_bytes())?;
        let (_, kind) = receive(&mut self.lanes[0], 1).context("an idle session has died")?;
        ensure!(kind == Kind::Pong, "an idle session answers {kind:?} to a ping");
        Ok(())
    }
}

fn receive(lane: &mut TcpStream, sequence: u64) -> Result<(Header, Kind)> {
    let mut bytes = [0; HEADER_BYTES];
    lane.read_exact(&mut bytes)?;
    Ok(Header::open(&bytes, sequence)?)
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
