//! What a server tells its clients by itself: a volume's new size, and that their session ends.

mod serving;

use std::time::Duration;

use byway_fabric::wire::{Header, Kind};
use byway_fabric::{ClientId, CloseReason, Fabric, Handler, Identity, Options, PayloadMeta, SessionId};
use byway_reactor::{Instant, Reactor, Wait};
use byway_rpc::message::Inline;
use byway_rpc::session::{Ask, Calls, Event, Grant, Spoken};
use byway_service::block::wire::{Method, NOTICE_RESIZED, PROTOCOL, Resized, VERSIONS};
use byway_service::block::{Store, Volume, VolumeId, VolumeOptions};
use serving::{AT, SERVER_CLASS, TestServer, client_ip};
use zerocopy::FromBytes;

/// Notices that the client takes.
const NOTICES: u16 = 4;

struct Client {
    calls: Calls<()>,
    /// Calls that were answered.
    answers: usize,
    sizes: Vec<u64>,
    ended: Option<CloseReason>,
}

/// A client that has the volume "disk" open.
struct World {
    serving: TestServer,
    volume: VolumeId,
    reactor: Reactor,
    fabric: Fabric,
    session: SessionId,
    client: Client,
}

impl World {
    fn new() -> Self {
        let mut serving = TestServer::new(1, 8 << 20, Options::new(SERVER_CLASS));
        let volume = serving.offer(Volume::new("disk", Store::null(1 << 20), VolumeOptions::default()));
        let mut reactor = serving.world.node(client_ip(1), 1 << 20);
        let mut fabric = Fabric::new(Options { seed: Some(1), ..Options::new(0x30) });
        let identity = Identity { client: ClientId([1; 16]), number: 1, nonce: [1; 16] };
        let session = fabric.connect(&mut reactor, AT, identity);
        let grant = Some(Grant { calls: 0, notices: NOTICES });
        let calls = Calls::new([1; 16], vec![Spoken { protocol: PROTOCOL, versions: VERSIONS, grant }]);
        let client = Client { calls, answers: 0, sizes: Vec::new(), ended: None };
        let mut this = Self { serving, volume, reactor, fabric, session, client };
        this.pass();
        assert_eq!(this.client.answers, 1, "it is open");
        this
    }

    fn call(&mut self, method: Method) {
        let ask = Ask { protocol: PROTOCOL, method: method as u16, arguments: &Inline::EMPTY, windows: 0 };
        let call = self.client.calls.call(self.session, &ask, (), self.reactor.now(), Instant::FAR);
        self.fabric.send(self.session, call.unwrap().1);
    }

    /// A second.
    fn pass(&mut self) {
        let Self { serving, reactor, fabric, client, .. } = self;
        serving.pass(Duration::from_secs(1), || {
            let mut completions = Vec::new();
            fabric.flush(reactor, client);
            reactor.reap(&mut completions, Wait::Poll).unwrap();
            let busy = !completions.is_empty();
            for completion in completions {
                fabric.handle(reactor, completion, client);
            }
            fabric.flush(reactor, client);
            busy
        });
    }
}

impl Client {
    fn send(&mut self, fabric: &mut Fabric) {
        for out in self.calls.outbox().drain(..) {
            let payload = PayloadMeta { len: out.payload.len(), checksum: None };
            fabric.send_with(out.session, out.header, payload, |gather| gather.push_head(&out.payload));
        }
    }
}

impl Handler for Client {
    fn up(&mut self, fabric: &mut Fabric, _: &mut Reactor, session: SessionId) {
        self.calls.up(session, [0; 16], true);
        self.send(fabric);
    }

    fn message(
        &mut self,
        fabric: &mut Fabric,
        _: &mut Reactor,
        session: SessionId,
        kind: Kind,
        header: &Header,
        payload: &[u8],
    ) {
        match self.calls.message(session, kind, header, payload).unwrap() {
            Event::Ready(_) if kind == Kind::Protocols => {
                let ask =
                    Ask { protocol: PROTOCOL, method: Method::Open as u16, arguments: &Inline::EMPTY, windows: 0 };
                let (_, header) = self.calls.call(session, &ask, (), Instant::from_nanos(0), Instant::FAR).unwrap();
                let payload = PayloadMeta { len: 4, checksum: None };
                fabric.send_with(session, header, payload, |gather| gather.push_head(b"disk"));
            }
            Event::Ended(..) => self.answers += 1,
            Event::Notified(notice) => {
                assert_eq!(notice.method, NOTICE_RESIZED);
                self.sizes.push(Resized::ref_from_bytes(notice.arguments.padded()).unwrap().len.get());
            }
            _ => {}
        }
    }

    fn placed(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, _: Kind, _: &Header) {}

    fn down(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, reason: CloseReason) {
        self.ended = Some(reason);
    }

    fn drained(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId) {}
}

#[test]
fn a_client_without_credit_for_notices_hears_of_the_last_size_when_it_gives_some() {
    let mut world = World::new();
    let sizes = 1..=u64::from(NOTICES) + 3;
    for size in sizes.clone() {
        world.serving.server.resized(&mut world.serving.reactor, world.volume, size * 512);
    }
    world.pass();
    let told: Vec<u64> = sizes.clone().take(usize::from(NOTICES)).map(|size| size * 512).collect();
    assert_eq!(world.client.sizes, told, "as many as it takes");
    for _ in 0..NOTICES {
        world.client.calls.notice_taken(world.session, PROTOCOL);
        world.client.send(&mut world.fabric);
    }
    world.pass();
    assert_eq!(world.client.sizes[usize::from(NOTICES)..], [sizes.last().unwrap() * 512], "the last, and once");
}

#[test]
fn what_a_client_sends_before_it_hears_that_its_session_ends_is_not_begun() {
    let mut world = World::new();
    world.call(Method::Flush);
    world.pass();
    assert_eq!(world.client.answers, 2, "it is served");
    let served = world.serving.server.sessions().answered();
    // It has come when the session is ended, and was not looked at yet.
    world.call(Method::Flush);
    world.fabric.flush(&mut world.reactor, &mut world.client);
    let soon = world.serving.world.now() + Duration::from_secs(1);
    world.serving.world.clone().run_until(soon, || ());
    world.serving.server.dismiss_users(&mut world.serving.reactor, world.volume);
    world.pass();
    assert!(world.client.ended.is_some());
    assert_eq!((world.client.answers, world.serving.server.sessions().answered()), (2, served));
}
