//! Files, and sending from their mappings.

use std::sync::Arc;

use byway_reactor::{Allocate, Errno, Extent, File, FileOptions, Gather, Op, OpenFile, Outcome};

use crate::rig::{Rig, pattern};

const LEN: u64 = 1 << 20;
const MAPPED: FileOptions = FileOptions { read_only: false, direct: false, map: true, write_by_worker: false };

pub fn what_was_written_is_read(rig: &mut Rig) {
    let file = rig.open("file", LEN, FileOptions::default());
    let bytes = pattern(1, 100_000);
    assert_eq!(rig.write(file, 5000, &bytes, false), Ok(100_000));
    assert_eq!(rig.write(file, 200_000, b"durable", true), Ok(7));
    assert!(matches!(rig.run(0, Op::Sync { file }), Outcome::Synced(Ok(()))));
    assert!(matches!(rig.run(0, Op::Prefetch { file, offset: 0, len: LEN }), Outcome::Prefetched(Ok(()))));
    assert!(rig.read(file, 5000, 100_000).unwrap() == bytes);
    assert_eq!(rig.read(file, 199_999, 9).unwrap(), b"\0durable\0");
    assert_eq!(rig.read(file, LEN - 10, 100).unwrap(), [0; 10], "short at the end");
    assert_eq!(rig.read(file, LEN + 10, 100).unwrap(), []);
    // Part of a frame, and many at once.
    let frame = rig.frame(0, &pattern(2, 9000));
    let written = rig.run(0, Op::Write { file, offset: 3, from: frame, start: 1000, len: 500, durable: false });
    assert!(matches!(written, Outcome::Written { result: Ok(500), .. }));
    drop(written);
    assert_eq!(rig.read(file, 3, 500).unwrap(), pattern(2, 9000)[1000..1500]);
    let writes: Vec<_> = (0..100u8)
        .map(|i| {
            let from = rig.frame(0, &[i; 4096]);
            rig.submit(0, Op::Write { file, offset: u64::from(i) * 4096, from, start: 0, len: 4096, durable: i == 7 })
        })
        .collect();
    for write in writes {
        assert!(matches!(rig.wait(0, write), Outcome::Written { result: Ok(4096), .. }));
    }
    assert!((0..100u8).all(|i| rig.read(file, u64::from(i) * 4096, 4096).unwrap() == [i; 4096]));
    match rig.loops[0].try_write(file, 0, b"at once") {
        Ok(()) => assert_eq!(rig.read(file, 0, 7).unwrap(), b"at once"),
        Err(error) => assert_eq!(error, Errno::AGAIN),
    }
    rig.assert_pools_full();
}

/// Whether this process has a thread for file calls.
fn has_worker() -> bool {
    let names = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    names
        .into_iter()
        .any(|task| std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name == "byway-file\n"))
}

pub fn a_worker_writes_to_a_file_in_memory(rig: &mut Rig) {
    if !rig.is_real() {
        return;
    }
    let unnamed = tempfile::tempfile_in("/dev/shm").expect("a file in memory");
    unnamed.set_len(LEN).unwrap();
    let options = FileOptions { write_by_worker: true, ..FileOptions::default() };
    let file = rig.loops[0].add_file(Arc::new(OpenFile::from_fd(unnamed.into(), options).unwrap()));
    let writes: Vec<_> = (0..16u8)
        .map(|i| {
            let from = rig.frame(0, &[i; 64 << 10]);
            rig.submit(0, Op::Write { file, offset: u64::from(i) << 16, from, start: 0, len: 64 << 10, durable: false })
        })
        .collect();
    for write in writes {
        assert!(matches!(rig.wait(0, write), Outcome::Written { result: Ok(65_536), .. }));
    }
    assert!(has_worker());
    assert!((0..16u8).all(|i| rig.read(file, u64::from(i) << 16, 64 << 10).unwrap() == [i; 64 << 10]));
    // An error is the write's, and the loop can be dropped with writes in flight.
    let from = rig.frame(0, &[1; 4096]);
    let beyond = Op::Write { file, offset: u64::MAX >> 1, from, start: 0, len: 4096, durable: false };
    assert!(matches!(rig.run(0, beyond), Outcome::Written { result: Err(_), .. }));
    let from = rig.frame(0, &vec![9; 1 << 20]);
    rig.submit(0, Op::Write { file, offset: 0, from, start: 0, len: 1 << 20, durable: false });
}

fn extents(rig: &mut Rig, file: File, offset: u64, len: u64, count_max: usize) -> Vec<Extent> {
    match rig.run(0, Op::Extents { file, offset, len, count_max }) {
        Outcome::Extents(Ok(found)) => found,
        other => panic!("{other:?}"),
    }
}

pub fn ranges_become_holes_and_zeroes(rig: &mut Rig) {
    let file = rig.open("sparse", LEN, FileOptions::default());
    rig.write(file, 128 << 10, &vec![1; 256 << 10], false).unwrap();
    // An answer may cover less than was asked, never nothing.
    let (mut found, mut covered) = (Vec::new(), 0);
    while covered < LEN {
        let more = extents(rig, file, covered, LEN - covered, 100);
        assert!(!more.is_empty() && more.iter().all(|extent| extent.len > 0), "{more:?}");
        covered += more.iter().map(|extent| extent.len).sum::<u64>();
        found.extend(more);
    }
    assert_eq!(covered, LEN, "more than was asked: {found:?}");
    let mut at = 0;
    for extent in &found {
        let is_data = at < 384 << 10 && at + extent.len > 128 << 10;
        assert!(!(extent.hole && is_data), "data in a hole at {at}: {found:?}");
        at += extent.len;
    }
    assert_eq!(extents(rig, file, 0, LEN, 1).len(), 1);
    let allocate = |rig: &mut Rig, mode, offset, len| match rig.run(0, Op::Allocate { file, mode, offset, len }) {
        Outcome::Allocated(result) => result,
        other => panic!("{other:?}"),
    };
    // Not every file system can do all of this; what is done is done right.
    let ranges =
        [(Allocate::PunchHole, 128u64 << 10), (Allocate::ZeroRange, 200 << 10), (Allocate::Discard, 300 << 10)];
    for (mode, offset) in ranges {
        match allocate(rig, mode, offset, 10_000) {
            Ok(()) if mode == Allocate::Discard => {}
            Ok(()) => {
                assert_eq!(rig.read(file, offset, 10_000).unwrap(), [0; 10_000], "{mode:?}");
                assert_eq!(rig.read(file, offset + 10_000, 10).unwrap(), [1; 10], "{mode:?} did too much");
            }
            Err(error) => assert_eq!(error, Errno::OPNOTSUPP, "{mode:?}"),
        }
    }
    assert!(allocate(rig, Allocate::PunchHole, 0, 0).is_err(), "a range has bytes");
}

pub fn what_lies_past_the_end_of_a_file_is_no_hole(rig: &mut Rig) {
    let hole_at = |rig: &mut Rig, file, offset| {
        let found = extents(rig, file, offset, 4096, 100);
        assert!(!found.is_empty());
        found[0].hole
    };
    let file = rig.open("short", LEN, FileOptions::default());
    assert!(!hole_at(rig, file, LEN), "nothing reads as zeroes there");
    assert!(!hole_at(rig, file, LEN + 9000));
    if !rig.is_real() {
        return;
    }
    // What is left of it is data and a hole, and the hole ends where the file does.
    rig.write(file, 0, &[1; 65536], false).unwrap();
    let cut = std::fs::File::options().write(true).open(rig.path("short")).unwrap();
    cut.set_len(256 << 10).unwrap();
    let found = extents(rig, file, 0, LEN, 100);
    assert_eq!(found.iter().map(|extent| extent.len).sum::<u64>(), LEN);
    let past = found.last().unwrap();
    assert!(!past.hole && past.len >= LEN - (256 << 10), "{found:?}");
    assert!(!hole_at(rig, file, 256 << 10));
    cut.set_len(32 << 10).unwrap();
    assert_eq!(extents(rig, file, 0, LEN, 100), [Extent { len: LEN, hole: false }], "neighbours are one");
}

pub fn a_removed_file_lives_as_long_as_a_send_of_it(rig: &mut Rig) {
    let len = 8 << 20;
    let file = rig.open("sent", len as u64, MAPPED);
    let bytes = pattern(5, len);
    for (place, part) in bytes.chunks(1 << 20).enumerate() {
        rig.write(file, (place << 20) as u64, part, false).unwrap();
    }
    let (client, server) = rig.connect();
    let mut gather = Gather::new();
    // Short ranges are sent from the mapping, long ones may be spliced.
    for part in 0..20 {
        gather.push_map(file, part * 100_000, 100_000);
    }
    gather.push_map(file, 2_000_000, len - 2_000_000);
    let send = rig.submit(0, Op::Send { socket: client, gather });
    rig.loops[0].remove_file(file);
    rig.settle();
    assert!(rig.taken(0, send).is_none(), "8 MiB fit into no socket");
    let mut got = Vec::new();
    while got.len() < len {
        got.extend(rig.receive(1, server, 1 << 20, 1).unwrap());
    }
    assert!(got == bytes);
    assert_eq!(rig.sent(0, send), Ok(len));
    let mut gather = Gather::new();
    gather.push_map(file, 0, 1);
    let stale = rig.submit(0, Op::Send { socket: client, gather });
    assert_eq!(rig.sent(0, stale), Err(Errno::BADF));
}

pub fn a_range_outside_of_a_mapping_answers_efault(rig: &mut Rig) {
    let mapped = rig.open("mapped", LEN, MAPPED);
    let unmapped = rig.open("unmapped", LEN, FileOptions::default());
    let (client, server) = rig.connect();
    for (file, offset, len) in [(mapped, LEN - 1, 2), (mapped, LEN, 1), (mapped, u64::MAX, 2), (unmapped, 0, 1)] {
        let mut gather = Gather::new();
        gather.push_head(b"head");
        gather.push_map(file, offset, len);
        let send = rig.submit(0, Op::Send { socket: client, gather });
        assert_eq!(rig.sent(0, send), Err(Errno::FAULT), "{len} bytes at {offset}");
    }
    rig.send(0, client, b"nothing of these went").unwrap();
    assert_eq!(rig.receive(1, server, 21, 21).unwrap(), b"nothing of these went");
}

pub fn a_truncated_file_fails_the_send_and_not_the_loop(rig: &mut Rig) {
    if !rig.is_real() {
        return; // A simulated file keeps its length.
    }
    // One that is sent from the mapping, and one that is spliced where that is done.
    for len in [100_000, LEN as usize] {
        let file = rig.open("truncated", LEN, MAPPED);
        let (client, server) = rig.connect();
        let path = rig.path("truncated");
        std::fs::File::options().write(true).open(path).and_then(|file| file.set_len(4096)).expect("it is truncated");
        let mut gather = Gather::new();
        gather.push_map(file, 0, len);
        let send = rig.submit(0, Op::Send { socket: client, gather });
        assert!(rig.sent(0, send).is_err(), "{len} bytes of 4,096");
        rig.loops[0].close(client);
        let got = rig.receive(1, server, 1 << 20, 1 << 20).map_or(0, |got| got.len());
        assert!(got <= 4096, "{got} bytes of 4,096");
        let (client, server) = rig.connect();
        rig.send(0, client, b"the loop lives").unwrap();
        assert_eq!(rig.receive(1, server, 14, 14).unwrap(), b"the loop lives");
    }
}
