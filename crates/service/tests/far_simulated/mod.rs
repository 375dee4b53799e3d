//! One borrower and three lenders in a simulated world; with parity, five or six.
//!
//! A program of four threads reads and writes 300 pages, of which it keeps about 80. It forks, and so do its children. Lenders die and start again, are cut off for shorter and
//! longer than the keep-alive, are slow, have no more room, take slabs back, and change bytes. Rules:
//!
//! - a page that comes has the version that was written last: no older one, no zeroes, no other page's bytes;
//! - a frame that has the only bytes of a page is not used for another;
//! - a page is lost only where its class and what has happened allow it, and then by name;
//! - a page comes, or is lost, within 30 s, and within 3 s where another copy of each page is there; once the faults have stopped every slab has all of its copies again;
//! - no page is taken for changed that nothing has changed;
//! - a borrower that stands still loses its slabs within the keep-alive time.

#![allow(dead_code, reason = "each test uses a part of it")]

mod borrower;
mod lenders;
mod programs;

use std::time::Duration;

use byway_reactor::sim::{Crash, LinkProfile, World};
use byway_service::limits::{GUARD_LOOK, LEASE_KEEP_ALIVE, RENEW_EVERY};
use byway_service::memory::pool::{Class, PoolCounters};
use byway_skip::rule;
use byway_skip::seeds::catch_broken;
pub use byway_skip::seeds::{Broken, Chance};

use self::borrower::Borrower;
use self::lenders::SimulatedLender;
use self::programs::PAGES;

const ROUNDS: usize = 40;
/// Once the faults have stopped, all is copied within this time: a lender is back after 1 s.
const SETTLED_MAX: Duration = Duration::from_secs(20);

/// What happens in a run, and so what may be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Story {
    /// Two copies; one lender at a time is in trouble, and all is whole again before the next is. Nothing is lost.
    MirrorOneAtATime,
    /// Two copies, of which one has wrong bytes. Nothing is lost.
    MirrorFlips,
    /// Two copies, and anything happens.
    MirrorAnything,
    /// A lender and a file, and anything happens. Nothing is lost.
    DiskAnything,
    /// One copy, and anything happens.
    NoneAnything,
    /// One copy; lenders take slabs back, one at a time. Nothing is lost.
    NoneTakenBack,
    /// One copy, and nothing happens.
    NoneCalm,
    /// Four pages and their parity; as [`Story::MirrorOneAtATime`]. Nothing is lost.
    ParityOneAtATime,
    /// Four pages and their parity; two lenders die at a time, and all is whole again before the next do.
    ParityTwoAtATime,
    /// Four pages and their parity, of which one has wrong bytes; lenders are slow or cut off for shorter than they may be silent. Nothing
    /// is lost.
    ParityFlips,
    /// Four pages and their parity, and anything happens.
    ParityAnything,
}

impl Story {
    fn of(seed: u64) -> Self {
        match seed % 10 {
            0 | 1 => Self::MirrorOneAtATime,
            2 => Self::MirrorFlips,
            3 => Self::MirrorAnything,
            4 => Self::DiskAnything,
            5 => Self::NoneAnything,
            6 => Self::NoneTakenBack,
            9 if seed % 20 == 9 => Self::ParityTwoAtATime,
            9 if seed % 40 == 39 => Self::ParityFlips,
            8 if seed % 20 == 18 => Self::ParityAnything,
            8 | 9 => Self::ParityOneAtATime,
            _ if seed % 16 == 7 => Self::NoneCalm,
            _ => Self::MirrorOneAtATime,
        }
    }

    fn class(self) -> Class {
        match self {
            Self::MirrorOneAtATime | Self::MirrorFlips | Self::MirrorAnything => Class::Mirror,
            Self::DiskAnything => Class::Disk,
            Self::NoneAnything | Self::NoneTakenBack | Self::NoneCalm => Class::None,
            Self::ParityOneAtATime | Self::ParityTwoAtATime | Self::ParityFlips | Self::ParityAnything => Class::Parity,
        }
    }

    /// With parity, a lender more than it needs, or none.
    fn lenders(self, chance: &mut Chance) -> usize {
        if self.class() == Class::Parity { 5 + chance.below(2) } else { 3 }
    }

    fn may_lose(self) -> bool {
        matches!(self, Self::MirrorAnything | Self::NoneAnything | Self::ParityTwoAtATime | Self::ParityAnything)
    }

    fn one_at_a_time(self) -> bool {
        let settles = [Self::MirrorOneAtATime, Self::NoneTakenBack, Self::ParityOneAtATime, Self::ParityTwoAtATime];
        settles.contains(&self)
    }
}

/// What a run has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub accesses: u64,
    pub far_pages: u64,
    pub strikes: u64,
    pub crashes: u64,
    pub cut_off: u64,
    pub taken_back: u64,
    pub flips: u64,
    pub forks: u64,
    pub lost: u64,
    pub pool: PoolCounters,
}

impl Report {
    pub fn add(&mut self, other: &Self) {
        self.accesses += other.accesses;
        self.far_pages += other.far_pages;
        self.strikes += other.strikes;
        self.crashes += other.crashes;
        self.cut_off += other.cut_off;
        self.taken_back += other.taken_back;
        self.flips += other.flips;
        self.forks += other.forks;
        self.lost += other.lost;
        self.pool.failed_over += other.pool.failed_over;
        self.pool.corrupt += other.pool.corrupt;
        self.pool.copied += other.pool.copied;
        self.pool.lost += other.pool.lost;
        self.pool.given_up += other.pool.given_up;
        self.pool.moved += other.pool.moved;
    }
}

struct Simulation {
    // Before the world, whose loops they have.
    borrower: Borrower,
    lenders: Vec<SimulatedLender>,
    world: World,
    story: Story,
    chance: Chance,
    /// With [`Story::ParityFlips`], the pages of rows that get wrong bytes.
    column: usize,
    report: Report,
}

/// One life of a whole world.
///
/// # Errors
/// The first rule that was broken.
///
/// # Panics
/// As the code under test does.
pub fn run(seed: u64) -> Result<Report, Broken> {
    catch_broken(|| Simulation::new(seed).run())
}

impl Simulation {
    fn new(seed: u64) -> Self {
        let (world, mut chance, story) = (World::new(seed), Chance::new(seed), Story::of(seed));
        // In some runs all of the memory is needed, and a lender refuses.
        let slabs = if chance.one_in(3) { 5 } else { 12 };
        let count = story.lenders(&mut chance);
        let lenders = (0..count).map(|number| SimulatedLender::start(&world, number, slabs, seed)).collect();
        let places = 40 + chance.below(60) as u32;
        let borrower = Borrower::start(&world, story.class(), count, places, seed);
        let column = (seed / 40 % 5) as usize;
        let mut run = Self { borrower, lenders, world, story, chance, column, report: Report::default() };
        run.borrower.may_lose = story.may_lose();
        run.borrower.has_other_copies = matches!(story, Story::MirrorOneAtATime | Story::DiskAnything);
        for lender in 0..count {
            if run.chance.one_in(3) {
                run.slow_down(lender);
            }
        }
        run
    }

    fn slow_down(&mut self, lender: usize) {
        let latency = Duration::from_micros(100 + self.chance.below(20_000) as u64);
        let slow = LinkProfile { latency, bandwidth: 20_000_000, buffer_bytes: 20_000, ..LinkProfile::default() };
        self.world.link(borrower::ip(), lenders::ip(lender), slow);
    }

    /// Lets time pass, with all loops turned whenever they have something to do.
    fn pass(&mut self, time: Duration) {
        let (world, until) = (self.world.clone(), self.world.now() + time);
        loop {
            let looks = self.lenders.iter().filter_map(SimulatedLender::next_look);
            let next = looks.chain(self.borrower.next_tick()).chain([until]).min().unwrap_or(until);
            let next = next.max(world.now());
            world.run_until(next, || self.turn(true));
            self.turn(true);
            if world.now() >= until {
                return;
            }
        }
    }

    fn turn(&mut self, with_borrower: bool) {
        loop {
            let mut is_busy = with_borrower && self.borrower.turn(&self.world);
            for lender in &mut self.lenders {
                is_busy |= lender.turn(&self.world);
            }
            if !is_busy {
                return;
            }
        }
    }

    fn run(&mut self) -> Report {
        self.pass(Duration::from_millis(100));
        for _ in 0..ROUNDS {
            let accesses = self.chance.below(40);
            self.borrower.grant(accesses);
            match self.chance.below(12) {
                0 => self.borrower.fork(),
                1 | 2 => self.borrower.end_child(),
                _ => {}
            }
            let pause = Duration::from_micros(self.chance.below(20_000) as u64);
            self.pass(pause);
            if self.story != Story::NoneCalm && self.chance.one_in(6) {
                self.report.strikes += 1;
                self.strike();
                if self.story.one_at_a_time() {
                    self.settle();
                }
            }
        }
        self.finish()
    }

    /// Something happens to a lender, while the program goes on.
    fn strike(&mut self) {
        let lender = self.chance.below(self.lenders.len());
        let kind = match self.story {
            Story::MirrorOneAtATime | Story::ParityOneAtATime => [0, 0, 1, 2, 3, 4, 5][self.chance.below(7)],
            Story::ParityTwoAtATime => 8,
            Story::MirrorFlips => 6,
            Story::ParityFlips => [5, 6, 6, 9][self.chance.below(4)],
            Story::NoneTakenBack => 4,
            Story::DiskAnything => self.chance.below(8),
            Story::MirrorAnything | Story::NoneAnything | Story::ParityAnything => self.chance.below(7),
            Story::NoneCalm => return,
        };
        if std::env::var_os("BYWAY_SIM_SEED").is_some() {
            println!("{:?}: strike {kind} at lender {lender}; {:?}", self.world.now(), self.borrower.client.counters());
        }
        match kind {
            0 => self.kill(&[lender]),
            1 => {
                let cut = Duration::from_millis(self.chance.below(4000) as u64);
                self.cut_off(lender, cut);
            }
            2 => {
                self.report.cut_off += 1;
                let cut = Duration::from_millis(5000 + self.chance.below(35_000) as u64);
                self.cut_off(lender, cut);
            }
            3 => drop(self.world.reset_random_connection()),
            4 => self.take_back(lender),
            5 => self.slow_down(lender),
            6 => {
                for _ in 0..4 {
                    let copy = match self.story {
                        Story::MirrorFlips => 0,
                        Story::ParityFlips => self.column,
                        Story::ParityAnything => self.chance.below(5),
                        _ => self.chance.below(2),
                    };
                    self.report.flips += u64::from(self.borrower.flip(copy));
                }
            }
            8 => {
                let other = (lender + 1 + self.chance.below(self.lenders.len() - 1)) % self.lenders.len();
                self.kill(&[lender, other]);
            }
            9 => {
                let cut = Duration::from_millis(500 + self.chance.below(1500) as u64);
                self.cut_off(lender, cut);
            }
            _ => {
                let is_full = self.chance.one_in(2);
                self.borrower.file.fill_up(is_full);
            }
        }
    }

    fn work_for(&mut self, time: Duration) {
        for _ in 0..4 {
            let accesses = self.chance.below(20);
            self.borrower.grant(accesses);
            self.pass(time / 4);
        }
    }

    /// They die, and start again.
    fn kill(&mut self, lenders: &[usize]) {
        for lender in lenders {
            self.report.crashes += 1;
            let how = if self.chance.one_in(2) { Crash::Power } else { Crash::Process };
            self.lenders[*lender].crash(&self.world, how);
        }
        let pause = Duration::from_micros(self.chance.below(4_000_000) as u64);
        self.work_for(pause);
        for lender in lenders {
            self.lenders[*lender].restart(&self.world);
        }
    }

    fn cut_off(&mut self, lender: usize, time: Duration) {
        self.world.partition(borrower::ip(), lenders::ip(lender));
        self.work_for(time);
        self.world.heal(borrower::ip(), lenders::ip(lender));
    }

    /// Its machine is short of memory, and has enough again.
    fn take_back(&mut self, lender: usize) {
        let before = self.lenders[lender].taken_back_bytes();
        self.lenders[lender].make_short(true);
        self.work_for(Duration::from_millis(700));
        self.lenders[lender].make_short(false);
        self.work_for(Duration::from_secs(8));
        self.report.taken_back += u64::from(self.lenders[lender].taken_back_bytes() > before);
    }

    /// Nothing happens until every slab is whole.
    fn settle(&mut self) {
        // A session that has broken is noticed by the next renewal at the latest.
        self.pass(RENEW_EVERY + Duration::from_millis(200));
        let until = self.world.now() + SETTLED_MAX;
        while !(self.borrower.is_idle() && self.borrower.client.is_settled()) {
            rule!(
                self.world.now() < until,
                "slabs are not whole 20 s after the last fault: {:?}",
                self.borrower.client.counters()
            );
            self.pass(Duration::from_millis(50));
        }
    }

    fn finish(&mut self) -> Report {
        self.borrower.file.fill_up(false);
        self.settle();
        self.report.far_pages = self.borrower.far_pages() as u64;
        for page in 0..PAGES {
            self.borrower.read_all(page, self.world.now());
            while !self.borrower.is_idle() {
                self.pass(Duration::from_millis(1));
            }
        }
        self.settle();
        if self.chance.one_in(2) {
            self.borrower.end_program();
            self.settle();
            let left = self.borrower.far_pages();
            rule!(left == 0, "{left} pages are left of a program that has ended");
        }
        self.stand_still();
        self.report.accesses = self.borrower.accesses;
        self.report.forks = self.borrower.forks;
        self.report.lost = self.borrower.lost;
        self.report.pool = self.borrower.client.counters();
        let Report { flips, pool, .. } = self.report;
        rule!(flips > 0 || pool.corrupt == 0, "{} pages were found changed, and nothing has changed one", pool.corrupt);
        self.report
    }

    /// The borrower does nothing any more, though its connections stand.
    fn stand_still(&mut self) {
        let until = self.world.now() + LEASE_KEEP_ALIVE + 2 * GUARD_LOOK;
        let world = self.world.clone();
        while world.now() < until {
            let next = self.lenders.iter().filter_map(SimulatedLender::next_look).chain([until]).min();
            world.run_until(next.unwrap_or(until).max(world.now()), || self.turn(false));
            self.turn(false);
        }
        for (number, lender) in self.lenders.iter().enumerate() {
            let bytes = lender.lent_bytes();
            rule!(bytes == 0, "lender {number} still lends {bytes} bytes to a borrower that stands still");
        }
    }
}
