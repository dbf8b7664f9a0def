//! Empties released volumes with the policy Recycle by a pod that deletes everything in them.
//!
//! The pod is `recycler-for-<volume>` in namespace default. It says for which binding of the volume it works, so a
//! restart takes up where it was, and a pod that is left from another time, or forged, is not believed but deleted.

mod pod_events;

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    Container, NFSVolumeSource, PersistentVolume, Pod, PodSpec, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::ResourceExt as _;

use berth_core::names::RECYCLER_IMAGE;
use berth_core::names::events;
use berth_kube::{Key, Next};

pub(super) use self::pod_events::RecyclerEvents;

use super::apply::{self, Pair};
use super::step::{About, PlannedEvent, Step, VolumePhase};
use super::{Controller, Error, is_terminated, plan};
use berth_kube::storage;

const NAMESPACE: &str = "default";
const PREFIX: &str = "recycler-for-";
/// On a recycler pod: the uid of the claim whose data it deletes.
const FOR_CLAIM: &str = "recycler.berth.dev/claim-uid";
/// How long after its start a pod that failed is tried again.
const RETRY: Duration = Duration::from_secs(15);
const SCRUB: &str = r#"cd /scrub && find . -mindepth 1 -delete && test -z "$(ls -A .)""#;

/// What to do about a volume that is to be emptied.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Recycling {
    /// Pods still use the data.
    InUse(Vec<String>),
    /// Nobody knows how to empty such a volume.
    Unsupported,
    Start(Box<Pod>),
    /// The pod does its work, or is on its way out.
    Wait,
    /// The pod is not for this binding, or its failure is long enough ago.
    Remove,
    Done,
    /// The pod failed; try again after a while.
    Failed(String, Duration),
}

impl Controller {
    pub(super) async fn recycle(&self, pair: &mut Pair) -> Result<Next, Error> {
        let Some(volume) = self.still_released(pair).await? else { return Ok(Next::Done) };
        let key = Key::new(NAMESPACE, pod_name(&volume));
        let pod = self.pods.get(&key);
        let mut recycling = plan_recycling(&volume, pod.as_deref(), self.users(&volume), Timestamp::now());
        if matches!(recycling, Recycling::Start(_)) {
            // What is about to be deleted cannot be had back, and a pod may not be in the cache yet.
            let users = self.users_by_server(&volume).await?;
            recycling = plan_recycling(&volume, pod.as_deref(), users, Timestamp::now());
        }
        let steps = match recycling {
            Recycling::InUse(pods) => {
                let message = format!("Volume is used by pods: {}", pods.join(","));
                vec![PlannedEvent::normal(About::Volume, events::VOLUME_FAILED_RECYCLE, message)]
            }
            Recycling::Unsupported => {
                let message = "No recycler plugin found for the volume!";
                plan::fail(&volume, events::VOLUME_FAILED_RECYCLE, message.to_owned())
            }
            Recycling::Start(pod) => match self.cluster.create(pod.as_ref()).await {
                Ok(pod) => {
                    self.recycler_news.follow(&self.cluster, &self.recorder, &volume, &pod);
                    Vec::new()
                }
                // The pod of this name is not in the cache yet; its event comes.
                Err(error) if error.is_already_exists() => return Ok(Next::Retry),
                Err(error) => {
                    let message =
                        format!("Recycle failed: unexpected error creating recycler pod: {}", error.chain());
                    self.carry_out_all(plan::fail(&volume, events::VOLUME_FAILED_RECYCLE, message), pair)
                        .await?;
                    return Err(error.into());
                }
            },
            Recycling::Wait => {
                if let Some(pod) = &pod {
                    self.recycler_news.follow(&self.cluster, &self.recorder, &volume, pod);
                }
                Vec::new()
            }
            Recycling::Remove => {
                self.remove(pod.as_deref()).await?;
                Vec::new()
            }
            Recycling::Done => {
                // The pod goes first: should we die now, the volume is emptied once more, which does no harm.
                self.remove(pod.as_deref()).await?;
                vec![
                    PlannedEvent::normal(About::Volume, events::VOLUME_RECYCLED, "Volume recycled"),
                    Step::UnbindVolume,
                    Step::VolumePhase(VolumePhase::Available, String::new()),
                ]
            }
            Recycling::Failed(why, pause) => {
                let message = format!("Recycle failed: failed to recycle volume: {why}");
                self.carry_out_all(plan::fail(&volume, events::VOLUME_FAILED_RECYCLE, message), pair).await?;
                return Ok(Next::After(pause));
            }
        };
        self.carry_out_all(steps, pair).await?;
        Ok(Next::Done)
    }

    async fn carry_out_all(&self, steps: Vec<Step>, pair: &mut Pair) -> Result<(), Error> {
        for step in &steps {
            apply::apply(&self.cluster, &self.recorder, step, pair).await?;
        }
        Ok(())
    }

    async fn remove(&self, pod: Option<&Pod>) -> Result<(), Error> {
        match pod {
            Some(pod) => Ok(self.cluster.delete(pod).await?),
            None => Ok(()),
        }
    }

    /// The pods that still use the data of a volume; pods of a new claim of the same name do not.
    fn users(&self, volume: &PersistentVolume) -> Vec<String> {
        let Some(claim) = storage::claim_of_volume(volume) else { return Vec::new() };
        if self.claims.get(&claim).is_some() {
            return Vec::new();
        }
        names_of_running(self.pods_by_claim.get(&claim).iter().map(AsRef::as_ref))
    }

    /// As [`Controller::users`], by asking the API server.
    async fn users_by_server(&self, volume: &PersistentVolume) -> Result<Vec<String>, Error> {
        let Some(claim) = storage::claim_of_volume(volume) else { return Ok(Vec::new()) };
        if self.claims.get(&claim).is_some() {
            return Ok(Vec::new());
        }
        let pods = self.cluster.fetch_all::<Pod>(&claim.namespace).await?;
        let uses = |pod: &&Pod| storage::claims_of_pod(pod).iter().any(|used| used.key == claim);
        Ok(names_of_running(pods.iter().filter(uses)))
    }
}

fn names_of_running<'a>(pods: impl Iterator<Item = &'a Pod>) -> Vec<String> {
    let running = pods.filter(|pod| !is_terminated(pod));
    let mut names: Vec<String> = running.map(|pod| Key::of(pod).to_string()).collect();
    names.sort();
    names
}

pub(super) fn plan_recycling(
    volume: &PersistentVolume,
    pod: Option<&Pod>,
    users: Vec<String>,
    now: Timestamp,
) -> Recycling {
    let Some(pod) = pod else {
        return if users.is_empty() { start(volume) } else { Recycling::InUse(users) };
    };
    if pod.metadata.deletion_timestamp.is_some() {
        return Recycling::Wait;
    }
    if !is_for(pod, volume) {
        return Recycling::Remove;
    }
    match storage::phase_of_pod(pod) {
        "Succeeded" => Recycling::Done,
        "Failed" => {
            let created = pod.metadata.creation_timestamp.as_ref().map_or(now, |time| time.0);
            let age = Duration::try_from(now.duration_since(created)).unwrap_or_default();
            let Some(pause) = RETRY.checked_sub(age).filter(|pause| !pause.is_zero()) else {
                return Recycling::Remove;
            };
            let why = pod.status.as_ref().and_then(|status| status.message.clone());
            let why = why.filter(|why| !why.is_empty());
            Recycling::Failed(
                why.unwrap_or_else(|| {
                    let name = pod.name_any();
                    format!("pod failed, pod.Status.Message unknown; kubectl logs -n {NAMESPACE} {name} shows what it said")
                }),
                pause,
            )
        }
        _ => Recycling::Wait,
    }
}

fn start(volume: &PersistentVolume) -> Recycling {
    let Some(spec) = volume.spec.as_ref() else { return Recycling::Unsupported };
    let mut source = Volume { name: "vol".to_owned(), ..Volume::default() };
    let least = if let Some(path) = &spec.host_path {
        source.host_path = Some(path.clone());
        60
    } else if let Some(nfs) = &spec.nfs {
        // Mounted writable whatever the claim's pods had.
        source.nfs = Some(NFSVolumeSource { read_only: None, ..nfs.clone() });
        300
    } else {
        return Recycling::Unsupported;
    };
    let gibibytes = i64::try_from(storage::capacity(volume) >> 30).unwrap_or(i64::MAX);
    let deadline = gibibytes.saturating_mul(30).max(least);
    Recycling::Start(Box::new(recycler(volume, source, deadline)))
}

fn recycler(volume: &PersistentVolume, source: Volume, deadline: i64) -> Pod {
    let uid = plan::bound_uid(volume).unwrap_or_default().to_owned();
    Pod {
        metadata: ObjectMeta {
            name: Some(pod_name(volume)),
            namespace: Some(NAMESPACE.to_owned()),
            annotations: Some([(FOR_CLAIM.to_owned(), uid)].into()),
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: "PersistentVolume".to_owned(),
                name: volume.name_any(),
                uid: volume.uid().unwrap_or_default(),
                controller: Some(true),
                block_owner_deletion: None,
            }]),
            ..ObjectMeta::default()
        },
        spec: Some(PodSpec {
            active_deadline_seconds: Some(deadline),
            restart_policy: Some("Never".to_owned()),
            containers: vec![Container {
                name: "pv-recycler".to_owned(),
                image: Some(RECYCLER_IMAGE.to_owned()),
                command: Some(vec!["/bin/sh".to_owned()]),
                args: Some(vec!["-c".to_owned(), SCRUB.to_owned()]),
                volume_mounts: Some(vec![VolumeMount {
                    name: source.name.clone(),
                    mount_path: "/scrub".to_owned(),
                    ..VolumeMount::default()
                }]),
                ..Container::default()
            }],
            volumes: Some(vec![source]),
            ..PodSpec::default()
        }),
        status: None,
    }
}

fn is_for(pod: &Pod, volume: &PersistentVolume) -> bool {
    let owned = pod.owner_references().iter().any(|owner| Some(&owner.uid) == volume.metadata.uid.as_ref());
    owned && pod.annotations().get(FOR_CLAIM).map(String::as_str) == plan::bound_uid(volume)
}

fn pod_name(volume: &PersistentVolume) -> String {
    format!("{PREFIX}{}", volume.name_any())
}

/// The volume a pod empties.
pub(super) fn volume_of(pod: &Pod) -> Option<String> {
    let here = pod.metadata.namespace.as_deref() == Some(NAMESPACE);
    let name = pod.metadata.name.as_deref().filter(|_| here)?;
    name.strip_prefix(PREFIX).map(str::to_owned)
}
