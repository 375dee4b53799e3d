//! Whose rights a share's clients have.

mod file_server;

use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::sync::Arc;

use byway_reactor::privilege::User;
use byway_reactor::{Address, Errno};
use byway_service::block::spec::VolumeName;
use byway_service::file::client::{Caller, Client, ClientOptions, NamedIn, NewMode, ROOT};
use byway_service::file::wire::{NewAttributes, SET_GID, SET_UID};
use byway_service::file::{NOBODY, Share, ShareError, ShareSpec, Users};
use file_server::{Server, tcp};
use rustix::fs::OFlags;
use zerocopy::FromZeros;

const ME: Caller<'static> = Caller { uid: 0, gid: 0, groups: &[0] };

fn is_not_root() -> bool {
    let not_root = !rustix::process::geteuid().is_root();
    if not_root {
        byway_skip::skip_this(byway_skip::SkipReason::Machine("not root, who alone can act as other users"));
    }
    not_root
}

fn spec(directory: &Path, users: Users) -> ShareSpec {
    ShareSpec { users, ..ShareSpec::new(VolumeName::new("share").unwrap(), directory.to_owned()) }
}

fn serve(directory: &Path, users: Users) -> (Server, Client) {
    let server = Server::start(tcp(), vec![Arc::new(Share::open(spec(directory, users)).unwrap())]);
    let client = Client::connect(ClientOptions::new(server.at.clone(), "share")).unwrap();
    (server, client)
}

/// A folder of root's in which all may make files.
fn open_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o777)).unwrap();
    folder
}

fn make(client: &Client, caller: Caller<'_>, name: &str) {
    let flags = (OFlags::WRONLY | OFlags::EXCL).bits();
    let (_, handle) = client.create(caller, NamedIn::new(ROOT, name.as_bytes()), flags, 0o644).unwrap();
    client.close_handle(handle);
}

#[test]
fn clients_are_root_only_where_the_operator_says_so() {
    if is_not_root() {
        return;
    }
    let folder = open_folder();
    let owner = |name: &str| {
        let made = std::fs::metadata(folder.path().join(name)).unwrap();
        (made.uid(), made.gid())
    };
    let (_server, client) = serve(folder.path(), Users::Owner);
    make(&client, ME, "default");
    assert_eq!(owner("default"), (NOBODY, NOBODY), "the directory is root's");
    let (_server, client) = serve(folder.path(), Users::Trust);
    make(&client, ME, "trust");
    assert_eq!(owner("trust"), (NOBODY, NOBODY), "root of a client");
    make(&client, Caller { uid: 4711, ..ME }, "group");
    assert_eq!(owner("group"), (4711, NOBODY), "root's group");
    let (_server, client) = serve(folder.path(), Users::TrustRoot);
    make(&client, ME, "trust-root");
    assert_eq!(owner("trust-root"), (0, 0));
    let root = User { uid: 0, gid: 0, groups: vec![0] };
    let (_server, client) = serve(folder.path(), Users::Squash(root));
    make(&client, Caller { uid: 4711, ..ME }, "squash");
    assert_eq!(owner("squash"), (0, 0));
    chown(folder.path(), Some(4711), Some(0)).unwrap();
    let (_server, client) = serve(folder.path(), Users::Owner);
    make(&client, ME, "owner");
    assert_eq!(owner("owner"), (4711, NOBODY));
}

#[test]
fn a_map_decides_who_a_clients_user_is() {
    if is_not_root() {
        return;
    }
    let (folder, elsewhere) = (open_folder(), tempfile::tempdir().unwrap());
    let map = elsewhere.path().join("users");
    std::fs::write(&map, "4711 5000\n4712 5001:100,200\n").unwrap();
    let (_server, client) = serve(folder.path(), Users::Map(map.clone()));
    let owner = |name: &str| {
        let made = std::fs::metadata(folder.path().join(name)).unwrap();
        (made.uid(), made.gid())
    };
    for (uid, name, expected) in [
        (4711, "mapped", (5000, 5000)),
        (4712, "groups", (5001, 100)),
        (4713, "absent", (NOBODY, NOBODY)),
        (0, "root", (NOBODY, NOBODY)),
        (u32::MAX, "none", (NOBODY, NOBODY)),
    ] {
        make(&client, Caller { uid, ..ME }, name);
        assert_eq!(owner(name), expected, "{uid}");
    }
    // A file of group 200 can be read by the map's groups, not by those that the call names.
    chown(folder.path().join("mapped"), Some(5002), Some(200)).unwrap();
    std::fs::set_permissions(folder.path().join("mapped"), PermissionsExt::from_mode(0o640)).unwrap();
    let file = client.look_up(Caller { uid: 4712, ..ME }, ROOT, b"mapped").unwrap();
    let open = |uid| client.open(Caller { uid, gid: 200, groups: &[200] }, file.node, OFlags::RDONLY.bits());
    client.close_handle(open(4712).unwrap());
    assert_eq!(open(4711), Err(Errno::ACCESS));
    std::fs::write(&map, "4711 alice\n").unwrap();
    let refused = Share::open(spec(folder.path(), Users::Map(map))).unwrap_err().to_string();
    assert!(refused.contains("users: line 1: users and groups are numbers"), "{refused}");
}

#[test]
fn the_number_for_no_user_is_refused_everywhere() {
    if is_not_root() {
        return;
    }
    const NONE: u32 = u32::MAX;
    let folder = open_folder();
    let none = User { uid: NONE, gid: 0, groups: Vec::new() };
    let refused = Share::open(spec(folder.path(), Users::Squash(none))).unwrap_err();
    assert!(matches!(refused, ShareError::NoUser), "{refused}");
    let (_server, client) = serve(folder.path(), Users::TrustRoot);
    for caller in [Caller { uid: NONE, ..ME }, Caller { gid: NONE, ..ME }, Caller { groups: &[1, NONE], ..ME }] {
        assert_eq!(client.make_directory(caller, ROOT, b"directory", 0o755), Err(Errno::INVAL), "{caller:?}");
    }
    let mut new = NewAttributes::new_zeroed();
    (new.uid, new.gid) = (NONE.into(), NONE.into());
    for which in [SET_UID, SET_GID, SET_UID | SET_GID] {
        new.which = which.into();
        assert_eq!(client.set_attributes(ME, ROOT, None, &new).unwrap_err(), Errno::INVAL);
    }
    client.make_directory(ME, ROOT, b"directory", 0o755).unwrap();
}

#[test]
fn a_default_acl_counts_instead_of_the_umask() {
    /// As `acl(5)` and `linux/posix_acl_xattr.h` have it: tag, rights and id of owner (7), group (7) and others (5).
    const ALL_MAY_READ: [u8; 28] =
        [2, 0, 0, 0, 1, 0, 7, 0, 255, 255, 255, 255, 4, 0, 7, 0, 255, 255, 255, 255, 32, 0, 5, 0, 255, 255, 255, 255];
    let folder = open_folder();
    let shared = folder.path().join("shared");
    std::fs::create_dir(&shared).unwrap();
    let acl = rustix::fs::setxattr(&shared, "system.posix_acl_default", &ALL_MAY_READ, rustix::fs::XattrFlags::empty());
    if acl == Err(rustix::io::Errno::NOTSUP) {
        return byway_skip::skip_this(byway_skip::SkipReason::Machine("no ACLs in the folder for temporary files"));
    }
    acl.unwrap();
    let me = User { uid: rustix::process::getuid().as_raw(), gid: rustix::process::getgid().as_raw(), groups: vec![] };
    let (_server, client) = serve(folder.path(), Users::Squash(me));
    let directory = client.look_up(ME, ROOT, b"shared").unwrap();
    let private = |mode: u32| NewMode { mode, umask: 0o077 };
    for parent in [ROOT, directory.node] {
        let (_, handle) =
            client.create(ME, NamedIn::new(parent, b"file"), OFlags::WRONLY.bits(), private(0o666)).unwrap();
        client.close_handle(handle);
        client.make_directory(ME, parent, b"directory", private(0o777)).unwrap();
        client.make_node(ME, parent, b"fifo", private(0o010_666)).unwrap();
    }
    let mode = |name: &str| std::fs::metadata(folder.path().join(name)).unwrap().mode() & 0o777;
    let modes = ["file", "directory", "fifo"].map(|name| (mode(name), mode(&format!("shared/{name}"))));
    assert_eq!(modes, [(0o600, 0o664), (0o700, 0o775), (0o600, 0o664)]);
}

#[test]
fn a_write_takes_the_set_user_id_bit_away() {
    if is_not_root() {
        return;
    }
    let folder = open_folder();
    let path = folder.path().join("program");
    let (_server, client) = serve(folder.path(), Users::Squash(User { uid: 4711, gid: 4712, groups: vec![4712] }));
    for len in [10, 100_000] {
        std::fs::write(&path, "the program").unwrap();
        chown(&path, Some(0), Some(4712)).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o6775)).unwrap();
        let program = client.look_up(ME, ROOT, b"program").unwrap();
        let handle = client.open(ME, program.node, OFlags::WRONLY.bits()).unwrap();
        assert_eq!(client.write(ME, handle, 0, &vec![b'x'; len]).unwrap(), len);
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o775, "after {len} bytes");
        client.close_handle(handle);
    }
    // A user's own bits are the user's.
    let mut new = NewAttributes::new_zeroed();
    let root = User { uid: 0, gid: 0, groups: vec![0] };
    let (_server, client) = serve(folder.path(), Users::Squash(root));
    let program = client.look_up(ME, ROOT, b"program").unwrap();
    (new.which, new.mode) = (byway_service::file::wire::SET_MODE.into(), 0o2755.into());
    let set = client.set_attributes(ME, program.node, None, &new).unwrap();
    assert_eq!(set.mode.get() & 0o7777, 0o2755, "root's workers have root's rights");
}

/// A file system of its own on a directory, until this is dropped.
struct Mounted<'a>(&'a Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn a_listing_says_nothing_of_what_is_mounted_below() {
    if is_not_root() {
        return;
    }
    let folder = open_folder();
    let (plain, other) = (folder.path().join("plain"), folder.path().join("other"));
    std::fs::create_dir(&plain).unwrap();
    std::fs::create_dir(&other).unwrap();
    rustix::mount::mount("none", &other, "tmpfs", rustix::mount::MountFlags::empty(), None).unwrap();
    let _mounted = Mounted(&other);
    let (_server, client) = serve(folder.path(), Users::Owner);
    let handle = client.open_directory(ME, ROOT).unwrap();
    for nodes in [false, true] {
        let listed = client.read_directory(ME, handle, 0, 4096, nodes).unwrap();
        let links = |name: &str| {
            let found = listed.iter().find(|listed| listed.name == name.as_bytes()).unwrap();
            found.attributes.links.get()
        };
        assert_eq!((links("plain") > 0, links("other")), (true, 0), "with nodes: {nodes}");
    }
}

#[test]
fn a_file_is_opened_again_for_the_user_who_opened_it() {
    if is_not_root() {
        return;
    }
    let (folder, sockets) = (open_folder(), tempfile::tempdir().unwrap());
    let directory = folder.path().join("theirs");
    std::fs::create_dir(&directory).unwrap();
    std::fs::write(directory.join("file"), "text").unwrap();
    for (path, mode) in [(&directory, 0o750), (&directory.join("file"), 0o640)] {
        chown(path, Some(0), Some(5000)).unwrap();
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }
    let start = || {
        let share = Share::open(spec(folder.path(), Users::Trust)).unwrap();
        Server::start(Address::Unix(sockets.path().join("socket")), vec![Arc::new(share)])
    };
    let server = start();
    let client = Client::connect(ClientOptions::new(server.at.clone(), "share")).unwrap();
    let member = Caller { uid: 1000, gid: 1000, groups: &[4999, 5000] };
    let theirs = client.look_up(member, ROOT, b"theirs").unwrap();
    let file = client.look_up(member, theirs.node, b"file").unwrap();
    let handle = client.open(member, file.node, 0).unwrap();
    drop(server);
    let _server = start();
    // A child that has inherited the file, and is another user now.
    let other = Caller { uid: 2000, gid: 2000, groups: &[] };
    let mut back = [0; 4];
    assert_eq!(client.read(other, handle, 0, &mut back), Ok(4));
    assert_eq!(&back, b"text");
    assert_eq!(client.open(other, file.node, 0), Err(Errno::ACCESS));
}

/// The attribute of a file that may only be appended to; taken away when this is dropped, so that the file can be removed.
struct AppendOnly(std::path::PathBuf);

impl AppendOnly {
    fn set(path: std::path::PathBuf) -> Option<Self> {
        let is_set = change_attribute("+a", &path);
        is_set.then_some(Self(path))
    }
}

impl Drop for AppendOnly {
    fn drop(&mut self) {
        change_attribute("-a", &self.0);
    }
}

fn change_attribute(change: &str, path: &Path) -> bool {
    let output = std::process::Command::new("chattr").arg(change).arg(path).output();
    output.is_ok_and(|output| output.status.success())
}

#[test]
fn a_file_that_may_only_be_appended_to_is_appended_to() {
    let folder = open_folder();
    std::fs::write(folder.path().join("log"), "old ").unwrap();
    let Some(_attribute) = AppendOnly::set(folder.path().join("log")) else {
        return byway_skip::skip_this(byway_skip::SkipReason::Machine(
            "needs root, chattr, and a file system that knows +a",
        ));
    };
    let (_server, client) = serve(folder.path(), Users::Squash(User { uid: 0, gid: 0, groups: vec![0] }));
    let log = client.look_up(ME, ROOT, b"log").unwrap();
    assert_eq!(client.open(ME, log.node, OFlags::WRONLY.bits()), Err(Errno::PERM), "as on the file system below");
    let handle = client.open(ME, log.node, (OFlags::WRONLY | OFlags::APPEND).bits()).unwrap();
    assert_eq!(client.append(ME, handle, b"new"), Ok(3));
    assert_eq!(std::fs::read(folder.path().join("log")).unwrap(), b"old new");
    client.close_handle(handle);
}
