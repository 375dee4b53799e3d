//! The memory of a node whose clients of byway's own protocol request long answers and receive none, and its memory after they
//! have gone.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use byway_e2e::{LIMIT, Server, until};
use byway_fabric::wire::{BODY_BYTES, HEADER_BYTES, Header, Kind, MAGIC};
use byway_reactor::{IoChoice, Reactor};
use rustix::net::sockopt::set_socket_recv_buffer_size;
use rustix::process::{Resource, getrlimit, setrlimit};

/// Volumes with descriptions that together fill an answer.
const VOLUMES: usize = 20;
const DESCRIPTION_BYTES: usize = 1000;
const CALLS: u64 = 100;
/// What a node may have more than at its start while clients take nothing, and when they have gone: the heap that it keeps free,
/// its tables, and answers.
const LOADED_BYTES_MAX: u64 = 128 << 20;
const KEPT_BYTES_MAX: u64 = 64 << 20;

/// A message of the wire: docs/wire.md has the bytes.
fn message(kind: Kind, sequence: u64, body: &[&[u8]], payload: &[u8]) -> Vec<u8> {
    let body = body.concat();
    let mut bytes = [0; BODY_BYTES];
    bytes[..body.len()].copy_from_slice(&body);
    let mut header = Header::with_body(kind, &bytes);
    header.payload_len.set(payload.len() as u32);
    header.seal(sequence);
    let header: [u8; HEADER_BYTES] = zerocopy::transmute!(header);
    [&header[..], payload].concat()
}

/// A connection that has said hello, and can take little.
fn connect(port: u16, number: u64) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    set_socket_recv_buffer_size(&stream, 4096).unwrap();
    let name = u128::from(number + 1).to_le_bytes();
    // Versions 2 to 2, lane 0 of a session with one bulk lane, no features; nonce and client, session 1, payloads of 1 MiB.
    let numbers = [2u16, 2, 0, 1, 0, 0, 0, 0].map(u16::to_le_bytes).concat();
    let rest = [&1u64.to_le_bytes()[..], &(1u32 << 20).to_le_bytes()].concat();
    stream.write_all(&message(Kind::Hello, 0, &[&MAGIC, &numbers, &name, &name, &rest], &[])).unwrap();
    stream
}

fn read(stream: &mut TcpStream, kind: Kind) {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).unwrap();
    assert_eq!(header[4], kind as u8);
    let payload_len = u32::from_le_bytes(header[8..12].try_into().unwrap());
    stream.read_exact(&mut vec![0; payload_len as usize]).unwrap();
}

/// Sessions that may make calls.
fn open_sessions(port: u16, count: u64) -> Vec<TcpStream> {
    let mut sessions: Vec<_> = (0..count).map(|number| connect(port, number)).collect();
    // Protocol 1, only called, version 1; 16 notices.
    let entry = [1, 0, 1, 0, 1, 0, 0, 0, 16, 0];
    let protocols = message(Kind::Protocols, 1, &[&[7; 16], &[1; 8], &[1, 0]], &entry);
    for stream in &mut sessions {
        read(stream, Kind::Welcome);
        stream.write_all(&protocols).unwrap();
    }
    for stream in &mut sessions {
        read(stream, Kind::Protocols);
    }
    sessions
}

/// All sessions ask for the list of volumes, one call after another; gives the most memory that the node had meanwhile.
fn ask_for_lists(server: &Server, sessions: &mut [TcpStream]) -> u64 {
    let mut most = 0;
    for call in 0..CALLS {
        // The call's number, 64 bytes of arguments, method 9 of protocol 1.
        let number = call.to_le_bytes();
        let list = message(Kind::Call, 2 + call, &[&number[..7], &[64], &[9, 0, 1, 0]], &[]);
        // What a session's socket holds is more than all its calls.
        for stream in &mut *sessions {
            stream.write_all(&list).unwrap();
        }
        most = most.max(server.anonymous_bytes());
    }
    most
}

#[test]
fn lists_that_nobody_takes_cost_a_bounded_memory() {
    const SESSIONS: u64 = 2000;
    const ROUNDS: usize = 2;
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, rustix::process::Rlimit { current: limit.maximum, ..limit }).unwrap();
    for io in ["uring", "epoll"] {
        if io == "uring" && Reactor::open(IoChoice::Uring, 1).is_err() {
            byway_skip::skip_part_of_this(byway_skip::NO_IO_URING);
            continue;
        }
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let configuration = folder.path().join("byway.toml");
        let description = "x".repeat(DESCRIPTION_BYTES);
        let volume = |n| format!("[volume.v{n}]\nstore = \"null:1M\"\ndescription = \"{description}\"\n");
        std::fs::write(&configuration, (0..VOLUMES).map(volume).collect::<String>()).unwrap();
        let configuration = configuration.to_str().unwrap();
        let arguments = ["--config", configuration, "--io", io, "--threads", "4", "--listen", "tcp://127.0.0.1:0"];
        let server = Server::start(folder.path(), 1, &arguments);
        let start = server.anonymous_bytes();
        for round in 0..ROUNDS {
            let mut sessions = open_sessions(server.port("byway"), SESSIONS);
            let most = ask_for_lists(&server, &mut sessions) - start;
            println!("{io}, round {round}: {most} bytes more than at the start");
            assert!(most < LOADED_BYTES_MAX, "{io}: {most} bytes more than at the start");
        }
        let mut kept = 0;
        until(Instant::now() + LIMIT, "memory that is given back", || {
            let now = server.anonymous_bytes().saturating_sub(start);
            if now != kept {
                println!("{io}: {now} bytes more than at the start, afterwards");
            }
            kept = now;
            (kept < KEPT_BYTES_MAX).then_some(())
        });
    }
}
