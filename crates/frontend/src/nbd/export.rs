//! The handshake's view of exports.

use super::flags::TransmissionFlags;
use super::request::BlockSizes;

/// One export as it is at this moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Export {
    /// Its canonical name; at most [`crate::limits::NAME_BYTES_MAX`] bytes.
    pub name: String,
    /// For a person to read; may be empty.
    pub description: String,
    /// Bytes; should be a multiple of the minimum block, or clients cannot reach the end.
    pub size_bytes: u64,
    /// Size constraints; must be [`BlockSizes::valid`].
    pub block: BlockSizes,
    /// What it can do. The handshake adds HAS_FLAGS and SEND_DF where they apply, and takes off
    /// what the protocol forbids in combination.
    pub flags: TransmissionFlags,
    /// Whether its allocation can be asked for (`base:allocation`).
    pub allocation: bool,
    /// Served only over TLS; on a plain connection it is not listed, and refused.
    pub tls_required: bool,
}

/// How the description of a volatile volume begins; NBD has no flag for that. `byway ls` and `byway info` show it as one.
pub const VOLATILE: &str = "(volatile)";

/// The exports of a server. Each is looked up when a client asks, so sizes and the set itself may
/// change between two options.
pub trait Exports {
    /// All exports, in the order in which clients see them.
    fn list(&self) -> Vec<Export>;

    /// The export of a name; the empty name is the default export, if there is one.
    fn find(&self, name: &str) -> Option<Export>;
}
