//! gmblock: the paths of a block from the disk to the wire. `slow_down` measures their effect on a program beside them.

use super::cpu::{self, CpuPoints};
use super::experiment::{
    Axis, Beside, Check, Data, Description, Experiment, Gathered, Measured, Missing, Plot, Scale, ratio_by_round, said,
};
use super::load::{Load, Requests};
use super::process::Server;
use super::session::{RunError, Session};

pub(super) const KIB: u64 = 1 << 10;
const FILE_BYTES: u64 = 256 << 20;
/// The paper's: what its network card had for staging.
const STAGING: &str = "1M";
/// Below all volumes' ends, so that it is never done: a store with a rule is read and written by way of frames.
const NEVER: &str = "any=eio@1T+1";

const SIZES: [u64; 11] =
    [KIB, 2 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, 1024 * KIB];
const SIZES_QUICK: [u64; 4] = [64 * KIB, 256 * KIB, 512 * KIB, 1024 * KIB];
const OUTSTANDING: [usize; 3] = [1, 2, 4];

const READS: &str = "reads";
const WRITES: &str = "writes";
const LIMITED: &str = "reads, staging of 1M";
const LIMITED_WRITES: &str = "writes, staging of 1M";
/// In the order in which they are measured: of reads, of those with a limit, of writes, of those with a limit.
const CPU: [&str; 4] = ["CPU, reads", "CPU, reads, staging of 1M", "CPU, writes", "CPU, writes, staging of 1M"];

/// Request size, outstanding requests, staging and path against bandwidth.
pub(super) const PATHS: Experiment = Experiment {
    description: Description {
        name: "gmblock-paths",
        title: "gmblock: three paths from the disk to the wire",
        source: "Koukis and Koziris, Efficient Block Device Sharing over Myrinet with Memory Bypass (IPDPS 2007), section 4, fig. 8(a)",
        what: "Consecutive requests of 1 KiB to 1 MiB to a block volume, 1, 2 or 4 outstanding, by three paths. Copy: from the page \
               cache into frames, then into the socket (the paper's TCP server). Direct: by O_DIRECT from the disk into frames, \
               then into the socket (its GM server, through memory). Bypass: from the page cache to the socket without a copy in \
               user space; what stands here for its disk-to-card path, which needs device memory. With staging unlimited (64 MiB \
               of frames), and limited to 1 MiB as in the paper.",
        rule: "Holds if, for reads, (1) direct of 64 KiB with 4 outstanding moves at least 1.2 times what it moves with 1; (2) \
               bypass moves at least 1.13 times what direct moves, of 512 KiB with 2 outstanding; (3) so it does of 256 KiB \
               with 4; (4) so it does of what copy moves, whose bytes come from the page cache as well, of 256 KiB with 4; (5) staging \
               of 1 MiB costs nothing where it suffices (direct, 256 KiB with 4 outstanding: at least 0.9 of unlimited), and (6) \
               does where it does not (1 MiB with 4: at most 0.9).",
        absent: &[
            "Disk to network card in one hop: no such hardware here. Device memory as staging exists in a guest only, so the \
             bypass is that of the page cache, whose bytes are in memory already when they are asked for: (2) and (3) compare memory \
             with a disk.",
            "A client elsewhere: it shares the node's CPUs, so that what it does to receive is taken from the node.",
            "Writes without a copy: a file's have none. A memory volume receives an NBD write straight into its pages; that is \
             the bypass of writes, over NBD, where the other paths are byway's own protocol.",
        ],
    },
    run: run_paths,
    judge: judge_paths,
    beside: beside_paths,
};

fn series(path: &str, outstanding: usize) -> String {
    format!("{path}, {outstanding} outstanding")
}

/// A path of a block.
#[derive(Clone, Copy)]
pub(super) struct Path {
    name: &'static str,
    /// The wire to the node.
    pub(super) scheme: &'static str,
    pub(super) volume: &'static str,
}

pub(super) const READ_PATHS: [Path; 3] = [
    Path { name: "copy", scheme: "byway", volume: "read-copy" },
    Path { name: "direct", scheme: "byway", volume: "read-direct" },
    Path { name: "bypass", scheme: "byway", volume: "read-bypass" },
];
const WRITE_PATHS: [Path; 3] = [
    Path { name: "copy", scheme: "byway", volume: "write-copy" },
    Path { name: "direct", scheme: "byway", volume: "write-direct" },
    Path { name: "bypass", scheme: "nbd", volume: "write-bypass" },
];

/// A node with a volume for each path.
pub(super) fn start(session: &Session, staging: Option<&str>, cpu: Option<usize>) -> Result<Server, RunError> {
    let bytes = if session.scale.quick { 32 << 20 } else { FILE_BYTES };
    let read = session.image("read", bytes)?.display().to_string();
    let suffix = staging.unwrap_or("all");
    let write = session.image(&format!("write-{suffix}"), bytes / 4)?.display().to_string();
    let volumes = [
        format!("read-copy=fault:{NEVER}:\"{read}\",ro"),
        format!("read-direct=\"{read}\",ro,direct"),
        format!("read-bypass=\"{read}\",ro"),
        format!("write-copy=fault:{NEVER}:mem:64M"),
        format!("write-direct=\"{write}\",direct"),
        "write-bypass=mem:64M".to_owned(),
    ];
    let mut arguments: Vec<String> = volumes.into_iter().flat_map(|volume| ["--volume".to_owned(), volume]).collect();
    for frontend in ["--listen", "--nbd"] {
        arguments.extend([frontend.to_owned(), "tcp://127.0.0.1:0".to_owned()]);
    }
    let changes = staging.map(|bytes| ["--staging", bytes]);
    Server::start_changed(changes.as_ref().map_or(&[], |changes| &changes[..]), &arguments, 2, cpu)
}

/// Requests of all sizes over some paths of a server.
struct Sweep<'a> {
    /// Of its plot.
    name: &'static str,
    server: &'a Server,
    paths: &'a [Path],
    writes: bool,
}

fn run_paths(session: &mut Session) -> Result<Measured, RunError> {
    let (free, limited) = (start(session, None, None)?, start(session, Some(STAGING), None)?);
    let sizes = session.scale.points(&SIZES, &SIZES_QUICK);
    // What frames stage: a bypass has no staging to limit.
    let staged = &[READ_PATHS[0], READ_PATHS[1]][..];
    let staged_writes = &[WRITE_PATHS[0], WRITE_PATHS[1]][..];
    let sweeps = [
        Sweep { name: READS, server: &free, paths: &READ_PATHS, writes: false },
        Sweep { name: LIMITED, server: &limited, paths: staged, writes: false },
        Sweep { name: WRITES, server: &free, paths: &WRITE_PATHS, writes: true },
        Sweep { name: LIMITED_WRITES, server: &limited, paths: staged_writes, writes: true },
    ];
    let mut gathered: [Gathered; 4] = Default::default();
    let mut cpu: [CpuPoints; 4] = Default::default();
    // Shares of a tenth are judged: more rounds than that.
    let rounds = if session.scale.quick { session.scale.rounds } else { session.scale.rounds.max(5) };
    for round in 1..=rounds {
        for (at, kind) in [(0, READS), (2, WRITES)] {
            session.say(&format!("gmblock-paths, round {round}: {kind}"));
            for path in 0..READ_PATHS.len() {
                // With and without a limit side by side: what else the machine does falls on both.
                let pair = [at, at + 1].into_iter().filter_map(|sweep| Some((sweep, sweeps[sweep].paths.get(path)?)));
                let open = |(sweep, path): (usize, &Path)| {
                    Load::open(sweeps[sweep].server, path.scheme, path.volume).map(|load| (sweep, load))
                };
                let mut loads = pair.map(open).collect::<Result<Vec<_>, _>>()?;
                for &bytes in sizes {
                    for outstanding in OUTSTANDING {
                        for (sweep, load) in &mut loads {
                            let requests = Requests { bytes, outstanding, writes: sweeps[*sweep].writes };
                            let rate = load.run(requests, session.scale.time)?;
                            let path = sweeps[*sweep].paths[path].name;
                            gathered[*sweep].add(&series(path, outstanding), bytes as f64, rate.megabytes_per_second);
                            if outstanding == 1 {
                                cpu[*sweep].add(path, bytes as f64, &rate);
                            }
                        }
                    }
                }
            }
        }
    }
    let request = || Axis { label: "request", unit: "bytes", scale: Scale::Bytes };
    let plots = sweeps.iter().zip(gathered).map(|(sweep, gathered)| Plot {
        name: sweep.name,
        title: format!("Bandwidth by request size: {}", sweep.name),
        x: request(),
        y: Axis { label: "bandwidth", unit: "MB/s", scale: Scale::Decades },
        series: gathered.series(),
    });
    let cpu = sweeps.iter().zip(CPU).zip(cpu).map(|((sweep, name), points)| {
        points.plot(name, format!("CPU of one request, 1 outstanding: {}", sweep.name), request())
    });
    let setup = vec![
        "One event loop, TCP over loopback, one connection; client and server share the CPUs.".to_owned(),
        cpu::HOW.to_owned(),
        format!(
            "Reads: one file of {} for all paths, resident in the page cache for copy and bypass.",
            byway_remote::units::show_size(FILE_BYTES)
        ),
        "Writes: copy and bypass into memory volumes, direct into a file.".to_owned(),
        format!("{rounds} rounds; each point with staging of 1M follows its own without a limit."),
    ];
    Ok(Measured { setup, plots: plots.chain(cpu).collect() })
}

fn judge_paths(data: &Data<'_>) -> Result<Vec<Check>, Missing> {
    let at = |plot, path, outstanding, kib: u64| data.at(plot, &series(path, outstanding), (kib * KIB) as f64);
    let ratio = |over: f64, under: f64| over / under.max(1e-9);
    let more = ratio(at(READS, "direct", 4, 64)?, at(READS, "direct", 1, 64)?);
    let two = ratio(at(READS, "bypass", 2, 512)?, at(READS, "direct", 2, 512)?);
    let four = ratio(at(READS, "bypass", 4, 256)?, at(READS, "direct", 4, 256)?);
    let cached = ratio(at(READS, "bypass", 4, 256)?, at(READS, "copy", 4, 256)?);
    let limited = |kib: u64| {
        let rounds = |plot| data.rounds(plot, &series("direct", 4), (kib * KIB) as f64);
        Ok(ratio_by_round(rounds(LIMITED)?, rounds(READS)?))
    };
    let (enough, scarce) = (limited(256)?, limited(1024)?);
    Ok(vec![
        Check::at_least("direct, 64 KiB: 4 outstanding over 1", more, 1.2),
        Check::at_least("512 KiB, 2 outstanding: bypass over direct", two, 1.13),
        Check::at_least("256 KiB, 4 outstanding: bypass over direct", four, 1.13),
        Check::at_least("256 KiB, 4 outstanding: bypass over copy", cached, 1.13),
        Check::at_least("direct, 256 KiB, 4 outstanding: staging of 1 MiB over unlimited", enough, 0.9),
        Check::at_most("direct, 1 MiB, 4 outstanding: staging of 1 MiB over unlimited", scarce, 0.9),
    ])
}

fn beside_paths(data: &Data<'_>) -> Vec<Beside> {
    let at = |plot, path, outstanding, kib: u64| data.at(plot, &series(path, outstanding), (kib * KIB) as f64);
    let more = |path: &'static str, over: &'static str, outstanding, kib| {
        let percent = at(READS, path, outstanding, kib)
            .and_then(|path| at(READS, over, outstanding, kib).map(|over| (path / over.max(1e-9) - 1.0) * 100.0));
        said(percent, "%")
    };
    let rate = |path, outstanding, kib| said(at(READS, path, outstanding, kib), "MB/s");
    vec![
        Beside {
            what: "through memory, 256 KiB, 4 outstanding",
            place: "section 4: gm-mem-4, at most",
            paper: "177 MB/s",
            here: rate("direct", 4, 256),
        },
        Beside {
            what: "bypass, 256 KiB, 4 outstanding",
            place: "section 4: gm-myri-4",
            paper: "194.6 MB/s",
            here: rate("bypass", 4, 256),
        },
        Beside {
            what: "bypass over through memory, 256 KiB, 4 outstanding",
            place: "section 4",
            paper: "14 % more",
            here: more("bypass", "direct", 4, 256),
        },
        Beside {
            what: "bypass over through memory, 512 KiB, 2 outstanding",
            place: "section 4",
            paper: "13 % more (36.5 % on the slower bus, fig. 9)",
            here: more("bypass", "direct", 2, 512),
        },
        Beside {
            what: "TCP server, the best of all sizes",
            place: "section 4: GNBD",
            paper: "68 MB/s",
            here: said(
                data.points(READS, &series("copy", 4))
                    .map(|points| points.iter().fold(0.0, |best: f64, (_, rate)| best.max(*rate))),
                "MB/s",
            ),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::super::experiment::{Verdict, made};
    use super::*;

    fn paths(bypass: f64, limited: f64) -> [Plot; 2] {
        paths_with_copy(bypass, limited, 150.0)
    }

    fn paths_with_copy(bypass: f64, limited: f64, copy: f64) -> [Plot; 2] {
        let kib = |kib: f64| kib * 1024.0;
        let reads = made::plot(
            READS,
            &[
                ("direct, 1 outstanding", &[(kib(64.0), 100.0)]),
                ("direct, 2 outstanding", &[(kib(512.0), 200.0)]),
                ("direct, 4 outstanding", &[(kib(64.0), 150.0), (kib(256.0), 200.0), (kib(1024.0), 200.0)]),
                ("bypass, 2 outstanding", &[(kib(512.0), bypass)]),
                ("bypass, 4 outstanding", &[(kib(256.0), bypass)]),
                ("copy, 4 outstanding", &[(kib(256.0), copy)]),
            ],
        );
        let staged = [("direct, 4 outstanding", &[(kib(256.0), 195.0), (kib(1024.0), limited)][..])];
        [reads, made::plot(LIMITED, &staged)]
    }

    #[test]
    fn the_rule_of_the_paths_says_yes_and_no() {
        let verdict = |bypass, limited| Verdict::of(judge_paths(&Data(&paths(bypass, limited)))).word();
        assert_eq!(verdict(240.0, 100.0), "holds");
        assert_eq!(verdict(210.0, 100.0), "does not hold", "a bypass that is hardly faster");
        let copy = Verdict::of(judge_paths(&Data(&paths_with_copy(240.0, 100.0, 240.0))));
        assert_eq!(copy.word(), "does not hold", "a bypass that saves nothing");
        assert_eq!(verdict(240.0, 199.0), "does not hold", "staging that costs nothing where it is scarce");
        assert_eq!(Verdict::of(judge_paths(&Data(&paths(240.0, 100.0)[..1]))).word(), "could not be run");
    }
}
