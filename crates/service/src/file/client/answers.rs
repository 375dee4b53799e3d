//! What answers of the server have in them.

use byway_reactor::Errno;
use byway_rpc::node::Reply;
use zerocopy::FromBytes;

use super::super::wire::{Entry, OpenResult};

pub(super) fn entry_of(reply: &Reply) -> Result<Entry, Errno> {
    Entry::read_from_prefix(&reply.payload).map(|(entry, _)| entry).map_err(|_| Errno::PROTO)
}

pub(super) fn handle_of(reply: &Reply) -> Result<u64, Errno> {
    OpenResult::read_from_bytes(&reply.result[..]).map(|result| result.handle.get()).map_err(|_| Errno::PROTO)
}

pub(super) fn number_of(reply: &Reply) -> Result<u64, Errno> {
    reply.result[..].first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes)).ok_or(Errno::PROTO)
}
