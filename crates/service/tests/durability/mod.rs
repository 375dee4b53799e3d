//! What makes a volume refuse to call anything durable any more, and what does not.

use std::collections::{BTreeMap, BTreeSet};

use byway_fabric::random::Random;
use byway_reactor::sim::{FileFault, FileOp, SimFile, World};
use byway_reactor::{ByteRange, Errno, FileOptions, OpenFile};
use byway_service::block::spec::{FaultEffect, FaultOperation, FaultRule, FaultRules};

use super::*;

const LEN: u64 = 1 << 20;
const FUA: ZeroFlags = ZeroFlags { keep_space: false, fast: false, durable: true };

/// Memory whose first operation of a kind fails.
fn failing_once(io: IoChoice, operation: FaultOperation, error: Errno) -> Rig {
    let rule = FaultRule { operation, effect: FaultEffect::Error(error), range: None, count_max: Some(1) };
    let options = VolumeOptions { faults: FaultRules(vec![rule]), ..VolumeOptions::default() };
    Rig::new(io, Store::memory("m", LEN).unwrap(), options)
}

#[test]
fn a_request_that_a_store_cannot_do_costs_nobody_a_flush() {
    for io in BACKENDS {
        let mut rig = Rig::new(io, Store::memory("m", LEN).unwrap(), VolumeOptions::default());
        let flags = ZeroFlags { keep_space: true, fast: true, durable: true };
        assert_eq!(rig.zero(ByteRange::new(0, 4096), flags), Err(BlockError::Unsupported));
        assert_eq!(rig.flush(), Ok(()));
        assert_eq!(rig.write_small(0, b"still durable", true), Ok(()));
    }
}

#[test]
fn durable_requests_that_find_no_room_or_were_refused_lose_nothing() {
    for io in BACKENDS {
        for error in [Errno::NOSPC, Errno::DQUOT, Errno::CANCELED, Errno::NOBUFS, Errno::AGAIN, Errno::OPNOTSUPP] {
            let mut rig = failing_once(io, FaultOperation::Write, error);
            assert_eq!(rig.write_small(0, b"x", true), Err(error.into()));
            assert_eq!(rig.flush(), Ok(()), "after {error}");
        }
        // The store's own step of zeroing has written nothing that was promised, whatever came of it.
        for error in [Errno::NOSPC, Errno::IO] {
            let mut rig = failing_once(io, FaultOperation::Zero, error);
            assert_eq!(rig.zero(ByteRange::new(0, 4096), FUA), Err(error.into()));
            assert_eq!(rig.flush(), Ok(()), "after {error}");
        }
    }
}

#[test]
fn a_sync_that_fails_ends_all_flushes_and_a_durable_write_that_was_refused_does_not() {
    for io in BACKENDS {
        // For want of room, too: the bytes that found none were taken before.
        for error in [Errno::IO, Errno::NOSPC] {
            let mut rig = failing_once(io, FaultOperation::Flush, error);
            assert_eq!(rig.flush(), Err(error.into()));
            assert_eq!(rig.flush(), Err(BlockError::FlushFailed));
            assert_eq!(rig.write_small(0, b"x", true), Err(BlockError::FlushFailed));
            assert_eq!(rig.zero(ByteRange::new(0, 4096), FUA), Err(BlockError::FlushFailed));
        }
        // The kernel did not take the bytes of a write that fails before its sync: only that write is lost.
        let mut rig = failing_once(io, FaultOperation::Write, Errno::IO);
        assert_eq!(rig.write_small(0, b"x", true), Err(BlockError::Io(Errno::IO)));
        assert_eq!(rig.flush(), Ok(()));
    }
}

/// A volume on a simulated disk, served by several loops.
struct Simulated {
    world: World,
    disk: SimFile,
    loops: Vec<Loop>,
}

struct Loop {
    reactor: Reactor,
    engine: Engine,
    volume: VolumeId,
}

impl Simulated {
    fn new(seed: u64, loops: u8) -> Self {
        Self::with_options(seed, loops, VolumeOptions::default())
    }

    fn with_options(seed: u64, loops: u8, options: VolumeOptions) -> Self {
        let world = World::new(seed);
        let ip = |index: u8| std::net::Ipv4Addr::new(127, 0, 0, index + 1).into();
        let mut reactors: Vec<Reactor> = (0..loops).map(|index| world.node(ip(index), 8 << 20)).collect();
        let disk = world.disk(ip(0)).file("f", LEN);
        let store = Store::open_file(Arc::new(OpenFile::simulated(disk.clone(), FileOptions::default())));
        let served = Arc::new(Volume::new("v", store, options));
        let attach = |mut reactor| {
            let mut engine = Engine::default();
            let volume = engine.attach(&mut reactor, Arc::clone(&served));
            Loop { reactor, engine, volume }
        };
        let loops = reactors.drain(..).map(attach).collect();
        Self { world, disk, loops }
    }

    /// One thing happens, and all look: gives what has ended.
    fn step(&mut self) -> Vec<(Tag, Result<(), BlockError>)> {
        assert!(self.world.step(), "it never ends");
        let (mut completions, mut done) = (Vec::new(), Vec::new());
        for Loop { reactor, engine, .. } in &mut self.loops {
            reactor.reap(&mut completions, Wait::Poll).unwrap();
            for completion in completions.drain(..).filter(|completion| completion.token.class() == ENGINE_CLASS) {
                engine.complete(reactor, completion, &mut done);
            }
        }
        let result = |done: Done| match done.outcome {
            Outcome::Unit(result) => (done.tag, result),
            other => panic!("{other:?}"),
        };
        done.into_iter().map(result).collect()
    }

    /// Until so many requests have ended: gives them by their tags.
    fn ends(&mut self, count: usize) -> Vec<Result<(), BlockError>> {
        let mut ended = Vec::new();
        while ended.len() < count {
            ended.extend(self.step());
        }
        ended.sort_by_key(|(tag, _)| tag.0);
        ended.into_iter().map(|(_, result)| result).collect()
    }

    fn start_flush(&mut self, on: usize, tag: u64) {
        let Loop { reactor, engine, volume } = &mut self.loops[on];
        let step = engine.flush(reactor, *volume, Tag(tag));
        assert!(matches!(step, Ok(Step::Later)), "{step:?}");
    }

    /// Where the write of a tag goes.
    fn place(tag: u64) -> u64 {
        1000 * tag
    }

    /// What it writes.
    fn bytes(tag: u64) -> [u8; 700] {
        [tag as u8 + 1; 700]
    }

    fn write(&mut self, on: usize, tag: u64, durable: bool) -> Step<()> {
        let Loop { reactor, engine, volume } = &mut self.loops[on];
        let flags = WriteFlags { durable };
        engine.write_small(reactor, *volume, Self::place(tag), &Self::bytes(tag), flags, Tag(tag)).unwrap()
    }

    fn start_write(&mut self, on: usize, tag: u64) {
        let step = self.write(on, tag, true);
        assert!(matches!(step, Step::Later), "{step:?}");
    }

    fn start_zeroing(&mut self, on: usize, tag: u64) {
        let Loop { reactor, engine, volume } = &mut self.loops[on];
        let step = engine.zero(reactor, *volume, ByteRange::new(1000 * tag, 700), FUA, Tag(tag));
        assert!(matches!(step, Ok(Step::Later)), "{step:?}");
    }

    fn flush(&mut self) -> Result<(), BlockError> {
        let Loop { reactor, engine, volume } = &mut self.loops[0];
        if let Step::Now(()) = engine.flush(reactor, *volume, Tag(7))? {
            return Ok(());
        }
        self.ends(1).remove(0)
    }

    fn in_flight(&self) -> usize {
        self.loops.iter().map(|one| one.engine.in_flight()).sum()
    }
}

#[test]
fn the_sync_of_a_zeroing_counts_as_one() {
    for error in [Errno::IO, Errno::NOSPC] {
        let mut rig = Simulated::new(1, 1);
        rig.disk.fault_next(FileFault { op: FileOp::Sync, error });
        rig.start_zeroing(0, 1);
        assert_eq!(rig.ends(1), [Err(error.into())]);
        assert_eq!(rig.flush(), Err(BlockError::FlushFailed));
    }
}

#[test]
fn a_durable_write_tells_its_own_want_of_room_from_that_of_older_bytes() {
    for error in [Errno::NOSPC, Errno::DQUOT, Errno::FBIG] {
        for (own, flushed) in [(true, Ok(())), (false, Err(BlockError::FlushFailed))] {
            let mut rig = Simulated::new(1, 1);
            if own {
                rig.disk.fault_next(FileFault { op: FileOp::Write, error });
            } else {
                rig.disk.fail_writeback(error);
            }
            rig.start_write(0, 1);
            assert_eq!(rig.ends(1), [Err(BlockError::NoSpace)]);
            assert_eq!(rig.flush(), flushed, "{error}, its own: {own}");
            assert_eq!(rig.in_flight(), 0);
        }
    }
}

/// What the user of a volume on a thin device knows.
#[derive(Default)]
struct Promises {
    /// Tags of writes that were acknowledged.
    acknowledged: Vec<u64>,
    /// By the tag of a flush: the writes that it covers.
    flushes: BTreeMap<u64, Vec<u64>>,
}

impl Promises {
    /// Checks that the device has what an acknowledgement says is durable.
    fn ended(&mut self, rig: &Simulated, (tag, result): (Tag, Result<(), BlockError>), durable: bool) -> usize {
        let flushed = self.flushes.remove(&tag.0);
        if result.is_err() {
            return 0;
        }
        let promised = flushed.unwrap_or_else(|| {
            self.acknowledged.push(tag.0);
            if durable { vec![tag.0] } else { Vec::new() }
        });
        let bytes = rig.disk.durable();
        for tag in &promised {
            let at = Simulated::place(*tag) as usize;
            assert!(bytes[at..at + 700] == Simulated::bytes(*tag), "write {tag} is lost");
        }
        promised.len()
    }
}

#[test]
fn on_a_full_thin_device_nothing_is_called_durable_that_is_lost() {
    let mut promised = 0;
    for seed in 0..1000 {
        let loops = 1 + seed as u8 % 2;
        let (mut rig, mut random) = (Simulated::new(seed, loops), Random::from_seed(seed));
        let (mut promises, mut durable) = (Promises::default(), BTreeSet::new());
        for tag in 0..40 {
            let on = random.next_u64() as usize % usize::from(loops);
            match random.next_u64() % 16 {
                // The device is full: what it was given is lost, and what it is given now finds no room.
                0 => {
                    rig.disk.fail_writeback(Errno::NOSPC);
                    let refused = random.next_u64() % 3;
                    (0..refused)
                        .for_each(|_| rig.disk.fault_next(FileFault { op: FileOp::Write, error: Errno::NOSPC }));
                }
                1 => rig.disk.fault_next(FileFault { op: FileOp::Write, error: Errno::NOSPC }),
                2..5 => {
                    let Loop { reactor, engine, volume } = &mut rig.loops[on];
                    if engine.flush(reactor, *volume, Tag(tag)).is_ok() {
                        promises.flushes.insert(tag, promises.acknowledged.clone());
                    }
                }
                kind => {
                    let is_durable = kind < 8;
                    if is_durable {
                        durable.insert(tag);
                    }
                    if let Step::Now(()) = rig.write(on, tag, is_durable) {
                        promised += promises.ended(&rig, (Tag(tag), Ok(())), is_durable);
                    }
                }
            }
            while rig.in_flight() > 0 && random.next_u64() % 3 > 0 {
                for end in rig.step() {
                    promised += promises.ended(&rig, end, durable.contains(&end.0.0));
                }
            }
        }
    }
    assert!(promised > 1000, "it must promise something: {promised}");
}

#[test]
fn of_syncs_that_are_under_way_together_none_answers_well_when_one_is_told_of_a_loss() {
    for seed in 0..100 {
        for loops in [1, 2, 3] {
            let mut rig = Simulated::new(seed, loops);
            rig.disk.fail_writeback(Errno::IO);
            for tag in 0..6 {
                let on = tag as usize % loops as usize;
                match tag / 2 {
                    0 => rig.start_flush(on, tag),
                    1 => rig.start_write(on, tag),
                    _ => rig.start_zeroing(on, tag),
                }
            }
            let ends = rig.ends(6);
            assert!(ends.iter().all(Result::is_err), "seed {seed}, {loops} loops: {ends:?}");
            let told = ends.iter().filter(|end| **end == Err(BlockError::Io(Errno::IO))).count();
            assert!(told >= 2, "the requests of one sync for each description, seed {seed}, {loops} loops: {ends:?}");
            assert_eq!(rig.in_flight(), 0);
        }
    }
}

/// Two loops, and each flush takes a second.
fn slow_to_flush() -> Simulated {
    let effect = FaultEffect::Delay(Duration::from_secs(1));
    let slow = FaultRule { operation: FaultOperation::Flush, effect, range: None, count_max: None };
    Simulated::with_options(1, 2, VolumeOptions { faults: FaultRules(vec![slow]), ..VolumeOptions::default() })
}

#[test]
fn a_sync_with_a_description_for_itself_waits_for_no_other() {
    for on in [0, 1] {
        let mut rig = slow_to_flush();
        let start = rig.loops[0].reactor.now();
        rig.start_flush(0, 1);
        rig.start_write(on, 2);
        assert_eq!(rig.ends(1), [Ok(())]);
        let took = rig.loops[0].reactor.now().since(start);
        assert!(took < Duration::from_millis(500), "it waited for the flush: {took:?}");
        assert_eq!(rig.ends(1), [Ok(())]);
        assert_eq!(rig.in_flight(), 0);
    }
}

#[test]
fn a_good_answer_waits_for_what_was_under_way_and_not_for_what_began_later() {
    let mut rig = slow_to_flush();
    let start = rig.loops[0].reactor.now();
    let later = start + Duration::from_millis(200);
    rig.loops[0].reactor.submit(Op::Timer { at: later }, Token::new(0, 0, 0, 0));
    // One on each description.
    rig.start_flush(0, 1);
    rig.start_flush(0, 4);
    // The disk does this faster.
    rig.start_write(1, 2);
    while rig.loops[0].reactor.now() < later {
        assert_eq!(rig.step(), []);
    }
    rig.start_flush(0, 3);
    let mut ended = BTreeMap::new();
    while !ended.contains_key(&2) {
        ended.extend(rig.step().into_iter().map(|(tag, result)| (tag.0, result)));
    }
    assert_eq!(ended.remove(&2), Some(Ok(())));
    let took = rig.loops[0].reactor.now().since(start);
    assert!(took >= Duration::from_secs(1), "it passed the first flush: {took:?}");
    assert!(took < Duration::from_millis(1200), "it waited for the second flush: {took:?}");
    assert_eq!(rig.ends(3 - ended.len()), vec![Ok(()); 3 - ended.len()]);
    assert_eq!(rig.in_flight(), 0);
}

#[test]
fn durable_writes_that_find_no_free_description_share_syncs() {
    const WRITES: usize = 40;
    let mut rig = Simulated::new(1, 1);
    (0..WRITES as u64).for_each(|tag| rig.start_write(0, tag));
    let (mut ended, mut events) = (Vec::new(), 0);
    while ended.len() < WRITES {
        ended.extend(rig.step());
        events += 1;
    }
    assert!(ended.iter().all(|(_, result)| result.is_ok()), "{ended:?}");
    assert!(events < WRITES * 3 / 2, "{events} events: {WRITES} writes, and a sync for each");
    assert_eq!(rig.in_flight(), 0);
}

#[test]
fn requests_that_share_a_failed_sync_all_fail() {
    const WRITES: usize = 40;
    for seed in 0..100 {
        let mut rig = Simulated::new(seed, 1);
        (0..WRITES as u64).for_each(|tag| rig.start_write(0, tag));
        let mut ended = rig.step();
        while ended.is_empty() {
            ended = rig.step();
        }
        // What the ended ones were promised is durable; the rest is lost.
        rig.disk.fail_writeback(Errno::IO);
        let kept = rig.disk.durable();
        while ended.len() < WRITES {
            ended.extend(rig.step());
        }
        for (tag, _) in ended.iter().filter(|(_, result)| result.is_ok()) {
            let at = Simulated::place(tag.0) as usize;
            let is_kept = |bytes: &[u8]| bytes[at..at + 700] == Simulated::bytes(tag.0);
            assert!(is_kept(&kept) || is_kept(&rig.disk.durable()), "write {} is lost, seed {seed}", tag.0);
        }
        assert_eq!(rig.flush(), Err(BlockError::FlushFailed), "seed {seed}");
    }
}

#[test]
fn what_a_loop_was_told_that_ended_before_it_looked_counts_as_bad() {
    let mut rig = Simulated::new(1, 2);
    rig.start_flush(1, 1);
    rig.start_flush(0, 2);
    rig.loops.truncate(1);
    assert_eq!(rig.ends(1), [Err(BlockError::FlushFailed)]);
}

#[test]
fn zeroing_that_must_write_waits_for_a_frame() {
    for io in BACKENDS {
        let mut rig = Rig::new(io, Store::memory("m", LEN).unwrap(), VolumeOptions::default());
        rig.write(0, &[1; 300_000], false).unwrap();
        let mut lent = Vec::new();
        for len in [1 << 20, 4096, 512, 1] {
            while let Some(frame) = rig.reactor.frames().alloc(len) {
                lent.push(frame);
            }
        }
        // Memory cannot keep the space of zeroes by itself.
        let flags = ZeroFlags { keep_space: true, fast: false, durable: true };
        let step = rig.engine.zero(&mut rig.reactor, rig.volume, ByteRange::new(0, 300_000), flags, Tag(7));
        assert!(matches!(step, Ok(Step::Later)), "{step:?}");
        let (mut completions, mut done) = (Vec::new(), Vec::new());
        for _ in 0..10 {
            rig.reactor.reap(&mut completions, Wait::Block).unwrap();
            for completion in completions.drain(..).filter(|completion| completion.token != Token::WAKE) {
                rig.engine.complete(&mut rig.reactor, completion, &mut done);
            }
            assert!(done.is_empty(), "{done:?}");
        }
        lent.clear();
        assert!(matches!(rig.wait(), Outcome::Unit(Ok(()))));
        assert_eq!(rig.read(0, 300_000).unwrap(), vec![0; 300_000]);
        assert_eq!(rig.flush(), Ok(()));
    }
}
