//! A mount that changes its process: one driver stops reading requests, and another one goes on with the same channels.
//!
//! The kernel keeps requests that nobody reads. It takes a reply only by the channel that the request was read from, so the new driver
//! gets all channels. A request that waits without a limit, such as one for a lock, is given back by the file system ([`Reply::keep`])
//! and goes to the new driver as it was read. All others are answered before.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use byway_reactor::Errno;

use super::super::channel::Channel;
use super::super::request::parse;
use super::super::session::{Reading, Session, Step, Terms, Wishes};
use super::{Driver, DriverError, Filesystem, Reply, Request, RequestBytes, Shared};
use crate::limits::FUSE_THREADS_MAX;

/// How often a thread that reads is interrupted, until it has stopped: it may be about to read.
const INTERRUPT_PAUSE: Duration = Duration::from_millis(1);

/// How long the first attempt to pause takes at most, and the pause behind it. Further ones take twice as long as the one before.
const FIRST_ATTEMPT: Duration = Duration::from_millis(125);

/// The signal that interrupts reads. Programs ignore it unless they ask for it.
const SIGNAL: libc::c_int = libc::SIGURG;

/// A request that the file system has given back, and the channel that takes its reply.
pub(super) type Kept = (Arc<Channel>, Vec<u8>);

/// A thread that reads requests.
#[derive(Debug, Default)]
pub(super) struct Reader {
    thread: AtomicI32,
    /// It is in the call that reads, or about to be, or has just left it.
    reads: AtomicBool,
}

impl Reader {
    /// The calling thread is this one.
    pub(super) fn begin(&self) {
        self.thread.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::Release);
    }

    /// Reads by a call that [`Reader::interrupt`] ends.
    pub(super) fn read<T>(&self, read: impl FnOnce() -> T) -> T {
        self.reads.store(true, Ordering::Release);
        let read = read();
        self.reads.store(false, Ordering::Release);
        read
    }

    fn interrupt(&self) {
        if self.reads.load(Ordering::Acquire) {
            let thread = self.thread.load(Ordering::Acquire);
            // SAFETY: the call touches no memory. The kernel sends the signal to a thread of this process alone, and the handler that
            // `handle_signal` has set does nothing.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, SIGNAL) };
        }
    }
}

/// Has the signal interrupt calls, and do nothing else.
fn handle_signal() -> io::Result<()> {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: all zeroes are a valid `sigaction`: no flags (so calls are not restarted), and an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
    // SAFETY: `action` lives for the call, and the handler calls nothing that a signal handler may not.
    let set = unsafe { libc::sigaction(SIGNAL, &raw const action, std::ptr::null_mut()) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// What another process needs to serve the mount in place of this one.
#[derive(Debug)]
pub struct Handover {
    /// What was agreed at INIT.
    pub terms: Terms,
    /// The mount's channels, 1 to [`FUSE_THREADS_MAX`].
    pub channels: Vec<OwnedFd>,
    /// Requests that were read and not answered, each with the index of its channel.
    pub requests: Vec<(usize, Vec<u8>)>,
}

/// Why a driver does not pause. It goes on.
#[derive(Debug, thiserror::Error)]
pub enum PauseError {
    /// It was told to pause before, or has not begun.
    #[error("the mount has not begun, or is being handed over already; try again")]
    NotRunning,
    /// The mount has ended.
    #[error("the mount has ended")]
    Ended,
    /// Requests take long.
    #[error(
        "{0} calls of programs have not ended in time, perhaps because the server does not answer; try again when it does"
    )]
    Late(usize),
    /// No signal handler.
    #[error("cannot interrupt the threads of the mount: {0}")]
    Signal(io::Error),
}

/// Pauses a driver and hands its mount over. Of any thread but the driver's own.
#[derive(Clone, Debug)]
pub struct Control {
    shared: Arc<Shared>,
}

impl Driver {
    /// See [`Control`].
    pub fn control(&self) -> Control {
        Control { shared: Arc::clone(&self.shared) }
    }

    /// Serves a mount that another process has served, once [`Control::go_on`] is called. Until then nothing is read.
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn take_over(handover: Handover, filesystem: Arc<dyn Filesystem>, wishes: Wishes) -> Result<Self, DriverError> {
        let Handover { terms, channels, requests } = handover;
        let channels: Vec<_> = channels.into_iter().map(|fd| Arc::new(Channel::adopt(fd))).collect();
        if channels.is_empty() || channels.len() > FUSE_THREADS_MAX {
            return Err(DriverError::Handover("the number of channels"));
        }
        let kept = requests.into_iter().map(|(index, bytes)| Some((Arc::clone(channels.get(index)?), bytes)));
        let kept = kept.collect::<Option<Vec<_>>>().ok_or(DriverError::Handover("the channel of a request"))?;
        let session = Session::taken_over(wishes, terms);
        let this = Self::serve(channels, filesystem, session, terms.write_bytes_max)?;
        *this.shared.kept() = kept;
        Ok(this)
    }
}

impl Control {
    /// Requests that the file system has not answered.
    pub fn under_way(&self) -> usize {
        self.shared.session().under_way()
    }

    /// Stops reading requests, and waits until the file system has answered all that were read, or given them back. After an error the
    /// driver goes on.
    ///
    /// An answer may wait for a request that was not read: one that needs pages dropped waits for reads of these. So the driver goes on
    /// for a moment now and then until the limit.
    ///
    /// # Errors
    /// See [`PauseError`].
    pub fn pause(&self, limit: Duration) -> Result<(), PauseError> {
        handle_signal().map_err(PauseError::Signal)?;
        let (end, mut attempt) = (Instant::now() + limit, FIRST_ATTEMPT);
        loop {
            {
                let mut session = self.shared.session();
                if session.terms().is_none() || session.reading() != Reading::GoesOn {
                    return Err(PauseError::NotRunning);
                }
                session.set_reading(Reading::Paused);
            }
            let paused = self.wait_for_pause(end.min(Instant::now() + attempt));
            if paused.is_err() {
                self.go_on();
            }
            if !matches!(paused, Err(PauseError::Late(_))) || Instant::now() >= end {
                return paused;
            }
            std::thread::park_timeout(attempt);
            attempt *= 2;
        }
    }

    fn wait_for_pause(&self, end: Instant) -> Result<(), PauseError> {
        self.shared.filesystem.pause();
        let mut session = self.shared.session();
        // A reply is counted before its request is under way no more, which the session's lock orders.
        let is_replying = || self.shared.replying.load(Ordering::Acquire) > 0;
        while session.has_readers() || session.under_way() > 0 || is_replying() {
            if session.has_ended() {
                return Err(PauseError::Ended);
            }
            if Instant::now() >= end {
                return Err(PauseError::Late(session.under_way()));
            }
            drop(session);
            self.shared.readers.iter().for_each(Reader::interrupt);
            let waited = self.shared.changed.wait_timeout(self.shared.session(), INTERRUPT_PAUSE);
            session = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        if session.has_ended() {
            return Err(PauseError::Ended);
        }
        // No thread reads now. What was interrupted until here, the next process would not hear of.
        let mut kept = self.shared.kept();
        let is_interrupted = |(_, bytes): &mut Kept| parse(bytes).is_ok_and(|one| session.take_interrupt(one.unique));
        let interrupted: Vec<_> = kept.extract_if(.., is_interrupted).collect();
        drop((kept, session));
        for (channel, bytes) in interrupted {
            if let Ok(one) = parse(&bytes) {
                super::answer(&channel, one.unique, Err(libc::EINTR));
            }
        }
        Ok(())
    }

    /// Goes on after a pause, or begins after a takeover: with the requests that were given back.
    pub fn go_on(&self) {
        self.shared.filesystem.go_on();
        let kept = std::mem::take(&mut *self.shared.kept());
        for (channel, bytes) in kept {
            serve_again(&self.shared, &channel, bytes);
        }
        self.shared.session().set_reading(Reading::GoesOn);
        self.shared.changed.notify_all();
    }

    /// What another process needs, while the driver is paused.
    ///
    /// # Errors
    /// No descriptors.
    pub fn handover(&self) -> io::Result<Handover> {
        let shared = &self.shared;
        let terms = shared.session().terms().ok_or(io::ErrorKind::NotConnected)?;
        let channels: io::Result<Vec<_>> = shared.channels.iter().map(|one| one.as_fd().try_clone_to_owned()).collect();
        let index = |channel| shared.channels.iter().position(|one| Arc::ptr_eq(one, channel)).unwrap_or_default();
        let kept = shared.kept();
        let requests = kept.iter().map(|(channel, bytes)| (index(channel), bytes.clone())).collect();
        Ok(Handover { terms, channels: channels?, requests })
    }

    /// Another process serves the mount: the driver's threads end, and its file system is not told that the mount has ended.
    pub fn leave(&self) {
        self.shared.session().set_reading(Reading::HandedOver);
        self.shared.changed.notify_all();
        self.shared.handoff.end();
    }
}

/// Serves a request that was given back.
fn serve_again(shared: &Arc<Shared>, channel: &Arc<Channel>, bytes: Vec<u8>) {
    let Ok(parsed) = parse(&bytes) else {
        tracing::error!("a request of the process before cannot be read, and is not answered");
        return;
    };
    let unique = parsed.unique;
    let step = shared.session().receive(&parsed);
    match step {
        Step::Serve { waits_for_lock } => {
            let reply = Reply::new(shared, channel, &parsed, waits_for_lock);
            shared.handoff.serve(Request { bytes: RequestBytes::Copied(bytes) }, reply);
        }
        Step::Refuse(errno) => super::answer(channel, unique, Err(errno)),
        _ => super::answer(channel, unique, Err(libc::EIO)),
    }
}

impl Reply {
    /// Gives the request back while the driver pauses: it comes again, here or in another process. One whose caller was interrupted is
    /// answered with `EINTR` instead.
    pub fn keep(mut self, request: &Request) {
        let shared = Arc::clone(&self.shared);
        // Until the request is among those that were given back: the driver pauses when none is under way.
        let mut session = shared.session();
        if !session.keep(self.unique) {
            drop(session);
            return self.error(Errno::INTR);
        }
        self.answered = true;
        shared.kept().push((Arc::clone(&self.channel), request.bytes().to_vec()));
        drop(session);
        shared.changed.notify_all();
    }
}
