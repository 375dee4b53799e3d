//! Links to removed files that clients have open, in the folder of a share's state: `removed-`, the client's name, `-`, the inode's
//! number. They are made before the last name goes, so that a new server process still finds the files.
//!
//! No sync is needed: a file system that journals names keeps the order of the link and of the removal.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use byway_reactor::Errno;
use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags};

use super::super::wire::ClientName;
use super::{CONFINED, List, open_folder};

const PREFIX: &str = "removed-";

fn file_name(client: &ClientName, ino: u64) -> String {
    let mut name = PREFIX.to_owned();
    for byte in client {
        let _ = write!(name, "{byte:02x}");
    }
    let _ = write!(name, "-{ino:016x}");
    name
}

fn parse(name: &[u8]) -> Option<(ClientName, u64)> {
    let (client, ino) = std::str::from_utf8(name).ok()?.strip_prefix(PREFIX)?.split_once('-')?;
    let are_digits = |text: &str, len| text.len() == len && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !are_digits(client, 32) || !are_digits(ino, 16) {
        return None;
    }
    Some((u128::from_str_radix(client, 16).ok()?.to_be_bytes(), u64::from_str_radix(ino, 16).ok()?))
}

impl List {
    /// Keeps a file for a client. Its name can be removed then.
    pub(in super::super) fn keep(
        &self,
        root: BorrowedFd<'_>,
        file: BorrowedFd<'_>,
        client: &ClientName,
        ino: u64,
    ) -> Result<(), Errno> {
        let folder = self.folder(root, |directory| rustix::fs::fsync(directory))?;
        let file = format!("/proc/self/fd/{}", file.as_raw_fd());
        match rustix::fs::linkat(CWD, file, folder, file_name(client, ino), AtFlags::SYMLINK_FOLLOW) {
            // Of another name of the file.
            Err(Errno::EXIST) => Ok(()),
            linked => linked,
        }
    }
}

/// The file need not be kept for a client any more.
pub(in super::super) fn release(root: BorrowedFd<'_>, client: &ClientName, ino: u64) -> Result<(), Errno> {
    let removed =
        open_folder(root).and_then(|folder| rustix::fs::unlinkat(folder, file_name(client, ino), AtFlags::empty()));
    if removed == Err(Errno::NOENT) { Ok(()) } else { removed }
}

/// A file that is kept for a client, by a descriptor that opens nothing.
pub(in super::super) fn open(root: BorrowedFd<'_>, client: &ClientName, ino: u64) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat2(open_folder(root)?, file_name(client, ino), flags, Mode::empty(), CONFINED)
}

/// The inode numbers of files that are kept for a client, from a number on: the first `max`, in order.
pub(in super::super) fn of_client(
    root: BorrowedFd<'_>,
    client: &ClientName,
    from: u64,
    max: usize,
) -> Result<BTreeSet<u64>, Errno> {
    let mut numbers = BTreeSet::new();
    for_each(root, |other, ino| {
        if other == *client && ino >= from {
            numbers.insert(ino);
            if numbers.len() > max {
                numbers.pop_last();
            }
        }
        ControlFlow::Continue(())
    })
    .map(|_| numbers)
}

/// Goes through the files that are kept, until `each` breaks off.
pub(in super::super) fn for_each(
    root: BorrowedFd<'_>,
    mut each: impl FnMut(ClientName, u64) -> ControlFlow<()>,
) -> Result<ControlFlow<()>, Errno> {
    let folder = match open_folder(root) {
        Ok(folder) => folder,
        Err(Errno::NOENT) => return Ok(ControlFlow::Continue(())),
        Err(error) => return Err(error),
    };
    for entry in Dir::read_from(folder.as_fd())? {
        if let Some((client, ino)) = parse(entry?.file_name().to_bytes())
            && each(client, ino).is_break()
        {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_removed_file_is_kept_for_its_client() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, "bytes").unwrap();
        let (file, root) = (std::fs::File::open(&path).unwrap(), std::fs::File::open(directory.path()).unwrap());
        let (ino, root) = (file.metadata().unwrap().ino(), root.as_fd());
        let (one, two, list) = ([7; 16], [0xab; 16], List::default());
        assert_eq!(of_client(root, &one, 0, 9), Ok(BTreeSet::new()));
        for _ in 0..2 {
            list.keep(root, file.as_fd(), &one, ino).unwrap();
        }
        list.keep(root, file.as_fd(), &two, ino).unwrap();
        std::fs::remove_file(&path).unwrap();
        drop(file);
        assert_eq!(of_client(root, &one, 0, 9), Ok(BTreeSet::from([ino])));
        assert_eq!(of_client(root, &one, ino + 1, 9), Ok(BTreeSet::new()));
        let kept = open(root, &two, ino).unwrap();
        assert_eq!(std::fs::read_to_string(format!("/proc/self/fd/{}", kept.as_raw_fd())).unwrap(), "bytes");
        for _ in 0..2 {
            release(root, &two, ino).unwrap();
        }
        assert_eq!(open(root, &two, ino).err(), Some(Errno::NOENT));
        assert!(open(root, &one, ino).is_ok());
        assert_eq!(super::super::listed(root), Ok(Some(Vec::new())), "they are not taken for locks or leases");
    }

    #[test]
    fn a_listing_has_the_first_numbers() {
        let directory = tempfile::tempdir().unwrap();
        let root = std::fs::File::open(directory.path()).unwrap();
        let folder = directory.path().join(super::super::FOLDER);
        std::fs::create_dir(&folder).unwrap();
        for ino in [5, 3, 9, 1] {
            std::fs::write(folder.join(file_name(&[1; 16], ino)), "").unwrap();
        }
        std::fs::write(folder.join("removed-1-2"), "").unwrap();
        assert_eq!(of_client(root.as_fd(), &[1; 16], 2, 2), Ok(BTreeSet::from([3, 5])));
    }
}
