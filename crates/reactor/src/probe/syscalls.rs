//! Probes that are a system call or two.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

fn owned(fd: libc::c_long) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor, and it has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// The newest ABI of landlock, at least 1.
///
/// # Errors
/// `Unsupported` (not built in or not switched on at boot).
pub fn landlock_abi() -> io::Result<u32> {
    const LANDLOCK_CREATE_RULESET_VERSION: libc::c_ulong = 1;
    let none = std::ptr::null::<libc::c_void>();
    // SAFETY: with this flag the call takes no memory and only answers a number.
    let abi =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, none, 0usize, LANDLOCK_CREATE_RULESET_VERSION) };
    u32::try_from(abi).map_err(|_| io::Error::last_os_error())
}

/// The features of userfaultfd (bits of `uffd-features`), for faults of user mode at least.
///
/// # Errors
/// The kernel's: `PermissionDenied` without privilege where `vm.unprivileged_userfaultfd` is 0 on old kernels.
pub fn userfaultfd_features() -> io::Result<u64> {
    const UFFD_USER_MODE_ONLY: libc::c_int = 1;
    const UFFD_API: u64 = 0xaa;
    /// `_IOWR(0xaa, 0x3f, struct uffdio_api)`, 24 bytes.
    const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | UFFD_USER_MODE_ONLY;
    // SAFETY: the call takes no memory.
    let fd = owned(unsafe { libc::syscall(libc::SYS_userfaultfd, flags) })?;
    // struct uffdio_api: api, features, ioctls.
    let mut api = [UFFD_API, 0, 0];
    // SAFETY: the ioctl reads and writes 24 bytes, which `api` has.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, api.as_mut_ptr()) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(api[1]) }
}

/// Whether a software clock of this process can be counted with perf.
///
/// # Errors
/// The kernel's: `PermissionDenied` under `kernel.perf_event_paranoid` or seccomp.
pub fn perf_works() -> io::Result<()> {
    const PERF_TYPE_SOFTWARE: u32 = 1;
    // struct perf_event_attr, first version (64 bytes): type, size, config, ...; the rest may be zero.
    const ATTR_BYTES: u32 = 64;
    let mut attr = [0u32; ATTR_BYTES as usize / 4];
    (attr[0], attr[1]) = (PERF_TYPE_SOFTWARE, ATTR_BYTES);
    // exclude_kernel and exclude_hv: bits 5 and 6 of the flags at byte 40.
    attr[10] = 1 << 5 | 1 << 6;
    let (this_process, any_cpu, no_group, flags) = (0i32, -1i32, -1i32, 8u64);
    // SAFETY: `attr` has the size that it names and lives during the call; 8 is PERF_FLAG_FD_CLOEXEC.
    let fd = unsafe { libc::syscall(libc::SYS_perf_event_open, attr.as_ptr(), this_process, any_cpu, no_group, flags) };
    owned(fd).map(drop)
}

/// Maps one huge page of 2 MiB and lets it go.
///
/// # Errors
/// The kernel's: `OutOfMemory` where none is reserved.
pub fn huge_page_works() -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB;
    let bytes = 2 << 20;
    // SAFETY: a new anonymous mapping at an address of the kernel's choice aliases nothing.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping was made above, and nothing else refers to it.
    unsafe { libc::munmap(base, bytes) };
    Ok(())
}
