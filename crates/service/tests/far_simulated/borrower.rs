//! The borrower: a program of four threads, the pager of its memory, and the pool that the pager's pages lie in.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io::{Error, ErrorKind};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use byway_fabric::node::{Memory, NodeOptions};
use byway_reactor::Instant;
use byway_reactor::sim::World;
use byway_rpc::node::Rpc;
use byway_rpc::session::Spoken;
use byway_service::limits::POOL_COPIES_MAX;
use byway_service::memory::pager::{
    Action, Contents, FillOutcome, Moved, PAGE_BYTES, PageId, Pager, Place, PutEnd, SpaceId,
};
use byway_service::memory::pool::{Class, Told};
use byway_service::memory::wire::{PROTOCOL, VERSIONS};
use byway_service::memory::{LenderAt, PoolClient, Spill};
use byway_skip::rule;

use super::{Chance, lenders};

/// Pages of the program, and how many of them may be here. The pager aims for some fewer.
pub const PAGES: u64 = 300;
const BUDGET: usize = 80;
const FRAMES: u32 = 64;
const SPACE: SpaceId = SpaceId(1);
const THREADS: usize = 4;
/// A page that does not come by then, or is not found to be lost, never comes: a lender is given up after 6 s.
const FAULT_TIME_MAX: Duration = Duration::from_secs(30);
/// The same for a page of which another copy can be had.
const OTHER_COPY_TIME_MAX: Duration = Duration::from_secs(3);

pub fn ip() -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 1, 1))
}

/// A file of pages that may refuse writes.
#[derive(Clone, Default)]
pub struct SimulatedFile {
    pages: Arc<Mutex<HashMap<Place, [u8; PAGE_BYTES]>>>,
    is_full: Arc<std::sync::atomic::AtomicBool>,
}

impl SimulatedFile {
    pub fn fill_up(&self, is_full: bool) {
        self.is_full.store(is_full, std::sync::atomic::Ordering::Relaxed);
    }
}

impl Spill for SimulatedFile {
    fn write(&mut self, place: Place, page: &[u8; PAGE_BYTES]) -> std::io::Result<()> {
        if self.is_full.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(ErrorKind::StorageFull.into());
        }
        self.pages.lock().unwrap().insert(place, *page);
        Ok(())
    }

    fn read(&mut self, place: Place, page: &mut [u8; PAGE_BYTES]) -> std::io::Result<()> {
        *page = *self.pages.lock().unwrap().get(&place).ok_or_else(|| Error::from(ErrorKind::UnexpectedEof))?;
        Ok(())
    }
}

/// What a thread waits for.
#[derive(Clone, Copy)]
struct Waiting {
    page: u64,
    writes: bool,
    since: Instant,
}

pub struct Borrower {
    pager: Pager,
    pub client: PoolClient,
    pub file: SimulatedFile,
    /// Pages that are in the program, with the version that each holds; 0: zeroes.
    here: HashMap<u64, u64>,
    /// The version that the program wrote last.
    wrote: HashMap<u64, u64>,
    poisoned: HashSet<u64>,
    threads: [Option<Waiting>; THREADS],
    moves: VecDeque<(PageId, u32)>,
    /// Frames that have the only bytes of a page.
    precious: HashMap<u32, u64>,
    places: Vec<Place>,
    garbage: Memory,
    /// Accesses that the threads may begin.
    pub granted: usize,
    versions: u64,
    pub accesses: u64,
    pub lost: u64,
    /// Pages may be lost by what has happened.
    pub may_lose: bool,
    /// Of each page another copy can be had, whatever happens.
    pub has_other_copies: bool,
    tried_again: Instant,
    chance: Chance,
    rpc: Rpc,
}

impl Borrower {
    pub fn start(world: &World, class: Class, lender_count: usize, places: u32, seed: u64) -> Self {
        let spoken = vec![Spoken { protocol: PROTOCOL, versions: VERSIONS, grant: None }];
        let rpc = Rpc::over(world.node(ip(), 8 << 20), &NodeOptions::default(), spoken, seed).expect("a node");
        let frames = rpc.node().register((FRAMES as usize + POOL_COPIES_MAX) * PAGE_BYTES).expect("frames");
        let garbage = rpc.node().register(PAGE_BYTES).expect("a page");
        garbage.write(0, &[0xa5; PAGE_BYTES]).expect("its own range");
        let at = |number| LenderAt { name: format!("lender {number}"), address: lenders::at(number), session: None };
        let file = SimulatedFile::default();
        let spill = (class == Class::Disk).then(|| Box::new(file.clone()) as Box<dyn Spill>);
        let all = (0..lender_count).map(at).collect();
        let client = PoolClient::new(&rpc, all, (class, spill), (frames, places)).expect("a pool");
        let mut pager = Pager::new(FRAMES, BUDGET);
        pager.add_space(SPACE, true);
        pager.add_pages(SPACE, 0..PAGES, &[]);
        Self {
            pager,
            client,
            file,
            here: HashMap::new(),
            wrote: HashMap::new(),
            poisoned: HashSet::new(),
            threads: [None; THREADS],
            moves: VecDeque::new(),
            precious: HashMap::new(),
            places: Vec::new(),
            garbage,
            granted: 0,
            versions: 0,
            accesses: 0,
            lost: 0,
            may_lose: false,
            has_other_copies: false,
            tried_again: world.now(),
            chance: Chance::new(seed ^ 0x5eed),
            rpc,
        }
    }

    pub fn next_tick(&self) -> Option<Instant> {
        self.client.next_tick()
    }

    pub fn is_idle(&self) -> bool {
        self.granted == 0 && self.threads.iter().all(Option::is_none) && self.moves.is_empty()
    }

    /// Pages that are not in the program.
    pub fn far_pages(&self) -> usize {
        self.pager.far_pages()
    }

    /// Does what is ready; whether something was.
    pub fn turn(&mut self, world: &World) -> bool {
        let was_ready = world.has_ready(ip());
        if was_ready {
            self.rpc.node().turn().expect("the node turns");
        }
        self.client.turn();
        self.hear();
        if world.now() - self.tried_again >= Duration::from_secs(1) {
            self.tried_again = world.now();
            self.pager.retry_moves();
            self.pager.try_places_again();
        }
        self.act();
        self.pager.note_overdue(self.client.is_slow());
        self.move_out();
        let stepped = self.run_threads(world.now());
        self.pager.retry();
        self.act();
        // As the driver does: what was asked for since the client's turn begins now.
        self.client.flush();
        while self.hear() {
            self.client.flush();
        }
        was_ready || stepped || !self.moves.is_empty()
    }

    /// Whether there was something.
    fn hear(&mut self) -> bool {
        let mut has_heard = false;
        while let Some(told) = self.client.next_told() {
            has_heard = true;
            match told {
                Told::Put(frame, end) => {
                    if end == PutEnd::Kept {
                        self.precious.remove(&frame);
                    }
                    self.pager.put_ended(frame, end);
                }
                Told::Got(frame, well) => self.pager.got(frame, well),
                Told::Slab(places) => self.pager.add_slab(places),
                Told::NoSlab => self.pager.no_more_slabs(),
                Told::Rests(slab, rests) => self.pager.rest_slab(slab, rests),
                Told::Lost(slab) => {
                    rule!(self.may_lose, "slab {slab} was lost, and nothing has happened that loses one");
                    self.pager.lose_slab(slab);
                }
                Told::Slow(frame) => self.pager.get_again(frame),
            }
            self.act();
        }
        has_heard
    }

    fn act(&mut self) {
        while let Some(action) = self.pager.next_action() {
            match action {
                Action::MoveOut(at, frame) => {
                    self.is_reused(frame);
                    self.moves.push_back((at, frame));
                }
                Action::Put(frame, place) => {
                    self.places.push(place);
                    self.client.put(frame, place);
                }
                Action::Get(frame, place) => {
                    self.is_reused(frame);
                    self.client.get(frame, place);
                }
                Action::Fill(at, contents) => self.fill(at, contents),
                Action::Poison(at) => {
                    rule!(self.may_lose, "page {} was lost, and nothing has happened that loses one", at.page);
                    self.poisoned.insert(at.page);
                    self.pager.poisoned(at, FillOutcome::Done(1));
                }
                Action::Wake(_) => {}
                Action::Lease => self.client.want_slab(),
            }
        }
    }

    fn is_reused(&self, frame: u32) {
        let page = self.precious.get(&frame);
        rule!(page.is_none(), "frame {frame} is used again, and page {page:?} is nowhere else");
    }

    /// The helper does what it was told, in part.
    fn move_out(&mut self) {
        let count = self.chance.below(self.moves.len() + 1);
        for _ in 0..count {
            let Some((at, frame)) = self.moves.pop_front() else { break };
            let outcome = match self.here.remove(&at.page) {
                None => Moved::Missing,
                Some(0) => Moved::Zeroes,
                Some(version) => {
                    let bytes = bytes_of(at.page, version);
                    self.client.frames().write(frame as usize * PAGE_BYTES, &bytes).expect("its own range");
                    self.precious.insert(frame, at.page);
                    Moved::Out
                }
            };
            self.pager.moved(frame, outcome);
            self.act();
        }
    }

    fn fill(&mut self, at: PageId, contents: Contents) {
        let count = if let Contents::Zeroes(count) = contents { count } else { 1 };
        let mut done = 0;
        for page in at.page..at.page + count {
            if page >= PAGES || self.here.contains_key(&page) {
                break;
            }
            let last = self.wrote.get(&page).copied().unwrap_or(0);
            let version = match contents {
                Contents::Zeroes(_) => 0,
                Contents::Frame(frame) => {
                    let bytes = self.client.read_frame(frame);
                    rule!(bytes == bytes_of(page, last), "page {page} comes with other bytes than version {last}");
                    self.precious.remove(&frame);
                    last
                }
            };
            rule!(version == last, "page {page} comes as version {version}, and {last} was written");
            self.here.insert(page, version);
            done += 1;
        }
        let outcome = if done > 0 { FillOutcome::Done(done) } else { FillOutcome::Exists };
        self.pager.filled(at, contents, outcome);
    }

    /// Threads read and write; whether one did.
    fn run_threads(&mut self, now: Instant) -> bool {
        let mut stepped = false;
        for thread in 0..THREADS {
            if self.threads[thread].is_none() && self.granted > 0 {
                self.granted -= 1;
                let near = self.chance.one_in(2);
                let page = if near { self.versions % PAGES } else { self.chance.below(PAGES as usize) as u64 };
                let writes = !self.chance.one_in(3);
                self.threads[thread] = Some(Waiting { page, writes, since: now });
                if !self.here.contains_key(&page) {
                    self.pager.fault(PageId { space: SPACE, page });
                    self.act();
                }
                stepped = true;
            }
            stepped |= self.go_on(thread, now);
        }
        stepped
    }

    /// A thread whose page is there uses it; one whose page is lost maps another in its place.
    fn go_on(&mut self, thread: usize, now: Instant) -> bool {
        let Some(Waiting { page, writes, since }) = self.threads[thread] else { return false };
        if self.poisoned.remove(&page) {
            self.lost += 1;
            self.wrote.remove(&page);
            self.pager.unmapped(SPACE, page..page + 1);
            self.pager.add_pages(SPACE, page..page + 1, &[]);
            for other in self.threads.iter_mut().filter(|other| other.is_some_and(|other| other.page == page)) {
                *other = None;
            }
            self.act();
            return true;
        }
        let Some(version) = self.here.get_mut(&page) else {
            let time_max = if self.has_other_copies { OTHER_COPY_TIME_MAX } else { FAULT_TIME_MAX };
            rule!(now - since < time_max, "page {page} does not come");
            return false;
        };
        if writes {
            self.versions += 1;
            *version = self.versions;
            self.wrote.insert(page, self.versions);
        }
        self.accesses += 1;
        self.threads[thread] = None;
        true
    }

    /// Every page is read once.
    pub fn read_all(&mut self, page: u64, now: Instant) {
        self.threads[0] = Some(Waiting { page, writes: false, since: now });
        if !self.here.contains_key(&page) {
            self.pager.fault(PageId { space: SPACE, page });
            self.act();
        }
    }

    /// A page is changed at a lender, behind everybody's back.
    pub fn flip(&mut self, copy: usize) -> bool {
        let Some(place) = self.places.get(self.chance.below(self.places.len())).copied() else { return false };
        self.client.spoil(place, copy, &self.garbage)
    }

    /// The program ends: nothing of it is left in frames or at places.
    pub fn end_program(&mut self) {
        self.pager.remove_space(SPACE);
        self.act();
    }
}

/// What a page has of a version: zeroes before the first.
fn bytes_of(page: u64, version: u64) -> [u8; PAGE_BYTES] {
    let mut bytes = [0; PAGE_BYTES];
    if version > 0 {
        let word = (version << 16 | page).to_le_bytes();
        bytes.as_chunks_mut::<8>().0.fill(word);
    }
    bytes
}
