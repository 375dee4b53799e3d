//! What a share keeps on disk for the server's next process: a list of the clients that have locks or leases.
//!
//! It lies in the folder [`FOLDER`] of the shared directory, so that it goes where the files go. No client can name or list a
//! file of that name. Each client of the list is an empty file: it is made before the client's first lock or lease, durably, and
//! removed when the client has gone for good. Beside the list are the removed files that clients have open ([`kept`]).

pub(super) mod kept;

use std::fmt::Write as _;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use byway_reactor::Errno;
use rustix::fs::{Access, AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags};

use super::grace::{ClientHolding, Holding};
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

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn open_folder(root: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    rustix::fs::openat2(root, FOLDER, DIRECTORY, Mode::empty(), CONFINED)
}

/// Whether the server can keep a list of a share's clients.
pub(super) fn can_list(root: BorrowedFd<'_>) -> bool {
    let may =
        |directory: BorrowedFd<'_>, rights| rustix::fs::accessat(directory, ".", rights, AtFlags::EACCESS).is_ok();
    // Read, to be synced.
    let (usual, write) = (Access::READ_OK | Access::EXEC_OK, Access::WRITE_OK);
    match open_folder(root) {
        Ok(folder) => may(root, usual) && may(folder.as_fd(), usual | write),
        Err(Errno::NOENT) => may(root, usual | write),
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

fn parse(name: &[u8]) -> Option<ClientHolding<ClientName>> {
    let name = std::str::from_utf8(name).ok()?;
    let (held, digits) = [Holding::Locks, Holding::Leases]
        .into_iter()
        .find_map(|held| Some((held, name.strip_prefix(prefix(held))?)))?;
    if digits.len() != 32 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    Some(ClientHolding { held, client: u128::from_str_radix(digits, 16).ok()?.to_be_bytes() })
}

/// What this process knows of a share's list.
#[derive(Debug, Default)]
pub(super) struct List {
    /// The folder's name is durable: this process has synced the share's root.
    folder_is_durable: AtomicBool,
}

impl List {
    /// Puts a client on the list, durably. It may be there already: whether an earlier process has synced its entry is not known. Calls
    /// take turns.
    pub(super) fn put(&self, root: BorrowedFd<'_>, held: Holding, client: &ClientName) -> Result<(), Errno> {
        self.put_with(root, held, client, |directory| rustix::fs::fsync(directory))
    }

    fn put_with(
        &self,
        root: BorrowedFd<'_>,
        held: Holding,
        client: &ClientName,
        sync: impl Fn(BorrowedFd<'_>) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let folder = self.folder(root, &sync)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let name = file_name(held, client);
        let is_new = match rustix::fs::openat(&folder, &name, flags, Mode::RUSR | Mode::WUSR) {
            Ok(_) => true,
            Err(Errno::EXIST) => false,
            Err(error) => return Err(error),
        };
        sync(folder.as_fd()).inspect_err(|_| {
            // The kernel reports an error once: the next sync could succeed without this entry. An older one may be all that the next
            // process has of the client.
            if is_new {
                let _ = rustix::fs::unlinkat(&folder, &name, AtFlags::empty());
            }
        })
    }

    /// Opens the folder, and makes it if it is not there. Its name is durable then.
    fn folder(
        &self,
        root: BorrowedFd<'_>,
        sync: impl Fn(BorrowedFd<'_>) -> Result<(), Errno>,
    ) -> Result<OwnedFd, Errno> {
        let mut is_new = false;
        let folder = match open_folder(root) {
            Err(Errno::NOENT) => {
                self.folder_is_durable.store(false, Ordering::Relaxed);
                match rustix::fs::mkdirat(root, FOLDER, Mode::RWXU) {
                    Ok(()) => is_new = true,
                    Err(Errno::EXIST) => {}
                    Err(error) => return Err(error),
                }
                open_folder(root)?
            }
            folder => folder?,
        };
        if !self.folder_is_durable.load(Ordering::Relaxed) {
            sync(rustix::fs::openat(root, ".", DIRECTORY, Mode::empty())?.as_fd()).inspect_err(|_| {
                if is_new {
                    let _ = rustix::fs::unlinkat(root, FOLDER, AtFlags::REMOVEDIR);
                }
            })?;
            self.folder_is_durable.store(true, Ordering::Relaxed);
        }
        Ok(folder)
    }
}

/// Takes a client off the list.
pub(super) fn unlist(root: BorrowedFd<'_>, held: Holding, client: &ClientName) -> Result<(), Errno> {
    let removed =
        open_folder(root).and_then(|folder| rustix::fs::unlinkat(folder, file_name(held, client), AtFlags::empty()));
    if removed == Err(Errno::NOENT) { Ok(()) } else { removed }
}

/// The clients of the list. `None`: there are more than [`FILE_CLIENTS_LISTED_MAX`].
pub(super) fn listed(root: BorrowedFd<'_>) -> Result<Option<Vec<ClientHolding<ClientName>>>, Errno> {
    let mut clients = Vec::new();
    let read = for_each(root, |holding| {
        if clients.len() == FILE_CLIENTS_LISTED_MAX {
            return Ok(ControlFlow::Break(()));
        }
        clients.push(holding);
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(read.is_continue().then_some(clients))
}

/// Goes through the list, however long it is, until `each` breaks off or fails.
pub(super) fn for_each(
    root: BorrowedFd<'_>,
    mut each: impl FnMut(ClientHolding<ClientName>) -> Result<ControlFlow<()>, Errno>,
) -> Result<ControlFlow<()>, Errno> {
    let folder = match open_folder(root) {
        Ok(folder) => folder,
        Err(Errno::NOENT) => return Ok(ControlFlow::Continue(())),
        Err(error) => return Err(error),
    };
    for entry in Dir::read_from(folder.as_fd())? {
        let entry = entry?;
        let is_file = matches!(entry.file_type(), FileType::RegularFile | FileType::Unknown);
        if let Some(holding) = parse(entry.file_name().to_bytes()).filter(|_| is_file)
            && each(holding)?.is_break()
        {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;

    use super::*;

    #[test]
    fn clients_are_on_the_list_until_they_are_taken_off() {
        let directory = tempfile::tempdir().unwrap();
        let root = std::fs::File::open(directory.path()).unwrap();
        let root = root.as_fd();
        assert!(can_list(root));
        assert_eq!(listed(root), Ok(Some(Vec::new())));
        assert!(!directory.path().join(FOLDER).exists(), "asking makes no folder");
        let (one, two, list) = ([7; 16], [0xab; 16], List::default());
        for _ in 0..2 {
            list.put(root, Holding::Locks, &one).unwrap();
        }
        list.put(root, Holding::Leases, &one).unwrap();
        list.put(root, Holding::Leases, &two).unwrap();
        std::fs::write(directory.path().join(FOLDER).join("locks-no number"), "").unwrap();
        let mut all = listed(root).unwrap().unwrap();
        all.sort_unstable();
        let wanted = [(Holding::Locks, one), (Holding::Leases, one), (Holding::Leases, two)];
        assert_eq!(all, wanted.map(|(held, client)| ClientHolding { held, client }));
        for _ in 0..2 {
            unlist(root, Holding::Leases, &one).unwrap();
        }
        assert_eq!(listed(root).unwrap().unwrap().len(), 2);
    }

    /// A process that puts clients on a list and notes what it syncs. The sync of a directory fails if the test says so.
    struct Putting {
        list: List,
        synced: RefCell<Vec<u64>>,
    }

    impl Putting {
        fn start() -> Self {
            Self { list: List::default(), synced: RefCell::default() }
        }

        fn put(&self, root: BorrowedFd<'_>, client: u8, fails: Option<u64>) -> Result<(), Errno> {
            self.list.put_with(root, Holding::Locks, &[client; 16], |directory| {
                let directory = rustix::fs::fstat(directory)?.st_ino;
                self.synced.borrow_mut().push(directory);
                if fails == Some(directory) { Err(Errno::IO) } else { Ok(()) }
            })
        }
    }

    #[test]
    fn an_entry_counts_once_this_process_has_synced_it() {
        let directory = tempfile::tempdir().unwrap();
        let folder = directory.path().join(FOLDER);
        let inode = |path: &Path| std::fs::metadata(path).unwrap().ino();
        let root = std::fs::File::open(directory.path()).unwrap();
        let (root, of_root) = (root.as_fd(), inode(directory.path()));

        let first = Putting::start();
        assert_eq!(first.put(root, 1, Some(of_root)), Err(Errno::IO));
        assert!(!folder.exists(), "the next call does not find it: it syncs again what it makes");
        assert_eq!(first.put(root, 1, None), Ok(()));
        let of_folder = inode(&folder);
        assert_eq!(first.put(root, 2, Some(of_folder)), Err(Errno::IO));
        assert_eq!(
            listed(root),
            Ok(Some(vec![ClientHolding { held: Holding::Locks, client: [1; 16] }])),
            "no entry that is not durable"
        );
        assert_eq!(*first.synced.borrow(), [of_root, of_root, of_folder, of_folder]);

        // It may find what another has made and not synced.
        let second = Putting::start();
        assert_eq!(second.put(root, 1, Some(of_folder)), Err(Errno::IO));
        assert_eq!(second.put(root, 1, None), Ok(()));
        assert_eq!(*second.synced.borrow(), [of_root, of_folder, of_folder]);
        assert_eq!(
            listed(root),
            Ok(Some(vec![ClientHolding { held: Holding::Locks, client: [1; 16] }])),
            "what was there stays"
        );
    }

    #[test]
    fn a_link_in_the_folders_place_is_not_followed() {
        let (directory, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::os::unix::fs::symlink(other.path(), directory.path().join(FOLDER)).unwrap();
        let root = std::fs::File::open(directory.path()).unwrap();
        assert!(!can_list(root.as_fd()));
        assert!(List::default().put(root.as_fd(), Holding::Locks, &[1; 16]).is_err());
        assert_eq!(std::fs::read_dir(other.path()).unwrap().count(), 0);
    }
}
