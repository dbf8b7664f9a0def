//! What the page shows besides the rows: attention, capacity, drivers, nodes, leaks. Each section is sent when it has changed.

use std::collections::{BTreeMap, BTreeSet};

use berth_kube::Key;
use berth_kube::provisionable::{holds_for, largest_volume};
use berth_kube::storage::{capacity, class_of_volume, units, volume_name};
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use kube::ResourceExt as _;
use serde_json::{Value, json};

use crate::calls::CallCounts;
use crate::diagnose::Observed;
use crate::finding::{Finding, Trouble};
use crate::inventory::{drivers, nodes};
use crate::rows::{Row, Table, Verdict, attention};
use crate::state::ClusterState;
use crate::words;

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
        ("attention", json!(attention(state, findings, table))),
        ("classes", classes(state, &table.rows)),
        ("nodes", json!(nodes(observed))),
        ("drivers", json!(drivers(state, calls))),
        ("capacities", capacities(state)),
        ("leaks", leaks(state, findings)),
        ("calls", calls.per_minute(state.now)),
        ("unreadable", json!(state.unreadable)),
        ("snapshots", json!(state.snapshots.len())),
    ])
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
            let chooses = |node: &str| holds_for(known, &labels(node));
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
                "max": largest_volume(known),
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
