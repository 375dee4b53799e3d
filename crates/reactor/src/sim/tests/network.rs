//! Streams, also when the network or a peer fails.

use std::time::Duration;

use super::*;
use crate::sim::{Crash, LinkProfile};

/// Receives until `len` bytes are here.
fn receive_all(rig: &mut Rig, node: usize, socket: Socket, len: usize) -> Vec<u8> {
    let mut all = Vec::new();
    while all.len() < len {
        let part = rig.receive(node, socket, (len - all.len()).min(100_000), 1).expect("the stream is whole");
        assert!(!part.is_empty(), "the stream ended after {} of {len} bytes", all.len());
        all.extend(part);
    }
    all
}

#[test]
fn an_echo_comes_back_whole_and_in_pieces() {
    let mut pieces = 0;
    for seed in 0..20 {
        let mut rig = Rig::new(seed, 2);
        let (client, server) = rig.connect(0, 1);
        let bytes = pattern(seed, 300_000);
        let send = rig.start_send(0, client, &bytes);
        let mut back = Vec::new();
        while back.len() < bytes.len() {
            let part = rig.receive(1, server, 60_000, 1).unwrap();
            pieces += 1;
            rig.send(1, server, &part).unwrap();
            back.extend(receive_all(&mut rig, 0, client, part.len()));
        }
        assert_eq!(rig.sent(0, send), Ok(bytes.len()));
        assert!(back == bytes, "seed {seed}");
        assert_eq!(rig.loops[0].counters().received_bytes, 300_000);
        rig.assert_pools_full();
    }
    assert!(pieces > 20 * 300_000 / 60_000, "chance splits a stream");
}

#[test]
fn a_receive_waits_for_its_minimum_and_ends_short_at_the_end_of_the_stream() {
    for seed in 0..50 {
        let mut rig = Rig::new(seed, 2);
        let (client, server) = rig.connect(0, 1);
        rig.send(0, client, &[1; 1000]).unwrap();
        let receive = rig.start_receive(1, server, 4000, 1001);
        rig.settle();
        assert!(rig.taken(1, receive).is_none(), "seed {seed}: a receive of 1,001 bytes ended with 1,000");
        rig.send(0, client, &[2; 10]).unwrap();
        let mut got = rig.received(1, receive).unwrap();
        assert!(got.len() >= 1001, "seed {seed}");
        // Half-close: the end comes after all bytes, and the other direction goes on.
        rig.send(0, client, &[3; 10]).unwrap();
        rig.loops[0].shutdown_send(client);
        let rest = 1020 - got.len();
        got.extend(rig.receive(1, server, 4000, 4000).unwrap());
        assert_eq!(got.len(), 1020, "seed {seed}: {rest} bytes were left");
        assert_eq!(got, [&[1; 1000][..], &[2; 10], &[3; 10]].concat());
        assert_eq!(rig.receive(1, server, 10, 1), Ok(Vec::new()));
        assert_eq!(rig.send(0, client, b"late"), Err(Errno::PIPE));
        rig.send(1, server, b"still here").unwrap();
        assert_eq!(rig.receive(0, client, 10, 10), Ok(b"still here".to_vec()));
        rig.loops[1].close(server);
        assert_eq!(rig.receive(0, client, 10, 1), Ok(Vec::new()));
    }
}

#[test]
fn a_connect_is_refused_without_a_listener_and_times_out_in_a_partition() {
    let mut rig = Rig::new(1, 2);
    let refused = rig.run(0, Op::Connect { to: address(1) });
    assert!(matches!(refused, Outcome::Connected(Err(Errno::CONNREFUSED))), "{refused:?}");
    let listener = rig.listen(1);
    let accept = rig.submit(1, Op::Accept { listener });
    rig.world.partition(ip(0), ip(1));
    let late = rig.run(0, Op::Connect { to: address(1) });
    assert!(matches!(late, Outcome::Connected(Err(Errno::TIMEDOUT))), "{late:?}");
    // One that is healed in time connects.
    let connect = rig.submit(0, Op::Connect { to: address(1) });
    rig.pass(Duration::from_secs(1));
    assert!(rig.taken(0, connect).is_none());
    rig.world.heal(ip(0), ip(1));
    assert!(matches!(rig.wait(0, connect), Outcome::Connected(Ok(_))));
    assert!(matches!(rig.wait(1, accept), Outcome::Accepted(Ok(_))));
    assert_eq!(rig.world.fault_count().timeouts, 1);
}

#[test]
fn a_partition_holds_bytes_until_it_heals() {
    for seed in 0..20 {
        let mut rig = Rig::new(seed, 3);
        let (client, server) = rig.connect(0, 1);
        let (other_client, other_server) = rig.connect(2, 1);
        let receive = rig.start_receive(1, server, 100, 100);
        let send = rig.start_send(0, client, &[7; 100]);
        rig.world.partition(ip(0), ip(1));
        rig.pass(Duration::from_secs(30));
        assert!(rig.taken(1, receive).is_none(), "seed {seed}: bytes crossed a partition");
        rig.send(2, other_client, b"elsewhere all is well").unwrap();
        assert_eq!(rig.receive(1, other_server, 21, 21).unwrap(), b"elsewhere all is well");
        rig.world.heal(ip(0), ip(1));
        assert_eq!(rig.received(1, receive), Ok(vec![7; 100]));
        assert_eq!(rig.sent(0, send), Ok(100));
    }
}

#[test]
fn a_partition_longer_than_the_keep_alive_ends_a_stream_at_both_ends() {
    let mut rig = Rig::new(3, 2);
    let (client, server) = rig.connect(0, 1);
    let receives = [rig.start_receive(0, client, 10, 1), rig.start_receive(1, server, 10, 1)];
    rig.world.partition(ip(0), ip(1));
    rig.pass(Duration::from_secs(59));
    rig.world.heal(ip(0), ip(1));
    rig.world.partition(ip(0), ip(1));
    rig.pass(Duration::from_secs(59));
    assert!(rig.taken(0, receives[0]).is_none(), "two short partitions are not one long one");
    rig.loops[1].keep_alive(server, Duration::from_secs(70));
    rig.pass(Duration::from_secs(2));
    assert_eq!(rig.received(0, receives[0]), Err(Errno::TIMEDOUT), "the other end's 60 s are over");
    assert_eq!(rig.received(1, receives[1]), Err(Errno::TIMEDOUT));
    assert_eq!(rig.send(0, client, b"x"), Err(Errno::TIMEDOUT));
    assert_eq!(rig.world.fault_count().timeouts, 1);
    // A keep-alive set during the partition counts from its start.
    rig.world.heal(ip(0), ip(1));
    let (client, _) = rig.connect(0, 1);
    let receive = rig.start_receive(0, client, 10, 1);
    rig.world.partition(ip(0), ip(1));
    rig.pass(Duration::from_secs(5));
    rig.loops[0].keep_alive(client, Duration::from_secs(3));
    let before = rig.world.now();
    assert_eq!(rig.received(0, receive), Err(Errno::TIMEDOUT));
    assert_eq!(rig.world.now(), before);
}

#[test]
fn a_full_buffer_holds_the_sender_until_the_receiver_reads() {
    let mut rig = Rig::new(5, 2);
    let profile = LinkProfile { buffer_bytes: 10_000, ..LinkProfile::default() };
    rig.world.link(ip(0), ip(1), profile);
    let (client, server) = rig.connect(0, 1);
    let bytes = pattern(5, 100_000);
    let send = rig.start_send(0, client, &bytes);
    rig.settle();
    assert!(rig.taken(0, send).is_none(), "100,000 bytes do not fit into two buffers of 10,000");
    let first = receive_all(&mut rig, 1, server, 50_000);
    rig.settle();
    assert!(rig.taken(0, send).is_none());
    let second = receive_all(&mut rig, 1, server, 50_000);
    assert_eq!(rig.sent(0, send), Ok(100_000));
    assert!([first, second].concat() == bytes);
}

#[test]
fn a_link_takes_its_latency_and_its_bandwidth() {
    let mut rig = Rig::new(5, 2);
    let latency = Duration::from_millis(20);
    let profile = LinkProfile { latency, bandwidth: 1_000_000, buffer_bytes: 1 << 20, ..LinkProfile::default() };
    rig.world.link(ip(0), ip(1), profile);
    let (client, server) = rig.connect(0, 1);
    let began = rig.world.now();
    rig.send(0, client, &vec![0; 500_000]).unwrap();
    assert_eq!(rig.world.now(), began, "all of it fits into the send buffer");
    receive_all(&mut rig, 1, server, 500_000);
    let took = rig.world.now().since(began);
    assert!(took >= Duration::from_millis(520) && took < Duration::from_millis(530), "{took:?}");
}

#[test]
fn a_reset_breaks_both_ends() {
    let mut rig = Rig::new(6, 2);
    assert!(!rig.world.reset_random_connection(), "there is none");
    let (client, server) = rig.connect(0, 1);
    let receive = rig.start_receive(1, server, 10, 5);
    rig.send(0, client, b"abc").unwrap();
    rig.settle();
    assert!(rig.world.reset_random_connection());
    assert_eq!(rig.received(1, receive), Err(Errno::CONNRESET), "3 of 5 bytes are no end of a stream");
    assert_eq!(rig.send(0, client, b"x"), Err(Errno::CONNRESET));
    assert_eq!(rig.receive(0, client, 10, 1), Err(Errno::CONNRESET));
    rig.loops[0].close(client);
    rig.loops[1].close(server);
    assert!(!rig.world.reset_random_connection(), "it is forgotten");
    assert_eq!(rig.send(0, client, b"x"), Err(Errno::BADF));
    rig.assert_pools_full();
}

#[test]
fn a_close_delivers_what_was_sent_but_resets_when_data_was_not_read() {
    for seed in 0..20 {
        let mut rig = Rig::new(seed, 2);
        let (client, server) = rig.connect(0, 1);
        rig.send(0, client, &vec![9; 70_000]).unwrap();
        rig.loops[0].close(client);
        assert_eq!(receive_all(&mut rig, 1, server, 70_000), vec![9; 70_000]);
        assert_eq!(rig.receive(1, server, 10, 1), Ok(Vec::new()));
        // Nobody reads this any more: the answer is a reset.
        rig.send(1, server, b"too late").unwrap();
        rig.settle();
        assert_eq!(rig.send(1, server, b"x"), Err(Errno::CONNRESET), "seed {seed}");
        rig.loops[1].close(server);

        let (client, server) = rig.connect(0, 1);
        rig.send(0, client, b"unread").unwrap();
        rig.settle();
        rig.loops[1].close(server);
        assert_eq!(rig.receive(0, client, 10, 1), Err(Errno::CONNRESET), "seed {seed}");
        rig.loops[0].close(client);
        rig.settle();
        assert!(!rig.world.reset_random_connection(), "seed {seed}: a connection is left");
    }
}

#[test]
fn a_crash_resets_the_streams_of_a_node_at_its_peers() {
    let mut rig = Rig::new(7, 3);
    let (client, server) = rig.connect(0, 1);
    let (elsewhere, _) = rig.connect(0, 2);
    let receive = rig.start_receive(0, client, 10, 1);
    let other = rig.start_receive(0, elsewhere, 10, 1);
    let own = rig.start_receive(1, server, 10, 1);
    rig.world.crash(ip(1), Crash::Power);
    assert_eq!(rig.received(0, receive), Err(Errno::CONNRESET));
    assert_eq!(rig.received(1, own), Err(Errno::CANCELED));
    assert!(rig.taken(0, other).is_none(), "a stream to another node goes on");
    let refused = rig.run(0, Op::Connect { to: address(1) });
    assert!(matches!(refused, Outcome::Connected(Err(Errno::CONNREFUSED))));
    rig.restart(1);
    let (client, server) = rig.connect(0, 1);
    rig.send(0, client, b"hello again").unwrap();
    assert_eq!(rig.receive(1, server, 11, 11).unwrap(), b"hello again");

    // A partition hides the death until it heals.
    let receive = rig.start_receive(0, client, 10, 1);
    rig.world.partition(ip(0), ip(1));
    rig.world.crash(ip(1), Crash::Power);
    rig.pass(Duration::from_secs(10));
    assert!(rig.taken(0, receive).is_none());
    rig.world.heal(ip(1), ip(0));
    assert_eq!(rig.received(0, receive), Err(Errno::CONNRESET));
}

#[test]
fn a_dead_process_ends_its_streams_or_resets_them() {
    let (mut ends, mut resets, mut parts) = (0, 0, 0);
    for seed in 0..100 {
        let mut rig = Rig::new(seed, 2);
        let (client, server) = rig.connect(0, 1);
        // Too long for the buffers: it dies in the middle of a message.
        let bytes = pattern(seed, 1 << 20);
        let send = rig.start_send(1, server, &bytes);
        let mut got = rig.receive(0, client, 1000, 1).expect("the stream is whole");
        rig.world.crash(ip(1), Crash::Process);
        assert_eq!(rig.sent(1, send), Err(Errno::CANCELED), "seed {seed}");
        let before = got.len();
        loop {
            match rig.receive(0, client, 100_000, 1) {
                Ok(part) if part.is_empty() => break ends += 1,
                Ok(part) => got.extend(part),
                Err(error) => {
                    assert_eq!(error, Errno::CONNRESET, "seed {seed}");
                    break resets += 1;
                }
            }
        }
        parts += u32::from(got.len() > before);
        assert!(got.len() < bytes.len() && bytes.starts_with(&got), "seed {seed}");
    }
    assert!(ends > 20 && resets > 20 && parts > 20, "{ends} ends, {resets} resets, {parts} went on");
}

#[test]
fn cancelled_operations_give_their_memory_back() {
    let mut rig = Rig::new(8, 2);
    let listener = rig.listen(1);
    let accept = rig.submit(1, Op::Accept { listener });
    rig.loops[1].cancel(accept);
    assert!(matches!(rig.wait(1, accept), Outcome::Accepted(Err(Errno::CANCELED))));
    let connect = rig.submit(0, Op::Connect { to: address(1) });
    rig.loops[0].cancel(connect);
    assert!(matches!(rig.wait(0, connect), Outcome::Connected(Err(Errno::CANCELED))));
    let timer = rig.submit(0, Op::Timer { at: Instant::FAR });
    rig.loops[0].cancel(timer);
    assert!(matches!(rig.wait(0, timer), Outcome::TimedOut(Err(Errno::CANCELED))));
    rig.loops[1].close_listener(listener);
    rig.settle();

    let (client, server) = rig.connect(0, 1);
    let receive = rig.start_receive(0, client, 10, 1);
    rig.loops[0].cancel(receive);
    assert_eq!(rig.received(0, receive), Err(Errno::CANCELED));
    let partial = rig.start_receive(1, server, 10, 10);
    rig.send(0, client, b"abc").unwrap();
    rig.settle();
    rig.loops[1].cancel(partial);
    assert_eq!(rig.received(1, partial), Ok(b"abc".to_vec()), "bytes that were taken are not lost");
    let receive = rig.start_receive(0, client, 10, 1);
    let busy = rig.start_receive(0, client, 10, 1);
    assert_eq!(rig.received(0, busy), Err(Errno::BUSY));
    let send = rig.start_send(0, client, &vec![0; 2 << 20]);
    rig.settle();
    rig.loops[0].close(client);
    assert_eq!(rig.received(0, receive), Err(Errno::CANCELED));
    assert_eq!(rig.sent(0, send), Err(Errno::CANCELED));
    // A send that was cut off is no end of the stream.
    assert_eq!(rig.receive(1, server, 1 << 20, 1 << 20), Err(Errno::CONNRESET));
    rig.assert_pools_full();
}
