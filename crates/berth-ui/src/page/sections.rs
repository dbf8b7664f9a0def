//! What the page shows besides the rows: attention, capacity, drivers, nodes, leaks. Each section is sent when it has changed.

use std::collections::{BTreeMap, BTreeSet};

use berth_kube::Key;
use berth_kube::storage::{
    capacity, claims_of_pod, class_of_volume, csi_source, is_over, node_of_pod, units, volume_name,
};
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::calls::CallCounts;
use super::rows::{Row, Table, Verdict};
use super::words;
use crate::diagnose::{Observed, is_ready};
use crate::finding::{Finding, Trouble};
use crate::state::ClusterState;

/// Set on the class that claims without one get.
const DEFAULT_CLASS: &str = berth_core::names::DEFAULT_CLASS;

/// All sections by name.
pub(super) fn all(
    observed: &Observed<'_>,
    findings: &[Finding],
    table: &Table,
    calls: &CallCounts,
) -> BTreeMap<&'static str, Value> {
    let state = observed.state;
    BTreeMap::from([
        ("attention", attention(state, findings, table)),
        ("classes", classes(state, &table.rows)),
        ("nodes", nodes(observed)),
        ("drivers", drivers(state, calls)),
        ("capacities", capacities(state)),
        ("leaks", leaks(state, findings)),
        ("calls", calls.per_minute(state.now)),
        ("unreadable", json!(state.unreadable)),
        ("snapshots", json!(state.snapshots.len())),
    ])
}

/// What needs a person, the worst first: one entry per finding that is somebody's verdict, or about no volume at all.
fn attention(state: &ClusterState, findings: &[Finding], table: &Table) -> Value {
    let entry = |(number, finding): (usize, &Finding)| {
        let judged = table.judged.get(&number);
        let about_volumes = matches!(
            finding.object.kind.as_str(),
            "PersistentVolumeClaim" | "PersistentVolume" | "VolumeAttachment" | "Pod"
        );
        // What is wrong with a volume in a second way is told on its own page.
        let hidden = judged.is_none()
            && about_volumes
            && table.judged.values().flatten().count() > 0
            && is_told(finding, state, table);
        if hidden {
            return None;
        }
        let mut entry = json!(Verdict::of(finding, state));
        let one = judged.filter(|ids| ids.len() == 1).and_then(|ids| ids.first());
        entry["name"] = json!(one.cloned().unwrap_or_else(|| finding.object.to_string()));
        entry["id"] = json!(judged.and_then(|ids| ids.first()));
        entry["to"] = json!(match finding.object.kind.as_str() {
            "Node" | "CSINode" | "CSIDriver" | "CSIStorageCapacity" | "StorageClass" => "nodes",
            _ => "leaks",
        });
        Some(entry)
    };
    let needing = findings.iter().enumerate().filter(|(_, finding)| finding.severity.needs_a_person());
    Value::Array(needing.filter_map(entry).collect())
}

/// Whether all volumes that a finding is about have a verdict already.
fn is_told(finding: &Finding, state: &ClusterState, table: &Table) -> bool {
    let ids = super::rows::concerned(finding, state);
    !ids.is_empty() && ids.iter().all(|id| table.judged.values().flatten().any(|known| known == id))
}

fn classes(state: &ClusterState, rows: &[Row]) -> Value {
    let mut names: BTreeSet<&str> =
        state.classes.iter().filter_map(|class| class.metadata.name.as_deref()).collect();
    names.extend(rows.iter().map(|row| row.cls.as_str()).filter(|name| !name.is_empty()));
    let class = |name: &str| {
        let class = state.classes.named(name);
        let mine: Vec<&Row> = rows.iter().filter(|row| row.cls == name && !row.pv.is_empty()).collect();
        let measured: Vec<u64> = mine.iter().filter_map(|row| row.used).collect();
        let free: Vec<i128> = state
            .capacities
            .iter()
            .filter(|known| known.storage_class_name == name)
            .filter_map(|known| known.capacity.as_ref().map(units))
            .collect();
        let is_default = class
            .and_then(|class| class.annotations().get(DEFAULT_CLASS))
            .is_some_and(|value| value == "true");
        json!({
            "name": name,
            "driver": class.map(|class| class.provisioner.clone()),
            "bind": class.map(|class| class.volume_binding_mode.clone().unwrap_or_else(|| "Immediate".to_owned())),
            "reclaim": class.map(|class| class.reclaim_policy.clone().unwrap_or_else(|| "Delete".to_owned())),
            "expand": class.and_then(|class| class.allow_volume_expansion).unwrap_or(false),
            "isDefault": is_default,
            "exists": class.is_some(),
            "prov": mine.iter().map(|row| row.size).sum::<i128>(),
            "used": if measured.is_empty() { Value::Null } else { json!(measured.iter().sum::<u64>()) },
            "free": if free.is_empty() { Value::Null } else { json!(free.iter().sum::<i128>()) },
        })
    };
    Value::Array(names.into_iter().map(class).collect())
}

/// The volumes of each driver on each node: those that are attached, and those that its pods have mounted.
pub(super) fn volumes_on(observed: &Observed<'_>) -> BTreeMap<(String, String), BTreeSet<String>> {
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

fn nodes(observed: &Observed<'_>) -> Value {
    let state = observed.state;
    let volumes = volumes_on(observed);
    let node = |node: &std::sync::Arc<k8s_openapi::api::core::v1::Node>| {
        let name = node.name_any();
        let registered = state.csi_nodes.named(&name);
        let mut drivers = serde_json::Map::new();
        for driver in registered.map(|node| node.spec.drivers.as_slice()).unwrap_or_default() {
            drivers.insert(
                driver.name.clone(),
                json!({ "on": true, "limit": driver.allocatable.as_ref().and_then(|all| all.count) }),
            );
        }
        for ((_, driver), found) in volumes.iter().filter(|((on, _), _)| *on == name) {
            let known =
                drivers.entry(driver.clone()).or_insert_with(|| json!({ "on": false, "limit": null }));
            known["count"] = json!(found.len());
        }
        let kubelet =
            node.status.as_ref().and_then(|status| Some(status.node_info.as_ref()?.kubelet_version.clone()));
        json!({
            "name": name,
            "ready": is_ready(node),
            "zone": node.labels().get(berth_core::names::ZONE),
            "kubelet": kubelet,
            "drivers": drivers,
            "volumes": volumes.iter().filter(|((on, _), _)| *on == name).map(|(_, found)| found.len()).sum::<usize>(),
        })
    };
    Value::Array(state.nodes.iter().map(node).collect())
}

fn drivers(state: &ClusterState, calls: &CallCounts) -> Value {
    let mut names: BTreeSet<String> = state.drivers.iter().map(|driver| driver.name_any()).collect();
    names.extend(
        state.csi_nodes.iter().flat_map(|node| node.spec.drivers.iter().map(|driver| driver.name.clone())),
    );
    names.extend(state.volumes.iter().filter_map(|volume| csi_source(volume).map(|csi| csi.driver.clone())));
    let all = if state.nodes.are_known() { state.nodes.len() } else { state.csi_nodes.len() };
    let driver = |name: &String| {
        let spec = state.drivers.named(name).map(|driver| &driver.spec);
        let mut can = Vec::new();
        if let Some(spec) = spec {
            can.extend((spec.attach_required != Some(false)).then_some("attach"));
            can.extend((spec.storage_capacity == Some(true)).then_some("capacity"));
            can.extend(
                spec.volume_lifecycle_modes
                    .iter()
                    .flatten()
                    .any(|mode| mode == "Ephemeral")
                    .then_some("ephemeral volumes"),
            );
        }
        let of =
            |class: &&std::sync::Arc<k8s_openapi::api::storage::v1::StorageClass>| class.provisioner == *name;
        can.extend(
            state
                .classes
                .iter()
                .filter(of)
                .any(|class| class.allow_volume_expansion == Some(true))
                .then_some("expand"),
        );
        can.extend(state.snapshot_classes.iter().any(|class| class.driver == *name).then_some("snapshot"));
        let told = calls.of(name, state.now);
        json!({
            "name": name,
            "declared": spec.is_some(),
            "on": state.nodes_with(name).len(),
            "all": all,
            "attach": spec.is_none_or(|spec| spec.attach_required != Some(false)),
            "can": can.join(", "),
            "volumes": state.volumes.iter().filter(|volume| csi_source(volume).is_some_and(|csi| csi.driver == *name)).count(),
            "calls": told,
        })
    };
    Value::Array(names.iter().map(driver).collect())
}

/// Where a capacity holds, in words.
pub(super) fn place(known: &CSIStorageCapacity) -> String {
    let Some(topology) = &known.node_topology else { return "nowhere".to_owned() };
    let labels = topology.match_labels.iter().flatten().map(|(label, value)| {
        let label = label.rsplit('/').next().unwrap_or(label);
        format!("{label} {value}")
    });
    let expressions = topology.match_expressions.iter().flatten().map(|expression| {
        let values = expression.values.as_deref().unwrap_or_default().join(" or ");
        format!("{} {} {values}", expression.key, expression.operator)
    });
    let all: Vec<String> = labels.chain(expressions).collect();
    if all.is_empty() { "every node".to_owned() } else { all.join(", ") }
}

fn capacities(state: &ClusterState) -> Value {
    if !state.capacities.are_known() {
        return Value::Null;
    }
    let labels = |name: &str| state.nodes.named(name).map(|node| node.labels().clone()).unwrap_or_default();
    let mut all: Vec<Value> = state
        .capacities
        .iter()
        .map(|known| {
            let chooses = |node: &str| {
                known
                    .node_topology
                    .as_ref()
                    .is_some_and(|topology| berth_kube::selectors::label_selector(topology, &labels(node)))
            };
            // What is taken where the capacity holds, as far as volumes say where they are.
            let taken: i128 = state
                .volumes
                .iter()
                .filter(|volume| class_of_volume(volume) == known.storage_class_name)
                .filter(|volume| {
                    state.nodes.iter().any(|node| {
                        berth_kube::selectors::volume_on_node(volume, node) && chooses(&node.name_any())
                    })
                })
                .map(|volume| capacity(volume))
                .sum();
            json!({
                "cls": known.storage_class_name,
                "place": place(known),
                "free": known.capacity.as_ref().map(units),
                "max": known.maximum_volume_size.as_ref().or(known.capacity.as_ref()).map(units),
                "taken": taken,
            })
        })
        .collect();
    all.sort_by_key(|known| (known["cls"].to_string(), known["place"].to_string()));
    Value::Array(all)
}

/// Three groups: storage without objects, objects without storage, and what nobody uses.
fn leaks(state: &ClusterState, findings: &[Finding]) -> Value {
    let group = |troubles: &[Trouble]| {
        let found = findings.iter().filter(|finding| troubles.contains(&finding.trouble));
        let mut all: Vec<Value> = found.map(|finding| leak(state, finding)).collect();
        all.sort_by_key(|leak| std::cmp::Reverse(leak["size"].as_i64().unwrap_or(0)));
        all
    };
    json!([
        {
            "title": "Storage without objects",
            "noun": "found",
            "say": "Volumes and snapshots that the storage keeps, and that no claim or VolumeSnapshot stands for.",
            "rows": group(&[Trouble::VolumeReleased, Trouble::VolumeNotDeleted, Trouble::VolumeDeleteFailed, Trouble::SnapshotLeaked]),
        },
        {
            "title": "Objects without storage",
            "noun": "objects",
            "say": "The object is there, and what it names is not.",
            "rows": group(&[
                Trouble::AttachmentNodeGone, Trouble::AttachmentVolumeGone, Trouble::ClaimLost, Trouble::VolumeNodeGone,
                Trouble::VolumeTwice, Trouble::CapacityStale, Trouble::VolumeFinalizer, Trouble::ClaimFinalizer,
            ]),
        },
        {
            "title": "Claims that no pod uses",
            "noun": "claims",
            "say": "Berth never calls these safe to delete.",
            "rows": group(&[Trouble::ClaimUnused]),
        },
    ])
}

fn leak(state: &ClusterState, finding: &Finding) -> Value {
    let key = Key::new(finding.object.namespace.clone(), finding.object.name.clone());
    let verdict = Verdict::of(finding, state);
    let claim = state.claims.get(&key).filter(|_| finding.object.kind == "PersistentVolumeClaim");
    let volume = match claim {
        Some(claim) => state.volumes.named(volume_name(claim)),
        None => state.volumes.get(&key).filter(|_| finding.object.kind == "PersistentVolume"),
    };
    let size = volume.map(|volume| capacity(volume)).or_else(|| {
        let content = state.contents.get(&key).filter(|_| finding.object.kind == "VolumeSnapshotContent")?;
        content.status.as_ref()?.restore_size.map(i128::from)
    });
    let place = volume.map(|volume| {
        let phase = volume.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
        [class_of_volume(volume).to_owned(), phase]
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join(", ")
    });
    json!({
        "name": if claim.is_some() { key.to_string() } else { finding.object.argument() },
        "id": claim.map(|_| key.to_string()).or_else(|| volume.map(|volume| format!("/{}", volume.name_any()))),
        "where": place.unwrap_or_else(|| words::word(finding.trouble).to_owned()),
        "size": size,
        "since": verdict.since,
        "why": format!("{} {}", verdict.why, verdict.evidence),
        "cmd": verdict.cmd.first().cloned().unwrap_or_else(|| format!("berth explain {}", finding.object.argument())),
    })
}
