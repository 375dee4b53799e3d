//! A volume for code that waits: owns a loop, cuts long transfers, keeps several requests under way.

use std::rc::Rc;

use byway_fabric::CloseReason;
use byway_fabric::tls::TlsError;
use byway_reactor::{Address, Completion, Extent, Frame, Reactor, Wait};

use super::super::engine::ZeroFlags;
use super::super::wire::CallError;
use super::driver::{Notice, Volume, VolumeInfo, VolumeOptions};
use super::request::{Answer, Done, Request, VolumeError};
use crate::limits::PIECE_BYTES_MAX;

/// Why a volume could not be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// No session with the server.
    #[error("no session with the server: {0}{advice}", advice = advice(*.0))]
    Session(CloseReason),
    /// The server would not open it.
    #[error("the server would not open the volume: {0}")]
    Open(CallError),
    /// Too long.
    #[error(transparent)]
    Volume(#[from] VolumeError),
}

/// What to do where the reason itself does not say it.
fn advice(reason: CloseReason) -> &'static str {
    match reason {
        CloseReason::Io(_) => "; check the address and that a server runs there",
        CloseReason::PeerClosed | CloseReason::Refused(_) => "; the server's log may say why",
        CloseReason::Tls(TlsError::GaveUp | TlsError::Refused(_)) => {
            "; see whether the server wants a certificate (--tls-certificate, --tls-key), and its log"
        }
        CloseReason::Tls(TlsError::UnknownAuthority) => {
            "; give the certificate of the authority that signed the server's (--tls-ca)"
        }
        _ => "",
    }
}

/// A volume and the loop that drives it.
pub struct BlockingVolume {
    reactor: Reactor,
    volume: Volume,
    completions: Vec<Completion>,
    done: Vec<Done<Frame>>,
}

impl BlockingVolume {
    /// Opens a volume; the first failure is the answer.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn connect(
        reactor: Reactor,
        address: Address,
        name: &str,
        options: VolumeOptions,
    ) -> Result<Self, ConnectError> {
        let volume = Volume::connect(&reactor, address, name, options);
        Self::open(reactor, volume)
    }

    /// Waits until a volume that was made on `reactor` is open; the first failure is the answer.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn open(reactor: Reactor, volume: Volume) -> Result<Self, ConnectError> {
        let mut this = Self { reactor, volume, completions: Vec::new(), done: Vec::new() };
        let mut notices = Vec::new();
        loop {
            this.turn(Wait::Block);
            this.volume.take_notices(&mut notices);
            for notice in notices.drain(..) {
                match notice {
                    Notice::Opened(_) => return Ok(this),
                    Notice::Disconnected(reason) => return Err(ConnectError::Session(reason)),
                    Notice::Refused(error) => return Err(ConnectError::Open(error)),
                    Notice::Resized(_) => {}
                }
            }
            if let Some(error) = this.volume.failed() {
                return Err(error.into());
            }
        }
    }

    /// What the server said of the volume.
    pub fn info(&self) -> Option<&VolumeInfo> {
        self.volume.info()
    }

    /// The volume.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    fn turn(&mut self, wait: Wait) {
        self.volume.flush(&mut self.reactor);
        if self.reactor.reap(&mut self.completions, wait).is_err() {
            self.volume.close(&mut self.reactor);
        }
        for completion in self.completions.drain(..) {
            self.volume.handle(&mut self.reactor, completion);
        }
        self.volume.flush(&mut self.reactor);
        self.volume.reap(&mut self.done);
    }

    /// Waits for one answer at least, unless nothing is pending.
    fn wait(&mut self) -> Option<Done<Frame>> {
        self.volume.reap(&mut self.done);
        while self.done.is_empty() && self.volume.pending() > 0 {
            self.turn(Wait::Block);
        }
        self.done.pop()
    }

    fn one(&mut self, request: Request<Frame, Rc<Frame>>) -> Result<Answer, VolumeError> {
        if self.volume.submit(request, 0).is_err() {
            return Err(CallError::Busy.into());
        }
        self.wait().map_or(Err(VolumeError::Closed), |done| done.result)
    }

    /// Reads `into.len()` bytes at `offset`.
    ///
    /// # Errors
    /// The first piece's that failed.
    pub fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), VolumeError> {
        let mut next = 0;
        let mut result = Ok(());
        loop {
            while next < into.len() && result.is_ok() {
                let len = PIECE_BYTES_MAX.min(into.len() - next);
                let Some(frame) = self.volume.alloc(&self.reactor, len) else { break };
                let request = Request::Read { offset: offset + next as u64, len, into: frame };
                if self.volume.submit(request, next as u64).is_err() {
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
                (Ok(_), None) => result = Err(CallError::Malformed.into()),
            }
        }
        if result.is_ok() && next < into.len() { Err(CallError::Busy.into()) } else { result }
    }

    /// Writes `from` at `offset`.
    ///
    /// # Errors
    /// The first piece's that failed.
    pub fn write(&mut self, offset: u64, from: &[u8], durable: bool) -> Result<(), VolumeError> {
        let mut next = 0;
        let mut result = Ok(());
        loop {
            while next < from.len() && result.is_ok() {
                let len = PIECE_BYTES_MAX.min(from.len() - next);
                let Some(mut frame) = self.volume.alloc(&self.reactor, len) else { break };
                frame.write(0, &from[next..next + len]);
                let request = Request::Write { offset: offset + next as u64, len, from: Rc::new(frame), durable };
                if self.volume.submit(request, next as u64).is_err() {
                    break;
                }
                next += len;
            }
            let Some(done) = self.wait() else { break };
            if let Err(error) = done.result {
                result = Err(error);
            }
        }
        if result.is_ok() && next < from.len() { Err(CallError::Busy.into()) } else { result }
    }

    /// Makes durable what was written.
    ///
    /// # Errors
    /// See [`VolumeError`].
    pub fn flush(&mut self) -> Result<(), VolumeError> {
        self.one(Request::Flush).map(|_| ())
    }

    /// Says that a range is no longer needed.
    ///
    /// # Errors
    /// See [`VolumeError`].
    pub fn trim(&mut self, offset: u64, len: u64) -> Result<(), VolumeError> {
        self.one(Request::Trim { offset, len, durable: false }).map(|_| ())
    }

    /// Makes a range read as zeroes.
    ///
    /// # Errors
    /// See [`VolumeError`].
    pub fn zero(&mut self, offset: u64, len: u64, flags: ZeroFlags) -> Result<(), VolumeError> {
        self.one(Request::Zero { offset, len, flags }).map(|_| ())
    }

    /// Data and holes from `offset` on, perhaps fewer bytes than asked.
    ///
    /// # Errors
    /// See [`VolumeError`].
    pub fn extents(&mut self, offset: u64, len: u64) -> Result<Vec<Extent>, VolumeError> {
        match self.one(Request::Extents { offset, len })? {
            Answer::Extents(extents) => Ok(extents),
            Answer::Unit => Err(CallError::Malformed.into()),
        }
    }
}
