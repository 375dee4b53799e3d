//! One certificate for all nodes of a group. The program that starts the nodes makes it and hands it to each, so no authority is needed.

use std::sync::{Arc, RwLock};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use super::{Setup, TlsClient, TlsServer, TlsSetupError};

/// The name that a group's certificate must be for: none of a host.
pub const GROUP_NAME: &str = "group.byway.invalid";

impl TlsServer {
    /// Both sides of a node among nodes that have one self-signed certificate for [`GROUP_NAME`] and its key: `pem` holds both. Each side accepts
    /// peers with this certificate alone.
    ///
    /// # Errors
    /// `Config`: `pem` does not hold a certificate and its key.
    pub fn of_group(pem: &[u8]) -> Result<(Self, TlsClient), TlsSetupError> {
        let certificate = CertificateDer::from_pem_slice(pem).map_err(TlsSetupError::config)?;
        let key = PrivateKeyDer::from_pem_slice(pem).map_err(TlsSetupError::config)?;
        let mut roots = RootCertStore::empty();
        roots.add(certificate.clone()).map_err(TlsSetupError::config)?;
        let roots = Arc::new(roots);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
        let verifier = verifier.build().map_err(TlsSetupError::config)?;
        let server = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
        let server = server.map_err(TlsSetupError::config)?.with_client_cert_verifier(verifier);
        let server = server.with_single_cert(vec![certificate.clone()], key.clone_key());
        let client = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let client = client.map_err(TlsSetupError::config)?.with_root_certificates(roots);
        let client = client.with_client_auth_cert(vec![certificate], key).map_err(TlsSetupError::config)?;
        let name = ServerName::try_from(GROUP_NAME).map_err(|_| TlsSetupError::Name(GROUP_NAME.to_owned()))?;
        let setup = Setup { config: Arc::new(server.map_err(TlsSetupError::config)?), verifier: None };
        let server = Self { setup: Arc::new(RwLock::new(Arc::new(setup))) };
        Ok((server, TlsClient { config: Arc::new(client), name, wrong_name: Arc::default() }))
    }
}
