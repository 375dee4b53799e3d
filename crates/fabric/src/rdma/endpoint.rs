//! The ends of connections: listeners and endpoints.

use std::net::SocketAddr;

#[cfg(doc)]
use super::connection::EventKind;
use super::error::{PostError, RdmaError, Refused};
use super::identifier::{Identifier, RawIdentifier};
use super::queue_pair::{QueuePair, QueuePairOptions, Report, Work};
use super::receive::SharedReceiveQueue;
use super::verbs::{self, CmId, ConnParam};
use crate::limits::{RDMA_ACCEPT_BYTES_MAX, RDMA_CONNECT_BYTES_MAX, RDMA_REJECT_BYTES_MAX, RDMA_RESOLVE_TIME_MAX};

/// As often as a packet can be sent again: the field has three bits. For a peer without a receive, 7 means for ever:
/// credits bound how long that lasts, and the keep-alive of the layer above ends it.
const RETRIES: u8 = 7;

/// A place where connect requests arrive, until it is dropped.
pub struct Listener(Identifier);

impl Listener {
    pub(super) const fn new(identifier: Identifier) -> Self {
        Self(identifier)
    }

    /// Where it listens.
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.0.local_address()
    }
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Listener({:?})", self.local_address())
    }
}

/// One end of a connection. Dropping it ends the connection and completes what is posted.
pub struct Endpoint {
    /// Before the identifier, which must outlive it.
    queue_pair: Option<QueuePair>,
    identifier: Identifier,
}

/// A connection that was asked for and not answered, on its way to the channel of another thread
/// ([`EventChannel::adopt`](super::EventChannel::adopt)). Dropping it refuses.
pub struct AskedEndpoint(pub(super) RawIdentifier);

impl std::fmt::Debug for AskedEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AskedEndpoint")
    }
}

impl Endpoint {
    pub(super) const fn new(identifier: Identifier) -> Self {
        Self { queue_pair: None, identifier }
    }

    /// Lets go of an endpoint of a connect request that was not answered, for another channel.
    ///
    /// # Errors
    /// The endpoint, if it has a queue pair.
    pub fn into_asked(self) -> Result<AskedEndpoint, Self> {
        if self.queue_pair.is_some() { Err(self) } else { Ok(AskedEndpoint(self.identifier.into_raw())) }
    }

    /// Changes the label that its events carry; that of a connect request's endpoint is `u64::MAX`.
    pub fn set_token(&self, token: u64) {
        self.identifier.set_token(token);
    }

    /// The local address, by which its device can be [opened](super::Device::open).
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.identifier.local_address()
    }

    /// The peer's address.
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.identifier.peer_address()
    }

    /// Answers [`EventKind::AddressResolved`].
    ///
    /// # Errors
    /// The system's.
    pub fn resolve_route(&self) -> Result<(), RdmaError> {
        let resolve = self.identifier.manager().rdma_resolve_route;
        // SAFETY: the identifier is live.
        match unsafe { resolve(self.identifier.raw.as_ptr(), RDMA_RESOLVE_TIME_MAX.as_millis() as i32) } {
            0 => Ok(()),
            _ => Err(RdmaError::last("rdma_resolve_route")),
        }
    }

    /// Gives the endpoint its queue pair, with the domain and completion queue of `receives`.
    ///
    /// # Errors
    /// [`RdmaError::OtherDevice`] if the endpoint's device is not that of `receives`; [`RdmaError::State`] if it has one.
    pub fn create_queue_pair(
        &mut self,
        receives: &SharedReceiveQueue,
        options: QueuePairOptions,
    ) -> Result<(), RdmaError> {
        if self.queue_pair.is_some() {
            return Err(RdmaError::State("create_queue_pair"));
        }
        // SAFETY: the identifier is live, has no queue pair, and is dropped after it, by the order of the fields.
        let queue_pair = unsafe { QueuePair::create(self.identifier.raw.pointer(), receives, options) }?;
        self.queue_pair = Some(queue_pair);
        Ok(())
    }

    /// Asks the server for the connection, with at most [`RDMA_CONNECT_BYTES_MAX`] bytes for it.
    ///
    /// # Errors
    /// [`RdmaError::State`] without a queue pair, [`RdmaError::PrivateData`], or the system's.
    pub fn connect(&self, private_data: &[u8]) -> Result<(), RdmaError> {
        self.agree("connect", private_data, RDMA_CONNECT_BYTES_MAX, self.identifier.manager().rdma_connect)
    }

    /// Accepts the connection, with at most [`RDMA_ACCEPT_BYTES_MAX`] bytes for the client.
    ///
    /// # Errors
    /// As for [`Self::connect`].
    pub fn accept(&self, private_data: &[u8]) -> Result<(), RdmaError> {
        self.agree("accept", private_data, RDMA_ACCEPT_BYTES_MAX, self.identifier.manager().rdma_accept)
    }

    fn agree(
        &self,
        what: &'static str,
        data: &[u8],
        most: usize,
        call: unsafe extern "C" fn(*mut CmId, *mut ConnParam) -> i32,
    ) -> Result<(), RdmaError> {
        if self.queue_pair.is_none() {
            return Err(RdmaError::State(what));
        }
        check_private_data(data, most)?;
        let mut parameters = ConnParam {
            private_data: data.as_ptr().cast(),
            private_data_len: data.len() as u8,
            responder_resources: verbs::RDMA_MAX_RESP_RES,
            initiator_depth: verbs::RDMA_MAX_INIT_DEPTH,
            flow_control: 1,
            retry_count: RETRIES,
            rnr_retry_count: RETRIES,
            srq: 1,
            qp_num: 0,
        };
        // SAFETY: the identifier is live with a queue pair; parameters and private data are valid for the call, which
        // copies them.
        match unsafe { call(self.identifier.raw.as_ptr(), &raw mut parameters) } {
            0 => Ok(()),
            _ => Err(RdmaError::last(what)),
        }
    }

    /// Refuses the connection, with at most [`RDMA_REJECT_BYTES_MAX`] bytes for the client.
    ///
    /// # Errors
    /// [`RdmaError::PrivateData`], or the system's.
    pub fn reject(&self, private_data: &[u8]) -> Result<(), RdmaError> {
        check_private_data(private_data, RDMA_REJECT_BYTES_MAX)?;
        let (data, len) = (private_data.as_ptr().cast(), private_data.len() as u8);
        // SAFETY: the identifier is live, and the data valid for the call, which copies it.
        match unsafe { (self.identifier.manager().rdma_reject)(self.identifier.raw.as_ptr(), data, len) } {
            0 => Ok(()),
            _ => Err(RdmaError::last("reject")),
        }
    }

    /// Ends the connection, or answers [`EventKind::Disconnected`]: what is posted completes as flushed, and nothing more
    /// can be posted.
    pub fn disconnect(&self) {
        self.identifier.is_established.set(false);
        // SAFETY: the identifier is live. It fails for one that is not connected, which then need not be told.
        let _ = unsafe { (self.identifier.manager().rdma_disconnect)(self.identifier.raw.as_ptr()) };
        if let Some(queue_pair) = &self.queue_pair {
            queue_pair.fail();
        }
    }

    /// The number of its queue pair, as completions have it; 0 if there is none.
    pub fn queue_pair_number(&self) -> u32 {
        self.queue_pair.as_ref().map_or(0, QueuePair::number)
    }

    /// How many bytes can go inline; those of 128 bytes and fewer on most devices.
    pub fn inline_bytes_max(&self) -> usize {
        self.queue_pair.as_ref().map_or(0, QueuePair::inline_bytes_max) as usize
    }

    /// Posts an operation; inline where it fits. It completes once, with its memory and `token`.
    ///
    /// # Errors
    /// With the operation, unless the connection broke over it: see [`PostError::Broken`].
    #[expect(clippy::result_large_err, reason = "gives the operation back, without an allocation")]
    pub fn post(&self, work: Work, token: u64, report: Report) -> Result<(), Refused> {
        match self.connected() {
            Ok(queue_pair) => queue_pair.post(work, token, report),
            Err(error) => Err(Refused { error, work: Some(work) }),
        }
    }

    /// Sends a message of 1 to [`Self::inline_bytes_max`] bytes, which are copied: they need no registration.
    ///
    /// # Errors
    /// [`PostError::TooLong`], and as for [`Self::post`].
    pub fn send_inline(&self, bytes: &[u8], token: u64, report: Report) -> Result<(), PostError> {
        self.connected()?.send_inline(bytes, None, token, report)
    }

    /// The same with a number beside the message.
    ///
    /// # Errors
    /// As for [`Self::send_inline`].
    pub fn send_inline_with(&self, bytes: &[u8], immediate: u32, token: u64, report: Report) -> Result<(), PostError> {
        self.connected()?.send_inline(bytes, Some(immediate), token, report)
    }

    /// Whether an operation can be posted now.
    ///
    /// # Errors
    /// [`PostError::Full`] and [`PostError::NotConnected`].
    pub fn check_room(&self) -> Result<(), PostError> {
        self.connected()?.check_room()
    }

    fn connected(&self) -> Result<&QueuePair, PostError> {
        let is_established = self.identifier.is_established.get();
        self.queue_pair.as_ref().filter(|_| is_established).ok_or(PostError::NotConnected)
    }
}

fn check_private_data(data: &[u8], most: usize) -> Result<(), RdmaError> {
    if data.len() > most { Err(RdmaError::PrivateData { bytes: data.len(), most }) } else { Ok(()) }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Endpoint(queue pair {} to {:?})", self.queue_pair_number(), self.peer_address())
    }
}
