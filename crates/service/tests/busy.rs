//! A server that is busy is not asked at the network's speed, and is asked again soon enough.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use byway_fabric::Agreed;
use byway_fabric::session::welcome;
use byway_fabric::wire::{HEADER_BYTES, Header, Hello, Kind};
use byway_reactor::{Address, IoChoice, Reactor};
use byway_rpc::message::{CallBody, ProtocolEntry, ProtocolsBody, ReplyBody, call_number};
use byway_service::block::client::{BlockingVolume, VolumeOptions};
use byway_service::block::wire::{CallError, Method, OpenResult, PROTOCOL, VERSIONS, status_of};
use byway_service::limits::{BUSY_PAUSE_MAX, BUSY_PAUSE_MIN};
use zerocopy::little_endian::U64;
use zerocopy::{FromZeros, IntoBytes};

/// How often a flush is answered `Busy`.
const BUSY: usize = 10;

fn receive(stream: &mut TcpStream, sequence: u64) -> Header {
    let mut bytes = [0; HEADER_BYTES];
    stream.read_exact(&mut bytes).unwrap();
    let (header, _) = Header::open(&bytes, sequence).unwrap();
    stream.read_exact(&mut vec![0; header.payload_len()]).unwrap();
    header
}

fn answer(stream: &mut TcpStream, sequence: u64, mut header: Header) {
    header.instance.set(1);
    header.seal(sequence);
    stream.write_all(header.as_bytes()).unwrap();
}

/// Answers a client's `Protocols`, its second message.
fn introduce(stream: &mut TcpStream) {
    assert_eq!(receive(stream, 1).kind, Kind::Protocols as u8);
    let (version_min, version_max) = (VERSIONS.oldest.into(), VERSIONS.newest.into());
    let (calls, notices) = (8.into(), 0.into());
    let entry = ProtocolEntry { protocol: PROTOCOL, serves: 1, version_min, version_max, calls, notices };
    let mut body = ProtocolsBody::new_zeroed();
    body.count.set(1);
    let mut header = Header::with_body(Kind::Protocols, &body);
    header.instance.set(1);
    header.payload_len.set(size_of::<ProtocolEntry>() as u32);
    header.seal(1);
    stream.write_all(&[header.as_bytes(), entry.as_bytes()].concat()).unwrap();
}

/// Serves one session by hand; gives how long its client took to ask [`BUSY`] times more for what it got at last.
fn serve(listener: &TcpListener) -> Duration {
    let agreed = Agreed { features: 0, instance: 1 };
    let mut lanes = Vec::new();
    while lanes.len() < 3 {
        let mut lane = listener.accept().unwrap().0;
        let hello: Hello = receive(&mut lane, 0).body();
        answer(&mut lane, 0, welcome(&hello, &agreed));
        lanes.push(lane);
    }
    let control = &mut lanes[0];
    introduce(control);
    let mut first = None;
    for sequence in 2.. {
        let call: CallBody = receive(control, sequence).body();
        let mut reply = ReplyBody::new_zeroed();
        reply.call.set(call_number(call.call));
        reply.inline_len = 64;
        if Method::from_number(call.method.get()) == Some(Method::Open) {
            let mut opened = OpenResult::new_zeroed();
            opened.len = U64::new(1 << 20);
            reply.result.copy_from_slice(opened.as_bytes());
        } else {
            let busy = sequence < 3 + BUSY as u64;
            reply.status.set(if busy { status_of(CallError::Busy).0 } else { 0 });
            let first = *first.get_or_insert_with(Instant::now);
            if !busy {
                answer(control, sequence, Header::with_body(Kind::Reply, &reply));
                return first.elapsed();
            }
        }
        answer(control, sequence, Header::with_body(Kind::Reply, &reply));
    }
    unreachable!("sequence numbers do not end")
}

#[test]
fn a_request_that_is_answered_busy_is_sent_again_after_a_pause() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address::Tcp(listener.local_addr().unwrap());
    let server = std::thread::spawn(move || serve(&listener));
    let reactor = Reactor::open(IoChoice::Auto, 1 << 20).unwrap();
    let mut volume = BlockingVolume::connect(reactor, address, "disk", VolumeOptions::new(0x30)).unwrap();
    volume.flush().unwrap();
    let took = server.join().unwrap();
    let pauses: Duration = (0..BUSY as u32).map(|at| (BUSY_PAUSE_MIN * (1 << at)).min(BUSY_PAUSE_MAX)).sum();
    assert!(took >= pauses, "{BUSY} times more within {took:?}, not {pauses:?}");
}
