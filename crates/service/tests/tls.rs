//! The native wire over TLS, where somebody does not do what our client does.

mod harness;

use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use byway_fabric::limits::{SESSION_HEAP_BYTES_MAX, TLS_QUEUE_BYTES};
use byway_fabric::session::{self, Identity, Terms};
use byway_fabric::tls::{ClientCertificates, ServerTls, TlsClient, TlsServer, TlsStream};
use byway_fabric::wire::{HEADER_BYTES, Header, Kind, Pull, Refuse, RefuseCode};
use byway_fabric::{ClientId, CloseReason, Options, PayloadChecksum};
use byway_reactor::{Address, Reactor};
use byway_service::block::client::{BlockingVolume, ConnectError, Volume as Client, VolumeOptions, list};
use byway_service::block::wire::{Arguments, Method};
use byway_service::block::{Store, Volume, VolumeOptions as Served};
use harness::session::{call_header, protocols};
use harness::stream::Stream;
use harness::{FRAMES, Path, Running, SERVER, State, Wire, each_io, each_stream, memory, pattern};
use zerocopy::{FromZeros, IntoBytes};

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

fn serve(wire: Wire, tls: ServerTls) -> Running {
    Running::start_with(wire, None, 1, (Options::new(SERVER), tls), vec![memory(8 << 20)])
}

/// A lane by hand.
struct Lane {
    socket: Stream,
    tls: Option<TlsStream>,
    /// Plaintext that has come.
    came: Vec<u8>,
    sequence_in: u64,
}

impl Lane {
    fn open(to: &Address, tls: Option<&TlsClient>) -> Self {
        let socket = Stream::connect(to).unwrap();
        Self { socket, tls: tls.map(|tls| tls.connect().unwrap()), came: Vec::new(), sequence_in: 0 }
    }

    fn push(&mut self, bytes: &[u8]) {
        let Some(tls) = &mut self.tls else { return self.socket.write_all(bytes).unwrap() };
        tls.push(bytes);
        let mut ciphertext = Vec::new();
        tls.take_ciphertext(&mut ciphertext);
        self.socket.write_all(&ciphertext).unwrap();
    }

    /// Waits until so many bytes are here; `None` if the lane ends.
    fn wait_for(&mut self, len: usize) -> Option<()> {
        while self.came.len() < len {
            let mut bytes = [0; 4096];
            let n = self.socket.read(&mut bytes).ok().filter(|n| *n > 0)?;
            match &mut self.tls {
                None => self.came.extend_from_slice(&bytes[..n]),
                Some(tls) => tls.feed(&bytes[..n], &mut self.came).ok()?,
            }
            self.push(&[]);
        }
        Some(())
    }

    /// The next message's header; `None` if the lane ends.
    fn pull(&mut self) -> Option<(Header, Kind)> {
        self.wait_for(HEADER_BYTES)?;
        let opened = Header::open(self.came.first_chunk().unwrap(), self.sequence_in).unwrap();
        self.came.drain(..HEADER_BYTES);
        self.sequence_in += 1;
        Some(opened)
    }

    /// Throws a payload away.
    fn skip(&mut self, len: usize) {
        self.wait_for(len).expect("a payload");
        self.came.drain(..len);
    }

    /// Says `Hello` for a lane of the session, and gives the answer.
    fn hello(&mut self, lane: u16) -> Option<(Header, Kind)> {
        let terms = Terms { checksum: PayloadChecksum::Off, bulk_lanes: 1 };
        let mut hello = session::hello(&IDENTITY, &terms, lane);
        hello.seal(0);
        self.push(hello.as_bytes());
        self.pull()
    }
}

#[test]
fn a_lane_of_another_certificate_does_not_join_although_it_knows_the_nonce() {
    let files = Files::new();
    each_stream(|wire| {
        let server = serve(wire, ServerTls::Optional(files.server(ClientCertificates::Optional)));
        let (client, other, nobody) = (files.client(Some("client")), files.client(Some("other")), files.client(None));
        let mut control = Lane::open(&server.address, Some(&client));
        assert!(matches!(control.hello(0), Some((_, Kind::Welcome))));
        for stranger in [Some(&other), Some(&nobody), None] {
            let (header, kind) = Lane::open(&server.address, stranger).hello(1).unwrap();
            let refuse: Refuse = header.body();
            let code = RefuseCode::from_number(refuse.code.get());
            assert_eq!((kind, code), (Kind::Refuse, RefuseCode::Auth));
        }
        assert!(matches!(Lane::open(&server.address, Some(&client)).hello(1), Some((_, Kind::Welcome))));
    });
}

#[test]
fn where_tls_is_optional_both_kinds_of_client_are_served() {
    let files = Files::new();
    each_stream(|wire| {
        let server = serve(wire, ServerTls::Optional(files.server(ClientCertificates::Off)));
        for tls in [None, Some(files.client(None))] {
            let reactor = Reactor::open(wire.io, FRAMES).unwrap();
            let mut volume = Client::connect(&reactor, server.address.clone(), "disk", VolumeOptions::new(0x30));
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

/// Waits until the server is in some state, and gives it.
fn until(server: &Running, is: impl Fn(&State) -> bool) -> State {
    let deadline = std::time::Instant::now() + Duration::from_secs(30);
    loop {
        let state = *server.state.lock().unwrap();
        if is(&state) {
            return state;
        }
        assert!(std::time::Instant::now() < deadline, "{state:?}");
        std::thread::yield_now();
    }
}

/// A session by hand over TLS, with the volume `disk` open: its control lane, and a bulk lane.
fn session(server: &Running, tls: &TlsClient) -> [Lane; 2] {
    let mut lanes = [0, 1].map(|number| {
        let mut lane = Lane::open(&server.address, Some(tls));
        assert!(matches!(lane.hello(number), Some((_, Kind::Welcome))));
        lane
    });
    let (mut header, entry) = protocols();
    header.payload_len.set(entry.len() as u32);
    header.seal(1);
    lanes[0].push(&[header.as_bytes(), &entry].concat());
    let (header, kind) = lanes[0].pull().unwrap();
    assert_eq!(kind, Kind::Protocols);
    lanes[0].skip(header.payload_len());
    call(&mut lanes[0], 2, Method::Open, 0, b"disk");
    assert_eq!(lanes[0].pull().unwrap().1, Kind::Reply);
    lanes
}

fn call(lane: &mut Lane, sequence: u64, method: Method, len: u64, payload: &[u8]) {
    let mut arguments = Arguments::new_zeroed();
    arguments.len.set(len);
    let window = if len > 0 { (77, len as u32) } else { (0, 0) };
    let (mut header, windows) = call_header(0, method, arguments, window);
    header.payload_len.set((windows.len() + payload.len()) as u32);
    header.seal(sequence);
    lane.push(&[header.as_bytes(), &windows, payload].concat());
}

#[test]
fn a_lane_that_ends_in_the_middle_of_a_payload_leaves_no_window_open() {
    let files = Files::new();
    each_stream(|wire| {
        let server = serve(wire, ServerTls::Required(files.server(ClientCertificates::Off)));
        let [mut control, mut bulk] = session(&server, &files.client(None));
        call(&mut control, 3, Method::Write, 65_536, &[]);
        let (header, kind) = control.pull().unwrap();
        let pull: Pull = header.body();
        assert_eq!(kind, Kind::Pull);
        until(&server, |state| state.open_windows == 1);
        let mut data = Header::new(Kind::Data);
        data.window = pull.target;
        data.payload_len.set(65_536);
        data.seal(1);
        bulk.push(data.as_bytes());
        bulk.push(&[9; 1000]);
        bulk.tls.as_mut().unwrap().push_end();
        bulk.push(&[]);
        let state = until(&server, |state| state.sessions == 0);
        assert_eq!((state.open_windows, state.last_closed), (0, Some(CloseReason::Truncated)));
    });
}

#[test]
fn a_client_that_takes_no_answers_is_held_back_and_is_served_when_it_does() {
    const CALLS: u64 = 1000;
    let files = Files::new();
    each_stream(|wire| {
        let tls = ServerTls::Required(files.server(ClientCertificates::Off));
        let described = || Served { description: "d".repeat(1000), ..Served::default() };
        let other = |index| Arc::new(Volume::new(format!("v{index}"), Store::null(512), described()));
        let volumes = (0..20).map(other).chain([memory(1 << 20)]).collect();
        let server = Running::start_with(wire, None, 1, (Options::new(SERVER), tls), volumes);
        let [mut control, _bulk] = session(&server, &files.client(None));
        for at in 0..CALLS {
            call(&mut control, at + 3, Method::List, 0, &[]);
        }
        let mut answers = 0;
        while answers < CALLS {
            let (header, kind) = control.pull().expect("an answer");
            assert_eq!(kind, Kind::Reply);
            control.skip(header.payload_len());
            answers += 1;
        }
        let queued = server.state.lock().unwrap().queued_heap_bytes_max;
        assert!(queued > SESSION_HEAP_BYTES_MAX, "it was never held: {queued}");
        assert!(queued < SESSION_HEAP_BYTES_MAX + TLS_QUEUE_BYTES + (64 << 10), "{queued} bytes waited for one client");
    });
}

#[test]
fn a_plain_client_where_tls_is_required_is_told_and_named() {
    let files = Files::new();
    each_stream(|wire| {
        let server = serve(wire, ServerTls::Required(files.server(ClientCertificates::Off)));
        let mut plain = Lane::open(&server.address, None);
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

#[test]
fn over_rdma_whoever_wants_tls_gets_no_session_and_hears_so() {
    let files = Files::new();
    let path = Path::Rdma;
    if !path.is_there() {
        return byway_skip::skip_this(byway_skip::NO_RDMA);
    }
    each_io(|io| {
        let open = |server: &Running, tls: Option<TlsClient>| {
            let reactor = Reactor::open(io, FRAMES).unwrap();
            let mut volume = Client::connect(&reactor, server.address.clone(), "disk", VolumeOptions::new(0x30));
            if let Some(tls) = tls {
                volume.set_tls(tls);
            }
            BlockingVolume::open(reactor, volume).map(|_| ()).unwrap_err()
        };
        // Neither end goes on in the clear because the other one would.
        let plain = serve(Wire { io, path }, ServerTls::Off);
        let refused = ConnectError::Session(CloseReason::WeRefused(RefuseCode::Auth));
        assert_eq!(open(&plain, Some(files.client(None))), refused);
        let secure = serve(Wire { io, path }, ServerTls::Required(files.server(ClientCertificates::Off)));
        assert_eq!(open(&secure, None), ConnectError::Session(CloseReason::Refused(RefuseCode::Auth)));
        assert_eq!(open(&secure, Some(files.client(None))), refused);
        until(&secure, |state| state.last_closed == Some(CloseReason::WeRefused(RefuseCode::Auth)));
    });
}

#[test]
fn a_server_of_nbd_is_named() {
    let files = Files::new();
    each_io(|io| {
        for tls in [None, Some(files.client(None))] {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let address = Address::Tcp(listener.local_addr().unwrap());
            let server = std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                stream.write_all(b"NBDMAGICIHAVEOPT\x00\x03").unwrap();
                // A client that has such flags does not speak NBD.
                stream.read_exact(&mut [0; 4]).unwrap();
                let _ = stream.shutdown(std::net::Shutdown::Write);
                let _ = stream.read_to_end(&mut Vec::new());
            });
            let reactor = Reactor::open(io, FRAMES).unwrap();
            let refused = list(reactor, address, Options::new(0x30), tls).unwrap_err();
            assert_eq!(refused, ConnectError::Session(CloseReason::SpeaksNbd));
            server.join().unwrap();
        }
    });
}
