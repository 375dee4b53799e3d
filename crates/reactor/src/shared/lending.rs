//! How the client of a shared stream lends its server an arena: one message, with the descriptor, on a socket that is there
//! for nothing else.
//!
//! On the stream's own socket the descriptor could get lost: the server receives bells there, and a descriptor that comes
//! with bytes which a plain receive takes is closed by the kernel. To receive bells with descriptors, or to wait for the
//! client's word before the first bell, would cost every stream something, or have the server wait for a client. So the
//! server's greeting brings the client one end of a socket pair, whose other end is looked at when somebody says that an
//! arena has come. Messages are whole there (`SOCK_SEQPACKET`), the message is in the queue before its sender can say so
//! anywhere, and what nobody looks at costs the server nothing: the kernel closes it with the stream. Each end is closed as
//! soon as it has done its work.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::arena::PeerArena;
use super::message;
use crate::frame::FramePool;

/// First in the message.
const MAGIC: &[u8; 8] = b"byway-ar";
/// Magic, bytes of the arena; see docs/wire.md.
const LOAN_BYTES: usize = 16;

/// What an end of a stream has to do with arenas.
#[derive(Debug)]
pub(super) enum Lending {
    /// The client's end: it may lend one.
    MayLend(OwnedFd),
    /// It has.
    HasLent,
    /// The server's end: one may come.
    MayTake(OwnedFd),
    /// It has come.
    Taken(PeerArena),
    /// What came was none, or one too much.
    Refused,
}

/// The server's and the client's end of a new socket pair.
pub(super) fn sockets() -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

impl Lending {
    /// Lends an arena.
    ///
    /// # Errors
    /// See [`Reactor::lend_arena`](crate::Reactor::lend_arena).
    pub(super) fn lend(&mut self, pool: &FramePool) -> Result<(), Errno> {
        let file = pool.file().ok_or(Errno::INVAL)?;
        match self {
            Self::MayLend(socket) => send(socket.as_fd(), pool.bytes(), file)?,
            Self::HasLent => return Err(Errno::ALREADY),
            Self::MayTake(_) | Self::Taken(_) | Self::Refused => return Err(Errno::OPNOTSUPP),
        }
        *self = Self::HasLent;
        Ok(())
    }

    /// Takes the arena that has come, if it has no more than `room` bytes; gives its size.
    ///
    /// # Errors
    /// See [`Reactor::take_arena`](crate::Reactor::take_arena).
    pub(super) fn take(&mut self, room: usize) -> Result<usize, Errno> {
        let socket = match self {
            Self::MayTake(socket) => socket,
            Self::Taken(_) => return Err(Errno::ALREADY),
            Self::MayLend(_) | Self::HasLent => return Err(Errno::OPNOTSUPP),
            Self::Refused => return Err(Errno::PROTO),
        };
        let taken = match receive(socket.as_fd(), room) {
            Err(Errno::AGAIN) => return Err(Errno::AGAIN),
            taken => taken,
        };
        *self = Self::Refused;
        let arena = taken?;
        let bytes = arena.bytes();
        *self = Self::Taken(arena);
        Ok(bytes)
    }

    /// The peer's arena.
    pub(super) fn arena(&self) -> Option<&PeerArena> {
        match self {
            Self::Taken(arena) => Some(arena),
            Self::MayLend(_) | Self::HasLent | Self::MayTake(_) | Self::Refused => None,
        }
    }
}

fn send(socket: BorrowedFd<'_>, bytes: usize, file: BorrowedFd<'_>) -> Result<(), Errno> {
    message::send(socket, &loan(bytes), &[file])
}

fn receive(socket: BorrowedFd<'_>, room: usize) -> Result<PeerArena, Errno> {
    let (bytes, [Some(file)]) = message::receive::<LOAN_BYTES, 1>(socket)? else { return Err(Errno::PROTO) };
    PeerArena::open(file.as_fd(), read_loan(&bytes).ok_or(Errno::PROTO)?, room)
}

fn loan(arena_bytes: usize) -> [u8; LOAN_BYTES] {
    let mut bytes = [0; LOAN_BYTES];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..].copy_from_slice(&(arena_bytes as u64).to_le_bytes());
    bytes
}

fn read_loan(bytes: &[u8; LOAN_BYTES]) -> Option<u64> {
    let [magic @ .., b0, b1, b2, b3, b4, b5, b6, b7] = bytes;
    (magic == MAGIC).then(|| u64::from_le_bytes([*b0, *b1, *b2, *b3, *b4, *b5, *b6, *b7]))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, SealFlags};

    use super::*;
    use crate::limits::{ARENA_BYTES_MAX, ARENAS_BYTES_MAX};

    const ARENA: usize = 1 << 20;

    #[test]
    fn the_message_has_these_bytes() {
        let golden = *b"byway-ar\0\0\x10\0\0\0\0\0";
        assert_eq!(loan(ARENA), golden);
        assert_eq!(read_loan(&golden), Some(ARENA as u64));
        for at in 0..8 {
            let mut other = golden;
            other[at] ^= 1;
            assert_eq!(read_loan(&other), None, "byte {at}");
        }
    }

    fn file(len: usize, seals: SealFlags) -> OwnedFd {
        let fd = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, len as u64).unwrap();
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        fd
    }

    #[test]
    fn an_arena_is_lent_once_and_taken_once() {
        let (server, client) = sockets().unwrap();
        let (mut server, mut client) = (Lending::MayTake(server), Lending::MayLend(client));
        let (pool, plain) = (FramePool::shared(ARENA).unwrap(), FramePool::new(ARENA).unwrap());
        assert_eq!(server.take(ARENA), Err(Errno::AGAIN), "none has come");
        assert_eq!(client.lend(&plain), Err(Errno::INVAL), "it lies in no file");
        assert_eq!(client.lend(&pool), Ok(()));
        assert_eq!(client.lend(&pool), Err(Errno::ALREADY));
        assert_eq!(client.take(ARENA), Err(Errno::OPNOTSUPP));
        assert!(server.arena().is_none());
        assert_eq!(server.take(ARENA), Ok(ARENA));
        assert_eq!(server.take(ARENA), Err(Errno::ALREADY));
        assert_eq!(server.lend(&pool), Err(Errno::OPNOTSUPP));
        assert_eq!(server.arena().map(PeerArena::bytes), Some(ARENA));
    }

    #[test]
    fn what_is_no_arena_is_refused_for_good() {
        let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        let one = |len, seals| vec![file(len, seals)];
        let over = ARENA_BYTES_MAX + 4096;
        for (case, bytes, fds, error) in [
            ("an arena", loan(ARENA).to_vec(), one(ARENA, all), None),
            ("another magic", b"byway-xx\0\0\x10\0\0\0\0\0".to_vec(), one(ARENA, all), Some(Errno::PROTO)),
            ("no descriptor", loan(ARENA).to_vec(), vec![], Some(Errno::PROTO)),
            ("two", loan(ARENA).to_vec(), vec![file(ARENA, all), file(ARENA, all)], Some(Errno::PROTO)),
            ("three", loan(ARENA).to_vec(), (0..3).map(|_| file(ARENA, all)).collect(), Some(Errno::PROTO)),
            ("short", loan(ARENA)[..15].to_vec(), one(ARENA, all), Some(Errno::PROTO)),
            ("long", [loan(ARENA), loan(ARENA)].concat(), one(ARENA, all), Some(Errno::PROTO)),
            ("of no bytes", loan(0).to_vec(), one(0, all), Some(Errno::PROTO)),
            ("no whole pages", loan(ARENA + 1).to_vec(), one(ARENA + 1, all), Some(Errno::PROTO)),
            ("larger than it is", loan(2 * ARENA).to_vec(), one(ARENA, all), Some(Errno::PROTO)),
            ("smaller than it is", loan(ARENA).to_vec(), one(2 * ARENA, all), Some(Errno::PROTO)),
            ("too large", loan(over).to_vec(), one(over, all), Some(Errno::PROTO)),
            ("too large for any", loan(usize::MAX).to_vec(), one(ARENA, all), Some(Errno::PROTO)),
            ("not sealed", loan(ARENA).to_vec(), one(ARENA, SealFlags::GROW), Some(Errno::PROTO)),
            ("over what is left", loan(8 * ARENA).to_vec(), one(8 * ARENA, all), Some(Errno::NOBUFS)),
        ] {
            let (server, client) = sockets().unwrap();
            let mut server = Lending::MayTake(server);
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            message::send(client.as_fd(), &bytes, &fds).unwrap();
            assert_eq!(server.take(4 * ARENA).err(), error, "{case}");
            if error.is_some() {
                // A second one would be good, but nobody listens any more.
                let again = message::send(client.as_fd(), &loan(ARENA), &[file(ARENA, all).as_fd()]);
                assert_eq!(again, Err(Errno::PIPE), "{case}");
                assert_eq!(server.take(ARENAS_BYTES_MAX), Err(Errno::PROTO), "{case}");
            }
        }
        let (server, client) = sockets().unwrap();
        drop(client);
        assert_eq!(Lending::MayTake(server).take(ARENA), Err(Errno::CONNRESET));
    }
}
