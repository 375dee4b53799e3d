//! Short messages with descriptors (`SCM_RIGHTS`), sent and received whole or not at all.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use crate::descriptor_floor;

/// The most descriptors of a message, and room for one more to be told of.
const DESCRIPTORS_MAX: usize = 3;

/// Sends `bytes` and descriptors, which stay the caller's too. The peer must be ready to take them: it does not wait.
///
/// # Errors
/// The kernel's.
pub(super) fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::INVAL);
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?;
    if sent == bytes.len() { Ok(()) } else { Err(Errno::IO) }
}

/// Receives a message of `BYTES` bytes, and its first `COUNT` descriptors as far as there are so many.
///
/// # Errors
/// `EAGAIN` if none is here, `ECONNRESET` if none will come, `EPROTO` for one of another length or with more descriptors;
/// else the kernel's.
pub(super) fn receive<const BYTES: usize, const COUNT: usize>(
    socket: BorrowedFd<'_>,
) -> Result<([u8; BYTES], [Option<OwnedFd>; COUNT]), Errno> {
    let mut bytes = [0; BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let came = match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
        Err(Errno::AGAIN | Errno::INTR) => return Err(Errno::AGAIN),
        came => came?,
    };
    let mut descriptors = [const { None }; COUNT];
    let mut count = 0;
    // Those that are too many are closed here.
    for message in control.drain() {
        let RecvAncillaryMessage::ScmRights(fds) = message else { continue };
        for fd in fds {
            if let Some(place) = descriptors.get_mut(count) {
                *place = Some(descriptor_floor::raise(fd));
            }
            count += 1;
        }
    }
    match came.bytes {
        0 => Err(Errno::CONNRESET),
        n if n != BYTES || count > COUNT || came.flags.contains(ReturnFlags::TRUNC) => Err(Errno::PROTO),
        _ => Ok((bytes, descriptors)),
    }
}
