//! Descriptors of others: one poll for each wait.

use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;

use io_uring::opcode;
use io_uring::types::Fd;
use rustix::io::Errno;

use super::slot::Kind;
use super::{DATA_CANCEL, Uring};
use crate::op::{Completion, Descriptor, Op, Outcome, Token};

impl Uring {
    pub(crate) fn add_descriptor(&mut self, fd: OwnedFd) -> Descriptor {
        self.os.add_descriptor(fd)
    }

    /// Ends a wait, and lets go of our descriptor, which is closed when the kernel has it no more.
    pub(crate) fn remove_descriptor(&mut self, descriptor: Descriptor) {
        let mut found = None;
        for (index, generation, slot) in self.slots.iter_mut() {
            if matches!(slot.kind, Kind::Readable { descriptor: of, .. } if of == descriptor) {
                slot.cancelled = true;
                found = Some(u64::from(generation) << 32 | u64::from(index));
            }
        }
        if let Some(data) = found {
            self.push(opcode::AsyncCancel::new(data).build(), DATA_CANCEL);
        }
        self.os.descriptors.remove(descriptor.index, descriptor.generation);
    }

    pub(super) fn start_wait(&mut self, descriptor: Descriptor, token: Token) {
        let fd = match self.os.wait_for(descriptor, token) {
            Ok(described) => Rc::clone(&described.fd),
            Err(error) => return self.os.fail(Op::Readable { descriptor }, token, error),
        };
        let raw = fd.as_raw_fd();
        let data = self.occupy(token, Kind::Readable { descriptor, fd });
        self.push(opcode::PollAdd::new(Fd(raw), libc::POLLIN as u32).build(), data);
    }

    /// The poll has ended. One that was not cancelled here is submitted again: the thread that had submitted it has ended.
    pub(super) fn wait_ended(&mut self, data: u64, descriptor: Descriptor, outcome: Result<usize, Errno>) {
        let lost = outcome == Err(Errno::CANCELED);
        if let Some(slot) = self.slot_mut(data).filter(|slot| lost && !slot.cancelled)
            && let Kind::Readable { fd, .. } = &slot.kind
        {
            let poll = opcode::PollAdd::new(Fd(fd.as_raw_fd()), libc::POLLIN as u32).build();
            return self.push(poll, data);
        }
        let Some(mut slot) = self.slots.remove(data as u32, (data >> 32) as u32) else { return };
        // One that was cancelled too late has an event, which the next wait finds as well.
        let result = if slot.cancelled { Err(Errno::CANCELED) } else { outcome.map(|_| ()) };
        slot.kind = Kind::Free;
        let token = slot.token;
        self.keep_spare(slot);
        if let Some(described) = self.os.descriptors.get_mut(descriptor.index, descriptor.generation) {
            described.waiting = None;
        }
        self.os.ready.push_back(Completion { token, outcome: Outcome::Readable(result) });
    }
}
