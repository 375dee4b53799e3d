//! Admission of clients: a listener that other machines can reach is refused unless it authenticates its clients.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use byway_reactor::Address;
use rustix::net::AddressFamily;

use crate::address::{Cidr, Listen};

/// Whether clients show certificates, over TLS.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, serde::Deserialize, serde::Serialize, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum ClientAuthentication {
    /// The node asks for no certificate.
    #[default]
    Off,
    /// A client may present one; an invalid one is refused.
    Optional,
    /// Every client must present one.
    Required,
}

/// Why a listener is refused. Says what to do.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    /// Reachable by others, and nothing says by whom.
    #[error(
        "{0} can be reached by other machines, and clients need no certificate there; give --tls-certificate, \
         --tls-key and --tls-client-ca, or --allow CIDR together with --insecure"
    )]
    Open(Address),
    /// `--allow` without `--insecure`.
    #[error(
        "{0} would be open to the --allow ranges without certificates, and addresses can be forged; add --insecure \
         to accept that, or give --tls-client-ca"
    )]
    AllowAlone(Address),
    /// `--insecure` without `--allow`.
    #[error("--insecure alone would open {0} to every address; add --allow CIDR")]
    InsecureAlone(Address),
}

/// A listener of a node, by the address that it is bound to. Start-up and each reload judge the same one: a name may
/// resolve to something else later, or, once the node is confined, not at all.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Guarded {
    /// The listener's origin.
    pub origin: Origin,
    /// Where it is.
    pub address: Address,
}

/// The origin of a listener.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Origin {
    /// The configuration, in these words.
    Configured(Listen),
    /// The service manager, which opened it (socket activation).
    Inherited,
}

impl Guarded {
    /// A socket that the service manager passed on.
    ///
    /// # Errors
    /// The kernel's; `InvalidInput` if it is neither TCP nor a unix socket: nothing could tell who comes in there.
    pub fn inherited(socket: &OwnedFd) -> std::io::Result<Self> {
        let name = rustix::net::getsockname(socket)?;
        let address = match name.address_family() {
            AddressFamily::UNIX => Address::Unix("(inherited)".into()),
            AddressFamily::INET | AddressFamily::INET6 => Address::Tcp(SocketAddr::try_from(name)?),
            family => {
                let message = format!(
                    "a passed socket is of address family {}; pass TCP and unix stream sockets only",
                    family.as_raw()
                );
                return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, message));
            }
        };
        Ok(Self { origin: Origin::Inherited, address })
    }
}

/// Whether a listener may be opened, if clients there show `clients`. Loopback and unix sockets may always; a wider
/// address needs TLS with client certificates, or `--allow` together with `--insecure`.
///
/// # Errors
/// The reason for the refusal.
pub fn admissible(
    listener: &Address,
    clients: ClientAuthentication,
    allow: &[Cidr],
    insecure: bool,
) -> Result<(), Refusal> {
    let local = match listener {
        Address::Unix(_) | Address::Shared(_) => true,
        Address::Tcp(address) | Address::Rdma(address) => address.ip().to_canonical().is_loopback(),
    };
    if local || clients == ClientAuthentication::Required {
        return Ok(());
    }
    match (allow.is_empty(), insecure) {
        (false, true) => Ok(()),
        (false, false) => Err(Refusal::AllowAlone(listener.clone())),
        (true, true) => Err(Refusal::InsecureAlone(listener.clone())),
        (true, false) => Err(Refusal::Open(listener.clone())),
    }
}

/// Whether a peer may connect; asked at accept, before a byte is read. An empty list admits every peer: then [`admissible`] has
/// seen to it that there is another guard. Loopback peers are always let in; a unix socket's peers (`None`) are the file
/// permissions' business.
pub fn peer_allowed(peer: Option<IpAddr>, allow: &[Cidr]) -> bool {
    let Some(peer) = peer else { return true };
    allow.is_empty() || peer.to_canonical().is_loopback() || allow.iter().any(|range| range.contains(peer))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(text: &str) -> Address {
        Address::Tcp(text.parse().unwrap())
    }

    #[test]
    fn loopback_and_unix_need_nothing() {
        for local in [tcp("127.0.0.1:1"), tcp("127.9.9.9:1"), tcp("[::1]:1"), Address::Unix("/run/x".into())] {
            assert_eq!(admissible(&local, ClientAuthentication::Off, &[], false), Ok(()));
        }
        assert_eq!(admissible(&tcp("[::ffff:127.0.0.1]:1"), ClientAuthentication::Off, &[], false), Ok(()));
    }

    #[test]
    fn a_wider_listener_needs_certificates_or_both_words() {
        let allow = ["10.0.0.0/8".parse().unwrap()];
        for wide in [tcp("0.0.0.0:1"), tcp("[::]:1"), tcp("192.0.2.1:1")] {
            let ask = |tls, allow: &[Cidr], insecure| admissible(&wide, tls, allow, insecure);
            for tls in [ClientAuthentication::Off, ClientAuthentication::Optional] {
                assert_eq!(ask(tls, &[], false), Err(Refusal::Open(wide.clone())));
                assert_eq!(ask(tls, &allow, false), Err(Refusal::AllowAlone(wide.clone())));
                assert_eq!(ask(tls, &[], true), Err(Refusal::InsecureAlone(wide.clone())));
                assert_eq!(ask(tls, &allow, true), Ok(()));
            }
            assert_eq!(ask(ClientAuthentication::Required, &[], false), Ok(()));
        }
    }

    #[test]
    fn a_passed_socket_is_judged_by_where_it_is() {
        let of = |socket: OwnedFd| Guarded::inherited(&socket).unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = Address::Tcp(listener.local_addr().unwrap());
        assert_eq!(of(listener.into()), Guarded { origin: Origin::Inherited, address: at });
        let (unix, _) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(matches!(of(unix.into()).address, Address::Unix(_)));
        let netlink = rustix::net::socket(AddressFamily::NETLINK, rustix::net::SocketType::DGRAM, None).unwrap();
        assert_eq!(Guarded::inherited(&netlink).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    }

    #[test]
    fn peers_outside_the_ranges_stay_out() {
        let allow = ["10.0.0.0/8".parse().unwrap()];
        let peer = |text: &str| Some(text.parse().unwrap());
        assert!(peer_allowed(peer("10.1.1.1"), &allow));
        assert!(!peer_allowed(peer("11.1.1.1"), &allow));
        assert!(peer_allowed(peer("127.0.0.1"), &allow));
        assert!(peer_allowed(None, &allow));
        assert!(peer_allowed(peer("11.1.1.1"), &[]));
    }
}
