//! The descriptor that stands for an open file of a share in the kernel's tables.
//!
//! It is a file in memory, opened for writing alone and sealed against writes. So the kernel keeps what programs expect of it to keep:
//! the number, duplicates, inheritance over fork and exec, the close-on-exec flag, status flags, and the position, which all of its
//! duplicates in all processes share. Its contents say which file it stands for, for a process that inherits it. A read or write that
//! passes this library by fails (`EBADF`, `EPERM`): it neither gets the contents nor loses bytes.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, fstat, memfd_create, open};
use rustix::io::{Errno, pread, pwrite};

use crate::maps::Map;

/// The file's name, as `/proc` shows it.
const NAME: &str = "byway-run";

/// What the contents begin with.
const MAGIC: &[u8] = b"byway-run 2\n";

/// Bytes of the contents: a path, some numbers, and an address with the name of a share.
const CONTENTS_MAX: usize = 4096 + 1024;

/// The file that a descriptor stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Described {
    /// Index of this program's map; `None` if an inherited descriptor is of a share that this program has no map of.
    pub(crate) map: Option<usize>,
    /// The flags of `open`.
    pub(crate) flags: i32,
    /// Inode number: another file at the path is not taken for it.
    pub(crate) ino: u64,
    /// Below the prefix, without symbolic links.
    pub(crate) path: Vec<u8>,
}

impl Described {
    /// Names the share too: a program that inherits the descriptor may have other maps, because `byway run` started it anew.
    fn to_bytes(&self, maps: &[Map]) -> Option<Vec<u8>> {
        let index = self.map?;
        let share = maps.get(index)?.identity();
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(format!("{index} {} {}\n{share}\n", self.flags, self.ino).as_bytes());
        bytes.extend_from_slice(&self.path);
        Some(bytes)
    }

    fn from_bytes(bytes: &[u8], maps: &[Map]) -> Option<Self> {
        let rest = bytes.strip_prefix(MAGIC)?;
        let mut parts = rest.splitn(3, |byte| *byte == b'\n');
        let (numbers, share, path) = (parts.next()?, parts.next()?, parts.next()?);
        let mut numbers = std::str::from_utf8(numbers).ok()?.split(' ');
        let (index, flags, ino) = (numbers.next()?, numbers.next()?, numbers.next()?);
        let index: usize = index.parse().ok()?;
        let is_same = |map: &Map| map.identity().as_bytes() == share;
        // A share may have several prefixes: the one that was used goes before the others.
        let map = if maps.get(index).is_some_and(is_same) { Some(index) } else { maps.iter().position(is_same) };
        Some(Self { map, flags: flags.parse().ok()?, ino: ino.parse().ok()?, path: path.to_vec() })
    }
}

/// The device number of files in memory.
static DEVICE: OnceLock<u64> = OnceLock::new();

/// Makes one; gives the inode number by which it is known.
///
/// # Errors
/// The kernel's, of which `EMFILE` is the program's own affair; `ESTALE` if no map leads to the share.
pub(crate) fn make(described: &Described, maps: &[Map]) -> Result<(OwnedFd, u64), Errno> {
    let contents = described.to_bytes(maps).ok_or(Errno::STALE)?;
    let file = memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    pwrite(&file, &contents, 0)?;
    fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
    // The kernel keeps these for all duplicates, and `fcntl` changes them there.
    let flags =
        (OFlags::CLOEXEC | OFlags::APPEND | OFlags::NONBLOCK) & OFlags::from_bits_retain(described.flags as u32);
    let placeholder = open(in_proc(file.as_raw_fd()), OFlags::WRONLY | flags, Mode::empty())?;
    let stat = fstat(&placeholder)?;
    DEVICE.get_or_init(|| stat.st_dev);
    Ok((placeholder, stat.st_ino))
}

fn in_proc(number: RawFd) -> String {
    format!("/proc/self/fd/{number}")
}

/// The inode number of a file in memory; `None` if the descriptor is another kind of file, or closed.
pub(crate) fn key(number: RawFd) -> Option<u64> {
    let device = *DEVICE.get()?;
    // SAFETY: the descriptor is looked at during this call alone; if it is closed, or another file by then, the kernel says so.
    let stat = fstat(unsafe { BorrowedFd::borrow_raw(number) }).ok()?;
    (stat.st_dev == device).then_some(stat.st_ino)
}

/// What an inherited descriptor stands for; `None` for a file in memory that is none of ours.
pub(crate) fn read(number: RawFd, maps: &[Map]) -> Option<Described> {
    let file = open(in_proc(number), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut bytes = vec![0; CONTENTS_MAX];
    let count = pread(&file, &mut bytes[..], 0).ok()?;
    let seals = rustix::fs::fcntl_get_seals(&file).ok()?;
    if !seals.contains(SealFlags::WRITE) {
        return None;
    }
    Described::from_bytes(&bytes[..count], maps)
}

/// Descriptors that this program has inherited, or that a forked child has, as far as they are files in memory of this name.
pub(crate) fn inherited() -> Vec<RawFd> {
    let Ok(folder) = std::fs::read_dir("/proc/self/fd") else { return Vec::new() };
    let wanted = format!("/memfd:{NAME} (deleted)");
    let is_ours =
        |path: &std::path::Path| std::fs::read_link(path).is_ok_and(|target| target.as_os_str() == wanted.as_str());
    let entries = folder.filter_map(Result::ok).filter(|entry| is_ours(&entry.path()));
    let numbers: Vec<RawFd> = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    if let Some(first) = numbers.first() {
        // SAFETY: as in `key`.
        let stat = fstat(unsafe { BorrowedFd::borrow_raw(*first) });
        let _ = stat.map(|stat| DEVICE.get_or_init(|| stat.st_dev));
    }
    numbers
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::maps::parse;

    #[test]
    fn a_placeholder_names_its_share_to_programs_with_other_maps() {
        let maps = |text: &str| parse(text.as_bytes()).unwrap();
        let made_with = maps("/z\tunix:///s\tz\n/a\tunix:///s\ta\n");
        let described = Described { map: Some(1), flags: 0, ino: 2, path: b"log".to_vec() };
        let bytes = described.to_bytes(&made_with).unwrap();
        let found = |text: &str| Described::from_bytes(&bytes, &maps(text)).unwrap().map;
        assert_eq!(found("/z\tunix:///s\tz\n/a\tunix:///s\ta\n"), Some(1));
        assert_eq!(found("/other\tunix:///s\ta\n"), Some(0), "the same share, at another index and prefix");
        assert_eq!(found("/x\tunix:///s\ta\n/y\tunix:///s\ta\n"), Some(1), "of two prefixes, that of the same index");
        assert_eq!(found("/z\tunix:///s\tz\n/a\tunix:///s\tb\n"), None, "another share of the server");
        assert_eq!(found("/z\tunix:///s\tz\n/a\tunix:///other\ta\n"), None, "another server");
        let unmapped = Described { map: None, ..described };
        assert_eq!(make(&unmapped, &made_with).unwrap_err(), Errno::STALE);
    }

    #[test]
    fn a_placeholder_tells_what_it_stands_for_and_carries_no_bytes() {
        let maps = parse(b"/z\tunix:///s\tz\n/a\tunix:///s\ta\n").unwrap();
        let described = Described { map: Some(1), flags: libc::O_RDWR, ino: 77, path: b"a/new\nline".to_vec() };
        let (placeholder, ino) = make(&described, &maps).unwrap();
        let number = placeholder.as_raw_fd();
        assert_eq!((key(number), read(number, &maps)), (Some(ino), Some(described)));
        assert_eq!(rustix::io::write(&placeholder, b"lost"), Err(Errno::PERM));
        assert_eq!(rustix::io::read(&placeholder, &mut [0; 4]), Err(Errno::BADF));
        assert!(inherited().contains(&number));
        let copy = rustix::io::dup(placeholder.as_fd()).unwrap();
        rustix::fs::seek(&copy, rustix::fs::SeekFrom::Start(1 << 40)).unwrap();
        assert_eq!(rustix::fs::tell(&placeholder), Ok(1 << 40), "duplicates share the position");
        let other = memfd_create("other", MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(read(other.as_raw_fd(), &maps), None);
        assert_eq!(key(std::io::stdin().as_raw_fd()).and_then(|_| read(0, &maps)), None);
    }
}
