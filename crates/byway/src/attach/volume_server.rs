//! The volume of a device: the kernel's requests go to the volume's client, its answers back. One loop does both.
//!
//! A [`KernelSide`] is one of the ways in which the kernel asks: FUSE (`volume_file.rs`) or ublk (`ublk_queue.rs`).

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use byway_reactor::{Completion, Descriptor, Errno, Frame, IoChoice, Op, Reactor, Token, Wait};
use byway_service::block::client::{
    ClientName, ConnectError, Done, Notice, Request, Volume, VolumeError, VolumeInfo, VolumeOptions,
};

use super::command::AttachError;
use super::serving::Event;
use crate::limits::{ATTACH_FRAME_BYTES, ATTACH_LOST_AFTER};
use crate::remote::{RemoteError, RemoteUri, native_failed};
use crate::tls::ClientTlsArguments;

const CLASS: u8 = 0x30;
/// The token of the wait for requests.
const READABLE: Token = Token::new(0x20, 0, 0, 0);
/// How long the volume may take to open, and to close.
const OPEN_LIMIT: Duration = Duration::from_secs(15);
const CLOSE_LIMIT: Duration = Duration::from_secs(2);
/// The tag of the flush at the end; the kernel's numbers are small.
const FLUSH_TAG: u64 = u64::MAX;

/// How the kernel asks for a device's data, and gets its answers.
pub(super) trait KernelSide {
    /// A descriptor that can be read from when the kernel has requests.
    fn readiness(&self) -> io::Result<OwnedFd>;
    /// It was readable.
    fn note_readable(&mut self);
    /// Takes requests as long as there are some, and places for them; each is answered, or becomes a request of the volume.
    fn take_requests(&mut self, requests: &mut Requests) -> Result<(), String>;
    /// What there is to take.
    fn supply(&self) -> Supply;
    /// Copies the payload of a write for which [`Requests::wait_for_payload`] was called.
    fn copy_payload(&mut self, unique: u64, into: &mut Frame) -> io::Result<()>;
    /// Answers a request.
    fn answer(&mut self, unique: u64, answer: Result<Answer<'_>, Errno>);
    /// Sends the answers so far.
    fn submit(&mut self) -> Result<(), String>;
}

/// Whether the kernel has requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Supply {
    /// There may be some.
    Some,
    /// There may be some, and there is no place for them.
    Full,
    /// None, until the descriptor is readable.
    Nothing,
    /// None any more.
    Ended,
}

/// What came of a request of the kernel.
#[derive(Clone, Copy, Debug)]
pub(super) enum Answer<'a> {
    Read(&'a [u8]),
    /// So many bytes.
    Written(u32),
    Done,
}

/// A write of the kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct KernelWrite {
    /// The kernel's number of the request.
    pub unique: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: usize,
    pub durable: bool,
}

/// What waits for a frame or for a place at the client.
#[derive(Debug)]
enum Waiting {
    /// The next request.
    Room,
    Read {
        unique: u64,
        offset: u64,
        len: usize,
    },
    Payload(KernelWrite),
    Request {
        unique: u64,
        asked: Asked,
        request: Request<Frame, Rc<Frame>>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    Read,
    Write(u32),
    Other,
}

/// How a device is used.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    pub read_only: bool,
    /// Other machines write to the volume too. A write that was answered without being durable would be repeated after the server's death, perhaps over
    /// what another machine has written there since.
    pub shared: bool,
}

/// A volume to be opened.
pub(super) struct VolumeAsked {
    /// Of its device.
    pub name: String,
    pub uri: RemoteUri,
    pub client: ClientName,
    pub tls: ClientTlsArguments,
    pub access: Access,
}

/// The volume, and the requests that it has to answer.
pub(super) struct Requests {
    reactor: Reactor,
    volume: Volume,
    pub info: VolumeInfo,
    /// The client that this is to the server.
    pub client: ClientName,
    pub access: Access,
    /// Requests that found no frame, or no place at the client.
    waiting: VecDeque<Waiting>,
    /// [`Requests::progress`] at the last try of the waiting requests.
    tried_at: u64,
    /// Answers of the client so far.
    answered: u64,
    /// By the kernel's number: what the client was asked.
    asked: HashMap<u64, Asked>,
    done: Vec<Done<Frame>>,
    last_flush: Option<Result<(), VolumeError>>,
}

impl Requests {
    /// Opens the volume, in the thread that is to serve it.
    pub(super) fn open(volume: &VolumeAsked) -> Result<Self, AttachError> {
        let &VolumeAsked { ref uri, ref tls, access, client, .. } = volume;
        // The kernel writes back through this thread when memory runs short: what it allocates must not wait for that.
        if let Err(error) = rustix::process::configure_io_flusher_behavior(true) {
            tracing::warn!(%error, "cannot mark this process as serving a block device (PR_SET_IO_FLUSHER)");
        }
        let mut reactor = Reactor::open(IoChoice::Auto, ATTACH_FRAME_BYTES).map_err(RemoteError::Loop)?;
        let (volume, info) = open_volume(&mut reactor, uri, tls, access.read_only, client)?;
        Ok(Self {
            reactor,
            volume,
            info,
            client,
            access,
            waiting: VecDeque::new(),
            tried_at: 0,
            answered: 0,
            asked: HashMap::with_capacity(1024),
            done: Vec::with_capacity(1024),
            last_flush: None,
        })
    }

    /// Has the server make durable what it has acknowledged to a process that has died, which could have repeated it after a loss of the
    /// server. Whether it was still the same server.
    pub(super) fn flush_before_start(&mut self) -> Result<bool, AttachError> {
        let failed = |error: String| AttachError::Ended(format!("the flush before the device goes on: {error}"));
        if self.volume.submit(Request::Flush, FLUSH_TAG).is_err() {
            return Err(failed("too many requests are under way".to_owned()));
        }
        let mut completions = Vec::new();
        loop {
            self.volume.flush(&mut self.reactor);
            self.volume.reap(&mut self.done);
            if let Some(done) = self.done.pop() {
                done.result.map_err(|error| failed(error.to_string()))?;
                let same = |info: &VolumeInfo| (info.instance, info.store) == (self.info.instance, self.info.store);
                return Ok(self.volume.info().is_some_and(same));
            }
            self.reactor.reap(&mut completions, Wait::Block).map_err(RemoteError::Loop)?;
            for completion in completions.drain(..) {
                self.volume.handle(&mut self.reactor, completion);
            }
        }
    }

    /// Memory for a request.
    pub(super) fn alloc(&self, len: usize) -> Option<Frame> {
        self.reactor.frames().alloc(len)
    }

    /// Whether requests wait here for memory, or for a place at the client.
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// There is no memory for the kernel's next request.
    pub(super) fn wait_for_room(&mut self) {
        self.waiting.push_back(Waiting::Room);
    }

    /// There is no memory for a write's payload, which stays at the kernel.
    pub(super) fn wait_for_payload(&mut self, write: KernelWrite) {
        self.waiting.push_back(Waiting::Payload(write));
    }

    pub(super) fn read(&mut self, unique: u64, offset: u64, len: usize) {
        match self.alloc(len) {
            Some(into) => self.ask(unique, Asked::Read, Request::Read { offset, len, into }),
            None => self.waiting.push_back(Waiting::Read { unique, offset, len }),
        }
    }

    pub(super) fn write(&mut self, write: KernelWrite, from: Frame) {
        let KernelWrite { unique, offset, len, durable } = write;
        self.ask(unique, Asked::Write(len as u32), Request::Write { offset, len, from: Rc::new(from), durable });
    }

    /// Asks for what has no payload.
    pub(super) fn ask_plain(&mut self, unique: u64, request: Request<Frame, Rc<Frame>>) {
        self.ask(unique, Asked::Other, request);
    }

    fn ask(&mut self, unique: u64, asked: Asked, mut request: Request<Frame, Rc<Frame>>) {
        if self.access.shared {
            make_durable(&mut request);
        }
        match self.volume.submit(request, unique) {
            Ok(()) => {
                self.asked.insert(unique, asked);
            }
            Err(request) => self.waiting.push_back(Waiting::Request { unique, asked, request }),
        }
    }

    /// Tries again what waits, in order, each once.
    fn resume_waiting(&mut self, kernel: &mut impl KernelSide) {
        self.tried_at = self.progress();
        for _ in 0..self.waiting.len() {
            match self.waiting.pop_front() {
                Some(Waiting::Read { unique, offset, len }) => self.read(unique, offset, len),
                Some(Waiting::Payload(write)) => self.write_from(kernel, write),
                Some(Waiting::Request { unique, asked, request }) => self.ask(unique, asked, request),
                Some(Waiting::Room) | None => {}
            }
        }
    }

    /// Fetches a write's payload from the kernel, and writes it.
    pub(super) fn write_from(&mut self, kernel: &mut impl KernelSide, write: KernelWrite) {
        let Some(mut frame) = self.alloc(write.len) else { return self.wait_for_payload(write) };
        match kernel.copy_payload(write.unique, &mut frame) {
            Ok(()) => self.write(write, frame),
            Err(error) => {
                tracing::error!(%error, "cannot take a write's data from the kernel");
                kernel.answer(write.unique, Err(Errno::IO));
            }
        }
    }

    /// Another number when something that waits might find a place.
    fn progress(&self) -> u64 {
        self.reactor.frames().given_back() + self.answered
    }

    /// Takes the client's answers to the kernel.
    fn answer(&mut self, kernel: &mut impl KernelSide) {
        self.volume.reap(&mut self.done);
        for Done { tag, result, buffer } in self.done.drain(..) {
            self.answered += 1;
            let Some(asked) = self.asked.remove(&tag) else {
                if tag == FLUSH_TAG {
                    self.last_flush = Some(result.map(drop));
                }
                continue;
            };
            let answer = match (asked, result, &buffer) {
                (_, Err(error), _) => {
                    tracing::error!(%error, "a request of the device failed");
                    Err(errno_of(error))
                }
                (Asked::Read, Ok(_), Some(frame)) => Ok(Answer::Read(frame.bytes())),
                (Asked::Read, Ok(_), None) => Err(Errno::IO),
                (Asked::Write(size), Ok(_), _) => Ok(Answer::Written(size)),
                (Asked::Other, Ok(_), _) => Ok(Answer::Done),
            };
            kernel.answer(tag, answer);
        }
    }
}

fn make_durable<R, W>(request: &mut Request<R, W>) {
    match request {
        Request::Write { durable, .. } | Request::Trim { durable, .. } => *durable = true,
        Request::Zero { flags, .. } => flags.durable = true,
        Request::Read { .. } | Request::Flush | Request::Extents { .. } | Request::Prefetch { .. } => {}
    }
}

/// Both sides, and the loop that drives them.
pub(super) struct VolumeServer<K> {
    requests: Requests,
    kernel: K,
    descriptor: Descriptor,
    /// A wait for requests is under way.
    waits_for_requests: bool,
    completions: Vec<Completion>,
    notices: Vec<Notice>,
    events: Sender<Event>,
    /// The server is away, and the log says so.
    is_away: bool,
    /// The volume was opened again, and the server may not have all that it had acknowledged.
    was_reopened: bool,
}

impl<K: KernelSide> VolumeServer<K> {
    pub(super) fn new(mut requests: Requests, kernel: K, events: Sender<Event>) -> io::Result<Self> {
        let descriptor = requests.reactor.add_descriptor(kernel.readiness()?)?;
        Ok(Self {
            requests,
            kernel,
            descriptor,
            waits_for_requests: false,
            completions: Vec::with_capacity(1024),
            notices: Vec::new(),
            events,
            is_away: false,
            was_reopened: false,
        })
    }

    /// Serves until the kernel has no requests any more, then flushes the volume and leaves.
    pub(super) fn serve(mut self) -> Result<(), String> {
        loop {
            self.requests.resume_waiting(&mut self.kernel);
            self.kernel.take_requests(&mut self.requests)?;
            if self.kernel.supply() == Supply::Ended {
                break;
            }
            self.turn(Wait::Block)?;
        }
        self.requests.reactor.remove_descriptor(self.descriptor);
        let flushed = if self.requests.info.read_only { Ok(()) } else { self.flush_last() };
        let requests = &mut self.requests;
        requests.volume.close(&mut requests.reactor);
        let limit = requests.reactor.now() + CLOSE_LIMIT;
        while !self.requests.volume.is_closed() && self.requests.reactor.now() < limit {
            self.turn(Wait::Until(limit))?;
        }
        flushed
    }

    /// What the kernel had written is durable by now where it asked for that; this is for the rest.
    fn flush_last(&mut self) -> Result<(), String> {
        if self.requests.volume.submit(Request::Flush, FLUSH_TAG).is_err() {
            return Err("too many requests were under way for a last flush".to_owned());
        }
        loop {
            self.exchange()?;
            if self.requests.last_flush.is_some() {
                break;
            }
            self.turn(Wait::Block)?;
        }
        let failed = |error| format!("the last flush failed, and what was not flushed before may be missing: {error}");
        self.requests.last_flush.unwrap_or(Ok(())).map_err(failed)
    }

    /// Sends to the server and answers the kernel.
    fn exchange(&mut self) -> Result<(), String> {
        self.requests.volume.flush(&mut self.requests.reactor);
        self.requests.answer(&mut self.kernel);
        self.kernel.submit()
    }

    /// Sends, waits, and hands out what has come.
    fn turn(&mut self, wait: Wait) -> Result<(), String> {
        self.exchange()?;
        let supply = self.kernel.supply();
        let may_go_on = if self.requests.has_waiting() {
            self.requests.progress() != self.requests.tried_at
        } else {
            supply == Supply::Some
        };
        // The server is heard also while the kernel always has more.
        let wait = if may_go_on && supply != Supply::Ended { Wait::Poll } else { wait };
        let reactor = &mut self.requests.reactor;
        if !self.waits_for_requests && supply == Supply::Nothing {
            self.waits_for_requests = true;
            reactor.submit(Op::Readable { descriptor: self.descriptor }, READABLE);
        }
        reactor.reap(&mut self.completions, wait).map_err(|error| format!("the event loop: {error}"))?;
        for completion in self.completions.drain(..) {
            if completion.token == READABLE {
                self.waits_for_requests = false;
                self.kernel.note_readable();
            } else if completion.token.class() == CLASS {
                self.requests.volume.handle(reactor, completion);
            }
        }
        self.exchange()?;
        self.hear_notices();
        Ok(())
    }

    fn hear_notices(&mut self) {
        self.requests.volume.take_notices(&mut self.notices);
        for notice in self.notices.drain(..) {
            let bytes = match notice {
                Notice::Opened(info) => {
                    (self.is_away, self.was_reopened) = (false, true);
                    tracing::info!("the volume is open again; waiting requests continue");
                    info.len
                }
                Notice::Resized(bytes) => bytes,
                Notice::Disconnected(reason) if !self.is_away => {
                    self.is_away = true;
                    tracing::warn!(%reason, "the server cannot be reached; requests wait, for at most {} s", ATTACH_LOST_AFTER.as_secs());
                    continue;
                }
                Notice::Refused(error) => {
                    tracing::warn!(%error, "the server cannot open the volume; requests wait");
                    continue;
                }
                // Each of the attempts to reach it again tells as much.
                Notice::Disconnected(_) => continue,
            };
            if bytes != self.requests.info.len {
                self.requests.info.len = bytes;
                let _ = self.events.send(Event::Resized(bytes));
            }
        }
        if self.was_reopened && self.requests.volume.is_settled() {
            self.was_reopened = false;
            if let Some(info) = self.requests.volume.info() {
                let _ = self.events.send(Event::Repeated { instance: info.instance, store: info.store });
            }
        }
    }
}

/// Connects, and waits until the volume is open; the first failure is the answer.
fn open_volume(
    reactor: &mut Reactor,
    uri: &RemoteUri,
    tls: &ClientTlsArguments,
    read_only: bool,
    client: ClientName,
) -> Result<(Volume, VolumeInfo), RemoteError> {
    let name = uri.volume().ok_or_else(|| RemoteError::NoVolume(uri.to_string()))?;
    let secure = uri.wants_tls().then(|| tls.client(uri.host())).transpose()?;
    let mut options = VolumeOptions::new(CLASS);
    options.read_only = read_only;
    options.client = Some(client);
    options.bounds.lost_after = ATTACH_LOST_AFTER;
    let mut volume = Volume::connect(reactor, uri.resolve()?, name, options);
    if let Some(tls) = &secure {
        volume.set_tls(tls.clone());
    }
    let failed = |source| native_failed(uri, tls, secure.as_ref(), source);
    let limit = reactor.now() + OPEN_LIMIT;
    let (mut completions, mut notices) = (Vec::new(), Vec::new());
    loop {
        volume.flush(reactor);
        reactor.reap(&mut completions, Wait::Until(limit)).map_err(RemoteError::Loop)?;
        for completion in completions.drain(..) {
            volume.handle(reactor, completion);
        }
        volume.flush(reactor);
        volume.take_notices(&mut notices);
        for notice in notices.drain(..) {
            match notice {
                Notice::Opened(mut info) => {
                    info.read_only |= read_only;
                    return Ok((volume, info));
                }
                Notice::Disconnected(reason) => return Err(failed(ConnectError::Session(reason))),
                Notice::Refused(error) => return Err(failed(ConnectError::Open(error))),
                Notice::Resized(_) => {}
            }
        }
        if let Some(error) = volume.failed() {
            return Err(failed(ConnectError::Volume(error)));
        }
        if reactor.now() >= limit {
            return Err(RemoteError::Silent(uri.to_string()));
        }
    }
}

/// What the kernel is told of a failure.
fn errno_of(error: VolumeError) -> Errno {
    use byway_service::block::BlockError;
    use byway_service::block::wire::CallError;
    match error {
        VolumeError::Call(CallError::Block(BlockError::NoSpace | BlockError::PastEnd)) => Errno::NOSPC,
        VolumeError::Call(CallError::Block(BlockError::ReadOnly)) => Errno::ROFS,
        VolumeError::Call(CallError::Block(BlockError::Unsupported)) => Errno::OPNOTSUPP,
        _ => Errno::IO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use byway_service::block::ZeroFlags;

    #[test]
    fn each_change_of_a_shared_volume_is_durable() {
        let (offset, len, durable) = (0, 512, false);
        let mut changes: [Request<(), ()>; 3] = [
            Request::Write { offset, len: 512, from: (), durable },
            Request::Trim { offset, len, durable },
            Request::Zero { offset, len, flags: ZeroFlags::default() },
        ];
        changes.iter_mut().for_each(make_durable);
        let is_durable = |request: &Request<(), ()>| match request {
            Request::Write { durable, .. } | Request::Trim { durable, .. } => *durable,
            Request::Zero { flags, .. } => flags.durable,
            _ => false,
        };
        assert!(changes.iter().all(is_durable));
    }
}
