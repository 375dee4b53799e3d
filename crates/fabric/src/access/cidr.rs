//! Ranges of IP addresses.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// Why a text is no range of addresses. Says what to write instead.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CidrError {
    /// Neither an address nor an address and a number of bits.
    #[error("`{0}` is no range of addresses; write ADDRESS/BITS, for example 10.0.0.0/8 or fd00::/8")]
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
pub struct Cidr {
    network: IpAddr,
    prefix_bits: u8,
}

impl Cidr {
    /// Whether an address lies in it. An IPv4 address that came in over an IPv6 socket (`::ffff:a.b.c.d`) counts as
    /// IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        mask(address.to_canonical(), self.prefix_bits)
            .is_some_and(|masked| masked == self.network && masked.is_ipv4() == self.network.is_ipv4())
    }
}

/// The address with all bits behind the prefix cleared; `None` if it has fewer bits than that.
fn mask(address: IpAddr, prefix_bits: u8) -> Option<IpAddr> {
    let prefix_bits = u32::from(prefix_bits);
    Some(match address {
        IpAddr::V4(v4) => {
            let clear = 32u32.checked_sub(prefix_bits)?;
            IpAddr::V4((v4.to_bits() & u32::MAX.checked_shl(clear).unwrap_or(0)).into())
        }
        IpAddr::V6(v6) => {
            let clear = 128u32.checked_sub(prefix_bits)?;
            IpAddr::V6((v6.to_bits() & u128::MAX.checked_shl(clear).unwrap_or(0)).into())
        }
    })
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let bad = || CidrError::Range(text.to_owned());
        let (address, bits) = text.split_once('/').map_or((text, None), |(address, bits)| (address, Some(bits)));
        let address: IpAddr = address.parse().map_err(|_| bad())?;
        let prefix_bits = match bits {
            Some(bits) if bits.bytes().all(|b| b.is_ascii_digit()) => bits.parse().map_err(|_| bad())?,
            Some(_) => return Err(bad()),
            None if address.is_ipv4() => 32,
            None => 128,
        };
        let network = mask(address, prefix_bits).ok_or_else(bad)?;
        if network != address {
            let meant = Self { network, prefix_bits }.to_string();
            return Err(CidrError::HostBits { given: text.to_owned(), meant });
        }
        Ok(Self { network, prefix_bits })
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.network, self.prefix_bits)
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
