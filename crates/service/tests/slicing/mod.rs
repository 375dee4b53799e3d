//! How long the slices are that reads are told in, and tried out to be.

use super::*;

const LEN: usize = 1 << 20;
/// Reads before another length is tried.
const PAUSE: usize = byway_service::limits::SLICE_PAUSE_MIN as usize;

impl Rig {
    /// Reads so many times at once; gives the bytes of the longest slice of each.
    fn longest_slices(&mut self, count: u64) -> Vec<usize> {
        let flags = ReadFlags { sliced: true, private: true, ..ReadFlags::default() };
        for tag in 0..count {
            let step = self.engine.read(&mut self.reactor, self.volume, (0, LEN), flags, Tag(tag));
            assert!(matches!(step, Ok(Step::Later)), "{step:?}");
        }
        let mut longest = vec![0; count as usize];
        let (mut done, mut completions) = (Vec::new(), Vec::new());
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.engine.in_flight() > 0 {
            assert!(Instant::now() < deadline, "the reads never ended");
            let until = self.reactor.now() + Duration::from_secs(1);
            self.reactor.reap(&mut completions, Wait::Until(until)).unwrap();
            for completion in completions.drain(..).filter(|completion| completion.token != Token::WAKE) {
                self.engine.complete(&mut self.reactor, completion, &mut done);
            }
        }
        for Done { tag, outcome } in done {
            let len = match outcome {
                Outcome::Slice(slice) => slice.payload.len(),
                Outcome::Read(result) => result.unwrap().len(),
                other => panic!("{other:?}"),
            };
            longest[tag.0 as usize] = longest[tag.0 as usize].max(len);
        }
        longest
    }
}

#[test]
fn another_length_is_tried_by_reads_that_are_alone_and_by_others_apart() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("tried");
    patterned(&path, LEN);
    for io in BACKENDS {
        let mut rig = Rig::with_frames(io, (path_store(&path), VolumeOptions::default()), 64 << 20);
        for at in 0..PAUSE {
            assert_eq!(rig.longest_slices(1), [256 << 10], "read {at}");
        }
        // Now it is compared with half as much, in turns.
        for expected in [256 << 10, 128 << 10, 128 << 10, 256 << 10] {
            assert_eq!(rig.longest_slices(1), [expected]);
        }
        // The first of many is alone.
        let many = rig.longest_slices(16);
        assert_eq!((many[0], &many[1..]), (128 << 10, &[256 << 10; 15][..]));
        // Those that are not try by themselves, after a pause of their own.
        for _ in 0..PAUSE / 15 {
            assert_eq!(rig.longest_slices(16)[1..], [256 << 10; 15]);
        }
        assert_eq!(rig.longest_slices(16)[1..5], [256 << 10, 128 << 10, 128 << 10, 256 << 10]);
    }
}

#[test]
fn a_length_that_was_said_is_kept_to() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("said");
    patterned(&path, LEN);
    let mut rig = Rig::new(IoChoice::Auto, path_store(&path), VolumeOptions::default());
    rig.engine.slice_at(64 << 10);
    for _ in 0..2 * PAUSE {
        assert_eq!(rig.longest_slices(1), [64 << 10]);
    }
}
