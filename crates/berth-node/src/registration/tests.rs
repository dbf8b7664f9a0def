//! Drivers that join, leave and misbehave.

use std::collections::BTreeMap;

use berth_csi::v1::Topology;
use berth_kube::Key;
use berth_testkit::{EmbeddedServer, FaultKind, RegisteredDriver};
use k8s_openapi::api::storage::v1::{CSIDriverSpec, CSINode};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use super::*;
use crate::machine::Options;

pub(crate) const LONG: Duration = Duration::from_secs(30);

/// A node on the embedded API server, waiting for drivers.
pub(crate) struct World {
    pub(crate) cluster: Cluster,
    pub(crate) server: EmbeddedServer,
    pub(crate) machine: Arc<Machine>,
    pub(crate) drivers: Drivers,
    shutdown: CancellationToken,
}

impl Drop for World {
    fn drop(&mut self) {
        self.shutdown.cancel();
        let top = self.server.directory();
        let _ = berth_host::mount::unmount_below(top);
        for attached in berth_host::loopdev::attached_below(top).unwrap_or_default() {
            let _ = berth_host::loopdev::detach(attached.number);
        }
    }
}

impl World {
    pub(crate) async fn new() -> Self {
        let server = EmbeddedServer::start().await;
        let shutdown = CancellationToken::new();
        let cluster = Cluster::new(server.client(), shutdown.clone());
        let machine = Machine::start(cluster.clone(), Options::new("n", server.directory())).await.unwrap();
        let drivers =
            start(&cluster, machine.clone(), &server.directory().join("plugins_registry"), CALL).unwrap();
        Self { cluster, server, machine, drivers, shutdown }
    }

    pub(crate) fn registry(&self) -> PathBuf {
        self.server.directory().join("plugins_registry")
    }

    pub(crate) fn fake(&self, name: &str, capabilities: &[NodeCapability]) -> RegisteredDriver {
        let fake = RegisteredDriver::new(name, self.server.directory());
        fake.capabilities.lock().node = capabilities.to_vec();
        fake
    }

    /// Waits until the node said something for the nth time; gives the last it said.
    async fn registration_status(&self, fake: &RegisteredDriver, times: usize) -> (bool, String) {
        let mut statuses = fake.statuses();
        let statuses =
            timeout(LONG, statuses.wait_for(|statuses| statuses.len() >= times)).await.unwrap().unwrap();
        let last = statuses.last().unwrap();
        (last.plugin_registered, last.error.clone())
    }

    async fn gone(&self, name: &str) {
        let gone = async {
            loop {
                let changed = self.drivers.changed();
                if self.drivers.get(name).is_none() {
                    return;
                }
                changed.await;
            }
        };
        timeout(LONG, gone).await.unwrap();
    }

    /// Waits for a state of the CSINode as the watch tells it.
    async fn csi_node(&self, is: impl Fn(&CSINode) -> bool + Send + Sync + 'static) {
        let (sender, mut receiver) = watch::channel(false);
        self.cluster.cache::<CSINode>().on_change(move |object| {
            sender.send_replace(is(object));
        });
        timeout(LONG, receiver.wait_for(|is| *is)).await.unwrap().unwrap();
    }
}

/// A topology of one key.
fn topology(key: &str, value: &str) -> Topology {
    Topology { segments: BTreeMap::from([(key.to_owned(), value.to_owned())]) }
}

fn names(object: &CSINode) -> Vec<&str> {
    object.spec.drivers.iter().map(|driver| driver.name.as_str()).collect()
}

#[tokio::test]
async fn a_driver_registers_leaves_and_comes_back() {
    let world = World::new().await;
    let fake = world.fake("a.example", &[NodeCapability::StageUnstageVolume]);
    fake.node_info.lock().accessible_topology = Some(topology("a.example/zone", "z"));
    for round in 1..=2 {
        fake.start(&world.registry(), "a.sock").await;
        assert_eq!(world.registration_status(&fake, round).await, (true, String::new()));
        let driver = world.drivers.get("a.example").unwrap();
        assert!(driver.can(NodeCapability::StageUnstageVolume) && !driver.can(NodeCapability::ExpandVolume));
        let object: Arc<CSINode> = world.cluster.fetch(&Key::cluster("n")).await.unwrap().unwrap();
        assert_eq!(object.spec.drivers[0].node_id, "a.example-node");
        assert_eq!(object.spec.drivers[0].topology_keys, Some(vec!["a.example/zone".to_owned()]));
        fake.stop().await;
        world.gone("a.example").await;
        world.csi_node(|object| names(object).is_empty()).await;
    }
}

#[tokio::test]
async fn a_driver_that_was_there_before_the_node_and_one_in_a_directory_below_register() {
    let world = World::new().await;
    let below = world.registry().join("below");
    let (a, b) = (world.fake("a.example", &[]), world.fake("b.example", &[]));
    std::fs::create_dir(&below).unwrap();
    b.start(&below, "b.sock").await;
    a.start(&world.registry(), ".ignored.sock").await;
    timeout(LONG, world.drivers.wait("b.example")).await.unwrap();
    assert!(world.drivers.get("a.example").is_none());
    // Another node on the same directory finds what is there.
    let drivers = start(&world.cluster, world.machine.clone(), &world.registry(), CALL).unwrap();
    timeout(LONG, drivers.wait("b.example")).await.unwrap();
}

#[tokio::test]
async fn a_hanging_driver_keeps_no_other_waiting() {
    let world = World::new().await;
    let (bad, good) = (world.fake("bad.example", &[]), world.fake("good.example", &[]));
    bad.fail("NodeGetInfo", "", FaultKind::Hang, u32::MAX);
    bad.start(&world.registry(), "bad.sock").await;
    let _silent = std::os::unix::net::UnixListener::bind(world.registry().join("silent.sock")).unwrap();
    good.start(&world.registry(), "good.sock").await;
    timeout(LONG, world.drivers.wait("good.example")).await.unwrap();
    assert!(world.drivers.get("bad.example").is_none());
    // Gone and made anew it works.
    bad.stop().await;
    bad.repair("NodeGetInfo", "");
    bad.start(&world.registry(), "bad.sock").await;
    timeout(LONG, world.drivers.wait("bad.example")).await.unwrap();
}

#[tokio::test]
async fn of_two_of_a_name_only_a_newer_one_is_taken() {
    let world = World::new().await;
    let with_version = |directory: &Path, version: &str, capabilities: &[NodeCapability]| {
        let fake = RegisteredDriver::with_versions("a.example", directory, &[version]);
        fake.capabilities.lock().node = capabilities.to_vec();
        fake
    };
    let first = with_version(world.server.directory(), "1.2.0", &[]);
    first.start(&world.registry(), "first.sock").await;
    assert!(world.registration_status(&first, 1).await.0);
    let other = world.server.directory().join("other");
    std::fs::create_dir(&other).unwrap();
    for version in ["1.2.0", "1.0.0", "0.3.0", "2.0.0"] {
        let rival = with_version(&other, version, &[NodeCapability::ExpandVolume]);
        rival.start(&world.registry(), "rival.sock").await;
        let (registered, error) = world.registration_status(&rival, 1).await;
        assert!(!registered && error.contains("plugin validation failed"), "{version}: {error}");
        rival.stop().await;
        assert!(!world.drivers.get("a.example").unwrap().can(NodeCapability::ExpandVolume));
    }
    let newer = with_version(&other, "1.3.0", &[NodeCapability::ExpandVolume]);
    newer.start(&world.registry(), "newer.sock").await;
    assert!(world.registration_status(&newer, 1).await.0);
    assert!(world.drivers.get("a.example").unwrap().can(NodeCapability::ExpandVolume));
    // The older one leaves; the newer one stays.
    first.stop().await;
    let third = world.fake("third.example", &[]);
    third.start(&world.registry(), "third.sock").await;
    world.csi_node(|object| names(object) == ["a.example", "third.example"]).await;
    assert!(world.drivers.get("a.example").is_some());
}

#[tokio::test]
async fn a_driver_that_does_not_fit_hears_why() {
    let world = World::new().await;
    let fake = world.fake("a.example", &[]);
    fake.node_info.lock().accessible_topology = Some(topology("kubernetes.io/hostname", "elsewhere"));
    fake.start(&world.registry(), "a.sock").await;
    let (registered, error) = world.registration_status(&fake, 1).await;
    assert!(!registered && error.contains("topology value collision"), "{error}");
    assert!(world.drivers.get("a.example").is_none());
    // It is tried again, and taken once it fits.
    fake.node_info.lock().accessible_topology = None;
    timeout(LONG, world.drivers.wait("a.example")).await.unwrap();

    let failing = world.fake("b.example", &[]);
    failing.fail("NodeGetInfo", "", FaultKind::Code(Code::Internal), u32::MAX);
    failing.start(&world.registry(), "b.sock").await;
    let (registered, error) = world.registration_status(&failing, 1).await;
    assert!(!registered && error.contains("code = Internal"), "{error}");
}

#[tokio::test]
async fn limits_are_asked_for_again_and_a_csi_node_that_was_deleted_is_written_again() {
    let world = World::new().await;
    let fake = world.fake("a.example", &[]);
    fake.node_info.lock().max_volumes_per_node = 3;
    fake.start(&world.registry(), "a.sock").await;
    assert!(world.registration_status(&fake, 1).await.0);
    let count = |object: &CSINode| object.spec.drivers.first()?.allocatable.as_ref()?.count;
    world.csi_node(move |object| count(object) == Some(3)).await;
    fake.node_info.lock().max_volumes_per_node = 4;
    world.drivers.refresh("a.example");
    world.csi_node(move |object| count(object) == Some(4)).await;

    let object: Arc<CSINode> = world.cluster.fetch(&Key::cluster("n")).await.unwrap().unwrap();
    let uid = object.metadata.uid.clone();
    world.cluster.delete(&*object).await.unwrap();
    world.csi_node(move |object| object.metadata.uid != uid && count(object) == Some(4)).await;
}

#[tokio::test]
async fn limits_are_asked_for_as_often_as_the_csi_driver_says() {
    let world = World::new().await;
    let fake = world.fake("a.example", &[]);
    fake.node_info.lock().max_volumes_per_node = 1;
    fake.start(&world.registry(), "a.sock").await;
    assert!(world.registration_status(&fake, 1).await.0);
    let mut object = CSIDriver {
        spec: CSIDriverSpec { node_allocatable_update_period_seconds: Some(10), ..CSIDriverSpec::default() },
        ..CSIDriver::default()
    };
    object.metadata.name = Some("a.example".to_owned());
    world.cluster.create(&object).await.unwrap();
    fake.node_info.lock().max_volumes_per_node = 9;
    let count = |object: &CSINode| object.spec.drivers.first()?.allocatable.as_ref()?.count;
    world.csi_node(move |object| count(object) == Some(9)).await;
}
