//! `byway dsm run --report`: each process counts faults by page, and messages by process, and tells its launcher at the end of the job.
//! [`byway dsm top`](live) asks for the same while the job runs.
//!
//! A process tells it in lines of standard error, which come from every host to the launcher: [`MARK`], the kind of the line, and numbers. The
//! launcher gives them to [`JobReport`], and nothing of them to its user's terminal.

pub(crate) mod live;
pub(crate) mod teller;

use std::collections::{BTreeMap, HashMap};
use std::fmt::{Display, Formatter};
use std::ops::Range;
use std::time::{Duration, Instant};

use byway_service::coherence::Mode;
use byway_service::dsm::{Counters, Page, PlacedSegment, Rank};

use crate::limits::{
    AREA_ADDRESS, PAGE_BYTES, REPORT_CHUNK_BYTES, REPORT_NAMES_SHOWN, REPORT_PAGES_COUNTED_MAX, REPORT_PAGES_SHOWN,
};
use crate::names::Names;

/// What a line of a report begins with. A program's own line has no such character.
const MARK: &str = "\u{1e}byway-dsm-report ";

/// Faults of a page, or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Faults {
    reads: u64,
    writes: u64,
    time: Duration,
}

impl Faults {
    fn add(&mut self, other: Self) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.time += other.time;
    }

    fn count(&self) -> u64 {
        self.reads + self.writes
    }
}

/// What went to another process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sent {
    messages: u64,
    /// Of pages and differences.
    bytes: u64,
}

/// What a process counts.
#[derive(Debug)]
pub(crate) struct Tally {
    /// From the beginning for a report at the end, else since the first look of `byway dsm top`. Names are kept always.
    is_counting: bool,
    pages: HashMap<Page, Faults>,
    /// Of pages beyond [`REPORT_PAGES_COUNTED_MAX`].
    others: Faults,
    /// Pages that the program waits for, and since when.
    waits: HashMap<Page, Instant>,
    sent: Vec<Sent>,
    names: Names,
}

impl Tally {
    pub(crate) fn new(ranks: u8, is_counting: bool) -> Self {
        let (sent, names) = (vec![Sent::default(); usize::from(ranks)], Names::default());
        let (pages, others, waits) = (HashMap::new(), Faults::default(), HashMap::new());
        Self { is_counting, pages, others, waits, sent, names }
    }

    /// Counts from now on, if it has not before.
    pub(crate) fn begin(&mut self) {
        self.is_counting = true;
    }

    /// This, if it counts.
    pub(crate) fn counting(&mut self) -> Option<&mut Self> {
        self.is_counting.then_some(self)
    }

    /// The program has named the bytes at these addresses.
    pub(crate) fn name(&mut self, bytes: Range<usize>, name: &str) {
        self.names.add(bytes, name);
    }

    fn of_page(&mut self, page: Page) -> &mut Faults {
        if self.pages.len() < REPORT_PAGES_COUNTED_MAX || self.pages.contains_key(&page) {
            self.pages.entry(page).or_default()
        } else {
            &mut self.others
        }
    }

    /// The program has faulted.
    pub(crate) fn fault(&mut self, page: Page, mode: Mode, now: Instant) {
        let faults = self.of_page(page);
        if mode == Mode::Write {
            faults.writes += 1;
        } else {
            faults.reads += 1;
        }
        self.waits.entry(page).or_insert(now);
    }

    /// The program has the page for which it has waited.
    pub(crate) fn served(&mut self, page: Page, now: Instant) {
        if let Some(since) = self.waits.remove(&page) {
            self.of_page(page).time += now - since;
        }
    }

    /// A message has gone to another process.
    pub(crate) fn sent(&mut self, to: Rank, bytes: usize) {
        let sent = &mut self.sent[usize::from(to)];
        sent.messages += 1;
        sent.bytes += bytes as u64;
    }

    /// What it has counted until now.
    pub(crate) fn counted(&self, counters: Counters, segments: Vec<PlacedSegment>) -> Counted {
        let pages = self.pages.iter().map(|(page, faults)| (*page, *faults)).collect();
        let names = self.names.numbers().collect();
        Counted { others: self.others, pages, sent: self.sent.clone(), names, counters, segments }
    }
}

/// What a process has counted until some moment.
pub(crate) struct Counted {
    others: Faults,
    pages: Vec<(Page, Faults)>,
    sent: Vec<Sent>,
    /// Numbers of [`Names`].
    names: Vec<Vec<u64>>,
    counters: Counters,
    segments: Vec<PlacedSegment>,
}

impl Counted {
    /// The lines of the report: of the pages, at most so many, those with the most faults.
    pub(crate) fn lines(mut self, pages_max: usize) -> Vec<String> {
        let mut all = self.others;
        for (_, faults) in &self.pages {
            all.add(*faults);
        }
        let line = |kind: &str, numbers: &[u64]| {
            let numbers: Vec<String> = numbers.iter().map(u64::to_string).collect();
            format!("{MARK}{kind} {}\n", numbers.join(" "))
        };
        let numbers = |faults: &Faults| [faults.reads, faults.writes, faults.time.as_nanos() as u64];
        let Counters { pages_received, pages_sent, invalidations, .. } = self.counters;
        let mut lines = vec![line("all", &[&numbers(&all)[..], &[pages_received, pages_sent, invalidations]].concat())];
        let sent = self.sent.iter().enumerate().filter(|(_, sent)| sent.messages > 0);
        lines.extend(sent.map(|(to, sent)| line("sent", &[to as u64, sent.messages, sent.bytes])));
        for PlacedSegment { name, first, pages } in &self.segments {
            let name: Vec<u64> = name.iter().map(|byte| u64::from(*byte)).collect();
            lines.push(line("segment", &[&[u64::from(*first), *pages][..], &name].concat()));
        }
        lines.extend(self.names.iter().map(|numbers| line("name", numbers)));
        self.pages.sort_unstable_by_key(|(page, faults)| (std::cmp::Reverse(faults.count()), *page));
        let told = self.pages.iter().take(pages_max);
        lines.extend(told.map(|(page, faults)| line("page", &[&[u64::from(*page)][..], &numbers(faults)].concat())));
        lines
    }
}

/// Writes lines to standard error. No other thread's output comes between the parts of one.
pub(crate) fn tell(lines: &[String]) {
    let mut chunk = String::new();
    for line in lines.iter().map(String::as_str).chain([""]) {
        if line.is_empty() || chunk.len() + line.len() > REPORT_CHUNK_BYTES {
            let mut left = chunk.as_bytes();
            while !left.is_empty() {
                match rustix::io::write(std::io::stderr(), left) {
                    Ok(count) => left = &left[count..],
                    Err(rustix::io::Errno::INTR) => {}
                    // The launcher says that it has no report of this process.
                    Err(_) => return,
                }
            }
            chunk.clear();
        }
        chunk.push_str(line);
    }
}

#[derive(Debug, Default)]
struct RankReport {
    all: Faults,
    pages_received: u64,
    pages_sent: u64,
    invalidations: u64,
    sent: BTreeMap<usize, Sent>,
}

/// What the processes of a job have told: faults by process, messages and bytes by pair of processes, and the pages to which several have
/// stored. Its text is for people.
#[derive(Debug)]
pub struct JobReport {
    ranks: BTreeMap<usize, RankReport>,
    count: usize,
    pages: BTreeMap<Page, BTreeMap<usize, Faults>>,
    segments: Vec<PlacedSegment>,
    names: Names,
}

impl JobReport {
    /// Of a job with so many processes, which has told nothing yet.
    pub fn new(ranks: usize) -> Self {
        let (segments, names) = (Vec::new(), Names::default());
        Self { ranks: BTreeMap::new(), count: ranks, pages: BTreeMap::new(), segments, names }
    }

    /// Takes a line that a process has printed to standard error, and gives what is left of it to show; none if it was of the report alone.
    pub fn take<'a>(&mut self, rank: usize, line: &'a [u8]) -> Option<&'a [u8]> {
        let Some(at) = line.windows(MARK.len()).position(|part| part == MARK.as_bytes()) else { return Some(line) };
        let told = std::str::from_utf8(&line[at + MARK.len()..]).ok();
        if rank >= self.count || told.and_then(|told| self.add(rank, told)).is_none() {
            return Some(line);
        }
        // The program has not ended its last line.
        (at > 0).then_some(&line[..at])
    }

    fn add(&mut self, rank: usize, told: &str) -> Option<()> {
        let (kind, numbers) = told.split_once(' ')?;
        let numbers: Vec<u64> = numbers.split(' ').map(str::parse).collect::<Result<_, _>>().ok()?;
        let faults = |reads, writes, nanos| Faults { reads, writes, time: Duration::from_nanos(nanos) };
        let report = self.ranks.entry(rank).or_default();
        match (kind, &numbers[..]) {
            ("all", &[reads, writes, nanos, pages_received, pages_sent, invalidations]) => {
                let sent = std::mem::take(&mut report.sent);
                *report =
                    RankReport { all: faults(reads, writes, nanos), pages_received, pages_sent, invalidations, sent };
            }
            ("sent", &[to, messages, bytes]) => drop(report.sent.insert(to as usize, Sent { messages, bytes })),
            ("page", &[page, reads, writes, nanos]) => {
                self.pages.entry(Page::try_from(page).ok()?).or_default().insert(rank, faults(reads, writes, nanos));
            }
            ("segment", [first, pages, name @ ..]) => {
                let name = name.iter().map(|byte| *byte as u8).collect();
                self.segments.push(PlacedSegment { name, first: Page::try_from(*first).ok()?, pages: *pages });
            }
            ("name", numbers) => self.names.add_numbers(numbers)?,
            _ => return None,
        }
        Some(())
    }

    /// Pages to which several processes have stored, those that were waited for longest first.
    fn shared_pages(&self) -> Vec<(Page, Faults, Vec<usize>)> {
        let shared = self.pages.iter().filter_map(|(page, by_rank)| {
            let writers = by_rank.iter().filter(|(_, faults)| faults.writes > 0).map(|(rank, _)| *rank);
            let writers: Vec<usize> = writers.collect();
            let mut all = Faults::default();
            for faults in by_rank.values() {
                all.add(*faults);
            }
            (writers.len() > 1).then_some((*page, all, writers))
        });
        let mut shared: Vec<_> = shared.collect();
        shared.sort_by_key(|(_, all, _)| std::cmp::Reverse(all.time));
        shared
    }

    /// The segment of a page, where in it, and what the program has named there.
    fn place(&self, page: Page) -> String {
        let has =
            |segment: &&PlacedSegment| page.checked_sub(segment.first).is_some_and(|at| u64::from(at) < segment.pages);
        let mut place = match self.segments.iter().find(has) {
            Some(PlacedSegment { name, first, .. }) => {
                let offset = (page - first) as usize * PAGE_BYTES;
                format!("{}+{offset:#x}", String::from_utf8_lossy(name).escape_debug())
            }
            None => "unknown".to_owned(),
        };
        let first = AREA_ADDRESS + page as usize * PAGE_BYTES;
        let names = self.names.of(&(first..first + PAGE_BYTES));
        for name in names.iter().take(REPORT_NAMES_SHOWN) {
            place.extend(["  ", &name.escape_debug().to_string()]);
        }
        if names.len() > REPORT_NAMES_SHOWN {
            place.extend([format!("  and {} more", names.len() - REPORT_NAMES_SHOWN)]);
        }
        place
    }
}

impl Display for JobReport {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        writeln!(out, "rank  loads that waited  stores that waited   waited  pages in  pages out  copies given up")?;
        for (rank, report) in &self.ranks {
            let RankReport { all, pages_received, pages_sent, invalidations, .. } = report;
            let waited = all.time.as_secs_f64();
            writeln!(
                out,
                "{rank:>4}  {:>17}  {:>18}  {waited:>5.2} s  {pages_received:>8}  {pages_sent:>9}  {invalidations:>15}",
                all.reads, all.writes
            )?;
        }
        for missing in (0..self.count).filter(|rank| !self.ranks.contains_key(rank)) {
            writeln!(
                out,
                "{missing:>4}  has told nothing: it did not leave the job, or has closed its standard error"
            )?;
        }
        writeln!(out, "from -> to     messages   bytes of pages and of their changes")?;
        for (from, report) in &self.ranks {
            for (to, Sent { messages, bytes }) in &report.sent {
                writeln!(out, "{from:>4} -> {to:<4}  {messages:>9}  {bytes:>12}")?;
            }
        }
        self.show_pages(out)
    }
}

impl JobReport {
    /// The pages to which several processes have stored.
    fn show_pages(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        let shared = self.shared_pages();
        if shared.is_empty() {
            return writeln!(out, "no page had stores of several processes that waited");
        }
        writeln!(out, "pages to which several processes stored: {}", shared.len())?;
        writeln!(out, "address         loads  stores   waited  processes  segment and offset  names")?;
        for (page, all, writers) in shared.iter().take(REPORT_PAGES_SHOWN) {
            let (at, waited) = (AREA_ADDRESS + *page as usize * PAGE_BYTES, all.time.as_secs_f64());
            let writers: Vec<String> = writers.iter().map(usize::to_string).collect();
            let (loads, stores, writers, place) = (all.reads, all.writes, writers.join(","), self.place(*page));
            writeln!(out, "{at:#014x}  {loads:>5}  {stores:>6}  {waited:>5.2} s  {writers:<9}  {place}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::REPORT_PAGES_TOLD_MAX;

    fn told(report: &mut JobReport, rank: usize, tally: &Tally, segments: &[PlacedSegment]) {
        let counters = Counters { pages_received: 5, pages_sent: 6, invalidations: 7, ..Counters::default() };
        for line in tally.counted(counters, segments.to_vec()).lines(REPORT_PAGES_TOLD_MAX) {
            assert_eq!(report.take(rank, line.trim_end_matches('\n').as_bytes()), None);
        }
    }

    #[test]
    fn a_page_of_two_writers_is_named_with_its_segment_and_the_time_of_both() {
        let (mut report, now) = (JobReport::new(3), Instant::now());
        let segments = [PlacedSegment { name: b"grid".to_vec(), first: 10, pages: 4 }];
        for rank in 0..2 {
            let mut tally = Tally::new(3, true);
            tally.fault(12, Mode::Write, now);
            tally.fault(12, Mode::Read, now + Duration::from_secs(1));
            tally.served(12, now + Duration::from_secs(2));
            // One process stores here, and one loads.
            tally.fault(11, if rank == 0 { Mode::Write } else { Mode::Read }, now);
            tally.served(11, now);
            tally.served(99, now);
            tally.sent(1 - rank, 4096);
            let page = AREA_ADDRESS + 12 * PAGE_BYTES;
            tally.name(page - 8..page + 8, "edge");
            for (at, name) in ["row", "column", "corner"].iter().enumerate() {
                tally.name(page + 64 * at..page + 64 * (at + 1), name);
            }
            told(&mut report, usize::from(rank), &tally, if rank == 0 { &segments } else { &[] });
        }
        let both = Faults { reads: 2, writes: 2, time: Duration::from_secs(4) };
        assert_eq!(report.shared_pages(), [(12, both, vec![0, 1])]);
        let text = report.to_string();
        let address = format!("{:#x}", AREA_ADDRESS + 12 * PAGE_BYTES);
        assert!(text.contains("grid+0x2000  edge  row  column  and 1 more\n") && text.contains(&address), "{text}");
        assert!(text.contains("   0 -> 1             1          4096"), "{text}");
        assert!(text.contains("   2  has told nothing"), "{text}");
    }

    #[test]
    fn what_is_not_of_a_report_is_left_to_show() {
        let mut report = JobReport::new(1);
        let marked = |told: &str| format!("{MARK}{told}").into_bytes();
        for line in [b"a line".to_vec(), marked("page 1"), marked("all 1 2 x 4 5 6"), marked("other 1"), marked("")] {
            assert_eq!(report.take(0, &line), Some(&line[..]));
        }
        let line = [b"begun ".to_vec(), marked("sent 0 1 2")].concat();
        assert_eq!(report.take(1, &line), Some(&line[..]), "of a process that the job does not have");
        assert_eq!(report.take(0, &line), Some(&b"begun "[..]));
    }

    #[test]
    fn pages_beyond_the_bound_are_counted_together() {
        let (mut tally, now) = (Tally::new(1, true), Instant::now());
        for page in 0..REPORT_PAGES_COUNTED_MAX as Page + 3 {
            tally.fault(page, Mode::Read, now);
            tally.served(page, now);
        }
        assert_eq!((tally.pages.len(), tally.others.reads), (REPORT_PAGES_COUNTED_MAX, 3));
        let lines = tally.counted(Counters::default(), Vec::new()).lines(REPORT_PAGES_TOLD_MAX);
        assert_eq!(lines.len(), 1 + REPORT_PAGES_TOLD_MAX);
        assert!(lines[0].contains(&format!("all {} 0 ", REPORT_PAGES_COUNTED_MAX + 3)), "{}", lines[0]);
    }
}
