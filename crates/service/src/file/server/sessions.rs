//! Sessions of clients: how they begin, and the state that is kept when they end.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use byway_fabric::access::Right;
use byway_fabric::wire::RefuseCode;
use byway_fabric::{CloseReason, SessionId};
use byway_reactor::{Op, Reactor, Token};
use rustix::io::Errno;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use super::super::share::{Acting, Share};
use super::super::sync_point::SyncPoint;
use super::super::wire::{
    AttachResult, CallError, ClientName, Entry, FLAG_RENEWS_LOCKS, SHARE_LEASES, SHARE_READ_ONLY, SHARE_TRUSTS,
};
use super::calls::Asked;
use super::leases::LeaseState;
use super::open_files::ShareClient;
use super::outcome::{Found, Outcome};
use super::recovery::{Claim, Home};
use super::replies::Reply;
use super::table::Client;
use super::workers::server_itself;
use super::{FileRequest, FileRequestId, Shares, tree};
use crate::host::At;
use crate::limits::FILE_TRANSFER_MAX;

/// Tag of the timer after which what a client had is let go.
pub(super) const EXPIRY: u8 = 1;

/// Tag of the timer at the end of the grace time.
pub(super) const GRACE_END: u8 = 2;

/// Numbers clients of this process, for locks.
static CLIENTS: AtomicU64 = AtomicU64::new(1);

/// A client that attaches, while a worker looks at the share's root.
#[derive(Clone, Debug)]
pub(super) struct Attaching {
    share: Arc<Share>,
    right: Right,
    name: ClientName,
    renews_locks: bool,
}

impl Shares {
    pub(super) fn attach(&mut self, at: &mut At<'_>, asked: &Asked<'_>) -> Result<(), CallError> {
        // A session's first attach makes the table in which its requests are counted: there must be no second until then.
        let session = asked.call.session;
        if self
            .requests
            .iter()
            .any(|(_, request)| matches!(request, FileRequest::Attach { call, .. } if call.session == session))
        {
            return Err(CallError::Busy);
        }
        let share = self.shares.iter().find(|share| share.name().as_bytes() == asked.name);
        let share = Arc::clone(share.ok_or(CallError::NoShare)?);
        let name = ClientName::try_from(asked.data).map_err(|_| CallError::Malformed)?;
        let Some(right) = Self::right(at, asked.call.session, &share) else {
            tracing::debug!(share = share.name(), "not in the share's access list: told that there is none");
            return Err(CallError::NoShare);
        };
        let renews_locks = asked.arguments.flags.get() & FLAG_RENEWS_LOCKS != 0;
        let attaching = Attaching { share: Arc::clone(&share), right, name, renews_locks };
        let request = self.start(at, FileRequest::Attach { call: asked.call, attaching });
        let root = move || {
            let root = share.root().try_clone().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO));
            let point = share.sync_point(|root| tree::open_directory(root.as_fd()));
            Ok(Outcome::Root(tree::found(root?)?, point))
        };
        // The root is opened with the server's own rights.
        if !self.workers.run(request, Some(server_itself()), Box::new(root)) {
            self.end(at, request, Err(CallError::Busy));
        }
        Ok(())
    }

    /// The root of a share that a client attaches to has been looked at.
    pub(super) fn attached(
        &mut self,
        at: &mut At<'_>,
        request: FileRequestId,
        attaching: Attaching,
        found: Result<Outcome, Errno>,
    ) {
        let Some(session) = self.requests.get(request).map(|request| request.call().session) else { return };
        let answer = match found {
            Ok(Outcome::Root(root, point)) => self.hold_root(at, session, &attaching, root, point),
            Ok(_) => Err(CallError::Malformed),
            Err(errno) => Err(errno.into()),
        };
        match answer {
            Ok((result, entry)) => {
                self.end(at, request, Ok(Reply { result: result.as_bytes(), payload: entry.as_bytes() }));
            }
            Err(error) => self.end(at, request, Err(error)),
        }
    }

    fn hold_root(
        &mut self,
        at: &mut At<'_>,
        session: SessionId,
        Attaching { share, right, name, renews_locks }: &Attaching,
        root: Found,
        point: Option<Arc<SyncPoint>>,
    ) -> Result<(AttachResult, Entry), CallError> {
        if !at.sessions.is_up(session) {
            return Err(CallError::Stale);
        }
        self.begin_session(at, session, *name)?;
        let (attributes, may_have_kept) = (root.attributes, self.recovery.may_have_kept(share));
        let client = self.client(session)?;
        client.renews_locks = *renews_locks;
        let state = client.key;
        let node = client.hold(root, share, *right)?;
        let failed_syncs = point.map_or(0, |point| client.keep_sync_point(share, point));
        if !client.shares.iter().any(|other| Arc::ptr_eq(other, share)) {
            client.shares.push(Arc::clone(share));
            client.unclaimed.extend(may_have_kept.then(|| ShareClient { client: *name, share: Arc::clone(share) }));
            // It is not on the list of this share: before it gets something there, it is put on the lists again.
            client.listed.clear();
            client.leases.pause();
        }
        let flag = |is: bool, flag: u32| if is { flag } else { 0 };
        let flags = flag(*right == Right::Read, SHARE_READ_ONLY)
            | flag(matches!(share.acting(), Acting::Caller { .. }), SHARE_TRUSTS)
            | flag(share.gives_leases(), SHARE_LEASES);
        let uptime = self.recovery.uptime(at.reactor.now()).as_millis();
        let result = AttachResult {
            flags: U32::new(flags),
            transfer_max: U32::new(FILE_TRANSFER_MAX as u32),
            instance: U64::new(self.recovery.instance()),
            state: U64::new(state),
            uptime_ms: U64::new(u64::try_from(uptime).unwrap_or(u64::MAX)),
            failed_syncs: U64::new(failed_syncs),
        };
        // It may have locks of a session before.
        self.watch_locks_later(at);
        Ok((result, Entry { node: U64::new(node), attributes }))
    }

    /// Makes the session's table, or takes the one that the client left behind.
    fn begin_session(&mut self, at: &mut At<'_>, session: SessionId, name: ClientName) -> Result<(), CallError> {
        let peer = at.sessions.get(session).map(|session| session.client.clone()).unwrap_or_default();
        let known_as = (name, peer);
        if let Ok(client) = self.client(session) {
            let is_same = client.known_as.as_ref() == Some(&known_as);
            return if is_same { Ok(()) } else { Err(CallError::Malformed) };
        }
        let home = Home { mailbox: Arc::clone(&self.mailbox), session };
        let claim = self.recovery.known().claim(&known_as, home);
        let mut client = match claim {
            Claim::Wait(old) => {
                old.mailbox.superseded.lock().unwrap_or_else(PoisonError::into_inner).push(old.session);
                old.mailbox.waker.wake();
                return Err(CallError::Busy);
            }
            Claim::Resumed(mut client) if self.serves(&client) => {
                client.resume(at.reactor, session);
                // It has dropped what it had in the session before.
                client.leases.return_all();
                client.leases = LeaseState::join(self.recovery.leases(), &self.mailbox, session);
                client
            }
            claim => {
                let leases = LeaseState::join(self.recovery.leases(), &self.mailbox, session);
                let (key, files) = (CLIENTS.fetch_add(1, Ordering::Relaxed), self.recovery.open_files());
                let mut new = Client::new(session, key, known_as, leases, files);
                // The reload that took a share away took its clients' files, too. It stays on the lists while it is known.
                if let Claim::Resumed(client) = claim {
                    new.to_unlist.clone_from(&client.to_unlist);
                    self.forget_client(client);
                }
                new
            }
        };
        // The attach itself.
        client.requests = 1;
        let index = session.index as usize;
        if self.clients.len() <= index {
            self.clients.resize_with(index + 1, || None);
        }
        self.clients[index] = Some(client);
        Ok(())
    }

    /// Whether all shares of a client are served as they were.
    fn serves(&self, client: &Client) -> bool {
        client.shares.iter().all(|share| self.shares.iter().any(|served| Arc::ptr_eq(share, served)))
    }

    /// The client says that it will not come back.
    pub(super) fn detach(&mut self, session: SessionId) -> Result<(), CallError> {
        let client = self.client(session)?;
        if let Some(known_as) = client.known_as.take() {
            self.recovery.known().leave(&known_as);
        }
        Ok(())
    }

    /// A session has ended: its waits for locks are over, and when its last call has ended, what it holds is put aside.
    pub(super) fn gone(&mut self, at: &mut At<'_>, session: SessionId) {
        let Ok(client) = self.client(session) else { return };
        client.is_gone = true;
        client.leases.leave();
        let key = client.key;
        for share in &client.shares {
            super::locking::table(share).end_waits(key);
        }
        // One more request, so that the client stays until the waits have ended.
        client.requests += 1;
        at.sessions.begin_request(session);
        let waits = |request: &FileRequest| matches!(request, FileRequest::Lock { call } | FileRequest::Recalls { call } if call.session == session);
        let waiting: Vec<_> =
            self.requests.iter().filter(|(_, request)| waits(request)).map(|(slot, _)| slot).collect();
        for request in waiting {
            self.end(at, request, Err(Errno::INTR.into()));
        }
        self.leave_line(at, session);
        self.leave_syncs(at, session);
        self.ended(at, session);
    }

    /// A session and its calls have ended.
    pub(super) fn keep_or_drop(&mut self, at: &mut At<'_>, session: SessionId) {
        let index = session.index as usize;
        let Some(mut client) = self.clients.get_mut(index).and_then(Option::take) else { return };
        client.end(at.reactor);
        let Some(known_as) = client.known_as.clone() else { return self.forget_client(client) };
        let until = at.reactor.now() + self.recovery.kept_for();
        let displaced = self.recovery.known().keep(known_as, client, until, |(_, peer)| peer.clone());
        if let Some(client) = displaced {
            tracing::warn!("too many clients are disconnected: the files and locks of one are released");
            self.forget_client(client);
        }
        at.reactor.submit(Op::Timer { at: until }, Token::new(self.class, EXPIRY, 0, 0));
    }

    /// Lets go of what clients had that have not come back.
    pub(super) fn expire(&mut self, reactor: &Reactor) {
        let expired = self.recovery.known().expired(reactor.now());
        for client in expired {
            tracing::info!("a client did not come back: closes its files and releases its locks");
            self.forget_client(client);
        }
    }

    /// Releases a client's locks, and closes its files.
    fn forget_client(&mut self, mut client: Client) {
        self.unlist(&client.shares, client.to_unlist.drain().collect());
        for share in &client.shares {
            super::locking::release(share, client.key);
        }
        let unclaimed = std::mem::take(&mut client.unclaimed);
        self.workers.drop_later(client);
        for ShareClient { client, share } in unclaimed {
            self.drop_kept_of(client, share);
        }
    }

    /// Ends sessions whose clients have begun others.
    pub(super) fn end_superseded(&mut self, at: &mut At<'_>) {
        let superseded = std::mem::take(&mut *self.mailbox.superseded.lock().unwrap_or_else(PoisonError::into_inner));
        for session in superseded {
            if at.sessions.is_up(session) {
                at.fabric.close(at.reactor, session, CloseReason::WeRefused(RefuseCode::Superseded));
            }
        }
    }
}
