//! Feedback and capabilities of a session.

use std::ffi::c_int;
use std::time::Duration;

use byway_fabric::feedback::Waits;
use byway_fabric::node::{Session, SessionFeedback};
use byway_fabric::{Capabilities, OneSided, Stall, WireKind};

use crate::error::{Place, borrow, guard};
use crate::node::byway_node;

/// How often something waited, and for how long.
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

/// What the transfers of a session are like.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct byway_feedback {
    /// Bytes that the peer, or the kernel for it, has taken since the session began.
    pub sent_bytes: u64,
    /// Bytes that came from it.
    pub received_bytes: u64,
    /// Bytes a second that it takes, over about the last second.
    pub send_rate: f64,
    /// Bytes a second that come from it.
    pub receive_rate: f64,
    /// From when a message was queued to when the last byte of what it was sent with was taken.
    pub send_delay: byway_waits,
    /// Messages that had to wait for the peer's program to take others; counted when that is over.
    pub credit_stalls: byway_waits,
    /// Sends for which the peer, or the path, took at least a millisecond; counted when that is over.
    pub take_stalls: byway_waits,
    /// Bytes that wait now to be taken.
    pub queued_bytes: u64,
    /// Nanoseconds for which what has waited longest now has waited already; 0 if nothing waits.
    pub waiting_ns: u64,
    /// The path's round trip in nanoseconds, as the kernel says; 0 where nobody says, as over shared memory.
    pub round_trip_ns: u64,
    /// Bytes a second that the peer last acknowledged while the path was full; 0 where nobody says.
    pub delivery_rate: u64,
}

/// The wire is TCP.
pub const BYWAY_WIRE_TCP: u32 = 1;
/// The wire is a unix socket.
pub const BYWAY_WIRE_UNIX: u32 = 2;
/// The wire is shared memory.
pub const BYWAY_WIRE_SHM: u32 = 3;
/// The wire is RDMA.
pub const BYWAY_WIRE_RDMA: u32 = 4;

/// The peer's node has a part in each put and get: its program must turn it.
pub const BYWAY_ONE_SIDED_EMULATED: u32 = 0;
/// Who asks copies by himself, where the peer has lent the memory; elsewhere emulated.
pub const BYWAY_ONE_SIDED_WHERE_LENT: u32 = 1;
/// Devices move the bytes; the peer's processor has no part in it.
pub const BYWAY_ONE_SIDED_NATIVE: u32 = 2;

/// What the wire of a session can do. Truths are 0 or 1.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct byway_capabilities {
    /// One of `BYWAY_WIRE_*`, or 0 for one that this header does not know.
    pub wire: u32,
    /// One of `BYWAY_ONE_SIDED_*`: who moves the bytes of puts and gets.
    pub one_sided: u32,
    /// Pieces of memory that the wire takes at a time; `SIZE_MAX` for any number. A payload of more goes in several.
    pub segments_max: usize,
    /// All of it goes through TLS.
    pub secure: u8,
    /// A peer that means harm is kept to the windows that are open to it. Else it reaches all of a memory that was lent to it; over
    /// shared memory C lends none.
    pub window_enforced: u8,
    /// What is sent may go from where it lies, without a copy.
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

/// Writes what the transfers of a session are like now to `*feedback`. Never waits for the peer.
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
        let (node, place) = unsafe { (borrow(node)?, Place::at(feedback)?) };
        place.give(node.node().feedback(Session::from_u64(session))?.into());
        Ok(0)
    })
}

/// Writes what the wire of a session can do to `*capabilities`: the same as long as the session lasts.
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
        let (node, place) = unsafe { (borrow(node)?, Place::at(capabilities)?) };
        place.give(node.node().capabilities(Session::from_u64(session))?.into());
        Ok(0)
    })
}
