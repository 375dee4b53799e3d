//! TLS of a client, as its flags name the files.

use std::path::{Path, PathBuf};

use byway_fabric::tls::{AlertDescription, TlsClient, TlsError, TlsSetupError, WrongName};
use clap::Args;

/// The flags of commands that connect to a node.
#[derive(Args, Clone, Debug, Default)]
pub struct ClientTlsArguments {
    /// For byways:// and nbds://: certificates of the authorities that sign server certificates, PEM
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// This client's certificate, for servers that ask for one, PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_certificate: Option<PathBuf>,
    /// The private key of that certificate, PEM
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    pub tls_key: Option<PathBuf>,
    /// Name in the server's certificate, if it differs from the host in the address
    #[arg(long, value_name = "NAME")]
    pub tls_hostname: Option<String>,
}

/// Why a client has no TLS.
#[derive(Debug, thiserror::Error)]
pub enum ClientTlsError {
    /// Nothing says which servers to trust.
    #[error("over TLS the server's certificate must be checked; give --tls-ca FILE, the authority that signed it")]
    NoAuthority,
    /// Certificates for a connection that would be plain.
    #[error("the --tls flags are for byways:// and nbds:// addresses; use such an address, or leave the flags out")]
    Plain,
    /// The files.
    #[error("TLS: {0}")]
    Setup(#[from] TlsSetupError),
}

impl ClientTlsArguments {
    /// The same with absolute paths, for a process that changes its directory.
    ///
    /// # Errors
    /// The directory of this process is not to be had.
    pub fn absolute(&self) -> std::io::Result<Self> {
        let absolute = |path: &Option<PathBuf>| path.as_deref().map(std::path::absolute).transpose();
        Ok(Self {
            tls_ca: absolute(&self.tls_ca)?,
            tls_certificate: absolute(&self.tls_certificate)?,
            tls_key: absolute(&self.tls_key)?,
            tls_hostname: self.tls_hostname.clone(),
        })
    }

    /// Checks that they are for something: that one of the addresses `wants` TLS.
    ///
    /// # Errors
    /// [`ClientTlsError::Plain`].
    pub fn check(&self, wants: bool) -> Result<(), ClientTlsError> {
        let given = self.tls_ca.is_some() || self.tls_certificate.is_some() || self.tls_hostname.is_some();
        if given && !wants { Err(ClientTlsError::Plain) } else { Ok(()) }
    }

    /// What to do about a failure of TLS, with the flag to give: to stand behind the failure. `names` has both names, where the
    /// server's certificate is for another.
    pub fn advice(&self, error: TlsError, names: Option<&WrongName>) -> String {
        let flag = |flag: &str, file: &Option<PathBuf>| match file {
            Some(file) => format!("{flag} {}", file.display()),
            None => flag.to_owned(),
        };
        let own = flag("--tls-certificate", &self.tls_certificate);
        match (error, names) {
            (TlsError::WrongName, Some(WrongName { expected, presented })) => match presented.first() {
                Some(first) => format!(
                    ": it is for {}, and `{expected}` was wanted; write one of its names in the address, or give --tls-hostname \
                     {first}",
                    presented.join(", ")
                ),
                None => format!(
                    ": it is for no name, and `{expected}` was wanted; give the server a certificate with subject alternative names"
                ),
            },
            (TlsError::UnknownAuthority, _) => {
                format!("; give the authority that signed the server's, in place of {}", flag("--tls-ca", &self.tls_ca))
            }
            (TlsError::Refused(AlertDescription::CertificateRequired) | TlsError::GaveUp, _)
                if self.tls_certificate.is_none() =>
            {
                "; the server may want a certificate: give --tls-certificate and --tls-key".to_owned()
            }
            (TlsError::Refused(AlertDescription::UnknownCA), _) => {
                format!("; it does not trust the authority that signed {own}, or has revocation lists of others only")
            }
            (TlsError::Refused(AlertDescription::CertificateExpired), _) => format!("; {own} has expired"),
            (TlsError::Refused(AlertDescription::CertificateRevoked), _) => {
                format!("; {own} is on its revocation list")
            }
            (TlsError::Refused(_) | TlsError::GaveUp, _) => "; its log says why".to_owned(),
            (TlsError::NotTls, _) => "; write the address without the s, if the network may be trusted".to_owned(),
            _ => String::new(),
        }
    }

    /// The client's side of TLS for a server that is reached as `host`.
    ///
    /// # Errors
    /// See [`ClientTlsError`].
    pub fn client(&self, host: &str) -> Result<TlsClient, ClientTlsError> {
        let authority = self.tls_ca.as_deref().ok_or(ClientTlsError::NoAuthority)?;
        let own: Option<(&Path, &Path)> = self.tls_certificate.as_deref().zip(self.tls_key.as_deref());
        Ok(TlsClient::new(authority, own, self.tls_hostname.as_deref().unwrap_or(host))?)
    }
}
