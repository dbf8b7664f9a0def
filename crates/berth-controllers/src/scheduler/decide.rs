//! Where a pod goes. Pure: objects come in, a node or the reasons against every node come out.

use std::sync::Arc;

use berth_kube::Key;
use k8s_openapi::api::core::v1::{Node, NodeSelector, Pod, PodSpec, Taint, Toleration};
use kube::ResourceExt as _;

use super::board::{Board, HostPort, host_ports, priority};
use super::neighbours::Neighbours;
use super::preempt;
use super::unfit::{Plugin, Unfit, Why};
use super::volumes::{PodVolumes, judge_node, judge_pod};
use super::world::World;
use berth_core::names;
use berth_kube::resources::{Amounts, amounts, requested};
use berth_kube::selectors::{labels, node_selector};

/// A node for a pod, and what to do about its volumes there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Placement {
    pub(super) node: String,
    pub(super) volumes: PodVolumes,
}

/// The best node for a pod, or why there is none and which pods make room for it. The board is as before when it returns.
pub(super) fn decide(world: &impl World, board: &mut Board, pod: &Pod) -> Result<Placement, Unfit> {
    let nodes = world.nodes();
    if nodes.is_empty() {
        return Err(Unfit::no_nodes());
    }
    // Room is kept for others, but nobody may rely on them being there.
    let actual = board.has_nominated().then(|| Neighbours::observe(world, board, pod, &nodes));
    let counted = board.count_nominated(&Key::of(pod), priority(pod));
    let placement = place(world, board, pod, &nodes, actual.as_ref());
    for key in counted {
        board.lift(&key);
    }
    placement
}

fn place(
    world: &impl World,
    board: &mut Board,
    pod: &Pod,
    nodes: &[Arc<Node>],
    actual: Option<&Neighbours>,
) -> Result<Placement, Unfit> {
    let nominated = preempt::nominated_node(board, pod);
    let claims = match judge_pod(world, board, pod) {
        Ok(claims) => claims,
        Err(why) => {
            return Err(Unfit::everywhere(&why, nodes.len(), preempt::may_preempt(world, board, pod, None)));
        }
    };
    let wishes = Wishes::of(pod);
    let neighbours = Neighbours::observe(world, board, pod, nodes);
    let (mut fitting, mut unfit) = (Vec::new(), Vec::new());
    for node in nodes {
        let fits = judge(&wishes, board, node).and_then(|()| judge_node(world, board, &claims, node));
        let fits = fits.and_then(|volumes| neighbours.judge(node).map(|()| volumes));
        let fits =
            fits.and_then(|volumes| actual.map_or(Ok(()), |actual| actual.judge(node)).map(|()| volumes));
        match fits {
            Ok(volumes) => fitting.push(Candidate {
                avoided: avoided(&wishes, node),
                wanted: preference(&wishes, node),
                near: neighbours.score(node),
                volumes,
                node,
            }),
            Err(why) => unfit.push(why),
        }
    }
    if let Some(best) = best(fitting, nominated.as_deref(), &wishes.request, board) {
        return Ok(best);
    }
    let at = nominated.and_then(|name| nodes.iter().position(|node| node.name_any() == name));
    let may_preempt = preempt::may_preempt(world, board, pod, at.and_then(|at| unfit.get(at)));
    if may_preempt.is_err() {
        return Err(Unfit::each(&unfit, &[], may_preempt));
    }
    let candidates: Vec<&Arc<Node>> =
        nodes.iter().zip(&unfit).filter(|(_, why)| why.resolvable).map(|(node, _)| node).collect();
    match preempt::victims(world, board, pod, nodes, &candidates) {
        Ok(preemption) => Err(Unfit::with_victims(&unfit, preemption)),
        Err(dry_run) => Err(Unfit::each(&unfit, &dry_run, may_preempt)),
    }
}

/// Whether a node suits a pod with the board as it is, whatever was found out about the pod before.
pub(super) fn suits(
    world: &impl World,
    board: &Board,
    pod: &Pod,
    node: &Node,
    nodes: &[Arc<Node>],
) -> Result<(), Why> {
    judge(&Wishes::of(pod), board, node)?;
    let claims = judge_pod(world, board, pod)?;
    judge_node(world, board, &claims, node)?;
    Neighbours::observe(world, board, pod, nodes).judge(node)
}

/// What a pod asks of any node.
struct Wishes<'a> {
    spec: Option<&'a PodSpec>,
    request: Amounts,
    ports: Vec<HostPort>,
}

impl<'a> Wishes<'a> {
    fn of(pod: &'a Pod) -> Self {
        Self { spec: pod.spec.as_ref(), request: requested(pod), ports: host_ports(pod) }
    }
}

/// A node that suits a pod, and what speaks for it.
struct Candidate<'a> {
    node: &'a Node,
    volumes: PodVolumes,
    /// How many taints it has that the pod had better avoid.
    avoided: i64,
    /// The weights of the pod's preferences that it meets.
    wanted: i64,
    /// The weights of the pods that are on it and around it.
    near: i64,
}

/// The best of the nodes that suit: the one where others made room for the pod, else by Kubernetes' weights of taints,
/// preferences, neighbours and what is left; then few pods, then the first by name.
fn best(
    candidates: Vec<Candidate<'_>>,
    nominated: Option<&str>,
    request: &Amounts,
    board: &Board,
) -> Option<Placement> {
    let span = |of: fn(&Candidate<'_>) -> i64| {
        let all = candidates.iter().map(of);
        (all.clone().min().unwrap_or(0), all.max().unwrap_or(0))
    };
    // The best gets 100, and none gets 0.
    let share = |value: i64, (least, most): (i64, i64)| {
        if most > least { (value - least) * 100 / (most - least) } else { 0 }
    };
    let (avoided, wanted, near) = (
        (0, span(|candidate| candidate.avoided).1),
        (0, span(|candidate| candidate.wanted).1),
        span(|candidate| candidate.near),
    );
    let ranked = candidates.into_iter().map(|candidate| {
        let name = candidate.node.name_any();
        let pods = board.load(&name).map_or(0, |load| load.pods.len());
        let score = -3 * share(candidate.avoided, avoided)
            + 2 * share(candidate.wanted, wanted)
            + 2 * share(candidate.near, near);
        let score = i128::from(score) + candidate.volumes.score + free(request, board, candidate.node);
        let rank = (nominated == Some(&name), score, std::cmp::Reverse(pods), std::cmp::Reverse(name));
        (rank, candidate)
    });
    let best = ranked.max_by(|(one, _), (other, _)| one.cmp(other));
    best.map(|(_, best)| Placement { node: best.node.name_any(), volumes: best.volumes })
}

/// How much of a node's CPU and memory is left with the pod on it, in percent.
fn free(request: &Amounts, board: &Board, node: &Node) -> i128 {
    let load = board.load(&node.name_any());
    let allocatable = allocatable(node);
    let mut free = 0;
    for name in ["cpu", "memory"] {
        let all = allocatable.get(name).copied().unwrap_or(0);
        let used = load.and_then(|load| load.requested.get(name)).copied().unwrap_or(0)
            + request.get(name).copied().unwrap_or(0);
        if all > 0 {
            free += ((all - used).max(0) * 100 / all) / 2;
        }
    }
    free
}

/// How many taints a node has that keep pods away if there is another one, and that the pod does not tolerate.
fn avoided(wishes: &Wishes<'_>, node: &Node) -> i64 {
    let tolerations = wishes.spec.and_then(|spec| spec.tolerations.as_deref()).unwrap_or_default();
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
    let soft = taints.iter().filter(|taint| taint.effect == "PreferNoSchedule");
    let avoided = soft.filter(|taint| !tolerations.iter().any(|toleration| tolerates(toleration, taint)));
    i64::try_from(avoided.count()).unwrap_or(i64::MAX)
}

/// The weights of the pod's preferred node affinities that a node meets.
fn preference(wishes: &Wishes<'_>, node: &Node) -> i64 {
    let affinity = wishes.spec.and_then(|spec| spec.affinity.as_ref()?.node_affinity.as_ref());
    let terms =
        affinity.and_then(|node| node.preferred_during_scheduling_ignored_during_execution.as_deref());
    let met = terms.unwrap_or_default().iter().filter(|term| {
        let selector = NodeSelector { node_selector_terms: vec![term.preference.clone()] };
        node_selector(&selector, &node.name_any(), labels(node.metadata.labels.as_ref()))
    });
    met.map(|term| i64::from(term.weight)).sum()
}

/// Whether a node suits a pod, volumes aside; the first that objects is heard.
fn judge(wishes: &Wishes<'_>, board: &Board, node: &Node) -> Result<(), Why> {
    let default = PodSpec::default();
    let spec = wishes.spec.unwrap_or(&default);
    let tolerations = spec.tolerations.as_deref().unwrap_or_default();
    let node_spec = node.spec.as_ref();
    if node_spec.and_then(|spec| spec.unschedulable) == Some(true) {
        let taint = taint(names::UNSCHEDULABLE);
        if !tolerations.iter().any(|toleration| tolerates(toleration, &taint)) {
            return Err(Why::never(Plugin::NodeUnschedulable, "node(s) were unschedulable"));
        }
    }
    let taints = node_spec.and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
    let refused = taints.iter().any(|taint| {
        matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute")
            && !tolerations.iter().any(|toleration| tolerates(toleration, taint))
    });
    if refused {
        return Err(Why::never(Plugin::TaintToleration, "node(s) had untolerated taint(s)"));
    }
    if !is_wanted(spec, node) {
        return Err(Why::never(Plugin::NodeAffinity, "node(s) didn't match Pod's node affinity/selector"));
    }
    if !board.has_ports(&node.name_any(), &wishes.ports) {
        let why = "node(s) didn't have free ports for the requested pod ports";
        return Err(Why::now(Plugin::NodePorts, why));
    }
    fits(&wishes.request, board, node)
}

fn taint(key: &str) -> Taint {
    Taint { key: key.to_owned(), effect: "NoSchedule".to_owned(), value: None, time_added: None }
}

/// Whether a toleration is for a taint.
pub(crate) fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let effect = toleration.effect.as_deref().unwrap_or_default();
    let key = toleration.key.as_deref().unwrap_or_default();
    if !effect.is_empty() && effect != taint.effect || !key.is_empty() && key != taint.key {
        return false;
    }
    match toleration.operator.as_deref().unwrap_or_default() {
        "Exists" => true,
        "" | "Equal" => {
            !key.is_empty()
                && toleration.value.as_deref().unwrap_or_default()
                    == taint.value.as_deref().unwrap_or_default()
        }
        _ => false,
    }
}

/// Whether a pod's node selector and required node affinity choose a node.
pub(crate) fn is_wanted(spec: &PodSpec, node: &Node) -> bool {
    let labels = labels(node.metadata.labels.as_ref());
    let selected = spec.node_selector.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    let required = spec
        .affinity
        .as_ref()
        .and_then(|affinity| affinity.node_affinity.as_ref())
        .and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution.as_ref());
    selected && required.is_none_or(|required| node_selector(required, &node.name_any(), labels))
}

fn fits(request: &Amounts, board: &Board, node: &Node) -> Result<(), Why> {
    let allocatable = allocatable(node);
    let load = board.load(&node.name_any());
    let (mut reasons, mut resolvable) = (Vec::new(), true);
    let pods = load.map_or(0, |load| load.pods.len());
    let allowed = allocatable.get("pods").copied().unwrap_or(0);
    if i128::try_from(pods + 1).unwrap_or(i128::MAX) * 1000 > allowed {
        reasons.push("Too many pods".into());
    }
    for (name, amount) in request {
        let all = allocatable.get(name).copied().unwrap_or(0);
        let used = load.and_then(|load| load.requested.get(name)).copied().unwrap_or(0);
        if amount + used > all {
            reasons.push(format!("Insufficient {name}").into());
            resolvable &= *amount <= all;
        }
    }
    if reasons.is_empty() { Ok(()) } else { Err(Why { plugin: Plugin::Resources, reasons, resolvable }) }
}

fn allocatable(node: &Node) -> Amounts {
    node.status.as_ref().and_then(|status| status.allocatable.as_ref()).map_or_else(Amounts::new, amounts)
}
