//! A program's session with a server: made at the first call that needs it.

use std::sync::Arc;

use byway_fabric::tls::TlsClient;
use byway_service::file::client::{Caller, Client, ClientOptions, Found, ROOT};
use rustix::io::Errno;
use rustix::process::{Resource, getegid, geteuid, getgroups, getrlimit};

use crate::inside::inside;
use crate::maps::{self, Map, Tls};
use crate::walk::Names;

/// Of the descriptors that a program may have, the lower part of so many quarters is left to it.
const LEFT_QUARTERS: u64 = 3;

/// The most that it is taken to have: the kernel's table is as long as the largest number, and each fork copies it.
const NUMBERS_MAX: u64 = 4096;

/// The user for whom calls are made.
#[derive(Clone, Debug)]
pub(crate) struct User {
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
}

impl User {
    /// That of this program now.
    fn now(wants_groups: bool) -> Self {
        let groups = if wants_groups { getgroups().unwrap_or_default() } else { Vec::new() };
        let groups = groups.iter().map(|group| group.as_raw()).collect();
        Self { uid: geteuid().as_raw(), gid: getegid().as_raw(), groups }
    }

    /// As calls name it.
    pub(crate) fn caller(&self) -> Caller<'_> {
        Caller { uid: self.uid, gid: self.gid, groups: &self.groups }
    }
}

/// See the module.
pub(crate) struct Session {
    pub(crate) client: Client,
    pub(crate) map: &'static Map,
}

impl Session {
    /// Connects.
    ///
    /// # Errors
    /// `EIO`: standard error says why.
    pub(crate) fn open(map: &'static Map) -> Result<Arc<Self>, Errno> {
        // The program's shell or daemon gives low numbers a meaning.
        let most = getrlimit(Resource::Nofile).current.unwrap_or(NUMBERS_MAX).min(NUMBERS_MAX);
        byway_reactor::descriptor_floor::set((most * LEFT_QUARTERS / 4) as i32);
        let failed = |error: &dyn std::error::Error| {
            eprintln!("byway run: {}: {error}", String::from_utf8_lossy(&map.prefix));
            Errno::IO
        };
        let tls = |tls: &Tls| {
            let own = tls.own.as_ref().map(|(certificate, key)| (certificate.as_path(), key.as_path()));
            TlsClient::new(&tls.authorities, own, &tls.name).map_err(|error| failed(&error))
        };
        let tls = map.tls.as_ref().map(tls).transpose()?;
        let options = ClientOptions { tls, ..ClientOptions::new(map.address.clone(), &map.share) };
        let client = Client::connect(options).map_err(|error| failed(&error))?;
        Ok(Arc::new(Self { client, map }))
    }

    /// The program's user.
    pub(crate) fn user(&self) -> User {
        User::now(self.client.wants_groups())
    }
}

/// The names of a session, as a user sees them. What was looked up is forgotten with this, unless it is taken.
pub(crate) struct Lookups {
    pub(crate) session: Arc<Session>,
    pub(crate) user: User,
    held: std::cell::RefCell<Held>,
}

impl Lookups {
    pub(crate) fn new(session: Arc<Session>) -> Self {
        let user = session.user();
        let held = Held { session: Arc::clone(&session), nodes: Vec::new() }.into();
        Self { session, user, held }
    }

    /// As calls name the user.
    pub(crate) fn caller(&self) -> Caller<'_> {
        self.user.caller()
    }

    /// A node came with an answer.
    pub(crate) fn hold(&self, found: Found) -> Found {
        self.held.borrow_mut().nodes.push(found.node);
        found
    }

    /// What was looked up, which stays known as long as this is kept.
    pub(crate) fn into_held(self) -> (Arc<Session>, User, Held) {
        (self.session, self.user, self.held.into_inner())
    }
}

/// Nodes that the server keeps for this program; forgotten with this.
pub(crate) struct Held {
    session: Arc<Session>,
    nodes: Vec<u64>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = inside(|| {
            self.nodes.iter().for_each(|node| self.session.client.forget(*node, 1));
            Ok(())
        });
    }
}

impl Names for Lookups {
    fn look_up(&self, directory: u64, name: &[u8]) -> Result<Found, Errno> {
        self.session.client.look_up(self.caller(), directory, name).map(|found| self.hold(found))
    }

    fn target(&self, link: u64) -> Result<Vec<u8>, Errno> {
        self.session.client.read_link(self.caller(), link)
    }

    fn root(&self) -> Result<Found, Errno> {
        let attributes = self.session.client.attributes(self.caller(), ROOT, None)?;
        Ok(Found { node: ROOT, attributes })
    }

    fn below<'a>(&self, path: &'a [u8]) -> Option<&'a [u8]> {
        maps::below(&self.session.map.prefix, path)
    }

    fn prefix(&self) -> &[u8] {
        &self.session.map.prefix
    }
}
