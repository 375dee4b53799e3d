//! Sockets: listening, connecting and their options, the same for every backend that talks to the kernel.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::op::Address;

/// The send buffer of unix sockets in bytes. 1 MiB makes 1 MiB reads three times as fast as the default 208 KiB
/// (prototype, kernel 6.18); the kernel doubles it and bounds it by `net.core.wmem_max`.
const UNIX_SEND_BUFFER_BYTES: usize = 1 << 20;

/// Waiting connections of a listener.
const BACKLOG: i32 = 1024;

/// Opens a listening socket for several loops to take over copies of; says where it listens.
///
/// # Errors
/// The kernel's: `AddrInUse`, `PermissionDenied`, ...
pub fn listen_shared(address: &Address) -> std::io::Result<(OwnedFd, Address)> {
    let fd = listen(address)?;
    let bound = match address {
        Address::Tcp(_) => {
            let name = rustix::net::getsockname(&fd)?;
            Address::Tcp(std::net::SocketAddr::try_from(name)?)
        }
        Address::Unix(_) | Address::Shared(_) | Address::Rdma(_) => address.clone(),
    };
    Ok((fd, bound))
}

/// Binds and listens. A unix path that nobody answers at is replaced; one that somebody answers at is `EADDRINUSE`.
pub(crate) fn listen(address: &Address) -> std::io::Result<OwnedFd> {
    match address {
        Address::Tcp(address) => {
            let fd = stream_socket(match address {
                std::net::SocketAddr::V4(_) => AddressFamily::INET,
                std::net::SocketAddr::V6(_) => AddressFamily::INET6,
            })?;
            sockopt::set_socket_reuseaddr(&fd, true)?;
            rustix::net::bind(&fd, address)?;
            rustix::net::listen(&fd, BACKLOG)?;
            Ok(fd)
        }
        Address::Unix(path) | Address::Shared(path) => {
            remove_stale_socket(path)?;
            let fd = stream_socket(AddressFamily::UNIX)?;
            rustix::net::bind(&fd, &rustix::net::SocketAddrUnix::new(path)?)?;
            rustix::net::listen(&fd, BACKLOG)?;
            Ok(fd)
        }
        Address::Rdma(_) => Err(rustix::io::Errno::OPNOTSUPP.into()),
    }
}

/// A new stream socket, non-blocking and close-on-exec.
pub(crate) fn stream_socket(family: AddressFamily) -> std::io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?)
}

fn remove_stale_socket(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::FileTypeExt;
    let Ok(metadata) = std::fs::symlink_metadata(path) else { return Ok(()) };
    if !metadata.file_type().is_socket() {
        return Err(rustix::io::Errno::EXIST.into());
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => Err(rustix::io::Errno::ADDRINUSE.into()),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        Err(error) => Err(error),
    }
}

/// What every stream gets: no delay of small segments on TCP, a large send buffer on unix sockets, never blocking.
/// Says whether it is TCP.
pub(crate) fn prepare_stream(fd: &OwnedFd) -> std::io::Result<bool> {
    rustix::io::ioctl_fionbio(fd, true)?;
    if sockopt::socket_domain(fd)? == AddressFamily::UNIX {
        sockopt::set_socket_send_buffer_size(fd, UNIX_SEND_BUFFER_BYTES)?;
        Ok(false)
    } else {
        sockopt::set_tcp_nodelay(fd, true)?;
        Ok(true)
    }
}

/// Has the kernel notice a TCP peer that is gone: probes after `idle`, and unacknowledged data fails after `idle` too
/// (`SO_KEEPALIVE`, `TCP_USER_TIMEOUT`). Nothing on a unix socket, whose peer's death is seen at once.
pub(crate) fn keep_alive(fd: &OwnedFd, idle: Duration) -> std::io::Result<()> {
    if sockopt::socket_domain(fd)? == AddressFamily::UNIX {
        return Ok(());
    }
    let probes = 4;
    sockopt::set_socket_keepalive(fd, true)?;
    sockopt::set_tcp_keepidle(fd, (idle / 2).max(Duration::from_secs(1)))?;
    sockopt::set_tcp_keepintvl(fd, (idle / (2 * probes)).max(Duration::from_secs(1)))?;
    sockopt::set_tcp_keepcnt(fd, probes)?;
    sockopt::set_tcp_user_timeout(fd, u32::try_from(idle.as_millis()).unwrap_or(u32::MAX))?;
    Ok(())
}

/// Gives up what is sent and not acknowledged for that long. Nothing on a unix socket.
pub(crate) fn abandon_after(fd: &OwnedFd, limit: Duration) -> std::io::Result<()> {
    Ok(sockopt::set_tcp_user_timeout(fd, u32::try_from(limit.as_millis()).unwrap_or(u32::MAX))?)
}

/// Bytes of a stream that are here to be received; 0 where the kernel does not say.
pub(crate) fn readable_bytes(socket: BorrowedFd<'_>) -> usize {
    rustix::io::ioctl_fionread(socket).map_or(0, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX))
}

pub(crate) fn has_hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)];
    let went = poll(&mut polled, Some(&Timespec::default()));
    went.is_ok() && polled[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
}
