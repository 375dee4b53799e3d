//! What a client that breaks the rules gets: its own connection ends, by a named reason, and nobody else notices.

mod harness;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use byway_fabric::limits::{LOOP_HEAP_BYTES_MAX, SESSION_HEAP_BYTES_MAX};
use byway_fabric::session::{Identity, hello, read_welcome};
use byway_fabric::wire::{FLAG_PAYLOAD_CHECKSUM, HEADER_BYTES, Header, HeaderError, Kind, Pull, Refuse};
use byway_fabric::{ClientId, CloseReason, Options, PayloadChecksum, Terms};
use byway_reactor::IoChoice;
use byway_rpc::wire::{CallBody, ReplyBody};
use byway_service::block::client::VolumeOptions;
use byway_service::block::wire::{Arguments, Method};
use byway_service::block::{Store, Volume, VolumeOptions as Served};
use harness::{Running, SERVER, client, memory};
use zerocopy::{FromZeros, IntoBytes};

/// One connection, spoken by hand.
struct Lane {
    stream: TcpStream,
    sequence_out: u64,
    sequence_in: u64,
}

impl Lane {
    fn open(server: &Running) -> Self {
        let stream = TcpStream::connect(server.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        Self { stream, sequence_out: 0, sequence_in: 0 }
    }

    fn send(&mut self, mut header: Header, payload: &[u8]) {
        header.payload_len.set(payload.len() as u32);
        self.send_sealed(header, payload);
    }

    fn send_sealed(&mut self, mut header: Header, payload: &[u8]) {
        header.seal(self.sequence_out);
        self.sequence_out += 1;
        // A server that has closed already may answer with a reset: what it says is looked at elsewhere.
        let _ = self.stream.write_all(header.as_bytes());
        let _ = self.stream.write_all(payload);
    }

    /// The next message, or `None` when the server has closed.
    fn receive(&mut self) -> Option<(Header, Kind, Vec<u8>)> {
        let mut bytes = [0; HEADER_BYTES];
        self.stream.read_exact(&mut bytes).ok()?;
        let (header, kind) = Header::open(&bytes, self.sequence_in).unwrap();
        self.sequence_in += 1;
        let mut payload = vec![0; header.payload_len()];
        self.stream.read_exact(&mut payload).ok()?;
        Some((header, kind, payload))
    }
}

const TERMS: Terms = Terms { checksum: PayloadChecksum::Off, bulk_lanes: 1, credits: 0 };

/// A session by hand: control lane and one bulk lane.
struct Session {
    control: Lane,
    bulk: Lane,
}

impl Session {
    fn open(server: &Running, client: u8, checksum: PayloadChecksum) -> Self {
        let terms = Terms { checksum, ..TERMS };
        let identity = Identity { client: ClientId([client; 16]), number: 1, nonce: [client; 16] };
        let mut lanes = [0, 1].map(|number| {
            let mut lane = Lane::open(server);
            lane.send(hello(&identity, &terms, number), &[]);
            let (header, kind, _) = lane.receive().unwrap();
            read_welcome(&header, kind, &identity, &terms).unwrap();
            Some(lane)
        });
        Self { control: lanes[0].take().unwrap(), bulk: lanes[1].take().unwrap() }
    }

    fn call(&mut self, id: u64, method: Method, arguments: Arguments, window: (u64, u32), payload: &[u8]) {
        let mut body = CallBody::new_zeroed();
        body.call.set(id);
        body.method.set(method as u16);
        body.window_len.set(window.1);
        body.arguments.copy_from_slice(arguments.as_bytes());
        let mut header = Header::with_body(Kind::Call, &body);
        header.window.set(window.0);
        self.control.send(header, payload);
    }

    fn open_volume(&mut self) {
        self.call(0, Method::Open, Arguments::new_zeroed(), (0, 0), b"disk");
        let (header, kind, _) = self.control.receive().unwrap();
        assert_eq!((kind, header.body::<ReplyBody>().status.get()), (Kind::Reply, 0));
    }
}

fn server() -> Running {
    Running::start(IoChoice::Epoll, None, 1, Options::new(SERVER), vec![memory(4 << 20)])
}

/// Waits until the server has closed something for that reason.
fn closed_for(server: &Running, reason: CloseReason) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while server.state.lock().unwrap().last_closed != Some(reason) {
        assert!(Instant::now() < deadline, "expected {reason:?}, but {:?}", server.state.lock().unwrap());
        std::thread::yield_now();
    }
}

/// Other clients are served as ever, and the memory of those that went is back.
fn nobody_else_noticed(server: &Running) {
    let mut volume = client(IoChoice::Epoll, server.address, VolumeOptions::new(0x30)).unwrap();
    volume.write(0, &vec![5; 70_000], false).unwrap();
    let mut back = vec![0; 70_000];
    volume.read(0, &mut back).unwrap();
    assert!(back.iter().all(|byte| *byte == 5));
    drop(volume);
    let deadline = Instant::now() + Duration::from_secs(10);
    while server.state.lock().unwrap().used_frame_bytes > 0 {
        assert!(Instant::now() < deadline, "memory is missing: {:?}", server.state.lock().unwrap());
        std::thread::yield_now();
    }
}

#[test]
fn garbage_is_not_byway() {
    let server = server();
    for _ in 0..50 {
        let mut lane = Lane::open(&server);
        lane.stream.write_all(&[0x5a; 4096]).unwrap();
        assert!(lane.receive().is_none());
    }
    closed_for(&server, CloseReason::NotByway);
    nobody_else_noticed(&server);
}

#[test]
fn a_truncated_hello_is_named() {
    let server = server();
    let mut lane = Lane::open(&server);
    lane.stream.write_all(b"byway").unwrap();
    drop(lane);
    closed_for(&server, CloseReason::Truncated);
    nobody_else_noticed(&server);
}

#[test]
fn another_version_and_an_unknown_session_are_refused_by_name() {
    let server = server();
    let identity = Identity { client: ClientId([1; 16]), number: 1, nonce: [1; 16] };
    let mut old = hello(&identity, &TERMS, 0);
    old.body[8..12].copy_from_slice(&[99, 0, 99, 0]);
    for (hello, code) in [(old, 1), (hello(&identity, &TERMS, 1), 6)] {
        let mut lane = Lane::open(&server);
        lane.send(hello, &[]);
        let (header, kind, _) = lane.receive().unwrap();
        assert_eq!((kind, header.body::<Refuse>().code.get()), (Kind::Refuse, code));
        assert!(lane.receive().is_none());
    }
    nobody_else_noticed(&server);
}

#[test]
fn bad_headers_end_the_session() {
    let server = server();
    let mut session = Session::open(&server, 1, PayloadChecksum::Off);
    session.control.sequence_out = 7;
    session.control.send(Header::new(Kind::Ping), &[]);
    closed_for(&server, CloseReason::Header(HeaderError::Sequence { expected: 1, got: 7 }));
    let mut session = Session::open(&server, 2, PayloadChecksum::Off);
    session.control.stream.write_all(&[1; HEADER_BYTES]).unwrap();
    closed_for(&server, CloseReason::Header(HeaderError::Checksum));
    let mut session = Session::open(&server, 3, PayloadChecksum::Off);
    session.control.send(Header::new(Kind::Welcome), &[]);
    closed_for(&server, CloseReason::Unexpected(Kind::Welcome));
    let mut session = Session::open(&server, 4, PayloadChecksum::Off);
    let mut long = Header::new(Kind::Call);
    long.payload_len.set(1 << 30);
    session.control.send_sealed(long, &[]);
    closed_for(&server, CloseReason::Oversize(1 << 30));
    let mut session = Session::open(&server, 5, PayloadChecksum::Off);
    let mut long = Header::new(Kind::Data);
    long.payload_len.set(1 << 31);
    session.bulk.send_sealed(long, &[]);
    closed_for(&server, CloseReason::Oversize(1 << 31));
    nobody_else_noticed(&server);
}

#[test]
fn more_calls_than_granted_end_the_session() {
    let server = server();
    let mut session = Session::open(&server, 1, PayloadChecksum::Off);
    session.call(5000, Method::Flush, Arguments::new_zeroed(), (0, 0), &[]);
    closed_for(&server, CloseReason::Credit);
    nobody_else_noticed(&server);
}

#[test]
fn a_wrong_payload_checksum_ends_the_session() {
    let server = server();
    let mut session = Session::open(&server, 1, PayloadChecksum::Required);
    let mut header = Header::with_body(Kind::Call, &CallBody::new_zeroed());
    header.flags = FLAG_PAYLOAD_CHECKSUM;
    header.payload_checksum.set(12345);
    session.control.send(header, b"disk");
    closed_for(&server, CloseReason::PayloadChecksum);
    nobody_else_noticed(&server);
}

#[test]
fn a_guessed_window_is_refused_and_the_session_goes_on() {
    let server = server();
    let mut session = Session::open(&server, 1, PayloadChecksum::Off);
    session.open_volume();
    let mut data = Header::new(Kind::Data);
    data.window.set(0x1234_5678_9abc_def0);
    session.bulk.send(data, &vec![9; 100_000]);
    let (header, kind, _) = session.control.receive().unwrap();
    assert_eq!((kind, header.window_offset.get()), (Kind::Nack, 1));
    // A write whose data does not come, and then comes into the wrong place of the right window, and then rightly.
    let mut arguments = Arguments::new_zeroed();
    arguments.len.set(65_536);
    session.call(0, Method::Write, arguments, (77, 65_536), &[]);
    let (header, kind, _) = session.control.receive().unwrap();
    let pull: Pull = header.body();
    assert_eq!((kind, header.window.get(), pull.len.get()), (Kind::Pull, 77, 65_536));
    let mut data = Header::new(Kind::Data);
    data.window = pull.target;
    data.window_offset.set(1);
    session.bulk.send(data, &vec![9; 65_536]);
    let (header, kind, _) = session.control.receive().unwrap();
    assert_eq!((kind, header.window_offset.get()), (Kind::Nack, 2));
    data.window_offset.set(0);
    session.bulk.send(data, &vec![8; 65_536]);
    let (header, kind, _) = session.control.receive().unwrap();
    assert_eq!((kind, header.body::<ReplyBody>().status.get()), (Kind::Reply, 0));
    arguments.len.set(512);
    session.call(0, Method::Read, arguments, (0, 0), &[]);
    let (_, _, payload) = session.control.receive().unwrap();
    assert_eq!(payload, [8; 512]);
    drop(session);
    nobody_else_noticed(&server);
}

#[test]
fn a_call_for_no_bytes_is_answered() {
    let volume = Arc::new(Volume::new("disk", Store::null(1 << 20), Served::default()));
    for volume in [memory(4 << 20), volume] {
        let server = Running::start(IoChoice::Epoll, None, 1, Options::new(SERVER), vec![volume]);
        let mut session = Session::open(&server, 1, PayloadChecksum::Off);
        session.open_volume();
        for method in [Method::Read, Method::Write, Method::Trim, Method::Zero, Method::Extents, Method::Prefetch] {
            session.call(0, method, Arguments::new_zeroed(), (0, 0), &[]);
            let (header, kind, payload) = session.control.receive().expect("it is answered");
            assert_eq!((kind, header.body::<ReplyBody>().status.get()), (Kind::Reply, 0), "{method:?}");
            assert_eq!(payload.len(), 0, "{method:?}");
        }
    }
}

/// Volumes whose list fills an answer.
fn talkative() -> Vec<Arc<Volume>> {
    let described = || Served { description: "d".repeat(1000), ..Served::default() };
    let other = |index| Arc::new(Volume::new(format!("v{index}"), Store::null(512), described()));
    (0..20).map(other).chain([memory(4 << 20)]).collect()
}

#[test]
fn a_client_that_takes_no_answers_is_held_back_and_is_served_when_it_does() {
    const CALLS: usize = 2000;
    let server = Running::start(IoChoice::Epoll, None, 1, Options::new(SERVER), talkative());
    let mut session = Session::open(&server, 1, PayloadChecksum::Off);
    for _ in 0..CALLS {
        session.call(0, Method::List, Arguments::new_zeroed(), (0, 0), &[]);
    }
    let held = || server.state.lock().unwrap().queued_heap_bytes_max > SESSION_HEAP_BYTES_MAX;
    let deadline = Instant::now() + Duration::from_secs(10);
    while !held() {
        assert!(Instant::now() < deadline, "{:?}", server.state.lock().unwrap());
        std::thread::yield_now();
    }
    let mut volume = client(IoChoice::Epoll, server.address, VolumeOptions::new(0x30)).unwrap();
    volume.read(0, &mut vec![0; 70_000]).unwrap();
    for at in 0..CALLS {
        let (header, kind, payload) = session.control.receive().unwrap();
        assert_eq!((kind, header.body::<ReplyBody>().status.get()), (Kind::Reply, 0), "answer {at}");
        assert!(payload.len() > 15_000);
    }
    let queued = server.state.lock().unwrap().queued_heap_bytes_max;
    assert!(queued < SESSION_HEAP_BYTES_MAX + (32 << 10), "{queued} bytes waited for one client");
    assert_eq!(server.state.lock().unwrap().last_closed, None);
}

#[test]
fn many_clients_that_take_no_answers_share_one_bound() {
    let server = Running::start(IoChoice::Epoll, None, 1, Options::new(SERVER), talkative());
    let mut sessions: Vec<Session> =
        (1..=60).map(|client| Session::open(&server, client, PayloadChecksum::Off)).collect();
    for _ in 0..500 {
        for session in &mut sessions {
            session.call(0, Method::List, Arguments::new_zeroed(), (0, 0), &[]);
        }
    }
    for session in &mut sessions {
        for at in 0..500 {
            let (header, ..) = session.control.receive().unwrap();
            let status = header.body::<ReplyBody>().status.get();
            assert!(status == 0 || status == 13, "answer {at}: done, or busy");
        }
    }
    let queued = server.state.lock().unwrap().queued_heap_bytes_max;
    assert!(queued > LOOP_HEAP_BYTES_MAX, "the bound was never met: {queued}");
    assert!(queued < LOOP_HEAP_BYTES_MAX + (60 * (20 << 10)), "{queued} bytes waited");
}

#[test]
fn a_long_read_without_a_bulk_lane_is_refused() {
    let server = server();
    let terms = Terms { bulk_lanes: 1, ..TERMS };
    let identity = Identity { client: ClientId([1; 16]), number: 1, nonce: [1; 16] };
    let mut control = Lane::open(&server);
    control.send(hello(&identity, &terms, 0), &[]);
    let (header, kind, _) = control.receive().unwrap();
    read_welcome(&header, kind, &identity, &terms).unwrap();
    let mut session = Session { bulk: Lane::open(&server), control };
    session.open_volume();
    let mut arguments = Arguments::new_zeroed();
    arguments.len.set(65_536);
    session.call(0, Method::Read, arguments, (77, 65_536), &[]);
    let (header, kind, _) = session.control.receive().unwrap();
    assert_eq!((kind, header.body::<ReplyBody>().status.get()), (Kind::Reply, 11));
}

#[test]
fn a_client_that_vanishes_in_mid_write_leaves_nothing() {
    let server = server();
    let mut session = Session::open(&server, 1, PayloadChecksum::Off);
    session.open_volume();
    let mut arguments = Arguments::new_zeroed();
    arguments.len.set(1 << 20);
    session.call(0, Method::Write, arguments, (77, 1 << 20), &[]);
    let (header, _, _) = session.control.receive().unwrap();
    let pull: Pull = header.body();
    let mut data = Header::new(Kind::Data);
    data.window = pull.target;
    data.payload_len = pull.len;
    session.bulk.send_sealed(data, &[9; 1000]);
    drop(session);
    let mut volume = client(IoChoice::Epoll, server.address, VolumeOptions::new(0x30)).unwrap();
    let mut back = vec![1; 4096];
    volume.read(0, &mut back).unwrap();
    assert!(back.iter().all(|byte| *byte == 0), "a piece that never arrived whole was written");
    drop(volume);
    nobody_else_noticed(&server);
}
