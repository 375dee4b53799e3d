//! What a call that fails leaves as it was: nothing is taken that there is no place for, and handles can be used beside it.

use std::ffi::{CStr, CString, c_int};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};

use byway::{byway_call, byway_completion, byway_group, byway_node, byway_op, byway_request};

const SOON: i64 = 20_000;
const INVALID: c_int = -1;
const DEADLINE: c_int = -2;
const BUSY: c_int = -3;
const NO_SESSION: c_int = -4;

/// Two nodes for calls and their session.
struct Pair {
    server: *mut byway_node,
    client: *mut byway_node,
    to_client: u64,
    to_server: u64,
}

/// A handle that threads share.
struct Shared<T>(*const T);
// SAFETY: handles may be used by several threads at once.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: the same.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    fn get(&self) -> *const T {
        self.0
    }
}

impl Pair {
    fn new() -> Self {
        let (mut server, mut client) = (null_mut(), null_mut());
        let mut pair = Self { server, client, to_client: 0, to_server: 0 };
        // SAFETY: places of ours, and nodes that were just made.
        unsafe {
            assert_eq!(byway::byway_node_open_for_calls(&raw mut server), 0);
            assert_eq!(byway::byway_node_open_for_calls(&raw mut client), 0);
            let port = byway::byway_listen(server, c"tcp://127.0.0.1:0".as_ptr());
            assert!(port > 0, "{port}");
            let to = CString::new(format!("tcp://127.0.0.1:{port}")).unwrap();
            let accepts = Shared(server);
            let accepted = std::thread::spawn(move || {
                let mut session = 0;
                let went = byway::byway_accept(accepts.get(), SOON, &raw mut session);
                (went, session)
            });
            assert_eq!(byway::byway_connect(client, to.as_ptr(), SOON, &raw mut pair.to_server), 0);
            let (went, session) = accepted.join().unwrap();
            assert_eq!(went, 0);
            pair.to_client = session;
        }
        (pair.server, pair.client) = (server, client);
        pair
    }

    /// The server says a word to the client.
    fn say(&self, word: &CStr) {
        let (mut op, bytes) = (null_mut(), word.to_bytes());
        // SAFETY: a node, bytes and a place of ours.
        unsafe {
            let none = null();
            let said =
                byway::byway_send(self.server, self.to_client, bytes.as_ptr(), bytes.len(), none, 0, &raw mut op);
            assert_eq!(said, 0);
            assert_eq!(byway::byway_wait(op, SOON, null_mut()), 0);
            byway::byway_op_free(op);
        }
    }

    /// The client receives.
    fn receive(&self) -> *mut byway_op {
        let mut op = null_mut();
        // SAFETY: a node and a place of ours.
        assert_eq!(unsafe { byway::byway_receive(self.client, self.to_server, &raw mut op) }, 0);
        op
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // SAFETY: freed once.
        unsafe {
            byway::byway_node_close(self.client);
            byway::byway_node_close(self.server);
        }
    }
}

fn completion() -> byway_completion {
    byway_completion { message: null_mut(), session: 0, status: 0 }
}

/// Waits for a message; its header.
fn header(op: *mut byway_op) -> Vec<u8> {
    let mut came = completion();
    // SAFETY: an operation and a place of ours.
    unsafe {
        assert_eq!(byway::byway_wait(op, SOON, &raw mut came), 0);
        let mut bytes = null();
        let len = byway::byway_message_header(came.message, &raw mut bytes);
        assert_eq!(byway::byway_message_header(came.message, null_mut()), INVALID);
        let header = std::slice::from_raw_parts(bytes, usize::try_from(len).unwrap()).to_vec();
        byway::byway_message_free(came.message);
        byway::byway_op_free(op);
        header
    }
}

#[test]
fn what_there_is_no_place_for_is_not_taken() {
    let pair = Pair::new();
    let op = pair.receive();
    pair.say(c"first");
    // SAFETY: what is not null is ours, and as it should be.
    unsafe {
        let mut came = completion();
        let ops = [op.cast_const()];
        let mut wait = |index| byway::byway_wait_any(ops.as_ptr(), 1, SOON, index, &raw mut came);
        assert_eq!((wait(null_mut()), wait(null_mut())), (INVALID, INVALID));
        assert!(came.message.is_null());
        assert_eq!(header(op), b"first", "it was there still");
        // What has no place for its handle is not begun.
        assert_eq!(byway::byway_receive(pair.client, pair.to_server, null_mut()), INVALID);
        let none = null();
        let sent = byway::byway_send(pair.server, pair.to_client, none, 0, none, 0, null_mut());
        assert_eq!(sent, INVALID);
        pair.say(c"second");
        assert_eq!(header(pair.receive()), b"second", "nobody else has it, and nothing came before it");
        // A call that nobody could be given stays for the next one.
        let call = byway_call {
            method: 7,
            protocol: 0,
            arguments: null(),
            arguments_bytes: 0,
            windows: null(),
            windows_count: 0,
            payload: null(),
            payload_bytes: 0,
        };
        let (mut called, mut request) = (null_mut(), null_mut());
        assert_eq!(byway::byway_call_start(pair.client, pair.to_server, &raw const call, SOON, &raw mut called), 0);
        assert_eq!(byway::byway_next_call(pair.server, SOON, null_mut()), INVALID);
        assert_eq!(byway::byway_next_call(pair.server, SOON, &raw mut request), 0);
        assert_eq!(byway::byway_request_method(request), 7);
        byway::byway_request_free(request);
        byway::byway_op_free(called);
    }
}

/// A group that is full is tried again and again, while another thread waits for the operation.
#[test]
fn an_operation_that_is_not_added_can_be_waited_for_meanwhile() {
    let pair = Pair::new();
    let (filling, op) = (pair.receive(), pair.receive());
    let mut group: *mut byway_group = null_mut();
    // SAFETY: what is not null is ours, and as it should be.
    unsafe {
        assert_eq!(byway::byway_group_new(pair.client, 1, &raw mut group), 0);
        assert_eq!(byway::byway_group_add(group, filling, 1), 0);
        let (stop, shared) = (AtomicBool::new(false), Shared(op));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let (op, mut other) = (&shared, DEADLINE);
                while !stop.load(Ordering::Relaxed) && other == DEADLINE {
                    other = byway::byway_wait(op.get(), 0, null_mut());
                }
                other
            });
            for _ in 0..20_000 {
                assert_eq!(byway::byway_group_add(group, op, 2), BUSY);
            }
            stop.store(true, Ordering::Relaxed);
            assert_eq!(waits.join().unwrap(), DEADLINE, "it had not ended, and was nobody else's");
        });
        pair.say(c"to the group");
        pair.say(c"to the caller");
        assert_eq!(header(op), b"to the caller");
        let (mut context, mut result) = (0, 0);
        assert_eq!(byway::byway_group_wait(group, SOON, &raw mut context, &raw mut result, null_mut()), 1);
        assert_eq!((context, result), (1, 0));
        byway::byway_group_free(group);
    }
}

/// A call is handed to a session that is not there, while another thread looks at it.
#[test]
fn a_request_that_is_not_handed_on_can_be_looked_at_meanwhile() {
    let pair = Pair::new();
    let arguments = [1u8, 2, 3];
    let call = byway_call {
        method: 9,
        protocol: 0,
        arguments: arguments.as_ptr(),
        arguments_bytes: 3,
        windows: null(),
        windows_count: 0,
        payload: null(),
        payload_bytes: 0,
    };
    let (mut called, mut request): (_, *mut byway_request) = (null_mut(), null_mut());
    // SAFETY: what is not null is ours, and as it should be.
    unsafe {
        assert_eq!(byway::byway_call_start(pair.client, pair.to_server, &raw const call, SOON, &raw mut called), 0);
        assert_eq!(byway::byway_next_call(pair.server, SOON, &raw mut request), 0);
        let (stop, shared) = (AtomicBool::new(false), Shared(request));
        std::thread::scope(|scope| {
            let looks = scope.spawn(|| {
                let (request, mut bytes) = (&shared, null());
                let mut seen = 3;
                while !stop.load(Ordering::Relaxed) && seen == 3 {
                    seen = byway::byway_request_arguments(request.get(), &raw mut bytes);
                }
                seen
            });
            for _ in 0..20_000 {
                assert_eq!(byway::byway_delegate(request, 0, &raw const call), NO_SESSION);
            }
            stop.store(true, Ordering::Relaxed);
            assert_eq!(looks.join().unwrap(), 3);
        });
        assert_eq!(byway::byway_answer(request, 0, null(), 0, null(), 0), 0);
        assert_eq!(byway::byway_wait(called, SOON, null_mut()), 0, "and answered after all");
        byway::byway_op_free(called);
    }
}

/// Messages that nobody takes: how many wait, and for how long, is there to be asked for.
#[test]
fn a_session_whose_peer_takes_nothing_says_so() {
    let pair = Pair::new();
    let mut feedback = byway::byway_feedback::default();
    let ops: Vec<*mut byway_op> = (0..70)
        .map(|_| {
            let (mut op, none) = (null_mut(), null());
            // SAFETY: a node and a place of ours.
            let sent = unsafe { byway::byway_send(pair.server, pair.to_client, none, 0, none, 0, &raw mut op) };
            assert_eq!(sent, 0);
            op
        })
        .collect();
    // SAFETY: what is not null is ours, and as it should be.
    unsafe {
        let mut look = |session| byway::byway_session_feedback(pair.server, session, &raw mut feedback);
        assert_eq!(look(0), NO_SESSION);
        assert_eq!(look(pair.to_client), 0);
        assert!(feedback.waiting_ns > 0, "six of them wait for credit: {feedback:?}");
        assert_eq!(feedback.credit_stalls.count, 0, "and wait still");
        for _ in 0..70 {
            assert_eq!(header(pair.receive()), b"");
            byway::byway_progress(pair.server);
        }
        for op in ops {
            assert_eq!(byway::byway_wait(op, SOON, null_mut()), 0);
            byway::byway_op_free(op);
        }
        assert_eq!(byway::byway_session_feedback(pair.server, pair.to_client, &raw mut feedback), 0);
        assert!(feedback.credit_stalls.count > 0 && feedback.credit_stalls.max_ns > 0, "{feedback:?}");
        let mut wire = byway::byway_capabilities::default();
        assert_eq!(byway::byway_session_capabilities(pair.server, 0, &raw mut wire), NO_SESSION);
        assert_eq!(byway::byway_session_capabilities(pair.server, pair.to_client, &raw mut wire), 0);
        assert_eq!((wire.wire, wire.window_enforced, wire.segments_max), (1, 1, 1024));
    }
}
