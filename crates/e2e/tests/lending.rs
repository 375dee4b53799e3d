//! A node that lends memory: what it serves while it takes the memory back to end, and what many borrowers cost it.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use byway_e2e::{LIMIT, Server, backends, binary, run_well, until};
use byway_fabric::node::NodeOptions;
use byway_reactor::{Address, IoChoice, Reactor};
use byway_service::block::client::{BlockingVolume, VolumeOptions};
use byway_service::memory::wire::LendError;
use byway_service::memory::{BorrowError, Borrower};

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
