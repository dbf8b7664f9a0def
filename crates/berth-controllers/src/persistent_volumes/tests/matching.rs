//! Kubernetes' matcher cases (index_test), on the pool of free volumes.
//!
//! Left out: TestListByAccessModes and TestAllPossibleAccessModes, which look into Kubernetes' index; what they are
//! for is in `fewer_access_modes_win`. The cases of the scheduler's path (node affinity) are the scheduler's.

use std::sync::Arc;

use kube::ResourceExt as _;

use super::super::plan::{self, AccessModes};
use super::super::pool::{self, Pool};
use super::{Key, claim, parts, volume};

/// The volumes of Kubernetes' table.
const VOLUMES: &str = "gce-pd-10 10G Available | gce-pd-20 20G Bound ref=x:def456 | nfs-5 5G Available modes=RWO,ROX,RWX \
    | gce-pd-1 1G Bound ref=x:abc123 | nfs-10 10G Available modes=RWO,ROX,RWX | gce-pd-5 5G Available \
    | nfs-1 1G Available modes=RWO,ROX,RWX | gce-pd-2 20000G Available modes=RWO labels \
    | gce-pd-silver1 10000G Available modes=RWO class=silver labels | gce-pd-silver2 100G Available modes=RWO class=silver \
    | gce-pd-gold 50G Available modes=RWO class=gold \
    | local-pd-very-large 200E Available modes=RWO,ROX,RWX class=large \
    | local-pd-extremely-large 800E Available modes=RWO,ROX,RWX class=large \
    | affinity-pv 100G Available class=wait | affinity-pv2 150G Available class=wait \
    | affinity-prebound 100G Available class=wait ref=claim02 | affinity-pv3 200G Available class=wait \
    | affinity-pv4-pending 200G Pending class=wait | affinity-pv4-failed 200G Failed class=wait \
    | affinity-pv4-released 200G Released class=wait | affinity-pv4-empty 200G - class=wait \
    | gce-pd-vac-silver1 100G Available vac=silver";

/// The volume a claim gets: one reserved for it, or else a free one.
fn find(volumes: &str, asked: &str) -> String {
    let volumes: Vec<_> = parts(volumes).map(|text| Arc::new(volume(text))).collect();
    let pool = Pool::new(|_| {});
    for volume in &volumes {
        pool.volume_changed(&volume.name_any(), Some(volume));
    }
    let claim = claim(asked);
    let key = Key::of(&claim);
    let pointing = volumes
        .iter()
        .filter(|volume| berth_kube::storage::claim_of_volume(volume).as_ref() == Some(&key))
        .cloned();
    let found = pool::reserved(pointing.collect(), &claim).or_else(|| pool.turn(key).find(&claim));
    found.map(|volume| volume.name_any()).unwrap_or_default()
}

#[test]
fn the_smallest_volume_that_fits_is_found() {
    for (case, asked, expected) in [
        ("successful-match-gce-10", "c 8G Pending", "gce-pd-10"),
        ("successful-match-nfs-5", "c 5G Pending modes=ROX,RWO,RWX", "nfs-5"),
        ("successful-skip-1g-bound-volume", "c 1G Pending", "gce-pd-5"),
        ("successful-no-match", "c 999G Pending", ""),
        ("successful-no-match-due-to-label", "c 999G Pending exists=should-not-exist", ""),
        ("successful-no-match-due-to-size-constraint-with-label-selector", "c 20000G Pending selector", ""),
        (
            "successful-match-due-with-constraint-and-label-selector",
            "c 20000G Pending selector modes=RWO",
            "gce-pd-2",
        ),
        ("successful-match-with-empty-vac", "c 8G Pending vac=", "gce-pd-10"),
        ("successful-match-with-vac", "c 1G Pending vac=silver", "gce-pd-vac-silver1"),
        ("successful-no-match-vac-nonexisting", "c 1G Pending vac=non-existing", ""),
        ("successful-match-with-class", "c 1G Pending selector modes=RWO class=silver", "gce-pd-silver1"),
        ("successful-match-with-class-and-labels", "c 1G Pending modes=RWO class=silver", "gce-pd-silver2"),
        ("successful-match-very-large", "c 1E Pending modes=RWO class=large", "local-pd-very-large"),
        (
            "successful-match-exact-extremely-large",
            "c 800E Pending modes=RWO class=large",
            "local-pd-extremely-large",
        ),
        ("successful-no-match-way-too-large", "c 950E Pending modes=RWO class=large", ""),
    ] {
        assert_eq!(find(VOLUMES, asked), expected, "{case}");
    }
}

#[test]
fn a_bound_volume_is_not_found() {
    assert_eq!(find("v1 1G Bound ref=x:abc123 | v2 1G Available", "c 1G Pending"), "v2");
}

#[test]
fn fewer_access_modes_win() {
    let volumes = |ebs: &str, gce: &str| {
        format!(
            "gce 10G Available modes=RWO,ROX {gce} | ebs 10G Available modes=RWO {ebs} | nfs 10G Available modes=RWO,ROX,RWX"
        )
    };
    for (ebs, gce, asked, expected) in [
        ("", "", "RWO", "ebs"),
        ("", "", "RWO,ROX", "gce"),
        ("", "", "RWX,RWO,ROX", "nfs"),
        ("", "", "RWX", "nfs"),
        ("ref=x", "", "RWO", "gce"),
        ("ref=x", "ref=x", "RWO", "nfs"),
        ("ref=x", "", "ROX", "gce"),
        ("", "", "RWOP", ""),
    ] {
        let found = find(&volumes(ebs, gce), &format!("c 1G Pending modes={asked}"));
        assert_eq!(found, expected, "{asked} with ebs {ebs:?}, gce {gce:?}");
    }
}

#[test]
fn volume_modes_filter() {
    for (case, volume, asked, found) in [
        ("pvc block and pv filesystem", "", "block", false),
        ("pvc filesystem and pv block", "block", "", false),
        ("pvc block and pv block", "block", "block", true),
        ("pvc filesystem and pv filesystem", "", "", true),
        ("pvc filesystem and pv nil", "nomode", "", true),
        ("pvc nil and pv filesystem", "", "nomode", true),
        ("pvc nil and pv nil", "nomode", "nomode", true),
        ("pvc nil and pv block", "block", "nomode", false),
        ("pvc block and pv nil", "nomode", "block", false),
    ] {
        let volume = format!("v 10G Available modes=RWO {volume}");
        let asked = format!("c 8G Pending modes=RWO {asked}");
        assert_eq!(find(&volume, &asked), if found { "v" } else { "" }, "{case}");
    }
}

#[test]
fn a_volume_that_is_being_deleted_is_not_found() {
    assert_eq!(find("v 1G Available", "c 1G Pending"), "v");
    assert_eq!(find("v 1G Available deleted", "c 1G Pending"), "");
    assert_eq!(find("v 1G Available ref=c deleted", "c 1G Pending"), "");
    let seen = |volume: &str| {
        let mut world = super::World::new("c 1G Pending vol=v", volume);
        world.reconcile_claim("c");
        world.claims["c"].status.as_ref().unwrap().phase.clone().unwrap()
    };
    assert_eq!(seen("v 1G Available"), "Bound");
    assert_eq!(seen("v 1G Available deleted"), "Pending");
}

#[test]
fn a_reserved_volume_wins_if_it_fits() {
    let volumes = |reserved: &str| {
        [
            "pv1 1Gi Available",
            "pv5 5Gi Available",
            "pv8 8Gi Available",
            "small 1Mi Available",
            "mode 1Gi Available modes=ROX",
        ]
        .map(|text| {
            let name = text.split(' ').next().unwrap();
            let (which, claim) = reserved.split_once('=').unwrap_or(("", ""));
            if name == which { format!("{text} ref={claim}") } else { text.to_owned() }
        })
        .join(" | ")
    };
    for (reserved, expected) in
        [("", "pv1"), ("pv1=foo", "pv5"), ("pv8=c", "pv8"), ("small=c", "pv1"), ("mode=c", "pv1")]
    {
        assert_eq!(find(&volumes(reserved), "c 1Gi Pending modes=RWO"), expected, "{reserved}");
    }
    // Ours: even when the free one has fewer access modes.
    assert_eq!(find("v1 1Gi Available modes=RWO | v2 1Gi Available ref=c", "c 1Gi Pending modes=RWO"), "v2");
}

#[test]
fn access_modes_are_sets() {
    let volume = AccessModes::of_volume(&volume("v 1G Available modes=RWO,RWX"));
    for (asked, contained) in [("RWX", true), ("RWX,RWO", true), ("ROX", false), ("RWX,ROX", false)] {
        let asked = AccessModes::of_claim(&claim(&format!("c 1G Pending modes={asked}")));
        assert_eq!(volume.contains(asked), contained, "{asked:?}");
    }
}

#[test]
fn a_claim_that_waits_for_its_consumer_takes_no_free_volume() {
    let mut world = super::World::new("c 8G Pending class=wait", VOLUMES).with_class(
        "wait",
        "kubernetes.io/no-provisioner",
        "WaitForFirstConsumer",
        false,
    );
    world.reconcile_claim("c");
    assert!(plan::is_delayed(Some(&world.classes[0])));
    assert_eq!(world.events, ["Normal WaitForFirstConsumer"]);
    assert_eq!(world.volumes_text(), super::World::new("", VOLUMES).volumes_text());
}
