//! The simulated backend.

/// A file of a simulated disk.
#[derive(Debug, Clone)]
pub struct SimFile {}

impl SimFile {
    pub(crate) fn len(&self) -> u64 {
        0
    }
    pub(crate) fn block_bytes(&self) -> u32 {
        512
    }
}

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::*;

/// One simulated loop.
pub(crate) struct SimLoop {}
impl SimLoop {
    pub(crate) fn now(&self) -> Instant {
        unimplemented!()
    }
    pub(crate) fn resident(&self, file: File, offset: u64, len: usize) -> bool {
        unimplemented!()
    }
    pub(crate) fn counters(&self) -> Counters {
        unimplemented!()
    }
    pub(crate) fn waker(&self) -> Waker {
        unimplemented!()
    }
    pub(crate) fn submit(&mut self, op: Op, token: Token) {
        unimplemented!()
    }
    pub(crate) fn cancel(&mut self, token: Token) {
        unimplemented!()
    }
    pub(crate) fn reap(&mut self, into: &mut Vec<Completion>, wait: Wait) -> std::io::Result<()> {
        unimplemented!()
    }
    pub(crate) fn listen(&mut self, address: &Address) -> std::io::Result<Listener> {
        unimplemented!()
    }
    pub(crate) fn adopt_listener(&mut self, fd: OwnedFd) -> std::io::Result<Listener> {
        unimplemented!()
    }
    pub(crate) fn local_address(&self, listener: Listener) -> Option<SocketAddr> {
        unimplemented!()
    }
    pub(crate) fn close_listener(&mut self, listener: Listener) {
        unimplemented!()
    }
    pub(crate) fn adopt(&mut self, fd: OwnedFd) -> std::io::Result<Socket> {
        unimplemented!()
    }
    pub(crate) fn release(&mut self, socket: Socket) -> Option<OwnedFd> {
        unimplemented!()
    }
    pub(crate) fn peer_address(&self, socket: Socket) -> Option<SocketAddr> {
        unimplemented!()
    }
    pub(crate) fn keep_alive(&mut self, socket: Socket, idle: Duration) {
        unimplemented!()
    }
    pub(crate) fn close(&mut self, socket: Socket) {
        unimplemented!()
    }
    pub(crate) fn shutdown_send(&mut self, socket: Socket) {
        unimplemented!()
    }
    pub(crate) fn add_file(&mut self, file: Arc<OpenFile>) -> File {
        unimplemented!()
    }
    pub(crate) fn remove_file(&mut self, file: File) {
        unimplemented!()
    }
    pub(crate) fn try_write(&mut self, file: File, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        unimplemented!()
    }
}
