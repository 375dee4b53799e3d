//! A file system's replies: attributes, entries and listings, in the kernel's format.

use std::time::Duration;

use zerocopy::IntoBytes;

use super::abi::{Attr, AttrOut, DirEntry, EntryOut, OutHeader};

/// A node under a name, and how long the kernel may believe it without asking again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// The node; 0 says that there is none of that name.
    pub node: u64,
    /// Tells apart nodes that have one number after the other.
    pub generation: u64,
    /// Its attributes.
    pub attr: Attr,
    /// How long the name leads to this node.
    pub entry_valid: Duration,
    /// How long the attributes hold.
    pub attr_valid: Duration,
}

impl Entry {
    /// As it travels.
    pub fn encode(&self) -> EntryOut {
        EntryOut {
            node: self.node,
            generation: self.generation,
            entry_valid: self.entry_valid.as_secs(),
            attr_valid: self.attr_valid.as_secs(),
            entry_valid_ns: self.entry_valid.subsec_nanos(),
            attr_valid_ns: self.attr_valid.subsec_nanos(),
            attr: self.attr,
        }
    }
}

/// Attributes and how long they hold, as they travel.
pub fn attributes(attr: Attr, valid: Duration) -> AttrOut {
    AttrOut { valid: valid.as_secs(), valid_ns: valid.subsec_nanos(), padding: 0, attr }
}

/// The header of a reply with `payload_bytes` behind it; `error` is 0 or a negative errno.
pub fn header(unique: u64, error: i32, payload_bytes: usize) -> OutHeader {
    OutHeader { len: (size_of::<OutHeader>() + payload_bytes) as u32, error, unique }
}

/// A part of a directory's listing, within the bytes that the kernel asked for.
#[derive(Clone, Debug)]
pub struct Directory {
    bytes: Vec<u8>,
    bytes_max: usize,
    plus: bool,
}

/// One name of a listing.
#[derive(Clone, Copy, Debug)]
pub struct Listed<'a> {
    /// At most 255 bytes.
    pub name: &'a [u8],
    /// Its inode's number.
    pub ino: u64,
    /// The file's type, the upper four bits of its mode (`mode >> 12`), as `d_type`.
    pub kind: u32,
    /// Where the listing goes on behind it: the `offset` of a later request. Never 0.
    pub next: u64,
}

impl Directory {
    /// An empty part, for a request of that `size` in bytes and with that `plus`.
    pub fn new(size: u32, plus: bool) -> Self {
        Self { bytes: Vec::new(), bytes_max: size as usize, plus }
    }

    /// Adds a name; false if there is no room, and then it belongs to the next request.
    ///
    /// `entry` is for requests with `plus`: it counts as a look-up of its node. Without one, or with node 0, the kernel learns
    /// the name only; `.` and `..` have none.
    pub fn push(&mut self, listed: Listed<'_>, entry: Option<&Entry>) -> bool {
        let head = if self.plus { size_of::<EntryOut>() } else { 0 } + size_of::<DirEntry>();
        let padded = (head + listed.name.len()).next_multiple_of(8);
        if self.bytes.len() + padded > self.bytes_max {
            return false;
        }
        let end = self.bytes.len() + padded;
        if self.plus {
            self.bytes.extend(entry.map(Entry::encode).unwrap_or_default().as_bytes());
        }
        let name_bytes = listed.name.len() as u32;
        let head = DirEntry { ino: listed.ino, offset: listed.next, name_bytes, kind: listed.kind };
        self.bytes.extend(head.as_bytes());
        self.bytes.extend(listed.name);
        self.bytes.resize(end, 0);
        true
    }

    /// Whether nothing was added.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// As it travels.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(name: &[u8], next: u64) -> Listed<'_> {
        Listed { name, ino: 5, kind: 8, next }
    }

    #[test]
    fn a_listing_has_the_kernels_bytes_and_keeps_within_its_size() {
        let mut plain = Directory::new(64, false);
        assert!(plain.push(listed(b"abc", 1), None) && plain.push(listed(b"12345678", 2), None));
        assert!(!plain.push(listed(b"x", 3), None), "32 bytes each: the third finds no room");
        let mut golden = Vec::new();
        for (next, name) in [(1u64, &b"abc\0\0\0\0\0"[..]), (2, b"12345678")] {
            golden.extend(5u64.to_ne_bytes());
            golden.extend(next.to_ne_bytes());
            golden.extend((if next == 1 { 3u32 } else { 8 }).to_ne_bytes());
            golden.extend(8u32.to_ne_bytes());
            golden.extend(name);
        }
        assert_eq!(plain.as_bytes(), golden);
    }

    #[test]
    fn a_listing_with_attributes_has_an_entry_before_each_name() {
        let entry = Entry { node: 9, entry_valid: Duration::from_millis(1500), ..Entry::default() };
        let mut plus = Directory::new(4096, true);
        assert!(plus.push(listed(b"f", 1), Some(&entry)) && plus.push(listed(b"..", 2), None));
        assert_eq!(plus.as_bytes().len(), 2 * (128 + 32));
        assert_eq!(&plus.as_bytes()[..128], entry.encode().as_bytes());
        assert_eq!((entry.encode().entry_valid, entry.encode().entry_valid_ns), (1, 500_000_000));
        assert!(plus.as_bytes()[160..288].iter().all(|byte| *byte == 0));
    }
}
