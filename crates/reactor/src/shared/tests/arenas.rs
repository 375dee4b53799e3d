//! Arenas between two loops: placement, refusals, and the state that remains when one end is gone.

use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;

use rustix::io::Errno;

use super::{BOTH, Loop, by_hand, received, sent};
use crate::limits::{
    ARENA_BYTES_MAX, ARENAS_BYTES_MAX, ARENAS_PER_STREAM_MAX, FRAME_BYTES_MAX, PEER_MAPPED_BYTES_MAX, PEER_PART_BYTES,
};
use crate::{
    Address, Counters, File, FileOptions, FileRange, Frame, FramePool, Gather, IoChoice, LentPlace, Mapping, Op,
    OpenFile, Outcome, Socket,
};

const ARENA: usize = FRAME_BYTES_MAX;

/// A client and a server, and a stream between them.
struct Pair {
    client: Loop,
    server: Loop,
    ours: Socket,
    theirs: Socket,
}

impl Pair {
    fn new(io: IoChoice) -> Self {
        let (mut client, mut server) = (Loop::new(io), Loop::new(io));
        let (ours, theirs) = connect(&mut client, &mut server);
        Self { client, server, ours, theirs }
    }

    /// With an arena that was lent and taken.
    fn with_arena(io: IoChoice, bytes: usize) -> (Self, FramePool) {
        let mut pair = Self::new(io);
        let arena = FramePool::shared(bytes).unwrap();
        pair.client.reactor.lend_arena(pair.ours, &arena).unwrap();
        assert_eq!(pair.server.reactor.take_memory(pair.theirs, 0), Ok(bytes as u64));
        (pair, arena)
    }

    fn put(&mut self, gather: &Gather, offset: u64) -> Result<(), Errno> {
        self.server.reactor.put(self.theirs, gather, LentPlace { memory: 0, offset })
    }

    fn get(&mut self, offset: u64, into: &mut [u8]) -> Result<(), Errno> {
        get(&mut self.server.reactor, self.theirs, 0, offset, into)
    }
}

fn get(reactor: &mut crate::Reactor, socket: Socket, memory: u32, offset: u64, into: &mut [u8]) -> Result<(), Errno> {
    let mut frame = reactor.frames().alloc(into.len().max(1)).unwrap();
    frame.write(0, into);
    let got = reactor.get(socket, LentPlace { memory, offset }, &mut frame, 0..into.len());
    frame.read(0, into);
    got
}

fn connect(client: &mut Loop, server: &mut Loop) -> (Socket, Socket) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = server.reactor.listen(&Address::Shared(path.clone())).unwrap();
    client.submit(0, Op::Connect { to: Address::Shared(path) });
    server.submit(0, Op::Accept { listener });
    client.reactor.reap(&mut client.done, crate::Wait::Poll).unwrap();
    let Outcome::Accepted(Ok(theirs)) = server.wait(0) else { panic!("not accepted") };
    let Outcome::Connected(Ok(ours)) = client.wait(0) else { panic!("not connected") };
    server.reactor.close_listener(listener);
    assert!(matches!(server.wait(0), Outcome::Accepted(Err(Errno::CANCELED))));
    (ours, theirs)
}

fn head(bytes: &[u8]) -> Gather {
    let mut gather = Gather::new();
    gather.push_head(bytes);
    gather
}

/// The whole of an arena of one frame, with something everywhere.
fn canaries(arena: &FramePool) -> Frame {
    let mut frame = arena.alloc(ARENA).unwrap();
    assert_eq!(frame.arena_offset(), Some(0));
    let bytes: Vec<u8> = (0..ARENA).map(|at| super::byte(at as u64)).collect();
    frame.write(0, &bytes);
    frame
}

/// A file with something in it, mapped.
fn file(owner: &mut Loop, len: usize) -> (File, std::fs::File, Vec<u8>) {
    let file = tempfile::NamedTempFile::new().unwrap();
    let bytes: Vec<u8> = (0..len as u64).map(|at| super::byte(at + 77) | 1).collect();
    std::fs::write(file.path(), &bytes).unwrap();
    let options = FileOptions { map: true, ..FileOptions::default() };
    let open = OpenFile::open(file.path(), options).unwrap();
    (owner.reactor.add_file(Arc::new(open)), file.into_file(), bytes)
}

/// Mappings and descriptors that this process has of a file.
fn held(file: BorrowedFd<'_>) -> (usize, usize) {
    let inode = rustix::fs::fstat(file).unwrap().st_ino;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let is_it =
        |line: &&str| line.contains("byway-arena") && line.split_whitespace().nth(4) == Some(&inode.to_string());
    let fds = std::fs::read_dir("/proc/self/fd").unwrap();
    let names = fds.filter_map(|entry| Some(entry.ok()?.path()));
    let of_arena =
        names.filter(|path| std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("byway-arena")));
    let inodes = of_arena.filter_map(|path| Some(std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(path).ok()?)));
    (maps.lines().filter(is_it).count(), inodes.filter(|of| *of == inode).count())
}

/// Lengths and offsets around every edge that there is.
fn ranges() -> impl Iterator<Item = (usize, usize)> {
    let lens = [0, 1, 7, 4095, 4096, 4097, 70_001, ARENA - 1, ARENA];
    lens.into_iter().flat_map(|len| {
        let offsets = [0, 1, 63, 4095, 4096, 4097, ARENA / 2 + 5, ARENA - 4096, ARENA.saturating_sub(len)];
        offsets.into_iter().filter(move |offset| offset + len <= ARENA).map(move |offset| (offset, len))
    })
}

#[test]
fn what_is_put_lies_where_it_belongs_and_nothing_else_changes() {
    for io in BOTH {
        let (mut pair, arena) = Pair::with_arena(io, ARENA);
        let mut whole = canaries(&arena);
        let mut model = whole.to_vec();
        for (round, (offset, len)) in ranges().enumerate() {
            let bytes: Vec<u8> = (0..len).map(|at| super::byte((at * 3 + round) as u64)).collect();
            let (first, rest) = bytes.split_at(len / 3);
            let mut gather = head(first);
            if !rest.is_empty() {
                let mut frame = pair.server.frame(rest.len() + 5);
                frame.write(5, rest);
                gather.push_frame(frame, 5, rest.len());
            }
            assert_eq!(pair.put(&gather, offset as u64), Ok(()), "{len} bytes at {offset}");
            model[offset..offset + len].copy_from_slice(&bytes);
            assert!(whole.to_vec()[..] == model, "{len} bytes at {offset}");
            let mut got = vec![0x55; len + 2];
            assert_eq!(pair.get(offset as u64, &mut got[1..=len]), Ok(()));
            assert!(got[1..=len] == bytes && got[0] == 0x55 && got[len + 1] == 0x55, "{len} bytes at {offset}");
        }
        // What the client writes is what the server gets.
        whole.write(10, b"hello");
        let mut got = [0; 7];
        assert_eq!(pair.get(9, &mut got), Ok(()));
        assert_eq!(&got[1..6], b"hello");
        assert_eq!((got[0], got[6]), (model[9], model[15]));
    }
}

#[test]
fn a_gather_of_everything_is_put_in_one_copy() {
    for io in BOTH {
        let (mut pair, arena) = Pair::with_arena(io, ARENA);
        let whole = canaries(&arena);
        let mut model = whole.to_vec();
        let (file, _kept, bytes) = file(&mut pair.server, 50_000);
        let shared = Rc::new({
            let mut frame = pair.server.frame(9000);
            frame.fill(0xcc);
            frame
        });
        let mut gather = head(b"head");
        gather.push_shared(Rc::clone(&shared), 100, 5000);
        gather.push_map(file, 4095, 30_001);
        gather.push_zeroes(70_000);
        gather.push_shared(shared, 0, 1);
        gather.push_map(file, 49_999, 1);
        let expected =
            [b"head", &[0xcc; 5000][..], &bytes[4095..34_096], &[0; 70_000], &[0xcc], &bytes[49_999..]].concat();
        let before = pair.server.reactor.counters();
        assert_eq!(pair.put(&gather, 333), Ok(()));
        model[333..333 + expected.len()].copy_from_slice(&expected);
        assert!(whole.to_vec()[..] == model);
        let mut got = vec![0; 5000];
        assert_eq!(pair.get(337, &mut got), Ok(()));
        let (put, total) = (before.put_bytes + expected.len() as u64, expected.len() as u64 + 5000);
        let after = pair.server.reactor.counters();
        let moved = Counters { put_bytes: put, got_bytes: 5000, mapped_loans: 1, sleeps: after.sleeps, ..before };
        assert_eq!(after, moved);
        assert_eq!(after.copied_bytes() - before.copied_bytes(), total, "each byte once");
        // The gather is the caller's still.
        assert_eq!(pair.put(&gather, (ARENA - expected.len()) as u64), Ok(()));
    }
}

#[test]
fn what_does_not_fit_is_refused_and_touches_nothing() {
    for io in BOTH {
        let (mut pair, arena) = Pair::with_arena(io, ARENA);
        let whole = canaries(&arena);
        let model = whole.to_vec();
        let gather = head(b"ten bytes.");
        let end = ARENA as u64;
        for offset in [end - 9, end - 1, end, end + 1, 1 << 32, 1 << 63, u64::MAX - 10, u64::MAX - 9, u64::MAX] {
            assert_eq!(pair.put(&gather, offset), Err(Errno::RANGE), "{offset}");
            let mut got = [7; 10];
            assert_eq!(pair.get(offset, &mut got), Err(Errno::RANGE), "{offset}");
            assert_eq!(got, [7; 10]);
        }
        assert_eq!((pair.put(&Gather::new(), end), pair.get(end, &mut [])), (Ok(()), Ok(())));
        assert_eq!(pair.put(&Gather::new(), end + 1), Err(Errno::RANGE));
        let (file, _kept, _) = file(&mut pair.server, 10_000);
        let mut outside = head(b"not this either");
        outside.push_map(file, 5000, 5001);
        assert_eq!(pair.put(&outside, 0), Err(Errno::FAULT));
        let mut stale = head(b"nor this");
        stale.push_map(file, 0, 10);
        pair.server.reactor.remove_file(file);
        assert_eq!(pair.put(&stale, 0), Err(Errno::BADF));
        assert!(whole.to_vec()[..] == model);
    }
}

#[test]
fn a_file_that_became_shorter_is_an_error_and_no_signal() {
    for io in BOTH {
        let (mut pair, arena) = Pair::with_arena(io, ARENA);
        let whole = canaries(&arena);
        let model = whole.to_vec();
        let (file, cut, _) = file(&mut pair.server, 100_000);
        let mut gather = Gather::new();
        gather.push_map(file, 0, 100_000);
        cut.set_len(50_000).unwrap();
        assert_eq!(pair.put(&gather, 1000), Err(Errno::FAULT));
        assert!(whole.to_vec()[..1000] == model[..1000] && whole.to_vec()[101_000..] == model[101_000..]);
    }
}

#[test]
fn a_file_is_read_straight_into_the_memory_of_the_peer() {
    for io in BOTH {
        let (mut pair, arena) = Pair::with_arena(io, ARENA);
        let whole = canaries(&arena);
        let mut model = whole.to_vec();
        let (file, cut, bytes) = file(&mut pair.server, 100_000);
        let before = pair.server.reactor.counters();
        let put = |pair: &mut Pair, (offset, len), to: u64| {
            let from = FileRange { file, offset, len };
            pair.server.reactor.put_file(pair.theirs, from, LentPlace { memory: 0, offset: to })
        };
        assert_eq!(put(&mut pair, (10, 60_000), 1000), Ok(60_000));
        model[1000..61_000].copy_from_slice(&bytes[10..60_010]);
        assert_eq!(put(&mut pair, (90_000, 20_000), 70_000), Ok(10_000), "up to the end of the file");
        model[70_000..80_000].copy_from_slice(&bytes[90_000..]);
        cut.set_len(50_000).unwrap();
        assert_eq!(put(&mut pair, (49_999, 20_000), 5), Ok(1), "the file became shorter");
        model[5] = bytes[49_999];
        assert_eq!(put(&mut pair, (60_000, 20_000), 5), Ok(0));
        assert_eq!(put(&mut pair, (0, 2), ARENA as u64 - 1), Err(Errno::RANGE));
        assert!(whole.to_vec()[..] == model);
        let after = pair.server.reactor.counters();
        assert_eq!(after.copied_bytes() - before.copied_bytes(), 70_001, "each byte once");
        pair.server.reactor.remove_file(file);
        assert_eq!(put(&mut pair, (0, 1), 0), Err(Errno::BADF));
    }
}

#[test]
fn streams_without_an_arena_say_so() {
    for io in BOTH {
        let mut pair = Pair::new(io);
        assert_eq!(pair.put(&head(b"x"), 0), Err(Errno::NOTCONN));
        assert_eq!(pair.get(0, &mut [0]), Err(Errno::NOTCONN));
        assert_eq!(pair.server.reactor.peer_arena_bytes(pair.theirs), None);
        assert_eq!(pair.server.reactor.take_memory(pair.theirs, 0), Err(Errno::AGAIN));
        let arena = FramePool::shared(1).unwrap();
        assert_eq!(pair.server.reactor.lend_arena(pair.theirs, &arena), Err(Errno::OPNOTSUPP));
        let plain = pair.client.reactor.frames().clone();
        assert_eq!(pair.client.reactor.lend_arena(pair.ours, &plain), Err(Errno::INVAL));
        // The end that lends copies nothing itself.
        pair.client.reactor.lend_arena(pair.ours, &arena).unwrap();
        assert_eq!(
            pair.client.reactor.put(pair.ours, &head(b"x"), LentPlace { memory: 0, offset: 0 }),
            Err(Errno::NOTCONN)
        );
        assert_eq!(pair.client.reactor.peer_arena_bytes(pair.ours), None);
        // Another kind of stream.
        let (plain, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let plain = pair.client.reactor.adopt(std::os::fd::OwnedFd::from(plain)).unwrap();
        assert_eq!(pair.client.reactor.lend_arena(plain, &arena), Err(Errno::NOTCONN));
        assert_eq!(pair.client.reactor.take_memory(plain, 0), Err(Errno::NOTCONN));
        pair.server.reactor.close(pair.theirs);
        assert_eq!(pair.put(&head(b"x"), 0), Err(Errno::NOTCONN), "a stale handle");
    }
}

#[test]
fn an_arena_goes_with_its_stream_and_stays_when_the_client_is_gone() {
    for io in BOTH {
        let (mut pair, arena) = Pair::with_arena(io, ARENA);
        assert_eq!(held(arena.file().unwrap()), (1, 2), "the server has a descriptor, and has mapped nothing yet");
        assert_eq!(pair.get(0, &mut [0]), Ok(()));
        assert_eq!(held(arena.file().unwrap()), (2, 2));
        let Pair { client, server, theirs, .. } = &mut pair;
        server.receive(1, *theirs, 1);
        drop(std::mem::replace(client, Loop::new(io)));
        assert_eq!(received(server.wait(1)), Err(Errno::CONNRESET), "the client is gone without a word");
        assert_eq!(pair.put(&head(b"nobody reads this"), 0), Ok(()));
        let mut got = [0; 6];
        assert_eq!(pair.get(0, &mut got), Ok(()));
        assert_eq!(&got, b"nobody");
        pair.server.reactor.close(pair.theirs);
        assert_eq!(held(arena.file().unwrap()), (1, 1), "the pool's own");
    }
}

#[test]
fn pages_that_a_client_gives_back_under_the_server_are_zeroes() {
    for io in BOTH {
        let (mut pair, arena) = Pair::with_arena(io, ARENA);
        let whole = canaries(&arena);
        let (mode, file) = (crate::blocking::fallocate_flags(crate::Allocate::PunchHole), arena.file().unwrap());
        rustix::fs::fallocate(file, mode, 0, ARENA as u64).unwrap();
        let mut got = [9; 100];
        assert_eq!(pair.get(4090, &mut got), Ok(()));
        assert_eq!(got, [0; 100]);
        assert_eq!(pair.put(&head(b"new page"), 8190), Ok(()));
        assert_eq!(&whole.to_vec()[8189..8199], b"\0new page\0");
    }
}

#[test]
fn an_arena_is_handed_from_loop_to_loop_with_its_stream() {
    for io in BOTH {
        let (Pair { mut client, mut server, ours, theirs }, arena) = Pair::with_arena(io, ARENA);
        let whole = canaries(&arena);
        let stream = server.reactor.release(theirs).unwrap();
        assert_eq!(server.reactor.put(theirs, &head(b"x"), LentPlace { memory: 0, offset: 0 }), Err(Errno::NOTCONN));
        assert_eq!(held(arena.file().unwrap()), (1, 2), "it is on its way, and mapped where it arrives");
        let other = std::thread::spawn(move || {
            let mut other = Loop::new(io);
            let theirs = other.reactor.adopt(stream).unwrap();
            assert_eq!(other.reactor.peer_arena_bytes(theirs), Some(ARENA as u64));
            assert_eq!(other.reactor.take_memory(theirs, 0), Ok(ARENA as u64));
            other.reactor.put(theirs, &head(b"from the other loop"), LentPlace { memory: 0, offset: 100 }).unwrap();
            other.send(1, theirs, 1);
            assert_eq!(sent(other.wait(1)), Ok(1));
            other.receive(2, theirs, 1);
            assert_eq!(received(other.wait(2)), Ok(0), "the client ends the stream");
            other.reactor.close(theirs);
        });
        client.receive(1, ours, 1);
        assert_eq!(received(client.wait(1)), Ok(1));
        assert_eq!(&whole.to_vec()[100..119], b"from the other loop");
        // The end that has lent is handed over too, and has lent.
        let stream = client.reactor.release(ours).unwrap();
        let ours = client.reactor.adopt(stream).unwrap();
        assert_eq!(client.reactor.lend_arena(ours, &arena), Err(Errno::ALREADY));
        client.reactor.close(ours);
        other.join().unwrap();
        assert_eq!(held(arena.file().unwrap()), (1, 1));
    }
}

#[test]
fn a_loop_takes_only_so_much() {
    for io in BOTH {
        let mut pair = Pair::new(io);
        let arena = FramePool::shared(ARENA_BYTES_MAX).unwrap();
        let mut streams = Vec::new();
        for round in 0..ARENAS_BYTES_MAX / ARENA_BYTES_MAX as u64 {
            let (ours, theirs) = connect(&mut pair.client, &mut pair.server);
            pair.client.reactor.lend_arena(ours, &arena).unwrap();
            assert_eq!(pair.server.reactor.take_memory(theirs, 0), Ok(ARENA_BYTES_MAX as u64), "{round}");
            streams.push((ours, theirs));
        }
        let small = FramePool::shared(1).unwrap();
        pair.client.reactor.lend_arena(pair.ours, &small).unwrap();
        assert_eq!(pair.server.reactor.take_memory(pair.theirs, 0), Err(Errno::NOBUFS));
        assert_eq!(pair.server.reactor.take_memory(pair.theirs, 0), Err(Errno::NOENT), "it was refused");
        // The stream goes on without.
        pair.client.send(1, pair.ours, 10);
        pair.server.receive(1, pair.theirs, 10);
        assert_eq!(sent(pair.client.wait(1)), Ok(10));
        assert_eq!(received(pair.server.wait(1)), Ok(10));
        // Another loop with an arena of its own cannot take over all of them.
        let mut other = Loop::new(io);
        let (ours, theirs) = connect(&mut pair.client, &mut other);
        pair.client.reactor.lend_arena(ours, &small).unwrap();
        assert_eq!(other.reactor.take_memory(theirs, 0), Ok(small.bytes() as u64));
        let adopted: Vec<_> = streams
            .drain(..)
            .map(|(_, theirs)| other.reactor.adopt(pair.server.reactor.release(theirs).unwrap()))
            .collect();
        let (last, others) = adopted.split_last().unwrap();
        assert!(others.iter().all(Result::is_ok));
        assert_eq!(last.as_ref().map_err(Errno::from_io_error), Err(Some(Errno::NOBUFS)));
        assert_eq!(held(arena.file().unwrap()), (1, 1 + others.len()));
    }
}

#[test]
fn a_client_cannot_lend_to_a_server_that_listens_no_more() {
    for io in BOTH {
        // The server made by hand closes its end of the lending socket at once.
        let (mut client, socket, _server, _memory) = by_hand(io);
        let arena = FramePool::shared(1).unwrap();
        assert_eq!(client.reactor.lend_arena(socket, &arena), Err(Errno::PIPE));
        client.reactor.close(socket);
    }
}

#[test]
fn either_end_lends_memory_and_takes_what_the_other_has_lent() {
    for io in BOTH {
        let mut pair = Pair::new(io);
        let memories: Vec<Mapping> = (0..3).map(|_| Mapping::shared(8192).unwrap()).collect();
        let loans: Vec<_> = memories.iter().map(|memory| memory.lend(true).unwrap()).collect();
        // Two from the server, one from the client, each counted for itself.
        let Pair { client, server, ours, theirs } = &mut pair;
        assert_eq!(server.reactor.lend_memory(*theirs, &loans[0]), Ok(0));
        assert_eq!(client.reactor.lend_memory(*ours, &loans[1]), Ok(0));
        assert_eq!(server.reactor.lend_memory(*theirs, &loans[2]), Ok(1));
        assert_eq!(client.reactor.take_memory(*ours, 1), Ok(8192), "and the one before");
        for (number, which) in [(0, 0), (1, 2)] {
            assert_eq!(client.reactor.take_memory(*ours, number), Ok(8192));
            assert_eq!(client.reactor.take_memory(*ours, number), Ok(8192), "it was taken");
            client
                .reactor
                .put(*ours, &head(&[number as u8 + 5; 10]), LentPlace { memory: number, offset: 8182 })
                .unwrap();
            // SAFETY: the last byte of the memory, which nobody writes now.
            assert_eq!(unsafe { memories[which].as_ptr().add(8191).read_volatile() }, number as u8 + 5);
        }
        assert_eq!(client.reactor.take_memory(*ours, 2), Err(Errno::AGAIN), "no more were lent");
        assert_eq!(server.reactor.take_memory(*theirs, 0), Ok(8192));
        let mut got = [1; 4];
        assert_eq!(get(&mut server.reactor, *theirs, 0, 8188, &mut got), Ok(()));
        assert_eq!(got, [0; 4]);
        assert_eq!(client.reactor.peer_arena_bytes(*ours), Some(16_384));
        client.reactor.leave_memory(*ours, 0);
        assert_eq!(get(&mut client.reactor, *ours, 0, 0, &mut got), Err(Errno::NOTCONN));
        assert_eq!(client.reactor.take_memory(*ours, 0), Err(Errno::NOENT));
        assert_eq!(get(&mut client.reactor, *ours, 1, 8190, &mut got[..2]), Ok(()));
        assert_eq!((got, client.reactor.peer_arena_bytes(*ours)), ([6, 6, 0, 0], Some(8192)));
    }
}

#[test]
fn memory_lent_for_reading_is_not_put_to() {
    for io in BOTH {
        let mut pair = Pair::new(io);
        let memory = Mapping::shared(4096).unwrap();
        let loan = memory.lend(false).unwrap();
        assert_eq!(pair.client.reactor.lend_memory(pair.ours, &loan), Ok(0));
        assert_eq!(pair.server.reactor.take_memory(pair.theirs, 0), Ok(4096));
        assert_eq!(pair.put(&head(b"x"), 0), Err(Errno::ACCESS));
        let mut got = [1; 4];
        assert_eq!(pair.get(4092, &mut got), Ok(()));
        assert_eq!(got, [0; 4]);
    }
}

#[test]
fn so_many_memories_are_taken_of_a_stream_and_the_next_when_one_was_left() {
    for io in BOTH {
        let mut pair = Pair::new(io);
        let memory = Mapping::shared(4096).unwrap();
        let loan = memory.lend(false).unwrap();
        let most = ARENAS_PER_STREAM_MAX as u32;
        for number in 0..=most {
            assert_eq!(pair.client.reactor.lend_memory(pair.ours, &loan), Ok(number));
            let taken = pair.server.reactor.take_memory(pair.theirs, number);
            assert_eq!(taken, if number < most { Ok(4096) } else { Err(Errno::NOBUFS) });
        }
        let mut got = [1; 4];
        assert_eq!(get(&mut pair.server.reactor, pair.theirs, most - 1, 0, &mut got), Ok(()), "what was taken stays");
        assert_eq!(get(&mut pair.server.reactor, pair.theirs, most, 0, &mut got), Err(Errno::NOTCONN));
        pair.server.reactor.leave_memory(pair.theirs, 0);
        assert_eq!(pair.client.reactor.lend_memory(pair.ours, &loan), Ok(most + 1));
        assert_eq!(pair.server.reactor.take_memory(pair.theirs, most + 1), Ok(4096));
        assert_eq!(pair.server.reactor.take_memory(pair.theirs, most), Err(Errno::NOENT), "it was refused");
        assert_eq!(get(&mut pair.server.reactor, pair.theirs, most + 1, 0, &mut got), Ok(()));
    }
}

/// Else a peer that goes on lending would keep the loop for as many memories as it names.
#[test]
fn a_peer_that_names_a_memory_far_ahead_is_taken_nothing_from_any_more() {
    for io in BOTH {
        let mut pair = Pair::new(io);
        let memory = Mapping::shared(4096).unwrap();
        let loan = memory.lend(false).unwrap();
        assert_eq!(pair.client.reactor.lend_memory(pair.ours, &loan), Ok(0));
        assert_eq!(pair.server.reactor.take_memory(pair.theirs, u32::MAX), Err(Errno::PROTO));
        assert_eq!(pair.server.reactor.take_memory(pair.theirs, 0), Err(Errno::PROTO), "also not what is there");
    }
}

/// A memory of 64 GiB, of which hardly a page is there.
#[test]
fn a_memory_larger_than_what_may_be_mapped_is_read_everywhere() {
    const BYTES: usize = 64 << 30;
    for io in BOTH {
        let mut pair = Pair::new(io);
        let memory = Mapping::shared(BYTES).unwrap();
        let loan = memory.lend(false).unwrap();
        // In the middle of a part, across the edge of two, and at both ends of the memory.
        let edges = (1..BYTES / PEER_PART_BYTES).step_by(13).map(|part| part * PEER_PART_BYTES);
        let places: Vec<usize> = edges.flat_map(|edge| [edge - 2, edge + 5000]).chain([0, BYTES - 4]).collect();
        for (value, at) in places.iter().enumerate() {
            // SAFETY: four bytes of the memory, which nobody else touches yet.
            unsafe { memory.as_ptr().add(*at).cast::<u32>().write_unaligned(value as u32 + 1) };
        }
        let before = pair.server.reactor.counters().mapped_loans;
        assert_eq!(pair.client.reactor.lend_memory(pair.ours, &loan), Ok(0));
        assert_eq!(pair.server.reactor.take_memory(pair.theirs, 0), Err(Errno::NOBUFS), "a server's loop has a bound");
        pair.server.reactor.take_all_memory();
        assert_eq!(pair.client.reactor.lend_memory(pair.ours, &loan), Ok(1));
        assert_eq!(pair.server.reactor.take_memory(pair.theirs, 1), Ok(BYTES as u64));
        for round in 0..2 {
            for (value, at) in places.iter().enumerate() {
                let mut got = [0; 4];
                assert_eq!(get(&mut pair.server.reactor, pair.theirs, 1, *at as u64, &mut got), Ok(()));
                assert_eq!(u32::from_ne_bytes(got), value as u32 + 1, "at {at} in round {round}");
                assert!(pair.server.reactor.mapped_peer_bytes() <= PEER_MAPPED_BYTES_MAX);
            }
        }
        let mapped = pair.server.reactor.counters().mapped_loans - before;
        assert!(mapped as usize > 2 * PEER_MAPPED_BYTES_MAX / PEER_PART_BYTES, "{mapped} parts came and went");
        let mut got = [0; 4];
        let beyond = get(&mut pair.server.reactor, pair.theirs, 1, BYTES as u64 - 3, &mut got);
        assert_eq!(beyond, Err(Errno::RANGE));
        // What was used last is mapped still.
        let before = pair.server.reactor.counters().mapped_loans;
        assert_eq!(get(&mut pair.server.reactor, pair.theirs, 1, BYTES as u64 - 4, &mut got), Ok(()));
        assert_eq!(pair.server.reactor.counters().mapped_loans, before);
    }
}
