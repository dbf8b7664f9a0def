//! How pods, claims, volumes, classes and attachments point at each other, and what they are called.

use std::collections::BTreeMap;

use berth_core::names::{BETA_STORAGE_CLASS, BIND_COMPLETED, CSI_VOLUME_PREFIX, IN_TREE_PLUGIN_PREFIX};
use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, PersistentVolume, PersistentVolumeClaim, Pod, Volume,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::ResourceExt as _;
use sha2::{Digest as _, Sha256};

use crate::{Cache, Index, Key};

/// One volume of a pod that is a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimOfPod {
    /// The claim's namespace and name.
    pub key: Key,
    /// Made for this pod alone, from a template in it.
    pub ephemeral: bool,
}

/// The claims a pod's volumes name, in order.
pub fn claims_of_pod(pod: &Pod) -> Vec<ClaimOfPod> {
    let namespace = pod.namespace().unwrap_or_default();
    volumes_of_pod(pod)
        .iter()
        .filter_map(|volume| {
            let (name, ephemeral) = if let Some(claim) = &volume.persistent_volume_claim {
                (claim.claim_name.clone(), false)
            } else if volume.ephemeral.is_some() {
                (ephemeral_claim_name(pod, volume), true)
            } else {
                return None;
            };
            Some(ClaimOfPod { key: Key::new(namespace.clone(), name), ephemeral })
        })
        .collect()
}

/// The name of the claim for an ephemeral volume of a pod.
pub fn ephemeral_claim_name(pod: &Pod, volume: &Volume) -> String {
    format!("{}-{}", pod.name_any(), volume.name)
}

/// The volumes of a pod's spec; none if it has no spec.
pub fn volumes_of_pod(pod: &Pod) -> &[Volume] {
    pod.spec.as_ref().and_then(|spec| spec.volumes.as_deref()).unwrap_or_default()
}

/// Whether a claim for an ephemeral volume is really the pod's.
pub fn owned_by(claim: &PersistentVolumeClaim, pod: &Pod) -> bool {
    claim
        .owner_references()
        .iter()
        .any(|owner| owner.controller == Some(true) && Some(&owner.uid) == pod.metadata.uid.as_ref())
}

/// The class a claim asks for; empty for none.
pub fn class_of_claim(claim: &PersistentVolumeClaim) -> &str {
    let field = || claim.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref());
    claim.annotations().get(BETA_STORAGE_CLASS).map(String::as_str).or_else(field).unwrap_or_default()
}

/// The class a volume belongs to; empty for none.
pub fn class_of_volume(volume: &PersistentVolume) -> &str {
    let field = || volume.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref());
    volume.annotations().get(BETA_STORAGE_CLASS).map(String::as_str).or_else(field).unwrap_or_default()
}

/// The volume a claim names; empty for none.
pub fn volume_name(claim: &PersistentVolumeClaim) -> &str {
    claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default()
}

/// Whether a claim is bound, and the binding finished.
pub fn is_bound(claim: &PersistentVolumeClaim) -> bool {
    !volume_name(claim).is_empty() && claim.annotations().contains_key(BIND_COMPLETED)
}

/// The bytes of `storage` in a list of resources, rounded up; `None` if it is not listed, 0 for what is no quantity,
/// which the API server does not let in.
pub fn bytes(resources: Option<&BTreeMap<String, Quantity>>) -> Option<i128> {
    resources?.get("storage").map(units)
}

/// A quantity in whole units, rounded up. Unlike `int64` it has room for sizes beyond eight exbibytes, which Kubernetes
/// compares, too.
pub fn units(quantity: &Quantity) -> i128 {
    let thousandths = amount(quantity).thousandths();
    thousandths.div_euclid(1000) + i128::from(thousandths.rem_euclid(1000) != 0)
}

/// A quantity's amount; 0 for what is no quantity, which the API server does not let in.
pub fn amount(quantity: &Quantity) -> berth_core::Quantity {
    quantity.0.parse().unwrap_or(berth_core::Quantity::ZERO)
}

/// The bytes a claim asks for.
pub fn requested(claim: &PersistentVolumeClaim) -> i128 {
    let requests = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref()?.requests.as_ref());
    bytes(requests).unwrap_or(0)
}

/// The bytes a volume has.
pub fn capacity(volume: &PersistentVolume) -> i128 {
    bytes(volume.spec.as_ref().and_then(|spec| spec.capacity.as_ref())).unwrap_or(0)
}

/// Whether a volume is reserved for this claim: by name, and by uid if it says one.
pub fn refers_to(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref()).is_some_and(|reference| {
        reference.name == claim.metadata.name
            && reference.namespace == claim.metadata.namespace
            && reference
                .uid
                .as_ref()
                .is_none_or(|uid| uid.is_empty() || Some(uid) == claim.metadata.uid.as_ref())
    })
}

/// The claim that a volume is reserved for or bound to.
pub fn claim_of_volume(volume: &PersistentVolume) -> Option<Key> {
    let reference = volume.spec.as_ref()?.claim_ref.as_ref()?;
    Some(Key::new(
        reference.namespace.clone().unwrap_or_default(),
        reference.name.clone().unwrap_or_default(),
    ))
}

/// How a CSI driver knows a volume.
pub fn csi_source(volume: &PersistentVolume) -> Option<&CSIPersistentVolumeSource> {
    volume.spec.as_ref()?.csi.as_ref()
}

/// The handle of a volume that is this driver's.
pub fn handle_of_volume<'a>(volume: &'a PersistentVolume, driver: &str) -> Option<&'a str> {
    csi_source(volume).filter(|csi| csi.driver == driver).map(|csi| csi.volume_handle.as_str())
}

/// A driver's volumes by their handles.
pub fn volumes_by_handle(volumes: &Cache<PersistentVolume>, driver: &str) -> Index<PersistentVolume, String> {
    let driver = driver.to_owned();
    volumes.index(move |volume| handle_of_volume(volume, &driver).map(str::to_owned).into_iter().collect())
}

/// A volume's name in a node's status: `kubernetes.io/csi/<driver>^<handle>` or, for FlexVolume drivers,
/// `<vendor>/<driver>/<name>`; `None` for volumes of other kinds.
pub fn unique_name(volume: &PersistentVolume) -> Option<String> {
    let flex = || {
        let flex = volume.spec.as_ref()?.flex_volume.as_ref()?;
        Some(flex_unique_name(&flex.driver, &volume.name_any()))
    };
    csi_source(volume)
        .map(|csi| format!("{CSI_VOLUME_PREFIX}{}^{}", csi.driver, csi.volume_handle))
        .or_else(flex)
}

/// The name in a node's status of a FlexVolume; `name` is the PersistentVolume's, or the volume's name in its pod.
pub fn flex_unique_name(driver: &str, name: &str) -> String {
    format!("{driver}/{name}")
}

/// Driver and name of a FlexVolume, from its name in a node's status; `None` for what Kubernetes' own plugins name.
pub fn split_flex_unique_name(unique: &str) -> Option<(&str, &str)> {
    if unique.starts_with(IN_TREE_PLUGIN_PREFIX) { None } else { unique.rsplit_once('/') }
}

/// The name of what is made for an object, by the object's UID: `pvc-<uid>` for a claim, `snapcontent-<uid>` for a
/// snapshot.
pub fn name_of_uid(prefix: &str, uid: &str) -> String {
    format!("{prefix}-{uid}")
}

/// A name made of a prefix and the SHA-256 of the parts, one after the other.
pub fn hashed_name(prefix: &str, parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part.as_bytes());
    }
    format!("{prefix}-{}", berth_core::hex(&hash.finalize()))
}

/// The name of the VolumeAttachment of a volume to a node.
pub fn attachment_name(driver: &str, handle: &str, node: &str) -> String {
    hashed_name("csi", &[handle, driver, node])
}

/// A text as the name of a Lease, as the CSI sidecars make it: `-` for what a name must not have, and `X` behind one at
/// the end.
pub fn lease_name(text: &str) -> String {
    let mut name: String =
        text.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '-' }).collect();
    if name.ends_with('-') {
        name.push('X');
    }
    name
}

/// What a pod's node is: empty before it is scheduled.
pub fn node_of_pod(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}

/// The phase in a pod's status; empty if it has none yet.
pub fn phase_of_pod(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

/// Whether a pod ran to its end, well or not.
pub fn is_over(pod: &Pod) -> bool {
    matches!(phase_of_pod(pod), "Succeeded" | "Failed")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_attachment_is_named_by_the_hash_of_handle_driver_and_node() {
        // printf vol-1pd.csi.example.comnode-a | sha256sum
        assert_eq!(
            attachment_name("pd.csi.example.com", "vol-1", "node-a"),
            "csi-c39bcda8a9afd4c6bd5ce0a6e87f9926d2395ee11b8342e9c982161faddb2feb"
        );
    }

    #[test]
    fn a_pod_uses_the_claims_it_names_and_those_made_for_it() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": { "name": "web", "namespace": "shop" },
            "spec": { "containers": [], "volumes": [
                { "name": "a", "persistentVolumeClaim": { "claimName": "data" } },
                { "name": "b", "ephemeral": { "volumeClaimTemplate": { "spec": {} } } },
                { "name": "c", "emptyDir": {} },
            ] },
        }))
        .unwrap();
        let claims = claims_of_pod(&pod);
        let expected = [("data", false), ("web-b", true)];
        let expected =
            expected.map(|(name, ephemeral)| ClaimOfPod { key: Key::new("shop", name), ephemeral });
        assert_eq!(claims, expected);
    }

    #[test]
    fn amounts_are_read_in_every_spelling() {
        for (text, thousandths) in [
            ("0", 0),
            ("1", 1000),
            ("100m", 100),
            ("1.5", 1500),
            (".5", 500),
            ("2Ki", 2_048_000),
            ("1.5Gi", 1_610_612_736_000),
            ("1e3", 1_000_000),
            ("12E6", 12_000_000_000),
            ("1n", 1),
            ("-1", -1000),
            ("rubbish", 0),
            ("", 0),
        ] {
            assert_eq!(amount(&Quantity(text.to_owned())).thousandths(), thousandths, "{text}");
        }
        assert_eq!(units(&Quantity("1001m".to_owned())), 2);
    }

    #[test]
    fn a_lease_has_no_characters_that_a_name_must_not_have() {
        assert_eq!(lease_name("external-resizer-nfs.csi.k8s.io"), "external-resizer-nfs-csi-k8s-io");
        assert_eq!(lease_name("driver."), "driver-X");
    }
}
