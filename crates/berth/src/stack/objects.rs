//! The objects that are there from the start: the drivers', and their classes.

use futures_util::future::try_join_all;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use berth_core::names;

use super::drivers::Choice;

/// The default class.
pub(crate) const CLASS: &str = "berth-local";
/// The class of snapshots on NFS servers; which server volumes are on, only a person knows.
const NFS_CLASS: &str = "berth-nfs";

/// Creates what is missing. What a person changed stays changed, except for the drivers' own objects, which tell how
/// this version of them wants to be used.
pub(crate) async fn ensure(client: Client, drivers: Vec<Choice>) -> Result<(), kube::Error> {
    let client = &client;
    let definitions = berth_sidecars::snapshots::definitions().into_iter().map(|definition| {
        create(client, "apiextensions.k8s.io", "v1", "CustomResourceDefinition", definition)
    });
    let definitions = async {
        try_join_all(definitions).await?;
        try_join_all(drivers.iter().map(|driver| snapshot_classes(client, driver))).await
    };
    let objects = try_join_all(drivers.iter().map(|choice| driver(client, choice)));
    let class = async {
        if drivers.contains(&Choice::Local) {
            create(client, "storage.k8s.io", "v1", "StorageClass", storage_class()).await?;
        }
        Ok(())
    };
    tokio::try_join!(objects, class, definitions)?;
    Ok(())
}

async fn snapshot_classes(client: &Client, driver: &Choice) -> Result<(), kube::Error> {
    let one = snapshot_class("snapshot", "VolumeSnapshotClass", driver);
    create(client, "snapshot.storage.k8s.io", "v1", "VolumeSnapshotClass", one).await?;
    // No two directories of a server can be copied at the same instant.
    if *driver == Choice::Local {
        let group = snapshot_class("groupsnapshot", "VolumeGroupSnapshotClass", driver);
        create(client, "groupsnapshot.storage.k8s.io", "v1", "VolumeGroupSnapshotClass", group).await?;
    }
    Ok(())
}

async fn driver(client: &Client, choice: &Choice) -> Result<(), kube::Error> {
    let name = choice.name();
    // A driver under a name of one's own is used as one's own object says, or as Kubernetes assumes where there is none.
    if ![names::LOCAL_DRIVER, names::NFS_DRIVER].contains(&name) {
        return Ok(());
    }
    // Whatever can be mounted from everywhere need not be attached first.
    let is_local = *choice == Choice::Local;
    let driver = json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "CSIDriver",
        "metadata": { "name": name },
        "spec": {
            "attachRequired": is_local,
            "podInfoOnMount": is_local,
            "fsGroupPolicy": "File",
            "volumeLifecycleModes": ["Persistent", "Ephemeral"],
        },
    });
    let parameters = PatchParams::apply("berth").force();
    let api = api(client, "storage.k8s.io", "v1", "CSIDriver");
    api.patch(name, &parameters, &Patch::Apply(driver)).await?;
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
fn snapshot_class(group: &str, kind: &str, driver: &Choice) -> Value {
    let name = if *driver == Choice::Local { CLASS } else { NFS_CLASS };
    let default = format!("{group}.storage.kubernetes.io/is-default-class");
    json!({
        "apiVersion": format!("{group}.storage.k8s.io/v1"),
        "kind": kind,
        "metadata": { "name": name, "annotations": { default: "true" } },
        "driver": driver.name(),
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

#[cfg(test)]
mod tests;
