//! Ranges of IP addresses.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;

/// Why a text is no range of addresses. Says what to write instead.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CidrError {
    /// Neither an address nor an address and a number of bits.
    #[error("`{0}` is not a range of addresses; write ADDRESS/BITS, for example 10.0.0.0/8 or fd00::/8")]
    Range(String),
    /// Bits of an address are set behind its prefix.
    #[error("`{given}` has bits set behind its prefix; write {meant}")]
    HostBits {
        /// What was written.
        given: String,
        /// What was probably meant.
        meant: String,
    },
}

/// A range of IP addresses: `10.0.0.0/8`, `fd00::/8`, or one address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Cidr(IpNet);

impl Cidr {
    /// Whether an address lies in it. An IPv4 address that came in over an IPv6 socket (`::ffff:a.b.c.d`) counts as
    /// IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(&address.to_canonical())
    }
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let range: Option<IpNet> = if text.contains('/') {
            text.parse().ok()
        } else {
            text.parse().ok().map(|address: IpAddr| address.into())
        };
        let range = range.ok_or_else(|| CidrError::Range(text.to_owned()))?;
        if range.trunc() != range {
            return Err(CidrError::HostBits { given: text.to_owned(), meant: range.trunc().to_string() });
        }
        Ok(Self(range))
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_contain_what_they_should() {
        let ten: Cidr = "10.0.0.0/8".parse().unwrap();
        assert!(ten.contains("10.255.0.1".parse().unwrap()));
        assert!(ten.contains("::ffff:10.1.2.3".parse().unwrap()), "IPv4 over an IPv6 socket");
        assert!(!ten.contains("11.0.0.1".parse().unwrap()));
        assert!(!ten.contains("a00::".parse().unwrap()), "the same bits in the other family");
        assert!("0.0.0.0/0".parse::<Cidr>().unwrap().contains("1.2.3.4".parse().unwrap()));
        assert!(!"0.0.0.0/0".parse::<Cidr>().unwrap().contains("fd00::1".parse().unwrap()));
        assert!("fd00::/8".parse::<Cidr>().unwrap().contains("fd12::1".parse().unwrap()));
        assert_eq!("::1".parse::<Cidr>().unwrap().to_string(), "::1/128");
    }

    #[test]
    fn bad_ranges_are_refused() {
        for bad in ["", "10.0.0.0/33", "10.0.0.0/", "10.0.0.0/+8", "x/8", "::/129"] {
            assert!(matches!(bad.parse::<Cidr>(), Err(CidrError::Range(_))), "{bad}");
        }
        let error = "10.1.0.0/8".parse::<Cidr>().unwrap_err();
        assert!(error.to_string().ends_with("write 10.0.0.0/8"));
    }
}
