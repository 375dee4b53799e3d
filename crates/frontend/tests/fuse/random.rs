//! Random operations on one file through a mount, against a model in memory.

use std::fs::File;
use std::os::unix::fs::FileExt;

use byway_frontend::fuse::abi::open;
use rustix::fs::FallocateFlags;

use crate::rig::Mount;

const BYTES_MAX: u64 = 3 << 20;
const OPERATIONS: usize = 2000;

/// xorshift: the seed says all.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// The file as it should be.
struct Model(Vec<u8>);

impl Model {
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.0.resize(self.0.len().max(offset + bytes.len()), 0);
        self.0[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    fn range(&self, offset: usize, len: usize) -> &[u8] {
        let end = (offset + len).min(self.0.len());
        &self.0[offset.min(end)..end]
    }
}

fn read(file: &File, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut filled = 0;
    while filled < len {
        match file.read_at(&mut bytes[filled..], offset + filled as u64).unwrap() {
            0 => break,
            read => filled += read,
        }
    }
    bytes.truncate(filled);
    bytes
}

fn step(random: &mut Random, file: &File, model: &mut Model, value: u8) {
    let (offset, len) = (random.below(BYTES_MAX), 1 + random.below(300 << 10));
    let (at, bytes) = (offset as usize, len as usize);
    match random.below(10) {
        0..=3 => {
            let data: Vec<u8> = (0..bytes).map(|index| value ^ (index / 512) as u8).collect();
            file.write_all_at(&data, offset).unwrap();
            model.write(at, &data);
        }
        4..=6 => assert!(read(file, offset, bytes) == model.range(at, bytes), "{bytes} bytes at {at}"),
        7 => {
            file.set_len(offset).unwrap();
            model.0.resize(at, 0);
        }
        8 => {
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(file, punch, offset, len).unwrap();
            let end = (at + bytes).min(model.0.len());
            model.0[at.min(end)..end].fill(0);
        }
        _ => {
            rustix::fs::fallocate(file, FallocateFlags::empty(), offset, len).unwrap();
            model.0.resize(model.0.len().max(at + bytes), 0);
        }
    }
    assert_eq!(file.metadata().unwrap().len(), model.0.len() as u64);
}

fn random_operations(open_flags: u32, seed: u64) {
    let Some(mount) = Mount::passthrough(open_flags) else { return };
    let path = mount.path().join("file");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    let (mut random, mut model) = (Random(seed), Model(Vec::new()));
    for number in 0..OPERATIONS {
        let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            step(&mut random, &file, &mut model, number as u8);
        }));
        assert!(told.is_ok(), "operation {number} of seed {seed}");
    }
    file.sync_all().unwrap();
    assert!(std::fs::read(mount.below().join("file")).unwrap() == model.0, "what lies below, of seed {seed}");
}

#[test]
fn a_file_behaves_through_the_page_cache() {
    random_operations(0, 0x5eed_0001);
}

#[test]
fn a_file_behaves_without_the_page_cache() {
    random_operations(open::DIRECT_IO, 0x5eed_0002);
}
