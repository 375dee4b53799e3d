//! Lanes over TLS: the same messages, received as ciphertext and taken from the plaintext.
//!
//! Decryption needs a buffer, so a payload is copied once more here than on a plain lane. A stream that ends between two
//! messages is an end like any other, with or without close_notify: the end of a stream never completes a session.

use byway_reactor::limits::RECEIVE_MESSAGE_BYTES;
use byway_reactor::{Frame, Gather, Need, ReceiveBuffers};

#[cfg(doc)]
use super::inbound::HEADER_FRAME_BYTES;
use super::lane::{Lane, Phase};
use crate::session::{self, CloseReason};
use crate::tls::{PeerIdentity, TlsError, TlsServer, TlsStream};
use crate::wire::{HEADER_BYTES, Header};

/// What a busy lane receives ciphertext into: two of TLS's longest records. An idle one has [`HEADER_FRAME_BYTES`].
const CIPHERTEXT_FRAME_BYTES: usize = RECEIVE_MESSAGE_BYTES;

/// The TLS of a lane: none, begun, or offered to a peer whose first bytes tell.
#[derive(Debug, Default)]
pub(super) struct LaneTls {
    secure: Option<Box<Secure>>,
    offered: Option<TlsServer>,
}

impl LaneTls {
    /// Begins it.
    pub(super) fn begin(&mut self, stream: TlsStream) {
        self.secure = Some(Box::new(Secure { stream, plaintext: Vec::new(), target: None }));
    }

    /// The peer may begin it, or not.
    pub(super) fn offer(&mut self, server: TlsServer) {
        self.offered = Some(server);
    }

    /// Whether it has begun.
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.secure.is_some()
    }

    /// It, if it has begun.
    #[inline]
    pub(super) fn secure(&mut self) -> Option<&mut Secure> {
        self.secure.as_deref_mut()
    }

    /// The stream alone, for a lane that goes to another loop: nothing but its `Hello` has come.
    pub(super) fn into_stream(self) -> Option<TlsStream> {
        self.secure.map(|secure| secure.stream)
    }

    /// The peer's identity.
    pub(super) fn peer(&self) -> PeerIdentity {
        self.secure.as_ref().map_or(PeerIdentity::Plain, |secure| secure.stream.peer())
    }

    /// Whether a part of a message has come.
    pub(super) fn is_midway(&self) -> bool {
        self.secure.as_ref().is_some_and(|secure| !secure.plaintext.is_empty())
    }

    /// Takes the frame of the window that plaintext goes into.
    pub(super) fn take_target(&mut self) -> Option<Frame> {
        self.secure.as_mut()?.target.take().map(|(frame, _, _)| frame)
    }
}

/// TLS that has begun.
#[derive(Debug)]
pub(super) struct Secure {
    stream: TlsStream,
    /// Plaintext that is no whole message yet.
    plaintext: Vec<u8>,
    /// What a bulk lane fills: the window's frame, the next byte, the bytes left.
    target: Option<(Frame, usize, usize)>,
}

impl Secure {
    /// Encrypts a portion of what shall be sent; `last`: if nothing is left then, nothing more will come.
    pub(super) fn seal(&mut self, pending: &mut Gather, sealed: &mut Gather, last: bool) {
        self.stream.seal(pending, sealed);
        if last && pending.is_empty() && !self.stream.is_handshaking() {
            self.stream.push_end();
            self.stream.seal(pending, sealed);
        }
    }
}

/// What was decrypted of what has come.
pub(super) struct Decrypted {
    /// All plaintext that no message was made of yet.
    pub(super) plaintext: Vec<u8>,
    /// TLS has something to say.
    pub(super) wants_send: bool,
    /// The peer has said that it will send no more.
    pub(super) ended: bool,
}

/// What a bulk lane has taken of a payload.
pub(super) struct Filled {
    pub(super) bytes: usize,
    /// The payload that is complete with that.
    pub(super) payload: Option<(Header, Frame)>,
}

impl Lane {
    /// Decrypts the `n` bytes that have come into its frame, and has the frame be of the length that the next ones are to have.
    /// `None` if it has no TLS.
    ///
    /// # Errors
    /// Why the lane is to end.
    pub(super) fn decrypt(&mut self, buffers: &ReceiveBuffers, n: usize) -> Option<Result<Decrypted, CloseReason>> {
        let (Some(frame), Some(secure)) = (self.inbound.take_frame(), &mut self.tls.secure) else { return None };
        let foreign = Some(session::foreign(&frame.bytes()[..n]))
            .filter(|reason| *reason == CloseReason::SpeaksNbd && self.phase == Phase::AwaitWelcome);
        let fed = secure.stream.feed(&frame.bytes()[..n], &mut secure.plaintext);
        // All of it has been used up, so the next buffer may be shorter, too.
        let held = frame.len();
        let wanted = if n == held { CIPHERTEXT_FRAME_BYTES } else { held };
        let next_len = buffers.len_for(Need { held, wanted, ..Need::default() });
        let next = if next_len == held { None } else { buffers.alloc(next_len) };
        self.inbound.set_frame(next.or(Some(frame)));
        let decrypted = Decrypted {
            plaintext: std::mem::take(&mut secure.plaintext),
            wants_send: secure.stream.wants_send(),
            ended: secure.stream.has_ended(),
        };
        let failed = |error| foreign.filter(|_| error == TlsError::NotTls).unwrap_or(CloseReason::Tls(error));
        Some(fed.map(|()| decrypted).map_err(failed))
    }

    /// Keeps plaintext that is no whole message yet.
    pub(super) fn keep_plaintext(&mut self, plaintext: Vec<u8>) {
        if let Some(secure) = &mut self.tls.secure {
            secure.plaintext = plaintext;
        }
    }

    /// Begins TLS on a lane whose first bytes, which lie in its frame, are none of ours, if they may be TLS. False if not.
    ///
    /// # Errors
    /// Why the lane is to end.
    pub(super) fn begin_offered_tls(&mut self) -> Result<bool, CloseReason> {
        let (Some(server), Some(first)) = (self.tls.offered.take(), self.inbound.frame()) else { return Ok(false) };
        if first.bytes().first_chunk::<HEADER_BYTES>().is_some_and(|bytes| Header::open(bytes, 0).is_ok()) {
            return Ok(false);
        }
        self.tls.begin(server.accept().map_err(CloseReason::Tls)?);
        Ok(true)
    }

    /// Receives a payload from plaintext: into the window's frame, which the window has lent, or into nothing.
    pub(super) fn begin_filling(&mut self, header: Header, target: Option<(Frame, usize)>) {
        let len = header.payload_len();
        let Some((frame, start)) = target else { return self.inbound.begin_drain(len) };
        self.inbound.begin_payload(header);
        if let Some(secure) = &mut self.tls.secure {
            secure.target = Some((frame, start, len));
        }
    }

    /// Takes what is of the lane's payload from the front of plaintext. `None`: a header comes next.
    ///
    /// # Errors
    /// Why the lane is to end.
    pub(super) fn fill(&mut self, bytes: &[u8]) -> Result<Option<Filled>, CloseReason> {
        if let Some(left) = self.inbound.to_drain() {
            let taken = bytes.len().min(left);
            self.inbound.drained(taken);
            return Ok(Some(Filled { bytes: taken, payload: None }));
        }
        let Some(header) = self.inbound.payload() else { return Ok(None) };
        let target = self.tls.secure.as_mut().and_then(|secure| secure.target.as_mut());
        let (frame, start, left) = target.ok_or(CloseReason::Closed)?;
        let taken = bytes.len().min(*left);
        frame.write(*start, &bytes[..taken]);
        *start += taken;
        *left -= taken;
        if *left > 0 {
            return Ok(Some(Filled { bytes: taken, payload: None }));
        }
        let _ = self.inbound.end_payload();
        let payload = self.tls.take_target().map(|frame| (header, frame));
        Ok(Some(Filled { bytes: taken, payload }))
    }
}
