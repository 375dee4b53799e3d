//! IP addresses as the C library has them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use super::verbs::{AF_INET, AF_INET6, SockaddrStorage};

/// `struct sockaddr_in` or `sockaddr_in6`, in the room of the larger `sockaddr_storage`.
pub(super) fn to_storage(address: SocketAddr) -> SockaddrStorage {
    let mut bytes = [0; 128];
    bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
    match address {
        SocketAddr::V4(v4) => {
            bytes[..2].copy_from_slice(&AF_INET.to_ne_bytes());
            bytes[4..8].copy_from_slice(&v4.ip().octets());
        }
        SocketAddr::V6(v6) => {
            bytes[..2].copy_from_slice(&AF_INET6.to_ne_bytes());
            bytes[4..8].copy_from_slice(&v6.flowinfo().to_ne_bytes());
            bytes[8..24].copy_from_slice(&v6.ip().octets());
            bytes[24..28].copy_from_slice(&v6.scope_id().to_ne_bytes());
        }
    }
    SockaddrStorage(bytes)
}

/// The address in `storage`, if it is one of IP.
pub(super) fn from_storage(storage: &SockaddrStorage) -> Option<SocketAddr> {
    let bytes = &storage.0;
    let pair = |at: usize| [bytes[at], bytes[at + 1]];
    let four = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
    let port = u16::from_be_bytes(pair(2));
    match u16::from_ne_bytes(pair(0)) {
        AF_INET => Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::from(four(4))), port)),
        AF_INET6 => {
            let mut octets = [0; 16];
            octets.copy_from_slice(&bytes[8..24]);
            let (flow, scope) = (u32::from_ne_bytes(four(4)), u32::from_ne_bytes(four(24)));
            Some(SocketAddr::V6(SocketAddrV6::new(Ipv6Addr::from(octets), port, flow, scope)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back_as_they_went() {
        for text in ["10.1.2.3:4567", "[fe80::1:2%7]:80", "[::]:0"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(from_storage(&to_storage(address)), Some(address));
        }
        assert_eq!(from_storage(&SockaddrStorage([0; 128])), None);
    }

    #[test]
    fn the_bytes_are_those_of_the_system() {
        let storage = to_storage("1.2.3.4:258".parse().unwrap());
        assert_eq!(storage.0[2..8], [1, 2, 1, 2, 3, 4]);
        assert_eq!(storage.0[..2], AF_INET.to_ne_bytes());
    }
}
