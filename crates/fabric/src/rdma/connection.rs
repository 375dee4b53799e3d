//! Connections by the RDMA connection manager: a channel of events, listeners, endpoints.
//!
//! A client calls [`EventChannel::connect`], answers [`EventKind::AddressResolved`] by [`Endpoint::resolve_route`] and
//! [`EventKind::RouteResolved`] by [`Endpoint::create_queue_pair`] and [`Endpoint::connect`]. A server gets
//! [`EventKind::ConnectRequest`] with an endpoint, and answers by `create_queue_pair` and [`Endpoint::accept`]. Both may
//! post when [`EventKind::Established`] has come.

use std::cell::RefCell;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::Arc;

use byway_reactor::Errno;

use super::address::to_storage;
use super::device::Device;
use super::endpoint::{AskedEndpoint, Endpoint, Listener};
use super::error::{RdmaError, errno_of};
use super::identifier::{Identifier, Known, RawChannel, RawIdentifier};
use super::library::Library;
use super::quarantine::Quarantine;
use super::verbs::{self, CmEvent, CmId};
use crate::limits::{RDMA_BACKLOG, RDMA_RESOLVE_TIME_MAX};
use crate::slots::{Slot, Slots};

/// What `status` is in a rejection by the peer's program, and by a machine without a listener: the reasons of the InfiniBand
/// specification, volume 1, 12.6.7.2.
const REASON_CONSUMER: i32 = 28;
const REASON_NO_LISTENER: i32 = 8;

/// Where the events of some listeners and endpoints arrive.
#[derive(Clone)]
pub struct EventChannel(Rc<Channel>);

pub(super) struct Channel {
    raw: Arc<RawChannel>,
    /// By the number that each identifier has as its context.
    pub(super) ids: RefCell<Slots<Known>>,
    /// Of its devices; what is there holds the channel.
    pub(super) quarantine: RefCell<Quarantine>,
}

/// Something happened to a listener or endpoint.
#[derive(Debug)]
pub struct Event {
    /// The owner's label of it.
    pub token: u64,
    /// What happened.
    pub kind: EventKind,
}

/// What can happen to a listener or endpoint.
#[derive(Debug)]
pub enum EventKind {
    /// The peer's address is known, and by it the device.
    AddressResolved,
    /// The way to the peer is known.
    RouteResolved,
    /// A peer wants to connect; the token is the listener's. Dropping the endpoint refuses.
    ConnectRequest {
        /// The connection to be.
        endpoint: Endpoint,
        /// The peer's private data, maybe with zeros behind it.
        private_data: Vec<u8>,
    },
    /// Both may post. A client gets the server's private data, maybe with zeros behind it.
    Established {
        /// The server's private data.
        private_data: Vec<u8>,
    },
    /// The peer, or this side, has ended the connection: [`Endpoint::disconnect`] or drop it.
    Disconnected,
    /// The peer's program refused; its private data, maybe with zeros behind it.
    Rejected {
        /// What it said.
        private_data: Vec<u8>,
    },
    /// There is no listener.
    NobodyListens,
    /// The address, the way or the peer cannot be found, or the connection manager gave up.
    Failed(Errno),
    /// The device is being removed: drop all that is on it.
    DeviceRemoved,
    /// Something that needs no answer, by its number in `enum rdma_cm_event_type`.
    Other(u32),
}

impl Channel {
    pub(super) fn open(library: Library) -> Result<Rc<Self>, RdmaError> {
        let raw = Arc::new(RawChannel::open(library)?);
        Ok(Rc::new(Self { raw, ids: RefCell::default(), quarantine: RefCell::default() }))
    }

    pub(super) fn raw(&self) -> &Arc<RawChannel> {
        &self.raw
    }
}

impl EventChannel {
    /// A new one. Its descriptor does not block.
    ///
    /// # Errors
    /// [`RdmaError::KernelMissing`] without a connection manager.
    pub fn new(library: Library) -> Result<Self, RdmaError> {
        let channel = Self(Channel::open(library)?);
        rustix::io::ioctl_fionbio(channel.as_fd(), true)
            .map_err(|errno| RdmaError::System { call: "ioctl(FIONBIO)", errno })?;
        Ok(channel)
    }

    /// Listens at `address`; port 0 is one of the system's choice. Its events carry `token`.
    ///
    /// # Errors
    /// [`RdmaError::NoDeviceAt`], or the system's.
    pub fn listen(&self, address: SocketAddr, token: u64) -> Result<Listener, RdmaError> {
        let identifier = Identifier::new(&self.0, token)?;
        let mut storage = to_storage(address);
        // SAFETY: the identifier is live and the address valid for the call.
        if unsafe { (identifier.manager().rdma_bind_addr)(identifier.raw.as_ptr(), &raw mut storage) } != 0 {
            let error = RdmaError::last("rdma_bind_addr");
            let is_unknown = error.is(Errno::NODEV) || error.is(Errno::ADDRNOTAVAIL);
            return Err(if is_unknown { RdmaError::NoDeviceAt(address.ip()) } else { error });
        }
        // SAFETY: the identifier is live and bound.
        if unsafe { (identifier.manager().rdma_listen)(identifier.raw.as_ptr(), RDMA_BACKLOG) } != 0 {
            return Err(RdmaError::last("rdma_listen"));
        }
        Ok(Listener::new(identifier))
    }

    /// Releases removed devices that are no longer used; otherwise the kernel may wait for them.
    pub fn forget_removed_devices(&self) {
        self.0.raw.library().forget_removed_devices();
    }

    /// Whether memory of devices that the kernel has taken away is kept in quarantine.
    pub fn has_aside(&self) -> bool {
        !self.0.quarantine.borrow().is_empty()
    }

    /// A pause is over: hands back the memory that was kept in quarantine during all of it.
    pub fn hand_back(&self) {
        let free = self.0.quarantine.borrow_mut().pause_over();
        if !free.is_empty() {
            tracing::info!(pieces = free.len(), "memory of an RDMA device that was taken away is free again");
        }
    }

    /// Opens the device that has the local address `at`. The news that it is being removed carries `token`, see
    /// [`Device::set_token`]; it goes only when its last handle, and all that was made from it, are dropped.
    ///
    /// # Errors
    /// As for [`Device::open`].
    pub fn open_device(&self, at: IpAddr, token: u64) -> Result<Device, RdmaError> {
        Device::bind(Identifier::new(&self.0, token)?, at)
    }

    /// Starts to look for the way to `to`, from the local address `from` if one is given. Its events carry `token`.
    ///
    /// # Errors
    /// The system's; what takes longer arrives as [`EventKind::Failed`].
    pub fn connect(&self, to: SocketAddr, from: Option<IpAddr>, token: u64) -> Result<Endpoint, RdmaError> {
        let identifier = Identifier::new(&self.0, token)?;
        let mut to = to_storage(to);
        let mut from = from.map(|address| to_storage(SocketAddr::new(address, 0)));
        let source = from.as_mut().map_or(ptr::null_mut(), |storage| &raw mut *storage);
        let timeout_ms = RDMA_RESOLVE_TIME_MAX.as_millis() as i32;
        let resolve = identifier.manager().rdma_resolve_addr;
        // SAFETY: the identifier is live and the addresses valid for the call.
        if unsafe { resolve(identifier.raw.as_ptr(), source, &raw mut to, timeout_ms) } != 0 {
            return Err(RdmaError::last("rdma_resolve_addr"));
        }
        Ok(Endpoint::new(identifier))
    }

    /// Takes over a connection that was asked for at a listener of another channel, whose thread need not be this one. The label of
    /// its events is `u64::MAX`.
    ///
    /// # Errors
    /// The system's; the connection is refused.
    pub fn adopt(&self, asked: AskedEndpoint) -> Result<Endpoint, RdmaError> {
        Ok(Endpoint::new(Identifier::adopt(&self.0, asked.0.migrate(self.0.raw())?)))
    }

    /// The next event, if there is one.
    ///
    /// # Errors
    /// The system's.
    pub fn next_event(&self) -> Result<Option<Event>, RdmaError> {
        let manager = self.0.raw.library().connection();
        loop {
            let mut raw = ptr::null_mut();
            // SAFETY: the channel is open, and the place for the result is valid for the call.
            if unsafe { (manager.rdma_get_cm_event)(self.0.raw.as_ptr(), &raw mut raw) } != 0 {
                let error = RdmaError::last("rdma_get_cm_event");
                return if error.is(Errno::AGAIN) { Ok(None) } else { Err(error) };
            }
            // SAFETY: the library gave out a valid event, which lives until it is acknowledged below.
            let event = self.understand(unsafe { &*raw });
            // SAFETY: the event came from rdma_get_cm_event, and is acknowledged once; nothing of it is kept.
            unsafe { (manager.rdma_ack_cm_event)(raw) };
            if event.is_some() {
                return Ok(event);
            }
        }
    }

    /// None for an event of an identifier that is gone.
    fn understand(&self, event: &CmEvent) -> Option<Event> {
        if event.event == verbs::RDMA_CM_EVENT_CONNECT_REQUEST {
            // SAFETY: the identifier came with the event on this channel, is live and has no other owner.
            let raw = unsafe { RawIdentifier::of_request(NonNull::new(event.id)?, self.0.raw()) };
            let identifier = Identifier::adopt(&self.0, raw);
            let endpoint = Endpoint::new(identifier);
            let listener = NonNull::new(event.listen_id)?;
            let kind = EventKind::ConnectRequest { endpoint, private_data: private_data(event) };
            return Some(Event { token: self.token_of(listener)?, kind });
        }
        let id = NonNull::new(event.id)?;
        let token = self.token_of(id)?;
        let kind = match event.event {
            verbs::RDMA_CM_EVENT_ADDR_RESOLVED => EventKind::AddressResolved,
            verbs::RDMA_CM_EVENT_ROUTE_RESOLVED => EventKind::RouteResolved,
            verbs::RDMA_CM_EVENT_ESTABLISHED => {
                self.set_established(id, true);
                EventKind::Established { private_data: private_data(event) }
            }
            verbs::RDMA_CM_EVENT_DISCONNECTED => {
                self.set_established(id, false);
                EventKind::Disconnected
            }
            verbs::RDMA_CM_EVENT_REJECTED => match event.status {
                REASON_CONSUMER => EventKind::Rejected { private_data: private_data(event) },
                REASON_NO_LISTENER => EventKind::NobodyListens,
                _ => EventKind::Failed(Errno::CONNREFUSED),
            },
            verbs::RDMA_CM_EVENT_ADDR_ERROR
            | verbs::RDMA_CM_EVENT_ROUTE_ERROR
            | verbs::RDMA_CM_EVENT_CONNECT_ERROR
            | verbs::RDMA_CM_EVENT_UNREACHABLE => EventKind::Failed(errno_of(event.status)),
            verbs::RDMA_CM_EVENT_DEVICE_REMOVAL => EventKind::DeviceRemoved,
            // The numbers of an ended connection may be used again; nothing waits for that.
            verbs::RDMA_CM_EVENT_TIMEWAIT_EXIT => return None,
            other => EventKind::Other(other),
        };
        Some(Event { token, kind })
    }

    fn token_of(&self, id: NonNull<CmId>) -> Option<u64> {
        // SAFETY: an identifier with an event is not destroyed before the event is acknowledged.
        let context = unsafe { (*id.as_ptr()).context };
        let ids = self.0.ids.borrow();
        ids.get(Slot::from_u64(context.addr() as u64)).map(|known| known.token)
    }

    fn set_established(&self, id: NonNull<CmId>, is_established: bool) {
        // SAFETY: as in `token_of`.
        let context = unsafe { (*id.as_ptr()).context };
        if let Some(known) = self.0.ids.borrow().get(Slot::from_u64(context.addr() as u64)) {
            known.is_established.set(is_established);
        }
    }
}

/// Copied, since the event does not last.
fn private_data(event: &CmEvent) -> Vec<u8> {
    let (data, len) = (event.conn.private_data.cast::<u8>(), usize::from(event.conn.private_data_len));
    if data.is_null() || len == 0 {
        return Vec::new();
    }
    // SAFETY: the library keeps so many bytes there until the event is acknowledged; connected events use this member of
    // the union, and the others have zero here.
    unsafe { std::slice::from_raw_parts(data, len) }.to_vec()
}

impl AsFd for EventChannel {
    /// Readable when there is an event; to be polled, never read.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is open while this handle is.
        unsafe { BorrowedFd::borrow_raw((*self.0.raw.as_ptr()).fd) }
    }
}

impl std::fmt::Debug for EventChannel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EventChannel({} identifiers)", self.0.ids.borrow().len())
    }
}
