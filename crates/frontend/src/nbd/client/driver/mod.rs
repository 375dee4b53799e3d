//! The client, driven by its owner's loop: one export, over one connection or several.
//!
//! [`Client::submit`] takes requests at any depth, [`Client::handle`] takes completions of its token class,
//! [`Client::flush`] sends, [`Client::reap`] returns answers. A second connection is made only if the server says that a
//! flush on one covers the others (`NBD_FLAG_CAN_MULTI_CONN`). A large read is received, or decrypted, straight into its
//! frame.
//!
//! NBD has no sessions that outlive a connection: when one breaks, all requests fail and the owner starts again. byway's own
//! protocol has such sessions.

mod blocking;
mod connection;
mod error;
mod inbox;
mod nbd_request;
mod probe;
mod secure;
mod traffic;

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use byway_fabric::tls::TlsClient;
use byway_reactor::{Address, Completion, Frame, Op, Outcome, Reactor, Token};
use byway_service::block::client::{Answer, Request};

pub use self::blocking::{BlockingClient, list};
use self::connection::Connection;
pub use self::error::{ClientError, RequestError};
use self::nbd_request::NbdRequest;
use self::probe::Probe;
use super::{ClientConfig, Encryption, ListedExport, Session};
use crate::limits::{CLIENT_CONNECTIONS_MAX, CLIENT_REQUESTS_MAX};
use crate::nbd::flags::TransmissionFlags;

/// The longest range of a command without a payload; longer ones are cut. Some servers take no more in 32 bits.
const LONG_COMMAND_BYTES_MAX: u64 = 1 << 30;

const TAG_TIMER: u8 = 4;
const TAG_PROBE: u8 = 5;
/// How often the time is looked at while a server owes something.
const TICK: Duration = Duration::from_millis(500);

/// How a client behaves.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// The class of its tokens.
    pub class: u8,
    /// Connections at most, 1 to [`CLIENT_CONNECTIONS_MAX`]; fewer where the server does not allow several.
    pub connections: usize,
    /// With it all connections use TLS, or there are none; without, none does. It decides instead of
    /// [`ClientConfig::tls`].
    pub tls: Option<TlsClient>,
}

/// The end of a request.
#[derive(Debug)]
pub struct Completed {
    /// As it was given.
    pub tag: u64,
    /// What came of it.
    pub result: Result<Answer, RequestError>,
    /// A read's memory, unless the connection broke while it was being filled.
    pub buffer: Option<Frame>,
}

/// An export of a server. See the module.
pub struct Client {
    options: ClientOptions,
    address: Address,
    config: ClientConfig,
    connections: Vec<Connection>,
    /// From the time on when a server was silent for long.
    probe: Option<Probe>,
    session: Option<Session>,
    listed: Option<Vec<ListedExport>>,
    queue: VecDeque<(u64, Request<Frame, Rc<Frame>>)>,
    done: Vec<Completed>,
    failed: Option<ClientError>,
    closing: bool,
    ticking: bool,
    /// Requests whose answers have not been taken.
    pending: usize,
}

impl Client {
    /// Begins to connect to the server at `address`; [`Client::session`] or [`Client::listed`] tells when it is done.
    pub fn connect(reactor: &mut Reactor, address: Address, mut config: ClientConfig, options: ClientOptions) -> Self {
        config.tls = if options.tls.is_some() { Encryption::Required } else { Encryption::Off };
        let mut client = Self {
            options,
            address,
            config,
            connections: Vec::new(),
            probe: None,
            session: None,
            listed: None,
            queue: VecDeque::new(),
            done: Vec::new(),
            failed: None,
            closing: false,
            ticking: false,
            pending: 0,
        };
        if let Err(error) = client.add_connection(reactor) {
            client.fail(reactor, error);
        }
        client
    }

    /// What the server said of the export, once it is open.
    pub fn session(&self) -> Option<&Session> {
        self.session.as_ref()
    }

    /// The server's list, if that was asked for and has come.
    pub fn listed(&self) -> Option<&[ListedExport]> {
        self.listed.as_deref()
    }

    /// Why everything fails, if it does.
    pub fn failed(&self) -> Option<&ClientError> {
        self.failed.as_ref()
    }

    /// Connections that are up.
    pub fn connections(&self) -> usize {
        self.connections.iter().filter(|connection| connection.traffic().is_some()).count()
    }

    /// Requests whose answers have not been taken.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// Whether [`Client::reap`] has something to give.
    pub fn has_answers(&self) -> bool {
        !self.done.is_empty()
    }

    /// Takes a request; its answer comes from [`Client::reap`] with that tag. Ranges of any length are cut into commands
    /// that the export accepts; the answer to a list of extents may cover less than was asked.
    ///
    /// # Errors
    /// The request, when too many are waiting: take answers first.
    pub fn submit(&mut self, request: Request<Frame, Rc<Frame>>, tag: u64) -> Result<(), Request<Frame, Rc<Frame>>> {
        if self.pending >= CLIENT_REQUESTS_MAX {
            return Err(request);
        }
        self.pending += 1;
        match &self.failed {
            Some(error) => self.done.push(lost(tag, request, error)),
            None => self.queue.push_back((tag, request)),
        }
        Ok(())
    }

    /// Appends the answers that have come.
    pub fn reap(&mut self, into: &mut Vec<Completed>) {
        self.pending -= self.done.len();
        into.append(&mut self.done);
    }

    /// Takes a completion of this client's token class.
    pub fn handle(&mut self, reactor: &mut Reactor, completion: Completion) {
        if let Outcome::TimedOut(_) = completion.outcome {
            self.ticking = false;
            return self.tick(reactor);
        }
        if completion.token == self.probe_token() {
            let speaks_byway = self.probe.as_mut().is_some_and(|probe| probe.handle(reactor, completion.outcome));
            if speaks_byway && self.failed.is_none() && self.is_unanswered() {
                self.fail(reactor, ClientError::SpeaksByway);
            }
            return;
        }
        let index = completion.token.index() as usize;
        let Some(connection) = self.connections.get_mut(index) else { return };
        let result = connection.handle(reactor, completion.outcome, &mut self.done);
        self.judge(reactor, index, result);
    }

    /// Sends what can be sent. To be called after submitting, and after all completions of a reap were handled. It may
    /// answer requests that the export does not accept: take answers before you wait.
    pub fn flush(&mut self, reactor: &mut Reactor) {
        if self.session.is_some() && !self.closing {
            self.assign(reactor);
        }
        for connection in &mut self.connections {
            connection.flush(reactor, &mut self.done);
        }
        let waits = self.connections.iter().any(Connection::is_waiting);
        if waits && !self.ticking {
            self.ticking = true;
            let at = reactor.now() + TICK;
            reactor.submit(Op::Timer { at }, self.token(0).with_tag(TAG_TIMER));
        }
    }

    /// Fails all requests and leaves. [`Client::is_closed`] tells when nothing is in flight any more.
    pub fn close(&mut self, reactor: &mut Reactor) {
        self.closing = true;
        self.failed.get_or_insert(ClientError::Closed);
        self.answer_queued(&ClientError::Closed);
        for connection in &mut self.connections {
            connection.leave(reactor, &mut self.done);
        }
        self.end_probe(reactor);
        if self.ticking {
            reactor.cancel(self.token(0).with_tag(TAG_TIMER));
        }
    }

    /// Whether nothing is in flight and nothing will be.
    pub fn is_closed(&self) -> bool {
        self.closing
            && !self.ticking
            && self.probe.as_ref().is_none_or(Probe::is_closed)
            && self.connections.iter().all(Connection::is_closed)
    }

    fn token(&self, index: usize) -> Token {
        Token::new(self.options.class, 0, index as u32, 0)
    }

    fn probe_token(&self) -> Token {
        self.token(CLIENT_CONNECTIONS_MAX).with_tag(TAG_PROBE)
    }

    fn is_unanswered(&self) -> bool {
        self.connections.first().is_some_and(Connection::is_unanswered)
    }

    fn end_probe(&mut self, reactor: &mut Reactor) {
        if let Some(probe) = &mut self.probe {
            probe.shut(reactor);
        }
    }

    fn add_connection(&mut self, reactor: &mut Reactor) -> Result<(), ClientError> {
        let token = self.token(self.connections.len());
        let (config, tls) = (self.config.clone(), self.options.tls.clone());
        let connection = Connection::open(reactor, self.address.clone(), config, tls, token)?;
        self.connections.push(connection);
        Ok(())
    }

    fn judge(&mut self, reactor: &mut Reactor, index: usize, result: Result<(), ClientError>) {
        if let Err(error) = result {
            // All have been told to leave.
            if self.closing {
                return self.connections[index].break_off(reactor, &error, &mut self.done);
            }
            // One of several that a server would not let in: the others do.
            if index > 0 && self.connections[index].is_greeting() {
                return self.connections[index].break_off(reactor, &error, &mut self.done);
            }
            return self.fail(reactor, error);
        }
        let connection = &self.connections[index];
        if let Some(list) = connection.listed() {
            self.listed = Some(list.to_vec());
        }
        match &self.session {
            Some(session) if !connection.agrees_with(session) => self.fail(reactor, ClientError::Differs),
            None if connection.traffic().is_some() => {
                self.session = connection.traffic().map(|traffic| traffic.session().clone());
                self.end_probe(reactor);
                self.add_others(reactor);
            }
            _ => {}
        }
    }

    /// Makes the other connections, if the server allows several.
    fn add_others(&mut self, reactor: &mut Reactor) {
        let Some(session) = &self.session else { return };
        if !session.rules.flags.has(TransmissionFlags::CAN_MULTI_CONN) {
            return;
        }
        for _ in 1..self.options.connections.min(CLIENT_CONNECTIONS_MAX) {
            // What cannot be had is not needed.
            if self.add_connection(reactor).is_err() {
                return;
            }
        }
    }

    /// Gives what is queued to the connections that have least to do.
    fn assign(&mut self, reactor: &Reactor) {
        let Some(rules) = self.session.as_ref().map(|session| session.rules) else { return };
        let now = reactor.now();
        while let Some((tag, request)) = self.queue.pop_front() {
            let up = self.connections.iter_mut().filter_map(|connection| {
                let len = connection.traffic()?.len();
                Some((len, connection))
            });
            let Some((_, connection)) = up.min_by_key(|(len, _)| *len) else {
                return self.queue.push_front((tag, request));
            };
            match NbdRequest::new(tag, request, &rules) {
                Ok(request) => connection.add(request, now),
                Err(completed) => self.done.push(completed),
            }
        }
    }

    fn tick(&mut self, reactor: &mut Reactor) {
        let now = reactor.now();
        for index in 0..self.connections.len() {
            let result = self.connections[index].tick(now);
            if result.is_err() {
                self.judge(reactor, index, result);
            }
        }
        let silent = self.connections.first().is_some_and(|first| first.is_silent(now));
        if silent && self.probe.is_none() && !self.closing {
            self.probe = Some(Probe::open(reactor, self.address.clone(), self.probe_token()));
        }
    }

    fn fail(&mut self, reactor: &mut Reactor, error: ClientError) {
        self.closing = true;
        self.answer_queued(&error);
        for connection in &mut self.connections {
            connection.break_off(reactor, &error, &mut self.done);
        }
        self.end_probe(reactor);
        self.failed.get_or_insert(error);
        if self.ticking {
            reactor.cancel(self.token(0).with_tag(TAG_TIMER));
        }
    }

    fn answer_queued(&mut self, error: &ClientError) {
        for (tag, request) in self.queue.drain(..) {
            self.done.push(lost(tag, request, error));
        }
    }
}

fn lost(tag: u64, request: Request<Frame, Rc<Frame>>, error: &ClientError) -> Completed {
    let buffer = match request {
        Request::Read { into, .. } => Some(into),
        _ => None,
    };
    Completed { tag, result: Err(error.clone().into()), buffer }
}
