//! Gets into memory that is only borrowed, and puts from it.

use std::collections::BTreeSet;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::time::Duration;

use byway_fabric::limits::ASKED_MAX;
use byway_fabric::node::{Deadline, NodeError, NodeOptions, OpError, Outcome, Rights, SubmitError};
use byway_fabric::session::PayloadChecksum;
use byway_fabric::windows::WindowError;
use byway_reactor::IoChoice;

use crate::rig::{CANARY, Rig, Turner, Wire, canaries_are_whole, copy_of, done, end, pattern, soon};

crate::over_each_wire!(
    borrowed_bytes_come_and_go,
    who_gives_up_has_his_memory_for_himself,
    who_gives_up_before_it_has_begun_ends_nothing_else,
    many_threads_borrow_at_once,
);

/// The role of a child, by the environment: the test itself in a process of its own, whose end tells.
const CHILD: &str = "BYWAY_TEST_CLOSES_DESCRIPTORS";

/// A program that closes all descriptors in the middle of a call (`closefrom`) has the call fail, and goes on.
#[test]
fn a_program_that_loses_the_nodes_descriptors_goes_on() {
    if std::env::var_os(CHILD).is_some() {
        for wire in [Wire::Tcp, Wire::Unix, Wire::Shm] {
            lose_descriptors(&Rig::new(wire, IoChoice::Epoll));
            lose_descriptors(&Rig::new(wire, IoChoice::Uring));
        }
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "borrowed::a_program_that_loses_the_nodes_descriptors_goes_on"]).env(CHILD, "1");
    let ended = child.output().unwrap();
    assert!(ended.status.success(), "{}: {}", ended.status, String::from_utf8_lossy(&ended.stderr));
}

fn open_descriptors() -> BTreeSet<i32> {
    let names = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().file_name());
    names.map(|name| name.to_str().unwrap().parse().unwrap()).collect()
}

/// The server is not turned, so the get is under way when its deadline has passed, or waiting fails.
fn lose_descriptors(rig: &Rig) {
    let before = open_descriptors();
    let pair = rig.pair();
    let memory = pair.server.register(1 << 20).unwrap();
    let window = pair.server.open_window(pair.to_client, &memory, 0..1 << 20, Rights::BOTH).unwrap();
    let remote = window.descriptor();
    let nothing = std::fs::File::open("/dev/null").unwrap();
    for descriptor in open_descriptors().difference(&before) {
        if *descriptor != nothing.as_raw_fd() {
            // SAFETY: a descriptor of the nodes', which stays open, as what a program opened after it closed it.
            unsafe { libc::dup2(nothing.as_raw_fd(), *descriptor) };
        }
    }
    let mut mine = vec![1; 1 << 20];
    let soon_over = || Deadline::after(Duration::from_millis(200));
    assert!(pair.client.get_into(pair.to_server, &remote, 0, &mut mine, soon_over()).is_err());
    assert!(mine.iter().all(|byte| *byte == 1), "it failed, so nothing was touched");
    assert!(pair.client.put_from(pair.to_server, &mine, &remote, 0, soon_over()).is_err());
    // What still uses the nodes' descriptors ends with the process.
    let _ = ManuallyDrop::new((pair, window, memory));
}

fn borrowed_bytes_come_and_go(rig: &Rig) {
    for checksum in [PayloadChecksum::Off, PayloadChecksum::Required] {
        let pair = rig.pair_of(&NodeOptions { checksum, ..rig.options() });
        let _turner = Turner::of(&pair.server);
        for len in [1, 4096, 70_001, (3 << 20) + 17] {
            let (memory, window) = pair.open(len, Rights::BOTH);
            let remote = window.descriptor();
            // Not at the start of a page, and something beside it.
            let mut mine = vec![0xee; len + 9];
            pair.client.get_into(pair.to_server, &remote, 0, &mut mine[5..len + 5], soon()).unwrap();
            assert!((0..len).all(|at| mine[5 + at] == pattern(CANARY + at)), "{len}");
            assert!(mine[..5].iter().chain(&mine[len + 5..]).all(|byte| *byte == 0xee), "{len}");
            let put: Vec<u8> = (0..len).map(|at| pattern(at) ^ 0xff).collect();
            pair.client.put_from(pair.to_server, &put, &remote, 0, soon()).unwrap();
            assert!(copy_of(&memory)[CANARY..CANARY + len] == put, "{len}");
            canaries_are_whole(&memory);
            pair.client.get_into(pair.to_server, &remote, 0, &mut [], Deadline::now()).unwrap();
            pair.close(window);
            let late = pair.client.get_into(pair.to_server, &remote, 0, &mut mine[..1], soon());
            assert_eq!(late, Err(NodeError::Op(OpError::Refused(WindowError::Key))));
            let beyond = pair.client.put_from(pair.to_server, &put, &remote, 1, soon());
            assert_eq!(beyond, Err(NodeError::Submit(SubmitError::OutOfRange)));
        }
    }
}

/// Nobody turns the server: what was asked for comes late, when the memory is another's.
fn who_gives_up_has_his_memory_for_himself(rig: &Rig) {
    for put in [false, true] {
        let pair = rig.pair();
        let len = 3 << 20;
        // Private, so that the server has to do something.
        let memory = pair.server.register(len).unwrap();
        memory.write(0, &vec![7; len]).unwrap();
        let window = pair.server.open_window(pair.to_client, &memory, 0..len, Rights::BOTH).unwrap();
        let remote = window.descriptor();
        let mut mine = vec![1; len];
        let soon_over = Deadline::after(Duration::from_millis(20));
        let given_up = if put {
            pair.client.put_from(pair.to_server, &mine, &remote, 0, soon_over)
        } else {
            pair.client.get_into(pair.to_server, &remote, 0, &mut mine, soon_over)
        };
        assert_eq!(given_up, Err(NodeError::Op(OpError::Deadline)));
        // It is ours again: whatever we write there stays.
        mine.fill(2);
        let turner = Turner::of(&pair.server);
        let ended = pair.client.start_receive(None).unwrap();
        assert!(matches!(end(&ended), Ok(Outcome::Ended(session, _)) if session == pair.to_server));
        drop(turner);
        assert!(mine.iter().all(|byte| *byte == 2), "put: {put}");
        let gone = pair.client.get_into(pair.to_server, &remote, 0, &mut mine, soon());
        assert_eq!(gone, Err(NodeError::Submit(SubmitError::NoSession)));
        // What the operation had is let go of as the node is turned.
        let deadline = soon();
        loop {
            let counters = pair.client.counters().unwrap();
            if (counters.ops, counters.windows) == (0, 0) {
                break;
            }
            assert!(deadline.left().is_some_and(|left| !left.is_zero()), "{counters:?}");
            pair.client.progress().unwrap();
        }
    }
}

/// What it waits behind is another's: its session goes on.
fn who_gives_up_before_it_has_begun_ends_nothing_else(rig: &Rig) {
    let pair = rig.pair();
    // Private, so that the peer is asked.
    let memory = pair.server.register(8192).unwrap();
    let window = pair.server.open_window(pair.to_client, &memory, 0..8192, Rights::BOTH).unwrap();
    let mine = pair.client.register(64).unwrap();
    let ranges: Vec<_> = (0..64u64).map(|at| at * 128..at * 128 + 1).collect();
    let get = || pair.client.get_ranges(pair.to_server, &window.descriptor(), &ranges, &[mine.segment(0..64)]).unwrap();
    let gets: Vec<_> = (0..=ASKED_MAX / 64).map(|_| get()).collect();
    let mut borrowed = [1; 100];
    for _ in 0..3 {
        let soon_over = || Deadline::after(Duration::from_millis(20));
        let got = pair.client.get_into(pair.to_server, &window.descriptor(), 0, &mut borrowed, soon_over());
        assert_eq!(got, Err(NodeError::Op(OpError::Deadline)));
        let put = pair.client.put_from(pair.to_server, &borrowed, &window.descriptor(), 0, soon_over());
        assert_eq!(put, Err(NodeError::Op(OpError::Deadline)));
    }
    let (cancelled, last) = (get(), get());
    cancelled.cancel().unwrap();
    assert_eq!(end(&cancelled), Err(OpError::Cancelled));
    let _turner = Turner::of(&pair.server);
    gets.iter().chain([&last]).for_each(done);
    assert_eq!((borrowed, copy_of(&memory)), ([1; 100], vec![0; 8192]));
    pair.client.get_into(pair.to_server, &window.descriptor(), 0, &mut borrowed, soon()).unwrap();
    assert_eq!(borrowed, [0; 100]);
}

fn many_threads_borrow_at_once(rig: &Rig) {
    let pair = rig.pair();
    let turner = Turner::of(&pair.server);
    let (memory, window) = pair.open(8 * 50_000, Rights::BOTH);
    let (client, to_server, remote) = (&pair.client, pair.to_server, window.descriptor());
    std::thread::scope(|scope| {
        for thread in 0..8u8 {
            scope.spawn(move || {
                let (mut mine, offset) = (vec![0; 50_000], u64::from(thread) * 50_000);
                for round in 0..20u8 {
                    let value = round.wrapping_mul(8) + thread;
                    client.put_from(to_server, &vec![value; 50_000], &remote, offset, soon()).unwrap();
                    client.get_into(to_server, &remote, offset, &mut mine, soon()).unwrap();
                    assert!(mine.iter().all(|byte| *byte == value), "thread {thread}, round {round}");
                }
            });
        }
    });
    canaries_are_whole(&memory);
    drop(turner);
}
