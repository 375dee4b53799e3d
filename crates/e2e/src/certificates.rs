//! Certificates for tests of TLS, in the folders and under the names that libnbd and QEMU look for.

use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, IsCa, Issuer, KeyIdMethod, KeyPair,
    KeyUsagePurpose, RevokedCertParams, SerialNumber, date_time_ymd,
};

/// An authority, what it signed, and what others did.
pub struct Certificates {
    folder: PathBuf,
    ours: Authority,
}

/// The serial numbers of clients' certificates: by their places here.
const CLIENTS: [&str; 6] = ["client", "other", "nobody", "expired", "stranger", "misled"];

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

/// A certificate and its key, in PEM.
struct Signed {
    certificate: String,
    key: String,
}

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(vec![]).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("random numbers");
        let pem = params.self_signed(&key).expect("it signs").pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    fn sign(&self, name: &str, names: &[&str], expired: bool) -> Signed {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).expect("names");
        params.distinguished_name.push(DnType::CommonName, name);
        params.serial_number = Some(serial(name));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        if expired {
            params.not_before = rcgen::date_time_ymd(2001, 1, 1);
            params.not_after = rcgen::date_time_ymd(2002, 1, 1);
        }
        let key = KeyPair::generate().expect("random numbers");
        let certificate = params.signed_by(&key, &self.issuer).expect("it signs");
        Signed { certificate: certificate.pem(), key: key.serialize_pem() }
    }
}

/// The serial number of a client's certificate; 100 for others.
fn serial(name: &str) -> SerialNumber {
    let place = CLIENTS.iter().position(|client| *client == name);
    SerialNumber::from(vec![place.map_or(100, |place| place as u8 + 1)])
}

impl Certificates {
    /// Makes them in `folder`: the server's files there, and a folder for each client:
    ///
    /// - `client` and `other` have what they should, for the names `client.test` and `other.test`;
    /// - `nobody` has no certificate, `expired` one of long ago, `stranger` one of another authority;
    /// - `misled` trusts that other authority, so that it must not trust the server.
    ///
    /// # Panics
    /// If the folder cannot be written.
    pub fn new(folder: &Path) -> Self {
        let this = Self { folder: folder.to_owned(), ours: Authority::new("the tests' authority") };
        let (ours, another) = (&this.ours, Authority::new("another authority"));
        this.write("ca-cert.pem", &ours.pem);
        this.write_pair("server", &ours.sign("server", &["localhost", "127.0.0.1", "::1"], false));
        for (client, signer, trusted, expired) in [
            ("client", Some(ours), ours, false),
            ("other", Some(ours), ours, false),
            ("nobody", None, ours, false),
            ("expired", Some(ours), ours, true),
            ("stranger", Some(&another), ours, false),
            ("misled", Some(ours), &another, false),
        ] {
            std::fs::create_dir_all(folder.join(client)).expect("a folder");
            this.write(&format!("{client}/ca-cert.pem"), &trusted.pem);
            if let Some(signer) = signer {
                this.write_pair(
                    &format!("{client}/client"),
                    &signer.sign(client, &[&format!("{client}.test")], expired),
                );
            }
        }
        this
    }

    /// Writes `crl.pem`, which revokes the certificates of these clients.
    ///
    /// # Panics
    /// If the folder cannot be written.
    pub fn revoke(&self, clients: &[&str]) {
        let revoked = clients.iter().map(|client| RevokedCertParams {
            serial_number: serial(client),
            revocation_time: date_time_ymd(2026, 1, 1),
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2026, 1, 1),
            next_update: date_time_ymd(2036, 1, 1),
            crl_number: SerialNumber::from(vec![1]),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        self.write("crl.pem", &list.signed_by(&self.ours.issuer).expect("it signs").pem().expect("PEM"));
    }

    /// The flags of byway's commands for one of the clients.
    pub fn flags(&self, client: &str) -> Vec<String> {
        let path = |name: &str| self.path(&format!("{client}/{name}"));
        let mut flags = vec!["--tls-ca".to_owned(), path("ca-cert.pem")];
        let own = path("client-cert.pem");
        if Path::new(&own).exists() {
            flags.extend(["--tls-certificate".to_owned(), own, "--tls-key".to_owned(), path("client-key.pem")]);
        }
        flags
    }

    /// The path of a file or folder among them.
    pub fn path(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.folder.join(name), text).expect("room");
    }

    fn write_pair(&self, name: &str, signed: &Signed) {
        self.write(&format!("{name}-cert.pem"), &signed.certificate);
        self.write(&format!("{name}-key.pem"), &signed.key);
    }
}
