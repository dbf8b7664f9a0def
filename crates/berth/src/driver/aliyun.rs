//! `berth driver aliyun`: Alibaba Cloud's disks, as a replacement of the disk part of alibaba-cloud-csi-driver.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use berth_backends::aliyun::{AccessKey, Aliyun, Config};
use berth_backends::services::{self, Mode};
use berth_core::{NodeId, names};
use berth_csi::Endpoint;
use clap::{ArgMatches, Args as ClapArgs, FromArgMatches as _};
use k8s_openapi::Resource as _;
use k8s_openapi::api::storage::v1::StorageClass;
use serde_json::json;

use super::{Backend, Common, Opened, Replaced};
use crate::stack::objects::{self, Objects};

/// The classes of upstream's chart: name, types of disks, and whether they are made where their first pod is.
const CLASSES: [(&str, &str, bool); 4] = [
    ("alicloud-disk-topology-alltype", "cloud_essd,cloud_ssd,cloud_efficiency", true),
    ("alicloud-disk-essd", "cloud_essd", false),
    ("alicloud-disk-ssd", "cloud_ssd", false),
    ("alicloud-disk-efficiency", "cloud_efficiency", false),
];

pub(super) const BACKEND: Backend = Backend {
    name: "aliyun",
    about: "Alibaba Cloud's disks",
    // A node needs no access key, and a controller no disk.
    separable: true,
    flags: Args::augment_args,
    driver_name: |matches| matches.get_one::<String>("driver_name").cloned().unwrap_or_default(),
    open: |matches, mode| Box::pin(async move { open(Args::from_arg_matches(&matches)?, mode).await }),
    embedded_flags: |command| command,
    embedded,
    objects: |name| Objects {
        driver: (name == names::ALIYUN_DRIVER).then(|| objects::cloud_disk_driver(name)),
        classes: CLASSES.iter().map(|class| storage_class(name, class)).collect(),
        snapshot_classes: vec![objects::snapshot_class("alibabacloud-disk-snapshot", name)],
    },
    replaced: Replaced { flags: Chart::augment_args, apply },
};

/// What upstream's chart writes in the path of the socket where the driver's name belongs.
const NAME_IN_PATH: &str = "driverplugin.csi.alibabacloud.com-replace";
/// Where upstream's controller and its nodes serve HTTP.
const CONTROLLER_PORT: u16 = 11270;
const NODE_PORT: u16 = 11260;

fn storage_class(driver: &str, (name, types, waits): &(&str, &str, bool)) -> serde_json::Value {
    json!({
        "apiVersion": StorageClass::API_VERSION,
        "kind": StorageClass::KIND,
        "metadata": { "name": name },
        "provisioner": driver,
        "parameters": { "type": types },
        "reclaimPolicy": "Delete",
        "allowVolumeExpansion": true,
        "volumeBindingMode": if *waits { "WaitForFirstConsumer" } else { "Immediate" },
    })
}

/// Disks of Alibaba Cloud's ECS.
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
    /// The id of the instance that this node is [default: asked of the metadata service]
    #[arg(long, value_name = "ID")]
    node_id: Option<NodeId>,

    /// The zone of this node, and of disks that nobody names a zone for [default: asked of the metadata service]
    #[arg(long, value_name = "ZONE")]
    zone: Option<String>,

    /// Where a node notes what is published and staged; a controller keeps nothing
    #[arg(long, default_value = "/var/lib/berth/aliyun", value_name = "DIR")]
    state_dir: PathBuf,

    /// Where links to block devices are, by their ids
    #[arg(long, default_value = "/dev/disk/by-id", value_name = "DIR")]
    device_dir: PathBuf,

    /// The metadata service of instances, before /latest
    #[arg(long, default_value = "http://100.100.100.200", value_name = "URL")]
    metadata_url: String,

    /// The age after which a snapshot is removed that a clone was made of and that a crash left over
    #[arg(long, default_value_t = 900, value_name = "SECONDS")]
    leftover_seconds: u64,

    /// The most requests a second to the API; as many as it takes if 0
    #[arg(long, default_value_t = 0.0, value_name = "RATE")]
    api_rate_limit: f64,

    /// The driver's name, as StorageClass.provisioner names it
    #[arg(long, alias = "drivername", default_value = names::ALIYUN_DRIVER, value_name = "NAME")]
    driver_name: String,
}

/// What alibaba-cloud-csi-driver reads from its flags and its environment, with the same meaning.
#[derive(ClapArgs)]
#[command(next_help_heading = "Flags and environment of alibaba-cloud-csi-driver")]
struct Upstream {
    /// The region of the disks [default: that of this instance]
    #[arg(long, env = "REGION_ID", value_name = "REGION")]
    region: Option<String>,

    /// The id of the access key; a node needs none. ACCESS_KEY_ID is read as well
    #[arg(long, env = "ALIBABA_CLOUD_ACCESS_KEY_ID", value_name = "ID")]
    access_key_id: Option<String>,

    /// What requests are signed with; better given in the environment. ACCESS_KEY_SECRET is read as well
    #[arg(long, env = "ALIBABA_CLOUD_ACCESS_KEY_SECRET", hide_env_values = true, value_name = "SECRET")]
    access_key_secret: Option<String>,

    /// The token of a temporary access key
    #[arg(long, env = "ALIBABA_CLOUD_SECURITY_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    security_token: Option<String>,

    /// The ECS API: a host, with a port if it is not the usual one, or a URL [default: that of the region]
    #[arg(long, env = "ECS_ENDPOINT", value_name = "HOST")]
    ecs_endpoint: Option<String>,

    /// How the ECS API is spoken to; HTTP only at a loopback address
    #[arg(long, env = "ALICLOUD_CLIENT_SCHEME", default_value = "HTTPS", ignore_case = true, value_parser = ["HTTPS", "HTTP"], value_name = "SCHEME")]
    client_scheme: String,

    /// Which of the region's endpoints is used: vpc, inside of its private networks, or public
    #[arg(long, env = "ALIBABA_CLOUD_NETWORK_TYPE", default_value = "public", value_parser = ["vpc", "public"], value_name = "TYPE")]
    network_type: String,

    /// The id of the cluster, for the tag ack.aliyun.com
    #[arg(long, env = "CLUSTER_ID", value_name = "ID")]
    cluster_id: Option<String>,

    /// How many volumes this node takes; as many as its instance type takes if 0, where there is an access key to ask with
    #[arg(long, env = "MAX_VOLUMES_PERNODE", default_value_t = 0, value_name = "COUNT")]
    max_volumes_per_node: u32,

    /// Topologies have no keys of Kubernetes, only topology.diskplugin.csi.alibabacloud.com/zone and /region
    #[arg(long, env = "PRIVATE_TOPOLOGY_KEY", num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true", value_parser = truth, value_name = "BOOL")]
    private_topology_key: bool,

    /// The drivers to run, of which only disk is one here
    #[arg(long, default_value = "disk", value_parser = ["disk", names::ALIYUN_DRIVER], value_name = "DRIVER")]
    driver: String,

    /// Accepted and not used, as upstream: the node is its instance
    #[arg(long, hide = true, value_name = "ID")]
    nodeid: Option<String>,

    /// Offer the controller's services
    #[arg(long, num_args = 0..=1, require_equals = true, default_value = "true", default_missing_value = "true", value_parser = truth, value_name = "BOOL")]
    run_controller_service: bool,

    /// Offer the node's services
    #[arg(long, num_args = 0..=1, require_equals = true, default_value = "true", default_missing_value = "true", value_parser = truth, value_name = "BOOL")]
    run_node_service: bool,
}

/// What upstream's chart gives its containers besides.
#[derive(ClapArgs)]
#[command(next_help_heading = "Flags and environment of alibaba-cloud-csi-driver")]
struct Chart {
    /// Serve /healthz and /metrics over HTTP on this port, as upstream does: `usual` is 11270 with the controller's services and 11260 without
    #[arg(long, env = "SERVICE_PORT", value_parser = ServicePort::parse, value_name = "PORT")]
    service_port: Option<ServicePort>,

    /// The format of the log: text or json
    #[arg(long, default_value = "text", value_parser = ["text", "json"], value_name = "FORMAT")]
    logging_format: String,

    /// Accepted and not used: this driver asks nothing of the Kubernetes API
    #[arg(long, hide = true, value_name = "QPS")]
    kube_api_qps: Option<f64>,

    /// Accepted and not used: this driver asks nothing of the Kubernetes API
    #[arg(long, hide = true, value_name = "COUNT")]
    kube_api_burst: Option<u32>,

    /// Accepted and not used: nodes are not labelled
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = truth, value_name = "BOOL")]
    use_labeler: Option<bool>,

    /// Accepted and not used
    #[arg(long, hide = true, value_name = "GATES")]
    feature_gates: Option<String>,
}

/// Where HTTP is served as upstream does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ServicePort {
    /// Upstream's port of the services that are offered.
    Usual,
    Number(u16),
}

impl ServicePort {
    fn parse(text: &str) -> Result<Self, String> {
        if text == "usual" {
            return Ok(Self::Usual);
        }
        text.parse().map(Self::Number).map_err(|_| "this is neither a port nor `usual`".to_owned())
    }
}

/// Puts the driver's name in the path of the socket, and serves HTTP where upstream does if that is asked for.
fn apply(matches: &ArgMatches, common: &mut Common) -> anyhow::Result<()> {
    let (chart, upstream) = (Chart::from_arg_matches(matches)?, Upstream::from_arg_matches(matches)?);
    if let Endpoint::Unix(path) = &mut common.endpoint
        && let Some(text) = path.to_str().filter(|text| text.contains(NAME_IN_PATH))
    {
        *path = text.replace(NAME_IN_PATH, &(BACKEND.driver_name)(matches)).into();
    }
    common.logging.use_json(chart.logging_format == "json");
    let port = chart.service_port.map(|port| match port {
        ServicePort::Usual if upstream.run_controller_service => CONTROLLER_PORT,
        ServicePort::Usual => NODE_PORT,
        ServicePort::Number(port) => port,
    });
    common.http_endpoint = common.http_endpoint.take().or_else(|| port.map(|port| format!(":{port}")));
    Ok(())
}

/// Reads a truth value in upstream's spellings.
fn truth(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "yes" | "enable" | "1" => Ok(true),
        "false" | "no" | "disable" | "0" | "" => Ok(false),
        _ => Err("this is neither true nor false".to_owned()),
    }
}

fn embedded(_: &ArgMatches, directory: &Path, _: &str) -> Vec<OsString> {
    vec!["--state-dir".into(), directory.as_os_str().to_owned()]
}

/// Which services are left of those that the command offers.
fn mode(offered: Mode, controller: bool, node: bool) -> anyhow::Result<Mode> {
    Ok(match (offered, controller, node) {
        (Mode::All, true, true) => Mode::All,
        (Mode::All | Mode::Controller, true, _) => Mode::Controller,
        (Mode::All | Mode::Node, _, true) => Mode::Node,
        _ => bail!("--run-controller-service and --run-node-service leave nothing to serve"),
    })
}

/// The access key of the flags, or of the environment that upstream's chart sets.
fn access_key(upstream: &Upstream) -> anyhow::Result<Option<AccessKey>> {
    let given = |flag: &Option<String>, older: &str| {
        let older = || env::var(older).ok();
        flag.clone().or_else(older).filter(|value| !value.is_empty())
    };
    let id = given(&upstream.access_key_id, "ACCESS_KEY_ID");
    let secret = given(&upstream.access_key_secret, "ACCESS_KEY_SECRET");
    let token = upstream.security_token.as_deref().filter(|token| !token.is_empty());
    match (id, secret) {
        (None, None) => Ok(None),
        (Some(id), Some(secret)) => Ok(Some(AccessKey::new(&id, &secret, token)?)),
        (Some(_), None) => bail!("there is an access key id, but no ALIBABA_CLOUD_ACCESS_KEY_SECRET"),
        (None, Some(_)) => bail!("there is an access key secret, but no ALIBABA_CLOUD_ACCESS_KEY_ID"),
    }
}

async fn open(args: Args, offered: Mode) -> anyhow::Result<Opened> {
    let Args { volumes, upstream } = args;
    let mode = mode(offered, upstream.run_controller_service, upstream.run_node_service)?;
    let state_dir = std::path::absolute(&volumes.state_dir)?;
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let endpoint = given(&upstream.ecs_endpoint).map(|endpoint| {
        if endpoint.contains("://") {
            return endpoint;
        }
        format!("{}://{endpoint}/", upstream.client_scheme.to_ascii_lowercase())
    });
    let config = Config {
        driver_name: volumes.driver_name,
        endpoint,
        vpc: upstream.network_type == "vpc",
        key: access_key(&upstream).context("the access key")?,
        rate: volumes.api_rate_limit,
        region: given(&upstream.region),
        zone: given(&volumes.zone),
        node_id: volumes.node_id,
        metadata_url: volumes.metadata_url,
        cluster_id: given(&upstream.cluster_id),
        max_volumes: upstream.max_volumes_per_node,
        private_topology: upstream.private_topology_key,
        device_dir: volumes.device_dir,
        state_dir: state_dir.clone(),
        leftover_age: Duration::from_secs(volumes.leftover_seconds),
    };
    let cloud = Aliyun::open(config, mode).await?;
    Ok(Opened {
        driver: cloud.driver(env!("CARGO_PKG_VERSION")).open(services::Config::new(&state_dir))?,
        remark: format!("disks in region {}", cloud.region()),
        // The API remembers what is under way.
        drain: Box::new(|_| Box::pin(async {})),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upstreams_flags_choose_among_the_services_that_are_offered() {
        for (offered, controller, node, expected) in [
            (Mode::All, true, true, Some(Mode::All)),
            (Mode::All, true, false, Some(Mode::Controller)),
            (Mode::All, false, true, Some(Mode::Node)),
            (Mode::All, false, false, None),
            (Mode::Controller, true, true, Some(Mode::Controller)),
            (Mode::Controller, false, true, None),
            (Mode::Node, false, true, Some(Mode::Node)),
            (Mode::Node, true, false, None),
        ] {
            assert_eq!(mode(offered, controller, node).ok(), expected, "{offered:?} {controller} {node}");
        }
    }

    #[test]
    fn upstreams_words_are_taken() {
        let words = |words: &[&str]| {
            let command = BACKEND.finished((BACKEND.replaced.flags)(BACKEND.command()));
            command.try_get_matches_from([&["aliyun"], words].concat())
        };
        let taken = words(&[
            "--endpoint=unix://csi/driverplugin.csi.alibabacloud.com-replace/csi.sock",
            "--v=2",
            "--logging-format=json",
            "--driver=disk",
            "--run-controller-service=false",
            "--run-node-service",
            "--kube-api-qps=100",
            "--kube-api-burst=200",
            "--feature-gates=DiskADController=true",
            "--use-labeler=true",
            "--nodeid=somewhere",
            "--service-port=usual",
        ]);
        let taken = taken.unwrap();
        let args = Args::from_arg_matches(&taken).unwrap();
        assert!(!args.upstream.run_controller_service && args.upstream.run_node_service);
        let mut common = Common::from_arg_matches(&taken).unwrap();
        apply(&taken, &mut common).unwrap();
        assert_eq!(common.endpoint.to_string(), "unix:///csi/diskplugin.csi.alibabacloud.com/csi.sock");
        assert_eq!(common.http_endpoint.as_deref(), Some(":11260"));
        for wrong in
            ["--driver=nas", "--run-node-service=perhaps", "--network-type=radio", "--service-port=0x1"]
        {
            assert!(words(&[wrong]).is_err(), "{wrong}");
        }
    }
}
