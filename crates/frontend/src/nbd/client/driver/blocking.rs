//! A client for code that waits: owns a loop, cuts long transfers, keeps several requests under way.

use std::rc::Rc;

use byway_fabric::tls::TlsClient;
use byway_reactor::{Address, Completion, Extent, Frame, Reactor, Wait};
use byway_service::block::ZeroFlags;
use byway_service::block::client::{Answer, Request};

use super::{Client, ClientConfig, ClientError, ClientOptions, Completed, RequestError};
use crate::limits::{CLIENT_CLOSE_SECONDS_MAX, CLIENT_PIECE_BYTES};
use crate::nbd::client::{ListedExport, Purpose, Session};
use crate::nbd::errno::Errno;
use crate::nbd::request::Violation;

/// An export and the loop that drives it.
pub struct BlockingClient {
    reactor: Reactor,
    client: Client,
    completions: Vec<Completion>,
    done: Vec<Completed>,
}

/// The exports of a server, with what it says of each.
///
/// # Errors
/// See [`ClientError`].
pub fn list(
    reactor: Reactor,
    address: Address,
    class: u8,
    tls: Option<TlsClient>,
) -> Result<Vec<ListedExport>, ClientError> {
    let config = ClientConfig { purpose: Purpose::List, ..ClientConfig::default() };
    let mut this = BlockingClient::begin(reactor, address, config, ClientOptions { class, connections: 1, tls });
    let went = this.turn_until(|client| client.listed().is_some());
    let listed = this.client.listed().map(<[ListedExport]>::to_vec).unwrap_or_default();
    this.close();
    went.map(|()| listed)
}

impl BlockingClient {
    /// Opens an export.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn connect(
        reactor: Reactor,
        address: Address,
        config: ClientConfig,
        options: ClientOptions,
    ) -> Result<Self, ClientError> {
        let mut this = Self::begin(reactor, address, config, options);
        match this.turn_until(|client| client.session().is_some()) {
            Ok(()) => Ok(this),
            Err(error) => {
                this.close();
                Err(error)
            }
        }
    }

    fn begin(mut reactor: Reactor, address: Address, config: ClientConfig, options: ClientOptions) -> Self {
        let client = Client::connect(&mut reactor, address, config, options);
        Self { reactor, client, completions: Vec::new(), done: Vec::new() }
    }

    fn turn_until(&mut self, reached: impl Fn(&Client) -> bool) -> Result<(), ClientError> {
        while !reached(&self.client) {
            if let Some(error) = self.client.failed() {
                return Err(error.clone());
            }
            self.turn(Wait::Block);
        }
        Ok(())
    }

    /// What the server said of the export.
    pub fn session(&self) -> Option<&Session> {
        self.client.session()
    }

    /// The client.
    pub fn client(&self) -> &Client {
        &self.client
    }

    fn turn(&mut self, wait: Wait) {
        self.client.flush(&mut self.reactor);
        self.client.reap(&mut self.done);
        // What the export does not accept is answered without its server.
        let wait = if self.done.is_empty() { wait } else { Wait::Poll };
        if self.reactor.reap(&mut self.completions, wait).is_err() {
            self.client.close(&mut self.reactor);
        }
        for completion in self.completions.drain(..) {
            self.client.handle(&mut self.reactor, completion);
        }
        self.client.flush(&mut self.reactor);
        self.client.reap(&mut self.done);
    }

    /// Waits for one answer at least, unless nothing is pending.
    fn wait(&mut self) -> Option<Completed> {
        self.client.reap(&mut self.done);
        while self.done.is_empty() && self.client.pending() > 0 {
            self.turn(Wait::Block);
        }
        self.done.pop()
    }

    fn one(&mut self, request: Request<Frame, Rc<Frame>>) -> Result<Answer, RequestError> {
        if self.client.submit(request, 0).is_err() {
            return Err(starved());
        }
        self.wait().map_or(Err(ClientError::Closed.into()), |done| done.result)
    }

    /// Reads `into.len()` bytes at `offset`.
    ///
    /// # Errors
    /// The first piece's that failed.
    pub fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), RequestError> {
        let mut next = 0;
        let mut result = Ok(());
        loop {
            while next < into.len() && result.is_ok() {
                let len = CLIENT_PIECE_BYTES.min(into.len() - next);
                let Some(frame) = self.reactor.frames().alloc(len) else { break };
                let request = Request::Read { offset: offset + next as u64, len, into: frame };
                if self.client.submit(request, next as u64).is_err() {
                    break;
                }
                next += len;
            }
            let Some(done) = self.wait() else { break };
            match (done.result, done.buffer) {
                (Ok(_), Some(frame)) => {
                    let at = done.tag as usize;
                    frame.read(0, &mut into[at..at + frame.len()]);
                }
                (Err(error), _) => result = Err(error),
                (Ok(_), None) => result = Err(ClientError::Closed.into()),
            }
        }
        if result.is_ok() && next < into.len() { Err(starved()) } else { result }
    }

    /// Writes `from` at `offset`.
    ///
    /// # Errors
    /// The first piece's that failed.
    pub fn write(&mut self, offset: u64, from: &[u8], durable: bool) -> Result<(), RequestError> {
        let mut next = 0;
        let mut result = Ok(());
        loop {
            while next < from.len() && result.is_ok() {
                let len = CLIENT_PIECE_BYTES.min(from.len() - next);
                let Some(mut frame) = self.reactor.frames().alloc(len) else { break };
                frame.write(0, &from[next..next + len]);
                let request = Request::Write { offset: offset + next as u64, len, from: Rc::new(frame), durable };
                if self.client.submit(request, next as u64).is_err() {
                    break;
                }
                next += len;
            }
            let Some(done) = self.wait() else { break };
            if let Err(error) = done.result {
                result = Err(error);
            }
        }
        if result.is_ok() && next < from.len() { Err(starved()) } else { result }
    }

    /// Makes durable what was written.
    ///
    /// # Errors
    /// See [`RequestError`].
    pub fn flush(&mut self) -> Result<(), RequestError> {
        self.one(Request::Flush).map(|_| ())
    }

    /// Makes a range read as zeroes.
    ///
    /// # Errors
    /// See [`RequestError`].
    pub fn zero(&mut self, offset: u64, len: u64, flags: ZeroFlags) -> Result<(), RequestError> {
        self.one(Request::Zero { offset, len, flags }).map(|_| ())
    }

    /// Data and holes from `offset` on, perhaps fewer bytes than asked. A hole here reads as zeroes.
    ///
    /// # Errors
    /// See [`RequestError`].
    pub fn extents(&mut self, offset: u64, len: u64) -> Result<Vec<Extent>, RequestError> {
        match self.one(Request::Extents { offset, len })? {
            Answer::Extents(extents) => Ok(extents),
            Answer::Unit => Err(ClientError::Closed.into()),
        }
    }

    /// Leaves, as the protocol asks, within a few seconds.
    pub fn close(mut self) {
        self.client.close(&mut self.reactor);
        let limit = self.reactor.now() + std::time::Duration::from_secs(CLIENT_CLOSE_SECONDS_MAX);
        while !self.client.is_closed() && self.reactor.now() < limit {
            self.turn(Wait::Until(limit));
        }
    }
}

fn starved() -> RequestError {
    Violation { errno: Errno::NoMemory, reason: "the loop has no memory for it" }.into()
}
