//! The simulated world keeps the promises that a real one does, and breaks where it is told to.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use byway_reactor::sim::{Crash, FaultPlan, LinkProfile, World};
use byway_reactor::{
    Address, Completion, Errno, FileOptions, Gather, Instant, Op, OpenFile, Outcome, Reactor, Scatter, Socket, Token,
    Wait,
};

const SERVER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));
const PORT: u16 = 4711;
const FRAMES: usize = 4 << 20;

fn token(tag: u8) -> Token {
    Token::new(1, tag, 0, 0)
}

fn address() -> Address {
    Address::Tcp(SocketAddr::new(SERVER, PORT))
}

fn reap(reactor: &mut Reactor) -> Vec<Completion> {
    let mut completions = Vec::new();
    reactor.reap(&mut completions, Wait::Poll).unwrap();
    completions
}

/// Steps until one of the reactor's completions is one that `want` takes.
fn wait_for<R>(world: &World, reactor: &mut Reactor, mut want: impl FnMut(Outcome) -> Option<R>) -> R {
    loop {
        for completion in reap(reactor) {
            if let Some(found) = want(completion.outcome) {
                return found;
            }
        }
        assert!(world.step(), "nothing more happens");
    }
}

fn connected(outcome: Outcome) -> Option<Result<Socket, Errno>> {
    match outcome {
        Outcome::Connected(result) => Some(result),
        _ => None,
    }
}

struct Pair {
    world: World,
    server: Reactor,
    client: Reactor,
    accepted: Socket,
    connected: Socket,
}

fn pair(seed: u64) -> Pair {
    let world = World::new(seed);
    let (mut server, mut client) = (world.node(SERVER, FRAMES), world.node(CLIENT, FRAMES));
    let listener = server.listen(&address()).unwrap();
    server.submit(Op::Accept { listener }, token(1));
    client.submit(Op::Connect { to: address() }, token(2));
    let connected = wait_for(&world, &mut client, connected).unwrap();
    let accepted = wait_for(&world, &mut server, |outcome| match outcome {
        Outcome::Accepted(result) => Some(result.unwrap()),
        _ => None,
    });
    Pair { world, server, client, accepted, connected }
}

impl Pair {
    fn send(&mut self, bytes: &[u8]) {
        let mut gather = Gather::new();
        gather.push_head(bytes);
        self.client.submit(Op::Send { socket: self.connected, gather }, token(3));
    }

    fn receive(&mut self, len: usize, min: usize) {
        let frame = self.server.frames().alloc(len).unwrap();
        self.server.submit(Op::Recv { socket: self.accepted, into: Scatter::one(frame, 0, len), min }, token(4));
    }

    fn received(&mut self) -> Result<Vec<u8>, Errno> {
        wait_for(&self.world, &mut self.server, |outcome| match outcome {
            Outcome::Received { mut into, result } => {
                Some(result.map(|n| into.drain().next().unwrap().frame[..n].to_vec()))
            }
            _ => None,
        })
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

#[test]
fn bytes_arrive_in_order_through_a_small_buffer() {
    for seed in 0..20 {
        let mut pair = pair(seed);
        pair.world.link(SERVER, CLIENT, LinkProfile { buffer_bytes: 5000, ..LinkProfile::default() });
        let bytes = pattern(300_000);
        pair.send(&bytes);
        let mut got = Vec::new();
        while got.len() < bytes.len() {
            pair.receive(bytes.len() - got.len(), 1);
            let part = pair.received().unwrap();
            assert!(!part.is_empty(), "the stream ended early");
            got.extend(part);
        }
        assert!(got == bytes, "seed {seed}");
        let sent = wait_for(&pair.world, &mut pair.client, |outcome| match outcome {
            Outcome::Sent { result, .. } => Some(result),
            _ => None,
        });
        assert_eq!(sent, Ok(bytes.len()));
    }
}

#[test]
fn a_partition_holds_bytes_and_a_long_one_breaks_the_stream() {
    let mut held = pair(1);
    held.world.partition(SERVER, CLIENT);
    held.send(b"later");
    held.receive(5, 5);
    let at = held.world.now() + Duration::from_secs(5);
    held.world.run_until(at, || ());
    assert!(!reap(&mut held.server).iter().any(|c| matches!(c.outcome, Outcome::Received { .. })));
    held.world.heal(SERVER, CLIENT);
    assert_eq!(held.received(), Ok(b"later".to_vec()));

    let mut cut = pair(2);
    cut.server.keep_alive(cut.accepted, Duration::from_secs(2));
    cut.world.partition(SERVER, CLIENT);
    cut.receive(1, 1);
    assert_eq!(cut.received(), Err(Errno::TIMEDOUT));
    assert!(cut.world.now() >= Instant::ZERO + Duration::from_secs(2));
}

#[test]
fn half_close_lets_the_data_through_and_then_ends() {
    let mut pair = pair(3);
    pair.send(b"goodbye");
    pair.client.shutdown_send(pair.connected);
    pair.receive(100, 100);
    assert_eq!(pair.received(), Ok(b"goodbye".to_vec()));
    pair.receive(100, 1);
    assert_eq!(pair.received(), Ok(Vec::new()));
}

#[test]
fn crashes_and_resets_are_seen_and_every_frame_comes_back() {
    let mut reset = pair(4);
    let total = reset.server.frames().free_bytes();
    reset.receive(100, 1);
    assert!(reset.world.reset_random_connection());
    assert_eq!(reset.received(), Err(Errno::CONNRESET));
    assert_eq!(reset.server.frames().free_bytes(), total);

    let mut crash = pair(5);
    crash.receive(100, 1);
    crash.world.crash(CLIENT, Crash::Power);
    assert_eq!(crash.received(), Err(Errno::CONNRESET));
}

#[test]
fn nobody_listening_refuses_and_a_partition_times_out() {
    let world = World::new(6);
    let mut client = world.node(CLIENT, FRAMES);
    let _server = world.node(SERVER, FRAMES);
    client.submit(Op::Connect { to: address() }, token(1));
    assert_eq!(wait_for(&world, &mut client, connected), Err(Errno::CONNREFUSED));
    world.partition(SERVER, CLIENT);
    client.submit(Op::Connect { to: address() }, token(1));
    assert_eq!(wait_for(&world, &mut client, connected), Err(Errno::TIMEDOUT));
}

#[test]
fn timers_come_in_order_and_not_early() {
    let world = World::new(7);
    let mut node = world.node(CLIENT, FRAMES);
    for ms in [30u8, 10, 20] {
        node.submit(Op::Timer { at: Instant::ZERO + Duration::from_millis(ms.into()) }, token(ms));
    }
    let mut seen = Vec::new();
    while world.step() {
        for completion in reap(&mut node) {
            assert!(world.now() >= Instant::ZERO + Duration::from_millis(completion.token.tag().into()));
            seen.push(completion.token.tag());
        }
    }
    assert_eq!(seen, [10, 20, 30]);
}

/// Writes 1, 2 and 3 over the same 4 KiB, with a sync between 1 and 2, then crashes; gives what is left.
fn after_crash(seed: u64, how: Crash) -> Vec<u8> {
    let world = World::new(seed);
    let disk = world.disk(SERVER).file("f", 4096);
    let mut node = world.node(SERVER, FRAMES);
    let file = node.add_file(Arc::new(OpenFile::simulated(disk.clone(), FileOptions::default())));
    for value in [1, 2, 3] {
        let mut from = node.frames().alloc(4096).unwrap();
        from.fill(value);
        node.submit(Op::Write { file, offset: 0, from, start: 0, len: 4096, durable: false }, token(value));
        let result = wait_for(&world, &mut node, |outcome| match outcome {
            Outcome::Written { result, .. } => Some(result),
            _ => None,
        });
        assert_eq!(result, Ok(4096));
        if value == 1 {
            node.submit(Op::Sync { file }, token(9));
            let synced = wait_for(&world, &mut node, |outcome| match outcome {
                Outcome::Synced(result) => Some(result),
                _ => None,
            });
            assert_eq!(synced, Ok(()));
            assert_eq!(disk.durable(), [1; 4096]);
        }
    }
    world.crash(SERVER, how);
    disk.contents()
}

#[test]
fn a_crash_of_the_process_keeps_completed_writes_and_a_power_loss_keeps_synced_ones() {
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..200 {
        assert_eq!(after_crash(seed, Crash::Process), [3; 4096]);
        for sector in after_crash(seed, Crash::Power).chunks(512) {
            assert!(sector.iter().all(|byte| *byte == sector[0]), "a sector is torn");
            seen.insert(sector[0]);
        }
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [1, 2, 3], "each value from the synced one on can be left");
}

#[test]
fn a_write_in_flight_happens_whole_in_part_or_not() {
    let mut lengths = std::collections::BTreeSet::new();
    for seed in 0..200 {
        let world = World::new(seed);
        let disk = world.disk(SERVER).file("f", 4096);
        let mut node = world.node(SERVER, FRAMES);
        let file = node.add_file(Arc::new(OpenFile::simulated(disk.clone(), FileOptions::default())));
        let mut from = node.frames().alloc(4096).unwrap();
        from.fill(7);
        node.submit(Op::Write { file, offset: 0, from, start: 0, len: 4096, durable: false }, token(1));
        world.crash(SERVER, Crash::Process);
        let contents = disk.contents();
        let written = contents.iter().take_while(|byte| **byte == 7).count();
        assert!(contents[written..].iter().all(|byte| *byte == 0) && written.is_multiple_of(512));
        lengths.insert(written);
    }
    assert!(lengths.contains(&0) && lengths.contains(&4096) && lengths.len() > 2, "{lengths:?}");
}

/// A run with faults, as one number.
fn trace(seed: u64) -> u64 {
    let mut pair = pair(seed);
    pair.world.faults(FaultPlan { partitions_per_second: 20.0, delays_per_second: 50.0, ..FaultPlan::default() });
    pair.send(&pattern(2_000_000));
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut note = |value: u64| hash = (hash ^ value).wrapping_mul(0x0100_0000_01b3);
    for _ in 0..100 {
        pair.receive(20_000, 1);
        match pair.received() {
            Ok(bytes) => note(bytes.len() as u64),
            Err(error) => note(error.raw_os_error() as u64),
        }
        note(pair.world.now().nanos());
    }
    hash
}

#[test]
fn one_seed_is_one_run() {
    let runs: Vec<_> = (0..5).map(trace).collect();
    assert_eq!(runs, (0..5).map(trace).collect::<Vec<_>>());
    assert!(runs.windows(2).all(|pair| pair[0] != pair[1]), "seeds differ");
}
