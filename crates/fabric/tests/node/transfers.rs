//! Puts, gets, flushes and windows, and what of a program's memory may be touched when.

use std::os::fd::AsFd;

use byway_fabric::limits::ASKED_MAX;
use byway_fabric::node::{Descriptor, Memory, NodeOptions, OpError, Outcome, Rights, SubmitError};
use byway_fabric::registration::{Counters, Limits};
use byway_fabric::session::PayloadChecksum;
use byway_fabric::windows::WindowError;
use rustix::fs::{MemfdFlags, SealFlags};

use crate::rig::{
    CANARY, Rig, Turner, Wire, canaries_are_whole, copy_of, done, end, pattern, prevent_registration, soon,
    window_is_all,
};

crate::over_each_wire!(
    bytes_of_any_length_arrive,
    sixty_four_segments_of_several_memories_are_one_transfer,
    a_message_follows_its_bytes,
    what_is_not_open_is_refused_counted_and_untouched,
    a_window_for_one_use_is_gone_after_it,
    memory_in_use_is_not_lent_to_its_program,
    checksums_are_kept_over_a_programs_memory,
    a_put_with_a_checksum_may_follow_another_into_the_same_bytes,
    a_flush_comes_after_the_puts_before_it,
    much_is_asked_for_in_turn,
    what_waits_ends_with_its_session,
);

crate::over_rdma!(
    bytes_of_any_length_arrive,
    sixty_four_segments_of_several_memories_are_one_transfer,
    a_message_follows_its_bytes,
    what_is_not_open_is_refused_counted_and_untouched,
    a_window_for_one_use_is_gone_after_it,
    memory_in_use_is_not_lent_to_its_program,
    a_flush_comes_after_the_puts_before_it,
    a_programs_memory_is_registered_once,
    no_more_of_a_programs_memory_stays_registered_than_it_wants,
    memory_that_cannot_be_locked_is_copied_or_refused,
    memory_that_cannot_be_locked_goes_through_a_small_pool,
    a_get_in_several_pieces_is_one_use,
);

/// Only over RDMA, as are the next four.
fn a_programs_memory_is_registered_once(rig: &Rig) {
    let pair = rig.pair();
    let turner = Turner::of(&pair.server);
    let (memory, window) = pair.open(1 << 20, Rights::BOTH);
    let registrations = || pair.client.counters().unwrap().registrations;
    let transfer = |mine: &byway_fabric::node::Memory| {
        mine.write(0, &[7; 1 << 20]).unwrap();
        done(&pair.client.put(pair.to_server, &[mine.segment(0..1 << 20)], &window.descriptor(), 0).unwrap());
        done(&pair.client.get(pair.to_server, &window.descriptor(), 0, &[mine.segment(0..1 << 20)]).unwrap());
    };
    assert_eq!(registrations(), Counters::default(), "nothing is registered before it is moved");
    let mine = pair.client.register(1 << 20).unwrap();
    for _ in 0..10 {
        transfer(&mine);
    }
    let counters = registrations();
    if let Some(reason) = pair.client.counters().unwrap().registered_each_time {
        assert_eq!(counters.uncached, 20, "{reason}");
        let reason = format!("memory is registered for each transfer: {reason}");
        return byway_skip::skip_part_of_this(byway_skip::SkipReason::Machine(&reason));
    }
    assert_eq!((counters.misses, counters.hits, counters.in_use), (1, 19, 0), "{counters:?}");
    // The next memory may well have the addresses of the last.
    drop(mine);
    assert!(registrations().invalidations > 0);
    let other = pair.client.register(1 << 20).unwrap();
    transfer(&other);
    assert_eq!(registrations().misses, 2);
    window_is_all(&memory, 7);
    // A file from which nobody can take pages is as good as private memory.
    let shared = pair.client.register_shared(1 << 20).unwrap();
    let file = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 1 << 20).unwrap();
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    let callers = pair.client.register_file(file.as_fd(), 0..1 << 20).unwrap();
    transfer(&callers);
    let before = registrations();
    assert_eq!((before.misses, before.uncached), (4, 2), "the caller can still punch holes");
    rustix::fs::fcntl_add_seals(&file, SealFlags::FUTURE_WRITE).unwrap();
    for mine in [&shared, &callers] {
        (0..10).for_each(|_| transfer(mine));
    }
    let counters = registrations();
    let since = (counters.misses - before.misses, counters.hits - before.hits, counters.uncached - before.uncached);
    assert_eq!(since, (2, 38, 0), "{counters:?}");
    drop(turner);
}

fn no_more_of_a_programs_memory_stays_registered_than_it_wants(rig: &Rig) {
    let registrations = Limits { ranges_max: 64, bytes_max: 2 << 20 };
    let pair = rig.pair_of(&NodeOptions { registrations, ..rig.options() });
    let _turner = Turner::of(&pair.server);
    let (_memory, window) = pair.open(1 << 20, Rights::BOTH);
    // None is beside another, and all of them are kept alive: nothing but the limit lets go of them.
    let mine: Vec<Memory> = (0..5).map(|_| pair.client.register((1 << 20) + 4096).unwrap()).collect();
    for memory in &mine {
        done(&pair.client.put(pair.to_server, &[memory.segment(0..1 << 20)], &window.descriptor(), 0).unwrap());
    }
    let counters = pair.client.counters().unwrap();
    if let Some(reason) = counters.registered_each_time {
        let reason = format!("registered for each transfer: {reason}");
        return byway_skip::skip_this(byway_skip::SkipReason::Machine(&reason));
    }
    let seen = counters.registrations;
    assert_eq!((seen.ranges, seen.bytes, seen.evictions, seen.misses), (2, 2 << 20, 3, 5), "{seen:?}");
}

/// A put goes through frames then; a get says so, and the session goes on.
fn memory_that_cannot_be_locked_is_copied_or_refused(rig: &Rig) {
    let pair = rig.pair();
    let _turner = Turner::of(&pair.server);
    let (memory, window) = pair.open(1 << 20, Rights::BOTH);
    let mine = pair.client.register(1 << 20).unwrap();
    mine.write(0, &[9; 1 << 20]).unwrap();
    prevent_registration(&mine);
    done(&pair.client.put(pair.to_server, &[mine.segment(0..1 << 20)], &window.descriptor(), 0).unwrap());
    window_is_all(&memory, 9);
    let get = pair.client.get(pair.to_server, &window.descriptor(), 0, &[mine.segment(0..1 << 20)]).unwrap();
    assert!(matches!(end(&get), Err(OpError::Io(_))));
    assert!(pair.client.counters().unwrap().registrations.refused > 0);
    done(&pair.client.send(pair.to_server, b"goes on", &[]).unwrap());
}

/// Of which no piece is as long as the payload: it goes in the pieces that there are.
fn memory_that_cannot_be_locked_goes_through_a_small_pool(rig: &Rig) {
    const LEN: usize = 3 << 20;
    let pair = rig.pair_of(&NodeOptions { frame_bytes: 1 << 20, ..rig.options() });
    let _turner = Turner::of(&pair.server);
    let (memory, window) =
        pair.window(LEN, |memory, range| pair.server.open_window(pair.to_client, memory, range, Rights::PUT).unwrap());
    let mine = pair.client.register(LEN).unwrap();
    mine.write(0, &(0..LEN).map(|at| pattern(at + 3)).collect::<Vec<_>>()).unwrap();
    prevent_registration(&mine);
    for segments in [vec![mine.segment(0..LEN)], vec![mine.segment(0..LEN - 100), mine.segment(LEN - 100..LEN)]] {
        done(&pair.client.put(pair.to_server, &segments, &window.descriptor(), 0).unwrap());
        assert!(copy_of(&memory)[CANARY..CANARY + LEN].iter().enumerate().all(|(at, byte)| *byte == pattern(at + 3)));
        memory.write(CANARY, &[0; LEN]).unwrap();
    }
    canaries_are_whole(&memory);
    assert!(!mine.is_in_use());
    done(&pair.client.send(pair.to_server, b"goes on", &[]).unwrap());
}

/// Over lanes each piece is a use.
fn a_get_in_several_pieces_is_one_use(rig: &Rig) {
    let pair = rig.pair();
    let turner = Turner::of(&pair.server);
    let (memory, window) = pair.window(9000, |memory, range| {
        pair.server.open_window_once(pair.to_client, memory, range, Rights::GET).unwrap()
    });
    let mine = pair.client.register(9000).unwrap();
    let segments = [mine.segment(0..1), mine.segment(1..6000), mine.segment(6000..9000)];
    let get = || pair.client.get(pair.to_server, &window.descriptor(), 0, &segments).unwrap();
    let [first, second] = [get(), get()].map(|op| end(&op));
    assert_eq!(first, Ok(Outcome::Done));
    assert_eq!(second, Err(OpError::Refused(WindowError::Key)));
    assert!((0..9000).all(|at| mine.bytes().unwrap()[at] == pattern(CANARY + at)));
    canaries_are_whole(&memory);
    // Its owner has heard what was said before this.
    done(&pair.client.send(pair.to_server, b"used", &[]).unwrap());
    assert_eq!(pair.server.receive(soon()).unwrap().header, b"used");
    drop(turner);
    assert_eq!(pair.server.counters().unwrap().windows, 0, "it is closed");
}

fn bytes_of_any_length_arrive(rig: &Rig) {
    let pair = rig.pair();
    let turner = Turner::of(&pair.server);
    for len in [1, 100, 4096, 70_000, 1 << 20, (3 << 20) + 17] {
        let (memory, window) = pair.open(len, Rights::BOTH);
        let remote = window.descriptor();
        let mut mine = pair.client.register(len + 10).unwrap();
        done(&pair.client.get(pair.to_server, &remote, 0, &[mine.segment(10..len + 10)]).unwrap());
        assert!((0..len).all(|at| mine.bytes().unwrap()[10 + at] == pattern(CANARY + at)), "{len}");
        mine.bytes_mut().unwrap().fill(0xa5);
        done(&pair.client.put(pair.to_server, &[mine.segment(0..len)], &remote, 0).unwrap());
        mine.bytes_mut().expect("the put has ended");
        window_is_all(&memory, 0xa5);
        pair.close(window);
        assert!(!memory.is_in_use());
    }
    drop(turner);
    assert_eq!(pair.server.counters().unwrap().windows, 0);
}

fn sixty_four_segments_of_several_memories_are_one_transfer(rig: &Rig) {
    let pair = rig.pair();
    let _turner = Turner::of(&pair.server);
    let (memory, window) = pair.open(64 * 50_000, Rights::BOTH);
    let mine = [pair.client.register(4 << 20).unwrap(), pair.client.register(4 << 20).unwrap()];
    let segments: Vec<_> = (0..64).map(|n| mine[n % 2].segment(n * 50_001..n * 50_001 + 50_000)).collect();
    done(&pair.client.get(pair.to_server, &window.descriptor(), 0, &segments).unwrap());
    for n in 0..64 {
        let bytes = mine[n % 2].bytes().unwrap();
        assert!((0..50_000).all(|at| bytes[n * 50_001 + at] == pattern(CANARY + n * 50_000 + at)), "segment {n}");
    }
    for n in 0..64 {
        mine[n % 2].write(n * 50_001, &[n as u8; 50_000]).unwrap();
    }
    done(&pair.client.put(pair.to_server, &segments, &window.descriptor(), 0).unwrap());
    let bytes = copy_of(&memory);
    assert!((0..64 * 50_000).all(|at| bytes[CANARY + at] == (at / 50_000) as u8));
    canaries_are_whole(&memory);
    let more: Vec<_> = (0..65).map(|_| mine[0].segment(0..1)).collect();
    let refused = pair.client.put(pair.to_server, &more, &window.descriptor(), 0);
    assert!(matches!(refused, Err(SubmitError::TooLong)));
}

fn a_message_follows_its_bytes(rig: &Rig) {
    let pair = rig.pair();
    let len = (2 << 20) + 5;
    let (memory, window) = pair.open(len, Rights::PUT);
    let client = std::thread::spawn(move || {
        let mine = pair.client.register(len).unwrap();
        for round in 0..5u8 {
            mine.write(0, &vec![round; len]).unwrap();
            let to = window.descriptor();
            let put = pair.client.put_with_message(pair.to_server, &[mine.segment(0..len)], &to, 0, &[round, 7]);
            done(&put.unwrap());
            pair.client.receive(soon()).unwrap();
        }
        window
    });
    for round in 0..5u8 {
        assert_eq!(pair.server.receive(soon()).unwrap().header, [round, 7]);
        window_is_all(&memory, round);
        pair.server.send(pair.to_client, b"seen", &[]).unwrap();
    }
    canaries_are_whole(&memory);
    let _turner = Turner::of(&pair.server);
    drop(client.join().unwrap());
}

/// A descriptor with other keys or another length.
fn forged(of: Descriptor, change: impl FnOnce(&mut [u8; 32])) -> Descriptor {
    let mut bytes = of.to_bytes();
    change(&mut bytes);
    Descriptor::from_bytes(&bytes)
}

fn what_is_not_open_is_refused_counted_and_untouched(rig: &Rig) {
    let pair = rig.pair();
    let turner = Turner::of(&pair.server);
    let (memory, window) = pair.open(8192, Rights::PUT);
    let before = copy_of(&memory);
    let put = window.descriptor();
    let mine = pair.client.register(1 << 20).unwrap();
    let try_put = |to: &Descriptor, offset, len| pair.client.put(pair.to_server, &[mine.segment(0..len)], to, offset);
    let try_get =
        |from: &Descriptor, offset, len| pair.client.get(pair.to_server, from, offset, &[mine.segment(0..len)]);
    // What can be seen here is not even sent.
    assert!(matches!(try_get(&put, 0, 1), Err(SubmitError::Rights)));
    assert!(matches!(try_put(&put, 1, 8192), Err(SubmitError::OutOfRange)));
    assert!(matches!(try_put(&put, u64::MAX, 1), Err(SubmitError::OutOfRange)));
    assert!(matches!(
        pair.client.put(pair.to_server, &[mine.segment(1..(1 << 20) + 1)], &put, 0),
        Err(SubmitError::OutOfRange)
    ));
    let longer = forged(put, |bytes| bytes[16..24].copy_from_slice(&(1u64 << 40).to_le_bytes()));
    let readable = forged(put, |bytes| bytes.copy_within(0..8, 8));
    let guessed = forged(put, |bytes| bytes[3] ^= 1);
    let refused = |op: Result<_, _>| end(&op.unwrap()).unwrap_err();
    assert_eq!(refused(try_put(&longer, 1, 8192)), OpError::Refused(WindowError::Bounds));
    assert_eq!(refused(try_put(&longer, 1 << 39, 1 << 20)), OpError::Refused(WindowError::Bounds));
    assert_eq!(refused(try_put(&guessed, 0, 100)), OpError::Refused(WindowError::Key));
    assert_eq!(refused(try_get(&readable, 0, 100)), OpError::Refused(WindowError::Rights));
    let guessed = forged(readable, |bytes| bytes[11] ^= 1);
    assert_eq!(refused(try_get(&guessed, 0, 100)), OpError::Refused(WindowError::Key));
    assert!(copy_of(&memory) == before, "untouched");
    // What a put with a message was refused, nobody hears of.
    let op = pair.client.put_with_message(pair.to_server, &[mine.segment(0..8192)], &longer, 1, b"unheard").unwrap();
    assert_eq!(end(&op), Err(OpError::Refused(WindowError::Bounds)));
    done(&pair.client.send(pair.to_server, b"heard", &[]).unwrap());
    drop(turner);
    assert_eq!(pair.server.receive(soon()).unwrap().header, b"heard");
    // Over RDMA this side finds all of that out.
    let counted = if rig.wire == Wire::Rdma { 0 } else { 6 };
    assert_eq!(pair.server.counters().unwrap().windows_refused, counted);
    // The window of one session is none of another's.
    let address = rig.listen(&pair.server);
    let (_, other) = crate::rig::connect(&pair.server, &pair.client, &address);
    let turner = Turner::of(&pair.server);
    let op = pair.client.put(other, &[mine.segment(0..100)], &put, 0).unwrap();
    assert_eq!(end(&op), Err(OpError::Refused(WindowError::Key)));
    assert!(copy_of(&memory) == before, "untouched");
    pair.close(window);
    pair.hear();
    assert_eq!(refused(try_put(&put, 0, 1)), OpError::Refused(WindowError::Key));
    drop(turner);
}

fn a_window_for_one_use_is_gone_after_it(rig: &Rig) {
    let pair = rig.pair();
    let _turner = Turner::of(&pair.server);
    let (memory, window) = pair.window(5000, |memory, range| {
        pair.server.open_window_once(pair.to_client, memory, range, Rights::BOTH).unwrap()
    });
    let once = window.descriptor();
    let mine = pair.client.register(5000).unwrap();
    let get = || pair.client.get(pair.to_server, &once, 0, &[mine.segment(0..5000)]).unwrap();
    let put = || pair.client.put(pair.to_server, &[mine.segment(0..5000)], &once, 0).unwrap();
    // Both at once: one of each may pass.
    let gets = [get(), get()].map(|op| end(&op));
    assert_eq!(gets.iter().filter(|result| **result == Ok(Outcome::Done)).count(), 1, "{gets:?}");
    mine.write(0, &[9; 5000]).unwrap();
    let puts = [put(), put()].map(|op| end(&op));
    assert_eq!(puts[0], Ok(Outcome::Done));
    assert_eq!(puts[1], Err(OpError::Refused(WindowError::Key)));
    assert_eq!(end(&get()), Err(OpError::Refused(WindowError::Key)));
    window_is_all(&memory, 9);
    drop(window);
    let long = pair.server.register(2 << 20).unwrap();
    assert!(pair.server.open_window_once(pair.to_client, &long, 0..2 << 20, Rights::PUT).is_err());
}

fn memory_in_use_is_not_lent_to_its_program(rig: &Rig) {
    let pair = rig.pair();
    let mut memory = pair.server.register(8192).unwrap();
    let window = pair.server.open_window(pair.to_client, &memory, 0..4096, Rights::PUT).unwrap();
    assert!(memory.bytes_mut().is_err() && memory.bytes().is_err());
    let second = pair.server.open_window(pair.to_client, &memory, 4096..8192, Rights::GET).unwrap();
    done(&window.close().unwrap());
    assert!(memory.bytes_mut().is_err(), "the other is open");
    drop(second);
    pair.server.progress().unwrap();
    memory.bytes_mut().unwrap().fill(1);
    let looked_at = memory.bytes().unwrap();
    let refused = pair.server.open_window(pair.to_client, &memory, 0..1, Rights::PUT);
    assert!(refused.is_err(), "while the program looks");
    assert_eq!(memory.write(0, &[2]), Err(SubmitError::Borrowed));
    assert_eq!(looked_at[0], 1);
    drop(looked_at);
    memory.write(0, &[2]).unwrap();
    // Memory that its program drops stays for those who may still touch it.
    let window = pair.server.open_window(pair.to_client, &memory, 0..8192, Rights::BOTH).unwrap();
    drop(memory);
    pair.hear();
    let turner = Turner::of(&pair.server);
    let mine = pair.client.register(8192).unwrap();
    done(&pair.client.get(pair.to_server, &window.descriptor(), 0, &[mine.segment(0..8192)]).unwrap());
    assert_eq!((mine.bytes().unwrap()[0], mine.bytes().unwrap()[1]), (2, 1));
    done(&pair.client.put(pair.to_server, &[mine.segment(0..8192)], &window.descriptor(), 0).unwrap());
    done(&window.close().unwrap());
    drop(turner);
    assert_eq!(pair.server.counters().unwrap().windows, 0);
}

fn checksums_are_kept_over_a_programs_memory(rig: &Rig) {
    let pair = rig.pair_of(&NodeOptions { checksum: PayloadChecksum::Required, ..rig.options() });
    let turner = Turner::of(&pair.server);
    let len = (1 << 20) + 100;
    let (memory, window) = pair.open(len, Rights::BOTH);
    let mine = pair.client.register(len).unwrap();
    let halves = [mine.segment(100..len), mine.segment(0..100)];
    done(&pair.client.get(pair.to_server, &window.descriptor(), 0, &halves).unwrap());
    done(&pair.client.put(pair.to_server, &halves, &window.descriptor(), 0).unwrap());
    canaries_are_whole(&memory);
    let bytes = copy_of(&memory);
    assert!((0..len).all(|at| bytes[CANARY + at] == pattern(CANARY + at)), "there and back");
    done(&pair.client.send(pair.to_server, b"checked", &[3; 9000]).unwrap());
    drop(turner);
    assert_eq!(pair.server.receive(soon()).unwrap().payload, [3; 9000]);
}

/// Where the client could put by itself, the second would lie there before the server has looked at the first.
fn a_put_with_a_checksum_may_follow_another_into_the_same_bytes(rig: &Rig) {
    const LEN: usize = 9000;
    let pair = rig.pair_of(&NodeOptions { checksum: PayloadChecksum::Required, ..rig.options() });
    for rights in [Rights::PUT, Rights::BOTH] {
        let (memory, window) = pair.open(LEN, rights);
        done(&pair.server.send(pair.to_client, b"open", &[]).unwrap());
        assert_eq!(pair.client.receive_from(pair.to_server, soon()).unwrap().header, b"open");
        let mine = [5, 6].map(|byte| {
            let mine = pair.client.register(LEN).unwrap();
            mine.write(0, &[byte; LEN]).unwrap();
            mine
        });
        let put = |mine: &Memory| pair.client.put(pair.to_server, &[mine.segment(0..LEN)], &window.descriptor(), 0);
        let puts = mine.each_ref().map(|mine| put(mine).unwrap());
        let turner = Turner::of(&pair.server);
        puts.iter().for_each(done);
        window_is_all(&memory, 6);
        drop(turner);
        pair.close(window);
    }
}

fn a_flush_comes_after_the_puts_before_it(rig: &Rig) {
    let pair = rig.pair();
    let _turner = Turner::of(&pair.server);
    let (memory, window) = pair.open(4 << 20, Rights::PUT);
    let mine = pair.client.register(1 << 20).unwrap();
    mine.write(0, &[5; 1 << 20]).unwrap();
    for part in 0..4 {
        // Nobody keeps the operation.
        pair.client.put(pair.to_server, &[mine.segment(0..1 << 20)], &window.descriptor(), part << 20).unwrap();
    }
    done(&pair.client.flush(pair.to_server).unwrap());
    window_is_all(&memory, 5);
    assert!(!mine.is_in_use());
    done(&pair.client.flush(pair.to_server).unwrap());
}

/// So much that a peer would have too many answers waiting if it were asked for at once.
fn much_is_asked_for_in_turn(rig: &Rig) {
    let pair = rig.pair();
    let (memory, window) = pair
        .window(8192, |memory, range| pair.server.open_window(pair.to_client, memory, range, Rights::BOTH).unwrap());
    let remote = window.descriptor();
    let mine = pair.client.register(64).unwrap();
    let ranges: Vec<_> = (0..64u64).map(|at| at * 128..at * 128 + 1).collect();
    let get = || pair.client.get_ranges(pair.to_server, &remote, &ranges, &[mine.segment(0..64)]).unwrap();
    let gets: Vec<_> = (0..300).map(|_| get()).collect();
    // All in order behind them.
    let values: Vec<_> = (1..=100u8)
        .map(|value| {
            let value_of = pair.client.register(64).unwrap();
            value_of.write(0, &[value; 64]).unwrap();
            value_of
        })
        .collect();
    let put = |from: &Memory| pair.client.put_ranges(pair.to_server, &[from.segment(0..64)], &remote, &ranges).unwrap();
    let puts: Vec<_> = values.iter().map(put).collect();
    let flush = pair.client.flush(pair.to_server).unwrap();
    let first = pair.client.send(pair.to_server, b"not this", &[]).unwrap();
    let second = pair.client.send(pair.to_server, b"this", &[]).unwrap();
    first.cancel().unwrap();
    let windows = pair.client.counters().unwrap().windows;
    assert!(windows <= ASKED_MAX + 64, "{windows} parts at a time");
    let turner = Turner::of(&pair.server);
    gets.iter().chain(&puts).for_each(done);
    done(&flush);
    done(&second);
    drop(turner);
    let waited = rig.wire != Wire::Lent;
    assert_eq!(end(&first), if waited { Err(OpError::Cancelled) } else { Ok(Outcome::Done) });
    let heard = pair.server.receive(soon()).unwrap().header;
    assert_eq!(heard, if waited { &b"this"[..] } else { b"not this" });
    assert!((0..64).all(|at| copy_of(&memory)[CANARY + at * 128] == 100), "the last one's");
    canaries_are_whole(&memory);
    pair.close(window);
}

/// Whoever ends it, and whether its peer is there or not.
fn what_waits_ends_with_its_session(rig: &Rig) {
    for closes in [true, false] {
        let pair = rig.pair();
        // Private, so that the peer is asked.
        let memory = pair.server.register(8192).unwrap();
        let window = pair.server.open_window(pair.to_client, &memory, 0..8192, Rights::BOTH).unwrap();
        let mine = pair.client.register(64).unwrap();
        let ranges: Vec<_> = (0..64u64).map(|at| at * 128..at * 128 + 1).collect();
        let get = || pair.client.get_ranges(pair.to_server, &window.descriptor(), &ranges, &[mine.segment(0..64)]);
        let mut ops: Vec<_> = (0..200).map(|_| get().unwrap()).collect();
        ops.push(
            pair.client.put_ranges(pair.to_server, &[mine.segment(0..64)], &window.descriptor(), &ranges).unwrap(),
        );
        let to = window.descriptor();
        ops.push(pair.client.put_with_message(pair.to_server, &[mine.segment(0..64)], &to, 0, b"put").unwrap());
        let flush = pair.client.flush(pair.to_server).unwrap();
        let message = pair.client.send(pair.to_server, b"goodbye", &[]).unwrap();
        if closes {
            pair.client.close(pair.to_server).unwrap();
            done(&message);
            done(&flush);
            let _client = Turner::of(&pair.client);
            assert_eq!(pair.server.receive(soon()).unwrap().header, b"goodbye");
        } else {
            pair.server.close(pair.to_client).unwrap();
        }
        let _turner = Turner::of(&pair.server);
        let ends: Vec<_> = ops.iter().map(end).collect();
        assert!(ends[150..].iter().all(|end| matches!(end, Err(OpError::Ended(_)))), "{:?}", ends[150]);
        assert!(!mine.is_in_use());
        assert_eq!(pair.client.counters().unwrap().windows, 0);
    }
}
