//! TLS of one connection: received ciphertext, and the stream that makes plaintext of it.
//!
//! Payloads are decrypted straight into their destination, so besides the ciphertext of one receive (4 KiB on an idle
//! connection, 256 KiB on a busy one) only one record is held, which TLS itself must keep.

use byway_fabric::tls::{PeerIdentity, TlsError, TlsServer, TlsStream};
use byway_reactor::{Frame, Gather, ReceiveBuffers};

use super::input::Input;

#[derive(Debug)]
pub(super) struct Secure {
    stream: TlsStream,
    ciphertext: Input,
    /// All plaintext of what has come has been read.
    exhausted: bool,
    /// The client's end of the stream is closed: nothing can be sent that it would read.
    hung_up: bool,
    said_end: bool,
}

impl Secure {
    pub(super) fn accept(server: &TlsServer) -> Result<Self, TlsError> {
        Ok(Self {
            stream: server.accept()?,
            ciphertext: Input::default(),
            exhausted: true,
            hung_up: false,
            said_end: false,
        })
    }

    /// Whether nothing but TLS's own handshake has gone over it.
    pub(super) fn is_handshaking(&self) -> bool {
        self.stream.is_handshaking()
    }

    /// What the client has shown, once the handshake is done.
    pub(super) fn peer(&self) -> PeerIdentity {
        self.stream.peer()
    }

    /// Takes the frame for a receive of ciphertext into `frame[start..]`; `None` when the pool has none.
    pub(super) fn lend(&mut self, buffers: &ReceiveBuffers) -> Option<(Frame, usize)> {
        self.ciphertext.lend(buffers)
    }

    /// Takes the frame back after a receive that brought `n` bytes.
    pub(super) fn give(&mut self, frame: Frame, n: usize) {
        // A frame that was filled would have held more; one that was hardly used need not be so large.
        let len = frame.len();
        self.ciphertext.give(frame, n);
        let held = self.ciphertext.bytes().len();
        if held == len {
            self.ciphertext.grow(len + 1);
        } else if held * 8 < len {
            self.ciphertext.want_little();
        }
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
        self.ciphertext.consume(taken);
        Ok(n)
    }

    /// Decrypts what has come to the end of `input`. `None` without a frame for it.
    pub(super) fn decrypt_to(
        &mut self,
        input: &mut Input,
        buffers: &ReceiveBuffers,
    ) -> Option<Result<usize, TlsError>> {
        if self.exhausted {
            return Some(Ok(0));
        }
        let (mut frame, at) = input.lend(buffers)?;
        let went = self.decrypt(&mut frame.bytes_mut()[at..]);
        input.give(frame, went.as_ref().copied().unwrap_or(0));
        Some(went)
    }

    /// Whether the client has said that it will send no more, and all before that has been read.
    pub(super) fn has_ended(&self) -> bool {
        self.exhausted && self.stream.has_ended()
    }

    /// The client's end of the stream is closed.
    ///
    /// # Errors
    /// [`TlsError::Cut`] if it had not said so by TLS: then bytes may have been kept back on the way.
    pub(super) fn hang_up(&mut self) -> Result<(), TlsError> {
        self.hung_up = true;
        self.stream.end()
    }

    /// Moves replies from `plain` to `sealed`, a bounded part of them, with what TLS itself has to say.
    pub(super) fn seal(&mut self, plain: &mut Gather, sealed: &mut Gather) {
        self.stream.seal(plain, sealed);
    }

    /// Says that nothing more will be sent, if the client can still hear it.
    pub(super) fn say_end(&mut self) {
        if !self.hung_up {
            self.said_end = true;
            self.stream.push_end();
        }
    }

    /// Whether that was said.
    pub(super) fn has_said_end(&self) -> bool {
        self.said_end
    }

    /// Whether TLS itself has something to say.
    pub(super) fn wants_send(&self) -> bool {
        !self.hung_up && self.stream.wants_send()
    }
}
