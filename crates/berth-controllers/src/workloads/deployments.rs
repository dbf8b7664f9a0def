//! Deployments: from one template to the next, without more pods missing than allowed.

mod plan;
mod status;
pub(super) mod template;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use berth_core::names::{DEPLOYMENT_REVISION, events};
use berth_kube::selectors::is_empty;
use berth_kube::{Backoff, Cluster, Key, Loop, Next, Result, storage};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use super::ownership::{Dependents, controller};
use super::workload::{Workloads, again_after, is_selected};
use plan::{ObservedDeployment, Step, plan};
use status::status;
use template::{is_current, new_set, refresh, revision, sizes};

/// Runs until the cluster's shutdown.
pub(super) async fn run(cluster: Cluster) {
    let deployments = Workloads::new(&cluster, "deployment-controller", is_selected);
    let controller = Arc::new(Controller {
        sets: Dependents::new(&deployments.cluster),
        pods: Dependents::new(&deployments.cluster),
        deployments,
    });
    let (of_set, of_pod) = (controller.clone(), controller.clone());
    let queue = controller.deployments.cluster.queue("deployments", Backoff::default());
    Loop::new(&controller.deployments.cluster, &queue)
        .keyed(&controller.deployments.cache)
        .subscribe(&controller.sets.cache, move |before, after| of_set.deployments.concerned(before, after))
        // Recreate waits for the last old pod to be gone.
        .subscribe(&controller.pods.cache, move |before, after| {
            let gone = before.filter(|_| after.is_none());
            gone.and_then(|pod| of_pod.deployment_of(pod)).into_iter().collect()
        })
        .run(32, move |deployment| controller.clone().reconcile(deployment))
        .await;
}

struct Controller {
    deployments: Workloads<Deployment>,
    sets: Dependents<ReplicaSet>,
    pods: Dependents<Pod>,
}

impl Controller {
    /// The deployment whose set a pod belongs to.
    fn deployment_of(&self, pod: &Pod) -> Option<Key> {
        let namespace = pod.namespace().unwrap_or_default();
        let owner = controller(&pod.metadata).filter(|owner| owner.kind == "ReplicaSet")?;
        let set = self.sets.cache.get(&Key::new(namespace.clone(), owner.name.clone()))?;
        controller(&set.metadata).map(|owner| Key::new(namespace, owner.name.clone()))
    }

    async fn reconcile(self: Arc<Self>, key: Key) -> Result<Next> {
        let Some(deployment) = self.deployments.cache.get(&key) else { return Ok(Next::Done) };
        let (Some(spec), Some(uid)) = (&deployment.spec, deployment.uid()) else { return Ok(Next::Done) };
        if is_empty(&spec.selector) {
            let message = "This deployment is selecting all pods. A non-empty selector is required.";
            self.deployments.recorder.warning(deployment.as_ref(), events::SELECTING_ALL, message);
            return Ok(Next::Done);
        }
        let sets = self.deployments.claim(&deployment, &self.sets).await?;
        let (mut created, mut collisions) = (None, None);
        if deployment.metadata.deletion_timestamp.is_none() {
            let observed = self.observe(&deployment, self.revised(&deployment, sets).await?);
            for step in plan(&observed) {
                match self.apply(&observed, step).await? {
                    Applied::Created(name) => created = Some(name),
                    Applied::Collided(count) => collisions = Some(count),
                    Applied::Done => {}
                }
            }
        }
        // What was just written is in the cache.
        let observed = self.observe(&deployment, self.sets.of(&uid));
        let (status, again) = status(&observed, created.as_deref(), collisions, Timestamp::now());
        // The annotation of its revision may have been written since.
        let deployment = self.deployments.cache.get(&key).unwrap_or(deployment.clone());
        self.deployments.write_status(&deployment, status).await?;
        Ok(again_after(again))
    }

    fn observe<'a>(&self, deployment: &'a Deployment, sets: Vec<Arc<ReplicaSet>>) -> ObservedDeployment<'a> {
        let mut observed = ObservedDeployment::new(deployment, sets);
        let pods = observed.old.iter().filter_map(|set| set.uid()).flat_map(|uid| self.pods.of(&uid));
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
        let new = self.deployments.cluster.update(new.as_ref(), |set| refresh(deployment, set, next)).await?;
        self.annotate_revision(deployment, revision(&new.metadata)).await?;
        observed.old.push(new);
        Ok(observed.old)
    }

    /// With the status, as upstream does: a change of annotations counts as a new generation otherwise.
    async fn annotate_revision(&self, deployment: &Deployment, revision: i64) -> Result<()> {
        if template::revision(&deployment.metadata) != revision {
            self.deployments
                .cluster
                .update_status(deployment, |deployment| {
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
                self.deployments
                    .cluster
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
                    self.deployments.cluster.delete(set.as_ref()).await?;
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
        match self.deployments.cluster.create(&set).await {
            Ok(_) => {}
            Err(error) if error.is_already_exists() => {
                let there = self.deployments.cluster.fetch::<ReplicaSet>(&Key::of(&set)).await?;
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
                self.deployments.recorder.warning(deployment, events::REPLICA_SET_CREATE_ERROR, message);
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
        self.deployments.recorder.normal(deployment, events::SCALING_REPLICA_SET, message);
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
