//! The symbols of the two libraries.

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::{
    CmEvent, CmId, CompChannel, ConnParam, Context, Cq, Device, DeviceAttr, EventChannel, Mr, Pd, PortAttr, Qp, QpAttr,
    QpInitAttr, SockaddrStorage, Srq, SrqInitAttr,
};

macro_rules! functions {
    ($(#[$doc:meta])* $table:ident: $(fn $name:ident($($argument:ty),*) $(-> $result:ty)?;)+) => {
        $(#[$doc])*
        pub struct $table {
            $(
                #[doc = concat!("`", stringify!($name), "`")]
                pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,
            )+
        }

        impl $table {
            /// Finds each symbol; the error is the name of the first that is missing.
            ///
            /// # Safety
            /// The library is the one whose header the definitions follow, and stays loaded while the table is used.
            #[cfg(feature = "rdma")]
            pub unsafe fn find(library: &libloading::Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the caller vouches that the symbol has the type that the header gives it, which the
                        // table's entry repeats.
                        let symbol = unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) };
                        *symbol.map_err(|_| stringify!($name))?
                    },)+
                })
            }
        }
    };
}

functions! {
    /// Of libibverbs.
    Verbs:
    fn ibv_get_device_list(*mut c_int) -> *mut *mut Device;
    fn ibv_free_device_list(*mut *mut Device);
    fn ibv_get_device_name(*mut Device) -> *const c_char;
    fn ibv_open_device(*mut Device) -> *mut Context;
    fn ibv_close_device(*mut Context) -> c_int;
    fn ibv_query_device(*mut Context, *mut DeviceAttr) -> c_int;
    fn ibv_query_port(*mut Context, u8, *mut PortAttr) -> c_int;
    fn ibv_alloc_pd(*mut Context) -> *mut Pd;
    fn ibv_dealloc_pd(*mut Pd) -> c_int;
    fn ibv_reg_mr(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
    fn ibv_dereg_mr(*mut Mr) -> c_int;
    fn ibv_create_comp_channel(*mut Context) -> *mut CompChannel;
    fn ibv_destroy_comp_channel(*mut CompChannel) -> c_int;
    fn ibv_create_cq(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq;
    fn ibv_destroy_cq(*mut Cq) -> c_int;
    fn ibv_get_cq_event(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    fn ibv_ack_cq_events(*mut Cq, c_uint);
    fn ibv_create_srq(*mut Pd, *mut SrqInitAttr) -> *mut Srq;
    fn ibv_destroy_srq(*mut Srq) -> c_int;
    fn ibv_modify_qp(*mut Qp, *mut QpAttr, c_int) -> c_int;
    fn ibv_destroy_qp(*mut Qp) -> c_int;
}

functions! {
    /// Of librdmacm.
    ConnectionManager:
    fn rdma_create_event_channel() -> *mut EventChannel;
    fn rdma_destroy_event_channel(*mut EventChannel);
    fn rdma_create_id(*mut EventChannel, *mut *mut CmId, *mut c_void, c_uint) -> c_int;
    fn rdma_destroy_id(*mut CmId) -> c_int;
    fn rdma_migrate_id(*mut CmId, *mut EventChannel) -> c_int;
    fn rdma_bind_addr(*mut CmId, *mut SockaddrStorage) -> c_int;
    fn rdma_listen(*mut CmId, c_int) -> c_int;
    fn rdma_resolve_addr(*mut CmId, *mut SockaddrStorage, *mut SockaddrStorage, c_int) -> c_int;
    fn rdma_resolve_route(*mut CmId, c_int) -> c_int;
    fn rdma_create_qp(*mut CmId, *mut Pd, *mut QpInitAttr) -> c_int;
    fn rdma_connect(*mut CmId, *mut ConnParam) -> c_int;
    fn rdma_accept(*mut CmId, *mut ConnParam) -> c_int;
    fn rdma_reject(*mut CmId, *const c_void, u8) -> c_int;
    fn rdma_disconnect(*mut CmId) -> c_int;
    fn rdma_get_cm_event(*mut EventChannel, *mut *mut CmEvent) -> c_int;
    fn rdma_ack_cm_event(*mut CmEvent) -> c_int;
    fn rdma_get_devices(*mut c_int) -> *mut *mut Context;
    fn rdma_free_devices(*mut *mut Context);
}

/// Both libraries' symbols.
pub struct Functions {
    /// Of libibverbs.
    pub verbs: Verbs,
    /// Of librdmacm.
    pub connection: ConnectionManager,
}
