//! The objects that are there from the start: the drivers', and their classes.

use berth_core::names;
use futures_util::future::try_join_all;
use k8s_openapi::Resource as _;
use k8s_openapi::api::storage::v1::{CSIDriver, StorageClass};
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

/// The StorageClass that claims get which name none.
pub(crate) const CLASS: &str = "berth-local";

/// The objects of one driver.
pub(crate) struct Objects {
    /// Its CSIDriver. A driver under a name of one's own has none: it is used as one's own object says, or as Kubernetes
    /// assumes where there is none.
    pub(crate) driver: Option<Value>,
    pub(crate) classes: Vec<Value>,
    pub(crate) snapshot_classes: Vec<Value>,
}

/// Creates what is missing. What a person changed stays changed, except for the drivers' own objects (CSIDriver), which
/// describe this version of the driver.
pub(crate) async fn ensure(client: Client, drivers: Vec<Objects>) -> Result<(), kube::Error> {
    let client = &client;
    let definitions = async {
        let definitions = berth_sidecars::snapshots::definitions();
        try_join_all(definitions.into_iter().map(|definition| create(client, definition))).await?;
        let classes = drivers.iter().flat_map(|driver| &driver.snapshot_classes);
        try_join_all(classes.map(|class| create(client, class.clone()))).await
    };
    let classes = try_join_all(
        drivers.iter().flat_map(|driver| &driver.classes).map(|class| create(client, class.clone())),
    );
    let applied = try_join_all(
        drivers.iter().filter_map(|driver| driver.driver.as_ref()).map(|driver| apply(client, driver)),
    );
    tokio::try_join!(applied, classes, definitions)?;
    Ok(())
}

/// The object that says how Kubernetes uses a driver.
pub(crate) fn csi_driver(name: &str, attached: bool) -> Value {
    json!({
        "apiVersion": CSIDriver::API_VERSION,
        "kind": CSIDriver::KIND,
        "metadata": { "name": name },
        "spec": {
            "attachRequired": attached,
            "podInfoOnMount": attached,
            "fsGroupPolicy": "File",
            "volumeLifecycleModes": ["Persistent", "Ephemeral"],
        },
    })
}

/// The same for the disks of a cloud, as upstream's manifests say it: attached, and without volumes of a pod's own. How many a
/// node can have is asked again now and then.
pub(crate) fn cloud_disk_driver(name: &str) -> Value {
    let mut object = csi_driver(name, true);
    object["spec"]["volumeLifecycleModes"] = json!(["Persistent"]);
    object["spec"]["nodeAllocatableUpdatePeriodSeconds"] = json!(600);
    object
}

/// The class of claims that name none.
pub(crate) fn default_storage_class(driver: &str) -> Value {
    json!({
        "apiVersion": StorageClass::API_VERSION,
        "kind": StorageClass::KIND,
        "metadata": { "name": CLASS, "annotations": { names::DEFAULT_CLASS: "true" } },
        "provisioner": driver,
        "volumeBindingMode": "WaitForFirstConsumer",
        "allowVolumeExpansion": true,
    })
}

/// The class of a driver's snapshots that name none.
pub(crate) fn snapshot_class(name: &str, driver: &str) -> Value {
    deleting_class(
        "snapshot.storage.k8s.io",
        "VolumeSnapshotClass",
        name,
        names::snapshots::DEFAULT_CLASS,
        driver,
    )
}

/// The class of a driver's group snapshots that name none.
pub(crate) fn group_snapshot_class(name: &str, driver: &str) -> Value {
    deleting_class(
        "groupsnapshot.storage.k8s.io",
        "VolumeGroupSnapshotClass",
        name,
        names::snapshots::DEFAULT_GROUP_CLASS,
        driver,
    )
}

fn deleting_class(group: &str, kind: &str, name: &str, default: &str, driver: &str) -> Value {
    json!({
        "apiVersion": format!("{group}/v1"),
        "kind": kind,
        "metadata": { "name": name, "annotations": { default: "true" } },
        "driver": driver,
        "deletionPolicy": "Delete",
    })
}

async fn apply(client: &Client, object: &Value) -> Result<(), kube::Error> {
    let object: DynamicObject = serde_json::from_value(object.clone()).map_err(kube::Error::SerdeError)?;
    let name = object.metadata.name.clone().unwrap_or_default();
    let parameters = PatchParams::apply("berth").force();
    api(client, &object).patch(&name, &parameters, &Patch::Apply(&object)).await?;
    Ok(())
}

async fn create(client: &Client, object: Value) -> Result<(), kube::Error> {
    let object: DynamicObject = serde_json::from_value(object).map_err(kube::Error::SerdeError)?;
    match api(client, &object).create(&PostParams::default(), &object).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
        Err(error) => Err(error),
    }
}

fn api(client: &Client, object: &DynamicObject) -> Api<DynamicObject> {
    let types = object.types.clone().unwrap_or_default();
    let (group, version) = types.api_version.split_once('/').unwrap_or(("", &types.api_version));
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &types.kind));
    Api::all_with(client.clone(), &resource)
}

#[cfg(test)]
mod tests;
