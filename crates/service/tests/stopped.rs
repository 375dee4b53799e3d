//! Clients that do nothing: one that takes none of its answers keeps their memory for a minute, not for ever; one that does not
//! close its session keeps a server from ending for a second.

mod serving;

use std::time::Duration;

use byway_fabric::limits::{FAREWELL_TIME_MAX, LOOP_HEAP_BYTES_MAX, SESSION_HEAP_BYTES_MAX, TAKE_TIME_MAX};
use byway_fabric::wire::{Header, Kind, RefuseCode};
use byway_fabric::{ClientId, CloseReason, Fabric, Handler, Identity, Options, PayloadMeta, SessionId};
use byway_reactor::sim::{LinkProfile, World};
use byway_reactor::{Instant, Reactor, Wait};
use byway_rpc::message::Inline;
use byway_rpc::session::{Ask, Calls, Event, Spoken};
use byway_service::block::wire::{Method, PROTOCOL, VERSIONS};
use byway_service::block::{Store, Volume, VolumeOptions};
use serving::{AT, SERVER_CLASS, SERVER_IP, TestServer, client_ip};

const CLIENT_CLASS: u8 = 0x30;

/// A client that asks for lists, each of about 16 KiB, and throws them away.
struct Asker {
    fabric: Fabric,
    reactor: Reactor,
    session: SessionId,
    answers: Answers,
}

struct Answers {
    calls: Calls<()>,
    up: bool,
    count: usize,
    down: Option<CloseReason>,
}

impl Handler for Answers {
    fn up(&mut self, fabric: &mut Fabric, _: &mut Reactor, session: SessionId) {
        self.calls.up(session, [0; 16], true);
        for out in self.calls.outbox().drain(..) {
            let payload = PayloadMeta { len: out.payload.len(), checksum: None };
            fabric.send_with(session, out.header, payload, |gather| gather.push_head(&out.payload));
        }
    }

    fn message(
        &mut self,
        _: &mut Fabric,
        _: &mut Reactor,
        session: SessionId,
        kind: Kind,
        header: &Header,
        payload: &[u8],
    ) {
        match self.calls.message(session, kind, header, payload).unwrap() {
            Event::Ready(_) => self.up = true,
            Event::Ended(..) => self.count += 1,
            _ => {}
        }
    }

    fn placed(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, _: Kind, _: &Header) {}

    fn down(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, reason: CloseReason) {
        self.down = Some(reason);
    }

    fn drained(&mut self, fabric: &mut Fabric, _: &mut Reactor, session: SessionId) {
        fabric.release(session);
    }
}

impl Asker {
    fn new(world: &World, number: u8) -> Self {
        let ip = client_ip(number);
        world.link(SERVER_IP, ip, LinkProfile { buffer_bytes: 4096, ..LinkProfile::default() });
        let mut reactor = world.node(ip, 1 << 20);
        let mut fabric = Fabric::new(Options { seed: Some(number.into()), ..Options::new(CLIENT_CLASS) });
        let identity = Identity { client: ClientId([number; 16]), number: 1, nonce: [number; 16] };
        let session = fabric.connect(&mut reactor, AT, identity);
        let calls = Calls::new([number; 16], vec![Spoken { protocol: PROTOCOL, versions: VERSIONS, grant: None }]);
        Self { fabric, reactor, session, answers: Answers { calls, up: false, count: 0, down: None } }
    }

    fn ask(&mut self, lists: u64) {
        let ask = Ask { protocol: PROTOCOL, method: Method::List as u16, arguments: &Inline::EMPTY, windows: 0 };
        for _ in 0..lists {
            let call = self.answers.calls.call(self.session, &ask, (), self.reactor.now(), Instant::FAR);
            self.fabric.send(self.session, call.unwrap().1);
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

/// Serves volumes whose list fills an answer.
fn serving() -> TestServer {
    let mut serving = TestServer::new(1, 8 << 20, Options::new(SERVER_CLASS));
    for index in 0..20 {
        let options = VolumeOptions { description: "d".repeat(1000), ..VolumeOptions::default() };
        serving.offer(Volume::new(format!("v{index}"), Store::null(512), options));
    }
    serving
}

/// Lets the time pass; the clients given here do something meanwhile.
fn pass(serving: &mut TestServer, time: Duration, clients: &mut [Asker]) {
    serving.pass(time, || clients.iter_mut().fold(false, |busy, asker| busy | asker.turn()));
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn a_client_that_takes_nothing_is_given_up_after_a_minute() {
    let mut serving = serving();
    let mut clients = vec![Asker::new(&serving.world, 1), Asker::new(&serving.world, 2)];
    pass(&mut serving, SECOND, &mut clients);
    assert!(clients.iter().all(|client| client.answers.up));
    for client in &mut clients {
        client.ask(250);
        client.turn();
    }
    // From now on one of them does nothing. The other takes some answers, though only now and then.
    let mut hostile = clients.remove(0);
    pass(&mut serving, SECOND, &mut []);
    for _ in 0..3 {
        let queued = serving.server.queued_heap_bytes();
        assert!(queued > SESSION_HEAP_BYTES_MAX, "{queued} bytes wait");
        assert_eq!(serving.server.last_closed(), None);
        pass(&mut serving, TAKE_TIME_MAX / 4, &mut []);
        let before = clients[0].answers.count;
        while clients[0].answers.count < before + 10 {
            clients[0].turn();
            pass(&mut serving, SECOND / 1000, &mut []);
        }
    }
    assert_eq!(serving.server.last_closed(), None);
    pass(&mut serving, TAKE_TIME_MAX / 3, &mut []);
    assert_eq!(serving.server.last_closed(), Some(CloseReason::TakesNothing));
    assert_eq!(serving.server.sessions().count(), 1);
    pass(&mut serving, SECOND, &mut clients);
    assert_eq!((clients[0].answers.count, clients[0].answers.down), (250, None), "who takes is served");
    assert_eq!(serving.server.queued_heap_bytes(), 0);
    pass(&mut serving, SECOND, std::slice::from_mut(&mut hostile));
    assert!(hostile.answers.down.is_some());
}

#[test]
fn clients_that_take_nothing_and_have_little_each_are_given_up_when_they_are_too_many() {
    let mut serving = serving();
    let mut clients: Vec<Asker> = (1..=200).map(|number| Asker::new(&serving.world, number)).collect();
    pass(&mut serving, SECOND, &mut clients);
    for client in &mut clients {
        client.ask(8);
        client.turn();
    }
    pass(&mut serving, SECOND, &mut []);
    let queued = serving.server.queued_heap_bytes();
    assert!(queued > LOOP_HEAP_BYTES_MAX, "{queued} bytes wait");
    pass(&mut serving, TAKE_TIME_MAX + SECOND, &mut []);
    let queued = serving.server.queued_heap_bytes();
    assert!(queued <= LOOP_HEAP_BYTES_MAX, "{queued} bytes wait");
    assert_eq!(serving.server.last_closed(), Some(CloseReason::TakesNothing));
}

/// The calls arrive when the server has said goodbye. It must not reset the connections over them: a client that does not read the goodbye
/// would not know that they were not begun.
#[test]
fn a_server_that_ends_has_its_clients_close_and_does_not_wait_for_long() {
    let mut serving = serving();
    let mut clients = vec![Asker::new(&serving.world, 1), Asker::new(&serving.world, 2)];
    pass(&mut serving, SECOND, &mut clients);
    for client in &mut clients {
        client.ask(1);
        client.turn();
    }
    serving.server.shut_down(&mut serving.reactor);
    let mut stopped = clients.remove(0);
    pass(&mut serving, FAREWELL_TIME_MAX / 2, &mut clients);
    let drained = Some(CloseReason::Refused(RefuseCode::Drained));
    assert_eq!((clients[0].answers.count, clients[0].answers.down), (0, drained));
    assert_eq!(serving.server.last_closed(), Some(CloseReason::PeerClosed));
    assert_eq!(serving.server.sessions().count(), 1, "the other has not read it");
    pass(&mut serving, FAREWELL_TIME_MAX, &mut []);
    assert_eq!(serving.server.last_closed(), Some(CloseReason::WeRefused(RefuseCode::Drained)));
    assert!(serving.server.is_idle());
    pass(&mut serving, SECOND, std::slice::from_mut(&mut stopped));
    assert!(stopped.answers.down.is_some());
}
