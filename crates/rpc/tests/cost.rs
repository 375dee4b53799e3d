//! What a call costs its caller beside the bytes: locks, and wake-ups of threads. Builds without debug assertions count neither.
#![cfg(debug_assertions)]

use std::time::{Duration, Instant};

use byway_fabric::node::lock::{Cost, cost};
use byway_fabric::node::{NodeOptions, Outcome, Session, WaitError, parse_address};
use byway_rpc::node::{Call, Reply, Rpc};

const PATIENCE: Duration = Duration::from_secs(20);
const WARM_UP: u64 = 50;
const COUNTED: u64 = 50;

/// A caller and a server that one thread turns.
fn connected() -> (Rpc, Rpc, Session) {
    let options = NodeOptions::default();
    let (server, client) = (Rpc::open(&options).unwrap(), Rpc::open(&options).unwrap());
    let at = server.node().listen(&parse_address("tcp://127.0.0.1:0").unwrap()).unwrap().unwrap();
    let connect = client.node().start_connect(&parse_address(&format!("tcp://{at}")).unwrap()).unwrap();
    let began = Instant::now();
    loop {
        server.node().progress().unwrap();
        match connect.test() {
            Ok(Ok(Outcome::Session(session))) => return (server, client, session),
            Err(WaitError::Deadline) => assert!(began.elapsed() < PATIENCE, "no session"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_call_takes_few_locks_and_wakes_no_thread() {
    let (server, client, session) = connected();
    let mut spent = Cost::default();
    for number in 0..WARM_UP + COUNTED {
        let before = cost();
        let call = client.call(session, &Call { method: 1, arguments: b"ask", ..Call::default() }, PATIENCE).unwrap();
        let begun = cost();
        let request = server.next_call(PATIENCE).unwrap();
        request.token.reply(0, b"answer", b"").unwrap();
        let answered = cost();
        let reply = Reply::of(call.wait(PATIENCE).unwrap().unwrap()).unwrap();
        assert_eq!(reply.result, b"answer");
        drop(call);
        let after = cost();
        if number >= WARM_UP {
            spent.locks += begun.locks - before.locks + after.locks - answered.locks;
            spent.wakes += after.wakes - before.wakes;
        }
    }
    assert!(spent.locks <= 11 * COUNTED, "{COUNTED} calls took their caller {} locks", spent.locks);
    assert_eq!(spent.wakes, 0);
}
