//! The errors that NBD knows on the wire.

/// An error of the transmission phase (proto.md, "Error values"). Their numbers are fixed by the
/// protocol and only happen to be those of Linux.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[repr(u32)]
pub enum Errno {
    /// A write to a read-only export.
    #[error("operation not permitted")]
    NotPermitted = 1,
    /// The store failed.
    #[error("input/output error")]
    InputOutput = 5,
    /// No memory for the request.
    #[error("cannot allocate memory")]
    NoMemory = 12,
    /// The request breaks a rule: flags, bounds, alignment, an unknown command.
    #[error("invalid argument")]
    Invalid = 22,
    /// A write past the end, or the store is full.
    #[error("no space left on device")]
    NoSpace = 28,
    /// The request is longer than can be served in one.
    #[error("value too large")]
    Overflow = 75,
    /// A fast zero that would not be fast.
    #[error("operation not supported")]
    NotSupported = 95,
    /// The server is draining.
    #[error("server is shutting down")]
    Shutdown = 108,
}

impl Errno {
    /// The number on the wire.
    pub const fn to_wire(self) -> u32 {
        self as u32
    }

    /// What a nonzero number on the wire means; one that the protocol does not know counts as
    /// [`Errno::Invalid`], as proto.md asks of clients.
    pub const fn from_wire(number: u32) -> Errno {
        match number {
            1 => Errno::NotPermitted,
            5 => Errno::InputOutput,
            12 => Errno::NoMemory,
            28 => Errno::NoSpace,
            75 => Errno::Overflow,
            95 => Errno::NotSupported,
            108 => Errno::Shutdown,
            _ => Errno::Invalid,
        }
    }

    /// The error to send for a Linux error number of the store; what has no counterpart becomes
    /// [`Errno::InputOutput`]. `EDQUOT` and `EFBIG` become [`Errno::NoSpace`] as proto.md asks.
    pub const fn from_os(number: i32) -> Errno {
        const EACCES: i32 = 13;
        const EFBIG: i32 = 27;
        const EROFS: i32 = 30;
        const EDQUOT: i32 = 122;
        match number {
            1 | EACCES | EROFS => Errno::NotPermitted,
            12 => Errno::NoMemory,
            22 => Errno::Invalid,
            28 | EFBIG | EDQUOT => Errno::NoSpace,
            75 => Errno::Overflow,
            95 => Errno::NotSupported,
            108 => Errno::Shutdown,
            _ => Errno::InputOutput,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_keeps_its_number() {
        for number in [1, 5, 12, 22, 28, 75, 95, 108] {
            assert_eq!(Errno::from_wire(number).to_wire(), number);
            if number != 5 {
                assert_eq!(Errno::from_os(number as i32).to_wire(), number);
            }
        }
    }

    #[test]
    fn what_the_protocol_does_not_know_is_mapped() {
        assert_eq!(Errno::from_wire(4711), Errno::Invalid);
        assert_eq!(Errno::from_os(122), Errno::NoSpace);
        assert_eq!(Errno::from_os(30), Errno::NotPermitted);
        assert_eq!(Errno::from_os(4711), Errno::InputOutput);
    }
}
