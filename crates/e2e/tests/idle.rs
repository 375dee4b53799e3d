//! Idle sessions use no CPU, neither in the node nor in its clients; and a connection wakes one loop.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use byway_e2e::{LIMIT, Server, backends, wait_until_idle};
use byway_reactor::{Address, IoChoice, Reactor, Wait};
use byway_service::block::client::{Volume, VolumeOptions};

/// Over each way; a loop has classes for so many volumes.
const SESSIONS: usize = 50;
/// A volume's class of completions, and those of the next ones.
const FIRST_CLASS: u8 = 0x30;

/// Clients of a server on one loop.
struct Clients {
    reactor: Reactor,
    volumes: Vec<Volume>,
}

impl Clients {
    fn new(io: IoChoice, address: &Address) -> Self {
        let reactor = Reactor::open(io, 16 << 20).unwrap();
        let connect = |n| Volume::connect(&reactor, address.clone(), "m", VolumeOptions::new(FIRST_CLASS + n as u8));
        let volumes = (0..SESSIONS).map(connect).collect();
        Self { reactor, volumes }
    }

    /// Does what there is to do for a tenth of a second.
    fn turn(&mut self) {
        let mut completions = Vec::new();
        let until = self.reactor.now() + Duration::from_millis(100);
        while self.reactor.now() < until {
            self.volumes.iter_mut().for_each(|volume| volume.flush(&mut self.reactor));
            self.reactor.reap(&mut completions, Wait::Until(until)).unwrap();
            for completion in completions.drain(..) {
                let volume = usize::from(completion.token.class() - FIRST_CLASS);
                self.volumes[volume].handle(&mut self.reactor, completion);
            }
        }
    }

    fn open(&self) -> usize {
        self.volumes.iter().filter(|volume| volume.info().is_some()).count()
    }
}

#[test]
fn sessions_of_every_way_idle_at_no_cost_at_both_ends() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let shared = folder.path().join("shm");
    for (io, choice) in [("epoll", IoChoice::Epoll), ("uring", IoChoice::Uring)] {
        if choice == IoChoice::Uring && Reactor::open(choice, 1).is_err() {
            byway_skip::skip_part_of_this(byway_skip::NO_IO_URING);
            continue;
        }
        let listen = format!("shm://{}", shared.display());
        let arguments = ["--io", io, "--volume", "m=mem:1M", "--listen", "tcp://127.0.0.1:0", "--listen", &listen];
        let server = Server::start(folder.path(), 2, &arguments);
        let tcp = Address::Tcp((Ipv4Addr::LOCALHOST, server.port("byway")).into());
        for address in [tcp, Address::Shared(shared.clone())] {
            idle_at_no_cost(&server, &address, choice);
        }
    }
}

fn idle_at_no_cost(server: &Server, address: &Address, io: IoChoice) {
    let mut clients = Clients::new(io, address);
    let deadline = Instant::now() + LIMIT;
    while clients.open() < SESSIONS {
        assert!(Instant::now() < deadline, "{} sessions over {address:?}", clients.open());
        clients.turn();
    }
    wait_until_idle(&[server.id(), std::process::id()], || clients.turn());
    assert!(clients.volumes.iter().all(|volume| volume.sessions() == 1), "a session over {address:?} was lost");
}

/// A connection that sends garbage is closed by the loop that has accepted it.
#[test]
fn a_connection_wakes_one_loop() {
    const LOOPS: usize = 4;
    const CONNECTIONS: u64 = 200;
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    for io in backends() {
        let threads = LOOPS.to_string();
        let arguments = ["--io", io, "--threads", &threads, "--volume", "m=mem:1M", "--listen", "tcp://127.0.0.1:0"];
        let server = Server::start(folder.path(), 1, &arguments);
        wait_until_idle(&[server.id()], || {});
        let before = server.loop_sleeps();
        for _ in 0..CONNECTIONS {
            let mut connection = TcpStream::connect((Ipv4Addr::LOCALHOST, server.port("byway"))).unwrap();
            connection.write_all(&[0x5a; 4096]).unwrap();
            // Its end, or a reset.
            let _ = connection.read(&mut [0; 1]);
        }
        let mut woken: Vec<u64> =
            server.loop_sleeps().iter().zip(before).map(|(after, before)| after - before).collect();
        woken.sort_unstable();
        assert_eq!(woken.len(), LOOPS);
        // The accepting loop polls for a while before it sleeps, so it has slept less often than connections came.
        let (others, accepting) = (&woken[..LOOPS - 1], woken[LOOPS - 1]);
        assert!(accepting > 0 && others.iter().all(|sleeps| sleeps * 4 <= accepting), "{io}: {woken:?}");
    }
}
