//! How a share gets mounted on a node: the options as people write them, and what mounts.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use berth_host::{
    path::Dir,
    remote::{Filesystem, RemoteMounts},
};
use berth_nfs::{Metrics, Nfs, Options, Target, Version};
use rustix::io::Errno;

use super::{Config, blocking, connections::failed, id::ShareName};
use crate::{Error, Result};

/// What mounts shares on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountMode {
    /// The kernel's NFS client.
    Kernel,
    /// The user-space client, through FUSE.
    Fuse,
}

/// A share to be mounted: how it is reached has been found out, and it answered.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Plan {
    share: ShareName,
    address: IpAddr,
    version: Version,
    /// What the caller wants besides.
    options: Vec<String>,
}

impl Plan {
    /// Finds out where the server is and what it speaks; the kernel is not asked before somebody has answered.
    async fn make(nfs: &Nfs, share: &ShareName, options: &[String], deadline: Duration) -> Result<Self> {
        let found = tokio::time::timeout(deadline, Self::find(nfs, share, options)).await;
        found.map_err(|_| not_answering(share, &format!("within {deadline:?}")))?
    }

    async fn find(nfs: &Nfs, share: &ShareName, options: &[String]) -> Result<Self> {
        let address = resolve(&share.server).await?;
        let version = if options.iter().any(|option| needs_kernel(option)) {
            said_version(options)?
        } else {
            let invalid = |error: &dyn std::fmt::Display| Error::Invalid(format!("mount options: {error}"));
            let parsed = Options::parse(options).map_err(|error| invalid(&error))?;
            let target = Target { server: share.server.clone(), path: share.path(), options: parsed };
            target.check().map_err(|error| invalid(&error))?;
            nfs.share(&target).await.map_err(failed)?.version()
        };
        let options = options.iter().filter(|option| !is_for_us(option)).cloned().collect();
        Ok(Self { share: share.clone(), address, version, options })
    }

    /// The options as the kernel takes them: it neither asks for names nor tries versions.
    fn kernel_options(&self) -> Vec<String> {
        let mut options = vec![format!("vers={}", self.version), format!("addr={}", self.address)];
        if self.version == Version::V3 {
            let has = |key: &str| self.options.iter().any(|option| option.starts_with(key));
            if !has("mountaddr=") {
                options.push(format!("mountaddr={}", self.address));
            }
            // Version 3 is spoken over TCP unless one asks for something else, its mount protocol too.
            if !has("proto=") && !self.options.iter().any(|option| option == "tcp" || option == "udp") {
                options.push("proto=tcp".to_owned());
            }
            if !has("mountproto=") {
                options.push("mountproto=tcp".to_owned());
            }
        } else if let Some(own) = own_address(self.address) {
            options.push(format!("clientaddr={own}"));
        }
        options.extend(self.options.iter().cloned());
        options
    }

    /// The options as the process takes them that serves the share.
    fn fuse_options(&self) -> Vec<String> {
        let version = format!("vers={}", self.version);
        std::iter::once(version).chain(self.options.iter().cloned()).collect()
    }

    /// What the mount is called in the kernel's table.
    fn source(&self) -> String {
        self.share.to_string()
    }
}

/// What mounts shares on this node, and the user-space client that asks servers before.
#[derive(Debug)]
pub(super) struct Mounter {
    mode: MountMode,
    /// What serves shares where the kernel does not.
    program: PathBuf,
    /// How long a server may take to be mounted.
    pub(super) timeout: Duration,
    pub(super) nfs: Nfs,
    pub(super) remote: Arc<RemoteMounts>,
}

impl Mounter {
    pub(super) fn new(config: &Config, metrics: Metrics) -> Self {
        Self {
            mode: config.mount_mode,
            program: config.program.clone(),
            timeout: config.mount_timeout,
            nfs: Nfs::with_metrics(metrics),
            remote: Arc::new(RemoteMounts::new(&config.program)),
        }
    }

    /// Mounts a share at a directory, which is made where it is missing.
    pub(super) async fn mount(&self, share: &ShareName, options: &[String], at: &Path) -> Result<()> {
        let plan = Plan::make(&self.nfs, share, options, self.timeout).await?;
        let (mode, deadline, at) = (self.mode, self.timeout, at.to_owned());
        let (remote, program) = (self.remote.clone(), self.program.clone());
        blocking(move || {
            Dir::ensure(&at, 0o700)?;
            match mode {
                MountMode::Kernel => {
                    // One type for all versions; "nfs4" is another name for it.
                    let fs_type = "nfs".to_owned();
                    let filesystem =
                        Filesystem { fs_type, source: plan.source(), options: plan.kernel_options() };
                    remote.mount(filesystem, &at, deadline).map_err(|error| refused(&error))
                }
                MountMode::Fuse => {
                    let options = plan.fuse_options();
                    let mount = berth_fuse::Mount {
                        server: plan.share.server.clone(),
                        path: plan.share.path(),
                        options,
                        at,
                    };
                    berth_fuse::start(&program, &mount, deadline).map_err(|error| refused_fuse(&error))
                }
            }
        })
        .await
    }
}

fn refused_fuse(error: &berth_host::Error) -> Error {
    match error.errno().map(Errno::from_raw_os_error) {
        Some(Errno::NODEV | Errno::NXIO) => Error::Precondition(format!(
            "{}: this kernel has no FUSE; --mount-mode fuse needs /dev/fuse and the kernel module behind it",
            error.sentence()
        )),
        _ => refused(error),
    }
}

/// What the machine or the server said about a mount, as the caller is to hear it.
pub(super) fn refused(error: &berth_host::Error) -> Error {
    let sentence = error.sentence();
    match error.errno().map(Errno::from_raw_os_error) {
        Some(Errno::NODEV) => Error::Precondition(format!(
            "{sentence}: this kernel has no NFS client; run the driver with --mount-mode fuse to do without"
        )),
        Some(
            Errno::TIMEDOUT
            | Errno::STALE
            | Errno::HOSTUNREACH
            | Errno::NETUNREACH
            | Errno::CONNREFUSED
            | Errno::IO,
        ) => Error::Unavailable(sentence),
        Some(Errno::PERM | Errno::ACCESS) => Error::Denied(sentence),
        Some(Errno::ROFS) => {
            Error::Precondition(format!("{sentence}; let the server export it with the option `rw`"))
        }
        Some(Errno::NOSPC | Errno::DQUOT) => Error::Exhausted(sentence),
        Some(Errno::INVAL | Errno::PROTONOSUPPORT) => Error::Invalid(sentence),
        Some(Errno::NOENT | Errno::NOTDIR) => Error::NotFound { what: "directory", id: sentence },
        Some(Errno::LOOP | Errno::XDEV) => Error::Precondition(format!(
            "{sentence}: the path leads through a symbolic link on the share, and none is followed"
        )),
        _ => Error::State(sentence),
    }
}

/// As [`refused`], about something on a share that is mounted.
pub(super) fn refused_by(share: &dyn std::fmt::Display, error: &berth_host::Error) -> Error {
    let is_stale = error.errno() == Some(Errno::STALE.raw_os_error());
    match refused(error) {
        Error::Unavailable(why) if is_stale => {
            Error::Unavailable(format!("{share} no longer knows the directory ({why}); publish it again"))
        }
        Error::Unavailable(why) => not_answering(share, &format!("({why})")),
        Error::Precondition(why) => Error::Precondition(format!("{share}: {why}")),
        Error::Exhausted(why) => Error::Exhausted(format!("{share}: {why}; make room there")),
        other => other,
    }
}

/// A server that said nothing.
pub(super) fn not_answering(share: &dyn std::fmt::Display, how: &str) -> Error {
    Error::Unavailable(format!(
        "{share} did not answer {how}; see whether the server runs, and repeat the call"
    ))
}

/// Whether only the kernel's client can do it: Kerberos and TLS.
pub(in crate::nfs) fn needs_kernel(option: &str) -> bool {
    option.strip_prefix("sec=").is_some_and(|flavour| !matches!(flavour, "sys" | "none"))
        || option.strip_prefix("xprtsec=").is_some_and(|how| how != "none")
}

/// What is asked of mount.nfs or decided here, and means nothing to the kernel, or something else.
fn is_for_us(option: &str) -> bool {
    let key = option.split_once('=').map_or(option, |(key, _)| key);
    matches!(
        key,
        "vers" | "nfsvers" | "minorversion" | "bg" | "fg" | "retry" | "sloppy" | "addr" | "clientaddr"
    ) || matches!(option, "v2" | "v3" | "v4" | "v4.0" | "v4.1" | "v4.2")
}

/// The version asked for, or the best, where nobody can ask the server.
fn said_version(options: &[String]) -> Result<Version> {
    let about_version: Vec<&String> = options.iter().filter(|option| is_for_us(option)).collect();
    let parsed =
        Options::parse(about_version).map_err(|error| Error::Invalid(format!("mount options: {error}")))?;
    Ok(parsed.versions.first().copied().unwrap_or(Version::V4_2))
}

async fn resolve(server: &str) -> Result<IpAddr> {
    let name = server.trim_start_matches('[').trim_end_matches(']');
    let mut addresses = tokio::net::lookup_host((name, 2049))
        .await
        .map_err(|error| Error::Unavailable(format!("find the address of {server}: {error}")))?;
    let first = addresses.next().map(|address| address.ip());
    first.ok_or_else(|| Error::Unavailable(format!("{server} has no address")))
}

/// The address under which the server sees this machine; nothing is sent to find it.
fn own_address(server: IpAddr) -> Option<IpAddr> {
    let any: SocketAddr = if server.is_ipv6() { ([0_u16; 8], 0).into() } else { ([0_u8; 4], 0).into() };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect((server, 2049)).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(version: Version, options: &[&str]) -> Plan {
        Plan {
            share: ShareName::new("nfs.svc", "/export").unwrap(),
            address: "127.0.0.1".parse().unwrap(),
            version,
            options: options
                .iter()
                .map(|&option| option.to_owned())
                .filter(|option| !is_for_us(option))
                .collect(),
        }
    }

    #[test]
    fn the_kernel_gets_what_it_cannot_find_out() {
        assert_eq!(
            plan(Version::V4_2, &["hard", "nfsvers=4", "nconnect=4", "retry=2", "bg"]).kernel_options(),
            ["vers=4.2", "addr=127.0.0.1", "clientaddr=127.0.0.1", "hard", "nconnect=4"]
        );
        assert_eq!(
            plan(Version::V3, &["nolock", "mountport=635"]).kernel_options(),
            [
                "vers=3",
                "addr=127.0.0.1",
                "mountaddr=127.0.0.1",
                "proto=tcp",
                "mountproto=tcp",
                "nolock",
                "mountport=635",
            ]
        );
        let udp = plan(Version::V3, &["proto=udp", "mountproto=udp"]).kernel_options();
        assert!(!udp.contains(&"proto=tcp".to_owned()) && !udp.contains(&"mountproto=tcp".to_owned()));
        assert_eq!(plan(Version::V3, &[]).source(), "nfs.svc:/export");
    }

    #[test]
    fn kerberos_and_tls_are_passed_on() {
        for option in ["sec=krb5", "sec=krb5p", "xprtsec=tls", "xprtsec=mtls"] {
            assert!(needs_kernel(option), "{option}");
        }
        for option in ["sec=sys", "xprtsec=none", "hard"] {
            assert!(!needs_kernel(option), "{option}");
        }
        let options = ["sec=krb5p".to_owned(), "vers=4.1".to_owned()];
        assert_eq!(said_version(&options).unwrap(), Version::V4_1);
        assert_eq!(said_version(&options[..1]).unwrap(), Version::V4_2);
    }

    #[test]
    fn the_error_of_a_kernel_without_nfs_names_the_alternative() {
        let error = berth_host::Error::new("mount nfs.svc:/export", Errno::NODEV);
        let Error::Precondition(sentence) = refused(&error) else { panic!("{error:?}") };
        assert!(sentence.contains("--mount-mode fuse"), "{sentence}");
    }
}
