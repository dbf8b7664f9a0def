//! What a pod asks of the pods beside it: affinity, anti-affinity, and how evenly they are spread. Pure.
//!
//! What is counted is counted once for a pod ([`Neighbours::observe`]); a node is then judged by the values of its labels.

use std::collections::{BTreeSet, HashMap};

use berth_kube::selectors::{Labels, is_empty, label_selector, labels};
use k8s_openapi::api::core::v1::{Node, Pod, PodAffinityTerm, PodSpec, TopologySpreadConstraint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::ResourceExt as _;

use super::board::Board;
use super::decide::{is_wanted, tolerates};
use super::unfit::{Plugin, Why};
use super::world::World;

/// How many pods count in each domain: by the values of one label of their nodes.
type Domains = HashMap<String, i64>;

/// What a pod asks of the pods beside it, counted.
#[derive(Debug, Default)]
pub(super) struct Neighbours {
    /// The required affinity: label of the domains, and pods that match all terms.
    near: Vec<(String, Domains)>,
    /// No pod matches the required affinity, and this one would itself: it may be the first.
    may_be_first: bool,
    /// The required anti-affinity: label of the domains, and pods that match the term.
    far: Vec<(String, Domains)>,
    /// Domains, by label, in which pods are that want to be far from this one.
    shunned: HashMap<String, BTreeSet<String>>,
    spread: Vec<Spread>,
    /// Weights of what is preferred: label of the domains, and weight per pod.
    preferred: Vec<(String, Domains)>,
}

/// One constraint of topology spread.
#[derive(Debug)]
struct Spread {
    label: String,
    max_skew: i64,
    /// The fewest pods that a domain has.
    fewest: i64,
    domains: Domains,
    /// One if the pod itself counts.
    own: i64,
}

impl Neighbours {
    /// Counts what matters to a pod. For pods that ask for nothing only those with anti-affinity are read.
    pub(super) fn observe(world: &impl World, board: &Board, pod: &Pod, nodes: &[impl AsRef<Node>]) -> Self {
        let mut found = Self::default();
        let by_name: HashMap<String, &Node> =
            nodes.iter().map(|node| (node.as_ref().name_any(), node.as_ref())).collect();
        for (key, node) in board.apart() {
            let (Some(other), Some(node)) = (world.pod(key), by_name.get(node)) else { continue };
            for term in required(affinity_terms(&other).1) {
                if let Some(value) = value(node, &term.topology_key)
                    && term_matches(world, term, &other, pod)
                {
                    found.shunned.entry(term.topology_key.clone()).or_default().insert(value.to_owned());
                }
            }
        }
        let default = PodSpec::default();
        let spec = pod.spec.as_ref().unwrap_or(&default);
        let (near, far) = affinity_terms(pod);
        let constraints = spec.topology_spread_constraints.as_deref().unwrap_or_default();
        if near.is_none() && far.is_none() && constraints.is_empty() {
            return found;
        }
        let (near_required, far_required) = (required(near), required(far));
        found.near = near_required.iter().map(|term| (term.topology_key.clone(), Domains::new())).collect();
        found.far = far_required.iter().map(|term| (term.topology_key.clone(), Domains::new())).collect();
        let preferred: Vec<(&PodAffinityTerm, i64)> =
            weighted(near).chain(weighted(far).map(|(term, weight)| (term, -weight))).collect();
        found.preferred =
            preferred.iter().map(|(term, _)| (term.topology_key.clone(), Domains::new())).collect();
        let mut spread = SpreadCounts::new(spec, pod, constraints, &by_name);
        let mut any_near = false;
        for (key, node) in board.placed() {
            let (Some(other), Some(node)) = (world.pod(key), by_name.get(node)) else { continue };
            spread.count(pod, &other, node);
            if other.metadata.deletion_timestamp.is_some()
                && near_required.is_empty()
                && far_required.is_empty()
            {
                continue;
            }
            let matches = |term: &PodAffinityTerm| term_matches(world, term, pod, &other);
            if !near_required.is_empty() && near_required.iter().all(&matches) {
                for (label, domains) in &mut found.near {
                    any_near |= add(domains, value(node, label), 1);
                }
            }
            for (term, (label, domains)) in far_required.iter().zip(&mut found.far) {
                if matches(term) {
                    add(domains, value(node, label), 1);
                }
            }
            for ((term, weight), (label, domains)) in preferred.iter().zip(&mut found.preferred) {
                if matches(term) {
                    add(domains, value(node, label), *weight);
                }
            }
        }
        found.may_be_first =
            !any_near && near_required.iter().all(|term| term_matches(world, term, pod, pod));
        let (spread, soft) = spread.finish();
        found.spread = spread;
        found.preferred.extend(soft);
        found
    }

    /// Whether a node suits, by the pods on it and around it; the first rule that objects is heard.
    pub(super) fn judge(&self, node: &Node) -> Result<(), Why> {
        const SPREAD: &str = "node(s) didn't match pod topology spread constraints";
        for spread in &self.spread {
            let Some(value) = value(node, &spread.label) else {
                let why = format!("{SPREAD} (missing required label)");
                return Err(Why::never(Plugin::PodTopologySpread, why));
            };
            let there = spread.domains.get(value).copied().unwrap_or(0);
            if there + spread.own - spread.fewest > spread.max_skew {
                return Err(Why::now(Plugin::PodTopologySpread, SPREAD));
            }
        }
        let has = |(label, domains): &(String, Domains)| {
            value(node, label).is_some_and(|value| domains.get(value).is_some_and(|count| *count > 0))
        };
        let is_near = self.near.iter().all(has);
        let is_labelled = self.near.iter().all(|(label, _)| value(node, label).is_some());
        let is_first = self.may_be_first && is_labelled;
        if !(is_near || is_first) {
            return Err(Why::never(Plugin::InterPodAffinity, "node(s) didn't match pod affinity rules"));
        }
        if self.far.iter().any(has) {
            return Err(Why::now(Plugin::InterPodAffinity, "node(s) didn't match pod anti-affinity rules"));
        }
        let is_shunned = self
            .shunned
            .iter()
            .any(|(label, values)| value(node, label).is_some_and(|value| values.contains(value)));
        if is_shunned {
            let why = "node(s) didn't satisfy existing pods anti-affinity rules";
            return Err(Why::now(Plugin::InterPodAffinity, why));
        }
        Ok(())
    }

    /// How much a node is preferred.
    pub(super) fn score(&self, node: &Node) -> i64 {
        let of = |(label, domains): &(String, Domains)| {
            value(node, label).and_then(|value| domains.get(value)).copied().unwrap_or(0)
        };
        self.preferred.iter().map(of).sum()
    }
}

/// Whether a pod wants pods to be elsewhere.
pub(super) fn wants_distance(pod: &Pod) -> bool {
    !required(affinity_terms(pod).1).is_empty()
}

/// What a pod says of pods that it wants near, and of those that it wants far.
#[derive(Clone, Copy)]
struct Terms<'a> {
    required: &'a [PodAffinityTerm],
    preferred: &'a [k8s_openapi::api::core::v1::WeightedPodAffinityTerm],
}

fn affinity_terms(pod: &Pod) -> (Option<Terms<'_>>, Option<Terms<'_>>) {
    let Some(affinity) = pod.spec.as_ref().and_then(|spec| spec.affinity.as_ref()) else {
        return (None, None);
    };
    let near = affinity.pod_affinity.as_ref().map(|near| Terms {
        required: near.required_during_scheduling_ignored_during_execution.as_deref().unwrap_or_default(),
        preferred: near.preferred_during_scheduling_ignored_during_execution.as_deref().unwrap_or_default(),
    });
    let far = affinity.pod_anti_affinity.as_ref().map(|far| Terms {
        required: far.required_during_scheduling_ignored_during_execution.as_deref().unwrap_or_default(),
        preferred: far.preferred_during_scheduling_ignored_during_execution.as_deref().unwrap_or_default(),
    });
    (near, far)
}

fn required(terms: Option<Terms<'_>>) -> &[PodAffinityTerm] {
    terms.map_or(&[], |terms| terms.required)
}

fn weighted(terms: Option<Terms<'_>>) -> impl Iterator<Item = (&PodAffinityTerm, i64)> {
    let preferred = terms.map_or(&[][..], |terms| terms.preferred);
    preferred.iter().map(|term| (&term.pod_affinity_term, i64::from(term.weight)))
}

/// Whether a term of a pod is about another pod.
fn term_matches(world: &impl World, term: &PodAffinityTerm, of: &Pod, other: &Pod) -> bool {
    let Some(selector) = &term.label_selector else { return false };
    let namespace = other.namespace().unwrap_or_default();
    let named = term.namespaces.as_deref().unwrap_or_default();
    let in_namespace = match &term.namespace_selector {
        None if named.is_empty() => of.namespace().unwrap_or_default() == namespace,
        None => named.contains(&namespace),
        Some(chosen) => {
            named.contains(&namespace)
                || is_empty(chosen)
                || world
                    .namespace(&namespace)
                    .is_some_and(|known| label_selector(chosen, labels(known.metadata.labels.as_ref())))
        }
    };
    in_namespace && label_selector(selector, labels(other.metadata.labels.as_ref()))
}

fn value<'a>(node: &'a Node, label: &str) -> Option<&'a str> {
    node.metadata.labels.as_ref()?.get(label).map(String::as_str)
}

/// Counts in a domain, if there is one; says whether there is.
fn add(domains: &mut Domains, domain: Option<&str>, amount: i64) -> bool {
    if let Some(domain) = domain {
        *domains.entry(domain.to_owned()).or_default() += amount;
    }
    domain.is_some()
}

/// The constraints of a pod while pods are counted.
struct SpreadCounts<'a> {
    constraints: Vec<Constraint<'a>>,
}

struct Constraint<'a> {
    wanted: &'a TopologySpreadConstraint,
    selector: LabelSelector,
    /// Every domain that a pod may be in, with how many are.
    domains: Domains,
    own: i64,
    /// The names of the nodes that count.
    eligible: BTreeSet<String>,
}

impl<'a> SpreadCounts<'a> {
    fn new(
        spec: &PodSpec,
        pod: &Pod,
        wanted: &'a [TopologySpreadConstraint],
        nodes: &HashMap<String, &Node>,
    ) -> Self {
        let own: &Labels = labels(pod.metadata.labels.as_ref());
        let constraints = wanted.iter().map(|constraint| {
            let mut selector = constraint.label_selector.clone().unwrap_or_default();
            for key in constraint.match_label_keys.iter().flatten() {
                if let Some(value) = own.get(key) {
                    selector.match_labels.get_or_insert_default().insert(key.clone(), value.clone());
                }
            }
            let is_eligible = |node: &&Node| {
                let by_affinity =
                    constraint.node_affinity_policy.as_deref() == Some("Ignore") || is_wanted(spec, node);
                let tolerations = spec.tolerations.as_deref().unwrap_or_default();
                let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
                let by_taints = constraint.node_taints_policy.as_deref() != Some("Honor")
                    || taints
                        .iter()
                        .filter(|taint| taint.effect != "PreferNoSchedule")
                        .all(|taint| tolerations.iter().any(|toleration| tolerates(toleration, taint)));
                by_affinity
                    && by_taints
                    && wanted.iter().all(|constraint| value(node, &constraint.topology_key).is_some())
            };
            let eligible: Vec<&Node> = nodes.values().copied().filter(is_eligible).collect();
            let mut domains = Domains::new();
            for node in &eligible {
                add(&mut domains, value(node, &constraint.topology_key), 0);
            }
            Constraint {
                wanted: constraint,
                own: i64::from(constraint.label_selector.is_some() && label_selector(&selector, own)),
                selector,
                domains,
                eligible: eligible.iter().map(|node| node.name_any()).collect(),
            }
        });
        Self { constraints: constraints.collect() }
    }

    fn count(&mut self, pod: &Pod, other: &Pod, node: &Node) {
        if other.metadata.deletion_timestamp.is_some() || other.namespace() != pod.namespace() {
            return;
        }
        let (found, name) = (labels(other.metadata.labels.as_ref()), node.name_any());
        for constraint in &mut self.constraints {
            let counts = constraint.wanted.label_selector.is_some()
                && constraint.eligible.contains(&name)
                && label_selector(&constraint.selector, found);
            if counts {
                add(&mut constraint.domains, value(node, &constraint.wanted.topology_key), 1);
            }
        }
    }

    /// The constraints that must hold, and those that are only preferred, as weights.
    fn finish(self) -> (Vec<Spread>, Vec<(String, Domains)>) {
        let (mut hard, mut soft) = (Vec::new(), Vec::new());
        for constraint in self.constraints {
            let wanted = constraint.wanted;
            if wanted.when_unsatisfiable != "DoNotSchedule" {
                let weights = constraint.domains.into_iter().map(|(domain, count)| (domain, -count));
                soft.push((wanted.topology_key.clone(), weights.collect()));
                continue;
            }
            let enough = i64::from(wanted.min_domains.unwrap_or(1));
            let domains = i64::try_from(constraint.domains.len()).unwrap_or(i64::MAX);
            let fewest = constraint.domains.values().copied().min().unwrap_or(0);
            hard.push(Spread {
                label: wanted.topology_key.clone(),
                max_skew: i64::from(wanted.max_skew),
                fewest: if domains < enough { 0 } else { fewest },
                domains: constraint.domains,
                own: constraint.own,
            });
        }
        (hard, soft)
    }
}
