//! Sessions over TLS: what goes over them, and who gets none.

use std::path::PathBuf;

use byway_fabric::access::Origin;
use byway_fabric::node::{Node, NodeError, NodeOptions, OpError, Rights};
use byway_fabric::tls::{ClientCertificates, ServerTls, TlsClient, TlsServer};
use byway_fabric::{CloseReason, WireKind};

use crate::rig::{CANARY, Pair, Rig, Turner, done, pattern, soon, window_is_all};

crate::over_each_wire!(
    everything_goes_over_a_session_with_tls,
    who_is_not_whom_it_should_be_gets_no_session,
    who_must_use_tls_and_does_not_gets_no_session,
    each_end_learns_the_names_of_the_others_certificate,
);

/// Certificates: of `server` and `client` by one authority, `ca`, and of `stranger` by another, `other`.
struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        let this = Self { folder: tempfile::tempdir().unwrap() };
        for (authority, names) in [("ca", &["server", "client"][..]), ("other", &["stranger"])] {
            let mut params = rcgen::CertificateParams::new(vec![]).unwrap();
            params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
            params.distinguished_name.push(rcgen::DnType::CommonName, authority);
            let key = rcgen::KeyPair::generate().unwrap();
            std::fs::write(this.path(authority, "pem"), params.self_signed(&key).unwrap().pem()).unwrap();
            let issuer = rcgen::Issuer::new(params, key);
            for name in names {
                let key = rcgen::KeyPair::generate().unwrap();
                let params = rcgen::CertificateParams::new(vec![(*name).to_owned()]).unwrap();
                let certificate = params.signed_by(&key, &issuer).unwrap();
                std::fs::write(this.path(name, "pem"), certificate.pem()).unwrap();
                std::fs::write(this.path(name, "key"), key.serialize_pem()).unwrap();
            }
        }
        this
    }

    fn path(&self, name: &str, kind: &str) -> PathBuf {
        self.folder.path().join(format!("{name}.{kind}"))
    }

    fn server(&self, name: &str, clients: ClientCertificates) -> ServerTls {
        let authority = self.path("ca", "pem");
        let server = TlsServer::new(&self.path(name, "pem"), &self.path(name, "key"), clients, Some(&authority));
        ServerTls::Required(server.unwrap())
    }

    /// A client that wants `server`, and shows `own`.
    fn client(&self, own: Option<&str>, server: &str) -> TlsClient {
        let own = own.map(|own| (self.path(own, "pem"), self.path(own, "key")));
        let own = own.as_ref().map(|(certificate, key)| (certificate.as_path(), key.as_path()));
        TlsClient::new(&self.path("ca", "pem"), own, server).unwrap()
    }
}

fn open(rig: &Rig, tls: ServerTls) -> Node {
    Node::open(&NodeOptions { tls, ..rig.options() }).unwrap()
}

fn everything_goes_over_a_session_with_tls(rig: &Rig) {
    let files = Files::new();
    let (server, client) = (open(rig, files.server("server", ClientCertificates::Required)), rig.node());
    let address = rig.listen(&server);
    let tls = files.client(Some("client"), "server");
    let (to_client, to_server) = std::thread::scope(|scope| {
        let accepted = scope.spawn(|| server.accept(soon()).unwrap());
        let connected = client.connect_secure(&address, &tls, soon()).unwrap();
        (accepted.join().unwrap(), connected)
    });
    let pair = Pair { wire: rig.wire, server, client, to_client, to_server };
    let turner = Turner::of(&pair.server);
    let len = (2 << 20) + 17;
    let (memory, window) = pair.open(len, Rights::BOTH);
    let mut mine = pair.client.register(len).unwrap();
    done(&pair.client.get(pair.to_server, &window.descriptor(), 0, &[mine.segment(0..len)]).unwrap());
    assert!((0..len).all(|at| mine.bytes().unwrap()[at] == pattern(CANARY + at)));
    mine.bytes_mut().unwrap().fill(0xa5);
    done(&pair.client.put(pair.to_server, &[mine.segment(0..len)], &window.descriptor(), 0).unwrap());
    window_is_all(&memory, 0xa5);
    done(&pair.client.send(pair.to_server, b"secret", &[3; 9000]).unwrap());
    drop(turner);
    let message = pair.server.receive(soon()).unwrap();
    assert_eq!((&message.header[..], &message.payload[..]), (&b"secret"[..], &[3; 9000][..]));
}

/// Tries to begin a session; the reason why there is none.
fn refused(server: &Node, begin: impl FnOnce() -> Result<byway_fabric::node::Session, NodeError>) -> CloseReason {
    let _turner = Turner::of(server);
    match begin() {
        Err(NodeError::Op(OpError::Ended(reason))) => reason,
        other => panic!("{other:?}"),
    }
}

fn who_is_not_whom_it_should_be_gets_no_session(rig: &Rig) {
    let files = Files::new();
    let client = rig.node();
    let attempts = [
        ("stranger", ClientCertificates::Off, files.client(None, "stranger"), "another authority's server"),
        ("server", ClientCertificates::Off, files.client(None, "bank"), "another name"),
        ("server", ClientCertificates::Required, files.client(None, "server"), "a client without a certificate"),
        ("server", ClientCertificates::Required, files.client(Some("stranger"), "server"), "a stranger"),
    ];
    for (name, clients, tls, what) in attempts {
        let server = open(rig, files.server(name, clients));
        let address = rig.listen(&server);
        let reason = refused(&server, || client.connect_secure(&address, &tls, soon()));
        assert!(matches!(reason, CloseReason::Tls(_)), "{what}: {reason:?}");
        assert_eq!(server.counters().unwrap().sessions, 0, "{what}");
    }
    // The node is none the worse for it.
    let server = rig.node();
    crate::rig::connect(&server, &client, &rig.listen(&server));
}

fn who_must_use_tls_and_does_not_gets_no_session(rig: &Rig) {
    let files = Files::new();
    let (server, client) = (open(rig, files.server("server", ClientCertificates::Off)), rig.node());
    let address = rig.listen(&server);
    refused(&server, || client.connect(&address, soon()));
    assert_eq!(server.counters().unwrap().sessions, 0);
    // Nor does who wants it where there is none.
    let plain = rig.node();
    let address = rig.listen(&plain);
    refused(&plain, || client.connect_secure(&address, &files.client(None, "server"), soon()));
    assert_eq!(plain.counters().unwrap().sessions, 0);
}

fn each_end_learns_the_names_of_the_others_certificate(rig: &Rig) {
    let files = Files::new();
    for own in [Some("client"), None] {
        let (server, client) = (open(rig, files.server("server", ClientCertificates::Optional)), rig.node());
        let (address, tls) = (rig.listen(&server), files.client(own, "server"));
        let (to_client, to_server) = std::thread::scope(|scope| {
            let accepted = scope.spawn(|| server.accept(soon()).unwrap());
            let connected = client.connect_secure(&address, &tls, soon()).unwrap();
            (accepted.join().unwrap(), connected)
        });
        assert_eq!(server.peer(to_client).unwrap().names(), own.as_slice());
        assert_eq!(client.peer(to_server).unwrap().names(), ["server"]);
        let origin = server.peer(to_client).unwrap().origin();
        match client.capabilities(to_server).unwrap().wire {
            WireKind::Tcp => assert!(matches!(origin, Origin::Address(ip) if ip.is_loopback()), "{origin:?}"),
            _ => assert_eq!(origin, Origin::Unix),
        }
    }
    let (server, client) = (rig.node(), rig.node());
    let pair = crate::rig::connect(&server, &client, &rig.listen(&server));
    assert_eq!(server.peer(pair.0).unwrap().names().len() + client.peer(pair.1).unwrap().names().len(), 0);
}
