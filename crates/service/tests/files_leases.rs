//! Clients with caches: what is known is not asked for again, and what another client changes is seen at once.

mod cable;
mod file_server;

use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use byway_reactor::Errno;
use byway_service::file::client::leases::{Invalid, Leases, OpenMode};
use byway_service::file::client::{
    Caller, Client, ClientOptions, Found, KernelCache, LockKind, LockRange, NamedIn, ROOT, SuspendError,
};
use byway_service::file::wire::{NewAttributes, SET_SIZE};
use byway_service::limits::{FILE_ATTRIBUTES_LATE_MAX, FILE_LEASE_TIME};
use cable::Cable;
use file_server::{Server, exclusive, tcp};
use zerocopy::FromZeros;

const ME: Caller<'static> = Caller { uid: 0, gid: 0, groups: &[] };

/// A client that takes leases; it is closed with this.
struct Cached(Arc<Client>);

impl Cached {
    fn connect(server: &Server) -> Self {
        Self::connect_for(server, None)
    }

    fn connect_for(server: &Server, kernel: Option<Arc<dyn KernelCache>>) -> Self {
        let client = Arc::new(Client::connect(ClientOptions::new(server.at.clone(), "share")).unwrap());
        client.keep_caches(kernel).unwrap();
        Self(client)
    }

    fn size(&self, node: u64) -> u64 {
        self.0.attributes(ME, node, None).unwrap().size.get()
    }

    fn resize(&self, node: u64, size: u64) {
        let mut new = NewAttributes::new_zeroed();
        (new.which, new.size) = (SET_SIZE.into(), size.into());
        self.0.set_attributes(ME, node, None, &new).unwrap();
    }

    fn find(&self, name: &[u8]) -> Result<u64, Errno> {
        self.0.look_up(ME, ROOT, name).map(|found| found.node)
    }
}

impl Drop for Cached {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Calls until no message is needed: leases come once the client's call for recalls has reached the server.
fn until_cached(server: &Server, call: impl Fn()) {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        call();
        let before = server.answered();
        call();
        if server.answered() == before {
            return;
        }
        assert!(Instant::now() < end, "nothing is cached");
    }
}

#[test]
fn what_is_known_is_not_asked_for_again_until_another_client_changes_it() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), b"12345").unwrap();
    let server = Server::start(tcp(), vec![exclusive(below.path())]);
    let (one, two) = (Cached::connect(&server), Cached::connect(&server));
    let file = one.find(b"file").unwrap();
    until_cached(&server, || assert_eq!((one.find(b"file"), one.size(file)), (Ok(file), 5)));
    until_cached(&server, || assert_eq!(one.find(b"missing"), Err(Errno::NOENT)));
    let before = server.answered();
    for _ in 0..100 {
        assert_eq!((one.find(b"file"), one.size(file)), (Ok(file), 5));
        assert_eq!(one.find(b"missing"), Err(Errno::NOENT));
    }
    assert_eq!(server.answered(), before, "no message");

    let same = two.find(b"file").unwrap();
    for size in 100..120 {
        two.resize(same, size);
        assert_eq!(one.size(file), size, "changed by the other");
        one.resize(file, size + 1000);
        assert_eq!((one.size(file), two.size(same)), (size + 1000, size + 1000));
    }
    for _ in 0..20 {
        two.0.link(ME, same, ROOT, b"missing").unwrap();
        assert_eq!(one.find(b"missing"), Ok(file), "made by the other");
        assert_eq!(one.0.attributes(ME, file, None).unwrap().links.get(), 2);
        one.0.rename(ME, NamedIn::new(ROOT, b"missing"), NamedIn::new(ROOT, b"moved"), 0).unwrap();
        assert_eq!((two.find(b"missing"), two.find(b"moved")), (Err(Errno::NOENT), Ok(same)));
        two.0.unlink(ME, ROOT, b"moved").unwrap();
        assert_eq!((one.find(b"moved"), one.find(b"missing")), (Err(Errno::NOENT), Err(Errno::NOENT)));
        assert_eq!(one.0.attributes(ME, file, None).unwrap().links.get(), 1);
    }
}

#[test]
fn a_listing_brings_leases_on_its_entries() {
    let below = tempfile::tempdir().unwrap();
    std::fs::create_dir(below.path().join("folder")).unwrap();
    for number in 0..100 {
        std::fs::write(below.path().join(format!("folder/{number}")), b"12345").unwrap();
    }
    let server = Server::start(tcp(), vec![exclusive(below.path())]);
    let (one, two) = (Cached::connect(&server), Cached::connect(&server));
    let folder = one.find(b"folder").unwrap();
    until_cached(&server, || assert!(one.0.attributes(ME, folder, None).is_ok()));
    let handle = one.0.open_directory(ME, folder).unwrap();
    let (mut listed, mut cookie) = (Vec::new(), 0);
    loop {
        let part = one.0.read_directory(ME, handle, cookie, 16 << 10, true).unwrap();
        let Some(last) = part.last() else { break };
        cookie = last.cookie;
        listed.extend(part.into_iter().filter_map(|one| Some((one.name, one.node?))));
    }
    assert_eq!(listed.len(), 100);
    let before = server.answered();
    for (name, node) in &listed {
        assert_eq!(one.0.look_up(ME, folder, name).map(|found| found.node), Ok(*node));
        assert_eq!(one.size(*node), 5);
    }
    let answers = server.answered() - before;
    assert!(answers <= 2, "{answers} answers, which a renewal may have been");

    let (same_folder, (name, node)) = (two.find(b"folder").unwrap(), &listed[7]);
    two.resize(two.0.look_up(ME, same_folder, name).unwrap().node, 70);
    assert_eq!(one.size(*node), 70, "changed by the other");
    two.0.unlink(ME, same_folder, name).unwrap();
    assert_eq!(one.0.look_up(ME, folder, name), Err(Errno::NOENT));
}

/// An access list with rights for one more user (`linux/posix_acl_xattr.h`): tags, rights, user.
fn access_list() -> Vec<u8> {
    let entry = |tag: u16, rights: u16, user: u32| {
        [&tag.to_le_bytes()[..], &rights.to_le_bytes(), &user.to_le_bytes()].concat()
    };
    let [owner, user, group, mask, others] = [1, 2, 4, 16, 32];
    let nobody = u32::MAX;
    let entries = [(owner, 6, nobody), (user, 4, 4711), (group, 4, nobody), (mask, 4, nobody), (others, 4, nobody)];
    let entries = entries.into_iter().flat_map(|(tag, rights, user)| entry(tag, rights, user));
    2_u32.to_le_bytes().into_iter().chain(entries).collect()
}

#[test]
fn a_listing_tells_which_files_have_no_extended_attributes() {
    let below = tempfile::tempdir().unwrap();
    std::fs::create_dir(below.path().join("folder")).unwrap();
    for name in ["plain", "other", "marked"] {
        std::fs::write(below.path().join("folder").join(name), b"12345").unwrap();
    }
    rustix::fs::setxattr(below.path().join("folder/marked"), c"user.mark", b"1", rustix::fs::XattrFlags::empty())
        .unwrap();
    let server = Server::start(tcp(), vec![exclusive(below.path())]);
    let (one, two) = (Cached::connect(&server), Cached::connect(&server));
    let folder = one.find(b"folder").unwrap();
    until_cached(&server, || assert!(one.0.attributes(ME, folder, None).is_ok()));
    let handle = one.0.open_directory(ME, folder).unwrap();
    let listed = one.0.read_directory(ME, handle, 0, 16 << 10, true).unwrap();
    let node = |name: &[u8]| listed.iter().find(|entry| entry.name == name).unwrap().node.unwrap();
    let (plain, other, marked) = (node(b"plain"), node(b"other"), node(b"marked"));
    let before = server.answered();
    // What `ls -l` and `cp -a` ask for.
    for file in [plain, other] {
        for name in [&b"security.selinux"[..], b"system.posix_acl_access"] {
            assert_eq!(one.0.get_xattr(ME, file, name), Err(Errno::NODATA));
        }
        assert_eq!(one.0.list_xattrs(ME, file), Ok(Vec::new()));
    }
    let answers = server.answered() - before;
    assert!(answers <= 2, "{answers} answers, which a renewal may have been");
    assert_eq!(one.0.list_xattrs(ME, marked), Ok(b"user.mark\0".to_vec()));
    // Who may not read a file is told so, and what lists leave out may be there.
    let before = server.answered();
    for name in [&b"user.mark"[..], b"trusted.mark", b"system.other"] {
        assert!(one.0.get_xattr(ME, plain, name).is_err());
    }
    assert!(server.answered() >= before + 3, "each was asked for");

    let (same_folder, list) = (two.find(b"folder").unwrap(), access_list());
    let same = two.0.look_up(ME, same_folder, b"plain").unwrap().node;
    two.0.set_xattr(ME, same, b"system.posix_acl_access", &list, 0).unwrap();
    assert_eq!(one.0.get_xattr(ME, plain, b"system.posix_acl_access"), Ok(list.clone()), "set by the other");
    one.0.set_xattr(ME, other, b"system.posix_acl_access", &list, 0).unwrap();
    assert_eq!(one.0.get_xattr(ME, other, b"system.posix_acl_access"), Ok(list), "set by itself");
}

#[test]
fn a_client_that_changes_a_file_goes_on_with_what_the_change_left() {
    const ACL: &[u8] = b"system.posix_acl_access";
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), b"12345").unwrap();
    let server = Server::start(tcp(), vec![exclusive(below.path())]);
    let (one, two) = (Cached::connect(&server), Cached::connect(&server));
    let file = one.find(b"file").unwrap();
    let handle = one.0.open(ME, file, 2).unwrap();
    until_cached(&server, || assert_eq!((one.size(file), one.0.get_xattr(ME, file, ACL)), (5, Err(Errno::NODATA))));
    let before = server.answered();
    for size in 10..60 {
        one.resize(file, size);
        assert_eq!(one.size(file), size, "the answer has said it");
        assert_eq!(one.0.get_xattr(ME, file, ACL), Err(Errno::NODATA));
    }
    let answers = server.answered() - before;
    assert!((50..=53).contains(&answers), "{answers} answers to 50 changes, beside renewals");
    // Also a large write, whose bytes do not go in the message.
    let mut end = 0;
    for bytes in [&b"longer than before, far"[..], &[1; 100_000]] {
        let before = server.answered();
        for offset in 0..50 {
            assert_eq!(one.0.write(ME, handle, 100 + offset, bytes), Ok(bytes.len()));
            assert_eq!(one.0.get_xattr(ME, file, ACL), Err(Errno::NODATA));
            end = end.max(100 + offset + bytes.len() as u64);
            assert_eq!(one.size(file), end, "the answer has said it");
        }
        let answers = server.answered() - before;
        assert!((50..=53).contains(&answers), "{answers} answers to 50 writes, beside renewals");
    }
    // What another client does in between is seen.
    let same = two.find(b"file").unwrap();
    two.0.set_xattr(ME, same, ACL, &access_list(), 0).unwrap();
    one.resize(file, 7);
    assert_eq!(one.0.get_xattr(ME, file, ACL), Ok(access_list()));
    assert_eq!(two.size(same), 7);
}

#[test]
fn a_client_that_changes_a_name_goes_on_with_what_it_knows_of_the_others() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), b"12345").unwrap();
    let server = Server::start(tcp(), vec![exclusive(below.path())]);
    let (one, two) = (Cached::connect(&server), Cached::connect(&server));
    let in_new =
        |client: &Cached, directory, name: &[u8]| client.0.look_up(ME, directory, name).map(|found| found.node);
    let look = || {
        assert!(one.find(b"file").is_ok() && one.0.attributes(ME, ROOT, None).is_ok());
        assert_eq!(one.find(b"Missing"), Err(Errno::NOENT));
    };
    until_cached(&server, look);

    let before = server.answered();
    let directory = one.0.make_directory(ME, ROOT, b"directory", 0o755).unwrap().node;
    look();
    assert_eq!(one.find(b"directory"), Ok(directory));
    let links = u64::from(one.0.attributes(ME, ROOT, None).unwrap().links.get());
    assert_eq!(links, below.path().metadata().unwrap().nlink(), "as after the change");
    let mut files = Vec::new();
    for name in [&b"first"[..], b"2", b"third"] {
        assert_eq!(in_new(&one, directory, name), Err(Errno::NOENT), "a new directory is empty");
        let create = rustix::fs::OFlags::WRONLY.bits();
        let (found, handle) = one.0.create(ME, NamedIn::new(directory, name), create, 0o644).unwrap();
        one.0.close_handle(handle);
        files.push((name, found.node));
    }
    one.0.unlink(ME, directory, b"2").unwrap();
    assert_eq!(in_new(&one, directory, b"2"), Err(Errno::NOENT));
    let answers = server.answered() - before;
    assert!(answers <= 9, "{answers} answers: to 5 changes, 3 closes, and perhaps a renewal");
    for (name, node) in [files[0], files[2]] {
        assert_eq!(in_new(&one, directory, name), Ok(node));
    }

    // What another client changes is seen all the same.
    let same = two.find(b"directory").unwrap();
    let (_, handle) = two.0.create(ME, NamedIn::new(same, b"fourth"), 1, 0o644).unwrap();
    two.0.close_handle(handle);
    assert!(in_new(&one, directory, b"fourth").is_ok());
    two.0.unlink(ME, same, b"first").unwrap();
    assert_eq!(in_new(&one, directory, b"first"), Err(Errno::NOENT));
    two.0.make_directory(ME, ROOT, b"Missing", 0o755).unwrap();
    assert!(one.find(b"Missing").is_ok());
}

/// The files of a program that unpacks an archive.
#[test]
fn a_client_that_makes_a_file_goes_on_with_what_the_answer_says() {
    const CAPABILITY: &[u8] = b"security.capability";
    const NEW: u32 = rustix::fs::OFlags::WRONLY.union(rustix::fs::OFlags::TRUNC).bits();
    let below = tempfile::tempdir().unwrap();
    let server = Server::start(tcp(), vec![exclusive(below.path())]);
    let (one, two) = (Cached::connect(&server), Cached::connect(&server));
    until_cached(&server, || assert_eq!(one.find(b"file"), Err(Errno::NOENT)));
    let before = server.answered();
    let make = |name: &str| {
        let (found, handle) = one.0.create(ME, NamedIn::new(ROOT, name.as_bytes()), NEW, 0o644).unwrap();
        let file = found.node;
        assert_eq!((one.find(name.as_bytes()), one.size(file)), (Ok(file), 0));
        assert_eq!(one.0.get_xattr(ME, file, CAPABILITY), Err(Errno::NODATA));
        assert_eq!(one.0.write(ME, handle, 0, b"12345"), Ok(5));
        assert_eq!(one.0.get_xattr(ME, file, CAPABILITY), Err(Errno::NODATA));
        assert_eq!((one.find(name.as_bytes()), one.size(file)), (Ok(file), 5));
        (file, handle)
    };
    let (file, handle) = make("file");
    for number in 1..20 {
        one.0.close_handle(make(&format!("file{number}")).1);
    }
    let answers = server.answered() - before;
    assert!((59..=62).contains(&answers), "{answers} answers: to 20 makings and writes, 19 closes, and renewals");

    // Create without O_TRUNC opens an existing file and leaves its contents and attributes.
    let other = two.find(b"file7").unwrap();
    let there = one.0.create(ME, NamedIn::new(ROOT, b"file7"), 1, 0o644).unwrap();
    assert_eq!((one.size(there.0.node), one.0.get_xattr(ME, there.0.node, CAPABILITY)), (5, Err(Errno::NODATA)));
    two.0.set_xattr(ME, other, b"system.posix_acl_access", &access_list(), 0).unwrap();
    two.resize(other, 8);
    let again = one.0.create(ME, NamedIn::new(ROOT, b"file7"), 1, 0o644).unwrap();
    assert_eq!((again.0.node, one.size(again.0.node)), (there.0.node, 8));
    assert_eq!(one.0.get_xattr(ME, again.0.node, b"system.posix_acl_access"), Ok(access_list()));
    one.0.close_handle(there.1);
    one.0.close_handle(again.1);

    // Create with O_TRUNC of an existing file empties it; the file keeps its extended attributes.
    let same = two.find(b"file").unwrap();
    two.0.set_xattr(ME, same, b"system.posix_acl_access", &access_list(), 0).unwrap();
    let (there, again) = one.0.create(ME, NamedIn::new(ROOT, b"file"), NEW, 0o644).unwrap();
    assert_eq!((there.node, one.size(file), two.size(same)), (file, 0, 0));
    assert_eq!(one.0.get_xattr(ME, file, b"system.posix_acl_access"), Ok(access_list()));
    two.resize(same, 9);
    assert_eq!(one.size(file), 9, "changed by the other");
    one.0.close_handle(handle);
    one.0.close_handle(again);
}

#[test]
fn the_end_of_a_listing_is_said_with_its_last_entries_and_once() {
    let below = tempfile::tempdir().unwrap();
    for number in 0..400 {
        std::fs::write(below.path().join(format!("a-file-with-a-long-name-{number}")), b"").unwrap();
    }
    let server = Server::start(tcp(), vec![exclusive(below.path())]);
    let one = Cached::connect(&server);
    let handle = one.0.open_directory(ME, ROOT).unwrap();
    let read = |cookie| one.0.read_directory(ME, handle, cookie, usize::MAX, false).unwrap();
    let list = || {
        let (mut names, mut cookie, mut parts) = (std::collections::BTreeSet::new(), 0, 0);
        loop {
            let part = read(cookie);
            let Some(last) = part.last() else { return (names, cookie, parts) };
            (cookie, parts) = (last.cookie, parts + 1);
            names.extend(part.into_iter().map(|listed| listed.name).filter(|name| !name.starts_with(b".")));
        }
    };
    until_cached(&server, || assert!(one.0.attributes(ME, ROOT, None).is_ok()));
    let (before, mut all_parts, mut end) = (server.answered(), 0, 0);
    for _ in 0..20 {
        let (names, last, parts) = list();
        assert!(names.len() == 400 && parts > 1);
        (all_parts, end) = (all_parts + parts, last);
    }
    let answers = server.answered() - before;
    assert!((all_parts..=all_parts + 3).contains(&answers), "{answers} answers to {all_parts} parts, beside renewals");
    // A program that goes on, or begins again, asks the server.
    let before = server.answered();
    assert_eq!(read(end), Vec::new());
    assert!(server.answered() > before);
    std::fs::remove_file(below.path().join("a-file-with-a-long-name-7")).unwrap();
    assert_eq!(list().0.len(), 399);
}

/// Such a name may have other spellings: what the client knows of the directory counts no more.
#[test]
fn after_a_name_beyond_ascii_a_client_asks_again() {
    let below = tempfile::tempdir().unwrap();
    let server = Server::start(tcp(), vec![exclusive(below.path())]);
    let one = Cached::connect(&server);
    until_cached(&server, || assert_eq!(one.find(b"missing"), Err(Errno::NOENT)));
    one.0.make_directory(ME, ROOT, "\u{e9}".as_bytes(), 0o755).unwrap();
    let before = server.answered();
    assert_eq!(one.find(b"missing"), Err(Errno::NOENT));
    assert!(server.answered() > before, "it was asked");
}

#[test]
fn a_client_that_removes_or_moves_what_it_knows_is_asked_to_return_no_lease() {
    let below = tempfile::tempdir().unwrap();
    for name in ["removed", "moved", "replaced", "another"] {
        std::fs::write(below.path().join(name), name).unwrap();
    }
    std::fs::create_dir(below.path().join("folder")).unwrap();
    let server = Server::start(tcp(), vec![exclusive(below.path())]);
    let (one, two) = (Cached::connect(&server), Cached::connect(&server));
    let names: [&[u8]; 4] = [b"removed", b"moved", b"replaced", b"folder"];
    let look = |client: &Cached| names.iter().for_each(|name| _ = client.find(name).unwrap());
    until_cached(&server, || look(&one));

    let before = server.answered();
    one.0.unlink(ME, ROOT, b"removed").unwrap();
    one.0.remove_directory(ME, ROOT, b"folder").unwrap();
    one.0.rename(ME, NamedIn::new(ROOT, b"moved"), NamedIn::new(ROOT, b"replaced"), 0).unwrap();
    let answers = server.answered() - before;
    assert!(answers <= 4, "{answers} answers: three, and perhaps a renewal's; three more would have recalled leases");
    assert_eq!((one.find(b"removed"), one.find(b"moved")), (Err(Errno::NOENT), Err(Errno::NOENT)));

    // Of a file that has taken the name meanwhile, the lease is recalled, from this client and from others.
    let replaced = one.find(b"replaced").unwrap();
    until_cached(&server, || assert!(one.find(b"another").is_ok() && one.size(replaced) == 5));
    two.0.rename(ME, NamedIn::new(ROOT, b"another"), NamedIn::new(ROOT, b"replaced"), 0).unwrap();
    until_cached(&server, || assert_eq!(one.find(b"replaced").map(|node| one.size(node)), Ok(7)));
    assert_eq!(one.find(b"another"), Err(Errno::NOENT));
    one.0.unlink(ME, ROOT, b"replaced").unwrap();
    assert_eq!(two.find(b"replaced"), Err(Errno::NOENT));
}

/// What a kernel was told to drop.
#[derive(Debug, Default)]
struct FakeKernel {
    told: Mutex<Vec<(u64, &'static str)>>,
    /// So many times it does not know the node yet.
    unknown: AtomicUsize,
}

impl FakeKernel {
    fn take(&self) -> Vec<(u64, &'static str)> {
        std::mem::take(&mut self.told.lock().unwrap())
    }
}

impl KernelCache for FakeKernel {
    fn drop_attributes(&self, node: u64) -> bool {
        if self.unknown.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
            return false;
        }
        self.told.lock().unwrap().push((node, "attributes"));
        true
    }

    fn drop_pages(&self, node: u64) -> bool {
        self.told.lock().unwrap().push((node, "pages"));
        true
    }

    fn drop_pages_soon(&self, node: u64) {
        self.told.lock().unwrap().push((node, "pages soon"));
    }
}

/// A share of `file`, which has 5 bytes, and a client of it with a kernel.
struct Mount {
    _below: tempfile::TempDir,
    server: Server,
    kernel: Arc<FakeKernel>,
    one: Cached,
}

impl Mount {
    fn new() -> Self {
        let below = tempfile::tempdir().unwrap();
        std::fs::write(below.path().join("file"), b"12345").unwrap();
        let server = Server::start(tcp(), vec![exclusive(below.path())]);
        let kernel = Arc::new(FakeKernel::default());
        let one = Cached::connect_for(&server, Some(Arc::clone(&kernel) as Arc<dyn KernelCache>));
        Self { _below: below, server, kernel, one }
    }
}

#[test]
fn a_kernel_drops_what_it_has_before_a_change_is_done() {
    let Mount { _below, server, kernel, one } = Mount::new();
    let two = Cached::connect(&server);
    let (file, same) = (one.find(b"file").unwrap(), two.find(b"file").unwrap());
    let known = || Found { node: file, attributes: one.0.attributes(ME, file, None).unwrap() };
    let valid = || one.0.believed(&known()).1;
    until_cached(&server, || _ = valid());
    assert!(valid() > Duration::ZERO && valid() < FILE_LEASE_TIME, "not longer than the lease");

    two.resize(same, 7);
    assert_eq!(kernel.take(), [(file, "attributes")], "a change of another client");
    until_cached(&server, || _ = valid());
    one.resize(file, 8);
    assert_eq!(kernel.take(), [(file, "attributes")], "a change of its own");

    // Now it has pages, too.
    until_cached(&server, || _ = valid());
    let read = one.0.begin_page_read(file);
    assert!(one.0.end_page_read(file, read));
    two.resize(same, 9);
    assert_eq!(kernel.take(), [(file, "pages")]);

    // A user who was seen to be allowed opens without a message; before the file goes, the server has opened it.
    until_cached(&server, || {
        valid();
        one.0.close_handle(one.0.open_for_kernel(ME, file, 0).unwrap().0);
    });
    let (handle, _) = one.0.open_for_kernel(ME, file, 0).unwrap();
    two.0.unlink(ME, ROOT, b"file").unwrap();
    let mut bytes = [1; 16];
    assert_eq!(one.0.read(ME, handle, 0, &mut bytes), Ok(9));
    assert_eq!(bytes[..9], *b"12345\0\0\0\0");
}

#[test]
fn a_short_file_comes_with_the_call_that_opens_it_unless_it_changes_before_it_is_read() {
    let Mount { _below, server, kernel: _kernel, one } = Mount::new();
    let two = Cached::connect(&server);
    let (file, same) = (one.find(b"file").unwrap(), two.find(b"file").unwrap());
    until_cached(&server, || _ = one.size(file));
    let open = || one.0.open_for_kernel(ME, file, 0).unwrap().0;
    let came = |handle, offset, len| one.0.take_opened_bytes(file, handle, offset, len);

    let handle = open();
    assert_eq!(came(handle, 0, 4096).as_deref(), Some(&b"12345"[..]));
    assert_eq!(came(handle, 0, 4096), None, "once");
    one.0.close_handle(handle);

    // After a change the user's right is not known, and the next open asks the server.
    two.resize(same, 4);
    assert_eq!(one.size(file), 4);
    let handle = open();
    assert_eq!(came(handle, 1, 2).as_deref(), Some(&b"23"[..]));
    one.0.close_handle(handle);

    two.resize(same, 5);
    assert_eq!(one.size(file), 5);
    let handle = open();
    two.resize(same, 3);
    assert_eq!(one.size(file), 3, "a lease is held again");
    assert_eq!(came(handle, 0, 4096), None, "another client has changed it");
    one.0.close_handle(handle);

    let handle = open();
    one.resize(file, 2);
    assert_eq!(one.size(file), 2);
    assert_eq!(came(handle, 0, 4096), None, "this client has changed it");
    one.0.close_handle(handle);
}

#[test]
fn pages_of_a_mapped_file_go_with_a_change_of_the_own_mount_and_come_back_under_a_lease() {
    let Mount { _below, server, kernel, one } = Mount::new();
    let two = Cached::connect(&server);
    let (file, same) = (one.find(b"file").unwrap(), two.find(b"file").unwrap());
    until_cached(&server, || _ = one.size(file));
    let (handle, mode) = one.0.open_for_kernel(ME, file, 0).unwrap();
    assert!(matches!(mode, OpenMode::Cached { .. }));
    let fault = || one.0.end_page_read(file, one.0.begin_page_read(file));
    assert!(fault());

    one.resize(file, 6);
    assert_eq!(kernel.take(), [(file, "pages soon")], "the lease has gone with the change");
    one.0.drop_mapped_pages(file);
    assert_eq!(kernel.take(), [(file, "pages")]);
    assert!(fault(), "a lease is held again");
    two.resize(same, 7);
    assert_eq!(kernel.take(), [(file, "pages")], "recalled from the mapping");
    assert!(!fault(), "read without a lease");
    one.0.drop_mapped_pages(file);
    assert_eq!(kernel.take(), [(file, "pages")]);
    assert!(fault(), "and under one from now on");
    one.0.close_handle(handle);

    // A file that is opened past the cache, because others change it, may be mapped as well.
    two.resize(same, 8);
    one.size(file);
    let (handle, mode) = one.0.open_for_kernel(ME, file, 0).unwrap();
    assert_eq!(mode, OpenMode::Direct);
    fault();
    kernel.take();
    one.resize(file, 9);
    assert!(kernel.take().contains(&(file, "pages soon")));
    one.0.close_handle(handle);
}

#[test]
fn attributes_that_the_kernel_takes_late_are_invalidated() {
    let Mount { _below, server: _server, kernel, one } = Mount::new();
    let file = one.find(b"file").unwrap();
    drop(one.0.giving(Some(file)));
    assert_eq!(kernel.take(), [], "in time");
    let (begun, giving) = (Instant::now(), one.0.giving(Some(file)));
    while begun.elapsed() <= FILE_ATTRIBUTES_LATE_MAX {
        std::thread::park_timeout(FILE_ATTRIBUTES_LATE_MAX / 4);
    }
    drop(giving);
    assert_eq!(kernel.take(), [(file, "attributes")]);
}

#[test]
fn a_session_ends_also_for_nodes_that_the_kernel_is_about_to_put_in() {
    let Mount { _below, server, kernel, one } = Mount::new();
    let file = one.find(b"file").unwrap();
    let known = || Found { node: file, attributes: one.0.attributes(ME, file, None).unwrap() };
    until_cached(&server, || _ = one.0.believed(&known()));
    kernel.unknown.store(2, Ordering::Relaxed);
    drop(server);
    let end = Instant::now() + Duration::from_secs(20);
    while kernel.take() != [(file, "attributes")] {
        assert!(Instant::now() < end, "the kernel goes on using attributes of the ended session");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

/// As for a mount that was stopped before it answered its kernel, which then counts from a later time.
#[test]
fn the_end_of_a_session_drops_attributes_whatever_the_time_is() {
    let begin = byway_reactor::Instant::from_nanos(1_000_000_000);
    let mut leases = Leases::default();
    leases.begin_session(1);
    leases.answered(1, begin, begin);
    let ticket = leases.ask(5);
    leases.learn(ticket, 5, Some(1), Some("attributes"), begin);
    assert!(leases.believed(5, begin).is_some());
    assert!(leases.remaining(begin + FILE_LEASE_TIME).is_zero());
    assert_eq!(leases.end_session(), [(5, Invalid::Attributes)]);
    assert_eq!(leases.end_session(), [], "once");
}

#[test]
fn a_holder_of_locks_asks_the_server_though_it_has_a_cache() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), b"12345").unwrap();
    let server = Server::start(tcp(), vec![exclusive(below.path())]);
    let one = Cached::connect(&server);
    let handle = one.0.open(ME, one.find(b"file").unwrap(), 2).unwrap();
    let range = LockRange { whole: true, owner: 1, pid: 1, start: 0, last: u64::MAX };
    one.0.lock(ME, handle, range, LockKind::Exclusive, false).unwrap();
    until_cached(&server, || _ = one.size(ROOT));
    let before = server.answered();
    for _ in 0..100 {
        one.0.renew();
    }
    // The server may not have counted the last yet.
    assert!(server.answered() >= before + 99, "an answer of the cache tells nothing of the server");
}

#[test]
fn a_client_that_ends_in_order_leaves_nothing_to_wait_for() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), b"12345").unwrap();
    let server = Server::start(tcp(), vec![exclusive(below.path())]);
    let (one, two) = (Cached::connect(&server), Cached::connect(&server));
    until_cached(&server, || _ = one.find(b"file").unwrap());
    drop(one);
    let file = two.find(b"file").unwrap();
    let begun = Instant::now();
    two.resize(file, 7);
    assert!(begun.elapsed() < byway_service::limits::FILE_LEASE_TIME / 2, "waited for the lease's end");
}

#[test]
fn a_client_that_was_refused_leases_asks_again_in_its_next_session() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), b"12345").unwrap();
    let server = Server::start(tcp(), vec![exclusive(below.path())]);
    // The server cannot put its client on the list of those with leases.
    let in_the_way = below.path().join(".byway-state");
    std::fs::write(&in_the_way, "").unwrap();
    let cable = Cable::to(&server.at);
    let options = ClientOptions::new(cable.at.clone(), "share");
    let one = Cached(Arc::new(Client::connect(options).unwrap()));
    let before = server.answered();
    one.0.keep_caches(None).unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while server.answered() == before {
        assert!(Instant::now() < end, "no answer to the call for recalls");
        std::thread::yield_now();
    }
    let before = server.answered();
    for _ in 0..100 {
        one.find(b"file").unwrap();
    }
    // The server may not have counted the last yet.
    assert!(server.answered() >= before + 99, "nothing is cached");
    std::fs::remove_file(&in_the_way).unwrap();
    cable.cut();
    until_cached(&server, || _ = one.find(b"file").unwrap());
}

#[test]
fn a_client_whose_server_does_not_answer_is_not_suspended_and_goes_on() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), b"12345").unwrap();
    let server = Server::start(tcp(), vec![exclusive(below.path())]);
    let cable = Cable::to(&server.at);
    let one = Cached(Arc::new(Client::connect(ClientOptions::new(cable.at.clone(), "share")).unwrap()));
    one.0.keep_caches(None).unwrap();
    let file = one.find(b"file").unwrap();
    let open = || one.0.open_for_kernel(ME, file, 0).unwrap().0;
    until_cached(&server, || {
        one.size(file);
        one.0.close_handle(open());
    });
    // Opened without a message: the server has to open them before another process goes on.
    let handles = [open(), open()];
    cable.deafen();
    let suspended = one.0.suspend(Duration::from_millis(200));
    assert!(matches!(suspended, Err(SuspendError::Late)), "{suspended:?}");
    cable.cut();
    one.0.resume();
    for handle in handles {
        let mut bytes = [1; 16];
        assert_eq!((one.0.read(ME, handle, 0, &mut bytes), &bytes[..5]), (Ok(5), &b"12345"[..]));
    }
    assert!(one.0.suspend(Duration::from_secs(20)).is_ok());
}

#[test]
fn files_that_were_opened_without_the_server_are_opened_before_a_suspend_though_a_session_ends() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), b"12345").unwrap();
    let server = Server::start(tcp(), vec![exclusive(below.path())]);
    let cable = Cable::to(&server.at);
    let one = Cached(Arc::new(Client::connect(ClientOptions::new(cable.at.clone(), "share")).unwrap()));
    one.0.keep_caches(None).unwrap();
    let file = one.find(b"file").unwrap();
    let open = || one.0.open_for_kernel(ME, file, 0).unwrap().0;
    until_cached(&server, || {
        one.size(file);
        one.0.close_handle(open());
    });
    let handles = [open(), open()];
    cable.deafen();
    let before = one.0.messages();
    std::thread::scope(|scope| {
        let suspending = scope.spawn(|| one.0.suspend(Duration::from_secs(20)));
        let end = Instant::now() + Duration::from_secs(20);
        while one.0.messages() == before {
            assert!(Instant::now() < end, "no file is opened");
            std::thread::yield_now();
        }
        // The call that is under way is lost.
        cable.cut();
        assert!(suspending.join().unwrap().is_ok());
    });
    std::fs::remove_file(below.path().join("file")).unwrap();
    one.0.resume();
    for handle in handles {
        let mut bytes = [1; 16];
        assert_eq!((one.0.read(ME, handle, 0, &mut bytes), &bytes[..5]), (Ok(5), &b"12345"[..]));
    }
}

/// Counts what a writer has begun and done, so that a reader knows what it may see.
#[derive(Default)]
struct Progress {
    begun: AtomicU64,
    done: AtomicU64,
}

fn long() -> Duration {
    Duration::from_secs(if std::env::var_os("BYWAY_LONG").is_some() { 600 } else { 3 })
}

/// The file that has one of two names: it may be renamed between the two looks.
fn either(client: &Cached, names: &[Vec<u8>; 2]) -> u64 {
    loop {
        if let Some(node) = names.iter().find_map(|name| client.find(name).ok()) {
            return node;
        }
    }
}

#[test]
fn two_clients_that_change_and_look_see_no_old_state() {
    const FILES: usize = 3;
    let below = tempfile::tempdir().unwrap();
    for file in 0..FILES {
        std::fs::write(below.path().join(format!("file{file}")), b"").unwrap();
    }
    let server = Server::start(tcp(), vec![exclusive(below.path())]);
    let clients = [Cached::connect(&server), Cached::connect(&server)];
    let progress: [Progress; FILES] = Default::default();
    let stop = AtomicBool::new(false);
    let names: [[Vec<u8>; 2]; FILES] =
        std::array::from_fn(|file| [format!("file{file}").into_bytes(), format!("other{file}").into_bytes()]);
    let seen = AtomicU64::new(0);
    std::thread::scope(|scope| {
        // Each change renames and resizes: change n leaves size 2n and name n % 2.
        for file in 0..FILES {
            let (client, progress, stop, names) = (&clients[file % 2], &progress[file], &stop, &names[file]);
            scope.spawn(move || {
                let node = client.find(&names[0]).unwrap();
                for change in 1u64.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    progress.begun.store(change, Ordering::SeqCst);
                    client.resize(node, change);
                    let (from, to) = (&names[(change as usize + 1) % 2], &names[change as usize % 2]);
                    client.0.rename(ME, NamedIn::new(ROOT, from), NamedIn::new(ROOT, to), 0).unwrap();
                    progress.done.store(change, Ordering::SeqCst);
                    // So that the others have something to keep.
                    std::thread::park_timeout(Duration::from_millis(change % 3));
                }
            });
        }
        for client in &clients {
            let (progress, stop, names, seen) = (&progress, &stop, &names, &seen);
            scope.spawn(move || {
                let nodes: Vec<u64> = names.iter().map(|both| either(client, both)).collect();
                while !stop.load(Ordering::Relaxed) {
                    for file in 0..FILES {
                        let done = progress[file].done.load(Ordering::SeqCst);
                        let size = client.size(nodes[file]);
                        let begun = progress[file].begun.load(Ordering::SeqCst);
                        assert!((done..=begun).contains(&size), "file {file}: {size}, after {done} and before {begun}");

                        let done = progress[file].done.load(Ordering::SeqCst);
                        let found = [client.find(&names[file][0]), client.find(&names[file][1])];
                        let begun = progress[file].begun.load(Ordering::SeqCst);
                        if done == begun {
                            let expected = usize::from(!done.is_multiple_of(2));
                            assert_eq!(found[expected], Ok(nodes[file]), "file {file} after change {done}");
                            assert_eq!(found[1 - expected], Err(Errno::NOENT), "file {file} after change {done}");
                            seen.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
        let end = Instant::now() + long();
        while Instant::now() < end {
            std::thread::park_timeout(end - Instant::now());
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(seen.load(Ordering::Relaxed) > 10, "the readers found quiet moments");
    let calls = progress.iter().map(|one| one.done.load(Ordering::Relaxed)).sum::<u64>();
    assert!(calls > 10, "the writers got on: {calls}");
}
