//! A share: a directory, the clients that may use it, and the rights of its clients there.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use byway_fabric::access::{Access, Identity, Right};
use byway_reactor::privilege::User;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::locks::Locks;
use super::server::Ticket;
use super::state;
use super::sync_point::SyncPoint;
use super::user_map::{UserMap, UserMapError};
use crate::block::spec::VolumeName;

/// Whose rights the clients of a share have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Users {
    /// Those of the directory's owner and group if the server is root, else the server's. Where one of them is root's it is
    /// [`NOBODY`]: clients are root only if the operator says so.
    #[default]
    Owner,
    /// Those of one user.
    Squash(User),
    /// Those of the user that each call names: the clients' machines are trusted to name the right one. Root and its group are
    /// [`NOBODY`].
    Trust,
    /// As `Trust`, and root of a client is root here.
    TrustRoot,
    /// Those of the user that a file names for the user that each call names ([`UserMap`]).
    Map(PathBuf),
}

/// The user and group without rights of their own, by the number that Linux has for them.
pub const NOBODY: u32 = 65534;

/// Other writers of a share's files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Writers {
    /// Programs of the server's machine do too: clients ask the server for everything.
    #[default]
    Local,
    /// Only clients do, so they may keep attributes and names as long as no other client changes them.
    Exclusive,
}

/// A share as it is configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareSpec {
    /// What clients call it: a name as a volume has, and no volume of the node has it too.
    pub name: VolumeName,
    /// The directory.
    pub directory: PathBuf,
    /// Changes are refused.
    pub read_only: bool,
    /// Whose rights clients have.
    pub users: Users,
    /// Other writers of its files.
    pub writers: Writers,
    /// Which clients may use it.
    pub access: Access,
    /// What a listing shows beside the name.
    pub description: Option<String>,
}

impl ShareSpec {
    /// A writable share without options.
    pub fn new(name: VolumeName, directory: PathBuf) -> Self {
        let (users, writers, access) = (Users::default(), Writers::default(), Access::default());
        Self { name, directory, read_only: false, users, writers, access, description: None }
    }
}

/// Why a share cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    /// The directory cannot be opened.
    #[error("{}: {source}; name a directory that exists", path.display())]
    Open {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A running node is confined to the directories that it had at its start.
    #[error("{}: a running node can reach only the directories that it had at its start; restart it", .0.display())]
    Confined(PathBuf),
    /// Another user's rights need root.
    #[error("users={0} needs a server that runs as root: leave it out, or start the node as root and without --user")]
    NotRoot(String),
    /// The map of users cannot be used.
    #[error("users=map: {}: {source}", path.display())]
    Map {
        /// Its file.
        path: PathBuf,
        /// Why not.
        source: UserMapError,
    },
    /// The number that stands for none in the kernel's calls.
    #[error("users=squash: {} is not a user or group; name another number", u32::MAX)]
    NoUser,
}

/// The user whose rights a call has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Acting {
    /// Always this one.
    As(User),
    /// The one of the call.
    Caller {
        /// Root may be one.
        root: bool,
    },
    /// The one that the map has for that of the call.
    Mapped(UserMap),
}

impl Acting {
    /// The user for a call that names `caller`. `None`: no user has that number.
    pub(super) fn user(&self, caller: impl FnOnce() -> User) -> Option<User> {
        let root = match self {
            Self::As(user) => return Some(user.clone()),
            Self::Mapped(map) => return Some(map.user(caller().uid)),
            Self::Caller { root } => *root,
        };
        let squashed = |number| if root { number } else { no_root(number) };
        let User { uid, gid, groups } = caller();
        let user = User { uid: squashed(uid), gid: squashed(gid), groups: groups.into_iter().map(squashed).collect() };
        is_one(&user).then_some(user)
    }
}

fn no_root(number: u32) -> u32 {
    if number == 0 { NOBODY } else { number }
}

/// Whether all numbers are those of users and groups: the last one stands for none in the kernel's calls.
fn is_one(user: &User) -> bool {
    user.uid != u32::MAX && user.gid != u32::MAX && !user.groups.contains(&u32::MAX)
}

/// File systems of this machine's own disks and memory: ext2 to ext4, XFS, btrfs, F2FS, tmpfs (`linux/magic.h`).
const LOCAL: [u64; 5] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0x0102_1994];

/// A share that is served.
#[derive(Debug)]
pub struct Share {
    spec: ShareSpec,
    root: OwnedFd,
    /// The number of the file system's device.
    device: u64,
    /// From the first client's attach on.
    sync_point: OnceLock<Arc<SyncPoint>>,
    acting: Acting,
    can_list: bool,
    is_local: bool,
    list: state::List,
    /// It was said that a removed file could not be kept.
    told_unkept: AtomicBool,
    pub(super) locks: Mutex<Locks<Ticket>>,
}

impl Share {
    /// Opens the directory, and reads the map of users if there is one.
    ///
    /// # Errors
    /// See [`ShareError`].
    pub fn open(spec: ShareSpec) -> Result<Self, ShareError> {
        Self::open_by(spec, &|path| File::open(path))
    }

    /// The same, where `read` opens the map.
    ///
    /// # Errors
    /// See [`ShareError`].
    pub fn open_by(spec: ShareSpec, read: &dyn Fn(&Path) -> io::Result<File>) -> Result<Self, ShareError> {
        let path = &spec.directory;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = |source: Errno| ShareError::Open { path: path.clone(), source: source.into() };
        let root = rustix::fs::openat(CWD, path, flags, Mode::empty()).map_err(open)?;
        let uid = rustix::process::geteuid().as_raw();
        let acting = match &spec.users {
            Users::Trust if uid != 0 => return Err(ShareError::NotRoot("trust".to_owned())),
            Users::TrustRoot if uid != 0 => return Err(ShareError::NotRoot("trust-root".to_owned())),
            Users::Map(_) if uid != 0 => return Err(ShareError::NotRoot("map".to_owned())),
            Users::Map(path) => {
                let map = read(path).map_err(UserMapError::from).and_then(UserMap::read);
                Acting::Mapped(map.map_err(|source| ShareError::Map { path: path.clone(), source })?)
            }
            Users::Trust => Acting::Caller { root: false },
            Users::TrustRoot => Acting::Caller { root: true },
            Users::Squash(user) if !is_one(user) => return Err(ShareError::NoUser),
            Users::Squash(user) if uid != 0 && uid != user.uid => {
                return Err(ShareError::NotRoot(format!("squash:{}", user.uid)));
            }
            Users::Squash(user) => Acting::As(user.clone()),
            Users::Owner if uid == 0 => {
                let owner = rustix::fs::fstat(&root).map_err(open)?;
                let (uid, gid) = (no_root(owner.st_uid), no_root(owner.st_gid));
                Acting::As(User { uid, gid, groups: vec![gid] })
            }
            Users::Owner => {
                let gid = rustix::process::getegid().as_raw();
                Acting::As(User { uid, gid, groups: vec![gid] })
            }
        };
        is_reachable(path, &root)?;
        let device = rustix::fs::fstat(&root).map_err(open)?.st_dev;
        let can_list = state::can_list(root.as_fd());
        let is_local = rustix::fs::fstatfs(&root).is_ok_and(|sizes| LOCAL.contains(&(sizes.f_type as u64)));
        let list = state::List::default();
        Ok(Self {
            root,
            device,
            sync_point: OnceLock::new(),
            acting,
            can_list,
            is_local,
            list,
            told_unkept: AtomicBool::new(false),
            locks: Mutex::default(),
            spec,
        })
    }

    /// Whether another share has the same configuration and the same map of users.
    pub fn is_configured_as(&self, other: &Self) -> bool {
        self.spec == other.spec && self.acting == other.acting
    }

    /// As it was configured.
    pub fn spec(&self) -> &ShareSpec {
        &self.spec
    }

    /// Whether clients are nobody because the directory is root's and no user is named.
    pub fn is_for_nobody(&self) -> bool {
        self.spec.users == Users::Owner && matches!(&self.acting, Acting::As(user) if user.uid == NOBODY)
    }

    /// What clients call it.
    pub fn name(&self) -> &str {
        self.spec.name.as_str()
    }

    /// What `client` may do with it; `None`: nothing, not even learn that it exists.
    pub fn right(&self, client: &Identity) -> Option<Right> {
        let right = self.spec.access.right(client)?;
        Some(if self.spec.read_only { Right::Read } else { right })
    }

    /// Whether clients may keep what they know of its files.
    pub(super) fn gives_leases(&self) -> bool {
        self.spec.writers == Writers::Exclusive
    }

    /// Whether the server can keep a list of the clients that have locks or leases (`state.rs`). Without it a new process waits
    /// for the whole grace time.
    pub fn can_list(&self) -> bool {
        self.can_list
    }

    /// Whether the file system below answers from memory what it has there, without asking another machine or a process.
    pub(super) fn is_local(&self) -> bool {
        self.is_local
    }

    /// What this process knows of the list on disk.
    pub(super) fn list(&self) -> &state::List {
        &self.list
    }

    /// A removed file that a client has open could not be kept: says so once.
    pub(super) fn note_unkept(&self, error: Errno) {
        if !self.told_unkept.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                share = self.name(),
                %error,
                "a removed file that is open cannot be kept in {}: it is lost if the server process ends",
                state::FOLDER
            );
        }
    }

    pub(super) fn root(&self) -> &OwnedFd {
        &self.root
    }

    /// What its file system is synced by; `open` opens the root. `None`: this server may not list the directory.
    pub(super) fn sync_point(&self, open: impl FnOnce(&OwnedFd) -> Result<OwnedFd, Errno>) -> Option<Arc<SyncPoint>> {
        if self.sync_point.get().is_none() {
            let opened = open(&self.root).and_then(SyncPoint::new).ok()?;
            // Another thread may have been first.
            let _ = self.sync_point.set(Arc::new(opened));
        }
        self.sync_point.get().map(Arc::clone)
    }

    /// This share takes the place of others: it is synced by what one of them was, which knows what has failed.
    pub(super) fn replaces(&self, others: &[Arc<Self>]) {
        let of_device = others.iter().filter(|other| other.device == self.device);
        // Clients come back to the share of the same name.
        let by_name = of_device.min_by_key(|other| other.name() != self.name());
        if let Some(point) = by_name.and_then(|other| other.sync_point.get()) {
            let _ = self.sync_point.set(Arc::clone(point));
        }
    }

    /// A sync of one of its files has failed.
    pub(super) fn note_failed_sync(&self, error: Errno) {
        // Of these, no write-back has failed.
        let refused = matches!(error, Errno::BADF | Errno::INVAL | Errno::ROFS | Errno::OPNOTSUPP | Errno::INTR);
        if let Some(point) = self.sync_point.get().filter(|_| !refused) {
            point.note_failed(error);
        }
    }

    pub(super) fn acting(&self) -> &Acting {
        &self.acting
    }
}

/// Looks whether landlock lets this process open what lies in the directory.
fn is_reachable(path: &Path, root: &OwnedFd) -> Result<(), ShareError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match rustix::fs::openat2(root, c".", flags, Mode::empty(), ResolveFlags::BENEATH) {
        Err(Errno::ACCESS) if rustix::process::geteuid().is_root() => Err(ShareError::Confined(path.to_owned())),
        // A directory that the server may not list may still be one that it may pass.
        Ok(_) | Err(Errno::ACCESS) => Ok(()),
        Err(source) => Err(ShareError::Open { path: path.to_owned(), source: source.into() }),
    }
}
