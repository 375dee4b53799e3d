//! The share that a command line names, for the commands that are its clients: `mount`, `run` and `copy`.

use byway_service::file::client::{ClientError, ClientOptions};

use crate::remote::{RemoteUri, RemoteUriError};
use crate::tls::{ClientTlsArguments, ClientTlsError};

/// Why a share cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ShareUriError {
    /// No share is named.
    #[error("{0} does not name a share; write byway://HOST/SHARE (byway ls byway://HOST lists them)")]
    NoShare(String),
    /// An address of NBD.
    #[error("{0}: NBD has no shares; write byway://HOST/SHARE")]
    Nbd(String),
    /// The address.
    #[error(transparent)]
    Uri(#[from] RemoteUriError),
    /// TLS.
    #[error(transparent)]
    Tls(#[from] ClientTlsError),
    /// The server.
    #[error("{uri}: {source}")]
    Client {
        /// Which share.
        uri: String,
        /// Why.
        source: ClientError,
    },
}

impl ShareUriError {
    /// The server of a share refuses, or does not answer.
    pub(crate) fn client(uri: &RemoteUri, source: ClientError) -> Self {
        Self::Client { uri: uri.to_string(), source }
    }
}

/// The name of the share in a URI.
///
/// # Errors
/// `Nbd`, `NoShare`.
pub(crate) fn share_of(uri: &RemoteUri) -> Result<&str, ShareUriError> {
    let RemoteUri::Native(_) = uri else { return Err(ShareUriError::Nbd(uri.to_string())) };
    uri.volume().filter(|name| !name.is_empty()).ok_or_else(|| ShareUriError::NoShare(uri.to_string()))
}

/// What a client of the share in a URI begins with. An empty name is the server's to refuse.
///
/// # Errors
/// The address, or TLS.
pub(crate) fn client_options(uri: &RemoteUri, tls: &ClientTlsArguments) -> Result<ClientOptions, ShareUriError> {
    let tls = uri.wants_tls().then(|| tls.client(uri.host())).transpose()?;
    Ok(ClientOptions { tls, ..ClientOptions::new(uri.resolve()?, uri.volume().unwrap_or_default()) })
}
