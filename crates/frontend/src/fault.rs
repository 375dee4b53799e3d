//! The front end of far memory: page faults of programs, answered by a [`Pager`] over lenders.
//!
//! The pager is a process of its own, beside a [`keeper`]. Each program that it pages has a helper
//! ([`helper`](byway_reactor::userfault::helper)). The helper is loaded before the program begins, hands over the program's
//! userfaultfd, and moves pages out on command. docs/decisions/0037 says why the pager is not a thread of the program.
//!
//! The pager finds mappings in /proc/PID/maps, because the kernel reports changes of watched mappings but not new ones.
//! Until the programs use half of the limit, nothing is watched, and paging costs nothing.
//!
//! During a move no message is read: a thread that changes a mapping waits until its message is read, so no move ever takes
//! a page of another mapping than the pager meant.

mod children;
mod fills;
pub mod keeper;
mod maps;
mod page_merging;
mod process;
mod programs;
mod status;
mod store;
mod thrashing;
mod unanswered;
mod unpaged;
mod waiting;

use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use byway_reactor::userfault::dead_mans_switch::DeadMansSwitch;
use byway_reactor::userfault::helper::MOVES_MAX;
use byway_reactor::userfault::{Event, FaultKind, Features, Read, Userfault};
use byway_rpc::node::Rpc;
use byway_service::limits::LENDER_PAUSE;
use byway_service::memory::pager::{
    Action, Contents, Counters, FillOutcome, Moved, Overdue, PAGE_BYTES, PageId, Pager, Place, SpaceId,
};
use byway_service::memory::pool::{Class, PoolCounters, Told};
use byway_service::memory::{Borrower, Keeping};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use rustix::process::{Resource, getrlimit};

use self::fills::{FILL_PAGES_MAX, Fill};
use self::maps::Candidate;
pub(crate) use self::page_merging::PageMerging;
use self::process::{Helped, Process};
use self::status::Rates;
pub use self::status::{FarStatus, LenderShare, ask};
pub(crate) use self::store::{Store, spill_to};
use self::thrashing::Thrashing;
use self::unanswered::Waits;
use self::unpaged::Unpaged;
pub(crate) use self::waiting::Spin;
use crate::latencies::Latencies;
use crate::limits::{FAR_BUDGET_PAGES_MIN, FAR_FRAMES};

/// How often the programs' memory is looked at.
const LOOK: Duration = Duration::from_millis(1);

/// How often it is looked whether a forked child has ended, and whether pages that could not be moved now can be.
const SLOW_LOOK: Duration = Duration::from_millis(100);

/// How often all mappings are looked through, also if a program has not more of them by the number of its bytes.
const MAPS_LOOK: Duration = Duration::from_millis(20);

/// What the pager asks of the kernel.
const FEATURES: Features = Features::UNMAP
    .and(Features::REMAP)
    .and(Features::REMOVE)
    .and(Features::FORK)
    .and(Features::MOVE)
    .and(Features::POISON)
    .and(Features::WRITE_PROTECT);

/// What a job is run with.
#[derive(Debug)]
pub struct FarOptions {
    /// Bytes of memory of its programs that may be on this machine, all together.
    pub limit_bytes: u64,
    /// What each page relies on.
    pub class: Class,
    /// The file of [`Class::Disk`].
    pub spill: Option<File>,
    /// Lenders and the file get pages that are sealed with a key of this process.
    pub encrypt: bool,
}

/// What a job has used, for its report.
#[derive(Clone, Copy, Debug, Default)]
pub struct FarReport {
    /// What the pager did.
    pub pager: Counters,
    /// What became of pages at lenders.
    pub pool: PoolCounters,
    /// The most bytes that were resident when they were looked at.
    pub resident_bytes_max: usize,
    /// Programs that were paged.
    pub programs: u32,
    /// Waits for pages.
    pub latencies: Latencies,
}

/// The programs of one `byway far`.
pub struct FarJob {
    rpc: Rpc,
    listener: OwnedFd,
    path: PathBuf,
    pager: Pager,
    store: Store,
    /// Where pages are gathered that are filled by one call.
    fill_bytes: Vec<u8>,
    spin: Spin,
    merging: PageMerging,
    waits: Waits,
    rates: Rates,
    thrashing: Thrashing,
    unpaged: Unpaged,
    /// When it was looked last.
    resident_bytes: usize,
    /// Programs that have connected and said nothing yet, and since when.
    greetings: Vec<(OwnedFd, Instant)>,
    processes: Vec<Process>,
    /// Kills forked children, which have no helper, when this process and the keeper are killed at once. Made when it is first needed, and
    /// dropped after the processes.
    switch: Option<DeadMansSwitch>,
    limit_bytes: usize,
    spaces: u32,
    /// Mappings are watched.
    is_watching: bool,
    /// Since when moves are under way of which none has ended.
    moving_since: Option<Instant>,
    looked: Instant,
    looked_slowly: Instant,
    looked_through: Instant,
    looked_for_places: Instant,
    report: FarReport,
    was_exhausted: bool,
    /// A program that starts waits for a descriptor of this process.
    accept_waits: bool,
    /// The log has said that no descriptor is left.
    was_without_descriptors: bool,
}

/// Whether this process may page others: it needs the messages of forks.
///
/// # Errors
/// Why not, and what to do.
pub fn availability() -> Result<(), byway_reactor::userfault::OpenError> {
    Userfault::open(FEATURES, false).map(drop)
}

impl FarJob {
    /// A job over these lenders, on one node. Programs find it at `path`, which must not be there.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(
        rpc: Rpc,
        lenders: Vec<(String, Borrower)>,
        path: &Path,
        options: FarOptions,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        bind(&listener, &SocketAddrUnix::new(path)?)?;
        listen(&listener, 64)?;
        let FarOptions { limit_bytes, class, spill, encrypt } = options;
        let keeping = Keeping { class, spill: spill.map(spill_to), encrypt };
        let store = Store::new(&rpc, lenders, keeping, FAR_FRAMES)?;
        let limit_bytes = usize::try_from(limit_bytes).unwrap_or(usize::MAX);
        let now = Instant::now();
        let mut pager = Pager::new(FAR_FRAMES, limit_bytes / PAGE_BYTES);
        pager.set_row(class.row());
        Ok(Self {
            rpc,
            listener,
            path: path.to_owned(),
            pager,
            store,
            fill_bytes: vec![0; FILL_PAGES_MAX * PAGE_BYTES],
            spin: Spin::new(),
            merging: PageMerging::new(now),
            waits: Waits::default(),
            rates: Rates::new(now),
            thrashing: Thrashing::new(now),
            unpaged: Unpaged::new(now),
            resident_bytes: 0,
            greetings: Vec::new(),
            processes: Vec::new(),
            switch: None,
            limit_bytes,
            spaces: 0,
            is_watching: false,
            moving_since: None,
            looked: now,
            looked_slowly: now,
            looked_through: now,
            looked_for_places: now,
            report: FarReport::default(),
            was_exhausted: false,
            accept_waits: false,
            was_without_descriptors: false,
        })
    }

    /// Pages programs until `has_ended` says that no process of the job is left; then gives what they used.
    ///
    /// # Errors
    /// The kernel's: nothing can be waited for.
    pub fn run(mut self, mut has_ended: impl FnMut() -> bool) -> std::io::Result<FarReport> {
        while !(has_ended() && self.processes.is_empty()) {
            self.turn()?;
        }
        let _ = std::fs::remove_file(&self.path);
        self.report.pager = self.pager.counters();
        self.report.pool = self.store.pool().counters();
        self.report.latencies = self.waits.latencies;
        self.store.close();
        Ok(self.report)
    }

    fn turn(&mut self) -> std::io::Result<()> {
        let ready = self.wait()?;
        let _ = self.rpc.node().progress();
        self.pager.pause_moves(true);
        self.store.pool().turn();
        self.hear();
        if ready.joins || self.accept_waits || !self.greetings.is_empty() {
            self.accept();
        }
        if ready.answers || self.processes.iter().any(Process::is_ending) {
            self.take_answers();
        }
        self.read_messages();
        self.look();
        self.pager.pause_moves(false);
        self.act();
        self.hear();
        Ok(())
    }

    /// Tells the pager what has become of pages and slabs.
    fn hear(&mut self) {
        while let Some(first) = self.store.pool().next_told() {
            // All of them before pages are filled, so that neighbours are filled together.
            self.heard(first);
            while let Some(told) = self.store.pool().next_told() {
                self.heard(told);
            }
            self.act();
        }
    }

    fn heard(&mut self, told: Told) {
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
                    tracing::warn!(why, "no lender has memory left; programs stay above their limit");
                }
                self.pager.no_more_slabs();
            }
            Told::Rests(slab, rests) => self.pager.rest_slab(slab, rests),
            Told::Lost(slab) => self.pager.lose_slab(slab),
            Told::CopiesLost => self.pager.leave_lost(|place| self.store.pool().has(place)),
            Told::Slow(frame) => self.pager.get_again(frame),
        }
    }

    /// Reads the messages of programs with no move under way.
    fn read_messages(&mut self) {
        let mut index = 0;
        while index < self.processes.len() {
            let is_free = self.processes[index].helped.as_ref().is_none_or(Helped::has_no_moves);
            let mut events = Vec::new();
            let mut ended = is_free.then_some(Read::Messages(0));
            while let Some(Read::Messages(_)) = ended {
                ended = Some(self.processes[index].userfault.read(|event| events.push(event)));
            }
            match ended {
                Some(Read::NoDescriptors) => self.await_descriptor(index),
                Some(_) => self.processes[index].fork_waits = None,
                None => {}
            }
            let space = self.processes[index].space;
            // The kernel gives faults before changes that came earlier, and a page is to be filled as the change leaves it.
            events.sort_by_key(|event| matches!(event, Event::Fault { .. }));
            for event in events {
                self.message(space, event);
                self.act();
            }
            index += 1;
        }
        // A helper may be stopped, as by a debugger: the other programs are not to wait for it.
        let is_moving = self.pager.moves_in_flight() > 0;
        self.moving_since = is_moving.then(|| self.moving_since.unwrap_or_else(Instant::now));
        let are_moves_slow = self.moving_since.is_some_and(|since| since.elapsed() >= SLOW_LOOK);
        let overdue = match (are_moves_slow, self.store.pool().is_slow()) {
            (true, _) => Overdue::Moves,
            (false, true) => Overdue::Puts,
            (false, false) => Overdue::Nothing,
        };
        self.pager.note_overdue(overdue);
        self.pager.retry();
        self.act();
    }

    /// Says once that this process can open no more descriptors.
    fn note_descriptors(&mut self, consequence: &str) {
        if !std::mem::replace(&mut self.was_without_descriptors, true) {
            let limit = getrlimit(Resource::Nofile).current;
            tracing::error!(
                limit,
                "the limit of open files of byway far is reached: {consequence}; raise it before the start (ulimit -Hn)"
            );
        }
    }

    fn message(&mut self, space: SpaceId, event: Event) {
        let pages = |range: &Range<usize>| (range.start / PAGE_BYTES) as u64..(range.end / PAGE_BYTES) as u64;
        match event {
            Event::Fault { address, kind: FaultKind::Missing, write, .. } => {
                let at = PageId { space, page: (address / PAGE_BYTES) as u64 };
                self.waits.begin(at);
                if !self.pager.knows(at) {
                    self.adopt(space);
                }
                if !self.pager.knows(at) {
                    // The mapping has grown where it is. Nothing of it was ever moved out, since only what is known is.
                    self.pager.add_pages(space, at.page..at.page + 1, &[]);
                }
                self.pager.fault(at, write);
            }
            Event::Fault { address, .. } => {
                let at = PageId { space, page: (address / PAGE_BYTES) as u64 };
                self.waits.begin(at);
                self.pager.write_fault(at);
            }
            Event::Removed(range) => {
                self.pager.removed(space, pages(&range));
                self.wake(space, &range);
                let process = self.processes.iter_mut().find(|process| process.space == space);
                if let Some(helped) = process.and_then(|process| process.helped.as_mut()) {
                    helped.note_dropped(range);
                }
            }
            Event::Unmapped(range) => {
                self.pager.unmapped(space, pages(&range));
                self.wake(space, &range);
            }
            Event::Remapped { from, to, bytes } => {
                let page = |address: usize| (address / PAGE_BYTES) as u64;
                self.pager.remapped(space, page(from), page(to), page(bytes));
                self.wake(space, &(from..from + bytes));
            }
            Event::Forked(userfault) => {
                let child = self.next_space();
                let is_far = self.pager.forked(space, child);
                if is_far {
                    self.find_forking_child(space);
                }
                // Reading this takes the longer the more memory the parent has, and is of no use where the child has all of its pages.
                let parent = self.processes.iter().find(|process| process.space == space);
                let wiped = parent.filter(|_| is_far).map(Process::wiped_on_fork).unwrap_or_default();
                let number = parent.and_then(Process::number);
                for range in &wiped {
                    self.pager.removed(child, pages(range));
                }
                self.processes.push(Process::of_child(child, userfault, wiped, number));
            }
        }
    }

    fn wake(&self, space: SpaceId, range: &Range<usize>) {
        if let Some(process) = self.processes.iter().find(|process| process.space == space) {
            let page = |address: usize| address / PAGE_BYTES * PAGE_BYTES;
            process.userfault.wake(page(range.start)..page(range.end));
        }
    }

    /// Watches the mappings of a program that are not watched yet.
    fn adopt(&mut self, space: SpaceId) {
        let Some(process) = self.processes.iter().find(|process| process.space == space) else { return };
        let Some(helped) = &process.helped else { return };
        let Ok(candidates) = helped.candidates() else { return };
        let pages = |range: &Range<usize>| (range.start / PAGE_BYTES) as u64..(range.end / PAGE_BYTES) as u64;
        for Candidate { range, grows_to } in candidates {
            let first = PageId { space, page: (range.start / PAGE_BYTES) as u64 };
            if !process.is_watched(range.clone(), self.pager.is_protected(first)) {
                self.pager.forget_present(space, pages(&range));
            }
            for part in self.pager.unknown(space, pages(&range)) {
                let bytes = part.start as usize * PAGE_BYTES..part.end as usize * PAGE_BYTES;
                let grows_to = if bytes.end == range.end { grows_to } else { bytes.end };
                let Ok(found) = helped.proc.pages(bytes.clone()) else { continue };
                for part in found.without_stacks(Candidate { range: bytes, grows_to }) {
                    // Gone again, or of a kind that cannot be watched.
                    if process.watch(&part).is_err() {
                        continue;
                    }
                    let Ok(found) = helped.proc.pages(part.range.clone()) else { continue };
                    let present: Vec<_> = found.present.iter().map(pages).collect();
                    self.pager.add_pages(space, pages(&part.range), &present);
                }
            }
        }
    }

    /// Counts pages that were dropped by `MADV_FREE`, and are there still or again.
    fn look_at_dropped(&mut self) {
        for process in &mut self.processes {
            let Some(helped) = &mut process.helped else { continue };
            for range in helped.take_present_of_dropped() {
                let pages = (range.start / PAGE_BYTES) as u64..(range.end / PAGE_BYTES) as u64;
                self.pager.found_present(process.space, pages);
            }
        }
    }

    /// Looks at the programs' memory.
    fn look(&mut self) {
        let now = Instant::now();
        if now.duration_since(self.looked) < LOOK {
            return;
        }
        self.looked = now;
        let mut is_slow_look = false;
        self.pager.protect_pages(self.merging.is_off(now));
        if now.duration_since(self.looked_slowly) >= SLOW_LOOK {
            self.looked_slowly = now;
            is_slow_look = true;
            self.look_at_dropped();
            for index in (0..self.processes.len()).rev() {
                if self.processes[index].helped.is_none() && self.processes[index].userfault.is_gone() {
                    self.remove(index);
                }
            }
            self.pager.retry_moves();
            self.count_rates(now);
            let processes = &self.processes;
            let lives = |process: &&Process| !process.userfault.is_gone();
            self.unpaged.look(now, || processes.iter().filter(lives).filter_map(Process::number).collect());
        }
        self.find_children(is_slow_look);
        if now.duration_since(self.looked_for_places) >= LENDER_PAUSE {
            self.looked_for_places = now;
            self.pager.try_places_again();
        }
        let mut resident = 0;
        let mut grown = Vec::new();
        for process in &mut self.processes {
            let Some(helped) = &mut process.helped else { continue };
            let Some((mapped, bytes)) = helped.proc.sizes() else { continue };
            resident += bytes;
            if mapped != helped.mapped_bytes {
                helped.mapped_bytes = mapped;
                grown.push(process.space);
            }
        }
        self.resident_bytes = resident;
        self.report.resident_bytes_max = self.report.resident_bytes_max.max(resident);
        let begins = !self.is_watching && resident > self.limit_bytes / 2;
        self.is_watching |= begins;
        if !self.is_watching {
            return;
        }
        if begins || now.duration_since(self.looked_through) >= MAPS_LOOK {
            self.looked_through = now;
            grown = self.processes.iter().map(|process| process.space).collect();
        }
        for space in grown {
            self.adopt(space);
        }
        let others = resident.saturating_sub(self.pager.local_pages() * PAGE_BYTES);
        let budget = self.limit_bytes.saturating_sub(others + self.store.frames_bytes()) / PAGE_BYTES;
        self.pager.set_budget(budget.max(FAR_BUDGET_PAGES_MIN));
        self.act();
    }

    /// Does what the pager says.
    fn act(&mut self) {
        let mut moves: Vec<(PageId, u32, bool)> = Vec::new();
        let mut fills: Vec<Fill> = Vec::new();
        let mut gets: Vec<(u32, Place)> = Vec::new();
        loop {
            while let Some(action) = self.pager.next_action() {
                match action {
                    Action::MoveOut(at, frame, is_protected) => moves.push((at, frame, is_protected)),
                    Action::Put(frame, place) => self.store.pool().put(frame, place),
                    Action::Keep(frame, place) => self.store.pool().keep(frame, place),
                    Action::Get(frame, place) => gets.push((frame, place)),
                    Action::Fill(at, Contents::Frame(frame)) => fills.push(Fill { at, frame, protect: false }),
                    Action::Fill(at, Contents::Protected(frame)) => fills.push(Fill { at, frame, protect: true }),
                    Action::Unprotect(at) => self.unprotect(at),
                    Action::Fill(at, Contents::Zeroes(count)) => self.fill_zeroes(at, count),
                    Action::Poison(at) => self.poison(at),
                    Action::Wake(at) => {
                        self.waits.end(at);
                        let start = at.page as usize * PAGE_BYTES;
                        self.wake(at.space, &(start..start + PAGE_BYTES));
                    }
                    Action::Lease => self.store.pool().want_slab(),
                }
            }
            if fills.is_empty() && gets.is_empty() {
                break;
            }
            self.fill_all(std::mem::take(&mut fills));
            // Behind the fills: a get may be into a frame that was free as soon as its page was to be filled.
            for (frame, place) in gets.drain(..) {
                self.store.pool().get(frame, place);
            }
        }
        self.store.pool().flush();
        self.command(moves);
    }

    /// Has helpers move pages out.
    fn command(&mut self, mut moves: Vec<(PageId, u32, bool)>) {
        // Pages that lie side by side are moved by one call.
        moves.sort_unstable();
        while let Some((first, ..)) = moves.first().copied() {
            let (mut one, others): (Vec<_>, Vec<_>) = moves.into_iter().partition(|(at, ..)| at.space == first.space);
            let more = one.split_off(one.len().min(MOVES_MAX));
            moves = [more, others].concat();
            let helped = self.processes.iter_mut().find(|process| process.space == first.space);
            let helped = helped.and_then(|process| process.helped.as_mut());
            // A helper has one command at a time.
            let said = helped.is_some_and(|helped| helped.commanded.is_empty() && helped.command(&one));
            if !said {
                for (_, frame, _) in one {
                    self.pager.moved(frame, Moved::Stays);
                }
            }
        }
    }

    fn unprotect(&mut self, at: PageId) {
        let process = self.processes.iter().find(|process| process.space == at.space);
        let outcome = process.map_or(FillOutcome::NoMapping, |process| process.unprotect(at));
        if outcome == FillOutcome::NoMapping {
            self.wake(at.space, &(at.page as usize * PAGE_BYTES..(at.page as usize + 1) * PAGE_BYTES));
        }
        if outcome != FillOutcome::Changing {
            self.waits.end(at);
        }
        self.pager.unprotected(at, outcome);
    }

    fn poison(&mut self, at: PageId) {
        let Some(process) = self.processes.iter().find(|process| process.space == at.space) else { return };
        let outcome = process.poison(at);
        if outcome != FillOutcome::Changing {
            tracing::error!(
                address = format!("{:#x}", at.page as usize * PAGE_BYTES),
                "a page is lost with its lender, or was changed there: its program gets SIGBUS; the classes disk, mirror=2 and parity=4+1 can give it again"
            );
        }
        self.waits.end(at);
        self.pager.poisoned(at, outcome);
    }
}
