//! The NBD client over TLS, with byway's own front end, servers that break their word, and somebody on the way.

mod nbd_certificates;
mod nbd_rig;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use byway_fabric::tls::{ClientCertificates, ServerTls, TlsClient, TlsError, TlsServer, TlsStream};
use byway_frontend::nbd::client::{
    BlockingClient, ClientConfig, ClientError, ClientHandshakeError, RequestError, list,
};
use byway_frontend::nbd::request::Headers;
use byway_reactor::{Address, IoChoice, Reactor};
use byway_service::block::{Store, Volume, VolumeOptions, ZeroFlags};
use nbd_certificates::Files;
use nbd_rig::{CLIENT, IOS, Running, connect_as, loopback, memory, pattern};

const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\0\x03";
const STARTTLS: &[u8] = b"\0\0\0\x03IHAVEOPT\0\0\0\x05\0\0\0\0";
const STARTTLS_ACK: &[u8] = b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x05\0\0\0\x01\0\0\0\0";
/// What somebody would have the client believe: that extended headers are agreed on.
const FORGED: &[u8] = b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x0b\0\0\0\x01\0\0\0\0";

fn connect(io: IoChoice, to: &Address, tls: Option<TlsClient>) -> Result<BlockingClient, ClientError> {
    let config = ClientConfig { export: "m".into(), ..ClientConfig::default() };
    connect_as(io, to, config, 1, tls)
}

fn required(files: &Files) -> ServerTls {
    ServerTls::Required(files.server(ClientCertificates::Required))
}

#[test]
fn what_is_written_over_tls_is_read_at_every_size_and_with_all_headers() {
    let files = Files::new();
    for io in IOS {
        let server = Running::start(io, loopback(), vec![memory("m", 64 << 20, false)], required(&files));
        for (headers, structured_replies, extended_headers) in
            [(Headers::Simple, false, false), (Headers::Structured, true, false), (Headers::Extended, true, true)]
        {
            let config =
                ClientConfig { export: "m".into(), structured_replies, extended_headers, ..ClientConfig::default() };
            let tls = files.client(Some("client"));
            let mut client = connect_as(io, &server.address, config, 1, Some(tls)).unwrap();
            let session = client.session().unwrap();
            assert_eq!((session.rules.headers, session.tls), (headers, true));
            let mut offset = 7;
            for len in [1, 512, 4096, 16 << 10, (16 << 10) + 1, 64 << 10, 300_032, 1 << 20, 9 << 20] {
                let data = pattern(len, len as u32);
                client.write(offset, &data, len == 4096).unwrap();
                let mut back = vec![0; len];
                client.read(offset, &mut back).unwrap();
                assert!(data == back, "{io:?} {headers:?}: {len} bytes came back changed");
                offset += len as u64;
            }
            client.zero(7, 512, ZeroFlags::default()).unwrap();
            client.flush().unwrap();
            // The first piece was one byte, so the second's last is right behind the zeroes.
            let mut zeroes = [1; 513];
            client.read(7, &mut zeroes).unwrap();
            assert_eq!((&zeroes[..512], zeroes[512]), (&[0; 512][..], pattern(512, 512)[511]));
            client.close();
        }
    }
}

#[test]
fn several_connections_each_with_tls_on_a_unix_socket() {
    let files = Files::new();
    for io in IOS {
        let socket = files.path("socket");
        let volumes = vec![memory("m", 64 << 20, false)];
        let server = Running::start(io, Address::Unix(socket.clone()), volumes, required(&files));
        let mut client = server.connect(io, "m", 4, Some(files.client(Some("client"))));
        let data = pattern(20 << 20, 5);
        client.write(4096, &data, false).unwrap();
        let mut back = vec![0; data.len()];
        client.read(4096, &mut back).unwrap();
        assert!(data == back, "{io:?}: over {} connections", client.client().connections());
        assert_eq!(client.client().connections(), 4, "{io:?}");
        client.close();
        drop(server);
        std::fs::remove_file(socket).unwrap();
    }
}

#[test]
fn a_list_over_tls_has_what_only_tls_shows() {
    let files = Files::new();
    let hidden = VolumeOptions { tls_required: true, ..VolumeOptions::default() };
    let hidden = Arc::new(Volume::new("hidden", Store::memory("hidden", 1 << 20).unwrap(), hidden));
    let volumes = vec![memory("m", 1 << 20, false), hidden];
    let tls = ServerTls::Optional(files.server(ClientCertificates::Off));
    let server = Running::start(IoChoice::Auto, loopback(), volumes, tls);
    let listed = |tls| {
        let listed = list(Reactor::open(IoChoice::Auto, 1 << 20).unwrap(), server.address.clone(), CLIENT, tls);
        listed.unwrap().into_iter().map(|export| (export.name, export.session.is_some())).collect::<Vec<_>>()
    };
    assert_eq!(listed(None), [("m".to_owned(), true)]);
    assert_eq!(listed(Some(files.client(None))), [("m".to_owned(), true), ("hidden".to_owned(), true)]);
}

#[test]
fn nobody_is_trusted_who_should_not_be() {
    let (files, others) = (Files::new(), Files::new());
    for io in IOS {
        let serve = |tls| Running::start(io, loopback(), vec![memory("m", 1 << 20, false)], tls);
        let server = serve(required(&files));
        let failure = |tls| connect(io, &server.address, tls).err().unwrap();
        let own = Some("client");
        assert_eq!(failure(Some(others.client(own))), ClientError::Tls(TlsError::UnknownAuthority));
        assert_eq!(failure(Some(files.client_of("elsewhere", own))), ClientError::Tls(TlsError::WrongName));
        for own in [None, Some("stranger")] {
            let error = failure(Some(files.client(own)));
            assert!(matches!(error, ClientError::Tls(TlsError::Refused(_))), "{io:?} {own:?}: {error}");
        }
        assert_eq!(failure(None), ClientError::Handshake(ClientHandshakeError::TlsRequired));
        drop(connect(io, &server.address, Some(files.client(own))).unwrap());

        let plain = serve(ServerTls::Off);
        let error = connect(io, &plain.address, Some(files.client(own))).err().unwrap();
        assert!(matches!(error, ClientError::Handshake(ClientHandshakeError::TlsRefused(_))), "{error}");
    }
}

/// Accepts one connection, says the greeting and lets `act` go on. Gives what the client said in clear before TLS.
fn scripted(greeting: &'static [u8], act: impl FnOnce(&mut TcpStream) + Send + 'static) -> (Address, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address: SocketAddr = listener.local_addr().unwrap();
    let thread = std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        stream.write_all(greeting).unwrap();
        let mut asked = [0; STARTTLS.len()];
        if stream.read_exact(&mut asked).is_ok() {
            assert_eq!(asked, STARTTLS, "it asks for TLS before all else");
        }
        act(&mut stream);
        // Until the client has had enough; in clear it says no more than that it leaves.
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        let (leave, hello, alert) = (b"IHAVEOPT\0\0\0\x02\0\0\0\0", [22, 3], [21, 3]);
        let harmless = rest.is_empty() || rest == leave || rest.starts_with(&hello) || rest.starts_with(&alert);
        assert!(harmless, "said in clear: {rest:?}");
    });
    (Address::Tcp(address), thread)
}

#[test]
fn a_server_that_talks_the_client_out_of_tls_fails() {
    type Act = fn(&mut TcpStream);
    let files = Files::new();
    let refuse: Act = |stream| {
        let policy = b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x05\x80\0\0\x02\0\0\0\x04none";
        stream.write_all(policy).unwrap();
    };
    let behind: Act = |stream| stream.write_all(&[STARTTLS_ACK, FORGED].concat()).unwrap();
    let later: Act = |stream| {
        stream.write_all(STARTTLS_ACK).unwrap();
        // The client's first record has come: the forged words meet TLS.
        stream.peek(&mut [0; 1]).unwrap();
        stream.write_all(FORGED).unwrap();
    };
    let other: Act = |stream| stream.write_all(FORGED).unwrap();
    let early = [GREETING, STARTTLS_ACK].concat().leak();
    for io in IOS {
        for (greeting, act, want) in [
            (GREETING, refuse, ClientError::Handshake(ClientHandshakeError::TlsRefused("none".into()))),
            (GREETING, behind, ClientError::EarlyBytes),
            (GREETING, later, ClientError::Tls(TlsError::NotTls)),
            (
                GREETING,
                other,
                ClientError::Handshake(ClientHandshakeError::Misbehaved("a reply to an option that was not sent")),
            ),
            (early, |_| {}, ClientError::EarlyBytes),
            (b"NBDMAGICIHAVEOPT\0\0", |_| {}, ClientError::Handshake(ClientHandshakeError::NotFixedNewstyle)),
        ] {
            let (address, thread) = scripted(greeting, act);
            assert_eq!(connect(io, &address, Some(files.client(None))).err(), Some(want), "{io:?}");
            thread.join().unwrap();
        }
    }
}

/// What somebody on the way does to the server's bytes once so many have passed.
#[derive(Clone, Copy)]
enum Harm {
    Cut,
    Flip,
}

/// Passes bytes on both ways for one connection, and does harm after as many of the server's as `left` says.
fn on_the_way(server: &Address, left: &Arc<AtomicU64>, harm: Harm) -> (Address, JoinHandle<()>) {
    let Address::Tcp(server) = *server else { panic!("over TCP") };
    let left = Arc::clone(left);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let thread = std::thread::spawn(move || {
        let mut client = listener.accept().unwrap().0;
        let mut server = TcpStream::connect(server).unwrap();
        let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        let up = std::thread::spawn(move || {
            let _ = std::io::copy(&mut from, &mut to);
            let _ = to.shutdown(std::net::Shutdown::Both);
        });
        let mut bytes = vec![0; 16 << 10];
        while let Ok(n @ 1..) = server.read(&mut bytes) {
            let before = left.load(Ordering::SeqCst);
            let pass = before.min(n as u64);
            left.store(before - pass, Ordering::SeqCst);
            let pass = pass as usize;
            let keep = match harm {
                Harm::Cut => pass,
                Harm::Flip => n,
            };
            if pass < n {
                bytes[pass] ^= 1;
            }
            if client.write_all(&bytes[..keep]).is_err() || keep < n {
                break;
            }
        }
        let _ = client.shutdown(std::net::Shutdown::Both);
        let _ = server.shutdown(std::net::Shutdown::Both);
        up.join().unwrap();
    });
    (Address::Tcp(address), thread)
}

#[test]
fn a_stream_that_is_cut_or_changed_on_the_way_is_named() {
    let files = Files::new();
    for io in IOS {
        let server = Running::start(io, loopback(), vec![memory("m", 8 << 20, false)], required(&files));
        for (harm, error) in [(Harm::Cut, TlsError::Cut), (Harm::Flip, TlsError::Broken)] {
            let left = Arc::new(AtomicU64::new(u64::MAX));
            let (address, thread) = on_the_way(&server.address, &left, harm);
            let mut client = connect(io, &address, Some(files.client(Some("client")))).unwrap();
            // In the middle of a payload.
            left.store(100_000, Ordering::SeqCst);
            let lost = client.read(0, &mut vec![0; 1 << 20]).unwrap_err();
            assert_eq!(lost, RequestError::Lost(ClientError::Tls(error)), "{io:?}");
            assert_eq!(client.flush().unwrap_err(), lost, "it stays failed");
            client.close();
            thread.join().unwrap();
        }
        // Behind the server's greeting and its word that TLS may begin, in its handshake.
        let left = Arc::new(AtomicU64::new(18 + 20 + 200));
        let (address, thread) = on_the_way(&server.address, &left, Harm::Cut);
        let error = connect(io, &address, Some(files.client(Some("client")))).err();
        assert_eq!(error, Some(ClientError::Tls(TlsError::GaveUp)), "{io:?}");
        thread.join().unwrap();
    }
}

/// A server's end of TLS, by hand.
struct Secured {
    stream: TcpStream,
    tls: TlsStream,
    plain: Vec<u8>,
}

impl Secured {
    /// Greets, and takes the STARTTLS that is asked for.
    fn begin(mut stream: TcpStream, server: &TlsServer) -> Self {
        stream.write_all(GREETING).unwrap();
        stream.read_exact(&mut [0; STARTTLS.len()]).unwrap();
        stream.write_all(STARTTLS_ACK).unwrap();
        Self { stream, tls: server.accept().unwrap(), plain: Vec::new() }
    }

    fn send(&mut self, plain: &[u8]) {
        assert_eq!(self.tls.push(plain), plain.len());
        let mut ciphertext = Vec::new();
        self.tls.take_ciphertext(&mut ciphertext);
        self.stream.write_all(&ciphertext).unwrap();
    }

    /// False: the stream has ended.
    fn more(&mut self) -> bool {
        let mut bytes = [0; 16 << 10];
        let n = self.stream.read(&mut bytes).unwrap();
        self.tls.feed(&bytes[..n], &mut self.plain).unwrap();
        self.send(&[]);
        n > 0
    }

    fn expect(&mut self, beginning: &[u8], length: usize) {
        while self.plain.len() < length {
            assert!(self.more(), "the stream ended behind {:?}", self.plain);
        }
        let message: Vec<u8> = self.plain.drain(..length).collect();
        assert!(message.starts_with(beginning), "{message:?}");
    }

    /// All that still comes, and that TLS said that it is all.
    fn rest(mut self) -> Vec<u8> {
        while self.more() {}
        assert!(self.tls.has_ended(), "no close_notify");
        self.plain
    }
}

#[test]
fn a_client_that_breaks_off_over_tls_says_so_and_ends_tls() {
    type Act = fn(Secured) -> Vec<u8>;
    const ABORT: &[u8] = b"IHAVEOPT\0\0\0\x02\0\0\0\0";
    const DISC: &[u8] = b"\x25\x60\x95\x13\0\0\0\x02";
    const GO_REPLY: &[u8] = b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x07";
    let refuses: Act = |mut server| {
        server.expect(b"IHAVEOPT\0\0\0\x07", 16 + 13);
        // ERR_SHUTDOWN.
        server.send(&[GO_REPLY, b"\x80\0\0\x07\0\0\0\0"].concat());
        server.rest()
    };
    let lies: Act = |mut server| {
        server.expect(b"IHAVEOPT\0\0\0\x07", 16 + 13);
        // ERR_UNSUP: then it opens the export by EXPORT_NAME.
        server.send(&[GO_REPLY, b"\x80\0\0\x01\0\0\0\0"].concat());
        server.expect(b"IHAVEOPT\0\0\0\x01", 16 + 1);
        server.send(b"\0\0\0\0\0\x10\0\0\0\x01");
        server.expect(b"\x25\x60\x95\x13\0\0\0\0", 28);
        // A reply to no request.
        server.send(b"\x67\x44\x66\x98\0\0\0\0\xff\0\0\0\0\0\0\0");
        server.rest()
    };
    let files = Files::new();
    for io in IOS {
        for (act, said, length) in [(refuses, ABORT, 16), (lies, DISC, 28)] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = Address::Tcp(listener.local_addr().unwrap());
            let server = files.server(ClientCertificates::Off);
            let thread = std::thread::spawn(move || {
                let rest = act(Secured::begin(listener.accept().unwrap().0, &server));
                assert!(rest.len() == length && rest.starts_with(said), "{rest:?}");
            });
            let config = ClientConfig {
                export: "m".into(),
                structured_replies: false,
                extended_headers: false,
                allocation: false,
                ..ClientConfig::default()
            };
            match connect_as(io, &address, config, 1, Some(files.client(None))) {
                Ok(mut client) => {
                    let lost = client.read(0, &mut [0; 4096]).unwrap_err();
                    assert!(matches!(lost, RequestError::Lost(ClientError::Misbehaved(_))), "{lost}");
                    client.close();
                }
                Err(error) => assert_eq!(error, ClientError::Handshake(ClientHandshakeError::ShuttingDown)),
            }
            thread.join().unwrap();
        }
    }
}
