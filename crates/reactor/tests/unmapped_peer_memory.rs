//! Memory of a peer that this process has no room to map. A process of its own: the limit is the process's.

use std::sync::Arc;

use byway_reactor::{
    Address, Errno, FileOptions, FileRange, Frame, Gather, IoChoice, LentPlace, Mapping, Op, OpenFile, Outcome,
    Reactor, Socket, Token, Wait,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Two parts of it are mapped, of 64 MiB and 16 MiB.
const MEMORY: usize = 80 << 20;
/// Address space that is left: for no part.
const ROOM: u64 = 8 << 20;
/// Across both parts.
const AT: u64 = (64 << 20) - 70_000;

fn wait(reactor: &mut Reactor) -> Outcome {
    let mut done = Vec::new();
    while done.is_empty() {
        reactor.reap(&mut done, Wait::Block).unwrap();
    }
    done.remove(0).outcome
}

/// The ends of a stream: the client's, and the server's.
fn connect(client: &mut Reactor, server: &mut Reactor) -> (Socket, Socket) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = server.listen(&Address::Shared(path.clone())).unwrap();
    client.submit(Op::Connect { to: Address::Shared(path) }, Token::new(0, 0, 0, 0));
    server.submit(Op::Accept { listener }, Token::new(0, 0, 0, 0));
    let mut done = Vec::new();
    client.reap(&mut done, Wait::Poll).unwrap();
    assert!(done.is_empty(), "nobody has accepted");
    let Outcome::Accepted(Ok(theirs)) = wait(server) else { panic!("not accepted") };
    let Outcome::Connected(Ok(ours)) = wait(client) else { panic!("not connected") };
    (ours, theirs)
}

/// Leaves this process so little address space that no part of the memory fits.
fn limit_address_space() -> Rlimit {
    let pages: u64 = std::fs::read_to_string("/proc/self/statm").unwrap().split(' ').next().unwrap().parse().unwrap();
    let limit = getrlimit(Resource::As);
    setrlimit(Resource::As, Rlimit { current: Some(pages * rustix::param::page_size() as u64 + ROOM), ..limit })
        .unwrap();
    limit
}

fn bytes(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + at / 251 + seed) as u8).collect()
}

#[test]
fn memory_that_cannot_be_mapped_is_reached_all_the_same() {
    let (mut client, mut server) =
        (Reactor::open(IoChoice::Epoll, 4 << 20).unwrap(), Reactor::open(IoChoice::Epoll, 4 << 20).unwrap());
    let (ours, theirs) = connect(&mut client, &mut server);
    let memory = Mapping::shared(MEMORY).unwrap();
    let loan = memory.lend(true).unwrap();
    assert_eq!(client.lend_memory(ours, &loan), Ok(0));
    assert_eq!(server.take_memory(theirs, 0), Ok(MEMORY as u64));
    let place = |offset| LentPlace { memory: 0, offset };

    let contents = bytes(100_000, 5);
    let path = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(path.path(), &contents).unwrap();
    let options = FileOptions { map: true, ..FileOptions::default() };
    let file = server.add_file(Arc::new(OpenFile::open(path.path(), options).unwrap()));
    let mut gather = Gather::new();
    let mut frame = server.frames().alloc(200_000).unwrap();
    frame.write(0, &bytes(200_000, 9));
    gather.push_head(b"head");
    gather.push_frame(frame, 0, 200_000);
    gather.push_map(file, 77, 90_000);
    gather.push_zeroes(80_000);
    let expected = [b"head", &bytes(200_000, 9)[..], &contents[77..90_077], &[0; 80_000]].concat();
    let mut into = server.frames().alloc(expected.len()).unwrap();

    let limit = limit_address_space();
    let put = server.put(theirs, &gather, place(AT));
    let got = server.get(theirs, place(AT), &mut into, 0..expected.len());
    let from = FileRange { file, offset: 0, len: 100_000 };
    let put_file = server.put_file(theirs, from, place(0));
    let mapped = server.counters().mapped_loans;
    setrlimit(Resource::As, limit).unwrap();

    assert_eq!((put, got), (Ok(()), Ok(())));
    assert_eq!(put_file, Err(Errno::AGAIN), "through a frame, which is put then");
    assert_eq!(mapped, 0);
    assert!(into.to_vec()[..expected.len()] == expected);
    // SAFETY: all of the memory, which no loop uses any more.
    let found = unsafe { Frame::over(&memory, AT as usize - 1, expected.len() + 2) }.to_vec();
    assert!(found[1..=expected.len()] == expected && found[0] == 0 && found[expected.len() + 1] == 0);
    // With room again it is mapped.
    assert_eq!(server.put_file(theirs, from, place(0)), Ok(100_000));
    assert_eq!(server.counters().mapped_loans, 1);
}
