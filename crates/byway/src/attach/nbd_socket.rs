//! The requests of the kernel's NBD client, on the volume of its device. They come over a socket pair, so no server of NBD is seen by
//! the kernel, and no loss of byway's server either.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;

use byway_frontend::limits::UBLK_REQUEST_BYTES_MAX;
use byway_frontend::nbd::errno::Errno as NbdErrno;
use byway_frontend::nbd::flags::{CommandFlags, TransmissionFlags};
use byway_frontend::nbd::reply::Replies;
use byway_frontend::nbd::request::{BlockSizes, Command, Headers, Request as NbdRequest, Rules, Tag};
use byway_frontend::nbd::transmission::{Parsed, Transmission};
use byway_frontend::nbd::wire::CompactRequest;
use byway_reactor::{ByteRange, Errno, Frame};
use byway_service::block::ZeroFlags;
use byway_service::block::client::{Request, VolumeInfo};
use rustix::io::retry_on_intr;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, SocketFlags, SocketType, recv, sendmsg, socketpair,
};

use super::command::AttachError;
use super::volume_server::{Answer, KernelSide, KernelWrite, Requests, Supply};
use crate::limits::ATTACH_REQUESTS_PER_TURN;

/// This process's end of the socket pair.
pub(super) struct NbdSocket {
    socket: OwnedFd,
    rules: Rules,
    supply: Supply,
    header: [u8; CompactRequest::BYTES],
    /// Bytes of the next header that have come.
    header_received: usize,
    payload: Option<Payload>,
    reply: Vec<u8>,
}

/// The kernel's end, and what its device is to be.
pub(super) struct KernelSocket {
    pub socket: OwnedFd,
    pub flags: TransmissionFlags,
    pub request_bytes_max: u32,
}

/// The payload of a write, on its way.
struct Payload {
    request: NbdRequest,
    /// None as long as there is no memory for it.
    frame: Option<Frame>,
    received: usize,
}

impl NbdSocket {
    /// Makes the socket pair.
    pub(super) fn open(info: &VolumeInfo) -> Result<(Self, KernelSocket), AttachError> {
        let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let (socket, kernel) = pair.map_err(|error| AttachError::Thread(error.into()))?;
        let access = if info.read_only {
            TransmissionFlags::READ_ONLY
        } else {
            TransmissionFlags::SEND_FLUSH
                | TransmissionFlags::SEND_FUA
                | TransmissionFlags::SEND_TRIM
                | TransmissionFlags::SEND_WRITE_ZEROES
        };
        let flags = TransmissionFlags::HAS_FLAGS | access;
        let maximum = info.request_max.clamp(4096, UBLK_REQUEST_BYTES_MAX) / 4096 * 4096;
        let block = BlockSizes { maximum, ..BlockSizes::default() };
        // The size changes with the volume's: `is_inside`.
        let size_bytes = u64::MAX;
        let rules = Rules { headers: Headers::Simple, size_bytes, block, flags, allocation_context: None };
        let server = Self {
            socket,
            rules,
            supply: Supply::Some,
            header: [0; CompactRequest::BYTES],
            header_received: 0,
            payload: None,
            reply: Vec::with_capacity(Replies::HEADER_BYTES_MAX),
        };
        Ok((server, KernelSocket { socket: kernel, flags, request_bytes_max: maximum }))
    }

    /// Takes a request whose header and payload have come; `false` if there is none.
    fn take_request(&mut self, requests: &mut Requests) -> Result<bool, String> {
        if self.payload.is_none() {
            if !self.receive_header()? {
                return Ok(false);
            }
            match Transmission::new(self.rules).parse(&self.header) {
                Parsed::Request { request, .. } if request.payload_bytes() == 0 => {
                    self.request(&request, requests);
                    return Ok(true);
                }
                Parsed::Request { request, .. } => {
                    self.payload = Some(Payload { request, frame: None, received: 0 });
                }
                // The kernel keeps the rules, which it was told.
                bad => return Err(format!("the kernel's NBD client has lost its place: {bad:?}")),
            }
        }
        self.receive_payload(requests)
    }

    fn receive_header(&mut self) -> Result<bool, String> {
        while self.header_received < self.header.len() {
            match receive(&self.socket, &mut self.header[self.header_received..], &mut self.supply)? {
                0 => return Ok(false),
                bytes => self.header_received += bytes,
            }
        }
        self.header_received = 0;
        Ok(true)
    }

    /// Receives the rest of a write, and writes it.
    fn receive_payload(&mut self, requests: &mut Requests) -> Result<bool, String> {
        let Some(mut payload) = self.payload.take() else { return Ok(false) };
        let len = payload.request.length as usize;
        let Some(mut frame) = payload.frame.take().or_else(|| requests.alloc(len)) else {
            // One comes back with the next answer, or the next flush.
            requests.wait_for_room();
            self.payload = Some(payload);
            return Ok(false);
        };
        while payload.received < len {
            match receive(&self.socket, &mut frame.bytes_mut()[payload.received..len], &mut self.supply)? {
                0 => {
                    self.payload = Some(Payload { frame: Some(frame), ..payload });
                    return Ok(false);
                }
                bytes => payload.received += bytes,
            }
        }
        let NbdRequest { cookie, offset, flags, .. } = payload.request;
        if is_inside(&payload.request, &requests.info) {
            let write = KernelWrite { unique: cookie, offset, len, durable: flags.has(CommandFlags::FUA) };
            requests.write(write, frame);
        } else {
            self.reply_error(cookie);
        }
        Ok(true)
    }

    /// Asks the volume. The kernel's cookies are the numbers of its requests.
    fn request(&mut self, request: &NbdRequest, requests: &mut Requests) {
        let &NbdRequest { command, flags, cookie, offset, length: len } = request;
        let durable = flags.has(CommandFlags::FUA);
        let zero = |keep_space| {
            let flags = ZeroFlags { keep_space, durable, ..ZeroFlags::default() };
            Request::Zero { offset, len, flags }
        };
        match command {
            Command::Disconnect => self.supply = Supply::Ended,
            _ if !is_inside(request, &requests.info) => self.reply_error(cookie),
            Command::Read => requests.read(cookie, offset, len as usize),
            Command::Flush => requests.ask_plain(cookie, Request::Flush),
            Command::Trim => requests.ask_plain(cookie, zero(false)),
            Command::WriteZeroes => requests.ask_plain(cookie, zero(flags.has(CommandFlags::NO_HOLE))),
            Command::Write | Command::Cache | Command::BlockStatus => self.reply_error(cookie),
        }
    }

    /// The kernel tells its users of each error as an I/O error.
    fn reply_error(&mut self, cookie: u64) {
        self.reply.clear();
        Replies::new(self.rules).error(&mut self.reply, Tag { cookie, offset: 0 }, NbdErrno::InputOutput, "");
        self.send(&[]);
    }

    /// Sends the reply's header and these bytes. It waits where the socket is full: the kernel receives without waiting for this process.
    fn send(&self, data: &[u8]) {
        let mut parts = [IoSlice::new(&self.reply), IoSlice::new(data)];
        let mut parts = &mut parts[..];
        while parts.iter().any(|part| !part.is_empty()) {
            let nothing = &mut SendAncillaryBuffer::default();
            match retry_on_intr(|| sendmsg(&self.socket, parts, nothing, SendFlags::NOSIGNAL)) {
                Ok(bytes) => IoSlice::advance_slices(&mut parts, bytes),
                Err(error) => return tracing::error!(%error, "cannot send a reply to the kernel"),
            }
        }
    }
}

/// The kernel may ask past the end of a volume that has shrunk.
fn is_inside(request: &NbdRequest, info: &VolumeInfo) -> bool {
    ByteRange::new(request.offset, request.length).ends_by(info.len)
}

/// Receives bytes; 0 if there are none, and `supply` says whether there will be.
fn receive(socket: &OwnedFd, into: &mut [u8], supply: &mut Supply) -> Result<usize, String> {
    match retry_on_intr(|| recv(socket, &mut *into, RecvFlags::DONTWAIT)) {
        Ok((0, _)) => *supply = Supply::Ended,
        Ok((bytes, _)) => return Ok(bytes),
        Err(Errno::AGAIN) => *supply = Supply::Nothing,
        Err(error) => return Err(format!("requests of the kernel's NBD client cannot be received: {error}")),
    }
    Ok(0)
}

impl KernelSide for NbdSocket {
    fn readiness(&self) -> io::Result<OwnedFd> {
        self.socket.try_clone()
    }

    fn note_readable(&mut self) {
        if self.supply == Supply::Nothing {
            self.supply = Supply::Some;
        }
    }

    fn take_requests(&mut self, requests: &mut Requests) -> Result<(), String> {
        for _ in 0..ATTACH_REQUESTS_PER_TURN {
            if self.supply != Supply::Some || requests.has_waiting() || !self.take_request(requests)? {
                break;
            }
        }
        Ok(())
    }

    fn supply(&self) -> Supply {
        self.supply
    }

    fn copy_payload(&mut self, _: u64, _: &mut Frame) -> io::Result<()> {
        // The payloads of NBD come with their requests.
        Err(io::ErrorKind::Unsupported.into())
    }

    fn answer(&mut self, unique: u64, answer: Result<Answer<'_>, Errno>) {
        let Ok(answer) = answer else { return self.reply_error(unique) };
        self.reply.clear();
        // All successes have the same header in simple replies; the bytes of a read follow it.
        Replies::new(self.rules).success(&mut self.reply, Tag { cookie: unique, offset: 0 });
        self.send(if let Answer::Read(bytes) = answer { bytes } else { &[] });
    }

    fn submit(&mut self) -> Result<(), String> {
        // Each reply is sent at once.
        Ok(())
    }
}
