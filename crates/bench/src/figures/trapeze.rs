//! Trapeze: fetches from another node's memory, streams of small payloads, and the gain of cut-through.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::cpu::{self, CpuPoints};
use super::experiment::{
    Axis, Beside, Check, Data, Description, Experiment, Gathered, Measured, Missing, Plot, Scale, said,
};
use super::load::{Load, Requests};
use super::process::Server;
use super::session::{RunError, Session};

const KIB: u64 = 1 << 10;
const PAYLOAD: u64 = 8 * KIB;

/// Fetches and streams.
pub(super) const FETCH: Experiment = Experiment {
    description: Description {
        name: "trapeze-fetch",
        title: "Trapeze: pages from remote memory",
        source: "Anderson et al., Cheating the I/O Bottleneck: Network Storage with Trapeze/Myrinet (abstract, 1997), first item",
        what: "Reads from a memory volume of another process over each wire. Latency: one read at a time, 4 KiB to 64 KiB. Bandwidth: \
               reads of 8 KiB, 1 to 64 outstanding. Beside it a plain TCP stream of 8 KiB writes, which is what stands here for \
               the speed of the link.",
        rule: "Holds if, over TCP, (1) a fetch of 4 KiB takes less than 100 us at p50, (2) streams of 8 KiB with 16 outstanding move at \
               least 105 MB/s, and (3) at least 0.66 of the plain stream, which is what 105 MB/s were of a link of 1.28 Gb/s.",
        absent: &[
            "Two machines and a switch: both processes are on one, so that a fetch has two wake-ups and no wire.",
        ],
    },
    run: run_fetch,
    judge: judge_fetch,
    beside: beside_fetch,
};

/// Slices on and off.
pub(super) const CUT_THROUGH: Experiment = Experiment {
    description: Description {
        name: "trapeze-cut-through",
        title: "Trapeze: cut-through delivery",
        source: "Anderson et al., Cheating the I/O Bottleneck: Network Storage with Trapeze/Myrinet (abstract, 1997), first item; \
                 Koukis and Koziris call it synchronized send",
        what: "Reads from a disk past the page cache, with the wire begun while the disk reads the rest (slices of 256 KiB, as byway \
               serves them, and of 64 KiB) and with the wire begun when all is here. Latency: one read at a time. Bandwidth under \
               load: 8 outstanding.",
        rule: "Holds if slices of 256 KiB (1) bring the p50 of an idle read of 1 MiB to at most 0.95 of that without, and (2) \
               under load of such reads cost nothing: at least 0.95 of the bandwidth without.",
        absent: &[
            "Cut-through inside the network card, where Trapeze's firmware pipelines payloads of up to 8 KiB: what is cut here \
             are long reads, between disk and wire, in the node.",
        ],
    },
    run: run_cut_through,
    judge: judge_cut_through,
    beside: beside_cut_through,
};

const LATENCY: &str = "latency of one fetch";
const CPU: &str = "CPU of one fetch";
const STREAM: &str = "streams of 8 KiB";
const PLAIN: &str = "plain TCP stream";
const WIRES: [(&str, &str); 3] = [("TCP", "byway"), ("unix socket", "byway+unix"), ("shared memory", "byway+shm")];

fn run_fetch(session: &mut Session) -> Result<Measured, RunError> {
    let folder = session.folder().display();
    let arguments = [
        "--volume".to_owned(),
        "memory=mem:64M".to_owned(),
        "--listen".to_owned(),
        "tcp://127.0.0.1:0".to_owned(),
        "--listen".to_owned(),
        format!("unix://{folder}/fetch.sock"),
        "--listen".to_owned(),
        format!("shm://{folder}/fetch.shm"),
    ];
    let server = Server::start(&arguments, 3, None)?;
    let sizes = session.scale.points(&[4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB], &[4 * KIB, 8 * KIB]);
    let depths = session.scale.points(&[1, 2, 4, 8, 16, 32, 64], &[1, 16]);
    let (mut latency, mut stream, mut cpu) = (Gathered::default(), Gathered::default(), CpuPoints::default());
    // A memory volume that was never written has no pages.
    let fill = Requests { bytes: 1 << 20, outstanding: 4, writes: true };
    Load::open(&server, "byway", "memory")?.run(fill, session.scale.time)?;
    for round in 1..=session.scale.rounds {
        session.say(&format!("trapeze-fetch, round {round}"));
        for (wire, scheme) in WIRES {
            let mut load = Load::open(&server, scheme, "memory")?;
            for &bytes in sizes {
                let requests = Requests { bytes, outstanding: 1, writes: false };
                let rate = load.run(requests, session.scale.time)?;
                latency.add(wire, bytes as f64, rate.p50_us);
                cpu.add(wire, bytes as f64, &rate);
            }
            for &outstanding in depths {
                let requests = Requests { bytes: PAYLOAD, outstanding, writes: false };
                let rate = load.run(requests, session.scale.time)?;
                stream.add(wire, outstanding as f64, rate.megabytes_per_second);
            }
        }
        let plain = plain_stream(session.scale.time).map_err(RunError::Loop)?;
        for &depth in depths {
            stream.add(PLAIN, depth as f64, plain);
        }
    }
    let payload = || Axis { label: "payload", unit: "bytes", scale: Scale::Bytes };
    let latency = latency_plot(LATENCY, "Latency of one fetch from remote memory, p50", payload(), latency);
    let outstanding = Axis { label: "outstanding", unit: "", scale: Scale::Powers };
    let stream = bandwidth_plot(STREAM, "Bandwidth of streams of 8 KiB payloads", outstanding, stream);
    let setup =
        "One event loop on each side; byway's own protocol, a session of which has two connections for payloads, the plain stream one; \
         waiting is adaptive (a short spin, then sleep)."
            .to_owned();
    let cpu = cpu.plot(CPU, "CPU of one fetch", payload());
    Ok(Measured { setup: vec![setup, cpu::HOW.to_owned()], plots: vec![latency, cpu, stream] })
}

/// About what byway's connections have carried when its streams are measured: bbr starts each with a guess.
const PLAIN_WARM_UP: Duration = Duration::from_secs(1);

/// Writes of 8 KiB into a TCP connection over loopback, read in the same size; 10^6 bytes a second.
fn plain_stream(time: Duration) -> std::io::Result<f64> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let mut to = TcpStream::connect(listener.local_addr()?)?;
    to.set_nodelay(true)?;
    let (mut from, _) = listener.accept()?;
    let received = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&received);
    let reader = std::thread::spawn(move || {
        let mut buffer = vec![0; PAYLOAD as usize];
        while let Ok(bytes @ 1..) = from.read(&mut buffer) {
            count.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    });
    let payload = vec![0x5a; PAYLOAD as usize];
    let mut write_for = |time| {
        let (began, before) = (Instant::now(), received.load(Ordering::Relaxed));
        while began.elapsed() < time {
            to.write_all(&payload)?;
        }
        Ok::<_, std::io::Error>((received.load(Ordering::Relaxed) - before) as f64 / began.elapsed().as_secs_f64())
    };
    write_for(PLAIN_WARM_UP)?;
    let rate = write_for(time)?;
    drop(to);
    reader.join().map_err(|_| std::io::Error::other("the reader of the plain stream ended"))?;
    Ok(rate / 1e6)
}

fn judge_fetch(data: &Data<'_>) -> Result<Vec<Check>, Missing> {
    let fetch = data.at(LATENCY, "TCP", (4 * KIB) as f64)?;
    let (stream, plain) = (data.at(STREAM, "TCP", 16.0)?, data.at(STREAM, PLAIN, 16.0)?);
    Ok(vec![
        Check::at_most("4 KiB over TCP, p50 in us", fetch, 100.0),
        Check::at_least("8 KiB, 16 outstanding, over TCP, MB/s", stream, 105.0),
        Check::at_least("the same over the plain stream", stream / plain.max(1e-9), 0.66),
    ])
}

fn beside_fetch(data: &Data<'_>) -> Vec<Beside> {
    let fetch = |kib: u64| said(data.at(LATENCY, "TCP", (kib * KIB) as f64), "us over TCP");
    let place = "abstract, first item (Intel, Natoma bridge, raw Trapeze)";
    vec![
        Beside { what: "fetch of 4 KiB", place, paper: "under 100 us", here: fetch(4) },
        Beside { what: "fetch of 8 KiB", place: "not in the abstract", paper: "not given", here: fetch(8) },
        Beside {
            what: "streams of 8 KiB",
            place,
            paper: "over 105 MB/s of 160",
            here: said(data.at(STREAM, "TCP", 16.0), "MB/s over TCP"),
        },
        Beside {
            what: "fetch of 4 KiB through shared memory",
            place: "",
            paper: "not done",
            here: said(data.at(LATENCY, "shared memory", (4 * KIB) as f64), "us"),
        },
    ]
}

const IDLE: &str = "idle";
const LOADED: &str = "under load";
const OFF: &str = "off";
const ON: &str = "slices of 256 KiB";
const FINE: &str = "slices of 64 KiB";
/// With what is said to `--slice`. Longer than any read: none.
const VARIANTS: [(&str, Option<&str>); 3] = [(OFF, Some("32M")), (ON, None), (FINE, Some("64K"))];

fn run_cut_through(session: &mut Session) -> Result<Measured, RunError> {
    let bytes = if session.scale.quick { 32 << 20 } else { 256 << 20 };
    let file = session.image("read", bytes)?.display().to_string();
    let start = |slice: Option<&str>| {
        let volume = format!("disk=\"{file}\",ro,direct");
        let arguments = ["--volume", &volume, "--listen", "tcp://127.0.0.1:0"].map(str::to_owned);
        let changes = slice.map(|slice| ["--slice", slice]);
        Server::start_changed(changes.as_ref().map_or(&[], |changes| &changes[..]), &arguments, 1, None)
    };
    let servers: Vec<_> = VARIANTS.iter().map(|(_, slice)| start(*slice)).collect::<Result<_, _>>()?;
    let sizes = session.scale.points(&[256 * KIB, 512 * KIB, 1024 * KIB], &[1024 * KIB]);
    let (mut idle, mut loaded) = (Gathered::default(), Gathered::default());
    // Latencies of a disk spread: more rounds, and longer ones.
    let rounds = if session.scale.quick { session.scale.rounds } else { session.scale.rounds.max(5) };
    for round in 1..=rounds {
        session.say(&format!("trapeze-cut-through, round {round}"));
        for ((name, _), server) in VARIANTS.iter().zip(&servers) {
            let mut load = Load::open(server, "byway", "disk")?;
            for &bytes in sizes {
                let one = load.run(Requests { bytes, outstanding: 1, writes: false }, session.scale.time * 3)?;
                idle.add(name, bytes as f64, one.p50_us);
                let many = load.run(Requests { bytes, outstanding: 8, writes: false }, session.scale.time * 3)?;
                loaded.add(name, bytes as f64, many.megabytes_per_second);
            }
        }
    }
    let size = || Axis { label: "request", unit: "bytes", scale: Scale::Bytes };
    let idle = latency_plot(IDLE, "Latency of one read from disk, p50", size(), idle);
    let loaded = bandwidth_plot(LOADED, "Bandwidth of reads from disk, 8 outstanding", size(), loaded);
    let setup = format!("O_DIRECT, byway's own protocol, TCP over loopback; {rounds} rounds.");
    Ok(Measured { setup: vec![setup], plots: vec![idle, loaded] })
}

fn latency_plot(name: &'static str, title: &str, x: Axis, latencies: Gathered) -> Plot {
    let y = Axis { label: "latency", unit: "us", scale: Scale::Linear };
    Plot { name, title: title.to_owned(), x, y, series: latencies.series() }
}

fn bandwidth_plot(name: &'static str, title: &str, x: Axis, bandwidths: Gathered) -> Plot {
    let y = Axis { label: "bandwidth", unit: "MB/s", scale: Scale::Linear };
    Plot { name, title: title.to_owned(), x, y, series: bandwidths.series() }
}

fn judge_cut_through(data: &Data<'_>) -> Result<Vec<Check>, Missing> {
    let ratio = |plot| {
        let (on, off) = (data.at(plot, ON, (1024 * KIB) as f64)?, data.at(plot, OFF, (1024 * KIB) as f64)?);
        Ok(on / off.max(1e-9))
    };
    Ok(vec![
        Check::at_most("idle, 1 MiB: p50 with slices over p50 without", ratio(IDLE)?, 0.95),
        Check::at_least("under load, 1 MiB: bandwidth with slices over bandwidth without", ratio(LOADED)?, 0.95),
    ])
}

fn beside_cut_through(data: &Data<'_>) -> Vec<Beside> {
    let pair = |plot, unit: &str| {
        let at = |series| said(data.at(plot, series, (1024 * KIB) as f64), unit);
        format!("{} with, {} without", at(ON), at(OFF))
    };
    let place = "abstract, first item: no numbers with and without";
    vec![
        Beside { what: "latency, idle, 1 MiB", place, paper: "least for large payloads", here: pair(IDLE, "us") },
        Beside { what: "bandwidth under load, 1 MiB", place, paper: "stays high", here: pair(LOADED, "MB/s") },
    ]
}

#[cfg(test)]
mod tests {
    use super::super::experiment::{Verdict, made};
    use super::*;

    #[test]
    fn the_rule_of_the_fetch_says_yes_and_no() {
        let verdict = |fetch: f64, stream: f64, plain: f64| {
            let latency = made::plot(LATENCY, &[("TCP", &[(4096.0, fetch)])]);
            let streams = made::plot(STREAM, &[("TCP", &[(16.0, stream)]), (PLAIN, &[(16.0, plain)])]);
            Verdict::of(judge_fetch(&Data(&[latency, streams]))).word()
        };
        assert_eq!(verdict(30.0, 900.0, 1000.0), "holds");
        assert_eq!(verdict(130.0, 900.0, 1000.0), "does not hold");
        assert_eq!(verdict(30.0, 90.0, 100.0), "does not hold");
        assert_eq!(verdict(30.0, 900.0, 2000.0), "does not hold");
    }

    #[test]
    fn the_rule_of_cut_through_says_yes_and_no() {
        let verdict = |latency: f64, bandwidth: f64| {
            let at = 1_048_576.0;
            let idle = made::plot(IDLE, &[(ON, &[(at, latency)]), (OFF, &[(at, 1000.0)])]);
            let loaded = made::plot(LOADED, &[(ON, &[(at, bandwidth)]), (OFF, &[(at, 1000.0)])]);
            Verdict::of(judge_cut_through(&Data(&[idle, loaded]))).word()
        };
        assert_eq!(verdict(830.0, 1000.0), "holds");
        assert_eq!(verdict(990.0, 1000.0), "does not hold", "nothing is gained");
        assert_eq!(verdict(830.0, 800.0), "does not hold", "it costs bandwidth");
    }

    #[test]
    fn a_plain_stream_has_a_rate() {
        assert!(plain_stream(Duration::from_millis(5)).unwrap() > 0.0);
    }
}
