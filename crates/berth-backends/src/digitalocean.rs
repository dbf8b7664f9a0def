//! Volumes of DigitalOcean's block storage, as a replacement of csi-digitalocean.
//!
//! The provider remembers the volumes; this process keeps nothing that it could lose. A volume is found again by its name,
//! which is unique in a region, what it was copied from stands in its description, and an action that was begun is found by
//! what the volume is attached to. Whoever may have done something and does not know it looks before it answers.
//!
//! The controller has the account's token and needs no node. A node finds devices by their names and needs no token.

mod account;
mod api;
mod attach;
mod names;
mod snapshots;
#[cfg(test)]
mod tests;
mod volumes;

use std::{net::IpAddr, path::PathBuf, sync::Arc, time::Duration};

use berth_core::{NodeId, Topology};
use hyper::Method;

use self::{account::Account, api::Api, names::CREATED_BY};
use crate::{
    Driver, Error, NodeVolume, Result,
    cloud::{
        CloudNode, Deadline, DiskNames, DiskNode, Disks, Endpoint, Finder, Http, Identity, Secret, compose,
        controller,
    },
    services::Mode,
};

/// What the provider is called in errors.
const PROVIDER: &str = "DigitalOcean";
/// The key of the region in a topology, as upstream's driver has it.
const REGION: &str = "region";
/// The names under which upstream's driver is known; a volume says with them that its disk must not be formatted.
const NO_FORMAT: [&str; 2] = ["dobs.csi.digitalocean.com/noformat", "com.digitalocean.csi.dobs/noformat"];
/// Where droplets learn about themselves: an address on the link, without encryption.
const METADATA: [u8; 4] = [169, 254, 169, 254];
/// How long an answer of that may take.
const METADATA_TIME: Duration = Duration::from_secs(5);

/// How the driver runs.
#[derive(Debug, Clone)]
pub struct Config {
    /// The driver's name, which is a part of what nodes are told.
    pub driver_name: String,
    /// The base of the API's addresses.
    pub url: String,
    /// The account's token, which only a controller needs.
    pub token: Option<Secret>,
    /// At most so many requests a second; as many as the provider takes if 0.
    pub rate: f64,
    /// The region; that of this droplet if `None`.
    pub region: Option<String>,
    /// The id of the droplet that this node is; asked of the metadata service if `None`.
    pub node_id: Option<NodeId>,
    /// The base of the metadata service's addresses.
    pub metadata_url: String,
    /// A tag for the volumes and snapshots that are made, and for the volumes that are attached.
    pub tag: Option<String>,
    /// How many volumes a droplet takes.
    pub volume_limit: u32,
    /// Where links to block devices are, by their ids.
    pub device_dir: PathBuf,
    /// Whether a device counts only once the kernel says that it is running.
    pub validate_attachment: bool,
    /// Where the records of what is staged are kept.
    pub state_dir: PathBuf,
    /// The age after which a snapshot that a clone was made of, and that was left over, is removed.
    pub leftover_age: Duration,
}

/// Volumes of DigitalOcean's block storage.
#[derive(Debug)]
pub struct DigitalOcean {
    config: Config,
    region: String,
    account: Option<Arc<Account>>,
    node: Option<CloudNode<Volumes>>,
}

impl DigitalOcean {
    /// Learns where this is, and checks the token.
    pub async fn open(config: Config, mode: Mode) -> Result<Self> {
        let metadata = Metadata::new(&config.metadata_url)?;
        let region = match &config.region {
            Some(region) => region.clone(),
            None => metadata.ask("region", "--region").await?,
        };
        if region.is_empty() || !region.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
            return Err(Error::Invalid(format!("{region:?} is no region")));
        }
        let account = match (mode, &config.token) {
            (Mode::Node, _) => None,
            (_, None) => {
                return Err(Error::invalid(
                    "the controller needs a token: give --token or DIGITALOCEAN_ACCESS_TOKEN",
                ));
            }
            (_, Some(token)) => {
                let endpoint = Endpoint::parse("--url", &config.url, &[])?;
                let api = Api::new(endpoint, token.clone(), config.rate)?;
                Some(Account::open(api, &region, &config).await?)
            }
        };
        let node = if mode == Mode::Controller {
            None
        } else {
            let id = if let Some(id) = &config.node_id {
                id.clone()
            } else {
                let id = metadata.ask("id", "--node-id").await?;
                id.parse().map_err(|error| Error::Invalid(format!("the droplet's id: {error}")))?
            };
            let finder = Finder::new(config.device_dir.clone(), config.validate_attachment);
            let volumes = Volumes { driver: config.driver_name.clone() };
            let disks = DiskNode::open(volumes, finder, &config.state_dir.join("disks"))?;
            let limit = Some(config.volume_limit).filter(|limit| *limit > 0);
            Some(CloudNode { id, topology: Topology::single(REGION, &region), disks, limit })
        };
        Ok(Self { config, region, account, node })
    }

    /// The driver, with the parts that it was opened for.
    pub fn driver(&self, version: &str) -> Driver {
        let driver = Driver::new(&self.config.driver_name, version);
        let controller = self.account.as_ref().map(|account| controller(account).into());
        compose(driver, controller, self.node.as_ref())
    }

    /// Where volumes are made and used.
    pub fn region(&self) -> &str {
        &self.region
    }

    /// Whether the API answers and takes the token; always so for a node, which does not use it.
    pub async fn healthy(&self) -> Result<()> {
        match &self.account {
            Some(account) => account.check(Deadline::after(Duration::from_secs(15))).await,
            None => Ok(()),
        }
    }
}

/// The metadata service of droplets.
struct Metadata {
    http: Http,
    endpoint: Endpoint,
}

impl Metadata {
    fn new(url: &str) -> Result<Self> {
        let endpoint = Endpoint::parse("--metadata-url", url, &[IpAddr::from(METADATA)])?;
        Ok(Self { http: Http::new(&endpoint)?, endpoint })
    }

    async fn ask(&self, what: &str, flag: &str) -> Result<String> {
        let failed = |why: String| {
            Error::Unavailable(format!(
                "ask {} for this droplet's {what}: {why}; outside of DigitalOcean give {flag}",
                self.endpoint
            ))
        };
        let url = self.endpoint.join(&format!("metadata/v1/{what}"));
        let answer = self.http.send(Method::GET, &url, &[], None, METADATA_TIME).await;
        let answer = answer.map_err(|unsent| failed(unsent.why))?;
        if !answer.status.is_success() {
            return Err(failed(format!("it answers {}", answer.status)));
        }
        Ok(String::from_utf8_lossy(&answer.body).trim().to_owned())
    }
}

/// What a node knows of volumes.
#[derive(Debug)]
struct Volumes {
    driver: String,
}

/// The key under which the controller tells a node the volume's name at DigitalOcean.
fn name_key(driver: &str) -> String {
    format!("{driver}/volume-name")
}

impl Disks for Volumes {
    fn wanted(&self, volume: &NodeVolume) -> Result<DiskNames> {
        let key = name_key(&self.driver);
        let name = volume.publish_context.get(&key).ok_or_else(|| {
            Error::Invalid(format!("publish_context has no {key:?}; the volume is not attached"))
        })?;
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        {
            return Err(Error::Invalid(format!("publish_context: {name:?} is no name of a volume")));
        }
        Ok(DiskNames {
            links: vec![format!("scsi-0DO_Volume_{name}")],
            ending: name.clone(),
            boundary: vec!['_'],
            identity: Identity::Scsi {
                vendor: "DO".to_owned(),
                model: "Volume".to_owned(),
                designator: name.clone(),
            },
        })
    }

    fn may_format(&self, volume: &NodeVolume) -> bool {
        !NO_FORMAT.iter().any(|key| volume.context.contains_key(*key))
    }
}
