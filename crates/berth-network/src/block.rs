//! The block of loopback addresses that one machine has: its Services and its pods share it, and no other machine of the same
//! network uses it.
//!
//! A block is 127.X.Y.0/18, of which there are about a thousand. Whoever uses one holds a socket of that name, in the abstract
//! namespace, which like the addresses belongs to the network namespace and goes with the process.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::net::Ipv4Addr;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;

/// How many bits of an address name its block, and how many that of the Services in it.
const BLOCK_BITS: u8 = 18;
const SERVICE_BITS: u8 = 21;
/// Blocks are those of 127.1.0.0 to 127.254.192.0: programs use addresses of 127.0 for themselves.
const FIRST: u32 = 1 << 2;
const COUNT: u32 = 254 * 4 - FIRST;
/// The resolver of systemd has this network.
const SYSTEMD: u8 = 53;

/// A block of addresses that nobody else on this machine has while it is held.
#[derive(Debug)]
pub struct Block {
    network: Ipv4Addr,
    _held: UnixListener,
}

/// Why there are no addresses.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// All blocks are others'.
    #[error("all blocks of loopback addresses are taken")]
    Full,
    /// The network namespace allows no sockets.
    #[error("hold the addresses {0}/{BLOCK_BITS}")]
    Hold(Ipv4Addr, #[source] io::Error),
}

impl Block {
    /// Takes the block in which `known` is, an address that was given earlier, unless somebody else has it; else a free one, the
    /// same for the same directory if possible.
    pub fn take(directory: &Path, known: Option<Ipv4Addr>) -> Result<Self, Error> {
        if let Some(known) = known.filter(Ipv4Addr::is_loopback) {
            let network = Ipv4Addr::from(u32::from(known) >> (32 - BLOCK_BITS) << (32 - BLOCK_BITS));
            if let Some(block) = Self::hold(network)? {
                return Ok(block);
            }
        }
        let mut hasher = DefaultHasher::new();
        directory.hash(&mut hasher);
        let first = u32::try_from(hasher.finish() % u64::from(COUNT)).unwrap_or_default();
        for number in (0..COUNT).map(|step| FIRST + (first + step) % COUNT) {
            let network = Ipv4Addr::from((127 << 24) | (number << (32 - BLOCK_BITS)));
            if network.octets()[1] == SYSTEMD {
                continue;
            }
            if let Some(block) = Self::hold(network)? {
                return Ok(block);
            }
        }
        Err(Error::Full)
    }

    fn hold(network: Ipv4Addr) -> Result<Option<Self>, Error> {
        let name = format!("berth-addresses-{network}");
        let bound = SocketAddr::from_abstract_name(name).and_then(|name| UnixListener::bind_addr(&name));
        match bound {
            Ok(held) => Ok(Some(Self { network, _held: held })),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(None),
            Err(error) => Err(Error::Hold(network, error)),
        }
    }

    /// The address of the network of Services, and how many bits name it.
    pub fn services(&self) -> (Ipv4Addr, u8) {
        (self.network, SERVICE_BITS)
    }

    /// The address of the API server's Service.
    pub fn api(&self) -> Ipv4Addr {
        self.nth(1)
    }

    /// The address of the resolver's Service.
    pub fn resolver(&self) -> Ipv4Addr {
        self.nth(10)
    }

    /// The first and the last address for pods.
    pub fn pods(&self) -> (Ipv4Addr, Ipv4Addr) {
        (self.nth((1 << (32 - SERVICE_BITS)) + 1), self.nth((1 << (32 - BLOCK_BITS)) - 2))
    }

    fn nth(&self, index: u32) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.network) + index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_one_machines_while_it_is_held_and_the_same_for_the_same_directory() {
        let directory = tempfile::tempdir().unwrap();
        let one = Block::take(directory.path(), None).unwrap();
        let other = Block::take(directory.path(), None).unwrap();
        assert_ne!(one.network, other.network);
        let (first, last) = one.pods();
        assert!(one.resolver() < first && first < last && last.is_loopback());
        let network = one.network;
        assert_ne!(Block::take(directory.path(), Some(one.api())).unwrap().network, network);
        drop((one, other));
        assert_eq!(Block::take(directory.path(), None).unwrap().network, network);
        let again =
            Block::take(Path::new("/elsewhere"), Some(Ipv4Addr::from(u32::from(network) + 10))).unwrap();
        assert_eq!(again.network, network);
    }
}
