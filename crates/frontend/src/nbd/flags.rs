//! The two sets of flags that outlive their message.

use std::ops::{BitOr, BitOrAssign};

/// What an export can do, as told at the end of the handshake (proto.md, "Transmission flags").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct TransmissionFlags(pub u16);

impl TransmissionFlags {
    /// Always set on the wire.
    pub const HAS_FLAGS: Self = Self(1 << 0);
    /// Writes are refused with EPERM.
    pub const READ_ONLY: Self = Self(1 << 1);
    /// FLUSH is served.
    pub const SEND_FLUSH: Self = Self(1 << 2);
    /// The FUA command flag is honoured.
    pub const SEND_FUA: Self = Self(1 << 3);
    /// The medium rotates.
    pub const ROTATIONAL: Self = Self(1 << 4);
    /// TRIM is served.
    pub const SEND_TRIM: Self = Self(1 << 5);
    /// WRITE_ZEROES and its NO_HOLE flag are served.
    pub const SEND_WRITE_ZEROES: Self = Self(1 << 6);
    /// The DF command flag is honoured; only with structured replies or extended headers.
    pub const SEND_DF: Self = Self(1 << 7);
    /// A flush on one connection covers the writes completed on all others.
    pub const CAN_MULTI_CONN: Self = Self(1 << 8);
    /// CACHE is served.
    pub const SEND_CACHE: Self = Self(1 << 10);
    /// The FAST_ZERO command flag is honoured; only together with SEND_WRITE_ZEROES.
    pub const SEND_FAST_ZERO: Self = Self(1 << 11);
    /// BLOCK_STATUS accepts a payload that names contexts. byway's server never sets it.
    pub const BLOCK_STATUS_PAYLOAD: Self = Self(1 << 12);

    /// Whether every flag of `other` is set.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// These flags without those of `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl BitOr for TransmissionFlags {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for TransmissionFlags {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

/// What a request asks for beside its command (proto.md, "Command flags").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct CommandFlags(pub u16);

impl CommandFlags {
    /// No flag.
    pub const NONE: Self = Self(0);
    /// What the command writes is on stable storage before its reply.
    pub const FUA: Self = Self(1 << 0);
    /// WRITE_ZEROES must not make a hole.
    pub const NO_HOLE: Self = Self(1 << 1);
    /// READ must be answered with one content chunk.
    pub const DF: Self = Self(1 << 2);
    /// BLOCK_STATUS must be answered with one extent.
    pub const REQ_ONE: Self = Self(1 << 3);
    /// WRITE_ZEROES must fail with ENOTSUP where it is no faster than writing.
    pub const FAST_ZERO: Self = Self(1 << 4);
    /// The length is that of a payload; extended headers only. It belongs to the framing:
    /// [`super::transmission`] takes it off and [`super::client`] puts it on.
    pub const PAYLOAD_LEN: Self = Self(1 << 5);

    /// Whether every flag of `other` is set.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// These flags without those of `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl BitOr for CommandFlags {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for CommandFlags {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}
