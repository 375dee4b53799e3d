//! Network memory, as GMS and Trapeze/GMS had it: pages of a program in another node's memory.

use std::hint::black_box;
use std::time::{Duration, Instant};

use byway_frontend::far_memory::{FarMemory, FarMemoryError, FarMemoryOptions};
use byway_remote::RemoteUri;
use byway_service::memory::pool::Class;

use super::cpu::ThreadTimes;
use super::experiment::{
    Axis, Beside, Check, Data, Description, Experiment, Gathered, Measured, Missing, Plot, Scale, said,
};
use super::load::{Load, Requests};
use super::process::Server;
use super::session::{RunError, Session};
use crate::statistics::median;

const PAGE: usize = 4096;

/// Of the memory that is paged; the rest is at the node that lends.
const RESIDENT: usize = 4 << 20;

/// A touch that takes longer was a fault.
const FAULT: Duration = Duration::from_micros(3);

pub(super) const NETWORK_MEMORY: Experiment = Experiment {
    description: Description {
        name: "network-memory",
        title: "GMS: pages of a program in network memory",
        source: "Feeley et al., Implementing Global Memory Management in a Workstation Cluster (SOSP 1995); Anderson et al., Trapeze/GMS \
                 (USENIX 1998)",
        what: "A program touches memory of which 4 MiB are here, and the rest is lent by another process. Latency of a touch that waits \
               for a page, at random: of 4 KiB, and of 8 KiB, which are two pages side by side. What such a fault is made of: a fault \
               of a new page (trap, pager, install) and a get of 4 KiB (wire). A scan in order, where pages are fetched ahead, and \
               touches of the same pages at random, where none are. CPU of the node that lends, for each fault.",
        rule: "Holds if, over TCP, (1) a fault takes at most 1.25 of a new page's fault and a get together, (2) a scan moves at least \
               97 MB/s, which Trapeze/GMS had, (3) and at least twice what touches at random do, and (4) the lender's CPU is at most \
               194 us a transfer.",
        absent: &[
            "Two machines and a wire: both processes are on one.",
            "The papers' global replacement: the program's pages lie at a lender of its own.",
        ],
    },
    run,
    judge,
    beside,
};

const LATENCY: &str = "latency of a fault";
const PARTS: &str = "parts of a fault";
const BANDWIDTH: &str = "bandwidth";
const LENDER: &str = "CPU of the lender";
const WIRES: [(&str, &str); 2] = [("TCP", "byway"), ("shared memory", "byway+shm")];
/// A new page's fault needs no wire; what a fault takes beyond it and a get is the rest.
const PART_NAMES: [&str; 3] = ["trap, pager, install: a new page's fault", "wire: a get of 4 KiB", "the rest"];
const WAYS: [&str; 2] = ["in order", "at random"];

/// A program's far memory, every page of which begins with its number.
struct Pages {
    memory: FarMemory,
    random: u64,
}

impl Pages {
    /// Maps them, and measures faults of new pages: their median in microseconds.
    fn new(server: &Server, scheme: &str, bytes: usize) -> Result<(Self, f64), RunError> {
        let uri: RemoteUri = server.uri(scheme, "").parse().map_err(byway_remote::RemoteError::from)?;
        let lenders = vec![uri.resolve().map_err(byway_remote::RemoteError::from)?];
        let options = FarMemoryOptions {
            bytes,
            resident_bytes: RESIDENT,
            lenders,
            class: Class::None,
            spill: None,
            encrypt: false,
        };
        let memory = FarMemory::open(options).map_err(|error| match error {
            FarMemoryError::Userfault(_) => RunError::Machine("this machine hands no page faults over: run it as root"),
            error => RunError::Fabric(error.to_string()),
        })?;
        let mut pages = Self { memory, random: 88_172_645_463_325_252 };
        let new: Vec<f64> = (0..200).filter_map(|_| pages.touch_at_random(1)).map(micros).collect();
        for (number, page) in pages.memory.bytes_mut().as_chunks_mut::<PAGE>().0.iter_mut().enumerate() {
            page[..8].copy_from_slice(&(number as u64).to_le_bytes());
        }
        Ok((pages, median(&new)))
    }

    fn count(&self) -> usize {
        self.memory.len() / PAGE
    }

    /// Touches so many pages side by side; how long, if it was a fault.
    fn touch_at_random(&mut self, side_by_side: usize) -> Option<Duration> {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let first = self.random as usize % (self.count() / side_by_side) * side_by_side;
        let began = Instant::now();
        for page in first..first + side_by_side {
            black_box(self.memory.bytes()[page * PAGE]);
        }
        Some(began.elapsed()).filter(|took| *took > FAULT)
    }

    /// Touches at random for a time: the median of the faults in microseconds, and how many there were.
    fn faults(&mut self, side_by_side: usize, time: Duration) -> (f64, usize) {
        let began = Instant::now();
        let mut faults = Vec::new();
        while began.elapsed() < time || faults.is_empty() {
            faults.extend(self.touch_at_random(side_by_side).map(micros));
        }
        (median(&faults), faults.len())
    }

    /// Reads all pages in order, and checks them: 10^6 bytes a second.
    fn scan(&self) -> Result<f64, RunError> {
        let began = Instant::now();
        for (number, page) in self.memory.bytes().as_chunks::<PAGE>().0.iter().enumerate() {
            if page[..8] != (number as u64).to_le_bytes() {
                return Err(RunError::Machine("a page came back with other bytes"));
            }
        }
        Ok(self.memory.len() as f64 / began.elapsed().as_secs_f64() / 1e6)
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn run(session: &mut Session) -> Result<Measured, RunError> {
    let shm = format!("shm://{}/lender.shm", session.folder().display());
    let flags =
        ["--lend", "512M,guard=0", "--volume", "memory=mem:16M", "--listen", "tcp://127.0.0.1:0", "--listen", &shm];
    let server = Server::start(&flags.map(str::to_owned), 2, None)?;
    let bytes = if session.scale.quick { 16 << 20 } else { 64 << 20 };
    let (mut latency, mut parts, mut bandwidth, mut lender) =
        (Gathered::default(), Gathered::default(), Gathered::default(), Gathered::default());
    let time = session.scale.time * 3;
    Load::open(&server, "byway", "memory")?.run(Requests { bytes: 1 << 20, outstanding: 4, writes: true }, time)?;
    for round in 1..=session.scale.rounds {
        session.say(&format!("network-memory, round {round}"));
        for (at, (wire, scheme)) in WIRES.into_iter().enumerate() {
            let (mut pages, new) = Pages::new(&server, scheme, bytes)?;
            // The first brings changed pages out; after it pages leave unchanged.
            pages.scan()?;
            bandwidth.add(wire, 0.0, pages.scan()?);
            let before = ThreadTimes::of(server.id());
            let (fault, count) = pages.faults(1, time);
            if let Some((before, after)) = before.zip(ThreadTimes::of(server.id())) {
                lender.add(wire, PAGE as f64, micros(after.since(&before)) / count as f64);
            }
            let random = count as f64 * PAGE as f64 / micros(time).max(fault);
            bandwidth.add(wire, 1.0, random);
            latency.add(wire, PAGE as f64, fault);
            latency.add(wire, 2.0 * PAGE as f64, pages.faults(2, time).0);
            let requests = Requests { bytes: PAGE as u64, outstanding: 1, writes: false };
            let get = Load::open(&server, scheme, "memory")?.run(requests, time)?;
            let rest = (fault - new - get.p50_us).max(0.0);
            for (name, part) in PART_NAMES.into_iter().zip([new, get.p50_us, rest]) {
                parts.add(name, at as f64, part);
            }
        }
    }
    let axis = |label, unit, scale| Axis { label, unit, scale };
    let time_of_one = || axis("time", "us", Scale::Linear);
    let size = || axis("touched", "bytes", Scale::Bytes);
    let plot = |name, title: &str, x, y, series: Gathered| Plot {
        name,
        title: title.to_owned(),
        x,
        y,
        series: series.series(),
    };
    let parts_axis = axis("", "", Scale::Parts(WIRES.map(|(wire, _)| wire).to_vec()));
    let ways = axis("touched", "", Scale::Names(WAYS.to_vec()));
    let mut plots = vec![
        plot(LATENCY, "Touch of far memory that waits, p50", size(), time_of_one(), latency),
        plot(PARTS, "What a fault is made of, p50", parts_axis, time_of_one(), parts),
        plot(BANDWIDTH, "Reads of far memory by one thread", ways, axis("bandwidth", "MB/s", Scale::Linear), bandwidth),
    ];
    let lender = plot(LENDER, "CPU of the lender for each fault", size(), axis("CPU", "us", Scale::Linear), lender);
    plots.extend((!lender.series.is_empty()).then_some(lender));
    let setup = format!(
        "{} MiB of memory, of which {} MiB are here; its pager is a thread of the program. Pages are only read, so they leave without a \
         transfer. One event loop lends; waiting is adaptive on both sides.",
        bytes >> 20,
        RESIDENT >> 20
    );
    Ok(Measured { setup: vec![setup], plots })
}

fn judge(data: &Data<'_>) -> Result<Vec<Check>, Missing> {
    let fault = data.at(LATENCY, "TCP", PAGE as f64)?;
    let parts = data.at(PARTS, PART_NAMES[0], 0.0)? + data.at(PARTS, PART_NAMES[1], 0.0)?;
    let (scan, random) = (data.at(BANDWIDTH, "TCP", 0.0)?, data.at(BANDWIDTH, "TCP", 1.0)?);
    let mut checks = vec![
        Check::at_most("fault over TCP, of a new page's and a get", fault / parts, 1.25),
        Check::at_least("scan over TCP, MB/s", scan, 97.0),
        Check::at_least("scan, of touches at random", scan / random.max(1e-9), 2.0),
    ];
    // A kernel that counts no other process's time leaves this question out.
    if let Ok(us) = data.at(LENDER, "TCP", PAGE as f64) {
        checks.push(Check::at_most("CPU of the lender for a fault over TCP, us", us, 194.0));
    }
    Ok(checks)
}

fn beside(data: &Data<'_>) -> Vec<Beside> {
    let fault = |pages: usize| said(data.at(LATENCY, "TCP", (pages * PAGE) as f64), "us over TCP");
    vec![
        Beside {
            what: "fetch of 4 KiB",
            place: "Trapeze/GMS",
            paper: "under 100 us (the fetch alone)",
            here: fault(1),
        },
        Beside {
            what: "fetch of 8 KiB",
            place: "SOSP 1995",
            paper: "1.44 ms (ATM), disk 3.6 to 14.3 ms",
            here: fault(2),
        },
        Beside {
            what: "sequential read of network memory",
            place: "Trapeze/GMS",
            paper: "50 MB/s, bound by the CPU; 97 MB/s later",
            here: said(data.at(BANDWIDTH, "TCP", 0.0), "MB/s over TCP"),
        },
        Beside {
            what: "CPU of an idle lender for a transfer",
            place: "SOSP 1995",
            paper: "194 us (56 % at 2,880 transfers/s)",
            here: said(data.at(LENDER, "TCP", PAGE as f64), "us over TCP"),
        },
        Beside {
            what: "the same through shared memory",
            place: "",
            paper: "not done",
            here: said(data.at(LENDER, "shared memory", PAGE as f64), "us"),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::super::experiment::{Verdict, made};
    use super::*;

    #[test]
    fn the_rule_says_yes_and_no() {
        let verdict = |fault: f64, scan: f64, random: f64, cpu: f64| {
            let latency = made::plot(LATENCY, &[("TCP", &[(4096.0, fault)])]);
            let parts = made::plot(PARTS, &[(PART_NAMES[0], &[(0.0, 10.0)]), (PART_NAMES[1], &[(0.0, 20.0)])]);
            let bandwidth = made::plot(BANDWIDTH, &[("TCP", &[(0.0, scan), (1.0, random)])]);
            let lender = made::plot(LENDER, &[("TCP", &[(4096.0, cpu)])]);
            Verdict::of(judge(&Data(&[latency, parts, bandwidth, lender]))).word()
        };
        assert_eq!(verdict(35.0, 800.0, 100.0, 12.0), "holds");
        assert_eq!(verdict(40.0, 800.0, 100.0, 12.0), "does not hold", "more than its parts");
        assert_eq!(verdict(35.0, 90.0, 10.0, 12.0), "does not hold", "slower than the paper's");
        assert_eq!(verdict(35.0, 150.0, 100.0, 12.0), "does not hold", "nothing comes ahead");
        assert_eq!(verdict(35.0, 800.0, 100.0, 200.0), "does not hold", "the lender works");
    }
}
