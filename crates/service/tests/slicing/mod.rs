//! How long the slices are that reads are sent in.

use super::*;

const LEN: usize = 1 << 20;

impl Rig {
    /// Reads [`LEN`] bytes; gives the bytes of the longest slice.
    fn longest_slice(&mut self) -> usize {
        let (slices, ended) = self.read_sliced(0, LEN);
        assert_eq!(ended, Ok(()));
        slices.iter().map(|(_, bytes)| bytes.len()).max().unwrap_or(0)
    }
}

#[test]
fn a_slice_is_as_long_as_an_operation_unless_another_length_is_set() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("cut");
    patterned(&path, LEN);
    for io in BACKENDS {
        let options = StoreOptions { direct: true, ..StoreOptions::default() };
        let mut rig = Rig::new(io, Store::path(&path, options, &OpenHere).unwrap(), VolumeOptions::default());
        assert_eq!(rig.longest_slice(), 256 << 10);
        rig.engine.slice_at(64 << 10);
        assert_eq!(rig.longest_slice(), 64 << 10);
    }
}
