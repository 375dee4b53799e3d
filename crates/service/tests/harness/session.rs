//! A session that a test speaks by hand, and what it leaves behind.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use byway_fabric::session::{Identity, hello, read_welcome};
use byway_fabric::wire::{FLAG_GRANT, FLAG_PLACED, Grant, HEADER_BYTES, Header, Kind};
use byway_fabric::{ClientId, CloseReason, PayloadChecksum, Terms};
use byway_reactor::{Address, IoChoice};
use byway_rpc::wire::{CallBody, ReplyBody};
use byway_service::block::client::VolumeOptions;
use byway_service::block::wire::{Arguments, Method};
use zerocopy::{FromZeros, IntoBytes};

use super::stream::Stream;
use super::{Running, client};

/// One connection, spoken by hand.
pub struct Lane {
    pub stream: Stream,
    pub sequence_out: u64,
    sequence_in: u64,
}

impl Lane {
    pub fn open(server: &Running) -> Self {
        let stream = Stream::connect(&server.address).unwrap();
        Self { stream, sequence_out: 0, sequence_in: 0 }
    }

    pub fn send(&mut self, mut header: Header, payload: &[u8]) {
        header.payload_len.set(payload.len() as u32);
        self.send_sealed(header, payload);
    }

    pub fn send_sealed(&mut self, mut header: Header, payload: &[u8]) {
        header.seal(self.sequence_out);
        self.sequence_out += 1;
        // A server that has closed already may answer with a reset: what it says is looked at elsewhere.
        let _ = self.stream.write_all(&[header.as_bytes(), payload].concat());
    }

    /// The next message (without its payload, if that was placed), or `None` when the server has closed.
    pub fn receive(&mut self) -> Option<(Header, Kind, Vec<u8>)> {
        let mut bytes = [0; HEADER_BYTES];
        self.stream.read_exact(&mut bytes).ok()?;
        let (header, kind) = Header::open(&bytes, self.sequence_in).unwrap();
        self.sequence_in += 1;
        let placed = header.flags & FLAG_PLACED != 0;
        let mut payload = vec![0; if placed { 0 } else { header.payload_len() }];
        self.stream.read_exact(&mut payload).ok()?;
        Some((header, kind, payload))
    }
}

pub const TERMS: Terms = Terms { checksum: PayloadChecksum::Off, bulk_lanes: 1, credits: 0 };

/// A session by hand: control lane and, but over RDMA, one bulk lane.
pub struct Session {
    pub control: Lane,
    bulk: Option<Lane>,
}

impl Session {
    pub fn open(server: &Running, client: u8, checksum: PayloadChecksum) -> Self {
        let terms = Terms { checksum, ..TERMS };
        let identity = Identity { client: ClientId([client; 16]), number: 1, nonce: [client; 16] };
        let open = |number| {
            let mut lane = Lane::open(server);
            lane.send(hello(&identity, &terms, number), &[]);
            let (header, kind, _) = lane.receive().unwrap();
            read_welcome(&header, kind, &identity, &terms).unwrap();
            lane
        };
        let control = open(0);
        Self { control, bulk: (!matches!(server.address, Address::Rdma(_))).then(|| open(1)) }
    }

    /// One that has a lane for payloads which has not said `Hello`.
    pub fn with(control: Lane, bulk: Lane) -> Self {
        Self { control, bulk: Some(bulk) }
    }

    pub fn bulk(&mut self) -> &mut Lane {
        self.bulk.as_mut().expect("a wire with bulk lanes")
    }

    pub fn call(&mut self, id: u64, method: Method, arguments: Arguments, window: (u64, u32), payload: &[u8]) {
        self.control.send(call_header(id, method, arguments, window), payload);
    }

    /// The same over RDMA, with a grant that says where the window lies.
    pub fn call_granted(&mut self, method: Method, arguments: Arguments, window: (u64, u32), grant: Grant) {
        let mut header = call_header(0, method, arguments, window);
        header.flags |= FLAG_GRANT;
        self.control.send(header, grant.as_bytes());
    }

    pub fn open_volume(&mut self) {
        self.call(0, Method::Open, Arguments::new_zeroed(), (0, 0), b"disk");
        let (header, kind, _) = self.control.receive().unwrap();
        assert_eq!((kind, header.body::<ReplyBody>().status.get()), (Kind::Reply, 0));
    }
}

fn call_header(id: u64, method: Method, arguments: Arguments, window: (u64, u32)) -> Header {
    let mut body = CallBody::new_zeroed();
    body.call.set(id);
    body.method.set(method as u16);
    body.window_len.set(window.1);
    body.arguments.copy_from_slice(arguments.as_bytes());
    let mut header = Header::with_body(Kind::Call, &body);
    header.window.set(window.0);
    header
}

/// Waits until the server has closed something for that reason.
pub fn closed_for(server: &Running, reason: CloseReason) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while server.state.lock().unwrap().last_closed != Some(reason) {
        assert!(Instant::now() < deadline, "expected {reason:?}, but {:?}", server.state.lock().unwrap());
        std::thread::yield_now();
    }
}

/// Other clients are served as ever, and the memory of those that went is back.
pub fn nobody_else_noticed(server: &Running) {
    let mut volume = client(IoChoice::Epoll, &server.address, VolumeOptions::new(0x30)).unwrap();
    volume.write(0, &vec![5; 70_000], false).unwrap();
    let mut back = vec![0; 70_000];
    volume.read(0, &mut back).unwrap();
    assert!(back.iter().all(|byte| *byte == 5));
    drop(volume);
    let deadline = Instant::now() + Duration::from_secs(30);
    while server.state.lock().unwrap().used_frame_bytes > 0 {
        assert!(Instant::now() < deadline, "memory is missing: {:?}", server.state.lock().unwrap());
        std::thread::yield_now();
    }
}
