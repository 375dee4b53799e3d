//! Streams under epoll: the state of each, and its attempts to receive, send and connect.

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::AddressFamily;

use super::{Epoll, KIND_STREAM, event_data};
use crate::gather::{Gather, Scatter};
use crate::net;
use crate::op::{Address, Completion, File, Op, Outcome, Socket, Token};
use crate::splice::{self, Progress, SplicedSend};

/// A stream and what it is doing.
pub(super) struct StreamState {
    fd: OwnedFd,
    tcp: bool,
    readable: bool,
    writable: bool,
    /// The peer said that it is done: a short receive no longer means that nothing is left.
    ended: bool,
    connect: Option<Token>,
    receive: Option<Receive>,
    send: Option<Send>,
}

pub(super) struct Receive {
    pub(super) token: Token,
    pub(super) into: Scatter,
    pub(super) min: usize,
    pub(super) got: usize,
}

pub(super) struct Send {
    token: Token,
    gather: Gather,
    sent: usize,
    /// Some of its ranges are spliced.
    splice: Option<SplicedSend>,
}

/// What a stream's socket is registered for.
const INCOMING: EventFlags = EventFlags::IN.union(EventFlags::RDHUP).union(EventFlags::ET);

impl Epoll {
    /// Reports no more that a stream can be written to. Whenever the peer of a Unix socket has read something, the kernel would: the loop would
    /// wake for each byte that it has sent.
    pub(crate) fn ignore_room(&mut self, socket: Socket) {
        let Some(state) = self.streams.get(socket.index, socket.generation) else { return };
        let data = EventData::new_u64(event_data(KIND_STREAM, socket.index, socket.generation));
        // Without it there are more wake-ups, and no harm.
        let _ = epoll::modify(&self.queue, state.fd.as_fd(), data, INCOMING);
    }

    fn register(&mut self, state: StreamState) -> std::io::Result<Socket> {
        let (index, generation) = self.streams.insert(state);
        let data = EventData::new_u64(event_data(KIND_STREAM, index, generation));
        let flags = INCOMING | EventFlags::OUT;
        let socket = Socket { index, generation };
        let Some(state) = self.streams.get(index, generation) else { return Err(Errno::BADF.into()) };
        if let Err(error) = epoll::add(&self.queue, state.fd.as_fd(), data, flags) {
            self.streams.remove(index, generation);
            return Err(error.into());
        }
        Ok(socket)
    }

    pub(crate) fn adopt(&mut self, fd: OwnedFd) -> std::io::Result<Socket> {
        let tcp = net::prepare_stream(&fd)?;
        self.register(StreamState {
            fd,
            tcp,
            readable: true,
            writable: true,
            ended: false,
            connect: None,
            receive: None,
            send: None,
        })
    }

    pub(crate) fn release(&mut self, socket: Socket) -> Option<OwnedFd> {
        let state = self.streams.get(socket.index, socket.generation)?;
        if state.receive.is_some() || state.send.is_some() || state.connect.is_some() {
            return None;
        }
        let fd = self.streams.remove(socket.index, socket.generation)?.fd;
        let _ = epoll::delete(&self.queue, &fd);
        Some(fd)
    }

    /// A stream's descriptor.
    pub(crate) fn descriptor(&self, socket: Socket) -> Option<BorrowedFd<'_>> {
        Some(self.streams.get(socket.index, socket.generation)?.fd.as_fd())
    }

    pub(crate) fn is_tcp(&self, socket: Socket) -> bool {
        self.streams.get(socket.index, socket.generation).is_some_and(|state| state.tcp)
    }

    pub(crate) fn peer_address(&self, socket: Socket) -> Option<SocketAddr> {
        let state = self.streams.get(socket.index, socket.generation)?;
        SocketAddr::try_from(rustix::net::getpeername(&state.fd).ok()??).ok()
    }

    pub(crate) fn keep_alive(&mut self, socket: Socket, idle: Duration) {
        if let Some(state) = self.streams.get(socket.index, socket.generation) {
            let _ = net::keep_alive(&state.fd, idle);
        }
    }

    pub(crate) fn shutdown_send(&mut self, socket: Socket) {
        if let Some(state) = self.streams.get(socket.index, socket.generation) {
            let _ = rustix::net::shutdown(&state.fd, rustix::net::Shutdown::Write);
        }
    }

    pub(crate) fn close(&mut self, socket: Socket) {
        let Some(mut state) = self.streams.remove(socket.index, socket.generation) else { return };
        let _ = epoll::delete(&self.queue, &state.fd);
        if let Some(token) = state.connect.take() {
            self.finish_connect(token, Err(Errno::CANCELED));
        }
        if let Some(receive) = state.receive.take() {
            self.finish_receive(receive, Err(Errno::CANCELED));
        }
        if let Some(send) = state.send.take() {
            self.finish_send(send, Err(Errno::CANCELED));
        }
    }

    pub(super) fn start_connect(&mut self, to: &Address, token: Token) {
        match self.connect(to, token) {
            Ok(None) => self.in_flight += 1,
            Ok(Some(socket)) => {
                self.os.ready.push_back(Completion { token, outcome: Outcome::Connected(Ok(socket)) });
            }
            Err(error) => self.os.fail(Op::Connect { to: to.clone() }, token, error),
        }
    }

    /// The stream, if it is connected at once.
    fn connect(&mut self, to: &Address, token: Token) -> Result<Option<Socket>, Errno> {
        let errno = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        let (fd, begun) = match to {
            Address::Tcp(address) => {
                let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
                let fd = net::stream_socket(family).map_err(errno)?;
                let begun = rustix::net::connect(&fd, address);
                (fd, begun)
            }
            Address::Unix(path) | Address::Shared(path) => {
                let fd = net::stream_socket(AddressFamily::UNIX).map_err(errno)?;
                let begun = rustix::net::connect(&fd, &rustix::net::SocketAddrUnix::new(path)?);
                (fd, begun)
            }
            Address::Rdma(_) => return Err(Errno::OPNOTSUPP),
        };
        let tcp = net::prepare_stream(&fd).map_err(errno)?;
        let pending = match begun {
            Ok(()) => false,
            Err(Errno::INPROGRESS) => true,
            Err(error) => return Err(error),
        };
        let state = StreamState {
            fd,
            tcp,
            readable: !pending,
            writable: !pending,
            ended: false,
            connect: pending.then_some(token),
            receive: None,
            send: None,
        };
        let socket = self.register(state).map_err(errno)?;
        Ok((!pending).then_some(socket))
    }

    fn finish_connect(&mut self, token: Token, result: Result<Socket, Errno>) {
        self.in_flight -= 1;
        self.os.ready.push_back(Completion { token, outcome: Outcome::Connected(result) });
    }

    pub(crate) fn path_state(&self, socket: Socket) -> Option<crate::PathState> {
        crate::path::ask(self.streams.get(socket.index, socket.generation)?.fd.as_fd())
    }

    pub(crate) fn readable_bytes(&self, socket: Socket) -> usize {
        self.streams.get(socket.index, socket.generation).map_or(0, |state| net::readable_bytes(state.fd.as_fd()))
    }

    pub(crate) fn receive_into_file(&mut self, socket: Socket, file: File, offset: u64, len: usize) -> usize {
        match self.streams.get(socket.index, socket.generation) {
            Some(state) if state.receive.is_none() => self.os.receive_into_file(state.fd.as_fd(), file, offset, len),
            _ => 0,
        }
    }

    pub(super) fn start_receive(&mut self, socket: Socket, receive: Receive) {
        let error = match self.streams.get_mut(socket.index, socket.generation) {
            None => Errno::BADF,
            Some(state) if state.receive.is_some() => Errno::BUSY,
            Some(_) if receive.into.len() < receive.min => Errno::INVAL,
            Some(state) => {
                state.receive = Some(receive);
                let readable = state.readable;
                self.in_flight += 1;
                if readable {
                    self.try_receive(socket);
                }
                return;
            }
        };
        let outcome = Outcome::Received { into: receive.into, result: Err(error) };
        self.os.ready.push_back(Completion { token: receive.token, outcome });
    }

    fn try_receive(&mut self, socket: Socket) {
        let Some(state) = self.streams.get_mut(socket.index, socket.generation) else { return };
        let Some(receive) = &mut state.receive else { return };
        let result = loop {
            fill_scatter(&mut receive.into, receive.got, &mut self.iovecs);
            let wanted = receive.into.len() - receive.got;
            match receive_once(&state.fd, &self.iovecs) {
                Ok(0) => break Ok(receive.got),
                Ok(n) => {
                    receive.got += n;
                    self.os.counters.received_bytes += n as u64;
                    self.os.counters.receive_calls += 1;
                    // An edge comes with the next byte, but not again for the end of the stream.
                    state.readable = n == wanted || state.ended;
                    if receive.got >= receive.min {
                        break Ok(receive.got);
                    }
                    if !state.readable {
                        return;
                    }
                }
                Err(Errno::AGAIN) => {
                    state.readable = false;
                    return;
                }
                Err(Errno::INTR) => {}
                Err(error) => break Err(error),
            }
        };
        if let Some(receive) = state.receive.take() {
            self.finish_receive(receive, result);
        }
    }

    fn finish_receive(&mut self, receive: Receive, result: Result<usize, Errno>) {
        self.in_flight -= 1;
        self.os.counters.received_device_bytes += receive.into.device_bytes(receive.got) as u64;
        let outcome = Outcome::Received { into: receive.into, result };
        self.os.ready.push_back(Completion { token: receive.token, outcome });
    }

    pub(super) fn start_send(&mut self, socket: Socket, gather: Gather, token: Token) {
        let error = match self.streams.get_mut(socket.index, socket.generation) {
            None => Some(Errno::BADF),
            Some(state) if state.send.is_some() => Some(Errno::BUSY),
            Some(_) => self.os.use_gather(&gather).err(),
        };
        if let Some(error) = error {
            let outcome = Outcome::Sent { gather, result: Err(error) };
            return self.os.ready.push_back(Completion { token, outcome });
        }
        self.in_flight += 1;
        if let Some(state) = self.streams.get_mut(socket.index, socket.generation) {
            let splice = (state.tcp && splice::is_worth_it(&gather)).then(SplicedSend::default);
            state.send = Some(Send { token, gather, sent: 0, splice });
            if state.writable {
                self.try_send(socket);
            }
        }
    }

    fn try_send(&mut self, socket: Socket) {
        let Some(state) = self.streams.get_mut(socket.index, socket.generation) else { return };
        let Some(send) = &mut state.send else { return };
        let result = loop {
            if let Some(splice) = &mut send.splice {
                let Send { gather, sent, .. } = send;
                match splice.advance(&mut self.os, state.fd.as_fd(), gather, sent, &mut self.iovecs) {
                    Ok(Progress::Done) => break Ok(send.sent),
                    Ok(Progress::Blocked) => {
                        state.writable = false;
                        return;
                    }
                    Err(error) => break Err(error),
                }
            }
            if send.sent == send.gather.len() {
                break Ok(send.sent);
            }
            self.os.iovecs(&send.gather, send.sent, &mut self.iovecs);
            match send_once(&state.fd, &self.iovecs) {
                Ok(n) => send.sent += n,
                Err(Errno::AGAIN) => {
                    state.writable = false;
                    return;
                }
                Err(Errno::INTR) => {}
                Err(error) => break Err(error),
            }
        };
        if let Some(send) = state.send.take() {
            self.finish_send(send, result);
        }
    }

    fn finish_send(&mut self, mut send: Send, result: Result<usize, Errno>) {
        self.in_flight -= 1;
        let spliced = send.splice.as_ref().map_or(0, SplicedSend::spliced);
        if let Some(splice) = &mut send.splice {
            splice.give_back(&mut self.os.pipes);
        }
        self.os.unuse_gather(&send.gather, send.sent, spliced);
        let outcome = Outcome::Sent { gather: send.gather, result };
        self.os.ready.push_back(Completion { token: send.token, outcome });
    }

    pub(super) fn stream_event(&mut self, index: u32, generation: u32, flags: EventFlags) {
        let Some((full, state)) = self.streams.find_by_low_generation(index, generation) else { return };
        let socket = Socket { index, generation: full };
        let failed = flags.intersects(EventFlags::ERR | EventFlags::HUP);
        if let Some(token) = state.connect
            && (failed || flags.contains(EventFlags::OUT))
        {
            state.connect = None;
            let result = match rustix::net::sockopt::socket_error(&state.fd) {
                Ok(Ok(())) => Ok(socket),
                Ok(Err(error)) | Err(error) => Err(error),
            };
            (state.readable, state.writable) = (true, true);
            if result.is_err() {
                self.streams.remove(index, full);
            }
            return self.finish_connect(token, result);
        }
        state.ended |= failed || flags.contains(EventFlags::RDHUP);
        if failed || flags.intersects(EventFlags::IN | EventFlags::RDHUP) {
            state.readable = true;
            self.try_receive(socket);
        }
        if failed || flags.contains(EventFlags::OUT) {
            if let Some(state) = self.streams.get_mut(index, full) {
                state.writable = true;
            }
            self.try_send(socket);
        }
    }

    pub(super) fn cancel_streams(&mut self, token: Token) {
        let mut receives = Vec::new();
        let mut sends = Vec::new();
        let mut connects = Vec::new();
        for (index, generation, state) in self.streams.iter_mut() {
            receives.extend(state.receive.take_if(|receive| receive.token == token));
            sends.extend(state.send.take_if(|send| send.token == token));
            if state.connect.take_if(|connecting| *connecting == token).is_some() {
                connects.push((index, generation));
            }
        }
        for receive in receives {
            let result = if receive.got > 0 { Ok(receive.got) } else { Err(Errno::CANCELED) };
            self.finish_receive(receive, result);
        }
        for send in sends {
            self.finish_send(send, Err(Errno::CANCELED));
        }
        for (index, generation) in connects {
            self.streams.remove(index, generation);
            self.finish_connect(token, Err(Errno::CANCELED));
        }
    }
}

/// Describes `scatter` after its first `skip` bytes.
pub(crate) fn fill_scatter(scatter: &mut Scatter, mut skip: usize, out: &mut Vec<libc::iovec>) {
    out.clear();
    for piece in &mut scatter.pieces {
        if skip >= piece.len {
            skip -= piece.len;
            continue;
        }
        let len = piece.len - skip;
        out.push(libc::iovec { iov_base: piece.frame.range(piece.start + skip, len).cast(), iov_len: len });
        skip = 0;
        if out.len() == crate::limits::SEGMENTS_PER_CALL_MAX {
            return;
        }
    }
}

fn receive_once(fd: &OwnedFd, iovecs: &[libc::iovec]) -> Result<usize, Errno> {
    let n = if let [one] = iovecs {
        // SAFETY: the iovec describes part of a frame that the operation owns.
        unsafe { libc::recv(fd.as_raw_fd(), one.iov_base, one.iov_len, libc::MSG_DONTWAIT) }
    } else {
        let mut message = message(iovecs);
        // SAFETY: the iovecs describe parts of frames that the operation owns.
        unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) }
    };
    outcome(n)
}

fn send_once(fd: &OwnedFd, iovecs: &[libc::iovec]) -> Result<usize, Errno> {
    let message = message(iovecs);
    // SAFETY: the iovecs describe heads and frames that the operation owns, and mappings that are in use; the kernel
    // answers EFAULT where a mapping has no page any more.
    let n = unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
    outcome(n)
}

pub(crate) fn message(iovecs: &[libc::iovec]) -> libc::msghdr {
    // SAFETY: `msghdr` is plain data, and all zeroes (null pointers, no lengths) is a value of it.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iovecs.as_ptr().cast_mut();
    message.msg_iovlen = iovecs.len();
    message
}

fn outcome(n: isize) -> Result<usize, Errno> {
    usize::try_from(n).map_err(|_| Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}
