//! Devices: the list of them with their ports, and one that is opened by an address of it.

use std::cell::RefMut;
use std::ffi::CStr;
use std::net::{IpAddr, SocketAddr};
use std::ptr::NonNull;
use std::rc::Rc;

use byway_reactor::Errno;

use super::address;
use super::connection::Channel;
use super::error::RdmaError;
use super::identifier::Identifier;
use super::library::Library;
use super::quarantine::Quarantine;
use super::verbs::{self, Context, ContextOps, DeviceAttr, PortAttr};

/// A device of this machine, as the list has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The kernel's name of it, such as `mlx5_0` or `rxe0`.
    pub name: String,
    /// Its ports, the first one first.
    pub ports: Vec<PortInfo>,
}

/// A port of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortInfo {
    /// Counted from 1.
    pub number: u8,
    /// Whether it has a link.
    pub state: PortState,
    /// What it is plugged into.
    pub link: LinkLayer,
    /// The largest packet's payload on this link, in bytes.
    pub mtu_bytes: u32,
}

/// Whether a port can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// Yes.
    Active,
    /// No link.
    Down,
    /// On its way, by its number in `enum ibv_port_state`.
    Other(u32),
}

/// What a port is plugged into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RoCE, or iWARP.
    Ethernet,
    /// Something else, by its number.
    Other(u8),
}

impl Library {
    /// All RDMA devices that this process may see; none is an empty list.
    ///
    /// # Errors
    /// [`RdmaError::KernelMissing`] where the kernel has no verbs at all.
    pub fn devices(self) -> Result<Vec<DeviceInfo>, RdmaError> {
        let verbs = self.verbs();
        let mut count = 0;
        // SAFETY: `count` is valid for the call; the list is freed below and nothing of it is kept.
        let list = unsafe { (verbs.ibv_get_device_list)(&raw mut count) };
        if list.is_null() {
            let error = RdmaError::last("ibv_get_device_list");
            let is_missing = error.is(Errno::NOSYS) || error.is(Errno::NOENT);
            let missing = RdmaError::KernelMissing { what: "RDMA verbs", module: "ib_uverbs" };
            return Err(if is_missing { missing } else { error });
        }
        let describe = |index: usize| {
            // SAFETY: the list has `count` entries, all valid until it is freed.
            let device = unsafe { *list.add(index) };
            // SAFETY: the name is a string of C that lives as long as the device.
            let name = unsafe { CStr::from_ptr((verbs.ibv_get_device_name)(device)) };
            DeviceInfo { name: name.to_string_lossy().into_owned(), ports: self.ports_of(device) }
        };
        let devices = (0..count.max(0) as usize).map(describe).collect();
        // SAFETY: the list came from ibv_get_device_list, and this is the only time that it is freed.
        unsafe { (verbs.ibv_free_device_list)(list) };
        Ok(devices)
    }

    /// The ports of a device of the list; none if it cannot be opened.
    fn ports_of(self, device: *mut verbs::Device) -> Vec<PortInfo> {
        let verbs = self.verbs();
        // SAFETY: the caller's list is not freed yet.
        let Some(context) = NonNull::new(unsafe { (verbs.ibv_open_device)(device) }) else { return Vec::new() };
        let count = attributes(self, context).map_or(0, |attributes| attributes.phys_port_cnt);
        let ports = (1..=count).filter_map(|number| {
            let port = port_attributes(self, context, number).ok()?;
            Some(PortInfo::new(number, &port))
        });
        let ports = ports.collect();
        // SAFETY: the context was opened here, and nothing was made in it.
        unsafe { (verbs.ibv_close_device)(context.as_ptr()) };
        ports
    }
}

impl PortInfo {
    fn new(number: u8, port: &PortAttr) -> Self {
        let state = match port.state {
            verbs::IBV_PORT_ACTIVE => PortState::Active,
            verbs::IBV_PORT_DOWN => PortState::Down,
            other => PortState::Other(other),
        };
        let link = match i32::from(port.link_layer) {
            verbs::IBV_LINK_LAYER_INFINIBAND => LinkLayer::InfiniBand,
            verbs::IBV_LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
            _ => LinkLayer::Other(port.link_layer),
        };
        // `enum ibv_mtu` counts powers of two from 256 bytes, which is 1.
        Self { number, state, link, mtu_bytes: 128 << port.active_mtu.min(5) }
    }
}

fn attributes(library: Library, context: NonNull<Context>) -> Result<DeviceAttr, RdmaError> {
    // SAFETY: all its fields are numbers, for which zero is a value.
    let mut attributes: DeviceAttr = unsafe { std::mem::zeroed() };
    // SAFETY: the context is open and the structure is as long as the library's.
    let status = unsafe { (library.verbs().ibv_query_device)(context.as_ptr(), &raw mut attributes) };
    if status == 0 { Ok(attributes) } else { Err(RdmaError::returned("ibv_query_device", status)) }
}

/// The symbol fills the part of the structure that there was when it was made, which has all that is used here.
fn port_attributes(library: Library, context: NonNull<Context>, port: u8) -> Result<PortAttr, RdmaError> {
    let mut attributes = PortAttr::default();
    // SAFETY: the context is open and the structure is at least as long as what the symbol fills.
    let status = unsafe { (library.verbs().ibv_query_port)(context.as_ptr(), port, &raw mut attributes) };
    if status == 0 { Ok(attributes) } else { Err(RdmaError::returned("ibv_query_port", status)) }
}

/// A device that is open, with its limits. Cloning it gives another handle.
#[derive(Clone)]
pub struct Device(pub(super) Rc<DeviceInner>);

/// The context belongs to librdmacm, which shares it with all endpoints of the device and may close it when the device
/// has gone and no identifier is bound to it; so one is kept bound.
pub(super) struct DeviceInner {
    pub(super) library: Library,
    pub(super) context: NonNull<Context>,
    pub(super) ops: ContextOps,
    attributes: DeviceAttr,
    pub(super) message_bytes_max: u32,
    anchor: Identifier,
}

impl DeviceInner {
    /// Whether the kernel has taken the device away: it says `EIO` also of the port that each device has.
    pub(super) fn is_taken_away(&self) -> bool {
        port_attributes(self.library, self.context, 1).is_err_and(|error| error.is(Errno::IO))
    }
}

impl Device {
    /// The device that has the local address `at`. Its removal is not reported, see
    /// [`EventChannel::open_device`](super::EventChannel::open_device).
    ///
    /// # Errors
    /// [`RdmaError::NoDeviceAt`] if none has, [`RdmaError::KernelMissing`] without a connection manager.
    pub fn open(library: Library, at: IpAddr) -> Result<Self, RdmaError> {
        Self::bind(Identifier::new(&Channel::open(library)?, u64::MAX)?, at)
    }

    pub(super) fn bind(anchor: Identifier, at: IpAddr) -> Result<Self, RdmaError> {
        let library = anchor.library();
        let mut address = address::to_storage(SocketAddr::new(at, 0));
        // SAFETY: the identifier is live and the address is valid for the call.
        if unsafe { (anchor.manager().rdma_bind_addr)(anchor.raw.as_ptr(), &raw mut address) } != 0 {
            let error = RdmaError::last("rdma_bind_addr");
            let is_unknown = error.is(Errno::NODEV) || error.is(Errno::ADDRNOTAVAIL);
            return Err(if is_unknown { RdmaError::NoDeviceAt(at) } else { error });
        }
        // SAFETY: the identifier is live, and bound identifiers have the context of their device.
        let (context, port) = unsafe { ((*anchor.raw.as_ptr()).verbs, (*anchor.raw.as_ptr()).port_num) };
        let context = NonNull::new(context).ok_or(RdmaError::NoDeviceAt(at))?;
        let attributes = attributes(library, context)?;
        let message_bytes_max = port_attributes(library, context, port.max(1))?.max_msg_sz;
        // SAFETY: the context is open while the anchor is bound. The provider fills the table before it gives the
        // context out, and does not change it.
        let ops = unsafe { (*context.as_ptr()).ops };
        let inner = DeviceInner { library, context, ops, attributes, message_bytes_max, anchor };
        Ok(Self(Rc::new(inner)))
    }

    /// Changes the label that the news of its removal carries.
    pub fn set_token(&self, token: u64) {
        self.0.anchor.set_token(token);
    }

    /// Whether both are the same device, perhaps found by different addresses.
    pub fn is_same(&self, other: &Self) -> bool {
        self.0.context == other.0.context
    }

    /// Segments of one operation.
    pub fn segments_max(&self) -> u32 {
        let attributes = &self.0.attributes;
        let limits = [attributes.max_sge, attributes.max_sge_rd];
        // Some devices leave the limit of reads at zero: then it is no other.
        limits.into_iter().filter(|limit| *limit > 0).min().unwrap_or(1) as u32
    }

    /// Entries of one completion queue.
    pub fn completions_max(&self) -> u32 {
        self.0.attributes.max_cqe.max(1) as u32
    }

    /// Operations of one send queue.
    pub fn sends_max(&self) -> u32 {
        self.0.attributes.max_qp_wr.max(1) as u32
    }

    /// Receives of one shared receive queue.
    pub fn receives_max(&self) -> u32 {
        self.0.attributes.max_srq_wr.max(0) as u32
    }

    /// Bytes of one message, write or read.
    pub fn message_bytes_max(&self) -> u32 {
        self.0.message_bytes_max
    }
}

impl DeviceInner {
    /// What is kept until the kernel has taken the device away.
    pub(super) fn quarantine(&self) -> RefMut<'_, Quarantine> {
        self.anchor.quarantine()
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({} segments, messages of {} bytes)", self.segments_max(), self.message_bytes_max())
    }
}
