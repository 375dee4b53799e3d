//! A server that is started again: what its clients had is kept for them, and nobody waits for what no client had.

mod cable;
mod file_server;

use std::fs::metadata;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use byway_reactor::privilege::User;
use byway_reactor::{Address, Errno};
use byway_service::file::client::{Caller, Client, ClientOptions, LockKind, LockRange, NamedIn, ROOT};
use byway_service::file::wire::{NewAttributes, SET_MODE};
use byway_service::file::{Share, Users};
use byway_service::limits::FILE_CLIENTS_LISTED_MAX;
use cable::Cable;
use file_server::{Server, exclusive, share, tcp};
use rustix::fs::OFlags;
use zerocopy::FromZeros;

const ME: Caller<'static> = Caller { uid: 0, gid: 0, groups: &[] };
const LIMIT: Duration = Duration::from_secs(20);
/// Longer than any call waits.
const LONG: Duration = Duration::from_mins(10);
const STATE: &str = ".byway-state";

fn connect(at: &Address) -> Arc<Client> {
    let client = Client::connect(ClientOptions { lost_after: LIMIT, ..ClientOptions::new(at.clone(), "share") });
    Arc::new(client.unwrap())
}

/// A new server process, which waits so long for clients of the one before.
fn restart(server: Server, shares: Vec<Arc<Share>>, grace: Duration) -> Server {
    let at = server.at.clone();
    drop(server);
    Server::start_with(at, shares, grace, LONG)
}

fn open(client: &Client) -> u64 {
    let file = client.look_up(ME, ROOT, b"file").unwrap();
    client.open(ME, file.node, OFlags::RDWR.bits()).unwrap()
}

fn whole() -> LockRange {
    LockRange { whole: true, owner: 1, pid: 1, start: 0, last: u64::MAX }
}

fn until(what: &str, mut is: impl FnMut() -> bool) {
    let limit = Instant::now() + LIMIT;
    while !is() {
        assert!(Instant::now() < limit, "waited in vain for {what}");
        std::thread::yield_now();
    }
}

fn mode(path: &Path) -> u32 {
    metadata(path).unwrap().permissions().mode() & 0o777
}

fn chmod(client: &Client, mode: u32) {
    let file = client.look_up(ME, ROOT, b"file").unwrap();
    let mut new = NewAttributes::new_zeroed();
    (new.which, new.mode) = (SET_MODE.into(), mode.into());
    client.set_attributes(ME, file.node, None, &new).unwrap();
}

/// A server that ends in an orderly way has received none of these calls, or has dropped them.
#[test]
fn changes_that_a_server_that_ends_has_not_begun_are_made_by_the_next_one() {
    let below = tempfile::tempdir().unwrap();
    for name in ["file", "old", "unneeded"] {
        std::fs::write(below.path().join(name), "f").unwrap();
    }
    let shares = || vec![share(below.path(), Users::Owner, false)];
    let server = Server::start(tcp(), shares());
    let at = server.at.clone();
    let client = connect(&at);
    // No thread drives its node: the server does not wait for its close for long.
    let _idle = connect(&at);
    let handle = open(&client);
    std::thread::scope(|scope| {
        let held = server.hold();
        let before = client.messages();
        let made = scope.spawn(|| client.make_directory(ME, ROOT, b"made", 0o755).map(|_| ()));
        let renamed = scope.spawn(|| client.rename(ME, NamedIn::new(ROOT, b"old"), NamedIn::new(ROOT, b"new"), 0));
        let removed = scope.spawn(|| client.unlink(ME, ROOT, b"unneeded"));
        let appended = scope.spawn(|| client.append(ME, handle, b"ile").map(|_| ()));
        until("the calls to be on their way", || client.messages() == before + 4);
        server.drain();
        drop(held);
        server.drained();
        let _next = Server::start_with(at, shares(), Duration::ZERO, LONG);
        for change in [made, renamed, removed, appended] {
            assert_eq!(change.join().unwrap(), Ok(()));
        }
    });
    assert!(below.path().join("made").is_dir() && below.path().join("new").is_file());
    assert!(!below.path().join("old").exists() && !below.path().join("unneeded").exists());
    assert_eq!(std::fs::read(below.path().join("file")).unwrap(), b"file");
}

fn listed(below: &Path) -> usize {
    std::fs::read_dir(below.join(STATE)).map_or(0, Iterator::count)
}

#[test]
fn nobody_waits_where_no_client_had_anything() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), "f").unwrap();
    let shares = || vec![exclusive(below.path())];
    let server = Server::start(tcp(), shares());
    let client = connect(&server.at);
    let handle = open(&client);
    let _server = restart(server, shares(), LONG);
    assert_eq!(client.lock(ME, handle, whole(), LockKind::Exclusive, false), Ok(()));
    chmod(&client, 0o640);
}

#[test]
fn new_locks_wait_for_those_who_had_some_and_not_longer() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), "f").unwrap();
    let shares = || vec![share(below.path(), Users::Owner, false)];
    let server = Server::start(tcp(), shares());
    let (one, two) = (connect(&server.at), connect(&server.at));
    let (first, second) = (open(&one), open(&two));
    one.lock(ME, first, whole(), LockKind::Exclusive, false).unwrap();
    let server = restart(server, shares(), LONG);
    std::thread::scope(|scope| {
        let wanted = scope.spawn(|| two.lock(ME, second, whole(), LockKind::Exclusive, false));
        one.renew();
        assert_eq!(wanted.join().unwrap(), Err(Errno::AGAIN), "one has it still");
    });
    // In the grace time it would get none.
    one.lock(ME, first, whole(), LockKind::Unlock, false).unwrap();
    assert_eq!(two.lock(ME, second, whole(), LockKind::Exclusive, false), Ok(()));
    // Clients that have gone are on no list.
    let three = connect(&server.at);
    let third = open(&three);
    one.close();
    two.close();
    until("both to be taken off the list", || listed(below.path()) == 0);
    let _server = restart(server, shares(), LONG);
    assert_eq!(three.lock(ME, third, whole(), LockKind::Exclusive, false), Ok(()));
}

#[test]
fn a_client_that_does_not_come_back_is_waited_for_once() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), "f").unwrap();
    let shares = || vec![share(below.path(), Users::Owner, false)];
    let server = Server::start(tcp(), shares());
    let cable = Cable::to(&server.at);
    let (one, two) = (connect(&cable.at), connect(&server.at));
    let (first, second) = (open(&one), open(&two));
    one.lock(ME, first, whole(), LockKind::Exclusive, false).unwrap();
    cable.unplug();
    let server = restart(server, shares(), Duration::from_millis(300));
    assert_eq!(two.lock(ME, second, whole(), LockKind::Exclusive, false), Ok(()), "when the grace time is over");
    two.close();
    until("both to be taken off the list", || listed(below.path()) == 0);
    let three = connect(&server.at);
    let third = open(&three);
    let _server = restart(server, shares(), LONG);
    assert_eq!(three.lock(ME, third, whole(), LockKind::Exclusive, false), Ok(()));
}

/// The client has heard nothing of the restart, and believes what it has cached.
#[test]
fn a_change_waits_for_leases_of_the_process_before() {
    let below = tempfile::tempdir().unwrap();
    let path = below.path().join("file");
    std::fs::write(&path, "f").unwrap();
    let shares = || vec![exclusive(below.path())];
    let server = Server::start(tcp(), shares());
    let cable = Cable::to(&server.at);
    let (one, two) = (connect(&cable.at), connect(&server.at));
    one.keep_caches(None).unwrap();
    chmod(&two, 0o640);
    let node = one.look_up(ME, ROOT, b"file").unwrap().node;
    until("a lease", || listed(below.path()) == 1);
    cable.unplug();
    let server = restart(server, shares(), LONG);
    std::thread::scope(|scope| {
        let changing = scope.spawn(|| chmod(&two, 0o600));
        let before = server.answered();
        // The client asks again and again.
        until("answers", || server.answered() > before + 8 || changing.is_finished());
        assert_eq!(mode(&path), 0o640, "one may still believe that");
        cable.plug();
        changing.join().unwrap();
    });
    assert_eq!(one.attributes(ME, node, None).unwrap().mode.get() & 0o777, 0o600);
    one.close();
}

#[test]
fn a_client_with_leases_is_listed_before_its_first_lock_after_a_restart() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), "f").unwrap();
    let shares = || vec![exclusive(below.path())];
    let server = Server::start(tcp(), shares());
    let cable = Cable::to(&server.at);
    let (one, two) = (connect(&cable.at), connect(&server.at));
    let (first, second) = (open(&one), open(&two));
    one.keep_caches(None).unwrap();
    until("a lease", || listed(below.path()) == 1);
    let server = restart(server, shares(), LONG);
    one.lock(ME, first, whole(), LockKind::Exclusive, false).unwrap();
    cable.unplug();
    let server = restart(server, shares(), LONG);
    std::thread::scope(|scope| {
        let wanted = scope.spawn(|| two.lock(ME, second, whole(), LockKind::Exclusive, false));
        let before = server.answered();
        // The client asks again and again.
        until("answers", || server.answered() > before + 8 || wanted.is_finished());
        cable.plug();
        one.renew();
        assert_eq!(wanted.join().unwrap(), Err(Errno::AGAIN), "one has it still");
    });
    one.close();
}

#[test]
fn a_list_that_is_too_long_is_cleaned_after_the_grace_time() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), "f").unwrap();
    std::fs::create_dir(below.path().join(STATE)).unwrap();
    for client in 0..=FILE_CLIENTS_LISTED_MAX {
        std::fs::write(below.path().join(STATE).join(format!("locks-{client:032x}")), "").unwrap();
    }
    let shares = || vec![share(below.path(), Users::Owner, false)];
    let server = Server::start_with(tcp(), shares(), Duration::from_millis(300), LONG);
    let (one, two) = (connect(&server.at), connect(&server.at));
    let (first, second) = (open(&one), open(&two));
    one.lock(ME, first, whole(), LockKind::Exclusive, false).unwrap();
    until("one alone to be on the list", || listed(below.path()) == 1);
    let _server = restart(server, shares(), LONG);
    one.renew();
    assert_eq!(two.lock(ME, second, whole(), LockKind::Exclusive, false), Err(Errno::AGAIN), "one has it still");
}

/// As git makes its objects, and install(1) its files.
#[test]
fn the_owner_of_an_open_file_goes_on_after_a_restart_whatever_its_mode_is_by_now() {
    if !rustix::process::geteuid().is_root() {
        return byway_skip::skip_this(byway_skip::SkipReason::Machine("not root, who alone can act as other users"));
    }
    let below = tempfile::tempdir().unwrap();
    let set_mode = |name: &str, mode| {
        std::fs::set_permissions(below.path().join(name), PermissionsExt::from_mode(mode)).unwrap();
    };
    set_mode("", 0o777);
    std::fs::write(below.path().join("theirs"), "roots").unwrap();
    set_mode("theirs", 0o666);
    let user = || Users::Squash(User { uid: 4711, gid: 4711, groups: vec![4711] });
    let shares = || vec![share(below.path(), user(), false)];
    let server = Server::start(tcp(), shares());
    let client = connect(&server.at);
    let flags = (OFlags::RDWR | OFlags::EXCL).bits();
    let make = |name: &str, mode| client.create(ME, NamedIn::new(ROOT, name.as_bytes()), flags, mode).unwrap();
    let (object, object_handle) = make("object", 0o444);
    let (_, changed) = make("file", 0o644);
    set_mode("file", 0);
    let (_, removed) = make("removed", 0o400);
    client.unlink(ME, ROOT, b"removed").unwrap();
    let (hidden, _) = make("hidden", 0o600);
    let reader = client.open(ME, hidden.node, OFlags::RDONLY.bits()).unwrap();
    set_mode("hidden", 0);
    let (theirs, their_handle) = open_of(&client, "theirs");
    set_mode("theirs", 0o644);
    client.make_directory(ME, ROOT, b"folder", 0o755).unwrap();
    let folder = client.look_up(ME, ROOT, b"folder").unwrap().node;
    let listing = client.open_directory(ME, folder).unwrap();
    set_mode("folder", 0o300);

    let server = restart(server, shares(), LONG);
    for handle in [object_handle, changed, removed] {
        assert_eq!(client.write(ME, handle, 0, b"blob"), Ok(4));
        assert_eq!(text(&client, handle).as_deref(), Ok("blob"));
    }
    assert!(client.read_directory(ME, listing, 0, 4096, false).is_ok());
    assert_eq!(client.write(ME, their_handle, 0, b"mine"), Err(Errno::ACCESS), "it is another user's");
    let writes = OFlags::RDWR.bits();
    assert_eq!(client.open(ME, object.node, writes).err(), Some(Errno::ACCESS), "it was not open with that");
    assert_eq!(client.open(ME, theirs, writes).err(), Some(Errno::ACCESS));
    assert_eq!(std::fs::read(below.path().join("theirs")).unwrap(), b"roots");
    let _server = restart(server, vec![share(below.path(), user(), true)], LONG);
    assert_eq!(text(&client, reader), Err(Errno::ACCESS), "here the owner may not change the mode");
}

/// Links to removed files.
fn kept(below: &Path) -> usize {
    let names = std::fs::read_dir(below.join(STATE)).into_iter().flatten();
    names.filter(|entry| entry.as_ref().unwrap().file_name().as_encoded_bytes().starts_with(b"removed-")).count()
}

fn open_of(client: &Client, name: &str) -> (u64, u64) {
    let node = client.look_up(ME, ROOT, name.as_bytes()).unwrap().node;
    (node, client.open(ME, node, OFlags::RDWR.bits()).unwrap())
}

fn text(client: &Client, handle: u64) -> Result<String, Errno> {
    let mut bytes = [0; 64];
    let count = client.read(ME, handle, 0, &mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes[..count]).into_owned())
}

#[test]
fn removed_files_that_are_open_outlive_the_server() {
    let below = tempfile::tempdir().unwrap();
    for name in ["mine", "theirs", "replaced", "closed"] {
        std::fs::write(below.path().join(name), name).unwrap();
    }
    let shares = || vec![share(below.path(), Users::Owner, false)];
    let server = Server::start(tcp(), shares());
    let (one, two) = (connect(&server.at), connect(&server.at));
    let files = ["mine", "theirs", "replaced", "closed"].map(|name| open_of(&one, name));
    let made = one.create(ME, NamedIn::new(ROOT, b"made"), OFlags::RDWR.bits(), 0o600).unwrap();
    one.lock(ME, files[0].1, whole(), LockKind::Exclusive, false).unwrap();
    one.unlink(ME, ROOT, b"mine").unwrap();
    two.unlink(ME, ROOT, b"theirs").unwrap();
    std::fs::write(below.path().join("new"), "new").unwrap();
    two.rename(ME, NamedIn::new(ROOT, b"new"), NamedIn::new(ROOT, b"replaced"), 0).unwrap();
    one.unlink(ME, ROOT, b"closed").unwrap();
    one.unlink(ME, ROOT, b"made").unwrap();
    let unnamed = one.create_unnamed(ME, ROOT, OFlags::RDWR.bits(), 0o600).unwrap();
    assert_eq!(one.write(ME, unnamed.1, 0, b"unnamed"), Ok(7));
    assert_eq!(kept(below.path()), 6);

    let server = restart(server, shares(), LONG);
    // Closed while the server was away, for all that it knows.
    one.close_handle(files[3].1);
    one.forget(files[3].0, 1);
    for ((_, handle), name) in files.iter().zip(["mine", "theirs", "replaced"]) {
        assert_eq!(text(&one, *handle).as_deref(), Ok(name));
        assert_eq!(one.write(ME, *handle, 0, b"MINE"), Ok(4));
    }
    assert_eq!(one.write(ME, made.1, 0, b"made"), Ok(4));
    assert_eq!(
        one.attributes(ME, files[1].0, Some(files[1].1)).map(|known| known.links.get()),
        Ok(0),
        "the link is not seen"
    );
    assert_eq!(one.look_up(ME, ROOT, b"mine").err(), Some(Errno::NOENT));
    until("what was closed to go", || kept(below.path()) == 5);

    // And the next one.
    let server = restart(server, shares(), LONG);
    assert_eq!(text(&one, files[1].1).as_deref(), Ok("MINErs"));
    assert_eq!(text(&one, made.1).as_deref(), Ok("made"));
    assert_eq!(text(&one, unnamed.1).as_deref(), Ok("unnamed"));
    // It gets a name after all.
    one.link(ME, unnamed.0.node, ROOT, b"named").unwrap();
    assert_eq!(one.lock(ME, files[0].1, whole(), LockKind::Exclusive, false), Ok(()), "it is had still");
    for (node, handle) in files[..3].iter().chain(&[(made.0.node, made.1), (unnamed.0.node, unnamed.1)]) {
        one.close_handle(*handle);
        // Some were found by more than one call.
        one.forget(*node, 9);
    }
    until("all to go", || kept(below.path()) == 0);
    let read = |name: &str| std::fs::read_to_string(below.path().join(name)).unwrap();
    assert_eq!((read("replaced"), read("named")), ("new".to_owned(), "unnamed".to_owned()));
    drop(server);
}

#[test]
fn removed_files_of_a_client_that_does_not_come_back_go_after_the_grace_time() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), "f").unwrap();
    let shares = || vec![share(below.path(), Users::Owner, false)];
    let server = Server::start(tcp(), shares());
    let cable = Cable::to(&server.at);
    let one = connect(&cable.at);
    let handle = open(&one);
    one.unlink(ME, ROOT, b"file").unwrap();
    cable.unplug();
    let server = restart(server, shares(), Duration::from_millis(300));
    until("the grace time to end", || kept(below.path()) == 0);
    cable.plug();
    assert_eq!(text(&one, handle), Err(Errno::STALE), "lost, and said so");
    drop(server);
}

#[test]
fn a_file_is_kept_only_where_its_name_goes() {
    let below = tempfile::tempdir().unwrap();
    for name in ["file", "other"] {
        std::fs::write(below.path().join(name), name).unwrap();
    }
    let server = Server::start(tcp(), vec![share(below.path(), Users::Owner, false)]);
    let (one, two) = (connect(&server.at), connect(&server.at));
    let (_, handle) = open_of(&one, "file");
    two.unlink(ME, ROOT, b"other").unwrap();
    assert!(!below.path().join(STATE).exists(), "nobody has it open");
    assert_eq!(two.remove_directory(ME, ROOT, b"file").err(), Some(Errno::NOTDIR));
    assert_eq!(two.unlink(ME, ROOT, b"file/").err(), Some(Errno::INVAL));
    two.make_directory(ME, ROOT, b"directory", 0o755).unwrap();
    assert_eq!(
        two.rename(ME, NamedIn::new(ROOT, b"directory"), NamedIn::new(ROOT, b"file"), 0).err(),
        Some(Errno::NOTDIR)
    );
    until("the link of a name that stays to go", || kept(below.path()) == 0);
    assert_eq!(text(&one, handle).as_deref(), Ok("file"));
    two.unlink(ME, ROOT, b"file").unwrap();
    assert_eq!(kept(below.path()), 1);
    one.close();
    until("the client's end", || kept(below.path()) == 0);
}

#[test]
fn the_list_is_no_file_of_the_share() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), "f").unwrap();
    let server = Server::start(tcp(), vec![share(below.path(), Users::Owner, false)]);
    let client = connect(&server.at);
    let handle = open(&client);
    client.lock(ME, handle, whole(), LockKind::Exclusive, false).unwrap();
    assert_eq!(listed(below.path()), 1);
    let name = STATE.as_bytes();
    assert_eq!(client.look_up(ME, ROOT, name).err(), Some(Errno::PERM));
    assert_eq!(client.make_directory(ME, ROOT, name, 0o755).err(), Some(Errno::PERM));
    assert_eq!(client.remove_directory(ME, ROOT, name).err(), Some(Errno::PERM));
    assert_eq!(client.rename(ME, NamedIn::new(ROOT, name), NamedIn::new(ROOT, b"mine"), 0).err(), Some(Errno::PERM));
    assert_eq!(client.rename(ME, NamedIn::new(ROOT, b"file"), NamedIn::new(ROOT, name), 0).err(), Some(Errno::PERM));
    let root = client.open_directory(ME, ROOT).unwrap();
    for nodes in [false, true] {
        let names = client.read_directory(ME, root, 0, 4096, nodes).unwrap();
        assert!(names.iter().all(|one| one.name != name), "it is not listed");
        assert!(names.iter().any(|one| one.name == b"file"));
    }
}
