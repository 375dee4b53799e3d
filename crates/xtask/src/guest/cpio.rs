//! Archives in the format that a kernel takes as its initramfs: `newc`, from
//! Documentation/driver-api/early-userspace/buffer-format.rst.

use std::collections::BTreeMap;
use std::path::Path;

/// The header's numbers are eight hexadecimal digits each.
const MAGIC: &str = "070701";
const TRAILER: &str = "TRAILER!!!";
const DIRECTORY: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;

/// Files by their path without the leading slash. Ordered, so that a folder precedes what it holds.
#[derive(Default)]
pub struct Archive {
    entries: BTreeMap<String, Entry>,
}

struct Entry {
    mode: u32,
    content: Vec<u8>,
}

impl Archive {
    pub fn add_directory(&mut self, path: &str) {
        self.add(path, DIRECTORY | 0o755, Vec::new());
    }

    /// Adds a file that everyone may read and run.
    pub fn add_file(&mut self, path: &str, content: Vec<u8>) {
        self.add(path, FILE | 0o755, content);
    }

    /// Adds a file with the permission bits of `mode`.
    pub fn add_file_with(&mut self, path: &str, mode: u32, content: Vec<u8>) {
        self.add(path, FILE | mode & 0o7777, content);
    }

    pub fn add_link(&mut self, path: &str, target: &str) {
        self.add(path, LINK | 0o777, target.as_bytes().to_vec());
    }

    pub fn contains(&self, path: &str) -> bool {
        self.entries.contains_key(path.trim_start_matches('/'))
    }

    fn add(&mut self, path: &str, mode: u32, content: Vec<u8>) {
        let path = path.trim_start_matches('/');
        let parents = Path::new(path).ancestors().skip(1).map(Path::to_string_lossy);
        for parent in parents.filter(|parent| !parent.is_empty()) {
            let folder = Entry { mode: DIRECTORY | 0o755, content: Vec::new() };
            self.entries.entry(parent.into_owned()).or_insert(folder);
        }
        self.entries.insert(path.to_owned(), Entry { mode, content });
    }

    /// The archive's bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (number, (path, entry)) in (1..).zip(&self.entries) {
            write_entry(&mut bytes, number, path, entry);
        }
        write_entry(&mut bytes, 0, TRAILER, &Entry { mode: 0, content: Vec::new() });
        bytes
    }
}

fn write_entry(bytes: &mut Vec<u8>, inode: usize, name: &str, entry: &Entry) {
    let links = if entry.mode & DIRECTORY == 0 { 1 } else { 2 };
    // inode, mode, uid, gid, links, mtime, size, device (2), device it is (2), name's size, checksum
    let numbers = [inode, entry.mode as usize, 0, 0, links, 0, entry.content.len(), 0, 0, 0, 0, name.len() + 1, 0];
    bytes.extend(MAGIC.as_bytes());
    for number in numbers {
        bytes.extend(format!("{number:08x}").as_bytes());
    }
    bytes.extend(name.as_bytes());
    bytes.push(0);
    pad(bytes);
    bytes.extend(&entry.content);
    pad(bytes);
}

/// Headers and contents begin at multiples of four.
fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_holds_parents_before_children_and_ends_with_the_trailer() {
        let mut archive = Archive::default();
        archive.add_file("/a/b", b"xyz".to_vec());
        archive.add_link("c", "a/b");
        assert!(archive.contains("/a/b") && archive.contains("a"));
        let expected = [
            "070701000000010000",
            "41ed00000000000000000000000200000000000000000000000000000000000000000000000000000002",
            "00000000a\0",
            "070701000000020000",
            "81ed00000000000000000000000100000000000000030000000000000000000000000000000000000004",
            "00000000a/b\0\0\0xyz\0",
            "070701000000030000",
            "a1ff00000000000000000000000100000000000000030000000000000000000000000000000000000002",
            "00000000c\0a/b\0",
            "070701000000000000",
            "00000000000000000000000000010000000000000000000000000000000000000000000000000000000b",
            "00000000TRAILER!!!\0\0\0\0",
        ]
        .concat();
        assert_eq!(String::from_utf8(archive.to_bytes()).unwrap(), expected);
    }
}
