//! The NBD client and byway's own front end over real sockets, and servers that break their word.

mod nbd_rig;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Duration;

use byway_fabric::session;
use byway_fabric::tls::ServerTls;
use byway_fabric::wire::{HEADER_BYTES, Header, Kind, RefuseCode};
use byway_frontend::nbd::client::{
    BlockingClient, Client, ClientConfig, ClientError, ClientHandshakeError, ClientOptions, RequestError, list,
};
use byway_frontend::nbd::errno::Errno;
use byway_frontend::nbd::request::Headers;
use byway_reactor::{Address, IoChoice, Reactor, Wait};
use byway_service::block::ZeroFlags;
use byway_service::block::client::Request;
use nbd_rig::{CLIENT, IOS, Running, connect_as, loopback, memory, pattern};
use zerocopy::IntoBytes;

fn connect(io: IoChoice, to: &Address, export: &str, connections: usize) -> Result<BlockingClient, ClientError> {
    let config = ClientConfig { export: export.to_owned(), ..ClientConfig::default() };
    connect_as(io, to, config, connections, None)
}

#[test]
fn what_is_written_is_read_at_every_size_and_with_all_headers() {
    for io in IOS {
        let server = Running::start(io, loopback(), vec![memory("m", 64 << 20, false)], ServerTls::Off);
        for (headers, structured_replies, extended_headers) in
            [(Headers::Simple, false, false), (Headers::Structured, true, false), (Headers::Extended, true, true)]
        {
            let config =
                ClientConfig { export: "m".into(), structured_replies, extended_headers, ..ClientConfig::default() };
            let mut client = connect_as(io, &server.address, config, 1, None).unwrap();
            assert_eq!(client.session().unwrap().rules.headers, headers);
            let mut offset = 7;
            for len in [1, 512, 4096, 16 << 10, (16 << 10) + 1, 64 << 10, 300_032, 1 << 20, 9 << 20] {
                let data = pattern(len, len as u32);
                client.write(offset, &data, len == 4096).unwrap();
                let mut back = vec![0; len];
                client.read(offset, &mut back).unwrap();
                assert!(data == back, "{io:?} {headers:?}: {len} bytes came back changed");
                offset += len as u64;
            }
            client.flush().unwrap();
            client.close();
        }
    }
}

#[test]
fn zeroes_and_extents_say_where_there_is_data() {
    let server = Running::start(IoChoice::Auto, loopback(), vec![memory("m", 8 << 20, false)], ServerTls::Off);
    let mut client = server.connect(IoChoice::Auto, "m", 1, None);
    client.write(1 << 20, &pattern(3 << 20, 1), false).unwrap();
    client.zero(2 << 20, 1 << 20, ZeroFlags::default()).unwrap();
    let extents = client.extents(0, 8 << 20).unwrap();
    let seen: Vec<_> = extents.iter().map(|extent| (extent.len >> 20, extent.hole)).collect();
    assert_eq!(seen, [(1, true), (1, false), (1, true), (1, false), (4, true)]);
    let mut back = vec![1; 1 << 20];
    client.read(2 << 20, &mut back).unwrap();
    assert!(back.iter().all(|byte| *byte == 0));
}

#[test]
fn several_connections_are_made_where_the_server_allows_it_and_share_the_work() {
    for io in IOS {
        let folder = std::env::temp_dir().join(format!("byway-frontend-{}-{io:?}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let socket: PathBuf = folder.join("sock");
        let server = Running::start(io, Address::Unix(socket), vec![memory("m", 64 << 20, false)], ServerTls::Off);
        let mut client = server.connect(io, "m", 4, None);
        let data = pattern(32 << 20, 5);
        client.write(0, &data, false).unwrap();
        let mut back = vec![0; data.len()];
        client.read(0, &mut back).unwrap();
        assert!(data == back);
        assert_eq!(client.client().connections(), 4);
        client.close();
        drop(server);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

#[test]
fn what_the_export_refuses_is_said_and_the_connection_lives() {
    let server = Running::start(IoChoice::Auto, loopback(), vec![memory("r", 1 << 20, true)], ServerTls::Off);
    let mut client = server.connect(IoChoice::Auto, "r", 1, None);
    let refused = client.write(0, &[1; 512], false).unwrap_err();
    assert!(
        matches!(&refused, RequestError::Violation(violation) if violation.errno == Errno::NotPermitted),
        "{refused}"
    );
    assert!(client.read(1 << 20, &mut [0; 512]).is_err(), "past the end");
    client.read(0, &mut [0; 512]).unwrap();
    let unknown = connect(IoChoice::Auto, &server.address, "other", 1).err().unwrap();
    assert!(matches!(unknown, ClientError::Handshake(ClientHandshakeError::UnknownExport(_))), "{unknown}");
}

#[test]
fn exports_are_listed_with_what_the_server_says_of_them() {
    let server = Running::start(
        IoChoice::Auto,
        loopback(),
        vec![memory("a", 1 << 20, false), memory("b", 2 << 20, true)],
        ServerTls::Off,
    );
    let listed = list(Reactor::open(IoChoice::Auto, 1 << 20).unwrap(), server.address.clone(), CLIENT, None).unwrap();
    let seen: Vec<_> =
        listed.iter().map(|export| (export.name.as_str(), export.session.as_ref().unwrap().rules.size_bytes)).collect();
    assert_eq!(seen, [("a", 1 << 20), ("b", 2 << 20)]);
    assert_eq!(listed[0].session.as_ref().unwrap().description, "about a");
}

/// Accepts one connection and lets `act` do with it what it likes.
fn scripted(act: impl FnOnce(TcpStream) + Send + 'static) -> (Address, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address: SocketAddr = listener.local_addr().unwrap();
    let thread = std::thread::spawn(move || act(listener.accept().unwrap().0));
    (Address::Tcp(address), thread)
}

/// As far as an open export of 1 MiB without any feature.
fn greet(stream: &mut TcpStream) {
    stream.write_all(b"NBDMAGICIHAVEOPT\x00\x00").unwrap();
    let mut flags_and_option = [0; 4 + 16 + 1];
    stream.read_exact(&mut flags_and_option).unwrap();
    stream.write_all(&(1u64 << 20).to_be_bytes()).unwrap();
    stream.write_all(&[0, 1]).unwrap();
    stream.write_all(&[0; 124]).unwrap();
}

#[test]
fn servers_that_break_their_word_are_named() {
    let failure = |act: fn(TcpStream)| {
        let (address, thread) = scripted(act);
        let error = connect(IoChoice::Auto, &address, "m", 1).err().unwrap();
        thread.join().unwrap();
        error
    };
    assert_eq!(failure(drop), ClientError::ClosedInHandshake);
    let web: fn(TcpStream) = |mut stream| stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
    assert_eq!(failure(web), ClientError::Handshake(ClientHandshakeError::NotNbd));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = Address::Tcp(listener.local_addr().unwrap());
    drop(listener);
    let refused = connect(IoChoice::Auto, &nobody, "m", 1).err().unwrap();
    assert!(matches!(refused, ClientError::Connect(_)), "{refused}");
}

#[test]
fn a_server_that_says_nothing_is_given_up() {
    let (silent, thread) = scripted(|mut stream| {
        // Until the client has had enough.
        let _ = stream.read(&mut [0; 1]);
    });
    assert_eq!(connect(IoChoice::Auto, &silent, "m", 1).err(), Some(ClientError::SlowHandshake));
    thread.join().unwrap();
}

#[test]
fn a_server_of_byways_own_wire_is_named() {
    for io in IOS {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Tcp(listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let (mut silent, _) = listener.accept().unwrap();
            let (mut asked, _) = listener.accept().unwrap();
            let mut hello = [0; HEADER_BYTES];
            asked.read_exact(&mut hello).unwrap();
            assert_eq!(Header::open(&hello, 0).unwrap().1, Kind::Hello);
            let mut refuse = session::refuse(Kind::Refuse, RefuseCode::UnknownSession);
            refuse.seal(0);
            asked.write_all(refuse.as_bytes()).unwrap();
            // The client sends nothing more on either.
            assert_eq!((silent.read(&mut hello).unwrap(), asked.read(&mut hello).unwrap()), (0, 0));
        });
        assert_eq!(connect(io, &address, "m", 1).err(), Some(ClientError::SpeaksByway), "{io:?}");
        server.join().unwrap();
    }
}

#[test]
fn a_server_that_is_slow_to_greet_is_waited_for() {
    for io in IOS {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Tcp(listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let (mut first, _) = listener.accept().unwrap();
            // It greets once the client has lost patience and asks what the server speaks.
            let (mut asked, _) = listener.accept().unwrap();
            asked.read_exact(&mut [0; HEADER_BYTES]).unwrap();
            asked.write_all(b"NBDMAGICIHAVEOPT\x00\x00").unwrap();
            greet(&mut first);
            let mut leave = [0; 28];
            first.read_exact(&mut leave).unwrap();
            assert_eq!(leave[6..8], [0, 2], "DISC");
        });
        let client = connect(io, &address, "m", 1).unwrap();
        assert_eq!(client.session().unwrap().rules.size_bytes, 1 << 20);
        client.close();
        server.join().unwrap();
    }
}

#[test]
fn a_client_that_leaves_with_a_request_in_flight_says_so() {
    for io in IOS {
        let (came, request_came) = std::sync::mpsc::channel();
        let (address, server) = scripted(move |mut stream| {
            greet(&mut stream);
            stream.read_exact(&mut [0; 28]).unwrap();
            came.send(()).unwrap();
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).unwrap();
            assert!(rest.len() == 28 && rest.starts_with(b"\x25\x60\x95\x13\0\0\0\x02"), "{rest:?}");
        });
        let mut reactor = Reactor::open(io, 8 << 20).unwrap();
        let config = ClientConfig { export: "m".into(), ..ClientConfig::default() };
        let mut client =
            Client::connect(&mut reactor, address, config, ClientOptions { class: CLIENT, connections: 1, tls: None });
        let turn = |client: &mut Client, reactor: &mut Reactor| {
            let mut completions = Vec::new();
            client.flush(reactor);
            reactor.reap(&mut completions, Wait::Until(reactor.now() + Duration::from_millis(10))).unwrap();
            for completion in completions {
                client.handle(reactor, completion);
            }
        };
        while client.session().is_none() {
            turn(&mut client, &mut reactor);
        }
        let into = reactor.frames().alloc(4096).unwrap();
        client.submit(Request::Read { offset: 0, len: 4096, into }, 1).unwrap();
        while request_came.try_recv().is_err() {
            turn(&mut client, &mut reactor);
        }
        client.close(&mut reactor);
        while !client.is_closed() {
            turn(&mut client, &mut reactor);
        }
        let mut done = Vec::new();
        client.reap(&mut done);
        assert_eq!(done.remove(0).result.unwrap_err(), RequestError::Lost(ClientError::Closed), "{io:?}");
        server.join().unwrap();
    }
}

#[test]
fn a_server_that_goes_away_or_lies_fails_what_is_in_flight() {
    let (gone, thread) = scripted(|mut stream| {
        greet(&mut stream);
        stream.read_exact(&mut [0; 28]).unwrap();
        // A reply, and half of its payload.
        stream.write_all(b"\x67\x44\x66\x98\0\0\0\0\0\0\0\x01\0\0\0\0").unwrap();
        stream.write_all(&[7; 2048]).unwrap();
    });
    let mut client = connect(IoChoice::Auto, &gone, "m", 1).unwrap();
    let error = client.read(0, &mut [0; 4096]).unwrap_err();
    assert_eq!(error, RequestError::Lost(ClientError::ServerGone));
    assert_eq!(client.flush().unwrap_err(), error, "it stays failed");
    thread.join().unwrap();

    let (liar, thread) = scripted(|mut stream| {
        greet(&mut stream);
        stream.read_exact(&mut [0; 28]).unwrap();
        stream.write_all(b"\x67\x44\x66\x98\0\0\0\0\xff\0\0\0\0\0\0\0").unwrap();
        // The client says that it leaves, with its request in flight.
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
        assert!(rest.len() == 28 && rest.starts_with(b"\x25\x60\x95\x13\0\0\0\x02"), "{rest:?}");
    });
    let mut client = connect(IoChoice::Auto, &liar, "m", 1).unwrap();
    let error = client.read(0, &mut [0; 4096]).unwrap_err();
    assert!(matches!(error, RequestError::Lost(ClientError::Misbehaved(_))), "{error}");
    client.close();
    thread.join().unwrap();
}
