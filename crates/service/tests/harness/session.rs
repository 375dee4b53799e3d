//! A session that a test speaks by hand, and what it leaves behind.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use byway_fabric::session::{Identity, hello, read_welcome};
use byway_fabric::wire::{FLAG_GRANT, FLAG_PAYLOAD_CHECKSUM, FLAG_PLACED, Grant, HEADER_BYTES, Header, Kind};
use byway_fabric::{ClientId, CloseReason, Descriptor, PayloadChecksum, Terms, WindowKey};
use byway_reactor::{Address, IoChoice};
use byway_rpc::message::{CallBody, ProtocolEntry, ProtocolsBody, ReplyBody};
use byway_service::block::client::VolumeOptions;
use byway_service::block::wire::{Arguments, Method, PROTOCOL, VERSIONS};
use byway_service::limits::NOTICES_PER_SESSION;
use zerocopy::{FromZeros, IntoBytes};

use super::stream::Stream;
use super::{Running, client};

/// One connection, spoken by hand.
pub struct Lane {
    pub stream: Stream,
    pub sequence_out: u64,
    /// Payloads have checksums.
    pub checks: bool,
    sequence_in: u64,
}

impl Lane {
    pub fn open(server: &Running) -> Self {
        let stream = Stream::connect(&server.address).unwrap();
        Self { stream, sequence_out: 0, checks: false, sequence_in: 0 }
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

pub const TERMS: Terms = Terms { checksum: PayloadChecksum::Off, bulk_lanes: 1 };

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
            lane.checks = read_welcome(&header, kind, &identity, &terms).unwrap().payload_checksum();
            lane
        };
        let mut control = open(0);
        introduce(&mut control);
        Self { control, bulk: (!matches!(server.address, Address::Rdma(_))).then(|| open(1)) }
    }

    /// One that has a lane for payloads which has not said `Hello`.
    pub fn with(mut control: Lane, bulk: Lane) -> Self {
        introduce(&mut control);
        Self { control, bulk: Some(bulk) }
    }

    pub fn bulk(&mut self) -> &mut Lane {
        self.bulk.as_mut().expect("a wire with bulk lanes")
    }

    pub fn call(&mut self, id: u64, method: Method, arguments: Arguments, window: (u64, u32), payload: &[u8]) {
        let (header, windows) = call_header(id, method, arguments, window);
        self.control.send(header, &[&windows, payload].concat());
    }

    /// The same over RDMA, with a grant that says where the window lies.
    pub fn call_granted(&mut self, method: Method, arguments: Arguments, window: (u64, u32), grant: Grant) {
        let (mut header, windows) = call_header(0, method, arguments, window);
        header.flags |= FLAG_GRANT;
        self.control.send(header, &[grant.as_bytes(), &windows].concat());
    }

    pub fn open_volume(&mut self) {
        self.call(0, Method::Open, Arguments::new_zeroed(), (0, 0), b"disk");
        let (header, kind, _) = self.control.receive().unwrap();
        assert_eq!((kind, header.body::<ReplyBody>().status.get()), (Kind::Reply, 0));
    }
}

/// A client's `Protocols`: it calls by the protocol of volumes, and takes notices.
pub fn protocols() -> (Header, Vec<u8>) {
    let mut body = ProtocolsBody::new_zeroed();
    body.count.set(1);
    let entry = ProtocolEntry {
        protocol: PROTOCOL,
        serves: 1,
        version_min: VERSIONS.oldest.into(),
        version_max: VERSIONS.newest.into(),
        calls: 0.into(),
        notices: NOTICES_PER_SESSION.into(),
    };
    (Header::with_body(Kind::Protocols, &body), entry.as_bytes().to_vec())
}

/// The two ends say what they speak.
pub fn introduce(control: &mut Lane) {
    let (mut header, entry) = protocols();
    if control.checks {
        header.flags |= FLAG_PAYLOAD_CHECKSUM;
        header.payload_checksum.set(crc32c::crc32c(&entry));
    }
    control.send(header, &entry);
    let (_, kind, _) = control.receive().unwrap();
    assert_eq!(kind, Kind::Protocols);
}

/// A call's header, and the descriptor of its window, if it has one.
pub fn call_header(id: u64, method: Method, arguments: Arguments, window: (u64, u32)) -> (Header, Vec<u8>) {
    let key = Some(WindowKey(window.0)).filter(|key| key.0 != 0);
    let windows = key.map_or(Vec::new(), |_| Descriptor::new(key, key, window.1 as usize).to_bytes().to_vec());
    let mut body = CallBody::new_zeroed();
    body.call.copy_from_slice(&id.to_le_bytes()[..7]);
    body.inline_len = 64;
    body.protocol = PROTOCOL;
    body.method.set(method as u16);
    body.windows = u8::from(key.is_some());
    body.arguments.copy_from_slice(arguments.as_bytes());
    let mut header = Header::with_body(Kind::Call, &body);
    header.window.set(window.0);
    (header, windows)
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
