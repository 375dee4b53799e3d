//! An engine whose peer is a fabric of the test's, which may say what no node would.

use std::time::{Duration, Instant as Clock};

use byway_reactor::{Frame, IoChoice, Mapping};
use smallvec::smallvec;
use zerocopy::FromZeros;
use zerocopy::little_endian::U32;

use super::*;
use crate::node::memory::{HeldSegment, WindowRange};
use crate::node::windows::OpenWindow;
use crate::node::wire::{CreditBody, MessageBody, PlacedBody, PutBody};
use crate::node::{Node, Op as NodeOp, Rights};
use crate::windows::WindowError;
use crate::wire::{Grant, Header as WireHeader, WindowAdvert};
use crate::{EndedGet, Handler, Slab, WindowKey};

/// The other end of a node's session.
struct Peer {
    reactor: Reactor,
    fabric: Fabric,
    session: SessionId,
    log: Log,
}

#[derive(Default)]
struct Log {
    is_up: bool,
    /// Puts that came with a message.
    messages: usize,
}

impl Handler for Log {
    fn up(&mut self, fabric: &mut Fabric, _: &mut Reactor, session: SessionId) {
        let body = CreditBody { messages: U32::new(64), reserved: [0; 76] };
        fabric.send(session, WireHeader::with_body(Kind::Credit, &body));
        fabric.send(session, WireHeader::new(Kind::Protocols));
        self.is_up = true;
    }

    fn message(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, _: Kind, _: &WireHeader, _: &[u8]) {}

    fn placed(&mut self, fabric: &mut Fabric, _: &mut Reactor, session: SessionId, _: Kind, header: &WireHeader) {
        let PutBody { put, message, .. } = header.body();
        self.messages += usize::from(message != 0);
        let mut placed = PlacedBody::new_zeroed();
        placed.put = put;
        fabric.send(session, WireHeader::with_body(Kind::Placed, &placed));
    }

    fn got(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, _: EndedGet) {}

    fn down(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, reason: CloseReason) {
        panic!("the session ended: {reason}");
    }

    fn drained(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId) {}
}

impl Peer {
    fn of(node: &Node, at: Address) -> (Self, Session) {
        let accept: NodeOp = node.start_accept().unwrap();
        let mut reactor = Reactor::open(IoChoice::Epoll, 4 << 20).unwrap();
        let mut options = Options::new(7);
        options.terms.bulk_lanes = 1;
        let mut fabric = Fabric::new(options);
        let identity = Identity { client: ClientId([1; 16]), number: 1, nonce: [2; 16] };
        let session = fabric.connect(&mut reactor, at, identity);
        let mut peer = Self { reactor, fabric, session, log: Log::default() };
        let accepted = peer.until(|| accept.test().ok());
        let Ok(Outcome::Session(session)) = accepted else { panic!("{accepted:?}") };
        (peer, session)
    }

    fn until<T>(&mut self, mut look: impl FnMut() -> Option<T>) -> T {
        let deadline = Clock::now() + Duration::from_secs(20);
        loop {
            assert!(Clock::now() < deadline, "it never comes to this");
            let Self { reactor, fabric, log, .. } = self;
            fabric.flush(reactor, log);
            let mut completions = Vec::new();
            reactor.reap(&mut completions, Wait::Poll).unwrap();
            for completion in completions {
                fabric.handle(reactor, completion, log);
            }
            fabric.flush(reactor, log);
            if let Some(found) = look().filter(|_| self.log.is_up) {
                return found;
            }
        }
    }
}

/// A node, a peer, and a window that the peer has lent for reading and says can be written: what is put there fails here.
fn lie() -> (Node, Peer, Session, WindowKey, (Mapping, tempfile::TempDir)) {
    let folder = tempfile::tempdir().unwrap();
    let at = Address::Shared(folder.path().join("s"));
    let node = Node::open(&NodeOptions::default()).unwrap();
    node.listen(&at).unwrap();
    let (mut peer, session) = Peer::of(&node, at);
    let (theirs, lie) = (Mapping::shared(4096).unwrap(), WindowKey(77 << 20 | 5));
    assert!(peer.fabric.lend_window(&mut peer.reactor, peer.session, WindowKey(77 << 20 | 4), &theirs, 0..4096, false));
    let grant = Grant::new(0, 4096, 0);
    let header = WindowAdvert::opened(WindowAdvert::PUT, 0, grant).about(lie.0);
    peer.fabric.send(peer.session, header);
    let to = crate::fabric::Remote { window: lie, offset: 0 };
    peer.until(|| {
        node.progress().unwrap();
        let engine = node.inner.try_engine().unwrap();
        let slot = engine.core.sessions[&session].fabric;
        (!engine.fabric.goes_by_route(slot, to, 4096)).then_some(())
    });
    (node, peer, session, lie, (theirs, folder))
}

/// What the loop itself finds wrong ends before the command is done with, while a thread may wait for it that will look at its
/// memory at once: a `put_from`, which ends its session if somebody uses the memory still.
#[test]
fn a_put_that_is_refused_at_once_ends_when_its_memory_is_in_use_no_more() {
    let (node, _peer, session, lie, _theirs) = lie();
    let op = node.inner.lock().unwrap().begin(OpKind::Plain).unwrap();
    let mine = Mapping::new(4096).unwrap();
    let held = HeldSegment { mapping: mine.counted(), start: 0, len: 4096 };
    let used = held.mapping.hold();
    with_core(&node, |core, fabric, reactor| {
        let places = Places { window: lie, ranges: smallvec![at(0, 4096)] };
        let put = PutRequest { op, segments: vec![held].into(), to: places, message: None };
        core.start_put(fabric, reactor, session, put);
    });
    assert_eq!(result_of(&node, op), None, "the memory is in use");
    drop(used);
    with_core(&node, |core, _, _| core.end_lingering());
    assert_eq!((result_of(&node, op), mine.uses()), (Some(Err(OpError::Io(Errno::ACCESS))), 0));
}

#[test]
fn memory_that_a_dead_peer_cannot_be_lent_is_lent_to_the_next_one_for_writing() {
    let folder = tempfile::tempdir().unwrap();
    let at = Address::Shared(folder.path().join("s"));
    let node = Node::open(&NodeOptions::default()).unwrap();
    node.listen(&at).unwrap();
    let (peer, session) = Peer::of(&node, at);
    drop(peer);
    let mapping = Mapping::shared(4096).unwrap();
    let mut engine = node.inner.try_engine().unwrap();
    let Engine { reactor, fabric, core, .. } = &mut *engine;
    let asked = OpenWindow { mapping: &mapping, range: 0..4096, rights: Rights::BOTH, once: false };
    core.open(fabric, reactor, &[session], &asked).expect("the peer's death is not known yet");
    assert_eq!(fabric.loan_count(), 0);
    assert!(mapping.lend(true).is_some());
}

/// A window that is closed promises that its peer can no longer reach the memory.
#[test]
fn what_a_lost_device_may_still_write_to_is_in_use_for_ever_and_its_operation_fails() {
    let node = Node::open(&NodeOptions::default()).unwrap();
    let op = node.inner.lock().unwrap().begin(OpKind::Plain).unwrap();
    let memory = Mapping::new(4096).unwrap();
    let counted = memory.counted();
    // SAFETY: nobody looks at the memory.
    let frame = std::mem::ManuallyDrop::new(unsafe { Frame::over(&counted, 0, 4096) });
    with_core(&node, |core, _, _| {
        core.linger(op, vec![counted].into(), Ok(Outcome::Done));
        core.end_lingering();
    });
    assert_eq!(result_of(&node, op), None, "the device has it");
    frame.note_given_up();
    with_core(&node, |core, _, _| core.end_lingering());
    assert_eq!(result_of(&node, op), Some(Err(OpError::Io(Errno::NODEV))));
    assert!(memory.uses() > 0);
}

/// A node, and a peer that is turned by nobody but the test.
fn node_and_peer() -> (Node, Peer, Session, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let at = Address::Unix(folder.path().join("s"));
    let node = Node::open(&NodeOptions::default()).unwrap();
    node.listen(&at).unwrap();
    let (peer, session) = Peer::of(&node, at);
    (node, peer, session, folder)
}

fn with_core<T>(node: &Node, run: impl FnOnce(&mut Core, &mut Fabric, &mut Reactor) -> T) -> T {
    let mut engine = node.inner.try_engine().unwrap();
    let Engine { reactor, fabric, core, .. } = &mut *engine;
    let result = run(core, fabric, reactor);
    drop(node.inner.settle(&mut engine));
    result
}

fn begin(node: &Node, session: Session) -> OpSlot {
    let mut shared = node.inner.lock().unwrap();
    shared.count_waiting(session).unwrap();
    shared.begin(OpKind::Send(session)).unwrap()
}

fn result_of(node: &Node, op: OpSlot) -> Option<Completed> {
    node.inner.lock().unwrap().ops.get(op).and_then(|state| state.result.clone())
}

fn message(op: OpSlot) -> Waiting {
    let header = Header::new(b"message").unwrap();
    Waiting::Message { op: Some(op), header, payload: Vec::new() }
}

fn at(offset: u64, len: usize) -> WindowRange {
    WindowRange { offset, len }
}

fn put_with_message(op: OpSlot, window: WindowKey, ranges: &[WindowRange]) -> Waiting {
    let segments =
        ranges.iter().map(|range| HeldSegment { mapping: Mapping::new(range.len).unwrap(), start: 0, len: range.len });
    let segments = segments.collect();
    let to = Places { window, ranges: ranges.into() };
    Waiting::Put { op, segments, to, message: Header::new(b"put").unwrap() }
}

/// Messages ask for nothing: what is under way holds up no more than the puts among them.
#[test]
fn messages_with_credit_go_out_however_much_is_under_way_and_before_a_goodbye() {
    let (node, _peer, session, _folder) = node_and_peer();
    let [first, put, last, beyond] = [(); 4].map(|()| begin(&node, session));
    with_core(&node, |core, fabric, reactor| {
        let state = core.sessions.get_mut(&session).unwrap();
        (state.asked, state.credits) = (crate::limits::ASKED_MAX, 0);
        for waiting in [
            message(first),
            put_with_message(put, WindowKey(77 << 20 | 9), &[at(0, 1)]),
            message(last),
            message(beyond),
        ] {
            core.send(fabric, reactor, session, waiting);
        }
        core.sessions.get_mut(&session).unwrap().credits = 2;
        core.send_waiting(fabric, reactor, session);
    });
    assert_eq!(result_of(&node, first), Some(Ok(Outcome::Done)));
    assert_eq!((result_of(&node, put), result_of(&node, last)), (None, None));
    with_core(&node, |core, fabric, reactor| {
        core.close(fabric, reactor, session, RefuseCode::ShuttingDown);
        // What comes after the goodbye is read by nobody.
        let state = core.sessions.get_mut(&session).unwrap();
        (state.asked, state.credits) = (0, 9);
        core.send_waiting(fabric, reactor, session);
    });
    let ended = Some(Err(OpError::Ended(CloseReason::Closed)));
    assert_eq!(result_of(&node, last), Some(Ok(Outcome::Done)));
    assert_eq!((result_of(&node, put), result_of(&node, beyond)), (ended.clone(), ended));
}

/// The peer's program must not hear that bytes lie there which do not.
#[test]
fn a_put_that_fails_here_sends_no_message_and_takes_no_credit() {
    let (node, _peer, session, lie, _theirs) = lie();
    // What lies beyond the lent memory would go through the stream.
    for ranges in [&[at(0, 100)][..], &[at(0, 100), at(8192, 100)]] {
        let op = begin(&node, session);
        with_core(&node, |core, fabric, reactor| {
            let before = core.sessions[&session].credits;
            core.send(fabric, reactor, session, put_with_message(op, lie, ranges));
            let state = &core.sessions[&session];
            assert_eq!((state.credits, state.asked, core.puts.len()), (before, 0, 0));
        });
        assert_eq!(result_of(&node, op), Some(Err(OpError::Io(Errno::ACCESS))));
    }
}

/// The message says that all bytes lie there. In memory that the peer has lent, this end must not place later parts ahead of one that
/// goes through the stream.
#[test]
fn a_put_of_which_an_early_part_is_refused_sends_no_message() {
    for is_lent in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let address = if is_lent { Address::Shared(path) } else { Address::Unix(path) };
        let node = Node::open(&NodeOptions::default()).unwrap();
        node.listen(&address).unwrap();
        let (mut peer, session) = Peer::of(&node, address);
        let slab = Slab::new(4096).unwrap();
        let opened = peer.fabric.open_slab(&mut peer.reactor, peer.session, &slab, 0).unwrap();
        let window = opened.put_key();
        let is_reached = || {
            let engine = node.inner.try_engine().unwrap();
            let slot = engine.core.sessions[&session].fabric;
            !engine.fabric.goes_by_route(slot, crate::fabric::Remote { window, offset: 0 }, 4096)
        };
        peer.until(|| {
            node.progress().unwrap();
            (is_reached() == is_lent).then_some(())
        });
        let credits = || with_core(&node, |core, _, _| core.sessions[&session].credits);
        let (before, [refused, good]) = (credits(), [(); 2].map(|()| begin(&node, session)));
        with_core(&node, |core, fabric, reactor| {
            let early = [at(8192, 100), at(0, 100)];
            core.send(fabric, reactor, session, put_with_message(refused, window, &early));
            core.send(fabric, reactor, session, put_with_message(good, window, &[at(0, 100), at(200, 100)]));
        });
        let results = peer.until(|| {
            node.progress().unwrap();
            Some([result_of(&node, refused)?, result_of(&node, good)?])
        });
        assert_eq!(results, [Err(OpError::Refused(WindowError::Bounds)), Ok(Outcome::Done)], "lent: {is_lent}");
        assert_eq!((peer.log.messages, before - credits()), (1, 1), "lent: {is_lent}");
    }
}

/// Else a pipeline of puts that began through the stream would stay there for ever.
#[test]
fn a_put_that_can_be_placed_waits_for_those_in_the_stream() {
    let (node, _peer, session, lie, _theirs) = lie();
    let op = node.inner.lock().unwrap().begin(OpKind::Transfer(session)).unwrap();
    with_core(&node, |core, fabric, reactor| {
        core.sessions.get_mut(&session).unwrap().streamed.insert(lie.0, 1);
        let segments = vec![HeldSegment { mapping: Mapping::new(100).unwrap(), start: 0, len: 100 }].into();
        let to = Places { window: lie, ranges: smallvec![at(0, 100)] };
        core.run(fabric, reactor, Command::Put { op, session, segments, to, message: None });
        assert!(!core.run_deferred(fabric, reactor));
        assert_eq!((core.puts.len(), core.sessions[&session].streamed[&lie.0]), (0, 1));
        core.sessions.get_mut(&session).unwrap().streamed.clear();
        assert!(core.run_deferred(fabric, reactor));
        assert!(core.sessions[&session].streamed.is_empty());
    });
    assert_eq!(result_of(&node, op), Some(Err(OpError::Io(Errno::ACCESS))), "not through the stream");
}

/// However many messages it has granted.
#[test]
fn a_peer_that_reads_nothing_is_sent_little_and_asked_for_nothing() {
    let (node, mut peer, session, _folder) = node_and_peer();
    for _ in 0..64 {
        let header = WireHeader::with_body(Kind::Message, &MessageBody::new(b"theirs"));
        peer.fabric.send(peer.session, header);
    }
    let granted = || with_core(&node, |core, _, _| core.sessions[&session].granted);
    peer.until(|| {
        node.progress().unwrap();
        (granted() == 0).then_some(())
    });
    with_core(&node, |core, _, _| core.sessions.get_mut(&session).unwrap().credits = 1 << 20);
    let payload = vec![1; crate::limits::SMALL_BYTES_MAX];
    let most = 2 * crate::limits::CONTROL_QUEUE_BYTES / payload.len();
    let mut sent = 0;
    let waits = loop {
        let op = node.send(session, b"ours", &payload).unwrap();
        if op.test().is_err() {
            break op;
        }
        sent += 1;
        assert!(sent < most, "{sent} messages wait");
    };
    for _ in 0..64 {
        assert_eq!(node.receive(Duration::from_secs(20)).unwrap().header, b"theirs");
    }
    assert_eq!(granted(), 0, "what it would send has no room");
    peer.until(|| {
        node.progress().unwrap();
        (granted() == 64).then_some(())
    });
    assert_eq!(peer.until(|| waits.test().ok()), Ok(Outcome::Done));
}

/// Calls that others have handed on are answered there too, and no credit of the peer's bounds those.
#[test]
fn a_peer_that_reads_nothing_is_given_up_when_too_many_answers_wait_for_it() {
    let (node, _peer, session, _folder) = node_and_peer();
    let payload = vec![1; crate::limits::SMALL_BYTES_MAX];
    let most = crate::limits::ANSWER_QUEUE_BYTES_MAX / payload.len() + 10;
    with_core(&node, |core, fabric, reactor| {
        let ended = (0..2 * most).find(|_| {
            core.say(fabric, reactor, session, WireHeader::new(Kind::Reply), &payload);
            fabric.last_closed() == Some(CloseReason::AsksTooMuch)
        });
        assert!(ended.is_some_and(|sent| (most - 200..=most).contains(&sent)), "{ended:?} of {most}");
    });
}
