//! The borrower: a program of four threads and its forked children, the pager of their memory, and the pool that the pager's pages lie in.

use std::collections::{HashMap, VecDeque};
use std::io::{Error, ErrorKind};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use byway_fabric::node::{Memory, NodeOptions};
use byway_reactor::Instant;
use byway_reactor::sim::World;
use byway_rpc::node::Rpc;
use byway_rpc::session::Spoken;
use byway_service::memory::pager::{
    Action, Contents, FillOutcome, Moved, Overdue, PAGE_BYTES, PageId, Pager, Place, PutEnd, SpaceId,
};
use byway_service::memory::pool::{Class, Told};
use byway_service::memory::wire::{PROTOCOL, VERSIONS};
use byway_service::memory::{Keeping, LenderAt, PoolClient, Spill};
use byway_skip::rule;

use super::programs::{Access, PAGES, Program, bytes_of};
use super::{Chance, lenders};

/// Pages of the program that may be here. The pager aims for some fewer.
const BUDGET: usize = 80;
const FRAMES: u32 = 64;
const SPACE: SpaceId = SpaceId(1);
/// Forked children at a time.
const CHILDREN_MAX: usize = 2;
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

pub struct Borrower {
    pager: Pager,
    pub client: PoolClient,
    pub file: SimulatedFile,
    /// The program, and behind it its forked children.
    programs: Vec<Program>,
    spaces: u32,
    moves: VecDeque<(PageId, u32, bool)>,
    /// Frames that have the only bytes of a page.
    precious: HashMap<u32, u64>,
    places: Vec<Place>,
    garbage: Memory,
    versions: u64,
    pub accesses: u64,
    pub forks: u64,
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
        let frames = rpc.node().register((FRAMES as usize + class.frames()) * PAGE_BYTES).expect("frames");
        let garbage = rpc.node().register(PAGE_BYTES).expect("a page");
        garbage.write(0, &[0xa5; PAGE_BYTES]).expect("its own range");
        let at = |number| LenderAt { name: format!("lender {number}"), address: lenders::at(number), session: None };
        let file = SimulatedFile::default();
        let spill = (class == Class::Disk).then(|| Box::new(file.clone()) as Box<dyn Spill>);
        let all = (0..lender_count).map(at).collect();
        let client =
            PoolClient::new(&rpc, all, Keeping { class, spill, encrypt: seed.is_multiple_of(3) }, (frames, places))
                .expect("a pool");
        let mut pager = Pager::new(FRAMES, BUDGET);
        pager.set_row(class.row());
        pager.add_space(SPACE, true);
        pager.add_pages(SPACE, 0..PAGES, &[]);
        Self {
            pager,
            client,
            file,
            programs: vec![Program::new(SPACE)],
            spaces: SPACE.0,
            moves: VecDeque::new(),
            precious: HashMap::new(),
            places: Vec::new(),
            garbage,
            versions: 0,
            accesses: 0,
            forks: 0,
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
        self.programs.iter().all(Program::is_idle) && self.moves.is_empty()
    }

    /// The threads of each program may begin so many accesses more.
    pub fn grant(&mut self, accesses: usize) {
        for program in &mut self.programs {
            program.granted += accesses;
        }
    }

    /// The program forks, or one of its children. As the driver reads no message meanwhile, no move is under way.
    pub fn fork(&mut self) {
        if self.programs.len() > CHILDREN_MAX || self.pager.moves_in_flight() > 0 {
            return;
        }
        self.spaces += 1;
        let (parent, child) = (self.chance.below(self.programs.len()), SpaceId(self.spaces));
        self.pager.forked(self.programs[parent].space, child);
        let forked = self.programs[parent].fork(child);
        self.programs.push(forked);
        self.forks += 1;
        self.act();
    }

    /// A child ends, whatever its threads wait for.
    pub fn end_child(&mut self) {
        if self.programs.len() > 1 {
            let child = self.programs.remove(1 + self.chance.below(self.programs.len() - 1));
            self.pager.remove_space(child.space);
            if self.programs.len() == 1 {
                self.programs[0].shared.clear();
            }
            self.act();
        }
    }

    /// All children end.
    pub fn end_children(&mut self) {
        while self.programs.len() > 1 {
            self.end_child();
        }
    }

    fn program(&mut self, space: SpaceId) -> Option<&mut Program> {
        self.programs.iter_mut().find(|program| program.space == space)
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
        self.pager.note_overdue(if self.client.is_slow() { Overdue::Puts } else { Overdue::Nothing });
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
                Told::CopiesLost => {
                    self.note_here();
                    self.pager.leave_lost(|place| self.client.has(place));
                }
                Told::Slow(frame) => self.pager.get_again(frame),
            }
            self.act();
        }
        has_heard
    }

    /// Notes what is here, in programs or in frames: it is not to be lost by what was lost until now.
    fn note_here(&mut self) {
        for program in &mut self.programs {
            let in_frames = self.pager.pages_in_frames().filter(|at| at.space == program.space).map(|at| at.page);
            program.here_at_loss = program.here.keys().copied().chain(in_frames).collect();
        }
    }

    /// As the driver: fills are gathered, and gets begin behind them.
    fn act(&mut self) {
        let (mut fills, mut gets) = (Vec::new(), Vec::new());
        loop {
            while let Some(action) = self.pager.next_action() {
                match action {
                    Action::MoveOut(at, frame, protected) => {
                        self.is_reused(frame);
                        self.moves.push_back((at, frame, protected));
                    }
                    Action::Put(frame, place) => {
                        self.places.push(place);
                        self.client.put(frame, place);
                    }
                    Action::Keep(frame, place) => self.client.keep(frame, place),
                    Action::Unprotect(at) => self.unprotect(at),
                    Action::Get(frame, place) => gets.push((frame, place)),
                    Action::Fill(at, contents @ (Contents::Frame(_) | Contents::Protected(_))) => {
                        fills.push((at, contents));
                    }
                    Action::Fill(at, contents) => self.fill(at, contents),
                    Action::Poison(at) => self.poison(at),
                    Action::Wake(at) => self.wake(at),
                    Action::Lease => self.client.want_slab(),
                }
            }
            if fills.is_empty() && gets.is_empty() {
                return;
            }
            fills.sort_unstable_by_key(|(at, _)| *at);
            for (at, contents) in fills.drain(..) {
                self.fill(at, contents);
            }
            for (frame, place) in gets.drain(..) {
                self.is_reused(frame);
                self.client.get(frame, place);
            }
        }
    }

    fn poison(&mut self, at: PageId) {
        rule!(self.may_lose, "page {} was lost, and nothing has happened that loses one", at.page);
        if let Some(program) = self.program(at.space) {
            rule!(!program.here.contains_key(&at.page), "page {} is taken for lost, and its program has it", at.page);
            let was_here = program.here_at_loss.contains(&at.page);
            rule!(!was_here, "page {} was here when copies were lost, nothing was lost since, and it is lost", at.page);
            program.poisoned.insert(at.page);
            program.wake(at.page);
        }
        self.pager.poisoned(at, FillOutcome::Done(1));
    }

    fn wake(&mut self, at: PageId) {
        if let Some(program) = self.program(at.space) {
            program.wake(at.page);
        }
    }

    fn unprotect(&mut self, at: PageId) {
        if self.chance.one_in(20) {
            return self.pager.unprotected(at, FillOutcome::Changing);
        }
        if let Some(program) = self.program(at.space) {
            program.protected.remove(&at.page);
            program.wake(at.page);
        }
        self.pager.unprotected(at, FillOutcome::Done(1));
    }

    fn is_reused(&self, frame: u32) {
        let page = self.precious.get(&frame);
        rule!(page.is_none(), "frame {frame} is used again, and page {page:?} is nowhere else");
    }

    /// The helper does what it was told, in part.
    fn move_out(&mut self) {
        let count = self.chance.below(self.moves.len() + 1);
        for _ in 0..count {
            let Some((at, frame, protected)) = self.moves.pop_front() else { break };
            let Some(program) = self.program(at.space) else { continue };
            let is_shared = program.shared.contains(&at.page);
            let was_protected = program.protected.contains(&at.page) || !program.here.contains_key(&at.page);
            rule!(was_protected || !protected, "page {} could be written before it was moved", at.page);
            if !is_shared {
                program.protected.remove(&at.page);
            }
            let outcome = match program.here.get(&at.page).copied() {
                None => Moved::Missing,
                Some(_) if is_shared => Moved::Stays,
                Some(0) => {
                    program.here.remove(&at.page);
                    Moved::Zeroes
                }
                Some(version) => {
                    program.here.remove(&at.page);
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
        let Some(index) = self.programs.iter().position(|program| program.space == at.space) else {
            return self.pager.filled(at, contents, FillOutcome::NoMapping);
        };
        if !matches!(contents, Contents::Zeroes(_)) && self.chance.one_in(20) {
            return self.pager.filled(at, contents, FillOutcome::Changing);
        }
        let mut done = 0;
        for page in at.page..at.page + count {
            let program = &self.programs[index];
            if page >= PAGES || program.here.contains_key(&page) {
                break;
            }
            let last = program.wrote.get(&page).copied().unwrap_or(0);
            let version = match contents {
                Contents::Zeroes(_) => 0,
                Contents::Frame(frame) | Contents::Protected(frame) => {
                    let bytes = self.client.read_frame(frame);
                    rule!(bytes == bytes_of(page, last), "page {page} comes with other bytes than version {last}");
                    self.precious.remove(&frame);
                    last
                }
            };
            rule!(version == last, "page {page} comes as version {version}, and {last} was written");
            self.programs[index].here.insert(page, version);
            if matches!(contents, Contents::Protected(_)) {
                self.programs[index].protected.insert(page);
            }
            self.programs[index].wake(page);
            done += 1;
        }
        let outcome = if done > 0 { FillOutcome::Done(done) } else { FillOutcome::Exists };
        self.pager.filled(at, contents, outcome);
    }

    /// Threads read and write; whether one did.
    fn run_threads(&mut self, now: Instant) -> bool {
        let mut stepped = false;
        for index in 0..self.programs.len() {
            for thread in 0..self.programs[index].threads.len() {
                stepped |= self.programs[index].begin(thread, &mut self.chance, (self.versions, now));
                stepped |= self.go_on(index, thread, now);
            }
        }
        stepped
    }

    /// A thread that is awake uses its page, or faults; one whose page is lost maps another in its place.
    fn go_on(&mut self, index: usize, thread: usize, now: Instant) -> bool {
        let program = &mut self.programs[index];
        let Some(Access { page, writes, since, sleeps }) = program.threads[thread] else { return false };
        let time_max = if self.has_other_copies { OTHER_COPY_TIME_MAX } else { FAULT_TIME_MAX };
        rule!(now - since < time_max, "page {page} does not come");
        if sleeps {
            return false;
        }
        if program.poisoned.remove(&page) {
            program.map_anew(page);
            self.lost += 1;
            self.pager.unmapped(program.space, page..page + 1);
            self.pager.add_pages(program.space, page..page + 1, &[]);
            self.act();
            return true;
        }
        let is_here = program.here.contains_key(&page);
        if !is_here || (writes && program.protected.contains(&page)) {
            program.threads[thread] = Some(Access { page, writes, since, sleeps: true });
            let at = PageId { space: program.space, page };
            if is_here {
                self.pager.write_fault(at);
            } else {
                self.pager.fault(at, writes);
            }
            self.act();
            return true;
        }
        if writes {
            self.versions += 1;
            program.write(page, self.versions);
        }
        self.accesses += 1;
        program.threads[thread] = None;
        true
    }

    /// Every page is read once, by the program and its children.
    pub fn read_all(&mut self, page: u64, now: Instant) {
        for program in &mut self.programs {
            program.threads[0] = Some(Access { page, writes: false, since: now, sleeps: false });
        }
    }

    /// A page is changed at a lender, behind everybody's back.
    pub fn flip(&mut self, copy: usize) -> bool {
        let Some(place) = self.places.get(self.chance.below(self.places.len())).copied() else { return false };
        self.client.spoil(place, copy, &self.garbage)
    }

    /// The program ends: nothing of it is left in frames or at places.
    pub fn end_program(&mut self) {
        self.end_children();
        self.pager.remove_space(SPACE);
        self.act();
    }
}
