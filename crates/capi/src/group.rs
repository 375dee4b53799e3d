//! Groups of operations, which threads share.

use std::ffi::c_int;
use std::os::fd::AsRawFd;

use byway_fabric::node::Group;

use crate::error::{OutPointer, borrow, guard};
use crate::node::{byway_node, deadline};
use crate::operation::{byway_completion, byway_op, completion_at, ended};

/// Completions of the operations that were added to it.
#[expect(non_camel_case_types, reason = "C's name")]
pub struct byway_group(Group);

/// Creates a group of at most `capacity` operations (1 to 65,536). Free it with `byway_group_free`.
///
/// # Safety
/// `node` is a node; `group` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_group_new(
    node: *const byway_node,
    capacity: usize,
    group: *mut *mut byway_group,
) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (node, place) = unsafe { (borrow(node)?, OutPointer::at(group)?) };
        place.give(Box::into_raw(Box::new(byway_group(node.node().group(capacity)?))));
        Ok(0)
    })
}

/// Adds an operation and, on success, frees its handle; its completion will carry `context`. If the operation has ended
/// already, its completion is available at once. `BYWAY_E_BUSY` if the group is full or the result was taken: then the caller
/// keeps the operation unchanged, also if another thread waits for it. On success no thread may use the handle any more.
///
/// # Safety
/// `group` is a group; `op` is an operation of the same node; if this answers 0 it is in no other call, and not used after.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_group_add(group: *const byway_group, op: *mut byway_op, context: u64) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (group, handle) = unsafe { (borrow(group)?, borrow(op)?) };
        group.0.adopt(&handle.0, context)?;
        // SAFETY: made by `Box::into_raw`, in no other call and not used after, by the caller's word.
        drop(unsafe { Box::from_raw(op) });
        Ok(0)
    })
}

/// Waits for one of the group's operations: at most `timeout_ms`, for ever if negative, without waiting if 0. Returns 1 if one
/// has ended: `*context` has its context, `*result` how it ended (0, or one of `BYWAY_E_*`), and `*completion`, which may be
/// null, its result. Each completion goes to one waiting thread.
///
/// # Safety
/// `group` is a group; `context` and `result` can be written; `completion` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_group_wait(
    group: *const byway_group,
    timeout_ms: i64,
    context: *mut u64,
    result: *mut c_int,
    completion: *mut byway_completion,
) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (group, places) = unsafe { (borrow(group)?, (OutPointer::at(context)?, OutPointer::at(result)?)) };
        // SAFETY: by the caller's word.
        let completion = unsafe { completion_at(completion)? };
        let came = group.0.wait(deadline(timeout_ms))?;
        places.0.give(came.context);
        places.1.give(ended(came.result, completion).map_or_else(|code| code.0, |()| 0));
        Ok(1)
    })
}

/// A descriptor that is readable while the group has completions. Operations only end while the node is driven: poll this
/// descriptor together with `byway_node_descriptor`. It belongs to the group: do not close it.
///
/// # Safety
/// `group` is a group.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_group_descriptor(group: *const byway_group) -> c_int {
    // SAFETY: by the caller's word.
    guard(|| Ok(unsafe { borrow(group)? }.0.descriptor()?.as_raw_fd()))
}

/// Frees a group, and its operations as `byway_op_free` does. Does nothing for null.
///
/// # Safety
/// `group` is null or a group, and not used after.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_group_free(group: *mut byway_group) {
    guard(|| {
        if !group.is_null() {
            // SAFETY: made by `Box::into_raw`, and freed once, by the caller's word.
            drop(unsafe { Box::from_raw(group) });
        }
        Ok(0)
    });
}
