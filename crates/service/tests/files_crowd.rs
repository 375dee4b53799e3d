//! 256 clients of one server: each does its share, also when the server is started again under all of them.

mod file_server;

use std::sync::Barrier;
use std::time::Duration;

use byway_service::file::Users;
use byway_service::file::client::{Caller, Client, ClientOptions, LockKind, LockRange, NamedIn, ROOT};
use file_server::{Server, share, tcp};
use rustix::fs::OFlags;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const ME: Caller<'static> = Caller { uid: 0, gid: 0, groups: &[] };
const CLIENTS: u64 = 256;
const RECORDS: u64 = 4;

/// Adds one to the number at the start of a file, under its lock.
fn count(client: &Client, handle: u64) {
    let range = LockRange { whole: true, owner: 1, pid: 1, start: 0, last: u64::MAX };
    client.lock(ME, handle, range, LockKind::Exclusive, true).unwrap();
    let mut number = [0; 8];
    client.read(ME, handle, 0, &mut number).unwrap();
    let next = u64::from_le_bytes(number) + 1;
    assert_eq!(client.write(ME, handle, 0, &next.to_le_bytes()), Ok(8));
    client.lock(ME, handle, range, LockKind::Unlock, false).unwrap();
}

#[test]
fn each_of_256_clients_does_its_share_over_a_restart() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let below = tempfile::tempdir().unwrap();
    std::fs::write(below.path().join("counter"), [0; 8]).unwrap();
    let shares = || vec![share(below.path(), Users::Owner, false)];
    let server = Server::start(tcp(), shares());
    let at = server.at.clone();
    let (half, restarted) = (Barrier::new(CLIENTS as usize + 1), Barrier::new(CLIENTS as usize + 1));
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let (at, half, restarted) = (at.clone(), &half, &restarted);
            scope.spawn(move || {
                let options = ClientOptions { lost_after: Duration::from_mins(1), ..ClientOptions::new(at, "share") };
                let client = Client::connect(options).unwrap();
                let counter = client.look_up(ME, ROOT, b"counter").unwrap().node;
                let counter = client.open(ME, counter, OFlags::RDWR.bits()).unwrap();
                let name = format!("file{number}");
                let (_, own) =
                    client.create(ME, NamedIn::new(ROOT, name.as_bytes()), OFlags::RDWR.bits(), 0o644).unwrap();
                for record in 0..RECORDS {
                    if record == RECORDS / 2 {
                        half.wait();
                        restarted.wait();
                    }
                    count(&client, counter);
                    assert_eq!(client.write(ME, own, record * 8, &number.to_le_bytes()), Ok(8));
                }
                client.close();
            });
        }
        half.wait();
        drop(server);
        let server = Server::start_with(at.clone(), shares(), Duration::from_secs(15), Duration::from_secs(15));
        restarted.wait();
        server
    });
    let counted = std::fs::read(below.path().join("counter")).unwrap();
    assert_eq!(counted, (CLIENTS * RECORDS).to_le_bytes());
    for number in 0..CLIENTS {
        let own = std::fs::read(below.path().join(format!("file{number}"))).unwrap();
        assert_eq!(own, number.to_le_bytes().repeat(RECORDS as usize));
    }
}
