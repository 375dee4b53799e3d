//! Errors between this client and a server, and whose fault they are.

use byway_fabric::tls::TlsError;
use byway_reactor::Errno as OsError;

use crate::limits::{CLIENT_HANDSHAKE_SECONDS_MAX, CLIENT_SILENCE_SECONDS_MAX};
use crate::nbd::client::{ClientHandshakeError, ReplyError};
use crate::nbd::errno::Errno;
use crate::nbd::request::Violation;

/// Why a client has no connection, or none any more. Everything that it was asked for has failed with it: NBD does not
/// say what became of a request without a reply.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// No listener there, or none that accepts this client.
    #[error("cannot connect: {0}; check the address and that a server runs there")]
    Connect(OsError),
    /// No session within the time.
    #[error("the server did not finish the handshake within {CLIENT_HANDSHAKE_SECONDS_MAX} s; check the address")]
    SlowHandshake,
    /// The server waits for a client of byway's own protocol to speak first.
    #[error("the server speaks byway's own protocol; write byway:// instead of nbd://")]
    SpeaksByway,
    /// The server closed the connection in the handshake.
    #[error("the server closed the connection during the handshake; its log may say why")]
    ClosedInHandshake,
    /// The handshake failed.
    #[error(transparent)]
    Handshake(#[from] ClientHandshakeError),
    /// TLS: the server's certificate, the client's, or an attacker in between.
    #[error("TLS: {0}{advice}", advice = advice(*.0))]
    Tls(#[from] TlsError),
    /// Something came behind the server's word that TLS may begin, or the word before it was asked for. Nothing of it
    /// was used: it was not encrypted, so anybody on the way can have put it there.
    #[error(
        "unencrypted bytes arrived where TLS must begin, from the server or injected on the path; they were discarded"
    )]
    EarlyBytes,
    /// The server went away.
    #[error("the server closed the connection; check that it runs, then start again")]
    ServerGone,
    /// The stream broke.
    #[error("the connection failed: {0}; check that the server runs, then start again")]
    Stream(OsError),
    /// Requests are in flight and nothing comes.
    #[error(
        "no reply from the server for {CLIENT_SILENCE_SECONDS_MAX} s while requests are in flight; check whether it hangs"
    )]
    Silent,
    /// The server does not keep to the protocol.
    #[error("{0}; report this to the server's authors")]
    Misbehaved(#[from] ReplyError),
    /// Two connections to one export were told different things of it.
    #[error("the server describes the export differently on each connection; use one connection")]
    Differs,
    /// The loop's pool is too small for one more connection.
    #[error("no memory for the connection; use fewer connections")]
    NoFrames,
    /// The owner closed it.
    #[error("the connection is closed")]
    Closed,
}

impl ClientError {
    /// Whether the stream is broken, or may be another's: nothing more can be said on it.
    pub(super) fn is_of_the_stream(&self) -> bool {
        matches!(
            self,
            Self::Connect(_)
                | Self::ClosedInHandshake
                | Self::Tls(_)
                | Self::EarlyBytes
                | Self::ServerGone
                | Self::Stream(_)
        )
    }
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The server said so.
    #[error("the server answered: {errno}{}", words(.message))]
    Refused {
        /// What.
        errno: Errno,
        /// In its words; often empty.
        message: String,
    },
    /// The export would refuse it: not sent.
    #[error("the export does not accept the request: {0}")]
    Violation(#[from] Violation),
    /// No connection any more.
    #[error(transparent)]
    Lost(#[from] ClientError),
}

/// What to do about it.
fn advice(error: TlsError) -> &'static str {
    match error {
        TlsError::GaveUp | TlsError::Refused(_) => "; see whether the server wants a certificate, and its log",
        TlsError::UnknownAuthority => "; give the certificate of the authority that signed the server's",
        TlsError::WrongName => "; use that name, or say which name it has",
        TlsError::Cut => "; see whether the server still runs, then start again",
        _ => "",
    }
}

fn words(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(" ({message})") }
}
