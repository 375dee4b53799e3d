//! Why a server cannot be used, in the same words over both wires.

use byway_fabric::CloseReason;
use byway_fabric::tls::{TlsClient, TlsError};
use byway_frontend::nbd::client::ClientError;
use byway_reactor::Errno;
use byway_service::block::client::ConnectError;

use crate::tls::{ClientTlsArguments, ClientTlsError};
use crate::volume::OPEN_LIMIT;
use crate::{RemoteUri, RemoteUriError, TransferError};

/// Why a volume cannot be used. Says what to do.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// Its name or its host.
    #[error(transparent)]
    Name(#[from] RemoteUriError),
    /// Certificates.
    #[error(transparent)]
    Tls(#[from] ClientTlsError),
    /// A volume must be named.
    #[error("{0} does not name a volume; add its name, see byway ls {0}")]
    NoVolume(String),
    /// A native server did not open it.
    #[error("{uri}: {source}")]
    Native {
        /// Which.
        uri: String,
        /// Why.
        source: ConnectError,
    },
    /// An NBD server did not open it.
    #[error("{uri}: {source}")]
    Nbd {
        /// Which.
        uri: String,
        /// Why.
        source: ClientError,
    },
    /// The server speaks the other wire.
    #[error("the server at {uri} speaks {speaks}; write {scheme}://")]
    OtherWire {
        /// As it was asked for.
        uri: String,
        /// The server's wire.
        speaks: &'static str,
        /// The scheme of that wire.
        scheme: String,
    },
    /// TLS failed.
    #[error("{uri}: TLS: {source}{advice}")]
    Secure {
        /// With which server.
        uri: String,
        /// How.
        source: TlsError,
        /// What to do.
        advice: String,
    },
    /// The server has reset the connection when TLS began.
    #[error(
        "{uri}: the server closed the connection when TLS began, so it does not offer TLS, or does not admit this address; \
         write {plain}:// if the network may be trusted"
    )]
    NoTls {
        /// As it was asked for.
        uri: String,
        /// The scheme without TLS.
        plain: String,
    },
    /// No volume of that name is there, or none that this client may use.
    #[error("{uri}: no volume has that name; {others}")]
    NoSuchVolume {
        /// Which.
        uri: String,
        /// What the server has instead.
        others: String,
    },
    /// No answer.
    #[error("{0}: no answer within {limit} s; check the address and that a server runs there", limit = OPEN_LIMIT.as_secs())]
    Silent(String),
    /// The loop.
    #[error("the event loop: {0}; try --io epoll, and see byway doctor")]
    Loop(std::io::Error),
    /// A request failed.
    #[error("{uri}: {source}")]
    Request {
        /// Of which volume.
        uri: String,
        /// How.
        source: TransferError,
    },
}

/// Why a native server cannot be used; says what to do about TLS.
pub fn native_failed(
    uri: &RemoteUri,
    tls: &ClientTlsArguments,
    secure: Option<&TlsClient>,
    source: ConnectError,
) -> RemoteError {
    let is_tls = uri.wants_tls();
    let uri = uri.to_string();
    match source {
        ConnectError::Session(CloseReason::Tls(source)) => {
            let advice = tls.advice(source, secure.and_then(TlsClient::wrong_name).as_ref());
            RemoteError::Secure { uri, source, advice }
        }
        ConnectError::Session(CloseReason::SpeaksNbd) => {
            let scheme = other_scheme(&uri, "byway", "nbd");
            RemoteError::OtherWire { uri, speaks: "NBD", scheme }
        }
        ConnectError::Session(CloseReason::Io(Errno::CONNRESET)) if is_tls => {
            let plain = other_scheme(&uri, "byways", "byway");
            RemoteError::NoTls { uri, plain }
        }
        source => RemoteError::Native { uri, source },
    }
}

/// Why an NBD server cannot be used; says what to do about TLS.
pub fn nbd_failed(
    uri: &RemoteUri,
    tls: &ClientTlsArguments,
    secure: Option<&TlsClient>,
    source: ClientError,
) -> RemoteError {
    let uri = uri.to_string();
    match source {
        ClientError::Tls(source) => {
            let advice = tls.advice(source, secure.and_then(TlsClient::wrong_name).as_ref());
            RemoteError::Secure { uri, source, advice }
        }
        ClientError::SpeaksByway => {
            let scheme = other_scheme(&uri, "nbd", "byway");
            RemoteError::OtherWire { uri, speaks: "byway's own protocol", scheme }
        }
        source => RemoteError::Nbd { uri, source },
    }
}

/// The scheme of `uri` for the other wire over the same kind of stream, with or without TLS as here.
fn other_scheme(uri: &str, this: &str, other: &str) -> String {
    let scheme = uri.split_once("://").map_or(uri, |(scheme, _)| scheme);
    scheme.replacen(this, other, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_resets_tls_is_said_to_offer_none() {
        let said = |uri: &str| {
            let reset = ConnectError::Session(CloseReason::Io(Errno::CONNRESET));
            native_failed(&uri.parse().unwrap(), &ClientTlsArguments::default(), None, reset).to_string()
        };
        for (uri, plain) in
            [("byways://h/d", "write byway:// if"), ("byways+unix:///d?socket=/run/x", "write byway+unix:// if")]
        {
            assert!(said(uri).contains("does not offer TLS") && said(uri).contains(plain), "{}", said(uri));
        }
        assert!(said("byway://h/d").contains("check the address"));
    }
}
