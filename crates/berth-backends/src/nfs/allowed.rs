//! Which NFS servers the driver may speak to.
//!
//! A pod's inline volume, a PersistentVolume and a class each name a server, and the driver would reach it from the
//! network of the node. An operator limits that by a list of names, addresses and networks.
//!
//! A name is allowed only by a name on the list: what a name resolves to may change between a check and its use.

use std::{fmt, net::IpAddr, str::FromStr};

use berth_core::Network;

use crate::{Error, Result};

/// The servers that the driver may speak to; by default all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowedServers(Vec<AllowedServer>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum AllowedServer {
    /// Addresses whose first bits are these.
    Network(Network),
    /// A name, in lower case.
    Name(String),
    /// Every name below this one, in lower case.
    Below(String),
}

impl AllowedServers {
    /// Reads entries: a name, `*.` and a name, an address, or a network such as `10.0.0.0/8`. No entries allow every
    /// server.
    pub fn parse<S: AsRef<str>>(entries: impl IntoIterator<Item = S>) -> Result<Self> {
        let entries = entries.into_iter().map(|entry| entry.as_ref().trim().parse());
        entries.collect::<Result<_>>().map(Self)
    }

    /// Refuses a server that is not on the list.
    pub(super) fn check(&self, server: &str) -> Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        let name = server.trim_start_matches('[').trim_end_matches(']');
        let address = name.parse::<IpAddr>().ok();
        let name = name.trim_end_matches('.').to_ascii_lowercase();
        let is_allowed = self.0.iter().any(|allowed| match (allowed, address) {
            (AllowedServer::Network(network), Some(address)) => network.contains(address),
            (AllowedServer::Name(allowed), None) => *allowed == name,
            (AllowedServer::Below(suffix), None) => {
                name.strip_suffix(suffix.as_str()).is_some_and(|rest| rest.ends_with('.') && rest.len() > 1)
            }
            _ => false,
        });
        if is_allowed {
            return Ok(());
        }
        Err(Error::Denied(format!("NFS server {server:?} is not among --allowed-servers ({self})")))
    }

    /// Refuses mount options that lead to a server that is not on the list.
    pub(super) fn check_options(&self, options: &[String]) -> Result<()> {
        let options = options.iter().flat_map(|text| text.split(',')).map(str::trim);
        let mut servers = options.filter_map(|option| {
            let (key, value) = option.split_once('=')?;
            matches!(key, "addr" | "mountaddr" | "mounthost").then_some(value)
        });
        servers.try_for_each(|server| self.check(server))
    }
}

impl FromStr for AllowedServer {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let invalid = || {
            Error::Invalid(format!(
                "--allowed-servers: {text:?} is none of a name (nfs.example.com, *.example.com), an address and a \
                 network (10.0.0.0/8)"
            ))
        };
        if let Ok(network) = text.parse() {
            return Ok(Self::Network(network));
        }
        let (name, below) = text.strip_prefix("*.").map_or((text, false), |name| (name, true));
        let name = name.trim_end_matches('.').to_ascii_lowercase();
        let is_label = |label: &str| {
            !label.is_empty()
                && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
        };
        if !name.split('.').all(is_label) {
            return Err(invalid());
        }
        Ok(if below { Self::Below(name) } else { Self::Name(name) })
    }
}

impl fmt::Display for AllowedServers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, allowed) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str(", ")?;
            }
            match allowed {
                AllowedServer::Network(network) => write!(f, "{network}")?,
                AllowedServer::Name(name) => f.write_str(name)?,
                AllowedServer::Below(name) => write!(f, "*.{name}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_allowed_by_name_address_or_network() {
        let allowed =
            AllowedServers::parse(["nfs.svc", "*.example.com", "192.0.2.7", "10.0.0.0/8", "2001:db8::/32"])
                .unwrap();
        for server in [
            "nfs.svc",
            "NFS.svc.",
            "a.example.com",
            "a.b.Example.com",
            "192.0.2.7",
            "10.255.0.1",
            "::ffff:10.1.2.3",
            "2001:db8:1::1",
            "[2001:db8::1]",
        ] {
            assert!(allowed.check(server).is_ok(), "{server}");
        }
        for server in [
            "nfs",
            "nfs.svc.evil",
            "example.com",
            "evilexample.com",
            ".example.com",
            "192.0.2.8",
            "11.0.0.1",
            "2001:db9::1",
            "169.254.169.254",
            "::ffff:11.1.2.3",
            "10.0.0.1.example.org",
            "0x0a000001",
            "167772161",
        ] {
            let Err(Error::Denied(sentence)) = allowed.check(server) else { panic!("{server}") };
            assert!(sentence.contains(server) && sentence.contains("--allowed-servers"), "{sentence}");
        }
    }

    #[test]
    fn no_list_allows_every_server_and_an_odd_entry_is_refused() {
        assert!(AllowedServers::default().check("anything").is_ok());
        assert!(AllowedServers::parse(["0.0.0.0/0"]).unwrap().check("192.0.2.1").is_ok());
        for entry in ["", "10.0.0.0/33", "10.0.0/8", "::/129", "a..b", "*", "nfs:/export", "a b", "*.*.com"] {
            assert!(matches!(AllowedServers::parse([entry]), Err(Error::Invalid(_))), "{entry:?}");
        }
    }

    #[test]
    fn mount_options_lead_to_no_other_server() {
        let allowed = AllowedServers::parse(["10.0.0.0/8"]).unwrap();
        let options = |text: &str| [text.to_owned()];
        assert!(allowed.check_options(&options("hard,mountaddr=10.1.2.3,port=2049")).is_ok());
        assert!(allowed.check_options(&options("hard, mountaddr=192.0.2.1")).is_err());
        assert!(allowed.check_options(&options("mounthost=evil")).is_err());
    }
}
