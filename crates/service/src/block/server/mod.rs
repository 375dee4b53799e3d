//! The service of block volumes on one loop, over the loop's [`Engine`].
//!
//! The loop passes the engine's [`Done`]s of the service's class to [`Volumes::done`]. Large writes are pulled from the client when a
//! frame is free for each piece, so nothing arrives that there is no place for; when frames run out, requests wait, in two
//! lines, since two things can be short: reads and small writes wait for frames, large writes for the share of the pool that pulls
//! may have. The two take turns at being fed first.

mod calls;
mod requests;
mod waiting;
mod writes;

use std::net::SocketAddr;

use byway_fabric::access::Right;
use byway_fabric::{EndedGet, Fabric, SessionId, Slots};
use byway_reactor::Reactor;
use byway_rpc::session::{CallRef, CannotSend, Grant, Incomer, Spoken};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use self::requests::{BlockRequest, BlockRequestId};
use self::waiting::Queued;
use super::engine::{Done, Engine, Tag, VolumeId};
use super::wire::{NOTICE_RESIZED, PROTOCOL, Resized, VERSIONS};
use crate::host::{At, Host, Line, Service, Sessions};

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

/// A session that has opened a volume.
#[derive(Debug)]
struct Client {
    session: SessionId,
    handles: Vec<Handle>,
}

/// See the module.
#[derive(Debug)]
pub struct Volumes {
    class: u8,
    exports: Vec<Export>,
    /// By the index of the session's slot.
    clients: Vec<Option<Client>>,
    in_flight: Slots<BlockRequest>,
    /// Reads and small writes that wait for frames.
    requests: Line<Queued>,
    /// Large writes that wait to be pulled: for their share of the pool, or for frames.
    pulls: Line<Queued>,
    /// Which queue is served first; they take turns.
    pulls_first: bool,
    waiting_bytes: usize,
    pulled_bytes: usize,
    /// Count of returned frames when the waiting requests last had their turns.
    given_back: u64,
}

/// The volumes with the engine that they lie in, as a service of the host.
pub struct WithEngine<'a> {
    volumes: &'a mut Volumes,
    engine: &'a mut Engine,
}

/// All that a call works with besides the fabric and the loop.
struct ServerContext<'a> {
    core: &'a mut Volumes,
    engine: &'a mut Engine,
    sessions: &'a mut Sessions,
}

impl Volumes {
    /// No volumes. The engine's requests are of `class`.
    pub fn new(class: u8) -> Self {
        Self {
            class,
            exports: Vec::new(),
            clients: Vec::new(),
            in_flight: Slots::default(),
            requests: Line::default(),
            pulls: Line::default(),
            pulls_first: false,
            waiting_bytes: 0,
            pulled_bytes: 0,
            given_back: 0,
        }
    }

    /// What the service speaks, where each session may have so many calls in flight.
    pub const fn spoken(calls: u16) -> Spoken {
        Spoken { protocol: PROTOCOL, versions: VERSIONS, grant: Some(Grant { calls, notices: 0 }) }
    }

    /// For the host, with the loop's engine.
    pub fn with<'a>(&'a mut self, engine: &'a mut Engine) -> WithEngine<'a> {
        WithEngine { volumes: self, engine }
    }

    /// Offers a volume, under the name that it has in the engine.
    pub fn offer(&mut self, volume: VolumeId) {
        self.exports.push(Export { volume, withdrawn: false });
    }

    /// Offers a volume no longer: requests on it are answered `Closed`. The owner may detach it once the engine has no
    /// requests on it.
    pub fn withdraw(&mut self, volume: VolumeId) {
        self.exports.iter_mut().filter(|export| export.volume == volume).for_each(|export| export.withdrawn = true);
    }

    /// Ends the sessions that have a volume open, which was offered anew under its name: their clients open that one.
    pub fn dismiss_users(&mut self, host: &mut Host, reactor: &mut Reactor, volume: VolumeId) {
        let at = host.at(reactor);
        for client in self.clients.iter().flatten() {
            if client.handles.iter().any(|handle| self.exports[handle.export].volume == volume) {
                at.sessions.dismiss(at.fabric, at.reactor, client.session);
            }
        }
    }

    /// Ends the sessions that may do less by now than when they began: a volume that they have open is no longer for them, or no
    /// longer to be written. What they ask for from here on is refused.
    pub fn enforce_access(&mut self, host: &mut Host, reactor: &mut Reactor, engine: &Engine) -> usize {
        let at = host.at(reactor);
        let mut ended = Vec::new();
        for client in self.clients.iter_mut().flatten() {
            let Some(session) = at.sessions.get(client.session) else { continue };
            let mut ends = false;
            for handle in &mut client.handles {
                let volume = engine.volume(self.exports[handle.export].volume);
                let now = volume.and_then(|volume| volume.right(&session.client));
                // One that is no longer served is not the client's to lose.
                ends |= volume.is_some() && now < handle.right;
                handle.right = handle.right.min(now);
            }
            if ends && at.sessions.dismiss(at.fabric, at.reactor, client.session) {
                ended.push(client.session);
            }
        }
        for &slot in &ended {
            let client = at.sessions.get(slot).map(|session| tracing::field::display(&session.client));
            tracing::info!(client, "session ended: a reload revoked its access");
            // What of it waits for its turn is not begun either.
            self.leave(at.sessions, slot);
        }
        ended.len()
    }

    /// Tells the clients of a volume its new size.
    pub fn resized(&mut self, host: &mut Host, reactor: &mut Reactor, volume: VolumeId, len: u64) {
        let at = host.at(reactor);
        for client in self.clients.iter_mut().flatten() {
            let exports = &self.exports;
            let handles = client.handles.iter_mut().filter(|handle| exports[handle.export].volume == volume);
            handles.for_each(|handle| handle.untold = Some(len));
            client.tell_sizes(at.sessions, at.fabric);
        }
    }

    /// Takes the end of a request, whose tag is of the service's class.
    pub fn done(&mut self, host: &mut Host, reactor: &mut Reactor, engine: &mut Engine, done: Done) {
        let at = host.at(reactor);
        ServerContext { core: self, engine, sessions: at.sessions }.ended(at.fabric, at.reactor, done);
    }

    /// Whether no request is left.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// The client of a request of the service's class that the engine has not handed back yet.
    pub fn peer_of(&self, host: &Host, tag: Tag) -> Option<SocketAddr> {
        let session = match self.in_flight.get(request_of(tag))? {
            BlockRequest::Read(requests::Read { call, .. })
            | BlockRequest::Plain(call)
            | BlockRequest::Write(requests::Write { call, .. }) => call.session,
            BlockRequest::Part { session, .. } => *session,
        };
        host.peer(session)
    }

    /// The volumes that a session has open.
    fn handles(&mut self, session: SessionId) -> &mut Vec<Handle> {
        let index = session.index as usize;
        if self.clients.len() <= index {
            self.clients.resize_with(index + 1, || None);
        }
        let client = self.clients[index].take_if(|client| client.session == session);
        let client = client.unwrap_or_else(|| Client { session, handles: Vec::new() });
        &mut self.clients[index].insert(client).handles
    }

    fn client(&mut self, session: SessionId) -> Option<&mut Client> {
        self.clients.get_mut(session.index as usize)?.as_mut().filter(|client| client.session == session)
    }

    /// The label of a call's request to the engine.
    fn tag(&self, request: BlockRequestId) -> Tag {
        Tag(u64::from(self.class) << 56 | u64::from(request.generation) << 24 | u64::from(request.index))
    }
}

/// The request that a tag names.
fn request_of(tag: Tag) -> BlockRequestId {
    BlockRequestId::new((tag.0 & 0x00ff_ffff) as u32, (tag.0 >> 24 & 0x00ff_ffff) as u32)
}

impl Service for WithEngine<'_> {
    fn protocol(&self) -> u8 {
        PROTOCOL
    }

    fn called(&mut self, at: &mut At<'_>, call: CallRef, asked: &Incomer<'_>) {
        ServerContext { core: self.volumes, engine: self.engine, sessions: at.sessions }
            .called(at.fabric, at.reactor, call, asked);
    }

    fn got(&mut self, at: &mut At<'_>, session: SessionId, get: EndedGet) {
        ServerContext { core: self.volumes, engine: self.engine, sessions: at.sessions }
            .pulled(at.fabric, at.reactor, session, get);
    }

    fn may_notify(&mut self, at: &mut At<'_>, session: SessionId) {
        if let Some(client) = self.volumes.client(session) {
            client.tell_sizes(at.sessions, at.fabric);
        }
    }

    fn peer_gone(&mut self, at: &mut At<'_>, session: SessionId) {
        self.volumes.leave(at.sessions, session);
        if !at.sessions.is_up(session)
            && let Some(client) = self.volumes.clients.get_mut(session.index as usize)
        {
            client.take_if(|client| client.session == session);
        }
    }

    fn turn(&mut self, at: &mut At<'_>) {
        ServerContext { core: self.volumes, engine: self.engine, sessions: at.sessions }.feed(at.fabric, at.reactor);
    }

    fn has_waiting(&self) -> bool {
        self.volumes.is_waited()
    }

    fn can_go_on(&self, reactor: &Reactor) -> bool {
        self.volumes.is_waited() && reactor.frames().given_back() != self.volumes.given_back
    }
}

impl Client {
    /// Tells the client the new sizes of its volumes, as far as it takes notices now.
    fn tell_sizes(&mut self, sessions: &mut Sessions, fabric: &mut Fabric) {
        for (number, handle) in self.handles.iter_mut().enumerate() {
            let Some(len) = handle.untold else { continue };
            let resized = Resized {
                handle: U32::new(number as u32),
                reserved: U32::new(0),
                len: U64::new(len),
                reserved_end: [0; 48],
            };
            match sessions.notify(fabric, self.session, PROTOCOL, NOTICE_RESIZED, resized.as_bytes()) {
                Err(CannotSend::NoCredit) => return,
                Ok(()) | Err(CannotSend::NotServed(_) | CannotSend::Ended) => handle.untold = None,
            }
        }
    }
}
