//! Windows for one of several peers, and ranges of one window.

use std::time::{Duration, Instant};

use byway_fabric::node::{Node, NodeError, NodeOptions, OpError, Outcome, Rights, Session, SubmitError};
use byway_fabric::windows::WindowError;

use crate::rig::{
    CANARY, Rig, Turner, canaries_are_whole, connect, copy_of, done, end, pattern, prevent_registration, soon,
    window_is_all,
};

crate::over_each_wire!(
    a_window_for_one_of_several_is_the_first_ones,
    a_window_for_several_goes_with_the_last_of_them,
    scattered_ranges_are_one_operation,
    a_message_follows_a_put_into_one_range,
    a_message_behind_a_put_that_is_refused_takes_no_credit,
);

crate::over_rdma!(a_window_that_cannot_be_registered_fails_alone);

fn a_window_that_cannot_be_registered_fails_alone(rig: &Rig) {
    let pair = rig.pair();
    let memory = pair.server.register(8192).unwrap();
    prevent_registration(&memory);
    for rights in [Rights::PUT, Rights::BOTH] {
        let refused = pair.server.open_window(pair.to_client, &memory, 0..8192, rights).err();
        assert!(matches!(refused, Some(NodeError::Op(OpError::Rdma(_)))), "{refused:?}");
    }
    assert!(!memory.is_in_use());
    assert_eq!(pair.server.counters().unwrap().windows, 0);
    // The session goes on, and has other windows.
    let _turner = Turner::of(&pair.server);
    let (memory, window) =
        pair.window(9000, |memory, range| pair.server.open_window(pair.to_client, memory, range, Rights::PUT).unwrap());
    let mine = pair.client.register(9000).unwrap();
    mine.write(0, &[5; 9000]).unwrap();
    done(&pair.client.put(pair.to_server, &[mine.segment(0..9000)], &window.descriptor(), 0).unwrap());
    assert!(copy_of(&memory)[CANARY..CANARY + 9000].iter().all(|byte| *byte == 5));
    canaries_are_whole(&memory);
}

/// Nodes with a session with `server` each: as the server calls it, and as they do.
fn others(rig: &Rig, server: &Node, count: usize) -> Vec<(Node, Session, Session)> {
    let one = |_| {
        let (node, address) = (rig.node(), rig.listen(server));
        let (to_node, to_server) = connect(server, &node, &address);
        (node, to_node, to_server)
    };
    (0..count).map(one).collect()
}

fn a_window_for_one_of_several_is_the_first_ones(rig: &Rig) {
    let pair = rig.pair();
    let others = others(rig, &pair.server, 3);
    let sessions: Vec<Session> = others[..2].iter().map(|(_, session, _)| *session).chain([pair.to_client]).collect();
    let turner = Turner::of(&pair.server);
    for round in 0..6u8 {
        let (memory, window) = pair.window(5000, |memory, range| {
            pair.server.open_window_for_one_of(&sessions, memory, range, Rights::PUT).unwrap()
        });
        assert_eq!(window.sessions(), sessions);
        let token = window.descriptor();
        // All three at once: one of them is the first, whoever it is.
        let mut askers = vec![(&pair.client, pair.to_server, 0)];
        askers.extend(others[..2].iter().zip(1..).map(|((node, _, to_server), name)| (node, *to_server, name)));
        askers.rotate_left(usize::from(round) % 3);
        let memories: Vec<_> = askers.iter().map(|(node, ..)| node.register(5000).unwrap()).collect();
        let puts: Vec<_> = askers
            .iter()
            .zip(&memories)
            .map(|((node, session, name), mine)| {
                mine.write(0, &[name + 1; 5000]).unwrap();
                node.put(*session, &[mine.segment(0..5000)], &token, 0).unwrap()
            })
            .collect();
        let results: Vec<_> = puts.iter().map(end).collect();
        let winner = results.iter().position(|result| *result == Ok(Outcome::Done)).expect("one is the first");
        for (index, result) in results.iter().enumerate().filter(|(index, _)| *index != winner) {
            let late = matches!(result, Err(OpError::Refused(WindowError::Key | WindowError::Busy)));
            assert!(late, "{index}: {result:?}");
        }
        let wrote = askers[winner].2 + 1;
        window_is_all(&memory, wrote);
        // Somebody whom it was not opened for, and the first once more.
        for (node, session) in [(&others[2].0, others[2].2), (askers[winner].0, askers[winner].1)] {
            let mine = node.register(10).unwrap();
            let refused = end(&node.put(session, &[mine.segment(0..10)], &token, 0).unwrap());
            assert_eq!(refused, Err(OpError::Refused(WindowError::Key)));
        }
        canaries_are_whole(&memory);
        done(&window.close().unwrap());
        assert!(!memory.is_in_use());
    }
    drop(turner);
    let counters = pair.server.counters().unwrap();
    assert_eq!((counters.windows, counters.windows_refused), (0, 6 * 4), "each that was late is counted");
    let memory = pair.server.register(100).unwrap();
    let open = |sessions: &[Session]| pair.server.open_window_for_one_of(sessions, &memory, 0..100, Rights::PUT);
    let many = vec![pair.to_client; byway_fabric::limits::WINDOW_SESSIONS_MAX + 1];
    assert!(matches!(open(&many), Err(NodeError::Submit(SubmitError::TooLong))));
    assert!(open(&[]).is_err());
    pair.server.close(pair.to_client).unwrap();
    assert!(matches!(open(&sessions), Err(NodeError::Submit(SubmitError::NoSession))));
}

fn a_window_for_several_goes_with_the_last_of_them(rig: &Rig) {
    let pair = rig.pair();
    let mut others = others(rig, &pair.server, 1);
    let (other, to_other, other_to_server) = others.remove(0);
    let (mut memory, window) = pair.window(5000, |memory, range| {
        pair.server.open_window_for_one_of(&[to_other, pair.to_client], memory, range, Rights::BOTH).unwrap()
    });
    let token = window.descriptor();
    let gone = |session: Session| {
        let ended = pair.server.start_receive(None).unwrap();
        assert!(matches!(end(&ended), Ok(Outcome::Ended(other, _)) if other == session));
    };
    drop(other);
    gone(to_other);
    // The other one can use it still.
    let turner = Turner::of(&pair.server);
    let mine = pair.client.register(5000).unwrap();
    done(&pair.client.get(pair.to_server, &token, 0, &[mine.segment(0..5000)]).unwrap());
    assert!((0..5000).all(|at| mine.bytes().unwrap()[at] == pattern(CANARY + at)));
    drop(turner);
    assert_eq!(pair.server.counters().unwrap().windows, 1, "for the put");
    drop(pair.client);
    gone(pair.to_client);
    // The window goes when nothing of the session is left, which the program is not told.
    let deadline = Instant::now() + Duration::from_secs(20);
    while pair.server.counters().unwrap().windows > 0 {
        assert!(Instant::now() < deadline, "the window stays open");
        let _ = pair.server.receive(Duration::from_millis(1));
    }
    done(&window.close().unwrap());
    memory.bytes_mut().expect("what can be used once is not lent to anybody");
    let _ = other_to_server;
}

fn scattered_ranges_are_one_operation(rig: &Rig) {
    let pair = rig.pair();
    let turner = Turner::of(&pair.server);
    let len = 4 << 20;
    let (memory, window) = pair.open(len, Rights::BOTH);
    let remote = window.descriptor();
    // Frames here and there, and one of more than a message takes; into memory that is cut up otherwise.
    let mut ranges: Vec<std::ops::Range<u64>> =
        (0..62).map(|n| (n * 37 % 62) * 8192..(n * 37 % 62) * 8192 + 4096).collect();
    ranges.extend([(1 << 20) + 5..(3 << 20) + 100, 7..7]);
    let all: usize = ranges.iter().map(|range| (range.end - range.start) as usize).sum();
    let mine = pair.client.register(all + 20).unwrap();
    let segments = [mine.segment(3..1000), mine.segment(1000..1000), mine.segment(1010..all + 13)];
    done(&pair.client.get_ranges(pair.to_server, &remote, &ranges, &segments).unwrap());
    let place = |at: usize| if at < 997 { at + 3 } else { at + 13 };
    let remote_bytes = || ranges.iter().flat_map(|range| range.start as usize..range.end as usize);
    {
        let bytes = mine.bytes().unwrap();
        let differs = remote_bytes().enumerate().find(|(at, from)| bytes[place(*at)] != pattern(CANARY + from));
        assert_eq!(differs, None);
        assert!([0, 1, 2].iter().chain(&(1000..1010).collect::<Vec<_>>()).all(|at| bytes[*at] == 0), "beside them");
    }
    mine.write(0, &vec![0x77; all + 20]).unwrap();
    done(&pair.client.put_ranges(pair.to_server, &segments, &remote, &ranges).unwrap());
    let mut wanted: Vec<u8> = (0..memory.len()).map(pattern).collect();
    remote_bytes().for_each(|at| wanted[CANARY + at] = 0x77);
    assert!(copy_of(&memory) == wanted, "those ranges and nothing else");
    // What does not fit is not begun.
    let get = |ranges: &[std::ops::Range<u64>], bytes: usize| {
        pair.client.get_ranges(pair.to_server, &remote, ranges, &[mine.segment(0..bytes)]).map(drop)
    };
    let end = len as u64;
    assert_eq!(get(&[0..10, 20..30], 19), Err(SubmitError::OutOfRange));
    assert_eq!(get(&[0..10, end - 5..end + 5], 20), Err(SubmitError::OutOfRange));
    assert_eq!(get(&[0..u64::MAX, 0..u64::MAX], 20), Err(SubmitError::OutOfRange));
    assert_eq!(get(&vec![0..1; 65], 65), Err(SubmitError::TooLong));
    let backwards = std::ops::Range { start: 10, end: 0 };
    assert_eq!(get(&[backwards], 0), Err(SubmitError::OutOfRange));
    assert_eq!(get(&[], 0), Ok(()));
    // One that the peer refuses fails the whole, once.
    pair.close(window);
    let refused = pair.client.get_ranges(pair.to_server, &remote, &[0..10, 50..60], &[mine.segment(0..20)]).unwrap();
    assert_eq!(crate::rig::end(&refused), Err(OpError::Refused(WindowError::Key)));
    drop(turner);
}

fn a_message_follows_a_put_into_one_range(rig: &Rig) {
    let pair = rig.pair();
    let (memory, window) = pair.open(9000, Rights::PUT);
    let client = std::thread::spawn(move || {
        let mine = pair.client.register(100).unwrap();
        mine.write(0, &[6; 100]).unwrap();
        let to = window.descriptor();
        done(&pair.client.put_with_message(pair.to_server, &[mine.segment(0..100)], &to, 8000, b"there").unwrap());
        window
    });
    assert_eq!(pair.server.receive(crate::rig::soon()).unwrap().header, b"there");
    assert_eq!(copy_of(&memory)[CANARY + 8000..CANARY + 8100], [6; 100]);
    let _turner = Turner::of(&pair.server);
    drop(client.join().unwrap());
}

/// The simulation of calls found that each such put cost a credit for ever.
fn a_message_behind_a_put_that_is_refused_takes_no_credit(rig: &Rig) {
    let pair = rig.pair_of(&NodeOptions { messages: 2, ..rig.options() });
    let (_memory, window) = pair.open(5000, Rights::PUT);
    let closed = window.descriptor();
    pair.close(window);
    let _turner = Turner::of(&pair.server);
    let mine = pair.client.register(5000).unwrap();
    for _ in 0..4 {
        let put = pair.client.put_with_message(pair.to_server, &[mine.segment(0..5000)], &closed, 0, b"lies there");
        let result = end(&put.unwrap());
        assert_eq!(result, Err(OpError::Refused(WindowError::Key)));
    }
    done(&pair.client.send(pair.to_server, b"all is well", &[]).unwrap());
    assert_eq!(pair.server.receive_from(pair.to_client, soon()).unwrap().header, b"all is well");
}
