//! Claims for generic ephemeral volumes: made from the template in a pod, named `<pod>-<volume>`, owned by the pod.
//!
//! Reads: Pod, PersistentVolumeClaim. Writes: creates PersistentVolumeClaims. Events as `ephemeral_volume`. The claim
//! goes with its pod by owner reference.

#[cfg(test)]
mod tests;

use berth_core::names::events;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Volume};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::ResourceExt as _;

use berth_kube::{Backoff, Cache, Cluster, Failure, Key, Loop, Next, Recorder};

use berth_kube::storage;

/// How many pods are reconciled at a time.
const WORKERS: usize = 32;

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Kube(#[from] berth_kube::Error),
    #[error("ephemeral volume {volume}: {why}")]
    Foreign { volume: String, why: String },
}

impl Failure for Error {
    fn is_conflict(&self) -> bool {
        matches!(self, Self::Kube(error) if error.is_conflict())
    }

    fn describe(&self) -> String {
        match self {
            Self::Kube(error) => error.chain(),
            Self::Foreign { .. } => self.to_string(),
        }
    }
}

/// Runs the ephemeral volume controller until the cluster's shutdown.
pub async fn run(cluster: Cluster) {
    let cluster = cluster.named("ephemeral_volume");
    let (pods, existing) = (cluster.cache::<Pod>(), cluster.cache::<PersistentVolumeClaim>());
    let recorder = Recorder::new(&cluster, "ephemeral_volume", "");
    let by_claim = pods.index(|pod| storage::claims_of_pod(pod).into_iter().map(|claim| claim.key).collect());
    Loop::new(&cluster, &cluster.queue("ephemeral volumes", Backoff::default()))
        .subscribe(&pods, |before, after| {
            // A pod's volumes never change.
            let new = after.filter(|pod| before.is_none() && wants_claims(pod));
            new.map(|pod| Key::of(pod.as_ref())).into_iter().collect()
        })
        .subscribe(&existing, move |before, after| {
            // A claim that is gone is made again as long as its pod lives.
            let gone = before.filter(|_| after.is_none());
            let pods = gone.map(|claim| by_claim.get(&Key::of(claim.as_ref()))).unwrap_or_default();
            pods.iter().map(|pod| Key::of(pod.as_ref())).collect()
        })
        .run(WORKERS, |key| {
            let (cluster, pods, existing, recorder) =
                (cluster.clone(), pods.clone(), existing.clone(), recorder.clone());
            async move {
                let Some(pod) = pods.get(&key).filter(|pod| wants_claims(pod)) else { return Ok(Next::Done) };
                ensure_claims(&cluster, &existing, &recorder, &pod).await
            }
        })
        .await;
}

fn wants_claims(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_none()
        && storage::volumes_of_pod(pod).iter().any(|volume| volume.ephemeral.is_some())
}

async fn ensure_claims(
    cluster: &Cluster,
    existing: &Cache<PersistentVolumeClaim>,
    recorder: &Recorder,
    pod: &Pod,
) -> Result<Next, Error> {
    for volume in storage::volumes_of_pod(pod) {
        let Some(claim) = claim_for(pod, volume) else { continue };
        let known = existing.get(&Key::of(&claim));
        let outcome = match known {
            Some(known) => is_pods(&known, pod, volume),
            None => match cluster.create(&claim).await {
                // Made a moment ago, by us before a crash or by somebody else: the next reconciliation finds out.
                Err(error) if error.is_already_exists() => match cluster.fetch(&Key::of(&claim)).await? {
                    Some(known) => is_pods(&known, pod, volume),
                    None => return Ok(Next::Retry),
                },
                // A namespace or a pod that is going away takes no new claims.
                outcome => outcome.map(drop).map_err(Error::from),
            },
        };
        if let Err(error) = outcome {
            let why = match &error {
                Error::Kube(error) => {
                    format!(
                        "ephemeral volume {}: create PVC {}: {}",
                        volume.name,
                        claim.name_any(),
                        error.chain()
                    )
                }
                Error::Foreign { .. } => error.to_string(),
            };
            recorder.warning(pod, events::FAILED_BINDING, why);
            return Err(error);
        }
    }
    Ok(Next::Done)
}

fn is_pods(claim: &PersistentVolumeClaim, pod: &Pod, volume: &Volume) -> Result<(), Error> {
    if storage::owned_by(claim, pod) {
        return Ok(());
    }
    let (namespace, name) = (claim.namespace().unwrap_or_default(), claim.name_any());
    let pod = format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
    let why = format!("PVC {namespace}/{name} was not created for pod {pod} (pod is not owner)");
    Err(Error::Foreign { volume: volume.name.clone(), why })
}

/// The claim for a volume of a pod, if the volume is an ephemeral one.
fn claim_for(pod: &Pod, volume: &Volume) -> Option<PersistentVolumeClaim> {
    let template = volume.ephemeral.as_ref()?.volume_claim_template.as_ref()?;
    let meta = template.metadata.clone().unwrap_or_default();
    Some(PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: Some(storage::ephemeral_claim_name(pod, volume)),
            namespace: pod.namespace(),
            labels: meta.labels,
            annotations: meta.annotations,
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Pod".to_owned(),
                name: pod.name_any(),
                uid: pod.uid().unwrap_or_default(),
                controller: Some(true),
                block_owner_deletion: Some(true),
            }]),
            ..ObjectMeta::default()
        },
        spec: Some(template.spec.clone()),
        status: None,
    })
}
