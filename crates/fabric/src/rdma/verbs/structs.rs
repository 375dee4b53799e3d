//! Definitions of `infiniband/verbs.h`. Fields and constants have the names of the header.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// A pointer of a table that is not called here.
type Unused = *const c_void;

/// `struct ibv_context_ops`: what the provider of a device does itself, without libibverbs between.
#[repr(C)]
#[derive(Clone, Copy)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct ContextOps {
    _before_mw: [Unused; 7],
    pub alloc_mw: Option<unsafe extern "C" fn(*mut Pd, c_uint) -> *mut Mw>,
    _bind_mw: Unused,
    pub dealloc_mw: Option<unsafe extern "C" fn(*mut Mw) -> c_int>,
    _create_cq: Unused,
    pub poll_cq: unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int,
    pub req_notify_cq: unsafe extern "C" fn(*mut Cq, c_int) -> c_int,
    _between_cq_and_srq: [Unused; 7],
    pub post_srq_recv: unsafe extern "C" fn(*mut Srq, *mut RecvWr, *mut *mut RecvWr) -> c_int,
    _between_srq_and_qp: [Unused; 4],
    pub post_send: unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int,
    pub post_recv: unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int,
    _after_post: [Unused; 5],
}

/// The start of `struct ibv_context`: an open device.
#[repr(C)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct Context {
    pub device: *mut Device,
    pub ops: ContextOps,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
}

/// `struct ibv_device`, opaque.
#[repr(C)]
pub struct Device([u8; 0]);

/// The start of `struct ibv_pd`: a protection domain.
#[repr(C)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct Pd {
    pub context: *mut Context,
}

/// `struct ibv_mr`: a memory region.
#[repr(C)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct Mr {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// `struct ibv_mw`: a memory window.
#[repr(C)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct Mw {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub rkey: u32,
}

/// The start of `struct ibv_cq`: a completion queue.
#[repr(C)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct Cq {
    pub context: *mut Context,
    pub channel: *mut CompChannel,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
}

/// `struct ibv_comp_channel`: where a completion queue says that it has something.
#[repr(C)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct CompChannel {
    pub context: *mut Context,
    pub fd: c_int,
}

/// The start of `struct ibv_srq`: a shared receive queue.
#[repr(C)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct Srq {
    pub context: *mut Context,
}

/// The start of `struct ibv_qp`: a queue pair.
#[repr(C)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct Qp {
    pub context: *mut Context,
    pub qp_context: *mut c_void,
    pub pd: *mut Pd,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut Srq,
    pub handle: u32,
    pub qp_num: u32,
}

/// `struct ibv_sge`: a piece of registered memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct Sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// The union `wr` of `struct ibv_send_wr`, as its member `rdma`.
#[repr(C)]
#[derive(Clone, Copy)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct SendWrRdma {
    pub remote_addr: u64,
    pub rkey: u32,
    _longer_members: [u64; 2],
}

/// `struct ibv_send_wr`: a work request of a send queue.
#[repr(C)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct SendWr {
    pub wr_id: u64,
    pub next: *mut SendWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
    pub opcode: c_uint,
    pub send_flags: c_uint,
    pub imm_data: u32,
    pub rdma: SendWrRdma,
    _qp_type: [u32; 2],
    _bind_mw: [u64; 6],
}

impl SendWr {
    /// A request of `opcode` with all else zero.
    pub fn new(wr_id: u64, opcode: c_uint) -> Self {
        let null = std::ptr::null_mut();
        let rdma = SendWrRdma { remote_addr: 0, rkey: 0, _longer_members: [0; 2] };
        let (num_sge, send_flags, imm_data) = (0, 0, 0);
        let sg_list = std::ptr::null_mut();
        Self {
            wr_id,
            next: null,
            sg_list,
            num_sge,
            opcode,
            send_flags,
            imm_data,
            rdma,
            _qp_type: [0; 2],
            _bind_mw: [0; 6],
        }
    }
}

/// `struct ibv_recv_wr`: a work request of a receive queue.
#[repr(C)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct RecvWr {
    pub wr_id: u64,
    pub next: *mut RecvWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
}

/// `struct ibv_wc`: a work completion.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct Wc {
    pub wr_id: u64,
    pub status: c_uint,
    pub opcode: c_uint,
    pub vendor_err: u32,
    pub byte_len: u32,
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

/// `struct ibv_srq_init_attr`, with its `struct ibv_srq_attr` in place.
#[repr(C)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct SrqInitAttr {
    pub srq_context: *mut c_void,
    pub max_wr: u32,
    pub max_sge: u32,
    pub srq_limit: u32,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut Srq,
    pub cap: QpCap,
    pub qp_type: c_uint,
    pub sq_sig_all: c_int,
}

/// `struct ibv_qp_attr`; only its state is set here.
#[repr(C)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct QpAttr {
    pub qp_state: c_uint,
    pub cur_qp_state: c_uint,
    _rest: [u64; 17],
}

impl QpAttr {
    /// The attributes for a change of state and nothing else.
    pub const fn of_state(qp_state: c_uint) -> Self {
        Self { qp_state, cur_qp_state: 0, _rest: [0; 17] }
    }
}

/// `struct ibv_device_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct DeviceAttr {
    pub fw_ver: [c_char; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    _between_cqe_and_mw: [c_int; 10],
    pub max_mw: c_int,
    _between_mw_and_srq: [c_int; 8],
    pub max_srq: c_int,
    pub max_srq_wr: c_int,
    pub max_srq_sge: c_int,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

/// `struct ibv_port_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
#[expect(missing_docs, reason = "the names of the header")]
pub struct PortAttr {
    pub state: c_uint,
    pub max_mtu: c_uint,
    pub active_mtu: c_uint,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    _between_lid_and_link: [u8; 8],
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
}

constants! {
    VERBS_CONSTANTS;
    c_int:
        IBV_ACCESS_LOCAL_WRITE = 1, IBV_ACCESS_REMOTE_WRITE = 1 << 1, IBV_ACCESS_REMOTE_READ = 1 << 2,
        IBV_QP_STATE = 1, IBV_LINK_LAYER_INFINIBAND = 1, IBV_LINK_LAYER_ETHERNET = 2;
    c_uint:
        IBV_WR_RDMA_WRITE = 0, IBV_WR_SEND = 2, IBV_WR_SEND_WITH_IMM = 3, IBV_WR_RDMA_READ = 4,
        IBV_WC_RECV = 1 << 7, IBV_WC_RECV_RDMA_WITH_IMM = (1 << 7) + 1, IBV_WC_WITH_IMM = 2,
        IBV_SEND_SIGNALED = 1 << 1, IBV_SEND_INLINE = 1 << 3,
        IBV_QPT_RC = 2, IBV_QPS_ERR = 6, IBV_PORT_ACTIVE = 4, IBV_PORT_DOWN = 1,
        IBV_WC_SUCCESS = 0, IBV_WC_LOC_LEN_ERR = 1, IBV_WC_LOC_QP_OP_ERR = 2, IBV_WC_LOC_PROT_ERR = 4,
        IBV_WC_WR_FLUSH_ERR = 5, IBV_WC_MW_BIND_ERR = 6, IBV_WC_BAD_RESP_ERR = 7, IBV_WC_LOC_ACCESS_ERR = 8,
        IBV_WC_REM_INV_REQ_ERR = 9, IBV_WC_REM_ACCESS_ERR = 10, IBV_WC_REM_OP_ERR = 11, IBV_WC_RETRY_EXC_ERR = 12,
        IBV_WC_RNR_RETRY_EXC_ERR = 13, IBV_WC_REM_ABORT_ERR = 16, IBV_WC_FATAL_ERR = 19,
        IBV_WC_RESP_TIMEOUT_ERR = 20, IBV_WC_GENERAL_ERR = 21;
}
