//! A server that is started again: what its clients had is kept for them, and nobody waits for what no client had.

mod cable;
mod file_server;

use std::fs::metadata;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use byway_reactor::{Address, Errno};
use byway_service::file::client::{Caller, Client, ClientOptions, LockKind, LockRange, ROOT};
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
    assert_eq!(client.rename(ME, (ROOT, name), (ROOT, b"mine"), 0).err(), Some(Errno::PERM));
    assert_eq!(client.rename(ME, (ROOT, b"file"), (ROOT, name), 0).err(), Some(Errno::PERM));
    let root = client.open_directory(ME, ROOT).unwrap();
    for nodes in [false, true] {
        let names = client.read_directory(ME, root, 0, 4096, nodes).unwrap();
        assert!(names.iter().all(|one| one.name != name), "it is not listed");
        assert!(names.iter().any(|one| one.name == b"file"));
    }
}
