//! Groups of operations, which threads share.

use std::ffi::c_int;
use std::os::fd::AsRawFd;

use byway_fabric::node::Group;

use crate::error::{Place, borrow, guard};
use crate::node::{byway_node, deadline};
use crate::operation::{byway_completion, byway_op, completion_at, ended};

/// Completions of the operations that were added to it.
#[expect(non_camel_case_types, reason = "C's name")]
pub struct byway_group(Group);

/// Makes a group of at most `capacity` operations (1 to 65,536). Free it with `byway_group_free`.
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
        let (node, place) = unsafe { (borrow(node)?, Place::at(group)?) };
        place.give(Box::into_raw(Box::new(byway_group(node.node().group(capacity)?))));
        Ok(0)
    })
}

/// Adds an operation, which is freed by that if it went well; `context` is what its completion will be called. If it has ended
/// already, its completion is there at once. `BYWAY_E_BUSY` if the group holds as many as it was made for, or the result was taken:
/// then the operation is the caller's still, as it was, whoever waits for it meanwhile. But nobody may use it when this succeeds,
/// since that frees it.
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

/// Waits for one of the group's operations, at most `timeout_ms`, for ever if negative, a look if 0. Answers 1 if one has ended: its
/// context is in `*context`, how it ended in `*result` (0, or one of `BYWAY_E_*`), and what it brought in `*completion`, which may be
/// null. Each completion goes to one of the threads that wait.
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
        let (group, places) = unsafe { (borrow(group)?, (Place::at(context)?, Place::at(result)?)) };
        // SAFETY: by the caller's word.
        let completion = unsafe { completion_at(completion)? };
        let came = group.0.wait(deadline(timeout_ms))?;
        places.0.give(came.context);
        places.1.give(ended(came.result, completion).map_or_else(|code| code.0, |()| 0));
        Ok(1)
    })
}

/// A descriptor that is readable while the group has completions. Somebody must make them: poll it together with
/// `byway_node_descriptor`. It is the group's: not to be closed.
///
/// # Safety
/// `group` is a group.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_group_descriptor(group: *const byway_group) -> c_int {
    // SAFETY: by the caller's word.
    guard(|| Ok(unsafe { borrow(group)? }.0.descriptor()?.as_raw_fd()))
}

/// Frees a group, and what is in it as `byway_op_free` does. Null is nothing.
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
