//! The transport of a session: which end moves the bytes of puts and gets, and the state for that.

use super::grants::{Grants, PeerAddress};
use super::operations::Remote;
use super::shm_direct::Shm;
use crate::capabilities::{Capabilities, OneSided};
use crate::rdma::transport::ConnectionId;
use crate::windows::WindowError;
use crate::wire::WindowAdvert;

/// See the module. It is chosen when a session begins, by what its wire can do, and stays.
#[derive(Debug)]
pub(super) enum Wire {
    /// Connections: the window's owner receives into it, and sends from it. Over tcp and unix sockets, and wherever there is
    /// TLS.
    Stream,
    /// Connections through rings in shared memory, and memory that one end has lent the other, which copies there itself.
    Shm(Box<Shm>),
    /// A connection of a device, which writes and reads windows by itself.
    Rdma(Box<Rdma>),
}

/// What devices reach of each other.
#[derive(Debug, Default)]
pub(super) struct Rdma {
    /// The connection, once it was begun.
    pub(super) connection: Option<ConnectionId>,
    /// Where the peer's windows lie.
    pub(super) grants: Grants,
}

impl Rdma {
    /// Where a put of so many bytes goes. That uses up a window for one use.
    pub(super) fn find_for_put(&mut self, to: Remote, len: usize) -> Result<PeerAddress, WindowError> {
        let place = self.grants.find(to, len, WindowAdvert::PUT)?;
        self.grants.use_up(to.window);
        Ok(place)
    }
}

impl Wire {
    /// The wire of a session that can do this.
    pub(super) fn of(capabilities: &Capabilities) -> Self {
        match capabilities.one_sided {
            OneSided::Emulated => Self::Stream,
            OneSided::WhereLent => Self::Shm(Box::default()),
            OneSided::Native => Self::Rdma(Box::default()),
        }
    }

    pub(super) fn shm(&self) -> Option<&Shm> {
        if let Self::Shm(shm) = self { Some(shm) } else { None }
    }

    pub(super) fn shm_mut(&mut self) -> Option<&mut Shm> {
        if let Self::Shm(shm) = self { Some(shm) } else { None }
    }

    pub(super) fn rdma(&self) -> Option<&Rdma> {
        if let Self::Rdma(rdma) = self { Some(rdma) } else { None }
    }

    pub(super) fn rdma_mut(&mut self) -> Option<&mut Rdma> {
        if let Self::Rdma(rdma) = self { Some(rdma) } else { None }
    }
}
