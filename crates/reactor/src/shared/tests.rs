//! Rings under two threads, peers that lie, and peers that die.

mod arenas;

use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::memory::SharedMemory;
use super::ring::{Bell, Ended, Reader, Writer};
use crate::{Address, Completion, Frame, Gather, IoChoice, Op, Outcome, Reactor, Scatter, Socket, Token, Wait};

const RING: usize = 4096;

fn memory() -> Arc<SharedMemory> {
    Arc::new(SharedMemory::create(RING).unwrap().0)
}

/// Writes a word of the control page, as a hostile peer would.
fn lie(memory: &SharedMemory, at: usize, word: u64) {
    // SAFETY: eight bytes of the control page.
    unsafe { std::ptr::copy_nonoverlapping(word.to_ne_bytes().as_ptr(), memory.control(at), 8) };
}

/// The byte at a place of the stream.
fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8
}

#[test]
fn bytes_come_in_order_through_a_small_ring_and_no_wake_up_is_lost() {
    const TOTAL: u64 = 3_000_000;
    let memory = memory();
    let (mut writer, mut reader) = (Writer::new(&memory, 0), Reader::new(&memory, 0));
    let (to_reader, reader_hears) = std::sync::mpsc::channel();
    let (to_writer, writer_hears) = std::sync::mpsc::channel();
    let writing = std::thread::spawn(move || {
        let (mut at, mut step) = (0u64, 1usize);
        while at < TOTAL {
            let room = writer.room(usize::MAX).unwrap();
            if room == 0 {
                writer.sleep();
                if writer.room(1).unwrap() == 0 {
                    // Only a bell ends this: if it were lost, the test would hang.
                    let () = writer_hears.recv().unwrap();
                }
                continue;
            }
            let n = room.min(step).min((TOTAL - at) as usize);
            for i in 0..n {
                let (place, run) = writer.place(i);
                assert!(run > 0);
                // SAFETY: within the ring's room.
                unsafe { place.write(byte(at + i as u64)) };
            }
            at += n as u64;
            step = step * 5 % 2039 + 1;
            if writer.publish(n) == Bell::Ring {
                let _ = to_reader.send(());
            }
        }
        let _ = writer.end(Ended::Done);
        let _ = to_reader.send(());
    });
    let (mut at, mut step) = (0u64, 1usize);
    loop {
        let (here, ended) = reader.here().unwrap();
        if here == 0 && ended == Ended::Done {
            break;
        }
        if here == 0 {
            reader.sleep();
            if reader.here().unwrap() == (0, Ended::No) {
                let () = reader_hears.recv().unwrap();
            }
            continue;
        }
        let n = here.min(step);
        for i in 0..n {
            // SAFETY: within what is here.
            let got = unsafe { reader.place(i).0.read() };
            assert_eq!(got, byte(at + i as u64), "byte {}", at + i as u64);
        }
        at += n as u64;
        step = step * 7 % 3001 + 1;
        if reader.consume(n) == Bell::Ring {
            let _ = to_writer.send(());
        }
    }
    writing.join().unwrap();
    assert_eq!(at, TOTAL);
}

#[test]
fn counters_that_cannot_be_true_end_the_stream() {
    for word in [RING as u64 + 11, 1 << 63] {
        let memory = memory();
        let (mut writer, reader) = (Writer::new(&memory, 0), Reader::new(&memory, 0));
        let _ = writer.publish(10);
        lie(&memory, 0, word);
        lie(&memory, 128, word);
        assert_eq!(reader.here(), Err(Errno::PROTO), "{word}");
        assert_eq!(writer.room(usize::MAX), Err(Errno::PROTO), "{word}");
    }
}

#[test]
fn a_bell_finds_the_socket_of_a_slot_that_was_used_very_often() {
    let mut shared = super::Shared::default();
    for generation in [7, 1 << 24, (1 << 24) + 7] {
        let socket = Socket { index: generation & 3, generation };
        let (ours, _) = UnixStream::pair().unwrap();
        let (lending, _) = super::lending::sockets().unwrap();
        let ends = super::shm_stream::StreamState::new(
            (memory(), lending),
            super::shm_stream::StreamSide::Client,
            ours.into(),
        );
        shared.streams.insert(socket, super::shm_stream::ShmStream::new(ends));
        assert_eq!(shared.named_by(super::bell_token(socket)), Some(socket));
        shared.streams.remove(socket);
        assert_eq!(shared.named_by(super::bell_token(socket)), None);
    }
}

/// A loop and what came of its operations.
struct Loop {
    reactor: Reactor,
    done: Vec<Completion>,
}

impl Loop {
    fn new(io: IoChoice) -> Self {
        Self { reactor: Reactor::open(io, 8 << 20).unwrap(), done: Vec::new() }
    }

    /// Waits for the outcome of an operation.
    fn wait(&mut self, tag: u32) -> Outcome {
        let deadline = self.reactor.now() + std::time::Duration::from_secs(30);
        loop {
            if let Some(place) = self.done.iter().position(|completion| completion.token.index() == tag) {
                return self.done.remove(place).outcome;
            }
            assert!(self.reactor.now() < deadline, "operation {tag} never ends");
            let until = self.reactor.now() + std::time::Duration::from_secs(1);
            self.reactor.reap(&mut self.done, Wait::Until(until)).unwrap();
        }
    }

    fn submit(&mut self, tag: u32, op: Op) {
        self.reactor.submit(op, Token::new(1, 0, tag, 0));
    }

    fn frame(&self, len: usize) -> Frame {
        self.reactor.frames().alloc(len).unwrap()
    }

    fn receive(&mut self, tag: u32, socket: Socket, len: usize) {
        let into = Scatter::one(self.frame(len), 0, len);
        self.submit(tag, Op::Recv { socket, into, min: len });
    }

    fn send(&mut self, tag: u32, socket: Socket, len: usize) {
        let mut gather = Gather::new();
        gather.push_frame(self.frame(len), 0, len);
        self.submit(tag, Op::Send { socket, gather });
    }
}

fn received(outcome: Outcome) -> Result<usize, Errno> {
    let Outcome::Received { result, .. } = outcome else { panic!("{outcome:?}") };
    result
}

fn sent(outcome: Outcome) -> Result<usize, Errno> {
    let Outcome::Sent { result, .. } = outcome else { panic!("{outcome:?}") };
    result
}

/// A loop that has connected to a server made by hand, the server's socket and its memory.
fn by_hand(io: IoChoice) -> (Loop, Socket, UnixStream, Arc<SharedMemory>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let mut client = Loop::new(io);
    client.submit(0, Op::Connect { to: Address::Shared(path) });
    let mut none = Vec::new();
    client.reactor.reap(&mut none, Wait::Poll).unwrap();
    let (server, _) = listener.accept().unwrap();
    let (memory, _) = super::greeting::give(server.as_fd(), RING).unwrap();
    client.done = none;
    let Outcome::Connected(Ok(socket)) = client.wait(0) else { panic!("not connected") };
    (client, socket, server, memory)
}

const BOTH: [IoChoice; 2] = [IoChoice::Uring, IoChoice::Epoll];

#[test]
fn a_peer_that_dies_is_no_end_of_the_stream() {
    for io in BOTH {
        let (mut client, socket, server, memory) = by_hand(io);
        client.receive(1, socket, 100);
        client.send(2, socket, 3 * RING);
        let mut writer = Writer::new(&memory, 1);
        let _ = writer.publish(40);
        drop(server);
        assert_eq!(received(client.wait(1)), Err(Errno::CONNRESET), "40 of 100 bytes came");
        assert_eq!(sent(client.wait(2)), Err(Errno::PIPE));
        client.reactor.close(socket);
    }
}

#[test]
fn a_peer_that_writes_nonsense_breaks_its_stream_alone() {
    for io in BOTH {
        let (mut client, socket, server, memory) = by_hand(io);
        client.receive(1, socket, 100);
        client.send(2, socket, 3 * RING);
        // The tail of ring 1, and the head of ring 0.
        lie(&memory, 512, 1 << 40);
        lie(&memory, 128, 1 << 40);
        rustix::net::send(&server, &[1], rustix::net::SendFlags::NOSIGNAL).unwrap();
        assert_eq!(received(client.wait(1)), Err(Errno::PROTO));
        assert_eq!(sent(client.wait(2)), Err(Errno::PROTO));
        client.reactor.close(socket);
        client.submit(3, Op::Timer { at: client.reactor.now() });
        assert!(matches!(client.wait(3), Outcome::TimedOut(Ok(()))), "the loop goes on");
    }
}

#[test]
fn a_bell_that_is_rung_without_end_does_no_harm() {
    for io in BOTH {
        let (mut client, socket, server, memory) = by_hand(io);
        client.receive(1, socket, 8);
        for _ in 0..100 {
            let _ = rustix::net::send(&server, &[9; 5000], rustix::net::SendFlags::DONTWAIT);
            client.reactor.reap(&mut client.done, Wait::Poll).unwrap();
        }
        let mut writer = Writer::new(&memory, 1);
        let _ = writer.publish(8);
        assert_eq!(received(client.wait(1)), Ok(8));
    }
}

/// The kernel reports room in a socket to its writer when the reader has taken a byte.
#[test]
fn a_bell_that_the_peer_hears_does_not_wake_who_has_rung_it() {
    let (mut client, socket, mut server, memory) = by_hand(IoChoice::Epoll);
    Reader::new(&memory, 0).sleep();
    client.send(1, socket, 100);
    assert_eq!(sent(client.wait(1)), Ok(100));
    client.reactor.reap(&mut client.done, Wait::Poll).unwrap();
    std::io::Read::read_exact(&mut server, &mut [0]).unwrap();
    let mut queue = [PollFd::from_borrowed_fd(client.reactor.descriptor().unwrap(), PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    assert_eq!(poll(&mut queue, Some(&now)).unwrap(), 0, "the loop has something to do");
}

#[test]
fn a_listener_of_another_kind_is_named() {
    for io in BOTH {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let mut client = Loop::new(io);
        for (said, error) in [(&b"HTTP/1.1 400 Bad"[..], Errno::PROTO), (b"", Errno::CONNRESET)] {
            client.submit(0, Op::Connect { to: Address::Shared(path.clone()) });
            let mut none = Vec::new();
            client.reactor.reap(&mut none, Wait::Poll).unwrap();
            let (mut server, _) = listener.accept().unwrap();
            std::io::Write::write_all(&mut server, said).unwrap();
            drop(server);
            client.done = none;
            let connected = client.wait(0);
            assert!(matches!(connected, Outcome::Connected(Err(was)) if was == error), "{connected:?}");
        }
    }
}

#[test]
fn a_stream_is_handed_from_loop_to_loop_with_what_is_in_it() {
    for io in BOTH {
        let (mut client, socket, server, memory) = by_hand(io);
        let mut writer = Writer::new(&memory, 1);
        let _ = writer.publish(10);
        client.receive(1, socket, 4);
        assert_eq!(received(client.wait(1)), Ok(4));
        client.receive(2, socket, 100);
        assert!(client.reactor.release(socket).is_none(), "a receive is in flight");
        client.reactor.cancel(Token::new(1, 0, 2, 0));
        assert_eq!(received(client.wait(2)), Ok(6), "what had come is not lost");
        let _ = writer.publish(10);
        let stream = client.reactor.release(socket).unwrap();
        let other = std::thread::spawn(move || {
            let mut other = Loop::new(io);
            let socket = other.reactor.adopt(stream).unwrap();
            other.receive(1, socket, 10);
            assert_eq!(received(other.wait(1)), Ok(10));
            other.receive(2, socket, 5);
            other.send(3, socket, RING);
            assert_eq!(sent(other.wait(3)), Ok(RING));
            assert_eq!(received(other.wait(2)), Ok(5), "the bell is heard");
        });
        let reader = Reader::new(&memory, 0);
        while reader.here().unwrap().0 < RING {
            std::thread::yield_now();
        }
        if writer.publish(5) == Bell::Ring {
            rustix::net::send(&server, &[1], rustix::net::SendFlags::NOSIGNAL).unwrap();
        }
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while !other.is_finished() && std::time::Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert!(other.is_finished(), "a wake-up was lost (descriptor {})", server.as_raw_fd());
        other.join().unwrap();
    }
}

#[test]
fn what_fits_is_sent_at_once_and_what_does_not_is_not_sent_at_all() {
    for io in BOTH {
        let (mut client, socket, server, memory) = by_hand(io);
        let reader = Reader::new(&memory, 0);
        let gather = |client: &Loop, len| {
            let mut gather = Gather::new();
            gather.push_head(b"head");
            gather.push_frame(client.frame(len), 0, len);
            gather
        };
        let (small, large) = (gather(&client, 1000), gather(&client, RING - 1000));
        assert!(client.reactor.send_now(socket, &small));
        assert_eq!(reader.here(), Ok((1004, Ended::No)));
        assert!(!client.reactor.send_now(socket, &large), "four bytes too many");
        assert_eq!(reader.here(), Ok((1004, Ended::No)));
        client.submit(1, Op::Send { socket, gather: large });
        assert!(!client.reactor.send_now(socket, &small), "another is before it");
        client.reactor.cancel(Token::new(1, 0, 1, 0));
        let _ = client.wait(1);
        let calls = client.reactor.counters().send_calls;
        assert!(!client.reactor.send_now(socket, &small), "no room");
        assert_eq!(client.reactor.counters().send_calls, calls);
        client.reactor.shutdown_send(socket);
        assert!(!client.reactor.send_now(socket, &Gather::new()), "nothing more is sent");
        drop(server);
    }
}

#[test]
fn a_stream_that_always_has_something_keeps_no_other_operation_waiting() {
    for io in BOTH {
        let (mut client, socket, server, memory) = by_hand(io);
        let mut writer = Writer::new(&memory, 1);
        let _ = writer.publish(1);
        client.receive(1, socket, 1);
        let (ours, theirs) = UnixStream::pair().unwrap();
        let other = client.reactor.adopt(std::os::fd::OwnedFd::from(ours)).unwrap();
        client.receive(2, other, 1);
        std::io::Write::write_all(&mut &theirs, b"x").unwrap();
        let mut turns = 0;
        loop {
            client.reactor.reap(&mut client.done, Wait::Poll).unwrap();
            if client.done.iter().any(|completion| completion.token.index() == 2) {
                break;
            }
            assert_eq!(received(client.wait(1)), Ok(1), "each turn has something");
            let _ = writer.publish(1);
            client.receive(1, socket, 1);
            turns += 1;
            assert!(turns < 1000, "the other stream starves");
        }
        drop(server);
    }
}
