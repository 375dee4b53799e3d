//! TLS for streams, without I/O: ciphertext in, plaintext out, and the reverse. The fabric's lanes and the NBD front end
//! both use it.
//!
//! rustls with ring; TLS 1.2 and 1.3. A server can require client certificates, request them, or do without. A
//! [`TlsStream`]'s buffers are bounded: it takes no more ciphertext than it can decrypt at once, and no more plaintext than
//! [`TLS_QUEUE_BYTES`](crate::limits::TLS_QUEUE_BYTES) before the ciphertext is taken.
//!
//! A [`TlsServer`] is a handle: all its clones see a certificate that is [replaced](TlsServer::replace), for the connections
//! that they accept from then on. [`TlsServer::has_revoked`] finds earlier connections that must end.

mod error;
mod group;
mod stream;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{CertificateError, ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection};

pub use self::error::{TlsError, TlsSetupError};
pub use self::group::GROUP_NAME;
pub use self::stream::{PeerIdentity, TlsStream};
use crate::limits::PEM_BYTES_MAX;
pub use rustls::AlertDescription;

/// Whether clients must present certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientCertificates {
    /// They are not asked.
    Off,
    /// They are asked, and let in without; a wrong one is refused.
    Optional,
    /// No certificate, no session.
    Required,
}

/// Opens a file of the operator's: this process, or another that still may.
pub type OpenFile<'a> = &'a dyn Fn(&Path) -> std::io::Result<File>;

/// The PEM files of a server.
#[derive(Clone, Copy, Debug)]
pub struct ServerFiles<'a> {
    /// Its certificate chain.
    pub certificate: &'a Path,
    /// The private key of the first certificate.
    pub key: &'a Path,
    /// The authorities that sign clients' certificates.
    pub client_authority: Option<&'a Path>,
    /// Revocation lists: one at least of each authority that has signed a client's certificate or one between.
    pub revoked: Option<&'a Path>,
}

/// A server's side of TLS; shared by all its connections.
#[derive(Clone, Debug)]
pub struct TlsServer {
    setup: Arc<RwLock<Arc<Setup>>>,
}

#[derive(Debug)]
struct Setup {
    config: Arc<ServerConfig>,
    /// Checks clients' certificates, if there are revocation lists.
    verifier: Option<Arc<dyn ClientCertVerifier>>,
}

/// A listener's TLS mode.
#[derive(Clone, Debug, Default)]
pub enum ServerTls {
    /// It has none.
    #[default]
    Off,
    /// Clients may use it.
    Optional(TlsServer),
    /// Nothing is served without.
    Required(TlsServer),
}

/// A client's side of TLS. Clones share what [`TlsClient::wrong_name`] tells.
#[derive(Clone, Debug)]
pub struct TlsClient {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
    wrong_name: Arc<Mutex<Option<WrongName>>>,
}

/// What a server's certificate is for, where it was reached by another name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongName {
    /// The name that the client wanted.
    pub expected: String,
    /// The names of the certificate; none in a certificate without subject alternative names.
    pub presented: Vec<String>,
}

/// Reads a PEM file's bytes.
fn read(path: &Path, open: OpenFile<'_>) -> Result<Vec<u8>, TlsSetupError> {
    let mut bytes = Vec::new();
    let went = open(path).and_then(|file| file.take(PEM_BYTES_MAX + 1).read_to_end(&mut bytes));
    match went {
        Err(error) => Err(TlsSetupError::file(path, &error)),
        Ok(n) if n as u64 > PEM_BYTES_MAX => Err(TlsSetupError::file(path, &"it is far too long for a PEM file")),
        Ok(_) => Ok(bytes),
    }
}

fn certificates(path: &Path, open: OpenFile<'_>) -> Result<Vec<CertificateDer<'static>>, TlsSetupError> {
    let bytes = read(path, open)?;
    match CertificateDer::pem_slice_iter(&bytes).collect::<Result<Vec<_>, _>>() {
        Ok(found) if found.is_empty() => Err(TlsSetupError::file(path, &"it holds no certificate")),
        Ok(found) => Ok(found),
        Err(error) => Err(TlsSetupError::file(path, &error)),
    }
}

fn key(path: &Path, open: OpenFile<'_>) -> Result<PrivateKeyDer<'static>, TlsSetupError> {
    let bytes = read(path, open)?;
    PrivateKeyDer::from_pem_slice(&bytes).map_err(|error| match error {
        pem::Error::NoItemsFound => TlsSetupError::file(path, &"it holds no private key without a password"),
        error => TlsSetupError::file(path, &error),
    })
}

fn authorities(path: &Path, open: OpenFile<'_>) -> Result<RootCertStore, TlsSetupError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path, open)? {
        roots.add(certificate).map_err(|error| TlsSetupError::file(path, &error))?;
    }
    Ok(roots)
}

fn revoked(path: &Path, open: OpenFile<'_>) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsSetupError> {
    let bytes = read(path, open)?;
    match CertificateRevocationListDer::pem_slice_iter(&bytes).collect::<Result<Vec<_>, _>>() {
        Ok(found) if found.is_empty() => Err(TlsSetupError::file(path, &"it holds no revocation list (X509 CRL)")),
        Ok(found) => Ok(found),
        Err(error) => Err(TlsSetupError::file(path, &error)),
    }
}

impl TlsServer {
    /// Reads the server's certificate chain and key, and the authority that signs its clients' certificates.
    ///
    /// # Errors
    /// See [`TlsSetupError`].
    pub fn new(
        certificate: &Path,
        key: &Path,
        clients: ClientCertificates,
        client_authority: Option<&Path>,
    ) -> Result<Self, TlsSetupError> {
        let files = ServerFiles { certificate, key, client_authority, revoked: None };
        Self::new_by(&files, clients, &|path| File::open(path))
    }

    /// As [`TlsServer::new`], with revocation lists and with the files opened by `open`.
    ///
    /// # Errors
    /// See [`TlsSetupError`].
    pub fn new_by(
        files: &ServerFiles<'_>,
        clients: ClientCertificates,
        open: OpenFile<'_>,
    ) -> Result<Self, TlsSetupError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_safe_default_protocol_versions().map_err(TlsSetupError::config)?;
        let mut verifier = None;
        let builder = if clients == ClientCertificates::Off {
            builder.with_no_client_auth()
        } else {
            let roots = Arc::new(authorities(files.client_authority.ok_or(TlsSetupError::NoAuthority)?, open)?);
            let mut building = WebPkiClientVerifier::builder_with_provider(roots, provider);
            if let Some(path) = files.revoked {
                building = building.with_crls(revoked(path, open)?);
            }
            if clients == ClientCertificates::Optional {
                building = building.allow_unauthenticated();
            }
            // Of the authorities nothing is wrong by now, so it is the lists.
            let unfit = |error| match files.revoked {
                Some(path) => TlsSetupError::file(path, &error),
                None => TlsSetupError::config(error),
            };
            let built = building.build().map_err(unfit)?;
            verifier = files.revoked.map(|_| Arc::clone(&built));
            builder.with_client_cert_verifier(built)
        };
        let chain = certificates(files.certificate, open)?;
        let config = builder
            .with_single_cert(chain, key(files.key, open)?)
            .map_err(|error| TlsSetupError::pair(files.certificate, files.key, &error))?;
        Ok(Self { setup: Arc::new(RwLock::new(Arc::new(Setup { config: Arc::new(config), verifier }))) })
    }

    /// Takes over the certificate, the key, the authority and the revocation lists of `by`, for all clones of this handle.
    /// Connections that were accepted before go on as they are.
    pub fn replace(&self, by: &Self) {
        let new = by.current();
        *self.setup.write().unwrap_or_else(PoisonError::into_inner) = new;
    }

    fn current(&self) -> Arc<Setup> {
        // Only a whole Arc is ever written, so a panic elsewhere leaves nothing half done.
        Arc::clone(&self.setup.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether the revocation lists that are in force now name the certificate that a peer has shown, or one between; also if the
    /// certificate is not valid now by its dates, which are looked at first. Never without lists. A certificate whose authority is
    /// not configured any more (rustls's `UnknownIssuer`), or of whose authority there is no list, is not revoked: what was accepted with
    /// it goes on, and is refused when it connects again.
    pub fn has_revoked(&self, peer: &PeerIdentity) -> bool {
        use CertificateError::{Expired, ExpiredContext, NotValidYet, NotValidYetContext, Revoked};
        let PeerIdentity::Certified(chain) = peer else { return false };
        let (Some((own, between)), Some(verifier)) = (chain.split_first(), &self.current().verifier) else {
            return false;
        };
        let Err(rustls::Error::InvalidCertificate(error)) = verifier.verify_client_cert(own, between, UnixTime::now())
        else {
            return false;
        };
        matches!(error, Revoked | Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. })
    }

    /// The server's end of a new connection.
    ///
    /// # Errors
    /// When the configuration cannot be used after all.
    pub fn accept(&self) -> Result<TlsStream, TlsError> {
        let config = Arc::clone(&self.current().config);
        let connection = ServerConnection::new(config).map_err(|error| TlsError::from(&error))?;
        Ok(TlsStream::new(connection.into(), Arc::default()))
    }
}

impl ServerTls {
    /// The server's side, if there is one.
    pub fn server(&self) -> Option<&TlsServer> {
        match self {
            Self::Off => None,
            Self::Optional(server) | Self::Required(server) => Some(server),
        }
    }
}

impl TlsClient {
    /// Reads the authority that signed the server's certificate, and the client's own certificate and key, if it has one.
    /// `name` is the host name or IP address that the server's certificate must be for.
    ///
    /// # Errors
    /// See [`TlsSetupError`].
    pub fn new(authority: &Path, own: Option<(&Path, &Path)>, name: &str) -> Result<Self, TlsSetupError> {
        let open: OpenFile<'_> = &|path| File::open(path);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider);
        let builder = builder.with_safe_default_protocol_versions().map_err(TlsSetupError::config)?;
        let builder = builder.with_root_certificates(authorities(authority, open)?);
        let config = match own {
            Some((certificate, private_key)) => {
                let chain = certificates(certificate, open)?;
                builder
                    .with_client_auth_cert(chain, key(private_key, open)?)
                    .map_err(|error| TlsSetupError::pair(certificate, private_key, &error))?
            }
            None => builder.with_no_client_auth(),
        };
        let name = ServerName::try_from(name.to_owned()).map_err(|_| TlsSetupError::Name(name.to_owned()))?;
        Ok(Self { config: Arc::new(config), name, wrong_name: Arc::default() })
    }

    /// The client's end of a new connection.
    ///
    /// # Errors
    /// When the configuration cannot be used after all.
    pub fn connect(&self) -> Result<TlsStream, TlsError> {
        let connection = ClientConnection::new(Arc::clone(&self.config), self.name.clone())
            .map_err(|error| TlsError::from(&error))?;
        Ok(TlsStream::new(connection.into(), Arc::clone(&self.wrong_name)))
    }

    /// Both names, after a connection has failed with [`TlsError::WrongName`].
    pub fn wrong_name(&self) -> Option<WrongName> {
        self.wrong_name.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
