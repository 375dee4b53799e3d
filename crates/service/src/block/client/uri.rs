//! `byway://HOST[:PORT]/NAME`: which volume of which server.

use std::net::ToSocketAddrs;

use byway_reactor::Address;

use crate::limits::VOLUME_NAME_BYTES_MAX;

/// The port of byway's own wire.
pub const DEFAULT_PORT: u16 = 4711;

/// A volume and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeUri {
    /// Host name, or IP address (IPv6 in brackets).
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// The volume's name.
    pub name: String,
}

/// Why a text names no volume.
#[derive(Debug, thiserror::Error)]
pub enum UriError {
    /// It does not begin with `byway://`.
    #[error("a volume's address begins with byway://, as in byway://host/name")]
    Scheme,
    /// No host, or a port that is none.
    #[error("give a host and perhaps a port: byway://host:4711/name")]
    Host,
    /// Not `[A-Za-z0-9._-]{{1,64}}`.
    #[error("a volume's name has 1 to 64 letters, digits, dots, dashes and underscores")]
    Name,
    /// The host is not known.
    #[error("{host}: {source}; check the name, or give an IP address")]
    Unresolved {
        /// Which.
        host: String,
        /// Why.
        source: std::io::Error,
    },
}

/// Whether a volume may have that name.
pub fn is_volume_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=VOLUME_NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(allowed)
}

impl VolumeUri {
    /// Reads an address.
    ///
    /// # Errors
    /// See [`UriError`].
    pub fn parse(text: &str) -> Result<Self, UriError> {
        let rest = text.strip_prefix("byway://").ok_or(UriError::Scheme)?;
        let (authority, name) = rest.split_once('/').ok_or(UriError::Name)?;
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().map_err(|_| UriError::Host)?),
            _ => (authority, DEFAULT_PORT),
        };
        if host.is_empty() {
            return Err(UriError::Host);
        }
        if !is_volume_name(name) {
            return Err(UriError::Name);
        }
        Ok(Self { host: host.to_owned(), port, name: name.to_owned() })
    }

    /// Looks the host up; may ask the network, and waits for it.
    ///
    /// # Errors
    /// [`UriError::Unresolved`].
    pub fn resolve(&self) -> Result<Address, UriError> {
        let host = self.host.trim_start_matches('[').trim_end_matches(']');
        let unresolved = |source| UriError::Unresolved { host: self.host.clone(), source };
        let mut found = (host, self.port).to_socket_addrs().map_err(unresolved)?;
        let none = || unresolved(std::io::Error::from(std::io::ErrorKind::NotFound));
        found.next().map(Address::Tcp).ok_or_else(none)
    }
}

impl std::fmt::Display for VolumeUri {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "byway://{}:{}/{}", self.host, self.port, self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read() {
        for (text, host, port, name) in [
            ("byway://server/disk", "server", 4711, "disk"),
            ("byway://server:10/d.i-s_k", "server", 10, "d.i-s_k"),
            ("byway://[::1]/disk", "[::1]", 4711, "disk"),
            ("byway://[::1]:12/disk", "[::1]", 12, "disk"),
        ] {
            let uri = VolumeUri::parse(text).unwrap();
            assert_eq!((uri.host.as_str(), uri.port, uri.name.as_str()), (host, port, name));
        }
        assert!(VolumeUri::parse("byway://[::1]:12/disk").unwrap().resolve().is_ok());
        assert!(matches!(VolumeUri::parse("nbd://a/b"), Err(UriError::Scheme)));
        assert!(matches!(VolumeUri::parse("byway:///b"), Err(UriError::Host)));
        assert!(matches!(VolumeUri::parse("byway://a:x/b"), Err(UriError::Host)));
        assert!(matches!(VolumeUri::parse("byway://a/b/c"), Err(UriError::Name)));
        assert!(matches!(VolumeUri::parse("byway://a"), Err(UriError::Name)));
        assert!(!is_volume_name(&"x".repeat(65)));
    }
}
