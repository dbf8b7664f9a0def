//! Rests by themselves, and of pods on an API server whose claims are taken back.

use std::sync::Arc;
use std::time::Duration;

use berth_kube::{Cluster, Key, Kind, Next};
use berth_testkit::EmbeddedServer;
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt as _;
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::super::Scheduler;
use super::Setbacks;
use berth_core::names::SELECTED_NODE;

#[test]
fn rests_double_from_one_second_to_ten() {
    let (pod, mut now) = (Key::new("ns", "p"), Instant::now());
    let mut setbacks = Setbacks::default();
    assert_eq!(setbacks.rest(&pod, Some("1"), now), None, "a new pod does not rest");
    for seconds in [1, 2, 4, 8, 10, 10] {
        let whole = Duration::from_secs(seconds);
        assert_eq!(setbacks.count(&pod, Some("1"), now), whole);
        assert_eq!(setbacks.rest(&pod, Some("1"), now), Some(whole));
        let almost = now + whole - Duration::from_millis(1);
        assert_eq!(setbacks.rest(&pod, Some("1"), almost), Some(Duration::from_millis(1)));
        now += whole;
        assert_eq!(setbacks.rest(&pod, Some("1"), now), None);
    }
    for _ in 0..100 {
        assert_eq!(setbacks.count(&pod, Some("1"), now), Duration::from_secs(10));
    }
}

#[test]
fn another_pod_of_the_name_and_one_that_was_forgotten_begin_anew() {
    let (pod, now) = (Key::new("ns", "p"), Instant::now());
    let first = Duration::from_secs(1);
    let mut setbacks = Setbacks::default();
    setbacks.count(&pod, Some("1"), now);
    setbacks.count(&pod, Some("1"), now);
    assert_eq!(setbacks.rest(&pod, Some("2"), now), None);
    assert_eq!(setbacks.count(&pod, Some("2"), now), first);
    setbacks.forget(&pod);
    assert_eq!(setbacks.rest(&pod, Some("2"), now), None);
    assert_eq!(setbacks.count(&pod, Some("2"), now), first);
}

struct TestCluster {
    cluster: Cluster,
    scheduler: Scheduler,
    _server: EmbeddedServer,
}

impl TestCluster {
    /// One node, and a claim that waits for its pod.
    async fn new() -> Self {
        let server = EmbeddedServer::start().await;
        let cluster = Cluster::new(server.client(), CancellationToken::new());
        let scheduler = Scheduler::new(&cluster);
        let caches = &scheduler.caches;
        tokio::join!(caches.pods.synced(), caches.nodes.synced(), caches.claims.synced());
        tokio::join!(caches.volumes.synced(), caches.classes.synced(), caches.drivers.synced());
        tokio::join!(caches.csi_nodes.synced(), caches.attachments.synced(), caches.capacities.synced());
        let cluster_under_test = Self { cluster, scheduler, _server: server };
        let node: Arc<Node> = cluster_under_test.create(json!({ "metadata": { "name": "a" } })).await;
        let room = json!({ "allocatable": { "cpu": "8", "memory": "16Gi", "pods": "100" } });
        let room = serde_json::from_value(room).unwrap();
        let node = cluster_under_test
            .cluster
            .update_status(node.as_ref(), |node| node.status = Some(room))
            .await
            .unwrap();
        // A new node is tainted until a controller sees that it is ready.
        let untaint = |node: &mut Node| node.spec.get_or_insert_default().taints = None;
        cluster_under_test.cluster.update(node.as_ref(), untaint).await.unwrap();
        cluster_under_test
            .create::<StorageClass>(json!({
                "metadata": { "name": "waits" }, "provisioner": "d", "volumeBindingMode": "WaitForFirstConsumer",
            }))
            .await;
        cluster_under_test
            .create::<PersistentVolumeClaim>(json!({
                "metadata": { "name": "data", "namespace": "default" },
                "spec": {
                    "accessModes": ["ReadWriteOnce"], "storageClassName": "waits",
                    "resources": { "requests": { "storage": "1Gi" } },
                },
            }))
            .await;
        cluster_under_test
    }

    /// What is written here is in the caches at once.
    async fn create<K: Kind>(&self, object: Value) -> Arc<K> {
        let object: K = serde_json::from_value(object).unwrap();
        self.cluster.create(&object).await.unwrap()
    }

    async fn pod(&self, name: &str, claims: &[&str]) -> Key {
        let volumes: Vec<Value> = claims
            .iter()
            .map(|claim| json!({ "name": claim, "persistentVolumeClaim": { "claimName": claim } }))
            .collect();
        let spec = json!({ "containers": [{ "name": "c", "image": "any" }], "volumes": volumes });
        let meta = json!({ "name": name, "namespace": "default" });
        Key::of(self.create::<Pod>(json!({ "metadata": meta, "spec": spec })).await.as_ref())
    }

    async fn reconcile(&self, pod: &Key) -> Next {
        self.scheduler.reconcile(pod).await.unwrap()
    }

    fn selected(&self) -> Option<String> {
        let claim = self.scheduler.caches.claims.get(&Key::new("default", "data")).unwrap();
        claim.annotations().get(SELECTED_NODE).cloned()
    }

    /// As a provisioner does that is out of space.
    async fn take_back(&self) {
        let claim = self.scheduler.caches.claims.get(&Key::new("default", "data")).unwrap();
        let take = |claim: &mut PersistentVolumeClaim| {
            claim.annotations_mut().remove(SELECTED_NODE);
        };
        self.cluster.update(claim.as_ref(), take).await.unwrap();
    }

    fn knows(&self, pod: &Key) -> bool {
        self.scheduler.state().setbacks.by_pod.contains_key(pod)
    }

    fn end_rest(&self, pod: &Key) {
        self.scheduler.state().setbacks.by_pod.get_mut(pod).unwrap().not_before = Instant::now();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_whose_node_is_taken_back_rests_whatever_wakes_it() {
    let cluster_under_test = TestCluster::new().await;
    let pod = cluster_under_test.pod("p", &["data"]).await;
    let mut rests = Vec::new();
    for _ in 0..5 {
        cluster_under_test.reconcile(&pod).await;
        assert_eq!(
            cluster_under_test.selected().as_deref(),
            Some("a"),
            "it is placed at once when it does not rest"
        );
        cluster_under_test.take_back().await;
        let Next::After(rest) = cluster_under_test.reconcile(&pod).await else {
            panic!("the setback is tried again by the queue")
        };
        rests.push(rest.as_secs());
        if rests.len() < 5 {
            cluster_under_test.end_rest(&pod);
        }
    }
    assert_eq!(rests, [1, 2, 4, 8, 10]);
    // The rest is so long that nothing here takes as long.
    for _ in 0..3 {
        let Next::After(rest) = cluster_under_test.reconcile(&pod).await else { panic!("it does not rest") };
        assert!(rest <= Duration::from_secs(10), "{rest:?}");
        assert_eq!(cluster_under_test.selected(), None);
    }
    let another = cluster_under_test.pod("q", &[]).await;
    cluster_under_test.reconcile(&another).await;
    assert!(cluster_under_test.knows(&pod) && !cluster_under_test.knows(&another));

    let gone = cluster_under_test.scheduler.caches.pods.get(&pod).unwrap();
    let (sender, mut receiver) = tokio::sync::watch::channel(());
    cluster_under_test.scheduler.caches.pods.subscribe(move |_, _| {
        sender.send_replace(());
    });
    cluster_under_test.cluster.delete(gone.as_ref()).await.unwrap();
    while cluster_under_test.scheduler.caches.pods.get(&pod).is_some() {
        receiver.changed().await.unwrap();
    }
    assert_eq!(cluster_under_test.reconcile(&pod).await, Next::Done);
    assert!(!cluster_under_test.knows(&pod), "a pod that is gone is forgotten");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_setbacks_of_a_pod_are_forgotten_when_it_has_its_node() {
    let cluster_under_test = TestCluster::new().await;
    let pod = cluster_under_test.pod("p", &[]).await;
    let uid = cluster_under_test.scheduler.caches.pods.get(&pod).unwrap().uid();
    cluster_under_test.scheduler.state().setbacks.count(&pod, uid.as_deref(), Instant::now());
    cluster_under_test.end_rest(&pod);
    assert_eq!(cluster_under_test.reconcile(&pod).await, Next::Done);
    let bound: Pod =
        kube::Api::default_namespaced(cluster_under_test.cluster.client().clone()).get("p").await.unwrap();
    assert_eq!(bound.spec.unwrap().node_name.as_deref(), Some("a"));
    assert!(!cluster_under_test.knows(&pod));
}
