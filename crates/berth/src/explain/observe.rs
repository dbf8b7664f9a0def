//! Everything there is to know of a claim, its volume and its pods, read once.

use std::sync::Arc;

use anyhow::bail;
use berth_core::names;
use berth_kube::storage::{claim_of_volume, claims_of_pod, volume_name};
use berth_kube::{Cluster, Key, Kind as ObjectKind};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass, VolumeAttachment};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;

use super::Kind;
use crate::timeline::Step;

/// A claim, its volume and its pods, as far as they are there.
#[derive(Debug, Default)]
pub(crate) struct Observed {
    pub(crate) subject: String,
    pub(crate) claim: Option<PersistentVolumeClaim>,
    /// A claim that is named and not there.
    pub(crate) missing_claim: Option<String>,
    pub(crate) volume: Option<PersistentVolume>,
    pub(crate) classes: Vec<StorageClass>,
    pub(crate) pod: Option<Pod>,
    /// Pods that use the claim.
    pub(crate) users: Vec<Pod>,
    pub(crate) attachments: Vec<VolumeAttachment>,
    pub(crate) nodes: Vec<CSINode>,
    /// The events of all these objects, newest last.
    pub(crate) events: Vec<Event>,
}

/// Reads a claim, volume or pod and everything that it is used with.
pub(super) async fn observe(
    cluster: &Cluster,
    kind: Kind,
    namespace: &str,
    name: &str,
) -> anyhow::Result<Observed> {
    let mut observed = Observed::default();
    match kind {
        Kind::Claim => {
            observed.subject = format!("claim {namespace}/{name}");
            observed.claim = fetch(cluster, Key::new(namespace, name)).await?;
            if observed.claim.is_none() {
                bail!("there is no claim {name} in the namespace {namespace}");
            }
        }
        Kind::Volume => {
            observed.subject = format!("volume {name}");
            let volume: Option<PersistentVolume> = fetch(cluster, Key::cluster(name)).await?;
            let Some(volume) = volume else { bail!("there is no volume {name}") };
            if let Some(claim) = claim_of_volume(&volume) {
                observed.claim = fetch(cluster, claim).await?;
            }
            observed.volume = Some(volume);
        }
        Kind::Pod => {
            observed.subject = format!("pod {namespace}/{name}");
            let pod: Option<Pod> = fetch(cluster, Key::new(namespace, name)).await?;
            let Some(pod) = pod else { bail!("there is no pod {name} in the namespace {namespace}") };
            if let Some(claim) = claims_of_pod(&pod).into_iter().next() {
                observed.claim = fetch(cluster, claim.key.clone()).await?;
                observed.missing_claim = observed.claim.is_none().then_some(claim.key.name);
            }
            observed.pod = Some(pod);
        }
    }
    if let (None, Some(claim)) = (&observed.volume, &observed.claim)
        && !volume_name(claim).is_empty()
    {
        observed.volume = fetch(cluster, Key::cluster(volume_name(claim))).await?;
    }
    observe_related(cluster, &mut observed).await?;
    Ok(observed)
}

async fn fetch<K: ObjectKind>(cluster: &Cluster, key: Key) -> anyhow::Result<Option<K>> {
    Ok(cluster.fetch(&key).await?.map(Arc::unwrap_or_clone))
}

/// Reads classes, drivers, attachments, pods that use the claim, and events.
async fn observe_related(cluster: &Cluster, observed: &mut Observed) -> anyhow::Result<()> {
    observed.classes = cluster.fetch_all("").await?;
    observed.nodes = cluster.fetch_all("").await?;
    if let Some(volume) = &observed.volume {
        let name = volume.name_any();
        let attachments: Vec<VolumeAttachment> = cluster.fetch_all("").await?;
        observed.attachments = attachments
            .into_iter()
            .filter(|attachment| attachment.spec.source.persistent_volume_name.as_deref() == Some(&name))
            .collect();
    }
    if let Some(claim) = &observed.claim {
        let key = Key::of(claim);
        let pods: Vec<Pod> = cluster.fetch_all(&key.namespace).await?;
        observed.users =
            pods.into_iter().filter(|pod| claims_of_pod(pod).iter().any(|claim| claim.key == key)).collect();
    }
    let mut uids: Vec<String> = [
        observed.claim.as_ref().and_then(ResourceExt::uid),
        observed.volume.as_ref().and_then(ResourceExt::uid),
        observed.pod.as_ref().and_then(ResourceExt::uid),
    ]
    .into_iter()
    .flatten()
    .collect();
    uids.extend(observed.users.iter().filter_map(ResourceExt::uid));
    uids.sort();
    uids.dedup();
    for uid in uids {
        let events: Vec<Event> = cluster.fetch_where("", &format!("involvedObject.uid={uid}")).await?;
        observed.events.extend(events);
    }
    observed.events.sort_by_key(time_of);
    Ok(())
}

/// When an event happened last.
fn time_of(event: &Event) -> Timestamp {
    let time = event.last_timestamp.as_ref().or(event.first_timestamp.as_ref()).map(|time| time.0);
    time.or(event.event_time.as_ref().map(|time| time.0)).unwrap_or_default()
}

/// Something that an object records: its time is known to the second.
#[derive(Debug)]
pub(super) struct Moment {
    pub(super) time: Timestamp,
    /// Who did it; empty if that is not known.
    pub(super) component: &'static str,
    pub(super) what: String,
    /// The calls that it must have followed if they happened in the same second.
    pub(super) follows: &'static [&'static str],
}

impl Moment {
    /// Whether this must have happened after the step if both happened in the same second.
    pub(super) fn follows(&self, step: &Step) -> bool {
        step.error.is_empty() && self.follows.contains(&step.call.as_str())
    }
}

impl Observed {
    /// Whether a step belongs to this claim, volume or pod.
    pub(super) fn concerns(&self, step: &Step) -> bool {
        let volume = self.volume.as_ref().map(ResourceExt::name_any);
        let claim = self.claim.as_ref().map(full_name);
        let pod = self.pod.as_ref().map(full_name);
        volume.is_some_and(|name| step.volume == name)
            || claim.is_some_and(|name| step.claim == name)
            || pod.is_some_and(|name| step.pod == name)
    }

    /// The object and its state, in one line.
    pub(super) fn headline(&self) -> String {
        let mut parts = vec![self.subject.clone()];
        if let Some(pod) = &self.pod {
            let phase = pod.status.as_ref().and_then(|status| status.phase.clone());
            parts.push(phase.unwrap_or_else(|| "Pending".to_owned()));
        }
        if let Some(claim) = &self.claim {
            let phase = claim.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
            parts.push(format!("claim {} {phase}", claim.name_any()));
            let capacity = claim.status.as_ref().and_then(|status| status.capacity.as_ref()?.get("storage"));
            parts.extend(capacity.map(|capacity| capacity.0.clone()));
            parts.extend(claim.spec.as_ref().and_then(|spec| spec.storage_class_name.clone()));
        }
        if let Some(volume) = &self.volume {
            let phase = volume.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
            parts.push(format!("volume {} {phase}", volume.name_any()));
        }
        parts.join("   ")
    }

    /// The times that the objects themselves record.
    pub(super) fn moments(&self) -> Vec<Moment> {
        let mut moments = Vec::new();
        let mut add = |time: Option<&Time>, component, what: String, follows| {
            moments.extend(time.map(|time| Moment { time: time.0, component, what, follows }));
        };
        if let Some(claim) = &self.claim {
            let created = claim.metadata.creation_timestamp.as_ref();
            add(created, "user", "claim created".to_owned(), &[][..]);
        }
        if let Some(volume) = &self.volume {
            let created = volume.metadata.creation_timestamp.as_ref();
            let provisioned = volume.annotations().contains_key(names::PROVISIONED_BY);
            let component = if provisioned { "provisioner" } else { "user" };
            add(created, component, "volume object created".to_owned(), &["CreateVolume"][..]);
        }
        let is_user = |pod: &&Pod| self.users.iter().any(|user| user.metadata.uid == pod.metadata.uid);
        for pod in self.users.iter().chain(self.pod.iter().filter(|pod| !is_user(pod))) {
            let name = pod.name_any();
            let created = pod.metadata.creation_timestamp.as_ref();
            add(created, "user", format!("pod {name} created"), &[][..]);
            let accepted = pod.status.as_ref().and_then(|status| status.start_time.as_ref());
            // A pod is given to a node when its claims are bound.
            add(
                accepted,
                "node",
                format!("pod {name} accepted"),
                &["CreateVolume", "bind", "schedule", "bind pod"][..],
            );
        }
        moments
    }
}

fn full_name(object: &impl ResourceExt) -> String {
    Key::of(object).to_string()
}
