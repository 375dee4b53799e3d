//! Many threads on one node: each end goes to one of them, and none waits in vain.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use byway_fabric::node::{Deadline, GroupCompletion, Op, Outcome, Rights, WaitError};

use crate::rig::{Pair, Rig, Turner, Wire, done, end, pattern, soon};

crate::over_each_wire!(
    each_completion_of_a_group_is_seen_once,
    each_message_is_seen_once,
    a_thread_that_drops_out_takes_nothing_with_it,
    the_first_of_several_is_found,
    many_threads_transfer_at_once,
    a_loop_outlives_the_thread_that_began_its_operations,
    what_had_ended_when_it_was_added_wakes_who_turns_the_loop,
    what_had_ended_when_it_was_added_wakes_each_who_waits,
    what_a_node_has_is_counted_while_another_thread_turns_it,
    a_wait_in_the_background_finds_what_any_thread_brings,
);

crate::over_rdma!(
    a_thread_that_drops_out_takes_nothing_with_it,
    the_first_of_several_is_found,
    many_threads_transfer_at_once,
    a_loop_outlives_the_thread_that_began_its_operations,
);

const THREADS: usize = 8;

/// The message comes while nobody else waits, while another thread waits long, and between short waits of another thread.
fn a_wait_in_the_background_finds_what_any_thread_brings(rig: &Rig) {
    let pair = rig.pair();
    let send = |header: &[u8]| done(&pair.client.send(pair.to_server, header, &[]).unwrap());
    let receive = || pair.server.start_receive(Some(pair.to_client)).unwrap();
    let found = |op: &Op| {
        let Ok(Outcome::Message(message)) = op.wait_in_background(soon()).expect("the message comes") else { panic!() };
        message.header.clone()
    };
    let nothing = receive();
    assert_eq!(nothing.wait_in_background(Duration::from_millis(5)), Err(WaitError::Deadline));
    send(b"alone");
    assert_eq!(found(&nothing), b"alone");
    {
        let _turner = Turner::of(&pair.server);
        let op = receive();
        send(b"behind another");
        assert_eq!(found(&op), b"behind another");
    }
    for _ in 0..20 {
        let op = receive();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| found(&op));
            send(b"between others");
            while !waiting.is_finished() {
                let incoming = pair.server.start_accept().unwrap();
                assert_eq!(incoming.test(), Err(WaitError::Deadline));
            }
            assert_eq!(waiting.join().unwrap(), b"between others");
        });
    }
}

fn what_a_node_has_is_counted_while_another_thread_turns_it(rig: &Rig) {
    let pair = rig.pair();
    let (_memory, window) = pair.open(4096, Rights::PUT);
    let alone = pair.server.counters().unwrap();
    assert!(alone.windows > 0, "{alone:?}");
    let _turner = Turner::of(&pair.server);
    let mine = pair.client.register(100).unwrap();
    for _ in 0..20 {
        // The put ends when that thread has turned the server, which then sleeps until the next comes.
        done(&pair.client.put(pair.to_server, &[mine.segment(0..100)], &window.descriptor(), 0).unwrap());
        let counted = pair.server.counters().unwrap();
        assert_eq!(counted.windows, alone.windows);
    }
}

fn each_completion_of_a_group_is_seen_once(rig: &Rig) {
    const OPS: usize = 4000;
    let pair = rig.pair();
    let _turner = Turner::of(&pair.server);
    let (memory, window) = pair.open(4096, Rights::GET);
    let group = pair.client.group(64).unwrap();
    let mine = pair.client.register(4096 * THREADS).unwrap();
    let (begun, seen) = (AtomicUsize::new(0), Mutex::new(HashMap::new()));
    let remote = window.descriptor();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (group, mine, begun, seen, pair) = (&group, &mine, &begun, &seen, &pair);
            scope.spawn(move || {
                loop {
                    let number = begun.fetch_add(1, Ordering::Relaxed);
                    if number < OPS {
                        let place = mine.segment(thread * 4096..(thread + 1) * 4096);
                        let mut op = pair.client.get(pair.to_server, &remote, 0, &[place]).unwrap();
                        while let Err(full) = group.add(op, number as u64) {
                            op = full.op;
                            if let Ok(completion) = group.wait(Deadline::after(Duration::from_millis(1))) {
                                *seen.lock().unwrap().entry(completion.context).or_insert(0) += 1;
                            }
                        }
                        // Some by looks, some by waits, some not at all.
                        if number % 3 == 0
                            && let Ok(completion) = group.test()
                        {
                            *seen.lock().unwrap().entry(completion.context).or_insert(0) += 1;
                        }
                        continue;
                    }
                    if seen.lock().unwrap().len() == OPS {
                        return;
                    }
                    match group.wait(Deadline::after(Duration::from_millis(20))) {
                        Ok(completion) => {
                            assert_eq!(completion.result, Ok(Outcome::Done));
                            *seen.lock().unwrap().entry(completion.context).or_insert(0) += 1;
                        }
                        Err(error) => assert_eq!(error, WaitError::Deadline),
                    }
                }
            });
        }
    });
    assert!(seen.lock().unwrap().values().all(|count| *count == 1));
    assert_eq!(group.test(), Err(WaitError::Deadline));
    drop(memory);
}

fn each_message_is_seen_once(rig: &Rig) {
    const MESSAGES: usize = 3000;
    let pair = rig.pair();
    let seen = Mutex::new(vec![0; MESSAGES]);
    let count = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while let Ok(message) = pair.server.receive(soon()) {
                    let Ok(number) = message.header[..].try_into().map(u32::from_le_bytes) else { return };
                    seen.lock().unwrap()[number as usize] += 1;
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let mut sent: Vec<Op> = Vec::new();
        for number in 0..MESSAGES as u32 {
            loop {
                match pair.client.send(pair.to_server, &number.to_le_bytes(), &[]) {
                    Ok(op) => break sent.push(op),
                    Err(_) => done(&sent.remove(0)),
                }
            }
        }
        sent.iter().for_each(done);
        // One for each thread, to end it.
        for _ in 0..THREADS {
            done(&pair.client.send(pair.to_server, b"end", &[]).unwrap());
        }
        let _turner = Turner::of(&pair.client);
    });
    assert_eq!(count.into_inner(), MESSAGES);
    assert!(seen.into_inner().unwrap().iter().all(|count| *count == 1));
}

/// Whoever turns the loop stops to wait: another must take over, and be there when its message comes.
fn a_thread_that_drops_out_takes_nothing_with_it(rig: &Rig) {
    let pair = rig.pair();
    // No kernel holds messages for a peer over RDMA: who sends more than a few must hear that they were taken.
    let _turner = (rig.wire == Wire::Rdma).then(|| Turner::of(&pair.client));
    let sessions = 50;
    for round in 0..sessions {
        let (first, second) = (pair.server.start_accept().unwrap(), pair.server.start_receive(None).unwrap());
        let started = std::sync::Barrier::new(3);
        std::thread::scope(|scope| {
            // It may be the one that turns the loop, and leaves after a moment.
            scope.spawn(|| {
                started.wait();
                assert_eq!(first.wait(Deadline::after(Duration::from_micros(200 * round))), Err(WaitError::Deadline));
            });
            scope.spawn(|| {
                started.wait();
                assert!(matches!(end(&second), Ok(Outcome::Message(_))));
            });
            started.wait();
            done(&pair.client.send(pair.to_server, b"for the second", &[]).unwrap());
        });
        drop(first);
    }
    // Several for one: one gets it.
    let op = pair.server.start_receive(None).unwrap();
    let got = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| match op.wait(soon()) {
                Ok(Ok(Outcome::Message(_))) => {
                    got.fetch_add(1, Ordering::Relaxed);
                }
                other => assert_eq!(other, Err(WaitError::Taken)),
            });
        }
        done(&pair.client.send(pair.to_server, b"for one", &[]).unwrap());
    });
    assert_eq!(got.into_inner(), 1);
}

fn the_first_of_several_is_found(rig: &Rig) {
    let pair = rig.pair();
    let _turner = Turner::of(&pair.server);
    let never = pair.client.start_accept().unwrap();
    let from = pair.client.start_receive(Some(pair.to_server)).unwrap();
    assert_eq!(pair.client.wait_any(&[&never, &from], Deadline::now()), Err(WaitError::Deadline));
    pair.server.send(pair.to_client, b"here", &[]).unwrap();
    let (index, result) = pair.client.wait_any(&[&never, &from], soon()).unwrap();
    assert!(index == 1 && matches!(result, Ok(Outcome::Message(_))));
    assert_eq!(pair.client.wait_any(&[&never, &from], soon()), Err(WaitError::Taken));
    assert_eq!(pair.client.wait_any(&[], Deadline::now()), Err(WaitError::Deadline));
}

fn many_threads_transfer_at_once(rig: &Rig) {
    const BYTES: usize = 100_000;
    let pair = rig.pair();
    let _turner = Turner::of(&pair.server);
    let (memory, window) = pair.open(THREADS * BYTES, Rights::BOTH);
    let remote = window.descriptor();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let pair = &pair;
            scope.spawn(move || {
                let mut mine = pair.client.register(BYTES).unwrap();
                let offset = (thread * BYTES) as u64;
                for round in 0..20u8 {
                    for (at, byte) in mine.bytes_mut().unwrap().iter_mut().enumerate() {
                        *byte = pattern(at + thread) ^ round;
                    }
                    done(&pair.client.put(pair.to_server, &[mine.segment(0..BYTES)], &remote, offset).unwrap());
                    mine.bytes_mut().unwrap().fill(0);
                    done(&pair.client.get(pair.to_server, &remote, offset, &[mine.segment(0..BYTES)]).unwrap());
                    let bytes = mine.bytes().unwrap();
                    assert!((0..BYTES).all(|at| bytes[at] == pattern(at + thread) ^ round), "round {round}");
                }
            });
        }
    });
    drop(memory);
}

/// A ring's operations are cancelled by the kernel with the thread that submitted them.
fn a_loop_outlives_the_thread_that_began_its_operations(rig: &Rig) {
    let pair = std::thread::scope(|scope| scope.spawn(|| rig.pair()).join().unwrap());
    for round in 0..20u8 {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                pair.client.send(pair.to_server, &[round], &[]).unwrap();
                pair.client.progress().unwrap();
            });
        });
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let message = pair.server.receive(soon()).unwrap();
                assert_eq!(message.header, [round]);
                pair.server.send(pair.to_client, &message.header, &[1; 5000]).unwrap();
            });
        });
        assert_eq!(pair.client.receive(soon()).unwrap().header, [round]);
    }
}

/// Waits until somebody else turns the client's loop: nobody counts its frames then.
fn is_turned(pair: &Pair) {
    let began = Instant::now();
    while pair.client.counters().unwrap().frame_bytes > 0 && began.elapsed() < Duration::from_millis(50) {
        std::thread::yield_now();
    }
}

/// Has messages wait at the client.
fn send_ahead(pair: &Pair, messages: usize) {
    for _ in 0..messages {
        done(&pair.server.send(pair.to_client, b"ahead", &[]).unwrap());
    }
    for _ in 0..10 {
        pair.client.progress().unwrap();
    }
}

/// What comes first out of a wait for a group. (One that is over looks once more, and finds what nobody woke it for.)
#[track_caller]
fn first(waits: &mpsc::Receiver<Result<GroupCompletion, WaitError>>) -> u64 {
    let completion = waits.recv_timeout(Duration::from_secs(2)).expect("somebody is woken");
    completion.unwrap().context
}

fn what_had_ended_when_it_was_added_wakes_who_turns_the_loop(rig: &Rig) {
    let pair = rig.pair();
    let group = pair.client.group(8).unwrap();
    for round in 0..20 {
        send_ahead(&pair, 1);
        std::thread::scope(|scope| {
            let (waiting, waits) = mpsc::channel();
            let group = &group;
            scope.spawn(move || waiting.send(group.wait(soon())));
            is_turned(&pair);
            group.add(pair.client.start_receive(None).unwrap(), round).unwrap();
            assert_eq!(first(&waits), round);
        });
    }
}

/// Some of them have slept before one of them turned the loop.
fn what_had_ended_when_it_was_added_wakes_each_who_waits(rig: &Rig) {
    let pair = rig.pair();
    let group = pair.client.group(8).unwrap();
    for _ in 0..10 {
        send_ahead(&pair, 3);
        let turner = Turner::of(&pair.client);
        is_turned(&pair);
        std::thread::scope(|scope| {
            let (waiting, waits) = mpsc::channel();
            for _ in 0..3 {
                let (group, waiting) = (&group, waiting.clone());
                scope.spawn(move || waiting.send(group.wait(soon())));
            }
            std::thread::yield_now();
            drop(turner);
            is_turned(&pair);
            for context in 0..3 {
                group.add(pair.client.start_receive(None).unwrap(), context).unwrap();
            }
            let mut contexts = [(); 3].map(|()| first(&waits));
            contexts.sort_unstable();
            assert_eq!(contexts, [0, 1, 2]);
        });
    }
}
