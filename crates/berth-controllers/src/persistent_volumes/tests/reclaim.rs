//! Kubernetes' delete cases (8, 9) and recycle cases (6, 7).
//!
//! Kubernetes has a mock plugin that fails or succeeds; here the deed is hostPath's removal or a recycler pod, whose
//! outcome the case gives. Left out: 8-4 and 6-4 (a plugin that cannot be constructed: ours need no construction), 8-6
//! and 6-6 (the volume is gone: there is nothing to decide). `tests/scenarios/reclaim.rs` lives through the deeds.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::super::plan;
use super::super::recycle::{Recycling, plan_recycling, volume_of};
use super::super::step::Step;
use super::{World, claim, volume};

/// Number, claims, volumes, volumes after, events, and what remains to be done outside Kubernetes.
type Case = (&'static str, &'static str, &'static str, &'static str, &'static str, Option<Step>);

fn reconcile(cases: Vec<Case>) {
    for (case, claims, volumes, after, events, deed) in cases {
        let mut world = World::new(claims, volumes);
        world.reconcile_volume("v");
        world.check(case, claims, after, events);
        assert_eq!(world.deeds, Vec::from_iter(deed), "deeds of {case}");
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn released_volumes_are_deleted_by_whoever_made_them() {
    let host = Some(Step::DeleteHostPath);
    reconcile(vec![
        (
            "8-1",
            "",
            "v 1Gi Bound ref=c:u policy=Delete bbc host",
            "v 1Gi Released ref=c:u policy=Delete bbc host",
            "",
            host.clone(),
        ),
        (
            "8-2",
            "",
            "v 1Gi Bound ref=c:u policy=Delete host",
            "v 1Gi Released ref=c:u policy=Delete host",
            "",
            host.clone(),
        ),
        (
            "8-3",
            "",
            "v 1Gi Bound ref=c:u policy=Delete",
            "v 1Gi Failed ref=c:u policy=Delete msg=error_getting_deleter_volume_plugin_for_volume_\"v\":_no_volume_plugin_matched",
            "Warning VolumeFailedDelete (volume)",
            None,
        ),
        (
            "8-9",
            "c 10Gi Pending uid=x",
            "v 1Gi Bound ref=c:u policy=Delete host",
            "v 1Gi Released ref=c:u policy=Delete host",
            "",
            host.clone(),
        ),
        (
            "8-10-1",
            "",
            "v 1Gi Bound ref=c:u policy=Delete csi by=external.io/test bbc",
            "v 1Gi Released ref=c:u policy=Delete csi by=external.io/test bbc",
            "",
            None,
        ),
        (
            "8-10-2",
            "",
            "v 1Gi Bound ref=c:u policy=Delete csi bbc",
            "v 1Gi Released ref=c:u policy=Delete csi bbc",
            "",
            None,
        ),
        (
            "8-10-3",
            "",
            "v 1Gi Bound ref=c:u policy=Delete by=kubernetes.io/gce-pd migrated=pd.csi.storage.gke.io",
            "v 1Gi Released ref=c:u policy=Delete by=kubernetes.io/gce-pd migrated=pd.csi.storage.gke.io",
            "",
            None,
        ),
        (
            "8-11",
            "c 10Gi Bound vol=v2",
            "v 1Gi Bound ref=c:u policy=Delete host by=kubernetes.io/host-path fin=kubernetes.io/pv-controller \
             | v2 1Gi Bound ref=c:u policy=Delete host by=kubernetes.io/host-path fin=kubernetes.io/pv-controller",
            "v 1Gi Released ref=c:u policy=Delete host by=kubernetes.io/host-path fin=kubernetes.io/pv-controller \
             | v2 1Gi Bound ref=c:u policy=Delete host by=kubernetes.io/host-path fin=kubernetes.io/pv-controller",
            "",
            host.clone(),
        ),
        (
            "8-12",
            "c 10Gi Bound vol=v2",
            "v 1Gi Bound ref=c:u policy=Delete csi by=external.io/test | v2 1Gi Bound ref=c:u policy=Delete csi by=external.io/test",
            "v 1Gi Released ref=c:u policy=Delete csi by=external.io/test | v2 1Gi Bound ref=c:u policy=Delete csi by=external.io/test",
            "",
            None,
        ),
        (
            "8-13",
            "",
            "v 1Gi Bound ref=c:u policy=Delete bbc host deleted fin=kubernetes.io/pv-controller",
            "v 1Gi Released ref=c:u policy=Delete bbc host deleted fin=kubernetes.io/pv-controller",
            "",
            host.clone(),
        ),
        (
            "9-1, the second time",
            "",
            "v 1Gi Failed ref=c:u policy=Delete host",
            "v 1Gi Failed ref=c:u policy=Delete host",
            "",
            host,
        ),
        // Ours: a plugin that is gone, one that CSI stands in for, and policies of both kinds.
        (
            "a plugin of old",
            "",
            "v 1Gi Released ref=c:u policy=Delete by=kubernetes.io/rbd fin=kubernetes.io/pv-controller",
            "v 1Gi Failed ref=c:u policy=Delete by=kubernetes.io/rbd fin=kubernetes.io/pv-controller msg=no_volume_plugin_matched_name:_kubernetes.io/rbd",
            "Warning VolumeFailedDelete (volume)",
            None,
        ),
        ("retained", "", "v 1Gi Bound ref=c:u host", "v 1Gi Released ref=c:u host", "", None),
    ]);
}

#[test]
fn a_failure_to_delete_is_told_once() {
    for (case, phase, told) in [("8-5", "Released", 2), ("9-1", "Failed", 0)] {
        let volume = volume(&format!("v 1Gi {phase} ref=c:u policy=Delete host"));
        let steps = plan::fail(&volume, "VolumeFailedDelete", "Mock delete error".to_owned());
        assert_eq!(steps.len(), told, "{case}");
    }
}

#[test]
fn only_a_volume_whose_claim_is_gone_may_lose_its_data() {
    for (case, volume_text, claim_text, released) in [
        ("8-1", "v 1Gi Released ref=c:u", "", true),
        ("8-7", "v 1Gi Released ref=c:u", "c 1Gi Bound vol=v", false),
        ("8-9", "v 1Gi Released ref=c:u", "c 1Gi Pending uid=x", true),
        ("8-11", "v 1Gi Released ref=c:u", "c 1Gi Bound vol=other", true),
        ("6-7", "v 1Gi Available", "", false),
        ("6-8", "v 1Gi Available ref=c", "", false),
        ("bound a moment later", "v 1Gi Released ref=c:u", "c 1Gi Pending", false),
    ] {
        let claim = (!claim_text.is_empty()).then(|| claim(claim_text));
        assert_eq!(plan::is_released(&volume(volume_text), claim.as_ref()), released, "{case}");
    }
}

#[test]
fn released_volumes_are_recycled_or_say_why_not() {
    let recycle = Some(Step::Recycle);
    reconcile(vec![
        (
            "6-1",
            "",
            "v 1Gi Bound ref=c:u policy=Recycle bbc",
            "v 1Gi Released ref=c:u policy=Recycle bbc",
            "",
            recycle.clone(),
        ),
        (
            "6-2",
            "",
            "v 1Gi Bound ref=c:u policy=Recycle",
            "v 1Gi Released ref=c:u policy=Recycle",
            "",
            recycle.clone(),
        ),
        (
            "6-9",
            "c 10Gi Pending uid=x",
            "v 1Gi Bound ref=c:u policy=Recycle",
            "v 1Gi Released ref=c:u policy=Recycle",
            "",
            recycle.clone(),
        ),
        (
            "6-10",
            "",
            "v 1Gi Bound ref=c:u policy=Unknown",
            "v 1Gi Failed ref=c:u policy=Unknown msg=Volume_has_unrecognized_PersistentVolumeReclaimPolicy",
            "Warning VolumeUnknownReclaimPolicy (volume)",
            None,
        ),
        (
            "7-1, the second time",
            "",
            "v 1Gi Failed ref=c:u policy=Recycle",
            "v 1Gi Failed ref=c:u policy=Recycle",
            "",
            recycle,
        ),
    ]);
}

fn recycler(phase: &str, claim: &str, change: &serde_json::Value) -> Pod {
    let mut pod = json!({
        "metadata": {
            "namespace": "default", "name": "recycler-for-v",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "annotations": { "recycler.berth.dev/claim-uid": claim },
            "ownerReferences": [{ "apiVersion": "v1", "kind": "PersistentVolume", "name": "v", "uid": "uid-v" }],
        },
        "status": { "phase": phase },
    });
    for (part, fields) in change.as_object().unwrap() {
        pod[part].as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    }
    serde_json::from_value(pod).unwrap()
}

#[test]
fn a_recycler_pod_is_started_watched_and_believed_only_if_it_is_ours() {
    let volume = volume("v 3Gi Released ref=c:u policy=Recycle host");
    let at = |seconds: i64| {
        let start: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        start + jiff::SignedDuration::from_secs(seconds)
    };
    let plan = |pod: Option<&Pod>, seconds| plan_recycling(&volume, pod, Vec::new(), at(seconds));
    let pod = |phase: &str| recycler(phase, "u", &json!({}));

    for phase in ["Pending", "Running"] {
        assert_eq!(plan(Some(&pod(phase)), 1), Recycling::Wait, "{phase}");
    }
    assert_eq!(plan(Some(&pod("Succeeded")), 1), Recycling::Done, "6-1");
    let failed = recycler("Failed", "u", &json!({ "status": { "message": "Mock recycle error" } }));
    let expected = Recycling::Failed("Mock recycle error".to_owned(), Duration::from_secs(10));
    assert_eq!(plan(Some(&failed), 5), expected, "6-5");
    assert_eq!(plan(Some(&failed), 15), Recycling::Remove, "7-1");
    let Recycling::Failed(why, _) = plan(Some(&pod("Failed")), 1) else { panic!("not failed") };
    assert!(why.contains("pod.Status.Message unknown") && why.contains("kubectl logs"), "{why}");

    let old = recycler("Succeeded", "before", &json!({}));
    assert_eq!(plan(Some(&old), 1), Recycling::Remove, "a pod of an earlier binding");
    let forged = recycler("Succeeded", "u", &json!({ "metadata": { "ownerReferences": [] } }));
    assert_eq!(plan(Some(&forged), 1), Recycling::Remove, "a pod of nobody");
    let going =
        recycler("Running", "u", &json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:01Z" } }));
    assert_eq!(plan(Some(&going), 1), Recycling::Wait);
    assert_eq!(volume_of(&old).as_deref(), Some("v"));
    assert_eq!(volume_of(&recycler("x", "u", &json!({ "metadata": { "namespace": "other" } }))), None);
}

#[test]
fn a_recycler_pod_has_time_by_size_and_mounts_what_the_volume_is() {
    for (text, deadline) in [
        ("v 1Gi Released ref=c:u host", 60),
        ("v 2Gi Released ref=c:u host", 60),
        ("v 3Gi Released ref=c:u host", 90),
        ("v 1Gi Released ref=c:u nfs", 300),
        ("v 20Gi Released ref=c:u nfs", 600),
    ] {
        let volume = volume(text);
        let Recycling::Start(pod) = plan_recycling(&volume, None, Vec::new(), Timestamp::UNIX_EPOCH) else {
            panic!("{text} is not started");
        };
        let spec = pod.spec.as_ref().unwrap();
        assert_eq!(spec.active_deadline_seconds, Some(deadline), "{text}");
        let source = &spec.volumes.as_ref().unwrap()[0];
        assert_eq!(
            (source.host_path.is_some(), source.nfs.is_some()),
            (text.contains("host"), text.contains("nfs"))
        );
        // What was started is believed when it is seen again.
        let mut seen = *pod;
        seen.status = Some(k8s_openapi::api::core::v1::PodStatus {
            phase: Some("Succeeded".into()),
            ..Default::default()
        });
        assert_eq!(plan_recycling(&volume, Some(&seen), Vec::new(), Timestamp::UNIX_EPOCH), Recycling::Done);
    }
    let csi = volume("v 1Gi Released ref=c:u csi");
    assert_eq!(plan_recycling(&csi, None, Vec::new(), Timestamp::UNIX_EPOCH), Recycling::Unsupported, "6-3");
    let used = plan_recycling(&csi, None, vec!["ns/runningPod".to_owned()], Timestamp::UNIX_EPOCH);
    assert_eq!(used, Recycling::InUse(vec!["ns/runningPod".to_owned()]), "6-11, 6-12");
}

#[test]
fn pods_that_are_over_use_nothing() {
    for (case, phase, deleted, state, over) in [
        ("6-11", "Running", false, "running", false),
        ("6-12", "Pending", false, "waiting", false),
        ("6-13", "Succeeded", false, "terminated", true),
        ("failed", "Failed", false, "terminated", true),
        ("deleted but running", "Running", true, "running", false),
        ("deleted and stopped", "Running", true, "terminated", true),
    ] {
        let mut pod = json!({
            "metadata": { "name": "p" },
            "status": { "phase": phase, "containerStatuses": [{
                "name": "a", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
                "state": { state: if state == "terminated" { json!({ "exitCode": 0 }) } else { json!({}) } },
            }] },
        });
        if deleted {
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        }
        let pod: Pod = serde_json::from_value(pod).unwrap();
        assert_eq!(super::super::is_terminated(&pod), over, "{case}");
    }
}
