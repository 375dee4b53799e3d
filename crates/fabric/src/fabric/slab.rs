//! Memory that a server opens to one client, which puts and gets there by itself.
//!
//! The client reaches it over every wire as it reaches a node's window: over tcp and unix sockets this fabric receives and sends, over
//! shared memory the client copies, over RDMA its device does.

use std::rc::Rc;

use byway_reactor::{Frame, FrameRange, Mapping, Reactor};
use zerocopy::FromZeros;

use super::Fabric;
use crate::descriptor::Descriptor;
use crate::node::wire::{PlacedBody, PutBody};
use crate::session::CloseReason;
use crate::slots::SessionId;
use crate::windows::OpenError;
use crate::wire::{Header, Kind};

/// Memory for the peer of one session. Nothing in this process looks at its bytes, and no two peers ever have the same.
#[derive(Debug)]
pub struct Slab {
    mapping: Mapping,
    bytes: usize,
}

impl Slab {
    /// Zeroes, in an anonymous file of `bytes` (at least 1). Pages take memory when they are first written to.
    ///
    /// # Errors
    /// The kernel's: no memory, no descriptors.
    pub fn new(bytes: usize) -> std::io::Result<Self> {
        if bytes == 0 {
            return Err(std::io::ErrorKind::InvalidInput.into());
        }
        Ok(Self { mapping: Mapping::shared(bytes)?, bytes })
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Bytes of the pages that were written to, which take memory.
    pub fn filled_bytes(&self) -> u64 {
        self.mapping.filled_bytes()
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

impl Fabric {
    /// Opens all of a slab to the peer of a session, for puts and gets, until [`Fabric::close_slab`].
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_slab(
        &mut self,
        reactor: &mut Reactor,
        session: SessionId,
        slab: &Slab,
        context: u64,
    ) -> Result<Descriptor, OpenError> {
        // SAFETY: a slab gives out no references to its bytes, and its frames are all of this loop.
        let frame = || unsafe { Frame::over(&slab.mapping, 0, slab.bytes) };
        let put =
            self.open_target(session, FrameRange::new(frame(), 0, slab.bytes), context).map_err(|(error, _)| error)?;
        let get = match self.open_source(session, FrameRange::new(Rc::new(frame()), 0, slab.bytes), context) {
            Ok(get) => get,
            Err(error) => {
                let _ = self.windows().close(put);
                return Err(error);
            }
        };
        for (key, write) in [(put, true), (get, false)] {
            self.announce(session, key);
            self.lend_window(reactor, session, key, &slab.mapping, 0..slab.bytes, write);
        }
        Ok(Descriptor::new(Some(put), Some(get), slab.bytes))
    }

    /// Closes the windows of a slab: nothing that its peer puts from now on is taken. Over shared memory the peer reaches the memory
    /// until it has let go of it; so the slab is dropped, and never another's.
    pub fn close_slab(&mut self, reactor: &Reactor, session: SessionId, descriptor: &Descriptor) {
        for key in [descriptor.put_key(), descriptor.get_key()] {
            self.withdraw(session, key);
            self.recall(reactor, session, key);
            let _ = self.windows().close(key);
        }
    }

    /// Tells a client that what it has put lies there.
    ///
    /// # Errors
    /// The message is of no put of a node's, or asks for more: the session is to be closed.
    pub fn confirm_put(&mut self, session: SessionId, kind: Kind, header: &Header) -> Result<(), CloseReason> {
        let body: PutBody = header.body();
        let is_put = kind == Kind::Data && body.target.get() == 0 && body.message() == Ok(None);
        if !is_put {
            return Err(CloseReason::Unexpected(kind));
        }
        let mut placed = PlacedBody::new_zeroed();
        placed.put = body.put;
        self.send(session, Header::with_body(Kind::Placed, &placed));
        Ok(())
    }
}
