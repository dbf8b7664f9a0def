//! What a claim needs, row by row.

use berth_core::names::BETA_STORAGE_CLASS;
use serde_json::{Value, json};

use super::*;

mod away;

const DRIVER: &str = "d.example.com";
const VOLUME: &str = "pvc-1";

fn claim(change: Value) -> PersistentVolumeClaim {
    let mut claim = json!({
        "metadata": { "name": "c", "uid": "1", "annotations": { STORAGE_PROVISIONER: DRIVER } },
        "spec": { "storageClassName": "fast" },
    });
    json_merge(&mut claim, change);
    serde_json::from_value(claim).unwrap()
}

fn json_merge(into: &mut Value, change: Value) {
    match (into, change) {
        (Value::Object(into), Value::Object(change)) => {
            for (key, value) in change {
                if value.is_null() {
                    into.remove(&key);
                    continue;
                }
                json_merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, change) => *into = change,
    }
}

fn class(provisioner: &str, mode: &str) -> StorageClass {
    let class =
        json!({ "metadata": { "name": "fast" }, "provisioner": provisioner, "volumeBindingMode": mode });
    serde_json::from_value(class).unwrap()
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn a_claim_is_provisioned_undone_or_left_alone() {
    let now = "2026-01-01T00:00:00Z";
    let with_finalizer = || json!({ "metadata": { "finalizers": [creating(DRIVER)] } });
    let with = |mut one: Value, other: Value| {
        json_merge(&mut one, other);
        one
    };
    let ours = Some(class(DRIVER, "Immediate"));
    let waiting = Some(class(DRIVER, "WaitForFirstConsumer"));
    let deleted = || json!({ "metadata": { "deletionTimestamp": now } });
    let rows: Vec<(&str, Value, Option<StorageClass>, bool, Plan)> = vec![
        ("handed to us", json!({}), ours.clone(), false, Plan::Provision),
        (
            "handed to us by the old annotation",
            json!({ "metadata": { "annotations": { STORAGE_PROVISIONER: null, BETA_STORAGE_PROVISIONER: DRIVER } } }),
            ours.clone(),
            false,
            Plan::Provision,
        ),
        (
            "migrated to us",
            json!({ "metadata": { "annotations": { STORAGE_PROVISIONER: "old", MIGRATED_TO: DRIVER } } }),
            ours.clone(),
            false,
            Plan::Provision,
        ),
        (
            "handed to another",
            json!({ "metadata": { "annotations": { STORAGE_PROVISIONER: "other" } } }),
            ours.clone(),
            false,
            Plan::Nothing,
        ),
        ("class of another", json!({}), Some(class("other", "Immediate")), false, Plan::Nothing),
        ("class does not exist", json!({}), None, false, Plan::Nothing),
        (
            "bound to another volume",
            json!({ "spec": { "volumeName": "x" } }),
            ours.clone(),
            false,
            Plan::Nothing,
        ),
        ("volume saved", json!({}), ours.clone(), true, Plan::Nothing),
        ("being deleted", deleted(), ours.clone(), false, Plan::Nothing),
        ("waits for a consumer", json!({}), waiting.clone(), false, Plan::Nothing),
        (
            "has a consumer",
            json!({ "metadata": { "annotations": { SELECTED_NODE: "n" } } }),
            waiting.clone(),
            false,
            Plan::Provision,
        ),
        (
            "has a consumer by the old annotation",
            json!({ "metadata": { "annotations": { ALPHA_SELECTED_NODE: "n" } } }),
            waiting.clone(),
            false,
            Plan::Provision,
        ),
        ("with finalizer, under way", with_finalizer(), ours.clone(), false, Plan::Provision),
        ("with finalizer, saved", with_finalizer(), ours.clone(), true, Plan::RemoveFinalizer),
        (
            "with finalizer, bound to its volume that is not seen yet",
            with(with_finalizer(), json!({ "spec": { "volumeName": VOLUME } })),
            ours.clone(),
            false,
            Plan::RemoveFinalizer,
        ),
        ("with finalizer, deleted", with(with_finalizer(), deleted()), ours.clone(), false, Plan::Undo),
        ("with finalizer, deleted, class gone", with(with_finalizer(), deleted()), None, false, Plan::Undo),
        (
            "with finalizer, deleted, saved",
            with(with_finalizer(), deleted()),
            ours.clone(),
            true,
            Plan::RemoveFinalizer,
        ),
        (
            "with finalizer, bound to another volume",
            with(with_finalizer(), json!({ "spec": { "volumeName": "x" } })),
            ours.clone(),
            false,
            Plan::Undo,
        ),
        ("with finalizer, its node taken back", with_finalizer(), waiting, false, Plan::Undo),
        ("with finalizer, class gone", with_finalizer(), None, false, Plan::Nothing),
        (
            "with the finalizer of another driver, deleted",
            with(json!({ "metadata": { "finalizers": [creating("other")] } }), deleted()),
            ours,
            false,
            Plan::Nothing,
        ),
    ];
    for (row, change, class, saved, expected) in rows {
        let who = Scope { driver: DRIVER, claim_finalizer: &creating(DRIVER), node: None };
        assert_eq!(plan(&claim(change), class.as_ref(), who, VOLUME, saved), expected, "{row}");
    }
}

#[test]
fn the_old_annotation_names_the_class_before_the_field() {
    let old = claim(json!({ "metadata": { "annotations": { BETA_STORAGE_CLASS: "old" } } }));
    assert_eq!(storage::class_of_claim(&old), "old");
    assert_eq!(storage::class_of_claim(&claim(json!({}))), "fast");
    assert_eq!(storage::class_of_claim(&claim(json!({ "spec": { "storageClassName": "" } }))), "");
}

#[test]
fn every_code_of_create_volume_has_its_verdict_with_and_without_topology_and_node() {
    for number in 1..=16 {
        let code = Code::from_i32(number);
        for (topology, selected) in [(false, false), (false, true), (true, false), (true, true)] {
            let expected = match code {
                Code::Cancelled | Code::DeadlineExceeded | Code::Unavailable | Code::Aborted => {
                    Verdict::InBackground
                }
                // There is a volume of the claim's name: it must not be forgotten.
                Code::AlreadyExists => Verdict::InBackground,
                Code::ResourceExhausted if topology && selected => Verdict::Reschedule,
                Code::InvalidArgument => Verdict::Infeasible,
                _ => Verdict::Finished,
            };
            assert_eq!(
                verdict(code, topology, selected),
                expected,
                "{code:?}, topology {topology}, node {selected}"
            );
        }
    }
}

#[test]
fn a_node_provisions_claims_that_it_is_selected_for_and_tries_to_be_selected_for_free_ones() {
    let node_finalizer = "creating.berth.dev/d.example.com_n";
    let selected = |node: &str| json!({ "metadata": { "annotations": { SELECTED_NODE: node } } });
    let with_finalizer = |mut change: Value| {
        json_merge(&mut change, json!({ "metadata": { "finalizers": [node_finalizer] } }));
        change
    };
    let elsewhere = || json!({ "metadata": { "finalizers": ["creating.berth.dev/d.example.com_m"] } });
    let deleted = |mut change: Value| {
        json_merge(&mut change, json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" } }));
        change
    };
    let now = || Some(class(DRIVER, "Immediate"));
    let late = || Some(class(DRIVER, "WaitForFirstConsumer"));
    let rows = vec![
        ("waits for the scheduler", json!({}), late(), true, Plan::Nothing),
        ("selected by the scheduler", selected("n"), late(), true, Plan::Provision),
        ("another is selected", selected("m"), late(), true, Plan::Nothing),
        ("free", json!({}), now(), true, Plan::Select),
        ("free, and not for the taking", json!({}), now(), false, Plan::Nothing),
        ("selected by itself", selected("n"), now(), true, Plan::Provision),
        ("selected, though free ones are not for the taking", selected("n"), now(), false, Plan::Provision),
        ("another was quicker", selected("m"), now(), true, Plan::Nothing),
        ("class gone", json!({}), None, true, Plan::Nothing),
        ("begun here, under way", with_finalizer(selected("n")), late(), true, Plan::Provision),
        ("begun here, then another selected", with_finalizer(selected("m")), late(), true, Plan::Undo),
        (
            "begun here, then another selected, class gone",
            with_finalizer(selected("m")),
            None,
            true,
            Plan::Undo,
        ),
        ("begun here, then given back", with_finalizer(json!({})), late(), true, Plan::Undo),
        ("begun here, then free again", with_finalizer(json!({})), now(), true, Plan::Undo),
        ("begun here, deleted", deleted(with_finalizer(selected("n"))), late(), true, Plan::Undo),
        ("begun elsewhere, deleted", deleted(elsewhere()), now(), true, Plan::Nothing),
        ("begun elsewhere, free again", elsewhere(), now(), true, Plan::Select),
    ];
    for (row, change, class, immediate, expected) in rows {
        let who = Scope { driver: DRIVER, claim_finalizer: node_finalizer, node: Some(("n", immediate)) };
        assert_eq!(plan(&claim(change), class.as_ref(), who, VOLUME, false), expected, "{row}");
    }
    let who = Scope { driver: DRIVER, claim_finalizer: node_finalizer, node: Some(("n", true)) };
    assert_eq!(
        plan(&claim(with_finalizer(json!({}))), now().as_ref(), who, VOLUME, true),
        Plan::RemoveFinalizer
    );
}
