//! TLS of a node, as its operator names the files.

use byway_fabric::tls::{ClientCertificates, OpenFile, ServerFiles, ServerTls, TlsServer, TlsSetupError};
pub use byway_remote::tls::*;

use crate::admission::ClientAuthentication;
use crate::config::{Tls, TlsMode};

/// Reads a node's certificate, key and authority, if it has some. To be called before root is given up, or with an
/// `open` that still may.
///
/// # Errors
/// Names the file.
pub fn server_tls(tls: Option<&Tls>, open: OpenFile<'_>) -> Result<ServerTls, TlsSetupError> {
    let Some(tls) = tls else { return Ok(ServerTls::Off) };
    let clients = match tls.authentication() {
        ClientAuthentication::Off => ClientCertificates::Off,
        ClientAuthentication::Optional => ClientCertificates::Optional,
        ClientAuthentication::Required => ClientCertificates::Required,
    };
    let files = ServerFiles {
        certificate: &tls.certificate,
        key: &tls.key,
        client_authority: tls.client_ca.as_deref(),
        revoked: tls.crl.as_deref(),
    };
    let server = TlsServer::new_by(&files, clients, open)?;
    Ok(match tls.mode {
        TlsMode::Optional => ServerTls::Optional(server),
        TlsMode::Required => ServerTls::Required(server),
    })
}
