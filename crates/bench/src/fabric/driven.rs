//! Server-driven transfer: a client names its block's location, and the server gets it when it has a frame.
//!
//! No payload arrives without a frame for it. Waiting clients take turns that are fair by bytes ([`Deficit`]); all blocks have
//! one size here, so each client gets one block at its turn.

use std::sync::mpsc::Receiver;

use byway_fabric::wire::{Header, Kind};
use byway_fabric::{
    ClientId, CloseReason, Deficit, EndedGet, Fabric, GetError, Handler, Identity, Options, Registry, Remote,
    SessionId, Slot, Slots, WindowKey,
};
use byway_reactor::{Address, Frame, FramePool, FrameRange, Instant, Reactor, Token};
use byway_rpc::message::{CallBody, ReplyBody, call_number};
use zerocopy::FromZeros;

use super::FabricBenchError;
use super::clients::{Clients, Ended};
use super::part::{Order, Part, Stretch, Tally, Told, Wire, take_orders, tell};
use super::sink::Sink;
use super::turns::Turns;

/// The class of the fabric's tokens.
const CLASS: u8 = 0x20;
/// Bytes of a lane's frame, and of what a busy one may have.
const LANE_BYTES: usize = 32 << 10;
/// Sessions that a process begins at a time: the server's listener has room for them.
const CONNECTING_MAX: usize = 64;

/// Connections of a session for payloads, besides the one for messages.
const BULK_LANES: u16 = 1;
/// Connections of a client.
pub(super) const CONNECTIONS_EACH: usize = 1 + BULK_LANES as usize;

fn options() -> Options {
    let mut options = Options::new(CLASS);
    options.terms.bulk_lanes = BULK_LANES;
    options
}

/// A block that a client wants to have written.
#[derive(Clone, Copy)]
struct Asked {
    session: SessionId,
    call: u64,
    window: WindowKey,
    client: u64,
    sequence: u64,
    since: Instant,
}

struct Server {
    /// The free receive frames; the warmest last.
    frames: Vec<Frame>,
    waiting: Deficit<Asked>,
    getting: Slots<Asked>,
    /// So many at a time.
    ahead: usize,
    sink: Sink,
    block_bytes: usize,
    tally: Tally,
    waited: std::time::Duration,
    failed: Option<FabricBenchError>,
}

/// Serves until the parent has seen enough.
pub(super) fn serve(part: &Part, frames: usize, ahead: usize, sink: Sink) -> Result<(), FabricBenchError> {
    let mut reactor = part.reactor(part.clients * 2 * LANE_BYTES + (32 << 20))?;
    let mut fabric = Fabric::new(options());
    fabric.serve(&reactor, std::sync::Arc::new(Registry::new(u64::from(std::process::id()))));
    let listener = fabric.listen(&mut reactor, &part.address()?).map_err(FabricBenchError::Loop)?;
    let bound = reactor.local_address(listener).map_or_else(|| part.address.clone(), |at| at.to_string());
    let pool = FramePool::new(frames * part.block_bytes.next_power_of_two()).map_err(FabricBenchError::Loop)?;
    let frames: Option<Vec<Frame>> = (0..frames).map(|_| pool.alloc(part.block_bytes)).collect();
    let mut server = Server {
        frames: frames.ok_or(FabricBenchError::Memory)?,
        waiting: Deficit::default(),
        getting: Slots::default(),
        ahead,
        sink,
        block_bytes: part.block_bytes,
        tally: Tally::default(),
        waited: std::time::Duration::ZERO,
        failed: None,
    };
    let orders = take_orders(reactor.waker());
    tell(&Told::Ready(bound));
    server.run(&mut fabric, &mut reactor, &orders)
}

impl Server {
    fn run(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        orders: &Receiver<Order>,
    ) -> Result<(), FabricBenchError> {
        let (mut turns, mut stretch) = (Turns::default(), Stretch::begin());
        loop {
            self.feed(fabric, reactor);
            fabric.flush(reactor, self);
            for completion in turns.next(reactor, true)? {
                if completion.token == Token::WAKE {
                    fabric.woken(reactor, self);
                    while let Ok(Order::Mark) = orders.try_recv() {
                        let mut tally = std::mem::take(&mut self.tally);
                        (tally.seconds, tally.cpu_seconds) = stretch.next();
                        let waited = std::mem::take(&mut self.waited);
                        tally.wait_mean_us = waited.as_secs_f64() * 1e6 / tally.waits.max(1) as f64;
                        tell(&Told::Tally(Box::new(tally)));
                    }
                } else {
                    fabric.handle(reactor, completion, self);
                }
            }
            if let Some(error) = self.failed.take() {
                return Err(error);
            }
        }
    }

    /// Gets blocks, as long as there are frames.
    fn feed(&mut self, fabric: &mut Fabric, reactor: &mut Reactor) {
        while let Some((flow, asked)) = self.waiting.front().map(|(flow, asked)| (flow, *asked)) {
            let Some(frame) = self.frames.pop_if(|_| self.getting.len() < self.ahead) else { return };
            self.waiting.take(flow);
            self.waiting.charge(flow, self.block_bytes as u64);
            let waited = reactor.now().since(asked.since);
            self.tally.waits += 1;
            self.waited += waited;
            let context = self.getting.insert(asked);
            let from = Remote { window: asked.window, offset: 0 };
            if let Err(frame) = fabric.get(reactor, asked.session, from, frame, context.to_u64()) {
                // The session has ended.
                self.getting.remove(context);
                self.frames.push(frame);
            }
        }
    }
}

impl Handler for Server {
    fn can_go_on(&self, _reactor: &Reactor) -> bool {
        !self.waiting.is_empty() && !self.frames.is_empty() && self.getting.len() < self.ahead
    }

    fn up(&mut self, _fabric: &mut Fabric, _reactor: &mut Reactor, _session: SessionId) {}

    fn message(
        &mut self,
        _fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: SessionId,
        _: Kind,
        header: &Header,
        _payload: &[u8],
    ) {
        let body: CallBody = header.body();
        let argument = |at: usize| body.arguments[at * 8..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let asked = Asked {
            session,
            call: call_number(body.call),
            window: WindowKey(header.window.get()),
            client: argument(0),
            sequence: argument(1),
            since: reactor.now(),
        };
        self.waiting.push(session.index as usize, asked);
    }

    fn placed(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, _: Kind, _: &Header) {}

    fn got(&mut self, fabric: &mut Fabric, _reactor: &mut Reactor, session: SessionId, get: EndedGet) {
        let Some(asked) = self.getting.remove(Slot::from_u64(get.context)) else { return };
        match get.result.and(get.frame.as_ref().ok_or(GetError::GivenUp)) {
            Ok(frame) => match self.sink.take(&frame.bytes()[..self.block_bytes], asked.client, asked.sequence) {
                Ok(true) => {
                    self.tally.blocks.resize(1, 0);
                    self.tally.blocks[0] += 1;
                    let mut reply = ReplyBody::new_zeroed();
                    reply.call.set(asked.call);
                    fabric.send(session, Header::with_body(Kind::Reply, &reply));
                }
                Ok(false) => self.failed = Some(FabricBenchError::Damaged(asked.client, asked.sequence)),
                Err(error) => self.failed = Some(FabricBenchError::Store(error)),
            },
            Err(GetError::Ended) => {}
            Err(error) => self.failed = Some(FabricBenchError::Failed(error.to_string())),
        }
        self.frames.extend(get.frame);
    }

    fn down(&mut self, _fabric: &mut Fabric, _reactor: &mut Reactor, session: SessionId, _reason: CloseReason) {
        self.waiting.leave(session.index as usize);
    }

    fn drained(&mut self, fabric: &mut Fabric, _reactor: &mut Reactor, session: SessionId) {
        fabric.release(session);
    }
}

/// The sessions of a process's clients.
struct Writers {
    clients: Clients,
    /// By client: its session and the window of the block that is under way.
    sessions: Vec<(SessionId, Option<WindowKey>)>,
    /// By the index of a session's slot: the client.
    by_slot: Vec<usize>,
    up: usize,
    failed: Option<FabricBenchError>,
}

/// Writes until the parent has seen enough.
pub(super) fn write(part: &Part, first: usize) -> Result<(), FabricBenchError> {
    let mut reactor = part.reactor(part.clients * 2 * LANE_BYTES + (32 << 20))?;
    let mut fabric = Fabric::new(options());
    let clients = Clients::new(part, first)?;
    if part.wire == Wire::Shm {
        fabric.lend(clients.pool().clone());
    }
    let mut writers = Writers { clients, sessions: Vec::new(), by_slot: Vec::new(), up: 0, failed: None };
    let orders = take_orders(reactor.waker());
    let mut turns = Turns::default();
    let address = part.address()?;
    let mut ready = false;
    loop {
        writers.connect(&mut fabric, &mut reactor, &address);
        if writers.up == writers.clients.count() && !std::mem::replace(&mut ready, true) {
            tell(&Told::Ready(String::new()));
        }
        fabric.flush(&mut reactor, &mut writers);
        for completion in turns.next(&mut reactor, true)? {
            if completion.token == Token::WAKE {
                fabric.woken(&mut reactor, &mut writers);
                while let Ok(order) = orders.try_recv() {
                    match order {
                        Order::Begin => {
                            (0..writers.sessions.len()).for_each(|client| writers.ask(&mut fabric, &reactor, client));
                        }
                        Order::Mark => tell(&Told::Tally(Box::new(writers.clients.mark()))),
                    }
                }
            } else {
                fabric.handle(&mut reactor, completion, &mut writers);
            }
        }
        if let Some(error) = writers.failed.take() {
            return Err(error);
        }
    }
}

impl Writers {
    /// Begins the next sessions.
    fn connect(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, address: &Address) {
        while self.sessions.len() < self.clients.count() && self.sessions.len() - self.up < CONNECTING_MAX {
            let mut id = [0; 16];
            id[..8].copy_from_slice(&self.clients.number(self.sessions.len()).to_le_bytes());
            id[8] = 1;
            let identity = Identity { client: ClientId(id), number: 1, nonce: id };
            let session = fabric.connect(reactor, address.clone(), identity);
            let index = session.index as usize;
            if self.by_slot.len() <= index {
                self.by_slot.resize(index + 1, usize::MAX);
            }
            self.by_slot[index] = self.sessions.len();
            self.sessions.push((session, None));
        }
    }

    /// Begins a client's next block.
    fn ask(&mut self, fabric: &mut Fabric, reactor: &Reactor, client: usize) {
        let (session, block_bytes) = (self.sessions[client].0, self.clients.block_bytes());
        let begun = self.clients.begin(client, reactor.now()).and_then(|(frame, sequence)| {
            let window = fabric
                .open_source(session, FrameRange::new(frame, 0, block_bytes), 0)
                .map_err(|_| FabricBenchError::Memory)?;
            Ok((window, sequence))
        });
        let (window, sequence) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                self.failed = Some(error);
                return;
            }
        };
        self.sessions[client].1 = Some(window);
        let mut body = CallBody::new_zeroed();
        body.arguments[..8].copy_from_slice(&self.clients.number(client).to_le_bytes());
        body.arguments[8..16].copy_from_slice(&sequence.to_le_bytes());
        let mut header = Header::with_body(Kind::Call, &body);
        header.window.set(window.0);
        fabric.send(session, header);
    }
}

impl Handler for Writers {
    fn up(&mut self, _fabric: &mut Fabric, _reactor: &mut Reactor, _session: SessionId) {
        self.up += 1;
    }

    fn message(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: SessionId,
        _kind: Kind,
        _header: &Header,
        _payload: &[u8],
    ) {
        let client = self.by_slot[session.index as usize];
        if let Some(window) = self.sessions[client].1.take() {
            fabric.windows().close(window);
            self.clients.end(client, Ended::Taken, reactor.now());
            self.ask(fabric, reactor, client);
        }
    }

    fn placed(&mut self, _: &mut Fabric, _: &mut Reactor, _: SessionId, _: Kind, _: &Header) {}

    fn down(&mut self, _fabric: &mut Fabric, _reactor: &mut Reactor, _session: SessionId, reason: CloseReason) {
        self.failed = Some(FabricBenchError::Failed(reason.to_string()));
    }

    fn drained(&mut self, fabric: &mut Fabric, _reactor: &mut Reactor, session: SessionId) {
        fabric.release(session);
    }
}
