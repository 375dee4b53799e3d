//! Feedback and capabilities of a session.

use std::ffi::c_int;
use std::time::Duration;

use byway_fabric::feedback::Waits;
use byway_fabric::node::{Session, SessionFeedback};
use byway_fabric::{Capabilities, OneSided, Stall, WireKind};

use crate::error::{OutPointer, borrow, guard};
use crate::node::byway_node;

/// The number of waits, and their duration.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct byway_waits {
    /// Times.
    pub count: u64,
    /// Nanoseconds in all.
    pub total_ns: u64,
    /// Nanoseconds of the longest.
    pub max_ns: u64,
}

/// Measurements of a session's transfers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct byway_feedback {
    /// Bytes that the peer, or the kernel for it, has accepted since the session began.
    pub sent_bytes: u64,
    /// Bytes received from the peer.
    pub received_bytes: u64,
    /// Bytes per second that the peer accepts, over about the last second.
    pub send_rate: f64,
    /// Bytes per second from the peer, over about the last second.
    pub receive_rate: f64,
    /// From when a message was queued until the last byte of its send was accepted.
    pub send_delay: byway_waits,
    /// Messages that waited until the peer's program had received others; counted when the wait ends.
    pub credit_stalls: byway_waits,
    /// Sends for which the peer, or the path, took at least a millisecond; counted when they end.
    pub take_stalls: byway_waits,
    /// Bytes that wait now to be sent and accepted.
    pub queued_bytes: u64,
    /// Nanoseconds that the oldest waiting message or send has waited so far; 0 if nothing waits.
    pub waiting_ns: u64,
    /// The path's round trip in nanoseconds, measured by the kernel; 0 if unknown, as over shared memory.
    pub round_trip_ns: u64,
    /// Bytes per second that the peer last acknowledged while the path was full; 0 if unknown.
    pub delivery_rate: u64,
}

/// The wire is TCP.
pub const BYWAY_WIRE_TCP: u32 = 1;
/// The wire is a Unix socket.
pub const BYWAY_WIRE_UNIX: u32 = 2;
/// The wire is shared memory.
pub const BYWAY_WIRE_SHM: u32 = 3;
/// The wire is RDMA.
pub const BYWAY_WIRE_RDMA: u32 = 4;

/// The peer's node takes part in each put and get: its program must drive it.
pub const BYWAY_ONE_SIDED_EMULATED: u32 = 0;
/// The requester copies directly if the peer has lent the memory; otherwise emulated.
pub const BYWAY_ONE_SIDED_WHERE_LENT: u32 = 1;
/// Devices move the bytes, without the peer's processor.
pub const BYWAY_ONE_SIDED_NATIVE: u32 = 2;

/// The capabilities of a session's transport. Booleans are 0 or 1.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct byway_capabilities {
    /// One of `BYWAY_WIRE_*`, or 0 for a transport that this header does not name.
    pub wire: u32,
    /// One of `BYWAY_ONE_SIDED_*`: which end or device moves the bytes of puts and gets.
    pub one_sided: u32,
    /// Pieces of memory that one transfer can have; `SIZE_MAX` for any number. A payload with more pieces is sent in several.
    pub segments_max: usize,
    /// All bytes go through TLS.
    pub secure: u8,
    /// A hostile peer can only use the windows that are open to it. Otherwise it reaches all of the memory that was lent to it;
    /// over shared memory this interface lends none.
    pub window_enforced: u8,
    /// Bytes may be sent from the program's memory without a copy.
    pub zero_copy_send: u8,
    /// Memory is registered with a device before it is moved.
    pub registers: u8,
    /// Payloads to the peer may lie in memory of a device.
    pub device_memory: u8,
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl From<Waits> for byway_waits {
    fn from(waits: Waits) -> Self {
        Self { count: waits.count, total_ns: nanos(waits.total), max_ns: nanos(waits.max) }
    }
}

impl From<SessionFeedback> for byway_feedback {
    fn from(seen: SessionFeedback) -> Self {
        let SessionFeedback { measured, path, .. } = seen;
        Self {
            sent_bytes: measured.sent_bytes,
            received_bytes: measured.received_bytes,
            send_rate: measured.send_rate,
            receive_rate: measured.receive_rate,
            send_delay: measured.send_delay.into(),
            credit_stalls: measured.stall(Stall::Credit).into(),
            take_stalls: measured.stall(Stall::Take).into(),
            queued_bytes: measured.queued_bytes,
            waiting_ns: nanos(measured.waiting),
            round_trip_ns: path.map_or(0, |path| nanos(path.round_trip)),
            delivery_rate: path.map_or(0, |path| path.delivery_rate),
        }
    }
}

impl From<Capabilities> for byway_capabilities {
    fn from(wire: Capabilities) -> Self {
        Self {
            wire: match wire.wire {
                WireKind::Tcp => BYWAY_WIRE_TCP,
                WireKind::Unix => BYWAY_WIRE_UNIX,
                WireKind::Shared => BYWAY_WIRE_SHM,
                WireKind::Rdma => BYWAY_WIRE_RDMA,
                _ => 0,
            },
            one_sided: match wire.one_sided {
                OneSided::WhereLent => BYWAY_ONE_SIDED_WHERE_LENT,
                OneSided::Native => BYWAY_ONE_SIDED_NATIVE,
                _ => BYWAY_ONE_SIDED_EMULATED,
            },
            segments_max: wire.segments_max,
            secure: wire.secure.into(),
            window_enforced: wire.window_enforced.into(),
            zero_copy_send: wire.zero_copy_send.into(),
            registers: wire.registers.into(),
            device_memory: wire.device_memory.into(),
        }
    }
}

/// Writes the current measurements of a session's transfers to `*feedback`. Never waits for the peer.
///
/// # Safety
/// `node` is a node; `feedback` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_session_feedback(
    node: *const byway_node,
    session: u64,
    feedback: *mut byway_feedback,
) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (node, place) = unsafe { (borrow(node)?, OutPointer::at(feedback)?) };
        place.give(node.node().feedback(Session::from_u64(session))?.into());
        Ok(0)
    })
}

/// Writes the capabilities of a session's transport to `*capabilities`. They do not change during the session.
///
/// # Safety
/// `node` is a node; `capabilities` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn byway_session_capabilities(
    node: *const byway_node,
    session: u64,
    capabilities: *mut byway_capabilities,
) -> c_int {
    guard(|| {
        // SAFETY: by the caller's word.
        let (node, place) = unsafe { (borrow(node)?, OutPointer::at(capabilities)?) };
        place.give(node.node().capabilities(Session::from_u64(session))?.into());
        Ok(0)
    })
}
