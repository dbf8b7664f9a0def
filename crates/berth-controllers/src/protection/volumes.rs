//! Volumes are protected while they are bound.

use k8s_openapi::api::core::v1::PersistentVolume;
use kube::ResourceExt as _;

use berth_core::names::VOLUME_PROTECTION;
use berth_kube::{Backoff, Cluster, Error, Next, Queue};

use super::{WORKERS, Wanted, add, remove, wanted};

pub(super) async fn run(cluster: Cluster) {
    let volumes = cluster.cache::<PersistentVolume>();
    let queue: Queue<String> = Queue::new("volume protection", Backoff::default());
    let adding = queue.clone();
    volumes.on_change(move |volume| {
        if plan(volume) != Wanted::Nothing {
            adding.add(volume.name_any());
        }
    });
    let shutdown = cluster.shutdown().clone();
    queue
        .run(WORKERS, shutdown, |name| {
            let (cluster, volumes) = (cluster.clone(), volumes.clone());
            async move {
                let Some(volume) = volumes.named(&name) else { return Ok::<_, Error>(Next::Done) };
                match plan(&volume) {
                    Wanted::Add => add(&cluster, &volume, VOLUME_PROTECTION).await?,
                    Wanted::RemoveIfUnused => remove(&cluster, &volume, VOLUME_PROTECTION).await?,
                    Wanted::Nothing => {}
                }
                Ok(Next::Done)
            }
        })
        .await;
}

/// The version in the write makes sure that the volume did not become bound meanwhile.
pub(super) fn plan(volume: &PersistentVolume) -> Wanted {
    let bound = volume.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Bound");
    match wanted(volume, VOLUME_PROTECTION) {
        Wanted::RemoveIfUnused if bound => Wanted::Nothing,
        wanted => wanted,
    }
}
