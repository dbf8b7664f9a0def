//! Volumes of CSI drivers: PersistentVolumes with `spec.csi`, and volumes that a pod asks of a driver itself.
//!
//! Reads: CSIDriver (cached); VolumeAttachment and Secret (live). Writes nothing to Kubernetes.
//! On disk: the kubelet's layout. `vol_data.json` is written before the driver is called, so that what a crash leaves is
//! known. Calls for different volumes share nothing but the connection, so none waits for another's.

mod block;
mod calls;
mod expand;
mod inputs;
mod mounted;
mod rules;
mod source;
mod stats;
mod vol_data;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use parking_lot::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use berth_kube::timeline::Step;
use berth_kube::{Cache, Cluster, Key};
use futures_util::FutureExt as _;
use k8s_openapi::api::storage::v1::CSIDriver;

use self::calls::unanswered;
use self::rules::Rules;
use self::source::{CsiVolume, Mode};
pub use self::stats::Stats;
use self::vol_data::VolData;
use crate::layout::Layout;
use crate::plugin::{Certainty, Device, Failed, Placed, Plugin, PodVolume, Ready, Source};
use crate::registration::{Capabilities, Driver, Drivers};
use crate::tokens::Tokens;

/// The plugin's name.
pub const NAME: &str = "kubernetes.io/csi";
/// How often a volume is published again whose driver asks for it: as often as the kubelet looks at a pod.
const REPUBLISH: Duration = Duration::from_secs(60);

const COMPONENT: &str = "volume-manager";

/// The plugin for all CSI drivers.
pub struct Csi {
    cluster: Cluster,
    layout: Layout,
    node: String,
    drivers: Drivers,
    tokens: Tokens,
    objects: Cache<CSIDriver>,
    /// For each volume that was asked for since the start, and each device: whether a failure must leave what lies on
    /// disk of it alone, as it is, or may be from before the start, in use.
    kept: Mutex<HashMap<Kept, bool>>,
}

/// What lies on disk of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Kept {
    /// On the node, by the unique name of the device.
    Device(String),
    /// For a pod, by its uid and the name of the volume's directory.
    Volume(String, String),
}

impl Csi {
    /// The plugin on the node of this name.
    pub fn new(cluster: &Cluster, layout: &Layout, node: &str, drivers: Drivers, tokens: Tokens) -> Self {
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

    /// The driver of this name, and what it can do now.
    async fn able_driver(&self, name: &str) -> Result<(Driver, Capabilities), Failed> {
        let driver = self.driver(name)?;
        let capabilities = driver
            .ask_capabilities()
            .await
            .map_err(|status| unanswered(&format!("asking driver {name} what it can do"), &status))?;
        Ok((driver, capabilities))
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

    /// Tells the timeline of what was done to bring a volume.
    fn tell(&self, call: &str, state: &str, volume: &PodVolume, begun: Instant, failed: Option<&Failed>) {
        let claim = match &volume.source {
            Source::Persistent { claim, .. } => Key::of(claim.as_ref()).to_string(),
            Source::Inline(_) => String::new(),
        };
        let persistent = !claim.is_empty();
        Step {
            component: COMPONENT,
            call,
            state,
            volume: if persistent { volume.spec_name() } else { "" },
            claim: &claim,
            pod: &Key::of(volume.pod.as_ref()).to_string(),
            node: &self.node,
            ..Step::default()
        }
        .ended(begun, failed.map(|failed| failed.message.as_str()));
    }

    /// Tells the timeline of what was done to take a volume away.
    fn tell_undone(&self, call: &str, volume: &str, begun: Instant, failed: Option<&Failed>) {
        Step { component: COMPONENT, call, volume, node: &self.node, ..Step::default() }
            .ended(begun, failed.map(|failed| failed.message.as_str()));
    }

    fn kept(&self) -> MutexGuard<'_, HashMap<Kept, bool>> {
        self.kept.lock()
    }

    /// Whether a failure of this kind says that nothing is there, so that what was made for the call is to be removed.
    fn is_nothing(&self, key: &Kept, failed: &Failed) -> bool {
        let mut kept = self.kept();
        let nothing = failed.certainty == Certainty::Final && !kept.get(key).copied().unwrap_or(false);
        if nothing {
            kept.remove(key);
        }
        nothing
    }

    /// The directory of a pod's volume.
    fn pod_dir(&self, uid: &str, spec_name: &str) -> PathBuf {
        self.layout.pod_volume(uid, NAME, spec_name)
    }

    /// The directories of all volumes with a filesystem that are or may be staged.
    fn staged_dirs(&self) -> Vec<PathBuf> {
        let top = self.layout.plugins().join(NAME);
        entries(&top)
            .into_iter()
            // Drivers have a dot or at least another name; these two are the kubelet's own.
            .filter(|driver| !driver.ends_with("volumeDevices") && !driver.ends_with("pv"))
            .flat_map(|driver| entries(&driver))
            .collect()
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
        let volume = CsiVolume::read(volume)?;
        if volume.mode == Mode::Ephemeral {
            return Ok(None);
        }
        if self.objects.synced().now_or_never().is_none() {
            return Err(Failed::unchanged("the CSIDriver objects are not known yet"));
        }
        let attach = Rules::of(self.objects.named(&volume.driver).as_deref()).attach;
        let stage = self.driver(&volume.driver)?.capabilities().stage;
        Ok(Some(Device { unique_name: volume.unique_name(), attach, stage }))
    }

    async fn stage(&self, volume: &PodVolume) -> Result<(), Failed> {
        let csi = CsiVolume::read(volume)?;
        let begun = Instant::now();
        let staged = if csi.block {
            self.stage_block(&csi).await
        } else {
            self.stage_mounted(&volume.pod, &csi).await
        };
        self.tell("NodeStageVolume", "VOL_READY", volume, begun, staged.as_ref().err());
        staged
    }

    async fn unstage(&self, device: &str) -> Result<(), Failed> {
        let was_mounted = self.unstage_mounted(device).await?;
        // A volume is one or the other, and to look for the other is to read what all of them are.
        if !was_mounted {
            self.unstage_blocks(device).await?;
        }
        self.kept().remove(&Kept::Device(device.to_owned()));
        Ok(())
    }

    async fn set_up(&self, volume: &PodVolume) -> Result<Ready, Failed> {
        let csi = CsiVolume::read(volume)?;
        let begun = Instant::now();
        let published = if csi.block {
            self.publish_block(&volume.pod, &csi).await
        } else {
            self.publish_mounted(&volume.pod, &csi).await
        };
        self.tell("NodePublishVolume", "PUBLISHED", volume, begun, published.as_ref().err());
        published.map(|path| Ready { path })
    }

    fn refresh_after(&self, volume: &PodVolume) -> Option<Duration> {
        let volume = CsiVolume::read(volume).ok().filter(|volume| !volume.block)?;
        Rules::of(self.objects.named(&volume.driver).as_deref()).republish.then_some(REPUBLISH)
    }

    async fn expand(&self, volume: &PodVolume) -> Result<Option<u64>, Failed> {
        let begun = Instant::now();
        let grown = self.expand_volume(volume).await;
        if !matches!(grown, Ok(None)) {
            self.tell("NodeExpandVolume", "", volume, begun, grown.as_ref().err());
        }
        grown
    }

    async fn tear_down(&self, placed: &Placed) -> Result<(), Failed> {
        let begun = Instant::now();
        let done = if placed.block {
            self.unpublish_block(placed).await
        } else {
            self.unpublish_mounted(placed).await
        };
        self.tell_undone("NodeUnpublishVolume", &placed.spec_name, begun, done.as_ref().err());
        done
    }

    fn staged(&self) -> Vec<Device> {
        let mounted = self
            .staged_dirs()
            .into_iter()
            .filter_map(|directory| data_or(&directory, || mounted::remove_unused(&directory)));
        let blocks = block::directories(&self.layout)
            .into_iter()
            .filter_map(|directory| data_or(&directory.join("data"), || block::remove_unused(&directory)));
        let known: Vec<VolData> = mounted.chain(blocks).collect();
        let mut devices: Vec<Device> = known.iter().map(|data| self.device_from(data)).collect();
        devices.sort_by(|a, b| a.unique_name.cmp(&b.unique_name));
        devices.dedup();
        devices
    }

    fn placed(&self) -> Vec<Placed> {
        let mut placed = block::placed(&self.layout);
        placed.sort_by(|a, b| (&a.spec_name, &a.pod_uid).cmp(&(&b.spec_name, &b.pod_uid)));
        placed.dedup();
        placed
    }

    fn device_of(&self, placed: &Placed) -> Option<Device> {
        let directory = if placed.block {
            self.layout.csi_device(&placed.spec_name).join("data")
        } else {
            self.pod_dir(&placed.pod_uid, &placed.spec_name)
        };
        let data = data_or(&directory, || ()).filter(|data| data.mode != Mode::Ephemeral.as_str())?;
        Some(self.device_from(&data))
    }
}

/// The entries of a directory; none if it is not there.
fn entries(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect()
}

/// What the file in a directory says; without a file `missing` is called, and a damaged one is complained about.
fn data_or(directory: &Path, missing: impl FnOnce()) -> Option<VolData> {
    match VolData::read(directory) {
        Ok(None) => {
            missing();
            None
        }
        Ok(data) => data,
        Err(error) => {
            tracing::error!(%error, "a volume cannot be taken away until this is repaired");
            None
        }
    }
}

#[cfg(test)]
mod tests;
