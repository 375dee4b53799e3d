//! Addresses of listeners, and the URIs by which clients reach their volumes and shares.

use std::ffi::OsString;
use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

pub use byway_fabric::access::Cidr;
use byway_reactor::Address;
use byway_service::block::spec::{VolumeName, VolumeNameError};

use super::percent;

/// The port of byway's own protocol.
pub const BYWAY_PORT: u16 = 4711;

/// The port of NBD (IANA).
pub const NBD_PORT: u16 = 10809;

/// Why a text is no address. Says what to write instead.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AddressError {
    /// None of `tcp://`, `unix://`, `shm://` and `rdma://`.
    #[error("invalid address `{0}`; write tcp://HOST:PORT, unix:///PATH, shm:///PATH or rdma://ADDRESS:PORT")]
    Scheme(String),
    /// Neither `tcp://` nor `unix://`, the two that NBD goes over.
    #[error("invalid NBD address `{0}`; write tcp://HOST:PORT or unix:///PATH")]
    NbdScheme(String),
    /// Not `HOST[:PORT]`.
    #[error("invalid host and port `{0}`; write HOST:PORT, for example 127.0.0.1:4711 or [::1]:4711")]
    HostPort(String),
    /// Over 16 bits.
    #[error("invalid port `{0}`; ports are 0 to 65535")]
    Port(String),
    /// A unix path that is not absolute, or too long for the kernel (107 bytes).
    #[error("invalid socket path `{0}`; write unix:// or shm:// and an absolute path of at most 107 bytes")]
    UnixPath(String),
    /// An unknown option follows the path of a socket.
    #[error(
        "unknown socket option `{0}`; write ,mode=MODE (octal, for example 0660) or ,group=NAME, and \\, for a comma in its path"
    )]
    SocketOption(String),
    /// Not `byway://HOST[:PORT]/NAME`.
    #[error(
        "invalid volume address `{0}`; write byway://HOST[:PORT]/NAME, for example byway://store1/disk, or \
         byway+unix:///NAME?socket=PATH (byway+shm:// for shm listeners), byway+rdma://HOST[:PORT]/NAME, or byways:// and \
         byways+unix:// for TLS"
    )]
    Resource(String),
    /// A unix socket with a host, or without a path that can be one.
    #[error(
        "`{0}` does not name a socket; write byway+unix:///NAME?socket=PATH (or byway+shm://), with a path of at most 107 bytes"
    )]
    Socket(String),
    /// The name in a resource is none.
    #[error("{0}")]
    Name(#[from] VolumeNameError),
    /// Something behind `?` that is not known.
    #[error("`?{0}` is not known; write ?via=tcp or ?via=rdma, or leave it out")]
    Query(String),
    /// TLS over RDMA.
    #[error("RDMA has no TLS; write byway+rdma:// where the network may be trusted, or byways:// for TCP with TLS")]
    RdmaTls,
}

/// A unix socket to listen at: `PATH[,mode=MODE][,group=NAME]`, with `\\,` for a comma in the path.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct SocketPlace {
    /// Where its file is.
    pub path: PathBuf,
    /// Permission bits; `None`: what the umask leaves, or 0660 with a `group`.
    pub mode: Option<u32>,
    /// Name or number of its group; `None`: that of the node at its start.
    pub group: Option<String>,
}

impl SocketPlace {
    fn parse(text: &str) -> Result<Self, AddressError> {
        let (mut path, mut options) = (String::new(), None);
        let mut rest = text.char_indices();
        while let Some((at, char)) = rest.next() {
            match char {
                '\\' => path.extend(rest.next().map(|(_, escaped)| escaped)),
                ',' => {
                    options = Some(&text[at + 1..]);
                    break;
                }
                char => path.push(char),
            }
        }
        if !path.starts_with('/') || !is_socket_path(path.as_bytes()) {
            return Err(AddressError::UnixPath(path));
        }
        let mut place = Self { path: path.into(), mode: None, group: None };
        for option in options.into_iter().flat_map(|options| options.split(',')) {
            let bad = || AddressError::SocketOption(option.to_owned());
            match option.split_once('=') {
                Some(("mode", mode)) if place.mode.is_none() => {
                    place.mode = Some(permission_bits(mode).ok_or_else(bad)?);
                }
                Some(("group", name)) if place.group.is_none() && !name.is_empty() => {
                    place.group = Some(name.to_owned());
                }
                _ => return Err(bad()),
            }
        }
        Ok(place)
    }
}

impl fmt::Display for SocketPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display().to_string();
        f.write_str(&path.replace('\\', "\\\\").replace(',', "\\,"))?;
        self.mode.map_or(Ok(()), |mode| write!(f, ",mode={mode:04o}"))?;
        self.group.as_ref().map_or(Ok(()), |group| write!(f, ",group={group}"))
    }
}

/// Where to listen: `tcp://HOST:PORT`, `unix:///PATH`, `shm:///PATH` or `rdma://HOST:PORT`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Listen {
    /// TCP; the host may be a name, resolved when listening starts. `*` is every address.
    Tcp {
        /// Name or address; IPv6 without brackets.
        host: String,
        /// Port; 0 has the kernel choose.
        port: u16,
    },
    /// A unix stream socket.
    Unix(SocketPlace),
    /// A unix socket over which memory is shared, for clients of this host.
    Shared(SocketPlace),
    /// An address of an RDMA device; the host may be a name, and `*` every device.
    Rdma {
        /// Name or address; IPv6 without brackets.
        host: String,
        /// Port; 0 has the system choose.
        port: u16,
    },
}

impl Listen {
    /// Reads an address. `port` is taken where none is written.
    ///
    /// # Errors
    /// When it is none.
    pub fn parse(text: &str, port: u16) -> Result<Self, AddressError> {
        let bad = |rest: &str| bad_host_port(rest, AddressError::HostPort(rest.to_owned()));
        if let Some(rest) = text.strip_prefix("tcp://") {
            let (host, port) = host_port(rest, port).ok_or_else(|| bad(rest))?;
            return Ok(Self::Tcp { host, port });
        }
        if let Some(rest) = text.strip_prefix("rdma://") {
            let (host, port) = host_port(rest, port).ok_or_else(|| bad(rest))?;
            return Ok(Self::Rdma { host, port });
        }
        let (place, make): (_, fn(SocketPlace) -> Self) =
            match (text.strip_prefix("unix://"), text.strip_prefix("shm://")) {
                (Some(place), _) => (place, Self::Unix),
                (_, Some(place)) => (place, Self::Shared),
                _ => return Err(AddressError::Scheme(text.to_owned())),
            };
        SocketPlace::parse(place).map(make)
    }

    /// Of a unix socket, its place.
    pub fn socket(&self) -> Option<&SocketPlace> {
        match self {
            Self::Unix(place) | Self::Shared(place) => Some(place),
            Self::Tcp { .. } | Self::Rdma { .. } => None,
        }
    }

    /// Of a unix socket, where its file is.
    pub fn socket_path(&self) -> Option<&Path> {
        self.socket().map(|place| place.path.as_path())
    }

    /// The addresses of it, resolved now: a name may have several.
    ///
    /// # Errors
    /// The resolver's, with the name.
    pub fn resolve(&self) -> std::io::Result<Vec<Address>> {
        let (host, port) = match self {
            Self::Unix(place) => return Ok(vec![Address::Unix(place.path.clone())]),
            Self::Shared(place) => return Ok(vec![Address::Shared(place.path.clone())]),
            Self::Tcp { host, port } | Self::Rdma { host, port } => {
                (if host == "*" { "::" } else { host.as_str() }, *port)
            }
        };
        let explain = |error: std::io::Error| std::io::Error::new(error.kind(), format!("resolve `{host}`: {error}"));
        let mut addresses: Vec<SocketAddr> = (host, port).to_socket_addrs().map_err(explain)?.collect();
        addresses.sort_unstable();
        addresses.dedup();
        let make = if matches!(self, Self::Rdma { .. }) { Address::Rdma } else { Address::Tcp };
        Ok(addresses.into_iter().map(make).collect())
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rdma { host, port } if host.contains(':') => write!(f, "rdma://[{host}]:{port}"),
            Self::Rdma { host, port } => write!(f, "rdma://{host}:{port}"),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp://[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp://{host}:{port}"),
            Self::Unix(place) => write!(f, "unix://{place}"),
            Self::Shared(place) => write!(f, "shm://{place}"),
        }
    }
}

/// `660` or `0660`.
fn permission_bits(text: &str) -> Option<u32> {
    let is_octal = text.len() >= 3 && text.bytes().all(|byte| matches!(byte, b'0'..=b'7'));
    u32::from_str_radix(text, 8).ok().filter(|mode| is_octal && *mode <= 0o777)
}

/// `sun_path` has 108 bytes, one for the end (unix(7)).
fn is_socket_path(path: &[u8]) -> bool {
    (1..=107).contains(&path.len()) && !path.contains(&0)
}

/// Why a text is not a host and port: names the port where that is a number above 65535.
fn bad_host_port(text: &str, otherwise: AddressError) -> AddressError {
    match text.rsplit_once(':') {
        Some((_, port))
            if !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_err() =>
        {
            AddressError::Port(port.to_owned())
        }
        _ => otherwise,
    }
}

/// `HOST`, `HOST:PORT`, `[V6]` or `[V6]:PORT`.
fn host_port(text: &str, default: u16) -> Option<(String, u16)> {
    let (host, port) = if let Some(rest) = text.strip_prefix('[') {
        let (host, behind) = rest.split_once(']')?;
        host.parse::<std::net::Ipv6Addr>().ok()?;
        (host, if behind.is_empty() { None } else { Some(behind.strip_prefix(':')?) })
    } else {
        match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        }
    };
    let name_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '*');
    if host.is_empty() || host.len() > 255 || !host.chars().all(name_char) {
        return None;
    }
    // `u16::from_str` takes a plus sign; a port has none.
    let port = match port {
        Some(port) if port.starts_with('+') => return None,
        Some(port) => port.parse().ok()?,
        None => default,
    };
    Some((host.to_owned(), port))
}

/// Which wire to take to a resource.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Via {
    /// TCP.
    Tcp,
}

/// The node that a resource belongs to.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum NodeName {
    /// `HOST[:PORT]`.
    Tcp {
        /// Name or address; IPv6 without brackets.
        host: String,
        /// Port; [`BYWAY_PORT`] if none was written.
        port: u16,
        /// The wire, if one was forced.
        via: Option<Via>,
    },
    /// A node of this machine, by its unix socket.
    Unix(PathBuf),
    /// A node of this machine, by memory that is shared over a unix socket.
    Shared(PathBuf),
    /// `HOST[:PORT]` of an RDMA device.
    Rdma {
        /// Name or address; IPv6 without brackets.
        host: String,
        /// Port; [`BYWAY_PORT`] if none was written.
        port: u16,
    },
}

/// `byway://HOST[:PORT]/NAME[?via=tcp]` or `byway+unix:///NAME?socket=PATH` or `byway+shm:///NAME?socket=PATH`: a volume of another node; `byways://` and
/// `byways+unix://` the same over TLS; `byway+rdma://HOST[:PORT]/NAME`, which is also `byway://HOST[:PORT]/NAME?via=rdma`. What follows the plus sign says how the node is reached.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ResourceName {
    /// Which node.
    pub node: NodeName,
    /// The volume; `None` only where a whole node is named (`byway ls`).
    pub volume: Option<VolumeName>,
    /// Over TLS, or not at all.
    pub tls: bool,
}

impl FromStr for ResourceName {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let bad = || AddressError::Resource(text.to_owned());
        let (scheme, rest) = text.split_once("://").ok_or_else(bad)?;
        let (wire, transport) = scheme.split_once('+').map_or((scheme, None), |(wire, how)| (wire, Some(how)));
        let tls = match wire {
            "byway" => false,
            "byways" => true,
            _ => return Err(bad()),
        };
        let (rest, query) = rest.split_once('?').map_or((rest, None), |(rest, query)| (rest, Some(query)));
        let (authority, name) = rest.split_once('/').unwrap_or((rest, ""));
        let node = match transport {
            None => {
                let (host, port) = host_port(authority, BYWAY_PORT).ok_or_else(|| bad_host_port(authority, bad()))?;
                match query {
                    None => NodeName::Tcp { host, port, via: None },
                    Some("via=tcp") => NodeName::Tcp { host, port, via: Some(Via::Tcp) },
                    Some("via=rdma") => NodeName::Rdma { host, port },
                    Some(query) => return Err(AddressError::Query(query.to_owned())),
                }
            }
            Some("rdma") => {
                if let Some(query) = query {
                    return Err(AddressError::Query(query.to_owned()));
                }
                let (host, port) = host_port(authority, BYWAY_PORT).ok_or_else(|| bad_host_port(authority, bad()))?;
                NodeName::Rdma { host, port }
            }
            Some(how @ ("unix" | "shm")) => {
                let path = query.filter(|_| authority.is_empty()).and_then(socket_path);
                let path = path.ok_or_else(|| AddressError::Socket(text.to_owned()))?;
                if how == "shm" { NodeName::Shared(path) } else { NodeName::Unix(path) }
            }
            Some(_) => return Err(bad()),
        };
        if tls && matches!(node, NodeName::Rdma { .. }) {
            return Err(AddressError::RdmaTls);
        }
        let volume = if name.is_empty() { None } else { Some(VolumeName::new(name)?) };
        Ok(Self { node, volume, tls })
    }
}

/// The path in `socket=PATH`, percent-decoded.
fn socket_path(query: &str) -> Option<PathBuf> {
    let path = query.strip_prefix("socket=").filter(|path| !path.contains('&'))?;
    let path = percent::decode(path).filter(|path| is_socket_path(path))?;
    Some(OsString::from_vec(path).into())
}

impl fmt::Display for ResourceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.tls { "byways" } else { "byway" })?;
        match &self.node {
            NodeName::Tcp { host, .. } if host.contains(':') => write!(f, "://[{host}]")?,
            NodeName::Tcp { host, .. } => write!(f, "://{host}")?,
            NodeName::Rdma { host, .. } if host.contains(':') => write!(f, "+rdma://[{host}]")?,
            NodeName::Rdma { host, .. } => write!(f, "+rdma://{host}")?,
            NodeName::Unix(_) => f.write_str("+unix://")?,
            NodeName::Shared(_) => f.write_str("+shm://")?,
        }
        if let NodeName::Tcp { port, .. } | NodeName::Rdma { port, .. } = self.node
            && port != BYWAY_PORT
        {
            write!(f, ":{port}")?;
        }
        write!(f, "/{}", self.volume.as_ref().map_or("", VolumeName::as_str))?;
        match &self.node {
            NodeName::Tcp { via: Some(Via::Tcp), .. } => f.write_str("?via=tcp"),
            NodeName::Tcp { via: None, .. } | NodeName::Rdma { .. } => Ok(()),
            NodeName::Unix(path) | NodeName::Shared(path) => {
                f.write_str("?socket=")?;
                percent::encode(f, path.as_os_str().as_bytes())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16) -> Listen {
        Listen::Tcp { host: host.to_owned(), port }
    }

    #[test]
    fn listeners_are_read_and_written() {
        assert_eq!(Listen::parse("tcp://127.0.0.1:10", 1), Ok(tcp("127.0.0.1", 10)));
        assert_eq!(Listen::parse("tcp://host.example", 4711), Ok(tcp("host.example", 4711)));
        assert_eq!(Listen::parse("tcp://[::1]:10", 1), Ok(tcp("::1", 10)));
        let place = |path: &str, mode, group: Option<&str>| SocketPlace {
            path: path.into(),
            mode,
            group: group.map(str::to_owned),
        };
        for (text, socket) in [
            ("unix:///run/x.sock", place("/run/x.sock", None, None)),
            ("unix:///x,mode=0660,group=disk", place("/x", Some(0o660), Some("disk"))),
            ("unix:///a\\,b\\\\,group=6", place("/a,b\\", None, Some("6"))),
        ] {
            assert_eq!(Listen::parse(text, 1), Ok(Listen::Unix(socket)));
            assert_eq!(Listen::parse(text, 1).unwrap().to_string(), text);
        }
        assert_eq!(Listen::parse("shm:///x,mode=600", 1), Ok(Listen::Shared(place("/x", Some(0o600), None))));
        let others = ["unix:///run/x.sock", "shm:///run/x.sock", "rdma://10.0.0.1:4711", "rdma://[fd00::1]:7"];
        for text in ["tcp://127.0.0.1:10", "tcp://[::1]:10"].into_iter().chain(others) {
            assert_eq!(Listen::parse(text, 1).unwrap().to_string(), text);
        }
    }

    #[test]
    fn bad_listeners_say_what_to_write() {
        assert_eq!(Listen::parse("tcp://h:70000", 1), Err(AddressError::Port("70000".to_owned())));
        for bad in ["tcp://", "tcp://:1", "tcp://h:", "tcp://h:+1", "tcp://::1:5", "tcp://[::1]5"] {
            assert!(matches!(Listen::parse(bad, 1), Err(AddressError::HostPort(_))), "{bad}");
        }
        assert!(matches!(Listen::parse("127.0.0.1:1", 1), Err(AddressError::Scheme(_))));
        for bad in ["mode=", "mode=7", "mode=8888", "mode=4755", "mode=0o660", "mode=660,mode=660", "group=", "x", ""] {
            let bad = format!("unix:///x,{bad}");
            assert!(matches!(Listen::parse(&bad, 1), Err(AddressError::SocketOption(_))), "{bad}");
        }
        assert!(matches!(Listen::parse("unix://run/x", 1), Err(AddressError::UnixPath(_))));
        assert!(matches!(Listen::parse(&format!("unix:///{}", "x".repeat(107)), 1), Err(AddressError::UnixPath(_))));
    }

    #[test]
    fn resources_are_read_and_written() {
        for text in ["byway://h/disk", "byway://h:1/disk?via=tcp", "byway://[::1]/d", "byway://h/"] {
            assert_eq!(text.parse::<ResourceName>().unwrap().to_string(), text);
        }
        let node = "byway://h".parse::<ResourceName>().unwrap().node;
        assert_eq!(node, NodeName::Tcp { host: "h".to_owned(), port: BYWAY_PORT, via: None });
        for text in ["byway+rdma://h/disk", "byway+rdma://10.0.0.1:7/d", "byway+rdma://[fd00::1]/"] {
            let name: ResourceName = text.parse().unwrap();
            assert!(matches!(name.node, NodeName::Rdma { .. }));
            assert_eq!(name.to_string(), text);
        }
        let via = "byway://h:7/d?via=rdma".parse::<ResourceName>().unwrap();
        assert_eq!(via.to_string(), "byway+rdma://h:7/d");
        for tls in ["byways+rdma://h/d", "byways://h/d?via=rdma"] {
            assert_eq!(tls.parse::<ResourceName>(), Err(AddressError::RdmaTls));
        }
        assert!(matches!("byway+rdma://h/a?via=tcp".parse::<ResourceName>(), Err(AddressError::Query(_))));
        assert!(matches!("byway://h/a?via=x".parse::<ResourceName>(), Err(AddressError::Query(_))));
        assert!(matches!("byway://h/a/b".parse::<ResourceName>(), Err(AddressError::Name(_))));
        assert!(matches!("byway:///a".parse::<ResourceName>(), Err(AddressError::Resource(_))));
    }

    #[test]
    fn resources_behind_a_socket_are_read_and_written() {
        for (text, tls, path) in [
            ("byway+unix:///disk?socket=/run/byway.sock", false, "/run/byway.sock"),
            ("byways+unix:///disk?socket=/run/byway.sock", true, "/run/byway.sock"),
            ("byway+shm:///disk?socket=/run/byway.shm", false, "/run/byway.shm"),
            ("byway+unix:///?socket=beside", false, "beside"),
            ("byway+unix:///d?socket=/a%20b%26c%25%23d", false, "/a b&c%#d"),
        ] {
            let name: ResourceName = text.parse().unwrap();
            let make = if text.contains("+shm") { NodeName::Shared } else { NodeName::Unix };
            assert_eq!((name.tls, &name.node), (tls, &make(path.into())));
            assert_eq!(name.to_string(), text);
        }
        let not_text: ResourceName = "byway+unix:///d?socket=/%ff".parse().unwrap();
        assert_eq!(not_text.to_string(), "byway+unix:///d?socket=/%FF");
        let long = format!("byway+unix:///d?socket=/{}", "x".repeat(107));
        for bad in ["", "?socket=", "?socket=/a&via=tcp", "?socket=/%0", "?socket=/%00", "?path=/a"] {
            let bad = format!("byway+unix:///d{bad}");
            assert!(matches!(bad.parse::<ResourceName>(), Err(AddressError::Socket(_))), "{bad}");
        }
        for bad in ["byway+unix://h/d?socket=/a", &long] {
            assert!(matches!(bad.parse::<ResourceName>(), Err(AddressError::Socket(_))), "{bad}");
        }
        assert!(matches!("byway+carrier:///d?socket=/a".parse::<ResourceName>(), Err(AddressError::Resource(_))));
        assert!(matches!("byway+unix:///a/b?socket=/a".parse::<ResourceName>(), Err(AddressError::Name(_))));
    }
}
