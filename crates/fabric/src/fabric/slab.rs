//! Memory that a server opens to one client, which puts and gets there by itself.
//!
//! The client reaches it over every wire as it reaches a node's window: over tcp and unix sockets this fabric receives and sends, over
//! shared memory the client copies, over RDMA its device does.

use byway_reactor::Mapping;

/// Memory for the peer of one session. Nothing in this process looks at its bytes, and no two peers ever have the same.
#[derive(Debug)]
pub struct Slab {
    mapping: Mapping,
    bytes: usize,
}

impl Slab {
    /// Zeroes, in an anonymous file of `bytes` (at least 1). Pages take memory when they are first written to.
    ///
    /// # Errors
    /// The kernel's: no memory, no descriptors.
    pub fn new(bytes: usize) -> std::io::Result<Self> {
        if bytes == 0 {
            return Err(std::io::ErrorKind::InvalidInput.into());
        }
        Ok(Self { mapping: Mapping::shared(bytes)?, bytes })
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Bytes of the pages that were written to, which take memory.
    pub fn filled_bytes(&self) -> u64 {
        self.mapping.filled_bytes()
    }

    /// The memory itself.
    pub(super) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}
