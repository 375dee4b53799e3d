//! A share and its client: what a file system does, over each wire.

mod file_server;

use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use byway_reactor::privilege::User;
use byway_reactor::{Address, Errno};
use byway_service::file::Users;
use byway_service::file::client::{Caller, Client, ClientOptions, CopyRange, LockKind, LockRange, NamedIn, ROOT};
use byway_service::file::wire::{NewAttributes, SET_MODE, SET_MODIFIED, SET_SIZE};
use file_server::{Server, share, tcp};
use rustix::fs::OFlags;
use zerocopy::FromZeros;

const ME: Caller<'static> = Caller { uid: 0, gid: 0, groups: &[] };

fn connect(server: &Server) -> Client {
    let options =
        ClientOptions { lost_after: Duration::from_secs(20), ..ClientOptions::new(server.at.clone(), "share") };
    Client::connect(options).unwrap()
}

fn flags(flags: OFlags) -> u32 {
    flags.bits()
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| ((at + seed) % 251) as u8).collect()
}

/// Makes, fills, reads, lists, renames and removes, and compares with the directory below.
fn uses_a_tree(client: &Client, below: &Path) {
    let directory = client.make_directory(ME, ROOT, b"directory", 0o750).unwrap();
    let (file, handle) = client.create(ME, NamedIn::new(directory.node, b"file"), flags(OFlags::RDWR), 0o640).unwrap();
    let path = below.join("directory/file");
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
    for len in [0, 1, 16 << 10, (16 << 10) + 1, 100_000, 1 << 20, (1 << 20) + 4097] {
        let bytes = pattern(len, len);
        let mut done = 0;
        while done < len {
            done += client.write(ME, handle, done as u64, &bytes[done..]).unwrap();
        }
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "{len}");
        let mut back = vec![0; len + 100];
        assert_eq!(client.read(ME, handle, 0, &mut back).unwrap(), len);
        assert_eq!(back[..len], bytes);
        assert_eq!(client.read(ME, handle, len as u64, &mut back).unwrap(), 0, "behind the end");
        let attributes = client.attributes(ME, file.node, Some(handle)).unwrap();
        assert_eq!(attributes.size.get(), len as u64);
    }
    client.sync(ME, handle, true).unwrap();
    client.sync(ME, handle, false).unwrap();
    let mut new = NewAttributes::new_zeroed();
    (new.which, new.mode, new.size) = ((SET_MODE | SET_SIZE | SET_MODIFIED).into(), 0o600.into(), 5.into());
    (new.modified_s, new.modified_ns) = (1_000_000.into(), 7.into());
    let set = client.set_attributes(ME, file.node, None, &new).unwrap();
    assert_eq!((set.size.get(), set.modified_s.get(), set.modified_ns.get()), (5, 1_000_000, 7));
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);

    client.rename(ME, NamedIn::new(directory.node, b"file"), NamedIn::new(ROOT, b"moved"), 0).unwrap();
    assert_eq!(client.look_up(ME, ROOT, b"moved").unwrap().node, file.node);
    assert_eq!(client.look_up(ME, directory.node, b"file"), Err(Errno::NOENT));
    client.link(ME, file.node, directory.node, b"linked").unwrap();
    assert_eq!(std::fs::metadata(below.join("moved")).unwrap().nlink(), 2);
    let link = client.make_symlink(ME, ROOT, b"link", b"../../etc/passwd").unwrap();
    assert_eq!(client.read_link(ME, link.node).unwrap(), b"../../etc/passwd");
    client.make_node(ME, ROOT, b"fifo", 0o010_644).unwrap();
    assert!(std::fs::metadata(below.join("fifo")).unwrap().file_type().is_fifo());
    assert_eq!(client.make_node(ME, ROOT, b"device", 0o020_644), Err(Errno::PERM));
    let listed = list(client);
    assert_eq!(listed, ["directory", "fifo", "link", "moved"]);

    // What is removed while it is open stays usable.
    client.unlink(ME, ROOT, b"moved").unwrap();
    client.unlink(ME, directory.node, b"linked").unwrap();
    assert_eq!(client.write(ME, handle, 0, b"still").unwrap(), 5);
    assert_eq!(client.attributes(ME, file.node, None).unwrap().links.get(), 0);
    client.close_handle(handle);
    assert_eq!(client.read(ME, handle, 0, &mut [0; 4]), Err(Errno::STALE));
    client.forget(file.node, 3);
    assert_eq!(client.remove_directory(ME, ROOT, b"link"), Err(Errno::NOTDIR));
    client.remove_directory(ME, ROOT, b"directory").unwrap();
    client.unlink(ME, ROOT, b"link").unwrap();
    client.unlink(ME, ROOT, b"fifo").unwrap();
    assert!(list(client).is_empty());
    assert!(client.stat_file_system(ME, ROOT).unwrap().blocks.get() > 0);
}

fn list(client: &Client) -> Vec<String> {
    let handle = client.open_directory(ME, ROOT).unwrap();
    let (mut names, mut cookie) = (Vec::new(), 0);
    loop {
        let part = client.read_directory(ME, handle, cookie, 4096, names.len() % 2 == 0).unwrap();
        let Some(last) = part.last() else { break };
        cookie = last.cookie;
        names.extend(part.iter().map(|listed| String::from_utf8_lossy(&listed.name).into_owned()));
        for node in part.iter().filter_map(|listed| listed.node) {
            client.forget(node, 1);
        }
    }
    client.close_handle(handle);
    names.retain(|name| name != "." && name != "..");
    names.sort();
    names
}

#[test]
fn a_tree_is_made_and_removed_over_each_wire() {
    let folder = tempfile::tempdir().unwrap();
    for at in [tcp(), Address::Unix(folder.path().join("unix")), Address::Shared(folder.path().join("shm"))] {
        let below = tempfile::tempdir().unwrap();
        let server = Server::start(at, vec![share(below.path(), Users::Owner, false)]);
        uses_a_tree(&connect(&server), below.path());
    }
}

#[test]
fn a_long_listing_goes_on_where_it_stopped() {
    let below = tempfile::tempdir().unwrap();
    let expected: Vec<_> = (0..1000).map(|number| format!("a file with a rather long name {number:04}")).collect();
    for name in &expected {
        std::fs::write(below.path().join(name), name).unwrap();
    }
    let server = Server::start(tcp(), vec![share(below.path(), Users::Owner, false)]);
    assert_eq!(list(&connect(&server)), expected);
}

#[test]
fn two_clients_append_and_neither_overwrites_the_other() {
    const LINES: usize = 200;
    let below = tempfile::tempdir().unwrap();
    let server = Server::start(tcp(), vec![share(below.path(), Users::Owner, false)]);
    std::thread::scope(|scope| {
        for letter in [b'a', b'b'] {
            let client = connect(&server);
            scope.spawn(move || {
                let (_, handle) = client.create(ME, NamedIn::new(ROOT, b"log"), flags(OFlags::WRONLY), 0o644).unwrap();
                // Longer than a message, so that they are got from the client's window.
                for line in 0..LINES {
                    let len = if line % 10 == 0 { 20_000 } else { 80 };
                    assert_eq!(client.append(ME, handle, &vec![letter; len]).unwrap(), len);
                }
            });
        }
    });
    let log = std::fs::read(below.path().join("log")).unwrap();
    let count = |letter: u8| log.split(|byte| *byte != letter).map(<[u8]>::len).sum::<usize>();
    let expected = LINES / 10 * 20_000 + LINES * 9 / 10 * 80;
    assert_eq!((count(b'a'), count(b'b'), log.len()), (expected, expected, 2 * expected));
}

fn whole(owner: u64) -> LockRange {
    LockRange { whole: true, owner, pid: 1, start: 0, last: u64::MAX }
}

#[test]
fn locks_hold_across_clients_and_end_with_their_session() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), "f").unwrap();
    let server = Server::start(tcp(), vec![share(below.path(), Users::Owner, false)]);
    let (one, two) = (connect(&server), connect(&server));
    let open = |client: &Client| {
        let file = client.look_up(ME, ROOT, b"file").unwrap();
        client.open(ME, file.node, flags(OFlags::RDWR)).unwrap()
    };
    let (first, second) = (open(&one), open(&two));
    one.lock(ME, first, whole(1), LockKind::Exclusive, false).unwrap();
    assert_eq!(two.lock(ME, second, whole(1), LockKind::Shared, false), Err(Errno::AGAIN));
    let range = |start, last| LockRange { whole: false, owner: 5, pid: 77, start, last };
    two.lock(ME, second, range(10, 19), LockKind::Exclusive, false).unwrap();
    let found = one.test_lock(ME, first, range(0, u64::MAX), false).unwrap().unwrap();
    assert_eq!((found.start, found.last, found.exclusive, found.pid), (10, 19, true, 0));
    assert_eq!(one.test_lock(ME, first, range(20, 30), true).unwrap(), None);
    std::thread::scope(|scope| {
        // Whoever cancels may come before the wait: it is told until it has ended.
        let waiting = scope.spawn(|| one.lock(ME, first, range(0, 100), LockKind::Shared, true));
        while !waiting.is_finished() {
            one.cancel_lock(ME, first, range(0, 100)).unwrap();
        }
        assert_eq!(waiting.join().unwrap(), Err(Errno::INTR));
        // The end of the other client lets it in.
        let waiting = scope.spawn(|| two.lock(ME, second, whole(9), LockKind::Exclusive, true));
        one.close();
        assert_eq!(waiting.join().unwrap(), Ok(()));
    });
}

#[test]
fn a_restart_of_the_server_is_a_wait() {
    let (below, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let at = || Address::Unix(folder.path().join("socket"));
    let shares = || vec![share(below.path(), Users::Owner, false)];
    let server = Server::start(at(), shares());
    let client = connect(&server);
    let directory = client.make_directory(ME, ROOT, b"directory", 0o755).unwrap();
    let create = flags(OFlags::RDWR | OFlags::EXCL | OFlags::TRUNC);
    let (file, handle) = client.create(ME, NamedIn::new(directory.node, b"file"), create, 0o644).unwrap();
    client.write(ME, handle, 0, b"before").unwrap();
    client.sync(ME, handle, false).unwrap();
    drop(server);
    let server = Server::start(at(), shares());
    let mut back = [0; 6];
    assert_eq!(client.read(ME, handle, 0, &mut back).unwrap(), 6);
    assert_eq!(&back, b"before", "it was opened again, and not emptied");
    assert_eq!(client.look_up(ME, directory.node, b"file").unwrap().node, file.node);
    client.write(ME, handle, 0, b"behind").unwrap();
    drop(server);
    let server = Server::start(at(), shares());
    assert_eq!(client.sync(ME, handle, false), Err(Errno::IO), "what the first one had taken may be lost");
    assert_eq!(client.sync(ME, handle, false), Ok(()));
    std::fs::remove_file(below.path().join("directory/file")).unwrap();
    std::fs::write(below.path().join("directory/file"), "another").unwrap();
    drop(server);
    let _server = Server::start(at(), shares());
    assert_eq!(client.read(ME, handle, 0, &mut back), Err(Errno::STALE), "another file has its name");
}

#[test]
fn a_lost_server_fails_calls_and_comes_back() {
    let (below, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let at = || Address::Unix(folder.path().join("socket"));
    let server = Server::start(at(), vec![share(below.path(), Users::Owner, false)]);
    let options = ClientOptions { lost_after: Duration::from_millis(50), ..ClientOptions::new(at(), "share") };
    let client = Client::connect(options).unwrap();
    drop(server);
    assert_eq!(client.attributes(ME, ROOT, None), Err(Errno::IO));
    let _server = Server::start(at(), vec![share(below.path(), Users::Owner, false)]);
    client.attributes(ME, ROOT, None).unwrap();
}

#[test]
fn a_share_gives_the_rights_that_it_says() {
    if !rustix::process::geteuid().is_root() {
        byway_skip::skip_this(byway_skip::SkipReason::Machine("not root, who alone can act as other users"));
        return;
    }
    let below = tempfile::tempdir().unwrap();
    let path = below.path();
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o777)).unwrap();
    std::fs::write(path.join("secret"), "s").unwrap();
    std::fs::set_permissions(path.join("secret"), PermissionsExt::from_mode(0o600)).unwrap();
    let user = User { uid: 4711, gid: 4712, groups: vec![4712, 4713] };
    let server = Server::start(tcp(), vec![share(path, Users::Squash(user), false)]);
    let client = connect(&server);
    let secret = client.look_up(ME, ROOT, b"secret").unwrap();
    assert_eq!(client.open(ME, secret.node, 0), Err(Errno::ACCESS), "root of the client is that user here");
    client.create(ME, NamedIn::new(ROOT, b"squashed"), flags(OFlags::WRONLY), 0o644).unwrap();
    let made = std::fs::metadata(path.join("squashed")).unwrap();
    assert_eq!((made.uid(), made.gid()), (4711, 4712));
    drop(server);

    let server = Server::start(tcp(), vec![share(path, Users::TrustRoot, false)]);
    let client = connect(&server);
    let secret = client.look_up(ME, ROOT, b"secret").unwrap();
    let one = Caller { uid: 1000, gid: 1001, groups: &[] };
    let member = Caller { groups: &[5000], ..one };
    assert_eq!(client.open(one, secret.node, 0), Err(Errno::ACCESS));
    client.open(ME, secret.node, 0).unwrap();
    std::os::unix::fs::chown(path.join("secret"), Some(0), Some(5000)).unwrap();
    std::fs::set_permissions(path.join("secret"), PermissionsExt::from_mode(0o640)).unwrap();
    assert_eq!(client.access(one, secret.node, 4), Err(Errno::ACCESS));
    client.access(member, secret.node, 4).unwrap();
    client.open(member, secret.node, 0).unwrap();
    client.make_directory(member, ROOT, b"theirs", 0o777).unwrap();
    let made = std::fs::metadata(path.join("theirs")).unwrap();
    assert_eq!((made.uid(), made.gid(), made.mode() & 0o777), (1000, 1001, 0o777), "no umask of the server's");
    let listed = client.make_directory(one, ROOT, b"listed", 0o400).unwrap();
    client.open_directory(one, listed.node).unwrap();
    assert_eq!(client.open_directory(Caller { uid: 1001, ..one }, listed.node), Err(Errno::ACCESS));
    assert_eq!(client.access(one, listed.node, 1), Err(Errno::ACCESS), "a list is no search");
    drop(server);

    let server = Server::start(tcp(), vec![share(path, Users::Owner, true)]);
    let client = connect(&server);
    assert_eq!(client.is_read_only(), Some(true));
    let secret = client.look_up(ME, ROOT, b"secret").unwrap();
    assert_eq!(client.open(ME, secret.node, flags(OFlags::RDWR)), Err(Errno::ROFS));
    assert_eq!(client.open(ME, secret.node, flags(OFlags::TRUNC)), Err(Errno::ROFS));
    assert_eq!(client.unlink(ME, ROOT, b"secret"), Err(Errno::ROFS));
    assert_eq!(client.make_directory(ME, ROOT, b"d", 0o755), Err(Errno::ROFS));
    client.open(ME, secret.node, 0).unwrap();
}

#[test]
fn holes_attributes_and_copies_are_the_file_systems() {
    let below = tempfile::tempdir().unwrap();
    let server = Server::start(tcp(), vec![share(below.path(), Users::Owner, false)]);
    let client = connect(&server);
    let (file, handle) = client.create(ME, NamedIn::new(ROOT, b"file"), flags(OFlags::RDWR), 0o644).unwrap();
    client.allocate(ME, handle, 0, 0, 1 << 20).unwrap();
    assert_eq!(client.attributes(ME, file.node, None).unwrap().size.get(), 1 << 20);
    let (_, sparse) = client.create(ME, NamedIn::new(ROOT, b"sparse"), flags(OFlags::RDWR), 0o644).unwrap();
    client.write(ME, sparse, 1 << 20, b"data").unwrap();
    assert_eq!(client.seek(ME, sparse, 0, 3).unwrap(), 1 << 20);
    assert_eq!(client.seek(ME, sparse, 1 << 20, 4).unwrap(), (1 << 20) + 4);
    assert_eq!(client.seek(ME, sparse, (1 << 20) + 4, 3), Err(Errno::NXIO));
    assert_eq!(
        client
            .copy_range(ME, CopyRange { from: sparse, from_offset: 1 << 20, to: handle, to_offset: 10, len: 100 })
            .unwrap(),
        4
    );
    let mut back = [0; 4];
    client.read(ME, handle, 10, &mut back).unwrap();
    assert_eq!(&back, b"data");
    let set = client.set_xattr(ME, file.node, b"user.colour", b"red", 0);
    if set == Err(Errno::OPNOTSUPP) {
        byway_skip::skip_part_of_this(byway_skip::SkipReason::Machine(
            "the temporary folder's file system has no user attributes",
        ));
        return;
    }
    set.unwrap();
    assert_eq!(client.get_xattr(ME, file.node, b"user.colour").unwrap(), b"red");
    assert_eq!(client.set_xattr(ME, file.node, b"user.colour", b"x", 1), Err(Errno::EXIST));
    assert!(client.list_xattrs(ME, file.node).unwrap().windows(12).any(|name| name == b"user.colour\0"));
    client.remove_xattr(ME, file.node, b"user.colour").unwrap();
    assert_eq!(client.get_xattr(ME, file.node, b"user.colour"), Err(Errno::NODATA));
    let (emptied, _) =
        client.create(ME, NamedIn::new(ROOT, b"file"), flags(OFlags::RDWR | OFlags::TRUNC), 0o644).unwrap();
    assert_eq!(emptied.attributes.size.get(), 0, "as it is now that it is open");
    let (unnamed, handle) = client.create_unnamed(ME, ROOT, flags(OFlags::RDWR), 0o600).unwrap();
    client.write(ME, handle, 0, b"now").unwrap();
    client.link(ME, unnamed.node, ROOT, b"named").unwrap();
    assert_eq!(std::fs::read(below.path().join("named")).unwrap(), b"now");
}

#[test]
fn a_sync_fails_after_a_restart_whatever_the_change_was() {
    let (below, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let at = || Address::Unix(folder.path().join("socket"));
    let start = || Server::start(at(), vec![share(below.path(), Users::Owner, false)]);
    let mut server = start();
    let client = connect(&server);
    let directory = client.open_directory(ME, ROOT).unwrap();
    let (file, handle) = client.create(ME, NamedIn::new(ROOT, b"file"), flags(OFlags::RDWR), 0o644).unwrap();
    let (other, second) = client.create(ME, NamedIn::new(ROOT, b"other"), flags(OFlags::RDWR), 0o644).unwrap();
    for handle in [directory, handle, second] {
        client.sync(ME, handle, false).unwrap();
    }
    let mut size = NewAttributes::new_zeroed();
    (size.which, size.size) = (SET_SIZE.into(), 70_000.into());
    let changes: [(&str, u64, &dyn Fn()); 6] = [
        ("rename", directory, &|| {
            client.rename(ME, NamedIn::new(ROOT, b"file"), NamedIn::new(ROOT, b"moved"), 0).unwrap();
        }),
        ("unlink", directory, &|| client.unlink(ME, ROOT, b"moved").unwrap()),
        ("allocate", second, &|| client.allocate(ME, second, 0, 0, 100_000).unwrap()),
        ("truncate", second, &|| assert!(client.set_attributes(ME, other.node, None, &size).is_ok())),
        ("copy", second, &|| {
            let range = CopyRange { from: second, from_offset: 0, to: second, to_offset: 8192, len: 4096 };
            assert_eq!(client.copy_range(ME, range), Ok(4096));
        }),
        ("large write", second, &|| assert_eq!(client.write(ME, second, 0, &pattern(100_000, 1)), Ok(100_000))),
    ];
    for (what, open, change) in changes {
        change();
        drop(server);
        server = start();
        // Another call finds the new server.
        assert!(client.attributes(ME, ROOT, None).is_ok());
        assert_eq!(client.sync(ME, open, true), Err(Errno::IO), "{what}");
        assert_eq!(client.sync(ME, open, true), Ok(()), "{what}, told once");
    }

    // Closed and forgotten, and opened again: the writes are the same.
    client.write(ME, second, 0, b"bytes").unwrap();
    client.close_handle(second);
    client.forget(other.node, 1);
    drop(server);
    let _server = start();
    let other = client.look_up(ME, ROOT, b"other").unwrap();
    let third = client.open(ME, other.node, flags(OFlags::RDWR)).unwrap();
    assert_eq!(client.sync(ME, third, false), Err(Errno::IO));
    assert_eq!(client.sync(ME, third, false), Ok(()));
    client.close_handle(handle);
    client.forget(file.node, 1);
}

#[test]
fn links_that_keep_a_removed_file_are_no_names_of_it() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("name"), "").unwrap();
    let server = Server::start(tcp(), vec![share(folder.path(), Users::Owner, false)]);
    let (one, two) = (connect(&server), connect(&server));
    let file = one.look_up(ME, ROOT, b"name").unwrap();
    one.link(ME, file.node, ROOT, b"other").unwrap();
    let handle = one.open(ME, file.node, flags(OFlags::RDONLY)).unwrap();
    one.unlink(ME, ROOT, b"name").unwrap();
    let below = std::fs::metadata(folder.path().join("other")).unwrap();
    assert_eq!(below.nlink(), 2, "the server has a link");
    let found = two.look_up(ME, ROOT, b"other").unwrap();
    assert_eq!(found.attributes.links.get(), 1);
    assert_eq!(two.attributes(ME, found.node, None).unwrap().links.get(), 1);
    one.close_handle(handle);
    for _ in 0..100 {
        // The link goes at some moment.
        assert_eq!(two.look_up(ME, ROOT, b"other").unwrap().attributes.links.get(), 1);
    }
}
