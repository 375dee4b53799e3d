//! Streams and listeners on the ring.

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use io_uring::types::Fd;
use io_uring::{opcode, squeue};
use rustix::io::Errno;

use super::slot::{Kind, SocketAddress};
use super::zero_copy::{self, ZeroCopy};
use super::{DATA_CANCEL, Stream, Uring};
use crate::epoll::{fill_scatter, message};
use crate::net;
use crate::op::{Address, Completion, File, Listener, Op, Outcome, Socket, Token};
use crate::splice::{self, Progress, SplicedSend};
use crate::{Gather, Scatter};

/// How long a closed stream's last bytes are offered to a peer that does not take them, while they pin frames.
const ABANDON_AFTER: Duration = Duration::from_secs(10);

/// What ends an accept that is then begun again. Of those that were not cancelled here, the thread has ended that had submitted
/// them.
const RETRIED: [i32; 4] = [libc::ECONNABORTED, libc::EINTR, libc::EAGAIN, libc::ECANCELED];

impl Uring {
    /// A stream's descriptor.
    pub(crate) fn descriptor(&self, socket: Socket) -> Option<BorrowedFd<'_>> {
        Some(self.streams.get(socket.index, socket.generation)?.fd.as_fd())
    }

    pub(crate) fn readable_bytes(&self, socket: Socket) -> usize {
        self.streams.get(socket.index, socket.generation).map_or(0, |stream| net::readable_bytes(stream.fd.as_fd()))
    }

    pub(crate) fn path_state(&self, socket: Socket) -> Option<crate::PathState> {
        crate::path::ask(self.streams.get(socket.index, socket.generation)?.fd.as_fd())
    }

    pub(crate) fn receive_into_file(&mut self, socket: Socket, file: File, offset: u64, len: usize) -> usize {
        match self.streams.get(socket.index, socket.generation) {
            Some(stream) if stream.receive.is_none() && !stream.closing => {
                self.os.receive_into_file(stream.fd.as_fd(), file, offset, len)
            }
            _ => 0,
        }
    }

    pub(super) fn start_receive(&mut self, socket: Socket, into: Scatter, min: usize, token: Token) {
        let error = match self.streams.get(socket.index, socket.generation) {
            None => Some(Errno::BADF),
            Some(stream) if stream.closing => Some(Errno::BADF),
            Some(stream) if stream.receive.is_some() => Some(Errno::BUSY),
            Some(_) if into.len() < min => Some(Errno::INVAL),
            Some(_) => None,
        };
        if let Some(error) = error {
            let outcome = Outcome::Received { into, result: Err(error) };
            return self.os.ready.push_back(Completion { token, outcome });
        }
        let data = self.occupy(token, Kind::Receive { socket, into, min });
        if let Some(stream) = self.streams.get_mut(socket.index, socket.generation) {
            stream.receive = Some(data);
        }
        self.receive_more(data);
    }

    pub(super) fn receive_more(&mut self, data: u64) {
        let Some(slot) = self.slots.get_mut(data as u32, (data >> 32) as u32) else { return };
        let progress = slot.progress;
        let Kind::Receive { socket, into, .. } = &mut slot.kind else { return };
        let Some(stream) = self.streams.get(socket.index, socket.generation) else { return };
        let fd = Fd(stream.fd.as_raw_fd());
        fill_scatter(into, progress, &mut slot.iovecs);
        let entry = if let [one] = slot.iovecs[..] {
            opcode::Recv::new(fd, one.iov_base.cast(), one.iov_len as u32).build()
        } else {
            slot.message = message(&slot.iovecs);
            opcode::RecvMsg::new(fd, &raw mut slot.message).build()
        };
        self.push(entry, data);
    }

    pub(super) fn start_send(&mut self, socket: Socket, gather: Gather, token: Token) {
        let error = match self.streams.get(socket.index, socket.generation) {
            None => Some(Errno::BADF),
            Some(stream) if stream.closing => Some(Errno::BADF),
            Some(stream) if stream.send.is_some() => Some(Errno::BUSY),
            Some(_) => self.os.use_gather(&gather).err(),
        };
        if let Some(error) = error {
            let outcome = Outcome::Sent { gather, result: Err(error) };
            return self.os.ready.push_back(Completion { token, outcome });
        }
        if gather.is_empty() {
            return self.os.ready.push_back(Completion { token, outcome: Outcome::Sent { gather, result: Ok(0) } });
        }
        let tcp = self.streams.get(socket.index, socket.generation).is_some_and(|stream| stream.tcp);
        let splice = (tcp && splice::is_worth_it(&gather)).then(SplicedSend::default);
        let data = self.occupy(token, Kind::Send { socket, gather, splice });
        if let Some(stream) = self.streams.get_mut(socket.index, socket.generation) {
            stream.send = Some(data);
        }
        self.send_more(data);
    }

    pub(super) fn send_more(&mut self, data: u64) {
        let zero_copy = self.sends_zero_copy(data);
        let Some(slot) = self.slots.get_mut(data as u32, (data >> 32) as u32) else { return };
        let Kind::Send { socket, gather, splice } = &mut slot.kind else { return };
        let Some(stream) = self.streams.get(socket.index, socket.generation) else { return };
        if let Some(splice) = splice {
            let went = splice.advance(&mut self.os, stream.fd.as_fd(), gather, &mut slot.progress, &mut slot.iovecs);
            let raw = stream.fd.as_raw_fd();
            let total = gather.len();
            return match went {
                Ok(Progress::Done) => self.finish(data, Ok(total), Vec::new()),
                Ok(Progress::Blocked) => self.push(opcode::PollAdd::new(Fd(raw), libc::POLLOUT as u32).build(), data),
                Err(error) => self.finish(data, Err(error), Vec::new()),
            };
        }
        let fd = Fd(stream.fd.as_raw_fd());
        self.os.iovecs(gather, slot.progress, &mut slot.iovecs);
        slot.message = message(&slot.iovecs);
        let flags = (libc::MSG_NOSIGNAL | libc::MSG_WAITALL) as u32;
        let entry = if zero_copy {
            zero_copy::entry(slot, fd.0, flags)
        } else {
            opcode::SendMsg::new(fd, &raw const slot.message).flags(flags).build()
        };
        self.push(entry, data);
    }

    pub(super) fn start_accept(&mut self, listener: Listener, token: Token) {
        let Ok(fd) = self.os.listener(listener).map(AsRawFd::as_raw_fd) else {
            return self.os.fail(Op::Accept { listener }, token, Errno::BADF);
        };
        let data = self.occupy(token, Kind::Accept { listener });
        self.push(accept_entry(fd), data);
    }

    pub(super) fn start_connect(&mut self, to: Address, token: Token) {
        let prepared = SocketAddress::new(&to).and_then(|address| {
            let fd = net::stream_socket(address.family()).and_then(|fd| net::prepare_stream(&fd).map(|_| fd));
            Ok((address, fd.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?))
        });
        match prepared {
            Err(error) => self.os.fail(Op::Connect { to }, token, error),
            Ok((address, fd)) => {
                let raw = fd.as_raw_fd();
                let data = self.occupy(token, Kind::Connect { fd: Some(fd), address });
                let Some(slot) = self.slot_mut(data) else { return };
                let Kind::Connect { address, .. } = &slot.kind else { return };
                let (ptr, len) = address.raw();
                let entry = opcode::Connect::new(Fd(raw), ptr, len).build();
                self.push(entry, data);
            }
        }
    }

    pub(super) fn accepted(&mut self, data: u64, listener: Listener, result: i32, more: bool) {
        if result >= 0 {
            // SAFETY: the kernel has just made this descriptor for us, and it has no other owner.
            let fd = unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(result) };
            if let (Ok(socket), Some(slot)) = (self.adopt(fd), self.slot_mut(data)) {
                let token = slot.token;
                self.os.ready.push_back(Completion { token, outcome: Outcome::Accepted(Ok(socket)) });
            }
        }
        if more {
            return;
        }
        let cancelled = self.slot_mut(data).is_none_or(|slot| slot.cancelled);
        match (result, self.os.listener(listener).map(AsRawFd::as_raw_fd)) {
            (_, Ok(_)) if cancelled => self.finish(data, Err(Errno::CANCELED), Vec::new()),
            (n, Ok(fd)) if n >= 0 || RETRIED.contains(&-n) => self.push(accept_entry(fd), data),
            (n, Ok(_)) => self.finish(data, Err(Errno::from_raw_os_error(-n)), Vec::new()),
            (_, Err(_)) => self.finish(data, Err(Errno::CANCELED), Vec::new()),
        }
    }

    pub(super) fn connected(&mut self, data: u64, outcome: Result<usize, Errno>) {
        let Some(slot) = self.slot_mut(data) else { return };
        let Kind::Connect { fd, address } = &mut slot.kind else { return };
        let (Some(fd), Ok(_)) = (fd.take(), outcome) else {
            return self.finish(data, Err(outcome.err().unwrap_or(Errno::CANCELED)), Vec::new());
        };
        let token = slot.token;
        let tcp = address.is_tcp();
        let socket = self.insert_stream(fd, tcp);
        self.os.ready.push_back(Completion { token, outcome: Outcome::Connected(Ok(socket)) });
        self.slots.remove(data as u32, (data >> 32) as u32);
    }

    /// Notes that an operation no longer uses a stream, and drops the stream if it is closing and this was the last.
    pub(super) fn leave(&mut self, socket: Socket, data: u64) {
        let Some(stream) = self.streams.get_mut(socket.index, socket.generation) else { return };
        if stream.receive == Some(data) {
            stream.receive = None;
        }
        if stream.send == Some(data) {
            stream.send = None;
        }
        self.drop_if_unused(socket);
    }

    /// Drops a stream that is closing, once nothing of it is left.
    pub(super) fn drop_if_unused(&mut self, socket: Socket) {
        let Some(stream) = self.streams.get(socket.index, socket.generation) else { return };
        if stream.closing && stream.receive.is_none() && stream.send.is_none() && stream.pinned == 0 {
            self.streams.remove(socket.index, socket.generation);
        }
    }

    pub(super) fn insert_stream(&mut self, fd: OwnedFd, tcp: bool) -> Socket {
        let (index, generation) = self.streams.insert(Stream {
            fd,
            tcp,
            receive: None,
            send: None,
            closing: false,
            zero_copy: ZeroCopy::Worth,
            pinned: 0,
        });
        Socket { index, generation }
    }

    pub(crate) fn adopt(&mut self, fd: OwnedFd) -> std::io::Result<Socket> {
        let tcp = net::prepare_stream(&fd)?;
        Ok(self.insert_stream(fd, tcp))
    }

    pub(crate) fn release(&mut self, socket: Socket) -> Option<OwnedFd> {
        let stream = self.streams.get(socket.index, socket.generation)?;
        if stream.receive.is_some() || stream.send.is_some() || stream.closing || stream.pinned > 0 {
            return None;
        }
        Some(self.streams.remove(socket.index, socket.generation)?.fd)
    }

    pub(crate) fn close(&mut self, socket: Socket) {
        let Some(stream) = self.streams.get_mut(socket.index, socket.generation) else { return };
        let ops = [stream.receive, stream.send];
        if ops == [None, None] && stream.pinned == 0 {
            self.streams.remove(socket.index, socket.generation);
            return;
        }
        stream.closing = true;
        // What is sent and not acknowledged pins frames: a peer that does not take it must not keep them for long.
        let _ = net::abandon_after(&stream.fd, ABANDON_AFTER);
        // Ends what is in flight, also a send that waits for room.
        let _ = rustix::net::shutdown(&stream.fd, rustix::net::Shutdown::Both);
        for data in ops.into_iter().flatten() {
            if let Some(slot) = self.slot_mut(data) {
                slot.cancelled = true;
                self.push(opcode::AsyncCancel::new(data).build(), DATA_CANCEL);
            }
        }
    }

    pub(crate) fn shutdown_send(&mut self, socket: Socket) {
        if let Some(stream) = self.streams.get(socket.index, socket.generation) {
            let _ = rustix::net::shutdown(&stream.fd, rustix::net::Shutdown::Write);
        }
    }

    pub(crate) fn is_tcp(&self, socket: Socket) -> bool {
        self.streams.get(socket.index, socket.generation).is_some_and(|stream| stream.tcp)
    }

    pub(crate) fn peer_address(&self, socket: Socket) -> Option<SocketAddr> {
        let stream = self.streams.get(socket.index, socket.generation)?;
        SocketAddr::try_from(rustix::net::getpeername(&stream.fd).ok()??).ok()
    }

    pub(crate) fn keep_alive(&mut self, socket: Socket, idle: Duration) {
        if let Some(stream) = self.streams.get(socket.index, socket.generation) {
            let _ = net::keep_alive(&stream.fd, idle);
        }
    }

    pub(crate) fn listen(&mut self, address: &Address) -> std::io::Result<Listener> {
        self.adopt_listener(net::listen(address)?)
    }

    pub(crate) fn adopt_listener(&mut self, fd: OwnedFd) -> std::io::Result<Listener> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        let (index, generation) = self.os.listeners.insert(fd);
        Ok(Listener { index, generation })
    }

    pub(crate) fn local_address(&self, listener: Listener) -> Option<SocketAddr> {
        SocketAddr::try_from(rustix::net::getsockname(self.os.listener(listener).ok()?).ok()?).ok()
    }

    pub(crate) fn close_listener(&mut self, listener: Listener) {
        let mut found = None;
        for (index, generation, slot) in self.slots.iter_mut() {
            if matches!(slot.kind, Kind::Accept { listener: of } if of == listener) {
                slot.cancelled = true;
                found = Some(u64::from(generation) << 32 | u64::from(index));
            }
        }
        if let Some(data) = found {
            self.push(opcode::AsyncCancel::new(data).build(), DATA_CANCEL);
            // The kernel must have taken the accept's descriptor before it is closed.
            let _ = self.ring.submit();
        }
        self.os.listeners.remove(listener.index, listener.generation);
    }
}

fn accept_entry(fd: i32) -> squeue::Entry {
    opcode::AcceptMulti::new(Fd(fd)).flags(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK).build()
}
