//! How a window is named in a message of the layer above.

use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::windows::WindowKey;

/// A peer's rights to a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    /// Write into it.
    pub put: bool,
    /// Read from it.
    pub get: bool,
}

impl Rights {
    /// To write alone.
    pub const PUT: Self = Self { put: true, get: false };
    /// To read alone.
    pub const GET: Self = Self { put: false, get: true };
    /// Both.
    pub const BOTH: Self = Self { put: true, get: true };
}

/// A window, as its owner describes it to the peer: 32 bytes, for a message. A peer that has them can use the window, over the
/// session that it was opened for (or one of several, see
/// [`Node::open_window_for_one_of`](crate::node::Node::open_window_for_one_of)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Descriptor {
    put: U64,
    get: U64,
    len: U64,
    reserved: U64,
}

/// Bytes of a [`Descriptor`].
pub const DESCRIPTOR_BYTES: usize = size_of::<Descriptor>();
const _: () = assert!(DESCRIPTOR_BYTES == 32);

impl Descriptor {
    /// Of a window of `len` bytes, with its key for puts, for gets, or both.
    pub fn new(put: Option<WindowKey>, get: Option<WindowKey>, len: usize) -> Self {
        let key = |key: Option<WindowKey>| U64::new(key.map_or(0, |key| key.0));
        Self { put: key(put), get: key(get), len: U64::new(len as u64), reserved: U64::new(0) }
    }

    /// Bytes of the window.
    pub fn len(&self) -> u64 {
        self.len.get()
    }

    /// No bytes?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The rights to it.
    pub fn rights(&self) -> Rights {
        Rights { put: self.put.get() != 0, get: self.get.get() != 0 }
    }

    /// As it goes into a message.
    pub fn to_bytes(self) -> [u8; DESCRIPTOR_BYTES] {
        zerocopy::transmute!(self)
    }

    /// As it came in a message. Any bytes will do: what is no window is refused by the peer.
    pub fn from_bytes(bytes: &[u8; DESCRIPTOR_BYTES]) -> Self {
        zerocopy::transmute!(*bytes)
    }

    /// The key for puts; 0 if there is none.
    pub fn put_key(&self) -> WindowKey {
        WindowKey(self.put.get())
    }

    /// The key for gets; 0 if there is none.
    pub fn get_key(&self) -> WindowKey {
        WindowKey(self.get.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_has_these_bytes() {
        let (put, get) = (WindowKey(0x0807_0605_0403_0201), WindowKey(0x100f_0e0d_0c0b_0a09));
        let descriptor = Descriptor::new(Some(put), Some(get), 0x1413_1211);
        let golden: Vec<u8> = (1..=20).chain([0; 12]).collect();
        assert_eq!(descriptor.to_bytes()[..], golden);
        assert_eq!(Descriptor::from_bytes(&descriptor.to_bytes()), descriptor);
        assert_eq!(Descriptor::new(None, Some(get), 1).rights(), Rights::GET);
        assert_eq!(Descriptor::new(Some(put), None, 1).rights(), Rights::PUT);
    }
}
