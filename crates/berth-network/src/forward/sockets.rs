//! Whether anybody listens at an address, from the kernel's tables of sockets: asking by a connection would be noticed.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use super::Protocol;

/// What is found at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Listening {
    /// A socket at this very address.
    There,
    /// A socket at all addresses.
    Everywhere,
    Nobody,
}

/// The state of a TCP socket that listens, and of a UDP socket without a peer.
const LISTEN: &str = "0A";
const UNCONNECTED: &str = "07";

/// Who listens where, as it was at one moment: the addresses by port, all addresses as `0.0.0.0`.
#[derive(Debug, Default)]
pub(super) struct Listeners {
    tcp: HashMap<u16, Vec<Ipv4Addr>>,
    udp: HashMap<u16, Vec<Ipv4Addr>>,
}

impl Listeners {
    /// Reads the tables, which takes a while on a machine with many sockets.
    pub(super) fn read() -> io::Result<Self> {
        Ok(Self {
            tcp: read(["/proc/net/tcp", "/proc/net/tcp6"], LISTEN)?,
            udp: read(["/proc/net/udp", "/proc/net/udp6"], UNCONNECTED)?,
        })
    }

    /// Whether somebody listens at an address.
    pub(super) fn at(&self, protocol: Protocol, at: SocketAddr) -> Listening {
        let SocketAddr::V4(at) = at else { return Listening::Nobody };
        let by_port = match protocol {
            Protocol::Tcp => &self.tcp,
            Protocol::Udp => &self.udp,
        };
        let known = by_port.get(&at.port()).map(Vec::as_slice).unwrap_or_default();
        if known.contains(at.ip()) {
            Listening::There
        } else if known.contains(&Ipv4Addr::UNSPECIFIED) {
            Listening::Everywhere
        } else {
            Listening::Nobody
        }
    }
}

fn read(tables: [&str; 2], state: &str) -> io::Result<HashMap<u16, Vec<Ipv4Addr>>> {
    let mut found: HashMap<u16, Vec<Ipv4Addr>> = HashMap::new();
    for table in tables {
        let text = match std::fs::read_to_string(table) {
            Ok(text) => text,
            // A kernel without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        for (address, port) in text.lines().skip(1).filter_map(|line| listener(line, state)) {
            found.entry(port).or_default().push(address);
        }
    }
    Ok(found)
}

/// The socket of one line of a table, `sl local_address rem_address st …`, if it is in a state and has an IPv4 address or all
/// addresses. Addresses are in hexadecimal as the processor has them in memory.
fn listener(line: &str, state: &str) -> Option<(Ipv4Addr, u16)> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let (local, _, known) = (words.next()?, words.next()?, words.next()?);
    let (address, port) = local.split_once(':').filter(|_| known == state)?;
    let (prefix, last) = address.split_at_checked(address.len().checked_sub(8)?)?;
    let mapped = format!("0000000000000000{:08X}", u32::from_ne_bytes([0, 0, 0xff, 0xff]));
    let last = Ipv4Addr::from(u32::from_str_radix(last, 16).ok()?.to_ne_bytes());
    let is_all = prefix.bytes().all(|byte| byte == b'0') && last.is_unspecified();
    let is_v4 = prefix.is_empty() || prefix == mapped;
    (is_all || is_v4).then_some((last, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, UdpSocket};

    use super::*;

    fn listening(protocol: Protocol, at: SocketAddr) -> io::Result<Listening> {
        Ok(Listeners::read()?.at(protocol, at))
    }

    #[test]
    fn the_kernel_says_who_listens() {
        let there = TcpListener::bind("127.1.2.3:0").unwrap();
        let at = there.local_addr().unwrap();
        assert_eq!(listening(Protocol::Tcp, at).unwrap(), Listening::There);
        let elsewhere = SocketAddr::from(([127, 1, 2, 4], at.port()));
        assert_eq!(listening(Protocol::Tcp, elsewhere).unwrap(), Listening::Nobody);
        drop(there);
        assert_eq!(listening(Protocol::Tcp, at).unwrap(), Listening::Nobody);
        let everywhere = TcpListener::bind("0.0.0.0:0").unwrap();
        let at = SocketAddr::from(([127, 1, 2, 3], everywhere.local_addr().unwrap().port()));
        assert_eq!(listening(Protocol::Tcp, at).unwrap(), Listening::Everywhere);
        let datagrams = UdpSocket::bind("127.1.2.3:0").unwrap();
        assert_eq!(listening(Protocol::Udp, datagrams.local_addr().unwrap()).unwrap(), Listening::There);
        if let Ok(both) = TcpListener::bind("[::]:0") {
            let at = SocketAddr::from(([127, 1, 2, 3], both.local_addr().unwrap().port()));
            assert_eq!(listening(Protocol::Tcp, at).unwrap(), Listening::Everywhere);
        }
    }
    #[test]
    fn lines_of_the_kernel_are_read() {
        if cfg!(target_endian = "big") {
            return;
        }
        let line =
            |local: &str, state: &str| format!("   0: {local} 00000000:0000 {state} 00000000:00000000 00");
        for (local, state, expected) in [
            ("0302017F:0050", "0A", Some(([127, 1, 2, 3], 80))),
            ("00000000:1F90", "0A", Some(([0, 0, 0, 0], 8080))),
            ("00000000000000000000000000000000:0050", "0A", Some(([0, 0, 0, 0], 80))),
            ("0000000000000000FFFF00000302017F:0050", "0A", Some(([127, 1, 2, 3], 80))),
            ("00000000000000000000000001000000:0050", "0A", None),
            ("0302017F:0050", "01", None),
            ("17F:0050", "0A", None),
            ("odd", "0A", None),
        ] {
            let expected = expected.map(|(address, port)| (Ipv4Addr::from(address), port));
            assert_eq!(listener(&line(local, state), LISTEN), expected, "{local} {state}");
        }
        assert_eq!(listener("", LISTEN), None);
    }
}
