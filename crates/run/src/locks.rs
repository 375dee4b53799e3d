//! `flock` and the locks of `fcntl`, which hold between all programs and mounts that use the share.

use std::sync::Arc;
use std::time::Duration;

use byway_service::file::client::{LockKind, LockRange};
use rustix::io::Errno;

use crate::inside::inside;
use crate::open::{Live, Open};
use crate::process::{self, locked};

/// How long a call that waits for a lock sleeps before it asks again: signals reach the program in between.
const PAUSE: Duration = Duration::from_millis(10);

/// The holder of this process's own locks.
const OF_PROCESS: u64 = 1;

/// How a lock is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    /// `F_SETLK`: the process has it.
    Process,
    /// `F_OFD_SETLK`: the open file has it.
    Description,
    /// `flock`: the open file has all of the file.
    Whole,
}

/// The bytes that a lock is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LockedBytes {
    /// The first byte.
    pub(crate) start: u64,
    /// The last byte.
    pub(crate) last: u64,
}

impl LockedBytes {
    pub(crate) const ALL: Self = Self { start: 0, last: u64::MAX };
}

fn range(open: &Open, family: Family, bytes: LockedBytes) -> LockRange {
    let LockedBytes { start, last } = bytes;
    let owner = if family == Family::Process { OF_PROCESS } else { open.owner() };
    LockRange { whole: family == Family::Whole, owner, pid: std::process::id(), start, last }
}

/// Locks or unlocks; `wait`s if another has it.
///
/// # Errors
/// As `fcntl(2)`; `EINTR` if a signal came during the wait.
pub(crate) fn lock(open: &Open, family: Family, bytes: LockedBytes, kind: LockKind, wait: bool) -> Result<(), Errno> {
    loop {
        let tried = inside(|| {
            let live: Arc<Live> = open.live()?;
            live.client().lock(live.caller(), live.handle()?, range(open, family, bytes), kind, false)
        });
        match tried {
            Err(Errno::AGAIN | Errno::ACCESS) if wait => {
                let pause = rustix::fs::Timespec { tv_sec: 0, tv_nsec: PAUSE.as_nanos() as i64 };
                if let rustix::thread::NanosleepRelativeResult::Interrupted(_) = rustix::thread::nanosleep(&pause) {
                    return Err(Errno::INTR);
                }
            }
            Ok(()) if family == Family::Process && kind != LockKind::Unlock => {
                let file = (open.map()?, open.described.ino);
                return inside(|| {
                    locked(&process::this().ok_or(Errno::IO)?.locked_files).insert(file);
                    Ok(())
                });
            }
            tried => return tried,
        }
    }
}

/// The lock that is in the way, as `F_GETLK` gives it.
///
/// # Errors
/// As `fcntl(2)`.
pub(crate) fn test(open: &Open, family: Family, lock: &libc::flock, bytes: LockedBytes) -> Result<libc::flock, Errno> {
    let live = open.live()?;
    let exclusive = i32::from(lock.l_type) == libc::F_WRLCK;
    let found = live.client().test_lock(live.caller(), live.handle()?, range(open, family, bytes), exclusive)?;
    let Some(found) = found else { return Ok(libc::flock { l_type: libc::F_UNLCK as i16, ..*lock }) };
    let len = if found.last >= i64::MAX as u64 { 0 } else { (found.last - found.start + 1) as i64 };
    let kind = if found.exclusive { libc::F_WRLCK } else { libc::F_RDLCK };
    Ok(libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: found.start as i64,
        l_len: len,
        l_pid: found.pid as i32,
    })
}

/// A descriptor was closed: the process's own locks of the file end, as POSIX says.
pub(crate) fn closed(open: &Open) {
    let (Some(process), Ok(map)) = (process::this(), open.map()) else { return };
    let had = locked(&process.locked_files).remove(&(map, open.described.ino));
    if had
        && let Ok(live) = open.live()
        && let Ok(handle) = live.handle()
    {
        let range = range(open, Family::Process, LockedBytes::ALL);
        let _ = live.client().lock(live.caller(), handle, range, LockKind::Unlock, false);
    }
}
