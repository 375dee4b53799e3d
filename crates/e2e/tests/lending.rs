//! A node that lends memory: what it serves while it takes the memory back to end, and what many borrowers cost it.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use byway_e2e::{LIMIT, Server, backends, binary, run_well, until};
use byway_fabric::node::NodeOptions;
use byway_reactor::{Address, IoChoice, Reactor};
use byway_service::block::client::{BlockingVolume, VolumeOptions};
use byway_service::limits::{GUARD_LOOK, SLAB_BYTES};
use byway_service::memory::wire::LendError;
use byway_service::memory::{BorrowError, Borrower};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

fn address(server: &Server) -> Address {
    Address::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, server.port("byway"))))
}

/// A session with the volume `m` that does not wait for another server when this one is gone.
fn open_volume(server: &Server) -> BlockingVolume {
    let mut options = VolumeOptions::new(0x30);
    options.bounds.lost_after = Duration::from_millis(500);
    let reactor = Reactor::open(IoChoice::Auto, 4 << 20).unwrap();
    BlockingVolume::connect(reactor, address(server), "m", options).expect("the volume is served")
}

#[test]
fn a_node_that_ends_serves_its_volumes_and_shares_until_its_memory_is_back() {
    for io in backends() {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let shared = folder.path().join("shared");
        std::fs::create_dir(&shared).unwrap();
        std::fs::write(shared.join("file"), "of the share").unwrap();
        let share = format!("share={}", shared.display());
        let (listen, volume) = ("tcp://127.0.0.1:0", "m=mem:1M");
        let arguments = ["--lend", "128M,guard=0", "--volume", volume, "--share", &share, "--listen", listen];
        let mut server = Server::start(folder.path(), 1, &[&["--io", io], &arguments[..]].concat());
        let rpc = Borrower::open_node(&NodeOptions::default()).unwrap();
        let borrower = Borrower::connect_on(&rpc, &address(&server), LIMIT).unwrap();
        let slab = borrower.lease().unwrap();
        let mut before = open_volume(&server);
        before.write(0, &[1; 4096], true).unwrap();
        server.ask_to_end();
        let told = "borrowers have so long to move their pages";
        until(Instant::now() + LIMIT, told, || server.log().contains(told).then_some(()));
        before.write(4096, &[2; 4096], true).expect("the session goes on");
        let (mut after, mut back) = (open_volume(&server), [0; 8192]);
        after.read(0, &mut back).unwrap();
        assert!(back[..4096] == [1; 4096] && back[4096..] == [2; 4096], "{io}");
        let copy = folder.path().join("copy").display().to_string();
        let file = format!("byway://127.0.0.1:{}/share/file", server.port("byway"));
        run_well(&binary(), &["copy", &file, &copy]);
        assert_eq!(std::fs::read_to_string(&copy).unwrap(), "of the share");
        assert!(matches!(borrower.lease(), Err(BorrowError::Lender(LendError::Ending))), "{io}");
        borrower.give_back(&slab).unwrap();
        drop((before, after));
        assert_eq!(server.exit_code(), Some(0), "{io}: {}", server.log());
    }
}

const BORROWERS: u64 = 1000;
/// What a borrower with a session and a slab costs the lender beside what it has filled (docs/far-memory.md).
const BORROWER_BYTES_MAX: u64 = 32 << 10;
const PAGE_BYTES: usize = 4096;

/// Waits for a time in which no loop of the lender wakes up, of several looks of one that has slabs.
fn wait_until_asleep(server: &Server) {
    const WINDOW: Duration = GUARD_LOOK.saturating_mul(3);
    let (mut since, mut before) = (Instant::now(), server.loop_sleeps());
    until(Instant::now() + LIMIT, "a time in which no loop wakes up", || {
        let now = server.loop_sleeps();
        if now != before {
            (since, before) = (Instant::now(), now);
        }
        (since.elapsed() >= WINDOW).then_some(())
    });
}

#[test]
fn a_thousand_borrowers_cost_a_bounded_memory_and_an_idle_lender_sleeps() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    for io in backends() {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let lend = format!("{},guard=0", BORROWERS * SLAB_BYTES as u64);
        let arguments = ["--io", io, "--lend", &lend, "--listen", "tcp://127.0.0.1:0", "--threads", "2"];
        let server = Server::start(folder.path(), 1, &arguments);
        let start = server.memory_bytes();
        let rpc = Borrower::open_node(&NodeOptions::default()).unwrap();
        let connect = |_| Borrower::connect_on(&rpc, &address(&server), LIMIT).unwrap();
        let borrowers: Vec<Borrower> = (0..BORROWERS).map(connect).collect();
        wait_until_asleep(&server);
        let connected = server.memory_bytes().saturating_sub(start);
        let page = rpc.node().register(PAGE_BYTES).unwrap();
        page.write(0, &[7; PAGE_BYTES]).unwrap();
        let (mut most, filled) = (0, BORROWERS * PAGE_BYTES as u64);
        for (number, borrower) in (1..).zip(&borrowers) {
            let slab = borrower.lease().unwrap();
            let put = rpc.node().put(borrower.session(), &[page.segment(0..PAGE_BYTES)], &slab.window, 0).unwrap();
            put.wait(LIMIT).unwrap().unwrap();
            if number % 100 == 0 {
                most = most.max(server.memory_bytes().saturating_sub(start));
            }
        }
        let before = server.loop_sleeps();
        let looks = || (server.loop_sleeps() != before).then_some(());
        until(Instant::now() + LIMIT, "a look at the slabs, which would wake an idle lender too", looks);
        println!("{io}: {connected} bytes for the sessions, {most} with a slab each, {filled} of these filled");
        assert!(most < filled + BORROWERS * BORROWER_BYTES_MAX, "{io}: {most} bytes");
        assert!(most > filled, "{io}: {most} bytes are less than what was filled");
        // Its node has the sessions.
        drop((borrowers, page, rpc));
        let rpc = Borrower::open_node(&NodeOptions::default()).unwrap();
        let again = Borrower::connect_on(&rpc, &address(&server), LIMIT).unwrap();
        until(Instant::now() + LIMIT, "the slabs", || (again.status().unwrap().lent_bytes == 0).then_some(()));
        wait_until_asleep(&server);
    }
}
