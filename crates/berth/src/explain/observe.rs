//! Everything there is to know of a claim, its volume and its pods, read once.

use anyhow::{Context as _, bail};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass, VolumeAttachment};
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt};

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
    /// Newest last.
    pub(crate) events: Vec<Event>,
}

/// Reads it all.
pub(super) async fn observe(
    client: &Client,
    kind: Kind,
    namespace: &str,
    name: &str,
) -> anyhow::Result<Observed> {
    let mut seen = Observed::default();
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), namespace);
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    match kind {
        Kind::Claim => {
            seen.subject = format!("claim {namespace}/{name}");
            seen.claim = claims.get_opt(name).await.context("read the claim")?;
            if seen.claim.is_none() {
                bail!("there is no claim {name} in the namespace {namespace}");
            }
        }
        Kind::Volume => {
            seen.subject = format!("volume {name}");
            seen.volume = volumes.get_opt(name).await.context("read the volume")?;
            let Some(volume) = &seen.volume else { bail!("there is no volume {name}") };
            let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
            if let Some((namespace, name)) =
                claim.and_then(|claim| claim.namespace.clone().zip(claim.name.clone()))
            {
                let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), &namespace);
                seen.claim = claims.get_opt(&name).await.context("read the claim")?;
            }
        }
        Kind::Pod => {
            seen.subject = format!("pod {namespace}/{name}");
            let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
            seen.pod = pods.get_opt(name).await.context("read the pod")?;
            let Some(pod) = &seen.pod else { bail!("there is no pod {name} in the namespace {namespace}") };
            if let Some(claim) = claims_of(pod).first() {
                seen.claim = claims.get_opt(claim).await.context("read the claim")?;
                seen.missing_claim = seen.claim.is_none().then(|| claim.clone());
            }
        }
    }
    if let (None, Some(claim)) = (&seen.volume, &seen.claim) {
        let name = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
        if !name.is_empty() {
            seen.volume = volumes.get_opt(name).await.context("read the volume")?;
        }
    }
    surroundings(client, &mut seen).await?;
    Ok(seen)
}

async fn surroundings(client: &Client, seen: &mut Observed) -> anyhow::Result<()> {
    let all = ListParams::default();
    seen.classes = Api::all(client.clone()).list(&all).await.context("read the classes")?.items;
    seen.nodes = Api::all(client.clone()).list(&all).await.context("read the nodes' drivers")?.items;
    if let Some(volume) = &seen.volume {
        let name = volume.name_any();
        let attachments: Api<VolumeAttachment> = Api::all(client.clone());
        let attachments = attachments.list(&all).await.context("read the attachments")?.items;
        seen.attachments = attachments
            .into_iter()
            .filter(|attachment| attachment.spec.source.persistent_volume_name.as_deref() == Some(&name))
            .collect();
    }
    if let Some(claim) = &seen.claim {
        let pods: Api<Pod> = Api::namespaced(client.clone(), &claim.namespace().unwrap_or_default());
        let pods = pods.list(&all).await.context("read the pods")?.items;
        seen.users = pods.into_iter().filter(|pod| claims_of(pod).contains(&claim.name_any())).collect();
    }
    let mut uids: Vec<String> = [
        seen.claim.as_ref().and_then(ResourceExt::uid),
        seen.volume.as_ref().and_then(ResourceExt::uid),
        seen.pod.as_ref().and_then(ResourceExt::uid),
    ]
    .into_iter()
    .flatten()
    .collect();
    uids.extend(seen.users.iter().filter_map(ResourceExt::uid));
    uids.sort();
    uids.dedup();
    for uid in uids {
        let parameters = ListParams::default().fields(&format!("involvedObject.uid={uid}"));
        let events: Api<Event> = Api::all(client.clone());
        seen.events.extend(events.list(&parameters).await.context("read the events")?.items);
    }
    seen.events.sort_by_key(time_of);
    Ok(())
}

/// When an event happened last.
fn time_of(event: &Event) -> Timestamp {
    let time = event.last_timestamp.as_ref().or(event.first_timestamp.as_ref()).map(|time| time.0);
    time.or(event.event_time.as_ref().map(|time| time.0)).unwrap_or_default()
}

/// The claims that a pod names, its ephemeral ones included.
pub(super) fn claims_of(pod: &Pod) -> Vec<String> {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    volumes
        .filter_map(|volume| match (&volume.persistent_volume_claim, &volume.ephemeral) {
            (Some(claim), _) => Some(claim.claim_name.clone()),
            (None, Some(_)) => Some(format!("{}-{}", pod.name_any(), volume.name)),
            (None, None) => None,
        })
        .collect()
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

    /// What it is and how it stands, in one line.
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

    /// What the objects themselves tell: time, state, who, what.
    pub(super) fn moments(&self) -> Vec<(Timestamp, String, String, String)> {
        let mut moments = Vec::new();
        let mut moment =
            |time: Option<&k8s_openapi::apimachinery::pkg::apis::meta::v1::Time>, who: &str, what: String| {
                if let Some(time) = time {
                    moments.push((time.0, String::new(), who.to_owned(), what));
                }
            };
        if let Some(claim) = &self.claim {
            moment(claim.metadata.creation_timestamp.as_ref(), "user", "claim created".to_owned());
        }
        if let Some(volume) = &self.volume {
            moment(volume.metadata.creation_timestamp.as_ref(), "", "volume object created".to_owned());
        }
        let uid_of_pod = |pod: &Pod| pod.metadata.uid.clone();
        let other =
            self.pod.iter().filter(|pod| !self.users.iter().any(|user| uid_of_pod(user) == uid_of_pod(pod)));
        for pod in self.users.iter().chain(other) {
            let name = pod.name_any();
            moment(pod.metadata.creation_timestamp.as_ref(), "user", format!("pod {name} created"));
            moment(
                pod.status.as_ref().and_then(|status| status.start_time.as_ref()),
                "node",
                format!("pod {name} accepted"),
            );
        }
        moments
    }
}

fn full_name(object: &impl ResourceExt) -> String {
    format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any())
}
