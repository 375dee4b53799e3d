//! What makes a volume refuse to call anything durable any more, and what does not.

use byway_reactor::sim::{FileFault, FileOp, SimFile, World};
use byway_reactor::{Errno, FileOptions, OpenFile};
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
        assert_eq!(rig.zero((0, 4096), flags), Err(BlockError::Unsupported));
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
            assert_eq!(rig.zero((0, 4096), FUA), Err(error.into()));
            assert_eq!(rig.flush(), Ok(()), "after {error}");
        }
    }
}

#[test]
fn a_sync_or_a_durable_write_that_fails_ends_all_flushes() {
    for io in BACKENDS {
        // For want of room, too: the bytes that found none were taken before.
        for error in [Errno::IO, Errno::NOSPC] {
            let mut rig = failing_once(io, FaultOperation::Flush, error);
            assert_eq!(rig.flush(), Err(error.into()));
            assert_eq!(rig.flush(), Err(BlockError::FlushFailed));
            assert_eq!(rig.write_small(0, b"x", true), Err(BlockError::FlushFailed));
            assert_eq!(rig.zero((0, 4096), FUA), Err(BlockError::FlushFailed));
        }
        let mut rig = failing_once(io, FaultOperation::Write, Errno::IO);
        assert_eq!(rig.write_small(0, b"x", true), Err(BlockError::Io(Errno::IO)));
        assert_eq!(rig.flush(), Err(BlockError::FlushFailed));
    }
}

/// A volume on a simulated disk, served by several loops.
struct Simulated {
    world: World,
    disk: SimFile,
    loops: Vec<Loop>,
    /// Ends of operations that engines were told.
    told: usize,
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
        Self { world, disk, loops, told: 0 }
    }

    /// One thing happens, and all look: gives what has ended.
    fn step(&mut self) -> Vec<(Tag, Result<(), BlockError>)> {
        assert!(self.world.step(), "it never ends");
        let (mut completions, mut done) = (Vec::new(), Vec::new());
        for Loop { reactor, engine, .. } in &mut self.loops {
            reactor.reap(&mut completions, Wait::Poll).unwrap();
            for completion in completions.drain(..).filter(|completion| completion.token.class() == ENGINE_CLASS) {
                self.told += 1;
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

    fn start_write(&mut self, on: usize, tag: u64) {
        let Loop { reactor, engine, volume } = &mut self.loops[on];
        let flags = WriteFlags { durable: true };
        let step = engine.write_small(reactor, *volume, 1000 * tag, &[1; 700], flags, Tag(tag));
        assert!(matches!(step, Ok(Step::Later)), "{step:?}");
    }

    fn start_zeroing(&mut self, on: usize, tag: u64) {
        let Loop { reactor, engine, volume } = &mut self.loops[on];
        let step = engine.zero(reactor, *volume, (1000 * tag, 700), FUA, Tag(tag));
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
        for (faults, flushed) in [(1, Err(BlockError::FlushFailed)), (2, Ok(()))] {
            let mut rig = Simulated::new(1, 1);
            (0..faults).for_each(|_| rig.disk.fault_next(FileFault { op: FileOp::Write, error }));
            rig.start_write(0, 1);
            assert_eq!(rig.ends(1), [Err(BlockError::NoSpace)]);
            assert_eq!(rig.flush(), flushed, "{error}, {faults} in a row");
            assert_eq!(rig.in_flight(), 0);
        }
    }
}

#[test]
fn nothing_is_called_durable_while_it_is_open_whose_bytes_found_no_room() {
    for seed in 0..100 {
        for (on, lost) in [(0, true), (0, false), (1, true), (1, false)] {
            let mut rig = Simulated::new(seed, 2);
            if lost {
                rig.disk.fail_writeback(Errno::NOSPC);
            } else {
                let full = FileFault { op: FileOp::Write, error: Errno::NOSPC };
                (0..2).for_each(|_| rig.disk.fault_next(full));
            }
            rig.start_write(0, 1);
            // It was told, and is written again.
            while rig.told == 0 {
                assert_eq!(rig.step(), []);
            }
            rig.start_flush(on, 2);
            rig.start_zeroing(on, 3);
            let others = if lost { Err(BlockError::FlushFailed) } else { Ok(()) };
            assert_eq!(rig.ends(3), [Err(BlockError::NoSpace), others, others], "seed {seed}, loop {on}");
            assert_eq!(rig.in_flight(), 0);
        }
    }
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
            assert_eq!(told, 1, "seed {seed}, {loops} loops: {ends:?}");
            assert_eq!(rig.in_flight(), 0);
        }
    }
}

#[test]
fn a_good_answer_waits_for_what_was_under_way_and_not_for_what_began_later() {
    for on in [0, 1] {
        let effect = FaultEffect::Delay(Duration::from_secs(1));
        let slow = FaultRule { operation: FaultOperation::Write, effect, range: None, count_max: None };
        let options = VolumeOptions { faults: FaultRules(vec![slow]), ..VolumeOptions::default() };
        let mut rig = Simulated::with_options(1, 2, options);
        let start = rig.loops[0].reactor.now();
        let later = start + Duration::from_millis(200);
        rig.loops[0].reactor.submit(Op::Timer { at: later }, Token::new(0, 0, 0, 0));
        rig.start_write(0, 1);
        rig.start_flush(on, 2);
        // The disk flushes faster.
        while rig.loops[0].reactor.now() < later {
            assert_eq!(rig.step(), []);
        }
        rig.start_write(0, 3);
        let flushed = loop {
            if let Some(first) = rig.step().first() {
                break *first;
            }
        };
        assert_eq!(flushed, (Tag(2), Ok(())));
        let took = rig.loops[0].reactor.now().since(start);
        assert!(took >= Duration::from_secs(1), "it passed the first write on loop {on}: {took:?}");
        assert!(took < Duration::from_millis(1200), "it waited for the second write on loop {on}: {took:?}");
        assert_eq!(rig.ends(2), [Ok(()), Ok(())]);
        assert_eq!(rig.in_flight(), 0);
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
        let step = rig.engine.zero(&mut rig.reactor, rig.volume, (0, 300_000), flags, Tag(7));
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
