//! What a node's operations cost beside moving bytes: locks, and wake-ups of threads. Builds without debug assertions count neither.
#![cfg(debug_assertions)]

mod turned_pair;

use std::time::{Duration, Instant};

use byway_fabric::node::lock::{Cost, cost};
use byway_fabric::node::{Address, NodeOptions, Op, Outcome, Rights, parse_address};
use turned_pair::{PATIENCE, Pair};

/// Operations before the counted ones: the peer knows the windows then.
const WARM_UP: u64 = 100;
const COUNTED: u64 = 100;
/// An answer that was sent is there within this time.
const ANSWER_TIME: Duration = Duration::from_millis(50);
const BYTES: usize = 4096;

fn addresses(folder: &tempfile::TempDir) -> [Address; 2] {
    [parse_address("tcp://127.0.0.1:0").unwrap(), Address::Shared(folder.path().join("socket"))]
}

/// What `act` costs the calling thread.
fn cost_of<T>(act: impl FnOnce() -> T) -> (T, Cost) {
    let before = cost();
    let result = act();
    let after = cost();
    (result, Cost { locks: after.locks - before.locks, wakes: after.wakes - before.wakes })
}

/// Tables and engine to begin, tables to note what has ended; the same for a wait that turns the loop once, and the tables alone to
/// take a result that is there. A turn that brings nothing for the operation adds one.
#[test]
fn an_operation_takes_few_locks() {
    let folder = tempfile::tempdir().unwrap();
    for address in addresses(&folder) {
        let pair = Pair::new(&address, &NodeOptions::default());
        let theirs = pair.server.register_shared(BYTES).unwrap();
        let mine = pair.client.register(BYTES).unwrap();
        let window = pair.server.open_window(pair.to_client, &theirs, 0..BYTES, Rights::BOTH).unwrap();
        let to = window.descriptor();
        let put = || pair.client.put(pair.to_server, &[mine.segment(0..BYTES)], &to, 0).unwrap();
        let get = || pair.client.get(pair.to_server, &to, 0, &[mine.segment(0..BYTES)]).unwrap();
        let send = || pair.client.send(pair.to_server, b"header", b"payload").unwrap();
        for (name, begin, allowed) in [("put", &put as &dyn Fn() -> Op, 7), ("get", &get, 7), ("send", &send, 4)] {
            let (mut locks, mut counted, mut begun_in_all) = (0, 0, 0);
            while counted < COUNTED {
                begun_in_all += 1;
                assert!(begun_in_all < 100 * COUNTED, "{name} is never answered in time");
                let (op, begun) = cost_of(begin);
                for _ in 0..4 {
                    pair.server.progress().unwrap();
                }
                // On a busy machine what was sent may reach a node later than this: such an operation does not count.
                let (outcome, waited) = cost_of(|| op.wait(ANSWER_TIME));
                let is_counted = begun_in_all > WARM_UP && outcome.is_ok();
                match outcome {
                    Ok(outcome) => assert_eq!(outcome, Ok(Outcome::Done)),
                    Err(_) => pair.end(&op),
                }
                let ((), dropped) = cost_of(|| drop(op));
                if is_counted {
                    counted += 1;
                    assert!(begun.locks <= 3, "{name} begins with {} locks over {address:?}", begun.locks);
                    assert_eq!(dropped.locks, 0, "the handle of a {name} whose result was taken");
                    locks += begun.locks + waited.locks;
                }
                while name == "send" && pair.server.receive(Duration::ZERO).is_ok() {}
            }
            // Credit that comes back may cost a few more.
            assert!(
                locks <= allowed * COUNTED + COUNTED / 10,
                "{COUNTED} of {name} took {locks} locks over {address:?}"
            );
        }
        let close = window.close().unwrap();
        pair.end(&close);
    }
}

#[test]
fn a_message_that_is_there_is_received_with_two_locks() {
    let folder = tempfile::tempdir().unwrap();
    for address in addresses(&folder) {
        let pair = Pair::new(&address, &NodeOptions::default());
        let send = pair.client.send(pair.to_server, b"header", b"").unwrap();
        pair.end(&send);
        let (message, taken) = cost_of(|| pair.server.receive(PATIENCE).unwrap());
        assert_eq!(message.header, b"header");
        assert_eq!(taken.locks, 2, "to begin, and to take the result");
    }
}

/// What a thread waits for it finds itself, in the turn that brings it: no futex and no eventfd is written.
#[test]
fn a_thread_that_drives_the_loop_wakes_no_thread() {
    let folder = tempfile::tempdir().unwrap();
    for address in addresses(&folder) {
        let pair = Pair::new(&address, &NodeOptions::default());
        let (server, client) = (&pair.server, &pair.client);
        let echo = || {
            for _ in 0..COUNTED {
                let message = server.receive(PATIENCE).unwrap();
                let answer = server.send(pair.to_client, &message.header, b"").unwrap();
                answer.wait(PATIENCE).unwrap().unwrap();
            }
            cost().wakes
        };
        let (asking, echoing) = std::thread::scope(|scope| {
            let echo = scope.spawn(echo);
            let ((), cost) = cost_of(|| {
                for _ in 0..COUNTED {
                    let ask = client.send(pair.to_server, b"again", b"").unwrap();
                    assert_eq!(client.receive(PATIENCE).unwrap().header, b"again");
                    ask.wait(PATIENCE).unwrap().unwrap();
                }
            });
            (cost.wakes, echo.join().unwrap())
        });
        assert_eq!((asking, echoing), (0, 0), "over {address:?}");
    }
}

/// The counter counts: a thread whose operation another one has to carry out wakes it.
#[test]
fn a_thread_that_begins_an_operation_beside_the_driver_wakes_it() {
    let folder = tempfile::tempdir().unwrap();
    let pair = Pair::new(&addresses(&folder)[0], &NodeOptions::default());
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| pair.client.receive(PATIENCE).unwrap());
        let began = Instant::now();
        loop {
            let (send, begun) = cost_of(|| pair.client.send(pair.to_server, b"beside", b"").unwrap());
            send.wait(PATIENCE).unwrap().unwrap();
            pair.server.receive(PATIENCE).unwrap();
            if begun.wakes > 0 {
                break;
            }
            assert!(began.elapsed() < PATIENCE, "no thread has been woken");
        }
        let end = pair.server.send(pair.to_client, b"end", b"").unwrap();
        end.wait(PATIENCE).unwrap().unwrap();
        assert_eq!(waits.join().unwrap().header, b"end");
    });
}

/// Behind a thread that waits in the background, operations wake no thread: it drives the loop only when no other does.
#[test]
fn a_thread_that_waits_in_the_background_is_seldom_woken() {
    let folder = tempfile::tempdir().unwrap();
    for address in addresses(&folder) {
        let pair = Pair::new(&address, &NodeOptions::default());
        let (server, client) = (&pair.server, &pair.client);
        std::thread::scope(|scope| {
            let last = client.start_receive(Some(pair.to_server)).unwrap();
            let waits = scope.spawn(move || last.wait_in_background(PATIENCE).unwrap().unwrap());
            let send = || {
                let send = client.send(pair.to_server, b"beside", b"").unwrap();
                send.wait(PATIENCE).unwrap().unwrap();
                server.receive(PATIENCE).unwrap();
            };
            let began = Instant::now();
            // On a busy machine this thread may pause between operations, and the other drives meanwhile.
            while cost_of(|| (0..COUNTED).for_each(|_| send())).1.wakes > COUNTED / 2 {
                assert!(began.elapsed() < PATIENCE, "operations wake the thread in the background");
            }
            server.send(pair.to_client, b"end", b"").unwrap().wait(PATIENCE).unwrap().unwrap();
            assert!(matches!(waits.join().unwrap(), Outcome::Message(message) if message.header == b"end"));
        });
    }
}
