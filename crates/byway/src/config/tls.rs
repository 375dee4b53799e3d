//! The part of a node's configuration that is about TLS.

use std::path::PathBuf;

use serde::Deserialize;

use crate::admission::ClientAuthentication;

/// Files of TLS, PEM.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tls {
    /// The node's certificate chain.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authorities that sign clients' certificates.
    pub client_ca: Option<PathBuf>,
    /// Revocation lists of these authorities.
    pub crl: Option<PathBuf>,
    /// Whether clients show one; required if `client_ca` is given and this is not.
    pub clients: Option<ClientAuthentication>,
    /// Whether there are plain connections as well.
    #[serde(default)]
    pub mode: TlsMode,
}

/// Whether connections to a node that has a certificate are over TLS.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum TlsMode {
    /// TLS for connections to volumes with tls=required, and for clients that ask for it.
    Optional,
    /// TLS for every connection.
    #[default]
    Required,
}

impl Tls {
    /// What clients must show over TLS.
    pub fn authentication(&self) -> ClientAuthentication {
        match (self.clients, &self.client_ca) {
            (Some(said), _) => said,
            (None, Some(_)) => ClientAuthentication::Required,
            (None, None) => ClientAuthentication::Off,
        }
    }
}
