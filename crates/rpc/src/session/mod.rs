//! The call protocol: one machine for both ends of every session of a node.
//!
//! Either end of a session may call the other. A call names a protocol and a method and carries 64 bytes of arguments, a
//! list of windows and a small payload; it is answered once, with a status, 64 bytes and a payload, or
//! [delegated](Calls::delegate) to a third node, which answers the caller directly if the two have a session. A notice is a
//! call without an answer. Credit bounds the calls that a peer may have in flight, for each protocol separately, so a
//! program that takes no notices does not delay another protocol's calls.
//!
//! The machine does no I/O and has no clock. Its driver passes messages in ([`Calls::message`], [`Calls::placed`]), sends
//! the headers that it gets back, and after every call sends the contents of [`Calls::outbox`]. Its drivers are a program's
//! [node](crate::node), the server and the client of volumes, and the tests' simulation.

mod callee;
mod caller;
mod incoming;
mod outgoing;
mod protocols;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::hash::Hasher;
use std::time::Duration;

use byway_fabric::SessionId;
use byway_fabric::node::DESCRIPTOR_BYTES;
use byway_fabric::wire::{FLAG_TOKEN, Header, Kind};
use zerocopy::{FromBytes, FromZeros};

use self::incoming::Incoming;
use self::outgoing::Outgoing;
pub use self::protocols::{CannotSend, Grant, Spoken, Versions};
use self::protocols::{Protocols, entries};
use crate::limits::{PROTOCOLS_MAX, WINDOWS_PER_CALL_MAX};
use crate::message::{CallBody, CancelBody, CreditBody, Inline, NodeId, ProtocolsBody, ReplyBody, Status, Token};
use crate::seeded::{self, Bug};

/// Names a call at its callee.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallRef {
    /// The session that the call came over.
    pub session: SessionId,
    /// The call's number in that session.
    pub call: u64,
}

/// Names a call at its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallId {
    /// The session that the call went over.
    pub session: SessionId,
    /// The call's number in that session.
    pub call: u64,
}

/// A callee's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// 0 for success, below [`Status::FIRST`] the protocol's own, else a [`Status`].
    pub status: u16,
    /// Payload bytes of the whole answer.
    pub total: u32,
    /// The result.
    pub result: Inline,
}

/// The request of a call or notice.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// The protocol.
    pub protocol: u8,
    /// The method.
    pub method: u16,
    /// The arguments.
    pub arguments: &'a Inline,
    /// Windows at the start of the payload, at most 64.
    pub windows: u8,
}

/// A call or notice that came. The slices are valid while the message is handled.
#[derive(Clone, Copy, Debug)]
pub struct Incomer<'a> {
    /// The session that it came over.
    pub session: SessionId,
    /// The protocol.
    pub protocol: u8,
    /// The version of the protocol that both ends speak.
    pub version: u16,
    /// The method.
    pub method: u16,
    /// Whether another node was called and delegated the call to this one.
    pub delegated: bool,
    /// How long the caller waits from now on.
    pub deadline: Option<Duration>,
    /// The arguments.
    pub arguments: Inline,
    /// The windows, as descriptors.
    pub windows: &'a [u8],
    /// The payload.
    pub payload: &'a [u8],
}

/// The consequence of a message for the driver.
#[derive(Debug)]
pub enum Event<'a, C> {
    /// Nothing.
    None,
    /// A call to be answered.
    Called(CallRef, Incomer<'a>),
    /// A notice. The driver says by [`Calls::notice_taken`] when it needs no memory any more.
    Notified(Incomer<'a>),
    /// The caller of a call that was not answered wants no answer any more. It still must be answered.
    Cancelled(CallRef),
    /// A call of this node ended. The payload is what came with the reply.
    Ended(C, Answer, &'a [u8]),
    /// Calls or notices that [had no credit](CannotSend::NoCredit) may be tried again.
    Ready(SessionId),
}

/// The contexts of calls that ended because a session did.
#[derive(Debug)]
pub struct EndedCalls<C> {
    /// Of calls that went over it.
    pub with_session: Vec<C>,
    /// Of calls that went over another session, and whose answer was to come over this one from a third node: they end with
    /// [`Status::DelegateLost`].
    pub answer_lost: Vec<C>,
}

/// A breach of protocol by the peer: the session ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Breach {
    /// More calls or notices than it was granted.
    #[error("more calls or notices under way than granted")]
    Credit,
    /// A call with the number of one that was not answered.
    #[error("the call is in flight already")]
    Duplicate,
    /// A message of the wrong form.
    #[error("the message has a wrong form")]
    Form,
}

/// What the machine counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallCounters {
    /// Answers to calls that had ended.
    pub late: u64,
    /// Answers by token whose secret is wrong.
    pub forged: u64,
    /// Answers of third nodes that were passed on to their callers.
    pub relayed: u64,
    /// Calls that were delegated.
    pub delegated: u64,
    /// Notices of protocols that are not served here.
    pub notices_dropped: u64,
}

/// A message for the driver to send.
#[derive(Debug)]
pub struct Outbound {
    /// The session.
    pub session: SessionId,
    /// The header.
    pub header: Header,
    /// The payload, at most 16 KiB.
    pub payload: Vec<u8>,
}

/// Where an answer, or a part of one, goes: with `token` before the payload of a `Reply`, if there is one. That `Reply` takes
/// at most 16 KiB less the token, and goes into no window: what is longer goes before it as `Data`.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// The session.
    pub session: SessionId,
    /// The header of the `Reply` or `Data`.
    pub header: Header,
    /// The caller's token, where the answer goes to it directly.
    pub token: Option<Token>,
}

/// The receiver of the end of a call.
#[derive(Debug)]
enum Context<C> {
    Own(C),
    /// A call that this node delegated: the answer is owed to that caller.
    OnBehalf(CallRef),
}

impl<C> Context<C> {
    fn own(self) -> Option<C> {
        match self {
            Self::Own(context) => Some(context),
            Self::OnBehalf(_) => None,
        }
    }
}

/// The answer to a call that was delegated to a node that is gone.
const LOST: Answer = Answer { status: Status::DelegateLost as u16, total: 0, result: Inline::EMPTY };

/// The answer that is passed on for one of a third node that is too long.
const MALFORMED: Answer = Answer { status: Status::Malformed as u16, ..LOST };

#[derive(Debug)]
struct Session<C> {
    name: SessionId,
    nonce: [u8; 16],
    /// This end said first what it speaks.
    begins: bool,
    /// The peer, and its name for this session: known with its `Protocols`.
    peer: Option<(NodeId, u64)>,
    protocols: Protocols,
    outgoing: Outgoing<Context<C>>,
    incoming: Incoming,
}

/// The calls of a node.
#[derive(Debug)]
pub struct Calls<C> {
    node: NodeId,
    spoken: Vec<Spoken>,
    /// By the index of the session's slot.
    sessions: Vec<Option<Session<C>>>,
    /// Sessions by the name of the node at their other end: the first that claimed it.
    by_node: HashMap<NodeId, SessionId>,
    outbox: Vec<Outbound>,
    counters: CallCounters,
}

impl<C> Calls<C> {
    /// The calls of the node by that name, which speaks these protocols, at most
    /// [`PROTOCOLS_MAX`].
    pub fn new(node: NodeId, spoken: Vec<Spoken>) -> Self {
        Self {
            node,
            spoken,
            sessions: Vec::new(),
            by_node: HashMap::new(),
            outbox: Vec::new(),
            counters: CallCounters::default(),
        }
    }

    /// Whether this node speaks a protocol.
    pub fn speaks(&self, protocol: u8) -> bool {
        self.spoken.iter().take(PROTOCOLS_MAX).any(|one| one.protocol == protocol)
    }

    /// What the machine counts.
    pub fn counters(&self) -> CallCounters {
        self.counters
    }

    /// Messages to be sent, in this order, each session's before anything that is begun later. To be emptied.
    pub fn outbox(&mut self) -> &mut Vec<Outbound> {
        &mut self.outbox
    }

    /// A session with a node, by the name that it claims.
    pub fn session_with(&self, node: &NodeId) -> Option<SessionId> {
        self.by_node.get(node).copied()
    }

    /// The name that the node at the other end of a session claims.
    pub fn node_of(&self, session: SessionId) -> Option<NodeId> {
        self.session_ref(session)?.peer.map(|peer| peer.0)
    }

    fn session_ref(&self, slot: SessionId) -> Option<&Session<C>> {
        self.sessions.get(slot.index as usize)?.as_ref().filter(|session| session.name == slot)
    }

    fn session(&mut self, slot: SessionId) -> Option<&mut Session<C>> {
        self.sessions.get_mut(slot.index as usize)?.as_mut().filter(|session| session.name == slot)
    }

    /// A session can be used. Its nonce keys the secrets of tokens. The end that `begins`, which is the fabric's client, says what it
    /// speaks; the other says so in answer.
    pub fn up(&mut self, name: SessionId, nonce: [u8; 16], begins: bool) {
        let index = name.index as usize;
        if index >= self.sessions.len() {
            self.sessions.resize_with(index + 1, || None);
        }
        self.sessions[index] = Some(Session {
            name,
            nonce,
            begins,
            peer: None,
            protocols: Protocols::new(&self.spoken),
            outgoing: Outgoing::default(),
            incoming: Incoming::default(),
        });
        if begins {
            self.introduce(name);
        }
    }

    /// Tells a session's peer what this node speaks.
    fn introduce(&mut self, name: SessionId) {
        let mut body = ProtocolsBody::new_zeroed();
        body.node = self.node;
        body.session.set(name.to_u64());
        let payload = entries(&self.spoken);
        body.count.set(self.spoken.len() as u16);
        let header = Header::with_body(Kind::Protocols, &body);
        self.push(name, header, payload);
    }

    /// As [`Calls::session_ended`]: the contexts of all calls that ended.
    pub fn down(&mut self, name: SessionId) -> Vec<C> {
        let EndedCalls { mut with_session, answer_lost } = self.session_ended(name);
        with_session.extend(answer_lost);
        with_session
    }

    /// A session has ended: gives the contexts of this node's calls that ended with it. Calls of its peer need no answer any
    /// more, and every reference to them is stale.
    pub fn session_ended(&mut self, name: SessionId) -> EndedCalls<C> {
        let mut calls = EndedCalls { with_session: Vec::new(), answer_lost: Vec::new() };
        if self.session(name).is_none() {
            return calls;
        }
        let Some(mut ended) = self.sessions[name.index as usize].take() else { return calls };
        if let Some((node, _)) = ended.peer
            && self.by_node.get(&node) == Some(&name)
        {
            self.by_node.remove(&node);
            let other = self.sessions.iter().flatten().find(|other| other.peer.is_some_and(|peer| peer.0 == node));
            if let Some(other) = other {
                self.by_node.insert(node, other.name);
            }
        }
        // No peer waits any more for the answers to its calls that this node has delegated.
        for at in ended.incoming.delegated() {
            self.forget(at);
        }
        for context in ended.outgoing.drain() {
            match context {
                Context::Own(context) => calls.with_session.push(context),
                Context::OnBehalf(_) if seeded::is(Bug::DelegateDeathUntold) => {}
                Context::OnBehalf(from) => self.pass_on(from, LOST, &[]),
            }
        }
        calls.answer_lost = self.lost_over(name);
        calls
    }

    /// The header of a notice.
    ///
    /// # Errors
    /// It cannot be sent.
    pub fn notify(&mut self, session: SessionId, ask: &Ask<'_>) -> Result<Header, CannotSend> {
        self.session(session).ok_or(CannotSend::Ended)?.protocols.begin_notice(ask.protocol)?;
        Ok(call_header(Kind::Notice, 0, ask, None))
    }

    /// The program has taken a notice.
    pub fn notice_taken(&mut self, session: SessionId, protocol: u8) {
        let Some(state) = self.session(session) else { return };
        if let Some(credits) = state.protocols.notice_taken(protocol) {
            let mut body = CreditBody::new_zeroed();
            body.protocol = protocol;
            body.credits.set(credits);
            self.push(session, Header::with_body(Kind::NoticeCredit, &body), Vec::new());
        }
    }

    /// Takes a message of the kinds `Call`, `Reply`, `Notice`, `Cancel`, `NoticeCredit` and `Protocols`.
    ///
    /// # Errors
    /// A breach of protocol: the session is to be ended.
    pub fn message<'a>(
        &mut self,
        session: SessionId,
        kind: Kind,
        header: &Header,
        payload: &'a [u8],
    ) -> Result<Event<'a, C>, Breach> {
        if self.session(session).is_none() {
            return Ok(Event::None);
        }
        match kind {
            Kind::Call => self.called(session, header, payload),
            Kind::Notice => self.notified(session, header, payload),
            Kind::Reply => self.replied(session, header, payload),
            Kind::Cancel => Ok(self.cancelled(session, header.body::<CancelBody>().call.get())),
            Kind::NoticeCredit => {
                let body: CreditBody = header.body();
                let state = self.session(session).ok_or(Breach::Form)?;
                state.protocols.credited(body.protocol, body.credits.get())?;
                Ok(Event::Ready(session))
            }
            Kind::Protocols => self.introduced(session, header, payload),
            _ => Err(Breach::Form),
        }
    }

    fn introduced<'a>(&mut self, slot: SessionId, header: &Header, payload: &[u8]) -> Result<Event<'a, C>, Breach> {
        let body: ProtocolsBody = header.body();
        let spoken = std::mem::take(&mut self.spoken);
        let state = self.session(slot).ok_or(Breach::Form);
        let learned = state.and_then(|state| {
            state.protocols.learn(&spoken, usize::from(body.count.get()), payload)?;
            state.peer = Some((body.node, body.session.get()));
            Ok(state.begins)
        });
        self.spoken = spoken;
        let begins = learned?;
        // A node that makes no calls has no name.
        if body.node != [0; 16] {
            self.by_node.entry(body.node).or_insert(slot);
        }
        if !begins {
            self.introduce(slot);
        }
        Ok(Event::Ready(slot))
    }

    fn notified<'a>(&mut self, slot: SessionId, header: &Header, payload: &'a [u8]) -> Result<Event<'a, C>, Breach> {
        let body: CallBody = header.body();
        let (windows, payload) = split_windows(body.windows, payload)?;
        let state = self.session(slot).ok_or(Breach::Form)?;
        if !state.protocols.notice_came(body.protocol)? {
            self.counters.notices_dropped += 1;
            return Ok(Event::None);
        }
        let version = state.protocols.find(body.protocol).and_then(|agreed| agreed.version).unwrap_or(0);
        Ok(Event::Notified(incomer(slot, &body, version, windows, payload)?))
    }

    fn push(&mut self, session: SessionId, header: Header, payload: Vec<u8>) {
        self.outbox.push(Outbound { session, header, payload });
    }
}

/// The secret that proves the right to answer a call of the session with that nonce.
fn secret(nonce: &[u8; 16], call: u64) -> u64 {
    let mut hash = siphasher::sip::SipHasher24::new_with_key(nonce);
    hash.write_u64(call.to_le());
    hash.finish()
}

fn split_token<'a>(header: &Header, payload: &'a [u8]) -> Result<(Option<Token>, &'a [u8]), Breach> {
    if header.flags & FLAG_TOKEN == 0 {
        return Ok((None, payload));
    }
    let (token, rest) = Token::read_from_prefix(payload).map_err(|_| Breach::Form)?;
    Ok((Some(token), rest))
}

fn split_windows(count: u8, payload: &[u8]) -> Result<(&[u8], &[u8]), Breach> {
    let count = usize::from(count);
    let split = payload.split_at_checked(count * DESCRIPTOR_BYTES).filter(|_| count <= WINDOWS_PER_CALL_MAX);
    split.ok_or(Breach::Form)
}

fn incomer<'a>(
    session: SessionId,
    body: &CallBody,
    version: u16,
    windows: &'a [u8],
    payload: &'a [u8],
) -> Result<Incomer<'a>, Breach> {
    let deadline_ms = body.deadline_ms.get();
    Ok(Incomer {
        session,
        protocol: body.protocol,
        version,
        method: body.method.get(),
        delegated: false,
        deadline: (deadline_ms > 0).then(|| Duration::from_millis(u64::from(deadline_ms))),
        arguments: Inline::from_wire(&body.arguments, body.inline_len).ok_or(Breach::Form)?,
        windows,
        payload,
    })
}

fn call_header(kind: Kind, call: u64, ask: &Ask<'_>, left: Option<Duration>) -> Header {
    let mut body = CallBody::new_zeroed();
    body.call.copy_from_slice(&call.to_le_bytes()[..7]);
    body.method.set(ask.method);
    body.protocol = ask.protocol;
    body.windows = ask.windows;
    body.deadline_ms.set(left.map_or(0, |left| u32::try_from(left.as_millis()).unwrap_or(u32::MAX).max(1)));
    body.inline_len = ask.arguments.len() as u8;
    body.arguments = *ask.arguments.padded();
    Header::with_body(kind, &body)
}

fn reply_header(call: u64, status: u16, total: u32, result: &Inline) -> Header {
    let mut body = ReplyBody::new_zeroed();
    body.call.set(call);
    body.status.set(status);
    body.total.set(total);
    body.inline_len = result.len() as u8;
    body.result = *result.padded();
    Header::with_body(Kind::Reply, &body)
}
