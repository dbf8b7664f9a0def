//! Expansion: tells that a claim that was made larger waits for its driver's resizer.
//!
//! Reads: PersistentVolumeClaim, PersistentVolume. Writes nothing. Events as `volume_expand`. Volumes of plugins other
//! than CSI cannot be expanded here, and the event says so by being a warning.

use berth_core::names::events;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};

use berth_kube::{Backoff, Cluster, Error, Key, Loop, Next, Recorder, Severity, reference};

use berth_kube::storage;

/// How many claims are looked at at a time.
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
            if let Some((claim, volume)) = claim.zip(volume)
                && let Some(severity) = plan(&claim, &volume)
            {
                let message = "waiting for an external controller to expand this PVC";
                recorder.record(reference(claim.as_ref()), severity, events::EXTERNAL_EXPANDING, message);
            }
            async { Ok::<_, Error>(Next::Done) }
        })
        .await;
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
