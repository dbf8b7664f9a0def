//! `berth driver digitalocean`: volumes of DigitalOcean's block storage, as a replacement of csi-digitalocean.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use berth_backends::digitalocean::{Config, DigitalOcean};
use berth_backends::{Secret, services};
use berth_core::{NodeId, names};
use clap::{ArgMatches, Args as ClapArgs, FromArgMatches as _};
use k8s_openapi::Resource as _;
use k8s_openapi::api::storage::v1::StorageClass;
use prometheus_client::registry::Registry;
use serde_json::json;

use super::{Backend, Opened, Replaced};
use crate::http::{Site, Unwell};
use crate::stack::objects::{self, Objects};

/// The classes of upstream's manifests: name, filesystem (ext4 if empty), and what becomes of a released volume.
const CLASSES: [(&str, &str, &str); 4] = [
    ("do-block-storage", "", "Delete"),
    ("do-block-storage-retain", "", "Retain"),
    ("do-block-storage-xfs", "xfs", "Delete"),
    ("do-block-storage-xfs-retain", "xfs", "Retain"),
];

pub(super) const BACKEND: Backend = Backend {
    name: "digitalocean",
    about: "Volumes of DigitalOcean's block storage",
    // A node needs no token, and a controller no disk.
    separable: true,
    flags: Args::augment_args,
    driver_name: |matches| matches.get_one::<String>("driver_name").cloned().unwrap_or_default(),
    open: |matches, mode| Box::pin(async move { open(Args::from_arg_matches(&matches)?, mode).await }),
    embedded_flags: |command| command,
    embedded,
    objects: |name| Objects {
        driver: (name == names::DIGITALOCEAN_DRIVER).then(|| objects::cloud_disk_driver(name)),
        classes: CLASSES.iter().map(|class| storage_class(name, class)).collect(),
        snapshot_classes: vec![objects::snapshot_class("do-block-storage", name)],
    },
    replaced: Replaced::NOTHING,
};

fn storage_class(driver: &str, (name, filesystem, policy): &(&str, &str, &str)) -> serde_json::Value {
    let mut class = json!({
        "apiVersion": StorageClass::API_VERSION,
        "kind": StorageClass::KIND,
        "metadata": { "name": name },
        "provisioner": driver,
        "reclaimPolicy": policy,
        "allowVolumeExpansion": true,
    });
    if !filesystem.is_empty() {
        class["parameters"] = json!({ names::FS_TYPE_PARAMETER: filesystem });
    }
    class
}

/// Volumes of DigitalOcean's block storage.
#[derive(ClapArgs)]
struct Args {
    #[command(flatten)]
    volumes: Volumes,
    #[command(flatten)]
    upstream: Upstream,
}

#[derive(ClapArgs)]
#[command(next_help_heading = "Volumes")]
struct Volumes {
    /// The id of the droplet that this node is [default: asked of the metadata service]
    #[arg(long, alias = "nodeid", env = "NODE_ID", value_name = "ID")]
    node_id: Option<NodeId>,

    /// Where a node notes what is published and staged; a controller keeps nothing
    #[arg(long, default_value = "/var/lib/berth/digitalocean", value_name = "DIR")]
    state_dir: PathBuf,

    /// Where links to block devices are, by their ids
    #[arg(long, default_value = "/dev/disk/by-id", value_name = "DIR")]
    device_dir: PathBuf,

    /// The metadata service of droplets, before /metadata/v1
    #[arg(long, default_value = "http://169.254.169.254", value_name = "URL")]
    metadata_url: String,

    /// The age after which a snapshot is removed that a clone was made of and that a crash left over
    #[arg(long, default_value_t = 900, value_name = "SECONDS")]
    leftover_seconds: u64,
}

/// The flags that csi-digitalocean has, with the same meaning.
#[derive(ClapArgs)]
#[command(next_help_heading = "Flags of csi-digitalocean")]
struct Upstream {
    /// A token of the API, with the right to read and write block storage, snapshots, tags and to read droplets and the
    /// account; without one only the calls for this node are served
    #[arg(
        long,
        env = "DIGITALOCEAN_ACCESS_TOKEN",
        hide_env_values = true,
        default_value = "",
        hide_default_value = true,
        value_name = "TOKEN"
    )]
    token: String,

    /// The API; plain http only to a loopback address
    #[arg(
        long,
        env = "DIGITALOCEAN_API_URL",
        default_value = "https://api.digitalocean.com/",
        value_name = "URL"
    )]
    url: String,

    /// The region of the volumes [default: that of this droplet]
    #[arg(long, default_value = "", hide_default_value = true, value_name = "SLUG")]
    region: String,

    /// A tag for the volumes and snapshots that are made, and for the volumes that are attached
    #[arg(long, default_value = "", hide_default_value = true, value_name = "TAG")]
    do_tag: String,

    /// The driver's name, as StorageClass.provisioner names it
    #[arg(long, alias = "drivername", default_value = names::DIGITALOCEAN_DRIVER, value_name = "NAME")]
    driver_name: String,

    /// Serve /health over HTTP here, which asks the API for the account
    #[arg(long, default_value = "", hide_default_value = true, value_name = "ADDRESS")]
    debug_addr: String,

    /// The most volumes that ListVolumes answers to a caller who names no limit; all of them if 0
    #[arg(long, default_value_t = 0, value_name = "COUNT")]
    default_volumes_page_size: usize,

    /// The most requests a second to the API; as many as it takes if 0
    #[arg(long, default_value_t = 0.0, value_name = "RATE")]
    do_api_rate_limit: f64,

    /// Use a device only once the kernel says that it is running
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", value_name = "BOOL")]
    validate_attachment: bool,

    /// How many volumes a droplet takes; not limited here if 0
    #[arg(long, default_value_t = 15, value_name = "COUNT")]
    volume_limit: u32,
}

fn embedded(_: &ArgMatches, directory: &Path, _: &str) -> Vec<OsString> {
    vec!["--state-dir".into(), directory.as_os_str().to_owned()]
}

async fn open(args: Args, mode: services::Mode) -> anyhow::Result<Opened> {
    let Args { volumes, upstream } = args;
    let given = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    let token =
        given(&upstream.token).map(|token| Secret::new("token", &token).context("--token")).transpose()?;
    // As in csi-digitalocean, whose pods on nodes have no token.
    let mode = if token.is_none() && mode == services::Mode::All {
        tracing::info!("there is no token: only the calls for this node are served");
        services::Mode::Node
    } else {
        mode
    };
    let state_dir = std::path::absolute(&volumes.state_dir)?;
    let config = Config {
        driver_name: upstream.driver_name,
        url: upstream.url,
        token,
        rate: upstream.do_api_rate_limit,
        region: given(&upstream.region),
        node_id: volumes.node_id,
        metadata_url: volumes.metadata_url,
        tag: given(&upstream.do_tag),
        volume_limit: upstream.volume_limit,
        device_dir: volumes.device_dir,
        validate_attachment: upstream.validate_attachment,
        state_dir: state_dir.clone(),
        leftover_age: Duration::from_secs(volumes.leftover_seconds),
    };
    let cloud = Arc::new(DigitalOcean::open(config, mode).await?);
    if let Some(address) = given(&upstream.debug_addr) {
        let asked = cloud.clone();
        let health = move || -> crate::http::Ready {
            let asked = asked.clone();
            Box::pin(async move { asked.healthy().await.map_err(|error| Unwell::new(error.to_string())) })
        };
        let site = Site::new(Registry::default()).check("/health", health);
        site.serve(&address).await.with_context(|| format!("--debug-addr: serve HTTP on {address}"))?;
    }
    let mut services = services::Config::new(&state_dir);
    services.longest_listing = Some(upstream.default_volumes_page_size).filter(|most| *most > 0);
    Ok(Opened {
        driver: cloud.driver(env!("CARGO_PKG_VERSION")).open(services)?,
        remark: format!("volumes in region {}", cloud.region()),
        // The API remembers what is under way.
        drain: Box::new(|_| Box::pin(async {})),
    })
}
