//! The engine over real files, on both backends: every operation, against a model of bytes.

#![forbid(unsafe_code)]

mod devices;
mod durability;
mod replaced;
mod slicing;
mod staging;

use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use byway_reactor::{
    ByteRange, Frame, FramePool, FrameRange, Gather, IoChoice, Op, Outcome as Went, Reactor, Scatter, Token, Wait,
};
use byway_service::block::spec::{FaultEffect, FaultOperation, FaultRule, FaultRules};
use byway_service::block::{
    Begun, BlockError, Done, ENGINE_CLASS, Engine, OpenError, OpenHere, Outcome, Payload, ReadFlags, Slice, Step,
    Store, StoreOptions, Tag, Volume, VolumeId, VolumeOptions, WriteFlags, ZeroFlags,
};
use proptest::prelude::*;

const BACKENDS: [IoChoice; 2] = [IoChoice::Uring, IoChoice::Epoll];

/// Slices of a read: where each begins, and its bytes.
type Told = Vec<(u64, Vec<u8>)>;

struct Rig {
    reactor: Reactor,
    engine: Engine,
    volume: VolumeId,
}

impl Rig {
    fn new(io: IoChoice, store: Store, options: VolumeOptions) -> Self {
        Self::with_frames(io, (store, options), 8 << 20)
    }

    fn with_frames(io: IoChoice, (store, options): (Store, VolumeOptions), frame_bytes: usize) -> Self {
        let mut reactor = Reactor::open(io, frame_bytes).unwrap();
        let mut engine = Engine::default();
        let volume = engine.attach(&mut reactor, Arc::new(Volume::new("v", store, options)));
        Self { reactor, engine, volume }
    }

    /// Waits for the one request that is in flight.
    fn wait(&mut self) -> Outcome {
        let mut done = Vec::new();
        self.wait_for(&mut done, 1);
        assert_eq!(done.len(), 1);
        done.remove(0)
    }

    /// Waits until there are so many outcomes of the one request that is in flight.
    fn wait_for(&mut self, outcomes: &mut Vec<Outcome>, count: usize) {
        let mut done: Vec<Done> = Vec::new();
        let mut completions = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(20);
        while outcomes.len() + done.len() < count {
            assert!(Instant::now() < deadline, "the request never ended");
            let until = self.reactor.now() + Duration::from_secs(1);
            self.reactor.reap(&mut completions, Wait::Until(until)).unwrap();
            for completion in completions.drain(..).filter(|completion| completion.token != Token::WAKE) {
                assert_eq!(completion.token.class(), ENGINE_CLASS);
                self.engine.complete(&mut self.reactor, completion, &mut done);
            }
        }
        assert!(done.iter().all(|done| done.tag == Tag(7)));
        outcomes.extend(done.into_iter().map(|done| done.outcome));
    }

    /// Reads slice by slice: the bytes of each where it says that it begins, and how the read ended.
    fn read_sliced(&mut self, offset: u64, len: usize) -> (Told, Result<(), BlockError>) {
        let flags = ReadFlags { sliced: true, ..ReadFlags::default() };
        let step = self.engine.read(&mut self.reactor, self.volume, ByteRange::new(offset, len as u64), flags, Tag(7));
        assert!(matches!(step, Ok(Step::Later)), "{step:?}");
        let (mut slices, mut outcomes) = (Vec::new(), Vec::new());
        let ended = loop {
            self.wait_for(&mut outcomes, 1);
            let last = outcomes.iter().any(|outcome| !matches!(outcome, Outcome::Slice(Slice { last: false, .. })));
            slices.extend(outcomes.extract_if(.., |outcome| matches!(outcome, Outcome::Slice(_))));
            match outcomes.pop() {
                None if last => break Ok(()),
                None => {}
                Some(Outcome::Read(Err(error))) => break Err(error),
                Some(other) => panic!("{other:?}"),
            }
        };
        assert_eq!(self.engine.in_flight(), 0);
        let bytes = |outcome| match outcome {
            Outcome::Slice(slice) => (slice.start, self.bytes_of(slice.payload)),
            _ => unreachable!("only slices were kept"),
        };
        (slices.into_iter().map(bytes).collect(), ended)
    }

    fn unit(&mut self, step: Result<Step<()>, BlockError>) -> Result<(), BlockError> {
        match step? {
            Step::Now(()) => Ok(()),
            Step::Later => match self.wait() {
                Outcome::Unit(result) => result,
                other => panic!("{other:?}"),
            },
            Step::Busy | Step::InParts => panic!("no frames"),
        }
    }

    fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, BlockError> {
        let payload = match self.engine.read(
            &mut self.reactor,
            self.volume,
            ByteRange::new(offset, len as u64),
            ReadFlags::default(),
            Tag(7),
        )? {
            Step::Now(payload) => payload,
            Step::Later => match self.wait() {
                Outcome::Read(result) => result?,
                other => panic!("{other:?}"),
            },
            Step::Busy | Step::InParts => panic!("no frames"),
        };
        assert_eq!(payload.len(), len);
        Ok(self.bytes_of(payload))
    }

    /// What a socket would get.
    fn bytes_of(&mut self, payload: Payload) -> Vec<u8> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let [ours, theirs] = [ours, theirs].map(|end| self.reactor.adopt(OwnedFd::from(end)).unwrap());
        let len = payload.len();
        let mut gather = Gather::new();
        payload.push_to(&mut gather);
        let mut into = Scatter::new();
        for start in (0..len).step_by(1 << 20) {
            let part = (len - start).min(1 << 20);
            into.push(self.reactor.frames().alloc(part).unwrap(), 0, part);
        }
        self.reactor.submit(Op::Recv { socket: theirs, into, min: len }, Token::new(1, 1, 0, 0));
        self.reactor.submit(Op::Send { socket: ours, gather }, Token::new(1, 2, 0, 0));
        let mut completions = Vec::new();
        let mut bytes = None;
        let mut sent = false;
        while bytes.is_none() || !sent {
            self.reactor.reap(&mut completions, Wait::Block).unwrap();
            for completion in completions.drain(..).filter(|completion| completion.token != Token::WAKE) {
                match completion.outcome {
                    Went::Received { mut into, result } => {
                        assert_eq!(result, Ok(len));
                        bytes = Some(into.drain().flat_map(|piece| piece.frame.to_vec()).collect());
                    }
                    Went::Sent { result, .. } => sent = result == Ok(len),
                    other => panic!("{other:?}"),
                }
            }
        }
        self.reactor.close(ours);
        self.reactor.close(theirs);
        bytes.unwrap()
    }

    fn write_small(&mut self, offset: u64, bytes: &[u8], durable: bool) -> Result<(), BlockError> {
        let flags = WriteFlags { durable };
        let step = self.engine.write_small(&mut self.reactor, self.volume, offset, bytes, flags, Tag(7));
        self.unit(step)
    }

    /// By pieces in frames, as a front end does with a large payload.
    fn write(&mut self, mut offset: u64, mut bytes: &[u8], durable: bool) -> Result<(), BlockError> {
        while !bytes.is_empty() {
            let len = self.engine.write_piece_len(self.volume, offset, bytes.len());
            let mut frame: Frame = self.reactor.frames().alloc(len).unwrap();
            frame.write(0, &bytes[..len]);
            let flags = WriteFlags { durable };
            let step = self.engine.write(
                &mut self.reactor,
                self.volume,
                offset,
                FrameRange::new(frame, 0, len),
                flags,
                Tag(7),
            );
            self.unit(step.map(Step::from))?;
            offset += len as u64;
            bytes = &bytes[len..];
        }
        Ok(())
    }

    fn zero(&mut self, range: ByteRange, flags: ZeroFlags) -> Result<(), BlockError> {
        let step = self.engine.zero(&mut self.reactor, self.volume, range, flags, Tag(7));
        self.unit(step)
    }

    fn trim(&mut self, range: ByteRange, durable: bool) -> Result<(), BlockError> {
        let step = self.engine.trim(&mut self.reactor, self.volume, range, durable, Tag(7));
        self.unit(step)
    }

    fn flush(&mut self) -> Result<(), BlockError> {
        let step = self.engine.flush(&mut self.reactor, self.volume, Tag(7));
        self.unit(step)
    }

    fn extents(&mut self, range: ByteRange) -> Vec<byway_reactor::Extent> {
        match self.engine.extents(&mut self.reactor, self.volume, range, 100, Tag(7)).unwrap() {
            Step::Now(extents) => extents,
            _ => match self.wait() {
                Outcome::Extents(result) => result.unwrap(),
                other => panic!("{other:?}"),
            },
        }
    }
}

/// A folder in memory and one on a disk: the two behave differently below.
fn folders() -> [tempfile::TempDir; 2] {
    let in_memory = tempfile::tempdir_in("/dev/shm").unwrap();
    [in_memory, tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()]
}

fn file(folder: &Path, name: &str, len: u64) -> PathBuf {
    let path = folder.join(name);
    std::fs::File::create(&path).unwrap().set_len(len).unwrap();
    path
}

fn path_store(path: &Path) -> Store {
    Store::path(path, StoreOptions::default(), &OpenHere).unwrap()
}

#[derive(Debug, Clone)]
enum Step1 {
    Write { offset: u64, len: usize, durable: bool },
    Read { offset: u64, len: usize },
    Zero { offset: u64, len: u64, keep_space: bool },
    Flush,
}

fn steps(size: u64) -> impl Strategy<Value = Vec<Step1>> {
    let range = (0..size, prop_oneof![1..5000u64, 1..600_000u64])
        .prop_map(move |(offset, len)| (offset, len.min(size - offset)));
    let step = prop_oneof![
        3 => (range.clone(), any::<bool>()).prop_map(|((offset, len), durable)| Step1::Write { offset, len: len as usize, durable }),
        3 => range.clone().prop_map(|(offset, len)| Step1::Read { offset, len: len as usize }),
        1 => (range, any::<bool>()).prop_map(|((offset, len), keep_space)| Step1::Zero { offset, len, keep_space }),
        1 => Just(Step1::Flush),
    ];
    prop::collection::vec(step, 1..25)
}

fn against_model(rig: &mut Rig, size: u64, steps: &[Step1]) {
    let mut model = vec![0u8; size as usize];
    for (n, step) in steps.iter().enumerate() {
        match *step {
            Step1::Write { offset, len, durable } => {
                let bytes: Vec<u8> = (0..len).map(|i| (i * 31 + n * 7 + 1) as u8).collect();
                if len <= 16384 {
                    rig.write_small(offset, &bytes, durable)
                } else {
                    rig.write(offset, &bytes, durable)
                }
                .unwrap();
                model[offset as usize..offset as usize + len].copy_from_slice(&bytes);
            }
            Step1::Read { offset, len } => {
                let want = &model[offset as usize..offset as usize + len];
                assert!(rig.read(offset, len).unwrap() == want, "step {n}: {step:?}");
            }
            Step1::Zero { offset, len, keep_space } => {
                rig.zero(ByteRange::new(offset, len), ZeroFlags { keep_space, ..ZeroFlags::default() }).unwrap();
                model[offset as usize..(offset + len) as usize].fill(0);
            }
            Step1::Flush => rig.flush().unwrap(),
        }
    }
    assert!(rig.read(0, size as usize).unwrap() == model);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn files_keep_what_is_written(steps in steps(1_500_000)) {
        for folder in folders() {
            for io in BACKENDS {
                let store = path_store(&file(folder.path(), "f", 1_500_000));
                against_model(&mut Rig::new(io, store, VolumeOptions::default()), 1_500_000, &steps);
            }
        }
    }

    #[test]
    fn stripes_keep_what_is_written(steps in steps(3 << 19)) {
        for folder in folders() {
            for io in BACKENDS {
                let paths: Vec<_> = (0..3).map(|i| file(folder.path(), &i.to_string(), 1 << 19)).collect();
                let store = Store::stripe(&paths, 64 << 10, StoreOptions::default(), &OpenHere).unwrap();
                against_model(&mut Rig::new(io, store, VolumeOptions::default()), 3 << 19, &steps);
            }
        }
    }
}

#[test]
fn memory_reads_as_zeroes_and_stays_sparse() {
    for io in BACKENDS {
        let size = 1 << 40;
        let mut rig = Rig::new(io, Store::memory("m", size).unwrap(), VolumeOptions::default());
        assert!(rig.read(size - 5000, 5000).unwrap().iter().all(|byte| *byte == 0));
        rig.write_small(size / 2, b"here", false).unwrap();
        assert_eq!(rig.read(size / 2, 4).unwrap(), b"here");
        let extents = rig.extents(ByteRange::new(0, size));
        let data: u64 = extents.iter().filter(|extent| !extent.hole).map(|extent| extent.len).sum();
        assert_eq!(data, 4096, "{extents:?}");
        assert_eq!(extents.iter().map(|extent| extent.len).sum::<u64>(), size);
        rig.zero(ByteRange::new(size / 2, 4096), ZeroFlags::default()).unwrap();
        assert_eq!(rig.extents(ByteRange::new(0, size)), [byway_reactor::Extent { len: size, hole: true }]);
        assert_eq!(rig.read(size / 2, 4).unwrap(), [0; 4]);
    }
}

#[test]
fn requests_for_no_bytes_end_at_once() {
    for folder in folders() {
        for io in BACKENDS {
            let path = file(folder.path(), "f", 1 << 20);
            let paths: Vec<_> = (0..2).map(|i| file(folder.path(), &i.to_string(), 1 << 19)).collect();
            let stripe = Store::stripe(&paths, 64 << 10, StoreOptions::default(), &OpenHere).unwrap();
            for store in [path_store(&path), stripe, Store::memory("m", 1 << 20).unwrap(), Store::null(1 << 20)] {
                let mut rig = Rig::new(io, store, VolumeOptions::default());
                let Rig { reactor, engine, volume } = &mut rig;
                let id = *volume;
                for offset in [0, 4096, 1 << 20] {
                    for private in [false, true] {
                        let flags = ReadFlags { private, sliced: true, ..ReadFlags::default() };
                        let step = engine.read(reactor, id, ByteRange::new(offset, 0), flags, Tag(7));
                        assert!(matches!(&step, Ok(Step::Now(payload)) if payload.is_empty()), "{step:?}");
                    }
                    let frame = reactor.frames().alloc(4096).unwrap();
                    for durable in [false, true] {
                        let flags = WriteFlags { durable };
                        let zero = ZeroFlags { durable, ..ZeroFlags::default() };
                        assert!(matches!(
                            engine.write_small(reactor, id, offset, &[], flags, Tag(7)),
                            Ok(Step::Now(()))
                        ));
                        assert!(matches!(
                            engine.trim(reactor, id, ByteRange::new(offset, 0), durable, Tag(7)),
                            Ok(Step::Now(()))
                        ));
                        assert!(matches!(
                            engine.zero(reactor, id, ByteRange::new(offset, 0), zero, Tag(7)),
                            Ok(Step::Now(()))
                        ));
                    }
                    let flags = WriteFlags { durable: true };
                    let step = engine.write(reactor, id, offset, FrameRange::new(frame, 0, 0), flags, Tag(7));
                    assert_eq!(step, Ok(Begun::Now));
                    assert!(matches!(
                        engine.prefetch(reactor, id, ByteRange::new(offset, 0), Tag(7)),
                        Ok(Step::Now(()))
                    ));
                    let extents = engine.extents(reactor, id, ByteRange::new(offset, 0), 100, Tag(7));
                    assert!(matches!(&extents, Ok(Step::Now(none)) if none.is_empty()), "{extents:?}");
                }
                let past = engine.read(reactor, id, ByteRange::new((1 << 20) + 1, 0), ReadFlags::default(), Tag(7));
                assert!(matches!(past, Err(BlockError::OutOfRange)), "{past:?}");
                assert_eq!(engine.in_flight(), 0);
            }
        }
    }
}

/// Takes frames until only pieces of two pages are free, but for `pieces` of them.
fn cut_up(reactor: &Reactor, pieces: usize) -> Vec<Frame> {
    let mut pages: Vec<Frame> = std::iter::from_fn(|| reactor.frames().alloc(4096)).collect();
    pages.sort_by_key(byway_reactor::Frame::as_ptr);
    let mut at = 0;
    let is_taken = |at: usize| at % 4 < 2 || at / 4 >= pieces;
    pages.retain(|_| (is_taken(at), at += 1).0);
    pages
}

#[test]
fn a_large_read_in_a_pool_that_is_cut_up_is_done_in_smaller_pieces_while_others_are_under_way() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("f");
    for io in BACKENDS {
        let bytes = patterned(&path, 1 << 20);
        let slow = FaultRule {
            operation: FaultOperation::Flush,
            effect: FaultEffect::Delay(Duration::from_mins(10)),
            range: None,
            count_max: None,
        };
        let options = VolumeOptions { faults: FaultRules(vec![slow]), ..VolumeOptions::default() };
        let mut rig = Rig::new(io, path_store(&path), options);
        let flags = ReadFlags { private: true, ..ReadFlags::default() };
        let read =
            |rig: &mut Rig| rig.engine.read(&mut rig.reactor, rig.volume, ByteRange::new(0, 256 << 10), flags, Tag(7));
        assert!(matches!(rig.engine.flush(&mut rig.reactor, rig.volume, Tag(7)), Ok(Step::Later)));
        // Little is free: what is under way will bring more.
        let taken = cut_up(&rig.reactor, 100);
        assert!(rig.reactor.frames().free_bytes() > 512 << 10);
        assert!(matches!(read(&mut rig), Ok(Step::Busy)), "short");
        drop(taken);
        // Much is, and it will not get any less cut up.
        let taken = cut_up(&rig.reactor, usize::MAX);
        assert!(matches!(read(&mut rig), Ok(Step::Later)), "cut up");
        let Outcome::Read(Ok(payload)) = rig.wait() else { panic!("it fails") };
        drop(taken);
        assert!(rig.bytes_of(payload) == bytes[..256 << 10]);
    }
}

#[test]
fn what_is_read_lies_in_the_staging_pool_and_waits_when_it_is_full() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("staged");
    let pattern = patterned(&path, 2 << 20);
    for io in BACKENDS {
        let mut rig = Rig::new(io, path_store(&path), VolumeOptions::default());
        let pool = FramePool::new(1 << 20).unwrap();
        rig.engine.stage_in(pool.clone());
        assert_eq!(
            (rig.engine.read_bytes_max(&rig.reactor), rig.engine.pulled_bytes_max(&rig.reactor)),
            (1 << 20, 1 << 20)
        );
        let (flags, free) = (ReadFlags { private: true, ..ReadFlags::default() }, rig.reactor.frames().free_bytes());
        let read = |rig: &mut Rig, offset| {
            rig.engine.read(&mut rig.reactor, rig.volume, ByteRange::new(offset, 1 << 20), flags, Tag(7))
        };
        assert!(matches!(read(&mut rig, 1 << 20), Ok(Step::Later)));
        assert_eq!(
            (pool.free_bytes(), rig.reactor.frames().free_bytes()),
            (0, free),
            "of the pool, and not of the loop"
        );
        assert!(matches!(read(&mut rig, 0), Ok(Step::Busy)));
        let Outcome::Read(Ok(payload)) = rig.wait() else { panic!("it was read") };
        assert!(matches!(read(&mut rig, 0), Ok(Step::Busy)), "it is full until what was read is sent");
        assert!(rig.bytes_of(payload) == pattern[1 << 20..]);
        assert!(matches!(read(&mut rig, 0), Ok(Step::Later)));
        rig.wait();
    }
}

#[test]
fn null_forgets() {
    let mut rig = Rig::new(IoChoice::Auto, Store::null(1 << 30), VolumeOptions::default());
    rig.write_small(0, b"gone", true).unwrap();
    assert_eq!(rig.read(0, 4).unwrap(), [0; 4]);
    rig.flush().unwrap();
}

#[test]
fn direct_files_take_whole_blocks_and_see_what_others_write() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = file(folder.path(), "direct", 1 << 20);
    for io in BACKENDS {
        let store = Store::path(&path, StoreOptions { direct: true, ..StoreOptions::default() }, &OpenHere).unwrap();
        let block = u64::from(store.block_bytes());
        let mut rig = Rig::new(io, store, VolumeOptions::default());
        assert_eq!(rig.read(1, 511), Err(BlockError::Misaligned));
        assert_eq!(rig.write_small(block, b"x", false), Err(BlockError::Misaligned));
        let local = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        local.write_all_at(&[7; 4096], 4096).unwrap();
        assert_eq!(rig.read(4096, 4096).unwrap(), [7; 4096], "a direct read sees dirty pages");
        rig.write(4096, &[8; 8192], false).unwrap();
        let mut seen = [0; 8192];
        local.read_exact_at(&mut seen, 4096).unwrap();
        assert_eq!(seen, [8; 8192], "a direct write invalidates cached pages");
        assert!(rig.reactor.counters().read_direct_bytes > 0 && rig.reactor.counters().written_direct_bytes > 0);
    }
}

#[test]
fn requests_outside_are_refused() {
    let mut rig = Rig::new(IoChoice::Auto, Store::memory("m", 10_000).unwrap(), VolumeOptions::default());
    assert_eq!(rig.read(9_999, 2), Err(BlockError::OutOfRange));
    assert_eq!(rig.read(u64::MAX, 1), Err(BlockError::OutOfRange));
    assert_eq!(rig.write_small(9_999, b"xy", false), Err(BlockError::PastEnd));
    let read_only = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    let mut rig = Rig::new(IoChoice::Auto, Store::memory("m", 10_000).unwrap(), read_only);
    assert_eq!(rig.write_small(0, b"x", false), Err(BlockError::ReadOnly));
    assert_eq!(rig.zero(ByteRange::new(0, 1), ZeroFlags::default()), Err(BlockError::ReadOnly));
    assert_eq!(rig.read(0, 1), Ok(vec![0]));
}

#[test]
fn a_truncated_file_is_an_error_and_not_zeroes() {
    for folder in folders() {
        for io in BACKENDS {
            let path = file(folder.path(), "short", 1 << 20);
            let mut rig = Rig::new(io, path_store(&path), VolumeOptions::default());
            std::fs::File::options().write(true).open(&path).unwrap().set_len(4096).unwrap();
            assert_eq!(rig.read(0, 4096).unwrap(), [0; 4096]);
            assert!(matches!(rig.read(8192, 4096), Err(BlockError::Io(_))), "on {}", folder.path().display());
            // Who copies skips holes as zeroes: what is gone must not be told as one.
            for start in [0, 8192] {
                let extents = rig.extents(ByteRange::new(start, (1 << 20) - start));
                let past = extents.last().unwrap();
                assert!(!past.hole && past.len >= (1 << 20) - 8192, "{extents:?}");
            }
        }
    }
}

/// Each byte of the range that the slices cover, once.
fn joined(slices: &Told, len: usize) -> Vec<Option<u8>> {
    let mut bytes = vec![None; len];
    for (start, slice) in slices {
        for (byte, into) in slice.iter().zip(&mut bytes[*start as usize..]) {
            assert!(into.replace(*byte).is_none(), "a byte was told twice");
        }
    }
    bytes
}

fn patterned(path: &Path, len: usize) -> Vec<u8> {
    let bytes: Vec<u8> = (0..len as u32 / 4).flat_map(|word| word.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    std::fs::write(path, &bytes).unwrap();
    bytes
}

#[test]
fn a_read_that_waits_for_its_store_is_told_in_slices() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("sliced");
    let bytes = patterned(&path, 2 << 20);
    for io in BACKENDS {
        for slice_bytes in [16 << 10, 256 << 10] {
            let options = StoreOptions { direct: true, ..StoreOptions::default() };
            let mut rig = Rig::new(io, Store::path(&path, options, &OpenHere).unwrap(), VolumeOptions::default());
            rig.engine.slice_at(slice_bytes);
            let (slices, ended) = rig.read_sliced(4096, 1 << 20);
            assert_eq!(ended, Ok(()));
            assert_eq!(slices.len() as u64, (1 << 20) / slice_bytes);
            let seen: Option<Vec<u8>> = joined(&slices, 1 << 20).into_iter().collect();
            assert!(seen.expect("all of it") == bytes[4096..4096 + (1 << 20)]);
            assert_eq!(rig.engine.counters(rig.volume).reads, 1);
        }
    }
}

#[test]
fn slices_of_a_stripe_have_the_bytes_of_all_its_files() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let paths: Vec<PathBuf> = (0..3).map(|at| folder.path().join(format!("stripe-{at}"))).collect();
    let (chunk, len) = (8 << 10, 3 << 18);
    let parts: Vec<Vec<u8>> = paths.iter().map(|path| patterned(path, len / 3)).collect();
    let whole: Vec<u8> = (0..len / chunk).flat_map(|at| parts[at % 3][at / 3 * chunk..][..chunk].to_vec()).collect();
    let options = StoreOptions { direct: true, ..StoreOptions::default() };
    let store = Store::stripe(&paths, chunk as u64, options, &OpenHere).unwrap();
    let mut rig = Rig::new(IoChoice::Auto, store, VolumeOptions::default());
    rig.engine.slice_at(64 << 10);
    let (slices, ended) = rig.read_sliced(0, len);
    assert_eq!(ended, Ok(()));
    assert_eq!(slices.len(), len / (64 << 10), "a slice is longer than a chunk");
    let seen: Option<Vec<u8>> = joined(&slices, len).into_iter().collect();
    assert!(seen.expect("all of it") == whole);
}

#[test]
fn a_sliced_read_that_fails_in_the_middle_tells_the_good_slices_and_the_error_last() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("short");
    for io in BACKENDS {
        let bytes = patterned(&path, 1 << 20);
        let options = StoreOptions { direct: true, ..StoreOptions::default() };
        let mut rig = Rig::new(io, Store::path(&path, options, &OpenHere).unwrap(), VolumeOptions::default());
        rig.engine.slice_at(64 << 10);
        std::fs::File::options().write(true).open(&path).unwrap().set_len(300 << 10).unwrap();
        let (slices, ended) = rig.read_sliced(0, 1 << 20);
        assert!(matches!(ended, Err(BlockError::Io(_))), "{ended:?}");
        assert_eq!(slices.len(), 4, "those before the end of the file");
        for (at, byte) in joined(&slices, 1 << 20).into_iter().enumerate() {
            assert_eq!(byte, (at < 256 << 10).then(|| bytes[at]), "at {at}");
        }
        assert_eq!(rig.engine.counters(rig.volume).errors, 1);
    }
}

#[test]
fn what_cannot_be_served_is_refused_with_the_reason() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let options = StoreOptions::default();
    let missing = Store::path(&folder.path().join("missing"), options, &OpenHere).unwrap_err();
    assert!(missing.to_string().contains("create it first"), "{missing}");
    let empty = Store::path(&file(folder.path(), "empty", 0), options, &OpenHere).unwrap_err();
    assert!(matches!(empty, OpenError::Empty { .. }));
    let directory = Store::path(folder.path(), StoreOptions { read_only: true, ..options }, &OpenHere).unwrap_err();
    assert!(directory.to_string().contains("regular file"), "{directory}");
    let path = file(folder.path(), "twice", 4096);
    let first = path_store(&path);
    let second = Store::path(&path, options, &OpenHere).unwrap_err();
    assert!(second.to_string().contains("in use"), "{second}");
    assert!(Store::path(&path, StoreOptions { shared: true, ..options }, &OpenHere).is_ok());
    assert!(Store::path(&path, StoreOptions { read_only: true, ..options }, &OpenHere).is_ok());
    drop(first);
    assert!(Store::path(&path, options, &OpenHere).is_ok(), "the lock goes with the store");
}
