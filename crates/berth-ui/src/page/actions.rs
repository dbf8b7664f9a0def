//! What the page may change where it is allowed to: expand, snapshot, clone and delete a claim, with the rights that the page was started with.

use berth_kube::snapshots::{VolumeSnapshot, VolumeSnapshotSource, VolumeSnapshotSpec};
use berth_kube::storage::requested;
use berth_kube::{Cluster, Key};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, TypedLocalObjectReference};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;
use kube::api::{DeleteParams, Preconditions};
use serde::Deserialize;

/// What a viewer asks for.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase", tag = "action", deny_unknown_fields)]
pub(super) enum Action {
    Expand { id: String, size: String },
    Snapshot { id: String, name: String },
    Clone { id: String, name: String },
    Delete { id: String, confirm: String },
}

/// Why something was not done, with the status of the answer.
pub(super) type Refusal = (u16, String);

/// Does it; gives a sentence that says what was done.
pub(super) async fn act(cluster: &Cluster, action: &Action) -> Result<String, Refusal> {
    let (Action::Expand { id, .. }
    | Action::Snapshot { id, .. }
    | Action::Clone { id, .. }
    | Action::Delete { id, .. }) = action;
    let (namespace, name) = id
        .split_once('/')
        .filter(|(namespace, _)| !namespace.is_empty())
        .ok_or_else(|| (400, format!("{id:?} is no claim")))?;
    let claim = cluster
        .fetch::<PersistentVolumeClaim>(&Key::new(namespace, name))
        .await
        .map_err(|error| said(&error))?;
    let claim = claim.ok_or_else(|| (404, format!("There is no claim {id}.")))?;
    match action {
        Action::Expand { size, .. } => expand(cluster, &claim, size).await,
        Action::Snapshot { name, .. } => {
            let mut snapshot = VolumeSnapshot::new(
                name,
                VolumeSnapshotSpec {
                    source: VolumeSnapshotSource {
                        persistent_volume_claim_name: claim.metadata.name.clone(),
                        ..VolumeSnapshotSource::default()
                    },
                    ..VolumeSnapshotSpec::default()
                },
            );
            snapshot.metadata.namespace.clone_from(&claim.metadata.namespace);
            cluster.create(&snapshot).await.map_err(|error| said(&error))?;
            Ok(format!("The snapshot {name} is being taken."))
        }
        Action::Clone { name, .. } => {
            cluster.create(&copy_of(&claim, name)).await.map_err(|error| said(&error))?;
            Ok(format!("The claim {name} is being filled from {}.", claim.name_any()))
        }
        Action::Delete { confirm, .. } => {
            if *confirm != claim.name_any() {
                return Err((400, "The name that was typed is not the claim's.".to_owned()));
            }
            // Not another claim that took the name meanwhile.
            let preconditions = Preconditions { uid: claim.uid(), resource_version: None };
            let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
            cluster.delete_with(claim.as_ref(), &parameters).await.map_err(|error| said(&error))?;
            Ok(format!("The claim {id} is being deleted."))
        }
    }
}

async fn expand(cluster: &Cluster, claim: &PersistentVolumeClaim, size: &str) -> Result<String, Refusal> {
    let wanted: berth_core::Quantity =
        size.parse().map_err(|_| (400, format!("{size:?} is no size: write it as 20Gi.")))?;
    let asked = requested(claim);
    if wanted.thousandths() / 1000 <= asked {
        return Err((400, format!("{size} is not more than the claim asks for now: volumes only grow.")));
    }
    let grow = |claim: &mut PersistentVolumeClaim| {
        let resources = claim.spec.get_or_insert_default().resources.get_or_insert_default();
        resources.requests.get_or_insert_default().insert("storage".to_owned(), Quantity(size.to_owned()));
    };
    cluster.edit(claim, grow).await.map_err(|error| said(&error))?;
    Ok(format!("The claim {} asks for {size} now.", claim.name_any()))
}

/// A claim of the same class and size that is to be filled from this one.
fn copy_of(claim: &PersistentVolumeClaim, name: &str) -> PersistentVolumeClaim {
    let mut spec = claim.spec.clone().unwrap_or_default();
    spec.volume_name = None;
    spec.data_source_ref = None;
    spec.selector = None;
    spec.data_source = Some(TypedLocalObjectReference {
        api_group: None,
        kind: "PersistentVolumeClaim".to_owned(),
        name: claim.name_any(),
    });
    PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: claim.namespace(),
            ..ObjectMeta::default()
        },
        spec: Some(spec),
        status: None,
    }
}

/// What the API server said, as it said it.
fn said(error: &berth_kube::Error) -> Refusal {
    (error.status().unwrap_or(502), error.chain())
}
