//! Which share, and how to reach it: `server:/path` and mount options.

use std::{fmt, time::Duration};

/// A version of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// NFS 3, by RFC 1813.
    V3,
    /// NFS 4.0, by RFC 7530.
    V4_0,
    /// NFS 4.1, by RFC 8881.
    V4_1,
    /// NFS 4.2, by RFC 7862.
    V4_2,
}

impl Version {
    /// All, the best first.
    pub const ALL: [Self; 4] = [Self::V4_2, Self::V4_1, Self::V4_0, Self::V3];

    /// The number behind the point, if this is a version 4.
    pub(crate) fn minor(self) -> Option<u32> {
        match self {
            Self::V3 => None,
            Self::V4_0 => Some(0),
            Self::V4_1 => Some(1),
            Self::V4_2 => Some(2),
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.minor() {
            None => f.write_str("3"),
            Some(minor) => write!(f, "4.{minor}"),
        }
    }
}

/// An exported directory of a server.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Target {
    /// Name or address; IPv6 with or without brackets.
    pub server: String,
    /// The exported directory, or one below it where version 4 is spoken.
    pub path: String,
    /// How to reach it.
    pub options: Options,
}

/// A server or path that cannot be one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidTarget(pub(crate) String);

impl Target {
    /// A share with the usual options.
    pub fn new(server: impl Into<String>, path: impl Into<String>) -> Self {
        Self { server: server.into(), path: path.into(), options: Options::default() }
    }

    /// Checks server and path, without asking anybody.
    pub fn check(&self) -> Result<(), InvalidTarget> {
        let odd = |c: char| c.is_whitespace() || c.is_control() || c == '/' || c == '#';
        if self.host().is_empty() {
            return Err(InvalidTarget("the NFS server has no name".to_owned()));
        }
        if self.host().contains(odd) {
            return Err(InvalidTarget(format!("{:?} is no name of an NFS server", self.server)));
        }
        if self.path.contains('\0') || self.path.split('/').any(|part| part == "..") {
            return Err(InvalidTarget(format!("the share {:?} leads outside itself", self.path)));
        }
        Ok(())
    }

    /// The server without brackets.
    pub(crate) fn host(&self) -> &str {
        let server = self.server.as_str();
        server.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(server)
    }

    /// The path as servers of version 3 want it: one slash in front, none behind.
    pub(crate) fn absolute(&self) -> String {
        format!("/{}", self.components().collect::<Vec<_>>().join("/"))
    }

    /// The names on the way to the share.
    pub(crate) fn components(&self) -> impl Iterator<Item = &str> {
        self.path.split('/').filter(|part| !part.is_empty() && *part != ".")
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = self.host();
        if host.contains(':') {
            write!(f, "[{host}]:{}", self.absolute())
        } else {
            write!(f, "{host}:{}", self.absolute())
        }
    }
}

/// How to reach a share.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Options {
    /// The versions to try, in this order.
    pub versions: Vec<Version>,
    /// NFS port; asked of the portmapper (version 3) or 2049 without.
    pub port: Option<u16>,
    /// Port of the MOUNT service of version 3; asked of the portmapper without.
    pub mount_port: Option<u16>,
    /// A port below 1024 on our side: `None` takes one where we may.
    pub reserved_port: Option<bool>,
    /// Who we say we are.
    pub uid: u32,
    /// The group id that the server is shown.
    pub gid: u32,
    /// Our further groups; the protocol has room for the first sixteen.
    pub groups: Vec<u32>,
    /// How long the server may be silent before an attempt has failed.
    pub timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            versions: Version::ALL.to_vec(),
            port: None,
            mount_port: None,
            reserved_port: None,
            uid: 0,
            gid: 0,
            groups: Vec::new(),
            timeout: Duration::from_secs(10),
        }
    }
}

/// A mount option that makes no sense, or that this client cannot honour.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidOption(String);

impl Options {
    /// Reads mount options, each string one or several with commas between; those for a kernel's mount are ignored.
    pub fn parse<I>(options: I) -> Result<Self, InvalidOption>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        let mut parsed = Self::default();
        let mut minor = None;
        for list in options {
            for option in list.as_ref().split(',').map(str::trim).filter(|option| !option.is_empty()) {
                parsed.take(option, &mut minor)?;
            }
        }
        if let Some(minor) = minor {
            if parsed.versions != V4 {
                return Err(InvalidOption(format!("minorversion={minor} needs vers=4 beside it")));
            }
            parsed.versions = vec![minor_version(minor)];
        }
        Ok(parsed)
    }

    fn take(&mut self, option: &str, minor: &mut Option<u32>) -> Result<(), InvalidOption> {
        let (key, value) = match option.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (option, None),
        };
        match (key, value) {
            ("vers" | "nfsvers", Some(value)) => self.versions = versions(option, value)?,
            ("v3" | "v4" | "v4.0" | "v4.1" | "v4.2", None) => self.versions = versions(option, &key[1..])?,
            ("minorversion", Some(value)) => match value.parse() {
                Ok(number @ 0..=2) => *minor = Some(number),
                _ => return Err(InvalidOption(format!("{option}: NFS 4 has the minor versions 0, 1 and 2"))),
            },
            ("port", Some(value)) => self.port = port(option, value)?,
            ("mountport", Some(value)) => self.mount_port = port(option, value)?,
            ("mountvers", Some("3")) | ("xprtsec", Some("none")) => {}
            // Several may be offered.
            ("sec", Some(value)) if value.split(':').any(|flavor| flavor == "sys") => {}
            ("mountvers", _) => {
                return Err(InvalidOption(format!("{option}: only version 3 of MOUNT is spoken")));
            }
            ("sec", _) => {
                return Err(InvalidOption(format!(
                    "{option}: only sec=sys is spoken by the user-space NFS client"
                )));
            }
            ("xprtsec", _) => {
                return Err(InvalidOption(format!("{option}: the user-space NFS client speaks no TLS")));
            }
            ("resvport", None) => self.reserved_port = Some(true),
            ("noresvport", None) => self.reserved_port = Some(false),
            _ if for_kernels(key, value.is_some()) => {}
            _ => return Err(InvalidOption(format!("{option:?} is no mount option of NFS"))),
        }
        Ok(())
    }
}

/// What `vers=4` means: the best that the server has.
const V4: [Version; 3] = [Version::V4_2, Version::V4_1, Version::V4_0];

fn minor_version(minor: u32) -> Version {
    match minor {
        0 => Version::V4_0,
        1 => Version::V4_1,
        _ => Version::V4_2,
    }
}

fn versions(option: &str, value: &str) -> Result<Vec<Version>, InvalidOption> {
    Ok(match value {
        "3" => vec![Version::V3],
        "4" => V4.to_vec(),
        "4.0" => vec![Version::V4_0],
        "4.1" => vec![Version::V4_1],
        "4.2" => vec![Version::V4_2],
        _ => return Err(InvalidOption(format!("{option}: the versions are 3, 4, 4.0, 4.1 and 4.2"))),
    })
}

/// Port 0 means asking, as it does for mount.nfs.
fn port(option: &str, value: &str) -> Result<Option<u16>, InvalidOption> {
    let port: u16 =
        value.parse().map_err(|_| InvalidOption(format!("{option}: a port is a number up to 65535")))?;
    Ok((port != 0).then_some(port))
}

/// Options of nfs(5) and mount(8) that say how a kernel treats its mount.
fn for_kernels(key: &str, has_value: bool) -> bool {
    const FLAGS: &str = "_netdev ac acl alignwrite async atime auto bg cto defaults dev diratime dirsync exec fg fsc \
        hard intr iversion lazytime lock loud mand migration noac noacl noalignwrite noatime noauto nocto nodev \
        nodiratime noexec nofail nofsc nointr noiversion nolazytime nolock nomand nomigration noposix nordirplus \
        norelatime norquota nosharecache nosoftreval nostrictatime nosuid nosymfollow notrunkdiscovery nouser owner \
        posix rdirplus rdma relatime remount ro rquota rw sharecache silent soft softerr softreval strictatime suid \
        sync tcp trunkdiscovery udp user users";
    const VALUES: &str = "acdirmax acdirmin acregmax acregmin actimeo addr bsize cert_serial clientaddr comment \
        context defcontext fatal_neterrors fsc fscontext local_lock lookupcache max_connect mountaddr mounthost \
        mountproto namlen nconnect privkey_serial proto rdirplus retrans retry rootcontext rsize timeo write wsize";
    let known = if has_value { VALUES } else { FLAGS };
    key.starts_with("x-") || known.split_whitespace().any(|option| option == key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_mounts_are_read() {
        let options =
            Options::parse(["vers=4.1,hard", "port=12049", "mountport=0", "noresvport", "timeo=600"])
                .unwrap();
        assert_eq!(options.versions, [Version::V4_1]);
        assert_eq!((options.port, options.mount_port), (Some(12049), None));
        assert_eq!(options.reserved_port, Some(false));
        assert_eq!(Options::parse([""]).unwrap(), Options::default());
        assert_eq!(Options::parse(["nfsvers=3"]).unwrap().versions, [Version::V3]);
        assert_eq!(Options::parse(["v4.2"]).unwrap().versions, [Version::V4_2]);
        assert_eq!(Options::parse(["vers=4,minorversion=1"]).unwrap().versions, [Version::V4_1]);
        assert_eq!(Options::parse(["vers=4"]).unwrap().versions.len(), 3);
        assert!(Options::parse(["sec=krb5p:sys"]).is_ok());
        assert!(
            Options::parse(["sec=sys", "nconnect=8", "x-systemd.automount", "_netdev", "fsc=tag"]).is_ok()
        );
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for (bad, said) in [
            ("vers=5", "vers=5: the versions are 3, 4, 4.0, 4.1 and 4.2"),
            ("port=http", "port=http: a port is a number up to 65535"),
            ("port=70000", "port=70000: a port is a number up to 65535"),
            ("sec=krb5p", "sec=krb5p: only sec=sys is spoken by the user-space NFS client"),
            ("xprtsec=mtls", "xprtsec=mtls: the user-space NFS client speaks no TLS"),
            ("minorversion=1", "minorversion=1 needs vers=4 beside it"),
            ("minorversion=7,vers=4", "minorversion=7: NFS 4 has the minor versions 0, 1 and 2"),
            ("mountvers=1", "mountvers=1: only version 3 of MOUNT is spoken"),
            ("frobnicate", "\"frobnicate\" is no mount option of NFS"),
            ("hard=1", "\"hard=1\" is no mount option of NFS"),
        ] {
            assert_eq!(Options::parse([bad]).unwrap_err().to_string(), said);
        }
    }

    #[test]
    fn a_target_is_checked_and_shown_as_people_write_it() {
        assert_eq!(Target::new("nas", "export//a/").to_string(), "nas:/export/a");
        assert_eq!(Target::new("fd00::1", "/").to_string(), "[fd00::1]:/");
        assert_eq!(Target::new("[fd00::1]", "/x").host(), "fd00::1");
        for (server, path) in
            [("", "/"), ("[]", "/"), ("a b", "/"), ("a/b", "/"), ("nas", "/a/../b"), ("nas", "..")]
        {
            assert!(Target::new(server, path).check().is_err(), "{server} {path}");
        }
        assert!(Target::new("nas.example.com", "/a..b/.c").check().is_ok());
    }
}
