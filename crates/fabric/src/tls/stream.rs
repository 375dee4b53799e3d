//! One connection: bytes in, bytes out.

use std::io::{Read, Write};
use std::sync::{Arc, Mutex, PoisonError};

use byway_reactor::Gather;
use rustls::pki_types::CertificateDer;
use rustls::{CertificateError, Connection, Error};

use super::{TlsError, WrongName};
use crate::access::{Identity, Origin};
use crate::limits::TLS_QUEUE_BYTES;

/// The identity of a connection's other end, as proved by TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerIdentity {
    /// There is no TLS.
    Plain,
    /// It showed no certificate.
    Anonymous,
    /// The holder of the first of these certificates, which was checked; each is signed by the next.
    Certified(Vec<CertificateDer<'static>>),
}

impl PeerIdentity {
    /// What is known of a peer that `origin` tells the address of, by its certificate too.
    pub fn identity(&self, origin: Origin) -> Identity {
        let identity = Identity::new(origin);
        match self {
            Self::Certified(chain) => chain.first().map_or(identity.clone(), |own| identity.certified(own)),
            Self::Plain | Self::Anonymous => identity,
        }
    }
}

/// One end of a connection.
#[derive(Debug)]
pub struct TlsStream {
    connection: Connection,
    /// A record has come that was one.
    begun: bool,
    /// The peer has said that it will send no more.
    ended: bool,
    end_pushed: bool,
    /// Where a client's stream tells of a server's certificate for another name.
    wrong_name: Arc<Mutex<Option<WrongName>>>,
}

impl TlsStream {
    pub(super) fn new(mut connection: Connection, wrong_name: Arc<Mutex<Option<WrongName>>>) -> Self {
        connection.set_buffer_limit(Some(TLS_QUEUE_BYTES));
        Self { connection, begun: false, ended: false, end_pushed: false, wrong_name }
    }

    /// Whether the handshake is still going on. Plaintext may be pushed already; it goes out afterwards.
    pub fn is_handshaking(&self) -> bool {
        self.connection.is_handshaking()
    }

    /// The peer's identity, once the handshake is done.
    pub fn peer(&self) -> PeerIdentity {
        match self.connection.peer_certificates() {
            Some(chain) if !chain.is_empty() => {
                PeerIdentity::Certified(chain.iter().map(|certificate| certificate.clone().into_owned()).collect())
            }
            _ => PeerIdentity::Anonymous,
        }
    }

    /// Takes ciphertext off the front of `ciphertext` until `into` is full of plaintext or nothing is left to take; gives
    /// how many bytes of plaintext there are. More may come without ciphertext: 0 means that it is needed. Ciphertext to be
    /// sent may be waiting afterwards, even after an error.
    ///
    /// # Errors
    /// The stream is broken: send what is waiting, then close.
    pub fn decrypt(&mut self, ciphertext: &mut &[u8], into: &mut [u8]) -> Result<usize, TlsError> {
        let mut filled = 0;
        loop {
            // An error means that there is no plaintext now.
            filled += self.connection.reader().read(&mut into[filled..]).unwrap_or(0);
            if filled == into.len() || ciphertext.is_empty() || self.ended {
                return Ok(filled);
            }
            let taken = self.connection.read_tls(ciphertext).unwrap_or(0);
            let state = self.connection.process_new_packets().map_err(|error| self.explain(&error))?;
            self.begun |= self.connection.protocol_version().is_some();
            self.ended |= state.peer_has_closed();
            if taken == 0 && state.plaintext_bytes_to_read() == 0 && !self.ended {
                // It takes nothing and gives nothing: a record longer than TLS allows.
                return Err(TlsError::Broken);
            }
        }
    }

    fn explain(&self, error: &Error) -> TlsError {
        if let Error::InvalidCertificate(CertificateError::NotValidForNameContext { expected, presented }) = error {
            let presented = presented.iter().map(|name| bare(name)).collect();
            let names = WrongName { expected: expected.to_str().into_owned(), presented };
            *self.wrong_name.lock().unwrap_or_else(PoisonError::into_inner) = Some(names);
        }
        match error {
            Error::InvalidMessage(_) | Error::InappropriateMessage { .. } if !self.begun => TlsError::NotTls,
            error => TlsError::from(error),
        }
    }

    /// Takes all of `ciphertext` and appends the plaintext in it to `plaintext`; see [`TlsStream::decrypt`].
    ///
    /// # Errors
    /// The stream is broken: send what is waiting, then close.
    pub fn feed(&mut self, mut ciphertext: &[u8], plaintext: &mut Vec<u8>) -> Result<(), TlsError> {
        loop {
            let start = plaintext.len();
            // A record at a time: so much at least is there to be read when it was taken.
            plaintext.resize(start + PLAINTEXT_STEP_BYTES, 0);
            let n = self.decrypt(&mut ciphertext, &mut plaintext[start..]);
            plaintext.truncate(start + n.as_ref().copied().unwrap_or(0));
            if n? < PLAINTEXT_STEP_BYTES {
                return Ok(());
            }
        }
    }

    /// Whether the peer has said that it will send no more. What it sent before may not all have been read.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// The connection has ended.
    ///
    /// # Errors
    /// [`TlsError::GaveUp`] during the handshake, else [`TlsError::Cut`] if the peer had not said that it would.
    pub fn end(&self) -> Result<(), TlsError> {
        match (self.ended, self.is_handshaking()) {
            (true, _) => Ok(()),
            (false, true) => Err(TlsError::GaveUp),
            (false, false) => Err(TlsError::Cut),
        }
    }

    /// Takes plaintext to be sent; says how much of it: less when the queue is full, until ciphertext was taken.
    pub fn push(&mut self, plaintext: &[u8]) -> usize {
        self.connection.writer().write(plaintext).unwrap_or(0)
    }

    /// Says that nothing more will be sent; saying it again does nothing.
    pub fn push_end(&mut self) {
        if !std::mem::replace(&mut self.end_pushed, true) {
            self.connection.send_close_notify();
        }
    }

    /// Whether ciphertext is waiting to be sent.
    pub fn wants_send(&self) -> bool {
        self.connection.wants_write()
    }

    /// Appends the ciphertext that is waiting.
    pub fn take_ciphertext(&mut self, into: &mut Vec<u8>) {
        while self.connection.wants_write() {
            if self.connection.write_tls(into).is_err() {
                return;
            }
        }
    }

    /// Moves plaintext from `plain` to `sealed`, as ciphertext, with what TLS itself has to say before it: at most
    /// [`TLS_QUEUE_BYTES`] of it, so that what is encrypted and not sent is bounded. The rest stays; so does a range of a
    /// mapped file and what is behind it, since those are never read by us.
    pub fn seal(&mut self, plain: &mut Gather, sealed: &mut Gather) {
        plain.take_front(|bytes| self.push(bytes));
        sealed.push_head_with(|out| self.take_ciphertext(out));
    }
}

/// How much plaintext [`TlsStream::feed`] makes room for at a time: a record's.
const PLAINTEXT_STEP_BYTES: usize = 16 << 10;

/// A name without the kind that rustls writes around it: `server` of `DnsName("server")`.
fn bare(presented: &str) -> String {
    let inner = presented.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')'));
    inner.unwrap_or(presented).trim_matches('"').to_owned()
}
