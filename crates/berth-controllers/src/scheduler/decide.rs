//! Where a pod goes. Pure: objects come in, a node or the reasons against every node come out.

use k8s_openapi::api::core::v1::{Node, Pod, PodSpec, Taint, Toleration};
use kube::ResourceExt as _;

use super::board::Board;
use super::neighbours::Neighbours;
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

/// The best node for a pod.
pub(super) fn decide(world: &impl World, board: &Board, pod: &Pod) -> Result<Placement, Unfit> {
    let nodes = world.nodes();
    if nodes.is_empty() {
        return Err(Unfit::no_nodes());
    }
    let default = PodSpec::default();
    let spec = pod.spec.as_ref().unwrap_or(&default);
    let preempts = spec.preemption_policy.as_deref() != Some("Never");
    let claims =
        judge_pod(world, board, pod).map_err(|why| Unfit::everywhere(&why, nodes.len(), preempts))?;
    let request = requested(pod);
    let neighbours = Neighbours::observe(world, board, pod, &nodes);
    let (mut best, mut unfit) = (None, Vec::new());
    for node in &nodes {
        let fits = judge(spec, &request, board, node).and_then(|()| judge_node(world, board, &claims, node));
        let fits = fits.and_then(|volumes| neighbours.judge(node).map(|()| volumes));
        match fits {
            Ok(volumes) => {
                let rank = (neighbours.score(node), rank(&volumes, &request, board, node));
                if best.as_ref().is_none_or(|(known, _)| rank > *known) {
                    best = Some((rank, Placement { node: node.name_any(), volumes }));
                }
            }
            Err(why) => unfit.push(why),
        }
    }
    best.map(|(_, placement)| placement).ok_or_else(|| Unfit::each(&unfit, preempts))
}

/// Better is larger: volumes that fit well and much that is left; then few pods, then the first by name.
fn rank(
    volumes: &PodVolumes,
    request: &Amounts,
    board: &Board,
    node: &Node,
) -> (i128, std::cmp::Reverse<usize>, std::cmp::Reverse<String>) {
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
    let pods = load.map_or(0, |load| load.pods.len());
    (volumes.score + free, std::cmp::Reverse(pods), std::cmp::Reverse(node.name_any()))
}

/// Whether a node suits a pod, volumes aside; the first that objects is heard.
fn judge(spec: &PodSpec, request: &Amounts, board: &Board, node: &Node) -> Result<(), Why> {
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
    fits(request, board, node)
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
