//! Confines a serving node: raises limits, drops root, and gives up access to the file system.
//!
//! The order matters, on the main thread, before loops and front ends start their threads (landlock confines the calling
//! thread and those it starts later):
//!
//! 1. [`raise_limits`], then open everything: volumes, listeners, certificates, the service manager, the opener for reloads;
//! 2. [`confine`] to the paths that are opened even later;
//! 3. [`become_user`](byway_reactor::privilege::become_user).

use std::io;
use std::path::PathBuf;

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, RulesetStatus,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limits on locked memory and open files: to unlimited and to `open_files` with privilege, else as far as
/// the hard limits allow. What could not be reached is limited further on, so that is no error.
pub fn raise_limits(open_files: u64) {
    raise(Resource::Memlock, None);
    raise(Resource::Nofile, Some(open_files));
}

fn raise(resource: Resource, wanted: Option<u64>) {
    let now = getrlimit(resource);
    let enough = |limit: Option<u64>| limit.is_none_or(|limit| wanted.is_some_and(|wanted| limit >= wanted));
    if enough(now.current) {
        return;
    }
    let maximum = if enough(now.maximum) { now.maximum } else { wanted };
    if setrlimit(resource, Rlimit { current: wanted, maximum }).is_err()
        && let Err(error) = setrlimit(resource, Rlimit { current: now.maximum, maximum: now.maximum })
    {
        tracing::warn!(?resource, %error, "cannot raise a resource limit");
    }
}

/// Why confinement failed. Serving on would be serving unconfined.
#[derive(Debug, thiserror::Error)]
pub enum ConfinementError {
    /// A path cannot be opened to make a rule of it.
    #[error("cannot confine the node: {}: {source}; name a path that exists", path.display())]
    Path {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The kernel refused.
    #[error("cannot confine the node: {0}; see byway doctor")]
    Landlock(#[from] RulesetError),
}

/// How far [`confine`] came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Confinement {
    /// All that this version knows of.
    Full,
    /// What this kernel knows of.
    Partial,
    /// The kernel has no landlock.
    None,
}

/// Confines this thread, and those that it starts from now on, to `writable` and `readable` paths and what lies beneath
/// them. What is open stays usable.
///
/// # Errors
/// See [`ConfinementError`]. A kernel without landlock is none.
pub fn confine(writable: &[PathBuf], readable: &[PathBuf]) -> Result<Confinement, ConfinementError> {
    let abi = ABI::V5;
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))?
        .create()?;
    // Execution is nobody's need.
    let write = AccessFs::from_all(abi) & !AccessFs::Execute;
    let read = AccessFs::from_read(abi) & !AccessFs::Execute;
    for (paths, access) in [(writable, write), (readable, read)] {
        for path in paths {
            let fail = |source| ConfinementError::Path { path: path.clone(), source };
            let is_folder = std::fs::metadata(path).map_err(fail)?.is_dir();
            let fd = PathFd::new(path).map_err(|error| fail(io::Error::other(error)))?;
            let access = if is_folder { access } else { access & AccessFs::from_file(abi) };
            rules = rules.add_rule(PathBeneath::new(fd, access))?;
        }
    }
    Ok(match rules.restrict_self()?.ruleset {
        RulesetStatus::FullyEnforced => Confinement::Full,
        RulesetStatus::PartiallyEnforced => Confinement::Partial,
        RulesetStatus::NotEnforced => Confinement::None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_confined_thread_reaches_only_what_it_serves() {
        let folder = tempfile::tempdir().unwrap();
        let (served, other) = (folder.path().join("served"), folder.path().join("other"));
        std::fs::write(&served, "s").unwrap();
        std::fs::write(&other, "o").unwrap();
        // On a thread of its own: there is no way back.
        let thread = std::thread::spawn({
            let (served, other) = (served.clone(), other.clone());
            move || {
                let how = confine(std::slice::from_ref(&served), &[]).unwrap();
                (how, std::fs::write(&served, "new"), std::fs::read(&other).map_err(|error| error.kind()))
            }
        });
        let (how, write, read) = thread.join().unwrap();
        assert!(write.is_ok());
        if byway_skip::lacks_landlock() {
            byway_skip::skip_part_of_this(byway_skip::NO_LANDLOCK);
        } else {
            assert_ne!(how, Confinement::None);
            assert_eq!(read, Err(io::ErrorKind::PermissionDenied));
        }
        assert!(std::fs::read(&other).is_ok(), "other threads are not confined");
        assert!(matches!(confine(&[folder.path().join("missing")], &[]), Err(ConfinementError::Path { .. })));
    }
}
