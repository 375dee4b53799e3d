//! TLS of one connection: received ciphertext, and the stream that makes plaintext of it.
//!
//! Payloads are decrypted straight into their destination, so besides the ciphertext of one receive only one record is held,
//! which TLS itself must keep.

use byway_fabric::tls::{TlsClient, TlsError, TlsStream};
use byway_reactor::{Frame, Gather};

use super::inbox::{Inbox, Room};

/// See the module.
pub(super) struct Secure {
    stream: TlsStream,
    ciphertext: Inbox,
    /// All plaintext of what has come has been read.
    exhausted: bool,
    /// The server has said something over TLS.
    heard: bool,
    said_end: bool,
    /// What broke the stream, while the server is being told.
    fault: Option<TlsError>,
}

impl Secure {
    /// The client's end of a new connection, which receives ciphertext into `frame`.
    pub(super) fn begin(client: &TlsClient, frame: Frame) -> Result<Self, TlsError> {
        let (stream, ciphertext) = (client.connect()?, Inbox::new(frame));
        Ok(Self { stream, ciphertext, exhausted: true, heard: false, said_end: false, fault: None })
    }

    /// Whether the handshake is still going on.
    pub(super) fn is_handshaking(&self) -> bool {
        self.stream.is_handshaking()
    }

    /// Takes the frame for a receive of ciphertext.
    pub(super) fn lend(&mut self) -> Option<Room> {
        self.ciphertext.lend(usize::MAX)
    }

    /// Takes the frame back after a receive that brought `count` bytes.
    pub(super) fn give(&mut self, frame: Frame, count: usize) {
        self.ciphertext.give(frame, count);
        self.exhausted = false;
    }

    /// Decrypts what has come into `into`; gives how many bytes there were, at most all of it.
    pub(super) fn decrypt(&mut self, into: &mut [u8]) -> Result<usize, TlsError> {
        if self.exhausted {
            return Ok(0);
        }
        let mut rest = self.ciphertext.bytes();
        let before = rest.len();
        let n = self.stream.decrypt(&mut rest, into)?;
        let taken = before - rest.len();
        self.exhausted = n < into.len();
        self.heard |= n > 0;
        self.ciphertext.consume(taken);
        Ok(n)
    }

    /// Decrypts what has come to the end of `inbox`, at most `wanted` bytes.
    pub(super) fn decrypt_to(&mut self, inbox: &mut Inbox, wanted: usize) -> Result<usize, TlsError> {
        let Some(Room { mut frame, start, len }) = inbox.lend(wanted) else { return Ok(0) };
        let went = self.decrypt(&mut frame.bytes_mut()[start..start + len]);
        inbox.give(frame, went.as_ref().copied().unwrap_or(0));
        went
    }

    /// Whether the server has said that it will send no more, and all before that has been read.
    pub(super) fn has_ended(&self) -> bool {
        self.exhausted && self.stream.has_ended()
    }

    /// Whether the server has said something over TLS.
    pub(super) fn has_heard(&self) -> bool {
        self.heard
    }

    /// The stream has ended.
    ///
    /// # Errors
    /// [`TlsError::Cut`] if the server had not said so by TLS. If it has said nothing at all over TLS, then
    /// [`TlsError::GaveUp`]: TLS 1.3 is done for a client before the server has judged its certificate.
    pub(super) fn end(&self) -> Result<(), TlsError> {
        match self.stream.end() {
            Err(TlsError::Cut) if !self.heard => Err(TlsError::GaveUp),
            went => went,
        }
    }

    /// Moves requests from `plain` to `sealed`, a bounded part of them, with what TLS itself has to say. After the
    /// `last` of them it says that nothing more will be sent.
    pub(super) fn seal(&mut self, plain: &mut Gather, sealed: &mut Gather, last: bool) {
        self.stream.seal(plain, sealed);
        if last && plain.is_empty() {
            self.said_end = true;
            self.stream.push_end();
            self.stream.seal(plain, sealed);
        }
    }

    /// Whether it has said that nothing more will be sent.
    pub(super) fn has_said_end(&self) -> bool {
        self.said_end
    }

    /// Whether TLS itself has something to say.
    pub(super) fn wants_send(&self) -> bool {
        self.stream.wants_send()
    }

    /// The stream is broken. Whether the server can be told first; then [`Secure::fault`] says why it is broken.
    pub(super) fn break_by(&mut self, error: TlsError) -> bool {
        self.fault.is_none() && {
            self.fault = Some(error);
            self.wants_send()
        }
    }

    /// What broke the stream, while the server is being told.
    pub(super) fn fault(&self) -> Option<TlsError> {
        self.fault
    }
}
