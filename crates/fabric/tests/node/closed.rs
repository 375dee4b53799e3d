//! Windows that their owner closes while bytes are on their way into them: how the receiver of a payload cancels it.

use byway_fabric::node::{OpError, Outcome, Rights, WaitError};
use byway_fabric::windows::WindowError;

use crate::rig::{CANARY, Rig, Turner, Wire, canaries_are_whole, copy_of, done, end, pattern, soon};

crate::over_each_wire!(a_put_into_a_window_that_is_closed_meanwhile_is_refused_once);

crate::over_rdma!(a_put_into_a_window_that_is_closed_meanwhile_is_refused_once);

/// More than the buffers of any kernel between two sockets.
const LEN: usize = 16 << 20;
/// What is put.
const PUT: u8 = 0xb7;

fn a_put_into_a_window_that_is_closed_meanwhile_is_refused_once(rig: &Rig) {
    assert_ne!(pattern(CANARY), PUT, "the first byte that comes can be told");
    let pair = rig.pair();
    let (memory, window) = pair.open(LEN, Rights::BOTH);
    let (remote, mine) = (window.descriptor(), pair.client.register(LEN).unwrap());
    mine.write(0, &vec![PUT; LEN]).unwrap();
    let (result, left) = std::thread::scope(|scope| {
        let putting = scope.spawn(|| {
            let put = pair.client.put(pair.to_server, &[mine.segment(0..LEN)], &remote, 0).unwrap();
            let result = end(&put);
            assert_eq!(put.test(), Err(WaitError::Taken), "it ended once");
            // Whom the window was lent must say that it forgets it, also when its put is over.
            let turner = Turner::of(&pair.client);
            (result, turner)
        });
        let deadline = soon();
        let mut first = [0];
        while first != [PUT] {
            assert!(!deadline.left().is_some_and(|left| left.is_zero()), "nothing comes");
            // Over the other wires the client, or its device, writes by itself.
            if !matches!(rig.wire, Wire::Lent | Wire::Rdma) {
                pair.server.progress().unwrap();
            }
            memory.read(CANARY, &mut first).unwrap();
        }
        let close = window.close().unwrap();
        done(&close);
        // Whatever is still on its way comes too late.
        let left = copy_of(&memory);
        let _server = Turner::of(&pair.server);
        (putting.join().unwrap().0, left)
    });
    let put = |byte: &u8| *byte == PUT;
    match result {
        // Who writes by itself may have been through before.
        Ok(Outcome::Done) if matches!(rig.wire, Wire::Lent | Wire::Rdma) => {
            assert!(left[CANARY..CANARY + LEN].iter().all(put), "it is said to lie there");
        }
        // A device that is refused ends the session.
        Err(OpError::Ended(_)) if rig.wire == Wire::Rdma => {}
        other => assert_eq!(other, Err(OpError::Refused(WindowError::Key))),
    }
    assert!(copy_of(&memory) == left, "written after it was closed");
    let is_right = |(at, byte): (usize, &u8)| put(byte) || *byte == pattern(CANARY + at);
    assert!(left[CANARY..CANARY + LEN].iter().enumerate().all(is_right));
    canaries_are_whole(&memory);
    assert!(!memory.is_in_use() && !mine.is_in_use());
    assert_eq!(pair.server.counters().unwrap().windows, 0);
    if rig.wire == Wire::Rdma {
        return;
    }
    // The session goes on, also for puts, into the same memory.
    let again = pair.server.open_window(pair.to_client, &memory, CANARY..CANARY + LEN, Rights::PUT).unwrap();
    let turner = Turner::of(&pair.server);
    done(&pair.client.put(pair.to_server, &[mine.segment(0..LEN)], &again.descriptor(), 0).unwrap());
    done(&pair.client.send(pair.to_server, b"goes on", &[]).unwrap());
    drop(turner);
    assert_eq!(pair.server.receive(soon()).unwrap().header, b"goes on");
    assert!(copy_of(&memory)[CANARY..CANARY + LEN].iter().all(put));
    canaries_are_whole(&memory);
}
