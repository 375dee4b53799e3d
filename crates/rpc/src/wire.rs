//! The bodies of the fabric's `Call` and `Reply`, and of the `Data` that brings a part of an answer. docs/wire.md draws the byte maps.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use byway_fabric::wire::BODY_BYTES;

pub use crate::limits::INLINE_BYTES;

/// Body of a `Call`. The header's window is the caller's: for the answer's payload, or holding what the server shall pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CallBody {
    /// Names the call in its session; its low half is under the session's credits.
    pub call: U64,
    /// What to do.
    pub method: U16,
    /// Zero.
    pub reserved: U16,
    /// Bytes of the window; 0 without one.
    pub window_len: U32,
    /// The arguments.
    pub arguments: [u8; INLINE_BYTES],
}

/// Body of a `Reply`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ReplyBody {
    /// The call.
    pub call: U64,
    /// 0: it went well. Else the service's.
    pub status: U16,
    /// Zero.
    pub reserved: U16,
    /// Bytes of payload of the whole answer, in this message and in `Data` before or after it.
    pub total: U32,
    /// The result.
    pub result: [u8; INLINE_BYTES],
}

/// Body of a `Data` that brings a part of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DataBody {
    /// The call that it is for.
    pub call: U64,
    /// Zero.
    pub reserved: [u8; 72],
}

const _: () = assert!(size_of::<CallBody>() == BODY_BYTES && size_of::<ReplyBody>() == BODY_BYTES);
const _: () = assert!(size_of::<DataBody>() == BODY_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_have_these_bytes() {
        let call = CallBody {
            call: U64::new(0x0807_0605_0403_0201),
            method: U16::new(0x0a09),
            reserved: U16::new(0),
            window_len: U32::new(0x0e0d_0c0b),
            arguments: [0xaa; 64],
        };
        let mut golden = vec![1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0, 11, 12, 13, 14];
        golden.extend([0xaa; 64]);
        assert_eq!(call.as_bytes(), golden);
        let reply = ReplyBody {
            call: call.call,
            status: call.method,
            reserved: U16::new(0),
            total: call.window_len,
            result: [0xaa; 64],
        };
        assert_eq!(reply.as_bytes(), golden);
        let data = DataBody { call: call.call, reserved: [0; 72] };
        let mut golden = vec![1, 2, 3, 4, 5, 6, 7, 8];
        golden.extend([0; 72]);
        assert_eq!(data.as_bytes(), golden);
    }
}
