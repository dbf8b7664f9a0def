//! Attribute classes are protected while a claim or a volume names them.
//!
//! A claim or a volume may have come just before the class was deleted, so the API server is asked for all of them before
//! a finalizer goes. Classes are few and seldom deleted.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;

use berth_core::names::ATTRIBUTES_CLASS_PROTECTION;
use berth_kube::{Backoff, Cluster, Error, Key, Loop, Next, Result, finalizers};

use super::{FinalizerChange, WORKERS, finalizer_change, write};

pub(super) async fn run(cluster: Cluster) {
    let classes = cluster.cache::<VolumeAttributesClass>();
    let (claims, volumes) = (cluster.cache::<PersistentVolumeClaim>(), cluster.cache::<PersistentVolume>());
    let by_claim = claims.index(named_by_claim);
    let by_volume = volumes.index(named_by_volume);
    let names = |names: Vec<String>| names.into_iter().map(Key::cluster).collect();
    Loop::new(&cluster, &cluster.queue("attributes class protection", Backoff::default()))
        .also(&classes, |class| {
            let asked = finalizer_change(class.as_ref(), ATTRIBUTES_CLASS_PROTECTION);
            (asked != FinalizerChange::Nothing).then(|| Key::of(class.as_ref()))
        })
        .subscribe(&claims, move |before, _| {
            names(before.map(|claim| named_by_claim(claim)).unwrap_or_default())
        })
        .subscribe(&volumes, move |before, _| {
            names(before.map(|volume| named_by_volume(volume)).unwrap_or_default())
        })
        .run(WORKERS, |key| {
            let (cluster, class) = (cluster.clone(), classes.get(&key));
            let used = !by_claim.get(&key.name).is_empty() || !by_volume.get(&key.name).is_empty();
            async move {
                let Some(class) = class else { return Ok::<_, Error>(Next::Done) };
                match finalizer_change(class.as_ref(), ATTRIBUTES_CLASS_PROTECTION) {
                    FinalizerChange::Add => {
                        write(&cluster, &class, |class| finalizers::add(class, ATTRIBUTES_CLASS_PROTECTION))
                            .await?;
                    }
                    FinalizerChange::RemoveIfUnused if !used && !is_named(&cluster, &key.name).await? => {
                        write(&cluster, &class, |class| {
                            finalizers::remove(class, ATTRIBUTES_CLASS_PROTECTION);
                        })
                        .await?;
                    }
                    _ => {}
                }
                Ok(Next::Done)
            }
        })
        .await;
}

/// Whether the API server knows a claim or a volume that names the class.
async fn is_named(cluster: &Cluster, class: &str) -> Result<bool> {
    let claims = cluster.fetch_all::<PersistentVolumeClaim>("");
    let volumes = cluster.fetch_all::<PersistentVolume>("");
    let (claims, volumes) = tokio::try_join!(claims, volumes)?;
    let mut named = claims.iter().flat_map(named_by_claim).chain(volumes.iter().flat_map(named_by_volume));
    Ok(named.any(|name| name == class))
}

/// The classes a claim asks for, has, and is being changed to.
pub(super) fn named_by_claim(claim: &PersistentVolumeClaim) -> Vec<String> {
    let asked = claim.spec.as_ref().and_then(|spec| spec.volume_attributes_class_name.clone());
    let status = claim.status.as_ref();
    let has = status.and_then(|status| status.current_volume_attributes_class_name.clone());
    let target = status
        .and_then(|status| status.modify_volume_status.as_ref()?.target_volume_attributes_class_name.clone());
    let mut names: Vec<String> =
        [asked, has, target].into_iter().flatten().filter(|name| !name.is_empty()).collect();
    names.sort();
    names.dedup();
    names
}

pub(super) fn named_by_volume(volume: &PersistentVolume) -> Vec<String> {
    let name = volume.spec.as_ref().and_then(|spec| spec.volume_attributes_class_name.clone());
    name.into_iter().filter(|name| !name.is_empty()).collect()
}
