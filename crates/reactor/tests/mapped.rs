//! The limit on mapped bytes, on real loops: what was sent from a mapping or received into one leaves the page tables
//! again, and no byte is lost by it. One test: limit and resident memory are the process's.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use byway_reactor::{
    Address, File, Gather, IoChoice, Op, OpenFile, Outcome, Reactor, Socket, Token, Wait, limit_mapped, mapped_memory,
};

const LIMIT_BYTES: u64 = 32 << 20;
const FILE_BYTES: u64 = 128 << 20;
/// A loop's uncounted rest (a quantum is 1 MiB at this limit), and as much for kernels that sum up resident memory only
/// roughly (before 6.16).
const SLACK_BYTES: u64 = 2 << 20;
const PIECE_BYTES: usize = 1 << 20;
const DEADLINE: Duration = Duration::from_secs(60);

/// Bytes of files in the page tables.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split_whitespace().nth(2).unwrap().parse().unwrap();
    pages * rustix::param::page_size() as u64
}

/// The piece of a file that starts at `offset`: bytes that tell where they belong.
fn pattern(seed: u64, offset: u64) -> Vec<u8> {
    let words = (offset..offset + PIECE_BYTES as u64).step_by(8);
    words.flat_map(|at| (at + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect()
}

fn offsets() -> impl Iterator<Item = u64> {
    (0..FILE_BYTES).step_by(PIECE_BYTES)
}

fn outcome(reactor: &mut Reactor, op: Op) -> Outcome {
    reactor.submit(op, Token::new(1, 0, 1, 0));
    outcome_of(reactor)
}

fn outcome_of(reactor: &mut Reactor) -> Outcome {
    let deadline = Instant::now() + DEADLINE;
    let mut done = Vec::new();
    while done.is_empty() {
        assert!(Instant::now() < deadline, "it takes too long");
        let soon = reactor.now() + Duration::from_millis(10);
        reactor.reap(&mut done, Wait::Until(soon)).unwrap();
    }
    done.remove(0).outcome
}

/// A stream to the loop, and the loop's end of it.
fn connect(reactor: &mut Reactor, path: &Path) -> (UnixStream, Socket) {
    let listener = reactor.listen(&Address::Unix(path.to_owned())).unwrap();
    let peer = UnixStream::connect(path).unwrap();
    peer.set_read_timeout(Some(DEADLINE)).unwrap();
    peer.set_write_timeout(Some(DEADLINE)).unwrap();
    let Outcome::Accepted(Ok(socket)) = outcome(reactor, Op::Accept { listener }) else { panic!("not accepted") };
    reactor.close_listener(listener);
    assert!(matches!(outcome_of(reactor), Outcome::Accepted(Err(_))));
    (peer, socket)
}

fn assert_comes_down(what: &str) {
    let deadline = Instant::now() + DEADLINE;
    while resident_bytes() > LIMIT_BYTES + SLACK_BYTES {
        assert!(Instant::now() < deadline, "{what}: {} MiB stay mapped", resident_bytes() >> 20);
        std::thread::yield_now();
    }
}

fn send_all(reactor: &mut Reactor, socket: Socket, file: File) {
    for offset in offsets() {
        let mut gather = Gather::new();
        for part in (offset..offset + PIECE_BYTES as u64).step_by(64 << 10) {
            gather.push_map(file, part, 64 << 10);
        }
        let sent = outcome(reactor, Op::Send { socket, gather });
        assert!(matches!(sent, Outcome::Sent { result: Ok(PIECE_BYTES), .. }), "{sent:?}");
    }
}

fn receive_all(reactor: &mut Reactor, socket: Socket, file: File) {
    let deadline = Instant::now() + DEADLINE;
    let mut at = 0;
    while at < FILE_BYTES {
        at += reactor.receive_into_file(socket, file, at, PIECE_BYTES.min((FILE_BYTES - at) as usize)) as u64;
        assert!(Instant::now() < deadline, "received {at} bytes");
    }
}

#[test]
fn mapped_bytes_leave_the_page_tables_and_come_back_right() {
    let base = resident_bytes();
    assert!(base < LIMIT_BYTES / 2, "the program itself has {base} bytes of files");
    limit_mapped(LIMIT_BYTES).unwrap();
    assert!(limit_mapped(LIMIT_BYTES).is_err(), "there is one already");
    let folder = tempfile::tempdir().unwrap();
    for (io, name) in [(IoChoice::Uring, "uring"), (IoChoice::Epoll, "epoll")] {
        let mut reactor = match Reactor::open(io, 4 << 20) {
            Ok(reactor) => reactor,
            Err(_) if io == IoChoice::Uring => {
                byway_skip::skip_part_of_this(byway_skip::NO_IO_URING);
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let (peer, socket) = connect(&mut reactor, &folder.path().join(name));
        let file = reactor.add_file(Arc::new(OpenFile::memory("mapped", FILE_BYTES).unwrap()));
        let dropped = || mapped_memory().unwrap().dropped_bytes;
        let before = dropped();
        std::thread::scope(|scope| {
            scope.spawn(|| offsets().for_each(|offset| (&peer).write_all(&pattern(7, offset)).unwrap()));
            receive_all(&mut reactor, socket, file);
        });
        assert_comes_down("received into");
        let received = dropped();
        assert!(received > before, "nothing was dropped");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut got = vec![0; PIECE_BYTES];
                for offset in offsets().chain(offsets()) {
                    (&peer).read_exact(&mut got).unwrap();
                    assert!(got == pattern(7, offset), "at {offset}");
                }
            });
            send_all(&mut reactor, socket, file);
            assert_comes_down("sent once");
            send_all(&mut reactor, socket, file);
        });
        assert_comes_down("sent twice");
        assert!(dropped() > received, "nothing was dropped");
        assert_eq!(mapped_memory().unwrap().limit_bytes, LIMIT_BYTES);
    }
}
