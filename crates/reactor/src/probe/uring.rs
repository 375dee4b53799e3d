//! io_uring: a ring is made, entered, and asked for its operations.

use io_uring::{IoUring, Probe, opcode};

/// What a ring of this kernel can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UringAbilities {
    /// One submitter, completions run when it asks (`SINGLE_ISSUER | DEFER_TASKRUN`, Linux 6.1).
    pub deferred: bool,
    /// Zero-copy send (`SEND_ZC`, Linux 6.0).
    pub send_zc: bool,
    /// Zero-copy send of several pieces (`SENDMSG_ZC`, Linux 6.1).
    pub sendmsg_zc: bool,
    /// Accept that stays armed (Linux 5.19; told by `SOCKET`, which came with it).
    pub multishot_accept: bool,
    /// A page was registered as a fixed buffer.
    pub registered_buffers: bool,
}

/// Makes a ring, enters it and asks it.
///
/// # Errors
/// The kernel's: `PermissionDenied` where io_uring is forbidden (`kernel.io_uring_disabled`, seccomp).
pub fn uring() -> std::io::Result<UringAbilities> {
    let deferred = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(8);
    let (mut ring, deferred) = match deferred {
        Ok(ring) => (ring, true),
        Err(_) => (IoUring::new(8)?, false),
    };
    crate::uring::enter_once(&mut ring)?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let mut page = vec![0u8; 4096];
    let buffer = libc::iovec { iov_base: page.as_mut_ptr().cast(), iov_len: page.len() };
    // SAFETY: `page` outlives the registration, which ends before it is dropped, here or with the ring.
    let registered_buffers = unsafe { ring.submitter().register_buffers(&[buffer]) }.is_ok();
    if registered_buffers {
        ring.submitter().unregister_buffers()?;
    }
    drop(ring);
    Ok(UringAbilities {
        deferred,
        send_zc: probe.is_supported(opcode::SendZc::CODE),
        sendmsg_zc: probe.is_supported(opcode::SendMsgZc::CODE),
        multishot_accept: probe.is_supported(opcode::Socket::CODE),
        registered_buffers,
    })
}
