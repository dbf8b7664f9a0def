//! Which nodes get a pod of a DaemonSet, which pods go, and what the status says. Pure.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use berth_core::names::{
    CONTROLLER_REVISION_HASH, DISK_PRESSURE, MEMORY_PRESSURE, NETWORK_UNAVAILABLE, NODE_NOT_READY,
    NODE_UNREACHABLE, PID_PRESSURE, UNSCHEDULABLE,
};
use berth_kube::storage;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{DaemonSet, DaemonSetStatus, RollingUpdateDaemonSet};
use k8s_openapi::api::core::v1::{
    Affinity, Node, NodeAffinity, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Pod, PodSpec,
    PodTemplateSpec, Taint, Toleration,
};
use kube::ResourceExt as _;

use crate::scheduler::{is_wanted, tolerates};
use crate::workloads::pods::{Availability, Rounding, is_available, nonzero, scaled, seconds_to_available};

/// One change to a DaemonSet's pods.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Step {
    Create {
        node: String,
    },
    Delete {
        pod: Arc<Pod>,
    },
    /// The pod ended by itself, and another one takes its place.
    Replace {
        pod: Arc<Pod>,
        node: String,
    },
}

/// A DaemonSet, its pods and the nodes.
pub(super) struct ObservedSet<'a> {
    pub(super) set: &'a DaemonSet,
    /// The hash of the set's template, which pods made from it are labelled with.
    pub(super) hash: &'a str,
    pub(super) nodes: Vec<Arc<Node>>,
    /// The pods, without those that are being deleted.
    pub(super) pods: Vec<Arc<Pod>>,
    /// Nodes whose pods ended again and again lately: the next has to wait.
    pub(super) held: HashSet<String>,
    pub(super) now: Timestamp,
}

/// Whether a node should have a pod, and whether one that is there may stay.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub(super) struct Verdict {
    pub(super) should_run: bool,
    pub(super) may_stay: bool,
}

/// What to do now.
pub(super) fn plan(observed: &ObservedSet<'_>) -> Vec<Step> {
    let mut steps = Vec::new();
    if observed.set.metadata.deletion_timestamp.is_some() {
        return steps;
    }
    let by_node = observed.by_node();
    for node in &observed.nodes {
        observed.plan_node(node, by_node.get(&node.name_any()).map_or(&[], Vec::as_slice), &mut steps);
    }
    // The pod of a node that is gone never runs.
    let known: HashSet<String> = observed.nodes.iter().map(|node| node.name_any()).collect();
    let lost = by_node.iter().filter(|(node, _)| !known.contains(*node)).flat_map(|(_, pods)| pods);
    steps.extend(
        lost.filter(|pod| storage::node_of_pod(pod).is_empty()).map(|pod| Step::Delete { pod: pod.clone() }),
    );
    if steps.is_empty() {
        observed.plan_update(&by_node, &mut steps);
    }
    steps
}

impl ObservedSet<'_> {
    /// The pods by the nodes that they are for, oldest first.
    fn by_node(&self) -> BTreeMap<String, Vec<Arc<Pod>>> {
        let mut nodes: BTreeMap<String, Vec<Arc<Pod>>> = BTreeMap::new();
        for pod in &self.pods {
            nodes.entry(node_of(pod)).or_default().push(pod.clone());
        }
        for pods in nodes.values_mut() {
            // Those that run before those that wait for a node.
            pods.sort_by_key(|pod| {
                let created = pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
                (storage::node_of_pod(pod).is_empty(), created, pod.name_any())
            });
        }
        nodes
    }

    fn minimum(&self) -> i32 {
        self.set.spec.as_ref().and_then(|spec| spec.min_ready_seconds).unwrap_or(0)
    }

    fn is_available(&self, pod: &Pod) -> bool {
        is_available(pod, self.minimum(), self.now)
    }

    fn is_current(&self, pod: &Pod) -> bool {
        pod.labels().get(CONTROLLER_REVISION_HASH).is_some_and(|hash| hash == self.hash)
    }

    /// How many pods may be missing, and how many may be too many, during an update; `None` for `OnDelete`.
    fn bounds(&self) -> Option<(usize, usize)> {
        let strategy = self.set.spec.as_ref().and_then(|spec| spec.update_strategy.as_ref());
        if strategy.and_then(|strategy| strategy.type_.as_deref()) == Some("OnDelete") {
            return None;
        }
        let default = RollingUpdateDaemonSet::default();
        let rolling = strategy.and_then(|strategy| strategy.rolling_update.as_ref()).unwrap_or(&default);
        let desired = self.nodes.iter().filter(|node| verdict(self.set, node).should_run).count();
        let surge = rolling.max_surge.as_ref().map_or(0, |surge| scaled(surge, desired, Rounding::Up));
        let missing =
            rolling.max_unavailable.as_ref().map_or(1, |missing| scaled(missing, desired, Rounding::Up));
        Some(if surge == 0 && missing == 0 { (1, 0) } else { (missing, surge) })
    }

    fn plan_node(&self, node: &Node, pods: &[Arc<Pod>], steps: &mut Vec<Step>) {
        let name = node.name_any();
        let verdict = verdict(self.set, node);
        if verdict.should_run && pods.is_empty() {
            if !self.held.contains(&name) {
                steps.push(Step::Create { node: name });
            }
            return;
        }
        if !verdict.may_stay {
            steps.extend(pods.iter().map(|pod| Step::Delete { pod: pod.clone() }));
            return;
        }
        let (over, mut running): (Vec<_>, Vec<_>) = pods.iter().partition(|pod| storage::is_over(pod));
        for pod in over {
            if !self.held.contains(&name) {
                steps.push(Step::Replace { pod: pod.clone(), node: name.clone() });
            }
        }
        if !verdict.should_run || running.len() <= 1 {
            return;
        }
        let surges = self.bounds().is_some_and(|(_, surge)| surge > 0);
        if surges {
            // One of the old template stays beside a new one until that one is available.
            let new = running.iter().find(|pod| self.is_current(pod)).copied();
            let old = running.iter().find(|pod| !self.is_current(pod)).copied();
            let keep_old = new.is_none_or(|new| !self.is_available(new));
            let kept: Vec<&Arc<Pod>> =
                new.into_iter().chain(old.filter(|old| keep_old && self.is_available(old))).collect();
            let kept = if kept.is_empty() { running.drain(..1).collect() } else { kept };
            steps.extend(
                running
                    .iter()
                    .filter(|pod| !kept.contains(pod))
                    .map(|pod| Step::Delete { pod: (*pod).clone() }),
            );
        } else {
            steps.extend(running.iter().skip(1).map(|pod| Step::Delete { pod: (*pod).clone() }));
        }
    }

    fn plan_update(&self, by_node: &BTreeMap<String, Vec<Arc<Pod>>>, steps: &mut Vec<Step>) {
        let Some((most, surge)) = self.bounds() else { return };
        let (mut missing, mut surging) = (0, 0);
        let (mut free, mut candidates) = (Vec::new(), Vec::new());
        for node in self.nodes.iter().filter(|node| verdict(self.set, node).should_run) {
            let pods = by_node.get(&node.name_any()).map_or(&[][..], Vec::as_slice);
            let new = pods.iter().find(|pod| self.is_current(pod));
            let old = pods.iter().find(|pod| !self.is_current(pod));
            match (old, new) {
                (None, None) => missing += 1,
                (Some(_), Some(_)) => surging += 1,
                (None, Some(new)) => missing += usize::from(!self.is_available(new)),
                (Some(old), None) if !self.is_available(old) => {
                    missing += 1;
                    free.push((node.name_any(), old.clone()));
                }
                (Some(old), None) => candidates.push((node.name_any(), old.clone())),
            }
        }
        if surge > 0 {
            // A new pod beside an old one; the old one goes when the new one is available.
            let left = surge.saturating_sub(surging);
            steps.extend(free.into_iter().map(|(_, pod)| Step::Delete { pod }));
            steps.extend(candidates.into_iter().take(left).map(|(node, _)| Step::Create { node }));
            return;
        }
        let left = most.saturating_sub(missing);
        steps.extend(
            free.into_iter().chain(candidates.into_iter().take(left)).map(|(_, pod)| Step::Delete { pod }),
        );
    }

    /// The status, and in how many seconds it changes by itself because a pod was ready for long enough.
    pub(super) fn status(&self, collisions: i32) -> (DaemonSetStatus, Option<i64>) {
        let by_node = self.by_node();
        let mut status = DaemonSetStatus {
            observed_generation: self.set.metadata.generation,
            collision_count: Some(collisions).filter(|count| *count > 0),
            conditions: self.set.status.as_ref().and_then(|status| status.conditions.clone()),
            ..DaemonSetStatus::default()
        };
        let (mut updated, mut availability) = (0, Availability::default());
        for node in &self.nodes {
            let pods = by_node.get(&node.name_any()).map_or(&[][..], Vec::as_slice);
            if !verdict(self.set, node).should_run {
                status.number_misscheduled += i32::from(!pods.is_empty());
                continue;
            }
            status.desired_number_scheduled += 1;
            status.current_number_scheduled += i32::from(!pods.is_empty());
            // While a new pod surges, the old one stands for the node.
            updated += i32::from(pods.first().is_some_and(|pod| self.is_current(pod)));
            let left = |pod: &Arc<Pod>| seconds_to_available(pod, self.minimum(), self.now);
            availability.count(pods.first().and_then(left));
            // The old one goes when the new one is available.
            let surging = pods.iter().skip(1).filter_map(left).filter(|seconds| *seconds > 0);
            availability.next = availability.next.into_iter().chain(surging).min();
        }
        status.number_ready = availability.ready;
        status.updated_number_scheduled = nonzero(updated);
        status.number_available = nonzero(availability.available);
        status.number_unavailable = nonzero(status.desired_number_scheduled - availability.available);
        (status, availability.next)
    }
}

/// How many old revisions are kept that no pod is of. Those that pods are of count, and are kept whatever the limit.
pub(super) fn spare_revisions(limit: Option<i32>, in_use: usize) -> i32 {
    limit.unwrap_or(10).saturating_sub(i32::try_from(in_use).unwrap_or(i32::MAX)).max(0)
}

/// The node that a pod is on, or is to be on.
pub(super) fn node_of(pod: &Pod) -> String {
    let node = storage::node_of_pod(pod);
    if !node.is_empty() {
        return node.to_owned();
    }
    let required = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.affinity.as_ref()?.node_affinity.as_ref())
        .and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution.as_ref());
    let fields = required.into_iter().flat_map(|required| &required.node_selector_terms);
    let fields = fields.flat_map(|term| term.match_fields.iter().flatten());
    let mut named = fields.filter(|field| field.key == "metadata.name");
    named.find_map(|field| field.values.as_ref()?.first().cloned()).unwrap_or_default()
}

/// Whether a node suits a set, by taints, selector and affinity of its template.
pub(super) fn verdict(set: &DaemonSet, node: &Node) -> Verdict {
    let mut spec = set.spec.as_ref().and_then(|spec| spec.template.spec.clone()).unwrap_or_default();
    let no = Verdict { should_run: false, may_stay: false };
    if spec.node_name.as_deref().is_some_and(|name| !name.is_empty() && name != node.name_any()) {
        return no;
    }
    if !is_wanted(&spec, node) {
        return no;
    }
    add_tolerations(&mut spec);
    let tolerations = spec.tolerations.as_deref().unwrap_or_default();
    let is_tolerated = |taint: &&Taint| tolerations.iter().any(|toleration| tolerates(toleration, taint));
    let unschedulable =
        Taint { key: UNSCHEDULABLE.to_owned(), effect: "NoSchedule".to_owned(), ..Taint::default() };
    let node_spec = node.spec.clone().unwrap_or_default();
    let mut taints = node_spec.taints.unwrap_or_default();
    if node_spec.unschedulable == Some(true) {
        taints.push(unschedulable);
    }
    let untolerated: Vec<&Taint> = taints.iter().filter(|taint| !is_tolerated(taint)).collect();
    Verdict {
        should_run: !untolerated
            .iter()
            .any(|taint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute")),
        may_stay: !untolerated.iter().any(|taint| taint.effect == "NoExecute"),
    }
}

/// The pod of a set for one node: nowhere else, and there whatever state the node is in.
pub(super) fn template_for(set: &DaemonSet, hash: &str, node: &str) -> PodTemplateSpec {
    let mut template = set.spec.as_ref().map(|spec| spec.template.clone()).unwrap_or_default();
    let labels = template.metadata.get_or_insert_default().labels.get_or_insert_default();
    labels.insert(CONTROLLER_REVISION_HASH.to_owned(), hash.to_owned());
    if let Some(generation) = set.annotations().get("deprecated.daemonset.template.generation") {
        labels.insert("pod-template-generation".to_owned(), generation.clone());
    }
    let spec = template.spec.get_or_insert_default();
    add_tolerations(spec);
    let named = NodeSelectorRequirement {
        key: "metadata.name".to_owned(),
        operator: "In".to_owned(),
        values: Some(vec![node.to_owned()]),
    };
    let affinity: &mut NodeAffinity =
        spec.affinity.get_or_insert_with(Affinity::default).node_affinity.get_or_insert_default();
    // Terms are alternatives: the node has to be in each of them, and other fields are judged already.
    let required = affinity
        .required_during_scheduling_ignored_during_execution
        .get_or_insert_with(NodeSelector::default);
    if required.node_selector_terms.is_empty() {
        required.node_selector_terms.push(NodeSelectorTerm::default());
    }
    for term in &mut required.node_selector_terms {
        term.match_fields = Some(vec![named.clone()]);
    }
    template
}

/// Daemon pods stay on nodes that have trouble, and run on nodes that others are kept away from.
fn add_tolerations(spec: &mut PodSpec) {
    let on_host = spec.host_network == Some(true);
    let wanted = [
        (NODE_NOT_READY, "NoExecute"),
        (NODE_UNREACHABLE, "NoExecute"),
        (DISK_PRESSURE, "NoSchedule"),
        (MEMORY_PRESSURE, "NoSchedule"),
        (PID_PRESSURE, "NoSchedule"),
        (UNSCHEDULABLE, "NoSchedule"),
        (NETWORK_UNAVAILABLE, "NoSchedule"),
    ];
    let tolerations = spec.tolerations.get_or_insert_default();
    for (key, effect) in wanted.into_iter().filter(|(key, _)| on_host || *key != NETWORK_UNAVAILABLE) {
        let toleration = Toleration {
            key: Some(key.to_owned()),
            operator: Some("Exists".to_owned()),
            effect: Some(effect.to_owned()),
            ..Toleration::default()
        };
        let same = |known: &&mut Toleration| {
            (&known.key, &known.operator, &known.effect, &known.value)
                == (&toleration.key, &toleration.operator, &toleration.effect, &toleration.value)
        };
        match tolerations.iter_mut().find(same) {
            // For as long as it takes.
            Some(known) => known.toleration_seconds = None,
            None => tolerations.push(toleration),
        }
    }
}
