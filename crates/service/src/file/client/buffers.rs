//! Memory for large reads and writes, with windows that stay open to the server's session.

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

    /// Copies what the server has put there.
    pub(super) fn read(&self, into: &mut [u8]) -> Result<(), SubmitError> {
        self.memory.read(0, into)
    }

    /// Copies in what the server is to get.
    pub(super) fn write(&self, from: &[u8]) -> Result<(), SubmitError> {
        self.memory.write(0, from)
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

    /// One for a session.
    ///
    /// # Errors
    /// The session has ended, or this machine has no memory, which another session would not change.
    pub(super) fn take(&self, node: &Node, (session, number): (Session, u64)) -> Result<Buffer, Failure> {
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
