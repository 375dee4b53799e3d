//! What a node's operations cost beside moving bytes: locks, and wake-ups of threads. Builds without debug assertions count neither.
#![cfg(debug_assertions)]

use std::time::{Duration, Instant};

use byway_fabric::node::lock::{Cost, cost};
use byway_fabric::node::{Address, Node, NodeOptions, Op, Outcome, Rights, Session, WaitError, parse_address};

/// Whatever hangs, hangs for so long.
const PATIENCE: Duration = Duration::from_secs(20);
/// Operations before the counted ones: the peer knows the windows then.
const WARM_UP: usize = 100;
const COUNTED: u64 = 100;
const BYTES: usize = 4096;

/// Two nodes with a session.
struct Pair {
    server: Node,
    client: Node,
    to_client: Session,
    to_server: Session,
}

impl Pair {
    fn new(address: &Address) -> Self {
        let options = NodeOptions::default();
        let (server, client) = (Node::open(&options).unwrap(), Node::open(&options).unwrap());
        let bound = server.listen(address).unwrap();
        let address = bound.map_or_else(|| address.clone(), Address::Tcp);
        let (accept, connect) = (server.start_accept().unwrap(), client.start_connect(&address).unwrap());
        let [to_server, to_client] = [&connect, &accept].map(|op| match turn_until_ended(&[&server, &client], op) {
            Outcome::Session(session) => session,
            other => panic!("{other:?}"),
        });
        Self { server, client, to_client, to_server }
    }
}

fn turn_until_ended(nodes: &[&Node], op: &Op) -> Outcome {
    let began = Instant::now();
    loop {
        for node in nodes {
            node.progress().unwrap();
        }
        match op.test() {
            Ok(result) => return result.unwrap(),
            Err(WaitError::Deadline) => assert!(began.elapsed() < PATIENCE, "the operation does not end"),
            Err(error) => panic!("{error}"),
        }
    }
}

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
        let pair = Pair::new(&address);
        let theirs = pair.server.register_shared(BYTES).unwrap();
        let mine = pair.client.register(BYTES).unwrap();
        let window = pair.server.open_window(pair.to_client, &theirs, 0..BYTES, Rights::BOTH).unwrap();
        let to = window.descriptor();
        let put = || pair.client.put(pair.to_server, &[mine.segment(0..BYTES)], &to, 0).unwrap();
        let get = || pair.client.get(pair.to_server, &to, 0, &[mine.segment(0..BYTES)]).unwrap();
        let send = || pair.client.send(pair.to_server, b"header", b"payload").unwrap();
        for (name, begin, allowed) in [("put", &put as &dyn Fn() -> Op, 7), ("get", &get, 7), ("send", &send, 4)] {
            let mut locks = 0;
            for number in 0..WARM_UP as u64 + COUNTED {
                let (op, begun) = cost_of(begin);
                // The server has answered by then.
                for _ in 0..4 {
                    pair.server.progress().unwrap();
                }
                let (outcome, waited) = cost_of(|| op.wait(PATIENCE).unwrap());
                assert_eq!(outcome, Ok(Outcome::Done));
                let ((), dropped) = cost_of(|| drop(op));
                if number >= WARM_UP as u64 {
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
        turn_until_ended(&[&pair.client, &pair.server], &close);
    }
}

#[test]
fn a_message_that_is_there_is_received_with_two_locks() {
    let folder = tempfile::tempdir().unwrap();
    for address in addresses(&folder) {
        let pair = Pair::new(&address);
        let send = pair.client.send(pair.to_server, b"header", b"").unwrap();
        assert_eq!(turn_until_ended(&[&pair.client, &pair.server], &send), Outcome::Done);
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
        let pair = Pair::new(&address);
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
    let pair = Pair::new(&addresses(&folder)[0]);
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
