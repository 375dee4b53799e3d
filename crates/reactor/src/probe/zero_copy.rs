//! Zero-copy send: something is sent over loopback, and the kernel's notification read.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::Duration;

/// What the kernel said of a zero-copy send over loopback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroCopy {
    /// It sent the pages themselves.
    Sent,
    /// It made a copy after all: usual for loopback, whose receiver would hold the sender's pages.
    Copied,
}

/// Bytes of the probe: enough that the kernel does not copy them for being few.
const PROBE_BYTES: usize = 64 << 10;

/// Sends with `MSG_ZEROCOPY` over loopback and waits for the notification (at most a second).
///
/// # Errors
/// The kernel's; `TimedOut` without a notification.
pub fn zero_copy_send() -> io::Result<ZeroCopy> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let sender = TcpStream::connect(listener.local_addr()?)?;
    let (receiver, _) = listener.accept()?;
    let on: libc::c_int = 1;
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the socket is open, and the option is an int that lives during the call.
    let rc = unsafe {
        libc::setsockopt(sender.as_raw_fd(), libc::SOL_SOCKET, libc::SO_ZEROCOPY, (&raw const on).cast(), len)
    };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    let data = vec![1u8; PROBE_BYTES];
    let flags = libc::MSG_ZEROCOPY | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `data` is not changed or freed before the notification below, or before both sockets are closed.
    let sent = unsafe { libc::send(sender.as_raw_fd(), data.as_ptr().cast(), data.len(), flags) };
    if sent < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut into = vec![0u8; PROBE_BYTES];
    receiver.set_read_timeout(Some(Duration::from_secs(1)))?;
    io::Read::read_exact(&mut &receiver, &mut into[..sent as usize])?;
    let answer = notification(&sender);
    drop((sender, receiver));
    drop(data);
    answer
}

/// Reads the error queue: `sock_extended_err.ee_code` says whether the kernel copied (msg_zerocopy documentation).
fn notification(sender: &TcpStream) -> io::Result<ZeroCopy> {
    let mut poll = libc::pollfd { fd: sender.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: `poll` is one valid entry.
    if unsafe { libc::poll(&raw mut poll, 1, 1000) } != 1 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    // As u64 so that the headers in it are aligned.
    let mut control = [0u64; 32];
    // SAFETY: `msghdr` is plain data, and all zeroes is a value of it.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: `message` names `control` with its size, and no other memory.
    let rc = unsafe { libc::recvmsg(sender.as_raw_fd(), &raw mut message, libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT) };
    if rc < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel filled `message` and `control`, both alive.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message).as_ref() }.ok_or(io::ErrorKind::InvalidData)?;
    let bytes = size_of::<libc::sock_extended_err>() as libc::c_uint;
    // SAFETY: `CMSG_LEN` only computes.
    if header.cmsg_len < unsafe { libc::CMSG_LEN(bytes) } as usize {
        return Err(io::ErrorKind::InvalidData.into());
    }
    // SAFETY: the header says that the structure lies behind it, whole; it is plain data.
    let error = unsafe { libc::CMSG_DATA(header).cast::<libc::sock_extended_err>().read_unaligned() };
    /// `SO_EE_CODE_ZEROCOPY_COPIED` of `linux/errqueue.h`.
    const COPIED: u8 = 1;
    Ok(if error.ee_code & COPIED != 0 { ZeroCopy::Copied } else { ZeroCopy::Sent })
}
