//! Dalessandro and Wyckoff: a file sent with static, dynamic and cached registration, and with none.

use byway_fabric::registration::measured::{FileSender, MeasureError, SendSizes, Way};

use super::experiment::{
    Axis, Beside, Check, Data, Description, Experiment, Gathered, Measured, Missing, Plot, Scale, ratio_by_round, said,
};
use super::session::{RunError, Session};

const PAGE: usize = 4 << 10;
/// In the file that is sent from, round and round.
const FILE_PAGES: usize = 16 << 10;
/// Of a file that is sent in pieces: the longest four times in each pipe.
const SENT_PAGES: usize = PIPES_MAX * 4 * 256;
const PIPES_MAX: usize = 6;
const PAGES: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];
const PAGES_QUICK: [usize; 3] = [1, 16, 256];

/// Registration, pipelining and the length of a piece against throughput, and the memory that each holds.
pub(super) const SENDFILE: Experiment = Experiment {
    description: Description {
        name: "sendfile",
        title: "RDMA sendfile: ways to register what is sent",
        source: "Dalessandro and Wyckoff, Memory Management Strategies for Data Serving with RDMA (HotI 2007, slides), Traditional \
                 Approach to Memory Usage",
        what: "A file in memory sent over TCP to a receiver that reads it. Static: read into a buffer that is registered. Dynamic: its \
               mapped pages registered for each piece, and deregistered. Cached: registered once, found by a registration cache. \
               Sendfile: spliced, nothing registered. Beside them a buffer that is registered and filled before the clock \
               starts. No pipelining: the file has as many pages as the x-axis says and goes in one piece. With 1, 2 or 6 pipes: \
               a file of 24 MiB goes in pieces of so many pages, so many in hand at a time. The receiver answers each file.",
        rule: "Holds if (1) large operations are needed: dynamic with 1 pipe of 256 pages moves at least twice what it moves with 1 \
               page; (2) two pipes improve it: at least 1.1 times one pipe, at 16 pages; (3) more do not: 6 pipes move at most \
               1.15 times what 2 move, at 16 and at 256 pages; (4) sendfile moves at least as much as dynamic with 6 pipes of \
               256 pages; (5) without pipelining static beats dynamic at 1 page, and (6) holds more memory than sendfile with 6 \
               pipes of 256 pages.",
        absent: &[
            "An RDMA network card: the device is the table of fixed buffers of an io_uring and its zero-copy send; over loopback the \
             kernel copies all the same. Over soft-RoCE, in a guest, the verbs are shown to be right, not fast.",
            "A second machine: sender and receiver share the CPUs, so that there is little to overlap a registration with.",
        ],
    },
    run,
    judge,
    beside,
};

const WAYS: [(&str, Way); 5] = [
    ("no registration", Way::Unregistered),
    ("static", Way::Static),
    ("dynamic", Way::Dynamic),
    ("cached", Way::Cached),
    ("sendfile", Way::Sendfile),
];

/// Pieces in hand at a time, and what is plotted of it.
struct Pipelining {
    /// The plot of the throughput, and how it is said.
    rate: &'static str,
    said: &'static str,
    /// The plot of the memory.
    memory: &'static str,
    pipes: usize,
    /// Whether a file goes in pieces.
    in_pieces: bool,
}

const PIPELINING: [Pipelining; 4] = [
    Pipelining { rate: "none", said: "without pipelining", memory: "memory, none", pipes: 1, in_pieces: false },
    Pipelining { rate: "1 pipe", said: "with 1 pipe", memory: "memory, 1 pipe", pipes: 1, in_pieces: true },
    Pipelining { rate: "2 pipes", said: "with 2 pipes", memory: "memory, 2 pipes", pipes: 2, in_pieces: true },
    Pipelining { rate: "6 pipes", said: "with 6 pipes", memory: MEMORY, pipes: PIPES_MAX, in_pieces: true },
];
const MEMORY: &str = "memory, 6 pipes";

fn run(session: &mut Session) -> Result<Measured, RunError> {
    let failed = |error: MeasureError| RunError::Fabric(error.to_string());
    let sender = FileSender::new(FILE_PAGES * PAGE, PIPES_MAX * 256 * PAGE).map_err(failed)?;
    let mut rates: [Gathered; 4] = Default::default();
    let mut memory: [Gathered; 4] = Default::default();
    let rounds = if session.scale.quick { session.scale.rounds } else { session.scale.rounds.max(5) };
    let mut setup = vec![format!(
        "A file of {} in memory, of which the next part is sent each time; TCP (reno, which does not pace) over loopback; the receiver \
         is a thread; {rounds} rounds.",
        byway_remote::units::show_size((FILE_PAGES * PAGE) as u64)
    )];
    // What is refused once is refused again: the limit on locked memory, most likely.
    let mut refused: Vec<&str> = Vec::new();
    for round in 1..=rounds {
        for ((how, rates), memory) in PIPELINING.iter().zip(&mut rates).zip(&mut memory) {
            session.say(&format!("sendfile, round {round}: {}", how.rate));
            for &pages in session.scale.points(&PAGES, &PAGES_QUICK) {
                let file_pages = if how.in_pieces { SENT_PAGES } else { pages };
                let (file_bytes, piece_bytes) = (file_pages * PAGE, pages * PAGE);
                let sizes = SendSizes { file_bytes, piece_bytes, pipes: how.pipes };
                for (name, way) in WAYS {
                    if refused.contains(&name) {
                        continue;
                    }
                    match sender.run(way, sizes, session.scale.time) {
                        Ok(sent) => {
                            let rate = sent.bytes as f64 / sent.time.as_secs_f64().max(1e-9) / 1e6;
                            rates.add(name, pages as f64, rate);
                            memory.add(name, pages as f64, sent.held_bytes as f64 / 1024.0);
                        }
                        Err(error) => {
                            setup.push(format!("{name}: {error}"));
                            refused.push(name);
                        }
                    }
                }
            }
        }
    }
    let pages = || Axis { label: "pages", unit: "4 KiB", scale: Scale::Powers };
    let of = |how: &Pipelining| if how.in_pieces { "a piece" } else { "a file" };
    let rate = |(how, gathered): (&Pipelining, Gathered)| Plot {
        name: how.rate,
        title: format!("Throughput {}, by the pages of {}", how.said, of(how)),
        x: pages(),
        y: Axis { label: "throughput", unit: "MB/s", scale: Scale::Linear },
        series: gathered.series(),
    };
    let held = |(how, gathered): (&Pipelining, Gathered)| Plot {
        name: how.memory,
        title: format!(
            "Memory that a connection holds {}, by the pages of {}: pages pinned, or referred to by a pipe",
            how.said,
            of(how)
        ),
        x: pages(),
        y: Axis { label: "held at most", unit: "KiB", scale: Scale::Decades },
        series: gathered.series(),
    };
    let rates = PIPELINING.iter().zip(rates).map(rate);
    let plots = rates.chain(PIPELINING.iter().zip(memory).map(held)).collect();
    setup.push("Held: static and no registration their buffers, at all times; dynamic what is registered at a time; cached the \
                whole file, as long as it is cached; sendfile what is in its pipes, which is the page cache's."
        .to_owned());
    Ok(Measured { setup, plots })
}

fn judge(data: &Data<'_>) -> Result<Vec<Check>, Missing> {
    let at = |plot, way, pages: u32| data.at(plot, way, f64::from(pages));
    let ratio = |over: f64, under: f64| over / under.max(1e-9);
    let large = ratio(at("1 pipe", "dynamic", 256)?, at("1 pipe", "dynamic", 1)?);
    let two = ratio(at("2 pipes", "dynamic", 16)?, at("1 pipe", "dynamic", 16)?);
    let six = |pages| Ok(ratio(at("6 pipes", "dynamic", pages)?, at("2 pipes", "dynamic", pages)?));
    let sendfile =
        ratio_by_round(data.rounds("6 pipes", "sendfile", 256.0)?, data.rounds("6 pipes", "dynamic", 256.0)?);
    let first = ratio_by_round(data.rounds("none", "static", 1.0)?, data.rounds("none", "dynamic", 1.0)?);
    let held = ratio(at(MEMORY, "static", 256)?, at(MEMORY, "sendfile", 256)?);
    Ok(vec![
        Check::at_least("dynamic, 1 pipe: 256 pages over 1", large, 2.0),
        Check::at_least("dynamic, 16 pages: 2 pipes over 1", two, 1.1),
        Check::at_most("dynamic, 16 pages: 6 pipes over 2", six(16)?, 1.15),
        Check::at_most("dynamic, 256 pages: 6 pipes over 2", six(256)?, 1.15),
        Check::at_least("6 pipes of 256 pages: sendfile over dynamic", sendfile, 1.0),
        Check::at_least("no pipelining, 1 page: static over dynamic", first, 1.0),
        Check::at_least("memory held, 6 pipes of 256 pages: static over sendfile", held, 1.01),
    ])
}

fn beside(data: &Data<'_>) -> Vec<Beside> {
    let at = |plot, way, pages: u32| data.at(plot, way, f64::from(pages));
    let ratio = |over: Result<f64, Missing>, under: Result<f64, Missing>| {
        said(over.and_then(|over| under.map(|under| over / under.max(1e-9))), "times")
    };
    vec![
        Beside {
            what: "two pipes over one, dynamic, 16 pages",
            place: "slide Traditional Pipelining: 2 pipes; the curves are not in the text",
            paper: "significantly more",
            here: ratio(at("2 pipes", "dynamic", 16), at("1 pipe", "dynamic", 16)),
        },
        Beside {
            what: "six pipes over two, dynamic, 16 pages",
            place: "slide Traditional Pipelining: 6 pipes",
            paper: "little difference",
            here: ratio(at("6 pipes", "dynamic", 16), at("2 pipes", "dynamic", 16)),
        },
        Beside {
            what: "sendfile over dynamic, 6 pipes of 256 pages",
            place: "slide Results Summary",
            paper: "more, and less CPU and memory",
            here: ratio(at("6 pipes", "sendfile", 256), at("6 pipes", "dynamic", 256)),
        },
        Beside {
            what: "static over dynamic, one page, no pipelining",
            place: "slide Traditional Approach: static is faster at first, until out of the cache",
            paper: "more",
            here: ratio(at("none", "static", 1), at("none", "dynamic", 1)),
        },
        Beside {
            what: "memory of a connection, 6 pipes of 256 pages: static, dynamic, sendfile",
            place: "slides Pipelining and Memory Usage: 6 pipes of 1 MB are in hand",
            paper: "6 MB",
            here: ["static", "dynamic", "sendfile"].map(|way| said(at(MEMORY, way, 256), "KiB")).join(", "),
        },
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::experiment::{Verdict, made};
    use super::*;

    /// Data of the paper's shape, with one value changed.
    fn with(plot: &str, way: &str, pages: f64, value: f64) -> Vec<Plot> {
        type Values = [(&'static str, &'static str, [(f64, f64); 3]); 8];
        let shape: Values = [
            ("none", "static", [(1.0, 60.0), (16.0, 300.0), (256.0, 500.0)]),
            ("none", "dynamic", [(1.0, 50.0), (16.0, 300.0), (256.0, 600.0)]),
            ("1 pipe", "dynamic", [(1.0, 50.0), (16.0, 300.0), (256.0, 600.0)]),
            ("2 pipes", "dynamic", [(1.0, 90.0), (16.0, 500.0), (256.0, 700.0)]),
            ("6 pipes", "dynamic", [(1.0, 95.0), (16.0, 520.0), (256.0, 710.0)]),
            ("6 pipes", "sendfile", [(1.0, 95.0), (16.0, 600.0), (256.0, 800.0)]),
            (MEMORY, "static", [(1.0, 24.0), (16.0, 384.0), (256.0, 6144.0)]),
            (MEMORY, "sendfile", [(1.0, 8.0), (16.0, 200.0), (256.0, 4096.0)]),
        ];
        let mut plots: Vec<Plot> = Vec::new();
        for name in ["none", "1 pipe", "2 pipes", "6 pipes", MEMORY] {
            let mut series = Vec::new();
            for (_, of, points) in shape.iter().filter(|(of, ..)| *of == name) {
                let changed = |&(x, was): &(f64, f64)| {
                    let is_it = name == plot && *of == way && (x - pages).abs() < 1e-9;
                    (x, if is_it { value } else { was })
                };
                series.push((*of, points.iter().map(changed).collect::<Vec<_>>()));
            }
            let series: Vec<_> = series.iter().map(|(of, points)| (*of, &points[..])).collect();
            plots.push(made::plot(name, &series));
        }
        plots
    }

    #[test]
    fn every_number_of_pipes_has_its_plots() {
        let plots: BTreeSet<&str> = PIPELINING.iter().flat_map(|how| [how.rate, how.memory]).collect();
        assert_eq!(plots.len(), 2 * PIPELINING.len());
        let most = PIPELINING.iter().find(|how| how.memory == MEMORY).unwrap();
        assert_eq!((most.pipes, most.rate), (PIPES_MAX, "6 pipes"), "that the rule looks at");
    }

    #[test]
    fn the_rule_says_yes_and_no_to_each_of_its_questions() {
        let verdict = |plots: &[Plot]| Verdict::of(judge(&Data(plots))).word();
        assert_eq!(verdict(&with("", "", 0.0, 0.0)), "holds");
        let changes = [
            ("1 pipe", "dynamic", 256.0, 90.0),
            ("2 pipes", "dynamic", 16.0, 310.0),
            ("6 pipes", "dynamic", 16.0, 900.0),
            ("6 pipes", "dynamic", 256.0, 810.0),
            ("6 pipes", "sendfile", 256.0, 600.0),
            ("none", "static", 1.0, 40.0),
            (MEMORY, "static", 256.0, 4000.0),
        ];
        for (plot, way, pages, value) in changes {
            assert_eq!(verdict(&with(plot, way, pages, value)), "does not hold", "{plot}, {way}, {pages} pages");
        }
    }
}
