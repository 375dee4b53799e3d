//! Addresses as text: `tcp://IP:PORT`, `unix://PATH`, `shm://PATH`, `rdma://IP:PORT`.

use byway_reactor::Address;

/// A text is no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an address: use tcp://IP:PORT, unix://PATH, shm://PATH or rdma://IP:PORT")]
pub struct AddressError(String);

/// The address that a text names. Names of hosts are not looked up.
///
/// # Errors
/// It names none.
pub fn parse(text: &str) -> Result<Address, AddressError> {
    let wrong = || AddressError(text.to_owned());
    let (scheme, rest) = text.split_once("://").ok_or_else(wrong)?;
    match scheme {
        _ if rest.is_empty() => Err(wrong()),
        "tcp" => rest.parse().map(Address::Tcp).map_err(|_| wrong()),
        "rdma" => rest.parse().map(Address::Rdma).map_err(|_| wrong()),
        "unix" => Ok(Address::Unix(rest.into())),
        "shm" => Ok(Address::Shared(rest.into())),
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_shown() {
        for text in ["tcp://127.0.0.1:4711", "tcp://[::1]:0", "unix:///run/a", "shm:///run/b", "rdma://10.1.1.1:4711"] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
        for text in
            ["", "tcp://", "tcp://localhost:1", "rdma://10.1.1.1", "unix://", "http://127.0.0.1:1", "127.0.0.1:1"]
        {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
