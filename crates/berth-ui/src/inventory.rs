//! The nodes and drivers of a cluster, as page and terminal list them.

use std::collections::{BTreeMap, BTreeSet};

use berth_kube::provisionable::reports_capacity;
use berth_kube::storage::{claims_of_pod, csi_source, is_over, node_of_pod, volume_name};
use kube::ResourceExt as _;
use serde::Serialize;

use crate::calls::{CallCounts, CallFigures};
use crate::diagnose::{Observed, is_ready};
use crate::state::ClusterState;

/// One node, with the drivers that it knows or has volumes of.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct NodeRow {
    pub(crate) name: String,
    pub(crate) ready: bool,
    pub(crate) zone: Option<String>,
    pub(crate) kubelet: Option<String>,
    pub(crate) drivers: BTreeMap<String, DriverOnNode>,
    /// How many volumes are attached or mounted there.
    pub(crate) volumes: usize,
}

/// A driver on one node.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct DriverOnNode {
    /// Whether it is registered there.
    pub(crate) on: bool,
    /// How many volumes it allows there, if it says so.
    pub(crate) limit: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) count: Option<usize>,
}

/// One CSI driver, from its CSIDriver object and the nodes that registered it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct DriverRow {
    pub(crate) name: String,
    /// Whether there is a CSIDriver object.
    pub(crate) declared: bool,
    /// On how many nodes it is registered.
    pub(crate) on: usize,
    /// How many nodes there are.
    pub(crate) all: usize,
    pub(crate) attach: bool,
    /// What it can do, as far as objects say.
    pub(crate) can: String,
    pub(crate) volumes: usize,
    /// Its calls of the last hour, where these can be seen.
    pub(crate) calls: Option<CallFigures>,
}

/// The volumes of each driver on each node: those that are attached, and those that its pods have mounted.
pub(crate) fn volumes_on(observed: &Observed<'_>) -> BTreeMap<(String, String), BTreeSet<String>> {
    let state = observed.state;
    let mut found: BTreeMap<(String, String), BTreeSet<String>> = BTreeMap::new();
    let mut add = |node: &str, volume: &str| {
        if let Some(csi) = state.volumes.named(volume).and_then(|volume| csi_source(volume)) {
            found.entry((node.to_owned(), csi.driver.clone())).or_default().insert(volume.to_owned());
        }
    };
    for attachment in state.attachments.iter() {
        if let Some(volume) = attachment.spec.source.persistent_volume_name.as_deref() {
            add(&attachment.spec.node_name, volume);
        }
    }
    for pod in state.pods.iter().filter(|pod| !is_over(pod) && !node_of_pod(pod).is_empty()) {
        for claim in claims_of_pod(pod).iter().filter_map(|used| state.claims.get(&used.key)) {
            add(node_of_pod(pod), volume_name(claim));
        }
    }
    found
}

/// All nodes, by name.
pub(crate) fn nodes(observed: &Observed<'_>) -> Vec<NodeRow> {
    let state = observed.state;
    let volumes = volumes_on(observed);
    let node = |node: &std::sync::Arc<k8s_openapi::api::core::v1::Node>| {
        let name = node.name_any();
        let mut drivers: BTreeMap<String, DriverOnNode> = BTreeMap::new();
        for driver in
            state.csi_nodes.named(&name).map(|node| node.spec.drivers.as_slice()).unwrap_or_default()
        {
            let limit = driver.allocatable.as_ref().and_then(|all| all.count);
            drivers.insert(driver.name.clone(), DriverOnNode { on: true, limit, count: None });
        }
        let mine = || volumes.iter().filter(|((on, _), _)| *on == name);
        for ((_, driver), found) in mine() {
            drivers.entry(driver.clone()).or_default().count = Some(found.len());
        }
        let kubelet =
            node.status.as_ref().and_then(|status| Some(status.node_info.as_ref()?.kubelet_version.clone()));
        NodeRow {
            ready: is_ready(node),
            zone: node.labels().get(berth_core::names::ZONE).cloned(),
            kubelet,
            drivers,
            volumes: mine().map(|(_, found)| found.len()).sum(),
            name,
        }
    };
    state.nodes.iter().map(node).collect()
}

/// All drivers that objects name, by name.
pub(crate) fn drivers(state: &ClusterState, calls: &CallCounts) -> Vec<DriverRow> {
    let mut names: BTreeSet<String> = state.drivers.iter().map(|driver| driver.name_any()).collect();
    names.extend(
        state.csi_nodes.iter().flat_map(|node| node.spec.drivers.iter().map(|driver| driver.name.clone())),
    );
    names.extend(state.volumes.iter().filter_map(|volume| csi_source(volume).map(|csi| csi.driver.clone())));
    let mut volumes: BTreeMap<&str, usize> = BTreeMap::new();
    for csi in state.volumes.iter().filter_map(|volume| csi_source(volume)) {
        *volumes.entry(&csi.driver).or_default() += 1;
    }
    let all = if state.nodes.are_known() { state.nodes.len() } else { state.csi_nodes.len() };
    let driver = |name: &String| DriverRow {
        declared: state.drivers.named(name).is_some(),
        on: state.nodes_with(name).len(),
        all,
        attach: state.drivers.named(name).is_none_or(|driver| driver.spec.attach_required != Some(false)),
        can: abilities(state, name).join(", "),
        volumes: volumes.get(name.as_str()).copied().unwrap_or_default(),
        calls: calls.of(name, state.now),
        name: name.clone(),
    };
    names.iter().map(driver).collect()
}

/// What a driver can do, as its object and the classes that name it say.
fn abilities(state: &ClusterState, name: &str) -> Vec<&'static str> {
    let mut can = Vec::new();
    if let Some(driver) = state.drivers.named(name) {
        can.extend((driver.spec.attach_required != Some(false)).then_some("attach"));
        can.extend(reports_capacity(driver).then_some("capacity"));
        let modes = driver.spec.volume_lifecycle_modes.as_deref().unwrap_or_default();
        can.extend(modes.iter().any(|mode| mode == "Ephemeral").then_some("ephemeral volumes"));
    }
    let expands = state
        .classes
        .iter()
        .any(|class| class.provisioner == *name && class.allow_volume_expansion == Some(true));
    can.extend(expands.then_some("expand"));
    can.extend(state.snapshot_classes.iter().any(|class| class.driver == *name).then_some("snapshot"));
    can
}
