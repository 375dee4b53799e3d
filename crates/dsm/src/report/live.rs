//! `byway dsm top`: finds the jobs of which processes run on this machine, and asks these processes what they have counted.

use std::collections::BTreeMap;
use std::fmt::{Display, Formatter};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use byway_service::limits::DSM_RANKS_MAX;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};

use super::{JobReport, RankReport, Sent, teller};
use crate::environment::{JOB, RANK, RANKS};
use crate::limits::{LIVE_ANSWER_BYTES_MAX, LIVE_TIME_MAX};
use crate::processes;

/// A job of which processes run on this machine.
#[derive(Clone)]
pub struct LiveJob {
    /// Its number, which lets a process into the job: it is shown nowhere.
    job: String,
    ranks: usize,
    /// Processes that have the environment of a rank: the rank's own, and those that started it there or that it started.
    processes: BTreeMap<usize, Vec<u32>>,
}

impl std::fmt::Debug for LiveJob {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("LiveJob").field("processes", &self.processes).finish_non_exhaustive()
    }
}

/// The jobs of this user of which processes run on this machine; for root those of all users.
pub fn live_jobs() -> Vec<LiveJob> {
    let mut jobs: BTreeMap<String, LiveJob> = BTreeMap::new();
    for process in processes::numbers() {
        let Some(environment) = processes::environment(process) else { continue };
        let Some((job, rank, ranks)) = part_of_job(&environment) else { continue };
        let new = || LiveJob { job: job.to_owned(), ranks, processes: BTreeMap::new() };
        let known = jobs.entry(job.to_owned()).or_insert_with(new);
        known.processes.entry(rank).or_default().push(process.cast_unsigned());
    }
    jobs.into_values().collect()
}

/// The job, rank and number of ranks that an environment names.
fn part_of_job(environment: &[u8]) -> Option<(&str, usize, usize)> {
    let value = |name: &str| {
        let mut words = environment.split(|byte| *byte == 0);
        let value = words.find_map(|word| word.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
        std::str::from_utf8(value).ok()
    };
    let (rank, ranks) = (value(RANK)?.parse().ok()?, value(RANKS)?.parse().ok()?);
    (rank < ranks && ranks <= DSM_RANKS_MAX).then_some((value(JOB)?, rank, ranks))
}

impl LiveJob {
    /// The numbers of its processes on this machine, also of those that they have started.
    pub fn processes(&self) -> impl Iterator<Item = u32> {
        self.processes.values().flatten().copied()
    }

    /// The job as it is now; `None` if none of its processes runs here any more.
    pub fn again(&self) -> Option<Self> {
        live_jobs().into_iter().find(|other| other.job == self.job)
    }

    /// Asks its processes, all at the same time, for some seconds at most. A process counts from when it is asked first; with
    /// `byway dsm run --report` it has counted since it joined the job.
    pub fn look(&self) -> LiveLook {
        let mut look = LiveLook { at: Instant::now(), answered: BTreeMap::new(), report: JobReport::new(self.ranks) };
        let answers: Vec<(usize, Option<Answer>)> = std::thread::scope(|scope| {
            let ask_any = |processes: &[u32]| processes.iter().find_map(|process| ask(*process).ok());
            // Without a thread for it, a rank has not answered.
            let asked = self.processes.iter().filter_map(|(rank, processes)| {
                let asked = std::thread::Builder::new().spawn_scoped(scope, move || ask_any(processes));
                Some((*rank, asked.ok()?))
            });
            // All are asked before the first is waited for.
            let asked: Vec<_> = asked.collect();
            asked.into_iter().map(|(rank, answer)| (rank, answer.join().ok().flatten())).collect()
        });
        for (rank, answer) in answers {
            let Some(Answer { process, lines }) = answer else { continue };
            for line in lines.split(|byte| *byte == b'\n') {
                let _ = look.report.take(rank, line);
            }
            if look.report.ranks.contains_key(&rank) {
                look.answered.insert(rank, process);
            }
        }
        look
    }
}

/// What a process has told.
struct Answer {
    process: u32,
    /// Of its report.
    lines: Vec<u8>,
}

fn ask(process: u32) -> std::io::Result<Answer> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    for timeout in [Timeout::Send, Timeout::Recv] {
        set_socket_timeout(&socket, timeout, Some(LIVE_TIME_MAX))?;
    }
    connect(&socket, &teller::address(process)?)?;
    // Any process may take the name.
    if socket_peercred(&socket)?.pid.as_raw_nonzero().get().cast_unsigned() != process {
        return Err(std::io::ErrorKind::PermissionDenied.into());
    }
    let mut lines = Vec::new();
    UnixStream::from(socket).take(LIVE_ANSWER_BYTES_MAX).read_to_end(&mut lines)?;
    Ok(Answer { process, lines })
}

/// What the processes of a job on this machine have counted until some moment.
#[derive(Debug)]
pub struct LiveLook {
    at: Instant,
    /// The processes that have answered, by rank.
    answered: BTreeMap<usize, u32>,
    report: JobReport,
}

impl LiveLook {
    /// Whether no process has answered: none is in the job now.
    pub fn is_empty(&self) -> bool {
        self.answered.is_empty()
    }

    /// What happened in each second since an earlier look, and the pages to which several processes have stored. Its text is for people.
    pub fn since<'a>(&'a self, before: &'a Self) -> LiveRates<'a> {
        LiveRates { before, now: self }
    }
}

/// See [`LiveLook::since`].
#[derive(Clone, Copy, Debug)]
pub struct LiveRates<'a> {
    before: &'a LiveLook,
    now: &'a LiveLook,
}

impl LiveRates<'_> {
    fn seconds(&self) -> f64 {
        (self.now.at - self.before.at).as_secs_f64().max(f64::EPSILON)
    }

    /// For a second, from counts.
    fn rate(&self, now: u64, before: u64) -> u64 {
        (now.saturating_sub(before) as f64 / self.seconds()).round() as u64
    }

    fn show_rank(&self, out: &mut Formatter<'_>, rank: usize, process: u32, now: &RankReport) -> std::fmt::Result {
        // One that has joined meanwhile has no rates yet.
        let before = self.before.report.ranks.get(&rank).unwrap_or(now);
        let waited = now.all.time.saturating_sub(before.all.time).as_secs_f64() / self.seconds() * 100.0;
        let rate = |count: fn(&RankReport) -> u64| self.rate(count(now), count(before));
        writeln!(
            out,
            "{rank:>4}  {process:>7}  {:>19}  {:>20}  {waited:>4.0} %  {:>10}  {:>11}  {:>17}",
            rate(|report| report.all.reads),
            rate(|report| report.all.writes),
            rate(|report| report.pages_received),
            rate(|report| report.pages_sent),
            rate(|report| report.invalidations)
        )
    }

    fn show_messages(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        writeln!(out, "from -> to   messages/s   bytes of pages and of their changes/s")?;
        for (from, report) in &self.now.report.ranks {
            let before = self.before.report.ranks.get(from).unwrap_or(report);
            for (to, sent) in &report.sent {
                let Sent { messages, bytes } = before.sent.get(to).copied().unwrap_or_default();
                let (messages, bytes) = (self.rate(sent.messages, messages), self.rate(sent.bytes, bytes));
                if messages > 0 {
                    writeln!(out, "{from:>4} -> {to:<4} {messages:>10}  {bytes:>12}")?;
                }
            }
        }
        Ok(())
    }
}

impl Display for LiveRates<'_> {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        let (now, all) = (self.now, self.now.report.count);
        let here = now.answered.len();
        writeln!(out, "{here} of {all} processes of the job answer; rates of the last {:.1} s", self.seconds())?;
        writeln!(
            out,
            "rank  process  loads that waited/s  stores that waited/s  waited  pages in/s  pages out/s  copies given up/s"
        )?;
        for rank in 0..all {
            match (now.answered.get(&rank), now.report.ranks.get(&rank)) {
                (Some(process), Some(report)) => self.show_rank(out, rank, *process, report)?,
                _ => {
                    writeln!(out, "{rank:>4}  does not answer: it is elsewhere, is stopped, or is not in the job now")?;
                }
            }
        }
        self.show_messages(out)?;
        now.report.show_pages(out)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use byway_service::coherence::Mode;
    use byway_service::dsm::{Counters, PlacedSegment};

    use super::super::Tally;
    use super::*;
    use crate::limits::{AREA_ADDRESS, LIVE_PAGES_TOLD_MAX, PAGE_BYTES};

    #[test]
    fn an_environment_names_a_part_of_a_job() {
        let environment = |ranks: &str| format!("A=1\0{RANK}=1\0{RANKS}={ranks}\0{JOB}=77\0").into_bytes();
        assert_eq!(part_of_job(&environment("2")), Some(("77", 1, 2)));
        for wrong in ["1", "65", "x", ""] {
            assert_eq!(part_of_job(&environment(wrong)), None, "{wrong}");
        }
        assert_eq!(part_of_job(format!("{RANK}=0\0{RANKS}=1\0").as_bytes()), None, "it has no number of a job");
    }

    /// What ranks have counted at some time.
    fn look(at: Instant, ranks: &[(usize, &Tally)]) -> LiveLook {
        let mut look = LiveLook { at, answered: BTreeMap::new(), report: JobReport::new(3) };
        for (rank, tally) in ranks {
            let segments = vec![PlacedSegment { name: b"grid".to_vec(), first: 10, pages: 4 }];
            for line in tally.counted(Counters::default(), segments).lines(LIVE_PAGES_TOLD_MAX) {
                assert_eq!(look.report.take(*rank, line.trim_end().as_bytes()), None);
            }
            look.answered.insert(*rank, 1000 + *rank as u32);
        }
        look
    }

    #[test]
    fn rates_are_of_the_time_between_two_looks_and_pages_of_all_time() {
        let (began, second) = (Instant::now(), Duration::from_secs(1));
        let mut tallies = [(); 2].map(|()| Tally::new(3, false));
        for tally in &mut tallies {
            assert!(tally.counting().is_none(), "it counts before it is looked at");
            tally.name(AREA_ADDRESS + 12 * PAGE_BYTES..AREA_ADDRESS + 13 * PAGE_BYTES, "edge");
            tally.begin();
            tally.fault(12, Mode::Write, began);
            tally.served(12, began + second / 2);
        }
        let before = look(began, &[(0, &tallies[0])]);
        for at in 0..6 {
            tallies[0].fault(12, Mode::Read, began);
            tallies[0].served(12, began + second / 10);
            tallies[0].sent(1, 1000 * (at % 2));
        }
        let now = look(began + 2 * second, &[(0, &tallies[0]), (1, &tallies[1])]);
        let text = now.since(&before).to_string();
        let words = |line: usize| text.lines().nth(line).unwrap().split_whitespace().collect::<Vec<_>>();
        assert!(text.starts_with("2 of 3 processes of the job answer; rates of the last 2.0 s\n"), "{text}");
        assert_eq!(words(2), ["0", "1000", "3", "0", "30", "%", "0", "0", "0"], "{text}");
        assert_eq!(words(3), ["1", "1001", "0", "0", "0", "%", "0", "0", "0"], "it has joined meanwhile: {text}");
        assert!(text.contains("   2  does not answer"), "{text}");
        assert_eq!(words(6), ["0", "->", "1", "3", "1500"], "{text}");
        assert!(text.ends_with("  0,1        grid+0x2000  edge\n"), "{text}");
    }
}
