//! The services over a backend in memory, with real mounts where the node is concerned.
//!
//! Each test of errors is a table whose rows are the rows of the spec's tables.

#![expect(clippy::unnecessary_wraps, reason = "optional fields of messages are made as such")]

mod controller;
mod fake;
mod node;
mod recovery;
mod snapshots;
mod wire;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use berth_csi::v1::{
    self,
    volume_capability::{
        AccessMode, AccessType, BlockVolume, MountVolume, access_mode::Mode as AccessModeNumber,
    },
};
use tonic::{Code, Request};

use self::fake::{Fake, here};
use super::{Config, Mode, Reply, Services};
use crate::{Controller, ControllerBuilder, Driver, NewVolume, Node};

/// How a row of a table differs from a request that is right.
type Change<R> = fn(&mut R);

const NAME: &str = "test.berth.dev";
const SNW: AccessModeNumber = AccessModeNumber::SingleNodeWriter;
const GIB: i64 = 1 << 30;

/// A driver over a fake backend, in a directory whose mounts go away with it.
struct Bench {
    directory: tempfile::TempDir,
    fake: Arc<Fake>,
    driver: Arc<Services>,
}

impl Bench {
    fn new() -> Self {
        Self::with(|_| {}, |_| {})
    }

    fn with(fake: impl FnOnce(&mut Fake), config: impl FnOnce(&mut Config)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut backend = Fake::new(directory.path().join("storage"));
        fake(&mut backend);
        let fake = Arc::new(backend);
        let mut settings = settings(directory.path());
        config(&mut settings);
        let driver = driver(&fake, Mode::All).open(settings).unwrap();
        Self { directory, fake, driver }
    }

    /// With a driver that is composed of less than everything.
    fn composed(compose: impl FnOnce(&Arc<Fake>) -> Driver) -> Self {
        let mut bench = Self::new();
        bench.driver = compose(&bench.fake).open(bench.driver.config.clone()).unwrap();
        bench
    }

    /// The same backend and state under a new driver, as after a kill.
    async fn restart(&mut self) {
        let config = self.driver.config.clone();
        self.driver = driver(&self.fake, Mode::All).open(config).unwrap();
        self.driver.recover().await.unwrap();
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let mounts = berth_host::mount::mounts().unwrap();
        for mount in mounts.iter().rev().filter(|mount| mount.target.starts_with(self.directory.path())) {
            let _ = berth_host::mount::unmount_lazily(&mount.target);
        }
    }
}

/// A driver with everything.
fn driver(fake: &Arc<Fake>, mode: Mode) -> Driver {
    let mut driver = Driver::new(NAME, "1").readiness(fake);
    if mode != Mode::Node {
        driver = driver.controller(controller_part(fake).cloning(fake).placement(fake));
    }
    if mode != Mode::Controller {
        driver = driver.node(node_part(fake).staging(fake).mount_group().topology(here()));
    }
    driver
}

/// A controller with everything but cloning and placement.
fn controller_part(fake: &Arc<Fake>) -> ControllerBuilder<NewVolume> {
    Controller::new(fake)
        .listing(fake)
        .read_only_attachment(fake)
        .capacity(fake)
        .expansion(fake)
        .modification(fake)
        .snapshots(fake)
        .group_snapshots(fake)
        .changed_blocks(fake)
        .health(fake)
}

/// A node with everything but staging, mount groups and a topology.
fn node_part(fake: &Arc<Fake>) -> Node {
    let node = bare_node(fake).stats(fake).expansion(fake).health(fake);
    match fake.max_volumes {
        Some(most) => node.max_volumes(most),
        None => node,
    }
}

fn bare_node(fake: &Arc<Fake>) -> Node {
    Node::binding("here".parse().unwrap(), fake).inline_volumes(fake)
}

fn settings(directory: &Path) -> Config {
    Config {
        state_dir: directory.join("state"),
        private_dir: directory.join("private"),
        default_page: 3,
        longest_listing: None,
        check_volume_lifecycle: false,
    }
}

fn is_mounted(path: &str) -> bool {
    berth_host::mount::is_mount_point(&PathBuf::from(path)).unwrap()
}

fn mounted(mode: AccessModeNumber) -> v1::VolumeCapability {
    let access = AccessType::Mount(MountVolume::default());
    v1::VolumeCapability { access_type: Some(access), access_mode: Some(AccessMode { mode: mode.into() }) }
}

fn raw(mode: AccessModeNumber) -> v1::VolumeCapability {
    let access = AccessType::Block(BlockVolume {});
    v1::VolumeCapability { access_type: Some(access), access_mode: Some(AccessMode { mode: mode.into() }) }
}

fn range(required_bytes: i64, limit_bytes: i64) -> Option<v1::CapacityRange> {
    Some(v1::CapacityRange { required_bytes, limit_bytes })
}

fn pairs(pairs: &[(&str, &str)]) -> std::collections::BTreeMap<String, String> {
    pairs.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect()
}

fn places(node: &str) -> Option<v1::TopologyRequirement> {
    let topology = v1::Topology { segments: pairs(&[("topology.test/node", node)]) };
    Some(v1::TopologyRequirement { requisite: vec![topology], preferred: vec![] })
}

fn create(name: &str) -> v1::CreateVolumeRequest {
    v1::CreateVolumeRequest {
        name: name.into(),
        capacity_range: range(GIB, 0),
        volume_capabilities: vec![mounted(SNW)],
        ..Default::default()
    }
}

/// The answer of a call that has to succeed.
#[track_caller]
fn ok<T>(reply: Reply<T>) -> T {
    reply.unwrap_or_else(|status| panic!("{:?}: {}", status.code(), status.message())).into_inner()
}

/// The message of a call that has to fail, with the code.
#[track_caller]
fn refused<T>(row: &str, reply: Reply<T>, code: Code) -> String {
    match reply {
        Ok(_) => panic!("{row}: succeeded"),
        Err(status) => {
            assert_eq!(status.code(), code, "{row}: {}", status.message());
            status.message().to_owned()
        }
    }
}

fn of<T>(request: T) -> Request<T> {
    Request::new(request)
}

impl Bench {
    /// Makes a volume and returns its id.
    async fn volume(&self, request: v1::CreateVolumeRequest) -> String {
        use v1::controller_server::Controller as _;
        ok(self.driver.create_volume(of(request)).await).volume.unwrap().volume_id
    }

    /// Takes a snapshot and returns its id.
    async fn snapshot(&self, name: &str, source: &str) -> String {
        use v1::controller_server::Controller as _;
        let request = v1::CreateSnapshotRequest {
            name: name.into(),
            source_volume_id: source.into(),
            ..Default::default()
        };
        ok(self.driver.create_snapshot(of(request)).await).snapshot.unwrap().snapshot_id
    }
}
