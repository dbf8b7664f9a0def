//! Kubernetes' provision cases (11, 12), as far as they are the controller's when provisioners are separate.
//!
//! Left out, because no provisioner runs inside the controller: 11-1, 11-3, 11-4, 11-7 to 11-13, 11-19, 11-20, 11-23,
//! 11-25 and 12-1 (a plugin that fails, whose volume cannot be saved or cleaned up, mount options and data sources of
//! plugins), and the switch that turns provisioning off. A plugin's class is in 11-18 as what it is here: unknown.

use super::World;

fn world(claim: &str, volumes: &str) -> World {
    World::new(claim, volumes)
        .with_class("gold", "kubernetes.io/gce-pd", "Immediate", false)
        .with_class("external", "vendor.com/my-volume", "Immediate", false)
        .with_class("external-wait", "vendor.com/my-volume-wait", "WaitForFirstConsumer", false)
        .with_class("unknown-internal", "kubernetes.io/unknown", "Immediate", false)
        .with_class("none", "kubernetes.io/no-provisioner", "Immediate", false)
        .with_class("csi", "mydriver.csi.k8s.io", "Immediate", false)
}

#[test]
fn claims_are_handed_to_the_provisioner_of_their_class() {
    let asked = "Normal ExternalProvisioning";
    let failed = "Warning ProvisioningFailed";
    for (case, claim, volumes, claim_after, volumes_after, events) in [
        ("11-2", "c 1Gi Pending class=none", "", "c 1Gi Pending class=none", "", failed),
        (
            "11-6",
            "c 1Gi Pending class=gold",
            "v 1Gi Available class=gold",
            "c 1Gi Bound vol=v class=gold bbc bc",
            "v 1Gi Bound ref=c:u bbc class=gold",
            "",
        ),
        ("11-14", "c 1Gi Pending class=missing", "", "c 1Gi Pending class=missing", "", failed),
        ("11-15", "c 1Gi Pending class=", "", "c 1Gi Pending class=", "", "Normal FailedBinding"),
        ("11-16", "c 1Gi Pending", "", "c 1Gi Pending", "", "Normal FailedBinding"),
        (
            "11-17, 12-3",
            "c 1Gi Pending class=external",
            "",
            "c 1Gi Pending class=external asked=vendor.com/my-volume",
            "",
            asked,
        ),
        (
            "11-18",
            "c 1Gi Pending class=unknown-internal",
            "",
            "c 1Gi Pending class=unknown-internal",
            "",
            failed,
        ),
        (
            "11-21",
            "c 1Gi Pending class=gold",
            "",
            "c 1Gi Pending class=gold asked=pd.csi.storage.gke.io migrated=pd.csi.storage.gke.io",
            "",
            asked,
        ),
        (
            "11-22",
            "c 1Gi Pending class=external",
            "v 1Gi Available class=external",
            "c 1Gi Bound vol=v class=external bbc bc",
            "v 1Gi Bound ref=c:u bbc class=external",
            "",
        ),
        (
            "11-24",
            "c 1Gi Pending class=external-wait node=node1",
            "v 1Gi Available class=external-wait policy=Delete",
            "c 1Gi Pending class=external-wait node=node1 asked=vendor.com/my-volume-wait",
            "v 1Gi Available class=external-wait policy=Delete",
            asked,
        ),
        (
            "11-26",
            "c 1Gi Pending class=csi asked-new=mydriver.csi.k8s.io",
            "",
            "c 1Gi Pending class=csi asked-new=mydriver.csi.k8s.io",
            "",
            asked,
        ),
    ] {
        let mut world = world(claim, volumes);
        world.reconcile_claim("c");
        world.check(case, claim_after, volumes_after, events);
    }
}

#[test]
fn a_claim_is_bound_to_what_its_provisioner_made() {
    for (case, made) in
        [("12-2", "v 1Gi Available class=external"), ("12-4", "v 1Gi Bound ref=c:u class=external bbc")]
    {
        let mut world = world("c 1Gi Pending class=external", "");
        world.settle();
        world.volumes.insert("v".to_owned(), std::sync::Arc::new(super::volume(made)));
        world.settle();
        world.check(
            case,
            "c 1Gi Bound vol=v class=external bbc bc asked=vendor.com/my-volume",
            "v 1Gi Bound ref=c:u bbc class=external",
            "Normal ExternalProvisioning",
        );
    }
}

#[test]
fn a_claim_keeps_saying_whom_it_waits_for_until_it_is_migrated_back() {
    // A migrated annotation of a plugin that is not migrated goes away.
    let mut world = world("c 1Gi Pending class=external asked=vendor.com/my-volume migrated=some.driver", "");
    world.reconcile_claim("c");
    world.check(
        "annealed",
        "c 1Gi Pending class=external asked=vendor.com/my-volume",
        "",
        "Normal ExternalProvisioning",
    );
}
