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

/// A simulated disk.
struct Simulated {
    world: World,
    disk: SimFile,
    reactor: Reactor,
    engine: Engine,
    volume: VolumeId,
}

impl Simulated {
    fn new() -> Self {
        let world = World::new(1);
        let ip = std::net::Ipv4Addr::LOCALHOST.into();
        let mut reactor = world.node(ip, 8 << 20);
        let disk = world.disk(ip).file("f", LEN);
        let mut engine = Engine::default();
        let store = Store::open_file(Arc::new(OpenFile::simulated(disk.clone(), FileOptions::default())));
        let volume = engine.attach(&mut reactor, Arc::new(Volume::new("v", store, VolumeOptions::default())));
        Self { world, disk, reactor, engine, volume }
    }

    fn unit(&mut self, step: Result<Step<()>, BlockError>) -> Result<(), BlockError> {
        if matches!(step?, Step::Now(())) {
            return Ok(());
        }
        let (mut completions, mut done) = (Vec::new(), Vec::new());
        while done.is_empty() {
            assert!(self.world.step(), "it never ends");
            self.reactor.reap(&mut completions, Wait::Poll).unwrap();
            for completion in completions.drain(..).filter(|completion| completion.token != Token::WAKE) {
                self.engine.complete(&mut self.reactor, completion, &mut done);
            }
        }
        match done.remove(0).outcome {
            Outcome::Unit(result) => result,
            other => panic!("{other:?}"),
        }
    }

    fn flush(&mut self) -> Result<(), BlockError> {
        let step = self.engine.flush(&mut self.reactor, self.volume, Tag(7));
        self.unit(step)
    }
}

#[test]
fn the_sync_of_a_zeroing_counts_as_one() {
    for error in [Errno::IO, Errno::NOSPC] {
        let mut rig = Simulated::new();
        rig.disk.fault_next(FileFault { op: FileOp::Sync, error });
        let step = rig.engine.zero(&mut rig.reactor, rig.volume, (0, 4096), FUA, Tag(7));
        assert_eq!(rig.unit(step), Err(error.into()));
        assert_eq!(rig.flush(), Err(BlockError::FlushFailed));
    }
}

#[test]
fn a_durable_write_tells_its_own_want_of_room_from_that_of_older_bytes() {
    let full = FileFault { op: FileOp::Write, error: Errno::NOSPC };
    for (faults, flushed) in [(1, Err(BlockError::FlushFailed)), (2, Ok(()))] {
        let mut rig = Simulated::new();
        (0..faults).for_each(|_| rig.disk.fault_next(full));
        let flags = WriteFlags { durable: true };
        let step = rig.engine.write_small(&mut rig.reactor, rig.volume, 1000, &[1; 700], flags, Tag(7));
        assert_eq!(rig.unit(step), Err(BlockError::NoSpace));
        assert_eq!(rig.flush(), flushed, "{faults} in a row");
        assert_eq!(rig.engine.in_flight(), 0);
    }
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
