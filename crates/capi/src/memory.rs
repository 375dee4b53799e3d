//! Memory and windows.

use std::ffi::c_int;

use byway_fabric::node::{DESCRIPTOR_BYTES, Memory, Rights, Session, Window};

use crate::error::{BYWAY_E_INVALID, BYWAY_E_TAKEN, Code, OutPointer, borrow, guard};
use crate::node::{byway_node, deadline};

/// Memory that operations and windows can use.
#[expect(non_camel_case_types, reason = "C's name")]
pub struct byway_memory(pub(crate) Memory);

/// A window that is open to a peer.
#[expect(non_camel_case_types, reason = "C's name")]
pub struct byway_window(Option<Window>);

/// The peer may write.
pub const BYWAY_PUT: u32 = 1;
/// The peer may read.
pub const BYWAY_GET: u32 = 2;
/// The window can be used once, and has at most 1 MiB.
pub const BYWAY_ONCE: u32 = 4;

/// Allocates memory of `bytes` (at least 1): zeroes, at a page boundary. While operations or windows of one node use it, other
/// nodes are refused (`BYWAY_E_OTHER_NODE`). Free it with `byway_memory_free`.
///
/// # Safety
/// `node` is a node; `memory` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_register(
    node: *const byway_node,
    bytes: usize,
    memory: *mut *mut byway_memory,
) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (node, place) = unsafe { (borrow(node)?, OutPointer::at(memory)?) };
        place.give(Box::into_raw(Box::new(byway_memory(node.node().register(bytes)?))));
        Ok(0)
    })
}

/// The start of the memory; null if `memory` is. The program must not change bytes that an operation uses, and may read mixed
/// contents while one writes them; where the peer requires checksums, changing bytes during a put or a peer's get ends the
/// session. Valid until the memory is freed.
///
/// # Safety
/// `memory` is null or of `byway_register`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_memory_bytes(memory: *const byway_memory) -> *mut u8 {
    // SAFETY: by the caller's word.
    unsafe { memory.as_ref() }.map_or(std::ptr::null_mut(), |memory| memory.0.as_ptr())
}

/// The size of the memory in bytes; 0 if `memory` is null.
///
/// # Safety
/// `memory` is null or of `byway_register`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_memory_len(memory: *const byway_memory) -> usize {
    // SAFETY: by the caller's word.
    unsafe { memory.as_ref() }.map_or(0, |memory| memory.0.len())
}

/// Frees memory. Memory that operations and windows still use is freed when they end. Does nothing for null.
///
/// # Safety
/// `memory` is null or of `byway_register`, and neither it nor its bytes are used after.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_memory_free(memory: *mut byway_memory) {
    guard(|| {
        if !memory.is_null() {
            // SAFETY: made by `Box::into_raw`, and freed once, by the caller's word.
            drop(unsafe { Box::from_raw(memory) });
        }
        Ok(0)
    });
}

/// Opens `len` bytes of memory, from `offset` on, to the peer of a session. `rights` are `BYWAY_PUT`, `BYWAY_GET` or both, perhaps with
/// `BYWAY_ONCE`. Writes the 32 bytes that the peer needs to `descriptor`. Close it with `byway_window_close`.
///
/// # Safety
/// `node` and `memory` are what their names say; `descriptor` has room for 32 bytes; `window` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_window_open(
    node: *const byway_node,
    session: u64,
    memory: *const byway_memory,
    offset: usize,
    len: usize,
    rights: u32,
    descriptor: *mut u8,
    window: *mut *mut byway_window,
) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (node, memory) = unsafe { (borrow(node)?, borrow(memory)?) };
        // SAFETY: room for 32 bytes, and can be written, by the caller's word; an array of bytes has no alignment.
        let (bytes, place) =
            unsafe { (OutPointer::at(descriptor.cast::<[u8; DESCRIPTOR_BYTES]>())?, OutPointer::at(window)?) };
        if rights & !(BYWAY_PUT | BYWAY_GET | BYWAY_ONCE) != 0 {
            return Err(Code(BYWAY_E_INVALID));
        }
        let wanted = Rights { put: rights & BYWAY_PUT != 0, get: rights & BYWAY_GET != 0 };
        let (session, range) = (Session::from_u64(session), offset..offset.saturating_add(len));
        let opened = if rights & BYWAY_ONCE == 0 {
            node.node().open_window(session, &memory.0, range, wanted)?
        } else {
            node.node().open_window_once(session, &memory.0, range, wanted)?
        };
        bytes.give(opened.descriptor().to_bytes());
        place.give(Box::into_raw(Box::new(byway_window(Some(opened)))));
        Ok(0)
    })
}

/// Closes and frees a window, and waits until its peer can no longer reach the memory: at most `timeout_ms`, for ever if
/// negative. After `BYWAY_E_DEADLINE` the handle is freed and the window is still closing.
///
/// # Safety
/// `window` is of `byway_window_open`, and not used after.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_window_close(window: *mut byway_window, timeout_ms: i64) -> c_int {
    guard(|| {
        if window.is_null() {
            return Err(Code(BYWAY_E_INVALID));
        }
        // SAFETY: made by `Box::into_raw`, and freed once, by the caller's word.
        let mut window = unsafe { Box::from_raw(window) };
        let open = window.0.take().ok_or(Code(BYWAY_E_TAKEN))?;
        open.close()?.wait(deadline(timeout_ms))??;
        Ok(0)
    })
}
