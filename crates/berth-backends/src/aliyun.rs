//! Alibaba Cloud's disks, as a replacement of the disk part of alibaba-cloud-csi-driver.
//!
//! The provider remembers the disks; this process keeps nothing that it could lose. A disk is found again by a tag with its
//! volume's name, and made with a client token, so that the same request made again gives the same disk. What a disk was
//! cloned from is in a tag as well. Whoever may have done something and does not know it looks before it answers.
//!
//! The controller has the account's access key and needs no node. A node finds devices by their serial numbers and needs no key.

mod account;
mod api;
mod attach;
mod groups;
mod modify;
mod names;
mod parameters;
mod protocol;
mod signing;
mod snapshots;
#[cfg(test)]
mod tests;
mod volumes;

use std::{net::IpAddr, path::PathBuf, sync::Arc, time::Duration};

use berth_core::{
    NodeId, Topology,
    names::{REGION as KUBERNETES_REGION, ZONE as KUBERNETES_ZONE},
};
use hyper::{Method, StatusCode, header::HeaderName};
use serde::Deserialize;

pub use self::signing::AccessKey;
use self::{
    account::Account,
    api::Api,
    names::{CREATED_BY, VOLUME_NAME},
};
use crate::{
    Driver, Error, NodeVolume, Result,
    cloud::{
        Answer, CloudNode, Deadline, DiskNames, DiskNode, Disks, Endpoint, Finder, Http, Identity, Pace,
        compose, controller,
    },
    services::Mode,
};

/// What the provider is called in errors.
const PROVIDER: &str = "Alibaba Cloud";
/// The key under which the controller tells a node the disk's serial number.
const SERIAL: &str = "serialNumber";
/// The keys of topologies: upstream's own, which volumes have, and those of Kubernetes.
const OWN_ZONE: &str = "topology.diskplugin.csi.alibabacloud.com/zone";
const OWN_REGION: &str = "topology.diskplugin.csi.alibabacloud.com/region";
const INSTANCE: &str = "alibabacloud.com/ecs-instance-id";
/// Keys of a volume's context by which upstream's driver puts a cache before the disk, where data may be.
const CACHE: [&str; 2] = ["dataCacheSize", "dataCacheMode"];
/// And those by which it treats the disk in ways that this driver does not.
const WITHOUT_EFFECT: [&str; 6] =
    ["mkfsOptions", "sysConfig", "readIOPS", "writeIOPS", "readBPS", "writeBPS"];
/// Where instances learn about themselves: an address on the link, without encryption.
const METADATA: [u8; 4] = [100, 100, 100, 200];
/// How long an answer of that may take, and all attempts together.
const METADATA_TIME: Duration = Duration::from_secs(5);
const METADATA_ATTEMPTS: Duration = Duration::from_secs(10);

/// How the driver runs.
#[derive(Debug, Clone)]
pub struct Config {
    /// The name that the driver registers and that classes give as their provisioner.
    pub driver_name: String,
    /// The URL of the ECS API; that of the region if `None`.
    pub endpoint: Option<String>,
    /// Whether that of the region is the one inside of its private networks.
    pub vpc: bool,
    /// The account's key, which only a controller needs. A node with one learns how many disks its instance type takes.
    pub key: Option<AccessKey>,
    /// At most so many requests a second; as many as the provider takes if 0.
    pub rate: f64,
    /// The region; that of this instance if `None`.
    pub region: Option<String>,
    /// The zone of this node, and of disks that nobody says a zone for; asked of the metadata service if `None`.
    pub zone: Option<String>,
    /// The id of the instance that this node is; asked of the metadata service if `None`.
    pub node_id: Option<NodeId>,
    /// The base of the metadata service's addresses.
    pub metadata_url: String,
    /// The id of the cluster, for tags.
    pub cluster_id: Option<String>,
    /// How many volumes this node takes; by its instance type if 0.
    pub max_volumes: u32,
    /// Whether topologies have upstream's own keys only, and none of Kubernetes.
    pub private_topology: bool,
    /// Where links to block devices are, by their ids.
    pub device_dir: PathBuf,
    /// Where the records of what is staged are kept.
    pub state_dir: PathBuf,
    /// The age after which a snapshot that a clone was made of, and that was left over, is removed.
    pub leftover_age: Duration,
}

impl Config {
    fn topology_keys(&self) -> TopologyKeys {
        let region = if self.private_topology { OWN_REGION } else { KUBERNETES_REGION };
        TopologyKeys { zone: OWN_ZONE, region, is_private: self.private_topology }
    }
}

/// The keys that the topologies of volumes have.
#[derive(Debug, Clone, Copy)]
struct TopologyKeys {
    zone: &'static str,
    region: &'static str,
    is_private: bool,
}

impl TopologyKeys {
    /// The topology with these keys in the place of others for the same; one that names no region is in this one.
    fn canonical(&self, mut topology: Topology, region: &str) -> Topology {
        for (key, others) in
            [(self.zone, [KUBERNETES_ZONE, OWN_ZONE]), (self.region, [KUBERNETES_REGION, OWN_REGION])]
        {
            for other in others.into_iter().filter(|other| *other != key) {
                if let Some(value) = topology.0.remove(other) {
                    topology.0.entry(key.to_owned()).or_insert(value);
                }
            }
        }
        topology.0.entry(self.region.to_owned()).or_insert_with(|| region.to_owned());
        topology
    }

    /// The topology of a node.
    fn of_node(&self, region: &str, zone: &str, instance: &NodeId) -> Topology {
        let mut topology = Topology::single(self.zone, zone);
        topology.0.insert(self.region.to_owned(), region.to_owned());
        topology.0.insert(INSTANCE.to_owned(), instance.to_string());
        if !self.is_private {
            topology.0.insert(KUBERNETES_ZONE.to_owned(), zone.to_owned());
        }
        topology
    }
}

/// The disks of Alibaba Cloud in one region.
#[derive(Debug)]
pub struct Aliyun {
    config: Config,
    region: String,
    account: Option<Arc<Account>>,
    node: Option<CloudNode<Volumes>>,
}

impl Aliyun {
    /// Learns where this is, and checks the key.
    pub async fn open(config: Config, mode: Mode) -> Result<Self> {
        let is_known = config.region.is_some()
            && (mode == Mode::Controller || (config.zone.is_some() && config.node_id.is_some()));
        let document = if is_known { Document::default() } else { learn(&config).await? };
        let region = config.region.clone().unwrap_or(document.region_id);
        if region.is_empty() || !region.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
            return Err(Error::Invalid(format!("{region:?} is no region")));
        }
        let zone = config.zone.clone().or(Some(document.zone_id).filter(|zone| !zone.is_empty()));
        let api = || -> Result<Option<Api>> {
            let Some(key) = &config.key else { return Ok(None) };
            let network = if config.vpc { "ecs-vpc" } else { "ecs" };
            let usual = format!("https://{network}.{region}.aliyuncs.com/");
            let endpoint =
                Endpoint::parse("--ecs-endpoint", config.endpoint.as_deref().unwrap_or(&usual), &[])?;
            if endpoint.path() != "/" {
                return Err(Error::invalid("--ecs-endpoint: the API has no path"));
            }
            Api::new(endpoint, key.clone(), &region, config.rate).map(Some)
        };
        let account = match mode {
            Mode::Node => None,
            Mode::Controller | Mode::All => {
                let api = api()?.ok_or_else(|| {
                    Error::invalid(
                        "the controller needs an access key: give ALIBABA_CLOUD_ACCESS_KEY_ID and \
                         ALIBABA_CLOUD_ACCESS_KEY_SECRET",
                    )
                })?;
                Some(Account::open(api, &region, zone.clone(), &config).await?)
            }
        };
        let node = if mode == Mode::Controller {
            None
        } else {
            let id = match &config.node_id {
                Some(id) => id.clone(),
                None => document
                    .instance_id
                    .parse()
                    .map_err(|error| Error::Invalid(format!("the instance's id: {error}")))?,
            };
            let zone =
                zone.ok_or_else(|| Error::invalid("the zone of this node is not known: give --zone"))?;
            let own = if account.is_some() { None } else { api()? };
            let asked = account.as_ref().map(|account| account.api.as_ref()).or(own.as_ref());
            let limit = match config.max_volumes {
                0 => limit_of(asked, &id, &document.instance_type).await,
                most => Some(most),
            };
            let topology = config.topology_keys().of_node(&region, &zone, &id);
            let finder = Finder::new(config.device_dir.clone(), false);
            let disks = DiskNode::open(Volumes, finder, &config.state_dir.join("disks"))?;
            Some(CloudNode { id, topology, disks, limit })
        };
        Ok(Self { config, region, account, node })
    }

    /// The driver, with the parts that it was opened for.
    pub fn driver(&self, version: &str) -> Driver {
        let driver = Driver::new(&self.config.driver_name, version);
        let controller = self
            .account
            .as_ref()
            .map(|account| controller(account).modification(account).group_snapshots(account).into());
        compose(driver, controller, self.node.as_ref())
    }

    /// Where disks are made and used.
    pub fn region(&self) -> &str {
        &self.region
    }
}

/// How many volumes an instance takes: as many disks as its type takes, without those that are no volumes.
async fn limit_of(api: Option<&Api>, id: &NodeId, instance_type: &str) -> Option<u32> {
    let until = Deadline::after(Duration::from_secs(30));
    let asked = async {
        let (Some(api), false) = (api, instance_type.is_empty()) else { return Ok(None) };
        let Some(quantity) = api.disk_quantity(instance_type, until).await? else { return Ok(None) };
        let disks = api.disks_of(id.as_str(), until).await?;
        let is_volume = |disk: &&api::Disk| {
            disk.kind != "system"
                && (disk.tag(VOLUME_NAME).is_some() || disk.tag(CREATED_BY.0) == Some(CREATED_BY.1))
        };
        let others = disks.len() - disks.iter().filter(is_volume).count();
        // The system disk is one, whether it is described or not.
        let others = u32::try_from(others.max(1)).unwrap_or(u32::MAX);
        Ok::<_, crate::cloud::Failure>(Some(quantity.saturating_sub(others).max(1)))
    };
    let found = asked.await.unwrap_or_else(|error| {
        tracing::warn!(%error, "how many disks this instance takes could not be asked");
        None
    });
    if found.is_none() {
        tracing::warn!("how many disks this instance takes is not known; give MAX_VOLUMES_PERNODE");
    }
    found
}

/// What an instance learns about itself.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct Document {
    region_id: String,
    zone_id: String,
    instance_id: String,
    instance_type: String,
}

/// Asks the metadata service, which wants a token of its own to be asked with.
async fn learn(config: &Config) -> Result<Document> {
    let endpoint = Endpoint::parse("--metadata-url", &config.metadata_url, &[IpAddr::from(METADATA)])?;
    let http = Http::new(&endpoint)?;
    let send = async |method: Method, path: &str, header: (&'static str, String)| {
        let headers = [(HeaderName::from_static(header.0), header.1)];
        let answer = http.send(method, &endpoint.join(path), &headers, None, METADATA_TIME).await;
        match answer {
            Err(unsent) => Err(unsent.why),
            Ok(answer) if answer.status == StatusCode::OK => Ok(answer),
            Ok(answer) => Err(format!("it answers {}", answer.status)),
        }
    };
    let ask = async || -> std::result::Result<Answer, String> {
        let lifetime = ("x-aliyun-ecs-metadata-token-ttl-seconds", "63".to_owned());
        let token = send(Method::PUT, "latest/api/token", lifetime).await?;
        let token = String::from_utf8_lossy(&token.body).trim().to_owned();
        let path = "latest/dynamic/instance-identity/document";
        send(Method::GET, path, ("x-aliyun-ecs-metadata-token", token)).await
    };
    let until = Deadline::after(METADATA_ATTEMPTS);
    let mut pace = Pace::new();
    let failed = |why: String| {
        Error::Unavailable(format!(
            "ask {endpoint} what this instance is: {why}; outside of {PROVIDER} give --region, and a node also --node-id and \
             --zone"
        ))
    };
    loop {
        let answer = match ask().await {
            Ok(answer) => answer,
            Err(_) if pace.next(0, until).await => continue,
            Err(why) => return Err(failed(why)),
        };
        return serde_json::from_slice(&answer.body).map_err(|error| failed(error.to_string()));
    }
}

/// What a node knows of volumes.
#[derive(Debug)]
struct Volumes;

impl Disks for Volumes {
    fn wanted(&self, volume: &NodeVolume) -> Result<DiskNames> {
        if let Some(key) = CACHE.iter().find(|key| volume.context.contains_key(**key)) {
            return Err(Error::Precondition(format!(
                "volume_context: {key:?} puts a cache before the disk, which may hold data; this driver has none"
            )));
        }
        for key in WITHOUT_EFFECT.iter().filter(|key| volume.context.contains_key(**key)) {
            tracing::warn!(volume.id = %volume.id, key, "this key of the volume's context has no effect here");
        }
        let serial = volume.publish_context.get(SERIAL).ok_or_else(|| {
            Error::Invalid(format!("publish_context has no {SERIAL:?}; the volume is not attached"))
        })?;
        if serial.is_empty() || !serial.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Err(Error::Invalid(format!("publish_context: {serial:?} is no serial number of a disk")));
        }
        Ok(DiskNames {
            links: vec![
                format!("virtio-{serial}"),
                format!("nvme-Alibaba_Cloud_Elastic_Block_Storage_{serial}"),
            ],
            ending: serial.clone(),
            boundary: vec!['-', '_'],
            identity: Identity::Serial(serial.clone()),
        })
    }

    fn may_format(&self, _: &NodeVolume) -> bool {
        true
    }
}
