//! StatefulSets: numbered pods that keep their names and their claims.

mod identity;
mod plan;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use berth_core::names::{CONTROLLER_REVISION_HASH, REVISION_HASH, events};
use berth_kube::{Backoff, Cache, Cluster, Key, Loop, Next, Result, storage};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{ControllerRevision, StatefulSet};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::ResourceExt as _;

use super::ownership::Dependents;
use super::pods::{Pods, in_growing_batches};
use super::revisions::{self, History};
use super::workload::{Workloads, again_after, is_selected};
use identity::{identify, makes_claim, new_pod, ordinal_in, ordinals, pod_name};
use plan::{Member, ObservedSet, Step, plan};

/// Runs until the cluster's shutdown.
pub(super) async fn run(cluster: Cluster) {
    let sets = Workloads::new(&cluster, "statefulset-controller", is_member);
    let controller = Arc::new(Controller {
        pods: Pods::new(&sets),
        revisions: Dependents::new(&sets.cluster),
        claims: sets.cluster.cache(),
        sets,
    });
    let (of_pod, of_claim) = (controller.clone(), controller.clone());
    let queue = controller.sets.cluster.queue("stateful-sets", Backoff::default());
    Loop::new(&controller.sets.cluster, &queue)
        .keyed(&controller.sets.cache)
        .subscribe(&controller.pods.dependents.cache, move |before, after| {
            of_pod.pods.changed(&of_pod.sets, before, after)
        })
        // A pod may wait for a claim to be gone, and a claim that goes under a pending pod is made again.
        .subscribe(&controller.claims, move |before, after| {
            let gone = before.filter(|_| after.is_none());
            gone.map(|claim| of_claim.makers_of(claim)).unwrap_or_default()
        })
        .reads(&controller.revisions.cache)
        .run(32, move |set| controller.clone().reconcile(set))
        .await;
}

struct Controller {
    sets: Workloads<StatefulSet>,
    pods: Pods,
    revisions: Dependents<ControllerRevision>,
    claims: Cache<PersistentVolumeClaim>,
}

impl Controller {
    /// The sets that make a claim of this name.
    fn makers_of(&self, claim: &PersistentVolumeClaim) -> Vec<Key> {
        let sets = self.sets.in_namespace(&claim.namespace().unwrap_or_default()).into_iter();
        sets.filter(|set| makes_claim(set, &claim.name_any())).map(|set| Key::of(set.as_ref())).collect()
    }

    async fn reconcile(self: Arc<Self>, key: Key) -> Result<Next> {
        let Some(set) = self.sets.cache.get(&key) else { return Ok(Next::Done) };
        let (Some(spec), Some(uid)) = (&set.spec, set.uid()) else { return Ok(Next::Done) };
        let collisions = set.status.as_ref().and_then(|status| status.collision_count).unwrap_or(0);
        let history = History::observe(
            &self.sets.cluster,
            set.as_ref(),
            &spec.template,
            REVISION_HASH,
            &self.revisions,
            collisions,
        )
        .await?;
        let Some(history) = history else { return Ok(Next::Done) };
        self.sets.claim(&set, &self.pods.dependents).await?;

        let status = set.status.clone().unwrap_or_default();
        let known = history.all.iter().find(|known| Some(known.name_any()) == status.current_revision);
        let current = known.unwrap_or(&history.newest).clone();
        let (current_name, update) = (current.name_any(), history.newest.name_any());
        let observed = self.observe(&set, &uid, &current_name, &update);
        self.compare_sizes(&observed);
        let applied = self.apply(&observed, &history, plan(&observed)).await;

        // What was just written is in the cache.
        let observed = self.observe(&set, &uid, &current_name, &update);
        let (status, again) = observed.status(history.collisions);
        let mut live: HashSet<String> =
            [&status.current_revision, &status.update_revision].into_iter().flatten().cloned().collect();
        let of_pod = |member: &Member| member.pod.labels().get(CONTROLLER_REVISION_HASH).cloned();
        live.extend(observed.members.iter().filter_map(of_pod));
        self.sets.write_status(&set, status).await?;
        applied?;
        if set.metadata.deletion_timestamp.is_none() {
            history.truncate(&self.sets.cluster, &live, spec.revision_history_limit).await?;
        }
        Ok(again_after(again))
    }

    fn observe<'a>(
        &self,
        set: &'a StatefulSet,
        uid: &str,
        current: &'a str,
        update: &'a str,
    ) -> ObservedSet<'a> {
        let owned = self.pods.of(uid).into_iter().filter(|pod| is_member(set, &pod.metadata));
        let mut members: Vec<Member> = owned
            .filter_map(|pod| {
                let ordinal = ordinal_in(&set.name_any(), &pod.name_any())?;
                Some(Member { ordinal, is_terminating: self.pods.is_going(&pod), pod })
            })
            .collect();
        members.sort_by_key(|member| member.ordinal);
        let namespace = set.namespace().unwrap_or_default();
        let mut claims = HashMap::new();
        for ordinal in ordinals(set).chain(members.iter().map(|member| member.ordinal)) {
            for (_, claim) in identity::claims(set, ordinal) {
                let name = claim.name_any();
                if let Some(known) = self.claims.get(&Key::new(namespace.clone(), name.clone())) {
                    claims.insert(name, known);
                }
            }
        }
        ObservedSet { set, current, update, members, claims, now: Timestamp::now() }
    }

    /// Says once for each change of the set that claims are smaller than their template: the controller grows none.
    fn compare_sizes(&self, observed: &ObservedSet<'_>) {
        let set = observed.set;
        let seen = set.status.as_ref().and_then(|status| status.observed_generation);
        if seen == set.metadata.generation {
            return;
        }
        for ordinal in ordinals(set) {
            for (_, wanted) in identity::claims(set, ordinal) {
                let Some(known) = observed.claims.get(&wanted.name_any()) else { continue };
                if storage::requested(known) < storage::requested(&wanted) {
                    let message = format!(
                        "claim {} asks for less storage than its template, which changes no existing claim; `berth resize \
                         statefulset/{} SIZE` grows the claims of all pods",
                        known.name_any(),
                        set.name_any()
                    );
                    self.sets.recorder.warning(set, events::CLAIM_SMALLER_THAN_TEMPLATE, message);
                    return;
                }
            }
        }
    }

    /// Takes the steps: one after the other, or many at a time if the set's pods need not wait for each other.
    async fn apply(&self, observed: &ObservedSet<'_>, history: &History, steps: Vec<Step>) -> Result<()> {
        if !observed.is_ordered() {
            return in_growing_batches(steps, |step| self.take(observed, history, step)).await;
        }
        for step in steps {
            self.take(observed, history, step).await?;
        }
        Ok(())
    }

    async fn take(&self, observed: &ObservedSet<'_>, history: &History, step: Step) -> Result<()> {
        let set = observed.set;
        match step {
            Step::CreateClaims { ordinal } => self.create_claims(observed, ordinal).await,
            Step::CreatePod { ordinal, revision } => {
                self.create_claims(observed, ordinal).await?;
                let revision = history.all.iter().find(|known| known.name_any() == revision);
                let revision = revision.unwrap_or(&history.newest);
                let template = revisions::template(revision).unwrap_or_default();
                let pod = new_pod(set, template, &revision.name_any(), ordinal);
                let created = self.sets.cluster.create(&pod).await.map(|_| ());
                self.record("Create", set, &pod.name_any(), created)
            }
            Step::Refuse { ordinal, why } => {
                let message = format!(
                    "Create Pod {} in StatefulSet {} failed error: {why}",
                    pod_name(set, ordinal),
                    set.name_any()
                );
                self.sets.recorder.warning(set, events::FAILED_CREATE, message);
                Ok(())
            }
            Step::Identify { ordinal, pod } => {
                let updated = self
                    .sets
                    .cluster
                    .update(pod.as_ref(), |pod| identify(set, ordinal, pod))
                    .await
                    .map(|_| ());
                self.record("Update", set, &pod.name_any(), updated)
            }
            Step::Own { claim, owners } => {
                let owned = self
                    .sets
                    .cluster
                    .update(claim.as_ref(), |claim| {
                        claim.metadata.owner_references = Some(owners).filter(|owners| !owners.is_empty());
                    })
                    .await;
                owned.map(|_| ())
            }
            Step::DeletePod { pod } => {
                let deleted = self.pods.delete_silently(&pod).await;
                self.record("Delete", set, &pod.name_any(), deleted)
            }
        }
    }

    async fn create_claims(&self, observed: &ObservedSet<'_>, ordinal: i32) -> Result<()> {
        let set = observed.set;
        let (pod, name) = (pod_name(set, ordinal), set.name_any());
        for claim in observed.missing_claims(ordinal) {
            let claim_name = claim.name_any();
            match self.sets.cluster.create(&claim).await {
                Ok(_) => {
                    let message =
                        format!("Create Claim {claim_name} Pod {pod} in StatefulSet {name} success");
                    self.sets.recorder.normal(set, events::SUCCESSFUL_CREATE, message);
                }
                Err(error) if error.is_already_exists() => {}
                Err(error) => {
                    let message = format!(
                        "Create Claim {claim_name} for Pod {pod} in StatefulSet {name} failed error: {}",
                        error.chain()
                    );
                    self.sets.recorder.warning(set, events::FAILED_CREATE, message);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Says by an event what became of a pod.
    fn record(&self, verb: &str, set: &StatefulSet, pod: &str, outcome: Result<()>) -> Result<()> {
        let (good, bad) = match verb {
            "Create" => (events::SUCCESSFUL_CREATE, events::FAILED_CREATE),
            "Update" => (events::SUCCESSFUL_UPDATE, events::FAILED_UPDATE),
            _ => (events::SUCCESSFUL_DELETE, events::FAILED_DELETE),
        };
        let name = set.name_any();
        match &outcome {
            Ok(()) => {
                let message = format!("{verb} Pod {pod} in StatefulSet {name} successful");
                self.sets.recorder.normal(set, good, message);
            }
            // Somebody else was quicker, or the cache does not show yet what is there.
            Err(error) if error.is_conflict() || error.is_already_exists() => {}
            Err(error) => {
                let message =
                    format!("{verb} Pod {pod} in StatefulSet {name} failed error: {}", error.chain());
                self.sets.recorder.warning(set, bad, message);
            }
        }
        outcome
    }
}

/// Whether a pod is one of the set's, by its labels and its name.
fn is_member(set: &StatefulSet, pod: &kube::api::ObjectMeta) -> bool {
    let name = pod.name.as_deref().unwrap_or_default();
    ordinal_in(&set.name_any(), name).is_some() && is_selected(set, pod)
}
