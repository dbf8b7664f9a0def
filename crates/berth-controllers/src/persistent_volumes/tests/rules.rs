//! Kubernetes' cases of finalizers (13), migration annotations, retroactive classes (15) and sizes (5-2-3).
//!
//! The rules for cached versions (TestControllerCache) are those of `berth_kube::Cache`, and tested there.

use super::super::names;
use super::{World, volume};

#[test]
fn finalizers_follow_the_provisioner_and_the_policy() {
    let (external, internal) =
        (berth_core::names::PROVISIONER_FINALIZER, berth_core::names::IN_TREE_VOLUME_FINALIZER);
    let custom = "test.volume.kubernetes.io/finalizer";
    let old = "by=kubernetes.io/mock-volume";
    for (case, words, before, after) in [
        ("13-1", "policy=Delete by=rbd.csi.ceph.com csi", vec![external], vec![external]),
        ("13-2", "policy=Delete by=rbd.csi.ceph.com csi", vec![], vec![]),
        ("13-3", &format!("policy=Delete {old}"), vec![custom], vec![custom, internal]),
        ("13-4", &format!("policy=Delete {old}"), vec![], vec![internal]),
        ("13-5, 13-8", &format!("policy=Delete {old}"), vec![external], vec![internal]),
        ("13-6, 13-9", &format!("policy=Delete {old}"), vec![external, custom], vec![custom, internal]),
        (
            "13-7",
            "policy=Delete by=kubernetes.io/gce-pd migrated=pd.csi.storage.gke.io",
            vec![external, internal],
            vec![external],
        ),
        ("13-10", "policy=Delete", vec![external], vec![external]),
        ("13-11, 13-15", "policy=Delete", vec![], vec![]),
        ("13-12", &format!("policy=Retain {old}"), vec![], vec![]),
        ("13-13", &format!("policy=Recycle {old}"), vec![], vec![]),
        ("13-14", &format!("policy=Retain {old}"), vec![internal], vec![]),
    ] {
        let finalizers = if before.is_empty() { String::new() } else { format!("fin={}", before.join(",")) };
        let volume = volume(&format!("v 1Gi Bound ref=c:u bbc {words} {finalizers}"));
        let planned = names::migration_of_volume(&volume).map(|(_, finalizers)| finalizers);
        assert_eq!(
            planned,
            (before != after).then(|| after.into_iter().map(str::to_owned).collect()),
            "{case}"
        );
    }
}

#[test]
fn migration_annotations_are_put_right() {
    for (case, volume_before, volume_after, claim_before, claim_after) in [
        (
            "migration on",
            "by=kubernetes.io/gce-pd",
            "by=kubernetes.io/gce-pd migrated=pd.csi.storage.gke.io",
            "asked=kubernetes.io/gce-pd",
            "asked=kubernetes.io/gce-pd migrated=pd.csi.storage.gke.io",
        ),
        (
            "migration on with the annotation",
            "by=kubernetes.io/gce-pd migrated=pd.csi.storage.gke.io",
            "by=kubernetes.io/gce-pd migrated=pd.csi.storage.gke.io",
            "asked=kubernetes.io/gce-pd migrated=pd.csi.storage.gke.io",
            "asked=kubernetes.io/gce-pd migrated=pd.csi.storage.gke.io",
        ),
        (
            "migration off",
            "by=x.y/z migrated=some.driver",
            "by=x.y/z",
            "asked=x.y/z migrated=some.driver",
            "asked=x.y/z",
        ),
        (
            "no provisioner",
            "migrated=some.driver",
            "migrated=some.driver",
            "migrated=some.driver",
            "migrated=some.driver",
        ),
        ("nothing", "", "", "", ""),
    ] {
        let text = |claim: &str| format!("c 1Gi Bound vol=v bc {claim}");
        let volume = |words: &str| format!("v 1Gi Bound ref=c:u {words}");
        let mut world = World::new(&text(claim_before), &volume(volume_before));
        world.reconcile_claim("c");
        world.reconcile_volume("v");
        world.check(case, &text(claim_after), &volume(volume_after), "");
    }
}

#[test]
fn a_claim_without_a_class_gets_the_default_when_it_appears() {
    let plain = "kubernetes.io/no-provisioner";
    for (case, classes, before, after, events) in [
        ("15-1", &[][..], "c 1Gi Pending", "c 1Gi Pending", "Normal FailedBinding"),
        ("15-2", &[("gold", true), ("silver", true)], "c 1Gi Pending", "c 1Gi Pending class=gold", ""),
        (
            "15-3",
            &[("gold", true), ("silver", false)],
            "c 1Gi Bound vol=test class=copper bbc bc",
            "c 1Gi Lost vol=test class=copper bbc bc",
            "Warning ClaimLost",
        ),
        (
            "15-4",
            &[("gold", true), ("silver", false)],
            "c 1Gi Bound vol=test class=copper",
            "c 1Gi Pending vol=test class=copper",
            "Normal FailedBinding",
        ),
        ("15-5", &[("gold", true), ("silver", false)], "c 1Gi Pending", "c 1Gi Pending class=gold", ""),
        (
            "15-6",
            &[("gold", true), ("copper", false)],
            "c 1Gi Pending class=copper",
            "c 1Gi Pending class=copper",
            "Warning ProvisioningFailed",
        ),
        (
            "15-7",
            &[("gold", true), ("copper", false)],
            "c 1Gi Pending beta=copper",
            "c 1Gi Pending beta=copper",
            "Warning ProvisioningFailed",
        ),
        (
            "class \"\" opts out",
            &[("gold", true)],
            "c 1Gi Pending class=",
            "c 1Gi Pending class=",
            "Normal FailedBinding",
        ),
    ] {
        let mut world = World::new(before, "");
        for (name, default) in classes {
            world = world.with_class(name, plain, "Immediate", *default);
        }
        world.reconcile_claim("c");
        world.check(case, after, "", events);
    }
    // A free volume that fits wins over the default class.
    let mut world =
        World::new("c 1Gi Pending", "v 1Gi Available").with_class("gold", plain, "Immediate", true);
    world.reconcile_claim("c");
    world.check("free volume", "c 1Gi Bound vol=v bbc bc", "v 1Gi Bound ref=c:u bbc", "");
}

#[test]
fn the_newest_default_class_wins() {
    let mut world =
        World::default().with_class("a", "p", "Immediate", true).with_class("b", "p", "Immediate", true);
    let created = |class: &mut std::sync::Arc<super::StorageClass>, time: &str| {
        std::sync::Arc::make_mut(class).metadata.creation_timestamp =
            Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(time.parse().unwrap()));
    };
    created(&mut world.classes[0], "2026-01-01T00:00:00Z");
    created(&mut world.classes[1], "2026-01-02T00:00:00Z");
    assert_eq!(names::default_of(&world.classes).as_deref(), Some("b"));
}

#[test]
fn a_claim_says_the_size_its_filesystem_has() {
    let mut world = World::new("c 1Gi Pending vol=v bc", "v 2Gi Bound ref=c:u preresize=1Gi");
    world.reconcile_claim("c");
    world.check("5-2-3", "c 1Gi Bound vol=v bc cap=1Gi", "v 2Gi Bound ref=c:u preresize=1Gi", "");
    // Once bound, the size is the resizer's.
    let mut world = World::new("c 1Gi Bound vol=v bc cap=1Gi", "v 2Gi Bound ref=c:u");
    world.reconcile_claim("c");
    world.check("bound", "c 1Gi Bound vol=v bc cap=1Gi", "v 2Gi Bound ref=c:u", "");
}
