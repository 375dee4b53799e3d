//! A client, what its user asks, and what the user may then rely on.

use std::collections::BTreeMap;
use std::rc::Rc;

use byway_fabric::random::Random;
use byway_reactor::{Frame, Instant, Reactor, Wait};
use byway_service::block::ZeroFlags;
use byway_service::block::client::{Done, Notice, Request, Volume as Client};

use super::rules::{SECTOR, broken, check_end_of_session, fill, written_by};
use super::{DEPTH, PART, REQUESTS};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    Read,
    Write { durable: bool },
    Zero,
    Flush,
}

/// A request that has not been answered.
struct Asked {
    what: What,
    start: usize,
    end: usize,
    /// What was acknowledged when it was asked: of its sectors, or of all for a flush.
    before: Vec<u64>,
}

/// One life of a client.
pub struct Life {
    pub volume: Client,
    pub reactor: Reactor,
}

/// A client over all its lives, and what its user knows. Requests are numbered from 1 on.
pub struct User {
    pub life: Option<Life>,
    pub died_at: Option<Instant>,
    index: usize,
    random: Random,
    /// No disk fails in this run: no request may fail.
    disks_are_well: bool,
    /// The last request of the lives before this one.
    inherited: u64,
    next: u64,
    /// The last request that it is to ask for.
    last: u64,
    asked: BTreeMap<u64, Asked>,
    /// Of each sector: the newest acknowledged request, the newest one that is durable for sure, the newest zeroing.
    acknowledged: Vec<u64>,
    durable: Vec<u64>,
    zeroed: Vec<u64>,
    pub answered: u64,
    pub errors: u64,
    pub replayed: u64,
    pub sessions: u64,
    failed: u64,
    /// Where a flush failed: what was acknowledged and not flushed may be gone there, until the client has sent it again
    /// elsewhere.
    lossy_at: Option<(u64, u64)>,
}

/// The server process and the store that a client was at last.
fn place_of(volume: &Client) -> Option<(u64, u64)> {
    volume.info().map(|info| (info.instance, info.store))
}

impl User {
    pub fn new(index: usize, life: Life, random: Random, disks_are_well: bool) -> Self {
        Self {
            life: Some(life),
            died_at: None,
            index,
            random,
            disks_are_well,
            inherited: 0,
            next: 0,
            last: REQUESTS,
            asked: BTreeMap::new(),
            acknowledged: vec![0; PART],
            durable: vec![0; PART],
            zeroed: vec![0; PART],
            answered: 0,
            errors: 0,
            replayed: 0,
            sessions: 0,
            failed: 0,
            lossy_at: None,
        }
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random.next_u64() % limit
    }

    /// The client's machine is gone, and all that it kept. What it had flushed must stay; what was only acknowledged
    /// does too while the server that has it lives (`server_has_all`).
    pub fn die(&mut self, now: Instant, server_has_all: bool) {
        let keeps = server_has_all && !self.is_lossy();
        self.failed = self.failed_volumes();
        let Some(life) = self.life.take() else { return };
        self.replayed += life.volume.replayed();
        self.sessions += life.volume.sessions();
        self.died_at = Some(now);
        self.inherited = self.next;
        self.last = self.next + REQUESTS;
        self.asked.clear();
        if !keeps {
            self.acknowledged = self.durable.clone();
        }
        self.lossy_at = None;
    }

    /// The successor: it starts with nothing.
    pub fn revive(&mut self, life: Life) {
        self.life = Some(life);
        self.died_at = None;
    }

    /// It has more to ask for.
    pub fn ask_more(&mut self, requests: u64) {
        self.last += requests;
    }

    /// The server lost all that was not flushed: what a dead client left there, nobody sends again.
    pub fn server_lost_unflushed(&mut self) {
        let (inherited, durable) = (self.inherited, &self.durable);
        let forget = |newest: &mut u64, sector: usize| {
            if *newest <= inherited {
                *newest = (*newest).min(durable[sector]);
            }
        };
        self.acknowledged.iter_mut().enumerate().for_each(|(sector, newest)| forget(newest, sector));
        for asked in self.asked.values_mut() {
            asked.before.iter_mut().zip(asked.start..).for_each(|(newest, sector)| forget(newest, sector));
        }
    }

    /// Handles what is ready; says whether something was.
    pub fn turn(&mut self) -> bool {
        let Some(life) = &mut self.life else { return false };
        let mut completions = Vec::new();
        life.volume.flush(&mut life.reactor);
        life.reactor.reap(&mut completions, Wait::Poll).unwrap();
        let mut busy = !completions.is_empty();
        for completion in completions {
            life.volume.handle(&mut life.reactor, completion);
        }
        life.volume.flush(&mut life.reactor);
        let mut notices = Vec::new();
        life.volume.take_notices(&mut notices);
        for notice in notices {
            match notice {
                Notice::Disconnected(reason) => check_end_of_session("a client", reason),
                Notice::Refused(error) => broken(format!("the server would not open the volume: {error}")),
                Notice::Opened(_) | Notice::Resized(_) => {}
            }
        }
        if life.volume.stray_answers() > 0 {
            broken("the server answered a call that was not in flight, or twice".to_owned());
        }
        self.take_answers();
        busy |= self.ask();
        busy
    }

    /// Asks for something new, if its time has come; says whether it did.
    fn ask(&mut self) -> bool {
        let mut asked = false;
        while self.next < self.last
            && self.life.as_ref().is_some_and(|life| life.volume.pending() < DEPTH)
            && self.ask_one()
        {
            asked = true;
        }
        asked
    }

    fn ask_one(&mut self) -> bool {
        let (kind, size) = (self.below(20), self.below(10));
        let sectors = match size {
            0 => 64 + self.below(100),
            1 => 33 + self.below(30),
            _ => 1 + self.below(12),
        } as usize;
        let start = self.below((PART - sectors) as u64) as usize;
        let end = start + sectors;
        let durable = self.below(6) == 0;
        // A read that is in flight together with a change of the same sectors may see them torn.
        let reads = (3..9).contains(&kind);
        let collides = |asked: &Asked| {
            let overlaps = asked.start < end && start < asked.end;
            asked.what != What::Flush && (asked.what == What::Read) != reads && overlaps
        };
        if kind >= 3 && self.asked.values().any(collides) {
            return false;
        }
        let (first, tag) = (self.index * PART + start, self.next + 1);
        let Some(life) = &mut self.life else { return false };
        let (offset, len) = ((first * SECTOR) as u64, sectors * SECTOR);
        let (what, request) = match kind {
            0..3 => (What::Flush, Request::Flush),
            3..9 => {
                let Some(into) = life.reactor.frames().alloc(len) else { return false };
                (What::Read, Request::Read { offset, len, into })
            }
            9 => {
                let flags = ZeroFlags { durable, ..ZeroFlags::default() };
                (What::Zero, Request::Zero { offset, len: len as u64, flags })
            }
            _ => {
                let Some(mut from) = life.reactor.frames().alloc(len) else { return false };
                fill(from.bytes_mut(), self.index, tag, first);
                (What::Write { durable }, Request::Write { offset, len, from: Rc::new(from), durable })
            }
        };
        if life.volume.submit(request, tag).is_err() {
            return false;
        }
        life.volume.flush(&mut life.reactor);
        let (start, end) = if what == What::Flush { (0, PART) } else { (start, end) };
        if what == What::Zero {
            self.zeroed[start..end].fill(tag);
        }
        self.next = tag;
        self.asked.insert(tag, Asked { what, start, end, before: self.acknowledged[start..end].to_vec() });
        true
    }

    fn take_answers(&mut self) {
        let Some(life) = &mut self.life else { return };
        let mut answers: Vec<Done<Frame>> = Vec::new();
        life.volume.reap(&mut answers);
        let place = place_of(&life.volume);
        for Done { tag, result, buffer } in answers {
            let Some(Asked { what, start, end, before }) = self.asked.remove(&tag) else {
                broken(format!("request {tag} of client {} was answered twice", self.index));
            };
            self.answered += 1;
            if let Err(error) = result {
                if self.disks_are_well {
                    broken(format!("{what:?} {tag} of client {} failed without a cause: {error}", self.index));
                }
                self.errors += 1;
                if what == What::Flush {
                    self.lossy_at = place;
                }
                continue;
            }
            let newest = |of: &mut [u64]| of[start..end].iter_mut().for_each(|newest| *newest = tag.max(*newest));
            match what {
                What::Read => self.check_read(buffer.as_ref().map(Frame::bytes).unwrap_or_default(), start, &before),
                What::Write { durable } => {
                    newest(&mut self.acknowledged);
                    if durable {
                        newest(&mut self.durable);
                    }
                }
                What::Zero => newest(&mut self.acknowledged),
                What::Flush => {
                    for (durable, before) in self.durable.iter_mut().zip(before) {
                        *durable = (*durable).max(before);
                    }
                }
            }
        }
        // All that was acknowledged has been sent again there.
        let elsewhere = self.volume().is_some_and(|volume| volume.is_settled() && place_of(volume) != self.lossy_at);
        if elsewhere {
            self.lossy_at = None;
        }
    }

    fn check_read(&self, bytes: &[u8], start: usize, before: &[u64]) {
        if bytes.len() < before.len() * SECTOR {
            broken(format!("a read of client {} came without its memory", self.index));
        }
        for (at, sector) in bytes.chunks_exact(SECTOR).take(before.len()).enumerate() {
            let by = written_by(sector, self.index, self.index * PART + start + at);
            let floor = if self.is_lossy() { self.durable[start + at].min(before[at]) } else { before[at] };
            self.check(start + at, by, floor, "a read");
        }
    }

    /// Checks what the volume holds. `durable`: the power has just failed, and nobody has written anything again.
    pub fn check_contents(&self, contents: &[u8], durable: bool) {
        let (when, floor) = if durable {
            ("after the last power loss", &self.durable)
        } else {
            ("at the end", if self.is_lossy() { &self.durable } else { &self.acknowledged })
        };
        for sector in 0..PART {
            let number = self.index * PART + sector;
            let by = written_by(&contents[number * SECTOR..][..SECTOR], self.index, number);
            self.check(sector, by, floor[sector], when);
        }
    }

    /// A sector must hold what request `floor` left there, or something later.
    fn check(&self, sector: usize, by: u64, floor: u64, when: &str) {
        let late_enough = if by == 0 { floor == 0 || self.zeroed[sector] >= floor } else { by >= floor };
        if !late_enough || by > self.next {
            let index = self.index;
            broken(format!("{when}: sector {sector} of client {index} is from request {by}, not {floor} or later"));
        }
    }

    /// What was acknowledged and not flushed may be gone.
    fn is_lossy(&self) -> bool {
        self.lossy_at.is_some() || self.has_failed()
    }

    fn has_failed(&self) -> bool {
        self.volume().is_some_and(|volume| volume.failed().is_some())
    }

    /// Volumes that failed, of all its lives.
    pub fn failed_volumes(&self) -> u64 {
        self.failed + u64::from(self.has_failed())
    }

    /// The volume, unless its client is dead.
    pub fn volume(&self) -> Option<&Client> {
        self.life.as_ref().map(|life| &life.volume)
    }

    /// Requests that have not been answered.
    pub fn unanswered(&self) -> Vec<u64> {
        self.asked.keys().copied().collect()
    }

    /// Everything was asked and answered.
    pub fn is_done(&self) -> bool {
        self.life.is_some() && self.next >= self.last && self.asked.is_empty()
    }

    /// That server process has all that was acknowledged in that store, or the volume has failed.
    pub fn is_settled_at(&self, place: Option<(u64, u64)>) -> bool {
        let settled = |volume: &Client| volume.is_settled() && place.is_some() && place_of(volume) == place;
        self.volume().is_some_and(|volume| settled(volume) || volume.failed().is_some())
    }
}
