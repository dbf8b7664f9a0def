//! `berth driver local`: volumes on this machine's disk, also as a replacement of csi-driver-host-path.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Context as _, bail};
use berth_backends::{
    local::{Config, Kind, Local},
    services,
};
use berth_core::{Capacity, NodeId, names};
use clap::{ArgMatches, Args as ClapArgs, FromArgMatches as _};

use super::{Backend, Opened, Replaced};
use crate::stack::objects::{self, Objects};

pub(super) const BACKEND: Backend = Backend {
    name: "local",
    about: "Volumes on this machine's disk: btrfs subvolumes, loop images or plain directories",
    separable: false,
    flags: Args::augment_args,
    driver_name: |matches| driver_name(matches),
    open: |matches, mode| Box::pin(async move { open(&Args::from_arg_matches(&matches)?, mode).await }),
    embedded_flags: |command| command,
    embedded: |_, directory, node| {
        let (data_dir, node_id) = (directory.as_os_str().to_owned(), node.into());
        vec!["--data-dir".into(), data_dir, "--node-id".into(), node_id, "--attach".into()]
    },
    objects: |name| Objects {
        // A pod's claim is attached to its node before it is mounted there.
        driver: (name == names::LOCAL_DRIVER).then(|| objects::csi_driver(name, true)),
        classes: vec![objects::default_storage_class(name)],
        snapshot_classes: vec![
            objects::snapshot_class(objects::CLASS, name),
            objects::group_snapshot_class(objects::CLASS, name),
        ],
    },
    replaced: Replaced::NOTHING,
};

/// Volumes on this machine's disk: btrfs subvolumes, loop images or plain directories.
#[derive(Debug, ClapArgs)]
struct Args {
    #[command(flatten)]
    volumes: Volumes,
    #[command(flatten)]
    hostpath: HostPath,
}

fn driver_name(matches: &ArgMatches) -> String {
    matches.get_one::<String>("driver_name").cloned().unwrap_or_default()
}

#[derive(Debug, ClapArgs)]
#[command(next_help_heading = "Volumes")]
struct Volumes {
    /// The id of this node [default: the host's name]
    #[arg(long, alias = "nodeid", env = "NODE_ID", value_name = "NAME")]
    node_id: Option<NodeId>,

    /// Where volumes, snapshots and the driver's records are kept
    #[arg(long, alias = "statedir", default_value = "/var/lib/berth/local", value_name = "DIR")]
    data_dir: PathBuf,

    /// The kind of volumes whose StorageClass names none; auto takes the best that the disk can do
    #[arg(long, value_enum, default_value_t = KindArg::Auto)]
    kind: KindArg,

    /// The driver's name, as StorageClass.provisioner names it
    #[arg(long, alias = "drivername", default_value = names::LOCAL_DRIVER, value_name = "NAME")]
    driver_name: String,

    /// Record which volume is attached to which node (ControllerPublishVolume)
    #[arg(long, alias = "enable-attach", default_value = "false", default_missing_value = "true",
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, hide_possible_values = true, value_name = "BOOL")]
    attach: bool,

    /// How many volumes this node takes; 0 is no limit
    #[arg(long, alias = "maxvolumespernode", default_value_t = 0, value_name = "COUNT")]
    max_volumes_per_node: u32,

    /// Show a volume to the pod's fsGroup by its mount, instead of having the kubelet change every file (VOLUME_MOUNT_GROUP)
    #[arg(long, default_value = "false", default_missing_value = "true",
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, hide_possible_values = true, value_name = "BOOL")]
    group_by_mount: bool,

    /// How many times its size the disk may be promised to volumes
    #[arg(long, default_value_t = 1.0, value_name = "FACTOR")]
    overcommit: f64,

    /// The largest volume, such as 1Ti [default: no limit; 1Ti as hostpath.csi.k8s.io]
    #[arg(long, value_name = "SIZE")]
    max_volume_size: Option<Capacity>,

    /// The topology key that binds volumes to this node [default: topology.berth.dev/node]
    #[arg(long, value_name = "KEY")]
    topology_key: Option<String>,
}

/// What csi-driver-host-path has besides.
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of that driver's command line")]
#[derive(Debug, ClapArgs)]
#[command(next_help_heading = "Flags of csi-driver-host-path, for moving over from it")]
struct HostPath {
    /// A simulated pool, by the StorageClass parameter kind; may be given several times
    #[arg(long, value_name = "KIND=SIZE", value_parser = parse_pool)]
    capacity: Vec<(String, Capacity)>,

    /// How many volumes may be attached to this node; -1 takes a number from 1 to 10
    #[arg(long, default_value_t = 0, allow_negative_numbers = true, value_name = "COUNT")]
    attach_limit: i64,

    /// The largest volume that is grown on the node
    #[arg(long, value_name = "SIZE")]
    max_volume_size_node: Option<Capacity>,

    /// Bind volumes to this node by topology
    #[arg(long, default_value = "true", default_missing_value = "true",
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, hide_possible_values = true, value_name = "BOOL")]
    enable_topology: bool,

    /// Let volumes be expanded
    #[arg(long, alias = "node-expand-required", default_value = "true", default_missing_value = "true",
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, hide_possible_values = true, value_name = "BOOL")]
    enable_volume_expansion: bool,

    /// Leave expansion to the node alone
    #[arg(long, default_value = "false", default_missing_value = "true",
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, hide_possible_values = true, value_name = "BOOL")]
    disable_controller_expansion: bool,

    /// Leave expansion to the controller alone
    #[arg(long, default_value = "false", default_missing_value = "true",
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, hide_possible_values = true, value_name = "BOOL")]
    disable_node_expansion: bool,

    /// Let mutable parameters be changed [default: true; false as hostpath.csi.k8s.io]
    #[arg(long, default_missing_value = "true",
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, hide_possible_values = true, value_name = "BOOL")]
    enable_controller_modify_volume: Option<bool>,

    /// Mutable parameters that are taken without any effect
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    accepted_mutable_parameter_names: Vec<String>,

    /// Report which blocks of a snapshot changed [default: true; false as hostpath.csi.k8s.io]
    #[arg(long, default_missing_value = "true",
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, hide_possible_values = true, value_name = "BOOL")]
    enable_snapshot_metadata: Option<bool>,

    /// How changed blocks are listed: VARIABLE_LENGTH or FIXED_LENGTH
    #[arg(long, default_value = "VARIABLE_LENGTH", ignore_case = true, value_name = "TYPE",
          value_parser = ["FIXED_LENGTH", "VARIABLE_LENGTH"])]
    snapshot_metadata_block_type: String,

    /// Refuse to detach a volume that is still in use here
    #[arg(long, default_value = "false", default_missing_value = "true",
          num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set, hide_possible_values = true, value_name = "BOOL")]
    check_volume_lifecycle: bool,

    /// Taken and without effect: snapshots can always be listed
    #[arg(long, hide = true, default_missing_value = "true", num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set)]
    enable_list_snapshots: Option<bool>,

    /// Taken and without effect: inline volumes are always served
    #[arg(long, hide = true, default_missing_value = "true", num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set)]
    ephemeral: Option<bool>,

    /// Taken and without effect: there is no Go runtime to tune
    #[arg(long, hide = true, default_missing_value = "true", num_args = 0..=1, require_equals = true, action = clap::ArgAction::Set)]
    automaxprocs: Option<bool>,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum KindArg {
    /// btrfs on a btrfs disk, else image, else dir
    Auto,
    /// A btrfs subvolume with a quota: capacity enforced, snapshots instant
    Btrfs,
    /// A file on a loop device, formatted ext4, xfs or btrfs, or raw: capacity enforced on any disk
    Image,
    /// A plain directory: capacity reported, not enforced
    Dir,
}

fn parse_pool(text: &str) -> Result<(String, Capacity), String> {
    let (kind, size) = text.split_once('=').ok_or("expected KIND=SIZE, such as fast=100Gi")?;
    Ok((kind.to_owned(), size.parse::<Capacity>().map_err(|error| error.to_string())?))
}

async fn open(args: &Args, mode: services::Mode) -> anyhow::Result<Opened> {
    args.hostpath.say_what_has_no_effect();
    let config = backend_config(args)?;
    let mut services = services::Config::new(&config.data_dir);
    services.check_volume_lifecycle = args.hostpath.check_volume_lifecycle;
    let data_dir = config.data_dir.clone();
    let local = Local::open(config).await.with_context(|| format!("open {}", data_dir.display()))?;
    let kind = local.default_kind();
    tracing::info!(
        data_dir = %data_dir.display(),
        %kind,
        volumes = local.volume_count(),
        "volumes of no particular kind become {kind}"
    );
    let driver = local.driver(&args.volumes.driver_name, env!("CARGO_PKG_VERSION"), mode);
    Ok(Opened {
        driver: driver.open(services)?,
        remark: format!("volumes are {kind} by default"),
        drain: Box::new(move |patience| Box::pin(async move { local.drain(patience).await })),
    })
}

fn backend_config(args: &Args) -> anyhow::Result<Config> {
    let (volumes, hostpath) = (&args.volumes, &args.hostpath);
    let as_hostpath = volumes.driver_name == names::HOSTPATH_DRIVER;
    if !(volumes.overcommit.is_finite() && volumes.overcommit > 0.0) {
        bail!("--overcommit must be a positive number, not {}", volumes.overcommit);
    }
    let node = match &volumes.node_id {
        Some(node) => node.clone(),
        None => super::node_id()?,
    };
    let mut config = Config::new(std::path::absolute(&volumes.data_dir)?, node);
    config.kind = match volumes.kind {
        KindArg::Auto => None,
        KindArg::Btrfs => Some(Kind::Btrfs),
        KindArg::Image => Some(Kind::Image),
        KindArg::Dir => Some(Kind::Dir),
    };
    let expand = hostpath.enable_volume_expansion;
    config.attachment = volumes.attach;
    config.topology = hostpath.enable_topology;
    config.expansion = expand && !hostpath.disable_controller_expansion;
    config.node_expansion = expand && !hostpath.disable_node_expansion;
    config.modification = hostpath.enable_controller_modify_volume.unwrap_or(!as_hostpath);
    config.changed_blocks = hostpath.enable_snapshot_metadata.unwrap_or(!as_hostpath);
    config.max_volumes = match (hostpath.attach_limit, volumes.max_volumes_per_node) {
        (0, 0) => None,
        (0, limit) => Some(limit),
        (-1, _) => Some(std::process::id() % 10 + 1),
        (limit, _) => Some(u32::try_from(limit).context("--attach-limit must be -1, 0 or more")?),
    };
    let default_key = if as_hostpath { names::HOSTPATH_TOPOLOGY_NODE } else { names::TOPOLOGY_NODE };
    config.topology_key = volumes.topology_key.clone().unwrap_or_else(|| default_key.to_owned());
    config.group_by_mount = volumes.group_by_mount;
    config.overcommit = volumes.overcommit;
    config.max_volume_size = volumes.max_volume_size.unwrap_or(if as_hostpath {
        Capacity::gibibytes(1024)
    } else {
        Capacity::MAX
    });
    config.max_volume_size_on_node = hostpath.max_volume_size_node.unwrap_or(config.max_volume_size);
    config.pools = hostpath.capacity.iter().cloned().collect::<BTreeMap<_, _>>();
    config.ignore_unknown_parameters = as_hostpath;
    config.mutable_without_effect.clone_from(&hostpath.accepted_mutable_parameter_names);
    config.fixed_length_blocks = hostpath.snapshot_metadata_block_type.eq_ignore_ascii_case("FIXED_LENGTH");
    Ok(config)
}

impl HostPath {
    fn say_what_has_no_effect(&self) {
        let given = [
            ("--enable-list-snapshots", self.enable_list_snapshots),
            ("--ephemeral", self.ephemeral),
            ("--automaxprocs", self.automaxprocs),
        ];
        for (flag, _) in given.iter().filter(|(_, value)| value.is_some()) {
            tracing::warn!("{flag} has no effect here");
        }
    }
}
