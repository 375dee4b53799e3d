//! `nbd://`, `nbds://`, `nbd+unix://` and `nbds+unix://` (doc/uri.md beside the protocol document).

use std::fmt;
use std::path::PathBuf;

use byway_frontend::limits::NAME_BYTES_MAX;

use super::address::NBD_PORT as PORT;
use super::percent::{self, encode};

/// Where an export is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdUri {
    /// Which socket.
    pub address: NbdAddress,
    /// The export's name, decoded; empty for the default export.
    pub export: String,
    /// Whether the connection must be encrypted (`nbds`, `nbds+unix`). If not, it may be.
    pub tls: bool,
    /// The name that the server's certificate must have, if it is not that of the host.
    pub tls_hostname: Option<String>,
    /// Whether the server's certificate is verified; so by default.
    pub tls_verify_peer: bool,
}

/// The socket of an NBD URI.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NbdAddress {
    /// A host name or address, without the brackets of IPv6, and a port.
    Tcp {
        /// Host.
        host: String,
        /// Port.
        port: u16,
    },
    /// The path of a unix socket; one that starts with a NUL is in the abstract namespace.
    Unix(PathBuf),
}

/// What is wrong with a URI; the user's fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NbdUriError {
    /// Another scheme.
    #[error("`{0}` is not an NBD URI: it must start with nbd://, nbds://, nbd+unix:// or nbds+unix://")]
    Scheme(String),
    /// No host.
    #[error("the URI has no host; write nbd://HOST[:PORT]/EXPORT")]
    NoHost,
    /// The host cannot be one.
    #[error("`{0}` is not a host; an IPv6 address needs brackets")]
    Host(String),
    /// A user name, which only TLS with shared keys would use.
    #[error("user names in NBD URIs are not supported; TLS here is by certificate")]
    User,
    /// Not a port.
    #[error("`{0}` is not a port between 1 and 65535")]
    Port(String),
    /// A unix URI with a host.
    #[error("a unix socket has no host; write nbd+unix:///EXPORT?socket=PATH")]
    UnixHost,
    /// A unix URI without `socket=`.
    #[error("the URI has no socket; write nbd+unix:///EXPORT?socket=PATH")]
    NoSocket,
    /// A percent sign without two hexadecimal digits, or what is decoded is not UTF-8.
    #[error("`{0}` is badly percent-encoded")]
    Encoding(String),
    /// The export's name holds a NUL or is too long.
    #[error("the export name holds a NUL or is longer than {NAME_BYTES_MAX} bytes")]
    Export,
    /// A query parameter that is not known.
    #[error("query parameter `{0}` is not known")]
    Parameter(String),
    /// A value that the parameter does not take, or a parameter given twice.
    #[error("query parameter `{0}` is given twice or has a value that is not supported")]
    Value(String),
}

use NbdUriError as Error;

impl std::str::FromStr for NbdUri {
    type Err = NbdUriError;

    fn from_str(uri: &str) -> Result<NbdUri, NbdUriError> {
        let scheme_error = || Error::Scheme(uri.to_owned());
        let (scheme, rest) = uri.split_once("://").ok_or_else(scheme_error)?;
        let (tls, unix) = match scheme.to_ascii_lowercase().as_str() {
            "nbd" => (false, false),
            "nbds" => (true, false),
            "nbd+unix" => (false, true),
            "nbds+unix" => (true, true),
            _ => return Err(scheme_error()),
        };
        // A fragment is not for the server; RFC 3986, 3.5.
        let rest = rest.split_once('#').map_or(rest, |(front, _)| front);
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
        let export = decode(export)?;
        if export.len() > NAME_BYTES_MAX || export.contains('\0') {
            return Err(Error::Export);
        }
        let parameters = Parameters::parse(query, unix)?;
        let address = match (unix, parameters.socket) {
            (true, _) if !authority.is_empty() => return Err(Error::UnixHost),
            (true, None) => return Err(Error::NoSocket),
            (true, Some(path)) => NbdAddress::Unix(path.into()),
            (false, _) => tcp(authority)?,
        };
        let (tls_hostname, tls_verify_peer) = (parameters.tls_hostname, parameters.tls_verify_peer.unwrap_or(true));
        Ok(NbdUri { address, export, tls, tls_hostname, tls_verify_peer })
    }
}

fn tcp(authority: &str) -> Result<NbdAddress, NbdUriError> {
    if authority.contains('@') {
        return Err(Error::User);
    }
    let (host, port) = if let Some(rest) = authority.strip_prefix('[') {
        let (host, port) = rest.split_once(']').ok_or_else(|| Error::Host(authority.to_owned()))?;
        let address = host.parse::<std::net::Ipv6Addr>();
        address.map_err(|_| Error::Host(authority.to_owned()))?;
        (host.to_owned(), port.strip_prefix(':').or(port.is_empty().then_some("")))
    } else {
        let (host, port) = authority.split_once(':').unwrap_or((authority, ""));
        (decode(host)?, Some(port))
    };
    let port = port.ok_or_else(|| Error::Host(authority.to_owned()))?;
    if host.is_empty() {
        return Err(Error::NoHost);
    }
    if host.contains(['\0', '/', '[', ']']) {
        return Err(Error::Host(host));
    }
    let port = match port {
        "" => PORT,
        digits => match digits.parse::<u16>() {
            Ok(port) if port != 0 && digits.bytes().all(|byte| byte.is_ascii_digit()) => port,
            _ => return Err(Error::Port(digits.to_owned())),
        },
    };
    Ok(NbdAddress::Tcp { host, port })
}

#[derive(Default)]
struct Parameters {
    socket: Option<String>,
    tls_hostname: Option<String>,
    tls_verify_peer: Option<bool>,
    tls_type: Option<()>,
}

impl Parameters {
    fn parse(query: &str, unix: bool) -> Result<Parameters, NbdUriError> {
        let mut parameters = Parameters::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let (key, value) = (decode(key)?, decode(value)?);
            let refused = || Error::Value(key.clone());
            let repeated = match key.as_str() {
                "socket" if unix && !value.is_empty() => parameters.socket.replace(value).is_some(),
                "tls-hostname" if !value.is_empty() => parameters.tls_hostname.replace(value).is_some(),
                "tls-verify-peer" => {
                    let verify = match value.as_str() {
                        "0" => false,
                        "1" => true,
                        _ => return Err(refused()),
                    };
                    parameters.tls_verify_peer.replace(verify).is_some()
                }
                "tls-type" if value == "x509" => parameters.tls_type.replace(()).is_some(),
                "socket" | "tls-hostname" | "tls-type" => return Err(refused()),
                // Experiments of others; nothing here depends on them.
                key if key.starts_with("x-") => false,
                _ => return Err(Error::Parameter(key)),
            };
            if repeated {
                return Err(refused());
            }
        }
        Ok(parameters)
    }
}

fn decode(text: &str) -> Result<String, NbdUriError> {
    let bytes = percent::decode(text).and_then(|bytes| String::from_utf8(bytes).ok());
    bytes.ok_or_else(|| Error::Encoding(text.to_owned()))
}

impl fmt::Display for NbdUri {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(if self.tls { "nbds" } else { "nbd" })?;
        let mut separator = '?';
        match &self.address {
            NbdAddress::Tcp { host, port } => {
                formatter.write_str("://")?;
                if host.contains(':') {
                    write!(formatter, "[{host}]")?;
                } else {
                    encode(formatter, host.as_bytes())?;
                }
                if *port != PORT {
                    write!(formatter, ":{port}")?;
                }
                formatter.write_str("/")?;
                encode(formatter, self.export.as_bytes())?;
            }
            NbdAddress::Unix(path) => {
                formatter.write_str("+unix:///")?;
                encode(formatter, self.export.as_bytes())?;
                formatter.write_str("?socket=")?;
                encode(formatter, path.as_os_str().as_encoded_bytes())?;
                separator = '&';
            }
        }
        if let Some(name) = &self.tls_hostname {
            write!(formatter, "{separator}tls-hostname=")?;
            encode(formatter, name.as_bytes())?;
            separator = '&';
        }
        if !self.tls_verify_peer {
            write!(formatter, "{separator}tls-verify-peer=0")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(uri: &str) -> Result<NbdUri, NbdUriError> {
        uri.parse()
    }

    #[test]
    fn the_examples_of_the_document() {
        for (uri, export) in [
            ("nbd://example.com/disk", "disk"),
            ("nbd+unix:///disk?socket=sock", "disk"),
            ("nbd://example.com/", ""),
            ("nbd://example.com", ""),
            ("nbd://example.com//disk", "/disk"),
            ("nbd://example.com/hello%20world", "hello world"),
        ] {
            assert_eq!(parse(uri).unwrap().export, export, "{uri}");
        }
        let abstract_socket = parse("nbd+unix:///?socket=%00/abstract").unwrap();
        assert_eq!(abstract_socket.address, NbdAddress::Unix("\0/abstract".into()));
    }

    #[test]
    fn hosts_and_ports() {
        let tcp = |host: &str, port| NbdAddress::Tcp { host: host.into(), port };
        assert_eq!(parse("nbd://a").unwrap().address, tcp("a", PORT));
        assert_eq!(parse("NBDS://a:1/x").unwrap().address, tcp("a", 1));
        assert_eq!(parse("nbd://[::1]/x").unwrap().address, tcp("::1", PORT));
        assert_eq!(parse("nbd://[::1]:7/x").unwrap().address, tcp("::1", 7));
        assert!(parse("nbds://a").unwrap().tls);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let error = |uri: &str| parse(uri).unwrap_err();
        assert!(matches!(error("http://a/"), Error::Scheme(_)));
        assert!(matches!(error("disk"), Error::Scheme(_)));
        assert_eq!(error("nbd:///disk"), Error::NoHost);
        assert!(matches!(error("nbd://::1/"), Error::Host(_) | Error::NoHost));
        assert!(matches!(error("nbd://[::1/"), Error::Host(_)));
        assert!(matches!(error("nbd://[::1]7/"), Error::Host(_)));
        assert_eq!(error("nbd://me@a/"), Error::User);
        for port in ["0", "65536", "x", "+1", "-1"] {
            assert_eq!(error(&format!("nbd://a:{port}/")), Error::Port(port.into()));
        }
        assert_eq!(error("nbd+unix:///disk"), Error::NoSocket);
        assert_eq!(error("nbd+unix://host/disk?socket=s"), Error::UnixHost);
        assert!(matches!(error("nbd://a/%2"), Error::Encoding(_)));
        assert!(matches!(error("nbd://a/%+1"), Error::Encoding(_)));
        assert!(matches!(error("nbd://a/%ff"), Error::Encoding(_)));
        assert_eq!(error("nbd://a/%00"), Error::Export);
        assert_eq!(error("nbd://a/?colour=red"), Error::Parameter("colour".into()));
        assert_eq!(error("nbd://a/?socket=s"), Error::Value("socket".into()));
        assert_eq!(error("nbd://a/?tls-type=psk"), Error::Value("tls-type".into()));
        assert_eq!(error("nbd+unix:///?socket=a&socket=b"), Error::Value("socket".into()));
    }

    #[test]
    fn tls_parameters() {
        let uri = parse("nbds+unix:///d?socket=s&tls-hostname=h&tls-verify-peer=0&tls-type=x509&x-y=1").unwrap();
        assert_eq!((uri.tls, uri.tls_hostname.as_deref(), uri.tls_verify_peer), (true, Some("h"), false));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(
            export in "[^\0]{0,40}", host in "[a-z0-9.-]{1,20}|::1", port in 1u16..,
            socket in "\\PC{1,30}", unix in any::<bool>(), tls in any::<bool>(),
            tls_hostname in prop::option::of("\\PC{1,20}"), tls_verify_peer in any::<bool>(),
        ) {
            let address = if unix { NbdAddress::Unix(socket.into()) } else { NbdAddress::Tcp { host, port } };
            let uri = NbdUri { address, export, tls, tls_hostname, tls_verify_peer };
            prop_assert_eq!(parse(&uri.to_string()), Ok(uri));
        }

        #[test]
        fn any_text_is_survived(text in "(nbd|nbds|nbd\\+unix)://\\PC{0,60}|\\PC{0,60}") {
            let _ = parse(&text);
        }
    }
}
