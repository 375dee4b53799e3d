//! Handles, timers, cancelling and waking.

use std::time::Duration;

use byway_reactor::limits::OPS_MAX;
use byway_reactor::{Errno, FileOptions, Instant, Op, Outcome, Token, Wait};

use crate::rig::Rig;

pub fn cancelled_operations_complete(rig: &mut Rig) {
    let (listener, address) = rig.listen(1, "cancelled");
    let accept = rig.submit(1, Op::Accept { listener });
    rig.settle();
    rig.loops[1].cancel(accept);
    assert!(matches!(rig.wait(1, accept), Outcome::Accepted(Err(Errno::CANCELED))));
    let timer = rig.submit(0, Op::Timer { at: Instant::FAR });
    rig.loops[0].cancel(timer);
    assert!(matches!(rig.wait(0, timer), Outcome::TimedOut(Err(Errno::CANCELED))));
    let connect = rig.submit(0, Op::Connect { to: address });
    rig.loops[0].cancel(connect);
    let ended = rig.wait(0, connect);
    assert!(matches!(ended, Outcome::Connected(Ok(_) | Err(Errno::CANCELED))), "{ended:?}");
    rig.loops[1].close_listener(listener);

    let (client, _server) = rig.connect();
    let receive = rig.start_receive(0, client, 1000, 1);
    rig.settle();
    rig.loops[0].cancel(receive);
    assert_eq!(rig.received(0, receive), Err(Errno::CANCELED));
    rig.loops[0].cancel(receive);
    rig.settle();
    assert!(rig.taken(0, receive).is_none(), "an operation completes once");
    rig.assert_pools_full();
}

pub fn stale_handles_answer_ebadf(rig: &mut Rig) {
    let (client, _server) = rig.connect();
    rig.loops[0].close(client);
    assert_eq!(rig.receive(0, client, 10, 1), Err(Errno::BADF));
    assert_eq!(rig.send(0, client, b"x"), Err(Errno::BADF));
    assert_eq!(rig.loops[0].peer_address(client), None);
    rig.loops[0].close(client);
    let (listener, _) = rig.listen(0, "listener");
    rig.loops[0].close_listener(listener);
    assert!(matches!(rig.run(0, Op::Accept { listener }), Outcome::Accepted(Err(Errno::BADF))));
    assert_eq!(rig.loops[0].local_address(listener), None);
    let file = rig.open("stale", 4096, FileOptions::default());
    rig.loops[0].remove_file(file);
    assert_eq!(rig.read(file, 0, 10), Err(Errno::BADF));
    assert_eq!(rig.write(file, 0, b"x", false), Err(Errno::BADF));
    assert!(matches!(rig.run(0, Op::Sync { file }), Outcome::Synced(Err(Errno::BADF))));
    assert_eq!(rig.loops[0].try_write(file, 0, b"x"), Err(Errno::BADF));
    rig.assert_pools_full();
}

pub fn timers_come_in_order_and_not_early(rig: &mut Rig) {
    let began = rig.loops[0].now();
    let after = [30u64, 10, 20, 0, 10];
    let tokens = after.map(|millis| rig.submit(0, Op::Timer { at: began + Duration::from_millis(millis) }));
    let mut done = Vec::new();
    while done.len() < after.len() {
        for completion in rig.reaped(0) {
            let place = tokens.iter().position(|token| *token == completion.token).expect("one of the timers");
            assert!(matches!(completion.outcome, Outcome::TimedOut(Ok(()))));
            let passed = rig.loops[0].now().since(began);
            assert!(passed >= Duration::from_millis(after[place]), "{} ms came after {passed:?}", after[place]);
            done.push(place);
        }
        rig.turn();
    }
    assert_eq!(done, [3, 1, 4, 2, 0]);
}

pub fn too_many_operations_are_refused(rig: &mut Rig) {
    let token = rig.token();
    for _ in 0..OPS_MAX {
        rig.loops[0].submit(Op::Timer { at: Instant::FAR }, token);
    }
    let one_more = rig.submit(0, Op::Timer { at: Instant::FAR });
    assert!(matches!(rig.wait(0, one_more), Outcome::TimedOut(Err(Errno::AGAIN))));
    let file = rig.open("refused", 4096, FileOptions::default());
    assert_eq!(rig.read(file, 0, 10), Err(Errno::AGAIN));
    rig.loops[0].cancel(token);
    assert!(matches!(rig.wait(0, token), Outcome::TimedOut(Err(Errno::CANCELED))));
    assert_eq!(rig.read(file, 0, 10).map(|bytes| bytes.len()), Ok(10));
}

pub fn another_thread_wakes_the_loop(rig: &mut Rig) {
    let waker = rig.loops[0].waker();
    let thread = std::thread::spawn(move || waker.wake());
    if !rig.is_real() {
        // A simulated loop does not wait; it sees the wake at its next turn.
        thread.join().expect("the thread ends");
        return assert!(matches!(rig.wait(0, Token::WAKE), Outcome::Woken));
    }
    let mut done = Vec::new();
    while done.is_empty() {
        rig.loops[0].reap(&mut done, Wait::Block).expect("a loop reaps");
    }
    thread.join().expect("the thread ends");
    assert_eq!(done.len(), 1);
    assert_eq!(done[0].token, Token::WAKE);
    assert!(matches!(done[0].outcome, Outcome::Woken));
}
