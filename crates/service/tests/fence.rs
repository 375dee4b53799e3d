//! A client whose old session still has I/O at a slow store waits for its end, and does not take the server for lost.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use byway_fabric::limits::HANDSHAKE_TIME_MAX;
use byway_fabric::wire::RefuseCode;
use byway_fabric::{CloseReason, Options, Registry};
use byway_reactor::sim::World;
use byway_reactor::{Address, FileOptions, OpenFile, Wait};
use byway_service::block::client::{Notice, Request, Volume as Client, VolumeOptions};
use byway_service::block::server::Server;
use byway_service::block::spec::{FaultEffect, FaultOperation, FaultRule, FaultRules};
use byway_service::block::{ENGINE_CLASS, Engine, Store, Volume, VolumeOptions as Served};

const SERVER_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
const CLIENT_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 1, 1));
const SERVER_CLASS: u8 = 0x20;
const CLIENT_CLASS: u8 = 0x30;
/// How long the store takes for the first write.
const STORE_TIME: Duration = Duration::from_mins(1);

/// What a client hears whose write takes long, and whose connection breaks.
fn heard(seed: u64) -> Vec<Notice> {
    let world = World::new(seed);
    let mut at_server = world.node(SERVER_IP, 1 << 20);
    let mut at_client = world.node(CLIENT_IP, 1 << 20);
    let slow = FaultRule {
        operation: FaultOperation::Write,
        effect: FaultEffect::Delay(STORE_TIME),
        range: None,
        count_max: Some(1),
    };
    let file = OpenFile::simulated(world.disk(SERVER_IP).file("disk", 1 << 20), FileOptions::default());
    let served = Served { faults: FaultRules(vec![slow]), ..Served::default() };
    let mut engine = Engine::default();
    let mut server = Server::new(&at_server, Arc::new(Registry::new(1)), Options::new(SERVER_CLASS));
    let address = Address::Tcp(SocketAddr::new(SERVER_IP, 4711));
    server.listen(&mut at_server, &address).unwrap();
    let volume = Arc::new(Volume::new("disk", Store::open_file(Arc::new(file)), served));
    server.offer(engine.attach(&mut at_server, volume));
    let mut options = VolumeOptions::new(CLIENT_CLASS);
    options.fabric.seed = Some(seed);
    options.bounds.lost_after = HANDSHAKE_TIME_MAX * 2;
    let mut client = Client::connect(&at_client, address, "disk", options);
    let from = Rc::new(at_client.frames().alloc(4096).unwrap());
    client.submit(Request::Write { offset: 0, len: 4096, from, durable: false }, 1).unwrap();
    let (mut notices, mut answers) = (Vec::new(), Vec::new());
    for round in 0.. {
        let (mut completions, mut done) = (Vec::new(), Vec::new());
        world.run_until(world.now() + Duration::from_millis(100), || {
            loop {
                server.flush(&mut at_server, &mut engine);
                client.flush(&mut at_client);
                at_server.reap(&mut completions, Wait::Poll).unwrap();
                let count = completions.len();
                for completion in completions.drain(..) {
                    match completion.token.class() {
                        SERVER_CLASS => server.handle(&mut at_server, &mut engine, completion),
                        ENGINE_CLASS => engine.complete(&mut at_server, completion, &mut done),
                        _ => server.woken(&mut at_server, &mut engine),
                    }
                    for done in done.drain(..) {
                        server.done(&mut at_server, &mut engine, done);
                    }
                }
                at_client.reap(&mut completions, Wait::Poll).unwrap();
                if count + completions.len() == 0 {
                    break;
                }
                for completion in completions.drain(..) {
                    client.handle(&mut at_client, completion);
                }
            }
        });
        client.take_notices(&mut notices);
        client.reap(&mut answers);
        match round {
            9 => {
                assert_eq!(server.calls_in_flight(), 1, "the write is at the store");
                assert!(world.reset_random_connection());
            }
            // What is not answered within twice the store's time never will be.
            1200 => break,
            _ => {}
        }
    }
    assert_eq!(answers.len(), 1, "{notices:?}");
    assert_eq!(answers[0].result.as_ref().map(drop), Ok(()), "seed {seed}: {notices:?}");
    notices
}

#[test]
fn a_client_that_waits_for_its_old_session_is_told_so_in_time() {
    for seed in 0..20 {
        let heard = heard(seed);
        let busy = Notice::Disconnected(CloseReason::Refused(RefuseCode::Busy));
        let slow = Notice::Disconnected(CloseReason::SlowHandshake);
        assert!(heard.contains(&busy) && !heard.contains(&slow), "seed {seed}: {heard:?}");
    }
}
