//! Removed files that are open: a new server process gives them back, where the process before has kept them.

use std::time::Instant;

use zerocopy::IntoBytes;

use super::super::wire::{Arguments, CallError, Forgotten, Method, read_directory};
use super::connection::{Failure, Live};
use super::table::Remote;
use super::{Client, NONE};
use crate::limits::{BUSY_PAUSE_MAX, BUSY_PAUSE_MIN, FILE_CALL_TIME_MAX};

impl Client {
    /// Asks a new server process for removed files that are open here. What is not there is lost: `ESTALE`. False if the server has not
    /// said all: it must not remove what was not asked for.
    pub(super) fn claim_kept_files(&self, live: Live, root: u64) -> Result<bool, Failure> {
        if !self.table().has_open_files() {
            return Ok(true);
        }
        let (mut from, mut unknown, mut all) = (0u64, Vec::new(), true);
        loop {
            let arguments = Arguments { node: root.into(), offset: from.into(), ..NONE };
            let reply = match self.call_again(live, Method::KeptFiles, &arguments, &[]) {
                Ok(reply) => reply,
                Err(Failure::Call(error)) => {
                    tracing::warn!(%error, "the server does not give back all removed files that are open");
                    all = false;
                    break;
                }
                Err(failure) => return Err(failure),
            };
            let before = from;
            for listed in read_directory(&reply.payload).flatten() {
                from = listed.head.cookie.get();
                let (name, attributes) = (listed.head.entry.node, listed.head.entry.attributes);
                let remote = Remote { epoch: live.epoch, name: name.get() };
                if remote.name != 0 && !self.table().claim(remote, &attributes) {
                    unknown.push(Forgotten { node: name, count: 1.into() });
                }
            }
            if from <= before {
                break;
            }
        }
        for some in unknown.chunks(super::FORGOTTEN_MAX) {
            match self.call_again(live, Method::Forget, &NONE, some.as_bytes()) {
                Ok(_) | Err(Failure::Call(_)) => {}
                Err(failure) => return Err(failure),
            }
        }
        Ok(all)
    }

    /// A call of the beginning of a session, again while the server has no room.
    fn call_again(
        &self,
        live: Live,
        method: Method,
        arguments: &Arguments,
        payload: &[u8],
    ) -> Result<byway_rpc::node::Reply, Failure> {
        let (since, mut pause) = (Instant::now(), BUSY_PAUSE_MIN);
        loop {
            match self.connection.call_on(live.session, method, arguments, payload, None) {
                Err(Failure::Call(CallError::Busy)) if since.elapsed() < FILE_CALL_TIME_MAX => {
                    std::thread::park_timeout(pause);
                    pause = (pause * 2).min(BUSY_PAUSE_MAX);
                }
                answer => return answer,
            }
        }
    }
}
