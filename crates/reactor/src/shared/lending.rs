//! How one end of a shared stream lends memory to the other: for each piece one message with the descriptor, on a socket
//! that serves only this purpose.
//!
//! On the stream's own socket the descriptor could get lost: wake-up bytes are received there, and the kernel closes a
//! descriptor that comes with bytes of a plain receive. To receive wake-up bytes with descriptors, or to wait for the
//! client's answer before the first wake-up byte, would cost every stream something, or make the server wait for a client.
//! So the server's greeting brings the client one end of a socket pair. The server reads the other end when the client
//! announces memory over the stream. Messages on it are whole and in order (`SOCK_SEQPACKET`), and the message is in the
//! queue before its sender can announce it. Messages that are not read cost this end nothing: the kernel closes them with
//! the stream. Both ends lend in this way, and each numbers its pieces from 0. An end that receives something else than
//! memory never reads the socket again.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::arena::PeerMemory;
use super::message;
use super::shm_stream::StreamSide;
use crate::frame::FramePool;
use crate::limits::{ARENAS_PER_STREAM_MAX, LOANS_AT_ONCE_MAX};
use crate::loan::Loan;
use crate::region::Access;

/// First in the message: memory that may be written, or only read.
const MAGIC: &[u8; 8] = b"byway-ar";
const MAGIC_READ: &[u8; 8] = b"byway-ro";
/// Magic, bytes of the arena; see docs/wire.md.
const LOAN_BYTES: usize = 16;

/// What an end of a stream has to do with lent memory.
#[derive(Debug)]
pub(crate) struct Lending {
    side: StreamSide,
    /// `None` once what came was no memory.
    socket: Option<OwnedFd>,
    /// How often this end has lent, and how often it has taken.
    lent: u32,
    taken: u32,
    /// What was taken and not left, by its number.
    memories: Vec<(u32, PeerMemory)>,
}

/// The server's and the client's end of a new socket pair.
pub(super) fn sockets() -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

impl Lending {
    /// The client's and the server's end of a simulated stream.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn simulated() -> Result<[Self; 2], Errno> {
        let (server, client) = sockets()?;
        Ok([Self::new(StreamSide::Client, client), Self::new(StreamSide::Server, server)])
    }

    pub(super) fn new(side: StreamSide, socket: OwnedFd) -> Self {
        Self { side, socket: Some(socket), lent: 0, taken: 0, memories: Vec::new() }
    }

    /// Lends the server an arena.
    ///
    /// # Errors
    /// See [`Reactor::lend_arena`](crate::Reactor::lend_arena).
    pub(crate) fn lend(&mut self, pool: &FramePool) -> Result<(), Errno> {
        let file = pool.file().ok_or(Errno::INVAL)?;
        match self.side {
            StreamSide::Server => Err(Errno::OPNOTSUPP),
            StreamSide::Client if self.lent > 0 => Err(Errno::ALREADY),
            StreamSide::Client => self.send(pool.bytes() as u64, Access::Write, file).map(|_| ()),
        }
    }

    /// Lends the peer memory; gives its number.
    ///
    /// # Errors
    /// See [`Reactor::lend_memory`](crate::Reactor::lend_memory).
    pub(crate) fn lend_memory(&mut self, loan: &Loan) -> Result<u32, Errno> {
        let access = if loan.is_writable() { Access::Write } else { Access::Read };
        let number = self.send(loan.bytes(), access, loan.descriptor()?.as_fd())?;
        loan.note_sent();
        Ok(number)
    }

    fn send(&mut self, bytes: u64, access: Access, file: BorrowedFd<'_>) -> Result<u32, Errno> {
        let socket = self.socket.as_ref().ok_or(Errno::PIPE)?;
        message::send(socket.as_fd(), &loan(bytes, access), &[file])?;
        let number = self.lent;
        self.lent += 1;
        Ok(number)
    }

    /// Takes what the peer has lent under that number, and all before it, as far as they have no more than `room` bytes together;
    /// gives the bytes of this one.
    ///
    /// # Errors
    /// See [`Reactor::take_memory`](crate::Reactor::take_memory).
    pub(crate) fn take_memory(&mut self, number: u32, mut room: u64) -> Result<u64, Errno> {
        let mut refused = None;
        // A peer sends what it lends before it names it, and its socket holds few: no loop is to receive without an end.
        if number.saturating_sub(self.taken) >= LOANS_AT_ONCE_MAX {
            self.socket = None;
            return Err(Errno::PROTO);
        }
        while self.taken <= number {
            match self.receive(room) {
                Ok(bytes) => room = room.saturating_sub(bytes),
                // The next one may be smaller.
                Err(Errno::NOBUFS) => refused = Some(self.taken - 1),
                Err(error) => return Err(error),
            }
        }
        let missing = if refused == Some(number) { Errno::NOBUFS } else { Errno::NOENT };
        self.memory(number).map(|memory| memory.bytes()).ok_or(missing)
    }

    fn receive(&mut self, room: u64) -> Result<u64, Errno> {
        let socket = self.socket.as_ref().ok_or(Errno::PROTO)?;
        let room = if self.memories.len() < ARENAS_PER_STREAM_MAX { room } else { 0 };
        let received = receive(socket.as_fd(), room);
        match received {
            Ok(_) | Err(Errno::NOBUFS) => self.taken += 1,
            Err(Errno::AGAIN) => {}
            Err(_) => self.socket = None,
        }
        let memory = received?;
        let bytes = memory.bytes();
        self.memories.push((self.taken - 1, memory));
        Ok(bytes)
    }

    /// Lets go of what the peer has lent under that number.
    pub(crate) fn leave(&mut self, number: u32) {
        self.memories.retain(|(other, _)| *other != number);
    }

    /// What the peer has lent under that number.
    pub(crate) fn memory(&mut self, number: u32) -> Option<&mut PeerMemory> {
        self.memories.iter_mut().find(|(other, _)| *other == number).map(|(_, memory)| memory)
    }

    /// All that the peer has lent and that was not left.
    pub(crate) fn memories(&self) -> impl Iterator<Item = &PeerMemory> {
        self.memories.iter().map(|(_, memory)| memory)
    }

    /// See [`Lending::memories`].
    pub(crate) fn memories_mut(&mut self) -> impl Iterator<Item = &mut PeerMemory> {
        self.memories.iter_mut().map(|(_, memory)| memory)
    }

    /// Bytes of all that was taken of the peer and not left, if anything was.
    pub(crate) fn bytes(&self) -> Option<u64> {
        // Where any size is taken, hostile sizes may be more together than there are numbers.
        let bytes = self.memories().map(PeerMemory::bytes).fold(0, u64::saturating_add);
        (!self.memories.is_empty()).then_some(bytes)
    }
}

fn receive(socket: BorrowedFd<'_>, room: u64) -> Result<PeerMemory, Errno> {
    let (bytes, [Some(file)]) = message::receive::<LOAN_BYTES, 1>(socket)? else { return Err(Errno::PROTO) };
    let (bytes, access) = read_loan(&bytes).ok_or(Errno::PROTO)?;
    PeerMemory::open(file, bytes, access, room)
}

fn loan(arena_bytes: u64, access: Access) -> [u8; LOAN_BYTES] {
    let mut bytes = [0; LOAN_BYTES];
    bytes[..8].copy_from_slice(if access == Access::Write { MAGIC } else { MAGIC_READ });
    bytes[8..].copy_from_slice(&arena_bytes.to_le_bytes());
    bytes
}

fn read_loan(bytes: &[u8; LOAN_BYTES]) -> Option<(u64, Access)> {
    let [magic @ .., b0, b1, b2, b3, b4, b5, b6, b7] = bytes;
    let access = match magic {
        MAGIC => Access::Write,
        MAGIC_READ => Access::Read,
        _ => return None,
    };
    Some((u64::from_le_bytes([*b0, *b1, *b2, *b3, *b4, *b5, *b6, *b7]), access))
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, SealFlags};

    use super::*;

    const ARENA: usize = 1 << 20;

    #[test]
    fn the_message_has_these_bytes() {
        for (golden, access) in
            [(*b"byway-ar\0\0\x10\0\0\0\0\0", Access::Write), (*b"byway-ro\0\0\x10\0\0\0\0\0", Access::Read)]
        {
            assert_eq!(super::loan(ARENA as u64, access), golden);
            assert_eq!(read_loan(&golden), Some((ARENA as u64, access)));
            for at in 0..8 {
                let mut other = golden;
                other[at] ^= 1;
                assert_eq!(read_loan(&other), None, "byte {at}");
            }
        }
    }

    fn loan(bytes: usize) -> [u8; LOAN_BYTES] {
        super::loan(bytes as u64, Access::Write)
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
        let (mut server, mut client) =
            (Lending::new(StreamSide::Server, server), Lending::new(StreamSide::Client, client));
        let (pool, plain) = (FramePool::shared(ARENA).unwrap(), FramePool::new(ARENA).unwrap());
        let room = ARENA as u64;
        assert_eq!(server.take_memory(0, room), Err(Errno::AGAIN), "none has come");
        assert_eq!(client.lend(&plain), Err(Errno::INVAL), "it lies in no file");
        assert_eq!(client.lend(&pool), Ok(()));
        assert_eq!(client.lend(&pool), Err(Errno::ALREADY));
        assert!(server.memory(0).is_none());
        assert_eq!(server.take_memory(0, room), Ok(room));
        assert_eq!(server.take_memory(0, 0), Ok(room), "it was taken");
        assert_eq!(server.lend(&pool), Err(Errno::OPNOTSUPP));
        assert_eq!(server.memory(0).map(|memory| memory.bytes()), Some(room));
    }

    #[test]
    fn what_is_no_arena_is_refused_for_good() {
        let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        let one = |len, seals| vec![file(len, seals)];
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
            ("larger than any", loan(usize::MAX & !4095).to_vec(), one(ARENA, all), Some(Errno::NOBUFS)),
            ("not sealed", loan(ARENA).to_vec(), one(ARENA, SealFlags::GROW), Some(Errno::PROTO)),
            ("over what is left", loan(8 * ARENA).to_vec(), one(8 * ARENA, all), Some(Errno::NOBUFS)),
        ] {
            let (server, client) = sockets().unwrap();
            let mut server = Lending::new(StreamSide::Server, server);
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            message::send(client.as_fd(), &bytes, &fds).unwrap();
            assert_eq!(server.take_memory(0, 4 * ARENA as u64).err(), error, "{case}");
            let again = message::send(client.as_fd(), &loan(ARENA), &[file(ARENA, all).as_fd()]);
            if error == Some(Errno::NOBUFS) {
                assert_eq!(again, Ok(()), "{case}");
                assert_eq!(server.take_memory(1, 4 * ARENA as u64), Ok(ARENA as u64), "a smaller one is taken: {case}");
            } else if error.is_some() {
                // The second one would be good, but the stream is closed.
                assert_eq!(again, Err(Errno::PIPE), "{case}");
                assert_eq!(server.take_memory(0, u64::MAX), Err(Errno::PROTO), "{case}");
            }
        }
        let (server, client) = sockets().unwrap();
        drop(client);
        assert_eq!(Lending::new(StreamSide::Server, server).take_memory(0, ARENA as u64), Err(Errno::CONNRESET));
    }
}
