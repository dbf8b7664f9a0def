//! Expansion: records an event on a claim that was made larger and waits for its driver's resizer, and makes FlexVolumes larger.
//!
//! Reads: PersistentVolumeClaim, PersistentVolume. Writes, for FlexVolumes only: the claim's status, and the volume's
//! capacity. FlexVolume drivers are asked nothing here, as in kube-controller-manager: the volume counts as expanded, and
//! the node has the driver grow the filesystem (`expandfs`). Events as `volume_expand`. Volumes of other plugins cannot be
//! expanded here, and the event says so by being a warning.

use std::sync::Arc;

use berth_core::names::{STORAGE_RESIZER, events};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimCondition, PersistentVolumeClaimStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt as _;

use berth_kube::{Backoff, Cluster, Error, Key, Loop, Next, Recorder, Severity, reference};

use berth_kube::storage;

/// How many claims are reconciled at a time.
const WORKERS: usize = 16;

/// Runs the expand controller until the cluster's shutdown.
pub async fn run(cluster: Cluster) {
    let claims = cluster.cache::<PersistentVolumeClaim>();
    let volumes = cluster.cache::<PersistentVolume>();
    let recorder = Recorder::new(&cluster, "volume_expand", "");
    let grew = |before: &PersistentVolumeClaim, claim: &PersistentVolumeClaim| {
        storage::requested(before) < storage::requested(claim) || !waits(before)
    };
    Loop::new(&cluster, &cluster.queue("expansion", Backoff::default()))
        .subscribe(&claims, move |before, after| {
            let claim = after.filter(|claim| waits(claim) && before.is_none_or(|before| grew(before, claim)));
            claim.map(|claim| Key::of(claim.as_ref())).into_iter().collect()
        })
        .reads(&volumes)
        .run(WORKERS, |key| {
            let claim = claims.get(&key).filter(|claim| waits(claim));
            let volume = claim.as_ref().and_then(|claim| volumes.named(storage::volume_name(claim)));
            let (cluster, recorder) = (cluster.clone(), recorder.clone());
            async move {
                let Some((claim, volume)) = claim.zip(volume) else { return Ok::<_, Error>(Next::Done) };
                let Some(severity) = plan(&claim, &volume) else { return Ok(Next::Done) };
                if let Some(flex) = volume.spec.as_ref().and_then(|spec| spec.flex_volume.as_ref()) {
                    expand_flex(&cluster, &recorder, claim, &volume, &flex.driver).await?;
                } else {
                    let message = "waiting for an external controller to expand this PVC";
                    recorder.record(reference(claim.as_ref()), severity, events::EXTERNAL_EXPANDING, message);
                }
                Ok(Next::Done)
            }
        })
        .await;
}

/// Makes the volume of a FlexVolume driver as large as its claim asks, and leaves its filesystem to the node. Begins
/// anew after a crash: each step writes what the last one may have written.
async fn expand_flex(
    cluster: &Cluster,
    recorder: &Recorder,
    mut claim: Arc<PersistentVolumeClaim>,
    volume: &PersistentVolume,
    driver: &str,
) -> Result<(), Error> {
    let requests = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref()?.requests.as_ref());
    let Some(size) = requests.and_then(|requests| requests.get("storage")).cloned() else { return Ok(()) };
    let is_large = storage::capacity(volume) >= storage::requested(&claim);
    if is_large && resize_status(&claim).is_some_and(|status| status.starts_with("NodeResize")) {
        return Ok(());
    }
    if claim.annotations().get(STORAGE_RESIZER).is_none_or(|resizer| resizer != driver) {
        let note = |claim: &mut PersistentVolumeClaim| {
            claim.annotations_mut().insert(STORAGE_RESIZER.to_owned(), driver.to_owned());
        };
        claim = cluster.update(claim.as_ref(), note).await?;
    }
    let begin = |claim: &mut PersistentVolumeClaim| {
        let status = claim.status.get_or_insert_default();
        status.allocated_resources.get_or_insert_default().insert("storage".to_owned(), size.clone());
        set_resize(status, "ControllerResizeInProgress", "Resizing");
    };
    claim = cluster.update_status(claim.as_ref(), begin).await?;
    if !is_large {
        let enlarge = |volume: &mut PersistentVolume| {
            let spec = volume.spec.get_or_insert_default();
            spec.capacity.get_or_insert_default().insert("storage".to_owned(), size.clone());
        };
        cluster.update(volume, enlarge).await?;
    }
    let pending = |claim: &mut PersistentVolumeClaim| {
        set_resize(claim.status.get_or_insert_default(), "NodeResizePending", "FileSystemResizePending");
    };
    let claim = cluster.update_status(claim.as_ref(), pending).await?;
    let message = "Require file system resize of volume on node";
    recorder.normal(claim.as_ref(), events::FILE_SYSTEM_RESIZE_REQUIRED, message);
    Ok(())
}

/// How far the expansion of a claim is.
fn resize_status(claim: &PersistentVolumeClaim) -> Option<&String> {
    claim.status.as_ref()?.allocated_resource_statuses.as_ref()?.get("storage")
}

/// Sets how far an expansion is, and the one condition that says so.
fn set_resize(status: &mut PersistentVolumeClaimStatus, resize: &str, condition: &str) {
    let statuses = status.allocated_resource_statuses.get_or_insert_default();
    statuses.insert("storage".to_owned(), resize.to_owned());
    let conditions = status.conditions.get_or_insert_default();
    conditions.retain(|known| !matches!(known.type_.as_str(), "Resizing" | "FileSystemResizePending"));
    conditions.push(PersistentVolumeClaimCondition {
        type_: condition.to_owned(),
        status: "True".to_owned(),
        last_transition_time: Some(Time(Timestamp::now())),
        ..PersistentVolumeClaimCondition::default()
    });
}

/// Whether a bound claim asks for more than it has.
fn waits(claim: &PersistentVolumeClaim) -> bool {
    let status = claim.status.as_ref();
    status.and_then(|status| status.phase.as_deref()) == Some("Bound")
        && storage::bytes(status.and_then(|status| status.capacity.as_ref())).unwrap_or(0)
            < storage::requested(claim)
}

/// How bad the news is, if there is any.
fn plan(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> Option<Severity> {
    let spec = volume.spec.as_ref()?;
    let owner = spec.claim_ref.as_ref()?;
    if owner.uid != claim.metadata.uid || owner.namespace != claim.metadata.namespace {
        return None;
    }
    let external = spec.csi.is_some() || spec.flex_volume.is_some();
    Some(if external { Severity::Normal } else { Severity::Warning })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(request: &str, capacity: &str, phase: &str) -> PersistentVolumeClaim {
        serde_json::from_value(serde_json::json!({
            "metadata": { "namespace": "n", "name": "c", "uid": "u" },
            "spec": { "resources": { "requests": { "storage": request } }, "volumeName": "v" },
            "status": { "phase": phase, "capacity": { "storage": capacity } },
        }))
        .unwrap()
    }

    fn volume(source: &str, uid: &str) -> PersistentVolume {
        let mut spec = serde_json::json!({ "claimRef": { "namespace": "n", "name": "c", "uid": uid } });
        spec[source] = match source {
            "csi" => serde_json::json!({ "driver": "d", "volumeHandle": "h" }),
            _ => serde_json::json!({ "path": "/tmp/x" }),
        };
        serde_json::from_value(serde_json::json!({ "metadata": { "name": "v" }, "spec": spec })).unwrap()
    }

    #[test]
    fn only_a_bound_claim_that_asks_for_more_than_it_has_waits() {
        assert!(waits(&claim("2Gi", "1Gi", "Bound")));
        assert!(!waits(&claim("1Gi", "1Gi", "Bound")));
        assert!(!waits(&claim("1Gi", "2Gi", "Bound")));
        assert!(!waits(&claim("2Gi", "1Gi", "Pending")));
    }

    #[test]
    fn who_expands_a_claim_is_told_by_its_own_volume_only() {
        let claim = claim("2Gi", "1Gi", "Bound");
        assert_eq!(plan(&claim, &volume("csi", "u")), Some(Severity::Normal));
        assert_eq!(plan(&claim, &volume("hostPath", "u")), Some(Severity::Warning));
        assert_eq!(plan(&claim, &volume("csi", "other")), None);
    }
}
