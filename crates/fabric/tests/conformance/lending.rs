//! Windows in memory that a peer on the same host is lent: whoever listens, and whatever a peer says of its own.

use std::rc::Rc;

use byway_fabric::wire::{FLAG_PLACED, Grant, Header, Kind, WindowAdvert};
use byway_fabric::{CloseReason, GetError, PayloadMeta, Put, Remote, SessionId, WindowError, WindowKey};
use byway_reactor::{Errno, Frame, FrameRange, Mapping};

use crate::rig::{CLIENT, Event, Rig, RigEnd, SERVER, Wire, pattern};

const LEN: usize = 70_001;
/// Where the window begins in its memory.
const AT: usize = 4099;

/// Whether memory can be lent over the wire.
fn lends(rig: &Rig) -> bool {
    matches!(rig.wire, Wire::Shared(..))
}

/// The window of one end in its mapping, and what the other calls it. Whether the peer was lent it.
fn open(rig: &mut Rig, (end, session): (usize, SessionId), mapping: &Mapping, write: bool) -> (WindowKey, bool) {
    let RigEnd { reactor, fabric, .. } = &mut rig.ends[end];
    // SAFETY: nothing makes a reference to the mapping, and its frames are all of this loop.
    let frame = unsafe { Frame::over(mapping, AT, LEN) };
    let window = if write {
        fabric.open_target(session, FrameRange::new(frame, 0, LEN), 0).map_err(|(error, _)| error)
    } else {
        fabric.open_source(session, FrameRange::new(Rc::new(frame), 0, LEN), 0)
    };
    let window = window.expect("there is room");
    (window, fabric.lend_window(reactor, session, window, mapping, AT..AT + LEN, write))
}

/// Until the other end has heard all that was said.
fn heard(rig: &mut Rig, from: (usize, SessionId)) {
    rig.ends[from.0].fabric.send(from.1, Header::new(Kind::Notice));
    rig.until("the notice", |rig| {
        rig.ends[1 - from.0].take(|event| matches!(event, Event::Message { kind: Kind::Notice, .. }).then_some(()))
    });
}

fn get(rig: &mut Rig, (end, session): (usize, SessionId), from: Remote, len: usize) -> (Vec<u8>, Result<(), GetError>) {
    let RigEnd { reactor, fabric, .. } = &mut rig.ends[end];
    let mut into = reactor.frames().alloc(len).expect("a frame");
    into.fill(0x22);
    fabric.get(reactor, session, from, into, 1).expect("there is room");
    let (_, frame, result) = rig.until("the get", |rig| rig.ends[end].take_got());
    (frame.to_vec(), result)
}

fn put(rig: &mut Rig, (end, session): (usize, SessionId), to: Remote, bytes: &[u8]) -> Result<(), Errno> {
    let RigEnd { reactor, fabric, .. } = &mut rig.ends[end];
    let route = fabric.route(session);
    let payload = PayloadMeta { len: bytes.len(), checksum: None };
    let put = Put { session, route, to, header: Header::new(Kind::Data), payload };
    fabric.put(reactor, put, |gather| gather.push_head(bytes))
}

fn bytes_of(mapping: &Mapping) -> Vec<u8> {
    // SAFETY: the whole mapping, to which nobody writes now.
    unsafe { std::slice::from_raw_parts(mapping.as_ptr(), mapping.len()) }.to_vec()
}

fn filled(bytes: &[u8]) -> Mapping {
    let mapping = Mapping::shared(AT + LEN + 5000).expect("memory");
    // SAFETY: within the mapping, which nobody else has.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), mapping.as_ptr().add(AT), bytes.len()) };
    mapping
}

/// Puts and gets go where they belong whichever end opens the window, and are copied by the other where that can be.
pub fn a_window_is_reached_by_the_peer_itself_where_it_can_be(rig: &mut Rig) {
    let (server, client) = rig.session();
    let names = [server, client];
    for owner in [SERVER, CLIENT] {
        let (ours, theirs) = ((owner, names[owner]), (1 - owner, names[1 - owner]));
        let (readable, writable) = (filled(&pattern(1, LEN)), filled(&pattern(2, LEN)));
        let (read, lent) = open(rig, ours, &readable, false);
        let (written, lent_too) = open(rig, ours, &writable, true);
        assert_eq!((lent, lent_too), (lends(rig), lends(rig)));
        heard(rig, ours);
        // Beside the windows of calls, of which a client tells in another way.
        if owner == CLIENT {
            let target = rig.client().open_target(client, 1000);
            let to = rig.offer(client, target);
            assert_eq!(put(rig, theirs, to, &pattern(9, 1000)), Ok(()));
            rig.placed();
            assert!(rig.client().close_target(target) == pattern(9, 1000));
        }
        let before = rig.ends[1 - owner].reactor.counters();
        for (offset, len) in [(0, 1), (0, LEN), (4095, 60_000), (LEN - 1, 1)] {
            let from = Remote { window: read, offset: offset as u64 };
            let (bytes, result) = get(rig, theirs, from, len);
            assert_eq!(result, Ok(()));
            assert!(bytes == pattern(1, LEN)[offset..offset + len], "{len} bytes at {offset}");
        }
        assert_eq!(put(rig, theirs, Remote { window: written, offset: 10 }, &pattern(3, 50_000)), Ok(()));
        rig.until("the put", |rig| rig.ends[owner].take(|event| matches!(event, Event::Placed { .. }).then_some(())));
        let mut wanted = bytes_of(&filled(&pattern(2, LEN)));
        wanted[AT + 10..AT + 50_010].copy_from_slice(&pattern(3, 50_000));
        assert!(bytes_of(&writable) == wanted, "where it belongs and nowhere else");
        let after = rig.ends[1 - owner].reactor.counters();
        let copied = (after.got_bytes - before.got_bytes, after.put_bytes - before.put_bytes);
        assert_eq!(copied, if lends(rig) { (1 + LEN as u64 + 60_000 + 1, 50_000) } else { (0, 0) });
        // The direction, the bounds and the key are looked at all the same.
        for (window, offset, error) in [
            (written, 0, WindowError::Rights),
            (read, 1, WindowError::Bounds),
            (WindowKey(read.0 ^ 1 << 50), 0, WindowError::Key),
        ] {
            let (bytes, result) = get(rig, theirs, Remote { window, offset }, LEN);
            assert_eq!(result, Err(GetError::Refused(error)));
            assert!(bytes.iter().all(|byte| *byte == 0x22));
        }
        for window in [read, written] {
            let RigEnd { reactor, fabric, .. } = &mut rig.ends[owner];
            let told = fabric.recall(reactor, ours.1, window);
            assert_eq!(told, lends(rig));
            drop(rig.ends[owner].fabric.windows().close(window));
            if told {
                let recalled = |event: &Event| matches!(event, Event::Recalled(key) if *key == window).then_some(());
                rig.until("it was forgotten", |rig| rig.ends[owner].take(recalled));
            }
            let (_, result) = get(rig, theirs, Remote { window, offset: 0 }, 10);
            assert_eq!(result, Err(GetError::Refused(WindowError::Key)));
        }
        assert!(rig.ends[1 - owner].reactor.counters().got_bytes == after.got_bytes);
        assert!(!readable.is_exposed() && writable.is_exposed() == lends(rig));
        // Nobody has it any more; what was lent for reading once is lent for nothing else.
        assert_eq!(readable.lend(true).is_some(), !lends(rig));
        assert!(readable.lend(false).is_some() && writable.lend(true).is_some());
    }
}

fn close(rig: &mut Rig, (owner, session): (usize, SessionId), window: WindowKey) {
    let RigEnd { reactor, fabric, .. } = &mut rig.ends[owner];
    let told = fabric.recall(reactor, session, window);
    drop(fabric.windows().close(window));
    if told {
        let recalled = |event: &Event| matches!(event, Event::Recalled(key) if *key == window).then_some(());
        rig.until("it was forgotten", |rig| rig.ends[owner].take(recalled));
    }
}

/// More pieces of memory than a peer maps at a time, one after the other: those of before are unmapped, so that it reaches each.
pub fn memory_that_is_let_go_of_makes_room_at_the_peer(rig: &mut Rig) {
    let (server, client) = rig.session();
    let (ours, theirs) = ((SERVER, server), (CLIENT, client));
    let memories: Vec<_> = (0..=byway_fabric::limits::LOANS_MAX).map(|_| filled(&pattern(1, LEN))).collect();
    let before = rig.client().reactor.counters().got_bytes;
    for memory in &memories {
        let (window, lent) = open(rig, ours, memory, false);
        assert_eq!(lent, lends(rig));
        heard(rig, ours);
        assert_eq!(get(rig, theirs, Remote { window, offset: 0 }, 100).1, Ok(()));
        close(rig, ours, window);
    }
    let got = rig.client().reactor.counters().got_bytes - before;
    assert_eq!(got, if lends(rig) { 100 * memories.len() as u64 } else { 0 });
}

/// Memory in which a window is opened for each transfer is mapped by the peer once, and what lies there now is what comes.
pub fn windows_that_come_and_go_cost_one_mapping(rig: &mut Rig) {
    let (server, client) = rig.session();
    let names = [server, client];
    for owner in [SERVER, CLIENT] {
        let (ours, theirs) = ((owner, names[owner]), (1 - owner, names[1 - owner]));
        let memory = filled(&[]);
        let before = rig.ends[1 - owner].reactor.counters().mapped_loans;
        for round in 0..5 {
            let bytes = pattern(round, LEN);
            // SAFETY: within the mapping, which is no window's now.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.as_ptr().add(AT), LEN) };
            let (window, lent) = open(rig, ours, &memory, false);
            assert_eq!(lent, lends(rig));
            heard(rig, ours);
            let (got, result) = get(rig, theirs, Remote { window, offset: 0 }, LEN);
            assert!(result.is_ok() && got == bytes);
            close(rig, ours, window);
            assert_eq!(get(rig, theirs, Remote { window, offset: 0 }, 10).1, Err(GetError::Refused(WindowError::Key)));
        }
        let mapped = rig.ends[1 - owner].reactor.counters().mapped_loans - before;
        assert_eq!(mapped, u64::from(lends(rig)));
    }
}

/// A peer that lets go of memory in which its window is open contradicts itself.
pub fn memory_with_a_window_is_not_let_go_of(rig: &mut Rig) {
    let (_, client) = rig.session();
    let memory = filled(&pattern(1, LEN));
    let (_, lent) = open(rig, (CLIENT, client), &memory, false);
    let number = u32::from(rig.places());
    let nothing = |number| WindowAdvert::unmap(number).about(0);
    // What was never lent is as good as let go of.
    rig.client().fabric.send(client, nothing(number + 7));
    heard(rig, (CLIENT, client));
    rig.client().fabric.send(client, nothing(number));
    if lent {
        let down = |event: &Event| if let Event::Down(reason) = event { Some(*reason) } else { None };
        let reason = rig.until("the end", |rig| rig.server().take(down));
        assert_eq!(reason, CloseReason::Unexpected(Kind::Window));
    } else {
        heard(rig, (CLIENT, client));
    }
}

fn lend(window: WindowKey, (number, rights): (u32, u8), (address, len): (u64, u64)) -> Header {
    let grant = Grant::new(address, len, 0);
    WindowAdvert::opened(rights, number, grant).about(window.0)
}

/// What a peer says of memory that it never lent, or of places that are none, is no use to anybody; it touches nothing.
pub fn what_a_peer_says_of_its_memory_is_checked(rig: &mut Rig) {
    let (server, client) = rig.session();
    let (owner, asks) = ((CLIENT, client), (SERVER, server));
    let memory = filled(&pattern(1, LEN));
    let (window, lent) = open(rig, owner, &memory, false);
    let key = |slot: u64| WindowKey(77 << 20 | slot);
    let end = memory.len() as u64;
    // A client's own arena is the first that it lends.
    let number = u32::from(rig.places());
    let lies = [
        // In memory that was not lent, now or ever.
        lend(key(500), (number + 1, WindowAdvert::PUT), (0, 100)),
        lend(key(501), (u32::MAX, WindowAdvert::GET), (0, 100)),
        // Beyond the end, or round the end of all addresses.
        lend(key(502), (number, WindowAdvert::GET), (end - 50, 100)),
        lend(key(503), (number, WindowAdvert::GET), (u64::MAX - 10, 100)),
        // For writing, where it can only be read.
        lend(key(504), (number, WindowAdvert::PUT), (0, 100)),
        // A window of which there can be no note.
        lend(WindowKey(77 << 20 | 0xf_ffff), (number, WindowAdvert::GET), (0, 100)),
    ];
    for lie in lies {
        rig.client().fabric.send(client, lie);
    }
    heard(rig, owner);
    let from = |slot| Remote { window: key(slot), offset: 0 };
    for slot in [500, 501] {
        assert_eq!(get(rig, asks, from(slot), 100).1, Err(GetError::Refused(WindowError::Key)), "{slot}");
    }
    let beyond = if lent { GetError::Io(Errno::RANGE) } else { GetError::Refused(WindowError::Key) };
    for slot in [502, 503] {
        assert_eq!(get(rig, asks, from(slot), 100).1, Err(beyond), "{slot}");
    }
    // Who cannot write there says so, and no signal ends it.
    assert_eq!(put(rig, asks, from(504), &[1; 100]), if lent { Err(Errno::ACCESS) } else { Ok(()) });
    let (bytes, result) = get(rig, asks, Remote { window, offset: 0 }, LEN);
    assert!(result.is_ok() && bytes == pattern(1, LEN), "the honest one serves still");
    assert!(bytes_of(&memory)[AT..AT + LEN] == pattern(1, LEN));
    // To recall what was never told, and to have recalled what was not, is heard and forgotten.
    for what in [WindowAdvert::CLOSED, WindowAdvert::FORGOTTEN] {
        rig.client().fabric.send(client, WindowAdvert::of(what).about(key(600).0));
    }
    heard(rig, owner);
    // A direction that is none ends the session.
    rig.client().fabric.send(client, lend(key(505), (0, 3), (0, 100)));
    let reason = rig.until("the end", |rig| {
        rig.server().take(|event| if let Event::Down(reason) = event { Some(*reason) } else { None })
    });
    assert_eq!(reason, CloseReason::Unexpected(Kind::Window));
}

/// A session that the owner gives up takes what its peer could write from it; one that the peer has left does not.
pub fn what_a_lost_peer_could_write_is_taken_from_it(rig: &mut Rig) {
    for gives_up in [true, false] {
        let (server, client) = rig.session();
        let (names, owner) = ([server, client], SERVER);
        let memory = filled(&pattern(4, LEN));
        let (window, lent) = open(rig, (owner, names[owner]), &memory, true);
        heard(rig, (owner, names[owner]));
        let ends = if gives_up { owner } else { 1 - owner };
        let RigEnd { reactor, fabric, .. } = &mut rig.ends[ends];
        fabric.close(reactor, names[ends], CloseReason::Closed);
        for end in [owner, 1 - owner] {
            rig.until("the end", |rig| rig.ends[end].take(|event| matches!(event, Event::Drained).then_some(())));
        }
        let recalled = rig.ends[owner].take(|event| matches!(event, Event::Recalled(_)).then_some(()));
        assert_eq!(recalled.is_some(), lent, "it is told of");
        drop(rig.ends[owner].fabric.windows().close(window));
        assert_eq!(memory.is_exposed(), lent && !gives_up);
        assert_eq!(memory.lend(true).is_some(), !(lent && gives_up), "what was taken back is not lent again");
        assert!(bytes_of(&memory)[AT..AT + LEN] == pattern(4, LEN), "and it is as it was");
        rig.ends.iter_mut().for_each(|end| end.log.events.clear());
    }
}

/// A peer that was lent memory to read, and says that it has placed bytes in other memory, which it cannot reach.
pub fn what_a_peer_cannot_have_placed_is_not_believed(rig: &mut Rig) {
    let (server, client) = rig.session();
    let memory = filled(&pattern(1, LEN));
    let _ = open(rig, (CLIENT, client), &memory, false);
    heard(rig, (CLIENT, client));
    let RigEnd { reactor, fabric, .. } = &mut rig.ends[CLIENT];
    let frame = reactor.frames().alloc(100).expect("a frame");
    let window = fabric.open_target(client, FrameRange::new(frame, 0, 100), 0).expect("there is room");
    let mut header = Header::new(Kind::Data);
    header.flags |= FLAG_PLACED;
    header.window.set(window.0);
    let meta = PayloadMeta { len: 100, checksum: None };
    rig.server().fabric.send_with(server, header, meta, |_| ());
    let down = |event: &Event| if let Event::Down(reason) = event { Some(*reason) } else { None };
    let reason = rig.until("the liar's session ends", |rig| rig.client().take(down));
    assert_eq!(reason, CloseReason::Unexpected(Kind::Data));
    let placed = |event: &Event| matches!(event, Event::Placed { .. }).then_some(());
    assert!(rig.client().take(placed).is_none(), "what lay there is not the peer's");
}
