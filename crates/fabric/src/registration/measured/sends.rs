//! A file sent over TCP, piece by piece, by each way of having its pages registered, and by splice.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

use super::super::pinned::PinnedBuffer;
use super::super::{Guard, Limits, Registrar, RegistrationCache};
use super::MeasureError;
use super::populated::PopulatedMapping;
use super::ring::{Event, SendRing};

/// Ranges that the device takes.
const HANDLES: u32 = 4096;
/// What the receiver takes at a time.
const RECEIVED_BYTES: usize = 256 << 10;
/// Of the sender: any kernel has it, anybody may ask for it, and it does not pace. What paces (bbr, on many machines the default)
/// starts each connection with a guess at the path, and made rates of the same point differ by a factor of ten and more.
const CONGESTION_CONTROL: &str = "reno";
/// Before the clock starts, as a share of the time that is measured: buffers and windows grow meanwhile.
const WARM_SHARE: u32 = 4;

/// How the pages that are sent came to be registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// They were, before the clock started, and hold what is to be sent: what most benchmarks of networks measure.
    Unregistered,
    /// A buffer was, at the start; the file is read into it.
    Static,
    /// The mapped file's are, for each piece, and deregistered after it.
    Dynamic,
    /// The mapped file's are, and stay so: a registration cache.
    Cached,
    /// They are not: the kernel moves references to them into the socket.
    Sendfile,
}

/// What a run sends at a time, in bytes, and how many pieces are in hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendSizes {
    /// Bytes of a file, a multiple of `piece_bytes`.
    pub file_bytes: usize,
    /// Bytes of a piece.
    pub piece_bytes: usize,
    /// Pieces in hand at a time.
    pub pipes: usize,
}

/// What a connection did.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    /// Bytes that the receiver had in that time.
    pub bytes: u64,
    /// From the first piece after a while that does not count, to the receiver's word for the last file.
    pub time: Duration,
    /// Bytes of pages that the connection held at most: pinned for the device, or referred to by a pipe.
    pub held_bytes: usize,
}

/// A file in memory, and the device.
#[derive(Debug)]
pub struct FileSender {
    file: PopulatedMapping,
    /// Registered once, for [`Way::Static`] and [`Way::Unregistered`].
    fixed: PopulatedMapping,
    cache: RegistrationCache<SendRing>,
    /// Of the next send: completions of an earlier run are ignored.
    next_tag: Cell<u64>,
}

/// A piece that is being sent, or waits for its turn.
struct Piece {
    bytes: usize,
    address: usize,
    source: Source,
}

enum Source {
    /// A part of the fixed buffer.
    Slot(usize),
    /// A registration of its own.
    Own(PinnedBuffer),
    /// A use of one that is kept.
    Kept(Guard<SendRing>),
}

impl FileSender {
    /// Makes a file of `file_bytes`, and room for pieces of up to `pieces_bytes` together.
    ///
    /// # Errors
    /// The kernel's, where io_uring or memory is not to be had.
    pub fn new(file_bytes: usize, pieces_bytes: usize) -> Result<Self, MeasureError> {
        let cache = RegistrationCache::new(SendRing::new(HANDLES)?, Limits::default());
        Ok(Self {
            file: PopulatedMapping::file(file_bytes)?,
            fixed: PopulatedMapping::private(pieces_bytes)?,
            cache,
            next_tag: Cell::new(0),
        })
    }

    /// Sends files (the next part of this one's, round and round) for `time`, over a connection of its own. The receiver answers
    /// each file.
    ///
    /// # Errors
    /// The kernel's; registrations that are refused (`RLIMIT_MEMLOCK`).
    pub fn run(
        &self,
        way: Way,
        SendSizes { file_bytes, piece_bytes, pipes }: SendSizes,
        time: Duration,
    ) -> Result<Sent, MeasureError> {
        let fits = piece_bytes * pipes <= self.fixed.bytes() && file_bytes.is_multiple_of(piece_bytes);
        if file_bytes == 0 || !fits || file_bytes > self.file.bytes() {
            return Err(MeasureError::Empty);
        }
        let (mut socket, receiver) = connect(file_bytes)?;
        let mut began = Instant::now();
        let mut sent = Sent { bytes: 0, time, held_bytes: 0 };
        let (mut at, mut is_warm) = (0, false);
        while !is_warm || began.elapsed() < time {
            if !is_warm && began.elapsed() >= time / WARM_SHARE {
                (is_warm, began, sent.bytes) = (true, Instant::now(), 0);
            }
            let part = at..at + file_bytes;
            let held = match way {
                Way::Sendfile => self.splice(part, piece_bytes, pipes, &socket)?,
                _ => self.send(way, part, piece_bytes, pipes, &socket)?,
            };
            socket.read_exact(&mut [0])?;
            sent.held_bytes = sent.held_bytes.max(held);
            sent.bytes += file_bytes as u64;
            at = if at + 2 * file_bytes <= self.file.bytes() { at + file_bytes } else { 0 };
        }
        sent.time = began.elapsed();
        drop(socket);
        // It ends with the connection, and what it says is known by its answers.
        let _ = receiver.join();
        Ok(sent)
    }

    fn send(
        &self,
        way: Way,
        part: Range<usize>,
        piece_bytes: usize,
        pipes: usize,
        socket: &TcpStream,
    ) -> Result<usize, MeasureError> {
        let ring = self.cache.registrar();
        let needs_fixed = matches!(way, Way::Static | Way::Unregistered);
        let fixed =
            needs_fixed.then(|| self.cache.get(self.fixed.range(0, self.fixed.bytes())?).map_err(MeasureError::from));
        let fixed = fixed.transpose()?;
        let mut slots: Vec<usize> = (0..pipes).rev().collect();
        let (mut ready, mut sending) = (VecDeque::<Piece>::new(), VecDeque::<(u64, Piece)>::new());
        let (mut next, mut held, mut held_most) = (part.start, 0, 0);
        let (mut idle, end) = (true, part.end);
        while next < end || !ready.is_empty() || !sending.is_empty() {
            while next < end && ready.len() + sending.len() < pipes {
                let piece = self.prepare(way, next, piece_bytes, &mut slots)?;
                held += piece_bytes;
                held_most = held_most.max(held);
                next += piece_bytes;
                ready.push_back(piece);
                // The first is on its way while the next are prepared.
                if idle {
                    idle = !self.begin(fixed.as_deref(), &mut ready, &mut sending, socket)?;
                }
            }
            for event in ring.next(piece_bytes)? {
                match event {
                    Event::Free(tag) => {
                        let Some(place) = sending.iter().position(|(of, _)| *of == tag) else { continue };
                        let Some((_, piece)) = sending.remove(place) else { continue };
                        held -= piece.bytes;
                        give_back(ring, piece, &mut slots);
                    }
                    Event::Taken(tag) if sending.back().is_some_and(|(of, _)| *of == tag) => {
                        idle = !self.begin(fixed.as_deref(), &mut ready, &mut sending, socket)?;
                    }
                    Event::Taken(_) => {}
                }
            }
        }
        Ok(match way {
            Way::Unregistered | Way::Static => pipes * piece_bytes,
            Way::Cached => self.file.bytes(),
            Way::Dynamic | Way::Sendfile => held_most,
        })
    }

    /// Begins the next piece, if there is one; says whether.
    fn begin(
        &self,
        fixed: Option<&PinnedBuffer>,
        ready: &mut VecDeque<Piece>,
        sending: &mut VecDeque<(u64, Piece)>,
        socket: &TcpStream,
    ) -> Result<bool, MeasureError> {
        let Some(piece) = ready.pop_front() else { return Ok(false) };
        let buffer = match &piece.source {
            Source::Slot(_) => fixed,
            Source::Own(buffer) => Some(buffer),
            Source::Kept(guard) => Some(&**guard),
        };
        let (buffer, tag) = (buffer.ok_or(MeasureError::Empty)?, self.next_tag.get());
        self.next_tag.set(tag + 1);
        self.cache.registrar().send(buffer, piece.address, piece.bytes, socket.as_fd(), tag)?;
        sending.push_back((tag, piece));
        Ok(true)
    }

    fn prepare(&self, way: Way, at: usize, bytes: usize, slots: &mut Vec<usize>) -> Result<Piece, MeasureError> {
        let slot = || MeasureError::from(std::io::Error::from(std::io::ErrorKind::OutOfMemory));
        let range = self.file.range(at, bytes)?;
        let (address, source) = match way {
            Way::Unregistered | Way::Static => {
                let slot = slots.pop().ok_or_else(slot)?;
                if let (Way::Static, Some(file)) = (way, self.file.fd()) {
                    self.fixed.read_from(slot * bytes, bytes, file, at as u64)?;
                }
                (self.fixed.address(slot * bytes), Source::Slot(slot))
            }
            Way::Cached => (self.file.address(at), Source::Kept(self.cache.get_stable(range)?)),
            Way::Dynamic | Way::Sendfile => {
                (self.file.address(at), Source::Own(self.cache.registrar().register(range)?))
            }
        };
        Ok(Piece { bytes, address, source })
    }

    /// By way of pipes, each filled before the one in front of it is drained.
    fn splice(
        &self,
        part: Range<usize>,
        piece_bytes: usize,
        count: usize,
        socket: &TcpStream,
    ) -> Result<usize, MeasureError> {
        let Some(file) = self.file.fd() else { return Err(MeasureError::Empty) };
        let mut free = (0..count).map(|_| pipe(piece_bytes)).collect::<Result<Vec<_>, _>>()?;
        let mut filled: VecDeque<((OwnedFd, OwnedFd), usize)> = VecDeque::new();
        let (mut next, end) = (part.start as u64, part.end as u64);
        let (mut held, mut held_most) = (0, 0);
        while next < end || !filled.is_empty() {
            while next < end
                && let Some((read, write)) = free.pop()
            {
                let wanted = piece_bytes.min((end - next) as usize);
                let bytes = splice(file, Some(&mut next), &write, None, wanted, SpliceFlags::empty())?;
                held += bytes;
                held_most = held_most.max(held);
                filled.push_back(((read, write), bytes));
            }
            let Some(((read, write), mut left)) = filled.pop_front() else { continue };
            let more = if next < end || !filled.is_empty() { SpliceFlags::MORE } else { SpliceFlags::empty() };
            while left > 0 {
                let bytes = splice(&read, None, socket, None, left, more)?;
                (left, held) = (left - bytes, held - bytes);
                if bytes == 0 {
                    return Err(std::io::Error::from(std::io::ErrorKind::WriteZero).into());
                }
            }
            free.push((read, write));
        }
        Ok(held_most)
    }
}

fn give_back(ring: &SendRing, piece: Piece, slots: &mut Vec<usize>) {
    match piece.source {
        Source::Slot(slot) => slots.push(slot),
        Source::Own(buffer) => ring.deregister(buffer),
        Source::Kept(guard) => drop(guard),
    }
}

fn pipe(bytes: usize) -> Result<(OwnedFd, OwnedFd), MeasureError> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    // Refused over the user's limit of pipe pages: then a piece goes in parts.
    let _ = fcntl_setpipe_size(&write, bytes);
    Ok((read, write))
}

/// A connection whose other end takes everything and answers each file with a byte.
fn connect(file_bytes: usize) -> Result<(TcpStream, JoinHandle<std::io::Result<()>>), MeasureError> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let socket = TcpStream::connect(listener.local_addr()?)?;
    socket.set_nodelay(true)?;
    rustix::net::sockopt::set_tcp_congestion(&socket, CONGESTION_CONTROL)?;
    let (mut peer, _) = listener.accept()?;
    peer.set_nodelay(true)?;
    let receiver = std::thread::Builder::new().name("byway-receiver".to_owned()).spawn(move || {
        let mut buffer = vec![0; RECEIVED_BYTES];
        let mut left = file_bytes;
        loop {
            let wanted = left.min(buffer.len());
            let bytes = peer.read(&mut buffer[..wanted])?;
            if bytes == 0 {
                return Ok(());
            }
            // What was sent is free when it is acknowledged. A network card does that at once; TCP delays it by 40 ms where it takes the
            // connection for a conversation, which each file's answer makes it do, and one piece in hand waits for that.
            rustix::net::sockopt::set_tcp_quickack(&peer, true)?;
            left -= bytes;
            if left == 0 {
                peer.write_all(&[1])?;
                left = file_bytes;
            }
        }
    })?;
    Ok((socket, receiver))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_sends_whole_files_and_holds_what_it_says() {
        let page = 4096;
        let sender = FileSender::new(64 * page, 24 * page).unwrap();
        for way in [Way::Unregistered, Way::Static, Way::Dynamic, Way::Cached, Way::Sendfile] {
            for (file, piece, pipes) in [(4, 4, 1), (16, 4, 1), (16, 4, 2), (24, 4, 6)] {
                let sizes = SendSizes { file_bytes: file * page, piece_bytes: piece * page, pipes };
                let sent = sender.run(way, sizes, Duration::from_millis(2));
                let sent = sent.unwrap_or_else(|error| panic!("{way:?}: {error}"));
                assert!(sent.bytes > 0 && sent.bytes.is_multiple_of((file * page) as u64), "{way:?} {sent:?}");
                let most = if way == Way::Cached { 64 } else { piece * pipes };
                assert!(sent.held_bytes > 0 && sent.held_bytes <= most * page, "{way:?} {sent:?}");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let sender = FileSender::new(8 * 4096, 4096).unwrap();
        for (file_bytes, piece_bytes, pipes) in [(0, 1, 1), (4096, 4096, 2), (4096, 3000, 1), (16 * 4096, 4096, 1)] {
            let sizes = SendSizes { file_bytes, piece_bytes, pipes };
            let refused = sender.run(Way::Static, sizes, Duration::ZERO);
            assert!(matches!(refused, Err(MeasureError::Empty)), "{sizes:?}");
        }
    }
}
