//! Which claims a pod uses.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

/// The claims that a pod uses, named or made for it; none if it has ended.
pub(crate) fn claims_of(pod: &Pod) -> Vec<String> {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if phase.is_some_and(|phase| matches!(phase, "Succeeded" | "Failed")) {
        return Vec::new();
    }
    let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_ref());
    let claims = volumes.into_iter().flatten().filter_map(|volume| {
        let named = volume.persistent_volume_claim.as_ref().map(|source| source.claim_name.clone());
        let made = volume.ephemeral.as_ref().map(|_| format!("{}-{}", pod.name_any(), volume.name));
        named.or(made)
    });
    claims.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pod_uses_the_claims_it_names_and_those_made_for_it_until_it_ends() {
        let pod = |phase: &str| -> Pod {
            serde_json::from_value(json!({
                "metadata": { "name": "web" },
                "spec": { "containers": [], "volumes": [
                    { "name": "a", "persistentVolumeClaim": { "claimName": "data" } },
                    { "name": "b", "ephemeral": { "volumeClaimTemplate": { "spec": {} } } },
                    { "name": "c", "emptyDir": {} },
                ] },
                "status": { "phase": phase },
            }))
            .unwrap()
        };
        assert_eq!(claims_of(&pod("Running")), ["data", "web-b"]);
        assert!(claims_of(&pod("Succeeded")).is_empty());
        assert!(claims_of(&pod("Failed")).is_empty());
    }
}
