//! Where a claim would land, and why not elsewhere: what the scheduler and a provisioner would look at, node by node.

use std::collections::BTreeSet;

use berth_kube::provisionable::{Refusal, holds_for, provisionable, reports_capacity};
use berth_kube::selectors::labels;
use berth_kube::storage::units;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt as _;
use serde_json::{Value, json};

use crate::diagnose::{Observed, is_ready};
use crate::inventory::volumes_on;
use crate::words::gib;

/// What a viewer asks for: a class and a size.
pub(super) struct Question<'a> {
    pub(super) class: &'a str,
    /// The size of the claim in bytes.
    pub(super) size: i128,
}

/// What is found out about one node.
struct NodeFit {
    node: String,
    ready: bool,
    registered: Option<bool>,
    taken: usize,
    limit: Option<i32>,
    /// The most that the class has left there; `None` if nobody reports it.
    room: Option<i128>,
    /// Whether the largest volume that can be made there is large enough; `None` as for `room`.
    fits: Option<bool>,
    why: String,
}

/// The answer in one sentence, and what was found of every node.
pub(super) fn answer(observed: &Observed<'_>, question: &Question<'_>) -> Value {
    let state = observed.state;
    let Some(class) = state.classes.named(question.class) else {
        return json!({ "good": false, "rows": [], "answer": format!("There is no class {}: the claim would stay Pending.", question.class) });
    };
    let reports = state.drivers.named(&class.provisioner).is_some_and(|driver| reports_capacity(driver));
    let volumes = volumes_on(observed);
    let places: Vec<NodeFit> = state
        .nodes
        .iter()
        .map(|node| {
            let count = volumes.get(&(node.name_any(), class.provisioner.clone())).map_or(0, BTreeSet::len);
            fit(observed, question, class, node, reports, count)
        })
        .collect();
    let good: Vec<&NodeFit> = places.iter().filter(|place| place.why.is_empty()).collect();
    let waits = class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer");
    let known = !reports || state.capacities.are_known();
    let best = best(&good, waits, known);
    let answer = sentence(question, class, &places, &good, best, known, waits);
    let rows: Vec<Value> = places
        .iter()
        .map(|place| {
            json!({
                "node": place.node,
                "ready": place.ready,
                "registered": place.registered,
                "taken": place.taken,
                "limit": place.limit,
                "room": place.room,
                "fits": place.fits,
                "why": place.why,
                "best": best.is_some_and(|best| best.node == place.node),
            })
        })
        .collect();
    json!({ "good": !good.is_empty(), "answer": answer, "rows": rows, "hasBest": best.is_some(), "denied": reports && !state.capacities.are_known() })
}

fn fit(
    observed: &Observed<'_>,
    question: &Question<'_>,
    class: &StorageClass,
    node: &Node,
    reports: bool,
    taken: usize,
) -> NodeFit {
    let state = observed.state;
    let name = node.name_any();
    let registered = state.registered(&class.provisioner, &name);
    let limit = state.csi_nodes.named(&name).and_then(|node| {
        node.spec.drivers.iter().find(|driver| driver.name == class.provisioner)?.allocatable.as_ref()?.count
    });
    let own = labels(node.metadata.labels.as_ref());
    let of_class = || {
        state.capacities.iter().map(AsRef::as_ref).filter(|known| known.storage_class_name == question.class)
    };
    let here = of_class().filter(|known| holds_for(known, own));
    let room = here.filter_map(|known| known.capacity.as_ref().map(units)).max();
    let driver = state.drivers.named(&class.provisioner).map(AsRef::as_ref);
    let made = provisionable(class, driver, of_class(), node, question.size);
    let fits = (reports && state.capacities.are_known()).then_some(made != Err(Refusal::NoSpace));
    let spec = node.spec.as_ref();
    let refused = spec
        .and_then(|spec| spec.taints.as_ref())
        .into_iter()
        .flatten()
        .find(|taint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute"));
    let ready = is_ready(node);
    let full = limit.is_some_and(|limit| usize::try_from(limit).is_ok_and(|limit| taken >= limit));
    let why = if !ready {
        "The node is not ready.".to_owned()
    } else if spec.and_then(|spec| spec.unschedulable) == Some(true) {
        "The node is cordoned.".to_owned()
    } else if let Some(taint) = refused {
        format!("The node has the taint {}, which a pod has to tolerate.", taint.key)
    } else if made == Err(Refusal::NoProvisioner) {
        "The class has no provisioner: only a volume that is there already can be bound.".to_owned()
    } else if registered == Some(false) {
        "The driver is not registered there.".to_owned()
    } else if made == Err(Refusal::Topology) {
        "The class does not allow volumes there (allowedTopologies).".to_owned()
    } else if full {
        format!("It has {taken} of {} volumes attached.", limit.unwrap_or_default())
    } else if fits == Some(false) && room.is_none() {
        "The driver reports no capacity of this class there.".to_owned()
    } else if fits == Some(false) {
        format!("It has {} left.", gib(room.unwrap_or_default()))
    } else {
        String::new()
    };
    NodeFit { node: name, ready, registered, taken, limit, room, fits, why }
}

/// The node that would be chosen, where the volume is made for one node and capacities are known.
fn best<'a>(good: &[&'a NodeFit], waits: bool, known: bool) -> Option<&'a NodeFit> {
    let tells = waits && known && good.iter().any(|place| place.room.is_some());
    let most = |place: &&&NodeFit| (place.room.unwrap_or_default(), std::cmp::Reverse(place.node.clone()));
    if tells { good.iter().max_by_key(most).copied() } else { None }
}

fn sentence(
    question: &Question<'_>,
    class: &StorageClass,
    places: &[NodeFit],
    good: &[&NodeFit],
    best: Option<&NodeFit>,
    known: bool,
    waits: bool,
) -> String {
    let asked = gib(question.size);
    if places.is_empty() {
        return "There is no node, or nodes may not be read.".to_owned();
    }
    if good.is_empty() {
        return format!("It would stay Pending: no node can take {asked} of {}.", class.name_any());
    }
    if let Some(best) = best {
        let others = if good.len() == 1 {
            if places.len() == 1 { "it is the only node".to_owned() } else { "no other node fits".to_owned() }
        } else {
            format!("the most room of the {} nodes that fit", good.len())
        };
        return format!("It would land on {}: {others}.", best.node);
    }
    let which = if good.len() == places.len() {
        "every node".to_owned()
    } else {
        good.iter().map(|place| place.node.as_str()).collect::<Vec<_>>().join(" and ")
    };
    match (known, waits) {
        (false, _) => {
            "It could land on any node. Which one cannot be told without the capacities.".to_owned()
        }
        (true, true) => format!("It would be made where its first pod goes: {which} can take it."),
        (true, false) => format!("It would be made at once, and a pod could use it on {which}."),
    }
}
