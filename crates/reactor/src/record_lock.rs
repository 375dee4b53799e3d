//! Record locks of open files (`fcntl(2)`, "open file description locks"): readers of a file use them to stop programs that
//! would empty the file.
//!
//! `flock(2)` is for writers. A reader that took such a lock would keep writers away; but a file may well be served
//! read-only while a program that expects readers writes to it.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The byte that readers lock, behind all that files hold: other programs lock bytes at the front (qemu from 100 on, SQLite
/// around 1 GiB), and must not find those taken.
const READERS_BYTE: i64 = 1 << 62;

/// Network file systems make `flock(2)` a record lock of the whole file at the server (nfs(5), "local_lock"): there a reader's byte
/// would keep writers away, and a writer's own lock would be taken for another process's.
const NETWORKS: [u32; 3] = [libc::NFS_SUPER_MAGIC as u32, 0xfe53_4d42, 0xff53_4d42];

/// Lets others know that the file is read, by as many as there are, until the last descriptor of this open file is closed.
///
/// # Errors
/// The kernel's: the file was not opened for reading, another process has an exclusive lock on that byte, or the file system has no locks;
/// `Unsupported` over NFS and SMB.
pub fn hold_for_reading(fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut lock = lock(libc::F_RDLCK, READERS_BYTE, 1);
    control(fd, libc::F_OFD_SETLK, &mut lock)
}

/// Whether others hold any record of the file, through whatever they have opened: readers by [`hold_for_reading`], virtual
/// machines their disks, databases their tables. Nothing is locked by it.
///
/// # Errors
/// The kernel's: the file system has no locks; `Unsupported` over NFS and SMB.
pub fn is_held_by_others(fd: BorrowedFd<'_>) -> io::Result<bool> {
    // To the end, wherever that is.
    let mut lock = lock(libc::F_WRLCK, 0, 0);
    control(fd, libc::F_OFD_GETLK, &mut lock)?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

/// Of `len` bytes from `start` on. The process is 0: these locks are the open file's.
fn lock(kind: i32, start: i64, len: i64) -> libc::flock {
    libc::flock { l_type: kind as _, l_whence: libc::SEEK_SET as _, l_start: start, l_len: len, l_pid: 0 }
}

fn control(fd: BorrowedFd<'_>, command: i32, lock: &mut libc::flock) -> io::Result<()> {
    if NETWORKS.contains(&(rustix::fs::fstatfs(fd)?.f_type as u32)) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    // SAFETY: the descriptor is open, and `lock` is what both commands read and one of them writes.
    let rc = unsafe { libc::fcntl(fd.as_raw_fd(), command, std::ptr::from_mut(lock)) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn readers_share_a_file_and_a_writer_hears_of_them_until_the_last_has_gone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "something").unwrap();
        let open = || File::options().read(true).write(true).open(&path).unwrap();
        let writer = open();
        let is_held = || is_held_by_others(writer.as_fd()).unwrap();
        assert!(!is_held());
        let readers = [File::open(&path).unwrap(), File::open(&path).unwrap()];
        for reader in &readers {
            hold_for_reading(reader.as_fd()).unwrap();
        }
        assert!(is_held());
        // A descriptor more of the same open file does not let go of it when it is closed, nor does another open file.
        drop(readers[0].try_clone().unwrap());
        drop(open());
        let [first, second] = readers;
        drop(first);
        assert!(is_held());
        // It is no lock for writing.
        writer.lock().unwrap();
        let copy = second.try_clone().unwrap();
        drop(second);
        assert!(is_held());
        drop(copy);
        assert!(!is_held());
        // Its own does not count.
        hold_for_reading(writer.as_fd()).unwrap();
        assert!(!is_held());
    }
}
