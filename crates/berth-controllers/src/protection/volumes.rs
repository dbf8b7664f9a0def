//! Volumes are protected while they are bound.

use k8s_openapi::api::core::v1::PersistentVolume;

use berth_core::names::VOLUME_PROTECTION;
use berth_kube::{Backoff, Cluster, Error, Key, Loop, Next, finalizers};

use super::{FinalizerChange, WORKERS, finalizer_change, write};

pub(super) async fn run(cluster: Cluster) {
    let volumes = cluster.cache::<PersistentVolume>();
    Loop::new(&cluster, &cluster.queue("volume protection", Backoff::default()))
        .also(&volumes, |volume| (plan(volume) != FinalizerChange::Nothing).then(|| Key::of(volume.as_ref())))
        .run(WORKERS, |key| {
            let (cluster, volumes) = (cluster.clone(), volumes.clone());
            async move {
                let Some(volume) = volumes.get(&key) else { return Ok::<_, Error>(Next::Done) };
                match plan(&volume) {
                    FinalizerChange::Add => {
                        write(&cluster, &volume, |object| finalizers::add(object, VOLUME_PROTECTION)).await?;
                    }
                    FinalizerChange::RemoveIfUnused => {
                        write(&cluster, &volume, |object| finalizers::remove(object, VOLUME_PROTECTION))
                            .await?;
                    }
                    FinalizerChange::Nothing => {}
                }
                Ok(Next::Done)
            }
        })
        .await;
}

/// The version in the write makes sure that the volume did not become bound meanwhile.
pub(super) fn plan(volume: &PersistentVolume) -> FinalizerChange {
    let bound = volume.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Bound");
    match finalizer_change(volume, VOLUME_PROTECTION) {
        FinalizerChange::RemoveIfUnused if bound => FinalizerChange::Nothing,
        change => change,
    }
}
