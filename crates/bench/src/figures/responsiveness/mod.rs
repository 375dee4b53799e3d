//! Liss, Birk and Schuster: how soon a node answers a call while its threads keep every core busy, for each way of waiting.

mod caller;
mod messages;
mod program;

use std::time::Duration;

use self::caller::{Asks, Called, Caller, Counted, Responder, Waiting};
pub use self::program::{ResponderArguments, ResponderError, run as run_responder};
use super::experiment::{
    Axis, Beside, Check, Data, Description, Experiment, Gathered, Measured, Missing, Plot, Scale, said,
};
use super::process::{allowed_cpus, on};
use super::session::{RunError, Session};

/// Calls by ways of waiting, at a busy node and at an idle one.
pub(super) const RESPONSIVENESS: Experiment = Experiment {
    description: Description {
        name: "responsiveness",
        title: "In-kernel shared memory: calls to a node whose cores are busy",
        source: "Liss, Birk and Schuster, In-Kernel Integration of Operating System and InfiniBand Primitives for High Performance \
                 Computing Clusters: a DSM Example, abstract and introduction",
        what: "Calls with 64 bytes and answers of 64, one at a time, with pauses of 0 to 500 us, to a node with a thread on each of its \
               CPUs that does nothing but compute. The caller has a CPU of its own. Ways of the node: sleep, a thread sleeps in \
               next_call; loop, a thread with a poll(2) loop of its own over the node's descriptor; both also with slices of 100 us, \
               asked from the kernel without privilege (byway_fabric::scheduling), and sleep beside computing threads of nice 19; \
               spin, a thread looks without a pause; look, the first computing thread looks each 50 us; turn, every computing thread \
               looks each 1 ms. Two more are asked by messages and answer with messages, which operations of the node bring without the \
               layer of calls: any, a thread waits for any of several operations (the next message of each session, and the next \
               session); group, two threads wait in one group of such operations. The caller waits adaptively, or polls. Idle: the same node, and nobody computes.",
        rule: "Holds if, over TCP to a caller that waits, (1) a thread of its own is late where cores are busy: p99 of sleep is at \
               least 3 times that of the idle node; (2) polling is the most responsive: p99 of look (50 us) at most 0.5 of that of \
               sleep; (3) constant polling wastes computing time: spin takes at least 0.2 of it from a node that nobody calls. And \
               what byway offers for it does it if (4) p99 of sleep with slices of 100 us is at most 0.25 of that of sleep, and \
               (5) the computing threads do at least 0.95 of what they do beside sleep, calls coming in both.",
        absent: &[
            "Handlers in the kernel, which the paper is about: byway is user space on stock kernels, and the question is how near to \
             them it comes. The part of the paper at hand has no numbers of responsiveness, so its sentences are what is judged.",
            "InfiniBand: an arriving message runs in the caller's own send over loopback, so the interrupt takes nothing from the \
             computing threads here.",
        ],
    },
    run,
    judge,
    beside,
};

/// A way of the node: its short name, and the program's arguments.
struct Way {
    name: &'static str,
    arguments: &'static [&'static str],
    /// Whether there is something that answers when nobody computes.
    has_thread: bool,
    asks: Asks,
}

const WAYS: [Way; 10] = [
    Way { name: "sleep", arguments: &["--way", "sleep"], has_thread: true, asks: Asks::Calls },
    Way {
        name: "sleep 100us",
        arguments: &["--way", "sleep", "--slice-us", "100"],
        has_thread: true,
        asks: Asks::Calls,
    },
    Way { name: "sleep, nice", arguments: &["--way", "sleep", "--nice"], has_thread: true, asks: Asks::Calls },
    Way { name: "loop", arguments: &["--way", "loop"], has_thread: true, asks: Asks::Calls },
    Way { name: "loop 100us", arguments: &["--way", "loop", "--slice-us", "100"], has_thread: true, asks: Asks::Calls },
    Way { name: "spin", arguments: &["--way", "spin"], has_thread: true, asks: Asks::Calls },
    Way {
        name: "look 50us",
        arguments: &["--way", "look-one", "--look-us", "50"],
        has_thread: false,
        asks: Asks::Calls,
    },
    Way {
        name: "turn 1ms",
        arguments: &["--way", "look-all", "--look-us", "1000"],
        has_thread: false,
        asks: Asks::Calls,
    },
    Way { name: "any", arguments: &["--way", "any"], has_thread: true, asks: Asks::Messages },
    Way { name: "group", arguments: &["--way", "group"], has_thread: true, asks: Asks::Messages },
];
const SLEEP: usize = 0;
const SLEEP_SHORT: usize = 1;
const SPIN: usize = 5;
const LOOK: usize = 6;

/// Plots of latencies, one for each wire.
const WIRES: [(&str, &str); 2] = [
    ("TCP", "Time of a call over TCP, by how the node waits"),
    ("shared memory", "Time of a call through shared memory, by how the node waits"),
];
const PARTS: [(&str, usize); 3] = [("p50", 500), ("p99", 990), ("p999", 999)];
const COMPUTED: &str = "what is computed";
const QUIET: &str = "nobody calls";
const CPU: &str = "CPU of a call";

/// `p99, busy` and the like.
fn series(part: &str, node: &str) -> String {
    format!("{part}, {node}")
}
const BUSY: &str = "busy";
const BUSY_POLLED: &str = "busy, the caller polls";
const IDLE: &str = "idle";

#[derive(Default)]
struct Points {
    latency: [Gathered; 2],
    computed: Gathered,
    cpu: Gathered,
}

fn run(session: &mut Session) -> Result<Measured, RunError> {
    let cpus = allowed_cpus();
    let Some((&caller_cpu, node_cpus)) = cpus.split_last().filter(|(_, node)| !node.is_empty()) else {
        return Err(RunError::Machine("there is one CPU: the node and the caller need one each"));
    };
    let mut points = Points::default();
    for round in 1..=session.scale.rounds {
        let mut alone = None;
        for (at, way) in WAYS.iter().enumerate() {
            session.say(&format!("responsiveness, round {round}: {}", way.name));
            let busy = Busy { way: at, alone: &mut alone, computes: true };
            on(Some(caller_cpu), || Ok(measure(session, node_cpus, busy, &mut points)))??;
            if way.has_thread {
                let idle = Busy { way: at, alone: &mut alone, computes: false };
                on(Some(caller_cpu), || Ok(measure(session, node_cpus, idle, &mut points)))??;
            }
        }
    }
    let setup = vec![
        format!("The node has CPUs {node_cpus:?}, with a computing thread each; the caller has CPU {caller_cpu}."),
        format!(
            "{} calls for each point of a round; so p999 of a round is one of its few slowest. Kernels before 6.12 have no slices of a \
             thread's own: 100us is then as without.",
            calls(session)
        ),
        "CPU of the node: of the threads that wait and answer, or the time that a computing thread spends on looking, over the calls; of \
         the caller: from the call to the answer."
            .to_owned(),
    ];
    Ok(Measured { setup, plots: points.plots() })
}

/// What a node is measured at.
struct Busy<'a> {
    way: usize,
    /// What is computed in a second by threads that nobody calls, beside one that sleeps: of this round.
    alone: &'a mut Option<f64>,
    computes: bool,
}

/// Calls to a node over a wire, and what the node counted meanwhile.
struct Answered {
    /// In [`WIRES`].
    wire: usize,
    /// Whether the node is busy, and how the caller waits: a part of the series' names.
    node: &'static str,
    /// The node's way.
    x: f64,
    called: Called,
    before: Counted,
    after: Counted,
    /// Rounds that the node's computing threads finish in a second while no peer calls; `None` if the node has no such threads.
    alone: Option<f64>,
}

fn calls(session: &Session) -> usize {
    if session.scale.quick { 20 } else { 1000 }
}

fn measure(session: &Session, cpus: &[usize], of: Busy<'_>, points: &mut Points) -> Result<(), RunError> {
    let folder = session.folder().display();
    let listen = ["tcp://127.0.0.1:0".to_owned(), format!("shm://{folder}/responsiveness.shm")];
    let way = &WAYS[of.way];
    let mut arguments: Vec<String> = way.arguments.iter().map(|&argument| argument.to_owned()).collect();
    if of.computes {
        arguments.extend(cpus.iter().flat_map(|cpu| ["--computes-on".to_owned(), cpu.to_string()]));
    }
    let x = of.way as f64;
    let mut responder = Responder::start(cpus, &listen, &arguments)?;
    let addresses = responder.addresses.clone();
    let mut callers: Vec<Caller> =
        addresses.iter().map(|address| Caller::connect(address, way.asks)).collect::<Result<_, _>>()?;
    for caller in &mut callers {
        caller.calls(calls(session) / 20, Waiting::Adaptive)?;
    }
    if of.computes {
        let rate = quiet_rate(session, &mut responder)?;
        let alone = *of.alone.get_or_insert(rate);
        points.computed.add(QUIET, x, rate / alone.max(1e-9));
    }
    let alone = of.alone.filter(|_| of.computes);
    for (at, caller) in callers.iter_mut().enumerate() {
        for waiting in [Waiting::Adaptive, Waiting::Polling] {
            let node = match (of.computes, waiting) {
                (true, Waiting::Adaptive) => BUSY,
                (true, Waiting::Polling) => BUSY_POLLED,
                (false, Waiting::Adaptive) => IDLE,
                (false, Waiting::Polling) => continue,
            };
            let before = responder.counts()?;
            let called = caller.calls(calls(session), waiting)?;
            points.add(&Answered { wire: at, node, x, called, before, after: responder.counts()?, alone });
        }
    }
    Ok(())
}

/// What is computed in a second while nobody calls.
#[expect(clippy::disallowed_methods, reason = "what is computed in a time is measured, and nothing is waited for")]
fn quiet_rate(session: &Session, responder: &mut Responder) -> Result<f64, RunError> {
    let before = responder.counts()?;
    std::thread::sleep(session.scale.time * 3);
    Ok(computed(before, responder.counts()?))
}

/// Parts of work in a second.
fn computed(before: Counted, after: Counted) -> f64 {
    let time = after.at.saturating_duration_since(before.at).max(Duration::from_nanos(1));
    (after.parts - before.parts) / time.as_secs_f64()
}

impl Points {
    fn add(&mut self, &Answered { wire, node, x, ref called, before, after, alone }: &Answered) {
        for (name, part) in PARTS {
            self.latency[wire].add(&series(name, node), x, called.per_mille(part));
        }
        let wire = WIRES[wire].0;
        self.cpu.add(&format!("caller, {node}, {wire}"), x, called.cpu_us);
        if node == BUSY_POLLED {
            return;
        }
        let answering_us = (after.answering_us - before.answering_us) / called.count().max(1) as f64;
        self.cpu.add(&format!("node, {node}, {wire}"), x, answering_us);
        if let Some(alone) = alone {
            self.computed.add(&format!("calls over {wire}"), x, computed(before, after) / alone.max(1e-9));
        }
    }

    fn plots(self) -> Vec<Plot> {
        let ways =
            || Axis { label: "way of the node", unit: "", scale: Scale::Names(WAYS.map(|way| way.name).to_vec()) };
        let time = |label| Axis { label, unit: "us", scale: Scale::Decades };
        let latency = WIRES.iter().zip(self.latency).map(|((name, title), gathered)| Plot {
            name,
            title: (*title).to_owned(),
            x: ways(),
            y: time("time of a call"),
            series: gathered.series(),
        });
        let mut plots: Vec<Plot> = latency.collect();
        plots.push(Plot {
            name: COMPUTED,
            title: "What the computing threads do, as a share of what they do when nobody calls and a thread sleeps"
                .to_owned(),
            x: ways(),
            y: Axis { label: "computed", unit: "of alone", scale: Scale::Linear },
            series: self.computed.series(),
        });
        plots.push(Plot {
            name: CPU,
            title: "CPU of a call".to_owned(),
            x: ways(),
            y: time("CPU of a call"),
            series: self.cpu.series(),
        });
        plots
    }
}

fn p99(data: &Data<'_>, wire: usize, node: &str, way: usize) -> Result<f64, Missing> {
    data.at(WIRES[wire].0, &series("p99", node), way as f64)
}

fn judge(data: &Data<'_>) -> Result<Vec<Check>, Missing> {
    let sleep = p99(data, 0, BUSY, SLEEP)?.max(1e-9);
    let late = sleep / p99(data, 0, IDLE, SLEEP)?.max(1e-9);
    let look = p99(data, 0, BUSY, LOOK)? / sleep;
    let wasted = 1.0 - data.at(COMPUTED, QUIET, SPIN as f64)?;
    let short = p99(data, 0, BUSY, SLEEP_SHORT)? / sleep;
    let computed = |way: usize| data.at(COMPUTED, "calls over TCP", way as f64);
    let kept = computed(SLEEP_SHORT)? / computed(SLEEP)?.max(1e-9);
    Ok(vec![
        Check::at_least("sleep: p99 at the busy node over p99 at the idle one", late, 3.0),
        Check::at_most("p99 at the busy node: look (50 us) over sleep", look, 0.5),
        Check::at_least("share of computing time that spin takes when nobody calls", wasted, 0.2),
        Check::at_most("p99 at the busy node: sleep with slices of 100 us over sleep", short, 0.25),
        Check::at_least("what is computed while calls come: sleep with slices of 100 us over sleep", kept, 0.95),
    ])
}

fn beside(data: &Data<'_>) -> Vec<Beside> {
    let pair = |way| {
        let both = [0, 1].map(|wire| said(p99(data, wire, BUSY, way), "us"));
        format!("p99 {} over TCP, {} through shared memory", both[0], both[1])
    };
    let place = "introduction";
    let taken = data.at(COMPUTED, QUIET, SPIN as f64).map(|share| (1.0 - share) * 100.0);
    vec![
        Beside {
            what: "a thread of its own, cores busy",
            place,
            paper: "requires a context switch to and from it",
            here: pair(SLEEP),
        },
        Beside {
            what: "polling between 50 us of work",
            place,
            paper: "constant polling is the most responsive method",
            here: pair(LOOK),
        },
        Beside {
            what: "computing time that a polling thread takes",
            place,
            paper: "but wastes valuable CPU cycles",
            here: said(taken, "%"),
        },
        Beside {
            what: "a thread with slices of 100 us, cores busy",
            place: "abstract: handlers in the kernel are the paper's answer",
            paper: "overheads are reduced substantially; no number in the text at hand",
            here: pair(SLEEP_SHORT),
        },
        Beside {
            what: "the same, nobody computes",
            place: "",
            paper: "not given",
            here: format!(
                "p99 {} over TCP, {} through shared memory",
                said(p99(data, 0, IDLE, SLEEP), "us"),
                said(p99(data, 1, IDLE, SLEEP), "us")
            ),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::super::experiment::{Verdict, made};
    use super::*;

    struct Shape {
        sleep: f64,
        idle: f64,
        look: f64,
        spin: f64,
        short: f64,
        kept: f64,
    }

    const GOOD: Shape = Shape { sleep: 2800.0, idle: 80.0, look: 150.0, spin: 0.5, short: 120.0, kept: 0.97 };

    fn verdict(shape: &Shape) -> &'static str {
        let busy = [(SLEEP as f64, shape.sleep), (SLEEP_SHORT as f64, shape.short), (LOOK as f64, shape.look)];
        let idle = [(SLEEP as f64, shape.idle)];
        let calls = [(SLEEP as f64, 0.98), (SLEEP_SHORT as f64, 0.98 * shape.kept)];
        let plots = [
            made::plot(WIRES[0].0, &[("p99, busy", &busy), ("p99, idle", &idle)]),
            made::plot(COMPUTED, &[(QUIET, &[(SPIN as f64, shape.spin)]), ("calls over TCP", &calls)]),
        ];
        Verdict::of(judge(&Data(&plots))).word()
    }

    #[test]
    fn the_rule_says_yes_and_no_to_each_of_its_questions() {
        assert_eq!(verdict(&GOOD), "holds");
        assert_eq!(verdict(&Shape { idle: 1000.0, ..GOOD }), "does not hold", "busy cores make nobody late");
        assert_eq!(verdict(&Shape { look: 1500.0, ..GOOD }), "does not hold", "polling is no more responsive");
        assert_eq!(verdict(&Shape { spin: 0.95, ..GOOD }), "does not hold", "polling wastes nothing");
        assert_eq!(verdict(&Shape { short: 2000.0, ..GOOD }), "does not hold", "short slices do not help");
        assert_eq!(verdict(&Shape { kept: 0.8, ..GOOD }), "does not hold", "they cost the computing threads much");
    }

    #[test]
    fn the_places_that_the_rule_looks_at_are_those_of_its_ways() {
        let names = [SLEEP, SLEEP_SHORT, SPIN, LOOK].map(|way| WAYS[way].name);
        assert_eq!(names, ["sleep", "sleep 100us", "spin", "look 50us"]);
        let asked: Vec<&str> = WAYS.iter().filter(|way| way.asks == Asks::Messages).map(|way| way.name).collect();
        assert_eq!(asked, ["any", "group"], "and those that no call is made to are the last, beside the rule");
    }
}
