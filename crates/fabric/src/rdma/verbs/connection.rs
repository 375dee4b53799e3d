//! Definitions of `rdma/rdma_cma.h`. Fields and constants have the names of the header.

use std::ffi::{c_int, c_uint, c_void};

use super::{Context, Qp};

/// `struct sockaddr_storage`, whose first bytes are the address.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct SockaddrStorage(pub [u8; 128]);

/// `struct rdma_event_channel`.
#[repr(C)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct EventChannel {
    pub fd: c_int,
}

/// The start of `struct rdma_cm_id`: what a socket is to TCP. Its `route.addr` has both addresses.
#[repr(C)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct CmId {
    pub verbs: *mut Context,
    pub channel: *mut EventChannel,
    pub context: *mut c_void,
    pub qp: *mut Qp,
    pub src_storage: SockaddrStorage,
    pub dst_storage: SockaddrStorage,
    _route: [u64; 7],
    pub ps: c_uint,
    pub port_num: u8,
}

/// `struct rdma_conn_param`.
#[repr(C)]
#[derive(Clone, Copy)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct ConnParam {
    pub private_data: *const c_void,
    pub private_data_len: u8,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: u8,
    pub qp_num: u32,
}

/// `struct rdma_cm_event`, up to the member `conn` of its union.
#[repr(C)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct CmEvent {
    pub id: *mut CmId,
    pub listen_id: *mut CmId,
    pub event: c_uint,
    pub status: c_int,
    pub conn: ConnParam,
}

constants! {
    CONNECTION_CONSTANTS;
    u8: RDMA_MAX_RESP_RES = 0xff, RDMA_MAX_INIT_DEPTH = 0xff;
    u16: AF_INET = 2, AF_INET6 = 10;
    c_uint:
        RDMA_PS_TCP = 0x0106,
        RDMA_CM_EVENT_ADDR_RESOLVED = 0, RDMA_CM_EVENT_ADDR_ERROR = 1, RDMA_CM_EVENT_ROUTE_RESOLVED = 2,
        RDMA_CM_EVENT_ROUTE_ERROR = 3, RDMA_CM_EVENT_CONNECT_REQUEST = 4, RDMA_CM_EVENT_CONNECT_ERROR = 6,
        RDMA_CM_EVENT_UNREACHABLE = 7, RDMA_CM_EVENT_REJECTED = 8, RDMA_CM_EVENT_ESTABLISHED = 9,
        RDMA_CM_EVENT_DISCONNECTED = 10, RDMA_CM_EVENT_DEVICE_REMOVAL = 11, RDMA_CM_EVENT_ADDR_CHANGE = 14,
        RDMA_CM_EVENT_TIMEWAIT_EXIT = 15;
}
