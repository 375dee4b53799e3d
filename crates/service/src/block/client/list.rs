//! Asking a server which volumes it has: one session, as many calls as the list is long, and done.

use std::time::Duration;

use byway_fabric::tls::TlsClient;
use byway_fabric::wire::{Header, Kind as Message};
use byway_fabric::{ClientId, CloseReason, Fabric, Handler, Identity, Options, Slot};
use byway_reactor::{Address, Reactor, Wait};
use byway_rpc::wire::{CallBody, ReplyBody};
use byway_rpc::{Calls, Progress};
use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromZeros, IntoBytes};

use super::super::wire::{
    Arguments, CallError, Listed, Method, VOLUME_READ_ONLY, VOLUME_TLS_REQUIRED, VOLUME_VOLATILE, read_list,
    read_status,
};
use super::blocking::ConnectError;
use super::request::VolumeError;
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
    let mut listing = Listing { calls: Calls::default(), volumes: Vec::new(), result: None, drained: false };
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
    calls: Calls<()>,
    volumes: Vec<ListedVolume>,
    result: Option<Result<(), ConnectError>>,
    drained: bool,
}

impl Listing {
    /// Asks for the volumes behind those that are here.
    fn ask(&mut self, fabric: &mut Fabric, reactor: &Reactor, session: Slot) {
        let mut arguments = Arguments::new_zeroed();
        arguments.offset.set(self.volumes.len() as u64);
        let call = self.calls.start((), reactor.now() + LIST_TIME_MAX);
        let mut body = CallBody::new_zeroed();
        body.call = U64::new(call);
        body.method = U16::new(Method::List as u16);
        body.arguments.copy_from_slice(arguments.as_bytes());
        fabric.send(session, Header::with_body(Message::Call, &body));
        fabric.set_owes(reactor, session, true);
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
    fn up(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: Slot) {
        let Some(agreed) = fabric.agreed(session).copied() else { return };
        self.calls.grant(agreed.credits);
        if self.calls.may_start() {
            self.ask(fabric, reactor, session);
        } else {
            fabric.close(reactor, session, CloseReason::Unexpected(Message::Welcome));
        }
    }

    fn message(
        &mut self,
        fabric: &mut Fabric,
        reactor: &mut Reactor,
        session: Slot,
        (kind, header): (Message, &Header),
        payload: &[u8],
    ) {
        if kind != Message::Reply {
            return fabric.close(reactor, session, CloseReason::Unexpected(kind));
        }
        let reply: ReplyBody = header.body();
        let Progress::Complete((), answer) = self.calls.replied(&reply, payload.len()) else { return };
        let listed = read_status(answer.status, &answer.result).map_err(ConnectError::Open);
        match listed.and_then(|()| self.answered(&answer.result, payload)) {
            Ok(true) => self.ask(fabric, reactor, session),
            Ok(false) => self.result = Some(Ok(())),
            Err(error) => self.result = Some(Err(error)),
        }
    }

    fn placed(&mut self, fabric: &mut Fabric, reactor: &mut Reactor, session: Slot, (kind, _): (Message, &Header)) {
        fabric.close(reactor, session, CloseReason::Unexpected(kind));
    }

    fn down(&mut self, _fabric: &mut Fabric, _reactor: &mut Reactor, _session: Slot, reason: CloseReason) {
        self.result.get_or_insert(Err(ConnectError::Session(reason)));
    }

    fn drained(&mut self, fabric: &mut Fabric, _reactor: &mut Reactor, session: Slot) {
        fabric.release(session);
        self.drained = true;
    }
}
