//! Descriptors of others: registered at their first wait, for one event each time.

use std::os::fd::OwnedFd;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;

use super::{Epoll, KIND_DESCRIPTOR, event_data};
use crate::op::{Descriptor, Op, Token};

impl Epoll {
    pub(crate) fn add_descriptor(&mut self, fd: OwnedFd) -> Descriptor {
        self.os.add_descriptor(fd)
    }

    /// Ends a wait, and closes our descriptor.
    pub(crate) fn remove_descriptor(&mut self, descriptor: Descriptor) {
        self.end_descriptor_wait(descriptor, Err(Errno::CANCELED));
        let Some(described) = self.os.descriptors.remove(descriptor.index, descriptor.generation) else { return };
        if described.registered {
            // Closing does not do it: others may have the same open file.
            let _ = epoll::delete(&self.queue, &described.fd);
        }
    }

    pub(super) fn start_wait(&mut self, descriptor: Descriptor, token: Token) {
        let described = match self.os.wait_for(descriptor, token) {
            Ok(described) => described,
            Err(error) => return self.os.fail(Op::Readable { descriptor }, token, error),
        };
        let data = EventData::new_u64(event_data(KIND_DESCRIPTOR, descriptor.index, descriptor.generation));
        let flags = EventFlags::IN | EventFlags::ONESHOT;
        let armed = if described.registered {
            epoll::modify(&self.queue, &described.fd, data, flags)
        } else {
            epoll::add(&self.queue, &described.fd, data, flags)
        };
        described.registered |= armed.is_ok();
        self.in_flight += 1;
        if let Err(error) = armed {
            self.end_descriptor_wait(descriptor, Err(error));
        }
    }

    fn end_descriptor_wait(&mut self, descriptor: Descriptor, result: Result<(), Errno>) {
        if self.os.end_wait(descriptor, result) {
            self.in_flight -= 1;
        }
    }

    /// The kernel has an event for the descriptor at `index`; one for a cancelled wait is ignored.
    pub(super) fn descriptor_event(&mut self, index: u32, low_generation: u32) {
        let found = self.os.descriptors.find_by_low_generation(index, low_generation);
        if let Some(generation) = found.map(|(generation, _)| generation) {
            self.end_descriptor_wait(Descriptor { index, generation }, Ok(()));
        }
    }

    pub(super) fn cancel_waits(&mut self, token: Token) {
        let of_token = |(_, _, described): &(u32, u32, &mut crate::os::Described)| described.waiting == Some(token);
        let found: Vec<Descriptor> = self
            .os
            .descriptors
            .iter_mut()
            .filter(of_token)
            .map(|(index, generation, _)| Descriptor { index, generation })
            .collect();
        for descriptor in found {
            self.end_descriptor_wait(descriptor, Err(Errno::CANCELED));
        }
    }
}
