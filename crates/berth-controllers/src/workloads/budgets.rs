//! PodDisruptionBudgets: how many pods of an application may be disrupted now. Evictions and preemption go by it.

mod stale;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use berth_core::names::events;
use berth_kube::selectors::{Labels, label_selector, labels};
use berth_kube::{Backoff, Cache, Cluster, Index, Key, Loop, Next, Recorder, Result, storage};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector, OwnerReference, Time};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt as _;

use super::ownership::controller;
use super::pods::{Rounding, is_ready, scaled};

const COMPONENT: &str = "controllermanager";
/// How long a pod whose eviction was allowed counts as gone before it is seen to go.
const DELETION_TIMEOUT: SignedDuration = SignedDuration::from_mins(2);

/// Runs until the cluster's shutdown.
pub(super) async fn run(cluster: Cluster) {
    let cluster = cluster.named(COMPONENT);
    tokio::join!(count(cluster.clone()), stale::run(cluster));
}

/// Keeps the status of all budgets current.
async fn count(cluster: Cluster) {
    let budgets: Cache<PodDisruptionBudget> = cluster.cache();
    let pods: Cache<Pod> = cluster.cache();
    let controller = Arc::new(Controller {
        recorder: Recorder::new(&cluster, COMPONENT, ""),
        budgets_by_namespace: budgets.index(|budget| budget.namespace().into_iter().collect()),
        pods_by_namespace: pods.index(|pod| pod.namespace().into_iter().collect()),
        deployments: cluster.cache(),
        replica_sets: cluster.cache(),
        stateful_sets: cluster.cache(),
        cluster: cluster.clone(),
        budgets: budgets.clone(),
    });
    let (of_pod, of_set, of_deployment, of_stateful) =
        (controller.clone(), controller.clone(), controller.clone(), controller.clone());
    Loop::new(&cluster, &cluster.queue("disruption", Backoff::default()))
        .keyed(&budgets)
        .subscribe(&pods, move |before, after| {
            if before.map(counts_by) == after.map(counts_by) {
                return Vec::new();
            }
            let pods = before.into_iter().chain(after);
            pods.flat_map(|pod| of_pod.budgets_of(pod)).collect()
        })
        .subscribe(&controller.replica_sets, move |before, after| {
            let changed = before.map(wants) != after.map(wants);
            of_set.in_namespace(after.or(before).filter(|_| changed))
        })
        .subscribe(&controller.deployments, move |before, after| {
            let replicas = |set: &Arc<Deployment>| set.spec.as_ref().and_then(|spec| spec.replicas);
            of_deployment
                .in_namespace(after.or(before).filter(|_| before.map(replicas) != after.map(replicas)))
        })
        .subscribe(&controller.stateful_sets, move |before, after| {
            let replicas = |set: &Arc<StatefulSet>| set.spec.as_ref().and_then(|spec| spec.replicas);
            of_stateful.in_namespace(after.or(before).filter(|_| before.map(replicas) != after.map(replicas)))
        })
        .run(4, move |budget| controller.clone().reconcile(budget))
        .await;
}

struct Controller {
    cluster: Cluster,
    recorder: Recorder,
    budgets: Cache<PodDisruptionBudget>,
    budgets_by_namespace: Index<PodDisruptionBudget, String>,
    pods_by_namespace: Index<Pod, String>,
    deployments: Cache<Deployment>,
    replica_sets: Cache<ReplicaSet>,
    stateful_sets: Cache<StatefulSet>,
}

impl Controller {
    async fn reconcile(self: Arc<Self>, key: Key) -> Result<Next> {
        let Some(budget) = self.budgets.get(&key) else { return Ok(Next::Done) };
        let mut pods = self.pods_by_namespace.get(key.namespace.as_str());
        pods.retain(|pod| is_about(&budget, pod));
        if pods.is_empty() {
            self.recorder.normal(budget.as_ref(), events::NO_PODS, "No matching pods found");
        }
        let expected = expected(&budget, &pods, |pod, owner| self.scale(pod, owner));
        if let Ok(Expected { unmanaged: true, .. }) = expected {
            let selector = budget.spec.as_ref().and_then(|spec| spec.selector.as_ref());
            let message = format!(
                "Pods selected by this PodDisruptionBudget (selector: {}) were found to be unmanaged. As a result, the status \
                 of the PDB cannot be calculated correctly, which may result in undefined behavior. To account for these \
                 pods please set \".spec.minAvailable\" field of the PDB to an integer value.",
                shown(selector)
            );
            self.recorder.warning(budget.as_ref(), events::UNMANAGED_PODS, message);
        }
        if let Err(why) = &expected {
            let message = format!("Failed to calculate the number of expected pods: {why}");
            self.recorder.warning(budget.as_ref(), events::CALCULATE_EXPECTED_POD_COUNT_FAILED, message);
        }
        let now = Timestamp::now();
        let (status, again) = status(&budget, &pods, expected, now);
        if budget.status.as_ref() != Some(&status) {
            self.cluster.update_status(budget.as_ref(), |budget| budget.status = Some(status)).await?;
        }
        Ok(again.map_or(Next::Done, |again| Next::After(again.duration_since(now).unsigned_abs())))
    }

    /// How many pods a pod's controller wants in all: its uid and the number.
    fn scale(&self, pod: &Pod, owner: &OwnerReference) -> Option<(String, i32)> {
        let key = Key::new(pod.namespace().unwrap_or_default(), owner.name.as_str());
        match owner.kind.as_str() {
            "ReplicaSet" => {
                let set = self.replica_sets.get(&key).filter(|set| set.uid().as_ref() == Some(&owner.uid))?;
                let above = controller(&set.metadata).filter(|above| above.kind == "Deployment");
                let Some(above) = above else {
                    return Some((owner.uid.clone(), set.spec.as_ref()?.replicas.unwrap_or(1)));
                };
                let key = Key::new(key.namespace, above.name.as_str());
                let found =
                    self.deployments.get(&key).filter(|found| found.uid().as_ref() == Some(&above.uid))?;
                Some((above.uid.clone(), found.spec.as_ref()?.replicas.unwrap_or(1)))
            }
            "StatefulSet" => {
                let set =
                    self.stateful_sets.get(&key).filter(|set| set.uid().as_ref() == Some(&owner.uid))?;
                Some((owner.uid.clone(), set.spec.as_ref()?.replicas.unwrap_or(1)))
            }
            _ => None,
        }
    }

    fn budgets_of(&self, pod: &Pod) -> Vec<Key> {
        let budgets = self.budgets_by_namespace.get(pod.namespace().unwrap_or_default().as_str());
        let about = budgets.iter().filter(|budget| is_about(budget, pod));
        about.map(|budget| Key::of(budget.as_ref())).collect()
    }

    fn in_namespace<K: kube::ResourceExt>(&self, changed: Option<&Arc<K>>) -> Vec<Key> {
        let namespace = changed.and_then(|changed| changed.namespace());
        let budgets = namespace.map(|namespace| self.budgets_by_namespace.get(namespace.as_str()));
        budgets.iter().flatten().map(|budget| Key::of(budget.as_ref())).collect()
    }
}

/// What of a pod the counts of a budget go by: its labels, its controller, and whether it is ready, over or being deleted.
fn counts_by(pod: &Arc<Pod>) -> (&Labels, Option<&str>, bool, bool, bool) {
    let controller = controller(&pod.metadata).map(|owner| owner.uid.as_str());
    let gone = pod.metadata.deletion_timestamp.is_some();
    (labels(pod.metadata.labels.as_ref()), controller, is_ready(pod), storage::is_over(pod), gone)
}

/// What of a ReplicaSet the counts of a budget go by: how many pods it wants, or whose Deployment's it is.
fn wants(set: &Arc<ReplicaSet>) -> (Option<i32>, Option<&str>) {
    let replicas = set.spec.as_ref().and_then(|spec| spec.replicas);
    (replicas, controller(&set.metadata).map(|owner| owner.uid.as_str()))
}

fn is_about(budget: &PodDisruptionBudget, pod: &Pod) -> bool {
    let selector = budget.spec.as_ref().and_then(|spec| spec.selector.as_ref());
    selector.is_some_and(|selector| label_selector(selector, labels(pod.metadata.labels.as_ref())))
}

/// A selector as Kubernetes' event shows it.
fn shown(selector: Option<&LabelSelector>) -> String {
    let Some(selector) = selector else { return "nil".to_owned() };
    let labels = selector.match_labels.iter().flatten().map(|(key, value)| format!("{key}: {value},"));
    let expressions = selector.match_expressions.iter().flatten().map(|asked| {
        let values = asked.values.iter().flatten().map(String::as_str).collect::<Vec<_>>().join(" ");
        format!(
            "LabelSelectorRequirement{{Key:{},Operator:{},Values:[{values}],}},",
            asked.key, asked.operator
        )
    });
    format!(
        "&LabelSelector{{MatchLabels:map[string]string{{{}}},MatchExpressions:[]LabelSelectorRequirement{{{}}},}}",
        labels.collect::<String>(),
        expressions.collect::<String>()
    )
}

/// What a budget asks of its pods.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Expected {
    pods: i32,
    healthy: i32,
    /// There are pods that no controller has.
    unmanaged: bool,
}

/// How many pods there should be, and how many of them healthy. `scale` says what the controller of a pod wants.
fn expected(
    budget: &PodDisruptionBudget,
    pods: &[Arc<Pod>],
    scale: impl Fn(&Pod, &OwnerReference) -> Option<(String, i32)>,
) -> Result<Expected, String> {
    let spec = budget.spec.clone().unwrap_or_default();
    let of_controllers = || {
        let (mut scales, mut unmanaged) = (HashMap::new(), false);
        for pod in pods {
            match controller(&pod.metadata) {
                None => unmanaged = true,
                Some(owner) if scales.contains_key(&owner.uid) => {}
                Some(owner) => {
                    let none = || format!("found no controllers for pod {:?}", pod.name_any());
                    scales.extend([scale(pod, owner).ok_or_else(none)?]);
                }
            }
        }
        Ok::<_, String>((scales.values().sum::<i32>(), unmanaged))
    };
    let share = |amount: &IntOrString, total: i32| {
        let share = scaled(amount, usize::try_from(total).unwrap_or(0), Rounding::Up);
        i32::try_from(share).unwrap_or(i32::MAX)
    };
    match (spec.max_unavailable, spec.min_available) {
        (Some(most), _) => {
            let (pods, unmanaged) = of_controllers()?;
            Ok(Expected { pods, healthy: (pods - share(&most, pods)).max(0), unmanaged })
        }
        (None, Some(IntOrString::Int(healthy))) => {
            let pods = i32::try_from(pods.len()).unwrap_or(i32::MAX);
            Ok(Expected { pods, healthy, unmanaged: false })
        }
        (None, Some(least)) => {
            let (pods, unmanaged) = of_controllers()?;
            Ok(Expected { pods, healthy: share(&least, pods), unmanaged })
        }
        (None, None) => Ok(Expected { pods: 0, healthy: 0, unmanaged: false }),
    }
}

/// The status of a budget, and when it is to be looked at again.
fn status(
    budget: &PodDisruptionBudget,
    pods: &[Arc<Pod>],
    expected: Result<Expected, String>,
    now: Timestamp,
) -> (PodDisruptionBudgetStatus, Option<Timestamp>) {
    let before = budget.status.clone().unwrap_or_default();
    let generation = budget.metadata.generation;
    let expected = match expected {
        Ok(expected) => expected,
        Err(why) => {
            let failed = condition(&before, false, "SyncFailed", &why, now);
            let status = PodDisruptionBudgetStatus {
                disruptions_allowed: Some(0),
                conditions: Some(vec![failed]),
                ..before
            };
            return (status, None);
        }
    };
    let until = |since: &Time| since.0.saturating_add(DELETION_TIMEOUT).unwrap_or(Timestamp::MAX);
    let noted = before.disrupted_pods.clone().unwrap_or_default();
    let leaving: BTreeMap<String, Time> = pods
        .iter()
        .filter(|pod| pod.metadata.deletion_timestamp.is_none())
        .filter_map(|pod| noted.get_key_value(&pod.name_any()))
        .filter(|(_, since)| until(since) >= now)
        .map(|(name, since)| (name.clone(), since.clone()))
        .collect();
    let healthy = pods.iter().filter(|pod| {
        pod.metadata.deletion_timestamp.is_none() && !leaving.contains_key(&pod.name_any()) && is_ready(pod)
    });
    let healthy = i32::try_from(healthy.count()).unwrap_or(i32::MAX);
    let allowed = if expected.pods <= 0 { 0 } else { (healthy - expected.healthy).max(0) };
    let reason = if allowed > 0 { "SufficientPods" } else { "InsufficientPods" };
    let mut allowing = condition(&before, allowed > 0, reason, "", now);
    allowing.observed_generation = generation;
    let again = leaving.values().map(until).min();
    let status = PodDisruptionBudgetStatus {
        conditions: Some(vec![allowing]),
        current_healthy: Some(healthy),
        desired_healthy: Some(expected.healthy),
        disrupted_pods: (!leaving.is_empty()).then_some(leaving),
        disruptions_allowed: Some(allowed),
        expected_pods: Some(expected.pods),
        observed_generation: generation,
    };
    (status, again)
}

/// The condition `DisruptionAllowed`, with its time if it is not new.
fn condition(
    before: &PodDisruptionBudgetStatus,
    allowed: bool,
    reason: &str,
    message: &str,
    now: Timestamp,
) -> Condition {
    let status = if allowed { "True" } else { "False" };
    let known = before.conditions.iter().flatten().find(|known| known.type_ == "DisruptionAllowed");
    Condition {
        type_: "DisruptionAllowed".to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        observed_generation: before.observed_generation,
        last_transition_time: known
            .filter(|known| known.status == status)
            .map_or(Time(now), |known| known.last_transition_time.clone()),
    }
}
