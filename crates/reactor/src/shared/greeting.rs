//! How the memory of a shared stream comes to the client: the server sends one message with two descriptors, as soon as it
//! has accepted the connection: of the memory, and of a socket on which either may lend memory.
//!
//! The server makes both, so it never waits for a client; the client waits for the message.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;

use super::memory::SharedMemory;
use super::{lending, message};

/// First in the message.
const MAGIC: &[u8; 8] = b"byway-sm";
const VERSION: u32 = 3;
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

/// What both ends have after the greeting: the memory of the stream, and their end of the socket for loans.
pub(super) type Greeted = (Arc<SharedMemory>, OwnedFd);

/// Makes the memory of a stream that was accepted, and sends it.
///
/// # Errors
/// The kernel's; the connection is then of no use.
pub(super) fn give(socket: BorrowedFd<'_>, ring_bytes: usize) -> Result<Greeted, Errno> {
    let (memory, fd) = SharedMemory::create(ring_bytes)?;
    let (ours, theirs) = lending::sockets()?;
    message::send(socket, &greeting(ring_bytes), &[fd.as_fd(), theirs.as_fd()])?;
    Ok((Arc::new(memory), ours))
}

/// Takes the memory of a stream that was connected; `None` if it has not come yet.
///
/// # Errors
/// `EPROTO` if something else listens there, `ECONNRESET` if it closes the connection; else the kernel's.
pub(super) fn take(socket: BorrowedFd<'_>) -> Result<Option<Greeted>, Errno> {
    let (bytes, [Some(fd), Some(lending)]) = (match message::receive::<GREETING_BYTES, 2>(socket) {
        Err(Errno::AGAIN) => return Ok(None),
        came => came?,
    }) else {
        return Err(Errno::PROTO);
    };
    let ring_bytes = read_greeting(&bytes).ok_or(Errno::PROTO)?;
    Ok(Some((Arc::new(SharedMemory::open(fd.as_fd(), ring_bytes)?), lending)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rustix::fs::{MemfdFlags, SealFlags};

    use super::*;

    #[test]
    fn the_greeting_has_these_bytes() {
        let golden = *b"byway-sm\x03\0\0\0\0\0\x04\0";
        assert_eq!(greeting(256 << 10), golden);
        assert_eq!(read_greeting(&golden), Some(256 << 10));
        for at in 0..12 {
            let mut other = golden;
            other[at] ^= 1;
            assert_eq!(read_greeting(&other), None, "byte {at}");
        }
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
        let file = |len, seals| Some(file(len, seals));
        for (bytes, fd, others, good) in [
            (greeting(ring), file(len, all), 1, true),
            (greeting(ring), file(len, some), 1, false),
            (greeting(ring), file(len - 1, all), 1, false),
            (greeting(ring), Some(plain), 1, false),
            (greeting(ring), None, 0, false),
            (greeting(ring), None, 1, false),
            (greeting(ring), file(len, all), 0, false),
            (greeting(ring), file(len, all), 2, false),
            (greeting(ring + 4096), file(len + 8192, all), 1, false),
            (greeting(1 << 30), file(0, all), 1, false),
            (*b"GET / HTTP/1.0\r\n", file(len, all), 1, false),
        ] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            assert!(take(ours.as_fd()).unwrap().is_none(), "nothing has come");
            let fds: Vec<_> = fd.iter().map(AsFd::as_fd).chain(std::iter::repeat_n(theirs.as_fd(), others)).collect();
            message::send(theirs.as_fd(), &bytes, &fds).unwrap();
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
        let (theirs, _) = give(server.as_fd(), 64 << 10).unwrap();
        let (ours, _) = take(client.as_fd()).unwrap().unwrap();
        assert_eq!((theirs.ring_bytes(), ours.ring_bytes()), (64 << 10, 64 << 10));
        let mut writer = super::super::ring::Writer::new(&theirs, 0);
        let reader = super::super::ring::Reader::new(&ours, 0);
        let _ = writer.publish(5);
        assert_eq!(reader.here().unwrap().0, 5);
    }
}
