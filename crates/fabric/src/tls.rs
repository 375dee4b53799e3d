//! TLS for streams, without I/O: ciphertext in, plaintext out, and the other way. The fabric's lanes and the NBD door use
//! the same.
//!
//! rustls with ring; TLS 1.2 and 1.3. A server can require client certificates, ask for them, or do without. What a
//! [`TlsStream`] holds back is bounded: it takes no more ciphertext than it can decrypt at once, and no more plaintext
//! than [`TLS_QUEUE_BYTES`] before the ciphertext is taken.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};

use crate::limits::TLS_QUEUE_BYTES;

/// Whether clients must show who they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientCertificates {
    /// They are not asked.
    Off,
    /// They are asked, and let in without; a wrong one is refused.
    Optional,
    /// No certificate, no session.
    Required,
}

/// Why TLS cannot be set up: the operator's files.
#[derive(Debug, thiserror::Error)]
pub enum TlsSetupError {
    /// A file cannot be read, or holds nothing of its kind.
    #[error("{path}: {reason}; give a PEM file", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// Client certificates are wanted, and there is nothing to check them against.
    #[error("client certificates need the certificate of the authority that signs them (--tls-client-ca)")]
    NoAuthority,
    /// Certificate, key and authority do not make a configuration.
    #[error("the certificate and its key cannot be used: {0}")]
    Config(String),
    /// The name that the server's certificate must have is none.
    #[error("{0} is no host name or IP address")]
    Name(String),
}

/// Why a TLS stream broke: the peer, or somebody between.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TlsError {
    /// The handshake or a record is bad. Ciphertext that says so to the peer may be waiting.
    #[error("TLS: {0}")]
    Broken(rustls::Error),
    /// The stream ended without TLS's own end: bytes may be missing.
    #[error("TLS: the connection was cut")]
    Cut,
}

/// A server's side of TLS; shared by all its connections.
#[derive(Clone, Debug)]
pub struct TlsServer {
    config: Arc<ServerConfig>,
}

/// A client's side of TLS.
#[derive(Clone, Debug)]
pub struct TlsClient {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

fn bad_file(path: &Path, reason: &dyn std::fmt::Display) -> TlsSetupError {
    TlsSetupError::File { path: path.to_owned(), reason: reason.to_string() }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsSetupError> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(found) if found.is_empty() => Err(bad_file(path, &"it holds no certificate")),
        Ok(found) => Ok(found),
        Err(error) => Err(bad_file(path, &error)),
    }
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsSetupError> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| bad_file(path, &error))
}

fn authorities(path: &Path) -> Result<RootCertStore, TlsSetupError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| bad_file(path, &error))?;
    }
    Ok(roots)
}

fn bad_config(error: impl std::fmt::Display) -> TlsSetupError {
    TlsSetupError::Config(error.to_string())
}

impl TlsServer {
    /// Reads the server's certificate chain and key, and the authority that signs its clients' certificates.
    ///
    /// # Errors
    /// See [`TlsSetupError`].
    pub fn new(
        certificate: &Path,
        private_key: &Path,
        clients: ClientCertificates,
        client_authority: Option<&Path>,
    ) -> Result<Self, TlsSetupError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_safe_default_protocol_versions().map_err(bad_config)?;
        let builder = if clients == ClientCertificates::Off {
            builder.with_no_client_auth()
        } else {
            let roots = Arc::new(authorities(client_authority.ok_or(TlsSetupError::NoAuthority)?)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider);
            let verifier =
                if clients == ClientCertificates::Optional { verifier.allow_unauthenticated() } else { verifier };
            builder.with_client_cert_verifier(verifier.build().map_err(bad_config)?)
        };
        let config = builder.with_single_cert(certificates(certificate)?, key(private_key)?).map_err(bad_config)?;
        Ok(Self { config: Arc::new(config) })
    }

    /// The server's end of a new connection.
    ///
    /// # Errors
    /// When the configuration cannot be used after all.
    pub fn accept(&self) -> Result<TlsStream, TlsError> {
        let connection = ServerConnection::new(Arc::clone(&self.config)).map_err(TlsError::Broken)?;
        Ok(TlsStream::new(connection.into()))
    }
}

impl TlsClient {
    /// Reads the authority that signed the server's certificate, and the client's own certificate and key, if it has one.
    /// `name` is the host name or IP address that the server's certificate must be for.
    ///
    /// # Errors
    /// See [`TlsSetupError`].
    pub fn new(authority: &Path, own: Option<(&Path, &Path)>, name: &str) -> Result<Self, TlsSetupError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider);
        let builder = builder.with_safe_default_protocol_versions().map_err(bad_config)?;
        let builder = builder.with_root_certificates(authorities(authority)?);
        let config = match own {
            Some((certificate, private_key)) => {
                builder.with_client_auth_cert(certificates(certificate)?, key(private_key)?).map_err(bad_config)?
            }
            None => builder.with_no_client_auth(),
        };
        let name = ServerName::try_from(name.to_owned()).map_err(|_| TlsSetupError::Name(name.to_owned()))?;
        Ok(Self { config: Arc::new(config), name })
    }

    /// The client's end of a new connection.
    ///
    /// # Errors
    /// When the configuration cannot be used after all.
    pub fn connect(&self) -> Result<TlsStream, TlsError> {
        let connection =
            ClientConnection::new(Arc::clone(&self.config), self.name.clone()).map_err(TlsError::Broken)?;
        Ok(TlsStream::new(connection.into()))
    }
}

/// One end of a connection: bytes in, bytes out.
#[derive(Debug)]
pub struct TlsStream {
    connection: Connection,
    ended: bool,
}

impl TlsStream {
    fn new(mut connection: Connection) -> Self {
        connection.set_buffer_limit(Some(TLS_QUEUE_BYTES));
        Self { connection, ended: false }
    }

    /// Whether the handshake is still going on. Plaintext may be pushed already; it goes out afterwards.
    pub fn is_handshaking(&self) -> bool {
        self.connection.is_handshaking()
    }

    /// Whether the peer has shown a certificate, which then was checked.
    pub fn peer_is_certified(&self) -> bool {
        self.connection.peer_certificates().is_some()
    }

    /// Takes ciphertext and appends the plaintext in it to `plaintext`. Ciphertext to be sent may be waiting afterwards, even
    /// after an error.
    ///
    /// # Errors
    /// The stream is broken: send what is waiting, then close.
    pub fn feed(&mut self, mut ciphertext: &[u8], plaintext: &mut Vec<u8>) -> Result<(), TlsError> {
        while !ciphertext.is_empty() {
            let taken = self.connection.read_tls(&mut ciphertext).unwrap_or(0);
            let state = self.connection.process_new_packets().map_err(TlsError::Broken)?;
            let waiting = state.plaintext_bytes_to_read();
            if waiting > 0 {
                let start = plaintext.len();
                plaintext.resize(start + waiting, 0);
                let mut reader = self.connection.reader();
                let read = reader.read(&mut plaintext[start..]).unwrap_or(0);
                plaintext.truncate(start + read);
            }
            if state.peer_has_closed() {
                self.ended = true;
                return Ok(());
            }
            if taken == 0 && waiting == 0 {
                // It takes nothing and gives nothing: a record longer than TLS allows.
                return Err(TlsError::Broken(rustls::Error::General("a record that is too long".into())));
            }
        }
        Ok(())
    }

    /// The connection has ended.
    ///
    /// # Errors
    /// [`TlsError::Cut`] if the peer had not said that it would.
    pub fn end(&self) -> Result<(), TlsError> {
        if self.ended { Ok(()) } else { Err(TlsError::Cut) }
    }

    /// Takes plaintext to be sent; says how much of it: less when the queue is full, until ciphertext was taken.
    pub fn push(&mut self, plaintext: &[u8]) -> usize {
        self.connection.writer().write(plaintext).unwrap_or(0)
    }

    /// Says that nothing more will be sent.
    pub fn push_end(&mut self) {
        self.connection.send_close_notify();
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
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Files {
        folder: tempfile::TempDir,
    }

    impl Files {
        /// An authority, and certificates that it signed for `server` and `client`; another authority's `stranger`.
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let authority = |name: &str| {
                let mut params = rcgen::CertificateParams::new(vec![]).unwrap();
                params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
                params.distinguished_name.push(rcgen::DnType::CommonName, name);
                let key = rcgen::KeyPair::generate().unwrap();
                let certificate = params.self_signed(&key).unwrap();
                (rcgen::Issuer::new(params, key), certificate)
            };
            let this = Self { folder };
            let (issuer, certificate) = authority("ours");
            let (other, _) = authority("another");
            std::fs::write(this.path("ca.pem"), certificate.pem()).unwrap();
            for (name, issuer) in [("server", &issuer), ("client", &issuer), ("stranger", &other)] {
                let key = rcgen::KeyPair::generate().unwrap();
                let params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
                let certificate = params.signed_by(&key, issuer).unwrap();
                std::fs::write(this.path(&format!("{name}.pem")), certificate.pem()).unwrap();
                std::fs::write(this.path(&format!("{name}.key")), key.serialize_pem()).unwrap();
            }
            this
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn server(&self, clients: ClientCertificates) -> TlsStream {
            let authority = self.path("ca.pem");
            let server =
                TlsServer::new(&self.path("server.pem"), &self.path("server.key"), clients, Some(&authority)).unwrap();
            server.accept().unwrap()
        }

        fn client(&self, own: Option<&str>, name: &str) -> TlsStream {
            let own = own.map(|own| (self.path(&format!("{own}.pem")), self.path(&format!("{own}.key"))));
            let own = own.as_ref().map(|(certificate, key)| (certificate.as_path(), key.as_path()));
            TlsClient::new(&self.path("ca.pem"), own, name).unwrap().connect().unwrap()
        }
    }

    /// Carries ciphertext between two ends, `step` bytes at a time, until nothing is waiting.
    fn carry(a: &mut TlsStream, b: &mut TlsStream, step: usize) -> Result<(Vec<u8>, Vec<u8>), TlsError> {
        let (mut at_a, mut at_b) = (Vec::new(), Vec::new());
        while a.wants_send() || b.wants_send() {
            let (mut from_a, mut from_b) = (Vec::new(), Vec::new());
            a.take_ciphertext(&mut from_a);
            b.take_ciphertext(&mut from_b);
            from_a.chunks(step).try_for_each(|piece| b.feed(piece, &mut at_b))?;
            from_b.chunks(step).try_for_each(|piece| a.feed(piece, &mut at_a))?;
        }
        Ok((at_a, at_b))
    }

    #[test]
    fn bytes_go_through_in_any_pieces() {
        let files = Files::new();
        for step in [1, 7, 1000, 100_000] {
            let mut client = files.client(Some("client"), "server");
            let mut server = files.server(ClientCertificates::Required);
            carry(&mut client, &mut server, step).unwrap();
            assert!(!client.is_handshaking() && !server.is_handshaking());
            assert!(server.peer_is_certified());
            let data: Vec<u8> = (0..200_000u32).map(|i| ((i * 7) >> 3) as u8).collect();
            let mut sent = 0;
            let mut came = Vec::new();
            while sent < data.len() {
                sent += client.push(&data[sent..]);
                came.extend(carry(&mut client, &mut server, step).unwrap().1);
            }
            assert!(came == data);
            assert_eq!(server.end(), Err(TlsError::Cut));
            client.push_end();
            carry(&mut client, &mut server, step).unwrap();
            assert_eq!(server.end(), Ok(()));
        }
    }

    #[test]
    fn certificates_are_required_optional_or_off() {
        use ClientCertificates::{Off, Optional, Required};
        let files = Files::new();
        for (clients, own, certified) in [
            (Off, None, Some(false)),
            (Optional, None, Some(false)),
            (Optional, Some("client"), Some(true)),
            (Optional, Some("stranger"), None),
            (Required, Some("client"), Some(true)),
            (Required, Some("stranger"), None),
            (Required, None, None),
        ] {
            let (mut client, mut server) = (files.client(own, "server"), files.server(clients));
            let carried = carry(&mut client, &mut server, 4096);
            assert_eq!(carried.is_ok().then(|| server.peer_is_certified()), certified, "{clients:?} {own:?}");
        }
    }

    #[test]
    fn a_server_of_another_name_or_no_tls_at_all_is_refused() {
        let files = Files::new();
        let (mut client, mut server) = (files.client(None, "elsewhere"), files.server(ClientCertificates::Off));
        assert!(matches!(carry(&mut client, &mut server, 4096), Err(TlsError::Broken(_))));
        let mut server = files.server(ClientCertificates::Off);
        assert!(matches!(server.feed(b"bywayFAB is not TLS", &mut Vec::new()), Err(TlsError::Broken(_))));
    }

    #[test]
    fn what_is_queued_is_bounded_and_setup_errors_name_the_file() {
        let files = Files::new();
        let mut client = files.client(None, "server");
        let pushed = client.push(&vec![0; 4 * TLS_QUEUE_BYTES]);
        assert!(pushed <= TLS_QUEUE_BYTES);
        let missing = TlsServer::new(&files.path("no.pem"), &files.path("server.key"), ClientCertificates::Off, None);
        assert!(matches!(missing, Err(TlsSetupError::File { .. })));
        let (certificate, key) = (files.path("server.pem"), files.path("server.key"));
        let open = TlsServer::new(&certificate, &key, ClientCertificates::Required, None);
        assert!(matches!(open, Err(TlsSetupError::NoAuthority)));
    }
}
