//! Puts and gets: placement, sizes, pieces, checksums.

use std::collections::HashMap;
use std::rc::Rc;

use byway_fabric::limits::PAYLOAD_BYTES_MAX;
use byway_fabric::wire::{Header, Kind};
use byway_fabric::{Options, PayloadChecksum, PayloadMeta, Put, Remote};

use crate::rig::{CLIENT, Event, Rig, RigEnd, SERVER, Wire, pattern};

const WINDOW: usize = 200_000;

pub fn a_put_is_placed_where_it_belongs_and_nowhere_else(rig: &mut Rig) {
    let (server, client) = rig.session();
    for (offset, len) in [(0, 1), (1, 1), (WINDOW - 1, 1), (0, WINDOW), (4095, 4098), (65_535, 70_000), (123, 16_385)] {
        let window = rig.client().open_target(client, WINDOW);
        let to = rig.offer(client, window);
        let bytes = pattern(len as u64, len);
        rig.put(server, Remote { offset: offset as u64, ..to }, &bytes, 9);
        let header = rig.placed();
        assert_eq!((header.window.get(), header.payload_len(), header.body[0]), (window.0, len, 9));
        let came = rig.client().close_target(window);
        assert!(came[offset..offset + len] == bytes, "{len} bytes at {offset}");
        let rest = came[..offset].iter().chain(&came[offset + len..]);
        assert!(rest.into_iter().all(|byte| *byte == 0x11), "{len} bytes at {offset} spilled");
    }
    let counters = rig.server().reactor.counters();
    assert_eq!(counters.put_bytes > 0, rig.places(), "who can place them does");
}

pub fn a_get_brings_what_lies_there(rig: &mut Rig) {
    let (server, client) = rig.session();
    let bytes = pattern(5, WINDOW);
    let window = rig.client().open_source(client, &bytes);
    let from = rig.offer(client, window);
    for (offset, len) in [(0, 1), (WINDOW - 1, 1), (0, WINDOW), (4095, 4098), (65_535, 70_000)] {
        rig.get(server, Remote { offset: offset as u64, ..from }, len, offset as u64);
        let (context, frame, result) = rig.got();
        assert_eq!((context, result), (offset as u64, Ok(())));
        assert!(frame.to_vec()[..len] == bytes[offset..offset + len], "{len} bytes at {offset}");
    }
    assert!(rig.client().close_source(window) == bytes);
    assert_eq!(rig.server().reactor.counters().got_bytes > 0, rig.places());
}

pub fn puts_and_gets_of_all_sizes_are_under_way_together(rig: &mut Rig) {
    let (server, client) = rig.session();
    let lens = [1, 4096, 5000, 16_384, 65_536, 100_001, 262_144];
    let mut targets = Vec::new();
    let mut wanted = HashMap::new();
    for round in 0..4u64 {
        for (at, len) in lens.into_iter().enumerate() {
            let seed = round * 100 + at as u64;
            let target = rig.client().open_target(client, len);
            let to = rig.offer(client, target);
            rig.put(server, to, &pattern(seed, len), seed as u8);
            targets.push((target, seed, len));
            let source = rig.client().open_source(client, &pattern(seed + 50, len));
            let from = rig.offer(client, source);
            rig.get(server, from, len, seed);
            assert!(wanted.insert(seed, (source, len)).is_none());
        }
    }
    for _ in 0..targets.len() {
        rig.placed();
        let (context, frame, result) = rig.got();
        let (source, len) = wanted.remove(&context).expect("each get ends once");
        assert_eq!(result, Ok(()));
        assert!(frame.to_vec()[..len] == pattern(context + 50, len), "get {context}");
        assert!(rig.client().close_source(source) == pattern(context + 50, len), "nobody writes there");
    }
    for (target, seed, len) in targets {
        assert!(rig.client().close_target(target) == pattern(seed, len), "put {seed}");
    }
    assert!(rig.client().fabric.windows().is_empty() && rig.server().fabric.windows().is_empty());
}

pub fn a_put_gathers_many_pieces(rig: &mut Rig) {
    const PIECES: usize = 64;
    let (server, client) = rig.session();
    let bytes = pattern(8, PIECES * 1000);
    let window = rig.client().open_target(client, bytes.len() + 500);
    let to = rig.offer(client, window);
    let RigEnd { reactor, fabric, .. } = &mut rig.ends[SERVER];
    let mut whole = reactor.frames().alloc(bytes.len()).expect("a frame");
    whole.write(0, &bytes);
    let whole = Rc::new(whole);
    let route = fabric.route(server);
    let payload = PayloadMeta { len: bytes.len() + 500, checksum: None };
    let put = Put { session: server, route, to, header: Header::new(Kind::Data), payload };
    let put = fabric.put(reactor, put, |gather| {
        for piece in 0..PIECES {
            match piece % 2 {
                0 => gather.push_shared(Rc::clone(&whole), piece * 1000, 1000),
                _ => gather.push_head(&bytes[piece * 1000..][..1000]),
            }
        }
        gather.push_zeroes(500);
    });
    assert_eq!(put, Ok(()));
    rig.placed();
    let came = rig.client().close_target(window);
    assert!(came[..bytes.len()] == bytes && came[bytes.len()..] == [0; 500]);
}

/// 64 pieces in which no kind follows itself: heads, frames of its own and of others, ranges of a mapped file, zeroes.
pub fn a_put_gathers_all_kinds_of_pieces(rig: &mut Rig) {
    const PIECES: usize = 64;
    const FRONT: usize = 77;
    let contents = pattern(6, 300_000);
    let file = rig.file(&contents);
    let (server, client) = rig.session();
    let bytes = pattern(7, 100_000);
    let len_of = |piece: usize| 1 + piece * 997 % 4500;
    let mut wanted = Vec::new();
    for piece in 0..PIECES {
        let (len, at) = (len_of(piece), piece * 1013);
        match piece % 5 {
            3 => wanted.extend_from_slice(&contents[at * 3..][..len]),
            4 => wanted.resize(wanted.len() + len, 0),
            _ => wanted.extend_from_slice(&bytes[at..][..len]),
        }
    }
    let window = rig.client().open_target(client, wanted.len() + 2 * FRONT);
    let to = rig.offer(client, window);
    let RigEnd { reactor, fabric, .. } = &mut rig.ends[SERVER];
    let frame = |bytes: &[u8]| {
        let mut frame = reactor.frames().alloc(bytes.len()).expect("a frame");
        frame.write(0, bytes);
        frame
    };
    let shared = Rc::new(frame(&bytes));
    let own: Vec<_> = (1..PIECES).step_by(5).map(|piece| frame(&bytes[piece * 1013..][..len_of(piece)])).collect();
    let mut own = own.into_iter();
    let free = reactor.frames().free_bytes();
    let route = fabric.route(server);
    let payload = PayloadMeta { len: wanted.len(), checksum: None };
    let to = Remote { offset: FRONT as u64, ..to };
    let put = Put { session: server, route, to, header: Header::new(Kind::Data), payload };
    let put = fabric.put(reactor, put, |gather| {
        let before = gather.segment_count();
        for piece in 0..PIECES {
            let (len, at) = (len_of(piece), piece * 1013);
            match piece % 5 {
                0 => gather.push_head(&bytes[at..][..len]),
                1 => gather.push_frame(own.next().expect("one for each"), 0, len),
                2 => gather.push_shared(Rc::clone(&shared), at, len),
                3 => gather.push_map(file, (at * 3) as u64, len),
                _ => gather.push_zeroes(len),
            }
        }
        // The first may go on with the header before it.
        assert!(gather.segment_count() - before >= PIECES - 1, "so many, and not fewer that are longer");
    });
    assert_eq!(put, Ok(()));
    rig.placed();
    let came = rig.client().close_target(window);
    let end = FRONT + wanted.len();
    assert!(came[FRONT..end] == wanted);
    assert!(came[..FRONT].iter().chain(&came[end..]).all(|byte| *byte == 0x11), "it spilled");
    drop(shared);
    rig.until("all frames", |rig| (rig.server().reactor.frames().free_bytes() > free).then_some(()));
}

/// A mebibyte at a time, four under way: 64 MiB, in long runs a GiB.
pub fn a_great_transfer_comes_whole(rig: &mut Rig) {
    let long = std::env::var_os("BYWAY_LONG").is_some();
    let pieces: u64 = if long && rig.is_real() { 1024 } else { 64 };
    let (server, client) = rig.session();
    let mut windows: std::collections::VecDeque<(_, u64)> = std::collections::VecDeque::new();
    for piece in 0..pieces + 4 {
        if piece >= 4 {
            // Each may take another way, and one be faster.
            let mark = rig.placed().body[0];
            let place = windows.iter().position(|(_, seed)| *seed as u8 == mark);
            let (window, seed) = windows.remove(place.expect("it is under way")).expect("it is in the list");
            assert!(rig.client().close_target(window) == pattern(seed, PAYLOAD_BYTES_MAX / 2), "piece {seed}");
        }
        if piece < pieces {
            let window = rig.client().open_target(client, PAYLOAD_BYTES_MAX / 2);
            let to = rig.offer(client, window);
            rig.put(server, to, &pattern(piece, PAYLOAD_BYTES_MAX / 2), piece as u8);
            windows.push_back((window, piece));
        }
    }
}

pub fn payloads_with_checksums_are_checked(rig: &mut Rig) {
    let mut options = Options::new(7);
    options.terms.checksum = PayloadChecksum::Required;
    options.seed = (rig.wire == Wire::Sim).then_some(2);
    let Some(mut rig) = Rig::new(rig.wire, options) else { return };
    let (server, client) = rig.session();
    let window = rig.client().open_target(client, WINDOW);
    let to = rig.offer(client, window);
    rig.put(server, to, &pattern(1, WINDOW), 1);
    rig.placed();
    assert!(rig.client().close_target(window) == pattern(1, WINDOW));
    let source = rig.client().open_source(client, &pattern(2, WINDOW));
    let from = rig.offer(client, source);
    rig.get(server, from, WINDOW, 3);
    let (context, frame, result) = rig.got();
    assert_eq!((context, result), (3, Ok(())));
    assert!(frame.to_vec()[..WINDOW] == pattern(2, WINDOW));
    // A wrong one ends the session.
    let window = rig.client().open_target(client, WINDOW);
    let to = rig.offer(client, window);
    let RigEnd { reactor, fabric, .. } = &mut rig.ends[SERVER];
    let route = fabric.route(server);
    let payload = PayloadMeta { len: 20_000, checksum: Some(0x1234_5678) };
    let put = Put { session: server, route, to, header: Header::new(Kind::Data), payload };
    fabric.put(reactor, put, |gather| gather.push_zeroes(20_000)).expect("nothing to be read");
    let reason = rig.until("the end", |rig| {
        rig.client().take(|event| if let crate::rig::Event::Down(reason) = event { Some(*reason) } else { None })
    });
    assert_eq!(reason, byway_fabric::CloseReason::PayloadChecksum);
}

/// What a device is to send must lie in frames: the next put waits for those of the ones before it, and must get them.
pub fn puts_of_more_than_the_pool_are_done_one_after_the_other(rig: &mut Rig) {
    const LEN: usize = PAYLOAD_BYTES_MAX / 2;
    let (server, client) = rig.session();
    let window = rig.client().open_target(client, LEN);
    let to = rig.offer(client, window);
    let RigEnd { reactor, fabric, .. } = &mut rig.ends[SERVER];
    let free = reactor.frames().free_bytes();
    let count = reactor.frames().bytes() / LEN + 8;
    for number in 0..count {
        let route = fabric.route_to(server, to.window);
        let mut header = Header::new(Kind::Data);
        header.body[0] = number as u8;
        let put = Put { session: server, route, to, header, payload: PayloadMeta { len: LEN, checksum: None } };
        fabric.put(reactor, put, |gather| gather.push_zeroes(LEN)).expect("nothing to be read");
    }
    for number in 0..count {
        assert_eq!(rig.placed().body[0], number as u8);
    }
    assert!(rig.client().close_target(window) == [0; LEN]);
    if matches!(rig.wire, Wire::Rdma(_)) {
        rig.until("all frames", |rig| (rig.server().reactor.frames().free_bytes() == free).then_some(()));
    }
}

/// Gets of a large write are many, and a peer that hears nothing while they are under way takes their owner for dead.
pub fn a_message_does_not_wait_for_all_gets_before_it(rig: &mut Rig) {
    const GETS: u64 = 256;
    let (server, client) = rig.session();
    let bytes = pattern(1, 16 << 10);
    let source = rig.client().open_source(client, &bytes);
    let from = rig.offer(client, source);
    (0..GETS).for_each(|context| rig.get(server, from, bytes.len(), context));
    rig.server().fabric.send(server, Header::new(Kind::Reply));
    rig.until("the message", |rig| {
        rig.client().take(|event| matches!(event, Event::Message { kind: Kind::Reply, .. }).then_some(()))
    });
    let mut before = 0;
    let mut ended = Vec::new();
    while let Some(got) = rig.server().take_got() {
        before += 1;
        ended.push(got);
    }
    ended.extend((before..GETS).map(|_| rig.got()));
    for (_, frame, result) in ended {
        assert_eq!(result, Ok(()));
        assert!(frame.to_vec()[..] == bytes[..]);
    }
    if matches!(rig.wire, Wire::Rdma(_)) {
        assert!(before < GETS / 2, "{before} gets had ended before the message behind them came");
    }
}

/// Bytes of both directions, and delays, as far as an end can know them: nobody tells a client what is got from it.
pub fn what_goes_and_comes_is_measured(rig: &mut Rig) {
    let (server, client) = rig.session();
    let window = rig.client().open_target(client, WINDOW);
    let to = rig.offer(client, window);
    let before = rig.server().fabric.delays().send.counts.iter().sum::<u64>();
    rig.put(server, to, &pattern(1, WINDOW), 1);
    rig.placed();
    rig.client().close_target(window);
    let source = rig.client().open_source(client, &pattern(2, WINDOW));
    let from = rig.offer(client, source);
    rig.get(server, from, WINDOW, 3);
    assert_eq!(rig.got().2, Ok(()));
    let feedback = |end: &RigEnd, session| end.fabric.feedback(&end.reactor, session).expect("it is up");
    let wanted = WINDOW as u64;
    // What was sent counts when the kernel, or the device, says so.
    rig.until("the put is counted", |rig| {
        let told = feedback(&rig.ends[SERVER], server);
        (told.sent_bytes > wanted && told.received_bytes > wanted).then_some(())
    });
    let (at_server, at_client) = (feedback(&rig.ends[SERVER], server), feedback(&rig.ends[CLIENT], client));
    for told in [at_server, at_client] {
        assert!(told.sent_bytes > 0 && told.received_bytes > wanted, "{told:?}");
        assert!(told.sent_bytes < 3 * wanted && told.received_bytes < 3 * wanted, "{told:?}");
        assert!(told.send_delay.count > 0, "{told:?}");
    }
    assert!(at_server.send_rate > 0.0 && at_server.receive_rate > 0.0, "{at_server:?}");
    assert!(rig.server().fabric.delays().send.counts.iter().sum::<u64>() > before);
}
