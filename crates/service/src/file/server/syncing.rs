//! The sync of a share's file system, which a client asks for at its end.

use byway_fabric::SessionId;
use byway_fabric::access::Right;
use rustix::io::Errno;

use super::super::wire::CallError;
use super::calls::Asked;
use super::outcome::Outcome;
use super::workers::server_itself;
use super::{FileRequest, Shares};
use crate::host::At;

impl Shares {
    /// Syncs the file system of a node's share. It takes the time of all new data of that file system, of whomever; so each file system
    /// has one thread for that.
    pub(super) fn sync_share(&mut self, at: &mut At<'_>, asked: &Asked<'_>) -> Result<(), CallError> {
        let (call, client) = (asked.call, self.client(asked.call.session)?);
        let node = client.node(asked.arguments.node.get())?;
        if node.right == Right::Read {
            // This client has changed nothing.
            return Err(Errno::ROFS.into());
        }
        let Some(point) = client.sync_point(&node) else {
            tracing::error!(share = node.share.name(), "not synced: this server may not list the share's directory");
            return Err(Errno::ACCESS.into());
        };
        let device = point.device();
        let work = move || point.sync().map(|()| Outcome::Done);
        let request = self.start(at, FileRequest::Worker { call, node, window: None, since: None });
        if !self.workers.run_long(request, device, server_itself(), Box::new(work)) {
            self.end(at, request, Err(CallError::Busy));
        }
        Ok(())
    }

    /// A session has ended: its syncs end too, so that a file system that hangs keeps no locks and open files of clients that have gone. One
    /// that a thread has goes on; should it fail, the client's next one fails ([`SyncPoint`](super::outcome::SyncPoint)).
    pub(super) fn leave_syncs(&mut self, at: &mut At<'_>, session: SessionId) {
        let requests = &self.requests;
        let is_gone = |request| requests.get(request).is_some_and(|asked| asked.call().session == session);
        for request in self.workers.leave_long(is_gone) {
            self.end(at, request, Err(CallError::Busy));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::{Duration, Instant};

    use byway_fabric::{Options, Registry};
    use byway_reactor::{Address, Completion, IoChoice, Reactor, Token, Wait};
    use rustix::fs::OFlags;

    use super::super::super::client::{Caller, Client, ClientOptions, NamedIn, ROOT};
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

    /// A loop that serves a share, turned by the test.
    struct Served {
        reactor: Reactor,
        host: Host,
        shares: Shares,
        completions: Vec<Completion>,
    }

    impl Served {
        fn new(directory: &Path) -> (Self, Address) {
            let users = Users::Squash(server_itself());
            let name = VolumeName::new("share").unwrap();
            let share = Share::open(ShareSpec { users, ..ShareSpec::new(name, directory.to_owned()) }).unwrap();
            let mut reactor = Reactor::open(IoChoice::Auto, 8 << 20).unwrap();
            let spoken = vec![Shares::spoken(CALLS_PER_SESSION)];
            let mut host = Host::new(&reactor, Arc::new(Registry::new(1)), Options::new(CLASS), spoken);
            let recovery = Arc::new(Recovery::with_times(1, Duration::ZERO, LIMIT));
            let mut shares = Shares::new(&reactor, FILE_CLASS, &recovery);
            shares.replace(&mut host, &mut reactor, &[Arc::new(share)]);
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
}
