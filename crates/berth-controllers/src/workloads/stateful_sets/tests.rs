//! Which pods and claims come and go, after `stateful_set_control_test.go`, `stateful_set_utils_test.go` and
//! `stateful_pod_control_test.go` of kube-controller-manager.
//!
//! A pod is written as its ordinal, its revision, and its state: `0a+` is ready, `0a?` is running and not ready, `0a` is
//! pending, `0a!` has failed, `0a.` has succeeded, `0a-` is ready and being deleted, `0a~` became ready a second ago.

use std::collections::HashMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::identity::{claims, identify, makes_claim, new_pod, ordinal_in, owners};
use super::plan::{Member, ObservedSet, Step, plan};

fn now() -> Timestamp {
    "2026-01-01T12:00:00Z".parse().unwrap()
}

fn set(replicas: i32, spec: Value) -> StatefulSet {
    let mut object = json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet",
        "metadata": { "name": "web", "namespace": "ns", "uid": "set", "generation": 3 },
        "spec": {
            "replicas": replicas, "serviceName": "peers", "selector": { "matchLabels": { "app": "web" } },
            "template": { "metadata": { "labels": { "app": "web" } }, "spec": { "containers": [{ "name": "c" }] } },
            "updateStrategy": { "type": "RollingUpdate", "rollingUpdate": { "partition": 0 } },
            "podManagementPolicy": "OrderedReady",
            "volumeClaimTemplates": [{ "metadata": { "name": "data", "labels": { "kept": "yes" } },
                "spec": { "resources": { "requests": { "storage": "1Gi" } } } }],
        },
    });
    merge(&mut object["spec"], spec);
    serde_json::from_value(object).unwrap()
}

fn merge(into: &mut Value, change: Value) {
    match (into, change) {
        (Value::Object(into), Value::Object(change)) => {
            for (key, value) in change {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, change) => *into = change,
    }
}

fn member(set: &StatefulSet, text: &str) -> Member {
    let at = text.find(|c: char| c.is_ascii_alphabetic()).unwrap();
    let ordinal: i32 = text[..at].parse().unwrap();
    let (revision, state) = (&text[at..=at], &text[at + 1..]);
    let mut pod = new_pod(set, set.spec.clone().unwrap().template, revision, ordinal);
    pod.metadata.uid = Some(format!("pod-{ordinal}"));
    let ready = |since: &str| json!([{ "type": "Ready", "status": "True", "lastTransitionTime": since }]);
    let (phase, conditions) = match state {
        "+" | "-" => ("Running", ready("2026-01-01T08:00:00Z")),
        "~" => ("Running", ready("2026-01-01T11:59:59Z")),
        "?" => ("Running", json!([])),
        "!" => ("Failed", json!([])),
        "." => ("Succeeded", json!([])),
        _ => ("Pending", json!([])),
    };
    pod.status = serde_json::from_value(json!({ "phase": phase, "conditions": conditions })).unwrap();
    Member { ordinal, is_terminating: state == "-", pod: Arc::new(pod) }
}

fn observed<'a>(set: &'a StatefulSet, pods: &str) -> ObservedSet<'a> {
    let members: Vec<Member> = pods.split_whitespace().map(|text| member(set, text)).collect();
    let mut known = HashMap::new();
    for member in &members {
        for (_, mut claim) in claims(set, member.ordinal) {
            let owners = owners(set, Some(&member.pod), false, &claim);
            claim.metadata.owner_references = Some(owners).filter(|owners| !owners.is_empty());
            known.insert(claim.name_any(), Arc::new(claim));
        }
    }
    ObservedSet { set, current: "a", update: "b", members, claims: known, now: now() }
}

fn steps(observed: &ObservedSet<'_>) -> String {
    let shown = plan(observed).into_iter().map(|step| match step {
        Step::CreateClaims { ordinal } => format!("claims {ordinal}"),
        Step::CreatePod { ordinal, revision } => format!("create {ordinal}{revision}"),
        Step::Refuse { ordinal, why } => format!("refuse {ordinal}: {why}"),
        Step::Identify { ordinal, .. } => format!("identify {ordinal}"),
        Step::Own { claim, owners } => {
            let owners: Vec<_> = owners.iter().map(|owner| owner.name.as_str()).collect();
            format!("own {} by [{}]", claim.name_any(), owners.join(" "))
        }
        Step::DeletePod { pod } => format!("delete {}", pod.name_any()),
    });
    shown.collect::<Vec<_>>().join(", ")
}

#[test]
fn pods_come_in_order_and_go_in_reverse_order() {
    let ordered = json!({});
    let parallel = json!({ "podManagementPolicy": "Parallel" });
    let from_five = json!({ "ordinals": { "start": 5 } });
    let slow = json!({ "minReadySeconds": 30 });
    for (what, replicas, spec, pods, expected) in [
        ("first", 3, &ordered, "", "create 0b"),
        ("waits while pending", 3, &ordered, "0b", ""),
        ("waits while not ready", 3, &ordered, "0b?", ""),
        ("next", 3, &ordered, "0b+", "create 1b"),
        ("fills the gap first", 3, &ordered, "0b+ 2b+", "create 1b"),
        ("all there", 3, &ordered, "0b+ 1b+ 2b+", ""),
        ("a failed pod is replaced", 3, &ordered, "0b+ 1b! 2b+", "delete web-1"),
        ("a pod that ended is replaced", 3, &ordered, "0b+ 1b. 2b+", "delete web-1"),
        ("waits while going", 3, &ordered, "0b- 1b+", ""),
        ("not ready for long enough", 3, &slow, "0b~", ""),
        ("ready for long enough", 3, &slow, "0b+", "create 1b"),
        ("scaled down, the highest first", 1, &ordered, "0b+ 1b+ 2b+", "delete web-2"),
        ("scaled down, one at a time", 1, &ordered, "0b+ 1b+ 2b-", ""),
        ("scaled down, waits for those below", 1, &ordered, "0b+ 1b? 2b+", "delete web-2"),
        ("scaled down, an unhealthy one waits for a lower one", 1, &ordered, "0b+ 1b? 2b?", ""),
        ("scaled down, the only unhealthy one goes", 1, &ordered, "0b+ 1b+ 2b?", "delete web-2"),
        ("scaled down waits for the first", 1, &ordered, "0b? 1b+", ""),
        ("to nothing", 0, &ordered, "0b+ 1b+", "delete web-1"),
        ("start ordinal", 2, &from_five, "", "create 5b"),
        ("start ordinal, the second", 2, &from_five, "5b+", "create 6b"),
        ("start ordinal, those below go", 2, &from_five, "0b+ 5b+ 6b+", "delete web-0"),
        ("parallel, all at once", 3, &parallel, "", "create 0b, create 1b, create 2b"),
        ("parallel, all that lack", 3, &parallel, "1b?", "create 0b, create 2b"),
        ("parallel, down at once", 1, &parallel, "0b? 1b+ 2b?", "delete web-2, delete web-1"),
        ("parallel, those going are left alone", 1, &parallel, "0b+ 1b- 2b+", "delete web-2"),
        ("parallel, a failed pod", 2, &parallel, "0b! 1b+", "delete web-0"),
    ] {
        let set = set(replicas, spec.clone());
        assert_eq!(steps(&observed(&set, pods)), expected, "{what}");
    }
}

#[test]
fn pods_of_other_revisions_are_replaced_by_the_strategy() {
    let rolling = |partition: i32, most: Value| json!({ "updateStrategy": { "rollingUpdate": { "partition": partition, "maxUnavailable": most } } });
    let parallel = |most: Value| json!({ "podManagementPolicy": "Parallel", "updateStrategy": { "rollingUpdate": { "maxUnavailable": most } } });
    let on_delete = json!({ "updateStrategy": { "type": "OnDelete" } });
    for (what, spec, pods, expected) in [
        ("the highest first", rolling(0, json!(1)), "0a+ 1a+ 2a+", "delete web-2"),
        ("then the next", rolling(0, json!(1)), "0a+ 1a+ 2b+", "delete web-1"),
        ("not before the new one is ready", rolling(0, json!(1)), "0a+ 1a+ 2b?", ""),
        ("not while the old one is going", rolling(0, json!(1)), "0a+ 1a+ 2a-", ""),
        ("comes back with the new revision", rolling(0, json!(1)), "0a+ 1a+", "create 2b"),
        ("done", rolling(0, json!(1)), "0b+ 1b+ 2b+", ""),
        ("above the partition only", rolling(2, json!(1)), "0a+ 1a+ 2a+", "delete web-2"),
        ("nothing below the partition", rolling(2, json!(1)), "0a+ 1a+ 2b+", ""),
        ("below the partition the old one comes back", rolling(2, json!(1)), "1a+ 2b+", "create 0a"),
        ("a partition beyond the last", rolling(9, json!(1)), "0a+ 1a+ 2a+", ""),
        ("two at a time", rolling(0, json!(2)), "0a+ 1a+ 2a+", "delete web-2, delete web-1"),
        ("by percent, rounded down", rolling(0, json!("70%")), "0a+ 1a+ 2a+", "delete web-2, delete web-1"),
        ("by percent, at least one", rolling(0, json!("1%")), "0a+ 1a+ 2a+", "delete web-2"),
        ("parallel still one at a time", parallel(json!(1)), "0a+ 1a+ 2a+", "delete web-2"),
        ("parallel, one is missing already", parallel(json!(2)), "0a+ 1a+ 2b?", "delete web-1"),
        ("parallel, as many missing as may be", parallel(json!(1)), "0a+ 1a+ 2b?", ""),
        ("parallel, one that is not ready anyway", parallel(json!(1)), "0a+ 1a? 2a+", "delete web-1"),
        ("on delete, nothing", on_delete.clone(), "0a+ 1a+ 2a+", ""),
        ("on delete, a new one is new", on_delete, "0a+ 1a+", "create 2b"),
    ] {
        let set = set(3, spec);
        assert_eq!(steps(&observed(&set, pods)), expected, "{what}");
    }
}

#[test]
fn without_a_partition_as_many_keep_their_revision_as_the_status_counts() {
    let mut set = set(3, json!({}));
    set.spec.as_mut().unwrap().update_strategy.as_mut().unwrap().rolling_update = None;
    set.status = serde_json::from_value(json!({ "replicas": 3, "currentReplicas": 1 })).unwrap();
    assert_eq!(steps(&observed(&set, "1b+ 2b+")), "create 0a");
    assert_eq!(steps(&observed(&set, "0a+ 2b+")), "create 1b");
}

#[test]
fn a_set_that_is_being_deleted_does_nothing() {
    let mut set = set(3, json!({}));
    set.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now()));
    assert_eq!(steps(&observed(&set, "0a!")), "");
}

#[test]
fn claims_are_owned_by_what_they_go_with() {
    let policy = |deleted: &str, scaled: &str| json!({ "persistentVolumeClaimRetentionPolicy": { "whenDeleted": deleted, "whenScaled": scaled } });
    // Whoever deletes the owner deletes the claim: that of a pod that stays, that of a pod that goes.
    for (deleted, scaled, stays, goes) in [
        ("Retain", "Retain", "", ""),
        ("Delete", "Retain", "web", "web"),
        ("Retain", "Delete", "", "web-1"),
        ("Delete", "Delete", "web", "web-1"),
    ] {
        let set = set(1, policy(deleted, scaled));
        for (ordinal, condemned, expected) in [(0, false, stays), (1, true, goes)] {
            let member = member(&set, &format!("{ordinal}b+"));
            let (_, claim) = claims(&set, ordinal).remove(0);
            let owners = owners(&set, Some(&member.pod), condemned, &claim);
            let names: Vec<_> = owners.iter().map(|owner| owner.name.as_str()).collect();
            assert_eq!(names.join(" "), expected, "{deleted} {scaled} {ordinal}");
            assert!(owners.iter().all(|owner| owner.controller == Some(true)));
        }
    }
}

#[test]
fn a_change_of_the_retention_policy_reaches_existing_claims() {
    let retain = set(1, json!({}));
    let delete = set(
        1,
        json!({ "persistentVolumeClaimRetentionPolicy": { "whenDeleted": "Delete", "whenScaled": "Delete" } }),
    );
    let mut seen = observed(&retain, "0b+ 1b+");
    seen.set = &delete;
    assert_eq!(steps(&seen), "own data-web-0 by [web], identify 0, own data-web-1 by [web-1], delete web-1");
    let mut seen = observed(&delete, "0b+");
    seen.set = &retain;
    assert_eq!(steps(&seen), "own data-web-0 by [], identify 0");
    // What somebody else controls is not taken.
    let mut seen = observed(&retain, "0b+");
    seen.set = &delete;
    let mut claim = PersistentVolumeClaim::clone(&seen.claims["data-web-0"]);
    claim.metadata.owner_references = serde_json::from_value(json!([{ "apiVersion": "v1", "kind": "Backup",
        "name": "b", "uid": "x", "controller": true }]))
    .unwrap();
    seen.claims.insert("data-web-0".to_owned(), Arc::new(claim));
    assert_eq!(steps(&seen), "");
}

#[test]
fn a_pod_is_not_created_on_a_claim_that_goes() {
    let set = set(2, json!({}));
    let mut seen = observed(&set, "0b+ 1b+");
    seen.members.pop();
    let mut claim = PersistentVolumeClaim::clone(&seen.claims["data-web-1"]);
    claim.metadata.owner_references = serde_json::from_value(
        json!([{ "apiVersion": "v1", "kind": "Pod", "name": "web-1", "uid": "before" }]),
    )
    .unwrap();
    seen.claims.insert("data-web-1".to_owned(), Arc::new(claim.clone()));
    assert_eq!(steps(&seen), "", "it goes with the pod of before");
    claim.metadata.owner_references = None;
    claim.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now()));
    seen.claims.insert("data-web-1".to_owned(), Arc::new(claim));
    assert_eq!(steps(&seen), "refuse 1: pvc data-web-1 is to be deleted");
}

#[test]
fn a_pending_pod_gets_the_claims_it_lacks_and_a_strange_pod_its_labels() {
    let set = set(1, json!({}));
    let mut seen = observed(&set, "0b");
    seen.claims.clear();
    assert_eq!(steps(&seen), "claims 0");
    let mut seen = observed(&set, "0b+");
    let mut pod = Pod::clone(&seen.members[0].pod);
    pod.labels_mut().remove("statefulset.kubernetes.io/pod-name");
    seen.members[0].pod = Arc::new(pod);
    assert_eq!(steps(&seen), "identify 0");
}

#[test]
fn pods_and_claims_are_named_and_labelled_as_upstreams() {
    let set = set(1, json!({}));
    let pod = new_pod(&set, set.spec.clone().unwrap().template, "web-abc", 7);
    let labels = json!(pod.metadata.labels);
    assert_eq!(
        labels,
        json!({ "app": "web", "apps.kubernetes.io/pod-index": "7", "controller-revision-hash": "web-abc",
            "statefulset.kubernetes.io/pod-name": "web-7" })
    );
    let spec = pod.spec.clone().unwrap();
    assert_eq!(
        (pod.name_any().as_str(), spec.hostname.as_deref(), spec.subdomain.as_deref()),
        ("web-7", Some("web-7"), Some("peers"))
    );
    assert_eq!(
        json!(spec.volumes),
        json!([{ "name": "data", "persistentVolumeClaim": { "claimName": "data-web-7" } }])
    );
    let mut again = pod.clone();
    identify(&set, 7, &mut again);
    assert_eq!(again, pod);
    let (_, claim) = claims(&set, 7).remove(0);
    assert_eq!(
        (claim.name_any().as_str(), json!(claim.metadata.labels)),
        ("data-web-7", json!({ "app": "web", "kept": "yes" }))
    );
    assert!(makes_claim(&set, "data-web-12"));
    assert!(!makes_claim(&set, "data-web-x") && !makes_claim(&set, "other-web-1"));
    for (pod, expected) in [
        ("web-0", Some(0)),
        ("web-12", Some(12)),
        ("web", None),
        ("web-", None),
        ("web-01", None),
        ("web-x", None),
        ("web-a-1", None),
        ("webb-1", None),
    ] {
        assert_eq!(ordinal_in("web", pod), expected, "{pod}");
    }
}

#[test]
fn the_status_counts_and_the_current_revision_follows_a_finished_update() {
    let three = set(3, json!({ "minReadySeconds": 10 }));
    let (status, again) = observed(&three, "0a+ 1b~ 2b-").status(1);
    assert_eq!(
        (
            status.replicas,
            status.ready_replicas,
            status.available_replicas,
            status.current_replicas,
            status.updated_replicas
        ),
        (3, Some(3), Some(2), Some(1), Some(1))
    );
    assert_eq!(
        (status.current_revision.as_deref(), status.update_revision.as_deref()),
        (Some("a"), Some("b"))
    );
    assert_eq!((status.observed_generation, status.collision_count, again), (Some(3), Some(1), Some(9)));
    let (status, again) = observed(&three, "0b+ 1b+ 2b+").status(0);
    assert_eq!(
        (status.current_revision.as_deref(), status.current_replicas, again),
        (Some("b"), Some(3), None)
    );
    let on_delete = set(1, json!({ "updateStrategy": { "type": "OnDelete" } }));
    let (status, _) = observed(&on_delete, "0b+").status(0);
    assert_eq!(status.current_revision.as_deref(), Some("a"));
}
