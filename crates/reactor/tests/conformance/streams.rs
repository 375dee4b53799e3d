//! Streams.

use byway_reactor::{Address, Errno, FileOptions, Gather, Op, Outcome, Scatter, Socket};

use crate::rig::{Rig, pattern};

/// Receives `len` bytes on loop 1, at most `part` at a time.
fn receive_all(rig: &mut Rig, socket: Socket, len: usize, part: usize) -> Vec<u8> {
    let mut all = Vec::with_capacity(len);
    while all.len() < len {
        let got = rig.receive(1, socket, part.min(len - all.len()), 1).expect("the stream is whole");
        assert!(!got.is_empty(), "the stream ended after {} of {len} bytes", all.len());
        all.extend(got);
    }
    all
}

pub fn an_echo_comes_back_whole(rig: &mut Rig) {
    let (client, server) = rig.connect();
    let bytes = pattern(1, 1 << 20);
    let send = rig.start_send(0, client, &bytes);
    let mut back = Vec::new();
    while back.len() < bytes.len() {
        let part = rig.receive(1, server, 100_000, 1).unwrap();
        rig.send(1, server, &part).unwrap();
        back.extend(rig.receive(0, client, part.len(), part.len()).unwrap());
    }
    assert_eq!(rig.sent(0, send), Ok(bytes.len()));
    assert!(back == bytes);
    rig.assert_pools_full();
}

pub fn a_receive_fills_several_pieces_and_waits_for_its_minimum(rig: &mut Rig) {
    let (client, server) = rig.connect();
    let mut into = Scatter::new();
    for (start, len) in [(10, 100), (0, 4096), (4000, 5), (0, 1), (1, 50_000)] {
        let mut frame = rig.empty_frame(1, 60_000);
        frame.fill(0xee);
        into.push(frame, start, len);
    }
    let total = into.len();
    let receive = rig.submit(1, Op::Recv { socket: server, into, min: total - 10 });
    let bytes = pattern(2, total - 10);
    let (first, rest) = bytes.split_at(150);
    rig.send(0, client, first).unwrap();
    rig.settle();
    assert!(rig.taken(1, receive).is_none(), "150 bytes are less than its minimum");
    rig.send(0, client, rest).unwrap();
    let Outcome::Received { mut into, result } = rig.wait(1, receive) else { panic!("another outcome") };
    assert_eq!(result, Ok(total - 10));
    let mut got = Vec::new();
    for piece in into.drain() {
        got.extend_from_slice(&piece.frame.bytes()[piece.start..piece.start + piece.len]);
        let outside = piece.frame.bytes()[..piece.start].iter().chain(&piece.frame.bytes()[piece.start + piece.len..]);
        assert!(outside.copied().all(|byte| byte == 0xee), "it wrote outside of a piece");
    }
    assert!(got[..total - 10] == bytes && got[total - 10..] == [0xee; 10]);
}

pub fn a_gather_of_everything_reaches_a_slow_reader(rig: &mut Rig) {
    const FILE: usize = 2 << 20;
    let file = rig.open("mapped", FILE as u64, FileOptions { map: true, ..FileOptions::default() });
    let contents = pattern(3, FILE);
    for (place, part) in contents.chunks(1 << 20).enumerate() {
        rig.write(file, (place << 20) as u64, part, false).unwrap();
    }
    let (client, server) = rig.connect();
    let (mut gather, mut expected) = (Gather::new(), Vec::new());
    for i in 0..1500usize {
        let head = pattern(i as u64, i % 50 + 1);
        gather.push_head(&head);
        expected.extend(head);
        match i % 3 {
            0 => {
                let bytes = pattern(i as u64, 3000 + i);
                gather.push_frame(rig.frame(0, &bytes), 100, 2500);
                expected.extend(&bytes[100..2600]);
            }
            1 => {
                gather.push_map(file, i as u64 * 7, 4000 + i);
                expected.extend(&contents[i * 7..i * 7 + 4000 + i]);
            }
            _ => {
                gather.push_zeroes(i * 3);
                expected.resize(expected.len() + i * 3, 0);
            }
        }
    }
    // Long enough to be spliced where that is done, and not on the bounds of pages.
    gather.push_map(file, 12_345, 1_500_000);
    expected.extend(&contents[12_345..1_512_345]);
    gather.push_zeroes(3 << 20);
    expected.resize(expected.len() + (3 << 20), 0);
    gather.push_head(b"tail");
    expected.extend(b"tail");
    assert!(gather.segment_count() > 2048 && gather.len() > 8 << 20);

    let send = rig.submit(0, Op::Send { socket: client, gather });
    rig.settle();
    assert!(rig.taken(0, send).is_none(), "8 MiB fit into no socket");
    assert!(receive_all(rig, server, expected.len(), 70_001) == expected);
    assert_eq!(rig.sent(0, send), Ok(expected.len()));
    let counters = rig.loops[0].counters();
    assert_eq!(counters.sent_copied_bytes + counters.sent_spliced_bytes, expected.len() as u64);
    rig.assert_pools_full();
}

pub fn a_receive_is_short_only_at_the_end_of_the_stream(rig: &mut Rig) {
    let (client, server) = rig.connect();
    let receive = rig.start_receive(1, server, 1000, 1000);
    rig.send(0, client, &[1; 10]).unwrap();
    rig.loops[0].close(client);
    assert_eq!(rig.received(1, receive), Ok(vec![1; 10]));
    assert_eq!(rig.receive(1, server, 10, 1), Ok(Vec::new()));
    assert_eq!(rig.receive(1, server, 10, 11), Err(Errno::INVAL), "it would never be enough");
}

pub fn a_half_close_leaves_the_other_direction(rig: &mut Rig) {
    let (client, server) = rig.connect();
    rig.send(0, client, b"question").unwrap();
    rig.loops[0].shutdown_send(client);
    assert_eq!(rig.receive(1, server, 100, 100).unwrap(), b"question");
    rig.send(1, server, b"answer").unwrap();
    assert_eq!(rig.receive(0, client, 6, 6).unwrap(), b"answer");
    assert_eq!(rig.send(0, client, b"more"), Err(Errno::PIPE));
    rig.loops[1].close(server);
    assert_eq!(rig.receive(0, client, 6, 1), Ok(Vec::new()));
}

pub fn a_broken_stream_is_no_end_of_it(rig: &mut Rig) {
    let (client, server) = rig.connect();
    let receive = rig.start_receive(0, client, 1000, 1000);
    rig.send(0, client, b"nobody reads this").unwrap();
    rig.send(1, server, &[1; 10]).unwrap();
    rig.settle();
    rig.loops[1].close(server);
    assert_eq!(rig.received(0, receive), Err(Errno::CONNRESET), "10 of 1,000 bytes came");
}

pub fn a_close_gives_all_memory_back(rig: &mut Rig) {
    let (client, server) = rig.connect();
    let receive = rig.start_receive(0, client, 1000, 1);
    let send = rig.start_send(0, client, &vec![0; 16 << 20]);
    rig.settle();
    assert!(rig.taken(0, send).is_none(), "16 MiB fit into no socket");
    rig.loops[0].close(client);
    assert!(rig.sent(0, send).is_err());
    assert!(rig.received(0, receive).map_or(true, |bytes| bytes.is_empty()), "an end or an error");
    rig.loops[1].close(server);
    rig.assert_pools_full();
}

/// What a loop has in flight for itself is nobody else's to hear of, also when the last stream that it was for is gone.
pub fn nothing_ends_that_nobody_began(rig: &mut Rig) {
    for close_first in [0, 1] {
        let (client, server) = rig.connect();
        let sockets = [client, server];
        rig.loops[close_first].close(sockets[close_first]);
        rig.settle();
        rig.loops[1 - close_first].close(sockets[1 - close_first]);
        rig.settle();
        for node in [0, 1] {
            let reaped = rig.reaped(node);
            assert!(reaped.is_empty(), "on loop {node}: {reaped:?}");
        }
    }
}

pub fn a_cancelled_receive_loses_no_bytes(rig: &mut Rig) {
    let (client, server) = rig.connect();
    let bytes = pattern(4, 1000);
    let receive = rig.start_receive(1, server, 1000, 1000);
    rig.send(0, client, &bytes[..300]).unwrap();
    rig.settle();
    rig.loops[1].cancel(receive);
    let mut got = match rig.received(1, receive) {
        Ok(got) => got,
        Err(error) => {
            assert_eq!(error, Errno::CANCELED);
            Vec::new()
        }
    };
    rig.send(0, client, &bytes[300..]).unwrap();
    got.extend(receive_all(rig, server, 1000 - got.len(), 1000));
    assert!(got == bytes);
}

pub fn many_connections_are_accepted(rig: &mut Rig) {
    const COUNT: usize = 100;
    let (listener, address) = rig.listen(1, "many");
    // More than are accepted at once wait already when the accept begins.
    let mut connects: Vec<_> = (0..COUNT / 2).map(|_| rig.submit(0, Op::Connect { to: address.clone() })).collect();
    rig.settle();
    let accept = rig.submit(1, Op::Accept { listener });
    connects.extend((0..COUNT / 2).map(|_| rig.submit(0, Op::Connect { to: address.clone() })));
    for connect in connects {
        let connected = rig.wait(0, connect);
        let Outcome::Connected(Ok(client)) = connected else { panic!("{connected:?}") };
        rig.send(0, client, b"hello").unwrap();
        let is_tcp = matches!(address, Address::Tcp(_));
        assert_eq!(rig.loops[0].peer_address(client).map(Address::Tcp), is_tcp.then(|| address.clone()));
    }
    for _ in 0..COUNT {
        let Outcome::Accepted(Ok(server)) = rig.wait(1, accept) else { panic!("accepting ended") };
        assert_eq!(rig.receive(1, server, 5, 5).unwrap(), b"hello");
    }
}

pub fn a_connect_is_refused_without_a_listener(rig: &mut Rig) {
    let (listener, address) = rig.listen(1, "gone");
    rig.loops[1].close_listener(listener);
    let refused = rig.run(0, Op::Connect { to: address });
    assert!(matches!(refused, Outcome::Connected(Err(Errno::CONNREFUSED | Errno::NOENT))), "{refused:?}");
}
