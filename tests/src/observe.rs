//! What happens in a cluster, as its watches tell it: who runs, who is gone, and how many writes that took.

use std::{
    collections::{BTreeMap, HashSet},
    fmt::Debug,
    hash::Hash,
    time::Duration,
};

use anyhow::{Context, Result};
use futures_util::StreamExt as _;
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{Event, Node, PersistentVolume, PersistentVolumeClaim, Pod},
    storage::v1::{CSINode, VolumeAttachment},
};
use kube::{Api, Client, Resource, ResourceExt as _, runtime::watcher};
use serde::de::DeserializeOwned;
use tokio::{sync::watch, task::JoinSet};

/// How long anything may take before the measurement is given up.
const PATIENCE: Duration = Duration::from_mins(10);

/// The objects that a watch has reported so far.
#[derive(Debug, Default)]
pub struct ObservedObjects {
    /// The names of all pods.
    pub pods: HashSet<String>,
    /// The names of the pods that run.
    pub running: HashSet<String>,
    /// The names of all claims.
    pub claims: HashSet<String>,
    /// Claims that are bound.
    pub bound: HashSet<String>,
    /// The names of all volumes.
    pub volumes: HashSet<String>,
    /// The names of all attachments.
    pub attachments: HashSet<String>,
    /// Attachments that a driver has made.
    pub attached: HashSet<String>,
    /// Writes by kind and verb.
    pub writes: BTreeMap<(&'static str, &'static str), usize>,
    complete: usize,
}

impl ObservedObjects {
    /// Whether nothing is left of any volume.
    pub fn is_empty(&self) -> bool {
        self.pods.is_empty()
            && self.claims.is_empty()
            && self.volumes.is_empty()
            && self.attachments.is_empty()
    }
}

/// Watches a cluster until it is dropped.
pub struct Observer {
    seen: watch::Receiver<ObservedObjects>,
    to: watch::Sender<ObservedObjects>,
    client: Client,
    watches: JoinSet<()>,
}

impl Debug for Observer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Observer").field("seen", &self.seen).finish_non_exhaustive()
    }
}

impl Observer {
    /// Watches pods and everything of their volumes.
    pub async fn of_volumes(client: &Client) -> Result<Self> {
        let (to, seen) = watch::channel(ObservedObjects::default());
        let mut observer = Self { seen, to, client: client.clone(), watches: JoinSet::new() };
        observer.follow("Pod", |seen, pod: &Pod, there| {
            let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
            keep(&mut seen.running, pod.name_any(), there && phase == Some("Running"));
            keep(&mut seen.pods, pod.name_any(), there);
        });
        observer.follow("PersistentVolumeClaim", |seen, claim: &PersistentVolumeClaim, there| {
            let phase = claim.status.as_ref().and_then(|status| status.phase.as_deref());
            keep(&mut seen.bound, claim.name_any(), there && phase == Some("Bound"));
            keep(&mut seen.claims, claim.name_any(), there);
        });
        observer.follow("PersistentVolume", |seen, volume: &PersistentVolume, there| {
            keep(&mut seen.volumes, volume.name_any(), there);
        });
        observer.follow("VolumeAttachment", |seen, attachment: &VolumeAttachment, there| {
            let attached = attachment.status.as_ref().is_some_and(|status| status.attached);
            keep(&mut seen.attached, attachment.name_any(), there && attached);
            keep(&mut seen.attachments, attachment.name_any(), there);
        });
        observer.complete().await?;
        Ok(observer)
    }

    /// Watches also what else is written meanwhile.
    pub async fn of_all(client: &Client) -> Result<Self> {
        let mut observer = Self::of_volumes(client).await?;
        observer.follow("Event", |_, _: &Event, _| {});
        observer.follow("Node", |_, _: &Node, _| {});
        observer.follow("CSINode", |_, _: &CSINode, _| {});
        observer.follow("Lease", |_, _: &Lease, _| {});
        observer.complete().await?;
        Ok(observer)
    }

    /// Waits until this holds.
    pub async fn until(&mut self, what: &str, holds: impl Fn(&ObservedObjects) -> bool) -> Result<()> {
        let waited = tokio::time::timeout(PATIENCE, self.seen.wait_for(|seen| holds(seen))).await;
        let late = || {
            let seen = self.to.borrow();
            let (pods, running, claims) = (seen.pods.len(), seen.running.len(), seen.claims.len());
            let (volumes, attachments) = (seen.volumes.len(), seen.attachments.len());
            format!(
                "not within {PATIENCE:?}: {what}; there are {pods} pods ({running} running), {claims} claims, \
                 {volumes} volumes, {attachments} attachments"
            )
        };
        waited.with_context(late)?.context("the watches ended")?;
        Ok(())
    }

    /// The writes since the last time.
    pub fn take_writes(&self) -> BTreeMap<(&'static str, &'static str), usize> {
        let mut writes = BTreeMap::new();
        self.to.send_modify(|seen| writes = std::mem::take(&mut seen.writes));
        writes
    }

    async fn complete(&mut self) -> Result<()> {
        let watches = self.watches.len();
        self.until("all lists are complete", |seen| seen.complete == watches).await?;
        self.take_writes();
        Ok(())
    }

    fn follow<K>(&mut self, kind: &'static str, note: fn(&mut ObservedObjects, &K, bool))
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug + Send + 'static,
    {
        let (to, api) = (self.to.clone(), Api::<K>::all(self.client.clone()));
        self.watches.spawn(async move {
            let mut known = HashSet::new();
            let mut events = std::pin::pin!(watcher(api, watcher::Config::default()));
            while let Some(event) = events.next().await {
                match event {
                    Ok(watcher::Event::Apply(object)) => to.send_modify(|seen| {
                        let verb = if known.insert(object.uid()) { "create" } else { "update" };
                        *seen.writes.entry((kind, verb)).or_default() += 1;
                        note(seen, &object, true);
                    }),
                    Ok(watcher::Event::Delete(object)) => to.send_modify(|seen| {
                        known.remove(&object.uid());
                        *seen.writes.entry((kind, "delete")).or_default() += 1;
                        note(seen, &object, false);
                    }),
                    Ok(watcher::Event::InitApply(object)) => to.send_modify(|seen| {
                        known.insert(object.uid());
                        note(seen, &object, true);
                    }),
                    Ok(watcher::Event::InitDone) => to.send_modify(|seen| seen.complete += 1),
                    Ok(watcher::Event::Init) => {}
                    Err(error) => eprintln!("the watch of {kind}: {error}"),
                }
            }
        });
    }
}

fn keep<T: Hash + Eq>(set: &mut HashSet<T>, value: T, there: bool) {
    if there {
        set.insert(value);
    } else {
        set.remove(&value);
    }
}
