//! The capabilities of a session's transport, as plain data: read once, when a session begins.
//!
//! Code above a session never asks which transport it has: an operation means the same on each, and differences in cost or
//! trust are fields here. `byway doctor` prints them, and the conformance suite checks each transport's claims.

use byway_reactor::limits::SEGMENTS_PER_CALL_MAX;
use byway_reactor::{Address, Reactor, Socket};

use crate::limits::RDMA_SEGMENTS_MAX;

/// The transport of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WireKind {
    /// `tcp://`
    Tcp,
    /// `unix://`: a unix stream socket.
    Unix,
    /// `shm://`: streams over shared memory, and memory that one end has lent the other.
    Shared,
    /// `rdma://`: a reliable connection of an RDMA device.
    Rdma,
}

impl WireKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Tcp, Self::Unix, Self::Shared, Self::Rdma];

    /// As its addresses begin.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Unix => "unix",
            Self::Shared => "shm",
            Self::Rdma => "rdma",
        }
    }

    /// Of a client's session there.
    pub(crate) fn of_address(address: &Address) -> Self {
        match address {
            Address::Tcp(_) => Self::Tcp,
            Address::Unix(_) => Self::Unix,
            Address::Shared(_) => Self::Shared,
            Address::Rdma(_) => Self::Rdma,
        }
    }

    /// Of a connection that was accepted; without a socket it is one over RDMA.
    pub(crate) fn of_socket(reactor: &Reactor, socket: Option<Socket>) -> Self {
        match socket {
            None => Self::Rdma,
            Some(socket) if reactor.is_shared(socket) => Self::Shared,
            Some(socket) if reactor.is_tcp(socket) => Self::Tcp,
            Some(_) => Self::Unix,
        }
    }
}

/// Which end or device moves the bytes of a put or a get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OneSided {
    /// The peer's loop has a part in it: emulated. Its program has not, but must turn its node.
    Emulated,
    /// The requester, if the peer has lent the memory ([`Node::register_shared`](crate::node::Node::register_shared), of files
    /// for gets; an arena); elsewhere emulated. The owner still hears of a put.
    WhereLent,
    /// Devices: the peer's processor has no part in it.
    Native,
}

impl OneSided {
    /// A word or two for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Emulated => "emulated",
            Self::WhereLent => "where lent",
            Self::Native => "native",
        }
    }
}

/// The capabilities of a session's transport. The same for both ends, except [`zero_copy_send`](Self::zero_copy_send).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own, and callers choose by it")]
pub struct Capabilities {
    /// The session's transport.
    pub wire: WireKind,
    /// Whether all of it goes through TLS.
    pub secure: bool,
    /// Which end or device moves the bytes of puts and gets.
    pub one_sided: OneSided,
    /// Whether a peer that means harm is kept to the windows that are open to it: to their ranges, their rights and their
    /// time. Else it reaches all of a memory that was lent to it, of which windows are only where an honest one looks (decisions
    /// 0016 and 0022): over shared memory, where memory that was not lent is as safe as elsewhere.
    ///
    /// Over RDMA it is the owner's device that refuses, and then ends the connection. It knows a window by a key of 32 bits,
    /// in clear: another peer of the same node that guesses one can use that window. That a window for one use was used it
    /// does not know (decision 0018).
    pub window_enforced: bool,
    /// Whether a window may be open to the peers of several sessions, of which this is one: not where the owner's device looks at
    /// its uses, for one connection.
    pub windows_for_several: bool,
    /// Whether what is sent out of frames can go from where it lies, read by the device or the kernel. Over TCP it is tried, by
    /// io_uring alone, for sends of at least 64 KiB (decision 0011).
    pub zero_copy_send: bool,
    /// Pieces of memory that the wire takes at a time, `usize::MAX` for any number; a payload of more goes in several, unseen by
    /// its sender and receiver. Over RDMA a device may take fewer.
    pub segments_max: usize,
    /// Whether memory must be registered with a device before it is moved, which the [cache](crate::registration) does, and
    /// counts: memory whose pages may be replaced is then refused.
    pub registers: bool,
    /// Whether payloads to the peer may lie in memory of a device, which the CPU should not look at: where the kernel takes
    /// them from there (decision 0019).
    pub device_memory: bool,
}

impl Capabilities {
    /// Of a wire, over io_uring where that matters.
    pub const fn of(wire: WireKind, secure: bool) -> Self {
        use WireKind::{Rdma, Shared, Tcp};
        let is_plain_tcp = matches!(wire, Tcp) && !secure;
        let (is_lent, is_rdma) = (matches!(wire, Shared) && !secure, matches!(wire, Rdma));
        let segments_max = match wire {
            Rdma => RDMA_SEGMENTS_MAX as usize,
            Shared => usize::MAX,
            _ => SEGMENTS_PER_CALL_MAX,
        };
        Self {
            wire,
            secure,
            one_sided: match wire {
                Rdma => OneSided::Native,
                _ if is_lent => OneSided::WhereLent,
                _ => OneSided::Emulated,
            },
            window_enforced: !is_lent,
            windows_for_several: !is_rdma,
            zero_copy_send: is_plain_tcp || is_rdma,
            segments_max,
            registers: is_rdma,
            device_memory: is_plain_tcp,
        }
    }

    /// Of a session on a loop.
    pub(crate) fn on(reactor: &Reactor, wire: WireKind, secure: bool) -> Self {
        let all = Self::of(wire, secure);
        let can_send = wire == WireKind::Rdma || reactor.io().name == "uring";
        Self { zero_copy_send: all.zero_copy_send && can_send, ..all }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_through_tls_is_read_and_lent_to_nobody() {
        for wire in WireKind::ALL.into_iter().filter(|wire| *wire != WireKind::Rdma) {
            let all = Capabilities::of(wire, true);
            assert!(all.secure && all.window_enforced && !all.zero_copy_send && !all.device_memory, "{wire:?}");
            assert_eq!(all.one_sided, OneSided::Emulated);
        }
    }

    #[test]
    fn only_lent_memory_is_not_enforced() {
        let enforced = WireKind::ALL.map(|wire| Capabilities::of(wire, false).window_enforced);
        assert_eq!(enforced, [true, true, false, true]);
    }
}
