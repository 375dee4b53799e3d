//! Memory that a peer has lent, and that this process has no room to map. A process of its own: the limit is the process's.

use std::time::{Duration, Instant};

use byway_fabric::node::{Address, Completed, Deadline, Node, NodeOptions, Op, Outcome, Rights, Session};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// A peer maps it in parts of 64 MiB.
const MEMORY: usize = 80 << 20;
/// Address space that is left: for no part.
const ROOM: u64 = 8 << 20;
/// More than a payload, so that an operation has several parts; across two of the memory's.
const LEN: usize = (2 << 20) + 4097;
const AT: u64 = (64 << 20) - 1_500_000;

/// The end of an operation, while the other node is turned.
fn end(op: &Op, other: &Node) -> Completed {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        assert!(Instant::now() < deadline, "it does not end");
        other.progress().unwrap();
        if let Ok(result) = op.test() {
            return result;
        }
    }
}

fn session(op: &Op, other: &Node) -> Session {
    let ended = end(op, other);
    let Ok(Outcome::Session(session)) = ended else { panic!("{ended:?}") };
    session
}

fn limit_address_space() -> Rlimit {
    let pages: u64 = std::fs::read_to_string("/proc/self/statm").unwrap().split(' ').next().unwrap().parse().unwrap();
    let limit = getrlimit(Resource::As);
    let bytes = pages * rustix::param::page_size() as u64 + ROOM;
    setrlimit(Resource::As, Rlimit { current: Some(bytes), ..limit }).unwrap();
    limit
}

#[test]
fn lent_memory_that_cannot_be_mapped_is_put_to_and_got_from() {
    let folder = tempfile::tempdir().unwrap();
    let at = Address::Shared(folder.path().join("s"));
    let [server, client] = [(); 2].map(|()| Node::open(&NodeOptions::default()).unwrap());
    server.listen(&at).unwrap();
    let (accept, connect) = (server.start_accept().unwrap(), client.start_connect(&at).unwrap());
    let (to_server, to_client) = (session(&connect, &server), session(&accept, &client));
    let memory = server.register_shared(MEMORY).unwrap();
    let window = server.open_window(to_client, &memory, 0..MEMORY, Rights::BOTH).unwrap();
    assert_eq!(end(&server.send(to_client, b"open", &[]).unwrap(), &client), Ok(Outcome::Done));
    let soon = || Deadline::after(Duration::from_secs(20));
    assert_eq!(client.receive(soon()).unwrap().header, b"open");
    let (from, into) = (client.register(LEN).unwrap(), client.register(LEN).unwrap());
    let bytes: Vec<u8> = (0..LEN).map(|at| (at * 31 + at / 251) as u8).collect();
    from.write(0, &bytes).unwrap();
    let to = window.descriptor();

    let limit = limit_address_space();
    let put = client.put_with_message(to_server, &[from.segment(0..LEN)], &to, AT, b"put").unwrap();
    let put = end(&put, &server);
    let message = server.receive(soon()).map(|message| message.header);
    let got = end(&client.get(to_server, &to, AT, &[into.segment(0..LEN)]).unwrap(), &server);
    setrlimit(Resource::As, limit).unwrap();

    assert_eq!((put, got), (Ok(Outcome::Done), Ok(Outcome::Done)));
    assert_eq!(message.unwrap(), b"put");
    let mut found = vec![0; LEN];
    for (memory, at) in [(&memory, AT as usize), (&into, 0)] {
        memory.read(at, &mut found).unwrap();
        assert!(found == bytes);
    }
}
