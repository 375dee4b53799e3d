//! A client whose connection broke, and that connects again: what its old connection had begun must not land over what it
//! writes on the new one (docs/decisions/0033).

mod nbd_loop;

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use byway_frontend::limits::CONNECTION_IN_FLIGHT_MAX;
use byway_reactor::{ByteRange, IoChoice};
use byway_service::block::spec::{FaultEffect, FaultOperation, FaultRule, FaultRules};
use byway_service::block::{Store, Volume, VolumeOptions};
use nbd_loop::{Loop, backends, request};

const READ: u16 = 0;
const WRITE: u16 = 1;
const BLOCK: usize = 512;

/// A volume whose store takes long for so many writes, the first ones.
fn slow_at_first(writes: u64, delay: Duration) -> Arc<Volume> {
    let effect = FaultEffect::Delay(delay);
    let rule = FaultRule { operation: FaultOperation::Write, effect, range: None, count_max: Some(writes) };
    let options = VolumeOptions { faults: FaultRules(vec![rule]), ..VolumeOptions::default() };
    Arc::new(Volume::new("v", Store::memory("v", 4 << 20).unwrap(), options))
}

/// Two loops of a node.
struct Node {
    loops: [Loop; 2],
    deadline: Instant,
}

impl Node {
    fn new(io: IoChoice, volume: &Arc<Volume>) -> Self {
        let one = || Loop::new(io, 16 << 20, std::slice::from_ref(volume));
        Self { loops: [one(), one()], deadline: Instant::now() + Duration::from_secs(30) }
    }

    fn turn(&mut self) {
        for one in &mut self.loops {
            one.turn();
        }
        assert!(Instant::now() < self.deadline, "this takes too long");
    }

    /// A client of the volume, on one of the loops.
    fn connect(&mut self, number: usize) -> UnixStream {
        let mut client = self.loops[number].connect();
        client.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\x01v").unwrap();
        self.read(&mut client, 28);
        client
    }

    fn read(&mut self, client: &mut UnixStream, bytes: usize) -> Vec<u8> {
        let mut all = vec![0; bytes];
        let mut filled = 0;
        while filled < bytes {
            match client.read(&mut all[filled..]) {
                Ok(0) => panic!("the server ended the connection"),
                Ok(n) => filled += n,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
            self.turn();
        }
        all
    }

    fn send(&mut self, client: &mut UnixStream, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match client.write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
            self.turn();
        }
    }

    fn write(&mut self, client: &mut UnixStream, fill: u8) {
        self.send(client, &write(7, 0, fill));
        assert_eq!(self.read(client, 16)[4..8], [0; 4], "the write went well");
    }

    fn first_block(&mut self, client: &mut UnixStream) -> Vec<u8> {
        self.send(client, &request(READ, 8, 0, BLOCK as u32));
        self.read(client, 16 + BLOCK).split_off(16)
    }

    /// Until the server has seen that a client has left requests at the store.
    fn see_departure(&mut self) {
        let id = self.loops[0].catalog.ids().next().unwrap();
        while self.loops[0].engine.departures(id) == 0 {
            self.turn();
        }
    }

    fn at_store(&self) -> usize {
        self.loops.iter().map(|one| one.engine.in_flight()).sum()
    }
}

fn write(cookie: u64, offset: u64, fill: u8) -> Vec<u8> {
    [request(WRITE, cookie, offset, BLOCK as u32), vec![fill; BLOCK]].concat()
}

/// Of an old connection on loop 0 that broke, what is left must not be seen behind what a new one has written.
fn write_anew_on(number: usize, node: &mut Node) {
    let new = node.connect(number);
    write_on(new, node);
}

fn write_on(mut new: UnixStream, node: &mut Node) {
    node.write(&mut new, 2);
    assert_eq!(node.first_block(&mut new), [2; BLOCK]);
    while node.at_store() > 0 {
        node.turn();
    }
    assert_eq!(node.first_block(&mut new), [2; BLOCK], "the old connection's write landed over an acknowledged one");
}

#[test]
fn a_write_of_an_old_connection_does_not_land_over_one_of_the_new() {
    for io in backends() {
        for number in [0, 1] {
            let mut node = Node::new(io, &slow_at_first(1, Duration::from_millis(300)));
            let mut old = node.connect(0);
            node.send(&mut old, &write(1, 0, 1));
            while node.at_store() == 0 {
                node.turn();
            }
            drop(old);
            write_anew_on(number, &mut node);
        }
    }
}

#[test]
fn what_an_old_connection_had_not_begun_is_not_begun_any_more() {
    for number in [0, 1] {
        let many = CONNECTION_IN_FLIGHT_MAX as u64;
        let mut node = Node::new(IoChoice::Epoll, &slow_at_first(many + 1, Duration::from_secs(1)));
        let mut old = node.connect(0);
        // As many as may be in flight, and one more, which waits for the end of one.
        let others = (1..=many).flat_map(|cookie| write(cookie, cookie * BLOCK as u64, 1));
        let all: Vec<u8> = others.chain(write(many + 1, 0, 1)).collect();
        node.send(&mut old, &all);
        while node.at_store() < CONNECTION_IN_FLIGHT_MAX {
            node.turn();
        }
        drop(old);
        write_anew_on(number, &mut node);
    }
}

/// As the kernel's client does that has several connections: it gives one up, and sends again on another that it has.
#[test]
fn a_write_of_a_connection_that_was_given_up_does_not_land_over_one_of_another_that_was_there() {
    for io in backends() {
        for number in [0, 1] {
            let mut node = Node::new(io, &slow_at_first(2, Duration::from_millis(300)));
            let (mut one, mut other) = (node.connect(0), node.connect(number));
            node.write(&mut other, 3);
            node.send(&mut one, &write(1, 0, 1));
            while node.at_store() == 0 {
                node.turn();
            }
            drop(one);
            node.see_departure();
            node.write(&mut other, 2);
            while node.at_store() > 0 {
                node.turn();
            }
            assert_eq!(node.first_block(&mut other), [2; BLOCK], "the write of the other connection landed later");
        }
    }
}

#[test]
fn a_client_that_is_still_there_when_another_comes_is_asked_again_before_each_change() {
    for number in [0, 1] {
        let many = CONNECTION_IN_FLIGHT_MAX as u64;
        let rule = |offset, len, count_max| FaultRule {
            operation: FaultOperation::Write,
            effect: FaultEffect::Delay(Duration::from_secs(1)),
            range: Some(ByteRange { offset, len }),
            count_max: Some(count_max),
        };
        // The old connection's writes, but not that of the new one behind its own.
        let (first, others) = (rule(0, BLOCK as u64, 1), rule(BLOCK as u64, many * BLOCK as u64, many));
        let options = VolumeOptions { faults: FaultRules(vec![first, others]), ..VolumeOptions::default() };
        let volume = Arc::new(Volume::new("v", Store::memory("v", 4 << 20).unwrap(), options));
        let mut node = Node::new(IoChoice::Epoll, &volume);
        let mut old = node.connect(0);
        let fill = |cookies: std::ops::RangeInclusive<u64>| {
            cookies.flat_map(|cookie| write(cookie, cookie * BLOCK as u64, 1)).collect::<Vec<u8>>()
        };
        node.send(&mut old, &fill(1..=many - 2));
        while node.at_store() < CONNECTION_IN_FLIGHT_MAX - 2 {
            node.turn();
        }
        let new = node.connect(number);
        // It is asked before the first two of these, which are as many as may be in flight. The third waits.
        node.send(&mut old, &[fill(many - 1..=many), write(many + 1, 0, 1)].concat());
        while node.at_store() < CONNECTION_IN_FLIGHT_MAX {
            node.turn();
        }
        drop(old);
        write_on(new, &mut node);
    }
}

#[test]
fn a_client_that_leaves_while_its_change_waits_is_let_go_of() {
    for io in backends() {
        let mut node = Node::new(io, &slow_at_first(1, Duration::from_secs(20)));
        let mut old = node.connect(0);
        node.send(&mut old, &write(1, 0, 1));
        while node.at_store() == 0 {
            node.turn();
        }
        let mut new: Vec<UnixStream> = (0..8).map(|_| node.connect(1)).collect();
        for client in &mut new {
            node.send(client, &write(1, 0, 2));
        }
        for _ in 0..100 {
            node.turn();
        }
        assert_eq!((node.loops[1].frontend.connection_count(), node.at_store()), (8, 1), "their changes wait");
        drop(new);
        while node.loops[1].frontend.connection_count() > 0 {
            node.turn();
        }
        assert_eq!(node.at_store(), 1, "none of them was begun");
    }
}

#[test]
fn a_change_of_another_client_that_begins_later_is_not_waited_for() {
    let mut node = Node::new(IoChoice::Epoll, &slow_at_first(u64::MAX, Duration::from_millis(300)));
    let mut busy = node.connect(0);
    node.send(&mut busy, &write(1, BLOCK as u64, 1));
    while node.at_store() == 0 {
        node.turn();
    }
    let mut new = node.connect(1);
    node.send(&mut new, &write(1, 0, 2));
    // From now on `busy` always has a write at the store.
    let mut sent = 1;
    let mut answer = [0; 16];
    loop {
        if node.loops[0].engine.in_flight() < 4 {
            sent += 1;
            node.send(&mut busy, &write(sent, BLOCK as u64, 1));
        }
        node.turn();
        let _ = busy.read(&mut answer);
        if new.read(&mut answer).is_ok_and(|n| n == 16) {
            return;
        }
    }
}
