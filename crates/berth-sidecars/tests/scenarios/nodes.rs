//! A provisioner on every node: each claim is provisioned on one, and deleted where it is.

use std::time::Duration;

use berth_backends::local::Local;
use berth_sidecars::driver::Driver;
use berth_sidecars::provisioner::{Capacity, PerNode};
use berth_testkit::Loops;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt as _;
use kube::api::DeleteParams;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::bench::{DRIVER, Server};
use crate::capacity::{capacity, class, pools, published, start_provisioner, until_published};
use crate::faults::unprotect;

const SELECTED: &str = "volume.kubernetes.io/selected-node";
const FINALIZER: &str = "creating.berth.dev/local.berth.dev_";

/// A node with a driver of its own, and so much in its pool.
struct NodeUnderTest {
    name: &'static str,
    backend: Local,
    driver: Driver,
    _directory: TempDir,
}

impl NodeUnderTest {
    async fn new(name: &'static str, mebibytes: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (backend, driver) = pools(directory.path(), name, &[("fast", mebibytes)]).await;
        Self { name, backend, driver, _directory: directory }
    }

    fn start(&self, server: &Server, change: impl FnOnce(&mut PerNode)) -> Loops {
        let mut node = PerNode {
            base_delay: Duration::from_millis(20),
            max_delay: Duration::from_millis(200),
            ..PerNode::new(self.name)
        };
        change(&mut node);
        start_provisioner(server, &self.driver, |options| {
            options.per_node = Some(node);
            options.capacity = Some(Capacity { immediate: true, ..capacity() });
        })
    }
}

fn selected(node: &str) -> Value {
    json!({ "metadata": { "annotations": { SELECTED: node } } })
}

fn node_of(volume: &PersistentVolume) -> String {
    let affinity = volume.spec.clone().unwrap().node_affinity.unwrap().required.unwrap();
    let expressions = affinity.node_selector_terms[0].match_expressions.clone().unwrap();
    expressions[0].values.clone().unwrap().remove(0)
}

async fn now_and_late(server: &Server) {
    class(server, "late", "fast", json!({})).await;
    server.class("now", json!({ "volumeBindingMode": "Immediate", "parameters": { "kind": "fast" } })).await;
}

async fn gone(server: &Server, volume: &str) {
    server.wait(server.all(), volume, "gone", |volume: Option<&PersistentVolume>| volume.is_none()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_node_that_the_scheduler_selects_provisions_and_deletes_alone() {
    let (server, a, b) = (
        Server::start().await,
        NodeUnderTest::new("node-a", 100).await,
        NodeUnderTest::new("node-b", 100).await,
    );
    now_and_late(&server).await;
    let running = [&a, &b].map(|node| node.start(&server, |_| {}));
    let claim = server.claim("data", "late", selected("node-b")).await;
    let volume = server.provisioned(&claim).await;
    assert_eq!(node_of(&volume), "node-b");
    assert_eq!((a.backend.volume_count(), b.backend.volume_count()), (0, 1));
    let identity = &volume.spec.clone().unwrap().csi.unwrap().volume_attributes.unwrap()["storage.kubernetes.io/csiProvisionerIdentity"];
    assert!(identity.ends_with("-local.berth.dev-node-b"), "{identity}");
    until_published(
        &server,
        &[
            published("late", "node-a", "100Mi"),
            published("now", "node-a", "100Mi"),
            published("late", "node-b", "84Mi"),
            published("now", "node-b", "84Mi"),
        ],
    )
    .await
    .iter()
    .for_each(|object| {
        let node = object.node_topology.clone().unwrap().match_labels.unwrap().into_values().next().unwrap();
        assert_eq!(object.labels()["csi.storage.k8s.io/managed-by"], format!("external-provisioner-{node}"));
    });

    server.bind("data").await;
    server.claims().delete("data", &DeleteParams::default()).await.unwrap();
    server.release(&volume.name_any()).await;
    gone(&server, &volume.name_any()).await;
    assert_eq!(b.backend.volume_count(), 0);
    for provisioner in running {
        provisioner.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_binds_at_once_is_provisioned_on_one_node_that_has_the_room() {
    let (server, a, b) = (
        Server::start().await,
        NodeUnderTest::new("node-a", 100).await,
        NodeUnderTest::new("node-b", 10).await,
    );
    now_and_late(&server).await;
    let c = NodeUnderTest::new("node-c", 100).await;
    let running = [&a, &b, &c].map(|node| node.start(&server, |_| {}));
    for number in 0..6 {
        let claim = server.claim(&format!("data-{number}"), "now", json!({})).await;
        let volume = server.provisioned(&claim).await;
        let claim = server.claims().get(&claim.name_any()).await.unwrap();
        assert_eq!(claim.annotations()[SELECTED], node_of(&volume), "whoever was selected made it");
        assert_ne!(node_of(&volume), "node-b", "too small");
    }
    assert_eq!(a.backend.volume_count() + c.backend.volume_count(), 6);
    assert_eq!(b.backend.volume_count(), 0);
    for provisioner in running {
        provisioner.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_finds_no_room_anywhere_waits_and_goes_on_when_there_is_some() {
    let (server, a) = (Server::start().await, NodeUnderTest::new("node-a", 20).await);
    now_and_late(&server).await;
    let running = a.start(&server, |_| {});
    let first = server.claim("first", "now", json!({})).await;
    let volume = server.provisioned(&first).await.name_any();
    let second = server.claim("second", "now", json!({})).await;
    until_published(&server, &[published("late", "node-a", "4Mi"), published("now", "node-a", "4Mi")]).await;
    let waiting = server.claims().get("second").await.unwrap();
    assert!(!waiting.annotations().contains_key(SELECTED) && waiting.finalizers().len() == 1, "{waiting:?}");
    server.bind("first").await;
    server.claims().delete("first", &DeleteParams::default()).await.unwrap();
    server.release(&volume).await;
    server.provisioned(&second).await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_has_no_room_after_all_gives_the_claim_back_to_the_scheduler() {
    let (server, a) = (Server::start().await, NodeUnderTest::new("node-a", 10).await);
    now_and_late(&server).await;
    let running = a.start(&server, |_| {});
    server.claim("data", "late", selected("node-a")).await;
    server.event("ProvisioningFailed", "code = ResourceExhausted").await;
    let given_back = |claim: Option<&PersistentVolumeClaim>| {
        claim.is_some_and(|claim| {
            let has_finalizer = claim.finalizers().iter().any(|finalizer| finalizer.starts_with(FINALIZER));
            !claim.annotations().contains_key(SELECTED) && !has_finalizer
        })
    };
    server.wait(server.claims(), "data", "given back", given_back).await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clone_is_made_on_the_node_that_has_its_source_whatever_node_was_selected() {
    let (server, a, b) = (
        Server::start().await,
        NodeUnderTest::new("node-a", 100).await,
        NodeUnderTest::new("node-b", 100).await,
    );
    now_and_late(&server).await;
    let running = [&a, &b].map(|node| node.start(&server, |_| {}));
    let source = server.claim("data", "late", selected("node-a")).await;
    server.provisioned(&source).await;
    server.bind("data").await;
    let copy = json!({ "spec": { "dataSource": { "kind": "PersistentVolumeClaim", "name": "data" } } });
    let mut wrongly = selected("node-b");
    wrongly["spec"] = copy["spec"].clone();
    for (name, class, change) in [("wrongly", "late", wrongly), ("at-once", "now", copy)] {
        let claim = server.claim(name, class, change).await;
        let volume = server.provisioned(&claim).await;
        assert_eq!(node_of(&volume), "node-a", "{name}");
        let claim = server.claims().get(name).await.unwrap();
        assert_eq!(claim.annotations()[SELECTED], "node-a", "{name}");
    }
    server
        .event("Provisioning", "Selected node \"node-a\" for the volume, because the claim's source is there")
        .await;
    assert_eq!((a.backend.volume_count(), b.backend.volume_count()), (3, 0));
    for provisioner in running {
        provisioner.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clone_for_which_its_node_has_no_room_waits_there() {
    let (server, a) = (Server::start().await, NodeUnderTest::new("node-a", 30).await);
    now_and_late(&server).await;
    let running = a.start(&server, |_| {});
    let source = server.claim("data", "late", selected("node-a")).await;
    let volume = server.provisioned(&source).await.name_any();
    server.bind("data").await;
    let mut copy = selected("node-a");
    copy["spec"] = json!({ "dataSource": { "kind": "PersistentVolumeClaim", "name": "data" } });
    server.claim("copy", "late", copy).await;
    server.event("ProvisioningFailed", "code = ResourceExhausted").await;
    let waiting = server.claims().get("copy").await.unwrap();
    assert_eq!(waiting.annotations()[SELECTED], "node-a", "no other node has the source of {volume}");
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_leaves_claims_of_others_alone_and_classes_that_bind_at_once_if_configured_so() {
    let (server, a) = (Server::start().await, NodeUnderTest::new("node-a", 100).await);
    now_and_late(&server).await;
    let running = a.start(&server, |node| node.immediate = false);
    server.claim("free", "now", json!({})).await;
    server.claim("theirs", "late", selected("node-b")).await;
    let ours = server.claim("ours", "late", selected("node-a")).await;
    server.provisioned(&ours).await;
    for name in ["free", "theirs"] {
        let claim = server.claims().get(name).await.unwrap();
        assert_eq!(claim.finalizers(), ["kubernetes.io/pvc-protection"], "{name}");
    }
    assert!(!server.claims().get("free").await.unwrap().annotations().contains_key(SELECTED));
    assert_eq!(a.backend.volume_count(), 1);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_node_has_begun_is_undone_by_that_node_and_no_other() {
    let (server, a, b) = (
        Server::start().await,
        NodeUnderTest::new("node-a", 100).await,
        NodeUnderTest::new("node-b", 100).await,
    );
    now_and_late(&server).await;
    // Node b died after its call, and before it could tell.
    let mut begun = selected("node-b");
    begun["metadata"]["finalizers"] = json!([format!("{FINALIZER}node-b")]);
    let claim = server.claim("data", "late", begun).await;
    let request = berth_csi::v1::CreateVolumeRequest {
        name: format!("pvc-{}", claim.uid().unwrap()),
        capacity_range: Some(berth_csi::v1::CapacityRange { required_bytes: 16 << 20, limit_bytes: 0 }),
        volume_capabilities: vec![berth_csi::kubernetes::capability(
            berth_csi::kubernetes::access_mode(&["ReadWriteOnce".to_owned()], true).unwrap(),
            berth_csi::kubernetes::Access::Mount { fs_type: "", flags: &[], group: None },
        )],
        parameters: [("kind".to_owned(), "fast".to_owned())].into(),
        ..berth_csi::v1::CreateVolumeRequest::default()
    };
    b.driver.call(Duration::from_secs(60), request).await.unwrap();
    server.claims().delete("data", &DeleteParams::default()).await.unwrap();
    unprotect(&server, "data").await;

    let on_a = a.start(&server, |_| {});
    let other = server.claim("other", "late", selected("node-a")).await;
    server.provisioned(&other).await;
    let kept = server.claims().get("data").await.unwrap();
    assert_eq!(kept.finalizers(), [format!("{FINALIZER}node-b")], "node a lets it be");
    assert_eq!(b.backend.volume_count(), 1);
    let on_b = b.start(&server, |_| {});
    server
        .wait(server.claims(), "data", "gone", |claim: Option<&PersistentVolumeClaim>| claim.is_none())
        .await;
    assert_eq!((a.backend.volume_count(), b.backend.volume_count()), (1, 0));
    on_a.stop().await;
    on_b.stop().await;
    assert_eq!(DRIVER, "local.berth.dev", "as the finalizer has it");
}
