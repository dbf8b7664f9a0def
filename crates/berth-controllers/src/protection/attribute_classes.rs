//! Attribute classes are protected while a claim or a volume names them.
//!
//! A claim or a volume may have come just before the class was deleted, so the API server is asked for all of them before
//! a finalizer goes. Classes are few and seldom deleted.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use kube::api::ListParams;
use kube::{Api, ResourceExt as _};

use berth_core::names::ATTRIBUTES_CLASS_PROTECTION;
use berth_kube::{Backoff, Cluster, Next, Queue};

use super::{Error, WORKERS, Wanted, add, remove, wanted};

pub(super) async fn run(cluster: Cluster) {
    let classes = cluster.cache::<VolumeAttributesClass>();
    let (claims, volumes) = (cluster.cache::<PersistentVolumeClaim>(), cluster.cache::<PersistentVolume>());
    let by_claim = claims.index(named_by_claim);
    let by_volume = volumes.index(named_by_volume);
    let queue: Queue<String> = Queue::new("attributes class protection", Backoff::default());
    let adding = queue.clone();
    classes.on_change(move |class| {
        if wanted(class.as_ref(), ATTRIBUTES_CLASS_PROTECTION) != Wanted::Nothing {
            adding.add(class.name_any());
        }
    });
    let adding = queue.clone();
    claims.subscribe(move |before, _| {
        before.into_iter().flat_map(|claim| named_by_claim(claim)).for_each(|name| adding.add(name));
    });
    let adding = queue.clone();
    volumes.subscribe(move |before, _| {
        before.into_iter().flat_map(|volume| named_by_volume(volume)).for_each(|name| adding.add(name));
    });
    let shutdown = cluster.shutdown().clone();
    tokio::select! {
        () = shutdown.cancelled() => return,
        _ = async { tokio::join!(classes.synced(), claims.synced(), volumes.synced()) } => {}
    }
    queue
        .run(WORKERS, shutdown, |name| {
            let (cluster, classes) = (cluster.clone(), classes.clone());
            let used = !by_claim.get(&name).is_empty() || !by_volume.get(&name).is_empty();
            async move {
                let Some(class) = classes.named(&name) else { return Ok::<_, Error>(Next::Done) };
                match wanted(class.as_ref(), ATTRIBUTES_CLASS_PROTECTION) {
                    Wanted::Add => add(&cluster, &class, ATTRIBUTES_CLASS_PROTECTION).await?,
                    Wanted::RemoveIfUnused if !used && !is_named(&cluster, &name).await? => {
                        remove(&cluster, &class, ATTRIBUTES_CLASS_PROTECTION).await?;
                    }
                    _ => {}
                }
                Ok(Next::Done)
            }
        })
        .await;
}

/// Whether the API server knows a claim or a volume that names the class.
async fn is_named(cluster: &Cluster, class: &str) -> Result<bool, Error> {
    let claims: Api<PersistentVolumeClaim> = Api::all(cluster.client().clone());
    let volumes: Api<PersistentVolume> = Api::all(cluster.client().clone());
    let all = ListParams::default();
    let (claims, volumes) = tokio::try_join!(claims.list(&all), volumes.list(&all))
        .map_err(|source| Error::List { what: "claims and volumes", source })?;
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
