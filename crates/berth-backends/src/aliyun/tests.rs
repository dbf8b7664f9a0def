//! The driver over an API that remembers disks as ECS does, and fails when it is told to.

mod attach;
mod provider;
mod snapshots;
mod start;
mod volumes;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use berth_core::{Access, AccessMode, Capacity, CapacityRange, VolumeCapability};
use parking_lot::Mutex;
use serde_json::{Value, json};

use self::provider::{Cloud, Fault};
use super::{account::Account, api::Api, *};
use crate::{
    Attachment as _, CapacityInfo as _, Cloning as _, ContentSource, Context, Expansion as _, Listing as _,
    Modification as _, NewSnapshot, NewVolume, PageRequest, Parameters, Placement as _, Snapshots as _,
    TopologyRequirement, Volume, Volumes as _,
    cloud::{
        leftovers::remove_leftovers,
        scripted::{Asked, Reply, Scripted},
    },
};

const GIB: i64 = 1 << 30;

/// A driver on such an account.
struct Bench {
    cloud: Arc<Mutex<Cloud>>,
    server: Scripted,
    account: Arc<Account>,
    ctx: Context,
}

fn config(url: &str) -> Config {
    Config {
        driver_name: "diskplugin.csi.alibabacloud.com".to_owned(),
        endpoint: Some(url.to_owned()),
        vpc: false,
        key: Some(AccessKey::new("key", "hush-hush", None).unwrap()),
        rate: 0.0,
        region: Some("cn-hangzhou".to_owned()),
        zone: Some("cn-hangzhou-h".to_owned()),
        node_id: Some("i-1".parse().unwrap()),
        metadata_url: "http://127.0.0.1:9".to_owned(),
        cluster_id: Some("c-1".to_owned()),
        max_volumes: 0,
        private_topology: false,
        device_dir: "/nowhere".into(),
        state_dir: "/nowhere".into(),
        leftover_age: Duration::from_secs(1 << 40),
    }
}

impl Bench {
    async fn new() -> Self {
        let cloud: Arc<Mutex<Cloud>> = Arc::default();
        let answering = cloud.clone();
        let server = Scripted::serve(move |asked| answering.lock().answer(asked)).await;
        let config = config(&server.url);
        let endpoint = Endpoint::parse("--ecs-endpoint", &server.url, &[]).unwrap();
        let api = Api::new(endpoint, config.key.clone().unwrap(), "cn-hangzhou", 0.0).unwrap();
        let account = Account::open(api, "cn-hangzhou", config.zone.clone(), &config).await.unwrap();
        let bench = Self { cloud, server, account, ctx: Context::default() };
        // The first look for what was left over is made before anything is counted.
        while !bench.actions().contains(&"DescribeSnapshots".to_owned()) {
            tokio::task::yield_now().await;
        }
        bench
    }

    /// The actions that were asked for so far.
    fn actions(&self) -> Vec<String> {
        let action = |asked: Asked| asked.headers["x-acs-action"].to_str().unwrap().to_owned();
        self.server.asked().into_iter().map(action).collect()
    }

    fn fault(&self, action: &'static str, fault: Fault) {
        self.cloud.lock().faults.push((action, fault));
    }

    async fn plan(&self, new: &NewVolume) -> crate::Result<super::volumes::Plan> {
        let mut plan = self.account.plan(&self.ctx, new)?;
        self.account.place(&self.ctx, &mut plan, None).await?;
        Ok(plan)
    }

    async fn create(&self, name: &str, size: i64) -> crate::Result<Volume> {
        self.create_as(&new(name, size, &[("type", "cloud_essd")])).await
    }

    async fn create_as(&self, new: &NewVolume) -> crate::Result<Volume> {
        let plan = self.plan(new).await?;
        if let Some(found) = self.account.find(&self.ctx, &plan).await? {
            return Ok(found);
        }
        self.account.create(&self.ctx, plan).await
    }

    async fn attach(&self, volume: &Volume, node: &str) -> crate::Result<BTreeMap<String, String>> {
        let volume = self.account.get(&self.ctx, &volume.id).await.unwrap().unwrap();
        self.account.attach(&self.ctx, &volume, &node.parse().unwrap(), &capability()).await
    }

    async fn detach(&self, volume: &Volume, node: &str) -> crate::Result<()> {
        self.account.get(&self.ctx, &volume.id).await.unwrap();
        self.account.detach(&self.ctx, &volume.id, Some(&node.parse().unwrap())).await
    }

    fn counts(&self) -> (usize, usize) {
        let cloud = self.cloud.lock();
        (cloud.disks.len(), cloud.snapshots.len())
    }
}

fn capability() -> VolumeCapability {
    let access = Access::Mount { fs_type: String::new(), flags: vec![], group: None };
    VolumeCapability { access, mode: AccessMode::SingleNodeWriter }
}

fn map(pairs: &[(&str, &str)]) -> Parameters {
    pairs.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect()
}

fn new(name: &str, required: i64, parameters: &[(&str, &str)]) -> NewVolume {
    NewVolume {
        name: name.parse().unwrap(),
        range: CapacityRange::new(required, 0).unwrap(),
        capabilities: vec![capability()],
        parameters: map(parameters),
        mutable: Parameters::new(),
        ephemeral: false,
    }
}

fn tags_of(disk: &Value) -> BTreeMap<String, String> {
    let tags = disk["Tags"]["Tag"].as_array().unwrap();
    tags.iter()
        .map(|tag| (tag["TagKey"].as_str().unwrap().to_owned(), tag["TagValue"].as_str().unwrap().to_owned()))
        .collect()
}
