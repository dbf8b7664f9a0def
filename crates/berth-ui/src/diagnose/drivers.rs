//! What is wrong with drivers, their sidecars, classes and nodes.

use std::collections::{BTreeMap, BTreeSet};

use berth_core::names;
use berth_kube::Key;
use berth_kube::provisionable::reports_capacity;
use berth_kube::storage::csi_source;
use k8s_openapi::api::core::v1::{ContainerStatus, Node, Pod};
use kube::ResourceExt;

use super::{NodeState, Observed, is_ready, severity_if_used};
use crate::finding::{Finding, Fix, ObjectName, Severity, Trouble};

/// The sidecars by the names of their images. Of the last two the versions belong together.
const SIDECARS: [&str; 9] = [
    "csi-provisioner",
    "csi-attacher",
    "csi-resizer",
    "csi-node-driver-registrar",
    "csi-external-health-monitor-controller",
    "livenessprobe",
    "berth",
    "csi-snapshotter",
    "snapshot-controller",
];

pub(super) fn diagnose(observed: &Observed<'_>, findings: &mut Vec<Finding>) {
    registrations(observed, findings);
    versions(observed, findings);
    findings.extend(observed.state.pods.iter().filter_map(|pod| failing(observed, pod)));
    findings.extend(default_classes(observed));
    nodes(observed, findings);
    capacities(observed, findings);
}

/// The drivers that volumes, classes or objects name, with what names them.
fn named_drivers<'a>(observed: &Observed<'a>) -> BTreeMap<&'a str, (usize, Vec<&'a str>)> {
    let mut named: BTreeMap<&str, (usize, Vec<&str>)> = BTreeMap::new();
    for volume in observed.state.volumes.iter() {
        if let Some(csi) = csi_source(volume) {
            named.entry(csi.driver.as_str()).or_default().0 += 1;
        }
    }
    for class in observed.state.classes.iter() {
        if !class.provisioner.starts_with(names::IN_TREE_PLUGIN_PREFIX) {
            named.entry(class.provisioner.as_str()).or_default().1.extend(class.metadata.name.as_deref());
        }
    }
    for driver in observed.state.drivers.iter().filter_map(|driver| driver.metadata.name.as_deref()) {
        named.entry(driver).or_default();
    }
    named
}

/// Whether ordinary pods can come to a node.
fn takes_pods(node: &Node) -> bool {
    let spec = node.spec.as_ref();
    let taints = spec.and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
    is_ready(node)
        && spec.and_then(|spec| spec.unschedulable) != Some(true)
        && !taints.iter().any(|taint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute"))
}

fn registrations(observed: &Observed<'_>, findings: &mut Vec<Finding>) {
    let state = observed.state;
    if !state.csi_nodes.are_known() {
        return;
    }
    let taking: Vec<&str> = state
        .nodes
        .iter()
        .filter(|node| takes_pods(node))
        .filter_map(|node| node.metadata.name.as_deref())
        .collect();
    for (driver, (volumes, classes)) in named_drivers(observed) {
        let with = state.nodes_with(driver);
        let object = || match classes.first() {
            Some(class) if state.drivers.named(driver).is_none() => ObjectName {
                kind: "StorageClass".to_owned(),
                namespace: String::new(),
                name: (*class).to_owned(),
            },
            _ => {
                ObjectName { kind: "CSIDriver".to_owned(), namespace: String::new(), name: driver.to_owned() }
            }
        };
        let facts = format!("{volumes} volumes, classes: {}", super::names(classes.iter().copied()));
        if with.is_empty() {
            if state.nodes.is_empty() {
                continue;
            }
            let cause = format!("the driver {driver} is registered on no node: no pod can use its volumes");
            findings.push(
                Finding::new(severity_if_used(volumes > 0), Trouble::DriverAway, object(), cause)
                    .evidence([facts])
                    .advise("start the driver's node part (its DaemonSet and registrar); if the driver is gone for good, remove its classes and CSIDriver")
                    .command("kubectl get csinodes,pods -A -o wide"),
            );
            continue;
        }
        let without: Vec<&str> = taking.iter().copied().filter(|node| !with.contains(node)).collect();
        // A driver that is meant for a few nodes is on a few: more than half says that it is meant for all.
        if without.is_empty() || with.len() <= without.len() {
            continue;
        }
        let cause = format!(
            "the driver {driver} is registered on {} of {} nodes that take pods: a pod on {} cannot use its volumes",
            taking.len() - without.len(),
            taking.len(),
            super::names(without.iter().copied())
        );
        findings.push(
            Finding::new(Severity::Warning, Trouble::DriverOnTooFewNodes, object(), cause)
                .evidence([facts, format!("registered on: {}", super::names(with))])
                .advise("see why the driver's pod does not run there: taints, selectors, an image that cannot be pulled, a kubelet directory elsewhere")
                .command(format!("kubectl get pods -A -o wide --field-selector spec.nodeName={}", without[0])),
        );
    }
}

/// The name and version of a sidecar's image: `registry.k8s.io/sig-storage/csi-attacher:v4.5.0`.
fn sidecar(image: &str) -> Option<(&'static str, &str)> {
    let image = image.split('@').next().unwrap_or(image);
    let last = image.rsplit('/').next()?;
    let (name, tag) = last.split_once(':')?;
    let known = SIDECARS.into_iter().find(|sidecar| *sidecar == name)?;
    tag.trim_start_matches('v').starts_with(|c: char| c.is_ascii_digit()).then_some((known, tag))
}

/// Major and minor of a version: `v4.5.0` is 4.5.
fn minor(tag: &str) -> &str {
    let text = tag.trim_start_matches('v');
    text.match_indices('.').nth(1).map_or(text, |(at, _)| &text[..at])
}

fn versions(observed: &Observed<'_>, findings: &mut Vec<Finding>) {
    // By the owner of the pods for one component; by the image's name for those that belong together.
    let mut of_owner: BTreeMap<(String, &str), BTreeMap<&str, Vec<&Pod>>> = BTreeMap::new();
    let mut snapshots: BTreeMap<&str, BTreeMap<&str, &Pod>> = BTreeMap::new();
    for pod in observed.state.pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()) {
        let owner = pod.owner_references().first().map_or_else(String::new, |owner| owner.name.clone());
        let owner = format!("{}/{owner}", pod.namespace().unwrap_or_default());
        for container in pod.spec.iter().flat_map(|spec| &spec.containers) {
            let Some((name, tag)) = container.image.as_deref().and_then(sidecar) else { continue };
            of_owner.entry((owner.clone(), name)).or_default().entry(tag).or_default().push(pod);
            if matches!(name, "csi-snapshotter" | "snapshot-controller") {
                snapshots.entry(name).or_default().insert(minor(tag), pod);
            }
        }
    }
    for ((_, name), tags) in &of_owner {
        let Some(pod) = tags.values().next().and_then(|pods| pods.first()).filter(|_| tags.len() > 1) else {
            continue;
        };
        let all: Vec<String> = tags
            .iter()
            .map(|(tag, pods)| {
                format!(
                    "{tag} in {}",
                    super::names(pods.iter().filter_map(|pod| pod.metadata.name.as_deref()))
                )
            })
            .collect();
        if !observed.state.is_late(*pod) {
            continue;
        }
        let cause = format!(
            "copies of {name} run in different versions: {}",
            tags.keys().copied().collect::<Vec<_>>().join(", ")
        );
        findings.push(
            Finding::new(Severity::Warning, Trouble::SidecarSkew, ObjectName::of(*pod), cause)
                .evidence(all)
                .advise("finish the rollout, or see why it stands still; the copy that holds the Lease decides what happens")
                .command(format!("kubectl get pods -n {} -o wide", pod.namespace().unwrap_or_default())),
        );
    }
    if let (Some(sidecars), Some(controllers)) =
        (snapshots.get("csi-snapshotter"), snapshots.get("snapshot-controller"))
        && let Some((version, pod)) = sidecars
            .iter()
            .find(|(version, _)| major(version) != controllers.keys().next().map_or("", |known| major(known)))
    {
        let of_controller: Vec<&str> = controllers.keys().copied().collect();
        let cause = format!(
            "csi-snapshotter {version} works beside snapshot-controller {}: the two change their annotations together",
            of_controller.join(", ")
        );
        findings.push(
            Finding::new(Severity::Warning, Trouble::SidecarSkew, ObjectName::of(*pod), cause)
                .advise("run csi-snapshotter, snapshot-controller and the CustomResourceDefinitions of one major version")
                .command("kubectl get pods -A -o custom-columns=NAME:.metadata.name,IMAGES:.spec.containers[*].image"),
        );
    }
}

fn major(version: &str) -> &str {
    version.split('.').next().unwrap_or(version)
}

/// A pod that is part of a driver and does not stay up.
fn failing(observed: &Observed<'_>, pod: &Pod) -> Option<Finding> {
    let spec = pod.spec.as_ref()?;
    let socket = |args: &Option<Vec<String>>| {
        args.iter().flatten().any(|arg| arg.contains("--csi-address") || arg.contains("csi.sock"))
    };
    let is_driver = spec.containers.iter().any(|container| {
        container.image.as_deref().and_then(sidecar).is_some_and(|(name, _)| name != "berth")
            || socket(&container.args)
            || socket(&container.command)
    });
    if !is_driver || pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    let waiting = |status: &ContainerStatus| {
        let waiting = status.state.as_ref()?.waiting.as_ref()?;
        let reason = waiting.reason.clone()?;
        matches!(
            reason.as_str(),
            "CrashLoopBackOff"
                | "ImagePullBackOff"
                | "ErrImagePull"
                | "CreateContainerConfigError"
                | "RunContainerError"
        )
        .then(|| {
            (status.name.clone(), reason, waiting.message.clone().unwrap_or_default(), status.restart_count)
        })
    };
    let (container, reason, message, restarts) = statuses.into_iter().find_map(waiting)?;
    let cause = format!("the container {container} of a storage driver's pod does not stay up: {reason}");
    let node = berth_kube::storage::node_of_pod(pod);
    let used = observed.state.registered_any(node);
    Some(
        Finding::new(severity_if_used(used), Trouble::DriverPodFailing, ObjectName::of(pod), cause)
            .evidence([message, format!("{restarts} restarts on the node {node}")])
            .advise("see its log; the image, its flags or its rights are wrong")
            .command(format!(
                "kubectl logs -n {} {} -c {container} --previous",
                pod.namespace().unwrap_or_default(),
                pod.name_any()
            )),
    )
}

fn default_classes(observed: &Observed<'_>) -> Option<Finding> {
    let defaults: Vec<_> =
        observed.state.classes.iter().filter(|class| super::claims::is_default(class)).collect();
    let first = defaults.first().filter(|_| defaults.len() > 1)?;
    let all: Vec<String> = defaults.iter().map(|class| class.name_any()).collect();
    let newest = defaults.iter().max_by_key(|class| {
        (class.metadata.creation_timestamp.as_ref().map(|time| time.0), std::cmp::Reverse(class.name_any()))
    })?;
    let cause = format!(
        "the classes {} are all the default: claims without a class get the newest, {}",
        all.join(" and "),
        newest.name_any()
    );
    Some(
        Finding::new(
            Severity::Warning,
            Trouble::SeveralDefaultClasses,
            ObjectName::of(first.as_ref()),
            cause,
        )
        .advise(format!(
            "let one be the default, and set the annotation {} of the others to false",
            names::DEFAULT_CLASS
        ))
        .command(format!(
            "kubectl annotate sc {} {}=false --overwrite",
            all.iter().find(|name| **name != newest.name_any()).map_or("", String::as_str),
            names::DEFAULT_CLASS
        )),
    )
}

fn nodes(observed: &Observed<'_>, findings: &mut Vec<Finding>) {
    let mut attached: BTreeMap<(&str, &str), BTreeSet<&str>> = BTreeMap::new();
    for attachment in observed.state.attachments.iter() {
        let volume = attachment.spec.source.persistent_volume_name.as_deref().unwrap_or_default();
        attached.entry((&attachment.spec.node_name, &attachment.spec.attacher)).or_default().insert(volume);
    }
    for node in observed.state.nodes.iter().filter(|node| !is_ready(node)) {
        let name = node.name_any();
        let volumes: usize =
            attached.iter().filter(|((on, _), _)| *on == name).map(|(_, volumes)| volumes.len()).sum();
        let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let ready = conditions.into_iter().find(|condition| condition.type_ == "Ready");
        let since = observed
            .state
            .age(ready.and_then(|ready| ready.last_transition_time.as_ref()).map(|time| time.0));
        if volumes == 0 || since < observed.state.patience {
            continue;
        }
        let said = ready.and_then(|ready| ready.message.clone()).unwrap_or_default();
        let cause = format!(
            "the node {name} is not ready and has {volumes} volumes attached: volumes of one node at a time cannot be used elsewhere"
        );
        findings.push(
            Finding::new(Severity::Error, Trouble::NodeNotReady, ObjectName::of(node.as_ref()), cause)
                .evidence([said, format!("not ready for {}", super::span(since))])
                .advise(format!("bring the node back; only if the machine is certainly off, taint it, so that its volumes are detached: kubectl taint node {name} {}=nodeshutdown:NoExecute", names::OUT_OF_SERVICE))
                .command(format!("kubectl describe node {name}")),
        );
    }
    for ((node, driver), volumes) in attached {
        let limit = observed.state.csi_nodes.named(node).and_then(|known| {
            known.spec.drivers.iter().find(|known| known.name == driver)?.allocatable.as_ref()?.count
        });
        let Some(limit) =
            limit.and_then(|limit| usize::try_from(limit).ok()).filter(|limit| volumes.len() >= *limit)
        else {
            continue;
        };
        if observed.node_state(node) == Some(NodeState::Gone) {
            continue;
        }
        let cause = format!(
            "the node {node} has {} volumes of {driver} attached, and the driver allows {limit}: no more pods with such volumes come there",
            volumes.len()
        );
        let object = ObjectName { kind: "Node".to_owned(), namespace: String::new(), name: node.to_owned() };
        findings.push(
            Finding::new(Severity::Warning, Trouble::NodeVolumeLimit, object, cause)
                .advise("add nodes, or spread the pods; some drivers allow more volumes on larger machines")
                .command(format!("kubectl get csinode {node} -o yaml")),
        );
    }
}

fn capacities(observed: &Observed<'_>, findings: &mut Vec<Finding>) {
    let state = observed.state;
    let mut published: BTreeSet<&str> = BTreeSet::new();
    for capacity in state.capacities.iter() {
        published.insert(capacity.storage_class_name.as_str());
        if state.classes.lack(&Key::cluster(capacity.storage_class_name.as_str()))
            && state.is_late(capacity.as_ref())
        {
            let cause = format!(
                "it says how much room the class {} has, which does not exist any more: whoever published it does not run",
                capacity.storage_class_name
            );
            findings.push(
                Finding::new(
                    Severity::Note,
                    Trouble::CapacityStale,
                    ObjectName::of(capacity.as_ref()),
                    cause,
                )
                .advise("delete it; a provisioner that runs publishes what is needed again")
                .command("berth doctor --fix")
                .safe(Fix::Delete),
            );
        }
    }
    if !state.capacities.are_known() {
        return;
    }
    for class in state.classes.iter() {
        let tracked = state.drivers.named(&class.provisioner).is_some_and(|driver| reports_capacity(driver));
        let delayed = class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer");
        let name = class.name_any();
        if !tracked || !delayed || published.contains(name.as_str()) || !state.is_late(class.as_ref()) {
            continue;
        }
        let cause = format!(
            "the driver {} says that the scheduler must look at its capacity, and none is published for the class {name}: no pod with a new claim of it gets a node",
            class.provisioner
        );
        findings.push(
            Finding::new(Severity::Warning, Trouble::CapacityMissing, ObjectName::of(class.as_ref()), cause)
                .advise("run the driver's provisioner with --enable-capacity, or set storageCapacity: false in its CSIDriver")
                .command("kubectl get csistoragecapacities -A"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sidecars_are_known_by_their_images() {
        for (image, expected) in [
            ("registry.k8s.io/sig-storage/csi-attacher:v4.5.0", Some(("csi-attacher", "v4.5.0"))),
            ("registry:5000/csi-attacher:v4.5.0@sha256:00", Some(("csi-attacher", "v4.5.0"))),
            ("registry:5000/csi-attacher", None),
            ("nginx:1.2", None),
            ("csi-attacher:latest", None),
        ] {
            assert_eq!(sidecar(image), expected, "{image}");
        }
        assert_eq!((minor("v8.2.1"), minor("v8.2"), minor("8")), ("8.2", "8.2", "8"));
        assert_eq!(major(minor("v8.2.1")), "8");
    }
}
