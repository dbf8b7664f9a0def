//! How much room there is, told to the scheduler: by whom, of what, when it changes, and what is too much of it.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use berth_backends::local::{self, Kind, Local};
use berth_backends::services::{Config, Mode};
use berth_core::Capacity as Size;
use berth_csi::{CallLayer, Metrics};
use berth_sidecars::driver::Driver;
use berth_sidecars::provisioner::{self, Capacity, Options, Owner};
use berth_testkit::{Loops, PATIENCE, patch};
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, Pod};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, CSIStorageCapacity, StorageClass};
use kube::api::{DeleteParams, PostParams};
use kube::runtime::watcher;
use kube::{Api, ResourceExt as _};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};

use crate::bench::{DRIVER, NODE, RETRY, Server};

/// Nothing is asked by the clock while a test runs.
const NEVER: Duration = Duration::from_secs(3600);
const KEY: &str = "topology.berth.dev/node";

/// Berth's local driver on a node, with pools of fixed sizes, so that nobody else's files count.
pub(crate) async fn pools(directory: &Path, node: &str, pools: &[(&str, u64)]) -> (Local, Driver) {
    let mut config = local::Config::new(directory.join("data"), node.parse().unwrap());
    config.kind = Some(Kind::Dir);
    config.pools = pools.iter().map(|(name, size)| ((*name).to_owned(), Size::mebibytes(*size))).collect();
    let backend = Local::open(config).await.unwrap();
    let driver = backend.driver(DRIVER, "test", Mode::All).open(Config::new(directory)).unwrap();
    let calls = berth_csi::in_process(driver.routes(), &CallLayer::new(Metrics::unregistered(DRIVER), None));
    (backend, Driver::in_process(calls))
}

/// Starts a provisioner with other options.
pub(crate) fn start_provisioner(
    server: &Server,
    driver: &Driver,
    change: impl FnOnce(&mut Options),
) -> Loops {
    let mut options = Options { retry: RETRY, ..Options::default() };
    change(&mut options);
    Loops::new(&server.client).with(|cluster| provisioner::run(cluster, driver.clone(), options))
}

/// Capacity objects in `default`, refreshed by what happens alone.
pub(crate) fn capacity() -> Capacity {
    Capacity { poll: NEVER, ..Capacity::new("default") }
}

/// A class of a pool that waits for the first consumer.
pub(crate) async fn class(server: &Server, name: &str, pool: &str, change: Value) {
    let mut late = json!({ "volumeBindingMode": "WaitForFirstConsumer", "parameters": { "kind": pool } });
    berth_testkit::merge(&mut late, change);
    server.class(name, late).await;
}

fn objects(server: &Server) -> Api<CSIStorageCapacity> {
    Api::namespaced(server.client.clone(), "default")
}

/// The values of an object: class, value of its topology, capacity.
type PublishedCapacity = (String, String, String);

pub(crate) fn published(class: &str, node: &str, capacity: &str) -> PublishedCapacity {
    (class.to_owned(), node.to_owned(), capacity.to_owned())
}

fn values_of(object: &CSIStorageCapacity) -> PublishedCapacity {
    let topology = object.node_topology.clone().unwrap_or_default().match_labels.unwrap_or_default();
    let capacity = object.capacity.clone().map(|size| size.0).unwrap_or_default();
    (object.storage_class_name.clone(), topology.into_values().collect(), capacity)
}

/// Waits until the objects that nobody else made tell exactly this.
pub(crate) async fn until_published(
    server: &Server,
    expected: &[PublishedCapacity],
) -> Vec<CSIStorageCapacity> {
    let mut expected = expected.to_vec();
    expected.sort();
    let mut there: BTreeMap<String, CSIStorageCapacity> = BTreeMap::new();
    let waiting = async {
        let mut events = std::pin::pin!(watcher(objects(server), watcher::Config::default()));
        let mut listed = false;
        while let Some(event) = events.next().await {
            match event.unwrap() {
                watcher::Event::Init => {}
                watcher::Event::InitDone => listed = true,
                watcher::Event::InitApply(object) | watcher::Event::Apply(object) => {
                    there.insert(object.name_any(), object);
                }
                watcher::Event::Delete(object) => {
                    there.remove(&object.name_any());
                }
            }
            let ours = |object: &&CSIStorageCapacity| object.name_any().starts_with("csisc-");
            let mut now: Vec<_> = there.values().filter(ours).map(values_of).collect();
            now.sort();
            if listed && now == expected {
                return;
            }
        }
    };
    let in_time = tokio::time::timeout(PATIENCE, Box::pin(waiting)).await;
    let now: Vec<_> = there.values().map(values_of).collect();
    assert!(in_time.is_ok(), "never told {expected:?}, but {now:?}");
    there.into_values().collect()
}

/// Waits for a line of the metrics: an object is there a moment before whoever made it hears of it.
async fn until_measured(registry: &Registry, line: &str) {
    let mut text = String::new();
    let waiting = async {
        while !text.contains(line) {
            tokio::task::yield_now().await;
            text.clear();
            prometheus_client::encoding::text::encode(&mut text, registry).unwrap();
        }
    };
    let in_time = tokio::time::timeout(PATIENCE, waiting).await;
    assert!(in_time.is_ok(), "{line} is not in\n{text}");
}

async fn make(server: &Server, object: Value) -> CSIStorageCapacity {
    objects(server).create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_class_that_waits_has_one_object_per_segment_with_labels_owner_and_limit() {
    let (server, directory) = (Server::start().await, tempfile::tempdir().unwrap());
    let (_backend, driver) = pools(directory.path(), NODE, &[("fast", 100), ("slow", 300)]).await;
    let pod = json!({ "metadata": { "name": "driver-0" },
        "spec": { "containers": [{ "name": "c", "image": "i" }] } });
    let pods: Api<Pod> = Api::namespaced(server.client.clone(), "default");
    let pod = pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
    class(&server, "late", "fast", json!({})).await;
    class(&server, "same", "fast", json!({ "parameters": { "csi.storage.k8s.io/fstype": "xfs" } })).await;
    class(&server, "other", "slow", json!({})).await;
    server.class("now", json!({ "volumeBindingMode": "Immediate", "parameters": { "kind": "fast" } })).await;
    class(&server, "foreign", "fast", json!({ "provisioner": "other.example.com" })).await;
    let mut registry = Registry::default();
    let metrics = provisioner::Metrics::register(&mut registry);
    let running = start_provisioner(&server, &driver, |options| {
        options.metrics = metrics;
        let owner = Some(Owner { pod: "driver-0".to_owned(), level: 0 });
        options.capacity = Some(Capacity { owner, ..capacity() });
    });
    let there = until_published(
        &server,
        &[
            published("late", NODE, "100Mi"),
            published("same", NODE, "100Mi"),
            published("other", NODE, "300Mi"),
        ],
    )
    .await;
    for object in &there {
        let topology = object.node_topology.clone().unwrap();
        assert_eq!(topology.match_labels.unwrap()[KEY], NODE);
        assert_eq!(object.labels()["csi.storage.k8s.io/drivername"], DRIVER);
        assert_eq!(object.labels()["csi.storage.k8s.io/managed-by"], "external-provisioner");
        assert_eq!(object.maximum_volume_size, object.capacity);
        let owner = &object.owner_references()[0];
        assert_eq!((owner.kind.as_str(), Some(&owner.uid)), ("Pod", pod.uid().as_ref()));
        assert_eq!(owner.controller, Some(true));
    }
    for line in [
        "csistoragecapacities_desired_goal 3",
        "csistoragecapacities_desired_current 3",
        "csistoragecapacities_obsolete 0",
    ] {
        until_measured(&registry, line).await;
    }
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_that_is_made_or_deleted_changes_what_is_published_without_waiting_for_the_clock() {
    let (server, directory) = (Server::start().await, tempfile::tempdir().unwrap());
    let (_backend, driver) = pools(directory.path(), NODE, &[("fast", 100)]).await;
    class(&server, "late", "fast", json!({})).await;
    server.class("now", json!({ "volumeBindingMode": "Immediate", "parameters": { "kind": "fast" } })).await;
    let mut registry = Registry::default();
    let metrics = provisioner::Metrics::register(&mut registry);
    let running = start_provisioner(&server, &driver, |options| {
        options.metrics = metrics;
        options.capacity = Some(Capacity { immediate: true, ..capacity() });
    });
    until_published(&server, &[published("late", NODE, "100Mi"), published("now", NODE, "100Mi")]).await;
    let claim = server.claim("data", "now", json!({})).await;
    let volume = server.provisioned(&claim).await.name_any();
    until_published(&server, &[published("late", NODE, "84Mi"), published("now", NODE, "84Mi")]).await;

    server.bind("data").await;
    server.claims().delete("data", &DeleteParams::default()).await.unwrap();
    server.release(&volume).await;
    server.wait(server.all(), &volume, "gone", |volume: Option<&PersistentVolume>| volume.is_none()).await;
    until_published(&server, &[published("late", NODE, "100Mi"), published("now", NODE, "100Mi")]).await;
    running.stop().await;
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    for line in [
        "controller_persistentvolumeclaim_provision_total{class=\"now\",source=\"\"} 1",
        "controller_persistentvolumeclaim_provision_duration_seconds_count{class=\"now\",source=\"\"} 1",
        "controller_persistentvolume_delete_total{class=\"now\"} 1",
        "controller_persistentvolume_delete_duration_seconds_count{class=\"now\"} 1",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    assert!(!text.contains("csistoragecapacities"), "nobody publishes any more");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn classes_and_places_that_come_and_go_bring_and_take_their_objects() {
    let (server, directory) = (Server::start().await, tempfile::tempdir().unwrap());
    let (_backend, driver) = pools(directory.path(), NODE, &[("fast", 100)]).await;
    let running = start_provisioner(&server, &driver, |options| options.capacity = Some(capacity()));
    class(&server, "one", "fast", json!({})).await;
    until_published(&server, &[published("one", NODE, "100Mi")]).await;
    class(&server, "two", "fast", json!({})).await;
    until_published(&server, &[published("one", NODE, "100Mi"), published("two", NODE, "100Mi")]).await;
    server.all::<StorageClass>().delete("one", &DeleteParams::default()).await.unwrap();
    until_published(&server, &[published("two", NODE, "100Mi")]).await;

    // A second node, where this driver has nothing; it counts once its label is there, too.
    server.create::<Node>(json!({ "metadata": { "name": "node-b" } })).await;
    let own = json!({ "name": DRIVER, "nodeID": "node-b", "topologyKeys": [KEY] });
    server.create::<CSINode>(json!({ "metadata": { "name": "node-b" }, "spec": { "drivers": [own] } })).await;
    patch(&server.all::<Node>(), "node-b", json!({ "metadata": { "labels": { KEY: "node-b" } } })).await;
    until_published(&server, &[published("two", NODE, "100Mi"), published("two", "node-b", "0")]).await;
    patch(&server.all::<Node>(), "node-b", json!({ "metadata": { "labels": { KEY: "moved" } } })).await;
    until_published(&server, &[published("two", NODE, "100Mi"), published("two", "moved", "0")]).await;
    patch(&server.all::<CSINode>(), "node-b", json!({ "spec": { "drivers": [] } })).await;
    until_published(&server, &[published("two", NODE, "100Mi")]).await;
    server.all::<Node>().delete(NODE, &DeleteParams::default()).await.unwrap();
    until_published(&server, &[]).await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_predecessor_left_is_taken_over_and_what_is_too_much_is_deleted() {
    let (server, directory) = (Server::start().await, tempfile::tempdir().unwrap());
    let (_backend, driver) = pools(directory.path(), NODE, &[("fast", 100)]).await;
    class(&server, "late", "fast", json!({})).await;
    let object = |name: &str, class: &str, manager: &str, topology: Value| {
        json!({
            "metadata": { "name": name, "labels": {
                "csi.storage.k8s.io/drivername": DRIVER, "csi.storage.k8s.io/managed-by": manager,
            } },
            "storageClassName": class, "nodeTopology": topology, "capacity": "1Mi",
        })
    };
    let ours = "external-provisioner";
    let here = || json!({ "matchLabels": { KEY: NODE } });
    let kept = make(&server, object("csisc-a", "late", ours, here())).await;
    make(&server, object("csisc-gone", "gone", ours, here())).await;
    make(&server, object("csisc-elsewhere", "late", ours, json!({ "matchLabels": { KEY: "elsewhere" } })))
        .await;
    make(
        &server,
        object(
            "csisc-rule",
            "late",
            ours,
            json!({ "matchExpressions": [{ "key": KEY, "operator": "Exists" }] }),
        ),
    )
    .await;
    make(&server, object("csisc-nowhere", "late", ours, Value::Null)).await;
    make(&server, object("theirs", "gone", "external-provisioner-node-x", here())).await;
    let running = start_provisioner(&server, &driver, |options| options.capacity = Some(capacity()));
    let there = until_published(&server, &[published("late", NODE, "100Mi")]).await;
    assert_eq!(there.len(), 2, "another publisher's object stays");
    assert!(there.iter().any(|object| object.uid() == kept.uid()), "taken over, not made anew");

    // A second for the same, made by whatever mistake; and then the one that is left is deleted by somebody.
    make(&server, object("csisc-b", "late", ours, here())).await;
    let there = until_published(&server, &[published("late", NODE, "100Mi")]).await;
    assert!(there.iter().any(|object| object.uid() == kept.uid()), "the older stays");
    objects(&server).delete("csisc-a", &DeleteParams::default()).await.unwrap();
    let again = server
        .wait(objects(&server), "csisc-a", "gone", |object: Option<&CSIStorageCapacity>| object.is_none())
        .await;
    assert!(again.is_none());
    until_published(&server, &[published("late", NODE, "100Mi")]).await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_class_that_the_driver_refuses_keeps_no_other_from_being_published() {
    let (server, directory) = (Server::start().await, tempfile::tempdir().unwrap());
    let (_backend, driver) = pools(directory.path(), NODE, &[("fast", 100)]).await;
    class(&server, "bad", "no-such-pool", json!({})).await;
    class(&server, "good", "fast", json!({})).await;
    let running = start_provisioner(&server, &driver, |options| options.capacity = Some(capacity()));
    until_published(&server, &[published("good", NODE, "100Mi")]).await;
    // Later ones are told, too: the one that fails waits for its turn like the others.
    class(&server, "later", "fast", json!({})).await;
    until_published(&server, &[published("good", NODE, "100Mi"), published("later", NODE, "100Mi")]).await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refresh_finds_changes_without_an_event() {
    let (server, directory) = (Server::start().await, tempfile::tempdir().unwrap());
    let (_backend, driver) = pools(directory.path(), NODE, &[("fast", 100)]).await;
    class(&server, "late", "fast", json!({})).await;
    let poll = Duration::from_millis(50);
    let running = start_provisioner(&server, &driver, |options| {
        options.capacity = Some(Capacity { poll, ..capacity() });
    });
    until_published(&server, &[published("late", NODE, "100Mi")]).await;
    let request = berth_csi::v1::CreateVolumeRequest {
        name: "behind-everybodys-back".to_owned(),
        capacity_range: Some(berth_csi::v1::CapacityRange { required_bytes: 30 << 20, limit_bytes: 0 }),
        volume_capabilities: vec![berth_csi::kubernetes::capability(
            berth_csi::kubernetes::access_mode(&["ReadWriteOnce".to_owned()], false).unwrap(),
            berth_csi::kubernetes::Access::Mount { fs_type: "", flags: &[], group: None },
        )],
        parameters: [("kind".to_owned(), "fast".to_owned())].into(),
        ..berth_csi::v1::CreateVolumeRequest::default()
    };
    driver.call(PATIENCE, request).await.unwrap();
    until_published(&server, &[published("late", NODE, "70Mi")]).await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn if_the_driver_object_decides_capacity_is_published_while_it_says_so() {
    let (server, directory) = (Server::start().await, tempfile::tempdir().unwrap());
    let (_backend, driver) = pools(directory.path(), NODE, &[("fast", 100)]).await;
    class(&server, "late", "fast", json!({})).await;
    let object = json!({ "metadata": { "name": DRIVER }, "spec": { "storageCapacity": false } });
    server.create::<CSIDriver>(object).await;
    let running = start_provisioner(&server, &driver, |options| {
        options.capacity = Some(Capacity { only_if_announced: true, ..capacity() });
    });
    let say = |said: bool| json!({ "spec": { "storageCapacity": said } });
    patch(&server.all::<CSIDriver>(), DRIVER, say(true)).await;
    until_published(&server, &[published("late", NODE, "100Mi")]).await;
    patch(&server.all::<CSIDriver>(), DRIVER, say(false)).await;
    until_published(&server, &[]).await;
    running.stop().await;
}
