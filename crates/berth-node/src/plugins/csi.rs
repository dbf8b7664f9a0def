//! Volumes of CSI drivers: PersistentVolumes with `spec.csi`, and volumes that a pod asks of a driver itself.
//!
//! Reads: CSIDriver (cached); VolumeAttachment and Secret (live). Writes nothing to Kubernetes.
//! On disk: the kubelet's layout. `vol_data.json` is written before the driver is called, so that what a crash leaves is
//! known. Calls for different volumes share nothing but the connection, so none waits for another's.
//!
//! A call that times out, or fails with another code that is not final (`berth_csi::code::is_final`), leaves the volume
//! uncertain (`failed` below): the volume manager repeats the call while a pod wants the volume, and has the driver undo it
//! when none does (`volumes/plan.rs`).

mod disk;
mod inputs;
mod rules;
mod source;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use berth_core::Quantity;
use berth_csi::NodeCapability;
use berth_csi::code;
use berth_csi::v1::{
    CapacityRange, NodeExpandVolumeRequest, NodePublishVolumeRequest, NodeStageVolumeRequest,
    NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest,
};
use berth_host::path::Dir;
use berth_kube::{Cache, Cluster};
use berth_runtime::blocking;
use futures_util::FutureExt as _;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::storage::v1::CSIDriver;
use parking_lot::{Mutex, MutexGuard};
use tonic::{Code, Status};

use self::disk::{NodePaths, PodPaths, VolData};
use self::rules::Rules;
pub(crate) use self::source::CsiVolume;
use self::source::Mode;
use super::mount_points::undo_mount;
use super::{fs_group, give_to_group, record_step, record_undone_step};
use crate::layout::Layout;
use crate::plugin::{Certainty, Device, Failed, Placed, Plugin, PodVolume, Ready, Source};
use crate::registration::{Driver, Drivers};
use crate::tokens::Tokens;

/// The name of the plugin, which is part of its paths and of the names of its devices.
const NAME: &str = berth_core::names::CSI_PLUGIN;
/// How often a volume is published again whose driver asks for it: as often as the kubelet syncs a pod.
const REPUBLISH: Duration = Duration::from_secs(60);

/// The plugin for all CSI drivers.
pub(crate) struct Csi {
    cluster: Cluster,
    layout: Layout,
    node: String,
    drivers: Drivers,
    tokens: Tokens,
    objects: Cache<CSIDriver>,
    /// For each volume that was asked for since the start, and each device: whether a failure must leave what lies on
    /// disk of it alone, as it is, or may be from before the start, in use.
    kept: Mutex<HashMap<OnDisk, bool>>,
}

/// What lies on disk of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum OnDisk {
    /// On the node, by the unique name of the device.
    Device(String),
    /// For a pod, by its uid and the name of the volume's directory.
    Volume(String, String),
}

impl Csi {
    /// The plugin on the node of this name.
    pub(crate) fn new(
        cluster: &Cluster,
        layout: &Layout,
        node: &str,
        drivers: Drivers,
        tokens: Tokens,
    ) -> Self {
        Self {
            cluster: cluster.clone(),
            layout: layout.clone(),
            node: node.to_owned(),
            drivers,
            tokens,
            objects: cluster.cache(),
            kept: Mutex::default(),
        }
    }

    /// The driver of this name.
    fn driver(&self, name: &str) -> Result<Driver, Failed> {
        self.drivers.get(name).ok_or_else(|| {
            Failed::unchanged(format!(
                "driver name {name} not found in the list of registered CSI drivers; is the driver running on node {}?",
                self.node
            ))
        })
    }

    /// What the driver's CSIDriver says; that there is none counts only once all are known.
    async fn rules(&self, driver: &str) -> Rules {
        self.objects.synced().await;
        Rules::of(self.objects.named(driver).as_deref())
    }

    fn device_from(&self, data: &VolData) -> Device {
        let attach = Rules::of(self.objects.named(&data.driver).as_deref()).attach;
        Device { unique_name: data.unique_name(), attach, stage: true }
    }

    fn kept(&self) -> MutexGuard<'_, HashMap<OnDisk, bool>> {
        self.kept.lock()
    }

    /// Whether a failure of this kind says that nothing is there, so that what was made for the call is to be removed.
    fn is_nothing(&self, key: &OnDisk, failed: &Failed) -> bool {
        let mut kept = self.kept();
        let nothing = failed.certainty == Certainty::Final && !kept.get(key).copied().unwrap_or(false);
        if nothing {
            kept.remove(key);
        }
        nothing
    }

    /// What a failure to bring something means, after what was made for it is removed where nothing is there.
    async fn settled(
        &self,
        key: &OnDisk,
        failed: Failed,
        remove: impl FnOnce() -> Result<(), String> + Send + 'static,
    ) -> Failed {
        if !self.is_nothing(key, &failed) {
            return Failed::uncertain(failed.message);
        }
        match blocking(remove).await {
            Ok(()) => failed,
            Err(left) => Failed::uncertain(format!(
                "{}; besides, what was made for the call is left: {left}",
                failed.message
            )),
        }
    }

    /// Has the driver stage a volume, with a filesystem or as a block device.
    async fn stage_volume(&self, volume: &PodVolume) -> Result<(), Failed> {
        let csi = volume.csi()?;
        let driver = self.driver(&csi.driver)?;
        if !driver.can(NodeCapability::StageUnstageVolume) {
            return Ok(());
        }
        let rules = self.rules(&csi.driver).await;
        let publish_context = self.publish_context(&rules, &csi.driver, &csi.handle).await?;
        let secrets = self.secret("NodeStageSecretRef", csi.stage_secret.as_ref()).await?;
        let capability = csi.capability(volume, &driver, mount_group(&driver, &volume.pod))?;
        let paths = NodePaths::new(&self.layout, volume, csi);
        let data = VolData::of_node(volume, csi, &self.node);
        let (was_there, prepared) = blocking({
            let paths = paths.clone();
            move || paths.prepare(&data).map(|was_there| (was_there, Dir::ensure(&paths.staging, 0o750)))
        })
        .await?;
        let key = OnDisk::Device(csi.unique_name());
        self.kept().entry(key.clone()).or_insert(was_there);
        prepared.map_err(|error| Failed::uncertain(error.sentence()))?;
        let request = NodeStageVolumeRequest {
            volume_id: csi.handle.clone(),
            publish_context,
            staging_target_path: text(&paths.staging),
            volume_capability: Some(capability),
            secrets,
            volume_context: csi.attributes.clone(),
        };
        if let Err(status) = driver.call(request).await {
            return Err(self.settled(&key, failed(&status), move || paths.remove()).await);
        }
        self.kept().insert(key, true);
        Ok(())
    }

    async fn publish_request(
        &self,
        volume: &PodVolume,
        csi: &CsiVolume,
        rules: &Rules,
        driver: &Driver,
        paths: &PodPaths,
    ) -> Result<NodePublishVolumeRequest, Failed> {
        let persistent = csi.mode == Mode::Persistent;
        let publish_context = if persistent {
            self.publish_context(rules, &csi.driver, &csi.handle).await?
        } else {
            BTreeMap::new()
        };
        let mut secrets = self.secret("NodePublishSecretRef", csi.publish_secret.as_ref()).await?;
        let mut volume_context = csi.attributes.clone();
        volume_context.extend(rules.pod_info(&volume.pod, csi.mode));
        if !volume.block {
            let tokens = self.token_entry(rules, &volume.pod).await?;
            if rules.tokens_are_secrets {
                secrets.extend(tokens);
            } else {
                volume_context.extend(tokens);
            }
        }
        let is_staged = volume.block || persistent && driver.can(NodeCapability::StageUnstageVolume);
        let staging = is_staged.then(|| text(&NodePaths::new(&self.layout, volume, csi).staging));
        Ok(NodePublishVolumeRequest {
            volume_id: csi.handle.clone(),
            publish_context,
            staging_target_path: staging.unwrap_or_default(),
            target_path: text(&paths.target),
            volume_capability: Some(csi.capability(volume, driver, mount_group(driver, &volume.pod))?),
            readonly: volume.read_only,
            secrets,
            volume_context,
        })
    }

    /// Has the driver take a volume away from a pod, and removes what is left of it there.
    async fn unpublish_volume(&self, placed: &Placed) -> Result<(), Failed> {
        let paths = PodPaths::new(&self.layout, &placed.pod_uid, &placed.spec_name, placed.block);
        let (paths, data) = blocking(move || {
            let data = VolData::read(&paths.data).map_err(|error| error.to_string());
            data.map(|data| (paths, data))
        })
        .await
        .map_err(Failed::uncertain)?;
        let driver = data.as_ref().map(|data| self.driver(&data.driver)).transpose()?;
        let target_path = text(&paths.target);
        if placed.block {
            let paths = paths.clone();
            blocking(move || paths.unmap()).await.map_err(Failed::uncertain)?;
        }
        let undo = async || {
            if let (Some(data), Some(driver)) = (&data, &driver) {
                let volume_id = data.handle.clone();
                let request = NodeUnpublishVolumeRequest { volume_id, target_path: target_path.clone() };
                driver.call(request).await.map_err(|status| not_undone(&status))?;
            }
            let paths = paths.clone();
            blocking(move || paths.remove()).await.map_err(Failed::uncertain)
        };
        undo_mount(&paths.target, undo).await?;
        self.kept().remove(&OnDisk::Volume(placed.pod_uid.clone(), placed.spec_name.clone()));
        Ok(())
    }

    /// Has the driver unstage a volume, and removes what is left of it on the node.
    async fn unstage_volume(&self, paths: NodePaths, data: VolData) -> Result<(), Failed> {
        if paths.may_be_staged() {
            let driver = self.driver(&data.driver)?;
            if driver.can(NodeCapability::StageUnstageVolume) {
                let staging_target_path = text(&paths.staging);
                let request = NodeUnstageVolumeRequest { volume_id: data.handle, staging_target_path };
                let begun = Instant::now();
                let done = driver.call(request).await.map_err(|status| not_undone(&status));
                record_undone_step(
                    &self.node,
                    "NodeUnstageVolume",
                    &data.spec_name,
                    begun,
                    done.as_ref().err(),
                );
                done?;
            }
        }
        blocking(move || paths.remove()).await.map_err(Failed::uncertain)
    }

    /// Grows a volume that a pod has to the capacity of its PersistentVolume; gives the size it has now, or `None` if
    /// the driver has nothing to do on nodes.
    ///
    /// `Unchanged` is the driver's own answer and nothing else, such as that it is not registered.
    async fn expand_volume(&self, volume: &PodVolume) -> Result<Option<u64>, Failed> {
        let Source::Persistent { volume: persistent, .. } = &volume.source else { return Ok(None) };
        let again = |error: Failed| Failed::uncertain(error.message);
        let csi = volume.csi().map_err(again)?;
        let capacity = persistent.spec.as_ref().and_then(|spec| spec.capacity.as_ref()?.get("storage"));
        let Some(wanted) = capacity.and_then(|capacity| capacity.0.parse::<Quantity>().ok()) else {
            return Ok(None);
        };
        let wanted = wanted.value();
        let driver = self.driver(&csi.driver).map_err(again)?;
        if !driver.can(NodeCapability::ExpandVolume) {
            return Ok(None);
        }
        let secrets = self.secret("NodeExpandSecretRef", csi.expand_secret.as_ref()).await.map_err(again)?;
        let published = PodPaths::new(&self.layout, volume.pod_uid(), volume.spec_name(), volume.block);
        let staged = driver
            .can(NodeCapability::StageUnstageVolume)
            .then(|| text(&NodePaths::new(&self.layout, volume, csi).staging));
        let request = NodeExpandVolumeRequest {
            volume_id: csi.handle.clone(),
            volume_path: text(&published.target),
            capacity_range: Some(CapacityRange { required_bytes: wanted, limit_bytes: 0 }),
            staging_target_path: staged.unwrap_or_default(),
            volume_capability: Some(csi.capability(volume, &driver, None).map_err(again)?),
            secrets,
        };
        let answer = driver.call(request).await.map_err(|status| not_grown(&status))?;
        let size = if answer.capacity_bytes > 0 { answer.capacity_bytes } else { wanted };
        Ok(u64::try_from(size).ok())
    }
}

#[async_trait]
impl Plugin for Csi {
    fn name(&self) -> &'static str {
        NAME
    }

    fn serves(&self, source: &Source) -> bool {
        match source {
            Source::Inline(volume) => volume.csi.is_some(),
            Source::Persistent { volume, .. } => volume.spec.as_ref().is_some_and(|spec| spec.csi.is_some()),
        }
    }

    fn device(&self, volume: &PodVolume) -> Result<Option<Device>, Failed> {
        let csi = volume.csi()?;
        if csi.mode == Mode::Ephemeral {
            return Ok(None);
        }
        if self.objects.synced().now_or_never().is_none() {
            return Err(Failed::unchanged("the CSIDriver objects are not known yet"));
        }
        let attach = Rules::of(self.objects.named(&csi.driver).as_deref()).attach;
        let stage = self.driver(&csi.driver)?.can(NodeCapability::StageUnstageVolume);
        Ok(Some(Device { unique_name: csi.unique_name(), attach, stage }))
    }

    /// As a driver's CSIDriver asks for it by the period in which its limit is to be read again.
    async fn attach_limit(&self, volume: &PodVolume) -> Option<String> {
        let csi = volume.csi().ok()?;
        self.objects.named(&csi.driver)?.spec.node_allocatable_update_period_seconds?;
        let why = self.exhausted(&csi.driver, &csi.handle).await?;
        self.drivers.refresh(&csi.driver);
        Some(why)
    }

    async fn stage(&self, volume: &PodVolume) -> Result<(), Failed> {
        let begun = Instant::now();
        let staged = self.stage_volume(volume).await;
        record_step(&self.node, "NodeStageVolume", "VOL_READY", volume, begun, staged.as_ref().err());
        staged
    }

    async fn unstage(&self, device: &str) -> Result<(), Failed> {
        let name = device.strip_prefix(NAME).and_then(|name| name.strip_prefix('/')?.split_once('^'));
        let Some((driver, handle)) = name.map(|(driver, handle)| (driver.to_owned(), handle.to_owned()))
        else {
            return Err(Failed::finally(format!("{device:?} is not the name of a CSI volume")));
        };
        let layout = self.layout.clone();
        let find = move || disk::staged_of(&layout, &driver, &handle);
        for (paths, data) in blocking(find).await.map_err(Failed::uncertain)? {
            self.unstage_volume(paths, data).await?;
        }
        self.kept().remove(&OnDisk::Device(device.to_owned()));
        Ok(())
    }

    /// Has the driver publish the volume for the pod.
    async fn set_up(&self, volume: &PodVolume) -> Result<Ready, Failed> {
        let begun = Instant::now();
        let publish = async {
            let csi = volume.csi()?;
            let paths = PodPaths::new(&self.layout, volume.pod_uid(), volume.spec_name(), volume.block);
            let driver = self.driver(&csi.driver)?;
            let rules = self.rules(&csi.driver).await;
            if let Some(refusal) = rules.refuse(&csi.driver, csi.mode) {
                return Err(Failed::unchanged(refusal));
            }
            let request = self.publish_request(volume, csi, &rules, &driver, &paths).await?;
            let data = if volume.block {
                VolData::of_node(volume, csi, &self.node)
            } else {
                VolData::of_pod(volume, csi, &self.node)
            };
            let was_there = blocking({
                let paths = paths.clone();
                move || paths.prepare(&data)
            })
            .await?;
            let key = OnDisk::Volume(volume.pod_uid().to_owned(), volume.spec_name().to_owned());
            self.kept().entry(key.clone()).or_insert(was_there);
            if let Err(status) = driver.call(request).await {
                return Err(self.settled(&key, failed(&status), move || paths.remove()).await);
            }
            self.kept().insert(key, true);
            if volume.block {
                let path = blocking(move || paths.map()).await.map_err(Failed::uncertain)?;
                return Ok(Ready { path });
            }
            if let Some(group) = fs_group(&volume.pod).filter(|_| {
                !driver.can(NodeCapability::VolumeMountGroup) && rules.gives_to_group(volume, csi)
            }) {
                give_to_group(&volume.pod, &paths.target, group).await.map_err(|error| {
                    let (handle, error) = (&csi.handle, error.sentence());
                    Failed::uncertain(format!("applyFSGroup failed for vol {handle}: {error}"))
                })?;
            }
            Ok(Ready { path: paths.target })
        };
        let published = publish.await;
        record_step(&self.node, "NodePublishVolume", "PUBLISHED", volume, begun, published.as_ref().err());
        published
    }

    fn refresh_after(&self, volume: &PodVolume) -> Option<Duration> {
        let csi = volume.csi().ok().filter(|_| !volume.block)?;
        Rules::of(self.objects.named(&csi.driver).as_deref()).republish.then_some(REPUBLISH)
    }

    async fn expand(&self, volume: &PodVolume) -> Result<Option<u64>, Failed> {
        let begun = Instant::now();
        let grown = self.expand_volume(volume).await;
        if !matches!(grown, Ok(None)) {
            record_step(&self.node, "NodeExpandVolume", "", volume, begun, grown.as_ref().err());
        }
        grown
    }

    async fn tear_down(&self, placed: &Placed) -> Result<(), Failed> {
        let begun = Instant::now();
        let done = self.unpublish_volume(placed).await;
        record_undone_step(&self.node, "NodeUnpublishVolume", &placed.spec_name, begun, done.as_ref().err());
        done
    }

    fn staged(&self) -> Vec<Device> {
        let staged = disk::staged(&self.layout);
        let mut devices: Vec<Device> = staged.iter().map(|data| self.device_from(data)).collect();
        devices.sort_by(|a, b| a.unique_name.cmp(&b.unique_name));
        devices.dedup();
        devices
    }

    fn placed(&self) -> Vec<Placed> {
        let mut placed = disk::placed_blocks(&self.layout);
        placed.sort_by(|a, b| (&a.spec_name, &a.pod_uid).cmp(&(&b.spec_name, &b.pod_uid)));
        placed.dedup();
        placed
    }

    fn device_of(&self, placed: &Placed) -> Option<Device> {
        let paths = PodPaths::new(&self.layout, &placed.pod_uid, &placed.spec_name, placed.block);
        let data = disk::data_or(&paths.data, || Ok(()))?;
        (data.mode != Mode::Ephemeral.as_str()).then(|| self.device_from(&data))
    }
}

/// The group that the driver itself gives the volume to.
fn mount_group(driver: &Driver, pod: &Pod) -> Option<u32> {
    fs_group(pod).filter(|_| driver.can(NodeCapability::VolumeMountGroup))
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// An answer as the outcome of something that brings a volume.
fn failed(status: &Status) -> Failed {
    let certainty = if code::is_final(status.code()) { Certainty::Final } else { Certainty::Uncertain };
    Failed { certainty, message: code::status_text(status) }
}

/// An answer as the outcome of something that takes a volume away: whatever it was, it must be tried again.
fn not_undone(status: &Status) -> Failed {
    Failed::uncertain(code::status_text(status))
}

fn not_grown(status: &Status) -> Failed {
    let certainty = match status.code() {
        Code::InvalidArgument | Code::OutOfRange | Code::NotFound => Certainty::Final,
        Code::FailedPrecondition => Certainty::Unchanged,
        _ => Certainty::Uncertain,
    };
    Failed { certainty, message: code::status_text(status) }
}

#[cfg(test)]
mod tests;
