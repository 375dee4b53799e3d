//! Recognises byway's own protocol behind an `nbd://` address.
//!
//! An NBD server speaks first. On byway's own protocol the client does, so a client of the wrong wire and its server would
//! wait for each other. A client that hears nothing for a while asks on a second connection, while it goes on waiting on
//! the first one: a server that is only slow is not disturbed there.

use byway_fabric::session::{self, Identity};
use byway_fabric::wire::{HEADER_BYTES, Header, Kind, Refuse, Welcome};
use byway_fabric::{ClientId, PayloadChecksum, Terms};
use byway_reactor::{Address, Errno as OsError, Gather, Op, Outcome, Reactor, Scatter, Socket, Token};
use zerocopy::IntoBytes;

/// See the module.
pub(super) struct Probe {
    token: Token,
    socket: Option<Socket>,
    /// The one operation of the loop that has not completed.
    busy: bool,
    is_done: bool,
}

impl Probe {
    /// Connects; what happens comes as completions of `token`'s class and index.
    pub(super) fn open(reactor: &mut Reactor, to: Address, token: Token) -> Self {
        reactor.submit(Op::Connect { to }, token);
        Self { token, socket: None, busy: true, is_done: false }
    }

    /// Whether nothing is in flight and nothing will be.
    pub(super) fn is_closed(&self) -> bool {
        self.is_done && !self.busy
    }

    /// Takes a completion. True: the server speaks byway's own protocol.
    pub(super) fn handle(&mut self, reactor: &mut Reactor, outcome: Outcome) -> bool {
        self.busy = false;
        let next = match outcome {
            Outcome::Connected(result) => {
                self.socket = result.ok();
                self.socket.map(|socket| Op::Send { socket, gather: question() })
            }
            Outcome::Sent { result: Ok(_), .. } => self.receive(reactor),
            Outcome::Received { into, result } => {
                let speaks_byway = !self.is_done && is_answer(into, result);
                self.shut(reactor);
                return speaks_byway;
            }
            _ => None,
        };
        match next {
            Some(next) if !self.is_done => {
                self.busy = true;
                reactor.submit(next, self.token);
            }
            _ => self.shut(reactor),
        }
        false
    }

    fn receive(&self, reactor: &Reactor) -> Option<Op> {
        let frame = reactor.frames().alloc(HEADER_BYTES)?;
        Some(Op::Recv { socket: self.socket?, into: Scatter::one(frame, 0, HEADER_BYTES), min: HEADER_BYTES })
    }

    /// Ends it.
    pub(super) fn shut(&mut self, reactor: &mut Reactor) {
        self.is_done = true;
        match self.socket.take() {
            Some(socket) => reactor.close(socket),
            None if self.busy => reactor.cancel(self.token),
            None => {}
        }
    }
}

/// The `Hello` of a further lane of a session that does not exist: the server answers `Refuse` and keeps nothing.
fn question() -> Gather {
    let identity = Identity { client: ClientId([0; 16]), number: 0, nonce: [0; 16] };
    let terms = Terms { checksum: PayloadChecksum::Off, bulk_lanes: 1 };
    let mut hello = session::hello(&identity, &terms, 1);
    hello.seal(0);
    let mut gather = Gather::new();
    gather.push_head(hello.as_bytes());
    gather
}

fn is_answer(mut into: Scatter, result: Result<usize, OsError>) -> bool {
    let Some(piece) = into.drain().next().filter(|_| result == Ok(HEADER_BYTES)) else { return false };
    let answer = piece.frame.bytes().first_chunk().and_then(|bytes| Header::open(bytes, 0).ok());
    answer.is_some_and(|(header, kind)| match kind {
        Kind::Refuse => header.body::<Refuse>().magic == byway_fabric::wire::MAGIC,
        Kind::Welcome => header.body::<Welcome>().magic == byway_fabric::wire::MAGIC,
        _ => false,
    })
}
