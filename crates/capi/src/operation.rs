//! Operations, their ends, and messages.

use std::ffi::c_int;

use byway_fabric::node::{Completed, Descriptor, Message, Op, OpError, Outcome, Segment, Session};

use crate::error::{BYWAY_E_INVALID, Code, OutPointer, borrow, guard, slice};
use crate::memory::byway_memory;
use crate::node::{byway_node, deadline, fits};

/// An operation.
#[expect(non_camel_case_types, reason = "C's name")]
pub struct byway_op(pub(crate) Op);

/// A message that came.
#[expect(non_camel_case_types, reason = "C's name")]
pub struct byway_message(Message);

/// A range of memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct byway_segment {
    /// The memory.
    pub memory: *const byway_memory,
    /// First byte.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
}

/// The result of an operation; empty if the wait ended without one.
#[repr(C)]
pub struct byway_completion {
    /// The message of a receive, else null. Free it with `byway_message_free`.
    pub message: *mut byway_message,
    /// Of a receive from any: the session of the message, or, without a message, the session that has ended. Else 0.
    pub session: u64,
    /// Of a call that ended with `BYWAY_E_STATUS`: the server's number. Else 0.
    pub status: u16,
}

/// Begins an operation, if there is a place for its handle.
///
/// # Safety
/// `op` is null or can be written.
pub(crate) unsafe fn start(op: *mut *mut byway_op, begin: impl FnOnce() -> Result<Op, Code>) -> Result<c_int, Code> {
    // SAFETY: by the caller's word.
    let place = unsafe { OutPointer::at(op)? };
    place.give(Box::into_raw(Box::new(byway_op(begin()?))));
    Ok(0)
}

/// Sends a message: a header of at most 64 bytes and a payload of at most 16 KiB. Both are copied. `*op` ends when the message
/// is on its way.
///
/// # Safety
/// `node` is a node; `header` and `payload` have so many bytes; `op` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_send(
    node: *const byway_node,
    session: u64,
    header: *const u8,
    header_bytes: usize,
    payload: *const u8,
    payload_bytes: usize,
    op: *mut *mut byway_op,
) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (node, header, payload) =
            unsafe { (borrow(node)?, slice(header, header_bytes)?, slice(payload, payload_bytes)?) };
        // SAFETY: by the caller's word.
        unsafe { start(op, || Ok(node.node().send(Session::from_u64(session), header, payload)?)) }
    })
}

/// Receives the next message of a session; of any, if `session` is 0.
///
/// # Safety
/// `node` is a node; `op` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_receive(node: *const byway_node, session: u64, op: *mut *mut byway_op) -> c_int {
    guard(|| {
        let from = (session != 0).then(|| Session::from_u64(session));
        // SAFETY: by the caller's word.
        unsafe { start(op, || Ok(borrow(node)?.node().start_receive(from)?)) }
    })
}

/// # Safety
/// As for the functions below.
unsafe fn segments<'a>(list: *const byway_segment, count: usize) -> Result<Vec<Segment<'a>>, Code> {
    // SAFETY: by the caller's word.
    let list = unsafe { slice(list, count)? };
    let segment = |segment: &byway_segment| {
        // SAFETY: by the caller's word.
        let memory = unsafe { borrow(segment.memory)? };
        Ok(memory.0.segment(segment.offset..segment.offset.saturating_add(segment.len)))
    };
    list.iter().map(segment).collect()
}

/// # Safety
/// `bytes` is null or has 32 bytes.
unsafe fn descriptor(bytes: *const u8) -> Result<Descriptor, Code> {
    // SAFETY: by the caller's word; an array of bytes has no alignment.
    Ok(Descriptor::from_bytes(unsafe { borrow(bytes.cast())? }))
}

/// Puts the bytes of up to 64 segments into a window of the peer, from `offset` on. `*op` ends when they have arrived there.
///
/// # Safety
/// `node` is a node; `list` has `count` segments, each of memory; `to` has the 32 bytes of a descriptor; `op` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_put(
    node: *const byway_node,
    session: u64,
    list: *const byway_segment,
    count: usize,
    to: *const u8,
    offset: u64,
    op: *mut *mut byway_op,
) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (node, list, to) = unsafe { (borrow(node)?, segments(list, count)?, descriptor(to)?) };
        // SAFETY: by the caller's word.
        unsafe { start(op, || Ok(node.node().put(Session::from_u64(session), &list, &to, offset)?)) }
    })
}

/// Gets bytes of a window of the peer, from `offset` on, into up to 64 segments. `*op` ends when they have arrived.
///
/// # Safety
/// As for `byway_put`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_get(
    node: *const byway_node,
    session: u64,
    from: *const u8,
    offset: u64,
    list: *const byway_segment,
    count: usize,
    op: *mut *mut byway_op,
) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (node, list, from) = unsafe { (borrow(node)?, segments(list, count)?, descriptor(from)?) };
        // SAFETY: by the caller's word.
        unsafe { start(op, || Ok(node.node().get(Session::from_u64(session), &from, offset, &list)?)) }
    })
}

/// Ends when all puts of a session that were begun before have ended.
///
/// # Safety
/// `node` is a node; `op` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_flush(node: *const byway_node, session: u64, op: *mut *mut byway_op) -> c_int {
    // SAFETY: by the caller's word.
    guard(|| unsafe { start(op, || Ok(borrow(node)?.node().flush(Session::from_u64(session))?)) })
}

/// Where a completion goes, if the caller wants it.
///
/// # Safety
/// `at` is null or can be written, for as long as the place lives.
pub(crate) unsafe fn completion_at(at: *mut byway_completion) -> Result<Option<OutPointer<byway_completion>>, Code> {
    if at.is_null() {
        return Ok(None);
    }
    // SAFETY: by the caller's word.
    unsafe { OutPointer::at(at)?.give(NOTHING) };
    // SAFETY: by the caller's word.
    unsafe { OutPointer::at(at) }.map(Some)
}

/// What is at the place of a completion before anything has ended, so that a program which frees its message frees nothing.
const NOTHING: byway_completion = byway_completion { message: std::ptr::null_mut(), session: 0, status: 0 };

fn completed(outcome: Outcome) -> byway_completion {
    let none = std::ptr::null_mut();
    match outcome {
        Outcome::Message(message) => {
            let session = message.session.to_u64();
            byway_completion { message: Box::into_raw(Box::new(byway_message(message))), session, status: 0 }
        }
        Outcome::Ended(session, _) => byway_completion { message: none, session: session.to_u64(), status: 0 },
        _ => byway_completion { message: none, session: 0, status: 0 },
    }
}

/// How an operation ended, and what it brought.
pub(crate) fn ended(result: Completed, completion: Option<OutPointer<byway_completion>>) -> Result<(), Code> {
    let Some(completion) = completion else { return Ok(result.map(drop)?) };
    match result {
        Ok(outcome) => {
            completion.give(completed(outcome));
            Ok(())
        }
        Err(error) => {
            let status = if let OpError::Status(status) = error { status } else { 0 };
            completion.give(byway_completion { message: std::ptr::null_mut(), session: 0, status });
            Err(error.into())
        }
    }
}

/// Waits for an operation and takes its result: at most `timeout_ms`, for ever if negative, without waiting if 0. Returns how
/// the operation ended. `completion` may be null: then a message is discarded. The operation must still be freed.
///
/// # Safety
/// `op` is an operation; `completion` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_wait(op: *const byway_op, timeout_ms: i64, completion: *mut byway_completion) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (op, completion) = unsafe { (borrow(op)?, completion_at(completion)?) };
        ended(op.0.wait(deadline(timeout_ms))?, completion).map(|()| 0)
    })
}

/// Waits for one of `count` operations, all of one node, as `byway_wait` does. Writes its place to `*index`, if one has ended, well or
/// not. Without a place for that (`BYWAY_E_INVALID`) nothing is taken.
///
/// # Safety
/// `ops` has `count` operations; `index` can be written; `completion` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_wait_any(
    ops: *const *const byway_op,
    count: usize,
    timeout_ms: i64,
    index: *mut usize,
    completion: *mut byway_completion,
) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (handles, place) = unsafe { (slice(ops, count)?, OutPointer::at(index)?) };
        // SAFETY: by the caller's word.
        let completion = unsafe { completion_at(completion)? };
        // SAFETY: by the caller's word.
        let of = |op: &*const byway_op| Ok(&unsafe { borrow(*op) }?.0);
        let ops = handles.iter().map(of).collect::<Result<Vec<&Op>, Code>>()?;
        let first = ops.first().ok_or(Code(BYWAY_E_INVALID))?;
        let (ended_at, result) = first.node().wait_any(&ops, deadline(timeout_ms))?;
        place.give(ended_at);
        ended(result, completion).map(|()| 0)
    })
}

/// Requests the early end of an operation, which still ends once.
///
/// # Safety
/// `op` is an operation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_cancel(op: *const byway_op) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        unsafe { borrow(op)? }.0.cancel()?;
        Ok(0)
    })
}

/// Frees an operation. If it has not ended it continues, and its result is dropped; but a receive is cancelled, and a message
/// that was not taken goes to the next receive. Does nothing for null.
///
/// # Safety
/// `op` is null or an operation, and not used after.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_op_free(op: *mut byway_op) {
    guard(|| {
        if !op.is_null() {
            // SAFETY: made by `Box::into_raw`, and freed once, by the caller's word.
            drop(unsafe { Box::from_raw(op) });
        }
        Ok(0)
    });
}

/// # Safety
/// `message` is null or a message; `bytes` can be written.
unsafe fn part(message: *const byway_message, bytes: *mut *const u8, of: fn(&Message) -> &[u8]) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (part, place) = unsafe { (of(&borrow(message)?.0), OutPointer::at(bytes)?) };
        place.give(part.as_ptr());
        fits(c_int::try_from(part.len()))
    })
}

/// Writes the start of a message's header to `*bytes`, and returns its number of bytes. Valid until the message is freed.
///
/// # Safety
/// `message` is a message; `bytes` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_message_header(message: *const byway_message, bytes: *mut *const u8) -> c_int {
    // SAFETY: by the caller's word.
    unsafe { part(message, bytes, |message| &message.header) }
}

/// Writes the start of a message's payload to `*bytes`, and returns its number of bytes. Valid until the message is freed.
///
/// # Safety
/// `message` is a message; `bytes` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_message_payload(message: *const byway_message, bytes: *mut *const u8) -> c_int {
    // SAFETY: by the caller's word.
    unsafe { part(message, bytes, |message| &message.payload) }
}

/// Frees a message. Does nothing for null.
///
/// # Safety
/// `message` is null or a message, and not used after.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_message_free(message: *mut byway_message) {
    guard(|| {
        if !message.is_null() {
            // SAFETY: made by `Box::into_raw`, and freed once, by the caller's word.
            drop(unsafe { Box::from_raw(message) });
        }
        Ok(0)
    });
}
