//! The machine against a model of a server that dies, loses what was not flushed, and loses answers.
//!
//! Every write has a number, counted in order of submission, and a sector holds the number of the write that it has.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use byway_fabric::random::Random;
use byway_fabric::tls::{AlertDescription, TlsError};
use byway_reactor::Instant;

use super::super::error::BlockError;
use super::super::wire::CallError;
use super::machine::{Kind, Machine, OpId, ServerEpoch};
use super::request::{Answer, Bounds, Done, Request, VolumeError};

const SECTORS: usize = 16;
const BOUNDS: Bounds = Bounds { requests_max: 64, unflushed_bytes_max: 12 * 4096, lost_after: Duration::from_secs(10) };

const FIRST: ServerEpoch = ServerEpoch { instance: 1, store: 1 };

type Sectors = [u64; SECTORS];

/// What the user knows.
#[derive(Default)]
struct User {
    next: u64,
    /// By tag: the request's kind and range.
    asked: BTreeMap<u64, (Kind, usize, usize)>,
    /// The newest acknowledged write of each sector.
    acknowledged: Sectors,
    /// For each flush or read in flight: `acknowledged` when it was submitted.
    before: BTreeMap<u64, Sectors>,
    ended: usize,
    /// Tags that were to be cancelled and have not ended.
    wants_no_more: BTreeSet<u64>,
    cancelled: usize,
    /// Writes that were cancelled before they were sent.
    never_sent: BTreeSet<u64>,
}

struct Simulation {
    random: Random,
    machine: Machine<Vec<u64>, u64>,
    user: User,
    cache: Sectors,
    stable: Sectors,
    /// A flush failed: no other works in this epoch.
    flush_failed: bool,
    /// What a failed flush covered: the kernel takes it for clean, and no later flush makes it durable.
    forgotten: [bool; SECTORS],
    reopened: usize,
    epoch: ServerEpoch,
    connected: bool,
    /// Sent, and neither done nor answered.
    sent: Vec<OpId>,
    /// Done, and not answered.
    executed: Vec<(OpId, Result<Answer, CallError>)>,
    now: u64,
}

impl Simulation {
    fn new(seed: u64) -> Self {
        Self {
            random: Random::from_seed(seed),
            machine: Machine::new(BOUNDS, Instant::from_nanos(0)),
            user: User::default(),
            cache: [0; SECTORS],
            stable: [0; SECTORS],
            flush_failed: false,
            forgotten: [false; SECTORS],
            reopened: 0,
            epoch: FIRST,
            connected: false,
            sent: Vec::new(),
            executed: Vec::new(),
            now: 0,
        }
    }

    fn time(&self) -> Instant {
        Instant::from_nanos(self.now * 1_000_000)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.random.next_u64() % limit as u64) as usize
    }

    fn submit(&mut self) {
        let start = self.below(SECTORS);
        let len = 1 + self.below((SECTORS - start).min(4));
        let (offset, bytes) = (start as u64 * 4096, len * 4096);
        self.user.next += 1;
        let tag = self.user.next;
        let durable = self.below(6) == 0;
        let (kind, request) = match self.below(10) {
            0 => (Kind::Flush, Request::Flush),
            1 | 2 => (Kind::Read, Request::Read { offset, len: bytes, into: Vec::new() }),
            _ => (Kind::Write { durable }, Request::Write { offset, len: bytes, from: tag, durable }),
        };
        self.user.before.insert(tag, self.user.acknowledged);
        self.user.asked.insert(tag, (kind, start, start + len));
        if self.machine.submit(request, tag).is_err() {
            self.user.asked.remove(&tag);
        }
    }

    /// The server does what it was asked, or fails to.
    fn execute(&mut self, id: OpId) -> Result<Answer, CallError> {
        let fails = self.flush_failed || self.below(8) == 0;
        let Some(operation) = self.machine.operation(id) else { return Ok(Answer::Unit) };
        let (start, end) = ((operation.offset / 4096) as usize, ((operation.offset + operation.len) / 4096) as usize);
        match operation.kind {
            Kind::Write { durable } => {
                let value = operation.from.expect("a write has a payload");
                self.cache[start..end].fill(value);
                self.forgotten[start..end].fill(false);
                if durable && self.flush_failed {
                    return Err(BlockError::FlushFailed.into());
                }
                if durable {
                    self.stable[start..end].fill(value);
                }
            }
            Kind::Read => operation.into = Some(self.cache[start..end].to_vec()),
            Kind::Flush if fails => {
                if !std::mem::replace(&mut self.flush_failed, true) {
                    let dirty = |sector: usize| self.cache[sector] != self.stable[sector];
                    self.forgotten = std::array::from_fn(|sector| self.forgotten[sector] || dirty(sector));
                }
                return Err(BlockError::FlushFailed.into());
            }
            Kind::Flush => {
                for sector in (0..SECTORS).filter(|sector| !self.forgotten[*sector]) {
                    self.stable[sector] = self.cache[sector];
                }
            }
            _ => {}
        }
        Ok(Answer::Unit)
    }

    /// The connection breaks; whatever was under way happens or does not.
    fn disconnect(&mut self) {
        for id in std::mem::take(&mut self.sent) {
            if self.below(2) == 0 {
                let _ = self.execute(id);
            }
        }
        self.executed.clear();
        self.connected = false;
        self.machine.disconnected(self.time());
    }

    fn power_loss(&mut self) {
        self.disconnect();
        for sector in 0..SECTORS {
            if self.below(2) == 0 {
                self.cache[sector] = self.stable[sector];
            }
            self.stable[sector] = self.cache[sector];
        }
        (self.flush_failed, self.forgotten) = (false, [false; SECTORS]);
        // The server's process ended, or it opened another store under the name.
        match self.below(2) {
            0 => self.epoch.instance += 1,
            _ => self.epoch.store += 1,
        }
    }

    /// An operator has the files opened anew: the server forgets that a flush failed, and the kernel has them as before.
    fn reopen(&mut self) {
        self.disconnect();
        self.reopened += usize::from(self.flush_failed);
        self.flush_failed = false;
        self.epoch.store += 1;
    }

    fn send(&mut self) {
        while let Some(id) = self.machine.next(self.time()) {
            self.sent.push(id);
        }
    }

    /// The server does one request, or answers one that it has done.
    fn serve_one(&mut self) {
        if !self.executed.is_empty() && (self.sent.is_empty() || self.below(2) == 0) {
            let at = self.below(self.executed.len());
            let (id, result) = self.executed.swap_remove(at);
            return self.machine.complete(id, result, self.time());
        }
        if self.sent.is_empty() {
            return;
        }
        let at = self.below(self.sent.len());
        let id = self.sent.swap_remove(at);
        if self.below(20) == 0 {
            return self.machine.complete(id, Err(CallError::Busy), self.time());
        }
        let result = self.execute(id);
        self.executed.push((id, result));
    }

    fn check(&mut self) {
        let mut done: Vec<Done<Vec<u64>>> = Vec::new();
        self.machine.reap(&mut done);
        for done in done {
            let (kind, start, end) = self.user.asked.remove(&done.tag).expect("nothing is answered twice");
            let before = self.user.before.remove(&done.tag).expect("asked");
            self.user.ended += 1;
            if let Err(VolumeError::Cancelled { sent }) = done.result {
                assert!(self.user.wants_no_more.remove(&done.tag), "only what was to be cancelled is");
                self.user.cancelled += 1;
                if !sent {
                    self.user.never_sent.insert(done.tag);
                }
                assert_eq!(kind == Kind::Read, done.buffer.is_some(), "a read brings its memory back");
                continue;
            }
            if matches!(kind, Kind::Flush | Kind::Write { durable: true }) && done.result.is_err() {
                assert_eq!(done.result, Err(CallError::from(BlockError::FlushFailed).into()));
                continue;
            }
            assert_eq!(done.result, Ok(Answer::Unit));
            match kind {
                Kind::Write { durable } => {
                    for sector in start..end {
                        self.user.acknowledged[sector] = self.user.acknowledged[sector].max(done.tag);
                        assert!(!durable || self.stable[sector] >= done.tag, "a durable write is not durable");
                    }
                }
                Kind::Read => {
                    let values = done.buffer.expect("a read brings its memory back");
                    for (sector, value) in (start..end).zip(values) {
                        assert!(value >= before[sector], "a read went back in time: {value} < {}", before[sector]);
                    }
                }
                _ => {
                    for (stable, before) in self.stable.iter().zip(before) {
                        assert!(*stable >= before, "a flush left an acknowledged write behind");
                    }
                }
            }
        }
    }

    fn cancel(&mut self) {
        let at = self.below(self.user.asked.len().max(1));
        let Some(tag) = self.user.asked.keys().nth(at).copied() else { return };
        assert!(self.machine.cancel(tag));
        self.user.wants_no_more.insert(tag);
    }

    fn step(&mut self) {
        self.now += 1;
        assert!(self.cache.iter().all(|value| !self.user.never_sent.contains(value)), "it was sent after all");
        match self.below(100) {
            0..40 => self.submit(),
            40..42 => self.cancel(),
            42..88 => self.serve_one(),
            88..91 => self.disconnect(),
            91..93 => self.power_loss(),
            93 => self.reopen(),
            _ if !self.connected => {
                self.connected = true;
                self.machine.connected(self.epoch, 1, false);
            }
            _ => {}
        }
        self.send();
        self.check();
    }

    fn finish(&mut self) {
        for _ in 0..100_000 {
            if self.user.asked.is_empty() {
                return;
            }
            self.now += 1;
            if self.flush_failed {
                self.reopen();
            }
            if !std::mem::replace(&mut self.connected, true) {
                self.machine.connected(self.epoch, 1, false);
            }
            self.send();
            self.serve_one();
            self.check();
        }
        panic!("{} requests never ended", self.user.asked.len());
    }
}

#[test]
fn acknowledged_writes_survive_whatever_the_server_does() {
    let (mut ended, mut replayed, mut cancelled, mut reopened) = (0, 0, 0, 0);
    for seed in 0..1500 {
        let mut run = Simulation::new(seed);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..400 {
                run.step();
            }
            run.finish();
            for sector in 0..SECTORS {
                assert!(run.cache[sector] >= run.user.acknowledged[sector], "an acknowledged write is gone");
            }
        }));
        assert!(outcome.is_ok(), "seed {seed} failed");
        ended += run.user.ended;
        replayed += run.machine.replayed();
        cancelled += run.user.cancelled;
        reopened += run.reopened;
        assert!(run.machine.unflushed_bytes() <= BOUNDS.unflushed_bytes_max + 4 * 4096 * 64);
    }
    let much = ended > 100_000 && replayed > 1_000 && cancelled > 1_000 && reopened > 1_000;
    assert!(
        much,
        "too little happened: {ended} ended, {replayed} replayed, {cancelled} cancelled, {reopened} opened anew"
    );
}

#[test]
fn what_is_cancelled_is_not_sent_again_and_its_answer_says_whether_it_may_have_been_done() {
    let mut machine: Machine<(), ()> = Machine::new(BOUNDS, Instant::from_nanos(0));
    let write = |offset| Request::Write { offset, len: 4096, from: (), durable: false };
    for (tag, offset) in [(1, 0), (2, 4096), (3, 0), (4, 8192)] {
        machine.submit(write(offset), tag).unwrap();
    }
    assert!(!machine.cancel(5));
    machine.connected(FIRST, 1, false);
    let sent: Vec<OpId> = std::iter::from_fn(|| machine.next(Instant::from_nanos(0))).collect();
    assert_eq!(sent.len(), 2, "the third overlaps the first");
    let mut done = Vec::new();
    for tag in 1..=4 {
        assert!(machine.cancel(tag));
    }
    machine.reap(&mut done);
    let ended = |done: &mut Vec<Done<()>>| done.drain(..).map(|done| (done.tag, done.result)).collect::<Vec<_>>();
    let unsent = Err(VolumeError::Cancelled { sent: false });
    assert_eq!(ended(&mut done), [(3, unsent.clone()), (4, unsent)]);
    // The server answers one as if nothing had been said; with the other its session ends.
    machine.complete(sent[0], Ok(Answer::Unit), Instant::from_nanos(1));
    machine.disconnected(Instant::from_nanos(5));
    machine.reap(&mut done);
    assert_eq!(ended(&mut done), [(1, Ok(Answer::Unit)), (2, Err(VolumeError::Cancelled { sent: true }))]);
    machine.connected(FIRST, 1, false);
    assert_eq!((machine.next(Instant::from_nanos(5)), machine.pending()), (None, 0));
    assert!(!machine.cancel(2));
}

#[test]
fn each_of_many_kept_changes_is_sent_again_in_order_and_none_is_searched_for() {
    const CHANGES: u64 = 20_000;
    let bounds = Bounds { unflushed_bytes_max: usize::MAX / 4, ..BOUNDS };
    let at = |ms: u64| Instant::from_nanos(ms * 1_000_000);
    let mut machine: Machine<(), ()> = Machine::new(bounds, at(0));
    machine.connected(FIRST, 1, false);
    for tag in 0..CHANGES {
        machine.submit(Request::Trim { offset: tag * 4096, len: 4096, durable: false }, tag).unwrap();
        let id = machine.next(at(0)).unwrap();
        machine.complete(id, Ok(Answer::Unit), at(0));
    }
    // Ten of them are cut in two by durable ones.
    for tag in (0..CHANGES).step_by(CHANGES as usize / 10) {
        machine.submit(Request::Trim { offset: tag * 4096 + 1024, len: 1024, durable: true }, tag).unwrap();
        let id = machine.next(at(0)).unwrap();
        machine.complete(id, Ok(Answer::Unit), at(0));
    }
    // Servers that are too busy for some, of which the first dies in the middle.
    let (mut now, mut answers, mut sent) = (0, 0, VecDeque::new());
    for (instance, limit) in [(2, CHANGES / 2), (3, u64::MAX)] {
        machine.disconnected(at(now));
        machine.connected(ServerEpoch { instance, ..FIRST }, 1, false);
        sent.clear();
        let (mut next, mut went) = (0, 0);
        while !machine.settled() && went < limit {
            now += 1000;
            while sent.len() < 16
                && let Some(id) = machine.next(at(now))
            {
                sent.push_back(id);
            }
            answers += 1;
            if answers % 97 == 0 {
                // The newest, so that it is the next one.
                machine.complete(sent.pop_back().unwrap(), Err(CallError::Busy), at(now));
                continue;
            }
            let id = sent.pop_front().unwrap();
            let operation = machine.operation(id).unwrap();
            assert!(operation.offset >= next, "byte {} after {next}", operation.offset);
            next = operation.offset + operation.len;
            machine.complete(id, Ok(Answer::Unit), at(now));
            went += 1;
        }
        assert!(went == limit || went == CHANGES + 10 && next == CHANGES * 4096, "{went} changes up to byte {next}");
    }
    let each = machine.steps() / machine.replayed();
    assert!(each < 64, "{each} entries were looked at for each that was sent");
}

/// Two servers of one disk, to whose address the client connects by turns.
#[test]
fn back_at_a_server_that_has_the_later_change_both_are_sent_again_in_order() {
    let at = Instant::from_nanos(0);
    let mut machine: Machine<(), u8> = Machine::new(BOUNDS, at);
    machine.connected(FIRST, 1, false);
    for version in 1..=2 {
        let request = Request::Write { offset: 0, len: 4096, from: version, durable: false };
        machine.submit(request, u64::from(version)).unwrap();
        let id = machine.next(at).unwrap();
        machine.complete(id, Ok(Answer::Unit), at);
    }
    let mut versions = |epoch: ServerEpoch, limit: usize| {
        machine.disconnected(at);
        machine.connected(epoch, 1, false);
        let mut sent = Vec::new();
        while sent.len() < limit
            && let Some(id) = machine.next(at)
        {
            sent.push(machine.operation(id).unwrap().from.unwrap());
            machine.complete(id, Ok(Answer::Unit), at);
        }
        sent
    };
    assert_eq!(versions(ServerEpoch { instance: 2, ..FIRST }, 1), [1]);
    // The first one is not there, and would go over the second.
    assert_eq!(versions(FIRST, usize::MAX), [1, 2]);
    assert_eq!(versions(FIRST, usize::MAX), [0; 0], "both are there");
}

#[test]
fn after_a_failure_everything_ends() {
    let mut run = Simulation::new(1);
    for _ in 0..30 {
        run.submit();
    }
    run.connected = true;
    run.machine.connected(FIRST, 1, false);
    run.send();
    run.machine.fail(VolumeError::Closed);
    run.machine.disconnected(Instant::from_nanos(5));
    let mut done = Vec::new();
    run.machine.reap(&mut done);
    assert_eq!(done.len(), 30);
    assert!(done.iter().all(|done| done.result == Err(VolumeError::Closed)));
}

#[test]
fn without_a_server_it_is_lost_after_the_limit() {
    let mut machine: Machine<(), ()> = Machine::new(BOUNDS, Instant::from_nanos(0));
    machine.submit(Request::Flush, 1).unwrap();
    machine.tick(Instant::from_nanos(9_999_999_999));
    assert_eq!(machine.failed(), None);
    // It says that it is busy with what the last session asked for: that is no loss.
    machine.heard_from_server(Instant::from_nanos(9_999_999_999));
    machine.tick(Instant::from_nanos(19_999_999_998));
    assert_eq!(machine.failed(), None);
    machine.tick(Instant::from_nanos(19_999_999_999));
    assert_eq!(machine.failed(), Some(VolumeError::Lost(BOUNDS.lost_after)));
}

#[test]
fn a_volume_in_memory_is_lost_with_its_process_or_its_store() {
    let elsewhere = [ServerEpoch { instance: 2, ..FIRST }, ServerEpoch { store: 2, ..FIRST }];
    for (epoch, failed) in [(FIRST, None)].into_iter().chain(elsewhere.map(|at| (at, Some(VolumeError::VolatileLost))))
    {
        let mut machine: Machine<(), ()> = Machine::new(BOUNDS, Instant::from_nanos(0));
        machine.connected(FIRST, 1, true);
        machine.disconnected(Instant::from_nanos(1));
        machine.connected(epoch, 1, true);
        assert_eq!(machine.failed(), failed);
    }
}

#[test]
fn a_volume_of_another_medium_is_given_up_unless_a_medium_is_not_known() {
    let at = |epoch, ids: [u64; 2]| {
        let mut machine: Machine<(), ()> = Machine::new(BOUNDS, Instant::from_nanos(0));
        machine.connected(FIRST, ids[0], false);
        machine.disconnected(Instant::from_nanos(1));
        machine.connected(epoch, ids[1], false);
        machine.failed()
    };
    for epoch in [FIRST, ServerEpoch { instance: 2, ..FIRST }, ServerEpoch { store: 2, ..FIRST }] {
        for same in [[5, 5], [0, 5], [5, 0]] {
            assert_eq!(at(epoch, same), None);
        }
        assert_eq!(at(epoch, [5, 6]), Some(VolumeError::Replaced));
    }
}

#[test]
fn a_server_that_refuses_the_volume_is_not_said_to_be_lost() {
    let after = |refused: &[CallError]| {
        let mut machine: Machine<(), ()> = Machine::new(BOUNDS, Instant::from_nanos(0));
        machine.connected(FIRST, 1, false);
        machine.disconnected(Instant::from_nanos(0));
        for error in refused {
            machine.refused(*error);
        }
        let early = machine.failed();
        machine.tick(Instant::from_nanos(10_000_000_000));
        (early, machine.failed())
    };
    let lost = Some(VolumeError::Lost(BOUNDS.lost_after));
    let refused = |error| Some(VolumeError::Refused(error));
    assert_eq!(after(&[]), (None, lost));
    assert_eq!(after(&[CallError::Busy, CallError::NotFound]), (None, refused(CallError::NotFound)));
    let tls = refused(CallError::TlsRequired);
    assert_eq!(after(&[CallError::TlsRequired]), (tls, tls), "waiting does not help");
}

#[test]
fn a_busy_server_is_asked_again_after_pauses_that_grow() {
    let at = |ms: u64| Instant::from_nanos(ms * 1_000_000);
    let mut machine: Machine<(), ()> = Machine::new(BOUNDS, at(0));
    for tag in 1..=3 {
        machine.submit(Request::Read { offset: tag * 4096, len: 4096, into: () }, tag).unwrap();
    }
    machine.connected(FIRST, 1, false);
    let first = machine.next(at(0)).unwrap();
    let second = machine.next(at(0)).unwrap();
    assert_eq!(machine.paused_until(at(0)), None);
    machine.complete(first, Err(CallError::Busy), at(0));
    machine.complete(second, Err(CallError::Busy), at(1));
    assert_eq!((machine.next(at(1)), machine.paused_until(at(1))), (None, Some(at(2))), "one pause for both");
    let (mut asked, mut now) = (Vec::new(), 2);
    while now < 2000 {
        let Some(id) = machine.next(at(now)) else {
            now += 1;
            continue;
        };
        asked.push(now);
        machine.complete(id, Err(CallError::Busy), at(now));
    }
    assert_eq!(asked[..8], [2, 6, 14, 30, 62, 126, 226, 326]);
    assert!(asked.len() < 30, "{asked:?}");
    // Something is answered: the pause that there is goes on, the next one is short again.
    let until = machine.paused_until(at(now)).unwrap();
    assert_eq!(machine.paused_until(until), None);
    let id = machine.next(until).unwrap();
    machine.complete(id, Ok(Answer::Unit), until);
    let id = machine.next(until).unwrap();
    machine.complete(id, Err(CallError::Busy), until);
    assert_eq!(machine.paused_until(until), Some(until + Duration::from_millis(2)));
    // Another session begins without one.
    machine.disconnected(until);
    assert_eq!(machine.paused_until(until), None);
    machine.connected(FIRST, 1, false);
    assert!(machine.next(until).is_some());
}

#[test]
fn tls_that_fails_after_a_session_is_the_reason_at_the_end_and_a_revoked_certificate_the_end_itself() {
    let lost = VolumeError::Lost(BOUNDS.lost_after);
    for (error, ends_at_once, at_last) in [
        (TlsError::Refused(AlertDescription::CertificateRevoked), true, None),
        (TlsError::Refused(AlertDescription::UnknownCA), false, None),
        (TlsError::Expired, false, None),
        (TlsError::Cut, false, Some(lost)),
    ] {
        let mut machine: Machine<(), ()> = Machine::new(BOUNDS, Instant::from_nanos(0));
        machine.connected(FIRST, 1, false);
        machine.disconnected(Instant::from_nanos(0));
        machine.tls_failed(error);
        assert_eq!(machine.failed().is_some(), ends_at_once, "{error}");
        machine.tick(Instant::from_nanos(0) + BOUNDS.lost_after);
        assert_eq!(machine.failed(), Some(at_last.unwrap_or(VolumeError::Tls(error))), "{error}");
    }
}
