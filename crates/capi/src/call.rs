//! Calls: made, taken, answered, handed on.

use std::ffi::c_int;

use byway_fabric::node::{DESCRIPTOR_BYTES, Descriptor, Session};
use byway_rpc::node::{Call, PROGRAM, Request, Rpc};

use crate::error::{BYWAY_E_INVALID, Code, OutPointer, borrow, guard, slice};
use crate::node::{byway_node, deadline, fits};
use crate::operation::{byway_op, start};

/// The protocol of block volumes: of `byway serve`.
pub const BYWAY_PROTOCOL_VOLUMES: u8 = 1;
const _: () = assert!(BYWAY_PROTOCOL_VOLUMES == byway_rpc::node::VOLUMES);

/// A call's contents. Absent parts may be null with a length of 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct byway_call {
    /// The method: the protocol's number.
    pub method: u16,
    /// The protocol: 0 for the program's own, or `BYWAY_PROTOCOL_VOLUMES`; docs/wire.md has its methods, arguments and results.
    pub protocol: u8,
    /// At most 64 bytes.
    pub arguments: *const u8,
    /// How many.
    pub arguments_bytes: usize,
    /// Consecutive descriptors of windows, 32 bytes each, at most 64, which are open to the called session.
    pub windows: *const u8,
    /// How many windows.
    pub windows_count: usize,
    /// More bytes; at most 16 KiB with the windows and arguments.
    pub payload: *const u8,
    /// How many.
    pub payload_bytes: usize,
}

/// A received call. It is answered once, by `byway_answer` or `byway_delegate`; freeing it unanswered reports it as abandoned.
#[expect(non_camel_case_types, reason = "C's name")]
pub struct byway_request {
    request: Request,
    /// The descriptors of its windows, one behind the other.
    windows: Vec<u8>,
}

/// # Safety
/// Its pointers have so many bytes as it says.
unsafe fn windows(of: &byway_call) -> Result<Vec<Descriptor>, Code> {
    // SAFETY: by the caller's word; an array of bytes has no alignment.
    let windows = unsafe { slice(of.windows.cast::<[u8; DESCRIPTOR_BYTES]>(), of.windows_count)? };
    Ok(windows.iter().map(Descriptor::from_bytes).collect())
}

fn protocol(call: &byway_call) -> u8 {
    if call.protocol == 0 { PROGRAM } else { call.protocol }
}

fn rpc(node: &byway_node) -> Result<&Rpc, Code> {
    node.rpc().ok_or(Code(BYWAY_E_INVALID))
}

/// Calls the node at the other end of a session. `*op` ends with the answer: a message, whose header is the result. With
/// `BYWAY_E_STATUS` the server answered another status than 0, which the completion has; with `BYWAY_E_EXPIRED` no answer
/// arrived within `timeout_ms` (for ever if negative). Cancelling the operation notifies the server.
///
/// # Safety
/// `node` is a node, opened for calls; `call` is one, whose pointers have so many bytes as it says; `op` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_call_start(
    node: *const byway_node,
    session: u64,
    call: *const byway_call,
    timeout_ms: i64,
    op: *mut *mut byway_op,
) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (node, call) = unsafe { (borrow(node)?, borrow(call)?) };
        // SAFETY: by the caller's word.
        let (arguments, windows, payload) = unsafe {
            (slice(call.arguments, call.arguments_bytes)?, windows(call)?, slice(call.payload, call.payload_bytes)?)
        };
        let call = Call { protocol: protocol(call), method: call.method, arguments, windows: &windows, payload };
        // SAFETY: by the caller's word.
        unsafe { start(op, || Ok(rpc(node)?.call(Session::from_u64(session), &call, deadline(timeout_ms))?)) }
    })
}

/// Waits for a call, at most `timeout_ms`, for ever if negative. Each call goes to one waiting thread.
///
/// # Safety
/// `node` is a node, opened for calls; `request` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_next_call(
    node: *const byway_node,
    timeout_ms: i64,
    request: *mut *mut byway_request,
) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (node, place) = unsafe { (borrow(node)?, OutPointer::at(request)?) };
        let came = rpc(node)?.next_call(deadline(timeout_ms))?;
        let windows = came.windows.iter().flat_map(|window| window.to_bytes()).collect();
        place.give(Box::into_raw(Box::new(byway_request { request: came, windows })));
        Ok(0)
    })
}

/// The method number of a call.
///
/// # Safety
/// `request` is a request.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_request_method(request: *const byway_request) -> c_int {
    // SAFETY: by the caller's word.
    guard(|| Ok(c_int::from(unsafe { borrow(request)? }.request.method)))
}

/// The session that a call came over; 0 if `request` is null. The call's windows belong to this session, unless it was
/// delegated.
///
/// # Safety
/// `request` is null or a request.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_request_session(request: *const byway_request) -> u64 {
    // SAFETY: by the caller's word.
    unsafe { request.as_ref() }.map_or(0, |request| request.request.session.to_u64())
}

/// # Safety
/// `request` is null or a request; `bytes` can be written.
unsafe fn part(
    request: *const byway_request,
    bytes: *mut *const u8,
    of: impl FnOnce(&byway_request) -> &[u8],
) -> Result<usize, Code> {
    // SAFETY: by the caller's word.
    let (part, place) = unsafe { (of(borrow(request)?), OutPointer::at(bytes)?) };
    place.give(part.as_ptr());
    Ok(part.len())
}

/// Writes the start of a call's arguments to `*bytes`, and returns their number of bytes. Valid until the request is answered,
/// delegated or freed.
///
/// # Safety
/// `request` is a request; `bytes` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_request_arguments(request: *const byway_request, bytes: *mut *const u8) -> c_int {
    // SAFETY: by the caller's word.
    guard(|| fits(c_int::try_from(unsafe { part(request, bytes, |request| &request.request.arguments)? })))
}

/// Writes the start of a call's payload to `*bytes`, and returns its number of bytes. Valid as long as the arguments.
///
/// # Safety
/// `request` is a request; `bytes` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_request_payload(request: *const byway_request, bytes: *mut *const u8) -> c_int {
    // SAFETY: by the caller's word.
    guard(|| fits(c_int::try_from(unsafe { part(request, bytes, |request| &request.request.payload)? })))
}

/// Writes the start of the descriptors of a call's windows, 32 bytes each, to `*bytes`, and returns the number of windows.
/// Valid as long as the arguments.
///
/// # Safety
/// `request` is a request; `bytes` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_request_windows(request: *const byway_request, bytes: *mut *const u8) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let bytes = unsafe { part(request, bytes, |request| &request.windows)? };
        fits(c_int::try_from(bytes / DESCRIPTOR_BYTES))
    })
}

/// 1 if the caller of a request no longer waits for the answer, else 0.
///
/// # Safety
/// `request` is a request.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_request_is_cancelled(request: *const byway_request) -> c_int {
    // SAFETY: by the caller's word.
    guard(|| Ok(c_int::from(unsafe { borrow(request)? }.request.token.is_cancelled())))
}

/// Answers a call and frees the request, also if this fails: `status` 0 for success, a result of at most 64 bytes, and a
/// payload of at most 16 KiB with it. If the answer cannot be sent, the caller is told, if possible, that its call was
/// abandoned.
///
/// # Safety
/// `request` is a request, and not used after; `result` and `payload` have so many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_answer(
    request: *mut byway_request,
    status: u16,
    result: *const u8,
    result_bytes: usize,
    payload: *const u8,
    payload_bytes: usize,
) -> c_int {
    guard(|| {
        if request.is_null() {
            return Err(Code(BYWAY_E_INVALID));
        }
        // SAFETY: made by `Box::into_raw`, and freed once, by the caller's word.
        let request = unsafe { Box::from_raw(request) };
        // SAFETY: by the caller's word.
        let (result, payload) = unsafe { (slice(result, result_bytes)?, slice(payload, payload_bytes)?) };
        request.request.token.reply(status, result, payload)?;
        Ok(0)
    })
}

/// Delegates a call to the node at the other end of `third`, which answers the caller instead, and frees the request on
/// success. That node receives `call`; its payload is the continuation, which must have everything that the third node needs,
/// because no state of the call stays here. The third node can use the windows in it only if they were opened to its session.
/// On failure the request is unchanged, also if another thread reads it. On success no thread may use it any more.
///
/// # Safety
/// `request` is a request; if this answers 0 it is in no other call, and not used after. `call` is one, whose pointers have so many
/// bytes as it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_delegate(request: *mut byway_request, third: u64, call: *const byway_call) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let call = unsafe { borrow(call)? };
        // SAFETY: by the caller's word.
        let (arguments, windows, payload) = unsafe {
            (slice(call.arguments, call.arguments_bytes)?, windows(call)?, slice(call.payload, call.payload_bytes)?)
        };
        // SAFETY: by the caller's word.
        let token = &unsafe { borrow(request)? }.request.token;
        let call = Call { protocol: protocol(call), method: call.method, arguments, windows: &windows, payload };
        token.hand_on(Session::from_u64(third), &call)?;
        // SAFETY: made by `Box::into_raw`, in no other call and not used after, by the caller's word.
        drop(unsafe { Box::from_raw(request) });
        Ok(0)
    })
}

/// Frees a request without an answer: its caller is told that it was abandoned. Does nothing for null.
///
/// # Safety
/// `request` is null or a request, and not used after.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_request_free(request: *mut byway_request) {
    guard(|| {
        if !request.is_null() {
            // SAFETY: made by `Box::into_raw`, and freed once, by the caller's word.
            drop(unsafe { Box::from_raw(request) });
        }
        Ok(0)
    });
}
