//! A connection before it has chosen an export: moves the bytes of the handshake machine.

use byway_reactor::{Gather, Op, Scatter, Socket, Token};
use byway_service::block::{Catalog, Volume};

use super::Floor;
use super::connection::{Connection, End, TAG_RECEIVE, TAG_SEND};
use super::input::Input;
use crate::nbd::export::{Export, Exports};
use crate::nbd::flags::TransmissionFlags;
use crate::nbd::handshake::{Handshake, HandshakeConfig, Negotiated, Step};
use crate::nbd::request::BlockSizes;
use crate::nbd::transmission::Transmission;

pub(super) struct Greeting {
    socket: Socket,
    token: Token,
    machine: Handshake,
    input: Input,
    out: Vec<u8>,
    receiving: bool,
    sending: bool,
    /// Operations started and not yet reported.
    started: u32,
    /// What the machine decided; done when the output has gone.
    chosen: Option<Box<Negotiated>>,
    /// The client took its leave, or broke the protocol.
    pub(super) end: Option<End>,
    /// The connection is to be closed now.
    pub(super) over: Option<End>,
}

impl Greeting {
    pub(super) fn new(socket: Socket, token: Token, config: HandshakeConfig) -> Self {
        let mut out = Vec::new();
        let machine = Handshake::new(config, &mut out);
        Self {
            socket,
            token,
            machine,
            input: Input::default(),
            out,
            receiving: false,
            sending: false,
            started: 0,
            chosen: None,
            end: None,
            over: None,
        }
    }

    pub(super) fn received(&mut self, into: &mut Scatter, n: usize) {
        self.receiving = false;
        for piece in into.drain() {
            self.input.give(piece.frame, n);
        }
    }

    pub(super) fn sent(&mut self, gather: Gather) {
        self.sending = false;
        drop(gather);
    }

    /// Operations started since the last call.
    pub(super) fn started_operations(&mut self) -> u32 {
        std::mem::take(&mut self.started)
    }

    pub(super) fn is_idle(&self) -> bool {
        !self.sending && self.out.is_empty()
    }

    /// Does what can be done now. Gives the connection once the export is chosen.
    pub(super) fn advance(&mut self, floor: &mut Floor<'_>, index: usize) -> Option<Connection> {
        if self.over.is_some() {
            return None;
        }
        while !self.receiving && self.end.is_none() && self.chosen.is_none() && !self.sending {
            let before = self.input.bytes().len();
            let exports = CatalogExports(floor.catalog);
            let (taken, step) = match self.machine.receive(self.input.bytes(), &exports, &mut self.out) {
                Ok(went) => went,
                Err(error) => {
                    self.over = Some(End::Handshake(error));
                    return None;
                }
            };
            self.input.consume(taken);
            match step {
                Step::NeedMore => {
                    debug_assert_eq!(before, taken);
                    self.send(floor);
                    self.receive(floor);
                    break;
                }
                Step::Flush => self.send(floor),
                // Not offered as long as the configuration says that TLS is off.
                Step::StartTls | Step::Closed => self.end = Some(End::Disconnected),
                Step::Transmission(negotiated) => self.chosen = Some(negotiated),
            }
        }
        self.send(floor);
        if self.sending || self.receiving {
            return None;
        }
        let negotiated = self.chosen.take()?;
        let Some((_, volume)) = floor.catalog.find(&negotiated.export.name) else {
            self.over = Some(End::VolumeGone);
            return None;
        };
        let input = std::mem::take(&mut self.input);
        let transmission = Transmission::new(negotiated.rules);
        Some(Connection::new((self.socket, self.token, index), volume, transmission, input))
    }

    fn send(&mut self, floor: &mut Floor<'_>) {
        if !self.sending && !self.out.is_empty() {
            let mut gather = Gather::new();
            gather.push_head(&self.out);
            self.out.clear();
            self.sending = true;
            self.started += 1;
            floor.reactor.submit(Op::Send { socket: self.socket, gather }, self.token.with_tag(TAG_SEND));
        }
    }

    fn receive(&mut self, floor: &mut Floor<'_>) {
        let Some((frame, at)) = self.input.lend(floor.reactor.frames()) else {
            self.over = Some(End::NoMemory);
            return;
        };
        let room = frame.len() - at;
        self.receiving = true;
        self.started += 1;
        let into = Scatter::one(frame, at, room);
        floor.reactor.submit(Op::Recv { socket: self.socket, into, min: 1 }, self.token.with_tag(TAG_RECEIVE));
    }
}

/// The catalog as the handshake sees it.
struct CatalogExports<'a>(&'a Catalog);

impl Exports for CatalogExports<'_> {
    fn list(&self) -> Vec<Export> {
        self.0.iter().map(|volume| export(volume)).collect()
    }

    fn find(&self, name: &str) -> Option<Export> {
        self.0.find(name).map(|(volume, _)| export(volume))
    }
}

fn export(volume: &Volume) -> Export {
    let mut flags = TransmissionFlags::SEND_FLUSH
        | TransmissionFlags::SEND_FUA
        | TransmissionFlags::CAN_MULTI_CONN
        | TransmissionFlags::SEND_CACHE
        | TransmissionFlags::SEND_DF;
    if volume.is_read_only() {
        flags |= TransmissionFlags::READ_ONLY;
    } else {
        flags |=
            TransmissionFlags::SEND_TRIM | TransmissionFlags::SEND_WRITE_ZEROES | TransmissionFlags::SEND_FAST_ZERO;
    }
    let minimum = volume.block_bytes();
    Export {
        name: volume.name().to_owned(),
        description: volume.options().description.clone(),
        size_bytes: volume.len(),
        block: BlockSizes { minimum, preferred: minimum.max(4096), ..BlockSizes::default() },
        flags,
        allocation: true,
        tls_required: volume.options().tls_required,
    }
}
