//! The end of a demonstration's copies: takes everything and keeps nothing, so that the wires are measured and no disk.

use byway_reactor::{Completion, Reactor};

use crate::copy::{Answer, Done, Endpoint, EndpointError, Request};

/// Takes writes and forgets them; the copy has their checksum.
#[derive(Debug)]
pub(super) struct Sink {
    bytes: u64,
    done: Vec<Done>,
}

impl Sink {
    pub(super) fn new(bytes: u64) -> Self {
        Self { bytes, done: Vec::new() }
    }
}

impl Endpoint for Sink {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn is_blank(&self) -> bool {
        true
    }

    fn identity(&self) -> String {
        "nowhere".to_owned()
    }

    fn class(&self) -> u8 {
        0x3f
    }

    fn submit(&mut self, _reactor: &mut Reactor, id: u32, request: Request) {
        let answer = match request {
            Request::Write { .. } | Request::Zero { .. } | Request::Flush => Answer::Changed(Ok(())),
            // Nothing is kept that could be read back.
            Request::Read { .. } => Answer::Read(Err(EndpointError::File(byway_reactor::Errno::OPNOTSUPP))),
            Request::Extents { .. } => Answer::Extents(Err(EndpointError::File(byway_reactor::Errno::OPNOTSUPP))),
        };
        self.done.push(Done { id, answer });
    }

    fn complete(&mut self, _reactor: &mut Reactor, _completion: Completion, _done: &mut Vec<Done>) {}

    fn turn(&mut self, _reactor: &mut Reactor, done: &mut Vec<Done>) {
        done.append(&mut self.done);
    }
}
