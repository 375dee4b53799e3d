//! Syncs of clients that go, and of files and file systems that fail.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, LazyLock, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use byway_fabric::{Options, Registry};
use byway_reactor::{Address, Completion, IoChoice, Reactor, Token, Wait};
use rustix::fs::OFlags;

use super::super::super::client::{Caller, Client, ClientOptions, NamedIn, NotDurable, ROOT};
use super::super::super::{Share, ShareSpec, Users};
use super::super::{FileRequestId, Recovery};
use super::*;
use crate::block::spec::VolumeName;
use crate::host::Host;
use crate::limits::CALLS_PER_SESSION;

const CLASS: u8 = 0x20;
const FILE_CLASS: u8 = 0x21;
const LIMIT: Duration = Duration::from_secs(20);
const ME: Caller<'static> = Caller { uid: 0, gid: 0, groups: &[] };

/// What is done in place of the next sync of an open file, by its inode.
type Syncs = HashMap<u64, Box<dyn FnOnce() -> Result<(), Errno> + Send>>;

pub(super) static INSTEAD: LazyLock<Mutex<Syncs>> = LazyLock::new(Mutex::default);

fn share(directory: &Path, description: Option<String>) -> Arc<Share> {
    let spec = ShareSpec::new(VolumeName::new("share").unwrap(), directory.to_owned());
    Arc::new(Share::open(ShareSpec { users: Users::Squash(server_itself()), description, ..spec }).unwrap())
}

/// A loop that serves a share, turned by the test.
struct Served {
    reactor: Reactor,
    host: Host,
    shares: Shares,
    completions: Vec<Completion>,
}

impl Served {
    fn new(directory: &Path) -> (Self, Address) {
        Self::keeping(directory, LIMIT)
    }

    /// The same, which keeps what a client had for so long.
    fn keeping(directory: &Path, kept_for: Duration) -> (Self, Address) {
        let mut reactor = Reactor::open(IoChoice::Auto, 8 << 20).unwrap();
        let spoken = vec![Shares::spoken(CALLS_PER_SESSION)];
        let mut host = Host::new(&reactor, Arc::new(Registry::new(1)), Options::new(CLASS), spoken);
        let recovery = Arc::new(Recovery::with_times((1 << 32) + 7, Duration::ZERO, kept_for));
        let mut shares = Shares::new(&reactor, FILE_CLASS, &recovery);
        shares.replace(&mut host, &mut reactor, &[share(directory, None)]);
        let listener = host.listen(&mut reactor, &Address::Tcp("127.0.0.1:0".parse().unwrap())).unwrap();
        let at = Address::Tcp(reactor.local_address(listener).unwrap());
        (Self { reactor, host, shares, completions: Vec::new() }, at)
    }

    fn turn(&mut self) {
        self.host.flush(&mut self.reactor, &mut [&mut self.shares]);
        let until = self.reactor.now() + Duration::from_millis(5);
        self.reactor.reap(&mut self.completions, Wait::Until(until)).unwrap();
        for completion in self.completions.drain(..) {
            match completion.token.class() {
                FILE_CLASS => self.shares.complete(&mut self.host, &mut self.reactor, completion),
                _ if completion.token == Token::WAKE => self.host.woken(&mut self.reactor, &mut [&mut self.shares]),
                _ => self.host.handle(&mut self.reactor, &mut [&mut self.shares], completion),
            }
        }
    }

    fn turn_until(&mut self, what: &str, mut is: impl FnMut(&Self) -> bool) {
        let limit = Instant::now() + LIMIT;
        while !is(self) {
            assert!(Instant::now() < limit, "waited in vain for {what}");
            self.turn();
        }
    }

    /// What a thread of a client gives, which the loop serves meanwhile.
    fn result_of<T>(&mut self, what: &str, thread: JoinHandle<T>) -> T {
        self.turn_until(what, |_| thread.is_finished());
        thread.join().unwrap()
    }

    /// Ends the sessions of all clients, as if their networks had failed.
    fn end_sessions(&mut self) {
        let sessions = self.shares.clients.iter().flatten().map(|client| client.session);
        self.shares.mailbox.superseded.lock().unwrap().extend(sessions);
        self.turn_until("the ends of the sessions", |served| {
            served.shares.clients.iter().flatten().all(|client| client.is_gone)
        });
    }

    /// The same, for so long that nothing of them is kept.
    fn forget_clients(&mut self) {
        let names = self.shares.clients.iter().flatten().filter_map(|client| client.known_as.clone());
        let names: Vec<_> = names.map(|(name, _)| name).collect();
        self.end_sessions();
        self.turn_until("the end of their time", |served| names.iter().all(|name| !served.shares.recovery.knows(name)));
    }
}

/// A client that has the share's file open.
struct Opened {
    client: Client,
    handle: u64,
}

impl Opened {
    /// A new client, which opens the file and writes to it.
    fn new(served: &mut Served, at: &Address) -> Arc<Self> {
        let at = at.clone();
        let opens = std::thread::spawn(move || {
            let client = Client::connect(ClientOptions::new(at, "share")).unwrap();
            let (_, handle) = client.create(ME, NamedIn::new(ROOT, b"file"), OFlags::RDWR.bits(), 0o600).unwrap();
            client.write(ME, handle, 0, b"bytes").unwrap();
            Arc::new(Self { client, handle })
        });
        served.result_of("an open file", opens)
    }

    fn sync(self: &Arc<Self>) -> JoinHandle<Result<(), byway_reactor::Errno>> {
        let this = Arc::clone(self);
        std::thread::spawn(move || this.client.sync(ME, this.handle, false))
    }

    fn make_durable(self: &Arc<Self>, served: &mut Served) -> Result<(), NotDurable> {
        let this = Arc::clone(self);
        served.result_of("a sync of all", std::thread::spawn(move || this.client.make_durable()))
    }

    fn close(self: &Arc<Self>, served: &mut Served) {
        let this = Arc::clone(self);
        served.result_of("a client's end", std::thread::spawn(move || this.client.close()));
    }
}

/// A sync that has begun and does not end yet.
struct Held {
    begun: Receiver<()>,
    go_on: Sender<()>,
}

impl Held {
    /// The next sync of the file fails when it goes on, and the kernel does not tell it again.
    fn failing(file: &Path) -> Self {
        let ((begin, begun), (go_on, goes_on)) = (channel(), channel());
        let fails = move || {
            let _ = begin.send(());
            let _ = goes_on.recv_timeout(LIMIT * 2);
            Err(Errno::IO)
        };
        INSTEAD.lock().unwrap().insert(std::fs::metadata(file).unwrap().ino(), Box::new(fails));
        Self { begun, go_on }
    }
}

#[test]
fn a_client_that_goes_leaves_no_sync_behind_that_waits_for_a_disk() {
    let folder = tempfile::tempdir().unwrap();
    let (mut served, at) = Served::new(folder.path());
    let device = rustix::fs::stat(folder.path()).unwrap().st_dev;
    let (go_on, goes_on) = channel::<()>();
    // Of a client that waits for it.
    let hangs = move || {
        let _ = goes_on.recv_timeout(LIMIT * 2);
        Ok(Outcome::Done)
    };
    let other = FileRequestId::from_u64(1 << 20);
    assert!(served.shares.workers.run_long(other, device, server_itself(), Box::new(hangs)));
    let (send, receive) = channel();
    let syncs = std::thread::spawn(move || {
        let client = Arc::new(Client::connect(ClientOptions::new(at, "share")).unwrap());
        let create = client.create(ME, NamedIn::new(ROOT, b"file"), OFlags::RDWR.bits(), 0o600);
        let (_, handle) = create.unwrap();
        client.write(ME, handle, 0, b"bytes").unwrap();
        send.send(Arc::clone(&client)).unwrap();
        client.make_durable()
    });
    let mut client = None;
    served.turn_until("the client's change", |_| {
        client = receive.try_recv().ok();
        client.is_some()
    });
    served.turn_until("its sync", |served| !served.shares.is_idle());
    let client = client.unwrap();
    let leaves = std::thread::spawn(move || client.close());
    served.turn_until("its end", |served| served.shares.clients.iter().all(Option::is_none));
    assert!(served.shares.is_idle());
    served.turn_until("the client's threads", |_| leaves.is_finished() && syncs.is_finished());
    leaves.join().unwrap();
    assert!(syncs.join().unwrap().is_err(), "it has not synced");
    go_on.send(()).unwrap();
}

fn hears_of_a_failed_sync_whose_answer_was_lost(kept_for: Duration) {
    let folder = tempfile::tempdir().unwrap();
    let (mut served, at) = Served::keeping(folder.path(), kept_for);
    let opened = Opened::new(&mut served, &at);
    let held = Held::failing(&folder.path().join("file"));
    let syncs = opened.sync();
    served.turn_until("the sync", |_| held.begun.try_recv().is_ok());
    served.end_sessions();
    held.go_on.send(()).unwrap();
    assert!(served.result_of("the client's second try", syncs).is_err(), "the first one failed");
    assert!(served.result_of("a sync", opened.sync()).is_ok(), "a failure is told once");
    opened.close(&mut served);
}

#[test]
fn a_client_hears_of_a_failed_sync_whose_answer_was_lost() {
    hears_of_a_failed_sync_whose_answer_was_lost(LIMIT);
}

#[test]
fn a_client_hears_of_a_failed_sync_whose_answer_was_not_kept() {
    hears_of_a_failed_sync_whose_answer_was_lost(Duration::ZERO);
}

/// A file of a client that was away for too long. Meanwhile `happens`, and then all is synced.
fn synced_after(happens: impl FnOnce(&mut Served, &Path)) -> Result<(), NotDurable> {
    let folder = tempfile::tempdir().unwrap();
    let (mut served, at) = Served::keeping(folder.path(), Duration::ZERO);
    let opened = Opened::new(&mut served, &at);
    served.forget_clients();
    happens(&mut served, folder.path());
    let durable = opened.make_durable(&mut served);
    assert_eq!(served.result_of("a sync", opened.sync()).is_ok(), durable.is_ok(), "a file's sync says the same");
    opened.close(&mut served);
    durable
}

#[test]
fn a_client_that_comes_anew_hears_what_another_client_was_told() {
    assert_eq!(synced_after(|_, _| ()), Ok(()));
    let another_is_told = |served: &mut Served, _: &Path| served.shares.shares[0].note_failed_sync(Errno::IO);
    assert_eq!(synced_after(another_is_told), Err(NotDurable::Failed { files: 2 }), "a file and the root");
}

#[test]
fn a_reload_forgets_no_failed_sync() {
    let reloads = |served: &mut Served, directory: &Path| {
        let Served { host, reactor, shares, .. } = served;
        shares.replace(host, reactor, &[share(directory, Some("as it is now".to_owned()))]);
    };
    assert_eq!(synced_after(reloads), Ok(()));
    let fails_before = |served: &mut Served, directory: &Path| {
        served.shares.shares[0].note_failed_sync(Errno::IO);
        reloads(served, directory);
    };
    assert_eq!(synced_after(fails_before), Err(NotDurable::Failed { files: 2 }));
}
