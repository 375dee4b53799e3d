//! gmblock: how much each path of a block slows down a program that needs the memory bandwidth.

use byway_reactor::Instant;

use super::experiment::{
    Axis, Beside, Check, Data, Description, Experiment, Gathered, Measured, Missing, Plot, Scale, said,
};
use super::gmblock::{KIB, Path, READ_PATHS, start};
use super::load::{Load, Requests};
use super::process::{MemoryProgram, Server, on, two_cpus};
use super::session::{RunError, Session};

/// What a memory-bound program loses beside each path.
pub(super) const SLOW_DOWN: Experiment = Experiment {
    description: Description {
        name: "gmblock-slow-down",
        title: "gmblock: a memory-bound program beside each path",
        source: "Koukis and Koziris, Efficient Block Device Sharing over Myrinet with Memory Bypass (IPDPS 2007), section 4, fig. 8(b)",
        what: "A program that adds two arrays larger than the last-level cache into a third runs on one CPU, the node (and its \
               client, for which there is no second machine) on another, with reads of 512 KiB and 4 outstanding. Time of the \
               program (CPU time: whoever else is given its CPU does not count) and bandwidth of the node, each as a multiple of what it \
               is alone in the same round. All paths move the same: 0.6 of what the slowest of them moves alone; and once more each \
               as much as it can, which is shown and not judged. Beside them, nothing but arithmetic on the node's CPU: what a busy neighbour \
               costs that moves nothing.",
        rule: "Holds if, the paths being offered the same, (1) none moves less than 0.9 of what the others do; (2) the program takes at \
               least 1.05 times as long beside the direct path as alone; (3) beside the bypass its loss of time is at most 0.75 \
               of that beside direct; and (4) it takes at least 1.05 times as long beside direct as beside the arithmetic, so that the \
               loss is for the bytes that move and not for a neighbour that is busy.",
        absent: &[
            "bzip2 on a Pentium III: the program here is limited by memory alone, and caches are larger than its 8 MB.",
            "A client elsewhere: there is no second machine, and the program has the other CPU, so the client runs on the node's \
             CPU. Its copy out of the socket, which the paper's client did elsewhere, moves bytes beside the program for every \
             path alike, and the node has what CPU the client leaves.",
            "Writes: only reads are done beside the program. Of writes the paths end in different things here (a file on the disk, \
             memory), whose rates differ by more than the paths' (gmblock-paths).",
            "Other sizes and depths: the text at hand gives the slow-down of the worst case alone, which is that of 512 KiB.",
            "The disk's own DMA: a virtual disk's bytes are copied into memory by the host, whose CPUs are not seen here.",
        ],
    },
    run,
    judge,
    beside,
};

const TIME: &str = "time of the program";
const BANDWIDTH: &str = "bandwidth of the node";
const SAME: &str = "beside one another, all paths at the same rate";
const FREE: &str = "beside one another, each path as fast as it can";
const RATES: &str = "rates";
const LOSS: &str = "loss by bytes moved";
const AT_SAME: &str = "at the same rate";
const AT_FREE: &str = "as fast as it can";
/// The paths, and the neighbour that moves nothing.
const BESIDE: [&str; 4] = ["copy", "direct", "bypass", "arithmetic"];
const ARITHMETIC: f64 = 3.0;
/// Of what the slowest path moves alone: what it can still move beside the program.
const OFFERED_SHARE: f64 = 0.6;
/// In the first cache of any CPU.
const SMALL_BYTES: u64 = 4 << 10;

/// What is read.
const REQUESTS: Requests = Requests { bytes: 512 * KIB, outstanding: 4, writes: false };

#[derive(Default)]
struct Points {
    same: Gathered,
    free: Gathered,
    rates: Gathered,
    loss: Gathered,
}

fn run(session: &mut Session) -> Result<Measured, RunError> {
    let Some((node_cpu, program_cpu)) = two_cpus() else {
        return Err(RunError::Machine("there is one CPU: the program and the node need one each"));
    };
    let server = start(session, None, Some(node_cpu))?;
    let (array_bytes, passes) = if session.scale.quick { (8 << 20, 4) } else { (128 << 20, 12) };
    let mut program = MemoryProgram::start(array_bytes, program_cpu)?;
    let rounds = if session.scale.quick { session.scale.rounds } else { session.scale.rounds.max(9) };
    let on_node = |act: &mut dyn FnMut() -> Result<f64, RunError>| on(Some(node_cpu), || Ok(act()))?;
    let alone = |path: &Path| {
        on_node(&mut || {
            Ok(Load::open(&server, path.scheme, path.volume)?
                .run(REQUESTS, session.scale.time * 4)?
                .megabytes_per_second)
        })
    };
    // Once, so that its pages are where they stay.
    program.begin(1)?;
    program.end()?;
    let first = READ_PATHS.iter().map(alone).collect::<Result<Vec<_>, _>>()?;
    let offered = first.iter().copied().fold(f64::MAX, f64::min) * OFFERED_SHARE;
    let mut points = Points::default();
    for round in 1..=rounds {
        session.say(&format!("gmblock-slow-down, round {round}"));
        program.begin(passes)?;
        let program_alone = program.end()?.max(1e-9);
        let busy = beside_arithmetic(node_cpu, &mut program, passes)? / program_alone;
        points.same.add(TIME, ARITHMETIC, busy);
        points.free.add(TIME, ARITHMETIC, busy);
        for (at, path) in READ_PATHS.iter().enumerate() {
            let x = at as f64;
            let still = alone(path)?.max(1e-9);
            for rate in [Some(offered), None] {
                let (gathered, name) =
                    if rate.is_some() { (&mut points.same, AT_SAME) } else { (&mut points.free, AT_FREE) };
                let mut seconds = 0.0;
                let moved = on_node(&mut || {
                    let done = beside_program(&server, *path, rate, &mut program, passes)?;
                    seconds = done.program_s;
                    Ok(done.megabytes_per_second)
                })?;
                gathered.add(TIME, x, seconds / program_alone);
                gathered.add(BANDWIDTH, x, moved / rate.unwrap_or(still).max(1e-9));
                points.rates.add(name, x, moved);
                let lost_us = (seconds - program_alone).max(0.0) * 1e6;
                points.loss.add(name, x, lost_us / (moved * seconds).max(1e-9));
            }
            points.rates.add("alone", x, still);
        }
    }
    let setup = vec![
        format!(
            "The node and its client on CPU {node_cpu}, the program on CPU {program_cpu}; three arrays of {} each.",
            byway_remote::units::show_size(array_bytes)
        ),
        format!(
            "{rounds} rounds; in each, the program alone, then beside each path. The rate of all is {offered:.0} MB/s."
        ),
    ];
    Ok(Measured { setup, plots: points.plots() })
}

impl Points {
    fn plots(self) -> Vec<Plot> {
        let plot = |name, title: &str, (label, unit), scale, series: Gathered| Plot {
            name,
            title: title.to_owned(),
            x: Axis { label: "beside", unit: "", scale: Scale::Names(BESIDE.to_vec()) },
            y: Axis { label, unit, scale },
            series: series.series(),
        };
        let over = ("beside over alone", "");
        vec![
            plot(
                SAME,
                "The program and the node beside one another, all paths at the same rate (reads of 512 KiB, 4 outstanding); of the node: \
                 over what it was offered",
                over,
                Scale::Linear,
                self.same,
            ),
            plot(FREE, "The same, each path as fast as it can; over each alone", over, Scale::Linear, self.free),
            plot(RATES, "What the node moves meanwhile", ("bandwidth", "MB/s"), Scale::Linear, self.rates),
            plot(
                LOSS,
                "What the program loses for each megabyte that the node moves",
                ("time lost", "us per MB"),
                Scale::Linear,
                self.loss,
            ),
        ]
    }
}

/// The program's seconds while something computes on the node's CPU and moves nothing.
fn beside_arithmetic(cpu: usize, program: &mut MemoryProgram, passes: u32) -> Result<f64, RunError> {
    let mut neighbour = MemoryProgram::start(SMALL_BYTES, cpu)?;
    // Longer than anybody waits: it ends when it is dropped.
    neighbour.begin(u32::MAX)?;
    program.begin(passes)?;
    program.end()
}

/// What the program and the node did beside one another.
struct SideBySide {
    program_s: f64,
    /// 10^6 bytes a second.
    megabytes_per_second: f64,
}

/// Reads while the program runs, at a rate if one is given.
fn beside_program(
    server: &Server,
    path: Path,
    rate: Option<f64>,
    program: &mut MemoryProgram,
    passes: u32,
) -> Result<SideBySide, RunError> {
    let mut load = Load::open(server, path.scheme, path.volume)?;
    if let Some(rate) = rate {
        load.set_rate(rate);
    }
    let mut began = false;
    let rate = load.drive(REQUESTS, &mut |_: Instant| {
        if !began {
            began = true;
            return program.begin(passes).is_err();
        }
        program.is_done()
    })?;
    Ok(SideBySide { program_s: program.end()?, megabytes_per_second: rate.megabytes_per_second })
}

fn judge(data: &Data<'_>) -> Result<Vec<Check>, Missing> {
    let (direct, bypass) = (data.at(SAME, TIME, 1.0)?, data.at(SAME, TIME, 2.0)?);
    let moved = [0.0, 1.0, 2.0].map(|path| data.at(RATES, AT_SAME, path));
    let [copied, directly, bypassed] = moved;
    let moved = [copied?, directly?, bypassed?];
    let (least, most) = (moved.iter().copied().fold(f64::MAX, f64::min), moved.iter().copied().fold(1e-9, f64::max));
    // Of times, not of losses: what the arithmetic costs is about nothing, and divides nothing.
    let moving = direct / data.at(SAME, TIME, ARITHMETIC)?.max(1e-9);
    let share = (bypass - 1.0).max(0.0) / (direct - 1.0).max(1e-9);
    Ok(vec![
        Check::at_least("what the path that moves least moves, over that which moves most", least / most, 0.9),
        Check::at_least("time of the program beside direct over alone", direct, 1.05),
        Check::at_most("time lost beside the bypass over time lost beside direct", share, 0.75),
        Check::at_least("time of the program beside direct over beside arithmetic", moving, 1.05),
    ])
}

fn beside(data: &Data<'_>) -> Vec<Beside> {
    let time = |at: f64| {
        let [same, free] = [SAME, FREE].map(|plot| said(data.at(plot, TIME, at), "of alone"));
        format!("{same} at the same rate, {free} as fast as it can")
    };
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
        Beside {
            what: "time beside arithmetic that moves nothing",
            place: "",
            paper: "not done",
            here: said(data.at(SAME, TIME, ARITHMETIC), "of alone"),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::super::experiment::{Verdict, made};
    use super::*;

    fn verdict(direct: f64, bypass: f64, slowest: f64) -> &'static str {
        beside_arithmetic_of(1.0, direct, bypass, slowest)
    }

    fn beside_arithmetic_of(arithmetic: f64, direct: f64, bypass: f64, slowest: f64) -> &'static str {
        let plots = [
            made::plot(SAME, &[(TIME, &[(0.0, 1.9), (1.0, direct), (2.0, bypass), (ARITHMETIC, arithmetic)])]),
            made::plot(RATES, &[(AT_SAME, &[(0.0, 400.0), (1.0, slowest), (2.0, 400.0)])]),
        ];
        Verdict::of(judge(&Data(&plots))).word()
    }

    #[test]
    fn the_rule_says_yes_and_no() {
        assert_eq!(verdict(1.7, 1.02, 400.0), "holds");
        assert_eq!(verdict(1.01, 1.0, 400.0), "does not hold", "nothing is lost in any case");
        assert_eq!(verdict(1.7, 1.7, 400.0), "does not hold", "the bypass saves nothing");
        assert_eq!(verdict(1.7, 0.95, 400.0), "holds", "noise below one is no loss");
        assert_eq!(verdict(1.7, 1.02, 200.0), "does not hold", "the paths did not move the same");
        let beside = |arithmetic| beside_arithmetic_of(arithmetic, 1.2, 1.02, 400.0);
        assert_eq!(beside(1.14), "holds");
        assert_eq!(beside(1.19), "does not hold", "a neighbour that moves nothing costs as much");
    }
}
