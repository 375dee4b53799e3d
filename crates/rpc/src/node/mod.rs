//! Calls for programs: on a [`Node`], from any thread, with its operations and its ways of waiting.
//!
//! [`Rpc::call`] is an operation that ends with the answer. A server takes calls with [`Rpc::next_call`]; each comes with a
//! [`Token`], the right to answer it. Before it answers, the server reads from and writes to the windows that the call names,
//! in any order, with the node's own gets and puts. Or it [delegates](Token::delegate) the call to a third node with a
//! continuation, which has all that the third node needs to continue. That node answers the caller over their own session if
//! they have one, otherwise through the server.
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
//!     // Until the client has gone: a node sends only while a thread drives it.
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
mod waiting;

use std::collections::VecDeque;
use std::sync::{Arc, MutexGuard};

use byway_fabric::node::lock::Lock;
use byway_fabric::node::{
    DESCRIPTOR_BYTES, Deadline, Descriptor, Layer, Node, NodeOptions, Op, OpError, OpId, Outcome, Session, SubmitError,
};
use byway_fabric::random::Random;
use byway_fabric::{Slots, limits::SMALL_BYTES_MAX};
use byway_reactor::{Instant, Reactor};

use self::layer::RpcLayer;
pub use self::server::{Request, Token};
use self::waiting::{WaitingCall, WaitingCalls};
use crate::limits::{CALLS_MAX, PROGRAM_CALLS, WINDOWS_PER_CALL_MAX};
use crate::message::{Inline, NodeId};
use crate::protocol::CALLS_VOLUMES;
pub use crate::protocol::{PROGRAM, VOLUMES};
use crate::session::{Ask, CallCounters, CallRef, Calls, CannotSend, Grant, Incomer, Outbound, Spoken, Versions};

/// A caller's request.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The protocol: [`PROGRAM`], [`VOLUMES`], or another that the node was opened for ([`Rpc::open_for`]).
    pub protocol: u8,
    /// The method.
    pub method: u16,
    /// At most 64 bytes.
    pub arguments: &'a [u8],
    /// Windows that are open for the server's session; at most 64.
    pub windows: &'a [Descriptor],
    /// More bytes. With the windows at most 16 KiB.
    pub payload: &'a [u8],
}

impl Default for Call<'_> {
    fn default() -> Self {
        Self { protocol: PROGRAM, method: 0, arguments: &[], windows: &[], payload: &[] }
    }
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The session that the answer came over.
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

/// A node's counters of its calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RpcCounters {
    /// The call protocol's counters.
    pub protocol: CallCounters,
    /// Calls that have not ended, waiting ones included.
    pub calls: usize,
}

/// A call that came and that no thread has taken.
#[derive(Debug)]
struct Arrived {
    call: CallRef,
    protocol: u8,
    method: u16,
    arguments: Inline,
    windows: Vec<Descriptor>,
    payload: Vec<u8>,
    delegated: bool,
    deadline: Instant,
}

/// What threads and the layer share. Locked after the node's engine and before its tables, so never while the node is asked for
/// anything that may turn its loop.
struct Tables {
    calls: Calls<OpId>,
    /// Calls of this node that wait for credit.
    waiting: WaitingCalls,
    /// Operations of calls that were sent and have not ended.
    in_flight: usize,
    queue: VecDeque<Arrived>,
    takers: VecDeque<OpId>,
    /// Calls that were given to an operation, until its thread has taken them.
    given: Slots<Arrived>,
}

/// A node that makes and serves calls. A handle; threads share it.
#[derive(Clone)]
pub struct Rpc {
    node: Node,
    id: NodeId,
    tables: Arc<Lock<Tables>>,
}

impl Rpc {
    /// Opens a node that calls and serves [`PROGRAM`], and calls servers of [`VOLUMES`].
    ///
    /// # Errors
    /// As for [`Node::open`].
    pub fn open(options: &NodeOptions) -> std::io::Result<Self> {
        let grant = Grant { calls: PROGRAM_CALLS, notices: 0 };
        let program = Spoken { protocol: PROGRAM, versions: Versions::only(1), grant: Some(grant) };
        Self::open_for(options, vec![program, CALLS_VOLUMES])
    }

    /// Opens a node that speaks these protocols. It grants calls alone: programs cannot take notices yet.
    ///
    /// # Errors
    /// As for [`Node::open`]; `InvalidInput` if notices are granted.
    pub fn open_for(options: &NodeOptions, spoken: Vec<Spoken>) -> std::io::Result<Self> {
        let id = Random::from_kernel().bytes16();
        Self::new(id, spoken, |layer| Node::open_with(options, layer))
    }

    /// As [`Rpc::open_for`], on a simulated loop: see [`Node::over`].
    ///
    /// # Errors
    /// As for [`Rpc::open_for`].
    #[doc(hidden)]
    pub fn over(reactor: Reactor, options: &NodeOptions, spoken: Vec<Spoken>, seed: u64) -> std::io::Result<Self> {
        let mut random = Random::from_seed(seed);
        let id = random.bytes16();
        Self::new(id, spoken, |layer| Node::over(reactor, options, Some(layer), random.next_u64()))
    }

    fn new(
        id: NodeId,
        spoken: Vec<Spoken>,
        open: impl FnOnce(Box<dyn Layer>) -> std::io::Result<Node>,
    ) -> std::io::Result<Self> {
        if spoken.iter().filter_map(|one| one.grant).any(|grant| grant.notices > 0) {
            let why = "a program's node takes no notices: grant 0 of them";
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, why));
        }
        let tables = Arc::new(Lock::new(Tables {
            calls: Calls::new(id, spoken),
            waiting: WaitingCalls::default(),
            in_flight: 0,
            queue: VecDeque::new(),
            takers: VecDeque::new(),
            given: Slots::default(),
        }));
        let layer = Box::new(RpcLayer::new(Arc::clone(&tables)));
        Ok(Self { node: open(layer)?, id, tables })
    }

    /// The node, for sessions, memory, and messages of the program's own.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// The name of this node: random, for as long as it lives.
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// The name that the node at the other end of a session claims. Nothing proves it, so it gives no rights.
    pub fn node_of(&self, session: Session) -> Option<NodeId> {
        self.tables().calls.node_of(session.into())
    }

    /// A session with a node: the first on which it claimed that name, and another when that has ended. For a directory that knows
    /// which node has something and [delegates](Token::delegate) to it.
    pub fn session_with(&self, node: &NodeId) -> Option<Session> {
        self.tables().calls.session_with(node).map(Session::from)
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock()
    }

    /// The node's counters of its calls.
    ///
    /// # Errors
    /// `Forked`: in a child of the process that opened the node. `Panicked`.
    pub fn counters(&self) -> Result<RpcCounters, SubmitError> {
        // Whose news these are is told by `progress`.
        self.node.turn().map_err(|error| match error {
            byway_fabric::node::WaitError::Panicked => SubmitError::Panicked,
            _ => SubmitError::Forked,
        })?;
        let tables = self.tables();
        Ok(RpcCounters { protocol: tables.calls.counters(), calls: tables.in_flight + tables.waiting.len() })
    }

    /// Calls. The operation brings the answer ([`Reply::of`]), `Deadline`, or [`OpError::Status`]: the server's, or
    /// [`Status::UnknownProtocol`](crate::message::Status) or [`Status::Version`](crate::message::Status) if the peer does not
    /// serve the protocol, or only other versions of it. [`Op::cancel`] ends the operation at once and tells the server.
    ///
    /// # Errors
    /// `TooLong`; `Busy` if too many calls wait for credit; `NotSpoken`; the session is gone.
    pub fn call(&self, session: Session, call: &Call<'_>, deadline: impl Into<Deadline>) -> Result<Op, SubmitError> {
        let at = deadline.into().left().map_or(Instant::FAR, |left| self.node.now() + left);
        self.call_by(session, call, at)
    }

    /// As [`Rpc::call`], with a deadline on the loop's clock ([`Node::now`]), which in a simulation is not the machine's.
    ///
    /// # Errors
    /// As there.
    #[doc(hidden)]
    pub fn call_by(&self, session: Session, call: &Call<'_>, at: Instant) -> Result<Op, SubmitError> {
        let arguments = Inline::new(call.arguments).ok_or(SubmitError::TooLong)?;
        let payload = pack(call.windows, call.payload, 0)?;
        let (protocol, method, windows) = (call.protocol, call.method, call.windows.len() as u8);
        let waiting = WaitingCall { op: None, protocol, method, windows, arguments, payload, deadline: at };
        self.begin(session, waiting)
    }

    fn begin(&self, session: Session, mut call: WaitingCall) -> Result<Op, SubmitError> {
        let alarm = Some(call.deadline).filter(|at| *at < Instant::FAR);
        let mut tables = self.tables();
        if tables.in_flight + tables.waiting.len() >= CALLS_MAX {
            return Err(SubmitError::Busy);
        }
        if !tables.calls.speaks(call.protocol) {
            return Err(SubmitError::NotSpoken);
        }
        let op = self.node.layer_op()?;
        call.op = Some(op.id());
        let ask = call.ask();
        let began = if tables.waiting.has((session.into(), call.protocol)) {
            Err(CannotSend::NoCredit)
        } else {
            let now = self.node.now();
            tables.calls.call(session.into(), &ask, op.id(), now, call.deadline).map_err(|(_, error)| error)
        };
        let refused = match began {
            Ok((id, header)) => {
                tables.in_flight += 1;
                drop(tables);
                match self.node.layer_send(session, header, call.payload, alarm) {
                    Ok(()) => return Ok(op),
                    Err(error) => {
                        let mut tables = self.tables();
                        if tables.calls.cancel(id).is_some() {
                            tables.in_flight -= 1;
                        }
                        error
                    }
                }
            }
            Err(error) => {
                let waits = error == CannotSend::NoCredit && tables.waiting.push(session.into(), call).is_ok();
                drop(tables);
                match error {
                    CannotSend::NoCredit if waits => {
                        alarm.map_or(Ok(()), |at| self.node.set_layer_alarm(at))?;
                        return Ok(op);
                    }
                    CannotSend::NoCredit => SubmitError::Busy,
                    // As where the peer's list of protocols has not come yet, and the call waits for it.
                    CannotSend::NotServed(status) => {
                        self.node.complete(op.id(), Err(OpError::Status(status as u16)))?;
                        return Ok(op);
                    }
                    CannotSend::Ended => self.node.session_error(session),
                }
            }
        };
        // No other code ends it, and only ended calls are forgotten. The tables are free: this may drive the loop.
        self.node.complete(op.id(), Err(OpError::Cancelled))?;
        Err(refused)
    }

    /// Sends what the call protocol has to say.
    fn send_all(&self, outbox: Vec<Outbound>) {
        for out in outbox {
            // What a session's peer was to hear it needs no more.
            let _ = self.node.layer_send(out.session.into(), out.header, out.payload, None);
        }
    }
}

/// The payload of a call, behind `before` bytes of something else: windows, and more.
fn pack(windows: &[Descriptor], payload: &[u8], before: usize) -> Result<Vec<u8>, SubmitError> {
    let len = windows.len() * DESCRIPTOR_BYTES + payload.len();
    if windows.len() > WINDOWS_PER_CALL_MAX || before + len > SMALL_BYTES_MAX {
        return Err(SubmitError::TooLong);
    }
    let mut packed = Vec::with_capacity(len);
    for window in windows {
        packed.extend(window.to_bytes());
    }
    packed.extend_from_slice(payload);
    Ok(packed)
}

fn descriptors(windows: &[u8]) -> Vec<Descriptor> {
    windows.as_chunks::<DESCRIPTOR_BYTES>().0.iter().map(Descriptor::from_bytes).collect()
}

impl Arrived {
    fn new(call: CallRef, incomer: &Incomer<'_>, now: Instant) -> Self {
        Self {
            call,
            protocol: incomer.protocol,
            method: incomer.method,
            arguments: incomer.arguments,
            windows: descriptors(incomer.windows),
            payload: incomer.payload.to_vec(),
            delegated: incomer.delegated,
            deadline: incomer.deadline.map_or(Instant::FAR, |left| now + left),
        }
    }
}

impl WaitingCall {
    fn ask(&self) -> Ask<'_> {
        Ask { protocol: self.protocol, method: self.method, arguments: &self.arguments, windows: self.windows }
    }
}
