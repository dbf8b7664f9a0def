//! Words for tests of snapshots: the kinds, the components that serve them, objects, and what to wait for.

use std::time::Duration;

use berth_sidecars::driver::Driver;
use berth_sidecars::snapshots::{
    self, VolumeGroupSnapshot, VolumeGroupSnapshotClass, VolumeGroupSnapshotContent, VolumeSnapshot,
    VolumeSnapshotClass, VolumeSnapshotContent,
};
use berth_sidecars::{provisioner, snapshot_controller, snapshotter};
use berth_testkit::{Loops, merge, patch_status};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};

use crate::bench::{DRIVER, RETRY, Server};

/// Starts the provisioner and the two snapshot components.
pub(crate) fn start_snapshotting(client: &Client, driver: &Driver) -> Loops {
    start_snapshotting_with(client, driver, |_, _| {})
}

/// Starts the provisioner and the two snapshot components with other options.
pub(crate) fn start_snapshotting_with(
    client: &Client,
    driver: &Driver,
    change: impl FnOnce(&mut snapshotter::Options, &mut snapshot_controller::Options),
) -> Loops {
    let provisioning = provisioner::Options { retry: RETRY, ..provisioner::Options::default() };
    let mut taking = snapshotter::Options {
        retry: RETRY,
        poll: (Duration::from_millis(5), Duration::from_millis(50)),
        kinds: Duration::from_millis(50),
        ..snapshotter::Options::default()
    };
    let mut binding = snapshot_controller::Options {
        retry: RETRY,
        kinds: Duration::from_millis(50),
        ..snapshot_controller::Options::default()
    };
    change(&mut taking, &mut binding);
    Loops::new(client)
        .with(|cluster| provisioner::run(cluster, driver.clone(), provisioning))
        .with(|cluster| snapshotter::run(cluster, driver.clone(), taking))
        .with(|cluster| snapshot_controller::run(cluster, binding))
}

impl Server {
    /// Makes the snapshot kinds known.
    pub(crate) async fn define(&self) {
        let kind = GroupVersionKind::gvk("apiextensions.k8s.io", "v1", "CustomResourceDefinition");
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &ApiResource::from_gvk(&kind));
        for definition in snapshots::definitions() {
            let definition = serde_json::from_value(definition).unwrap();
            api.create(&PostParams::default(), &definition).await.unwrap();
        }
    }

    pub(crate) fn snapshots(&self) -> Api<VolumeSnapshot> {
        Api::namespaced(self.client.clone(), "default")
    }

    pub(crate) fn groups(&self) -> Api<VolumeGroupSnapshot> {
        Api::namespaced(self.client.clone(), "default")
    }

    /// A class of snapshots; the default one.
    pub(crate) async fn snapshot_class(&self, name: &str, change: Value) -> VolumeSnapshotClass {
        let mut class = json!({
            "apiVersion": "snapshot.storage.k8s.io/v1",
            "kind": "VolumeSnapshotClass",
            "metadata": {
                "name": name,
                "annotations": { "snapshot.storage.kubernetes.io/is-default-class": "true" },
            },
            "driver": DRIVER,
            "deletionPolicy": "Delete",
        });
        merge(&mut class, change);
        self.create(class).await
    }

    /// A class of groups; the default one.
    pub(crate) async fn group_class(&self, name: &str, change: Value) -> VolumeGroupSnapshotClass {
        let mut class = json!({
            "apiVersion": "groupsnapshot.storage.k8s.io/v1",
            "kind": "VolumeGroupSnapshotClass",
            "metadata": {
                "name": name,
                "annotations": { "groupsnapshot.storage.kubernetes.io/is-default-class": "true" },
            },
            "driver": DRIVER,
            "deletionPolicy": "Delete",
        });
        merge(&mut class, change);
        self.create(class).await
    }

    /// A snapshot of a claim.
    pub(crate) async fn snapshot(&self, name: &str, claim: &str) -> VolumeSnapshot {
        self.snapshot_of(name, json!({ "source": { "persistentVolumeClaimName": claim } })).await
    }

    pub(crate) async fn snapshot_of(&self, name: &str, spec: Value) -> VolumeSnapshot {
        let object = json!({
            "apiVersion": "snapshot.storage.k8s.io/v1",
            "kind": "VolumeSnapshot",
            "metadata": { "name": name },
            "spec": spec,
        });
        let object = serde_json::from_value(object).unwrap();
        self.snapshots().create(&PostParams::default(), &object).await.unwrap()
    }

    pub(crate) async fn group(&self, name: &str, spec: Value) -> VolumeGroupSnapshot {
        let object = json!({
            "apiVersion": "groupsnapshot.storage.k8s.io/v1",
            "kind": "VolumeGroupSnapshot",
            "metadata": { "name": name },
            "spec": spec,
        });
        let object = serde_json::from_value(object).unwrap();
        self.groups().create(&PostParams::default(), &object).await.unwrap()
    }

    /// A content that a person made.
    pub(crate) async fn content(&self, name: &str, spec: Value) -> VolumeSnapshotContent {
        let mut all = json!({ "driver": DRIVER, "deletionPolicy": "Delete" });
        merge(&mut all, spec);
        self.create(json!({
            "apiVersion": "snapshot.storage.k8s.io/v1",
            "kind": "VolumeSnapshotContent",
            "metadata": { "name": name },
            "spec": all,
        }))
        .await
    }

    /// A content of a group that a person made, of the driver's ids; its VolumeGroupSnapshot has the same name.
    pub(crate) async fn group_content(
        &self,
        name: &str,
        group: &str,
        members: &[String],
    ) -> VolumeGroupSnapshotContent {
        let handles = json!({ "volumeGroupSnapshotHandle": group, "volumeSnapshotHandles": members });
        self.create(json!({
            "apiVersion": "groupsnapshot.storage.k8s.io/v1",
            "kind": "VolumeGroupSnapshotContent",
            "metadata": { "name": name },
            "spec": {
                "driver": DRIVER,
                "deletionPolicy": "Retain",
                "source": { "groupSnapshotHandles": handles },
                "volumeGroupSnapshotRef": { "name": name, "namespace": "default" },
            },
        }))
        .await
    }

    /// A snapshot, once it is ready.
    pub(crate) async fn ready(&self, name: &str) -> VolumeSnapshot {
        self.wait(self.snapshots(), name, "ready", is_ready).await.unwrap()
    }

    /// A group, once it is ready.
    pub(crate) async fn group_ready(&self, name: &str) -> VolumeGroupSnapshot {
        let ready = |group: Option<&VolumeGroupSnapshot>| {
            group
                .and_then(|group| group.status.as_ref())
                .is_some_and(|status| status.ready_to_use == Some(true))
        };
        self.wait(self.groups(), name, "ready", ready).await.unwrap()
    }

    /// A claim with a volume, bound.
    pub(crate) async fn bound_claim(&self, name: &str, class: &str, change: Value) -> String {
        let claim = self.claim(name, class, change).await;
        let volume = self.provisioned(&claim).await.metadata.name.unwrap();
        self.bind(name).await;
        volume
    }

    /// The contents that there are.
    pub(crate) async fn contents(&self) -> Vec<VolumeSnapshotContent> {
        self.all::<VolumeSnapshotContent>().list(&kube::api::ListParams::default()).await.unwrap().items
    }

    /// The contents of groups that there are.
    pub(crate) async fn group_contents(&self) -> Vec<VolumeGroupSnapshotContent> {
        self.all::<VolumeGroupSnapshotContent>().list(&kube::api::ListParams::default()).await.unwrap().items
    }
}

pub(crate) fn is_ready(snapshot: Option<&VolumeSnapshot>) -> bool {
    snapshot
        .and_then(|snapshot| snapshot.status.as_ref())
        .is_some_and(|status| status.ready_to_use == Some(true))
}

/// Whether an object is gone.
pub(crate) fn gone<K>(object: Option<&K>) -> bool {
    object.is_none()
}

/// A restore: a claim whose data comes from a snapshot.
pub(crate) fn from_snapshot(name: &str) -> Value {
    json!({ "spec": { "dataSource": {
        "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": name,
    } } })
}

impl Server {
    /// A claim with a volume, both made by hand and bound.
    pub(crate) async fn made_claim(&self, name: &str) {
        let claim = self.made_claim_without_volume(name).await;
        self.made_volume(&claim).await;
    }

    /// A claim, made by hand, that says that it is bound to a volume which is not there.
    pub(crate) async fn made_claim_without_volume(&self, name: &str) -> PersistentVolumeClaim {
        let claim = json!({
            "metadata": { "name": name, "labels": { "app": "db" } },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": "",
                "volumeName": format!("pv-{name}"),
                "resources": { "requests": { "storage": "1Mi" } },
            },
        });
        let claim = serde_json::from_value(claim).unwrap();
        self.claims().create(&PostParams::default(), &claim).await.unwrap();
        patch_status(&self.claims(), name, json!({ "status": { "phase": "Bound" } })).await
    }

    /// The volume that a claim made by hand says that it is bound to.
    pub(crate) async fn made_volume(&self, claim: &PersistentVolumeClaim) {
        let name = claim.name_any();
        self.create::<PersistentVolume>(json!({
            "metadata": { "name": format!("pv-{name}") },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "capacity": { "storage": "1Mi" },
                "claimRef": { "name": name, "namespace": "default", "uid": claim.uid() },
                "csi": { "driver": DRIVER, "volumeHandle": format!("id-{name}") },
            },
        }))
        .await;
    }
}
