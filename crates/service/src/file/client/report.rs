//! How a client is, for operators.

use super::Client;

/// See the module. Counts are since the client was made in this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientReport {
    /// There is a session with the server.
    pub connected: bool,
    /// Sessions that were made after the first.
    pub reconnects: u64,
    /// Calls that were sent to the server, as [`Client::messages`] counts them.
    pub messages: u64,
    /// The server has given a lease once.
    pub gives_leases: bool,
    /// Nodes with a lease now.
    pub leases: u64,
    /// Leases that the server has recalled.
    pub recalls: u64,
    /// Names and attributes that were found without a message.
    pub cache_hits: u64,
    /// Nodes that the user of the client knows.
    pub files: u64,
    /// Open files and directories.
    pub open_files: u64,
    /// Locks that are held.
    pub locks: u64,
    /// Files and directories with changes that the server has taken and no sync has followed.
    pub unsynced_files: u64,
}

impl Client {
    /// How the client is now.
    pub fn report(&self) -> ClientReport {
        let (gives_leases, leases, recalls, cache_hits) = {
            let state = self.caches.state();
            (state.leases.has_granted(), state.leases.count(), state.recalls, state.hits)
        };
        let table = self.table();
        ClientReport {
            connected: self.connection.now().is_some(),
            reconnects: self.connection.reconnects(),
            messages: self.messages(),
            gives_leases,
            leases: leases as u64,
            recalls,
            cache_hits,
            files: table.nodes.len() as u64,
            open_files: table.open_files() as u64,
            locks: table.locks.count() as u64,
            unsynced_files: table.unsynced.count() as u64,
        }
    }
}
