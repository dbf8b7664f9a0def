//! Networks: which addresses somebody may come from, or may be reached at.

use std::{fmt, net::IpAddr, str::FromStr};

/// The addresses that begin with the same bits: an address alone, or a network such as `10.0.0.0/8`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    bits: u8,
}

/// What is neither an address nor a network.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither an address nor a network such as 10.0.0.0/8")]
pub struct InvalidNetwork(String);

impl Network {
    /// Whether an address begins with the bits of this network. An IPv4 address that is written as IPv6 is the same.
    pub fn contains(&self, address: IpAddr) -> bool {
        let differ = match (self.address, address.to_canonical()) {
            (IpAddr::V4(network), IpAddr::V4(address)) => {
                u128::from(network.to_bits() ^ address.to_bits()) << (u128::BITS - u32::BITS)
            }
            (IpAddr::V6(network), IpAddr::V6(address)) => network.to_bits() ^ address.to_bits(),
            _ => return false,
        };
        differ.leading_zeros() >= u32::from(self.bits)
    }
}

impl FromStr for Network {
    type Err = InvalidNetwork;

    fn from_str(text: &str) -> Result<Self, InvalidNetwork> {
        let invalid = || InvalidNetwork(text.to_owned());
        let longest = |address: IpAddr| if address.is_ipv4() { 32 } else { 128 };
        let bare = text.trim_start_matches('[').trim_end_matches(']');
        if let Ok(address) = bare.parse::<IpAddr>() {
            let address = address.to_canonical();
            return Ok(Self { address, bits: longest(address) });
        }
        let (address, bits) = text.split_once('/').ok_or_else(invalid)?;
        let address: IpAddr = address.parse().map_err(|_| invalid())?;
        let bits: u8 = bits.parse().map_err(|_| invalid())?;
        if bits <= longest(address) { Ok(Self { address, bits }) } else { Err(invalid()) }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_holds_the_addresses_that_begin_as_it_does() {
        for (network, inside, outside) in [
            ("10.0.0.0/8", "10.255.0.1", "11.0.0.1"),
            ("192.0.2.7", "192.0.2.7", "192.0.2.6"),
            ("2001:db8::/32", "2001:db8:1::1", "2001:db9::1"),
            ("127.0.0.0/8", "::ffff:127.0.0.1", "::1"),
            ("0.0.0.0/0", "192.0.2.1", "::1"),
        ] {
            let parsed: Network = network.parse().unwrap();
            assert!(parsed.contains(inside.parse().unwrap()), "{network} {inside}");
            assert!(!parsed.contains(outside.parse().unwrap()), "{network} {outside}");
        }
        for bad in ["", "10.0.0.0/33", "10.0.0/8", "::/129", "nfs.example.com", "10.0.0.0/", "/8"] {
            assert!(bad.parse::<Network>().is_err(), "{bad}");
        }
    }
}
