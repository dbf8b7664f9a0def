//! What the volume manager asks of every volume plugin; `docs/extend/plugin.md` is the guide to writing one.
//!
//! A plugin sets one volume up for one pod and tears it down again; the volume manager (`volumes.rs`) decides when, in
//! which order, and what to do after a failure, by the [`Certainty`] that the failure carries. Every call may be repeated,
//! and any call may follow a crash at any point of any other.

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod, Volume};

use crate::plugins::csi::CsiVolume;

/// A volume as one pod uses it.
#[derive(Debug, Clone)]
pub(crate) struct PodVolume {
    /// The pod that uses the volume.
    pub pod: Arc<Pod>,
    /// The volume's name in the pod.
    pub name: String,
    /// Where its content comes from.
    pub source: Source,
    /// A block device rather than a filesystem.
    pub block: bool,
    /// The pod's word for the volume says that it is read-only, for all containers.
    pub read_only: bool,
    /// What the source says to a CSI driver, for volumes of one.
    csi: Option<Arc<CsiVolume>>,
}

/// Where a volume's content comes from.
#[derive(Debug, Clone)]
pub(crate) enum Source {
    /// The pod says it all.
    Inline(Arc<Volume>),
    /// The pod names a claim, which is bound to a PersistentVolume.
    Persistent {
        /// The PersistentVolume that the claim is bound to.
        volume: Arc<PersistentVolume>,
        /// The claim that it is bound to.
        claim: Arc<PersistentVolumeClaim>,
    },
}

impl PodVolume {
    /// A volume of a pod, of which all is read that a CSI driver needs to know.
    pub(crate) fn new(
        pod: Arc<Pod>,
        name: impl Into<String>,
        source: Source,
        block: bool,
        read_only: bool,
    ) -> Self {
        let name = name.into();
        let csi = CsiVolume::read(&pod, &name, &source).map(Arc::new);
        Self { pod, name, source, block, read_only, csi }
    }

    /// What the source says to a CSI driver.
    pub(crate) fn csi(&self) -> Result<&CsiVolume, Failed> {
        let not_csi = || Failed::unchanged(format!("volume {} is not a CSI volume", self.name));
        self.csi.as_deref().ok_or_else(not_csi)
    }

    /// The uid of the pod.
    pub(crate) fn pod_uid(&self) -> &str {
        self.pod.metadata.uid.as_deref().unwrap_or_default()
    }

    /// The name that the volume's directory has: the PersistentVolume's, or the one in the pod.
    pub(crate) fn spec_name(&self) -> &str {
        match &self.source {
            Source::Inline(_) => &self.name,
            Source::Persistent { volume, .. } => volume.metadata.name.as_deref().unwrap_or_default(),
        }
    }
}

/// A volume that was set up for a pod at some time, as far as it is still known: after a restart only what is on
/// disk.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Placed {
    /// The name that its directory carries, such as `kubernetes.io/csi`, or a FlexVolume driver's.
    pub plugin: String,
    /// The uid of the pod that has the volume.
    pub pod_uid: String,
    /// The name that the volume's directory has.
    pub spec_name: String,
    /// A block device rather than a filesystem.
    pub block: bool,
}

/// A volume that the node prepares once before pods get it (CSI: staged), and what attaching needs to know.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Device {
    /// Unique on the cluster, as in the node's `volumesInUse`: `kubernetes.io/csi/DRIVER^HANDLE`.
    pub unique_name: String,
    /// It must be attached (be in the node's `volumesAttached`) before it can be used.
    pub attach: bool,
    /// It is prepared on the node (staged) before pods get it.
    pub stage: bool,
}

/// Where a pod finds its volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ready {
    /// The directory to be mounted into containers, or the block device.
    pub path: PathBuf,
}

/// How sure we are that nothing was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Certainty {
    /// It failed for good: nothing is mounted.
    Final,
    /// It may have happened, or may still happen: must be undone even if nobody wants it any more.
    Uncertain,
    /// It was not even tried: everything is as before.
    Unchanged,
}

/// Why a volume could not be set up or torn down; the text goes into an event and must not hold secrets.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct Failed {
    /// What is known of the outcome.
    pub certainty: Certainty,
    /// A sentence that a person can act on.
    pub message: String,
}

impl Failed {
    /// It failed for good.
    pub fn finally(message: impl Into<String>) -> Self {
        Self { certainty: Certainty::Final, message: message.into() }
    }

    /// It may have happened.
    pub fn uncertain(message: impl Into<String>) -> Self {
        Self { certainty: Certainty::Uncertain, message: message.into() }
    }

    /// It was not tried.
    pub fn unchanged(message: impl Into<String>) -> Self {
        Self { certainty: Certainty::Unchanged, message: message.into() }
    }
}

impl From<berth_host::Error> for Failed {
    /// What a failure on the machine has left is not known.
    fn from(error: berth_host::Error) -> Self {
        Self::uncertain(error.sentence())
    }
}

/// A kind of volume.
#[async_trait]
pub(crate) trait Plugin: Send + Sync {
    /// Its name as the kubelet has it, such as `kubernetes.io/empty-dir`.
    fn name(&self) -> &'static str;

    /// The name that the directories of a volume carry: the plugin's own, but for kinds where each driver has one.
    fn name_of(&self, volume: &PodVolume) -> String {
        let _ = volume;
        self.name().to_owned()
    }

    /// Whether directories of this name are of its volumes.
    fn owns(&self, name: &str) -> bool {
        self.name() == name
    }

    /// Whether it serves volumes of this source.
    fn serves(&self, source: &Source) -> bool;

    /// What has to happen on the node or the cluster before any pod can have the volume; `None` for kinds without.
    /// An error says why that cannot be known yet (its driver is not registered, …).
    fn device(&self, volume: &PodVolume) -> Result<Option<Device>, Failed> {
        let _ = volume;
        Ok(None)
    }

    /// Why a device that a pod has waited for will not be attached: the node has as many as it can have. What Kubernetes knows
    /// of that number is then brought up to date.
    async fn attach_limit(&self, volume: &PodVolume) -> Option<String> {
        let _ = volume;
        None
    }

    /// Prepares the device on the node (CSI: NodeStage). Called only where `device` asks for it.
    async fn stage(&self, volume: &PodVolume) -> Result<(), Failed> {
        let _ = volume;
        Ok(())
    }

    /// Undoes `stage`; no pod has the volume any more.
    async fn unstage(&self, device: &str) -> Result<(), Failed> {
        let _ = device;
        Ok(())
    }

    /// Makes the volume available to the pod. Called again while the pod uses the volume: after `refresh_after`, and when
    /// the plugin has asked for it through the `Refresh` that it was given.
    async fn set_up(&self, volume: &PodVolume) -> Result<Ready, Failed>;

    /// After how long `set_up` is to be repeated while the pod runs; never by time if `None`.
    fn refresh_after(&self, volume: &PodVolume) -> Option<std::time::Duration> {
        let _ = volume;
        None
    }

    /// Grows what is on the volume while it is in use, to the PersistentVolume's capacity; gives the size it has now.
    ///
    /// Failures: `Final` is infeasible, `Unchanged` is refused while the volume is in use, `Uncertain` is worth another
    /// try.
    async fn expand(&self, volume: &PodVolume) -> Result<Option<u64>, Failed> {
        let _ = volume;
        Ok(None)
    }

    /// Takes the volume away from the pod, and removes what lies in the pod's directory of it.
    async fn tear_down(&self, placed: &Placed) -> Result<(), Failed>;

    /// The devices that are, or may be, staged on this node, from what is on disk. Called before anything else, so
    /// that what a crash left of none can be removed here.
    fn staged(&self) -> Vec<Device> {
        Vec::new()
    }

    /// The volumes of pods that have, or may have, something on disk outside the pods' directories.
    fn placed(&self) -> Vec<Placed> {
        Vec::new()
    }

    /// The device that a placed volume is on, from what is on disk.
    fn device_of(&self, placed: &Placed) -> Option<Device> {
        let _ = placed;
        None
    }
}
