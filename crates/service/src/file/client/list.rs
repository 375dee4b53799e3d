//! The shares of a server.

use byway_fabric::node::{Deadline, NodeOptions, OpError};
use byway_fabric::tls::TlsClient;
use byway_reactor::Address;
use byway_rpc::node::{Call, Reply, Rpc};
use byway_rpc::protocol::CALLS_FILES;
use zerocopy::{FromBytes, IntoBytes};

use super::super::wire::{Arguments, CallError, Method, PROTOCOL, SHARE_READ_ONLY, ShareEntry};
use super::{ClientError, NONE};
use crate::limits::{LIST_TIME_MAX, LISTED_VOLUMES_MAX};

/// A share of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedShare {
    /// Its name.
    pub name: String,
    /// Changes are refused.
    pub read_only: bool,
    /// For people.
    pub description: String,
}

/// Lists the shares of a server that this client may use. A server that serves none has none.
///
/// # Errors
/// See [`ClientError`].
pub fn list(address: &Address, tls: Option<&TlsClient>) -> Result<Vec<ListedShare>, ClientError> {
    let rpc = Rpc::open_for(&NodeOptions::default(), vec![CALLS_FILES]).map_err(ClientError::Node)?;
    let deadline = Deadline::after(LIST_TIME_MAX);
    let connected = match tls {
        Some(tls) => rpc.node().connect_secure(address, tls, deadline),
        None => rpc.node().connect(address, deadline),
    };
    let session = connected.map_err(ClientError::Connect)?;
    let mut shares = Vec::new();
    while shares.len() < LISTED_VOLUMES_MAX {
        let arguments = Arguments { offset: (shares.len() as u64).into(), ..NONE };
        let (protocol, method, arguments) = (PROTOCOL, Method::List as u16, arguments.as_bytes());
        let call = Call { protocol, method, arguments, ..Call::default() };
        let asked = rpc.call(session, &call, deadline).map(|op| op.wait(deadline));
        let Ok(Ok(answer)) = asked else { return Err(ClientError::Lost) };
        let reply = match answer {
            Ok(outcome) => Reply::of(outcome).map_err(|_| ClientError::Lost)?,
            Err(OpError::Status(status)) => match CallError::from_status(status) {
                CallError::NotServed(_) => break,
                error => return Err(ClientError::Refused { share: String::new(), error }),
            },
            Err(_) => return Err(ClientError::Lost),
        };
        let before = shares.len();
        read(&reply.payload, &mut shares).ok_or(ClientError::Lost)?;
        let count = reply.result[..].first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        if shares.len() == before || shares.len() as u64 >= count {
            break;
        }
    }
    let _ = rpc.node().close(session);
    Ok(shares)
}

fn read(mut payload: &[u8], shares: &mut Vec<ListedShare>) -> Option<()> {
    while !payload.is_empty() {
        let (entry, rest) = ShareEntry::read_from_prefix(payload).ok()?;
        let (name, rest) = rest.split_at_checked(entry.name_len.get().into())?;
        let (description, rest) = rest.split_at_checked(entry.description_len.get().into())?;
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        let read_only = entry.flags.get() & SHARE_READ_ONLY != 0;
        shares.push(ListedShare { name: text(name), read_only, description: text(description) });
        payload = rest;
    }
    Some(())
}
