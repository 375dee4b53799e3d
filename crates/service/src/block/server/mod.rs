//! The native server of one loop: sessions of clients, over the loop's [`Engine`].
//!
//! The loop passes completions of the server's token class to [`Server::handle`], the engine's [`Done`]s of its class to
//! [`Server::done`], and calls [`Server::flush`] once a turn. Large writes are pulled from the client when a frame is free
//! for each piece, so nothing arrives that there is no place for; when frames run out, requests wait, and sessions take
//! turns that are fair by bytes (`waiting.rs`).

mod calls;
mod jobs;
mod peers;
mod waiting;
mod writes;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use byway_fabric::access::{Identity, Right};
use byway_fabric::rdma::RdmaError;
use byway_fabric::tls::ServerTls;
use byway_fabric::wire::{Header, Kind as Message, RefuseCode};
use byway_fabric::{CloseReason, Deficit, Fabric, FabricCounters, GetError, Handler, Options, Registry, Slot, Slots};
use byway_reactor::{Address, Completion, Frame, Listener, Reactor};
use byway_rpc::message::Inline;
use byway_rpc::session::{Ask, Breach, Calls, CannotSend, Event, Grant, Spoken};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use self::jobs::Job;
pub use self::peers::{PeerFeedback, keep_busiest};
use self::waiting::Waiting;
use super::engine::{Done, Engine, Tag, VolumeId};
use super::wire::{NOTICE_RESIZED, PROTOCOL, Resized, VERSIONS};
use crate::calls::send_outbox;
use crate::limits::CALLS_PER_SESSION;

/// See the module.
pub struct Server {
    fabric: Fabric,
    core: Core,
    /// Frames came back in the last flush.
    has_let_go: bool,
}

/// A volume that is offered.
#[derive(Debug)]
struct Export {
    volume: VolumeId,
    withdrawn: bool,
}

/// A volume that a session has open.
#[derive(Clone, Copy, Debug)]
struct Handle {
    export: usize,
    /// `None`: a reload took the client's access away.
    right: Option<Right>,
    /// The volume's new size in bytes, which the client is to be told.
    untold: Option<u64>,
}

#[derive(Debug)]
struct Session {
    slot: Slot,
    client: Identity,
    handles: Vec<Handle>,
    /// Jobs that have not ended.
    jobs: usize,
    /// Frames that its requests hold at the stores, in bytes: reads until they are answered, pieces of writes until they
    /// are written.
    held_bytes: usize,
    /// Payloads must lie in memory that nobody else changes, and that we may read.
    private: bool,
    checksum: bool,
    down: bool,
    drained: bool,
    /// It was told goodbye.
    dismissed: bool,
}

struct Core {
    class: u8,
    exports: Vec<Export>,
    /// By the index of the fabric's slot.
    sessions: Vec<Option<Session>>,
    calls: Calls<Infallible>,
    jobs: Slots<Job>,
    /// Reads and small writes that wait for frames.
    requests: Deficit<Waiting>,
    /// Large writes that wait to be pulled: for their share of the pool, or for frames.
    pulls: Deficit<Waiting>,
    /// Who is fed first; they take turns.
    pulls_first: bool,
    waiting_bytes: usize,
    pulled_bytes: usize,
    /// Frames that had come back when those who wait had had their turns.
    given_back: u64,
    served: u64,
    /// No call is begun any more; each session is told goodbye when its calls have been answered.
    draining: bool,
}

/// The core with what it works on, as the fabric's handler.
struct Serving<'a> {
    core: &'a mut Core,
    engine: &'a mut Engine,
}

impl Server {
    /// A server of `registry`'s process on this loop.
    pub fn new(reactor: &Reactor, registry: Arc<Registry>, options: Options) -> Self {
        let mut fabric = Fabric::new(options);
        fabric.serve(reactor, registry);
        let core = Core {
            class: options.class,
            exports: Vec::new(),
            sessions: Vec::new(),
            calls: calls(&mut fabric, CALLS_PER_SESSION),
            jobs: Slots::default(),
            requests: Deficit::default(),
            pulls: Deficit::default(),
            pulls_first: false,
            waiting_bytes: 0,
            pulled_bytes: 0,
            given_back: 0,
            served: 0,
            draining: false,
        };
        Self { fabric, core, has_let_go: false }
    }

    /// Lets each session have so many calls in flight. To be called before there are any.
    pub fn set_calls_per_session(&mut self, max: u16) {
        self.core.calls = calls(&mut self.fabric, max);
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

    /// What connections that are accepted from now on must or may do about TLS.
    pub fn set_tls(&mut self, tls: ServerTls) {
        self.fabric.set_tls_server(tls);
    }

    /// Offers a volume, under the name that it has in the engine.
    pub fn offer(&mut self, volume: VolumeId) {
        self.core.exports.push(Export { volume, withdrawn: false });
    }

    /// Offers a volume no longer: requests on it are answered `Closed`. The owner may detach it once the engine has no
    /// requests on it.
    pub fn withdraw(&mut self, volume: VolumeId) {
        self.core
            .exports
            .iter_mut()
            .filter(|export| export.volume == volume)
            .for_each(|export| export.withdrawn = true);
    }

    /// Ends the sessions that have a volume open, which was offered anew under its name: their clients open that one.
    pub fn dismiss_users(&mut self, reactor: &mut Reactor, volume: VolumeId) {
        let exports = &self.core.exports;
        for session in self.core.sessions.iter_mut().flatten().filter(|session| !session.down && !session.dismissed) {
            if session.handles.iter().any(|handle| exports[handle.export].volume == volume) {
                session.dismissed = true;
                self.fabric.say_goodbye(reactor, session.slot, RefuseCode::ShuttingDown);
            }
        }
    }

    /// Ends the sessions that may do less by now than when they began: their certificate is on a revocation list, or a volume
    /// that they have open is no longer for them, or no longer to be written. What they ask for from here on is refused.
    pub fn enforce_access(&mut self, reactor: &mut Reactor, engine: &Engine) {
        let exports = &self.core.exports;
        let mut ended = Vec::new();
        for session in self.core.sessions.iter_mut().flatten().filter(|session| !session.down) {
            let revoked = self.fabric.is_revoked(session.slot);
            let mut ends = revoked;
            for handle in &mut session.handles {
                let volume = engine.volume(exports[handle.export].volume);
                let now = volume.and_then(|volume| volume.right(&session.client)).filter(|_| !revoked);
                // One that is no longer served is not the client's to lose.
                ends |= volume.is_some() && now < handle.right;
                handle.right = handle.right.min(now);
            }
            if ends && !session.dismissed {
                session.dismissed = true;
                ended.push(session.slot);
                tracing::info!(client = %session.client, "session ended: a reload took its access away");
                self.fabric.say_goodbye(reactor, session.slot, RefuseCode::ShuttingDown);
            }
        }
        // What of theirs waits for its turn is not begun either.
        for session in ended {
            self.core.leave(session);
        }
    }

    /// Tells the clients of a volume its new size.
    pub fn resized(&mut self, volume: VolumeId, len: u64) {
        let Core { sessions, exports, calls, .. } = &mut self.core;
        for session in sessions.iter_mut().flatten() {
            let handles = session.handles.iter_mut();
            handles
                .filter(|handle| exports[handle.export].volume == volume)
                .for_each(|handle| handle.untold = Some(len));
            session.tell_sizes(calls, &mut self.fabric);
        }
    }

    /// Takes a completion of the server's token class.
    pub fn handle(&mut self, reactor: &mut Reactor, engine: &mut Engine, completion: Completion) {
        self.fabric.handle(reactor, completion, &mut Serving { core: &mut self.core, engine });
    }

    /// The loop was woken by another.
    pub fn woken(&mut self, reactor: &mut Reactor, engine: &mut Engine) {
        self.fabric.woken(reactor, &mut Serving { core: &mut self.core, engine });
    }

    /// Takes the end of a request, whose tag is of the server's class.
    pub fn done(&mut self, reactor: &mut Reactor, engine: &mut Engine, done: Done) {
        Serving { core: &mut self.core, engine }.ended(&mut self.fabric, reactor, done);
    }

    /// Starts what waited for frames, and sends what has gathered: once a turn.
    pub fn flush(&mut self, reactor: &mut Reactor, engine: &mut Engine) {
        self.fabric.feed_starved(reactor, &mut Serving { core: &mut self.core, engine });
        Serving { core: &mut self.core, engine }.feed(&mut self.fabric, reactor);
        self.core.say_goodbyes(&mut self.fabric, reactor);
        // After those who wait were given turns: what is tried in vain gives frames back too.
        let given_back = reactor.frames().given_back();
        self.fabric.flush(reactor, &mut Serving { core: &mut self.core, engine });
        self.has_let_go = reactor.frames().given_back() != given_back;
    }

    /// Whether frames came back while the last [`Server::flush`] sent what had gathered. Others who wait for frames of this loop hear
    /// of it by nothing else, where it was sent over shared memory.
    pub fn has_let_go(&self) -> bool {
        self.has_let_go
    }

    /// Stops listening, begins no call any more, and says goodbye to each client when its calls have been answered. A call
    /// that comes meanwhile is not begun: its client sends it again to the next server.
    pub fn shut_down(&mut self, reactor: &mut Reactor) {
        self.core.draining = true;
        self.fabric.close_listeners(reactor);
        self.core.say_goodbyes(&mut self.fabric, reactor);
    }

    /// Whether no session and no request is left.
    pub fn is_idle(&self) -> bool {
        self.core.jobs.is_empty() && self.fabric.session_count() == 0 && self.fabric.lane_count() == 0
    }

    /// Sessions.
    pub fn session_count(&self) -> usize {
        self.core.sessions.iter().flatten().count()
    }

    /// Who asked for a request of the server's class that the engine has not handed back yet.
    pub fn peer_of(&self, tag: Tag) -> Option<SocketAddr> {
        let session = match self.core.jobs.get(job_of(tag))? {
            Job::Read(jobs::Read { call, .. }) | Job::Plain(call) | Job::Write(jobs::Write { call, .. }) => {
                call.session
            }
            Job::Part { session, .. } => *session,
        };
        self.fabric.peer(session)
    }

    /// Clients of addresses that `admits` says no to are turned away.
    pub fn admit(&mut self, admits: impl Fn(SocketAddr) -> bool + Send + 'static) {
        self.fabric.admit(admits);
    }

    /// What has come and gone.
    pub fn counters(&self) -> FabricCounters {
        self.fabric.counters()
    }

    /// Calls that have begun and not been answered.
    pub fn calls_in_flight(&self) -> usize {
        self.core.sessions.iter().flatten().map(|session| self.core.calls.calls_in(session.slot)).sum()
    }

    /// Heap memory of answers that wait to be sent.
    pub fn queued_heap_bytes(&self) -> usize {
        self.fabric.queued_heap_bytes()
    }

    /// Pieces of writes that are on their way.
    pub fn open_windows(&mut self) -> usize {
        self.fabric.windows().len()
    }

    /// Requests that were answered.
    pub fn served(&self) -> u64 {
        self.core.served
    }

    /// Why the connection or session that ended last ended.
    pub fn last_closed(&self) -> Option<CloseReason> {
        self.fabric.last_closed()
    }
}

impl Core {
    /// While draining: lets go of sessions whose calls have all been answered.
    fn say_goodbyes(&mut self, fabric: &mut Fabric, reactor: &mut Reactor) {
        if !self.draining {
            return;
        }
        for session in self.sessions.iter_mut().flatten().filter(|session| !session.down && !session.dismissed) {
            if self.calls.calls_in(session.slot) == 0 {
                session.dismissed = true;
                fabric.say_goodbye(reactor, session.slot, RefuseCode::ShuttingDown);
            }
        }
    }

    fn tell_sizes(&mut self, fabric: &mut Fabric, slot: Slot) {
        let session = self.sessions.get_mut(slot.index as usize).and_then(Option::as_mut);
        if let Some(session) = session.filter(|session| session.slot == slot) {
            session.tell_sizes(&mut self.calls, fabric);
        }
    }

    /// Whether calls of a session are not begun: its client sends them again to the next server, or may not send them any more.
    fn begins_none(&mut self, slot: Slot) -> bool {
        self.draining || self.session(slot).is_none_or(|session| session.dismissed)
    }

    fn session(&mut self, slot: Slot) -> Option<&mut Session> {
        self.sessions.get_mut(slot.index as usize)?.as_mut().filter(|session| session.slot == slot)
    }

    /// The label of a job's request to the engine.
    fn tag(&self, job: Slot) -> Tag {
        Tag(u64::from(self.class) << 56 | u64::from(job.generation) << 24 | u64::from(job.index))
    }
}

/// The job that a tag names.
fn job_of(tag: Tag) -> Slot {
    Slot { index: (tag.0 & 0x00ff_ffff) as u32, generation: (tag.0 >> 24 & 0x00ff_ffff) as u32 }
}

impl Serving<'_> {
    /// Lets the fabric forget a session, once nothing of it is left.
    fn release_if_done(&mut self, fabric: &mut Fabric, slot: Slot) {
        let done = self.core.session(slot).is_some_and(|session| session.drained && session.jobs == 0);
        if done {
            self.core.sessions[slot.index as usize] = None;
            fabric.release(slot);
        }
    }
}

impl Handler for Serving<'_> {
    fn can_go_on(&self, reactor: &Reactor) -> bool {
        self.is_waited() && reactor.frames().given_back() != self.core.given_back
    }

    fn up(&mut self, fabric: &mut Fabric, _reactor: &mut Reactor, slot: Slot) {
        let (Some(agreed), Some(nonce)) = (fabric.agreed(slot).copied(), fabric.nonce(slot)) else { return };
        self.core.calls.up(slot, nonce, false);
        let index = slot.index as usize;
        if self.core.sessions.len() <= index {
            self.core.sessions.resize_with(index + 1, || None);
        }
        self.core.sessions[index] = Some(Session {
            slot,
            client: fabric.identity(slot).unwrap_or_default(),
            handles: Vec::new(),
            jobs: 0,
            held_bytes: 0,
            private: agreed.payload_checksum() || fabric.capabilities(slot).is_none_or(|wire| wire.secure),
            checksum: agreed.payload_checksum(),
            down: false,
            drained: false,
            dismissed: false,
        });
    }

    fn message(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: Slot,
        (kind, header): (Message, &Header),
        payload: &[u8],
    ) {
        match kind {
            Message::Call if self.core.begins_none(session) => return,
            // A program's node lets its peer send messages of a program's own; a server has none.
            Message::Credit => return,
            Message::Call | Message::Cancel | Message::Notice | Message::NoticeCredit | Message::Protocols => {}
            _ => return fabric.close(reactor, session, CloseReason::Unexpected(kind)),
        }
        match self.core.calls.message(session, kind, header, payload) {
            Ok(Event::Called(call, asked)) => self.called(fabric, reactor, call, &asked),
            Ok(Event::Ready(slot)) => self.core.tell_sizes(fabric, slot),
            // What was cancelled is answered as ever.
            Ok(Event::None | Event::Cancelled(_) | Event::Notified(_)) => {}
            Ok(Event::Ended(never, ..)) => match never {},
            Err(Breach::Form) => fabric.close(reactor, session, CloseReason::Unexpected(kind)),
            Err(_) => fabric.close(reactor, session, CloseReason::Credit),
        }
        send_outbox(&mut self.core.calls, fabric);
    }

    /// A server opens no windows: a put has nowhere to go.
    fn placed(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: Slot, (kind, _): (Message, &Header)) {
        fabric.close(reactor, session, CloseReason::Unexpected(kind));
    }

    fn got(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: Slot,
        (frame, part): (Option<Frame>, u64),
        result: Result<(), GetError>,
    ) {
        self.pulled(fabric, reactor, session, (frame, Slot::from_u64(part)), result);
    }

    fn down(&mut self, _fabric: &mut Fabric, _reactor: &mut Reactor, slot: Slot, _reason: CloseReason) {
        let Some(session) = self.core.session(slot) else { return };
        session.down = true;
        self.core.calls.down(slot);
        self.core.leave(slot);
    }

    fn drained(&mut self, fabric: &mut Fabric, _reactor: &mut Reactor, slot: Slot) {
        match self.core.session(slot) {
            Some(session) => session.drained = true,
            // It ended before it was up.
            None => return fabric.release(slot),
        }
        self.release_if_done(fabric, slot);
    }
}

/// The calls of a server, each of whose sessions may have so many in flight.
fn calls(fabric: &mut Fabric, max: u16) -> Calls<Infallible> {
    let grant = Some(Grant { calls: max, notices: 0 });
    Calls::new(fabric.random().bytes16(), vec![Spoken { protocol: PROTOCOL, versions: VERSIONS, grant }])
}

impl Session {
    /// Tells the client the new sizes of its volumes, as far as it takes notices now.
    fn tell_sizes(&mut self, calls: &mut Calls<Infallible>, fabric: &mut Fabric) {
        for (number, handle) in self.handles.iter_mut().enumerate() {
            let Some(len) = handle.untold else { continue };
            let (handle_number, zero) = (U32::new(number as u32), U32::new(0));
            let resized = Resized { handle: handle_number, reserved: zero, len: U64::new(len), reserved_end: [0; 48] };
            let arguments = Inline::new(resized.as_bytes()).unwrap_or(Inline::EMPTY);
            let ask = Ask { protocol: PROTOCOL, method: NOTICE_RESIZED, arguments: &arguments, windows: 0 };
            match calls.notify(self.slot, &ask) {
                Ok(header) => fabric.send(self.slot, header),
                Err(CannotSend::NoCredit) => return,
                Err(CannotSend::NotServed(_) | CannotSend::Ended) => {}
            }
            handle.untold = None;
        }
    }
}
