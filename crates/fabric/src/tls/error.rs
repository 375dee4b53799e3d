//! Errors of TLS: of the operator's files, the peer, or an attacker in between.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use rustls::{AlertDescription, CertificateError, Error};

/// Why TLS cannot be set up: the operator's files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsSetupError {
    /// A file cannot be read, or holds nothing of its kind.
    #[error("{path}: {reason}; give a PEM file that this user may read", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// Certificate and key are not a pair, or not of a kind that is supported.
    #[error("{certificate} with {key}: {reason}; {advice}", certificate = certificate.display(), key = key.display())]
    Pair {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// Why.
        reason: String,
        /// What to do.
        advice: &'static str,
    },
    /// Client certificates are wanted, and there is nothing to check them against.
    #[error("client certificates need the certificate of the authority that signs them (--tls-client-ca)")]
    NoAuthority,
    /// The parts do not make a configuration.
    #[error("TLS cannot be set up: {0}")]
    Config(String),
    /// The name that the server's certificate must have is none.
    #[error("{0} is not a host name or IP address")]
    Name(String),
}

impl TlsSetupError {
    pub(super) fn file(path: &Path, reason: &dyn Display) -> Self {
        Self::File { path: path.to_owned(), reason: reason.to_string() }
    }

    pub(super) fn pair(certificate: &Path, key: &Path, error: &Error) -> Self {
        let reason = error.to_string();
        let advice = match error {
            // rustls tells this only by the text of the library below it.
            _ if reason.contains("UnsupportedCertVersion") => {
                "the certificate is not of X.509 version 3: sign it with an extension (`openssl x509 -req -extfile`)"
            }
            Error::InvalidCertificate(_) => "give a certificate in PEM that is whole, the node's own first",
            _ => "give the key that belongs to the first certificate of the file",
        };
        Self::Pair { certificate: certificate.to_owned(), key: key.to_owned(), reason, advice }
    }

    // By value so that it can stand in `map_err`.
    pub(super) fn config(error: impl Display) -> Self {
        Self::Config(error.to_string())
    }
}

/// Why a TLS stream broke: the peer, or an attacker in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A certificate is required, and the peer showed none.
    #[error("the peer showed no certificate, and one is required")]
    NoCertificate,
    /// The peer's certificate is of an authority that is not known here.
    #[error("the peer's certificate is not signed by the authority that was configured")]
    UnknownAuthority,
    /// The peer's certificate is no longer valid.
    #[error("the peer's certificate has expired")]
    Expired,
    /// The peer's certificate is not valid yet; or a clock is wrong.
    #[error("the peer's certificate is not valid yet; check the clocks")]
    NotYetValid,
    /// The server's certificate is for another name.
    #[error("the server's certificate is for another name than the one in the address")]
    WrongName,
    /// A revocation list names the peer's certificate.
    #[error("the peer's certificate is revoked")]
    Revoked,
    /// There are revocation lists, and none of the authority that has signed the peer's certificate.
    #[error("no revocation list is from the authority that signed the peer's certificate; add its list to --tls-crl")]
    UnknownRevocation,
    /// The peer's certificate cannot be accepted.
    #[error("the peer's certificate is meant for another purpose, or damaged")]
    BadCertificate,
    /// The peer has said that it will not go on.
    #[error("the peer refused: {0:?}")]
    Refused(AlertDescription),
    /// What came first is no TLS.
    #[error("the peer does not speak TLS, which is required here")]
    NotTls,
    /// No version or cipher that both sides accept.
    #[error("no version or cipher of TLS that both sides accept")]
    Incompatible,
    /// A record cannot be decrypted, or is none, or comes when it must not.
    #[error("a record is broken; something on the way changes bytes, or the peer does not keep to TLS")]
    Broken,
    /// The stream ended before the handshake did.
    #[error("the peer went away during the handshake; it may not accept the certificate that it was shown")]
    GaveUp,
    /// The stream ended without TLS's own end: bytes may be missing.
    #[error("the connection was cut: it ended without TLS's close_notify")]
    Cut,
    /// This side cannot go on: no random numbers, no clock.
    #[error("TLS cannot work on this machine: no random numbers, or no clock")]
    Machine,
}

impl From<&Error> for TlsError {
    fn from(error: &Error) -> Self {
        match error {
            Error::NoCertificatesPresented => Self::NoCertificate,
            Error::InvalidCertificate(certificate) => match certificate {
                CertificateError::UnknownIssuer | CertificateError::BadSignature => Self::UnknownAuthority,
                CertificateError::Expired | CertificateError::ExpiredContext { .. } => Self::Expired,
                CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => Self::NotYetValid,
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => Self::WrongName,
                CertificateError::Revoked => Self::Revoked,
                CertificateError::UnknownRevocationStatus => Self::UnknownRevocation,
                _ => Self::BadCertificate,
            },
            Error::AlertReceived(alert) => Self::Refused(*alert),
            Error::PeerIncompatible(_) => Self::Incompatible,
            Error::FailedToGetCurrentTime | Error::FailedToGetRandomBytes => Self::Machine,
            _ => Self::Broken,
        }
    }
}
