//! `berth driver nfs`: volumes on NFS servers, as a replacement of csi-driver-nfs.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use berth_backends::{
    nfs::{AllowedServers, Config, MountMode, Nfs, OnDelete},
    services,
};
use berth_core::{NodeId, names};
use clap::{ArgMatches, Args as ClapArgs, FromArgMatches as _, ValueEnum as _};

use super::{Backend, Opened, Replaced};
use crate::sidecars::go;
use crate::stack::objects::{self, Objects};

/// The class of snapshots on NFS servers in `berth up`; which server volumes are on, only a person knows.
const SNAPSHOT_CLASS: &str = "berth-nfs";

pub(super) const BACKEND: Backend = Backend {
    name: "nfs",
    about: "Volumes on NFS servers: each a directory of a share",
    // A controller mounts nothing, and needs no privilege.
    separable: true,
    flags: Args::augment_args,
    driver_name: |matches| matches.get_one::<String>("driver_name").cloned().unwrap_or_default(),
    open: |matches, mode| Box::pin(async move { open(&Args::from_arg_matches(&matches)?, mode).await }),
    embedded_flags: EmbeddedArgs::augment_args,
    embedded,
    objects: |name| Objects {
        // What can be mounted from everywhere need not be attached first.
        driver: (name == names::NFS_DRIVER).then(|| objects::csi_driver(name, false)),
        classes: Vec::new(),
        // No two directories of a server can be copied at the same instant, so there are no groups.
        snapshot_classes: vec![objects::snapshot_class(SNAPSHOT_CLASS, name)],
    },
    replaced: Replaced::NOTHING,
};

/// Volumes on NFS servers: each a directory of a share.
#[derive(Debug, ClapArgs)]
struct Args {
    #[command(flatten)]
    volumes: Volumes,
    #[command(flatten)]
    upstream: Upstream,
}

/// How the NFS driver runs in `berth up`.
#[derive(Debug, ClapArgs)]
#[command(next_help_heading = "The NFS driver")]
struct EmbeddedArgs {
    /// The driver's name, as StorageClass.provisioner names it
    #[arg(long, alias = "drivername", default_value = names::NFS_DRIVER, value_name = "NAME")]
    driver_name: String,

    /// What mounts shares [default: the kernel if it has an NFS client, else FUSE]
    #[arg(long, value_enum)]
    mount_mode: Option<MountModeArg>,

    /// Mount options for servers whose class gives none, such as port=20049,vers=4.1
    #[arg(long, value_name = "OPTIONS")]
    default_mount_options: Option<String>,
}

fn embedded(up: &ArgMatches, directory: &Path, node: &str) -> Vec<OsString> {
    let mode = up.get_one::<MountModeArg>("mount_mode").copied().unwrap_or_else(MountModeArg::of_this_kernel);
    let mode = mode.to_possible_value().map_or_else(String::new, |mode| mode.get_name().to_owned());
    let mut words =
        vec!["--state-dir".into(), directory.as_os_str().to_owned(), "--node-id".into(), node.into()];
    words.push(format!("--mount-mode={mode}").into());
    for (flag, id) in [("--driver-name", "driver_name"), ("--default-mount-options", "default_mount_options")]
    {
        words.extend(up.get_one::<String>(id).map(|value| format!("{flag}={value}").into()));
    }
    if up.get_one::<String>("default_mount_options").is_none() {
        words.extend(crate::nfs::driver_flag(up));
    }
    words
}

#[derive(Debug, ClapArgs)]
#[command(next_help_heading = "Volumes")]
struct Volumes {
    /// The id of this node [default: the host's name]
    #[arg(long, alias = "nodeid", env = "NODE_ID", value_name = "NAME")]
    node_id: Option<NodeId>,

    /// The driver's name, as StorageClass.provisioner names it
    #[arg(long, alias = "drivername", default_value = names::NFS_DRIVER, value_name = "NAME")]
    driver_name: String,

    /// Where a node mounts shares and notes what is published; a controller keeps nothing
    #[arg(long, default_value = "/var/lib/berth/nfs", value_name = "DIR")]
    state_dir: PathBuf,

    /// What mounts shares on a node
    #[arg(long, value_enum, default_value_t = MountModeArg::Kernel)]
    mount_mode: MountModeArg,

    /// How long mounting a share may take
    #[arg(long, default_value_t = 110, value_name = "SECONDS")]
    mount_timeout_seconds: u64,

    /// NFS servers that volumes may be on: names (nfs.example.com, *.example.com), addresses and networks (10.0.0.0/8),
    /// separated by commas. A server that a volume gives by name must be listed by name [default: every server]
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    allowed_servers: Vec<String>,

    /// A share whose volumes are listed though no call has named it yet, as server:/path; may be given several times
    #[arg(long = "share", value_name = "SERVER:/PATH")]
    shares: Vec<String>,

    /// On an NFS server's own host: the directory that it exports as a share. Volumes there, if they are directories, get
    /// a project quota of their size; the filesystem is ext4 or xfs, mounted with prjquota. May be given several times
    #[arg(long = "export-root", value_name = "SERVER:/PATH=DIR")]
    export_roots: Vec<String>,

    /// Mount options for servers whose class and secret give none, such as port=20049,vers=4.1
    #[arg(long, value_name = "OPTIONS")]
    default_mount_options: Option<String>,

    /// Remove archived directories after so many days [default: never]
    #[arg(long, value_name = "DAYS")]
    archive_retention_days: Option<u64>,
}

/// What csi-driver-nfs has besides.
#[derive(Debug, ClapArgs)]
#[command(next_help_heading = "Flags of csi-driver-nfs")]
struct Upstream {
    /// The mode of volumes' directories, octal with a leading 0; 0 leaves it alone
    #[arg(long, default_value = "0", value_parser = parse_mode, value_name = "MODE")]
    mount_permissions: u32,

    /// What becomes of volumes whose class does not say: delete, retain or archive
    #[arg(long, default_value = "", hide_default_value = true, value_name = "POLICY")]
    default_ondelete_policy: String,

    /// How long a volume's usage is answered from a cache before the server is asked again
    #[arg(long, default_value_t = 10, value_name = "MINUTES")]
    vol_stats_cache_expire_in_minutes: u64,

    /// Let an archived directory replace an older one of the same name
    #[arg(long, default_value = "false", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, hide_possible_values = true, value_name = "BOOL")]
    remove_archived_volume_path: bool,

    /// Compress the archives of snapshots
    #[arg(long, default_value = "true", default_missing_value = "true", value_parser = go::switch,
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, hide_possible_values = true, value_name = "BOOL")]
    enable_snapshot_compression: bool,

    /// Taken and without effect: the controller mounts nothing
    #[arg(long, hide = true, value_name = "DIR")]
    working_mount_dir: Option<PathBuf>,

    /// Taken and without effect: snapshots need no program
    #[arg(long, hide = true, default_missing_value = "true", value_parser = go::switch, num_args = 0..=1,
          require_equals = true, action = clap::ArgAction::Set)]
    use_tar_command_in_snapshot: Option<bool>,
}

/// A [`MountMode`] on the command line.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub(crate) enum MountModeArg {
    /// The kernel's NFS client
    Kernel,
    /// The client that the controller uses, through FUSE: needs no NFS in the kernel. Locks of files hold on this node
    /// only. Each share is served by a process that outlives the driver, but not its container: pods whose share has lost
    /// its process must be started again
    Fuse,
}

impl MountModeArg {
    /// The kernel mounts where it can: its client is faster, and knows locks.
    pub(crate) fn of_this_kernel() -> Self {
        if berth_host::remote::kernel_has("nfs") { Self::Kernel } else { Self::Fuse }
    }
}

impl MountModeArg {
    pub(crate) fn is_fuse(self) -> bool {
        matches!(self, Self::Fuse)
    }
}

impl From<MountModeArg> for MountMode {
    fn from(mode: MountModeArg) -> Self {
        match mode {
            MountModeArg::Kernel => Self::Kernel,
            MountModeArg::Fuse => Self::Fuse,
        }
    }
}

/// As Go reads a number: octal with a leading 0, hexadecimal with 0x, else decimal.
fn parse_mode(text: &str) -> Result<u32, String> {
    let parsed = match text.strip_prefix('0') {
        None | Some("") => text.parse(),
        Some(rest) => match rest.strip_prefix(['x', 'X']) {
            Some(digits) => u32::from_str_radix(digits, 16),
            None => u32::from_str_radix(rest.trim_start_matches(['o', 'O']), 8),
        },
    };
    match parsed {
        Ok(mode) if mode <= 0o7777 => Ok(mode),
        _ => Err("not a mode such as 0777".to_owned()),
    }
}

async fn open(args: &Args, mode: services::Mode) -> anyhow::Result<Opened> {
    args.upstream.say_what_has_no_effect();
    let config = backend_config(args)?;
    let services = services::Config::new(&args.volumes.state_dir);
    let mounted_by = match config.mount_mode {
        MountMode::Kernel => "the kernel",
        MountMode::Fuse => "FUSE",
    };
    let nfs = Nfs::start(config).await?;
    let driver = nfs.driver(&args.volumes.driver_name, env!("CARGO_PKG_VERSION"), mode);
    Ok(Opened {
        driver: driver.open(services)?,
        remark: format!("shares are mounted by {mounted_by}"),
        drain: Box::new(move |patience| Box::pin(async move { nfs.drain(patience).await })),
    })
}

fn backend_config(args: &Args) -> anyhow::Result<Config> {
    let (volumes, upstream) = (&args.volumes, &args.upstream);
    let node = match &volumes.node_id {
        Some(node) => node.clone(),
        None => super::node_id()?,
    };
    let mut config = Config::new(std::path::absolute(&volumes.state_dir)?.join("shares"), node);
    config.allowed_servers = AllowedServers::parse(&volumes.allowed_servers)?;
    config.shares.clone_from(&volumes.shares);
    config.export_roots.clone_from(&volumes.export_roots);
    config.mount_options = volumes.default_mount_options.iter().cloned().collect();
    config.mount_permissions = Some(upstream.mount_permissions).filter(|mode| *mode > 0);
    config.on_delete =
        OnDelete::parse(&upstream.default_ondelete_policy).context("--default-ondelete-policy")?;
    config.replace_archived = upstream.remove_archived_volume_path;
    config.keep_archived =
        volumes.archive_retention_days.map(|days| Duration::from_secs(days.saturating_mul(24 * 60 * 60)));
    config.compress_snapshots = upstream.enable_snapshot_compression;
    config.usage_lifetime =
        Duration::from_secs(upstream.vol_stats_cache_expire_in_minutes.saturating_mul(60));
    config.mount_mode = volumes.mount_mode.into();
    config.mount_timeout = Duration::from_secs(volumes.mount_timeout_seconds);
    Ok(config)
}

impl Upstream {
    fn say_what_has_no_effect(&self) {
        for (flag, given) in [
            ("--working-mount-dir", self.working_mount_dir.is_some()),
            ("--use-tar-command-in-snapshot", self.use_tar_command_in_snapshot.is_some()),
        ] {
            if given {
                tracing::warn!("{flag} has no effect here");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mode_is_read_as_go_reads_a_number() {
        for (text, mode) in [("0", 0), ("0777", 0o777), ("511", 0o777), ("0x1ff", 0o777), ("02775", 0o2775)] {
            assert_eq!(parse_mode(text), Ok(mode), "{text}");
        }
        for text in ["", "abc", "0888", "-1", "010000"] {
            assert!(parse_mode(text).is_err(), "{text}");
        }
    }
}
