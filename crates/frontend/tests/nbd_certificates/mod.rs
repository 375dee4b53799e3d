//! Certificates for tests of TLS.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::path::PathBuf;

use byway_fabric::tls::{ClientCertificates, ServerFiles, TlsClient, TlsServer};

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
            let serial = |number| rcgen::SerialNumber::from(vec![number]);
            for (name, revoked) in [("none", None), ("client", Some(7))] {
                let revoked = revoked.map(|number| rcgen::RevokedCertParams {
                    serial_number: serial(number),
                    revocation_time: rcgen::date_time_ymd(2020, 1, 1),
                    reason_code: None,
                    invalidity_date: None,
                });
                let list = rcgen::CertificateRevocationListParams {
                    this_update: rcgen::date_time_ymd(2020, 1, 1),
                    next_update: rcgen::date_time_ymd(2020, 2, 1),
                    crl_number: serial(1),
                    issuing_distribution_point: None,
                    revoked_certs: revoked.into_iter().collect(),
                    key_identifier_method: rcgen::KeyIdMethod::Sha256,
                };
                let list = list.signed_by(&issuer).unwrap().pem().unwrap();
                std::fs::write(this.path(&format!("{authority}-{name}.crl")), list).unwrap();
            }
            for name in names {
                let key = rcgen::KeyPair::generate().unwrap();
                let mut params = rcgen::CertificateParams::new(vec![(*name).to_owned()]).unwrap();
                params.serial_number = Some(serial(if *name == "client" { 7 } else { 8 }));
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

    /// A server with a revocation list: `none` names no certificate, `client` that of the client.
    pub fn server_with_list(&self, list: &str) -> TlsServer {
        let [certificate, key, ca] = ["server.pem", "server.key", "ca.pem"].map(|name| self.path(name));
        let list = self.path(&format!("ca-{list}.crl"));
        let (client_authority, revoked) = (Some(ca.as_path()), Some(list.as_path()));
        let files = ServerFiles { certificate: &certificate, key: &key, client_authority, revoked };
        TlsServer::new_by(&files, ClientCertificates::Required, &|path| std::fs::File::open(path)).unwrap()
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
