//! What a share keeps on disk for the server's next process: a list of the clients that have locks or leases.
//!
//! It lies in the folder [`FOLDER`] of the shared directory, so that it goes where the files go. No client can name or list a
//! file of that name. Each client of the list is an empty file: it is made before the client's first lock or lease, durably, and
//! removed when the client has gone for good.

use std::fmt::Write as _;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use byway_reactor::Errno;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags};

use super::grace::Holding;
use super::wire::ClientName;
use crate::limits::FILE_CLIENTS_LISTED_MAX;

/// The name that no client may say.
pub(super) const FOLDER: &str = ".byway-state";

const CONFINED: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_XDEV)
    .union(ResolveFlags::NO_MAGICLINKS);

/// Whether a client says the reserved name.
pub(super) fn is_reserved(name: &[u8]) -> bool {
    name == FOLDER.as_bytes()
}

/// Opens the folder; makes it if it is not there and `make` says so.
fn folder(root: BorrowedFd<'_>, make: bool) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = || rustix::fs::openat2(root, FOLDER, flags, Mode::empty(), CONFINED);
    match open() {
        Err(Errno::NOENT) if make => {
            match rustix::fs::mkdirat(root, FOLDER, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error),
            }
            let made = open()?;
            // Its name.
            rustix::fs::fsync(rustix::fs::openat(root, ".", flags, Mode::empty())?)?;
            Ok(made)
        }
        folder => folder,
    }
}

/// Whether the server can keep a list of a share's clients.
pub(super) fn can_list(root: BorrowedFd<'_>) -> bool {
    match folder(root, false) {
        Ok(folder) => rustix::fs::accessat(&folder, ".", rustix::fs::Access::WRITE_OK, AtFlags::EACCESS).is_ok(),
        Err(Errno::NOENT) => {
            let rights = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
            rustix::fs::accessat(root, ".", rights, AtFlags::EACCESS).is_ok()
        }
        Err(_) => false,
    }
}

fn prefix(held: Holding) -> &'static str {
    match held {
        Holding::Locks => "locks-",
        Holding::Leases => "leases-",
    }
}

fn file_name(held: Holding, client: &ClientName) -> String {
    let mut name = prefix(held).to_owned();
    for byte in client {
        let _ = write!(name, "{byte:02x}");
    }
    name
}

fn parse(name: &[u8]) -> Option<(Holding, ClientName)> {
    let name = std::str::from_utf8(name).ok()?;
    let (held, digits) = [Holding::Locks, Holding::Leases]
        .into_iter()
        .find_map(|held| Some((held, name.strip_prefix(prefix(held))?)))?;
    if digits.len() != 32 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    Some((held, u128::from_str_radix(digits, 16).ok()?.to_be_bytes()))
}

/// Puts a client on the list, durably. It may be there already.
pub(super) fn list(root: BorrowedFd<'_>, held: Holding, client: &ClientName) -> Result<(), Errno> {
    let folder = folder(root, true)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(&folder, file_name(held, client), flags, Mode::RUSR | Mode::WUSR) {
        Ok(_) => rustix::fs::fsync(&folder),
        Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Takes a client off the list.
pub(super) fn unlist(root: BorrowedFd<'_>, held: Holding, client: &ClientName) -> Result<(), Errno> {
    let removed =
        folder(root, false).and_then(|folder| rustix::fs::unlinkat(folder, file_name(held, client), AtFlags::empty()));
    if removed == Err(Errno::NOENT) { Ok(()) } else { removed }
}

/// The clients of the list. `None`: there are more than [`FILE_CLIENTS_LISTED_MAX`].
pub(super) fn listed(root: BorrowedFd<'_>) -> Result<Option<Vec<(Holding, ClientName)>>, Errno> {
    let folder = match folder(root, false) {
        Ok(folder) => folder,
        Err(Errno::NOENT) => return Ok(Some(Vec::new())),
        Err(error) => return Err(error),
    };
    let mut clients = Vec::new();
    for entry in Dir::read_from(folder.as_fd())? {
        let entry = entry?;
        let is_file = matches!(entry.file_type(), FileType::RegularFile | FileType::Unknown);
        if let Some(client) = parse(entry.file_name().to_bytes()).filter(|_| is_file) {
            if clients.len() == FILE_CLIENTS_LISTED_MAX {
                return Ok(None);
            }
            clients.push(client);
        }
    }
    Ok(Some(clients))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_on_the_list_until_they_are_taken_off() {
        let directory = tempfile::tempdir().unwrap();
        let root = std::fs::File::open(directory.path()).unwrap();
        let root = root.as_fd();
        assert!(can_list(root));
        assert_eq!(listed(root), Ok(Some(Vec::new())));
        assert!(!directory.path().join(FOLDER).exists(), "asking makes no folder");
        let (one, two) = ([7; 16], [0xab; 16]);
        for _ in 0..2 {
            list(root, Holding::Locks, &one).unwrap();
        }
        list(root, Holding::Leases, &one).unwrap();
        list(root, Holding::Leases, &two).unwrap();
        std::fs::write(directory.path().join(FOLDER).join("locks-no number"), "").unwrap();
        let mut all = listed(root).unwrap().unwrap();
        all.sort_unstable();
        assert_eq!(all, [(Holding::Locks, one), (Holding::Leases, one), (Holding::Leases, two)]);
        for _ in 0..2 {
            unlist(root, Holding::Leases, &one).unwrap();
        }
        assert_eq!(listed(root).unwrap().unwrap().len(), 2);
    }

    #[test]
    fn a_link_in_the_folders_place_is_not_followed() {
        let (directory, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::os::unix::fs::symlink(other.path(), directory.path().join(FOLDER)).unwrap();
        let root = std::fs::File::open(directory.path()).unwrap();
        assert!(!can_list(root.as_fd()));
        assert!(list(root.as_fd(), Holding::Locks, &[1; 16]).is_err());
        assert_eq!(std::fs::read_dir(other.path()).unwrap().count(), 0);
    }
}
