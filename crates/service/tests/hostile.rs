//! What a client that breaks the rules gets: its own connection ends, by a named reason, and nobody else notices.

mod harness;

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use byway_fabric::limits::{LOOP_HEAP_BYTES_MAX, SESSION_HEAP_BYTES_MAX};
use byway_fabric::rdma::WorkError;
use byway_fabric::rdma::transport::Down;
use byway_fabric::session::{Identity, hello, read_welcome};
use byway_fabric::wire::{
    FLAG_PAYLOAD_CHECKSUM, FLAG_TOKEN, Grant, HEADER_BYTES, Header, HeaderError, Kind, Pull, Refuse, RefuseCode,
};
use byway_fabric::{ClientId, CloseReason, Options, PayloadChecksum, Terms};
use byway_reactor::IoChoice;
use byway_rpc::message::{CallBody, ReplyBody, Status, TOKEN_BYTES};
use byway_service::block::client::VolumeOptions;
use byway_service::block::wire::{Arguments, CallError, FLAG_READ_ONLY, Method, status_of};
use byway_service::block::{BlockError, Store, Volume, VolumeOptions as Served};
use harness::session::{Lane, Session, TERMS, call_header, closed_for, nobody_else_noticed};
use harness::{Path, Running, SERVER, Wire, client, memory};
use zerocopy::FromZeros;

macro_rules! over_each_path {
    ([$($module:ident = $path:expr),* $(,)?], $cases:tt) => {
        $(over_each_path! { @ $module, $path, $cases })*
    };
    (@ $module:ident, $path:expr, [$($case:ident),* $(,)?]) => {
        mod $module {
            use crate::harness::Path;

            $(#[test]
            fn $case() {
                if !$path.is_there() {
                    return byway_skip::skip_this(byway_skip::NO_RDMA);
                }
                super::$case($path);
            })*
        }
    };
}

over_each_path! {
    [over_tcp = Path::Tcp, over_shared_memory = Path::SharedMemory],
    [
        garbage_is_not_byway,
        a_truncated_hello_is_named,
        another_version_and_an_unknown_session_are_refused_by_name,
        bad_headers_end_the_session,
        lengths_beyond_what_was_agreed_end_the_session,
        more_calls_than_granted_end_the_session,
        a_call_before_the_protocols_ends_the_session,
        what_is_not_served_is_answered_by_name,
        a_wrong_payload_checksum_ends_the_session,
        a_guessed_window_is_refused_and_the_session_goes_on,
        a_call_for_no_bytes_is_answered,
        who_opened_a_volume_to_read_it_cannot_write,
        a_client_that_takes_no_answers_is_held_back_and_is_served_when_it_does,
        many_clients_that_take_no_answers_share_one_bound,
        a_long_read_without_a_bulk_lane_is_refused,
        a_client_that_vanishes_in_mid_write_leaves_nothing,
    ]
}

// Without bulk lanes and payload checksums, and with messages instead of a stream; what only RDMA has comes last.
over_each_path! {
    [over_rdma = Path::Rdma],
    [
        garbage_is_not_byway,
        another_version_and_an_unknown_session_are_refused_by_name,
        bad_headers_end_the_session,
        more_calls_than_granted_end_the_session,
        a_call_for_no_bytes_is_answered,
        who_opened_a_volume_to_read_it_cannot_write,
        a_client_that_takes_no_answers_is_held_back_and_is_served_when_it_does,
        a_message_with_another_length_than_it_says_ends_the_session,
        a_window_without_a_grant_is_refused_and_the_session_goes_on,
        a_key_that_opens_nothing_ends_the_session,
        who_breaks_off_in_mid_message_takes_no_receives_from_those_who_stay,
    ]
}

fn server(path: Path) -> Running {
    Running::start(Wire { io: IoChoice::Epoll, path }, None, 1, Options::new(SERVER), vec![memory(4 << 20)])
}

fn garbage_is_not_byway(path: Path) {
    let server = server(path);
    for _ in 0..50 {
        let mut lane = Lane::open(&server);
        lane.stream.write_all(&[0x5a; 4096]).unwrap();
        assert!(lane.receive().is_none());
    }
    closed_for(&server, CloseReason::NotByway);
    nobody_else_noticed(&server);
}

fn a_truncated_hello_is_named(path: Path) {
    let server = server(path);
    let mut lane = Lane::open(&server);
    lane.stream.write_all(b"byway").unwrap();
    drop(lane);
    closed_for(&server, CloseReason::Truncated);
    nobody_else_noticed(&server);
}

fn another_version_and_an_unknown_session_are_refused_by_name(path: Path) {
    let server = server(path);
    let identity = Identity { client: ClientId([1; 16]), number: 1, nonce: [1; 16] };
    let mut old = hello(&identity, &TERMS, 0);
    old.body[8..12].copy_from_slice(&[99, 0, 99, 0]);
    // Over RDMA no session has a second lane.
    let second = if path == Path::Rdma { RefuseCode::Protocol } else { RefuseCode::UnknownSession };
    for (hello, code) in [(old, RefuseCode::Version), (hello(&identity, &TERMS, 1), second)] {
        let mut lane = Lane::open(&server);
        lane.send(hello, &[]);
        let (header, kind, _) = lane.receive().unwrap();
        assert_eq!((kind, RefuseCode::from_number(header.body::<Refuse>().code.get())), (Kind::Refuse, code));
        assert!(lane.receive().is_none());
    }
    nobody_else_noticed(&server);
}

fn bad_headers_end_the_session(path: Path) {
    let server = server(path);
    let mut session = Session::open(&server, 1, PayloadChecksum::Off);
    session.control.sequence_out = 7;
    session.control.send(Header::new(Kind::Ping), &[]);
    closed_for(&server, CloseReason::Header(HeaderError::Sequence { expected: 2, got: 7 }));
    let mut session = Session::open(&server, 2, PayloadChecksum::Off);
    session.control.stream.write_all(&[1; HEADER_BYTES]).unwrap();
    closed_for(&server, CloseReason::Header(HeaderError::Checksum));
    let mut session = Session::open(&server, 3, PayloadChecksum::Off);
    session.control.send(Header::new(Kind::Welcome), &[]);
    closed_for(&server, CloseReason::Unexpected(Kind::Welcome));
    nobody_else_noticed(&server);
}

fn lengths_beyond_what_was_agreed_end_the_session(path: Path) {
    let server = server(path);
    let mut session = Session::open(&server, 4, PayloadChecksum::Off);
    let mut long = Header::new(Kind::Call);
    long.payload_len.set(1 << 30);
    session.control.send_sealed(long, &[]);
    closed_for(&server, CloseReason::Oversize(1 << 30));
    let mut session = Session::open(&server, 5, PayloadChecksum::Off);
    let mut long = Header::new(Kind::Data);
    long.payload_len.set(1 << 31);
    session.bulk().send_sealed(long, &[]);
    closed_for(&server, CloseReason::Oversize(1 << 31));
    nobody_else_noticed(&server);
}

fn more_calls_than_granted_end_the_session(path: Path) {
    let server = server(path);
    let mut session = Session::open(&server, 1, PayloadChecksum::Off);
    session.call(5000, Method::Flush, Arguments::new_zeroed(), (0, 0), &[]);
    closed_for(&server, CloseReason::Credit);
    nobody_else_noticed(&server);
}

fn a_call_before_the_protocols_ends_the_session(path: Path) {
    let server = server(path);
    let identity = Identity { client: ClientId([1; 16]), number: 1, nonce: [1; 16] };
    let mut lane = Lane::open(&server);
    lane.send(hello(&identity, &TERMS, 0), &[]);
    assert_eq!(lane.receive().unwrap().1, Kind::Welcome);
    lane.send(call_header(0, Method::Open, Arguments::new_zeroed(), (0, 0)).0, b"disk");
    closed_for(&server, CloseReason::Credit);
    nobody_else_noticed(&server);
}

fn what_is_not_served_is_answered_by_name(path: Path) {
    let server = server(path);
    let mut session = Session::open(&server, 1, PayloadChecksum::Off);
    session.open_volume();
    let of = |change: fn(&mut CallBody)| {
        let (header, _) = call_header(0, Method::Flush, Arguments::new_zeroed(), (0, 0));
        let mut body: CallBody = header.body();
        change(&mut body);
        Header::with_body(Kind::Call, &body)
    };
    // A token, as if another node had handed the call on.
    let token = [7; TOKEN_BYTES];
    let mut delegated = of(|_| ());
    delegated.flags |= FLAG_TOKEN;
    let malformed = status_of(CallError::Malformed).0;
    for (header, payload, status) in [
        (of(|body| body.protocol = 99), &[][..], Status::UnknownProtocol as u16),
        (of(|body| body.method.set(999)), &[], Status::UnknownMethod as u16),
        (delegated, &token, malformed),
        (of(|_| ()), &[], 0),
    ] {
        session.control.send(header, payload);
        let (header, kind, _) = session.control.receive().expect("it is answered");
        assert_eq!((kind, header.body::<ReplyBody>().status.get()), (Kind::Reply, status));
    }
    drop(session);
    nobody_else_noticed(&server);
}

fn a_wrong_payload_checksum_ends_the_session(path: Path) {
    let server = server(path);
    let mut session = Session::open(&server, 1, PayloadChecksum::Required);
    let mut header = Header::with_body(Kind::Call, &CallBody::new_zeroed());
    header.flags = FLAG_PAYLOAD_CHECKSUM;
    header.payload_checksum.set(12345);
    session.control.send(header, b"disk");
    closed_for(&server, CloseReason::PayloadChecksum);
    nobody_else_noticed(&server);
}

fn a_guessed_window_is_refused_and_the_session_goes_on(path: Path) {
    let server = server(path);
    let mut session = Session::open(&server, 1, PayloadChecksum::Off);
    session.open_volume();
    let mut data = Header::new(Kind::Data);
    data.window.set(0x1234_5678_9abc_def0);
    session.bulk().send(data, &vec![9; 100_000]);
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
    session.bulk().send(data, &vec![9; 65_536]);
    let (header, kind, _) = session.control.receive().unwrap();
    assert_eq!((kind, header.window_offset.get()), (Kind::Nack, 2));
    data.window_offset.set(0);
    session.bulk().send(data, &vec![8; 65_536]);
    let (header, kind, _) = session.control.receive().unwrap();
    assert_eq!((kind, header.body::<ReplyBody>().status.get()), (Kind::Reply, 0));
    arguments.len.set(512);
    session.call(0, Method::Read, arguments, (0, 0), &[]);
    let (_, _, payload) = session.control.receive().unwrap();
    assert_eq!(payload, [8; 512]);
    drop(session);
    nobody_else_noticed(&server);
}

fn a_call_for_no_bytes_is_answered(path: Path) {
    let volume = Arc::new(Volume::new("disk", Store::null(1 << 20), Served::default()));
    for volume in [memory(4 << 20), volume] {
        let server = Running::start(Wire { io: IoChoice::Epoll, path }, None, 1, Options::new(SERVER), vec![volume]);
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

fn a_client_that_takes_no_answers_is_held_back_and_is_served_when_it_does(path: Path) {
    const CALLS: usize = 2000;
    let server = Running::start(Wire { io: IoChoice::Epoll, path }, None, 1, Options::new(SERVER), talkative());
    let mut session = Session::open(&server, 1, PayloadChecksum::Off);
    for _ in 0..CALLS {
        session.call(0, Method::List, Arguments::new_zeroed(), (0, 0), &[]);
    }
    let held = || server.state.lock().unwrap().queued_heap_bytes_max > SESSION_HEAP_BYTES_MAX;
    let deadline = Instant::now() + Duration::from_secs(30);
    while !held() {
        assert!(Instant::now() < deadline, "{:?}", server.state.lock().unwrap());
        session.control.stream.turn();
        std::thread::yield_now();
    }
    let mut volume = client(IoChoice::Epoll, &server.address, VolumeOptions::new(0x30)).unwrap();
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

fn many_clients_that_take_no_answers_share_one_bound(path: Path) {
    let server = Running::start(Wire { io: IoChoice::Epoll, path }, None, 1, Options::new(SERVER), talkative());
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

/// What it was told when it opened the volume is not left to the client to keep to.
fn who_opened_a_volume_to_read_it_cannot_write(path: Path) {
    let server = server(path);
    let mut session = Session::open(&server, 1, PayloadChecksum::Off);
    let mut arguments = Arguments::new_zeroed();
    arguments.flags.set(FLAG_READ_ONLY);
    session.call(0, Method::Open, arguments, (0, 0), b"disk");
    let (header, ..) = session.control.receive().unwrap();
    assert_eq!(header.body::<ReplyBody>().status.get(), 0);
    let read_only = status_of(BlockError::ReadOnly.into()).0;
    for (method, len, window, payload) in [
        (Method::Write, 512, (0, 0), vec![7; 512]),
        (Method::Write, 65_536, (77, 65_536), Vec::new()),
        (Method::Trim, 4096, (0, 0), Vec::new()),
        (Method::Zero, 4096, (0, 0), Vec::new()),
    ] {
        let mut arguments = Arguments::new_zeroed();
        arguments.len.set(len);
        session.call(0, method, arguments, window, &payload);
        let (header, kind, _) = session.control.receive().unwrap();
        assert_eq!((kind, header.body::<ReplyBody>().status.get()), (Kind::Reply, read_only), "{method:?} of {len}");
    }
    // It may read, and flush what others wrote.
    let mut arguments = Arguments::new_zeroed();
    arguments.len.set(512);
    session.call(0, Method::Read, arguments, (0, 0), &[]);
    let (_, _, bytes) = session.control.receive().unwrap();
    assert_eq!(bytes, [0; 512]);
    session.call(0, Method::Flush, Arguments::new_zeroed(), (0, 0), &[]);
    let (header, ..) = session.control.receive().unwrap();
    assert_eq!(header.body::<ReplyBody>().status.get(), 0);
}

fn a_long_read_without_a_bulk_lane_is_refused(path: Path) {
    let server = server(path);
    let terms = Terms { bulk_lanes: 1, ..TERMS };
    let identity = Identity { client: ClientId([1; 16]), number: 1, nonce: [1; 16] };
    let mut control = Lane::open(&server);
    control.send(hello(&identity, &terms, 0), &[]);
    let (header, kind, _) = control.receive().unwrap();
    read_welcome(&header, kind, &identity, &terms).unwrap();
    let mut session = Session::with(control, Lane::open(&server));
    session.open_volume();
    let mut arguments = Arguments::new_zeroed();
    arguments.len.set(65_536);
    session.call(0, Method::Read, arguments, (77, 65_536), &[]);
    let (header, kind, _) = session.control.receive().unwrap();
    assert_eq!((kind, header.body::<ReplyBody>().status.get()), (Kind::Reply, 11));
}

fn a_client_that_vanishes_in_mid_write_leaves_nothing(path: Path) {
    let server = server(path);
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
    session.bulk().send_sealed(data, &[9; 1000]);
    drop(session);
    let mut volume = client(IoChoice::Epoll, &server.address, VolumeOptions::new(0x30)).unwrap();
    let mut back = vec![1; 4096];
    volume.read(0, &mut back).unwrap();
    assert!(back.iter().all(|byte| *byte == 0), "a piece that never arrived whole was written");
    drop(volume);
    nobody_else_noticed(&server);
}

fn a_message_with_another_length_than_it_says_ends_the_session(path: Path) {
    let server = server(path);
    for (client, len) in [(1, 1 << 30), (2, 4), (3, 0)] {
        let mut session = Session::open(&server, client, PayloadChecksum::Off);
        let mut header = Header::new(Kind::Call);
        header.payload_len.set(len);
        session.control.send_sealed(header, b"disks");
        closed_for(&server, CloseReason::Truncated);
        assert!(session.control.receive().is_none());
        nobody_else_noticed(&server);
    }
}

/// The arguments of a write, or a read, of 64 KiB.
fn of_64_kib() -> Arguments {
    let mut arguments = Arguments::new_zeroed();
    arguments.len.set(65_536);
    arguments
}

fn a_window_without_a_grant_is_refused_and_the_session_goes_on(path: Path) {
    let server = server(path);
    let mut session = Session::open(&server, 1, PayloadChecksum::Off);
    session.open_volume();
    session.call(0, Method::Write, of_64_kib(), (77, 65_536), &[]);
    let (header, kind, _) = session.control.receive().unwrap();
    assert_eq!(kind, Kind::Reply);
    assert!(header.body::<ReplyBody>().status.get() != 0, "nothing can have been written");
    // A grant for less than the call wants.
    let grant = Grant::new(4096, 65_535, 1);
    session.call_granted(Method::Write, of_64_kib(), (77, 65_536), grant);
    let (header, kind, _) = session.control.receive().unwrap();
    assert_eq!(kind, Kind::Reply);
    assert!(header.body::<ReplyBody>().status.get() != 0, "it reaches over the end of what was granted");
    let mut arguments = Arguments::new_zeroed();
    arguments.len.set(512);
    session.call(0, Method::Read, arguments, (0, 0), &[]);
    let (_, _, payload) = session.control.receive().unwrap();
    assert_eq!(payload, [0; 512]);
    drop(session);
    nobody_else_noticed(&server);
}

fn a_key_that_opens_nothing_ends_the_session(path: Path) {
    let server = server(path);
    for (client, method) in [(1, Method::Write), (2, Method::Read)] {
        let mut session = Session::open(&server, client, PayloadChecksum::Off);
        session.open_volume();
        let grant = Grant::new(4096, 65_536, 0x1234_5678);
        session.call_granted(method, of_64_kib(), (77, 65_536), grant);
        closed_for(&server, CloseReason::Rdma(Down::Work(WorkError::RemoteAccess)));
        assert!(session.control.receive().is_none());
        nobody_else_noticed(&server);
    }
}

/// soft-RoCE loses a receive that a message has begun to fill when its connection ends: of these 800, some fifty (13 of 200 were
/// counted), where 36 are two connections' own.
fn who_breaks_off_in_mid_message_takes_no_receives_from_those_who_stay(path: Path) {
    let server = server(path);
    let mut stays = Session::open(&server, 1, PayloadChecksum::Off);
    stays.open_volume();
    for round in 0..800 {
        // The server ends the connection for the first of them, while the others come.
        let mut lane = Lane::open(&server);
        for _ in 0..=round % 16 {
            let _ = lane.stream.write_all(&[0x5a; HEADER_BYTES + (16 << 10)]);
        }
    }
    for _ in 0..50 {
        let mut arguments = Arguments::new_zeroed();
        arguments.len.set(512);
        stays.call(0, Method::Read, arguments, (0, 0), &[]);
        let (_, kind, payload) = stays.control.receive().expect("it is served");
        assert_eq!((kind, payload), (Kind::Reply, vec![0; 512]));
    }
    drop(stays);
    nobody_else_noticed(&server);
}
