//! Programs into which the dynamic linker loads no library of `LD_PRELOAD`, because the kernel starts them with `AT_SECURE` (ld.so(8)).
//!
//! The rules are those of `bprm_creds_from_file` (Linux, fs/exec.c) and `cap_bprm_creds_from_file` (security/commoncap.c): a set-user-ID
//! bit that root finds on a program of root changes nothing, and such a program can be paged.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{StatVfsMountFlags, fgetxattr, fstatvfs};
use rustix::process::{getegid, geteuid, getgid, getuid};
use rustix::thread::no_new_privs;

const SET_USER_ID: u32 = 0o4000;
/// Without the group's right to execute, the bit is another one's (mandatory locks).
const SET_GROUP_ID: u32 = 0o2010;

/// What makes an execution secure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Privilege {
    /// Another user or group than the caller's.
    Identity,
    /// Capabilities of the file.
    Capabilities,
}

/// The real and the effective user and group of a process.
#[derive(Clone, Copy, Debug)]
struct Identity {
    user: [u32; 2],
    group: [u32; 2],
}

impl Identity {
    fn own() -> Self {
        Self { user: [getuid().as_raw(), geteuid().as_raw()], group: [getgid().as_raw(), getegid().as_raw()] }
    }

    /// Whether it changes when it executes a file of this mode and owner.
    fn is_changed_by(self, mode: u32, owner: u32, group: u32) -> bool {
        let effective_user = if mode & SET_USER_ID != 0 { owner } else { self.user[1] };
        let effective_group = if mode & SET_GROUP_ID == SET_GROUP_ID { group } else { self.group[1] };
        effective_user != self.user[0] || effective_group != self.group[0]
    }
}

/// What this process would gain by the execution of an ELF program; the bits of scripts have no effect.
///
/// # Errors
/// The kernel's.
pub(crate) fn privilege(file: &File, metadata: &Metadata) -> io::Result<Option<Privilege>> {
    let own = Identity::own();
    let is_nosuid = fstatvfs(file)?.f_flag.contains(StatVfsMountFlags::NOSUID);
    // no_new_privs has the bits ignored, and a file's capabilities make the execution secure nevertheless.
    let mode = if is_nosuid || no_new_privs()? { 0 } else { metadata.mode() };
    if own.is_changed_by(mode, metadata.uid(), metadata.gid()) {
        return Ok(Some(Privilege::Identity));
    }
    let mut attribute = [0; 64];
    let len = fgetxattr(file, c"security.capability", &mut attribute[..]).unwrap_or(0);
    let is_secure = own.user[0] != 0 && !is_nosuid && has_capabilities(&attribute[..len]);
    Ok(is_secure.then_some(Privilege::Capabilities))
}

/// Of the attribute `security.capability` (`struct vfs_cap_data`, linux/capability.h): a word of revision and flags, then pairs of the
/// permitted and the inheritable.
fn has_capabilities(attribute: &[u8]) -> bool {
    const EFFECTIVE: u32 = 1;
    const WORDS: usize = 5;
    let words = attribute.as_chunks::<4>().0.iter().take(WORDS).map(|word| u32::from_le_bytes(*word));
    words.enumerate().any(|(index, word)| if index == 0 { word & EFFECTIVE != 0 } else { word != 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_changes_as_in_the_kernel() {
        let [root, user] = [0, 1000].map(|id| Identity { user: [id; 2], group: [id; 2] });
        for (mode, owner, group, changes_root, changes_user) in [
            (0o755, 0, 0, false, false),
            (0o4755, 0, 0, false, true),
            (0o4755, 1000, 0, true, false),
            (0o2755, 0, 0, false, true),
            (0o2755, 0, 1000, true, false),
            (0o2745, 0, 7, false, false),
            (0o6755, 0, 7, true, true),
        ] {
            let changes = [root, user].map(|own| own.is_changed_by(mode, owner, group));
            assert_eq!(changes, [changes_root, changes_user], "{mode:o} {owner} {group}");
        }
        let borrowed = Identity { user: [1000, 0], group: [1000; 2] };
        assert!(borrowed.is_changed_by(0o755, 0, 0), "its effective user is not the real one");
    }

    #[test]
    fn an_attribute_without_capabilities_is_none() {
        // As `setcap` writes `cap_net_raw+ep`, `cap_net_raw+p`, `=`.
        let attribute =
            |flags: u32, permitted: u32| [0x0200_0000 | flags, permitted, 0, 0, 0].map(u32::to_le_bytes).concat();
        assert!(has_capabilities(&attribute(1, 1 << 13)));
        assert!(has_capabilities(&attribute(0, 1 << 13)));
        assert!(!has_capabilities(&attribute(0, 0)) && !has_capabilities(&[]));
    }
}
