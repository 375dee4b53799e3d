//! Becoming another user, in all threads at once.
//!
//! The kernel changes credentials of one thread; glibc's `setresuid` and its like change all threads of the process
//! (nptl(7)). So libc is called, never the system call.

use std::ffi::CString;
use std::io;

/// A user of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// User id.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// All groups, the primary one too.
    pub groups: Vec<u32>,
}

/// Groups of one user that are looked up; the kernel's `NGROUPS_MAX`.
const GROUPS_MAX: usize = 65536;

/// Bytes of a user's entry: home, shell and comment are in it.
const ENTRY_BYTES: usize = 64 << 10;

/// Bytes of a group's entry: the names of its members are in it.
const GROUP_BYTES: usize = 1 << 20;

/// Looks a user up (`/etc/passwd` and whatever else the machine asks). Reads files: do it before confinement.
///
/// # Errors
/// `NotFound`, or the system's.
pub fn find_user(name: &str) -> io::Result<User> {
    let name = CString::new(name).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: `passwd` is plain data with pointers that may be null, and all zeroes is a value of it.
    let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
    let (mut text, mut found) = (vec![0u8; ENTRY_BYTES], std::ptr::null_mut());
    // SAFETY: all pointers are to live memory, and `text` has the size that is named.
    let rc = unsafe {
        libc::getpwnam_r(name.as_ptr(), &raw mut entry, text.as_mut_ptr().cast(), text.len(), &raw mut found)
    };
    if rc != 0 {
        return Err(io::Error::from_raw_os_error(rc));
    }
    if found.is_null() {
        return Err(io::ErrorKind::NotFound.into());
    }
    let mut groups = vec![0; GROUPS_MAX];
    let mut count = GROUPS_MAX as libc::c_int;
    // SAFETY: `groups` holds `count` entries; the name is a C string.
    let rc = unsafe { libc::getgrouplist(name.as_ptr(), entry.pw_gid, groups.as_mut_ptr(), &raw mut count) };
    if rc < 0 {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    groups.truncate(count as usize);
    groups.shrink_to_fit();
    Ok(User { uid: entry.pw_uid, gid: entry.pw_gid, groups })
}

/// Looks a group up (`/etc/group` and whatever else the machine asks); a number is one. Reads files: do it before confinement.
///
/// # Errors
/// `NotFound`, or the system's.
pub fn find_group(name: &str) -> io::Result<u32> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let name = CString::new(name).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: `group` is plain data with pointers that may be null, and all zeroes is a value of it.
    let mut entry: libc::group = unsafe { std::mem::zeroed() };
    let (mut text, mut found) = (vec![0u8; GROUP_BYTES], std::ptr::null_mut());
    // SAFETY: all pointers are to live memory, and `text` has the size that is named.
    let rc = unsafe {
        libc::getgrnam_r(name.as_ptr(), &raw mut entry, text.as_mut_ptr().cast(), text.len(), &raw mut found)
    };
    match rc {
        0 if found.is_null() => Err(io::ErrorKind::NotFound.into()),
        0 => Ok(entry.gr_gid),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Gives this thread a umask of its own, of 0, so that what it makes has the mode that it asks for. Other threads keep theirs.
///
/// # Errors
/// The kernel's.
pub fn clear_umask_of_thread() -> io::Result<()> {
    // SAFETY: a number only. What it unshares (umask, root and working directory) no other code of ours relies on being shared.
    if unsafe { libc::unshare(libc::CLONE_FS) } != 0 {
        return Err(io::Error::last_os_error());
    }
    rustix::process::umask(rustix::fs::Mode::empty());
    Ok(())
}

/// Takes from this thread, and from those that it starts, what lets root write beyond a user's rights on an open file: keeping the
/// set-user-ID bit (`CAP_FSETID`), and passing quotas (`CAP_SYS_RESOURCE`). The thread's ring has its operations done with the
/// rights that it has when it submits them. A thread that becomes root again after being another user has both again.
///
/// # Errors
/// The kernel's.
pub fn limit_writes_of_thread() -> io::Result<()> {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let mut sets = capabilities(None)?;
    sets.effective.remove(CapabilitySet::FSETID | CapabilitySet::SYS_RESOURCE);
    Ok(set_capabilities(None, sets)?)
}

/// Becomes `user` in all threads, for good: no way back, and no program run from here gets privilege.
///
/// # Errors
/// The kernel's (`PermissionDenied` without root); `InvalidInput` for root. After an error the process may be in
/// between: end it.
pub fn become_user(user: &User) -> io::Result<()> {
    if user.uid == 0 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let check = |rc: libc::c_int| {
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: the list lives during the call and has the length that is named.
    check(unsafe { libc::setgroups(user.groups.len(), user.groups.as_ptr()) })?;
    // SAFETY: numbers only.
    check(unsafe { libc::setresgid(user.gid, user.gid, user.gid) })?;
    // SAFETY: numbers only.
    check(unsafe { libc::setresuid(user.uid, user.uid, user.uid) })?;
    // SAFETY: numbers only.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })?;
    // SAFETY: numbers only. It must fail: else the change did not take.
    if unsafe { libc::setresuid(0, 0, 0) } == 0 {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_looked_up() {
        let root = find_user("root").unwrap();
        assert_eq!((root.uid, root.gid), (0, 0));
        assert_eq!(find_user("no such user").unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!((find_group("root").unwrap(), find_group("4711").unwrap()), (0, 4711));
        assert_eq!(find_group("no such group").unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(become_user(&root).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
