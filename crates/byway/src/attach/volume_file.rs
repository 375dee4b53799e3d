//! A file system with one file, whose bytes are a volume's: requests of the kernel go to the volume's client, its answers back.
//!
//! One loop does both. A request is read into memory of the loop's pool: the payload of a long write goes to the wire from there,
//! and a read's answer goes to the kernel from the frame that it was received into.

mod requests;

use std::collections::{HashMap, VecDeque};
use std::io::IoSliceMut;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use byway_frontend::fuse::Notifier;
use byway_frontend::fuse::channel::{Channel, Received};
use byway_frontend::fuse::mount::{MountOptions, mount_detached};
use byway_frontend::fuse::request::{RequestError, WRITE_HEAD_BYTES, parse_parts};
use byway_frontend::fuse::session::{Session, Step, Wishes};
use byway_frontend::limits::FUSE_WRITE_BYTES_MAX;
use byway_reactor::{Completion, Descriptor, Errno, Frame, IoChoice, Op, Reactor, Token, Wait};
use byway_service::block::client::{
    ConnectError, Done, Notice, Request, Volume, VolumeError, VolumeInfo, VolumeOptions,
};

use super::command::{AttachError, Event};
use crate::limits::{ATTACH_FRAME_BYTES, ATTACH_LOST_AFTER, ATTACH_REQUESTS_PER_TURN};
use crate::remote::{RemoteError, RemoteUri, native_failed};
use crate::tls::ClientTlsArguments;
use requests::Waiting;

/// The file's node.
pub(super) const NODE: u64 = 2;

const CLASS: u8 = 0x30;
/// The token of the wait for requests.
const READABLE: Token = Token::new(0x20, 0, 0, 0);
/// How long the volume may take to open, and to close.
const OPEN_LIMIT: Duration = Duration::from_secs(15);
const CLOSE_LIMIT: Duration = Duration::from_secs(2);
/// The tag of the flush at the end; the kernel's numbers are small.
const FLUSH_TAG: u64 = u64::MAX;

/// The volume, its file, and the loop that drives both.
pub(super) struct VolumeFile {
    reactor: Reactor,
    volume: Volume,
    channel: Arc<Channel>,
    descriptor: Descriptor,
    session: Session,
    info: VolumeInfo,
    /// The file's.
    name: String,
    /// What the next request is read into.
    head: [u8; WRITE_HEAD_BYTES],
    incoming: Option<Frame>,
    joined: Vec<u8>,
    /// A wait for requests is under way.
    waits_for_requests: bool,
    /// The kernel may have requests.
    may_have_requests: bool,
    /// Requests that found no frame, or no place at the client.
    waiting: VecDeque<Waiting>,
    /// [`VolumeFile::progress`] at the last try of the waiting requests.
    tried_at: u64,
    /// Answers of the client so far.
    answered: u64,
    /// By the kernel's number: what the client was asked.
    asked: HashMap<u64, Asked>,
    completions: Vec<Completion>,
    done: Vec<Done<Frame>>,
    notices: Vec<Notice>,
    events: Sender<Event>,
    ended: bool,
    /// The server is away, and the log says so.
    is_away: bool,
    last_flush: Option<Result<(), VolumeError>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Read,
    Write(u32),
    Other,
}

impl VolumeFile {
    /// Opens the volume, makes its file, of that name, and says so.
    pub(super) fn open(
        (name, uri): (&str, &RemoteUri),
        tls: &ClientTlsArguments,
        read_only: bool,
        events: Sender<Event>,
    ) -> Result<Self, AttachError> {
        // The kernel writes back through this thread when memory runs short: what it allocates must not wait for that.
        if let Err(error) = rustix::process::configure_io_flusher_behavior(true) {
            tracing::warn!(%error, "cannot mark this process as serving a block device (PR_SET_IO_FLUSHER)");
        }
        let mut reactor = Reactor::open(IoChoice::Auto, ATTACH_FRAME_BYTES).map_err(RemoteError::Loop)?;
        let (volume, info) = open_volume(&mut reactor, uri, tls, read_only)?;
        let options = MountOptions { source: uri.to_string(), read_only: info.read_only, ..MountOptions::default() };
        let (channel, mount) = mount_detached(&options)?;
        channel.set_nonblocking().map_err(AttachError::File)?;
        let own = channel.as_fd().try_clone_to_owned().map_err(AttachError::File)?;
        let descriptor = reactor.add_descriptor(own).map_err(AttachError::File)?;
        let channel = Arc::new(channel);
        let wishes = Wishes {
            write_bytes_max: info.request_max.min(FUSE_WRITE_BYTES_MAX),
            read_directory_plus: false,
            auto_invalidate: false,
            ..Wishes::default()
        };
        let ready = Event::Ready(info, mount, Notifier::new(Arc::clone(&channel)));
        let _ = events.send(ready);
        Ok(Self {
            reactor,
            volume,
            channel,
            descriptor,
            session: Session::new(wishes),
            info,
            name: name.to_owned(),
            head: [0; WRITE_HEAD_BYTES],
            incoming: None,
            joined: Vec::new(),
            waits_for_requests: false,
            may_have_requests: true,
            waiting: VecDeque::new(),
            tried_at: 0,
            answered: 0,
            asked: HashMap::with_capacity(1024),
            completions: Vec::with_capacity(1024),
            done: Vec::with_capacity(1024),
            notices: Vec::new(),
            events,
            ended: false,
            is_away: false,
            last_flush: None,
        })
    }

    /// Serves until the file's last user has closed it, then flushes the volume and leaves.
    pub(super) fn serve(mut self) -> Result<(), String> {
        loop {
            self.take_requests()?;
            if self.ended {
                break;
            }
            self.turn(Wait::Block)?;
        }
        self.reactor.remove_descriptor(self.descriptor);
        let flushed = if self.info.read_only { Ok(()) } else { self.flush_last() };
        self.volume.close(&mut self.reactor);
        let limit = self.reactor.now() + CLOSE_LIMIT;
        while !self.volume.is_closed() && self.reactor.now() < limit {
            self.turn(Wait::Until(limit))?;
        }
        flushed
    }

    /// What the kernel had written is durable by now where it asked for that; this is for the rest.
    fn flush_last(&mut self) -> Result<(), String> {
        if self.volume.submit(Request::Flush, FLUSH_TAG).is_err() {
            return Err("too many requests were under way for a last flush".to_owned());
        }
        loop {
            self.volume.flush(&mut self.reactor);
            self.answer();
            if self.last_flush.is_some() {
                break;
            }
            self.turn(Wait::Block)?;
        }
        let failed = |error| format!("the last flush failed, and what was not flushed before may be missing: {error}");
        self.last_flush.unwrap_or(Ok(())).map_err(failed)
    }

    /// Sends, waits, and hands out what has come.
    fn turn(&mut self, wait: Wait) -> Result<(), String> {
        self.volume.flush(&mut self.reactor);
        self.answer();
        let may_go_on = if self.waiting.is_empty() {
            self.may_have_requests && !self.session.is_full()
        } else {
            self.progress() != self.tried_at
        };
        // The server is heard also while the kernel always has more.
        let wait = if may_go_on && !self.ended { Wait::Poll } else { wait };
        if !self.waits_for_requests && !self.may_have_requests && !self.ended {
            self.waits_for_requests = true;
            self.reactor.submit(Op::Readable { descriptor: self.descriptor }, READABLE);
        }
        self.reactor.reap(&mut self.completions, wait).map_err(|error| format!("the event loop: {error}"))?;
        for completion in self.completions.drain(..) {
            if completion.token == READABLE {
                (self.waits_for_requests, self.may_have_requests) = (false, true);
            } else if completion.token.class() == CLASS {
                self.volume.handle(&mut self.reactor, completion);
            }
        }
        self.volume.flush(&mut self.reactor);
        self.answer();
        self.hear_notices();
        Ok(())
    }

    /// Whether nothing more is read: requests wait for frames here, or too many are under way.
    fn is_full(&self) -> bool {
        !self.waiting.is_empty() || self.session.is_full()
    }

    /// Reads requests as long as there are some, and places for them.
    fn take_requests(&mut self) -> Result<(), String> {
        self.resume_waiting();
        for _ in 0..ATTACH_REQUESTS_PER_TURN {
            if !self.may_have_requests || self.is_full() {
                return Ok(());
            }
            let Some(mut frame) =
                self.incoming.take().or_else(|| self.reactor.frames().alloc(FUSE_WRITE_BYTES_MAX as usize))
            else {
                // One comes back with the next answer, or the next flush.
                self.waiting.push_back(Waiting::Room);
                return Ok(());
            };
            let mut parts = [IoSliceMut::new(&mut self.head), IoSliceMut::new(frame.bytes_mut())];
            match self.channel.read(&mut parts) {
                Ok(Received::Request(bytes)) => self.take_request(frame, bytes),
                Ok(Received::Nothing) => {
                    self.may_have_requests = false;
                    self.incoming = Some(frame);
                }
                Ok(Received::Ended) => {
                    self.ended = true;
                    return Ok(());
                }
                Err(error) => return Err(format!("requests cannot be read: {error}")),
            }
        }
        Ok(())
    }

    fn take_request(&mut self, frame: Frame, bytes: usize) {
        let in_head = bytes.min(WRITE_HEAD_BYTES);
        let head = self.head;
        let mut joined = std::mem::take(&mut self.joined);
        match parse_parts(&head[..in_head], &frame.bytes()[..bytes - in_head], &mut joined) {
            Ok(parsed) => match self.session.receive(&parsed) {
                Step::Welcome(out) => self.reply(parsed.unique, Ok(&[zerocopy::IntoBytes::as_bytes(&out)])),
                Step::Refuse(errno) => self.reply(parsed.unique, Err(errno)),
                Step::Serve => {
                    let left = self.request(&parsed, &frame);
                    self.submit(parsed.unique, left, frame);
                    self.joined = joined;
                    return;
                }
                Step::End => self.ended = true,
                Step::Tell | Step::Interrupt(_) | Step::Nothing => {}
            },
            Err(RequestError::Short { unique, .. }) => self.reply(unique, Err(Errno::IO.raw_os_error())),
            Err(RequestError::Unknown { unique, .. }) => self.reply(unique, Err(Errno::NOSYS.raw_os_error())),
            Err(error @ RequestError::Length { .. }) => tracing::error!(%error, "a request cannot be answered"),
        }
        self.joined = joined;
        self.incoming = Some(frame);
    }

    fn reply(&self, unique: u64, answer: Result<&[&[u8]], i32>) {
        if let Err(error) = self.channel.reply(unique, answer) {
            tracing::error!(%error, "cannot send a reply to the kernel");
        }
    }

    fn hear_notices(&mut self) {
        self.volume.take_notices(&mut self.notices);
        for notice in self.notices.drain(..) {
            let bytes = match notice {
                Notice::Opened(info) => {
                    self.is_away = false;
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
            if bytes != self.info.len {
                self.info.len = bytes;
                let _ = self.events.send(Event::Resized(bytes));
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
) -> Result<(Volume, VolumeInfo), RemoteError> {
    let name = uri.volume().ok_or_else(|| RemoteError::NoVolume(uri.to_string()))?;
    let secure = uri.wants_tls().then(|| tls.client(uri.host())).transpose()?;
    let mut options = VolumeOptions::new(CLASS);
    options.read_only = read_only;
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

const _: () = assert!(ATTACH_FRAME_BYTES >= 16 * FUSE_WRITE_BYTES_MAX as usize);
