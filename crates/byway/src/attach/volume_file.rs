//! A file system with one file, whose bytes are a volume's.
//!
//! A request is read into memory of the loop's pool: the payload of a long write goes to the wire from there, and a read's answer
//! goes to the kernel from the frame that it was received into.

mod requests;

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use byway_frontend::fuse::Notifier;
use byway_frontend::fuse::abi::WriteOut;
use byway_frontend::fuse::channel::{Channel, Received};
use byway_frontend::fuse::mount::{MountOptions, mount_detached};
use byway_frontend::fuse::request::{RequestError, WRITE_HEAD_BYTES, parse_parts};
use byway_frontend::fuse::session::{Reading, Session, Step, Terms, Wishes};
use byway_frontend::limits::FUSE_WRITE_BYTES_MAX;
use byway_reactor::{Errno, Frame};
use byway_service::block::client::VolumeInfo;
use zerocopy::IntoBytes;

use super::command::AttachError;
use super::registry::{Attachment, ClientRecord};
use super::successor;
use super::volume_server::{Answer, KernelSide, Requests, Supply};
use crate::limits::{ATTACH_FRAME_BYTES, ATTACH_REQUESTS_PER_TURN};
use crate::remote::RemoteUri;

/// The file's node.
pub(super) const NODE: u64 = 2;

/// The file, and the channel through which the kernel asks for it.
pub(super) struct VolumeFile {
    channel: Arc<Channel>,
    session: Session,
    /// The session's, for the main thread.
    terms: Arc<OnceLock<Terms>>,
    /// The file's.
    name: String,
    /// What the next request is read into.
    head: [u8; WRITE_HEAD_BYTES],
    incoming: Option<Frame>,
    joined: Vec<u8>,
    /// The kernel may have requests.
    may_have_requests: bool,
    ended: bool,
}

/// What the main thread makes a device of.
pub(super) struct MountedFile {
    /// The file system, which is attached to no directory.
    pub mount: OwnedFd,
    pub channel: Arc<Channel>,
    /// What process and kernel agreed on at FUSE's INIT. It is there once the file is open.
    pub terms: Arc<OnceLock<Terms>>,
    pub client: ClientRecord,
}

/// A file that another process has served, for the main thread.
pub(super) struct TakenFile {
    pub channel: Arc<Channel>,
    pub terms: Terms,
    pub client: ClientRecord,
}

impl VolumeFile {
    /// Makes the volume's file, of that name.
    pub(super) fn mount(name: &str, uri: &RemoteUri, requests: &Requests) -> Result<(Self, MountedFile), AttachError> {
        let info = &requests.info;
        let options = MountOptions { source: uri.to_string(), read_only: info.read_only, ..MountOptions::default() };
        let (channel, mount) = mount_detached(&options)?;
        channel.set_nonblocking().map_err(AttachError::File)?;
        let channel = Arc::new(channel);
        let file = Self::over(Arc::clone(&channel), Session::new(wishes(info)), name);
        let (terms, client) = (Arc::clone(&file.terms), successor::client_record(requests));
        Ok((file, MountedFile { mount, channel, terms, client }))
    }

    /// Goes on with the file of a process that has died. The kernel sends again what that process had not answered.
    pub(super) fn take_over(
        name: &str,
        requests: &mut Requests,
        left: &Attachment,
        channel: Channel,
    ) -> Result<(Self, TakenFile), AttachError> {
        let record = left.file.ok_or(AttachError::NoRecord)?;
        successor::prepare(requests, left, &record.client)?;
        let channel = Arc::new(channel);
        let terms = record.terms();
        let mut session = Session::taken_over(wishes(&requests.info), terms);
        session.set_reading(Reading::GoesOn);
        let told = Notifier::new(Arc::clone(&channel)).resend();
        told.map_err(|error| AttachError::File(io::Error::other(error)))?;
        let client = ClientRecord { read_only: record.client.read_only, ..successor::client_record(requests) };
        tracing::info!(device = %left.device.display(), "taken over from a process that has died");
        Ok((Self::over(Arc::clone(&channel), session, name), TakenFile { channel, terms, client }))
    }

    fn over(channel: Arc<Channel>, session: Session, name: &str) -> Self {
        Self {
            channel,
            session,
            terms: Arc::new(OnceLock::new()),
            name: name.to_owned(),
            head: [0; WRITE_HEAD_BYTES],
            incoming: None,
            joined: Vec::new(),
            may_have_requests: true,
            ended: false,
        }
    }

    fn take_request(&mut self, frame: Frame, bytes: usize, requests: &mut Requests) {
        let in_head = bytes.min(WRITE_HEAD_BYTES);
        let head = self.head;
        let mut joined = std::mem::take(&mut self.joined);
        match parse_parts(&head[..in_head], &frame.bytes()[..bytes - in_head], &mut joined) {
            Ok(parsed) => match self.session.receive(&parsed) {
                Step::Welcome(out) => {
                    if let Some(terms) = self.session.terms() {
                        let _ = self.terms.set(terms);
                    }
                    self.reply(parsed.unique, Ok(&[out.as_bytes()]));
                }
                Step::Refuse(errno) => self.reply(parsed.unique, Err(errno)),
                Step::Serve { .. } => {
                    let left = self.request(&parsed, &frame, &requests.info);
                    self.submit_left(parsed.unique, left, frame, requests);
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
}

fn wishes(info: &VolumeInfo) -> Wishes {
    Wishes {
        write_bytes_max: info.request_max.min(FUSE_WRITE_BYTES_MAX),
        read_directory_plus: false,
        auto_invalidate: false,
        resends: true,
        ..Wishes::default()
    }
}

impl KernelSide for VolumeFile {
    fn readiness(&self) -> io::Result<OwnedFd> {
        self.channel.as_fd().try_clone_to_owned()
    }

    fn note_readable(&mut self) {
        self.may_have_requests = true;
    }

    fn take_requests(&mut self, requests: &mut Requests) -> Result<(), String> {
        for _ in 0..ATTACH_REQUESTS_PER_TURN {
            if !self.may_have_requests || requests.has_waiting() || self.session.is_full() {
                return Ok(());
            }
            let Some(mut frame) = self.incoming.take().or_else(|| requests.alloc(FUSE_WRITE_BYTES_MAX as usize)) else {
                // One comes back with the next answer, or the next flush.
                requests.wait_for_room();
                return Ok(());
            };
            let mut parts = [IoSliceMut::new(&mut self.head), IoSliceMut::new(frame.bytes_mut())];
            match self.channel.read(&mut parts) {
                Ok(Received::Request(bytes)) => self.take_request(frame, bytes, requests),
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

    fn supply(&self) -> Supply {
        match (self.ended, self.may_have_requests) {
            (true, _) => Supply::Ended,
            (_, false) => Supply::Nothing,
            _ if self.session.is_full() => Supply::Full,
            _ => Supply::Some,
        }
    }

    fn copy_payload(&mut self, _: u64, _: &mut Frame) -> io::Result<()> {
        // The payloads of FUSE come with their requests.
        Err(io::ErrorKind::Unsupported.into())
    }

    fn answer(&mut self, unique: u64, answer: Result<Answer<'_>, Errno>) {
        match answer {
            Ok(Answer::Read(bytes)) => self.finish(unique, Ok(&[bytes])),
            Ok(Answer::Written(size)) => self.finish(unique, Ok(&[WriteOut { size, padding: 0 }.as_bytes()])),
            Ok(Answer::Done) => self.finish(unique, Ok(&[])),
            Err(errno) => self.refuse(unique, errno),
        }
    }

    fn submit(&mut self) -> Result<(), String> {
        // Each reply is sent at once.
        Ok(())
    }
}

const _: () = assert!(ATTACH_FRAME_BYTES >= 16 * FUSE_WRITE_BYTES_MAX as usize);
