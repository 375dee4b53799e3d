//! Sends over TCP from registered memory, in place of a network card.
//!
//! Over loopback the kernel copies anyway; the cost of registration is real.

use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::{cqueue, opcode, types};

use super::super::pinned::{PinnedBuffer, PinnedBuffers};
use super::super::{PageRange, Refused, Registrar};

/// The device: registers, and sends.
#[derive(Debug)]
pub(super) struct SendRing(PinnedBuffers);

/// What has become of a send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Event {
    /// The kernel has taken the bytes: the next send keeps the order.
    Taken(u64),
    /// Nothing reads the memory any more.
    Free(u64),
}

impl SendRing {
    /// Room for `count` ranges.
    pub(super) fn new(count: u32) -> std::io::Result<Self> {
        Ok(Self(PinnedBuffers::new(count)?))
    }

    /// Begins to send all of `bytes` at `address`, which lie in the buffer. One at a time; [`SendRing::next`] tells.
    pub(super) fn send(
        &self,
        buffer: &PinnedBuffer,
        address: usize,
        bytes: usize,
        socket: BorrowedFd<'_>,
        tag: u64,
    ) -> std::io::Result<()> {
        let part = PageRange::covering(address, bytes).filter(|part| buffer.range().contains(*part));
        let (Some(_), Ok(len)) = (part, u32::try_from(bytes)) else {
            return Err(rustix::io::Errno::INVAL.into());
        };
        let pointer = std::ptr::with_exposed_provenance(address);
        let send = opcode::SendZc::new(types::Fd(socket.as_raw_fd()), pointer, len)
            .buf_index(Some(buffer.index() as u16))
            .flags(libc::MSG_WAITALL | libc::MSG_NOSIGNAL)
            .build()
            .user_data(tag);
        let mut ring = self.0.ring();
        // SAFETY: the kernel reads pinned pages, which the request itself keeps pinned until its last completion.
        unsafe { ring.submission().push(&send) }.map_err(|_| rustix::io::Errno::AGAIN)?;
        ring.submit().map(drop)
    }

    /// Waits for what comes next of the sends. A short send is an error.
    pub(super) fn next(&self, bytes: usize) -> std::io::Result<Vec<Event>> {
        let mut ring = self.0.ring();
        loop {
            if let Some(completion) = ring.completion().next() {
                let (result, flags, tag) = (completion.result(), completion.flags(), completion.user_data());
                if cqueue::notif(flags) {
                    return Ok(vec![Event::Free(tag)]);
                }
                return match usize::try_from(result) {
                    Err(_) => Err(std::io::Error::from_raw_os_error(-result)),
                    Ok(sent) if sent < bytes => Err(std::io::ErrorKind::WriteZero.into()),
                    Ok(_) if cqueue::more(flags) => Ok(vec![Event::Taken(tag)]),
                    Ok(_) => Ok(vec![Event::Taken(tag), Event::Free(tag)]),
                };
            }
            match ring.submit_and_wait(1) {
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) => return Err(error),
                Ok(_) => {}
            }
        }
    }
}

impl Registrar for SendRing {
    type Handle = PinnedBuffer;

    fn register(&self, range: PageRange) -> Result<PinnedBuffer, Refused> {
        self.0.register(range)
    }

    fn deregister(&self, handle: PinnedBuffer) {
        self.0.deregister(handle);
    }

    fn survives_fork(&self) -> bool {
        true
    }
}
