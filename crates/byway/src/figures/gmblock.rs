//! gmblock: the paths of a block from the disk to the wire, and what they take from a program beside them.

use byway_reactor::Instant;

use super::experiment::{
    Axis, Beside, Check, Data, Description, Experiment, Gathered, Measured, Missing, Plot, Scale, said,
};
use super::load::{Load, Requests};
use super::process::{MemoryProgram, Server, on, two_cpus};
use super::session::{RunError, Session};

const KIB: u64 = 1 << 10;
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
               with 4; (4) staging of 1 MiB costs nothing where it suffices (direct, 256 KiB with 4 outstanding: at least 0.9 \
               of unlimited), and (5) does where it does not (1 MiB with 4: at most 0.9).",
        absent: &[
            "Disk to network card in one hop: no such hardware here. Device memory as staging exists in a guest only, so the \
             bypass is that of the page cache, whose bytes are in memory already when they are asked for.",
            "Writes without a copy: a file's have none. A memory volume receives an NBD write straight into its pages; that is \
             the bypass of writes, over NBD, where the other paths are byway's own wire.",
        ],
    },
    run: run_paths,
    judge: judge_paths,
    beside: beside_paths,
};

/// What a memory-bound program loses beside each path.
pub(super) const SLOW_DOWN: Experiment = Experiment {
    description: Description {
        name: "gmblock-slow-down",
        title: "gmblock: a memory-bound program beside each path",
        source: "Koukis and Koziris, Efficient Block Device Sharing over Myrinet with Memory Bypass (IPDPS 2007), section 4, fig. 8(b)",
        what: "A program that adds two arrays larger than the last-level cache into a third runs on one CPU, the node (and its \
               client, for which there is no second machine) on another, with reads of 512 KiB and 4 outstanding. Time of the \
               program and bandwidth of the node, each as a multiple of what it is alone in the same round.",
        rule: "Holds if (1) the program takes at least 1.05 times as long beside the direct path as alone, and (2) beside the \
               bypass its loss of time is at most 0.75 of that beside direct.",
        absent: &[
            "bzip2 on a Pentium III: the program here is limited by memory alone, and caches are larger than its 8 MB.",
        ],
    },
    run: run_slow_down,
    judge: judge_slow_down,
    beside: beside_slow_down,
};

fn series(path: &str, outstanding: usize) -> String {
    format!("{path}, {outstanding} outstanding")
}

/// A path, the wire to it, and the volume's name.
type Path = (&'static str, &'static str, &'static str);

const READ_PATHS: [Path; 3] =
    [("copy", "byway", "read-copy"), ("direct", "byway", "read-direct"), ("bypass", "byway", "read-bypass")];
const WRITE_PATHS: [Path; 3] =
    [("copy", "byway", "write-copy"), ("direct", "byway", "write-direct"), ("bypass", "nbd", "write-bypass")];

/// A node with a volume for each path.
fn start(session: &Session, staging: Option<&str>, cpu: Option<usize>) -> Result<Server, RunError> {
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
    for door in ["--listen", "--nbd"] {
        arguments.extend([door.to_owned(), "tcp://127.0.0.1:0".to_owned()]);
    }
    if let Some(bytes) = staging {
        arguments.extend(["--staging".to_owned(), bytes.to_owned()]);
    }
    Server::start(&arguments, 2, cpu)
}

fn run_paths(session: &mut Session) -> Result<Measured, RunError> {
    let (free, limited) = (start(session, None, None)?, start(session, Some(STAGING), None)?);
    let sizes = session.scale.points(&SIZES, &SIZES_QUICK);
    // What frames stage: a bypass has no staging to limit.
    let staged = &[READ_PATHS[0], READ_PATHS[1]][..];
    let staged_writes = &[WRITE_PATHS[0], WRITE_PATHS[1]][..];
    let sweeps = [
        (READS, &free, &READ_PATHS[..], false),
        (LIMITED, &limited, staged, false),
        (WRITES, &free, &WRITE_PATHS[..], true),
        (LIMITED_WRITES, &limited, staged_writes, true),
    ];
    let mut gathered: [Gathered; 4] = Default::default();
    for round in 1..=session.scale.rounds {
        for ((title, server, paths, writes), gathered) in sweeps.iter().zip(&mut gathered) {
            session.say(&format!("gmblock-paths, round {round}: {title}"));
            for (path, scheme, volume) in *paths {
                let mut load = Load::open(&server.uri(scheme, volume))?;
                for &bytes in sizes {
                    for outstanding in OUTSTANDING {
                        let requests = Requests { bytes, outstanding, writes: *writes };
                        let rate = load.run(requests, session.scale.time)?;
                        gathered.add(&series(path, outstanding), bytes as f64, rate.megabytes_per_second);
                    }
                }
            }
        }
    }
    let plots = sweeps.iter().zip(gathered).map(|((name, ..), gathered)| Plot {
        name,
        title: format!("Bandwidth by request size: {name}"),
        x: Axis { label: "request", unit: "bytes", scale: Scale::Bytes },
        y: Axis { label: "bandwidth", unit: "MB/s", scale: Scale::Decades },
        series: gathered.series(),
    });
    let setup = vec![
        "One event loop, TCP over loopback, one connection; client and server share the CPUs.".to_owned(),
        format!(
            "Reads: one file of {} for all paths, resident in the page cache for copy and bypass.",
            crate::units::show_size(FILE_BYTES)
        ),
        "Writes: copy and bypass into memory volumes, direct into a file.".to_owned(),
    ];
    Ok(Measured { setup, plots: plots.collect() })
}

fn judge_paths(data: &Data<'_>) -> Result<Vec<Check>, Missing> {
    let at = |plot, path, outstanding, kib: u64| data.at(plot, &series(path, outstanding), (kib * KIB) as f64);
    let ratio = |over: f64, under: f64| over / under.max(1e-9);
    let more = ratio(at(READS, "direct", 4, 64)?, at(READS, "direct", 1, 64)?);
    let two = ratio(at(READS, "bypass", 2, 512)?, at(READS, "direct", 2, 512)?);
    let four = ratio(at(READS, "bypass", 4, 256)?, at(READS, "direct", 4, 256)?);
    let enough = ratio(at(LIMITED, "direct", 4, 256)?, at(READS, "direct", 4, 256)?);
    let scarce = ratio(at(LIMITED, "direct", 4, 1024)?, at(READS, "direct", 4, 1024)?);
    Ok(vec![
        Check::at_least("direct, 64 KiB: 4 outstanding over 1", more, 1.2),
        Check::at_least("512 KiB, 2 outstanding: bypass over direct", two, 1.13),
        Check::at_least("256 KiB, 4 outstanding: bypass over direct", four, 1.13),
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

const TIME: &str = "time of the program";
const BANDWIDTH: &str = "bandwidth of the node";
const BESIDE: [&str; 3] = ["copy", "direct", "bypass"];
const NORMALISED: &str = "beside one another";

fn run_slow_down(session: &mut Session) -> Result<Measured, RunError> {
    let Some((node_cpu, program_cpu)) = two_cpus() else {
        return Err(RunError::Machine("there is one CPU: the program and the node need one each"));
    };
    let server = start(session, None, Some(node_cpu))?;
    let (array_bytes, passes) = if session.scale.quick { (8 << 20, 4) } else { (128 << 20, 12) };
    let mut program = MemoryProgram::start(array_bytes, program_cpu)?;
    let requests = Requests { bytes: 512 * KIB, outstanding: 4, writes: false };
    let rounds = if session.scale.quick { session.scale.rounds } else { session.scale.rounds.max(5) };
    let (mut time, mut bandwidth, mut rates) = (Gathered::default(), Gathered::default(), Gathered::default());
    // Once, so that its pages are where they stay.
    program.begin(1)?;
    program.end()?;
    for round in 1..=rounds {
        session.say(&format!("gmblock-slow-down, round {round}"));
        program.begin(passes)?;
        let alone = program.end()?;
        for (at, (path, scheme, volume)) in READ_PATHS.iter().enumerate() {
            debug_assert_eq!(*path, BESIDE[at]);
            let uri = server.uri(scheme, volume);
            let (beside, rate) = on(Some(node_cpu), || Ok(beside_program(&uri, requests, &mut program, passes)))??;
            let still = on(Some(node_cpu), || {
                Ok(Load::open(&uri).and_then(|mut load| load.run(requests, session.scale.time * 4)))
            })??;
            time.add(TIME, at as f64, beside / alone.max(1e-9));
            let still = still.megabytes_per_second.max(1e-9);
            bandwidth.add(BANDWIDTH, at as f64, rate / still);
            rates.add("beside the program", at as f64, rate);
            rates.add("alone", at as f64, still);
        }
    }
    let mut series = time.series();
    series.extend(bandwidth.series());
    let plot = Plot {
        name: NORMALISED,
        title:
            "The program and the node beside one another, as multiples of each alone (reads of 512 KiB, 4 outstanding)"
                .to_owned(),
        x: Axis { label: "path", unit: "", scale: Scale::Names(BESIDE.to_vec()) },
        y: Axis { label: "beside over alone", unit: "", scale: Scale::Linear },
        series,
    };
    let rates = Plot {
        name: "rates",
        title: "What the node moves meanwhile: a faster path takes more of the memory's bandwidth".to_owned(),
        x: Axis { label: "path", unit: "", scale: Scale::Names(BESIDE.to_vec()) },
        y: Axis { label: "bandwidth", unit: "MB/s", scale: Scale::Linear },
        series: rates.series(),
    };
    let setup = vec![
        format!(
            "The node and its client on CPU {node_cpu}, the program on CPU {program_cpu}; three arrays of {} each.",
            crate::units::show_size(array_bytes)
        ),
        format!("{rounds} rounds; in each, the program alone, then beside each path."),
    ];
    Ok(Measured { setup, plots: vec![plot, rates] })
}

/// Reads while the program runs; gives its seconds and the rate.
fn beside_program(
    uri: &str,
    requests: Requests,
    program: &mut MemoryProgram,
    passes: u32,
) -> Result<(f64, f64), RunError> {
    let mut load = Load::open(uri)?;
    let mut began = false;
    let rate = load.drive(requests, &mut |_: Instant| {
        if !began {
            began = true;
            return program.begin(passes).is_err();
        }
        program.is_done()
    })?;
    Ok((program.end()?, rate.megabytes_per_second))
}

fn judge_slow_down(data: &Data<'_>) -> Result<Vec<Check>, Missing> {
    let (direct, bypass) = (data.at(NORMALISED, TIME, 1.0)?, data.at(NORMALISED, TIME, 2.0)?);
    let share = (bypass - 1.0).max(0.0) / (direct - 1.0).max(1e-9);
    Ok(vec![
        Check::at_least("time of the program beside direct over alone", direct, 1.05),
        Check::at_most("time lost beside the bypass over time lost beside direct", share, 0.75),
    ])
}

fn beside_slow_down(data: &Data<'_>) -> Vec<Beside> {
    let time = |at: f64| said(data.at(NORMALISED, TIME, at), "of alone");
    vec![
        Beside {
            what: "time beside the path through memory, 512 KiB",
            place: "section 4, fig. 8(b): gm-mem-4, the worst case",
            paper: "1.70 of alone",
            here: time(1.0),
        },
        Beside {
            what: "time beside the bypass",
            place: "section 4, fig. 8(b): gm-myri-4",
            paper: "about 1 (41 % better than through memory)",
            here: time(2.0),
        },
        Beside {
            what: "time beside the TCP server",
            place: "fig. 8(b): tcpip-gnbd; its number is not in the text",
            paper: "not given",
            here: time(0.0),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::super::experiment::{Verdict, made};
    use super::*;

    fn paths(bypass: f64, limited: f64) -> [Plot; 2] {
        let kib = |kib: f64| kib * 1024.0;
        let reads = made::plot(
            READS,
            &[
                ("direct, 1 outstanding", &[(kib(64.0), 100.0)]),
                ("direct, 2 outstanding", &[(kib(512.0), 200.0)]),
                ("direct, 4 outstanding", &[(kib(64.0), 150.0), (kib(256.0), 200.0), (kib(1024.0), 200.0)]),
                ("bypass, 2 outstanding", &[(kib(512.0), bypass)]),
                ("bypass, 4 outstanding", &[(kib(256.0), bypass)]),
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
        assert_eq!(verdict(240.0, 199.0), "does not hold", "staging that costs nothing where it is scarce");
        assert_eq!(Verdict::of(judge_paths(&Data(&paths(240.0, 100.0)[..1]))).word(), "could not be run");
    }

    #[test]
    fn the_rule_of_the_slow_down_says_yes_and_no() {
        let verdict = |direct: f64, bypass: f64| {
            let plots = [made::plot(NORMALISED, &[(TIME, &[(0.0, 1.9), (1.0, direct), (2.0, bypass)])])];
            Verdict::of(judge_slow_down(&Data(&plots))).word()
        };
        assert_eq!(verdict(1.7, 1.02), "holds");
        assert_eq!(verdict(1.01, 1.0), "does not hold", "nothing is lost in any case");
        assert_eq!(verdict(1.7, 1.7), "does not hold", "the bypass saves nothing");
        assert_eq!(verdict(1.7, 0.95), "holds", "noise below one is no loss");
    }
}
