//! The sockets that a node listens at: opened at start, before the node is confined, and put away at its end.

use std::io::{Error, ErrorKind};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use byway_reactor::privilege::find_group;
use byway_reactor::socket_file::{BoundFile, SocketAccess};
use byway_reactor::{Address, Listening, listen_as};

use crate::address::SocketPlace;
use crate::admission::{Guarded, Origin};
use crate::limits::LISTEN_WAIT;
use crate::node::StartError;
use crate::opener::PrivilegedOpener;

/// A listener for a node: an open socket, or an address of RDMA, which the node's first loop opens.
#[derive(Debug)]
pub struct Endpoint {
    /// Where it is, with the port that the kernel chose if 0 was asked for.
    pub address: Address,
    /// The socket; `None` for RDMA.
    pub socket: Option<OwnedFd>,
}

/// The files of unix sockets that were opened.
pub type SocketFiles = Vec<BoundFile>;

/// The files of a node's unix sockets, removed when it ends.
#[derive(Default)]
pub(crate) struct Sockets {
    pub(crate) files: SocketFiles,
    /// Once the node is confined it can remove nothing itself.
    pub(crate) opener: Option<Arc<PrivilegedOpener>>,
}

impl Drop for Sockets {
    fn drop(&mut self) {
        for BoundFile { file, .. } in &self.files {
            let removed = match &self.opener {
                Some(opener) => opener.remove_socket(file),
                None => file.remove(),
            };
            if let Err(error) = removed {
                tracing::warn!(path = %file.path.display(), %error, "cannot remove the socket's file; the next node replaces it");
            }
        }
    }
}

/// Opens the listeners of a configuration. The files of those that were opened go to `files`, also if one cannot be opened.
///
/// # Errors
/// [`StartError::Listen`].
pub fn open_all(listeners: &[Guarded], files: &mut SocketFiles) -> Result<Vec<Endpoint>, StartError> {
    listeners
        .iter()
        .map(|Guarded { origin, address }| {
            let access = match origin {
                Origin::Configured(listener) => listener.socket().map_or(Ok(SocketAccess::default()), access_of),
                Origin::Inherited => Ok(SocketAccess::default()),
            };
            let failed = |source| StartError::Listen { address: address.clone(), source };
            open(address, access.map_err(failed)?, files)
        })
        .collect()
}

/// Opens one. The file of a unix socket goes to `files`.
///
/// # Errors
/// [`StartError::Listen`].
pub fn open(address: &Address, access: SocketAccess, files: &mut SocketFiles) -> Result<Endpoint, StartError> {
    if matches!(address, Address::Rdma(_)) {
        return Ok(Endpoint { address: address.clone(), socket: None });
    }
    let failed = |source| StartError::Listen { address: address.clone(), source };
    let Listening { socket, address, file } = patiently(address, || listen_as(address, access)).map_err(failed)?;
    files.extend(file);
    Ok(Endpoint { address, socket: Some(socket) })
}

fn access_of(place: &SocketPlace) -> std::io::Result<SocketAccess> {
    let named = |name: &String| {
        find_group(name).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => {
                std::io::Error::other(format!("group={name}: there is no such group; name one of this machine"))
            }
            _ => error,
        })
    };
    Ok(SocketAccess { mode: place.mode, group: place.group.as_ref().map(named).transpose()? })
}

/// Listens, for a while also where another process still does: a node that was killed keeps its ports until the kernel has
/// ended its I/O, and its successor starts at once. So too where another process makes or removes a socket just then.
pub fn patiently<T>(address: &Address, mut listen: impl FnMut() -> std::io::Result<T>) -> std::io::Result<T> {
    let deadline = Instant::now() + LISTEN_WAIT;
    let mut is_said = false;
    let is_passing = |error: &Error| matches!(error.kind(), ErrorKind::AddrInUse | ErrorKind::ResourceBusy);
    loop {
        match listen() {
            Err(error) if is_passing(&error) && Instant::now() < deadline => {
                if !std::mem::replace(&mut is_said, true) {
                    tracing::warn!(%address, seconds = LISTEN_WAIT.as_secs(), "in use by another process; waiting for its end");
                }
                let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
                let _ = rustix::thread::nanosleep(&pause);
            }
            listened => return listened,
        }
    }
}
