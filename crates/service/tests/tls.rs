//! The native wire over TLS, where somebody does not do what our client does.

mod harness;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use byway_fabric::session::{self, Identity, Terms};
use byway_fabric::tls::{ClientCertificates, ServerTls, TlsClient, TlsServer, TlsStream};
use byway_fabric::wire::{HEADER_BYTES, Header, Kind, Refuse, RefuseCode};
use byway_fabric::{ClientId, CloseReason, Options, PayloadChecksum};
use byway_reactor::{Address, IoChoice, Reactor};
use byway_service::block::client::{BlockingVolume, Volume as Client, VolumeOptions};
use harness::{FRAMES, Running, SERVER, each_io, memory, pattern};
use zerocopy::IntoBytes;

const IDENTITY: Identity = Identity { client: ClientId([1; 16]), number: 1, nonce: [2; 16] };

/// Certificates of one authority: `server`, `client`, `other`.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        let this = Self(tempfile::tempdir().unwrap());
        let mut params = rcgen::CertificateParams::new(vec![]).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        std::fs::write(this.path("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
        let issuer = rcgen::Issuer::new(params, key);
        for name in ["server", "client", "other"] {
            let key = rcgen::KeyPair::generate().unwrap();
            let params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
            std::fs::write(this.path(&format!("{name}.pem")), params.signed_by(&key, &issuer).unwrap().pem()).unwrap();
            std::fs::write(this.path(&format!("{name}.key")), key.serialize_pem()).unwrap();
        }
        this
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn server(&self, clients: ClientCertificates) -> TlsServer {
        let ca = self.path("ca.pem");
        TlsServer::new(&self.path("server.pem"), &self.path("server.key"), clients, Some(&ca)).unwrap()
    }

    fn client(&self, own: Option<&str>) -> TlsClient {
        let own = own.map(|own| (self.path(&format!("{own}.pem")), self.path(&format!("{own}.key"))));
        let own = own.as_ref().map(|(certificate, key)| (certificate.as_path(), key.as_path()));
        TlsClient::new(&self.path("ca.pem"), own, "server").unwrap()
    }
}

fn serve(io: IoChoice, tls: ServerTls) -> Running {
    Running::start_with(io, None, 1, (Options::new(SERVER), tls), vec![memory(8 << 20)])
}

/// A lane by hand.
struct Lane {
    socket: TcpStream,
    tls: Option<TlsStream>,
}

impl Lane {
    fn open(to: SocketAddr, tls: Option<&TlsClient>) -> Self {
        let socket = TcpStream::connect(to).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        Self { socket, tls: tls.map(|tls| tls.connect().unwrap()) }
    }

    fn push(&mut self, bytes: &[u8]) {
        let Some(tls) = &mut self.tls else { return self.socket.write_all(bytes).unwrap() };
        tls.push(bytes);
        let mut ciphertext = Vec::new();
        tls.take_ciphertext(&mut ciphertext);
        self.socket.write_all(&ciphertext).unwrap();
    }

    /// The first message that comes; `None` if the lane ends.
    fn pull(&mut self) -> Option<(Header, Kind)> {
        let mut came = Vec::new();
        while came.len() < HEADER_BYTES {
            let mut bytes = [0; 4096];
            let n = self.socket.read(&mut bytes).ok().filter(|n| *n > 0)?;
            match &mut self.tls {
                None => came.extend_from_slice(&bytes[..n]),
                Some(tls) => tls.feed(&bytes[..n], &mut came).ok()?,
            }
            self.push(&[]);
        }
        Some(Header::open(came.first_chunk().unwrap(), 0).unwrap())
    }

    /// Says `Hello` for a lane of the session, and gives the answer.
    fn hello(&mut self, lane: u16) -> Option<(Header, Kind)> {
        let terms = Terms { checksum: PayloadChecksum::Off, bulk_lanes: 1, credits: 1 };
        let mut hello = session::hello(&IDENTITY, &terms, lane);
        hello.seal(0);
        self.push(hello.as_bytes());
        self.pull()
    }
}

#[test]
fn a_lane_of_another_certificate_does_not_join_although_it_knows_the_nonce() {
    let files = Files::new();
    each_io(|io| {
        let server = serve(io, ServerTls::Optional(files.server(ClientCertificates::Optional)));
        let (client, other, nobody) = (files.client(Some("client")), files.client(Some("other")), files.client(None));
        let mut control = Lane::open(server.address, Some(&client));
        assert!(matches!(control.hello(0), Some((_, Kind::Welcome))));
        for stranger in [Some(&other), Some(&nobody), None] {
            let (header, kind) = Lane::open(server.address, stranger).hello(1).unwrap();
            let refuse: Refuse = header.body();
            let code = RefuseCode::from_number(refuse.code.get());
            assert_eq!((kind, code), (Kind::Refuse, RefuseCode::Auth));
        }
        assert!(matches!(Lane::open(server.address, Some(&client)).hello(1), Some((_, Kind::Welcome))));
    });
}

#[test]
fn where_tls_is_optional_both_kinds_of_client_are_served() {
    let files = Files::new();
    each_io(|io| {
        let server = serve(io, ServerTls::Optional(files.server(ClientCertificates::Off)));
        for tls in [None, Some(files.client(None))] {
            let reactor = Reactor::open(io, FRAMES).unwrap();
            let mut volume = Client::connect(&reactor, Address::Tcp(server.address), "disk", VolumeOptions::new(0x30));
            if let Some(tls) = tls {
                volume.set_tls(tls);
            }
            let mut volume = BlockingVolume::open(reactor, volume).unwrap();
            let data = pattern(3 << 20, 5);
            volume.write(0, &data, false).unwrap();
            let mut back = vec![0; data.len()];
            volume.read(0, &mut back).unwrap();
            assert!(back == data);
        }
    });
}

#[test]
fn a_plain_client_where_tls_is_required_is_told_and_named() {
    let files = Files::new();
    each_io(|io| {
        let server = serve(io, ServerTls::Required(files.server(ClientCertificates::Off)));
        let mut plain = Lane::open(server.address, None);
        plain.push(&[0x41; HEADER_BYTES]);
        let mut answer = Vec::new();
        plain.socket.read_to_end(&mut answer).unwrap();
        // An alert, TLS's way to say no, and nothing else.
        assert!(answer.len() < 16 && answer.first() == Some(&21), "{answer:?}");
        let deadline = std::time::Instant::now() + Duration::from_secs(30);
        loop {
            let closed = server.state.lock().unwrap().last_closed;
            if let Some(CloseReason::Tls(error)) = closed {
                assert_eq!(error, byway_fabric::tls::TlsError::NotTls);
                break;
            }
            assert!(std::time::Instant::now() < deadline, "{closed:?}");
            std::thread::yield_now();
        }
    });
}
