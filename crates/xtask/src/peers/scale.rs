//! `peers scale`: how the rate of byway's own protocol grows with clients and loops. Each client is a process of `byway bench volume`; all of a
//! run begin together. The nodes serve one file on tmpfs, mapped, so that no disk is measured. Beside that: one client on one loop
//! at more depths, for shared memory against TCP; and durable writes by NBD to a file on a disk, which decision 30 is about.

use super::cpu::CpuClock;
use super::report::median;
use crate::process::{self, Background};
use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The port of the first node; each other has the next.
const PORT: u16 = 4720;
/// Sizes of requests in bytes, each with how many are in flight.
const SIZES: [(u32, u32); 3] = [(4 << 10, 32), (64 << 10, 16), (1 << 20, 8)];
/// More depths, of one client on one loop.
const DEPTHS: [u32; 2] = [1, 32];
const WIRES: [Wire; 3] = [Wire::Tcp, Wire::Unix, Wire::Shm];
/// Durable writes are random ones of this size, in a file of the other.
const DURABLE_BLOCK_BYTES: u32 = 4 << 10;
const DURABLE_FILE_BYTES: u64 = 16 << 20;
const DURABLE_DEPTHS: [u32; 3] = [1, 8, 32];
/// Of n clients on n loops, against n times one client on one loop.
const SHARE_MIN: f64 = 0.9;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Wire {
    Tcp,
    Unix,
    Shm,
    /// NBD over a Unix socket, for durable writes.
    Durable,
}

/// A node with so many loops, on all wires.
struct Node {
    loops: u16,
    port: u16,
    unix: PathBuf,
    shm: PathBuf,
    nbd: PathBuf,
    process: Background,
}

/// What is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Case {
    wire: Wire,
    block_bytes: u32,
    depth: u32,
    clients: u16,
    loops: u16,
}

/// What one run gave, or the medians of several.
#[derive(Clone, Copy, Debug, Serialize)]
struct Figures {
    /// Of all clients together.
    requests_per_second: f64,
    megabytes_per_second: f64,
    /// Of the slowest client.
    latency_p50_us: f64,
    /// Busy cores of the node and of all clients.
    node_cores: f64,
    client_cores: f64,
}

/// A case with its medians.
#[derive(Debug, Serialize)]
pub struct Row {
    case: Case,
    figures: Figures,
}

/// Cases with each number of clients on each node, and with one client on one loop at more depths.
fn cases<'a>(nodes: &'a [Node], clients: &[u16]) -> Vec<(Case, &'a Node)> {
    let mut cases = Vec::new();
    let on_each = |wire, block_bytes, depth| {
        nodes.iter().flat_map(move |node| {
            let case = move |clients: &u16| Case { wire, block_bytes, depth, clients: *clients, loops: node.loops };
            clients.iter().map(move |clients| (case(clients), node))
        })
    };
    for wire in WIRES {
        for (block_bytes, depth) in SIZES {
            cases.extend(on_each(wire, block_bytes, depth));
            for more in DEPTHS.into_iter().filter(|more| *more != depth) {
                cases.extend(on_each(wire, block_bytes, more).filter(|(case, _)| case.clients == 1 && case.loops == 1));
            }
        }
    }
    for depth in DURABLE_DEPTHS {
        // A connection for each loop.
        let durable = on_each(Wire::Durable, DURABLE_BLOCK_BYTES, depth);
        cases.extend(durable.filter(|(case, _)| case.clients == case.loops));
    }
    cases
}

/// Where the files of the nodes are.
#[derive(Clone, Copy)]
pub struct Places<'a> {
    /// Served for reads.
    pub file: &'a Path,
    /// For sockets and logs.
    pub folder: &'a Path,
    /// A folder on a disk, for durable writes.
    pub disk: &'a Path,
}

/// What is to be measured.
#[derive(Clone, Copy)]
pub struct Plan<'a> {
    pub clients: &'a [u16],
    pub loops: &'a [u16],
    /// A part of the names of cases.
    pub only: Option<&'a str>,
    pub rounds: usize,
    /// Of one measurement.
    pub seconds: u32,
}

/// Runs all combinations in turns.
pub fn run(byway: &Path, places: Places<'_>, plan: Plan<'_>) -> Result<Vec<Row>> {
    let Plan { clients, loops, only, rounds, seconds } = plan;
    let nodes = (PORT..).zip(loops).map(|(port, loops)| Node::start(byway, places, *loops, port));
    let nodes = nodes.collect::<Result<Vec<_>>>()?;
    let mut cases = cases(&nodes, clients);
    cases.retain(|(case, _)| only.is_none_or(|part| case.name().contains(part)));
    if cases.is_empty() || rounds == 0 {
        bail!("nothing to measure: cases have names such as `tcp 64 KiB`");
    }
    let mut all: Vec<Vec<Figures>> = vec![Vec::new(); cases.len()];
    for round in 1..=rounds {
        for ((case, node), figures) in cases.iter().zip(&mut all) {
            let one = measure(byway, case, node, seconds).with_context(|| format!("{case:?}"))?;
            eprintln!(
                "round {round}: {:<20} {} clients, {} loops: {:>9.0} IOPS {:>7.0} MB/s",
                case.name(),
                case.clients,
                case.loops,
                one.requests_per_second,
                one.megabytes_per_second
            );
            figures.push(one);
        }
    }
    Ok(cases.iter().zip(&all).map(|((case, _), figures)| Row { case: *case, figures: middle(figures) }).collect())
}

impl Node {
    fn start(byway: &Path, places: Places<'_>, loops: u16, port: u16) -> Result<Self> {
        let Places { file, folder, disk } = places;
        let path = |wire: &str| folder.join(format!("{wire}{loops}"));
        let (unix, shm, nbd, log) = (path("unix"), path("shm"), path("nbd"), path("log"));
        let durable = disk.join(format!("durable{loops}"));
        std::fs::write(&durable, vec![1; DURABLE_FILE_BYTES as usize])
            .with_context(|| format!("cannot write {}", durable.display()))?;
        let mut process = Background::start(
            Command::new(byway)
                .args(["serve", "--volume", &format!("v={},ro", file.display()), "--threads", &loops.to_string()])
                .args(["--volume", &format!("d={}", durable.display()), "--nbd", &format!("unix://{}", nbd.display())])
                .args(["--listen", &format!("tcp://127.0.0.1:{port}")])
                .args(["--listen", &format!("unix://{}", unix.display())])
                .args(["--listen", &format!("shm://{}", shm.display())]),
            &log,
        )?;
        process::wait_for("a node to listen", Duration::from_secs(10), || {
            if process.has_ended()? {
                bail!("byway ended at once: {}", std::fs::read_to_string(&log).unwrap_or_default());
            }
            let listens = unix.exists() && shm.exists() && std::net::TcpStream::connect(("127.0.0.1", port)).is_ok();
            Ok(listens.then_some(()))
        })?;
        Ok(Self { loops, port, unix, shm, nbd, process })
    }

    fn uri(&self, wire: Wire) -> String {
        match wire {
            Wire::Tcp => format!("byway://127.0.0.1:{}/v", self.port),
            Wire::Unix => format!("byway+unix:///v?socket={}", self.unix.display()),
            Wire::Shm => format!("byway+shm:///v?socket={}", self.shm.display()),
            Wire::Durable => format!("nbd+unix:///d?socket={}", self.nbd.display()),
        }
    }
}

impl Case {
    fn name(&self) -> String {
        let wire = format!("{:?}", self.wire).to_lowercase();
        format!("{wire} {} KiB depth {}", self.block_bytes >> 10, self.depth)
    }

    /// Whether it is the same over TCP.
    fn is_tcp_of(&self, other: &Self) -> bool {
        other.wire == Wire::Shm && *self == Self { wire: Wire::Tcp, ..*other }
    }

    /// Whether it is the same with one client and one loop.
    fn is_base_of(&self, other: &Self) -> bool {
        *self == Self { clients: 1, loops: 1, ..*other }
    }
}

fn measure(byway: &Path, case: &Case, node: &Node, seconds: u32) -> Result<Figures> {
    let (of_node, of_children) = (CpuClock::processes(node.process.id())?, CpuClock::children()?);
    let started = Instant::now();
    let work: &[&str] = match case.wire {
        Wire::Durable => &["--rw", "randwrite", "--durable", "--overwrite"],
        _ => &["--rw", "randread"],
    };
    let start = |_| -> Result<Child> {
        Command::new(byway)
            .args(["bench", "volume", "--json", "--bs", &case.block_bytes.to_string()])
            .args(work)
            .args(["--depth", &case.depth.to_string(), "--seconds", &seconds.to_string()])
            .arg(node.uri(case.wire))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start a client")
    };
    let clients: Vec<Child> = (0..case.clients).map(start).collect::<Result<_>>()?;
    let done = clients.into_iter().map(Child::wait_with_output).collect::<std::io::Result<Vec<_>>>()?;
    let took_us = started.elapsed().as_secs_f64() * 1e6;
    let cores = |now: &CpuClock, before: &CpuClock| now.microseconds_since(before) / took_us;
    let mut sum = Figures {
        requests_per_second: 0.0,
        megabytes_per_second: 0.0,
        latency_p50_us: 0.0,
        node_cores: cores(&CpuClock::processes(node.process.id())?, &of_node),
        client_cores: cores(&CpuClock::children()?, &of_children),
    };
    for one in done {
        if !one.status.success() {
            bail!("a client failed: {}", String::from_utf8_lossy(&one.stderr));
        }
        let result: Value = serde_json::from_slice(&one.stdout)?;
        let number = |value: &Value| value.as_f64().context("a figure is missing in byway's JSON");
        sum.requests_per_second += number(&result["requests_per_second"])?;
        sum.megabytes_per_second += number(&result["megabytes_per_second"])?;
        sum.latency_p50_us = sum.latency_p50_us.max(number(&result["latency_us"]["p50"])?);
    }
    Ok(sum)
}

fn middle(figures: &[Figures]) -> Figures {
    let of = |field: fn(&Figures) -> f64| median(figures.iter().map(field).collect());
    Figures {
        requests_per_second: of(|one| one.requests_per_second),
        megabytes_per_second: of(|one| one.megabytes_per_second),
        latency_p50_us: of(|one| one.latency_p50_us),
        node_cores: of(|one| one.node_cores),
        client_cores: of(|one| one.client_cores),
    }
}

/// Rows as a table for a document. With as many loops as clients, the rate of reads as a multiple of one pair's is judged; so is
/// that shared memory is faster than TCP.
pub fn markdown(rows: &[Row]) -> String {
    let mut text =
        "| case | clients | loops | IOPS | MB/s | p50 us | node's cores | clients' cores | of one pair | of tcp |\n\
                    |---|---|---|---|---|---|---|---|---|---|\n"
            .to_owned();
    for Row { case, figures } in rows {
        let base = rows.iter().find(|row| row.case.is_base_of(case));
        let ratio = base.map(|base| figures.requests_per_second / base.figures.requests_per_second);
        let verdict = ratio.map_or(String::new(), |ratio| {
            let least = SHARE_MIN * f64::from(case.clients);
            let judged = case.clients == case.loops && case.clients > 1 && case.wire != Wire::Durable;
            match (judged, ratio >= least) {
                (false, _) => format!("{ratio:.2}"),
                (true, true) => format!("{ratio:.2}, >= {least:.1} met"),
                (true, false) => format!("{ratio:.2}, >= {least:.1} MISSED"),
            }
        });
        let tcp = rows.iter().find(|row| row.case.is_tcp_of(case));
        let of_tcp = tcp.map_or(String::new(), |tcp| {
            let ratio = figures.requests_per_second / tcp.figures.requests_per_second;
            format!("{ratio:.2}{}", if ratio > 1.0 { "" } else { ", > 1 MISSED" })
        });
        let _ = writeln!(
            text,
            "| {} | {} | {} | {:.0} | {:.0} | {:.0} | {:.2} | {:.2} | {verdict} | {of_tcp} |",
            case.name(),
            case.clients,
            case.loops,
            figures.requests_per_second,
            figures.megabytes_per_second,
            figures.latency_p50_us,
            figures.node_cores,
            figures.client_cores,
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_judged_against_one_pair_of_the_same_wire_and_size() {
        let row = |wire, clients, loops, requests_per_second| Row {
            case: Case { wire, block_bytes: 4096, depth: 32, clients, loops },
            figures: Figures {
                requests_per_second,
                megabytes_per_second: 1.0,
                latency_p50_us: 2.0,
                node_cores: 0.5,
                client_cores: 0.25,
            },
        };
        let rows = [
            row(Wire::Tcp, 1, 1, 100.0),
            row(Wire::Tcp, 2, 1, 150.0),
            row(Wire::Tcp, 2, 2, 181.0),
            row(Wire::Shm, 1, 1, 1000.0),
            row(Wire::Shm, 2, 2, 1700.0),
            row(Wire::Shm, 2, 1, 149.0),
            row(Wire::Durable, 1, 1, 10.0),
            row(Wire::Durable, 2, 2, 14.0),
        ];
        let text = markdown(&rows);
        for line in [
            "| tcp 4 KiB depth 32 | 2 | 1 | 150 | 1 | 2 | 0.50 | 0.25 | 1.50 |  |",
            "| 2 | 2 | 181 | 1 | 2 | 0.50 | 0.25 | 1.81, >= 1.8 met |  |",
            "| 2 | 2 | 1700 | 1 | 2 | 0.50 | 0.25 | 1.70, >= 1.8 MISSED | 9.39 |",
            "| 2 | 1 | 149 | 1 | 2 | 0.50 | 0.25 | 0.15 | 0.99, > 1 MISSED |",
            "| durable 4 KiB depth 32 | 2 | 2 | 14 | 1 | 2 | 0.50 | 0.25 | 1.40 |  |",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
    }
}
