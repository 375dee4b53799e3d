//! Calls for programs: on a [`Node`], from any thread, with its operations and its ways of waiting.
//!
//! [`Rpc::call`] is an operation whose end is the answer. A server takes calls with [`Rpc::next_call`]; each comes with a
//! [`Token`], the right to answer it. Until it answers, the server reads from and writes to the windows that the call
//! names, in any order, with the node's own gets and puts. Or it hands the token on ([`Token::delegate`]) with a continuation, what
//! is to be known to carry on: the third node answers the caller directly, over its own session with it if there is one, else through
//! the server. The caller's continuation is the context with which it adds the call to a [`Group`](byway_fabric::node::Group).
//!
//! ```
//! use byway_fabric::node::{Deadline, NodeOptions, parse_address};
//! use byway_rpc::node::{Call, Reply, Rpc};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let soon = Deadline::after(std::time::Duration::from_secs(10));
//! let server = Rpc::open(&NodeOptions::default())?;
//! let at = server.node().listen(&parse_address("tcp://127.0.0.1:0")?)?.ok_or("no port")?;
//! std::thread::spawn(move || -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//!     let request = server.next_call(Deadline::NEVER)?;
//!     let sum = request.arguments.iter().sum::<u8>();
//!     request.token.reply(0, &[sum], b"with regards")?;
//!     // Until the client has gone: who does not wait does not send.
//!     let _ = server.next_call(std::time::Duration::from_secs(10));
//!     Ok(())
//! });
//! let client = Rpc::open(&NodeOptions::default())?;
//! let session = client.node().connect(&parse_address(&format!("tcp://{at}"))?, soon)?;
//! let call = client.call(session, &Call { method: 1, arguments: &[1, 2, 3], ..Call::default() }, soon)?;
//! let reply = Reply::of(call.wait(soon)??)?;
//! assert_eq!((&reply.result[..], &reply.payload[..]), (&[6][..], &b"with regards"[..]));
//! # Ok(())
//! # }
//! ```

mod layer;
mod server;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use byway_fabric::node::{
    Class, DESCRIPTOR_BYTES, Deadline, Descriptor, Node, NodeOptions, Op, OpError, OpId, Outcome, Session, SubmitError,
};
use byway_fabric::random::Random;
use byway_fabric::{Slots, limits::SMALL_BYTES_MAX};
use byway_reactor::Instant;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromZeros, IntoBytes};

use self::layer::RpcLayer;
pub use self::server::{Request, Token};
use crate::limits::{CALLS_MAX, INLINE_BYTES, WINDOWS_PER_CALL_MAX};
use crate::token::{Head, Kind, NodeId, PendingCalls, Relays, TokenName};

/// Status of a call whose token was dropped: the server's program gave it up. Or it was handed on to a node whose session ended before
/// the call was sent there.
pub const ABANDONED: u16 = 0xffff;
/// Status of a call for which the server has no room: try again later.
pub const BUSY: u16 = 0xfffe;

/// What a caller asks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Call<'a> {
    /// What to do.
    pub method: u16,
    /// At most 64 bytes.
    pub arguments: &'a [u8],
    /// Windows for the server, opened for its session; at most 64.
    pub windows: &'a [Descriptor],
    /// More bytes. With the windows and arguments at most 16 KiB.
    pub payload: &'a [u8],
}

/// What the server, or who answered for it, says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Over which session the answer came.
    pub session: Session,
    /// At most 64 bytes.
    pub result: Vec<u8>,
    /// More bytes.
    pub payload: Vec<u8>,
}

impl Reply {
    /// The reply in a call's outcome.
    ///
    /// # Errors
    /// `WrongAnswer`: the outcome is another operation's.
    pub fn of(outcome: Outcome) -> Result<Self, OpError> {
        match outcome {
            Outcome::Message(message) => {
                Ok(Self { session: message.session, result: message.header, payload: message.payload })
            }
            _ => Err(OpError::WrongAnswer),
        }
    }
}

/// What has come and gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RpcCounters {
    /// Answers to calls that had ended: late, repeated, or after a cancellation.
    pub late: u64,
    /// Answers with a wrong secret.
    pub forged: u64,
    /// Answers that were passed on for a node that has no session with the caller.
    pub relayed: u64,
    /// Calls that were handed on.
    pub delegated: u64,
    /// Calls in flight.
    pub calls: usize,
}

/// A call that came and was not taken.
struct Waiting {
    session: Session,
    head: Head,
    payload: Vec<u8>,
    deadline: Instant,
}

/// What threads and the layer share. Locked after the node's engine and before its tables, so never while the node is asked for
/// anything that may turn its loop.
#[derive(Default)]
struct Tables {
    id: NodeId,
    pending: PendingCalls<Session, OpId>,
    peers: HashMap<NodeId, Session>,
    names: HashMap<Session, NodeId>,
    queue: VecDeque<Waiting>,
    takers: VecDeque<OpId>,
    /// Calls that were given to an operation, until its thread has taken them.
    given: Slots<Waiting>,
    /// Calls that the program has and has not answered: true if the caller has cancelled.
    held: HashMap<TokenName, bool>,
    relays: Relays<Session>,
    counters: RpcCounters,
}

impl Tables {
    /// How an answer gets nearer to the caller: to himself, over `way` or another session with him; else to whoever is before us on
    /// `way`, the way that the call came.
    fn next_step(&self, token: &TokenName, way: Session) -> (Session, Kind) {
        if self.names.get(&way) == Some(&token.caller) {
            return (way, Kind::Reply);
        }
        self.peers.get(&token.caller).map_or((way, Kind::Relay), |caller| (*caller, Kind::Reply))
    }

    /// How an answer that somebody else gave goes on: back on `way`, while that is there. Anybody can say that he is the caller;
    /// whoever handed the call to us had it from him, or from somebody nearer to him.
    fn way_back(&self, token: &TokenName, way: Session) -> (Session, Kind) {
        let is_callers = self.names.get(&way) == Some(&token.caller);
        match (self.names.contains_key(&way), is_callers) {
            (true, false) => (way, Kind::Relay),
            _ => self.next_step(token, way),
        }
    }
}

/// A node that makes and serves calls. A handle; threads share it.
#[derive(Clone)]
pub struct Rpc {
    node: Node,
    tables: Arc<Mutex<Tables>>,
    random: Arc<Mutex<Random>>,
}

impl Rpc {
    /// Opens a node for calls.
    ///
    /// # Errors
    /// As for [`Node::open`].
    pub fn open(options: &NodeOptions) -> std::io::Result<Self> {
        let mut random = Random::from_kernel();
        let id: NodeId = zerocopy::transmute!([random.next_u64(), random.next_u64()]);
        let tables = Arc::new(Mutex::new(Tables { id, ..Tables::default() }));
        let layer = Box::new(RpcLayer::new(Arc::clone(&tables)));
        let node = Node::open_with(options, layer)?;
        Ok(Self { node, tables, random: Arc::new(Mutex::new(random)) })
    }

    /// The node, for sessions, memory, and messages of the program's own.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// What this node is called by its peers: random, for as long as it lives.
    pub fn id(&self) -> NodeId {
        self.tables().id
    }

    /// What the node at the other end of a session calls itself: it tells with its first message. Anybody can claim any name, so
    /// it says nothing of who may do what.
    pub fn node_of(&self, session: Session) -> Option<NodeId> {
        self.tables().names.get(&session).copied()
    }

    /// A session with a node: the first one that it said its name on, and another when that has ended. For a directory that knows who
    /// has something and [hands a call on](Token::delegate).
    pub fn session_with(&self, node: &NodeId) -> Option<Session> {
        self.tables().peers.get(node).copied()
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        lock(&self.tables)
    }

    /// What has come and gone.
    ///
    /// # Errors
    /// `Forked`: in a child of the process that opened the node.
    pub fn counters(&self) -> Result<RpcCounters, SubmitError> {
        // Whose news these are is told by `progress`.
        self.node.turn().map_err(|_| SubmitError::Forked)?;
        let tables = self.tables();
        Ok(RpcCounters { calls: tables.pending.len(), ..tables.counters })
    }

    /// Calls. The operation brings the answer ([`Reply::of`]), or [`OpError::Status`] with what the server says, or `Deadline`. It is
    /// cancelled by [`Op::cancel`], which the server is told.
    ///
    /// # Errors
    /// `TooLong`, `Busy`, or the session is gone.
    pub fn call(&self, session: Session, call: &Call<'_>, deadline: impl Into<Deadline>) -> Result<Op, SubmitError> {
        let payload = pack(call.windows, call.arguments, call.payload)?;
        let deadline = deadline.into();
        let secret = lock(&self.random).next_u64();
        let (op, token, left_ms, alarm) = {
            let mut tables = self.tables();
            if tables.pending.len() >= CALLS_MAX {
                return Err(SubmitError::Busy);
            }
            let op = self.node.layer_op()?;
            let left = deadline.left();
            let at = left.map_or(Instant::FAR, |left| self.node.now() + left);
            let number = tables.pending.start(secret, session, at, op.id());
            let token = TokenName { caller: tables.id, call: U64::new(number), secret: U64::new(secret) };
            let left_ms = left.map_or(0, |left| u32::try_from(left.as_millis()).unwrap_or(u32::MAX).max(1));
            (op, token, left_ms, left.map(|_| at))
        };
        let mut head = head(Kind::Call, token);
        head.method = U16::new(call.method);
        head.windows = call.windows.len() as u8;
        head.inline = call.arguments.len() as u8;
        head.left_ms = U32::new(left_ms);
        if let Err(error) = self.node.layer_send(session, Class::Layer, head.as_bytes(), &payload) {
            let _ = self.tables().pending.answered(&token);
            // Nobody else will end it, and only what has ended is forgotten.
            self.node.complete(op.id(), Err(OpError::Cancelled))?;
            return Err(error);
        }
        if let Some(at) = alarm {
            self.node.set_layer_alarm(at)?;
        }
        Ok(op)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code under these locks leaves a table half changed by a panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn head(kind: Kind, token: TokenName) -> Head {
    let mut head = Head::new_zeroed();
    head.kind = kind as u8;
    head.token = token;
    head
}

/// The payload of a call: windows, arguments, more.
fn pack(windows: &[Descriptor], inline: &[u8], payload: &[u8]) -> Result<Vec<u8>, SubmitError> {
    let len = windows.len() * DESCRIPTOR_BYTES + inline.len() + payload.len();
    if windows.len() > WINDOWS_PER_CALL_MAX || inline.len() > INLINE_BYTES || len > SMALL_BYTES_MAX {
        return Err(SubmitError::TooLong);
    }
    let mut packed = Vec::with_capacity(len);
    for window in windows {
        packed.extend(window.to_bytes());
    }
    packed.extend_from_slice(inline);
    packed.extend_from_slice(payload);
    Ok(packed)
}

/// The windows, the arguments and the rest of a payload; `None` if it has not so many.
fn unpack<'a>(head: &Head, payload: &'a [u8]) -> Option<(Vec<Descriptor>, &'a [u8], &'a [u8])> {
    let (windows, rest) = payload.split_at_checked(usize::from(head.windows) * DESCRIPTOR_BYTES)?;
    let (inline, rest) = rest.split_at_checked(usize::from(head.inline))?;
    let windows = windows.chunks_exact(DESCRIPTOR_BYTES).filter_map(<[u8]>::first_chunk).map(Descriptor::from_bytes);
    (usize::from(head.windows) <= WINDOWS_PER_CALL_MAX && inline.len() <= INLINE_BYTES)
        .then(|| (windows.collect(), inline, rest))
}
