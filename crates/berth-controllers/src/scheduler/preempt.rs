//! Which pods make room for a more important one, after kube-scheduler's default preemption. Pure: pods are taken off the
//! board, a node is judged without them, and they are put back.

use std::cmp::Reverse;
use std::sync::Arc;

use berth_kube::Key;
use berth_kube::selectors::{is_empty, label_selector, labels};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt as _;

use super::board::{Board, Lifted, priority};
use super::decide::suits;
use super::unfit::{NO_VICTIMS, Plugin, Preemption, Why};
use super::world::World;

/// Why a pod leaves, in its condition `DisruptionTarget`.
pub(super) const REASON: &str = "PreemptionByScheduler";

/// Where others make room for a pod.
pub(super) fn nominated_node(board: &Board, pod: &Pod) -> Option<String> {
    board.nomination(&Key::of(pod)).map(str::to_owned)
}

/// Whether a pod may preempt others; `on_nominated` is why it does not fit where others make room for it.
pub(super) fn may_preempt(
    world: &impl World,
    board: &Board,
    pod: &Pod,
    on_nominated: Option<&Why>,
) -> Result<(), &'static str> {
    if pod.spec.as_ref().and_then(|spec| spec.preemption_policy.as_deref()) == Some("Never") {
        return Err("not eligible due to preemptionPolicy=Never.");
    }
    let Some(node) = nominated_node(board, pod).filter(|_| on_nominated.is_none_or(|why| why.resolvable))
    else {
        return Ok(());
    };
    let own = priority(pod);
    let there = board.load(&node).into_iter().flat_map(|load| &load.pods);
    let leaving =
        there.filter_map(|key| world.pod(key)).any(|other| priority(&other) < own && is_leaving(&other));
    if leaving { Err("not eligible due to a terminating pod on the nominated node.") } else { Ok(()) }
}

/// Whether a pod goes because it was preempted.
fn is_leaving(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    pod.metadata.deletion_timestamp.is_some()
        && conditions.iter().any(|condition| {
            condition.type_ == "DisruptionTarget"
                && condition.status == "True"
                && condition.reason.as_deref() == Some(REASON)
        })
}

/// The node on which the least is lost if pods leave it, or why that does not help, for each of the nodes.
pub(super) fn victims(
    world: &impl World,
    board: &mut Board,
    pod: &Pod,
    nodes: &[Arc<Node>],
    candidates: &[&Arc<Node>],
) -> Result<Preemption, Vec<Why>> {
    let budgets = if candidates.is_empty() { Vec::new() } else { world.budgets() };
    let (mut best, mut refused) = (None, Vec::new());
    for node in candidates {
        match on_node(world, board, pod, node, nodes, &budgets) {
            Ok(found) => {
                let rank = (found.loss(), node.name_any());
                if best.as_ref().is_none_or(|(known, _)| rank < *known) {
                    best = Some((rank, found));
                }
            }
            Err(why) => refused.push(why),
        }
    }
    let Some(((_, node), found)) = best else { return Err(refused) };
    let withdrawn = board.nominated_below(&node, priority(pod));
    let pods = found.pods.iter().map(|pod| Key::of(pod.as_ref())).collect();
    Ok(Preemption::Victims { node, pods, withdrawn })
}

/// The pods that would leave one node, the most important one first.
#[derive(Debug)]
struct Victims {
    pods: Vec<Arc<Pod>>,
    /// How many of them a PodDisruptionBudget would keep.
    violations: usize,
}

/// How much is lost, smaller being better, in the order in which it counts.
type Loss = (usize, i32, i64, usize, Reverse<Timestamp>);

impl Victims {
    fn loss(&self) -> Loss {
        let highest = self.pods.iter().map(|pod| priority(pod)).max().unwrap_or(i32::MIN);
        // Many pods of a negative priority are a greater loss than few.
        let sum = self.pods.iter().map(|pod| i64::from(priority(pod)) + (1 << 31)).sum();
        let most_important = self.pods.iter().filter(|pod| priority(pod) == highest);
        let since = most_important.map(|pod| started(pod)).min().unwrap_or(Timestamp::MAX);
        (self.violations, highest, sum, self.pods.len(), Reverse(since))
    }
}

/// When a pod started; one that has not started is the newest of all.
fn started(pod: &Pod) -> Timestamp {
    let since = pod.status.as_ref().and_then(|status| status.start_time.as_ref());
    since.map_or(Timestamp::MAX, |since| since.0)
}

/// The fewest pods that have to leave a node for a pod to fit there.
fn on_node(
    world: &impl World,
    board: &mut Board,
    pod: &Pod,
    node: &Node,
    nodes: &[Arc<Node>],
    budgets: &[Arc<PodDisruptionBudget>],
) -> Result<Victims, Why> {
    let own = priority(pod);
    let there: Vec<Key> =
        board.load(&node.name_any()).into_iter().flat_map(|load| &load.pods).cloned().collect();
    let mut potential: Vec<Arc<Pod>> =
        there.iter().filter_map(|key| world.pod(key)).filter(|other| priority(other) < own).collect();
    if potential.is_empty() {
        return Err(Why::never(Plugin::Resources, NO_VICTIMS));
    }
    potential.sort_by_key(|pod| (Reverse(priority(pod)), started(pod), Key::of(pod.as_ref())));
    let mut lifted: Vec<(Arc<Pod>, Lifted)> = Vec::new();
    for other in potential {
        if let Some(taken) = board.lift(&Key::of(other.as_ref())) {
            lifted.push((other, taken));
        }
    }
    if let Err(why) = suits(world, board, pod, node, nodes) {
        for (_, taken) in lifted {
            board.put_back(taken);
        }
        return Err(why);
    }
    let protected = protected(lifted.iter().map(|(pod, _)| pod.as_ref()), budgets);
    let (mut kept, mut others) = (Vec::new(), Vec::new());
    for (found, is_protected) in lifted.into_iter().zip(protected) {
        if is_protected { kept.push(found) } else { others.push(found) }
    }
    // Those that a budget protects are spared first, then the most important ones.
    let mut leaving = Vec::new();
    let mut spare = |(other, taken): (Arc<Pod>, Lifted)| {
        let key = Key::of(other.as_ref());
        board.put_back(taken);
        if suits(world, board, pod, node, nodes).is_err()
            && let Some(taken) = board.lift(&key)
        {
            leaving.push((other, taken));
            return false;
        }
        true
    };
    let violations = kept.into_iter().filter_map(|found| (!spare(found)).then_some(())).count();
    for found in others {
        spare(found);
    }
    leaving.sort_by_key(|(pod, _)| (Reverse(priority(pod)), started(pod), Key::of(pod.as_ref())));
    let mut pods = Vec::new();
    for (pod, taken) in leaving {
        board.put_back(taken);
        pods.push(pod);
    }
    Ok(Victims { pods, violations })
}

/// Which pods a budget would keep if all of them left, one after the other.
fn protected<'a>(pods: impl Iterator<Item = &'a Pod>, budgets: &[Arc<PodDisruptionBudget>]) -> Vec<bool> {
    let allowed = |budget: &Arc<PodDisruptionBudget>| {
        budget.status.as_ref().and_then(|status| status.disruptions_allowed).unwrap_or(0)
    };
    let mut allowed: Vec<i32> = budgets.iter().map(allowed).collect();
    let violates = |pod: &Pod| {
        let own = labels(pod.metadata.labels.as_ref());
        let mut violated = false;
        for (budget, left) in budgets.iter().zip(&mut allowed) {
            let selector = budget.spec.as_ref().and_then(|spec| spec.selector.as_ref());
            let is_about = !own.is_empty()
                && budget.namespace() == pod.namespace()
                && selector.is_some_and(|selector| !is_empty(selector) && label_selector(selector, own));
            let noted = budget.status.as_ref().and_then(|status| status.disrupted_pods.as_ref());
            // One that is known to go is counted already.
            if !is_about || noted.is_some_and(|noted| noted.contains_key(&pod.name_any())) {
                continue;
            }
            *left -= 1;
            violated |= *left < 0;
        }
        violated
    };
    pods.map(violates).collect()
}
