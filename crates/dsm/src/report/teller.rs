//! Tells `byway dsm top` what this process has counted, while its job runs.
//!
//! It listens at an abstract Unix socket that its number names, so that nothing of a running job lies in the file system. A process that connects
//! gets the lines of a report, and the end of the connection. A thread of its own sends them: it may have to wait, and the pager must not.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, send,
    shutdown, socket_with,
};
use rustix::process::geteuid;

use crate::drive::Drive;
use crate::held_signals::HeldSignals;
use crate::limits::{LIVE_ACCEPT_PAUSE, LIVE_BACKLOG, LIVE_PAGES_TOLD_MAX, LIVE_TIME_MAX};
use crate::pager::Pager;

/// Where a process listens.
pub(super) fn address(process: u32) -> rustix::io::Result<SocketAddrUnix> {
    SocketAddrUnix::new_abstract_name(format!("byway-dsm-{process}").as_bytes())
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Teller {
    socket: Arc<OwnedFd>,
    thread: JoinHandle<()>,
}

impl Teller {
    pub(crate) fn start(drive: &Arc<Drive>) -> std::io::Result<Self> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        bind(&socket, &address(std::process::id())?)?;
        listen(&socket, LIVE_BACKLOG)?;
        let (socket, drive) = (Arc::new(socket), Arc::clone(drive));
        let listener = Arc::clone(&socket);
        let _signals = HeldSignals::hold();
        let thread = std::thread::Builder::new().name("dsm-teller".to_owned());
        Ok(Self { socket, thread: thread.spawn(move || answer_all(&listener, &drive))? })
    }

    /// Ends the thread.
    pub(crate) fn end(self) {
        // It wakes a thread that waits in accept.
        let _ = shutdown(&self.socket, Shutdown::Both);
        let _ = self.thread.join();
    }
}

fn answer_all(listener: &OwnedFd, drive: &Drive) {
    loop {
        match accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(asker) => answer(&asker, drive),
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                std::thread::park_timeout(LIVE_ACCEPT_PAUSE);
            }
            Err(_) => return,
        }
    }
}

/// Tells a process of the same user, or of root.
fn answer(asker: impl AsFd, drive: &Drive) {
    let user = geteuid();
    if !socket_peercred(&asker).is_ok_and(|peer| peer.uid == user || peer.uid.is_root()) {
        return;
    }
    let Some(counted) = drive.tell(Pager::look_at_tally) else { return };
    let _ = set_socket_timeout(&asker, Timeout::Send, Some(LIVE_TIME_MAX));
    let text = counted.lines(LIVE_PAGES_TOLD_MAX).concat();
    let mut left = text.as_bytes();
    while !left.is_empty() {
        match send(&asker, left, SendFlags::NOSIGNAL) {
            Ok(count) => left = &left[count..],
            Err(Errno::INTR) => {}
            Err(_) => return,
        }
    }
}
