//! A driver that comes to be known on a node after its volumes are to be attached there.

use std::time::Duration;

use berth_kube::Backoff;
use berth_testkit::FakeDriver;
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::{CSINode, VolumeAttachment};
use serde_json::json;

use crate::bench::{DRIVER, Server, connect, start_components_with};
use crate::power::Power;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attachment_goes_on_as_soon_as_its_node_knows_the_driver() {
    let (server, fake) = (Server::start().await, FakeDriver::new(DRIVER));
    let hour = Duration::from_hours(1);
    let components =
        start_components_with(&server.client, &connect(&fake, &Power::on()), |_, attaching, _| {
            attaching.retry = Backoff { first: hour, longest: hour };
        });
    server
        .create::<PersistentVolume>(json!({
            "metadata": { "name": "v" },
            "spec": {
                "accessModes": ["ReadWriteOnce"], "capacity": { "storage": "1Gi" },
                "csi": { "driver": DRIVER, "volumeHandle": "h" },
            },
        }))
        .await;
    server
        .create::<VolumeAttachment>(json!({
            "metadata": { "name": "at" },
            "spec": { "attacher": DRIVER, "nodeName": "late", "source": { "persistentVolumeName": "v" } },
        }))
        .await;
    let refused = |object: Option<&VolumeAttachment>| {
        let error =
            object.and_then(|object| object.status.as_ref()?.attach_error.as_ref()?.message.as_deref());
        error.is_some_and(|error| error.contains("CSINode late does not contain driver"))
    };
    server.wait(server.all(), "at", "refused", refused).await;
    let driver = json!({ "name": DRIVER, "nodeID": "id-of-late" });
    server
        .create::<CSINode>(json!({ "metadata": { "name": "late" }, "spec": { "drivers": [driver] } }))
        .await;
    let attached = |object: Option<&VolumeAttachment>| {
        object.and_then(|object| object.status.as_ref()).is_some_and(|status| status.attached)
    };
    server.wait(server.all(), "at", "attached", attached).await;
    assert!(fake.storage.attached.lock().contains(&("h".to_owned(), "id-of-late".to_owned())));
    components.stop().await;
}
