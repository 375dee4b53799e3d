//! The bodies of `Message`, `Credit` and `Placed`, and of the `Data` that a node puts. docs/wire.md draws the byte maps.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::limits::MESSAGE_HEADER_BYTES_MAX;
use crate::wire::BODY_BYTES;

/// Body of a `Message`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct MessageBody {
    /// Bytes of the header.
    pub header_len: u8,
    /// Zero.
    pub reserved: [u8; 15],
    /// What the sender says, then zeroes.
    pub header: [u8; MESSAGE_HEADER_BYTES_MAX],
}

/// Body of a node's `Data`. The first 8 bytes are those that name the target of a pull: no window, so that a refusal cannot be
/// taken for that of a get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct PutBody {
    /// Zero.
    pub target: U64,
    /// Names the put, for the sender; comes back in `Placed`, and in a `Nack`. 56 bits.
    pub put: [u8; 7],
    /// 0: no message follows the bytes. Else one more than the bytes of its header.
    pub message: u8,
    /// The header of the message, then zeroes.
    pub header: [u8; MESSAGE_HEADER_BYTES_MAX],
}

/// Body of a `Credit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CreditBody {
    /// Messages more.
    pub messages: U32,
    /// Zero.
    pub reserved: [u8; 76],
}

/// Body of a `Placed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct PlacedBody {
    /// Zero.
    pub target: U64,
    /// As in the `Data`.
    pub put: [u8; 7],
    /// Zero.
    pub reserved: [u8; 65],
}

const _: () = assert!(size_of::<MessageBody>() == BODY_BYTES && size_of::<PutBody>() == BODY_BYTES);
const _: () = assert!(size_of::<CreditBody>() == BODY_BYTES && size_of::<PlacedBody>() == BODY_BYTES);

impl MessageBody {
    /// Of a header of at most [`MESSAGE_HEADER_BYTES_MAX`] bytes.
    pub fn new(header: &[u8]) -> Self {
        let mut body = Self::new_zeroed();
        body.header_len = header.len() as u8;
        body.header[..header.len()].copy_from_slice(header);
        body
    }

    /// The header; `None` if it has a wrong length.
    pub fn read(&self) -> Option<&[u8]> {
        self.header.get(..usize::from(self.header_len))
    }
}

impl PutBody {
    /// Of put number `put` and perhaps a message behind it.
    pub fn new(put: u64, message: Option<&[u8]>) -> Self {
        let mut body = Self::new_zeroed();
        body.put.copy_from_slice(&put.to_le_bytes()[..7]);
        if let Some(header) = message {
            body.message = header.len() as u8 + 1;
            body.header[..header.len()].copy_from_slice(header);
        }
        body
    }

    /// The message behind it, if it has one; an error if that is no message.
    pub fn message(&self) -> Result<Option<&[u8]>, ()> {
        match usize::from(self.message) {
            0 => Ok(None),
            n => self.header.get(..n - 1).map(Some).ok_or(()),
        }
    }
}

/// The number in seven bytes.
pub fn put_number(bytes: [u8; 7]) -> u64 {
    let mut number = [0; 8];
    number[..7].copy_from_slice(&bytes);
    u64::from_le_bytes(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_have_these_bytes() {
        let mut golden = vec![3];
        golden.extend([0; 15]);
        golden.extend([7, 8, 9]);
        golden.extend([0; 61]);
        let body = MessageBody::new(&[7, 8, 9]);
        assert_eq!(body.as_bytes(), golden);
        assert_eq!(body.read(), Some(&[7, 8, 9][..]));

        let body = PutBody::new(0x0007_0605_0403_0201, Some(&[9, 8]));
        let mut golden = vec![0; 8];
        golden.extend([1, 2, 3, 4, 5, 6, 7, 3, 9, 8]);
        golden.extend([0; 62]);
        assert_eq!(body.as_bytes(), golden);
        assert_eq!((body.message(), put_number(body.put)), (Ok(Some(&[9, 8][..])), 0x0007_0605_0403_0201));
        assert_eq!(PutBody::new(1, None).message(), Ok(None));
        assert_eq!(PutBody::new(1, Some(&[])).message(), Ok(Some(&[][..])));

        let body = CreditBody { messages: U32::new(0x0403_0201), reserved: [0; 76] };
        assert_eq!(body.as_bytes()[..5], [1, 2, 3, 4, 0]);
        let body = PlacedBody { target: U64::new(0), put: [1, 2, 3, 4, 5, 6, 7], reserved: [0; 65] };
        assert_eq!(body.as_bytes()[..16], [0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 0]);
    }

    #[test]
    fn lengths_out_of_range_are_no_message() {
        let mut body = MessageBody::new(&[1; 64]);
        assert_eq!(body.read(), Some(&[1; 64][..]));
        body.header_len = 65;
        assert_eq!(body.read(), None);
        let mut put = PutBody::new(1, Some(&[1; 64]));
        assert!(put.message().is_ok());
        put.message = 66;
        assert_eq!(put.message(), Err(()));
    }
}
