//! One connection: its stream, the handshake, and then one send and one receive in flight at a time.

use std::rc::Rc;
use std::time::Duration;

use byway_fabric::tls::TlsClient;
use byway_reactor::{Address, Errno as OsError, Gather, Instant, Op, Outcome, Reactor, Scatter, Socket, Token};

use super::Completed;
use super::error::ClientError;
use super::inbox::{Inbox, Room};
use super::nbd_request::{NbdRequest, Payload};
use super::secure::Secure;
use super::traffic::{PayloadPart, Traffic};
use crate::limits::{
    CLIENT_CIPHERTEXT_BYTES, CLIENT_CLOSE_SECONDS_MAX, CLIENT_HANDSHAKE_SECONDS_MAX, CLIENT_INPUT_BYTES,
    CLIENT_KEEP_ALIVE_SECONDS, CLIENT_PROBE_SECONDS, CLIENT_SILENCE_SECONDS_MAX,
};
use crate::nbd::client::{ClientConfig, ClientHandshake, ClientStep, ListedExport, ReplyError, Session};

pub(super) const TAG_CONNECT: u8 = 1;
const TAG_RECEIVE: u8 = 2;
const TAG_SEND: u8 = 3;

/// See the module.
pub(super) struct Connection {
    token: Token,
    socket: Option<Socket>,
    phase: Phase,
    /// Operations of the loop that have not completed.
    operations: u32,
    inbox: Inbox,
    tls: Option<TlsClient>,
    /// From the server's word that TLS may begin on.
    secure: Option<Box<Secure>>,
    scatter: Option<Scatter>,
    receiving: bool,
    /// The receive under way fills the frame of the request whose payload comes, before the inbox.
    lent: bool,
    queued: Gather,
    /// The gather that is not being sent, emptied.
    spare: Option<Gather>,
    begun: Instant,
    heard: Instant,
    /// The server has said something.
    answered: bool,
}

enum Phase {
    /// Until there is a session, also while the stream is being connected.
    Greeting(Box<ClientHandshake>),
    Up(Box<Traffic>),
    /// The server's list has come, and nothing else will.
    Listed(Vec<ListedExport>),
    /// The last bytes go out, then it closes.
    Leaving,
    Closed,
}

impl Connection {
    /// Connects; what happens comes as completions of `token`'s class and index.
    pub(super) fn open(
        reactor: &mut Reactor,
        to: Address,
        config: ClientConfig,
        tls: Option<TlsClient>,
        token: Token,
    ) -> Result<Self, ClientError> {
        let handshake = ClientHandshake::new(config)?;
        let frame = reactor.frames().alloc(CLIENT_INPUT_BYTES).ok_or(ClientError::NoFrames)?;
        reactor.submit(Op::Connect { to }, token.with_tag(TAG_CONNECT));
        let now = reactor.now();
        Ok(Self {
            token,
            socket: None,
            phase: Phase::Greeting(Box::new(handshake)),
            operations: 1,
            inbox: Inbox::new(frame),
            tls,
            secure: None,
            scatter: None,
            receiving: false,
            lent: false,
            queued: Gather::new(),
            spare: Some(Gather::new()),
            begun: now,
            heard: now,
            answered: false,
        })
    }

    /// What the server said of the export, once it is open.
    pub(super) fn traffic(&self) -> Option<&Traffic> {
        match &self.phase {
            Phase::Up(traffic) => Some(traffic),
            _ => None,
        }
    }

    /// The server's list, once it has come.
    pub(super) fn listed(&self) -> Option<&[ListedExport]> {
        match &self.phase {
            Phase::Listed(list) => Some(list),
            _ => None,
        }
    }

    /// Whether there is no session yet, and may be one.
    pub(super) fn is_greeting(&self) -> bool {
        matches!(self.phase, Phase::Greeting(_))
    }

    /// Whether the stream is connected, and the server has said nothing, not even its greeting.
    pub(super) fn is_unanswered(&self) -> bool {
        self.is_greeting() && self.socket.is_some() && !self.answered
    }

    /// Whether that is so for long enough to ask which wire the server speaks.
    pub(super) fn is_silent(&self, now: Instant) -> bool {
        self.is_unanswered() && now.since(self.heard) >= Duration::from_secs(CLIENT_PROBE_SECONDS)
    }

    /// Whether nothing is in flight and nothing will be.
    pub(super) fn is_closed(&self) -> bool {
        matches!(self.phase, Phase::Closed) && self.operations == 0
    }

    /// Takes a request. Only while [`Connection::traffic`] says so.
    pub(super) fn add(&mut self, request: NbdRequest, now: Instant) {
        if let Phase::Up(traffic) = &mut self.phase {
            if traffic.is_idle() {
                self.heard = now;
            }
            traffic.add(request);
        }
    }

    /// Takes a completion. An error ends the connection: call [`Connection::break_off`].
    pub(super) fn handle(
        &mut self,
        reactor: &mut Reactor,
        outcome: Outcome,
        done: &mut Vec<Completed>,
    ) -> Result<(), ClientError> {
        self.operations -= 1;
        let went = match outcome {
            Outcome::Connected(result) => self.connected(reactor, result),
            Outcome::Received { into, result } => self.received(reactor, into, result, done),
            Outcome::Sent { mut gather, result } => {
                gather.clear();
                self.spare = Some(gather);
                self.sent(reactor, result)
            }
            _ => Ok(()),
        };
        if let (Err(ClientError::Tls(error)), Some(secure)) = (&went, &mut self.secure)
            && secure.break_by(*error)
        {
            // The server hears why before the connection ends.
            self.queued.clear();
            return Ok(());
        }
        went
    }

    fn sent(&mut self, reactor: &mut Reactor, result: Result<usize, OsError>) -> Result<(), ClientError> {
        let leaving = matches!(self.phase, Phase::Leaving);
        let owes = |secure: &Secure| secure.wants_send() || (leaving && !secure.has_said_end());
        let more = !self.queued.is_empty() || self.secure.as_deref().is_some_and(owes);
        if leaving && !more {
            self.shut(reactor);
        }
        if matches!(self.phase, Phase::Closed) {
            return Ok(());
        }
        match (result, self.fault()) {
            (Ok(_), Some(_)) if more => Ok(()),
            (_, Some(error)) => Err(error),
            (Ok(_), None) => Ok(()),
            // Why the server has closed its end lies before that end: TLS says it in what is still to be received.
            (Err(OsError::PIPE | OsError::CONNRESET), None) if self.secure.is_some() && self.receiving => Ok(()),
            (Err(error), None) => Err(self.broken(error)),
        }
    }

    /// What broke TLS, while the server is being told.
    fn fault(&self) -> Option<ClientError> {
        self.secure.as_ref().and_then(|secure| secure.fault()).map(ClientError::Tls)
    }

    fn connected(&mut self, reactor: &mut Reactor, result: Result<Socket, OsError>) -> Result<(), ClientError> {
        if matches!(self.phase, Phase::Closed) {
            if let Ok(socket) = result {
                reactor.close(socket);
            }
            return Ok(());
        }
        let socket = result.map_err(ClientError::Connect)?;
        reactor.keep_alive(socket, Duration::from_secs(CLIENT_KEEP_ALIVE_SECONDS));
        self.socket = Some(socket);
        self.heard = reactor.now();
        self.receive(reactor);
        Ok(())
    }

    fn received(
        &mut self,
        reactor: &mut Reactor,
        mut into: Scatter,
        result: Result<usize, OsError>,
        done: &mut Vec<Completed>,
    ) -> Result<(), ClientError> {
        self.receiving = false;
        let mut frames = into.drain().map(|piece| piece.frame);
        let payload = if std::mem::take(&mut self.lent) { frames.next() } else { None };
        let own = frames.next();
        drop(frames);
        self.scatter = Some(into);
        if matches!(self.phase, Phase::Closed | Phase::Leaving | Phase::Listed(_)) || self.fault().is_some() {
            return Ok(());
        }
        let mut count = result.map_err(|error| self.broken(error))?;
        if count == 0 {
            return Err(self.gone());
        }
        (self.heard, self.answered) = (reactor.now(), true);
        if let (Phase::Up(traffic), Some(frame)) = (&mut self.phase, payload) {
            count = traffic.give_back(frame, count).ok_or(ClientError::ServerGone)?;
        }
        match (own, &mut self.secure) {
            (Some(own), Some(secure)) => secure.give(own, count),
            (Some(own), None) => self.inbox.give(own, count),
            (None, _) => {}
        }
        if self.secure.is_some() {
            self.use_ciphertext(reactor, done)?;
        } else {
            self.use_inbox(reactor, done)?;
        }
        self.receive(reactor);
        Ok(())
    }

    /// The stream broke. A server that does not take a client's certificate may close without a word.
    fn broken(&self, error: OsError) -> ClientError {
        let unheard = self.secure.as_ref().is_some_and(|secure| !secure.has_heard());
        match error {
            OsError::PIPE | OsError::CONNRESET if unheard => self.gone(),
            error => ClientError::Stream(error),
        }
    }

    /// The stream has ended: why that is no good.
    fn gone(&self) -> ClientError {
        match (self.secure.as_ref().map_or(Ok(()), |secure| secure.end()), &self.phase) {
            (Err(error), _) => error.into(),
            (Ok(()), Phase::Greeting(_)) => ClientError::ClosedInHandshake,
            (Ok(()), _) => ClientError::ServerGone,
        }
    }

    /// The server has said that TLS may begin.
    fn begin_tls(&mut self, reactor: &Reactor) -> Result<(), ClientError> {
        // It is never asked for without, so a server that starts it breaks the protocol.
        let client = self.tls.as_ref().ok_or(ReplyError("TLS that was not asked for"))?;
        // It could not have said so before it was asked, and has nothing else to say before we have.
        if !self.inbox.bytes().is_empty() || !self.queued.is_empty() {
            return Err(ClientError::EarlyBytes);
        }
        let frame = reactor.frames().alloc(CLIENT_CIPHERTEXT_BYTES).ok_or(ClientError::NoFrames)?;
        self.secure = Some(Box::new(Secure::begin(client, frame)?));
        Ok(())
    }

    /// Decrypts what has come to where it belongs, and uses it.
    fn use_ciphertext(&mut self, reactor: &Reactor, done: &mut Vec<Completed>) -> Result<(), ClientError> {
        while let Some(secure) = &mut self.secure {
            let was_handshaking = secure.is_handshaking();
            let (mut placed, mut wanted) = (None, CLIENT_INPUT_BYTES);
            if let Phase::Up(traffic) = &mut self.phase {
                placed = traffic.fill(|into| secure.decrypt(into));
                wanted = traffic.wanted(self.inbox.bytes().len());
            }
            let count = match placed {
                Some(went) => went?,
                None => secure.decrypt_to(&mut self.inbox, wanted)?,
            };
            if let Phase::Greeting(handshake) = &mut self.phase
                && was_handshaking
                && !secure.is_handshaking()
            {
                self.queued.push_head_with(|out| handshake.tls_established(out));
            }
            if count == 0 {
                return if secure.has_ended() { Err(self.gone()) } else { Ok(()) };
            }
            self.use_inbox(reactor, done)?;
            if matches!(self.phase, Phase::Listed(_)) {
                return Ok(());
            }
        }
        Ok(())
    }

    fn use_inbox(&mut self, reactor: &Reactor, done: &mut Vec<Completed>) -> Result<(), ClientError> {
        loop {
            match &mut self.phase {
                Phase::Greeting(handshake) => {
                    let bytes = self.inbox.bytes();
                    let (taken, step) = self.queued.push_head_with(|out| handshake.receive(bytes, out))?;
                    self.inbox.consume(taken);
                    match step {
                        ClientStep::NeedMore => return Ok(()),
                        ClientStep::StartTls => return self.begin_tls(reactor),
                        ClientStep::Transmission(session) => self.phase = Phase::Up(Box::new(Traffic::new(*session))),
                        ClientStep::Listed(list) => self.phase = Phase::Listed(list),
                    }
                }
                Phase::Up(traffic) => return traffic.use_inbox(&mut self.inbox, done),
                Phase::Listed(_) | Phase::Leaving | Phase::Closed => return Ok(()),
            }
        }
    }

    /// Receives what comes next: the rest of a payload where it belongs, then heads into the inbox.
    fn receive(&mut self, reactor: &mut Reactor) {
        let Some(socket) = self.socket.filter(|_| !self.receiving && !matches!(self.phase, Phase::Closed)) else {
            return;
        };
        let (mut payload, mut wanted, mut min) = (None, CLIENT_INPUT_BYTES, 1);
        if let (Phase::Up(traffic), None) = (&mut self.phase, &self.secure) {
            (payload, wanted) = (traffic.lend(), traffic.wanted(self.inbox.bytes().len()));
        }
        let lent = match &mut self.secure {
            Some(secure) => secure.lend(),
            None => self.inbox.lend(wanted),
        };
        let Some(heads) = lent else { return };
        let mut into = self.scatter.take().unwrap_or_default();
        if let Some(Room { frame, start, len }) = payload {
            into.push(frame, start, len);
            (self.lent, min) = (true, len);
        }
        into.push(heads.frame, heads.start, heads.len);
        self.receiving = true;
        self.operations += 1;
        reactor.submit(Op::Recv { socket, into, min }, self.token.with_tag(TAG_RECEIVE));
    }

    /// Sends what requests have to send, and what waits.
    pub(super) fn flush(&mut self, reactor: &mut Reactor, done: &mut Vec<Completed>) {
        let broken = self.fault().is_some();
        if let (Phase::Up(traffic), false) = (&mut self.phase, broken) {
            let queued = &mut self.queued;
            traffic.send(done, |payload, head| {
                let sent = queued.push_head_with(head)?;
                let Some(PayloadPart { payload, start, len }) = payload else { return Ok(sent) };
                match payload {
                    Payload::Frame(frame) => queued.push_shared(Rc::clone(frame), start, len),
                    Payload::Zeroes => queued.push_zeroes(len),
                }
                Ok(sent)
            });
        }
        let Some(socket) = self.socket else { return };
        let Some(mut gather) = self.spare.take() else { return };
        match &mut self.secure {
            Some(secure) => secure.seal(&mut self.queued, &mut gather, matches!(self.phase, Phase::Leaving)),
            None => std::mem::swap(&mut self.queued, &mut gather),
        }
        if gather.is_empty() {
            self.spare = Some(gather);
            return;
        }
        self.operations += 1;
        reactor.submit(Op::Send { socket, gather }, self.token.with_tag(TAG_SEND));
    }

    /// Looks at the time: the handshake and a server that owes something have limits.
    pub(super) fn tick(&self, now: Instant) -> Result<(), ClientError> {
        let over = |since: Instant, seconds| now.since(since) >= Duration::from_secs(seconds);
        if let Some(error) = self.fault().filter(|_| over(self.heard, CLIENT_CLOSE_SECONDS_MAX)) {
            return Err(error);
        }
        match &self.phase {
            Phase::Greeting(_) if over(self.begun, CLIENT_HANDSHAKE_SECONDS_MAX) => Err(ClientError::SlowHandshake),
            Phase::Up(traffic) if !traffic.is_idle() && over(self.heard, CLIENT_SILENCE_SECONDS_MAX) => {
                Err(ClientError::Silent)
            }
            _ => Ok(()),
        }
    }

    /// Whether something is owed, so that the time must be looked at.
    pub(super) fn is_waiting(&self) -> bool {
        self.is_greeting() || self.fault().is_some() || self.traffic().is_some_and(|traffic| !traffic.is_idle())
    }

    /// Leaves as the protocol asks; what is in flight fails.
    pub(super) fn leave(&mut self, reactor: &mut Reactor, done: &mut Vec<Completed>) {
        if !matches!(self.phase, Phase::Leaving) {
            self.break_off(reactor, &ClientError::Closed, done);
        }
    }

    /// Fails everything in flight with `error`, says what the protocol has for a leave, as far as there is a stream for
    /// it, and closes when that has gone out.
    pub(super) fn break_off(&mut self, reactor: &mut Reactor, error: &ClientError, done: &mut Vec<Completed>) {
        let is_broken = self.socket.is_none() || self.fault().is_some() || error.is_of_the_stream();
        match &mut self.phase {
            Phase::Up(traffic) => {
                traffic.fail(error, done);
                // TLS may have taken the first part of a queued request: then DISC would stand within that request.
                let within_request = self.secure.is_some() && !self.queued.is_empty();
                self.queued.clear();
                if !within_request {
                    self.queued.push_head_with(|out| traffic.disconnect(out));
                }
            }
            // ABORT is queued, if the handshake has come to where that can be said.
            Phase::Greeting(_) | Phase::Listed(_) => {}
            Phase::Leaving | Phase::Closed => return self.shut(reactor),
        }
        let has_secure = self.secure.as_ref().is_some_and(|secure| !secure.is_handshaking());
        if is_broken || !(has_secure || self.spare.is_none() || !self.queued.is_empty()) {
            return self.shut(reactor);
        }
        self.phase = Phase::Leaving;
        self.flush(reactor, done);
    }

    fn shut(&mut self, reactor: &mut Reactor) {
        self.phase = Phase::Closed;
        self.secure = None;
        self.queued.clear();
        match self.socket.take() {
            Some(socket) => reactor.close(socket),
            None => reactor.cancel(self.token.with_tag(TAG_CONNECT)),
        }
    }

    /// Whether this connection was told the same of the export as another.
    pub(super) fn agrees_with(&self, session: &Session) -> bool {
        self.traffic().is_none_or(|traffic| traffic.session().rules == session.rules)
    }
}
