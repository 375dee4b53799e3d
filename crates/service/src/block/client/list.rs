//! Asking a server which volumes it has: one session, as many calls as the list is long, and done.

use std::time::Duration;

use byway_fabric::tls::TlsClient;
use byway_fabric::wire::{Header, Kind as Message};
use byway_fabric::{ClientId, CloseReason, Fabric, Handler, Identity, Options, SessionId};
use byway_reactor::{Address, Reactor, Wait};
use byway_rpc::message::Inline;
use byway_rpc::session::{Ask, Calls, CannotSend, Event, Spoken};
use zerocopy::{FromZeros, IntoBytes};

use super::super::wire::{
    Arguments, CallError, Listed, Method, PROTOCOL, VERSIONS, VOLUME_READ_ONLY, VOLUME_TLS_REQUIRED, VOLUME_VOLATILE,
    read_list, read_status,
};
use super::blocking::ConnectError;
use super::request::VolumeError;
use crate::host::sending::send_outbox;
use crate::limits::{LIST_TIME_MAX, LISTED_VOLUMES_MAX};

/// A volume of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedVolume {
    /// What it is asked for by.
    pub name: String,
    /// For people; often empty.
    pub description: String,
    /// Bytes.
    pub len: u64,
    /// What offsets and lengths must be multiples of.
    pub block_bytes: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// The contents go with the server process.
    pub volatile: bool,
    /// Refused on a plain wire.
    pub tls_required: bool,
}

impl From<Listed<'_>> for ListedVolume {
    fn from(listed: Listed<'_>) -> Self {
        let flags = listed.entry.flags.get();
        Self {
            name: String::from_utf8_lossy(listed.name).into_owned(),
            description: String::from_utf8_lossy(listed.description).into_owned(),
            len: listed.entry.len.get(),
            block_bytes: listed.entry.block_bytes.get(),
            read_only: flags & VOLUME_READ_ONLY != 0,
            volatile: flags & VOLUME_VOLATILE != 0,
            tls_required: flags & VOLUME_TLS_REQUIRED != 0,
        }
    }
}

/// The volumes of the server at `address`.
///
/// # Errors
/// See [`ConnectError`].
pub fn list(
    mut reactor: Reactor,
    address: Address,
    options: Options,
    tls: Option<TlsClient>,
) -> Result<Vec<ListedVolume>, ConnectError> {
    let mut fabric = Fabric::new(options);
    fabric.set_tls_client(tls);
    let client = ClientId(fabric.random().bytes16());
    let nonce = fabric.random().bytes16();
    let session = fabric.connect(&mut reactor, address, Identity { client, number: 1, nonce });
    let spoken = vec![Spoken { protocol: PROTOCOL, versions: VERSIONS, grant: None }];
    let calls = Calls::new(client.0, spoken);
    let mut listing = Listing { nonce, calls, volumes: Vec::new(), result: None, drained: false };
    let limit = reactor.now() + LIST_TIME_MAX;
    let mut completions = Vec::new();
    while !listing.drained {
        fabric.flush(&mut reactor, &mut listing);
        let (over, failed) = (reactor.now() >= limit, listing.result.is_some());
        if over && !failed {
            listing.result = Some(Err(VolumeError::Lost(LIST_TIME_MAX).into()));
        }
        // What has been asked for is here, or will not come; a moment for the farewell.
        if over || failed {
            fabric.close(&mut reactor, session, CloseReason::Closed);
            fabric.flush(&mut reactor, &mut listing);
        }
        if over && reactor.now() >= limit + FAREWELL {
            break;
        }
        let wait = if over { limit + FAREWELL } else { limit };
        if let Err(error) = reactor.reap(&mut completions, Wait::Until(wait)) {
            let error = byway_reactor::Errno::from_io_error(&error).unwrap_or(byway_reactor::Errno::IO);
            return Err(ConnectError::Session(CloseReason::Io(error)));
        }
        for completion in completions.drain(..) {
            fabric.handle(&mut reactor, completion, &mut listing);
        }
    }
    listing.result.unwrap_or(Err(ConnectError::Session(CloseReason::PeerClosed))).map(|()| listing.volumes)
}

/// How long the end of a session is waited for.
const FAREWELL: Duration = Duration::from_secs(1);

struct Listing {
    nonce: [u8; 16],
    calls: Calls<()>,
    volumes: Vec<ListedVolume>,
    result: Option<Result<(), ConnectError>>,
    drained: bool,
}

impl Listing {
    /// Asks for the volumes behind those that are here.
    fn ask(&mut self, fabric: &mut Fabric, reactor: &Reactor, session: SessionId) {
        let mut arguments = Arguments::new_zeroed();
        arguments.offset.set(self.volumes.len() as u64);
        let arguments = Inline::new(arguments.as_bytes()).unwrap_or(Inline::EMPTY);
        let ask = Ask { protocol: PROTOCOL, method: Method::List as u16, arguments: &arguments, windows: 0 };
        let now = reactor.now();
        match self.calls.call(session, &ask, (), now, now + LIST_TIME_MAX) {
            Ok((_, header)) => {
                fabric.send(session, header);
                fabric.set_expects_reply(reactor, session, true);
            }
            Err(((), CannotSend::NotServed(status))) => {
                self.result = Some(Err(ConnectError::Open(CallError::NotServed(status))));
            }
            Err(((), CannotSend::NoCredit | CannotSend::Ended)) => {
                self.result = Some(Err(ConnectError::Session(CloseReason::Unexpected(Message::Protocols))));
            }
        }
    }

    /// Takes an answer; says whether there are more volumes.
    fn answered(&mut self, result: &[u8], payload: &[u8]) -> Result<bool, ConnectError> {
        let malformed = ConnectError::Open(CallError::Malformed);
        let all = result.first_chunk::<8>().map_or(0, |count| u64::from_le_bytes(*count));
        let before = self.volumes.len();
        for listed in read_list(payload) {
            if self.volumes.len() == LISTED_VOLUMES_MAX {
                return Ok(false);
            }
            self.volumes.push(listed.ok_or(malformed)?.into());
        }
        // A list that shrinks meanwhile ends with an empty answer.
        Ok((self.volumes.len() as u64) < all && self.volumes.len() > before)
    }
}

impl Handler for Listing {
    fn up(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: SessionId) {
        self.calls.up(session, self.nonce, true);
        send_outbox(&mut self.calls, fabric);
        fabric.set_expects_reply(reactor, session, true);
    }

    fn message(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: SessionId,
        kind: Message,
        header: &Header,
        payload: &[u8],
    ) {
        if !matches!(kind, Message::Reply | Message::Protocols) {
            return fabric.close(reactor, session, CloseReason::Unexpected(kind));
        }
        let (answer, payload) = match self.calls.message(session, kind, header, payload) {
            Ok(Event::Ended((), answer, payload)) => (answer, payload),
            Ok(Event::Ready(_)) if kind == Message::Protocols => return self.ask(fabric, reactor, session),
            Ok(_) => return,
            Err(_) => return fabric.close(reactor, session, CloseReason::Unexpected(kind)),
        };
        let listed = read_status(answer.status, &answer.result).map_err(ConnectError::Open);
        match listed.and_then(|()| self.answered(&answer.result, payload)) {
            Ok(true) => self.ask(fabric, reactor, session),
            Ok(false) => self.result = Some(Ok(())),
            Err(error) => self.result = Some(Err(error)),
        }
    }

    fn placed(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: SessionId, kind: Message, _: &Header) {
        fabric.close(reactor, session, CloseReason::Unexpected(kind));
    }

    fn down(&mut self, _fabric: &mut Fabric, _reactor: &mut Reactor, _session: SessionId, reason: CloseReason) {
        self.result.get_or_insert(Err(ConnectError::Session(reason)));
    }

    fn drained(&mut self, fabric: &mut Fabric, _reactor: &mut Reactor, session: SessionId) {
        fabric.release(session);
        self.drained = true;
    }
}
