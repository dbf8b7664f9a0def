//! From a pod's word for a volume to the volume: claims are followed, by live requests, to what they are bound to.

use std::sync::Arc;

use berth_core::names::CLAIM_PROTECTION;
use berth_kube::storage::{ephemeral_claim_name, owned_by, volume_name};
use berth_kube::{Cluster, Key};
use k8s_openapi::api::core::v1::{Container, PersistentVolume, PersistentVolumeClaim, Pod, Volume};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::state::Wish;
use crate::plugin::{PodVolume, Source};

/// The volumes that the pod's containers use, and whether as block devices.
pub(super) fn mentioned(pod: &Pod) -> Vec<(&Volume, bool)> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let containers = || spec.init_containers.iter().flatten().chain(&spec.containers);
    let mounts = |container: &Container, name: &str| {
        container.volume_mounts.iter().flatten().any(|mount| mount.name == name)
    };
    let devices = |container: &Container, name: &str| {
        container.volume_devices.iter().flatten().any(|device| device.name == name)
    };
    let debug = |name: &str| {
        let containers = spec.ephemeral_containers.iter().flatten();
        containers
            .flat_map(|container| container.volume_mounts.iter().flatten())
            .any(|mount| mount.name == name)
    };
    let volumes = spec.volumes.iter().flatten();
    volumes
        .filter_map(|volume| {
            let block = containers().any(|container| devices(container, &volume.name));
            let mounted =
                debug(&volume.name) || containers().any(|container| mounts(container, &volume.name));
            (block || mounted).then_some((volume, block))
        })
        .collect()
}

/// The claim that a volume of a pod rests on.
pub(super) fn claim(pod: &Pod, volume: &Volume) -> Option<Key> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    if let Some(claim) = &volume.persistent_volume_claim {
        return Some(Key::new(namespace, &claim.claim_name));
    }
    volume.ephemeral.as_ref().map(|_| Key::new(namespace, ephemeral_claim_name(pod, volume)))
}

/// What a volume of a pod is, or why that cannot be said yet.
pub(super) async fn resolve(cluster: &Cluster, pod: &Arc<Pod>, wish: &Wish) -> Result<PodVolume, String> {
    let name = wish.volume.name.clone();
    let Some(key) = &wish.claim else {
        let read_only = wish.volume.csi.as_ref().and_then(|csi| csi.read_only).unwrap_or(false);
        let source = Source::Inline(wish.volume.clone());
        return Ok(PodVolume::new(pod.clone(), name, source, wish.block, read_only));
    };
    let (volume, claim) = bound(cluster, pod, wish, key)
        .await
        .map_err(|problem| format!("error processing PVC {key}: {problem}"))?;
    let mode = volume.spec.as_ref().and_then(|spec| spec.volume_mode.as_deref()).unwrap_or("Filesystem");
    if wish.block != (mode == "Block") {
        let place = if wish.block { "volumeDevices" } else { "volumeMounts" };
        return Err(format!("volume {name} has volumeMode {mode}, but is specified in {place}"));
    }
    let read_only =
        wish.volume.persistent_volume_claim.as_ref().and_then(|claim| claim.read_only).unwrap_or(false);
    let source = Source::Persistent { volume, claim };
    Ok(PodVolume::new(pod.clone(), name, source, wish.block, read_only))
}

async fn bound(
    cluster: &Cluster,
    pod: &Pod,
    wish: &Wish,
    key: &Key,
) -> Result<(Arc<PersistentVolume>, Arc<PersistentVolumeClaim>), String> {
    let claim = cluster
        .fetch::<PersistentVolumeClaim>(key)
        .await
        .map_err(|error| format!("failed to fetch PVC from API server: {}", error.chain()))?
        .ok_or_else(|| {
            format!("failed to fetch PVC from API server: persistentvolumeclaims {:?} not found", key.name)
        })?;
    let name = check_claim(pod, wish, &claim)?;
    let volume = cluster
        .fetch::<PersistentVolume>(&Key::cluster(name))
        .await
        .map_err(|error| format!("failed to fetch PV {name} from API server: {}", error.chain()))?
        .ok_or_else(|| {
            format!("failed to fetch PV {name} from API server: persistentvolumes {name:?} not found")
        })?;
    check_volume(&volume, &claim)?;
    Ok((volume, claim))
}

/// The name of the volume that a claim is bound to, if the pod may use it.
fn check_claim<'a>(pod: &Pod, wish: &Wish, claim: &'a PersistentVolumeClaim) -> Result<&'a str, String> {
    let meta = &claim.metadata;
    if wish.volume.ephemeral.is_some() && !owned_by(claim, pod) {
        let (claim, pod) = (Key::of(claim), Key::of(pod));
        return Err(format!("PVC {claim} was not created for pod {pod} (pod is not owner)"));
    }
    if meta.deletion_timestamp.is_some()
        && !meta.finalizers.iter().flatten().any(|finalizer| finalizer == CLAIM_PROTECTION)
    {
        return Err("PVC is being deleted".to_owned());
    }
    let phase = claim.status.as_ref().and_then(|status| status.phase.as_deref());
    if phase != Some("Bound") {
        return Err("PVC is not bound".to_owned());
    }
    let name = volume_name(claim);
    if name.is_empty() { Err("PVC has empty pvc.Spec.VolumeName".to_owned()) } else { Ok(name) }
}

fn check_volume(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> Result<(), String> {
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    let Some(reference) = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref()) else {
        return Err(format!(
            "found PV object {name} but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim"
        ));
    };
    if reference.uid == claim.metadata.uid {
        return Ok(());
    }
    let (there, wanted) = (reference.uid.as_deref(), claim.metadata.uid.as_deref());
    let (there, wanted) = (there.unwrap_or_default(), wanted.unwrap_or_default());
    Err(format!(
        "found PV object {name} but its pv.Spec.ClaimRef.UID {there} does not point to claim.UID {wanted}"
    ))
}

/// Whether only one pod may have the volume at a time.
pub(super) fn is_for_one_pod(volume: &PodVolume) -> bool {
    match &volume.source {
        Source::Inline(_) => false,
        Source::Persistent { volume, .. } => {
            let modes = volume.spec.as_ref().and_then(|spec| spec.access_modes.as_ref());
            modes.into_iter().flatten().any(|mode| mode == "ReadWriteOncePod")
        }
    }
}

/// The size of a claim's volume in bytes.
pub(super) fn size(volume: &PodVolume) -> Option<u64> {
    let Source::Persistent { volume, .. } = &volume.source else { return None };
    bytes(volume.spec.as_ref()?.capacity.as_ref()?.get("storage")?)
}

/// Whether what is on a volume must be grown to the volume's size; `brought` is the size that it had when this node
/// last brought or grew it.
pub(super) fn must_grow(volume: &PodVolume, brought: Option<u64>) -> bool {
    let Source::Persistent { claim, .. } = &volume.source else { return false };
    let (Some(size), Some(status)) = (size(volume), &claim.status) else { return false };
    let resize = status.allocated_resource_statuses.as_ref().and_then(|all| all.get("storage"));
    match resize.map(String::as_str) {
        Some("NodeResizePending" | "NodeResizeInProgress") => true,
        Some(_) => false,
        None => {
            let known = status.capacity.as_ref().and_then(|capacity| bytes(capacity.get("storage")?));
            // Where several nodes have the volume, the first to grow it makes the claim say so for all.
            let shared = claim
                .spec
                .as_ref()
                .and_then(|spec| spec.access_modes.as_ref())
                .is_some_and(|modes| modes.iter().any(|mode| mode == "ReadWriteMany"));
            known.is_some_and(|known| known < size) || shared && brought.is_some_and(|brought| brought < size)
        }
    }
}

fn bytes(quantity: &Quantity) -> Option<u64> {
    quantity.0.parse::<berth_core::Quantity>().ok()?.bytes().and_then(|bytes| u64::try_from(bytes).ok())
}
