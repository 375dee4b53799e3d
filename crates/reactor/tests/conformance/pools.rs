//! Frames of pools that are not the loop's own: memory like any other, whatever the loop has registered of its own.

use byway_reactor::{FileOptions, Frame, FramePool, Gather, Op, Outcome, Scatter};

use crate::rig::{Rig, pattern};

/// Long enough for a send to be tried without a copy.
const LEN: usize = 200_000;

pub fn frames_of_any_pool_are_sent_received_read_and_written(rig: &mut Rig) {
    let (ours, theirs) = rig.connect();
    for pool in [FramePool::new(4 << 20).unwrap(), FramePool::shared(4 << 20).unwrap()] {
        for direct in [false, true] {
            let file = rig.open(&format!("file-{direct}"), 1 << 20, FileOptions { direct, ..FileOptions::default() });
            let bytes = pattern(u64::from(direct) + 5, LEN.next_multiple_of(4096));
            let from = filled(&pool, &bytes);
            let written = rig.run(0, Op::Write { file, offset: 8192, from, start: 0, len: bytes.len(), durable: true });
            assert!(matches!(written, Outcome::Written { result: Ok(n), .. } if n == bytes.len()), "{written:?}");
            drop(written);
            let into = pool.alloc(bytes.len() + 4096).unwrap();
            let read = rig.run(0, Op::Read { file, offset: 8192, into, start: 4096, len: bytes.len() });
            let Outcome::Read { into, result } = read else { panic!("{read:?}") };
            assert!(result == Ok(bytes.len()) && into.to_vec()[4096..] == bytes[..] && pool.owns(&into));
        }
        let bytes = pattern(9, LEN);
        let mut gather = Gather::new();
        gather.push_head(b"head");
        gather.push_frame(filled(&pool, &bytes), 0, LEN);
        let send = rig.submit(0, Op::Send { socket: ours, gather });
        let into = Scatter::one(pool.alloc(LEN + 4).unwrap(), 0, LEN + 4);
        let receive = rig.run(1, Op::Recv { socket: theirs, into, min: LEN + 4 });
        let Outcome::Received { mut into, result } = receive else { panic!("{receive:?}") };
        let frame = into.drain().next().unwrap().frame;
        assert!(
            result == Ok(LEN + 4)
                && frame.to_vec()[..4] == *b"head"
                && frame.to_vec()[4..] == bytes[..]
                && pool.owns(&frame)
        );
        drop(frame);
        assert_eq!(rig.sent(0, send), Ok(LEN + 4));
        rig.assert_all_back(&pool);
    }
    rig.assert_pools_full();
}

fn filled(pool: &FramePool, bytes: &[u8]) -> Frame {
    let mut frame = pool.alloc(bytes.len()).unwrap();
    frame.write(0, bytes);
    frame
}
