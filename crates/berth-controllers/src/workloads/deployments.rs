//! Deployments: from one template to the next, without more pods missing than allowed.

mod plan;
mod status;
pub(super) mod template;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use berth_kube::{Backoff, Cache, Cluster, Index, Key, Loop, Next, Recorder, Result};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use super::ownership::{chooses, claim, controller};
use berth_core::names::DEPLOYMENT_REVISION;
use berth_core::names::events;
use berth_kube::selectors::is_empty;
use berth_kube::storage;
use plan::{ObservedDeployment, Step, plan};
use status::{is_written, status};
use template::{is_current, new_set, refresh, revision, sizes};

const COMPONENT: &str = "deployment-controller";

/// Runs until the cluster's shutdown.
pub(super) async fn run(cluster: Cluster) {
    let cluster = cluster.named(COMPONENT);
    let (deployments, sets): (Cache<Deployment>, Cache<ReplicaSet>) = (cluster.cache(), cluster.cache());
    let pods: Cache<Pod> = cluster.cache();
    let controller = Arc::new(Controller {
        recorder: Recorder::new(&cluster, COMPONENT, ""),
        owned: sets
            .index(|set| controller(&set.metadata).map(|owner| owner.uid.clone()).into_iter().collect()),
        orphans: sets.index(|set| {
            let orphan = controller(&set.metadata).is_none();
            set.namespace().filter(|_| orphan).into_iter().collect()
        }),
        by_namespace: deployments.index(|deployment| deployment.namespace().into_iter().collect()),
        pods_of: pods
            .index(|pod| controller(&pod.metadata).map(|owner| owner.uid.clone()).into_iter().collect()),
        cluster: cluster.clone(),
        deployments,
        sets,
        pods,
    });
    let (deployments, sets, pods) =
        (controller.deployments.clone(), controller.sets.clone(), controller.pods.clone());
    let (of_set, of_pod) = (controller.clone(), controller.clone());
    Loop::new(&cluster, &cluster.queue("deployments", Backoff::default()))
        .keyed(&deployments)
        .subscribe(&sets, move |before, after| of_set.set_changed(before, after))
        // Recreate waits for the last old pod to be gone.
        .subscribe(&pods, move |before, after| {
            let gone = before.filter(|_| after.is_none());
            gone.and_then(|pod| of_pod.deployment_of(pod)).into_iter().collect()
        })
        .run(32, move |deployment| controller.clone().reconcile(deployment))
        .await;
}

struct Controller {
    cluster: Cluster,
    deployments: Cache<Deployment>,
    sets: Cache<ReplicaSet>,
    pods: Cache<Pod>,
    recorder: Recorder,
    /// Sets by their controller's uid.
    owned: Index<ReplicaSet, String>,
    /// Sets without a controller, by namespace.
    orphans: Index<ReplicaSet, String>,
    by_namespace: Index<Deployment, String>,
    /// Pods by their controller's uid.
    pods_of: Index<Pod, String>,
}

impl Controller {
    /// The deployments that a set's change matters to: its own, or those that may adopt it.
    fn set_changed(&self, before: Option<&Arc<ReplicaSet>>, after: Option<&Arc<ReplicaSet>>) -> Vec<Key> {
        let mut keys = Vec::new();
        for set in before.into_iter().chain(after) {
            let namespace = set.namespace().unwrap_or_default();
            if let Some(owner) = controller(&set.metadata) {
                if owner.kind == "Deployment" {
                    keys.push(Key::new(namespace, owner.name.clone()));
                }
                continue;
            }
            let deployments = self.by_namespace.get(namespace.as_str()).into_iter();
            let adopting = deployments.filter(|deployment| {
                deployment.spec.as_ref().is_some_and(|spec| chooses(&spec.selector, &set.metadata))
            });
            keys.extend(adopting.map(|deployment| Key::of(deployment.as_ref())));
        }
        keys
    }

    /// The deployment whose set a pod belongs to.
    fn deployment_of(&self, pod: &Pod) -> Option<Key> {
        let namespace = pod.namespace().unwrap_or_default();
        let owner = controller(&pod.metadata).filter(|owner| owner.kind == "ReplicaSet")?;
        let set = self.sets.get(&Key::new(namespace.clone(), owner.name.clone()))?;
        controller(&set.metadata).map(|owner| Key::new(namespace, owner.name.clone()))
    }

    async fn reconcile(self: Arc<Self>, key: Key) -> Result<Next> {
        let Some(deployment) = self.deployments.get(&key) else { return Ok(Next::Done) };
        let (Some(spec), Some(uid)) = (&deployment.spec, deployment.uid()) else { return Ok(Next::Done) };
        if is_empty(&spec.selector) {
            let message = "This deployment is selecting all pods. A non-empty selector is required.";
            self.recorder.warning(deployment.as_ref(), events::SELECTING_ALL, message);
            return Ok(Next::Done);
        }
        let (owned, orphans) = (self.owned.get(&uid), self.orphans.get(key.namespace.as_str()));
        let sets =
            claim(&self.cluster, deployment.as_ref(), |meta| chooses(&spec.selector, meta), owned, orphans)
                .await?;
        let (mut created, mut collisions) = (None, None);
        if deployment.metadata.deletion_timestamp.is_none() {
            let observed = self.see(&deployment, self.revised(&deployment, sets).await?);
            for step in plan(&observed) {
                match self.apply(&observed, step).await? {
                    Applied::Created(name) => created = Some(name),
                    Applied::Collided(count) => collisions = Some(count),
                    Applied::Done => {}
                }
            }
        }
        // What was just written is in the cache.
        let observed = self.see(&deployment, self.owned.get(&uid));
        let (status, again) = status(&observed, created.as_deref(), collisions, Timestamp::now());
        if !is_written(&deployment, &status) {
            let deployment = self.deployments.get(&key).unwrap_or(deployment.clone());
            self.cluster
                .update_status(deployment.as_ref(), |deployment| deployment.status = Some(status))
                .await?;
        }
        Ok(again.map_or(Next::Done, |seconds| Next::After(Duration::from_secs(seconds.unsigned_abs()))))
    }

    fn see<'a>(&self, deployment: &'a Deployment, sets: Vec<Arc<ReplicaSet>>) -> ObservedDeployment<'a> {
        let mut observed = ObservedDeployment::new(deployment, sets);
        let pods = observed.old.iter().filter_map(|set| set.uid()).flat_map(|uid| self.pods_of.get(&uid));
        observed.old_pods = pods.into_iter().any(|pod| !storage::is_over(&pod));
        observed
    }

    /// Gives the current set the highest revision, and the Deployment the same.
    async fn revised(
        &self,
        deployment: &Arc<Deployment>,
        sets: Vec<Arc<ReplicaSet>>,
    ) -> Result<Vec<Arc<ReplicaSet>>> {
        let mut observed = ObservedDeployment::new(deployment, sets);
        let Some(new) = observed.new.take() else { return Ok(observed.old) };
        let next = highest(&observed.old) + 1;
        let new = self.cluster.update(new.as_ref(), |set| refresh(deployment, set, next)).await?;
        self.annotate_revision(deployment, revision(&new.metadata)).await?;
        observed.old.push(new);
        Ok(observed.old)
    }

    async fn annotate_revision(&self, deployment: &Deployment, revision: i64) -> Result<()> {
        if template::revision(&deployment.metadata) != revision {
            self.cluster
                .update(deployment, |deployment| {
                    deployment.annotations_mut().insert(DEPLOYMENT_REVISION.to_owned(), revision.to_string());
                })
                .await?;
        }
        Ok(())
    }

    async fn apply(&self, observed: &ObservedDeployment<'_>, step: Step) -> Result<Applied> {
        let deployment = observed.deployment;
        let find = |name: &str| observed.all().find(|set| set.name_any() == name).cloned();
        match step {
            Step::Create { replicas } => return self.create(observed, replicas).await,
            Step::Scale { set, from, to } => {
                let Some(set) = find(&set) else { return Ok(Applied::Done) };
                self.cluster
                    .update(set.as_ref(), |set| {
                        set.annotations_mut().extend(sizes(deployment));
                        set.spec.get_or_insert_default().replicas = Some(to);
                    })
                    .await?;
                if from != to {
                    self.record_scaling(deployment, &set.name_any(), from, to);
                }
            }
            Step::Delete { set } => {
                if let Some(set) = find(&set) {
                    self.cluster.delete(set.as_ref()).await?;
                }
            }
        }
        Ok(Applied::Done)
    }

    async fn create(&self, observed: &ObservedDeployment<'_>, replicas: i32) -> Result<Applied> {
        let deployment = observed.deployment;
        let next = highest(&observed.old) + 1;
        let set = new_set(deployment, replicas, next);
        let name = set.name_any();
        match self.cluster.create(&set).await {
            Ok(_) => {}
            Err(error) if error.is_already_exists() => {
                let there = self.cluster.fetch::<ReplicaSet>(&Key::of(&set)).await?;
                let ours = there.is_some_and(|there| {
                    controller(&there.metadata).map(|owner| &owner.uid) == deployment.metadata.uid.as_ref()
                        && is_current(deployment, &there)
                });
                if !ours {
                    let known =
                        deployment.status.as_ref().and_then(|status| status.collision_count).unwrap_or(0);
                    return Ok(Applied::Collided(known + 1));
                }
                return Ok(Applied::Done);
            }
            Err(error) => {
                let message = format!("Failed to create new replica set {name:?}: {}", error.chain());
                self.recorder.warning(deployment, events::REPLICA_SET_CREATE_ERROR, message);
                return Err(error);
            }
        }
        if replicas > 0 {
            self.record_scaling(deployment, &name, 0, replicas);
        }
        self.annotate_revision(deployment, next).await?;
        Ok(Applied::Created(name))
    }

    fn record_scaling(&self, deployment: &Deployment, set: &str, from: i32, to: i32) {
        let way = if to > from { "up" } else { "down" };
        let message = format!("Scaled {way} replica set {set} from {from} to {to}");
        self.recorder.normal(deployment, events::SCALING_REPLICA_SET, message);
    }
}

enum Applied {
    Done,
    /// The set of this name is new.
    Created(String),
    /// The name was taken by something else, for so many times now.
    Collided(i32),
}

fn highest(sets: &[Arc<ReplicaSet>]) -> i64 {
    sets.iter().map(|set| revision(&set.metadata)).max().unwrap_or(0)
}
