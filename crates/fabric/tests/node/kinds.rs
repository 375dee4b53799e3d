//! Memory that peers on one host reach by themselves, memory of the caller's, and whose fault it is if that cannot be.

use std::os::fd::{AsFd, OwnedFd};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};

use byway_fabric::limits::TURN_BYTES_MAX;
use byway_fabric::node::{
    Deadline, Memory, Node, NodeOptions, OpError, Outcome, RegisterError, Rights, SubmitError, WaitError,
};
use byway_fabric::windows::WindowError;
use byway_reactor::IoChoice;
use rustix::fs::{MemfdFlags, SealFlags};

use crate::rig::{CANARY, Rig, Turner, Wire, canaries_are_whole, copy_of, done, end, pattern, soon, window_is_all};

crate::over_each_wire!(
    a_callers_file_is_memory_and_its_own_views_see_it,
    what_is_closed_is_not_reached_any_more,
    a_peer_that_dies_leaves_memory_as_it_is,
    a_peer_that_is_given_up_loses_what_it_could_write,
    memory_is_written_by_one_peer_at_a_time_and_read_by_many,
    sixty_four_segments_of_all_kinds_of_memory_are_one_transfer,
);

crate::over_rdma!(sixty_four_segments_of_all_kinds_of_memory_are_one_transfer);

fn memfd(bytes: u64, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

fn sealed(bytes: u64) -> OwnedFd {
    memfd(bytes, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
}

/// Whether a peer reaches windows of this wire by itself.
fn is_lent(rig: &Rig) -> bool {
    rig.wire == Wire::Lent
}

#[test]
fn a_file_that_will_not_do_is_refused_by_name() {
    let node = Rig::new(Wire::Tcp, IoChoice::Epoll).node();
    let refused = |fd: &OwnedFd, range| node.register_file(fd.as_fd(), range).map(|memory| memory.len()).unwrap_err();
    assert_eq!(refused(&memfd(4096, SealFlags::GROW | SealFlags::SEAL), 0..4096), RegisterError::NotSealed);
    let fd = sealed(3 * 4096);
    for range in [0..0, 1..4096, 0..3 * 4096 + 1, 4096..1 << 40, 3 * 4096..3 * 4096 + 1] {
        assert_eq!(refused(&fd, range.clone()), RegisterError::Range, "{range:?}");
    }
    let plain: OwnedFd = tempfile::tempfile().unwrap().into();
    assert_eq!(refused(&plain, 0..1), RegisterError::NotMemory);
    let fixed = memfd(4096, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL);
    assert!(matches!(refused(&fixed, 0..4096), RegisterError::Io(_)));
    let mut memory = node.register_file(fd.as_fd(), 4096..8292).unwrap();
    assert_eq!((memory.len(), memory.is_exposed()), (4196, true));
    assert!(memory.bytes().is_err() && memory.bytes_mut().is_err(), "the caller may write there at any time");
}

#[test]
fn memory_and_operations_are_of_one_node_at_a_time() {
    let rig = Rig::new(Wire::Tcp, IoChoice::Epoll);
    let pair = rig.pair();
    let theirs = pair.server.register(4096).unwrap();
    let ours = pair.client.register_shared(4096).unwrap();
    let window = pair.server.open_window(pair.to_client, &theirs, 0..4096, Rights::BOTH).unwrap();
    let at = window.descriptor();
    let put = pair.client.put(pair.to_server, &[theirs.segment(0..1)], &at, 0);
    assert_eq!(put.unwrap_err(), SubmitError::OtherNode);
    let got = pair.client.get(pair.to_server, &at, 0, &[ours.segment(0..1), theirs.segment(0..1)]);
    assert_eq!(got.unwrap_err(), SubmitError::OtherNode);
    assert!(!ours.is_in_use(), "nothing has begun");
    // Names of operations are alike in both.
    let (here, there) = (pair.client.start_accept().unwrap(), pair.server.start_accept().unwrap());
    assert_eq!(pair.client.wait_any(&[&here, &there], Deadline::now()), Err(WaitError::OtherNode));
    let group = pair.client.group(4).unwrap();
    assert_eq!(group.adopt(&there, 1), Err(SubmitError::OtherNode));
    there.cancel().unwrap();
    assert_eq!(end(&there), Err(OpError::Cancelled), "its own node has it still");
    pair.close(window);
    let window =
        pair.client.open_window(pair.to_server, &theirs, 0..4096, Rights::GET).expect("nobody else uses it now");
    let opened = pair.server.open_window(pair.to_client, &theirs, 0..1, Rights::GET);
    assert_eq!(opened.unwrap_err(), SubmitError::OtherNode.into());
    drop(window);
}

/// A write by a thread of the program is no use by a node, so the first use by another node begins beside it.
#[test]
fn a_write_keeps_no_other_node_from_its_first_use_of_memory() {
    let rig = Rig::new(Wire::Tcp, IoChoice::Epoll);
    let pair = rig.pair();
    let memory = pair.server.register(16 << 20).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let bytes = vec![1; memory.len()];
            while !over.load(Ordering::Acquire) {
                memory.write(0, &bytes).unwrap();
            }
        });
        let used = std::panic::catch_unwind(AssertUnwindSafe(|| {
            for _ in 0..20 {
                pair.close(pair.client.open_window(pair.to_server, &memory, 0..4096, Rights::GET).unwrap());
                pair.close(pair.server.open_window(pair.to_client, &memory, 0..4096, Rights::GET).unwrap());
            }
        }));
        over.store(true, Ordering::Release);
        used.unwrap();
    });
}

/// The server's window lies in a file of its program's, the client receives into one.
fn a_callers_file_is_memory_and_its_own_views_see_it(rig: &Rig) {
    let pair = rig.pair();
    let _turner = Turner::of(&pair.server);
    let (theirs, ours) = (sealed(5 * 4096), sealed(5 * 4096));
    rustix::io::pwrite(&theirs, &[3; 5 * 4096], 0).unwrap();
    let memory = pair.server.register_file(theirs.as_fd(), 4096..4 * 4096).unwrap();
    let window = pair.server.open_window(pair.to_client, &memory, 100..8292, Rights::BOTH).unwrap();
    let alias = pair.client.register_file(ours.as_fd(), 8192..12_288).unwrap();
    // What the program writes by another view is what the peer gets, and what is got is seen by another view.
    rustix::io::pwrite(&theirs, b"by another view", 4096 + 100 + 500).unwrap();
    done(&pair.client.get(pair.to_server, &window.descriptor(), 500, &[alias.segment(10..25)]).unwrap());
    let mut seen = [0; 17];
    rustix::io::pread(&ours, &mut seen, 8192 + 9).unwrap();
    assert_eq!(&seen, b"\0by another view\0");
    alias.write(0, &[7; 4096]).unwrap();
    done(&pair.client.put(pair.to_server, &[alias.segment(0..4096)], &window.descriptor(), 4096).unwrap());
    let mut all = vec![0; 5 * 4096];
    rustix::io::pread(&theirs, &mut all, 0).unwrap();
    let put = 4096 + 100 + 4096;
    assert!(all[put..put + 4096].iter().all(|byte| *byte == 7));
    let rest = all[..4696].iter().chain(&all[4711..put]).chain(&all[put + 4096..]);
    assert!(rest.copied().all(|byte| byte == 3), "nothing else is touched");
    pair.close(window);
    assert!(!memory.is_in_use());
}

fn what_is_closed_is_not_reached_any_more(rig: &Rig) {
    let pair = rig.pair();
    let turner = Turner::of(&pair.server);
    let (memory, window) = pair.open(8192, Rights::BOTH);
    let remote = window.descriptor();
    let mine = pair.client.register(8192).unwrap();
    done(&pair.client.get(pair.to_server, &remote, 0, &[mine.segment(0..8192)]).unwrap());
    pair.close(window);
    memory.write(CANARY, &[0xdd; 8192]).unwrap();
    let refused = Err(OpError::Refused(WindowError::Key));
    assert_eq!(end(&pair.client.get(pair.to_server, &remote, 0, &[mine.segment(0..8192)]).unwrap()), refused);
    assert_eq!(end(&pair.client.put(pair.to_server, &[mine.segment(0..8192)], &remote, 0).unwrap()), refused);
    window_is_all(&memory, 0xdd);
    assert!((0..8192).all(|at| mine.bytes().unwrap()[at] == pattern(CANARY + at)), "the get before");
    // Another window in the same memory, and the first one's neighbour, are none of its business.
    let again = pair.server.open_window(pair.to_client, &memory, CANARY..CANARY + 100, Rights::GET).unwrap();
    done(&pair.client.get(pair.to_server, &again.descriptor(), 0, &[mine.segment(0..100)]).unwrap());
    assert_eq!(mine.bytes().unwrap()[99], 0xdd);
    canaries_are_whole(&memory);
    drop((again, turner));
}

fn a_peer_that_dies_leaves_memory_as_it_is(rig: &Rig) {
    let pair = rig.pair();
    let (memory, window) = pair.open(8192, Rights::BOTH);
    let turner = Turner::of(&pair.server);
    let mine = pair.client.register(8192).unwrap();
    mine.write(0, &[4; 8192]).unwrap();
    done(&pair.client.put(pair.to_server, &[mine.segment(0..8192)], &window.descriptor(), 0).unwrap());
    drop(turner);
    drop(pair.client);
    let ended = pair.server.start_receive(None).unwrap();
    assert!(matches!(end(&ended), Ok(Outcome::Ended(session, _)) if session == pair.to_client));
    done(&window.close().unwrap());
    window_is_all(&memory, 4);
    // It ended the session itself, so nothing was taken from it, and another peer can be lent the memory.
    assert_eq!(memory.is_exposed(), is_lent(rig));
    let next = rig.node();
    let address = rig.listen(&pair.server);
    let (to_next, to_server) = crate::rig::connect(&pair.server, &next, &address);
    let window = pair.server.open_window(to_next, &memory, 0..4096, Rights::PUT).unwrap();
    let turner = Turner::of(&pair.server);
    done(&next.put(to_server, &[mine.segment(0..4096)], &window.descriptor(), 0).unwrap());
    drop(turner);
    assert_eq!(copy_of(&memory)[..4096], [4; 4096]);
}

/// A session that is silent for too long is given up, while its peer may be in the middle of a copy.
fn a_peer_that_is_given_up_loses_what_it_could_write(rig: &Rig) {
    let keep_alive = std::time::Duration::from_millis(300);
    let options = byway_fabric::node::NodeOptions { keep_alive, ..rig.options() };
    let pair = rig.pair_of(&options);
    let (memory, window) = pair.open(8192, Rights::BOTH);
    let turner = Turner::of(&pair.server);
    let mine = pair.client.register(8192).unwrap();
    mine.write(0, &[4; 8192]).unwrap();
    done(&pair.client.put(pair.to_server, &[mine.segment(0..8192)], &window.descriptor(), 0).unwrap());
    drop(turner);
    // The server waits for something of a client that is turned no more.
    let theirs = pair.memory(&pair.client, 4096);
    let other = {
        let _client = Turner::of(&pair.client);
        let _server = Turner::of(&pair.server);
        pair.client.open_window(pair.to_server, &theirs, 0..4096, Rights::PUT).unwrap()
    };
    let forged = byway_fabric::node::Descriptor::from_bytes(&{
        let mut bytes = other.descriptor().to_bytes();
        bytes[8..16].copy_from_slice(&[1; 8]);
        bytes
    });
    let scratch = pair.server.register(100).unwrap();
    let owed = pair.server.get(pair.to_client, &forged, 0, &[scratch.segment(0..100)]).unwrap();
    assert!(matches!(end(&owed), Err(OpError::Ended(_))));
    // No other process can write there any more, so the program may look again.
    done(&window.close().unwrap());
    assert!(!memory.is_exposed());
    canaries_are_whole(&memory);
    assert!(memory.bytes().unwrap()[CANARY..CANARY + 8192].iter().all(|byte| *byte == 4), "it has what it had");
}

fn third(rig: &Rig, server: &Node) -> (Node, byway_fabric::node::Session, byway_fabric::node::Session) {
    let other = rig.node();
    let address = rig.listen(server);
    let (to_other, to_server) = crate::rig::connect(server, &other, &address);
    (other, to_other, to_server)
}

fn memory_is_written_by_one_peer_at_a_time_and_read_by_many(rig: &Rig) {
    let pair = rig.pair();
    let (other, to_other, other_to_server) = third(rig, &pair.server);
    let memory: Memory = pair.memory(&pair.server, 3 * 4096);
    memory.write(0, &[1; 3 * 4096]).unwrap();
    let mine = pair.client.register(4096).unwrap();
    mine.write(0, &[2; 4096]).unwrap();
    let read = pair.server.open_window(pair.to_client, &memory, 0..4096, Rights::GET).unwrap();
    let read_too = pair.server.open_window(to_other, &memory, 0..4096, Rights::GET).unwrap();
    assert!(!memory.is_exposed(), "readers cannot write");
    // A writer while others read goes through its connection; and all see what it wrote.
    let write = pair.server.open_window(pair.to_client, &memory, 0..4096, Rights::PUT).unwrap();
    assert!(!memory.is_exposed());
    let _turner = Turner::of(&pair.server);
    done(&pair.client.put(pair.to_server, &[mine.segment(0..4096)], &write.descriptor(), 0).unwrap());
    for (node, session, window) in [(&pair.client, pair.to_server, &read), (&other, other_to_server, &read_too)] {
        let into = node.register(4096).unwrap();
        done(&node.get(session, &window.descriptor(), 0, &[into.segment(0..4096)]).unwrap());
        assert_eq!(into.bytes().unwrap()[..], [2; 4096]);
    }
    for window in [read, read_too, write] {
        let _turners = (Turner::of(&pair.client), Turner::of(&other));
        done(&window.close().unwrap());
    }
    // What readers had is sealed: a writer goes through its connection from now on.
    let write = pair.server.open_window(pair.to_client, &memory, 0..4096, Rights::PUT).unwrap();
    assert!(!memory.is_exposed());
    done(&pair.client.put(pair.to_server, &[mine.segment(0..4096)], &write.descriptor(), 0).unwrap());
    pair.close(write);
    // In other memory one writes by itself, and the peer that comes later goes through its connection.
    let memory: Memory = pair.memory(&pair.server, 3 * 4096);
    let write = pair.server.open_window(to_other, &memory, 0..4096, Rights::BOTH).unwrap();
    let read = pair.server.open_window(pair.to_client, &memory, 0..4096, Rights::BOTH).unwrap();
    assert_eq!(memory.is_exposed(), is_lent(rig));
    mine.write(0, &[5; 4096]).unwrap();
    done(&other.put(other_to_server, &[mine.segment(0..4096)], &write.descriptor(), 0).unwrap());
    done(&pair.client.get(pair.to_server, &read.descriptor(), 0, &[mine.segment(0..4096)]).unwrap());
    assert_eq!(mine.bytes().unwrap()[..], [5; 4096]);
    mine.write(0, &[6; 4096]).unwrap();
    done(&pair.client.put(pair.to_server, &[mine.segment(0..4096)], &read.descriptor(), 0).unwrap());
    done(&other.get(other_to_server, &write.descriptor(), 0, &[mine.segment(0..4096)]).unwrap());
    assert_eq!(mine.bytes().unwrap()[..], [6; 4096]);
}

/// Where segment `n` lies, by turns in private memory, in memory that can be lent, and in a caller's file; canaries around it.
fn segment_range(n: usize) -> std::ops::Range<usize> {
    let start = CANARY + n / 3 * (SEGMENT + CANARY);
    start..start + SEGMENT
}

const SEGMENT: usize = 30_001;

fn sixty_four_segments_of_all_kinds_of_memory_are_one_transfer(rig: &Rig) {
    let pair = rig.pair();
    let _turner = Turner::of(&pair.server);
    let (memory, window) = pair.open(64 * SEGMENT, Rights::BOTH);
    let remote = window.descriptor();
    let bytes = (segment_range(63).end + CANARY).next_multiple_of(4096);
    let file = sealed(4096 + bytes as u64);
    let client = &pair.client;
    let mine = [
        client.register(bytes).unwrap(),
        client.register_shared(bytes).unwrap(),
        client.register_file(file.as_fd(), 4096..4096 + bytes as u64).unwrap(),
    ];
    for memory in &mine {
        memory.write(0, &vec![0xee; bytes]).unwrap();
    }
    let segments: Vec<_> = (0..64).map(|n| mine[n % 3].segment(segment_range(n))).collect();
    // What each memory is to look like, where segment `n` has the bytes that `lies` says.
    let assert_lies = |lies: &dyn Fn(usize) -> Vec<u8>| {
        for (kind, memory) in mine.iter().enumerate() {
            let mut wanted = vec![0xee; bytes];
            (kind..64).step_by(3).for_each(|n| wanted[segment_range(n)].copy_from_slice(&lies(n)));
            assert!(copy_of(memory) == wanted, "memory {kind}");
        }
        let mut seen = vec![0; bytes];
        rustix::io::pread(&file, &mut seen, 4096).unwrap();
        assert!(seen == copy_of(&mine[2]), "the caller's view");
    };
    done(&client.get(pair.to_server, &remote, 0, &segments).unwrap());
    assert_lies(&|n| (0..SEGMENT).map(|at| pattern(CANARY + n * SEGMENT + at)).collect());
    let put = |n: usize| -> Vec<u8> { (0..SEGMENT).map(|at| pattern(at * 7 + n)).collect() };
    (0..64).for_each(|n| mine[n % 3].write(segment_range(n).start, &put(n)).unwrap());
    done(&client.put(pair.to_server, &segments, &remote, 0).unwrap());
    assert_lies(&put);
    let wanted: Vec<u8> = (0..64).flat_map(put).collect();
    assert!(copy_of(&memory)[CANARY..CANARY + 64 * SEGMENT] == wanted);
    canaries_are_whole(&memory);
    // One more is too many, whatever it is of.
    let more: Vec<_> = (0..65).map(|n| mine[n % 3].segment(0..1)).collect();
    assert!(matches!(client.put(pair.to_server, &more, &remote, 0), Err(SubmitError::TooLong)));
    assert!(matches!(client.get(pair.to_server, &remote, 0, &more), Err(SubmitError::TooLong)));
    assert!(!mine.iter().any(Memory::is_in_use));
}

/// With nobody to turn the server: what is got and put is copied by the client alone.
#[test]
fn a_peer_on_the_same_host_is_not_asked_for_what_it_has_lent() {
    for rig in lent_rigs() {
        // Whichever of them listens.
        for client_asks in [true, false] {
            let pair = rig.pair();
            let (asks, to_owner, owner, to_asking) = if client_asks {
                (&pair.client, pair.to_server, &pair.server, pair.to_client)
            } else {
                (&pair.server, pair.to_client, &pair.client, pair.to_server)
            };
            let memory = owner.register_shared(3 << 20).unwrap();
            memory.write(4096, &[8; 2 << 20]).unwrap();
            let window = owner.open_window(to_asking, &memory, 4096..4096 + (2 << 20), Rights::BOTH).unwrap();
            done(&owner.send(to_asking, b"window", &window.descriptor().to_bytes()).unwrap());
            let remote = asks.receive(soon()).unwrap();
            let remote = byway_fabric::node::Descriptor::from_bytes(remote.payload[..].try_into().unwrap());
            let mine = asks.register(2 << 20).unwrap();
            // From here on nobody turns the owner.
            done(&asks.get(to_owner, &remote, 0, &[mine.segment(0..2 << 20)]).unwrap());
            assert!(mine.bytes().unwrap().iter().all(|byte| *byte == 8), "{:?}", rig.io);
            mine.write(0, &[9; 2 << 20]).unwrap();
            let put = asks.put(to_owner, &[mine.segment(0..2 << 20)], &remote, 0).unwrap();
            assert!(put.test().is_err(), "the owner has not said that it knows");
            assert!(copy_of(&memory)[4096..4096 + (2 << 20)].iter().all(|byte| *byte == 9), "but there it lies");
            let turner = Turner::of(owner);
            done(&put);
            drop(turner);
            // It is closed when the other has forgotten it, and says so.
            let close = window.close().unwrap();
            assert!(close.test().is_err() && memory.is_in_use());
            let turner = Turner::of(asks);
            done(&close);
            assert!(!memory.is_in_use());
            drop(turner);
        }
    }
}

/// The backends that there are (said aloud where one is not), each with a rig whose memory is lent.
fn lent_rigs() -> Vec<Rig> {
    let is_there = |io: &IoChoice| {
        let is_there = *io == IoChoice::Epoll || byway_reactor::Reactor::open_for_threads(*io, 1).is_ok();
        if !is_there {
            byway_skip::skip_part_of_this(byway_skip::NO_IO_URING);
        }
        is_there
    };
    [IoChoice::Epoll, IoChoice::Uring].into_iter().filter(is_there).map(|io| Rig::new(Wire::Lent, io)).collect()
}

/// The descriptor comes by another way than the session, and is used before what the owner says there was heard.
#[test]
fn a_put_that_began_before_its_window_was_lent_is_not_overtaken() {
    const LEN: usize = 24 << 20;
    for rig in lent_rigs() {
        let pair = rig.pair();
        let memory = pair.server.register_shared(LEN).unwrap();
        let mine: Vec<Memory> = (1..=3).map(|_| pair.client.register(LEN).unwrap()).collect();
        mine.iter().zip(1..).for_each(|(mine, value)| mine.write(0, &vec![value; LEN]).unwrap());
        // Word of the window lies behind all this.
        for _ in 0..50 {
            done(&pair.server.send(pair.to_client, b"first", &[0; 16 << 10]).unwrap());
        }
        let window = pair.server.open_window(pair.to_client, &memory, 0..LEN, Rights::PUT).unwrap();
        done(&pair.server.send(pair.to_client, b"lent", &[]).unwrap());
        let put = |mine: &Memory| pair.client.put(pair.to_server, &[mine.segment(0..LEN)], &window.descriptor(), 0);
        let before = put(&mine[0]).unwrap();
        assert_eq!(byte(&memory, LEN - 1), 0, "through the connection, which nobody reads now");
        loop {
            match pair.client.start_receive(None).unwrap().test() {
                Ok(came) if is_header(&came, b"lent") => break,
                Ok(_) => {}
                Err(_) => drop(pair.server.progress().unwrap()),
            }
        }
        assert!(byte(&memory, LEN - 1) == 0 && before.test().is_err(), "it is on its way");
        let after = put(&mine[1]).unwrap();
        let turner = Turner::of(&pair.server);
        done(&before);
        done(&after);
        drop(turner);
        assert!(copy_of(&memory).iter().all(|byte| *byte == 2), "the last one's bytes");
        // With none of those on its way, puts are copied at once again.
        let last = put(&mine[2]).unwrap();
        assert_eq!((byte(&memory, 0), byte(&memory, LEN - 1)), (3, 2), "but no more of them than a turn may copy");
        let turner = Turner::of(&pair.server);
        done(&last);
        drop(turner);
        pair.close(window);
    }
}

/// A large copy is not one turn's work: others have theirs in between.
#[test]
fn a_turn_copies_so_much_of_lent_memory_and_the_next_ones_go_on() {
    const LEN: usize = 3 * TURN_BYTES_MAX;
    for rig in lent_rigs() {
        let pair = rig.pair();
        let (theirs, window) = pair.open(LEN, Rights::BOTH);
        pair.server.send(pair.to_client, b"lent", &[]).unwrap();
        assert_eq!(pair.client.receive(soon()).unwrap().header, b"lent");
        let (mine, other) = (pair.client.register(LEN).unwrap(), pair.client.register(100).unwrap());
        let (whole, remote) = ([mine.segment(0..LEN)], window.descriptor());
        let get = pair.client.get(pair.to_server, &remote, 0, &whole).unwrap();
        assert_eq!((byte(&mine, TURN_BYTES_MAX - 1), byte(&mine, LEN - 1)), (pattern(CANARY + TURN_BYTES_MAX - 1), 0));
        // What begins now waits for it, and goes on with it.
        let behind = pair.client.get(pair.to_server, &remote, 0, &[other.segment(0..100)]).unwrap();
        assert_eq!(byte(&other, 99), 0);
        done(&get);
        done(&behind);
        assert!((0..LEN).step_by(997).all(|at| byte(&mine, at) == pattern(CANARY + at)));
        assert_eq!(byte(&other, 99), pattern(CANARY + 99));
        mine.write(0, &vec![0xaa; LEN]).unwrap();
        let put = pair.client.put(pair.to_server, &whole, &remote, 0).unwrap();
        assert_eq!(byte(&theirs, CANARY + LEN - 1), pattern(CANARY + LEN - 1));
        let turner = Turner::of(&pair.server);
        done(&put);
        drop(turner);
        window_is_all(&theirs, 0xaa);
        // The session ends in the middle of another.
        let cut = pair.client.get(pair.to_server, &remote, 0, &whole).unwrap();
        pair.client.close(pair.to_server).unwrap();
        assert!(matches!(end(&cut), Err(OpError::Ended(_))));
        assert!(!mine.is_in_use());
        let turner = Turner::of(&pair.client);
        drop(window);
        drop(turner);
    }
}

/// Puts that are longer than a turn may copy wait for credit, and get it all at once.
#[test]
fn long_puts_with_messages_that_waited_for_credit_are_copied_one_after_the_other() {
    const LEN: usize = 2 * TURN_BYTES_MAX;
    for rig in lent_rigs() {
        let pair = rig.pair_of(&NodeOptions { messages: 3, ..rig.options() });
        let (theirs, window) = pair.open(LEN, Rights::BOTH);
        pair.server.send(pair.to_client, b"lent", &[]).unwrap();
        assert_eq!(pair.client.receive(soon()).unwrap().header, b"lent");
        let mine = pair.client.register(LEN).unwrap();
        mine.write(0, &vec![0xaa; LEN]).unwrap();
        let turner = Turner::of(&pair.server);
        for _ in 0..3 {
            done(&pair.client.send(pair.to_server, b"credit", &[]).unwrap());
        }
        let (whole, to) = ([mine.segment(0..LEN)], window.descriptor());
        let mut puts = Vec::new();
        for told in [b"1", b"2"] {
            puts.push(pair.client.put_with_message(pair.to_server, &whole, &to, 0, told).unwrap());
        }
        let last = pair.client.send(pair.to_server, b"3", &[]).unwrap();
        drop(turner);
        for _ in 0..3 {
            assert_eq!(pair.server.receive(soon()).unwrap().header, b"credit");
        }
        std::thread::scope(|scope| {
            scope.spawn(|| puts.iter().chain([&last]).for_each(done));
            for header in [b"1", b"2", b"3"] {
                assert_eq!(pair.server.receive(soon()).unwrap().header, header);
            }
        });
        window_is_all(&theirs, 0xaa);
        let turner = Turner::of(&pair.client);
        drop(window);
        drop(turner);
    }
}

fn byte(memory: &Memory, at: usize) -> u8 {
    let mut byte = [0];
    memory.read(at, &mut byte).unwrap();
    byte[0]
}

fn is_header(came: &byway_fabric::node::Completed, header: &[u8]) -> bool {
    matches!(came, Ok(Outcome::Message(message)) if message.header == header)
}

/// The client is stopped, as far as its server knows, and can copy as long as it has the place.
#[test]
fn a_node_that_is_dropped_takes_back_what_a_peer_can_write() {
    for rig in lent_rigs() {
        let pair = rig.pair();
        let memory = pair.server.register_shared(8192).unwrap();
        let window = pair.server.open_window(pair.to_client, &memory, 0..8192, Rights::BOTH).unwrap();
        pair.server.send(pair.to_client, b"lent", &[]).unwrap();
        assert_eq!(pair.client.receive(soon()).unwrap().header, b"lent");
        let (remote, mine) = (window.descriptor(), pair.client.register(8192).unwrap());
        let closing = window.close().unwrap();
        assert!(closing.test().is_err(), "the client has not said that it forgets it");
        memory.write(0, &[5; 8192]).unwrap();
        assert!(memory.is_exposed());
        drop((closing, pair.server));
        assert!(!memory.is_exposed() && !memory.is_in_use());
        // Whose pages are nobody's now: the client is told, and not that there are zeroes.
        let got = pair.client.get(pair.to_server, &remote, 0, &[mine.segment(0..8192)]).map(|get| end(&get));
        assert!(matches!(got, Ok(Err(OpError::Ended(_))) | Err(SubmitError::Ended(_))), "{got:?}");
        assert_eq!(memory.bytes().unwrap()[..], [5; 8192], "it is as it was");
    }
}
