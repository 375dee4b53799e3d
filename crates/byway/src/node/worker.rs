//! One loop of a node: hands each completion to the context that it belongs to.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use byway_fabric::Options as FabricOptions;
use byway_frontend::http::FrontendSnapshot;
use byway_frontend::nbd::server::{LoopContext, NBD_CLASS, NbdFrontend, NbdOptions};
use byway_reactor::{
    Address, Completion, Detached, Errno, FramePool, Instant, Listener, Op, Outcome, Reactor, Socket, Token, Wait,
};
use byway_rpc::session::Spoken;
use byway_service::block::server::Volumes;
use byway_service::block::{Catalog, Done, ENGINE_CLASS, Engine, Volume};
use byway_service::file::Share;
use byway_service::file::server::Shares;
use byway_service::host::{Host, Services};
use byway_service::limits::CALLS_PER_SESSION;
use byway_service::memory::{Lender, Lending};

use super::load::Loads;
use super::report::{LoopReport, SlowOperations, VolumeReport, nbd_client};
use super::{Assignment, LoopSender, Ready, StartError, Started};
use crate::address::Cidr;
use crate::admission::peer_allowed;
use crate::limits::PEERS_REPORTED_MAX;
use crate::listening::{Endpoint, patiently};

/// The class of the node's own tokens.
const NODE_CLASS: u8 = 0x01;
const TAG_ACCEPT: u8 = 1;
/// Requests that were held back by their volume's rate may go on, or the lender has something to do.
const TAG_THROTTLE: u8 = 2;
/// A listener that had no descriptors for its connections tries again.
const TAG_ACCEPT_AGAIN: u8 = 3;
/// How long it waits.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
/// The class of the native server's tokens and tags.
const NATIVE_CLASS: u8 = 0x20;
/// The class of the reads and writes of shares.
const FILE_CLASS: u8 = 0x21;

/// What the node tells a loop.
pub(super) enum Message {
    /// A new stream of the NBD front end.
    Stream(Detached),
    /// The volumes from now on. Confirmed once it is so, with the number of sessions whose certificate is revoked by now or that
    /// have lost access, and were ended.
    Volumes(Vec<Arc<Volume>>, Sender<usize>),
    /// The shares from now on.
    Shares(Vec<Arc<Share>>),
    /// The clients that may connect from now on. Confirmed once applied.
    Allow(Vec<Cidr>, Sender<()>),
    /// Tell what was done.
    Report(Sender<LoopReport>),
    /// Answer what is in flight, then end.
    Drain,
    /// End now.
    Stop,
    #[cfg(test)]
    Panic,
}

pub(super) struct Worker {
    index: usize,
    reactor: Reactor,
    engine: Engine,
    catalog: Catalog,
    nbd: NbdFrontend,
    host: Host,
    volumes: Volumes,
    shares: Shares,
    lender: Lender,
    listeners: Vec<(Listener, Address)>,
    peers: Vec<LoopSender>,
    loads: Arc<Loads>,
    receiver: Receiver<Message>,
    allow: Vec<Cidr>,
    slow: Arc<SlowOperations>,
    /// Connections refused by address.
    refused: u64,
    /// For when the earliest timer of [`TAG_THROTTLE`] is set.
    throttled: Option<Instant>,
    draining: bool,
    stopped: bool,
}

/// The protocols of a loop, and its lender. One that lends nothing is asked for nothing: its protocol is not spoken.
fn spoken(lending: Option<&Arc<Lending>>) -> (Vec<Spoken>, Lender) {
    let mut spoken = vec![Volumes::spoken(CALLS_PER_SESSION), Shares::spoken(CALLS_PER_SESSION)];
    spoken.extend(lending.map(|_| Lender::spoken()));
    (spoken, Lender::new(lending.cloned().unwrap_or_else(|| Arc::new(Lending::new(0, None, None)))))
}

impl Worker {
    /// Opens the loop on this thread, and its front ends.
    pub(super) fn open(assignment: Assignment, peers: Vec<LoopSender>) -> Result<(Self, Started), StartError> {
        let Assignment { index, options, nbd, native: native_listeners, registry, files, loads, slow, receiver } =
            assignment;
        let frames = options.frame_bytes / options.threads.max(1);
        let mut reactor = Reactor::open(options.io, frames).map_err(StartError::Loop)?;
        let mut engine = Engine::default();
        engine.note_slow(Duration::from_micros(options.slow_us));
        if let Some(bytes) = options.measuring.slice_bytes {
            engine.slice_at(bytes);
        }
        if let Some(bytes) = options.measuring.staging_bytes {
            engine.stage_in(FramePool::new(bytes).map_err(StartError::Loop)?);
        }
        let mut catalog = Catalog::default();
        catalog.replace(&mut engine, &mut reactor, &options.volumes);
        let mut shares = Shares::new(&reactor, FILE_CLASS, &files);
        let (spoken, lender) = spoken(options.lending.as_ref());
        let mut host = Host::new(&reactor, registry, FabricOptions::new(NATIVE_CLASS), spoken);
        let mut volumes = Volumes::new(NATIVE_CLASS);
        host.set_tls(options.tls.clone());
        shares.replace(&mut host, &mut reactor, &options.shares);
        for (fd, address) in native_listeners {
            let listener = reactor.adopt_listener(fd).map_err(StartError::Loop)?;
            if matches!(address, Address::Shared(_)) {
                reactor.share_memory(listener);
            }
            host.accept_from(&mut reactor, listener);
        }
        for id in catalog.ids() {
            volumes.offer(id);
        }
        let mut worker = Self {
            index,
            reactor,
            engine,
            catalog,
            nbd: NbdFrontend::new(NbdOptions { tls: options.tls.clone(), ..options.nbd_options.clone() }),
            host,
            volumes,
            shares,
            lender,
            listeners: Vec::new(),
            peers,
            loads,
            receiver,
            allow: Vec::new(),
            slow,
            refused: 0,
            throttled: None,
            draining: false,
            stopped: false,
        };
        worker.take_allowed(options.allow.clone());
        let mut ready = Vec::new();
        if index == 0 {
            for (fd, address) in nbd {
                let listener = worker.reactor.adopt_listener(fd).map_err(StartError::Loop)?;
                worker.add_listener(listener, address);
            }
            ready = worker.listeners.iter().map(|(_, at)| Ready { frontend: "nbd", address: at.clone() }).collect();
            ready.extend(worker.listen_rdma(&options.native)?);
        }
        let io = format!("{}: {}", worker.reactor.io().name, worker.reactor.io().reason);
        let started = Started { waker: worker.reactor.waker(), ready, io };
        Ok((worker, started))
    }

    /// Listens for clients over RDMA.
    fn listen_rdma(&mut self, endpoints: &[Endpoint]) -> Result<Vec<Ready>, StartError> {
        let mut ready = Vec::new();
        for endpoint in endpoints {
            let Address::Rdma(address) = endpoint.address else { continue };
            let in_use = || std::io::Error::from(std::io::ErrorKind::AddrInUse);
            let bound = patiently(&endpoint.address, || match self.host.listen_rdma(&mut self.reactor, address) {
                Err(error) if error.is(Errno::ADDRINUSE) => Err(in_use()),
                bound => Ok(bound),
            });
            let failed = |source| StartError::Listen { address: Address::Rdma(address), source };
            let bound = bound.map_err(failed)?.map_err(|source| StartError::ListenRdma { address, source })?;
            ready.push(Ready { frontend: "byway", address: Address::Rdma(bound) });
        }
        Ok(ready)
    }

    fn add_listener(&mut self, listener: Listener, address: Address) {
        let token = Token::new(NODE_CLASS, TAG_ACCEPT, self.listeners.len() as u32, 0);
        self.reactor.submit(Op::Accept { listener }, token);
        self.listeners.push((listener, address));
    }

    /// Runs until the node says to end. Whether that is why it ended.
    pub(super) fn run(mut self) -> bool {
        let mut completions = Vec::new();
        let mut done = Vec::new();
        while !self.stopped && !(self.draining && self.nbd.connection_count() == 0 && self.is_native_idle()) {
            self.host.flush(
                &mut self.reactor,
                &mut [&mut self.volumes.with(&mut self.engine), &mut self.shares, &mut self.lender],
            );
            self.set_timer();
            // The front ends have one pool; the other one looks at it when this turn ends.
            let wait = if self.host.frames_returned() && self.nbd.is_stalled() { Wait::Poll } else { Wait::Block };
            if let Err(error) = self.reactor.reap(&mut completions, wait) {
                tracing::error!(%error, "the event loop failed; its connections end");
                return false;
            }
            for completion in completions.drain(..) {
                self.dispatch(completion, &mut done);
            }
            self.finish_turn(&mut done);
        }
        self.close_listeners();
        true
    }

    /// Whether no client of byway's own protocol is left, and nothing that one has asked for.
    fn is_native_idle(&self) -> bool {
        self.host.is_idle() && self.volumes.is_idle() && self.shares.is_idle()
    }

    fn close_listeners(&mut self) {
        for (listener, _) in self.listeners.drain(..) {
            self.reactor.close_listener(listener);
        }
    }

    /// Sets a timer for requests that are held back by their volume's rate, and for the lender: each turn lets them try again.
    fn set_timer(&mut self) {
        if let Some(at) = self.engine.throttled_until().into_iter().chain(self.lender.next_look()).min()
            && self.throttled.is_none_or(|set| at < set)
        {
            self.throttled = Some(at);
            self.reactor.submit(Op::Timer { at }, Token::new(NODE_CLASS, TAG_THROTTLE, 0, 0));
        }
    }

    fn dispatch(&mut self, completion: Completion, done: &mut Vec<Done>) {
        match completion.token.class() {
            NBD_CLASS => {
                let (nbd, mut context) = self.nbd_and_context();
                nbd.handle(&mut context, completion);
            }
            NATIVE_CLASS => {
                let services: Services<'_, '_> =
                    &mut [&mut self.volumes.with(&mut self.engine), &mut self.shares, &mut self.lender];
                self.host.handle(&mut self.reactor, services, completion);
            }
            FILE_CLASS => self.shares.complete(&mut self.host, &mut self.reactor, completion),
            ENGINE_CLASS => self.engine.complete(&mut self.reactor, completion, done),
            // A later one that is still set only wakes the loop in vain.
            NODE_CLASS if completion.token.tag() == TAG_THROTTLE => self.throttled = None,
            NODE_CLASS if completion.token.tag() == TAG_ACCEPT_AGAIN => {
                if let Some((listener, _)) = self.listeners.get(completion.token.index() as usize) {
                    let token = completion.token.with_tag(TAG_ACCEPT);
                    self.reactor.submit(Op::Accept { listener: *listener }, token);
                }
            }
            NODE_CLASS => self.accepted(completion),
            _ => {
                if completion.token == Token::WAKE {
                    let services: Services<'_, '_> =
                        &mut [&mut self.volumes.with(&mut self.engine), &mut self.shares, &mut self.lender];
                    self.host.woken(&mut self.reactor, services);
                    self.take_messages();
                }
            }
        }
    }

    fn nbd_and_context(&mut self) -> (&mut NbdFrontend, LoopContext<'_>) {
        let context = LoopContext { reactor: &mut self.reactor, engine: &mut self.engine, catalog: &self.catalog };
        (&mut self.nbd, context)
    }

    /// Hands ended requests to their front ends, and lets those that wait for memory try again.
    fn finish_turn(&mut self, done: &mut Vec<Done>) {
        self.note_slow();
        for one in done.drain(..) {
            if (one.tag.0 >> 56) as u8 == NATIVE_CLASS {
                self.volumes.done(&mut self.host, &mut self.reactor, &mut self.engine, one);
                continue;
            }
            let (nbd, mut context) = self.nbd_and_context();
            nbd.done(&mut context, one);
        }
        let (nbd, mut context) = self.nbd_and_context();
        nbd.turn(&mut context);
        let load = self.nbd.connection_count() + self.host.sessions().count();
        self.loads.note(self.index, load);
    }

    /// Hands on what took long, while its asker is still known.
    fn note_slow(&mut self) {
        while let Some(slow) = self.engine.take_slow() {
            let peer = if (slow.tag.0 >> 56) as u8 == NATIVE_CLASS {
                self.volumes.peer_of(&self.host, slow.tag)
            } else {
                self.nbd.peer_of(slow.tag)
            };
            let volume = self.engine.volume(slow.volume).map_or("", |volume| volume.name());
            self.slow.push(&slow, volume, peer);
        }
    }

    fn accepted(&mut self, completion: Completion) {
        match completion.outcome {
            Outcome::Accepted(Ok(socket)) => {
                if !self.admits(socket) {
                    return;
                }
                let place = self.loads.place();
                if place != self.index
                    && let Some(peer) = self.peers.get(place.wrapping_sub(1))
                    && let Some(fd) = self.reactor.release(socket)
                {
                    peer.send(Message::Stream(fd));
                    return;
                }
                self.loads.take(place);
                let (nbd, mut context) = self.nbd_and_context();
                nbd.open(&mut context, socket);
            }
            Outcome::Accepted(Err(error)) if !self.draining => {
                // Out of descriptors, most likely: go on in a moment, others may close theirs.
                tracing::error!(%error, "cannot accept a connection; on EMFILE, raise LimitNOFILE");
                let at = self.reactor.now() + ACCEPT_PAUSE;
                self.reactor.submit(Op::Timer { at }, completion.token.with_tag(TAG_ACCEPT_AGAIN));
            }
            _ => {}
        }
    }

    /// Whether a connection may come in; it is closed if not.
    fn admits(&mut self, socket: Socket) -> bool {
        let peer = self.reactor.peer_address(socket);
        // One that was reset before it was accepted has no address: what was sent on it would be done, for nobody knows whom.
        let is_unknown = peer.is_none() && self.reactor.is_tcp(socket) && !self.allow.is_empty();
        if !is_unknown && peer_allowed(peer.map(|peer| peer.ip()), &self.allow) {
            return true;
        }
        self.refused += 1;
        tracing::warn!(?peer, "connection refused: its address is not in an --allow range, or it was reset");
        self.reactor.close(socket);
        false
    }

    fn take_messages(&mut self) {
        while let Ok(message) = self.receiver.try_recv() {
            match message {
                Message::Stream(fd) => {
                    self.loads.take(self.index);
                    match self.reactor.adopt(fd) {
                        // Asked once more: whoever accepted it may not have had the newest rules.
                        Ok(socket) if self.admits(socket) => {
                            let (nbd, mut context) = self.nbd_and_context();
                            nbd.open(&mut context, socket);
                        }
                        Ok(_) => {}
                        Err(error) => tracing::error!(%error, "cannot take over a connection from another loop"),
                    }
                }
                Message::Volumes(volumes, applied) => {
                    let ended = self.take_volumes(&volumes);
                    // Before the answer: whoever waits for it may want to be the last to know of a volume.
                    drop(volumes);
                    let _ = applied.send(ended);
                }
                Message::Shares(shares) => self.shares.replace(&mut self.host, &mut self.reactor, &shares),
                Message::Allow(allow, applied) => {
                    self.take_allowed(allow);
                    let _ = applied.send(());
                }
                Message::Report(sender) => {
                    let _ = sender.send(self.report());
                }
                Message::Drain => {
                    self.draining = true;
                    self.close_listeners();
                    let (nbd, mut context) = self.nbd_and_context();
                    nbd.drain(&mut context);
                    self.shares.drain(&mut self.host, &mut self.reactor);
                    self.host.shut_down(&mut self.reactor);
                }
                Message::Stop => self.stopped = true,
                #[cfg(test)]
                Message::Panic => panic!("a test wants it"),
            }
        }
    }

    /// Gives how many sessions were ended because they may do less by now.
    fn take_volumes(&mut self, volumes: &[Arc<Volume>]) -> usize {
        let names: Vec<_> = self.catalog.entries().map(|(volume, id)| (id, volume.name().to_owned())).collect();
        let changes = self.catalog.replace(&mut self.engine, &mut self.reactor, volumes);
        for id in &changes.gone {
            self.volumes.withdraw(*id);
            let name = names.iter().find(|(before, _)| before == id).map(|(_, name)| name);
            if name.is_some_and(|name| self.catalog.find(name).is_some()) {
                self.volumes.dismiss_users(&mut self.host, &mut self.reactor, *id);
            }
        }
        for id in changes.new {
            self.volumes.offer(id);
        }
        for (id, len) in changes.resized {
            self.volumes.resized(&mut self.host, &mut self.reactor, id, len);
        }
        let services: Services<'_, '_> =
            &mut [&mut self.volumes.with(&mut self.engine), &mut self.shares, &mut self.lender];
        let revoked = self.host.end_revoked(&mut self.reactor, services);
        let dismissed = self.volumes.enforce_access(&mut self.host, &mut self.reactor, &self.engine);
        let (nbd, mut context) = self.nbd_and_context();
        nbd.drop_volumes(&mut context, &changes.gone);
        revoked + dismissed + nbd.enforce_access(&mut context)
    }

    fn take_allowed(&mut self, allow: Vec<Cidr>) {
        let admitted = allow.clone();
        self.host.admit(move |peer| peer_allowed(Some(peer.ip()), &admitted));
        self.allow = allow;
    }

    fn report(&self) -> LoopReport {
        let nbd = self.nbd.counters();
        let native = self.host.counters();
        let frontend = |name: &str| FrontendSnapshot { name: name.to_owned(), ..FrontendSnapshot::default() };
        let nbd = FrontendSnapshot {
            connections: self.nbd.connection_count() as u64,
            accepted: nbd.connections,
            refused: nbd.refused + self.refused,
            connection_errors: nbd.faults,
            ..frontend("nbd")
        };
        let native = FrontendSnapshot {
            connections: self.host.sessions().count() as u64,
            accepted: native.sessions,
            refused: native.refused,
            connection_errors: native.faults,
            ..frontend("byway")
        };
        let now = self.reactor.now();
        let volumes = self.catalog.entries();
        let volumes = volumes.map(|(volume, id)| VolumeReport::new(&self.engine, volume, id, now));
        let clients = self.nbd.busiest_clients(&self.reactor, PEERS_REPORTED_MAX);
        let volume_of = |id| self.engine.volume(id).map_or("", |volume| volume.name());
        LoopReport {
            counters: self.reactor.counters(),
            frame_bytes: self.reactor.frames().bytes() as u64,
            frame_free_bytes: self.reactor.frames().free_bytes() as u64,
            frontends: vec![nbd, native],
            volumes: volumes.collect(),
            shares: self.shares.report(),
            nbd_clients: clients.iter().map(|client| nbd_client(client, volume_of(client.volume))).collect(),
            delays: self.host.delays(),
            peers: self.host.busiest_peers(&self.reactor, PEERS_REPORTED_MAX),
        }
    }
}
