//! The sessions of a node's clients on one loop, shared by every service.
//!
//! The host owns the loop's [`Fabric`], with listeners, TLS and admission, and the clients' [`Sessions`]: the service of
//! each call, the calls in progress, fair waiting for frames (`waiting.rs`), and ends of sessions. A [`Service`] has a
//! protocol; it receives that protocol's calls and answers each, now or later. `tests/echo.rs` is a complete service.
//!
//! The loop passes completions of the host's token class to [`Host::handle`], and calls [`Host::flush`] once a turn; each
//! time with all of its services.

mod peers;
pub(crate) mod sending;
mod sessions;
mod waiting;

use std::net::SocketAddr;
use std::sync::Arc;

use byway_fabric::rdma::RdmaError;
use byway_fabric::tls::ServerTls;
use byway_fabric::wire::{Header, Kind as Message};
use byway_fabric::{CloseReason, EndedGet, Fabric, FabricCounters, Handler, Options, Registry, Remote, SessionId};
use byway_reactor::{Address, Completion, Frame, Listener, Reactor};
use byway_rpc::session::{CallRef, Event, Incomer, Spoken};

pub use self::peers::{PeerFeedback, keep_busiest};
pub use self::sessions::{Session, Sessions, SmallAnswer};
pub use self::waiting::{Feeds, Line, Tried, feed};

/// The parts of a loop that a service uses while it handles an event.
pub struct At<'a> {
    /// The loop's sessions, as the fabric knows them: windows, puts and gets.
    pub fabric: &'a mut Fabric,
    /// The loop.
    pub reactor: &'a mut Reactor,
    /// The loop's sessions, as services share them.
    pub sessions: &'a mut Sessions,
}

impl At<'_> {
    /// Begins to get bytes of a client's window into a frame. [`Service::got`] reports the end, with `tag` (56 bits).
    ///
    /// # Errors
    /// The frame, if all of the loop's windows are open; try again when one has closed.
    pub fn get(&mut self, session: SessionId, from: Remote, into: Frame, protocol: u8, tag: u64) -> Result<(), Frame> {
        get(self.fabric, self.reactor, session, from, into, protocol, tag)
    }
}

/// As [`At::get`].
pub(crate) fn get(
    fabric: &mut Fabric,
    reactor: &mut Reactor,
    session: SessionId,
    from: Remote,
    into: Frame,
    protocol: u8,
    tag: u64,
) -> Result<(), Frame> {
    debug_assert!(tag >> 56 == 0, "the protocol goes above it");
    fabric.get(reactor, session, from, into, u64::from(protocol) << 56 | tag)
}

/// What a node does for its clients under one protocol, on one loop.
pub trait Service {
    /// The protocol's number.
    fn protocol(&self) -> u8;

    /// A call has come. It is answered once, by [`Sessions::answer`] or [`Sessions::reply`], now or later.
    fn called(&mut self, at: &mut At<'_>, call: CallRef, asked: &Incomer<'_>);

    /// A get of [`At::get`] has ended, well or not.
    fn got(&mut self, at: &mut At<'_>, session: SessionId, get: EndedGet) {
        let _ = (at, session, get);
    }

    /// A session's client takes notices again.
    fn may_notify(&mut self, at: &mut At<'_>, session: SessionId) {
        let _ = (at, session);
    }

    /// A session has ended, or was dismissed: do not begin its waiting requests. Requests in progress end by themselves.
    fn peer_gone(&mut self, at: &mut At<'_>, session: SessionId) {
        let _ = (at, session);
    }

    /// No transfer of an ended session is in progress any more: close and drop the slabs that are open to its client.
    fn peer_drained(&mut self, at: &mut At<'_>, session: SessionId) {
        let _ = (at, session);
    }

    /// Once a turn: begins requests that waited for frames.
    fn turn(&mut self, at: &mut At<'_>) {
        let _ = at;
    }

    /// Whether transfers of the service wait for their turn.
    fn has_waiting(&self) -> bool {
        false
    }

    /// Whether frames have come back since waiting requests were last tried.
    fn can_go_on(&self, reactor: &Reactor) -> bool {
        let _ = reactor;
        false
    }
}

/// The services of a loop.
pub type Services<'a, 'b> = &'a mut [&'b mut dyn Service];

/// The sessions of one loop's clients, and the fabric that carries them. See the [module](self).
pub struct Host {
    fabric: Fabric,
    sessions: Sessions,
    /// Frames came back in the last flush.
    frames_returned: bool,
}

/// The sessions and the services that serve them, as the fabric's handler.
struct Hosting<'a, 'b, 'c> {
    sessions: &'a mut Sessions,
    services: Services<'b, 'c>,
}

impl Host {
    /// The host of one loop of the process that has `registry`; its services speak the protocols of `spoken`.
    pub fn new(reactor: &Reactor, registry: Arc<Registry>, options: Options, spoken: Vec<Spoken>) -> Self {
        let mut fabric = Fabric::new(options);
        fabric.serve(reactor, registry);
        let sessions = Sessions::new(&mut fabric, spoken);
        Self { fabric, sessions, frames_returned: false }
    }

    /// Listens at `address`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn listen(&mut self, reactor: &mut Reactor, address: &Address) -> std::io::Result<Listener> {
        self.fabric.listen(reactor, address)
    }

    /// Listens at an address of an RDMA device; gives it, with the port that was chosen.
    ///
    /// # Errors
    /// [`RdmaError`]: no library, no device at the address, or the system's.
    pub fn listen_rdma(&mut self, reactor: &mut Reactor, address: SocketAddr) -> Result<SocketAddr, RdmaError> {
        self.fabric.listen_rdma(reactor, address)
    }

    /// Accepts from a listener that was made elsewhere.
    pub fn accept_from(&mut self, reactor: &mut Reactor, listener: Listener) {
        self.fabric.accept_from(reactor, listener);
    }

    /// Sets whether connections that are accepted from now on may or must use TLS.
    pub fn set_tls(&mut self, tls: ServerTls) {
        self.fabric.set_tls_server(tls);
    }

    /// Closes connections from addresses for which `admits` returns false.
    pub fn admit(&mut self, admits: impl Fn(SocketAddr) -> bool + Send + 'static) {
        self.fabric.admit(admits);
    }

    /// The parts of the loop that services use.
    pub fn at<'a>(&'a mut self, reactor: &'a mut Reactor) -> At<'a> {
        At { fabric: &mut self.fabric, reactor, sessions: &mut self.sessions }
    }

    /// Ends the sessions of clients whose certificate has been revoked since; returns how many.
    pub fn end_revoked(&mut self, reactor: &mut Reactor, services: Services<'_, '_>) -> usize {
        let ended = self.sessions.dismiss_those(&mut self.fabric, reactor, Fabric::is_revoked);
        for &session in &ended {
            let client = self.sessions.get(session).map(|session| &session.client);
            tracing::info!(client = client.map(tracing::field::display), "session ended: its certificate was revoked");
            for service in &mut *services {
                service.peer_gone(&mut self.at(reactor), session);
            }
        }
        ended.len()
    }

    /// Takes a completion of the host's token class.
    pub fn handle(&mut self, reactor: &mut Reactor, services: Services<'_, '_>, completion: Completion) {
        self.fabric.handle(reactor, completion, &mut Hosting { sessions: &mut self.sessions, services });
    }

    /// The loop was woken by another.
    pub fn woken(&mut self, reactor: &mut Reactor, services: Services<'_, '_>) {
        self.fabric.woken(reactor, &mut Hosting { sessions: &mut self.sessions, services });
    }

    /// Lets the services begin waiting requests, and sends queued messages. The loop calls it once a turn.
    pub fn flush(&mut self, reactor: &mut Reactor, services: Services<'_, '_>) {
        self.sessions.begin_turn();
        let hosting = &mut Hosting { sessions: &mut self.sessions, services };
        self.fabric.feed_starved(reactor, hosting);
        for service in &mut *hosting.services {
            service.turn(&mut At { fabric: &mut self.fabric, reactor, sessions: hosting.sessions });
        }
        hosting.sessions.say_goodbyes(&mut self.fabric, reactor);
        // After the waiting requests had their turns: failed attempts give frames back, too.
        let given_back = reactor.frames().given_back();
        self.fabric.flush(reactor, hosting);
        self.frames_returned = reactor.frames().given_back() != given_back;
    }

    /// Whether frames came back during the last [`Host::flush`]. Over shared memory no completion reports that to other front ends
    /// of the loop that wait for frames.
    pub fn frames_returned(&self) -> bool {
        self.frames_returned
    }

    /// Stops listening, begins no call any more, and says goodbye to each client, by [`Host::flush`], when its calls have been answered.
    /// A call that comes meanwhile is not begun: its client sends it again to the next server.
    pub fn shut_down(&mut self, reactor: &mut Reactor) {
        self.sessions.drain();
        self.fabric.close_listeners(reactor);
    }

    /// Whether no session is left.
    pub fn is_idle(&self) -> bool {
        self.fabric.session_count() == 0 && self.fabric.lane_count() == 0
    }

    /// The clients' sessions.
    pub fn sessions(&self) -> &Sessions {
        &self.sessions
    }

    /// Where the client of a session is.
    pub fn peer(&self, session: SessionId) -> Option<SocketAddr> {
        self.fabric.peer(session)
    }

    /// The fabric's counters.
    pub fn counters(&self) -> FabricCounters {
        self.fabric.counters()
    }

    /// Heap memory of answers that wait to be sent.
    pub fn queued_heap_bytes(&self) -> usize {
        self.fabric.queued_heap_bytes()
    }

    /// Windows that are open for gets in progress.
    pub fn open_windows(&mut self) -> usize {
        self.fabric.windows().len()
    }

    /// Why the last connection or session that ended did so.
    pub fn last_closed(&self) -> Option<CloseReason> {
        self.fabric.last_closed()
    }
}

impl Handler for Hosting<'_, '_, '_> {
    fn can_go_on(&self, reactor: &Reactor) -> bool {
        let is_held_back = self.sessions.turn_is_full() && self.services.iter().any(|service| service.has_waiting());
        is_held_back || self.services.iter().any(|service| service.can_go_on(reactor))
    }

    fn up(&mut self, fabric: &mut Fabric, _reactor: &mut Reactor, slot: SessionId) {
        self.sessions.up(fabric, slot);
    }

    fn message(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: SessionId,
        kind: Message,
        header: &Header,
        payload: &[u8],
    ) {
        let event = match self.sessions.message(session, kind, header, payload) {
            Ok(event) => event,
            Err(reason) => return fabric.close(reactor, session, reason),
        };
        match event {
            Some(Event::Called(call, asked)) => {
                let service = self.services.iter_mut().find(|service| service.protocol() == asked.protocol);
                if let Some(service) = service {
                    service.called(&mut At { fabric, reactor, sessions: self.sessions }, call, &asked);
                }
            }
            Some(Event::Ready(slot)) => {
                for service in &mut *self.services {
                    service.may_notify(&mut At { fabric, reactor, sessions: self.sessions }, slot);
                }
            }
            // A cancelled call is answered all the same.
            None | Some(Event::None | Event::Cancelled(_) | Event::Notified(_)) => {}
            Some(Event::Ended(never, ..)) => match never {},
        }
        self.sessions.send_outbox(fabric);
    }

    /// A client has put bytes into a slab that a service opened to it. Services are not notified.
    fn placed(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: SessionId,
        kind: Message,
        header: &Header,
    ) {
        if let Err(reason) = fabric.confirm_put(session, kind, header) {
            fabric.close(reactor, session, reason);
        }
    }

    fn got(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: SessionId, get: EndedGet) {
        let (protocol, context) = (get.context >> 56, get.context & (u64::MAX >> 8));
        let service = self.services.iter_mut().find(|service| u64::from(service.protocol()) == protocol);
        if let Some(service) = service {
            let at = &mut At { fabric, reactor, sessions: self.sessions };
            service.got(at, session, EndedGet { context, ..get });
        }
    }

    fn down(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, slot: SessionId, _reason: CloseReason) {
        if !self.sessions.down(slot) {
            return;
        }
        for service in &mut *self.services {
            service.peer_gone(&mut At { fabric, reactor, sessions: self.sessions }, slot);
        }
    }

    fn drained(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, slot: SessionId) {
        for service in &mut *self.services {
            service.peer_drained(&mut At { fabric, reactor, sessions: self.sessions }, slot);
        }
        self.sessions.drained(fabric, slot);
    }
}
