//! Clients that ask in their handshake and read nothing.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use byway_reactor::{IoChoice, Wait};
use byway_service::block::{Store, Volume, VolumeOptions};

use super::*;

const LIST: &[u8] = b"\0\0\0\x03IHAVEOPT\0\0\0\x03\0\0\0\0";
const VOLUMES: usize = 64;
const DESCRIPTION: usize = 4000;

struct Rig {
    reactor: Reactor,
    engine: Engine,
    catalog: Catalog,
    door: NbdDoor,
}

impl Rig {
    fn new() -> Self {
        let mut reactor = Reactor::open(IoChoice::Epoll, 4 << 20).unwrap();
        let (mut engine, mut catalog) = (Engine::default(), Catalog::default());
        let volume = |number: usize| {
            let options = VolumeOptions { description: "d".repeat(DESCRIPTION), ..VolumeOptions::default() };
            Arc::new(Volume::new(format!("v{number}"), Store::null(512), options))
        };
        catalog.replace(&mut engine, &mut reactor, &(0..VOLUMES).map(volume).collect::<Vec<_>>());
        Self { reactor, engine, catalog, door: NbdDoor::new(NbdOptions::default()) }
    }

    fn turn(&mut self) {
        let Self { reactor, engine, catalog, door } = self;
        let mut completions = Vec::new();
        let until = reactor.now() + Duration::from_millis(1);
        reactor.reap(&mut completions, Wait::Until(until)).unwrap();
        for completion in completions {
            door.handle(&mut Floor { reactor, engine, catalog }, completion);
        }
    }

    /// A client that asks for the list.
    fn ask(&mut self) -> UnixStream {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let same = ours.try_clone().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let Self { reactor, engine, catalog, door } = self;
        let socket = reactor.adopt(std::os::fd::OwnedFd::from(ours)).unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&same, 1).unwrap();
        door.open(&mut Floor { reactor, engine, catalog }, socket);
        theirs.write_all(LIST).unwrap();
        theirs
    }

    /// Turns until a client has so many bytes.
    fn read(&mut self, client: &mut UnixStream, bytes: usize) -> Vec<u8> {
        let (mut all, mut some) = (Vec::new(), vec![0; 64 << 10]);
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while all.len() < bytes {
            assert!(std::time::Instant::now() < deadline, "{} of {bytes} bytes came", all.len());
            self.turn();
            let n = client.read(&mut some).unwrap_or(0);
            all.extend_from_slice(&some[..n]);
        }
        all
    }
}

/// The kind of the first reply, behind the server's greeting.
fn kind(said: &[u8]) -> u32 {
    assert_eq!(said[18..30], *b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x03");
    u32::from_be_bytes(said[30..34].try_into().unwrap())
}

#[test]
fn lists_that_nobody_reads_are_bounded_together() {
    const SERVER: u32 = 2;
    const POLICY: u32 = 1 << 31 | 2;
    let (mut rig, list) = (Rig::new(), VOLUMES * DESCRIPTION);
    let hoards = GREETINGS_HEAP_BYTES_MAX / list + 40;
    let mut hoarders: Vec<UnixStream> = (0..hoards).map(|_| rig.ask()).collect();
    let mut late = rig.ask();
    let refused = rig.read(&mut late, 38);
    assert_eq!(kind(&refused), POLICY, "and its connection goes on");
    late.write_all(&LIST[4..]).unwrap();
    rig.read(&mut late, 20);
    let queued = rig.door.queued_heap_bytes();
    let most = GREETINGS_HEAP_BYTES_MAX + 2 * list;
    assert!(queued > GREETINGS_HEAP_BYTES_MAX && queued < most, "{queued} bytes wait");
    // One of those who had theirs reads it, though late.
    let first = rig.read(&mut hoarders[0], list);
    assert_eq!(kind(&first), SERVER);
    hoarders.clear();
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    while rig.door.queued_heap_bytes() > 0 {
        assert!(std::time::Instant::now() < deadline, "{} bytes wait", rig.door.queued_heap_bytes());
        rig.turn();
    }
    let mut next = rig.ask();
    assert_eq!(kind(&rig.read(&mut next, list)), SERVER);
}
