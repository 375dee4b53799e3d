//! More files than a server may hold. Limits this process's descriptors, so it is a program of its own.

mod file_server;

use std::sync::Arc;

use byway_reactor::Errno;
use byway_service::file::client::{Caller, Client, ClientOptions, NamedIn, ROOT, list};
use file_server::{Server, exclusive, tcp};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const ME: Caller<'static> = Caller { uid: 0, gid: 0, groups: &[] };
const DESCRIPTORS: u64 = 400;

#[test]
fn clients_leave_descriptors_for_connections() {
    let folder = tempfile::tempdir().unwrap();
    let names: Vec<_> = (0..DESCRIPTORS).map(|number| format!("file{number}")).collect();
    for name in &names {
        std::fs::write(folder.path().join(name), "").unwrap();
    }
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: Some(DESCRIPTORS), maximum }).unwrap();
    let server = Server::start(tcp(), vec![exclusive(folder.path())]);
    let connect = || Client::connect(ClientOptions::new(server.at.clone(), "share"));
    let (one, two) = (connect().unwrap(), Arc::new(connect().unwrap()));
    two.keep_caches(None).unwrap();
    let look_up = |client: &Client, name: &String| client.look_up(ME, ROOT, name.as_bytes());
    // One file again and again: a client gives up nodes that are not open when there is no room.
    let open = || look_up(&one, &names[0]).and_then(|found| one.open(ME, found.node, 0));
    let refused = (0..DESCRIPTORS).find_map(|_| open().err());
    assert_eq!(refused, Some(Errno::NFILE));
    let used = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    assert!((DESCRIPTORS / 2..DESCRIPTORS * 9 / 10).contains(&used), "{used}");
    // What cannot be held is not made.
    let flags = rustix::fs::OFlags::RDWR.bits();
    assert_eq!(one.create(ME, NamedIn::new(ROOT, b"new"), flags, 0o644).unwrap_err(), Errno::NFILE);
    assert_eq!(one.make_directory(ME, ROOT, b"new", 0o755).unwrap_err(), Errno::NFILE);
    assert_eq!(one.make_symlink(ME, ROOT, b"new", b"target").unwrap_err(), Errno::NFILE);
    assert!(!folder.path().join("new").exists() && !folder.path().join("new").is_symlink());
    // Another client's session is as before, but for new files; a third connects.
    assert_eq!(look_up(&two, &names[0]).unwrap_err(), Errno::NFILE);
    two.attributes(ME, ROOT, None).unwrap();
    let options = ClientOptions::new(server.at.clone(), "share");
    assert_eq!(list(&options.address, None).unwrap().len(), 1);
    drop(one);
    let found: Vec<_> = names.iter().map(|name| once_there_is_room(|| look_up(&two, name)).unwrap()).collect();
    // More than the server may hold: it has been told to forget some, which are found again by their names.
    let used = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    assert!(used < DESCRIPTORS * 9 / 10, "{used}");
    for (found, name) in found.iter().zip(&names) {
        let attributes = two.attributes(ME, found.node, None).unwrap();
        assert_eq!(attributes.ino, found.attributes.ino, "{name}");
    }
    // Several threads at once take the room from each other.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for (found, name) in found.iter().zip(&names) {
                    let handle = two.open(ME, found.node, 0).unwrap_or_else(|error| panic!("{name}: {error}"));
                    two.close_handle(handle);
                }
            });
        }
    });
    let another = two.open(ME, found[0].node, 0).unwrap();
    assert_eq!(two.read(ME, another, 0, &mut [0; 9]), Ok(0));
}

/// The end of a session frees what it held a moment later.
fn once_there_is_room<T>(mut look_up: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
    loop {
        match look_up() {
            Err(Errno::NFILE) if std::time::Instant::now() < until => std::thread::yield_now(),
            result => return result,
        }
    }
}
