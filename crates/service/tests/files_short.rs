//! Writes that a file takes in part. Limits this process's files, so it is a program of its own.

mod file_server;

use byway_reactor::ignore_file_size_signal;
use byway_service::file::Users;
use byway_service::file::client::{Caller, Client, ClientOptions, NamedIn, ROOT};
use file_server::{Server, share, tcp};
use rustix::fs::OFlags;
use rustix::process::{Resource, Rlimit, setrlimit};

const ME: Caller<'static> = Caller { uid: 0, gid: 0, groups: &[] };

/// Bytes that a file may have.
const ROOM: usize = 600 << 10;

#[test]
fn what_a_full_file_took_of_a_write_is_answered() {
    ignore_file_size_signal();
    // On a disk, where the loop's ring writes, and in memory, where the loop does.
    for folder in [tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap()] {
        let server = Server::start(tcp(), vec![share(folder.path(), Users::Owner, false)]);
        let client = Client::connect(ClientOptions::new(server.at.clone(), "share")).unwrap();
        let create = |name: &str| {
            let flags = OFlags::RDWR.bits();
            client.create(ME, NamedIn::new(ROOT, name.as_bytes()), flags, 0o644).unwrap().1
        };
        let (appended, written) = (create("appended"), create("written"));
        let bytes = vec![b'x'; 1 << 20];
        // Before the limit: buffers are files, too.
        assert_eq!(client.write(ME, written, 0, &bytes).unwrap(), bytes.len());
        let before = rustix::process::getrlimit(Resource::Fsize);
        setrlimit(Resource::Fsize, Rlimit { current: Some(ROOM as u64), maximum: before.maximum }).unwrap();
        let results = [client.append(ME, appended, &bytes), client.write(ME, written, 1000, &bytes)];
        setrlimit(Resource::Fsize, before).unwrap();
        assert_eq!(results, [Ok(ROOM), Ok(ROOM - 1000)], "{folder:?}");
        assert_eq!(std::fs::metadata(folder.path().join("appended")).unwrap().len(), ROOM as u64);
    }
}
