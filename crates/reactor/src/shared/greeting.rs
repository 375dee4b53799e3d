//! How the memory of a shared stream comes to the client: the server sends one message with the descriptor, as soon as it
//! has accepted the connection.
//!
//! The server makes the memory, so it never waits for a client; the client waits for the message.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

use super::memory::SharedMemory;

/// First in the message.
const MAGIC: &[u8; 8] = b"byway-sm";
const VERSION: u32 = 1;
/// Magic, version, bytes of a ring; see docs/wire.md.
const GREETING_BYTES: usize = 16;

fn greeting(ring_bytes: usize) -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..].copy_from_slice(&(ring_bytes as u32).to_le_bytes());
    bytes
}

/// The size of the rings, if this is a greeting of our version.
fn read_greeting(bytes: &[u8; GREETING_BYTES]) -> Option<usize> {
    let [magic @ .., v0, v1, v2, v3, r0, r1, r2, r3] = bytes;
    let (version, ring) = (u32::from_le_bytes([*v0, *v1, *v2, *v3]), u32::from_le_bytes([*r0, *r1, *r2, *r3]));
    (magic == MAGIC && version == VERSION).then_some(ring as usize)
}

/// Makes the memory of a stream that was accepted, and sends it.
///
/// # Errors
/// The kernel's; the connection is then of no use.
pub(super) fn give(socket: BorrowedFd<'_>, ring_bytes: usize) -> Result<Arc<SharedMemory>, Errno> {
    let (memory, fd) = SharedMemory::create(ring_bytes)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [fd.as_fd()];
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(Errno::NOMEM);
    }
    let bytes = greeting(ring_bytes);
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags)?;
    if sent == GREETING_BYTES { Ok(Arc::new(memory)) } else { Err(Errno::IO) }
}

/// Takes the memory of a stream that was connected; `None` if it has not come yet.
///
/// # Errors
/// `EPROTO` if something else listens there, `ECONNRESET` if it closes the connection; else the kernel's.
pub(super) fn take(socket: BorrowedFd<'_>) -> Result<Option<Arc<SharedMemory>>, Errno> {
    let mut bytes = [0; GREETING_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let came = match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        came => came?.bytes,
    };
    let mut fds = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => fds.collect::<Vec<OwnedFd>>(),
        _ => Vec::new(),
    });
    let fd = fds.next();
    match (came, read_greeting(&bytes), fd) {
        (0, ..) => Err(Errno::CONNRESET),
        (GREETING_BYTES, Some(ring_bytes), Some(fd)) => Ok(Some(Arc::new(SharedMemory::open(fd.as_fd(), ring_bytes)?))),
        _ => Err(Errno::PROTO),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rustix::fs::{MemfdFlags, SealFlags};

    use super::*;

    #[test]
    fn the_greeting_has_these_bytes() {
        let golden = *b"byway-sm\x01\0\0\0\0\0\x04\0";
        assert_eq!(greeting(256 << 10), golden);
        assert_eq!(read_greeting(&golden), Some(256 << 10));
        for at in 0..12 {
            let mut other = golden;
            other[at] ^= 1;
            assert_eq!(read_greeting(&other), None, "byte {at}");
        }
    }

    fn send(to: &UnixStream, bytes: &[u8], fd: Option<&OwnedFd>) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = fd.map(|fd| [fd.as_fd()]);
        if let Some(descriptors) = &descriptors {
            assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        rustix::net::sendmsg(to, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
    }

    #[test]
    fn memory_that_could_be_taken_away_or_is_none_is_refused() {
        let ring = 64 << 10;
        let len = (super::super::memory::CONTROL_BYTES + 2 * ring) as u64;
        let file = |len: u64, seals: SealFlags| {
            let fd = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
            rustix::fs::ftruncate(&fd, len).unwrap();
            rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
            fd
        };
        let (all, some) = (SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL, SealFlags::GROW);
        let plain: OwnedFd = tempfile::tempfile().unwrap().into();
        for (bytes, fd, good) in [
            (greeting(ring), Some(file(len, all)), true),
            (greeting(ring), Some(file(len, some)), false),
            (greeting(ring), Some(file(len - 1, all)), false),
            (greeting(ring), Some(plain), false),
            (greeting(ring), None, false),
            (greeting(ring + 4096), Some(file(len + 8192, all)), false),
            (greeting(1 << 30), Some(file(0, all)), false),
            (*b"GET / HTTP/1.0\r\n", Some(file(len, all)), false),
        ] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            assert!(take(ours.as_fd()).unwrap().is_none(), "nothing has come");
            send(&theirs, &bytes, fd.as_ref());
            let taken = take(ours.as_fd());
            assert_eq!(taken.as_ref().is_ok_and(Option::is_some), good, "{taken:?}");
            assert!(good || taken.unwrap_err() == Errno::PROTO);
        }
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        assert_eq!(take(ours.as_fd()).unwrap_err(), Errno::CONNRESET);
    }

    #[test]
    fn what_is_given_is_taken() {
        let (server, client) = UnixStream::pair().unwrap();
        let theirs = give(server.as_fd(), 64 << 10).unwrap();
        let ours = take(client.as_fd()).unwrap().unwrap();
        assert_eq!((theirs.ring_bytes(), ours.ring_bytes()), (64 << 10, 64 << 10));
        let mut writer = super::super::ring::Writer::new(&theirs, 0);
        let reader = super::super::ring::Reader::new(&ours, 0);
        let _ = writer.publish(5);
        assert_eq!(reader.here().unwrap().0, 5);
    }
}
