//! A client that takes none of its answers keeps their memory for a minute, not for ever.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use byway_fabric::limits::{LOOP_HEAP_BYTES_MAX, SESSION_HEAP_BYTES_MAX, TAKE_TIME_MAX};
use byway_fabric::wire::{Header, Kind};
use byway_fabric::{ClientId, CloseReason, Fabric, Handler, Identity, Options, Registry, Slot};
use byway_reactor::sim::{LinkProfile, World};
use byway_reactor::{Address, Reactor, Wait};
use byway_rpc::wire::CallBody;
use byway_service::block::server::Server;
use byway_service::block::wire::Method;
use byway_service::block::{ENGINE_CLASS, Engine, Store, Volume, VolumeOptions};
use zerocopy::FromZeros;

const SERVER_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
const AT: Address = Address::Tcp(SocketAddr::new(SERVER_IP, 4711));
const SERVER_CLASS: u8 = 0x20;
const CLIENT_CLASS: u8 = 0x30;

/// A client that asks for lists, each of about 16 KiB, and throws them away.
struct Asker {
    fabric: Fabric,
    reactor: Reactor,
    session: Slot,
    answers: Answers,
}

#[derive(Default)]
struct Answers {
    up: bool,
    count: usize,
    down: Option<CloseReason>,
}

impl Handler for Answers {
    fn up(&mut self, _: &mut Fabric, _: &mut Reactor, _: Slot) {
        self.up = true;
    }

    fn message(&mut self, _: &mut Fabric, _: &mut Reactor, _: Slot, _: (Kind, &Header), _: &[u8]) {
        self.count += 1;
    }

    fn placed(&mut self, _: &mut Fabric, _: &mut Reactor, _: Slot, _: (Kind, &Header)) {}

    fn down(&mut self, _: &mut Fabric, _: &mut Reactor, _: Slot, reason: CloseReason) {
        self.down = Some(reason);
    }

    fn drained(&mut self, fabric: &mut Fabric, _: &mut Reactor, session: Slot) {
        fabric.release(session);
    }
}

impl Asker {
    fn new(world: &World, number: u8) -> Self {
        let ip = IpAddr::V4(Ipv4Addr::new(10, 0, 1, number));
        world.link(SERVER_IP, ip, LinkProfile { buffer_bytes: 4096, ..LinkProfile::default() });
        let mut reactor = world.node(ip, 1 << 20);
        let mut fabric = Fabric::new(Options { seed: Some(number.into()), ..Options::new(CLIENT_CLASS) });
        let identity = Identity { client: ClientId([number; 16]), number: 1, nonce: [number; 16] };
        let session = fabric.connect(&mut reactor, AT, identity);
        Self { fabric, reactor, session, answers: Answers::default() }
    }

    fn ask(&mut self, lists: u64) {
        for call in 0..lists {
            let mut body = CallBody::new_zeroed();
            body.call.set(call);
            body.method.set(Method::List as u16);
            self.fabric.send(self.session, Header::with_body(Kind::Call, &body));
        }
    }

    fn turn(&mut self) -> bool {
        let mut completions = Vec::new();
        self.fabric.feed_starved(&mut self.reactor, &mut self.answers);
        self.fabric.flush(&mut self.reactor, &mut self.answers);
        self.reactor.reap(&mut completions, Wait::Poll).unwrap();
        let busy = !completions.is_empty();
        for completion in completions {
            self.fabric.handle(&mut self.reactor, completion, &mut self.answers);
        }
        self.fabric.flush(&mut self.reactor, &mut self.answers);
        busy
    }
}

struct Serving {
    world: World,
    server: Server,
    engine: Engine,
    reactor: Reactor,
}

impl Serving {
    /// Serves volumes whose list fills an answer.
    fn new() -> Self {
        let world = World::new(1);
        let mut reactor = world.node(SERVER_IP, 8 << 20);
        let mut engine = Engine::default();
        let mut server = Server::new(&reactor, Arc::new(Registry::new(1)), Options::new(SERVER_CLASS));
        server.listen(&mut reactor, &AT).unwrap();
        for index in 0..20 {
            let options = VolumeOptions { description: "d".repeat(1000), ..VolumeOptions::default() };
            let volume = Volume::new(format!("v{index}"), Store::null(512), options);
            server.offer(engine.attach(&mut reactor, Arc::new(volume)));
        }
        Self { world, server, engine, reactor }
    }

    fn turn(&mut self) -> bool {
        let (mut completions, mut done) = (Vec::new(), Vec::new());
        self.server.flush(&mut self.reactor, &mut self.engine);
        self.reactor.reap(&mut completions, Wait::Poll).unwrap();
        let busy = !completions.is_empty();
        for completion in completions {
            match completion.token.class() {
                SERVER_CLASS => self.server.handle(&mut self.reactor, &mut self.engine, completion),
                ENGINE_CLASS => self.engine.complete(&mut self.reactor, completion, &mut done),
                _ => self.server.woken(&mut self.reactor, &mut self.engine),
            }
        }
        self.server.flush(&mut self.reactor, &mut self.engine);
        busy
    }

    /// Lets the time pass; the clients given here do something meanwhile.
    fn pass(&mut self, time: Duration, clients: &mut [Asker]) {
        let (world, until) = (self.world.clone(), self.world.now() + time);
        world.run_until(until, || {
            while self.turn() | clients.iter_mut().fold(false, |busy, asker| busy | asker.turn()) {}
        });
    }
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn a_client_that_takes_nothing_is_given_up_after_a_minute() {
    let mut serving = Serving::new();
    let mut clients = vec![Asker::new(&serving.world, 1), Asker::new(&serving.world, 2)];
    serving.pass(SECOND, &mut clients);
    assert!(clients.iter().all(|client| client.answers.up));
    for client in &mut clients {
        client.ask(250);
        client.turn();
    }
    // From now on one of them does nothing. The other takes something, though only now and then.
    let mut hostile = clients.remove(0);
    serving.pass(SECOND, &mut []);
    for _ in 0..3 {
        let queued = serving.server.queued_heap_bytes();
        assert!(queued > SESSION_HEAP_BYTES_MAX, "{queued} bytes wait");
        assert_eq!(serving.server.last_closed(), None);
        serving.pass(TAKE_TIME_MAX / 4, &mut []);
        clients[0].turn();
    }
    assert_eq!(serving.server.last_closed(), None);
    serving.pass(TAKE_TIME_MAX / 3, &mut []);
    assert_eq!(serving.server.last_closed(), Some(CloseReason::TakesNothing));
    assert_eq!(serving.server.session_count(), 1);
    serving.pass(SECOND, &mut clients);
    assert_eq!((clients[0].answers.count, clients[0].answers.down), (250, None), "who takes is served");
    assert_eq!(serving.server.queued_heap_bytes(), 0);
    serving.pass(SECOND, std::slice::from_mut(&mut hostile));
    assert!(hostile.answers.down.is_some());
}

#[test]
fn clients_that_take_nothing_and_have_little_each_are_given_up_when_they_are_too_many() {
    let mut serving = Serving::new();
    let mut clients: Vec<Asker> = (1..=200).map(|number| Asker::new(&serving.world, number)).collect();
    serving.pass(SECOND, &mut clients);
    for client in &mut clients {
        client.ask(8);
        client.turn();
    }
    serving.pass(SECOND, &mut []);
    let queued = serving.server.queued_heap_bytes();
    assert!(queued > LOOP_HEAP_BYTES_MAX, "{queued} bytes wait");
    serving.pass(TAKE_TIME_MAX + SECOND, &mut []);
    let queued = serving.server.queued_heap_bytes();
    assert!(queued <= LOOP_HEAP_BYTES_MAX, "{queued} bytes wait");
    assert_eq!(serving.server.last_closed(), Some(CloseReason::TakesNothing));
}
