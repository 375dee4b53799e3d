//! Clients that lend their server memory over shared memory, rightly and wrongly: what is placed in it, what is not, and
//! that nobody else notices.

mod harness;

use std::io::Write;

use byway_fabric::limits::TURN_BYTES_MAX;
use byway_fabric::tls::ServerTls;
use byway_fabric::wire::{FLAG_GRANT, FLAG_PLACED, Grant, Header, Kind, Pull};
use byway_fabric::{CloseReason, Options, PayloadChecksum};
use byway_reactor::{Frame, FramePool, IoChoice};
use byway_rpc::message::ReplyBody;
use byway_service::block::wire::{Arguments, Method};
use harness::session::{Session, call_header, closed_for, nobody_else_noticed};
use harness::{FRAMES, Path, Running, SERVER, Wire, memory, pattern};
use zerocopy::{FromZeros, IntoBytes};

const ARENA: usize = 1 << 20;
const LEN: usize = 64 << 10;
/// A window of the client, by any key.
const WINDOW: u64 = 5 << 20 | 3;
/// What lies where the server has no business.
const CANARY: u8 = 0xee;

/// A client by hand, and the memory that it has lent, all of it canaries.
struct Lender {
    server: Running,
    session: Session,
    whole: Frame,
    call: u64,
}

impl Lender {
    fn new(lends: bool) -> Self {
        Self::of(lends, FRAMES)
    }

    /// Of a server with so much memory for frames.
    fn of(lends: bool, frame_bytes: usize) -> Self {
        let wire = Wire { io: IoChoice::Epoll, path: Path::SharedMemory };
        let how = (Options::new(SERVER), ServerTls::Off);
        let server = Running::start_short(wire, None, 1, how, frame_bytes, vec![memory(4 << 20)]);
        let mut session = Session::open(&server, 1, PayloadChecksum::Off);
        let arena = FramePool::shared(ARENA).unwrap();
        let mut whole = arena.alloc(ARENA).unwrap();
        whole.fill(CANARY);
        if lends {
            session.control.stream.lend(&arena);
        }
        session.open_volume();
        Self { server, session, whole, call: 0 }
    }

    /// Asks for the start of the volume to be moved, and says that the window lies there.
    fn ask(&mut self, method: Method, address: u64, len: u64) {
        let mut arguments = Arguments::new_zeroed();
        arguments.len.set(LEN as u64);
        let (mut header, windows) = call_header(self.call, method, arguments, (WINDOW, LEN as u32));
        header.flags |= FLAG_GRANT;
        let grant = Grant::new(address, len, 0);
        self.session.control.send(header, &[grant.as_bytes(), &windows].concat());
    }

    /// The answer on the control lane, which is the last: its status, and whether it says that a payload was placed.
    fn answer(&mut self) -> (u16, bool) {
        loop {
            let (header, kind, _) = self.session.control.receive().expect("it is answered");
            if kind == Kind::Reply {
                let body: ReplyBody = header.body();
                assert_eq!(body.call.get(), self.call);
                return (body.status.get(), header.flags & FLAG_PLACED != 0);
            }
            assert!(kind == Kind::Data && header.flags & FLAG_PLACED != 0, "{kind:?}");
        }
    }

    fn assert_untouched(&self) {
        assert!(self.whole.to_vec().iter().all(|byte| *byte == CANARY), "the server wrote where it should not");
    }
}

#[test]
fn what_is_read_and_written_lies_in_the_window_and_nowhere_else() {
    let mut lender = Lender::new(true);
    let data = pattern(LEN, 7);
    for at in [0, 1, 4095, 100_000, ARENA - LEN] {
        lender.whole.fill(CANARY);
        lender.whole.write(at, &data);
        lender.ask(Method::Write, at as u64, LEN as u64);
        assert_eq!(lender.answer(), (0, false));
        lender.whole.fill(CANARY);
        lender.ask(Method::Read, at as u64, LEN as u64);
        assert_eq!(lender.answer(), (0, true));
        assert!(lender.whole.to_vec()[at..at + LEN] == data, "at {at}");
        lender.whole.fill_range(at..at + LEN, CANARY);
        lender.assert_untouched();
    }
    let counters = lender.server.state.lock().unwrap().counters;
    assert!(counters.put_bytes >= 4 * LEN as u64 && counters.got_bytes >= 4 * LEN as u64, "{counters:?}");
    drop(lender.session);
    nobody_else_noticed(&lender.server);
}

#[test]
fn windows_that_are_not_in_the_arena_are_errors_of_the_call_alone() {
    let mut lender = Lender::new(true);
    let end = ARENA as u64;
    for address in [end - LEN as u64 + 1, end - 1, end, end + 1, 1 << 32, 1 << 63, u64::MAX - LEN as u64, u64::MAX] {
        for method in [Method::Read, Method::Write] {
            lender.ask(method, address, LEN as u64);
            let (status, placed) = lender.answer();
            assert!(status != 0 && !placed, "{method:?} at {address}: {status}");
            lender.assert_untouched();
        }
    }
    lender.ask(Method::Read, 0, LEN as u64);
    assert_eq!(lender.answer(), (0, true), "the session goes on");
    drop(lender.session);
    nobody_else_noticed(&lender.server);
}

/// Has the volume read and written through the stream, as if nothing had been lent.
fn goes_through_the_stream(lender: &mut Lender, granted: u64) {
    lender.ask(Method::Read, 0, granted);
    let (header, kind, payload) = lender.session.bulk().receive().expect("it is answered");
    assert_eq!((kind, header.flags & FLAG_PLACED, header.window.get()), (Kind::Reply, 0, WINDOW));
    assert!(payload.len() == LEN);
    lender.ask(Method::Write, 0, granted);
    let (header, kind, _) = lender.session.control.receive().unwrap();
    let pull: Pull = header.body();
    assert_eq!((kind, header.window.get(), pull.len.get()), (Kind::Pull, WINDOW, LEN as u32));
    let mut data = Header::new(Kind::Data);
    data.window = pull.target;
    lender.session.bulk().send(data, &pattern(LEN, 3));
    assert_eq!(lender.answer(), (0, false));
    lender.assert_untouched();
}

#[test]
fn a_grant_that_is_too_short_is_not_used() {
    let mut lender = Lender::new(true);
    for granted in [0, 1, LEN as u64 - 1] {
        goes_through_the_stream(&mut lender, granted);
    }
    drop(lender.session);
    nobody_else_noticed(&lender.server);
}

#[test]
fn a_client_that_grants_and_has_lent_nothing_is_served_through_the_stream() {
    let mut lender = Lender::new(false);
    goes_through_the_stream(&mut lender, LEN as u64);
    drop(lender.session);
    nobody_else_noticed(&lender.server);
}

#[test]
fn a_client_cannot_say_that_it_has_placed_something() {
    let mut lender = Lender::new(true);
    let mut placed = Header::new(Kind::Data);
    placed.window.set(WINDOW);
    placed.flags |= FLAG_PLACED;
    placed.payload_len.set(4096);
    lender.session.control.send_sealed(placed, &[]);
    closed_for(&lender.server, CloseReason::Unexpected(Kind::Data));
    lender.assert_untouched();
    nobody_else_noticed(&lender.server);
}

/// The loop copies for all of its clients, so no turn copies all that one client has asked for: 200 MiB, in calls that arrive together.
/// A turn begins a bounded number of bytes, and may also copy what the turn before has begun to read.
#[test]
fn a_turn_copies_a_bounded_number_of_bytes() {
    const CALLS: u64 = 200;
    for method in [Method::Read, Method::Write] {
        // One session may have half of the frames, so they are not what bounds its reads.
        let mut lender = Lender::of(true, 256 << 20);
        let mut arguments = Arguments::new_zeroed();
        arguments.len.set(ARENA as u64);
        let grant = Grant::new(0, ARENA as u64, 0);
        let control = &mut lender.session.control;
        let mut calls = Vec::new();
        for call in 0..CALLS {
            let (mut header, windows) = call_header(call, method, arguments, (WINDOW, ARENA as u32));
            header.flags |= FLAG_GRANT;
            header.payload_len.set((grant.as_bytes().len() + windows.len()) as u32);
            header.seal(control.sequence_out);
            control.sequence_out += 1;
            calls.extend_from_slice(&[header.as_bytes(), grant.as_bytes(), &windows].concat());
        }
        control.stream.write_all(&calls).unwrap();
        let mut answered = 0;
        while answered < CALLS {
            let (header, kind, _) = control.receive().expect("it is answered");
            if kind == Kind::Reply {
                assert_eq!(header.body::<ReplyBody>().status.get(), 0, "{method:?}");
                answered += 1;
            }
        }
        let copied = lender.server.state.lock().unwrap().turn_copied_bytes_max as usize;
        assert!(copied <= 2 * TURN_BYTES_MAX + ARENA, "{method:?}: a turn copied {copied} bytes");
        assert!(copied >= TURN_BYTES_MAX, "{method:?}: the bound was never met: {copied} bytes");
        drop(lender.session);
        nobody_else_noticed(&lender.server);
    }
}
