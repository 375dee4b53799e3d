//! Liss, Birk and Schuster: which thread answers requests for pages while every processor computes.

mod program;

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use byway_dsm::launch::{JobEnd, Launch, Stream};
use byway_dsm::{Waits, Wire};

use super::experiment::{
    Axis, Beside, Check, Data, Description, Experiment, Gathered, Measured, Missing, Plot, Scale, said,
};
use super::process::allowed_cpus;
use super::session::{RunError, Session};

pub use self::program::{SharedProgramArguments, SharedProgramError, run as run_program};

/// Ways to wait and answer, against the time of a fetch, the computing that it costs, and the time of programs.
pub(super) const ANSWERS: Experiment = Experiment {
    description: Description {
        name: "answers",
        title: "Shared memory: which thread answers while every processor computes",
        source: "Liss, Birk and Schuster, In-Kernel Integration of Operating System and InfiniBand Primitives (2005), section 1: \
                 polling, a communication thread, a signal, or the kernel",
        what: "A job with a process for each processor. Process 0 loads pages that process 1 has written, 200 us apart. The other \
               processes wait, or compute. Then SOR (512 rows of a page, 40 half steps), LU (the same size) and a task queue (the shortest \
               tour of 11 cities) run on all processes. Four ways to wait: a thread of each process sleeps until the kernel wakes it (sleep), \
               looks for 50 us before that while no other thread wants its processor (poll), or looks always (spin); or the \
               program answers at its safe points (points), here after some 5 us of arithmetic, a row, or a task.",
        rule: "Holds if (1) a sleeping thread needs no processor of its own to be responsive: p99 of a fetch while all compute is at most 5 times \
               the p50 while all wait; (2) spinning costs computing: with spin the processes compute at most 0.8 of what \
               they compute with sleep; (3) the kernel's wake-up costs little computing: with sleep at least 0.9 is computed of what is computed \
               without fetches; (4) the default, sleep, needs at most 1.25 times the time of the fastest way for each program.",
        absent: &[
            "The paper's own kernel module, which answers in the network's interrupt: here userfaultfd and the scheduler are the kernel's part.",
            "A signal for each request, and a pager in a process of its own.",
            "A network between the processes: they have one machine and shared memory.",
        ],
    },
    run,
    judge,
    beside,
};

const WAYS: [(&str, Waits); 4] =
    [("sleep", Waits::Sleep), ("poll", Waits::Poll), ("spin", Waits::Spin), ("points", Waits::Points)];
const FETCH: &str = "fetch";
const COMPUTED: &str = "computed";
const TIMES: &str = "times";
const PROGRAMS: [&str; 3] = ["sor", "lu", "tsp"];

fn run(session: &mut Session) -> Result<Measured, RunError> {
    // A quick run shares the machine with others: processes that spin on each of its processors would take a minute.
    let ranks = if session.scale.quick { 2 } else { allowed_cpus().len().clamp(2, 8) };
    let (mut fetch, mut computed, mut times) = (Gathered::default(), Gathered::default(), Gathered::default());
    let mut results: BTreeMap<&str, f64> = BTreeMap::new();
    for round in 1..=session.scale.rounds {
        for (place, (way, waits)) in WAYS.into_iter().enumerate() {
            session.say(&format!("answers, round {round}: {way}"));
            let at = place as f64;
            let rows = if session.scale.quick { "64" } else { "512" };
            let idle = job(waits, ranks, &["idle"])?;
            let busy = job(waits, ranks, &["computing"])?;
            for (figures, state) in [(&idle, "all wait"), (&busy, "all compute")] {
                for share in ["p50", "p99"] {
                    fetch.add(&format!("{share}, {state}"), at, figure(figures, share)?);
                }
            }
            computed.add("with fetches", at, figure(&busy, "asked")?);
            computed.add("without", at, figure(&busy, "unasked")?);
            for program in PROGRAMS {
                let figures = job(waits, ranks, &[program, "--rows", rows])?;
                let result = figure(&figures, "result")?;
                if (results.entry(program).or_insert(result).to_bits()) != result.to_bits() {
                    return Err(RunError::Fabric(format!("{program} has another result with --pager {way}")));
                }
                times.add(program, at, figure(&figures, "ms")?);
            }
        }
    }
    let names = || Axis { label: "way", unit: "", scale: Scale::Names(WAYS.map(|(name, _)| name).to_vec()) };
    let plot = |name, title: &str, (label, unit), gathered: Gathered| Plot {
        name,
        title: title.to_owned(),
        x: names(),
        y: Axis { label, unit, scale: Scale::Decades },
        series: gathered.series(),
    };
    Ok(Measured {
        setup: vec![format!("{ranks} processes over shared memory, {} rounds.", session.scale.rounds)],
        plots: vec![
            plot(FETCH, "Time of a load from a page of another process", ("time", "us"), fetch),
            plot(COMPUTED, "What the other processes compute", ("units", "1/s"), computed),
            plot(TIMES, "Time of programs", ("time", "ms"), times),
        ],
    })
}

/// Runs this binary as a job; what rank 0 prints, by name.
fn job(waits: Waits, ranks: usize, words: &[&str]) -> Result<BTreeMap<String, f64>, RunError> {
    let program = std::env::current_exe().map_err(RunError::Child)?;
    let arguments = ["bench", "shared-memory-program"].iter().chain(words).map(Into::into).collect();
    let launch = Launch { waits, wire: Wire::Shm, arguments, ..Launch::new(ranks, program) };
    let lines = Mutex::new(Vec::new());
    let running = launch.start().map_err(|error| RunError::Fabric(error.to_string()))?;
    let end = running.wait(|_, _: Stream, line: &[u8]| {
        lines.lock().unwrap_or_else(PoisonError::into_inner).push(String::from_utf8_lossy(line).into_owned());
    });
    let lines = lines.into_inner().unwrap_or_else(PoisonError::into_inner);
    if end != JobEnd::Well {
        return Err(RunError::Fabric(format!("a job of {} has failed: {}", words[0], lines.join("; "))));
    }
    let number = |line: &String| {
        let (name, value) = line.split_once(' ')?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    Ok(lines.iter().filter_map(number).collect())
}

fn figure(figures: &BTreeMap<String, f64>, name: &str) -> Result<f64, RunError> {
    figures.get(name).copied().ok_or_else(|| RunError::Fabric(format!("a job has not printed `{name}`")))
}

const SLEEP: f64 = 0.0;
const SPIN: f64 = 2.0;

fn judge(data: &Data<'_>) -> Result<Vec<Check>, Missing> {
    let slow = data.at(FETCH, "p99, all compute", SLEEP)? / data.at(FETCH, "p50, all wait", SLEEP)?.max(1e-9);
    let asked = |at| data.at(COMPUTED, "with fetches", at);
    let mut checks = vec![
        Check::at_most("sleep: p99 while all compute over p50 while all wait", slow, 5.0),
        Check::at_most("computed with spin over with sleep", asked(SPIN)? / asked(SLEEP)?.max(1e-9), 0.8),
        Check::at_least(
            "sleep: computed with fetches over without",
            asked(SLEEP)? / data.at(COMPUTED, "without", SLEEP)?.max(1e-9),
            0.9,
        ),
    ];
    for program in PROGRAMS {
        let fastest = data.points(TIMES, program)?.iter().map(|(_, time)| *time).fold(f64::MAX, f64::min);
        let over = data.at(TIMES, program, SLEEP)? / fastest.max(1e-9);
        checks.push(Check::at_most(format!("{program}: sleep over the fastest way"), over, 1.25));
    }
    Ok(checks)
}

fn beside(data: &Data<'_>) -> Vec<Beside> {
    let here = |at: f64| {
        let slow = said(data.at(FETCH, "p99, all compute", at), "us");
        format!("p99 {slow}, computed {}", said(data.at(COMPUTED, "with fetches", at), "units/s"))
    };
    let row = |what, paper, at| Beside { what, place: "section 1", paper, here: here(at) };
    vec![
        row("constant polling", "the most responsive, but wastes the processor", SPIN),
        row("a communication thread", "a context switch to and from it", SLEEP),
        row("polling by the program", "not given", 3.0),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::experiment::{Verdict, made};
    use super::*;

    fn verdict(slow: f64, spins: f64, asked: f64, sor: f64) -> &'static str {
        let all = |value| [(0.0, value), (1.0, 1.0), (2.0, 1.0), (3.0, 1.0)];
        let computed = [(SLEEP, asked), (1.0, 1.0), (SPIN, spins), (3.0, 1.0)];
        let plots = [
            made::plot(FETCH, &[("p50, all wait", &all(50.0)), ("p99, all compute", &all(slow))]),
            made::plot(COMPUTED, &[("with fetches", &computed), ("without", &all(1.0))]),
            made::plot(TIMES, &[("sor", &all(sor)), ("lu", &all(1.0)), ("tsp", &all(1.0))]),
        ];
        Verdict::of(judge(&Data(&plots))).word()
    }

    #[test]
    fn the_rule_says_yes_and_no() {
        assert_eq!(verdict(120.0, 0.5, 0.97, 1.1), "holds");
        assert_eq!(verdict(300.0, 0.5, 0.97, 1.1), "does not hold", "the thread answers late");
        assert_eq!(verdict(120.0, 0.97, 0.97, 1.1), "does not hold", "spinning costs nothing");
        assert_eq!(verdict(120.0, 0.5, 0.8, 1.1), "does not hold", "waking costs much");
        assert_eq!(verdict(120.0, 0.5, 0.97, 1.5), "does not hold", "another way is faster");
    }
}
