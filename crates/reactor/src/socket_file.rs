//! Files of unix sockets: made with the right owner, replaced when they are stale, removed by the process that made them.
//!
//! Two processes that want the same path agree by a lock on its folder: between the look whether a listener answers and the new
//! socket, or between the look whose socket it is and its removal, no other process of ours does anything there.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, FlockOperation, Gid, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix};

use crate::net::stream_socket;

/// Mode of a socket that is given to a group: connecting takes the right to write.
const GROUP_MODE: u32 = 0o660;

/// Whose a unix socket's file is, and who may connect.
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
    /// The kernel's; `ResourceBusy` while another process makes or removes a socket in that folder.
    pub fn remove(&self) -> io::Result<bool> {
        let _lock = lock_folder(&self.path)?;
        match rustix::fs::lstat(&self.path) {
            Ok(stat) if Self::of(&self.path, &stat) == *self => std::fs::remove_file(&self.path).map(|()| true),
            Ok(_) | Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// Binds a unix socket and listens. A file of a socket that nobody listens at is replaced.
pub(crate) fn listen(path: &Path, access: SocketAccess, backlog: i32) -> io::Result<(OwnedFd, BoundFile)> {
    let lock = lock_folder(path).map_err(|error| match error.kind() {
        // Soon over: callers that wait for an address in use wait for this too.
        io::ErrorKind::ResourceBusy => Errno::ADDRINUSE.into(),
        _ => error,
    })?;
    remove_stale(path)?;
    let socket = stream_socket(AddressFamily::UNIX)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    // Nobody is connected before `listen`, whatever the mode is until then.
    let prepared = give(path, access).and_then(|file| {
        rustix::net::listen(&socket, backlog)?;
        Ok(file)
    });
    let file = prepared.inspect_err(|_| {
        // Ours: the folder is still locked. An error here would hide the first.
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

/// Locks the folder of a path until what is returned is dropped; `None` where the folder may not be read.
fn lock_folder(path: &Path) -> io::Result<Option<OwnedFd>> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = match rustix::fs::open(folder, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
        Err(Errno::ACCESS) => return Ok(None),
        opened => opened?,
    };
    match rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Err(io::ErrorKind::ResourceBusy.into()),
        locked => locked.map(|()| Some(folder)).map_err(Into::into),
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
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
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

    #[test]
    fn a_file_that_is_no_socket_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "x").unwrap();
        assert_eq!(plain(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert!(path.exists());
    }
}
