//! What the Node object says of this machine: pure functions from what is known to what is written.

use std::collections::{BTreeMap, BTreeSet};

use berth_core::names::{BETA_NODE_LABEL_PREFIX, CONTROLLER_ATTACHES, NODE_LABEL_PREFIX};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    DaemonEndpoint, Node, NodeAddress, NodeCondition, NodeDaemonEndpoints, NodeStatus, NodeSystemInfo,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::facts::{Allocatable, Facts, architecture};
use super::{KUBELET_VERSION, Options};

/// What changes while the machine runs.
#[derive(Debug, Clone)]
pub(super) struct Now {
    pub(super) time: Timestamp,
    /// Why the node is not ready.
    pub(super) not_ready: Option<&'static str>,
    pub(super) disk_full: bool,
    pub(super) in_use: BTreeSet<String>,
}

/// Labels and annotations that the node has, whoever else adds some.
pub(super) fn describe(node: &mut Node, options: &Options) {
    let labels = node.metadata.labels.get_or_insert_default();
    labels.extend(options.labels.clone());
    for (name, value) in [("hostname", options.name.as_str()), ("os", "linux"), ("arch", architecture())] {
        labels.insert(format!("{NODE_LABEL_PREFIX}{name}"), value.to_owned());
        if name != "hostname" {
            labels.insert(format!("{BETA_NODE_LABEL_PREFIX}{name}"), value.to_owned());
        }
    }
    let annotations = node.metadata.annotations.get_or_insert_default();
    annotations.insert(CONTROLLER_ATTACHES.to_owned(), "true".to_owned());
}

/// Brings the status up to date; what others wrote there (`volumesAttached`, other conditions) stays.
pub(super) fn report(node: &mut Node, options: &Options, facts: &Facts, now: &Now) {
    let status = node.status.get_or_insert_default();
    status.capacity = Some(quantities(&facts.capacity));
    status.allocatable = Some(quantities(&facts.allocatable));
    status.addresses = Some(vec![
        NodeAddress { type_: "InternalIP".to_owned(), address: facts.address.to_string() },
        NodeAddress { type_: "Hostname".to_owned(), address: options.name.clone() },
    ]);
    status.daemon_endpoints = options
        .port
        .map(|port| NodeDaemonEndpoints { kubelet_endpoint: Some(DaemonEndpoint { port: port.into() }) });
    status.node_info = Some(system(options, facts));
    status.volumes_in_use =
        Some(now.in_use.iter().cloned().collect::<Vec<_>>()).filter(|names| !names.is_empty());
    for condition in conditions(now) {
        set_condition(status, condition, now.time);
    }
}

/// Whether a node says that it is ready.
pub(super) fn is_ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn quantities(of: &Allocatable) -> BTreeMap<String, Quantity> {
    let cpu = if of.cpu_millis.is_multiple_of(1000) {
        (of.cpu_millis / 1000).to_string()
    } else {
        format!("{}m", of.cpu_millis)
    };
    BTreeMap::from([
        ("cpu".to_owned(), Quantity(cpu)),
        ("memory".to_owned(), Quantity(format!("{}Ki", of.memory / 1024))),
        ("ephemeral-storage".to_owned(), Quantity(format!("{}Ki", of.ephemeral_storage / 1024))),
        ("pods".to_owned(), Quantity(of.pods.to_string())),
    ])
}

fn system(options: &Options, facts: &Facts) -> NodeSystemInfo {
    NodeSystemInfo {
        architecture: architecture().to_owned(),
        boot_id: facts.boot_id.clone(),
        container_runtime_version: options.runtime.clone(),
        kernel_version: facts.kernel.clone(),
        kubelet_version: KUBELET_VERSION.to_owned(),
        machine_id: facts.machine_id.clone(),
        operating_system: "linux".to_owned(),
        os_image: facts.os_image.clone(),
        system_uuid: facts.system_uuid.clone(),
        ..NodeSystemInfo::default()
    }
}

fn conditions(now: &Now) -> [NodeCondition; 4] {
    let condition = |type_: &str, is: bool, reason: &str, message: &str| NodeCondition {
        type_: type_.to_owned(),
        status: if is { "True" } else { "False" }.to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        ..NodeCondition::default()
    };
    let disk = if now.disk_full {
        condition("DiskPressure", true, "KubeletHasDiskPressure", "kubelet has disk pressure")
    } else {
        condition("DiskPressure", false, "KubeletHasNoDiskPressure", "kubelet has no disk pressure")
    };
    let ready = match now.not_ready {
        Some(why) => condition("Ready", false, "KubeletNotReady", why),
        None => condition("Ready", true, "KubeletReady", "kubelet is posting ready status"),
    };
    [
        condition(
            "MemoryPressure",
            false,
            "KubeletHasSufficientMemory",
            "kubelet has sufficient memory available",
        ),
        disk,
        condition("PIDPressure", false, "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
        ready,
    ]
}

fn set_condition(status: &mut NodeStatus, mut condition: NodeCondition, now: Timestamp) {
    // Whole seconds are all that Kubernetes keeps; more would look like a change each time.
    let now = Time(Timestamp::from_second(now.as_second()).unwrap_or(now));
    let known = status.conditions.get_or_insert_default();
    condition.last_heartbeat_time = Some(now.clone());
    condition.last_transition_time = Some(now);
    match known.iter_mut().find(|known| known.type_ == condition.type_) {
        Some(known) => {
            if known.status == condition.status {
                condition.last_transition_time = known.last_transition_time.take();
            }
            *known = condition;
        }
        None => known.push(condition),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use k8s_openapi::api::core::v1::AttachedVolume;

    use super::*;

    fn now(second: i64, not_ready: Option<&'static str>) -> Now {
        let time = Timestamp::from_second(second).unwrap();
        Now { time, not_ready, disk_full: false, in_use: BTreeSet::from(["b".to_owned(), "a".to_owned()]) }
    }

    fn condition<'a>(node: &'a Node, type_: &str) -> &'a NodeCondition {
        let conditions = node.status.as_ref().unwrap().conditions.as_ref().unwrap();
        conditions.iter().find(|condition| condition.type_ == type_).unwrap()
    }

    #[test]
    fn what_others_wrote_stays_and_a_transition_is_only_one_when_the_status_changes() {
        let options = Options::new("n", "/");
        let facts = Facts::read(Path::new("/"), 110, None);
        let mut node = Node::default();
        let status = node.status.get_or_insert_default();
        status.volumes_attached = Some(vec![AttachedVolume { name: "a".into(), device_path: String::new() }]);
        status.conditions =
            Some(vec![NodeCondition { type_: "NetworkUnavailable".into(), ..NodeCondition::default() }]);
        report(&mut node, &options, &facts, &now(10, Some("no CSINode yet")));
        assert!(!is_ready(&node));
        report(&mut node, &options, &facts, &now(20, None));
        assert!(is_ready(&node));
        report(&mut node, &options, &facts, &now(30, None));

        let status = node.status.as_ref().unwrap();
        assert_eq!(status.volumes_attached.as_ref().unwrap()[0].name, "a");
        assert_eq!(status.volumes_in_use, Some(vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(status.conditions.as_ref().unwrap().len(), 5);
        let second = |time: &Option<Time>| time.as_ref().unwrap().0.as_second();
        let ready = condition(&node, "Ready");
        assert_eq!((second(&ready.last_transition_time), second(&ready.last_heartbeat_time)), (20, 30));
        let memory = condition(&node, "MemoryPressure");
        assert_eq!((second(&memory.last_transition_time), second(&memory.last_heartbeat_time)), (10, 30));
    }

    #[test]
    fn labels_of_others_stay_and_ours_are_right() {
        let mut node = Node::default();
        node.metadata.labels = Some(BTreeMap::from([
            ("zone".to_owned(), "x".to_owned()),
            ("kubernetes.io/os".to_owned(), "plan9".to_owned()),
        ]));
        describe(&mut node, &Options::new("n", "/"));
        let labels = node.metadata.labels.unwrap();
        assert_eq!((labels["zone"].as_str(), labels["kubernetes.io/os"].as_str()), ("x", "linux"));
        assert_eq!(labels["kubernetes.io/hostname"], "n");
        assert_eq!(node.metadata.annotations.unwrap()[CONTROLLER_ATTACHES], "true");
    }
}
