//! TLS from end to end, in memory.

use std::path::PathBuf;

use byway_reactor::Gather;

use super::*;
use crate::limits::TLS_QUEUE_BYTES;

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
        let serial = |number| rcgen::SerialNumber::from(vec![number]);
        for (name, issuer, revoked) in [("none", &issuer, None), ("crl", &issuer, Some(7)), ("others", &other, None)] {
            let revoked = revoked.map(|number| rcgen::RevokedCertParams {
                serial_number: serial(number),
                revocation_time: rcgen::date_time_ymd(2020, 1, 1),
                reason_code: None,
                invalidity_date: None,
            });
            let list = rcgen::CertificateRevocationListParams {
                this_update: rcgen::date_time_ymd(2020, 1, 1),
                // Long ago: a list that is not renewed stays in force.
                next_update: rcgen::date_time_ymd(2020, 2, 1),
                crl_number: serial(1),
                issuing_distribution_point: None,
                revoked_certs: revoked.into_iter().collect(),
                key_identifier_method: rcgen::KeyIdMethod::Sha256,
            };
            std::fs::write(this.path(&format!("{name}-crl.pem")), list.signed_by(issuer).unwrap().pem().unwrap())
                .unwrap();
        }
        std::fs::write(this.path("ca.pem"), certificate.pem()).unwrap();
        let ours = ["server", "client", "stolen", "past", "future"].map(|name| (name, &issuer));
        let signed = ours.into_iter().chain([("stranger", &other)]);
        for (name, issuer) in signed {
            let key = rcgen::KeyPair::generate().unwrap();
            let mut params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
            match name {
                "stolen" => params.serial_number = Some(serial(7)),
                "past" => params.not_after = rcgen::date_time_ymd(2001, 1, 1),
                "future" => params.not_before = rcgen::date_time_ymd(4000, 1, 1),
                _ => {}
            }
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

    /// A server that requires certificates, and refuses those that the list names.
    fn server_with_list(&self, list: &str) -> TlsServer {
        let path = |name: &str| self.path(name);
        let (certificate, key, authority) = (path("server.pem"), path("server.key"), path("ca.pem"));
        let list = path(list);
        let files = ServerFiles {
            certificate: &certificate,
            key: &key,
            client_authority: Some(&authority),
            revoked: Some(&list),
        };
        TlsServer::new_by(&files, ClientCertificates::Required, &|path| File::open(path)).unwrap()
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
        assert!(matches!(server.peer(), PeerIdentity::Certified(_)));
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
        (Off, None, Ok(false)),
        (Optional, None, Ok(false)),
        (Optional, Some("client"), Ok(true)),
        (Optional, Some("stranger"), Err(TlsError::UnknownAuthority)),
        (Required, Some("client"), Ok(true)),
        (Required, Some("stranger"), Err(TlsError::UnknownAuthority)),
        (Required, Some("past"), Err(TlsError::Expired)),
        (Required, Some("future"), Err(TlsError::NotYetValid)),
        (Required, None, Err(TlsError::NoCertificate)),
    ] {
        let (mut client, mut server) = (files.client(own, "server"), files.server(clients));
        let carried = carry(&mut client, &mut server, 4096);
        let certified_now = carried.map(|_| matches!(server.peer(), PeerIdentity::Certified(_)));
        assert_eq!(certified_now, certified, "{clients:?} {own:?}");
    }
}

#[test]
fn a_server_of_another_name_or_no_tls_at_all_is_refused() {
    let files = Files::new();
    let (mut client, mut server) = (files.client(None, "elsewhere"), files.server(ClientCertificates::Off));
    assert_eq!(carry(&mut client, &mut server, 4096), Err(TlsError::WrongName));
    let mut server = files.server(ClientCertificates::Off);
    assert_eq!(server.feed(b"bywayFAB is not TLS", &mut Vec::new()), Err(TlsError::NotTls));
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

#[test]
fn a_stream_is_sealed_in_bounded_portions_and_decrypted_into_any_room() {
    let files = Files::new();
    let (mut client, mut server) = (files.client(None, "server"), files.server(ClientCertificates::Off));
    carry(&mut client, &mut server, 4096).unwrap();
    let data: Vec<u8> = (0..3_000_000u32).map(|i| ((i * 11) >> 4) as u8).collect();
    let (mut plain, mut sealed) = (Gather::new(), Gather::new());
    plain.push_head(&data);
    plain.push_zeroes(100_000);
    let mut came = Vec::new();
    let mut room = vec![0; 1];
    while !plain.is_empty() {
        client.seal(&mut plain, &mut sealed);
        assert!(sealed.len() <= 2 * TLS_QUEUE_BYTES, "{} bytes sealed at once", sealed.len());
        let mut ciphertext = Vec::new();
        sealed.take_front(|bytes| {
            ciphertext.extend_from_slice(bytes);
            bytes.len()
        });
        let mut rest = &ciphertext[..];
        loop {
            let n = server.decrypt(&mut rest, &mut room).unwrap();
            came.extend_from_slice(&room[..n]);
            if n < room.len() {
                break;
            }
            room.resize(room.len() % 70_001 + 977, 0);
        }
        assert!(rest.is_empty());
    }
    assert!(came[..data.len()] == data && came[data.len()..] == vec![0; 100_000]);
}

#[test]
fn a_replaced_certificate_is_for_new_connections_of_all_clones() {
    let (old, new) = (Files::new(), Files::new());
    let certificate = |files: &Files| {
        TlsServer::new(&files.path("server.pem"), &files.path("server.key"), ClientCertificates::Off, None).unwrap()
    };
    let server = certificate(&old);
    let clone = server.clone();
    let (mut before, mut client) = (clone.accept().unwrap(), old.client(None, "server"));
    carry(&mut client, &mut before, 4096).unwrap();
    server.replace(&certificate(&new));
    let mut refused = old.client(None, "server");
    assert_eq!(carry(&mut refused, &mut clone.accept().unwrap(), 4096), Err(TlsError::UnknownAuthority));
    let mut accepted = new.client(None, "server");
    carry(&mut accepted, &mut clone.accept().unwrap(), 4096).unwrap();
    assert_eq!(client.push(b"still here"), 10);
    assert_eq!(carry(&mut client, &mut before, 4096).unwrap().1, b"still here");
}

#[test]
fn a_revoked_certificate_is_refused_and_found_among_those_that_were_let_in() {
    let files = Files::new();
    let ends = |server: &TlsServer, own: &str| {
        let (mut client, mut end) = (files.client(Some(own), "server"), server.accept().unwrap());
        carry(&mut client, &mut end, 4096).map(|_| end.peer())
    };
    let server = files.server_with_list("none-crl.pem");
    let (stolen, client) = (ends(&server, "stolen").unwrap(), ends(&server, "client").unwrap());
    assert!(!server.has_revoked(&stolen) && !server.has_revoked(&client));
    server.clone().replace(&files.server_with_list("crl-crl.pem"));
    assert_eq!(ends(&server, "stolen"), Err(TlsError::Revoked));
    assert!(matches!(ends(&server, "client"), Ok(PeerIdentity::Certified(_))));
    assert!(server.has_revoked(&stolen) && !server.has_revoked(&client));
    assert!(!server.has_revoked(&PeerIdentity::Plain) && !server.has_revoked(&PeerIdentity::Anonymous));
    // A list that says nothing of the authority does not let everybody in.
    server.replace(&files.server_with_list("others-crl.pem"));
    assert_eq!(ends(&server, "client"), Err(TlsError::UnknownRevocation));
    assert!(!server.has_revoked(&client));
}

/// The dates are looked at first, so nothing is known of whether a list names it.
#[test]
fn a_certificate_that_has_expired_since_counts_as_revoked_where_there_are_lists() {
    let files = Files::new();
    let path = |name: &str| files.path(name);
    let (certificate, key, authority) = (path("server.pem"), path("server.key"), path("ca.pem"));
    let without = TlsServer::new(&certificate, &key, ClientCertificates::Required, Some(&authority)).unwrap();
    let with = files.server_with_list("crl-crl.pem");
    for (name, revoked) in [("past", true), ("future", true), ("client", false), ("stranger", false)] {
        let chain = certificates(&path(&format!("{name}.pem")), &|path| File::open(path)).unwrap();
        let peer = PeerIdentity::Certified(chain);
        assert_eq!((with.has_revoked(&peer), without.has_revoked(&peer)), (revoked, false), "{name}");
    }
}

#[test]
fn both_names_are_told_where_a_server_has_another_one() {
    let files = Files::new();
    let tls = TlsClient::new(&files.path("ca.pem"), None, "elsewhere").unwrap();
    let (mut client, mut server) = (tls.clone().connect().unwrap(), files.server(ClientCertificates::Off));
    assert_eq!(tls.wrong_name(), None);
    assert_eq!(carry(&mut client, &mut server, 4096), Err(TlsError::WrongName));
    let names = WrongName { expected: "elsewhere".to_owned(), presented: vec!["server".to_owned()] };
    assert_eq!(tls.wrong_name(), Some(names));
}

#[test]
fn a_key_that_does_not_fit_and_files_of_another_kind_are_named() {
    let files = Files::new();
    let new = |certificate: &str, key: &str| {
        let made = TlsServer::new(&files.path(certificate), &files.path(key), ClientCertificates::Off, None);
        made.map(|_| ()).unwrap_err().to_string()
    };
    std::fs::write(files.path("text"), "nothing of the kind").unwrap();
    for (certificate, key, named) in [
        ("server.pem", "client.key", &["server.pem", "client.key", "belongs to"][..]),
        ("server.key", "server.key", &["server.key", "holds no certificate"]),
        ("server.pem", "server.pem", &["server.pem", "no private key"]),
        ("text", "server.key", &["text", "holds no certificate"]),
        ("none", "server.key", &["none", "No such file", "give a PEM file"]),
    ] {
        let said = new(certificate, key);
        assert!(named.iter().all(|part| said.contains(part)), "{said}");
    }
}

#[test]
fn a_certificate_of_version_1_is_named() {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut der = rcgen::CertificateParams::new(vec![]).unwrap().self_signed(&key).unwrap().der().to_vec();
    // The version is the first field, an explicit context tag of its own (RFC 5280, 4.1).
    let version = der.windows(5).position(|bytes| bytes == [0xa0, 3, 2, 1, 2]).unwrap();
    der[version + 4] = 0;
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let builder = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    let error = builder.with_single_cert(vec![CertificateDer::from(der)], key).unwrap_err();
    let said = TlsSetupError::pair(Path::new("a.pem"), Path::new("a.key"), &error).to_string();
    assert!(said.contains("a.pem") && said.contains("X.509 version 3"), "{said}");
}

/// A group's certificate and key, in one text.
fn group_key() -> String {
    let made = rcgen::generate_simple_self_signed([GROUP_NAME.to_owned()]).unwrap();
    made.cert.pem() + &made.signing_key.serialize_pem()
}

#[test]
fn members_of_a_group_know_each_other_by_its_one_certificate() {
    let (ours, theirs) = (group_key(), group_key());
    let (server, client) = TlsServer::of_group(ours.as_bytes()).unwrap();
    let (mut near, mut far) = (client.connect().unwrap(), server.accept().unwrap());
    carry(&mut near, &mut far, 4096).unwrap();
    assert!(matches!(far.peer(), PeerIdentity::Certified(_)));
    let (_, stranger) = TlsServer::of_group(theirs.as_bytes()).unwrap();
    let carried = carry(&mut stranger.connect().unwrap(), &mut server.accept().unwrap(), 4096);
    assert_eq!(carried, Err(TlsError::UnknownAuthority));
    let certificate = ours.split_inclusive("-----END CERTIFICATE-----").next().unwrap();
    assert!(matches!(TlsServer::of_group(certificate.as_bytes()), Err(TlsSetupError::Config(_))));
}
