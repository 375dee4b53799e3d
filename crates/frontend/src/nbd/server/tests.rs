//! Clients that ask in their handshake and read nothing; the timer of connections that wait for others; payloads that come
//! when all is over.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use byway_reactor::{FramePool, IoChoice, Scatter, Wait};
use byway_service::block::spec::{FaultEffect, FaultOperation, FaultRule, FaultRules};
use byway_service::block::{Store, Volume, VolumeOptions};

use super::connection::Greeted;
use super::input::Input;
use super::*;
use crate::nbd::flags::TransmissionFlags;
use crate::nbd::request::{BlockSizes, Headers, Rules};
use crate::nbd::transmission::Transmission;

const LIST: &[u8] = b"\0\0\0\x03IHAVEOPT\0\0\0\x03\0\0\0\0";
const VOLUMES: usize = 64;
const DESCRIPTION: usize = 4000;

struct Rig {
    reactor: Reactor,
    engine: Engine,
    catalog: Catalog,
    frontend: NbdFrontend,
}

impl Rig {
    fn new() -> Self {
        let mut reactor = Reactor::open(IoChoice::Epoll, 4 << 20).unwrap();
        let (mut engine, mut catalog) = (Engine::default(), Catalog::default());
        let volume = |number: usize| {
            let options = VolumeOptions { description: "d".repeat(DESCRIPTION), ..VolumeOptions::default() };
            Arc::new(Volume::new(format!("v{number}"), Store::null(512), options))
        };
        let effect = FaultEffect::Delay(Duration::from_secs(60));
        let slow = FaultRule { operation: FaultOperation::Write, effect, range: None, count_max: None };
        let options = VolumeOptions { faults: FaultRules(vec![slow]), ..VolumeOptions::default() };
        let slow = Arc::new(Volume::new("slow", Store::memory("slow", 1 << 20).unwrap(), options));
        catalog.replace(&mut engine, &mut reactor, &(0..VOLUMES).map(volume).chain([slow]).collect::<Vec<_>>());
        Self { reactor, engine, catalog, frontend: NbdFrontend::new(NbdOptions::default()) }
    }

    /// Gives the timers of [`TAG_FENCE`] that have ended.
    fn turn(&mut self) -> usize {
        let Self { reactor, engine, catalog, frontend } = self;
        let mut completions = Vec::new();
        let until = reactor.now() + Duration::from_millis(1);
        reactor.reap(&mut completions, Wait::Until(until)).unwrap();
        let is_fence = |completion: &&Completion| completion.token.tag() == TAG_FENCE;
        let fences = completions.iter().filter(is_fence).count();
        for completion in completions {
            frontend.handle(&mut LoopContext { reactor, engine, catalog }, completion);
        }
        fences
    }

    /// A client that asks for the list.
    fn ask(&mut self) -> UnixStream {
        self.connect(LIST)
    }

    fn connect(&mut self, said: &[u8]) -> UnixStream {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let same = ours.try_clone().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let Self { reactor, engine, catalog, frontend } = self;
        let socket = reactor.adopt(std::os::fd::OwnedFd::from(ours)).unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&same, 1).unwrap();
        frontend.open(&mut LoopContext { reactor, engine, catalog }, socket);
        theirs.write_all(said).unwrap();
        theirs
    }

    /// Turns until a client has so many bytes.
    fn read(&mut self, client: &mut UnixStream, bytes: usize) -> Vec<u8> {
        let (mut all, mut some) = (Vec::new(), vec![0; 64 << 10]);
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while all.len() < bytes {
            assert!(std::time::Instant::now() < deadline, "{} of {bytes} bytes came", all.len());
            self.turn();
            let n = client.read(&mut some).unwrap_or(0);
            all.extend_from_slice(&some[..n]);
        }
        all
    }
}

/// The kind of the first reply, behind the server's greeting.
fn kind(said: &[u8]) -> u32 {
    assert_eq!(said[18..30], *b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x03");
    u32::from_be_bytes(said[30..34].try_into().unwrap())
}

#[test]
fn lists_that_nobody_reads_are_bounded_together() {
    const SERVER: u32 = 2;
    const POLICY: u32 = 1 << 31 | 2;
    let (mut rig, list) = (Rig::new(), VOLUMES * DESCRIPTION);
    let hoards = GREETINGS_HEAP_BYTES_MAX / list + 40;
    let mut hoarders: Vec<UnixStream> = (0..hoards).map(|_| rig.ask()).collect();
    let mut late = rig.ask();
    let refused = rig.read(&mut late, 38);
    assert_eq!(kind(&refused), POLICY, "and its connection goes on");
    late.write_all(&LIST[4..]).unwrap();
    rig.read(&mut late, 20);
    let queued = rig.frontend.queued_heap_bytes();
    let most = GREETINGS_HEAP_BYTES_MAX + 2 * list;
    assert!(queued > GREETINGS_HEAP_BYTES_MAX && queued < most, "{queued} bytes wait");
    // A client with a queued list reads it late.
    let first = rig.read(&mut hoarders[0], list);
    assert_eq!(kind(&first), SERVER);
    hoarders.clear();
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    while rig.frontend.queued_heap_bytes() > 0 {
        assert!(std::time::Instant::now() < deadline, "{} bytes wait", rig.frontend.queued_heap_bytes());
        rig.turn();
    }
    let mut next = rig.ask();
    assert_eq!(kind(&rig.read(&mut next, list)), SERVER);
}

#[test]
fn connections_that_wait_for_others_share_a_timer_which_comes_less_and_less_often() {
    const WRITE: &[u8] = b"\x25\x60\x95\x13\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\x02\0";
    let said = [&b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x04slow"[..], WRITE, &[1; 512]].concat();
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    let mut rig = Rig::new();
    let mut clients = vec![rig.connect(&said)];
    while rig.engine.in_flight() == 0 {
        assert!(std::time::Instant::now() < deadline);
        rig.turn();
    }
    clients.extend((0..8).map(|_| rig.connect(&said)));
    while rig.frontend.fenced.connections.len() < 8 || rig.frontend.fenced.pause < fenced::PAUSE_MAX {
        assert!(std::time::Instant::now() < deadline, "{:?}", rig.frontend.fenced);
        assert!(rig.turn() <= 1, "one timer for all");
    }
    let late = rig.connect(&said);
    while rig.frontend.fenced.connections.len() < 9 {
        assert!(std::time::Instant::now() < deadline, "{:?}", rig.frontend.fenced);
        assert!(rig.turn() <= 1, "one timer for all");
    }
    assert!(rig.frontend.fenced.pause < fenced::PAUSE_MAX, "a late client does not wait the long pause of the others");
    drop((clients, late));
    assert_eq!(rig.engine.in_flight(), 1);
}

/// As with `stage=device`: the payload's frame lies where its bytes are not for us to look at.
#[test]
fn a_payload_that_comes_when_the_connection_is_over_is_dropped_unseen() {
    let mut rig = Rig::new();
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let socket = rig.reactor.adopt(std::os::fd::OwnedFd::from(ours)).unwrap();
    let token = Token::new(NBD_CLASS, 0, 0, 1);
    let flags = TransmissionFlags::default();
    let (headers, block, size_bytes) = (Headers::Simple, BlockSizes::default(), 1 << 20);
    let rules = Rules { headers, size_bytes, block, flags, allocation_context: None };
    let volume = rig.catalog.find("slow").unwrap().1;
    let (transmission, input) = (Transmission::new(rules), Input::default());
    let greeted = Greeted { socket, token, index: 0, volume, arrived: None, transmission, input, secure: None };
    let mut connection = Connection::new(greeted);
    connection.closing = Some(CloseReason::AccessLost);
    connection.abandon(&mut rig.frontend.pending);
    let phase = Phase::Serving(Box::new(connection), Box::new(Guest::new(Origin::Unix)));
    let (sent, received) = (Flow::default(), Flow::default());
    let (generation, peer, operations, closed, in_stalled, in_fenced) = (1, None, 2, true, false, false);
    let client = Client { generation, socket, peer, phase, operations, closed, in_stalled, in_fenced, sent, received };
    rig.frontend.clients.insert(client);
    let Rig { reactor, engine, catalog, frontend } = &mut rig;
    let mut context = LoopContext { reactor, engine, catalog };
    let lent = FramePool::shared(1 << 20).unwrap();
    let received = |n| {
        let into = Scatter::one(lent.alloc(4096).unwrap(), 0, 4096);
        Completion { token: token.with_tag(TAG_RECEIVE), outcome: Outcome::Received { into, result: Ok(n) } }
    };
    frontend.handle(&mut context, received(100));
    assert_eq!((frontend.connection_count(), lent.free_bytes()), (1, lent.bytes()));
    frontend.handle(&mut context, received(0));
    assert_eq!(frontend.connection_count(), 0);
}
