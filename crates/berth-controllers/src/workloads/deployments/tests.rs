//! Rollout decisions, after `rolling_test.go`, `recreate_test.go`, `sync_test.go` and `progress_test.go` of
//! kube-controller-manager.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::plan::{ObservedDeployment, Step, plan};
use super::status::status;
use super::template::{hash, new_set, refresh, revision};

#[expect(clippy::needless_pass_by_value, reason = "reads well in the rows")]
fn deployment(replicas: i32, surge: Value, missing: Value) -> Deployment {
    serde_json::from_value(json!({
        "metadata": { "name": "d", "namespace": "ns", "uid": "u", "generation": 1, "annotations": { "note": "x" } },
        "spec": {
            "replicas": replicas, "selector": { "matchLabels": { "app": "d" } }, "progressDeadlineSeconds": 600,
            "template": { "metadata": { "labels": { "app": "d" } }, "spec": { "containers": [{ "name": "new" }] } },
            "strategy": { "type": "RollingUpdate", "rollingUpdate": { "maxSurge": surge, "maxUnavailable": missing } },
        },
    }))
    .unwrap()
}

fn recreate(replicas: i32) -> Deployment {
    let mut deployment = deployment(replicas, json!(0), json!(0));
    deployment.spec.as_mut().unwrap().strategy.as_mut().unwrap().type_ = Some("Recreate".to_owned());
    deployment
}

/// A set of the current template, or of an old one named `old-N`.
fn set(deployment: &Deployment, name: &str, size: i32, available: i32) -> Arc<ReplicaSet> {
    let age: i64 = name.strip_prefix("old-").map_or(9, |number| number.parse().unwrap());
    let mut set = new_set(deployment, size, age);
    set.metadata.name = Some(name.to_owned());
    set.metadata.creation_timestamp =
        Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(Timestamp::from_second(age).unwrap()));
    if name.starts_with("old") {
        let pod = set.spec.as_mut().unwrap().template.as_mut().unwrap().spec.as_mut().unwrap();
        pod.containers[0].name = name.to_owned();
    }
    let status = set.status.get_or_insert_default();
    status.replicas = size;
    status.available_replicas = Some(available);
    Arc::new(set)
}

fn steps(deployment: &Deployment, sets: &[(&str, i32, i32)], old_pods: bool) -> Vec<Step> {
    let sets = sets.iter().map(|(name, size, available)| set(deployment, name, *size, *available)).collect();
    let mut observed = ObservedDeployment::new(deployment, sets);
    observed.old_pods = old_pods;
    plan(&observed)
}

fn scale(set: &str, from: i32, to: i32) -> Step {
    Step::Scale { set: set.to_owned(), from, to }
}

#[test]
#[expect(clippy::too_many_lines, reason = "one table")]
fn a_rolling_update_step_by_step() {
    type Row = (&'static str, i32, Value, Value, Vec<(&'static str, i32, i32)>, Vec<Step>);
    let rows: Vec<Row> = vec![
        ("first rollout", 3, json!("25%"), json!("25%"), vec![], vec![Step::Create { replicas: 3 }]),
        (
            "surge is rounded up",
            10,
            json!("25%"),
            json!("25%"),
            vec![("old-1", 10, 10)],
            vec![Step::Create { replicas: 3 }],
        ),
        (
            "no surge: an empty set first",
            3,
            json!(0),
            json!(1),
            vec![("old-1", 3, 3)],
            vec![Step::Create { replicas: 0 }],
        ),
        (
            "TestReconcileNewReplicaSet 1: surge 0, full",
            10,
            json!(0),
            json!(1),
            vec![("old-1", 9, 9), ("new", 0, 0)],
            vec![scale("new", 0, 1)],
        ),
        (
            "TestReconcileNewReplicaSet 2: surge 2",
            10,
            json!(2),
            json!(0),
            vec![("old-1", 10, 10), ("new", 0, 0)],
            vec![scale("new", 0, 2)],
        ),
        (
            "TestReconcileNewReplicaSet 3: with room",
            10,
            json!(2),
            json!(0),
            vec![("old-1", 5, 5), ("new", 0, 0)],
            vec![scale("new", 0, 7)],
        ),
        (
            "TestReconcileNewReplicaSet 4: at most what is wanted",
            10,
            json!(2),
            json!(0),
            vec![("new", 8, 8)],
            vec![scale("new", 8, 10)],
        ),
        (
            "TestReconcileOldReplicaSets: as many as may be missing",
            10,
            json!(0),
            json!(2),
            vec![("old-1", 10, 10), ("new", 0, 0)],
            vec![scale("old-1", 10, 8)],
        ),
        (
            "TestReconcileOldReplicaSets: none may be missing",
            10,
            json!(2),
            json!(0),
            vec![("old-1", 10, 10), ("new", 2, 0)],
            vec![],
        ),
        (
            "… until new ones are there",
            10,
            json!(2),
            json!(0),
            vec![("old-1", 10, 10), ("new", 2, 2)],
            vec![scale("old-1", 10, 8)],
        ),
        (
            "TestCleanupUnhealthyReplicas: broken ones go first",
            10,
            json!(0),
            json!(2),
            vec![("old-1", 5, 5), ("old-2", 5, 4), ("new", 0, 0)],
            vec![scale("old-1", 5, 4), scale("old-2", 5, 4)],
        ),
        (
            "the oldest is emptied first",
            4,
            json!(4),
            json!(0),
            vec![("old-1", 2, 2), ("old-2", 2, 2), ("new", 4, 3)],
            vec![scale("old-1", 2, 0), scale("old-2", 2, 1)],
        ),
        ("complete", 4, json!(1), json!(0), vec![("old-1", 0, 0), ("new", 4, 4)], vec![]),
        (
            "0 and 0 would never move",
            2,
            json!(0),
            json!("1%"),
            vec![("old-1", 2, 2), ("new", 0, 0)],
            vec![scale("old-1", 2, 1)],
        ),
    ];
    for (name, replicas, surge, missing, sets, expected) in rows {
        assert_eq!(steps(&deployment(replicas, surge, missing), &sets, false), expected, "{name}");
    }
}

#[test]
fn recreate_waits_until_every_old_pod_is_gone() {
    let of = recreate(3);
    assert_eq!(steps(&of, &[("old-1", 3, 3)], true), vec![scale("old-1", 3, 0)]);
    assert_eq!(steps(&of, &[("old-1", 0, 0)], true), vec![]);
    assert_eq!(steps(&of, &[("old-1", 0, 0)], false), vec![Step::Create { replicas: 3 }]);
    assert_eq!(steps(&of, &[("old-1", 0, 0), ("new", 0, 0)], false), vec![scale("new", 0, 3)]);
}

#[test]
fn a_change_of_size_is_spread_over_the_sets() {
    // Made when the Deployment had `before` pods, looked at when it has `after`.
    let spread = |before: i32, after: i32, sets: &[(&str, i32, i32)]| {
        let old = deployment(before, json!(0), json!(1));
        let sets = sets.iter().map(|(name, size, available)| set(&old, name, *size, *available)).collect();
        let new = deployment(after, json!(0), json!(1));
        plan(&ObservedDeployment::new(&new, sets))
    };
    let rows: Vec<(&str, Vec<Step>, Vec<Step>)> = vec![
        ("normal scaling event: 10 -> 12", spread(10, 12, &[("new", 10, 10)]), vec![scale("new", 10, 12)]),
        ("normal scaling event: 10 -> 5", spread(10, 5, &[("new", 10, 10)]), vec![scale("new", 10, 5)]),
        (
            "proportional scaling: 5 -> 10",
            spread(5, 10, &[("old-1", 3, 3), ("new", 2, 2)]),
            vec![scale("old-1", 3, 6), scale("new", 2, 4)],
        ),
        (
            "proportional scaling: 5 -> 3",
            spread(5, 3, &[("old-1", 2, 2), ("new", 3, 3)]),
            vec![scale("new", 3, 2), scale("old-1", 2, 1)],
        ),
        (
            "proportional scaling: 10 -> 0",
            spread(10, 0, &[("old-1", 4, 4), ("new", 6, 6)]),
            vec![scale("new", 6, 0), scale("old-1", 4, 0)],
        ),
    ];
    for (name, steps, expected) in rows {
        assert_eq!(steps, expected, "{name}");
    }
    let mut paused = deployment(4, json!(1), json!(0));
    paused.spec.as_mut().unwrap().paused = Some(true);
    assert_eq!(steps(&paused, &[("old-1", 4, 4)], false), vec![scale("old-1", 4, 4)], "paused: no new set");
}

#[test]
fn old_sets_beyond_the_limit_are_removed_once_the_rollout_is_complete() {
    let mut of = deployment(1, json!(1), json!(0));
    of.spec.as_mut().unwrap().revision_history_limit = Some(1);
    let old = [("old-1", 0, 0), ("old-2", 0, 0), ("old-3", 0, 0)];
    let complete: Vec<_> = old.into_iter().chain([("new", 1, 1)]).collect();
    let gone = |name: &str| Step::Delete { set: name.to_owned() };
    assert_eq!(steps(&of, &complete, false), vec![gone("old-1"), gone("old-2")]);
    let under_way: Vec<_> = old.into_iter().chain([("new", 1, 0)]).collect();
    assert_eq!(steps(&of, &under_way, false), vec![]);
}

#[test]
fn a_set_carries_hash_sizes_and_revision_and_a_rollback_raises_it() {
    let of = deployment(4, json!(1), json!(0));
    let mut set = new_set(&of, 4, 3);
    let hash = hash(&of.spec.as_ref().unwrap().template, 0);
    assert_eq!(set.name_any(), format!("d-{hash}"));
    assert_eq!(set.labels()["pod-template-hash"], hash);
    for (key, value) in [("revision", "3"), ("desired-replicas", "4"), ("max-replicas", "5")] {
        assert_eq!(set.annotations()[&format!("deployment.kubernetes.io/{key}")], value);
    }
    assert_eq!(set.annotations()["note"], "x");
    refresh(&of, &mut set, 7);
    assert_eq!(revision(&set.metadata), 7);
    assert_eq!(set.annotations()["deployment.kubernetes.io/revision-history"], "3");
    assert_ne!(super::template::hash(&of.spec.unwrap().template, 1), hash, "a collision gives another name");
}

#[test]
fn conditions_tell_the_rollout() {
    let mut of = deployment(2, json!(1), json!(0));
    let now = Timestamp::from_second(10_000).unwrap();
    let written_status = |of: &Deployment, sets: &[(&str, i32, i32)], created: Option<&str>, now| {
        let sets = sets.iter().map(|(name, size, available)| set(of, name, *size, *available)).collect();
        let (status, again) = status(&ObservedDeployment::new(of, sets), created, None, now);
        let reasons: Vec<String> = status
            .conditions
            .iter()
            .flatten()
            .map(|c| format!("{}={} {}", c.type_, c.status, c.reason.clone().unwrap_or_default()))
            .collect();
        (status, again, reasons)
    };
    let (written, again, reasons) = written_status(&of, &[("new", 2, 0)], Some("new"), now);
    assert_eq!(reasons, ["Available=False MinimumReplicasUnavailable", "Progressing=True ReplicaSetUpdated"]);
    assert_eq!((written.unavailable_replicas, again), (Some(2), Some(601)));
    of.status = Some(written);
    let late = Timestamp::from_second(10_601).unwrap();
    let (_, _, reasons) = written_status(&of, &[("new", 2, 0)], None, late);
    assert_eq!(reasons[1], "Progressing=False ProgressDeadlineExceeded");
    let (written, again, reasons) = written_status(&of, &[("new", 2, 2)], None, now);
    assert_eq!(
        reasons,
        ["Available=True MinimumReplicasAvailable", "Progressing=True NewReplicaSetAvailable"]
    );
    assert_eq!(again, None);
    of.status = Some(written.clone());
    assert_eq!(written_status(&of, &[("new", 2, 2)], None, late).0, written, "nothing new, nothing to write");
    of.spec.as_mut().unwrap().paused = Some(true);
    let (written, _, reasons) = written_status(&of, &[("new", 2, 2)], None, now);
    assert_eq!(reasons[1], "Progressing=Unknown DeploymentPaused");
    of.status = Some(written);
    of.spec.as_mut().unwrap().paused = None;
    assert_eq!(
        written_status(&of, &[("new", 2, 2)], None, now).2[1],
        "Progressing=Unknown DeploymentResumed"
    );
}
