//! Sessions that end before they have begun, or while calls begin on them.

mod turner;

use std::time::{Duration, Instant};

use byway_fabric::node::{Address, Deadline, NodeOptions, OpError, SubmitError};
use byway_fabric::wire::{Header, Kind};
use byway_fabric::{ClientId, CloseReason, Fabric, Handler, Identity, Options, SessionId};
use byway_reactor::{IoChoice, Reactor, Wait};
use byway_rpc::message::{NodeId, ProtocolsBody};
use byway_rpc::node::{Call, Rpc};
use turner::Turner;
use zerocopy::FromZeros;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

fn open() -> Rpc {
    Rpc::open(&NodeOptions { frame_bytes: 16 << 20, ..NodeOptions::default() }).unwrap()
}

/// Claims a name that is not its own, and goes.
struct Impostor {
    name: NodeId,
    down: bool,
}

impl Handler for Impostor {
    fn up(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: SessionId) {
        let mut body = ProtocolsBody::new_zeroed();
        body.node = self.name;
        fabric.send(session, Header::with_body(Kind::Protocols, &body));
        fabric.say_goodbye(reactor, session, byway_fabric::wire::RefuseCode::ShuttingDown);
    }

    fn message(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, _: Kind, _: &Header, _: &[u8]) {}

    fn placed(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, _: Kind, _: &Header) {}

    fn down(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, _: CloseReason) {
        self.down = true;
    }

    fn drained(&mut self, fabric: &mut Fabric, _: &mut Reactor, session: SessionId) {
        fabric.release(session);
    }
}

#[test]
fn a_name_is_free_again_when_the_session_that_claimed_it_has_ended() {
    let folder = tempfile::tempdir().unwrap();
    let at = Address::Unix(folder.path().join("s"));
    let (server, caller) = (open(), open());
    server.node().listen(&at).unwrap();
    let mut reactor = Reactor::open(IoChoice::Epoll, 4 << 20).unwrap();
    let mut fabric = Fabric::new(Options::new(7));
    let identity = Identity { client: ClientId([1; 16]), number: 1, nonce: [2; 16] };
    fabric.connect(&mut reactor, at.clone(), identity);
    let mut impostor = Impostor { name: caller.id(), down: false };
    let began = Instant::now();
    let ended = server.node().start_receive(None).unwrap();
    while !impostor.down || ended.test().is_err() {
        assert!(began.elapsed() < Duration::from_secs(20), "it does not end");
        server.node().progress().unwrap();
        let mut completions = Vec::new();
        reactor.reap(&mut completions, Wait::Poll).unwrap();
        for completion in completions {
            fabric.handle(&mut reactor, completion, &mut impostor);
        }
        fabric.flush(&mut reactor, &mut impostor);
    }
    assert_eq!(server.session_with(&caller.id()), None);
    let (to_caller, _to_server) = std::thread::scope(|scope| {
        let accepted = scope.spawn(|| server.node().accept(soon()).unwrap());
        let connected = caller.node().connect(&at, soon()).unwrap();
        caller.node().send(connected, b"behind the name", &[]).unwrap();
        (accepted.join().unwrap(), connected)
    });
    server.node().receive(soon()).unwrap();
    assert_eq!(server.session_with(&caller.id()), Some(to_caller));
}

/// Calls that begin while other threads are told of the end of theirs.
#[test]
fn each_call_ends_that_began_while_its_session_ended() {
    const ROUNDS: usize = 200;
    const THREADS: usize = 4;
    let folder = tempfile::tempdir().unwrap();
    let at = Address::Unix(folder.path().join("s"));
    let (server, caller) = (open(), open());
    server.node().listen(&at).unwrap();
    for round in 0..ROUNDS {
        let (to_caller, to_server) = std::thread::scope(|scope| {
            let accepted = scope.spawn(|| server.node().accept(soon()).unwrap());
            let connected = caller.node().connect(&at, soon()).unwrap();
            (accepted.join().unwrap(), connected)
        });
        let calls = std::thread::scope(|scope| {
            let call = || {
                let mut ops = Vec::new();
                loop {
                    match caller.call(to_server, &Call::default(), Deadline::NEVER) {
                        Ok(op) => ops.push(op),
                        Err(SubmitError::Busy) => std::thread::yield_now(),
                        Err(SubmitError::Ended(_) | SubmitError::NoSession) => return ops,
                        Err(error) => panic!("{error}"),
                    }
                }
            };
            let callers: Vec<_> = (0..THREADS).map(|_| scope.spawn(call)).collect();
            let _turners = [Turner::of(server.node()), Turner::of(caller.node())];
            server.node().close(to_caller).unwrap();
            callers.into_iter().flat_map(|calling| calling.join().unwrap()).collect::<Vec<_>>()
        });
        for (index, op) in calls.iter().enumerate() {
            let result = op.wait(soon());
            assert!(matches!(result, Ok(Err(OpError::Ended(_)))), "round {round}, call {index}: {result:?}");
        }
        drop(calls);
    }
    assert_eq!(caller.counters().unwrap().calls, 0);
}
