//! The naive transfer, used in this benchmark only: a client sends the whole payload without a request, as GM does. A receiver
//! without a free frame reads the payload, discards it and says so; the sender repeats it after a pause that doubles.
//!
//! The server receives before it processes, like a network card with a processor of its own. Otherwise the kernel's socket
//! buffers, which GM does not have, would serve as additional frames.

use std::collections::VecDeque;
use std::sync::mpsc::Receiver;

use byway_reactor::{Address, Completion, Frame, FramePool, Gather, Op, Outcome, Reactor, Scatter, Socket, Token};

use super::FabricBenchError;
use super::clients::{Clients, Ended};
use super::part::{Order, Part, Stretch, Tally, Told, take_orders, tell};
use super::sink::Sink;
use super::turns::Turns;
use crate::limits::{NAIVE_PAUSE_MAX, NAIVE_PAUSE_MIN};

const ACCEPT: u8 = 1;
const CONNECT: u8 = 2;
const RECEIVE: u8 = 3;
const SEND: u8 = 4;
const AGAIN: u8 = 5;

/// Client and number of a block, before its bytes.
const HEAD_BYTES: usize = 16;
/// Number of a block, and 1 if it was taken.
const ANSWER_BYTES: usize = 16;
/// Connections of a client.
pub(super) const CONNECTIONS_EACH: usize = 1;
/// A connection's own memory: heads, and what is thrown away.
const OWN_BYTES: usize = 16 << 10;
/// Connections that a process begins at a time.
const CONNECTING_MAX: usize = 64;

fn token(tag: u8, index: usize) -> Token {
    Token::new(0x21, tag, index as u32, 0)
}

fn number(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at * 8..).and_then(|bytes| bytes.first_chunk()).map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// What a client sends before a block.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Head {
    client: u64,
    /// The block's number among the client's.
    sequence: u64,
}

/// What a connection of the server receives.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Receiving {
    Head,
    /// The block of which this is the head, into a receive frame.
    Block(Head),
    /// The rest of the block with that number, to be thrown away.
    Waste {
        sequence: u64,
        left: usize,
    },
}

struct Connection {
    socket: Socket,
    receiving: Receiving,
    /// Its own memory, while a block is received into a receive frame.
    own: Option<Frame>,
}

/// A block that has come and is to be worked on.
struct Arrived {
    /// The connection.
    at: usize,
    head: Head,
    frame: Frame,
}

struct Server {
    frames: Vec<Frame>,
    connections: Vec<Connection>,
    arrived: VecDeque<Arrived>,
    sink: Sink,
    block_bytes: usize,
    tally: Tally,
}

/// Serves until the parent has seen enough.
pub(super) fn serve(part: &Part, frames: usize, sink: Sink) -> Result<(), FabricBenchError> {
    let mut reactor = part.reactor(part.clients * 2 * OWN_BYTES + (32 << 20))?;
    let listener = reactor.listen(&part.address()?).map_err(FabricBenchError::Loop)?;
    let bound = reactor.local_address(listener).map_or_else(|| part.address.clone(), |at| at.to_string());
    reactor.submit(Op::Accept { listener }, token(ACCEPT, 0));
    let pool = FramePool::new(frames * part.block_bytes.next_power_of_two()).map_err(FabricBenchError::Loop)?;
    let frames: Option<Vec<Frame>> = (0..frames).map(|_| pool.alloc(part.block_bytes)).collect();
    let frames = frames.ok_or(FabricBenchError::Memory)?;
    let tally = Tally::default();
    let arrived = VecDeque::new();
    let mut server = Server { frames, connections: Vec::new(), arrived, sink, block_bytes: part.block_bytes, tally };
    let orders = take_orders(reactor.waker());
    tell(&Told::Ready(bound));
    let (mut turns, mut stretch) = (Turns::default(), Stretch::begin());
    loop {
        let mut idle = true;
        for completion in turns.next(&mut reactor, server.arrived.is_empty())? {
            idle = false;
            if completion.token == Token::WAKE {
                while let Ok(Order::Mark) = orders.try_recv() {
                    let mut tally = std::mem::take(&mut server.tally);
                    (tally.seconds, tally.cpu_seconds) = stretch.next();
                    tell(&Told::Tally(Box::new(tally)));
                }
            } else {
                server.handle(&mut reactor, completion)?;
            }
        }
        if idle {
            server.work(&mut reactor)?;
        }
    }
}

impl Server {
    fn handle(&mut self, reactor: &mut Reactor, completion: Completion) -> Result<(), FabricBenchError> {
        let at = completion.token.index() as usize;
        match completion.outcome {
            Outcome::Accepted(result) => {
                let socket = result.map_err(|error| FabricBenchError::Loop(error.into()))?;
                let own = reactor.frames().alloc(OWN_BYTES).ok_or(FabricBenchError::Memory)?;
                self.connections.push(Connection { socket, receiving: Receiving::Head, own: None });
                self.receive_head(reactor, self.connections.len() - 1, own);
                Ok(())
            }
            Outcome::Received { mut into, result } => {
                let frame = into.drain().next().map(|piece| piece.frame);
                match (frame, result) {
                    (Some(frame), Ok(n)) if n > 0 => self.received(reactor, at, frame, n),
                    (frame, _) => {
                        // The client is gone, when the parent has seen enough.
                        if matches!(self.connections[at].receiving, Receiving::Block(..)) {
                            self.frames.extend(frame);
                        }
                        reactor.close(self.connections[at].socket);
                        Ok(())
                    }
                }
            }
            _ => Ok(()),
        }
    }

    fn receive_head(&mut self, reactor: &mut Reactor, at: usize, own: Frame) {
        let connection = &mut self.connections[at];
        connection.receiving = Receiving::Head;
        let (socket, into) = (connection.socket, Scatter::one(own, 0, HEAD_BYTES));
        reactor.submit(Op::Recv { socket, into, min: HEAD_BYTES }, token(RECEIVE, at));
    }

    fn received(&mut self, reactor: &mut Reactor, at: usize, frame: Frame, n: usize) -> Result<(), FabricBenchError> {
        let connection = &mut self.connections[at];
        let socket = connection.socket;
        match connection.receiving {
            Receiving::Head if n < HEAD_BYTES => Ok(()),
            Receiving::Head => {
                let head = Head { client: number(frame.bytes(), 0), sequence: number(frame.bytes(), 1) };
                if let Some(target) = self.frames.pop() {
                    connection.own = Some(frame);
                    connection.receiving = Receiving::Block(head);
                    let (into, min) = (Scatter::one(target, 0, self.block_bytes), self.block_bytes);
                    reactor.submit(Op::Recv { socket, into, min }, token(RECEIVE, at));
                } else {
                    self.waste(reactor, at, frame, head.sequence, self.block_bytes);
                }
                Ok(())
            }
            Receiving::Block(..) if n < self.block_bytes => {
                self.frames.push(frame);
                Ok(())
            }
            Receiving::Block(head) => {
                self.arrived.push_back(Arrived { at, head, frame });
                Ok(())
            }
            Receiving::Waste { sequence, left } => {
                self.tally.wasted_bytes += n as u64;
                if left > n {
                    self.waste(reactor, at, frame, sequence, left - n);
                } else {
                    self.tally.drops += 1;
                    self.answer(reactor, at, frame, sequence, false);
                }
                Ok(())
            }
        }
    }

    /// Works on the block that came first.
    fn work(&mut self, reactor: &mut Reactor) -> Result<(), FabricBenchError> {
        let Some(Arrived { at, head: Head { client, sequence }, frame }) = self.arrived.pop_front() else {
            return Ok(());
        };
        let intact = self.sink.take(&frame.bytes()[..self.block_bytes], client, sequence);
        self.frames.push(frame);
        if !intact.map_err(FabricBenchError::Store)? {
            return Err(FabricBenchError::Damaged(client, sequence));
        }
        self.tally.blocks.resize(1, 0);
        self.tally.blocks[0] += 1;
        let own = self.connections[at].own.take().ok_or(FabricBenchError::Memory)?;
        self.answer(reactor, at, own, sequence, true);
        Ok(())
    }

    fn waste(&mut self, reactor: &mut Reactor, at: usize, own: Frame, sequence: u64, left: usize) {
        let connection = &mut self.connections[at];
        connection.receiving = Receiving::Waste { sequence, left };
        let (socket, len) = (connection.socket, left.min(OWN_BYTES));
        reactor.submit(Op::Recv { socket, into: Scatter::one(own, 0, len), min: len }, token(RECEIVE, at));
    }

    fn answer(&mut self, reactor: &mut Reactor, at: usize, own: Frame, sequence: u64, taken: bool) {
        let mut gather = Gather::new();
        gather.push_head(&sequence.to_le_bytes());
        gather.push_head(&u64::from(taken).to_le_bytes());
        reactor.submit(Op::Send { socket: self.connections[at].socket, gather }, token(SEND, at));
        self.receive_head(reactor, at, own);
    }
}

/// A client's connection.
struct Writer {
    socket: Option<Socket>,
    /// Its block; shared with the send in flight.
    block: Option<std::rc::Rc<Frame>>,
    sequence: u64,
    /// A send is in flight, and whether another is due then.
    sending: bool,
    due: bool,
    /// Times that the block was dropped.
    dropped: u32,
}

struct Writers {
    clients: Clients,
    writers: Vec<Writer>,
    up: usize,
    random: u64,
}

/// Writes until the parent has seen enough.
pub(super) fn write(part: &Part, first: usize) -> Result<(), FabricBenchError> {
    let mut reactor = part.reactor(part.clients * 2 * 4096 + (32 << 20))?;
    let clients = Clients::new(part, first)?;
    let mut writers = Writers { clients, writers: Vec::new(), up: 0, random: first as u64 + 1 };
    let orders: Receiver<Order> = take_orders(reactor.waker());
    let address = part.address()?;
    let mut turns = Turns::default();
    let mut ready = false;
    loop {
        writers.connect(&mut reactor, &address)?;
        if writers.up == writers.clients.count() && !std::mem::replace(&mut ready, true) {
            tell(&Told::Ready(String::new()));
        }
        for completion in turns.next(&mut reactor, true)? {
            if completion.token != Token::WAKE {
                writers.handle(&mut reactor, completion)?;
                continue;
            }
            while let Ok(order) = orders.try_recv() {
                match order {
                    Order::Begin => {
                        for client in 0..writers.writers.len() {
                            writers.begin(&mut reactor, client)?;
                        }
                    }
                    Order::Mark => tell(&Told::Tally(Box::new(writers.clients.mark()))),
                }
            }
        }
    }
}

impl Writers {
    fn connect(&mut self, reactor: &mut Reactor, address: &Address) -> Result<(), FabricBenchError> {
        while self.writers.len() < self.clients.count() && self.writers.len() - self.up < CONNECTING_MAX {
            let writer = Writer { socket: None, block: None, sequence: 0, sending: false, due: false, dropped: 0 };
            reactor.submit(Op::Connect { to: address.clone() }, token(CONNECT, self.writers.len()));
            self.writers.push(writer);
        }
        Ok(())
    }

    fn handle(&mut self, reactor: &mut Reactor, completion: Completion) -> Result<(), FabricBenchError> {
        let client = completion.token.index() as usize;
        let lost = || FabricBenchError::Failed("the server closed a connection".to_owned());
        match completion.outcome {
            Outcome::Connected(result) => {
                let socket = result.map_err(|error| FabricBenchError::Loop(error.into()))?;
                self.writers[client].socket = Some(socket);
                self.up += 1;
                let own = reactor.frames().alloc(ANSWER_BYTES).ok_or(FabricBenchError::Memory)?;
                self.receive(reactor, client, own);
                Ok(())
            }
            Outcome::Sent { result, gather } => {
                drop(gather);
                result.map_err(|_| lost())?;
                self.writers[client].sending = false;
                if std::mem::take(&mut self.writers[client].due) {
                    self.send(reactor, client);
                }
                Ok(())
            }
            Outcome::Received { mut into, result } => {
                let frame = into.drain().next().map(|piece| piece.frame).ok_or_else(lost)?;
                if result.ok() != Some(ANSWER_BYTES) {
                    return Err(lost());
                }
                let (sequence, taken) = (number(frame.bytes(), 0), number(frame.bytes(), 1) == 1);
                self.receive(reactor, client, frame);
                if sequence != self.writers[client].sequence {
                    return Err(FabricBenchError::Talk("an answer to what was sent"));
                }
                self.answered(reactor, client, taken)
            }
            Outcome::TimedOut(_) => {
                self.send(reactor, client);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn receive(&mut self, reactor: &mut Reactor, client: usize, own: Frame) {
        let Some(socket) = self.writers[client].socket else { return };
        let into = Scatter::one(own, 0, ANSWER_BYTES);
        reactor.submit(Op::Recv { socket, into, min: ANSWER_BYTES }, token(RECEIVE, client));
    }

    fn answered(&mut self, reactor: &mut Reactor, client: usize, taken: bool) -> Result<(), FabricBenchError> {
        let now = reactor.now();
        if taken {
            self.clients.end(client, Ended::Taken, now);
            return self.begin(reactor, client);
        }
        self.clients.end(client, Ended::Dropped, now);
        let at = now + self.pause(client);
        reactor.submit(Op::Timer { at }, token(AGAIN, client));
        Ok(())
    }

    /// How long a client whose block was dropped waits: twice as long each time, and half of it by chance, so that those
    /// who were dropped together do not come together again.
    fn pause(&mut self, client: usize) -> std::time::Duration {
        let dropped = &mut self.writers[client].dropped;
        let longest = NAIVE_PAUSE_MIN.saturating_mul(1 << (*dropped).min(16)).min(NAIVE_PAUSE_MAX);
        *dropped += 1;
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let half = longest / 2;
        half + half.mul_f64((self.random >> 11) as f64 / (1_u64 << 53) as f64)
    }

    fn begin(&mut self, reactor: &mut Reactor, client: usize) -> Result<(), FabricBenchError> {
        let (block, sequence) = self.clients.begin(client, reactor.now())?;
        let writer = &mut self.writers[client];
        writer.dropped = 0;
        (writer.block, writer.sequence) = (Some(block), sequence);
        self.send(reactor, client);
        Ok(())
    }

    fn send(&mut self, reactor: &mut Reactor, client: usize) {
        let number = self.clients.number(client);
        let len = self.clients.block_bytes();
        let writer = &mut self.writers[client];
        let (Some(socket), Some(block)) = (writer.socket, &writer.block) else { return };
        // Its answer may be here before its end is.
        if std::mem::replace(&mut writer.sending, true) {
            writer.due = true;
            return;
        }
        let mut gather = Gather::new();
        gather.push_head(&number.to_le_bytes());
        gather.push_head(&writer.sequence.to_le_bytes());
        gather.push_shared(std::rc::Rc::clone(block), 0, len);
        reactor.submit(Op::Send { socket, gather }, token(SEND, client));
    }
}
