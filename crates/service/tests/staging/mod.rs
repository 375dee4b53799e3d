//! Staging in a device's memory. Here that is a file, which maps alike: what the engine puts where is what is looked at; the
//! guest's tests have a device.

use std::sync::Arc;

use byway_reactor::ByteRange;
use byway_reactor::device_memory::DeviceMemory;
use byway_service::block::spec::Stage;

use super::*;

const BYTES: usize = 1 << 20;

/// A file of which no part is like another.
fn disk(folder: &Path, name: &str, bytes: usize) -> (PathBuf, Vec<u8>) {
    let content: Vec<u8> =
        (0..bytes as u32 / 4).flat_map(|word| word.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    let path = folder.join(name);
    std::fs::write(&path, &content).unwrap();
    (path, content)
}

fn memory(bytes: u64) -> Arc<DeviceMemory> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(bytes).unwrap();
    Arc::new(DeviceMemory::from_descriptor("0000:00:03.0".to_owned(), file.into()))
}

fn staged(io: IoChoice, path: &Path, memory: &Arc<DeviceMemory>) -> Rig {
    let options = StoreOptions { direct: true, ..StoreOptions::default() };
    Rig::new(io, Store::path(path, options, &OpenHere).unwrap().staged_in(memory), VolumeOptions::default())
}

impl Rig {
    fn read_as(&mut self, flags: ReadFlags, (offset, len): (u64, usize)) -> Payload {
        let step = self
            .engine
            .read(&mut self.reactor, self.volume, ByteRange::new(offset, len as u64), flags, Tag(7))
            .unwrap();
        assert!(matches!(step, Step::Later));
        match self.wait() {
            Outcome::Read(Ok(payload)) => payload,
            other => panic!("{other:?}"),
        }
    }
}

const DEVICE: ReadFlags = ReadFlags { private: false, sliced: false, device: true, part: false };

#[test]
fn reads_for_the_kernel_alone_are_staged_in_the_device() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, content) = disk(folder.path(), "disk", BYTES);
    for io in BACKENDS {
        let memory = memory(16 << 20);
        let mut rig = staged(io, &path, &memory);
        let payload = rig.read_as(DEVICE, (4096, 300_000 / 4096 * 4096));
        let len = payload.len();
        assert!(rig.bytes_of(payload) == content[4096..][..len]);
        let counters = rig.reactor.counters();
        assert_eq!((counters.read_device_bytes, counters.sent_device_bytes), (len as u64, len as u64));
        // What is to be encrypted, summed or copied by us, and what nobody says the kernel alone reads, is not.
        for flags in [ReadFlags { private: true, ..DEVICE }, ReadFlags::default()] {
            let payload = rig.read_as(flags, (0, 8192));
            assert!(rig.bytes_of(payload) == content[..8192]);
        }
        let counters = rig.reactor.counters();
        assert_eq!((counters.read_device_bytes, counters.sent_device_bytes), (len as u64, len as u64));
        assert_eq!(counters.read_direct_bytes, len as u64 + 2 * 8192);
    }
}

#[test]
fn what_finds_no_room_in_the_device_goes_through_main_memory() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, content) = disk(folder.path(), "disk", 10 * BYTES);
    let memory = memory(64 << 20);
    let mut rig = staged(IoChoice::Auto, &path, &memory);
    // All of the pool but one frame of the least size.
    let pool_bytes = byway_service::limits::DEVICE_POOL_BYTES;
    let hold = |len| rig.engine.frame_for_write(&rig.reactor, rig.volume, 0, len, len).unwrap();
    let mut held: Vec<Frame> = (1..pool_bytes / BYTES).map(|_| hold(BYTES)).collect();
    held.extend((12..20).map(|shift| hold(1 << shift)));
    assert!(held.iter().all(Frame::is_device));
    let read = rig.read_as(DEVICE, (0, BYTES));
    assert_eq!(rig.reactor.counters().read_device_bytes, 0);
    assert!(rig.bytes_of(read) == content[..BYTES]);
    let small = rig.read_as(DEVICE, (4096, 4096));
    let next = rig.read_as(DEVICE, (8192, 4096));
    assert_eq!(rig.reactor.counters().read_device_bytes, 4096, "the last frame, once");
    assert!(rig.bytes_of(small) == content[4096..8192] && rig.bytes_of(next) == content[8192..12_288]);
    // What was sent is free again.
    let again = rig.read_as(DEVICE, (0, 4096));
    assert_eq!(rig.reactor.counters().read_device_bytes, 8192);
    drop(again);
}

#[test]
fn writes_from_plain_sockets_have_frames_of_the_device() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, _) = disk(folder.path(), "disk", BYTES);
    for io in BACKENDS {
        let mut rig = staged(io, &path, &memory(16 << 20));
        let mut frame = rig.engine.frame_for_write(&rig.reactor, rig.volume, 8192, 65_536, 4096).unwrap();
        assert!(frame.is_device());
        frame.fill(0x5a);
        let flags = WriteFlags::default();
        let step =
            rig.engine.write(&mut rig.reactor, rig.volume, 8192, FrameRange::new(frame, 0, 65_536), flags, Tag(7));
        rig.unit(step.map(Step::from)).unwrap();
        assert!(std::fs::read(&path).unwrap()[8192..][..65_536].iter().all(|byte| *byte == 0x5a));
        assert_eq!(rig.reactor.counters().written_device_bytes, 65_536);
        // A volume that is not staged has ordinary ones, and small writes are copied into such by the engine.
        rig.write_small(0, &[1; 4096], false).unwrap();
        assert_eq!(rig.reactor.counters().written_device_bytes, 65_536);
        let options = StoreOptions { direct: true, shared: true, ..StoreOptions::default() };
        let plain = Rig::new(io, Store::path(&path, options, &OpenHere).unwrap(), VolumeOptions::default());
        let frame = plain.engine.frame_for_write(&plain.reactor, plain.volume, 0, 65_536, 4096).unwrap();
        assert!(!frame.is_device());
    }
}

#[test]
fn volumes_on_one_device_share_a_pool_and_the_last_gives_it_back() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let paths = ["one", "two"].map(|name| disk(folder.path(), name, BYTES).0);
    let memory = memory(64 << 20);
    let mut rig = staged(IoChoice::Auto, &paths[0], &memory);
    let options = StoreOptions { direct: true, ..StoreOptions::default() };
    let store = Store::path(&paths[1], options, &OpenHere).unwrap().staged_in(&memory);
    let second = Arc::new(Volume::new("second", store, VolumeOptions::default()));
    let second = rig.engine.attach(&mut rig.reactor, second);
    let pool = byway_service::limits::DEVICE_POOL_BYTES;
    let frames: Vec<Frame> = (0..pool / BYTES)
        .map(|_| rig.engine.frame_for_write(&rig.reactor, rig.volume, 0, BYTES, 4096).unwrap())
        .collect();
    assert!(frames.iter().all(Frame::is_device));
    let ordinary = rig.engine.frame_for_write(&rig.reactor, second, 0, 4096, 4096).unwrap();
    assert!(!ordinary.is_device(), "the first has all of it");
    drop(frames);
    rig.engine.detach(&mut rig.reactor, rig.volume);
    assert!(rig.engine.frame_for_write(&rig.reactor, second, 0, 4096, 4096).unwrap().is_device());
}

#[test]
fn a_store_whose_disk_has_no_memory_is_not_opened() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, _) = disk(folder.path(), "disk", BYTES);
    let staged = StoreOptions { direct: true, stage: Stage::Device, ..StoreOptions::default() };
    // A machine whose disks have some memory of their own opens it.
    if let Err(error) = Store::path(&path, staged, &OpenHere) {
        assert!(matches!(error, OpenError::DeviceMemory(_)), "{error}");
        assert!(error.to_string().contains("stage=memory"), "{error}");
    }
    let cached = StoreOptions { direct: false, ..staged };
    assert!(Store::path(&path, cached, &OpenHere).is_ok(), "cached stores have no stage");
}
