//! URIs of a server, or a volume of one: `byway://` and `byway+unix://`, `nbd://` and `nbd+unix://`, and the same with `s`
//! for TLS.

pub mod address;
pub mod nbd;
mod percent;
mod tree;

use std::fmt;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::str::FromStr;
use std::time::Duration;

use byway_reactor::Address;

use self::address::{AddressError, NodeName, ResourceName};
use self::nbd::{NbdAddress, NbdUri, NbdUriError};

pub use self::tree::TreeUri;

/// How long each of several addresses of a host may take to answer.
const PROBE_LIMIT: Duration = Duration::from_secs(3);

/// A server, or a volume of one, and the wire to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemoteUri {
    /// byway's own protocol.
    Native(ResourceName),
    /// NBD.
    Nbd(NbdUri),
}

/// Why a text names nothing remote, or its host cannot be found. Says what to write instead.
#[derive(Debug, thiserror::Error)]
pub enum RemoteUriError {
    /// None of the schemes.
    #[error("invalid address of a server or volume `{0}`; {hint}", hint = scheme_hint(.0))]
    Scheme(String),
    /// A bad native address.
    #[error(transparent)]
    Native(#[from] AddressError),
    /// A bad NBD URI.
    #[error(transparent)]
    Nbd(#[from] NbdUriError),
    /// A path below a share with a bad percent sign.
    #[error("`{0}`: a percent sign in a path must precede two hexadecimal digits; write %25 for a percent sign")]
    Path(String),
    /// TLS without what it is for.
    #[error("over TLS the server's certificate is always checked; leave out tls-verify-peer=0")]
    Unverified,
    /// libnbd's folder of files.
    #[error(
        "certificates are given as flags, not in the address: instead of tls-certificates=DIR give --tls-ca DIR/ca-cert.pem, and \
         --tls-certificate DIR/client-cert.pem with --tls-key DIR/client-key.pem if the server wants one"
    )]
    Folder,
    /// The host is not known.
    #[error("{host}: {source}; check the name, or give an IP address")]
    Unresolved {
        /// Which.
        host: String,
        /// Why.
        source: std::io::Error,
    },
}

/// The schemes, for error messages.
const SCHEMES: [&str; 10] =
    ["byway", "byways", "byway+unix", "byways+unix", "byway+shm", "byway+rdma", "nbd", "nbds", "nbd+unix", "nbds+unix"];

/// What to write instead.
fn scheme_hint(text: &str) -> String {
    let socket = |path: &str| format!("write byway+unix:///NAME?socket={path} or nbd+unix:///EXPORT?socket={path}");
    let Some((scheme, rest)) = text.split_once("://") else {
        if let Some((scheme, rest)) = text.split_once(':')
            && SCHEMES.contains(&scheme)
            && rest.split('/').next().is_some_and(|port| port.parse::<u16>().is_err())
        {
            return format!("write {scheme}://{rest}");
        }
        let is_path = text.starts_with(['/', '.']);
        return if is_path { socket(text) } else { format!("write byway://{text}, or nbd://{text} for an NBD server") };
    };
    match scheme.to_ascii_lowercase().as_str() {
        "tcp" => format!("write byway://{rest}, or nbd://{rest} for an NBD server"),
        "unix" => socket(rest),
        "shm" => format!("write byway+shm:///NAME?socket={rest}"),
        "rdma" => format!("write byway+rdma://{rest}"),
        scheme => {
            let distance = |known: &&str| strsim::damerau_levenshtein(scheme, known);
            match SCHEMES.iter().min_by_key(|known| distance(known)).filter(|known| distance(known) <= 2) {
                Some(known) => format!("write {known}://{rest}"),
                None => {
                    "write byway://HOST/NAME (byways:// for TLS), byway+unix:///NAME?socket=PATH, nbd://HOST/EXPORT \
                         (nbds://) or nbd+unix:///EXPORT?socket=PATH"
                        .to_owned()
                }
            }
        }
    }
}

impl RemoteUri {
    /// Whether a text has the form of a URI, so that it names no file.
    pub fn is_uri(text: &str) -> bool {
        text.split_once("://").is_some_and(|(scheme, _)| {
            !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
        })
    }

    /// Where it is; may ask the network, and waits for it. Of several addresses the first that answers.
    ///
    /// # Errors
    /// [`RemoteUriError::Unresolved`].
    pub fn resolve(&self) -> Result<Address, RemoteUriError> {
        match self {
            Self::Native(name) => match &name.node {
                NodeName::Tcp { host, port, .. } => tcp(host, *port),
                NodeName::Unix(path) => Ok(Address::Unix(path.clone())),
                NodeName::Shared(path) => Ok(Address::Shared(path.clone())),
                NodeName::Rdma { host, port } => rdma(host, *port),
            },
            Self::Nbd(NbdUri { address: NbdAddress::Tcp { host, port }, .. }) => tcp(host, *port),
            Self::Nbd(NbdUri { address: NbdAddress::Unix(path), .. }) => Ok(Address::Unix(path.clone())),
        }
    }

    /// The same with an absolute path of its socket, for a process that changes its directory.
    ///
    /// # Errors
    /// The directory of this process is not to be had.
    pub fn absolute(&self) -> std::io::Result<Self> {
        let mut uri = self.clone();
        let (Self::Native(ResourceName { node: NodeName::Unix(path) | NodeName::Shared(path), .. })
        | Self::Nbd(NbdUri { address: NbdAddress::Unix(path), .. })) = &mut uri
        else {
            return Ok(uri);
        };
        *path = std::path::absolute(&*path)?;
        Ok(uri)
    }

    /// Whether it is to be reached over TLS.
    pub fn wants_tls(&self) -> bool {
        match self {
            Self::Native(name) => name.tls,
            Self::Nbd(uri) => uri.tls,
        }
    }

    /// The name that the server's certificate is for: the host's, unless the address says another. A unix socket is on
    /// this host.
    pub fn host(&self) -> &str {
        match self {
            Self::Native(name) => match &name.node {
                NodeName::Tcp { host, .. } | NodeName::Rdma { host, .. } => host,
                NodeName::Unix(_) | NodeName::Shared(_) => "localhost",
            },
            Self::Nbd(NbdUri { tls_hostname: Some(name), .. }) => name,
            Self::Nbd(NbdUri { address: NbdAddress::Tcp { host, .. }, .. }) => host,
            Self::Nbd(NbdUri { address: NbdAddress::Unix(_), .. }) => "localhost",
        }
    }

    /// The name of the volume, if one is named; the empty one is an NBD server's default export.
    pub fn volume(&self) -> Option<&str> {
        match self {
            Self::Native(name) => name.volume.as_ref().map(AsRef::as_ref),
            Self::Nbd(uri) => Some(&uri.export),
        }
    }

    /// The same server's volume of that name.
    ///
    /// # Errors
    /// If it is no name of a volume.
    pub fn with_volume(&self, volume: &str) -> Result<Self, RemoteUriError> {
        Ok(match self {
            Self::Native(name) => {
                let volume = byway_service::block::spec::VolumeName::new(volume).map_err(AddressError::from)?;
                Self::Native(ResourceName { volume: Some(volume), ..name.clone() })
            }
            Self::Nbd(uri) => Self::Nbd(NbdUri { export: volume.to_owned(), ..uri.clone() }),
        })
    }
}

/// The first address of a host. Which of several has an RDMA device is known to nobody but the network: name the one.
fn rdma(host: &str, port: u16) -> Result<Address, RemoteUriError> {
    all(host, port).map(|found| Address::Rdma(found[0]))
}

/// All addresses of a host, of which there is one at least.
fn all(host: &str, port: u16) -> Result<Vec<SocketAddr>, RemoteUriError> {
    let unresolved = |source| RemoteUriError::Unresolved { host: host.to_owned(), source };
    let found: Vec<SocketAddr> = (host, port).to_socket_addrs().map_err(unresolved)?.collect();
    if found.is_empty() { Err(unresolved(std::io::ErrorKind::NotFound.into())) } else { Ok(found) }
}

fn tcp(host: &str, port: u16) -> Result<Address, RemoteUriError> {
    let found = all(host, port)?;
    let first = &found[0];
    // A name may have addresses of both families, and the server listen on one.
    let answers = |address: &&SocketAddr| TcpStream::connect_timeout(address, PROBE_LIMIT).is_ok();
    let best = if found.len() > 1 { found.iter().find(answers).unwrap_or(first) } else { first };
    Ok(Address::Tcp(*best))
}

impl FromStr for RemoteUri {
    type Err = RemoteUriError;

    fn from_str(text: &str) -> Result<Self, RemoteUriError> {
        let scheme = text.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase()).unwrap_or_default();
        match scheme.as_str() {
            "byway" | "byways" => Ok(Self::Native(text.parse()?)),
            // How the node is reached is none of the wire's business.
            native if native.starts_with("byway+") || native.starts_with("byways+") => Ok(Self::Native(text.parse()?)),
            "nbd" | "nbds" | "nbd+unix" | "nbds+unix" => match text.parse::<NbdUri>() {
                Ok(NbdUri { tls: true, tls_verify_peer: false, .. }) => Err(RemoteUriError::Unverified),
                Ok(uri) => Ok(Self::Nbd(uri)),
                Err(NbdUriError::Parameter(name)) if name == "tls-certificates" => Err(RemoteUriError::Folder),
                Err(error) => Err(error.into()),
            },
            _ => Err(RemoteUriError::Scheme(text.to_owned())),
        }
    }
}

impl fmt::Display for RemoteUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Native(name) => name.fmt(f),
            Self::Nbd(uri) => uri.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wire_has_its_scheme() {
        for (text, tls, host) in [
            ("byway://h/disk", false, "h"),
            ("byways://h/disk", true, "h"),
            ("byway+unix:///disk?socket=/run/x", false, "localhost"),
            ("byways+unix:///disk?socket=/run/x", true, "localhost"),
            ("nbd://h/disk", false, "h"),
            ("nbd://[::1]:7/", false, "::1"),
            ("nbd+unix:///disk?socket=/run/x", false, "localhost"),
            ("nbds://h/disk", true, "h"),
            ("nbds://10.0.0.1/disk?tls-hostname=h", true, "h"),
            ("nbds+unix:///disk?socket=/run/x", true, "localhost"),
        ] {
            let uri: RemoteUri = text.parse().unwrap();
            assert_eq!((uri.to_string().as_str(), uri.wants_tls(), uri.host()), (text, tls, host));
            assert!(RemoteUri::is_uri(text));
        }
        let refused = |text: &str| text.parse::<RemoteUri>().unwrap_err();
        assert!(matches!(refused("nbds://h/x?tls-verify-peer=0"), RemoteUriError::Unverified));
        assert!(matches!(refused("nbds://h/x?tls-certificates=/etc/pki"), RemoteUriError::Folder));
        assert!(matches!("http://h/x".parse::<RemoteUri>(), Err(RemoteUriError::Scheme(_))));
        assert!(!RemoteUri::is_uri("/srv/disk.img") && !RemoteUri::is_uri("a b://c") && !RemoteUri::is_uri("://x"));
    }

    #[test]
    fn what_is_no_address_is_answered_with_one() {
        for (text, hint) in [
            ("127.0.0.1", "write byway://127.0.0.1, or nbd://127.0.0.1 "),
            ("store2:4711/disk", "write byway://store2:4711/disk, or "),
            (
                "/run/byway.sock",
                "byway+unix:///NAME?socket=/run/byway.sock or nbd+unix:///EXPORT?socket=/run/byway.sock",
            ),
            ("byway:127.0.0.1", "write byway://127.0.0.1"),
            ("byway:4711/disk", "write byway://byway:4711/disk, or "),
            ("tcp://127.0.0.1:1", "write byway://127.0.0.1:1, or nbd://127.0.0.1:1 "),
            ("unix:///run/x", "byway+unix:///NAME?socket=/run/x or "),
            ("shm:///run/x", "write byway+shm:///NAME?socket=/run/x"),
            ("rdma://10.0.0.1/d", "write byway+rdma://10.0.0.1/d"),
            ("bywya://h/d", "write byway://h/d"),
            ("ndbs://h/d", "write nbds://h/d"),
            ("http://h/x", "write byway://HOST/NAME"),
            ("byway://h:99999/d", "invalid port `99999`; ports are 0 to 65535"),
            ("nbd://h:99999/d", "`99999` is not a port between 1 and 65535"),
        ] {
            let said = text.parse::<RemoteUri>().unwrap_err().to_string();
            assert!(said.contains(hint), "{said}");
            assert!(!said.contains("does not name a volume"), "{said}");
        }
    }

    #[test]
    fn another_volume_of_the_same_server() {
        let node: RemoteUri = "byway://h:1/".parse().unwrap();
        assert_eq!((node.volume(), node.with_volume("x").unwrap().to_string()), (None, "byway://h:1/x".into()));
        assert!(node.with_volume("a/b").is_err());
        let here: RemoteUri = "byway+unix:///?socket=s".parse().unwrap();
        assert_eq!(
            (here.volume(), here.with_volume("x").unwrap().to_string()),
            (None, "byway+unix:///x?socket=s".into())
        );
        let server: RemoteUri = "nbd+unix:///?socket=s".parse().unwrap();
        assert_eq!(server.with_volume("a b").unwrap().to_string(), "nbd+unix:///a%20b?socket=s");
    }
}
