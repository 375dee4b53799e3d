//! A connection before it has chosen an export: moves the bytes of the handshake machine.

use byway_fabric::access::{Identity, Origin, Right};
use byway_fabric::tls::{PeerIdentity, TlsServer};
use byway_reactor::{Gather, Op, Scatter, Socket, Token};
use byway_service::block::{Catalog, Volume, VolumeId, VolumeOptions};

use super::LoopContext;
use super::connection::{CloseReason, Connection, Greeted, TAG_RECEIVE, TAG_SEND};
use super::input::Input;
use super::secure::Secure;
use crate::nbd::export::{Export, Exports, VOLATILE};
use crate::nbd::flags::TransmissionFlags;
use crate::nbd::handshake::{Handshake, HandshakeConfig, Negotiated, Step};
use crate::nbd::request::BlockSizes;
use crate::nbd::transmission::Transmission;

pub(super) struct Greeting {
    socket: Socket,
    token: Token,
    machine: Handshake,
    input: Input,
    out: Gather,
    /// What to begin TLS with, if it is offered.
    tls: Option<TlsServer>,
    /// STARTTLS has been granted; TLS begins when the answer has gone.
    tls_granted: bool,
    secure: Option<Box<Secure>>,
    receiving: bool,
    sending: bool,
    /// Heap memory of the send in flight, and what the front end has counted of ours.
    sending_heap: usize,
    counted_heap: usize,
    /// Operations started and not yet reported.
    started: u32,
    /// What is known of the client.
    guest: Guest,
    /// What was negotiated, and the volume that it was about, until the output has gone.
    chosen: Option<(Box<Negotiated>, VolumeId)>,
    /// The client took its leave, or broke the protocol.
    pub(super) draining: Option<CloseReason>,
    /// The connection is to be closed now.
    pub(super) closing: Option<CloseReason>,
}

/// A connection's client, and what it may do.
#[derive(Clone, Debug)]
pub(super) struct Guest {
    pub(super) client: Identity,
    /// What it has shown by TLS.
    pub(super) shown: PeerIdentity,
    origin: Origin,
    /// What it was told that it may do with its volume; `None` before it has chosen one.
    pub(super) right: Option<Right>,
}

impl Guest {
    pub(super) fn new(origin: Origin) -> Self {
        Self { client: Identity::new(origin), shown: PeerIdentity::Plain, origin, right: None }
    }

    fn show(&mut self, shown: PeerIdentity) {
        self.client = shown.identity(self.origin);
        self.shown = shown;
    }

    /// Whether it may do less by now than it was told, with a volume of which it may do `now`.
    pub(super) fn has_lost(&self, now: Option<Right>, tls: Option<&TlsServer>) -> bool {
        now < self.right || tls.is_some_and(|tls| tls.has_revoked(&self.shown))
    }
}

impl Greeting {
    pub(super) fn new(
        socket: Socket,
        token: Token,
        config: HandshakeConfig,
        tls: Option<TlsServer>,
        origin: Origin,
    ) -> Self {
        let mut out = Gather::new();
        let machine = out.push_head_with(|out| Handshake::new(config, out));
        Self {
            socket,
            token,
            machine,
            input: Input::default(),
            out,
            tls,
            tls_granted: false,
            secure: None,
            receiving: false,
            sending: false,
            sending_heap: 0,
            counted_heap: 0,
            started: 0,
            guest: Guest::new(origin),
            chosen: None,
            draining: None,
            closing: None,
        }
    }

    pub(super) fn received(&mut self, into: &mut Scatter, n: usize) {
        self.receiving = false;
        for piece in into.drain() {
            match &mut self.secure {
                Some(secure) => secure.give(piece.frame, n),
                None => self.input.give(piece.frame, n),
            }
        }
    }

    /// The stream ended.
    pub(super) fn at_end_of_stream(&mut self) {
        let went = self.secure.as_mut().map_or(Ok(()), |secure| secure.hang_up());
        self.closing = Some(went.map_or_else(CloseReason::Tls, |()| self.farewell()));
    }

    /// Why a client goes that goes in good order.
    fn farewell(&self) -> CloseReason {
        if self.machine.refused_plain() { CloseReason::PlainRefused } else { CloseReason::Disconnected }
    }

    /// The client, and what it may do.
    pub(super) fn guest(&self) -> &Guest {
        &self.guest
    }

    pub(super) fn is_secure(&self) -> bool {
        self.secure.is_some()
    }

    pub(super) fn sent(&mut self, gather: Gather) {
        self.sending = false;
        self.sending_heap = 0;
        drop(gather);
    }

    /// Says whether replies to many clients wait: see [`Handshake::set_crowded`].
    pub(super) fn set_crowded(&mut self, crowded: bool) {
        self.machine.set_crowded(crowded);
    }

    /// Counts this connection's heap memory anew in that of all.
    pub(super) fn count_heap(&mut self, all: usize) -> usize {
        let now = if self.closing.is_some() { 0 } else { self.out.heap_bytes() + self.sending_heap };
        all - std::mem::replace(&mut self.counted_heap, now) + now
    }

    /// Operations started since the last call.
    pub(super) fn started_operations(&mut self) -> u32 {
        std::mem::take(&mut self.started)
    }

    pub(super) fn is_idle(&self) -> bool {
        !self.sending && self.out.is_empty() && !self.secure.as_ref().is_some_and(|secure| secure.wants_send())
    }

    /// Whether nothing is left to negotiate: the export is chosen, or the connection ends.
    fn is_settled(&self) -> bool {
        self.chosen.is_some() || self.draining.is_some() || self.closing.is_some()
    }

    /// Does what can be done now. Gives the connection once the export is chosen.
    pub(super) fn advance(&mut self, context: &mut LoopContext<'_>, index: usize) -> Option<Connection> {
        if self.closing.is_some() {
            return None;
        }
        while !self.receiving && !self.sending && !self.is_settled() {
            if self.tls_granted && self.out.is_empty() {
                self.begin_tls();
                continue;
            }
            let Some(decrypted) = self.decrypt(context) else { break };
            let step = if self.tls_granted || self.secure.as_ref().is_some_and(|secure| secure.is_handshaking()) {
                Step::NeedMore
            } else {
                self.negotiate(context)?
            };
            match step {
                Step::NeedMore if decrypted > 0 => {}
                Step::NeedMore => {
                    self.send(context);
                    if !self.tls_granted {
                        self.receive(context);
                    }
                    break;
                }
                Step::Flush => self.send(context),
                // What came before the answer was not protected, so it must not be taken for what is.
                Step::StartTls if !self.input.bytes().is_empty() => self.closing = Some(CloseReason::EarlyBytes),
                Step::StartTls => self.tls_granted = true,
                Step::Closed => self.draining = Some(self.farewell()),
                Step::Transmission(negotiated) => {
                    match context.catalog.find_for(&self.guest.client, &negotiated.export.name) {
                        Some(open) => self.chosen = Some((negotiated, open.id)),
                        None => self.closing = Some(CloseReason::VolumeGone),
                    }
                }
            }
        }
        if self.closing.is_some() {
            return None;
        }
        self.send(context);
        if self.draining.is_some()
            && self.is_idle()
            && let Some(secure) = &mut self.secure
        {
            secure.say_end();
            self.send(context);
        }
        if self.sending || self.receiving {
            return None;
        }
        let (negotiated, volume) = self.chosen.take()?;
        // A reload may have put another volume under this name while the answer was sent, one that wants TLS perhaps, or
        // have changed what this client may do.
        let told = if negotiated.rules.flags.has(TransmissionFlags::READ_ONLY) { Right::Read } else { Right::Write };
        let now = context.catalog.find_for(&self.guest.client, &negotiated.export.name);
        if now.is_none_or(|open| open.id != volume || open.right < told) {
            self.closing = Some(CloseReason::VolumeGone);
            return None;
        }
        self.guest.right = Some(told);
        let input = std::mem::take(&mut self.input);
        let transmission = Transmission::new(negotiated.rules);
        let (socket, token, secure) = (self.socket, self.token, self.secure.take());
        let arrived = context.engine.arrive(volume);
        Some(Connection::new(Greeted { socket, token, index, volume, arrived, transmission, input, secure }))
    }

    /// Hands the input to the machine. `None` if that ended the connection.
    fn negotiate(&mut self, context: &LoopContext<'_>) -> Option<Step> {
        let exports = CatalogExports(context.catalog, &self.guest.client);
        let Self { machine, input, out, .. } = self;
        match out.push_head_with(|out| machine.receive(input.bytes(), &exports, out)) {
            Ok((taken, step)) => {
                self.input.consume(taken);
                Some(step)
            }
            Err(error) => {
                self.closing = Some(CloseReason::Handshake(error));
                None
            }
        }
    }

    fn begin_tls(&mut self) {
        self.tls_granted = false;
        match self.tls.as_ref().map(Secure::accept) {
            Some(Ok(secure)) => self.secure = Some(Box::new(secure)),
            Some(Err(error)) => self.closing = Some(CloseReason::Tls(error)),
            // Not granted without.
            None => self.closing = Some(CloseReason::Disconnected),
        }
    }

    /// Decrypts what has come; gives how many bytes of plaintext there were. `None` if the connection is at its end.
    fn decrypt(&mut self, context: &LoopContext<'_>) -> Option<usize> {
        let Some(secure) = &mut self.secure else { return Some(0) };
        let was_handshaking = secure.is_handshaking();
        let Some(went) = secure.decrypt_to(&mut self.input, context.reactor.receive_buffers()) else {
            self.closing = Some(CloseReason::NoMemory);
            return None;
        };
        match went {
            Ok(0) if secure.has_ended() => self.draining = Some(self.farewell()),
            Ok(n) => {
                if was_handshaking && !secure.is_handshaking() {
                    self.guest.show(secure.peer());
                    // The lists may be newer than the handshake, which knows those of its beginning.
                    if self.guest.has_lost(None, self.tls.as_ref()) {
                        self.closing = Some(CloseReason::AccessLost);
                        return None;
                    }
                    self.machine.tls_established();
                }
                return Some(n);
            }
            // The client is told why.
            Err(error) => self.draining = Some(CloseReason::Tls(error)),
        }
        None
    }

    fn send(&mut self, context: &mut LoopContext<'_>) {
        if self.sending {
            return;
        }
        let mut gather = Gather::new();
        match &mut self.secure {
            Some(secure) => secure.seal(&mut self.out, &mut gather),
            None => std::mem::swap(&mut self.out, &mut gather),
        }
        if !gather.is_empty() {
            self.sending = true;
            self.sending_heap = gather.heap_bytes();
            self.started += 1;
            context.reactor.submit(Op::Send { socket: self.socket, gather }, self.token.with_tag(TAG_SEND));
        }
    }

    fn receive(&mut self, context: &mut LoopContext<'_>) {
        let buffers = context.reactor.receive_buffers();
        let lent = match &mut self.secure {
            Some(secure) => secure.lend(buffers),
            None => self.input.lend(buffers),
        };
        let Some((frame, at)) = lent else {
            self.closing = Some(CloseReason::NoMemory);
            return;
        };
        let room = frame.len() - at;
        self.receiving = true;
        self.started += 1;
        let into = Scatter::one(frame, at, room);
        context.reactor.submit(Op::Recv { socket: self.socket, into, min: 1 }, self.token.with_tag(TAG_RECEIVE));
    }
}

/// The catalog as the handshake sees it: what the client may use.
struct CatalogExports<'a>(&'a Catalog, &'a Identity);

impl Exports for CatalogExports<'_> {
    fn list(&self) -> Vec<Export> {
        self.0.open_to(self.1).map(|open| export(open.volume, open.right)).collect()
    }

    fn find(&self, name: &str) -> Option<Export> {
        self.0.find_for(self.1, name).map(|open| export(open.volume, open.right))
    }
}

fn export(volume: &Volume, right: Right) -> Export {
    let mut flags = TransmissionFlags::SEND_FLUSH
        | TransmissionFlags::SEND_FUA
        | TransmissionFlags::CAN_MULTI_CONN
        | TransmissionFlags::SEND_CACHE
        | TransmissionFlags::SEND_DF;
    if right == Right::Read {
        flags |= TransmissionFlags::READ_ONLY;
    } else {
        flags |=
            TransmissionFlags::SEND_TRIM | TransmissionFlags::SEND_WRITE_ZEROES | TransmissionFlags::SEND_FAST_ZERO;
    }
    let minimum = volume.block_bytes();
    Export {
        name: volume.name().to_owned(),
        description: description(volume.options()),
        size_bytes: volume.len(),
        block: BlockSizes { minimum, preferred: minimum.max(4096), ..BlockSizes::default() },
        flags,
        allocation: true,
        tls_required: volume.options().tls_required,
    }
}

fn description(options: &VolumeOptions) -> String {
    match (options.volatile, options.description.as_str()) {
        (false, description) => description.to_owned(),
        (true, "") => VOLATILE.to_owned(),
        (true, description) => format!("{VOLATILE} {description}"),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use byway_reactor::{IoChoice, Outcome, Reactor, Wait};
    use byway_service::block::{Engine, Store, VolumeOptions};

    use super::*;

    fn option(number: u32, body: &[u8]) -> Vec<u8> {
        [b"IHAVEOPT", &number.to_be_bytes()[..], &(body.len() as u32).to_be_bytes(), body].concat()
    }

    fn volume(name: &str) -> Volume {
        let options = VolumeOptions { description: "d".repeat(4000), ..VolumeOptions::default() };
        Volume::new(name, Store::memory(name, 1 << 20).unwrap(), options)
    }

    /// Takes completions until a send of the greeting has ended, if one is in flight and the peer takes it.
    fn turn(greeting: &mut Greeting, context: &mut LoopContext<'_>) -> Option<Connection> {
        let mut completions = Vec::new();
        let until = context.reactor.now() + std::time::Duration::from_millis(20);
        context.reactor.reap(&mut completions, Wait::Until(until)).unwrap();
        for completion in completions {
            match completion.outcome {
                Outcome::Received { mut into, result } => greeting.received(&mut into, result.unwrap()),
                Outcome::Sent { gather, .. } => greeting.sent(gather),
                _ => {}
            }
        }
        greeting.advance(context, 0)
    }

    #[test]
    fn a_volume_that_was_replaced_while_the_answer_was_sent_is_not_served() {
        let mut reactor = Reactor::open(IoChoice::Epoll, 4 << 20).unwrap();
        let (mut engine, mut catalog) = (Engine::default(), Catalog::default());
        let old = volume("v");
        let new = old.replaced_by(
            Store::memory("v", 1 << 20).unwrap(),
            VolumeOptions { tls_required: true, ..VolumeOptions::default() },
        );
        catalog.replace(&mut engine, &mut reactor, &[Arc::new(old)]);
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let same = ours.try_clone().unwrap();
        let socket = reactor.adopt(std::os::fd::OwnedFd::from(ours)).unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&same, 1).unwrap();
        let mut greeting =
            Greeting::new(socket, Token::new(0x40, 0, 0, 0), HandshakeConfig::default(), None, Origin::Unix);
        // Enough answers that they do not fit into the socket, and GO behind them.
        let ask = b"\0\0\0\x01v\0\x01\0\x02";
        let said = [&b"\0\0\0\x03"[..], &option(6, ask).repeat(12), &option(7, ask)].concat();
        theirs.write_all(&said).unwrap();
        let mut context = LoopContext { reactor: &mut reactor, engine: &mut engine, catalog: &catalog };
        assert!(greeting.advance(&mut context, 0).is_none());
        for _ in 0..10 {
            assert!(turn(&mut greeting, &mut context).is_none(), "the answer has not gone");
        }
        assert!(greeting.chosen.is_some() && greeting.sending);
        catalog.replace(&mut engine, &mut reactor, &[Arc::new(new)]);
        let mut context = LoopContext { reactor: &mut reactor, engine: &mut engine, catalog: &catalog };
        let mut answer = vec![0; 1 << 16];
        while greeting.closing.is_none() {
            let _ = theirs.read(&mut answer);
            assert!(turn(&mut greeting, &mut context).is_none(), "a plain connection to what wants TLS");
        }
        assert_eq!(greeting.closing, Some(CloseReason::VolumeGone));
    }
}
