//! Nodes and sessions.

use std::ffi::{CStr, c_char, c_int};
use std::os::fd::AsRawFd;
use std::time::Duration;

use byway_fabric::node::{Address, Deadline, Node, NodeOptions, Session, parse_address};
use byway_rpc::node::Rpc;

use crate::error::{BYWAY_E_INVALID, BYWAY_E_TOO_LONG, Code, OutPointer, borrow, guard};

/// A node.
#[expect(non_camel_case_types, reason = "C's name")]
pub struct byway_node(Kind);

enum Kind {
    Plain(Node),
    /// For calls too.
    Calls(Rpc),
}

impl byway_node {
    pub(crate) fn node(&self) -> &Node {
        match &self.0 {
            Kind::Plain(node) => node,
            Kind::Calls(rpc) => rpc.node(),
        }
    }

    pub(crate) fn rpc(&self) -> Option<&Rpc> {
        match &self.0 {
            Kind::Plain(_) => None,
            Kind::Calls(rpc) => Some(rpc),
        }
    }
}

/// Milliseconds from now; negative: for ever.
pub(crate) fn deadline(timeout_ms: i64) -> Deadline {
    u64::try_from(timeout_ms).map_or(Deadline::NEVER, |ms| Deadline::after(Duration::from_millis(ms)))
}

/// # Safety
/// `text` is null or ends with a zero byte.
pub(crate) unsafe fn address(text: *const c_char) -> Result<Address, Code> {
    if text.is_null() {
        return Err(Code(BYWAY_E_INVALID));
    }
    // SAFETY: not null, and ends with a zero byte by the caller's word.
    let text = unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| Code(BYWAY_E_INVALID))?;
    parse_address(text).map_err(|_| Code(BYWAY_E_INVALID))
}

/// Opens a node into `*node`. Free it with `byway_node_close`.
///
/// # Safety
/// `node` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_node_open(node: *mut *mut byway_node) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let place = unsafe { OutPointer::at(node)? };
        place.give(Box::into_raw(Box::new(byway_node(Kind::Plain(Node::open(&NodeOptions::default())?)))));
        Ok(0)
    })
}

/// The same, for a node that also makes and takes calls (`byway_call_start`, `byway_next_call`). Its peers must be opened in
/// the same way.
///
/// # Safety
/// `node` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_node_open_for_calls(node: *mut *mut byway_node) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let place = unsafe { OutPointer::at(node)? };
        place.give(Box::into_raw(Box::new(byway_node(Kind::Calls(Rpc::open(&NodeOptions::default())?)))));
        Ok(0)
    })
}

/// Frees a node. Its sessions end abruptly, and it stops listening, when its operations, windows, groups and requests are freed
/// too; close sessions before. Does nothing for null.
///
/// # Safety
/// `node` is null or of `byway_node_open` or `byway_node_open_for_calls`, and not used after.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_node_close(node: *mut byway_node) {
    guard(|| {
        if !node.is_null() {
            // SAFETY: made by `Box::into_raw`, and freed once, by the caller's word.
            drop(unsafe { Box::from_raw(node) });
        }
        Ok(0)
    });
}

/// Listens at `tcp://IP:PORT`, `unix://PATH`, `shm://PATH` or `rdma://IP:PORT`. Returns the port (the one that the kernel
/// chose, for port 0), or 0 if the address has none.
///
/// # Safety
/// `node` is a node; `at` ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_listen(node: *const byway_node, at: *const c_char) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (node, at) = unsafe { (borrow(node)?, address(at)?) };
        Ok(node.node().listen(&at)?.map_or(0, |at| c_int::from(at.port())))
    })
}

/// Connects, and writes the session's number to `*session`. Waits at most `timeout_ms`, after which nothing of the connection stays; for
/// ever if negative.
///
/// # Safety
/// `node` is a node; `to` ends with a zero byte; `session` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_connect(
    node: *const byway_node,
    to: *const c_char,
    timeout_ms: i64,
    session: *mut u64,
) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (node, to, place) = unsafe { (borrow(node)?, address(to)?, OutPointer::at(session)?) };
        place.give(node.node().connect(&to, deadline(timeout_ms))?.to_u64());
        Ok(0)
    })
}

/// Waits for a session that a peer begins, at most `timeout_ms`; for ever if negative.
///
/// # Safety
/// `node` is a node; `session` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_accept(node: *const byway_node, timeout_ms: i64, session: *mut u64) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (node, place) = unsafe { (borrow(node)?, OutPointer::at(session)?) };
        place.give(node.node().accept(deadline(timeout_ms))?.to_u64());
        Ok(0)
    })
}

/// Ends a session after its sent messages have gone out. Flush before, if puts must arrive.
///
/// # Safety
/// `node` is a node.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_session_close(node: *const byway_node, session: u64) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        unsafe { borrow(node)? }.node().close(Session::from_u64(session))?;
        Ok(0)
    })
}

/// A descriptor that is readable when `byway_progress` should be called. It belongs to the node: do not close it.
///
/// # Safety
/// `node` is a node.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_node_descriptor(node: *const byway_node) -> c_int {
    // SAFETY: by the caller's word.
    guard(|| Ok(unsafe { borrow(node)? }.node().descriptor()?.as_raw_fd()))
}

/// Does all pending work without waiting. Returns 1 if any operation has ended since the last call, else 0.
///
/// # Safety
/// `node` is a node.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_progress(node: *const byway_node) -> c_int {
    // SAFETY: by the caller's word.
    guard(|| Ok(c_int::from(unsafe { borrow(node)? }.node().progress()?)))
}

/// A length that must fit.
pub(crate) fn fits<T>(value: Result<T, std::num::TryFromIntError>) -> Result<T, Code> {
    value.map_err(|_| Code(BYWAY_E_TOO_LONG))
}
