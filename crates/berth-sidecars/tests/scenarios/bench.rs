//! A cluster and a driver to run the components on, and words for what the tests do and wait for.

use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use berth_backends::local::{self, Kind, Local};
use berth_backends::services::{Config, Mode};
use berth_csi::{CallLayer, Metrics};
use berth_kube::Backoff;
use berth_sidecars::driver::Driver;
use berth_sidecars::{attacher, provisioner, resizer};
use berth_testkit::{FakeDriver, Loops, TestCluster, merge, patch, patch_status};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass, VolumeAttachment};
use kube::api::PostParams;
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};

use crate::power::Power;

/// The driver of these tests.
pub(crate) const DRIVER: &str = "local.berth.dev";
/// The node of these tests.
pub(crate) const NODE: &str = "node-a";

/// A cluster with the node of these tests, on which the driver is registered.
pub(crate) struct Server(TestCluster);

impl Deref for Server {
    type Target = TestCluster;

    fn deref(&self) -> &TestCluster {
        &self.0
    }
}

impl Server {
    pub(crate) async fn start() -> Self {
        let server = Self(TestCluster::embedded().await);
        let labels = json!({ "topology.berth.dev/node": NODE });
        server.create::<Node>(json!({ "metadata": { "name": NODE, "labels": labels } })).await;
        let driver = json!({ "name": DRIVER, "nodeID": NODE, "topologyKeys": ["topology.berth.dev/node"] });
        server
            .create::<CSINode>(json!({ "metadata": { "name": NODE }, "spec": { "drivers": [driver] } }))
            .await;
        server
    }

    pub(crate) fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), "default")
    }

    pub(crate) async fn class(&self, name: &str, change: Value) -> StorageClass {
        let mut class =
            json!({ "metadata": { "name": name }, "provisioner": DRIVER, "reclaimPolicy": "Delete" });
        merge(&mut class, change);
        self.create(class).await
    }

    /// A claim that was handed to the driver.
    pub(crate) async fn claim(&self, name: &str, class: &str, change: Value) -> PersistentVolumeClaim {
        let mut claim = json!({
            "metadata": {
                "name": name,
                "annotations": { "volume.kubernetes.io/storage-provisioner": DRIVER },
            },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": class,
                "resources": { "requests": { "storage": "16Mi" } },
            },
        });
        merge(&mut claim, change);
        let claim = serde_json::from_value(claim).unwrap();
        self.claims().create(&PostParams::default(), &claim).await.unwrap()
    }

    pub(crate) async fn attachment(&self, name: &str, volume: &str) -> VolumeAttachment {
        self.create(json!({
            "metadata": { "name": name },
            "spec": { "attacher": DRIVER, "nodeName": NODE, "source": { "persistentVolumeName": volume } },
        }))
        .await
    }

    /// What the PV controller does when it binds.
    pub(crate) async fn bind(&self, claim: &str) -> PersistentVolume {
        let claim = self.claims().get(claim).await.unwrap();
        let volume = format!("pvc-{}", claim.uid().unwrap());
        patch(&self.claims(), &claim.name_any(), json!({ "spec": { "volumeName": volume } })).await;
        let volume = self.all::<PersistentVolume>().get(&volume).await.unwrap();
        let capacity = volume.spec.as_ref().unwrap().capacity.clone();
        patch_status(
            &self.claims(),
            &claim.name_any(),
            json!({ "status": { "phase": "Bound", "capacity": capacity } }),
        )
        .await;
        patch_status(
            &self.all::<PersistentVolume>(),
            &volume.name_any(),
            json!({ "status": { "phase": "Bound" } }),
        )
        .await
    }

    /// What the PV controller and the protection controller do when the claim is gone.
    pub(crate) async fn release(&self, volume: &str) {
        let api = self.all::<PersistentVolume>();
        patch_status(&api, volume, json!({ "status": { "phase": "Released" } })).await;
        // Others write finalizers at the same time: only if the list is still the same.
        while let Some(mut now) = api.get_opt(volume).await.unwrap() {
            now.finalizers_mut().retain(|finalizer| finalizer != "kubernetes.io/pv-protection");
            match api.replace(volume, &PostParams::default(), &now).await {
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(kube::Error::Api(status)) if status.code == 404 => break,
                replaced => {
                    replaced.unwrap();
                    break;
                }
            }
        }
    }

    /// The volume of a claim, once it is saved.
    pub(crate) async fn provisioned(&self, claim: &PersistentVolumeClaim) -> PersistentVolume {
        let name = format!("pvc-{}", claim.uid().unwrap());
        self.wait(self.all(), &name, "saved", |volume: Option<&PersistentVolume>| volume.is_some())
            .await
            .unwrap()
    }
}

/// Berth's local driver, with volumes in a directory.
pub(crate) async fn local_driver(directory: &Path, attach: bool) -> (Local, Driver) {
    let mut config = local::Config::new(directory.join("data"), NODE.parse().unwrap());
    config.kind = Some(Kind::Dir);
    config.attachment = attach;
    let backend = Local::open(config).await.unwrap();
    let driver = backend.driver(DRIVER, "test", Mode::Controller).open(Config::new(directory)).unwrap();
    let calls = berth_csi::in_process(driver.routes(), &CallLayer::new(Metrics::unregistered(DRIVER), None));
    (backend, Driver::in_process(calls))
}

/// A connection to a fake driver, whose calls count as steps of a life with this power.
pub(crate) fn connect(fake: &Arc<FakeDriver>, power: &Power) -> Driver {
    let layer = CallLayer::new(Metrics::unregistered(DRIVER), None);
    Driver::in_process(berth_csi::in_process(power.calls(fake.routes()), &layer))
}

/// Quick retries, so that tests of failures take no seconds.
pub(crate) const RETRY: Backoff =
    Backoff { first: Duration::from_millis(5), longest: Duration::from_millis(200) };

/// Starts provisioner, attacher and resizer.
pub(crate) fn start_components(client: &Client, driver: &Driver) -> Loops {
    start_components_with(client, driver, |_, _, _| {})
}

/// Starts provisioner, attacher and resizer with other options.
pub(crate) fn start_components_with(
    client: &Client,
    driver: &Driver,
    change: impl FnOnce(&mut provisioner::Options, &mut attacher::Options, &mut resizer::Options),
) -> Loops {
    let mut provisioning = provisioner::Options { retry: RETRY, ..provisioner::Options::default() };
    let mut attaching = attacher::Options { retry: RETRY, ..attacher::Options::default() };
    let mut resizing = resizer::Options { retry: RETRY, ..resizer::Options::default() };
    change(&mut provisioning, &mut attaching, &mut resizing);
    Loops::new(client)
        .with(|cluster| provisioner::run(cluster, driver.clone(), provisioning))
        .with(|cluster| attacher::run(cluster, driver.clone(), attaching))
        .with(|cluster| resizer::run(cluster, driver.clone(), resizing))
}
