//! What is counted from the objects that the caches hold, when somebody asks: kube-controller-manager's and kube-scheduler's numbers.

use std::collections::BTreeMap;
use std::fmt;

use berth_core::names::CSI_PLUGIN;
use berth_kube::storage::{class_of_claim, class_of_volume, csi_source, is_bound, is_over, node_of_pod};
use berth_kube::{Cache, Cluster};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSINode, VolumeAttachment};
use kube::ResourceExt as _;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;

/// The caches that are counted.
pub(super) struct Objects {
    claims: Cache<PersistentVolumeClaim>,
    volumes: Cache<PersistentVolume>,
    pods: Cache<Pod>,
    attachments: Cache<VolumeAttachment>,
    nodes: Cache<CSINode>,
}

impl fmt::Debug for Objects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Objects")
    }
}

impl Objects {
    pub(super) fn new(cluster: &Cluster) -> Self {
        Self {
            claims: cluster.cache(),
            volumes: cluster.cache(),
            pods: cluster.cache(),
            attachments: cluster.cache(),
            nodes: cluster.cache(),
        }
    }
}

/// Labels of one gauge, in order.
type Labels = Vec<(&'static str, String)>;

/// Writes one gauge with all its label sets.
pub(super) fn gauge<L: EncodeLabelSet>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: impl IntoIterator<Item = (L, f64)>,
) -> Result<(), fmt::Error> {
    let mut encoder = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (labels, value) in values {
        ConstGauge::new(value).encode(encoder.encode_family(&labels)?)?;
    }
    Ok(())
}

/// How often each set of labels was seen.
fn counted(all: impl Iterator<Item = Labels>) -> BTreeMap<Labels, f64> {
    let mut counts = BTreeMap::new();
    for labels in all {
        *counts.entry(labels).or_default() += 1.0;
    }
    counts
}

impl Collector for Objects {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let volumes = self.volumes.list();
        let claims = self.claims.list();
        let phase = |volume: &PersistentVolume| {
            volume.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default()
        };
        let class = |volume: &PersistentVolume| vec![("storage_class", class_of_volume(volume).to_owned())];
        let bound =
            counted(volumes.iter().filter(|volume| phase(volume) == "Bound").map(|volume| class(volume)));
        gauge(&mut encoder, "pv_collector_bound_pv_count", "Bound PersistentVolumes", bound)?;
        let unbound =
            counted(volumes.iter().filter(|volume| phase(volume) != "Bound").map(|volume| class(volume)));
        gauge(
            &mut encoder,
            "pv_collector_unbound_pv_count",
            "PersistentVolumes that are not bound",
            unbound,
        )?;
        let total = counted(volumes.iter().map(|volume| {
            let plugin = if csi_source(volume).is_some() { CSI_PLUGIN } else { "other" };
            let mode = volume.spec.as_ref().and_then(|spec| spec.volume_mode.clone());
            vec![
                ("plugin_name", plugin.to_owned()),
                ("volume_mode", mode.unwrap_or_else(|| "Filesystem".to_owned())),
            ]
        }));
        gauge(&mut encoder, "pv_collector_total_pv_count", "PersistentVolumes by plugin and mode", total)?;
        let of_claim = |claim: &PersistentVolumeClaim| {
            vec![
                ("namespace", claim.namespace().unwrap_or_default()),
                ("storage_class", class_of_claim(claim).to_owned()),
            ]
        };
        let bound = counted(claims.iter().filter(|claim| is_bound(claim)).map(|claim| of_claim(claim)));
        gauge(&mut encoder, "pv_collector_bound_pvc_count", "Bound PersistentVolumeClaims", bound)?;
        let unbound = counted(claims.iter().filter(|claim| !is_bound(claim)).map(|claim| of_claim(claim)));
        gauge(
            &mut encoder,
            "pv_collector_unbound_pvc_count",
            "PersistentVolumeClaims that are not bound",
            unbound,
        )?;
        self.encode_attachments(&mut encoder)?;
        self.encode_pods(&mut encoder)
    }
}

impl Objects {
    fn encode_attachments(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let attachments = self.attachments.list();
        let of = |state: &str| vec![("plugin_name", CSI_PLUGIN.to_owned()), ("state", state.to_owned())];
        let wanted = |attachment: &VolumeAttachment| attachment.metadata.deletion_timestamp.is_none();
        let is =
            |attachment: &VolumeAttachment| attachment.status.as_ref().is_some_and(|status| status.attached);
        #[expect(clippy::cast_precision_loss, reason = "nobody has so many")]
        let count = |condition: &dyn Fn(&VolumeAttachment) -> bool| {
            attachments.iter().filter(|attachment| condition(attachment)).count() as f64
        };
        let volumes =
            [(of("desired_state_of_world"), count(&wanted)), (of("actual_state_of_world"), count(&is))];
        gauge(
            encoder,
            "attachdetach_controller_total_volumes",
            "Volumes that are to be attached, and that are",
            volumes,
        )?;
        let by_node = counted(attachments.iter().filter(|attachment| is(attachment)).map(|attachment| {
            vec![("node", attachment.spec.node_name.clone()), ("volume_plugin", CSI_PLUGIN.to_owned())]
        }));
        gauge(encoder, "storage_count_attachable_volumes_in_use", "Attached volumes by node", by_node)?;
        let registered = counted(self.nodes.list().iter().flat_map(|node| {
            node.spec
                .drivers
                .iter()
                .map(|driver| vec![("driver_name", driver.name.clone())])
                .collect::<Vec<_>>()
        }));
        gauge(encoder, "berth_driver_registered_nodes", "Nodes where a CSI driver is registered", registered)
    }

    fn encode_pods(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let mut waiting = [("active", 0.0), ("unschedulable", 0.0)];
        for pod in self.pods.list().iter().filter(|pod| !is_over(pod) && node_of_pod(pod).is_empty()) {
            let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
            let refused = conditions
                .into_iter()
                .any(|condition| condition.type_ == "PodScheduled" && condition.status == "False");
            waiting[usize::from(refused)].1 += 1.0;
        }
        let waiting = waiting.map(|(queue, count)| ([("queue", queue)], count));
        gauge(encoder, "scheduler_pending_pods", "Pods that wait for a node", waiting)
    }
}
