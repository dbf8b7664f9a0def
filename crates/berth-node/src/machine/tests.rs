//! The node's objects on the embedded API server.

use std::sync::atomic::{AtomicUsize, Ordering};

use berth_testkit::EmbeddedServer;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::AttachedVolume;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::*;

const LONG: Duration = Duration::from_secs(30);

struct World {
    cluster: Cluster,
    server: EmbeddedServer,
    shutdown: CancellationToken,
}

impl Drop for World {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

impl World {
    async fn new() -> Self {
        let server = EmbeddedServer::start().await;
        let shutdown = CancellationToken::new();
        Self { cluster: Cluster::new(server.client(), shutdown.clone()), server, shutdown }
    }

    async fn start(&self) -> Arc<Machine> {
        Machine::start(self.cluster.clone(), Options::new("n", self.server.directory())).await.unwrap()
    }

    async fn node(&self) -> Arc<Node> {
        self.cluster.fetch(&Key::cluster("n")).await.unwrap().unwrap()
    }

    async fn csi_node(&self) -> Arc<CSINode> {
        self.cluster.fetch(&Key::cluster("n")).await.unwrap().unwrap()
    }

    /// Waits for a state of the Node as the watch tells it.
    async fn until(&self, is: impl Fn(&Node) -> bool + Send + Sync + 'static) {
        let (sender, mut receiver) = watch::channel(false);
        self.cluster.cache::<Node>().on_change(move |node| {
            if is(node) {
                sender.send_replace(true);
            }
        });
        timeout(LONG, receiver.wait_for(|is| *is)).await.unwrap().unwrap();
    }

    async fn attach(&self, names: &[&str]) {
        let attached = names
            .iter()
            .map(|name| AttachedVolume { name: (*name).to_owned(), device_path: format!("/dev/{name}") });
        let attached: Vec<_> = attached.collect();
        self.cluster
            .update_status(&*self.node().await, |node| {
                node.status.get_or_insert_default().volumes_attached = Some(attached);
            })
            .await
            .unwrap();
    }
}

fn driver(node_id: &str) -> DriverInfo {
    let topology = BTreeMap::from([("topology.example/zone".to_owned(), "a".to_owned())]);
    DriverInfo { name: "d.example".to_owned(), node_id: node_id.to_owned(), max_volumes: 5, topology }
}

#[tokio::test]
async fn a_new_node_is_ready_with_its_csi_node_and_lease() {
    let world = World::new().await;
    let machine = world.start().await;
    let node = world.node().await;
    assert!(status::is_ready(&node));
    let status = node.status.as_ref().unwrap();
    assert!(status.allocatable.as_ref().unwrap().contains_key("ephemeral-storage"));
    assert_eq!(status.node_info.as_ref().unwrap().operating_system, "linux");
    assert!(machine.facts.allocatable.memory > 0);
    let csi_node = world.csi_node().await;
    assert!(csi_node::is_owned(&csi_node, &node));
    assert!(csi_node.metadata.owner_references.as_ref().unwrap()[0].controller.is_none());
    let lease = timeout(LONG, async {
        let (sender, mut receiver) = watch::channel(None);
        world.cluster.cache::<Lease>().on_change(move |lease| {
            sender.send_replace(Some(lease.clone()));
        });
        receiver.wait_for(Option::is_some).await.unwrap().clone().unwrap()
    });
    let lease = lease.await.unwrap();
    let spec = lease.spec.as_ref().unwrap();
    assert_eq!((spec.holder_identity.as_deref(), spec.lease_duration_seconds), (Some("n"), Some(40)));
    assert_eq!(lease.metadata.namespace.as_deref(), Some("kube-node-lease"));
}

#[tokio::test]
async fn many_volumes_reported_at_the_same_time_share_writes() {
    let world = World::new().await;
    let machine = world.start().await;
    let writes = Arc::new(AtomicUsize::new(0));
    let counted = writes.clone();
    world.cluster.cache::<Node>().on_change(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    let names: Vec<String> = (0..100).map(|number| format!("kubernetes.io/csi/d^{number}")).collect();
    let reports: Vec<_> = names
        .iter()
        .map(|name| {
            let (machine, name) = (machine.clone(), name.clone());
            tokio::spawn(async move { machine.in_use(&name).await })
        })
        .collect();
    for report in reports {
        timeout(LONG, report).await.unwrap().unwrap().unwrap();
    }
    assert_eq!(in_use_of(&*world.node().await).len(), 100);
    assert!(writes.load(Ordering::Relaxed) < 20, "{writes:?} writes for 100 volumes");

    machine.not_in_use(&names[7]);
    let gone = names[7].clone();
    world.until(move |node| !in_use_of(node).contains(&gone) && in_use_of(node).len() == 99).await;
    machine.only_in_use([names[1].clone()]);
    let left = vec![names[1].clone()];
    world.until(move |node| in_use_of(node) == left).await;
}

#[tokio::test]
async fn an_attached_volume_is_heard_of() {
    let world = World::new().await;
    let machine = world.start().await;
    let mut attached = machine.attached.subscribe();
    world.attach(&["a"]).await;
    world.attach(&["a", "b"]).await;
    timeout(LONG, attached.wait_for(|attached| attached.contains("b"))).await.unwrap().unwrap();
    assert!(machine.is_attached("a") && !machine.is_attached("c"));
    // Its own writes leave what the controller wrote.
    machine.in_use("x").await.unwrap();
    assert_eq!(attached_of(&*world.node().await).len(), 2);
}

#[tokio::test]
async fn a_restarted_node_keeps_what_it_had_and_replaces_a_foreign_csi_node() {
    let world = World::new().await;
    let machine = world.start().await;
    machine.in_use("kept").await.unwrap();
    let csi_node = world.csi_node().await;
    let theirs = |object: &mut CSINode| {
        object.metadata.owner_references.as_mut().unwrap()[0].uid = "another".to_owned();
    };
    world.cluster.update(&*csi_node, theirs).await.unwrap();

    let again = world.start().await;
    assert_eq!(in_use_of(&*world.node().await), ["kept"]);
    assert!(csi_node::is_owned(&*world.csi_node().await, &*world.node().await));
    again.in_use("new").await.unwrap();
    assert_eq!(in_use_of(&*world.node().await), ["kept", "new"]);
}

#[tokio::test]
async fn a_node_that_was_deleted_comes_back() {
    let world = World::new().await;
    let _machine = world.start().await;
    let node = world.node().await;
    world.cluster.delete(&*node).await.unwrap();
    let uid = node.metadata.uid.clone();
    world.until(move |node| node.metadata.uid != uid && status::is_ready(node)).await;
}

#[tokio::test]
async fn drivers_are_announced_changed_and_withdrawn() {
    let world = World::new().await;
    let machine = world.start().await;
    machine.announce(&driver("one")).await.unwrap();
    // Announced again with another id, which Kubernetes lets nobody change in place.
    for id in ["one", "two"] {
        machine.announce(&driver(id)).await.unwrap();
        let drivers = world.csi_node().await.spec.drivers.clone();
        assert_eq!((drivers.len(), drivers[0].node_id.as_str()), (1, id));
        assert_eq!(drivers[0].topology_keys, Some(vec!["topology.example/zone".to_owned()]));
        assert_eq!(drivers[0].allocatable.as_ref().unwrap().count, Some(5));
    }
    let node = world.node().await;
    assert_eq!(node.metadata.labels.as_ref().unwrap()["topology.example/zone"], "a");
    assert_eq!(
        node.metadata.annotations.as_ref().unwrap()["csi.volume.kubernetes.io/nodeid"],
        r#"{"d.example":"two"}"#
    );
    let mut elsewhere = driver("three");
    elsewhere.topology.insert("topology.example/zone".to_owned(), "b".to_owned());
    let error = machine.announce(&elsewhere).await.unwrap_err();
    assert!(error.chain().contains("topology value collision"), "{}", error.chain());
    assert!(machine.announce(&driver("")).await.is_err());

    machine.withdraw("d.example").await.unwrap();
    assert!(world.csi_node().await.spec.drivers.is_empty());
    let node = world.node().await;
    assert!(!node.metadata.annotations.as_ref().unwrap().contains_key("csi.volume.kubernetes.io/nodeid"));
    assert!(node.metadata.labels.as_ref().unwrap().contains_key("topology.example/zone"));
}
