//! Calls: made, taken, answered, handed on.

use std::ffi::c_int;

use byway_fabric::node::{DESCRIPTOR_BYTES, Descriptor, Session};
use byway_rpc::node::{Call, PROGRAM, Request, Rpc};

use crate::error::{BYWAY_E_INVALID, Code, Place, borrow, guard, slice};
use crate::node::{byway_node, deadline, fits};
use crate::operation::{byway_op, start};

/// The protocol of block volumes: of `byway serve`.
pub const BYWAY_PROTOCOL_VOLUMES: u8 = 1;
const _: () = assert!(BYWAY_PROTOCOL_VOLUMES == byway_rpc::node::VOLUMES);

/// What a caller asks. What it has none of may be null with a length of 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct byway_call {
    /// The method: the protocol's number.
    pub method: u16,
    /// The protocol: 0 for that of programs, or `BYWAY_PROTOCOL_VOLUMES`, whose methods, arguments and results docs/wire.md has.
    pub protocol: u8,
    /// At most 64 bytes.
    pub arguments: *const u8,
    /// How many.
    pub arguments_bytes: usize,
    /// Descriptors of windows, 32 bytes each, one behind the other, at most 64: opened to the session that is called.
    pub windows: *const u8,
    /// How many windows.
    pub windows_count: usize,
    /// More bytes; at most 16 KiB with the windows and arguments.
    pub payload: *const u8,
    /// How many.
    pub payload_bytes: usize,
}

/// A call that came. It is answered once: by `byway_answer` or `byway_delegate`, else by being freed, as abandoned.
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
/// `BYWAY_E_STATUS` the server did not do it, and the completion has its number; with `BYWAY_E_EXPIRED` no answer came within
/// `timeout_ms` (for ever if negative). Cancelling it tells the server.
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

/// Waits for a call, at most `timeout_ms`, for ever if negative. Each call goes to one of the threads that wait.
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
        let (node, place) = unsafe { (borrow(node)?, Place::at(request)?) };
        let came = rpc(node)?.next_call(deadline(timeout_ms))?;
        let windows = came.windows.iter().flat_map(|window| window.to_bytes()).collect();
        place.give(Box::into_raw(Box::new(byway_request { request: came, windows })));
        Ok(0)
    })
}

/// What a call is for: the caller's number of the method.
///
/// # Safety
/// `request` is a request.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_request_method(request: *const byway_request) -> c_int {
    // SAFETY: by the caller's word.
    guard(|| Ok(c_int::from(unsafe { borrow(request)? }.request.method)))
}

/// Over which session a call came: 0 if `request` is null. The windows of the call are this session's, unless it was handed on.
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
    let (part, place) = unsafe { (of(borrow(request)?), Place::at(bytes)?) };
    place.give(part.as_ptr());
    Ok(part.len())
}

/// Where a call's arguments begin; answers how many bytes they have. Valid until the request is answered, handed on or freed.
///
/// # Safety
/// `request` is a request; `bytes` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_request_arguments(request: *const byway_request, bytes: *mut *const u8) -> c_int {
    // SAFETY: by the caller's word.
    guard(|| fits(c_int::try_from(unsafe { part(request, bytes, |request| &request.request.arguments)? })))
}

/// Where a call's payload begins; answers how many bytes it has. Valid as its arguments are.
///
/// # Safety
/// `request` is a request; `bytes` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_request_payload(request: *const byway_request, bytes: *mut *const u8) -> c_int {
    // SAFETY: by the caller's word.
    guard(|| fits(c_int::try_from(unsafe { part(request, bytes, |request| &request.request.payload)? })))
}

/// Where the descriptors of a call's windows begin, 32 bytes each; answers how many windows there are. Valid as its arguments are.
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

/// 1 if the caller of a request waits for no answer any more, else 0.
///
/// # Safety
/// `request` is a request.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_request_is_cancelled(request: *const byway_request) -> c_int {
    // SAFETY: by the caller's word.
    guard(|| Ok(c_int::from(unsafe { borrow(request)? }.request.token.is_cancelled())))
}

/// Answers a call and frees the request, whatever comes of it: `status` 0 if it went well, a result of at most 64 bytes, a payload of at
/// most 16 KiB with it. Where the answer could not be sent, the caller is told that its call was given up, if there is a way.
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

/// Hands a call on to the node at the other end of `third`, which answers the caller instead, and frees the request if that went
/// well. `call` is what it gets: its payload is the continuation, all that the third must know to carry on, as nothing of the call
/// stays here. The windows in it are of use to the third only if they were opened to its session. If it fails the request
/// is as it was, whoever looks at it meanwhile. But nobody may use it when this succeeds, since that frees it.
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

/// Frees a request that is not to be answered: its caller is told that it was given up. Null is nothing.
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
