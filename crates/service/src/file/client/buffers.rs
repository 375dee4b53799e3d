//! Memory for large reads and writes, with windows that stay open to the server's session.

use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use byway_fabric::node::{Descriptor, Memory, Node, Rights, Session, SubmitError, Window};
use rustix::io::Errno;

use super::super::wire::CallError;
use super::connection::Failure;
use crate::limits::{FILE_BUFFERS_MAX, FILE_TRANSFER_MAX};

/// One of them.
#[derive(Debug)]
pub(super) struct Buffer {
    memory: Memory,
    window: Window,
    /// Which of the client's sessions.
    number: u64,
}

impl Buffer {
    pub(super) fn descriptor(&self) -> Descriptor {
        self.window.descriptor()
    }

    /// Copies in what the server is to get.
    pub(super) fn write(&self, from: &[u8]) -> Result<(), SubmitError> {
        self.memory.write(0, from)
    }
}

/// A buffer of a call that has ended; it is given back when this is dropped.
#[derive(Debug)]
pub(super) struct BufferInUse<'a> {
    buffer: Option<Buffer>,
    buffers: &'a Buffers,
}

impl<'a> BufferInUse<'a> {
    pub(super) fn new(buffer: Buffer, buffers: &'a Buffers) -> Self {
        Self { buffer: Some(buffer), buffers }
    }

    fn memory(&self) -> Result<&Memory, Errno> {
        self.buffer.as_ref().map(|buffer| &buffer.memory).ok_or(Errno::IO)
    }
}

impl Drop for BufferInUse<'_> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.buffers.give_back(buffer);
        }
    }
}

/// Bytes that were read, where the server has put them.
#[derive(Debug)]
pub struct Data<'a>(pub(super) DataLocation<'a>);

/// Where the bytes lie.
#[derive(Debug)]
pub(super) enum DataLocation<'a> {
    /// They came with the answer.
    Message(Vec<u8>),
    /// So many at the start of a buffer.
    Buffer(BufferInUse<'a>, usize),
}

impl Data<'_> {
    /// Bytes.
    pub fn len(&self) -> usize {
        match &self.0 {
            DataLocation::Message(bytes) => bytes.len(),
            DataLocation::Buffer(_, len) => *len,
        }
    }

    /// None: at the end of the file.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// More than were asked for are an error of the server.
    pub(super) fn of_at_most(self, len: usize) -> Result<Self, Errno> {
        if self.len() <= len { Ok(self) } else { Err(Errno::PROTO) }
    }

    /// Copies them to the start of `into`, which is as long at least.
    ///
    /// # Errors
    /// `EIO` if it is shorter.
    pub fn copy_to(&self, into: &mut [u8]) -> Result<(), Errno> {
        let into = into.get_mut(..self.len()).ok_or(Errno::IO)?;
        match &self.0 {
            DataLocation::Message(bytes) => into.copy_from_slice(bytes),
            DataLocation::Buffer(buffer, _) => buffer.memory()?.read(0, into).map_err(|_| Errno::IO)?,
        }
        Ok(())
    }

    /// Writes them to a descriptor, behind `head`, by one system call and without a copy in this process; gives how many bytes that has
    /// taken, of both.
    ///
    /// # Errors
    /// The system call's.
    pub fn write_to(&self, fd: BorrowedFd<'_>, head: &[u8]) -> std::io::Result<usize> {
        match &self.0 {
            DataLocation::Message(bytes) => {
                let parts = [IoSlice::new(head), IoSlice::new(bytes)];
                Ok(rustix::io::retry_on_intr(|| rustix::io::writev(fd, &parts))?)
            }
            DataLocation::Buffer(buffer, len) => buffer.memory()?.write_to(fd, head, 0..*len),
        }
    }
}

/// Unused buffers.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    idle: Mutex<Vec<Buffer>>,
}

impl Buffers {
    fn idle(&self) -> MutexGuard<'_, Vec<Buffer>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One for a session, which has that number.
    ///
    /// # Errors
    /// The session has ended, or this machine has no memory, which another session would not change.
    pub(super) fn take(&self, node: &Node, session: Session, number: u64) -> Result<Buffer, Failure> {
        {
            let mut idle = self.idle();
            idle.retain(|buffer| buffer.number == number);
            if let Some(buffer) = idle.pop() {
                return Ok(buffer);
            }
        }
        let memory = node.register_shared(FILE_TRANSFER_MAX).map_err(|error| {
            tracing::error!(%error, "no memory for a large read or write");
            Failure::Call(CallError::Errno(Errno::from_io_error(&error).unwrap_or(Errno::NOMEM)))
        })?;
        let window = node.open_window(session, &memory, 0..FILE_TRANSFER_MAX, Rights::BOTH);
        Ok(Buffer { memory, window: window.map_err(|_| Failure::NotSent)?, number })
    }

    /// Takes one back whose call has ended with an answer.
    pub(super) fn give_back(&self, buffer: Buffer) {
        let mut idle = self.idle();
        if idle.len() < FILE_BUFFERS_MAX {
            idle.push(buffer);
        }
    }

    /// The session has ended.
    pub(super) fn clear(&self) {
        self.idle().clear();
    }
}
