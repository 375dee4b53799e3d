use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use byway_reactor::{IoChoice, Wait};
use zerocopy::IntoBytes;

use super::*;
use crate::limits::HANDSHAKES_MAX;
use crate::session::{ClientId, Terms};
use crate::wire::Refuse;
use crate::{FabricCounters, Options};

struct NoSession;

impl Handler for NoSession {
    fn up(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId) {
        panic!("a connection that there is no room for has a session");
    }

    fn message(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, kind: Kind, _: &Header, _: &[u8]) {
        panic!("{kind:?} without a session");
    }

    fn placed(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, kind: Kind, _: &Header) {
        panic!("{kind:?} without a session");
    }

    fn down(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, _: CloseReason) {}

    fn drained(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId) {}
}

#[test]
fn a_connection_that_there_is_no_room_for_is_told_so() {
    let mut reactor = Reactor::open(IoChoice::Epoll, 1 << 20).unwrap();
    let mut fabric = Fabric::new(Options::new(7));
    fabric.serve(&reactor, Arc::new(Registry::new(1)));
    let listener = fabric.listen(&mut reactor, &Address::Tcp("127.0.0.1:0".parse().unwrap())).unwrap();
    let at = reactor.local_address(listener).unwrap();
    // As if so many others were in their handshakes.
    fabric.lanes.pretend_handshakes(HANDSHAKES_MAX);
    let client = std::thread::spawn(move || {
        let identity = Identity { client: ClientId([1; 16]), number: 1, nonce: [1; 16] };
        let terms = Terms { checksum: PayloadChecksum::Off, bulk_lanes: 1 };
        let mut stream = TcpStream::connect(at).unwrap();
        let mut hello = session::hello(&identity, &terms, 0);
        hello.seal(0);
        stream.write_all(hello.as_bytes()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        answer
    });
    let mut completions = Vec::new();
    while !client.is_finished() || fabric.lane_count() > 0 {
        fabric.flush(&mut reactor, &mut NoSession);
        let until = reactor.now() + Duration::from_millis(10);
        reactor.reap(&mut completions, Wait::Until(until)).unwrap();
        for completion in completions.drain(..) {
            fabric.handle(&mut reactor, completion, &mut NoSession);
        }
    }
    let answer = client.join().unwrap();
    let (header, kind) = Header::open(answer.first_chunk().unwrap(), 0).unwrap();
    let code = RefuseCode::from_number(header.body::<Refuse>().code.get());
    assert_eq!((kind, code), (Kind::Refuse, RefuseCode::Busy));
    assert_eq!(fabric.counters(), FabricCounters { refused: 1, ..FabricCounters::default() });
}
