//! The private data of the connection manager's messages. docs/wire.md draws it.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::limits::{RDMA_CONNECT_BYTES_MAX, RDMA_CREDITS, RDMA_CREDITS_MAX};
use crate::wire::RefuseCode;

const MAGIC: [u8; 8] = *b"byway-rd";
const VERSION: u16 = 1;

/// The private data of a connect request, of its acceptance, and of its refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Greeting {
    /// [`MAGIC`].
    magic: [u8; 8],
    /// [`VERSION`].
    version: U16,
    /// In a refusal a [`RefuseCode`], else 0.
    refused: U16,
    /// Messages that the reader may send; 0 in a refusal.
    credits: U32,
}

const _: () = assert!(size_of::<Greeting>() == 16 && size_of::<Greeting>() <= RDMA_CONNECT_BYTES_MAX);

/// Why a greeting is not one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GreetingError {
    /// The peer is something else.
    NotByway,
    /// The peer refuses, or we must.
    Refused(RefuseCode),
}

/// What a side says that is willing.
pub(super) fn greeting() -> impl AsRef<[u8]> {
    bytes(0, RDMA_CREDITS)
}

/// What a server says that is not.
pub(super) fn refusal(code: RefuseCode) -> impl AsRef<[u8]> {
    bytes(code as u16, 0)
}

fn bytes(refused: u16, credits: u32) -> [u8; size_of::<Greeting>()] {
    let mut greeting = Greeting::new_zeroed();
    greeting.magic = MAGIC;
    greeting.version.set(VERSION);
    greeting.refused.set(refused);
    greeting.credits.set(credits);
    zerocopy::transmute!(greeting)
}

/// Reads the peer's greeting, with whatever lies behind it: gives how many messages it takes.
pub(super) fn read(data: &[u8]) -> Result<u32, GreetingError> {
    let read = Greeting::read_from_prefix(data).ok().map(|(greeting, _)| greeting);
    let greeting = read.filter(|greeting| greeting.magic == MAGIC).ok_or(GreetingError::NotByway)?;
    if greeting.refused.get() != 0 {
        return Err(GreetingError::Refused(RefuseCode::from_number(greeting.refused.get())));
    }
    if greeting.version.get() != VERSION {
        return Err(GreetingError::Refused(RefuseCode::Version));
    }
    match greeting.credits.get() {
        credits @ 4..=RDMA_CREDITS_MAX => Ok(credits),
        _ => Err(GreetingError::Refused(RefuseCode::Protocol)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_and_a_refusal_have_these_bytes() {
        assert_eq!(greeting().as_ref(), b"byway-rd\x01\0\0\0\x10\0\0\0");
        assert_eq!(refusal(RefuseCode::Busy).as_ref(), b"byway-rd\x01\0\x04\0\0\0\0\0");
    }

    #[test]
    fn greetings_are_read_with_zeros_behind_them_and_nothing_else_is() {
        let mut long = greeting().as_ref().to_vec();
        long.resize(56, 0);
        assert_eq!(read(&long), Ok(RDMA_CREDITS));
        assert_eq!(read(refusal(RefuseCode::Busy).as_ref()), Err(GreetingError::Refused(RefuseCode::Busy)));
        assert_eq!(read(&long[..15]), Err(GreetingError::NotByway));
        assert_eq!(read(&[0; 56]), Err(GreetingError::NotByway));
        for (at, value, code) in [(8, 9, RefuseCode::Version), (12, 3, RefuseCode::Protocol)] {
            let mut other = long.clone();
            other[at] = value;
            assert_eq!(read(&other), Err(GreetingError::Refused(code)));
        }
        long[15] = 0xff;
        assert_eq!(read(&long), Err(GreetingError::Refused(RefuseCode::Protocol)), "more than anybody has");
    }
}
