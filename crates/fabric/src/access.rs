//! Access to a resource: which clients may use it, and which of them may write.
//!
//! An [`Identity`] is what TLS and transport prove of a client; an [`Access`] is the operator's list of clients. Both are
//! plain data without I/O, for every service.
//!
//! ```text
//! ACCESS   CLIENT[:ro][,CLIENT[:ro]]...
//! CLIENT   NAME           a subject alternative name of the client's certificate: DNS (case does not matter) or URI
//!          ADDRESS/BITS   a range of IP addresses, or one address
//!          unix           clients of Unix sockets and shared memory, which the socket's file mode admits
//! ```
//!
//! A client has the highest right of all the entries that match it; with no match it has none. Names match whole:
//! `*.example.com` matches only a certificate that contains exactly that text.

mod cidr;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;

pub use self::cidr::{Cidr, CidrError};
use crate::limits::{ACCESS_ENTRIES_MAX, ACCESS_NAME_BYTES_MAX};

/// A client's right to a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Right {
    /// Read it, and all that changes nothing.
    Read,
    /// Read and write it.
    Write,
}

/// Where a client's connection comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The kernel does not say, as for a TCP connection that was reset before it was accepted.
    #[default]
    Unknown,
    /// A unix socket of this machine, perhaps with shared memory.
    Unix,
    /// An IP address, over TCP or RDMA. Without TLS it can be forged.
    Address(IpAddr),
}

/// The identity of a connection's peer, as proved by TLS and transport. Cloning shares the names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Identity {
    names: Arc<[String]>,
    origin: Origin,
}

impl Identity {
    /// A peer without a certificate.
    pub fn new(origin: Origin) -> Self {
        Self { names: Arc::default(), origin }
    }

    /// The same peer, which has proved by TLS that it holds `certificate`.
    #[must_use]
    pub fn certified(&self, certificate: &CertificateDer<'_>) -> Self {
        let names = webpki::EndEntityCert::try_from(certificate).map_or_else(
            |_| Vec::new(),
            |certificate| {
                let dns = certificate.valid_dns_names().map(str::to_ascii_lowercase);
                // An entry without a scheme means a DNS name: a URI must not pass for one.
                let uris = certificate.valid_uri_names().filter(|uri| is_uri(uri));
                dns.chain(uris.map(str::to_owned)).collect()
            },
        );
        self.named(names)
    }

    fn named(&self, names: Vec<String>) -> Self {
        Self { names: names.into(), origin: self.origin }
    }

    /// The subject alternative names of its certificate, DNS (in lower case) and URI; none without a certificate.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Where it connects from.
    pub fn origin(&self) -> Origin {
        self.origin
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.names.is_empty() {
            write!(f, "{} ", self.names.join(", "))?;
        }
        match self.origin {
            Origin::Unknown => f.write_str("at an unknown address"),
            Origin::Unix => f.write_str("on this machine"),
            Origin::Address(address) => write!(f, "at {address}"),
        }
    }
}

/// Which clients may use a resource. Without entries, as by default, all may read and write it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    entries: Vec<Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    client: Client,
    right: Right,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Client {
    Name(String),
    Range(Cidr),
    Unix,
}

/// Why a text is no [`Access`]. Says what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    /// Nothing, or nothing between two commas.
    #[error("access names no client; write CLIENT or CLIENT:ro, or leave access out for every client")]
    Empty,
    /// Neither a name nor a range.
    #[error(
        "`{0}` is no client; write a name of the client's certificate, for example store2.example or \
         spiffe://cluster/vm, a range of addresses, for example 10.0.0.0/8, or unix, and :ro behind it for reading only"
    )]
    Client(String),
    /// It looks like a range and is none.
    #[error(transparent)]
    Range(#[from] CidrError),
    /// Over [`ACCESS_ENTRIES_MAX`].
    #[error("more than {ACCESS_ENTRIES_MAX} clients; give ranges of addresses, or several clients a common name")]
    TooMany,
}

impl Access {
    /// Whether every client may use the resource.
    pub fn is_open(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether an entry asks for a certificate.
    pub fn names_certificates(&self) -> bool {
        self.entries.iter().any(|entry| matches!(entry.client, Client::Name(_)))
    }

    /// The right of `client`; `None`: no right, and the client must not learn that the resource exists.
    pub fn right(&self, client: &Identity) -> Option<Right> {
        if self.is_open() {
            return Some(Right::Write);
        }
        self.entries.iter().filter(|entry| entry.client.is(client)).map(|entry| entry.right).max()
    }

    /// Adds the entries of another list.
    ///
    /// # Errors
    /// [`AccessError::TooMany`].
    pub fn add(&mut self, more: Self) -> Result<(), AccessError> {
        if self.entries.len() + more.entries.len() > ACCESS_ENTRIES_MAX {
            return Err(AccessError::TooMany);
        }
        self.entries.extend(more.entries);
        Ok(())
    }
}

impl Client {
    fn is(&self, client: &Identity) -> bool {
        match (self, client.origin) {
            (Self::Name(name), _) => client.names.contains(name),
            (Self::Range(range), Origin::Address(address)) => range.contains(address),
            (Self::Unix, Origin::Unix) => true,
            (Self::Range(_) | Self::Unix, _) => false,
        }
    }
}

impl FromStr for Access {
    type Err = AccessError;

    fn from_str(text: &str) -> Result<Self, AccessError> {
        let mut access = Self::default();
        for part in text.split(',') {
            access.add(Self { entries: vec![part.parse()?] })?;
        }
        Ok(access)
    }
}

impl FromStr for Entry {
    type Err = AccessError;

    fn from_str(text: &str) -> Result<Self, AccessError> {
        let (client, right) = match text.strip_suffix(":ro") {
            Some(client) => (client, Right::Read),
            None => (text, Right::Write),
        };
        Ok(Self { client: client.parse()?, right })
    }
}

impl FromStr for Client {
    type Err = AccessError;

    fn from_str(text: &str) -> Result<Self, AccessError> {
        let bad = || AccessError::Client(text.to_owned());
        if text.is_empty() {
            return Err(AccessError::Empty);
        }
        if text == "unix" {
            return Ok(Self::Unix);
        }
        if text.len() > ACCESS_NAME_BYTES_MAX {
            return Err(bad());
        }
        if text.contains("://") {
            return if is_uri(text) { Ok(Self::Name(text.to_owned())) } else { Err(bad()) };
        }
        // What has a slash, a colon, or a last label of digits is no DNS name, so it is meant for an address.
        let last = text.rsplit('.').next().unwrap_or_default();
        if text.contains(['/', ':']) || (!last.is_empty() && last.bytes().all(|byte| byte.is_ascii_digit())) {
            return Ok(Self::Range(text.parse()?));
        }
        let is_name = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.*".contains(&byte));
        if is_name { Ok(Self::Name(text.to_ascii_lowercase())) } else { Err(bad()) }
    }
}

/// `SCHEME://REST`, printable and without a space, comma or quote.
fn is_uri(text: &str) -> bool {
    text.split_once("://").is_some_and(|(scheme, rest)| {
        let in_scheme = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
        let in_rest = |byte: u8| byte.is_ascii_graphic() && !b"\",".contains(&byte);
        !scheme.is_empty() && scheme.bytes().all(in_scheme) && !rest.is_empty() && rest.bytes().all(in_rest)
    })
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Entry { client, right }) in self.entries.iter().enumerate() {
            f.write_str(if index > 0 { "," } else { "" })?;
            match client {
                Client::Name(name) => f.write_str(name)?,
                Client::Range(range) => range.fmt(f)?,
                Client::Unix => f.write_str("unix")?,
            }
            f.write_str(if *right == Right::Read { ":ro" } else { "" })?;
        }
        Ok(())
    }
}
