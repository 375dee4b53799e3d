//! Nodes for C: `include/byway.h` is generated from this crate (a test reports a stale one).
//!
//! A function returns 0 or more on success, otherwise one of `BYWAY_E_*`; [`byway_error_text`] explains the error. No panic
//! leaves a function. A null pointer is refused; any other pointer must be as its description says, and valid for the call
//! unless it says otherwise. The description of an object names the function that frees it, once. Several threads may use a
//! handle at once, except to free it.

mod anl;
mod call;
mod dsm;
mod error;
mod far;
mod feedback;
mod group;
mod memory;
mod node;
mod operation;

pub use anl::{
    byway_anl_barrier, byway_anl_begin, byway_anl_create, byway_anl_end, byway_anl_flag, byway_anl_lock,
    byway_anl_malloc, byway_anl_number, byway_anl_set, byway_anl_unlock, byway_anl_wait, byway_anl_wait_for,
    byway_anl_wait_signal,
};
pub use call::{
    byway_answer, byway_call, byway_call_start, byway_delegate, byway_next_call, byway_request,
    byway_request_arguments, byway_request_free, byway_request_is_cancelled, byway_request_method,
    byway_request_payload, byway_request_session, byway_request_windows,
};
pub use dsm::{
    byway_dsm_allocate, byway_dsm_barrier, byway_dsm_checkpoint, byway_dsm_counters, byway_dsm_fence, byway_dsm_fetch,
    byway_dsm_finish, byway_dsm_init, byway_dsm_is_resumed, byway_dsm_job, byway_dsm_lock, byway_dsm_name,
    byway_dsm_poll, byway_dsm_rank, byway_dsm_ranks, byway_dsm_segment, byway_dsm_statistics, byway_dsm_unlock,
};
pub use error::byway_error_text;
pub use far::{
    byway_far, byway_far_bytes, byway_far_close, byway_far_counters, byway_far_len, byway_far_open,
    byway_far_statistics,
};
pub use feedback::{
    byway_capabilities, byway_feedback, byway_session_capabilities, byway_session_feedback, byway_waits,
};
pub use group::{
    byway_group, byway_group_add, byway_group_descriptor, byway_group_free, byway_group_new, byway_group_wait,
};
pub use memory::{
    byway_memory, byway_memory_bytes, byway_memory_free, byway_memory_len, byway_register, byway_window,
    byway_window_close, byway_window_open,
};
pub use node::{
    byway_accept, byway_connect, byway_listen, byway_node, byway_node_close, byway_node_descriptor, byway_node_open,
    byway_node_open_for_calls, byway_progress, byway_session_close,
};
pub use operation::{
    byway_cancel, byway_completion, byway_flush, byway_get, byway_message, byway_message_free, byway_message_header,
    byway_message_payload, byway_op, byway_op_free, byway_put, byway_receive, byway_segment, byway_send, byway_wait,
    byway_wait_any,
};
