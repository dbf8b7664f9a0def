//! How full the volumes of a node's pods are, as the kubelet finds it: CSI drivers are asked by NodeGetVolumeStats, and for a
//! FlexVolume driver that says `supportsMetrics` the filesystem itself.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use berth_core::names::CSI_PLUGIN;
use berth_csi::NodeCapability;
use berth_csi::v1::NodeGetVolumeStatsRequest;
use berth_csi::v1::volume_usage::Unit;
use berth_flex::DriverName;
use berth_host::remote::RemoteMounts;
use berth_kube::storage::{claims_of_pod, csi_source, is_over, volume_name, volumes_of_pod};
use berth_kube::{Cache, Cluster, Key};
use berth_runtime::blocking;
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use kube::ResourceExt;

use crate::layout::Layout;
use crate::registration::Drivers;

/// This program, which makes the calls that a filesystem may not answer in a process of its own.
const PROGRAM: &str = "/proc/self/exe";

/// How many drivers' answers are waited for at the same time.
const AT_ONCE: usize = 8;
/// How long a driver may take: whoever asks wants to see the other volumes too.
const LONGEST: Duration = Duration::from_secs(10);

/// How full one volume of a pod is.
#[derive(Debug, Clone, PartialEq)]
pub struct VolumeUsage {
    /// A pod that uses it.
    pub pod: Arc<Pod>,
    /// The volume's name in the pod.
    pub name: String,
    /// The claim that it is.
    pub claim: Key,
    /// Bytes: used, available and in all.
    pub bytes: Amounts,
    /// Inodes, if the filesystem counts them.
    pub inodes: Option<Amounts>,
}

/// What a volume has of one thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Amounts {
    /// How much is in use.
    pub used: u64,
    /// Free for whoever asks.
    pub available: u64,
    /// How much there is in all.
    pub total: u64,
}

/// Asks the drivers of a node how full its volumes are; cheap to clone.
#[derive(Clone)]
pub struct UsageReader {
    drivers: Drivers,
    flex: berth_flex::Drivers,
    remote: Arc<RemoteMounts>,
    layout: Layout,
    pods: Cache<Pod>,
    claims: Cache<PersistentVolumeClaim>,
    volumes: Cache<PersistentVolume>,
}

impl UsageReader {
    pub(crate) fn new(
        cluster: &Cluster,
        node: &str,
        drivers: &Drivers,
        flex: &berth_flex::Drivers,
        layout: &Layout,
    ) -> Self {
        Self {
            drivers: drivers.clone(),
            flex: flex.clone(),
            remote: Arc::new(RemoteMounts::new(Path::new(PROGRAM))),
            layout: layout.clone(),
            pods: cluster.cache_where(&format!("spec.nodeName={node}")),
            claims: cluster.cache(),
            volumes: cluster.cache(),
        }
    }

    /// Asks for every volume that is mounted for a running pod. A volume that several pods use is asked for once; one whose driver
    /// does not count, or does not answer in time, is left out.
    pub async fn read(&self) -> Vec<VolumeUsage> {
        let mut asked = BTreeMap::new();
        for pod in self.pods.list() {
            if is_over(&pod) || pod.status.as_ref().and_then(|status| status.start_time.as_ref()).is_none() {
                continue;
            }
            let names = volumes_of_pod(&pod)
                .iter()
                .filter(|volume| volume.persistent_volume_claim.is_some() || volume.ephemeral.is_some());
            for (name, used) in names.map(|volume| volume.name.clone()).zip(claims_of_pod(&pod)) {
                asked.entry(used.key).or_insert((pod.clone(), name));
            }
        }
        let read = asked.into_iter().map(|(claim, (pod, name))| self.ask(pod, name, claim));
        futures_util::stream::iter(read)
            .buffer_unordered(AT_ONCE)
            .filter_map(std::future::ready)
            .collect()
            .await
    }

    async fn ask(&self, pod: Arc<Pod>, name: String, claim: Key) -> Option<VolumeUsage> {
        let volume = self.volumes.named(volume_name(self.claims.get(&claim)?.as_ref()))?;
        if volume.spec.as_ref()?.volume_mode.as_deref() == Some("Block") {
            return None;
        }
        if let Some(flex) = &volume.spec.as_ref()?.flex_volume {
            let (bytes, inodes) = self.measure(&pod, &flex.driver, &volume.name_any()).await?;
            return Some(VolumeUsage { pod, name, claim, bytes, inodes });
        }
        let csi = csi_source(&volume)?;
        let driver =
            self.drivers.get(&csi.driver).filter(|driver| driver.can(NodeCapability::GetVolumeStats))?;
        let path = self.layout.pod_volume(&pod.uid()?, CSI_PLUGIN, &volume.name_any()).join("mount");
        let request = NodeGetVolumeStatsRequest {
            volume_id: csi.volume_handle.clone(),
            volume_path: path.to_string_lossy().into_owned(),
            ..NodeGetVolumeStatsRequest::default()
        };
        let answer = tokio::time::timeout(LONGEST, driver.call(request)).await.ok()?.ok()?;
        let of = |unit: Unit| {
            let usage = answer.usage.iter().find(|usage| usage.unit() == unit)?;
            let amount = |value: i64| u64::try_from(value).unwrap_or(0);
            Some(Amounts {
                used: amount(usage.used),
                available: amount(usage.available),
                total: amount(usage.total),
            })
        };
        Some(VolumeUsage { pod, name, claim, bytes: of(Unit::Bytes)?, inodes: of(Unit::Inodes) })
    }

    /// The space of the filesystem that a FlexVolume driver has mounted for a pod, if the driver says that this tells something of
    /// the volume. The filesystem may be another machine's, which may not answer.
    async fn measure(&self, pod: &Pod, driver: &str, volume: &str) -> Option<(Amounts, Option<Amounts>)> {
        let name: DriverName = driver.parse().ok()?;
        let known = self.flex.get(&name).ok()?;
        if !known.capabilities().supports_metrics {
            return None;
        }
        let path = self.layout.pod_volume(&pod.uid()?, driver, volume);
        let remote = self.remote.clone();
        let space = blocking(move || remote.space(&path, LONGEST)).await.ok()?;
        let amounts = |total: u64, free: u64, available: u64| Amounts {
            used: total.saturating_sub(free),
            available,
            total,
        };
        let inodes = amounts(space.inodes_total, space.inodes_free, space.inodes_free);
        let bytes = amounts(space.total, space.free, space.available);
        Some((bytes, (space.inodes_total > 0).then_some(inodes)))
    }
}
