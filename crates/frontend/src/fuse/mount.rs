//! Making and removing mounts: by the kernel's mount calls as root, by `fusermount3` otherwise.

use std::ffi::OsStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{AtFlags, CWD, StatxFlags};
use rustix::io::{Errno, IoSliceMut};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, move_mount,
};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{getgid, getuid};

use super::channel::Channel;

/// How a file system is mounted.
#[derive(Clone, Debug, Default)]
pub struct MountOptions {
    /// What is mounted, the first column of `/proc/mounts`: a URI.
    pub source: String,
    /// Nothing may be changed.
    pub read_only: bool,
    /// Users other than the mounting one may use it. Without root `/etc/fuse.conf` must have `user_allow_other`.
    pub allow_other: bool,
    /// The kernel checks modes and owners; else the file system does.
    pub default_permissions: bool,
    /// Programs may have the rights of their files' owners, and device nodes work: never for files of other machines.
    pub set_uid_and_devices: bool,
    /// Programs of the mount cannot be executed.
    pub no_execution: bool,
}

/// Why there is no mount.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// No `/dev/fuse`.
    #[error("/dev/fuse: {0}; load the kernel's module (modprobe fuse), or give the container the device")]
    NoFuse(io::Error),
    /// The kernel refused.
    #[error("cannot mount on {}: {source}{}", directory.display(), remedy(source))]
    Refused {
        /// Where.
        directory: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// `fusermount3` refused, or is not there.
    #[error("cannot mount on {}: fusermount3: {reason}", directory.display())]
    Helper {
        /// Where.
        directory: PathBuf,
        /// What it said.
        reason: String,
    },
    /// It could not be removed.
    #[error("cannot unmount {}: {source}{}", directory.display(), unmount_remedy(source))]
    Unmount {
        /// Where.
        directory: PathBuf,
        /// Why.
        source: io::Error,
    },
}

fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOTCONN) => "; an earlier mount there has lost its process: unmount it first (umount -l)",
        Some(Errno::PERM | Errno::ACCESS) => "; mount as root, or install fusermount3 (package fuse3)",
        _ => "",
    }
}

fn unmount_remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::BUSY) => "; files are open there, or it is a working folder: end these programs, or unmount lazily",
        Some(Errno::INVAL) => "; nothing is mounted there",
        Some(Errno::PERM) => "; unmount as the user who mounted, or as root",
        _ => "",
    }
}

/// Mounts on a directory. The mount works once INIT was answered on the channel.
///
/// # Errors
/// See [`MountError`].
pub fn mount(options: &MountOptions, directory: &Path) -> Result<Channel, MountError> {
    if !rustix::process::geteuid().is_root() {
        return by_helper(options, directory);
    }
    let refused = |source: Errno| MountError::Refused { directory: directory.to_owned(), source: source.into() };
    let (channel, mount) = detached_of_root(options, refused)?;
    let how = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    move_mount(&mount, c"", CWD, directory, how).map_err(refused)?;
    Ok(channel)
}

/// Mounts nowhere: the file system is reached through the second descriptor alone, and goes with the last descriptor of it and its
/// files. Needs root.
///
/// # Errors
/// See [`MountError`].
pub fn mount_detached(options: &MountOptions) -> Result<(Channel, OwnedFd), MountError> {
    detached_of_root(options, |source| MountError::Refused { directory: "(nowhere)".into(), source: source.into() })
}

fn detached_of_root(
    options: &MountOptions,
    refused: impl Fn(Errno) -> MountError,
) -> Result<(Channel, OwnedFd), MountError> {
    let channel = Channel::open().map_err(MountError::NoFuse)?;
    let created = || {
        let context = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
        let fd = std::os::fd::AsFd::as_fd(&channel).as_raw_fd().to_string();
        let (uid, gid) = (getuid().as_raw().to_string(), getgid().as_raw().to_string());
        let texts = [
            ("source", options.source.as_str()),
            ("subtype", "byway"),
            ("fd", &fd),
            // The root's type: a directory (octal).
            ("rootmode", "40000"),
            ("user_id", &uid),
            ("group_id", &gid),
        ];
        for (key, value) in texts {
            fsconfig_set_string(&context, key, value)?;
        }
        let flags = [
            (options.allow_other, "allow_other"),
            (options.default_permissions, "default_permissions"),
            (options.read_only, "ro"),
        ];
        for (_, key) in flags.into_iter().filter(|(set, _)| *set) {
            fsconfig_set_flag(&context, key)?;
        }
        fsconfig_create(&context)?;
        let mut attributes = MountAttrFlags::empty();
        attributes.set(MountAttrFlags::MOUNT_ATTR_RDONLY, options.read_only);
        let careful = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        attributes.set(careful, !options.set_uid_and_devices);
        attributes.set(MountAttrFlags::MOUNT_ATTR_NOEXEC, options.no_execution);
        fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
    };
    let mount = created().map_err(refused)?;
    Ok((channel, mount))
}

/// Has `fusermount3`, which is set-uid, mount and hand the channel over.
fn by_helper(options: &MountOptions, directory: &Path) -> Result<Channel, MountError> {
    let failed = |reason: String| MountError::Helper { directory: directory.to_owned(), reason };
    let io_failed = |error: io::Error| failed(error.to_string());
    let (own, theirs) = UnixStream::pair().map_err(io_failed)?;
    let mut text = format!("nosuid,nodev,subtype=byway,fsname={}", escaped(&options.source));
    let flags = [
        (options.allow_other, ",allow_other"),
        (options.default_permissions, ",default_permissions"),
        (options.read_only, ",ro"),
        (options.no_execution, ",noexec"),
    ];
    flags.into_iter().filter(|(set, _)| *set).for_each(|(_, flag)| text.push_str(flag));
    let mut command = Command::new("fusermount3");
    // Its standard input is the socket that it sends the descriptor through.
    command.args(["-o", &text, "--"]).arg(directory).env("_FUSE_COMMFD", "0");
    command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null()).stderr(Stdio::piped());
    let child = command.spawn().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => failed("not installed; install the package fuse3, or mount as root".to_owned()),
        _ => io_failed(error),
    })?;
    // The command has a copy of their end, and a read of ours must see its end.
    drop(command);
    let received = receive_descriptor(&own);
    let output = child.wait_with_output().map_err(io_failed)?;
    match received {
        Some(fd) if output.status.success() => Ok(Channel::adopt(fd)),
        _ => Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
    }
}

/// In the helper's options a comma ends one.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace(',', "\\,")
}

fn receive_descriptor(socket: &UnixStream) -> Option<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC).ok()?;
    ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    })
}

/// Has the kernel read so many bytes ahead of programs that read a mounted directory's files from start to end: 128 KiB without this,
/// which is then also the longest read through the page cache. The mount must work already. Needs root.
///
/// # Errors
/// The kernel's: no right, or no `/sys` to write to.
pub fn set_read_ahead(directory: &Path, bytes: u64) -> io::Result<()> {
    // What is asked for is known without a request: the device's number.
    let stat = rustix::fs::statx(CWD, directory, AtFlags::STATX_DONT_SYNC, StatxFlags::empty())?;
    let file = format!("/sys/class/bdi/{}:{}/read_ahead_kb", stat.stx_dev_major, stat.stx_dev_minor);
    std::fs::write(file, (bytes >> 10).to_string())
}

/// Removes a mount. `lazily` takes it out of the tree at once, and it ends with its last open file.
///
/// # Errors
/// [`MountError::Unmount`], or [`MountError::Helper`] without root.
pub fn unmount(directory: &Path, lazily: bool) -> Result<(), MountError> {
    if rustix::process::geteuid().is_root() {
        let mut flags = UnmountFlags::NOFOLLOW;
        flags.set(UnmountFlags::DETACH, lazily);
        let failed = |source: Errno| MountError::Unmount { directory: directory.to_owned(), source: source.into() };
        return rustix::mount::unmount(directory, flags).map_err(failed);
    }
    let how = if lazily { "-uz" } else { "-u" };
    let output = Command::new("fusermount3").args([OsStr::new(how), OsStr::new("--"), directory.as_os_str()]).output();
    let failed = |reason: String| MountError::Helper { directory: directory.to_owned(), reason };
    let output = output.map_err(|error| failed(error.to_string()))?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.status.success() { Ok(()) } else { Err(failed(said)) }
}
