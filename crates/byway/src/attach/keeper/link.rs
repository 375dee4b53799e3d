//! The keeper, as the process that serves the device knows it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Child;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;

use super::PAUSE;
use super::command::ServingCommand;
use super::message::{Kept, Message, receive, send};
use crate::attach::registry::KeeperRecord;
use crate::attach::serving::Event;

/// A keeper that may have died.
pub(in crate::attach) struct KeeperLink {
    socket: Arc<OwnedFd>,
    record: Option<KeeperRecord>,
    /// If this process has started it.
    child: Option<Child>,
    begun: Instant,
}

impl KeeperLink {
    /// The one that has started this process, and what it has kept of a process that has died.
    pub(in crate::attach) fn inherited() -> io::Result<(Self, Option<Kept>)> {
        let socket = io::stdin().as_fd().try_clone_to_owned()?;
        let Some((Message::Begin, fds)) = receive(&socket)? else { return Err(io::ErrorKind::UnexpectedEof.into()) };
        let keeper = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
        let record = keeper.and_then(KeeperRecord::of);
        Ok((Self { socket: Arc::new(socket), record, child: None, begun: Instant::now() }, Kept::of(fds)?))
    }

    /// Starts a keeper in place of this one, which has died.
    pub(in crate::attach) fn replace(&mut self, command: &ServingCommand, events: Sender<Event>) -> io::Result<()> {
        if let Some(mut child) = self.child.take() {
            let _ = child.wait();
        }
        // However often it dies.
        while self.begun.elapsed() < PAUSE {
            std::thread::park_timeout(PAUSE.saturating_sub(self.begun.elapsed()));
        }
        let (child, socket) = command.start_keeper()?;
        let record = KeeperRecord::of(child.id() as i32);
        *self = Self { socket: Arc::new(socket), record, child: Some(child), begun: Instant::now() };
        self.watch(events)
    }

    /// Tells of the keeper's death, from a thread.
    pub(in crate::attach) fn watch(&self, events: Sender<Event>) -> io::Result<()> {
        let socket = Arc::clone(&self.socket);
        let watch = move || {
            // It says nothing more.
            while matches!(receive(&socket), Ok(Some(_))) {}
            let _ = events.send(Event::KeeperDied);
        };
        std::thread::Builder::new().name("byway-keeper".to_owned()).spawn(watch).map(drop)
    }

    pub(in crate::attach) fn record(&self) -> Option<KeeperRecord> {
        self.record
    }

    /// Has it keep the channel, the file and the device.
    pub(in crate::attach) fn keep(&self, fds: [BorrowedFd<'_>; 3]) {
        self.say(Message::Keep, &fds);
    }

    /// Has it close the device, so that the kernel removes it.
    pub(in crate::attach) fn let_go(&self) {
        self.say(Message::LetGo, &[]);
    }

    /// The device has ended.
    pub(in crate::attach) fn end(&self) {
        self.say(Message::End, &[]);
    }

    fn say(&self, message: Message, fds: &[BorrowedFd<'_>]) {
        // One that has died is heard of by `watch`.
        if let Err(error) = send(&self.socket, message, fds) {
            tracing::debug!(%error, ?message, "the keeper cannot be told");
        }
    }
}
