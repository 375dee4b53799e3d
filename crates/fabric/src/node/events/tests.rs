//! Peers that speak out of turn, and layers that hear of sessions.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant as Clock};

use byway_reactor::{Address, Instant, IoChoice, Wait};
use zerocopy::little_endian::U32;

use super::*;
use crate::node::{Completed, Deadline, Layer, Node, NodeOptions, Op, OpId, Outcome, Rights, Turn};
use crate::session::{ClientId, Identity};
use crate::{Options, PayloadMeta, Put, Registry, Remote};

/// A fabric that says these when its session is up, and nothing else.
struct Peer {
    reactor: Reactor,
    fabric: Fabric,
    says: Says,
}

struct Says {
    words: Vec<Header>,
    heard: Vec<Kind>,
    down: bool,
}

impl Handler for Says {
    fn up(&mut self, fabric: &mut Fabric, _: &mut Reactor, session: SessionId) {
        for word in self.words.drain(..) {
            fabric.send(session, word);
        }
    }

    fn message(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, kind: Kind, _: &Header, _: &[u8]) {
        self.heard.push(kind);
    }

    fn placed(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, _: Kind, _: &Header) {}

    fn down(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, _: CloseReason) {
        self.down = true;
    }

    fn drained(&mut self, fabric: &mut Fabric, _: &mut Reactor, session: SessionId) {
        fabric.release(session);
    }
}

impl Peer {
    fn new(words: Vec<Header>) -> Self {
        let reactor = Reactor::open(IoChoice::Epoll, 4 << 20).unwrap();
        Self { reactor, fabric: Fabric::new(Options::new(7)), says: Says { words, heard: Vec::new(), down: false } }
    }

    fn connect(&mut self, to: &Address) -> SessionId {
        let identity = Identity { client: ClientId([1; 16]), number: 1, nonce: [2; 16] };
        self.fabric.connect(&mut self.reactor, to.clone(), identity)
    }

    fn listen(&mut self, at: &Address) {
        self.fabric.serve(&self.reactor, Arc::new(Registry::new(5)));
        self.fabric.listen(&mut self.reactor, at).unwrap();
    }

    fn until<T>(&mut self, mut look: impl FnMut(&Says) -> Option<T>) -> T {
        let deadline = Clock::now() + Duration::from_secs(20);
        loop {
            assert!(Clock::now() < deadline, "it never comes to this");
            let Self { reactor, fabric, says } = self;
            fabric.flush(reactor, says);
            let mut completions = Vec::new();
            reactor.reap(&mut completions, Wait::Poll).unwrap();
            for completion in completions {
                fabric.handle(reactor, completion, says);
            }
            fabric.flush(reactor, says);
            if let Some(found) = look(says) {
                return found;
            }
        }
    }
}

/// What a layer heard, and could do then.
#[derive(Debug, PartialEq, Eq)]
enum Heard {
    /// With whether an acceptor had been told.
    Began(bool),
    Message,
    /// With the result of a message begun there, and whether a receiver of anything had been told.
    Ended(bool),
}

#[derive(Clone, Default)]
struct Listener {
    heard: Arc<Mutex<Vec<Heard>>>,
    receiver: Arc<Mutex<Option<Arc<Op>>>>,
    acceptor: Arc<Mutex<Option<Arc<Op>>>>,
}

/// Whether an operation was there and has ended.
fn has_ended(op: &Mutex<Option<Arc<Op>>>) -> bool {
    let op = op.lock().unwrap().take();
    op.is_some_and(|op| !op.node.inner.lock().unwrap().is_under_way(op.slot))
}

impl Listener {
    fn note(&self, heard: Heard) {
        self.heard.lock().unwrap().push(heard);
    }
}

impl Layer for Listener {
    fn began(&mut self, _: &mut Turn<'_>, _: Session, _: [u8; 16], _: bool) {
        self.note(Heard::Began(has_ended(&self.acceptor)));
    }

    fn message(&mut self, _: &mut Turn<'_>, _: Session, _: Kind, _: &Header, _: &[u8]) -> bool {
        self.note(Heard::Message);
        true
    }

    fn placed(&mut self, _: &mut Turn<'_>, _: Session, _: Kind, _: &Header) -> bool {
        true
    }

    fn ended(&mut self, turn: &mut Turn<'_>, session: Session, _: CloseReason) {
        // As another thread may at this time: nothing of it is sent.
        turn.send(session, Header::new(Kind::Notice), &[]);
        self.note(Heard::Ended(has_ended(&self.receiver)));
    }

    fn cancelled(&mut self, _: &mut Turn<'_>, _: OpId) {}

    fn alarm(&mut self, _: &mut Turn<'_>, _: Instant) {}
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

/// A node with a layer, and where it can listen.
fn layered() -> (Node, Listener, Address, tempfile::TempDir) {
    let (listener, folder) = (Listener::default(), tempfile::tempdir().unwrap());
    let node = Node::open_with(&NodeOptions::default(), Box::new(listener.clone())).unwrap();
    let at = Address::Unix(folder.path().join("s"));
    (node, listener, at, folder)
}

fn credit() -> Header {
    Header::with_body(Kind::Credit, &CreditBody { messages: U32::new(64), reserved: [0; 76] })
}

/// That it speaks none.
fn protocols() -> Header {
    Header::new(Kind::Protocols)
}

fn message() -> Header {
    Header::with_body(Kind::Message, &MessageBody::new(b"out of turn"))
}

fn words() -> [(Kind, Header); 4] {
    let placed = Header::with_body(Kind::Placed, &PlacedBody::new_zeroed());
    let [call, notice] = [Kind::Call, Kind::Notice].map(|kind| (kind, Header::new(kind)));
    [(Kind::Message, message()), call, notice, (Kind::Placed, placed)]
}

/// Else what is kept of such a session is kept for ever, since nobody is told that it has ended.
#[test]
fn who_speaks_before_it_names_its_protocols_is_cut_off_and_leaves_nothing() {
    let (node, listener, at, _folder) = layered();
    node.listen(&at).unwrap();
    for (_, word) in words() {
        let mut peer = Peer::new(vec![credit(), word, protocols()]);
        peer.connect(&at);
        peer.until(|says| {
            node.progress().unwrap();
            (says.down && node.counters().unwrap().sessions == 0).then_some(())
        });
    }
    assert_eq!(*listener.heard.lock().unwrap(), []);
    // Who receives from all is not held up by them.
    let client = Node::open(&NodeOptions::default()).unwrap();
    let connecting = client.start_connect(&at).unwrap();
    let session = turned(&node, &connecting);
    let Ok(Outcome::Session(session)) = session else { panic!("{session:?}") };
    for word in [b"first ", b"second"] {
        assert_eq!(turned(&node, &client.send(session, word, &[]).unwrap()), Ok(Outcome::Done));
    }
    assert_eq!(node.receive(soon()).unwrap().header, b"first ");
    assert_eq!(node.receive(soon()).unwrap().header, b"second");
}

/// The end of an operation of another node, while this one is turned.
fn turned(node: &Node, op: &Op) -> Completed {
    let deadline = Clock::now() + Duration::from_secs(20);
    loop {
        assert!(Clock::now() < deadline, "it does not end");
        node.progress().unwrap();
        if let Ok(result) = op.test() {
            return result;
        }
    }
}

/// A server is up with its first lane, and its client with its last: between them it has not begun, whatever was granted.
#[test]
fn a_server_that_speaks_before_all_lanes_are_there_is_cut_off() {
    let (node, listener, _, folder) = layered();
    for (place, (kind, word)) in words().into_iter().enumerate() {
        let mut peer = Peer::new(vec![credit(), word]);
        let at = Address::Unix(folder.path().join(place.to_string()));
        peer.listen(&at);
        let connect = node.start_connect(&at).unwrap();
        let result = peer.until(|_| connect.test().ok());
        assert_eq!(result, Err(OpError::Ended(CloseReason::Unexpected(kind))));
        assert_eq!(node.counters().unwrap().sessions, 0);
    }
    assert_eq!(*listener.heard.lock().unwrap(), []);
}

/// The client waits for that answer, and the server's program need not turn its node again once it has the session.
#[test]
fn a_server_has_a_session_when_it_has_answered_the_clients_protocols() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::open(&NodeOptions::default()).unwrap();
    let at = Address::Unix(folder.path().join("s"));
    node.listen(&at).unwrap();
    let accept = node.start_accept().unwrap();
    let mut peer = Peer::new(vec![credit()]);
    let slot = peer.connect(&at);
    peer.until(|_| {
        node.progress().unwrap();
        node.inner.try_engine()?.core.sessions.values().any(|state| state.credits > 0).then_some(())
    });
    assert!(accept.test().is_err(), "its protocols are not known");
    peer.fabric.send(slot, protocols());
    peer.until(|_| accept.test().ok()).unwrap();
    peer.until(|says| says.heard.contains(&Kind::Protocols).then_some(()));
}

/// Its kernel goes on to answer for it.
#[test]
fn a_server_that_stops_before_it_names_its_protocols_is_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let options = NodeOptions { keep_alive: Duration::from_millis(200), ..NodeOptions::default() };
    let node = Node::open_with(&options, Box::new(Listener::default())).unwrap();
    let at = Address::Unix(folder.path().join("s"));
    let mut peer = Peer::new(Vec::new());
    peer.listen(&at);
    let connect = node.start_connect(&at).unwrap();
    peer.until(|_| {
        node.progress().unwrap();
        let engine = node.inner.try_engine()?;
        engine.core.sessions.values().any(|state| state.up).then_some(())
    });
    assert_eq!(connect.wait(soon()), Ok(Err(OpError::Ended(CloseReason::Silent))));
    assert_eq!(node.counters().unwrap().sessions, 0);
}

/// What is begun behind that is ended by nobody; and the program hears of the session when all of it has ended.
#[test]
fn when_a_layer_hears_of_an_end_nothing_begins_any_more_and_the_program_is_told_later() {
    let (node, listener, at, _folder) = layered();
    node.listen(&at).unwrap();
    let mut peer = Peer::new(vec![credit(), protocols(), Header::new(Kind::Notice)]);
    peer.connect(&at);
    let session = peer.until(|_| node.accept(Deadline::now()).ok());
    let receive = Arc::new(node.start_receive(None).unwrap());
    *listener.receiver.lock().unwrap() = Some(Arc::clone(&receive));
    drop(peer);
    let ended = receive.wait(soon()).unwrap();
    let Ok(Outcome::Ended(of, _)) = ended else { panic!("{ended:?}") };
    assert_eq!(of, session);
    let heard = listener.heard.lock().unwrap();
    assert_eq!(heard[..], [Heard::Began(false), Heard::Message, Heard::Message, Heard::Ended(false)]);
}

/// Else another thread that calls at once is told that there is no such session.
#[test]
fn a_layer_hears_of_a_session_before_the_program_does() {
    let (node, listener, at, _folder) = layered();
    node.listen(&at).unwrap();
    let accept = Arc::new(node.start_accept().unwrap());
    *listener.acceptor.lock().unwrap() = Some(Arc::clone(&accept));
    let mut peer = Peer::new(vec![credit(), protocols()]);
    peer.connect(&at);
    let accepted = peer.until(|_| accept.test().ok());
    assert!(matches!(accepted, Ok(Outcome::Session(_))), "{accepted:?}");
    assert_eq!(*listener.heard.lock().unwrap(), [Heard::Began(false), Heard::Message]);
}

/// The program may use its memory for other things once the one use was made.
#[test]
fn a_window_for_one_use_is_closed_by_a_part_of_an_answer_too() {
    let (node, _listener, at, _folder) = layered();
    node.listen(&at).unwrap();
    let mut peer = Peer::new(vec![credit(), protocols()]);
    let slot = peer.connect(&at);
    let session = peer.until(|_| node.accept(Deadline::now()).ok());
    let memory = node.register(4096).unwrap();
    let window = node.open_window_once(session, &memory, 0..4096, Rights::PUT).unwrap();
    let to = Remote { window: window.descriptor().put_key(), offset: 0 };
    for byte in [1, 2] {
        // A call's number is where a put has zeroes.
        let mut header = Header::new(Kind::Data);
        header.body[..8].fill(1);
        let route = peer.fabric.route_to(slot, to.window);
        let payload = PayloadMeta { len: 8, checksum: None };
        let push = |gather: &mut byway_reactor::Gather| gather.push_head(&[byte; 8]);
        let put = Put { session: slot, route, to, header, payload };
        peer.fabric.put(&mut peer.reactor, put, push).unwrap();
    }
    peer.until(|_| {
        node.progress().unwrap();
        let mut bytes = [0; 8];
        memory.read(0, &mut bytes).unwrap();
        let counters = node.counters().unwrap();
        (bytes[0] == 2 || counters.windows_refused == 1).then_some(())
    });
    let mut bytes = [0; 8];
    memory.read(0, &mut bytes).unwrap();
    assert_eq!((bytes, node.counters().unwrap().windows), ([1; 8], 0));
}
