//! The thread that pages a region: a [`Pager`] over lenders, as that of `byway far`, with one address space. Its pages are moved by this
//! thread itself, so no move is under way while faults are read.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use byway_reactor::userfault::helper::MOVES_MAX;
use byway_reactor::userfault::{FillError, Filled};
use byway_rpc::node::Rpc;
use byway_service::limits::{LENDER_PAUSE, PAGER_AHEAD_PAGES};
use byway_service::memory::pager::{
    Action, Contents, Counters, FillOutcome, Moved, Overdue, PAGE_BYTES, PageId, Pager, Place, SpaceId,
};
use byway_service::memory::pool::Told;
use byway_service::memory::{Borrower, Keeping};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use super::region::Region;
use crate::fault::{PageMerging, Spin, Store};
use crate::limits::FAR_FRAMES;

/// The one address space.
const SPACE: SpaceId = SpaceId(0);

/// How long it sleeps at most while it has nothing to try again, and how often pages that could not be moved are tried again.
const LOOK: Duration = Duration::from_millis(100);

/// How long it sleeps at most while a page is to be tried again.
const RETRY: Duration = Duration::from_millis(1);

/// Pages that one call fills.
const FILL_PAGES_MAX: usize = 64;

static ZEROES: [u8; PAGER_AHEAD_PAGES as usize * PAGE_BYTES] = [0; PAGER_AHEAD_PAGES as usize * PAGE_BYTES];

/// What the program's threads and the pager share.
#[derive(Debug)]
pub(super) struct Shared {
    stops: AtomicBool,
    wake: OwnedFd,
    counters: Mutex<Counters>,
}

impl Shared {
    pub(super) fn new() -> std::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { stops: AtomicBool::new(false), wake, counters: Mutex::default() })
    }

    pub(super) fn stop(&self) {
        self.stops.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    pub(super) fn counters(&self) -> Counters {
        *self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A page to be filled from a frame.
#[derive(Clone, Copy, Debug)]
struct Fill {
    page: u64,
    frame: u32,
    protect: bool,
}

/// See the module.
pub(super) struct RegionPager {
    region: Arc<Region>,
    shared: Arc<Shared>,
    rpc: Rpc,
    pager: Pager,
    store: Store,
    /// Where pages are gathered that are filled by one call.
    fill_bytes: Vec<u8>,
    spin: Spin,
    merging: PageMerging,
    looked: Instant,
    looked_for_places: Instant,
    was_exhausted: bool,
}

impl RegionPager {
    pub(super) fn new(
        region: &Arc<Region>,
        shared: &Arc<Shared>,
        rpc: Rpc,
        lenders: Vec<(String, Borrower)>,
        keeping: Keeping,
        resident_bytes: usize,
    ) -> Result<Self, String> {
        let row = keeping.class.row();
        let store = Store::new(&rpc, lenders, keeping, FAR_FRAMES).map_err(|error| error.to_string())?;
        let mut pager = Pager::new(FAR_FRAMES, resident_bytes / PAGE_BYTES);
        pager.set_row(row);
        pager.add_space(SPACE, true);
        pager.add_pages(SPACE, 0..(region.len() / PAGE_BYTES) as u64, &[]);
        let now = Instant::now();
        Ok(Self {
            region: Arc::clone(region),
            shared: Arc::clone(shared),
            rpc,
            pager,
            store,
            fill_bytes: vec![0; FILL_PAGES_MAX * PAGE_BYTES],
            spin: Spin::new(),
            merging: PageMerging::new(now),
            looked: now,
            looked_for_places: now,
            was_exhausted: false,
        })
    }

    /// Pages the region until the program drops it.
    pub(super) fn run(mut self) {
        let ran: std::thread::Result<std::io::Result<()>> = catch_unwind(AssertUnwindSafe(|| {
            while !self.shared.stops.load(Ordering::Acquire) {
                self.turn()?;
            }
            Ok(())
        }));
        let why = match ran {
            Ok(Ok(())) => return self.store.close(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "it panicked".to_owned(),
        };
        // Threads that touch a page would wait for ever.
        let line =
            format!("byway: the pager of far memory has ended ({why}), and the program's pages are lost with it\n");
        // Standard error may be closed or full.
        let _ = std::io::stderr().write_all(line.as_bytes());
        std::process::abort();
    }

    fn turn(&mut self) -> std::io::Result<()> {
        self.wait()?;
        // Before pages leave: while the kernel merges pages, a write to a protected one may go unnoticed.
        self.pager.protect_pages(self.merging.is_off(Instant::now()));
        let _ = self.rpc.node().progress();
        self.store.pool().turn();
        self.hear();
        let mut faults = Vec::new();
        self.region.faults(|fault| faults.push(fault));
        for fault in faults {
            let at = PageId { space: SPACE, page: fault.page };
            if fault.is_protected {
                self.pager.write_fault(at);
            } else {
                self.pager.fault(at, fault.writes);
            }
            self.act();
        }
        let is_slow = self.store.pool().is_slow();
        self.pager.note_overdue(if is_slow { Overdue::Puts } else { Overdue::Nothing });
        self.pager.retry();
        self.look();
        self.act();
        self.hear();
        *self.shared.counters.lock().unwrap_or_else(PoisonError::into_inner) = self.pager.counters();
        Ok(())
    }

    /// Waits until there is something to do.
    fn wait(&mut self) -> std::io::Result<()> {
        let node = self.rpc.node().descriptor()?;
        let mut fds = [
            PollFd::from_borrowed_fd(node, PollFlags::IN),
            PollFd::from_borrowed_fd(self.region.descriptor(), PollFlags::IN),
            PollFd::new(&self.shared.wake, PollFlags::IN),
        ];
        let longest = if self.pager.has_waiting() { RETRY } else { LOOK };
        self.spin.wait(longest, |limit| {
            let limit = Timespec { tv_sec: 0, tv_nsec: limit.subsec_nanos().into() };
            match poll(&mut fds, Some(&limit)) {
                Err(Errno::INTR) => Ok(false),
                result => Ok(result? > 0),
            }
        })
    }

    /// Does what is due a few times a second.
    fn look(&mut self) {
        let now = Instant::now();
        if now.duration_since(self.looked) >= LOOK {
            self.looked = now;
            self.pager.retry_moves();
        }
        if now.duration_since(self.looked_for_places) >= LENDER_PAUSE {
            self.looked_for_places = now;
            self.pager.try_places_again();
        }
    }

    fn hear(&mut self) {
        while let Some(told) = self.store.pool().next_told() {
            match told {
                Told::Put(frame, end) => self.pager.put_ended(frame, end),
                Told::Got(frame, well) => self.pager.got(frame, well),
                Told::Slab(places) => {
                    self.was_exhausted = false;
                    self.pager.add_slab(places);
                }
                Told::NoSlab => {
                    if !std::mem::replace(&mut self.was_exhausted, true) {
                        let why = self.store.pool().why_no_slab();
                        tracing::warn!(why, "no lender has memory left; far memory stays above its limit");
                    }
                    self.pager.no_more_slabs();
                }
                Told::Rests(slab, rests) => self.pager.rest_slab(slab, rests),
                Told::Lost(slab) => self.pager.lose_slab(slab),
                Told::CopiesLost => self.pager.leave_lost(|place| self.store.pool().has(place)),
                Told::Slow(frame) => self.pager.get_again(frame),
            }
        }
        self.act();
    }

    /// Does what the pager says.
    fn act(&mut self) {
        loop {
            let mut moves: Vec<(u64, u32)> = Vec::new();
            let mut fills: Vec<Fill> = Vec::new();
            let mut gets: Vec<(u32, Place)> = Vec::new();
            while let Some(action) = self.pager.next_action() {
                match action {
                    Action::MoveOut(at, frame, _) => moves.push((at.page, frame)),
                    Action::Put(frame, place) => self.store.pool().put(frame, place),
                    Action::Keep(frame, place) => self.store.pool().keep(frame, place),
                    Action::Get(frame, place) => gets.push((frame, place)),
                    Action::Fill(at, Contents::Frame(frame)) => {
                        fills.push(Fill { page: at.page, frame, protect: false });
                    }
                    Action::Fill(at, Contents::Protected(frame)) => {
                        fills.push(Fill { page: at.page, frame, protect: true });
                    }
                    Action::Fill(at, Contents::Zeroes(count)) => self.fill_zeroes(at, count),
                    Action::Unprotect(at) => {
                        let outcome = self.region.unprotect(at.page).map_or_else(outcome, |()| FillOutcome::Done(1));
                        self.pager.unprotected(at, outcome);
                    }
                    Action::Poison(at) => self.poison(at),
                    Action::Wake(at) => self.region.wake(at.page),
                    Action::Lease => self.store.pool().want_slab(),
                }
            }
            if moves.is_empty() && fills.is_empty() && gets.is_empty() {
                break;
            }
            self.fill_all(fills);
            // Behind the fills: a get may be into a frame that was free as soon as its page was to be filled.
            for (frame, place) in gets {
                self.store.pool().get(frame, place);
            }
            self.store.pool().flush();
            self.move_out(moves);
        }
        self.store.pool().flush();
    }

    fn fill_zeroes(&mut self, at: PageId, count: u64) {
        let filled = self.region.fill(at.page, &ZEROES[..count as usize * PAGE_BYTES], false);
        self.pager.filled(at, Contents::Zeroes(count), fill_outcome(filled, count));
    }

    /// Fills pages from frames; those that lie side by side by one call.
    fn fill_all(&mut self, mut fills: Vec<Fill>) {
        fills.sort_unstable_by_key(|fill| fill.page);
        let is_next = |fill: &Fill, next: &Fill| fill.page + 1 == next.page && fill.protect == next.protect;
        for run in fills.chunk_by(is_next).flat_map(|run| run.chunks(FILL_PAGES_MAX)) {
            let mut bytes = std::mem::take(&mut self.fill_bytes);
            for (fill, page) in run.iter().zip(bytes.as_chunks_mut::<PAGE_BYTES>().0) {
                self.store.read(fill.frame, page);
            }
            let mut left = run;
            while let [first, ..] = left {
                let start = (run.len() - left.len()) * PAGE_BYTES;
                let filled = self.region.fill(first.page, &bytes[start..run.len() * PAGE_BYTES], first.protect);
                let outcome = fill_outcome(filled, left.len() as u64);
                let done = if let FillOutcome::Done(done) = outcome { done as usize } else { 1 };
                for fill in &left[..done] {
                    let at = PageId { space: SPACE, page: fill.page };
                    let is_done = matches!(outcome, FillOutcome::Done(_));
                    let contents =
                        if fill.protect { Contents::Protected(fill.frame) } else { Contents::Frame(fill.frame) };
                    self.pager.filled(at, contents, if is_done { FillOutcome::Done(1) } else { outcome });
                }
                left = &left[done..];
            }
            self.fill_bytes = bytes;
        }
    }

    /// Moves pages out to frames; those that lie side by side by one call.
    fn move_out(&mut self, mut moves: Vec<(u64, u32)>) {
        moves.sort_unstable();
        for run in moves.chunk_by(|(page, _), (next, _)| page + 1 == *next).flat_map(|run| run.chunks(MOVES_MAX)) {
            let mut left = run;
            while let [(page, _), ..] = left {
                let mut outcomes = Vec::with_capacity(left.len());
                let taken = self.region.take(*page, left.len(), |at, bytes| {
                    let is_zero = bytes.as_chunks::<8>().0.iter().all(|word| *word == [0; 8]);
                    if !is_zero {
                        self.store.write(left[at].1, bytes);
                    }
                    outcomes.push(if is_zero { Moved::Zeroes } else { Moved::Out });
                });
                // After a part, the next try says why the next page was not moved.
                if let Err(error) = taken
                    && outcomes.is_empty()
                {
                    outcomes.push(if error == FillError::NoMapping { Moved::Missing } else { Moved::Stays });
                }
                for ((_, frame), outcome) in left.iter().zip(&outcomes) {
                    self.pager.moved(*frame, *outcome);
                }
                left = &left[outcomes.len()..];
            }
        }
    }

    fn poison(&mut self, at: PageId) {
        let outcome = fill_outcome(self.region.poison(at.page), 1);
        if outcome != FillOutcome::Changing {
            tracing::error!(
                offset = at.page * PAGE_BYTES as u64,
                "a page of far memory is lost with its lender, or was changed there: the program gets SIGBUS; the classes disk, mirror and parity can give it again"
            );
        }
        self.pager.poisoned(at, outcome);
    }
}

fn fill_outcome(filled: Filled, pages: u64) -> FillOutcome {
    match filled {
        Ok(()) => FillOutcome::Done(pages),
        Err(partly) if partly.bytes > 0 => FillOutcome::Done((partly.bytes / PAGE_BYTES) as u64),
        Err(partly) => outcome(partly.error),
    }
}

fn outcome(error: FillError) -> FillOutcome {
    match error {
        FillError::Exists => FillOutcome::Exists,
        FillError::NoMapping | FillError::Gone => FillOutcome::NoMapping,
        // Without memory for now: tried again.
        _ => FillOutcome::Changing,
    }
}
