//! Files of unix sockets: made with the right owner, replaced when they are stale, removed by the process that made them.
//!
//! Two processes that want the same path agree by a lock on a file beside it, which only its owner may open: between the look
//! whether a listener answers and the new socket, or between the look whose socket it is and its removal, no other process of
//! the same user does anything there.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, FlockOperation, Gid, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix};

use crate::net::stream_socket;

/// Mode of a socket that is given to a group: connecting takes the right to write.
const GROUP_MODE: u32 = 0o660;

/// Owner of a Unix socket's file, and the users who may connect.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SocketAccess {
    /// Permission bits; `None`: what the umask leaves, or 0660 with a `group`.
    pub mode: Option<u32>,
    /// Number of the group; `None`: the process's.
    pub group: Option<u32>,
}

/// The file of a socket that this process has bound. While this is kept, no other file gets its number.
#[derive(Debug)]
pub struct BoundFile {
    /// Which it is.
    pub file: SocketFile,
    _pin: OwnedFd,
}

/// Which file a socket's is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SocketFile {
    /// Where it was made.
    pub path: PathBuf,
    /// The file system's number.
    pub device: u64,
    /// The file's number there.
    pub inode: u64,
}

impl SocketFile {
    fn of(path: &Path, stat: &Stat) -> Self {
        Self { path: path.to_owned(), device: stat.st_dev, inode: stat.st_ino }
    }

    /// Removes the file, unless another socket is at its path by now. Says whether it was removed. The process that bound it keeps
    /// its [`BoundFile`] until then.
    ///
    /// # Errors
    /// The kernel's; `ResourceBusy` while another process makes or removes a socket at that path.
    pub fn remove(&self) -> io::Result<bool> {
        let _lock = PathLock::take(&self.path)?;
        match rustix::fs::lstat(&self.path) {
            Ok(stat) if Self::of(&self.path, &stat) == *self => std::fs::remove_file(&self.path).map(|()| true),
            Ok(_) | Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// Binds a unix socket and listens. The file of a socket without a listener is replaced.
///
/// # Errors
/// The kernel's; `ResourceBusy` while another process makes or removes a socket at that path.
pub(crate) fn listen(path: &Path, access: SocketAccess, backlog: i32) -> io::Result<(OwnedFd, BoundFile)> {
    let lock = PathLock::take(path)?;
    remove_stale(path)?;
    let socket = stream_socket(AddressFamily::UNIX)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    // No client can connect before `listen`, whatever the mode is until then.
    let prepared = give(path, access).and_then(|file| {
        rustix::net::listen(&socket, backlog)?;
        Ok(file)
    });
    let file = prepared.inspect_err(|_| {
        // Ours: the path is still locked. An error here would hide the first.
        let _ = std::fs::remove_file(path);
    })?;
    drop(lock);
    Ok((socket, file))
}

/// Gives the file of a new socket its group and mode.
fn give(path: &Path, access: SocketAccess) -> io::Result<BoundFile> {
    // By a descriptor: a link that another user of the folder puts there meanwhile is not followed.
    let file = rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(Errno::EXIST.into());
    }
    if let Some(group) = access.group {
        rustix::fs::chownat(file.as_fd(), "", None, Some(Gid::from_raw(group)), AtFlags::EMPTY_PATH)?;
    }
    if let Some(mode) = access.mode.or(access.group.map(|_| GROUP_MODE)) {
        // `fchmod` takes no descriptor of this kind before Linux 6.6.
        rustix::fs::chmod(format!("/proc/self/fd/{}", file.as_raw_fd()), Mode::from_raw_mode(mode))?;
    }
    Ok(BoundFile { file: SocketFile::of(path, &stat), _pin: file })
}

/// The lock on a socket's path: a file beside it, removed with the lock.
#[derive(Debug)]
struct PathLock {
    path: PathBuf,
    /// Locked as long as it is open.
    _file: OwnedFd,
}

/// Why a path was not locked.
#[derive(Debug, thiserror::Error)]
#[error("another process holds the lock {}; it is held only while a socket is made or removed there", .0.display())]
struct Locked(PathBuf);

impl PathLock {
    /// Locks a path; `None` where no lock can be had: without it only a second process of ours at the same moment is not seen.
    fn take(path: &Path) -> io::Result<Option<Self>> {
        let Some(name) = path.file_name() else { return Ok(None) };
        let mut lock_name = OsString::from(".");
        lock_name.push(name);
        lock_name.push(".lock");
        let path = path.with_file_name(lock_name);
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR) {
            // The folder is not ours to write, or what lies there is another user's, or no file.
            Err(Errno::ACCESS | Errno::LOOP | Errno::ISDIR | Errno::NXIO) => return Ok(None),
            opened => opened?,
        };
        let opened = rustix::fs::fstat(&file)?;
        // A lock that another user can take would keep us from starting.
        let is_file = FileType::from_raw_mode(opened.st_mode) == FileType::RegularFile;
        if !is_file || opened.st_uid != rustix::process::geteuid().as_raw() || opened.st_mode & 0o077 != 0 {
            return Ok(None);
        }
        let busy = |path| io::Error::new(io::ErrorKind::ResourceBusy, Locked(path));
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => return Err(busy(path)),
            locked => locked?,
        }
        // The process that had the lock before has removed the file, if it is another by now.
        match rustix::fs::lstat(&path) {
            Ok(now) if (now.st_dev, now.st_ino) == (opened.st_dev, opened.st_ino) => {
                Ok(Some(Self { path, _file: file }))
            }
            _ => Err(busy(path)),
        }
    }
}

impl Drop for PathLock {
    fn drop(&mut self) {
        // While it is still locked: so it is ours. If it stays, the next one locks it.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Removes a socket's file that refuses connections; `EADDRINUSE` if it takes them, `EEXIST` if it is no socket.
fn remove_stale(path: &Path) -> io::Result<()> {
    let stat = match rustix::fs::lstat(path) {
        Err(Errno::NOENT) => return Ok(()),
        looked => looked?,
    };
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(Errno::EXIST.into());
    }
    // It does not wait: a listener with a full queue answers `EAGAIN`, and is one.
    match rustix::net::connect(stream_socket(AddressFamily::UNIX)?, &SocketAddrUnix::new(path)?) {
        Ok(()) | Err(Errno::AGAIN) => Err(Errno::ADDRINUSE.into()),
        Err(Errno::CONNREFUSED) => std::fs::remove_file(path),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
    use std::os::unix::net::UnixStream;

    use super::*;

    const BACKLOG: i32 = 1;

    fn plain(path: &Path) -> io::Result<(OwnedFd, BoundFile)> {
        listen(path, SocketAccess::default(), BACKLOG)
    }

    #[test]
    fn a_process_removes_its_own_socket_and_not_that_of_its_successor() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let (listener, ours) = plain(&path).unwrap();
        assert_eq!(plain(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        let (_successor, theirs) = plain(&path).unwrap();
        assert!(!ours.file.remove().unwrap());
        UnixStream::connect(&path).expect("the successor is still there");
        assert!(theirs.file.remove().unwrap());
        assert!(!theirs.file.remove().unwrap(), "gone already");
    }

    #[test]
    fn a_listener_whose_queue_is_full_is_not_taken_for_a_stale_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let (_listener, _file) = plain(&path).unwrap();
        let waiting: Vec<_> = (0..=BACKLOG).map(|_| UnixStream::connect(&path).unwrap()).collect();
        assert_eq!(plain(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(waiting);
    }

    /// Of many that start at once where a dead one left its socket, one listens and can be reached.
    #[test]
    fn of_all_that_find_a_stale_socket_one_replaces_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        for _ in 0..200 {
            drop(plain(&path).unwrap());
            let barrier = std::sync::Barrier::new(4);
            let start = || {
                barrier.wait();
                plain(&path)
            };
            let outcomes: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(start)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let listening: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().ok()).collect();
            assert_eq!(listening.len(), 1, "{outcomes:?}");
            assert_eq!(std::fs::metadata(&path).unwrap().ino(), listening[0].1.file.inode);
        }
    }

    #[test]
    fn mode_and_group_are_given_whatever_the_umask_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mode = |access| {
            let (_listener, file) = listen(&path, access, BACKLOG).unwrap();
            let metadata = std::fs::metadata(&path).unwrap();
            assert!(file.file.remove().unwrap());
            (metadata.permissions().mode() & 0o7777, metadata.gid())
        };
        let own = rustix::process::getegid().as_raw();
        assert_eq!(mode(SocketAccess { mode: Some(0o622), group: None }), (0o622, own));
        let group = if rustix::process::geteuid().is_root() { 6 } else { own };
        assert_eq!(mode(SocketAccess { mode: None, group: Some(group) }), (0o660, group));
        assert_eq!(mode(SocketAccess { mode: Some(0o770), group: Some(group) }), (0o770, group));
    }

    /// Any user may lock a folder that he may read.
    #[test]
    fn a_folder_that_another_process_has_locked_is_no_obstacle() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let held = std::fs::File::open(folder.path()).unwrap();
        rustix::fs::flock(&held, FlockOperation::LockExclusive).unwrap();
        let (_listener, ours) = plain(&path).unwrap();
        assert!(ours.file.remove().unwrap());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "no lock stays");
    }

    #[test]
    fn a_lock_that_is_held_is_named_and_one_that_was_left_behind_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let (path, lock) = (folder.path().join("socket"), folder.path().join(".socket.lock"));
        let held = PathLock::take(&path).unwrap().expect("a lock");
        let error = plain(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
        assert!(error.to_string().contains(&lock.display().to_string()), "{error}");
        assert_eq!(std::fs::metadata(&lock).unwrap().permissions().mode() & 0o7777, 0o600);
        drop(held);
        // As after a crash.
        drop(std::fs::OpenOptions::new().create_new(true).write(true).mode(0o600).open(&lock).unwrap());
        let (_listener, ours) = plain(&path).unwrap();
        assert!(ours.file.remove().unwrap() && !lock.exists());
    }

    #[test]
    fn what_is_no_lock_of_ours_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (path, lock) = (folder.path().join("socket"), folder.path().join(".socket.lock"));
        let other = folder.path().join("other");
        std::os::unix::fs::symlink(&other, &lock).unwrap();
        let (_listener, ours) = plain(&path).unwrap();
        assert!(ours.file.remove().unwrap() && lock.is_symlink() && !other.exists());
        std::fs::remove_file(&lock).unwrap();
        // One that others may open, and have locked.
        let open = std::fs::OpenOptions::new().create_new(true).write(true).mode(0o600).open(&lock).unwrap();
        open.set_permissions(std::fs::Permissions::from_mode(0o666)).unwrap();
        rustix::fs::flock(&open, FlockOperation::LockExclusive).unwrap();
        let (_listener, ours) = plain(&path).unwrap();
        assert!(ours.file.remove().unwrap() && lock.exists());
    }

    #[test]
    fn a_file_that_is_no_socket_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "x").unwrap();
        assert_eq!(plain(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert!(path.exists());
    }
}
