//! Files: their answers, and their contents after a crash.

use super::*;
use crate::Allocate;
use crate::sim::{Crash, FileFault, FileOp};

const SECTOR: usize = 512;
const LEN: u64 = 64 << 10;

/// A node with one file.
fn rig_with_file(seed: u64) -> (Rig, SimFile, File) {
    let mut rig = Rig::new(seed, 1);
    let (sim, file) = rig.open(0, "store", LEN, FileOptions::default());
    (rig, sim, file)
}

#[test]
fn files_answer_as_files_do() {
    let (mut rig, sim, file) = rig_with_file(1);
    assert_eq!(rig.write(0, file, 1000, b"hello", false), Ok(5));
    assert_eq!(rig.read(0, file, 998, 9).unwrap(), b"\0\0hello\0\0");
    assert_eq!(rig.read(0, file, LEN - 3, 9).unwrap(), [0; 3], "short only at the end");
    assert_eq!(rig.read(0, file, LEN + 3, 9).unwrap(), []);
    assert_eq!(rig.write(0, file, LEN - 3, b"hello", false), Err(Errno::INVAL), "the length is fixed");
    assert_eq!(sim.contents()[1000..1005], *b"hello");
    assert!(sim.durable().iter().all(|byte| *byte == 0));
    rig.sync(0, file).unwrap();
    assert_eq!(sim.durable(), sim.contents());

    let hole = |len| Extent { len, hole: true };
    let data = |len| Extent { len, hole: false };
    for count_max in [1, 2, 9] {
        assert_eq!(rig.extents(0, file, 4096, count_max), [hole(512), data(512), hole(3072)]);
    }
    let mut allocate = |mode, offset, len| match rig.run(0, Op::Allocate { file, mode, offset, len }) {
        Outcome::Allocated(result) => result,
        other => panic!("{other:?}"),
    };
    assert_eq!(allocate(Allocate::ZeroRange, 1002, 1000), Ok(()));
    assert_eq!(allocate(Allocate::PunchHole, 0, 1001), Ok(()));
    assert_eq!(rig.read(0, file, 998, 9).unwrap(), b"\0\0\0e\0\0\0\0\0");
    assert_eq!(rig.extents(0, file, 4096, 9), [hole(512), data(1536), hole(2048)]);
    assert!(matches!(rig.run(0, Op::Prefetch { file, offset: 0, len: LEN }), Outcome::Prefetched(Ok(()))));

    rig.loops[0].remove_file(file);
    assert_eq!(rig.read(0, file, 0, 9), Err(Errno::BADF));
    let (_, read_only) = rig.open(0, "store", LEN, FileOptions { read_only: true, ..FileOptions::default() });
    assert_eq!(rig.write(0, read_only, 0, b"x", false), Err(Errno::BADF));
    let (_, direct) = rig.open(0, "store", LEN, FileOptions { direct: true, ..FileOptions::default() });
    assert_eq!(rig.write(0, direct, 100, &[0; SECTOR], false), Err(Errno::INVAL), "direct transfers are aligned");
    assert_eq!(rig.write(0, direct, 512, &[0; SECTOR], false), Ok(SECTOR));
    assert_eq!(rig.loops[0].counters().written_direct_bytes, 512);
    rig.assert_pools_full();
}

#[test]
fn operations_complete_in_any_order() {
    let (mut rig, _, file) = rig_with_file(2);
    let writes: Vec<Token> = (0..50)
        .map(|i| {
            let op = rig.write_op(0, file, i * 512, &[i as u8; SECTOR], false);
            rig.submit(0, op)
        })
        .collect();
    rig.settle();
    let order: Vec<Token> = rig.done[0].iter().map(|completion| completion.token).collect();
    assert_eq!(order.len(), 50);
    assert_ne!(order, writes);
}

#[test]
fn a_mapped_send_reads_the_bytes_when_they_enter_the_send_buffer() {
    let mut rig = Rig::new(3, 2);
    let (_, file) = rig.open(0, "store", LEN, FileOptions { map: true, ..FileOptions::default() });
    rig.write(0, file, 0, &[1; 4096], false).unwrap();
    let (client, server) = rig.connect(0, 1);
    let mut gather = Gather::new();
    gather.push_head(b"head");
    gather.push_map(file, 100, 4000);
    gather.push_zeroes(10);
    let send = rig.submit(0, Op::Send { socket: client, gather });
    rig.loops[0].remove_file(file);
    assert_eq!(rig.sent(0, send), Ok(4014));
    let got = rig.receive(1, server, 4014, 4014).unwrap();
    assert_eq!(got, [&b"head"[..], &[1; 3996], &[0; 14]].concat());
    let mut gather = Gather::new();
    gather.push_map(file, 0, 1);
    let stale = rig.submit(0, Op::Send { socket: client, gather });
    assert_eq!(rig.sent(0, stale), Err(Errno::BADF));
    let (_, file) = rig.open(0, "store", LEN, FileOptions { map: true, ..FileOptions::default() });
    let mut gather = Gather::new();
    gather.push_map(file, LEN - 1, 2);
    let outside = rig.submit(0, Op::Send { socket: client, gather });
    assert_eq!(rig.sent(0, outside), Err(Errno::FAULT));
    let answers: Vec<bool> = (0..100).map(|_| rig.loops[0].resident(file, 0, 4096)).collect();
    assert!(answers.contains(&true) && answers.contains(&false));
    let answers: Vec<_> = (0..100).map(|_| rig.loops[0].try_write(file, 0, b"now")).collect();
    assert!(answers.contains(&Ok(())) && answers.contains(&Err(Errno::AGAIN)));
}

#[test]
fn faults_come_when_asked_for() {
    let (mut rig, sim, file) = rig_with_file(4);
    sim.fault_next(FileFault { op: FileOp::Read, error: Errno::IO });
    sim.fault_next(FileFault { op: FileOp::Write, error: Errno::NOSPC });
    rig.write(0, file, 0, &[1; 2 * SECTOR], false).unwrap_err();
    assert_eq!(rig.read(0, file, 0, 9), Err(Errno::IO));
    assert!(rig.read(0, file, 0, 9).is_ok());
    assert_eq!(rig.write(0, file, 0, &[1; 2 * SECTOR], false), Ok(2 * SECTOR));
    assert_eq!(rig.world.fault_count().disk_errors, 2);

    rig.world.faults(FaultPlan { read_error: 0.5, ..FaultPlan::default() });
    let answers: Vec<bool> = (0..100).map(|_| rig.read(0, file, 0, 9).is_ok()).collect();
    assert!(answers.contains(&true) && answers.contains(&false));
}

/// Crashes a node after `before`, starts it again, and gives what its file then reads.
fn crash(rig: &mut Rig, how: Crash) -> Vec<u8> {
    rig.world.crash(ip(0), how);
    rig.restart(0);
    rig.world.disk(ip(0)).file("store", LEN).contents()
}

#[test]
fn a_dead_process_leaves_completed_writes_and_tears_the_others() {
    let (mut whole, mut torn, mut none) = (0, 0, 0);
    for seed in 0..100 {
        let (mut rig, _, file) = rig_with_file(seed);
        rig.write(0, file, 0, &[1; 4 * SECTOR], false).unwrap();
        let op = rig.write_op(0, file, 8 * SECTOR as u64, &[2; 4 * SECTOR], true);
        rig.submit(0, op);
        let left = crash(&mut rig, Crash::Process);
        assert!(left[..4 * SECTOR].iter().all(|byte| *byte == 1), "seed {seed}: a completed write is lost");
        let sectors: Vec<u8> = left[8 * SECTOR..12 * SECTOR].chunks(SECTOR).map(|sector| sector[0]).collect();
        match sectors[..] {
            [2, 2, 2, 2] => whole += 1,
            [0, 0, 0, 0] => none += 1,
            [2, .., 0] => torn += 1,
            _ => panic!("seed {seed}: {sectors:?}"),
        }
        assert!(sectors.is_sorted_by(|a, b| a >= b), "seed {seed}: {sectors:?} is no prefix");
    }
    assert!(whole > 10 && torn > 10 && none > 10, "{whole} whole, {torn} torn, {none} not at all");
}

#[test]
fn a_power_loss_keeps_what_was_synced_and_any_of_the_rest() {
    let mut seen = [0; 4];
    for seed in 0..200 {
        let (mut rig, _, file) = rig_with_file(seed);
        rig.write(0, file, 0, &[1; 4 * SECTOR], false).unwrap();
        rig.sync(0, file).unwrap();
        rig.write(0, file, 0, &[2; 4 * SECTOR], false).unwrap();
        rig.write(0, file, 8192, &[5; 4 * SECTOR], true).unwrap();
        let op = rig.write_op(0, file, 0, &[3; 4 * SECTOR], true);
        rig.submit(0, op);
        let left = crash(&mut rig, Crash::Power);
        for sector in left[..4 * SECTOR].chunks(SECTOR) {
            assert!(sector.iter().all(|byte| *byte == sector[0]), "seed {seed}: a sector is torn");
            seen[usize::from(sector[0])] += 1;
        }
        assert_eq!(left[8192..8192 + 4 * SECTOR], [5; 4 * SECTOR], "seed {seed}: a durable write is lost");
    }
    assert_eq!(seen[0], 0, "what was synced is lost");
    assert!(seen[1..].iter().all(|count| *count > 50), "{seen:?}");
}

#[test]
fn a_sync_covers_what_completed_before_it_was_submitted() {
    let mut lost = 0;
    for seed in 0..100 {
        let (mut rig, _, file) = rig_with_file(seed);
        rig.write(0, file, 0, &[1; SECTOR], false).unwrap();
        let sync = rig.submit(0, Op::Sync { file });
        // Many values of one sector while the sync is in flight: the one that it covers is not forgotten.
        for value in 2..100 {
            if rig.loops[0].try_write(file, 0, &[value; SECTOR]) == Err(Errno::AGAIN) {
                let op = rig.write_op(0, file, 1024, &[value; SECTOR], false);
                rig.submit(0, op);
            }
        }
        assert!(matches!(rig.wait(0, sync), Outcome::Synced(Ok(()))));
        let left = crash(&mut rig, Crash::Power);
        assert_ne!(left[0], 0, "seed {seed}: a sync lost what it covered");
        lost += usize::from(left[0] == 1);
    }
    assert!(lost > 10, "what came after the sync's start may be lost");
}

#[test]
fn a_failed_sync_forgets_what_was_dirty() {
    let (mut lost, mut kept) = (0, 0);
    for seed in 0..100 {
        let (mut rig, sim, file) = rig_with_file(seed);
        rig.write(0, file, 0, &[1; SECTOR], false).unwrap();
        sim.fault_next(FileFault { op: FileOp::Sync, error: Errno::IO });
        assert_eq!(rig.sync(0, file), Err(Errno::IO));
        rig.write(0, file, 1024, &[2; SECTOR], false).unwrap();
        assert_eq!(rig.sync(0, file), Ok(()), "the kernel takes the pages for clean");
        let left = crash(&mut rig, Crash::Power);
        assert_eq!(left[1024], 2, "seed {seed}: written and synced after the failure");
        if left[0] == 1 { kept += 1 } else { lost += 1 }
    }
    assert!(lost > 10 && kept > 10, "{lost} lost, {kept} kept");
}

#[test]
fn one_of_those_who_sync_is_told_of_a_loss_perhaps_after_others_who_were_not() {
    let (mut passed, mut by_write) = (0, 0);
    for seed in 0..100 {
        let mut rig = Rig::new(seed, 2);
        let (sim, first) = rig.open(0, "store", LEN, FileOptions::default());
        let second = rig.loops[1].add_file(Arc::new(OpenFile::simulated(sim.clone(), FileOptions::default())));
        rig.write(0, first, 0, &[1; SECTOR], false).unwrap();
        sim.fail_writeback(Errno::NOSPC);
        rig.submit(0, Op::Sync { file: first });
        let write = rig.write_op(0, first, 1024, &[2; SECTOR], true);
        let write = rig.submit(0, write);
        rig.submit(1, Op::Sync { file: second });
        let mut told = Vec::new();
        while told.len() < 3 {
            assert!(rig.world.step());
            rig.turn();
            told.extend(rig.done.iter_mut().flat_map(|done| done.drain(..)).map(|completion| {
                let result = match completion.outcome {
                    Outcome::Synced(result) => result,
                    Outcome::Written { result, .. } => result.map(|_| ()),
                    other => panic!("{other:?}"),
                };
                (completion.token, result)
            }));
        }
        let bad: Vec<usize> = (0..3).filter(|at| told[*at].1 == Err(Errno::NOSPC)).collect();
        assert_eq!(bad.len(), 1, "seed {seed}: {told:?}");
        passed += usize::from(bad[0] > 0);
        by_write += usize::from(told[bad[0]].0 == write);
        assert_eq!(rig.sync(1, second), Ok(()), "it is told once");
    }
    assert!(passed > 20 && by_write > 20, "{passed} were passed, {by_write} told to a write");
}

#[test]
fn a_cancelled_write_happened_or_left_a_prefix() {
    let (mut done, mut cancelled) = (0, 0);
    for seed in 0..50 {
        let (mut rig, sim, file) = rig_with_file(seed);
        let op = rig.write_op(0, file, 0, &[1; 4 * SECTOR], false);
        let write = rig.submit(0, op);
        rig.loops[0].cancel(write);
        let ones = |sim: &SimFile| sim.contents().iter().map(|byte| usize::from(*byte)).sum::<usize>();
        match rig.taken(0, write) {
            Some(Outcome::Written { result: Ok(n), .. }) => {
                done += 1;
                assert_eq!((n, ones(&sim)), (4 * SECTOR, 4 * SECTOR));
            }
            Some(Outcome::Written { result: Err(Errno::CANCELED), .. }) => cancelled += 1,
            other => panic!("seed {seed}: {other:?}"),
        }
        let left = ones(&sim);
        assert!(sim.contents()[..left].iter().all(|byte| *byte == 1), "seed {seed}: no prefix");
        rig.settle();
        assert_eq!(ones(&sim), left, "seed {seed}: it was written after it ended");
        rig.assert_pools_full();
    }
    assert!(done > 5 && cancelled > 5);
}

#[test]
fn a_read_sees_a_write_in_flight_sector_by_sector_and_what_was_seen_stays() {
    let (mut mixed, mut lost) = (0, 0);
    for seed in 0..100 {
        let mut rig = Rig::new(seed, 1);
        let (sim, file) = rig.open(0, "file", 8192, FileOptions::default());
        // Not on the bounds of sectors.
        let op = rig.write_op(0, file, 100, &[1; 7000], false);
        let write = rig.submit(0, op);
        let before = rig.read(0, file, 0, 8192).unwrap();
        assert!(before[..100].iter().chain(&before[7100..]).all(|byte| *byte == 0), "seed {seed}: outside of it");
        let sectors: Vec<u8> = before[..7168].chunks(512).map(|sector| sector[400.min(sector.len() - 1)]).collect();
        mixed += u32::from(sectors.contains(&0) && sectors.contains(&1) && rig.taken(0, write).is_none());
        if seed % 2 == 0 {
            rig.world.crash(ip(0), Crash::Process);
        } else {
            assert!(matches!(rig.wait(0, write), Outcome::Written { result: Ok(7000), .. }));
        }
        let after = sim.contents();
        assert!(before.iter().zip(&after).all(|(before, after)| before <= after), "seed {seed}: it was seen");
        let whole = after[100..7100].iter().all(|byte| *byte == 1);
        assert!(whole || seed % 2 == 0, "seed {seed}: it completed");
        lost += u32::from(!whole);
    }
    assert!(mixed > 10 && lost > 5, "{mixed} mixed, {lost} cut off");
}
