//! Certificates for tests of TLS.

use std::path::PathBuf;

use byway_fabric::tls::{ClientCertificates, TlsClient, TlsServer};

/// Certificates of one authority: `server`, `client`; `stranger` is of another.
pub struct Files(tempfile::TempDir);

impl Files {
    pub fn new() -> Self {
        let this = Self(tempfile::tempdir().unwrap());
        for (authority, names) in [("ca", &["server", "client"][..]), ("another", &["stranger"])] {
            let mut params = rcgen::CertificateParams::new(vec![]).unwrap();
            params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
            params.distinguished_name.push(rcgen::DnType::CommonName, authority);
            let key = rcgen::KeyPair::generate().unwrap();
            let certificate = params.self_signed(&key).unwrap();
            std::fs::write(this.path(&format!("{authority}.pem")), certificate.pem()).unwrap();
            let issuer = rcgen::Issuer::new(params, key);
            for name in names {
                let key = rcgen::KeyPair::generate().unwrap();
                let params = rcgen::CertificateParams::new(vec![(*name).to_owned()]).unwrap();
                let certificate = params.signed_by(&key, &issuer).unwrap();
                std::fs::write(this.path(&format!("{name}.pem")), certificate.pem()).unwrap();
                std::fs::write(this.path(&format!("{name}.key")), key.serialize_pem()).unwrap();
            }
        }
        this
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn server(&self, clients: ClientCertificates) -> TlsServer {
        let ca = self.path("ca.pem");
        TlsServer::new(&self.path("server.pem"), &self.path("server.key"), clients, Some(&ca)).unwrap()
    }

    pub fn client(&self, own: Option<&str>) -> TlsClient {
        self.client_of("server", own)
    }

    /// A client that wants to reach the server of that name.
    pub fn client_of(&self, server: &str, own: Option<&str>) -> TlsClient {
        let own = own.map(|own| (self.path(&format!("{own}.pem")), self.path(&format!("{own}.key"))));
        let own = own.as_ref().map(|(certificate, key)| (certificate.as_path(), key.as_path()));
        TlsClient::new(&self.path("ca.pem"), own, server).unwrap()
    }
}
