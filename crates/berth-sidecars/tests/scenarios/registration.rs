//! A driver that comes to be known on a node after its volumes are to be attached there.

use std::sync::Arc;
use std::time::Duration;

use berth_kube::Backoff;
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::{CSINode, VolumeAttachment};
use serde_json::json;

use crate::bench::{Components, DRIVER, Server};
use crate::fake::{Fake, Storage};
use crate::power::Power;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attachment_goes_on_as_soon_as_its_node_knows_the_driver() {
    let (server, storage) = (Server::start().await, Arc::new(Storage::default()));
    let hour = Duration::from_hours(1);
    let components =
        Components::start_with(&server.client, &Fake::driver(&storage, &Power::on()), |_, attaching, _| {
            attaching.retry = Backoff { first: hour, longest: hour };
        });
    server
        .apply::<PersistentVolume>(json!({
            "metadata": { "name": "v" },
            "spec": {
                "accessModes": ["ReadWriteOnce"], "capacity": { "storage": "1Gi" },
                "csi": { "driver": DRIVER, "volumeHandle": "h" },
            },
        }))
        .await;
    server
        .apply::<VolumeAttachment>(json!({
            "metadata": { "name": "at" },
            "spec": { "attacher": DRIVER, "nodeName": "late", "source": { "persistentVolumeName": "v" } },
        }))
        .await;
    let refused = |object: Option<&VolumeAttachment>| {
        let error =
            object.and_then(|object| object.status.as_ref()?.attach_error.as_ref()?.message.as_deref());
        error.is_some_and(|error| error.contains("CSINode late does not contain driver"))
    };
    server.wait(server.api(), "at", "refused", refused).await;
    let driver = json!({ "name": DRIVER, "nodeID": "id-of-late" });
    server.apply::<CSINode>(json!({ "metadata": { "name": "late" }, "spec": { "drivers": [driver] } })).await;
    let attached = |object: Option<&VolumeAttachment>| {
        object.and_then(|object| object.status.as_ref()).is_some_and(|status| status.attached)
    };
    server.wait(server.api(), "at", "attached", attached).await;
    assert!(storage.attached.lock().contains(&("h".to_owned(), "id-of-late".to_owned())));
    components.stop().await;
}
