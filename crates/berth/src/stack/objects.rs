//! The objects that are there from the start: the local driver's, and its classes.

use futures_util::future::try_join_all;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use berth_core::names;

/// The default class.
pub(crate) const CLASS: &str = "berth-local";

/// Creates what is missing. What a person changed stays changed, except for the driver's own object, which tells how
/// this version of the driver wants to be used.
pub(crate) async fn ensure(client: Client) -> Result<(), kube::Error> {
    let client = &client;
    let definitions = berth_sidecars::snapshots::definitions().into_iter().map(|definition| {
        create(client, "apiextensions.k8s.io", "v1", "CustomResourceDefinition", definition)
    });
    let snapshots = async {
        try_join_all(definitions).await?;
        let (one, group) = (
            snapshot_class("snapshot", "VolumeSnapshotClass"),
            snapshot_class("groupsnapshot", "VolumeGroupSnapshotClass"),
        );
        tokio::try_join!(
            create(client, "snapshot.storage.k8s.io", "v1", "VolumeSnapshotClass", one),
            create(client, "groupsnapshot.storage.k8s.io", "v1", "VolumeGroupSnapshotClass", group),
        )
    };
    let class = create(client, "storage.k8s.io", "v1", "StorageClass", storage_class());
    tokio::try_join!(driver(client), class, snapshots)?;
    Ok(())
}

async fn driver(client: &Client) -> Result<(), kube::Error> {
    let driver = json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "CSIDriver",
        "metadata": { "name": names::LOCAL_DRIVER },
        "spec": {
            "attachRequired": true,
            "podInfoOnMount": true,
            "fsGroupPolicy": "File",
            "volumeLifecycleModes": ["Persistent", "Ephemeral"],
        },
    });
    let parameters = PatchParams::apply("berth").force();
    let api = api(client, "storage.k8s.io", "v1", "CSIDriver");
    api.patch(names::LOCAL_DRIVER, &parameters, &Patch::Apply(driver)).await?;
    Ok(())
}

fn storage_class() -> Value {
    json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": { "name": CLASS, "annotations": { "storageclass.kubernetes.io/is-default-class": "true" } },
        "provisioner": names::LOCAL_DRIVER,
        "volumeBindingMode": "WaitForFirstConsumer",
        "allowVolumeExpansion": true,
    })
}

/// The default class of snapshots or of groups of them, by the first word of the kind's API group.
fn snapshot_class(group: &str, kind: &str) -> Value {
    let default = format!("{group}.storage.kubernetes.io/is-default-class");
    json!({
        "apiVersion": format!("{group}.storage.k8s.io/v1"),
        "kind": kind,
        "metadata": { "name": CLASS, "annotations": { default: "true" } },
        "driver": names::LOCAL_DRIVER,
        "deletionPolicy": "Delete",
    })
}

async fn create(
    client: &Client,
    group: &str,
    version: &str,
    kind: &str,
    object: Value,
) -> Result<(), kube::Error> {
    let object: DynamicObject = serde_json::from_value(object).map_err(kube::Error::SerdeError)?;
    match api(client, group, version, kind).create(&PostParams::default(), &object).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
        Err(error) => Err(error),
    }
}

fn api(client: &Client, group: &str, version: &str, kind: &str) -> Api<DynamicObject> {
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
    Api::all_with(client.clone(), &resource)
}
