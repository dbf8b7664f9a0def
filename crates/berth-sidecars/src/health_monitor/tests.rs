//! The monitor on the embedded API server, beside drivers of both ways to tell.

mod stage;

use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Node, PersistentVolume, Pod};
use kube::api::DeleteParams;
use serde_json::{Value, json};

use self::stage::{Capability, Stage};
use super::*;

const HEALTHY: &str = "The Volume returns to the healthy state";

fn of<'a>(events: &'a [Event], reason: &str) -> Vec<&'a Event> {
    events.iter().filter(|event| event.reason.as_deref() == Some(reason)).collect()
}

#[test]
fn bound_volumes_of_the_driver_are_watched_over() {
    let good = json!({
        "metadata": { "name": "pv" },
        "spec": {
            "csi": { "driver": "d", "volumeHandle": "h" },
            "claimRef": { "namespace": "n", "name": "c", "uid": "u" },
        },
        "status": { "phase": "Bound" },
    });
    let with = |pointer: &str, value: Value| -> PersistentVolume {
        let mut volume = good.clone();
        *volume.pointer_mut(pointer).unwrap() = value;
        serde_json::from_value(volume).unwrap()
    };
    let is_watched = |volume: &PersistentVolume| watched(volume, "d").is_some();
    let same = with("/metadata/name", json!("pv"));
    assert_eq!(watched(&same, "d"), Some(("h", Key::new("n", "c"), Some("u"))));
    assert!(!is_watched(&with("/spec/csi/driver", json!("other"))));
    assert!(!is_watched(&with("/spec/csi/volumeHandle", json!(""))));
    assert!(!is_watched(&with("/spec/csi", Value::Null)));
    assert!(!is_watched(&with("/status/phase", json!("Released"))));
    assert!(!is_watched(&with("/spec/claimRef", Value::Null)));
    let deleting = json!({ "name": "pv", "deletionTimestamp": "2026-01-01T00:00:00Z" });
    assert!(!is_watched(&with("/metadata", deleting)));
}

#[test]
fn many_volumes_are_asked_about_less_often() {
    let minute = Duration::from_mins(1);
    for (volumes, expected) in [(0, 60), (10, 60), (600, 60), (1_000, 100), (10_000, 1_000)] {
        assert_eq!(pause(minute, volumes, 10), Duration::from_secs(expected), "{volumes}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trouble_and_its_end_have_one_event_each_on_the_claim_by_every_call_of_the_driver() {
    for capabilities in [
        &[Capability::ListVolumeHealth, Capability::GetVolumeHealth][..],
        &[Capability::GetVolumeHealth],
        &[Capability::VolumeCondition, Capability::ListVolumes],
        &[Capability::VolumeCondition, Capability::GetVolume],
    ] {
        let stage = Stage::set(capabilities).await;
        let claim = stage.bound_claim("data").await;
        stage.bound_claim("well").await;
        stage.ail("data", Some("the disk is slow"));
        let running = stage.start(|_| {});
        // Rounds ask about any volume, so they say nothing of what was heard of this one.
        stage.event_number(ABNORMAL, 1).await;
        stage.rounds(5).await;
        stage.ail("data", Some("the disk is gone"));
        stage.event_number(ABNORMAL, 2).await;
        stage.rounds(5).await;
        stage.ail("data", None);
        let last = stage.event(NORMAL).await;
        assert_eq!(last.message.as_deref(), Some(HEALTHY), "{capabilities:?}");
        assert_eq!((last.type_.as_deref(), last.count), (Some("Normal"), Some(1)));
        stage.rounds(5).await;

        let events = stage.events().await;
        let recorded = of(&events, ABNORMAL);
        let messages: Vec<_> = recorded.iter().filter_map(|event| event.message.as_deref()).collect();
        assert_eq!(messages.len(), 2, "{capabilities:?}: {messages:?}");
        assert!(messages[0].ends_with("the disk is slow") && messages[1].ends_with("the disk is gone"));
        for event in recorded {
            assert_eq!((event.type_.as_deref(), event.count), (Some("Warning"), Some(1)), "recorded again");
            assert_eq!(event.involved_object.uid, claim.metadata.uid);
            let source = event.source.as_ref().and_then(|source| source.component.as_deref());
            assert_eq!(source, Some("csi-pv-monitor-controller-test.berth.dev"));
        }
        running.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_successor_repeats_no_event_and_records_what_is_over() {
    let stage = Stage::set(&[Capability::ListVolumeHealth, Capability::GetVolumeHealth]).await;
    stage.bound_claim("data").await;
    stage.ail("data", Some("the disk is slow"));
    let first = stage.start(|_| {});
    stage.event(ABNORMAL).await;
    first.stop().await;
    let second = stage.start(|_| {});
    stage.rounds(5).await;
    second.stop().await;
    let events = stage.events().await;
    assert_eq!(of(&events, ABNORMAL).iter().map(|event| event.count).collect::<Vec<_>>(), [Some(1)]);
    stage.ail("data", None);
    let third = stage.start(|_| {});
    stage.event(NORMAL).await;
    third.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rounds_cost_kubernetes_nothing_however_many_volumes_there_are() {
    for capabilities in [
        &[Capability::ListVolumeHealth, Capability::GetVolumeHealth][..],
        &[Capability::VolumeCondition, Capability::GetVolume],
    ] {
        let stage = Stage::set(capabilities).await;
        for name in ["a", "b", "c", "d", "e"] {
            stage.bound_claim(name).await;
        }
        let running = stage.start(|_| {});
        stage.rounds(10).await;
        let before = stage.requests();
        stage.rounds(30).await;
        assert_eq!(stage.requests(), before);
        running.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_that_refuses_the_call_says_nothing_of_the_volume() {
    let stage = Stage::set(&[Capability::ListVolumeHealth, Capability::GetVolumeHealth]).await;
    stage.bound_claim("data").await;
    stage.ail("data", Some("the disk is slow"));
    let running = stage.start(|_| {});
    stage.event(ABNORMAL).await;
    stage.refuse(true);
    stage.ail("data", None);
    stage.rounds(5).await;
    assert!(of(&stage.events().await, NORMAL).is_empty());
    stage.refuse(false);
    stage.event(NORMAL).await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_fails_and_recovers_has_events_on_the_claims_of_its_pods() {
    let stage = Stage::set(&[Capability::ListVolumeHealth, Capability::GetVolumeHealth]).await;
    let ready = |status: &str| {
        let since = "2026-01-01T00:00:00Z";
        json!({ "status": { "conditions": [{ "type": "Ready", "status": status, "lastTransitionTime": since }] } })
    };
    stage.bound_claim("data").await;
    stage.bound_claim("unused").await;
    let volumes = json!([{ "name": "v", "persistentVolumeClaim": { "claimName": "data" } }]);
    let container = json!({ "name": "c", "image": "i" });
    for (pod, node) in [("web", "n1"), ("db", "n2")] {
        stage.create::<Node>(json!({ "metadata": { "name": node } })).await;
        let pod = json!({
            "metadata": { "name": pod, "namespace": "default" },
            "spec": { "nodeName": node, "containers": [container], "volumes": volumes },
        });
        stage.create::<Pod>(pod).await;
    }
    stage.patch_status::<Node>("n1", ready("True")).await;
    let running = stage.start(|options| options.node_watcher = true);
    stage.rounds(3).await;
    assert!(of(&stage.events().await, "NodeFailed").is_empty());

    stage.patch_status::<Node>("n1", ready("Unknown")).await;
    let failed = stage.event("NodeFailed").await;
    let text = "Pods: [ web ] consuming PVC: data in namespace: default are now on a failed node: n1";
    assert_eq!((failed.message.as_deref(), failed.type_.as_deref()), (Some(text), Some("Warning")));
    assert_eq!(failed.involved_object.name.as_deref(), Some("data"));
    stage.patch_status::<Node>("n1", ready("True")).await;
    let recovered = stage.event("NodeRecovered").await;
    assert_eq!(recovered.message.as_deref(), Some("Node: n1 recovered"));
    stage.api::<Node>().delete("n2", &DeleteParams::default()).await.unwrap();
    let gone = stage.event_number("NodeFailed", 2).await;
    assert!(gone.message.unwrap().ends_with("are now on a failed node: n2"));
    running.stop().await;
}
