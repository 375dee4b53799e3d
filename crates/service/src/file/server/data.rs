//! Data of files: from the file into a frame and on to the client, and the reverse.
//!
//! A header never announces a length that the file may not have any more: the bytes are read first. A write is one
//! `write(2)` at the server: an append is atomic, and the answer says how much the file accepted.

use std::sync::Arc;

use byway_fabric::limits::SMALL_BYTES_MAX;
use byway_fabric::{CloseReason, GetError, PayloadMeta, Put, Remote, SessionId, append_payload};
use byway_reactor::{ByteRange, File, FileRange, Frame, Outcome, Token, WriteAt};
use rustix::io::Errno;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use super::super::wire::{CallError, FLAG_APPEND, WriteResult};
use super::calls::Asked;
use super::leases::Parked;
use super::replies::Reply;
use super::table::{Node, Open};
use super::waiting::{Begin, Transfer};
use super::{FileRequest, FileRequestId, Shares, Window, tree};
use crate::host::At;
use crate::limits::FILE_TRANSFER_MAX;

/// What a call reads or writes.
struct Checked {
    file: File,
    len: usize,
    /// It takes `len` bytes; there is one if they are many.
    window: Option<Window>,
}

impl Shares {
    pub(super) fn token(&self, request: FileRequestId) -> Token {
        request.token(self.class, 0)
    }

    /// Checks a call that reads or writes.
    fn checked(&mut self, at: &At<'_>, asked: &Asked<'_>, reads: bool) -> Result<Checked, CallError> {
        let handle = self.client(asked.call.session)?.handle(asked.arguments.node.get())?;
        let Open::File { file, .. } = handle.open else { return Err(Errno::ISDIR.into()) };
        if !reads && handle.node.right == byway_fabric::access::Right::Read {
            return Err(Errno::ROFS.into());
        }
        let len = usize::try_from(asked.arguments.len.get()).ok().filter(|len| *len <= FILE_TRANSFER_MAX);
        let len = len.ok_or(CallError::Malformed)?;
        let window = asked.window(reads).filter(|window| window.len >= len);
        if len > SMALL_BYTES_MAX && window.is_none() {
            return Err(CallError::Malformed);
        }
        // Its lanes are not there yet, or not any more.
        if len > SMALL_BYTES_MAX && !at.fabric.can_put(asked.call.session) {
            return Err(CallError::Busy);
        }
        if !ByteRange::new(asked.arguments.offset.get(), len as u64).ends_by(i64::MAX as u64) {
            return Err(Errno::INVAL.into());
        }
        Ok(Checked { file, len, window })
    }

    pub(super) fn read(&mut self, at: &mut At<'_>, asked: &Asked<'_>) -> Result<(), CallError> {
        let Checked { file, len, window } = self.checked(at, asked, true)?;
        let call = asked.call;
        if len == 0 {
            self.reply(at, call, Ok(Reply::of_result(&0u64.to_le_bytes())));
            return Ok(());
        }
        let offset = asked.arguments.offset.get();
        let request = self.start(at, FileRequest::Read { call, window, len });
        let begin = Begin::Read { file, offset };
        self.transfer_in_turn(at, Transfer { request, session: call.session, len, begin });
        Ok(())
    }

    pub(super) fn write(&mut self, at: &mut At<'_>, asked: &Asked<'_>) -> Result<(), CallError> {
        let Checked { file, len, window } = self.checked(at, asked, false)?;
        let node = Arc::clone(&self.client(asked.call.session)?.handle(asked.arguments.node.get())?.node);
        let (call, append) = (asked.call, asked.arguments.flags.get() & FLAG_APPEND != 0);
        let at_offset = WriteAt::Offset(asked.arguments.offset.get());
        let to = if append { WriteAt::End } else { at_offset };
        if len <= SMALL_BYTES_MAX && asked.data.len() != len {
            return Err(CallError::Malformed);
        }
        if len == 0 {
            self.reply(at, call, Ok(Reply::of_result(&0u64.to_le_bytes())));
            return Ok(());
        }
        if let (Some(window), true) = (window, len > SMALL_BYTES_MAX) {
            let request = self.start(at, FileRequest::Get { call, node, file, to, len });
            let begin = Begin::Get(window);
            self.transfer_in_turn(at, Transfer { request, session: call.session, len, begin });
            return Ok(());
        }
        let mut frame = self.frame(at, call.session, len)?;
        at.sessions.note_held(call.session, len);
        frame.write(0, asked.data);
        let id = node.id;
        let request = self.start(at, FileRequest::Write { call, node, len });
        self.change(at, request, call.session, &[id], &[id], Parked::Write { file, to, from: frame, len });
        Ok(())
    }

    /// A frame, unless the session has its share of them.
    fn frame(&self, at: &At<'_>, session: SessionId, len: usize) -> Result<Frame, CallError> {
        if at.sessions.holds_too_much(at.fabric, at.reactor, session) {
            return Err(CallError::Busy);
        }
        at.reactor.frames().alloc(len).ok_or(CallError::Busy)
    }

    /// Bytes of a large write are here, or will not come.
    pub(super) fn got_bytes(&mut self, at: &mut At<'_>, request: FileRequestId, got: Result<Frame, GetError>) {
        let Some(FileRequest::Get { call, node, file, to, len }) = self.requests.get(request) else { return };
        let (call, node, file, to, len) = (*call, Arc::clone(node), *file, *to, *len);
        match got {
            Ok(from) => {
                let id = node.id;
                if let Some(request) = self.requests.get_mut(request) {
                    *request = FileRequest::Write { call, node, len };
                }
                self.change(at, request, call.session, &[id], &[id], Parked::Write { file, to, from, len });
            }
            Err(error) => {
                at.sessions.note_released(call.session, len);
                // Nothing was written: what the client sends again in its next session is a new call.
                let is_over = error == GetError::Ended;
                self.end(at, request, Err(if is_over { CallError::Busy } else { CallError::Malformed }));
            }
        }
    }

    /// Bytes were read or written.
    pub(super) fn moved(&mut self, at: &mut At<'_>, request: FileRequestId, outcome: Outcome) {
        match (self.requests.get(request), outcome) {
            (Some(FileRequest::Read { call, window, len }), Outcome::Read { into, result }) => {
                let (call, window) = (*call, *window);
                at.sessions.note_released(call.session, *len);
                self.counters.moved(call.counted, result.unwrap_or(0));
                match (result, window) {
                    (Err(errno), _) => self.end(at, request, Err(errno.into())),
                    (Ok(len), Some(window)) if len > SMALL_BYTES_MAX => self.put(at, request, window, into, len),
                    (Ok(len), _) => self.send(at, request, into, len),
                }
            }
            (Some(FileRequest::Write { call, node, len }), Outcome::Written { result, .. }) => {
                let (counted, session, node) = (call.counted, call.session, Arc::clone(node));
                at.sessions.note_released(session, *len);
                self.counters.moved(counted, result.unwrap_or(0));
                match result {
                    Ok(len) => self.wrote(at, request, session, &node, len),
                    Err(errno) => self.end(at, request, Err(errno.into())),
                }
            }
            _ => {}
        }
    }

    /// Bytes are in the file. A client that has its lease on it again is told the attributes, too, where they are in memory.
    fn wrote(&mut self, at: &mut At<'_>, request: FileRequestId, session: SessionId, node: &Node, len: usize) {
        let files = self.recovery.open_files();
        let look = files.look();
        let can_tell = node.share.is_local() && self.takes_leases(session);
        let attributes = if can_tell { tree::attributes(&node.fd).ok() } else { None };
        let attributes = attributes.filter(|_| !files.may_have_links(look, node.id));
        let lease = self.end_change_of_file(request, session);
        let told = attributes.filter(|_| lease != 0);
        let result = WriteResult { bytes: U64::new(len as u64), lease: U64::new(lease) };
        let payload = told.as_ref().map_or(&[][..], IntoBytes::as_bytes);
        self.end(at, request, Ok(Reply { result: result.as_bytes(), payload }));
    }

    /// Reads straight into the client's window, where that can be reached and no device is needed, and answers. False: read into a frame.
    pub(super) fn try_read_direct(&mut self, at: &mut At<'_>, request: FileRequestId, from: FileRange) -> bool {
        let Some(&FileRequest::Read { call, window: Some(window), len }) = self.requests.get(request) else {
            return false;
        };
        // The checksum is of the bytes in a frame: what is in the client's memory, the client may change.
        if len <= SMALL_BYTES_MAX || at.sessions.get(call.session).is_none_or(|session| session.checksum) {
            return false;
        }
        let to = Remote { window: window.key, offset: 0 };
        match at.fabric.put_file(at.reactor, call.session, to, from) {
            // Few bytes go in the message; of an error it is found out whether it is the file's.
            None | Some(Ok(1..=SMALL_BYTES_MAX) | Err(_)) => false,
            Some(Ok(0)) => {
                self.end(at, request, Ok(Reply::of_result(&0u64.to_le_bytes())));
                true
            }
            Some(Ok(count)) => {
                self.counters.moved(call.counted, count);
                let payload = PayloadMeta { len: count, checksum: None };
                if let Some(put) = self.end_with_put(at, request, window, payload) {
                    at.fabric.put_done(put);
                }
                self.ended(at, call.session);
                true
            }
        }
    }

    /// Ends a request whose answer is a put; gives it. `None`: its session has ended.
    fn end_with_put(
        &mut self,
        at: &mut At<'_>,
        request: FileRequestId,
        window: Window,
        payload: PayloadMeta,
    ) -> Option<Put> {
        let call = self.requests.remove(request)?.call();
        self.counters.answered(call.counted, None);
        let reply = at.sessions.reply(call.named, 0, payload.len, &(payload.len as u64).to_le_bytes())?;
        let to = Remote { window: window.key, offset: 0 };
        Some(Put { session: call.session, route: at.fabric.route(call.session), to, header: reply.header, payload })
    }

    /// Answers with the first bytes of a frame in the message.
    fn send(&mut self, at: &mut At<'_>, request: FileRequestId, frame: Frame, len: usize) {
        let Some(ended) = self.requests.remove(request) else { return };
        self.counters.answered(ended.call().counted, None);
        let session = ended.call().session;
        let meta = meta(at, session, &frame, len);
        if let Some(route) = at.sessions.reply(ended.call().named, 0, len, &(len as u64).to_le_bytes()) {
            at.fabric.send_with(session, route.header, meta, |gather| gather.push_frame(frame, 0, len));
        }
        self.ended(at, session);
    }

    /// Answers with the first bytes of a frame in the caller's window.
    fn put(&mut self, at: &mut At<'_>, request: FileRequestId, window: Window, frame: Frame, len: usize) {
        let Some(session) = self.requests.get(request).map(|request| request.call().session) else { return };
        let meta = meta(at, session, &frame, len);
        if let Some(put) = self.end_with_put(at, request, window, meta)
            && let Err(error) = at.fabric.put(at.reactor, put, |gather| gather.push_frame(frame, 0, len))
        {
            // The bytes lie in a frame, so it is the client's memory that cannot be written.
            at.fabric.close(at.reactor, session, CloseReason::Io(error));
        }
        self.ended(at, session);
    }
}

fn meta(at: &At<'_>, session: SessionId, frame: &Frame, len: usize) -> PayloadMeta {
    let checked = at.sessions.get(session).is_some_and(|session| session.checksum);
    PayloadMeta { len, checksum: checked.then(|| append_payload(0, frame, 0..len)) }
}
