//! Sockets: listening, connecting and their options, the same for every backend that talks to the kernel.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::descriptor_floor;
use crate::op::Address;
use crate::socket_file::{self, BoundFile, SocketAccess};

/// The send buffer of unix sockets in bytes. 1 MiB makes 1 MiB reads three times as fast as the default 208 KiB
/// (prototype, kernel 6.18); the kernel doubles it and bounds it by `net.core.wmem_max`.
const UNIX_SEND_BUFFER_BYTES: usize = 1 << 20;

/// Waiting connections of a listener.
const BACKLOG: i32 = 1024;

/// A listening socket that loops may take over copies of.
#[derive(Debug)]
pub struct Listening {
    /// The socket.
    pub socket: OwnedFd,
    /// Where it listens, with the port that the kernel chose if 0 was asked for.
    pub address: Address,
    /// Of a unix socket: the file, to be removed in the end.
    pub file: Option<BoundFile>,
}

/// Opens a listening socket; a unix socket's file gets the mode and the group that `access` says. A unix path without a
/// listener is replaced.
///
/// # Errors
/// The kernel's: `AddrInUse`, `PermissionDenied`, ...
pub fn listen_as(address: &Address, access: SocketAccess) -> std::io::Result<Listening> {
    let tcp = |address: &std::net::SocketAddr| {
        let socket = stream_socket(match address {
            std::net::SocketAddr::V4(_) => AddressFamily::INET,
            std::net::SocketAddr::V6(_) => AddressFamily::INET6,
        })?;
        sockopt::set_socket_reuseaddr(&socket, true)?;
        rustix::net::bind(&socket, address)?;
        rustix::net::listen(&socket, BACKLOG)?;
        let bound = std::net::SocketAddr::try_from(rustix::net::getsockname(&socket)?)?;
        Ok(Listening { socket, address: Address::Tcp(bound), file: None })
    };
    match address {
        Address::Tcp(address) => tcp(address),
        Address::Unix(path) | Address::Shared(path) => {
            let (socket, file) = socket_file::listen(path, access, BACKLOG)?;
            Ok(Listening { socket, address: address.clone(), file: Some(file) })
        }
        Address::Rdma(_) => Err(rustix::io::Errno::OPNOTSUPP.into()),
    }
}

/// The same with the umask's access, for a caller that leaves the file where it is.
///
/// # Errors
/// See [`listen_as`].
pub fn listen_shared(address: &Address) -> std::io::Result<(OwnedFd, Address)> {
    listen_as(address, SocketAccess::default()).map(|listening| (listening.socket, listening.address))
}

/// Binds and listens, for the loop that asks.
pub(crate) fn listen(address: &Address) -> std::io::Result<OwnedFd> {
    listen_as(address, SocketAccess::default()).map(|listening| listening.socket)
}

/// A new stream socket, non-blocking and close-on-exec.
pub(crate) fn stream_socket(family: AddressFamily) -> std::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(descriptor_floor::raise(rustix::net::socket_with(family, SocketType::STREAM, flags, None)?))
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
