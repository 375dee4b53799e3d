//! Sessions that are cut: calls whose answers are lost, files that were open, locks that were held.

mod cable;
mod file_server;

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use byway_reactor::{Address, Errno};
use byway_service::file::Users;
use byway_service::file::client::{Caller, Client, ClientOptions, LockKind, LockRange, NamedIn, ROOT};
use byway_service::file::wire::{NewAttributes, SET_MODIFIED_NOW, SET_SIZE};
use cable::Cable;
use file_server::{Server, share, tcp};
use rustix::fs::OFlags;
use zerocopy::FromZeros;

const ME: Caller<'static> = Caller { uid: 0, gid: 0, groups: &[] };
const MESSAGE_BYTES: usize = 128;
const LIMIT: Duration = Duration::from_secs(20);

fn connect(at: &Address) -> Client {
    Client::connect(ClientOptions { lost_after: LIMIT, ..ClientOptions::new(at.clone(), "share") }).unwrap()
}

fn until(what: &str, mut is: impl FnMut() -> bool) {
    let limit = Instant::now() + LIMIT;
    while !is() {
        assert!(Instant::now() < limit, "waited in vain for {what}");
        std::thread::yield_now();
    }
}

/// Has a call done whose answer does not arrive: the connection is cut once `is_done` sees what it has done.
fn lose_the_answer<T: Send>(cable: &Cable, call: impl FnOnce() -> T + Send, mut is_done: impl FnMut() -> bool) -> T {
    cable.deafen();
    std::thread::scope(|scope| {
        let called = scope.spawn(call);
        until("the call to be done", &mut is_done);
        assert!(!called.is_finished(), "its answer is lost");
        cable.cut();
        called.join().unwrap()
    })
}

#[test]
fn a_client_that_waits_for_no_server_has_it_back_too() {
    let below = tempfile::tempdir().unwrap();
    let server = Server::start(tcp(), vec![share(below.path(), Users::Owner, false)]);
    let cable = Cable::to(&server.at);
    let options = ClientOptions { lost_after: Duration::ZERO, ..ClientOptions::new(cable.at.clone(), "share") };
    let client = Client::connect(options).unwrap();
    cable.cut();
    until("its next session", || client.attributes(ME, ROOT, None).is_ok());
    assert_eq!(client.report().reconnects, 1);
}

fn len(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |metadata| metadata.len())
}

#[test]
fn a_change_whose_answer_is_lost_is_done_once() {
    let below = tempfile::tempdir().unwrap();
    let path = |name: &str| below.path().join(name);
    let there = |name: &str| std::fs::symlink_metadata(path(name)).is_ok();
    let server = Server::start(tcp(), vec![share(below.path(), Users::Owner, false)]);
    let cable = Cable::to(&server.at);
    let client = connect(&cable.at);
    let exclusive = (OFlags::RDWR | OFlags::EXCL).bits();

    let create = || client.create(ME, NamedIn::new(ROOT, b"file"), exclusive, 0o444).unwrap();
    let (file, handle) = lose_the_answer(&cable, create, || there("file"));
    // The open file is the one that was made: its rights would not let it be opened for writing again by anyone but root.
    let appended = lose_the_answer(&cable, || client.append(ME, handle, b"once"), || len(&path("file")) > 0);
    assert_eq!((appended, len(&path("file"))), (Ok(4), 4));
    let directory = lose_the_answer(&cable, || client.make_directory(ME, ROOT, b"d", 0o755).unwrap(), || there("d"));
    let link = || client.make_symlink(ME, ROOT, b"symlink", b"target").unwrap();
    let symlink = lose_the_answer(&cable, link, || there("symlink"));
    assert_eq!(client.read_link(ME, symlink.node).unwrap(), b"target");
    lose_the_answer(&cable, || client.make_node(ME, ROOT, b"fifo", 0o010_600).unwrap(), || there("fifo"));
    let linked = lose_the_answer(&cable, || client.link(ME, file.node, directory.node, b"l").unwrap(), || there("d/l"));
    assert_eq!(linked.node, file.node);
    let rename = || client.rename(ME, NamedIn::new(ROOT, b"file"), NamedIn::new(directory.node, b"moved"), 0).unwrap();
    lose_the_answer(&cable, rename, || there("d/moved"));
    let unlink = || client.unlink(ME, directory.node, b"l").unwrap();
    lose_the_answer(&cable, unlink, || !there("d/l"));
    lose_the_answer(&cable, || client.unlink(ME, ROOT, b"symlink").unwrap(), || !there("symlink"));
    assert_eq!(client.unlink(ME, ROOT, b"symlink"), Err(Errno::NOENT), "this is another call");

    // Truncated twice, it would lose what another client has written in between.
    let mut size = NewAttributes::new_zeroed();
    (size.which, size.size) = ((SET_SIZE | SET_MODIFIED_NOW).into(), 0.into());
    let truncate = || client.set_attributes(ME, file.node, Some(handle), &size).unwrap();
    let truncated = lose_the_answer(&cable, truncate, || len(&path("d/moved")) == 0);
    assert_eq!(truncated.size.get(), 0);

    lose_the_answer(&cable, || client.unlink(ME, directory.node, b"moved").unwrap(), || !there("d/moved"));
    assert_eq!(client.write(ME, handle, 0, b"still here"), Ok(10), "a removed file that is open");
    let remove = || client.remove_directory(ME, ROOT, b"d").unwrap();
    lose_the_answer(&cable, remove, || !there("d"));
}

/// Cuts at any moment: while a record is on its way, while the server gets it, before and after its answer.
#[test]
fn records_that_are_appended_under_cuts_are_there_once() {
    const RECORDS: u32 = 150;
    let below = tempfile::tempdir().unwrap();
    let server = Server::start(tcp(), vec![share(below.path(), Users::Owner, false)]);
    let cable = Cable::to(&server.at);
    let client = connect(&cable.at);
    let (_, handle) = client.create(ME, NamedIn::new(ROOT, b"log"), OFlags::WRONLY.bits(), 0o644).unwrap();
    let size = |record: u32| if record.is_multiple_of(3) { 100_000 } else { 16 };
    let done = AtomicU32::new(0);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for record in 0..RECORDS {
                let bytes = record.to_le_bytes().repeat(size(record) / 4);
                assert_eq!(client.append(ME, handle, &bytes), Ok(bytes.len()), "{record}");
                done.fetch_add(1, Ordering::Release);
            }
        });
        let mut moments = (0..3000).step_by(171).cycle();
        while !writer.is_finished() {
            // The client has a session then, and loses it somewhere in the next record or two.
            let before = done.load(Ordering::Acquire);
            until("the next record", || done.load(Ordering::Acquire) > before || writer.is_finished());
            std::thread::park_timeout(Duration::from_micros(moments.next().unwrap()));
            cable.cut();
        }
    });
    let log = std::fs::read(below.path().join("log")).unwrap();
    let expected: Vec<u8> = (0..RECORDS).flat_map(|record| record.to_le_bytes().repeat(size(record) / 4)).collect();
    assert!(log == expected, "{} bytes instead of {}", log.len(), expected.len());
}

/// A call that fails fails once, too: the second try would succeed.
#[test]
fn a_lost_error_is_the_answer() {
    let below = tempfile::tempdir().unwrap();
    let server = Server::start(tcp(), vec![share(below.path(), Users::Owner, false)]);
    let cable = Cable::to(&server.at);
    let (client, other) = (connect(&cable.at), connect(&server.at));
    other.make_directory(ME, ROOT, b"d", 0o755).unwrap();
    let has_answered = || {
        // A message's head is that long: the server has said no.
        let said = cable.swallowed() >= MESSAGE_BYTES;
        if said {
            std::fs::remove_dir(below.path().join("d")).unwrap();
        }
        said
    };
    let made = lose_the_answer(&cable, || client.make_directory(ME, ROOT, b"d", 0o755), has_answered);
    assert_eq!(made.unwrap_err(), Errno::EXIST);
    assert!(!below.path().join("d").exists());
}

fn whole(owner: u64) -> LockRange {
    LockRange { whole: true, owner, pid: 1, start: 0, last: u64::MAX }
}

fn open(client: &Client) -> u64 {
    let file = client.look_up(ME, ROOT, b"file").unwrap();
    client.open(ME, file.node, OFlags::RDWR.bits()).unwrap()
}

#[test]
fn a_lock_is_kept_while_its_client_is_away() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), "f").unwrap();
    let server = Server::start(tcp(), vec![share(below.path(), Users::Owner, false)]);
    let cable = Cable::to(&server.at);
    let (one, two) = (connect(&cable.at), connect(&server.at));
    let (first, second) = (open(&one), open(&two));
    let range = LockRange { whole: false, owner: 5, pid: 77, start: 10, last: 19 };
    one.lock(ME, first, whole(1), LockKind::Exclusive, false).unwrap();
    one.lock(ME, first, range, LockKind::Shared, false).unwrap();
    cable.unplug();
    for _ in 0..100 {
        assert_eq!(two.lock(ME, second, whole(1), LockKind::Exclusive, false), Err(Errno::AGAIN));
        assert_eq!(two.lock(ME, second, range, LockKind::Exclusive, false), Err(Errno::AGAIN));
    }
    cable.plug();
    assert_eq!(one.write(ME, first, 0, b"mine"), Ok(4));
    assert_eq!(two.lock(ME, second, whole(1), LockKind::Shared, false), Err(Errno::AGAIN));
    one.lock(ME, first, whole(1), LockKind::Unlock, false).unwrap();
    assert_eq!(two.lock(ME, second, whole(1), LockKind::Shared, false), Ok(()));
    // One that ends in order is not waited for.
    one.close();
    assert_eq!(two.lock(ME, second, range, LockKind::Exclusive, true), Ok(()));
}

#[test]
fn a_lock_that_others_had_meanwhile_is_lost_and_its_program_is_told() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), "f").unwrap();
    let shares = vec![share(below.path(), Users::Owner, false)];
    let server = Server::start_with(tcp(), shares, Duration::ZERO, Duration::from_millis(50));
    let cable = Cable::to(&server.at);
    let (one, two) = (connect(&cable.at), connect(&server.at));
    let (first, second) = (open(&one), open(&two));
    one.lock(ME, first, whole(1), LockKind::Exclusive, false).unwrap();
    cable.unplug();
    two.lock(ME, second, whole(1), LockKind::Exclusive, true).unwrap();
    two.write(ME, second, 0, b"theirs").unwrap();
    two.lock(ME, second, whole(1), LockKind::Unlock, false).unwrap();
    cable.plug();
    assert_eq!(one.write(ME, first, 0, b"mine"), Err(Errno::IO));
    assert_eq!(one.read(ME, first, 0, &mut [0; 4]), Err(Errno::IO), "until it is closed");
    assert_eq!(one.sync(ME, first, false), Err(Errno::IO));
    assert_eq!(std::fs::read(below.path().join("file")).unwrap(), b"theirs");
    one.close_handle(first);
    let again = open(&one);
    one.lock(ME, again, whole(1), LockKind::Exclusive, false).unwrap();
    assert_eq!(one.write(ME, again, 0, b"mine"), Ok(4));
}

#[test]
fn a_new_server_gives_locks_back_before_it_gives_others() {
    let (below, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(below.path().join("file"), "f").unwrap();
    let at = || Address::Unix(folder.path().join("socket"));
    let start = |grace| {
        let shares = vec![share(below.path(), Users::Owner, false)];
        Server::start_with(at(), shares, Duration::from_millis(grace), Duration::ZERO)
    };
    let server = start(0);
    let (one, two) = (connect(&at()), connect(&at()));
    let (first, second) = (open(&one), open(&two));
    let range = LockRange { whole: false, owner: 5, pid: 77, start: 10, last: 19 };
    one.lock(ME, first, range, LockKind::Exclusive, false).unwrap();
    drop(server);

    let server = start(1000);
    std::thread::scope(|scope| {
        // Asked for first, and not given: the grace time is for those who had locks.
        let wanted = scope.spawn(|| two.lock(ME, second, range, LockKind::Exclusive, false));
        one.renew();
        assert_eq!(wanted.join().unwrap(), Err(Errno::AGAIN));
    });
    assert_eq!(one.write(ME, first, 0, b"mine"), Ok(4));
    one.lock(ME, first, range, LockKind::Unlock, false).unwrap();
    assert_eq!(two.lock(ME, second, range, LockKind::Exclusive, false), Ok(()));
    drop(server);

    // One without a grace time may have given the lock to others.
    let _server = start(0);
    assert_eq!(one.write(ME, first, 0, b"mine"), Ok(4), "it has none any more");
    assert_eq!(two.write(ME, second, 0, b"mine"), Err(Errno::IO));
}

#[test]
fn where_a_part_of_a_files_locks_is_lost_the_rest_is_released() {
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("file"), "f").unwrap();
    let start = |at, grace| {
        let shares = vec![share(below.path(), Users::Owner, false)];
        Server::start_with(at, shares, Duration::from_millis(grace), Duration::ZERO)
    };
    let server = start(tcp(), 0);
    let at = server.at.clone();
    let cable = Cable::to(&at);
    let (one, two, three) = (connect(&at), connect(&cable.at), connect(&at));
    let (first, second, third) = (open(&one), open(&two), open(&three));
    let range = |start| LockRange { whole: false, owner: 5, pid: 77, start, last: start + 9 };
    one.lock(ME, first, range(0), LockKind::Exclusive, false).unwrap();
    // Both believe that they have the second range.
    two.lock(ME, second, range(20), LockKind::Exclusive, false).unwrap();
    cable.unplug();
    one.lock(ME, first, range(20), LockKind::Exclusive, true).unwrap();
    drop(server);
    let _server = start(at, 1000);
    cable.plug();
    two.renew();
    assert_eq!(two.write(ME, second, 0, b"theirs"), Ok(6));
    assert_eq!(one.write(ME, first, 0, b"mine"), Err(Errno::IO));
    assert_eq!(three.lock(ME, third, range(20), LockKind::Exclusive, false), Err(Errno::AGAIN));
    assert_eq!(three.lock(ME, third, range(0), LockKind::Exclusive, false), Ok(()), "nobody has it any more");
}
