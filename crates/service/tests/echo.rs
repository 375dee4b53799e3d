//! A whole service, the smallest that uses windows: it sends a payload back, and reverses the bytes of a window in the caller's memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use byway_fabric::limits::SMALL_BYTES_MAX;
use byway_fabric::node::{Deadline, NodeOptions, OpError, Rights, Session, parse_address};
use byway_fabric::{
    DESCRIPTOR_BYTES, Descriptor, EndedGet, Options, PayloadMeta, Put, Registry, Remote, SessionId, Slot, Slots,
};
use byway_reactor::{Address, Frame, IoChoice, Reactor, Wait};
use byway_rpc::message::Status;
use byway_rpc::node::{Call, Reply, Rpc};
use byway_rpc::session::{CallRef, Grant, Incomer, Spoken, Versions};
use byway_service::host::{At, Host, Service, SmallAnswer};

const ECHO: u8 = 200;
/// Sends the payload back.
const SAY: u16 = 1;
/// Reverses a window, which is for puts and gets.
const REVERSE: u16 = 2;
/// There is no memory for it now.
const BUSY: u16 = 1;

#[derive(Default)]
struct Echo {
    /// Calls whose window is being got.
    reversing: Slots<(CallRef, Descriptor)>,
}

impl Service for Echo {
    fn protocol(&self) -> u8 {
        ECHO
    }

    fn called(&mut self, at: &mut At<'_>, call: CallRef, asked: &Incomer<'_>) {
        let window = asked.windows.first_chunk::<DESCRIPTOR_BYTES>().map(Descriptor::from_bytes);
        let status = match (asked.method, window) {
            (SAY, None) => {
                return at.sessions.answer(at.fabric, call, SmallAnswer::done(&asked.arguments, asked.payload));
            }
            // A window is its session's: a call that was handed on cannot bring one here.
            (REVERSE, Some(window)) if !asked.delegated => match at.reactor.frames().alloc(window.len() as usize) {
                Some(into) => return self.reverse(at, call, window, into),
                None => BUSY,
            },
            (SAY | REVERSE, _) => Status::Malformed as u16,
            _ => Status::UnknownMethod as u16,
        };
        at.sessions.answer(at.fabric, call, SmallAnswer::failed(status));
    }

    fn got(&mut self, at: &mut At<'_>, session: SessionId, get: EndedGet) {
        let Some((call, window)) = self.reversing.remove(Slot::from_u64(get.context)) else { return };
        match get.into_frame() {
            Ok(mut frame) => {
                let mut bytes = frame.to_vec();
                bytes.reverse();
                frame.write(0, &bytes);
                let Some(route) = at.sessions.reply(call, 0, bytes.len(), &[]) else { return };
                let (len, to) = (bytes.len(), Remote { window: window.put_key(), offset: 0 });
                let payload = PayloadMeta { len, checksum: None };
                let put = Put { session, route: at.fabric.route(session), to, header: route.header, payload };
                at.fabric.put(at.reactor, put, |to| to.push_frame(frame, 0, len)).expect("a frame can be read");
            }
            _ => at.sessions.answer(at.fabric, call, SmallAnswer::failed(Status::Malformed as u16)),
        }
        at.sessions.end_request(at.fabric, session);
    }
}

impl Echo {
    fn reverse(&mut self, at: &mut At<'_>, call: CallRef, window: Descriptor, into: Frame) {
        let tag = self.reversing.insert((call, window)).to_u64();
        at.sessions.begin_request(call.session);
        let from = Remote { window: window.get_key(), offset: 0 };
        if at.get(call.session, from, into, ECHO, tag).is_err() {
            self.reversing.remove(Slot::from_u64(tag));
            at.sessions.answer(at.fabric, call, SmallAnswer::failed(BUSY));
            at.sessions.end_request(at.fabric, call.session);
        }
    }
}

/// One loop with the service, until it is told to stop; gives where it listens.
fn serve(io: IoChoice, at: Address, stop: Arc<AtomicBool>) -> (String, std::thread::JoinHandle<()>) {
    let (send, receive) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let mut reactor = Reactor::open(io, 4 << 20).unwrap();
        let spoken =
            Spoken { protocol: ECHO, versions: Versions::only(1), grant: Some(Grant { calls: 8, notices: 0 }) };
        let mut host = Host::new(&reactor, Arc::new(Registry::new(1)), Options::new(0x20), vec![spoken]);
        let (mut echo, mut completions) = (Echo::default(), Vec::new());
        let listener = host.listen(&mut reactor, &at).unwrap();
        let at = reactor.local_address(listener).map_or(at, Address::Tcp);
        send.send(at.to_string()).unwrap();
        while !stop.load(Ordering::Acquire) {
            host.flush(&mut reactor, &mut [&mut echo]);
            reactor.reap(&mut completions, Wait::Until(reactor.now() + Duration::from_millis(20))).unwrap();
            for completion in completions.drain(..) {
                host.handle(&mut reactor, &mut [&mut echo], completion);
            }
        }
    });
    (receive.recv().unwrap(), thread)
}

fn calls_it(rpc: &Rpc, session: Session) {
    let soon = || Deadline::after(Duration::from_secs(20));
    let ask =
        |call: Call<'_>| rpc.call(session, &Call { protocol: ECHO, ..call }, soon()).unwrap().wait(soon()).unwrap();
    let said = ask(Call { method: SAY, arguments: b"a", payload: b"word", ..Call::default() });
    let said = Reply::of(said.unwrap()).unwrap();
    assert_eq!((&said.result[..], &said.payload[..]), (&b"a"[..], &b"word"[..]));
    assert_eq!(ask(Call { method: 9, ..Call::default() }), Err(OpError::Status(Status::UnknownMethod as u16)));
    for len in [1, SMALL_BYTES_MAX, 100_000] {
        let memory = rpc.node().register_shared(len).unwrap();
        let bytes: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
        memory.write(0, &bytes).unwrap();
        let window = rpc.node().open_window(session, &memory, 0..len, Rights::BOTH).unwrap();
        ask(Call { method: REVERSE, windows: &[window.descriptor()], ..Call::default() }).unwrap();
        window.close().unwrap().wait(soon()).unwrap().unwrap();
        let mut back = vec![0; len];
        memory.read(0, &mut back).unwrap();
        assert!(back.iter().eq(bytes.iter().rev()), "{len}");
    }
}

#[test]
fn a_service_answers_and_moves_memory_over_each_wire() {
    let folder = tempfile::tempdir().unwrap();
    for io in [IoChoice::Auto, IoChoice::Epoll] {
        let at = |name: &str| folder.path().join(format!("{name}{io:?}"));
        let tcp = Address::Tcp("127.0.0.1:0".parse().unwrap());
        for at in [tcp, Address::Unix(at("unix")), Address::Shared(at("shm"))] {
            let stop = Arc::new(AtomicBool::new(false));
            let (address, thread) = serve(io, at, Arc::clone(&stop));
            let spoken = Spoken { protocol: ECHO, versions: Versions::only(1), grant: None };
            let rpc = Rpc::open_for(&NodeOptions::default(), vec![spoken]).unwrap();
            let soon = Deadline::after(Duration::from_secs(20));
            let session = rpc.node().connect(&parse_address(&address).unwrap(), soon).unwrap();
            calls_it(&rpc, session);
            drop(rpc);
            stop.store(true, Ordering::Release);
            thread.join().unwrap();
        }
    }
}
