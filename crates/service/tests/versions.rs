//! Peers of other versions, of byway's wire or of a service's protocol, are refused by name.

mod harness;

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use byway_fabric::node::{Deadline, NodeOptions, OpError, parse_address};
use byway_fabric::session::{Identity, hello, read_welcome};
use byway_fabric::wire::{HEADER_BYTES, Kind, Refuse, RefuseCode};
use byway_fabric::{ClientId, Options, Registry};
use byway_reactor::{Address, IoChoice, Reactor, Wait};
use byway_rpc::message::{ReplyBody, Status};
use byway_rpc::node::{Call, Rpc};
use byway_rpc::protocol::{CALLS_FILES, CALLS_VOLUMES};
use byway_rpc::session::{Spoken, Versions};
use byway_service::block::client::{ConnectError, VolumeOptions};
use byway_service::block::server::Volumes;
use byway_service::block::wire::{Arguments, CallError, Method, VERSIONS};
use byway_service::file;
use byway_service::file::client::{Client, ClientError, ClientOptions};
use byway_service::file::server::Shares;
use byway_service::host::Host;
use byway_service::memory::wire::LendError;
use byway_service::memory::{BorrowError, Borrower, Lender};
use harness::session::{Lane, TERMS, call_header, nobody_else_noticed, protocols};
use harness::{Running, SERVER, client, each_stream, memory};
use zerocopy::FromZeros;

/// The first 72 bytes of a Hello as programs of wire version 1 sent it; the other 56 are 0.
const HELLO_1: &str = "5d0be9f10100000000000000000000000000000000000000000000000000000000000000000000000000000000000000\
                       627977617946414201000100000001000000000000000000020202020202020202020202020202020101010101010101\
                       010101010101010103000000000000000000100000000000";

fn bytes(hex: &str) -> [u8; HEADER_BYTES] {
    std::array::from_fn(|at| hex.get(at * 2..at * 2 + 2).map_or(0, |byte| u8::from_str_radix(byte, 16).unwrap()))
}

#[test]
fn wire_version_1_is_refused_by_name_over_each_stream() {
    each_stream(|wire| {
        let server = Running::start(wire, None, 1, Options::new(SERVER), vec![memory(4 << 20)]);
        let mut lane = Lane::open(&server);
        lane.stream.write_all(&bytes(HELLO_1)).unwrap();
        let (header, kind, _) = lane.receive().expect("it is answered");
        let refuse: Refuse = header.body();
        assert_eq!((kind, RefuseCode::from_number(refuse.code.get())), (Kind::Refuse, RefuseCode::Version));
        assert_eq!((refuse.version_min.get(), refuse.version_max.get()), (2, 2), "it says which versions it speaks");
        assert!(lane.receive().is_none(), "then the server closes");
        nobody_else_noticed(&server);
    });
}

/// A session whose client speaks the next version of volumes: its calls are answered, each by name, and the session stays.
#[test]
fn calls_in_another_version_of_volumes_are_answered_by_name() {
    let server = Running::start(IoChoice::Epoll, None, 1, Options::new(SERVER), vec![memory(4 << 20)]);
    let identity = Identity { client: ClientId([1; 16]), number: 1, nonce: [1; 16] };
    let mut control = Lane::open(&server);
    control.send(hello(&identity, &TERMS, 0), &[]);
    let (header, kind, _) = control.receive().unwrap();
    read_welcome(&header, kind, &identity, &TERMS).unwrap();
    let (header, mut entry) = protocols();
    let next = (VERSIONS.newest + 1).to_le_bytes();
    entry[2..4].copy_from_slice(&next);
    entry[4..6].copy_from_slice(&next);
    control.send(header, &entry);
    assert_eq!(control.receive().unwrap().1, Kind::Protocols);
    for number in 0..3 {
        control.send(call_header(number, Method::Open, Arguments::new_zeroed(), (0, 0)).0, b"disk");
        let (header, kind, _) = control.receive().expect("it is answered");
        assert_eq!((kind, header.body::<ReplyBody>().status.get()), (Kind::Reply, Status::Version as u16));
    }
    drop(control);
    nobody_else_noticed(&server);
}

/// A server that speaks the next version of each protocol.
struct Next {
    at: Address,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

fn next_version(spoken: Spoken) -> Spoken {
    Spoken { versions: Versions::only(spoken.versions.newest + 1), ..spoken }
}

impl Next {
    fn start() -> Self {
        let (send, receive) = std::sync::mpsc::channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut reactor = Reactor::open(IoChoice::Epoll, 4 << 20).unwrap();
            let spoken = [Volumes::spoken(8), Shares::spoken(8), Lender::spoken()].map(next_version).to_vec();
            let mut host = Host::new(&reactor, Arc::new(Registry::new(1)), Options::new(SERVER), spoken);
            let listener = host.listen(&mut reactor, &Address::Tcp("127.0.0.1:0".parse().unwrap())).unwrap();
            send.send(reactor.local_address(listener).map(Address::Tcp).unwrap()).unwrap();
            let mut completions = Vec::new();
            while !stopped.load(Ordering::Acquire) {
                host.flush(&mut reactor, &mut []);
                reactor.reap(&mut completions, Wait::Until(reactor.now() + Duration::from_millis(20))).unwrap();
                for completion in completions.drain(..) {
                    host.handle(&mut reactor, &mut [], completion);
                }
            }
        });
        Self { at: receive.recv().unwrap(), stop, thread: Some(thread) }
    }
}

impl Drop for Next {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[test]
fn clients_learn_that_a_server_speaks_another_version() {
    let server = Next::start();
    let volume = client(IoChoice::Epoll, &server.at, VolumeOptions::new(0x30)).map(drop).unwrap_err();
    assert!(matches!(volume, ConnectError::Open(CallError::NotServed(Status::Version))), "{volume:?}");
    let files = Client::connect(ClientOptions::new(server.at.clone(), "share")).map(drop).unwrap_err();
    let by_name = |error: &ClientError| {
        matches!(error, ClientError::Refused { error: file::wire::CallError::NotServed(Status::Version), .. })
    };
    assert!(by_name(&files), "{files:?}");
    let said = files.to_string();
    assert!(said.contains("the peer speaks other versions of the protocol"), "an operator reads: {said}");
    let rpc = Borrower::open_node(&NodeOptions::default()).unwrap();
    let borrower = Borrower::connect_on(&rpc, &server.at, Duration::from_secs(20)).unwrap();
    let memory = borrower.status().unwrap_err();
    assert!(matches!(memory, BorrowError::Lender(LendError::Version)), "{memory:?}");
}

/// A program's own calls, of volumes and of files: before the server's list of protocols has come, and after.
#[test]
fn calls_of_a_program_to_a_server_of_another_version_end_by_name() {
    let server = Next::start();
    let soon = || Deadline::after(Duration::from_secs(20));
    let rpc = Rpc::open_for(&NodeOptions::default(), vec![CALLS_VOLUMES, CALLS_FILES]).unwrap();
    let session = rpc.node().connect(&parse_address(&server.at.to_string()).unwrap(), soon()).unwrap();
    for _ in 0..2 {
        for protocol in [CALLS_VOLUMES.protocol, CALLS_FILES.protocol] {
            let called = rpc.call(session, &Call { protocol, method: 1, ..Call::default() }, soon()).unwrap();
            assert_eq!(called.wait(soon()).unwrap(), Err(OpError::Status(Status::Version as u16)));
        }
    }
}
