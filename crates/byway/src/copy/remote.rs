//! A volume of another machine as one end of a copy, over byway's own protocol or NBD.

use std::rc::Rc;

use byway_reactor::{Completion, Frame, Instant, Reactor};
use byway_service::block::ZeroFlags;
use byway_service::block::client::{Answer as RemoteAnswer, Request as RemoteRequest, VolumeError};
use byway_service::block::wire::CallError;

use super::endpoint::{Answer, Done, Endpoint, EndpointError, Request};
use crate::remote::{Remote, RemoteDone, RemoteInfo};

/// A volume that is open.
pub struct RemoteEndpoint {
    remote: Remote,
    info: RemoteInfo,
    blank: bool,
    done: Vec<RemoteDone>,
    /// Answers that needed no server.
    refused: Vec<Done>,
    /// By id: what was asked, since the answers do not tell.
    asked: Vec<Asked>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Asked {
    Read,
    Change,
    Extents,
}

impl RemoteEndpoint {
    /// Takes an open volume. `blank` says that all of it reads as zeroes.
    pub fn new(remote: Remote, info: RemoteInfo, blank: bool) -> Self {
        Self { remote, info, blank, done: Vec::new(), refused: Vec::new(), asked: Vec::new() }
    }

    /// The volume.
    pub fn remote(&mut self) -> &mut Remote {
        &mut self.remote
    }

    /// What its server said of it.
    pub fn info(&self) -> &RemoteInfo {
        &self.info
    }

    fn note(&mut self, id: u32, asked: Asked) {
        let index = id as usize;
        if self.asked.len() <= index {
            self.asked.resize(index + 1, asked);
        }
        self.asked[index] = asked;
    }
}

/// A server of the native wire says what its volume's bytes lie in; of others, name and size are all that is known. A
/// volume that lives in its server's memory is another after each start of the server.
pub(super) fn volume_identity(remote: &Remote, info: &RemoteInfo) -> String {
    let process = info.process.map_or_else(String::new, |process| format!(":{process:016x}"));
    let backing_id = info.backing_id.map_or_else(String::new, |backing_id| format!("@{backing_id:016x}"));
    format!("{}:{}{process}{backing_id}", remote.uri(), info.bytes)
}

impl Endpoint for RemoteEndpoint {
    fn bytes(&self) -> u64 {
        self.info.bytes
    }

    fn own_frame(&self, len: usize) -> Option<Frame> {
        self.remote.shared_frame(len)
    }

    fn block_bytes(&self) -> u32 {
        self.info.block_bytes
    }

    fn is_blank(&self) -> bool {
        self.blank
    }

    fn identity(&self) -> String {
        volume_identity(&self.remote, &self.info)
    }

    fn class(&self) -> u8 {
        self.remote.class()
    }

    fn lost_at(&self) -> Option<Instant> {
        self.remote.lost_at()
    }

    fn submit(&mut self, _reactor: &mut Reactor, id: u32, request: Request) {
        let (asked, request) = match request {
            Request::Read { offset, into } => {
                let len = into.len();
                (Asked::Read, RemoteRequest::Read { offset, len, into })
            }
            Request::Write { offset, from } => {
                let len = from.len();
                (Asked::Change, RemoteRequest::Write { offset, len, from: Rc::new(from), durable: false })
            }
            Request::Zero { offset, len } => {
                (Asked::Change, RemoteRequest::Zero { offset, len, flags: ZeroFlags::default() })
            }
            Request::Flush => (Asked::Change, RemoteRequest::Flush),
            Request::Extents { offset, len } => (Asked::Extents, RemoteRequest::Extents { offset, len }),
        };
        self.note(id, asked);
        // Copies are not deep enough to fill a client's queue.
        if self.remote.submit(request, id.into()).is_err() {
            let error = VolumeError::from(CallError::Busy);
            self.refused.push(Done { id, answer: failed(asked, EndpointError::Remote(error.into())) });
        }
    }

    fn complete(&mut self, reactor: &mut Reactor, completion: Completion, _done: &mut Vec<Done>) {
        self.remote.handle(reactor, completion);
    }

    fn turn(&mut self, reactor: &mut Reactor, done: &mut Vec<Done>) {
        self.remote.flush(reactor);
        self.remote.reap(&mut self.done);
        done.append(&mut self.refused);
        for RemoteDone { tag, result, buffer } in self.done.drain(..) {
            let asked = self.asked.get(tag as usize).copied().unwrap_or(Asked::Change);
            let answer = match (asked, result, buffer) {
                (Asked::Read, Ok(_), Some(frame)) => Answer::Read(Ok(frame)),
                (Asked::Extents, Ok(RemoteAnswer::Extents(extents)), _) => Answer::Extents(Ok(extents)),
                (Asked::Change, Ok(_), _) => Answer::Changed(Ok(())),
                (asked, Ok(_), _) => failed(asked, EndpointError::Remote(VolumeError::Closed.into())),
                (asked, Err(error), _) => failed(asked, EndpointError::Remote(error)),
            };
            done.push(Done { id: tag as u32, answer });
        }
    }
}

fn failed(asked: Asked, error: EndpointError) -> Answer {
    match asked {
        Asked::Read => Answer::Read(Err(error)),
        Asked::Change => Answer::Changed(Err(error)),
        Asked::Extents => Answer::Extents(Err(error)),
    }
}
